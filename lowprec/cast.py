"""A net brought to a recipe's dtypes (Cast), and called in them (View)."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import Refused
from .layers import convolutions
from .machine import exact_math
from .optimizers import buckets
from .roles import roles

# ---- Parts of a net ----------------------------------------------------------------------------------------

ROLE_OF_ISLAND = {"norm": "norm", "embed": "embedding", "final": "head"}


def _island_modules(model, islands):
    """Modules that own parameters and stay fp32, of 'none' or 'norm+embed'. Raises Refused when the net has
    none of a kind that was asked for.
    """
    if islands == "none":
        return []
    role_of = roles(model)
    owners = [(name, module) for name, module in model.named_modules() if _own_parameters(module)]
    chosen = set()
    for island in islands.split("+"):
        found = [module for name, module in owners if ROLE_OF_ISLAND[island] in role_of[name]]
        if not found:
            none = f"this net has no {island} parameters to keep in fp32"
            raise Refused(f"--set islands={islands}: {none}; leave {island} out")
        chosen.update(found)
    exact = set()
    for module in chosen:
        exact.update(_own_parameters(module))
    # a tied head is an island with its embedding
    return [module for _, module in owners if exact & set(_own_parameters(module))]


def _own_parameters(module):
    return list(module.parameters(recurse=False))


def _keeps_statistics(module):
    # one kernel takes the statistics and the weights, in one dtype
    return getattr(module, "running_mean", None) is not None and bool(_own_parameters(module))


def exact_modules(model: nn.Module, r) -> tuple[list[nn.Module], list[nn.Module]]:
    """(islands, norm layers with running statistics): modules of a net in bf16 whose weights stay fp32."""
    with_statistics = []
    if r.buffers == "fp32":
        with_statistics = [module for module in model.modules() if _keeps_statistics(module)]
    return _island_modules(model, r.islands), with_statistics


# ---- Trees of tensors --------------------------------------------------------------------------------------


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, where finite values stay finite: a mask of torch.finfo(torch.float32).min would become
    -inf in bf16, and a softmax over a row of -inf is NaN.
    """
    top = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max > top and x.layout == torch.strided:
        x = torch.where(x.isfinite(), x.clamp(-top, top), x)
    return x.to(dtype)


def to(dtype: torch.dtype, tree: Any, cast: Callable = torch.Tensor.to) -> Any:
    """`tree` with its floating tensors in dtype; itself where they are already, since a net may write into
    what it is given. cast: (tensor, dtype) -> tensor.
    """
    leaves, form = tree_flatten(tree)
    new = [_leaf_to(dtype, leaf, cast) for leaf in leaves]
    if all(a is b for a, b in zip(new, leaves, strict=True)):
        return tree
    return tree_unflatten(new, form)


def _leaf_to(dtype, x, cast):
    if torch.is_tensor(x):
        return cast(x, dtype) if x.is_floating_point() else x
    parts, put = _parts_of_leaf(x)
    changed = {}
    for key, value in parts.items():
        new = to(dtype, value, cast)
        if new is not value:
            changed[key] = new
    if not changed:
        return x
    x = copy.copy(x)
    for key, value in changed.items():
        put(x, key, value)
    return x


def _parts_of_leaf(x):
    """({key: value}, put(x, key, value)) of an object that torch's trees take for a leaf, and that may hold
    tensors; ({}, None) of any other.
    """
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
        return {name: getattr(x, name) for name in names}, object.__setattr__
    if isinstance(x, types.SimpleNamespace):
        return dict(vars(x)), setattr
    if isinstance(x, dict | collections.UserDict):
        return dict(x), operator.setitem
    if isinstance(x, list):
        return dict(enumerate(x)), operator.setitem
    return {}, None


# ---- Cast --------------------------------------------------------------------------------------------------


def _into_island(module, args, kwargs):
    return to(torch.float32, (args, kwargs))


def _out_of_island(module, args, out):
    return to(torch.bfloat16, out)


class Cast:
    """A model brought to the dtypes of Recipe r, in place. Islands keep fp32 weights and cast at their
    borders.

    whole: norm layers with running statistics, whose weights stay fp32 with their buffers. Raises Refused for
    an island that the net does not have.
    """

    def __init__(self, model: nn.Module, r):
        self.hooks = []  # (name of an island, ids of its two hooks)
        self.whole: list[nn.Module] = []
        _remove_island_hooks(model)  # of an earlier Precision, whose islands these need not be
        if not r.low_weights:
            model.float()
            return
        islands, self.whole = exact_modules(model, r)
        _cast_parameters(model, (*islands, *self.whole))
        _cast_buffers(model, r.dtype("buffers"))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # its weights are views of one tensor, which the cast replaced
        name_of = {module: name for name, module in model.named_modules()}
        for module in islands:
            before = module.register_forward_pre_hook(_into_island, with_kwargs=True)
            after = module.register_forward_hook(_out_of_island)
            self.hooks.append((name_of[module], before.id, after.id))

    def undo(self, net: nn.Module) -> nn.Module:
        """Take our hooks out of `net`, a copy of the model; other people's stay."""
        for name, before, after in self.hooks:
            module = net.get_submodule(name)
            module._forward_pre_hooks.pop(before, None)
            module._forward_pre_hooks_with_kwargs.pop(before, None)
            module._forward_hooks.pop(after, None)
        convolutions.detach(net)
        return net


def _remove_island_hooks(model):
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [number for number, hook in hooks.items() if hook in (_into_island, _out_of_island)]
            for number in ours:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)


def _cast_parameters(model, whole):
    """fp32 for the parameters of the modules `whole`, bf16 for the other floating ones."""
    exact = set()
    for module in whole:
        exact.update(_own_parameters(module))
    dtype_of = {}
    for p in model.parameters():
        if p.is_floating_point():
            dtype_of[p] = torch.float32 if p in exact else torch.bfloat16
    if any(map(buckets.is_spread, dtype_of)):  # what fully_shard keeps follows Module.to alone, not p.data
        model._apply(lambda t: t.to(dtype_of.get(t, t.dtype)))
        return
    for p, dtype in dtype_of.items():
        p.data = p.data.to(dtype)


def _cast_buffers(model, dtype):
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


# ---- View --------------------------------------------------------------------------------------------------


class View:
    """A net called as Recipe r says: floating inputs cast, products in its dtype, floating outputs in the
    loss's dtype.

    A loss that the net forms inside comes back in the loss's dtype too, but a net of bf16 weights that forms
    it from bf16 logits has rounded it by then: write `logits.float()` there, as transformers does. The view
    holds no optimiser and shares nothing with a run but what it is given. keep: names of arguments of forward
    that are left as they are (timesteps have a precision of their own), and keys of a dict that is one. A
    forward of `*args` has no names: pass such an argument by keyword. Integer inputs are left too.
    """

    def __init__(self, net: nn.Module, r, methods: Iterable = (), keep: str | Iterable[str] = ()):
        self.net = net
        self.recipe = r
        self.methods = methods
        self.keep = {keep} if isinstance(keep, str) else set(keep)
        self.forward = net  # a compiled or distributed wrapper may take its place
        self.device = next(net.parameters()).device
        base_model: Any = getattr(net, "get_base_model", None)  # PEFT's own forward says *args
        inner = net if base_model is None else base_model()
        self.arguments = list(inspect.signature(inner.forward).parameters)

    @contextmanager
    def context(self):
        """What forward runs in: autocast for 8- and 16-bit products of fp32 weights, TF32 as the recipe says,
        and what the methods ask for.
        """
        r = self.recipe
        with ExitStack() as stack:
            stack.enter_context(self.exact())
            if not r.low_weights and r.compute in ("bf16", "fp16", "fp8"):
                stack.enter_context(torch.autocast(self.device.type, dtype=r.dtype("compute")))
            for method in self.methods:
                stack.enter_context(method.context())
            yield

    def exact(self) -> AbstractContextManager:
        """A context in which fp32 products on CUDA are fp32, or TF32 where the recipe says so."""
        if self.device.type != "cuda":
            return nullcontext()
        return exact_math(self.recipe.compute == "tf32")

    def cast(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) as the net takes them."""
        if not self.recipe.low_weights:
            return args, kwargs
        nameless = [None] * len(args)  # for a forward of *args
        names = [*self.arguments, *nameless]
        args = tuple(self._low(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: self._low(name, value) for name, value in kwargs.items()}

    def _low(self, name, value):
        if name in self.keep:
            return value
        if type(value) is dict and self.keep & value.keys():  # a batch, whose keys are names too
            return {key: self._low(key, part) for key, part in value.items()}
        return to(torch.bfloat16, value, narrowed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns, floating tensors in the loss's dtype. Raises Refused, with the remedy, where
        the net mixes dtypes that it can't.
        """
        args, kwargs = self.cast(args, kwargs)
        try:
            with self.context():
                out = self.forward(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            self._explain(error, {**dict(zip(self.arguments, args, strict=False)), **kwargs})
            raise
        return to(self.recipe.dtype("loss"), out)

    def _explain(self, error, arguments):
        """Raises Refused, with the remedy, where an error of torch comes of mixed dtypes."""
        if "DTensor" in str(error) and "mixed" in str(error):
            raise Refused(
                "fully_shard (--fsdp) gathers weights in forward, and this net calls parts apart from it: "
                "train it without --fsdp, or call them in its forward"
            ) from error
        if not self.recipe.low_weights or not MIXED.search(str(error)):
            return
        hints = []
        buffers = [name for name, b in self.net.named_buffers() if b.dtype == torch.float32]
        if buffers and self.recipe.buffers == "fp32":
            hints.append(
                f"an fp32 buffer ({', '.join(buffers[:3])}) may have met bf16 activations; cast it to "
                "x.dtype in forward, or --set buffers=bf16"
            )
        kept = [name for name in sorted(self.keep) if _is_fp32(arguments.get(name))]
        if kept:
            hints.append(
                f"the argument {kept[0]} stays fp32; cast it to x.dtype in forward, or leave it out of "
                "Precision's keep"
            )
        if hints:
            raise Refused(f"{error}: {'; or '.join(hints)}") from error


# how torch says that two tensors of an operation have different dtypes
MIXED = re.compile(r"(?is)bfloat16.*\bfloat(32|tensor)?\b|\bfloat(32|tensor)?\b.*bfloat16|dtype.*equal")


def _is_fp32(x):
    return torch.is_tensor(x) and x.dtype == torch.float32
