"""--model FILE.py:build and --optimizer FILE.py:CLASS: trained, resumed, named, drawn from, and never run
because a checkpoint names them.
"""

import os
from pathlib import Path

import cli
import pytest
import torch
from cli import QUICK, checkpoint, command, one_line, quick

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
MINE = """
import torch
from torch import nn
from lowprec.optimizers.lion import Lion

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)
        self.labels = nn.Embedding(classes + 1, channels)

    def forward(self, x, t, y):
        return self.layer(x) + self.labels(y)[:, :, None, None]

def build(channels, num_classes, image_size, size=None):
    return Net(channels, num_classes)

def logits(channels, num_classes, image_size, size=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size ** 2, num_classes))

def bytes_of(block, size):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

class Signum(Lion):
    flags = {"lr": 3e-4}

RMSprop = torch.optim.RMSprop
nothing = 3
no_net = lambda *args: 3
two = lambda a, b: 3
def no_optimizer(params):
    return params
"""


@pytest.fixture(autouse=True)
def mine(in_a_folder_of_its_own):
    Path("mine.py").write_text(MINE)


@pytest.mark.parametrize(
    "flags",
    [
        "--model mine.py:build --optimizer mine.py:RMSprop --lr 1e-4 --pure_bf16 --stochastic",
        "--model mine.py:build --optimizer mine.py:Signum --pure_bf16 --stochastic",
        "--task classify --model mine.py:logits",
        "--task language --model mine.py:bytes_of --block 16 --length 4",
    ],
)
def test_a_net_and_an_optimiser_of_ones_own_train_and_go_on_to_the_same_bits(flags, capsys):
    assert quick(*flags.split(), steps=2) == 0
    os.makedirs("elsewhere")
    os.replace("mine.py", "elsewhere/mine.py")
    moved = flags.replace("mine.py", "elsewhere/mine.py").split()
    assert quick(*moved, steps=4) == 0 and quick(*moved, name="whole", steps=4) == 0
    cli.assert_same(checkpoint()["precision"], checkpoint("whole")["precision"])
    capsys.readouterr()

    words = ["--task", flags.split()[1]] if flags.startswith("--task") else []
    typed = [word for word in moved if ".py:" in word or word in ("--model", "--optimizer")]
    assert command("--sample", "runs/run", *words, *typed, "--name", "again") == 0


def test_a_checkpoint_alone_runs_no_code(capsys):
    assert quick("--model", "mine.py:build", "--optimizer", "mine.py:Signum", steps=1) == 0
    os.makedirs("strange")
    Path("strange/mine.py").write_text("raise SystemExit('run')")
    found = checkpoint()
    for flag in ("model", "optimizer"):
        found["config"][flag] = found["config"][flag].replace("mine.py", "strange/mine.py")
    torch.save(found, "runs/run/checkpoint.pt")
    for verb in ("--sample", "--diagnose"):
        capsys.readouterr()
        assert command(verb, "runs/run") == 2
        assert "a checkpoint alone runs no code: add --" in one_line(capsys)
    assert command(*QUICK, "--finetune", "runs/run", "--steps", 1, "--name", "other") == 2
    assert "--model mine.py:build, and this run has --model unet" in one_line(capsys)


def test_names_defaults_and_the_dry_run_know_them(capsys):
    flags = "--model mine.py:build --optimizer mine.py:Signum --pure_bf16 --stochastic --dry_run"
    assert command(*flags.split()) == 0
    out = capsys.readouterr().out.split()
    assert "--name=mine.py_build-lr0.0003-mine.py_Signum-pure_bf16-stochastic" in out and "--lr=0.0003" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--model mine.py:nothing", "mine.py holds no function nothing"),
        ("--model mine.py:absent", "mine.py holds no function absent"),
        ("--model yours.py:build", "there is no file yours.py"),
        ("--model mine.py:no_net", "gave a int: return a torch.nn.Module"),
        ("--model mine.py:two", "is called with 4 arguments: too many positional arguments"),
        ("--model mine.py", "no model 'mine.py'"),
        ("--task vae --model mine.py:build", "no model 'mine.py:build' for task 'vae'; choose kl"),
        ("--optimizer mine.py:nothing", "mine.py holds no class or function nothing"),
        ("--optimizer mine.py:no_optimizer", "return a torch.optim.Optimizer"),
        ("--optimizer mine.py:RMSprop --pure_bf16 --master split", "belong to ours"),
        ("--optimizer mine.py:Signum --eps 1e-3", "has no eps"),
    ],
)
def test_bad_files_are_refused_in_one_line(flags, said, capsys):
    assert command(*flags.split(), "--dry_run") == 2
    assert said in one_line(capsys) and not Path("runs").exists()
