"""A picture of an Advice: bytes a parameter against the change of the held-out loss."""

from __future__ import annotations

from pathlib import Path

from ..errors import Refused
from ..machine import quiet_import

COLOUR_OF_FITTING, COLOUR_OF_TOO_LARGE = "tab:blue", "lightgrey"


def check_plot(file: str) -> None:
    """Raises Refused for a name that is no FILE.png in a folder, and without matplotlib."""
    path = Path(file)
    if path.suffix != ".png" or not path.parent.is_dir() or path.is_dir():
        raise Refused(f"--plot {file}: write FILE.png, in a folder that there is")
    quiet_import("matplotlib", f"--plot {file}")


def draw_plot(advice, file: str) -> None:
    """Write FILE.png: a point a recipe with its 95 % interval, coloured where it fits, and the memory of the
    machine as a line. Raises Refused where no recipe was measured, and for a file that can't be written.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    rows = [row for row in advice.rows if row.quality is not None]
    if not rows:
        raise Refused(f"--plot {file}: no recipe was measured on such a net")
    parameters = advice.subject.parameters
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        _draw_point(axes, row, row.total / parameters)
    budget = advice.machine.memory * (1 - advice.machine.margin) / parameters
    axes.axvline(budget, color="black", linestyle="--", linewidth=1)
    axes.text(budget, 0.99, "memory", rotation=90, ha="right", va="top", transform=axes.get_xaxis_transform())
    axes.axhline(0, color="black", linewidth=0.5)
    largest = max(row.total for row in rows) / parameters
    if budget < 3 * largest:
        axes.set_xlim(0, 1.1 * max(budget, largest))
    else:
        axes.set_xlim(0, 1.3 * largest)  # the line of the memory is far to the right
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("bytes a parameter, all that a step takes")
    axes.set_ylabel("held-out loss against fp32, %")
    axes.set_title(f"{advice.subject.name} on {advice.machine.name}\ncoloured: fits", fontsize=10)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise Refused(f"--plot {file}: {error.strerror}; give another place") from None


def _draw_point(axes, row, size):
    found = row.quality.row
    below, above = max(0.0, found.change - found.low), max(0.0, found.high - found.change)
    colour = COLOUR_OF_FITTING if row.fits else COLOUR_OF_TOO_LARGE
    axes.errorbar(size, found.change, yerr=[[below], [above]], fmt="o", color=colour, capsize=3)
    axes.annotate(
        row.candidate.typed, (size, found.change), fontsize=7, xytext=(4, 4), textcoords="offset points"
    )
