"""The frozen weights of a net: which parts they make up, the dtype of each, and averages among them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from ..cast import castable, casts_for_itself, matching
from ..errors import Refused
from ..rounding import DTYPE_OF_NAME
from .part import Part

# what nets call the average of another of their parts
NAMES_OF_AVERAGES = re.compile(r"(?i)teacher|target|momentum|key_encoder|encoder_key|(^|_)(ema|slow|k)(_|$)")


def frozen_modules(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of those all of whose parameters, their parts' included, are frozen. A bias that trains
    beside a frozen weight makes both a trained module's: one kernel takes them, in one dtype.
    """
    with_trained: set = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            with_trained.update(_prefixes(name))
    found = {}
    for name, module in model.named_modules():
        if name not in with_trained and next(module.parameters(), None) is not None:
            found[name] = module
    return found


def _prefixes(name) -> Iterator[str]:
    """'' , 'a' and 'a.b' of 'a.b.weight'."""
    parts = name.split(".")
    for depth in range(len(parts)):
        yield ".".join(parts[:depth])


def averages_inside(model: nn.Module) -> dict[str, str]:
    """{name of a frozen part: name of the trained part that it is an average of, by all signs}: a teacher, a
    target or a momentum encoder beside its student.

    Both are parts of one module, and not numbered ones. Each tensor of the frozen part has one of the same
    name and shape in the other, and is equal to it, or the part's name tells.
    """
    frozen = frozen_modules(model)
    found = {}
    for name, part in frozen.items():
        parent, _, own_name = name.rpartition(".")
        if not name or parent in frozen or own_name.isdigit():
            continue
        for other_name, other in model.get_submodule(parent).named_children():
            full_name = f"{parent}.{other_name}" if parent else other_name
            if full_name in frozen or other_name.isdigit():
                continue
            if _is_average_of(part, other, own_name):
                found[name] = full_name
                break
    return found


def _is_average_of(frozen, trained, name):
    others = dict(trained.named_parameters())
    tensors = dict(frozen.named_parameters())
    for key, t in tensors.items():
        if key not in others or others[key].shape != t.shape:
            return False
    if NAMES_OF_AVERAGES.search(name):
        return True
    if len(tensors) < 2 or any(t.is_meta for t in tensors.values()):
        return False
    return all(torch.equal(t.float(), others[key].float()) for key, t in tensors.items())


def dtypes_of_frozen(
    model: nn.Module, r, dtypes: Mapping[str, str], averages: Collection[str], kept: bool = True
) -> dict[nn.Module, dict[nn.Parameter, torch.dtype]]:
    """{module that owns frozen parameters: {each of them: its dtype}} of a Recipe; beside trained weights
    theirs. dtypes: {pattern: 'fp32' or 'bf16'} of single ones. averages: names of parts that are averages.
    kept: whether frozen weights are held as the site says; False: as the others. Codes, and the scales beside
    them, stay as they came.
    """
    found = {}
    wider = []
    untrained = frozen_modules(model)
    for name, module in model.named_modules():
        own = {}
        for key, p in module.named_parameters(name, recurse=False):
            if not p.requires_grad:
                own[key] = p
        if not own:
            continue
        dtype = None  # each its own
        if name in untrained and kept:
            dtype = _asked_dtype(name, own, r, dtypes, averages)
        if dtype is None and all(map(castable, own.values())):
            if name not in untrained or not kept:
                dtype = r.dtype("weights")
            elif type(module).__module__.startswith("torch.nn") and not casts_for_itself(module, r):
                # one kernel takes all its weights, in one dtype
                dtype = functools.reduce(torch.promote_types, [p.dtype for p in own.values()])
            if dtype and kept:
                wider += [key for key, p in own.items() if p.itemsize < dtype.itemsize]
        if any(p.is_floating_point() for p in own.values()):
            found[module] = {p: dtype if dtype and castable(p) else p.dtype for p in own.values()}
    if wider:
        more = f" and {len(wider) - 1} more" if len(wider) > 1 else ""
        why = "in fp32, as the weights beside it"
        warnings.warn(f"'{wider[0]}'{more}: frozen, and wider than it came, {why}", stacklevel=6)
    return found


def _asked_dtype(name, own, r, dtypes, averages):
    """The dtype that somebody asked for, of a module's own parameters; None: the one that each came in."""
    for key in own:
        chosen = matching(key, dtypes)
        if chosen:
            return DTYPE_OF_NAME[chosen]
    if r.frozen in ("kept", "nf4"):
        around = {*_prefixes(name), name}  # this module and those that it is a part of
        return torch.float32 if around.intersection(averages) else None
    if not all(map(castable, own.values())):
        return None
    return r.dtype("weights") if r.frozen == "cast" else DTYPE_OF_NAME[r.frozen]


def check_dtype_patterns(model: nn.Module, dtypes: Mapping[str, str]) -> None:
    """Raise Refused for a pattern without a buffer or a frozen weight, and for an unknown dtype."""
    names = [name for name, _ in model.named_buffers()]
    names += [name for name, p in model.named_parameters() if not p.requires_grad]
    for pattern, value in dtypes.items():
        if value not in ("fp32", "bf16"):
            raise Refused(f"dtypes: '{pattern}': {value!r} is unknown; choose fp32 or bf16")
        if not any(matching(name, {pattern: value}) for name in names):
            raise Refused(
                f"dtypes: no buffer and no frozen weight of this net is called '{pattern}'; trained weights "
                "follow the recipe, whose site islands keeps some in fp32"
            )


def warn_of_averages(averages: Mapping[str, str], r) -> None:
    """Say which parts of a net of bf16 weights are taken for averages, and how they are held."""
    for name, source in averages.items():
        held = "it is held in fp32; outside forward move it by lerp_(p.float(), ...)"
        if r.frozen in ("cast", "bf16"):
            held = f"in bf16 (frozen={r.frozen}) it loses small steps; dtypes={{'{name}': 'fp32'}} keeps them"
        warnings.warn(f"'{name}' is frozen, and an average of '{source}' by all signs: {held}", stacklevel=6)


class QuantisedBase(Part):
    """A frozen base in codes of bitsandbytes, which writes what it has beside them into a state_dict and does
    not read it from one.
    """

    def adapt(self, own, saved):
        """`saved`. Raises Refused where its base is not the one held."""
        for name, p in self.run.model.named_parameters():
            if p.requires_grad or not hasattr(p, "quant_state"):
                continue
            beside = {key for key in own if key.startswith(f"{name}.")}
            for key in {name, *beside} & saved.keys():
                if not torch.equal(saved[key], own[key]):
                    raise Refused(f"{key}: the quantised base is not the checkpoint's; build that one first")
        return saved
