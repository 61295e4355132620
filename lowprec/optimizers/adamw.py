"""AdamW, written in any of the ways of `Rounded`."""

import torch

from ..kernels import exact_step
from ..kernels.compiled import triton_step
from .rounded import BY_HAND, Rounded


class AdamW(Rounded):
    """AdamW (arXiv 1711.05101), all arithmetic in fp32 in the order of torch.optim.AdamW.

    Arguments beyond torch's: see Rounded; exp_avg and exp_avg_sq say how the moments are held. With fp32
    moments and an exact master the result equals torch.optim.AdamW on fp32 weights bit for bit on a CPU.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **writing):
        options = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def numbers(self, group, step):
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        corrected = (1 - beta2**step) ** 0.5
        return [1 - beta1, beta2, 1 - beta2, corrected, group["eps"], -lr / (1 - beta1**step)]

    @staticmethod
    def direction(g, moments, h):
        m, v = moments
        m = (g - m) * h[2] + m
        v = h[4] * g * g + v * h[3]
        return (h[7] * m) / (v.sqrt() / h[5] + h[6]), (m, v)

    def _exactly(self, dtype, low, state, group):
        if not self._exact(dtype, low, [state[name] for name in self.moments]):
            return {}
        floored = exact_step.vanishes(group["betas"][1], group["eps"])
        return dict(exact=True, floored=floored) if exact_step.in_one_pass(group["betas"]) else None

    def _exact(self, dtype, low, moments):
        """Whether the step is to have the bits of torch.optim.AdamW: weights and moments are exact fp32."""
        writes_bf16 = dtype == torch.bfloat16 and (low is None or low.dtype == torch.bfloat16)
        stochastic = self.update == "stochastic" and writes_bf16
        return not stochastic and all(m.dtype in (torch.float32, torch.uint8) for m in moments)

    def write(self, p, g, moments, low, h, key, group, grad_scale=1.0, average=None):
        if self.rule is None:  # a subclass with a direction of its own
            return super().write(p, g, moments, low, h, key, group, grad_scale, average)
        m, v = moments
        exact = self._exact(p.dtype, low, moments)
        if p.is_cuda and self.compiled and (triton := triton_step()) and triton.fits(p, moments, low):
            exact = exact and group["betas"][0] > 0.5  # torch's lerp goes by another formula below
            return triton.adamw(p, g, moments, low, h, key, self.update == "stochastic", exact, average)
        if not (p.is_cpu and exact):
            return super().write(p, g, moments, low, h, key, group, grad_scale, average)
        exact_step.adamw(p, g, m, v, low, h, group["betas"], group["eps"], grad_scale, average, self.compiled)


BY_HAND[AdamW.direction] = "adamw"
