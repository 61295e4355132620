"""Speed and memory of the recipes and of other libraries' optimisers, as ratios measured side by side.

    python bench.py optimizers    one step on 10 million parameters, ours and peers (requirements-bench.txt)
    python bench.py training      images a second of U-Nets and DiTs under each recipe; the whole step
    python bench.py memory        bytes of weights, gradients and states, each way to hold them, and of what
                                  is kept for backward, by recipe and batch (bench_memory.py)
    python bench.py systems       segmentation, language and video, as documents compare configurations
                                  (bench_systems.py)
    python bench.py peers         a whole step in a bare loop, Lightning, Accelerate and here (bench_peers.py)
    python bench.py sharding      what each process holds of a net under --fsdp, beside what --dry_run says
                                  (bench_sharding.py)
    python bench.py moments       whether exp_avg_sq falls when half of the gradients drop to a hundredth
    python bench.py watch         what watch.Watch costs of a step (bench_watch.py)
    python bench.py first         how long each task's first command takes, and what comes out
                                  (bench_first.py)
    python bench.py conformance   what any optimiser or average of low precision keeps to, as figures
                                  (bench_conformance.py)
    python bench.py --gpu         everything that needs a GPU, on nets of real size (bench_gpu.py)

What it shows: the fused step is the fastest of those that round stochastically or carry a Kahan compensation,
in tensors of mixed sizes as in a real net and in a few large ones; bf16 speeds up training where the machine
multiplies in bf16; telemetry costs under 2 % of a step. Contenders take turns, in an order shuffled for each
round, so that other load on the machine meets all of them alike. A figure is the median over the rounds;
--out FILE keeps every single time. Optimisers and formats come from their registries: a new one is one more
row here. Cost on 2 cores: about 4 minutes and 3 GiB for `optimizers` (more the first time: torchao compiles
each shape), about 5 minutes for `training`, 2 minutes and 2 GiB for `memory`, 2 minutes for `moments`. Bad
input ends with one line and exit status 2.
"""

import argparse
import datetime
import math
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks import conformance_command, first, gpu, loops, sharding, subjects, systems, watch
from benchmarks.common import (
    ADAMW,
    PRESETS,
    PURE,
    RECIPES,
    STOCHASTIC,
    Clock,
    after_a_drop,
    cell,
    check_nets,
    forget_tables,
    moment_formats,
    moments_in,
    parse_net,
    prepared,
    state_bytes,
    take_turns,
    timed,
)
from benchmarks.memory import check_kept, memory
from harness.files import write_json
from harness.flags import Parser, count, natural
from harness.run_folder import environment
from lowprec.machine import Refused, quiet_libraries
from lowprec.optimizers import peers, rounded
from lowprec.optimizers.by_tensor import OPTIMIZERS
from lowprec.precision import Recipe, recipe
from lowprec.recipes import check_machine

# ---- Optimisers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """protection: what keeps small updates from being lost. optimizer: a name for `peers.build`, or None for
    what is no optimiser of the recipes.
    """

    protection: str
    recipe: Recipe
    optimizer: str | None = "adamw"

    @property
    def ours(self):
        return self.optimizer in OPTIMIZERS


# what is known of a peer; any other is one "as its authors publish it"
PROTECTION = {
    "torchastic": "stochastic w m v",
    "torchao": "stochastic w",
    "optimi": "compensated w",
    "adamw_bf16": "compensated w, stochastic w m",
    "bitsandbytes": "none",
    "torch": "none",
    "heavyball": "stochastic w m v",
    "sdnq": "stochastic w",
    "sdnq-8bit": "stochastic w",
    "flashoptim": "w in 24 bits",
}
# peers that train.py does not offer, see subjects.PEERS
UNLISTED = ("heavyball", "sdnq", "sdnq-8bit", "flashoptim")


def contenders():
    """{name: Contender}: ways to write with AdamW, formats of its moments, our other optimisers, peers, and
    three yardsticks.
    """
    pure, stochastic = recipe(**PURE), recipe(**STOCHASTIC)
    rows = {
        "stochastic": Contender("stochastic w m v", stochastic),
        "nearest": Contender("none", pure),
        "kahan": Contender("compensated w", recipe(**PURE, kahan=True)),
        "kahan-stochastic": Contender("compensated w, stochastic m v", recipe(**STOCHASTIC, kahan=True)),
        "split": Contender("exact w", recipe(**PURE, master="split")),
        "fp32": Contender("fp32 weights", Recipe()),
    }
    for name in moment_formats():
        label = PRESETS.get(name, name).removeprefix("opt")
        rows[f"stochastic-{label}"] = Contender("stochastic w m v", recipe(**STOCHASTIC, **moments_in(name)))
    for name in OPTIMIZERS:
        if name != "adamw":
            rows[f"stochastic-{name}"] = Contender("stochastic, all of it", stochastic, name)
    known = [name for name in PROTECTION if name in peers.PEERS and name not in UNLISTED]
    for name in [*known, *(name for name in peers.PEERS if name not in PROTECTION)]:
        r = recipe(**PURE, opt8bit=True) if name == "bitsandbytes" else pure
        protection = PROTECTION.get(name, "as its authors publish it")
        rows[name.replace("_", "-")] = Contender(protection, r, name)
    for name in UNLISTED:
        rows[name] = Contender(PROTECTION[name], pure, None)
    rows["torch-fused"] = Contender("none", pure, None)
    rows["torch-fused-fp32"] = Contender("fp32 weights", Recipe(), None)
    rows["copy"] = Contender("moves the bytes of a step", pure, None)
    return rows


CONTENDERS = contenders()
LAYOUTS = ["mixed", "large"]
COPIED = 14  # bytes a parameter: a step on bf16 reads w, g, m, v and writes w, m, v, as does copying 7 bytes


def layout_shapes(layout, n):
    """Shapes of n parameters. 'large': four vectors. 'mixed': blocks of four widths as in a U-Net or
    transformer, where most tensors are vectors and most values lie in kernels and matrices.
    """
    if layout == "large":
        sizes = [n // 4 + (i < n % 4) for i in range(4)]
        return [(size,) for size in sizes if size]
    block = []
    for w in (32, 64, 128, 256):
        block += [(w, w, 3, 3), (w,), (w,), (w,), (w, w), (w,)]
        block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    shapes, left, i = [], n, 0
    while left and math.prod(block[i % len(block)]) <= left:
        shapes.append(block[i % len(block)])
        left -= math.prod(shapes[-1])
        i += 1
    return shapes + [(left,)] * (left > 0)


def make_step(name, params):
    """(callable that does one step on `params`, the optimiser or None). Raises Refused for a missing package.
    """
    contender = CONTENDERS[name]
    if name == "copy":
        moved = COPIED // 2 * sum(p.numel() for p in params)
        source = torch.ones(moved, dtype=torch.uint8, device=params[0].device)
        return partial(torch.zeros_like(source).copy_, source), None
    if name.startswith("torch-fused"):
        made = torch.optim.AdamW(params, **ADAMW, fused=True)
    elif name in UNLISTED:
        made = subjects.subject(name, params[0].device).over(params, **ADAMW)
    else:
        other = contender.ours and contender.optimizer != "adamw"  # its eps may be another thing
        options = {key: ADAMW[key] for key in (("lr", "weight_decay") if other else ADAMW)}
        made = peers.build(contender.optimizer, params, contender.recipe, **options)
    return getattr(made, "inner", made).step, made  # a peer's own step, without our adapter


class Contest:
    """The contenders of one layout, all on the same weights and gradients."""

    def __init__(self, layout, args, clock, bar):
        self.layout, self.args, self.clock, self.bar = layout, args, clock, bar
        generator = torch.Generator().manual_seed(0)
        shapes = layout_shapes(layout, args.parameters)
        self.weights = [torch.randn(s, generator=generator) * 0.05 for s in shapes]
        sources = [torch.randn(s, generator=generator) * 1e-3 for s in shapes]
        self.grads, self.fresh, self.params = {}, {}, {}
        for dtype in (torch.bfloat16, torch.float32):
            self.grads[dtype] = [g.to(args.device, dtype) for g in sources]
            self.fresh[dtype] = [g.clone() for g in self.grads[dtype]]

    def refill(self, name):
        """The gradients as after a backward: adamw-bf16 leaves zeros behind, heavyball none at all."""
        dtype = CONTENDERS[name].recipe.dtype("weights")
        torch._foreach_copy_(self.grads[dtype], self.fresh[dtype])
        for p, g in zip(self.params[name], self.grads[dtype], strict=True):
            p.grad = g

    def rows(self):
        """Rows (dicts): name, protection, ms of each round, bytes of state a parameter, or a note why not."""
        rows, actions = [], {}
        for name in self.args.only:
            self.bar.set_postfix_str(f"{self.layout}: first step of {name}")
            row, step = self._started(name)
            rows.append(row)
            if step is not None:
                actions[name] = partial(timed, step, self.clock)
            self.bar.update()
        times = take_turns(actions, self.args.repeats, self.bar, self.refill)
        for row in rows:
            row["ms"] = times.get(row["name"], [])
        return rows

    def _started(self, name):
        """(row, step or None) of a contender after its first steps."""
        contender = CONTENDERS[name]
        row = dict(layout=self.layout, tensors=len(self.weights), name=name, protection=contender.protection)
        row.update(note="", first_step_s=None, state_bytes=None, moved_bytes=COPIED, ms=[])
        dtype = contender.recipe.dtype("weights")
        params = [torch.nn.Parameter(w.to(self.args.device, dtype)) for w in self.weights]
        self.params[name] = params
        self.refill(name)
        try:
            step, optimizer = make_step(name, params)
            forget_tables(optimizer)
            row["first_step_s"] = timed(step, self.clock) / 1e3
            self.refill(name)
            timed(step, self.clock)
        except Refused as error:
            missing = "pip install" in str(error)
            row["note"] = "not installed: " + str(error).rsplit(": ", 1)[1] if missing else str(error)
            return row, None
        except Exception as error:  # a peer that fails, say for want of a compiler, is a line
            if contender.ours:  # a bug of ours is not
                raise
            row["note"] = f"fails here: {type(error).__name__}"
            return row, None
        if optimizer is not None:
            row["state_bytes"] = state_bytes(optimizer) / self.args.parameters
            # weights, gradients and states are read, weights and states written
            row["moved_bytes"] = 3 * dtype.itemsize + 2 * row["state_bytes"]
        return row, step


def optimizers(args, clock):
    rows, rounds = [], args.repeats + 1
    with tqdm(total=len(args.layouts) * len(args.only) * rounds, disable=None, leave=False) as bar:
        for layout in args.layouts:
            rows += Contest(layout, args, clock, bar).rows()
    for layout in args.layouts:
        _print_layout(layout, [row for row in rows if row["layout"] == layout], args)
    ours = [name for name, contender in CONTENDERS.items() if contender.ours]
    print("\nratio: to ours, stochastic. of copy: bytes a second that a step moves, over those of copying.")
    print("w weights, m exp_avg, v exp_avg_sq. ours: " + ", ".join(ours))
    return rows


def _print_layout(layout, rows, args):
    medians = {row["name"]: statistics.median(row["ms"]) for row in rows if row["ms"]}
    unit, copied = medians.get("stochastic"), medians.get("copy")
    count = f"{args.parameters:,} parameters in {rows[0]['tensors']} tensors"
    print(f"\n{layout}: {count}, {args.repeats} rounds")
    heads = f"{'optimiser':<18}{'ms (median)':>12}{'fastest':>9}{'ratio':>8}{'of copy':>9}"
    print(f"{heads}{'state B/param':>15}{'first step s':>14}  protects small updates")
    for row in sorted(rows, key=_median):
        if row["note"]:
            print(f"{row['name']:<18}{row['note']}")
            continue
        median = _median(row)
        ratio = "-" if unit is None else f"{median / unit:.2f}"
        share = "-" if copied is None else f"{row['moved_bytes'] / COPIED * copied / median:.0%}"
        figures = f"{median:>12.2f}{min(row['ms']):>9.2f}{ratio:>8}{share:>9}"
        figures += f"{cell(row['state_bytes'], '.2f'):>15}"
        print(f"{row['name']:<18}{figures}{row['first_step_s']:>14.2f}  {row['protection']}")


def _median(row):
    return statistics.median(row["ms"] or [math.inf])


# ---- Training ----------------------------------------------------------------------------------------------

ON_REQUEST = ("tf32", "fp16")  # what a CPU has not got, or is slow in
TRAINED = ("fp32", "bf16", "pure_bf16", "pure_bf16-stochastic", "pure_bf16-kahan", "pure_bf16-split")
TRAINED += ("opt8bit", *ON_REQUEST)
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


# ---- The second moment after a drop ------------------------------------------------------------------------

HOLDERS = ["fp32 nearest", "bitsandbytes"]
for kind in ("bf16", *moment_formats()):
    HOLDERS += [f"{kind} nearest", f"{kind} stochastic"]


def holder(name, device="cpu"):
    """(optimiser, its parameter of 4,096 zeros, callable that reads exp_avg_sq) for 'bitsandbytes' or
    '<exp_avg_sq> <update>' of ours.
    """
    p = torch.nn.Parameter(torch.zeros(4096, device=device))
    kind, _, update = name.partition(" ")
    if kind == "bitsandbytes":
        still = dict(ADAMW, lr=0.0, weight_decay=0.0)
        made = peers.build(kind, [p], recipe(opt8bit=True), **still)
    else:
        made = rounded.AdamW([p], lr=0.0, exp_avg_sq=kind, update=update)

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


# ---- The command -------------------------------------------------------------------------------------------

COMMANDS = {
    "optimizers": optimizers,
    "training": training,
    "memory": memory,
    "sharding": sharding.measured,
    "moments": moments,
    "systems": systems.systems,
    "peers": loops.peers,
    "watch": watch.watching,
    "first": first.first,
    "conformance": conformance_command.conforming,
}


def build_parser():
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench.py", formatter_class=form, description=__doc__)
    names = " | ".join([*COMMANDS, "--gpu"])
    commands = parser.add_subparsers(dest="bench", required=True, metavar=names)

    def command(name, repeats, help):
        sub = commands.add_parser(name, help=help)
        if repeats:
            sub.add_argument("--repeats", type=natural, default=repeats, help=f"rounds (default: {repeats})")
        sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
        sub.add_argument("--threads", type=natural, help="CPU threads (default: as torch chooses)")
        out = "write machine, versions and every single time as JSON"
        sub.add_argument("--out", metavar="FILE", help=out)
        return sub

    def choice(sub, flag, choices, default, help):
        sub.add_argument(flag, nargs="+", choices=list(choices), default=default, metavar="NAME", help=help)

    def nets(sub, default):
        form, help = "MODEL:SIZE:IMAGE:BATCH", f"default: {' '.join(default)}"
        sub.add_argument("--nets", nargs="+", default=default, metavar=form, help=help)

    sub = command("optimizers", 15, "one optimiser step, ours and peers")
    sub.add_argument("--parameters", type=natural, default=10_000_000, help="default: 10_000_000")
    sub.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: both")
    names = list(CONTENDERS)
    choice(sub, "--only", names, names, "optimisers to run (default: all): " + ", ".join(names))
    sub = command("training", 7, "one training step under each recipe")
    nets(sub, NETS)
    names = [name for name in TRAINED if name not in ON_REQUEST]
    choice(sub, "--recipes", TRAINED, names, f"default: all but the last two of {', '.join(TRAINED)}")
    every = "steps between two measurements of telemetry (default: 50)"
    sub.add_argument("--measure_every", type=natural, default=50, help=every)
    sub = command("moments", None, "exp_avg_sq after a drop of gradients, by how it is held")
    sub.add_argument("--before", type=natural, default=1000, help="steps before the drop (default: 1000)")
    sub.add_argument("--after", type=natural, default=3000, help="steps after it (default: 3000)")
    sub = command("memory", None, "bytes a parameter of every combination, as allocated")
    nets(sub, ["dit:S/8:64:1", "unet:small:64:1"])
    sub.add_argument("--batches", nargs="+", type=natural, default=[2, 8, 32], help="default: 2 8 32")
    sub = command("sharding", None, "bytes of each process under --fsdp, as allocated and by arithmetic")
    nets(sub, ["dit:S/8:64:2"])
    sub.add_argument("--ranks", type=natural, default=2, help="processes, on the CPU (default: 2)")
    sub = command("systems", 9, "a step of other systems than diffusion, as documents compare them")
    names = list(systems.TABLES)
    apart = list(systems.APART)
    said = f"tables (default: all of these): {', '.join(names)}; or {' '.join(apart)}"
    choice(sub, "--only", names + apart, names, said)
    steps = "steps that each is trained to before it is scored, 0 for no scores (default: 300)"
    sub.add_argument("--train", type=count, default=300, help=steps)
    sub = command("peers", 9, "a step of the same net in other people's loops")
    names = list(loops.NETS)
    choice(sub, "--only", names, names, "nets (default: all): " + ", ".join(names))
    tasks = list(loops.TASKS)
    each = "these tasks (all: no name) beside a bare loop, in fp32: " + "; ".join(tasks)
    sub.add_argument("--tasks", nargs="*", choices=tasks, metavar="NAME", help=each)
    sub = command("watch", 9, "a step with and without watch.Watch")
    nets(sub, watch.NETS)
    sub.add_argument("--every", type=natural, default=50, help="steps between two looks (default: 50)")
    sub = command("first", None, "how long each task's first command takes, and what comes out")
    names = list(first.FIRST)
    choice(sub, "--only", names, names, "commands to run (default: all): " + ", ".join(names))
    sub.add_argument("--steps", type=natural, help="other than each task's own number, to try it")
    sub.add_argument("--runs", metavar="DIR", help="keep the runs here (default: they are deleted)")
    sub = command("conformance", None, "what optimisers and averages of low precision keep to")
    conformance_command.add_arguments(sub)
    gpu.add_command(commands)
    return parser


def check(args):
    """Choose the device, and find what can't work before it is measured. Raises Refused."""
    if args.bench == "sharding":
        if args.device == "cuda":
            raise Refused("--device cuda: sharding counts bytes of processes on the CPU; leave --device out")
        args.device = "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no CUDA device here; use --device cpu")
    cuda = args.device != "cpu" and torch.cuda.is_available()
    args.device = torch.device("cuda" if cuda else "cpu")
    if args.out:
        out = Path(args.out).absolute()
        if out.is_dir():
            raise Refused(f"--out {args.out}: that is a folder; name a file")
        if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            raise Refused(f"--out {args.out}: no such folder, or no right to write there; name a file")
    if args.bench in ("training", "memory", "watch", "sharding"):
        check_nets(args.nets)
    if args.bench == "memory":
        check_kept(args)
    if args.bench == "conformance":
        args.subjects = subjects.chosen(args.names, args.device)
    wanted = [RECIPES[name] for name in args.recipes] if args.bench == "training" else []
    if args.bench in ("memory", "moments"):
        wanted += [moments_in(name) for name in moment_formats()]
    for flags in wanted:
        check_machine(recipe(**flags), args.device)


def measure(args, argv):
    """Run a command that was parsed, and write what it found. Returns the exit status."""
    if args.threads:
        torch.set_num_threads(args.threads)
    check(args)
    machine = environment(args.device)
    bf16 = " ".join(machine["bf16"]) or "no bf16 instructions"
    device = machine["gpu"] if args.device.type == "cuda" else machine["cpu"]
    print(f"{device}, {machine['threads']} threads, {bf16}, torch {machine['torch']}", flush=True)
    rows = COMMANDS[args.bench](args, Clock(args.device))
    status = conformance_command.status(rows) if args.bench == "conformance" else 0
    if not args.out:
        return status
    own = {name: value for name, value in vars(args).items() if name not in ("bench", "out", "subjects")}
    settings = {name: _named(value) for name, value in own.items()}
    settings["device"] = str(args.device)
    record = dict(bench=args.bench, command=shlex.join(["python", "bench.py", *map(_named, argv)]))
    record.update(date=datetime.date.today().isoformat(), machine=machine, settings=settings, results=rows)
    write_json(args.out, record)
    print(f"every single {'time' if 'repeats' in settings else 'figure'} is in {args.out}")
    return status


def _named(word):
    """A path by its last part alone: a record says nothing of the folders of a machine."""
    return os.path.basename(word) if isinstance(word, str) and os.path.isabs(word) else word


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    words = ["gpu", *(word for word in argv if word != "--gpu")] if "--gpu" in argv else argv
    args = build_parser().parse_args(words)
    quiet_libraries()
    try:
        if args.bench == "gpu":
            return gpu.main(args, argv)
        return measure(args, argv)
    except Refused as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
