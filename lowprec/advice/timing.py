"""A few real steps of a net in a recipe, timed on this machine."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from ..layers.flops import with_tensors
from ..precision import Precision

STEPS_TIMED = 5


def seconds_a_step(subject, recipe, batch: int, steps: int = STEPS_TIMED, **options) -> float:
    """The median of so many training steps behind one that compiles. The weights are drawn anew."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        net = with_tensors(subject.net, _drawn).to(device)
        run = Precision(net, recipe, lr=1e-4, **options)
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            run.backward(subject.loss(run, batch))
            run.step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _drawn(tensor):
    """Small random numbers for a matrix, ones for a vector, the tensor's own values where it has some."""
    if tensor.device.type != "meta":
        new = tensor.detach().clone()
    elif tensor.dim() < 2 or not tensor.is_floating_point():
        new = torch.ones(tensor.shape, dtype=tensor.dtype)
    else:
        new = torch.randn(tensor.shape, dtype=tensor.dtype) * 0.02
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new
