"""Several backward passes a step: what share each has in the gradient, and their sum in fp32."""

import math
import warnings

import torch

from ..errors import Refused
from .part import Part


class MicroBatches(Part):
    """The share of each micro-batch in the gradient of a step: as large as all others, or as its weight says.

    With weights w the gradient is sum(w g) / sum(w). Losses are multiplied by w over the first weight, so
    that they keep their size in fp16, and gradients by `_factor` once all weights are known.

    sums: {parameter: the fp32 sum of its gradients}, where bf16 gradients are summed as the site accumulate
    says. fp32 gradients add up in p.grad already.
    """

    def __init__(self, run):
        super().__init__(run)
        self.warned = False
        several = run.options.accumulate > 1 or run.recipe.sparse24 == "srste"
        self.keeps_sums = several and run.recipe.low_weights and run.recipe.accumulate == "fp32"
        self.forget()

    def forget(self):
        self.sums = {}
        self.weight = None  # of the micro-batch whose backward comes next
        self.first = self.total = 0.0

    def weigh(self, weight):
        """Give the next micro-batch a weight. Raises Refused for one that is none."""
        if not 0 < float(weight) < math.inf:
            given = f"backward(loss, weight={float(weight):g})"
            raise Refused(f"{given}: it must be above 0; leave an empty one out")
        if any(part.frees_gradients for part in self.run.parts):
            early = "grad_release updates before the other weights are known"
            raise Refused(f"backward(loss, weight=...): {early}")
        parallel = self.run.view_of_model.parallel is not None
        if parallel or self.run.spread or self.run.reduce_sums is not None:
            raise Refused(
                "backward(loss, weight=...) knows the weights of one process alone: under DDP and "
                "fully_shard multiply the loss by weight / (mean weight of all micro-batches and ranks)"
            )
        self.weight = float(weight)

    def loss(self, loss):
        weight, self.weight = self.weight, None
        if self.run.backwards and (weight is None) != (self.total == 0):
            raise Refused("backward(loss, weight=...): give every micro-batch of a step a weight, or none")
        accumulate = self.run.options.accumulate
        if weight is None:
            return loss / accumulate
        self.first = self.first or weight
        self.total += weight
        return loss / (accumulate * self.first / weight)

    def after_backward(self):
        """Add the gradients to the fp32 sums. Raises Refused within no_sync() of DDP."""
        if not self.keeps_sums:
            return
        parallel = self.run.view_of_model.parallel
        averaged_later = self.run.reduce_sums is not None
        if parallel is not None and not averaged_later and not parallel.require_backward_grad_sync:
            raise Refused(
                "micro-batches are summed in fp32 apart from p.grad: DDP would average the last alone: leave "
                "no_sync() out, or take sites=('accumulate=bf16',)"
            )
        for p in self.run.params:
            if p.grad is None:
                continue
            if p in self.sums:
                self.sums[p].add_(p.grad)
            else:
                # a copy of an fp32 gradient too: DDP may have given a view of its bucket, to write it anew
                self.sums[p] = p.grad.to(torch.float32, copy=True)
            p.grad = None

    def gradients(self, grads):
        if grads and self.run.options.accumulate > 1 and not self.run.backwards:
            raise Refused("loss.backward() takes no mean of micro-batches: call run.backward(loss)")
        if self.keeps_sums:
            if self.run.reduce_sums and self.sums:
                self.run.reduce_sums(self.sums)
            grads = {p: g.float() for p, g in grads.items()}  # of backward that updates, which sums nothing
            grads.update(self.sums)
        factor = self._factor()
        if factor != 1.0:
            torch._foreach_mul_(list(grads.values()), factor)
        return grads

    def _factor(self):
        """What the gradients of a step are multiplied by. Warns once where micro-batches are missing."""
        accumulate, count = self.run.options.accumulate, self.run.backwards
        if self.total:
            return accumulate * self.first / self.total
        if count % accumulate and not self.warned:
            self.warned = True
            warnings.warn(
                f"step() after {count} micro-batches of accumulate={accumulate}: their gradient is "
                f"{count}/{accumulate} of their mean; backward(loss, weight=1) takes the mean of those "
                "that came",
                stacklevel=4,  # where run.step() is called
            )
        return 1.0

    def rows(self, parameters, generation_dtype):
        return {"accumulate": {"bytes": 4.0 if self.keeps_sums else 0.0}}
