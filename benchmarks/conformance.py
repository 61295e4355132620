"""What the checks of bench.py conformance share: results, tensors to step, and comparisons of what came out.

A check is a function of a Subject (benchmarks/subjects.py) and a Size that returns a Result:

    subject = OptimizerSubject("mine", lambda params, **options: Mine(params, **options), takes={"lr"})
    print(writes(subject, SIZE, 1 / 3).shown)       # +0.0002 ±0.0006: mean error of a write, in ulps

Nothing is known of the optimiser but torch's protocol: parameters with gradients, step, state, state_dict.
Tensors have equal entries and equal gradients, so that each entry is a draw, and whatever differs between
entries is noise of rounding.
"""

import io
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.allocated import tensors_in
from benchmarks.subjects import GRADIENT, full
from lowprec.telemetry import values_here


@dataclass(frozen=True)
class DrawnSize:
    """How much is drawn.

    side: of the square tensors. steps: of a check of writes. before, after: steps around the drop of
    gradients. path: (steps, entries) of an average.
    """

    side: int = 256
    steps: int = 30
    decay_steps: int = 300
    before: int = 300
    after: int = 1500
    path: tuple = (5000, 20_000)


SIZE = DrawnSize()


@dataclass
class Result:
    """What a check found.

    verdict: holds, finding, not claimed, or none (there is nothing to measure). shown: the figure in a cell
    of the table. said: a sentence, where it is a finding or needs one. figures: all of them.
    """

    verdict: str
    shown: str
    said: str = ""
    figures: dict = field(default_factory=dict)


def judged(holds, shown, said, **figures):
    """A Result that holds or is a finding; `said` is dropped where it holds."""
    if holds:
        return Result("holds", shown, "", figures)
    return Result("finding", shown, said, figures)


def nothing(shown, **figures):
    return Result("none", shown, "", figures)


def not_claimed(shown, said="", **figures):
    return Result("not claimed", shown, said, figures)


NOT_ELEMENTWISE = "not elementwise"  # as Muon and Adafactor: what holds of each entry alone is not claimed


# ---- Tensors -----------------------------------------------------------------------------------------------


def chequered(side):
    """Gradients of two heights by turns, so that codes of the lower ones lie between a block's marks."""
    g = full(side, GRADIENT)
    g[:, 1::2] *= 0.37
    return g


def random_grads(shapes, steps):
    """[[gradient of each shape] of each step]."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        found.append([0.01 * torch.randn(s, generator=generator) for s in shapes])
    return found


def random_weights(shapes):
    generator = torch.Generator().manual_seed(1)
    return [1 + 0.2 * torch.randn(s, generator=generator) for s in shapes]


# ---- What an optimiser holds -------------------------------------------------------------------------------


def weights_and_states(optimizer, params):
    """[plain tensor] of all weights and their states, for comparison bit by bit."""
    found = [p.detach() for p in params]
    for p in params:
        found += tensors_in(optimizer.state.get(p, {}))
    return found


def whole_tensors(state, path=""):
    """[(where, tensor)] of a state, codes that are a class of tensors as the values they stand for."""
    if torch.is_tensor(state):
        return [(path, values_here(state))]
    found = []
    if isinstance(state, dict):
        for name, value in state.items():
            found += whole_tensors(value, f"{path}.{name}")
    return found


def continued(subject, params, optimizer, lr):
    """(parameters, optimiser) made anew, with the state of another one as its state_dict tells it."""
    new = [nn.Parameter(p.detach().clone()) for p in params]
    again = subject.over(new, lr)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return new, again


def through_a_file(state):
    """As a checkpoint does it: some classes of codes can be saved and not be copied."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # what was written a line above, of classes of any library


# ---- Comparisons -------------------------------------------------------------------------------------------


def unequal(a, b):
    """Share of entries that differ in value between two lists of tensors; 1.0 where shapes do."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return 1.0
    differ = total = 0
    for x, y in zip(a, b, strict=True):
        both_nan = (x != x) & (y != y)
        differ += int(((x != y) & ~both_nan).sum())
        total += x.numel()
    return differ / max(1, total)


def differing(share):
    """Words for a share of entries that differ."""
    if not share:
        return "same bits"
    if share > 5e-4:
        return f"{share:.1%} differ"
    return f"{share:.0e} differ"
