"""What optimisers share whose update of an entry depends on its whole tensor: Adafactor and Muon.

`ByTensor` gives them the tensor in its shape, and they give back the fp32 update. All writing is that of
`Rounded`: to nearest, stochastically, with Kahan compensation, beside an exact master, in codes. Weight decay
is decoupled (arXiv 1711.05101).
"""

import math

import torch

from ..kernels import choose
from ..kernels.compiled import fused
from ..kernels.numbers import WeightNumbers
from ..rounding import NO_AVERAGE, Noise, exact_weight, key_words, noise_bits, rounded, write_weight
from .buckets import scale_of
from .rounded import Rounded


class ByTensor(Rounded):
    """An optimiser whose update of an entry depends on its whole tensor: each tensor is a bucket of its own.

    One has `moments`, `shape`, `numbers` and `update_tensor`; see Adafactor. `direction` is not asked.
    """

    announced = None  # (grads, scale) that `announce` told of
    by_rows = False

    def shape(self, p, name):
        """The shape in which a moment of p is held; None for one that it does not keep."""
        return p.shape

    def update_tensor(self, g, moments, numbers, held):
        """(fp32 update, new moments) of one tensor, from its gradient g, scaled, its moments {name: tensor}
        and the weight held, all fp32 in their shapes. numbers: what `numbers` said, a NamedTuple of float.
        """
        raise NotImplementedError

    # -- state

    def size(self, p, name):
        shape = self.shape(p, name)
        return 0 if shape is None else math.prod(shape)

    def _alike(self, i, p):
        return i

    def _shares(self, name, flat, bucket):
        (p,) = bucket.params
        if name in self.moments and name not in self._coded(p):
            return [flat.view(self.shape(p, name))]
        return super()._shares(name, flat, bucket)

    def _whole(self, p, state):
        """{name: fp32 moment of p in its shape}, of those that it keeps."""
        names = [name for name in self.moments if name in state]
        loaded = {name: self._loaded(name, state, self.size(p, name)).to(p.device) for name in names}
        return {name: t.float().view(self.shape(p, name)) for name, t in loaded.items()}

    # -- one step

    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        self.announced = None
        return super().step(closure, grads=grads, grad_scale=grad_scale)

    def _rows(self, table, index, numbers, step, piece):
        """As Rounded's: one row for the tensor, whose key rounds the weight, then one for each moment."""
        numbers = self._weight_numbers(index)
        row = table.add(numbers, key_words(self.seed, step, piece.start))
        for kind, _ in enumerate(self.moments, Noise.EXP_AVG):
            table.add(numbers, key_words(self.seed, step, piece.start, kind))
        return [(row, 0, piece.numel)]

    def _average_of(self, piece, rows):
        return NO_AVERAGE  # the direction needs the whole tensor, and is not in the kernel that writes

    def _update(self, work, row, p, g, state, average):
        if not work.piece.numel:  # it holds no moments
            return
        (parameter,), table = work.piece.params, work.table
        weight = WeightNumbers(*table.numbers[row])
        low, stochastic = self._low(state), self.update == "stochastic"
        held = exact_weight(p, low)
        g = (g.float() * weight.scale).view(parameter.shape)
        old = self._whole(parameter, state)
        update, new = self.update_tensor(g, old, work.numbers, held.view(parameter.shape))
        x = held * weight.decay + update.reshape(-1)
        fused(_write_kernel, x, p, low, table.keys[row], stochastic, compiled=self.compiled)
        for further, name in enumerate(self.moments, row + 1):
            if name in state:
                key = table.keys[further] if stochastic else None
                self._keep(name, new[name].reshape(-1), state, key)

    def _keep(self, name, value, state, key):
        """Write fp32 `value` [n] as the moment is held."""
        held = self._moment_of(name, state, key)
        if choose.is_coded(held):
            held.encode(value, self.compiled)
            return
        held = held.view(-1)
        key = key if held.dtype == torch.bfloat16 else None
        fused(_moment_kernel, value, held, key, compiled=self.compiled)

    # -- questions

    def announce(self, grads, grad_scale):
        self.announced = grads, grad_scale

    def wanted_together(self, params, gradients, pick=torch.flatten, held=None):
        """As Rounded's; NaN where a sample of the gradient is given and the whole was not announced."""
        return [self._wanted(p, g, pick) for p, g in zip(params, gradients, strict=True)]

    @torch.no_grad()
    def _wanted(self, p, g, pick):
        whole = self._gradient(p, g)
        if whole is None:
            return torch.full_like(g, math.nan, dtype=torch.float32)
        group, state = self._group(p), self._settled(p, *self.moments)
        held = exact_weight(p.detach(), self.low_part(p))
        numbers = self.numbers(group, state["step"] + 1)
        delta, _ = self.update_tensor(whole.view(p.shape), self._whole(p, state), numbers, held)
        return pick(delta - float(group["lr"]) * group["weight_decay"] * held)

    def _gradient(self, p, g):
        """The whole scaled gradient of p, fp32; None where it is not known."""
        if g.numel() == p.numel():
            return g.float()
        grads, scale = self.announced or ({}, 1.0)
        found = p.grad if grads is None else grads.get(p)
        return None if found is None else found.detach().float() * scale_of(scale, p)


def _write_kernel(x, p, low, key, stochastic):
    write_weight(x, p, low, noise_bits(x.numel(), key)[0] if stochastic else None)


def _moment_kernel(value, held, key):
    held.copy_(rounded(value, held.dtype, None if key is None else noise_bits(value.numel(), key)[0]))
