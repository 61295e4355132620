"""Faults of what no step writes: parameters that nobody trains, buffers, and of steps that are not done."""

import functools
import math
import re

import torch

from .. import net_state
from ..fault import Figure, of_run, of_watch_without_steps
from ..net_state import LAST_WHOLE_NUMBER, NARROW_DTYPES, dtype_name

of_optimizer = functools.partial(of_run, "optimizer")
of_frozen = functools.partial(of_run, "frozen")
of_buffers = functools.partial(of_run, "buffers")

# ---- Steps that are not done -------------------------------------------------------------------------------

MEND_WHAT_OVERFLOWS = (
    "bf16 in place of fp16, or fp32 where it overflows: no loss scale mends a forward pass that is not finite"
)
of_no_step = functools.partial(of_watch_without_steps, "step", family="no step")


@of_no_step("no step was done since this watch began, in {passes} backward passes: gradients are not "
            "finite[; first of all {where}]", MEND_WHAT_OVERFLOWS, above=9.0, severity="severe")
def no_finite_gradient(watch):
    """Backward passes whose gradients were not finite, the last of a watch that saw no step."""
    passes, spoilt = watch.passes.most()
    return Figure(spoilt, passes=passes, where=watch.passes.overflow.found or None)


@of_no_step("no step was done since this watch began[, in {passes} backward passes]",
            "does the loop step this optimiser? GradScaler leaves out steps whose gradients are not finite",
            severe_above=9.0)
def no_step_was_done(watch):
    """Backward passes of a watch that saw no step."""
    passes, _ = watch.passes.most()
    return Figure(passes, passes=passes if passes >= 10 else None)


@of_run("step", "no step was done in the last {figure:.0f} backward passes: gradients are not finite[; first "
        "of all {where}]", MEND_WHAT_OVERFLOWS, above=40.0, severity="severe", rank=9.2)
def passes_without_step(seen):
    """Backward passes since the last step whose gradients were not finite."""
    passes = seen.watch.passes
    return Figure(passes.most()[1], where=passes.overflow.found or None)


# ---- The optimiser's parameters ----------------------------------------------------------------------------


@of_optimizer("none of its parameters ever has a gradient",
              "make the optimiser of the parameters that the net has once it is loaded, moved and cast",
              above=2.0, severity="severe", rank=6.0)
def none_graded(seen):
    """Looks at which no parameter of the optimiser had a gradient."""
    ever = any(one.facts.looks or not one.facts.without for one in seen.tensors)
    return None if ever else seen.watch.looks


@of_optimizer("its betas are {one:g} and {two:g}: the second moment forgets faster than the first",
              "are they swapped? Usual are 0.9 and 0.999", above=1.0)
def betas_swapped(seen):
    """Beta1 over the root of beta2, of Adam and AdamW."""
    betas = next(iter(seen.watch.groups.values()), {}).get("betas", ())
    if not getattr(seen.watch.answers, "exact", False) or len(betas) != 2 or betas[1] <= 0:
        return None
    one, two = map(float, betas)
    return Figure(one / math.sqrt(two), one=one, two=two)


@of_optimizer("the optimiser steps copies, and {figure:.0%} of the weights differ from them",
              "make the optimiser from the model that trains, or copy its weights back", above=0.5,
              severity="severe", rank=5.0)
def copies_apart(seen):
    """Share of the weights that differ from the copies that are stepped."""
    return Figure(seen.watch.departed, next(iter(seen.watch.copies))) if seen.watch.copies else None


@of_optimizer("it {trains}, and is in no group of the optimiser",
              "add it to the optimiser's groups, or tell Watch of the other optimiser: others=[...]",
              severity="severe", rank=4.0)
def parameters_ungrouped(seen):
    """Has gradients, and is in no group; a note of one that merely has requires_grad."""
    watch = seen.watch
    for name, p in () if watch.copies else watch.model.named_parameters():
        if not p.requires_grad or p in watch.groups or p in watch.elsewhere:
            continue
        if (p.grad is not None and bool(p.grad.any())) or watch.orphans.get(name):
            yield Figure(tensor=name, trains="has gradients")
        else:
            yield Figure(tensor=name, trains="is trained by requires_grad", severity="note")


def frozen_by_plan(net):
    """({name of a part: how many frozen parameters}, [names of those that stand alone]).

    What is frozen behind one of its kind that trains (`blocks.3.mlp.weight` behind `blocks.2.mlp.weight`)
    stands alone. The rest is a plan: a text encoder, the first blocks, all that a LoRA leaves as it is.
    """
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    frozen_parts = []  # that hold parts with parameters, the outermost first
    for part, module in net.named_modules():
        if part and any(map(net_state.has_parameters, module.children())) and not _holds_one(part, trained):
            frozen_parts.append(part)
    parts, alone, kinds_that_train = {}, [], set()
    for name, p in net.named_parameters():
        kind = re.sub(r"\d+", "N", name)  # tensors of one kind are repeated from block to block
        if p.requires_grad:
            kinds_that_train.add(kind)
        elif kind in kinds_that_train:
            alone.append(name)
        else:
            outermost = next((part for part in frozen_parts if _holds_one(part, [name])), name)
            parts[outermost] = parts.get(outermost, 0) + 1
    return parts, alone


def _holds_one(part, names):
    return any(name.startswith(part + ".") for name in names)


@of_frozen("requires_grad is False, while others of its kind train",
           "requires_grad_(True), if it should train")
def frozen_alone(seen):
    """Frozen, beside others of its kind that train."""
    _, alone = frozen_by_plan(seen.watch.model)
    return [Figure(tensor=name) for name in alone]


@of_frozen("{count} parameters don't train: {some}", "nothing, if that is the plan", severity="note",
           rank=0.0)
def frozen_parts(seen):
    """Frozen parameters that look like a plan."""
    parts, _ = frozen_by_plan(seen.watch.model)
    some = ", ".join(list(parts)[:3]) + (" ..." if len(parts) > 3 else "")
    return Figure(count=sum(parts.values()), some=some) if parts else None


# ---- Buffers -----------------------------------------------------------------------------------------------


@of_buffers("{figure:,.0f} entries of its sample are not finite; they were when the watch began",
            "find what writes it", above=0.0, severity="severe", rank=9.0)
def broken_buffers(seen):
    """Entries that are not finite, and were when the watch began."""
    for name, now, then in buffers(seen):
        if then is not None and bool(then.isfinite().all()):
            yield Figure(int((~now.isfinite()).sum()), name)


@of_buffers("a buffer in {dtype} that something adds to: it is {largest:,.0f}, and above {most} {dtype} does "
            "not hold all whole numbers", "count in integers or in fp32", "narrow buffer", above=1.0)
def counting_buffers(seen):
    """The next number of a 16-bit buffer of whole ones that changes, over the last that it can count to."""
    for name, now, then in buffers(seen):
        if now.dtype not in NARROW_DTYPES or then is None or not bool((now == now.round()).all()):
            continue
        if now.shape == then.shape and not torch.equal(now, then):
            largest, most = float(now.abs().max()), LAST_WHOLE_NUMBER[now.dtype]
            yield Figure((largest + 1) / most, name, largest=largest, most=most, dtype=dtype_name(now.dtype))


@of_buffers("a buffer {what}[, {error:.2%} off its fp32 values]",
            "keep buffers in fp32 when the model is cast: RoPE's frequencies, BatchNorm's statistics",
            "narrow buffer")
def rounded_buffers(seen):
    """Holds values of 16 bits alone, which are not powers of two or whole numbers: these lose nothing."""
    for name, now, then in buffers(seen):
        values = now.float()
        if not net_state.rounded_values(values):
            continue
        what = "fp32 that holds rounded values only"
        if now.dtype in NARROW_DTYPES:
            what = f"held in {str(now.dtype).removeprefix('torch.')}"
        error = 0.0
        known = then is not None and then.shape == values.shape
        if known and torch.equal(then.bfloat16(), values.bfloat16()):
            error = float((then.double() - values.double()).norm() / then.double().norm().clamp_min(1e-300))
        yield Figure(error, name, what=what, error=error or None)


def buffers(seen):
    """(name, sample now, sample when the watch began or None) of the buffers of fractions."""
    for name, b in net_state.floating_buffers(seen.watch.model):
        yield name, seen.watch.pick(b), seen.watch.buffers.get(name)
