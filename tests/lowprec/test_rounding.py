"""rounding.py: stochastic rounding, its noise, exact masters, kernels with and without a compiler."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from common import BF16, SPECIALS, bits_of, correlation, draw, from_bits, held, make, same

from lowprec.kernels import compiled as compiling
from lowprec.kernels import cpu_step
from lowprec.optimizers.average import EMA
from lowprec.rounding import (
    Noise,
    Stream,
    exact_weight,
    hash64,
    noise_bits,
    noise_key,
    split_master,
    stochastic_round,
    stream,
    write_weight,
)

# ---- Stochastic rounding -----------------------------------------------------------------------------------

BETWEEN = [1.0 + f * 2**-7 for f in (0.01, 0.25, 0.5, 0.77, 0.999)]
PLAIN = [-0.3, -1.0 - 0.3 * 2**-7, 1.9999, 1.99999988, 2.00001, 0.100001, -0.0499]
VALUES = [*BETWEEN, *PLAIN, 1e-30, -3.3e-37, 2e-39, 65504.3, -3.0e38]


def neighbours(value):
    """The two bf16 values around an fp32 value, as floats: (towards zero, away from zero)."""
    bits = torch.tensor(value).view(torch.int32).item()
    low = bits & ~0xFFFF
    pair = torch.tensor([low, low + 0x10000], dtype=torch.int32).view(torch.float32).double()
    return pair[0].item(), pair[1].item()


def full(n, noise):
    return torch.full((n,), noise, dtype=torch.int32)


def test_every_noise_value_once_gives_the_exact_mean():
    noise = torch.arange(65536, dtype=torch.int32)
    for value in VALUES:
        x = torch.full((65536,), value, dtype=torch.float32)
        ups = (stochastic_round(x, noise).double().abs() > abs(neighbours(value)[0])).sum().item()
        assert ups == bits_of(x)[0].item() & 0xFFFF


def test_representable_values_stay():
    every = torch.arange(-32768, 32768, dtype=torch.int16).view(BF16)
    finite = every[every.isfinite()]
    for noise in (0, 1, 0x8000, 0xFFFF):
        assert same(stochastic_round(finite.float(), full(len(finite), noise)), finite)


@pytest.mark.parametrize("compiled", [False, True])
def test_infinities_and_nan_stay_as_they_are(compiled):
    to_bf16 = compiling._compiled(stochastic_round)[0] if compiled else stochastic_round
    for noise in (0, 1, 0x7FFF, 0xFFFF):
        got = to_bf16(SPECIALS, full(len(SPECIALS), noise))
        assert torch.equal(got.isnan(), SPECIALS.isnan()), "a NaN became a number, or a number a NaN"
        infinite = SPECIALS.isinf()
        assert torch.equal(got[infinite].float(), SPECIALS[infinite])
        zero = SPECIALS == 0
        assert torch.equal(bits_of(got[zero].float()), bits_of(SPECIALS[zero])), "the sign of a zero was lost"
    # the largest fp32 values may round to infinity, as they do to nearest; nothing smaller may
    assert stochastic_round(from_bits(0x7F7F0000), full(1, 0xFFFF)).isfinite().all()


# ---- Noise -------------------------------------------------------------------------------------------------


def unit(noise):
    return (noise & 0xFFFF).double()


def test_hash64_is_splitmix64():
    # first output of the reference implementation (Vigna, splitmix64.c) from state 0
    assert hash64(0) == 0xE220A8397B1DCDAF
    both = {hash64(a, b) for a in range(50) for b in range(50)}
    assert len(both) == 2500, "words must not be interchangeable"


def test_a_stream_keeps_its_numbers():
    # recorded runs were drawn with these: the order of epoch 7, the initial weights, micro-batch 2 of step 7
    assert stream(3, Stream.ORDER, 7) == hash64(3, 7, 1) >> 1
    assert stream(3, Stream.INIT) == hash64(3, 2) >> 1
    assert stream(3, Stream.GLOBAL, 7) == hash64(3, 7, 3) >> 1
    assert stream(3, Stream.BATCH, 7, 2) == hash64(3, 7, 4, 2) >> 1
    assert stream(3, Stream.FIXED, None, 0) == hash64(3, 5, 0) >> 1
    torch.Generator().manual_seed(max(stream(seed, Stream.INIT) for seed in range(100)))
    for kinds in (Stream, Noise):
        assert len({int(kind) for kind in kinds}) == len(kinds) == len(kinds.__members__), "one number twice"


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("shift", [0, 16])
def test_noise_is_uniform(word, shift):
    n = 1 << 20
    noise = (noise_bits(n, noise_key(3, 11))[word] >> shift) & 0xFFFF
    for bins in (256, 16):
        counts = torch.bincount((noise // (65536 // bins)).long(), minlength=bins).double()
        chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum().item()
        assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    low = torch.bincount((noise & 0xFF).long(), minlength=256).double()
    assert abs(((low - n / 256) ** 2 / (n / 256)).sum().item() - 255) < 5 * math.sqrt(510)
    pairs = (noise[:-1] >> 12) * 16 + (noise[1:] >> 12)  # neighbouring elements are independent
    counts = torch.bincount(pairs.long(), minlength=256).double()
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum().item() - 255) < 6 * math.sqrt(510)


@pytest.mark.parametrize(
    "other",
    [dict(step=6), dict(seed=1), dict(kind=Noise.AVERAGE), dict(position=1 << 40), dict(position=1 << 17)],
)
def test_steps_seeds_streams_and_places_have_unrelated_noise(other):
    n = 1 << 16
    base = dict(seed=0, step=5)
    a, b = noise_bits(n + 8, noise_key(**base))[0], noise_bits(n + 8, noise_key(**{**base, **other}))[0]
    assert (a == b).sum() < 20
    for lag in range(-8, 9):  # a shifted copy would be no better than an equal one
        x, y = (a[lag:], b[: len(b) - lag]) if lag >= 0 else (a[:lag], b[-lag:])
        assert abs(correlation(unit(x), unit(y))) < 5 / math.sqrt(n)


def test_neighbouring_keys_do_not_give_shifted_copies():
    # first words within a few of each other, and sums too
    words = [(100, 7), (103, 8), (97, 10), (98, 9), (101, 6)]
    keys = [torch.tensor([*pair, 0], dtype=torch.int32) for pair in words]
    noise = [unit(noise_bits(1 << 14, key)[0]) for key in keys]
    for (a, b), lag in itertools.product(itertools.combinations(noise, 2), range(-8, 9)):
        x, y = (a[lag:], b[: len(b) - lag]) if lag >= 0 else (a[:lag], b[-lag:])
        assert abs(correlation(x, y)) < 5 / 128


def test_the_three_uses_of_a_steps_noise_are_unrelated():
    first, second = noise_bits(1 << 16, noise_key(0, 1))
    for a, b in itertools.combinations((unit(first), unit(first >> 16), unit(second)), 2):
        assert abs(correlation(a, b)) < 5 / 256


def test_noise_belongs_to_the_place_not_to_the_slice():
    whole, rest = noise_bits(1000, noise_key(0, 1)), noise_bits(700, noise_key(0, 1, position=300))
    assert torch.equal(whole[0][300:], rest[0]) and torch.equal(whole[1][300:], rest[1])
    high = noise_bits(10, noise_key(0, 1, position=(1 << 31) - 5))[0]  # int32 positions wrap without a seam
    assert len(set(high.tolist())) == 10


# ---- The split master --------------------------------------------------------------------------------------


def many_bit_patterns():
    g = torch.Generator().manual_seed(0)
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=g).to(torch.int32).view(torch.float32)
    # every tie there is
    ties = ((torch.arange(-32768, 32768, dtype=torch.int32) << 16) + 0x8000).view(torch.float32)
    subnormal = torch.arange(70000, dtype=torch.int32).view(torch.float32)
    return torch.cat([random, ties, subnormal, -subnormal, SPECIALS])


@pytest.mark.parametrize("compiled", [False, True])
def test_split_master_round_trips(compiled):
    x = many_bit_patterns()
    weight, remainder = (compiling._compiled(split_master)[0] if compiled else split_master)(x)
    assert weight.dtype == BF16 and remainder.dtype == torch.int16
    back, nan = exact_weight(weight, remainder), x.isnan()
    assert torch.equal(bits_of(back)[~nan], bits_of(x)[~nan])
    assert back[nan].isnan().all() and weight[nan].isnan().all()


def test_split_weight_is_the_nearest_bf16_except_on_ties():
    x = many_bit_patterns()
    x = x[~x.isnan()]
    tie = (bits_of(x) & 0xFFFF) == 0x8000
    weight = split_master(x)[0]
    assert same(weight[~tie], x[~tie].to(BF16))
    assert tie.sum() > 65000 and not same(weight[tie], x[tie].to(BF16))


def test_a_master_of_24_bits_round_trips():
    x = many_bit_patterns()
    x = (bits_of(x) & -256).view(torch.float32)
    x = x[x.isfinite()]
    for noise in (None, 0xFF):  # what has 24 bits stays
        weight, low = torch.zeros(len(x), dtype=BF16), torch.zeros(len(x), dtype=torch.int8)
        write_weight(x, weight, low, noise)
        assert torch.equal(bits_of(exact_weight(weight, low)), bits_of(x))


def test_a_master_of_24_bits_is_right_on_average():
    x = torch.full((1 << 16,), 1 + 2**-15 + 0.3 * 2**-15)
    weight, low = torch.zeros(len(x), dtype=BF16), torch.zeros(len(x), dtype=torch.int8)
    write_weight(x, weight, low, noise_bits(len(x), noise_key(0, 1))[0])
    held = exact_weight(weight, low).double()
    assert held.unique().numel() == 2 and abs(held.mean() - x[0].double()) < 2**-15 * 0.01


def test_exact_weight_and_write_weight_of_every_kind():
    x = draw(1000, scale=0.1)
    for low, tolerance in (
        (None, 2**-8),
        (torch.zeros(1000, dtype=BF16), 2**-16),
        (torch.zeros(1000, dtype=torch.int16), 0),
        (torch.zeros(1000, dtype=torch.int8), 2**-16),
        (torch.zeros(1000), 0),
    ):
        p = torch.zeros(1000, dtype=BF16)
        write_weight(x, p, low)
        assert (exact_weight(p, low) - x).abs().max() <= tolerance * x.abs().max()
        assert ((p.float() - x).abs() <= x.abs() * 2**-8).all(), "forward must read the nearest weight"


@pytest.mark.parametrize("noise", [None, 0, 0x1234])
@pytest.mark.parametrize("low", [None, BF16, torch.int16, torch.int8, torch.float32])
def test_what_is_held_once_it_is_written(low, noise):
    """`write_weight` returns what it leaves, where x lies halfway between two bf16 numbers too."""
    upper = torch.arange(0x3F80, 0x3FC0, dtype=torch.int32) << 16
    x = torch.cat([upper + 0x8000, upper + 0x7FFF, upper + 0x8001, upper]).view(torch.float32)
    p = torch.zeros(len(x), dtype=BF16)
    part = None if low is None else torch.zeros(len(x), dtype=low)
    assert same(write_weight(x, p, part, noise), exact_weight(p, part))
    if low is None and noise is None:
        assert same(p, x.to(BF16)), "ties go to even, as torch has it"


# ---- Without a compiler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "stochastic", "split"])
def test_without_a_compiler_one_warning_and_the_same_result(monkeypatch, mode):
    initial = [draw(30, seed=1), draw(40, seed=2)]

    def train(compiled):
        params, optimizer = make(mode, initial, compiled=compiled)
        named = [(str(i), p) for i, p in enumerate(params)]
        ema = EMA(named, 0.9, low_part=optimizer.low_part, compiled=compiled)
        for step in range(3):
            for p in params:
                p.grad = draw(*p.shape, seed=step).to(p.dtype)
            optimizer.step()
            ema.update()
        return [held(optimizer, p) for p in params] + list(ema.shadow.values())

    eager = train(compiled=False)

    def no_compiler(kernel):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(compiling, "_compiled", no_compiler)
    monkeypatch.setattr(compiling, "unfused", set())
    monkeypatch.setattr(cpu_step, "library", lambda: None)  # it has no compiler either
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fallen_back = train(compiled=True)
    (warning,) = [str(w.message) for w in caught]
    assert "torch.compile" in warning and "RuntimeError" in warning
    assert all(same(a, b) for a, b in zip(eager, fallen_back, strict=True))


def test_a_kernel_runs_once_where_the_compiler_is_turned_off():
    """As by TORCH_COMPILE_DISABLE=1: torch would run it, and then say that nothing was compiled."""
    x = torch.zeros(3)
    with torch._dynamo.config.patch(disable=True):
        compiling.fused(lambda x: x.add_(1), x)
    assert (x == 1).all()


def test_real_bugs_are_not_taken_for_a_missing_compiler(monkeypatch):
    def bug(kernel):
        raise TypeError("a bug of ours")

    monkeypatch.setattr(compiling, "_compiled", bug)
    monkeypatch.setattr(compiling, "unfused", set())
    monkeypatch.setattr(cpu_step, "library", lambda: None)  # the step is torch.compile's
    (p,), optimizer = make("fp32", [draw(30)], compiled=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="a bug of ours"):
        optimizer.step()


def test_a_full_memory_is_no_missing_compiler(monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compiling, "_compiled", lambda kernel: (no_memory, contextlib.nullcontext))
    monkeypatch.setattr(compiling, "unfused", set())
    with pytest.raises(torch.OutOfMemoryError):
        compiling.fused(lambda: "eager")
    assert not compiling.unfused


def test_arguments_that_cannot_work_are_no_missing_compiler(monkeypatch):
    def add(a, b):
        return a + b

    monkeypatch.setattr(compiling, "unfused", set())
    with warnings.catch_warnings(record=True) as caught, pytest.raises(RuntimeError):
        compiling.fused(add, torch.ones(3), torch.ones(4))
    assert not compiling.unfused and not [w for w in caught if "torch.compile" in str(w.message)]


STEPS_WITHOUT_A_CACHE = """
import torch
from lowprec import AdamW
for dtype in (torch.bfloat16, torch.float32):
    p = torch.nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = AdamW([p], lr=0.1, update="stochastic", exp_avg="flash8", exp_avg_sq="e4m3")
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p < 0.9).all()
"""


def test_a_compile_cache_that_cannot_be_written_is_one_warning():
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache"}
    command, root = [sys.executable, "-c", STEPS_WITHOUT_A_CACHE], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("using the slower eager one") == 1
