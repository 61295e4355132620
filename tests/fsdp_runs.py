"""Runs of train.py --fsdp in tests: a task of tiny nets, and fixtures that start it on ranks, forks of
many_ranks.py.
"""

from pathlib import Path

import pytest
from cli import command

TASK = '''
import torch.nn.functional as F
from torch import nn
from tasks import Task


class Data:
    name, channels, num_classes, image_size = "lines", 1, 0, 8

    class Set:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            import torch
            x = torch.tensor([[i / 64, 1.0, i % 5, i % 3] for i in index])
            return x, x.sin()

    train = heldout = Set()

    def __str__(self):
        return self.name


class Lines(Task):
    @classmethod
    def load(cls, config, index=None):
        return Data()

    def net(self):
        net = nn.Sequential(nn.Linear(4, 70), nn.ModuleList(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 4))
        del net[1]
        return net

    def loss(self, model, batch, rng, step):
        x, y = batch
        return F.mse_loss(model(x), y)

    def evaluate(self, model, rng):
        x, y = self.data.train[list(range(8))]
        return {"error": float(F.mse_loss(model(x), y))}, {}


class Norms(Lines):
    """Running statistics, which each rank leaves in a file, and tied weights. It gets worse and worse."""

    watched, looks = ("error", "lower"), 0

    def net(self):
        wide = [nn.Linear(70, 70), nn.Linear(70, 70)]
        wide[1].weight = wide[0].weight
        norms = [nn.BatchNorm1d(70) for _ in wide]
        return nn.Sequential(nn.Linear(4, 70), norms[0], *wide, norms[1], nn.Tanh(), nn.Linear(70, 4))

    def loss(self, model, batch, rng, step):
        import os
        import resource
        import torch
        rank, full = os.environ.get("RANK", "0"), "full" + os.environ.get("RANK", "0")
        if os.path.exists(full) and step == int(open(full).read()):
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        loss = super().loss(model, batch, rng, step)
        torch.save(dict(model.model.named_buffers()), "buffers-" + rank)
        return loss

    def validate(self, model, rng):
        self.looks += 1
        return {"error": float(self.looks)}
'''
DIT = """

class Dit(Lines):
    def net(self):
        from models import DiT
        return DiT(4, 1000, 32, 2, 2, 128, 4)
"""
RUN = "--batch_size 8 --sample_every 0 --warmup 0 --threads 1 --log_every 2 --clip_grad 0".split()
RUN += ["--device", "cpu"]
LOW = ["--pure_bf16", "--stochastic", "--opt8bit"]


def on_ranks(ranks, kind, *fixed):
    """train(world, *flags): train.py --fsdp of a task above; without torchrun where world is 0."""
    Path("lines.py").write_text(TASK)
    task = ["--task", f"lines.py:{kind}", *RUN, *fixed]

    def train(world, *flags, name="run"):
        words = [*task, "--name", name, *map(str, flags)]
        return ranks(world, None, "--fsdp", *words) if world else command(*words)

    train.start = lambda world, *flags: ranks.start(world, None, "--fsdp", *task, "--name", "run", *flags)
    return train


@pytest.fixture
def run(ranks):
    return on_ranks(ranks, "Lines", *LOW)


@pytest.fixture
def norms(ranks):
    """Of the task of norms and tied weights."""
    return on_ranks(ranks, "Norms")
