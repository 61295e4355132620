"""bench.py advice: the peak of a process that trains, beside what `advise` says of it. (an hour, 4 GiB)

Each net and recipe is trained for two steps in a process of its own, which then says how much memory it had
at most. The C library keeps pieces of freed memory for later use. MALLOC_MMAP_THRESHOLD_=65536 in the
environment gives freed tensors back at once: the estimate is held against that. Some cells run without it,
too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import strategies
from benchmarks.common import RECIPES, Command, markdown, progress_bar, typed
from lowprec.advice import timing
from lowprec.errors import Refused
from lowprec.recipes import recipe

ROOT = Path(__file__).resolve().parent.parent
NETS = {  # what the page calls it: (flags of train.py, examples a step)
    "U-Net, 64x64 images": ("--model unet --size small --image_size 64", 4),
    "DiT-S/4, 64x64 images": ("--model dit --size S/4 --image_size 64", 4),
    "GPT, 512 tokens": ("--task language --size 25M --block 512", 2),
    "ResNet-18, 224x224 images": ("--task classify --model resnet18 --image_size 224", 8),
}
TRAINED = {  # recipe: whether it runs as a user runs it, too
    "fp32": True,
    "pure_bf16-stochastic": False,
    "bf16": False,
    "pure_bf16-stochastic-opt8bit": False,
    "pure_bf16-stochastic-opt4bit": False,
}
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
MIB = 2**20


def advice(args, clock):
    """Rows (dicts): net, command, flags, batch, and in bytes what was told, and the peak of a process that
    gives freed memory back, and where it was measured of one that keeps it.
    """
    rows = []
    with progress_bar(len(NETS) * len(TRAINED)) as bar:
        for net in NETS:
            told = told_of(net)
            for name in TRAINED:
                bar.set_postfix_str(f"{net} {name}")
                rows.append(measured(net, name, told, args.threads or 1))
                print(rows[-1], flush=True)
                bar.update()
    print(table(rows))
    return rows


def measured(net, name, told, threads):
    """The row of a net in a recipe. told: {flags: bytes}."""
    words, batch = NETS[net]
    flags = typed(RECIPES[name]) or "(none)"
    row = dict(net=net, command=f"train.py {words}", flags=flags, batch=batch, told=told[flags])
    command = ["-m", "benchmarks.advice", json.dumps([words.split(), RECIPES[name], batch, threads])]
    row["peak"] = int(output(command, FREED_AT_ONCE))
    if TRAINED[name]:
        row["peak_kept"] = int(output(command))
    return row


def told_of(net):
    """{flags: bytes at once} that the command tells of a net."""
    words, batch = NETS[net]
    answer = json.loads(output(["train.py", "--advise", *words.split(), "--batch", str(batch), "--json"]))
    return {row["flags"]: row["total_bytes"] for row in answer["rows"]}


def output(words, environment=None):
    """What Python prints with these words, in a new process. Raises Refused where it fails."""
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Refused(f"{words}: exit status {done.returncode}: {lines[-1]}")
    return done.stdout


def main(cell):
    """Train a net in a recipe, and print the peak. cell: JSON of flags, recipe, examples a step, threads."""
    words, flags, batch, threads = json.loads(cell)
    torch.set_num_threads(threads)
    timing.seconds_a_step(strategies.subject(words), recipe(**flags), batch, steps=1)
    print(peak())


def peak():
    """Bytes that this process had in memory at most."""
    status = Path("/proc/self/status").read_text()
    for line in status.splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise Refused("/proc/self/status says nothing of the peak: this bench needs Linux")


def table(rows):
    """Markdown: told and real, in MiB, and by how much they differ."""
    heads = ["net", "flags", "told, MiB", "peak, MiB", "off, %", "with freed memory kept, MiB", "off, %"]
    lines = []
    for row in rows:
        cells = [row["net"], f"`{row['flags']}`", f"{row['told'] / MIB:,.0f}"]
        for column in ("peak", "peak_kept"):
            size = row.get(column)
            cells.append("-" if size is None else f"{size / MIB:,.0f}")
            cells.append("-" if size is None else f"{100 * (size / row['told'] - 1):+.0f}")
        lines.append(cells)
    return markdown(heads, lines)


COMMAND = Command(
    "advice",
    "the peak of a process that trains, beside what `python -m lowprec advise` says",
    advice,
    cpu_only=True,
)

if __name__ == "__main__":
    main(sys.argv[1])
