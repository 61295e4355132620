"""What is wrong with the rounding of weights itself: noise that is biased, repeats, or is shared by tensors.

The error of a write, (written - wanted) in ulps, counted positive away from zero, has the mean 0 under
stochastic rounding, and the variance f (1 - f) where f is the fraction of an ulp that is rounded away. So
each sum of errors has a standard error that is known beforehand, and a figure is named only where it is
beyond 6 of them.
"""

import itertools
import math

import torch

from .net_state import NARROW_DTYPES
from .sums import Sums, one_an_entry, totals
from .writes import rounded_by_tensor

CERTAIN_STANDARD_ERRORS = 6  # standard errors: once in 5e8 looks by chance


def ulp(x, eps):
    """The spacing at fp32 x of a format with machine epsilon `eps`: 2^-7 for bf16."""
    _, exponent = torch.frexp(x)  # |x| = m 2^exponent, m in [0.5, 1)
    return torch.ldexp(torch.full_like(x, 0.5), exponent) * eps


class Errors(Sums):
    """Sums of the errors of plain bf16 and fp16 writes (no master, no compensation), a column a tensor."""

    fields = (
        "entries",  # writes that were to change something
        "chance",  # how many entries stochastic rounding would not round to nearest
        "strays",  # how many were not
        "far",  # writes that are more than an ulp off, which no rounding explains
        "score",  # sum of the errors, in ulps
        "variance",  # of that sum, under stochastic rounding
        "moves",  # wanted steps in ulps, at most one each: as many entries are expected to move
        "spread",  # variance of the sum of errors in units of the weights
        "again",  # products of the errors of a look and of the two before: 0 unless noise repeats
        "again_variance",
        "again_size",  # what the products would sum up to if the noise were the same
        "near",  # the same of neighbours in a sample: 0 unless rows share noise
        "near_variance",
        "near_size",
        "looks",
        "burst",  # squares of each look's score over its variance: 1 a look, unless the entries share noise
    )

    def __init__(self, tensors=1):
        super().__init__(tensors)
        self.past = []  # (tensors, errors, variances) of the last two looks
        self.turn = False  # whether tensors were compared the last time
        self.pairs = {}  # (pairs of tensors) -> float64 [3, pairs]: see `shares`

    def add(self, index, old, target, new, dtypes, scales=None):
        """Add the writes of a step: lists with an fp32 vector for each tensor of `index`.

        old, target, new: held before, wanted, held after. dtypes: what it is written in; None leaves a tensor
        out. scales: what spread is measured in, entry by entry.
        """
        chosen = [k for k, dtype in enumerate(dtypes) if dtype in NARROW_DTYPES]
        if not chosen:
            return
        index = [index[k] for k in chosen]
        lengths = [old[k].numel() for k in chosen]
        narrow = [dtypes[k] for k in chosen]
        eps = [torch.finfo(dtype).eps for dtype in narrow]
        before = _joined_parts(old, chosen)
        aim = _joined_parts(target, chosen)
        after = _joined_parts(new, chosen)
        gap = ulp(aim, one_an_entry(eps, lengths, aim))
        nearest = rounded_by_tensor(aim, narrow, lengths)
        size = aim.abs()
        f = torch.frac(size / gap)
        f = f.where(aim.isfinite() & (aim != before) & after.isfinite(), 0.0)
        rounds = f > 0
        variance = f * (1 - f)
        score = ((after.abs() - size) / gap).where(rounds, 0.0)
        unit = gap
        if scales is not None:
            unit = gap / _joined_parts(scales, chosen)
        rows = {
            "entries": rounds,
            "chance": torch.minimum(f, 1 - f),
            "strays": (after != nearest) & rounds,
            "far": score.abs() > 1.01,
            "score": score,
            "variance": variance,
            "moves": ((aim - before).abs() / gap).clamp(max=1).where(rounds, 0.0),
            "spread": variance * unit.square(),
            **self._again(index, score, variance),
            **_products_of_neighbours(score, variance, lengths),
        }
        sums = self.put(rows, index, lengths)
        enough = sums["variance"] > 1
        self.row("looks")[index] += enough.double()
        self.row("burst")[index] += sums["score"].square() / sums["variance"].clamp_min(1) * enough
        self.turn = not self.turn
        if self.turn:  # every other time, which halves what it costs
            # less their tensor's mean: tensors that all err to one side don't share noise by that
            means = (sums["score"] / sums["entries"].clamp_min(1)).to(score.dtype)
            of_lengths = torch.tensor(lengths, device=means.device)
            means = means.repeat_interleave(of_lengths, output_size=len(score))
            alone = (score - means).where(rounds, 0.0)
            self._compare(index, alone.split(lengths), variance.split(lengths))
        self.past = [*self.past[-1:], (index, score, variance)]

    def _again(self, index, score, variance):
        """Rows of the products with the errors of the last two looks; {} where they saw other tensors."""
        alike = [(past, spread) for then, past, spread in self.past if then == index]
        if not alike:
            return {}
        both = [variance * spread for _, spread in alike]
        product = sum(score * past for past, _ in alike)
        return {"again": product, "again_variance": sum(both), "again_size": sum(map(torch.sqrt, both))}

    def _compare(self, index, scores, variances):
        """Products of the errors of tensors that are alike in size, and so are sampled at the same places."""
        order = sorted(range(len(index)), key=lambda k: scores[k].numel())
        if len(order) < 2:
            return
        lengths, product, variance = [], [], []
        for a, b in itertools.pairwise(order):
            n = scores[a].numel()
            lengths.append(n)
            product.append(scores[a] * scores[b][:n])
            variance.append(variances[a] * variances[b][:n])
        variance = torch.cat(variance)
        sums = totals([torch.cat(product), variance, variance.sqrt()], lengths)
        pairs = tuple((index[a], index[b]) for a, b in itertools.pairwise(order))
        self.pairs[pairs] = self.pairs.get(pairs, 0.0) + sums

    # -- what follows for one tensor (see `of`), or for all

    @property
    def to_nearest(self):
        """Whether writes go to nearest: True, False, or None where too little was seen."""
        if self.chance < 20:
            return None
        return self.strays < 0.3 * self.chance

    @property
    def bias(self):
        """Mean error as a share of the wanted step where it is certain, else 0.0."""
        if self.variance < 1 or abs(self.score) < CERTAIN_STANDARD_ERRORS * math.sqrt(self.variance):
            return 0.0
        return self.score / max(self.moves, 1e-300)

    @property
    def lumps(self):
        """Whether the entries of a tensor err together: its score is not within chance look by look."""
        return self.looks >= 2 and self.burst > CERTAIN_STANDARD_ERRORS**2 * self.looks

    @property
    def repeats(self):
        """Correlation of the errors of two looks where it is certain, else 0.0."""
        return certain_correlation(self.again, self.again_variance, self.again_size)

    @property
    def neighbours(self):
        """The same of entries that are neighbours in a sample."""
        return certain_correlation(self.near, self.near_variance, self.near_size)

    def shares(self):
        """{(tensor, tensor): correlation of their errors} where it is certain."""
        found = {}
        for key, table in self.pairs.items():
            for pair, sums in zip(key, table.T.tolist(), strict=True):
                value = certain_correlation(*sums)
                if value:
                    found[pair] = value
        return found


def _joined_parts(parts, chosen):
    return torch.cat([parts[k] for k in chosen])


def _products_of_neighbours(score, variance, lengths):
    """Products of the errors of each entry and the next, [n], their variances, and the roots of these."""
    product, both = score * score.roll(-1), variance * variance.roll(-1)
    last = torch.tensor(lengths, device=score.device).cumsum(0) - 1  # the next is another tensor's
    product[last] = 0.0
    both[last] = 0.0
    return {"near": product, "near_variance": both, "near_size": both.sqrt()}


def certain_correlation(product, variance, size):
    """Correlation of errors, 0.0 unless it is more than chance and more than a fifth.

    Errors that are larger than rounding makes them, as of several roundings one after the other, say nothing
    of noise: 0.0 too.
    """
    if variance < 1 or product < CERTAIN_STANDARD_ERRORS * math.sqrt(variance):
        return 0.0
    value = product / size
    if 0.2 < value < 1.5:
        return value
    return 0.0
