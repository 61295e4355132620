"""What Precision.step(measure=True) reports: what rounding did to a step."""

import json
import math

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, RECIPES, batches, draw, same, start, train
from torch import nn

from lowprec.optimizers.buckets import Bucket

eager = common.eager


def first_step(name, weights, lr, **options):
    """(run, weights before, report) of the first step of one parameter: |update| is lr everywhere."""
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(weights.clone())
    run = start(name, model, lr=lr, **options)
    before = model.weight.detach().clone()
    model.weight.grad = draw(*weights.shape, seed=1).sign().to(model.weight.dtype)
    return run, before, run.step(measure=True)


def bf16_weights(std, n=65536):
    return draw(n, 1, scale=std).to(BF16).float()


def ulps(weights):
    """Spacing of bf16 at |weights|."""
    return 2.0 ** (torch.frexp(weights.double())[1].double() - 8)


@pytest.mark.parametrize(
    "std, lr, low, high",
    [(0.02, 1e-4, 0.83, 0.93), (0.05, 1e-4, 0.42, 0.52), (0.1, 1e-4, 0.20, 0.30), (0.05, 1e-5, 0.04, 0.08)],
)
def test_survival_to_nearest_is_as_predicted(std, lr, low, high):
    weights = bf16_weights(std)
    run, before, report = first_step("pure_bf16", weights, lr)
    predicted = (lr > ulps(weights) / 2).double().mean().item()
    assert report["update_survival"] == pytest.approx(predicted, abs=0.02)
    assert low < report["update_survival"] < high  # measured elsewhere: 88, 47, 25 and 6 %
    moved = (run.params[0] != before).double().mean().item()
    assert report["update_survival"] == pytest.approx(moved, abs=1e-6)
    assert report["update_ratio"] == pytest.approx(lr / std, rel=0.02)


def test_survival_with_stochastic_rounding_is_the_update_in_ulps():
    weights = bf16_weights(0.05)
    _, _, report = first_step("stochastic", weights, 1e-5)
    # an update of a tenth of an ulp moves one weight in ten, by ten times as much
    predicted = (1e-5 / ulps(weights)).clamp(max=1).mean().item()
    assert report["update_survival"] == pytest.approx(predicted, rel=0.1)


def test_weight_decay_alone_counts_as_a_wanted_update():
    for name, survived in (("pure_bf16", 0.0), ("split", 1.0)):
        model = nn.Linear(8, 8, bias=False)
        run = start(name, model, lr=1e-3, weight_decay=0.01)
        model.weight.grad = torch.zeros_like(model.weight)
        assert run.step(measure=True)["update_survival"] == pytest.approx(survived, abs=0.02)


def test_frozen_second_moment_and_average_show():
    moved = {}
    for name, sites in (("pure_bf16", ["ema=bf16"]), ("fp32", [])):
        flags, model = {**RECIPES[name], "sites": sites}, nn.Linear(64, 64, bias=False)
        run = start(flags, model, lr=1e-4, ema_decay=0.9999)
        p = run.params[0]
        for step in range(30):
            p.grad = torch.full_like(p, 1.0 if step < 20 else 0.01)
            report = run.step(measure=True)
        moved[name] = (report["exp_avg_sq_moved"], report["ema_moved"])
    # only entries near 0 have ulps small enough
    assert moved["pure_bf16"][0] == 0.0 and moved["pure_bf16"][1] < 0.02
    assert moved["fp32"][0] == 1.0 and moved["fp32"][1] > 0.95


def test_a_second_moment_that_should_shrink_and_stands_is_counted():
    run = start("pure_bf16", nn.Linear(8, 8, bias=False), lr=1e-4)
    p = run.params[0]
    for gradient in (1.0, 0.0):
        p.grad = torch.full_like(p, gradient)
        report = run.step(measure=True)
    assert report["exp_avg_sq_moved"] == 0.0, "no gradient, and a decay below half an ulp"


def test_nonfinite_gradients_are_counted_not_hidden():
    run = start("stochastic")
    train(run, 1)
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    bad = [float("nan"), float("inf"), -float("inf")]
    run.model.out.weight.grad.view(-1)[:3] = torch.tensor(bad, dtype=BF16)
    report = run.step(measure=True)
    assert report["nonfinite_grads"] == 3 and not math.isfinite(report["grad_norm"])
    assert run.model.out.weight.isnan().sum() == 3, "the weights show it"


def test_a_report_is_made_only_when_asked_and_is_plain_numbers():
    run = start("stochastic")
    assert train(run, 1) == [{}]
    (report,) = train(run, 1, measure=True)
    of_weights = {"update_survival", "update_ratio", "exp_avg_sq_moved", "ema_moved"}
    assert set(report) == of_weights | {"grad_norm", "nonfinite_grads", "skipped_steps"}
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("name", ["fp16", "stochastic opt8bit", "split", "kahan", "eco", "islands"])
def test_measuring_changes_nothing(name):
    runs = [start(name, lr=1e-2, clip_grad=1.0, ema_decay=0.9) for _ in range(2)]
    for run, measure in zip(runs, (False, True), strict=True):
        train(run, 5, measure=measure)
    for source in ("raw", "ema"):
        one, two = (run.weights(source) for run in runs)
        assert all(same(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", ["fp32", "stochastic", "split", "islands"])
def test_measuring_pairs_each_weight_with_its_own_average(monkeypatch, name):
    # large and small tensors lie in different buckets: their order is not that of the parameters
    monkeypatch.setattr(Bucket, "SMALL", 100)
    run = start(name, lr=1e-2, ema_decay=0.5)
    for report in train(run, 3, measure=True):
        assert report["ema_moved"] > 0.95
