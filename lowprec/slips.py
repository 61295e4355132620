"""Slips in a loop that would cost a training in silence, refused at the step that makes them."""

from __future__ import annotations

import math
import warnings

import torch

from .errors import Refused
from .gradients import ByParameter


class Slips:
    """What a Precision `run` looks at in its steps, at hardly any cost while nothing changes."""

    STEPS_BETWEEN_WALKS = 64  # through all modules, which is too slow for each step

    def __init__(self, run):
        self.parameters = set(run.model.parameters())  # also those that are frozen
        self.frozen = [(name, p) for name, p in run.model.named_parameters() if not p.requires_grad]
        self.in_groups = _count_in_groups(run.optimizer)
        self.gradients = None  # how many the last step had
        self.steps = 0
        run.optimizer.register_step_pre_hook(_refuse_bare_step)

    def check(self, run, grads: ByParameter) -> None:
        """Raise Refused where the optimiser or the model has parameters that came after Precision."""
        if _count_in_groups(run.optimizer) != self.in_groups:
            raise Refused(
                "the optimiser has parameters that this run does not average, clip or sum: make Precision "
                "while all that is ever trained has requires_grad=True, and freeze it then"
            )
        for name, p in self.frozen:
            if p.requires_grad and p.grad is not None:
                raise Refused(
                    f"parameter {name} was frozen when Precision was made, and would never be trained: make "
                    "Precision while all that is ever trained has requires_grad=True, and freeze it then"
                )
        self.steps += 1
        replaced = len(grads) != self.gradients  # a layer that was replaced gets none
        if (replaced or self.steps % self.STEPS_BETWEEN_WALKS == 0) and run.ranks is None:
            self.gradients = len(grads)
            self.refuse_new(run)

    def refuse_new(self, run) -> None:
        """Raise Refused where the model has a parameter that came after Precision."""
        for name, p in run.model.named_parameters():
            if p.requires_grad and p not in self.parameters:
                raise Refused(
                    f"parameter {name} was put into the model after Precision was made, and would never be "
                    "trained: change the model first, and spread it (fully_shard) first"
                )


def _count_in_groups(optimizer):
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _refuse_bare_step(optimizer, args, kwargs):
    if "grads" not in kwargs:  # run.step() gives them
        raise Refused(
            "run.optimizer.step() would leave out clipping, loss scaling and the average: call run.step()"
        )


class MicroBatches:
    """The share of each micro-batch in the gradient of a step: as large as all others, or as its weight says.

    With weights w the gradient is sum(w g) / sum(w). Losses are multiplied by w over the first weight, so
    that they keep their size in fp16, and gradients by `factor` once all weights are known.
    """

    def __init__(self):
        self.warned = False
        self.forget()

    def forget(self):
        """Start a step anew."""
        self.count = 0
        self.first = self.total = 0.0

    def divisor(self, run, weight: float | torch.Tensor | None) -> float:
        """What the loss of the next micro-batch is divided by. Raises Refused for a weight that is none."""
        if self.count and (weight is None) != (self.total == 0):
            raise Refused("backward(loss, weight=...): give every micro-batch of a step a weight, or none")
        if weight is not None:
            _check_weight(run, weight)
        self.count += 1
        if weight is None:
            return run.accumulate
        weight = float(weight)
        self.first = self.first or weight
        self.total += weight
        return run.accumulate * self.first / weight

    def factor(self, accumulate: int) -> float:
        """What the gradients of a step are multiplied by. Warns once where micro-batches are missing."""
        if self.total:
            return accumulate * self.first / self.total
        if self.count % accumulate and not self.warned:
            self.warned = True
            warnings.warn(
                f"step() after {self.count} micro-batches of accumulate={accumulate}: their gradient is "
                f"{self.count}/{accumulate} of their mean; backward(loss, weight=1) takes the mean of those "
                "that came",
                stacklevel=5,
            )
        return 1.0


def _check_weight(run, weight):
    if not 0 < float(weight) < math.inf:
        raise Refused(f"backward(loss, weight={float(weight):g}): it must be above 0; leave an empty one out")
    if run.release is not None:
        raise Refused("backward(loss, weight=...): grad_release updates before the other weights are known")
    parallel = run.view_of_model.parallel is not None
    if parallel or run.ranks is not None or run.reduce_sums is not None:
        raise Refused(
            "backward(loss, weight=...) knows the weights of one process alone: under DDP and fully_shard "
            "multiply the loss by weight / (mean weight of all micro-batches and ranks)"
        )
