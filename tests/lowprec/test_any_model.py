"""The library on models as people write them in plain torch: that are compiled, have scalars or memory in
another order. What nets take and return, share, freeze and buffer: test_view.py,
test_other_loops.py, test_generator.py, test_frozen_weights.py; groups and schedules: test_stranger.py.
"""

import copy

import common
import golden
import pytest
import torch
from common import through_a_file
from torch import nn

from lowprec.precision import Precision, recipe

LOW = dict(pure_bf16=True, stochastic=True)
eager = common.eager


def same(run, other):
    """Whether two runs hold the same bits."""
    return golden.moved(golden.digests(run.state_dict()), golden.digests(other.state_dict())) == []


@pytest.mark.parametrize("how", ["wrapped before", "in place", "as forward"])
def test_a_compiled_model_trains_the_same_bits(how):
    def run_of(net):
        return Precision(net, recipe(**LOW), lr=3e-3, ema_decay=0.9)

    plain, net = run_of(common.net()), common.net()
    if how == "wrapped before":
        compiled = run_of(torch.compile(net, backend="aot_eager"))
    elif how == "in place":
        net.compile(backend="aot_eager")
        compiled = run_of(net)
    else:
        compiled = run_of(net)
        compiled.forward = torch.compile(compiled.model, backend="aot_eager")
    for run in (plain, compiled):
        common.train(run, 4)
    x = common.batches(1)[0][0]
    for source in ("raw", "ema"):
        torch.testing.assert_close(compiled.generator(source)(x), plain.generator(source)(x))
        common.net().load_state_dict(compiled.weights(source), strict=True)


# ---- Parameters and memory of odd kinds --------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of no dimension and of no value."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.layer(x) * self.scale.exp() + self.empty.sum()


@pytest.mark.parametrize("flags", [{}, LOW, dict(pure_bf16=True, master="split"), dict(LOW, opt8bit=True)])
def test_a_scalar_parameter_is_trained(flags):
    torch.manual_seed(0)
    run = Precision(Odd(), recipe(**flags), lr=1e-2, ema_decay=0.9, clip_grad=1.0)
    for _ in range(5):
        run.backward(run(torch.ones(2, 4)).square().mean())
        report = run.step(measure=True)
    assert report["update_survival"] > 0
    assert run.model.scale.shape == () and 1.8 < run.model.scale.item() < 1.99
    again = Precision(Odd(), recipe(**flags), lr=1e-2, ema_decay=0.9, clip_grad=1.0)
    again.load_state_dict(through_a_file(run.state_dict()))
    assert same(again, run)


def test_channels_last_is_torchs_adamw():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3))
    net.to(memory_format=torch.channels_last)
    reference = copy.deepcopy(net)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    run = Precision(net, recipe(), lr=1e-2)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0, foreach=False)
    for _ in range(4):
        run.backward(run(x).square().mean())
        run.step()
        optimizer.zero_grad()
        reference(x).square().mean().backward()
        optimizer.step()
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, net.parameters(), reference.parameters()))
