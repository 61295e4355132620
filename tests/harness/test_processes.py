"""train.py on two processes, which share each batch: they learn what one process learns, and resume."""

import shutil
from pathlib import Path

import cli
import generating
import pytest
import rank_server
import torch
from cli import LOOP, QUICK, SEGMENT, assert_same, checkpoint, command, metrics, quick, summary
from rank_server import ranks_messages, told
from safetensors.torch import load_file

from tasks.reflow import PAIRS_FILE

teachers = generating.teachers
ranks = rank_server.ranks
BF16 = ["--pure_bf16", "--stochastic", "--accumulate", 2, "--set", "accumulate=fp32"]


@pytest.fixture
def two(ranks):
    """two(*flags): train.py on two processes."""

    def train(*flags):
        assert ranks(2, None, *flags) == [0, 0], ranks_messages(ranks)

    return train


def weights(name):
    """The trained weights of a run as one vector."""
    found = [tensor.double().flatten() for tensor in checkpoint(name)["precision"]["model"].values()]
    return torch.cat(found)


def difference(a, b):
    """|a - b| over |b| of the weights of two runs."""
    return float((weights(a) - weights(b)).norm() / weights(b).norm())


def test_they_train_what_one_does_and_resume(two, ranks):
    flags = [*QUICK, "--name", "two", "--checkpoint_every", 2]
    two(*flags, "--steps", 3)
    assert ranks.printed().count("real (floor)") == 1  # one rank speaks
    shutil.copytree("runs/two", "runs/less")
    two(*flags, "--steps", 6)
    assert quick("--checkpoint_every", 2, name="one", steps=6) == 0
    assert difference("two", "one") < 1e-4 < difference("less", "one")
    assert [row["step"] for row in metrics("two")] == [2, 3, 4, 6]
    mine, other = metrics("two")[-1], metrics("one")[-1]
    assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    scores = [summary(name)["scores"]["ema"]["frechet"] for name in ("two", "one")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-2)


def test_pure_bf16_with_accumulation_and_a_bf16_reduction(two):
    two(*QUICK, *BF16, "--set", "reduce=bf16", "--name", "two", "--steps", 4)
    assert quick(*BF16, name="one") == 0 and quick(*BF16, name="less", steps=3) == 0
    assert difference("two", "one") < difference("less", "one")
    mine, other = metrics("two")[-1], metrics("one")[-1]
    assert mine["loss"] == pytest.approx(other["loss"], rel=0.01)
    assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)


def test_the_smallest_batch_size_that_one_of_them_finds_is_that_of_both(ranks):
    words = [word for word in QUICK if word not in ("--batch_size", "8")]
    words += ["--name", "run", "--steps", "2", "--threads", "1", "--batch_size", "auto"]
    assert ranks(2, "auto", [16, 4], *words) == [0, 0], ranks_messages(ranks)
    assert ranks.printed().count("--batch_size auto: 8 (") == 1
    assert checkpoint()["config"]["batch_size"] == 8 and checkpoint()["step"] == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux alone tells the names of threads")
def test_no_thread_of_the_process_group_outlives_a_run(ranks):
    """One that lets go of a tensor while Python ends aborts its process, and the run with it."""
    words = [*QUICK, "--name", "run", "--steps", "2"]
    assert told(ranks, 2, "threads_left", words) == []


@pytest.mark.parametrize("verb", ["--sample", "--diagnose"])
def test_what_one_process_does_is_refused_in_one_line(verb, ranks):
    assert quick(*SEGMENT, steps=1) == 0
    assert ranks(2, None, verb, "runs/run") == [2, 2], ranks_messages(ranks)
    alone = f"{verb} is the work of one process: start it by python, not by torchrun"
    assert ranks.said() == [f"train.py: {alone}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run of a teacher that is hardly trained."""
    return cli.trained_once(tmp_path_factory, {"teacher": [*QUICK, "--steps", 2]})


def test_reflow_draws_and_learns_what_one_does_and_resumes(teachers, two):
    flags = [*LOOP, *"--samples 20 --sample_steps 2 --task reflow --teacher runs/teacher".split()]
    flags += ["--pairs", 50, "--teacher_steps", 4, "--sample_batch", 8]
    two(*flags, "--name", "two", "--steps", 4)
    assert command(*flags, "--name", "one", "--steps", 6) == 0
    assert_same(*(load_file(f"runs/{name}/{PAIRS_FILE}") for name in ("two", "one")))
    two(*flags, "--name", "two", "--steps", 6)
    assert [row["step"] for row in metrics("two")] == [2, 4, 6]
    assert difference("two", "one") < 1e-4
