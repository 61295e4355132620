"""A checkpoint file: written with a checksum of its own, which is verified before a tensor is read.

    python -c "import checkpoints; print(checkpoints.read('runs/default/checkpoint.pt')['step'])"

It is the zip that torch.save writes, and torch.load takes it. The zip's comment, its last bytes, is a SHA-256
of all bytes before it: torch.load looks at no checksum, and 27 of 30 files with a flipped bit loaded. The
hash is one of hashes of pieces, so that all cores share it. A file without one, written before there was one,
is verified by the CRCs that a zip holds for each tensor.

A checksum tells damage, not malice. So no code in a file is run, and its plain values are checked as those of
any stranger; flags.Table.obeyed says which of its flags are taken.
"""

import hashlib
import os
import zipfile
from pathlib import Path

import torch

from harness import shards
from harness.files import digest
from harness.shapes import (
    check,
    fields,
    is_amount,
    is_finite,
    is_number,
    is_text,
    is_whole,
    listing,
    maybe,
    table,
)
from lowprec.errors import Refused

CHECKPOINT = "checkpoint.pt"
MARK = b"sha256 of the pieces before: "
TRAILER = len(MARK) + 64  # and hex digits
END = b"PK\5\6"  # a zip ends with a record of END_BYTES that begins so, and its comment
END_BYTES = 22

# ---- The checksum ------------------------------------------------------------------------------------------


def write(file, state):
    """Write a checkpoint of format 1 to a new file, open for reading and writing."""
    torch.save({"format": 1, **state}, file)
    size = file.tell()
    file.seek(size - 2)  # the length of the comment, which the zip says before it
    file.write(TRAILER.to_bytes(2, "little"))
    file.flush()
    file.write(MARK + digest(file, size).encode())


def verify(file, path):
    """Raise Refused unless an open file is, to the last bit, what was written."""
    size = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), TRAILER, max(0, size - TRAILER))
    damaged = Refused(
        f"{path} is damaged: it is not what was written, by its checksum; use another copy, or train again"
    )
    if tail.startswith(MARK):
        if tail[len(MARK) :] != digest(file, size - TRAILER).encode():
            raise damaged
    else:
        end = tail[-END_BYTES:]
        if not end.startswith(END) or end[-2:] != b"\0\0":
            raise _stranger(path)
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:
                raise damaged
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise _stranger(path)  # torch compresses nothing: a small file stays a small one in memory
    file.seek(0)


def _stranger(path):
    return Refused(
        f"{path} is no checkpoint of this program, or is cut short: train again, or use another one"
    )


# ---- What it holds -----------------------------------------------------------------------------------------


def is_plain(x):
    """A value of a flag."""
    return x is None or isinstance(x, bool) or is_number(x) or is_text(x) or listing(is_text)(x)


def is_tensor(x):
    return torch.is_tensor(x) and x.layout is torch.strided and not x.is_complex() and not x.is_quantized


is_average = fields({"step": is_whole, "shadow": table(is_tensor)})


def is_weights(x):
    return table()(x) and all(is_tensor(value) for value in x.values() if torch.is_tensor(value))


ROWS = {  # key: (test, what it is, whether every checkpoint has it)
    "config": (table(is_plain), "a table of flags", True),
    "step": (is_whole, "a whole number, 0 or more", True),
    "seconds": (is_amount, "a number, 0 or more", True),
    "interval": (is_whole, "a whole number, 0 or more", True),
    "since": (is_finite, "a number", True),
    "precision": (table(), "a table", True),
    "data": (lambda x: isinstance(x, str), "a fingerprint", False),
    "validation": (
        fields({"best": maybe(is_number), "step": maybe(is_whole), "waited": is_whole}),
        "the state of a validation",
        False,
    ),
}
STATE_ROWS = {  # the same of the state of a Precision
    "model": (is_weights, "a table of weights", True),
    "optimizer": (table(), "the state of an optimiser", True),
    "averages": (table(is_average), "a table of averages", True),
    "scaler": (table(), "the state of a loss scaler", False),
    "skipped": (is_whole, "a whole number, 0 or more", False),
}


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
    last logged line), precision (Precision.state_dict()). Raises Refused for anything that is no checkpoint
    of format 1, is damaged, or holds values that no run writes.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = path / CHECKPOINT
        there, shared = path.is_file(), shards.is_there(path)
    except (OSError, ValueError) as error:
        raise Refused(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    if shared:  # of many ranks
        path = shards.pointer(path)
        return _checked(shards.read(path), path)
    if not there:
        raise Refused(f"no checkpoint at {path}: give the checkpoint.pt of a run, or its folder")
    try:
        with open(path, "rb") as file:
            verify(file, path)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Refused:
        raise
    except PermissionError as error:
        raise Refused(f"can't read {path}: {error.strerror}") from None
    except Exception:  # a broken file can raise nearly everything
        raise _stranger(path) from None
    return _checked(found, path)


def _checked(found, path):
    """What a file holds, unless no run writes such a thing."""
    if not isinstance(found, dict) or found.get("format") != 1 or not NEEDED <= set(found):
        raise _stranger(path)
    check(found, ROWS, f"{path} is no checkpoint of this program")
    check(found["precision"], STATE_ROWS, f"{path} is no checkpoint of this program")
    if "ema" not in found["precision"]["averages"]:
        raise Refused(f"{path} is no checkpoint of this program: it holds no average 'ema'")
    return found


NEEDED = {name for name, (_, _, needed) in ROWS.items() if needed}


# ---- Whether it fits a run ---------------------------------------------------------------------------------


OPTIONS = {"betas", "eps", "weight_decay", "momentum", "nesterov", "beta2_decay", "clip"}  # of a group


def check_optimizer(saved, own, step):
    """Raise ValueError where the optimiser's state `saved` is no state of an optimiser whose own is `own`,
    after `step` steps: other betas, eps or weight_decay than the flags', or steps that were never done.

    Options come from the flags. One that a file brought would stay unseen.
    """
    for part, own_part in zip(saved.get("parts", ()), own.get("parts", ()), strict=True):
        check_optimizer(part, own_part, step)
    for group, own_group in zip(saved["param_groups"], own["param_groups"], strict=True):
        for name in group.keys() & own_group.keys() & OPTIONS:
            its, ours = (
                list(value) if isinstance(value, tuple) else value for value in (group[name], own_group[name])
            )
            if its != ours:
                raise ValueError(f"its optimiser has {name} {its}, the flags say {ours}")
    for state in saved["state"].values():
        done = state.get("step", 0)
        if not 0 <= float(done) <= step:
            raise ValueError(f"its optimiser has done {float(done):g} steps of {step}")
