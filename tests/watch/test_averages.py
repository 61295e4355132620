"""An average is judged by what it should be: finite, of its weights' size and sign, on its way to them."""

import pytest
import torch
from test_watch_loop import eager, losing, net, train
from torch import nn

from lowprec.watch import compare
from lowprec.watch.watch import Watch

eager = eager
RATE = 0.05


class Holder:
    """A stranger's average: an object with `shadow` and `decay`."""

    def __init__(self, shadow):
        self.shadow = shadow
        self.decay = 1 - RATE


class Listed:
    """Another one, with tensors in order."""

    def __init__(self, shadow):
        self.shadow_params = list(shadow.values())
        self.decay = 1 - RATE


KINDS = {"dict": lambda shadow: shadow, "object": Holder, "list": Listed}


def healthy(average, p, step):
    average.lerp_(p, RATE)


def nan_once(average, p, step):
    average.lerp_(p, RATE)
    if step == 9:
        average[..., 0] = torch.nan


def infinite(average, p, step):
    average.lerp_(p, RATE)
    if step == 9:
        average.mul_(torch.inf)


def too_large(average, p, step):
    average.copy_(1e4 * p)


def minus(average, p, step):
    average.copy_(-p)


def towards_minus(average, p, step):
    average.lerp_(-p, RATE)


def flipped(average, p, step):
    average.add_((average - p) * RATE)


def overshooting(average, p, step):
    average.lerp_(p, 1.5)


def copied(average, p, step):
    average.copy_(p)


BROKEN = {
    "nan": (nan_once, "entries of its sample are not finite"),
    "infinite": (infinite, "entries of its sample are not finite"),
    "ten thousand times too large": (too_large, "times as large as its weight"),
    "minus the weights": (minus, "the other sign"),
    "towards minus the weights": (towards_minus, "away from its weight"),
    "a sign flip": (flipped, "away from its weight"),
    "a rate of 1.5": (overshooting, "1.5 of the way"),
    "a copy": (copied, "averages nothing"),
}


def watched(update, kind, steps=36):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, kind(shadow), every=3)
    done = [0]

    def move():
        for name, p in model.named_parameters():
            update(shadow[name], p.detach(), done[0])
        done[0] += 1

    train(model, optimizer, steps, move)
    return watch


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("update, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_average_is_named(update, words, kind):
    watch = watched(update, kind)
    found = [f for f in watch.findings() if f.site == "ema" and f.severity != "note"]
    assert {f.tensor for f in found} >= {"0.weight", "3.weight"}, str(watch)
    assert words in next(f.text for f in found if f.tensor == "0.weight"), str(watch)
    assert watch.diagnosis().status == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_healthy_average_is_healthy(kind):
    assert losing(watched(healthy, kind)) == set()


def bf16_stochastic(average, p, step):
    from lowprec.rounding import stochastic_round

    target = average.float().lerp(p.float(), RATE).flatten()
    noise = torch.randint(1 << 16, target.shape, dtype=torch.int32)
    average.copy_(stochastic_round(target, noise).view_as(average))


def warmed_up(average, p, step):
    average.lerp_(p, 1 / (1 + step))


@pytest.mark.parametrize("update", [warmed_up, bf16_stochastic])
def test_other_healthy_averages(update):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dtype = torch.bfloat16 if update is bf16_stochastic else torch.float32
    shadow = {name: p.detach().clone().to(dtype) for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, shadow, every=3)
    done = [0]

    def move():
        for name, p in model.named_parameters():
            update(shadow[name], p.detach(), done[0])
        done[0] += 1

    train(model, optimizer, 36, move)
    assert losing(watch) == set(), str(watch)


def test_a_small_bias_that_changes_its_sign_is_healthy():
    """Its average then has the other sign, rightly."""
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, shadow, every=2)
    for step in range(20):
        optimizer.zero_grad()
        sign = 1.0 if step < 10 else -1.0
        (sign * model(torch.ones(3, 4))).mean().backward()
        optimizer.step()
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)
    assert losing(watch) == set(), str(watch)


# ---- Two checkpoints ---------------------------------------------------------------------------------------

SPOILT = {
    "nan": (lambda w: w * torch.nan, "not finite"),
    "infinite": (lambda w: w * torch.inf, "not finite"),
    "ten thousand times too large": (lambda w: w * 1e4, "times as large as its weight"),
    "minus the weights": (lambda w: -w, "the other sign"),
}


@pytest.mark.parametrize("spoil, words", SPOILT.values(), ids=SPOILT)
def test_a_broken_average_in_a_checkpoint_is_named(tmp_path, spoil, words):
    torch.manual_seed(0)
    w = torch.randn(64, 64)
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    torch.save({"model": {"w": w}, "ema": {"w": w.clone()}}, before)
    torch.save({"model": {"w": w + 0.1}, "ema": {"w": w + 0.05}}, after)
    assert compare.compare(before, after).status == 0
    torch.save({"model": {"w": w + 0.1}, "ema": {"w": spoil(w)}}, after)
    found = compare.compare(before, after).findings
    assert (found[0].site, found[0].severity, found[0].tensor) == ("ema", "severe", "ema.w")
    assert words in found[0].text
