"""A net called in a recipe's dtypes."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .cast import narrowed, tree_to
from .machine import exact_math
from .module import CastModule


class View:
    """A net called as Recipe r says: floating inputs cast, products in its dtype, floating outputs in the
    loss's dtype.

    A loss that the net forms inside comes back in the loss's dtype too, but a net of bf16 weights that forms
    it from bf16 logits has rounded it by then: see Precision's fp32_outputs. The view holds no optimiser and
    shares nothing with a run but what it is given. keep: names of arguments of forward that are left as they
    are (timesteps have a precision of their own), and keys of a dict that is one. A forward of `*args` has no
    names: pass such an argument by keyword. Integer inputs are left too.
    """

    def __init__(self, net: nn.Module, r, methods: Iterable = (), keep: str | Iterable[str] = ()):
        self.net = net
        self.recipe = r
        self.methods = methods
        self.keep = {keep} if isinstance(keep, str) else set(keep)
        self.forward = net  # a compiled or distributed wrapper may take its place
        self.around: nn.Module | None = None  # the DistributedDataParallel that `module` was last called in
        self.device = next(net.parameters()).device
        base_model: Any = getattr(net, "get_base_model", None)  # PEFT's own forward says *args
        inner = net if base_model is None else base_model()
        self.arguments = _parameter_names(inner.forward)
        self.example = None  # (args, kwargs) of the first call, whose shapes FLOPs are counted on
        # after the first call. In it layers are found that the net gives fp32, and they take it in bf16
        self.settled = not r.low_weights
        self.adapted: list[str] = []
        self.moves_average = False  # whether forward may move an fp32 average towards bf16 weights
        self.tells = False  # whether it says, once, that a call loses something

    @functools.cached_property
    def first_call(self) -> Any:
        """What says so."""
        from .parts.first_call import FirstCall

        return FirstCall(self.net)

    @functools.cached_property
    def module(self) -> CastModule:
        """An nn.Module that is called as this view is, to take the net's place in another module."""
        return CastModule(self)

    @contextmanager
    def context(self):
        """What forward runs in: autocast for 8- and 16-bit products of fp32 weights, TF32 as the recipe says,
        and what the methods ask for.
        """
        r = self.recipe
        with ExitStack() as stack:
            stack.enter_context(self.exact())
            if r.autocasts:
                stack.enter_context(torch.autocast(self.device.type, dtype=r.dtype("compute")))
            for method in self.methods:
                stack.enter_context(method.context())
            if self.moves_average:
                stack.enter_context(MixedLerp())
            yield

    @property
    def parallel(self) -> nn.Module | None:
        """The DistributedDataParallel around the net, or around a module that called `module`, or None."""
        if hasattr(self.forward, "require_backward_grad_sync"):
            return self.forward
        return self.around

    def exact(self) -> AbstractContextManager:
        """A context in which fp32 products on CUDA are fp32, or TF32 where the recipe says so."""
        if self.device.type != "cuda":
            return nullcontext()
        return exact_math(self.recipe.compute == "tf32")

    def cast(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) as the net takes them."""
        return self._cast(self.arguments, args, kwargs)

    def _cast(self, arguments, args, kwargs):
        if not self.recipe.low_weights:
            return args, kwargs
        named = list(zip(_names(arguments, args), args, strict=True))
        if self.tells:
            self.first_call.check_inputs([*named, *kwargs.items()], self.keep)
        low_args = tuple(self._low(name, value) for name, value in named)
        low_kwargs = {}
        for name, value in kwargs.items():
            low_kwargs[name] = self._low(name, value)
        return low_args, low_kwargs

    def _tell_adapted(self):
        if not self.adapted or not self.tells:
            return
        some = tuple(self.adapted[:3])
        names = ", ".join(some)
        if len(self.adapted) > 3:
            names += f" and {len(self.adapted) - 3} more"
        warnings.warn(
            f"{names}: given fp32 by the net, and cast to bf16 for bf16 "
            f"weights; Precision(..., fp32_modules={some}) computes them in fp32",
            stacklevel=5,  # where run(...) is called
        )

    def _low(self, name, value):
        if name in self.keep:
            return value
        if type(value) is dict and self.keep & value.keys():  # a batch, whose keys are names too
            return {key: self._low(key, part) for key, part in value.items()}
        if type(value) is list and any(type(part) is dict for part in value):  # a batch as detectors take it
            return [self._low(name, part) for part in value]
        return tree_to(torch.bfloat16, value, narrowed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns, floating tensors in the loss's dtype. Raises Refused, with the remedy, where
        the net mixes dtypes that it can't.
        """
        return self._called(self.forward, self.arguments, args, kwargs)

    def call(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """What another method of the net returns, called as forward is."""
        return self._called(method, _parameter_names(method), args, kwargs)

    def _called(self, function, arguments, args, kwargs):
        if self.example is None and self.methods and function is self.forward:
            self.example = tree_map(_shape, (args, kwargs))
        args, kwargs = self._cast(arguments, args, kwargs)
        start = None if self.settled else StartOfCall(self)
        while True:
            try:
                with self.context():
                    out = function(*args, **kwargs)
                break
            except (RuntimeError, ValueError, AssertionError) as error:
                from .parts.mixed import adapt, explain

                if start is None or not adapt(error, self):
                    explain(error, self, {**dict(zip(_names(arguments, args), args, strict=True)), **kwargs})
                    raise
            start.restore()
        if not self.settled:
            self.settled = True
            self._tell_adapted()
        if self.tells:
            self.first_call.check_outputs(out)
        return tree_to(self.recipe.dtype("loss"), out)


def _parameter_names(function):
    """The names of a function's parameters; [] where Python does not know them, as of a traced net."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


class StartOfCall:
    """What a call begins with, to begin it anew: random numbers, and tensors that forward may change."""

    def __init__(self, view: View):
        self.rng = torch.get_rng_state()
        self.devices = [view.device] if view.device.type == "cuda" else []
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        tensors = list(view.net.buffers())
        if view.moves_average:
            tensors += [p for p in view.net.parameters() if not p.requires_grad]
        self.held = [(t, t.detach().clone()) for t in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        torch.set_rng_state(self.rng)
        for device, state in zip(self.devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        for t, value in self.held:
            t.copy_(value)


class MixedLerp(TorchFunctionMode):
    """Within it lerp_ takes two dtypes, as mul_ and add_ do: an fp32 average goes towards bf16 weights."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.lerp_:
            average, end, *rest = args
            args = (average, end.to(average.dtype), *rest)
        elif function is torch._foreach_lerp_:
            averages, ends, *rest = args
            ends = [end.to(t.dtype) for t, end in zip(averages, ends, strict=True)]
            args = (averages, ends, *rest)
        return function(*args, **(kwargs or {}))


def _names(arguments, args):
    """A name, or None, for each of the args."""
    nameless = [None] * len(args)  # for a forward of *args
    return [*arguments, *nameless][: len(args)]


def _shape(x):
    return x.detach().to("meta") if torch.is_tensor(x) else x
