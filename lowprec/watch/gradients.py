"""The gradients of a step, backward pass after backward pass: whether they are summed well, cleared at the
right time, and left as they are until the step.
"""

import functools
import math

import torch

from .net_state import NARROW
from .writes import totals


class Partial:
    """The gradients of one tensor since a step."""

    def __init__(self, part, left):
        self.count = 1  # backward passes
        self.sum = part  # of their gradients, fp32 [n]
        self.left = left  # whether gradients were there before the first one
        self.cleared = 0  # passes whose gradients are gone
        self.times = 0  # how often they were cleared
        self.last = None  # sum of those since they were cleared; None where they never were


class Gradients:
    """Listens to the gradients of the step that follows, at some 16 tensors: what sums one of them sums all.

    named: [(name, parameter)]. pick: tensor -> its sample, [n].
    """

    def __init__(self, named, pick):
        self.named = named
        self.pick = pick
        self.partial = {}  # {number of a tensor: Partial}
        self.hooks = []
        self.sums = {}  # {number of a 16-bit tensor: (sum of relative errors, looks, passes of the last one)}
        self.shrunk = []  # (what is left of a gradient when a step begins, norm of all gradients then)
        self.forgotten = {}  # {number of a tensor: (passes whose gradients were cleared too early, of all)}
        self.uncleared = False  # whether gradients of earlier steps were still there

    def listen(self, turn):
        """Begin. turn: a number that chooses the 16-bit tensors, others each time."""
        self.partial = {}
        trained = [(i, p) for i, (_, p) in enumerate(self.named) if p.requires_grad]
        turns = 1 + len(trained) // 16
        for k, (i, p) in enumerate(trained):
            in_turn = p.dtype in NARROW and k % turns == turn % turns
            if k == 0 or in_turn:
                self.hooks.append(p.register_hook(functools.partial(self._hear, i, p)))

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def forget(self):
        """Forget what was heard since the last step."""
        self.stop()
        self.partial = {}

    @torch.no_grad()
    def _hear(self, i, p, g):
        if g.is_sparse:
            return
        part = self.pick(g).float().clone()
        if i not in self.partial:
            left = p.grad is not None and not p.grad.is_sparse and bool(p.grad.any())
            self.partial[i] = Partial(part, left)
            return
        partial = self.partial[i]
        partial.count += 1
        partial.sum += part
        # a look into the values waits for a GPU: once a pass
        is_first = i == next(iter(self.partial))
        if p.grad is None or (is_first and not p.grad.any()):
            partial.cleared = partial.count - 1
            partial.last = part
            partial.times += 1
        elif partial.last is not None:
            partial.last += part

    def compare(self, grads, look):
        """Compare what was heard with what the step is given. grads: {parameter: gradient}, or None for those
        in place. look: writes.Look of this step, or None.
        """
        self.stop()
        heard, self.partial = self.partial, {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return  # what a rank hears is its own part
        for i, partial in heard.items():
            p = self.named[i][1]
            g = p.grad if grads is None else grads.get(p)
            if g is None:
                continue
            # what another optimiser's backward left is no fault where it is cleared before its own
            if partial.left and not partial.cleared:
                self.uncleared = True
            else:
                self._compare(i, partial, self.pick(g), look)

    def _compare(self, i, partial, g, look):
        error, left = distance(g, partial.sum)
        if error < 0.02:
            self.shrunk.append((left, norm_of(look) if left < 1e-3 else math.nan))
        if partial.count < 2:
            return
        if self.named[i][1].dtype in NARROW:
            total, times, _ = self.sums.get(i, (0.0, 0, 0))
            self.sums[i] = total + error, times + 1, partial.count
        # an optimiser that sums by itself takes gradients away, and forgets none; SAM clears them once, and
        # so does a discriminator, of what backward passes for its generator have left
        if partial.times > 1 and error > 0.1 and distance(g, partial.last)[0] < 0.02:
            self.forgotten[i] = partial.cleared, partial.count


def distance(g, exact):
    """(relative distance of a gradient from a sum, but for a factor, and that factor): clipping and averaging
    over micro-batches scale it.
    """
    g, exact = g.double(), exact.double()
    scale = float((g * exact).sum() / exact.square().sum().clamp_min(1e-300))
    off = (g - scale * exact).norm() / (scale * exact).norm().clamp_min(1e-300)
    return float(off), scale


def norm_of(look):
    """Norm of all gradients of a writes.Look, from their samples; NaN without one."""
    if look is None:
        return math.nan
    squares = totals([look.g.square()], look.lengths)[0].tolist()
    sizes = [p.numel() / n for p, n in zip(look.params, look.lengths, strict=True)]
    return math.sqrt(sum(square * size for square, size in zip(squares, sizes, strict=True)))
