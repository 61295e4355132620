"""Classification: scores against scikit-learn, nets against torchvision's, BatchNorm in bf16."""

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
import torch
import torch.nn.functional as F
from cli import checkpoint, command, content, metrics, one_line, picture, summary
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, recall_score
from torch import nn

import strategies
import trainer
from lowprec.errors import Refused
from lowprec.precision import Precision, recipe
from lowprec.rounding import DTYPE_OF_NAME
from tasks import classify, data, published_sets
from tasks import metrics as scores
from tasks.classify import Classify
from tasks.task import VALIDATED_ITEMS, Task

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
QUICK = "--task classify --batch_size 16 --log_every 2 --sample_every 0 --warmup 0 --threads 1".split()
# a net that takes a millisecond
BRIEF = {"tiny": ((4, 8, 16), 1)}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(classify, "CNNS", BRIEF)
    monkeypatch.setattr(classify, "VITS", {"tiny": (1, 32, 2)})


def quick(*flags, name="run", steps=4):
    return command(*QUICK, "--name", name, "--steps", steps, *flags)


def task(spec="digits", **flags):
    run = strategies.settle({"task": "classify", "data": spec, "model": "cnn", **flags})
    return run.kind(run.kind.load(run.config), recipe(), run.config)


class Oracle:
    """In place of a model: gives each image of a part the logits that were drawn for it."""

    device = torch.device("cpu")

    def __init__(self, part, logits):
        images = part[list(range(len(part)))][0]
        self.known = {image.numpy().tobytes(): row for image, row in zip(images, logits, strict=True)}

    def __call__(self, images):
        return torch.stack([self.known[image.numpy().tobytes()] for image in images])


# ---- Scores ------------------------------------------------------------------------------------------------


def test_scores_are_those_of_scikit_learn():
    found = task()
    labels = found.data.heldout.labels()
    logits = common.draw(500, 10, seed=1) + 3 * F.one_hot(labels, 10)
    scores, pictures = found.evaluate(Oracle(found.data.heldout, logits), trainer.Rng(0))
    answers, chances = logits.argmax(1), logits.double().softmax(1)
    assert 0.5 < scores["accuracy"] < 0.95
    assert scores["accuracy"] == pytest.approx(accuracy_score(labels, answers), abs=1e-12)
    assert scores["loss"] == pytest.approx(log_loss(labels, chances), rel=1e-6)
    assert scores["recall"] == pytest.approx(recall_score(labels, answers, average=None).tolist(), abs=1e-12)
    # fewer held-out images than validate looks at: it says the same
    looked = found.validate(Oracle(found.data.heldout, logits), trainer.Rng(0))
    assert looked == pytest.approx({name: scores[name] for name in ("accuracy", "loss")}, rel=1e-12)
    assert set(looked) >= {Classify.watched[0]} and Classify.watched[1] == "higher"

    # the picture: a cell is framed where scikit-learn's matrix has a count, green on the diagonal alone
    side, pad = 5 * (8 + 2), 4
    grid = pictures["confusion"]
    assert grid.shape == (3, 10 * (side + pad) + pad, 10 * (side + pad) + pad)
    counts = confusion_matrix(labels, answers)
    for true, said in np.ndindex(10, 10):
        red, green, blue = grid[:, pad + true * (side + pad), pad + said * (side + pad)].tolist()
        empty = red == green == blue
        assert empty == (counts[true, said] == 0)
        assert empty or (green > red) == (true == said)


def test_an_answer_that_is_not_finite_is_wrong():
    found = task()
    labels = found.data.heldout.labels()
    logits = 20.0 * F.one_hot(labels, 10)
    whole, _ = found.evaluate(Oracle(found.data.heldout, logits), trainer.Rng(0))
    assert whole["accuracy"] == 1 and whole["loss"] < 1e-6
    for bad in (math.nan, math.inf):
        logits[labels == 0] = bad
        scores, _ = found.evaluate(Oracle(found.data.heldout, logits), trainer.Rng(0))
        assert scores["recall"] == [0.0] + [1.0] * 9 and scores["loss"] == math.inf


def test_of_many_classes_those_with_most_errors_are_drawn(monkeypatch):
    monkeypatch.setattr(classify, "PICTURED_CLASSES", 3)
    found = task()
    labels = found.data.heldout.labels()
    logits = 20.0 * F.one_hot(labels, 10)
    for wrong in (2, 5, 9):
        logits[labels == wrong] = logits[labels == wrong].roll(1, 1)  # each is taken for the next
    scores, pictures = found.evaluate(Oracle(found.data.heldout, logits), trainer.Rng(0))
    grid = pictures["confusion"]
    assert scores["accuracy"] < 0.8 and grid.shape[-1] == 3 * 54 + 4
    red, green, _ = grid
    assert torch.equal(red, green), "all cells are empty: none of the three is ever answered"
    assert found.unprinted == ("recall",)
    monkeypatch.setattr(classify, "PICTURED_CLASSES", 10)
    assert task().unprinted == ()


# ---- Nets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vit"])
@pytest.mark.parametrize("channels, size", [(1, 8), (3, 64)])
def test_nets_take_any_channels_and_sizes(name, channels, size):
    build = task().nets()[name]
    net = build(channels, 7, size, None)
    with torch.no_grad():
        out = net.eval()(common.draw(2, channels, size, size))
    assert out.shape == (2, 7) and out.isfinite().all()
    with torch.device("meta"):
        same = build(channels, 7, size, None)
    shapes = {key: value.shape for key, value in net.state_dict().items()}
    assert shapes == {key: value.shape for key, value in same.state_dict().items()}
    assert sum(p.numel() for p in net.parameters()) > 90_000


def test_resnet18_is_torchvisions_but_for_the_stem():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    theirs = resnet18(num_classes=10).eval()
    large, small = classify.resnet18(3, 10, 64).eval(), classify.resnet18(3, 10, 32).eval()
    large.load_state_dict(theirs.state_dict())
    x = common.draw(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(large(x), theirs(x))
    ours = small.state_dict()
    other = [key for key, value in theirs.state_dict().items() if ours[key].shape != value.shape]
    assert other == ["conv1.weight"] and small.conv1.weight.shape == (64, 3, 3, 3)
    assert small.conv1.stride == (1, 1) and isinstance(small.maxpool, nn.Identity)


def test_the_vit_is_torchvisions():
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    ours = classify.vit(3, 10, 32).eval()
    layers, width, heads = classify.VITS["tiny"]
    theirs = VisionTransformer(32, 4, layers, heads, width, 4 * width, num_classes=10).eval()
    nn.init.normal_(theirs.heads.head.weight)  # zero in a new net
    ours.load_state_dict(theirs.state_dict())
    x = common.draw(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)  # by another kernel of attention


# ---- BatchNorm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, flash", [(8, False), (26, True)])  # 16 patches, and 169
def test_the_vit_avoids_the_slow_bf16_flash_kernel_on_few_patches(size, flash):
    net = classify.vit(1, 10, size).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net(torch.zeros(1, 1, size, size, dtype=torch.bfloat16))
    assert any("flash_attention" in event.key for event in profile.key_averages()) == flash


@pytest.mark.parametrize("buffers", ["fp32", "bf16"])
def test_running_statistics_keep_fp32_beside_bf16_weights(small, buffers):
    torch.manual_seed(0)
    sites = [f"buffers={buffers}"]
    run = Precision(classify.cnn(1, 10, 8), recipe(pure_bf16=True, stochastic=True, sites=sites), lr=1e-3)
    norm, seen = run.model.norm1_0, []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    assert run.model.conv1_0.weight.dtype == torch.bfloat16
    assert norm.running_mean.dtype == norm.running_var.dtype == DTYPE_OF_NAME[buffers]
    images, labels = data.load("digits").train[list(range(640))]
    for part in range(20):
        rows = slice(32 * part, 32 * part + 32)
        run.backward(F.cross_entropy(run(images[rows]), labels[rows]))
        run.step()
    mean, var = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    for x in seen:  # [32, 8, 4, 4], in bf16 as the convolution left it
        assert x.dtype == torch.bfloat16
        mean = 0.9 * mean + 0.1 * x.double().mean((0, 2, 3))
        var = 0.9 * var + 0.1 * x.double().var((0, 2, 3))
    mean_off = (norm.running_mean - mean).abs().max() / mean.abs().max()
    off = max(mean_off, (norm.running_var / var - 1).abs().max())
    assert off < 1e-5 if buffers == "fp32" else 1e-3 < off < 0.1


def test_scores_come_from_the_running_statistics_and_leave_them_alone(monkeypatch):
    monkeypatch.setattr(classify, "CNNS", {"tiny": ((8, 16, 32), 1)})
    looks = ["--sample_every", 50, "--validate_every", 50, "--weights", "both"]
    assert quick("--steps", 100, "--ema_decay", 0.9, "--lr", "3e-3", *looks, "--batch_size", 32) == 0
    found = summary()["scores"]
    # the average of the weights fits the running statistics of the last ones
    assert found["ema"]["accuracy"] > 0.9 and found["raw"]["accuracy"] > 0.8
    assert found["ema"]["loss"] < 1.2 * found["raw"]["loss"]
    state = checkpoint()["precision"]["model"]
    counts = {value.item() for key, value in state.items() if key.endswith("num_batches_tracked")}
    assert counts == {100}  # pictures, looks at held-out images and scores count for nothing
    assert not any("running" in key for key in checkpoint()["precision"]["averages"]["ema"]["shadow"])
    # both sets of weights stand beside the same statistics
    run = trainer.Trainer(strategies.settle(checkpoint()["config"]), draws=True)
    run.load_state_dict(checkpoint())
    for source in ("ema", "raw"):
        net = run.precision.generator(source).net
        assert not net.training and torch.equal(net.norm0_0.running_var, state["norm0_0.running_var"])


# ---- The command -------------------------------------------------------------------------------------------


def test_it_learns_digits(capsys):
    assert quick("--batch_size", 64, "--ema_decay", 0.95, "--pure_bf16", "--stochastic", steps=80) == 0
    out = capsys.readouterr().out
    assert "accuracy" in out and "recall of class 9" in out
    found = summary()["scores"]["ema"]
    assert found["accuracy"] > 0.9 and found["loss"] < 0.5 and len(found["recall"]) == 10
    assert metrics()[-1]["loss"] < metrics()[0]["loss"] / 4
    assert Path("runs/run/samples/final.png").stat().st_size > 1000


def folder(*counts):
    for label, count in enumerate(counts):
        for i in range(count):
            picture(Path(f"photos/{'abc'[label]}/{i}{'x' * (i + 40 * label)}.png"), size=8)


def test_bad_input_ends_with_one_line_and_nothing_left(capsys, monkeypatch):
    cli.no_training(monkeypatch)
    np.savez("gap.npz", train_images=np.zeros((4, 8, 8), np.uint8), train_labels=np.array([0, 1, 3, 3]),
             test_images=np.zeros((3, 8, 8), np.uint8), test_labels=np.array([0, 1, 3]))
    np.savez("unseen.npz", train_images=np.zeros((3, 8, 8), np.uint8), train_labels=np.array([0, 1, 2]),
             test_images=np.zeros((2, 8, 8), np.uint8), test_labels=np.array([0, 1]))
    np.savez("one.npz", train_images=np.zeros((3, 8, 8), np.uint8), train_labels=np.array([0, 0, 0]),
             test_images=np.zeros((2, 8, 8), np.uint8), test_labels=np.array([0, 0]))
    for flags, *said in [
        ("--data synthetic", "no classes", "folder a class"),
        ("--data medmnist:one.npz", "one class"),
        ("--data medmnist:gap.npz", "class 2 of 4 has no image to train on"),
        ("--data medmnist:unseen.npz", "class 2 of 3 has no image held out"),
        ("--model unet", "no model 'unet' for task 'classify'", "cnn or resnet18 or vit"),
        ("--model resnet18 --size tiny", "for resnet18; it has one"),
        ("--model vit --image_size 29", "image size 29", "--image_size"),
        ("--model resnet18 --batch_size 1", "--batch_size 2 or more"),
        ("--pure_bf16 --set islands=norm --set buffers=bf16", "one kernel takes both", "drop one"),
    ]:
        assert quick(*flags.split()) == 2, flags
        line = one_line(capsys)
        assert all(words in line for words in said), line
        assert not Path("runs").exists()


def test_a_process_of_one_image_has_nothing_to_take_a_variance_of(monkeypatch):
    assert task(model="resnet18", batch_size=2).net()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="--batch_size 4 or more"):
        task(model="resnet18", batch_size=2).net()


def test_folders_name_the_class_without_an_image(capsys):
    folder(30, 30, 1)
    assert quick("--data", "folder:photos", "--image_size", 8) == 2
    assert "class 2 (c) of 3 has no image held out" in one_line(capsys)
    folder(30, 30, 2)  # of each class that has two images one is held out
    assert data.load("folder:photos", image_size=8).heldout.labels().bincount()[2] == 1
    folder(30, 30, 30)
    assert quick("--data", "folder:photos", "--image_size", 8, steps=1) == 0
    found = data.load("folder:photos", image_size=8)
    assert found.classes == ("a", "b", "c")
    assert torch.equal(found.heldout.labels(), found.heldout[list(range(len(found.heldout)))][1])


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
    "empty": ({LABELS: b""}, LABELS, "cannot read"),
    "magic": ({IMAGES: idx(NO_CLOTHES, 0x0D03)}, IMAGES, "does not begin as an idx file of uint8"),
    "swapped": ({LABELS: idx(NO_CLOTHES)}, LABELS, "with 1 dimensions"),
    "extent": ({IMAGES: idx(np.zeros((20, 28, 27)))}, IMAGES, "[20, 28, 27]"),
    "fewer": ({LABELS: gzip.compress(RAW[:-3])}, LABELS, "fewer than the 20"),
    "trailing": ({LABELS: gzip.compress(RAW + b"\1")}, LABELS, "more than the 20"),
    "label": ({LABELS: idx(np.full(20, 11))}, "named train don't match"),
    "count": ({LABELS: idx(np.zeros(19))}, "named train don't match"),
    "missing": ({FILES[3]: None}, FILES[3], "apt-get install dataset-fashion-mnist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fashion_mnist_that_is_broken(name):
    files, *said = BROKEN[name]
    clothes("own", **files)
    common.refused(lambda: data.load("fashion_mnist:own"), *said)


def test_fashion_mnist_is_trained_on(small, monkeypatch):
    fit = scores.fit_feature_net
    # a thousand steps are slow
    monkeypatch.setattr(scores, "fit_feature_net", lambda *args: fit(*args[:4], 2))
    clothes("own")
    assert quick("--data", "fashion_mnist:own", steps=2) == 0
    assert quick("--data", "fashion_mnist:own", "--task", "rflow", "--model", "dit", "--samples", 4,
                 "--sample_steps", 1, "--scores", "full", name="images", steps=1) == 0
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
