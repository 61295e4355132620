"""The perceptual term: the distance against float64, the clean image that an answer stands for, precision."""

from pathlib import Path

import cli
import common
import pytest
import torch
from cli import (
    assert_same,
    metrics,
    quick,
)
from generating import batch, make, noise_from, velocity_to

from tasks import metrics as scores
from tasks.diffusion import DDPM, RFlow
from tasks.feature_net import DIGITS_NET_FILE, fit_feature_net, load_feature_net
from tasks.generation import TIMESTEPS
from tasks.perceptual import Perceptual
from tasks.task import Rng

in_a_folder_of_its_own = cli.in_a_folder_of_its_own


def written_out(net, a, b):
    """float64 [B]: the distance, a layer after the other, without anything of perceptual.py."""
    net, total = load_feature_net(DIGITS_NET_FILE).double(), 0.0
    a, b = a.double(), b.double()
    for layer in net.body[:-3]:  # all but pooling, flattening and the last Linear
        a, b = layer(a), layer(b)
        if isinstance(layer, torch.nn.SiLU):
            x, y = (z / (z.pow(2).sum(1, keepdim=True) + 1e-4).sqrt() for z in (a, b))
            total = total + (x - y).pow(2).sum(1).flatten(1).mean(1)
    return total


# ---- The distance ------------------------------------------------------------------------------------------


def test_it_is_the_distance_written_out(digits):
    net = scores.yardstick(digits, "nowhere")
    a, b = batch(digits, 16)[0], batch(digits, 32)[0][16:]
    found = Perceptual(net)(a, b)
    assert found.shape == (16,) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), written_out(net, a, b), rtol=1e-5, atol=1e-6)
    assert Perceptual(net)(a, a).abs().max() == 0
    assert found.min() > 0 and found.max() < 4 * 7
    near, far = (Perceptual(net)(a, a + s * Rng(0).normal(*a.shape)).mean() for s in (0.05, 0.5))
    assert 0 < near < 0.3 * far


def test_gradients_reach_the_images_and_not_the_net(digits):
    net = scores.yardstick(digits, "nowhere")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    distance = Perceptual(net)
    a, b = (Rng(seed).normal(4, 1, 8, 8).requires_grad_() for seed in (0, 1))
    distance(a, b).sum().backward()
    assert min(a.grad.abs().sum(), b.grad.abs().sum()) > 0 and a.grad.isfinite().all()
    assert all(p.grad is None for p in distance.parameters())
    still = torch.zeros(2, 1, 8, 8, requires_grad=True)  # an image without any edge
    distance(still, batch(digits, 2)[0]).sum().backward()
    assert still.grad.isfinite().all()
    assert_same(dict(net.state_dict()), before)


def test_bf16_holds_the_net_and_the_distance_in_bf16(digits):
    net = scores.yardstick(digits, "nowhere")
    a, b = batch(digits, 16)[0], batch(digits, 32)[0][16:]
    low, full = Perceptual(net, torch.bfloat16), Perceptual(net)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    found = low(a, b)
    assert found.dtype == torch.float32 and common.same(found, found.bfloat16().float())
    torch.testing.assert_close(found, full(a, b), rtol=0.05, atol=0.02)
    near = a + 0.002 * Rng(0).normal(*a.shape)  # images closer than 8 bits can tell
    assert float((low(a, near) - full(a, near)).abs().mean() / full(a, near).mean()) > 1


# ---- The image that an answer stands for -------------------------------------------------------------------


@pytest.mark.parametrize("velocity", ["clean-noise", "noise-clean"])
def test_an_exact_velocity_stands_for_the_clean_image(velocity, digits):
    task, (images, _) = make(RFlow, digits, velocity=velocity), batch(digits)
    noise, t = Rng(0).normal(*images.shape), Rng(1).uniform(16) * TIMESTEPS
    x = task.scheduler.add_noise(images, noise, t)
    clean, weight = task.clean(x, task.sign * (images - noise), t)
    torch.testing.assert_close(clean, images, rtol=0, atol=1e-5)
    assert weight.tolist() == [1.0] * 16


def test_an_exact_noise_stands_for_the_clean_image(digits):
    task, (images, _) = make(DDPM, digits), batch(digits)
    noise, t = Rng(0).normal(*images.shape), torch.arange(16) * 66
    x = task.add_noise(images, noise, t)
    clean, weight = task.clean(x, noise, t)
    torch.testing.assert_close(clean, images, rtol=0, atol=1e-3)  # sigma / a grows to 30 here
    torch.testing.assert_close(weight.double(), task.schedule[t].sqrt(), rtol=1e-6, atol=0)
    # the slope of weight x clean in the noise is sigma, also where a is 0.006
    last = torch.full((16,), 999)
    answer = noise.clone().requires_grad_()
    clean, weight = task.clean(x, answer, last)
    (weight[:, None, None, None] * clean).sum().backward()
    assert answer.grad.min() > -1.01 and answer.grad.max() < -0.99


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_the_term_is_added_to_the_loss(kind, digits):
    point = batch(digits, 1)[0]
    images, labels = point.expand(16, -1, -1, -1), torch.zeros(16, dtype=torch.int64)
    plain, task = make(kind, digits), make(kind, digits, perceptual=0.5)

    def loss(task, net):
        return float(task.loss(net, (images, labels), Rng(0), 0))

    exact = velocity_to(point) if kind is RFlow else noise_from(point, plain)
    assert loss(plain, exact) < 1e-8 and loss(task, exact) < 1e-4  # both terms are 0 at the solution

    def wrong(x, t, labels):
        return exact(x, t, labels) + 0.3

    term = loss(task, wrong) - loss(plain, wrong)
    twice = make(kind, digits, perceptual=1.0)
    assert term > 0.01
    assert loss(twice, wrong) - loss(plain, wrong) == pytest.approx(2 * term, rel=1e-4)
    low = make(kind, digits, sites=["perceptual=bf16"], perceptual=0.5)
    assert loss(low, wrong) != loss(task, wrong)
    assert loss(low, wrong) == pytest.approx(loss(task, wrong), rel=0.05)
    assert plain._perceptual is None  # a loss without the term reads no net


# ---- Training ----------------------------------------------------------------------------------------------


def test_the_loss_falls(capsys):
    flags = "--perceptual 0.5 --batch_size 16 --lr 3e-3 --log_every 10 --ledger".split()
    assert quick(*flags, steps=40) == 0
    rows = metrics()
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert "feature net of --perceptual" in capsys.readouterr().out


def test_a_set_without_a_feature_net_of_its_own_gets_one(monkeypatch):
    monkeypatch.setattr(scores, "fit_feature_net", lambda *given: fit_feature_net(*given[:-1], 3))
    cli.plant_folder("photos")
    assert quick("--data", "folder:photos", "--image_size", 8, "--perceptual", 0.1, steps=1) == 0
    assert list(Path("runs/feature_nets").glob("*.safetensors"))
