"""Number formats of products in which a block of values shares a scale: MXFP8, MXFP6, MXFP4, NVFP4 and FP8 in
blocks of 128.

    form = BLOCK_FORMATS["nvfp4"]
    y = form.rounded(x, dim=1, noise=key)         # fp32, what codes and scales stand for

dim is the dimension that a product sums over. No codes are made here: products are emulated, or taken by
libraries that code operands by themselves.

A format is composed of an element (a float of few bits), of how a scale is stored, and of the shape of a
block. Sources: OCP Microscaling Formats 1.0 for MX; arXiv 2509.25149 for NVFP4; arXiv 2412.19437 for blocks
of 128. Values to the nearest are those of torchao 0.18, bit for bit; those of block128 follow
TransformerEngine's rule. Where `noise` asks for stochastic codes, a scale is rounded up, and not to the
nearest: a value above the largest code would be clipped, and the mean over keys would not be x. A new format
is one more row of BLOCK_FORMATS.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from ..kernels.compiled import fused
from ..machine import device_facts
from ..rounding import uniform

# ---- Elements ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Element:
    """A float of 1 sign bit, `exponent` and `mantissa` bits, largest value `top`."""

    name: str
    exponent: int
    mantissa: int
    top: float

    @property
    def least(self):
        """Exponent of the smallest normal value."""
        return 2 - 2 ** (self.exponent - 1)

    def round(self, y, uniform=None):
        """fp32 y [any shape] -> the nearest values, fp32; those beyond the largest become that, NaN stays.

        uniform: None, or numbers in [0, 1) that broadcast, for stochastic values: up where they exceed the
        distance to the next one.
        """
        y = y.clamp(-self.top, self.top)
        biased = ((y.view(torch.int32) >> 23) & 0xFF).clamp(min=self.least + 127)
        gap = ((biased - self.mantissa) << 23).view(torch.float32)  # between neighbours at y
        steps = y / gap
        return (steps.round() if uniform is None else (steps + uniform).floor()) * gap


E5M2 = Element("e5m2", 5, 2, 57344.0)
E4M3 = Element("e4m3", 4, 3, 448.0)
E3M2 = Element("e3m2", 3, 2, 28.0)
E2M3 = Element("e2m3", 2, 3, 7.5)
E2M1 = Element("e2m1", 2, 1, 6.0)
E5M3 = Element("e5m3", 5, 3, 114688.0)  # of scales alone, whose sign bit is not stored

# ---- Scales ------------------------------------------------------------------------------------------------
# A scale's methods. `tensor`: what all blocks of x share, or None. `held`: the scale that a block with
# this amax stores, as numbers. `scaled`: x in units of the element. `value`: what a stored scale stands for.


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    """e8m0: a power of two from 2^-127 to 2^127, or NaN.

    mode: how the scale of a block follows its amax. floor: by the amax's own power of two, so that what is up
    to a seventh (e4m3) or a third (e2m1) beyond the largest code is clipped; ceil: by the next power; up: by
    the smallest that clips nothing, as kernels of Blackwell do.
    """

    mode: str = "floor"
    name = "e8m0"

    def tensor(self, x, element):
        return None

    def held(self, amax, element, tensor, up):
        """int32: exponent + 127; 255 is NaN."""
        mode = "up" if up else self.mode
        bits = (amax / element.top if mode == "up" else amax).view(torch.int32)
        code = (bits >> 23) & 0xFF
        if mode != "up":
            code = code - math.frexp(element.top)[1] + 1
        if mode != "floor":
            subnormal = bits < 0x800000  # 2^-127, the smallest scale, is one: above it the next follows
            code = code + ((bits & 0x7FFFFF) > torch.where(subnormal, 0x400000, 0))
        return torch.where(amax == amax, code.clamp(0, 254), 255)

    def scaled(self, x, held, tensor):
        scale = (held << 23).view(torch.float32)
        if self.mode == "up":  # as kernels have it: a block of zeros is divided by 1
            scale = torch.where(held == 0, 1.0, scale)
        return x / scale.clamp(min=2.0**-126)

    def value(self, held, tensor):
        power = torch.where(held == 0, 2.0**-127, (held << 23).view(torch.float32))
        return torch.where(held == 255, math.nan, power)


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """A small float for each block, and an fp32 number for the tensor that brings the largest of them to
    `largest`. reach: the value that the largest of a block takes, None for the element's top.
    """

    grid: Element
    largest: float
    reach: float | None = None

    @property
    def name(self):
        return self.grid.name

    def tensor(self, x, element):
        least, most = x.aminmax()
        amax = torch.maximum(-least, most).float()
        # torchao has NaN for a tensor of zeros, and TransformerEngine has 1
        return torch.where(amax == 0, 1.0, amax / (self.largest * (self.reach or element.top)))

    def held(self, amax, element, tensor, up):
        """fp32, a value of the grid."""
        wanted = (amax / (self.reach or element.top) / tensor).clamp(min=2.0**self.grid.least)
        return self.grid.round(wanted, 1 - 2.0**-24 if up else None)

    def scaled(self, x, held, tensor):
        return x * ((1.0 / tensor) / held)

    def value(self, held, tensor):
        return tensor * held


@dataclasses.dataclass(frozen=True)
class Full:
    """An fp32 scale a block, or one whose mantissa is cut off: a power of two."""

    power_of_two: bool = False
    name = "fp32"

    def tensor(self, x, element):
        return None

    def held(self, amax, element, tensor, up):
        """fp32: what values are multiplied by; 1 where amax is 0 or no number."""
        top = torch.full_like(amax, element.top)  # torch would divide a number by a tensor in two roundings
        scale = (top / amax).clamp(max=torch.finfo(torch.float32).max)
        scale = torch.where((amax > 0) & (amax < math.inf), scale, 1.0)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        return scale

    def scaled(self, x, held, tensor):
        return x * held

    def value(self, held, tensor):
        return 1.0 / held


# ---- Formats -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """What a format is: `element`s that share a `scale` in blocks of `length` values along the dimension that
    a product sums over, and `height` across it: 1, or as many as `length` for the square blocks of a weight.

    capability: of the NVIDIA GPUs that multiply so, None where torch reaches none. flag: the flags that ask
    for it, without dashes. draws: whether samples can be drawn in it. eden: 0, or how many values share
    EDEN's factor, see `_eden_scales`.
    """

    name: str
    element: Element
    scale: PowerOfTwo | TwoLevels | Full
    length: int
    capability: tuple[int, int] | None
    flag: str
    height: int = 1
    draws: bool = False
    eden: int = 0

    @property
    def why(self):
        """What the ledger says of it."""
        block = f"{self.height} x {self.length}"
        return f"{self.element.name} in blocks of {block}, a scale in {self.scale.name} for each"

    def square(self):
        """The format with blocks as high as they are long: a matrix and its transpose then round alike."""
        return dataclasses.replace(self, height=self.length)

    def with_eden(self, group):
        """The format with MS-EDEN for `group` values that a random rotation has mixed: see `_eden_scales`."""
        scale = TwoLevels(self.scale.grid, EDEN_LARGEST, EDEN_REACH)
        return dataclasses.replace(self, scale=scale, eden=group)

    def native(self, device):
        """Whether the device multiplies operands in this format."""
        kind, capability, _ = device_facts(device)
        return kind == "cuda" and self.capability is not None and capability >= self.capability

    def rounded(self, x, dim, noise=None, compiled=True):
        """fp32 of x's shape, in one fused pass: what codes and scales of x stand for.

        x: any float of 1 dimension or more (2 for square blocks). dim: the dimension along which blocks run;
        sizes that don't divide are filled up with zeros. noise: None for the nearest codes, or a
        `rounding.noise_key` for stochastic ones, whose mean over keys is x.
        """
        rows, filled = self._rows(x, dim)
        compiled = compiled and type(rows) is torch.Tensor  # a compiler that traces this fuses it itself
        y = fused(_rounding_kernel(self), rows, noise, compiled=compiled)
        return _in_shape(self._whole(y, filled), x.shape, dim)

    def lost(self, x, dim):
        """int64 [4] of what nearest codes lose of x: values that become zero, non-zero values, values that
        are clipped, all values. Clipped are those that lie more than half a gap beyond the largest code.
        """
        rows, _ = self._rows(x, dim)
        y, held, tensor = _scaled(self, rows, None)
        exact = self.scale.scaled(rows.float(), held, tensor).abs()
        gap = 2.0 ** (math.frexp(self.element.top)[1] - 1 - self.element.mantissa)
        clipped = exact > self.element.top + gap / 2
        nonzero = rows != 0
        counts = [(nonzero & (y == 0)).sum(), nonzero.sum(), clipped.sum()]
        return torch.stack([*counts, counts[0].new_tensor(x.numel())])

    def _rows(self, x, dim):
        """(x in rows of a block each [blocks, values], its shape when it was filled up, the summed dimension
        last).
        """
        x = x.movedim(dim, -1)
        missing = -x.shape[-1] % self.length
        above = -x.shape[-2] % self.height if self.height > 1 else 0
        if missing or above:
            x = F.pad(x, (0, missing, 0, above)) if above else F.pad(x, (0, missing))
        shape = x.shape
        if self.height > 1:
            x = x.unflatten(1, (-1, self.length)).unflatten(0, (-1, self.height)).transpose(1, 2)
        return x.reshape(-1, self.height * self.length), shape

    def _whole(self, rows, filled):
        """The inverse of `_rows`, still filled up, the summed dimension last."""
        if self.height == 1:
            return rows.view(filled)
        high, long = filled
        squares = rows.view(high // self.height, long // self.length, self.height, self.length)
        return squares.transpose(1, 2).reshape(filled)


def _in_shape(y, shape, dim):
    """y, filled up and with the summed dimension last, as it came: of `shape`, that dimension at `dim`."""
    y = y.movedim(-1, dim)
    for d, size in enumerate(shape):
        y = y.narrow(d, 0, size)
    return y


def _scaled(form, x, key):
    """x [blocks, values] -> (values of the element, fp32 [blocks, values]; scales as held [blocks, 1]; the
    tensor's scale, or None).
    """
    tensor = form.scale.tensor(x, form.element)
    x = x.float()
    amax = x.abs().amax(1, keepdim=True)
    held = form.scale.held(amax, form.element, tensor, up=key is not None and not form.eden)
    y = form.scale.scaled(x, held, tensor)
    if form.eden:
        rounded = form.element.round(y)
        return rounded, _eden_scales(form, y, rounded, held, key), tensor
    return form.element.round(y, _uniform(x.shape, key)), held, tensor


def _uniform(shape, key):
    """fp32 in [0, 1), or None without a key."""
    if key is None:
        return None
    return uniform(shape, key)


@functools.cache
def _rounding_kernel(form):
    def kernel(x, key):
        y, held, tensor = _scaled(form, x, key)
        return y * form.scale.value(held, tensor)

    return kernel


# ---- MS-EDEN -----------------------------------------------------------------------------------------------
# Quartet II, arXiv 2601.22813: largest scale and largest value are chosen for the least error, with room for
# the factor
EDEN_LARGEST = 256.0
EDEN_REACH = 6.0 / (17 / 16 * 0.93)


def _eden_scales(form, y, rounded, held, key):
    """The scales of blocks that a factor makes unbiased: <y, y> / <y, rounded> of each `form.eden` values,
    which a random rotation has mixed. The values stay the nearest; the scales are written stochastically.

    y, rounded: [blocks, values]; held: [blocks, 1]. A last group may be shorter.
    """
    blocks_a_group = form.eden // form.length
    missing = -len(y) % blocks_a_group
    products = torch.stack([(y * y).sum(1), (y * rounded).sum(1)])  # [2, blocks]
    exact, found = F.pad(products, (0, missing)).view(2, -1, blocks_a_group).sum(2)
    factor = torch.where(found == 0, 1.0, exact / found)  # [groups]
    factor = factor[:, None].expand(-1, blocks_a_group).reshape(-1, 1)[: len(y)]
    return form.scale.grid.round(held * factor, _uniform(held.shape, key))


# ---- The table ---------------------------------------------------------------------------------------------

HOPPER, BLACKWELL = (9, 0), (10, 0)


def _mx(name, element, flag, mode="floor", draws=False):
    return BlockFormat(name, element, PowerOfTwo(mode), 32, BLACKWELL, flag, draws=draws)


_ROWS_OF_FORMATS = (
    _mx("mxfp8", E4M3, "fp8_recipe mxfp8", mode="up", draws=True),
    _mx("mxfp8_e5m2", E5M2, "fp8_recipe mxfp8 --fp8_format e5m2", mode="up"),
    _mx("mxfp6_e3m2", E3M2, ""),
    _mx("mxfp6_e2m3", E2M3, ""),
    BlockFormat("nvfp4", E2M1, TwoLevels(E4M3, 448.0), 16, BLACKWELL, "fp4 nvfp4", draws=True),
    _mx("mxfp4", E2M1, "fp4 mxfp4", draws=True),
    # nvfp4 with scales of a wider range, as in a prototype of TransformerEngine (its pull request 3325)
    BlockFormat("nvfp4_ue5m3", E2M1, TwoLevels(E5M3, E5M3.top), 16, None, "fp4 nvfp4_ue5m3"),
    BlockFormat("block128", E4M3, Full(power_of_two=True), 128, HOPPER, "fp8_recipe block128"),
    BlockFormat("block128_fp32", E4M3, Full(), 128, HOPPER, "fp8_recipe block128_fp32"),
)
BLOCK_FORMATS = {row.name: row for row in _ROWS_OF_FORMATS}


def asked_by(flag):
    """Names of the formats that --flag NAME asks for."""
    return tuple(name for name, form in BLOCK_FORMATS.items() if form.flag == f"{flag} {name}")
