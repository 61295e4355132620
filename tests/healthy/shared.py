"""What the healthy loops share, and the table that they enter."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from lowprec import Watch

STEPS = int(os.environ.get("WATCH_STEPS", "24"))
EVERY = STEPS // 4
LOOPS = {}  # name -> function that trains and returns its Watch


def loop(function):
    """Enter a loop under its name."""
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32))
    )


def draw(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def task(net, step):
    """A loss that a net of 32 to 32 can learn."""
    x = draw(step, 32, 32)
    return F.mse_loss(net(x), x.roll(1, 1))


def tokens(step, *shape, below=50):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(step))


def adam(net, lr=1e-3, **options):
    return torch.optim.AdamW(net.parameters(), lr=lr, **options)


def trained(net, optimizer=None, loss=task, ema=None, after=None, between=None, steps=STEPS, **how):
    """The Watch of an ordinary loop. loss: (net, step); after: called with the step once it is done; between:
    called after backward; how: of Watch.
    """
    optimizer = optimizer or adam(net)
    watch = Watch(net, optimizer, ema, **{"every": EVERY, **how})
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, step).backward()
        if between:
            between(step)
        optimizer.step()
        if after:
            after(step)
    return watch


def next_token(net, step):
    ids = tokens(step, 16, 12)
    return F.cross_entropy(net(ids).flatten(0, 1), ids.roll(1, 1).flatten())
