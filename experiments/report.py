"""Writes what is generated from records: page, table and figures of every experiment, EXPERIMENTS.md,
experiments/settings.md and missed.md, and the tables of README.md and docs/ below a <!-- marker -->.

    python experiments/report.py            all of it
    python experiments/report.py 011 019    the pages of these experiments alone
    python experiments/report.py --check    exit status 1 if a page is not what the records give

log/pages.py, log/front.py and log/doc_tables.py say which parts are generated and which are the author's. Run
again, it changes nothing: a figure is redrawn only when its data or its version in figures.py changed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.log import (
    figures,  # noqa: E402
    front,  # noqa: E402
    overview,  # noqa: E402
    pages,  # noqa: E402
    tables,  # noqa: E402
)
from experiments.log.analysis import (  # noqa: E402
    levels,
    segments,
    weights_of_score,
    writes_text,
)
from experiments.log.curves import (  # noqa: E402
    by_bytes,
    factorials,
    generation_ranges,
    loss_weights,
    losses_by_timestep,
    series,
    training_curves,
)
from experiments.log.definition import (  # noqa: E402
    HERE,
    ROOT,
    RUNS,
    experiment_folders,
    load_experiment,
    run_key,
    run_label,
)
from experiments.log.records import recorded  # noqa: E402
from experiments.log.tables import heading  # noqa: E402
from harness.files import write_atomically  # noqa: E402
from harness.flags import OneLineParser  # noqa: E402
from lowprec.errors import Refused  # noqa: E402

# ---- Figures -----------------------------------------------------------------------------------------------


def draw_all(experiment, known, runs):
    """The figures of an experiment for which there are data.

    samples.png stays as it is where the run folders are gone.
    """
    for name, data in data_of_figures(experiment, known, runs):
        figures.save_figure(experiment.folder / f"{name}.png", data)


def draw_front_figures(experiments, known, root):
    """The figures of EXPERIMENTS.md and of README.md."""
    found = overview.settings(experiments, known)
    data = overview.figure_data(found)
    if any(data["points"].values()):
        figures.save_figure(root / front.FIGURE, data)
    if root == HERE:  # not the log of a test
        figures.save_figure(ROOT / "docs/cost.png", overview.cost_data(found, experiments, known))


def data_of_figures(experiment, known, runs):
    """(name, data) of each figure that the records allow."""
    e = experiment
    title = f"{e.number} {e.title}"
    common = {"title": title, "order": [arm.name for arm in e.arms]}
    if arms := losses_by_timestep(e, known):
        yield "loss_by_timestep", {**common, "arms": arms}
    if panels := training_curves(e, known):
        yield "curves", {**common, "panels": panels}
    if lines := series(e, known):
        labels = {"x_label": e.x_label, "y_label": heading(e)}
        yield "series", {"title": title, "series": lines, **labels, "levels": levels(e, known)}
    points = by_bytes(e, known) if e.by_bytes else []
    if points:
        which = " of the last weights" if loss_weights(e, known) else ""
        y_label = f"held-out loss{which} against {e.baseline}, %"
        yield "bytes", {"title": e.title, "points": points, "y_label": y_label}
    if groups := factorials(e, known):
        yield "factorial", {"title": title, "groups": groups}
    if traces := generation_ranges(e, known):
        yield "ranges", {**common, "panels": range_panels(traces)}
    if rows := picture_strips(e, known, runs):
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


def picture_strips(experiment, known, runs):
    """[(arm, pixels)] of the first seed's pictures, one row of ten images each.

    [] unless every finished arm's picture is there, and of text, whose pictures are no rows of images.
    """
    import numpy as np
    from PIL import Image

    if any(map(writes_text, experiment.arms)):
        return []
    seed, rows, seen = experiment.seeds[0], [], set()
    for arm in experiment.arms:
        record, weights = known.get(run_key(arm.source, seed)), weights_of_score(arm)
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
    source = weights_of_score(arm).replace(":", "_")
    name = source if len(record["scores"]) > 1 else "final"
    if arm.of and arm.flags:
        name = f"{run_label(arm, seed)}-{source}"
    return Path(runs) / run_label(arm.trained, seed) / "samples" / f"{name}.png"


# ---- The command -------------------------------------------------------------------------------------------


def read_or_empty(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


def all_pages(experiments, chosen, known, root, document):
    """{path: text} of every page; of the chosen experiments alone where only some are `chosen`."""
    found = {}
    for e in chosen:
        path = e.folder / "README.md"
        found[path] = pages.experiment_page(e, known, read_or_empty(path))
        found[e.folder / "table.csv"] = tables.csv_text(tables.columns(e, known))
    if len(chosen) < len(experiments):
        return found
    settings = overview.settings(experiments, known)
    found[document] = front.front_page(experiments, known, settings, Path(root))
    found[Path(root) / front.SETTINGS_PAGE] = overview.settings_page(settings)
    found[Path(root) / front.MISSED_PAGE] = front.missed_page(experiments)
    if root == HERE:  # not the log of a test
        # the benchmarks' own tables take torch's optimisers and more, the flags of trainings all tasks
        from experiments.log import doc_tables, quality

        found[quality.EVIDENCE_FILE] = quality.evidence_text(experiments, known)
        found |= doc_tables.updated_pages(ROOT, experiments, known)
    return found


def lines_told(path, base):
    return str(path.relative_to(base)) if path.is_relative_to(base) else path.name


def main(argv=None, root=HERE, document=ROOT / "EXPERIMENTS.md"):
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="report.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("numbers", nargs="*", metavar="NNN", help="experiments (default: all, and the page about them)")
    add("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    kept = "where run.py kept the runs, for the pictures of samples"
    add("--runs", default=str(ROOT / RUNS), help=kept)
    args = parser.parse_args(argv)
    try:
        loaded = {}
        experiments = [load_experiment(number, root, loaded) for number in experiment_folders(root)]
        chosen = [load_experiment(number, root, loaded) for number in args.numbers] or experiments
        known = {k: record for e in experiments for k, record in recorded(e).items()}
        if not args.check:
            for e in chosen:
                draw_all(e, known, args.runs)
            if chosen is experiments:
                draw_front_figures(experiments, known, Path(root))
        found = all_pages(experiments, chosen, known, root, document)
        stale = [path for path, text in found.items() if read_or_empty(path) != text]
        if not args.check:
            for path in stale:
                write_atomically(path, lambda file, text=found[path]: file.write(text.encode()))
            return 0
        for path in stale:
            print(f"{lines_told(path, document.parent)} is out of date: run python experiments/report.py")
        if not stale:
            print(f"{len(found)} pages are what the records give")
        sys.stdout.flush()  # a full disk is met here
        return int(bool(stale))
    except (Refused, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
