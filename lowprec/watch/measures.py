"""What findings.py judges of writes, states and averages: one function a kind of fault.

Of a tensor a measure gives a Figure, or None where there is nothing to judge; of a whole run any number of
Figures. The first line of its docstring says what is held against the limit.
"""

import functools
import math

import torch

from ..telemetry import values_here
from . import net_state
from .adapters import accumulates, steps_of
from .faults import Figure
from .measured import decay_lost
from .verdicts import FINDING_LIMITS, cost_of_nearest

MOST_GAINS_AT_ONE = 0.5  # share of a norm's gains that are 1.0
LAST_WHOLE_NUMBER = {torch.bfloat16: 256, torch.float16: 2048}  # up to which all are held


def dtype_name(dtype):
    """bf16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp16", "bf16")


# ---- Weights -----------------------------------------------------------------------------------------------


def rate_always_zero(one):
    """looks at which its learning rate was 0"""
    if one.rate_never_lived and one.seen.some_rates_live:
        return Figure(one.facts.at_zero)
    return None


def rate_at_zero(one):
    """looks since its learning rate became 0"""
    if one.rate_stays_zero and one.seen.some_rates_live:
        return Figure(one.facts.at_zero, {"since": one.facts.zero_since})
    return None


def rate_below_zero(seen):
    """looks at which a learning rate was below 0"""
    below = [one for one in seen.tensors if one.facts.below_zero]
    for one in below[:1]:
        whole = len(below) == len(seen.tensors)
        yield Figure(one.facts.below_zero, {"looks": one.facts.below_zero}, "" if whole else one.name)


def all_rates_always_zero(seen):
    """looks at which all learning rates were 0"""
    looked_at = [one for one in seen.tensors if one.facts.looks]
    if looked_at and all(one.rate_never_lived for one in looked_at):
        yield Figure(looked_at[0].facts.at_zero, tensor="")


def all_rates_at_zero(seen):
    """looks since all learning rates became 0"""
    looked_at = [one for one in seen.tensors if one.facts.looks]
    if looked_at and all(one.rate_stays_zero for one in looked_at):
        later = [one for one in looked_at if not one.rate_never_lived]
        first = min(later or looked_at, key=lambda one: one.facts.zero_since)
        yield Figure(first.facts.at_zero, {"since": first.facts.zero_since}, "")


def not_written(one):
    """share of the wanted movement that is not written"""
    lost = one.lost("update")
    if lost is None:
        return None
    words = {"lost": lost, "of_all": one.seen.lost_of_all}
    if one.narrow:
        words["stuck"] = one.weight.stuck
        words["cost"] = cost_of_nearest(one.seen.stuck_of_all)
        words["code"] = one.seen.line_of_code
    if one.unmoved > 0.01:
        words["unmoved"] = one.unmoved
    return Figure(lost, words, whole=one.seen.lost_of_all)


def lost_to_rounding(one):
    """share of the wanted movement that rounding to nearest loses"""
    figure = not_written(one)
    if figure is None or not one.narrow or one.watch.answers.low_part(one.p) is not None:
        return None
    rounds = one.weight.threatened > 0.5 * one.weight.wanted * figure.value
    by_noise = one.error.variance > 0 and one.to_nearest(one.error) is False
    return figure if rounds and not by_noise else None


def of_gains(measure):
    """The same of a norm's gains, most of which are 1.0 as they started."""

    @functools.wraps(measure)
    def of_gains_alone(one):
        figure = measure(one)
        if figure is None or one.name not in one.seen.norm_weights or one.ones <= MOST_GAINS_AT_ONE:
            return None
        figure.words["ones"] = one.ones
        return figure

    of_gains_alone.__doc__ = f"{measure.__doc__}, of a norm's gains that are mostly 1.0"
    return of_gains_alone


def weight_moves_too_far(one):
    """movement written beyond what is wanted, over what is wanted"""
    if not one.weight.entries or not one.seen.known:
        return None
    chance = 6 * math.sqrt(max(one.weight.miss, one.error.spread))
    beyond = one.weight.arrived - one.weight.wanted - chance
    return Figure(beyond / one.weight.wanted, {"times": one.weight.share})


def weights_are_bf16(one):
    """share of the entries of an fp32 weight that a step moved, and that are bf16 numbers at the next step"""
    if one.p.dtype != torch.float32 or one.extra.moved < 64:
        return None
    # some are after the step by themselves
    return Figure(one.extra.narrowed / one.extra.wide) if one.extra.wide >= 64 else None


def masters_at_first(seen):
    """fp32 weights that were bf16 numbers when the watch began, beside moments of earlier steps"""
    for name in seen.watch.masters.at_first:
        yield Figure(1.0, {}, name)


def masters_rebuilt(seen):
    """the largest fp32 matrix became bf16 numbers between two steps"""
    name, step, times = seen.watch.masters.rebuilt()
    each_step = any((weights_are_bf16(one) or Figure(0.0)).value > 0.99 for one in seen.tensors)
    if times and not each_step:
        yield Figure(times, {"step": step, "times": times}, name)


def weight_put_back(one):
    """share of the entries that a step moved and that stand where they were before the next step"""
    back = one.extra.put_back
    # a mask puts a part back, and to 0
    masked = one.extra.masked == one.extra.back and back < 0.99
    if one.extra.moved < 8 or masked:
        return None
    return Figure(back, {"back": back})


def weight_drifts(one):
    """share of the looks after which something else moved it, by a tenth of the step or more"""
    sums = one.extra
    if not sums.follows or one.p in one.watch.elsewhere or sums.put_back > 0.5:
        return None
    times = math.sqrt(sums.drift / max(sums.stepped, 1e-300))
    if times < 0.1 or not math.isfinite(times) or _has_fixed_norms(one.p):
        return None
    return Figure(sums.drifts / sums.follows, {"times": times})


def weight_goes_back(one):
    """the same where that leads back, as to the slow weights of Lookahead"""
    # right back is no average of several steps: it takes a part of each
    is_back = 0.3 < one.seen.led_back < 0.99
    return weight_drifts(one) if is_back and not one.seen.shrinks else None


def _has_fixed_norms(p):
    """Whether something keeps rows or columns at one norm, as EDM2, nGPT and max_norm do."""
    if p.dim() < 2:
        return False
    near = 4e-3 if p.dtype in net_state.NARROW_DTYPES else 1e-4
    held = values_here(p).detach().float()
    for norms in (held.flatten(1).norm(dim=1), held.transpose(0, 1).flatten(1).norm(dim=1)):
        at_top = norms >= (1 - near) * norms.max()
        if int(at_top.sum()) >= max(2, 0.1 * len(norms)):
            return True
    return False


def moments_are_bf16(one):
    """share of the entries of an fp32 moment that are bf16 numbers, the larger of two"""
    if not hasattr(one.watch.answers, "inner"):
        return None
    state = one.watch.state(one.p)
    found = []
    for name, held, rounded in (
        ("exp_avg", one.extra.m_held, one.extra.m_bf16),
        ("exp_avg_sq", one.extra.v_held, one.extra.v_bf16),
    ):
        value = state.get(name)
        is_wide = type(value) is torch.Tensor and value.dtype == torch.float32
        if is_wide and held >= 64:
            found.append((rounded / held, name))
    if not found:
        return None
    share, name = max(found)
    return Figure(share, {"moment": name})


def moments_rewritten(one):
    """share of the looks after which something else changed a moment, the larger of two"""
    sums = one.extra
    kept = {"exp_avg": sums.m_kept, "exp_avg_sq": sums.v_kept}
    changed = {"exp_avg": sums.m_rewritten, "exp_avg_sq": sums.v_rewritten}
    share, name = max((changed[name] / max(2.0, kept[name]), name) for name in kept)
    return Figure(share, {"moment": name})


def decay_not_written(one):
    """share of its weight decay that is not written"""
    return Figure(one.decay_lost, {"lost": one.decay_lost})


def decay_of_all(seen):
    """share of the weight decay of all tensors, where each alone says too little"""
    if any(one.decay_is_lost for one in seen.tensors):
        return
    lost = decay_lost(seen.watch.extra)
    most = max(seen.tensors, key=lambda one: one.extra.decay_wanted)
    yield Figure(lost, {"lost": lost}, most.name)


# ---- Values that are not finite ----------------------------------------------------------------------------


def weights_burst(one):
    """weights that a step made not finite, although their gradients were finite"""
    return Figure(one.extra.burst, {"count": one.extra.burst})


def weights_burst_in_fp16(one):
    """the same where a state is fp16, in which its eps is 0"""
    return weights_burst(one) if _lost_eps(one) else None


def eps_lost_in_fp16(one):
    """a state is fp16, in which its eps is 0"""
    eps = _lost_eps(one)
    if not eps:
        return None
    share = one.extra.v_gone / max(1.0, one.extra.judged)
    words = {"eps": eps, "share": share} if share else {"eps": eps}
    return Figure(share, words, whole=1.0 if one.extra.broken else share)


def v_gone(one):
    """share of the second moments that are 0 after a gradient whose square is not"""
    v = one.watch.answers.moment(one.p, "exp_avg_sq", one.watch.pick)
    if v is None or not one.extra.judged or _lost_eps(one) or one.watch.answers.coded(one.p, "exp_avg_sq"):
        return None
    share = one.extra.v_gone / one.extra.judged
    if v.dtype not in net_state.NARROW_DTYPES:
        return None
    return Figure(share, {"share": share, "dtype": dtype_name(v.dtype)})


def v_below_zero(one):
    """second moments below 0 before a step"""
    known = getattr(one.watch.answers, "forms_v", True)
    return Figure(one.extra.v_below, {"count": one.extra.v_below}) if known else None


def v_burst(one):
    """second moments that a step made not finite, although their gradients were finite"""
    if not one.extra.v_burst:
        return None
    v = one.watch.answers.moment(one.p, "exp_avg_sq", one.watch.pick)
    words = {"count": one.extra.v_burst}
    if v is not None and v.dtype == torch.float16:
        words["dtype"] = "fp16"
    return Figure(one.extra.v_burst, words)


def broken_weights(one):
    """weights that are not finite before a step, where it was not seen what made them so"""
    return None if one.seen.seen_breaking else Figure(one.extra.broken)


def _lost_eps(one):
    """The eps of a tensor whose states are fp16, where it is 0; 0.0 where it is not."""
    eps = one.watch.groups.get(one.p, {}).get("eps")
    if not isinstance(eps, (int, float)) or torch.tensor(float(eps)).half() > 0:
        return 0.0
    states = [value for name, value in one.watch.state(one.p).items() if accumulates(name, value)]
    return float(eps) if any(value.dtype == torch.float16 for value in states) else 0.0


# ---- Second moments ----------------------------------------------------------------------------------------


def v_cast(one):
    """cast to a narrower dtype"""
    if one.facts.cast is None:
        return None
    old, new, step = one.facts.cast
    return Figure(1.0, {"old": dtype_name(old), "new": dtype_name(new), "step": step})


def v_all_zero(one):
    """0 everywhere, after steps with gradients"""
    if one.facts.v_reset is None:
        return None
    step, share = one.facts.v_reset
    return Figure(1.0, {"step": step}) if share is None else None


def v_all_zero_in_fp16(one):
    """0 everywhere in fp16, after steps with gradients"""
    return v_all_zero(one) if one.facts.v_dtype == torch.float16 else None


def v_begun_anew(one):
    """exp_avg and exp_avg_sq began anew together"""
    if one.facts.v_reset is None or not one.facts.begun_anew:
        return None
    return Figure(1.0, {"step": one.facts.v_reset[0]})


def all_begun_anew(one):
    """exp_avg_sq began anew, and the weight with it"""
    return v_begun_anew(one) if one.facts.begun_anew == "weights" else None


def v_fell(one):
    """share of it that is less than beta2 leaves of it"""
    if one.facts.v_reset is None:
        return None
    step, share = one.facts.v_reset
    return Figure(share, {"share": share, "step": step})


def v_stands(one):
    """share of its growth and shrinking that is not written"""
    changes = one.grown.entries + one.moment.entries
    wanted = one.grown.wanted + one.moment.wanted
    if changes < 8 or wanted <= 0:
        return None
    # the growth of large entries is written even by rounding to nearest
    return Figure(1 - max(one.grown.share, one.moment.share))


def v_grows(one):
    """share of its shrinking that is not written, where it grows instead"""
    return v_not_shrinking(one)


def v_not_shrinking(one):
    """share of its shrinking that is not written"""
    lost = one.lost("exp_avg_sq")
    return None if lost is None else Figure(lost, {"lost": lost})


def momentum_in_codes(one):
    """how far momentum in codes is off where the step orthogonalises it, over its size"""
    error = math.sqrt(one.extra.codes_error / max(one.extra.codes_size, 1e-300))
    return Figure(error, {"error": error})


def accumulators_not_written(seen):
    """share of what it should take over that is not written"""
    for site, lost in seen.accumulators_lost.items():
        for name, share in zip(seen.names, lost, strict=True):
            yield Figure(share, {"state": site, "share": share}, name)


def narrow_states(seen):
    """held in 16 bits, of states that no other row judges"""
    watch = seen.watch
    exact = getattr(watch.answers, "exact", None)
    if exact is None:
        return
    count = {}
    for _, p in watch.named:
        for site, value in watch.state(p).items():
            judged = site == "exp_avg_sq" or (exact and site == "exp_avg")
            if judged or not accumulates(site, value) or value.dtype not in net_state.NARROW_DTYPES:
                continue
            key = site, dtype_name(value.dtype)
            count[key] = count.get(key, 0) + 1
    for (site, dtype), tensors in count.items():
        lost = seen.accumulators_lost.get(site)
        if lost and max(lost) > FINDING_LIMITS["exp_avg_sq"][0]:
            continue
        most = f"up to {max(lost):.0%} of a tensor's" if lost else "how much, is not known"
        yield Figure(1.0, {"state": site, "dtype": dtype, "count": tensors, "most": most}, "")


# ---- Counters ----------------------------------------------------------------------------------------------


def counter_fell(one):
    """steps that it fell by"""
    if one.facts.fell is None:
        return None
    before, after = one.facts.fell
    return Figure(before - after, {"before": before, "after": after})


def counter_put_back(one):
    """the same where it then counts more steps than there were since the last look"""
    return counter_fell(one) if one.facts.put_back else None


def counter_fell_with_moments(one):
    """the same where its moments began anew with it"""
    return counter_fell(one) if one.facts.begun_anew else None


def counter_fell_with_weights(one):
    """the same where weights of the net began anew too"""
    return counter_fell(one) if one.facts.begun_anew == "weights" else None


def counted_without_gradients(one):
    """its counter said 1 before the first step that was seen, and its moments were 0"""
    if not one.facts.counted_empty:
        return None
    beta1, beta2 = (one.watch.answers.decay(one.p, name)[0] for name in ("exp_avg", "exp_avg_sq"))
    return Figure(1.0, {"times": (1 + beta1) / math.sqrt(1 + beta2)})


def counter_stuck(one):
    """looks at which it did not count"""
    if one.facts.counted is None:
        return None
    dtype, stuck, value = one.facts.counted
    words = {"stuck": stuck, "looks": one.facts.looks, "value": value, "next": value + 1}
    return Figure(stuck, {**words, "dtype": dtype_name(dtype)})


def narrow_counter_stuck(one):
    """looks at which a counter in 16 bits did not count"""
    return counter_stuck(one) if _counter_is_narrow(one) else None


def narrow_counter(one):
    """held in 16 bits"""
    if not _counter_is_narrow(one):
        return None
    dtype = one.facts.counted[0]
    return Figure(1.0, {"dtype": dtype_name(dtype), "most": LAST_WHOLE_NUMBER[dtype]})


def _counter_is_narrow(one):
    return one.facts.counted is not None and one.facts.counted[0] in net_state.NARROW_DTYPES


def counter_behind(one):
    """steps that it did not count, over all steps, 20 at least"""
    if one.facts.counted is None or one.facts.looks != one.watch.looks:
        return None
    behind, steps = one.facts.behind, one.watch.steps
    return Figure(behind / max(20, steps), {"behind": behind, "steps": steps})


def states_begin_anew(seen):
    """share of the looks after the first at which all tensors with gradients had no state"""
    kept = [one for one in seen.tensors if one.facts.looks > 2 and one.facts.keeps]
    shares = [(one.facts.empty - 1) / (one.facts.looks - 1) for one in kept]
    if shares:
        yield Figure(min(shares), {"share": min(shares)}, "")


def all_counters_behind(seen):
    """steps that none of them counted, over all steps, 16 at least"""
    # one alone may lack gradients between two looks
    watch = seen.watch
    always = [one for one in seen.tensors if one.facts.looks == watch.looks]
    behind = [one.facts.behind for one in always if one.facts.counted is not None]
    others_count = any(
        one.facts.looks != watch.looks and steps_of(watch.state(one.p)) for one in seen.tensors
    )
    stuck = any(one.facts.counted and one.facts.counted[1] for one in seen.tensors)  # another row's
    if stuck or not behind or others_count:
        return
    words = {"behind": min(behind), "steps": watch.steps}
    yield Figure(min(behind) / max(16, watch.steps), words, "")
