"""Number formats of 8 and 4 bits: one object a format, for the operands of a product and for an optimiser's
moments.

    FORMATS["e4m3"].cast(x, scale)                    # an operand: x * scale in 8 bits, see fp8.py
    codes, scales = FORMATS["int8"].new(n, device)    # a moment: n zeros, in blocks with one fp32 scale each
    FORMATS["int8"].encode(x, codes, scales, signed=True, key=None)
    FORMATS["int8"].decode(codes, scales, n, signed=True)

e4m3 and e5m2 are the 8-bit floats of arXiv 2209.05433. int8 is bitsandbytes' dynamic map in blocks of 256
(arXiv 2110.02861), int4 torchao's 4-bit maps in blocks of 128 (arXiv 2309.01507), log4 the same with powers
of two for second moments, flash8 the curves of FlashOptim in blocks of 32 (arXiv 2602.23349). As in the first
two libraries, tensors under 4,096 values stay fp32. A moment of any length can be coded: its last block is
shorter.

Codes are written to the nearest, or stochastically: exp_avg_sq decays by 0.1 % a step, and codes lie 0.7 % to
56 % apart, so that to the nearest it may stand still. A new format is one more row of FORMATS.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from . import curves, float8, kernels
from .kernels.compiled import fused
from .machine import fp8_cores, quiet_import
from .rounding import uniform


class Format:
    """What a format is: `bits` a value, `block` values to a scale when moments are held in it.

    The codes of n values take ceil(n * bits / 8) bytes, their scales ceil(n / block) fp32 numbers.
    """

    name, bits, block = "", 8, 256
    smallest = 4096  # values of a moment that is coded; both libraries keep smaller ones in fp32
    mantissa = 0  # bits of it, of an 8-bit float
    why = ""  # what the ledger says of it
    gap = ""  # half of the distance between two codes, as a share of the value
    flag = ""  # the flag that asks for it, without dashes; "" where --set alone does
    lowest = 0.0  # second moment, as a share of its block's largest, below which there is no code but 0
    remedy = "--set exp_avg_sq=fp32, or --beta2 0.99"  # where a second moment in it loses too much

    def __getstate__(self):  # a copy, or a pickle, finds its library and kernels by itself
        return {name: value for name, value in vars(self).items() if name not in ("library", "kernels")}

    def require(self):
        """Raises Refused where a package that the format needs is not installed."""

    def native(self, device):
        """Whether the device multiplies operands in this format."""
        return False

    def stayed(self, n):
        """Whether checkpoints of format 1 hold it in fp32 although it is coded now."""
        return False

    def sizes(self, n):
        """(bytes of the codes, number of scales) of n values."""
        return math.ceil(n * self.bits / 8), math.ceil(n / self.block)

    def new(self, n, device):
        """n zeros: (codes uint8, scales fp32)."""
        codes, scales = self.sizes(n)
        zeros = functools.partial(torch.zeros, device=device)
        return zeros(codes, dtype=torch.uint8), zeros(scales, dtype=torch.float32)

    def table_bytes(self, signed, stochastic):
        """Bytes of the tables that all moments of one kind share."""
        return 0

    def operand(self, codes, scales, signed, key):
        """Codes and scales as hand-written kernels read and write them, a kernels.Operand; None where none
        does: the nearest codes are the libraries' own.
        """
        return

    def encode(self, x, codes, scales, signed, key=None, compiled=True):
        """Write fp32 x [n] into codes and scales, in place.

        key: None for the nearest code, or a `rounding.noise_key` for a stochastic one, whose mean over keys
        is x. signed: whether x may be negative. One value is not unbiased: an unsigned one between 0 and the
        smallest positive code takes that code, since a zero under the root of exp_avg_sq would make a step of
        exp_avg / eps.

        A NaN or an infinity leaves the other entries of its block as they would be beside a zero. In the
        8-bit floats it becomes NaN; in a table, which has none, zero or the nearest to that: the weight it
        belongs to is no number by then. The nearest int8 codes are bitsandbytes' own: there an infinity
        reaches all of its block.
        """
        n = x.numel()
        whole = n // self.block
        cut = whole * self.block
        if whole:
            rows, own = x[:cut].view(whole, self.block), codes[: cut * self.bits // 8].view(whole, -1)
            self._encode_rows(rows, own, scales[:whole], signed, key, compiled)
        if cut < n:  # a last, shorter block, filled up with zeros; its noise goes on where the others' ends
            rest = F.pad(x[cut:], (0, self.block - (n - cut)))[None]
            last = torch.empty(1, self.block * self.bits // 8, dtype=torch.uint8, device=x.device)
            if key is not None:
                key = key.clone()
                key[2] += cut  # in place: a tensor made of the number would be a copy that a GPU waits for
            self._encode_rows(rest, last, scales[whole:], signed, key, compiled)
            codes[cut * self.bits // 8 :] = last[0, : codes.numel() - cut * self.bits // 8]

    def decode(self, codes, scales, n, signed, compiled=True):
        """fp32 [n] that codes and scales stand for."""
        whole = scales.numel() * self.block * self.bits // 8
        padded = F.pad(codes, (0, whole - codes.numel())) if whole > codes.numel() else codes
        rows = self._decode_rows(padded.view(scales.numel(), -1), scales, signed, compiled)
        return rows.view(-1)[:n]

    def _encode_rows(self, x, codes, scales, signed, key, compiled):
        """fp32 x [blocks, block] -> codes uint8 [blocks, block * bits / 8] and scales [blocks], in place."""
        raise NotImplementedError

    def _decode_rows(self, codes, scales, signed, compiled):
        """fp32 [blocks, block]."""
        raise NotImplementedError


def finite(x):
    """x [any shape], fp32, with zeros for NaN and infinities: one of them would become its block's scale."""
    return torch.where(x.abs() < math.inf, x, 0.0)


# ---- 8-bit floats ------------------------------------------------------------------------------------------


class Float8(Format):
    """A float of 8 bits: `mantissa` bits, smallest normal exponent `least`, largest value `top`."""

    def __init__(self, name, dtype, mantissa, least, gap):
        self.name, self.dtype, self.mantissa, self.least = name, dtype, mantissa, least
        self.gap = gap
        self.top = torch.finfo(dtype).max
        self.why = f"8-bit floats ({name}) in blocks of {self.block}"

    def native(self, device):
        return fp8_cores(device)

    def cast(self, x, scale):
        """x * scale in this format, to nearest, values beyond its largest becoming that one; NaN stays.

        x: any float; scale: fp32 that broadcasts. The product is fp32: in bf16 it would be rounded twice. The
        clamp is needed, since torch's own cast to e5m2 overflows to infinity.
        """
        return (x.float() * scale).clamp_(-self.top, self.top).to(self.dtype)

    def values(self, codes):
        """fp32, exactly: what codes in this dtype stand for. By table on a CPU, where torch's own conversion
        takes 2 to 15 times as long.
        """
        if codes.device.type != "cpu":
            return codes.float()
        if not codes.is_contiguous():
            turned = codes.t()
            return self.values(turned).t() if turned.is_contiguous() else self.values(codes.contiguous())
        table = _float8_values(self.dtype)
        return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)

    def operand(self, codes, scales, signed, key):
        if key is None:
            return None
        told = dict(signed=signed, mantissa=self.mantissa, scales=scales, key=key)
        return kernels.Operand(codes, self.bits, self.block, **told)

    def _encode_rows(self, x, codes, scales, signed, key, compiled):
        fused(float8.float8_encoder(self, signed), x, codes, scales, key, compiled=compiled)

    def _decode_rows(self, codes, scales, signed, compiled):
        if compiled and codes.is_cpu:  # no table, which torch.compile could not vectorise
            return fused(float8.float8_decoder(self), codes, scales)
        return self.values(codes.view(self.dtype)) * scales[:, None]


@functools.cache
def _float8_values(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


# ---- Tables ------------------------------------------------------------------------------------------------


def broken_line(table):
    """fp32 [S, 3]: how codes rise with the value, from a table's zero upward (from its first value if it has
    none).

    A row (value, code, codes a unit of value) for each stretch of equal gaps; between codes it is linear.
    Both libraries' tables take 1 to 15 rows.
    """
    table = table[table >= 0].double()
    gaps = table.diff()
    starts = [0] + [i for i in range(1, len(gaps)) if abs(gaps[i] / gaps[i - 1] - 1) > 1e-4]
    ends = starts[1:] + [len(gaps)]
    rows = [(table[a], a, (b - a) / (table[b] - table[a])) for a, b in zip(starts, ends, strict=True)]
    return torch.tensor(rows, dtype=torch.float32)


def stochastic_codes(x, table, line, key, signed):
    """fp32 [blocks, width] -> (codes int32 alike, scales fp32 [blocks]); the mean of table[code] * scale over
    keys is x.

    table: sorted fp32 code values; line: its `broken_line`. A signed table ends at 1 on one side only (-0.993
    or -0.8875 on the other): the scale is chosen so that both sides of the block fit, where the libraries
    clip.
    """
    known = finite(x)
    scale = known.amax(1)
    if signed:
        scale = torch.maximum(scale, known.amin(1) / table[0])
    y = torch.where(scale[:, None] == 0, 0.0, x / scale[:, None]) - (x - x)  # NaN takes the code of zero
    # where on the line |y| lies, by comparison with each stretch: reading tables is the one thing that
    # torch.compile can't vectorise here
    code = torch.zeros_like(y)
    for value, first, rise in line.unbind(0):
        code = torch.where(y.abs() >= value, first + (y.abs() - value) * rise, code)
    whole = code.floor()
    code = (whole + (code - whole > uniform(x.shape, key))).int()
    if signed:  # the negative side mirrors the positive one
        zero = table.numel() // 2 - 1
        code = torch.where(y < 0, zero - code, zero + code)
    else:
        code = torch.where((y > 0) & (code == 0) & (table[0] == 0), 1, code)
    return code.clamp(0, table.numel() - 1), scale  # a quotient may lie an ulp beyond the table


@functools.cache
def _stochastic_kernel(signed):
    def kernel(x, codes, scales, table, line, key):
        new, new_scales = stochastic_codes(x, table, line, key, signed)
        codes.copy_(new if codes.shape == x.shape else _packed(new))
        scales.copy_(new_scales)

    return kernel


def _packed(codes):
    return codes[..., ::2] << 4 | codes[..., 1::2]  # two to a byte, in the order of torchao's OptimState4bit


class TableFormat(Format):
    """Codes that are places in a sorted table of values, as a library publishes it. package: its module, the
    flag that needs it, and what pip installs.
    """

    package: tuple[str, str, str]

    def __init__(self):
        self.tables = {}

    @functools.cached_property
    def library(self):
        return quiet_import(*self.package)

    def require(self):
        return self.library

    def table(self, signed, device):
        """fp32 [2^bits], sorted: what each code stands for, times its block's scale."""
        if (signed, device) not in self.tables:
            self.tables[signed, device] = self._published(signed).to(device)
        return self.tables[signed, device]

    def line(self, signed, device):
        """The `broken_line` of the table."""
        if ("line", signed, device) not in self.tables:
            self.tables["line", signed, device] = broken_line(self._published(signed)).to(device)
        return self.tables["line", signed, device]

    def operand(self, codes, scales, signed, key):
        if key is None:
            return None
        table, line = self.table(signed, codes.device), self.line(signed, codes.device)
        told = dict(signed=signed, scales=scales, table=table, line=line, key=key)
        return kernels.Operand(codes, self.bits, self.block, **told)

    def table_bytes(self, signed, stochastic):
        cpu = torch.device("cpu")
        return self.table(signed, cpu).nbytes + (self.line(signed, cpu).nbytes if stochastic else 0)

    def _encode_rows(self, x, codes, scales, signed, key, compiled):
        if key is None:
            self._nearest(x, codes, scales, self.table(signed, x.device), compiled)
        else:
            kernels.encode(_stochastic_kernel(signed), self, x, codes, scales, signed, key, compiled)


class Int8(TableFormat):
    """bitsandbytes' blockwise 8-bit states."""

    name, bits, block = "int8", 8, 256
    why = "8-bit codes in blocks of 256, format of bitsandbytes"
    gap = "0.2 % and more"
    flag = "opt8bit"
    remedy = "--stochastic"
    package = "bitsandbytes.functional", "--opt8bit", "bitsandbytes"

    def _published(self, signed):
        return self.library.create_dynamic_map(signed=signed)

    def _nearest(self, x, codes, scales, table, compiled):
        flat = codes.view(-1)
        size = self.block
        self.library.quantize_blockwise(x.reshape(-1), code=table, absmax=scales, out=flat, blocksize=size)

    def _decode_rows(self, codes, scales, signed, compiled):
        table = self.table(signed, codes.device)
        flat = codes.reshape(-1)
        return self.library.dequantize_blockwise(flat, absmax=scales, code=table, blocksize=self.block)


class Int4(TableFormat):
    """torchao's 4-bit states, two codes to a byte. Its unsigned map has no value below 1/16 of the block's
    largest.
    """

    name, bits, block = "int4", 4, 128
    why = "4-bit codes in blocks of 128, format of torchao"
    gap = "3 % to 50 %"
    lowest = 1 / 16
    flag = "opt4bit"
    remedy = "--stochastic --opt8bit"
    package = "torchao.optim.subclass_4bit", "--opt4bit", "torchao"

    def stayed(self, n):
        return n % self.block != 0

    def _published(self, signed):
        values = self.library.get_qmap_signed() if signed else self.library.get_qmap_unsigned()
        return torch.tensor(values, dtype=torch.float32)

    @functools.cached_property
    def kernels(self):  # one function object each, so that each is compiled once
        library, block = self.library, self.block

        def load(codes, scales, table):
            pairs = torch.stack([codes >> 4, codes & 15], dim=-1)
            return library.dequant_with_qmap(pairs, table, scales).view(-1)

        def nearest(x, codes, scales, table):
            scaled, new_scales = library.scale_tensor(finite(x), block)
            codes.copy_(_packed(library.quantize_4bit_with_qmap(scaled, table)))
            scales.copy_(new_scales)

        return load, nearest

    def _nearest(self, x, codes, scales, table, compiled):
        fused(self.kernels[1], x.reshape(-1), codes.view(-1), scales, table, compiled=compiled)

    def _decode_rows(self, codes, scales, signed, compiled):
        table = self.table(signed, codes.device)
        return fused(self.kernels[0], codes.reshape(-1), scales, table, compiled=compiled)


class Log4(Int4):
    """As Int4, but a second moment goes by powers of two. Its step is by the root of that: torchao's map has
    no code for gradients below a quarter of a block's largest, this one reaches down to 1/181.
    """

    name = "log4"
    why = "4-bit codes in blocks of 128: exp_avg as torchao has it, exp_avg_sq in powers of two"
    gap = "25 % to 50 %"
    lowest = 2.0**-15
    flag = ""

    def _published(self, signed):
        if signed:
            return super()._published(signed)
        return torch.exp2(torch.arange(-15.0, 1.0, dtype=torch.float32))


# ---- Curves ------------------------------------------------------------------------------------------------


class Curved(Format):
    """FlashOptim's 8-bit states, see curves.py. The scales are fp32 here, of the moment itself: in fp16, as
    published, the root of a second moment below 4e-15 would have none.
    """

    name, block = "flash8", 32
    why = "8-bit codes in blocks of 32 on the curves of FlashOptim: softsign for exp_avg, root for exp_avg_sq"
    gap = "0.4 % and more"
    remedy = "--stochastic"

    def _encode_rows(self, x, codes, scales, signed, key, compiled):
        fused(curves.curve_encoder(signed), x, codes, scales, key, compiled=compiled)

    def _decode_rows(self, codes, scales, signed, compiled):
        return fused(curves.curve_decoder(signed), codes, scales, compiled=compiled)


FORMATS = {
    "e4m3": Float8("e4m3", torch.float8_e4m3fn, mantissa=3, least=-6, gap="3 % to 6 %"),
    "e5m2": Float8("e5m2", torch.float8_e5m2, mantissa=2, least=-14, gap="6 % to 12 %"),
    "int8": Int8(),
    "int4": Int4(),
    "log4": Log4(),
    "flash8": Curved(),
}
CODE_FORMATS = {name: form.why for name, form in FORMATS.items()}

# ---- Sites -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """One kind of tensor. values: what it may be held in or how it may be written, the default first.

    why: {value: the reason that the ledger prints}. warn: {value: what a recipe with that value loses}.
    follows: the site of SITES whose value it takes where nothing is said; "" for its own default.
    """

    values: tuple[str, ...]
    why: dict[str, str] = dataclasses.field(default_factory=dict)
    warn: dict[str, str] = dataclasses.field(default_factory=dict)
    follows: str = ""
