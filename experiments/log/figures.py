"""The pictures of the log. Each draw_* takes pyplot and plain data and returns a figure; `save_figure` saves
it.

A picture carries a hash of its data and of the version of its draw_*, and is redrawn when the hash changed.
Raise the version in FIGURES when a draw_* draws another picture of the same data.
"""

import hashlib
import json
import math
import operator

from harness import run_folder

# a legend right of the axes
LEGEND_BESIDE = {"fontsize": 8, "loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
LINE_DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^v<>PX*dph8"
VERDICT_COLOURS = {
    "baseline": "black",
    "equal": "tab:green",
    "slightly worse": "goldenrod",
    "better": "tab:blue",
    "worse": "tab:red",
    "undecided": "tab:orange",
    "no pairs yet": "grey",
    "waits": "grey",
}
AXIS_LABELS = {  # of the curves: (title, axis)
    "loss": ("training loss", "loss"),
    "update_survival": ("weight updates that survive rounding", "share"),
    "loss_scale": ("loss scale", "factor"),
    "exp_avg_sq_moved": ("second moments that move", "share"),
    "ema_moved": ("EMA entries that move", "share"),
}

# ---- Files -------------------------------------------------------------------------------------------------


def save_figure(path, data):
    """Save the picture that FIGURES has for the name of `path`, unless the one there shows the same data."""
    draw, version, _ = FIGURES[path.stem]
    digest = digest_of(data, version)
    if path.exists() and drawn_from(path) == digest:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    picture = draw(plt, data)
    facts = {"Software": None, "Source": digest}
    run_folder.write_atomically(
        path, lambda file: picture.savefig(file, format="png", dpi=100, bbox_inches="tight", metadata=facts)
    )


def digest_of(data, version):
    """A hash of data with numbers to 9 digits: what is beyond depends on the versions of scipy and Python."""
    rounded = json.loads(json.dumps(data), parse_float=lambda number: f"{float(number):.9g}")
    return hashlib.sha256(json.dumps([version, rounded]).encode()).hexdigest()


def drawn_from(path):
    """The hash of what a picture shows; None where it can't be read."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.info.get("Source")
    except OSError:
        return None


# ---- Parts -------------------------------------------------------------------------------------------------


def figure_panels(plt, count):
    picture, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.6), squeeze=False)
    return picture, axes[0]


def draw_lines(axis, plt, arms, order):
    """{arm: (x, y)} as lines that differ in colour or dash.

    An arm looks the same in all figures of an experiment, by its place in `order`.
    """
    colours = plt.get_cmap("tab10").colors
    for name, (x, y) in arms.items():
        i = order.index(name)
        style = {"color": colours[i % 10], "linestyle": LINE_DASHES[i // 10 % 4]}
        axis.plot(x, y, marker="." if len(x) <= 12 else None, label=name, **style)
    axis.grid(alpha=0.3)


def legend_beside(axis, handles, names):
    """The legend to the right of the axis, in as many columns as its names need."""
    axis.legend(handles, names, ncols=1 + (len(names) - 1) // 20, **LEGEND_BESIDE)


def draw_level(axis, name, value):
    """A dotted line across the axis, with its name."""
    axis.axhline(value, color="grey", linestyle=":", linewidth=1)
    place = axis.get_yaxis_transform()
    axis.text(0.01, value, name, fontsize=7, color="grey", transform=place, va="bottom")


# ---- Pictures ----------------------------------------------------------------------------------------------


def draw_bins(plt, data):
    picture, axis = plt.subplots(figsize=(7, 4))
    draw_lines(axis, plt, data["arms"], data["order"])
    axis.set(
        title=f"{data['title']}\nloss by timestep, held-out images, mean over seeds",
        xlabel="timestep (0 clean, 1000 noise)",
        ylabel="mean squared error",
    )
    legend_beside(axis, *axis.get_legend_handles_labels())
    return picture


def draw_curves(plt, data):
    picture, axes = figure_panels(plt, len(data["panels"]))
    handles = {}  # no panel need have every arm
    for axis, (key, arms) in zip(axes, data["panels"].items(), strict=True):
        draw_lines(axis, plt, arms, data["order"])
        title, unit = AXIS_LABELS[key]
        axis.set(title=title, xlabel="step", ylabel=unit)
        if unit == "share":
            axis.set_ylim(-0.03, 1.03)
        elif key == "loss_scale":
            axis.set_yscale("log", base=2)
        drawn, names = axis.get_legend_handles_labels()
        handles.update(zip(names, drawn, strict=True))
    handles = {name: handles[name] for name in data["order"] if name in handles}
    legend_beside(axes[-1], handles.values(), handles)
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture


def draw_strips(plt, data):
    heights = [len(pixels) / len(pixels[0]) for _, pixels in data["rows"]]
    size = (9, 0.3 + 7 * sum(heights) + 0.12 * len(heights))
    picture, axes = plt.subplots(len(heights), 1, figsize=size, squeeze=False, height_ratios=heights)
    for axis, (name, pixels) in zip(axes[:, 0], data["rows"], strict=True):
        axis.imshow(pixels, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        axis.spines[:].set_visible(False)
    axes[0, 0].set_title(data["title"], fontsize=10)
    return picture


def draw_series(plt, data):
    """Curves of the score over x, a line a series, a bar of one standard deviation a point."""
    picture, axis = plt.subplots(figsize=(7, 4))
    colours, series = plt.get_cmap("tab10").colors, data["series"]
    for i, (name, points) in enumerate(series.items()):
        x, y, sd = zip(*points, strict=True)
        rest = len(series) - 1 - i  # wide below and narrow above: all are seen where lines fall together
        size = {"linewidth": 1.2 + rest, "markersize": 3.5 + 1.4 * rest, "elinewidth": 1.2, "capsize": 3}
        axis.errorbar(x, y, yerr=sd, color=colours[i % 10], marker="o", label=name, **size)
    places = set()
    for points in series.values():
        places.update(x for x, _, _ in points)
    if len(places) > 2:
        axis.set_xscale("log")
    axis.set_yscale("log")
    for name, value in data["levels"].items():
        draw_level(axis, name, value)
    axis.grid(alpha=0.3, which="both")
    title = data["title"] + "\nmean and standard deviation over seeds"
    axis.set(title=title, xlabel=data["x_label"], ylabel=data["y_label"])
    legend_beside(axis, *axis.get_legend_handles_labels())
    return picture


def draw_bytes(plt, data):
    """The change of the held-out loss of every recipe, with its 95 % interval, against its bytes a parameter,
    most bytes first.

    Recipes of about the same size stand side by side. The colour says where the interval lies; signs differ
    within a colour.
    """
    picture, axis = plt.subplots(figsize=(9, 4.5))
    taken, alike = {}, {}
    for name, size, mean, low, high, verdict in data["points"]:
        column, i = round(2 * size), alike.get(verdict, 0)
        x = size - 0.12 * taken.get(column, 0)
        taken[column], alike[verdict] = taken.get(column, 0) + 1, i + 1
        bars = None if low is None else [[mean - low], [high - mean]]
        style = {"color": VERDICT_COLOURS[verdict], "marker": MARKERS[i % len(MARKERS)], "linestyle": "none"}
        label = f"{size:.4g}  {name}: {SIDE_LABELS.get(verdict, verdict)}"
        axis.errorbar([x], [mean], yerr=bars, markersize=6, capsize=3, label=label, **style)
    axis.axhline(0, color="grey", linewidth=1)
    axis.invert_xaxis()
    axis.grid(alpha=0.3)
    axis.set_title(f"{data['title']}\nmean of the paired differences, with 95 % intervals", fontsize=10)
    axis.set(xlabel="bytes a parameter: weights, gradients, optimiser states", ylabel=data["y_label"])
    axis.legend(title="bytes  recipe", title_fontsize=8, **LEGEND_BESIDE)
    return picture


SIDE_LABELS = {"undecided": "interval holds 0"}


def draw_factorial(plt, data):
    """Left, every cell's mean score as a colour; right, what each factor and each pair multiplies it by."""
    from matplotlib.colors import LogNorm

    groups = data["groups"]
    heights = [max(len(g["rows"]), 0.55 * len(g["effects"])) for g in groups]
    shape = {"height_ratios": heights, "width_ratios": [1.2, 1], "figsize": (13, 1.2 + 0.55 * sum(heights))}
    picture, axes = plt.subplots(len(groups), 2, squeeze=False, **shape)
    values = []
    for group in groups:
        for row in group["cells"]:
            values += [v for v in row if v is not None]
    for (table, bars), group in zip(axes, groups, strict=True):
        draw_cells(table, group, LogNorm(min(values), max(values)))
        draw_effects(bars, group["effects"])
    picture.suptitle(data["title"] + ": mean over seeds; effects with 95 % intervals")
    picture.tight_layout()
    return picture


def draw_cells(axis, group, norm):
    shown = []
    for row in group["cells"]:
        shown.append([math.nan if v is None else v for v in row])
    axis.imshow(shown, norm=norm, cmap="RdYlGn_r", aspect="auto")
    for i, row in enumerate(group["cells"]):
        for j, v in enumerate(row):
            axis.text(j, i, "-" if v is None else f"{v:.3g}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(group["columns"])), group["columns"], fontsize=7, rotation=25, ha="right")
    axis.set_yticks(range(len(group["rows"])), group["rows"], fontsize=7)
    axis.set_title(group["title"], fontsize=9)


def draw_effects(axis, effects):
    names, mid, low, high = zip(*effects, strict=True)
    at = list(range(len(names)))[::-1]
    bars = list(map(operator.sub, mid, low)), list(map(operator.sub, high, mid))
    axis.errorbar(mid, at, xerr=bars, fmt="o", markersize=4, capsize=3, color="black")
    axis.axvline(1, color="grey", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(at, names, fontsize=8)
    axis.set_xlabel("multiplies the distance by", fontsize=8)
    axis.grid(alpha=0.3, axis="x", which="both")


def draw_ranges(plt, data):
    """What generation runs through: ranges of the state and of the net's output, by timestep."""
    picture, axes = figure_panels(plt, len(data["panels"]))
    for axis, (title, arms) in zip(axes, data["panels"].items(), strict=True):
        draw_lines(axis, plt, arms, data["order"])
        axis.invert_xaxis()
        axis.set(title=title, xlabel="timestep (1000 noise, 0 clean)")
    axes[-1].legend(**LEGEND_BESIDE)
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture


def draw_overview(plt, data):
    """The held-out loss against fp32 of the main recipes, a panel a recipe and a line a net.

    A point beyond the right edge is an arrow there, with its figure.
    """
    rows, recipes = data["rows"], data["recipes"]
    size = (13, 1.2 + 0.19 * len(rows))
    picture, axes = plt.subplots(1, len(recipes), sharey=True, squeeze=False, figsize=size)
    places = list(range(len(rows)))
    for column, (axis, recipe) in enumerate(zip(axes[0], recipes, strict=True)):
        low, high = NEAREST_RANGE if recipe == "to nearest" else CHANGE_RANGE
        axis.axvline(0, color="grey", linewidth=1)
        for place, row in zip(places, rows, strict=True):
            if row["cells"][column] is not None:
                draw_change(axis, place, row["cells"][column], high)
        axis.set_xlim(low, high)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_title(recipe, fontsize=9)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    axes[0][0].set_yticks(places, [row["net"] for row in rows], fontsize=8)
    said = "held-out loss against fp32, in percent; right is worse. Bars: 95 % intervals. "
    said += "Red: worse; blue: better; black: the interval holds 0; hollow: two pairs"
    picture.supxlabel(said, fontsize=9)
    picture.tight_layout()
    return picture


CHANGE_RANGE = (-3.5, 3.5)  # percent
NEAREST_RANGE = (-2, 10)


def draw_change(axis, place, cell, edge):
    """One mean with its interval, or an arrow at the right edge."""
    mean, low, high, pairs = cell
    enough = pairs > 2
    colour = "black"
    if enough and low > 0:
        colour = VERDICT_COLOURS["worse"]
    if enough and high < 0:
        colour = VERDICT_COLOURS["better"]
    if mean > edge:
        axis.plot([edge], [place], marker=">", color=colour, markersize=6, clip_on=False)
        axis.text(0.95 * edge, place, f"{mean:+.0f}", fontsize=7, ha="right", va="center", color=colour)
        return
    filled = None if enough else "white"
    bars = [[mean - low], [high - mean]]
    style = {"color": colour, "fmt": "o", "markersize": 4, "capsize": 2, "markerfacecolor": filled}
    axis.errorbar([mean], [place], xerr=bars, **style)


FIGURES = {  # name of the file: (how it is drawn, its version, what the pages call it), in their order
    "factorial": (draw_factorial, 1, "cells and effects"),
    "series": (draw_series, 1, "score over x"),
    "bytes": (draw_bytes, 2, "held-out loss against bytes a parameter"),
    "ranges": (draw_ranges, 1, "ranges by sampling step"),
    "samples": (draw_strips, 1, "samples of each arm from the same noise"),
    "loss_by_timestep": (draw_bins, 1, "loss by timestep"),
    "curves": (draw_curves, 1, "training curves"),
    "effects": (draw_overview, 3, "the held-out loss of the main recipes against fp32"),
}
