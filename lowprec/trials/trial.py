"""What a recipe costs on a net of one's own: whole trainings in little, in pairs.

    answer = lowprec.trial(build, loss, batches, held_out, recipes=["pure_bf16+stochastic"], lr=3e-4)
    print(answer)

Each recipe is trained beside a reference with the same initial weights, batches and random draws. What counts
is the change of the loss on held-out data at the end of the schedule, where the cost of rounding shows. Pairs
with further seeds are added until each mean change is known well enough, or the time is used up.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import evidence, ledger
from ..advice.answer import CANDIDATES, advise
from ..advice.subjects import Subject, of_module
from ..advice.text import gib
from ..errors import Refused, check_several, out_of_memory
from ..machine import quiet_import
from ..recipes import recipe
from ..watch.checkpoints import read_checkpoint
from .answer import Answer
from .book import AUTOCAST, CHAOS, REFERENCE, Book, is_settled
from .foresee import foresee
from .intervals import LOOKS, pairs_needed
from .training import Problem, Training, move_a_last_bit, seed_everything, usual_schedule

# beside autocast, where nobody names any: the ways to write bf16 weights that differ most
USUAL_RECIPES = ("pure_bf16+stochastic", "pure_bf16+master=split", "pure_bf16")
LEAST_FALL = 0.01  # of the reference's loss, as a share: below that it has learnt too little to tell
TURNS, STEPS_OF_A_TURN = 3, 6  # in which steps are timed
USUAL_PAIRS = 6  # that the bar counts on until the spread of pairs is known
STEPS_BETWEEN_CHECKS = 50  # of a loss that may not be finite: reading it waits for a GPU

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
    if sites:
        flags["sites"] = sites
    recipe(**flags)
    return Arm(name, flags)


def arms_of(names: Iterable[str] | None, subject: Subject, batch: int) -> tuple[list[Arm], dict[str, str]]:
    """([reference, CHAOS, autocast, recipes], {name: why a recipe is left out}): those of these names that
    fit on this machine, USUAL_RECIPES for None. Raises Refused for an unknown name and where nothing fits.
    """
    named = [arm_named(name) for name in dict.fromkeys([REFERENCE, AUTOCAST, *(names or USUAL_RECIPES)])]
    advice = advise(subject, batch=batch)
    rows = {evidence.recipe_key(row.candidate.flags): row for row in advice.rows if not row.candidate.options}
    arms, left_out = [], {}
    for arm in named:
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
    quiet: bool = False,
    **options: Any,
) -> Answer:
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
        quiet: no bar.
        options: of Precision: lr, betas, weight_decay, clip_grad, ... With ema_decay the average is scored.

    Raises:
        Refused (a ValueError): what is missing or makes no sense, and a reference that learns nothing.
    """
    weights = None if start is None else read_checkpoint(start).weights
    problem = Problem(build, loss, batches, held_out, groups, schedule, options, weights)
    subject, batch = subject_of(problem, seed)
    plan = {"start": start and str(start), "options": {name: repr(v) for name, v in options.items()}}

    def make(arm, seed):
        return Training(problem, arm.flags, seed, steps)

    return run_trial(make, subject, batch, recipes, steps, within, budget, seed, file, quiet, plan)


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
    recipes: Iterable[str] | None,
    steps: int,
    within: float,
    budget: str | float,
    seed: int,
    file: str | Path | None,
    quiet: bool,
    plan: dict[str, Any],
) -> Answer:
    """`trial` of what make(arm, seed) trains, see training.Training. plan: what else tells it from others."""
    if steps < 1:
        raise Refused(f"steps={steps}: a training has one step or more")
    if not 0 < within < math.inf:
        raise Refused(f"within={within:g}: write a percentage above 0, as 0.3")
    check_several("recipes", recipes)
    seconds = seconds_of(budget)
    plan = {"net": subject.name, "parameters": subject.parameters, "steps": steps, "seed": seed, **plan}
    book = Book(file, plan, within)
    arms, book.left_out = arms_of(recipes, subject, batch)
    book.reference = arms[0].name
    rounds = Rounds(make, arms, book, steps, seconds, seed)
    book.write()  # what can't be written is refused now
    rounds.run(quiet)
    return Answer(book)


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


class Rounds:
    """The trainings of a trial, one after the other: in a round those of one seed, of the reference and of
    each recipe about which not enough is known. budget: seconds.
    """

    def __init__(self, make, arms: list[Arm], book: Book, steps: int, budget: float, seed: int):
        self.make, self.arms, self.book = make, arms, book
        self.steps, self.budget, self.seed = steps, budget, seed

    def run(self, quiet: bool) -> None:
        """Train until enough is known, or the budget is used up."""
        tqdm = quiet_import("tqdm", "a trial's bar").tqdm
        with tqdm(desc="trial", unit="step", disable=quiet, dynamic_ncols=True) as self.bar:
            try:
                self._time_steps()
                self._train_rounds()
            except KeyboardInterrupt:
                if self.book.file is not None:
                    kept = f"{self.book.file} keeps what is finished; the same command goes on from there"
                    self.bar.write(kept, sys.stderr)
                raise
        self.book.write()

    def _train_rounds(self):
        self.bar.initial = self.bar.n = self.steps * sum(map(len, self.book.runs.values()))
        while True:
            seed, arms = self.next_round()
            if not arms or self.book.wall + self._time_of(arms) > self.budget:
                return
            self.bar.total = self._steps_in_all()
            for arm in arms:
                with self._or_left_out(arm):
                    self._train(arm, seed)

    def next_round(self) -> tuple[int, list[Arm]]:
        """(seed, the arms that are to be trained with it); no arms where enough is known."""
        reference, *others = self.arms
        waiting = [arm for arm in others if not self._is_done(arm)]
        if not waiting:
            return 0, []
        seed = self.seed + min(self.book.pairs(arm.name) for arm in waiting)
        return seed, [arm for arm in (reference, *waiting) if self.book.result(arm.name, seed) is None]

    def _is_done(self, arm):
        changes = self.book.changes(arm.name)
        if arm.name in self.book.left_out or math.inf in changes.values() or len(changes) >= LOOKS[-1]:
            return True
        return len(changes) in LOOKS and is_settled(self.book.mean(arm.name), self.book.within)

    @contextmanager
    def _or_left_out(self, arm):
        """Within it a recipe that can't train this net, or for which memory does not suffice, is left out."""
        try:
            yield
        except (Refused, RuntimeError) as error:
            full = out_of_memory(error)
            if arm is self.arms[0] or not (full or isinstance(error, Refused)):
                raise
            self.book.left_out[arm.name] = "the memory is full" if full else str(error)

    # -- time

    def _time_steps(self):
        """Note how long a step of each recipe takes, in turns, for this machine may have other work. Raises
        Refused where the budget is too small for a pair of each.
        """
        self.bar.set_postfix_str("timing steps")
        found = {arm.name: [] for arm in self.arms if arm.name != CHAOS}
        if not found.keys() - self.book.seconds.keys():
            return
        for _ in range(TURNS):
            for arm in self.arms:
                if arm.name in found and arm.name not in self.book.left_out:
                    with self._or_left_out(arm):
                        found[arm.name] += self._seconds_of_steps(arm)
        self.book.seconds = {name: statistics.median(times) for name, times in found.items() if times}
        one = self._time_of([arm for arm in self.arms if arm.name not in self.book.left_out])
        if one > self.budget:
            raise Refused(
                f"a pair of each recipe takes about {one / 60:.2g} minutes, and the budget is "
                f"{self.budget / 60:.2g}: give {math.ceil(3 * one / 60)}m, or fewer steps or recipes"
            )

    def _seconds_of_steps(self, arm):
        training = self.make(arm, self.seed)
        times = []
        for _ in range(min(STEPS_OF_A_TURN, self.steps)):
            began = time.perf_counter()
            if training.step().is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return times[1:] or times  # the first may compile

    def _time_of(self, arms):
        """Seconds that a training of each of these arms takes."""
        of_reference = self.book.seconds[self.arms[0].name]
        return self.steps * sum(self.book.seconds.get(arm.name, of_reference) for arm in arms)

    def _steps_in_all(self):
        """How many steps all trainings are likely to have."""
        pairs = []
        for arm in self.arms[1:]:
            needed = self.book.pairs(arm.name)
            if not self._is_done(arm):
                mean = self.book.mean(arm.name)
                likely = USUAL_PAIRS if mean is None else pairs_needed(mean, self.book.within)
                needed = max(needed + 1, likely)
            pairs.append(needed)
        wanted = self.steps * (sum(pairs) + max(pairs))
        of_a_step = self._time_of(self.arms) / len(self.arms) / self.steps
        return min(wanted, self.bar.n + round((self.budget - self.book.wall) / of_a_step))

    # -- one training

    def _train(self, arm, seed):
        began = time.perf_counter()
        self.bar.set_postfix_str(f"{arm.name}, seed {seed}")
        is_reference = arm is self.arms[0]
        training = self.make(arm, seed)
        if arm.name == CHAOS:
            move_a_last_bit(training.run.model)
        result = {"bytes": round(sum(ledger.held_by_rank(training.run, 1).values()))}
        if is_reference:
            result["before"] = training.held_out()
        result.update(self._trained(training))
        if is_reference:
            self._check_reference(result)
            if not self.book.foreseen:
                self.book.foreseen = self._foreseen(training, result["loss"])
        result["wall"] = time.perf_counter() - began
        self.book.keep(arm.name, seed, result)

    def _trained(self, training):
        """{"loss": held-out, at the end} or {"diverged": the step at which that was seen}."""
        for step in range(1, self.steps + 1):
            loss = training.step()
            self.bar.update()
            if (step % STEPS_BETWEEN_CHECKS == 0 or step == self.steps) and not loss.isfinite():
                return {"diverged": step}
        score = training.held_out()
        return {"loss": score} if math.isfinite(score) else {"diverged": self.steps}

    def _foreseen(self, training, loss):
        """{recipe: what its writes would do}, from the reference's weights and moments at its end."""
        rates = [training.rate_at(step) for step in range(0, self.steps, max(1, self.steps // 20))]
        largest = max(rates)
        ahead = [rate / largest for rate in rates]
        run = training.run
        try:
            return foresee(run.model, run.optimizer, lr=largest, ahead=ahead, loss=loss).rows()
        except Refused:  # an optimiser without Adam's moments
            return {}

    def _check_reference(self, result):
        """Raise Refused where no recipe can be judged by the reference."""
        if "diverged" in result:
            at = f"is not finite at step {result['diverged']}"
            raise Refused(f"the reference's loss {at}: no recipe can be judged beside it; lower the rate")
        before, after = result["before"], result["loss"]
        if after <= 0:
            raise Refused(f"the held-out loss is {after:.3g}: a change in percent needs a loss above 0")
        fall = 1 - after / before
        if fall < LEAST_FALL:
            fell = f"fell by {100 * fall:.2g} %" if fall > 0 else "did not fall"
            raise Refused(f"the reference's loss {fell}: too short to tell; give more steps or another rate")
