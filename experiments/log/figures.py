"""The pictures of the log. Each draw_* takes pyplot and plain data and returns a figure; `figure` saves it.

A picture carries a hash of its data and of the version of its draw_*, and is redrawn when the hash changed.
Raise the version in FIGURES when a draw_* draws another picture of the same data.
"""

import hashlib
import json
from pathlib import Path

from harness import run_folder

# Pictures drawn before versions existed carry another hash; this maps it to the one of the same data.
OLDER = Path(__file__).with_name("pictures.json")
BESIDE = {"fontsize": 8, "loc": "center left", "bbox_to_anchor": (1.01, 0.5)}  # a legend right of the axes
DASHES = ("-", "--", ":", "-.")
MARKS = "osD^v<>PX*dph8"
COLOURS = {
    "baseline": "black",
    "equal": "tab:green",
    "better": "tab:blue",
    "worse": "tab:red",
    "undecided": "tab:orange",
    "no pairs yet": "grey",
    "waits": "grey",
}
LABELS = {  # of the curves: (title, axis)
    "loss": ("training loss", "loss"),
    "update_survival": ("weight updates that survive rounding", "share"),
    "loss_scale": ("loss scale", "factor"),
    "exp_avg_sq_moved": ("second moments that move", "share"),
    "ema_moved": ("EMA entries that move", "share"),
}

# ---- Files -------------------------------------------------------------------------------------------------


def figure(path, data):
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
    """The hash of what a picture shows."""
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as picture:
        source = picture.info.get("Source")
    return json.loads(OLDER.read_text()).get(source, source)


# ---- Parts -------------------------------------------------------------------------------------------------


def panels(plt, count):
    picture, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.6), squeeze=False)
    return picture, axes[0]


def lines(axis, plt, arms, order):
    """{arm: (x, y)} as lines that differ in colour or dash.

    An arm looks the same in all figures of an experiment, by its place in `order`.
    """
    colours = plt.get_cmap("tab10").colors
    for name, (x, y) in arms.items():
        i = order.index(name)
        style = {"color": colours[i % 10], "linestyle": DASHES[i // 10 % 4]}
        axis.plot(x, y, marker="." if len(x) <= 12 else None, label=name, **style)
    axis.grid(alpha=0.3)


def level(axis, name, value):
    """A dotted line across the axis, with its name."""
    axis.axhline(value, color="grey", linestyle=":", linewidth=1)
    place = axis.get_yaxis_transform()
    axis.text(0.01, value, name, fontsize=7, color="grey", transform=place, va="bottom")


# ---- Pictures ----------------------------------------------------------------------------------------------


def draw_bins(plt, data):
    picture, axis = plt.subplots(figsize=(7, 4))
    lines(axis, plt, data["arms"], data["order"])
    axis.set(
        title=f"{data['title']}\nloss by timestep, held-out images, mean over seeds",
        xlabel="timestep (0 clean, 1000 noise)",
        ylabel="mean squared error",
    )
    axis.legend(**BESIDE)
    return picture


def draw_curves(plt, data):
    picture, axes = panels(plt, len(data["panels"]))
    handles = {}  # no panel need have every arm
    for axis, (key, arms) in zip(axes, data["panels"].items(), strict=True):
        lines(axis, plt, arms, data["order"])
        title, unit = LABELS[key]
        axis.set(title=title, xlabel="step", ylabel=unit)
        if unit == "share":
            axis.set_ylim(-0.03, 1.03)
        elif key == "loss_scale":
            axis.set_yscale("log", base=2)
        drawn, names = axis.get_legend_handles_labels()
        handles.update(zip(names, drawn, strict=True))
    names = [name for name in data["order"] if name in handles]
    axes[-1].legend([handles[name] for name in names], names, **BESIDE)
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture


def draw_strips(plt, data):
    heights = [len(pixels) / len(pixels[0]) for _, pixels in data["rows"]]
    size = (9, 0.3 + sum(7 * h + 0.12 for h in heights))
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
    if len({x for points in series.values() for x, _, _ in points}) > 2:
        axis.set_xscale("log")
    axis.set_yscale("log")
    for name, value in data["levels"].items():
        level(axis, name, value)
    axis.grid(alpha=0.3, which="both")
    title = data["title"] + "\nmean and standard deviation over seeds"
    axis.set(title=title, xlabel=data["x_label"], ylabel=data["y_label"])
    axis.legend(**BESIDE)
    return picture


def draw_bytes(plt, data):
    """Score of every recipe against its bytes a parameter, most bytes first, with the 95 % interval of its
    difference from the baseline.

    Recipes of about the same size stand side by side. The colour is the verdict; signs differ within a
    colour. The band is the margin within which recipes equal the baseline.
    """
    picture, axis = plt.subplots(figsize=(9, 4.5))
    taken, alike = {}, {}
    for name, size, mean, low, high, verdict in data["points"]:
        column, i = round(2 * size), alike.get(verdict, 0)
        x = size - 0.12 * taken.get(column, 0)
        taken[column], alike[verdict] = taken.get(column, 0) + 1, i + 1
        bars = None if low is None else [[mean - low], [high - mean]]
        style = {"color": COLOURS[verdict], "marker": MARKS[i % len(MARKS)], "linestyle": "none"}
        label = f"{size:.4g}  {name}: {verdict}"
        axis.errorbar([x], [mean], yerr=bars, markersize=6, capsize=3, label=label, **style)
    base = next((point[2] for point in data["points"] if point[5] == "baseline"), None)
    if base is not None:
        margin = data["margin"]
        axis.axhspan(base - margin, base + margin, color="tab:green", alpha=0.12, linewidth=0)
    values = [point[2] for point in data["points"]]
    if min(values) > 0 and max(values) > 10 * min(values):
        axis.set_yscale("log")
    for name, value in data["levels"].items():
        if value < 3 * max(values):
            level(axis, name, value)
    axis.invert_xaxis()
    axis.grid(alpha=0.3)
    shown = "mean over seeds; bars: 95 % interval of the paired difference; band: margin of equality"
    axis.set_title(f"{data['title']}\n{shown}", fontsize=10)
    axis.set(xlabel="bytes a parameter: weights, gradients, optimiser states", ylabel=data["y_label"])
    axis.legend(title="bytes  recipe", title_fontsize=8, **BESIDE)
    return picture


def draw_factorial(plt, data):
    """Left, every cell's mean score as a colour; right, what each factor and each pair multiplies it by."""
    from matplotlib.colors import LogNorm

    groups = data["groups"]
    heights = [max(len(g["rows"]), 0.55 * len(g["effects"])) for g in groups]
    shape = {"height_ratios": heights, "width_ratios": [1.2, 1], "figsize": (13, 1.2 + 0.55 * sum(heights))}
    picture, axes = plt.subplots(len(groups), 2, squeeze=False, **shape)
    values = [v for g in groups for row in g["cells"] for v in row if v is not None]
    for (table, bars), group in zip(axes, groups, strict=True):
        draw_cells(table, group, LogNorm(min(values), max(values)))
        draw_effects(bars, group["effects"])
    picture.suptitle(data["title"] + ": mean over seeds; effects with 95 % intervals")
    picture.tight_layout()
    return picture


def draw_cells(axis, group, norm):
    shown = [[float("nan") if v is None else v for v in row] for row in group["cells"]]
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
    bars = [
        [m - end for m, end in zip(mid, low, strict=True)],
        [end - m for m, end in zip(mid, high, strict=True)],
    ]
    axis.errorbar(mid, at, xerr=bars, fmt="o", markersize=4, capsize=3, color="black")
    axis.axvline(1, color="grey", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(at, names, fontsize=8)
    axis.set_xlabel("multiplies the distance by", fontsize=8)
    axis.grid(alpha=0.3, axis="x", which="both")


def draw_ranges(plt, data):
    """What generation runs through: ranges of the state and of the net's output, by timestep."""
    picture, axes = panels(plt, len(data["panels"]))
    for axis, (title, arms) in zip(axes, data["panels"].items(), strict=True):
        lines(axis, plt, arms, data["order"])
        axis.invert_xaxis()
        axis.set(title=title, xlabel="timestep (1000 noise, 0 clean)")
    axes[-1].legend(**BESIDE)
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture


def draw_effects_of_recipes(plt, data):
    """Differences from fp32 of the main recipes, a row each: left the score in margins, right the loss."""
    rows = data["rows"]
    nets = list(dict.fromkeys(row["net"] for row in rows))
    gap = 0.9  # rows between nets, where the net's name stands
    heights = [i + gap * (nets.index(row["net"]) + 1) for i, row in enumerate(rows)]
    size = (11, 1.4 + 0.27 * (heights[-1] + 1))
    picture, axes = plt.subplots(1, 2, sharey=True, figsize=size)
    for axis, part in zip(axes, ("score", "loss"), strict=True):
        axis.axvline(0, color="grey", linewidth=1)
        for row, y in zip(rows, heights, strict=True):
            if row[part] is None:
                continue
            mean, low, high = row[part]
            filled = "white" if part == "loss" and row["kind"] == "training loss" else None
            style = {"color": COLOURS[row["verdict"]], "fmt": "o", "capsize": 3, "markersize": 5}
            axis.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], markerfacecolor=filled, **style)
        axis.set_xscale("symlog", linthresh=1, linscale=1.2)
        axis.grid(alpha=0.3, axis="x")
    axes[0].axvspan(-1, 1, color="tab:green", alpha=0.12, linewidth=0)
    names = [f"{row['recipe']} ({row['number']}, n = {row['n']})" for row in rows]
    axes[0].set_yticks(heights, names, fontsize=8)
    for net in nets:
        first = next(y for row, y in zip(rows, heights, strict=True) if row["net"] == net)
        place = axes[0].get_yaxis_transform()
        style = {"fontsize": 8, "fontweight": "bold", "ha": "right", "va": "center", "clip_on": False}
        axes[0].text(-0.012, first - gap, net, transform=place, **style)
    axes[0].set_ylim(heights[-1] + 0.7, -0.5)
    ticks = [-1, 0, 1, 3, 10, 100]
    labels = "difference of the score, in margins", "difference of the loss, %"
    for axis, label in zip(axes, labels, strict=True):
        low, high = axis.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        axis.set_xticks(shown, [f"{tick:+g}" if tick else "0" for tick in shown])
        axis.minorticks_off()
        axis.set_xlabel(f"{label} (right is worse)", fontsize=9)
    said = "bars: 95 % intervals of paired differences; band: the margin; colour: the verdict on the score"
    axes[1].set_title("hollow: training loss, where no held-out loss is recorded", fontsize=8)
    axes[0].set_title("green equal, red worse, orange not shown to differ", fontsize=8)
    inch = 1 / size[1]  # of the height, which grows with the rows
    picture.suptitle(said, fontsize=9, y=1 - 0.1 * inch, va="top")
    picture.tight_layout()
    return picture


FIGURES = {  # name of the file: (how it is drawn, its version, what the pages call it), in their order
    "factorial": (draw_factorial, 1, "cells and effects"),
    "series": (draw_series, 1, "score over x"),
    "bytes": (draw_bytes, 1, "score against bytes a parameter"),
    "ranges": (draw_ranges, 1, "ranges by sampling step"),
    "samples": (draw_strips, 1, "samples of each arm from the same noise"),
    "loss_by_timestep": (draw_bins, 1, "loss by timestep"),
    "curves": (draw_curves, 1, "training curves"),
    "effects": (draw_effects_of_recipes, 2, "differences of the main recipes from fp32"),
}
