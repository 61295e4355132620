"""Writes the generated parts of EXPERIMENTS.md and its figures from experiments/*/results.jsonl.

    python experiments/report.py            all experiments
    python experiments/report.py --check    exit status 1 if EXPERIMENTS.md is not what the results give

What stands between <!-- generated: NNN begin --> and its end is replaced; everything outside is the author's and stays. A missing section is
appended with empty headings for the prose. Run again, it changes nothing: a figure is redrawn only when its data or this file changed.
"""

import argparse
import hashlib
import math
import re
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run as lab
from metrics import equivalence, power_n

CORES = 2  # that the cost to reproduce is quoted for
DIVERGED = re.compile(r"the loss is (nan|-?inf)")
INTRODUCTION = """# Experiments

<!-- generated: overview begin -->
<!-- generated: overview end -->
"""
READING = """Scores are mean ± standard deviation over the seeds. A difference is arm minus baseline, paired by seed (same initial weights, data order,
timesteps and noise), with its 95 % confidence interval. *Equal*: the 90 % interval lies within the margin, which was fixed before the runs
(two one-sided t-tests at 5 %). *Better*, *worse*: the 95 % interval excludes 0. *Undecided* is none of these, and not equal. *Detectable* is
the difference that so many pairs see with 80 % power. A run that diverged counts as infinitely bad."""


# -- numbers


def cell(x, decimals, sign=""):
    return "-" if x is None or math.isnan(x) else f"{x:{sign}.{decimals}f}" if math.isfinite(x) else f"{x:{sign}}"


def spread(values, decimals):
    """'mean ± sd'"""
    if not values:
        return "-"
    finite = len(values) > 1 and all(map(math.isfinite, values))
    return cell(statistics.fmean(values), decimals) + (f" ± {cell(statistics.stdev(values), decimals)}" if finite else "")


def decimals_of(margin):
    """Decimals that show a hundredth of the margin's leading digit."""
    return max(0, 2 - math.floor(math.log10(margin)))


def score(record, metric, lower_is_better):
    """Score of a run; infinitely bad when it diverged, None when it failed for a reason that measures nothing (killed, no memory)."""
    if "failed" not in record:
        return lab.value(record, metric)
    return (math.inf if lower_is_better else -math.inf) if DIVERGED.search(record["failed"]) else None


def scores(experiment, arm, recorded, metric=None):
    """{seed: score} of an arm, in the order of the seeds."""
    source = experiment.runs_of(arm).name
    found = {s: score(recorded[source, s], metric or arm.metric, experiment.lower_is_better) for s in experiment.seeds if (source, s) in recorded}
    return {s: v for s, v in found.items() if v is not None}


def comparison(experiment, arm, recorded):
    """(pairs, metrics.Equivalence or None with fewer than two) of an arm against its baseline."""
    own, base = (scores(experiment, a, recorded) for a in (arm, experiment.arm(arm.baseline)))
    differences = [own[s] - base[s] for s in own if s in base]
    return len(differences), equivalence(differences, arm.margin, lower_is_better=experiment.lower_is_better) if len(differences) > 1 else None


# -- tables


def markdown(rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def arm_row(experiment, arm, recorded):
    """{column: text} of one arm; columns without a value are left out."""
    name, digits = experiment.runs_of(arm).name, decimals_of(arm.margin)
    finished = [recorded[name, s] for s in experiment.seeds if "scores" in recorded.get((name, s), {})]
    flags = f"`{shlex.join(arm.flags)}`" if arm.flags else ""
    adds = f"samples from {arm.of}: {flags}" if arm.of and flags else f"reads {arm.metric} of {arm.of}" if arm.of else flags or "-"
    values = list(scores(experiment, arm, recorded).values())
    row = {"arm": arm.name, "adds": adds + (f" ({arm.note})" if arm.note else ""), heading(experiment): spread(values, digits)}
    pairs, result = comparison(experiment, arm, recorded)
    if arm.baseline == arm.name:
        row |= {"difference [95 % CI]": "-", "verdict": "baseline", "n": str(len(values)), "detectable": "-"}
    else:
        row |= {"difference [95 % CI]": "-" if result is None else
                f"{cell(result.mean, digits, '+')} [{cell(result.low, digits, '+')}, {cell(result.high, digits, '+')}]",
                "verdict": verdict(pairs, result), "n": str(pairs), "detectable": "-" if result is None else cell(result.smallest_effect, digits)}
        if arm.baseline != experiment.baseline:
            row["verdict"] += f" (against {arm.baseline})"
    weights, _, key = arm.metric.rpartition(".")
    extra = {"label accuracy": (f"{weights}.label_accuracy", 3), f"raw.{key}": (f"raw.{key}", digits)}
    for name, (metric, places) in extra.items():
        held, _, inner = metric.rpartition(".")
        if metric != arm.metric and finished and all(r["scores"].get(held, {}).get(inner) is not None for r in finished):
            row[name] = spread([lab.value(r, metric) for r in finished], places)
    if finished:
        row["training loss"] = spread([r["final_loss"] for r in finished], 4)
        row["bytes a parameter"] = f"{finished[0]['bytes_per_parameter']:g}"
        row["seconds"] = cell(statistics.fmean(r["seconds"] + r["scoring_seconds"] for r in finished), 0)
    return row


def heading(experiment):
    """The metric's name; without its weights where arms read different ones."""
    return experiment.metric if len({a.metric for a in experiment.arms}) == 1 else experiment.metric.rpartition(".")[2]


def verdict(pairs, result):
    return result.verdict if result else "no pairs yet" if pairs == 0 else "undecided"


def summary(experiment, recorded):
    """'equal: a, b; worse: c', the author's verdict first."""
    groups = {}
    for arm in experiment.arms:
        if arm.name != arm.baseline:
            groups.setdefault(verdict(*comparison(experiment, arm, recorded)), []).append(arm.name)
    known = [(v, groups[v]) for v in ("equal", "better", "worse", "undecided") if v in groups]
    said = "; ".join(f"{v}: {', '.join(names) if len(names) <= 6 else f'{len(names)} arms'}" for v, names in known)
    return ". ".join(filter(None, [experiment.verdict.rstrip("."), said])) or "not run yet"


def machine(record):
    return record.get("env", {}).get("gpu") or record.get("env", {}).get("cpu") or "unknown machine"


def cost(records):
    """'12 min on 2 cores + 3 min on NVIDIA ...'"""
    seconds = {}
    for r in records:
        where = r.get("env", {}).get("gpu") or f"{CORES} cores"
        seconds[where] = seconds.get(where, 0) + (r.get("seconds", 0) + r.get("scoring_seconds", 0)) / (1 if r.get("env", {}).get("gpu") else CORES)
    return " + ".join(f"{math.ceil(s / 60)} min on {where}" if s < 5400 else f"{s / 3600:.1f} h on {where}" for where, s in sorted(seconds.items())) or "-"


def section(experiment, recorded):
    """The generated part of an experiment."""
    e, parts = experiment, []
    parts += [f"**Question.** {e.question}", f"**What was believed.** {e.believed}" if e.believed else "", f"**Prediction, written before the runs.** {e.prediction}"]
    rows = [arm_row(e, arm, recorded) for arm in e.arms]
    columns = list(dict.fromkeys(c for row in rows for c in row))
    last = ("training loss", "bytes a parameter", "seconds")  # also where a column before them belongs to later arms only
    columns.sort(key=lambda c: last.index(c) if c in last else -1)
    if recorded:
        parts.append(markdown([columns] + [[row.get(c, "-") for c in columns] for row in rows]))
    base = [v for v in scores(e, e.arm(e.baseline), recorded).values() if math.isfinite(v)]
    digits, facts = decimals_of(e.margin), [f"Margin {e.margin:g} ({'lower' if e.lower_is_better else 'higher'} is better)."]
    if len(base) > 1 and statistics.stdev(base) > 0:
        sd = statistics.stdev(base)
        facts.append(f"The baseline's standard deviation over seeds is {cell(sd, digits)}; differences that spread as much need {power_n(sd, e.margin)} pairs "
                     f"for a difference as large as the margin to be seen with 80 % power.")
    finished = [r for r in recorded.values() if "failed" not in r]
    if finished and finished[0].get("reference"):
        source, _, key = e.metric.rpartition(".")
        facts.append("Real images score " + ", noise ".join(cell(finished[0]["reference"][end].get(key), digits) for end in ("floor", "ceiling")) + ".")
    expected = len({e.runs_of(a).name for a in e.arms}) * len(e.seeds)
    here = [r for (name, seed), r in recorded.items() if seed in e.seeds]
    facts.append(f"{len(here)} of {expected} runs, {', '.join(sorted({machine(r) for r in here})) or 'none yet'}.")
    if here:
        facts.append("Commit " + ", ".join(sorted({f"{str(r.get('commit'))[:9]}{'' if r.get('clean') else ' with changes'}" for r in here})) + ".")
    parts.append("\n".join(facts))
    failed = [f"- {r['arm']}, seed {r['seed']}: {r['failed']}" for r in here if "failed" in r]
    parts.append("Runs that failed:\n\n" + "\n".join(failed) if failed else "")
    for name, title in (("samples", "samples of each arm from the same noise"), ("loss_by_timestep", "loss by timestep"), ("curves", "training curves")):
        if (e.folder / f"{name}.png").exists():
            parts.append(f"![{title}](experiments/{e.folder.name}/{name}.png)")
    by_hand = [lab.typed(e, arm, e.seeds[0]) for arm in dict.fromkeys(map(e.runs_of, e.arms))]
    parts.append("All of it, and one run of each arm:\n\n```sh\n" + "\n".join([f"python experiments/run.py {e.number}", *by_hand]) + "\n```")
    return "\n\n".join(filter(None, parts))


def overview(experiments):
    rows = [["", "question", "verdict", "cost to reproduce"]]
    rows += [[f"[{e.number}](#{anchor(e)})", e.question, summary(e, recorded), cost(recorded.values())] for e, recorded in experiments]
    return markdown([[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]) + "\n\n" + READING


def anchor(experiment):
    return f"experiment-{experiment.number}"


def render(text, experiments):
    """EXPERIMENTS.md with its generated parts replaced, and missing sections appended in the order of their numbers."""
    text = text or INTRODUCTION
    for name, body in [("overview", overview(experiments))] + [(e.number, section(e, recorded)) for e, recorded in experiments]:
        begin, end = (f"<!-- generated: {name} {edge} -->" for edge in ("begin", "end"))
        if begin not in text and end not in text:
            e = next(e for e, _ in experiments if e.number == name)
            text = text.rstrip() + f'\n\n<a id="{anchor(e)}"></a>\n## {name} {e.title}\n\n{begin}\n{end}\n\n### What happened\n\n### What follows\n'
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise lab.ExperimentError(f"EXPERIMENTS.md: '{begin}' and '{end}' must each stand there once, in this order")
        text = text[: text.index(begin) + len(begin)] + f"\n{body}\n" + text[text.index(end) :]
    return text


# -- figures


def figure(path, data, draw):
    """Save draw(plt, data) as PNG, unless the one that is there was drawn from the same data by this file."""
    from PIL import Image

    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(data).encode()).hexdigest()
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
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
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


def mean_curve(rows):
    """Elementwise mean of equally long lists, over the finite entries; None where there are none."""
    finite = [[v for v in column if v is not None and math.isfinite(v)] for column in zip(*rows)]
    return [statistics.fmean(column) if column else math.nan for column in finite]


def draw_all(experiment, recorded, runs):
    """The figures of an experiment for which there are data; samples.png stays as it is where the run folders are gone."""
    e, panels, bins = experiment, {}, {}
    for arm in e.arms:
        records = [recorded[e.runs_of(arm).name, s] for s in e.seeds if (e.runs_of(arm).name, s) in recorded]
        source = arm.metric.rpartition(".")[0]
        finished = [r["scores"][source]["loss_by_timestep"] for r in records if "loss_by_timestep" in r.get("scores", {}).get(source, {})]
        if finished:
            bins[arm.name] = [(k + 0.5) * 1000 / len(finished[0]) for k in range(len(finished[0]))], mean_curve(finished)
        curves = [] if arm.of else [r["curves"] for r in records if r.get("curves")]
        longest = max((c["step"] for c in curves), key=len, default=[])
        for key in LABELS:
            same = [c[key] for c in curves if key in c and c["step"] == longest]
            if same:
                panels.setdefault(key, {})[arm.name] = longest, mean_curve(same)
    title = f"{e.number} {e.title}"
    common = {"title": title, "order": [a.name for a in e.arms]}
    if bins:
        figure(e.folder / "loss_by_timestep.png", {**common, "arms": bins}, draw_bins)
    if panels:
        figure(e.folder / "curves.png", {**common, "panels": panels}, draw_curves)
    rows = strips(e, recorded, runs)
    if rows:
        figure(e.folder / "samples.png", {"title": f"{title}: samples from the same noise, seed {e.seeds[0]}", "rows": rows}, draw_strips)


def strips(experiment, recorded, runs):
    """[(arm, pixels)] of the first seed's pictures, one row of ten images each; [] unless every finished arm's picture is there."""
    from PIL import Image

    e, seed, rows = experiment, experiment.seeds[0], []
    for arm in e.arms:
        record = recorded.get((e.runs_of(arm).name, seed))
        if record is None or "failed" in record:
            continue
        source = arm.metric.rpartition(".")[0].replace(":", "_")
        folder = Path(runs) / lab.label(e, e.arm(arm.of) if arm.of else arm, seed) / "samples"
        several = len(record["scores"]) > 1
        name = f"{lab.label(e, arm, seed)}-{source}" if arm.of and arm.flags else source if several else "final"
        if not (folder / f"{name}.png").exists():
            return []
        with Image.open(folder / f"{name}.png") as picture:
            # samples are a grid of 6 rows and 10 columns; masks of segmentation are shown whole
            keep = picture.height if "segment" in e.common + arm.flags else (picture.height - 4) // 6 + 4
            picture = picture.convert("RGB").crop((0, 0, picture.width, keep))
            flat = list(picture.getdata())
        rows.append((arm.name, [flat[y * picture.width : (y + 1) * picture.width] for y in range(picture.height)]))
    return rows


def main(argv=None, root=lab.HERE, document=lab.ROOT / "EXPERIMENTS.md"):
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if EXPERIMENTS.md is out of date")
    parser.add_argument("--runs", default=str(lab.ROOT / lab.RUNS), help="where run.py kept the runs, for the pictures of samples")
    args = parser.parse_args(argv)
    try:
        experiments = [(e, lab.by_run(lab.read_results(e.folder / "results.jsonl"))) for e in (lab.load(n, root) for n in lab.folders(root))]
        if not args.check:
            for e, recorded in experiments:
                draw_all(e, recorded, args.runs)
        old = document.read_text() if document.exists() else ""
        new = render(old, experiments)
    except lab.ExperimentError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    if args.check:
        print("EXPERIMENTS.md is what the results give" if new == old else "EXPERIMENTS.md is out of date: run python experiments/report.py")
        return int(new != old)
    if new != old:
        beside = document.with_name(document.name + ".part")
        beside.write_text(new)
        beside.replace(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
