"""Bad flags and YAML files. test_bad_run_files.py has the files of a run, test_checkpoints.py checkpoints,
tasks/test_data.py and test_folders.py data, experiments/test_wrong_experiments.py experiments.

Each ends in one line and status 2 and changes nothing, or works. Nothing that a file brings is run, or
decides where is written.
"""

import os
from pathlib import Path

import attacked
import pytest
import torch
from attacked import BASE, again, is_refused
from cli import command
from PIL import Image
from safetensors.torch import load_file, save_file

from harness import run_folder
from lowprec.errors import Refused

trained, mine = attacked.trained, attacked.mine
LONG = "9" * 20

# ---- Flags -------------------------------------------------------------------------------------------------

FLAGS = {  # flags: what is said, "" for anything
    "--task rflow --samples 2000000000000": "up to",
    "--epochs 2": "give one of them",
    "--epochs -1": "a whole number, 0 or more",
    "--early_stop few": "a whole number, 0 or more",
    "--validate_every 0.5": "a whole number, 0 or more",
    "--perturb -1": "a whole number from 0 to 1000",
    "--perturb 1e-7": "a whole number from 0 to 1000",
    "--batch_size 1.5": f"is not a whole number above 0, up to {10**7}, or auto",
    "--batch_size auto8": "or auto",
    "--batch_size 0": "or auto",
    f"--steps {LONG}": "up to",
    "--task=--": "no value",
    "--task slotcontrast --bf16 --set softmax=fp16": "use softmax=fp32 or bf16",
    "--steps 1e3": "not a whole number",
    "--steps " + "9" * 5000: "not a whole number",
    "--threads 100000": "from 0 to 1000",
    "--workers 100000": "from 0 to 1000",
    "--fp8 --task segment": "no nn.Linear",
    "--fp8 --model dit --fp8_backend te": "here works --fp8_backend",
    "--fp8 --model dit --fp8_backend torchao --fp8_recipe delayed": "torchao has no delayed scaling",
    "--fp8 --model dit --fp8_format e6m1": "--fp8_format",
    "--fp8 --amax_history_len 99999999999": "up to",
    "--model dit --fp8_recipe delayed": "add --fp8",
    "--task segment --set generation=int8": "no nn.Linear",
    "--task segment --set generation=fp8": "use --set generation=bf16",
    "--lora 4": "--lora 4 does nothing without --finetune",
    "--batch_size 2000000000": "up to",
    "--seed 9223372036854775808": "below 2**63",
    "--seed -1": "",
    "--sparse24 srste --sparse24_decay 1e300": "up to 3e+38",
    "--lr 1e300": "up to 3e+38",
    "--lr 0": "above 0",
    "--beta2 1": "below 1",
    "--loss_weight 1e39": "",
    "--average 2:bf16": "",
    "--average 0.9:bf16:sideways": "",
    "--set ema=bf16=fp32": "",
    "--lr_schedule up": "invalid choice",
    "--name ..": "--name",
    "--name ../../x": "--name",
    "--name /abs": "--name",
    "--name " + "n" * 300: "--name",
    "--name a\33[31m": "--name",
    "--runs ": "is not a path",
    "--runs /dev/null": "/dev/null",
    "--runs r\udcff": "UTF-8",
    "--export .": "a folder",
    "--export /dev/null": "a device",
    "--export pipe": "a device or a pipe",
    "--export link": "a link",
    "--export file": "no safetensors",
    "--export picture.png": "no safetensors",
    "--export nowhere/x": "no folder",
    "--export " + "e" * 300: "File name too long",
    "--data folder:/dev/null": "",
    "--data folder:~nouser/x": "",
    "--data folder:" + "x" * 5000: "",
    "--data medmnist:/dev/zero": "",
    "--data mnist:file": "",
    "--data cifar10:/proc": "",
    "--data digits:here": "takes no path",
    "--data :": "unknown data set",
    "--task classify.py:Classify": "",
    "--task folder.py:A": "",
    "--set emma=bf16": "unknown site 'emma'",
    "--set ema=bf17": "'bf17' is no value of ema",
    "--set ema": "no value of ema",
    "--set compute=tf32": "can't run on cpu",
    "--device cuda": "no CUDA device",
    "--average 0.9": "DECAY:DTYPE",
    "--stochastic": "add --pure_bf16",
    "--optimizer adamx": "unknown; choose from",
    "--task segment --model dit": "no model 'dit'",
    "--size huge": "unknown size",
    "--size mini --image_size 9": "9",
    "--image_size 4": "is not a whole number from 8",
    "--trial --batch_size auto": "give a number",
    "--stepz 3": "unrecognized arguments: --stepz 3; near it is --steps",
    "--step 3": "unrecognized arguments",  # no abbreviations: a new flag would change their meaning
    "--lr nan": "above 0",
    "--ema_decay 1": "below 1",
    "--label_dropout 2": "from 0 to 1",
    "--label_dropout 0 --guidance 3": "never trains",
    "--sample_steps 1001": "from 1 to 1000",
    "--samples 1": "above 1",
    "--task paint": "invalid choice",
    "--task classify --samples 20": "--samples is for --task rflow, reflow, distill, consistency and ddpm",
    "--task vae --guidance 2": "add one of these, or drop it",
    "--task ddpm --velocity noise-clean": "--velocity is for --task rflow",
    "--task language --image_size 16": "a text has no images",
    "--task steve --data folder:folder --clips 5": "--clips 5 is of --data sprites",
    "--pairs 5": "--pairs is for --task reflow, and this is --task rflow: add --task reflow",
    "--condition masks --guidance 3": "give --guidance 1",
    "--white 4095": "--white says how image files are read",
    "--data synthetic --pages all": "--pages says how image files are read",
    "--task language --white 4095": "--white says",
    "--task steve --pages all": "--pages says",
    "--weight_decay_on all": "does nothing without --weight_decay",
    "--optimizer sgd --momentum 0 --nesterov on": "set momentum",
    "--optimizer lion --momentum 1.5": "not a number from 0 to below 1",
    "--optimizer sgd --eps 1e-6": "choose adamw or muon",
    "--optimizer adafactor --eps 1e-6": "has no eps; drop it, or choose adamw or muon, or --least_rms",
    "--optimizer muon --least_rms 0.05": "has no least_rms; drop it, or choose adafactor",
    "--optimizer torch --least_rms 0.05": "has no least_rms; drop it, or choose adafactor",
    "--runs . --name file": "--name",
    "--check --dry_run": "not allowed with",
    "--check --pure_bf16": "looks at the machine alone",
    "--config nowhere.yaml": "nowhere.yaml",
    "--config folder": "folder",
    "--sample nowhere": "no checkpoint at nowhere",
    "--sample folder": "no checkpoint at folder",
    "--sample=": "no checkpoint",
    "--config pipe": "no file",
    "--config /dev/zero": "no file",
    "--finetune pipe": "no checkpoint",
    "--finetune /dev/zero": "no checkpoint",
    "--sample pipe": "no checkpoint",
    "--diagnose /dev/zero": "no checkpoint",
}


def plant_traps():
    Path("folder").mkdir()
    Path("file").write_text("mine\n" * 5)
    Image.new("L", (8, 8)).save("picture.png")
    os.mkfifo("pipe")
    Path("link").symlink_to("file")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: repr(flags[:40]))
def test_flags(flags, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plant_traps()
    line = is_refused(capsys, command, "--steps", 1, *flags.split(" "))
    assert FLAGS[flags] in line and not Path("runs").exists()
    assert Path("/dev/null").is_char_device() and Path("link").is_symlink()


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--batch_size 9", "use a multiple of 2"),
        ("--batch_size 8 --pure_bf16 --optimizer torchastic", "--optimizer torchastic"),
        ("--batch_size 8 --device cpu", "this torch has no gloo"),
        ("--batch_size 8 --device cpu --fsdp", "this torch has no gloo"),
    ],
)
def test_what_several_processes_cannot_do(flags, said, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert said in is_refused(capsys, command, "--steps", 1, *flags.split())


def test_an_export_replaces_safetensors_and_empty_files_alone(mine, capsys):
    save_file({"old": torch.zeros(1)}, "old.safetensors")
    Path("empty").touch()
    for target in ("old.safetensors", "empty", "new.safetensors"):
        assert again("--export", target, steps=2) == 0
        assert "head.weight" in load_file(target) or len(load_file(target)) > 4
    # what came to stand there while it trained is not replaced either
    Path("late.safetensors").write_text("mine")
    with pytest.raises(Refused, match="no safetensors"):
        run_folder.export("late.safetensors", {"w": torch.zeros(1)}, {}, 1)
    assert Path("late.safetensors").read_text() == "mine"


# ---- YAML --------------------------------------------------------------------------------------------------

YAML = {
    "stepz: 3": "unknown key 'stepz'",
    "pure_bf16: 1": "true or false",
    "set: {ema: bf17}": "'bf17' is no value of ema",
    "lr: {a: 1}": "lr is one value, not a mapping",
    "steps: " + "9" * 5000: "",
    "steps: 3\nsteps: 4": "twice",
    "set: {ema: bf16, ema: fp32}": "twice",
    "steps: !!python/object/apply:os.system ['touch executed']": "not YAML",
    "steps: 3\n\tlr: 1": "not YAML",
    "&a [*a]": "flag: value",
    "just text": "flag: value",
    "steps: 2001-01-01": "not a whole number",
    "runs: --": "no value",
    "steps: yes": "not a whole number",
    "lr: .nan": "not a number",
    "lr: [1]": "lr is one value, not a list",
    "name: ../x": "--name",
    'name: "a\\0b"': "--name",
    'data: "folder:a\\0b"': "",
    'export: "a\\0b"': "",
    "set: {ema: {a: b}}": "",
    "trainer: {precision: 8}": "",
    "\xff": "not YAML",
    "a" * 20_000_000: "too large",
}


@pytest.mark.parametrize("text", YAML, ids=lambda text: repr(text[:40]))
def test_yaml(text, capsys):
    Path("bad.yaml").write_bytes(text.encode("latin-1"))
    base = [] if text.startswith("task") else BASE[:2]
    line = is_refused(capsys, command, *base, "--config", "bad.yaml", "--steps", 1, *BASE[2:])
    assert YAML[text] in line and not Path("executed").exists() and not Path("runs").exists()


def test_yaml_bombs_are_harmless(capsys):
    """Nine lists of nine: YAML shares them, and nothing writes them out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    Path("bomb.yaml").write_text("\n".join(lines))
    assert "unknown key" in is_refused(capsys, command, "--config", "bomb.yaml")
