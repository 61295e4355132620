"""Checkpoints of any program, read without running code: which tensors are weights, averages and states."""

import dataclasses
import pickle
import re
import warnings
from pathlib import Path

import torch

from ..errors import Refused

AVERAGE = re.compile(r"(^|[._])(ema|shadow|averages?|averaged)([._]|$)|_ema|ema_", re.I)
WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.", "net.")


@dataclasses.dataclass
class Checkpoint:
    """weights, averages: {name: tensor}. states: {name or number of a parameter: its state, a dict}."""

    path: Path
    weights: dict = dataclasses.field(default_factory=dict)
    averages: dict = dataclasses.field(default_factory=dict)
    states: dict = dataclasses.field(default_factory=dict)


def read(path):
    """A Checkpoint of a safetensors file, or of what torch.save wrote. Raises Refused for what is no file of
    tensors.
    """
    path = Path(path)
    if not path.is_file():
        found = "a folder, and not a checkpoint" if path.is_dir() else "no such file"
        raise Refused(f"{path}: {found}; give a .safetensors file or one that torch.save wrote")
    found = Checkpoint(path)
    _sort(_loaded(path), found, "")
    if not (found.weights or found.averages or found.states):
        raise Refused(f"{path} holds no named tensors: it is no state dict")
    return found


def _loaded(path):
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, at sparse tensors
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "allowed global" in str(error) or "Unsupported class" in str(error):
            said = "it holds more than tensors and plain values, and loading it would run code"
            raise Refused(f"{path}: {said}; save its state_dict alone") from error
        raise Refused(f"{path} is no checkpoint, or is cut short") from error
    except Exception as error:  # torch and safetensors raise what they like at broken files
        raise Refused(f"{path} is no checkpoint, or is cut short ({type(error).__name__})") from error


def _sort(tree, found, path):
    """Put the tensors of a nest of dicts and lists where they belong."""
    if isinstance(tree, dict) and isinstance(tree.get("state"), dict) and "param_groups" in tree:
        _sort_states(tree["state"], found, path)
        return
    if isinstance(tree, dict) and "shadow_params" in tree:  # diffusers' EMAModel
        tree = {"ema": list(tree["shadow_params"])}
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        return
    for key, value in children:
        name = f"{path}{key}"
        if not torch.is_tensor(value):
            _sort(value, found, f"{name}.")
        elif path or value.dim() > 0:  # a bare number of the whole checkpoint is a counter
            _check(value, name, found.path)
            side = found.averages if AVERAGE.search(name) else found.weights
            side[name] = value


def _sort_states(states, found, path):
    for key, state in states.items():
        if not isinstance(state, dict):
            continue
        for name, value in state.items():
            if torch.is_tensor(value):
                _check(value, f"{name} of {path}{key}", found.path)
        found.states[f"{path}{key}"] = state


def _check(value, name, path):
    """Refuse a tensor whose values can't be compared."""
    if value.layout != torch.strided:
        raise Refused(f"{path}: {name} is sparse ({value.layout}); save it with to_dense()")
    if value.is_meta:
        raise Refused(f"{path}: {name} is on the meta device and holds no values; save the values")


def pairs(before, after, what, files):
    """[(name, tensor before, tensor after)] of floating tensors. Raises Refused for other names or shapes.

    before, after: {name: tensor}. what: what they are called. files: the two paths.
    """
    one, two = _comparable(before), _comparable(after)
    for name in [*one, *two]:
        for side, path in ((one, files[0]), (two, files[1])):
            if name not in side:
                raise Refused(f"different nets: {path} has no {what} {name}")
        if one[name].shape != two[name].shape:
            shapes = f"{list(one[name].shape)} and {list(two[name].shape)}"
            raise Refused(f"different nets: {name} has the shapes {shapes}")
    return [(name, one[name], two[name]) for name in one]


def _comparable(tensors):
    """Those that hold fractions; numbers of 8 bits as fp32, for they can't be compared as they are."""
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    return {name: t.float() if t.itemsize == 1 else t for name, t in floating.items()}


def weights_of(averages, weights):
    """{name of an average: name of its weight}, by the end of their names."""
    ends = {_end(name): name for name in weights}
    return {name: ends[_end(name)] for name in averages if _end(name) in ends}


def _end(name):
    """A name without what wrappers and averages put before it."""
    if AVERAGE.search(name):
        name = AVERAGE.split(name)[-1]
    for prefix in ("shadow.", *WRAPPERS, *WRAPPERS):
        name = name.removeprefix(prefix)
    return name
