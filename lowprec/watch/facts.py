"""What a Watch remembers of each tensor: sums over its looks, and facts beside them."""

import itertools
from typing import NamedTuple

import torch

from .states import beta_power
from .writes import Sums


class Steps(Sums):
    """What is counted in a look beside the writes, a column a tensor."""

    fields = (
        "decay",  # sum of (written - the rest of what was wanted) times the decay wanted
        "decay_wanted",  # sum of the decay wanted, squared
        "decay_error",  # variance of `decay`
        "infinite",  # gradients that are not finite
        "graded",  # gradients that are not 0
        "judged",  # those of looks at the second moment
        "faint",  # those of them whose second moment is below the optimiser's eps, squared
        "subnormal",  # those of an fp16 product that have lost bits or nearly all
        "moved",  # weights that the step changed, of looks that were followed to the next step
        "back",  # those of them that were put back before the next step
        "masked",  # those of these that were put back to 0, or to the bound of all: masks, WGAN's clipping
        "stood",  # looks between which the average did not move, although away from its weight
    )

    def add(self, look, answers, groups):
        """Count what a step did. look: writes.Look after it. answers: see adapters.answering. groups:
        {parameter: its group}.
        """
        finite = look.g.isfinite()
        graded = look.g != 0
        decay, rest = _decay_and_rest(look, finite, answers)
        judged = faint = torch.zeros_like(graded)
        if look.v is not None:
            lacks = [beta_power(answers, p) for p in look.params]
            corrected = look.new_v * look.spread([1 / max(1e-12, 1 - left) for left in lacks])
            eps = look.spread([_eps(groups[p]) for p in look.params])
            judged = graded
            faint = graded & (corrected < eps.square())
        subnormal = torch.zeros_like(graded)
        for at in _from_fp16(look):
            subnormal[at] = graded[at] & (look.g[at].abs() < 2**-14)
        rows = {
            "decay": rest * decay,
            "decay_wanted": decay * decay,
            "decay_error": (rest - decay).square() * decay.square(),
            "infinite": ~finite,
            "graded": graded,
            "judged": judged,
            "faint": faint,
            "subnormal": subnormal,
        }
        self.put(rows, look.index, look.lengths)


def _decay_and_rest(look, finite, answers):
    """(weight decay that was wanted, what was written beside the rest of the update), [n] each, in units of
    the largest decay: squares of small numbers would be 0 in fp32.
    """
    known = getattr(answers, "decayed", None)
    shares = [known(p) if known else 0.0 for p in look.params]
    if not any(shares):
        none = torch.zeros_like(look.g)
        return none, none
    decay = look.spread(shares) * -look.held
    rest = (look.new - look.held) - (look.update - decay)
    good = rest.isfinite() & decay.isfinite() & finite & (decay != 0)
    rest = rest.where(good, 0.0)
    decay = decay.where(good, 0.0)
    size = decay.abs().max().clamp_min(1e-30)
    return decay / size, rest / size


def _eps(group):
    eps = group.get("eps", 0.0)
    return float(eps) if isinstance(eps, (int, float)) else 0.0


def _from_fp16(look):
    """Slices of the tensors whose gradients are all numbers of fp16: what a product in fp16 gave."""
    ends = [0, *itertools.accumulate(look.lengths)]
    first = look.g[torch.tensor(ends[:-1], device=look.g.device)]
    fits = (first.half().float() == first).tolist()
    for k, p in enumerate(look.params):
        at = slice(ends[k], ends[k + 1])
        may = fits[k] and p.dtype != torch.bfloat16
        if may and torch.equal(look.g[at].half().float(), look.g[at]):
            yield at


class Facts:
    """What is remembered of one tensor beside sums."""

    def __init__(self):
        self.first = None  # its sample at the first look
        self.looks = 0  # looks with a gradient
        self.idle = 0  # looks with a gradient that is 0 everywhere
        self.without = 0  # looks without one
        self.at_zero = 0  # the last looks, at which its learning rate was 0
        self.zero_since = 0  # the step of the first of them
        self.v_dtype = None  # dtype of exp_avg_sq at first
        self.cast = None  # (old dtype, new dtype, step) once it got narrower
        self.v_reset = None  # (step, share of exp_avg_sq below what beta2 leaves of it; None for all 0)
        self.counter = None  # (what its step counter said first, our own count then)
        self.counted = None  # (dtype of the counter, looks in which it did not count, its last value)
        self.behind = 0  # how many steps less than we it has counted
        self.fell = None  # (a count, a later and smaller one)
        self.before = None  # the counter before a step

    def at_rate(self, rate, step):
        """Take in the learning rate of a look."""
        if rate:
            self.at_zero = 0
            return
        self.at_zero += 1
        if self.at_zero == 1:
            self.zero_since = step


class Alive(NamedTuple):
    """Which entries ever had a gradient, of the tensors of the last look."""

    tensors: list  # their numbers
    lengths: list  # entries of each
    entries: torch.Tensor  # bool [sum of lengths]
    looks: int
