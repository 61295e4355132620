"""Regression by a small MLP that starts at its optimum: what a training adds to its loss is noise alone.

    python train.py --task experiments/077-noise-of-writes/task.py:Bowl --pure_bf16 --stochastic

Targets are the outputs of the initial net and noise of standard deviation 1. The score, `loss`, is the mean
square of what the trained net lies away from the initial one, without that noise: the excess loss.
"""

import torch
from torch import nn

from tasks import Task

INPUTS, HIDDEN = 8, 16
SCALES = torch.logspace(0.3, -0.3, INPUTS)  # of the inputs, so that directions differ in steepness
NET_SEED = 1234  # of the initial net, which is every run's
HELD_OUT = 8192


def bowl_net():
    """The initial net: inputs [N, INPUTS] to outputs [N, 1]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(NET_SEED)
        net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        for layer in (net[0], net[2]):
            nn.init.normal_(layer.weight, std=0.5)
    return net


def inputs_of(normal):
    """Inputs [N, INPUTS] of standard normal numbers [N, INPUTS]."""
    return normal * SCALES


class Places:
    """As many places of a batch as are asked for; `loss` draws what stands there."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return {"x": torch.zeros(len(index), INPUTS)}


class Bowl(Task):
    class Data:
        name, train, heldout = "noise", Places(), Places()

        def __str__(self):
            return "inputs and noise, drawn anew for each batch"

    @classmethod
    def load(cls, config):
        return cls.Data()

    def net(self):
        return bowl_net()

    def loss(self, model, batch, rng, step):
        count = len(batch["x"])
        x = inputs_of(rng.normal(count, INPUTS))
        with torch.no_grad():
            target = self.optimum()(x) + rng.normal(count, 1)
        return (model(x).float() - target).square().mean()

    def optimum(self):
        if not hasattr(self, "_optimum"):
            self._optimum = bowl_net()
        return self._optimum

    @torch.no_grad()
    def evaluate(self, model, rng):
        x = inputs_of(torch.randn(HELD_OUT, INPUTS, generator=torch.Generator().manual_seed(0)))
        return {"loss": float((model(x).float() - self.optimum()(x)).square().mean())}, {}
