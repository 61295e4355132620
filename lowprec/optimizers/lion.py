"""Lion, written in any of the ways of `Rounded`."""

import math
from typing import NamedTuple

import torch

from .. import kernels
from .rounded import Rounded


class LionNumbers(NamedTuple):
    """What a step of Lion reads."""

    one_minus_beta1: float
    one_minus_beta2: float
    rate: float  # -learning rate


def lion(g, moments, n):
    """(fp32 update, new moments), as `rounded.adamw`. n: LionNumbers."""
    (m,) = moments
    mean = m + n.one_minus_beta1 * (g - m)
    # the sign of NaN is 0 in torch: the entry would stand still for ever, and nobody would see why
    sign = torch.where(mean == mean, mean.sign(), mean)
    return n.rate * sign, (m + n.one_minus_beta2 * (g - m),)


kernels.RULES[lion] = "lion"


class Lion(Rounded):
    """Lion (arXiv 2302.06675): the sign of a mean of gradient and momentum. All steps have the size lr."""

    moments = ("exp_avg",)
    direction = staticmethod(lion)
    flags = {"lr": 1e-4, "beta2": 0.99}

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **writing):
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay), **writing)

    def numbers(self, group, step):
        beta1, beta2 = group["betas"]
        return LionNumbers(
            one_minus_beta1=1 - beta1,
            one_minus_beta2=1 - beta2,
            rate=-float(group["lr"]),
        )

    def decay(self, p, name):
        if name not in self.moments:
            return math.nan, 0
        return self._group(p)["betas"][1], math.inf
