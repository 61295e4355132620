"""--task classify: Fashion-MNIST, and what a run was trained on."""

import gzip
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import cli
import common
import numpy as np
import pytest
import test_classify
import torch
from cli import command, content, one_line
from PIL import Image

from tasks import classify, data, published_sets
from tasks import metrics as scores
from tasks.task import VALIDATED_ITEMS, Task

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
QUICK = test_classify.QUICK
folder = test_classify.folder
quick = test_classify.quick
small = test_classify.small


# ---- Fashion-MNIST -----------------------------------------------------------------------------------------


def idx(values, magic=None):
    """A gzipped idx file of uint8 values."""
    values = np.asarray(values, np.uint8)
    start = (0x0800 + values.ndim) if magic is None else magic
    return gzip.compress(np.array([start, *values.shape], ">i4").tobytes() + values.tobytes())


FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def clothes(root, **files):
    """Thirty images and their labels in the form of Fashion-MNIST; `files` replaces or leaves out (None)."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    content = {}
    for part, count in (("train", 20), ("t10k", 10)):
        content[f"{part}-images-idx3-ubyte.gz"] = idx(draw.integers(0, 256, (count, 28, 28)))
        content[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    content.update(files)
    for name, written in content.items():
        (root / name).unlink(missing_ok=True)
        if written is not None:
            (root / name).write_bytes(written)


def test_fashion_mnist_is_read(monkeypatch):
    clothes("own")
    found = data.load("fashion_mnist:own")
    assert (len(found.train), len(found.heldout), found.channels, found.num_classes) == (20, 10, 1, 10)
    images, labels = found.train[list(range(20))]
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 28))
    assert (((images[:, 0] + 1) * 127.5).round().numpy() == pixels).all()
    assert labels.tolist() == 2 * list(range(10)) and found.classes[9] == "boot"
    # torchvision's folder, and the package's, hold the same
    clothes("root/FashionMNIST/raw")
    monkeypatch.setattr(published_sets, "FASHION_MNIST_FOLDER", Path("own").absolute())
    for spec in ("fashion_mnist:root", "fashion_mnist"):
        assert data.load(spec).fingerprint == found.fingerprint
    monkeypatch.chdir("own")
    monkeypatch.setattr(published_sets, "FASHION_MNIST_FOLDER", Path("nowhere"))
    assert data.load("fashion_mnist:.").fingerprint == found.fingerprint


IMAGES, LABELS = FILES[:2]
NO_CLOTHES = np.zeros((20, 28, 28))
RAW = gzip.decompress(idx(np.zeros(20)))
BROKEN = {
    "truncated": ({IMAGES: idx(NO_CLOTHES)[:-20]}, IMAGES, "cannot read"),
    "no gzip": ({IMAGES: b"PK" * 50}, IMAGES, "cannot read"),
    "empty": ({LABELS: b""}, LABELS, "cannot read"),
    "magic": ({IMAGES: idx(NO_CLOTHES, 0x0D03)}, IMAGES, "does not begin as an idx file of uint8"),
    "swapped": ({LABELS: idx(NO_CLOTHES)}, LABELS, "with 1 dimensions"),
    "extent": ({IMAGES: idx(np.zeros((20, 28, 27)))}, IMAGES, "[20, 28, 27]"),
    "none": ({IMAGES: idx(np.zeros((0, 28, 28)))}, IMAGES, "[0, 28, 28]"),
    "fewer": ({LABELS: gzip.compress(RAW[:-3])}, LABELS, "fewer than the 20"),
    "trailing": ({LABELS: gzip.compress(RAW + b"\1")}, LABELS, "more than the 20"),
    "label": ({LABELS: idx(np.full(20, 11))}, LABELS, "a label of train is 11"),
    "count": ({LABELS: idx(np.zeros(19))}, "20 images and 19 labels", "named train"),
    "missing": ({FILES[3]: None}, FILES[3], "apt-get install dataset-fashion-mnist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fashion_mnist_that_is_broken(name):
    files, *said = BROKEN[name]
    clothes("own", **files)
    common.refused(lambda: data.load("fashion_mnist:own"), *said)


def test_a_checksum_that_does_not_fit():
    whole = bytearray(idx(np.zeros(20)))
    whole[-8] ^= 1  # CRC-32 of what was compressed
    clothes("own", **{LABELS: bytes(whole)})
    common.refused(lambda: data.load("fashion_mnist:own"), LABELS, "cannot read", "CRC")


def test_fashion_mnist_without_the_package(monkeypatch, capsys):
    monkeypatch.setattr(published_sets, "FASHION_MNIST_FOLDER", Path("nowhere"))
    assert quick("--data", "fashion_mnist") == 2
    line = one_line(capsys)
    assert "apt-get install dataset-fashion-mnist" in line and "fashion_mnist:PATH" in line
    assert not Path("runs").exists()


def test_fashion_mnist_is_trained_on(small, monkeypatch):
    fit = scores.fit_feature_net
    # a thousand steps are slow
    monkeypatch.setattr(scores, "fit_feature_net", lambda *args: fit(*args[:4], 2))
    clothes("own")
    assert quick("--data", "fashion_mnist:own", steps=2) == 0
    assert quick("--data", "fashion_mnist:own", "--task", "rflow", "--model", "dit", "--samples", 4,
                 "--sample_steps", 1, name="images", steps=1) == 0
    found = json.loads(Path("runs/images/summary.json").read_text())["scores"]["ema"]
    assert math.isfinite(found["frechet"])


# ---- What a run was trained on -----------------------------------------------------------------------------


def plant_classes(root, shade):
    for name, grey in (("dark", 0), ("light", 128)):
        (root / name).mkdir(parents=True)
        for i in range(20):
            Image.new("L", (8, 8), grey + shade + i).save(root / name / f"{i}.png")


def test_a_run_does_not_go_on_with_other_data_of_the_same_name(small, capsys):
    for folder, shade in (("x", 10), ("y", 60)):
        plant_classes(Path(folder, "train"), shade)
    assert command(*QUICK, "--data", "folder:x/train", "--steps", 2) == 0
    (run,) = [path for path in Path("runs").iterdir() if (path / "summary.json").exists()]
    before = content(run)
    capsys.readouterr()
    for steps in (2, 4):
        assert command(*QUICK, "--data", "folder:y/train", "--steps", steps, "--name", run.name) == 2
        assert "other data" in one_line(capsys)
    assert content(run) == before
    shutil.move("x", "elsewhere")
    assert command(*QUICK, "--data", "folder:elsewhere/train", "--steps", 4, "--name", run.name) == 0


def test_the_best_checkpoints_of_two_runs_are_two(small):
    for seed in (1, 2):
        assert command(*QUICK, "--steps", 2, "--validate_every", 1, "--seed", seed, "--name", f"r{seed}") == 0
        assert command(*QUICK, "--steps", 1, "--finetune", f"runs/r{seed}/best.pt") == 0
    tuned = [path.name for path in Path("runs").iterdir() if "finetune" in path.name]
    assert len(tuned) == 2 and all("best" in name for name in tuned)


def test_epochs_beyond_the_largest_number_of_steps_are_refused(capsys):
    assert command(*QUICK, "--epochs", 200_000_000) == 2
    assert "or fewer" in one_line(capsys) and not Path("runs").exists()


def test_images_too_small_for_the_cnn_are_refused():
    common.refused(lambda: classify.cnn(1, 10, 3), "too small for cnn")
    assert classify.cnn(1, 10, 4)(torch.ones(2, 1, 4, 4)).shape == (2, 10)


def test_a_look_sees_all_classes_of_a_sorted_set():
    labels, seen = torch.arange(1000) // 100, []

    class Sorted(Task):
        def __init__(self):
            self.config, self.data = SimpleNamespace(batch_size=64, steps=1), SimpleNamespace(heldout=labels)

        def loss(self, model, batch, rng, step):
            seen.extend(batch.tolist())
            return torch.tensor(0.0)

    Sorted().validate(None, SimpleNamespace(device="cpu"))
    assert set(seen) == set(range(10)) and len(seen) == VALIDATED_ITEMS
