"""What the tests of bad input share: a small run that has ended, what a refusal is, good data to spoil."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli import command, content, trained_once
from PIL import Image

BASE = "--task classify --batch_size 8 --log_every 1 --sample_every 0 --warmup 0".split()
DEEP = b"[" * 100_000  # JSON that no reader follows to its end


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `run`, which has ended after two steps."""
    return trained_once(tmp_path_factory, {"run": [*BASE, "--steps", 2]})


@pytest.fixture
def mine(trained):
    """A copy of that run in the test's own folder."""
    shutil.copytree(trained, "runs")
    return Path("runs/run")


def again(*flags, steps=3):
    """The same command with another step to do."""
    return command(*BASE, "--name", "run", "--steps", steps, *flags)


def line_of(capsys, status):
    """The only line of an input that is refused."""
    err = [line for line in capsys.readouterr().err.split("\n") if line and "step/s" not in line]
    assert status == 2, (status, err)
    assert len(err) == 1 and err[0].startswith("train.py: ") and err[0].isprintable(), err
    assert len(err[0]) < 1500, len(err[0])
    return err[0]


def is_refused(capsys, act, *flags):
    """The line, of a command that changes nothing."""
    before, _ = content("."), capsys.readouterr()
    line = line_of(capsys, act(*flags))
    assert content(".") == before
    return line


def arrays(**changed):
    """What an npz file of twelve black images in three classes holds; None takes a part away."""
    images, labels = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 3
    parts = dict(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return {name: value for name, value in {**parts, **changed}.items() if value is not None}


def as_format(kind, **options):
    """The bytes of a red image in a format of PIL."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, kind, **options)
    return file.getvalue()
