"""Files and folders of checkpoints as nests of dicts and tensors. No code in them is run: an object that is
neither a tensor nor a plain value becomes an empty stand-in.
"""

import io
import json
import pickle
import re
import sys
import warnings
import zipfile

import torch

from ..errors import Refused, in_one_line

# what transformers, diffusers and PEFT call the weights in a folder
STEMS_OF_WEIGHT_FILES = ("model", "diffusion_pytorch_model", "adapter_model", "pytorch_model")
WEIGHT_FILES = [f"{name}.{suffix}" for name in STEMS_OF_WEIGHT_FILES for suffix in ("safetensors", "bin")]
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
# objects of the standard library that hold values and nothing else
HARMLESS = {"argparse.Namespace", "collections.defaultdict", "collections.Counter", "collections.deque"}
HARMLESS |= {"pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.WindowsPath", "pathlib.PureWindowsPath"}
HARMLESS |= {"datetime.datetime", "datetime.timedelta", "pathlib._local.PosixPath", "types.SimpleNamespace"}


def loaded(path):
    """A nest of dicts, lists and tensors: of a file, an index of shards, or a folder with an index, with one
    file of weights or by torch.distributed.checkpoint. Raises Refused for anything else.
    """
    if not path.exists():
        raise Refused(f"{path}: no such file; give a .safetensors file or one that torch.save wrote")
    with in_one_line(f"{path} is no checkpoint, or is cut short:"):
        if path.is_dir():
            return _loaded_folder(path)
        if path.name.endswith(".index.json"):
            return _loaded_shards(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return _loaded_by_torch(path)


# ---- What torch.save wrote ---------------------------------------------------------------------------------


class StandIn:
    """An object of a class that is not loaded. It takes what a file says of it, and forgets that."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass

    def extend(self, values):
        pass


class CodedTensor(torch.Tensor):
    """torchao's states of 8 and 4 bits, as they are in a file: `codes`, `scale`, `qmap`, `block_size`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise NotImplementedError("a file's codes are decoded, and not computed with")


def _loaded_by_torch(path):
    """What torch.save wrote, with stand-ins for objects of other classes."""
    stand_ins = []
    if zipfile.is_zipfile(path):
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(path):
            package = name.partition(".")[0]
            if package not in sys.stdlib_module_names or name in HARMLESS:
                coded = package == "torchao" and "OptimState" in name
                stand_ins.append((CodedTensor if coded else StandIn, name))
    with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
        warnings.simplefilter("ignore")  # torch's, at sparse tensors
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not re.search("allowed global|Unsupported class|unsupported GLOBAL", str(error)):
                # torch's own text tells to load it without that limit
                raise Refused(f"{path} is no checkpoint, or is cut short") from None
            found = StandIn()
    if isinstance(found, StandIn):
        raise Refused(
            f"{path}: it holds more than tensors and plain values, and loading it would run code; save its "
            "state_dict alone"
        )
    return found


# ---- Folders and indices of shards -------------------------------------------------------------------------


def _loaded_folder(path):
    if (path / ".metadata").is_file():
        return _loaded_distributed(path)
    # of safetensors before .bin
    indices = sorted(path.glob("*.index.json"), key=lambda file: ".safetensors." not in file.name)
    weights = [*indices, *(path / name for name in WEIGHT_FILES if (path / name).is_file())]
    if not weights:
        raise Refused(
            f"{path}: a folder, and not a checkpoint; give a .safetensors file, one that torch.save wrote, "
            "or a folder with an index of shards, "
            f"with one of {', '.join(WEIGHT_FILES[:3])} or with .metadata"
        )
    found = {"": loaded(weights[0])}
    for name in OPTIMIZER_FILES:
        if (path / name).is_file():
            found["optimizer"] = loaded(path / name)
    return found


def _loaded_shards(path):
    """The tensors of all files that an index names."""
    named = json.loads(path.read_text())["weight_map"]
    found = {}
    for name in sorted(set(named.values())):
        tensors = loaded(path.parent / name)
        found.update({key: tensors[key] for key, file in named.items() if file == name and key in tensors})
    missing = sorted(set(named) - set(found))
    if missing:
        raise Refused(f"{path}: its files lack {missing[0]}: they are of another checkpoint")
    return found


# ---- torch.distributed.checkpoint --------------------------------------------------------------------------


class Described(StandIn):
    """One of the records in .metadata: its fields are attributes."""

    def __setstate__(self, state):
        if isinstance(state, dict):
            vars(self).update(state)


class Records(pickle.Unpickler):
    """Reads .metadata: records, sizes and dtypes. What else a pickle may name becomes an empty record."""

    def find_class(self, module, name):
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else Described


def _loaded_distributed(folder):
    """The tensors of a folder that torch.distributed.checkpoint wrote, in the nest that was saved."""
    with open(folder / ".metadata", "rb") as file:
        records = Records(file).load()
    sizes = {name: getattr(record, "size", None) for name, record in records.state_dict_metadata.items()}
    tensors = _put_together(folder, records.storage_data, sizes)
    return _nested(tensors, records.planner_data or {})


def _put_together(folder, places, sizes):
    """{name: tensor, or None for what is none}, put together from their parts. places: {(name, offsets):
    (file, offset, length)}, as records. sizes: {name: its shape, None for what is no tensor}.
    """
    tensors = dict.fromkeys(sizes)
    for index, place in sorted(places.items(), key=lambda pair: (pair[1].relative_path, pair[1].offset)):
        size = sizes[index.fqn]
        if size is None:
            continue
        if getattr(place, "transform_descriptors", None):
            raise Refused(f"{folder}: its tensors are compressed; save them as they are")
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            part = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        if tensors[index.fqn] is None:
            tensors[index.fqn] = torch.zeros(size, dtype=part.dtype)
        offsets = index.offset or (0,) * part.dim()
        at = tuple(slice(start, start + n) for start, n in zip(offsets, part.shape, strict=True))
        tensors[index.fqn][at] = part
    return tensors


def _nested(tensors, paths):
    """{flat name: value} as the dicts that were saved. paths: {flat name: (key, key, ...)}."""
    tree = {}
    for name, value in tensors.items():
        *outer, last = paths.get(name, (name,))
        place = tree
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return tree
