"""Two checkpoints of any program, compared: what did training move, and what not?

    python doctor.py BEFORE AFTER           exit status 0: healthy, 1: findings, 2: bad input, in one line

A checkpoint is a safetensors file, or what torch.save wrote (.pt, .pth, .bin, .ckpt), of which no code is
run. It may hold weights alone, or weights, optimiser states and averages in any nest of dicts. For each
tensor it tells the share of entries that did not change, and norm gains that are exactly 1.0; of optimiser
states, second moments that only grow or were reset, and step counters in 16 bits or that did not count; of
averages, those that equal their start. States that can't be what their groups claim are bad input. Two files
can't tell why: `watch.Watch` in the training loop can.
"""

import dataclasses
import math
import pickle
import re
import sys
import warnings
from pathlib import Path

import torch

from ..errors import Refused
from .verdicts import Diagnosis, Finding

NARROW = (torch.bfloat16, torch.float16)
UNCHANGED = 0.5  # share of entries from which on a trained tensor is a finding
GAINS = 0.5
USAGE = "usage: python doctor.py BEFORE AFTER, two checkpoints; python train.py --diagnose RUN for a run"

# ---- Reading -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Checkpoint:
    """weights, averages: {name: tensor}. states: {name or number of a parameter: its state, a dict}. groups:
    {where an optimiser stands: its param_groups}.
    """

    path: Path
    weights: dict = dataclasses.field(default_factory=dict)
    averages: dict = dataclasses.field(default_factory=dict)
    states: dict = dataclasses.field(default_factory=dict)
    groups: dict = dataclasses.field(default_factory=dict)


def read(path):
    """A Checkpoint. Raises Refused for what is no file of tensors."""
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


AVERAGE = re.compile(r"(^|[._])(ema|shadow|averages?|averaged)([._]|$)|_ema|ema_", re.I)
WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.", "net.")


def _sort(tree, found, path):
    """Put the tensors of a nest of dicts and lists where they belong."""
    if isinstance(tree, dict) and isinstance(tree.get("state"), dict) and "param_groups" in tree:
        found.groups[path] = _groups(tree["param_groups"], found.path)
        for key, state in tree["state"].items():
            if isinstance(state, dict):
                found.states[f"{path}{key}"] = state
                for name, value in state.items():
                    _check(value, f"{name} of {path}{key}", found.path)
        return
    if isinstance(tree, dict) and "shadow_params" in tree:  # diffusers' EMAModel
        tree = {"ema": {f"{i}": t for i, t in enumerate(tree["shadow_params"])}}
    if not isinstance(tree, (dict, list, tuple)):
        return
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in children:
        name = f"{path}{key}"
        if torch.is_tensor(value):
            if value.dim() == 0 and not path:
                continue
            _check(value, name, found.path)
            (found.averages if AVERAGE.search(name) else found.weights)[name] = value
        elif isinstance(value, (dict, list, tuple)):
            _sort(value, found, f"{name}.")


def _check(value, name, path):
    """Refuse a tensor whose values can't be compared."""
    if torch.is_tensor(value) and value.layout != torch.strided:
        raise Refused(f"{path}: {name} is sparse ({value.layout}); save it with to_dense()")
    if torch.is_tensor(value) and value.is_meta:
        raise Refused(f"{path}: {name} is on the meta device and holds no values; save the values")


def _groups(groups, path):
    """param_groups as a list of dicts whose "params" are lists. Raises Refused for anything else."""
    whole = isinstance(groups, (list, tuple))
    if not whole or not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        raise Refused(f"{path}: param_groups of an optimiser are no list of groups with their params")
    return groups


def _pairs(before, after, what, files):
    """[(name, tensor before, tensor after)] of floating tensors. Raises Refused for other names or shapes."""
    sides = ({k: t for k, t in side.items() if t.is_floating_point()} for side in (before, after))
    # numbers of 8 bits can't be compared as they are
    one, two = ({k: t.float() if t.itemsize == 1 else t for k, t in side.items()} for side in sides)
    for name in [*one, *two]:
        for side, path in zip((one, two), files, strict=True):
            if name not in side:
                raise Refused(f"different nets: {path} has no {what} {name}")
        if one[name].shape != two[name].shape:
            shapes = f"{list(one[name].shape)} and {list(two[name].shape)}"
            raise Refused(f"different nets: {name} has the shapes {shapes}")
    return [(name, one[name], two[name]) for name in one]


# ---- Comparing ---------------------------------------------------------------------------------------------


def compare(before, after):
    """Diagnosis of two Checkpoints. Raises Refused where they are of different nets."""
    files = before.path, after.path
    if not after.weights and before.weights or after.weights and not before.weights:
        raise Refused(f"only one of {files[0]} and {files[1]} holds weights")
    pairs = _pairs(before.weights, after.weights, "weight", files)
    found, sound = [], {}
    moved = {name: float((a != b).float().mean()) for name, a, b in pairs if a.numel()}
    if pairs and not any(moved.values()):
        found.append(Finding("update", "severe", "no weight changed at all", "are these two of one run?"))
    elif pairs:
        found += _weights(pairs, moved)
        share = sum(a.numel() * (1 - moved.get(name, 0.0)) for name, a, _ in pairs)
        sound["unchanged entries"] = share / max(1, sum(a.numel() for _, a, _ in pairs))
    averages = _pairs(before.averages, after.averages, "average", files) if before.averages else []
    found += _averages(averages, before, after, any(moved.values()))
    for side in (before, after):
        check_states(side)
    found += _left_out(before, after, moved)
    found += _states(before.states, after.states)
    found += _reset(after)
    found.sort(key=lambda finding: finding.rank)
    sites = {f.site for f in found if f.severity != "note"}
    kept = {} if "update" in sites or "gains" in sites else sound
    head = f"{files[0]} and {files[1]}: {len(pairs)} weights, {len(averages)} of an average"
    return Diagnosis(f"{head}, states of {len(after.states)}", found, kept, harm="bad results")


def _weights(pairs, moved):
    for name, a, b in pairs:
        bad = int((~b.isfinite()).sum())
        if bad:
            yield Finding("weights", "severe", f"{bad:,} entries are not finite", "an earlier one", name, 9.0)
        if not a.numel() or name.endswith(("running_mean", "running_var")):
            continue
        ones = float((b == 1.0).float().mean())
        if b.dim() == 1 and b.numel() >= 8 and ones > GAINS and float((a == 1.0).float().mean()) > GAINS:
            text = f"{ones:.0%} of its {b.numel():,} gains are exactly 1.0, as they start"
            yield Finding("gains", "moderate", text, LOST, name, ones)
            continue
        still = 1 - _moved(a, b)
        if still > UNCHANGED and (b.dtype in NARROW or moved[name] == 0) and not _constant(name, b):
            text = f"{still:.0%} of its entries did not change"
            text += f" in {str(b.dtype).removeprefix('torch.')}" if b.dtype in NARROW else ""
            yield Finding("update", "moderate", text, LOST, name, still)


LOST = "was it frozen? else updates under half an ulp are lost: fp32 or stochastically rounded weights"


def _moved(a, b):
    """Share of entries that changed, without whole rows of a matrix that did not: tokens that never came."""
    changed = a != b
    if changed.dim() == 2 and changed.any():
        changed = changed[changed.any(1)]
    return float(changed.float().mean())


def _constant(name, b):
    """Whether nobody would train it: frequencies, positions by sine, statistics."""
    return bool(re.search(r"inv_freq|freqs|position_ids|pos_embed$|num_batches", name)) or not b.any()


def _averages(pairs, before, after, trained):
    still = [name for name, a, b in pairs if a.numel() and torch.equal(a, b)]
    named = _named_alike(after.averages, after.weights)
    for name in still if trained else ():
        text = "the average equals that of the earlier checkpoint, while weights moved"
        remedy = "average after each step, in fp32"
        yield Finding("ema", "severe", text, remedy, name, 2.0)
    starts = [name for name, w in named.items() if w in before.weights and name not in still]
    same = [n for n in starts if _equal(after.averages[n], before.weights[named[n]])]
    for name in same if trained else ():
        if not _equal(after.weights[named[name]], before.weights[named[name]]):
            text = "the average equals the weights of the earlier checkpoint"
            yield Finding("ema", "severe", text, "average after each step, in fp32", name, 1.5)
    alike = [n for n, w in named.items() if _equal(after.averages[n], after.weights[w])]
    if trained and named and len(alike) == len(named):
        text = "the average equals the weights: it averages nothing"
        yield Finding("ema", "moderate", text, "was the average saved, or the weights twice?", alike[0], 1.0)


def _equal(a, b):
    return a.shape == b.shape and bool(torch.equal(a.float(), b.float()))


def _named_alike(averages, weights):
    """{name of an average: name of its weight}, by the end of their names."""
    ends = {}
    for name in weights:
        ends[_end(name)] = name
    return {name: ends[_end(name)] for name in averages if _end(name) in ends}


def _end(name):
    name = AVERAGE.split(name)[-1] if AVERAGE.search(name) else name
    for prefix in ("shadow.", *WRAPPERS, *WRAPPERS):
        name = name.removeprefix(prefix)
    return name


def _states(before, after):
    for key, state in after.items():
        old = before.get(key, {})
        v, was = _second(state), _second(old)
        if v is not None and v.dtype in NARROW:
            kind = str(v.dtype).removeprefix("torch.")
            shrunk = None
            if was is not None and was.shape == v.shape and not torch.equal(v, was):
                shrunk = float((v.float() < was.float()).float().mean())
            text = f"exp_avg_sq is {kind}"
            if shrunk is not None and shrunk > 0.02:
                text += f", and {shrunk:.0%} of its entries shrank"
                yield Finding("exp_avg_sq", "note", text, "nothing, if it is rounded stochastically", key)
            else:
                text += ": rounded to nearest it can grow and not shrink"
                text += "" if shrunk is None else f"; {shrunk:.1%} of its entries shrank"
                remedy = "fp32 states, or stochastic rounding"
                yield Finding("exp_avg_sq", "moderate", text, remedy, key, 1.0)
        if v is not None and was is not None and was.dtype == torch.float32 and v.dtype in NARROW:
            remedy = "put states back as they were saved"
            yield Finding("exp_avg_sq", "moderate", "it was fp32 before", remedy, key, 2.0)
        step = state.get("step")
        if torch.is_tensor(step) and step.dtype in NARROW:
            kind, most = str(step.dtype).removeprefix("torch."), 256 if step.dtype == torch.bfloat16 else 2048
            severity = "severe" if float(step) >= most else "moderate"
            text = f"its step counter is {kind} and says {float(step):g}: it can't count beyond {most}"
            yield Finding("step", severity, text, "fp32 or integer counters", key, 1.0)
        elif step is not None and "step" in old and float(step) == float(old["step"]) and was is not None:
            if v is not None and v.shape == was.shape and not torch.equal(v, was):
                text = f"its step counter says {float(step):g} in both, while its moments changed"
                yield Finding("step", "moderate", text, "fp32 or integer counters", key, 1.0)


def _second(state):
    found = state.get("exp_avg_sq")
    return found if torch.is_tensor(found) else None


# ---- States that can't be ----------------------------------------------------------------------------------

BUFFERS = re.compile(r"running_(mean|var)$|num_batches_tracked$|inv_freq$")
SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # as their parameter, in most


def check_states(found):
    """Raise Refused for a state that can't be what the param_groups of a Checkpoint claim: what torch's AdamW
    and Adam keep, and what others keep for most parameters of a group.
    """
    for key, state in found.states.items():
        if "step" in state and _count(state["step"]) is None and _holds(found, key):
            said = repr(state["step"]).replace("\n", " ")[:60]
            raise Refused(f"{found.path}: step of {key} says {said}, which is no number of steps")
    for path, groups in found.groups.items():
        shapes = {key: found.weights[name].shape for key, name in _owners(found, path).items()}
        for group in groups:
            held = {key: found.states[key] for key in _keys(path, group) if _holds(found, key)}
            _check_names(group, held, found.path)
            _check_shapes(group, held, shapes, found.path)


def _keys(path, group):
    return [f"{path}{i}" for i in group["params"]]


def _holds(found, key):
    return any(value is not None for value in found.states.get(key, {}).values())


def _adamw(group):
    """Whether it is a group of torch's AdamW or Adam, by the options that it has."""
    return {"betas", "eps", "amsgrad", "capturable"} <= set(group)


def _keeps(group):
    """Whether its parameters have a state once they have been stepped; SGD's have with momentum alone."""
    return _adamw(group) or bool(group.get("momentum") and "dampening" in group)


def _count(step):
    """A number of steps; None for what is none."""
    if torch.is_tensor(step):
        step = step.item() if step.numel() == 1 else None
    known = isinstance(step, (int, float)) and math.isfinite(step) and step >= 0
    return float(step) if known else None


def _check_names(group, held, path):
    needed = [n for n in SHAPED if 2 * sum(torch.is_tensor(s.get(n)) for s in held.values()) > len(held)]
    if _adamw(group):
        needed = ["exp_avg", "exp_avg_sq", "step"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
    for key, state in held.items():
        for name in needed:
            parts = [name, f"{name}_row", f"{name}_col"]
            there = [state[part] for part in parts if part in state]
            if not there or (name in SHAPED and not any(map(torch.is_tensor, there))):
                what = f"the state of {key} has no {name}, which its optimiser keeps"
                raise Refused(f"{path}: {what}: it is cut, or another optimiser's")


def _check_shapes(group, held, shapes, path):
    """Each moment has the shape of its weight, or of the other moment where that is all that is known."""
    for name in SHAPED:
        pairs = {}
        for key, state in held.items():
            moment, first = (state.get(n) for n in (name, "exp_avg"))
            if torch.is_tensor(moment) and moment.is_floating_point():
                other = first.shape if torch.is_tensor(first) and first.is_floating_point() else moment.shape
                pairs[key] = moment.shape, shapes.get(key, other)
        wrong = [key for key, (shape, wanted) in pairs.items() if shape != wanted]
        if wrong and (_adamw(group) or 2 * len(wrong) < len(pairs)):
            shape, wanted = map(list, pairs[wrong[0]])
            raise Refused(f"{path}: {name} of {wrong[0]} has the shape {shape}, and its parameter {wanted}")


def _owners(found, path):
    """{key of a state: name of its weight}: by name where the optimiser has them, else by order where that
    fits. {} where it can't be known.
    """
    weights = {n: t for n, t in found.weights.items() if t.is_floating_point() and not BUFFERS.search(n)}
    ends = {_end(name): name for name in weights}
    keys, names = [], []
    for group in found.groups[path]:
        given = group.get("param_names")
        names += given if isinstance(given, list) and len(given) == len(group["params"]) else group["params"]
        keys += _keys(path, group)
    by_name = {k: ends[_end(str(n))] for k, n in zip(keys, names, strict=True) if _end(str(n)) in ends}
    if by_name or len(found.groups[path]) > 1 or len(keys) != len(weights):
        return by_name
    by_order, fits = dict(zip(keys, weights, strict=True)), []
    for key, name in by_order.items():
        moments = [t for n, t in found.states.get(key, {}).items() if n in SHAPED and torch.is_tensor(t)]
        fits += [any(t.shape == weights[name].shape for t in moments)] if moments else []
    return by_order if sum(fits) >= 0.75 * len(fits) else {}


def _left_out(before, after, moved):
    """Notes of parameters without a state: they may never have had a gradient. Raises Refused where they did:
    they moved, or had a state before.
    """
    for path, groups in after.groups.items():
        owners, count, empty, alone = _owners(after, path), 0, [], True
        for group in groups:
            keys = _keys(path, group)
            none = [key for key in keys if not _holds(after, key)]
            alone &= len(none) == len(keys)
            count += len(keys)
            empty += none if _keeps(group) or len(none) < len(keys) else []
        if not empty:
            continue
        text = f"{len(empty)} of {count} parameters have no state"
        if any(_holds(before, key) for key in empty):
            raise Refused(f"{after.path}: {text}, although they had one in {before.path}: it was lost")
        if any(moved.get(owners.get(key)) for key in empty) or (alone and any(moved.values())):
            raise Refused(f"{after.path}: {text}, although they moved: it was lost, or not saved")
        yield Finding("state", "note", text, "expected of those that never had a gradient")


def _reset(found):
    """Second moments of 0 after steps. One tensor may never have had a gradient but 0; all of them did."""
    counts = {key: _count(state.get("step")) or 0 for key, state in found.states.items()}
    held = [key for key in counts if counts[key] and _second(found.states[key]) is not None]
    zero = [key for key in held if not _second(found.states[key]).any()]
    for key in zero:
        first = found.states[key].get("exp_avg")
        if len(zero) == len(held) or (torch.is_tensor(first) and first.any()):
            text = f"all zero after {counts[key]:g} steps: the second moment was reset"
            yield Finding("exp_avg_sq", "severe", text, "restore exp_avg_sq at a resume", key, 3.0)


# ---- The command -------------------------------------------------------------------------------------------


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if len(argv) != 2:
            raise Refused(USAGE)
        diagnosis = compare(read(argv[0]), read(argv[1]))
    except Refused as error:
        print(f"doctor.py: {error}", file=sys.stderr)
        return 2
    print(diagnosis)
    return diagnosis.status


if __name__ == "__main__":
    sys.exit(main())
