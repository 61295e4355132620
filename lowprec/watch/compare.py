"""Two checkpoints of any program, compared: what did training move, and what not?

    python -m lowprec compare BEFORE AFTER      exit status 0: healthy, 1: findings, 2: bad input, in one line

A checkpoint is a safetensors file, what torch.save wrote (.pt, .pth, .bin, .ckpt), an index of such files, or
a folder that holds one or that torch.distributed.checkpoint wrote. No code in it is run. It may hold weights
alone, or weights, optimiser states and averages in any nest of dicts. Two files can't tell why something
stands still: `Watch` in the training loop can.
"""

from pathlib import Path

from ..errors import Refused
from .checkpoints import paired_tensors, read_checkpoint, weight_names_of
from .faults.checkpoints import (
    SavedAverage,
    SavedState,
    SavedWeight,
    of_checkpoints,
    of_saved_average,
    of_saved_state,
    of_saved_weight,
)
from .verdicts import Diagnosis

# ---- Comparing ---------------------------------------------------------------------------------------------


class Pair:
    """Two Checkpoints, with the weights, averages and states of both."""

    def __init__(self, before, after):
        self.before, self.after = before, after
        files = before.path, after.path
        by_noise = bool(after.states) and after.stochastic == after.states.keys()
        pairs = paired_tensors(before.weights, after.weights, "weight", files)
        self.weights = [SavedWeight(*pair, by_noise) for pair in pairs]
        self.trained = any(one.moved for one in self.weights)
        self.stands = bool(self.weights) and not self.trained
        self.averages = paired_averages(before, after, self.weights)
        self.states = []
        for key, state in after.states.items():
            self.states.append(SavedState(key, before.states.get(key, {}), state, key in after.stochastic))


def paired_averages(before, after, weights):
    """[SavedAverage] of the later checkpoint. Raises Refused where the earlier one has others."""
    by_name = {one.name: one for one in weights}
    weight_names = weight_names_of(after.averages, by_name)
    earlier = dict.fromkeys(after.averages)
    if before.averages:
        files = before.path, after.path
        pairs = paired_tensors(before.averages, after.averages, "average", files)
        earlier = {name: t for name, t, _ in pairs}
    found = []
    for name, t in earlier.items():
        weight = by_name.get(weight_names.get(name))
        found.append(SavedAverage(name, t, after.averages[name], weight))
    return found


def compare(before: str | Path, after: str | Path) -> Diagnosis:
    """Compare two checkpoints of one training run.

    Args:
        before, after: paths of the earlier and the later one, safetensors files or what torch.save wrote.

    Returns:
        Diagnosis: `findings`, the worst first; `status`, 0 for healthy and 1 for findings; str() for a table
        and a verdict.

    Raises:
        Refused (a ValueError): a file that is no checkpoint or would run code, and two of different nets.
    """
    pair = Pair(read_checkpoint(before), read_checkpoint(after))
    found = of_checkpoints.findings(pair)
    examined = [(of_saved_state, pair.states)]
    if pair.trained:
        examined += [(of_saved_weight, pair.weights), (of_saved_average, pair.averages)]
    for faults, tensors in examined:
        for one in tensors:
            found += faults.findings(one, one.name)
    found.sort(key=lambda finding: finding.rank)
    head = f"{pair.before.path} and {pair.after.path}: {len(pair.weights)} weights, "
    head += f"{len(pair.averages)} of an average, states of {len(pair.states)}"
    sites = {finding.site for finding in found}
    sound = {}
    if pair.weights and not sites & {"update", "gains"}:
        unchanged = sum(int((one.before == one.after).sum()) for one in pair.weights)
        sound["unchanged entries"] = unchanged / max(1, sum(one.after.numel() for one in pair.weights))
    return Diagnosis(head, found, sound, harm="bad results")


# ---- The command -------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Print the diagnosis of two checkpoints; the exit status. Raises Refused."""
    usage = "usage: python -m lowprec compare BEFORE AFTER, two checkpoints"
    if argv and argv[0] in ("-h", "--help"):
        print(f"{usage}\n\n{__doc__}")
        return 0
    if len(argv) != 2:
        raise Refused(usage)
    found = compare(*argv)
    print(found)
    return found.status
