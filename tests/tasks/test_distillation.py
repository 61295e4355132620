"""Progressive distillation: two of the teacher's steps in float64, times, what is learnt, rounds in a chain,
and another teacher.
"""

import json
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
    one_line,
    summary,
)
from generating import Recorder, batch, make, rmse

import strategies
import train
from tasks import generation
from tasks.diffusion import RFlow
from tasks.distillation import Distill
from tasks.task import Rng
from trainer import Trainer

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

TEACHER = "runs/teacher"
DISTILL = ["--task", "distill", "--teacher", TEACHER]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs that are hardly trained."""
    runs = {
        "teacher": "",
        "backward": "--velocity noise-clean --pure_bf16 --guidance 2",
        "half2": "--task distill --teacher teacher --teacher_steps 4",
    }
    runs = {name: [*QUICK, "--steps", 1, *flags.split()] for name, flags in runs.items()}
    return cli.trained_once(tmp_path_factory, runs)


def student(*flags, name="run", steps=4):
    return command(*QUICK, *DISTILL, *flags, "--steps", steps, "--name", name)


def curved(x, t, labels):
    """A velocity field that a few large steps can't follow."""
    s = (t / 1000)[:, None, None, None].to(x.dtype)
    return torch.sin(3 * s + x) - x * s + 0.1 * labels[:, None, None, None]


def taught(digits, steps=8, **flags):
    task = make(Distill, digits, teacher="x", teacher_steps=steps, **flags)
    task.live = make(RFlow, digits, **flags), curved
    return task


# ---- What is learnt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.parametrize("velocity", ["clean-noise", "noise-clean"])
def test_two_steps_of_the_teacher_written_out(velocity, steps, digits):
    """In float64, step after step, from each of the student's times."""
    task, x, labels = taught(digits, steps, velocity=velocity), batch(digits)[0], torch.arange(16) % 10
    times = [*task.live[0].times(steps), 0]
    assert task.starts.flip(0).tolist() == times[0:-1:2] == task.times(steps // 2)
    sign = 1 if velocity == "clean-noise" else -1
    for start, middle, end in zip(times[0::2], times[1::2], times[2::2], strict=False):
        there = x.double()
        for now, then in ((start, middle), (middle, end)):
            at = torch.full((16,), now, dtype=torch.float64)
            there = there + sign * (now - then) / 1000 * curved(there, at, labels)
        wanted = sign * (there - x.double()) * 1000 / (start - end)
        found = task.wanted(x, labels, torch.full((16,), float(start)))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_who_learnt_it_lands_in_half_the_steps_where_the_teacher_does(digits):
    task, noise, labels = taught(digits), Rng(0).normal(16, 1, 8, 8), torch.arange(16) % 10

    def perfect(x, t, labels):
        return task.wanted(x, labels, t)

    wanted = task.live[0].sample(curved, labels, noise, 8)
    torch.testing.assert_close(task.sample(perfect, labels, noise, 4), wanted, rtol=1e-4, atol=1e-4)
    assert rmse(task.sample(curved, labels, noise, 4), wanted) > 0.02
    held = batch(digits, 64)
    assert task.loss(perfect, held, Rng(0), 0) < 1e-9 < 1e-3 < task.loss(curved, held, Rng(0), 0)


def test_it_is_trained_at_its_own_times_alone(digits):
    task, net = taught(digits), Recorder()
    for seed in range(8):
        task.loss(net, batch(digits, 32), Rng(seed), 0)
    counts = torch.cat(net.t).unique(return_counts=True)
    assert counts[0].tolist() == [250.0, 500.0, 750.0, 1000.0] and counts[1].min() > 40
    assert len(task.loss_by_timestep(net, *batch(digits, 32), Rng(0))) == generation.BINS


def test_only_the_student_is_taught(teachers):
    assert student(steps=1) == 0
    run = Trainer(strategies.settle({**train.DEFAULTS, **checkpoint()["config"]}), draws=True)
    run.task.train_set(run)
    task, net = run.task.live
    before = {name: p.clone() for name, p in net.net.named_parameters()}
    run.precision.backward(run.task.loss(run.precision, batch(run.data), Rng(0), 0))
    assert all(p.grad is not None for p in run.precision.params)
    run.precision.step()
    assert all(p.grad is None and not p.requires_grad for p in net.net.parameters())
    assert_same({name: p.detach() for name, p in net.net.named_parameters()}, before)


# ---- Rounds ------------------------------------------------------------------------------------------------


def test_a_round_starts_from_the_last_one_and_halves_its_steps(teachers):
    assert student(steps=1, name="eight") == 0
    flags = json.loads(Path("runs/eight/config.json").read_text())["flags"]
    assert flags["teacher_steps"] == 8 and flags["sample_steps"] == 2  # QUICK says two
    few = "--batch_size 8 --samples 20 --sample_every 0".split()
    assert command(*few, *DISTILL, "--steps", 1, "--name", "four") == 0
    assert json.loads(Path("runs/four/config.json").read_text())["flags"]["sample_steps"] == 4
    assert student("--lr", 1e-12, "--teacher", "runs/half2", "--ema_decay", 0.0, name="last", steps=1) == 0
    average = checkpoint("half2")["precision"]["averages"]["ema"]["shadow"]
    for name, value in checkpoint("last")["precision"]["model"].items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=1e-9)


def test_a_teacher_draws_in_its_own_recipe_with_its_own_guidance(teachers):
    assert student("--teacher", "runs/backward", "--kahan", "--pure_bf16", steps=2) == 0
    flags = json.loads(Path("runs/run/config.json").read_text())["flags"]
    assert flags["velocity"] == "noise-clean" and flags["guidance"] == 1.0
    run = Trainer(strategies.settle({**train.DEFAULTS, **flags}), draws=True)
    run.task.train_set(run)
    task, net = run.task.live
    assert task.recipe.weights == "bf16" and task.sign == -1 and task.config.guidance == 2
    x, labels, t = Rng(0).normal(4, 1, 8, 8), torch.arange(4), torch.full((4,), 500.0)
    velocity = net(x, t, labels)
    null = net(x, t, torch.full((4,), 10))
    wanted = x - 0.1 * (null + 2 * (velocity - null))
    torch.testing.assert_close(run.task.teach(x, labels, t, t - 100), wanted, rtol=1e-2, atol=1e-2)


# ---- Resume ------------------------------------------------------------------------------------------------


def test_another_teacher_is_refused_and_none_is_needed_to_draw(teachers, monkeypatch, capsys):
    assert student() == 0
    state = checkpoint("teacher")
    next(iter(state["precision"]["averages"]["ema"]["shadow"].values())).view(-1)[0] += 1e-3
    torch.save(state, f"{TEACHER}/checkpoint.pt")
    before = content("runs")
    capsys.readouterr()
    assert student(steps=6) == 2
    assert "tells of another teacher" in one_line(capsys) and content("runs") == before
    shutil.rmtree(TEACHER)
    assert draw(monkeypatch, "runs/run") == summary()["scores"]
    assert train.main(["--diagnose", "runs/run"]) == 2


# ---- What does not fit -------------------------------------------------------------------------------------
