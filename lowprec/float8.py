"""Moments in 8-bit floats, in operations that torch.compile vectorises on a CPU: its casts to and from these
dtypes go one by one there. formats.Float8 calls them.
"""

import functools

import torch

from .rounding import uniform


@functools.cache
def float8_encoder(form, signed):
    """A kernel that writes fp32 x [blocks, block] into codes uint8 alike and scales [blocks], in place: to
    the nearest number of the format, or stochastically where a key is given. form: a formats.Float8.
    """

    def kernel(x, codes, scales, key):
        scale = torch.where(x.abs() < torch.inf, x, 0.0).abs().amax(1) / form.top  # [blocks]
        y = torch.where(scale[:, None] == 0, 0.0, x / scale[:, None]) - (x - x)  # NaN if x is not finite
        # the gap between neighbours at y: 2^(exponent - mantissa), constant below the smallest normal number
        exponent = ((y.view(torch.int32) >> 23) & 0xFF) - 127
        biased = exponent.clamp(min=form.least) - form.mantissa + 127
        gap = (biased << 23).view(torch.float32)
        a_gap = ((254 - biased) << 23).view(torch.float32)  # 1 / gap, exactly: powers of two divide slowly
        if key is not None:
            y = (y * a_gap + uniform(x.shape, key)).floor() * gap
        if not signed:
            smallest = 2.0 ** (form.least - form.mantissa)
            # half the time of (x > 0) & (y < smallest); numbers alone have the default dtype
            lowest = torch.where(x > 0, smallest, 0.0).to(x.dtype)
            y = torch.where(y < lowest, lowest, y)
        codes.copy_(bits_of(y.clamp(-form.top, form.top), form))
        scales.copy_(scale)

    return kernel


def bits_of(y, form):
    """uint8: fp32 y, no larger than the format's largest, to the nearest number of the format. As torch's
    cast, but of operations that torch.compile vectorises on a CPU.
    """
    bits = y.view(torch.int32)
    size = bits & 0x7FFFFFFF
    low = 23 - form.mantissa  # bits that are dropped
    to_even = ((1 << low - 1) - 1) + ((size >> low) & 1)
    code = ((size + to_even) >> low) - ((127 + form.least - 1) << form.mantissa)
    # below the smallest normal number the gap is constant; the sum with a power of two rounds to it
    steps = size.view(torch.float32) * 2.0 ** (form.mantissa - form.least)
    small = (steps + 2.0**23).view(torch.int32) & 0xFF
    code = torch.where(steps < 2**form.mantissa, small, code)
    code = torch.where(y == y, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(torch.uint8)


@functools.cache
def float8_decoder(form):
    """A kernel, codes [blocks, block] and scales [blocks] -> fp32 alike."""

    def kernel(codes, scales):
        code = codes.int()
        size = code & 0x7F
        normal = ((size << 23 - form.mantissa) + ((127 + form.least - 1) << 23)).view(torch.float32)
        small = size.float() * 2.0 ** (form.least - form.mantissa)
        value = torch.where(size < 2**form.mantissa, small, normal)
        value = torch.where(normal > form.top, torch.nan, value)
        return torch.where(code > 0x7F, -value, value) * scales[:, None]

    return kernel
