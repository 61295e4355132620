"""AdamW's step and the average as Triton kernels for CUDA, with the bits of those on a CPU. Needs torch and
Triton.

    if takes(step):      # a kernels.Step
        run(step)        # in place
    ema(average, p, low, share, key, stochastic)

Moments in int8 codes are read and written within the step.

torch.compile fuses them on CUDA as well, but may divide, take roots and contract products with other last
bits. Here each operation rounds once, as IEEE 754 has it, in the order of `AdamW`. So the optimiser
writes the same bits on either device from the same gradients. The exact step is one root apart: on a CPU it
is MKL's, of which one in 160 has another last bit, and here the nearest. Triton's interpreter runs the
kernels without a GPU: TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl

from ..rounding import way_of
from . import exact_step

ENTRIES_A_PROGRAM = 1024  # entries of one program
CODES_A_SCALE = tl.constexpr(256)  # entries that share a scale, where a moment is in codes
HELD_DTYPES = (torch.float32, torch.bfloat16)
# codes of rounding.Way
ALONE, MASTER, COMPENSATION, REMAINDER = (tl.constexpr(code) for code in range(4))
# places in a row of numbers
AT_DECAY, AT_SCALE, AT_ONE_MINUS_BETA1, AT_BETA2, AT_ONE_MINUS_BETA2, AT_ROOT_CORRECTION, AT_EPS, AT_RATE = (
    tl.constexpr(place) for place in range(len(exact_step.Row._fields))
)


def takes(s):
    """Whether `run` can carry out a kernels.Step."""
    return s.compiled and s.rule == "adamw" and s.weights[0].is_cuda and moves(s.weights, s.way)


def moves(tensors, way):
    """Whether the kernels can take these flat tensors of one device, and this rounding.Way."""
    return way.code is not None and all(t.dtype in HELD_DTYPES for t in tensors)


def run(s):
    """Carry out a kernels.Step on flat weights, in place."""
    (p,), (g,) = s.weights, s.gradients
    operands, read = [], []
    for held, key in zip(s.moments, s.keys, strict=True):
        operand = held.operand(key)
        # codes are places in a table of 256 values, in blocks of 256
        reads_codes = operand is not None and (operand.bits, operand.block) == (8, CODES_A_SCALE.value)
        if reads_codes and operand.line is not None:
            codes = operand.data, operand.scales, operand.table, operand.line, operand.key
            operands.append((*codes, operand.line.shape[0]))  # stretches of the line
        else:
            values = held.read(s.compiled)
            operands.append((values, *[s.row] * 4, 0))  # some pointer in place of what a tensor does not have
            read.append((held, values, key))
    # formed as torch's lerp and addcmul do, which round once where a product is added, if beta1 is above 0.5
    exact = s.exact and exact_step.lerp_adds(s.numbers)
    (m, *of_m, m_stretches), (v, *of_v, v_stretches) = operands
    with torch.cuda.device_of(p):
        grid = (triton.cdiv(p.numel(), ENTRIES_A_PROGRAM),)
        (low,) = s.low or [p]  # some pointer: it is not read
        pointers = (p, g, m, v, low, s.row, s.key, *of_m, *of_v)
        settings = (s.stochastic, exact, s.way.code, m_stretches, v_stretches, ENTRIES_A_PROGRAM)
        _adamw[grid](*pointers, p.numel(), *settings, **COMPILE_OPTIONS)
    for held, values, key in read:
        held.put_back(values, key, s.compiled)


def ema(average, p, low, share, key, stochastic):
    """Move an average [n] towards the weights p [n] and their low part, in place, as rounding.ema_kernel."""
    with torch.cuda.device_of(p):
        grid = (triton.cdiv(p.numel(), ENTRIES_A_PROGRAM),)
        (pointer,) = low or [p]  # some pointer: it is not read
        pointers = (p, pointer, average, share, key)
        settings = (way_of(*low).code, stochastic, ENTRIES_A_PROGRAM)
        _ema[grid](*pointers, p.numel(), *settings, **COMPILE_OPTIONS)


# ---- Rounding, as in rounding.py ---------------------------------------------------------------------------


@triton.jit
def _mix(h):
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _noise_bits(i, key):
    """Two int32 for each place i of a flat vector."""
    first = _mix(_mix(i + tl.load(key + 2) + tl.load(key)) + tl.load(key + 1))
    return first, _mix(first ^ 0x5BD1E995)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _value(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _stochastic_round(x, noise):
    """fp32 with 16 bits below those of bf16 cleared: the cast that follows is exact."""
    up = _value((_bits(x) + (noise & 0xFFFF)) & -65536)
    return tl.where(tl.abs(x) < float("inf"), up, x)


@triton.jit
def _nearest(x):
    """As _stochastic_round, to the nearest, ties to even."""
    bits = _bits(x)
    up = _value((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
    return tl.where(tl.abs(x) < float("inf"), up, x)


@triton.jit
def _write(at, x, noise, mask, STOCHASTIC: tl.constexpr):
    """x rounded to the dtype that `at` points to; returns it in fp32."""
    if at.dtype.element_ty == tl.bfloat16:
        x = _stochastic_round(x, noise) if STOCHASTIC else _nearest(x)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)
    return x


@triton.jit
def _held(weight, low, mask, KIND: tl.constexpr):
    """fp32 that a weight and what `low` points to stand for, see rounding.exact_weight."""
    bits = _bits(weight)
    if KIND == REMAINDER:
        remainder = tl.load(low, mask=mask, other=0).to(tl.int32)
        remainder = tl.where((bits & 0x7FFFFFFF) == 0, tl.maximum(remainder, 0), remainder)
        weight = _value(bits + remainder)
    elif KIND == COMPENSATION:
        weight = weight + tl.load(low, mask=mask, other=0).to(tl.float32)
    elif KIND == MASTER:
        master = tl.load(low, mask=mask, other=0)
        away = bits - _bits(master) + 0x8000
        weight = tl.where((away >= 0) & (away <= 0x10000), master, weight)
    return weight


# ---- The average -------------------------------------------------------------------------------------------


@triton.jit
def _ema(p, low, average, share, key, n, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    weight = tl.load(p + i, mask=mask, other=0).to(tl.float32)
    now = _held(weight, low + i, mask, KIND)
    old = tl.load(average + i, mask=mask, other=0).to(tl.float32)
    noise = i.to(tl.int32)  # of the same type where there is none
    if STOCHASTIC:
        noise, _ = _noise_bits(i.to(tl.int32), key)
    _write(average + i, old + (now - old) * tl.load(share), noise, mask, STOCHASTIC)


# ---- Codes: formats.stochastic_codes -----------------------------------------------------------------------


@triton.jit
def _old_moment(at, scales, table, i, mask, STRETCHES: tl.constexpr):
    """The values of a moment, fp32; in codes if its line has stretches."""
    value = tl.load(at, mask=mask, other=0)
    if STRETCHES == 0:
        value = value.to(tl.float32)
    else:
        value = tl.load(table + value.to(tl.int32)) * tl.load(scales + i // CODES_A_SCALE, mask=mask, other=0)
    return value


@triton.jit
def _encode(at, x, scales, table, line, key, i, mask, SIGNED: tl.constexpr, STRETCHES: tl.constexpr):
    """Write fp32 x [blocks, CODES_A_SCALE], zeros where masked, into codes and scales."""
    known = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    scale = tl.max(known, 1, keep_dims=True)
    first_value = tl.load(table)
    if SIGNED:
        scale = tl.maximum(scale, tl.div_rn(tl.min(known, 1, keep_dims=True), first_value))
    # NaN, and so the code of zero, where x is not finite
    y = tl.where(scale == 0, 0.0, tl.div_rn(x, scale)) - (x - x)
    size = tl.abs(y)
    place = tl.zeros_like(y)
    for stretch in tl.static_range(STRETCHES):
        value, first, rise = _stretch(line, stretch)
        place = tl.where(size >= value, first + (size - value) * rise, place)
    noise, _ = _noise_bits(i.to(tl.int32), key)
    whole = tl.floor(place)
    uniform = (noise & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    code = whole.to(tl.int32) + (place - whole > uniform).to(tl.int32)
    if SIGNED:
        code = tl.where(y < 0, 127 - code, 127 + code)
    else:
        least_above_zero = (first_value == 0).to(tl.int32)
        code = tl.where((y > 0) & (code == 0), least_above_zero, code)
    code = tl.minimum(tl.maximum(code, 0), 255)
    tl.store(at, code.to(tl.uint8), mask=mask)
    in_first_column = i % CODES_A_SCALE == 0
    tl.store(scales + i // CODES_A_SCALE, tl.broadcast_to(scale, i.shape), mask=mask & in_first_column)


@triton.jit
def _stretch(line, stretch):
    """(value, code, codes a unit of value) where a stretch begins, see formats.broken_line."""
    row = line + 3 * stretch
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


# ---- The step ----------------------------------------------------------------------------------------------


@triton.jit
def _adamw(
    p,
    g,
    m,
    v,
    low,
    row,
    key,
    m_scales,
    m_table,
    m_line,
    m_key,
    v_scales,
    v_table,
    v_line,
    v_key,
    n,
    STOCHASTIC: tl.constexpr,
    EXACT: tl.constexpr,
    KIND: tl.constexpr,
    M_STRETCHES: tl.constexpr,
    V_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK
    if M_STRETCHES + V_STRETCHES == 0:
        i += tl.arange(0, BLOCK)
    else:  # a row for each scale
        rows = tl.arange(0, BLOCK // CODES_A_SCALE)[:, None]
        i = i + rows * CODES_A_SCALE + tl.arange(0, CODES_A_SCALE)[None, :]
    mask = i < n
    p, m, v, low = p + i, m + i, v + i, low + i
    weight = tl.load(p, mask=mask, other=0).to(tl.float32)
    gradient = tl.load(g + i, mask=mask, other=0).to(tl.float32) * tl.load(row + AT_SCALE)
    m_old = _old_moment(m, m_scales, m_table, i, mask, M_STRETCHES)
    v_old = _old_moment(v, v_scales, v_table, i, mask, V_STRETCHES)
    one_minus_beta1 = tl.load(row + AT_ONE_MINUS_BETA1)
    beta2 = tl.load(row + AT_BETA2)
    one_minus_beta2 = tl.load(row + AT_ONE_MINUS_BETA2)

    if EXACT:
        m_new = tl.fma(one_minus_beta1, gradient - m_old, m_old)
        v_new = tl.fma(one_minus_beta2 * gradient, gradient, v_old * beta2)
    else:
        m_new = (gradient - m_old) * one_minus_beta1 + m_old
        v_new = one_minus_beta2 * gradient * gradient + v_old * beta2
    root = tl.div_rn(tl.sqrt_rn(v_new), tl.load(row + AT_ROOT_CORRECTION)) + tl.load(row + AT_EPS)
    update = tl.div_rn(tl.load(row + AT_RATE) * m_new, root)

    held = _held(weight, low, mask, KIND)
    x = held * tl.load(row + AT_DECAY) + update

    first, second = weight.to(tl.int32), weight.to(tl.int32)  # of the same types where there is no noise
    if STOCHASTIC:
        first, second = _noise_bits(i.to(tl.int32), key)
    if KIND == ALONE:
        _write(p, x, first, mask, STOCHASTIC)
    elif KIND == REMAINDER:
        bits = _bits(x)
        high = (bits + 0x8000) & -65536
        tl.store(p, tl.where(x == x, _value(high), x).to(tl.bfloat16), mask=mask)
        tl.store(low, tl.where(x == x, bits - high, 0).to(tl.int16), mask=mask)
    elif KIND == COMPENSATION:
        near = _stochastic_round(x, 0x8000)
        tl.store(p, near.to(tl.bfloat16), mask=mask)
        _write(low, x - near, first, mask, STOCHASTIC)
    else:
        tl.store(low, x, mask=mask)
        _write(p, x, first, mask, False)
    if M_STRETCHES == 0:
        _write(m, m_new, first >> 16, mask, STOCHASTIC)
    else:
        _encode(m, m_new, m_scales, m_table, m_line, m_key, i, mask, True, M_STRETCHES)
    if V_STRETCHES == 0:
        _write(v, v_new, second, mask, STOCHASTIC)
    else:
        _encode(v, v_new, v_scales, v_table, v_line, v_key, i, mask, False, V_STRETCHES)


# contracted, a product and a sum would round once
COMPILE_OPTIONS = {"enable_fp_fusion": False}
