"""The pictures of the log. Each draw_* takes pyplot and plain data; `figure` redraws a file only when its data or its draw_* changed."""

import hashlib
import inspect


def figure(path, data, draw):
    """Save draw(plt, data) as PNG, unless the one that is there was drawn from the same data by the same code."""
    from PIL import Image

    code = "".join(inspect.getsource(function) for function in (figure, lines, draw))
    digest = hashlib.sha256((code + repr(LABELS) + repr(data)).encode()).hexdigest()
    if path.exists():
        with Image.open(path) as old:
            if old.info.get("Source") == digest:
                return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    picture = draw(plt, data)
    beside = path.with_suffix(".part")
    picture.savefig(beside, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None, "Source": digest})
    beside.replace(path)


def lines(axis, plt, arms, order):
    """{arm: (x, y)} as lines that differ in colour or dash; an arm looks the same in all figures of an experiment, by its place in `order`."""
    colours, dashes = plt.get_cmap("tab10").colors, ("-", "--", ":", "-.")
    for name, (x, y) in arms.items():
        i = order.index(name)
        axis.plot(x, y, color=colours[i % 10], linestyle=dashes[i // 10 % 4], marker="." if len(x) <= 12 else None, label=name)
    axis.grid(alpha=0.3)


def draw_bins(plt, data):
    picture, axis = plt.subplots(figsize=(7, 4))
    lines(axis, plt, data["arms"], data["order"])
    axis.set(title=f"{data['title']}\nloss by timestep, held-out images, mean over seeds", xlabel="timestep (0 clean, 1000 noise)", ylabel="mean squared error")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return picture


LABELS = {"loss": ("training loss", "loss"), "update_survival": ("weight updates that survive rounding", "share"), "loss_scale": ("loss scale", "factor"),
          "exp_avg_sq_moved": ("second moments that move", "share"), "ema_moved": ("EMA entries that move", "share")}


def draw_curves(plt, data):
    picture, axes = plt.subplots(1, len(data["panels"]), figsize=(4.2 * len(data["panels"]), 3.6), squeeze=False)
    for axis, (key, arms) in zip(axes[0], data["panels"].items()):
        lines(axis, plt, arms, data["order"])
        axis.set(title=LABELS[key][0], xlabel="step", ylabel=LABELS[key][1])
        if LABELS[key][1] == "share":
            axis.set_ylim(-0.03, 1.03)
        elif key == "loss_scale":
            axis.set_yscale("log", base=2)
    handles = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels())}  # no panel need have every arm
    axes[0][-1].legend([handles[name] for name in data["order"] if name in handles], [name for name in data["order"] if name in handles],
                       fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture


def draw_strips(plt, data):
    heights = [len(pixels) / len(pixels[0]) for _, pixels in data["rows"]]
    picture, axes = plt.subplots(len(heights), 1, figsize=(9, 0.3 + sum(7 * h + 0.12 for h in heights)), squeeze=False, height_ratios=heights)
    for axis, (name, pixels) in zip(axes[:, 0], data["rows"]):
        axis.imshow(pixels, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        axis.spines[:].set_visible(False)
    axes[0, 0].set_title(data["title"], fontsize=10)
    return picture


def draw_series(plt, data):
    """Curves of the score over x, a line a series, a bar of one standard deviation a point."""
    picture, axis = plt.subplots(figsize=(7, 4))
    colours = plt.get_cmap("tab10").colors
    for i, (name, points) in enumerate(data["series"].items()):
        x, y, sd = zip(*points)
        rest = len(data["series"]) - 1 - i  # wide below and narrow above: where lines fall together all of them are seen
        axis.errorbar(x, y, yerr=sd, color=colours[i % 10], marker="o", linewidth=1.2 + rest, markersize=3.5 + 1.4 * rest, elinewidth=1.2, capsize=3, label=name)
    if len({x for points in data["series"].values() for x, _, _ in points}) > 2:
        axis.set_xscale("log")
    axis.set_yscale("log")
    for name, value in data["levels"].items():
        axis.axhline(value, color="grey", linestyle=":", linewidth=1)
        axis.text(0.01, value, name, fontsize=7, color="grey", transform=axis.get_yaxis_transform(), va="bottom")
    axis.grid(alpha=0.3, which="both")
    axis.set(title=data["title"] + "\nmean and standard deviation over seeds", xlabel=data["x_label"], ylabel=data["y_label"])
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return picture


def draw_bytes(plt, data):
    """Score of every recipe against its bytes a parameter, from most to least, with the 95 % interval of its difference from the baseline.

    Recipes of about the same size stand side by side; signs differ within a colour, which is the verdict; the band is the margin within which they equal the baseline."""
    picture, axis = plt.subplots(figsize=(9, 4.5))
    colours = {"baseline": "black", "equal": "tab:green", "better": "tab:blue", "worse": "tab:red", "undecided": "tab:orange", "no pairs yet": "grey"}
    marks, taken, alike = "osD^v<>PX*dph8", {}, {}
    for name, size, mean, low, high, verdict in data["points"]:
        column, i = round(2 * size), alike.get(verdict, 0)
        taken[column], alike[verdict] = taken.get(column, 0) + 1, i + 1
        bars = None if low is None else [[mean - low], [high - mean]]
        axis.errorbar([size - 0.12 * (taken[column] - 1)], [mean], yerr=bars, color=colours[verdict], marker=marks[i % len(marks)], markersize=6, capsize=3,
                      linestyle="none", label=f"{size:.4g}  {name}: {verdict}")
    base = next((point[2] for point in data["points"] if point[5] == "baseline"), None)
    if base is not None:
        axis.axhspan(base - data["margin"], base + data["margin"], color="tab:green", alpha=0.12, linewidth=0)
    values = [point[2] for point in data["points"]]
    if min(values) > 0 and max(values) > 10 * min(values):
        axis.set_yscale("log")
    for name, value in data["levels"].items():
        if value < 3 * max(values):
            axis.axhline(value, color="grey", linestyle=":", linewidth=1)
            axis.text(0.01, value, name, fontsize=7, color="grey", transform=axis.get_yaxis_transform(), va="bottom")
    axis.invert_xaxis()
    axis.grid(alpha=0.3)
    axis.set_title(data["title"] + "\nmean over seeds; bars: 95 % interval of the paired difference; band: margin of equality", fontsize=10)
    axis.set(xlabel="bytes a parameter: weights, gradients, optimiser states", ylabel=data["y_label"])
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), title="bytes  recipe", title_fontsize=8)
    return picture


def draw_factorial(plt, data):
    """Left, every cell's mean score as a colour; right, what each factor and each pair of factors multiplies the score by."""
    from matplotlib.colors import LogNorm

    groups = data["groups"]
    heights = [max(len(g["rows"]), 0.55 * len(g["effects"])) for g in groups]
    picture, axes = plt.subplots(len(groups), 2, figsize=(13, 1.2 + 0.55 * sum(heights)), squeeze=False, height_ratios=heights, width_ratios=[1.2, 1])
    values = [v for g in groups for row in g["cells"] for v in row if v is not None]
    for (table, bars), g in zip(axes, groups):
        shown = [[float("nan") if v is None else v for v in row] for row in g["cells"]]
        table.imshow(shown, norm=LogNorm(min(values), max(values)), cmap="RdYlGn_r", aspect="auto")
        for i, row in enumerate(g["cells"]):
            for j, v in enumerate(row):
                table.text(j, i, "-" if v is None else f"{v:.3g}", ha="center", va="center", fontsize=8)
        table.set_xticks(range(len(g["columns"])), g["columns"], fontsize=7, rotation=25, ha="right")
        table.set_yticks(range(len(g["rows"])), g["rows"], fontsize=7)
        table.set_title(g["title"], fontsize=9)
        names, mid, low, high = zip(*g["effects"])
        at = range(len(names))[::-1]
        bars.errorbar(mid, list(at), xerr=[[m - l for m, l in zip(mid, low)], [h - m for m, h in zip(mid, high)]], fmt="o", markersize=4, capsize=3, color="black")
        bars.axvline(1, color="grey", linewidth=1)
        bars.set_xscale("log")
        bars.set_yticks(list(at), names, fontsize=8)
        bars.set_xlabel("multiplies the distance by", fontsize=8)
        bars.grid(alpha=0.3, axis="x", which="both")
    picture.suptitle(data["title"] + ": mean over seeds; effects with 95 % intervals")
    picture.tight_layout()
    return picture


def draw_ranges(plt, data):
    """What generation runs through: the smallest, largest and mean value of the state and of the net's output, by timestep."""
    picture, axes = plt.subplots(1, len(data["panels"]), figsize=(4.2 * len(data["panels"]), 3.6), squeeze=False)
    for axis, (title, arms) in zip(axes[0], data["panels"].items()):
        lines(axis, plt, arms, data["order"])
        axis.invert_xaxis()
        axis.set(title=title, xlabel="timestep (1000 noise, 0 clean)")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    picture.suptitle(data["title"] + ", mean over seeds")
    picture.tight_layout()
    return picture
