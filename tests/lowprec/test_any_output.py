"""Any net in a loop of its own: what goes in and what comes back, buffers."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import test_any_model
import torch
from torch import nn

from lowprec.errors import Refused
from lowprec.precision import Precision, recipe

BF16 = test_any_model.BF16
LOW = test_any_model.LOW
eager = test_any_model.eager
same = test_any_model.same
through_a_file = test_any_model.through_a_file


# ---- What goes in and what comes back ----------------------------------------------------------------------


Answer = namedtuple("Answer", "mean spread")


class Talkative(nn.Module):
    """Takes a tree of inputs, returns one; remembers the dtypes that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch, scale, *, t=None, mode="mean"):
        self.seen = [batch["x"].dtype, batch["more"][0].dtype, batch["more"][1].dtype, scale.dtype, t.dtype]
        self.mode = mode
        out = self.layer(batch["x"] + batch["more"][0]) * scale
        assert out.dtype == self.layer.weight.dtype
        return {"answer": Answer(out.mean(), out.std()), "ids": batch["more"][1], "name": mode, "none": None}


def test_any_tree_goes_in_and_comes_back():
    torch.manual_seed(0)
    run = Precision(Talkative(), recipe(**LOW))
    ids = torch.arange(3)
    batch = {"x": torch.ones(3, 4), "more": [torch.ones(3, 4), ids], "path": "a/b", "number": 3}
    out = run(batch, torch.ones(1), t=torch.full((3,), 0.3), mode="max")
    # everything in floating point is cast, but a time, where bf16 would merge neighbours, and whole numbers
    assert run.model.seen == [BF16, BF16, torch.int64, BF16, torch.float32]
    assert isinstance(out["answer"], Answer) and out["answer"].mean.dtype == torch.float32
    assert torch.equal(out["ids"], ids) and out["name"] == "max" and out["none"] is None
    assert batch["x"].dtype == torch.float32  # the caller's own
    run.backward(out["answer"].spread)
    run.step()


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def test_a_dataclass_comes_back_in_fp32():
    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return Output(out.square().mean(), out)

    out = Precision(Net(4, 4), recipe(**LOW))(torch.ones(2, 4))
    assert isinstance(out, Output) and out.loss.dtype == out.logits.dtype == torch.float32


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


# ---- Buffers -----------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """BatchNorm's statistics, and rotary frequencies that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(4) / 4), persistent=False)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x):  # [B, 8]
        angles = torch.arange(len(x))[:, None] * self.inv_freq
        x = x * torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)
        return self.norm(self.layer(x)).masked_fill(~self.mask, 0)


def train_buffered(run, first=0, last=20):
    for step in range(first, last):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        run.backward((run(x) - x).square().mean())
        run.step()


def test_statistics_and_frequencies_stay_fp32():
    torch.manual_seed(0)
    net = Buffered()
    exact = net.inv_freq.clone()
    run = Precision(net, recipe(**LOW), lr=1e-3, ema_decay=0.9)
    assert net.inv_freq.dtype == torch.float32 and torch.equal(net.inv_freq, exact)
    train_buffered(run)
    # one kernel of torch takes statistics and gains, in one dtype: both are fp32
    assert net.norm.running_var.dtype == net.norm.weight.dtype == torch.float32
    assert net.layer.weight.dtype == BF16
    assert (net.norm.running_mean != net.norm.running_mean.to(BF16)).any()
    assert net.norm.num_batches_tracked == 20 and net.mask.dtype == torch.bool

    torch.manual_seed(1)
    again = Precision(Buffered(), recipe(**LOW), lr=1e-3, ema_decay=0.9)
    again.load_state_dict(through_a_file(run.state_dict()))
    train_buffered(run, 20, 25)
    train_buffered(again, 20, 25)
    assert same(again, run)

    plain = Buffered()
    plain.load_state_dict(run.weights("ema"), strict=True)
    assert torch.equal(plain.norm.running_mean, net.norm.running_mean)
    x = torch.randn(4, 8)
    torch.testing.assert_close(run.frozen("ema", generation="fp32")(x), plain.eval()(x).detach())


def test_buffers_in_bf16_on_request():
    """A recipe may cast them, to see what that loses."""
    torch.manual_seed(0)
    net = Buffered()
    Precision(net, recipe(**LOW, sites=["buffers=bf16"]), lr=1e-3, ema_decay=0.9)
    assert net.inv_freq.dtype == BF16


def test_a_model_without_parameters_is_one_line():
    with pytest.raises(Refused, match="no parameters"):
        Precision(nn.Flatten())
