"""Looks at the data, the first page of the log, the numbers in its prose: experiments/pages.py, prose.py."""

import re

import numpy as np
import pytest
from lab import TOML, page, records_of, second, table, write
from scipy import stats

from experiments import report, run
from experiments.log import definition


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The experiments folder, which holds 001-rounding. run.main changes the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "experiments", TOML)
    return tmp_path / "experiments"


def scores_of(records, arm):
    return np.array([r["scores"]["ema"]["frechet"] for r in records if r["arm"] == arm])


# ---- Looks -------------------------------------------------------------------------------------------------


def with_looks(looks, seeds=6):
    toml = TOML.replace("margin = 0.5", f"margin = 0.5\nlooks = {looks}")
    return toml.replace("[0, 1, 2, 3, 4, 5]", str(list(range(seeds))))


def test_looks_that_are_used_up_are_refused(folder, capsys):
    document, one = folder.parent / "EXPERIMENTS.md", definition.load("1", folder)
    write(folder, TOML, records_of(one))
    assert report.main([], folder, document) == 0
    more = TOML.replace("[0, 1, 2, 3, 4, 5]", "[0, 1, 2, 3, 4, 5, 6, 7]")
    write(folder, more, records_of(one))
    assert report.main([], folder, document) == 2
    err = capsys.readouterr().err
    assert "its one look, at 6 pairs, is used up" in err and err.count("\n") == 1
    planned = "[{pairs = 3, level = 0.03}, {pairs = 6, level = 0.03}]"
    write(folder, with_looks(planned, seeds=8), records_of(one))
    for command in (lambda: report.main([], folder, document), lambda: run.main(["1", "--dry_run"], folder)):
        assert command() == 2
        err = capsys.readouterr().err
        assert "looks are used up at 6 pairs" in err and err.count("\n") == 1
    write(folder, with_looks(planned), records_of(one))
    assert report.main([], folder, document) == 0, "within the plan"
    much = "[{pairs = 3, level = 0.05}, {pairs = 6, level = 0.05}]"
    write(folder, with_looks(much), records_of(one))
    assert report.main([], folder, document) == 2
    assert "together have the level 0.08" in capsys.readouterr().err
    write(folder, with_looks(much.replace("pairs = 6,", "pairs = 6, unplanned = true,")), records_of(one))
    assert report.main([], folder, document) == 0
    assert "The look at 6 was not planned" in page(folder)


def test_a_verdict_follows_the_level_of_its_look_and_waits_between_looks(folder):
    document = folder.parent / "EXPERIMENTS.md"
    toml = with_looks("[{pairs = 4, level = 0.03}, {pairs = 6, level = 0.03}]")
    write(folder, toml)
    experiment = definition.load("1", folder)
    records = records_of(experiment)
    d = np.array([0.46, 0.40, 0.44, 0.42, 0.45, 0.41])
    for r in records:
        r["scores"]["ema"]["frechet"] = 1.0 + (d[r["seed"]] if r["arm"] == "nearest" else 0)
    p = stats.ttest_1samp(d, 0.5, alternative="less").pvalue
    for level, wanted in ((p * 1.2, "equal within 0.5, slightly worse"), (p * 0.8, "worse")):
        write(folder, toml.replace("0.03", f"{level:.7f}"), records)
        assert report.main([], folder, document) == 0
        assert table(folder)["nearest"]["verdict"] == wanted
    for seeds, due in ((5, 6), (1, 4)):
        write(folder, toml, [r for r in records if r["seed"] < seeds])
        assert report.main([], folder, document) == 0
        assert table(folder)["nearest"]["verdict"] == f"no verdict before {due} pairs"
        assert table(folder)["nearest"]["n"] == f"{seeds} of 6"


# ---- The first page and the prose --------------------------------------------------------------------------


def test_the_first_page_takes_its_figures_from_the_records(folder, capsys):
    experiment, document = definition.load("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    write(folder, TOML, records)
    front = folder / "front.md"
    front.write_text("# Log\n\nIt costs {001/nearest.difference}.\n\n{{index}}\n")
    assert report.main([], folder, document) == 0
    d = (scores_of(records, "nearest") - scores_of(records, "fp32")).mean()
    assert f"It costs {d:+.3f}." in document.read_text()
    front.write_text("It costs {001/near.difference}.\n")
    assert report.main([], folder, document) == 2 and "no arm 'near'" in capsys.readouterr().err
    front.write_text("It costs 0.87.\n")
    assert report.main([], folder, document) == 0 and report.main(["--check"], folder, document) == 1
    assert "front.md:1: no record gives 0.87" in capsys.readouterr().out
    front.write_text("It costs 0.87. <!-- source: the author -->\n")
    assert report.main([], folder, document) == 0 and report.main(["--check"], folder, document) == 0


def test_numbers_in_prose_have_a_record(folder, capsys):
    experiment, document = definition.load("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    fp32, empty = scores_of(records, "fp32"), page(folder)
    d = scores_of(records, "nearest") - fp32
    half = stats.t.ppf(0.975, 5) * d.std(ddof=1) / 6**0.5

    def offenders(prose):
        (folder / "001-rounding/README.md").write_text(empty.replace("## What follows", prose))
        capsys.readouterr()
        status = report.main(["--check"], folder, document)
        found = re.findall(r"README.md:(\d+): no record gives (.*)", capsys.readouterr().out)
        assert status == bool(found)
        return [number for _, number in found]

    mean, share = d.mean(), 100 * d.mean() / fp32.mean()
    base = fp32.mean()
    sound = f"{mean:+.4f} [{mean - half:+.3f}, {mean + half:+.2f}], {share:.1f} % of {base:.3f}"
    assert offenders(f"Nearest costs {sound}.") == []
    assert offenders(f"Nearest costs {mean + 0.0001:+.4f}.") == [f"{mean + 0.0001:+.4f}"]
    assert offenders(f"Nearest gains {-mean:+.4f}.") == [f"{-mean:+.4f}"], "a sign counts where it is written"
    assert offenders(f"It costs {share + 3:.1f} %.\nIt is fine.") == [f"{share + 3:.1f} %"]
    assert offenders("In 12 of 12 seeds of experiment 004, with `--lr 7e-7`, 8x8 and bf16, 64 samples.") == []
    assert offenders("It ran 777 steps.") == ["777"]
    assert offenders("It ran 777 steps. <!-- source: metrics.jsonl of 001/fp32 seed 0 -->") == []
    assert offenders("It ran 777 steps. <!-- somewhere -->") == ["777"]
    second(folder)
    write(folder, TOML, records)
    other = folder / "002-more/experiment.toml"
    other.write_text(other.read_text().replace('question = "Does', 'question = "At 0.987, does'))
    assert report.main([], folder, document) == 0
    assert offenders("It was 0.987.") == ["0.987"]
    assert offenders("It was 0.987 ([002](../002-more/README.md)).") == []
    toml = folder / "001-rounding/experiment.toml"
    toml.write_text(toml.read_text().replace("margin = 0.5", "margin = 0.5\nunchecked_prose = true"))
    assert offenders("It was 0.987.") == [], "switched off"


def test_a_source_is_computed_and_a_wrong_one_is_told(folder, capsys):
    experiment, document = definition.load("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    write(folder, TOML, records)
    assert report.main([], folder, document) == 0
    empty = page(folder)

    def offenders(line, source):
        prose = f"It is {line}. <!-- source: {source} -->"
        (folder / "001-rounding/README.md").write_text(empty.replace("## What follows", prose))
        capsys.readouterr()
        report.main(["--check"], folder, document)
        return re.findall(r"README.md:\d+: no record gives (.*)", capsys.readouterr().out)

    a, b = scores_of(records, "nearest"), scores_of(records, "fp32")
    d, share = (a - b)[2:5], 100 * (a / b - 1)
    half = stats.t.ppf(0.975, 2) * d.std(ddof=1) / 3**0.5
    minus = "ema.frechet of 001/nearest minus 001/fp32"
    sound = f"{d.mean():+.5f} [{d.mean() - half:+.5f}, {d.mean() + half:+.5f}], {a[3] - b[3]:+.5f} at one"
    assert offenders(sound, f"{minus}, seeds 2-4") == []
    assert offenders(f"{a[3] - b[3]:+.5f}", f"{minus}, seed 3") == []
    of_another = f"{a[0] - b[0]:+.5f}"
    assert offenders(of_another, f"{minus}, seeds 2-4") == [of_another]
    assert offenders(f"{b.mean():.5f}", minus) == [f"{b.mean():.5f}"], "on the page, and not what is named"
    over = "ema.frechet of 001/nearest over 001/fp32"
    assert offenders(f"{share.mean():+.3f} % [{share.min():+.3f}]", over) == []
    assert offenders(f"{share.mean() + 0.1:+.3f} %", over) == [f"{share.mean() + 0.1:+.3f} %"]
    both = f"{minus}; final_loss of 001/fp32"
    loss = np.array([r["final_loss"] for r in records if r["arm"] == "fp32"])
    assert offenders(f"{(a - b).mean():+.5f}, and the loss {loss.mean():.5f}", both) == []
    own = "ema.frechet of 001/nearest over final_loss of 001/fp32"
    assert offenders(f"{np.mean(a / loss):.4f}", own) == []
    for wrong, said in (
        ("ema.frechet of 001/near minus 001/fp32", "the source 001/near (no such arm)"),
        ("ema.frechet of 009/fp32", "the source 009/fp32 (no such arm)"),
        ("raw.beauty of 001/fp32", "the source raw.beauty of 001/fp32 (no such figure)"),
        (f"{minus}, seed 77", f"the source {minus}, seed 77 (no run of these seeds)"),
    ):
        assert offenders("fine", wrong) == [said]
    assert offenders("1.2345", "a measurement of the author") == [], "words"
