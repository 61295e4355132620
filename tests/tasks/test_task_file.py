"""A stranger's task, in a file of its own: trained, resumed, drawn from and examined by real commands."""

import contextlib
import io
import json
import os
from pathlib import Path

import cli
import pytest
import torch

from harness.checkpoints import read as read_checkpoint

# What a person would write: own data, net, flag, loss, scores, and a site of its own that the loss reads.
MINE = '''
import torch
from torch import nn

from tasks import Flag, Site, Task, natural


class Waves:
    """x [B, 1] in [-1, 1] and sin(3 x), as a map of indices to a batch."""

    def __init__(self, count, seed):
        self.x = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x, "y": torch.sin(3 * x)}


class Data:
    name, train, heldout = "waves", Waves(64, 0), Waves(32, 1)

    def __str__(self):
        return "waves: 64 + 32"


class Mine(Task):
    flags = (
        Flag("hidden", 16, "units of the only hidden layer", type=natural, fits=True),
        Flag("lr", 1e-2, "learning rate", group="training", type=float),
    )
    sites = {"target": Site(("fp32", "bf16"), {"bf16": "8 bits"}, {"bf16": "target=bf16: it is coarse"})}
    limits = {"target": (1e-6, 0.5)}

    @classmethod
    def load(cls, config, index=None):
        return Data()

    def net(self):
        hidden = self.config.hidden
        return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 1))

    def example(self):
        return (torch.empty(2, 1, device="meta"),), {}

    def loss(self, model, batch, rng, step):
        target = batch["y"].to(self.recipe.dtype("target")).float()
        noise = rng.normal(*batch["x"].shape) * 0.01
        return (model(batch["x"] + noise) - target).square().mean() / (1 + 0.001 * step)

    def evaluate(self, model, rng):
        batch = self.data.heldout[list(range(32))]
        with torch.no_grad():
            error = (model(batch["x"].to(rng.device)).cpu() - batch["y"]).square()
        return {"error": error.mean().item()}, {}

    def reference(self):
        return {"floor": {"error": 0.0}, "ceiling": {"error": 0.5}}

    def probes(self, exam):
        y = self.data.heldout[list(range(32))]["y"]
        change = exam.relative(y.to(self.recipe.dtype("target")).float(), y)
        exam.judge("target", change, f"targets are {change:.2%} off", "--set target=fp32")
'''
QUICK = "--batch_size 8 --log_every 2 --sample_every 0 --warmup 0 --name run".split()


folder = cli.in_a_folder_of_its_own


@pytest.fixture(autouse=True)
def a_file_of_ones_own(folder):
    Path("mine.py").write_text(MINE)


def command(*flags, status=0, task="mine.py:Mine"):
    """What `train.py --task FILE.py:CLASS ...` says in this process: (out, err)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ended = cli.command(*(["--task", task] if task else []), *flags)
    assert (ended or 0) == status, err.getvalue()[-2000:]
    return out.getvalue(), err.getvalue()


def flat(run):
    return torch.cat([t.flatten() for t in read_checkpoint(f"runs/{run}")["precision"]["model"].values()])


def test_a_strangers_task_is_one_class():
    out, _ = command(*QUICK, "--steps", 5, "--hidden", 32, "--ledger")
    assert "waves: 64 + 32\nMine, 97 parameters, on " in out and "real (floor)" in out and "error" in out
    assert "target" in out  # the ledger holds its site
    state = read_checkpoint("runs/run")
    assert state["step"] == 5 and state["config"]["hidden"] == 32 and state["config"]["lr"] == 1e-2
    summary = json.loads(Path("runs/run/summary.json").read_text())
    assert summary["scores"]["ema"].keys() == {"error"} and summary["reference"]["ceiling"] == {"error": 0.5}

    # it goes on, from the same file in another folder too, and equals an uninterrupted run
    Path("elsewhere").mkdir()
    os.replace("mine.py", "elsewhere/mine.py")
    moved = "elsewhere/mine.py:Mine"
    command(*QUICK, "--steps", 8, "--hidden", 32, task=moved)
    command(*QUICK, "--steps", 8, "--hidden", 32, "--name", "whole", task=moved)
    assert torch.equal(flat("run"), flat("whole"))
    _, err = command(*QUICK, "--steps", 8, "--hidden", 16, status=2, task=moved)
    assert "--hidden was 32 and is 16" in err
    _, err = command(*QUICK, "--finetune", "runs/run", "--name", "y", status=2, task=moved)
    assert "was trained with --hidden 32, and this run has --hidden 16" in err
    command(*QUICK, "--finetune", "runs/run", "--hidden", 32, "--steps", 1, "--name", "z", task=moved)

    # its weights are drawn from; a checkpoint alone, which may be a stranger's, runs no file
    _, err = command("--sample", "runs/run", status=2, task=None)
    assert "a checkpoint alone runs no code: add --task elsewhere/mine.py:Mine" in err
    out, _ = command("--sample", "runs/run", "--set", "generation=bf16", "--name", "low", task=moved)
    assert out.startswith("score     raw     ema ")  # an average that has not arrived is not alone
    assert "error" in out and json.loads(Path("runs/run/samples/low.json").read_text())["step"] == 8
    _, err = command("--sample", "runs/run", "--hidden", 16, status=2, task=moved)
    assert "--hidden can't differ" in err


def test_its_flags_and_its_site_are_known_before_anything_runs():
    out, _ = command("--help")
    assert "--hidden N" in out and "units of the only hidden layer (default: 16)" in out
    out, _ = command("--dry_run", "--hidden", 8, "--set", "target=bf16", "--pure_bf16", "--stochastic")
    assert "--hidden=8" in out.split()
    assert "--name=mine.py_Mine-hidden8-pure_bf16-stochastic-target_bf16" in out.split()
    assert "warning: target=bf16: it is coarse" in out and not Path("runs").exists()
    Path("mine.yaml").write_text("task: mine.py:Mine\nhidden: 4\n")
    out, _ = command("--config", "mine.yaml", "--dry_run", task=None)
    assert "--hidden=4" in out.split()
    for flags, task, said in (
        (["--hidden", "0"], "mine.py:Mine", "'0' is not a whole number above 0"),
        (["--hidden", "8"], None, "unrecognized arguments: --hidden"),
        (["--set", "target=fp16"], "mine.py:Mine", "'fp16' is no value of target"),
        (["--set", "timesteps=bf16"], "mine.py:Mine", "unknown site 'timesteps'"),
        ([], "mine.py:Yours", "holds no class Yours"),
        ([], "yours.py:Mine", "there is no file yours.py"),
    ):
        _, err = command(*flags, "--dry_run", status=2, task=task)
        assert said in err and err.count("\n") == 1, err


def test_the_doctor_asks_it():
    command(*QUICK, "--steps", 4, "--set", "target=bf16")
    out, _ = command("--diagnose", "runs/run", status=1)
    assert "target" in out and "--set target=fp32" in out and "Mine on waves" in out
