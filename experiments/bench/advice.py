"""bench.py advice: the peak of a process that trains, beside what `advise` says of it. (an hour, 4 GiB)

Each net and recipe is trained for two steps in a process of its own, which then says how much memory it had
at most. Peaks on a GPU are those of the record of `bench.py --gpu`.
"""

import json

import torch

from benchmarks.common import (
    BYTES_A_MIB,
    RECIPES,
    Command,
    built_net,
    loss_of_images,
    parse_net,
    progress_bar,
)
from benchmarks.records import of_record
from experiments.bench import ROOT, printed_by_python
from harness.printing import markdown_table
from lowprec.advice.answer import advise
from lowprec.evidence import typed

ADVISED_NETS = {  # what the page calls it: (flags of train.py, examples a step)
    "U-Net, 64x64 images": ("--model unet --size small --image_size 64", 4),
    "DiT-S/4, 64x64 images": ("--model dit --size S/4 --image_size 64", 4),
    "GPT, 512 tokens": ("--task language --size 25M --block 512", 2),
    "ResNet-18, 224x224 images": ("--task classify --model resnet18 --image_size 224", 8),
}
ADVISED_RECIPES = (
    "fp32",
    "pure_bf16-stochastic",
    "bf16",
    "pure_bf16-stochastic-opt8bit",
    "pure_bf16-stochastic-opt4bit",
)
GPU_RECORD = "experiments/bench/gpu-nvidia-h100-80gb-hbm3.json"
GPU_NET = "dit:B/2:32:64"
ON_A_GPU = {  # what the record calls a recipe: its flags
    "fp32": "(none)",
    "bf16": "--bf16",
    "pure_bf16-stochastic": "--pure_bf16 --stochastic",
    "fp8-torchao-tensorwise": "--fp8",
}


def advice(args, clock):
    """Rows (dicts): net, command, flags, batch, and in bytes what was told and the peak of a process."""
    rows = []
    with progress_bar(len(ADVISED_NETS) * len(ADVISED_RECIPES)) as bar:
        for net in ADVISED_NETS:
            told = advised_bytes(net)
            for name in ADVISED_RECIPES:
                bar.set_postfix_str(f"{net} {name}")
                rows.append(measured(net, name, told, args.threads or 1))
                print(rows[-1], flush=True)
                bar.update()
    rows += on_a_gpu()
    print(table(rows))
    return rows


def on_a_gpu():
    """Rows of the net of GPU_RECORD, whose peaks CUDA's allocator told."""
    with torch.device("meta"):
        net = built_net(parse_net(GPU_NET))
    found = advise(net, loss_of_images(32), gpu="H100", batch=64).rows
    told = {row.candidate.typed: round(row.total) for row in found}
    rows = []
    for row in json.loads((ROOT / GPU_RECORD).read_text(encoding="utf-8"))["results"]:
        flags = ON_A_GPU.get(row["recipe"])
        if flags and row["net"] == GPU_NET and not row["compile"]:
            net = "DiT-B/2, 32x32 images, on an H100"
            rows.append(dict(net=net, flags=flags, batch=64, told=told[flags], peak=row["peak_bytes"]))
    return rows


def measured(net, name, told, threads):
    """The row of a net in a recipe. told: {flags: bytes}."""
    words, batch = ADVISED_NETS[net]
    flags = typed(RECIPES[name]) or "(none)"
    row = dict(net=net, command=f"train.py {words}", flags=flags, batch=batch, told=told[flags])
    cell = json.dumps([words.split(), RECIPES[name], batch, threads])
    command = ["-m", "experiments.bench.advice_process", cell]
    row["peak"] = int(printed_by_python(command))
    return row


def advised_bytes(net):
    """{flags: bytes at once} that the command tells of a net."""
    words, batch = ADVISED_NETS[net]
    command = ["train.py", "--advise", *words.split(), "--batch", str(batch), "--json"]
    answer = json.loads(printed_by_python(command))
    return {row["flags"]: row["total_bytes"] for row in answer["rows"]}


def table(rows):
    """Markdown: told and real, in MiB, and by how much they differ."""
    heads = ["net", "flags", "told, MiB", "peak, MiB", "off, %"]
    lines = []
    for row in rows:
        told, peak = row["told"], row["peak"]
        off = 100 * (peak / told - 1)
        sizes = [f"{told / BYTES_A_MIB:,.0f}", f"{peak / BYTES_A_MIB:,.0f}", f"{off:+.0f}"]
        lines.append([row["net"], f"`{row['flags']}`", *sizes])
    return markdown_table([heads, *lines])


TABLES = {"docs/advise.md": {"peaks": of_record(table, "cpu-advice")}}

COMMAND = Command(
    "advice",
    "the peak of a process that trains, beside what `python -m lowprec advise` says",
    advice,
    cpu_only=True,
)
