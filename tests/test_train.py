"""The command: every task and recipe for a few steps, the run's folder, resume bit for bit, several
processes.
"""

import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import cli
import numpy as np
import pytest
import torch
from cli import (
    ROOT,
    after_step,
    assert_same,
    checkpoint,
    command,
    content,
    draw,
    finished,
    metrics,
    no_training,
    picture,
    quick,
    summary,
)
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import bench
import strategies
import train
import trainer
from lowprec import __main__ as lowprec_command
from lowprec.kernels import cpu_step
from tasks import generation, task
from tasks import metrics as metrics_module

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

# ---- The run and its folder --------------------------------------------------------------------------------

RECIPES = {  # flags: sites as the ledger must show them
    "": {"weights": "fp32", "compute": "fp32", "exp_avg": "fp32", "ema": "fp32"},
    # CPUs emulate fp16: draw without
    "--fp16 --batch_size 2 --set generation=fp32": {"weights": "fp32", "compute": "fp16"},
    "--opt8bit --optimizer bitsandbytes": {"exp_avg": "int8", "exp_avg_sq": "int8"},
    "--pure_bf16 --stochastic --opt4bit": {"exp_avg": "int4", "update": "stochastic", "sampler": "fp32"},
    "--pure_bf16 --stochastic --weights both --average 0.9:bf16": {"update": "stochastic"},
}


def check_folder(name, generated=True):
    folder = Path("runs", name)
    flags = json.loads((folder / "config.json").read_text())
    read = strategies.flag_table(flags["flags"]["task"]).defaults()
    assert flags["command"].startswith("train.py ") and flags["flags"].keys() == read.keys()
    assert {"torch", "monai", "python", "cpu", "commit"} <= json.loads(
        (folder / "env.json").read_text()
    ).keys()
    rows = metrics(name)
    assert [row["step"] for row in rows] == [2, 4]
    assert all(
        math.isfinite(row["loss"])
        and row["loss"] > 0
        and row["grad_norm"] > 0
        and row["nonfinite_grads"] == 0
        for row in rows
        if "loss_scale" not in row
    )
    pictures = sorted((folder / "samples").glob("*.png"))
    assert pictures
    for path in pictures:
        pixels = np.asarray(Image.open(path))
        assert (
            pixels.shape[1] >= 8 * 48 and pixels.std() > 10
        )  # a row of eight that a person sees, and not one grey
    state = checkpoint(name)
    assert state["step"] == 4
    found = summary(name)
    assert (
        found["step"] == 4
        and found["seconds"] > 0
        and found["images_per_second"] > 0
        and found["peak_memory"] > 2**20
    )
    for scores in found["scores"].values():
        assert math.isfinite(scores["frechet" if generated else "mean_dice"])
        if generated:
            assert len(scores["loss_by_timestep"]) == generation.BINS
    return state, found


@pytest.mark.parametrize("flags", RECIPES)
def test_every_recipe_trains_scores_and_leaves_a_whole_folder(flags, capsys):
    assert quick(*flags.split()) == 0
    _, found = check_folder("run")
    sites = {
        row["site"]: row["value"] for row in json.loads(Path("runs/run/ledger.json").read_text())["sites"]
    }
    assert sites.items() >= RECIPES[flags].items()
    out = capsys.readouterr().out
    assert (
        "bytes a parameter" in out
        and "real (floor)" in out
        and "noise (ceiling)" in out
        and "images a second" in out
    )
    assert found["scores"].keys() == {"ema", "raw"}  # of four steps, in which no average arrives


@pytest.mark.parametrize(
    "flags",
    [
        "--task segment --image_size 16 --pure_bf16 --stochastic",
        "--model dit --pure_bf16 --stochastic --guidance 2",
    ],
)
def test_every_task_and_net(flags):
    assert quick(*flags.split(), "--sample_every", 2) == 0
    state, _ = check_folder("run", generated="segment" not in flags)
    assert Path("runs/run/samples/step000002.png").exists()
    start = torch.tensor(
        [t.float().abs().sum() for t in state["precision"]["averages"]["ema"]["shadow"].values()]
    )
    assert start.isfinite().all()


def test_torchao_takes_the_learning_rate(monkeypatch):
    pytest.importorskip("torchao", reason="torchao comes with requirements-bench.txt")
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function or (lambda f: f))
    assert quick("--pure_bf16", "--optimizer", "torchao", "--warmup", 4) == 0
    assert [row["lr"] for row in metrics()] == pytest.approx([5e-4, 1e-3])


def test_accumulated_micro_batches_equal_one_batch():
    assert quick("--accumulate", 2, "--task", "segment", "--image_size", 16, name="two", steps=1) == 0
    assert quick("--batch_size", 16, "--task", "segment", "--image_size", 16, name="one", steps=1) == 0
    # Dice is a mean of the images' own, so that a batch's loss is the mean of its halves'; a norm over a
    # batch would break this
    assert metrics("two")[0]["loss"] == pytest.approx(metrics("one")[0]["loss"], rel=1e-5)
    assert metrics("two")[0]["grad_norm"] == pytest.approx(metrics("one")[0]["grad_norm"], rel=1e-3)


# ---- Resume ------------------------------------------------------------------------------------------------

# tests/tasks/test_every_task.py asks it of every task, tests/lowprec/test_every_run.py of every recipe
RESUMED = [
    "--fp16 --batch_size 2 --set generation=fp32",
    "--pure_bf16 --stochastic --set ema=bf16 --set ema_update=stochastic "
    "--accumulate 2 --set accumulate=fp32 --average 0.9:bf16:stochastic",
]


OFTEN = ["--log_every", 3, "--checkpoint_every", 4]


def assert_equals_the_whole(name):
    """The run of this name has ended as runs/whole has."""
    whole, again = checkpoint("whole"), checkpoint(name)
    assert [row["step"] for row in metrics("whole")] == [3, 6, 8]
    assert_same(again["precision"], whole["precision"])
    assert_same([again["step"], again["interval"], again["since"]], [8, whole["interval"], whole["since"]])
    assert Path(f"runs/{name}/metrics.jsonl").read_text() == Path("runs/whole/metrics.jsonl").read_text()
    assert summary(name)["scores"] == summary("whole")["scores"]
    assert summary(name)["skipped_steps"] == summary("whole")["skipped_steps"]


def assert_has_all_curves(name):
    events = EventAccumulator(f"runs/{name}")
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [3, 6, 8]
    losses = [row["loss"] for row in metrics(name)]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert "samples" in events.Tags()["images"]


@pytest.mark.parametrize("flags", RESUMED)
def test_an_interrupted_run_equals_an_uninterrupted_one_bit_for_bit(flags, monkeypatch, capsys):
    flags = [*flags.split(), *OFTEN]
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert quick(*flags, name="whole", steps=8) == 0
    with monkeypatch.context() as patch:  # between two logged steps
        after_step(patch, 5, lambda run: run.stop.ask(signal.SIGTERM))
        capsys.readouterr()
        assert quick(*flags, name="stopped", steps=8) == 143
    assert "stopped at step 5 of 8" in capsys.readouterr().err and checkpoint("stopped")["step"] == 5
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    torch.manual_seed(7)  # what the process drew before changes nothing
    assert quick(*flags, name="stopped", steps=8) == 0
    assert_equals_the_whole("stopped")
    assert_has_all_curves("stopped")


def test_a_run_that_crashed_equals_an_uninterrupted_one_bit_for_bit(monkeypatch):
    flags = ["--pure_bf16", "--stochastic", *OFTEN]
    assert quick(*flags, name="whole", steps=8) == 0

    def crash(run):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        after_step(patch, 7, crash)
        with pytest.raises(ZeroDivisionError):
            quick(*flags, name="crashed", steps=8)
    assert checkpoint("crashed")["step"] == 4 and metrics("crashed")[-1]["step"] == 6
    with open("runs/crashed/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert quick(*flags, name="crashed", steps=8) == 0
    assert_equals_the_whole("crashed")
    assert quick(*flags, "--seed", 1, name="other", steps=1) == 0
    assert metrics("other")[0]["loss"] != metrics("whole")[0]["loss"]


def test_finished_runs_print_again_score_again_export_and_extend(monkeypatch, capsys):
    assert quick() == 0
    table = capsys.readouterr().out.split("writes to")[1]
    before = content("runs/run")
    with monkeypatch.context() as patch:
        no_training(patch)
        assert quick() == 0
        again = capsys.readouterr().out.split("writes to")[1]
        assert again.startswith(table) and "nothing was trained now" in again.removeprefix(table)
        assert content("runs/run") == before
        assert quick("--export", "ema.safetensors") == 0
        assert_same(load_file("ema.safetensors"), checkpoint()["precision"]["averages"]["ema"]["shadow"])
        assert quick("--weights", "raw", "--samples", 30) == 0
        assert summary()["scores"].keys() == {"raw"}
    assert quick(steps=6) == 0
    assert quick(steps=6, name="straight") == 0
    assert summary()["step"] == 6 and [row["step"] for row in metrics()] == [2, 4, 6]
    assert_same(checkpoint()["precision"], checkpoint("straight")["precision"])


def test_an_extension_that_dies_before_its_scores_is_not_taken_for_finished(monkeypatch):
    finished()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "score", lambda self: (_ for _ in ()).throw(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            quick(steps=6)
    assert quick(steps=6) == 0
    assert summary()["step"] == 6


def test_ctrl_c_outside_of_the_loop_is_one_line(monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(task.datasets, "load", interrupted)
    assert quick() == 130
    again = "the same command starts again, a training from its last checkpoint if there is one"
    assert capsys.readouterr().err == f"interrupted; {again}\n"


# ---- Drawing again -----------------------------------------------------------------------------------------


def test_sample_draws_what_the_run_drew_and_only_its_settings_change_it(monkeypatch, capsys):
    assert quick("--pure_bf16", "--stochastic", "--weights", "both", "--lr", 1e-2, "--ema_decay", 0.5) == 0
    trained, weights = summary()["scores"], content("runs")
    assert draw(monkeypatch, "runs/run") == trained
    assert draw(monkeypatch, "runs/run/checkpoint.pt") == trained
    assert (
        Image.open("runs/run/samples/step000004-ema.png").size == Image.open("runs/run/samples/ema.png").size
    )
    assert draw(monkeypatch, "runs/run", "--weights", "raw") == {"raw": trained["raw"]}
    for flags in (
        ["--set", "sampler=bf16"],
        ["--set", "generation=fp32"],
        ["--guidance", 3],
        ["--samples", 30],
        ["--seed", 1],
    ):
        scores = draw(monkeypatch, "runs/run", "--weights", "ema", *flags)
        assert math.isfinite(scores["ema"]["frechet"]) and scores["ema"] != trained["ema"], flags
    assert len(draw(monkeypatch, "runs/run", "--sample_steps", 5)["ema"]["trace"]) == 6
    assert content("runs").items() >= weights.items()  # nothing of the run was written over
    assert len(list(Path("runs/run/samples").glob("step000004-*.png"))) >= 6


def test_other_data_and_labels_of_none(monkeypatch):
    monkeypatch.setattr(
        metrics_module, "yardstick", functools.partial(metrics_module.yardstick, steps=20)
    )  # a quick one
    for i in range(40):
        picture(Path("mine", f"{i}{'x' * i}.png"))
    assert quick("--data", "folder:mine", "--image_size", 8, "--samples", 8, "--scores", "full") == 0
    scores = summary()["scores"]["ema"]
    assert math.isfinite(scores["frechet"]) and math.isfinite(summary()["reference"]["floor"]["frechet"])
    assert draw(monkeypatch, "runs/run")["ema"] == scores


def test_reversed_velocity_trains_the_mirror_image():
    """The last layer starts at zero and takes the sign; every other weight takes the same steps, bit for
    bit (experiment 004).
    """
    for velocity in ("clean-noise", "noise-clean"):
        assert quick("--velocity", velocity, "--lr", "1e-2", name=velocity, steps=2) == 0
    one, other = (checkpoint(name)["precision"]["model"] for name in ("clean-noise", "noise-clean"))
    last = [key for key in one if not torch.equal(one[key], other[key])]
    assert last == ["out.2.conv.weight", "out.2.conv.bias"] and all(
        torch.equal(one[key], -other[key]) for key in last
    )


@pytest.mark.parametrize(
    "prints",
    [lambda: command("--task", "language", "--dry_run"), lambda: bench.main(["--gpu", "--plan"])],
    ids=["train", "bench"],
)
def test_a_reader_that_ends_early_is_no_error(prints, monkeypatch):
    """`train.py --dry_run | head -1`: the pipe breaks at the next line, and that is all."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert prints() == 141
        print("what is left to print goes nowhere", file=pipe)


def test_a_full_disk_behind_a_stream_is_status_2_and_costs_no_run(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", open("/dev/full", "w", buffering=1))
        words = [*cli.LOOP, "--task", "classify", "--steps", 2]
        patch.setattr(sys, "argv", ["train.py", *map(str, words)])
        assert train.main() == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open("/dev/full", "w"))
        assert lowprec_command.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


HEAVY = "torch._dynamo torchvision monai scipy sklearn matplotlib tensorboard triton transformers".split()
PROCESS = """
import sys, train
print({*sys.argv[1:]} & sys.modules.keys())
import trainer
train_step = trainer.Trainer.train_step
def first_step(*words, **options):
    train_step(*words, **options)
    print("torch._dynamo" in sys.modules)
    raise train.Refused("enough")
trainer.Trainer.train_step = first_step
sys.argv = ["train.py", "--pure_bf16", "--stochastic"]
sys.exit(train.main())
"""


def test_a_process_imports_what_it_needs():
    """The command is read before heavy libraries are imported, and a run starts without the compiler."""
    words = [sys.executable, "-c", PROCESS, *HEAVY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "train.py: enough", done.stderr
    assert done.stdout.startswith("set()\n")
    # a step without AVX2 and GCC is compiled by torch
    assert done.stdout.splitlines()[-1] == str(cpu_step.library() is None)


def test_help_needs_no_docstrings(monkeypatch, capsys):
    """Under python -OO there are none."""
    monkeypatch.setattr(train, "__doc__", None)
    assert command("--help") == 0 and capsys.readouterr().out.startswith("usage: train.py")
