"""What each way of writing bf16 weights would do to a net, foreseen from its weights and Adam's moments.

    python -m lowprec foresee runs/NAME                  of a run of train.py, at the rates still to come
    python -m lowprec foresee CHECKPOINT --lr 3e-4       of a file, see watch/files.py; no code in it is run
    print(lowprec.foresee(model, optimizer))             in anybody's loop

No step is taken. With s the distance of a weight's neighbours in bf16 and m, v Adam's moments without their
bias, Adam wants to move the weight by d = rate m / sqrt(v), and weight decay a little more.

- To nearest, what is below half of s is not written.
- Stochastically, a write adds a variance of about s |d|. In a quadratic bowl that adds E = 1/4 sum s |m| to
  the loss of the last weights, whatever the rate and the curvature, once all directions have settled. Where
  they have not it adds less: E is a ceiling (experiments/077-noise-of-writes).
"""

from __future__ import annotations

import argparse
import json
import math
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..advice.command import AdviceParser
from ..advice.text import aligned
from ..errors import Refused, check_number, in_one_line
from ..evidence import flags_of_recipe, recipe_key
from ..formats import FORMATS
from ..watch.adapters import answering, hooked, unwrapped
from ..watch.checkpoints import Checkpoint, read_checkpoint, weight_names_of
from ..watch.products import Products
from ..watch.write_errors import ulp
from .schedule import lr_factor

RATES = (1.0, 0.1, 0.01)  # of the present one, at which the share that is not written is told
RATES_AHEAD = 20  # looked at, evenly spread over the steps that are still to come
TENSORS_SHOWN = 5
PRODUCTS_UNKNOWN = (
    "products in FP8 and FP4: not known from weights and moments; in a loop lowprec.Watch(model, optimizer, "
    'writes=True, products=["mxfp8", "nvfp4"]) looks at them'
)
CODED = ("int8", "int4")  # formats of moments of which is told how far they move a step
# how many times as close as bf16 the values lie that a weight can have with what completes it: the rest that
# Kahan keeps is half a gap at most, in bf16; split8 keeps 8 bits more
FINER_BY_KAHAN, FINER_BY_SPLIT8 = 512, 256

# ---- What is known of a net --------------------------------------------------------------------------------


class Moved(NamedTuple):
    """A tensor that Adam moves, all flat fp32 [n]: its weights, and its moments without their bias."""

    name: str
    weight: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    rate: float
    decay: float  # of the weight, as of AdamW
    eps: float

    def step(self, m: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        """What Adam wants to take off each weight, with these moments or its own."""
        m, v = self.m if m is None else m, self.v if v is None else v
        return self.rate * (m / (v.sqrt() + self.eps) + self.decay * self.weight)


def moved_by(name, weight, m, v, steps, group, lr) -> Moved:
    """A Moved of a tensor and its state. group: the options of its parameter group. lr: in place of its."""
    betas = group.get("betas")
    # torch.distributed.checkpoint keeps no numbers
    beta1, beta2 = betas if isinstance(betas, list | tuple) else (0.9, 0.999)
    rate = group.get("lr") if lr is None else lr
    if not rate:  # a schedule that is at its end
        rate = group.get("initial_lr")
    if not rate:
        raise Refused("no learning rate is known above 0: give lr")
    weight, m, v = (t.detach().float().flatten() for t in (weight, m, v))
    m, v = m / (1 - float(beta1) ** steps), v / (1 - float(beta2) ** steps)
    decay, eps = group.get("weight_decay") or 0.0, group.get("eps") or 1e-8
    return Moved(name, weight, m, v, float(rate), decay, eps)


def of_optimizer(model: nn.Module, optimizer: Any, lr: float | None) -> tuple[list[Moved], int]:
    """What an optimiser with Adam's moments moves in a model, and how many tensors are left out."""
    names = {p: name for name, p in unwrapped(model).named_parameters()}
    inner = hooked(optimizer)
    answers = answering(inner)
    found, left_out = [], 0
    for group in inner.param_groups:
        for p in group["params"]:
            m, v = (answers.moment(p, name) for name in ("exp_avg", "exp_avg_sq"))
            steps = answers.decay(p, "exp_avg")[1] if m is not None else 0
            if v is None or not steps or "betas" not in group:
                left_out += 1
                continue
            found.append(moved_by(names.get(p, "?"), answers.held(p), m, v, steps, group, lr))
    return found, left_out


def of_checkpoint(checkpoint: Checkpoint, lr: float | None) -> tuple[list[Moved], int]:
    """The same of a checkpoint. Raises Refused where states fit no weights."""
    left = dict(checkpoint.weights)
    found, left_out = [], 0
    for key, state in checkpoint.states.items():
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        if not (torch.is_tensor(m) and torch.is_tensor(v) and m.is_floating_point() and m.shape == v.shape):
            left_out += 1
            continue
        name = _weight_of(key, m, checkpoint, left)
        steps = float(state.get("step", math.inf))  # where it is not known: no bias any more
        group = checkpoint.groups.get(key, {})
        bare = name.removeprefix("precision.model.")  # of a run of train.py
        found.append(moved_by(bare, left.pop(name), m, v, steps, group, lr))
    return found, left_out


def _weight_of(key, m, checkpoint, left):
    """The name of the weight that a state belongs to: the state's own where it has one, else the first of its
    shape that is left, for states are numbered in the order of the weights.
    """
    group = checkpoint.groups.get(key, {})
    own = key
    for number, name in zip(group.get("params", ()), group.get("param_names", ()), strict=False):
        if key.rpartition(".")[2] == str(number):
            own = name
    fitting = [name for name, weight in left.items() if weight.shape == m.shape]
    for name in fitting:
        if own.endswith(name) or (own is not key and name.endswith(f".{own}")):
            return name
    if not fitting:
        raise Refused(f"{checkpoint.path}: no weight has the shape {list(m.shape)} of the state {key}")
    return fitting[0]


# ---- A run of train.py -------------------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint of a run of train.py, and what else its folder says, as `foresee` takes it; its `title`
    in words. Of a run that has ended all its steps are "ahead". Raises Refused.
    """
    checkpoint = read_checkpoint(folder / "checkpoint.pt")
    with in_one_line(f"{folder} is damaged:"):
        flags = json.loads((folder / "config.json").read_text())["flags"]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config, step, end = types.SimpleNamespace(**flags), checkpoint.step, flags["steps"]
        losses = [row["loss"] for row in rows if row["step"] <= step and row["loss"] > 0]
        present = lr_factor(config, step - 1)  # of the step that was done last
        schedule = "the rates still to come"
        if step >= end:  # the present rate may have fallen to nothing
            step, present, schedule = 0, 1.0, "all rates of the run, which has ended"
            for key, group in checkpoint.groups.items():
                checkpoint.groups[key] = {**group, "lr": group["initial_lr"]}
        ahead = [step + i * (end - step) // RATES_AHEAD for i in range(RATES_AHEAD)]
        words = " ".join(flags_of_recipe(recipe_key(flags))) or "fp32"
        return checkpoint, {
            "title": f"{folder}: {words}, step {checkpoint.step:,} of {end:,}; ahead are {schedule}",
            "ahead": [lr_factor(config, one) / present for one in ahead],
            "loss": losses[-1] if losses else None,
            "ema_decay": flags["ema_decay"],
        }


# ---- What is foreseen --------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What is foreseen of one tensor, as sums over its entries.

    wanted: of the sizes of the steps that Adam wants now. unwritten: {share of the present rate: of those
    steps at that rate that nearest would not write}. squares: of the squares of the steps; noise: of the
    variances of stochastic writes. ceiling: 1/4 sum s |m|. codes: {format: of the squares of what moments in
    it change of the steps}.
    """

    name: str
    entries: int
    wanted: float
    unwritten: dict[float, float]
    squares: float
    noise: float
    ceiling: float
    codes: dict[str, float]


def figures_of(one: Moved, rates: Iterable[float]) -> Figures:
    """The Figures of a tensor, at these shares of the present rate."""
    step, stored = one.step(), one.weight.bfloat16()
    gap = ulp(one.weight, 2.0**-7).clamp(min=2.0**-125)  # to the neighbour in bf16; never 0
    unwritten = {}
    for rate in rates:
        stays = (stored.float() - rate * step).bfloat16() == stored
        unwritten[rate] = rate * total(step[stays].abs())
    part = (step.abs() / gap).frac()
    codes = {}
    for name in CODED:
        changed = one.step(coded(one.m, name, signed=True), coded(one.v, name, signed=False)) - step
        codes[name] = total(changed.square())
    return Figures(
        name=one.name,
        entries=step.numel(),
        wanted=total(step.abs()),
        unwritten=unwritten,
        squares=total(step.square()),
        noise=total(gap.square() * part * (1 - part)),
        ceiling=total(gap * one.m.abs()) / 4,
        codes=codes,
    )


def average_unwritten(checkpoint: Checkpoint, decay: float) -> float | None:
    """Which share of the movement of the average in a checkpoint nearest would not write in bf16; None where
    there is no average, or it does not move.
    """
    lost = wanted = 0.0
    for name, own in weight_names_of(checkpoint.averages, checkpoint.weights).items():
        average = checkpoint.averages[name].float()
        move = (1 - decay) * (checkpoint.weights[own].float() - average)
        stored = average.bfloat16()
        wanted += total(move.abs())
        lost += total(move[(stored.float() + move).bfloat16() == stored].abs())
    return lost / wanted if wanted else None


def total(x: torch.Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def coded(moment: torch.Tensor, name: str, signed: bool) -> torch.Tensor:
    """A moment once it was written in codes, to nearest."""
    kind, n = FORMATS[name], moment.numel()
    if n < kind.smallest:
        return moment
    codes, scales = kind.new(n, moment.device)
    kind.encode(moment, codes, scales, signed, compiled=False)
    return kind.decode(codes, scales, n, signed, compiled=False)


class Forecast:
    """What is foreseen of a net: `tensors`, Figures each; str() for a person, json() for a program.

    rate: the present one. ahead: shares of it at the steps that are still to come, or (). loss: of the net,
    or None where it is not known; the ceiling is told as a share of it. left_out: how many tensors are not
    among them, since a file holds no moments of them, or codes. average: see average_unwritten. products: of
    a Watch, which has seen activations. title: a line that stands above all.
    """

    def __init__(
        self,
        moved: list[Moved],
        ahead: Iterable[float] = (),
        loss: float | None = None,
        left_out: int = 0,
        average: float | None = None,
        products: Products | None = None,
        title: str = "",
    ):
        self.left_out, self.average, self.products, self.title = left_out, average, products, title
        self.rate, self.ahead, self.loss = moved[0].rate, tuple(ahead), loss
        rates = dict.fromkeys((*RATES, *self.ahead))
        with torch.no_grad():
            self.tensors = [figures_of(one, rates) for one in moved]

    def unwritten(self, rates: Sequence[float] = (1.0,), tensors: list[Figures] | None = None) -> float:
        """Which share of the wanted movement nearest would not write, at these shares of the present rate."""
        chosen = self.tensors if tensors is None else tensors
        wanted = sum(rate * one.wanted for one in chosen for rate in rates)
        return sum(one.unwritten[rate] for one in chosen for rate in rates) / wanted if wanted else 0.0

    @property
    def ceiling(self) -> float:
        """What stochastic writes add to the loss of the last weights at most."""
        return self._sum("ceiling")

    @property
    def noise(self) -> float:
        """A stochastic write's noise beside the step, both as root mean squares."""
        return self._beside_step(self._sum("noise"))

    def of_codes(self, name: str) -> float:
        """How far moments in these codes move a step, beside the step, both as root mean squares."""
        return self._beside_step(sum(one.codes[name] for one in self.tensors))

    def _sum(self, name):
        return sum(getattr(one, name) for one in self.tensors)

    def _beside_step(self, squares):
        steps = self._sum("squares")
        return math.sqrt(squares / steps) if steps else 0.0

    # -- in words

    def _at_most(self, share=1.0):
        """What is added at most, in words. share: of the ceiling."""
        excess = share * self.ceiling
        return f"at most +{excess:.2g}" if self.loss is None else f"at most +{100 * excess / self.loss:.2g} %"

    def rows(self) -> dict[str, str]:
        """{recipe, as evidence.recipe_key writes it: what its writes would do}."""
        rates = self.ahead or (1.0,)
        stochastic = self._at_most()
        return {
            "pure_bf16": f"{self.unwritten(rates):.0%} not written",
            "pure_bf16+stochastic": stochastic,
            "pure_bf16+stochastic+kahan": self._at_most(1 / FINER_BY_KAHAN),
            "pure_bf16+master=split": "nothing lost",
            "pure_bf16+master=split8": self._at_most(1 / FINER_BY_SPLIT8),
            "pure_bf16+stochastic+opt8bit": f"{stochastic}, and codes: not known",
            "pure_bf16+stochastic+opt4bit": f"{stochastic}, and codes: not known",
        }

    def json(self) -> dict[str, Any]:
        """Plain values for a program."""
        return {
            "rate": self.rate,
            "unwritten": {str(rate): self.unwritten([rate]) for rate in RATES},
            "unwritten_ahead": self.unwritten(self.ahead) if self.ahead else None,
            "noise": self.noise,
            "ceiling": self.ceiling,
            "loss": self.loss,
            "left_out": self.left_out,
            "average": self.average,
            "codes": {name: self.of_codes(name) for name in CODED},
            "products": str(self.products or ""),
            "recipes": self.rows(),
            "tensors": [one._asdict() for one in self.tensors],
        }

    def __str__(self) -> str:
        entries = sum(one.entries for one in self.tensors)
        now, tenth, hundredth = (f"{self.unwritten([rate]):.1%}" for rate in RATES)
        ahead = f"; over the rates ahead {self.unwritten(self.ahead):.1%}" if self.ahead else ""
        rows = self.rows()
        loss = "loss" if self.loss is None else f"loss of {self.loss:.4g}"
        lines = [
            *filter(None, [self.title]),
            f"{len(self.tensors)} tensors, {entries:,} weights, at a rate of {self.rate:g}, in bf16:",
            f"to nearest: {now} of the wanted movement is not written, at a tenth of the rate {tenth}, at a "
            f"hundredth {hundredth}{ahead}",
            *self._worst(),
            f"stochastically: a write's noise is {self.noise:.2g} of a step (root mean squares). To the "
            f"{loss} it adds {rows['pure_bf16+stochastic']}, reached once all directions have settled",
            f"stochastically with Kahan: {rows['pure_bf16+stochastic+kahan']}",
            f"with a master of 24 bits: {rows['pure_bf16+master=split8']}; of 32 bits: nothing is lost",
        ]
        for name in CODED:
            if self.of_codes(name):
                moved = f"they move a step by {self.of_codes(name):.2g} of it (root mean squares)"
                lines.append(f"moments in {name}: {moved}; what that costs is not known")
        average = "not known without one in a file; lowprec.Watch looks at it"
        if self.average is not None:
            average = f"to nearest {self.average:.1%} of its movement is not written"
        lines.append(f"an average in bf16: {average}")
        lines.append(str(self.products or "") or PRODUCTS_UNKNOWN)
        if self.left_out:
            lines.append(f"left out: {self.left_out} tensors without moments of Adam, or with these in codes")
        return "\n".join(lines)

    def _worst(self):
        """Rows of the tensors of which most is lost."""
        found = sorted(self.tensors, key=lambda one: -one.unwritten[1.0])
        cells = [["  tensor", "not written", "its share of all that is not"]]
        lost = max(1e-300, sum(one.unwritten[1.0] for one in self.tensors))
        for one in found[:TENSORS_SHOWN]:
            if one.unwritten[1.0]:
                share = one.unwritten[1.0] / lost
                cells.append([f"  {one.name}", f"{self.unwritten(tensors=[one]):.1%}", f"{share:.1%}"])
        return aligned(cells) if len(cells) > 1 else []


# ---- The face ----------------------------------------------------------------------------------------------


def foresee(
    model: nn.Module | str | Path,
    optimizer: Any = None,
    *,
    lr: float | None = None,
    ahead: Iterable[float] = (),
    loss: float | None = None,
    ema_decay: float | None = None,
    products: Products | None = None,
) -> Forecast:
    """What each way of writing bf16 weights would do to a net. Nothing is written, and no step is taken.

    Args:
        model: the net, or the path of a checkpoint that holds weights and the optimiser's state, or of the
            folder of a run of train.py, which says `ahead`, `loss` (of training) and `ema_decay` itself.
        optimizer: of the net: Adam or AdamW, torch's or ours or of a library that Watch knows, after some
            steps in fp32 or autocast.
        lr: the present learning rate, in place of the optimiser's own.
        ahead: shares of it at the steps that are still to come.
        loss: of the net, above 0: the ceiling is told as a share of it.
        ema_decay: of the average that a checkpoint holds, 0.999 unless it is given.
        products: of a Watch, that looked at products in other formats.

    Raises:
        Refused (a ValueError): without moments or a rate, and for a file that can't be read.
    """
    for name, number in dict(lr=lr, loss=loss).items():
        if number is not None:
            check_number(name, number)
    average = None
    of_run: dict[str, Any] = {}
    if isinstance(model, str | Path):
        path = Path(model)
        if (path / "ledger.json").is_file():
            checkpoint, of_run = read_run(path)
        else:
            checkpoint = read_checkpoint(path)
        moved, left_out = of_checkpoint(checkpoint, lr)
        average = average_unwritten(checkpoint, ema_decay or of_run.get("ema_decay", 0.999))
        ahead, loss = ahead or of_run.get("ahead", ()), loss or of_run.get("loss")
    else:
        moved, left_out = of_optimizer(model, optimizer, lr)
    if not moved:
        raise Refused("there are no moments of Adam yet, or all are in codes: foresee after some steps of it")
    return Forecast(moved, ahead, loss, left_out, average, products, of_run.get("title", ""))


def main(argv: list[str], prog: str = "python -m lowprec foresee") -> int:
    """Print the forecast of a checkpoint; the exit status. Raises Refused for bad words."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = AdviceParser(prog=prog, description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("checkpoint", help="runs/NAME, or a file or folder with weights and Adam's state")
    parser.add_argument("--lr", type=float, help="the present learning rate; default: the checkpoint's")
    parser.add_argument("--loss", type=float, help="of the net, for percentages; default: a run's last one")
    parser.add_argument("--cosine", action="store_true", help="the rate still falls to 0 along a cosine")
    parser.add_argument("--ema_decay", type=float, help="of its average; default: the run's, or 0.999")
    parser.add_argument("--json", action="store_true", help="print it for a program")
    args = parser.parse_args(argv)
    ahead = [(1 + math.cos(math.pi * i / 20)) / 2 for i in range(20)] if args.cosine else ()
    found = foresee(args.checkpoint, lr=args.lr, ahead=ahead, loss=args.loss, ema_decay=args.ema_decay)
    print(json.dumps(found.json(), indent=1) if args.json else found)
    return 0
