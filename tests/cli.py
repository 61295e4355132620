"""What the tests of the command share: train.py in this process, in a folder of its own, and what it leaves
there.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import numpy as np
import pytest
import torch
from PIL import Image

import models
import strategies
import train
import trainer
from harness import printing
from lowprec.kernels import compiled
from tasks import clip_sets, diffusion, distillation, generation, language, reflow
from tasks import metrics as metrics_module

ROOT = Path(trainer.__file__).parent
LOOP = "--batch_size 8 --log_every 2 --sample_every 0 --warmup 0".split()
QUICK = [*LOOP, *"--samples 20 --sample_steps 2".split()]  # of a task that draws images
SEGMENT = ["--task", "segment", "--image_size", "16"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    shorten(monkeypatch.setattr)
    # building fused kernels takes longer than these runs; the subprocesses below do use them
    monkeypatch.setattr(compiled, "_compiled", common.uncompiled)


def shorten(put=setattr):
    """Make the runs of this process short: else most of a quick run is its held-out loss, and most of a step
    is Python's way through layers. What is tested does not depend on size. put: what sets an attribute.
    """
    put(generation, "HELDOUT_IMAGES", 16)
    put(metrics_module, "subset", few)
    put(language, "HELDOUT_WINDOWS", 8)
    put(clip_sets, "HELDOUT_CLIPS", 8)
    for module in (generation, reflow, distillation):
        put(module, "BINS", 2)
    put(models, "DIFFUSION_UNETS", {**models.DIFFUSION_UNETS, "tiny": ((16,), 1, (False,))})  # of one level
    put(language, "GPTS", {**language.GPTS, "tiny": (2, 32, 2)})
    put(language, "MIXTURES", {**language.MIXTURES, "tiny": (2, 32, 2, 3)})
    put(language, "BDHS", {**language.BDHS, "tiny": (2, 32, 2, 4)})


def few(part, count=100, subset=metrics_module.subset):
    """As metrics.subset, of at most 100 items."""
    return subset(part, min(count, 100))


def command(*flags):
    """Exit status of train.py with these flags, in this process."""
    try:
        return train.main([str(flag) for flag in flags])
    except SystemExit as ended:
        return ended.code


def quick_words(flags):
    """What makes a run of these flags short."""
    task = strategies.find_task(flags[flags.index("--task") + 1]) if "--task" in flags else diffusion.RFlow
    return QUICK if issubclass(task, diffusion.Generation) else LOOP


def quick(*flags, name="run", steps=4):
    return command(*quick_words(flags), "--name", name, "--steps", steps, *flags)


def trained_once(tmp_path_factory, runs):
    """A folder with these runs, {name: flags}, which the tests of a file share."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(compiled, "_compiled", common.uncompiled)
        shorten(patch.setattr)
        for name, flags in runs.items():
            assert command(*flags, "--runs", ".", "--name", name) == 0
    return folder


KEPT = tempfile.TemporaryDirectory()


def finished():
    """Leave the folder of a finished run of quick(), which a process trains once for all its tests."""
    kept = Path(KEPT.name, "run")
    if kept.exists():
        shutil.copytree(kept, "runs/run")
    else:
        assert quick() == 0
        shutil.copytree("runs/run", kept)


@pytest.fixture
def stepped(monkeypatch):
    """[(recipe, whether weights changed)] of each training step in this process."""
    found, step = [], trainer.Trainer.train_step

    def watched(self, *args, **options):
        before = [p.detach().clone() for p in self.precision.params]
        result = step(self, *args, **options)
        found.append((self.recipe, not all(map(torch.equal, before, self.precision.params))))
        return result

    monkeypatch.setattr(trainer.Trainer, "train_step", watched)
    return found


def assert_trained(stepped, flags, steps):
    """Each of the steps changed weights, by the recipe that the flags name."""
    assert len(stepped) == steps and all(moved for _, moved in stepped)
    r, words = stepped[0][0], flags.split()
    assert r.low_weights == ("--pure_bf16" in words) and r.update == PLAIN_OR["--stochastic" in words]
    compute = {"--bf16": "bf16", "--fp16": "fp16", "--fp8": "fp8", "--fp4": "fp4", "--pure_bf16": "bf16"}
    assert r.compute == next((compute[word] for word in compute if word in words), "fp32")
    assert (r.exp_avg == "int8") == ("--opt8bit" in words) and (r.kahan == "on") == ("--kahan" in words)
    for setting in [words[i + 1] for i, word in enumerate(words) if word == "--set"]:
        site, _, value = setting.partition("=")
        assert r[site] == value
    for site in ("master", "sparse24"):
        assert r[site] == (words[words.index(f"--{site}") + 1] if f"--{site}" in words else "none")


PLAIN_OR = "nearest", "stochastic"


def checkpoint(name="run"):
    return torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)


def metrics(name="run"):
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def summary(name="run"):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


def content(folder):
    """{file: hash} of everything in a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in Path(folder).rglob("*")
        if p.is_file()
    }


def one_line(capsys):
    """The only line that a failed command left on stderr."""
    lines = [
        line for line in capsys.readouterr().err.split("\n") if line and "step/s" not in line
    ]  # but for the progress bar
    assert len(lines) == 1 and lines[0].startswith("train.py: "), lines
    return lines[0]


def assert_same(a, b, where="state"):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=False)):
            assert_same(*pair, f"{where}[{i}]")
    elif torch.is_tensor(a):

        def bits(t):
            return t.detach().contiguous().reshape(-1).view(torch.uint8)

        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)), where
    else:
        assert a == b, where


def after_step(monkeypatch, number, act):
    """Let act(trainer) happen when `number` steps are done."""
    original = trainer.Trainer.train_step

    def step(self, measure):
        result = original(self, measure)
        if self.step == number:
            act(self)
        return result

    monkeypatch.setattr(trainer.Trainer, "train_step", step)


def no_training(monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "train_step", lambda *args: pytest.fail("it trained"))


def process(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def picture(path, size=16, value=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (
        np.random.default_rng(len(path.name)).integers(0, 255, (size, size), dtype=np.uint8)
        if value is None
        else np.full((size, size), value, np.uint8)
    )
    Image.fromarray(pixels).save(path)


def draw(monkeypatch, *flags):
    found = []
    with monkeypatch.context() as patch:
        no_training(patch)
        original = printing.score_table
        patch.setattr(
            printing, "score_table", lambda scores, *more: found.append(scores) or original(scores, *more)
        )
        assert command("--sample", *flags) == 0
    return json.loads(json.dumps(found[0]))


def plant_folder(path, count=40):
    for i in range(count):
        picture(Path(path, f"{i}{'x' * i}.png"))
