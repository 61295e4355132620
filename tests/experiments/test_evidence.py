"""Figures of arms in a text, as experiments/front.md has them."""

import pytest
from lab import TOML, draw_quickly, records_of, write

from experiments import report
from experiments.log import definition
from experiments.log.evidence import Evidence, filled_text
from experiments.log.records import recorded
from lowprec.errors import Refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_quickly(monkeypatch)
    write(tmp_path / "experiments", TOML)
    experiment = definition.load_experiment("1", tmp_path / "experiments")
    write(tmp_path / "experiments", TOML, records_of(experiment))
    return tmp_path / "experiments"


def evidence_of(folder):
    experiment = definition.load_experiment("1", folder)
    return Evidence([experiment], recorded(experiment))


def test_a_placeholder_is_filled_with_the_figure_of_its_arm(folder):
    evidence = evidence_of(folder)
    scores = [r["scores"]["ema"]["frechet"] for key, r in evidence.known.items() if key[1] == "nearest"]
    assert filled_text("{001/nearest.mean}: real", evidence) == f"{sum(scores) / 6:.3f}: real"


@pytest.mark.parametrize(
    "text, words",
    [
        ("{002/fp32.mean}", "there is no such figure"),
        ("{001/bf16.mean}", "has no arm 'bf16'"),
        ("{001/nearest.harmony}", "it takes an experiment, an arm, one of mean, held_out"),
    ],
)
def test_a_placeholder_without_a_figure_is_refused_in_one_line(folder, text, words, capsys):
    with pytest.raises(Refused, match=words):
        filled_text(text, evidence_of(folder))
    (folder / "front.md").write_text(text)
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("report.py: front.md: ") and err.count("\n") == 1


def test_an_arm_that_was_not_run_has_no_figure(folder):
    (folder / "001-rounding/results.jsonl").write_text("")
    with pytest.raises(Refused, match="there is no such figure"):
        filled_text("{001/nearest.mean}", evidence_of(folder))


def test_a_training_loss_is_no_held_out_loss(folder):
    evidence = evidence_of(folder)
    for record in evidence.known.values():
        del record["scores"]["ema"]["loss_by_timestep"]
    with pytest.raises(Refused, match="there is no such figure"):
        evidence.figure("001/nearest.held_out")
