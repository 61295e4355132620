"""Watch in a loop: it reads only, unwraps what frameworks wrap, takes every kind of average, refuses in one
line. test_planted_faults.py shows what it finds.
"""

import pytest
import torch
from healthy.shared import mlp, task, trained
from torch import nn

from lowprec import rounding
from lowprec.errors import Refused
from lowprec.optimizers import rounded
from lowprec.watch import adapters
from lowprec.watch.verdicts import LINE_WIDTH, Diagnosis, Finding
from lowprec.watch.watch import Watch

BF16 = torch.bfloat16


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)).to(dtype)


def train(model, optimizer, steps=12, average=None, by_closure=False):
    for step in range(steps):
        torch.manual_seed(rounding.hash64(step) >> 1)
        x = torch.randn(32, 16).to(next(model.parameters()).dtype)

        def forward(x=x):
            optimizer.zero_grad()
            loss = (model(x).float() - x[:, :4].float()).square().mean()
            loss.backward()
            return loss

        if by_closure:
            optimizer.step(forward)
        else:
            forward()
            optimizer.step()
        if average:
            average()


def losing(watch):
    return {(f.site, f.tensor) for f in watch.findings() if f.severity != "note"}


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, one tensor at a time": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "Adam, L2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "ours": lambda p: rounded.AdamW(p, lr=1e-3, weight_decay=0.1, compiled=False),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_training_keeps_its_bits_and_fp32_is_healthy(make):
    plain, watched = net(), net()
    one, two = make(plain.parameters()), make(watched.parameters())
    watch = Watch(watched, two, every=2)
    train(plain, one)
    state = torch.get_rng_state()
    train(watched, two)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert losing(watch) == set(), str(watch)
    assert watch.shares()["0.weight"]["update"] < 1e-3
    assert (watch.steps, watch.looks) == (12, 7)


def test_what_is_wanted_is_the_step_of_an_fp32_copy():
    """By arithmetic and by a copy: both against torch's own step."""
    for make in (OPTIMIZERS["Adam, L2"], OPTIMIZERS["SGD"], OPTIMIZERS["Adafactor"], OPTIMIZERS["NAdam"]):
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, 5)
        answers = adapters.answering(optimizer)
        params = [p for p in model.parameters()]
        pick = torch.flatten
        wanted = answers.wanted_together(params, [pick(p.grad).clone() for p in params], pick)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        for p, old, update in zip(params, before, wanted, strict=True):
            torch.testing.assert_close(p.detach() - old, update.view_as(p), rtol=1e-3, atol=1e-6)


def test_gradients_of_a_closure_are_seen():
    model = net(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    watch = Watch(model, optimizer, every=1)
    train(model, optimizer, 8, by_closure=True)
    assert watch.looks == 8 and ("gains", "1.weight") in losing(watch)


class Breaks(torch.optim.AdamW):
    """One step of it ends in an exception: before or after it wrote."""

    def __init__(self, params, at, late):
        super().__init__(params, lr=1e-3)
        self.at, self.late, self.calls = at, late, 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == self.at and not self.late:
            raise RuntimeError("out of memory")
        super().step(closure)
        if self.calls == self.at:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("at, late", [(1, False), (2, True), (5, False)])
def test_a_step_that_raises_is_forgotten_and_the_next_is_seen(at, late):
    model = net()
    optimizer = Breaks(model.parameters(), at, late)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, shadow, every=2)

    def move():
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)

    train(model, optimizer, at - 1, move)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, optimizer, 1)
    assert watch.depth == 1  # the hook after the step was never called
    looks = watch.looks
    train(model, optimizer, 12, move)
    assert watch.depth == 0
    assert watch.steps == at - 1 + 12 and watch.looks >= looks + 5
    assert losing(watch) == set(), str(watch)


def test_a_closure_that_raises_is_forgotten():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    train(model, optimizer, 8, by_closure=True)
    assert (watch.depth, watch.steps, watch.looks) == (0, 8, 8)
    assert losing(watch) == set(), str(watch)


def test_a_step_within_a_step_counts_once():
    model = net()
    torch.optim.AdamW(model.parameters())  # from now on the step of this class has hooks, and Breaks calls it
    optimizer = Breaks(model.parameters(), 0, late=False)
    watch = Watch(model, optimizer, every=1)
    train(model, optimizer, 6)
    assert (watch.depth, watch.steps, watch.looks) == (0, 6, 6)


def test_a_removed_watch_sees_no_more():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(model, optimizer)
    train(model, optimizer, 3)
    watch.remove()
    train(model, optimizer, 3)
    assert watch.steps == 3


def test_the_share_is_that_of_the_tensor():
    """Against a count by hand: of bf16 weights near 1 and steps of a tenth of an ulp nothing is written."""
    weight = nn.Parameter(torch.ones(64, dtype=BF16))
    model = nn.Module()
    model.small, model.large = weight, nn.Parameter(torch.full((64,), 1e-3, dtype=BF16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = Watch(model, optimizer, every=1)
    for _ in range(6):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    shares = watch.shares()
    assert shares["small"]["update"] > 0.99 and shares["large"]["update"] < 0.05
    assert ("update", "small") in losing(watch) and ("update", "large") not in losing(watch)


# ---- Wrappers and refusals ---------------------------------------------------------------------------------


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrappers_are_taken_off():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(torch.nn.DataParallel(model), Wrapper(Wrapper(optimizer)))
    assert watch.optimizer is optimizer and watch.model is model


def test_copies_that_an_optimiser_steps_are_paired_with_the_weights():
    model = net(BF16)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    watch = Watch(model, optimizer, every=1)
    assert all(watch.copies[name] is p for name, p in model.named_parameters()) and len(watch.copies) == 6
    for _ in range(6):
        x = torch.randn(8, 16, dtype=BF16)
        model(x).float().square().mean().backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    assert losing(watch) == set(), str(watch)


WRONG = {
    "no optimiser": (lambda m, o: (m, object(), None), "not object"),
    "no module": (lambda m, o: ([1], o, None), "nn.Module"),
    "another net's": (lambda m, o: (nn.Linear(3, 3), o, None), "no parameter of this model"),
    "no parameters": (lambda m, o: (nn.GELU(), o, None), "nothing to watch"),
    "a strange average": (lambda m, o: (m, o, 3), "int is no average"),
    "another net's average": (lambda m, o: (m, o, {"x": torch.ones(3)}), "none of its tensors"),
}


@pytest.mark.parametrize("arguments, words", WRONG.values(), ids=WRONG)
def test_what_can_not_be_watched_is_refused(arguments, words):
    model = net()
    with pytest.raises(Refused, match=words):
        Watch(*arguments(model, torch.optim.AdamW(model.parameters())))
    with pytest.raises(Refused, match="every=0"):
        Watch(model, torch.optim.AdamW(model.parameters()), every=0)


# ---- What is printed ---------------------------------------------------------------------------------------


def test_the_worst_comes_first_and_the_verdict_last():
    rows = [Finding("update", "moderate", "text " * 30, "remedy", f"layer.{i}", i / 100) for i in range(40)]
    rows += [Finding("exp_avg_sq", "moderate", "text", "remedy", "tail", 1.0)]
    rows += [Finding("ema", "severe", "text", "remedy", "head", 0.5), Finding("frozen", "note", "text", "-")]
    shown = str(Diagnosis("head", sorted(rows, key=lambda f: f.rank), {"exp_avg_sq": 0.01}, "bad results"))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= LINE_WIDTH
    assert lines[2].startswith("head") and lines[3].startswith("layer.39")
    assert "40 tensors, the worst layer.39, layer.38, layer.37: text" in lines[3]
    starts = [line.split()[0] for line in lines[2:-2] if not line.startswith(" ")]
    assert starts == ["head", "layer.39", "tail"], "a lost update costs more than v, whatever their shares"
    assert lines[-1] == "most likely to blame for bad results: ema of head"
    assert "exp_avg_sq 1.00%" in lines[-2]
    notes = Diagnosis("head", rows[-1:], {})
    assert notes.status == 0 and str(notes).endswith("healthy: nothing is losing information")


def test_before_the_first_step_there_is_nothing_to_say():
    model = net()
    watch = Watch(model, torch.optim.AdamW(model.parameters()))
    assert watch.shares() == {} and "0 steps" in str(watch)
    assert str(watch).splitlines()[-1].startswith("nothing found here") and watch.diagnosis().status == 1
    assert losing(watch) == {("step", "")}


@pytest.mark.parametrize("empty", [lambda: nn.Linear(32, 0), lambda: nn.Embedding(4, 0)])
def test_empty_parameters_are_passed_by(empty):
    net = nn.ModuleDict({"first": empty(), "work": mlp()})
    watch = trained(net, loss=lambda net, step: task(net["work"], step), steps=3, every=1)
    assert watch.looks == 3 and "first.weight" not in str(watch)


def test_sparse_gradients_are_gradients():
    net = nn.Embedding(4, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(net.parameters())
    watch = trained(net, optimizer, lambda net, step: net(torch.tensor([1])).sum(), steps=3, every=1)
    assert "never has a gradient" not in str(watch)
