"""A picture of an Advice: what each recipe takes, and what it costs in held-out loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import Refused
from ..machine import quiet_import
from .machines import GIB

COLOUR_OF_FITTING, COLOUR_OF_TOO_LARGE = "tab:blue", "lightgrey"
LONGEST_TITLE = 80


def check_picture(flag: str, file: str, suffix: str = ".png") -> None:
    """Raises Refused for a name that is no FILE.png in a folder that there is, and without matplotlib.
    suffix: of a file beside which the picture is drawn.
    """
    path = Path(file)
    if path.suffix != suffix or not path.resolve().parent.is_dir() or path.is_dir():
        raise Refused(f"{flag} {file}: write FILE{suffix}, in a folder that there is")
    figure_class()


def figure_class() -> Any:
    """matplotlib's Figure. Raises Refused without that package."""
    return quiet_import("matplotlib.figure", "a picture").Figure


def draw_plot(advice, file: str) -> None:
    """Write FILE.png: a line a recipe, in the order of the table, with its memory as a bar and the change of
    the held-out loss with its 95 % interval.
    """
    figure = figure_class()(figsize=(10, 1.5 + 0.35 * len(advice.rows)), layout="constrained")
    memory, loss = figure.subplots(1, 2, sharey=True)
    _draw_memory(memory, advice)
    _draw_loss(loss, advice.rows)
    memory.invert_yaxis()  # the best stands on top
    title = f"{advice.subject.name} on {advice.machine.name}"
    if len(title) > LONGEST_TITLE:
        title = f"{title[:LONGEST_TITLE]} ..."
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)


def _draw_memory(axes, advice):
    """Bars of what a step takes, blue where it fits, and a dashed line where the memory ends."""
    names = [row.candidate.typed for row in advice.rows]
    largest = max(row.total for row in advice.rows)
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", 2**20)
    colours = [COLOUR_OF_FITTING if row.fits else COLOUR_OF_TOO_LARGE for row in advice.rows]
    axes.barh(names, [row.total / size for row in advice.rows], color=colours)
    budget = advice.machine.memory * (1 - advice.machine.margin)
    if budget < 3 * largest:  # else the line is far to the right, and the bars would be short
        axes.axvline(budget / size, color="black", linestyle="--", linewidth=1)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(f"{unit} at once; blue: fits into {budget / GIB:.3g} GiB")


def _draw_loss(axes, rows):
    """The change of the held-out loss, a point with its 95 % interval."""
    axes.axvline(0, color="black", linewidth=0.5)
    for place, row in enumerate(rows):
        if row.quality is None:
            said = "not measured" if row.candidate.flags else "the reference"
            axes.text(0, place, f" {said}", va="center", fontsize=8)
            continue
        found = row.quality.row
        below, above = max(0.0, found.change - found.low), max(0.0, found.high - found.change)
        axes.errorbar(found.change, place, xerr=[[below], [above]], fmt="o", color="black", capsize=3)
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("held-out loss against fp32, %")
