"""Two checkpoints of any program, compared: what did training move, and what not?

    python -m lowprec compare BEFORE AFTER      exit status 0: healthy, 1: findings, 2: bad input, in one line

A checkpoint is a safetensors file, what torch.save wrote (.pt, .pth, .bin, .ckpt), an index of such files, or
a folder that holds one or that torch.distributed.checkpoint wrote. No code in it is run. It may hold weights
alone, or weights, optimiser states and averages in any nest of dicts. Two files can't tell why something
stands still: `Watch` in the training loop can.
"""

import sys
from pathlib import Path

from ..errors import Refused
from .checkpoint_faults import (
    FAULTS_OF_SAVED_AVERAGES,
    FAULTS_OF_SAVED_STATES,
    FAULTS_OF_SAVED_WEIGHTS,
    SavedAverage,
    SavedState,
    SavedWeight,
    averages_nothing,
    dead_adapters,
    lost_states,
    nothing_trained,
    resets,
    rounded_on_the_way,
)
from .checkpoints import paired_tensors, read_checkpoint, weight_names_of
from .faults import first_finding
from .verdicts import Diagnosis

# ---- Comparing ---------------------------------------------------------------------------------------------


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
    return diagnosis(read_checkpoint(before), read_checkpoint(after))


def diagnosis(before, after):
    """Diagnosis of two Checkpoints."""
    files = before.path, after.path
    if bool(after.weights) != bool(before.weights):
        raise Refused(f"only one of {files[0]} and {files[1]} holds weights")
    by_noise = bool(after.states) and after.stochastic == after.states.keys()
    pairs = paired_tensors(before.weights, after.weights, "weight", files)
    weights = [SavedWeight(*pair, by_noise) for pair in pairs]
    trained = any(one.moved for one in weights)
    found = []
    if weights and not trained:
        found.append(nothing_trained(weights))
    else:
        for one in weights:
            found += all_findings(FAULTS_OF_SAVED_WEIGHTS, one)
        found += dead_adapters(weights) + rounded_on_the_way(weights)
    averages = paired_averages(before, after, weights)
    if trained:
        for one in averages:
            found += all_findings(FAULTS_OF_SAVED_AVERAGES, one)
        found += averages_nothing(averages)
    states = []
    for key, state in after.states.items():
        states.append(SavedState(key, before.states.get(key, {}), state, key in after.stochastic))
    for one in states:
        found += all_findings(FAULTS_OF_SAVED_STATES, one)
    found += resets(states)
    found += lost_states(before, after)
    found.sort(key=lambda finding: finding.rank)
    head = f"{files[0]} and {files[1]}: {len(weights)} weights, {len(averages)} of an average"
    head = f"{head}, states of {len(after.states)}"
    sites = {finding.site for finding in found}
    sound = {}
    if not sites & {"update", "gains"}:
        sound = unchanged_entries(weights)
    return Diagnosis(head, found, sound, harm="bad results")


def all_findings(lists, one):
    found = []
    for rows in lists:
        found += first_finding(rows, one, one.name)
    return found


def paired_averages(before, after, weights):
    """[AverageTensor] of the later checkpoint. Raises Refused where the earlier one has others."""
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


def unchanged_entries(weights):
    """{"unchanged entries": share of all entries that did not change}; {} without weights."""
    if not weights:
        return {}
    unchanged = entries = 0
    for one in weights:
        unchanged += int((one.before == one.after).sum())
        entries += one.after.numel()
    return {"unchanged entries": unchanged / max(1, entries)}


# ---- The command -------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None, command: str = "python -m lowprec compare") -> int:
    """Print the diagnosis of two checkpoints; the exit status. command: what it is called in messages."""
    if argv is None:
        argv = sys.argv[1:]
    usage = f"usage: {command} BEFORE AFTER, two checkpoints"
    if argv and argv[0] in ("-h", "--help"):
        print(f"{usage}\n\n{__doc__}")
        return 0
    try:
        if len(argv) != 2:
            raise Refused(usage)
        found = compare(*argv)
    except Refused as error:
        print(f"{command.split()[-1]}: {error}", file=sys.stderr)
        return 2
    print(found)
    return found.status
