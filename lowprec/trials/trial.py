"""What a recipe costs on a net of one's own, tried: which recipes, on which net, and for how long.

    answer = lowprec.trial(build, loss, batches, held_out, recipes=["pure_bf16+stochastic"], lr=3e-4)
    print(answer)

Each recipe is trained beside a reference with the same initial weights, batches and random draws. What counts
is the change of the loss on held-out data at the end of the schedule, where the cost of rounding shows. Pairs
with further seeds are added until each mean change is known well enough, or the time is used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import evidence
from ..advice.answer import CANDIDATES, advise
from ..advice.subjects import Subject, of_module
from ..advice.text import gib
from ..errors import Refused, check_number, check_several
from ..recipes import recipe
from ..watch.checkpoints import read_checkpoint
from .book import AUTOCAST, CHAOS, REFERENCE, Book
from .intervals import student
from .rounds import Rounds
from .training import Problem, Training, seed_everything, usual_schedule

# beside autocast, where nobody names any: the ways to write bf16 weights that differ most
USUAL_RECIPES = ("pure_bf16+stochastic", "pure_bf16+master=split", "pure_bf16")

# ---- The recipes -------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """name: of the recipe, as evidence.recipe_key writes it, or CHAOS. flags: of `recipe`."""

    name: str
    flags: Mapping[str, Any] = {}


def arm_named(name: str) -> Arm:
    """The Arm of a recipe as "pure_bf16+stochastic". Raises Refused for one that there is not."""
    flags: dict[str, Any] = {}
    sites: list[str] = []
    for part in name.split("+"):
        flag, _, value = part.partition("=")
        default = evidence.DEFAULT_OF_FLAG.get(flag)
        if default is False and not value:
            flags[flag] = True
        elif isinstance(default, str) and value:
            flags[flag] = value
        elif default is None and value:
            sites.append(part)
        elif sites:
            sites[-1] += f"+{part}"  # a site whose value is a list: islands=norm+embed
        elif name != REFERENCE:
            known = ", ".join(evidence.recipe_key(candidate.flags) for candidate in CANDIDATES)
            raise Refused(f"recipe {name}: there is no flag {part}; write flags joined by +, as in {known}")
    key = evidence.recipe_key({**flags, "set": sites})
    if sites:
        flags["sites"] = sites
    recipe(**flags)
    return Arm(key, flags)


def arms_of(names: Iterable[str] | None, subject: Subject, batch: int) -> tuple[list[Arm], dict[str, str]]:
    """([reference, CHAOS, autocast, recipes], {name: why a recipe is left out}): those of these names that
    fit on this machine, USUAL_RECIPES for None. Raises Refused for an unknown name and where nothing fits.
    """
    named = {}
    for name in (REFERENCE, AUTOCAST, *(names or USUAL_RECIPES)):
        arm = arm_named(name)
        named[arm.name] = arm
    advice = advise(subject, batch=batch)
    rows = {evidence.recipe_key(row.candidate.flags): row for row in advice.rows if not row.candidate.options}
    arms, left_out = [], {}
    for arm in named.values():
        row = rows.get(arm.name)
        if row is not None and not row.fits:
            left_out[arm.name] = f"takes {gib(row.total)} GiB at once, of {gib(advice.machine.memory)}"
        elif row is not None and row.how[0] == "no":
            left_out[arm.name] = row.how[1]
        else:
            arms.append(arm)
    if not arms or arms[0].name not in (REFERENCE, AUTOCAST):
        raise Refused(f"there is no reference: fp32 and autocast do not fit ({left_out[AUTOCAST]})")
    return [arms[0], Arm(CHAOS, arms[0].flags), *arms[1:]], left_out


# ---- The trial ---------------------------------------------------------------------------------------------


def trial(
    build: Callable[[], nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    batches: Callable[[int], Iterable],
    held_out: Callable[[], Iterable],
    *,
    recipes: Iterable[str] | None = None,
    steps: int = 300,
    within: float = 0.3,
    budget: str | float = "10m",
    seed: int = 0,
    start: str | Path | None = None,
    file: str | Path | None = None,
    groups: Callable[[nn.Module], list] | None = None,
    schedule: Callable[[int, int], float] = usual_schedule,
    version: str = "",
    quiet: bool = False,
    **options: Any,
) -> Book:
    """What each recipe costs on a net: its change of the held-out loss against fp32's, tried in little. Seeds
    the global generators of torch, Python and numpy.

    Args:
        build: makes the net, an nn.Module; torch's global generator, which draws its initial weights, is
            seeded before.
        loss: (model, batch) -> the mean loss, a tensor of one number. model is called like the net.
        batches: (seed) -> batches, any trees of tensors, one a step.
        held_out: () -> a few batches to score on, the same at each call. Their mean loss is the score.
        recipes: as "pure_bf16+stochastic", see evidence.recipe_key. None: USUAL_RECIPES. fp32 is the
            reference where it fits, else autocast, which is always tried.
        steps: of each training, which is a whole one: its schedule goes to the end.
        within: percent of the reference's loss. Pairs are added until the interval of the mean change is no
            wider than this to either side, or lies beyond it as a whole.
        budget: time for all trainings, those of a call that was interrupted among them: "90s", "10m", "2h",
            or seconds.
        seed: of the first pair; further pairs have those that follow.
        start: a checkpoint whose weights the net starts from, see watch.checkpoints.
        file: a .json in which finished trainings are kept: the same call goes on from there.
        groups: (net) -> parameter groups.
        schedule: (step, steps) -> what the learning rate is multiplied by.
        version: of net, loss and data: a file of another version is refused.
        quiet: no bar.
        options: of Precision: lr, betas, weight_decay, clip_grad, ... With ema_decay the average is scored.

    Raises:
        Refused (a ValueError): what is missing or makes no sense, and a reference that learns nothing.
    """
    weights = None if start is None else read_checkpoint(start).weights
    problem = Problem(build, loss, batches, held_out, groups, schedule, options, weights)
    subject, batch = subject_of(problem, seed)
    plan: dict[str, Any] = {"start": start and str(start), "version": version}
    plan["options"] = {name: repr(value) for name, value in options.items()}

    def make(arm, seed):
        return Training(problem, arm.flags, seed, steps)

    asked: dict[str, Any] = dict(
        recipes=recipes, steps=steps, within=within, budget=budget, seed=seed, file=file, quiet=quiet
    )
    return run_trial(make, subject, batch, plan=plan, **asked)


def subject_of(problem: Problem, seed: int) -> tuple[Subject, int]:
    """What advise is asked about a problem, and the examples of a batch."""
    seed_everything(seed)
    net = problem.net()
    batch = next(iter(problem.call("batches", seed)), None)
    if batch is None:
        raise Refused(f"batches({seed}) yields nothing: a trial needs data to train on")
    sizes = [len(leaf) for leaf in tree_leaves(batch) if torch.is_tensor(leaf) and leaf.dim()]
    subject = of_module(net, lambda model, n: problem.loss(model, batch))
    return subject._replace(average=problem.options.get("ema_decay") is not None), max(sizes, default=1)


def run_trial(
    make: Callable[[Arm, int], Any],
    subject: Subject,
    batch: int,
    *,
    recipes: Iterable[str] | None,
    steps: int,
    within: float,
    budget: str | float,
    seed: int,
    file: str | Path | None,
    quiet: bool,
    plan: dict[str, Any],
) -> Book:
    """`trial` of what make(arm, seed) trains, see training.Training. plan: what else tells it from others."""
    check_number("steps", steps, 1)
    check_number("within", within)
    check_several("recipes", recipes)
    student()  # without scipy it is refused now
    seconds = seconds_of(budget)
    plan = {"net": subject.name, "parameters": subject.parameters, "steps": steps, "seed": seed, **plan}
    book = Book(file, plan, within)
    arms, book.left_out = arms_of(recipes, subject, batch)
    book.reference = arms[0].name
    rounds = Rounds(make, arms, book, steps, seconds, seed)
    book.write()  # what can't be written is refused now
    rounds.run(quiet)
    return book


def seconds_of(text: str | float) -> float:
    """Seconds of "90s", "10m", "2h", or of a number of them. Raises Refused for anything else."""
    text = str(text).strip()
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text if unit is None else text[:-1]) * (unit or 1)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise Refused(f"budget={text}: write a time, as 90s, 10m or 2h")
    return seconds
