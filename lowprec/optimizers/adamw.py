"""AdamW, written in any of the ways of `Rounded`."""

import torch

from ..errors import Refused
from ..kernels import choose
from ..kernels.numbers import AdamWNumbers
from .rounded import Rounded


class AdamW(Rounded):
    """AdamW (arXiv 1711.05101), all arithmetic in fp32 in the order of torch.optim.AdamW.

    Defaults are torch's, weight decay of 0.01 among them. Arguments beyond torch's: see Rounded; exp_avg and
    exp_avg_sq say how the moments are held. With fp32 moments and an exact master the result equals
    torch.optim.AdamW on fp32 weights bit for bit on a CPU.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, **writing):
        options = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def check_group(self, group):
        super().check_group(group)
        if self.update == "eco" and group["betas"][0] == 0:
            raise Refused("update='eco' puts rounding errors into the momentum: set betas[0] above 0, as 0.9")

    def numbers(self, group, step):
        beta1, beta2 = group["betas"]
        return AdamWNumbers(
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            root_correction=(1 - beta2**step) ** 0.5,
            eps=group["eps"],
            rate=-float(group["lr"]) / (1 - beta1**step),
        )

    @staticmethod
    @choose.hand_written("adamw")
    def direction(g, moments, n):
        m, v = moments
        m = (g - m) * n.one_minus_beta1 + m
        v = n.one_minus_beta2 * g * g + v * n.beta2
        update = (n.rate * m) / (v.sqrt() / n.root_correction + n.eps)
        return update, (m, v)

    @staticmethod
    def feedback(error, moments, n):
        m, v = moments
        # decaying by beta1, it makes steps of (1 - beta1) error, beta1 (1 - beta1) error, ...
        share = n.one_minus_beta1 / (1 - n.one_minus_beta1)
        back = error * share * (v.sqrt() / n.root_correction + n.eps) / n.rate
        return torch.where(error == 0, m, m + back), v  # a rate of 0 makes no error
