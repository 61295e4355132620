"""Rectified flow with the averages of other tools beside ours, each updated at every step of one training.

    python train.py --task experiments/048-averages-of-others/task.py:Flow --pure_bf16 --weights all

The rules are those of benchmarks/averages.py. Each is scored like any average of the run; its name is that
of the rule and the decay, as in `diffusers:0.999`.
"""

import torch

from benchmarks.averages import DECAYS, RULES
from lowprec.errors import Refused
from lowprec.optimizers.average import EMA
from tasks.diffusion import RFlow


class Ruled(EMA):
    """An average of a run's weights by a rule of another tool: fp32 where the rule is, else bf16."""

    def __init__(self, named_params, name, decay, seed=0):
        super().__init__(named_params, decay, "fp32" if name.startswith("fp32") else "bf16")
        self.rule, self.draw = RULES[name], torch.Generator().manual_seed(seed)

    @property
    def decay(self):
        """Of the last update; 1 where the rule waits for its interval."""
        return self.rule.decay_at(self.full_decay, self.step) if self.rule.due(self.step) else 1.0

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.rule.due(self.step):
            for bucket in self._buckets:
                weights, _ = self._inputs(bucket)
                bucket.flat.copy_(self.rule.update(bucket.flat, weights, 1 - self.decay, self.draw))


class Flow(RFlow):
    """`--task rflow`, with every rule at every decay."""

    def train_set(self, run):
        """Raises Refused for a run that goes on: where its averages stood is not in the checkpoint."""
        if run.step:
            begin = "the averages of other tools begin with a run"
            raise Refused(f"{run.folder} can't go on: {begin}; delete it, or give another --name")
        for name in RULES:
            for decay in DECAYS:
                average = Ruled(run.precision.named_params, name, decay, run.config.seed)
                run.precision.averages[f"{name.replace(', ', '-').replace(' ', '-')}:{decay:g}"] = average
        return super().train_set(run)
