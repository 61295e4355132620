"""One cell of bench.py --gpu: a net under one recipe, eager or under torch.compile, measured on a device.

A cell is a training step (forward, backward, optimiser, average) or, for `generate-*`, one forward pass of a
generator. The eager bf16 cell of its net takes turns with it in the same process: `x bf16` comes from those
rounds. Every recipe gets the same initial weights and inputs. The loss is that after the warm-up, to see that
what is fast also learns.
"""

import fcntl
import gc
import math
import tempfile
import time
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import common, subjects
from benchmarks.allocated import bytes_on, count_of, peak_bytes
from benchmarks.common import (
    Cell,
    DeviceClock,
    in_turn,
    parse_net,
    prepared,
    take_turns,
    timed,
    training_step,
)
from lowprec.errors import Refused, first_line, out_of_memory
from lowprec.kernels import compiled as compiling
from lowprec.layers.sparsity import KernelLinear
from lowprec.precision import recipe
from lowprec.rules import check_machine

GENERATING_CELLS = ("generate-bf16", "generate-bf16-2:4")  # a forward pass of a generator
# recipe: whose AdamW writes its weights, a name of subjects.PEER_CLASSES
PEER_OF_RECIPE = {"pure_bf16-flashoptim": "flashoptim"}
GPU_RECIPE_NAMES = (  # in this order
    "bf16",
    "fp32",
    "tf32",
    "pure_bf16-stochastic",
    *common.FP8_RECIPES,
    "pure_bf16-stochastic-opt8bit-fp8",
    *GENERATING_CELLS,
    "bf16-2:4",
    "pure_bf16-stochastic-2:4",
    # their net is that of bf16 or pure_bf16-stochastic: torch takes what it compiled for those
    "pure_bf16-kahan",
    "pure_bf16-split",
    "bf16-opt8bit",
    "bf16-opt4bit",
    "pure_bf16-stochastic-opt8bit",
    "pure_bf16-stochastic-opt4bit",
    "pure_bf16-flashoptim",
)
GPU_RECIPES = {name: common.RECIPES[name] for name in GPU_RECIPE_NAMES}

GPU_WARM_UP_STEPS = 10  # steps before any figure
ROUND_MS = 200  # steps enough for that make a round, so that the queue of kernels is as full as in a training
MOST_STEPS = 50  # a round
# whoever measures on this machine's GPU holds it; `flock` in a shell takes it as well
GPU_LOCK = Path(tempfile.gettempdir()) / "lowprec-gpu.lock"


def cells(nets, only=("*",), compiled=(False, True)):
    """The cells to measure, in order: dicts of net, recipe, compile.

    Eager ones first: compiling takes up to minutes a cell.
    """
    found = []
    for on, net, name in product(compiled, nets, GPU_RECIPES):
        if any(fnmatch(name, pattern) for pattern in only):
            found.append(dict(net=net, recipe=name, compile=on))
    return found


def cell_key(cell):
    return cell["net"], cell["recipe"], cell["compile"]


def reference_cell(cell):
    """The eager bf16 cell that it is compared with."""
    name = "generate-bf16" if cell["recipe"] in GENERATING_CELLS else "bf16"
    return {**cell, "recipe": name, "compile": False}


# ---- What a cell does --------------------------------------------------------------------------------------


def contender(cell, device, dry):
    """(one training step or forward pass -> its loss or None, callable -> what the row says of it).

    dry: a generator without sparse kernels passes, so that a CPU runs the code around them. Raises Refused
    for what can't run here.
    """
    flags = GPU_RECIPES[cell["recipe"]]
    net = parse_net(cell["net"])
    notes = check_machine(recipe(**flags).on(device), device)
    run, inputs, velocity = prepared(net, flags, device, **optimizer_of(cell["recipe"], device))
    run.view_of_model.example = (tuple(a[:1].to("meta") for a in inputs), {})
    facts = dict(parameters=count_of(run.params), batch_size=net[3])
    facts.update(bytes_per_parameter=None, flops_share=None, how="; ".join(notes))
    if cell["recipe"] in GENERATING_CELLS:
        ledger = run.ledger()
        facts.update(covered_layers(ledger))
        # not the run: its memory is not the generator's
        return generator(run, ledger, inputs, cell["compile"], dry), lambda: facts
    if cell["compile"]:
        run.forward = torch.compile(run.model)

    def described():
        # at the end: counting FLOPs takes the FP8 layers out for a moment, which would compile the net anew
        ledger = run.ledger()
        return {**facts, "bytes_per_parameter": ledger.state_bytes, **covered_layers(ledger)}

    return training_step(run, inputs, velocity), described


def optimizer_of(name, device):
    """{"optimizer": what makes it} of a recipe that a peer's optimiser steps, else {}. Raises Refused."""
    if name not in PEER_OF_RECIPE:
        return {}
    made = subjects.subject_of_name(PEER_OF_RECIPE[name], device)
    return {"optimizer": lambda params: made.over(list(params), **common.ADAMW_OPTIONS)}


def covered_layers(ledger):
    """What a ledger says of the layers that a method covers: their share of the FLOPs, and how they run."""
    share = next(iter(ledger.flops_share.values()), None)
    if share is None:
        return {}
    how = ""
    sparse = sparse_row(ledger)
    if sparse:
        how = sparse["why"].rpartition("; ")[2]
    for detail in ledger.details.values():
        how = detail.summary().partition(":")[0]
    return {"flops_share": share, "how": how}


def sparse_row(ledger):
    """The row of a ledger that lists 2:4 layers, or None."""
    return next((row for row in ledger.rows if "layers" in row), None)


def generator(run, ledger, inputs, compiled, dry):
    """callable() of one forward pass of the run's generator, which shares no memory with the run."""
    net = run.generator("raw")
    sparse = sparse_row(ledger)
    if sparse and not dry and not any(isinstance(m, KernelLinear) for m in net.net.modules()):
        raise Refused("2:4 generation is dense here" + sparse["why"].partition("generation too")[2])
    if compiled:
        net.forward = torch.compile(net.net)

    def step():
        with torch.no_grad():
            net(*inputs)

    return step


# ---- Measuring ---------------------------------------------------------------------------------------------


def measure_cell(cell, *, device, rounds, dry=False):
    """The row (dict) of a cell: its figures, or in `note` the one-line reason why it has none.

    status: measured, refused, out of memory, failed.
    """
    device = torch.device(device)
    row = {**cell, "status": "measured", "note": ""}
    try:
        # a CPU takes minutes to compile what a GPU is to run
        with torch.compiler.set_stance("force_eager") if dry else nullcontext():
            row.update(cell_figures(cell, device, rounds, dry))
    except Refused as error:
        row.update(status="refused", note=str(error))
    except Exception as error:
        # whatever a library, a compiler or a driver raises is this cell's outcome, not the end of the others
        if out_of_memory(error):
            note = f"out of memory on {gib_of(device):.0f} GiB: give --nets a smaller batch"
            row.update(status="out of memory", note=note)
        else:
            row.update(status="failed", note=f"{type(error).__name__}: {first_line(error)[:200]}")
    # after the exception and its frames are gone
    if cell["compile"]:
        torch._dynamo.reset()  # guards would tell one cell's net from the next until dynamo gives up
    free_gpu_memory(device)
    return row


def gib_of(device):
    if device.type != "cuda":
        return math.nan
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def cell_figures(cell, device, rounds, dry):
    """The figures of a cell, a dict; raises what its parts raise.

    Peak memory is what the allocator held above its start during one step, alone: the bf16 cell comes later.
    """
    clock = DeviceClock(device)
    before = bytes_on(device)
    with gpu_turn(device, fcntl.LOCK_SH):
        step, described = contender(cell, device, dry)
        seconds, loss = first_step(step, clock)
        row = dict(first_step_s=seconds)
        free_gpu_memory(device)  # the dense net that a generator was made from, and what compiling took
    with gpu_turn(device, fcntl.LOCK_EX):
        row.update(warmed_up(step, loss, dry))
        row["peak_bytes"] = peak_bytes(step, device, before)
        turns = [turn_of(step, clock, "ms", dry)]
        is_reference = cell_key(reference_cell(cell)) == cell_key(cell)
        if not is_reference:
            turns += reference_turns(cell, device, clock, dry, row)
        take_turns([Cell(cell["recipe"], row, turns)], rounds, tqdm(disable=True))
    if is_reference:
        row["reference_ms"] = row["ms"]
    row.update(described())
    if compiling.unfused:
        row["note"] = f"not fused, torch.compile failed: {', '.join(unfused_kernels())}"
    return row


@contextmanager
def gpu_turn(device, kind):
    """Hold this machine's GPU: fcntl.LOCK_SH beside others that build and compile, LOCK_EX alone, to measure.

    Compiling beside a measurement is not harmless: the CPU that it takes is the one that fills the GPU's
    queue.
    """
    if device.type != "cuda":
        yield
        return
    with open(GPU_LOCK, "w") as file:
        fcntl.flock(file, kind)  # given back when the file is closed, or its process ends
        yield


def first_step(step, clock):
    """(seconds, compiling included; loss, None of a generator) of the first step."""
    clock.wait()
    start = time.perf_counter()
    loss = step()
    clock.wait()
    return time.perf_counter() - start, loss


def warmed_up(step, loss, dry):
    """{loss of the last step before any figure, of a training step}. loss: that of the first."""
    if not dry:
        for _ in range(GPU_WARM_UP_STEPS - 1):
            loss = step()
    return {} if loss is None else {"loss": loss.item()}


def turn_of(step, clock, column, dry):
    """A turn of a cell: as many steps as fill ROUND_MS."""
    steps = 1
    if not dry:
        steps = min(MOST_STEPS, max(1, round(ROUND_MS / timed(step, clock))))
    return partial(in_turn, step, clock, steps, column)


def reference_turns(cell, device, clock, dry, row):
    """[the turn of the cell's reference]; where it can't run, none, and row["note"] says why."""
    try:
        step, _ = contender(reference_cell(cell), device, dry)
        warmed_up(step, step(), dry)
        return [turn_of(step, clock, "reference_ms", dry)]
    except Refused as error:
        row["note"] = f"no ratio: {error}"
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        row["note"] = "no ratio: bf16 does not fit beside it"
    return []


def unfused_kernels():
    """Names of the kernels that could not be built here; one made by a function has the name of that one."""
    return sorted({kernel.__qualname__.partition(".")[0].strip("_") for kernel in compiling.unfused})


def free_gpu_memory(device):
    """Give back the memory of a GPU that nothing holds any more; that of a CPU is not measured here."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
