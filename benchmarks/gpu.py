"""Every recipe on a GPU, on nets of real size, in one command that can be stopped and continued.

    python bench.py --gpu                   half an hour of a GPU by the plan of gpu_plan.py; --plan prints it
    python bench.py --gpu --compile both    DiT-B/2, DiT-XL/2 and a U-Net, every recipe, eager and compiled
    python bench.py --gpu --budget 600      for ten minutes; the same command again goes on
    python bench.py --gpu --only 'fp8-torchao-*' --compile on      some recipes, compiled alone
    python bench.py --gpu --dry_run         every recipe on a CPU: tiny nets, one round, nothing kept

What can't run here, runs out of memory, fails, hangs or crashes is a row with its reason: cells run in a
process of their own. experiments/bench/gpu-<machine>.json and .md are written after every cell. Run again,
the command measures what is missing there or was refused, with --retry also what failed. It goes on only
where code, machine and versions are those of the record.
"""

import math
import queue
import re
import signal
import sys
import tempfile
import time
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import common, gpu_plan
from benchmarks.common import Command, Flag, check_nets, nets_flag
from benchmarks.gpu_cells import (
    GENERATING_CELLS,
    GPU_RECIPES,
    GPU_WARM_UP_STEPS,
    ROUND_MS,
    cell_key,
    cells,
    measure_cell,
)
from benchmarks.gpu_record import (
    GPU_NET_TITLES,
    ROOT,
    cell_line,
    docs_table,
    facts_of_machine,
    load_record,
    record_page,
    save_record,
)
from benchmarks.worker import Here, Lost, Worker
from harness.files import check_place
from harness.ranks import check_cuda
from harness.run_folder import environment
from lowprec.errors import Refused

RECORDS_FOLDER = ROOT / "experiments" / "bench"
TINY_NETS = ["dit:tiny:8:2", "unet:tiny:8:2"]
INSTEAD_OF_A_GPU = (
    "--gpu --plan prints what would run, --gpu --dry_run tries every recipe on tiny nets, and "
    "`python bench.py training --device cpu` measures recipes on this machine"
)
# what a dry run tries a second time, on the U-Net and through torch.compile's wrapper
DRY_RECIPES = ("bf16", "fp8-scaled_mm-rowwise", *GENERATING_CELLS)


GPU_FLAGS = (
    Flag("--plan", False, "print what --gpu alone runs, in order, and how many seconds each step may take"),
    nets_flag(*GPU_NET_TITLES),
    Flag(
        "--only",
        ["*"],
        f"recipes, * and ? as in a shell: {', '.join(GPU_RECIPES)}",
        type=str,
        metavar="PATTERN",
    ),
    Flag("--compile", "both", "torch.compile", choices=["both", "on", "off"]),
    Flag("--budget", None, "end after that long; the same command goes on", metavar="SECONDS"),
    Flag("--cell_limit", 300, "longest for one cell", metavar="SECONDS"),
    Flag("--repeats", 7, "rounds"),
    Flag("--jobs", 1, "cells that are built and compiled at once; they are timed one by one"),
    Flag("--retry", False, "measure again what failed or ran out of memory or time"),
    Flag("--fresh", False, "measure all anew, and replace the record"),
    Flag("--dry_run", False, "every recipe on a CPU with tiny nets and one round; kept only with --out"),
    Flag("--out", None, "where the record is kept (default: experiments/bench)", type=Path, metavar="FOLDER"),
)


def chosen_cells(args):
    """(nets, cells to measure) of the parsed arguments. Raises Refused for what can't be measured."""
    nets = args.nets
    if args.dry_run and nets == list(GPU_NET_TITLES):
        nets = TINY_NETS
    check_nets(nets)
    for pattern in args.only:
        if not cells(nets[:1], [pattern], compiled=[False]):
            raise Refused(f"--only {pattern}: fits no recipe; they are {', '.join(GPU_RECIPES)}")
    compiled = {"both": (False, True), "on": (True,), "off": (False,)}[args.compile]
    wanted = cells(nets, args.only, compiled)
    if args.dry_run:  # all recipes once, on the first net, and a few of them on the others and compiled
        first = cells(nets[:1], compiled=(False,))
        wanted = [cell for cell in wanted if cell["recipe"] in DRY_RECIPES or cell in first]
    check_place("--out", (args.out or RECORDS_FOLDER) / "gpu.json")
    return nets, wanted


def run(args, argv):
    """Measure the cells of the parsed arguments. Returns the exit status.

    Raises Refused before anything is measured.
    """
    if args.plan:
        print(gpu_plan.plan_table())
        return 0
    if not args.dry_run:
        check_cuda("--gpu", INSTEAD_OF_A_GPU)
    if argv == ["--gpu"]:
        return gpu_plan.run_steps(gpu_plan.PLAN, gpu_plan.PLAN_RECORD, environment(torch.device("cuda")))
    nets, wanted = chosen_cells(args)
    if args.dry_run and not args.out:
        with tempfile.TemporaryDirectory() as scratch:
            return measure_and_print(args, argv, nets, wanted, Path(scratch))
    return measure_and_print(args, argv, nets, wanted, args.out or RECORDS_FOLDER)


def measure_and_print(args, argv, nets, wanted, folder):
    device = torch.device("cpu" if args.dry_run else "cuda")
    rounds = 1 if args.dry_run else args.repeats
    machine = facts_of_machine(device)
    path = folder / f"gpu-{name_of_record(args, machine)}.json"
    rows = load_record(path, machine, args.fresh)
    settings = dict(nets=nets, rounds=rounds, warm_up=GPU_WARM_UP_STEPS, round_ms=ROUND_MS)

    def record():
        return common.record("gpu", argv, machine, settings, list(rows.values()))

    again = ("refused", "failed", "out of memory") if args.retry else ("refused",)
    done = {at for at, row in rows.items() if row["status"] not in again}
    todo = [cell for cell in wanted if cell_key(cell) not in done]
    counts = f"{len(todo)} cells to measure, {len(wanted) - len(todo)} in {path.name}"
    print(f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}: {counts}", flush=True)
    left = measure_all(todo, rows, lambda: save_record(path, record()), args, rounds, device)
    print("\n" + (record_page(record()) if args.dry_run else docs_table(record())))
    if not args.dry_run or args.out:
        print(f"\nall figures are in {path}, tables in {path.with_suffix('.md')}")
    if left:
        print(f"{left} of {len(wanted)} cells are left: run the same command again")
    return 0


def name_of_record(args, machine):
    if args.dry_run:
        return "dry-run"
    return re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")


def measure_all(todo, rows, save, args, rounds, device):
    """Measure cells into `rows`, saved after each one; returns how many are left when the budget ends."""
    kind = Here if args.dry_run else Worker
    function = partial(measure_cell, device=str(device), rounds=rounds, dry=args.dry_run)
    runners = [kind(function) for _ in range(args.jobs)]
    deadline = time.monotonic() + (args.budget or math.inf)
    left = 0
    if not args.dry_run:  # a time limit from outside ends the workers too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = measured_by(runners, todo, args.cell_limit, deadline)
        for row in tqdm(found, total=len(todo), disable=None, leave=False):
            if row is None:
                left += 1
                continue
            rows[cell_key(row)] = row
            save()
            compiled = " compiled" if row["compile"] else ""
            tqdm.write(f"{row['net']} {row['recipe']}{compiled}: {cell_line(row)}")
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept: run the same command again", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for runner in runners:
            runner.close()
    return left


def measured_by(runners, todo, limit, deadline):
    """The rows of cells as they are done, by as many processes; None for those that the budget cuts off."""
    free = queue.SimpleQueue()
    for runner in runners:
        free.put(runner)

    def row_of(cell):
        runner = free.get()
        row = measured_within(runner, cell, limit, deadline - time.monotonic())
        if row and row["status"] == "failed":
            runner.close()  # an illegal access poisons all that a process does later
        free.put(runner)
        return row

    if len(runners) == 1:
        return map(row_of, todo)
    return ThreadPool(len(runners)).imap_unordered(row_of, todo)


def measured_within(runner, cell, limit, rest):
    """The row of a cell that may take `limit` seconds; None where the budget's `rest` ends first."""
    if rest <= 0:
        return None
    try:
        return runner.do(cell, min(limit, rest))
    except Lost as lost:
        if lost.timeout and rest < limit:  # the budget's end says nothing about the cell
            return None
        return {**cell, "status": "failed", "note": str(lost)}


COMMAND = Command("gpu", "all recipes on a GPU; also written --gpu", run=run, flags=GPU_FLAGS)
