"""A run's folder: opened, resumed or refused, written, read, exported.

runs/NAME/ holds config.json (command and resolved flags), ledger.json (the precision of every site),
env.json (versions, machine, commit), metrics.jsonl (a line a logged step), samples/*.png, TensorBoard
events, checkpoint.pt (tensors and plain values), best.pt (the best validation's) and summary.json (final
scores). Every file that is read again is written beside its place and renamed, so what was there stays whole
until the new one is.
"""

import errno
import json
import os
import pickle
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes

from machine import Refused, cpu_threads, device_facts, without

CHECKPOINT = "checkpoint.pt"
# what a checkpoint of format 1 holds
KEYS = {"config", "step", "seconds", "interval", "since", "precision"}


# ---- Files -------------------------------------------------------------------------------------------------


def write_atomically(path, write):
    """Let write(file) fill a file beside `path`, then rename it over. Raises Refused when it can't be
    written.
    """
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        with suppress(OSError):
            beside.unlink()
        full = getattr(error, "errno", None) == errno.ENOSPC
        if path.parent.exists() and shutil.disk_usage(path.parent).free < 1 << 20:
            full = True
        reason = "no space left on the device" if full else str(error).splitlines()[0]
        kept = "; the one written before is whole" if path.exists() else ""
        raise Refused(
            f"can't write {path}: {reason}{kept}; free some space or choose another --runs folder, "
            f"then run the same command again"
        ) from None


def write_json(path, value):
    """`value` as indented JSON, by `write_atomically`."""
    content = json.dumps(value, indent=1, allow_nan=True).encode() + b"\n"
    write_atomically(path, lambda file: file.write(content))


def read_json(path):
    """The object (a dict) that a JSON file holds. Raises Refused when the file is not there or holds
    anything else.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise Refused(f"can't read {path}: {error.strerror}") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused(f"{path} can't be read: it holds no JSON object")
    return value


def read_lines(path):
    """The objects of a .jsonl file, as a list of dicts; [] when there is no file.

    A last line without its line end that is no JSON was cut off in writing: it is left out. Raises Refused,
    which names the file and the line, for anything else that is not an object.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if last.strip():
        try:
            rows.append(_row(path, len(lines) + 1, last))
        except Refused:
            pass
    return rows


def _row(path, number, line):
    try:
        row = json.loads(line.decode())
    except ValueError:  # UnicodeDecodeError is one too
        row = None
    if not isinstance(row, dict):
        raise Refused(f"{path}, line {number} is no JSON object: remove that line, or the file")
    return row


def read_checkpoint(path):
    """The dict of a checkpoint file, or of the one in a run's folder; no code in it is run.

    Keys: config (a dict of flags), step, seconds, interval and since (steps and sum of the losses since the
    last logged line), precision (Precision.state_dict()). Raises Refused for anything that is no checkpoint
    of format 1.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CHECKPOINT
    if not path.is_file():
        raise Refused(f"no checkpoint at {path}: give the checkpoint.pt of a run, or its folder")
    broken = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, TypeError, ValueError)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, dict) and found["format"] == 1 and KEYS <= set(found):
            return found
    except (*broken, AttributeError):
        pass
    raise Refused(
        f"{path} is no checkpoint of this program, or is cut short: train again, or use another one"
    )


def export(path, weights, config, step):
    """Write {name: tensor} as safetensors, with the flags and the step as metadata."""
    tensors, seen = {}, set()
    for name, value in weights.items():
        value = value.detach().contiguous()
        # safetensors refuses two names for one memory, which is how tied weights come: the second is a copy
        place = value.device, value.data_ptr()
        if value.numel() and place in seen:
            value = value.clone()
        seen.add(place)
        tensors[name] = value
    content = safetensors_bytes(tensors, metadata={"flags": json.dumps(config), "step": str(step)})
    write_atomically(path, lambda file: file.write(content))


# ---- The machine -------------------------------------------------------------------------------------------


def environment(device):
    """Versions, machine and commit, for env.json and for records."""
    with without("transformers"):
        import monai
    import torchvision

    kind, capability, features = device_facts(device)
    status = _git("status", "--porcelain", "--", ".", ":!experiments", ":!*.md")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "monai": monai.__version__,
        "cpu": _cpu_name(),
        "cores": cpu_threads(),
        "threads": torch.get_num_threads(),
        "bf16": sorted(features & {"avx512_bf16", "amx_bf16", "bf16"}),
        "gpu": torch.cuda.get_device_name(device) if kind in ("cuda", "rocm") else None,
        "capability": capability,
        "commit": _git("rev-parse", "HEAD"),
        # a log that grows while the run lasts (experiments, *.md) is no change of the code
        "clean": None if status is None else status == "",
    }


def _git(*words):
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name():
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def start_peak_memory(device):
    """Let `peak_memory` count from here, where the device can: a process's largest resident set can't be
    reset.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device):
    """Peak bytes of the CUDA allocator; on a CPU of the process's resident set, libraries included."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes


# ---- The folder --------------------------------------------------------------------------------------------


class Folder:
    """runs/NAME/. `folder / "name"` is a path in it. Between `log_to` and `close` it takes metrics and
    pictures.
    """

    def __init__(self, path):
        self.path = Path(path)
        self._metrics = self._board = None

    def __truediv__(self, name):
        return self.path / name

    def __fspath__(self):
        return str(self.path)

    def __str__(self):
        return str(self.path)

    @property
    def open(self):
        """Whether it takes metrics now."""
        return self._metrics is not None

    @property
    def has_checkpoint(self):
        return (self / CHECKPOINT).exists()

    def check(self, differences):
        """Refuse to go on where the folder holds another run, or something else.

        differences: {flags of the run in the folder (a dict)} -> list of texts, one for each flag that
        differs.
        """
        if (self / "config.json").exists():
            try:
                changed = differences(self.flags())
            except (Refused, KeyError, TypeError, AttributeError):
                raise Refused(
                    f"{self}/config.json can't be read: move the folder away, or choose another --name"
                ) from None
            if changed:
                what = ", ".join(changed)
                raise Refused(f"{self} holds a run with other flags ({what}): give this one another --name")
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise Refused(f"{self} exists and holds no run of this program: choose another --name")

    def checkpoint(self):
        """The dict of its checkpoint, see `read_checkpoint`."""
        return read_checkpoint(self.path)

    def flags(self):
        """{flag: value} of the run that it holds."""
        return read_json(self / "config.json")["flags"]

    def summary(self):
        """summary.json of a run that ended, or None."""
        return read_json(self / "summary.json") if (self / "summary.json").exists() else None

    def begin(self, command, config, ledger, device, step):
        """Write what is known before the first step, and forget what lies after `step`: it will be done
        again.
        """
        (self / "summary.json").unlink(missing_ok=True)  # scores of fewer steps or of other samples
        write_json(self / "config.json", {"command": shlex.join(command), "flags": config})
        write_json(self / "ledger.json", ledger.json())
        write_json(self / "env.json", environment(device))
        path = self / "metrics.jsonl"
        if path.exists():
            kept = [json.dumps(row) + "\n" for row in read_lines(path) if row["step"] <= step]
            write_atomically(path, lambda file: file.write("".join(kept).encode()))

    def save(self, state, name=CHECKPOINT):
        """Replace the checkpoint of this name."""
        write_atomically(self / name, lambda file: torch.save({"format": 1, **state}, file))

    # -- what a running run writes

    def log_to(self, step):
        """Open metrics.jsonl and TensorBoard's events, to go on after `step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(self.path), purge_step=step + 1)
        self._metrics = open(self / "metrics.jsonl", "a")

    def log(self, row):
        """A line of metrics.jsonl, and its numbers as curves."""
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])

    def show(self, pictures, name, step):
        """{title: grid [C, H, W] in [0, 1]} as samples/<name>.png, each but the first with its title in the
        name; and in TensorBoard while it is open.
        """
        from torchvision.utils import save_image

        for number, (title, grid) in enumerate(pictures.items()):
            file = f"{name}-{title}.png" if number else f"{name}.png"
            (self / "samples").mkdir(parents=True, exist_ok=True)
            save_image(grid, self / "samples" / file)
            if self._board is not None:
                self._board.add_image(title, grid, step)

    def close(self):
        """Close what `log_to` opened; nothing is written to them afterwards."""
        for file in (self._metrics, self._board):
            if file is not None:
                file.close()
        self._metrics = self._board = None
