"""optim.AdamW: equal to torch.optim.AdamW bit for bit, and what rounding does to it."""

import functools
import math

import pytest
import torch
from common import BF16, MODES, draw, gradients, held, make, same
from torch import nn
from torch._inductor.utils import run_and_get_code

from lowprec.kernels import compiled as compiling
from lowprec.kernels import exact_step
from lowprec.optimizers.buckets import Bucket
from lowprec.optimizers.rounded import AdamW

# ---- Bit for bit -------------------------------------------------------------------------------------------


LENGTHS = (*range(1, 41), 4095, 4097)  # every tail of a vector of 16 numbers, small and large


@functools.cache
def wild_gradients(step):
    """bf16 gradients of LENGTHS over 12 decades: sums of moments in which each term may be the larger."""
    g = torch.Generator().manual_seed(step)

    def one(n):
        decades = torch.empty(n).uniform_(-8, 4, generator=g)
        return (torch.randn(n, generator=g) * 10**decades).to(BF16)

    return [one(n) for n in LENGTHS]


# beta1 above and below a half: torch's lerp has a formula for each
BETAS = [(0.9, 0.999), (0.9, 0.98), (0.87, 0.937), (0.45, 0.5)]


ONE_BUCKET, A_BUCKET_EACH = 1 << 18, 1
OF_EVERY_SIZE = [(ONE_BUCKET, "fp32", betas, False) for betas in BETAS]
OF_EVERY_SIZE += [(A_BUCKET_EACH, mode, BETAS[0], False) for mode in ("fp32", "split", "fp32 master")]
OF_EVERY_SIZE += [(ONE_BUCKET, "split", BETAS[2], True)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("small, mode, betas, compiled", OF_EVERY_SIZE, ids=str)
def test_equals_torch_adamw_on_gradients_of_every_size(monkeypatch, small, mode, betas, compiled, scaled):
    monkeypatch.setattr(Bucket, "SMALL", small)
    initial = [draw(n, seed=n, scale=0.1) for n in LENGTHS]
    params, optimizer = make(mode, initial, 1e-2, compiled, betas=betas, weight_decay=0.03)
    reference = [nn.Parameter(t.clone()) for t in initial]
    theirs = torch.optim.AdamW(reference, 1e-2, betas=betas, weight_decay=0.03)
    for step in range(8):
        scale = torch.tensor(0.3 + 0.1 * step if scaled else 1.0, dtype=torch.float64)
        for p, q, g in zip(params, reference, wild_gradients(step), strict=True):
            p.grad, q.grad = g.to(p.dtype), g.float() * scale.float()
        optimizer.step(grad_scale=scale)
        theirs.step()
    assert not compiled or not compiling.unfused and exact_step.rounds_once(), "nothing was compiled"
    for p, q in zip(params, reference, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            wrong = (optimizer.state[p][name] != theirs.state[q][name]).sum()
            assert wrong == 0, f"{name}: {wrong} of {p.numel()} entries differ"
        assert same(held(optimizer, p), q.detach())


@pytest.mark.parametrize("eps, floored", [(1e-8, True), (1e-30, False)], ids=str)
def test_second_moments_of_zero_and_denormal_ones_give_the_bits_of_torch(eps, floored):
    """Their roots are slow, so they are raised, where eps swallows the difference."""
    assert exact_step.smallest_root_vanishes(0.999, eps) == floored
    initial = draw(5000, seed=1, scale=0.1)
    p, q = nn.Parameter(initial.clone()), nn.Parameter(initial.clone())
    sizes = torch.tensor([0.0, 1e-23, 1e-21, 1e-20, 3e-18, 1e-17, 1e-12, 1.0]).repeat(625)
    optimizer = AdamW([p], 1e-2, eps=eps)
    theirs = torch.optim.AdamW([q], 1e-2, eps=eps)
    for step in range(6):
        p.grad = draw(5000, seed=10 + step) * sizes
        p.grad[::3] *= step != 2  # a gradient that vanishes once
        q.grad = p.grad.clone()
        optimizer.step()
        theirs.step()
    v = optimizer.state[p]["exp_avg_sq"]
    assert (v == 0).any() and ((v > 0) & (v < exact_step.SMALLEST_NORMAL)).any()
    assert same(p.detach(), q.detach()) and same(v, theirs.state[q]["exp_avg_sq"])


def test_a_kernel_that_rounds_a_product_is_not_used(monkeypatch):
    monkeypatch.setattr(exact_step, "_fma", lambda a, b, c: a * b + c)
    assert not exact_step.rounds_once.__wrapped__()


def test_a_kernel_that_saw_a_small_tensor_first_spreads_large_ones_over_threads():
    """torch would decide by the first tensor, and find its code on disk again for any other."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            _, [code] = run_and_get_code(compiling.fused, twice_and_one, torch.ones(4))
    finally:
        torch.set_num_threads(before)
    assert "#pragma omp parallel" in code


def twice_and_one(x):
    return 2 * x + 1


@pytest.mark.parametrize("mode", MODES)
def test_compiled_step_equals_eager(mode):
    # fusion may not change what is rounded where: one that keeps fp32 across a cast to bf16 empties the
    # Kahan buffer
    initial = [draw(*s, seed=i, scale=0.1) for i, s in enumerate([(5,), (60, 50), (3001,)])]
    runs = []
    for compiled in (False, True):
        params, optimizer = make(mode, initial, 1e-4, compiled, weight_decay=0.1)
        for step in range(3):
            for p, g in zip(params, gradients(step + 3, tuple(p.shape for p in params)), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        tensors = []
        for p in params:
            states = sorted((k, v) for k, v in optimizer.state[p].items() if k != "step")
            tensors += [p.detach(), *(t for _, t in states)]
        runs.append(tensors)
    assert not compiling.unfused, "nothing was compiled"
    for a, b in zip(*runs, strict=True):
        if mode in ("fp32", "split", "fp32 master"):
            assert torch.equal(a, b)
        else:  # torch.sqrt from MKL is not correctly rounded: a rare entry lies beyond a boundary
            assert a.dtype == b.dtype and (a != b).sum() <= 2 + a.numel() // 100
            torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == BF16 else 1e-6, atol=1e-8)
    if "kahan" in mode:
        # sorted: compensation, exp_avg, exp_avg_sq
        assert (runs[1][-3] != 0).double().mean() > 0.9, "the compensation is empty"


# ---- What each way of writing keeps ------------------------------------------------------------------------


def test_eps_is_added_to_the_root_and_not_under_it():
    """A gradient as large as eps moves a weight by half of the rate at the first step."""
    (p,), optimizer = make("kahan", [torch.zeros(64)], 1e-3, False, eps=1e-8, weight_decay=0.0)
    p.grad = torch.full_like(p, 1e-8)
    optimizer.step()
    assert held(optimizer, p).double() == pytest.approx(-0.5e-3, rel=0.01)


def test_kahan_with_stochastic_is_unbiased_and_kahan_alone_is_not():
    n = 200_000
    means, exact = {}, None
    for mode in ("kahan", "kahan+stochastic"):
        (p,), optimizer = make(mode, [torch.full((n,), 0.1)], 1.2345e-5, betas=(0.0, 0.0), eps=0.0)
        p.grad = torch.ones_like(p)
        start = held(optimizer, p)[0].item()
        optimizer.step()
        exact = (torch.tensor(start) - torch.tensor(1.2345e-5)).double().item()
        means[mode] = held(optimizer, p).double().mean().item()
        assert same(p.detach(), torch.full((n,), exact).to(BF16)), "forward must read the nearest weight"
        spread = held(optimizer, p).double().std().item()
    assert 0 < spread < 2**-19  # half an ulp of the buffer, which is 2^-9 of an ulp of the weight
    assert abs(means["kahan+stochastic"] - exact) < 5 * spread / math.sqrt(n)
    assert abs(means["kahan"] - exact) > 50 * spread / math.sqrt(n)
