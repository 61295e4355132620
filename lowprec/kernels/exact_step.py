"""AdamW's step on a CPU with the bits of torch.optim.AdamW, where weights and moments are exact fp32.

    adamw(p, g, m, v, low, h, betas, eps)   # flat, in place; h: the numbers of AdamW

Two of torch's operations stand in the way of one fused kernel. Its lerp and addcmul round once where a
product is added; a compiled kernel has that as `prims.fma`. And torch.sqrt on a CPU is not correctly rounded
where it comes from MKL (by the CPU, one value in 160 or in six differs in its last bit), while a compiled one
is. So the step is three passes: moments, root, weights. The root is written into memory that is kept: new
memory costs more than a pass, since the system clears each of its pages when it is first touched. Where
`in_one_pass` says so, `cpu_step` does all three in one: it takes roots as MKL does.
"""

import functools
import importlib
import threading

import torch

from ..rounding import exact_weight, move_along, part_of, write_weight
from . import cpu_step
from .compiled import fused

PIECE = 1 << 21  # values whose root is held at once: 8 MiB
INNER = 1 << 16  # values that torch's single operations take at once, so that they stay in the cache
SMALLEST = 2.0**-126  # normal number
PLAIN = dict(dtype=torch.float32, device="cpu")  # whatever torch's defaults are
DECAY, SCALE = 0, 1  # the first numbers of h: 1 - lr * weight decay, and the factor of the gradient


def adamw(p, g, m, v, low, h, betas, eps, average=None, compiled=True):
    """One step on flat p [n], fp32 m and v [n] and the low part, in place, from gradient g [n]. average: what
    moves along, see average.EMA.along.
    """
    one_rounding = compiled and betas[0] > 0.5 and rounds_once()
    floored = vanishes(betas[1], eps)
    for start in range(0, p.numel(), PIECE):
        at = slice(start, start + PIECE)
        root = _kept_memory()[: v[at].numel()]
        if one_rounding:
            fused(_moment_kernel, g[at], m[at], v[at], root, h, floored)
            torch.sqrt(root, out=root)
        else:
            moments(g[at], m[at], v[at], h, betas, root)
        part = None if low is None else low[at]
        fused(_weight_kernel, p[at], m[at], root, part, h, part_of(average, at), compiled=compiled)


def _kept_memory():
    if not hasattr(_of_thread, "root"):
        _of_thread.root = torch.empty(PIECE, **PLAIN)
    return _of_thread.root


_of_thread = threading.local()


def moments(g, m, v, h, betas, root):
    """Update m and v in place by torch's own operations, and write the root of v into `root`."""
    for start in range(0, v.numel(), INNER):
        at = slice(start, start + INNER)
        part = g[at].float() * h[SCALE]
        m[at].lerp_(part, 1 - betas[0])
        torch.sqrt(v[at].mul_(betas[1]).addcmul_(part, part, value=1 - betas[1]), out=root[at])


def _fma(a, b, c):
    """a * b + c, rounded once."""
    return torch.ops.prims.fma(a, b, c) if torch.compiler.is_compiling() else torch.addcmul(c, a, b)


def vanishes(beta2, eps):
    """Whether the root of SMALLEST, 2^-63, is lost when eps is added to it, at any step.

    Then v may be raised to it before its root is taken. MKL takes the roots of zeros 5 times as slowly as
    others, those of denormals 35 times, and v is zero wherever a weight has had no gradient, as the outer
    taps of a 3x3 kernel on an image of one pixel.
    """
    return eps * (1 - beta2) ** 0.5 > 2.0**-37  # 2^-63 / (1 - beta2)^(1/2) is below a quarter ulp of eps


def _moment_kernel(g, m, v, root, h, floored):
    g = g.float() * h[SCALE]
    m.copy_(_fma(h[2].expand_as(m), g - m, m))  # torch's lerp, of a weight below a half
    new = _fma(h[4] * g, g, v * h[3])
    v.copy_(new)
    root.copy_(new.clamp(min=SMALLEST) if floored else new)


def _weight_kernel(p, m, root, low, h, average):
    x = exact_weight(p, low) * h[DECAY] + (h[7] * m) / (root / h[5] + h[6])
    write_weight(x, p, low)
    move_along(average, x, p, low)


def in_one_pass(betas):
    """Whether `cpu_step.update` has the bits of `moments` here, for these betas."""
    return betas[0] > 0.5 and cpu_step.root() is not None and _known_to_cpu_step()


@functools.cache
def _known_to_cpu_step():
    g, own, h = _trial()
    theirs = [t.clone() for t in own]
    moments(g, *theirs, h, BETAS, torch.empty_like(g))
    p, key = torch.zeros_like(g), torch.zeros(3, dtype=torch.int32)
    cpu_step.update("adamw", [p], [g], own, None, h, key, False, exact=True)
    return all(map(torch.equal, own, theirs))


BETAS = 0.9, 0.999


def _trial():
    """(gradient, [m, v], numbers of a step) of some random values, to compare two ways to the moments."""
    draw = functools.partial(torch.randn, 1 << 12, generator=torch.Generator().manual_seed(0), **PLAIN)
    beta1, beta2 = BETAS
    numbers = torch.tensor([1, 1, 1 - beta1, beta2, 1 - beta2, 1, 1, 0], **PLAIN)
    return draw(), [draw(), draw().square()], numbers


@functools.cache
def rounds_once():
    """Whether `_moment_kernel` has the bits of `moments` here: that depends on torch and the compiler."""
    g, own, h = _trial()
    theirs = [t.clone() for t in own]
    moments(g, *theirs, h, BETAS, torch.empty_like(g))
    try:
        importlib.import_module("torch._inductor.inductor_prims")  # names prims.fma
        fused(_moment_kernel, g, *own, torch.empty_like(g), h, True)
    except (ImportError, AttributeError, RuntimeError):  # a torch that has no such operation
        return False
    return all(map(torch.equal, own, theirs))
