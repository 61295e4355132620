"""What findings.py judges of averages; see measures.py."""

import math

from ..telemetry import values_here
from . import net_state
from .faults import Figure
from .gradients import ENOUGH_ENTRIES
from .measures import dtype_name
from .write_errors import CERTAIN_STANDARD_ERRORS

# ---- Where it is, and where it goes ------------------------------------------------------------------------


def average_not_finite(one):
    """entries of the average that are not finite, while those of its weight are"""
    if one.averaging is None or not bool(one.watch.pick(one.p).isfinite().all()):
        return None
    return Figure(one.averaging.infinite, {"count": one.averaging.infinite})


def average_too_large(one):
    """norm of the average over that of its weight"""
    if one.averaging is None or one.averaging.weight_square == 0:
        return None
    times = math.sqrt(one.averaging.square / one.averaging.weight_square)
    return Figure(times, {"times": times})


def average_of_other_sign(one):
    """minus the cosine of the average and its weight"""
    sums = one.averaging
    # a few entries change their sign by themselves
    if sums is None or sums.entries < ENOUGH_ENTRIES * sums.looks or sums.square * sums.weight_square == 0:
        return None
    return Figure(-sums.product / math.sqrt(sums.square * sums.weight_square))


def average_goes_away(one):
    """minus the cosine of what the average moved and the way to its weight"""
    sums = one.averaging
    if sums is None or sums.gap_square * sums.move_square == 0:
        return None
    size = math.sqrt(sums.gap_square * sums.move_square)
    if _average_is_narrow(one):
        # most entries stay, and two roundings may move some of them to either side
        if -sums.along < CERTAIN_STANDARD_ERRORS * math.sqrt(sums.spread):
            return None
        size = sums.path
    return Figure(-sums.along / size, {"rate": -sums.along / sums.gap_square})


def average_goes_right_away(one):
    """the same where it leads right back"""
    figure = average_goes_away(one)
    # rounding hides how straight it is
    straight = figure is not None and (_average_is_narrow(one) or figure.value > 0.9)
    return Figure(1.0, figure.words) if straight and figure.value > 0.25 else None


def average_goes_elsewhere(one):
    """1 less the mean cosine of what an fp32 average moved and the way to its weight"""
    sums = one.averaging
    if _average_is_narrow(one) or sums is None or not sums.directed:
        return None
    if sums.entries < ENOUGH_ENTRIES * sums.looks:
        return None
    return Figure(1 - sums.cosine / sums.directed)


def average_overshoots(one):
    """the way it goes a step, over the whole way to its weight"""
    sums = one.averaging
    if sums is None or sums.gap_square == 0:
        return None
    if _average_is_narrow(one) and sums.along < CERTAIN_STANDARD_ERRORS * math.sqrt(sums.spread):
        return None
    rate = sums.along / sums.gap_square
    return Figure(rate, {"rate": rate})


def average_jumped(one):
    """times it went farther than 1.5 times the way to its weight, in a step or since the last look"""
    if one.averaging is None:
        return None
    return Figure(one.averaging.jumps, {"times": one.averaging.jumped})


def average_overtaken(one):
    """looks by which it had gone over half of the way to its weight, and 3 times what its decay lets it"""
    if one.averaging is None:
        return None
    return Figure(one.averaging.overtaken, {"part": one.averaging.overtook})


def average_is_bf16(one):
    """share of the entries of an fp32 average that are bf16 numbers, where their weights are none"""
    sums = one.averaging
    if sums is None or sums.seen < 64 or _average_is_narrow(one):
        return None
    return Figure(sums.bf16 / sums.seen)


def average_is_its_weight(one):
    """shares the memory of its weight"""
    shadow = one.watch.ema.shadow if one.average is not None else {}
    if one.name not in shadow:
        return None
    here = values_here(one.p)  # a rank may have no rows of a tensor, and so no memory
    if here.numel() and here.data_ptr() == values_here(shadow[one.name]).data_ptr():
        return Figure(1.0)
    return None


def average_copies(one):
    """share of the entries away from their weight that the average copies from it, at 2 looks or more"""
    sums = one.averaging
    if sums is None or sums.looks < 1.5 or not sums.away:
        return None
    if sums.said > 0.5 * sums.gap_square:  # it is to follow its weight
        return None
    return Figure(sums.copied / sums.away)


def average_stood(one):
    """looks between which the average did not move, although it is away from its weight"""
    if one.average is None or one.average.arrived or not one.watch.ema.begun:
        return None
    return Figure(one.extra.stood)


def average_stands(one):
    """share of the wanted movement that is not written"""
    if one.average is None or one.average.entries < 1 or one.average.arrived:
        return None
    return Figure(1.0, {"dtype": dtype_name(one.average_dtype)})


def narrow_average_stands(one):
    """share of the wanted movement that an average in 16 bits does not write"""
    return average_stands(one) if _average_is_narrow(one) else None


def narrow_average(one):
    """share of the wanted movement that an average in 16 bits loses"""
    if not _average_is_narrow(one) or not one.average.entries:
        return None
    lost = one.lost("ema")
    words = {"stuck": one.average.stuck, "dtype": dtype_name(one.average_dtype), "lost": lost}
    return Figure(lost, words)


def _average_is_narrow(one):
    return one.average is not None and one.average_dtype in net_state.NARROW_DTYPES


def average_slow(one):
    """share of the way a step that its decay says and that it does not go"""
    words = _rate_of_average(one)
    return None if words is None else Figure(1 - one.average.share, words)


def average_fast(one):
    """the way it goes a step, over what its decay says"""
    words = _rate_of_average(one)
    # rounding to nearest moves entries far at a time
    if words is None or (_average_is_narrow(one) and one.average.share < 3):
        return None
    return Figure(one.average.share, words)


def _rate_of_average(one):
    if one.average is None or not one.average.entries:
        return None
    said = one.averaging.said / max(one.averaging.gap_square, 1e-300)
    if not said:
        if one.watch.ema.decay is None:
            return None
        said = 1 - one.watch.ema.decay
    return {"rate": one.average.share * said, "decay": 1 - said, "said": said}


def average_young(one):
    """share of the start that remains in it"""
    steps = one.watch.steps
    decay = one.watch.ema.decay if one.average is not None and one.average.entries else None
    if decay is None or one.i > 0 or not 0 < decay < 1:
        return None
    remains = decay**steps
    less = 0.05 ** (1 / steps)  # of which a twentieth of the start would remain
    words = {"remains": remains, "steps": steps, "decay": decay, "less": less}
    return Figure(remains, words, "")


def average_young_in_a_long_run(one):
    """share of the start that remains in it after 3000 steps"""
    return average_young(one) if one.watch.steps >= 3000 else None


def average_lacks(seen):
    """trained tensors that the average has not, while it has others"""
    if seen.watch.ema is None:
        return
    shadow = seen.watch.ema.shadow
    missing = [name for name in seen.names if name not in shadow]
    if missing:
        yield Figure(len(missing), {"count": len(missing), "all": len(seen.names), "name": missing[0]}, "")


# ---- Its counter -------------------------------------------------------------------------------------------


def average_counter_fell(seen):
    """updates that its counter fell by"""
    fell = seen.watch.averages.fell
    if fell:
        yield Figure(fell[0] - fell[1], {"before": fell[0], "after": fell[1]}, "")


def average_never_updated(seen):
    """looks at which its counter says that it was never updated"""
    if _stands_at_zero(seen) and not seen.watch.ema.may_begin_late:
        yield Figure(seen.watch.looks, tensor="")


def average_not_begun(seen):
    """the same of torch's AveragedModel"""
    if _stands_at_zero(seen):
        yield Figure(seen.watch.looks, tensor="")


def _stands_at_zero(seen):
    """Whether the counter of the average says 0, and the average does not move."""
    average = seen.watch.ema
    return average is not None and not average.begun and not seen.watch.averages.moves


def average_counter_stands(seen):
    """looks at which it moved, while its counter says the same at all of them"""
    averages = seen.watch.averages
    if averages.moves and not averages.counts_up:
        yield Figure(averages.moves, {"count": averages.count}, "")
