"""formats.py: codes as the libraries write them, stochastic codes, 8-bit floats, codes of any length."""

import itertools
import math

import common
import pytest
import torch
from common import FLOATS, KINDS, coder, same

from lowprec.kernels import compiled as compiling
from lowprec.rounding import noise_key, uniform

eager = common.eager

signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def moment(n, signed, seed=0):
    """fp32 [n] over five decades; in a signed one the negative extreme is the largest of its block."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * 10.0 ** -(torch.rand(n, generator=g) * 5)
    if not signed:
        return x.abs()
    x[::128] = -5.0
    return x


def stored(c, x, signed, key=None, compiled=True):
    """(codes, scales, the values they stand for) of x by coder c."""
    codes, scales = c.new(x.numel(), x.device)
    c.encode(x, codes, scales, signed, key, compiled)
    return codes, scales, c.decode(codes, scales, x.numel(), signed)


# ---- Tables ------------------------------------------------------------------------------------------------


@signs
@pytest.mark.parametrize("n", [4096, 5000])
def test_nearest_8_bit_codes_are_those_of_bitsandbytes(n, signed):
    c, x = coder("int8"), moment(n, signed)
    from bitsandbytes import functional

    table = functional.create_dynamic_map(signed=signed)
    codes, state = functional.quantize_blockwise(x, code=table, blocksize=256)
    ours = stored(c, x, signed)
    assert torch.equal(ours[0], codes) and torch.equal(ours[1], state.absmax)
    assert torch.equal(ours[2], functional.dequantize_blockwise(codes, state))


@signs
def test_nearest_4_bit_codes_are_those_of_torchao(signed):
    c, x = coder("int4"), moment(4096, signed)
    from torchao.optim.subclass_4bit import OptimState4bit

    theirs = OptimState4bit.zeros((64, 64), signed)
    theirs.copy_(x.view(64, 64))
    ours = stored(c, x, signed)
    assert torch.equal(ours[0], theirs.codes) and torch.equal(ours[1], theirs.scale)
    assert torch.equal(ours[2], theirs.dequantize().view(-1)) and ours[0].numel() == 2048


# ---- 8-bit floats ------------------------------------------------------------------------------------------


def scaled(c, x):
    """fp32 [n]: x over the scale of its block; the scale, as the format promises it."""
    rows = x.view(-1, c.block)
    scale = rows.abs().amax(1, keepdim=True) / c.top
    return (rows / scale).flatten(), scale.expand_as(rows).flatten()


@signs
@pytest.mark.parametrize("kind", FLOATS)
def test_nearest_8_bit_floats_are_torchs_cast(kind, signed):
    c, x = coder(kind), moment(8192, signed)
    y, scale = scaled(c, x)
    wanted = y.clamp(-c.top, c.top).to(c.dtype)
    codes, scales, value = stored(c, x, signed)
    rounded_to_zero = (wanted.float() == 0) & (x > 0) & (not signed)
    assert torch.equal(codes[~rounded_to_zero], wanted.view(torch.uint8)[~rounded_to_zero])
    assert rounded_to_zero.any() == (kind == "e4m3" and not signed), "the test sees nothing"
    assert (codes[rounded_to_zero] == 1).all(), "the smallest positive code"
    assert torch.equal(scales, scale[:: c.block]) and torch.equal(value, codes.view(c.dtype).float() * scale)
    assert (value[::128] == -5.0).all() or not signed  # the largest of a block is kept


@pytest.mark.parametrize("kind", FLOATS)
def test_every_8_bit_float_is_itself(kind):
    c = coder(kind)
    every = torch.arange(256, dtype=torch.uint8).view(c.dtype).float()
    every = torch.cat([every[every.isfinite()], torch.zeros(256)])[:256]
    for key in (None, noise_key(0, 1)):
        codes, scales, value = stored(c, every, True, key)
        assert scales == 1 and torch.equal(value, every)
    assert torch.equal(c.values(codes.view(c.dtype)), codes.view(c.dtype).float())


# ---- Curves ------------------------------------------------------------------------------------------------


@signs
def test_nearest_codes_on_a_curve_are_those_of_flashoptim(signed):
    """By the formulas of the paper: 127 * 2y / (1 + |y|) and 255 * sqrt(y), rounded half up."""
    c, x = coder("flash8"), moment(4096, signed)
    rows = x.view(-1, 32)
    top = rows.abs().amax(1, keepdim=True)
    if signed:
        y = (rows / top).double()
        place = (127 * 2 * y / (1 + y.abs())).round()
        z = place / 127
        wanted = z / (2 - z.abs()) * top
    else:
        place = (255 * (rows / top).double().sqrt()).round()
        place = torch.where(rows > 0, place.clamp(min=1), place)  # ours: a second moment is not 0
        wanted = (place / 255) ** 2 * top
    codes, scales, value = stored(c, x, signed)
    assert torch.equal(codes.view(torch.int8 if signed else torch.uint8).double(), place.flatten())
    assert torch.equal(scales, top.flatten())
    assert torch.allclose(value.double(), wanted.flatten(), rtol=1e-5)


# ---- Every format ------------------------------------------------------------------------------------------


def numbers_of(c, signed):
    """fp64 [n], rising: what the codes of a format stand for where the scale is 1."""
    n = 256 * 8 // c.bits
    codes, scales = c.new(n, "cpu")
    codes.copy_(torch.arange(256))
    values = c.decode(codes, scales.fill_(1.0), n, signed).double()
    return values[values.isfinite()].unique()


@signs
@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_codes_are_neighbours_and_right_on_average(kind, signed):
    c, calls, copies = coder(kind), 150, 8
    x, draws = moment(512, signed), calls * copies
    numbers, scales = numbers_of(c, signed), stored(c, x, signed, noise_key(1, 0))[1]
    unit = scales.double().repeat_interleave(c.block)
    y = (x / unit).clamp(numbers[0], numbers[-1])  # torchao's unsigned map starts at 1/16
    above = torch.searchsorted(numbers, y).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    gap, total = high - low, torch.zeros(512, dtype=torch.float64)
    for step in range(calls):
        drawn = stored(c, x.repeat(copies), signed, noise_key(1, step))[2].double().view(copies, 512) / unit
        assert ((drawn - low).abs().minimum((drawn - high).abs()) <= 1e-5 * high.abs().maximum(gap)).all()
        total += drawn.sum(0)
    share = (y - low) / gap
    spread, error = (share * (1 - share) / draws).sqrt(), (total / draws - y) / gap
    # a second moment below the smallest code takes that code; a share far below 1 / draws comes once or never
    reachable = torch.ones(512, dtype=torch.bool) if signed else y >= numbers[numbers > 0].min()
    assert reachable.double().mean() > (0.05 if kind in ("int4", "log4") else 0.5)
    assert (error.abs() <= 6 * spread + 2 / draws)[reachable].all()
    assert abs(error[reachable].sum()) < 6 * spread[reachable].square().sum().sqrt() + 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_moment_of_an_entry_with_gradients_is_never_zero(kind):
    c, x = coder(kind), torch.full((4096,), 1e-9)
    x[::128] = 1.0
    x[1] = 0.0
    no_noise = noise_key(0, 0, 52909203)  # beside x[1]
    assert uniform((2,), no_noise)[1] == 0
    keys = no_noise, *(noise_key(0, step) for step in range(5))
    for key, compiled in itertools.product(keys, (True, False)):
        value = stored(c, x, False, key, compiled)[2]
        assert (value[x > 0] > 0).all() and (value[::128] == 1).all()
        assert value[1] == 0 or kind in ("int4", "log4")  # torchao's map has no zero


@pytest.mark.parametrize("key", [None, noise_key(0, 1)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("kind, signed", itertools.product(KINDS, [True, False]))
def test_what_is_no_number_reaches_no_other_entry_of_its_block(kind, signed, key):
    c, x = coder(kind), moment(4099, signed)
    x[256:512] = 0
    struck = x.clone()
    # beside ordinary values, beside zeros alone, in the last block
    at = [7, 300, 1024, 4098]
    struck[at] = torch.tensor([math.nan, math.inf, -math.inf if signed else math.inf, math.nan])
    x[at] = 0
    (_, scales, value), wanted = stored(c, struck, signed, key), stored(c, x, signed, key)
    if kind == "int8" and key is None:  # bitsandbytes' kernel: an infinity reaches its block, and no other
        blocks = torch.arange(4099) // c.block
        beside = ~torch.isin(blocks, blocks[at])
        assert same(value[beside], wanted[2][beside]) and not value.isfinite()[~beside].all()
        return
    assert same(scales, wanted[1])
    if kind in FLOATS:
        assert value[at].isnan().all()
        value[at] = wanted[2][at]
    assert same(value, wanted[2]) and value.isfinite().all()


@pytest.mark.parametrize("kind", ["int8", *FLOATS])
def test_noise_is_a_function_of_its_key(kind):
    c, x = coder(kind), moment(8192, True)
    first, again, other = (stored(c, x, True, noise_key(0, step))[0] for step in (1, 1, 2))
    assert torch.equal(first, again) and 0.2 < (first != other).float().mean() < 0.6
    second_half = stored(c, x[4096:], True, noise_key(0, 1, 4096))[0]
    assert torch.equal(first[4096:], second_half)
    odd = stored(c, x[:5000], True, noise_key(0, 1))[0]  # ends within a block
    assert torch.equal(odd[:4864], first[:4864])
    assert torch.equal(odd[4864:], stored(c, x[4864:5000], True, noise_key(0, 1, 4864))[0])


# ---- Codes of any length -----------------------------------------------------------------------------------

# ends with one value in the last block, with an odd number of them, in the middle of a byte, with one missing
LENGTHS = (4097, 4099, 4351, 5001)


@pytest.mark.parametrize("key", [None, noise_key(0, 1)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_any_length_are_those_of_a_longer_tensor(kind, n, key):
    """A shorter last block is coded as one that zeros fill up."""
    c = coder(kind)
    for signed in (True, False):
        x = moment(n, signed)
        filled = torch.cat([x, torch.zeros(-n % c.block)])
        codes, scales, value = stored(c, x, signed, key)
        wanted = stored(c, filled, signed, key)
        assert torch.equal(value, wanted[2][:n]) and torch.equal(scales, wanted[1])
        assert torch.equal(codes[: n * c.bits // 8], wanted[0][: n * c.bits // 8])
        assert codes.dtype == torch.uint8 and codes.numel() == -(-n * c.bits // 8)
        assert (codes.numel(), scales.numel()) == c.sizes(n) and scales.numel() == -(-n // c.block)


# ---- Compiled, and on a GPU --------------------------------------------------------------------------------


COMPILED = {
    "e4m3 stochastic": ("e4m3", True, noise_key(0, 1), 4097),
    "e5m2 nearest": ("e5m2", False, None, 4096),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_and_eager_codes_are_equal(name):
    kind, signed, key, n = COMPILED[name]
    c, x = coder(kind), moment(n, signed)
    bad = x.clone()
    bad[300] = float("nan")
    results, values = [], []
    for compiled in (False, True):
        codes, scales = c.new(n, "cpu")
        c.encode(x, codes, scales, signed, key, compiled)
        results.append((codes.clone(), scales.clone(), c.decode(codes, scales, n, signed, compiled)))
        c.encode(bad, codes, scales, signed, key, compiled)
        values.append(c.decode(codes, scales, n, signed, compiled).nan_to_num(-7.0))
    assert not compiling.unfused, "it was not compiled"
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert same(*values) and (values[0] == -7).sum() == (kind in FLOATS), "codes of a table have no NaN"


@pytest.mark.gpu
@signs
@pytest.mark.parametrize("kind", KINDS)
def test_codes_on_cuda_are_those_of_the_cpu(kind, signed):
    c, x = coder(kind), moment(8193, signed)
    for key in (None, (0, 1)):
        values = []
        for device in ("cpu", "cuda"):
            codes, scales = c.new(x.numel(), device)
            its_key = key and noise_key(*key, device=device)
            c.encode(x.to(device), codes, scales, signed, its_key)
            values.append(c.decode(codes, scales, x.numel(), signed).cpu())
        if kind == "int8" and key is None:  # bitsandbytes' kernel for CPUs misses the nearest code
            values[0] = nearest_of(c.table(signed, x.device), x, scales.cpu(), c.block)
        # CUDA divides with another last bit, so that scales differ in theirs
        assert (~torch.isclose(*values, rtol=1e-6, atol=0)).float().mean() < 0.01, key


def nearest_of(table, x, scales, block):
    """fp32 [n]: x [n] rounded to the nearest of the table's values times its block's scale."""
    scales = scales.repeat_interleave(block)[: x.numel()]
    places = (x.double() / scales)[:, None].sub(table.double()).abs().argmin(1)
    return table[places] * scales


@signs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int4", "log4"])
def test_tables_are_fp32_whatever_the_default_dtype(name, dtype, signed):
    with common.default_dtype(dtype):
        made = type(coder(name))()  # one that has no table yet
        assert made.table(signed, torch.device("cpu")).dtype == torch.float32
