"""From what a Watch has measured to findings: one function a kind of fault. See watch.py."""

import functools
import math
import re

import torch

from ..roles import roles
from ..telemetry import sample
from . import net_state
from .adapters import accumulates, steps_of
from .verdicts import LIMITS, Finding

STILL = 0.02  # a share written that is as good as none
GAINS = 0.5  # share of a norm's gains that are 1.0
MICRO = "sum in fp32: keep the gradients in fp32, or accumulate outside of p.grad"
ROUND = "stochastic rounding or Kahan compensation of the bf16 write, or an fp32 master"
WRITTEN = "find what freezes or restores it: the optimiser wants to move it, and it does not move"


def findings(watch):
    """(list of Finding, worst first; {site: share lost, summed over all tensors})."""
    if not watch.steps:
        return [Finding("step", "moderate", "no step was done since this watch began", STEPLESS)], {}
    if not watch.looks:
        return [], {}
    seen = Measured(watch)
    found = []
    for i, (name, p) in enumerate(watch.named):
        one = seen.tensor(i)
        for finding in (
            *updates(one, name, p),
            *moments(one, name),
            *averages(one, name),
            *counters(one, name),
        ):
            found.append(finding)
    whole = rates, decay_of_all, accumulators, slow_counters, noise, gradients, dead_parts, missing, standing
    for rows in whole:
        found += rows(seen)
    found += buffers(watch)
    sites = {f.site for f in found if f.severity != "note"}
    sound = {site: share for site, share in seen.total().items() if site not in sites}
    return sorted(found, key=lambda f: f.rank), sound


def shares(watch):
    if not watch.looks:
        return {}
    seen = Measured(watch)
    return {name: seen.tensor(i).shares() for i, (name, _) in enumerate(watch.named)}


# ---- What was measured -------------------------------------------------------------------------------------


class Measured:
    """The sums of a watch, brought to the CPU once."""

    def __init__(self, watch):
        self.watch, self.names = watch, [name for name, _ in watch.named]
        writes = watch.writes
        self.weights, self.growth = writes.weights.columns(), writes.growth.columns()
        self.moments = writes.moments.columns()
        self.averages = writes.averages["ema"].columns() if watch.ema else None
        self.errors, self.moment_errors = watch.errors.columns(), watch.moment_errors.columns()
        self.extra, self.all_steps = watch.extra.columns(), watch.extra
        self.known = getattr(watch.answers, "known", True)
        # torch's own round to nearest, and often several times a step, which looks like noise
        self.torchs = type(getattr(watch.answers, "inner", None)).__module__.startswith("torch.optim")
        # small tensors say too little: all that one optimiser writes are rounded alike
        sums = {True: watch.errors, False: watch.moment_errors}
        self.to_nearest = {kind: self.torchs or errors.to_nearest for kind, errors in sums.items()}
        role_of = roles(watch.model)
        norms = {name for name, role in role_of.items() if "norm" in role}
        self.norms = {
            n for n in self.names if n.rpartition(".")[0] in norms and n.endswith(("weight", "gamma"))
        }

    def tensor(self, i):
        return Tensor(self, i)

    @functools.cached_property
    def lost_of_all(self):
        """Share of the wanted movement of all weights that was not written."""
        return self.total().get("update", 0.0)

    def total(self):
        """{site: share lost of what all tensors wanted}."""
        found = {}
        for site in ("update", "exp_avg_sq", "ema"):
            lost = [(one.wanted(site), one.lost(site)) for one in map(self.tensor, range(len(self.names)))]
            lost = [(wanted, share) for wanted, share in lost if share is not None]
            if lost:
                found[site] = sum(w * s for w, s in lost) / max(sum(w for w, _ in lost), 1e-300)
        return found


class Tensor:
    """What was measured of one tensor."""

    def __init__(self, seen, i):
        self.seen, self.i, self.watch = seen, i, seen.watch
        self.weight, self.moment, self.grown = seen.weights[i], seen.moments[i], seen.growth[i]
        self.error, self.moment_error = seen.errors[i], seen.moment_errors[i]
        self.average = seen.averages[i] if seen.averages else None
        self.extra, self.facts = seen.extra[i], seen.watch.facts[i]

    def wanted(self, site):
        return self._tally(site).wanted if self._tally(site) else 0.0

    def _tally(self, site):
        return {"update": self.weight, "exp_avg_sq": self.moment, "ema": self.average}[site]

    def shares(self):
        found = {site: self.lost(site) for site in ("update", "exp_avg_sq", "ema")}
        return {site: share for site, share in found.items() if share is not None}

    def lost(self, site):
        """Share of the wanted movement that was not written for sure; None where nothing was wanted."""
        tally = self._tally(site)
        if tally is None or not tally.entries:
            return None
        if site == "ema":
            return tally.lost_to_nearest if self.chance_of_average else tally.unwritten()
        error = self.error if site == "update" else self.moment_error
        if error.variance == 0:  # not plain 16 bits: fp32, a master, a compensation, codes
            return tally.unwritten() if self.seen.known or site != "update" else tally.lost
        nearest = self.seen.torchs or error.to_nearest
        if nearest is None:
            nearest = self.seen.to_nearest[site == "update"]
        return tally.lost_to_nearest if nearest else tally.unwritten(error.spread)

    @property
    def chance_of_average(self):
        """Whether an average in 16 bits stands where rounding to nearest would leave it."""
        return self.average.threatened > 0 and self.average.written < STILL * self.average.threatened

    def unmoved(self, p):
        """Share of the sampled entries that are as they were at the first look."""
        first = self.facts.first
        return 0.0 if first is None else float((self.watch.pick(p) == first).float().mean())


# ---- Weights -----------------------------------------------------------------------------------------------


def updates(one, name, p):
    tally, lost, narrow = one.weight, one.lost("update"), p.dtype in net_state.NARROW
    others = [facts for facts in one.watch.facts if facts.looks and not _at_zero(facts)]
    if others and _at_zero(one.facts):
        yield Finding("update", "moderate", f"its {_at_zero(one.facts)}", "check its group", name, 1.0)
    if lost is not None and lost > LIMITS["update"][0]:
        ones = float((one.watch.pick(p) == 1.0).float().mean())
        unmoved = one.unmoved(p)
        text = f"{lost:.0%} of the wanted movement is not written"
        if narrow:
            text += f": {tally.stuck:.0%} of the steps are under half an ulp of their weight"
        if unmoved > 0.01:
            text += f"; {unmoved:.0%} of the entries have not moved since the first look"
        site = "update"
        if name in one.seen.norms and ones > GAINS:
            site, text = "gains", f"{ones:.0%} of the gains are exactly 1.0; {text}"
        low = one.watch.answers.low_part(p)
        rounding = narrow and low is None and tally.threatened > 0.5 * tally.wanted * lost
        severity = "severe" if one.seen.lost_of_all > LIMITS["update"][1] else "moderate"
        yield Finding(site, severity, text, ROUND if rounding else WRITTEN, name, lost)
    elif tally.entries and one.seen.known:
        over = (
            tally.arrived - tally.wanted - 6 * math.sqrt(max(tally.miss, one.error.spread))
        ) / tally.wanted
        if over > 0.5:
            text = f"it moves {tally.share:.1f} times as far as the optimiser wants"
            yield Finding("update", "severe", text, "find what else writes it", name, over)
    back = one.extra.back / max(1.0, one.extra.moved)
    # a mask puts a part back, and to 0
    masked = one.extra.masked == one.extra.back and back < 0.99
    if back > GAINS and one.extra.moved >= 8 and not masked:
        text = f"{back:.0%} of the entries that a step moved were put back before the next step"
        yield Finding("update", "severe", text, "find what restores this weight", name, back)
    gone = decay_lost(one.extra)
    if gone > LIMITS["weight decay"][0]:
        yield Finding(
            "weight decay", "moderate", f"{gone:.0%} of its weight decay is lost", DECAY, name, gone
        )


def _at_zero(facts):
    """What is wrong with a learning rate that stays 0; "" where nothing is."""
    if facts.at_zero < 3 or facts.at_zero < 0.25 * facts.looks:
        return ""
    if facts.at_zero == facts.looks:
        return "learning rate was 0 at each look"
    return f"learning rate has been 0 since step {facts.zero_since}"


def rates(seen):
    """The learning rate of all groups: one that never leaves 0, or ends there long before the loop does."""
    texts = {_at_zero(facts) for facts in seen.watch.facts if facts.looks}
    if not texts or "" in texts:
        return []
    return [Finding("update", "moderate", f"the {min(texts)}", "check the schedule, and what steps it")]


STEPLESS = "does the loop call optimizer.step? GradScaler leaves out steps whose gradients are not finite"
DECAY = "let decay be part of the fp32 update that is rounded once"


def decay_lost(extra):
    """Share of weight decay that was not written for sure: what was written beside the rest of the update is
    compared with it, entry by entry.
    """
    if extra.decay_wanted <= 0:
        return 0.0
    sure = 6 * math.sqrt(extra.decay_error) / extra.decay_wanted
    return min(1.0, max(0.0, 1 - extra.decay / extra.decay_wanted - sure))


def decay_of_all(seen):
    """The same over all tensors, where each alone says too little."""
    gone = decay_lost(seen.all_steps)
    if gone <= LIMITS["weight decay"][0] or any(
        decay_lost(e) > LIMITS["weight decay"][0] for e in seen.extra
    ):
        return []
    most = max(range(len(seen.names)), key=lambda i: seen.extra[i].decay_wanted)
    text = f"{gone:.0%} of the weight decay of all tensors is lost, which shows most here"
    return [Finding("weight decay", "moderate", text, DECAY, seen.names[most], gone)]


# ---- Second moments ----------------------------------------------------------------------------------------


def moments(one, name):
    facts, lost, tally = one.facts, one.lost("exp_avg_sq"), one.moment
    if facts.cast:
        old, new, step = facts.cast
        text = f"cast from {_short(old)} to {_short(new)} by step {step}"
        remedy = (
            "load_state_dict of torch casts states to the weight's dtype: put them back as they were saved"
        )
        yield Finding("exp_avg_sq", "moderate", text, remedy, name, 1.0)
        return
    if facts.v_reset:
        step, share = facts.v_reset
        text = f"all zero at step {step}, after steps with gradients: it was reset"
        if share is not None:
            text = f"{share:.0%} of it is less at step {step} than beta2 leaves of it: it was reset"
        elif facts.v_dtype == torch.float16:
            text = f"all zero at step {step}: it was reset, or fp16 holds no squares so small"
        yield Finding("exp_avg_sq", "severe", text, "restore exp_avg_sq at a resume", name, 2.0)
        return
    changes = one.grown.entries + tally.entries
    wanted = one.grown.wanted + tally.wanted
    # the growth of large entries is written even by rounding to nearest
    if changes >= 8 and wanted > 0 and one.grown.share < STILL and tally.share < STILL:
        text = "it stands still: neither growth nor shrinking is written"
        yield Finding("exp_avg_sq", "severe", text, "find what freezes the second moment", name, 1.5)
    elif lost is not None and lost > LIMITS["exp_avg_sq"][0]:
        text = f"{lost:.0%} of the shrinking of v is lost: it can grow and not shrink"
        remedy = "fp32 or stochastically rounded exp_avg_sq, or beta2 0.99"
        yield Finding("exp_avg_sq", "moderate", text, remedy, name, lost)


def accumulators(seen):
    """The other states of optimisers that are no AdamW: sums that rounding to nearest freezes. Of torch's own
    it is measured what they should have written.
    """
    watch, lost, found = seen.watch, {}, []
    for site, sums in watch.accumulators.items() if seen.torchs else ():
        lost[site] = [max(one.unwritten(), one.lost_to_nearest) for one in sums.columns()]
        for name, share in zip(seen.names, lost[site], strict=True):
            if share > LIMITS["exp_avg_sq"][0]:
                text = f"{share:.0%} of what it should take over is not written"
                found.append(Finding(site, "moderate", text, "fp32 states", name, share))
    named = {f.site for f in found}
    return found + [note for note in _narrow_states(watch, lost) if note.site not in named]


def _narrow_states(watch, lost):
    """Notes of states in 16 bits. lost: {name of a state: shares lost, tensor by tensor}."""
    held, exact = {}, getattr(watch.answers, "exact", None)
    for _, p in watch.named if exact is not None else ():
        for site, value in watch.state(p).items():
            judged = site == "exp_avg_sq" or (exact and site == "exp_avg")
            if accumulates(site, value) and value.dtype in net_state.NARROW and not judged:
                held[site, _short(value.dtype)] = held.get((site, _short(value.dtype)), 0) + 1
    for (site, dtype), count in held.items():
        share = f"up to {max(lost[site]):.0%} of a tensor's" if site in lost else "how much, is not known"
        text = f"held in {dtype} for {count} tensors; lost of what it should take over: {share}"
        yield Finding(site, "note", text, "fp32 states, where it decays slowly")


# ---- Averages ----------------------------------------------------------------------------------------------


def averages(one, name):
    watch, tally = one.watch, one.average
    if tally is None:
        return
    stood = one.extra.stood
    if stood and stood >= 1 and not tally.arrived and watch.ema.begun:
        text = "the average has not moved between two looks, and is away from its weight"
        yield Finding("ema", "severe", text, "update it after each step, in fp32", name, 2.0)
        return
    if not tally.entries:
        return
    dtype = watch.ema.shadow[name].dtype if name in watch.ema.shadow else torch.float32
    narrow = dtype in net_state.NARROW
    lost, (low, high) = one.lost("ema"), LIMITS["ema"]
    decay = watch.ema.decay
    if tally.arrived == 0 and tally.entries >= 1:
        text = f"the average stands still in {_short(dtype)}: none of the wanted movement is written"
        yield Finding(
            "ema", "severe", text, "hold and compute it in fp32" if narrow else WRITTEN_AVERAGE, name, 1.5
        )
    elif narrow and lost > low:
        text = f"{tally.stuck:.0%} of the entries away from their weight can't move in {_short(dtype)}, "
        text += f"{lost:.0%} of the wanted movement is lost"
        severity = "severe" if lost > high else "moderate"
        yield Finding(
            "ema", severity, text, "hold and compute it in fp32, or round stochastically", name, lost
        )
    elif decay is not None and tally.share < 0.5:
        rate = tally.share * (1 - decay)
        text = f"it goes {rate:.2g} of the way a step, and its decay {decay:g} says {1 - decay:.2g}"
        severity = "severe" if tally.share < 0.1 else "moderate"
        yield Finding("ema", severity, text, "check how the average is updated", name, 1 - tally.share)
    elif decay is not None and tally.share > 3:
        rate = tally.share * (1 - decay)
        text = f"it goes {rate:.2g} of the way a step, and its decay {decay:g} says {1 - decay:.2g}"
        yield Finding("ema", "moderate", text, "check how the average is updated", name, rate)
    elif one.i == 0 and decay is not None and decay**watch.steps > 0.1 and 0 < decay < 1:
        remains = decay**watch.steps
        text = f"{remains:.0%} of the start remains after {watch.steps} steps of decay {decay:g}"
        remedy = f"a decay of {max(0.0, 1 - 3 / watch.steps):.4g} or less, or more steps"
        severity = "moderate" if watch.steps >= 3000 else "note"
        yield Finding("ema", severity, f"young: {text}", remedy, "", remains)


WRITTEN_AVERAGE = "update all tensors of the average after each step"


# ---- Counters ----------------------------------------------------------------------------------------------


def counters(one, name):
    facts = one.facts
    if facts.counted is None:
        return
    dtype, stuck, value = facts.counted
    if facts.fell:
        before, after = facts.fell
        text = f"its step counter fell from {before:g} to {after:g}: the state was lost or replaced"
        yield Finding("step", "severe", text, "restore the optimiser's state at a resume", name, 3.0)
    elif stuck and dtype in net_state.NARROW:
        text = f"its step counter stands at {value:g}: {_short(dtype)} holds no {value + 1:g}"
        yield Finding("step", "moderate", text, "keep step counters in fp32 or as integers", name, 2.0)
    elif stuck:
        text = f"its step counter did not count at {stuck} of {facts.looks} looks; it says {value:g}"
        yield Finding("step", "moderate", text, "count each step: bias corrections go by it", name, 1.0)
    elif dtype in net_state.NARROW:
        most = 256 if dtype == torch.bfloat16 else 2048
        text = f"its step counter is {_short(dtype)}, which can't count beyond {most}"
        yield Finding("step", "moderate", text, "keep step counters in fp32 or as integers", name, 0.5)
    elif facts.behind > max(2, 0.1 * one.watch.steps) and facts.looks == one.watch.looks:
        text = f"its step counter is {facts.behind:g} behind the {one.watch.steps} steps done"
        yield Finding("step", "note", text, "expected where it has no gradient at some steps", name, 0.1)


def slow_counters(seen):
    """Counters of all tensors that count too few steps. One alone may lack gradients between two looks."""
    watch = seen.watch
    behind = [f.behind for f in watch.facts if f.counted is not None and f.looks == watch.looks]
    rest = [p for f, (_, p) in zip(watch.facts, watch.named, strict=True) if f.looks != watch.looks]
    stuck = any(f.counted and f.counted[1] for f in watch.facts)  # which is named tensor by tensor
    if stuck or not behind or any(steps_of(watch.state(p)) for p in rest):
        return []
    if min(behind) <= max(4, 0.25 * watch.steps):
        return []
    text = f"the step counters of all tensors are {min(behind):g} or more behind the {watch.steps} steps done"
    return [Finding("step", "moderate", text, "count each step: bias corrections go by it", "", 1.0)]


# ---- Noise -------------------------------------------------------------------------------------------------


def noise(seen):
    found, remedy = [], "draw new bits for each step and each entry"
    if seen.torchs:
        return found
    for site, errors, sums in (
        ("noise", seen.errors, seen.watch.errors),
        ("noise of exp_avg_sq", seen.moment_errors, seen.watch.moment_errors),
    ):
        for i, error in enumerate(errors):
            name, nearest = seen.names[i], error.to_nearest
            if nearest or (nearest is None and sums.to_nearest is not False):
                continue
            if error.lumps and abs(error.score) < 0.5 * math.sqrt(error.burst * error.variance):
                text = "the entries of this tensor round together: they share one noise value"
                found.append(Finding(site, "moderate", text, remedy, name, 1.0))
            elif abs(error.bias) > 0.05:
                side = "away from" if error.bias > 0 else "toward"
                mean = abs(error.score) / max(1.0, error.entries)
                text = f"rounding errs {side} zero by {mean:.2g} ulp on average"
                fix = "noise must be uniform over all that is rounded away"
                found.append(Finding(site, "moderate", text, fix, name, abs(error.bias)))
            elif error.repeats:
                text = f"the same noise at every step: errors of two looks correlate by {error.repeats:.2f}"
                found.append(Finding(site, "moderate", text, remedy, name, error.repeats))
            elif error.neighbours:
                text = f"neighbours share their noise: their errors correlate by {error.neighbours:.2f}"
                found.append(Finding(site, "moderate", text, remedy, name, error.neighbours))
        if sums.to_nearest is False:
            for (a, b), value in sums.shares().items():
                text = f"shares its noise with {seen.names[a]}: errors correlate by {value:.2f}"
                found.append(
                    Finding(
                        site, "moderate", text, "noise by place or name of a tensor", seen.names[b], value
                    )
                )
    return found


# ---- Gradients ---------------------------------------------------------------------------------------------


def gradients(seen):
    watch, found = seen.watch, []
    for i, name in enumerate(seen.names):
        extra, facts = seen.extra[i], watch.facts[i]
        if extra.infinite:
            text = f"{extra.infinite:,.0f} gradients of its sample are not finite"
            found.append(
                Finding("grads", "severe", text, "a lower learning rate, clipping or bf16", name, 9.0)
            )
        if facts.looks == 0 and facts.without > 1:
            found.append(
                Finding("grads", "note", "never has a gradient", "is it used and not detached?", name)
            )
        elif facts.idle == facts.looks > 2:
            text = "its gradient is 0 at each look"
            found.append(Finding("grads", "moderate", text, "is it used and not detached?", name, 0.5))
        share = extra.subnormal / max(1.0, extra.graded)
        if extra.graded >= 8 and share > 0.5:
            text = f"{share:.0%} of its gradients are below fp16's normal range"
            found.append(
                Finding(
                    "grads", "moderate", text, "scale the loss (torch.amp.GradScaler), or bf16", name, share
                )
            )
    found += _faint(seen) + _clipped(watch) + _summed(seen) + _forgotten(seen)
    if watch.uncleared:
        text = "gradients of earlier steps are still there when a step begins"
        found.append(
            Finding("grads", "severe", text, "call optimizer.zero_grad() once a step", seen.names[0], 8.0)
        )
    return found


def _faint(seen):
    """Matrices alone: some biases have no gradient but noise, as those of keys in attention."""
    matrices = [i for i, (_, p) in enumerate(seen.watch.named) if p.dim() > 1 and seen.extra[i].judged]
    faint = sum(seen.extra[i].faint for i in matrices)
    judged = sum(seen.extra[i].judged for i in matrices)
    if not judged or faint < 0.5 * judged:
        return []
    worst = max(matrices, key=lambda i: seen.extra[i].faint / seen.extra[i].judged)
    text = f"{faint / judged:.0%} of the second moments are below the optimiser's eps: steps are too short"
    remedy = "a larger clipping norm or loss scale, or a smaller eps"
    return [Finding("grads", "severe", text, remedy, seen.names[worst], faint / judged)]


def _clipped(watch):
    scales = sorted(float(scale) for scale in watch.clips)
    few = sorted(left for left, norm in watch.shrunk if _tiny(left, norm))
    if 2 * len(few) > len(watch.shrunk):
        scales = few  # within p.grad, as torch's clip_grad_norm_ does
    if not scales or scales[len(scales) // 2] > 1e-3:
        return []
    text = f"clipping leaves {scales[len(scales) // 2]:.1g} of the gradient's norm"
    return [Finding("grads", "moderate", text, "clip at the norm that is usual, not far below it", "", 1.0)]


def _tiny(left, norm):
    """Whether hardly anything is left of a gradient: neither a loss scale that was taken off, a power of 2 or
    one that leaves a norm as they usually are.
    """
    mantissa, _ = math.frexp(left)
    return 0 < left < 1e-3 and norm < 1e-3 and min(mantissa - 0.5, 1 - mantissa) > 1e-5


def _summed(seen):
    found, (low, high) = [], LIMITS["accumulate"]
    for i, (total, times, count) in seen.watch.sums_of_gradients.items():
        error = total / times
        # what is far off was changed for another reason than rounding
        if low < error < 0.25:
            text = f"the sum of {count} micro-batches of gradients is {error:.2%} off"
            severity = "severe" if error > high else "moderate"
            found.append(Finding("accumulate", severity, text, MICRO, seen.names[i], error))
    return found


def _forgotten(seen):
    for i, (cleared, count) in list(seen.watch.forgotten.items())[:1]:
        text = f"of {count} backward passes before a step the first {cleared} are forgotten"
        return [
            Finding("accumulate", "severe", text, "clear gradients after the step alone", seen.names[i], 1.0)
        ]
    return []


def dead_parts(seen):
    """Matrices of which an aligned half, third or quarter never has a gradient, as one of a fused qkv."""
    watch = seen.watch
    if watch.alive is None or watch.alive[3] < 3:
        return []
    tables = {
        m.weight for m in watch.model.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    }  # and tables that are bare parameters, of which a short sequence reads a part: pos_embed, wpe
    tables |= {p for name, p in watch.named if re.search("pos|emb|wpe", name.rpartition(".")[2])}
    index, lengths, alive, _ = watch.alive
    found = []
    for i, part in zip(index, alive.cpu().split(lengths), strict=True):
        p = watch.named[i][1]
        if p.dim() < 2 or p in tables or part.all() or not part.any() or hasattr(p, "to_local"):
            continue
        dead = dead_part(part, p.shape, watch.most)
        if dead:
            remedy = "is it used and not detached?"
            text = f"{dead} never have a gradient"
            found.append(Finding("grads", "moderate", text, remedy, seen.names[i], 0.4))
    return found


def dead_part(alive, shape, most):
    """Which aligned half, third or quarter of the rows or columns is dead as a whole while the rest lives;
    "" where none is. alive: bool, of a sample (telemetry.sample) of a tensor of this shape.
    """
    places = sample(torch.arange(math.prod(shape)), most)
    for dim, what in ((0, "rows"), (1, "columns")):
        size = shape[dim]
        at = places // math.prod(shape[dim + 1 :]) % size
        for parts in (2, 3, 4):
            if size % parts or size < 4 * parts:
                continue
            which = at * parts // size
            entries = torch.bincount(which, minlength=parts)
            living = torch.bincount(which, alive.float(), minlength=parts) / entries.clamp_min(1)
            dead = (living == 0).nonzero().flatten().tolist()
            if len(dead) == 1 and entries[dead[0]] >= 16 and living.sum() > 0.9 * (parts - 1):
                width = size // parts
                return f"{what} {dead[0] * width} to {(dead[0] + 1) * width - 1} of {size}"
    return ""


# ---- What is left out --------------------------------------------------------------------------------------


def missing(seen):
    watch, found = seen.watch, []
    if watch.copies:
        if watch.departed > 0.5:
            text = f"the optimiser steps copies, and {watch.departed:.0%} of the weights differ from them"
            remedy = "make the optimiser from the model that trains, or copy its weights back"
            found.append(Finding("optimizer", "severe", text, remedy, next(iter(watch.copies)), 5.0))
        return found
    for name, p in watch.model.named_parameters():
        if p.requires_grad and p not in watch.groups and p not in watch.elsewhere:
            graded = p.grad is not None and bool(p.grad.any())
            severity = "severe" if graded or watch.orphans.get(name) else "note"
            text = (
                "it has gradients, and is in no group of the optimiser" if severity == "severe" else NOWHERE
            )
            remedy = "add it to the optimiser's groups, or tell Watch of the other optimiser: others=[...]"
            found.append(Finding("optimizer", severity, text, remedy, name, 4.0))
    return found


NOWHERE = "it is trained by requires_grad, and is in no group of the optimiser"


def standing(seen):
    parts, alone = net_state.frozen_by_plan(seen.watch.model)
    found = []
    for name in alone:
        text = "requires_grad is False, while others of its kind train"
        found.append(
            Finding("frozen", "moderate", text, "requires_grad_(True), if it should train", name, 1.0)
        )
    if parts:
        some = ", ".join(list(parts)[:3]) + (" ..." if len(parts) > 3 else "")
        text = f"{sum(parts.values())} parameters don't train: {some}"
        found.append(Finding("frozen", "note", text, "nothing, if that is the plan"))
    return found


def buffers(watch):
    found = []
    for name, count in net_state.broken_buffers(watch.model, watch.buffers, watch.pick).items():
        text = f"{count:,} entries of its sample are not finite; they were when the watch began"
        found.append(Finding("buffers", "severe", text, "find what writes it", name, 9.0))
    rounded = net_state.rounded_buffers(watch.model, watch.buffers, watch.pick)
    for name, (what, error) in rounded.items():
        text = f"a buffer {what}"
        if error:
            text += f", {error:.2%} off its fp32 values"
        remedy = "keep buffers in fp32 when the model is cast: RoPE's frequencies, BatchNorm's statistics"
        found.append(Finding("buffers", "moderate", text, remedy, name, error or 0.0))
    return found


def _short(dtype):
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp16", "bf16")
