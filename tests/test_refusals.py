"""The command: what bad input, folders and checkpoints that don't fit get."""

import errno
import json
import os
import pickle
import re
from pathlib import Path

import cli
import pytest
import torch
from cli import (
    after_step,
    checkpoint,
    command,
    content,
    finished,
    no_training,
    one_line,
    picture,
    quick,
    summary,
)

from harness import run_folder

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

# ---- Folders and checkpoints that don't fit ----------------------------------------------------------------


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def plant_truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def plant_pickle(path):
    path.write_bytes(pickle.dumps(Payload(), protocol=2))


def plant_zipped_pickle(path):
    torch.save({"format": 1, "step": Payload()}, path)


def plant_tensor(path):
    torch.save(torch.zeros(3), path)


def plant_little(path):
    torch.save({"format": 1}, path)


def test_a_file_that_is_no_checkpoint_is_refused_and_never_run(capsys):
    finished()
    path = Path("runs/run/checkpoint.pt")
    whole = path.read_bytes()
    for plant in (plant_truncated, plant_pickle, plant_zipped_pickle, plant_tensor, plant_little):
        path.write_bytes(whole)
        plant(path)
        before = content("runs")
        capsys.readouterr()
        assert quick(steps=6) == 2, plant
        assert "no checkpoint of this program" in one_line(capsys)
        assert command("--sample", "runs/run") == 2, plant
        assert "no checkpoint of this program" in one_line(capsys)
        assert content("runs") == before and not Path("executed").exists()


def test_a_folder_of_other_flags_is_refused(capsys):
    finished()
    before = content("runs")
    for flags, said in (
        (["--lr", 1e-4], "--lr was 0.001 and is 0.0001"),
        (["--pure_bf16"], "--pure_bf16 was False and is True"),
        (["--model", "dit"], "--model was unet and is dit"),
        (["--set", "ema=bf16"], "--set was [] and is ['ema=bf16']"),
    ):
        capsys.readouterr()
        assert quick(*flags, steps=6) == 2
        line = one_line(capsys)
        assert said in line and "--name" in line
        assert content("runs") == before


def test_a_folder_from_before_a_flag_existed_goes_on(capsys):
    finished()
    path = Path("runs/run/config.json")
    old = json.loads(path.read_text())
    del old["flags"]["loss_weight"]
    path.write_text(json.dumps(old))
    capsys.readouterr()
    assert quick("--loss_weight", "7", steps=6) == 2
    assert "--loss_weight was 1.0 and is 7.0" in one_line(capsys)
    assert quick(steps=6) == 0 and json.loads(Path("runs/run/summary.json").read_text())["step"] == 6


def test_a_checkpoint_of_another_model_is_refused(capsys):
    finished()
    assert quick("--model", "dit", name="dit") == 0 and quick("--pure_bf16", name="pure") == 0
    for other in ("dit", "pure"):
        os.replace(f"runs/{other}/checkpoint.pt", "runs/run/checkpoint.pt")
        before = content("runs")
        capsys.readouterr()
        assert quick(steps=6) == 2
        assert "another model or recipe" in one_line(capsys)
        assert content("runs") == before


@pytest.mark.parametrize("kind", ["files", "a file", "broken config"])
def test_a_folder_of_something_else_is_refused(kind, capsys):
    Path("runs").mkdir()
    if kind == "a file":
        Path("runs/run").write_text("mine")
    else:
        Path("runs/run").mkdir()
        Path("runs/run", "config.json" if kind == "broken config" else "thesis.tex").write_text("mine")
    assert quick() == 2
    assert ("move it away" if kind == "broken config" else "--name") in one_line(capsys)
    assert len(content("runs")) == 1


def test_no_space_for_a_checkpoint(monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda run: patch.setattr(os, "fsync", full))
        assert quick("--checkpoint_every", 2) == 2
    assert "no space left" in one_line(capsys)
    assert checkpoint()["step"] == 2 and not list(Path("runs").rglob("*.part"))
    assert quick("--checkpoint_every", 2) == 0 and summary()["step"] == 4


def test_no_space_for_a_line_of_metrics(monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.Folder, "log", full)
    assert quick() == 2
    assert "no space left" in one_line(capsys)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_good_checkpoint(capsys):
    assert quick("--lr", 1e30, "--log_every", 50, "--checkpoint_every", 1, steps=60) == 2
    line = one_line(capsys)
    assert re.search(r"the loss is (nan|inf) at step \d+", line) and "--lr" in line
    assert all(t.isfinite().all() for t in checkpoint()["precision"]["model"].values())


# ---- Bad input ---------------------------------------------------------------------------------------------


def plant_inputs():
    """Everything that BAD_INPUT names."""
    Path("empty").mkdir()
    for name in "abc":
        picture(Path("unreadable", f"{name}.png"))
        picture(Path("three", f"{name}.png"))
        picture(Path("masked/images", f"{name}.png"))
        picture(Path("masked/masks", f"{name}.png"), value=1)
    Path("unreadable/b.png").write_bytes(b"not an image")
    Path("masked/masks/b.png").unlink()
    files = {
        "unknown.yaml": "stepz: 3",
        "type.yaml": "steps: many",
        "list.yaml": "- steps",
        "bad.yaml": "steps: [3",
        "flag.yaml": "pure_bf16: 1",
        "value.yaml": "set: {ema: bf17}",
        "nested.yaml": "lr: {a: 1}",
        "binary.yaml": "\0\1",
    }
    for name, text in files.items():
        Path(name).write_text(text)


BAD_INPUT = {
    "--data folder:nowhere": "nowhere",
    "--data nowhere": "unknown data set",
    "--data folder:empty": "holds no images",
    "--data folder:unreadable --image_size 8": "b.png",
    "--task segment --data folder:masked": "b.png",
    "--task segment --data digits": "no masks",
    "--data medmnist:nowhere.npz": "nowhere.npz",
    "--data nifti:nowhere": "nowhere",
    "--data cifar10:nowhere": "nowhere",
    "--set emma=bf16": "unknown site 'emma'",
    "--set ema=bf17": "'bf17' is no value of ema",
    "--set ema": "no value of ema",
    "--average 0.9": "DECAY:DTYPE",
    "--config unknown.yaml": "unknown key 'stepz'",
    "--config type.yaml": "'many' is not a whole number",
    "--config list.yaml": "flag: value",
    "--config bad.yaml": "not YAML",
    "--config binary.yaml": "not YAML",
    "--config flag.yaml": "true or false",
    "--config value.yaml": "'bf17' is no value of ema",
    "--config nested.yaml": "lr is one value, not a mapping",
    "--config nowhere.yaml": "nowhere.yaml",
    "--config empty": "empty",
    "--stochastic": "add --pure_bf16",
    "--set compute=tf32": "can't run on cpu",
    "--device cuda": "no CUDA device",
    "--optimizer adamx": "unknown; choose from",
    "--task segment --model dit": "no model 'dit'",
    "--size huge": "unknown size",
    "--size mini --image_size 9": "9",
    "--image_size 4": "is not a whole number from 8",
    "--trial --batch_size auto": "give a number",
    "--stepz 3": "unrecognized arguments: --stepz 3; near it is --steps",
    "--step 3": "unrecognized arguments",  # no abbreviations: a new flag would change their meaning
    "--steps many": "'many' is not a whole number",
    "--steps 0": "above 0",
    "--lr nan": "above 0",
    "--lr -1": "--lr",
    "--ema_decay 1": "below 1",
    "--label_dropout 2": "from 0 to 1",
    "--label_dropout 0 --guidance 3": "never trains",
    "--sample_steps 1001": "from 1 to 1000",
    "--task paint": "invalid choice",
    "--sample nowhere": "no checkpoint at nowhere",
    "--sample empty": "no checkpoint at empty",
    "--sample=": "no checkpoint",
    "--check --dry_run": "not allowed with",
    "--check --pure_bf16": "looks at the machine alone",
    "--set scheduler=bf16": "unknown site 'scheduler'",
    "--samples 1": "above 1",
    "--export nowhere/ema.safetensors": "no folder nowhere",
    "--data folder:three --image_size 8": "add images",
    "--task classify --samples 20": "--samples is for --task rflow, reflow, distill, consistency and ddpm",
    "--task vae --guidance 2": "add one of these, or drop it",
    "--pairs 5": "--pairs is for --task reflow, and this is --task rflow: add --task reflow",
    "--task ddpm --velocity noise-clean": "--velocity is for --task rflow",
    "--task language --image_size 16": "a text has no images",
    "--task steve --data folder:three --clips 5": "--clips 5 is of --data sprites",
    "--weight_decay_on all": "does nothing without --weight_decay",
    "--condition masks --guidance 3": "give --guidance 1",
    "--white 4095": "--white says how image files are read",
    "--data synthetic --pages all": "--pages says how image files are read",
    "--task language --white 4095": "--white says",
    "--task steve --pages all": "--pages says",
    "--optimizer sgd --momentum 0 --nesterov on": "set momentum",
    "--optimizer lion --momentum 1.5": "not a number from 0 to below 1",
    "--optimizer sgd --eps 1e-6": "choose adamw or muon",
    "--optimizer adafactor --eps 1e-6": "has no eps; drop it, or choose adamw or muon, or --least_rms",
    "--optimizer muon --least_rms 0.05": "has no least_rms; drop it, or choose adafactor",
    "--optimizer torch --least_rms 0.05": "has no least_rms; drop it, or choose adafactor",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2_and_leaves_nothing(flags, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plant_inputs()
    before = content(".")
    assert command("--steps", 2, "--batch_size", 2, *flags.split()) == 2
    line = one_line(capsys)
    assert BAD_INPUT[flags] in line
    assert content(".") == before and not Path("runs").exists()


@pytest.mark.parametrize(
    "flags,said",
    [
        (["--batch_size", 9], "use a multiple of 2"),
        (["--pure_bf16", "--optimizer", "torchastic"], "--optimizer torchastic"),
    ],
)
def test_what_several_processes_cannot_do(flags, said, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert quick(*flags) == 2
    assert said in one_line(capsys) and not Path("runs").exists()


@pytest.mark.parametrize("flags", [[], ["--fsdp"]], ids=str)
def test_processes_whose_torch_has_no_way_to_speak_are_refused(flags, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    no_training(monkeypatch)
    assert quick("--device", "cpu", *flags) == 2
    line = one_line(capsys)
    assert "this torch has no gloo" in line and "one process" in line and not Path("runs").exists()
