"""Checkpoints of any program, read without running code: which tensors are weights, averages and states."""

import dataclasses
import math
import re
from pathlib import Path

import torch

from ..errors import Refused
from .files import loaded

NAME_OF_AVERAGE = re.compile(r"(^|[._])(ema\d*|shadow|averages?|averaged)([._]|$)", re.I)
BESIDE_WEIGHTS = ("callbacks", "loops", "lr_schedulers", "hyper_parameters", "datamodule_hyper_parameters")
PREFIXES_OF_WRAPPERS = ("precision.", "module.", "_orig_mod.", "model.", "state_dict.", "net.")


@dataclasses.dataclass
class Checkpoint:
    """weights, averages: {name: tensor}. states: {name or number of a parameter: its state, a dict}.
    has_optimizer: whether it holds an optimiser, with states or without. groups: {key of a state: the options
    of its parameter group}. stochastic: the keys of those states
    that are rounded stochastically, by an optimiser of ours. step: what it says of itself, or 0.
    """

    path: Path
    weights: dict = dataclasses.field(default_factory=dict)
    averages: dict = dataclasses.field(default_factory=dict)
    states: dict = dataclasses.field(default_factory=dict)
    has_optimizer: bool = False
    groups: dict = dataclasses.field(default_factory=dict)
    stochastic: set = dataclasses.field(default_factory=set)
    step: int = 0


def read_checkpoint(path):
    """A Checkpoint of a file or a folder, see files.loaded. Raises Refused for what is no file of tensors."""
    path = Path(path)
    found = Checkpoint(path)
    tree = loaded(path)
    _sort(tree, found, "")
    if isinstance(tree, dict) and isinstance(tree.get("step"), int):
        found.step = tree["step"]
    if not (found.weights or found.averages or found.states):
        raise Refused(f"{path} holds no named tensors: it is no state dict")
    return found


def _sort(tree, found, path):
    """Put the tensors of a nest of dicts and lists where they belong."""
    if isinstance(tree, dict) and isinstance(tree.get("state"), dict) and "param_groups" in tree:
        _sort_states(tree, found, path)
        _sort(tree.get("parts"), found, f"{path}parts.")  # several optimisers of ours in one
        return
    if isinstance(tree, dict) and "shadow_params" in tree:  # diffusers' EMAModel
        tree = {"ema": list(tree["shadow_params"])}
    if isinstance(tree, dict) and not path and "state_dict" in tree:  # Lightning's counts are no weights
        tree = {key: value for key, value in tree.items() if key not in BESIDE_WEIGHTS}
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        return
    for key, value in children:
        name = f"{path}{key}" if key != "" else path.removesuffix(".")
        if not torch.is_tensor(value):
            _sort(value, found, f"{name}." if name else "")
        elif path or value.dim() > 0:  # a bare number of the whole checkpoint is a counter
            _refuse_incomparable(value, name, found.path)
            if NAME_OF_AVERAGE.search(name):
                found.averages[name] = value
            else:
                found.weights[name] = value


def _sort_states(optimizer, found, path):
    """Put the states of an optimiser's state_dict where they belong."""
    found.has_optimizer = True
    for key, state in optimizer["state"].items():
        if not isinstance(state, dict):
            continue
        for name, value in state.items():
            if torch.is_tensor(value):
                _refuse_incomparable(value, f"{name} of {path}{key}", found.path)
        name = bare_name(f"{path}{key}")
        found.states[name] = decoded(state)
        if optimizer.get("rounded") == "stochastic":
            found.stochastic.add(name)
    for group in _values(optimizer["param_groups"]):
        for key in _values(group["params"] or ()):  # numbers are left out there
            found.groups[bare_name(f"{path}{key}")] = group


def _values(several):
    """Those of a list, which torch.distributed.checkpoint keeps as a dict."""
    return several.values() if isinstance(several, dict) else several


def decoded(state):
    """A state whose moments of 8 and 4 bits, as torchao and bitsandbytes keep them, are fp32."""
    state = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
    found = {}
    for name, value in state.items():
        codes = getattr(value, "codes", None)
        if torch.is_tensor(codes):
            value = _of_torchao(value, codes)
        found[name] = value
    # bitsandbytes: a moment of 8 bits, or a plain one of a small tensor
    for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        held = state.get(f"state{number}")
        if torch.is_tensor(held):
            found[name] = _of_bitsandbytes(held, state, number)
    return found


def _of_torchao(value, codes):
    qmap = getattr(value, "qmap", None)
    if qmap is None:  # FP8
        return (codes.float().view(-1, value.block_size) * value.scale.view(-1, 1)).view(codes.shape)
    shape = codes.shape
    if hasattr(value, "_shape"):  # two codes of 4 bits in a byte
        shape = value._shape
        codes = torch.stack([codes >> 4, codes & 15], -1)
    return (qmap[codes.int()].view(-1, value.block_size) * value.scale.view(-1, 1)).view(shape)


def _of_bitsandbytes(codes, state, number):
    if codes.dtype != torch.uint8:
        return codes
    values = state[f"qmap{number}"][codes.int()].flatten()
    scales = state[f"absmax{number}"]
    size = 2 ** math.ceil(math.log2(values.numel() / scales.numel()))  # of a block; the last one may be short
    return (values * scales.repeat_interleave(size)[: values.numel()]).view(codes.shape)


def _refuse_incomparable(value, name, path):
    """Refuse a tensor whose values can't be compared."""
    if value.layout != torch.strided or value.is_meta:
        kind = "on the meta device" if value.is_meta else f"sparse ({value.layout})"
        raise Refused(f"{path}: {name} is {kind}: it can't be compared; save its values, with to_dense()")


def paired_tensors(before, after, what, files):
    """[(name, tensor before, tensor after)] of floating tensors. Raises Refused for other names or shapes.

    before, after: {name: tensor}. what: what they are called. files: the two paths.
    """
    one, two = _alike(_comparable(before), _comparable(after))
    for name in [*one, *two]:
        shapes = [list(side[name].shape) if name in side else "absent" for side in (one, two)]
        if shapes[0] != shapes[1]:
            sides = " and ".join(f"{shape} in {path}" for shape, path in zip(shapes, files, strict=True))
            raise Refused(f"different nets: the {what} {name} is {sides}")
    return [(name, one[name], two[name]) for name in one]


def _alike(one, two):
    """The same, without what wrappers put before the names of one side alone."""
    for shortened in (bare_name, _end_of_name):
        if set(one) == set(two):
            break
        short_one = {shortened(name): t for name, t in one.items()}
        short_two = {shortened(name): t for name, t in two.items()}
        if len(short_one) < len(one) or len(short_two) < len(two):
            continue  # two names became one
        if set(short_one) == set(short_two):
            one, two = short_one, short_two
    return one, two


def bare_name(name):
    """A name without what DistributedDataParallel, torch.compile, FSDP and checkpoint_wrapper put into it."""
    return re.sub(r"^(module\.)+|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def _comparable(tensors):
    """Those that hold fractions."""
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def weight_names_of(averages, weights):
    """{name of an average: name of its weight}, by the end of their names."""
    ends = {_end_of_name(name): name for name in weights}
    found = {}
    for name in averages:
        end = _end_of_name(name)
        if end in ends:
            found[name] = ends[end]
    return found


def _end_of_name(name):
    """A name without what wrappers and averages put before it."""
    if NAME_OF_AVERAGE.search(name):
        name = NAME_OF_AVERAGE.split(name)[-1]
    for prefix in ("shadow.", *PREFIXES_OF_WRAPPERS, *PREFIXES_OF_WRAPPERS):
        name = name.removeprefix(prefix)
    return name
