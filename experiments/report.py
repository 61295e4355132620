"""Writes the generated parts of EXPERIMENTS.md and its figures from experiments/*/results.jsonl.

    python experiments/report.py            all experiments
    python experiments/report.py --check    exit status 1 if EXPERIMENTS.md is not what the results give

What stands between <!-- generated: NNN begin --> and its end is replaced; everything outside is the author's and stays. A missing section is
appended with empty headings for the prose. Run again, it changes nothing: a figure is redrawn only when its data or figures.py changed.
"""

import argparse
import itertools
import math
import re
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import figures
from experiments import run as lab
from metrics import equivalence, power_n

CORES = 2  # that the cost to reproduce is quoted for
DIVERGED = re.compile(r"the loss is (nan|-?inf)")
INTRODUCTION = """# Experiments

<!-- generated: answer begin -->
<!-- generated: answer end -->

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


def records_of(arm, recorded, seeds):
    """{seed: record} of the runs that an arm's scores are read from."""
    return {s: recorded[lab.key(arm.source, s)] for s in seeds if lab.key(arm.source, s) in recorded}


def scores(experiment, arm, recorded, metric=None):
    """{seed: score} of an arm, in the order of the seeds."""
    found = {s: score(r, metric or arm.metric, experiment.lower_is_better) for s, r in records_of(arm, recorded, experiment.seeds).items()}
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
    digits = decimals_of(arm.margin)
    finished = [r for r in records_of(arm, recorded, experiment.seeds).values() if "scores" in r]
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
        row["bytes a parameter"] = f"{finished[0]['bytes_per_parameter']:.5g}"
        if shares := finished[0].get("flops_share"):
            row["of the FLOPs"] = ", ".join(f"{share:.1%} in {covers(arm, name)}" for name, share in shares.items())
        if all("gradient_snr" in r for r in finished):
            row["gradient SNR in FP8, dB"], row["in bf16, dB"] = (spread([r["gradient_snr"][kind] for r in finished], 1) for kind in ("fp8", "bf16"))
        row["seconds"] = cell(statistics.fmean(r["seconds"] + r["scoring_seconds"] for r in finished), 0)
    return row


def covers(arm, name):
    """What the share of this name in a record's flops_share is in: 'FP8', '2:4', or the value of the generation site."""
    setting = next((flag.partition("=")[2] for flag in reversed(arm.source.flags) if flag.startswith("generation=")), "8 bits")
    return {"fp8": "FP8", "sparse24": "2:4", "generation": setting}[name]


def heading(experiment):
    """The metric's name; without its weights where arms read different ones."""
    return experiment.metric if len({a.metric for a in experiment.arms}) == 1 else experiment.metric.rpartition(".")[2]


def verdict(pairs, result):
    return result.verdict if result else "no pairs yet" if pairs == 0 else "undecided"


def answer(experiments, recorded):
    """The table of the arms that have a `headline`, which EXPERIMENTS.md opens with."""
    rows = [["net, recipe", "bytes a parameter", "baseline", "recipe", "difference [95 % CI]", "margin", "verdict"]]
    for e in experiments:
        for arm in (a for a in e.arms if a.headline):
            row, base = arm_row(e, arm, recorded), arm_row(e, e.arm(arm.baseline), recorded)
            if "bytes a parameter" in row:
                rows.append([f"{arm.headline} ([{e.number}](#{anchor(e)}))", row["bytes a parameter"], base[heading(e)], row[heading(e)],
                             row["difference [95 % CI]"], f"{arm.margin:g}", f"{verdict(*comparison(e, arm, recorded))}, n = {row['n']}"])
    return markdown(rows)


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
    if needed(e, recorded):
        parts.append(markdown([columns] + [[row.get(c, "-") for c in columns] for row in rows]))
    base = [v for v in scores(e, e.arm(e.baseline), recorded).values() if math.isfinite(v)]
    digits, facts = decimals_of(e.margin), [f"Margin {e.margin:g} ({'lower' if e.lower_is_better else 'higher'} is better)."]
    if len(base) > 1 and statistics.stdev(base) > 0:
        sd = statistics.stdev(base)
        facts.append(f"The baseline's standard deviation over seeds is {cell(sd, digits)}; differences that spread as much need {power_n(sd, e.margin)} pairs "
                     f"for a difference as large as the margin to be seen with 80 % power.")
    if known := levels(e, recorded):
        facts.append("; ".join(f"{name} score {cell(value, digits)}" for name, value in known.items()).capitalize() + ".")
    expected = len({run for a in e.arms for run in (a.source, a.trained)}) * len(e.seeds)
    here = [r for (_, _, seed), r in needed(e, recorded).items() if seed in e.seeds]
    facts.append(f"{len(here)} of {expected} runs, {', '.join(sorted({machine(r) for r in here})) or 'none yet'}.")
    if here:
        facts.append("Commit " + ", ".join(sorted({f"{str(r.get('commit'))[:9]}{'' if r.get('clean') else ' with changes'}" for r in here})) + ".")
    parts.append("\n".join(facts))
    failed = [f"- {r['arm']}, seed {r['seed']}: {r['failed']}" for r in here if "failed" in r]
    parts.append("Runs that failed:\n\n" + "\n".join(failed) if failed else "")
    for group in factorials(e, recorded):
        rows = [[name, *(cell(v, 2) for v in (mid, low, high))] for name, mid, low, high in group["effects"]]
        parts.append(f"{group['title'].capitalize()}: what each factor multiplies the score by, averaged over the others, with its 95 % interval; of a pair, "
                     f"what the second's fault multiplies the first's effect by.\n\n" + markdown([["factor", "times", "from", "to"], *rows]))
    if traces := ranges(e, recorded):
        ends = lambda trace, key: [step[key] for step in trace if key in step][:: max(1, len([step for step in trace if key in step]) - 1)]
        keys = {"state, smallest": "x_min", "largest": "x_max", "mean": "x_mean", "output, smallest": "prediction_min", "largest ": "prediction_max"}
        rows = [[name, *(" → ".join(cell(v, 2) for v in ends(trace, key)) for key in keys.values())] for name, trace in traces.items()]
        parts.append("Ranges of generation, first step → last, mean over seeds:\n\n" + markdown([["arm", *(k.strip() for k in keys)], *rows]))
    for name, title in (("factorial", "cells and effects"), ("series", "score over x"), ("bytes", "score against bytes a parameter"), ("ranges", "ranges by sampling step"), ("samples", "samples of each arm from the same noise"), ("loss_by_timestep", "loss by timestep"), ("curves", "training curves")):
        if (e.folder / f"{name}.png").exists():
            parts.append(f"![{title}](experiments/{e.folder.name}/{name}.png)")
    by_hand = [lab.typed(arm, e.seeds[0]) for arm in dict.fromkeys(a.source for a in e.arms)]
    parts.append("All of it, and one run of each arm:\n\n```sh\n" + "\n".join([f"python experiments/run.py {e.number}", *by_hand]) + "\n```")
    return "\n\n".join(filter(None, parts))


def needed(experiment, recorded):
    """{key: record} of all runs that an experiment's scores come from, other experiments' included."""
    wanted = {lab.key(a, 0)[:2] for arm in experiment.arms for a in (arm.source, arm.trained)}
    return {key: r for key, r in recorded.items() if key[:2] in wanted and key[2] in experiment.seeds}


def levels(experiment, recorded):
    """{"real images": score, "noise": score}, where the task has them."""
    finished = next((r for r in needed(experiment, recorded).values() if r.get("reference")), None)
    key = experiment.metric.rpartition(".")[2]
    found = {name: finished["reference"][end].get(key) for name, end in (("real images", "floor"), ("noise", "ceiling"))} if finished else {}
    return {name: value for name, value in found.items() if value is not None}


def overview(experiments, recorded):
    rows = [["", "question", "verdict", "cost to reproduce"]]
    rows += [[f"[{e.number}](#{anchor(e)})", e.question, summary(e, recorded), cost(needed(e, recorded).values())] for e in experiments]
    return markdown([[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows]) + "\n\n" + READING


def anchor(experiment):
    return f"experiment-{experiment.number}"


def render(text, experiments, recorded):
    """EXPERIMENTS.md with its generated parts replaced, and missing sections put in where their numbers belong."""
    text = text or INTRODUCTION
    parts = [("answer", answer(experiments, recorded)), ("overview", overview(experiments, recorded)), *((e.number, section(e, recorded)) for e in experiments)]
    for name, body in parts:
        begin, end = (f"<!-- generated: {name} {edge} -->" for edge in ("begin", "end"))
        if begin not in text and end not in text and name.isdigit():
            e = next(e for e in experiments if e.number == name)
            later = (f'<a id="{anchor(other)}"></a>' for other in experiments if other.number > name)
            at = min((text.index(mark) for mark in later if mark in text), default=len(text))
            empty = f'<a id="{anchor(e)}"></a>\n## {name} {e.title}\n\n{begin}\n{end}\n\n### What happened\n\n### What follows\n'
            text = "\n\n".join(filter(None, [text[:at].rstrip(), empty.rstrip(), text[at:]])).rstrip() + "\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise lab.ExperimentError(f"EXPERIMENTS.md: '{begin}' and '{end}' must each stand there once, in this order")
        text = text[: text.index(begin) + len(begin)] + f"\n{body}\n" + text[text.index(end) :]
    return text


# -- curves, factors, ranges


def series(experiment, recorded):
    """{series: [(x, mean, sd)]} of the arms that are points of a curve."""
    found = {}
    for arm in experiment.arms:
        values = [v for v in scores(experiment, arm, recorded).values() if math.isfinite(v)]
        if arm.series and values:
            found.setdefault(arm.series, []).append((arm.x, statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0))
    return found


def by_bytes(experiment, recorded):
    """[(arm, bytes a parameter, mean score, low, high, verdict)], most bytes first, of the arms that ran.

    low and high: the 95 % interval of the arm's paired difference from its baseline, around its mean: the spread over seeds, which all
    arms share, is not in it. The baseline's own are None."""
    points = []
    for arm in experiment.arms:
        finished = [r for r in records_of(arm, recorded, experiment.seeds).values() if "bytes_per_parameter" in r]
        values = [v for v in scores(experiment, arm, recorded).values() if math.isfinite(v)]
        pairs, result = comparison(experiment, arm, recorded)
        if not finished or not values:
            continue
        mean, itself = statistics.fmean(values), arm.name == arm.baseline
        low, high = (mean + end - result.mean for end in (result.low, result.high)) if result and not itself and math.isfinite(result.mean) else (None, None)
        points.append((arm.name, round(finished[0]["bytes_per_parameter"], 2), mean, low, high, "baseline" if itself else verdict(pairs, result)))
    return sorted(points, key=lambda point: -point[1])


def factorials(experiment, recorded):
    """Groups of arms with the same factors, for which all cells and seeds are there: their cells, main effects and two-way effects.

    Effects are factors on the score: means of log scores, paired by seed, with t intervals. A main effect is faulty level against the
    baseline's level, averaged over all other factors; that of a pair is the first's effect where the second is faulty over where it isn't.
    """
    groups = []
    for names in dict.fromkeys(tuple(a.cell) for a in experiment.arms if a.cell):
        arms = [a for a in experiment.arms if tuple(a.cell) == names]
        healthy = next((a.cell for a in arms if a.name == a.baseline), arms[0].cell)
        values = {a: scores(experiment, a, recorded) for a in arms}
        seeds = [s for s in experiment.seeds if all(math.isfinite(values[a].get(s, math.nan)) for a in arms)]
        if len(seeds) < 2:
            continue
        at = lambda seed, which: statistics.fmean(math.log10(values[a][seed]) for a in arms if which(a.cell))
        faulty = lambda name: lambda c: c[name] != healthy[name]
        sound = lambda name: lambda c: c[name] == healthy[name]
        both = lambda f, g: lambda c: f(c) and g(c)
        effects = []
        for name in names:
            fault = next(a.cell[name] for a in arms if faulty(name)(a.cell))
            effects.append(_times(f"{name} {fault}", [at(s, faulty(name)) - at(s, sound(name)) for s in seeds]))
        for p, q in itertools.combinations(names, 2):
            pair = [at(s, both(faulty(p), faulty(q))) - at(s, both(sound(p), faulty(q))) - at(s, both(faulty(p), sound(q))) + at(s, both(sound(p), sound(q))) for s in seeds]
            effects.append(_times(f"{p} x {q}", pair))
        half = len(names) // 2  # the first half of the factors spans the rows, the second the columns
        spots = [tuple(dict.fromkeys(tuple(a.cell[n] for n in part) for a in arms)) for part in (names[:half], names[half:])]
        mean = {tuple(a.cell[n] for n in names): statistics.fmean(values[a][s] for s in seeds) for a in arms}
        words = lambda part, levels: ", ".join(f"{n} {v}" for n, v in zip(part, levels))
        groups.append({"title": f"{len(names)} factors, {len(arms)} cells, {len(seeds)} seeds", "effects": effects,
                       "rows": [words(names[:half], r) for r in spots[0]], "columns": [words(names[half:], c) for c in spots[1]],
                       "cells": [[mean.get(r + c) for c in spots[1]] for r in spots[0]]})
    return groups


def _times(name, logs):
    result = equivalence(logs, 1.0)
    return (name, *(10**v for v in (result.mean, result.low, result.high)))


def ranges(experiment, recorded):
    """{arm: [{"t", "x_min", ...}]}: the traces of generation, mean over seeds."""
    found = {}
    for arm in experiment.arms if experiment.ranges else ():
        source = arm.metric.rpartition(".")[0]
        traces = [r["scores"][source]["trace"] for r in records_of(arm, recorded, experiment.seeds).values() if r.get("scores", {}).get(source, {}).get("trace")]
        if traces:
            found[arm.name] = [{k: statistics.fmean(step[k] for step in steps) for k in steps[0]} for steps in zip(*traces)]
    return found


# -- figures


def mean_curve(rows):
    """Elementwise mean of equally long lists, over the finite entries; None where there are none."""
    finite = [[v for v in column if v is not None and math.isfinite(v)] for column in zip(*rows)]
    return [statistics.fmean(column) if column else math.nan for column in finite]


def draw_all(experiment, recorded, runs):
    """The figures of an experiment for which there are data; samples.png stays as it is where the run folders are gone."""
    e, panels, bins = experiment, {}, {}
    for arm in e.arms:
        records = list(records_of(arm, recorded, e.seeds).values())
        source = arm.metric.rpartition(".")[0]
        finished = [r["scores"][source]["loss_by_timestep"] for r in records if "loss_by_timestep" in r.get("scores", {}).get(source, {})]
        if finished and not arm.cell:
            bins[arm.name] = [(k + 0.5) * 1000 / len(finished[0]) for k in range(len(finished[0]))], mean_curve(finished)
        curves = [] if arm.trained in [a.trained for a in e.arms[: e.arms.index(arm)]] else [r["curves"] for r in records if r.get("curves")]
        longest = max((c["step"] for c in curves), key=len, default=[])
        for key in figures.LABELS:
            same = [c[key] for c in curves if key in c and c["step"] == longest]
            if same:
                panels.setdefault(key, {})[arm.name] = longest, mean_curve(same)
    title = f"{e.number} {e.title}"
    common = {"title": title, "order": [a.name for a in e.arms]}
    if bins:
        figures.figure(e.folder / "loss_by_timestep.png", {**common, "arms": bins}, figures.draw_bins)
    if panels:
        figures.figure(e.folder / "curves.png", {**common, "panels": panels}, figures.draw_curves)
    if lines := series(e, recorded):
        data = {"title": title, "series": lines, "x_label": e.x_label, "y_label": heading(e), "levels": levels(e, recorded)}
        figures.figure(e.folder / "series.png", data, figures.draw_series)
    if points := by_bytes(e, recorded) if e.by_bytes else ():
        data = {"title": e.title, "points": points, "margin": e.margin, "levels": levels(e, recorded),
                "y_label": f"{heading(e)}, {'lower' if e.lower_is_better else 'higher'} is better"}
        figures.figure(e.folder / "bytes.png", data, figures.draw_bytes)
    if groups := factorials(e, recorded):
        figures.figure(e.folder / "factorial.png", {"title": title, "groups": groups}, figures.draw_factorial)
    if traces := ranges(e, recorded):
        panel = lambda key: {name: ([step["t"] for step in trace if key in step], [step[key] for step in trace if key in step]) for name, trace in traces.items()}
        keys = {"state, smallest": "x_min", "state, largest": "x_max", "state, mean": "x_mean", "output, largest": "prediction_max"}
        figures.figure(e.folder / "ranges.png", {**common, "panels": {name: panel(key) for name, key in keys.items()}}, figures.draw_ranges)
    if rows := strips(e, recorded, runs):
        shown = "images, masks, predictions" if all(map(segments, e.arms)) else "samples from the same noise"
        figures.figure(e.folder / "samples.png", {"title": f"{title}: {shown}, seed {e.seeds[0]}", "rows": rows}, figures.draw_strips)


def segments(arm):
    return "segment" in arm.trained.experiment.common + arm.trained.flags


def strips(experiment, recorded, runs):
    """[(arm, pixels)] of the first seed's pictures, one row of ten images each; [] unless every finished arm's picture is there."""
    import numpy as np
    from PIL import Image

    e, seed, rows, seen = experiment, experiment.seeds[0], [], set()
    for arm in e.arms:
        record, drawn = recorded.get(lab.key(arm.source, seed)), (arm.source, arm.metric.rpartition(".")[0])
        if record is None or "failed" in record or drawn in seen:
            continue  # two metrics of one arm have the same pictures
        seen.add(drawn)
        source = arm.metric.rpartition(".")[0].replace(":", "_")
        if arm.metric.rpartition(".")[0] not in record["scores"]:
            continue  # a figure of the training has no pictures
        folder = Path(runs) / lab.label(arm.trained, seed) / "samples"
        several = len(record["scores"]) > 1
        name = f"{lab.label(arm, seed)}-{source}" if arm.of and arm.flags else source if several else "final"
        if not (folder / f"{name}.png").exists():
            return []
        with Image.open(folder / f"{name}.png") as picture:
            # samples are a grid of 6 rows and 10 columns; masks of segmentation are shown whole
            keep = picture.height if segments(arm) else (picture.height - 4) // 6 + 4
            rows.append((arm.name, np.asarray(picture.convert("RGB").crop((0, 0, picture.width, keep))).tolist()))
    return rows


def main(argv=None, root=lab.HERE, document=lab.ROOT / "EXPERIMENTS.md"):
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if EXPERIMENTS.md is out of date")
    parser.add_argument("--runs", default=str(lab.ROOT / lab.RUNS), help="where run.py kept the runs, for the pictures of samples")
    args = parser.parse_args(argv)
    try:
        loaded = {}
        experiments = [lab.load(number, root, loaded) for number in lab.folders(root)]
        recorded = {key: record for e in experiments for key, record in lab.recorded(e).items()}
        if not args.check:
            for e in experiments:
                draw_all(e, recorded, args.runs)
        old = document.read_text() if document.exists() else ""
        new = render(old, experiments, recorded)
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
