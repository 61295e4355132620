"""Reflow: the teacher's pairs, the student's start, straight paths learnt from them, and broken pairs."""

import json
import os
import re
import shutil
from pathlib import Path

import cli
import pytest
import torch
from cli import (
    QUICK,
    assert_same,
    checkpoint,
    command,
    content,
    draw,
    no_training,
    one_line,
    quick,
    summary,
)
from generating import Recorder, batch, drawer, make, rmse
from safetensors.torch import load as load_pairs
from safetensors.torch import load_file
from safetensors.torch import save as save_pairs

from tasks import reflow
from tasks.generation import TIMESTEPS
from tasks.reflow import PAIRS_FILE, Reflow
from tasks.task import Rng
from trainer import Trainer

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

TEACHER = "runs/teacher"
REFLOW = ["--task", "reflow", "--teacher", TEACHER, "--pairs", 50, "--teacher_steps", 4]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A rectified flow with curved paths, and a teacher of another recipe that is hardly trained."""
    curved = "--steps 40 --batch_size 16 --lr 3e-3 --ema_decay 0.95"
    dit = "--steps 2 --model dit --size tiny/4 --velocity noise-clean --image_size 16 --pure_bf16 "
    dit += "--optimizer torchastic --ema_decay 0.5 --lr 3e-2 --guidance 3 --scores none"
    runs = {"teacher": [*QUICK, *curved.split()], "dit": [*QUICK, *dit.split()]}
    return cli.trained_once(tmp_path_factory, runs)


def student(*flags, steps=4, name="run"):
    return quick(*REFLOW, *flags, steps=steps, name=name)


def pairs(name="run"):
    return load_file(f"runs/{name}/{PAIRS_FILE}")


# ---- The task ----------------------------------------------------------------------------------------------


def test_the_loss_takes_the_noise_that_came_with_the_image(digits):
    task, (images, labels) = make(Reflow, digits), batch(digits, 16)
    noise = Rng(0).normal(*images.shape)
    both = torch.cat([images, noise], dim=1)

    def exact(x, t, labels):
        return images - noise

    assert float(task.loss(exact, (both, labels), Rng(1), 0)) == 0
    assert float(task.loss(lambda x, t, labels: noise - images, (both, labels), Rng(1), 0)) > 1
    net = Recorder()
    task.loss(net, (both, labels), Rng(1), 0)
    s = (net.t[0] / TIMESTEPS)[:, None, None, None]
    torch.testing.assert_close(net.x[0], (1 - s) * images + s * noise)


def test_the_loss_by_timestep_is_zero_where_paths_are_straight(digits, monkeypatch):
    monkeypatch.setattr(reflow, "BINS", 10)
    task, (images, labels) = make(Reflow, digits, sample_steps=7), batch(digits, 16)
    straight = task.loss_by_timestep(Recorder(0.3), images, labels, Rng(0))
    assert len(straight) == 10 and max(straight) < 1e-10

    def turning(x, t, labels):
        return torch.zeros_like(x) + (t / TIMESTEPS)[:, None, None, None]

    curved = task.loss_by_timestep(turning, images, labels, Rng(0))
    assert (
        curved == task.loss_by_timestep(turning, images, labels, Rng(0))
        and min(curved[0], curved[-1]) > 0.1 > 0.01 > curved[5]
    )


# ---- Learning ----------------------------------------------------------------------------------------------


def test_one_step_of_the_student_lands_nearer_to_the_teachers_end_than_one_of_the_teacher(teachers, capsys):
    flags = (
        "--pairs 128 --teacher_steps 6 --batch_size 16 --lr 3e-3 --ema_decay 0.95 --sample_steps 1".split()
    )
    assert student(*flags, steps=40) == 0
    noise, labels = Rng(99).normal(100, 1, 8, 8), torch.arange(100) % 10  # noise that was in no pair
    end = drawer(TEACHER)(labels, noise, 20)
    of_teacher, of_student = (rmse(drawer(path)(labels, noise, 1), end) for path in (TEACHER, "runs/run"))
    assert of_student < 0.7 * of_teacher, (of_student, of_teacher)
    assert "the teacher's pairs" in capsys.readouterr().err
    assert (
        student("--lr", 1e-9, "--sample_steps", 1, steps=1, name="start") == 0
    )  # the teacher, measured as a student
    bent, straight = (sum(summary(name)["scores"]["ema"]["loss_by_timestep"]) for name in ("start", "run"))
    assert straight < 0.5 * bent


def test_the_pairs_are_the_teachers_images_of_their_noise(teachers):
    assert student("--sample_batch", 20, steps=1) == 0
    found = pairs()
    assert {name: list(t.shape) for name, t in found.items()} == {
        "images": [50, 1, 8, 8],
        "noise": [50, 1, 8, 8],
        "labels": [50],
    }
    assert found["labels"].bincount().tolist() == [5] * 10 and 0.9 < float(found["noise"].std()) < 1.1
    torch.testing.assert_close(found["images"], drawer(TEACHER)(found["labels"], found["noise"], 4))
    assert student("--seed", 1, steps=1, name="other") == 0
    assert not torch.equal(pairs("other")["noise"], found["noise"])


@pytest.mark.parametrize("flags", ["--pure_bf16 --kahan", "--bf16 --set ema=bf16 --average 0.9:bf16"])
def test_the_student_starts_from_the_teachers_average_in_its_own_recipe(flags, teachers, monkeypatch):
    start = {}

    def not_train(run, *args):
        start.update({source: run.precision.weights(source) for source in ("raw", *run.precision.averages)})
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_train", not_train)
    assert student(*flags.split()) == 130
    average = checkpoint("teacher")["precision"]["averages"]["ema"]["shadow"]
    image = {name: value.bfloat16() for name, value in average.items()}
    if "kahan" in flags:
        for name, value in average.items():
            torch.testing.assert_close(start["raw"][name], value, rtol=2**-15, atol=0)
    else:
        assert_same(start["raw"], dict(average))
    assert_same(
        start["ema"], image if "ema=bf16" in flags else start["raw"]
    )  # an average starts at the value held
    if "--average" in flags:
        assert_same(start["0.9:bf16"], image)


def test_a_teacher_of_another_recipe_draws_in_its_own(teachers):
    """bf16 weights, the other sign, 16x16, guidance 3, and an optimiser that the student does not have."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    assert student("--teacher", "runs/dit", "--bf16", steps=2) == 0
    flags = json.loads(Path("runs/run/config.json").read_text())["flags"]
    assert [flags[k] for k in ("model", "size", "image_size", "velocity")] == [
        "dit",
        "tiny/4",
        16,
        "noise-clean",
    ]
    assert [flags[k] for k in ("guidance", "bf16", "pure_bf16")] == [1.0, True, False]
    found = pairs()
    assert found["images"].shape == (50, 1, 16, 16)
    torch.testing.assert_close(found["images"], drawer("runs/dit")(found["labels"], found["noise"], 4))
    assert rmse(found["images"], drawer("runs/dit", guidance=1.0)(found["labels"], found["noise"], 4)) > 1e-3
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    # and a student can teach
    assert student("--teacher", "runs/run/checkpoint.pt", name="third", steps=1) == 0
    torch.testing.assert_close(
        pairs("third")["images"], drawer("runs/run")(pairs("third")["labels"], pairs("third")["noise"], 4)
    )


# ---- Resume and several processes --------------------------------------------------------------------------


def test_pairs_that_are_gone_are_drawn_again(teachers):
    assert student() == 0 and student(name="again", steps=2) == 0
    Path(f"runs/again/{PAIRS_FILE}").unlink()
    assert student(name="again") == 0
    assert_same(pairs("again"), pairs())
    assert_same(checkpoint("again")["precision"], checkpoint()["precision"])


# ---- Without the teacher -----------------------------------------------------------------------------------


def test_a_student_draws_without_pairs_and_teacher(teachers, monkeypatch, tmp_path):
    assert student("--sample_steps", 1) == 0
    shutil.rmtree(TEACHER)
    Path(f"runs/run/{PAIRS_FILE}").unlink()
    assert draw(monkeypatch, "runs/run") == summary()["scores"]
    assert draw(monkeypatch, "runs/run", "--sample_steps", 3) != summary()["scores"]


def test_dry_run_draws_nothing_and_says_what_the_teacher_settles(teachers, monkeypatch, capsys):
    before = content(".")
    no_training(monkeypatch)
    monkeypatch.setattr(Reflow, "_draw", lambda *args: pytest.fail("it drew"))
    assert command(*REFLOW, "--teacher", "runs/dit", "--dry_run", "--pure_bf16") == 0
    out = capsys.readouterr().out
    for flag in (
        "--model=dit",
        "--size=tiny/4",
        "--image_size=16",
        "--velocity=noise-clean",
        "--pairs=50",
        "--teacher=runs/dit",
    ):
        assert flag in out.split()
    assert re.search(r"^weights +bf16 ", out, re.M) and content(".") == before


# ---- What does not fit -------------------------------------------------------------------------------------

CHANGES = {  # of the tensors in a file of pairs
    "fewer labels": lambda pairs: pairs.update(labels=pairs["labels"][1:].clone()),
    "a label too large": lambda pairs: pairs["labels"].fill_(10),
    "another dtype": lambda pairs: pairs.update(noise=pairs["noise"].half()),
    "not finite": lambda pairs: pairs["noise"].view(-1)[5].fill_(float("nan")),
    "no noise": lambda pairs: pairs.pop("noise"),
}


def test_pairs_of_another_teacher_and_broken_pairs_are_refused(teachers, capsys):
    assert student() == 0
    state = checkpoint("teacher")
    name, value = next(iter(state["precision"]["averages"]["ema"]["shadow"].items()))
    value.view(-1)[0] += 1e-3
    torch.save(state, f"{TEACHER}/checkpoint.pt")
    before = content("runs")
    capsys.readouterr()
    assert student(steps=6) == 2
    assert "tells of another teacher" in one_line(capsys) and content("runs") == before
    path = Path(f"runs/run/{PAIRS_FILE}")
    whole = path.read_bytes()
    for name, change in CHANGES.items():
        tensors = load_pairs(whole)
        change(tensors)
        path.write_bytes(save_pairs(tensors, metadata={"teacher": "any"}))
        before = content("runs")
        assert student(steps=6) == 2, name
        assert str(path) in one_line(capsys) and content("runs") == before
    path.unlink()
    os.mkfifo(path)
    assert student(steps=6) == 2
    assert "no file" in one_line(capsys)
    path.unlink()
    path.write_bytes(whole)
    for broken in (path.read_bytes()[:-5], b"", b"\x08\0\0\0\0\0\0\0{}      "):
        path.write_bytes(broken)
        before = content("runs")
        assert student(steps=6) == 2
        assert str(path) in one_line(capsys) and content("runs") == before


FORGED = {  # of the model and the average in a teacher's checkpoint
    "a tensor less": lambda model, average: model.pop(next(iter(model))),
    "a tensor more": lambda model, average: model.update(another=torch.zeros(3)),
    "no tensor in the average": lambda model, average: average.update({next(iter(average)): "text"}),
}


def test_a_teacher_that_does_not_fit_is_one_line(teachers, capsys):
    whole = Path(TEACHER, "checkpoint.pt").read_bytes()
    for forge in FORGED.values():
        Path(TEACHER, "checkpoint.pt").write_bytes(whole)
        state = checkpoint("teacher")
        forge(state["precision"]["model"], state["precision"]["averages"]["ema"]["shadow"])
        torch.save(state, f"{TEACHER}/checkpoint.pt")
        assert student() == 2
        one_line(capsys)


def test_a_teacher_whose_images_are_not_finite_is_refused(teachers, capsys):
    state = checkpoint("teacher")
    next(iter(state["precision"]["averages"]["ema"]["shadow"].values())).fill_(float("nan"))
    torch.save(state, f"{TEACHER}/checkpoint.pt")
    assert student() == 2
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not Path(f"runs/run/{PAIRS_FILE}").exists()
