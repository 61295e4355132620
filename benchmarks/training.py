"""How long a training step takes in each recipe, and what becomes of a second moment after a drop."""

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.common import ADAMW, RECIPES, Clock, after_a_drop, cell, parse_net, prepared, take_turns
from lowprec.optimizers import adamw, build
from lowprec.precision import recipe

ON_REQUEST = ("tf32", "fp16")  # what a CPU has not got, or is slow in
TRAINED = ("fp32", "bf16", "pure_bf16", "pure_bf16-stochastic", "pure_bf16-kahan", "pure_bf16-split")
NETS = ["unet:small:64:8", "unet:tiny:8:64", "dit:tiny:8:64", "dit:S/8:64:8"]


def make_run(net, flags, args):
    """(Precision over the net, callable(measure) -> (ms of forward and backward, ms of step and EMA)). flags:
    as `precision.recipe` takes them.
    """
    run, inputs, velocity = prepared(net, flags, args.device)
    clock = Clock(args.device)

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


def bench_net(spec, args, bar):
    """Rows (dicts) of one net: recipe, ms of each round (whole step; optimiser and EMA; both with telemetry),
    bytes.
    """
    rows, actions, cuda = [], {}, args.device.type == "cuda"
    for name in args.recipes:
        bar.set_postfix_str(f"{spec}: first step of {name}")
        before = torch.cuda.memory_allocated() if cuda else 0
        run, step = make_run(parse_net(spec), RECIPES[name], args)
        row = dict(net=spec, recipe=name, batch_size=parse_net(spec)[3], peak_bytes=None)
        start = time.perf_counter()
        step(False)
        row["first_step_s"] = time.perf_counter() - start
        step(True)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step(False)
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        ledger = run.ledger()
        row.update(parameters=ledger.parameters, bytes_per_parameter=ledger.state_bytes)
        rows.append(row)
        for measure in (False, True):
            actions[name, measure] = partial(step, measure)
        bar.update()
    times = take_turns(actions, args.repeats, bar)
    for row in rows:
        plain, measured = times[row["recipe"], False], times[row["recipe"], True]
        row.update(ms=[a + b for a, b in plain], step_ms=[b for _, b in plain])
        row.update(measured_ms=[a + b for a, b in measured], measured_step_ms=[b for _, b in measured])
    return rows


def training(args, clock):
    rows, total = [], len(args.nets) * len(args.recipes) * (2 * args.repeats + 1)
    with tqdm(total=total, disable=None, leave=False) as bar:
        for spec in args.nets:
            rows += bench_net(spec, args, bar)
    for spec in args.nets:
        _print_net(spec, [row for row in rows if row["net"] == spec], args)
    every = f"cost of measuring every {args.measure_every} steps"
    print(
        f"\nstep: optimiser and EMA. telemetry: {every}. B/param:\nweights, gradients, optimiser states. "
        "peak: CUDA allocator; not measured on a CPU, where one process holds\nall recipes at once."
    )
    return rows


def _print_net(spec, rows, args):
    unit = next((statistics.median(row["ms"]) for row in rows if row["recipe"] == "fp32"), None)
    print(f"\n{spec} (model:size:image:batch): {rows[0]['parameters']:,} parameters, {args.repeats} rounds")
    heads = f"{'recipe':<22}{'images/s':>10}{'x fp32':>8}{'ms':>9}{'step':>8}{'telemetry':>11}{'B/param':>9}"
    print(f"{heads}{'peak MiB':>10}{'first step s':>14}")
    for row in rows:
        ms, step = statistics.median(row["ms"]), statistics.median(row["step_ms"])
        # the difference is in step() alone; forward and backward, the noisier part, are the same
        extra = (statistics.median(row["measured_step_ms"]) - step) / args.measure_every / ms
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        faster = "-" if unit is None else f"{unit / ms:.2f}"
        figures = f"{row['batch_size'] / ms * 1e3:>10.1f}{faster:>8}{ms:>9.2f}{step / ms:>8.1%}{extra:>11.2%}"
        sizes = f"{row['bytes_per_parameter']:>9.2f}{cell(peak, '.1f'):>10}"
        print(f"{row['recipe']:<22}{figures}{sizes}{row['first_step_s']:>14.2f}")


HOLDERS = ["fp32 nearest", "bitsandbytes"]


def holder(name, device="cpu"):
    """(optimiser, its parameter of 4,096 zeros, callable that reads exp_avg_sq) for 'bitsandbytes' or
    '<exp_avg_sq> <update>' of ours.
    """
    p = torch.nn.Parameter(torch.zeros(4096, device=device))
    kind, _, update = name.partition(" ")
    if kind == "bitsandbytes":
        still = dict(ADAMW, lr=0.0, weight_decay=0.0)
        made = build.build(kind, [p], recipe(opt8bit=True), **still)
    else:
        made = adamw.AdamW([p], lr=0.0, exp_avg_sq=kind, update=update)

    def read():
        return made.moment(p, "exp_avg_sq").float()

    return made, p, read


def moments(args, clock):
    rows = []
    with tqdm(total=len(HOLDERS) * (args.before + args.after), disable=None, leave=False) as bar:
        for name in HOLDERS:
            bar.set_postfix_str(name)
            dropped, others = after_a_drop(*holder(name, args.device), args.before, args.after, bar)
            rows.append(dict(name=name, dropped=dropped, others=others))
    print(f"\nexp_avg_sq over the exact one, {args.before} steps before the drop, {args.after} after\n")
    print(moments_table(rows))
    return rows


def moments_table(rows):
    """Markdown of the rows of `moments`."""
    title = {"bitsandbytes": "int8, bitsandbytes' own AdamW8bit"}
    lines = ["| exp_avg_sq | of the dropped half | of the others |", "|---|---|---|"]
    for row in rows:
        name = title.get(row["name"], row["name"].replace(" ", ", "))
        lines.append(f"| {name} | {row['dropped']:.2f} | {row['others']:.2f} |")
    return "\n".join(lines)
