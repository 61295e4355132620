"""experiments/report.py: the tables of a page and its pictures, of a log made here."""

import math

import numpy as np
import pytest
from lab import TOML, commands, draw_quickly, page, record, records_of, second, shown, table, write
from scipy import stats

from experiments import report
from experiments.log import analysis, curves, definition, figures
from experiments.log import records as log
from experiments.log.stats import equivalence

ROOT = definition.ROOT


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The experiments folder, which holds 001-rounding. run.main changes the working directory."""
    monkeypatch.chdir(tmp_path)
    draw_quickly(monkeypatch)
    write(tmp_path / "experiments", TOML)
    return tmp_path / "experiments"


# ---- Tables ------------------------------------------------------------------------------------------------


def scores_of(records):
    """{arm: array of its scores, in the order of the records}."""
    found = {}
    for r in records:
        found.setdefault(r["arm"], []).append(r["scores"]["ema"]["frechet"])
    return {name: np.array(values) for name, values in found.items()}


def half_interval(differences, tail=0.975):
    """Half of the 95 % interval of the mean of six differences."""
    return stats.t.ppf(tail, 5) * differences.std(ddof=1) / 6**0.5


def test_scores_of_another_experiment_make_the_table(folder):
    records = records_of(definition.load_experiment("1", folder))
    write(folder, TOML, records)
    second(folder)
    document = folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0
    first, rows = table(folder), table(folder, "002-more")
    assert rows["fp32"]["frechet"] == first["fp32"]["ema.frechet"]
    assert rows["raw"]["frechet"] == first["fp32"]["raw.frechet"]
    assert rows["sampler"]["frechet"] == "-"


def test_every_number_of_the_table_comes_from_the_results(folder):
    experiment = definition.load_experiment("1", folder)
    records = records_of(experiment)
    write(folder, TOML, records)
    document = folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0
    rows = table(folder)
    values = scores_of(records)
    for name, x in values.items():
        row, d = rows[name], x - values["fp32"]
        assert row["ema.frechet"] == f"{x.mean():.3f} ± {x.std(ddof=1):.3f}"
        assert row["raw.frechet"] == f"{2 * x.mean():.3f} ± {2 * x.std(ddof=1):.3f}"
        assert row["label accuracy"] == "0.500 ± 0.000"
        assert row["training loss"] == f"{0.425:.4f} ± {np.std(np.arange(6) / 100, ddof=1):.4f}"
        assert (row["n"], row["bytes a parameter"], row["seconds"]) == ("6", "16", "36")
        if name != "fp32":
            low, high = d.mean() - half_interval(d), d.mean() + half_interval(d)
            assert row["difference [95 % CI]"] == f"{d.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            effect = float(row["detectable"]) / d.std(ddof=1) * 6**0.5
            if d.std() > 0.01:
                assert stats.nct.sf(stats.t.ppf(0.975, 5), 5, effect) == pytest.approx(0.8, abs=0.02)
    assert [rows[name]["verdict"] for name in rows] == [
        "baseline",
        "worse",
        "slightly worse, within 0.5",
    ]
    for name, row in shown(folder).items():
        assert row.items() <= rows[name].items() and not {"adds", "seconds"} & set(row)
    text = document.read_text()
    assert "- [001](experiments/001-rounding) Rounding" in text.splitlines()
    assert "Cost of these records: 6 min on 2 cores" in page(folder)  # 18 runs of 36 s


def test_the_achieved_margin_is_the_farther_end_of_the_90_percent_interval(folder):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    values = scores_of(records)
    for name in ("nearest", "sampler"):
        d = values[name] - values["fp32"]
        ends = [abs(d.mean() + sign * half_interval(d, 0.95)) for sign in (-1, 1)]
        share = 100 * max(ends) / values["fp32"].mean()
        wanted = f"{share:.{0 if share >= 9.95 else 1 if share >= 0.95 else 2}f} %"
        assert table(folder)[name]["achieved margin"] == f"{max(ends):.3f} ({wanted})"
        found = analysis.comparison(experiment.arm(name), log.recorded(experiment))[1]
        for factor, verdict in ((1.001, "equal"), (0.999, None)):  # it is the margin at which equality begins
            verdict_there = equivalence(d.tolist(), max(ends) * factor).verdict
            assert (verdict_there == "equal") == (verdict == "equal")
        assert found.achieved == pytest.approx(max(ends))


def test_the_loss_stands_beside_the_score(folder):
    """Held-out loss where the records have it, else another held-out loss, else that of the training."""
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        up = {"fp32": 0.0, "nearest": 0.03, "sampler": 0.001}[r["arm"]] * (1 + r["seed"] / 10)
        r["scores"]["ema"]["loss_by_timestep"] = [0.5 * (1 + up), 0.3 * (1 + up)]
        r["final_loss"] = 1.0 + 2 * up
    changes = 100 * 0.03 * (1 + np.arange(6) / 10)
    half = half_interval(changes)

    def told(kind):
        write(folder, TOML, records)
        assert report.main([], folder, document) == 0
        return shown(folder)["nearest"][f"{kind}, % [95 % CI]"]

    wanted = [changes.mean(), changes.mean() - half, changes.mean() + half]
    assert told("held-out loss") == "{:+.2f} [{:+.2f}, {:+.2f}]".format(*wanted)
    assert shown(folder)["nearest"]["achieved, %"] == f"{changes.mean() + half_interval(changes, 0.95):.2f}"
    for name in ("nearest", "sampler"):
        shares = shown(folder)[name]["share of nearest's harm: score, loss"].split(", ")
        assert shares == ["-"] if name == "nearest" else shares[1] == "3.3 %"
    for r in records:
        own = r["scores"]["ema"]
        own["loss"] = sum(own.pop("loss_by_timestep")) / 2
    assert told("held-out loss") == "{:+.2f} [{:+.2f}, {:+.2f}]".format(*wanted)
    for r in records:
        del r["scores"]["ema"]["loss"]
    assert told("training loss") == "{:+.2f} [{:+.2f}, {:+.2f}]".format(*[2 * x for x in wanted])
    for r in records:  # where rounding to nearest helps, nothing is a share of its harm
        up = {"fp32": 0.0, "nearest": -0.03, "sampler": 0.001}[r["arm"]] * (1 + r["seed"] / 10)
        r["scores"]["ema"]["loss_by_timestep"] = [0.5 * (1 + up), 0.3 * (1 + up)]
    told("held-out loss")
    assert shown(folder)["sampler"]["share of nearest's harm: score, loss"].endswith("-")


def test_pairs_of_two_kinds_of_cpu_are_marked(folder):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        if r["arm"] == "nearest" and r["seed"] < 4:
            r["env"] = {**r["env"], "cpu": "another"}
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    assert [row["n"] for row in table(folder).values()] == ["6", "6, 4 across CPUs", "6"]
    assert "different kinds of CPU: nearest 4 of 6." in page(folder)


def test_what_waits_for_a_look_is_not_counted(folder):
    more = "".join(f'[[arms]]\nname = "a{i}"\nflags = ["--lr", "1e-{i + 2}"]\n' for i in range(4))
    looks = "looks = [{pairs = 3, level = 0.025}, {pairs = 6, level = 0.035}]\n"
    toml = TOML.replace("[[arms]]", looks + "[[arms]]", 1) + more
    write(folder, toml)
    experiment = definition.load_experiment("1", folder)
    shifted = records_of(experiment, shift=(0.0, 0.9, 0.01, 0.02, 0.0, 0.01, 0.9))
    write(folder, toml, [r for r in shifted if r["seed"] < 4])  # one more than the first look takes
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 0
    assert "no verdict before 6 pairs" in page(folder) and "stand together" not in page(folder)
    write(folder, toml, shifted)
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 0
    assert "6 comparisons stand together. Each alone at 3.5 %" in page(folder)


def test_again_changes_nothing_and_the_prose_stays(folder):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    write(folder, TOML, records_of(experiment))
    assert report.main([], folder, document) == 0
    written = folder / "001-rounding/README.md"
    written.write_text(page(folder).replace("## What happened\n", "## What happened\n\nNearest loses.\n"))

    def state():
        paths = [document, *(folder / "001-rounding").iterdir()]
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    before = state()
    assert report.main(["--check"], folder, document) == 0
    assert report.main([], folder, document) == 0 and state() == before
    for path in (folder / "001-rounding").glob("*.png"):  # drawn anew, the bytes are the same
        path.unlink()
    assert report.main([], folder, document) == 0
    assert {name: v[0] for name, v in state().items()} == {name: v[0] for name, v in before.items()}
    write(folder, TOML, records_of(experiment, shift=(0.0, 2.0, 0.01)))
    assert report.main(["--check"], folder, document) == 1 and report.main([], folder, document) == 0
    assert "Nearest loses." in page(folder) and page(folder).encode() != before["README.md"][0]


def test_a_new_experiment_gets_a_page_and_some_can_be_written_alone(folder):
    document = folder.parent / "EXPERIMENTS.md"
    second(folder)
    assert report.main(["2"], folder, document) == 0
    assert not (folder / "001-rounding/README.md").exists() and not document.exists()
    assert page(folder, "002-more").count("## What ") == 2
    assert report.main([], folder, document) == 0
    assert "not run yet: 001, 002" in document.read_text()
    assert report.main(["--check"], folder, document) == 0
    assert report.main(["--check", "2"], folder, document) == 0


def test_a_diverged_run_counts_and_a_killed_one_does_not(folder):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        if r["arm"] == "nearest":
            r["failed"] = "the loss is nan at step 7: lower --lr"
        if (r["arm"], r["seed"]) == ("sampler", 3):
            r["failed"] = "Killed"
    write(folder, TOML, [{k: v for k, v in r.items() if k != "scores" or "failed" not in r} for r in records])
    assert report.main([], folder, document) == 0
    text, rows = page(folder), table(folder)
    diverged = rows["nearest"]
    assert (diverged["ema.frechet"], diverged["verdict"], diverged["n"]) == ("inf", "worse", "6")
    sampled = rows["sampler"]
    assert (sampled["verdict"], sampled["n"]) == ("slightly worse, within 0.5", "5 of 6")
    assert "- sampler, seed 3: Killed" in text and text.count("- nearest, seed") == 6


def test_an_arm_may_read_another_score_of_a_run_or_have_its_own_baseline(folder, capsys):
    more = """
        [[arms]]
        name = "raw"
        of = "fp32"
        flags = []
        metric = "raw.frechet"
        [[arms]]
        name = "pair"
        flags = ["--bf16"]
        baseline = "nearest"
    """
    write(folder, TOML + more)
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    assert len(commands(capsys, folder, "--seeds", "0")) == 4  # reading needs no run
    records = [r for r in records_of(experiment) if r["arm"] != "raw"]
    records += [record(experiment, "pair", seed, 2.0) for seed in experiment.seeds]
    write(folder, TOML + more, records)
    assert report.main([], folder, document) == 0
    rows = table(folder)

    def mean(row):
        return float(row["frechet"].split(" ")[0])

    assert mean(rows["raw"]) == pytest.approx(2 * mean(rows["fp32"]), abs=2e-3)
    assert "of fp32" in rows["raw"]["adds"]
    difference = float(rows["pair"]["difference [95 % CI]"].split(" ")[0])
    assert difference == pytest.approx(2.0 - mean(rows["nearest"]), abs=2e-3)
    assert rows["pair"]["verdict"].endswith("(against nearest)")


def test_lost_markers_and_missing_scores_are_one_line(folder, capsys):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    write(folder, TOML, records_of(experiment))
    report.main([], folder, document)
    written = folder / "001-rounding/README.md"
    written.write_text(page(folder).replace("<!-- generated: results end -->", ""))
    assert report.main([], folder, document) == 2 and "must each stand there once" in capsys.readouterr().err
    written.unlink()
    write(folder, TOML.replace("ema.frechet", "ema.fid"), records_of(experiment))
    assert report.main([], folder, document) == 2 and "no score 'ema.fid'" in capsys.readouterr().err


def test_what_cannot_be_written_or_read_is_one_line(folder, capsys):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    write(folder, TOML, records_of(experiment))
    assert report.main([], folder, document) == 0
    (folder / "001-rounding/table.csv").unlink()
    (folder / "001-rounding/table.csv").symlink_to("/dev/null")
    assert report.main([], folder, document) == 2
    (folder / "001-rounding/table.csv").unlink()
    (folder / "001-rounding/table.csv").mkdir()
    assert report.main([], folder, document) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("table.csv" in line for line in lines)


# ---- Pictures ----------------------------------------------------------------------------------------------


def test_a_picture_is_drawn_again_when_its_data_or_its_version_change(tmp_path, monkeypatch):
    path, draw = tmp_path / "curves.png", figures.FIGURES["curves"]
    data = {"title": "t", "order": ["a"], "panels": {"loss": {"a": ([1, 2], [0.3, math.nan])}}}
    figures.save_figure(path, data)
    first = path.read_bytes()
    path.write_bytes(first + b"left alone")  # what follows the end of a PNG is no part of the picture
    figures.save_figure(path, {**data, "order": ("a",)})  # lists and tuples are one
    figures.save_figure(path, {**data, "panels": {"loss": {"a": ([1, 2], [0.3 + 1e-12, math.nan])}}})
    assert path.read_bytes() == first + b"left alone"
    figures.save_figure(path, {**data, "title": "u"})
    second = path.read_bytes()
    assert second != first and not second.endswith(b"left alone")
    monkeypatch.setitem(figures.FIGURES, "curves", (draw[0], draw[1] + 1, draw[2]))
    figures.save_figure(path, {**data, "title": "u"})
    third = path.read_bytes()
    assert third != second
    path.write_bytes(b"damaged")
    figures.save_figure(path, {**data, "title": "u"})
    assert path.read_bytes() == third


CELLS = {"stochastic-fp32": 0.1, "stochastic-bf16": 10.0, "nearest-fp32": 0.3, "nearest-bf16": 15.0}


def factors():
    """A toml of two factors with two levels each; its arms are the CELLS."""
    text = TOML.split("[[arms]]")[0].replace('baseline = "fp32"', 'baseline = "stochastic-fp32"')
    text += 'ranges = true\nx_label = "share"\n'
    for i, name in enumerate(CELLS):
        update, ema = name.split("-")
        text += f"""
            [[arms]]
            name = "{name}"
            flags = ["--lr", "1e-{i + 2}"]
            cell = {{update = "{update}", ema = "{ema}"}}
            series = "{update}"
            x = {2 if ema == "bf16" else 1}
        """
    return text


def trace_step(t):
    """A step of the trace of ranges; the last, at t = 0, has no prediction."""
    step = {"t": t, "x_min": -t / 250, "x_max": 4.0, "x_mean": 0.1}
    return {**step, "prediction_min": -2.0, "prediction_max": 2.0} if t else step


def effects_in(text):
    """{effect: [times, from, to]} of the generated tables."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith(("| update ", "| ema "))]
    return {line[1].strip(): [float(cell) for cell in line[2:5]] for line in lines}


def test_effects_of_factors_are_ratios_of_cells(folder):
    write(folder, factors())
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    spread = np.random.default_rng(0)
    records = []
    for seed in experiment.seeds:
        for name, mean in CELLS.items():
            score = mean * np.exp(0.1 * spread.standard_normal())
            records.append(record(experiment, name, seed, score))
            records[-1]["scores"]["ema"]["trace"] = [trace_step(t) for t in (1000, 500, 0)]
    write(folder, factors(), records)
    assert report.main([], folder, document) == 0
    logs = {name: np.log10(values) for name, values in scores_of(records).items()}
    s_f, s_b, n_f, n_b = logs.values()
    expected = {
        "update nearest": (n_f + n_b - s_f - s_b) / 2,
        "ema bf16": (s_b + n_b - s_f - n_f) / 2,
        "update x ema": n_b - n_f - s_b + s_f,
    }
    text = page(folder)
    found = effects_in(text)
    assert set(found) == set(expected)
    for name, values in expected.items():
        half = half_interval(values)
        ends = [10 ** (values.mean() + by) for by in (0, -half, half)]
        assert found[name] == pytest.approx(ends, abs=0.006)
    ends = "-4.00 → 0.00 | 4.00 → 4.00 | 0.10 → 0.10 | -2.00 → -2.00 | 2.00 → 2.00"
    assert f"| nearest-bf16 | {ends} |" in text
    drawn = {p.name for p in (folder / "001-rounding").glob("*.png")}
    assert drawn == {"curves.png", "factorial.png", "series.png", "ranges.png"}
    known = {k: r for k, r in log.recorded(experiment).items() if k[1] != "nearest-fp32"}
    assert curves.factorials(experiment, known) == []  # a missing cell: no effects


def test_held_out_loss_against_bytes_a_parameter(folder):
    toml = TOML.replace("margin = 0.5", "margin = 0.5\nby_bytes = true")
    write(folder, toml)
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    picture = folder / "001-rounding/bytes.png"
    assert report.main([], folder, document) == 0 and not picture.exists(), "nothing ran"
    sizes = {"fp32": 16.0, "nearest": 8.0, "sampler": 10.14}
    times = {"fp32": 1.0, "nearest": 1.03, "sampler": 0.99}
    records = [{**r, "bytes_per_parameter": sizes[r["arm"]]} for r in records_of(experiment)]
    for r in records:
        loss = times[r["arm"]] + r["seed"] / 1000
        r["scores"]["ema"]["loss_by_timestep"], r["scores"]["raw"] = [1.0], {"loss_by_timestep": [loss]}
    write(folder, toml, records)
    recorded = log.recorded(experiment)
    points = curves.by_bytes(experiment, recorded)
    assert [(p[0], p[1], p[5]) for p in points] == [
        ("fp32", 16.0, "baseline"),
        ("sampler", 10.14, "better"),
        ("nearest", 8.0, "worse"),
    ]
    base = np.array([1 + seed / 1000 for seed in experiment.seeds])
    for name, _, mean, low, high, _ in points[1:]:
        changes = 100 * ((base + times[name] - 1) / base - 1)
        half = half_interval(changes)
        expected = [changes.mean(), changes.mean() - half, changes.mean() + half]
        assert [mean, low, high] == pytest.approx(expected), "of the last weights"
    # without last weights it is the loss of the arm's own; a run that diverged, or one seed, has no place
    few = {k: r for k, r in recorded.items() if k[2] < 2}
    diverged = {"arm": "nearest", "seed": 0, "failed": "the loss is nan at step 2"}
    few[definition.run_key(experiment.arm("nearest"), 0)] = diverged
    few[definition.run_key(experiment.arm("sampler"), 0)]["scores"].pop("raw")
    assert [p[0] for p in curves.by_bytes(experiment, few)] == ["fp32", "sampler"]
    assert curves.by_bytes(experiment, few)[1][2] == 0.0 and curves.loss_weights(experiment, few) is None
    assert report.main([], folder, document) == 0
    assert picture.stat().st_size > 5000
    assert "](bytes.png)" in page(folder)
