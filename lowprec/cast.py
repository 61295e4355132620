"""A net brought to a recipe's dtypes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import Refused
from .layers import convolutions
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
    parts, put = parts_of_leaf(x)
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


def parts_of_leaf(x):
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
