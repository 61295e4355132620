"""Every recipe on a GPU, on nets of real size, in one command that can be stopped and continued: `python bench.py --gpu`.

    python bench.py --gpu                                       DiT-B/2, DiT-XL/2 and the U-Net under every recipe, eager and compiled
    python bench.py --gpu --budget 600                          for ten minutes; the same command again goes on where it stopped
    python bench.py --gpu --only 'fp8-torchao-*' --compile on   some recipes, compiled alone
    python bench.py --gpu --dry_run                             every recipe on a CPU: tiny nets, one round, nothing compiled, nothing kept

A cell is one net under one recipe, eager or under torch.compile: a training step (forward, backward, optimiser, EMA) or, `generate-*`, one forward
pass of a generator. It is measured beside the eager bf16 cell of its net, which takes turns with it in the same process: `x bf16` comes from those
rounds. Every recipe gets the same initial weights and inputs; `loss` is that after the warm-up, to see that what is fast also learns. Peak memory is
what the allocator held above its start during one step, alone, before the bf16 cell is built. The first step, compiling included, is timed apart.
`FLOP share`: of the step in FP8, or of the forward pass in 2:4 layers.
Ways to write weights and to hold moments share their net with another recipe and are not compiled again.

What can't run here, runs out of memory, fails, hangs or crashes is a row with its reason, and the rest goes on: cells run in a process of their own,
which is replaced after a failure. experiments/bench/gpu-<machine>.json and .md are written after every cell. Run again, the command measures what is
missing there, and tries again what was refused (a library may have come since) or, with --retry, whatever has no figures. It goes on only where
code, machine and versions are those of the record.
"""

import gc
import hashlib
import json
import math
import multiprocessing
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

import bench
import precision
from bench import BenchError
from precision import RecipeError, recipe

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "experiments" / "bench"
SOURCES = ("bench.py", "bench_gpu.py", "fp8.py", "models.py", "precision.py", "sparsity.py", "states.py")  # what a figure depends on

# 32x32 with patches of 2: 256 tokens, as the latents of 256x256 images in the DiT paper
NETS = {"dit:B/2:32:64": "DiT-B/2", "dit:XL/2:32:32": "DiT-XL/2", "unet:base:64:32": "U-Net"}
TINY = ["dit:tiny:8:2", "unet:tiny:8:2"]

PURE = dict(pure_bf16=True, stochastic=True)
GENERATE = {"generate-bf16": PURE, "generate-bf16-2:4": {**PURE, "sparse24": "magnitude"}}  # weights in bf16, dense and semi-structured
RECIPES = {
    "bf16": dict(bf16=True), "fp32": {}, "tf32": dict(sites=["compute=tf32"]), "pure_bf16-stochastic": PURE,
    **{f"fp8-{backend}-{scaling}": dict(fp8=True, fp8_backend=backend, fp8_recipe=scaling)
       for backend in ("torchao", "te", "scaled_mm") for scaling in ("tensorwise", "rowwise", "delayed")},
    "pure_bf16-stochastic-opt8bit-fp8": {**PURE, "opt8bit": True, "fp8": True},
    **GENERATE,
    "bf16-2:4": dict(bf16=True, sparse24="srste"), "pure_bf16-stochastic-2:4": {**PURE, "sparse24": "srste"},  # masked dense products
    "pure_bf16-kahan": dict(pure_bf16=True, kahan=True), "pure_bf16-split": dict(pure_bf16=True, master="split"),
    "bf16-opt8bit": dict(bf16=True, opt8bit=True), "bf16-opt4bit": dict(bf16=True, opt4bit=True),
    "pure_bf16-stochastic-opt8bit": {**PURE, "opt8bit": True}, "pure_bf16-stochastic-opt4bit": {**PURE, "opt4bit": True},
}
EAGER = tuple(RECIPES)[-6:]  # their net is that of bf16 or pure_bf16-stochastic
DRY = ("bf16", "fp8-scaled_mm-rowwise", *GENERATE)  # what a dry run tries a second time, on the U-Net and through torch.compile's wrapper
README_ROWS = ("fp32", "tf32", "bf16", "pure_bf16-stochastic", "fp8-torchao-tensorwise", "fp8-torchao-rowwise", "fp8-te-delayed",
               "pure_bf16-stochastic-opt8bit-fp8", *GENERATE)

WARM_UP = 10  # steps before any figure
ROUND_MS = 200  # steps enough for that make a round, so that the queue of kernels is as full as in a training


# ----------------------------------------------------------------------------------------------------------------------
# One cell


def cells(nets, only=("*",), compiled=(False, True)):
    """The cells to measure, in order: dicts of net, recipe, compile. Eager ones first, since compiling takes up to minutes a cell."""
    return [dict(net=net, recipe=name, compile=on) for on in compiled for net in nets for name in RECIPES
            if any(fnmatch(name, pattern) for pattern in only) and not (on and name in EAGER)]


def key(cell):
    return cell["net"], cell["recipe"], cell["compile"]


def reference_of(cell):
    return {**cell, "recipe": "generate-bf16" if cell["recipe"] in GENERATE else "bf16", "compile": False}


def contender(cell, device, dry):
    """(one training step or forward pass -> its loss or None, callable -> what the row tells of it). Raises RecipeError for what can't run here.

    dry: a generator without sparse kernels passes, so that a CPU runs the code around them.
    """
    flags, net = RECIPES[cell["recipe"]], bench.parse_net(cell["net"])
    notes = precision.check_machine(recipe(**flags).on(device), device)
    run, inputs, velocity = bench.prepared(net, flags, device)
    facts = dict(parameters=sum(p.numel() for p in run.params), batch_size=net[3], bytes_per_parameter=None, flops_share=None, how="; ".join(notes))
    if run.sparse:
        with torch.device("meta"):
            run.sparse.count_flops(bench.built(net), *(a[:1].to("meta") for a in inputs))
        found = run.sparse.report(torch.bfloat16)
        facts.update(flops_share=sum(row["flops"] for row in found["layers"]), how=found["why"].rpartition("; ")[2])
    if cell["recipe"] in GENERATE:
        return generator(run, inputs, cell["compile"], dry), lambda: facts
    if cell["compile"]:
        run.forward = torch.compile(run.model)

    def step():
        run.set_tf32()
        loss = F.mse_loss(run(*inputs), velocity)
        run.backward(loss)
        run.step()
        return loss

    def told():  # at the end: counting FLOPs puts other layers into an FP8 net for a moment, which would compile it anew
        facts["bytes_per_parameter"] = run.ledger().state_bytes
        if run.fp8:
            facts.update(flops_share=run.fp8.share, how=run.fp8.summary().partition(":")[0])
        return facts

    return step, told


def generator(run, inputs, compiled, dry):
    """callable() of one forward pass of the run's generator, of which alone the memory is kept."""
    if run.sparse:
        import sparsity

    net = run.generator("raw")
    if run.sparse and not dry and not any(isinstance(m, sparsity.KernelLinear) for m in net.model.modules()):
        raise RecipeError("2:4 generation is dense here" + run.sparse.report(torch.bfloat16)["why"].partition("generation too")[2])
    net.optimizer = net.low_part = net.ema = net.scaler = net.sparse = None
    net.averages, net.params, net.named_params = {}, [], []
    if compiled:
        net.forward = torch.compile(net.model)

    def step():
        with torch.no_grad():
            net(*inputs)

    return step


def timed(step, clock, steps):
    """Milliseconds a step, of `steps` in a row."""
    clock.wait()
    start = clock.mark()
    for _ in range(steps):
        step()
    end = clock.mark()
    clock.wait()
    return clock.ms(start, end) / steps


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)


def free(cell):
    """Give back what a cell held; compiled code too, whose guards would tell one cell's net from the next until dynamo gives up."""
    if cell["compile"]:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measured(cell, device, rounds, dry):
    """The figures of a cell, a dict; raises what its parts raise."""
    clock, cuda = bench.Clock(device), device.type == "cuda"
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
        except RecipeError as error:
            row["note"] = f"no ratio: {error}"
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["note"] = "no ratio: bf16 does not fit beside it"
    turns = {}
    for name, action in actions.items():
        steps = 1 if dry else min(50, max(1, round(ROUND_MS / timed(action, clock, 1))))
        turns[name] = partial(timed, action, clock, steps)
    row.update(bench.take_turns(turns, rounds, tqdm(disable=True)))
    if key(reference_of(cell)) == key(cell):
        row["reference_ms"] = row["ms"]
    row.update(told())
    unfused = sorted(kernel.__name__.strip("_") for kernel in precision._run_kernel.failed)
    if unfused:
        row["note"] = f"not fused, torch.compile failed: {', '.join(unfused)}"
    return row


def measure(cell, *, device, rounds, dry=False):
    """The row (dict) of a cell: its figures, or in `note` the one-line reason why it has none. status: measured, refused, out of memory, failed."""
    row, device = {**cell, "status": "measured", "note": ""}, torch.device(device)
    try:
        # a CPU takes minutes to compile what a GPU is to run
        with torch.compiler.set_stance("force_eager") if dry else nullcontext():
            row.update(measured(cell, device, rounds, dry))
    except RecipeError as error:
        row.update(status="refused", note=str(error))
    except Exception as error:  # whatever a library, a compiler or a driver raises is this cell's outcome, and not the end of the others
        if out_of_memory(error):
            size = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else math.nan
            row.update(status="out of memory", note=f"out of memory on {size:.0f} GiB: give --nets a smaller batch")
        else:
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            row.update(status="failed", note=f"{type(error).__name__}: {said[:200]}".rstrip(": "))
    free(cell)  # after the exception and its frames are gone
    return row


# ----------------------------------------------------------------------------------------------------------------------
# A process for cells


class Lost(Exception):
    """A process gave no result. timeout: because it took too long."""

    def __init__(self, message, timeout=False):
        super().__init__(message)
        self.timeout = timeout


def _serve(function, pipe):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the other one ends this one
    bench.quiet()
    try:
        while True:
            pipe.send(function(pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass


class Worker:
    """Calls function(argument) in a process of its own, which is started when needed and replaced after it is lost or closed."""

    def __init__(self, function, method="spawn"):
        self.function, self.context, self.process = function, multiprocessing.get_context(method), None

    def do(self, argument, seconds):
        """The function's result. Raises Lost after `seconds`, or when the process ends."""
        if self.process is None:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=_serve, args=(self.function, theirs))
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(argument)
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            lost = Lost(f"took longer than {seconds:.0f} s", timeout=True)
        except (EOFError, OSError):
            self.process.join(10)
            lost = Lost(f"its process ended, exit status {self.process.exitcode}")
        self.close(wait=0)
        raise lost

    def close(self, wait=10):
        """End the process, by force after `wait` seconds."""
        if self.process is not None:
            self.pipe.close()  # it ends when it has nobody to listen to
            self.process.join(wait)
            self.process.kill()
            self.process.join()
            self.process = None


class Here:
    """Calls the function in this process."""

    def __init__(self, function):
        self.function = function

    def do(self, argument, seconds):
        return self.function(argument)

    def close(self):
        pass


# ----------------------------------------------------------------------------------------------------------------------
# The record


def facts_of_machine(device):
    """Machine, versions, commit, and a hash of the sources: a commit says little where there is no git, or the tree is not clean."""
    from trainer import environment

    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    sources = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in SOURCES)).hexdigest()
    libraries = {name: version(name) for name in ("triton", "torchao", "transformer_engine", "bitsandbytes")}
    return {**environment(device), "cuda": torch.version.cuda, "libraries": libraries, "sources": sources[:16]}


def same(old, new):
    """Whether figures of two machines (as `facts_of_machine`) belong in one record; a library that only one has is no difference."""
    pairs = [(old["libraries"].get(name), version) for name, version in new["libraries"].items()]
    return all(old[k] == new[k] for k in ("gpu", "torch", "cuda", "sources")) and all(a == b or None in (a, b) for a, b in pairs)


def load(path, machine, fresh):
    """{key: row} measured earlier. Raises BenchError for a record of other code or another machine."""
    if fresh or not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        if same(record["machine"], machine):
            return {key(row): row for row in record["results"]}
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{path} can't be read: move it away, or measure anew with --fresh") from None
    raise BenchError(f"{path} was measured by other code or versions (commit {str(record['machine'].get('commit'))[:8]}, torch {record['machine']['torch']}): "
                     f"--fresh measures anew and replaces it, --out FOLDER keeps both")


def save(path, header, rows):
    from trainer import write_atomically, write_json

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


def page(record):
    """The record as markdown: a table a net, cells without a figure with the reason."""
    machine, rows = record["machine"], {key(row): row for row in record["results"]}
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items() if version)
    parts = [f"# {machine['gpu'] or machine['cpu']}", f"Written by `{record['command']}`, {record['date']}: torch {machine['torch']}, CUDA {machine['cuda']}, "
             f"{libraries}; commit {str(machine['commit'])[:8]}{'' if machine['clean'] else ' (changed or unknown)'}, sources {machine['sources']}. "
             "`bench_gpu.py` says what the columns are."]
    for net in dict.fromkeys([*record["settings"]["nets"], *(row["net"] for row in record["results"])]):
        known = next((row for row in record["results"] if row["net"] == net and "parameters" in row), None)
        size = f", {known['parameters']:,} parameters" if known else ""
        parts.append(f"## {NETS.get(net, net)}\n\n`{net}` (model:size:image:batch){size}")
        lines = ["| recipe | compiled | images/s | x bf16 | peak GiB | bytes a parameter | FLOP share | loss | first step s | note |",
                 "|---|---|---|---|---|---|---|---|---|---|"]
        for cell in sorted(cells([net]), key=lambda cell: list(RECIPES).index(cell["recipe"])):
            row = rows.get(key(cell), {"status": "", "note": "not measured"})
            figures = ["-"] * 7
            if row["status"] == "measured":
                peak = row["peak_bytes"] and row["peak_bytes"] / 2**30
                figures = [f"{images_per_second(row):.1f}", times(row), bench.cell(peak, ".2f"), bench.cell(row["bytes_per_parameter"], ".2f"),
                           bench.cell(row["flops_share"], ".1%"), bench.cell(row.get("loss"), ".4f"), f"{row['first_step_s']:.1f}"]
            note = (row["note"] or row.get("how", "")).replace("|", "\\|")
            lines.append(f"| `{cell['recipe']}` | {'yes' if cell['compile'] else 'no'} | " + " | ".join(figures) + f" | {note} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def records(folder=FOLDER):
    """The GPU records of a folder."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("gpu-*.json"))]


def readme_table(found):
    """The README's table of records: images a second, eager / compiled; 'not measured' where there is none."""
    blocks = []
    for record in found or [None]:
        rows = {key(row): row for row in record["results"]} if record else {}

        def figure(net, name):
            here = [rows.get((net, name, on)) for on in (False, True)]
            shown = [f"{images_per_second(row):.0f}" if row and row["status"] == "measured" else "-" for row in here]
            return " / ".join(shown) if set(shown) != {"-"} else "can't run" if any(here) else "not measured"

        lines = [f"| {record['machine']['gpu'] if record else 'recipe'} | " + " | ".join(NETS.values()) + " |", "|---|" + "---|" * len(NETS)]
        lines += [f"| `{name}` | " + " | ".join(figure(net, name) for net in NETS) + " |" for name in README_ROWS]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


# ----------------------------------------------------------------------------------------------------------------------
# The command


def add_command(commands):
    sub = commands.add_parser("gpu", help="all recipes on a GPU; also written --gpu")
    sub.add_argument("--nets", nargs="+", metavar="MODEL:SIZE:IMAGE:BATCH", help=f"default: {' '.join(NETS)}")
    sub.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="recipes, * and ? as in a shell (default: all): " + ", ".join(RECIPES))
    sub.add_argument("--compile", choices=["both", "on", "off"], default="both", help="torch.compile (default: both)")
    sub.add_argument("--budget", type=bench.positive, metavar="SECONDS", help="end after that long; the same command goes on")
    sub.add_argument("--cell_limit", type=bench.positive, default=300, metavar="SECONDS", help="longest for one cell (default: 300)")
    sub.add_argument("--repeats", type=bench.positive, default=7, help="rounds (default: 7)")
    sub.add_argument("--retry", action="store_true", help="measure again what failed or ran out of memory or time")
    sub.add_argument("--fresh", action="store_true", help="measure all anew, and replace the record")
    sub.add_argument("--dry_run", action="store_true", help="every recipe on a CPU with tiny nets and one round; kept only with --out")
    sub.add_argument("--out", metavar="FOLDER", help="where the record is kept (default: experiments/bench)")


def main(args, argv):
    """Measure the cells of the parsed arguments. Returns the exit status. Raises BenchError before anything is measured."""
    if not args.dry_run and not torch.cuda.is_available():
        raise BenchError("--gpu: torch finds no CUDA device here; `python bench.py training --device cpu` measures recipes on this machine, "
                         "`python bench.py --gpu --dry_run` tries every recipe on tiny nets")
    device = torch.device("cpu" if args.dry_run else "cuda")
    nets = args.nets or (TINY if args.dry_run else list(NETS))
    for net in nets:
        with torch.device("meta"):
            bench.built(bench.parse_net(net))
    for pattern in args.only:
        if not any(fnmatch(name, pattern) for name in RECIPES):
            raise BenchError(f"--only {pattern}: fits no recipe; they are {', '.join(RECIPES)}")
    wanted = cells(nets, args.only, {"both": (False, True), "on": (True,), "off": (False,)}[args.compile])
    if args.dry_run:
        wanted = [cell for cell in wanted if cell["recipe"] in DRY or (cell["net"] == nets[0] and not cell["compile"])]
    if not wanted:
        raise BenchError(f"--only {' '.join(args.only)}: compiled, this is the net of bf16 or pure_bf16-stochastic; use --compile off, or those")
    if args.out and not Path(args.out).is_dir():
        raise BenchError(f"--out {args.out}: no such folder; make it, or name another")
    machine = facts_of_machine(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.out or (scratch if args.dry_run else FOLDER))
        name = "dry-run" if args.dry_run else re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
        path = folder / f"gpu-{name}.json"
        rows = load(path, machine, args.fresh)
        header = dict(bench="gpu", command=shlex.join(["python", "bench.py", *argv]), date=date.today().isoformat(), machine=machine,
                      settings=dict(nets=nets, rounds=1 if args.dry_run else args.repeats, warm_up=WARM_UP, round_ms=ROUND_MS))
        done = {k for k, row in rows.items() if row["status"] == "measured" or row["status"] != "refused" and not args.retry}
        todo = [cell for cell in wanted if key(cell) not in done]
        print(f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}: {len(todo)} cells to measure, {len(wanted) - len(todo)} in {path.name}", flush=True)
        left = measure_all(todo, rows, partial(save, path, header, rows), args, header["settings"]["rounds"], device)
        print(f"\n{page({**header, 'results': list(rows.values())})}" if args.dry_run else f"\n{readme_table([{**header, 'results': list(rows.values())}])}")
        if not args.dry_run or args.out:
            print(f"\nall figures are in {path}, tables in {path.with_suffix('.md')}")
        if left:
            print(f"{left} of {len(wanted)} cells are left: run the same command again")
    return 0


def measure_all(todo, rows, save, args, rounds, device):
    """Measure cells into `rows`, saved after each one; returns how many are left when the budget ends."""
    runner = (Here if args.dry_run else Worker)(partial(measure, device=str(device), rounds=rounds, dry=args.dry_run))
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
