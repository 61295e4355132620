"""A net brought to a recipe's dtypes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import fnmatch
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import Refused
from .optimizers import buckets
from .roles import CONVOLUTIONS, roles
from .rounding import DTYPE_OF_NAME

# ---- Parts of a net ----------------------------------------------------------------------------------------

ROLE_OF_ISLAND = {"norm": "norm", "embed": "embedding", "final": "head"}


def _island_modules(model, islands):
    """Modules that own parameters and stay fp32, of 'norm+embed', say. Raises Refused when the net has none
    of a kind that was asked for.
    """
    role_of = roles(model)
    owners = []
    for name, module in model.named_modules():
        if _own_parameters(module):
            owners.append((name, module))
    chosen = set()
    for island in islands.split("+"):
        role = ROLE_OF_ISLAND[island]
        found = [module for name, module in owners if role in role_of[name]]
        if not found:
            none = f"this net has no {island} parameters to keep in fp32"
            raise Refused(f"--set islands={islands}: {none}; leave {island} out")
        chosen.update(found)
    exact = set()
    for module in chosen:
        exact.update(_own_parameters(module))
    with_exact = []  # a tied head is an island with its embedding
    for _, module in owners:
        if exact.intersection(_own_parameters(module)):
            with_exact.append(module)
    return with_exact


def _own_parameters(module):
    return list(module.parameters(recurse=False))


def _keeps_statistics(module):
    # one kernel takes the statistics and the weights, in one dtype
    return getattr(module, "running_mean", None) is not None and bool(_own_parameters(module))


def exact_modules(
    model: nn.Module, r, dtypes: Mapping[str, str] | None = None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """(islands, norm layers with running statistics): modules of a net in bf16 whose weights stay fp32, but
    for frozen norms that `dtypes` names, {pattern: dtype}.
    """
    islands = _island_modules(model, r.islands) if r.islands != "none" else []
    named = _named_modules(model, dtypes) if dtypes else ()
    with_statistics = []
    if r.buffers == "fp32":
        for module in model.modules():
            if _keeps_statistics(module) and module not in named:
                with_statistics.append(module)
    return islands, with_statistics


def _named_modules(model, dtypes):
    """The frozen modules one of whose own weights matches a pattern."""
    from .parts.frozen import frozen_modules

    found = set()
    for name, module in frozen_modules(model).items():
        if any(matching(key, dtypes) for key, _ in module.named_parameters(name, recurse=False)):
            found.add(module)
    return found


# ---- What is cast ------------------------------------------------------------------------------------------

CAST_SINCE = (
    "the net was cast after Precision was made, by float(), half() or load_state_dict(assign=True) say: cast "
    "a copy, or take another recipe"
)


def castable(t: torch.Tensor) -> bool:
    """Whether a tensor holds plain numbers. Those of 8 bits that nobody trains are codes, which only their
    module can read.
    """
    return t.is_floating_point() and (t.itemsize > 1 or t.requires_grad)


def casts_for_itself(module: nn.Module, r) -> bool:
    """Whether autocast casts what this layer multiplies."""
    return r.autocasts and isinstance(module, nn.Linear | CONVOLUTIONS)


def matching(name: str, dtypes: Mapping[str, str]) -> str | None:
    """The value of the first pattern that a tensor's name matches, or that a part it is in matches."""
    for pattern, value in dtypes.items():
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*"):
            return value
    return None


# ---- Trees of tensors --------------------------------------------------------------------------------------


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, where finite values stay finite: a mask of torch.finfo(torch.float32).min would become
    -inf in bf16, and a softmax over a row of -inf is NaN.
    """
    top = torch.finfo(dtype).max
    has_values = x.layout == torch.strided and not x.is_meta
    if has_values and torch.finfo(x.dtype).max > top:
        x = torch.where(x.isfinite(), x.clamp(-top, top), x)
    return x.to(dtype)


def tree_to(dtype: torch.dtype, tree: Any, cast: Callable = torch.Tensor.to) -> Any:
    """`tree` with its floating tensors in dtype; itself where they are already, since a net may write into
    what it is given. cast: (tensor, dtype) -> tensor.
    """
    leaves, form = tree_flatten(tree)
    found = []
    changed = False
    for leaf in leaves:
        new = _leaf_to(dtype, leaf, cast)
        found.append(new)
        if new is not leaf:
            changed = True
    if not changed:
        return tree
    return tree_unflatten(found, form)


def _leaf_to(dtype, x, cast):
    if torch.is_tensor(x):
        if not x.is_floating_point():
            return x
        return cast(x, dtype)
    parts, put = parts_of_leaf(x)
    changed = {}
    for key, value in parts.items():
        new = tree_to(dtype, value, cast)
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
        parts = {}
        for field in dataclasses.fields(x):
            if hasattr(x, field.name):
                parts[field.name] = getattr(x, field.name)
        return parts, object.__setattr__
    if isinstance(x, types.SimpleNamespace):
        return dict(vars(x)), setattr
    if isinstance(x, dict | collections.UserDict):
        return dict(x), operator.setitem
    if isinstance(x, list):
        return dict(enumerate(x)), operator.setitem
    homes = [base.__module__ for base in type(x).__mro__]
    if any(home.startswith("torch_geometric.data") for home in homes):  # a batch of graphs
        return _parts_of_graphs(x)
    if hasattr(x, "__dict__") and not isinstance(x, type | nn.Module) and not homes[0].startswith("torch."):
        tensors = {}
        for name, value in vars(x).items():
            if torch.is_tensor(value):
                tensors[name] = value
        return tensors, setattr
    return {}, None


def _parts_of_graphs(x):
    parts = {}
    for number, store in enumerate(getattr(x, "stores", ())):
        for key, value in store.items():
            parts[number, key] = value

    def put(x, place, value):
        number, key = place
        x.stores[number][key] = value

    return parts, put


# ---- Borders -----------------------------------------------------------------------------------------------


class Border:
    """A hook that a run has put on a module of its net: `without_borders` takes it away."""


@dataclasses.dataclass(frozen=True)
class Into(Border):
    """A hook before forward: floating inputs in a dtype."""

    dtype: torch.dtype

    def __call__(self, module, args, kwargs):
        return tree_to(self.dtype, (args, kwargs))


@dataclasses.dataclass(frozen=True)
class OutOf(Border):
    """A hook after forward: floating outputs in a dtype, but for a scalar in fp32, a loss formed within."""

    dtype: torch.dtype

    def __call__(self, module, args, out):
        widens = self.dtype == torch.float32
        return tree_to(self.dtype, out, lambda x, dtype: x.to(dtype) if widens or x.dim() else x)


@dataclasses.dataclass(frozen=True)
class AsGiven(Border):
    """A hook after forward: outputs in the dtype of an input of the same shape. A module with fp32 buffers
    alone, a norm with frozen statistics or a codebook, gives back bf16 for bf16.
    """

    def __call__(self, module, args, kwargs, out):
        inputs = tree_flatten((args, kwargs))[0]
        low_shapes = {x.shape for x in inputs if torch.is_tensor(x) and x.dtype == torch.bfloat16}
        if not low_shapes:
            return out

        def as_given(x, dtype):
            return x.to(dtype) if x.dim() and x.shape in low_shapes else x

        return tree_to(torch.bfloat16, out, as_given)


def without_borders(net: nn.Module) -> nn.Module:
    """A net, in which no run's border casts are left; other people's hooks stay."""
    for module in net.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(hook, Border):
                    del hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
                    module._forward_hooks_with_kwargs.pop(number, None)
    return net


# ---- Cast --------------------------------------------------------------------------------------------------


class Cast:
    """A model brought to the dtypes of Recipe r, in place. Islands keep fp32 weights and cast at their
    borders, and so do frozen parts in a dtype of their own.

    whole: norm layers with running statistics, whose weights stay fp32 with their buffers. averages: {frozen
    part: the trained part of which it is an average}. options: precision.Options, which names single modules
    and tensors, or None. frozen: whether frozen weights are held as the site says; False: as the others.
    Raises Refused for an island that the net does not have, and for a name or pattern of nothing.
    """

    def __init__(self, model: nn.Module, r, options: Any = None, frozen: bool = True):
        self.dtypes = dict(getattr(options, "dtypes", None) or {})
        fp32_outputs: list[nn.Module] = []
        for pattern in getattr(options, "fp32_outputs", ()):
            fp32_outputs += _modules_called(model, "fp32_outputs", pattern)
        by_name: list[nn.Module] = []
        for pattern in getattr(options, "fp32_modules", ()) if r.low_weights else ():
            by_name += _modules_called(model, "fp32_modules", pattern)
        within: set[nn.Module] = set()
        for module in by_name:
            within.update(module.modules())
        self.whole: list[nn.Module] = []
        self.dtypes_of_frozen: dict[nn.Module, dict[nn.Parameter, torch.dtype]] = {}
        self.averages: dict[str, str] = {}
        without_borders(model)  # of an earlier Precision, whose islands these need not be
        if self.dtypes:
            from .parts.frozen import check_dtype_patterns

            check_dtype_patterns(model, self.dtypes)
        islands, with_statistics = exact_modules(model, r, self.dtypes)
        if r.low_weights:
            self.whole = with_statistics
        exact = {*islands, *self.whole, *within}
        untrained = [p for p in model.parameters() if not p.requires_grad]
        if untrained and not any(map(buckets.is_spread, model.parameters())):
            self._find_frozen(model, r, {*exact, *with_statistics}, frozen)

        dtype_of = dict.fromkeys(model.parameters(), r.dtype("weights"))
        for held in self.dtypes_of_frozen.values():
            dtype_of.update(held)
        for module in exact:
            dtype_of.update(dict.fromkeys(_own_parameters(module), torch.float32))
        for name, module in model.named_modules():
            for full_name, buffer in module.named_buffers(name, recurse=False):
                chosen = matching(full_name, self.dtypes)
                dtype_of[buffer] = self._dtype_of_buffers(module, r, exact)
                if chosen:
                    dtype_of[buffer] = DTYPE_OF_NAME[chosen]
        beside = None if r.low_weights else torch.float32
        # as Module.to does: what fully_shard and others keep beside parameters follows
        model._apply(lambda t: t.to(dtype_of.get(t, beside) or t.dtype) if castable(t) else t)
        self._borders(model, r, [*islands, *by_name], within - set(by_name), fp32_outputs)

    def _find_frozen(self, model, r, exact, kept):
        """The frozen modules whose dtypes are not that of the trained weights."""
        from .parts.frozen import averages_inside, dtypes_of_frozen, warn_of_averages

        self.averages = averages_inside(model) if kept else {}
        if r.low_weights:
            warn_of_averages(self.averages, r)
        for module, held in dtypes_of_frozen(model, r, self.dtypes, self.averages, kept).items():
            if set(held.values()) != {r.dtype("weights")} and module not in exact:
                self.dtypes_of_frozen[module] = held

    def _dtype_of_buffers(self, module, r, exact):
        """That of a module's own buffers; None where each stays as it came."""
        if not r.low_weights or (module in exact and _keeps_statistics(module)):
            return torch.float32  # as its weights
        held = self.dtypes_of_frozen.get(module)
        return only_dtype(held) if held else r.dtype("buffers")

    def _borders(self, model, r, islands, within, fp32_outputs):
        """Hooks that cast. within: modules in one that is fp32 as a whole, which need none."""
        weights = r.dtype("weights")
        around = dict.fromkeys(islands, torch.float32)
        for module, held in self.dtypes_of_frozen.items():
            trains = any(p.requires_grad for p in module.parameters())
            if not trains and not (casts_for_itself(module, r) and all(map(castable, held))):
                around[module] = only_dtype(held) or r.dtype("compute" if r.autocasts else "weights")
        has_fp32_buffers = any(b.dtype == torch.float32 for b in model.buffers())
        if r.low_weights and r.buffers == "fp32" and has_fp32_buffers:
            around.update(dict.fromkeys(_parametrizations(model), torch.float32))
            for module in _with_buffers_alone(model):
                if module not in around:
                    module.register_forward_hook(AsGiven(), with_kwargs=True)
        for module in within:
            around.pop(module, None)
        for module, dtype in around.items():
            module.register_forward_pre_hook(Into(dtype), with_kwargs=True)
        outputs = {**dict.fromkeys(around, weights), **dict.fromkeys(fp32_outputs, torch.float32)}
        for module, dtype in outputs.items():
            module.register_forward_hook(OutOf(dtype))


def _modules_called(model, option, pattern):
    """The modules whose names match a pattern of an option. Raises Refused where there are none."""
    found = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise Refused(f"{option}: no module of this net is called '{pattern}'")
    return found


def _parametrizations(model):
    """Modules that compute a weight with buffers of their own, as spectral_norm does."""
    found = []
    for module in model.modules():
        if not isinstance(module, nn.utils.parametrize.ParametrizationList):
            continue
        for part in module.children():
            if _fp32_buffers(part):
                found.append(part)
    return found


def _with_buffers_alone(model):
    """Modules with fp32 buffers and no parameters."""
    found = []
    for module in model.modules():
        has_parameters = next(module.parameters(), None) is not None
        if _fp32_buffers(module) and not has_parameters:
            found.append(module)
    return found


def _fp32_buffers(module):
    return [b for b in module.buffers(recurse=False) if b.dtype == torch.float32]


def only_dtype(held):
    """The dtype of all of {parameter: its dtype}; None where there are several, or codes."""
    return next(iter(held.values())) if len(set(held.values())) == 1 and all(map(castable, held)) else None
