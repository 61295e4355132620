"""Faults of averages of the weights: where one is, where it goes and how fast, what its counter says."""

import functools
import math

from ...telemetry import values_here
from ..fault import Figure, of_average, of_run
from ..gradients import ENOUGH_ENTRIES
from ..net_state import dtype_name
from ..verdicts import FINDING_LIMITS
from ..write_errors import CERTAIN_STANDARD_ERRORS

of_ema = functools.partial(of_average, "ema", family="average")
severe_of_ema = functools.partial(of_ema, severity="severe")
averages_of_run = functools.partial(of_run, "ema")

# of averages, in a loop and in checkpoints
CHECK_ITS_SIGN = "check the sign of its update: average += (1 - decay) * (weight - average)"
CHECK_ITS_UPDATE = "check how the average is updated"
BEGIN_ANEW = "begin the average anew from the weights, and find what wrote it"
FROM_THIS_NET = (
    "update it with the weights of this net, each with its own, as average.lerp_(weight, 1 - decay)"
)

# ---- Where it is, and where it goes ------------------------------------------------------------------------


@severe_of_ema("{figure:,.0f} entries of its sample are not finite, and those of its weight are", BEGIN_ANEW,
               above=0.0, rank=9.0)
def average_not_finite(one):
    """Entries of the average that are not finite, while those of its weight are."""
    return one.averaging.infinite if bool(one.watch.pick(one.p).isfinite().all()) else None


@severe_of_ema("the average has the other sign than its weight", CHECK_ITS_SIGN, above=0.9, rank=3.5)
def average_of_other_sign(one):
    """Minus the cosine of the average and its weight."""
    sums = one.averaging
    # a few entries change their sign by themselves
    if sums.entries < ENOUGH_ENTRIES * sums.looks or sums.square * sums.weight_square == 0:
        return None
    return -sums.product / math.sqrt(sums.square * sums.weight_square)


MOVES_AWAY = "the average moves away from its weight, by {rate:.2g} of the way a step"


@severe_of_ema(MOVES_AWAY, CHECK_ITS_SIGN, rank=3.0)
def average_goes_right_away(one):
    """Minus the cosine of what the average moved and the way to its weight is above 0.9, or above 0.25 where
    rounding to 16 bits hides how straight it is.
    """
    figure = average_goes_away(one)
    return figure if figure and figure.value > (0.25 if one.average_is_narrow else 0.9) else None


@severe_of_ema(MOVES_AWAY, FROM_THIS_NET, above=0.25, rank=3.0)
def average_goes_away(one):
    """Minus the cosine of what the average moved and the way to its weight."""
    sums = one.averaging
    if sums.gap_square * sums.move_square == 0:
        return None
    size = math.sqrt(sums.gap_square * sums.move_square)
    if one.average_is_narrow:
        # most entries stay, and two roundings may move some of them to either side
        if -sums.along < CERTAIN_STANDARD_ERRORS * math.sqrt(sums.spread):
            return None
        size = sums.path
    return Figure(-sums.along / size, rate=-sums.along / sums.gap_square)


@severe_of_ema("the average goes {figure:.2g} of the way to its weight a step, beyond it",
               "a rate of 1 - decay, between 0 and 1", above=1.1, rank=2.5)
def average_overshoots(one):
    """The way it goes a step, over the whole way to its weight."""
    sums = one.averaging
    by_chance = one.average_is_narrow and sums.along < CERTAIN_STANDARD_ERRORS * math.sqrt(sums.spread)
    return None if sums.gap_square == 0 or by_chance else sums.along / sums.gap_square


@severe_of_ema("the average is {figure:,.0f} times as large as its weight", CHECK_ITS_UPDATE, above=10.0,
               rank=4.0)
def average_too_large(one):
    """Norm of the average over that of its weight."""
    sums = one.averaging
    return math.sqrt(sums.square / sums.weight_square) if sums.weight_square else None


@severe_of_ema("at once the average went {times:.3g} times as far as its weight was away",
               "find what else writes the average", above=0.0, rank=2.2)
def average_jumped(one):
    """Times it went farther than 1.5 times the way to its weight, in a step or since the last look."""
    return Figure(one.averaging.jumps, times=one.averaging.jumped)


@of_ema("between two looks the average went {part:.0%} of the way to its weight, farther than its decay lets "
        "it: something wrote the weights over it", "restore the average and its counter at a resume",
        above=0.0, rank=2.2)
def average_overtaken(one):
    """Looks by which it had gone over half of the way to its weight, where its decay lets it go a quarter."""
    return None if one.may_be_copied else Figure(one.averaging.overtaken, part=one.averaging.overtook)


@severe_of_ema("the average moves, and not toward its weight", FROM_THIS_NET, above=0.5, rank=2.1)
def average_goes_elsewhere(one):
    """1 less the mean cosine of what an fp32 average moved and the way to its weight."""
    sums = one.averaging
    if one.average_is_narrow or not sums.directed or sums.entries < ENOUGH_ENTRIES * sums.looks:
        return None
    return 1 - sums.cosine / sums.directed


@severe_of_ema("the average is fp32, and all its values are bf16 numbers: something rounds them",
               "hold, move and compute it in fp32", above=0.99, rank=1.5)
def average_is_bf16(one):
    """Share of the entries of an fp32 average that are bf16 numbers, where their weights are none."""
    sums = one.averaging
    return None if sums.seen < 64 or one.average_is_narrow else sums.bf16 / sums.seen


@severe_of_ema("the average is the weight itself: they share their memory",
               "clone the weights where the average is made", rank=2.3)
def average_is_its_weight(one):
    """Shares the memory of its weight."""
    shadow = one.ema.shadow.get(one.name)
    here = values_here(one.p)  # a rank may have no rows of a tensor, and so no memory
    return shadow is not None and here.numel() > 0 and here.data_ptr() == values_here(shadow).data_ptr()


@of_ema("the average is a copy of its weight at each look: it averages nothing", "is its decay applied?",
        above=0.99, rank=1.0)
def average_copies(one):
    """Share of the entries away from their weight that the average copies from it, at 2 looks or more."""
    sums = one.averaging
    is_to_follow = sums.said > 0.5 * sums.gap_square or one.may_be_copied
    return None if is_to_follow or sums.looks < 1.5 or not sums.away else sums.copied / sums.away


@severe_of_ema("the average has not moved between two looks, and is away from its weight",
               "update it after each step, in fp32", above=0.5, rank=2.0)
def average_stood(one):
    """Looks between which the average did not move, although it is away from its weight."""
    return None if one.average.arrived or not one.ema.begun else one.averaging.stood


@severe_of_ema("the average stands still in {dtype}: none of the wanted movement is written",
               "update all tensors of the average after each step, in fp32", rank=1.5)
def average_stands(one):
    """Nothing is written of the wanted movement."""
    stands = one.average.entries >= 1 and not one.average.arrived
    return Figure(dtype=dtype_name(one.average_dtype)) if stands else None


@of_ema("{stuck:.0%} of the entries away from their weight can't move in {dtype}, {figure:.0%} of the wanted "
        "movement is lost", "hold and compute it in fp32, or round stochastically",
        above=FINDING_LIMITS["ema"][0], severe_above=FINDING_LIMITS["ema"][1])
def narrow_average(one):
    """Share of the wanted movement that an average in 16 bits loses."""
    if not one.average_is_narrow or not one.average.entries:
        return None
    return Figure(one.lost("ema"), stuck=one.average.stuck, dtype=dtype_name(one.average_dtype))


# ---- How fast it goes --------------------------------------------------------------------------------------

OTHER_RATE = "it goes {rate:.2g} of the way a step, and its decay {decay:g} says {said:.2g}"


@of_ema(OTHER_RATE, CHECK_ITS_UPDATE, above=0.5, severe_above=0.9)
def average_slow(one):
    """Share of the way a step that its decay says and that it does not go."""
    said = said_rate(one)
    return rates(one, said, 1 - one.average.share) if said else None


@of_ema(OTHER_RATE, "check how the average is updated: once a step?", above=1.7)
def average_fast(one):
    """The way it goes a step, over what its decay says."""
    said = said_rate(one)
    # rounding to nearest moves entries far at a time
    by_chance = one.average_is_narrow and one.average.share < 3
    return rates(one, said, one.average.share) if said and not by_chance else None


def said_rate(one):
    """The rate that its decay says; None or 0.0 where that is not known."""
    if not one.average.entries:
        return None
    said = one.averaging.said / max(one.averaging.gap_square, 1e-300)
    if not said and one.ema.decay is not None:
        said = 1 - one.ema.decay
    return said


def rates(one, said, figure):
    return Figure(figure, rate=one.average.share * said, decay=1 - said, said=said)


@of_ema("young: {figure:.0%} of the start remains after {steps} steps of decay {decay:g}",
        "a decay of {less:.4g} or less, or more steps", above=0.1)
def average_young(one):
    """Share of the start that remains in it; a note until there were 3000 steps."""
    steps = one.watch.steps
    decay = one.ema.decay if one.average.entries and one.i == 0 else None
    if decay is None or not 0 < decay < 1:
        return None
    less = 0.05 ** (1 / steps)  # of which a twentieth of the start would remain
    severity = "note" if steps < 3000 else None
    return Figure(decay**steps, "", severity=severity, steps=steps, decay=decay, less=less)


# ---- All of it ---------------------------------------------------------------------------------------------


@averages_of_run("it has no average of {figure:.0f} of the {all} tensors that train, as {name}",
                 "average all that trains, buffers aside", rank=1.2)
def average_lacks(seen):
    """Trained tensors that the average has not, while it has others."""
    shadow = seen.watch.averages.average.shadow
    missing = [name for name in seen.names if name not in shadow]
    return Figure(len(missing), all=len(seen.names), name=missing[0]) if shadow and missing else None


of_its_counter = functools.partial(averages_of_run, family="counter of the average")


@of_its_counter("the counter of the average fell from {before:g} to {after:g}: its warm-up begins anew",
                "restore the average's counter at a resume", severity="severe", rank=2.5)
def average_counter_fell(seen):
    """Its counter fell."""
    fell = seen.watch.averages.fell
    return Figure(before=fell[0], after=fell[1]) if fell else None


@of_its_counter("the average was never updated: its counter says 0", "update it after each step", above=2.0,
                rank=1.0)
def average_never_updated(seen):
    """Looks at which its counter says that it was never updated."""
    looks = average_not_begun(seen)
    return looks if looks and not seen.watch.averages.average.may_begin_late else None


@of_its_counter("the average was not updated yet: its counter says 0", "nothing, if it begins later, as SWA",
                above=2.0, severity="note", rank=1.0)
def average_not_begun(seen):
    """Looks at which the counter of torch's AveragedModel says that it was never updated."""
    average = seen.watch.averages.average
    return None if average.begun or seen.watch.averages.moves else seen.watch.looks


@of_its_counter("the counter of the average stands at {count:g}, while the average moves",
                "count each update: the average's warm-up goes by it", above=2.0, rank=1.0)
def average_counter_stands(seen):
    """Looks at which it moved, while its counter says the same at all of them."""
    averages = seen.watch.averages
    return None if averages.counts_up else Figure(averages.moves, count=averages.count)
