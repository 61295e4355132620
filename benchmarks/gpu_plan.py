"""Half an hour on a borrowed GPU: what is run, in which order, and how long each step may take.

    python bench.py --gpu --plan      prints it
    python bench.py --gpu             runs it

A step that is not done within its seconds is stopped; the next one begins. What came of each is written to
experiments/bench/gpu-plan.json when it ends, beside the records that the steps keep themselves.
"""

import signal
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.gpu_record import ROOT
from harness.files import write_json
from harness.printing import markdown_table

PLAN_RECORD = ROOT / "experiments" / "bench" / "gpu-plan.json"
GRACE_SECONDS = 20  # seconds that a stopped step has to write what it holds
COMPILED_RECIPES = "tf32 pure_bf16-stochastic fp8-torchao-tensorwise fp8-torchao-rowwise bf16-2:4 bf16"
STATE_RECIPES = "pure_bf16-stochastic-opt8bit pure_bf16-split pure_bf16-flashoptim"
LARGE_NETS_COMMAND = "bench.py --gpu --nets dit:XL/2:64:8 unet:base:64:32 --repeats 20 --jobs 3"


class PlannedStep(NamedTuple):
    name: str
    seconds: int  # its budget
    words: str  # after `python`
    what: str  # it answers


PLAN = (
    PlannedStep(
        "tests",
        400,
        "-m pytest -v -m gpu -n 6",
        "whether the Triton step has the CPU's bits, and more",
    ),
    PlannedStep(
        "reduction",
        100,
        "bench.py reduction --out experiments/bench/gpu-reduction.json",
        "gradients with partial sums in bf16 and in fp32, against the CPU's and fp64",
    ),
    PlannedStep(
        "compiled",
        480,
        f"{LARGE_NETS_COMMAND} --compile on --budget 460 --only {COMPILED_RECIPES}",
        "compiled speed and peak memory, 20 rounds",
    ),
    PlannedStep(
        "states",
        150,
        f"{LARGE_NETS_COMMAND} --compile on --budget 140 --only {STATE_RECIPES}",
        "the same of recipes whose net is compiled by then: other states, FlashOptim's AdamW",
    ),
    PlannedStep(
        "batch",
        160,
        "bench.py batch --out experiments/bench/gpu-batch.json",
        "the largest batch by recipe",
    ),
    PlannedStep(
        "scores",
        90,
        "train.py --data fashion_mnist --size tiny --steps 1 --sample_steps 1 --runs runs/experiments",
        "nothing: it fits the net that scores Fashion-MNIST, so that no run of 043 has to",
    ),
    PlannedStep("043", 340, "experiments/run.py 043 --jobs 10", "the runs that 043 lacks, ten at once"),
)


def plan_table():
    """The plan as a table in Markdown."""
    rows = [[step.name, str(step.seconds), f"`python {step.words}`", step.what] for step in PLAN]
    rows.append(["together", str(sum(step.seconds for step in PLAN)), "", ""])
    return markdown_table([["step", "seconds", "command", "what it answers"], *rows])


def run_steps(plan, path, machine):
    """Run the steps in order, and write after each what came of it. Returns the exit status."""
    done = []
    for step in plan:
        print(f"{step.name}: {step.seconds} s at most: python {step.words}", flush=True)
        done.append(outcome_of_step(step))
        write_json(path, {"machine": machine, "steps": done})
        print(f"{step.name}: {done[-1]['ended']} after {done[-1]['seconds']:.0f} s", flush=True)
    return int(any(step["ended"] != "done" for step in done))


def outcome_of_step(step):
    """{name, command, budget, seconds, ended, last lines} of a step; ended: done, failed or stopped."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.words.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=step.seconds)
        ended = "failed" if process.returncode else "done"
    except subprocess.TimeoutExpired:
        said, ended = stop_step(process), "stopped"
    seconds = round(time.monotonic() - start, 1)
    command = f"python {step.words}"
    last = said.splitlines()[-30:]
    return dict(name=step.name, command=command, budget=step.seconds, seconds=seconds, ended=ended, said=last)


def stop_step(process):
    """Ask a step to end, and what it had said by then."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
