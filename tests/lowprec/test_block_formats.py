"""block_formats.py: values as libraries code them, stochastic codes, blocks of every shape, a fused pass."""

import dataclasses

import common
import pytest
import torch
from common import draw

from lowprec.layers.block_formats import BLOCK_FORMATS, E5M3, PowerOfTwo
from lowprec.rounding import noise_key

eager = common.eager


def everything(n=1 << 20):
    """fp32 [n / 512, 512], each 32 of another size: ties, subnormals, zeros, infinities, NaN among them."""
    g = torch.Generator().manual_seed(0)
    decades = torch.exp2(torch.randint(-150, 120, (n // 32, 1), generator=g).float())
    x = torch.randn(n // 32, 32, generator=g) * decades
    whole_steps = torch.randint(-32, 33, (n // 32, 32), generator=g) * 0.125 * decades  # many of them ties
    x = torch.where(torch.rand(n // 32, 1, generator=g) < 0.5, whole_steps, x).flatten()
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, 1.0])
    places = torch.randint(0, n, (n // 64,), generator=g)
    x[places] = odd[torch.randint(0, len(odd), places.shape, generator=g)]
    x[: n // 8 : 7] = 0.0
    return x.view(-1, 512)


MX = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp4": torch.float4_e2m1fn_x2,
}


@pytest.mark.parametrize("mode, theirs", [("floor", "FLOOR"), ("ceil", "CEIL"), ("up", "RCEIL")])
@pytest.mark.parametrize("name", MX)
def test_mx_values_are_those_of_torchao(name, mode, theirs):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    form = dataclasses.replace(BLOCK_FORMATS[name], scale=PowerOfTwo(mode))
    x = everything()
    if mode == "up":  # on a CPU torchao takes log2 in fp32, which can't tell 2^n from the numbers next to it
        x = x.bfloat16()
    exact = MXTensor.to_mx(x, MX[name], 32, ScaleCalculationMode[theirs])
    ours, theirs = form.rounded(x, 1, compiled=False), exact.dequantize(torch.float32)
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) and ours.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [False, True])
def test_nvfp4_values_are_those_of_torchao(odd, dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = everything().to(dtype)
    if not odd:
        x = draw(2048, 512).to(dtype) * 0.01
        x[:100] = 0.0
    exact = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=x.abs().amax().float() / (6 * 448))
    ours, theirs = BLOCK_FORMATS["nvfp4"].rounded(x, 1, compiled=False), exact.dequantize(torch.float32)
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) and ours.isnan().any() == odd


@pytest.mark.parametrize("square", [False, True])
def test_blocks_of_128_are_those_of_torchao(square):
    from torchao.prototype.blockwise_fp8_training import kernels

    x = draw(512, 1024)
    form = BLOCK_FORMATS["block128_fp32"]
    one, whole = kernels.torch_blockwise_scale_act_quant_lhs, kernels.torch_blockwise_scale_weight_quant
    codes, scales = (whole if square else one)(x)
    every = scales.repeat_interleave(128, 1)
    every = every.repeat_interleave(128, 0) if square else every
    ours = (form.square() if square else form).rounded(x, 1, compiled=False)
    assert torch.equal(ours, codes.float() * every)
    assert BLOCK_FORMATS["block128"].lost(x, 1)[2] == 0  # its scales are powers of two that clip nothing
    powers = BLOCK_FORMATS["block128"].rounded(x, 1, compiled=False)
    assert torch.equal(powers.bfloat16().float(), powers) and not torch.equal(ours.bfloat16().float(), ours)


def test_scales_of_ue5m3_have_bias_15_three_digits_and_reach_114688():
    codes = torch.tensor([0, 1, 7, 8, 9, 0x78, 0xFE], dtype=torch.uint8)
    exact = [0, 2**-17, 7 * 2**-17, 2**-14, 1.125 * 2**-14, 1.0, 114688]
    values = 2.0 ** (codes.int() >> 3).clamp(min=1).sub(15) * ((codes & 7) / 8 + (codes > 7))
    assert values.tolist() == exact
    assert torch.equal(E5M3.round(values), values)
    small, large = draw(1, 16) * 1e-6, draw(1, 16)  # one block lies further below the other than e4m3 reaches
    x = torch.cat([small, large])
    error = {}
    for name in ("nvfp4", "nvfp4_ue5m3"):
        error[name] = ((BLOCK_FORMATS[name].rounded(x, 1) - x)[0].norm() / small.norm()).item()
    assert error["nvfp4"] > 0.3 and error["nvfp4_ue5m3"] < 0.15


every = pytest.mark.parametrize("name", BLOCK_FORMATS)


@every
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_size_comes_back_in_its_blocks(name, square, dim):
    """The blocks of a tensor whose sizes don't divide are those of one that zeros fill up."""
    form = BLOCK_FORMATS[name].square() if square else BLOCK_FORMATS[name]
    x = draw(150, 70) * torch.logspace(-9, 0, 150, base=2)[:, None]
    y = form.rounded(x, dim)
    assert y.shape == x.shape
    filled = torch.zeros(256, 256)
    filled[:150, :70] = x
    assert torch.equal(form.rounded(filled, dim)[:150, :70], y)
    assert (y - x).norm() < 0.15 * x.norm()
    if square:
        assert torch.equal(form.rounded(x, 1 - dim), y)  # a weight and its transpose round alike
    elif form.element.name == "e2m1":  # the others' ranges hold all 9 powers of two: they round alike
        turned = form.rounded(x.t(), 1 - dim)
        assert torch.equal(turned.t(), y) and not torch.equal(form.rounded(x, 1 - dim), y)


@every
def test_stochastic_codes_are_right_on_average(name):
    """Over 40,000 draws each of values up to the largest of their block, where nearest codes are wrong."""
    form = BLOCK_FORMATS[name]
    draws = 40_000
    block = 1.9 * torch.linspace(-1, 1, form.length) ** 3
    one = torch.cat([block, 0.83 * block])
    mean = torch.zeros(len(one), dtype=torch.float64)
    spread = torch.zeros(len(one), dtype=torch.float64)
    for step in range(10):
        x = one.expand(draws // 10, -1).contiguous()
        y = form.rounded(x, 1, noise_key(0, step)).double()
        mean += y.sum(0) / draws
        spread += (y - one).square().sum(0) / draws
    error = (mean - one.double()).abs() / (spread.sqrt() / draws**0.5).clamp(min=1e-7)
    assert error.max() < 5  # standard errors
    assert ((form.rounded(one[None], 1)[0] - one).abs() > 10 * (mean - one).abs()).double().mean() > 0.5
    again = form.rounded(x, 1, noise_key(0, 9))
    assert torch.equal(again.double(), y)


def test_eden_is_right_on_average_and_has_half_the_error_of_stochastic_codes():
    """Means over random rotations of 32 values; errors as of arXiv 2601.22813, table 1."""
    form = BLOCK_FORMATS["nvfp4"]
    x = draw(1, 32) * torch.linspace(0.1, 2, 32)
    draws = 20_000
    signs = torch.randint(0, 2, (draws, 32), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    hadamard = torch.ones(1, 1)
    for _ in range(5):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard /= 32**0.5
    mixed = (x * signs) @ hadamard
    back = {}
    for kind, how in (("eden", form.with_eden(32)), ("stochastic", form)):
        back[kind] = (how.rounded(mixed, 1, noise_key(0, 0)) @ hadamard.t()) * signs
    spread = (back["eden"] - x).square().mean().sqrt()
    assert (back["eden"].mean(0) - x).norm() < 0.02 * x.norm() + 5 * spread / draws**0.5
    nearest = form.rounded(mixed, 1)  # alone it shrinks what it rounds
    aligned = {k: (v @ x[0]).mean() / x.norm() ** 2 for k, v in back.items()}
    assert abs(aligned["eden"] - 1) < 0.002 < abs((nearest * mixed).sum() / mixed.square().sum() - 1)
    error = {k: (v - x).square().mean() for k, v in back.items()}
    assert error["eden"] < 0.5 * error["stochastic"]


@pytest.mark.compiled
def test_the_fused_pass_writes_the_same_bits():
    x = draw(96, 80)
    form, key = BLOCK_FORMATS["nvfp4"], noise_key(0, 1)
    assert torch.equal(form.rounded(x, 0, key), form.rounded(x, 0, key, compiled=False))
