"""The site attention=fp8: both products within attention, of FP8 operands."""

import pytest
import torch
import torch.nn.functional as F
from common import refused
from torch import nn

import models
from lowprec import Precision, recipe
from lowprec.attention import Attend
from lowprec.layers.fp8_attention import attend_in_fp8
from lowprec.layers.fp8_product import amax_of, current_scale


def heads(seed=0, tokens=12):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, tokens, 8, generator=g).requires_grad_() for _ in range(3)]


def rounded(x, dtype):
    scale = current_scale(amax_of(x.flatten(0, -2)), torch.finfo(dtype).max)
    return (x * scale).to(dtype).float() / scale


def by_hand(q, k, v, causal):
    """The forward pass by torch's own casts."""
    e4m3 = torch.float8_e4m3fn
    scores = rounded(q, e4m3) @ rounded(k, e4m3).transpose(-1, -2) / 8**0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return rounded(scores.softmax(-1), e4m3) @ rounded(v, e4m3)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_is_that_of_rounded_operands_and_backward_near_it(causal):
    q, k, v = heads()
    y = attend_in_fp8(q, k, v, is_causal=causal)
    assert torch.allclose(y, by_hand(q, k, v, causal), atol=1e-5)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert 0.005 < (y - exact).norm() / exact.norm() < 0.1
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad(out, (q, k, v), g) for out in (y, exact))
    for a, b in zip(ours, theirs, strict=True):
        assert 0.005 < (a - b).norm() / b.norm() < 0.25


def test_masks_and_scale_are_those_of_torch():
    q, k, v = (t.detach() for t in heads())
    bias = torch.randn(12, 12, generator=torch.Generator().manual_seed(2))
    for options in (dict(attn_mask=bias > 0), dict(attn_mask=bias), dict(scale=0.1)):
        exact = F.scaled_dot_product_attention(q, k, v, **options)
        assert (attend_in_fp8(q, k, v, **options) - exact).norm() / exact.norm() < 0.1


def run_of(**more):
    torch.manual_seed(0)
    net = models.GENERATIVE["dit"](channels=1, num_classes=3, image_size=8)
    for p in net.parameters():  # a new one returns zeros
        nn.init.normal_(p, std=0.1)
    return Precision(net, recipe(sites=["attention=fp8"], **more), lr=1e-3)


def inputs():
    g = torch.Generator().manual_seed(0)
    return torch.randn(4, 1, 8, 8, generator=g), torch.arange(4.0) * 100, torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("flags", [{}, dict(bf16=True), dict(pure_bf16=True, stochastic=True)], ids=str)
def test_a_run_trains_and_draws_without_it(flags):
    run = run_of(**flags)
    before = run(*inputs()).detach().float()
    run.observe(True)
    losses = []
    for _ in range(4):
        loss = (run(*inputs()).float() - 1).square().mean()
        run.backward(loss)
        report = run.step(measure=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    shares = [report[f"attention_underflow_{operand}"] for operand in ("input", "probability", "grad")]
    assert max(shares) < 0.01 and (flags or max(shares) > 0)
    (row,) = [row for row in run.ledger().rows if row["site"] == "attention"]
    assert row["value"] == "fp8" and "attentions in e4m3" in row["why"]
    assert any(m.by is not None for m in run.model.modules() if isinstance(m, Attend))
    drawn = run.generator().net
    assert all(m.by is None for m in drawn.modules() if isinstance(m, Attend)), "drawn in bf16 or fp32"
    with run.methods[0].plain(run.model):
        assert not torch.equal(run(*inputs()).float(), before)


def test_a_net_without_such_an_attention_is_refused():
    r = recipe(sites=["attention=fp8"])
    refused(lambda: Precision(nn.Linear(4, 4), r), "lowprec.attention.Attend()", "or drop it")
