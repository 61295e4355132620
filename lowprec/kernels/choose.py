"""The one door to the kernels: it picks who makes a step, an average or codes. All write the same bits,
but for roots: torch's on an Intel CPU are MKL's, of which one in 160 has another last bit.

| asked for                           | served by                               | where                 |
|-------------------------------------|-----------------------------------------|-----------------------|
| a step of AdamW                     | triton_step                             | CUDA, with Triton     |
| a step of AdamW, SGD or Lion        | cpu_step, in C++                        | CPU with AVX2 and GCC |
| the write of Adafactor and Muon     | cpu_step                                | as above              |
| AdamW, weights and moments in fp32  | exact_step                              | any other CPU         |
| any other step                      | the kernel of `Rounded`, torch.compile  | where a compiler is   |
| a move of an average                | triton_step, cpu_step, or torch.compile | as above              |
| stochastic codes, but for flash8    | cpu_step, or torch.compile              | as above              |
| those of int8, within a step        | triton_step                             | CUDA, with Triton     |
| anything, with compiled=False       | the same torch code, eager              | anywhere              |
"""

import dataclasses
import functools

import torch

from ..rounding import StepAverage, ema_kernel, noise_bits, rounded
from . import cpu_step, exact_step
from .compiled import fused


def hand_written(rule):
    """Marks a `direction` that cpu_step and triton_step know under the name `rule`. The mark is on the
    function: a subclass with a direction of its own goes by torch.compile.
    """

    def mark(direction):
        direction.rule = rule
        return direction

    return mark


# ---- A step ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """One step of n weights and their state, which a kernel updates in place.

    direction: of the optimiser; kernel: the whole step in torch. weights, gradients: lists of tensors whose
    values follow each other in all else; cpu_step alone takes more than one. moments: fp32 or bf16 [n], or
    formats.Coded. low: what completes the weights, see rounding.exact_weight, or None. numbers: what
    `Rounded.numbers` said; row, key: those of a buckets.StepTable.
    """

    direction: object
    kernel: object
    weights: list
    gradients: list
    moments: list
    low: torch.Tensor | None
    numbers: tuple
    row: torch.Tensor
    key: torch.Tensor
    stochastic: bool
    average: StepAverage
    compiled: bool

    @property
    def rule(self):
        """The name under which hand-written kernels know the direction; None for one that they don't know."""
        return getattr(self.direction, "rule", None)

    @property
    def is_exact(self):
        """Whether the arithmetic is to round as that of torch.optim.AdamW: no moment is bf16, and no bf16
        weight is written by noise without an exact master.
        """
        if self.rule != "adamw":
            return False
        rounds = self.low is None or self.low.dtype in (torch.bfloat16, torch.int8)
        if self.stochastic and self.weights[0].dtype == torch.bfloat16 and rounds:
            return False
        return all(is_coded(moment) or moment.dtype == torch.float32 for moment in self.moments)


def is_coded(moment):
    """Whether a moment is a formats.Coded, and not a tensor."""
    return not torch.is_tensor(moment)


def step(s):
    """Carry out a `Step` by the first kernel of the table that can."""
    if by_cpu_step(s):
        return
    (p,), (g,) = s.weights, s.gradients
    triton = _triton_for([p], s.low, s.compiled) if s.rule == "adamw" else None
    moments = []
    for held in s.moments:
        is_read_here = is_coded(held) and (triton is None or not triton.has_codes(held))
        moments.append(held.decoded(p.numel(), s.compiled) if is_read_here else held)
    if triton is not None:
        exact = s.is_exact and exact_step.lerp_adds(s.numbers)
        triton.adamw(p, g, moments, s.low, s.row, s.key, s.stochastic, exact, s.average)
    elif s.is_exact and p.is_cpu:
        m, v = moments
        exact_step.adamw(p, g, m, v, s.low, s.row, s.numbers, s.average, s.compiled)
    else:
        arguments = (p, g, moments, s.low, s.row, s.key, s.stochastic, s.average)
        fused(s.kernel, *arguments, compiled=s.compiled)
    for held, value in zip(s.moments, moments, strict=True):
        if is_coded(held) and value is not held:
            held.encode(value, s.compiled)


def by_cpu_step(s):
    """Carry out a `Step` by cpu_step; returns whether that was possible."""
    if not s.compiled or s.rule is None or not cpu_step.fits(s.weights, s.gradients, s.low):
        return False
    moments = [m.for_cpu_step() if is_coded(m) else m for m in s.moments]
    if any(m is None for m in moments):
        return False
    exactly = {}
    if s.is_exact:
        if not exact_step.in_one_pass(s.numbers):
            return False
        floored = exact_step.smallest_root_vanishes(s.numbers.beta2, s.numbers.eps)
        exactly = {"exact": True, "floored": floored}
    arguments = (s.weights, s.gradients, moments, s.low, s.row, s.key, s.stochastic, s.average)
    cpu_step.update(s.rule, *arguments, **exactly)
    return True


@functools.cache
def _triton_step():
    """The module triton_step; None where there is no Triton."""
    try:
        from . import triton_step
    except ImportError:
        return None
    return triton_step


def _triton_for(flat, low, compiled):
    """The module triton_step where it can take these flat tensors; else None."""
    if not (flat[0].is_cuda and compiled):
        return None
    triton = _triton_step()
    if triton is None or not triton.fits(flat, low):
        return None
    return triton


# ---- An average --------------------------------------------------------------------------------------------


def move_average(average, weights, low, compiled):
    """Move a StepAverage towards `weights` [n] and their low part, in place."""
    triton = _triton_for([average.flat, weights], low, compiled)
    if triton is not None:
        triton.ema(average, weights, low)
    elif compiled and cpu_step.fits([weights], [average.flat], low):
        cpu_step.ema(average, weights, low)
    else:
        how = (average.share, average.key, average.stochastic)
        fused(ema_kernel, average.flat, weights, low, *how, compiled=compiled)


# ---- A vector ----------------------------------------------------------------------------------------------


def write(x, held, key, compiled):
    """Write fp32 x [n] into `held` [n]: into bf16 stochastically where there is a key of the noise, else to
    nearest.
    """
    if key is None or held.dtype != torch.bfloat16:
        held.copy_(x)
    elif compiled and cpu_step.fits([held], [x]):
        cpu_step.write(x, held, key)
    else:
        fused(_write_kernel, x, held, key, compiled=compiled)


def _write_kernel(x, held, key):
    held.copy_(rounded(x, held.dtype, noise_bits(x.numel(), key)[0]))


# ---- Codes -------------------------------------------------------------------------------------------------


def encode(kernel, coder, x, codes, scales, signed, key, compiled):
    """Write fp32 x [blocks, block] into codes and scales of a formats.TableFormat, stochastically. kernel:
    the same in torch.
    """
    taken = cpu_codes(coder, codes, scales, signed, key) if compiled else None
    if taken is not None:
        cpu_step.encode(x, taken)
    else:
        table, line = coder.table(signed, x.device), coder.line(signed, x.device)
        fused(kernel, x, codes, scales, table, line, key, compiled=compiled)


def cpu_codes(coder, codes, scales, signed, key):
    """Codes uint8 and scales of a format as cpu_step takes them, to be written by the noise of `key`; None
    where it can't.
    """
    if key is None or not codes.is_cpu or cpu_step.library() is None:
        return None
    if coder.mantissa:
        return cpu_step.Codes(codes, scales, key, signed, mantissa=coder.mantissa)
    line = coder.line(signed, codes.device)
    chart = None if line is None else cpu_step.chart_of(line)
    if chart is None:
        return None
    table = coder.table(signed, codes.device)
    return cpu_step.Codes(codes, scales, key, signed, coder.bits, table, chart)
