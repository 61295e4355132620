"""A net called in a recipe's dtypes: as a View, and as an nn.Module, for nets that sit in another module.

diffusion = GaussianDiffusion(unet)          # a wrapper of yours or another library's
run = Precision(unet, recipe(pure_bf16=True, stochastic=True))
diffusion.model = run.module                 # in the net's place
run.backward(diffusion(x))
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .cast import narrowed, parts_of_leaf, tree_to
from .errors import Refused
from .machine import exact_math

# ---- Calls -------------------------------------------------------------------------------------------------


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
            device = self.device.type
            if r.autocasts:
                stack.enter_context(torch.autocast(device, dtype=r.dtype("compute")))
            elif torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                # the program's own, around this call: the recipe says what is computed in
                stack.enter_context(torch.autocast(device, enabled=False))
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

    def check_forward(self, wrapper: Callable) -> None:
        """Raise Refused for a wrapper of the net that can't be called in its place."""
        dtypes = "BFloat16"
        if self.recipe.low_weights and isinstance(wrapper, DistributedDataParallel):
            dtypes = wrapper._get_ddp_logging_data().get("dtypes", dtypes)
        if "BFloat16" not in dtypes:  # its hooks are on what gathered fp32 gradients: a cast makes that anew
            late = "this DistributedDataParallel was made of fp32 weights, and averages no gradient now"
            raise Refused(f"{late}: make it of run.model after Precision")
        modules = wrapper.modules() if isinstance(wrapper, nn.Module) else ()
        if any(module.__dict__.get("_view") is self for module in modules):
            raise Refused(
                "run.module calls run.forward: give run.forward a wrapper of run.model, or leave it and wrap "
                "run.module where the loss is formed"
            )

    def exact(self) -> AbstractContextManager:
        """A context in which fp32 products on CUDA are fp32, or TF32 where the recipe says so."""
        if self.device.type != "cuda":
            return nullcontext()
        return exact_math(self.recipe.compute == "tf32")

    def cast(self, arguments: list[str], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) as the net takes them. arguments: names of the parameters of what is called."""
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
            self.example = tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
        args, kwargs = self.cast(arguments, args, kwargs)
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


# ---- A module in the net's place ---------------------------------------------------------------------------

# what nn.Module keeps in each module for calls of it: these are the stand-in's own
ATTRIBUTES_OF_CALLS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
# how the names of methods begin whose tensors are no activations
PREFIXES_NOT_CAST = ("_", "save", "load", "set_")


class CastModule(nn.Module):
    """Stands in for the net of a View. Calls of it, and of methods that the net's class defines, such as
    encode(), take and give what the View does: inputs are cast, floating outputs have the loss's dtype.

    All else is the net's own: parameters, buffers, modules and state_dict under the same names, train and
    eval, attributes, read and written. A deepcopy holds a copy of the net and nothing of the run.
    """

    def __init__(self, view):
        super().__init__()
        own = {name: self.__dict__[name] for name in ATTRIBUTES_OF_CALLS}
        self.__dict__.clear()
        self.__dict__.update(own, _view=view)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._view.around = DistributedDataParallel._active_ddp_module
        return self._view(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_view" not in self.__dict__:  # while it is being copied or unpickled
            raise AttributeError(name)
        value = getattr(self._view.net, name)
        if not inspect.ismethod(value) or name.startswith(PREFIXES_NOT_CAST) or hasattr(nn.Module, name):
            return value
        return functools.partial(self._view.call, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise Refused(
                "run.module can't be given another class, as fully_shard gives one: spread or change the net "
                "itself, and make Precision then"
            )
        setattr(self._view.net, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._view.net, name)

    def __deepcopy__(self, memo: dict) -> CastModule:
        view = self._view
        net = copied(view.net, memo)
        return CastModule(type(view)(net, view.recipe, view.methods, view.keep))

    def __repr__(self) -> str:
        return repr(self._view.net)

    # what a class of nets may define in its own way

    def train(self, mode: bool = True) -> CastModule:
        self._view.net.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._view.net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._view.net.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._view.net._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: Any = True) -> Any:
        held = self._view.recipe.dtype("weights")
        if fn(torch.empty(0, dtype=held)).dtype != held:  # of float(), half(), to(dtype)
            raise Refused("run.module can't be cast: the recipe says what its weights are; cast a copy")
        self._view.net._apply(fn, recurse)
        return self


# ---- Copies ------------------------------------------------------------------------------------------------


def copied(net: nn.Module, memo: dict | None = None) -> nn.Module:
    """A copy of a net. What a forward pass has left in its modules, an auxiliary loss or a list of attention
    maps, is detached: torch copies no tensor with a graph. memo: as of copy.deepcopy.
    """
    if isinstance(net, torch.jit.ScriptModule):
        raise Refused(
            "a TorchScript net can't be copied: load run.weights() into the nn.Module that it was made of"
        )
    known = {} if memo is None else memo  # deepcopy takes these for copies that it has made already
    for module in net.modules():
        for t in _with_graph(vars(module)):
            known[id(t)] = t.detach().clone()
    new = copy.deepcopy(net, known)
    for module in net.modules():
        if "forward" in vars(module):  # a function that stands in for the class's own, as a hook's
            vars(known[id(module)])["forward"] = _of_copy(vars(module)["forward"], known)
    return new


def _of_copy(x, known):
    """What x, of a net, is in a copy of it: deepcopy leaves closures as they are. known: {id: its copy}."""
    if isinstance(x, types.MethodType):
        return types.MethodType(x.__func__, _of_copy(x.__self__, known))
    if isinstance(x, functools.partial):
        args = [_of_copy(part, known) for part in x.args]
        new = functools.partial(_of_copy(x.func, known), *args, **x.keywords)
    elif id(x) not in known and isinstance(x, types.FunctionType) and x.__closure__:
        cells = tuple(types.CellType() for _ in x.__closure__)
        new = types.FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
        new.__kwdefaults__ = x.__kwdefaults__
        known[id(x)] = new  # it may close over itself
        for cell, own in zip(cells, x.__closure__, strict=True):
            with suppress(ValueError):  # one that is still empty
                cell.cell_contents = _of_copy(own.cell_contents, known)
    elif id(x) not in known and type(x).__module__.startswith("diffusers.hooks"):  # what functions share
        new = known[id(x)] = copy.copy(x)
        vars(new).update({name: _of_copy(value, known) for name, value in vars(x).items()})
        return new
    else:
        return known.get(id(x), x)
    vars(new).update(vars(x))
    return new


def _with_graph(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree that belong to a graph."""
    for leaf in tree_leaves(tree):
        if torch.is_tensor(leaf):
            if leaf.grad_fn is not None:
                yield leaf
            continue
        parts, _ = parts_of_leaf(leaf)
        for part in parts.values():
            yield from _with_graph(part)
