"""Tensors of a step gathered into few flat vectors, and its numbers into two tables.

A `Bucket` holds some parameters and their state. `Rows` says which rows of a tensor are ours: all of them,
but where torch's fully_shard has spread a net over ranks (parts/spread.py).
"""

import dataclasses
import importlib
from typing import NamedTuple

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..errors import Refused
from ..kernels import PLACE_OF_SCALE
from ..rounding import Way
from .groups import SPARSE_GRADIENT

ENTRIES_A_BLOCK = 256  # a multiple of every format's block of codes

# ---- Buckets -----------------------------------------------------------------------------------------------


class Bucket:
    """Tensors of one dtype and device that a kernel sees as one flat vector: a large one as a view, small
    ones copied together. start: by which the noise of its first entry is numbered.

    Of an optimiser it also has moments {name: state.Held}, `low`, what completes the weights, {name: flat
    tensor} of one or none, and its Writing. `begun` says whether there is a state: not of a frozen parameter.
    names, given, places: of the views of the state that parameters have been given.
    """

    SMALL = 1 << 18  # elements; below it the fixed cost of a call outweighs the copies

    def __init__(self, indices, tensors, start):
        self.indices, self.start = indices, start
        self.numel = sum(tensors[i].numel() for i in indices)
        self.params = [tensors[i] for i in indices]
        self.shapes = [t.shape for t in self.params]
        self.dtype = self.params[0].dtype
        self.begun, self.moments, self.low, self.writing = False, {}, {}, None
        self.names, self.given, self.places = (), [], []

    @staticmethod
    def group(tensors, keys, blocks=None):
        """Buckets such that each holds only equal `keys` (hashables); their order and starts depend on shapes
        alone. blocks: of each tensor the entries that stay together, for the Rows of a rank.
        """
        members, filling = [], {}  # [indices of a bucket]; {key: the last of them that has room}
        filled = {}  # {key: elements in that one}
        for i, t in enumerate(tensors):
            n, key = t.numel(), keys[i]
            if n >= Bucket.SMALL:
                members.append([i])
                continue
            if key not in filling or filled[key] + n > Bucket.SMALL:
                filling[key], filled[key] = [], 0
                members.append(filling[key])
            filling[key].append(i)
            filled[key] += n
        buckets, start = [], 0
        for indices in members:
            buckets.append(Bucket(indices, tensors, start))
            start += buckets[-1].numel
        return buckets

    def check(self, name_of, grads):
        """Raises Refused for tensors that no step can take. name_of: parameter -> what it is called."""
        for p, g, shape in zip(self.params, grads, self.local_shapes, strict=True):
            name, own = name_of(p), local_tensor(p)
            g = None if g is None else local_tensor(g)
            if own.shape != shape:
                raise Refused(f"{name} is {list(own.shape)}, and was {list(shape)}: make a new optimiser")
            if g is not None and g.is_sparse:
                raise Refused(SPARSE_GRADIENT)
            if g is not None and g.shape != shape:
                raise Refused(f"{name} is {list(shape)}, and its gradient {list(g.shape)}: give each its own")
            if was_freed(own) or g is not None and was_freed(g):
                raise Refused(f"the storage of {name} or of its gradient was freed: a step needs both")
            reach = 1  # of the dimensions so far
            for stride, size in sorted(zip(own.stride(), shape, strict=True)):
                if size > 1 and stride < reach:
                    raise Refused(f"entries of {name} lie in one place of memory: give it a clone() of them")
                reach += stride * (size - 1)

    @property
    def local_shapes(self):
        """The shapes of our rows."""
        return self.shapes

    def gather(self, tensors):
        """Flat [numel]: a view of a single contiguous tensor, else a copy."""
        return tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)

    gather_gradients = gather

    def scatter(self, flat, tensors):
        """Copy flat [numel] back, unless it is a view."""
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            torch._foreach_copy_(list(tensors), _unflatten_dense_tensors(flat, tensors))

    def views(self, flat, tensors):
        return _unflatten_dense_tensors(flat, tensors)

    def rows(self, size=None):
        """[(first value, last, position, values of that row that come before)]: what one key of noise is for,
        in parts of `size`. Noise is numbered from the position on.
        """
        size = size or max(1, self.numel)
        found = []
        for first in range(0, self.numel, size):
            found.append((first, min(first + size, self.numel), self.start + first, 0))
        return found

    def one_by_one(self):
        """A bucket for each parameter, without a state, with the same noise: that goes by the place alone."""
        found, start = [], self.start
        for p in self.params:
            found.append(Bucket([0], [p], start))
            start += p.numel()
        return found

    # -- state, as checkpoints have it

    def of_each(self):
        """([{moment: state.Held}], [{name in a checkpoint: view}]): the share of each parameter."""
        held = [{} for _ in self.params]
        views = [{} for _ in self.params]
        for name, whole in self.moments.items():
            for i, own in enumerate(whole.split(self)):
                held[i][name] = own
                for suffix, t in own.tensors().items():
                    views[i][name + suffix] = t
        for name, low in self.low.items():
            for own, view in zip(views, self.views(low, self.params), strict=True):
                own[name] = view
        return held, views

    def views_of_codes(self, codes, lengths):
        """Views of codes or scales, one a parameter: in its shape, packed codes and scales flat."""
        if codes.numel() == self.numel:
            return self.views(codes, self.params)
        return codes.split(lengths)

    @property
    def whole(self):
        """How many entries it has, on all ranks together."""
        return self.numel

    def own_rows(self, values):
        """Of the values of a moment those that are ours."""
        return values


class Writing(NamedTuple):
    """How the weights and moments of a bucket are written. exact: by the arithmetic of torch.optim.AdamW,
    which rounds once where it adds a product. keyed: the rounding.Noise of each moment that has a key of its
    own. at_once: entries that are updated at once, None for all.
    """

    way: Way
    exact: bool
    keyed: tuple
    at_once: int | None


@dataclasses.dataclass
class StepTable:
    """The numbers and noise keys of all kernel calls of a step, as one tensor each: on CUDA two copies a
    step, not two a bucket, and none that waits. A key is three words and a fourth, by which rows stay aligned
    to 16 bytes.
    """

    device: torch.device
    numbers: list = dataclasses.field(default_factory=list)
    keys: list = dataclasses.field(default_factory=list)

    def fill(self, scale=1.0):
        """Bring all rows to the device. scale: of gradients, a number or a tensor."""
        if not self.keys:  # a rank that holds no row of any tensor
            self.numbers.append([1.0, 1.0])
            self.keys.append([0, 0, 0, 0])
        numbers = torch.tensor(self.numbers, dtype=torch.float32, device="cpu")
        keys = torch.tensor(self.keys, dtype=torch.int32, device="cpu")
        if self.device.type == "cuda":
            numbers, keys = numbers.pin_memory(), keys.pin_memory()
        numbers, keys = (t.to(self.device, non_blocking=True) for t in (numbers, keys))
        if torch.is_tensor(scale) or scale != 1.0:
            numbers[:, PLACE_OF_SCALE] = scale
        self.numbers, self.keys = numbers.unbind(), keys.unbind()


def scale_of(grad_scale, p):
    """What the gradient of parameter p is multiplied by. grad_scale: of all, or {parameter: of each}."""
    return grad_scale.get(p, 1.0) if isinstance(grad_scale, dict) else grad_scale


# ---- Rows of tensors ---------------------------------------------------------------------------------------


class Rows:
    """Which rows of tensors are ours. These are all; parts/spread.py has those of a rank."""

    buckets = staticmethod(Bucket.group)
    before_step: tuple = ()  # called with all buckets of a step, and grad_of, before the first is written

    def wrap(self, state, optimizer):
        """A state_dict of the optimiser as a checkpoint takes it."""
        return state

    def cut(self, saved, own):
        """A saved state_dict as it is held here; own: () -> the one that is held."""
        return saved


ALL = Rows()


def rows_of(tensors):
    """The Rows of these parameters."""
    if any(map(is_spread, tensors)):
        return importlib.import_module("..parts.spread", __package__).RANK
    return ALL


def is_spread(t):
    """Whether a tensor is a DTensor."""
    return hasattr(t, "device_mesh")


def local_tensor(t):
    """A tensor without its graph; of a DTensor this rank's rows."""
    t = t.detach()
    return t.to_local() if is_spread(t) else t


def was_freed(t):
    """Whether a tensor has entries and no memory for them."""
    return t.numel() and not t.untyped_storage().nbytes()


def whole_alone(name):
    """What is said of an optimiser that takes no part of a tensor."""
    rows = "steps no rows of a tensor, and a rank of fully_shard (--fsdp) has these alone"
    return f"{name} {rows}: use adamw, sgd or lion of ours"
