"""What a Watch remembers of each tensor: sums over its looks, and facts beside them."""

import itertools
from typing import NamedTuple

import torch

from .states import beta_power
from .sums import Sums, totals

SMALLEST_SQUARE = 1e-37  # fp32 holds no squares below it
LEAST_ENTRIES_MOVED = 30  # entries, for a variance to be known
LARGEST_EPS_AGAINST_0 = 1e-6  # of an optimiser: a larger one is more than a guard against dividing by 0


class Steps(Sums):
    """What is counted in a look beside the writes, a column a tensor."""

    fields = (
        "decay",  # sum of (written - the rest of what was wanted) times the decay wanted
        "decay_wanted",  # sum of the decay wanted, squared
        "decay_error",  # variance of `decay`
        "decay_moved",  # entries that decay and that a step moved
        "decay_path",  # sum of the decay wanted, without its sign
        "infinite",  # gradients that are not finite, while all weights are
        "broken",  # weights that are not finite before a step
        "burst",  # those that a step made so, whose gradients are finite
        "v_burst",  # second moments that it made so
        "v_below",  # those that are below 0
        "v_gone",  # those that are 0 after a gradient whose square is not
        "graded",  # gradients that are not 0
        "judged",  # those of looks at the second moment
        "faint",  # those of them whose second moment is below the optimiser's eps, squared
        "subnormal",  # those of an fp16 product that have lost bits or nearly all
        "moved",  # weights that the step changed, of looks that were followed to the next step
        "back",  # those of them that were put back before the next step
        "wide",  # those of them that are no bf16 numbers after the step, and not 0 at the next
        "narrowed",  # those of these that are at the next
        "masked",  # those of these that were put back to 0, or to the bound of all: masks, WGAN's clipping
        "v_held",  # second moments that are not 0 before a step
        "v_bf16",  # those of them that are bf16 numbers
        "m_held",  # the same of first moments
        "m_bf16",
        "m_kept",  # looks after which its moments were followed to the next step
        "v_kept",
        "m_rewritten",  # those of them at which something else had changed the moment by then
        "v_rewritten",
        "follows",  # looks that were followed to the next step
        "drifts",  # those at which something else had moved the weights by then, beside masks and bounds
        "drift",  # sum of what it moved, squared
        "stepped",  # of what the steps did
        "against",  # of what it moved times the step, where they go two ways
        "beside",  # of the steps of what it moved, squared
        "shrunk",  # of what it moved times the weight, where it makes that smaller
        "shrinkable",  # of the weights that it moved, squared
        "codes_error",  # of momentum in codes that an optimiser orthogonalises: what it is off, squared
        "codes_size",  # of what it should be, squared
    )

    def add(self, look, answers, groups):
        """Count what a step did. look: writes.Look after it. answers: see adapters.answering. groups:
        {parameter: its group}.
        """
        finite = look.g.isfinite()
        graded = look.g != 0
        decay, rest, size = _decay_and_rest(look, finite, answers)
        held_finite = look.held.isfinite()
        of_v = {}
        if look.v is not None:
            corrections, eps, wide = [], [], []
            for p, dtype in zip(look.params, look.v_dtypes, strict=True):
                lacks = beta_power(answers, p)
                corrections.append(1 / max(1e-12, 1 - lacks))
                eps.append(_eps(groups[p]))
                wide.append(dtype != torch.float16)  # fp16 makes small squares 0, which is another fault
            corrected = look.new_v * look.spread(corrections)
            of_v = {
                "v_burst": look.aim.isfinite() & ~look.new_v.isfinite(),
                "v_below": look.v < 0,
                "v_gone": graded & (look.new_v == 0) & (look.aim > SMALLEST_SQUARE),
                "judged": graded,
                "faint": graded & (corrected < look.spread(eps).square()) & look.spread(wide, torch.bool),
            }
        subnormal = torch.zeros_like(graded)
        for at in _from_fp16(look):
            subnormal[at] = graded[at] & (look.g[at].abs() < 2**-14)
        rows = {
            "decay": rest * decay,
            "decay_wanted": decay * decay,
            "decay_error": (rest - decay).square() * decay.square(),
            "decay_moved": (decay != 0) & (look.new != look.held),
            "decay_path": decay.abs() * size,
            "infinite": ~finite & held_finite.all(),
            "broken": ~held_finite,
            "burst": held_finite & finite & ~look.new.isfinite(),
            "graded": graded,
            "subnormal": subnormal,
            **of_v,
            **_bf16_values(look),
        }
        self.put(rows, look.index, look.lengths)

    def add_codes(self, look, answers):
        """Count what the codes of momentum that is orthogonalised are off after a step."""
        now = look.momentum_in_codes()
        for k, before in look.codes.items():
            beta, _ = answers.decay(look.params[k], "momentum")
            aim = torch.lerp(before, look.g.split(look.lengths)[k], 1 - beta)
            rows = {"codes_error": (now[k] - aim).square(), "codes_size": aim.square()}
            self.put(rows, [look.index[k]], [len(aim)])

    def follow(self, look, now):
        """Count what became of the weights between the step of a look and the next. now: held then, [n]."""
        moved = look.new != look.held
        back = moved & (now == look.held)
        wide = moved & ~_is_bf16(look.new) & (now != 0)
        tops = torch.cat([part.abs().max().expand(part.numel()) for part in now.split(look.lengths)])
        bound = (look.held == 0) | (look.held.abs() == tops)
        # a mask or a bound, as of WGAN's weights, is no step
        drifted = (now != look.new) & ~back & (now != 0) & (now.abs() != tops)
        drift, step = (now - look.new).where(drifted, 0.0), look.new - look.held
        parts = drifted.split(look.lengths)
        drifts = torch.cat([(part.float().mean() > 0.05).expand(part.numel()) for part in parts])
        looks = look.spread([1 / n for n in look.lengths]).expand_as(now)
        rows = {
            "moved": moved,
            "back": back,
            "wide": wide,
            "narrowed": wide & _is_bf16(now),
            "masked": back & bound,
            "follows": looks,
            "drifts": looks.where(drifts, 0.0),
            "drift": drift.square(),
            "stepped": step.square(),
            "against": -drift * step,
            "beside": step.square().where(drifted, 0.0),
            "shrunk": -drift * look.new,
            "shrinkable": look.new.square().where(drifted, 0.0),
        }
        self.put(rows, look.index, look.lengths)

    def follow_moments(self, look):
        """Count whether something else has changed the moments since the step of a look wrote them."""
        for name, moment, then in (("m", "exp_avg", look.new_m), ("v", "exp_avg_sq", look.new_v)):
            if then is None:
                continue
            now, _ = look.read(moment)
            kept = now.isfinite() & then.isfinite()
            kept, changed = totals([kept, kept & (now != then)], look.lengths)
            shares = changed / changed.new_tensor(look.lengths)
            self.row(f"{name}_kept")[look.index] += (kept > 0).double().to(self.sums.device)
            self.row(f"{name}_rewritten")[look.index] += (shares > 0.05).double().to(self.sums.device)

    @property
    def put_back(self):
        """Share of the weights that steps moved which were put back before the next step."""
        return self.back / max(1.0, self.moved)

    @property
    def decay_lost(self):
        """Share of weight decay that was not written for sure: what was written beside the rest of the update
        is compared with it, entry by entry. Where few entries moved, as by stochastic rounding of tiny steps,
        nothing is sure.
        """
        if self.decay_wanted <= 0 or self.decay_moved < LEAST_ENTRIES_MOVED:
            return 0.0
        sure = 6 * self.decay_error**0.5 / self.decay_wanted
        return min(1.0, max(0.0, 1 - self.decay / self.decay_wanted - sure))


def _decay_and_rest(look, finite, answers):
    """(weight decay that was wanted, what was written beside the rest of the update, the largest decay): [n]
    each, in units of the last: squares of small numbers would be 0 in fp32.
    """
    of_copies = getattr(answers, "decay_of", None)
    parts = []
    for p, held in zip(look.params, look.held.split(look.lengths), strict=True):
        parts.append(of_copies(p, held) if of_copies else -answers.decayed(p) * held)
    decay = torch.cat(parts)
    rest = (look.new - look.held) - (look.update - decay)
    good = rest.isfinite() & decay.isfinite() & finite & (decay != 0)
    rest = rest.where(good, 0.0)
    decay = decay.where(good, 0.0)
    size = decay.abs().max().clamp_min(1e-30)
    return decay / size, rest / size, size


def _eps(group):
    """The eps of a group; 0.0 where it is large by plan, as RMSprop's 1e-3 in timm."""
    eps = group.get("eps", 0.0)
    if not isinstance(eps, (int, float)) or eps > LARGEST_EPS_AGAINST_0:
        return 0.0
    return float(eps)


def _from_fp16(look):
    """Slices of the tensors whose gradients are all numbers of fp16, as a product in fp16 gives them; none
    where most matrices have others, for few bf16 numbers added up may be numbers of fp16 too.
    """
    ends = [0, *itertools.accumulate(look.lengths)]
    first = look.g[torch.tensor(ends[:-1], device=look.g.device)]
    fits = (first.half().float() == first).tolist()
    found, matrices, of_matrices = [], 0, 0
    for k, p in enumerate(look.params):
        at = slice(ends[k], ends[k + 1])
        is_matrix = p.dim() > 1
        matrices += is_matrix
        if fits[k] and p.dtype != torch.bfloat16 and _is_fp16(look.g[at]):
            found.append(at)
            of_matrices += is_matrix
    if 2 * of_matrices < matrices:
        return []
    return found


def _is_fp16(g):
    if not torch.equal(g.half().float(), g):
        return False
    # of bf16 numbers below 2^-17 hardly any is one of fp16
    small = (g != 0) & (g.abs() < 2**-17)
    return not torch.equal(g.bfloat16().float(), g) or int(small.sum()) >= 8


def _bf16_values(look):
    """Rows of Steps: which entries of the moments before the step are not 0, and which are bf16 numbers."""
    rows = {}
    for name, moment in (("v", look.v), ("m", look.m)):
        if moment is not None:
            held = moment.isfinite() & (moment != 0)
            rows[f"{name}_held"] = held
            rows[f"{name}_bf16"] = held & _is_bf16(moment)
    return rows


def _is_bf16(values):
    return values.bfloat16().float() == values


class Facts:
    """What is remembered of one tensor beside sums."""

    def __init__(self):
        self.first = None  # its sample at the first look
        self.looks = 0  # looks with a gradient
        self.idle = 0  # looks with a gradient that is 0 everywhere
        self.without = 0  # looks without one
        self.empty = 0  # looks with a gradient at which the optimiser kept no state of it
        self.keeps = False  # whether a step ever left a state
        self.below_zero = 0  # looks at which its learning rate was below 0
        self.at_zero = 0  # the last looks, at which its learning rate was 0
        self.zero_since = 0  # the step of the first of them
        self.v_dtype = None  # dtype of exp_avg_sq at first
        self.cast = None  # (old dtype, new dtype, step) once it got narrower
        self.v_reset = None  # (step, share of exp_avg_sq below what beta2 leaves of it; None for all 0)
        self.counted_empty = False  # whether its counter said 1 at first, and its moments were 0
        self.begun_anew = ""  # what else began anew with exp_avg_sq: "moments", "weights" too, or ""
        self.counter = None  # (what its step counter said first, our own count then)
        self.counted = None  # (dtype of the counter, looks in which it did not count, its last value)
        self.behind = 0  # how many steps less than we it has counted
        self.fell = None  # (a count, a later and smaller one)
        self.put_back = False  # whether it fell to that of an earlier state, as by a rollback
        self.before = None  # the counter before a step

    def at_rate(self, rate, step):
        """Take in the learning rate of a look."""
        self.below_zero += rate < 0
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
