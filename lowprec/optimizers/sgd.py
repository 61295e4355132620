"""SGD with momentum, written in any of the ways of `Rounded`."""

import math
from typing import NamedTuple

import torch

from .. import kernels
from ..errors import Refused
from ..formats import CODE_FORMATS, Site
from .rounded import Rounded

# Muon has it too
MOMENTUM = Site(
    ("fp32", "bf16", *CODE_FORMATS),
    {"bf16": "1-momentum is far above an ulp", **CODE_FORMATS},
    follows="exp_avg",
)


class SGDNumbers(NamedTuple):
    """What a step of SGD reads."""

    momentum: float
    of_gradient: float  # the step is rate * (of_gradient * gradient + of_momentum * new momentum)
    of_momentum: float
    rate: float  # -learning rate


def sgd(g, moments, n):
    """(fp32 update, new moments), as `rounded.adamw`. n: SGDNumbers."""
    (m,) = moments
    m = m * n.momentum + g
    update = n.rate * (n.of_gradient * g + n.of_momentum * m)
    return update, (m,)


kernels.RULES[sgd] = "sgd"


class SGD(Rounded):
    """SGD with momentum, as torch.optim.SGD forms it: m = momentum m + g, with its defaults, momentum of 0
    among them; Precision and train.py take `of_run`. Decay is decoupled (SGDW).
    """

    moments = ("momentum",)
    direction = staticmethod(sgd)
    sites = {"momentum": MOMENTUM}
    flags = {"lr": 0.01}
    of_run = {"lr": 0.01, "momentum": 0.9}

    def __init__(self, params, lr=1e-3, momentum=0.0, nesterov=False, weight_decay=0.0, **writing):
        options = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def check_group(self, group):
        super().check_group(group)
        if group["nesterov"] and not group["momentum"]:
            raise Refused("nesterov looks ahead along the momentum: set momentum, as 0.9")

    def numbers(self, group, step):
        momentum, nesterov = group["momentum"], bool(group["nesterov"])
        return SGDNumbers(
            momentum=momentum,
            of_gradient=float(nesterov),
            of_momentum=momentum if nesterov else 1.0,
            rate=-float(group["lr"]),
        )

    @staticmethod
    def feedback(error, moments, n):
        (m,) = moments
        back = error * (1 - n.momentum) / (n.momentum * n.of_momentum * n.rate)  # as of AdamW
        return (torch.where(error == 0, m, m + back),)

    def decay(self, p, name):
        if name not in self.moments:
            return math.nan, 0
        return self._group(p)["momentum"], math.inf
