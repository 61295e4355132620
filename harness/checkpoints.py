"""A checkpoint file: written with a checksum of its own, which is verified before a tensor is read.

    python -c "from harness import checkpoints; print(checkpoints.read('runs/default/checkpoint.pt')['step'])"

It is the zip that torch.save writes, and torch.load takes it. The zip's comment, its last bytes, is a SHA-256
of all bytes before it: torch.load looks at no checksum, and 27 of 30 files with a flipped bit loaded. The
hash is one of hashes of pieces, so that all cores share it. A file without one, written before there was one,
is verified by the CRCs that a zip holds for each tensor. No code in a file is run.
"""

import hashlib
import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch

from harness import shards
from harness.files import damaged, digest, no_checkpoint, reading
from lowprec.errors import Refused, first_line

CHECKPOINT = "checkpoint.pt"
DIGEST_MARK = b"sha256 of the pieces before: "
DIGEST_BYTES = len(DIGEST_MARK) + 64  # and hex digits
ZIP_END = b"PK\5\6"  # a zip ends with a record of ZIP_END_BYTES that begins so, and its comment
ZIP_END_BYTES = 22

# ---- The checksum ------------------------------------------------------------------------------------------


def write_checkpoint(file, state):
    """Write a checkpoint of format 1 to a new file, open for reading and writing."""
    torch.save({"format": 1, **state}, file)
    size = file.tell()
    file.seek(size - 2)  # the length of the comment, which the zip says before it
    file.write(DIGEST_BYTES.to_bytes(2, "little"))
    file.flush()
    file.write(DIGEST_MARK + digest(file, size).encode())


def verify_checkpoint(file, path):
    """Raise Refused unless an open file is, to the last bit, what was written."""
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), DIGEST_BYTES, max(0, size - DIGEST_BYTES))
    if tail.startswith(DIGEST_MARK):
        if tail[len(DIGEST_MARK) :] != digest(file, size - DIGEST_BYTES).encode():
            raise damaged(path)
    else:
        end = tail[-ZIP_END_BYTES:]
        if not end.startswith(ZIP_END) or end[-2:] != b"\0\0":
            raise no_checkpoint(path)
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:
                raise damaged(path)
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise no_checkpoint(path)  # torch compresses nothing: a small file stays a small one in memory
    file.seek(0)


# ---- What it holds -----------------------------------------------------------------------------------------

NEEDED_KEYS = {"config", "step", "seconds", "interval", "since", "precision"}  # keys that each checkpoint has


def fingerprint(weights):
    """SHA-256 of {name: tensor}: their names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def read(path):
    """The dict of a checkpoint file, or of the one in a run's folder; no code in it is run.

    Keys: config (a dict of flags), step, seconds, interval and since (steps and sum of the losses since the
    last logged line), precision (Precision.state_dict()), and in newer ones data (what stands for the content
    of the data), validation, peak (bytes of memory) and activations (Meter.json()). Raises Refused for
    anything that is no checkpoint of format 1, or is damaged.
    """
    path = Path(path)
    with reading(path):
        if path.is_dir():
            path = path / CHECKPOINT
        is_file, is_shared = path.is_file(), shards.is_there(path)
    if is_shared:  # of many ranks
        path = shards.pointer(path)
        return _checked(shards.read_shards(path), path)
    if not is_file:
        raise Refused(f"no checkpoint at {path}: give the checkpoint.pt of a run, or its folder")
    with reading(path):
        file = open(path, "rb")  # noqa: SIM115 - closed below
    try:
        with file:
            verify_checkpoint(file, path)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Refused:
        raise
    except Exception:  # a broken file can raise nearly everything
        raise no_checkpoint(path) from None
    return _checked(found, path)


def _checked(found, path):
    """What a file holds, unless another program wrote it."""
    if not isinstance(found, dict) or found.get("format") != 1 or not set(found) >= NEEDED_KEYS:
        raise no_checkpoint(path)
    average = found["precision"].get("averages", {}).get("ema")
    if not average or not all(map(torch.is_tensor, average["shadow"].values())):
        raise no_checkpoint(path, "it holds no average 'ema'")
    return found


# ---- Whether it fits a run ---------------------------------------------------------------------------------


def check_whole(checkpoint, source, tasks=None):
    """Raises Refused for a checkpoint of a run with --lora: its average is that of the adapters alone; and of
    another task than `tasks`, where these are given.
    """
    config = checkpoint["config"]
    if tasks and config.get("task") not in tasks:
        other = f"{source} was trained with --task {config.get('task')}"
        raise Refused(f"{other}: give a run of --task {' or '.join(tasks)}")
    if config.get("lora"):
        adapters = f"{source} holds adapters beside a frozen net (--lora {config['lora']})"
        instead = f"give the run that it was finetuned from, {config.get('finetune')}"
        raise Refused(f"{adapters}, and no other run starts from those: {instead}")


@contextmanager
def fitting(source):
    """Within it, what a state of another model or recipe raises becomes a Refused. source: its name."""
    try:
        yield
    except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, OverflowError) as error:
        other = f"{source} belongs to another model or recipe ({first_line(error)})"
        raise Refused(f"{other}: use the flags it was trained with") from None


GROUP_OPTIONS = {"betas", "eps", "weight_decay", "momentum", "nesterov", "beta2_decay", "clip"}  # of a group


def check_optimizer(saved, own, step):
    """Raise ValueError where the optimiser's state `saved` is no state of an optimiser whose own is `own`,
    after `step` steps: other betas, eps or weight_decay than the flags', or steps that were never done.

    Options come from the flags. One that a file brought would stay unseen.
    """
    for saved_part, own_part in zip(saved.get("parts", ()), own.get("parts", ()), strict=True):
        check_optimizer(saved_part, own_part, step)
    for group, own_group in zip(saved["param_groups"], own["param_groups"], strict=True):
        for name in group.keys() & own_group.keys() & GROUP_OPTIONS:
            if _as_list(group[name]) != _as_list(own_group[name]):
                raise ValueError(f"its optimiser has {name} {group[name]}, the flags say {own_group[name]}")
    for state in saved["state"].values():
        done = float(state.get("step", 0))
        if not 0 <= done <= step:
            raise ValueError(f"its optimiser has done {done:g} steps of {step}")


def _as_list(value):
    """A pair is a tuple in an optimiser, and a list in a file."""
    if isinstance(value, tuple):
        return list(value)
    return value
