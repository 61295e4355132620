"""bench.py training: images a second of U-Nets and DiTs under each recipe, by the whole step. (5 minutes)

Each recipe takes two turns a round, without and with telemetry. Forward and backward are timed apart from the
optimiser and the average.
"""

import functools
import statistics
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch.nn.functional as F

from benchmarks.allocated import bytes_on, peak_bytes
from benchmarks.common import (
    RECIPES,
    Cell,
    Command,
    DeviceClock,
    Flag,
    check_nets,
    nets_flag,
    or_dash,
    parse_net,
    prepared,
    progress_bar,
    rows_by,
    started_cells,
    take_turns,
    timed,
)
from benchmarks.records import H100_COMPILED, median_ms, milliseconds, rows_of_record
from harness.printing import markdown_table
from lowprec.advice.text import layout
from lowprec.kernels import cpu_products
from lowprec.precision import recipe
from lowprec.rules import check_machine

ON_REQUEST = ("tf32", "fp16")  # what a CPU has not got, or is slow in
USUAL_RECIPES = (
    "fp32",
    "bf16",
    "pure_bf16",
    "pure_bf16-stochastic",
    "pure_bf16-kahan",
    "pure_bf16-split",
    "opt8bit",
)
TRAINING_RECIPES = (*USUAL_RECIPES, *ON_REQUEST)
TRAINING_NETS = ["unet:small:64:8", "unet:tiny:8:64", "dit:tiny:8:64", "dit:S/8:64:8"]


def check(args):
    check_nets(args.nets)
    for name in args.recipes:
        check_machine(recipe(**RECIPES[name]), args.device)


def make_run(net, flags, device):
    """(Precision over the net, callable(measure) -> (ms of forward and backward, ms of step and EMA)).

    flags: as `precision.recipe` takes them. measure: whether telemetry is read.
    """
    run, inputs, velocity = prepared(net, flags, device)
    clock = DeviceClock(device)

    def step(measure):
        clock.wait()
        start = clock.mark()
        run.backward(F.mse_loss(run(*inputs), velocity))
        middle = clock.mark()
        run.step(measure=measure)
        end = clock.mark()
        clock.wait()
        return clock.ms(start, middle), clock.ms(middle, end)

    return run, step


def started_cell(spec, name, device):
    """The Cell of a recipe on a net, after its first steps."""
    before = bytes_on(device)
    run, step = make_run(parse_net(spec), RECIPES[name], device)
    row = dict(net=spec, recipe=name, batch_size=parse_net(spec)[3], peak_bytes=None)
    row["first_step_s"] = timed(partial(step, False), DeviceClock(device)) / 1e3
    step(True)
    row["peak_bytes"] = peak_bytes(partial(step, False), device, before)
    ledger = run.ledger()
    row.update(parameters=ledger.parameters, bytes_per_parameter=ledger.state_bytes)

    def plain():
        forward_and_backward, update = step(False)
        return {"ms": forward_and_backward + update, "step_ms": update}

    def measured():
        forward_and_backward, update = step(True)
        return {"measured_ms": forward_and_backward + update, "measured_step_ms": update}

    return Cell(name, row, [plain, measured])


def training(args, clock):
    """Rows (dicts): net, recipe, ms of each round, without and with telemetry, and bytes."""
    rows = []
    torchs_own = nullcontext()
    if args.products == "torch":
        torchs_own = patch.object(cpu_products, "settle_products")
    with torchs_own, progress_bar(len(args.nets) * len(args.recipes) * (2 * args.repeats + 1)) as bar:
        for spec in args.nets:
            make = partial(started_cell, spec, device=args.device)
            cells = started_cells(args.recipes, make, bar, spec)
            rows += take_turns(cells, args.repeats, bar)
    for spec, of_net in rows_by(rows, "net").items():
        print_net(spec, of_net, args)
    every = f"cost of measuring every {args.measure_every} steps"
    print(
        f"\nstep: optimiser and EMA. telemetry: {every}. B/param:\nweights, gradients, optimiser states. "
        "peak: CUDA allocator; not measured on a CPU, where one process holds\nall recipes at once."
    )
    return rows


def print_net(spec, rows, args):
    medians = {row["recipe"]: statistics.median(row["ms"]) for row in rows}
    fp32 = medians.get("fp32")
    print(f"\n{spec} (model:size:image:batch): {rows[0]['parameters']:,} parameters, {args.repeats} rounds")
    heads = ("recipe", "images/s", "x fp32", "ms", "step", "telemetry", "B/param", "peak MiB", "first step s")
    lines = [heads]
    for row in rows:
        ms = medians[row["recipe"]]
        step = statistics.median(row["step_ms"])
        # the difference is in step() alone; forward and backward, the noisier part, are the same
        extra = (statistics.median(row["measured_step_ms"]) - step) / args.measure_every / ms
        peak = row["peak_bytes"] and row["peak_bytes"] / 2**20
        faster = fp32 and fp32 / ms
        images = row["batch_size"] / ms * 1e3
        figures = f"{images:.1f}", or_dash(faster, ".2f"), f"{ms:.2f}", f"{step / ms:.1%}", f"{extra:.2%}"
        sizes = f"{row['bytes_per_parameter']:.2f}", or_dash(peak, ".1f"), f"{row['first_step_s']:.2f}"
        lines.append((row["recipe"], *figures, *sizes))
    print(layout(lines))


# ---- The pages ---------------------------------------------------------------------------------------------

TIMED_FLAGS = ["`--bf16`", "`--pure_bf16 --stochastic`"]
TRAINED_NETS = {  # (record, net): what the page calls it
    ("cpu-training-64x64", "unet:small:64:8"): "U-Net, 64 and 128 channels, 64x64 images",
    ("cpu-training-64x64", "dit:S/8:64:8"): "DiT S/8, 64x64 images",
    ("cpu-training-8x8", "unet:tiny:8:64"): "tiny U-Net, 8x8 images: overheads hide the gain",
    ("cpu-training-8x8", "dit:tiny:8:64"): "tiny DiT, 8x8 images",
}


def training_table():
    lines = []
    for (record, net), said in TRAINED_NETS.items():
        rows = rows_of_record(record)
        fp32 = median_ms(rows, net=net, recipe="fp32")
        speeds = []
        for name in ("bf16", "pure_bf16-stochastic"):
            speeds.append(f"{fp32 / median_ms(rows, net=net, recipe=name):.1f}")
        lines.append([said, *speeds, f"`{record}.json`, `{net}`"])
    return markdown_table([["net", *TIMED_FLAGS, "record in `experiments/bench/`"], *lines])


PRODUCT_NETS = {"unet:tiny:8:64": "tiny U-Net, 8x8 images", "dit:tiny:8:64": "tiny DiT, 8x8 images"}


def products_table():
    """Whole steps on a CPU without bf16 instructions, as speeds against fp32."""
    lines = []
    columns = (
        ("cpu-products", "bf16"),
        ("cpu-products", "pure_bf16-stochastic"),
        ("cpu-products-of-torch", "bf16"),
    )
    for net, said in PRODUCT_NETS.items():
        speeds = []
        for record, name in columns:
            fp32 = median_ms(rows_of_record(record), net=net, recipe="fp32")
            speeds.append(f"{fp32 / median_ms(rows_of_record(record), net=net, recipe=name):.2f}")
        lines.append([said, *speeds])
    return markdown_table([["net", *TIMED_FLAGS, "`--bf16` with torch's own products"], *lines])


SYSTEMS = "cpu-systems"  # a record whose rows are named otherwise
SPEED_COLUMNS = {  # what the page calls it: (record, net)
    "U-Net, 64x64 images": ("cpu-training-64x64", "unet:small:64:8"),
    "DiT S/8, 64x64 images": ("cpu-training-64x64", "dit:S/8:64:8"),
    "BDH, text": (SYSTEMS, "language"),
    "DiT-XL/2 on an H100, compiled": (H100_COMPILED, "dit:XL/2:64:8"),
}
ON_GPU = "DiT-XL/2 on an H100, compiled"
SPEED_ROWS = {  # flags: what records call them
    "--bf16": ("bf16",),
    "--pure_bf16": ("pure_bf16-nearest",),
    "--pure_bf16 --stochastic": ("pure_bf16-stochastic",),
    "--pure_bf16 --kahan": ("pure_bf16-kahan",),
    "--pure_bf16 --master split": ("pure_bf16-split",),
    "--opt8bit": ("opt8bit",),
    "--bf16 --opt8bit": ("bf16, 8-bit states",),
    "--pure_bf16 --stochastic --opt8bit": (
        "pure bf16 stochastic, 8-bit states",
        "pure_bf16-stochastic-opt8bit",
    ),
    "--fp8": ("fp8 (emulated)", "fp8-torchao-tensorwise"),
}
TF32 = "tf32"


@functools.cache
def column_speeds(column):
    """{what the record calls a recipe: its speed against the reference of the column}.

    On the H100 the reference is fp32 code that may use TF32; on CPUs, where there is none, fp32.
    """
    record, net = SPEED_COLUMNS[column]
    found = {}
    if record == SYSTEMS:
        for row in rows_of_record(record):
            if row["table"] == net and row.get("ms"):
                found[row["name"]] = row["items_a_step"] / statistics.median(row["ms"])
    else:
        for name, time in milliseconds(record, net).items():
            found[name] = 1 / time
    reference = found[TF32] if TF32 in found else found["fp32"]
    return {name: speed / reference for name, speed in found.items()}


def speed_text(column, flags):
    """'1.8', or '-' where it was not measured."""
    known = column_speeds(column)
    for name in SPEED_ROWS.get(flags, ()):
        if name in known:
            return f"{known[name]:.1f}"
    return "-"


def speeds_table():
    lines = []
    for flags in SPEED_ROWS:
        cells = [speed_text(column, flags) for column in SPEED_COLUMNS]
        if set(cells) != {"-"}:
            lines.append([f"`{flags}`", *cells])
    return markdown_table([["flags", *SPEED_COLUMNS], *lines])


TABLES = {
    "docs/speed.md": {"training": training_table, "products": products_table},
    "docs/recipes.md": {"speeds": speeds_table},
}

COMMAND = Command(
    "training",
    "one training step under each recipe",
    training,
    repeats=7,
    flags=(
        nets_flag(*TRAINING_NETS),
        Flag("--recipes", list(USUAL_RECIPES), "what is trained", choices=TRAINING_RECIPES),
        Flag("--measure_every", 50, "steps between two measurements of telemetry"),
        Flag("--products", "ours", "those of a CPU without bf16", choices=["ours", "torch"]),
    ),
    check=check,
)
