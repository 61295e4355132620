"""The frozen weights of a net: which parts they make up, the dtype of each, and averages among them."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from .errors import Refused
from .rounding import DTYPE_OF_NAME

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
    model: nn.Module, r, dtypes: Mapping[str, str], averages: Collection[str]
) -> dict[nn.Module, torch.dtype]:
    """{module that owns frozen parameters: their dtype} of a Recipe, modules beside trained weights left out.
    dtypes: {pattern: 'fp32' or 'bf16'} of single ones. averages: names of parts that are averages.
    """
    found = {}
    for name, module in frozen_modules(model).items():
        own = {}
        for key, p in module.named_parameters(name, recurse=False):
            if p.is_floating_point():
                own[key] = p
        if not own:
            continue
        chosen = None
        for key in own:
            chosen = chosen or matching(key, dtypes)
        around = {*_prefixes(name), name}  # this module and those that it is a part of
        if chosen:
            found[module] = DTYPE_OF_NAME[chosen]
        elif r.frozen == "cast":
            found[module] = r.dtype("weights")
        elif r.frozen not in ("kept", "nf4"):
            found[module] = DTYPE_OF_NAME[r.frozen]
        elif around.intersection(averages):
            found[module] = torch.float32
        else:
            found[module] = next(iter(own.values())).dtype
    return found


def matching(name: str, dtypes: Mapping[str, str]) -> str | None:
    """The value of the first pattern that a tensor's name matches, or that a part it is in matches."""
    for pattern, value in dtypes.items():
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*"):
            return value
    return None


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
        warnings.warn(f"'{name}' is frozen, and an average of '{source}' by all signs: {held}", stacklevel=4)
