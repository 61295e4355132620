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
from .rounded import Part, Rounded
from .state import low_of


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

    def bucket_key(self, i, p):
        return i

    def state_views(self, name, flat, bucket):
        (p,) = bucket.params
        if name in self.moments and name not in self.coded_names(p):
            return [flat.view(self.shape(p, name))]
        return super().state_views(name, flat, bucket)

    def _whole(self, p, state):
        """{name: fp32 moment of p in its shape}, of those that it keeps."""
        found = {}
        for name in self.moments:
            if name in state:
                values = self.moment_values(name, state, self.size(p, name)).to(p.device)
                found[name] = values.float().view(self.shape(p, name))
        return found

    # -- one step

    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        self.announced = None
        return super().step(closure, grads=grads, grad_scale=grad_scale)

    def _add_rows(self, table, index, numbers, step, piece):
        """As Rounded's: one row for the tensor, whose key rounds the weight, then one for each moment."""
        numbers = self._weight_numbers(index)
        row = table.add(numbers, key_words(self.seed, step, piece.start))
        for kind, _ in enumerate(self.moments, Noise.EXP_AVG):
            table.add(numbers, key_words(self.seed, step, piece.start, kind))
        return [Part(row, 0, piece.numel)]

    def _average_of(self, piece, parts):
        return NO_AVERAGE  # the direction needs the whole tensor, and is not in the kernel that writes

    def _update(self, work, row, p, g, state, average):
        if not work.piece.numel:  # it holds no moments
            return
        (parameter,) = work.piece.params
        weight = WeightNumbers(*work.table.numbers[row])
        keys = work.table.keys[row:]
        stochastic = self.by_noise
        low = low_of(state)
        held = exact_weight(p, low)
        g = g.to(torch.float32, copy=True).mul_(weight.scale).view(parameter.shape)
        moments = self._whole(parameter, state)
        update, new = self.update_tensor(g, moments, work.numbers, held.view(parameter.shape))
        x = (held * weight.decay).add_(update.reshape(-1))
        fused(_write_kernel, x, p, low, keys[0], stochastic, compiled=self.compiled)
        for name, key in zip(self.moments, keys[1:], strict=False):
            if name in state:
                self._keep(name, new[name].reshape(-1), state, key if stochastic else None)

    def _keep(self, name, value, state, key):
        """Write fp32 `value` [n] as the moment is held."""
        held = self.held_moment(name, state, key)
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
        """As of Answers; NaN where a sample of the gradient is given and the whole was not announced."""
        return [self._wanted(p, g, pick) for p, g in zip(params, gradients, strict=True)]

    @torch.no_grad()
    def _wanted(self, p, g, pick):
        whole = self._gradient(p, g)
        if whole is None:
            return torch.full_like(g, math.nan, dtype=torch.float32)
        group = self._group(p)
        state = self._settled(p, *self.moments)
        numbers = self.numbers(group, state["step"] + 1)
        held = exact_weight(p.detach(), self.low_part(p))
        update, _ = self.update_tensor(whole.view(p.shape), self._whole(p, state), numbers, held)
        return pick(update - float(group["lr"]) * group["weight_decay"] * held)

    def _gradient(self, p, g):
        """The whole scaled gradient of p, fp32; None where it is not known."""
        if g.numel() == p.numel():
            return g.float()
        if self.announced is None:
            return None
        grads, scale = self.announced
        found = p.grad if grads is None else grads.get(p)
        if found is None:
            return None
        return found.detach().float() * scale_of(scale, p)


def _write_kernel(x, p, low, key, stochastic):
    noise = noise_bits(x.numel(), key)[0] if stochastic else None
    write_weight(x, p, low, noise)


def _moment_kernel(value, held, key):
    noise = None if key is None else noise_bits(value.numel(), key)[0]
    held.copy_(rounded(value, held.dtype, noise))
