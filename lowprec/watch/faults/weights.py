"""Faults of what is written into weights: learning rates, rounding, other writers, decay, infinities."""

import functools
import math

import torch

from ...telemetry import values_here
from .. import net_state
from ..fault import Figure, of_run, of_tensor
from ..verdicts import FINDING_LIMITS, cost_of_nearest
from .moments import AVOID_FP16

of_update = functools.partial(of_tensor, "update")
updates_of_run = functools.partial(of_run, "update")

# ---- The learning rate -------------------------------------------------------------------------------------


@of_update("its learning rate {how}", "nothing, if it is frozen by plan; else check its group",
           severity="note", rank=1.0)
def rate_at_zero(one):
    """Its learning rate was 0 at all looks or became 0, and others did not."""
    stays = one.rate_stays_zero and one.seen.some_rates_live
    return Figure(how=how_long_at_zero([one])) if stays else None


def how_long_at_zero(tensors):
    """How long learning rates that stay at 0 have been 0, in words."""
    later = [one.facts.zero_since for one in tensors if one.facts.at_zero < one.facts.looks]
    return f"has been 0 since step {min(later)}" if later else "was 0 at each look"


@updates_of_run("the learning rate was below 0 at {figure:g} of its looks: the weights go up the loss",
                "check the schedule: one that goes on beyond its last step, say", above=0.0,
                severity="severe", rank=8.0)
def rate_below_zero(seen):
    """Looks at which a learning rate was below 0."""
    below = [one for one in seen.tensors if one.facts.below_zero]
    if not below:
        return None
    of_all = len(below) == len(seen.tensors)
    return Figure(below[0].facts.below_zero, "" if of_all else below[0].name)


@updates_of_run("the learning rate {how}", "check the schedule, and what steps it", rank=0.0)
def all_rates_at_zero(seen):
    """All learning rates were 0 at all looks, or became 0."""
    if not seen.looked_at or seen.some_rates_live:
        return None
    return Figure(how=how_long_at_zero(seen.looked_at))


# ---- What a step writes ------------------------------------------------------------------------------------

of_lost = functools.partial(
    of_update,
    "[{ones:.0%} of the gains are exactly 1.0; ]{figure:.0%} of the wanted movement is not written"
    "[: {stuck:.0%} of the steps are under half an ulp of their weight]"
    "[; {unmoved:.0%} of the entries have not moved since the first look]",
    family="lost",
    above=FINDING_LIMITS["update"][0],
    severe_above=FINDING_LIMITS["update"][1],
)


@of_lost("{code}, or Kahan compensation, or an fp32 master",
         whole="rounding to nearest loses {of_all:.0%} of all wanted movement of the weights; {cost}")
def lost_to_rounding(one):
    """Share of the wanted movement that rounding to nearest loses; severe by that of all weights; the site is
    gains where those of a norm are mostly 1.0.
    """
    figure = unwritten(one)
    if figure is None or not one.narrow or one.watch.answers.low_part(one.p) is not None:
        return None
    rounds = one.weight.threatened > 0.5 * one.weight.wanted * figure.value
    by_noise = one.error.variance > 0 and one.to_nearest(one.error) is False
    return figure if rounds and not by_noise else None


@of_lost("find what freezes or restores it: the optimiser wants to move it, and it does not move",
         whole="{of_all:.0%} of all wanted movement of the weights is not written")
def not_written(one):
    """Share of the wanted movement that is not written; severe by that of all weights; the site is gains
    where those of a norm are mostly 1.0.
    """
    return None if loses_decay(one) else unwritten(one)


def unwritten(one):
    """Figure of the wanted movement that is not written; None where that is not known."""
    lost = one.lost("update")
    if lost is None:
        return None
    is_gains = one.name in one.seen.norm_weights and one.ones > 0.5  # as they started
    return Figure(
        lost,
        site="gains" if is_gains else None,
        whole=one.seen.lost_of_all,
        of_all=one.seen.lost_of_all,
        ones=one.ones if is_gains else None,
        stuck=one.weight.stuck if one.narrow else None,
        unmoved=one.unmoved if one.unmoved > 0.01 else None,
        cost=cost_of_nearest(one.seen.stuck_of_all),
        code=one.seen.line_of_code,
    )


@of_update("it moves {times:.1f} times as far as the optimiser wants", "find what else writes it", "lost",
           above=0.5, severity="severe")
def weight_moves_too_far(one):
    """Movement written beyond what is wanted, over what is wanted."""
    if not one.weight.entries or not one.seen.known:
        return None
    chance = 6 * math.sqrt(max(one.weight.miss, one.error.spread))
    beyond = one.weight.arrived - one.weight.wanted - chance
    return Figure(beyond / one.weight.wanted, times=one.weight.share)


# ---- What others write after the step ----------------------------------------------------------------------


@of_update("the weight is fp32, and all its values are bf16 numbers after each step: something rounds them",
           "find what casts the weights to bf16 and back, or restores them", "put back", above=0.99,
           severity="severe")
def weights_are_bf16(one):
    """Share of the entries of an fp32 weight that a step moved and that are bf16 numbers at the next step."""
    # some are after the step by themselves
    enough = one.p.dtype == torch.float32 and one.extra.moved >= 64 and one.extra.wide >= 64
    return one.extra.narrowed / one.extra.wide if enough else None


@of_update("{figure:.0%} of the entries that a step moved were put back before the next step",
           "find what restores this weight", "put back", above=0.5, severity="severe")
def weight_put_back(one):
    """Share of the entries that a step moved and that stand where they were before the next step."""
    back = one.extra.put_back
    # a mask puts a part back, and to 0
    masked = one.extra.masked == one.extra.back and back < 0.99
    return None if one.extra.moved < 8 or masked else back


@of_update("something moves it back after the step, by {times:.2g} of the step itself",
           "nothing, if it is a plan as Lookahead", "drift", above=0.5, severity="note")
def weight_goes_back(one):
    """Share of the looks after which something led it back, as to the slow weights of Lookahead."""
    # right back is no average of several steps: it takes a part of each
    is_back = 0.3 < one.seen.led_back < 0.99
    return weight_drifts(one) if is_back and not one.seen.shrinks else None


@of_update("something else moves it after the step, by {times:.2g} of the step itself",
           "find what else writes it: another optimiser (others=[...] tells Watch of it), or a decay or a "
           "cast by hand", "drift", above=0.5)
def weight_drifts(one):
    """Share of the looks after which something else moved it, by a tenth of the step or more."""
    sums = one.extra
    if not sums.follows or one.p in one.watch.elsewhere or sums.put_back > 0.5:
        return None
    times = math.sqrt(sums.drift / max(sums.stepped, 1e-300))
    if times < 0.1 or not math.isfinite(times) or has_fixed_norms(one.p):
        return None
    return Figure(sums.drifts / sums.follows, times=times)


def has_fixed_norms(p):
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


SAVE_THE_MASTERS = "save the fp32 weights, and load them: a bf16 copy lacks what many steps have added up"


@updates_of_run("the weight is fp32, and all its values were bf16 numbers when the watch began, beside "
                "moments of earlier steps: it was rebuilt from a bf16 copy", SAVE_THE_MASTERS, "masters",
                rank=1.0)
def masters_at_first(seen):
    """Fp32 weights that were bf16 numbers when the watch began, beside moments of earlier steps."""
    return [Figure(tensor=name) for name in seen.watch.masters.at_first]


@updates_of_run("the weight is fp32, and all its values became bf16 numbers before step {step}, {figure:g} "
                "times in all: it was rebuilt from a bf16 copy", SAVE_THE_MASTERS, "masters", above=0.0,
                rank=1.0)
def masters_rebuilt(seen):
    """Times that the largest fp32 matrix became bf16 numbers between two steps."""
    name, step, times = seen.watch.masters.rebuilt()
    each_step = any((weights_are_bf16(one) or 0.0) > 0.99 for one in seen.tensors)
    return None if each_step else Figure(times, name, step=step)


# ---- Weight decay ------------------------------------------------------------------------------------------


of_decay = dict(
    site="weight decay",
    remedy="let decay be part of the fp32 update that is rounded once",
    above=FINDING_LIMITS["weight decay"][0],
)


def loses_decay(one):
    """Whether most of what is not written is weight decay, which something other than rounding loses: its row
    speaks for the update.
    """
    lost = one.lost("update")
    if not lost or one.extra.decay_lost <= of_decay["above"] or lost_to_rounding(one):
        return False
    return one.extra.decay_lost * one.extra.decay_path > 0.5 * lost * one.weight.wanted


@of_tensor(text="{figure:.0%} of its weight decay is lost", severe_above=FINDING_LIMITS["update"][1],
           whole="[{of_all:.0%} of all wanted movement of the weights is not written, here most of it decay]",
           **of_decay)
def decay_not_written(one):
    """Share of its weight decay that is not written; severe by what all weights lose, where a tensor loses
    decay most of all.
    """
    lost, of_all = one.extra.decay_lost, one.seen.lost_of_all
    if not loses_decay(one):
        return Figure(lost, whole=0.0)
    return Figure(lost, whole=of_all, costs="update", of_all=of_all)


@of_run(text="{figure:.0%} of the weight decay of all tensors is lost, which shows most here", **of_decay)
def decay_of_all(seen):
    """Share of the weight decay of all tensors, where each alone says too little."""
    if any(one.extra.decay_lost > of_decay["above"] for one in seen.tensors):
        return None
    most = max(seen.tensors, key=lambda one: one.extra.decay_wanted)
    return Figure(seen.watch.extra.decay_lost, most.name)


# ---- Numbers that are not finite ---------------------------------------------------------------------------


@of_tensor("exp_avg_sq", "{figure:,.0f} second moments are below 0, which no mean of squares is",
           "load the states as they were saved: were exp_avg and exp_avg_sq swapped?", "finite", above=0.0,
           severity="severe", rank=10.5)
def v_below_zero(one):
    """Second moments below 0 before a step."""
    return one.extra.v_below if getattr(one.watch.answers, "forms_v", True) else None


@of_tensor("exp_avg_sq", "{figure:,.0f} weights became not finite in a step whose gradients are finite: in "
           "fp16 the optimiser's eps is 0, and so are small squares, and it divides by 0", AVOID_FP16,
           "finite", above=0.0, severity="severe", rank=10.0)
def weights_burst_in_fp16(one):
    """Weights that a step made not finite, although their gradients were finite, by a state in fp16, in which
    its eps is 0.
    """
    return one.extra.burst if one.eps_lost_in_fp16 else None


@of_tensor("exp_avg_sq", "its eps of {eps:g} is 0 in fp16[, and so are {share:.0%} of the squares of its "
           "gradients]: the step divides by 0 where a gradient is small", AVOID_FP16, "finite",
           severe_above=0.01, rank=9.9)
def eps_lost_in_fp16(one):
    """A state is fp16, in which its eps is 0; severe by the share of squares that are 0 too."""
    if not one.eps_lost_in_fp16:
        return None
    share = one.extra.v_gone / max(1.0, one.extra.judged)
    whole = 1.0 if one.extra.broken else share
    return Figure(share, whole=whole, eps=one.eps_lost_in_fp16, share=share or None)


@of_update("{figure:,.0f} weights became not finite in a step whose gradients are finite",
           "look at the optimiser's states and its eps, and at what is 0 in their dtype", "finite", above=0.0,
           severity="severe", rank=10.0)
def weights_burst(one):
    """Weights that a step made not finite, although their gradients were finite."""
    return one.extra.burst


@of_tensor("weights", "weights of its sample were not finite before a step",
           "watch with every=1 from an earlier checkpoint, to see what makes them so", "finite", above=0.0,
           severity="severe", rank=9.0)
def broken_weights(one):
    """Weights that are not finite before a step, where it was not seen what made them so."""
    return None if one.seen.seen_breaking else one.extra.broken
