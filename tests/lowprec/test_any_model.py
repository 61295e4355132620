"""The library on models as people write them in plain torch: that recompute activations, are compiled, have
scalars or memory in another order. What nets take and return, share, freeze and buffer: test_view.py,
test_other_loops.py, test_generator.py, test_frozen_weights.py; groups and schedules: test_stranger.py.
"""

import copy

import common
import golden
import pytest
import torch
import torch.nn.functional as F
from common import through_a_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec.precision import Precision, recipe

BF16 = torch.bfloat16
LOW = dict(pure_bf16=True, stochastic=True)
eager = common.eager


def same(run, other):
    """Whether two runs hold the same bits."""
    return golden.moved(golden.digests(run.state_dict()), golden.digests(other.state_dict())) == []


# ---- A GPT as in nanoGPT -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):  # [B, T, width]
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=-1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """(tokens int64 [B, T], targets alike) -> (logits [B, T, V], loss or None); the head is the embedding."""

    def __init__(self, width=16, vocabulary=32, layers=2, recompute=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight
        self.recompute = recompute

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(step):
    start = torch.randint(32, (4, 1), generator=torch.Generator().manual_seed(step % 5))
    ids = (start + torch.arange(13)) % 32
    return ids[:, :-1], ids[:, 1:]


def gpt_run(net=None):
    torch.manual_seed(0)
    return Precision(GPT() if net is None else net, recipe(**LOW), lr=3e-3, ema_decay=0.9)


def train_gpt(run, steps=10):
    losses = []
    for step in range(steps):
        idx, targets = text(step)
        logits, loss = run(idx, targets=targets)
        assert logits.shape == (4, 12, 32)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


def test_gradient_checkpointing_changes_nothing():
    plain, recomputed = gpt_run(), gpt_run()
    recomputed.model.recompute = True
    assert train_gpt(plain) == train_gpt(recomputed)
    assert same(plain, recomputed)


@pytest.mark.parametrize("how", ["wrapped before", "in place", "as forward"])
def test_a_compiled_model_trains_the_same_bits(how):
    backend = "aot_eager"
    plain = gpt_run()
    torch.manual_seed(0)
    net = GPT()
    if how == "wrapped before":
        compiled = gpt_run(net=torch.compile(net, backend=backend))
    elif how == "in place":
        net.compile(backend=backend)
        compiled = gpt_run(net=net)
    else:
        compiled = gpt_run(net=net)
        compiled.forward = torch.compile(compiled.model, backend=backend)
    assert train_gpt(plain, 4) == pytest.approx(train_gpt(compiled, 4), abs=1e-6)
    with torch.no_grad():
        logits, _ = compiled.generator()(text(0)[0])
        torch.testing.assert_close(logits, plain.generator()(text(0)[0])[0])
    fresh = GPT()
    fresh.load_state_dict(compiled.weights("ema"), strict=True)


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
