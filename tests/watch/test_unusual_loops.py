"""Watch is silent on healthy loops of an unusual form."""

import math

import pytest
import torch
from healthy.shared import mlp, task, trained
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lowprec.watch.watch import Watch


def severe(watch):
    return [f"{f.site} of {f.tensor}: {f.text}" for f in watch.findings() if f.severity != "note"]


def test_two_steps_of_a_generator_before_one_of_its_judge_are_no_fault():
    """Their backward passes leave gradients in the judge, which one zero_grad clears."""
    judge, maker, into = mlp(), mlp(), nn.Linear(32, 32)
    other = torch.optim.AdamW(maker.parameters())

    def two_steps(step):
        for _ in range(2):
            maker.zero_grad()
            judge(into(maker(torch.randn(8, 32)))).mean().backward()
            other.step()

    def loss(judge, step):
        task(judge, step).backward()
        return judge(into(maker(torch.randn(8, 32))).detach()).square().mean()

    assert severe(trained(judge, loss=loss, after=two_steps, steps=8, every=1)) == []


@pytest.mark.parametrize("kept", [0.1, 0.0])
def test_a_mask_puts_weights_back_to_0_and_is_no_fault_unless_all_are(kept):
    net = mlp()
    matrix = net[0].weight.data
    masked = torch.rand_like(matrix) >= kept
    matrix[masked] = 0
    found = severe(trained(net, after=lambda step: matrix.masked_fill_(masked, 0), steps=8, every=1))
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
    def loss(net, step):
        return net(torch.randn(4, 32, 32)).square().mean()

    watch = trained(Positions(), loss=loss, steps=4, every=1)
    assert [f.tensor for f in watch.findings() if "never have a gradient" in f.text] == ["kernel"]


def by_fused_steps(factors, **how):
    """The Watch of a loop whose losses are times these factors: after infinite ones a step is skipped."""
    net = mlp()
    optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=True), torch.amp.GradScaler("cpu")
    watch = Watch(net, optimizer, **how)
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        scaler.scale(factor * task(net, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return watch


def test_steps_that_a_fused_optimiser_skips_are_passed_by():
    watch = by_fused_steps(3 * [1.0, math.inf, 1.0, 1.0], every=1)
    assert watch.looks == 9 and severe(watch) == []


def test_where_no_step_was_looked_at_nothing_is_said_to_be_healthy():
    watch = by_fused_steps([math.inf, 1.0])  # the first step is skipped, and the second not looked at
    assert watch.steps == 2 and watch.looks == 0
    assert "nothing is known" in str(watch) and "healthy" not in str(watch)


DECOUPLED = dict(weight_decay=0.5, decoupled_weight_decay=True)
MUCH_DECAY = {
    torch.optim.NAdam: DECOUPLED,
    torch.optim.RAdam: DECOUPLED,
    torch.optim.RMSprop: dict(weight_decay=0.5, maximize=True),
}


@pytest.mark.parametrize("kind, options", MUCH_DECAY.items())
def test_second_moments_take_the_gradient_that_the_optimiser_takes(kind, options):
    net = mlp()
    assert severe(trained(net, kind(net.parameters(), lr=1e-4, **options), steps=30, every=1)) == []


def test_an_average_that_begins_late_is_no_fault_before():
    net = mlp()
    optimizer, average = torch.optim.AdamW(net.parameters(), lr=1e-2), AveragedModel(net)
    watch = Watch(net, optimizer, average, every=1)
    for step in range(40):
        optimizer.zero_grad()
        task(net, step).backward()
        optimizer.step()
        if step == 10:
            assert severe(watch) == []
            average.update_parameters(net)  # and never again, in more steps than it took to begin
    assert any("has not moved" in line for line in severe(watch))


@pytest.mark.parametrize("told", [True, False])
def test_a_second_optimiser_of_the_net_may_be_told(told):
    net = mlp()
    own, other = torch.optim.AdamW(net[:3].parameters()), torch.optim.SGD(net[3:].parameters(), lr=0.1)

    def after(step):
        other.step()
        other.zero_grad()

    watch = trained(net, own, after=after, steps=4, every=1, others=[other] if told else [])
    assert any("in no group" in line for line in severe(watch)) is not told


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


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_first_blocks_are_frozen_by_plan_and_a_later_one_is_not(frozen):
    net = Blocks()
    net.blocks[frozen].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-3)
    watch = trained(
        net, optimizer, lambda net, step: net(torch.randint(20, (8, 4))).square().mean(), steps=6, every=2
    )
    assert any("blocks.1.weight" in line for line in severe(watch)) is (frozen == 1)
    assert frozen or severe(watch) == []
