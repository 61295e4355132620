"""A net brought to a recipe's dtypes: bf16 weights, islands that stay fp32, buffers. Needs torch alone; copy
it.
"""

import collections
import copy
import dataclasses
import operator
import types

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import fsdp
from .layers.method import roles
from .machine import Refused

# ---- Parts of a net ----------------------------------------------------------------------------------------


def _island_modules(model, islands):
    """Modules that own parameters and stay fp32. Raises Refused when the net has none of a kind that was
    asked for.
    """
    role_of, chosen = roles(model), []
    owners = [(name, m) for name, m in model.named_modules() if _own(m)]
    for island in islands.split("+") if islands != "none" else []:
        wanted = {"norm": "norm", "embed": "embedding", "final": "head"}[island]
        found = [m for name, m in owners if wanted in role_of[name]]
        if not found:
            none = f"this net has no {island} parameters to keep in fp32"
            raise Refused(f"--set islands={islands}: {none}; leave {island} out")
        chosen += [m for m in found if m not in chosen]
    shared = {p for m in chosen for p in _own(m)}  # a tied head is an island with its embedding
    return [m for _, m in owners if m in chosen or shared & set(_own(m))]


def _own(module):
    return list(module.parameters(recurse=False))


def _keeps_statistics(module):
    # one kernel takes the statistics and the weights, in one dtype
    return getattr(module, "running_mean", None) is not None and bool(_own(module))


def narrowed(x, dtype):
    """x in `dtype`, where finite values stay finite: a mask of torch.finfo(torch.float32).min would become
    -inf in bf16, and a softmax over a row of -inf is NaN.
    """
    top = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max > top and x.layout == torch.strided:
        x = torch.where(x.isfinite(), x.clamp(-top, top), x)
    return x.to(dtype)


def _parts(x):
    """({key: value}, set(x, key, value)) of an object that torch's trees take for a leaf, and that may hold
    tensors; (None, None) of any other.
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
    return None, None


def to(dtype, tree, cast=torch.Tensor.to):
    """`tree` with its floating tensors in dtype; itself where they are already, since a net may write into
    what it is given. cast: (tensor, dtype) -> tensor.
    """

    def convert(x):
        if torch.is_tensor(x):
            return cast(x, dtype) if x.is_floating_point() else x
        parts, put = _parts(x)
        new = {key: to(dtype, value, cast) for key, value in (parts or {}).items()}
        changed = {key: value for key, value in new.items() if value is not parts[key]}
        x = copy.copy(x) if changed else x
        for key, value in changed.items():
            put(x, key, value)
        return x

    leaves, form = tree_flatten(tree)
    new = [convert(leaf) for leaf in leaves]
    return tree_unflatten(new, form) if any(a is not b for a, b in zip(new, leaves, strict=True)) else tree


def _into_island(module, args, kwargs):
    return to(torch.float32, (args, kwargs))


def _out_of_island(module, args, out):
    return to(torch.bfloat16, out)


def exact_modules(model, r):
    """(islands, norm layers with running statistics): modules of a net in bf16 whose weights stay fp32."""
    whole = [m for m in model.modules() if _keeps_statistics(m)] if r.buffers == "fp32" else []
    return _island_modules(model, r.islands), whole


class Cast:
    """A model brought to the recipe's dtypes, in place. islands keep fp32 weights and cast at their borders.

    whole: norm layers with running statistics, whose weights stay fp32 with their buffers.
    """

    def __init__(self, model, r):
        self.hooks, self.whole = [], []
        for module in model.modules():  # of an earlier Precision, whose islands these need not be
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [i for i, hook in hooks.items() if hook in (_into_island, _out_of_island)]:
                    del hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
        if not r.low_weights:
            model.float()
            return
        islands, self.whole = exact_modules(model, r)
        exact = {p for m in (*islands, *self.whole) for p in m.parameters(recurse=False)}
        own = {p: torch.float32 if p in exact else torch.bfloat16 for p in model.parameters()}
        own = {p: dtype for p, dtype in own.items() if p.is_floating_point()}
        if any(map(fsdp.is_spread, own)):  # what fully_shard keeps follows Module.to alone, not p.data
            model._apply(lambda t: t.to(own.get(t, t.dtype)))
        else:
            for p, dtype in own.items():
                p.data = p.data.to(dtype)
        for module in model.modules():
            for name, b in module.named_buffers(recurse=False):
                if b.is_floating_point():
                    setattr(module, name, b.to(r.dtype("buffers")))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # its weights are views of one tensor, which the cast replaced
        names = {m: name for name, m in model.named_modules()}
        for module in islands:
            before = module.register_forward_pre_hook(_into_island, with_kwargs=True)
            after = module.register_forward_hook(_out_of_island)
            self.hooks.append((names[module], before.id, after.id))

    def undo(self, net):
        """Take the border casts out of `net`, a copy of the model; other people's hooks stay."""
        for name, before, after in self.hooks:
            module = net.get_submodule(name)
            module._forward_pre_hooks.pop(before, None)
            module._forward_pre_hooks_with_kwargs.pop(before, None)
            module._forward_hooks.pop(after, None)
        return net
