"""What findings.py judges of gradients and of what no step writes; see measures.py."""

import math

import torch

from . import net_state
from .dead_parts import dead_part, tables_of
from .faults import Figure
from .gradients import ENOUGH_ENTRIES
from .measures import LAST_WHOLE_NUMBER, dtype_name

# ---- Gradients ---------------------------------------------------------------------------------------------


def gradient_not_finite(one):
    """entries of its sample that are not finite"""
    if one.change.spoilt:  # another row's
        return None
    return Figure(one.extra.infinite, {"count": one.extra.infinite})


def never_graded(one):
    """looks without a gradient"""
    if one.facts.looks:
        return None
    return Figure(one.facts.without)


def zero_gradient(one):
    """looks at which its gradient was 0"""
    if one.change.zeroed or one.seen.all_zero:  # another row's
        return None
    if one.facts.idle < one.facts.looks:
        return None
    return Figure(one.facts.idle)


def zero_gradient_of_zeros(one):
    """looks at which the gradient of a matrix of zeros was 0"""
    # a bias of zeros may have none by design
    if one.p.dim() <= 1 or bool(one.watch.pick(one.p).any()):
        return None
    return zero_gradient(one)


def all_zero_gradients(seen):
    """looks at which the gradients of all tensors were 0"""
    if seen.all_zero:
        yield Figure(seen.watch.looks, tensor="")


def passes_without_step(seen):
    """backward passes since the last step whose gradients were not finite"""
    _, passes = seen.watch.passes.most()
    yield Figure(passes, {"passes": passes}, "")


# ---- Gradients that are changed between backward and the step ----------------------------------------------


def gradients_negated(seen):
    """share of the looks at which the step read a gradient times a negative factor"""
    for one, figure in _changed_gradients(seen, "negated"):
        figure.words["factor"] = one.change.factor / one.change.negated
        yield figure


def gradients_zeroed(seen):
    """share of the looks at which the step read 0 instead of a gradient"""
    for _, figure in _changed_gradients(seen, "zeroed"):
        yield figure


def gradients_mended(seen):
    """share of the looks at which a gradient was not finite after backward and finite at the step"""
    for one, figure in _changed_gradients(seen, "mended"):
        looks = max(1.0, one.change.looks + one.change.mended)
        figure.value = figure.words["share"] = one.change.mended / looks
        yield figure


def gradients_spoilt(seen):
    """looks at which a gradient was finite after backward and not at the step"""
    for one, figure in _changed_gradients(seen, "spoilt"):
        figure.value = one.change.spoilt
        yield figure


def _changed_gradients(seen, field):
    """(Tensor, Figure) of those whose gradients were changed so; of the first alone where all were."""
    found, judged = [], []
    for one in seen.tensors:
        if not one.change.looks + one.change.spoilt + one.change.mended:
            continue
        if getattr(one.change, field):
            found.append(one)
        # those that are too small to tell are taken for the others
        if field != "negated" or one.p.numel() >= ENOUGH_ENTRIES:
            judged.append(one)
    of_all = len(judged) > 1 and set(judged) <= set(found)
    if of_all:
        found = found[:1]
    for one in found:
        share = getattr(one.change, field) / max(1.0, one.change.looks)
        whose, tensor = "its gradient is", one.name
        if of_all:
            whose, tensor = "the gradients of all tensors are", ""
        yield one, Figure(share, {"whose": whose, "share": share}, tensor)


def gradient_partly_negated(one):
    """share of the entries of a gradient whose sign was changed between backward and the step"""
    share = one.change.parts_negated / max(1.0, one.change.looks)
    return Figure(share, {"share": share})


def gradient_partly_zeroed(one):
    """share of the entries of a gradient that were set to 0 between backward and the step"""
    share = one.change.parts_zeroed / max(1.0, one.change.looks)
    if _is_masked(one, share):
        return None
    return Figure(share, {"share": share})


def gradient_masked(one):
    """the same of a table of which some rows train, or where the weights are 0 too"""
    share = one.change.parts_zeroed / max(1.0, one.change.looks)
    if not _is_masked(one, share):
        return None
    return Figure(share, {"share": share})


def _is_masked(one, share):
    zero = float((one.watch.pick(one.p) == 0).float().mean())
    return one.p in tables_of(one.watch.model, one.watch.named) or zero > 0.9 * share


# ---- Gradients and their sums ------------------------------------------------------------------------------


def gradient_subnormal(one):
    """share of them below fp16's normal range"""
    if one.extra.graded < 8:
        return None
    share = one.extra.subnormal / max(1.0, one.extra.graded)
    return Figure(share, {"share": share})


def below_eps(seen):
    """share of second moments below the optimiser's eps, squared"""
    matrices, faint, judged = [], 0.0, 0.0
    for one in seen.tensors:
        # matrices alone: some biases have no gradient but noise, as those of keys in attention
        if one.p.dim() > 1 and one.extra.judged:
            matrices.append(one)
            faint += one.extra.faint
            judged += one.extra.judged
    if judged:
        worst = max(matrices, key=lambda one: one.extra.faint / one.extra.judged)
        yield Figure(faint / judged, {"share": faint / judged}, worst.name)


def below_eps_by_division(seen):
    """the same where gradients are divided by 1000 or more between backward and the step"""
    left = _left_in_place(seen)
    for figure in below_eps(seen) if left else ():
        figure.words["by"] = 1 / left
        yield figure


def gradients_unscaled(seen):
    """what is taken off them where that is a power of 2 and steps are then below 1e-5 of the weights"""
    left, step = _left_in_place(seen), seen.watch.gradients.largest_step
    tiny = all(not norm >= 1e-3 for _, norm in seen.watch.gradients.shrunk) and step < 1e-5
    if left and _is_power_of_2(left) and tiny and seen.some_rates_live:
        yield Figure(1 - left, {"by": 1 / left, "step": step}, "")


def gradients_clipped(seen):
    """share of the gradient's norm that clipping takes away, at half of the looks"""
    scales = sorted(float(scale) for scale in seen.watch.clips)
    # as torch's clip_grad_norm_ does; a loss scale leaves a norm as they usually are, or is a power of 2
    in_place = _left_in_place(seen, lambda left, norm: norm < 1e-3 and not _is_power_of_2(left))
    if scales or in_place:
        left = in_place or scales[len(scales) // 2]
        yield Figure(1 - left, {"left": left}, "")


def _left_in_place(seen, fits=lambda left, norm: True):
    """What is left of gradients that are divided by 1000 or more before the step, at half of the looks."""
    shrunk = seen.watch.gradients.shrunk
    found = sorted(left for left, norm in shrunk if 0 < left < 1e-3 and fits(left, norm))
    return found[len(found) // 2] if found and 2 * len(found) >= len(shrunk) else 0.0


def _is_power_of_2(left):
    mantissa, _ = math.frexp(left)
    return min(mantissa - 0.5, 1 - mantissa) < 1e-5


def gradients_wrongly_summed(one):
    """relative error of the sum of a step's micro-batches"""
    if one.i not in one.watch.gradients.sums:
        return None
    total, times, count = one.watch.gradients.sums[one.i]
    error = total / times
    if error < 0.25:
        return Figure(error, {"count": count, "error": error})
    return None  # what is far off was changed for another reason than rounding


def gradients_forgotten(seen):
    """backward passes whose gradients were cleared before a step"""
    for i, (cleared, count) in list(seen.watch.gradients.forgotten.items())[:1]:
        yield Figure(cleared, {"cleared": cleared, "count": count}, seen.names[i])


def stepped_again(seen):
    """share of the steps that read the gradients of the step before, which nothing has written since"""
    share = seen.watch.again / seen.watch.steps
    yield Figure(share, {"share": share}, "")


def gradients_not_cleared(seen):
    """gradients are there before the first backward pass of a step"""
    if seen.watch.gradients.uncleared:
        yield Figure(1.0, tensor=seen.names[0])


def dead_parts(seen):
    """an aligned half, third or quarter of a matrix never has one, as one of a fused qkv"""
    tables = tables_of(seen.watch.model, seen.watch.named)
    for i, alive in seen.alive.items():
        p = seen.watch.named[i][1]
        if p.dim() < 2 or p in tables or hasattr(p, "to_local") or seen.changes[i].parts_zeroed:
            continue
        part = dead_part(alive, p.shape, seen.watch.most)
        if part:
            yield Figure(1.0, {"part": part}, seen.names[i])


# ---- What is left out --------------------------------------------------------------------------------------


def betas_swapped(seen):
    """beta1 over the root of beta2, of Adam and AdamW"""
    if not getattr(seen.watch.answers, "exact", False):
        return
    betas = next(iter(seen.watch.groups.values()), {}).get("betas", ())
    if len(betas) == 2 and betas[1] > 0:
        one, two = float(betas[0]), float(betas[1])
        yield Figure(one / math.sqrt(two), {"one": one, "two": two}, "")


def none_graded(seen):
    """looks at which no parameter of the optimiser had a gradient"""
    for one in seen.tensors:
        if one.facts.looks or not one.facts.without:
            return
    yield Figure(seen.watch.looks, tensor="")


def copies_apart(seen):
    """share of the weights that differ from the copies that are stepped"""
    if seen.watch.copies:
        share = seen.watch.departed
        yield Figure(share, {"share": share}, next(iter(seen.watch.copies)))


def parameters_ungrouped(seen):
    """requires_grad, and in no group"""
    watch = seen.watch
    if watch.copies:
        return
    for name, p in watch.model.named_parameters():
        if p.requires_grad and p not in watch.groups and p not in watch.elsewhere:
            yield Figure(1.0, tensor=name)


def parameters_graded_and_ungrouped(seen):
    """has gradients, and is in no group"""
    params = dict(seen.watch.model.named_parameters())
    for figure in parameters_ungrouped(seen):
        g = params[figure.tensor].grad
        if (g is not None and bool(g.any())) or seen.watch.orphans.get(figure.tensor):
            yield figure


def frozen_alone(seen):
    """frozen, beside others of its kind that train"""
    _, alone = net_state.frozen_by_plan(seen.watch.model)
    for name in alone:
        yield Figure(1.0, tensor=name)


def frozen_parts(seen):
    """frozen parameters that look like a plan"""
    parts, _ = net_state.frozen_by_plan(seen.watch.model)
    if parts:
        some = ", ".join(list(parts)[:3])
        if len(parts) > 3:
            some += " ..."
        yield Figure(1.0, {"count": sum(parts.values()), "some": some}, "")


def broken_buffers(seen):
    """entries that are not finite, and were when the watch began"""
    watch = seen.watch
    broken = net_state.find_broken_buffers(watch.model, watch.buffers, watch.pick)
    for name, count in broken.items():
        yield Figure(count, {"count": count}, name)


def counting_buffers(seen):
    """the next number of a 16-bit buffer of whole ones that changes, over the last that it can count to"""
    watch = seen.watch
    for name, b in net_state.floating_buffers(watch.model):
        now, then = watch.pick(b), watch.buffers.get(name)
        if b.dtype not in net_state.NARROW_DTYPES or then is None or not bool((now == now.round()).all()):
            continue
        if now.shape == then.shape and not torch.equal(now, then):
            largest, most = float(now.abs().max()), LAST_WHOLE_NUMBER[b.dtype]
            words = {"largest": largest, "most": most, "dtype": dtype_name(b.dtype)}
            yield Figure((largest + 1) / most, words, name)


def rounded_buffers(seen):
    """holds values of 16 bits alone"""
    watch = seen.watch
    rounded = net_state.find_rounded_buffers(watch.model, watch.buffers, watch.pick)
    for name, (what, error) in rounded.items():
        words = {"what": what}
        if error:
            words["error"] = error
        yield Figure(error or 0.0, words, name)
