"""Files that are whole or not there: an atomic writer, and readers of JSON that refuse in one line.

write_atomically(path, write)    what was there stays until the new file is complete
read_json, read_lines            an object; the objects of a .jsonl
read_tensors                     what a file of safetensors holds
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lowprec.errors import Refused, first_line
from lowprec.machine import cpu_threads

HASHED_PIECE = 16 << 20  # bytes that are hashed at once

# ---- Writing -----------------------------------------------------------------------------------------------


def write_atomically(path, write):
    """Let write(file) fill a file beside `path`, then rename it over. Raises Refused when it can't be
    written.
    """
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    before = sys.exc_info()[1]  # an error that is being handled already is none of this file's
    try:
        check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        first = _first_cause(error, before)
        # torch says by a RuntimeError that a disk is full, and by a signal that a reader has died
        reader = str(first).startswith("DataLoader worker")
        if reader or not isinstance(first, (OSError, RuntimeError)):
            raise first from None
        raise Refused(cant_write(path, first)) from None


def _first_cause(error, before):
    """What the chain of exceptions since `before` began with: torch.save ends its file on the way out, and
    fails at that too.
    """
    while error.__context__ is not None and error.__context__ is not before:
        error = error.__context__
    return error


def cant_write(path, error):
    """What a person reads where an exception kept the file `path` from being written."""
    number = getattr(error, "errno", None)
    full = number in (errno.ENOSPC, errno.EDQUOT)
    with suppress(OSError):
        full |= shutil.disk_usage(path.parent).free < 1 << 20
    if full:
        reason = "no space left on the device"
    else:
        reason = getattr(error, "strerror", None) or first_line(error)
    if os.path.exists(path):
        reason += "; the one written before is whole"
    remedy = "give it a place that can be written"
    if full or number == errno.EFBIG:  # a limit of the user's
        remedy = "free some space"
    return (
        f"can't write {path}: {reason}; {remedy} or choose another --runs folder, then run the same command "
        "again"
    )


@contextmanager
def writing(path):
    """Within it an error of the system that keeps `path` from being written becomes a Refused."""
    try:
        yield
    except OSError as error:
        raise Refused(cant_write(path, error)) from None


def check_place(flag, path):
    """Raise Refused unless a file may be written at the path that a flag names."""
    path = Path(path)
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "nothing may be written in" if folder.is_dir() else "there is no folder"
        raise Refused(f"{flag} {path}: {why} {path.parent}; name another")
    check_regular(path)


def check_regular(path):
    """Raise Refused where something else than a file stands at `path`: renaming a file over a device, a pipe
    or a link would take it away.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}
    if not stat.S_ISREG(mode):
        what = kinds.get(stat.S_IFMT(mode), "a device or a pipe")
        raise Refused(f"can't write {path}: {what} stands there; name a file, or remove it")


def write_json(path, value):
    """`value` as indented JSON, by `write_atomically`."""
    content = json.dumps(value, indent=1, allow_nan=True).encode() + b"\n"
    write_atomically(path, lambda file: file.write(content))


def digest(file, size):
    """SHA-256, in hex digits, of the SHA-256s of the pieces of an open file's first `size` bytes."""

    def piece(start):
        return hashlib.sha256(os.pread(file.fileno(), min(HASHED_PIECE, size - start), start)).digest()

    with ThreadPoolExecutor(min(8, cpu_threads())) as pool:  # hashlib lets other threads run
        return hashlib.sha256(b"".join(pool.map(piece, range(0, size, HASHED_PIECE)))).hexdigest()


# ---- Reading -----------------------------------------------------------------------------------------------


@contextmanager
def reading(path):
    """Within it what keeps a file from being read becomes a Refused that names it: an error of the system, or
    a ValueError with what was found there.
    """
    try:
        yield
    except Refused:
        raise
    except (OSError, ValueError) as error:
        raise Refused(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None


def damaged(path, why="it is not what was written, by its checksum"):
    """What is raised for a file that is not what was written."""
    return Refused(f"{path} is damaged: {why}; use another copy, or train again")


def no_checkpoint(path, why="or is cut short"):
    """What is raised for a file that holds something else."""
    return Refused(f"{path} is no checkpoint of this program, {why}: train again, or use another one")


def bytes_of_file(path):
    """The bytes of a file. Raises Refused for what can't be read and for anything else than a file."""
    check_file(path)
    with reading(path):
        return Path(path).read_bytes()


def check_file(path):
    """Raise Refused unless a file is there: a pipe never ends."""
    with reading(path):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no file; give the path of one")


def read_json(path):
    """The object (a dict) that a JSON file holds. Raises Refused when the file is not there or holds
    anything else.
    """
    return _as_dict(bytes_of_file(path), path)


def read_lines(path):
    """The objects of a .jsonl file, as a list of dicts; [] when there is no file.

    A last line without its line end that is no JSON was cut off in writing: it is left out. Raises Refused,
    which names the file and the line, for anything else that is not an object.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return []
    content = bytes_of_file(path)
    *lines, last = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_as_dict(line, f"{path}, line {number}"))
    if last.strip():
        with suppress(Refused):
            rows.append(_as_dict(last, path))
    return rows


def read_tensors(path):
    """({name: tensor}, {word: text}), the tensors and the metadata of a file of safetensors. Raises Refused
    when it is no such file, or is damaged.
    """
    check_file(path)
    with reading(path):
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
                return tensors, file.metadata() or {}
        except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"it is damaged or no file of safetensors ({first_line(error)})") from None


def _as_dict(content, source):
    """The object that these bytes are in JSON. source: where they stand."""
    with reading(source):
        try:
            value = json.loads(content.decode())
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError too
            value = None
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object; remove it, or move it away")
        return value
