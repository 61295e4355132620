"""view.View: the buffers of a net."""


import common
import pytest
import test_view
import torch
from common import BF16, draw, same, start, through_a_file
from torch import nn

eager = common.eager
LOW = test_view.LOW


class Rotary(nn.Module):
    """(x [B, 16]) -> [B, 16]: frequencies like RoPE's, statistics of a norm, a mask."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(8) / 8), persistent=False)
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))

    def forward(self, x):
        angles = 1000 * torch.arange(len(x))[:, None] * self.frequencies
        h = self.layer(x) * torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)
        return self.last(self.norm(h)).masked_fill(~self.mask, 0)


def rotary(sites=(), **options):
    torch.manual_seed(0)
    model = Rotary()
    return model, start(dict(LOW, sites=list(sites)), model, lr=1e-2, ema_decay=0.9, **options)


def train_rotary(run, steps, seed=0):
    for step in range(steps):
        x = draw(32, 16, seed=100 * seed + step) + 3
        run.backward((run(x) - x).square().mean())
        run.step()


def test_statistics_and_frequencies_keep_their_bits_in_a_bf16_net():
    torch.manual_seed(0)
    plain = Rotary()
    frequencies = plain.frequencies.clone()
    model, run = rotary()
    assert same(model.frequencies, frequencies) and model.mask.dtype == torch.bool
    assert model.layer.weight.dtype == BF16 and model.norm.weight.dtype == torch.float32
    train_rotary(run, 20)
    assert model.norm.running_mean.dtype == model.norm.running_var.dtype == torch.float32
    assert not same(model.norm.running_mean, model.norm.running_mean.to(BF16).float()), (
        "they have fp32's bits"
    )
    assert model.norm.num_batches_tracked == 20
    # statistics follow those of the fp32 run, though weights are bf16
    reference = start({}, plain, lr=1e-2)
    train_rotary(reference, 20)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=0.1, atol=0.05)


def test_buffers_are_cast_on_request():
    model, run = rotary(["buffers=bf16"])
    assert model.frequencies.dtype == model.norm.running_mean.dtype == model.norm.weight.dtype == BF16
    assert model.mask.dtype == torch.bool and model.norm.num_batches_tracked.dtype == torch.int64
    train_rotary(run, 2)
    assert same(model.norm.running_mean, model.norm.running_mean.to(BF16))


def test_statistics_follow_a_norm_that_is_fp32():
    for model, run in (
        rotary(["buffers=bf16", "islands=norm"]),
        rotary(["buffers=bf16"], fp32_modules=["norm"]),
    ):
        assert model.norm.running_mean.dtype == model.norm.weight.dtype == torch.float32
        assert model.frequencies.dtype == BF16
        train_rotary(run, 2)


def test_buffers_of_an_fp32_net_stay_and_complex_ones_too():
    model = Rotary()
    model.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
    before = model.turns.clone()
    for flags in ({}, LOW):
        start(flags, model)
        assert torch.equal(model.turns, before) and model.frequencies.dtype == torch.float32


def test_buffers_resume():
    model, run = rotary()
    train_rotary(run, 3)
    saved = through_a_file(run.state_dict())
    train_rotary(run, 3, seed=1)
    other, again = rotary()
    again.load_state_dict(saved)
    train_rotary(again, 3, seed=1)
    for (name, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_statistics_beside_adapters_keep_their_bits_in_a_frozen_bf16_base():
    torch.manual_seed(0)
    model = Rotary()
    flags = dict(bf16=True, sites=["frozen=bf16"])
    run = start(flags, model, lr=1e-2, lora=4, dtypes={"frequencies": "bf16"})
    train_rotary(run, 20)
    assert model.layer.base.weight.dtype == BF16 and model.frequencies.dtype == BF16
    statistics = model.norm.running_mean
    assert statistics.dtype == model.norm.weight.dtype == torch.float32
    assert not same(statistics, statistics.to(BF16).float()), "they have fp32's bits"


@pytest.mark.parametrize("flags", [{}, dict(bf16=True), LOW], ids=["fp32", "bf16", "pure_bf16"])
def test_a_frozen_norm_is_held_as_dtypes_names_it(flags):
    torch.manual_seed(0)
    model = Rotary()
    model.norm.requires_grad_(False)
    run = start(flags, model, lr=1e-2, dtypes={"norm": "bf16"})
    train_rotary(run, 2)
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == BF16
