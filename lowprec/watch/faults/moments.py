"""Faults of what an optimiser keeps: moments, other states, the counter of its steps."""

import functools
import math

import torch

from ..adapters import accumulates, steps_of
from ..fault import Figure, of_run, of_tensor
from ..measured import HARDLY_WRITTEN
from ..net_state import LAST_WHOLE_NUMBER, NARROW_DTYPES, dtype_name
from ..verdicts import FINDING_LIMITS

of_moments = functools.partial(of_tensor, "exp_avg_sq", family="moments")
of_v = functools.partial(of_tensor, "exp_avg_sq", family="second moment")
of_counter = functools.partial(of_tensor, "step", family="counter")
counters_of_run = functools.partial(of_run, "step", family="counters")

AVOID_FP16 = (
    "fp32 weights and states, with the products under autocast, or bf16 ones: fp16 holds nothing below 6e-8"
)
RESTORE_SECOND_MOMENT = "restore exp_avg_sq at a resume"
RESTORE_THE_STATE = "restore the optimiser's state at a resume; nothing, if it is a restart by plan"
NOTHING_IF_RESTARTED_BY_PLAN = "nothing, if it is a restart by plan as of ReLoRA"

# ---- What others write into moments ------------------------------------------------------------------------


@of_moments("{moment} is fp32, and all its values are bf16 numbers: something rounds them between steps",
            "save and move states as they are, in fp32", above=0.99)
def moments_are_bf16(one):
    """Share of the entries of an fp32 moment that are bf16 numbers, the larger of two."""
    if not hasattr(one.watch.answers, "inner"):
        return None
    sums, state = one.extra, one.watch.state(one.p)
    first, second = ("exp_avg", sums.m_held, sums.m_bf16), ("exp_avg_sq", sums.v_held, sums.v_bf16)
    found = []
    for name, held, rounded in (first, second):
        moment = state.get(name)
        if type(moment) is torch.Tensor and moment.dtype == torch.float32 and held >= 64:
            found.append((rounded / held, name))
    share, name = max(found, default=(0.0, ""))
    return Figure(share, moment=name)


@of_moments("something else changes {moment} between two steps", "find what writes the optimiser's states",
            above=0.5)
def moments_rewritten(one):
    """Share of the looks after which something else changed a moment, the larger of two."""
    sums = one.extra
    first = sums.m_rewritten / max(2.0, sums.m_kept), "exp_avg"
    share, name = max(first, (sums.v_rewritten / max(2.0, sums.v_kept), "exp_avg_sq"))
    return Figure(share, moment=name)


# ---- Second moments ----------------------------------------------------------------------------------------


@of_v("{figure:,.0f} second moments became not finite in a step whose gradients are finite[: {dtype} holds "
      "no squares above 65,504]", "fp32 states, or take the loss scale off before the step", above=0.0,
      severity="severe", rank=9.5)
def v_burst(one):
    """Second moments that a step made not finite, although their gradients were finite."""
    is_fp16 = one.v is not None and one.v.dtype == torch.float16
    return Figure(one.extra.v_burst, dtype="fp16" if is_fp16 else None)


@of_v("cast from {old} to {new} by step {step}",
      "load_state_dict of torch casts states to the weight's dtype: put them back as they were saved")
def v_cast(one):
    """Cast to a narrower dtype."""
    if one.facts.cast is None:
        return None
    old, new, step = one.facts.cast
    return Figure(old=dtype_name(old), new=dtype_name(new), step=step)


@of_v("its second moment began anew before step {step}, as weights did", NOTHING_IF_RESTARTED_BY_PLAN,
      severity="note", rank=0.5)
def v_begun_anew_with_weights(one):
    """exp_avg_sq began anew, and the weight with it."""
    return v_begun_anew(one) if one.facts.begun_anew == "weights" else None


@of_v("both moments were 0 at step {step}, after steps with gradients: they began anew", RESTORE_THE_STATE,
      rank=1.0)
def v_begun_anew(one):
    """exp_avg and exp_avg_sq began anew together."""
    known = one.facts.v_reset is not None and one.facts.begun_anew
    return Figure(step=one.facts.v_reset[0]) if known else None


@of_v("all zero at step {step}: fp16 holds no squares so small", AVOID_FP16, severity="severe", rank=2.0)
def v_all_zero_in_fp16(one):
    """0 everywhere in fp16, after steps with gradients."""
    return v_all_zero(one) if one.facts.v_dtype == torch.float16 else None


@of_v("{figure:.0%} of the second moments are 0 in {dtype}, where squares of gradients are not: steps there "
      "are too long", "fp32 or bf16 states, which hold small squares", above=0.05, severity="severe",
      rank=1.7)
def v_gone(one):
    """Share of the second moments that are 0 after a gradient whose square is not."""
    if one.v is None or one.v.dtype not in NARROW_DTYPES or not one.extra.judged:
        return None
    if one.eps_lost_in_fp16 or one.watch.answers.coded(one.p, "exp_avg_sq"):
        return None
    return Figure(one.extra.v_gone / one.extra.judged, dtype=dtype_name(one.v.dtype))


@of_v("all zero at step {step}, after steps with gradients: it was reset", RESTORE_SECOND_MOMENT,
      severity="severe", rank=2.0)
def v_all_zero(one):
    """0 everywhere, after steps with gradients."""
    step, share = one.facts.v_reset or (0, 0.0)
    return Figure(step=step) if share is None else None


@of_v("{figure:.0%} of it is less at step {step} than beta2 leaves of it: it was reset",
      RESTORE_SECOND_MOMENT, above=0.1, severity="severe", rank=2.0)
def v_fell(one):
    """Share of it that is less than beta2 leaves of it."""
    step, share = one.facts.v_reset or (0, 0.0)
    return None if share is None else Figure(share, step=step)


@of_v("it stands still: neither growth nor shrinking is written", "find what freezes the second moment",
      above=1 - HARDLY_WRITTEN, severity="severe", rank=1.5)
def v_stands(one):
    """Share of its growth and shrinking that is not written."""
    if one.grown.entries + one.moment.entries < 8 or one.grown.wanted + one.moment.wanted <= 0:
        return None
    # the growth of large entries is written even by rounding to nearest
    return 1 - max(one.grown.share, one.moment.share)


@of_v("it grows where it should shrink: entries with small gradients take too short steps",
      "fp32 or 8-bit exp_avg_sq, or beta2 0.99", above=1.0)
def v_grows(one):
    """Share of its shrinking that is not written, where it grows instead."""
    return one.lost("exp_avg_sq")


@of_v("{figure:.0%} of the shrinking of v is lost: it can grow and not shrink",
      "fp32 or stochastically rounded exp_avg_sq, or beta2 0.99", above=FINDING_LIMITS["exp_avg_sq"][0])
def v_not_shrinking(one):
    """Share of its shrinking that is not written."""
    return one.lost("exp_avg_sq")


# ---- Other states ------------------------------------------------------------------------------------------


@of_tensor("momentum",
           "its codes are {figure:.0%} off, and the step makes small parts as large as the large ones",
           "8-bit codes or bf16", above=0.05)
def momentum_in_codes(one):
    """How far momentum in codes is off where the step orthogonalises it, over its size."""
    return math.sqrt(one.extra.codes_error / max(one.extra.codes_size, 1e-300))


@of_run("a state", "{figure:.0%} of what it should take over is not written", "fp32 states",
        above=FINDING_LIMITS["exp_avg_sq"][0])
def accumulators_not_written(seen):
    """Share of what a state should take over that is not written; the site is its name."""
    for state, lost in seen.accumulators_lost.items():
        for name, share in zip(seen.names, lost, strict=True):
            yield Figure(share, name, state)


@of_run("a state", "held in {dtype} for {count} tensors; lost of what it should take over: {most}",
        "fp32 states, where it decays slowly", severity="note", rank=0.0)
def narrow_states(seen):
    """Held in 16 bits, of states that no other row judges; the site is its name."""
    watch = seen.watch
    exact = getattr(watch.answers, "exact", None)
    if exact is None:
        return
    count = {}
    for _, p in watch.named:
        for state, value in watch.state(p).items():
            judged = state == "exp_avg_sq" or (exact and state == "exp_avg")
            if not judged and accumulates(state, value) and value.dtype in NARROW_DTYPES:
                key = state, dtype_name(value.dtype)
                count[key] = count.get(key, 0) + 1
    for (state, dtype), tensors in count.items():
        worst = max(seen.accumulators_lost.get(state, [math.nan]))
        if worst > FINDING_LIMITS["exp_avg_sq"][0]:
            continue
        most = "how much, is not known" if math.isnan(worst) else f"up to {worst:.0%} of a tensor's"
        yield Figure(site=state, dtype=dtype, count=tensors, most=most)


# ---- Counters ----------------------------------------------------------------------------------------------

COUNT_EACH_STEP = "count each step: bias corrections go by it"
WIDEN_THE_COUNTER = "keep step counters in fp32 or as integers"
FELL = "its step counter fell from {before:g} to {after:g}"


@of_counter(f"{FELL}, and weights began anew with it", NOTHING_IF_RESTARTED_BY_PLAN, severity="note",
            rank=3.0)
def counter_fell_with_weights(one):
    """It fell, and weights of the net began anew too."""
    return counter_fell(one) if one.facts.begun_anew == "weights" else None


@of_counter(f"{FELL}: an earlier state was put back", "nothing, if the weights were put back with it",
            severity="note", rank=3.0)
def counter_put_back(one):
    """It fell, and then counts more steps than there were since the last look."""
    return counter_fell(one) if one.facts.put_back else None


@of_counter(f"{FELL}, and its moments began anew with it", RESTORE_THE_STATE, rank=3.0)
def counter_fell_with_moments(one):
    """It fell, and its moments began anew with it."""
    return counter_fell(one) if one.facts.begun_anew else None


@of_counter(f"{FELL}: the state was lost or replaced", "restore the optimiser's state at a resume",
            severity="severe", rank=3.0)
def counter_fell(one):
    """It fell."""
    if one.facts.fell is None:
        return None
    before, after = one.facts.fell
    return Figure(before=before, after=after)


@of_counter("a step without gradients was counted before the first one, as torch.distributed.checkpoint does "
            "to make states: the first steps are up to {times:.2f} times too short",
            "load the states after that, or set their `step` to 0", severity="note", rank=0.5)
def counted_without_gradients(one):
    """It said 1 before the first step that was seen, and its moments were 0."""
    if not one.facts.counted_empty:
        return None
    beta1, beta2 = (one.watch.answers.decay(one.p, name)[0] for name in ("exp_avg", "exp_avg_sq"))
    return Figure(times=(1 + beta1) / math.sqrt(1 + beta2))


@of_counter("its step counter stands at {value:g}: {dtype} holds no {next:g}", WIDEN_THE_COUNTER, above=0.0,
            rank=2.0)
def narrow_counter_stuck(one):
    """Looks at which a counter in 16 bits did not count."""
    return counter_stuck(one) if one.counter_is_narrow else None


@of_counter("its step counter did not count at {figure:g} of {looks} looks; it says {value:g}",
            COUNT_EACH_STEP, above=0.0, rank=1.0)
def counter_stuck(one):
    """Looks at which it did not count."""
    if one.facts.counted is None:
        return None
    dtype, stuck, value = one.facts.counted
    return Figure(stuck, looks=one.facts.looks, value=value, next=value + 1, dtype=dtype_name(dtype))


@of_counter("its step counter is {dtype}, which can't count beyond {most}", WIDEN_THE_COUNTER, rank=0.5)
def narrow_counter(one):
    """Held in 16 bits."""
    if not one.counter_is_narrow:
        return None
    dtype = one.facts.counted[0]
    return Figure(dtype=dtype_name(dtype), most=LAST_WHOLE_NUMBER[dtype])


@of_counter("its step counter is {behind:g} behind the {steps} steps done",
            "expected where it has no gradient at some steps", above=0.1, severity="note", rank=0.1)
def counter_behind(one):
    """Steps that it did not count, over all steps, 20 at least."""
    if one.facts.counted is None or one.facts.looks != one.watch.looks:
        return None
    behind, steps = one.facts.behind, one.watch.steps
    return Figure(behind / max(20, steps), behind=behind, steps=steps)


@counters_of_run("the optimiser's states were empty at {figure:.0%} of the looks after the first",
                 "keep the states from step to step: find what clears them or makes the optimiser anew",
                 above=0.5, severity="severe", rank=3.5)
def states_begin_anew(seen):
    """Share of the looks after the first at which all tensors with gradients had no state."""
    kept = [one.facts for one in seen.tensors if one.facts.looks > 2 and one.facts.keeps]
    return min(((facts.empty - 1) / (facts.looks - 1) for facts in kept), default=None)


@counters_of_run("the step counters of all tensors are {behind:g} or more behind the {steps} steps done",
                 COUNT_EACH_STEP, above=0.25, rank=1.0)
def all_counters_behind(seen):
    """Steps that none of them counted, over all steps, 16 at least."""
    watch = seen.watch
    behind = []
    if watch.states.passed_by:
        return None
    for one in seen.tensors:
        if one.facts.counted and one.facts.counted[1]:
            return None  # it stands, which another row tells
        if one.facts.looks == watch.looks:
            behind += [one.facts.behind] if one.facts.counted else []
        elif steps_of(watch.state(one.p)):  # one that lacks gradients between two looks, and counts
            return None
    if not behind:
        return None
    return Figure(min(behind) / max(16, watch.steps), behind=min(behind), steps=watch.steps)
