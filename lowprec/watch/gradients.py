"""The gradients of a step, backward pass after backward pass: whether they are summed well, cleared at the
right time, and left as they are until the step.
"""

import functools
import math

import torch

from ..parts.loss_scale import Overflow
from .net_state import NARROW_DTYPES
from .sums import Sums, one_an_entry, totals

# relative distance up to which a gradient is the one that backward gave, times a factor
ALIKE_WITHIN = 0.02
ENOUGH_ENTRIES = 16  # entries of a tensor that say something together
SPOILT_IN_A_ROW = 9  # passes, after which the one that follows tells where it overflows
AT_ONCE = 64  # passes or steps that are read together, so that a GPU is waited for once


class Partial:
    """The gradients of one tensor since a step."""

    def __init__(self, part, left):
        self.count = 1  # backward passes
        self.sum = part  # of their gradients, fp32 [n]
        self.left = left  # whether gradients were there before the first one
        self.cleared = 0  # passes whose gradients are gone
        self.times = 0  # how often they were cleared
        self.last = None  # sum of those since they were cleared; None where they never were

    def add(self, part, cleared):
        """Add those of one more pass. cleared: whether gradients were before it."""
        self.count += 1
        self.sum += part
        if cleared:
            self.cleared = self.count - 1
            self.last = part
            self.times += 1
        elif self.last is not None:
            self.last += part

    @property
    def kept(self):
        """The sum that the step should be given, but for a factor."""
        return self.sum if self.last is None else self.last


class Changes(Sums):
    """What became of the gradients between backward and the step, a column a tensor."""

    fields = (
        "looks",  # at gradients that are not 0
        "zeroed",  # those of them that the step reads as 0
        "negated",  # whose factor is below 0
        "spoilt",  # finite after backward and not at the step
        "mended",  # not finite after backward, and finite at the step
        "factor",  # sum of the factors below 0
        "parts_negated",  # share of the entries that were, where not all were, summed over the looks
        "parts_zeroed",
    )


class Gradients:
    """Listens to the gradients of the step that follows.

    named: [(name, parameter)]. pick: tensor -> its sample, [n]. clock: clock.Clock of the watch.
    """

    def __init__(self, named, pick, clock):
        self.named = named
        self.pick = pick
        self.clock = clock
        self.partial = {}  # {number of a tensor: Partial}
        self.heard = {}  # {number of a tensor: what _hear knows of a pass that is not done}
        self.cleared = False  # whether the gradients were cleared before this pass
        self.hooks = []
        self.sums = {}  # {number of a 16-bit tensor: (sum of relative errors, looks, passes of the last one)}
        self.shrunk = []  # (what is left of a gradient when a step begins, norm of all gradients then)
        self.largest_step = 0.0  # over the weights, of the looks at which a thousandth or less was left
        self.forgotten = {}  # {number of a tensor: (passes whose gradients were cleared too early, of all)}
        self.uncleared = False  # whether gradients of earlier steps were still there
        self.begun = False  # whether a step was compared
        self.changes = Changes(len(named))

    def listen(self):
        """Begin."""
        self.partial = {}
        self.heard = {}
        for i, (_, p) in enumerate(self.named):
            if p.requires_grad and p.is_floating_point():
                self.hooks.append(p.register_hook(functools.partial(self._hear, i, p)))
                # torch.autograd.grad calls the first one too, and leaves p.grad as it is
                self.hooks.append(p.register_post_accumulate_grad_hook(functools.partial(self._take, i)))

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def forget(self):
        """Forget what was heard since the last step."""
        self.stop()
        self.partial = {}

    def _hear(self, i, p, g):
        if g.is_sparse:
            return
        with self.clock, torch.no_grad():
            # a look into the values waits for a GPU: once a pass
            if i == next(iter(self.partial), i):
                self.cleared = p.grad is None or p.grad.is_sparse or not bool(p.grad.any())
            self.heard[i] = self.pick(g).float().clone(), self.cleared or p.grad is None

    def _take(self, i, _):
        if i not in self.heard:
            return
        part, cleared = self.heard.pop(i)
        if i not in self.partial:
            self.partial[i] = Partial(part, not cleared)
            return
        with self.clock, torch.no_grad():
            self.partial[i].add(part, cleared)

    def compare(self, grads, look):
        """Compare what was heard with what the step is given. grads: {parameter: gradient}, or None for those
        in place. look: writes.Look of this step, or None.
        """
        self.stop()
        heard, self.partial = self.partial, {}
        begun, self.begun = self.begun, True
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return  # what a rank hears is its own part
        index, given, kept, whole = [], [], [], []
        # cleared after backward: None, by default. Of some alone that freezes them
        all_gone = grads is None and all(self.named[i][1].grad is None for i in heard)
        for i, partial in heard.items():
            p = self.named[i][1]
            g = p.grad if grads is None else grads.get(p)
            if all_gone:
                g = torch.zeros_like(p)
            if g is None or g.is_sparse or not p.numel():
                continue
            # what another optimiser's backward left is no fault where it is cleared before its own
            if partial.left and not partial.cleared:
                self.uncleared |= begun
                continue
            index.append(i)
            given.append(self.pick(g).float())
            kept.append(partial.kept)
            whole.append(partial.sum)
        if not index:
            return
        self._sum(heard, index, given, kept, whole)
        self._change(index, torch.cat(given), torch.cat(kept), look)

    def _sum(self, heard, index, given, kept, whole):
        """Whether micro-batches are summed well, and none is forgotten."""
        of_passes = zip(index, given, kept, whole, strict=True)
        several = [one for one in of_passes if heard[one[0]].count > 1]
        if not several:
            return
        several, read, last_sums, sums = zip(*several, strict=True)
        of_all, of_last = distances(read, sums), distances(read, last_sums)
        for i, error, error_of_last in zip(several, of_all, of_last, strict=True):
            partial = heard[i]
            if self.named[i][1].dtype in NARROW_DTYPES:
                total, times, _ = self.sums.get(i, (0.0, 0, 0))
                self.sums[i] = total + error, times + 1, partial.count
            # an optimiser that sums by itself takes gradients away, and forgets none; SAM clears them once,
            # and so does a discriminator, of what backward passes for its generator have left
            if partial.times > 1 and error > 0.1 and error_of_last < ALIKE_WITHIN:
                self.forgotten[i] = partial.cleared, partial.count

    def _change(self, index, given, heard, look):
        """What became of the gradients since backward: one factor for all entries of a tensor, some of which
        may have been negated or zeroed beside.
        """
        lengths, least = [], []
        for i in index:
            _, p = self.named[i]
            lengths.append(self.pick(p).numel())
            least.append(torch.finfo(p.dtype).tiny)
        finite = totals([~heard.isfinite(), ~given.isfinite()], lengths)
        was_finite, is_finite = finite == 0
        kept = given != 0
        product = (given * heard).abs()
        moved, square = totals([product, heard.square().where(kept, 0.0)], lengths)
        factor = moved / square.clamp_min(1e-300)
        each = one_an_entry(factor.tolist(), lengths, given)
        tiny = one_an_entry(least, lengths, given)
        # what a factor takes below the least number of a format is 0 by rounding
        zeroed = ~kept & (heard.abs() * each.clamp(max=1.0).where(each > 0, 1.0) >= tiny)
        rows = [
            (given.abs() - each * heard.abs()).square().where(kept, 0.0),
            given.square(),
            given * heard < 0,
            zeroed,
            kept & (heard != 0),
        ]
        off, size, negated, zeroed, kept = totals(rows, lengths)
        good = was_finite & is_finite
        known = good & (off <= ALIKE_WITHIN**2 * size.clamp_min(1e-300))
        entries = kept + zeroed
        minus = known & (kept >= ENOUGH_ENTRIES) & (negated >= 0.99 * kept)
        gone = good & (kept == 0) & (zeroed > 0)
        partly = known & (kept >= ENOUGH_ENTRIES) & ~minus & (negated + zeroed >= 0.05 * entries)
        rows = {
            "looks": good & (entries > 0),
            "zeroed": gone,
            "negated": minus,
            "spoilt": was_finite & ~is_finite,
            "mended": ~was_finite & is_finite,
            "factor": torch.where(minus, -factor, 0.0),
            "parts_negated": torch.where(partly, negated / entries.clamp_min(1), 0.0),
            "parts_zeroed": torch.where(partly, zeroed / entries.clamp_min(1), 0.0),
        }
        self.changes.sums = self.changes.sums.to(given.device)
        for name, values in rows.items():
            self.changes.row(name)[index] += values.double()
        plain = factor[known & (negated == 0) & (kept > 0)]
        if plain.numel():
            left = float(plain.median())
            norm = math.nan
            if left < 1e-3 and look is not None:
                norm = norm_of(look)
                self.largest_step = max(self.largest_step, size_of_step(look))
            self.shrunk.append((left, norm))


def distances(gradients, exact):
    """[relative distance of a gradient from a sum, but for a factor] of lists of tensors alike: clipping and
    averaging over micro-batches scale it.
    """
    lengths = [g.numel() for g in gradients]
    g, exact = torch.cat(gradients), torch.cat(exact)
    product, square = totals([g * exact, exact.square()], lengths)
    scale = product / square.clamp_min(1e-300)
    scaled = one_an_entry(scale.tolist(), lengths, g) * exact
    off, size = totals([(g - scaled).square(), scaled.square()], lengths)
    return (off.sqrt() / size.sqrt().clamp_min(1e-300)).tolist()


def size_of_step(look):
    """The step that is wanted, over the weight: the median of all entries."""
    at = (look.held != 0) & look.update.isfinite()
    return float((look.update[at] / look.held[at]).abs().median()) if bool(at.any()) else 0.0


def norm_of(look):
    """Norm of all gradients of a writes.Look, from their samples."""
    squares = totals([look.g.square()], look.lengths)[0].tolist()
    sampled = zip(look.params, look.lengths, squares, strict=True)
    return math.sqrt(sum(square * (p.numel() / n) for p, n, square in sampled))


class Passes:
    """Backward passes since the last step, as the first and the last parameter that trains hear them.

    overflow: listens in one pass, after SPOILT_IN_A_ROW more than usual that were not finite.
    """

    def __init__(self, net, params, pick):
        self.pick = pick
        self.overflow = Overflow(net)
        self.usual = 0  # the most passes before a step
        self.sums = {}  # {parameter: sums of its gradients, [] of those that were counted}
        self.counted = {}  # {parameter: (passes, those of the last that were not finite)}
        trained = [p for p in params if p.requires_grad and p.is_floating_point()]
        ends = {*trained[:1], *trained[-1:]}
        self.handles = [p.register_hook(functools.partial(self._hear, p)) for p in ends]

    def stepped(self):
        self.overflow.stop()
        self.usual = max([self.usual, *map(self._passes, self.sums)])
        self.sums, self.counted = {}, {}

    def _passes(self, p):
        return len(self.sums[p]) + self.counted.get(p, (0, 0))[0]

    def _hear(self, p, g):
        if g.is_sparse:
            return
        sums = self.sums.setdefault(p, [])
        sums.append(self.pick(g.detach()).sum())
        more = self._passes(p) - self.usual - SPOILT_IN_A_ROW
        if more == 0 and not self.overflow.hooks and self.most()[1] >= SPOILT_IN_A_ROW:
            self.overflow.listen()
        elif more > 1:
            self.overflow.stop()
        if len(sums) >= AT_ONCE:
            self._count()

    def _count(self):
        for p, sums in self.sums.items():
            passes, spoilt = self.counted.get(p, (0, 0))
            for one in sums:
                spoilt = 0 if bool(one.isfinite()) else spoilt + 1
            self.counted[p] = passes + len(sums), spoilt
            self.sums[p] = []

    def most(self):
        """(passes, those of the last that were not finite), of the parameter that heard most of them."""
        self._count()
        passes, spoilt = zip(*self.counted.values(), strict=True) if self.counted else ((0,), (0,))
        return max(passes), max(spoilt)

    def remove(self):
        self.overflow.stop()
        for handle in self.handles:
            handle.remove()
