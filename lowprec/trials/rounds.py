"""The trainings of a trial: their order, their time, and when there are enough of them."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import Refused, out_of_memory
from ..machine import quiet_import
from ..parts.ranks import held_by_rank
from .book import CHAOS, Book, is_settled
from .foresee import foresee
from .intervals import LOOKS, pairs_needed
from .training import move_a_last_bit

LEAST_FALL = 0.01  # of the reference's loss, as a share: below that it has learnt too little to tell
TURNS, STEPS_OF_A_TURN = 3, 6  # in which steps are timed
USUAL_PAIRS = 6  # that the bar counts on until the spread of pairs is known
STEPS_BETWEEN_CHECKS = 50  # of a loss that may not be finite: reading it waits for a GPU


class Rounds:
    """The trainings of a trial, one after the other: in a round those of one seed, of the reference and of
    each recipe about which not enough is known.

    make(arm, seed): a training.Training, or what has its methods. arms: trial.Arm of the reference, the same
    by the name CHAOS, and the recipes. budget: seconds.
    """

    def __init__(
        self, make: Callable[..., Any], arms: list, book: Book, steps: int, budget: float, seed: int
    ):
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

    def next_round(self) -> tuple[int, list]:
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
        result = {"bytes": round(sum(held_by_rank(training.run, 1).values()))}
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
        wrong = ""
        earlier = self.book.runs.get(self.arms[0].name, {})
        fall = 1 - result.get("loss", 0.0) / result["before"]
        if "diverged" in result:
            wrong = f"is not finite at step {result['diverged']}; lower the rate"
        elif result["loss"] <= 0:
            wrong = f"is {result['loss']:.3g} in the end; a change in percent needs a loss above 0"
        elif fall < LEAST_FALL:
            fell = f"fell by {100 * fall:.2g} %" if fall > 0 else "did not fall"
            wrong = f"{fell}: too short to tell; give more steps or another rate"
        elif result["loss"] in [one.get("loss") for one in earlier.values()]:
            wrong = "is the same with two seeds, so pairs tell no spread: let batches(seed) go by the seed"
        if wrong:
            raise Refused(f"no recipe can be judged: the reference's loss {wrong}")
