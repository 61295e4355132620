"""Every recipe on a GPU, on nets of real size, in one command that can be stopped and continued.

    python bench.py --gpu                   DiT-B/2, DiT-XL/2 and a U-Net, every recipe, eager and compiled
    python bench.py --gpu --budget 600      for ten minutes; the same command again goes on
    python bench.py --gpu --only 'fp8-torchao-*' --compile on      some recipes, compiled alone
    python bench.py --gpu --dry_run         every recipe on a CPU: tiny nets, one round, nothing kept

A cell is one net under one recipe, eager or under torch.compile. It is a training step (forward, backward,
optimiser, average) or, for `generate-*`, one forward pass of a generator. It is measured beside the eager
bf16 cell of its net, which takes turns with it in the same process: `x bf16` comes from those rounds. Every
recipe gets the same initial weights and inputs. `loss` is that after the warm-up, to see that what is fast
also learns. Peak memory is what the allocator held above its start during one step, alone, before the bf16
cell is built. The first step, compiling included, is timed apart. `FLOP share` is of the step in FP8, or of
the forward pass in 2:4 layers. Ways to write weights and to hold moments share their net with another recipe
and are not compiled again.

What can't run here, runs out of memory, fails, hangs or crashes is a row with its reason, and the rest goes
on: cells run in a process of their own, which is replaced after a failure.
experiments/bench/gpu-<machine>.json and .md are written after every cell. Run again, the command measures
what is missing there, and tries again what was refused (a library may have come since) or, with --retry,
whatever has no figures. It goes on only where code, machine and versions are those of the record.
"""

import gc
import hashlib
import json
import math
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks import common
from benchmarks.common import Clock, Here, Lost, Worker, check_nets, parse_net, prepared, take_turns, timed
from harness.files import write_atomically, write_json
from harness.flags import natural
from harness.run_folder import environment
from lowprec.errors import Refused, first_line, out_of_memory
from lowprec.kernels import compiled as compiling
from lowprec.layers.sparsity import KernelLinear
from lowprec.precision import recipe
from lowprec.rules import check_machine

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "experiments" / "bench"
# 32x32 with patches of 2: 256 tokens, as the latents of 256x256 images in the DiT paper
NETS = {"dit:B/2:32:64": "DiT-B/2", "dit:XL/2:32:32": "DiT-XL/2", "unet:base:64:32": "U-Net"}
TINY = ["dit:tiny:8:2", "unet:tiny:8:2"]

GENERATE = ("generate-bf16", "generate-bf16-2:4")  # a forward pass of a generator
EAGER = (  # their net is that of bf16 or pure_bf16-stochastic: nothing else to compile
    *("pure_bf16-kahan", "pure_bf16-split", "bf16-opt8bit", "bf16-opt4bit"),
    *("pure_bf16-stochastic-opt8bit", "pure_bf16-stochastic-opt4bit"),
)
MEASURED = (  # in this order
    *("bf16", "fp32", "tf32", "pure_bf16-stochastic", *common.FP8, "pure_bf16-stochastic-opt8bit-fp8"),
    *(*GENERATE, "bf16-2:4", "pure_bf16-stochastic-2:4", *EAGER),
)
RECIPES = {name: common.RECIPES[name] for name in MEASURED}
# what a dry run tries a second time, on the U-Net and through torch.compile's wrapper
DRY = ("bf16", "fp8-scaled_mm-rowwise", *GENERATE)

WARM_UP = 10  # steps before any figure
ROUND_MS = 200  # steps enough for that make a round, so that the queue of kernels is as full as in a training

# ---- One cell ----------------------------------------------------------------------------------------------


def cells(nets, only=("*",), compiled=(False, True)):
    """The cells to measure, in order: dicts of net, recipe, compile. Eager ones first: compiling takes up to
    minutes a cell.
    """
    found = []
    for on in compiled:
        for net in nets:
            for name in RECIPES:
                wanted = any(fnmatch(name, pattern) for pattern in only)
                if wanted and not (on and name in EAGER):
                    found.append(dict(net=net, recipe=name, compile=on))
    return found


def key(cell):
    return cell["net"], cell["recipe"], cell["compile"]


def reference_of(cell):
    return {**cell, "recipe": "generate-bf16" if cell["recipe"] in GENERATE else "bf16", "compile": False}


def contender(cell, device, dry):
    """(one training step or forward pass -> its loss or None, callable -> what the row tells of it).

    dry: a generator without sparse kernels passes, so that a CPU runs the code around them. Raises Refused
    for what can't run here.
    """
    flags, net = RECIPES[cell["recipe"]], parse_net(cell["net"])
    notes = check_machine(recipe(**flags).on(device), device)
    run, inputs, velocity = prepared(net, flags, device)
    run.example = (tuple(a[:1].to("meta") for a in inputs), {})
    facts = dict(parameters=sum(p.numel() for p in run.params), batch_size=net[3])
    facts.update(bytes_per_parameter=None, flops_share=None, how="; ".join(notes))
    if cell["recipe"] in GENERATE:
        ledger = run.ledger()
        facts.update(covered(ledger))
        # not the run: its memory is not the generator's
        return generator(run, ledger, inputs, cell["compile"], dry), lambda: facts
    if cell["compile"]:
        run.forward = torch.compile(run.model)

    def step():
        loss = F.mse_loss(run(*inputs), velocity)
        run.backward(loss)
        run.step()
        return loss

    def told():
        # at the end: counting FLOPs takes the FP8 layers out for a moment, which would compile the net anew
        ledger = run.ledger()
        return {**facts, "bytes_per_parameter": ledger.state_bytes, **covered(ledger)}

    return step, told


def covered(ledger):
    """What a ledger tells of the layers that a method covers: their share of the FLOPs, and how they run."""
    share = next(iter(ledger.flops_share.values()), None)
    if share is None:
        return {}
    sparse = _sparse(ledger)
    how = sparse["why"].rpartition("; ")[2] if sparse else ""
    for detail in ledger.details.values():
        how = detail.summary().partition(":")[0]
    return {"flops_share": share, "how": how}


def _sparse(ledger):
    """The row of a ledger that lists 2:4 layers, or None."""
    return next((row for row in ledger.rows if "layers" in row), None)


def generator(run, ledger, inputs, compiled, dry):
    """callable() of one forward pass of the run's generator, which shares no memory with the run."""
    net, sparse = run.generator("raw"), _sparse(ledger)
    if sparse and not dry and not any(isinstance(m, KernelLinear) for m in net.net.modules()):
        raise Refused("2:4 generation is dense here" + sparse["why"].partition("generation too")[2])
    if compiled:
        net.forward = torch.compile(net.net)

    def step():
        with torch.no_grad():
            net(*inputs)

    return step


def free(cell):
    """Give back what a cell held; compiled code too, whose guards would tell one cell's net from the next
    until dynamo gives up.
    """
    if cell["compile"]:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measured(cell, device, rounds, dry):
    """The figures of a cell, a dict; raises what its parts raise."""
    clock, cuda = Clock(device), device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    step, told = contender(cell, device, dry)
    gc.collect()  # the dense net that a generator was made from
    clock.wait()
    start = time.perf_counter()
    loss = step()
    clock.wait()
    row = dict(first_step_s=time.perf_counter() - start, peak_bytes=None)
    for _ in range(0 if dry else WARM_UP - 1):
        loss = step()
    if loss is not None:
        row["loss"] = loss.item()
    if cuda:
        clock.wait()
        torch.cuda.reset_peak_memory_stats()
        step()
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    actions = {"ms": step}
    if key(reference_of(cell)) != key(cell):
        try:
            other, _ = contender(reference_of(cell), device, dry)
            for _ in range(1 if dry else WARM_UP):
                other()
            actions["reference_ms"] = other
        except Refused as error:
            row["note"] = f"no ratio: {error}"
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["note"] = "no ratio: bf16 does not fit beside it"
    turns = {}
    for name, action in actions.items():
        steps = 1 if dry else min(50, max(1, round(ROUND_MS / timed(action, clock, 1))))
        turns[name] = partial(timed, action, clock, steps)
    row.update(take_turns(turns, rounds, tqdm(disable=True)))
    if key(reference_of(cell)) == key(cell):
        row["reference_ms"] = row["ms"]
    row.update(told())
    if compiling.unfused:
        row["note"] = f"not fused, torch.compile failed: {', '.join(unfused_kernels())}"
    return row


def unfused_kernels():
    """Names of the kernels that could not be built here; one made by a function has the name of that one."""
    return sorted({kernel.__qualname__.partition(".")[0].strip("_") for kernel in compiling.unfused})


def measure(cell, *, device, rounds, dry=False):
    """The row (dict) of a cell: its figures, or in `note` the one-line reason why it has none. status:
    measured, refused, out of memory, failed.
    """
    row, device = {**cell, "status": "measured", "note": ""}, torch.device(device)
    try:
        # a CPU takes minutes to compile what a GPU is to run
        with torch.compiler.set_stance("force_eager") if dry else nullcontext():
            row.update(measured(cell, device, rounds, dry))
    except Refused as error:
        row.update(status="refused", note=str(error))
    except Exception as error:
        # whatever a library, a compiler or a driver raises is this cell's outcome, not the end of the others
        if out_of_memory(error):
            cuda = device.type == "cuda"
            size = torch.cuda.get_device_properties(device).total_memory / 2**30 if cuda else math.nan
            note = f"out of memory on {size:.0f} GiB: give --nets a smaller batch"
            row.update(status="out of memory", note=note)
        else:
            row.update(status="failed", note=f"{type(error).__name__}: {first_line(error)[:200]}")
    free(cell)  # after the exception and its frames are gone
    return row


# ---- The record --------------------------------------------------------------------------------------------


def facts_of_machine(device):
    """Machine, versions, commit, and a hash of the sources: a commit says little where there is no git, or
    the tree is not clean.
    """

    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    library = sorted((ROOT / "lowprec").rglob("*.py"))
    files = [*library, ROOT / "models.py", ROOT / "benchmarks/common.py", ROOT / "benchmarks/gpu.py"]
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    libraries = {name: version(name) for name in ("triton", "torchao", "transformer_engine", "bitsandbytes")}
    facts = {"cuda": torch.version.cuda, "libraries": libraries, "sources": sources[:16]}
    return {**environment(device), **facts}


def same(old, new):
    """Whether figures of two machines (as `facts_of_machine`) belong in one record; a library that only one
    has is no difference.
    """
    if any(old[k] != new[k] for k in ("gpu", "torch", "cuda", "sources")):
        return False
    pairs = [(old["libraries"].get(name), version) for name, version in new["libraries"].items()]
    return all(a == b or None in (a, b) for a, b in pairs)


def load(path, machine, fresh):
    """{key: row} measured earlier. Raises Refused for a record of other code or another machine."""
    if fresh or not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        if same(record["machine"], machine):
            return {key(row): row for row in record["results"]}
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{path} can't be read: move it away, or measure anew with --fresh") from None
    other = record["machine"]
    versions = f"commit {str(other.get('commit'))[:8]}, torch {other['torch']}"
    raise Refused(
        f"{path} was measured by other code or versions ({versions}): --fresh measures anew and replaces it, "
        "--out FOLDER keeps both"
    )


def save(path, header, rows):
    record = {**header, "results": list(rows.values())}
    write_json(path, record)
    write_atomically(path.with_suffix(".md"), lambda file: file.write(page(record).encode()))


def images_per_second(row):
    return row["batch_size"] / statistics.median(row["ms"]) * 1e3


def line(row):
    """What a cell came to, in a few words."""
    if row["status"] != "measured":
        return row["note"]
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{images_per_second(row):.1f} images/s, {times(row)} x bf16{peak}"


def times(row):
    other = row.get("reference_ms")
    return f"{statistics.median(other) / statistics.median(row['ms']):.2f}" if other else "-"


COLUMNS = (
    *("recipe", "compiled", "images/s", "x bf16", "peak GiB", "bytes a parameter", "FLOP share", "loss"),
    *("first step s", "note"),
)


def page(record):
    """The record as markdown: a table a net, cells without a figure with the reason."""
    machine, rows = record["machine"], {key(row): row for row in record["results"]}
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items() if version)
    changed = "" if machine["clean"] else " (changed or unknown)"
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, {libraries}"
    code = f"commit {str(machine['commit'])[:8]}{changed}, sources {machine['sources']}"
    parts = [
        f"# {machine['gpu'] or machine['cpu']}",
        f"Written by `{record['command']}`, {record['date']}: {versions}; {code}. "
        "`benchmarks/gpu.py` says what the columns are.",
    ]
    order = list(RECIPES)
    for net in dict.fromkeys([*record["settings"]["nets"], *(row["net"] for row in record["results"])]):
        known = next((row for row in record["results"] if row["net"] == net and "parameters" in row), None)
        size = f", {known['parameters']:,} parameters" if known else ""
        parts.append(f"## {NETS.get(net, net)}\n\n`{net}` (model:size:image:batch){size}")
        lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        for cell in sorted(cells([net]), key=lambda cell: order.index(cell["recipe"])):
            lines.append(_page_line(cell, rows.get(key(cell), {"status": "", "note": "not measured"})))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _page_line(cell, row):
    figures = ["-"] * 7
    if row["status"] == "measured":
        peak = row["peak_bytes"] and row["peak_bytes"] / 2**30
        figures = [f"{images_per_second(row):.1f}", times(row), common.cell(peak, ".2f")]
        figures.append(common.cell(row["bytes_per_parameter"], ".2f"))
        figures.append(common.cell(row["flops_share"], ".1%"))
        figures += [common.cell(row.get("loss"), ".4f"), f"{row['first_step_s']:.1f}"]
    note = (row["note"] or row.get("how", "")).replace("|", "\\|")
    compiled = "yes" if cell["compile"] else "no"
    return f"| `{cell['recipe']}` | {compiled} | {' | '.join(figures)} | {note} |"


HEADS = ("images a second", "compiled", "x bf16", "peak GiB", "bytes a parameter")


def docs_table(record):
    """What was measured, as docs/speed.md shows it: a table a net, a line a recipe. `x bf16`, peak and bytes
    are those of the eager step, where there is one.
    """
    rows = {key(row): row for row in record["results"] if row["status"] == "measured"}
    tables = []
    for net in dict.fromkeys(net for net, *_ in rows):
        lines = [f"| {NETS.get(net, net)} | " + " | ".join(HEADS) + " |", "|---" * (len(HEADS) + 1) + "|"]
        for name in RECIPES:
            eager, compiled = (rows.get((net, name, on)) for on in (False, True))
            if eager or compiled:
                lines.append(f"| `{name}` | " + " | ".join(_docs_figures(eager, compiled)) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _docs_figures(eager, compiled):
    speeds = [f"{images_per_second(row):.0f}" if row else "-" for row in (eager, compiled)]
    row = eager or compiled
    peak = row["peak_bytes"] and row["peak_bytes"] / 2**30
    return [*speeds, times(row), common.cell(peak, ".2f"), common.cell(row["bytes_per_parameter"], ".2f")]


# ---- The command -------------------------------------------------------------------------------------------


def add_command(commands):
    sub = commands.add_parser("gpu", help="all recipes on a GPU; also written --gpu")

    def add(flag, help, **options):
        sub.add_argument(flag, help=help, **options)

    recipes = "recipes, * and ? as in a shell (default: all): " + ", ".join(RECIPES)
    add("--nets", f"default: {' '.join(NETS)}", nargs="+", metavar="MODEL:SIZE:IMAGE:BATCH")
    add("--only", recipes, nargs="+", default=["*"], metavar="PATTERN")
    add("--compile", "torch.compile (default: both)", choices=["both", "on", "off"], default="both")
    add("--budget", "end after that long; the same command goes on", type=natural, metavar="SECONDS")
    limit = "longest for one cell (default: 300)"
    add("--cell_limit", limit, type=natural, default=300, metavar="SECONDS")
    add("--repeats", "rounds (default: 7)", type=natural, default=7)
    add("--retry", "measure again what failed or ran out of memory or time", action="store_true")
    add("--fresh", "measure all anew, and replace the record", action="store_true")
    dry = "every recipe on a CPU with tiny nets and one round; kept only with --out"
    add("--dry_run", dry, action="store_true")
    add("--out", "where the record is kept (default: experiments/bench)", metavar="FOLDER")


def chosen(args):
    """(nets, cells to measure) of the parsed arguments. Raises Refused for what can't be measured."""
    if not args.dry_run and not torch.cuda.is_available():
        raise Refused(
            "--gpu: torch finds no CUDA device here; `python bench.py training --device cpu` measures "
            "recipes on this machine, `python bench.py --gpu --dry_run` tries every recipe on tiny nets"
        )
    nets = args.nets or (TINY if args.dry_run else list(NETS))
    check_nets(nets)
    for pattern in args.only:
        if not any(fnmatch(name, pattern) for name in RECIPES):
            raise Refused(f"--only {pattern}: fits no recipe; they are {', '.join(RECIPES)}")
    wanted = cells(nets, args.only, {"both": (False, True), "on": (True,), "off": (False,)}[args.compile])
    if args.dry_run:  # all recipes once, on the first net, and a few of them on the others and compiled
        first = [cell for cell in wanted if cell["net"] == nets[0] and not cell["compile"]]
        wanted = [cell for cell in wanted if cell["recipe"] in DRY or cell in first]
    if not wanted:
        same_net = "compiled, this is the net of bf16 or pure_bf16-stochastic"
        raise Refused(f"--only {' '.join(args.only)}: {same_net}; use --compile off, or those")
    if args.out and not Path(args.out).is_dir():
        raise Refused(f"--out {args.out}: no such folder; make it, or name another")
    return nets, wanted


def main(args, argv):
    """Measure the cells of the parsed arguments. Returns the exit status. Raises Refused before anything is
    measured.
    """
    nets, wanted = chosen(args)
    device = torch.device("cpu" if args.dry_run else "cuda")
    machine, rounds = facts_of_machine(device), 1 if args.dry_run else args.repeats
    command, settings = shlex.join(["python", "bench.py", *argv]), dict(nets=nets, rounds=rounds)
    settings.update(warm_up=WARM_UP, round_ms=ROUND_MS)
    header = dict(bench="gpu", command=command, date=date.today().isoformat())
    header.update(machine=machine, settings=settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.out or (scratch if args.dry_run else FOLDER))
        name = "dry-run" if args.dry_run else re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
        path = folder / f"gpu-{name}.json"
        rows = load(path, machine, args.fresh)
        again = ("refused",) if not args.retry else ("refused", "failed", "out of memory")
        done = {at for at, row in rows.items() if row["status"] not in again}
        todo = [cell for cell in wanted if key(cell) not in done]
        counts = f"{len(todo)} cells to measure, {len(wanted) - len(todo)} in {path.name}"
        print(f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}: {counts}", flush=True)
        left = measure_all(todo, rows, partial(save, path, header, rows), args, rounds, device)
        record = {**header, "results": list(rows.values())}
        print("\n" + (page(record) if args.dry_run else docs_table(record)))
        if not args.dry_run or args.out:
            print(f"\nall figures are in {path}, tables in {path.with_suffix('.md')}")
        if left:
            print(f"{left} of {len(wanted)} cells are left: run the same command again")
    return 0


def measure_all(todo, rows, save, args, rounds, device):
    """Measure cells into `rows`, saved after each one; returns how many are left when the budget ends."""
    kind = Here if args.dry_run else Worker
    runner = kind(partial(measure, device=str(device), rounds=rounds, dry=args.dry_run))
    deadline = time.monotonic() + (args.budget or math.inf)
    if not args.dry_run:  # a time limit from outside ends the worker too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for at, cell in enumerate(tqdm(todo, disable=None, leave=False)):
            rest = deadline - time.monotonic()
            if rest <= 0:
                return len(todo) - at
            try:
                row = runner.do(cell, min(args.cell_limit, rest))
            except Lost as lost:
                if lost.timeout and rest < args.cell_limit:  # the budget's end says nothing about the cell
                    return len(todo) - at
                row = {**cell, "status": "failed", "note": str(lost)}
            if row["status"] == "failed":
                runner.close()  # an illegal access poisons all that a process does later
            rows[key(row)] = row
            save()
            tqdm.write(f"{cell['net']} {cell['recipe']}{' compiled' if cell['compile'] else ''}: {line(row)}")
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept: run the same command again", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        runner.close()
    return 0
