"""What the tests of FP8 share: nets that it covers in part, and how far a result is from the exact one."""

import math

import common
import torch
import torch.nn.functional as F
from torch import nn

import models
from lowprec.layers import fp8


def draw(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return common.draw(*shape, seed=seed, scale=scale).to(dtype)


def snr(x, exact):
    """dB of exact over the error of x."""
    exact = exact.double()
    return 10 * math.log10(exact.square().sum() / (x.double() - exact).square().sum())


class Net(nn.Module):
    """Two covered Linears between one that is an embedding, one of odd width, and the last layer."""

    def __init__(self, width=32):
        super().__init__()
        self.x_embed = nn.Linear(16, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.narrow = nn.Linear(width, 12)
        self.final = nn.Linear(12, 16)

    def forward(self, x):
        h = self.x_embed(x)
        h = h + self.second(F.gelu(self.first(h)))
        return self.final(self.narrow(h))


class Bare(nn.Module):
    """A model of bare parameters: two heads widen, one matrix comes back, and one has a shape that FP8 can't
    take.
    """

    def __init__(self):
        super().__init__()
        shapes = (2, 16, 32), (64, 16), (16, 10)
        self.widen, self.back, self.odd = (
            nn.Parameter(draw(*shape, seed=i, scale=0.2)) for i, shape in enumerate(shapes)
        )
        self.scalings = nn.ModuleList(fp8.Scaling() for _ in range(3))

    def forward(self, x):  # [B, 1, T, 16]
        h = fp8.matmul(x, self.widen, self.scalings[0]).relu()
        h = fp8.matmul(h.transpose(1, 2).flatten(2), self.back, self.scalings[1])
        return fp8.matmul(h, self.odd, self.scalings[2])


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def dit(seed=0):
    torch.manual_seed(seed)
    return models.GENERATIVE["dit"](channels=1, num_classes=10, image_size=8)


def method(run, kind):
    """The method of a class that is attached to a Precision."""
    (found,) = [attached for attached in run.methods if isinstance(attached, kind)]
    return found
