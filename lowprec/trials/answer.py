"""What a trial says: in words, as JSON, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..advice.plot import figure_class
from ..advice.text import aligned
from .book import CHAOS, Book, Row

HEADER = ["recipe", "bytes a parameter", "seconds a step", "change [interval], %", "of it writes, %", "pairs"]
HEADER += ["foreseen", "verdict"]


class Answer:
    """The answer of `trial`: `rows`; str() for a person, json() for a program, draw(file) for a picture."""

    def __init__(self, book: Book):
        self.book = book

    @property
    def rows(self) -> list[Row]:
        """A Row for each recipe that was tried."""
        return self.book.rows()

    def json(self) -> dict[str, Any]:
        """Plain values, all trainings among them."""
        return self.book.json()

    def __str__(self) -> str:
        book, plan = self.book, self.book.plan
        before, after = book.losses()
        count = len(book.results(book.reference))
        lines = [
            f"{plan['net']}: {plan['parameters']:,} trained parameters, {plan['steps']} steps a training",
            f"the reference is {book.reference}: its held-out loss falls from {before:.4g} to {after:.4g}, "
            f"in the mean of {count} {'seeds' if count > 1 else 'seed'}",
            "",
            *aligned([HEADER, *[self._cells(row) for row in self.rows]]),
            "",
            "change: of the held-out loss, in percent of the reference's; plus is worse. In brackets a 95 % "
            "interval, widened for several looks.",
            "of it writes: what it costs beyond bf16, which is autocast: the same products, of fp32 weights.",
            f"{CHAOS}: of one weight of the reference. What changes there, chaos changes.",
            "A longer training may lose far more to nearest than is told here (experiments/078-miniatures).",
        ]
        for recipe, why in book.left_out.items():
            lines.append(f"left out: {recipe}: {why}")
        return "\n".join(lines)

    def _cells(self, row):
        size = row.bytes / self.book.plan["parameters"]
        change = _interval(row.change, row.low, row.high)
        writes = _interval(row.writes, row.writes_low, row.writes_high)
        cells = [row.recipe, f"{size:.3g}", f"{row.seconds:.3g}", change, writes, str(row.pairs)]
        return [*cells, row.foreseen or "-", row.verdict]

    def draw(self, file: str | Path) -> None:
        """Write FILE.png: the change that each recipe makes, with its interval and its pairs."""
        rows = self.rows
        figure = figure_class()(figsize=(8, 1.3 + 0.4 * len(rows)), layout="constrained")
        axes = figure.subplots()
        within = self.book.within
        axes.axvspan(-within, within, color="lightgrey", label=f"± {within:g} %")
        axes.axvline(0, color="black", linewidth=0.5)
        for place, row in enumerate(rows):
            changes = list(self.book.changes(row.recipe).values())
            axes.plot(changes, [place] * len(changes), "|", color="tab:blue", markersize=10)
            if row.change is not None and row.low is not None and row.high is not None:
                sides = [[row.change - row.low], [row.high - row.change]]
                axes.errorbar(row.change, place, xerr=sides, fmt="o", color="black", capsize=3)
            elif row.diverged:
                axes.text(0, place, " diverges", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [row.recipe for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"held-out loss against {self.book.reference}, %: pairs, mean and 95 % interval")
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=120)


def _interval(mean, low, high):
    if mean is None:
        return "-"
    return f"{mean:+.2f}" if low is None else f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
