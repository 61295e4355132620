"""What optimisers share whose update of an entry depends on its whole tensor: Adafactor and Muon.

`ByTensor` gives them the tensor in its shape, and they give back the fp32 update. All writing is that of
`Rounded`: to nearest, stochastically, with Kahan compensation, beside an exact master, in codes. Weight decay
is decoupled (arXiv 1711.05101).
"""

import dataclasses
import math
from typing import NamedTuple

import torch

from .. import kernels
from .buckets import scale_of
from .rounded import Rounded, run_step


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
    """What the write reads of the optimiser: the update is there already."""


def given(g, moments, n):
    """The direction of `rounded.write_step` where the update of the whole tensor is known."""
    return g, ()


kernels.RULES[given] = "given"


class ByTensor(Rounded):
    """An optimiser whose update of an entry depends on its whole tensor: each tensor is a bucket of its own.

    One has `moments`, `shape`, `numbers` and `update_tensor`; see Adafactor.
    """

    announced = None  # (grads, scale) that `announce` told of
    rooms = None  # a Rooms, during a step; release.py updates each tensor by itself
    by_rows = False

    def update_tensor(self, g, moments, numbers, held, room):
        """(direction, rate, new moments) of one tensor, from its gradient g, scaled, and its moments
        {name: tensor}, all fp32 in their shapes. The step is rate * direction; rate is a float or a tensor of
        one. numbers: what `numbers` said, a NamedTuple of float. held: () -> the weight held, fp32. g may be
        written over. room: see Rooms.
        """
        raise NotImplementedError

    # -- state

    def _whole(self, p, moments):
        """{name: fp32 moment of p in its shape}, of those that it keeps."""
        found = {}
        for name, held in moments.items():
            values = held.read(self.compiled).to(p.device)
            found[name] = values.float().view(self.shape(p, name))
        return found

    # -- one step

    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        self.announced, self.rooms = None, Rooms()
        try:
            return super().step(closure, grads=grads, grad_scale=grad_scale)
        finally:
            self.rooms = None

    def _update(self, work, part, p, g):
        piece = work.piece
        if not piece.numel:  # it holds no moments
            return
        (parameter,) = piece.params
        row, keys = work.table.numbers[part.row], work.table.keys[part.row :]
        room = self.rooms or Rooms()
        g = room("gradient", p).copy_(g).mul_(row[kernels.PLACE_OF_SCALE]).view(parameter.shape)

        def held():
            way = piece.writing.way
            whole = room("held", p).copy_(p) if way.name is None else way.held(p, *piece.low.values())
            return whole.view(parameter.shape)

        moments = self._whole(parameter, piece.moments)
        direction, rate, new = self.update_tensor(g, moments, work.numbers, held, room)
        self._write(work, part, p, direction.reshape(-1), rate)
        for name, key in zip(self.moments, keys[1:], strict=False):
            if name in piece.moments:
                value = new[name].reshape(-1)
                piece.moments[name].write(value, key if self.by_noise else None, self.compiled)

    def _write(self, work, part, p, direction, rate):
        """Add rate * direction [n] to the weights p [n], by `rounded.write_step`."""
        row = work.table.numbers[part.row][:2]  # without the optimiser's own numbers
        row[kernels.PLACE_OF_SCALE].fill_(rate)  # which multiplies what is given in place of a gradient
        step = self._step_of(work, part, [p], [direction])
        written = dict(rule=kernels.RULES[given], moments=[], keys=[], numbers=NoNumbers(), row=row)
        run_step(given, dataclasses.replace(step, **written))

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
        numbers = self.numbers(group, self.steps_of(p) + 1)
        held = self.held(p).view(p.shape)
        g = whole.view(p.shape).clone()
        moments = self._whole(p, self._settled(p))
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
