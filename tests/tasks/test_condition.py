"""--condition: a net that sees an image beside the noise."""

import common
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import refused
from generating import FLAGS, batch, make
from PIL import Image

import models
import train
from tasks import condition
from tasks.diffusion import DDPM, RFlow
from tasks.reflow import Reflow
from tasks.task import Rng

eager = common.eager


class Seen:
    """A net that answers zeros for the channels of an image, and keeps what it saw behind them."""

    def __init__(self, channels=1):
        self.channels, self.behind = channels, []

    def __call__(self, x, t, labels):
        self.behind.append(x[:, self.channels :])
        return torch.zeros_like(x[:, : self.channels])


def test_what_a_condition_shows(digits):
    images, labels = batch(digits)
    for kind in ("blurred", "halved"):
        kept, shown = condition.condition_of(kind, images, labels, 0)
        assert torch.equal(kept, labels) and shown.shape == images.shape
        assert 0 < (shown - images).abs().mean() < images.std()
    assert torch.equal(shown[..., ::2, ::2], shown[..., 1::2, 1::2]), "a quarter of the pixels"
    flat = torch.full((1, 1, 8, 8), 0.5)
    assert torch.allclose(condition.condition_of("blurred", flat, None, 0)[1], flat), "edges too"
    masks = torch.tensor([[[0, 2], [1, 1]]])
    kept, shown = condition.condition_of("masks", torch.zeros(1, 1, 2, 2), masks, 3)
    assert torch.equal(shown.argmax(1), masks) and shown.unique().tolist() == [-1, 1]
    assert kept.tolist() == [0] and condition.condition_of("none", images, labels, 0)[1] is None


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_training_drawing_and_scoring_show_each_image_its_own_condition(kind, digits):
    task = make(kind, digits, condition="halved", samples=12, guidance=2.0)
    images, labels = batch(digits)
    wanted = condition.condition_of("halved", images, labels, 0)[1]
    net = Seen()
    task.loss(net, (images, labels), Rng(0), 0)
    assert torch.equal(net.behind[0], wanted)
    net = Seen()
    scores, pictures = task.evaluate(net, Rng(1))
    real, heldout_labels = task.heldout_images("cpu", 12)
    wanted = condition.condition_of("halved", real, heldout_labels, 0)[1]
    assert torch.equal(net.behind[0], torch.cat([wanted, wanted])), "guidance asks twice at once"
    assert 0 < scores["psnr"] < 20 and scores["distance"] > 0
    task.preview(net, Rng(1))
    assert not any(part.shape[1] != 1 for part in net.behind)


def test_a_perfect_drawing_has_no_distance(digits):
    images, _ = batch(digits)
    assert condition.mean_psnr(images, images) == 100
    assert condition.mean_psnr(images + 0.02, images) < 41
    assert make(RFlow, digits).perceptual_distance(images, images).max() == 0


@pytest.mark.parametrize("model", ["unet", "dit"])
def test_a_net_takes_the_channels_and_answers_the_image(model, digits):
    task = make(RFlow, digits, condition="blurred", model=model)
    net = task.net()
    (x, t, y), _ = task.example()
    assert x.shape[1] == 2
    with torch.device("meta"):
        assert task.net()(x, t, y).shape[1] == 1
    plain = models.GENERATIVE[model](1, 10, 8)
    added = sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in plain.parameters())
    assert added > 0, "and without a condition it is the net that it was"


@pytest.fixture
def paired(tmp_path):
    """Grey images of 16 x 16 and coloured ones of 8 x 8 of the same names, PATH/targets and PATH/inputs."""
    root = tmp_path / "pairs"
    for part in ("inputs", "targets"):
        (root / part).mkdir(parents=True)
    random = np.random.default_rng(0)
    for i in range(20):
        image = Image.fromarray(random.integers(0, 255, (16, 16), np.uint8))
        image.save(root / f"targets/{i}.png")
        image.resize((8, 8), Image.Resampling.BOX).convert("RGB").save(root / f"inputs/{i}.png")
    return root


def loaded(root, **flags):
    flags = {"condition": "inputs", "data": f"folder:{root}", "image_size": 16, **flags}
    return RFlow.load(FLAGS.typed(flags))


def test_pairs_of_a_folder_keep_together(paired):
    data = loaded(paired)
    assert (data.channels, data.condition_channels, data.num_classes) == (1, 3, 0)
    assert (len(data.train), len(data.heldout)) == (18, 2)
    images, inputs = data.train[list(range(18))]
    assert inputs.shape == (18, 3, 16, 16)
    labels, shown = condition.condition_of("inputs", images, inputs, 3)
    assert shown is inputs and labels.tolist() == [0] * 18
    far = (F.avg_pool2d(images, 2)[:, None] - F.avg_pool2d(inputs, 2)[None]).square().flatten(2).mean(2)
    assert far.argmin(1).tolist() == list(range(18)), "the input of another target is farther"
    before = data.fingerprint
    Image.new("L", (8, 8)).save(paired / "inputs/3.png")
    assert loaded(paired).fingerprint != before, "a run does not go on with other inputs"


def test_pairs_that_are_none_are_refused(paired, digits):
    refused(lambda: RFlow.load(FLAGS.typed({"condition": "inputs"})), "digits has no inputs", "PATH/targets")
    refused(lambda: loaded(paired, condition="none"), "holds inputs and targets", "--condition inputs")
    refused(lambda: loaded(paired, pages="all"), "--pages", "inputs")
    Image.new("L", (8, 4)).save(paired / "inputs/5.png")
    refused(lambda: loaded(paired), "inputs/5.png is 8x4", "targets/5.png is 16x16")
    (paired / "inputs/5.png").unlink()
    (paired / "inputs/7.png").unlink()
    refused(lambda: loaded(paired), "targets/5.png has no input", "inputs/5")
    (paired / "targets/5.png").unlink()
    (paired / "targets/7.png").unlink()
    (paired / "targets/2.png").unlink()
    refused(lambda: loaded(paired), "inputs/2.png has no target", "targets/2")
    refused(lambda: loaded(paired / "inputs"), "no folders inputs and targets")


def test_images_from_those_of_a_folder_are_learnt_and_diagnosed(paired, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"--data folder:{paired} --condition inputs --image_size 16 --steps 3 --batch_size 4 --samples 6"
    assert train.main([*flags.split(), *"--sample_steps 2 --model dit --name a".split()]) in (0, None)
    assert "psnr" in capsys.readouterr().out
    assert train.main(["--diagnose", "runs/a"]) in (0, 1, None)


def test_what_has_no_condition_is_refused(digits):
    config = FLAGS.typed({"condition": "halved", "task": "reflow", "teacher": "runs/x"})
    refused(lambda: Reflow.check(config), "--task reflow", "trained without it")
    refused(lambda: RFlow.check(FLAGS.typed({"condition": "halved", "vae": "runs/vae"})), "--vae")
    refused(lambda: RFlow.load(FLAGS.typed({"condition": "masks", "data": "digits"})), "no masks")
