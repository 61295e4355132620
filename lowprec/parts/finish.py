"""The last steps of a run of bf16 weights, written so that nothing is rounded away.

    run.finish("split")    # from the next step on: bf16 weights beside an int16 remainder, moments in fp32
    run.finish("fp32")     # from the next step on: all of it in fp32, products too

Low weights cost most where a schedule ends: its steps are smallest there. What is held stays as it is, the
weights, moments, averages and steps; torch's schedulers go on. What rounding to nearest has lost by then
hardly comes back where the rate falls to zero: experiments/079-finish.
"""

import torch

from ..cast import Cast
from ..errors import check_choice
from ..optimizers.build import all_ours
from ..optimizers.state import own_attributes
from ..rules import EXACT_MASTERS, Rule, refuse

EXACT = dict(update="nearest", kahan="off")
FP32 = dict(weights="fp32", compute="fp32", grads="fp32", accumulate="fp32", islands="none", master="none")
KINDS = {"split": {**EXACT, "master": "split"}, "fp32": {**EXACT, **FP32}}  # what changes in the recipe

FINISH_RULES = (
    Rule(lambda run: run.finished, lambda run: f"this run is finished with {run.finished} already"),
    Rule(
        lambda run: not run.recipe.low_weights,
        "a finish writes bf16 weights exactly, and these are fp32 throughout: add --pure_bf16, or drop it",
    ),
    Rule(
        lambda run: run.recipe.master in EXACT_MASTERS,
        lambda run: f"--master {run.recipe.master} writes exactly from the first step on: drop the finish",
    ),
    Rule(
        lambda run: run.spread or run.options.grad_release or run.away or run.options.average_on != "device",
        "a finish changes how weights and moments are held, and fully_shard (--fsdp), --grad_release, "
        "--states_on cpu and --average_on cpu hold on to what they were: leave one out",
    ),
)
FP32_RULES = (
    Rule(
        lambda run: run.methods or run.view_of_model.parallel is not None,
        "finish fp32 takes a plain net on one process: with FP8, 2:4 sparsity or DistributedDataParallel "
        "finish with split",
    ),
)


def check(run, kind):
    """Raise Refused where a run can't be finished so."""
    check_choice("finish", kind, tuple(KINDS))
    refuse(FINISH_RULES, run)
    all_ours(run.optimizer, "a finish")
    if kind == "fp32":
        refuse(FP32_RULES, run)


@torch.no_grad()
def finish(run, kind, state=None):
    """Precision.finish of a run. state: that of a finished optimiser, which is loaded next; one that does not
    fit is refused before anything is changed.
    """
    check(run, kind)
    recipe = run.recipe.replace(**KINDS[kind], **dict.fromkeys(run.recipe.moments, "fp32"))
    if state is not None:
        run.new_optimizer(recipe).checked_state(state)
    run.zero_grad()
    exact = {p: run.optimizer.held(p).view(p.shape).clone() for p in run.params}
    run.recipe = run.view_of_model.recipe = recipe
    if kind == "fp32":
        run.cast = Cast(run.model, run.recipe, run.options)
    made = run.new_optimizer(recipe)
    for old, new in zip(all_ours(run.optimizer, "a finish"), all_ours(made, "a finish"), strict=True):
        become(old, new)
    for p, value in exact.items():
        run.optimizer.set_exact(p, value)
    run.finished = kind


def become(old, new):
    """Let an optimiser hold its moments and write its weights as `new` does, one of the same parameters. It
    stays the object that schedulers and hooks know, with its groups, the values of its moments and its steps.
    """
    for p in old.bucket_of:
        if p not in new.bucket_of:  # frozen when it was made, and trained since
            new.begin_state(p)
        new.state[p]["step"] = old.steps_of(p)
        for name, held in new.held_of[p].items():
            held.values.copy_(old.moment(p, name).view_as(held.values))
    groups = old.param_groups
    for group in groups:
        group.pop("codes", None)  # formats of moments, which are in fp32 now
    vars(old).update(own_attributes(new), param_groups=groups)
