"""bench.py peers: a whole training step in a bare loop of torch, in Lightning, in Accelerate, and here.

All loops of a net take turns step by step; the figure of each is a ratio to the bare loop in fp32
(other_loops.py has the loops). With --tasks: a step of each task in fp32, in the bare loop and
here, with the task's own net, data and loss.
"""

import contextlib
import io
import statistics
import tempfile
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import (
    Cell,
    Command,
    Flag,
    in_turn,
    progress_bar,
    rows_by,
    started_cells,
    take_turns,
    timed,
)
from benchmarks.records import of_record
from experiments.bench.other_loops import KINDS_OF_PRECISION, LOOPS, stepper
from harness.printing import markdown_table
from lowprec.attention import attend
from lowprec.errors import Refused

LOOP_NETS = {
    "U-Net, 64x64": "--task rflow --model unet --size small --image_size 64 --batch_size 8",
    "DiT S/8, 64x64": "--task rflow --model dit --size S/8 --image_size 64 --batch_size 8",
    "GPT": "--task language --model gpt --batch_size 16",
}
LOOPS_AND_KINDS = [
    *product(["bare loop", "Lightning"], KINDS_OF_PRECISION),
    ("Accelerate", "bf16"),  # it has one mode in a process
    *product(["ours"], KINDS_OF_PRECISION),
]
REFERENCE_LOOP = "bare loop, fp32"
LOOP_WARM_UP_STEPS = 4  # steps: compiling, states, and the batch that Lightning fetches ahead


def peers(args, clock):
    """Rows (dicts): net, loop, kind, ms of each round, or a note."""
    if args.tasks is not None:
        return beside_bare(args, clock)
    rows = machine_rows(args, clock)
    with tempfile.TemporaryDirectory() as folder, no_warnings():
        for net in args.only:
            found = compare_loops(net, args, folder, clock)
            rows += found
            print(f"\n{net}\n\n{net_table(found)}", flush=True)
    if args.out:
        draw_speeds(rows, Path(args.out).with_suffix(".png"))
    return rows


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and on batches of unknown size
        yield


def warm_stepper(loop, kind, flags, folder, device):
    """step() of a loop after its first steps, all without a word. Raises Refused without its package."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        step = stepper(loop, kind, flags, folder, device)
        for _ in range(LOOP_WARM_UP_STEPS):
            step()
    return step


# ---- What the machine could do -----------------------------------------------------------------------------


def operations(device, dtype):
    """{name: a call} of bare operations in a dtype. Attention is forward and backward, of the GPT's shape."""
    matrix = torch.randn(1024, 1024, device=device, dtype=dtype)
    images = torch.randn(8, 64, 64, 64, device=device, dtype=dtype)
    kernel = torch.randn(64, 64, 3, 3, device=device, dtype=dtype)
    heads = [torch.randn(16, 4, 128, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def attention(attend):
        out = attend(*heads, is_causal=True)
        torch.autograd.grad(out, heads, out.detach())

    return {
        "matmul": partial(torch.mm, matrix, matrix),
        "convolution": partial(F.conv2d, images, kernel),
        "attention as torch chooses it": partial(attention, F.scaled_dot_product_attention),
        "attention as chosen here": partial(attention, attend),
    }


def machine_rows(args, clock):
    """Rows (dicts) of bare operations: seconds in fp32 over seconds in bf16, by turns."""
    cells = []
    for dtype, column in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for name, act in operations(args.device, dtype).items():
            cells.append(Cell(f"{name}, {column}", {}, [partial(in_turn, act, clock, 3, name)]))
    with progress_bar(len(cells) * args.repeats) as bar:
        take_turns(cells, args.repeats, bar)
    ms = {}
    for cell in cells:
        for name, times in cell.row.items():
            ms.setdefault(name, []).append(statistics.median(times))
    rows = []
    for name, (fp32, bf16) in ms.items():
        rows.append(dict(net="bare operation", loop=name, kind="bf16", ratio=fp32 / bf16))
    words = ", ".join(f"{row['loop']} {row['ratio']:.2f}" for row in rows)
    print(f"bf16 against fp32, bare operations of this machine: {words}", flush=True)
    return rows


# ---- Loops beside each other -------------------------------------------------------------------------------


def compare_loops(net, args, folder, clock):
    """Rows of one net, whose loops take turns."""

    def start(loop_and_kind):
        loop, kind = loop_and_kind
        row = dict(net=net, loop=loop, kind=kind, flags=LOOP_NETS[net], ms=[], note="")
        name = loop_name(row)
        try:
            step = warm_stepper(loop, kind, LOOP_NETS[net], folder, args.device)
        except Refused as error:
            row["note"] = str(error)
            return Cell(name, row)
        return Cell(name, row, [partial(in_turn, step, clock)])

    with progress_bar(len(LOOPS_AND_KINDS) * (args.repeats + 1)) as bar:
        rows = take_turns(started_cells(LOOPS_AND_KINDS, start, bar, net), args.repeats, bar)
    add_ratios(rows)
    return rows


def loop_name(row):
    return f"{row['loop']}, {row['kind']}"


def add_ratios(rows):
    """Speed against the first row: the median over rounds of the ratio within a round."""
    first = next(row["ms"] for row in rows if loop_name(row) == REFERENCE_LOOP)
    for row in rows:
        if row["ms"]:
            row["ratio"] = statistics.median(a / b for a, b in zip(first, row["ms"], strict=True))


def net_table(rows):
    """Markdown: a line a loop, a column a kind of precision, speed against the bare loop in fp32."""
    cells = {(row["loop"], row["kind"]): row["note"] or f"{row['ratio']:.2f}" for row in rows}
    lines = []
    for loop in (*LOOPS, "ours"):
        lines.append([loop, *(cells.get((loop, kind), "-") for kind in KINDS_OF_PRECISION)])
    return markdown_table([["loop", *KINDS_OF_PRECISION], *lines])


def draw_speeds(rows, path):
    """A picture of bars: for each net the speed of each loop against the bare one in fp32."""
    from matplotlib.figure import Figure

    by_net = {}
    for row in rows:
        if row.get("ms"):
            by_net.setdefault(row["net"], []).append(row)
    figure = Figure(figsize=(4.2 * len(by_net), 3.6), layout="constrained")
    axes, *_ = figure.subplots(1, len(by_net), squeeze=False)
    for axis, (net, shown) in zip(axes, by_net.items(), strict=True):
        draw_net(axis, net, shown[::-1])
    figure.savefig(path, dpi=110)


def draw_net(axis, net, rows):
    colours = dict(zip(KINDS_OF_PRECISION, ("#8c8c8c", "#4c72b0", "#dd8452"), strict=True))
    for place, row in enumerate(rows):
        bar = axis.barh(place, row["ratio"], color=colours[row["kind"]])
        axis.bar_label(bar, fmt="%.2f", padding=2, fontsize=8)
    axis.set_yticks(range(len(rows)), [loop_name(row) for row in rows], fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_title(net, fontsize=10)
    axis.set_xlabel("speed of a step, bare fp32 loop = 1", fontsize=8)
    axis.margins(x=0.12)


# ---- Each task beside a bare loop --------------------------------------------------------------------------

# {what a task is: its flags}. {flow}, {vae}: folders of runs of one step
TIMED_TASKS = {
    "classify, CNN": "--task classify",
    "classify, ResNet-18": "--task classify --model resnet18",
    "classify, ViT": "--task classify --model vit",
    "segment": "--task segment",
    "language, BDH": "--task language --model bdh",
    "vae": "--task vae",
    "rflow in latents": "--task rflow --vae {vae}",
    "rflow, perceptual": "--task rflow --perceptual 0.1",
    "consistency": "--task consistency",
    "distill": "--task distill --teacher {flow}",
    "steve": "--task steve",
    "slotcontrast": "--task slotcontrast",
}
RUNS_STARTED_FROM = {"flow": "--task rflow --samples 16 --sample_steps 2", "vae": "--task vae"}
ROUND_LENGTH_MS = 300  # ms of steps that a loop does in a row, at least
BARE_AND_OURS = ("bare loop", "ours")


def beside_bare(args, clock):
    """Rows (dicts): task, loop, flags, steps a round, ms a step of each round."""
    rows = []
    names = args.tasks or list(TIMED_TASKS)
    with tempfile.TemporaryDirectory() as folder, no_warnings():
        folders = {}
        for start in RUNS_STARTED_FROM:
            if any(f"{{{start}}}" in TIMED_TASKS[name] for name in names):
                folders[start] = one_step_run(start, folder, args)
        with progress_bar(len(names) * len(BARE_AND_OURS) * (args.repeats + 1)) as bar:
            for name in names:
                rows += task_rows(name, TIMED_TASKS[name].format(**folders), folder, args, clock, bar)
    print(task_speeds_table(rows), flush=True)
    return rows


def one_step_run(name, folder, args):
    """The folder of a run of one step, which other tasks start from. Raises Refused."""
    import train

    words = f"--steps 1 --sample_every 0 --ema_warmup --name {name}"
    words = [*RUNS_STARTED_FROM[name].split(), *words.split(), "--runs", folder, "--device", args.device.type]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = train.main(words)
    if status:
        raise Refused(f"the run of one step that {name} is did not end: {said.getvalue().strip()[-200:]}")
    return f"{folder}/{name}"


def task_rows(name, flags, folder, args, clock, bar):
    """The two rows of one task, whose loops take turns."""
    steps = {}

    def start(loop):
        steps[loop] = warm_stepper(loop, "fp32", flags, folder, args.device)
        row = dict(task=name, kind="fp32", flags=TIMED_TASKS[name], steps=None, loop=loop)
        return Cell(f"{name}: {loop}", row)

    cells = started_cells(BARE_AND_OURS, start, bar, name)
    count = max(1, round(ROUND_LENGTH_MS / timed(steps["ours"], clock)))
    for cell in cells:
        cell.row["steps"] = count
        cell.turns = [partial(in_turn, steps[cell.row["loop"]], clock, count)]
    return take_turns(cells, args.repeats, bar)


def bare_to_ours(bare, ours):
    """[time of a step here / that of the bare loop, of each round] of the two rows of a task."""
    return [b / a for a, b in zip(bare["ms"], ours["ms"], strict=True)]


def task_speeds_table(rows):
    """Markdown: a line a task."""
    lines = []
    for task, (bare, ours) in rows_by(rows, "task").items():
        ratios = bare_to_ours(bare, ours)
        low = high = ratios[0]
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4)
        times = [f"{statistics.median(row['ms']):.0f}" for row in (bare, ours)]
        quartiles = f"{low:.2f} to {high:.2f}"
        lines.append([task, f"`{bare['flags']}`", *times, f"{statistics.median(ratios):.2f}", quartiles])
    heads = ["task", "command", "bare loop, ms", "ours, ms", "ours / bare loop", "half of the rounds"]
    return markdown_table([heads, *lines])


# ---- The page ----------------------------------------------------------------------------------------------


def one_net_table(rows, net):
    return net_table([row for row in rows if row["net"] == net]).replace("| loop |", f"| {net} |", 1)


def bare_and_ours_table(rows):
    """Speeds of the bare loop and of ours, a column a net."""
    ratios = {}
    for row in rows:
        ratios[row["loop"], row["kind"], row["net"]] = f"{row['ratio']:.2f}"
    lines = []
    for kind in KINDS_OF_PRECISION:
        for loop in BARE_AND_OURS:
            lines.append([f"{loop}, {kind}", *(ratios[loop, kind, net] for net in LOOP_NETS)])
    return markdown_table([["loop", *LOOP_NETS], *lines])


TABLES = {
    "docs/speed.md": {
        "peers amd": of_record(bare_and_ours_table, "cpu-peers-amd"),
        "tasks": of_record(task_speeds_table, "cpu-tasks"),
    }
}
for net in LOOP_NETS:
    TABLES["docs/speed.md"][f"peers {net}"] = of_record(partial(one_net_table, net=net), "cpu-peers")

COMMAND = Command(
    "peers",
    "a step of the same net in other people's loops",
    peers,
    repeats=9,
    flags=(
        Flag("--only", list(LOOP_NETS), "nets", choices=LOOP_NETS),
        Flag("--tasks", None, "these (all: no name) beside a bare loop", choices=TIMED_TASKS, many="*"),
    ),
)
