"""AdamW's step on a CPU with the bits of torch.optim.AdamW, where weights and moments are exact fp32.

    if takes(step):      # a kernels.Step
        run(step)        # in place

Two of torch's operations stand in the way of one fused kernel. Its lerp and addcmul round once where a
product is added; a compiled kernel has that as `prims.fma`. And torch.sqrt on a CPU may come from MKL, which
rounds some values to the other neighbour. So the step is three passes: moments, root, weights. Where it has
the same bits, `cpu_step` does all three in one: it takes roots as MKL does.
"""

import functools
import importlib
import threading
from typing import NamedTuple

import torch

from ..rounding import exact_weight, write_weight
from . import PLACE_OF_SCALE
from .compiled import BUILD_ERRORS, fused

VALUES_AT_ONCE = 1 << 21  # values whose root is held at once: 8 MiB
VALUES_IN_CACHE = 1 << 16  # that torch's single operations take at once, so that they stay in the cache
SMALLEST_NORMAL = 2.0**-126  # of fp32
FP32_ON_CPU = dict(dtype=torch.float32, device="cpu")  # whatever torch's defaults are


class Row(NamedTuple):
    """What stands in the row of a step of AdamW, in this order."""

    decay: float
    scale: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_correction: float
    eps: float
    rate: float


def takes(s):
    """Whether `run` can carry out a kernels.Step."""
    return s.exact and s.weights[0].is_cpu and len(s.weights) == 1


def run(s):
    """Carry out a kernels.Step on flat weights, in place."""
    (p,), (g,) = s.weights, s.gradients
    m, v = [held.read(s.compiled) for held in s.moments]
    one_rounding = s.compiled and lerp_adds(s.numbers) and rounds_once()
    floored = smallest_root_vanishes(s.numbers.beta2, s.numbers.eps)
    for start in range(0, p.numel(), VALUES_AT_ONCE):
        at = slice(start, start + VALUES_AT_ONCE)
        root = _kept_memory()[: v[at].numel()]
        if one_rounding:
            fused(_moment_kernel, g[at], m[at], v[at], root, s.row, floored)
            torch.sqrt(root, out=root)
        else:
            update_moments(g[at], m[at], v[at], s.row, s.numbers, root)
        low = [t[at] for t in s.low]
        fused(_weight_kernel, p[at], m[at], root, low, s.row, compiled=s.compiled)
    for held, values, key in zip(s.moments, (m, v), s.keys, strict=True):
        held.put_back(values, key, s.compiled)


def _kept_memory():
    """fp32 [VALUES_AT_ONCE], the same at each call: the system clears each page of new memory, which costs a
    pass.
    """
    if not hasattr(_of_thread, "root"):
        _of_thread.root = torch.empty(VALUES_AT_ONCE, **FP32_ON_CPU)
    return _of_thread.root


_of_thread = threading.local()


def update_moments(g, m, v, row, numbers, root):
    """Update m and v in place by torch's own operations, and write the root of v into `root`."""
    for start in range(0, v.numel(), VALUES_IN_CACHE):
        at = slice(start, start + VALUES_IN_CACHE)
        part = g[at].float() * row[PLACE_OF_SCALE]
        m[at].lerp_(part, numbers.one_minus_beta1)
        v[at].mul_(numbers.beta2).addcmul_(part, part, value=numbers.one_minus_beta2)
        torch.sqrt(v[at], out=root[at])


def _fma(a, b, c):
    """a * b + c, rounded once."""
    return torch.ops.prims.fma(a, b, c) if torch.compiler.is_compiling() else torch.addcmul(c, a, b)


def smallest_root_vanishes(beta2, eps):
    """Whether the root of SMALLEST_NORMAL, 2^-63, is lost when eps is added to it, at any step.

    Then v may be raised to it before its root is taken. MKL takes the roots of zeros 5 times as slowly as
    others, those of denormals 35 times, and v is zero wherever a weight has had no gradient, as the outer
    taps of a 3x3 kernel on an image of one pixel.
    """
    return eps * (1 - beta2) ** 0.5 > 2.0**-37  # 2^-63 / (1 - beta2)^(1/2) is below a quarter ulp of eps


def lerp_adds(numbers):
    """Whether torch's lerp forms exp_avg as old + (new - old) * share: from a share of one half on it goes by
    another formula.
    """
    return numbers.one_minus_beta1 < 0.5


def _moment_kernel(g, m, v, root, row, floored):
    n = Row(*row.unbind())
    g = g.float() * n.scale
    m.copy_(_fma(n.one_minus_beta1.expand_as(m), g - m, m))
    new = _fma(n.one_minus_beta2 * g, g, v * n.beta2)
    v.copy_(new)
    root.copy_(new.clamp(min=SMALLEST_NORMAL) if floored else new)


def _weight_kernel(p, m, root, low, row):
    n = Row(*row.unbind())
    update = (n.rate * m) / (root / n.root_correction + n.eps)
    write_weight(exact_weight(p, *low) * n.decay + update, p, *low)


NUMBERS_OF_TRIAL = Row(
    decay=1.0,
    scale=1.0,
    one_minus_beta1=1 - 0.9,
    beta2=0.999,
    one_minus_beta2=1 - 0.999,
    root_correction=1.0,
    eps=1.0,
    rate=0.0,
)


def trial_step():
    """(gradient, [m, v], row of NUMBERS_OF_TRIAL) of random values, to compare two ways to the moments."""
    draw = functools.partial(torch.randn, 1 << 12, generator=torch.Generator().manual_seed(0), **FP32_ON_CPU)
    row = torch.tensor(NUMBERS_OF_TRIAL, **FP32_ON_CPU)
    return draw(), [draw(), draw().square()], row


@functools.cache
def rounds_once():
    """Whether `_moment_kernel` has the bits of `update_moments` here, by torch and the compiler."""
    g, own, row = trial_step()
    theirs = [t.clone() for t in own]
    update_moments(g, *theirs, row, NUMBERS_OF_TRIAL, torch.empty_like(g))
    try:
        importlib.import_module("torch._inductor.inductor_prims")  # names prims.fma
        fused(_moment_kernel, g, *own, torch.empty_like(g), row, True)
    except (AttributeError, *BUILD_ERRORS):  # a torch that has no such operation
        return False
    return all(map(torch.equal, own, theirs))
