"""A run's folder: opened, resumed or refused, written, read, exported.

runs/NAME/ holds config.json (command and resolved flags), ledger.json (the precision of every site),
env.json (versions, machine, commit), metrics.jsonl (a line a logged step), samples/*.png, TensorBoard
events, checkpoint.pt (see checkpoints.py; of a net that is spread over ranks checkpoint.json and a folder,
see shards.py), best.pt (the best validation's) and summary.json (final scores). Every file that is read again
is written beside its place and renamed, so what was there stays whole until the new one is. One process at a
time trains in a folder: .lock says which.
"""

import errno
import fcntl
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes

from harness import checkpoints, shards
from harness.checkpoints import CHECKPOINT
from harness.files import check_place, check_regular, read_json, read_lines, write_atomically, write_json
from harness.ranks import ranks_here
from lowprec.errors import Refused
from lowprec.machine import cpu_threads, device_facts

LOCK_FILE = ".lock"
# What may lie in a folder that holds no run yet: what desktops leave, and what a run left that was killed
# before its first file was whole
LITTER_NAMES = re.compile(r"\.lock|\.DS_Store|Thumbs\.db|desktop\.ini|.+\.(json|jsonl|pt)(\.\d+)?\.part")

# ---- Exported weights --------------------------------------------------------------------------------------


def check_export(path):
    """Raise Refused unless a file may be written at `path`: a new one, or in place of safetensors."""
    path = Path(path)
    check_place("--export", path)
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        start, size = file.read(9), path.stat().st_size
    header = int.from_bytes(start[:8], "little")  # bytes of the JSON that begins a file of safetensors
    if size and not (start[8:] == b"{" and header <= size - 8):
        raise Refused(f"--export {path} would replace a file that is no safetensors: give it another name")


def export(path, weights, config, step):
    """Write {name: tensor} as safetensors, with the flags and the step as metadata."""
    check_export(path)
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
    kind, capability, features = device_facts(device)
    status = _git("status", "--porcelain", "--", ".", ":!experiments", ":!*.md")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": metadata.version("torchvision"),
        "monai": metadata.version("monai"),
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
    """What git says of the whole clone, or None where it is no clone, or there is no git."""
    words = ["git", "-C", str(Path(__file__).parent.parent), *words]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # macOS counts in bytes, Linux in kilobytes
        return peak
    return peak * 1024


# ---- The folder --------------------------------------------------------------------------------------------


class Folder:
    """runs/NAME/. `folder / "name"` is a path in it. Between `log_to` and `close` it takes metrics and
    pictures.
    """

    def __init__(self, path, ranks=None):
        self.path, self.ranks = Path(path), ranks or ranks_here()
        self._metrics = self._board = self._lock = None

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
        return os.path.lexists(self / CHECKPOINT) or shards.is_there(self / CHECKPOINT)

    def taken(self, why):
        """What is raised where this folder can't take the run."""
        return Refused(f"{self} {why}: choose another --name or --runs")

    def check(self, differences):
        """Refuse to go on where the folder holds another run, or something else.

        differences: {flags of the run in the folder (a dict)} -> list of texts, one for each flag that
        differs.
        """
        if os.fsencode(self.path).decode(errors="replace") != str(self.path):
            raise self.taken("has a name that is not UTF-8, and TensorBoard writes into no such folder")
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.taken(f"can't be read as a folder ({error.strerror})") from None
        if "config.json" in names:
            changed = differences(self.flags())
            if changed:
                raise self.taken(f"holds a run with other flags ({', '.join(changed)})")
        elif not all(LITTER_NAMES.fullmatch(name) for name in names):
            raise self.taken("exists and holds no run of this program")

    def lock(self):
        """Keep other processes from the folder, which is made, until `close` or the end of this process, by
        whatever it ends. Raises Refused where one is at work here.

        A lock of the process (POSIX): those that it forks, which may outlive it for seconds, don't hold it.
        """
        path = self / LOCK_FILE
        check_regular(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path, "a+")  # noqa: SIM115 - held until the run ends
        except OSError as error:
            if self.path.is_dir() and not os.access(self.path, os.W_OK):
                return  # a run that has ended is printed again; nobody can write here
            raise self.taken(f"can't be written to ({error.strerror})") from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                alone = f"{self} can't be locked here ({error.strerror}): start one process at a time on it"
                print(f"warning: {alone}", file=sys.stderr)
                return
            self._lock.seek(0)
            who = self._lock.read(100).strip() or "another process"
            raise self.taken(f"is in use by {who}, until that ends") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}\n")
        self._lock.flush()

    def checkpoint(self, run, device, differences):
        """What its checkpoint holds; of one that is spread over ranks what this rank of a Precision `run`
        holds, read into its own tensors. Raises Refused for that of another run; differences: as of `check`.
        """
        if self.ranks.spread and shards.is_there(self / CHECKPOINT):
            found = shards.read_own_shards(self / CHECKPOINT, run, self.ranks, device)
        else:
            found = checkpoints.read(self.path)
        changed = differences(found["config"])
        if changed:
            raise self.taken(f"holds the checkpoint of another model or recipe ({', '.join(changed)})")
        return found

    def flags(self):
        """{flag: value} of the run that it holds."""
        return read_json(self / "config.json")["flags"]

    def summary(self):
        """summary.json of a run that ended, or None."""
        path = self / "summary.json"
        if os.path.lexists(path):
            return read_json(path)
        return None

    def begin(self, command, config, ledger, device, step, logged=0):
        """Write what is known before the first step, and forget what lies after `step`: it will be done
        again. logged: the last step with a line of metrics.jsonl; warns where there are other lines.
        """
        rows = read_lines(self / "metrics.jsonl")
        (self / "summary.json").unlink(missing_ok=True)  # scores of fewer steps or of other samples
        shards.remove_leftovers(self / CHECKPOINT)
        for path in self.path.glob("*.*.part"):  # of a process that was killed while it wrote
            if re.search(r"\.\d+\.part$", path.name):
                path.unlink(missing_ok=True)
        self._begun = {
            "config.json": {"command": shlex.join(command), "flags": config},
            "ledger.json": ledger.json(),
            "env.json": environment(device),
        }
        for name, value in self._begun.items():
            write_json(self / name, value)
        path = self / "metrics.jsonl"
        if path.exists():
            rows = [row for row in rows if type(row.get("step")) is int and row["step"] <= step]
            steps = [row["step"] for row in rows]
            if steps != sorted(set(steps)) or max(steps, default=0) != logged:
                lines = "holds other lines than this run has written up to its checkpoint"
                print(f"warning: {path} {lines}: curves may lie", file=sys.stderr)
            content = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_atomically(path, lambda file: file.write(content.encode()))

    def save(self, state, name, device):
        """Replace the checkpoint of this name; where a net is spread all ranks write their rows."""
        if self.ranks.spread:
            shards.write_shards(self / name, state, self.ranks, device)
        else:
            self._save(state, name)

    def _save(self, state, name):
        self.put_back(state["step"])
        write_atomically(self / name, lambda file: checkpoints.write_checkpoint(file, state))
        shards.remove_shards(self / name)

    # -- what a running run writes

    def log_to(self, step):
        """Open metrics.jsonl and TensorBoard's events, to go on after `step`."""
        from torch.utils.tensorboard import SummaryWriter

        _quieten_writers()
        self._board = SummaryWriter(str(self.path), purge_step=step + 1)
        self._metrics = open(self / "metrics.jsonl", "a+")  # noqa: SIM115 - open while it trains

    def put_back(self, step):
        """Write again what was deleted or moved away since the run began. Raises Refused where another run
        has taken the place.
        """
        config = self / "config.json"
        if not self.open or (config.exists() and self._has_metrics()):
            return
        self._metrics.seek(0)
        lines = self._metrics.read()
        with suppress(OSError):  # TensorBoard's file may be gone with its folder
            self.close()
        self.lock()
        if config.exists() and read_json(config) != json.loads(json.dumps(self._begun[config.name])):
            raise Refused(f"{self} was moved away, and another run is there now: nothing more is written")
        for name, value in self._begun.items():
            write_json(self / name, value)
        write_atomically(self / "metrics.jsonl", lambda file: file.write(lines.encode()))
        self.log_to(step)
        again = "its files are written again, and the run goes on"
        print(f"warning: {self} was deleted or moved while it trained: {again}", file=sys.stderr)

    def _has_metrics(self):
        """Whether metrics.jsonl is still the file that lines are written to."""
        try:
            return os.path.samestat(os.fstat(self._metrics.fileno()), os.stat(self / "metrics.jsonl"))
        except OSError:
            return False

    def log(self, row):
        """A line of metrics.jsonl, and its numbers as curves."""
        self.put_back(row["step"])
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, row["step"])

    export = staticmethod(export)

    def show(self, pictures, name, step):
        """{title: grid [C, H, W] in [0, 1]} as samples/<name>.png, each but the first with its title in the
        name; and in TensorBoard while it is open.
        """
        from torchvision.utils import save_image

        self.put_back(step)
        for number, (title, grid) in enumerate(pictures.items()):
            if number == 0:
                file = f"{name}.png"
            else:
                file = f"{name}-{title}.png"
            path = self / "samples" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            save_image(grid, path)
            if self._board is not None:
                self._board.add_image(title, grid, step)

    def close(self):
        """Close what `log_to` opened; nothing is written to them afterwards. Others may take the folder."""
        with ExitStack() as stack:  # closing one may fail, on a full disk say
            for file in (self._lock, self._board, self._metrics):
                if file is not None:
                    stack.callback(file.close)
            self._metrics = self._board = self._lock = None


class FolderOfOthers(Folder):
    """The folder as a process has it that writes nothing: the main one of the run does."""

    def begin(self, *given):
        """It does this, and the following."""

    _save = export = log_to = log = begin


def folder_of(path, ranks):
    """The folder at `path` as this one of the ranks has it."""
    return Folder(path, ranks) if ranks.main else FolderOfOthers(path, ranks)


def _quieten_writers():
    """Let TensorBoard's threads end without a traceback: what stops one is raised again by the next curve."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _but_of_writers


def _but_of_writers(args):
    if type(args.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(args)
