"""Two checkpoints of any program, compared: what did training move, and what not?

    python -m lowprec compare BEFORE AFTER      exit status 0: healthy, 1: findings, 2: bad input, in one line

A checkpoint is a safetensors file, or what torch.save wrote (.pt, .pth, .bin, .ckpt), of which no code is
run. It may hold weights alone, or weights, optimiser states and averages in any nest of dicts. Two files
can't tell why something stands still: `Watch` in the training loop can.
"""

import dataclasses
import re
import sys
from pathlib import Path

import torch

from ..errors import Refused
from .adapters import steps_of
from .checkpoints import pairs, read, weights_of
from .faults import Fault, Figure, first_finding
from .net_state import NARROW
from .verdicts import Diagnosis, Finding

UNCHANGED = 0.5  # share of entries from which on a trained tensor is a finding
GAINS = 0.5
# nobody trains these: frequencies, positions by sine, statistics
CONSTANT = re.compile(r"inv_freq|freqs|position_ids|pos_embed$|num_batches")
STATISTICS = ("running_mean", "running_var")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


# ---- Weights -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Weight:
    name: str
    before: torch.Tensor
    after: torch.Tensor

    @property
    def moved(self):
        return not torch.equal(self.before, self.after)


def not_finite(one):
    """entries that are not finite"""
    count = int((~one.after.isfinite()).sum())
    return Figure(count, {"count": count})


def gains_at_one(one):
    """share of gains that are exactly 1 in both"""
    if one.after.dim() != 1 or one.after.numel() < 8 or one.name.endswith(STATISTICS):
        return None
    before, after = (float((side == 1.0).float().mean()) for side in (one.before, one.after))
    return Figure(min(before, after), {"ones": after, "count": one.after.numel()})


def unchanged(one):
    """share of the entries that did not change; of fp32 tensors where none did"""
    if not one.after.numel() or one.name.endswith(STATISTICS):
        return None
    if CONSTANT.search(one.name) or not one.after.any():
        return None
    narrow = one.after.dtype in NARROW
    if one.moved and not narrow:
        return None
    still = 1 - share_changed(one.before, one.after)
    words = {"still": still}
    if narrow:
        words["dtype"] = name_of(one.after.dtype)
    return Figure(still, words)


def share_changed(a, b):
    """Share of entries that changed, without whole rows of a matrix that did not: tokens that never came."""
    changed = a != b
    if changed.dim() == 2 and changed.any():
        changed = changed[changed.any(1)]
    return float(changed.float().mean())


LOST = "was it frozen? else updates under half an ulp are lost: fp32 or stochastically rounded weights"
OF_WEIGHTS = [
    [
        Fault(
            site="weights",
            limit=0.0,
            measure=not_finite,
            text="{count:,} entries are not finite",
            remedy="an earlier one",
            severity="severe",
            rank=9.0,
        ),
    ],
    [
        Fault(
            site="gains",
            limit=GAINS,
            measure=gains_at_one,
            text="{ones:.0%} of its {count:,} gains are exactly 1.0, as they start",
            remedy=LOST,
        ),
        Fault(
            site="update",
            limit=UNCHANGED,
            measure=unchanged,
            text="{still:.0%} of its entries did not change[ in {dtype}]",
            remedy=LOST,
        ),
    ],
]

# ---- Averages ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class AverageTensor:
    """before: None where the earlier checkpoint has no averages. weight: None where none has its name."""

    name: str
    before: torch.Tensor | None
    after: torch.Tensor
    weight: Weight | None


def average_stands(one):
    """equals that of the earlier checkpoint"""
    return Figure(1.0) if one.before is not None and same(one.before, one.after) else None


def average_is_start(one):
    """equals the weights of the earlier checkpoint, which have moved"""
    if one.weight is None or not one.weight.moved:
        return None
    return Figure(1.0) if same(one.after, one.weight.before) else None


def same(a, b):
    return a.shape == b.shape and a.numel() > 0 and torch.equal(a.float(), b.float())


OF_AVERAGES = [
    [
        Fault(
            site="ema",
            limit=None,
            measure=average_stands,
            text="the average equals that of the earlier checkpoint, while weights moved",
            remedy="average after each step, in fp32",
            severity="severe",
            rank=2.0,
        ),
        Fault(
            site="ema",
            limit=None,
            measure=average_is_start,
            text="the average equals the weights of the earlier checkpoint",
            remedy="average after each step, in fp32",
            severity="severe",
            rank=1.5,
        ),
    ],
]


def averages_nothing(averages):
    """[Finding] where all averages equal their weights."""
    paired = [one for one in averages if one.weight is not None and one.after.numel()]
    if not paired or not all(same(one.after, one.weight.after) for one in paired):
        return []
    text = "the average equals the weights: it averages nothing"
    return [
        Finding("ema", "moderate", text, "was the average saved, or the weights twice?", paired[0].name, 1.0)
    ]


# ---- Optimiser states --------------------------------------------------------------------------------------


class State:
    """What an optimiser keeps for one parameter, in both files."""

    def __init__(self, name, before, after):
        self.name = name
        self.before = before
        self.after = after
        self.v_before = _tensor(before, "exp_avg_sq")
        self.v = _tensor(after, "exp_avg_sq")

    @property
    def v_changed(self):
        known = self.v is not None and self.v_before is not None and self.v.shape == self.v_before.shape
        return known and not torch.equal(self.v, self.v_before)

    @property
    def narrow(self):
        return self.v is not None and self.v.dtype in NARROW

    @property
    def shrunk(self):
        """Share of the entries of exp_avg_sq that shrank; None where that is not known."""
        if not self.v_changed:
            return None
        return float((self.v.float() < self.v_before.float()).float().mean())

    @property
    def step(self):
        return steps_of(self.after)


def _tensor(state, name):
    found = state.get(name)
    return found if torch.is_tensor(found) else None


def v_can_shrink(one):
    """share of the entries of a 16-bit exp_avg_sq that shrank"""
    if not one.narrow or one.shrunk is None:
        return None
    return Figure(one.shrunk, {"dtype": name_of(one.v.dtype), "shrunk": one.shrunk})


def v_is_narrow(one):
    """held in 16 bits"""
    if not one.narrow:
        return None
    words = {"dtype": name_of(one.v.dtype)}
    if one.shrunk is not None:
        words["shrunk"] = one.shrunk
    return Figure(1.0, words)


def v_cast(one):
    """fp32 in the earlier checkpoint, and 16 bits now"""
    was_wide = one.v_before is not None and one.v_before.dtype == torch.float32
    return Figure(1.0) if one.narrow and was_wide else None


def narrow_counter(one):
    """what a counter in 16 bits says, over what it can count to"""
    counter = _tensor(one.after, "step")
    if counter is None or counter.dtype not in NARROW or one.step is None:
        return None
    most = 256 if counter.dtype == torch.bfloat16 else 2048
    words = {"dtype": name_of(counter.dtype), "step": one.step, "most": most}
    return Figure(one.step / most, words)


def counter_stands(one):
    """says the same in both, while exp_avg_sq changed"""
    stands = one.step is not None and one.step == steps_of(one.before)
    return Figure(1.0, {"step": one.step}) if stands and one.v_changed else None


COUNTERS = "fp32 or integer counters"
OF_STATES = [
    [
        Fault(
            site="exp_avg_sq",
            limit=0.02,
            measure=v_can_shrink,
            text="exp_avg_sq is {dtype}, and {shrunk:.0%} of its entries shrank",
            remedy="nothing, if it is rounded stochastically",
            severity="note",
            rank=0.0,
        ),
        Fault(
            site="exp_avg_sq",
            limit=None,
            measure=v_is_narrow,
            text="exp_avg_sq is {dtype}: rounded to nearest it can grow and not shrink[; {shrunk:.1%} of its "
            "entries shrank]",
            remedy="fp32 states, or stochastic rounding",
        ),
    ],
    [
        Fault(
            site="exp_avg_sq",
            limit=None,
            measure=v_cast,
            text="it was fp32 before",
            remedy="put states back as they were saved",
            rank=2.0,
        ),
    ],
    [
        Fault(
            site="step",
            limit=None,
            measure=narrow_counter,
            text="its step counter is {dtype} and says {step:g}: it can't count beyond {most}",
            remedy=COUNTERS,
            severe=0.9999,  # it says the last number that it can
            rank=1.0,
        ),
        Fault(
            site="step",
            limit=None,
            measure=counter_stands,
            text="its step counter says {step:g} in both, while its moments changed",
            remedy=COUNTERS,
            rank=1.0,
        ),
    ],
]


def resets(states):
    """[Finding] of second moments of 0 after steps. One tensor may never have had a gradient but 0; all of
    them did.
    """
    held = [one for one in states if one.step and one.v is not None]
    zero = [one for one in held if not one.v.any()]
    found = []
    for one in zero:
        first = _tensor(one.after, "exp_avg")
        if len(zero) == len(held) or (first is not None and first.any()):
            text = f"all zero after {one.step:g} steps: the second moment was reset"
            remedy = "restore exp_avg_sq at a resume"
            found.append(Finding("exp_avg_sq", "severe", text, remedy, one.name, 3.0))
    return found


def lost_states(before, after):
    """[Finding] of parameters that had a state before and have none now."""
    lost = [key for key in before if before[key] and not after.get(key)]
    if not lost:
        return []
    text = f"{len(lost)} of {len(before)} parameters have no state, although they had one before"
    remedy = "save and restore the whole of optimizer.state_dict()"
    return [Finding("state", "severe", text, remedy, "", 4.0)]


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
    before, after = read(before), read(after)
    files = before.path, after.path
    if bool(after.weights) != bool(before.weights):
        raise Refused(f"only one of {files[0]} and {files[1]} holds weights")
    weights = [Weight(*pair) for pair in pairs(before.weights, after.weights, "weight", files)]
    trained = any(one.moved for one in weights)
    found = []
    if weights and not trained:
        text, remedy = "no weight changed at all", "are these two of one run?"
        found.append(Finding("update", "severe", text, remedy))
    else:
        for one in weights:
            found += all_findings(OF_WEIGHTS, one)
    averages = paired_averages(before, after, weights)
    if trained:
        for one in averages:
            found += all_findings(OF_AVERAGES, one)
        found += averages_nothing(averages)
    states = [State(key, before.states.get(key, {}), state) for key, state in after.states.items()]
    for one in states:
        found += all_findings(OF_STATES, one)
    found += resets(states)
    found += lost_states(before.states, after.states)
    found.sort(key=lambda finding: finding.rank)
    head = f"{files[0]} and {files[1]}: {len(weights)} weights, {len(averages)} of an average"
    head = f"{head}, states of {len(after.states)}"
    sites = {finding.site for finding in found}
    sound = {} if sites & {"update", "gains"} else unchanged_entries(weights)
    return Diagnosis(head, found, sound, harm="bad results")


def all_findings(lists, one):
    found = []
    for rows in lists:
        found += first_finding(rows, one, one.name)
    return found


def paired_averages(before, after, weights):
    """[AverageTensor] of the later checkpoint. Raises Refused where the earlier one has others."""
    by_name = {one.name: one for one in weights}
    weight_names = weights_of(after.averages, by_name)
    earlier = dict.fromkeys(after.averages)
    if before.averages:
        files = before.path, after.path
        earlier = {name: t for name, t, _ in pairs(before.averages, after.averages, "average", files)}
    return [
        AverageTensor(name, t, after.averages[name], by_name.get(weight_names.get(name)))
        for name, t in earlier.items()
    ]


def unchanged_entries(weights):
    """{"unchanged entries": share of all entries that did not change}; {} without weights."""
    if not weights:
        return {}
    unchanged = sum(int((one.before == one.after).sum()) for one in weights)
    entries = sum(one.after.numel() for one in weights)
    return {"unchanged entries": unchanged / max(1, entries)}


# ---- The command -------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None, command: str = "python -m lowprec compare") -> int:
    """Print the diagnosis of two checkpoints; the exit status. command: what it is called in messages."""
    argv = sys.argv[1:] if argv is None else argv
    usage = f"usage: {command} BEFORE AFTER, two checkpoints"
    if argv and argv[0] in ("-h", "--help"):
        print(f"{usage}\n\n{__doc__}")
        return 0
    try:
        if len(argv) != 2:
            raise Refused(usage)
        diagnosis = compare(*argv)
    except Refused as error:
        print(f"{command.split()[-1]}: {error}", file=sys.stderr)
        return 2
    print(diagnosis)
    return diagnosis.status
