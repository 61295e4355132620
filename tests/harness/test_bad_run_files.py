"""Files of a run that are damaged, another's, or closed: one line and status 2, and nothing is changed."""

import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import attacked
import numpy as np
import pytest
from attacked import BASE, DEEP, again, arrays, is_refused, line_of
from cli import after_step, checkpoint, command
from rank_server import ask

from harness import run_folder

trained, mine = attacked.trained, attacked.mine

# ---- Files of a run ----------------------------------------------------------------------------------------

JSON = {  # in place of a JSON file
    "half": b'{"flags": {"lr": 0.001',
    "binary": bytes(range(256)),
    "a list": b"[1]",
    "deep": DEEP,
}
OF_METRICS = {
    "binary": bytes(range(256)) + b"\n",
    "a list": b"[1]\n",
    "deep": DEEP + b"\n",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("file, steps", [("config.json", 3), ("summary.json", 2)])
@pytest.mark.parametrize("name", JSON)
def test_json_that_is_damaged(file, steps, name, mine, capsys):
    (mine / file).write_bytes(JSON[name])
    assert file in is_refused(capsys, lambda: again(steps=steps))


@pytest.mark.parametrize("name", OF_METRICS)
def test_metrics_jsonl(name, mine, capsys):
    path = mine / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + OF_METRICS[name])
    assert "metrics.jsonl" in is_refused(capsys, again)
    if name == "binary":
        assert "metrics.jsonl" in is_refused(capsys, command, "--diagnose", "runs/run")


DAMAGES = {  # of lines that are JSON still
    "none": lambda lines: lines,
    "cut": lambda lines: lines[:1],
    "another step": lambda lines: [lines[0].replace(b'"step": 1', b'"step": 2'), *lines[1:]],
    "no step": lambda lines: [b'{"loss": 1}\n', *lines[1:]],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_lines_of_metrics_that_this_run_has_not_written_are_said(name, mine, capsys):
    path = mine / "metrics.jsonl"
    path.write_bytes(b"".join(DAMAGES[name](path.read_bytes().splitlines(keepends=True))))
    capsys.readouterr()
    assert again() == 0
    said = "curves may lie" in capsys.readouterr().err
    assert said == (name not in ("none", "no step"))


@pytest.mark.parametrize("file", ["config.json", "checkpoint.pt", "metrics.jsonl", "summary.json", ".lock"])
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to a device"])
def test_something_else_in_place_of_a_file(file, kind, mine, capsys):
    path = mine / file
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    steps = 2 if file == "summary.json" else 3
    is_refused(capsys, lambda: again(steps=steps))
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("file", ["thesis.tex", "a.part", "config.json.old"])
def test_a_folder_of_someone_elses_is_refused(file, capsys):
    Path("runs/run").mkdir(parents=True)
    Path("runs/run", file).write_text("mine")
    assert "holds no run" in is_refused(capsys, again)


def test_a_folder_of_partial_files_alone_is_none(capsys):
    """What a process that was killed before its first file was whole leaves, and what desktops leave."""
    Path("runs/run").mkdir(parents=True)
    for name in ("config.json.part", "config.json.4711.part", ".DS_Store", ".lock", "checkpoint.pt.1.part"):
        Path("runs/run", name).write_text("half")
    assert again(steps=1) == 0
    left = {path.name for path in Path("runs/run").glob("*.part")}
    assert left <= {"config.json.part"}  # of the old form, which had no number


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--lr", 1e-4], "--lr was 0.001 and is 0.0001"),
        (["--pure_bf16"], "--pure_bf16 was False and is True"),
        (["--model", "vit"], "--model was cnn and is vit"),
        (["--set", "ema=bf16"], "--set was [] and is ['ema=bf16']"),
        (["--steps", 1], "has 2 steps behind it, and --steps is 1"),
    ],
)
def test_a_folder_of_other_flags_is_refused(flags, said, mine, capsys):
    line = is_refused(capsys, again, *flags)
    assert said in line and "--name" in line


def test_a_folder_from_before_a_flag_existed_goes_on(mine, capsys):
    old = json.loads((mine / "config.json").read_text())
    del old["flags"]["loss_weight"]
    (mine / "config.json").write_text(json.dumps(old))
    assert "--loss_weight was 1.0 and is 7.0" in is_refused(capsys, again, "--loss_weight", "7")
    assert again() == 0


# ---- A full disk -------------------------------------------------------------------------------------------


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_space_for_a_checkpoint(mine, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        after_step(patch, 5, lambda run: patch.setattr(os, "fsync", full))
        assert "no space left" in line_of(capsys, again("--checkpoint_every", 2, steps=8))
    assert checkpoint()["step"] == 4 and not list(Path("runs").rglob("*.part"))
    assert again("--checkpoint_every", 2, steps=8) == 0


def test_no_space_for_a_line_of_metrics(monkeypatch, capsys):
    monkeypatch.setattr(run_folder.Folder, "log", full)
    assert "no space left" in line_of(capsys, again())


# ---- What may not be read, or written ----------------------------------------------------------------------


@pytest.fixture
def bound(trained, monkeypatch):
    """bound(*words) -> (exit status, what was said) of train.py in the folder of a run, by a process that the
    modes of files bind.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as messages:
        monkeypatch.chdir(folder)
        shutil.copytree(trained, "runs")
        np.savez("data.npz", **arrays())

        def act(*words):
            status = ask("wait", ask("bound", list(map(str, words)), folder, messages.name))
            return status, messages.read()

        yield act
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o700)


MEDMNIST = ["--data", "medmnist:data.npz"]
AGAIN = [*BASE, "--name", "run", "--steps", 3]
CLOSED = {  # (file, its mode, what is asked)
    "config.json": ("runs/run/config.json", 0, AGAIN),
    "checkpoint.pt": ("runs/run/checkpoint.pt", 0, AGAIN),
    "the folder": ("runs/run", 0, AGAIN),
    "a run that is read-only": ("runs/run", 0o500, AGAIN),
    "runs that are read-only": ("runs", 0o500, [*BASE, "--name", "new", "--steps", 1]),
    "sampling of a read-only run": ("runs/run/samples", 0o500, ["--sample", "runs/run"]),
    "diagnosis": ("runs/run/checkpoint.pt", 0, ["--diagnose", "runs/run"]),
    "data": ("data.npz", 0, [*BASE, *MEDMNIST, "--steps", 1]),
    "an export": ("runs", 0o500, [*AGAIN, "--export", "runs/x.safetensors"]),
}


def test_nothing_is_refused_as_long_as_nothing_is_closed(bound):
    status, said = bound(*AGAIN)
    assert status == 0 and "train.py: " not in said, said


@pytest.mark.parametrize("name", CLOSED)
def test_what_may_not_be_read_or_written(name, bound):
    path, mode, words = CLOSED[name]
    Path(path).chmod(mode)
    status, said = bound(*words)
    lines = [line for line in said.split("\n") if line and "step/s" not in line and line != "scoring ..."]
    assert status == 2 and len(lines) == 1 and lines[0].startswith("train.py: "), said


# ---- A folder that changes while its run trains ------------------------------------------------------------

TASK = """
import os, shutil
from pathlib import Path
from tasks.classify import Classify

class Mine(Classify):
    def loss(self, model, batch, rng, step):
        run = Path("runs/run")
        if step == 5 and not Path("done").exists():
            Path("done").touch()
            SPOIL
        return super().loss(model, batch, rng, step)
"""
# until it is gone: TensorBoard's thread may put a file into what is being deleted
GONE = "while os.path.exists({0}): shutil.rmtree({0}, ignore_errors=True)"
SPOILS = {
    "deleted": GONE.format("run"),
    "emptied": "[file.unlink() for file in run.iterdir() if file.is_file()]",
    "runs deleted": GONE.format("'runs'"),
}
MINE = "--task mine.py:Mine --batch_size 8 --log_every 1 --checkpoint_every 2 --warmup 0 --name run".split()


def spoiled(spoil, steps=8):
    Path("mine.py").write_text(TASK.replace("SPOIL", spoil))
    sys.modules.pop("task_mine", None)
    return command(*MINE, "--sample_every", 0, "--steps", steps)


@pytest.mark.parametrize("name", SPOILS)
def test_a_folder_that_is_taken_away_is_written_again(name, capsys):
    assert spoiled(SPOILS[name]) == 0
    assert capsys.readouterr().err.count("was deleted or moved while it trained") == 1
    rows = Path("runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 9))
    assert {"config.json", "ledger.json", "env.json", "summary.json"} <= set(os.listdir("runs/run"))
    assert spoiled("", steps=10) == 0  # it resumes


def test_another_run_in_the_place_of_ours_stays_as_it_is(trained, capsys):
    assert spoiled(f"run.rename('runs/other'); shutil.copytree('{trained}/run', run)") == 2
    line = line_of(capsys, 2)
    assert "another run is there now" in line
    for path in (trained / "run").glob("*.json*"):
        assert (Path("runs/run") / path.name).read_bytes() == path.read_bytes()
