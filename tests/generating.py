"""For the tests of tasks that generate images: a task on digits, and nets whose answers are known exactly."""

import shutil
from pathlib import Path

import pytest
import torch

import strategies
import train
from harness.checkpoints import read as read_checkpoint
from lowprec.precision import recipe
from tasks import data
from tasks.generation import TIMESTEPS
from trainer import Trainer

FLAGS = strategies.flag_table()


@pytest.fixture(scope="module")
def digits():
    """The data set. A file takes it by `digits = generating.digits`."""
    return data.load("digits")


@pytest.fixture
def teachers(trained):
    """Copies under runs/ of the runs that the file's fixture `trained` made; a test may spoil them."""
    for run in trained.iterdir():
        shutil.copytree(run, Path("runs", run.name), ignore=shutil.ignore_patterns("events*"))


def drawer(path, **changes):
    """sample(labels, noise, steps) with the averaged weights of a run. changes: {flag: value}."""
    found = read_checkpoint(path)
    run = Trainer(strategies.settle({**train.DEFAULTS, **found["config"], **changes}), draws=True)
    run.load_state_dict(found)
    net = run.precision.generator()
    return lambda labels, noise, steps: run.task.sample(net, labels, noise, steps)


def make(kind, digits, sites=(), **flags):
    """A task of a kind on some data, with these flags and --set sites."""
    config = FLAGS.typed({"samples": 20, "sample_steps": 5, **flags})
    return kind(digits, recipe(sites=sites, more=kind.sites), config)


def batch(digits, n=16):
    """The first n training images and their labels."""
    return digits.train[list(range(n))]


class Recorder:
    """A net that predicts `value` and keeps what it was asked."""

    def __init__(self, value=0.0):
        self.value = value
        self.t = []
        self.labels = []
        self.x = []

    def __call__(self, x, t, labels):
        self.x.append(x)
        self.t.append(t)
        self.labels.append(labels)
        return torch.zeros_like(x) + self.value


def velocity_to(point, sign=1.0):
    """The exact velocity field of a data set that holds one image: x_t = (1-s) point + s noise, so clean -
    noise = (point - x_t) / s.
    """
    return lambda x, t, labels: sign * (point - x) / (t.float() / TIMESTEPS)[:, None, None, None]


def noise_from(point, task):
    """The exact noise of a data set that holds one image, from the float64 schedule."""

    def predict(x, t, labels):
        alpha = task.schedule[t.long()][:, None, None, None]
        return ((x.double() - alpha.sqrt() * point) / (1 - alpha).sqrt()).float()

    return predict


def rmse(a, b):
    """Root mean square of the difference of two tensors."""
    return float((a - b).double().square().mean().sqrt())
