"""Writes the generated parts of EXPERIMENTS.md, its figures, and CLAIMS.md, from experiments/*/results.jsonl.

    python experiments/report.py            all experiments
    python experiments/report.py --check    exit status 1 if one of the two is not what the results give

What stands between <!-- generated: NNN begin --> and its end is replaced; everything outside is the author's
and stays. A missing section is appended with empty headings for the prose. Run again, it changes nothing: a
figure is redrawn only when its data or its version in figures.py changed.
"""

import argparse
import math
import shlex
import statistics
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import claims, figures, stats  # noqa: E402
from experiments.analysis import (  # noqa: E402
    bins,
    by_bytes,
    comparison,
    curves,
    factorials,
    finite_scores,
    levels,
    needed,
    ranges,
    records_of,
    scores,
    segments,
    series,
    verdict,
    weights_of,
)
from experiments.definition import HERE, ROOT, RUNS, folders, key, label, load, typed  # noqa: E402
from experiments.records import recorded, value  # noqa: E402
from machine import Refused  # noqa: E402
from runs import write_atomically  # noqa: E402

CORES = 2  # that the cost to reproduce is quoted for
HEADLINES = "net, recipe|bytes a parameter|baseline|recipe|difference [95 % CI]|margin|verdict".split("|")
LAST_COLUMNS = ("training loss", "bytes a parameter", "seconds")
INTRODUCTION = """# Experiments

<!-- generated: answer begin -->
<!-- generated: answer end -->

<!-- generated: overview begin -->
<!-- generated: overview end -->
"""
READING = textwrap.fill(
    "Scores are mean ± standard deviation over the seeds. A difference is arm minus baseline, paired by seed "
    "(same initial weights, data order, timesteps and noise), with its 95 % confidence interval. *Equal*: "
    "the 90 % interval lies within the margin, which was fixed before the runs (two one-sided t-tests at 5 "
    "%). *Better*, *worse*: the 95 % interval excludes 0. *Undecided* is none of these, and not equal. "
    "*Detectable* is the difference that so many pairs see with 80 % power. A run that diverged counts as "
    "infinitely bad.",
    width=142,
)

# ---- Numbers -----------------------------------------------------------------------------------------------


def cell(x, decimals, sign=""):
    if x is None or math.isnan(x):
        return "-"
    return f"{x:{sign}.{decimals}f}" if math.isfinite(x) else f"{x:{sign}}"


def interval(result, decimals):
    """'+0.100 [+0.050, +0.150]'"""
    mean, low, high = (cell(x, decimals, "+") for x in (result.mean, result.low, result.high))
    return f"{mean} [{low}, {high}]"


def spread(values, decimals):
    """'mean ± sd'"""
    if not values:
        return "-"
    mean = cell(statistics.fmean(values), decimals)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return mean
    return f"{mean} ± {cell(statistics.stdev(values), decimals)}"


def decimals_of(margin):
    """Decimals that show a hundredth of the margin's leading digit."""
    return max(0, 2 - math.floor(math.log10(margin)))


# ---- Tables ------------------------------------------------------------------------------------------------


def markdown(rows):
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def arm_row(experiment, arm, known):
    """{column: text} of one arm; columns without a value are left out."""
    values = list(scores(experiment, arm, known).values())
    row = {"arm": arm.name, "adds": adds(arm), heading(experiment): spread(values, decimals_of(arm.margin))}
    row |= difference_columns(experiment, arm, known, len(values))
    finished = [r for r in records_of(experiment, arm, known).values() if "scores" in r]
    if finished:
        row |= score_columns(arm, finished) | cost_columns(arm, finished)
    return row


def adds(arm):
    """What an arm adds to the common flags, in words."""
    flags = f"`{shlex.join(arm.flags)}`" if arm.flags else ""
    said = flags or "-"
    if arm.of:
        said = f"samples from {arm.of}: {flags}" if flags else f"reads {arm.metric} of {arm.of}"
    return f"{said} ({arm.note})" if arm.note else said


def difference_columns(experiment, arm, known, count):
    """The columns about the difference of an arm, with `count` scores, from its baseline."""
    difference, smallest, digits = "-", "-", decimals_of(arm.margin)
    pairs, result = comparison(experiment, arm, known)
    said, n = verdict(pairs, result), str(pairs)
    if arm.baseline == arm.name:
        said, n = "baseline", str(count)
    else:
        if result:
            difference, smallest = interval(result, digits), cell(result.smallest_effect, digits)
        if arm.baseline != experiment.baseline:
            said += f" (against {arm.baseline})"
    return {"difference [95 % CI]": difference, "verdict": said, "n": n, "detectable": smallest}


def score_columns(arm, finished):
    """Scores beside the arm's own, where every finished run has them."""
    columns, weights = {}, weights_of(arm)
    _, _, name = arm.metric.rpartition(".")
    extra = {
        "label accuracy": (weights, "label_accuracy", 3),
        f"raw.{name}": ("raw", name, decimals_of(arm.margin)),
    }
    for title, (source, score_name, places) in extra.items():
        metric = f"{source}.{score_name}"
        held = all(r["scores"].get(source, {}).get(score_name) is not None for r in finished)
        if held and metric != arm.metric:
            columns[title] = spread([value(r, metric) for r in finished], places)
    return columns


def cost_columns(arm, finished):
    first = finished[0]
    columns = {
        "training loss": spread([r["final_loss"] for r in finished], 4),
        "bytes a parameter": f"{first['bytes_per_parameter']:.5g}",
    }
    if shares := first.get("flops_share"):
        parts = [f"{share:.1%} in {covers(arm, name)}" for name, share in shares.items()]
        columns["of the FLOPs"] = ", ".join(parts)
    if all("gradient_snr" in r for r in finished):
        for name, title in (("fp8", "gradient SNR in FP8, dB"), ("bf16", "in bf16, dB")):
            columns[title] = spread([value(r, f"gradient_snr.{name}") for r in finished], 1)
    columns["seconds"] = cell(statistics.fmean(r["seconds"] + r["scoring_seconds"] for r in finished), 0)
    return columns


def covers(arm, name):
    """What a share in a record's flops_share is in: 'FP8', '2:4', or the value of the generation site."""
    settings = [flag.partition("=")[2] for flag in arm.source.flags if flag.startswith("generation=")]
    setting = settings[-1] if settings else "8 bits"
    return {"fp8": "FP8", "sparse24": "2:4", "generation": setting}.get(name, name)


def heading(experiment):
    """The metric's name; without its weights where arms read different ones."""
    metrics = {arm.metric for arm in experiment.arms}
    return experiment.metric if len(metrics) == 1 else experiment.metric.rpartition(".")[2]


# ---- The top of the log ------------------------------------------------------------------------------------


def answer(experiments, known):
    """The table of the arms that have a `headline`, which EXPERIMENTS.md opens with."""
    rows = [HEADLINES]
    for e in experiments:
        for arm in e.arms:
            row = arm_row(e, arm, known) if arm.headline else {}
            if "bytes a parameter" not in row:
                continue
            base = arm_row(e, e.arm(arm.baseline), known)
            rows.append(
                [
                    f"{arm.headline} ([{e.number}](#{anchor(e)}))",
                    row["bytes a parameter"],
                    base[heading(e)],
                    row[heading(e)],
                    row["difference [95 % CI]"],
                    f"{arm.margin:g}",
                    f"{verdict(*comparison(e, arm, known))}, n = {row['n']}",
                ]
            )
    return markdown(rows)


def summary(experiment, known):
    """'equal: a, b; worse: c', the author's verdict first."""
    groups = {}
    for arm in experiment.arms:
        if arm.name != arm.baseline:
            groups.setdefault(verdict(*comparison(experiment, arm, known)), []).append(arm.name)
    said = []
    for name in ("equal", "better", "worse", "undecided"):
        arms = groups.get(name, [])
        if arms:
            said.append(f"{name}: {', '.join(arms) if len(arms) <= 6 else f'{len(arms)} arms'}")
    return ". ".join(filter(None, [experiment.verdict.rstrip("."), "; ".join(said)])) or "not run yet"


def overview(experiments, known):
    rows = [["", "question", "verdict", "cost to reproduce"]]
    for e in experiments:
        row = [f"[{e.number}](#{anchor(e)})", e.question, summary(e, known), cost(needed(e, known).values())]
        rows.append([text.replace("|", "\\|").replace("\n", " ") for text in row])
    return markdown(rows) + "\n\n" + READING


def machine_of(record):
    facts = record.get("env", {})
    return facts.get("gpu") or facts.get("cpu") or "unknown machine"


def cost(records):
    """'12 min on 2 cores + 3 min on NVIDIA ...'"""
    seconds = {}
    for record in records:
        gpu = record.get("env", {}).get("gpu")
        where, share = (gpu, 1) if gpu else (f"{CORES} cores", CORES)
        spent = record.get("seconds", 0) + record.get("scoring_seconds", 0)
        seconds[where] = seconds.get(where, 0) + spent / share
    parts = []
    for where, s in sorted(seconds.items()):
        parts.append(f"{math.ceil(s / 60)} min on {where}" if s < 5400 else f"{s / 3600:.1f} h on {where}")
    return " + ".join(parts) or "-"


# ---- The section of an experiment --------------------------------------------------------------------------


def section(experiment, known):
    """The generated part of an experiment."""
    e = experiment
    here = [r for (_, _, seed), r in needed(e, known).items() if seed in e.seeds]
    parts = [f"**Question.** {e.question}"]
    if e.believed:
        parts.append(f"**What was believed.** {e.believed}")
    parts.append(f"**Prediction, written before the runs.** {e.prediction}")
    if here:
        parts.append(table(e, known))
    parts.append("\n".join(facts(e, known, here)))
    failed = [f"- {r['arm']}, seed {r['seed']}: {r['failed']}" for r in here if "failed" in r]
    if failed:
        parts.append("Runs that failed:\n\n" + "\n".join(failed))
    parts += [effects_table(group) for group in factorials(e, known)]
    traces = ranges(e, known)
    if traces:
        parts.append(ranges_table(traces))
    for name, (_, _, title) in figures.FIGURES.items():
        if (e.folder / f"{name}.png").exists():
            parts.append(f"![{title}](experiments/{e.folder.name}/{name}.png)")
    by_hand = [typed(arm, e.seeds[0]) for arm in dict.fromkeys(arm.source for arm in e.arms)]
    commands = "\n".join([f"python experiments/run.py {e.number}", *by_hand])
    parts.append(f"All of it, and one run of each arm:\n\n```sh\n{commands}\n```")
    return "\n\n".join(parts)


def table(experiment, known):
    rows = [arm_row(experiment, arm, known) for arm in experiment.arms]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    # these stand last also where a column before them belongs to later arms only
    columns.sort(key=lambda c: LAST_COLUMNS.index(c) if c in LAST_COLUMNS else -1)
    return markdown([columns] + [[row.get(column, "-") for column in columns] for row in rows])


def facts(experiment, known, here):
    """Sentences about margin, spread, reference scores and the records `here` of the runs."""
    e, digits = experiment, decimals_of(experiment.margin)
    said = [f"Margin {e.margin:g} ({'lower' if e.lower_is_better else 'higher'} is better)."]
    base = finite_scores(e, e.arm(e.baseline), known)
    sd = statistics.stdev(base) if len(base) > 1 else 0
    if sd > 0:
        pairs = stats.power_n(sd, e.margin)
        said.append(
            f"The baseline's standard deviation over seeds is {cell(sd, digits)}; differences that spread as "
            f"much need {pairs} pairs for a difference as large as the margin to be seen with 80 % power."
        )
    marks = [f"{name} score {cell(level, digits)}" for name, level in levels(e, known).items()]
    if marks:
        said.append("; ".join(marks).capitalize() + ".")
    expected = len({arm for a in e.arms for arm in (a.source, a.trained)}) * len(e.seeds)
    machines = ", ".join(sorted({machine_of(r) for r in here}))
    said.append(f"{len(here)} of {expected} runs, {machines or 'none yet'}.")
    if here:
        commits = {str(r.get("commit"))[:9] + ("" if r.get("clean") else " with changes") for r in here}
        said.append(f"Commit {', '.join(sorted(commits))}.")
    return said


def effects_table(group):
    rows = [["factor", "times", "from", "to"]]
    for name, *numbers in group["effects"]:
        rows.append([name, *(cell(x, 2) for x in numbers)])
    said = (
        f"{group['title'].capitalize()}: what each factor multiplies the score by, averaged over the others, "
        f"with its 95 % interval; of a pair, what the second's fault multiplies the first's effect by."
    )
    return f"{said}\n\n{markdown(rows)}"


def ranges_table(traces):
    keys = {
        "state, smallest": "x_min",
        "largest": "x_max",
        "mean": "x_mean",
        "output, smallest": "prediction_min",
        "largest ": "prediction_max",
    }
    rows = [["arm", *(title.strip() for title in keys)]]
    for name, trace in traces.items():
        row = [name]
        for kind in keys.values():
            values = [step[kind] for step in trace if kind in step]
            ends = values[:: max(1, len(values) - 1)]
            row.append(" → ".join(cell(v, 2) for v in ends))
        rows.append(row)
    return "Ranges of generation, first step → last, mean over seeds:\n\n" + markdown(rows)


# ---- EXPERIMENTS.md ----------------------------------------------------------------------------------------


def anchor(experiment):
    return f"experiment-{experiment.number}"


def render(text, experiments, known):
    """EXPERIMENTS.md with its generated parts replaced, and missing sections where their numbers belong."""
    text = text or INTRODUCTION
    text = replaced(text, "answer", answer(experiments, known))
    text = replaced(text, "overview", overview(experiments, known))
    for experiment in experiments:
        text = with_section(text, experiment, experiments)
        text = replaced(text, experiment.number, section(experiment, known))
    return text


def edges(name):
    return f"<!-- generated: {name} begin -->", f"<!-- generated: {name} end -->"


def replaced(text, name, body):
    begin, end = edges(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise Refused(f"EXPERIMENTS.md: '{begin}' and '{end}' must each stand there once, in this order")
    return text[: text.index(begin) + len(begin)] + f"\n{body}\n" + text[text.index(end) :]


def with_section(text, experiment, experiments):
    """The text with an empty section of the experiment, unless it has one, before those of later ones."""
    begin, end = edges(experiment.number)
    if begin in text or end in text:
        return text
    later = [f'<a id="{anchor(e)}"></a>' for e in experiments if e.number > experiment.number]
    at = min((text.index(mark) for mark in later if mark in text), default=len(text))
    head = f'<a id="{anchor(experiment)}"></a>\n## {experiment.number} {experiment.title}'
    empty = f"{head}\n\n{begin}\n{end}\n\n### What happened\n\n### What follows"
    return "\n\n".join(filter(None, [text[:at].rstrip(), empty, text[at:]])).rstrip() + "\n"


# ---- Figures -----------------------------------------------------------------------------------------------


def draw_all(experiment, known, runs):
    """The figures of an experiment for which there are data.

    samples.png stays as it is where the run folders are gone.
    """
    for name, data in figure_data(experiment, known, runs):
        figures.figure(experiment.folder / f"{name}.png", data)


def figure_data(experiment, known, runs):
    """(name, data) of each figure that the records allow."""
    e, title = experiment, f"{experiment.number} {experiment.title}"
    common = {"title": title, "order": [arm.name for arm in e.arms]}
    if arms := bins(e, known):
        yield "loss_by_timestep", {**common, "arms": arms}
    if panels := curves(e, known):
        yield "curves", {**common, "panels": panels}
    if lines := series(e, known):
        labels = {"x_label": e.x_label, "y_label": heading(e)}
        yield "series", {"title": title, "series": lines, **labels, "levels": levels(e, known)}
    points = by_bytes(e, known) if e.by_bytes else []
    if points:
        label = f"{heading(e)}, {'lower' if e.lower_is_better else 'higher'} is better"
        shown = {"title": e.title, "points": points, "margin": e.margin}
        yield "bytes", {**shown, "levels": levels(e, known), "y_label": label}
    if groups := factorials(e, known):
        yield "factorial", {"title": title, "groups": groups}
    if traces := ranges(e, known):
        yield "ranges", {**common, "panels": range_panels(traces)}
    if rows := strips(e, known, runs):
        shown = "images, masks, predictions" if all(map(segments, e.arms)) else "samples from the same noise"
        yield "samples", {"title": f"{title}: {shown}, seed {e.seeds[0]}", "rows": rows}


def range_panels(traces):
    keys = {
        "state, smallest": "x_min",
        "state, largest": "x_max",
        "state, mean": "x_mean",
        "output, largest": "prediction_max",
    }
    panels = {}
    for title, kind in keys.items():
        panel = panels[title] = {}
        for name, trace in traces.items():
            steps = [step for step in trace if kind in step]
            panel[name] = [step["t"] for step in steps], [step[kind] for step in steps]
    return panels


def strips(experiment, known, runs):
    """[(arm, pixels)] of the first seed's pictures, one row of ten images each.

    [] unless every finished arm's picture is there.
    """
    import numpy as np
    from PIL import Image

    seed, rows, seen = experiment.seeds[0], [], set()
    for arm in experiment.arms:
        record, weights = known.get(key(arm.source, seed)), weights_of(arm)
        if record is None or "failed" in record or (arm.source, weights) in seen:
            continue  # two metrics of one arm have the same pictures
        seen.add((arm.source, weights))
        if weights not in record["scores"]:
            continue  # a figure of the training has no pictures
        path = picture_of(arm, seed, record, runs)
        if not path.exists():
            return []
        with Image.open(path, formats=["PNG"]) as picture:
            # samples are a grid of 6 rows and 10 columns; masks of segmentation are shown whole
            keep = picture.height if segments(arm) else (picture.height - 4) // 6 + 4
            strip = picture.convert("RGB").crop((0, 0, picture.width, keep))
        rows.append((arm.name, np.asarray(strip).tolist()))
    return rows


def picture_of(arm, seed, record, runs):
    """Where the run that an arm reads keeps the picture of its samples."""
    source = weights_of(arm).replace(":", "_")
    name = source if len(record["scores"]) > 1 else "final"
    if arm.of and arm.flags:
        name = f"{label(arm, seed)}-{source}"
    return Path(runs) / label(arm.trained, seed) / "samples" / f"{name}.png"


# ---- The command -------------------------------------------------------------------------------------------


def main(argv=None, root=HERE, document=ROOT / "EXPERIMENTS.md"):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    kept = "where run.py kept the runs, for the pictures of samples"
    add("--runs", default=str(ROOT / RUNS), help=kept)
    args = parser.parse_args(argv)
    try:
        loaded = {}
        experiments = [load(number, root, loaded) for number in folders(root)]
        known = {k: record for e in experiments for k, record in recorded(e).items()}
        if not args.check:
            for e in experiments:
                draw_all(e, known, args.runs)
        old = document.read_text() if document.exists() else ""
        pages = {document: render(old, experiments, known)}
        pages |= claims.pages(experiments, known, root, document.parent)
    except Refused as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path, text in pages.items():
        if args.check:
            old = "is out of date: run python experiments/report.py"
            print(path.name, old if path in stale else "is what the results give")
        elif path in stale:
            write_atomically(path, lambda file, text=text: file.write(text.encode()))
    return int(bool(stale)) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
