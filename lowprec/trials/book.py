"""What a trial has found: finished trainings in a JSON file, and what they say, in words and as a picture."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from .. import evidence
from ..advice.plot import figure_class
from ..advice.text import layout
from ..errors import Refused, in_one_line
from .intervals import LEVEL_OF_A_LOOK, LEVEL_OF_WHOLE, Mean, mean_at_level, of_whole_training

FORMAT = 1
REFERENCE, AUTOCAST = "fp32", "bf16"  # as evidence.recipe_key writes them
CHAOS = "a last bit moved"  # the arm that is the reference but for a last bit of one weight
SURE_OF_WHOLE = f"{100 * (1 - LEVEL_OF_WHOLE):.0f} %"
HEADER = ["recipe", "bytes a parameter", "seconds a step", "change [interval], %", "of it writes, %", "pairs"]
HEADER += ["foreseen", f"whole run ({SURE_OF_WHOLE}), %", "verdict"]


class Row(NamedTuple):
    """One recipe beside the reference. bytes: of weights, gradients, states and average; seconds: the median
    of a step's. change, low and high: of the held-out loss, in percent of the reference's, with the ends of
    the interval, None with fewer than two pairs. pairs: of trainings; diverged: how many of these did.
    writes, writes_low and writes_high: the same beyond autocast, which has the same products and writes fp32
    weights; None for a recipe of fp32 weights. foreseen: from one run of the reference, in words.
    whole_low and whole_high: what is foreseen of a training of ten times the steps, see
    intervals.of_whole_training; None for a recipe of which no whole trainings are recorded beside short ones.
    """

    recipe: str
    bytes: int
    seconds: float
    change: float | None
    low: float | None
    high: float | None
    writes: float | None
    writes_low: float | None
    writes_high: float | None
    pairs: int
    diverged: int
    foreseen: str
    verdict: str
    whole_low: float | None = None
    whole_high: float | None = None


class Book:
    """The answer of `trial`: `rows`; str() for a person, json() for a program, draw(file) for a picture.

    It holds results of trainings by recipe and seed, kept in `file` where one is named. plan: what must be
    the same for results to belong together. Raises Refused for a file of another plan, or of another kind.
    """

    def __init__(self, file: str | Path | None, plan: dict[str, Any], within: float):
        self.file = None if file is None else Path(file)
        self.plan = plan
        self.within = within
        self.reference = ""
        self.runs: dict[str, dict[str, dict[str, Any]]] = {}  # {recipe: {seed: result}}
        self.seconds: dict[str, float] = {}  # {recipe: of a step}
        self.foreseen: dict[str, str] = {}  # {recipe: words}
        self.left_out: dict[str, str] = {}  # {recipe: why}
        if self.file is not None and self.file.exists():
            self._read()

    def _read(self):
        found = read_file(self.file)
        if not found["runs"]:  # nothing was finished: the new one takes its place
            return
        for name, value in self.plan.items():
            if found["plan"].get(name) != value:
                raise Refused(
                    f"{self.file} holds a trial with {name} {found['plan'].get(name)}, and this one has "
                    f"{value}: remove it, or name another file"
                )
        self.runs, self.seconds, self.foreseen = found["runs"], found["seconds"], found["foreseen"]

    def keep(self, recipe: str, seed: int, result: dict[str, Any]) -> None:
        """Note a finished training, and write the file."""
        self.runs.setdefault(recipe, {})[str(seed)] = result
        self.write()

    def write(self) -> None:
        """Write the file; what was there stays until the new one is whole."""
        if self.file is None:
            return
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(self.json(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.file)

    def result(self, recipe: str, seed: int) -> dict[str, Any] | None:
        return self.runs.get(recipe, {}).get(str(seed))

    def results(self, recipe: str) -> list[dict[str, Any]]:
        return list(self.runs.get(recipe, {}).values())

    def pairs(self, recipe: str) -> int:
        """How many seeds both the recipe and the reference were trained with."""
        return len(self.changes(recipe))

    def changes(self, recipe: str, beyond: str = "") -> dict[str, float]:
        """{seed: change of the held-out loss in percent of the reference's}, or how far that lies beyond
        another recipe's; not finite where one diverged.
        """
        found = {}
        for seed, result in self.runs.get(recipe, {}).items():
            base = self.runs.get(self.reference, {}).get(seed)
            if base is not None:
                found[seed] = 100 * (result["loss"] / base["loss"] - 1) if "loss" in result else math.inf
        if not beyond:
            return found
        others = self.changes(beyond)
        return {seed: change - others[seed] for seed, change in found.items() if seed in others}

    def mean(self, recipe: str, beyond: str = "") -> Mean | None:
        """The mean of `changes` at the level of a look; None with fewer than two, and where one diverged."""
        changes = list(self.changes(recipe, beyond).values())
        if len(changes) < 2 or not all(map(math.isfinite, changes)):
            return None
        return mean_at_level(changes, LEVEL_OF_A_LOOK)

    @property
    def wall(self) -> float:
        """Seconds of all trainings."""
        return sum(result["wall"] for results in self.runs.values() for result in results.values())

    # -- what it says

    @property
    def rows(self) -> list[Row]:
        """A Row for each recipe, in the order in which they were tried, without the reference's."""
        return [self._row(recipe) for recipe in self.runs if recipe != self.reference]

    def _row(self, recipe):
        changes, mean = list(self.changes(recipe).values()), self.mean(recipe)
        diverged = changes.count(math.inf)
        writes = self.mean(recipe, AUTOCAST) if recipe.startswith("pure_bf16") else None
        recorded = evidence.miniatures(recipe)
        whole = of_whole_training(changes, recorded) if mean and recorded else (None, None)
        return Row(
            recipe=recipe,
            bytes=self.results(recipe)[0]["bytes"],
            seconds=self.seconds.get(recipe, self.seconds[self.reference]),
            change=statistics.fmean(changes) if changes and not diverged else None,
            low=mean and mean.low,
            high=mean and mean.high,
            writes=writes and writes.mean,
            writes_low=writes and writes.low,
            writes_high=writes and writes.high,
            pairs=len(changes),
            diverged=diverged,
            foreseen=self.foreseen.get(recipe, ""),
            verdict=verdict(mean, diverged, len(changes), self.within),
            whole_low=whole[0],
            whole_high=whole[1],
        )

    def losses(self) -> tuple[float, float]:
        """The reference's mean held-out loss before its trainings and after."""
        results = self.results(self.reference)
        before, after = (statistics.fmean(result[name] for result in results) for name in ("before", "loss"))
        return before, after

    def json(self) -> dict[str, Any]:
        """Plain values: the file's."""
        return {
            "format": FORMAT,
            "plan": self.plan,
            "reference": self.reference,
            "within": self.within,
            "rows": [row._asdict() for row in self.rows],
            "left_out": self.left_out,
            "seconds": self.seconds,
            "foreseen": self.foreseen,
            "runs": self.runs,
        }

    def __str__(self) -> str:
        plan = self.plan
        before, after = self.losses()
        count = len(self.results(self.reference))
        lines = [
            f"{plan['net']}: {plan['parameters']:,} trained parameters, {plan['steps']} steps a training",
            f"the reference is {self.reference}: its held-out loss falls from {before:.4g} to {after:.4g}, "
            f"in the mean of {count} {'seeds' if count > 1 else 'seed'}",
            "",
            layout([HEADER, *[self._cells(row) for row in self.rows]]),
            "",
            "change: of the held-out loss, in percent of the reference's; plus is worse. In brackets a 95 % "
            "interval, widened for several looks.",
            "of it writes: what it costs beyond bf16, which is autocast: the same products, of fp32 weights.",
            f"{CHAOS}: of one weight of the reference. What changes there, chaos changes.",
            "whole run: between which bounds the change of a training of ten times the steps is foreseen, "
            f"at {SURE_OF_WHOLE}, from eight small settings (experiments/078-miniatures).",
        ]
        for recipe, why in self.left_out.items():
            lines.append(f"left out: {recipe}: {why}")
        return "\n".join(lines)

    def _cells(self, row):
        size = row.bytes / self.plan["parameters"]
        change = _interval(row.change, row.low, row.high)
        writes = _interval(row.writes, row.writes_low, row.writes_high)
        cells = [row.recipe, f"{size:.3g}", f"{row.seconds:.3g}", change, writes, str(row.pairs)]
        whole = "-" if row.whole_low is None else f"{row.whole_low:+.2g} to {row.whole_high:+.2g}"
        return [*cells, row.foreseen or "-", whole, row.verdict]

    def draw(self, file: str | Path) -> None:
        """Write FILE.png: the change that each recipe makes, with its interval and its pairs."""
        rows = self.rows
        figure = figure_class()(figsize=(8, 1.3 + 0.4 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(-self.within, self.within, color="lightgrey", label=f"± {self.within:g} %")
        axes.axvline(0, color="black", linewidth=0.5)
        for place, row in enumerate(rows):
            changes = list(self.changes(row.recipe).values())
            axes.plot(changes, [place] * len(changes), "|", color="tab:blue", markersize=10)
            if row.change is not None and row.low is not None and row.high is not None:
                sides = [[row.change - row.low], [row.high - row.change]]
                axes.errorbar(row.change, place, xerr=sides, fmt="o", color="black", capsize=3)
            elif row.diverged:
                axes.text(0, place, " diverges", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [row.recipe for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"held-out loss against {self.reference}, %: pairs, mean and 95 % interval")
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=120)


def _interval(mean, low, high):
    if mean is None:
        return "-"
    return f"{mean:+.2f}" if low is None else f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def read_file(file: str | Path) -> dict[str, Any]:
    """What a Book has written. Raises Refused for another file."""
    text = Path(file).read_text(encoding="utf-8")
    with in_one_line(f"{file} is no trial's file:"):
        found = json.loads(text)
        if found["format"] != FORMAT or "runs" not in found:
            raise ValueError(f"it has no runs of format {FORMAT}")
    return found


def evidence_of(file: str | Path) -> dict[str, evidence.NearestRow]:
    """{recipe: what a trial's file says of it, as advise shows what was measured}. Raises Refused."""
    found = read_file(file)
    plan = found["plan"]
    rows = {}
    for row in (Row(**one) for one in found["rows"]):
        if row.change is None or row.low is None or row.high is None or found["reference"] != REFERENCE:
            continue
        measured = evidence.EvidenceRow(
            kind="net",
            task="",
            data="",
            regime="",
            recipe=row.recipe,
            optimizer="adamw",
            parameters=plan["parameters"],
            steps=plan["steps"],
            batch=0,
            lr=0.0,
            change=row.change,
            low=row.low,
            high=row.high,
            pairs=row.pairs,
            weights="",
            experiment=f"{file}: {plan['steps']} steps",
        )
        rows[row.recipe] = evidence.NearestRow(measured, ())
    return rows


def is_settled(mean: Mean | None, within: float) -> bool:
    """Whether an interval says enough: it is as narrow as `within` to either side, or lies beyond it."""
    return mean is not None and (mean.half <= within or mean.low > within or mean.high < -within)


def verdict(mean: Mean | None, diverged: int, pairs: int, within: float) -> str:
    """What a recipe's interval says, in words."""
    if diverged:
        return f"diverges: its loss was not finite in {diverged} of {pairs}"
    if mean is None:
        return "one pair tells nothing yet"
    side = "worse" if mean.low > 0 else "better" if mean.high < 0 else ""
    small = -within <= mean.low and mean.high <= within
    if side and small:
        return f"{side}, by less than {within:g} %"
    if side:
        return f"{side}, by {min(abs(mean.low), abs(mean.high)):.2g} % or more"
    return f"no change of {within:g} % or more" if small else "not told apart from the reference"
