"""Who carries out a step, an average or codes: hand-written kernels where they can, each with the bits of the
torch code beside which it stands, but for roots: torch's on an Intel CPU are MKL's, of which one in 160 has
another last bit.

| asked for                           | served by                               | where                 |
|-------------------------------------|-----------------------------------------|-----------------------|
| a step of AdamW                     | triton_step                             | CUDA, with Triton     |
| a step of AdamW, SGD or Lion        | cpu_step, in C++                        | CPU with AVX2 and GCC |
| the write of Adafactor and Muon     | cpu_step                                | as above              |
| AdamW, weights and moments in fp32  | exact_step                              | any other CPU         |
| any other step                      | rounded.write_step, by torch.compile    | where a compiler is   |
| a move of an average                | triton_step, cpu_step, or torch.compile | as above              |
| stochastic codes, but for flash8    | cpu_step, or torch.compile              | as above              |
| those of int8, within a step        | triton_step                             | CUDA, with Triton     |
| anything, with compiled=False       | the same torch code, eager              | anywhere              |
"""

import dataclasses
import functools
import importlib
from typing import NamedTuple

import torch

from ..rounding import Way, ema_kernel, noise_bits, stochastic_round
from .compiled import fused

# ---- A step ------------------------------------------------------------------------------------------------

KERNELS = ("cpu_step", "triton_step", "exact_step")  # modules, in the order in which they are asked
RULES: dict = {}  # {direction of an optimiser: the name by which hand-written kernels know it}
PLACE_OF_SCALE = 1  # in a row: behind what multiplies the weight, before the numbers of the optimiser


@dataclasses.dataclass
class Step:
    """One step of n weights and their state, which a kernel updates in place.

    weights, gradients: lists of tensors whose values follow each other in all else; cpu_step alone takes more
    than one. moments: state.Held of n values each; keys: of the noise of their codes, None for the nearest
    ones. way: a rounding.Way; low: a list of its low part [n], or of none. rule: by which hand-written
    kernels know the optimiser, None for one that they don't. exact: whether the arithmetic is to round as
    torch.optim.AdamW's. numbers: what `Rounded.numbers` said. row: fp32, what multiplies the weight, what
    multiplies the gradient, and these numbers. key: int32 [3], see rounding.noise_bits.
    """

    rule: str | None
    exact: bool
    weights: list
    gradients: list
    moments: list
    keys: list
    way: Way
    low: list
    numbers: tuple
    row: torch.Tensor
    key: torch.Tensor
    stochastic: bool
    compiled: bool


class Operand(NamedTuple):
    """How a hand-written kernel reads and writes a moment. data: its values, or its codes, of which all that
    follows tells: bits of a code, codes to a scale, bits of the mantissa where they are floats, else what
    they stand for and the `formats.broken_line` of that. key: of their noise.
    """

    data: torch.Tensor
    bits: int = 0
    block: int = 0
    signed: bool = False
    mantissa: int = 0
    scales: torch.Tensor | None = None
    table: torch.Tensor | None = None
    line: torch.Tensor | None = None
    key: torch.Tensor | None = None


def carried_out(step):
    """Let the first kernel that takes a Step carry it out. Returns whether one did."""
    for name in KERNELS:
        kernel = _module(name)
        if kernel is not None and kernel.takes(step):
            kernel.run(step)
            return True
    return False


@functools.cache
def _module(name):
    """A module of this folder; None for triton_step where there is no Triton."""
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:
        return None


# ---- An average --------------------------------------------------------------------------------------------


def move_average(average, weights, low, way, share, key, stochastic, compiled):
    """As rounding.ema_kernel: move a flat average towards `weights` [n] and their low part, in place. low: a
    list of that [n], or of none; way: a rounding.Way.
    """
    how = share, key, stochastic
    triton = _module("triton_step") if average.is_cuda and compiled else None
    if triton is not None and triton.moves([average, weights], way):
        triton.ema(average, weights, low, *how)
    elif compiled and _module("cpu_step").fits([weights], [average], way):
        _module("cpu_step").ema(average, weights, low, *how)
    else:
        fused(ema_kernel, average, weights, low, *how, compiled=compiled)


# ---- A vector ----------------------------------------------------------------------------------------------


def write(x, held, key, compiled):
    """Write fp32 x [n] into `held` [n]: into bf16 stochastically where there is a key of the noise, else to
    nearest.
    """
    if key is None or held.dtype != torch.bfloat16:
        held.copy_(x)
    elif compiled and _module("cpu_step").fits([held], [x]):
        _module("cpu_step").write(x, held, key)
    else:
        fused(_write_kernel, x, held, key, compiled=compiled)


def _write_kernel(x, held, key):
    held.copy_(stochastic_round(x, noise_bits(x.numel(), key)[0]))


# ---- Codes -------------------------------------------------------------------------------------------------


def encode(kernel, coder, x, codes, scales, signed, key, compiled):
    """Write fp32 x [blocks, block] into codes and scales of a formats.TableFormat, stochastically. kernel:
    the same in torch.
    """
    operand = coder.operand(codes, scales, signed, key)
    if compiled and codes.is_cpu and _module("cpu_step").takes_operand(operand):
        _module("cpu_step").encode(x, operand)
    else:
        fused(kernel, x, codes, scales, operand.table, operand.line, key, compiled=compiled)
