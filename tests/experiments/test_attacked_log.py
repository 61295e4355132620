"""Definitions and records of experiments that hold nonsense: one line, status 2, and nothing is changed."""

from pathlib import Path

import lab
import pytest
from attacked import DEEP, as_format
from cli import content

from experiments import report, run
from experiments.log import figures

TOML = {  # in place of a part of the definition of an experiment
    "margin = 0.5": ["margin = inf", "margin = nan", "margin = 0", "margin = 'x'", "margin = [1]"],
    'metric = "ema.frechet"': ["metric = 3", "metric = ['a']"],
    "seeds = [0, 1, 2, 3, 4, 5]": [
        "seeds = []",
        "seeds = ['0']",
        "seeds = [0, 0]",
        "seeds = [-1]",
        "seeds = 1",
    ],
    'flags = ["--pure_bf16"]': [
        "flags = ['--export', '/any/path']",
        "flags = ['--name=x']",
        "flags = ['--runs', '/']",
        "flags = ['--config', 'x']",
        "flags = [1]",
        "flags = '--bf16'",
        "flags = ['--stepz']",
    ],
    'name = "nearest"': ["name = '../x'", "name = 'fp32'", "name = 3", "name = ''", 'name = "a\\u001b"'],
    'of = "fp32"': ["of = 'nobody'", "of = 'sampler'", "of = 3", "of = '../x'", "of = '999/fp32'"],
    'baseline = "fp32"': ["baseline = 'nobody'", "unknown = 1", "baseline = " + "[" * 5000],
}


@pytest.mark.parametrize("old,new", [(o, n) for o, news in TOML.items() for n in news], ids=lambda x: x[:30])
def test_an_experiments_definition(old, new, capsys, tmp_path):
    assert old in lab.TOML
    lab.write(tmp_path / "experiments", lab.TOML.replace(old, new, 1))
    before = content(tmp_path)
    assert run.main(["001", "--seeds", "0", "--runs", str(tmp_path / "runs"), "--dry_run"]
                    if "stepz" not in new else ["001", "--seeds", "0", "--runs", str(tmp_path / "runs")],
                    tmp_path / "experiments") == 2  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run.py: ") and content(tmp_path) == before


LINES = ["[1]", "3", "null", "x", '{"arm": "fp32"}', DEEP.decode(), "\0", '{"a":' * 10**5, "9" * 5000]


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:20]))
def test_a_line_of_results(line, capsys, tmp_path):
    root = tmp_path / "experiments"
    lab.write(root, lab.TOML)
    (root / "001-rounding/results.jsonl").write_text(line + "\n")
    assert report.main([], root, tmp_path / "EXPERIMENTS.md") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("report.py: ")
    assert run.main(["001", "--dry_run"], root) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run.py: ")


def test_a_range_of_seeds_that_fills_the_memory_is_refused(tmp_path, capsys):
    lab.write(tmp_path, lab.TOML)
    assert run.main(["001", "--seeds", "0-10000000000", "--dry_run"], tmp_path) == 2
    assert "--seeds 0-10000000000" in capsys.readouterr().err


def test_who_calls_it_keeps_the_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lab.write(tmp_path / "experiments", lab.TOML)
    for words in (["001", "--dry_run"], ["001", "--seeds", "99"]):
        run.main(words, tmp_path / "experiments")
        assert Path.cwd() == tmp_path
    capsys.readouterr()


def test_a_picture_of_the_log_opens_as_a_png_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: pytest.fail("Ghostscript"))
    path = tmp_path / "sizes.png"
    for kind in ("EPS", "GIF"):
        path.write_bytes(as_format(kind))
        assert figures.drawn_from(path) is None
