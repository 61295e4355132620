"""AdamW in fp32 whose steps are as much shorter, entry by entry, as rounding to nearest would lose them.

    python train.py --optimizer experiments/088-nearest-from-survival/optimizer.py:SurvivedFromZero

An entry's survival is the share of its last steps that were half a gap of bf16 or more, which a bf16 weight
rounded to nearest would have written. Each step is scaled by it.
"""

import torch

from lowprec.optimizers.rounded import AdamW

STEPS = 50  # over about so many the survival is averaged


def bf16_gap(w):
    """The distance of neighbours in bf16 at w, fp32."""
    _, exponent = torch.frexp(w)
    return torch.ldexp(torch.ones_like(w), exponent - 8)


class Survived(AdamW):
    """With a fault: the gap of a weight that is 0 is 2^-8 here, so weights that begin at 0 stay there."""

    survival = None  # {parameter: share [as the parameter]}
    taken = 0
    gap = staticmethod(bf16_gap)

    @torch.no_grad()
    def step(self, *args, **named):
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in params]
        loss = super().step(*args, **named)
        self.survival = self.survival or {p: torch.zeros_like(p) for p in params}
        self.taken += 1
        for p, old in zip(params, before, strict=True):
            wanted = p - old
            written = (wanted.abs() >= self.gap(old) / 2).float()
            share = self.survival[p].lerp_(written, max(1 / self.taken, 1 / STEPS))
            p.copy_(old + share * wanted)
        return loss


class SurvivedFromZero(Survived):
    """Without it: every step away from 0 would be written."""

    @staticmethod
    def gap(w):
        return bf16_gap(w).where(w != 0, 0.0)
