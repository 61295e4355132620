"""Weights that others write, noise that is none, restarts: each is named rightly."""

import copy

import pytest
import test_broken_runs
import torch
from common import draw
from test_watch_loop import losing, net
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowprec import Watch

FIRST = test_broken_runs.FIRST
LAST = test_broken_runs.LAST
Loop = test_broken_runs.Loop
shrunk = test_broken_runs.shrunk


# ---- Other writers -----------------------------------------------------------------------------------------


class TwoWriters(Loop):
    """A second optimiser steps some of the weights too."""

    def __init__(self, part, told=False):
        self.part, self.told, self.second = part, told, None
        super().__init__(stepped=self.also)

    def also(self, loop):
        if self.second is None:
            chosen = [p for name, p in self.named.items() if self.part in name]
            self.second = torch.optim.AdamW(chosen, lr=1e-3)
            if self.told:
                self.watch.elsewhere = set(chosen)
        self.second.step()


@pytest.mark.parametrize("part", ["", "3."])
def test_a_second_writer_is_named(part):
    found = {tensor for site, tensor in losing(TwoWriters(part).watch) if site == "update"}
    assert found >= {LAST} and (FIRST in found) == (part == ""), found
    assert losing(TwoWriters(part, told=True).watch) == set()


def moved_sometimes(loop):
    if loop.step == 6:
        shrunk(loop)


def swapped_and_back(loop):
    held = [p.clone() for p in loop.named.values()]
    shrunk(loop)
    for p, value in zip(loop.named.values(), held, strict=True):
        p.copy_(value)


@pytest.mark.parametrize("change", [moved_sometimes, swapped_and_back])
def test_weights_that_are_changed_by_plan_are_healthy(change):
    """As are those that healthy/weights.py clips, norms, prunes and takes back."""
    watch = Loop(stepped=change).watch
    assert losing(watch) == set(), str(watch)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_that_pass_through_bf16_are_named(name):
    def rounded(loop):
        for state in loop.optimizer.state.values():
            state[name].copy_(state[name].bfloat16())

    watch = Loop(stepped=rounded).watch
    assert ("exp_avg_sq", FIRST) in losing(watch), str(watch)
    assert f"{name} is fp32, and all its values are bf16 numbers" in str(watch).replace("\n", " ").replace(
        "  ", ""
    )


def emptied(name):
    def act(loop):
        for state in loop.optimizer.state.values():
            state[name].zero_()

    return act


def held_still(loop):
    for p, state in loop.optimizer.state.items():
        kept = loop.__dict__.setdefault("kept", {})
        kept.setdefault(p, state["exp_avg_sq"].clone())
        state["exp_avg_sq"].copy_(kept[p])


REWRITTEN = {"m emptied": (emptied("exp_avg"), "exp_avg"), "v still": (held_still, "exp_avg_sq")}


@pytest.mark.parametrize("change, moment", REWRITTEN.values(), ids=REWRITTEN)
def test_moments_that_something_else_writes_are_named(change, moment):
    watch = Loop(stepped=change).watch
    says = [f.text for f in watch.findings() if (f.site, f.tensor) == ("exp_avg_sq", FIRST)]
    assert f"something else changes {moment} between two steps" in says, str(watch)


# ---- Noise and fp16 that are none --------------------------------------------------------------------------


class RoundsTwice(torch.optim.Optimizer):
    """A stranger's optimiser in bf16: each operation is rounded to nearest."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.data.mul_(1 - 0.1 * group["lr"])
                p.data.sub_(group["lr"] * p.grad / (v.sqrt() + 1e-8))


def test_what_is_rounded_to_nearest_has_no_noise_to_blame():
    watch = Loop(make=RoundsTwice, dtype=torch.bfloat16, steps=40).watch
    assert not [f for f in watch.findings() if f.site.startswith("noise")], str(watch)


def test_sums_of_few_bf16_numbers_are_no_fp16():
    """The gradients of one small tensor all are numbers of fp16, by chance."""

    def few_bits(loop):
        g = loop.named["3.bias"].grad
        g.copy_(torch.tensor([5.0, 9.0, 300.0, 17.0]) * 2.0**-24)
        loop.named["1.bias"].grad.copy_((1 + torch.arange(64.0)) * 2.0**-23)

    assert losing(Loop(few_bits, make=lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-12)).watch) == set()


# ---- Other people's optimisers and restarts ----------------------------------------------------------------


class AdaShift(torch.optim.Optimizer):
    """Its second moment is of the gradient of some steps ago, and 0 at first."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                past = state.setdefault("past", [])
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                past.append(p.grad.clone())
                if len(past) > 5:
                    old = past.pop(0)
                    v.mul_(0.99).addcmul_(old, old, value=0.01)
                    p.data.sub_(group["lr"] * p.grad / (v.sqrt() + 1e-8))


def test_second_moments_of_another_kind_are_healthy():
    watch = Loop(make=AdaShift, steps=40).watch
    assert losing(watch) == set(), str(watch)


def restart(weights, momentum, at):
    def act(loop):
        if loop.step != at:
            return
        for name, p in loop.named.items():
            if weights:
                p.copy_(net(seed=7).state_dict()[name]) if p.dim() > 1 else p.zero_()
            kept = (torch.rand_like(p) > 0.99).float()
            for moment in ("exp_avg", "exp_avg_sq") if momentum else ("exp_avg_sq",):
                loop.optimizer.state[p][moment].mul_(kept)

    return act


RESTARTS = {  # (weights too, exp_avg too, after which step), severity
    "ReLoRA": (True, True, 20, "note"),
    "both moments, seen at once": (False, True, 22, "moderate"),
    "the second moment": (False, False, 22, "severe"),
}


@pytest.mark.parametrize("weights, momentum, at, severity", RESTARTS.values(), ids=RESTARTS)
def test_a_restart_by_plan_is_not_severe(weights, momentum, at, severity):
    """ReLoRA prunes both moments as it begins its factors anew."""
    watch = Loop(stepped=restart(weights, momentum, at), steps=40).watch
    found = [f.severity for f in watch.findings() if f.site == "exp_avg_sq" and f.tensor == FIRST]
    assert found == [severity], str(watch)
    if weights:
        assert not [f for f in watch.findings() if f.severity == "severe"], str(watch)


@pytest.mark.parametrize("every", [1, 3])
def test_a_checkpoint_that_is_put_back_is_a_note(every):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    watch = Watch(model, optimizer, average, every=every)
    parts = (model, optimizer, average)
    for step in range(60):
        x = draw(32, 16, seed=step)
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        if step == 25:
            saved = [copy.deepcopy(part.state_dict()) for part in parts]
        if step == 42:  # after a spike of the loss, as it were
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
    found = [f for f in watch.findings() if "put back" in f.text]
    assert found and {f.severity for f in watch.findings()} == {"note"}, str(watch)


def dropped(weights="", moments=True, at=20):
    """All that the optimiser keeps is dropped. weights: a part of the names of those that begin anew."""

    def act(loop):
        if loop.step != at:
            return
        for name, p in loop.named.items():
            if weights and weights in name:
                p.copy_(net(seed=7).state_dict()[name]) if p.dim() > 1 else p.zero_()
            loop.optimizer.state[p]["step"].zero_()
        if moments:
            loop.optimizer.state.clear()

    return act


DROPPED = {  # severity, what is said of the counter
    "with weights": (dropped("."), "note", "and weights began anew with it"),
    "with weights, before a look": (dropped(".", at=22), "note", "and weights began anew with it"),
    "with a part of the weights": (dropped("3."), "note", "and weights began anew with it"),
    "alone": (dropped(), "moderate", "and its moments began anew with it"),
    "alone, before a look": (dropped(at=22), "moderate", "and its moments began anew with it"),
    "the counter": (dropped(moments=False), "severe", "the state was lost or replaced"),
}


@pytest.mark.parametrize("drop, severity, words", DROPPED.values(), ids=DROPPED)
def test_a_state_that_is_dropped_is_judged_by_what_begins_anew_with_it(drop, severity, words):
    watch = Loop(stepped=drop, steps=40).watch
    found = [f for f in watch.findings() if f.tensor == FIRST]
    assert [f.severity for f in found if f.site == "step"] == [severity], str(watch)
    assert words in str(found) and all(f.severity in (severity, "note") for f in found), str(watch)


def test_a_group_that_is_frozen_by_its_rate_is_a_note():
    """From the start, or by a schedule on the way."""

    def frozen_later(loop):
        if loop.step == 12:
            loop.optimizer.param_groups[1]["lr"] = 0.0

    def groups(lr):
        return lambda params: torch.optim.AdamW(
            [{"params": rest, "lr": rate} for rest, rate in zip(halves(params), (1e-3, lr), strict=True)]
        )

    for lr, stepped in ((0.0, None), (1e-3, frozen_later)):
        watch = Loop(stepped=stepped, make=groups(lr), steps=40).watch
        assert losing(watch) == set(), str(watch)
        assert {f.tensor for f in watch.findings() if "its learning rate" in f.text} >= {LAST}, str(watch)


def halves(params):
    params = list(params)
    return params[:2], params[2:]
