"""What a user may get wrong in an experiment: each ends in one line."""

import signal

import pytest
import test_experiments
from attacked import as_format
from lab import TOML, commands, fails, record, records_of, write

from experiments import report, run
from experiments.log import definition, figures
from experiments.log import records as log
from harness import run_folder
from harness.ending import ended_by

fake = test_experiments.fake
folder = test_experiments.folder


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("margin = 0.5", "margin = 0.5\nmargins = 1", "unknown key 'margins'"),
        ('prediction = "Yes."\n', "", "'prediction' is missing"),
        ("margin = 0.5", 'margin = "small"', "margin is a float"),
        ("margin = 0.5", "margin = ", "can't read"),
        ('baseline = "fp32"', 'baseline = "fp64"', "no arm 'fp64'"),
        ('of = "fp32"', 'of = "sampler"', "leads back to itself"),
        ('flags = ["--pure_bf16"]', 'flags = ["--pure_bf16"]\nafter = "fp32"', "{after} stands in its flags"),
        ('of = "fp32"', 'of = "7/fp32"', "no experiment 007"),
        ('name = "nearest"', 'name = "fp32"', "two arms have one name"),
        ('name = "nearest"', 'name = "../x"', "names of arms become folders"),
        ("seeds = [0, 1, ", "seeds = [0, 0, ", "seed is listed twice"),
        ('"4", "--batch', '4, "--batch', "flags are strings"),
        ("margin = 0.5", "margin = inf", "margin must be above 0, and finite"),
        ('of = "fp32"', 'of = "fp32"\nprocesses = 2', "has no processes"),
        ('of = "fp32"', 'of = "fp32"\nmarked = "guessed"', "marked is one of"),
        ('"--pure_bf16"', '"--export", "/tmp/net.safetensors"', "--export is no flag of an arm"),
        ('["--steps", ', '["--seed", "7", "--steps", ', "--seed is no flag of an arm"),
    ],
)
def test_a_wrong_toml_is_one_line(folder, capsys, old, new, said):
    assert old in TOML
    write(folder, TOML.replace(old, new, 1))
    assert said in fails(capsys, folder, "001", "--dry_run")
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 2


def test_a_file_where_runs_would_be_kept(folder, fake, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    said = fails(capsys, folder, "001", "--arm", "fp32", "--seeds", "0", "--runs", str(tmp_path / "file"))
    assert "choose another --runs folder" in said


def test_nothing_is_recorded_while_the_code_has_changes(folder, fake, capsys, monkeypatch):
    changed = {**run_folder.environment("cpu"), "clean": False}
    monkeypatch.setattr(run, "environment", lambda device: changed)
    results = folder / "001-rounding" / "results.jsonl"
    before = results.read_bytes() if results.exists() else None
    assert "in no commit" in fails(capsys, folder, "001", "--retry")
    assert (results.read_bytes() if results.exists() else None) == before
    assert run.main(["001", "--dry_run"], folder) == 0


def test_an_arm_that_samples_may_draw_from_another_seed(folder, capsys):
    assert 'of = "fp32"\nflags = [' in TOML
    write(folder, TOML.replace('of = "fp32"\nflags = [', 'of = "fp32"\nflags = ["--seed", "7", ', 1))
    assert run.main(["001", "--dry_run", "--seeds", "0"], folder) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if "--sample" in line]
    assert any("--seed 7 " in line and line.endswith("sampler-seed0") for line in drawn)


def test_unknown_experiment_arm_and_seed_name_what_exists(folder, capsys):
    assert "001-rounding" in fails(capsys, folder, "002")
    assert "fp32, nearest, sampler" in fails(capsys, folder, "001", "--arm", "kahan")
    assert "[0, 1, 2, 3, 4, 5]" in fails(capsys, folder, "001", "--seeds", "6")
    assert "'first' is not a seed" in fails(capsys, folder, "001", "--seeds", "first")
    assert "'0-10000000000' is not" in fails(capsys, folder, "001", "--seeds", "0-10000000000")
    assert "'3-1' is not a seed" in fails(capsys, folder, "001", "--seeds", "3-1")
    assert "no record of arm fp32, seed 0" in fails(capsys, folder, "001", "--check")
    assert "add --check" in fails(capsys, folder, "001", "--note")


def test_a_flag_that_train_refuses_stops_before_the_first_run_and_so_does_a_signal(folder, capsys, tmp_path):
    write(folder, TOML.replace('"--pure_bf16"', '"--pure_bf61"'))
    assert "arm nearest: unrecognized arguments: --pure_bf61" in fails(capsys, folder, "001")
    write(folder, TOML.replace('"--pure_bf16"', '"--stochastic"'))
    assert "add --pure_bf16" in fails(capsys, folder, "001")
    (tmp_path / "asked.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    write(folder, TOML.replace('"--pure_bf16"', f'"--task", "{tmp_path}/asked.py:Task"'))
    with ended_by(signal.SIGTERM):
        assert run.main(["001"], folder) == 128 + signal.SIGTERM
    assert not (folder / "001-rounding/results.jsonl").read_text()


def test_only_a_half_written_last_line_is_forgiven(folder, capsys):
    experiment, path = definition.load_experiment("1", folder), folder / "001-rounding/results.jsonl"
    write(folder, TOML, records_of(experiment))
    whole = path.read_text()
    path.write_text(whole[:-200])
    arms = map(experiment.arm, ("fp32", "sampler"))
    assert commands(capsys, folder) == [definition.typed_run(arm, 5) for arm in arms]
    assert len(log.read_records(path, repair=True)) == 17
    assert "half written" in capsys.readouterr().err
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:-1])
    path.write_text(whole[200:])
    assert "line 1: it is no" in fails(capsys, folder, "001")
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 2
    # whole, without its line end: kept, and the next line starts on its own
    path.write_text(whole.rstrip("\n"))
    assert len(log.read_records(path, repair=True)) == 18 and path.read_text() == whole


@pytest.mark.parametrize("scores", [{}, {"ema": {"frechet": None}}])
def test_a_record_without_the_score_that_is_read_is_one_line(folder, capsys, scores):
    experiment = definition.load_experiment("1", folder)
    write(folder, TOML, [{**record(experiment, "fp32", 0, 1.0), "scores": scores}])
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 2
    assert "no score 'ema.frechet'" in capsys.readouterr().err


def test_results_of_other_flags_are_not_mixed_in(folder, capsys):
    records = records_of(definition.load_experiment("1", folder))
    write(folder, TOML.replace('"--steps", "4"', '"--steps", "5"'), records)
    assert "other flags than experiment.toml" in fails(capsys, folder, "001")
    write(folder, TOML.replace('name = "nearest"', 'name = "near"'), records)
    assert "arm nearest, seed 0 was run with other flags" in fails(capsys, folder, "001")


def test_a_picture_of_the_log_opens_as_a_png_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: pytest.fail("Ghostscript"))
    (tmp_path / "sizes.png").write_bytes(as_format("EPS"))
    assert figures.drawn_from(tmp_path / "sizes.png") is None
