"""--batch_size auto: the largest batch whose training steps fit into the memory of a GPU.

Real steps are taken with 2, 4, 8 ... examples a process until memory does not suffice, by a run that is
thrown away before the real one begins: that has the bits of a run whose --batch_size was typed. Several
processes try by themselves, and all take the smallest of their numbers.
"""

import gc
import tempfile
from pathlib import Path

import torch

from harness.flags import TEN_MILLION
from harness.ranks import Ranks, ranks_here
from harness.run_folder import Folder
from lowprec.errors import Refused, out_of_memory

FREE_MARGIN = 0.1  # share of the free memory that stays free, for scores, pictures and what fragments it

# ---- The search --------------------------------------------------------------------------------------------


def largest_power_of_two(fits, most):
    """The largest power of two, at most `most`, up to which fits(size) holds, from 2 on; 1 where that alone
    fits, and 0 where nothing does.
    """
    found = 0
    size = 2
    while size <= most and fits(size):
        found = size
        size *= 2
    if found == 0 and most >= 1 and fits(1):
        return 1
    return found


def survives(step):
    """Whether step() ends before memory does. Other errors are its own."""
    try:
        step()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    return True


class TrialMemory:
    """That of one GPU while sizes are tried: what exceeds the margin is out of memory."""

    def __init__(self, device):
        if device.index is None:  # set_per_process_memory_fraction asks for a number
            device = torch.device(device.type, torch.cuda.current_device())
        self.device = device

    def __enter__(self):
        self.clear()
        free, self.total = torch.cuda.mem_get_info(self.device)
        own = torch.cuda.memory_reserved(self.device)
        share = (own + (1 - FREE_MARGIN) * free) / self.total
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        return self

    def __exit__(self, *error):
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        self.clear()

    def clear(self):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def used(self):
        """Most bytes that torch has held since `clear`."""
        return torch.cuda.max_memory_reserved(self.device)


def largest_tried(make, run, device, world):
    """(largest batch of one process or 0, most there could be, bytes it took, bytes there are)."""
    gpus = []
    if device.type == "cuda":
        gpus.append(device)
    with TrialMemory(device) as memory, torch.random.fork_rng(devices=gpus):
        with tempfile.TemporaryDirectory() as folder:
            found = _searched(make, run, Path(folder) / "trial", world, memory)
    if run.config.compile:  # else the run's net would be compiled for sizes that vary
        torch._dynamo.reset()
    return *found, memory.total


def _searched(make, run, folder, world, memory):
    accumulate = min(2, run.config.accumulate)  # 2: sums are held too
    trial = make(run.replaced(batch_size=2, accumulate=accumulate, workers=0), folder=folder, ranks=Ranks())
    trial.ready()
    second = []  # gradients that the real run will hold twice, as DistributedDataParallel does
    if world > 1:
        second = [torch.empty_like(p) for p in trial.precision.params]
    used = {}  # size: bytes
    most = max(1, min(len(trial.train), TEN_MILLION) // world)

    def fits(size):
        memory.clear()
        fine = survives(lambda: trial.first_steps(size))
        used[size] = memory.used()
        return fine

    found = largest_power_of_two(fits, most)
    del second  # held until here
    return found, most, used.get(found, 0)


# ---- The choice --------------------------------------------------------------------------------------------


def never_full(device):
    """Why a batch can't be searched for on a device, or None."""
    if device.type == "cuda":
        return None
    return "the memory of a CPU is shared with all else, so nothing says when it is full"


def check_search(config, device, dry):
    """Raise Refused where no search can be had."""
    why = never_full(device)
    if dry and not why:
        why = "it is found by real steps, and --dry_run takes none"
    if config.fsdp and not why:
        why = "sizes are tried on each process by itself, and --fsdp has no step of one process"
    if why:
        raise Refused(f"--batch_size auto: {why}; give a number, and add up several by --accumulate")


def chosen_batch_size(make, run, dry=False):
    """The number that --batch_size auto stands for, over all processes: that of the run in the folder, or one
    that is found. Says which, in a line. make: the Trainer class, which tries. Raises Refused where there is
    none.
    """
    config, table, ranks = run.config, run.table, ranks_here()
    folder = Folder(Path(config.runs) / config.name)
    if (folder / "config.json").exists():
        size = folder.flags().get("batch_size", table["batch_size"].default)
        print(f"--batch_size auto: {size}, with which the run in {folder} began")
        return size
    device = ranks.device(config.device)
    check_search(config, device, dry)
    ranks.meet(device, table.shared(config))
    ranks.any(1, device)  # what processes need to speak to each other is taken before memory is measured
    own, most, used, total = largest_tried(make, run, device, ranks.world)
    smallest = -(ranks.any(-own, device) or 0)
    size = smallest * ranks.world
    if not size:
        less = "--checkpoint_activations, --pure_bf16 --stochastic --opt8bit or a smaller --size needs less"
        raise Refused(f"--batch_size auto: the steps of not even one example fit: {less}")
    memory = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB with {own} examples here"
    why = "there are no more to train on" if 2 * own > most else "twice as many do not fit"
    print(f"--batch_size auto: {size} ({memory}; {why})")
    return size
