"""A checkpoint that many ranks write together, and any number of them reads: torch.distributed.checkpoint
without a pickle.

    runs/NAME/checkpoint.json               what it holds: all values but tensors, and a SHA-256 of each file
    runs/NAME/checkpoint-00000120/*         a file of safetensors from each rank, with its rows of each tensor

The file of plain values is written last, by the first rank, and names the folder: a checkpoint is whole or
not there. torch's FileSystemReader would unpickle `.metadata` and run whatever that says (torch 2.14:
checkpoint/filesystem.py, read_metadata), so its HuggingFaceStorageWriter and -Reader are used.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from harness.files import (
    cant_write,
    check_regular,
    damaged,
    digest,
    no_checkpoint,
    read_json,
    write_json,
    writing,
)
from harness.ranks import Followed, lost_process
from lowprec.errors import Refused, first_line
from lowprec.optimizers.buckets import local_tensor
from lowprec.parts.spread import Chunk

CHECKPOINT_NAMES = ("checkpoint", "best")  # what checkpoints of many ranks are called
DTYPE_OF = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
)}  # fmt: skip


def pointer(path):
    """Where the plain values lie of the checkpoint that is called `path`, as checkpoint.pt."""
    return Path(path).with_suffix(".json")


def file_that_is_there(path):
    """The file that is there of the checkpoint that is called `path`."""
    return pointer(path) if is_there(path) else Path(path)


# ---- Trees -------------------------------------------------------------------------------------------------


def _taken_apart(x, tensors, key="", first=None):
    """A nest of dicts, lists and tuples as JSON takes it; its tensors go into `tensors`, {key: tensor}. What
    has several names, as tied weights have, goes there by the first. first: {memory: key}.
    """
    if first is None:
        first = {}
    if torch.is_tensor(x):
        key = first.setdefault(_place_in_memory(x), key)
        tensors[key] = x
        shape = x.whole_shape if isinstance(x, Chunk) else x.shape
        dtype = str(x.dtype).removeprefix("torch.")
        return {"$tensor": key, "size": list(x.shape), "shape": list(shape), "dtype": dtype}
    if isinstance(x, dict):
        values = {name: _taken_apart(value, tensors, f"{key}/{name}", first) for name, value in x.items()}
        if all(isinstance(name, str) and not name.startswith("$") for name in x):
            return values
        return {"$pairs": [[name, value] for name, value in values.items()]}
    if isinstance(x, (list, tuple)):
        values = [_taken_apart(value, tensors, f"{key}/{i}", first) for i, value in enumerate(x)]
        if isinstance(x, tuple):
            return {"$tuple": values}
        return values
    return x


def _place_in_memory(x):
    """What two names of one tensor have in common; the same names on every rank, those without rows too."""
    if isinstance(x, Chunk):
        own = x.tensor
    else:
        own = local_tensor(x)
    # the storage itself: the address of an empty one is 0
    return own.untyped_storage()._cdata, own.storage_offset(), own.dtype, x.shape, own.stride()


def _put_together(x, tensor_of):
    """The nest that `_taken_apart` took apart. tensor_of: a leaf's description -> the tensor."""
    if isinstance(x, dict):
        if "$tensor" in x:
            return tensor_of(x)
        if "$pairs" in x:
            return {name: _put_together(value, tensor_of) for name, value in x["$pairs"]}
        if "$tuple" in x:
            return tuple(_put_together(value, tensor_of) for value in x["$tuple"])
        return {name: _put_together(value, tensor_of) for name, value in x.items()}
    if isinstance(x, list):
        return [_put_together(value, tensor_of) for value in x]
    return x


# ---- Writing -----------------------------------------------------------------------------------------------


def write_shards(path, state, ranks, device):
    """Write a checkpoint from all ranks. path: as of a checkpoint.pt; state: a dict of format 1 whose tensors
    may be DTensors and Chunks. Raises Refused on the first rank, Followed on the others.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter, save

    tensors = {}
    tree = _taken_apart({"format": 1, **state}, tensors)
    file = pointer(path)
    name = f"{file.stem}-{state['step']:08d}"
    part = file.with_name(f"{name}.part")
    ranks.first(lambda: _make_folder(file, part), device)
    tensors = {key: t.detach() for key, t in tensors.items()}
    writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
    # what all ranks hold is the first one's: running statistics begin each step as these
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    _together_or_refused(
        lambda: save(tensors, storage_writer=writer, planner=planner),
        lambda error: cant_write(file, error),
        ranks,
    )
    sums = _digests(part, ranks, device)
    ranks.first(lambda: _settle(file, part, name, tree, sums), device)


def _make_folder(file, part):
    """An empty folder beside the place of the new one."""
    check_regular(file)
    with writing(part):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)


def _digests(part, ranks, device):
    """{file: SHA-256} of all files, each hashed and brought to the disk by the rank that wrote it."""
    rows = torch.zeros(ranks.world, 256, dtype=torch.int32)  # a row a rank: the bytes of "SHA-256 name"
    for path in part.glob(f"shard-{ranks.rank + 1:05d}-*"):  # none where no tensor has a row for this rank
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            line = f"{digest(file, os.fstat(file.fileno()).st_size)} {path.name}".encode()
        rows[ranks.rank, : len(line)] = torch.tensor(list(line), dtype=torch.int32)
    sums = {}
    for row in ranks.sum(rows.to(device)).tolist():
        found, _, name = bytes(row).rstrip(b"\0").decode().partition(" ")
        if name:
            sums[name] = found
    return sums


def _settle(file, part, name, tree, sums):
    """Let the new checkpoint be the one that is read, and remove the one before it."""
    folder, number = file.with_name(name), 0
    while folder.exists():
        number += 1
        folder = file.with_name(f"{name}-{number}")
    with writing(folder):
        os.rename(part, folder)
        for place in (folder, folder.parent):
            handle = os.open(place, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    content = {"folder": folder.name, "files": sums, "state": tree}
    write_json(file, {"sha256": _digest_of(content), **content})
    _remove_folders_but(file, folder)
    with suppress(OSError):
        file.with_suffix(".pt").unlink()  # of a run of one process, up to here


def _remove_folders_but(file, kept=None):
    written = re.compile(rf"{re.escape(file.stem)}-\d{{8,}}(-\d+)?(\.part)?")
    for old in file.parent.iterdir():
        if old != kept and written.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(path):
    """Remove the folders beside the checkpoint `path` that it does not speak of: those of a process that was
    killed before the checkpoint was whole, or before the one before it was gone.
    """
    file, kept = pointer(path), None
    if is_there(path):
        kept = file.with_name(str(read_json(file).get("folder")))
    _remove_folders_but(file, kept)


def remove_shards(path):
    """Remove what is read as the checkpoint `path`, where a file of one process has taken its place."""
    if is_there(path):
        pointer(path).unlink(missing_ok=True)
        _remove_folders_but(pointer(path))


def _digest_of(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _together_or_refused(act, line_of, ranks):
    """act(), which all ranks do together. An error on one of them is one line, line_of(error), of the first.
    Where another process has ended, which may be that one, all raise Refused.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        act()
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))
        if isinstance(failure, tuple):
            failure = failure[0]
        gone = lost_process(RuntimeError(first_line(failure)), ranks.world)
        if not (gone or ranks.main):
            raise Followed("the ranks could not do it together") from None
        raise Refused(gone or line_of(failure)) from None


# ---- Reading -----------------------------------------------------------------------------------------------


def is_there(path):
    return Path(path).stem in CHECKPOINT_NAMES and os.path.lexists(pointer(path))


def _opened(path):
    """(content of the file of plain values, folder of the tensors, both verified but for the tensors)."""
    file = pointer(path)
    content = read_json(file)
    claimed = content.pop("sha256", None)
    whole = set(content) == {"folder", "files", "state"} and claimed == _digest_of(content)
    if not whole:
        raise damaged(file)
    for name in (content["folder"], *content["files"]):
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise damaged(file, f"{name!r} is no file beside it")
    folder = file.with_name(content["folder"])
    there = {path.name for path in folder.glob("*")}
    for name in sorted(there ^ set(content["files"])):
        what = "does not belong there" if name in there else "is missing"
        raise damaged(folder, f"{name} {what}")
    return content, folder


def _verify(content, folder, rank=0, world=1):
    """Raise Refused unless this rank's share of the files is, to the last bit, what was written."""
    for i, (name, claimed) in enumerate(sorted(content["files"].items())):
        if i % world == rank:
            with open(folder / name, "rb") as file:
                if digest(file, os.fstat(file.fileno()).st_size) != claimed:
                    raise damaged(folder / name)


def _described(tree):
    """The descriptions of all tensors, {key: description}."""
    found = {}
    _put_together(tree, lambda leaf: found.setdefault(leaf["$tensor"], leaf))
    return found


def read_shards(path):
    """The dict of a checkpoint, with whole tensors on the CPU, as one process would have written it. Its
    values are still to be checked. Raises Refused for what is damaged.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    content, folder = _opened(path)
    _verify(content, folder)
    strange = no_checkpoint(pointer(path))
    try:
        leaves = _described(content["state"])
        asked = sum(math.prod(leaf["size"]) * DTYPE_OF[leaf["dtype"]].itemsize for leaf in leaves.values())
        if asked > sum((folder / name).stat().st_size for name in content["files"]):
            raise strange
        tensors = {
            key: torch.zeros(leaf["size"], dtype=DTYPE_OF[leaf["dtype"]]) for key, leaf in leaves.items()
        }
        with warnings.catch_warnings():  # that it is one process is meant
            warnings.simplefilter("ignore")
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        return _put_together(content["state"], lambda leaf: tensors[leaf["$tensor"]].view(leaf["shape"]))
    except Refused:
        raise
    except BaseException as error:  # a broken file can raise nearly everything
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise strange from None


def read_own_shards(path, run, ranks, device):
    """The same with what this rank of a Precision `run` holds, read into its own tensors in place. All ranks
    call it. Raises Refused for another net or recipe.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = {}

    def look():
        found["content"], found["folder"] = _opened(path)
        _verify(found["content"], found["folder"], ranks.rank, ranks.world)

    ranks.each(look, device)
    content, folder = found["content"], found["folder"]
    own = {}
    _taken_apart({"precision": run.state_dict()}, own)
    leaves = _described(content["state"])
    if own.keys() != leaves.keys() or any(_described_as(own[key]) != _tensor_key(leaves[key]) for key in own):
        other = f"{folder} belongs to another model or recipe"
        raise Refused(f"{other}: use the flags it was trained with, or another --name")
    _together_or_refused(
        lambda: load(own, storage_reader=HuggingFaceStorageReader(str(folder))),
        lambda error: f"can't read {folder}: {first_line(error)}",
        ranks,
    )
    return _put_together(content["state"], lambda leaf: own[leaf["$tensor"]])


def _described_as(x):
    return _tensor_key(_taken_apart(x, {}))


def _tensor_key(leaf):
    return leaf["size"], leaf["shape"], leaf["dtype"]
