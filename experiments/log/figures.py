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


SIZE_RANGE = (1e5, 1e9)  # parameters
CHANGE_RANGE = (-0.5, 0.8)  # percent
NEAREST_RANGE = (0.3, 100)
KIND_COLOURS = {True: "tab:orange", False: "tab:blue"}  # by whether a net writes text
RECIPE_MARKERS = {"to nearest": "o", "stochastic": "o", "autocast": "s"}
SIDE_OF_NET = {"stochastic": 0.06, "autocast": -0.06}  # decades to the right of the net's size


def draw_sizes(plt, data):
    """The held-out loss against fp32 over the size of the net: to nearest above, what costs little below."""
    picture, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 7.5), height_ratios=[2, 3])
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter("{x:g}")
    for axis, recipes, (low, high) in [
        (upper, ["to nearest"], NEAREST_RANGE),
        (lower, ["stochastic", "autocast"], CHANGE_RANGE),
    ]:
        axis.set_xlim(*SIZE_RANGE)
        axis.set_ylim(low, high)
        for recipe in recipes:
            for point in spread_out(data["points"][recipe], SIDE_OF_NET.get(recipe, 0)):
                draw_point(axis, point, RECIPE_MARKERS[recipe], low, high)
        axis.grid(alpha=0.3)
        axis.set_ylabel("held-out loss against fp32, %")
    largest = max((point[0] for points in data["points"].values() for point in points), default=1e6)
    for axis in (upper, lower):
        axis.axvspan(1.5 * largest, SIZE_RANGE[1], color="0.93", zorder=0)
    upper.text(3 * largest, 3, "not measured", color="grey", fontsize=9)
    lower.axhline(0, color="black", linewidth=1)
    if data["line"]:
        places, heights, lows, highs = zip(*data["line"], strict=True)
        sizes = [10**place for place in places]
        lower.plot(sizes, heights, color="grey", linewidth=1.2)
        lower.fill_between(sizes, lows, highs, color="grey", alpha=0.2)
    upper.set_title("rounded to nearest (logarithmic)", fontsize=10)
    lower.set_title("stochastic rounding, and bf16 autocast", fontsize=10)
    lower.set_xscale("log")
    lower.set_xlabel("parameters")
    lower.legend(handles=size_legend(plt), fontsize=8, loc="upper right")
    picture.tight_layout()
    return picture


COST_COLOURS = {
    "fp32": "black",
    "autocast": "tab:blue",
    "to nearest": "tab:red",
    "stochastic": "tab:green",
    "stochastic, 8-bit states": "tab:olive",
}


def draw_cost(plt, data):
    """Left, how far each recipe trains above fp32, step by step; right, its bytes and what it costs."""
    picture, (curves, bars) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=[5, 5])
    curves.axhline(0, color=COST_COLOURS["fp32"], linewidth=1)
    for name, points in data["curves"].items():
        steps, means, lows, highs = zip(*points, strict=True)
        curves.plot(steps, means, color=COST_COLOURS[name], linewidth=1.6)
        curves.fill_between(steps, lows, highs, color=COST_COLOURS[name], alpha=0.2, linewidth=0)
    curves.grid(alpha=0.3)
    curves.set(xlabel="step", ylabel="%")
    curves.set_title("training loss above fp32's of the same seed", fontsize=10)
    for place, (name, (size, told)) in enumerate(data["bars"].items()):
        bars.barh(-place, size, color=COST_COLOURS[name], height=0.6)
        bars.text(size + 0.3, -place, f"{size} bytes: {told}", va="center", fontsize=9)
    bars.set(xlim=(0, 29), xticks=[])
    bars.set_yticks([-place for place in range(len(data["bars"]))], data["bars"])
    bars.set_title("bytes a parameter, and held-out loss against fp32's", fontsize=10)
    bars.tick_params(length=0)
    bars.spines[:].set_visible(False)
    picture.suptitle(f"{data['net']} parameters: mean over seeds, 95 % intervals", fontsize=11)
    picture.tight_layout()
    return picture


def spread_out(points, aside):
    """The points with the settings of a net side by side, and not on top of each other."""
    nets = {}
    for point in points:
        nets.setdefault(point[0], []).append(point)
    for size, own in nets.items():
        for i, point in enumerate(own):
            shift = aside + 0.018 * (i - (len(own) - 1) / 2)
            yield [size * 10**shift, *point[1:]]


def draw_point(axis, point, marker, low, high):
    """A mean with its interval; a triangle at the frame where one of them lies beyond it."""
    x, mean, bottom, top, pairs, is_text = point
    colour = KIND_COLOURS[is_text]
    filled = {"color": colour, "markerfacecolor": colour if pairs >= 6 else "white"}
    axis.plot([x, x], [max(bottom, low), min(top, high)], color=colour, linewidth=0.8, alpha=0.6)
    if low <= mean <= high:
        axis.plot([x], [mean], marker=marker, markersize=5, linestyle="none", **filled)
    for beyond, place, shape in ((bottom < low, low, "v"), (top > high, high, "^")):
        if beyond:
            axis.plot([x], [place], marker=shape, markersize=5, linestyle="none", clip_on=False, **filled)


def size_legend(plt):
    """What colours, shapes and filling say."""
    from matplotlib.patches import Patch

    def sign(marker, colour, name, filled=True):
        inside = colour if filled else "white"
        style = {"color": colour, "markerfacecolor": inside, "linestyle": "none", "marker": marker}
        return plt.Line2D([], [], label=name, **style)

    return [
        sign("o", "black", "stochastic"),
        sign("s", "black", "autocast"),
        sign("o", "black", "fewer than six pairs", filled=False),
        sign("^", "black", "goes on beyond the frame"),
        Patch(color=KIND_COLOURS[True], label="text"),
        Patch(color=KIND_COLOURS[False], label="diffusion"),
        Patch(color="0.8", label="line of stochastic, a point a net"),
    ]


FIGURES = {  # name of the file: (how it is drawn, its version, what the pages call it), in their order
    "factorial": (draw_factorial, 1, "cells and effects"),
    "series": (draw_series, 1, "score over x"),
    "bytes": (draw_bytes, 2, "held-out loss against bytes a parameter"),
    "ranges": (draw_ranges, 1, "ranges by sampling step"),
    "samples": (draw_strips, 1, "samples of each arm from the same noise"),
    "loss_by_timestep": (draw_bins, 1, "loss by timestep"),
    "curves": (draw_curves, 1, "training curves"),
    "sizes": (draw_sizes, 2, "the held-out loss against fp32, by the size of the net"),
    "cost": (draw_cost, 1, "what each recipe takes and costs on the largest net"),
}
