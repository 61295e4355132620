"""Codes that lie evenly on a curve: what formats.Curved writes, in closed form.

A curve bends a share of a block's largest value, 0 to 1, so that small shares get more of the codes. These
two are those of FlashOptim (arXiv 2602.23349): a first moment goes by 2y / (1 + y), a second one by its root.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .rounding import uniform


class Curve(NamedTuple):
    """bend: shares, fp32 0 to 1 -> where they lie on the curve, 0 to 1; straighten: its inverse."""

    bend: Callable
    straighten: Callable


SOFTSIGN = Curve(lambda y: 2 * y / (1 + y), lambda z: z / (2 - z))
SQUARE_ROOT = Curve(lambda y: y.sqrt(), lambda z: z * z)


@functools.cache
def curve_encoder(signed):
    """A kernel that writes fp32 x [blocks, block] into 8-bit codes alike and scales [blocks], in place: to
    the nearest code on the curve where key is None, else to one of two neighbours, so that the mean is x. A
    signed code is an int8 of -127 to 127, another 0 to 255.
    """
    curve, top = (SOFTSIGN, 127) if signed else (SQUARE_ROOT, 255)

    def kernel(x, codes, scales, key):
        size = torch.where(x.abs() < torch.inf, x.abs(), 0.0)  # NaN and infinities have no code
        scale = size.amax(1)
        share = torch.where(scale[:, None] == 0, 0.0, size / scale[:, None])
        place = curve.bend(share) * top
        if key is None:
            code = (place + 0.5).floor()
        else:
            below = place.floor()
            low, high = (curve.straighten(code / top) for code in (below, below + 1))
            code = below + ((share - low) / (high - low) > uniform(x.shape, key))
        if not signed:
            code = torch.where((share > 0) & (code == 0), 1.0, code)
        code = torch.where(x < 0, -code, code).clamp(-top, top).int()
        codes.copy_((code & 0xFF).to(torch.uint8))
        scales.copy_(scale)

    return kernel


@functools.cache
def curve_decoder(signed):
    """A kernel, codes [blocks, block] and scales [blocks] -> fp32 alike."""
    curve, top = (SOFTSIGN, 127) if signed else (SQUARE_ROOT, 255)

    def kernel(codes, scales):
        if not signed:
            return curve.straighten(codes.float() / top) * scales[:, None]
        code = (codes.int() ^ 0x80) - 0x80  # the int8 of these bits
        size = curve.straighten(code.abs().float() / top) * scales[:, None]
        return torch.where(code < 0, -size, size)

    return kernel
