"""Columns and tables that a page has where its arms ask for them: effects of factors, bytes, FLOPs, noise."""

import numpy as np
import pytest
import test_report
from lab import TOML, page, record, records_of, shown, table, write
from test_report import half_interval, scores_of

from experiments import report
from experiments.log import curves, definition
from experiments.log import records as log

folder = test_report.folder


def test_what_is_kept_for_backward_is_a_column_where_arms_compare_by_it(folder):
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    assert "kept for backward" not in page(folder) and "kept for backward, MiB" not in table(folder)["fp32"]
    for r in records:
        if r["arm"] == "nearest":  # of one arm alone: nothing to compare with
            r["activation_bytes"] = 5 * 2**20
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    assert table(folder)["nearest"]["kept for backward, MiB"] == "5" and "kept for" not in page(folder)
    for r in records:
        if r["arm"] != "sampler":
            r["activation_bytes"] = 5 * 2**20 // (2 if r["arm"] == "nearest" else 1)
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    for rows in (table(folder), shown(folder)):
        kept = [rows[arm]["kept for backward, MiB"] for arm in ("fp32", "nearest", "sampler")]
        assert kept == ["5", "2.5", "-"]


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


def test_factors_without_every_cell_have_the_effects_that_can_be_told(folder):
    """Arms that were never planned, scores of 0, one level only: nothing of it is a traceback."""
    document = folder.parent / "EXPERIMENTS.md"
    pair = (
        factors()
        .replace('"nearest-bf16"', '"other"')
        .replace('cell = {update = "nearest", ema = "bf16"}', "")
    )
    for toml, score, expected in [
        (pair, 1.0, {"update nearest", "ema bf16"}),
        (factors().replace('ema = "bf16"', 'ema = "fp32"'), 1.0, {"update nearest"}),
        (factors(), 0.0, set()),
    ]:
        write(folder, toml)
        experiment = definition.load_experiment("1", folder)
        records = []
        for seed in experiment.seeds:
            records += [record(experiment, arm.name, seed, score * (1 + seed)) for arm in experiment.arms]
        write(folder, toml, records)
        assert report.main(["--check"], folder, document) == 1
        groups = curves.factorials(experiment, log.recorded(experiment))
        assert {name for group in groups for name, *_ in group["effects"]} == expected


def test_noise_of_gradients_and_covered_flops_are_columns_and_a_metric(folder, capsys):
    toml = TOML.replace('flags = ["--pure_bf16"]', 'flags = ["--fp8"]')
    toml = toml.replace("sampler=bf16", "generation=int8")
    toml += """
        [[arms]]
        name = "noise"
        of = "nearest"
        flags = []
        metric = "gradient_snr.bf16"
        baseline = "noise"
    """
    write(folder, toml)
    experiment, document = definition.load_experiment("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        if r["arm"] == "nearest":
            r["gradient_snr"] = {"fp8": 20.0 + r["seed"], "bf16": 40.0}
            r["flops_share"] = {"fp8": 0.953}
        elif r["arm"] == "sampler":
            r["flops_share"] = {"generation": 0.5}
    write(folder, toml, records)
    assert report.main([], folder, document) == 0
    rows = table(folder)
    assert rows["nearest"]["gradient SNR in FP8, dB"] == f"22.5 ± {np.std(range(6), ddof=1):.1f}"
    assert rows["nearest"]["of the FLOPs"] == "95.3% in FP8"
    assert rows["sampler"]["of the FLOPs"] == "50.0% in int8"
    assert rows["fp32"]["of the FLOPs"] == rows["fp32"]["in bf16, dB"] == "-"
    assert rows["noise"]["score"] == "40.000 ± 0.000" and rows["fp32"]["training loss"] != "-"
    for r in records:
        if r["arm"] == "nearest":
            r["gradient_snr"] = {"fp4": 2.5, "bf16": 40.0}
    write(folder, toml, records)
    assert report.main([], folder, document) == 0
    assert table(folder)["nearest"]["gradient SNR in FP4, dB"].startswith("2.5")
    last = next(r for r in reversed(records) if r["arm"] == "nearest")
    del last["gradient_snr"]["fp4"]
    write(folder, toml, records)
    assert report.main([], folder, document) == 2
    assert "no score 'gradient_snr.fp4'" in capsys.readouterr().err


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
