"""Speed and memory of the recipes and of other libraries' optimisers, as ratios measured side by side in one run.

    python bench.py optimizers    one AdamW step on 10 million bf16 parameters, ours and peers (requirements-bench.txt)
    python bench.py training      forward, backward, step and EMA of U-Nets and DiTs under each recipe: images a second
    python bench.py memory        bytes a parameter that weights, gradients and states take, for each way to write and to hold them
    python bench.py moments       exp_avg_sq after half of the gradients dropped to a hundredth: held high by rounding, or not
    python bench.py --gpu         everything that needs a GPU, on nets of real size (bench_gpu.py); --gpu --help

What it shows: the fused step is the fastest of those that round stochastically or carry a Kahan compensation, in
tensors of mixed sizes as in a real net and in a few large ones; bf16 speeds up training where the machine multiplies in
bf16; telemetry costs under 2 % of a step. Contenders take turns, in an order shuffled for each round, so that other
load on the machine meets all of them alike. A figure is the median over the rounds; --out FILE keeps every single time.
Cost on 2 cores: about 2 minutes and 3 GiB for `optimizers` (more the first time: torchao compiles each shape), about
5 minutes for `training`, 2 minutes and 2 GiB for `memory`, 2 minutes for `moments`. Bad input ends with one line and exit status 2.
"""

import argparse
import datetime
import logging
import math
import os
import random
import shlex
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import precision
from precision import Precision, Recipe, RecipeError, recipe

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01

# name: (what keeps small updates from being lost, recipe, --optimizer of train.py)
PURE = recipe(pure_bf16=True)
CONTENDERS = {
    "stochastic": ("stochastic w m v", recipe(pure_bf16=True, stochastic=True), "adamw"),
    "nearest": ("none", PURE, "adamw"),
    "kahan": ("compensated w", recipe(pure_bf16=True, kahan=True), "adamw"),
    "kahan-stochastic": ("compensated w, stochastic m v", recipe(pure_bf16=True, kahan=True, stochastic=True), "adamw"),
    "split": ("exact w", recipe(pure_bf16=True, master="split"), "adamw"),
    "fp32": ("fp32 weights", Recipe(), "adamw"),
    "stochastic-8bit": ("stochastic w m v", recipe(pure_bf16=True, stochastic=True, opt8bit=True), "adamw"),
    "stochastic-4bit": ("stochastic w m v", recipe(pure_bf16=True, stochastic=True, opt4bit=True), "adamw"),
    "torchastic": ("stochastic w m v", PURE, "torchastic"),
    "torchao": ("stochastic w", PURE, "torchao"),
    "optimi": ("compensated w", PURE, "optimi"),
    "adamw-bf16": ("compensated w, stochastic w m", PURE, "adamw_bf16"),
    "bitsandbytes": ("none", recipe(pure_bf16=True, opt8bit=True), "bitsandbytes"),
    "torch": ("none", PURE, "torch"),
    "torch-fused": ("none", PURE, None),
    "copy": ("moves the bytes of a step", PURE, None),
}
LAYOUTS = ["mixed", "large"]
OURS = ("stochastic", "nearest", "kahan", "kahan-stochastic", "split", "fp32", "stochastic-8bit", "stochastic-4bit")

RECIPES = {
    "fp32": {}, "bf16": dict(bf16=True), "pure_bf16": dict(pure_bf16=True),
    "pure_bf16-stochastic": dict(pure_bf16=True, stochastic=True), "pure_bf16-kahan": dict(pure_bf16=True, kahan=True),
    "pure_bf16-split": dict(pure_bf16=True, master="split"), "opt8bit": dict(opt8bit=True),
    "tf32": dict(sites=["compute=tf32"]), "fp16": dict(fp16=True),
}
# how weights are written (rows) and moments held (columns), as flags of train.py
WRITES = ["", "--pure_bf16", "--pure_bf16 --stochastic", "--pure_bf16 --kahan", "--pure_bf16 --kahan --stochastic", "--pure_bf16 --master split"]
STATES = ["", "--opt8bit", "--opt4bit"]
NETS = ["unet:small:64:8", "unet:tiny:8:64", "dit:tiny:8:64", "dit:S/8:64:8"]


class BenchError(ValueError):
    """What was asked can't be measured. The message is one line: what is wrong and what to do."""


# ----------------------------------------------------------------------------------------------------------------------
# Timing


class Clock:
    """Marks in time on a device and the milliseconds between them; on CUDA events, which don't hold up the queue."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        return start.elapsed_time(end) if self.cuda else (end - start) * 1e3


def take_turns(actions, repeats, bar, prepare=lambda name: None):
    """{name: [result of actions[name]() in each round]}; each round runs all of them once, in an order of its own."""
    results, order, rng = {name: [] for name in actions}, list(actions), random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            prepare(name)
            bar.set_postfix_str(str(name), refresh=False)
            results[name].append(actions[name]())
            bar.update()
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Optimisers


def layout_shapes(layout, n):
    """Shapes of n parameters. 'large': four vectors. 'mixed': blocks of four widths as in a U-Net or transformer, where
    most tensors are vectors and most values lie in kernels and matrices."""
    if layout == "large":
        return [(n // 4 + (i < n % 4),) for i in range(4) if n // 4 + (i < n % 4)]
    shapes, left, i = [], n, 0
    block = [shape for w in (32, 64, 128, 256) for shape in (
        (w, w, 3, 3), (w,), (w,), (w,), (w, w), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,))]
    while left and math.prod(block[i % len(block)]) <= left:
        shapes.append(block[i % len(block)])
        left -= math.prod(shapes[-1])
        i += 1
    return shapes + [(left,)] * (left > 0)


def make_step(name, params):
    """(callable that does one step on `params`, the optimiser or None). Raises RecipeError for a missing package."""
    _, r, optimizer = CONTENDERS[name]
    if name == "copy":
        # a step on bf16 reads w, g, m, v and writes w, m, v: 14 bytes a parameter, as many as copying 7
        source = torch.ones(7 * sum(p.numel() for p in params), dtype=torch.uint8, device=params[0].device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source), None
    if name == "torch-fused":
        made = torch.optim.AdamW(params, LR, BETAS, EPS, DECAY, fused=True)
    else:
        made = precision.build_optimizer(optimizer, params, r, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, seed=0)
    return made.step, made


def state_bytes(optimizer):
    """Bytes of all tensors in an optimiser's state and tables of codes, storage that several share counted once."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    tensors += [t for coder in getattr(optimizer, "coders", {}).values() for t in coder.tables.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def bench_layout(layout, args, clock, bar):
    """Rows (dicts) of one layout: name, protection, ms of each round, bytes of state a parameter, or a note why not."""
    shapes = layout_shapes(layout, args.parameters)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=generator) * 0.05 for s in shapes]
    sources = [torch.randn(s, generator=generator) * 1e-3 for s in shapes]
    grads = {dtype: [g.to(args.device, dtype) for g in sources] for dtype in (torch.bfloat16, torch.float32)}
    fresh = {dtype: [g.clone() for g in same] for dtype, same in grads.items()}
    rows, actions, dtypes = [], {}, {}

    def timed(step):
        clock.wait()
        start = clock.mark()
        step()
        end = clock.mark()
        clock.wait()
        return clock.ms(start, end)

    def refill(name):  # as after a backward; adamw-bf16 leaves zeros behind
        torch._foreach_copy_(grads[dtypes[name]], fresh[dtypes[name]])

    for name in args.only:
        bar.set_postfix_str(f"{layout}: first step of {name}")
        protection, r, _ = CONTENDERS[name]
        row = dict(layout=layout, tensors=len(shapes), name=name, protection=protection, note="", first_step_s=None,
                   state_bytes=None, ms=[])
        rows.append(row)
        dtypes[name] = r.dtype("weights")
        params = [torch.nn.Parameter(w.to(args.device, dtypes[name])) for w in weights]
        for p, g in zip(params, grads[dtypes[name]]):
            p.grad = g
        try:
            step, optimizer = make_step(name, params)
            refill(name)
            row["first_step_s"] = timed(step) / 1e3
            timed(step)
        except RecipeError as error:
            row["note"] = "not installed: " + str(error).rsplit(": ", 1)[1]
        except Exception as error:  # a peer that fails, say for want of a compiler, is a line; a bug of ours is not
            if name in OURS:
                raise
            row["note"] = f"fails here: {type(error).__name__}"
        else:
            row["state_bytes"] = state_bytes(optimizer) / args.parameters if optimizer else None
            actions[name] = lambda step=step: timed(step)
        bar.update()
    times = take_turns(actions, args.repeats, bar, refill)
    for row in rows:
        row["ms"] = times.get(row["name"], [])
    return rows


def optimizers(args, clock):
    with tqdm(total=len(args.layouts) * len(args.only) * (args.repeats + 1), disable=None, leave=False) as bar:
        rows = [row for layout in args.layouts for row in bench_layout(layout, args, clock, bar)]
    for layout in args.layouts:
        here = [row for row in rows if row["layout"] == layout]
        unit = next((statistics.median(row["ms"]) for row in here if row["name"] == "stochastic"), None)
        print(f"\n{layout}: {args.parameters:,} parameters in {here[0]['tensors']} tensors, {args.repeats} rounds")
        print(f"{'optimiser':<18}{'ms (median)':>12}{'fastest':>9}{'ratio':>8}{'state B/param':>15}{'first step s':>14}"
              "  protects small updates")
        for row in sorted(here, key=lambda row: statistics.median(row["ms"] or [math.inf])):
            if row["note"]:
                print(f"{row['name']:<18}{row['note']}")
                continue
            median = statistics.median(row["ms"])
            print(f"{row['name']:<18}{median:>12.2f}{min(row['ms']):>9.2f}{ratio(median, unit):>8}"
                  f"{cell(row['state_bytes'], '.2f'):>15}{row['first_step_s']:>14.2f}  {row['protection']}")
    print("\nratio: to ours, stochastic. w weights, m exp_avg, v exp_avg_sq. ours: " + ", ".join(OURS))
    return rows


def cell(value, spec):
    return "-" if value is None else format(value, spec)


def ratio(value, unit):
    return "-" if unit is None else f"{value / unit:.2f}"


# ----------------------------------------------------------------------------------------------------------------------
# Training


def built(net):
    """The net of a parsed --nets entry, on torch's default device. Raises models.ModelError."""
    import models

    kind, size, side, _ = net
    return models.build(kind, "rflow", channels=3, num_classes=10, image_size=side, size=size)


def prepared(net, flags, device):
    """(Precision over the net, its inputs (x, t, y), the velocity it is to predict): the same for every recipe; `flags` as `recipe` takes them."""
    _, _, side, batch = net
    torch.manual_seed(0)
    with device:
        model = built(net)
    run = Precision(model, recipe(**flags), lr=LR, betas=BETAS, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(0)
    x, velocity = (torch.randn(batch, 3, side, side, generator=generator).to(device) for _ in range(2))
    return run, (x, torch.linspace(0, 999, batch, device=device), (torch.arange(batch) % 10).to(device)), velocity


def make_run(net, flags, args):
    """(Precision over the net, callable(measure) -> (ms of forward and backward, ms of step and EMA)); `flags` as `recipe` takes them."""
    run, inputs, velocity = prepared(net, flags, args.device)
    clock = Clock(args.device)

    def step(measure):
        run.set_tf32()
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
    """Rows (dicts) of one net: recipe, ms of each round (whole step; optimiser and EMA; both with telemetry), bytes."""
    net = parse_net(spec)
    rows, actions = [], {}
    for name in args.recipes:
        bar.set_postfix_str(f"{spec}: first step of {name}")
        cuda = args.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        run, step = make_run(net, RECIPES[name], args)
        start = time.perf_counter()
        step(False)
        first = time.perf_counter() - start
        step(True)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step(False)
        ledger = run.ledger()
        peak = torch.cuda.max_memory_allocated() - before if cuda else None
        rows.append(dict(net=spec, recipe=name, parameters=ledger.parameters, batch_size=net[3], first_step_s=first,
                         bytes_per_parameter=ledger.state_bytes, peak_bytes=peak))
        for measure in (False, True):
            actions[name, measure] = lambda step=step, measure=measure: step(measure)
        bar.update()
    times = take_turns(actions, args.repeats, bar)
    for row in rows:
        plain, measured = times[row["recipe"], False], times[row["recipe"], True]
        row.update(ms=[a + b for a, b in plain], step_ms=[b for _, b in plain],
                   measured_ms=[a + b for a, b in measured], measured_step_ms=[b for _, b in measured])
    return rows


def training(args, clock):
    with tqdm(total=len(args.nets) * len(args.recipes) * (2 * args.repeats + 1), disable=None, leave=False) as bar:
        rows = [row for spec in args.nets for row in bench_net(spec, args, bar)]
    for spec in args.nets:
        here = [row for row in rows if row["net"] == spec]
        unit = next((statistics.median(row["ms"]) for row in here if row["recipe"] == "fp32"), None)
        print(f"\n{spec} (model:size:image:batch): {here[0]['parameters']:,} parameters, {args.repeats} rounds")
        print(f"{'recipe':<22}{'images/s':>10}{'x fp32':>8}{'ms':>9}{'step':>8}{'telemetry':>11}{'B/param':>9}"
              f"{'peak MiB':>10}{'first step s':>14}")
        for row in here:
            ms, step = statistics.median(row["ms"]), statistics.median(row["step_ms"])
            # the difference is in step() alone; forward and backward, the noisier part, are the same with and without
            extra = (statistics.median(row["measured_step_ms"]) - step) / args.measure_every / ms
            peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
            faster = "-" if unit is None else f"{unit / ms:.2f}"
            print(f"{row['recipe']:<22}{row['batch_size'] / ms * 1e3:>10.1f}{faster:>8}{ms:>9.2f}{step / ms:>8.1%}"
                  f"{extra:>11.2%}{row['bytes_per_parameter']:>9.2f}{cell(peak, '.1f'):>10}"
                  f"{row['first_step_s']:>14.2f}")
    print(f"\nstep: optimiser and EMA. telemetry: cost of measuring every {args.measure_every} steps. B/param:\n"
          "weights, gradients, optimiser states. peak: CUDA allocator; not measured on a CPU, where one process holds\n"
          "all recipes at once.")
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def memory(args, clock):
    """Rows (dicts): net, flags, bytes a parameter of the weights, gradients and optimiser states allocated, and the ledger's word for it."""
    import train

    rows, parser = [], train.build_parser()
    with tqdm(total=len(args.nets) * len(WRITES) * len(STATES), disable=None, leave=False) as bar:
        for spec in args.nets:
            for flags in (f"{write} {state}".strip() for write in WRITES for state in STATES):
                bar.set_postfix_str(f"{spec} {flags}")
                with torch.compiler.set_stance("force_eager"):  # what is allocated does not depend on it
                    run, step = make_run(parse_net(spec), vars(parser.parse_args(flags.split())), args)
                    gradients = []
                    run.optimizer.register_step_pre_hook(lambda *_: gradients.append(sum(p.grad.nbytes for p in run.params)))
                    step(False)
                n = sum(p.numel() for p in run.params)
                size = dict(weights=sum(p.nbytes for p in run.params), gradients=gradients[0], states=state_bytes(run.optimizer))
                rows.append(dict(net=spec, flags=flags, parameters=n, **{k: v / n for k, v in size.items()},
                                 bytes_per_parameter=sum(size.values()) / n, ledger=run.ledger().state_bytes))
                bar.update()
    for spec in args.nets:
        here = {row["flags"]: row for row in rows if row["net"] == spec}
        print(f"\n{spec} (model:size:image:batch): {here['']['parameters']:,} parameters; weights + gradients + states, bytes a parameter\n")
        print(memory_table(here))
    return rows


def memory_table(rows):
    """Markdown: ways to write a weight down, ways to hold the moments across. rows: {flags: row of `memory`}."""
    lines = ["| flags | alone | " + " | ".join(f"with `{state}`" for state in STATES[1:]) + " |", "|---|---|---|---|"]
    for write in WRITES:
        sizes = [rows[f"{write} {state}".strip()]["bytes_per_parameter"] for state in STATES]
        lines.append(f"| {f'`{write}`' if write else '(none)'} | " + " | ".join(f"{size:.2f}" for size in sizes) + " |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# The second moment after a drop


def after_a_drop(optimizer, p, read, before, after, bar=None):
    """(v of the entries whose gradients dropped, v of the others), each over the exact mean v.

    Standard normal gradients for `before` steps, then every other entry's times 0.01 for `after` steps: in each block of codes the scale
    stays, while half of the values should fall. read() gives exp_avg_sq [n] as the optimiser holds it. The draws are made on the CPU.
    """
    generator, dropped = torch.Generator().manual_seed(0), torch.arange(p.numel()) % 2 == 0
    exact, beta2 = torch.zeros(p.numel()), optimizer.param_groups[0]["betas"][1]
    for step in range(before + after):
        grad = torch.randn(p.numel(), generator=generator)
        grad = torch.where(dropped, 0.01 * grad, grad) if step >= before else grad
        exact = beta2 * exact + (1 - beta2) * grad.square()
        p.grad = grad.to(p.device)
        optimizer.step()
        if bar:
            bar.update()
    held = read().cpu()
    return (held[dropped].mean() / exact[dropped].mean()).item(), (held[~dropped].mean() / exact[~dropped].mean()).item()


def holder(name, device="cpu"):
    """(optimiser, its parameter of 4,096 zeros, callable that reads exp_avg_sq) for 'bitsandbytes' or '<exp_avg_sq> <update>' of ours."""
    p = torch.nn.Parameter(torch.zeros(4096, device=device))
    kind, _, update = name.partition(" ")
    if kind != "bitsandbytes":
        made = precision.AdamW([p], lr=0.0, exp_avg_sq=kind, update=update)
        return made, p, lambda: made.moment(p, "exp_avg_sq").float()
    made = precision.build_optimizer(kind, [p], recipe(opt8bit=True), lr=0.0, betas=BETAS, eps=EPS, weight_decay=0.0, seed=0)
    from bitsandbytes.functional import dequantize_blockwise

    def read():
        state = made.state[p]
        return dequantize_blockwise(state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256)

    return made, p, read


HOLDERS = ["fp32 nearest", "bitsandbytes", *(f"{kind} {update}" for kind in ("bf16", "int8", "int4") for update in ("nearest", "stochastic"))]


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
    return "\n".join(lines + [f"| {title.get(r['name'], r['name'].replace(' ', ', '))} | {r['dropped']:.2f} | {r['others']:.2f} |" for r in rows])


def parse_net(spec):
    """'unet:small:64:8' -> ('unet', 'small', 64, 8): model, size, side of the image, batch size. Raises BenchError."""
    parts = spec.split(":")
    if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts[2:]):
        raise BenchError(f"--nets {spec}: write MODEL:SIZE:IMAGE:BATCH, as in {NETS[0]}")
    return parts[0], parts[1], int(parts[2]), int(parts[3])


# ----------------------------------------------------------------------------------------------------------------------
# The command


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def positive(text):
    number = int(text.replace("_", ""))
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "whole number above 0"  # argparse puts it into its message


def build_parser():
    import bench_gpu

    parser = Parser(prog="bench.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="optimizers | training | memory | moments | --gpu")

    def command(name, repeats, help):
        sub = commands.add_parser(name, help=help)
        if repeats:
            sub.add_argument("--repeats", type=positive, default=repeats, help=f"rounds (default: {repeats})")
        sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
        sub.add_argument("--threads", type=positive, help="CPU threads (default: as torch chooses)")
        sub.add_argument("--out", metavar="FILE", help="write machine, versions and every single time as JSON")
        return sub

    sub = command("optimizers", 15, "one optimiser step, ours and peers")
    sub.add_argument("--parameters", type=positive, default=10_000_000, help="default: 10_000_000")
    sub.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: both")
    sub.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="NAME",
                     help="optimisers to run (default: all): " + ", ".join(CONTENDERS))
    sub = command("training", 7, "one training step under each recipe")
    sub.add_argument("--nets", nargs="+", default=NETS, metavar="MODEL:SIZE:IMAGE:BATCH",
                     help=f"default: {' '.join(NETS)}")
    sub.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES)[:-2], metavar="NAME",
                     help="default: all but the last two of " + ", ".join(RECIPES))
    sub.add_argument("--measure_every", type=positive, default=50,
                     help="steps between two measurements of telemetry (default: 50)")
    sub = command("moments", None, "exp_avg_sq after a drop of gradients, by how it is held")
    sub.add_argument("--before", type=positive, default=1000, help="steps before the drop (default: 1000)")
    sub.add_argument("--after", type=positive, default=3000, help="steps after it (default: 3000)")
    sub = command("memory", None, "bytes a parameter of every combination, as allocated")
    sub.add_argument("--nets", nargs="+", default=["dit:S/8:64:1", "unet:small:64:1"], metavar="MODEL:SIZE:IMAGE:BATCH",
                     help="default: dit:S/8:64:1 unet:small:64:1")
    bench_gpu.add_command(commands)
    return parser


def check(args):
    """Choose the device, and find what can't work before it is measured. Raises BenchError, RecipeError, ModelError."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: torch finds no CUDA device here; use --device cpu")
    args.device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.out:
        out = Path(args.out).absolute()
        if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            reason = "that is a folder" if out.is_dir() else "no such folder, or no right to write there"
            raise BenchError(f"--out {args.out}: {reason}; name a file")
    if args.bench in ("training", "memory"):
        with torch.device("meta"):  # shapes alone
            for net in map(parse_net, args.nets):
                built(net)
    wanted = [RECIPES[name] for name in args.recipes] if args.bench == "training" else []
    for flags in wanted + [dict(opt8bit=True), dict(opt4bit=True)] * (args.bench in ("memory", "moments")):
        precision.check_machine(recipe(**flags), args.device)


def quiet():
    """No messages of libraries about things that this machine does not have."""
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes|monai")
    for name in ("torch.utils.cpp_extension", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(["gpu", *(a for a in argv if a != "--gpu")] if "--gpu" in argv else argv)
    quiet()
    import models
    from trainer import RunError, environment, write_json

    try:
        if args.bench == "gpu":
            import bench_gpu

            return bench_gpu.main(args, argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        check(args)
        machine = environment(args.device)
        bf16 = " ".join(machine["bf16"]) or "no bf16 instructions"
        device = machine["gpu"] if args.device.type == "cuda" else machine["cpu"]
        print(f"{device}, {machine['threads']} threads, {bf16}, torch {machine['torch']}", flush=True)
        rows = {"optimizers": optimizers, "training": training, "memory": memory, "moments": moments}[args.bench](args, Clock(args.device))
        if args.out:
            settings = {k: str(v) if k == "device" else v for k, v in vars(args).items() if k not in ("bench", "out")}
            write_json(args.out, {"bench": args.bench, "command": shlex.join(["python", "bench.py", *argv]),
                                  "date": datetime.date.today().isoformat(), "machine": machine, "settings": settings,
                                  "results": rows})
            print(f"every single {'time' if args.bench in ('optimizers', 'training') else 'figure'} is in {args.out}")
    except (BenchError, RecipeError, RunError, models.ModelError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    import bench  # by the name under which bench_gpu.py knows it: one BenchError, not two

    sys.exit(bench.main())
