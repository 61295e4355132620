"""What optimisers share whose update of an entry depends on its whole tensor: Adafactor and Muon.

`ByTensor` gives them the tensor in its shape, and they give back the fp32 update. All writing is that of
`Rounded`: to nearest, stochastically, with Kahan compensation, beside an exact master, in codes. Weight decay
is decoupled (arXiv 1711.05101).
"""

import math
from typing import NamedTuple

import torch

from ..kernels import choose
from ..kernels.numbers import PLACE_OF_SCALE
from ..rounding import NO_AVERAGE, Noise, exact_weight, key_words
from .buckets import scale_of
from .rounded import Part, Rounded, step_kernel
from .state import low_of


class Rooms:
    """Memory for the tensors between gradient and direction, which the tensors of a step use in turn: at each
    new page of memory a CPU waits longer than for the arithmetic that fills it.
    """

    def __init__(self):
        self.kept = {}

    def __call__(self, name, like, shape=None, dtype=torch.float32):
        """A contiguous tensor with anything in it, as `like` in shape and device. name: two with one name lie
        in one place.
        """
        shape = like.shape if shape is None else shape
        n = math.prod(shape)
        key = name, like.device, dtype
        if key not in self.kept or self.kept[key].numel() < n:
            self.kept[key] = torch.empty(n, dtype=dtype, device=like.device)
        return self.kept[key][:n].view(shape)


class NoNumbers(NamedTuple):
    """What the kernel that writes reads of the optimiser: the direction is there already."""


class ByTensor(Rounded):
    """An optimiser whose update of an entry depends on its whole tensor: each tensor is a bucket of its own.

    One has `moments`, `shape`, `numbers` and `update_tensor`; see Adafactor.
    """

    announced = None  # (grads, scale) that `announce` told of
    rooms = None  # a Rooms, during a step; release.py updates each tensor by itself
    by_rows = False

    def shape(self, p, name):
        """The shape in which a moment of p is held; None for one that it does not keep."""
        return p.shape

    def update_tensor(self, g, moments, numbers, held, room):
        """(direction, rate, new moments) of one tensor, from its gradient g, scaled, and its moments
        {name: tensor}, all fp32 in their shapes. The step is rate * direction; rate is a float or a tensor of
        one. numbers: what `numbers` said, a NamedTuple of float. held: () -> the weight held, fp32. g may be
        written over. room: see Rooms.
        """
        raise NotImplementedError

    @staticmethod
    @choose.hand_written("given")
    def direction(g, moments, n):
        """Of the kernel that writes, which is given the direction of the whole tensor as its gradient."""
        return g, ()

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
        self.announced, self.rooms = None, Rooms()
        try:
            return super().step(closure, grads=grads, grad_scale=grad_scale)
        finally:
            self.rooms = None

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
        numbers, keys = work.table.numbers[row], work.table.keys[row:]
        low = low_of(state)
        room = self.rooms or Rooms()
        g = room("gradient", p).copy_(g).mul_(numbers[PLACE_OF_SCALE]).view(parameter.shape)
        moments = self._whole(parameter, state)

        def held():
            whole = room("held", p).copy_(p) if low is None else exact_weight(p, low)
            return whole.view(parameter.shape)

        direction, rate, new = self.update_tensor(g, moments, work.numbers, held, room)
        # from here on the direction is the gradient, and it is to be scaled so
        numbers[PLACE_OF_SCALE].fill_(rate)
        choose.step(
            choose.Step(
                direction=self.direction,
                kernel=step_kernel(self.direction, NoNumbers),
                weights=[p],
                gradients=[direction.reshape(-1)],
                moments=[],
                low=low,
                numbers=NoNumbers(),
                row=numbers,
                key=keys[0],
                stochastic=self.by_noise,
                average=NO_AVERAGE,
                compiled=self.compiled,
            )
        )
        for name, key in zip(self.moments, keys[1:], strict=False):
            if name in state:
                self._keep(name, new[name].reshape(-1), state, key if self.by_noise else None)

    def _keep(self, name, value, state, key):
        """Write fp32 `value` [n] as the moment is held."""
        held = self.held_moment(name, state, key)
        if choose.is_coded(held):
            held.encode(value, self.compiled)
            return
        choose.write(value, held.view(-1), key, self.compiled)

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
        g = whole.view(p.shape).clone()
        moments = self._whole(p, state)
        direction, rate, _ = self.update_tensor(g, moments, numbers, lambda: held, Rooms())
        return pick(rate * direction - float(group["lr"]) * group["weight_decay"] * held)

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
