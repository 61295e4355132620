"""Watch is silent on healthy loops of an unusual form."""

import math
import random

import pytest
import test_watch_loop
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lowprec.watch.watch import Watch

eager = test_watch_loop.eager


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def severe(watched):
    return [f"{f.site} of {f.tensor}: {f.text}" for f in watched.findings() if f.severity != "note"]


class Drawing(torch.optim.Optimizer):
    """SGD whose noise comes from generators of its own and of Python, at a rate that it changes in place."""

    def __init__(self, params):
        self.own = torch.Generator().manual_seed(0)
        super().__init__(params, dict(rate=torch.tensor(0.1)))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.own) * random.random()
                p.sub_((p.grad + 0.01 * noise) * group["rate"])
                self.state[p]["seen"] = torch.ones_like(p)
            group["rate"].mul_(0.9)


def test_a_watch_draws_nothing_and_changes_nothing_of_an_optimiser():
    def after(watched):
        random.seed(0)
        model = small()
        optimizer = Drawing(model.parameters())
        if watched:
            Watch(model, optimizer, every=1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 16), 0.1 * step)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, after(True), after(False)))


def test_two_steps_of_a_generator_before_one_of_its_judge_are_no_fault():
    """Their backward passes leave gradients in the judge, which one zero_grad clears."""
    judge, maker = small(), small(1)
    own, other = (torch.optim.AdamW(m.parameters()) for m in (judge, maker))
    into = nn.Linear(4, 16)
    watched = Watch(judge, own, every=1)
    for _ in range(8):
        for _ in range(2):
            maker.zero_grad()
            judge(into(maker(torch.randn(8, 16)))).mean().backward()
            other.step()
        judge.zero_grad()
        judge(torch.randn(8, 16)).square().mean().backward()
        judge(into(maker(torch.randn(8, 16))).detach()).square().mean().backward()
        own.step()
    assert severe(watched) == []


@pytest.mark.parametrize("kept", [0.1, 0.0])
def test_a_mask_puts_weights_back_to_0_and_is_no_fault_unless_all_are(kept):
    model = small()
    matrix = next(model.parameters())
    with torch.no_grad():
        masked = torch.rand_like(matrix) >= kept
        matrix[masked] = 0
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watch(model, optimizer, every=1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            matrix[masked] = 0
    found = severe(watched)
    assert found == [] if kept else "100% of the entries that a step moved were put back" in found[0]


class Positions(nn.Module):
    """A table of positions as many nets have it, as a bare parameter, and a matrix as bare as it."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 64, 32))
        self.kernel = nn.Parameter(torch.randn(64, 32))

    def forward(self, x):
        return torch.tanh((x + self.pos_embed[:, :32]) @ self.kernel[:32])


def test_positions_beyond_the_length_of_a_sequence_are_no_dead_part():
    model = Positions()
    optimizer = torch.optim.AdamW(model.parameters())
    watched = Watch(model, optimizer, every=1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 32, 32)).square().mean().backward()
        optimizer.step()
    dead = [f.tensor for f in watched.findings() if "never have a gradient" in f.text]
    assert dead == ["kernel"]


def test_steps_that_a_fused_optimiser_skips_are_passed_by():
    model = small()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    watched = Watch(model, optimizer, every=1)
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean() * (math.inf if step % 4 == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.looks == 9 and severe(watched) == []


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.NAdam, dict(weight_decay=0.5, decoupled_weight_decay=True)),
        (torch.optim.RAdam, dict(weight_decay=0.5, decoupled_weight_decay=True)),
        (torch.optim.RMSprop, dict(weight_decay=0.5, maximize=True)),
    ],
)
def test_second_moments_take_the_gradient_that_the_optimiser_takes(kind, options):
    model = small()
    optimizer = kind(model.parameters(), lr=1e-4, **options)
    watched = Watch(model, optimizer, every=1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    assert severe(watched) == []


def test_an_average_that_begins_late_is_no_fault_before():
    model = small()
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=1e-2), AveragedModel(model)
    watched = Watch(model, optimizer, average, every=1)
    for step in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        if step == 10:
            assert severe(watched) == []
            average.update_parameters(model)  # and never again, in more steps than it took to begin
    assert any("has not moved" in line for line in severe(watched))


def test_a_second_optimiser_of_the_net_may_be_told():
    model = small()
    own = torch.optim.AdamW(model[0].parameters())
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def after(others):
        watched = Watch(model, own, every=1, others=others)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            own.step()
            other.step()
        watched.remove()
        return severe(watched)

    assert after([other]) == []
    assert any("in no group" in line for line in after([]))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_the_first_blocks_are_frozen_by_plan_and_a_later_one_is_not():
    def watched(frozen):
        torch.manual_seed(0)
        model = Blocks()
        model.blocks[frozen].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        found = Watch(model, optimizer, every=2)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randint(20, (8, 4))).square().mean().backward()
            optimizer.step()
        return found

    assert severe(watched(0)) == []
    assert any("blocks.1.weight" in line for line in severe(watched(1)))


def test_where_no_step_was_looked_at_nothing_is_said_to_be_healthy():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watched = Watch(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):  # the first step is skipped, and the second not looked at
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.randn(8, 16)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.steps == 2 and watched.looks == 0
    assert "nothing is known" in str(watched) and "healthy" not in str(watched)
