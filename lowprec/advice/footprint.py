"""What a training step takes of memory, worked out without taking it.

    held_by_gpu(net, recipe, world)              bytes of weights, gradients, states and average on a GPU
    demand(net, loss, recipe, batch)             most bytes of gradients and activations within a step

Both work on copies of the net without values: `held_by_gpu` on torch's meta device, `demand` on fake tensors,
which have shapes, dtypes and a device, and no memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..cast import Cast
from ..errors import Refused, in_one_line
from ..kernels import cpu_products
from ..layers.flops import without_values
from ..parts.activations import recompute, recomputed_blocks
from ..parts.ranks import gathered_at_once, held_by_rank
from ..precision import Precision
from ..view import View


class Held(NamedTuple):
    """Bytes on one GPU between two steps, gradients included. `gathered`: of whole blocks, which a GPU has
    for a moment where the net is spread over several.
    """

    weights: float
    gradients: float
    states: float
    average: float
    gathered: float

    @property
    def total(self) -> float:
        return sum(self)


# ---- Between two steps -------------------------------------------------------------------------------------


def held_by_gpu(net: nn.Module, recipe, world: int = 1, average: bool = True, **options: Any) -> Held:
    """What the first of `world` GPUs holds of a run in a recipe, its rows spread as by --fsdp. average: with
    a moving average of the weights. options: of Precision.
    """
    ema_decay = 0.999 if average else None
    run = Precision(without_values(net, "meta"), recipe, ema_decay=ema_decay, **options)
    parts = held_by_rank(run, world)
    gathered = 0
    if world > 1:
        gathered = gathered_at_once(run, recomputed_blocks(run.model))
    weights = parts["weights"] + _bytes_not_trained(run)
    return Held(weights, parts["grads"], parts["states"], parts["average"], gathered)


def _bytes_not_trained(run):
    """Bytes of buffers and of weights that are not trained. Each GPU has all of them."""
    trained = set(run.params)
    rest = [p for p in run.model.parameters() if p not in trained]
    return sum(t.nbytes for t in [*rest, *run.model.buffers()])


# ---- Within a step -----------------------------------------------------------------------------------------


class Demand(NamedTuple):
    """The most bytes at once within a step on `batch` examples: `most` of gradients and activations together,
    `activations` of these alone, of which `casts` are copies of weights in another dtype, which autocast
    keeps, at that moment.
    """

    batch: int
    most: float
    activations: float
    casts: int

    @property
    def each(self) -> float:
        """Bytes that one more example takes. Activations grow evenly with the batch, casts do not."""
        return max(1, self.activations - self.casts) / self.batch

    def of(self, batch: int) -> Demand:
        """The same of another batch."""
        more = (batch - self.batch) * self.each
        return Demand(batch, self.most + more, self.activations + more, self.casts)


class StepMeter(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered. A memory counts from its first tensor to
    its last.

    weights: the tensors of the net, whose memory does not count. in_fp32: whether 16-bit products are taken
    as kernels/cpu_products.py does it, with copies of all that enters and leaves. `most` and `activations`
    and `casts` are those of Demand; `gradient` is to be called for each weight that has got its gradient.
    """

    def __init__(self, weights, in_fp32=False):
        super().__init__()
        self._in_fp32 = in_fp32
        self.most = self.activations = self.casts = 0
        self._now = self._gradients = self._casts_now = 0
        self._weights = list(weights)  # else one's memory could be freed, and its place be another's
        self._of_weights = weakref.WeakSet(t.untyped_storage() for t in self._weights)
        self._seen = weakref.WeakSet(self._of_weights)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        is_copy = function is torch.ops.aten._to_copy.default
        is_cast = is_copy and args[0].untyped_storage() in self._of_weights
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                self._count(tensor, is_cast)
        if self._in_fp32 and cpu_products.is_replaced(function, args):
            self._look(cpu_products.bytes_of_copies(args, out))
        return out

    def gradient(self, weight):
        """A hook: the gradient of a weight is no activation."""
        self._gradients += weight.grad.untyped_storage().nbytes()

    def _count(self, tensor, is_cast):
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        of_cast = size if is_cast else 0
        self._now += size
        self._casts_now += of_cast
        self._look()
        weakref.finalize(storage, self._freed, size, of_cast)

    def _look(self, passing=0):
        """passing: bytes that are there at this moment and belong to no tensor that is counted."""
        now = self._now + passing
        self.most = max(self.most, now)
        if now - self._gradients > self.activations:
            self.activations = now - self._gradients
            self.casts = self._casts_now

    def _freed(self, size, of_cast):
        self._now -= size
        self._casts_now -= of_cast


# what autocast computes in fp32 on a GPU and in 16 bits on a CPU, of what nets are made of
# (https://docs.pytorch.org/docs/stable/amp.html has both lists whole)
FP32_ON_GPU = "group_norm layer_norm softmax log_softmax softmin softplus exp log pow".split()
FP32_ON_GPU += "rsqrt reciprocal norm sum prod cumsum".split()


class AutocastOfGPU(TorchFunctionMode):
    """Fake tensors lie on a CPU; within this, its autocast keeps in fp32 what a GPU's does.

    What a GroupNorm returns, and a U-Net keeps for the backward pass, takes twice the bytes so.
    """

    WIDENED = {vars(place)[name] for place in (torch, F) for name in FP32_ON_GPU if name in vars(place)}
    WIDENED |= {getattr(torch.Tensor, name) for name in FP32_ON_GPU if hasattr(torch.Tensor, name)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in self.WIDENED or not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        args, kwargs = tree_map(_floats_in_fp32, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)


def _floats_in_fp32(value):
    is_low = torch.is_tensor(value) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_low else value


@contextlib.contextmanager
def _without_tracebacks():
    """torch prints that of an error in a net on fake tensors, which `demand` turns into a line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def _check_time(until, module, args):
    if time.thread_time() > until and torch._C._current_graph_task_id() == -1:
        raise Refused("a pass over shapes takes too long here; fewer tokens (--seq) make it shorter")


def demand(
    net: nn.Module,
    loss: Callable,
    recipe,
    batch: int,
    in_fp32: bool = False,
    on_gpu: bool = False,
    lora: int = 0,
    recomputes: bool = False,
    until: float = math.inf,
) -> Demand:
    """The Demand of a step of a net in a recipe. in_fp32: as of StepMeter. on_gpu: autocast as on a GPU.
    lora: rank of adapters, 0 for none. recomputes: whether each block keeps its inputs alone. until: the
    time, as time.thread_time tells it, at which to give up the forward pass.

    loss(model, n): the loss, a scalar, of a callable model on n examples that it makes itself. Products are
    those that torch takes on a CPU; FP8 counts as bf16. Raises Refused where the net can't be called without
    values, as where it reads a number out of a tensor, and behind `until`.
    """
    rules = AutocastOfGPU() if on_gpu else contextlib.nullcontext()
    shapes = without_values(net, "meta")
    if lora:
        shapes = Precision(shapes, recipe, ema_decay=None, lora=lora).model
    else:
        Cast(shapes, recipe)
    # inputs that are not fake: those of a loss, which are not counted
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with in_one_line("the net can't be called without values:"), fakes, _without_tracebacks():
        fake = without_values(shapes, "cpu")
        if recomputes:
            recompute(fake)
        for module in fake.modules():  # not in an operation: an error there can end the process
            module.register_forward_pre_hook(functools.partial(_check_time, until))
        with StepMeter([*fake.parameters(), *fake.buffers()], in_fp32) as meter:
            for p in fake.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(meter.gradient)
            with rules:
                value = loss(View(fake, recipe, keep=("t", "timestep", "timesteps")), batch)
            value.backward()
    return Demand(batch, meter.most, meter.activations, meter.casts)
