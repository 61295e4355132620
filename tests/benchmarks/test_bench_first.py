"""bench.py first: each task's first command to its end, and its record."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bench
import train
from benchmarks import first, memory

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "experiments" / "bench" / "cpu-first.json").read_text())
ROWS = {row["name"]: row for row in RECORD["results"]}


def test_a_first_command_is_run_to_its_end_and_seen(tmp_path):
    out = tmp_path / "record.json"
    asked = ["--only", "classify", "--steps", "4", "--threads", "1", "--out", str(out)]
    assert bench.main(["first", *asked]) == 0
    record = json.loads(out.read_text())
    [row] = record["results"]
    assert record["command"].endswith("--threads 1 --out record.json")  # no folder of this machine
    assert row["steps"] == 4 and row["command"] == "python train.py --task classify --steps 4"
    assert 0 < row["pictures"]["final.png"] < row["seconds"] and row["training_seconds"] < row["seconds"]
    assert 0 <= row["scores"]["accuracy"] <= 1 and "accuracy" in first.result(row)


def test_what_a_command_starts_from_is_run_before_it():
    assert first.with_needs(["distill", "latent"]) == ["vae", "latent", "teacher", "distill"]


def test_a_command_that_fails_ends_the_measurement_in_one_line(monkeypatch, capsys):
    broken = replace(first.FIRST_COMMANDS["classify"], flags="--task classify --data folder:nowhere")
    monkeypatch.setitem(first.FIRST_COMMANDS, "classify", broken)
    assert bench.main(["first", "--only", "classify"]) == 2
    said = capsys.readouterr().err.strip()
    assert "nowhere" in said and "exit status 2" in said and "\n" not in said


@pytest.mark.parametrize("first", first.FIRST_COMMANDS.values(), ids=first.FIRST_COMMANDS)
def test_first_commands_are_commands_of_train(first):
    train.build_parser().parse_args(first.flags.format(runs="runs").split())


def test_the_record_is_of_every_first_command_to_its_end():
    assert list(ROWS) == list(first.FIRST_COMMANDS)
    assert RECORD["settings"]["steps"] is None and RECORD["machine"]["clean"]
    assert all(row["seconds"] < 300 for row in ROWS.values()), "docs/speed.md: within five minutes"


def test_a_folder_that_holds_the_run_is_refused_since_it_would_go_on(tmp_path, capsys):
    (tmp_path / "classify").mkdir()
    assert bench.main(["first", "--only", "classify", "--steps", "4", "--runs", str(tmp_path)]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert not list((tmp_path / "classify").iterdir())


def test_a_billion_parameters_take_the_bytes_of_their_own_net():
    def parts(net, states):
        held = dict(weights=2.0, gradients=2.0, states=states)
        names = {memory.typed({k: v for k, v in flags.items() if k not in (*memory.EMULATED_FP8, "bf16")})
                 for flags in memory.ACTIVATION_RECIPES.values()}
        return [dict(net=net, flags=name, **held) for name in names]

    rows = [dict(net="b", recipe=name, batch=1, again=False, total=8) for name in memory.ACTIVATION_RECIPES]
    table = memory.billion_table(rows, parts("a", 9.0) + parts("b", 3.0), 1)
    assert " 3.0 |" in table and " 9.0 |" not in table
