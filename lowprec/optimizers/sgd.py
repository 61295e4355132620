"""SGD with momentum, written in any of the ways of `Rounded`."""

import math

from ..sites import MOMENTUM
from .rounded import BY_HAND, Rounded


class SGD(Rounded):
    """SGD with momentum, as torch.optim.SGD forms it: m = momentum m + g. Decay is decoupled (SGDW)."""

    moments = ("momentum",)
    sites = {"momentum": MOMENTUM}
    flags = {"lr": 0.01}

    def __init__(self, params, lr=0.01, momentum=0.9, nesterov=False, weight_decay=0.0, **writing):
        options = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def numbers(self, group, step):
        momentum, ahead = group["momentum"], bool(group["nesterov"])
        # the step is lr (a g + b m)
        return [momentum, float(ahead), momentum if ahead else 1.0, -float(group["lr"])]

    @staticmethod
    def direction(g, moments, h):
        m = moments[0] * h[2] + g
        return h[5] * (h[3] * g + h[4] * m), (m,)

    def decay(self, p, name):
        known = name in self.moments
        return (self._group(p)["momentum"], math.inf) if known else (math.nan, 0)


BY_HAND[SGD.direction] = "sgd"
