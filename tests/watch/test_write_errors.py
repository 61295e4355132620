"""Errors of writes in ulps: stochastic rounding leaves them to chance, and spoilt noise shows."""

import pytest
import torch

from lowprec.rounding import stochastic_round
from lowprec.watch.write_errors import Errors, certain_correlation, ulp

N, LOOKS = 2000, 6
BF16 = torch.bfloat16


def draw(*shape, low=0, high=1 << 16):
    return torch.randint(low, high, shape, dtype=torch.int32)


def written(noise, looks=LOOKS, tensors=3, dtype=BF16, entries=N):
    """Errors after some looks; noise(look, tensor) -> int32 [entries], None for rounding to nearest."""
    torch.manual_seed(0)
    errors, weights = Errors(tensors), [torch.randn(entries).to(dtype) for _ in range(tensors)]
    for look in range(looks):
        old = [w.float() for w in weights]
        target = [w * (1 + 0.002 * torch.randn(entries)) for w in old]
        for k, aim in enumerate(target):
            bits = noise(look, k)
            weights[k] = aim.to(dtype) if bits is None else stochastic_round(aim, bits)
        errors.add(list(range(tensors)), old, target, [w.float() for w in weights], [dtype] * tensors)
    return errors


def fresh(look, tensor):
    return draw(N)


def test_an_ulp_is_the_distance_to_the_next_value():
    x = torch.cat([torch.randn(500) * 10.0**k for k in range(-6, 6)]).bfloat16()
    up = (x.view(torch.int16) + 1).view(BF16)  # the next one away from zero
    plain = x.abs() != 2 ** x.abs().float().log2().round()
    assert torch.equal(ulp(x.float(), torch.finfo(BF16).eps)[plain], (up - x).float().abs()[plain])


def test_fresh_noise_is_chance():
    errors = written(fresh)
    for column in errors.columns():
        assert column.to_nearest is False and column.bias == 0.0 and not column.lumps
        assert column.repeats == column.neighbours == 0.0
        assert abs(column.score) < 4 * column.variance**0.5  # and the variance is the one that was foretold
    assert errors.shares() == {}


def test_rounding_to_nearest_is_known():
    assert written(lambda look, k: None).to_nearest is True
    assert written(fresh).to_nearest is False


def test_too_little_says_nothing():
    torch.manual_seed(0)
    errors, old = Errors(1), torch.ones(8)
    errors.add([0], [old], [old * 1.001], [old], [BF16])
    assert errors.to_nearest is None and errors.bias == 0.0


def seeded(tensor, step=0):
    """Bits that depend on these numbers alone."""
    generator = torch.Generator().manual_seed(100 * tensor + step)
    return torch.randint(1 << 16, (N,), dtype=torch.int32, generator=generator)


SPOILT = {
    "half of the range": (lambda look, k: draw(N, high=1 << 15), "bias"),
    "one value a tensor": (lambda look, k: draw(1).expand(N), "lumps"),
    "the same at each step": (lambda look, k: seeded(k), "repeats"),
    "two draws in turn": (lambda look, k: seeded(k, look % 2), "repeats"),
    "one value for 40 neighbours": (lambda look, k: draw(N // 40).repeat_interleave(40), "neighbours"),
}


@pytest.mark.parametrize("noise, what", SPOILT.values(), ids=SPOILT)
def test_spoilt_noise_shows(noise, what):
    for column in written(noise).columns():
        assert getattr(column, what)
    if what == "bias":
        assert written(noise).bias < 0  # less is added, so less is rounded up
        assert written(noise).shares() == {}  # each errs by itself, although all err to one side


def test_noise_that_tensors_share_names_the_pairs():
    shared = written(lambda look, k: seeded(look)).shares()
    assert set(shared) == {(0, 1), (1, 2)} and all(0.5 < value < 1.2 for value in shared.values())
    one = written(lambda look, k: seeded(look, int(k == 0))).shares()
    assert set(one) == {(1, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_what_is_not_narrow_is_left_out(dtype):
    errors, old = Errors(1), torch.ones(50)
    errors.add([0], [old], [old * 1.001], [old], [dtype])
    assert errors.entries == 0 and errors.past == []


def test_neighbours_are_of_one_tensor():
    """The last entry of a tensor and the first of the next are no neighbours."""
    errors, ones = Errors(3), torch.ones(1)
    errors.add([0, 1, 2], [ones] * 3, [ones * 1.001] * 3, [ones] * 3, [BF16] * 3)
    assert errors.near == errors.near_size == 0.0 and errors.entries == 3


def test_what_is_not_finite_does_not_count():
    errors, old = Errors(1), torch.ones(4)
    target = torch.tensor([1.001, float("nan"), float("inf"), 1.0])
    errors.add([0], [old], [target], [old], [BF16])
    assert errors.entries == 1 and errors.score == pytest.approx(-0.001 * 128, rel=1e-3)


def test_a_correlation_counts_where_it_is_certain_and_can_be_one():
    assert certain_correlation(0.5 * 100, 30.0, 100.0) == 0.5
    assert certain_correlation(0.5 * 100, 100.0, 100.0) == 0.0  # within 6 standard errors
    assert certain_correlation(0.1 * 100, 1.0, 100.0) == 0.0  # a fifth, at least
    assert certain_correlation(2 * 100, 30.0, 100.0) == 0.0  # larger than what rounding does
    assert certain_correlation(50.0, 0.5, 1.0) == 0.0  # next to nothing was seen
