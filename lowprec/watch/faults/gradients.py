"""Faults of gradients: whether there are any, what becomes of them before the step, how they are summed."""

import functools
import math
import re

import torch

from ...telemetry import sample_entries
from ..fault import Figure, of_run, of_tensor
from ..gradients import ENOUGH_ENTRIES
from ..verdicts import FINDING_LIMITS

of_gradient = functools.partial(of_tensor, "grads")
gradients_of_run = functools.partial(of_run, "grads")

IS_IT_USED = "is it used and not detached?"

# ---- Whether there are any ---------------------------------------------------------------------------------


@of_gradient("{figure:,.0f} gradients of its sample are not finite",
             "a lower learning rate, clipping or bf16", above=0.0, severity="severe", rank=9.0)
def gradient_not_finite(one):
    """Entries of its sample that are not finite."""
    return None if one.change.spoilt else one.extra.infinite  # else another row's


of_no_gradient = functools.partial(of_gradient, family="none")


@of_no_gradient("never has a gradient", IS_IT_USED, above=1.0, severity="note", rank=0.0)
def never_graded(one):
    """Looks without a gradient."""
    return None if one.facts.looks else one.facts.without


@of_no_gradient("its gradient is 0 at each look, and it is 0 itself",
                "begin one of two factors with other values than 0", above=2.0, rank=0.5)
def zero_gradient_of_zeros(one):
    """Looks at which the gradient of a matrix of zeros was 0."""
    # a bias of zeros may have none by design
    return zero_gradient(one) if one.p.dim() > 1 and not bool(one.watch.pick(one.p).any()) else None


@of_no_gradient("its gradient is 0 at each look", f"{IS_IT_USED} In some nets it is so by design", above=2.0,
                severity="note", rank=0.5)
def zero_gradient(one):
    """Looks at which its gradient was 0."""
    of_another_row = one.change.zeroed or one.seen.all_zero
    return None if of_another_row or one.facts.idle < one.facts.looks else one.facts.idle


@gradients_of_run("the gradients of all tensors are 0 at each look",
                  "does the loss depend on the net? In fp16 small gradients are 0: scale the loss", above=2.0,
                  severity="severe", rank=7.0)
def all_zero_gradients(seen):
    """Looks at which the gradients of all tensors were 0."""
    return seen.watch.looks if seen.all_zero else None


def tables_of(model, named):
    """The parameters of which a batch reads some rows alone: embeddings, and bare tables of positions as
    pos_embed, wpe and pe. named: [(name, parameter)].
    """
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {module.weight for module in model.modules() if isinstance(module, embeddings)}
    return tables | {p for name, p in named if re.search("pos|emb|wpe|^pe$", name.rpartition(".")[2])}


def dead_part(alive, shape, most):
    """Which aligned half, third or quarter of the rows or columns is dead as a whole while the rest lives;
    "" where none is. alive: bool, of a sample (telemetry.sample_entries) of a tensor of this shape.
    """
    if alive.all() or not alive.any():
        return ""
    places = sample_entries(torch.arange(math.prod(shape)), most)
    for dim, what in ((0, "rows"), (1, "columns")):
        size = shape[dim]
        at = places // math.prod(shape[dim + 1 :]) % size
        for parts in (2, 3, 4):
            if size % parts or size < 4 * parts:
                continue
            dead = _only_dead_one(alive, at * parts // size, parts)
            if dead is not None:
                width = size // parts
                return f"{what} {dead * width} to {(dead + 1) * width - 1} of {size}"
    return ""


def _only_dead_one(alive, part_of, parts):
    """The number of the part that is dead, if it alone is; else None. part_of: int64 [n], below `parts`."""
    entries = torch.bincount(part_of, minlength=parts)
    living = torch.bincount(part_of, alive.float(), minlength=parts) / entries.clamp_min(1)
    dead = (living == 0).nonzero().flatten().tolist()
    if len(dead) != 1 or entries[dead[0]] < 16:
        return None
    return dead[0] if living.sum() > 0.9 * (parts - 1) else None


@gradients_of_run("{part} never have a gradient", IS_IT_USED, rank=0.4)
def dead_parts(seen):
    """An aligned half, third or quarter of a matrix never has one, as one of a fused qkv."""
    tables = tables_of(seen.watch.model, seen.watch.named)
    for i, alive in seen.alive.items():
        p = seen.watch.named[i][1]
        if p.dim() < 2 or p in tables or hasattr(p, "to_local") or seen.tensors[i].change.parts_zeroed:
            continue
        part = dead_part(alive, p.shape, seen.watch.most)
        if part:
            yield Figure(tensor=seen.names[i], part=part)


# ---- What becomes of them before the step ------------------------------------------------------------------

of_entries = functools.partial(of_gradient, family="partly", above=0.02)
of_change = functools.partial(gradients_of_run, family="changed", above=0.0)

FIND_WHAT_WRITES_GRAD = "find what writes p.grad after backward"


@of_entries("{figure:.0%} of the entries of its gradient change their sign between backward and the step",
            FIND_WHAT_WRITES_GRAD, severity="severe")
def gradient_partly_negated(one):
    """Share of the entries of a gradient whose sign was changed between backward and the step."""
    return one.change.parts_negated / max(1.0, one.change.looks)


@of_entries("{figure:.0%} of the entries of its gradient are set to 0 between backward and the step",
            f"{FIND_WHAT_WRITES_GRAD}; nothing, if it is a mask by plan")
def gradient_partly_zeroed(one):
    """Share of the entries of a gradient that were set to 0 between backward and the step; a note of a table
    of which some rows train, and where the weights are 0 too.
    """
    share = one.change.parts_zeroed / max(1.0, one.change.looks)
    zero = float((one.watch.pick(one.p) == 0).float().mean())
    is_masked = one.p in tables_of(one.watch.model, one.watch.named) or zero > 0.9 * share
    return Figure(share, severity="note" if is_masked else None)


@of_change("{whose} not finite after backward, and finite when the step begins, at {figure:.0%} of the looks",
           "leave out such a step, and find what overflows: what was not finite says nothing of the others",
           severe_above=0.25, rank=9.4)
def gradients_mended(seen):
    """Share of the looks at which a gradient was not finite after backward and finite at the step."""
    return changes(seen, "mended", lambda change: change.mended / (change.looks + change.mended))


@of_change("{whose} finite after backward, and not finite when the step begins",
           "check the norm and the factor that clipping computes: one of them is not finite",
           severity="severe", rank=9.5)
def gradients_spoilt(seen):
    """Looks at which a gradient was finite after backward and not at the step."""
    return changes(seen, "spoilt", lambda change: change.spoilt)


@of_change("{whose} multiplied by {factor:.2g} between backward and the step",
           "check the norm and the factor that clipping computes: neither is below 0", severity="severe",
           rank=8.5)
def gradients_negated(seen):
    """Share of the looks at which the step read a gradient times a negative factor."""
    return changes(seen, "negated", lambda change: change.negated / change.looks)


@of_change("{whose} set to 0 between backward and the step, at {figure:.0%} of the looks",
           "check the clipping norm: an infinite one, as of fp16, makes a factor of 0. And find what clears "
           "gradients before the step", severe_above=0.5, rank=8.0)
def gradients_zeroed(seen):
    """Share of the looks at which the step read 0 instead of a gradient."""
    return changes(seen, "zeroed", lambda change: change.zeroed / change.looks)


def changes(seen, field, figure):
    """Figures of the tensors whose gradients were changed so; one of all where all were. figure: Changes of a
    tensor -> its value.
    """
    known = [one for one in seen.tensors if one.change.looks + one.change.spoilt + one.change.mended]
    found = [one for one in known if getattr(one.change, field)]
    # those that are too small to tell are taken for the others
    judged = [one for one in known if field != "negated" or one.p.numel() >= ENOUGH_ENTRIES]
    of_all = len(judged) > 1 and set(judged) <= set(found)
    for one in found[:1] if of_all else found:
        whose, name = ("the gradients of all tensors are", "") if of_all else ("its gradient is", one.name)
        factor = one.change.factor / max(1.0, one.change.negated)
        yield Figure(figure(one.change), name, whose=whose, factor=factor)


# ---- How large they are ------------------------------------------------------------------------------------

of_eps = functools.partial(gradients_of_run, family="eps", above=0.5, severity="severe")
of_clipping = functools.partial(gradients_of_run, family="clipping", above=0.999)

BELOW_EPS = "{figure:.0%} of the second moments are below the optimiser's eps: steps are too short"
FIND_WHAT_DIVIDES = (
    "is a loss scale taken off that was never put on, or twice? Else clip at a norm that is usual"
)


@of_gradient("{figure:.0%} of its gradients are below fp16's normal range",
             "scale the loss (torch.amp.GradScaler), or bf16", above=0.5)
def gradient_subnormal(one):
    """Share of them below fp16's normal range."""
    return one.extra.subnormal / one.extra.graded if one.extra.graded >= 8 else None


@of_eps(BELOW_EPS + ", as gradients are divided by {by:,.0f} between backward and the step",
        FIND_WHAT_DIVIDES)
def below_eps_by_division(seen):
    """Share of second moments below the optimiser's eps, squared, where gradients are divided by 1000 or more
    between backward and the step.
    """
    left, figure = left_in_place(seen), below_eps(seen)
    return Figure(figure.value, figure.tensor, by=1 / left) if figure and left else None


@of_eps(BELOW_EPS, "a larger clipping norm or loss scale, or a smaller eps")
def below_eps(seen):
    """Share of second moments below the optimiser's eps, squared."""
    # matrices alone: some biases have no gradient but noise, as those of keys in attention
    matrices = [one for one in seen.tensors if one.p.dim() > 1 and one.extra.judged]
    if not matrices:
        return None
    worst = max(matrices, key=lambda one: one.extra.faint / one.extra.judged)
    faint = sum(one.extra.faint for one in matrices)
    return Figure(faint / sum(one.extra.judged for one in matrices), worst.name)


@of_clipping("gradients are divided by {by:,.0f} between backward and the step, which is {step:.1g} of the "
             "weights then: the net stands still", FIND_WHAT_DIVIDES, severity="severe", rank=1.5)
def gradients_unscaled(seen):
    """What is taken off them where steps are then below 1e-5 of the weights."""
    left, step = left_in_place(seen), seen.watch.gradients.largest_step
    tiny = all(not norm >= 1e-3 for _, norm in seen.watch.gradients.shrunk) and step < 1e-5
    stands = left and tiny and seen.some_rates_live
    return Figure(1 - left, by=1 / left, step=step) if stands else None


@of_clipping("clipping leaves {left:.1g} of the gradient's norm",
             "clip at the norm that is usual, not far below it", rank=1.0)
def gradients_clipped(seen):
    """Share of the gradient's norm that clipping takes away, at half of the looks."""
    scales = sorted(float(scale) for scale in seen.watch.clips)
    # as torch's clip_grad_norm_ does; a loss scale leaves a norm as they usually are, or is a power of 2
    left = left_in_place(seen, lambda left, norm: norm < 1e-3 and not is_power_of_2(left))
    if not left and scales:
        left = scales[len(scales) // 2]
    return Figure(1 - left, left=left) if left or scales else None


def left_in_place(seen, fits=lambda left, norm: True):
    """What is left of gradients that are divided by 1000 or more before the step, at half of the looks."""
    shrunk = seen.watch.gradients.shrunk
    found = sorted(left for left, norm in shrunk if 0 < left < 1e-3 and fits(left, norm))
    return found[len(found) // 2] if found and 2 * len(found) >= len(shrunk) else 0.0


def is_power_of_2(left):
    mantissa, _ = math.frexp(left)
    return min(mantissa - 0.5, 1 - mantissa) < 1e-5


# ---- How they are summed, and cleared ----------------------------------------------------------------------


@of_tensor("accumulate", "the sum of {count} micro-batches of gradients is {figure:.2%} off",
           "sum in fp32: keep the gradients in fp32, or accumulate outside of p.grad",
           above=FINDING_LIMITS["accumulate"][0], severe_above=FINDING_LIMITS["accumulate"][1])
def gradients_wrongly_summed(one):
    """Relative error of the sum of a step's micro-batches."""
    total, times, count = one.watch.gradients.sums.get(one.i, (0.0, 1, 0))
    # what is far off was changed for another reason than rounding
    return Figure(total / times, count=count) if total / times < 0.25 else None


@of_run("accumulate", "of {count} backward passes before a step the first {cleared} are forgotten",
        "clear gradients after the step alone", severity="severe", rank=1.0)
def gradients_forgotten(seen):
    """Backward passes whose gradients were cleared before a step."""
    for i, (cleared, count) in list(seen.watch.gradients.forgotten.items())[:1]:
        yield Figure(tensor=seen.names[i], cleared=cleared, count=count)


@gradients_of_run("{figure:.0%} of the steps read the gradients of the step before once more",
                  "call optimizer.step() once for each backward pass", "old gradients", above=0.2, rank=8.2)
def stepped_again(seen):
    """Share of the steps that read the gradients of the step before, which nothing has written since."""
    return seen.watch.again / seen.watch.steps


@gradients_of_run("gradients of earlier steps are still there when a step begins",
                  "call optimizer.zero_grad() once a step", "old gradients", severity="severe", rank=8.0)
def gradients_not_cleared(seen):
    """Gradients are there before the first backward pass of a step."""
    return Figure(tensor=seen.names[0]) if seen.watch.gradients.uncleared else None
