"""Every optimiser in every recipe: it learns, is measured, and resumes bit for bit; and it has the same bits
where its states lie on the CPU, where gradients are freed within backward, with and without averages.
"""

import copy
import functools
import itertools

import common
import pytest
import test_states_on_cpu
import torch
import torch.nn.functional as F
from common import BF16, RECIPES, batches, equal, net, refused, start, steps

from lowprec.optimizers import buckets
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.parts.offload import Offload

eager = common.eager


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Many buckets in a small net: of one tensor each, and of several."""
    monkeypatch.setattr(buckets.Bucket, "SMALL", 64)


# ---- The cases ---------------------------------------------------------------------------------------------

WAYS = {
    **RECIPES,
    "split stochastic e5m2": dict(pure_bf16=True, master="split", stochastic=True, sites=["exp_avg=e5m2"]),
    "split8 flash8": dict(
        pure_bf16=True, master="split8", stochastic=True, sites=["exp_avg=flash8", "exp_avg_sq=flash8"]
    ),
    "stochastic log4": dict(pure_bf16=True, stochastic=True, sites=["exp_avg=log4", "exp_avg_sq=log4"]),
}
CASES = [("adamw", way) for way in WAYS]
# each way of writing and of holding a moment, once in buckets (SGD, Lion) and once by tensors (the others)
OF_OTHERS = {
    "sgd": ["fp32", "stochastic", "kahan", "split", "opt8bit", "stochastic opt4bit"],
    "lion": ["bf16", "pure_bf16", "kahan+stochastic", "fp32 master", "stochastic opt8bit", "split opt8bit"],
    "adafactor": ["fp32", "stochastic", "kahan", "fp32 master"],
    "muon": ["pure_bf16", "kahan+stochastic", "split", "opt8bit", "stochastic opt4bit"],
}
assert OPTIMIZERS.keys() == {"adamw", *OF_OTHERS}
CASES += [(name, way) for name, ways in OF_OTHERS.items() for way in ways]
CASES += [("a stranger's", way) for way in ("fp32", "kahan", "split", "stochastic opt8bit", "fp8 moments")]
every_case = pytest.mark.parametrize("optimizer, way", CASES, ids=map("-".join, CASES))
EXACT = "fp32", "bf16", "fp16", "split", "fp32 master", "opt8bit", "opt4bit"
LR = {"adamw": 1e-2, "sgd": 0.02, "lion": 1e-3, "a stranger's": 1e-3}


def run_of(optimizer, way, seed=0, **options):
    flags = dict(WAYS[way])
    if "opt" in way or "log4" in way:
        pytest.importorskip("bitsandbytes" if "8" in way else "torchao")
    if optimizer == "a stranger's":
        optimizer = common.Lion
        flags["sites"] = [site for site in flags.get("sites", ()) if not site.startswith("exp_avg_sq")]
    options = dict(lr=LR.get(optimizer), weight_decay=0.01, seed=3, ema_decay=0.9) | options
    averages = ["0.5:bf16:stochastic"] if options["ema_decay"] else []
    return start(flags, net(seed, width=24), optimizer=optimizer, averages=averages, **options)


# ---- Training ----------------------------------------------------------------------------------------------


@torch.no_grad()
def loss_of(run):
    x, y = batches(1, seed=9)[0]
    return F.mse_loss(run(x, torch.arange(8.0)), y).item()


@every_case
def test_it_learns_is_measured_and_resumes_bit_for_bit(optimizer, way):
    options = dict(clip_grad=1.0, accumulate=2 if optimizer == "adamw" else 1)
    run = run_of(optimizer, way, **options)
    low = {BF16, torch.float32} if way == "islands" else {BF16}
    assert {p.dtype for p in run.params} == (low if WAYS[way].get("pure_bf16") else {torch.float32})
    coded = any("_scale" in name for name in run.optimizer.state[run.model.middle.weight])
    assert coded == any(word in way for word in ("opt", "fp8", "flash", "log4", "e5m2"))
    before = loss_of(run)
    common.train(run, 15)
    (report,) = common.train(run, 1, measure=True)
    assert loss_of(run) < 0.75 * before
    if way != "eco":  # what it asks of later steps is not known
        assert (0.999 if way in EXACT else 0.2) < report["update_survival"] <= 1
        assert 0 < report["update_ratio"] < 0.5
    saved = common.through_a_file(run.state_dict())
    common.train(run, 2, seed=1)
    other = run_of(optimizer, way, seed=1, **options)
    other.load_state_dict(saved)
    common.train(other, 2, seed=1)
    assert equal(run, other) and run.state_dict()["scaler"] == other.state_dict()["scaler"]


# ---- Elsewhere ---------------------------------------------------------------------------------------------


@functools.cache
def plain(optimizer, way):
    """(a run, what it reported when it was measured): three steps and two that leave gradients out."""
    run = run_of(optimizer, way)
    return run, go(run)


def go(run):
    steps(run, 2), steps(run, 2, 2, gaps=True)
    return steps(run, 1, 4, measure=True)


ELSEWHERE = {
    "released": dict(grad_release=True),
    "away": dict(states_on=test_states_on_cpu.Late),
    "away at once": dict(states_on=test_states_on_cpu.Early),
    "without averages": dict(ema_decay=None),
}
PLACES = [*itertools.product(CASES, ["released", "away"]), *itertools.product(CASES[::5], ELSEWHERE)]


def run_elsewhere(case, place, seed=0):
    options = dict(ELSEWHERE[place])
    if place.startswith("away"):
        options["states_on"] = Offload(options["states_on"]())
    return run_of(*case, seed=seed, **options)


@pytest.mark.parametrize("case, place", dict.fromkeys(PLACES), ids=str)
def test_it_has_the_same_bits(case, place):
    run, reports = plain(*case)
    if place == "released" and case[1] == "fp16":
        refused(lambda: run_elsewhere(case, place), "--fp16")
        return
    other = run_elsewhere(case, place)
    (own,), (report,) = go(other), reports
    assert own == {name: report[name] for name in own} and equal(run, other)
    if place.startswith("away"):
        parts = getattr(other.optimizer, "parts", [other.optimizer])
        assert sum(len(part._buckets) for part in parts) >= 5
        assert other.away.traffic.rooms


@pytest.mark.parametrize("place", ["released", "away"])
@pytest.mark.parametrize("way", ["kahan", "stochastic opt8bit", "split opt4bit"])
def test_it_goes_on_elsewhere_and_here_again(way, place):
    case = "adamw", way
    whole, begun = run_of(*case), run_elsewhere(case, place)
    steps(whole, 4), steps(begun, 2)
    saved = common.through_a_file(begun.state_dict())
    for run in (run_of(*case, seed=1), run_elsewhere(case, place, seed=1)):
        steps(run, 1)  # moments are on their way when the state comes
        run.load_state_dict(copy.deepcopy(saved))
        steps(run, 2, first=2)
        assert equal(whole, run)
