"""optim.EMA: the average of the weights, in fp32 and in bf16."""

import math

import pytest
import torch
from common import BF16, SHAPES, correlation, draw, gradients, make, refused, same, through_a_file
from torch import nn

from lowprec.optimizers.average import EMA
from lowprec.optimizers.buckets import Bucket
from lowprec.optimizers.rounded import AdamW


def test_average_of_moving_weights_and_of_every_bucket(monkeypatch):
    monkeypatch.setattr(Bucket, "SMALL", 100)
    shapes = [(5,), (300,), (7, 3), (2, 60), (1,)]
    named = [(f"layer{i}", nn.Parameter(draw(*s, seed=i))) for i, s in enumerate(shapes)]
    ema = EMA(named, 0.9, compiled=False)
    assert list(EMA(nn.Linear(2, 2), 0.9).shadow) == ["weight", "bias"]
    assert list(ema.shadow) == [n for n, _ in named], "in the order of the parameters"
    wanted = {n: p.detach().double() for n, p in named}
    for step in range(5):
        for i, (n, p) in enumerate(named):
            with torch.no_grad():
                p.copy_(draw(*p.shape, seed=100 * step + i))
            wanted[n] = 0.9 * wanted[n] + 0.1 * p.detach().double()
        ema.update()
    for n, p in named:
        assert ema.shadow[n].shape == p.shape
        torch.testing.assert_close(ema.shadow[n].double(), wanted[n], rtol=1e-5, atol=1e-6)


def travelled(decay, dtype, update, steps):
    """Share of the way from one set of weights (std 0.05) to another that an average covers in `steps`."""
    start, end = draw(2000, seed=1, scale=0.05).to(BF16), draw(2000, seed=2, scale=0.05).to(BF16)
    p = nn.Parameter(start.clone())
    ema = EMA([("p", p)], decay, dtype, update, compiled=False)
    with torch.no_grad():
        p.copy_(end)
    for _ in range(steps):
        ema.update()
    way = (end - start).double()
    return ((ema.shadow["p"].double() - start.double()) @ way / (way @ way)).item()


def test_bf16_average_freezes_to_nearest_and_follows_with_stochastic_rounding():
    decay, steps = 0.999, 1500
    wanted = 1 - decay**steps
    assert travelled(decay, "fp32", "nearest", steps) == pytest.approx(wanted, rel=1e-3)
    nearest = travelled(decay, "bf16", "nearest", steps)
    assert 0.05 < nearest < 0.15
    assert travelled(decay, "bf16", "nearest", 2 * steps) == nearest, "frozen: more steps change nothing"
    assert travelled(decay, "bf16", "stochastic", steps) == pytest.approx(wanted, rel=0.06)


def test_average_over_a_split_master_equals_that_of_an_fp32_run():
    initial = [draw(*s, seed=i, scale=0.1) for i, s in enumerate(SHAPES)]
    averages = []
    for mode in ("fp32", "split"):
        params, optimizer = make(mode, initial, 1e-3)
        ema = EMA(
            [(str(i), p) for i, p in enumerate(params)], 0.99, low_part=optimizer.low_part, compiled=False
        )
        for step in range(50):
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
            ema.update()
        averages.append(ema.shadow)
    for name in averages[0]:
        assert same(averages[0][name], averages[1][name])


@pytest.mark.parametrize("kahan", [False, True])
def test_compiled_average_equals_eager(kahan):
    results = []
    for compiled in (False, True):
        params, optimizer = make("kahan" if kahan else "nearest", [draw(3000, seed=1), draw(7, seed=2)])
        named = list(zip("ab", params, strict=True))
        options = dict(low_part=optimizer.low_part, seed=3, compiled=compiled)
        ema = EMA(named, 0.9, "bf16", "stochastic", **options)
        for step in range(3):
            with torch.no_grad():
                params[0].copy_(draw(3000, seed=step + 5))
            ema.update()
        results.append(ema.shadow)
    assert all(same(results[0][n], results[1][n]) for n in "ab")


def test_the_state_of_another_average_is_refused():
    p = nn.Parameter(draw(200).to(BF16))
    saved = EMA([("p", p)], 0.9, "bf16", "stochastic").state_dict()
    refused(lambda: EMA([("p", p)], 0.9, "fp32").load_state_dict(saved), "another model or another ema dtype")
    refused(lambda: EMA([("q", p)], 0.9, "bf16").load_state_dict(saved), "another model")


def test_average_and_weight_do_not_share_noise():
    p = nn.Parameter(torch.full((20000,), 1.0, dtype=BF16))
    ema = EMA([("p", p)], 0.6, "bf16", "stochastic", compiled=False)
    optimizer = AdamW([p], 0.4 * 2**-8, update="stochastic", compiled=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    moved = (p < 1).double()
    with torch.no_grad():
        p.fill_(1 - 2**-8)
    ema.update()  # 0.4 of the way to the neighbour
    average = (ema.shadow["p"] < 1).double()
    assert 0.3 < average.mean() < 0.5 and abs(correlation(moved, average)) < 5 / math.sqrt(20000)


# ---- Warm-up -----------------------------------------------------------------------------------------------


def walk(steps):
    """Weights [300] fp32 of some steps: a random walk away from its start, which ends far from it."""
    moves = torch.stack([draw(300, seed=1000 + step, scale=0.02) for step in range(steps)])
    return draw(300, seed=1) + (moves + 0.01).cumsum(0)


def averaged(path, decay, dtype="fp32", update="nearest"):
    """[EMA] with a warm-up over a path [steps, n] from other weights."""
    p = nn.Parameter(draw(path.shape[1], seed=9, scale=10.0))
    ema = EMA([("p", p)], decay, dtype, update, warmup=True, compiled=False)
    with torch.no_grad():
        for weight in path:
            p.copy_(weight)
            ema.update()
    return ema


def shares(decay, steps):
    """fp64 [steps + 1]: what an average with a warm-up holds of the initial weights and of each step's."""
    held = torch.ones(1, dtype=torch.float64)
    for t in range(1, steps + 1):
        d = min(decay, (1 + t) / (10 + t))
        held = torch.cat([held * d, torch.tensor([1 - d], dtype=torch.float64)])
    return held


@pytest.mark.parametrize("decay, steps", [(0.999, 500), (0.9, 200), (0.0, 5)])
def test_an_average_with_a_warm_up_is_its_weighted_sum(decay, steps):
    path, held = walk(steps), shares(decay, steps)
    start = draw(path.shape[1], seed=9, scale=10.0)
    wanted = held @ torch.cat([start[None], path]).double()
    assert held.sum() == pytest.approx(1, abs=1e-12)
    ema = averaged(path, decay)
    torch.testing.assert_close(ema.shadow["p"].double(), wanted, rtol=1e-5, atol=1e-5)
    assert ema.decay == pytest.approx(min(decay, (1 + steps) / (10 + steps)))


def test_bf16_averages_and_a_resumed_one_obey_the_warm_up():
    path = walk(400)
    wanted = averaged(path, 0.999).shadow["p"].double()
    far = (path[-1].double() - wanted).abs().mean()
    for update, least, most in (("stochastic", 0, 0.35), ("nearest", 0, 1.0)):
        error = (averaged(path, 0.999, "bf16", update).shadow["p"].double() - wanted).abs().mean() / far
        assert least <= error < most, update
    whole = averaged(path[:60], 0.999, "bf16", "stochastic")
    half = averaged(path[:30], 0.999, "bf16", "stochastic")
    p = nn.Parameter(path[29].clone())
    rest = EMA([("p", p)], 0.999, "bf16", "stochastic", warmup=True, compiled=False)
    rest.load_state_dict(through_a_file(half.state_dict()))
    assert rest.decay == pytest.approx(31 / 40)
    with torch.no_grad():
        for weight in path[30:60]:
            p.copy_(weight)
            rest.update()
    assert same(rest.shadow["p"], whole.shadow["p"])


def test_a_decay_that_is_set_by_hand_is_the_full_one():
    ema = EMA([("p", nn.Parameter(draw(3)))], 0.9, warmup=True, compiled=False)
    assert ema.decay == pytest.approx(0.1)
    ema.step, ema.decay = 10**6, 0.5
    assert ema.decay == 0.5


def test_an_average_that_is_assigned_goes_on_from_there():
    p = nn.Parameter(draw(3))
    ema = EMA([("p", p)], 0.9, compiled=False)
    ema.shadow["p"] = torch.zeros(3)
    ema.update()
    torch.testing.assert_close(ema.shadow["p"], 0.1 * p.detach())


def test_a_misspelt_average_is_refused():
    named = [("p", nn.Parameter(torch.ones(4)))]
    refused(lambda: EMA(named, 0.9, "bf16", "Stochastic"), "choose from nearest, stochastic")
    refused(lambda: EMA(named, 0.9, "fp16"), "choose from fp32, bf16")
