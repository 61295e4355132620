"""Watch in a loop: second moments that begin anew, clipping, other states."""


import pytest
import test_watch_loop
import torch
from torch import nn

from lowprec import rounding
from lowprec.errors import Refused
from lowprec.optimizers import rounded
from lowprec.watch.watch import Watch

BF16 = test_watch_loop.BF16
OPTIMIZERS = test_watch_loop.OPTIMIZERS
losing = test_watch_loop.losing
net = test_watch_loop.net
train = test_watch_loop.train


# ---- Second moments that were reset ------------------------------------------------------------------------

MOMENTS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, alpha=0.99),
    "bf16 v": lambda p: rounded.AdamW(p, lr=1e-3, compiled=False, exp_avg_sq="bf16", update="stochastic"),
}


def reset(optimizer):
    for state in optimizer.state.values():
        for name in ("exp_avg_sq", "exp_avg_sq_scale", "square_avg"):
            if name in state:
                state[name].zero_()


def resets(watch):
    return {f.tensor for f in watch.findings() if f.site == "exp_avg_sq" and "it was reset" in f.text}


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_a_second_moment_that_was_reset_is_named(make):
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, 20)
    healthy = Watch(model, optimizer, every=6)
    train(model, optimizer, 20)
    healthy.remove()
    assert resets(healthy) == set(), str(healthy)
    reset(optimizer)
    resumed = Watch(model, optimizer, every=6)
    train(model, optimizer, 20)
    assert len(resets(resumed)) == 6, str(resumed)
    model = net()
    optimizer = make(model.parameters())
    between = Watch(model, optimizer, every=6)
    train(model, optimizer, 20)
    reset(optimizer)  # 4 steps before the next look
    train(model, optimizer, 4)
    assert len(resets(between)) == 6, str(between)


def test_codes_of_a_second_moment_that_was_reset_are_named():
    model = net()
    kinds = dict(exp_avg="int8", exp_avg_sq="int8", update="stochastic")
    optimizer = rounded.AdamW(model.parameters(), lr=1e-3, compiled=False, **kinds)
    train(model, optimizer, 9)
    reset(optimizer)
    watch = Watch(model, optimizer, every=6)
    train(model, optimizer, 9)
    assert len(resets(watch)) == 6, str(watch)


@pytest.mark.parametrize("zeros", [False, True], ids=["no gradient", "a gradient of 0"])
def test_a_tensor_whose_gradients_start_late_was_not_reset(zeros):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=1)
    late = [torch.zeros_like(p) if zeros else None for p in model[0].parameters()]

    def start(*_):
        for p, g in zip(model[0].parameters(), late, strict=True):
            p.grad = g

    handle = optimizer.register_step_pre_hook(start)
    watch.remove()
    watch = Watch(model, optimizer, every=1)  # its hook after that one
    train(model, optimizer, 6)
    handle.remove()
    train(model, optimizer, 6)
    assert resets(watch) == set(), str(watch)


def test_gradients_that_die_were_not_reset():
    """v decays by beta2 alone then: the least that there can be."""
    for dtype, beta2 in ((BF16, 0.99), (torch.float32, 0.9), (BF16, 0.999)):
        model = net(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, beta2))
        train(model, optimizer, 9)
        watch = Watch(model, optimizer, every=9)
        for _ in range(60):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e-20)
            optimizer.step()
        assert all("reset" not in f.text for f in watch.findings()), str(watch)


CUT = {
    "no exp_avg_sq": (lambda state: state.pop("exp_avg_sq"), "state of 0.weight has no exp_avg_sq"),
    "another shape": (lambda state: state.update(exp_avg_sq=torch.ones(7)), r"exp_avg_sq of the shape"),
    "no step": (lambda state: state.pop("step"), "no number of steps"),
    "a word": (lambda state: state.update(step="seven"), "no number of steps"),
}


@pytest.mark.parametrize("cut, words", CUT.values(), ids=CUT)
@pytest.mark.parametrize("late", [False, True], ids=["before", "within"])
def test_a_state_that_is_cut_is_refused_in_one_line(cut, words, late):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 3)
    if late:
        Watch(model, optimizer, every=2)
    cut(optimizer.state[model[0].weight])
    with pytest.raises(Refused, match=words) as told:
        if late:
            train(model, optimizer, 3)
        Watch(model, optimizer)
    assert "\n" not in str(told.value)


# ---- Clipping and other states -----------------------------------------------------------------------------


def clipped(most, make, scaler=None, steps=12):
    """Verdict on a loop that clips in place; scaler: a GradScaler, or a loss scale as a number."""
    model = net()
    optimizer = make(model.parameters())
    watch = Watch(model, optimizer, every=2)
    for step in range(steps):
        torch.manual_seed(rounding.hash64(step) >> 1)
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            (loss * (scaler or 1.0)).backward()
            for p in model.parameters():
                p.grad /= scaler or 1.0
        if most:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return [f.text for f in watch.findings() if f.site == "grads" and "clipping leaves" in f.text]


@pytest.mark.parametrize("make", [OPTIMIZERS["SGD"], OPTIMIZERS["AdamW"]], ids=["SGD", "AdamW"])
def test_clipping_to_nothing_is_named_and_a_loss_scale_is_not(make):
    assert len(clipped(1e-9, make)) == 1
    assert len(clipped(1e-9, make, torch.amp.GradScaler("cpu"))) == 1
    by_scaler = torch.amp.GradScaler("cpu")
    for most, scaler in ((None, by_scaler), (10.0, 1000.0), (1.0, by_scaler), (0.05, None), (0.05, 1000.0)):
        assert clipped(most, make, scaler) == [], (most, scaler)


def test_momentum_in_bf16_is_a_note_with_what_it_loses():
    model = net(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch = Watch(model, optimizer, every=2)
    train(model, optimizer)
    (note,) = [f for f in watch.findings() if f.site == "momentum_buffer"]
    assert note.severity == "note" and note.text.startswith("held in bf16 for 6 tensors")
    assert "up to" in note.text and watch.accumulators["momentum_buffer"].share > 0.9


def test_a_momentum_that_bf16_freezes_is_a_finding():
    """Gradients that repeat: near its end of g / (1 - 0.999) a momentum moves by less than half an ulp."""
    p = nn.Parameter(torch.rand(512, dtype=BF16))
    model = nn.ParameterList([p])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.999)
    g = torch.rand(512).to(BF16)
    watch = Watch(model, optimizer, every=20)
    for _ in range(600):
        p.grad = g.clone()
        optimizer.step()
    assert ("momentum_buffer", "0") in losing(watch), str(watch)
