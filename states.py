"""Optimiser moments in 8 and 4 bits: codes in blocks with one fp32 scale each. precision.py loads this file when a recipe asks for it.

    python train.py --pure_bf16 --stochastic --opt8bit     weights, gradients and moments in 6.03 bytes a parameter of a large net (fp32: 16)
    python train.py --pure_bf16 --stochastic --opt4bit     in 5.06
    python bench.py memory                                 what every combination takes
    python bench.py moments                                what rounding does to exp_avg_sq

The formats are the libraries': int8 is bitsandbytes' dynamic map in blocks of 256 (arXiv 2110.02861), int4 torchao's 4-bit maps in blocks of
128 (arXiv 2309.01507); as there, tensors under 4,096 values stay fp32. `precision.AdamW` dequantises both moments, steps in fp32, writes
the weight by its own rounding, and stores the moments again: to the nearest code by the library's own function, or stochastically.

Why stochastically: neighbouring codes lie 0.7 % to 56 % of the value apart (int8, down to 1e-4 of the block's largest), and exp_avg_sq decays
by 1-beta2 = 0.1 % a step. Where some gradients of a block drop and others don't, the block's scale stays, the decay of the dropped ones
rounds back to the old code, and their exp_avg_sq freezes at its old height: their steps are too short from then on. A code that goes up
with probability = distance decays on average. The price is noise: an exp_avg_sq far below its block's largest spreads by some tens of
percent around the exact one.
"""

import functools
import math

import torch
import torch.nn.functional as F

import precision

SMALLEST = 4096  # values; both libraries keep the moments of smaller tensors in full


OCTAVES, PER_OCTAVE = 32, 128  # buckets of |y| in 2^-32 to 1: the exponent and the 7 upper bits of the mantissa. All below is the first bucket


def _bucket(y, signed):
    """int32 index of each fp32 y in -1 to 1, 0 to 4,095; of a negative one in a signed table, 4,096 to 8,191."""
    bits = y.view(torch.int32)
    index = (((bits & 0x7FFFFFFF) >> 16) - (127 - OCTAVES) * PER_OCTAVE).clamp(0, OCTAVES * PER_OCTAVE - 1)
    return torch.where(bits < 0, index + OCTAVES * PER_OCTAVE, index) if signed else index


def lookup(table, signed):
    """uint8 [4096 or 8192]: for each bucket the code at or under its smallest value, the first code if there is none.

    A bucket is narrower than the gaps of both libraries' tables, so a value of it lies above this code or above the next, no further."""
    size = OCTAVES * PER_OCTAVE
    magnitude = ((torch.arange(size + 1, dtype=torch.int32) + (127 - OCTAVES) * PER_OCTAVE) << 16).view(torch.float32)
    low = magnitude[:-1].clone()
    low[0] = 0
    if signed:  # a negative bucket ends, exclusively, at the next larger magnitude
        low = torch.cat([low, torch.nextafter(-magnitude[1:], torch.tensor(1.0))])
    return (torch.searchsorted(table, low, right=True) - 1).clamp(0, table.numel() - 2).to(torch.uint8)


def stochastic_codes(x, table, start, block, key, signed):
    """fp32 [n] -> (codes int32 [n], scales fp32 [ceil(n / block)]) such that the mean of table[code] * scale over keys is x.

    table: sorted fp32 code values; start: its `lookup`. A signed table ends at 1 on one side only (-0.993 or -0.8875 on the other): the scale is chosen so that
    both sides of the block fit, where the libraries clip. One value is not unbiased: exp_avg_sq between 0 and the smallest positive code
    takes that code, since a zero under the root would make a step of exp_avg / eps.
    """
    n = x.numel()
    blocks = (F.pad(x, (0, -n % block)) if n % block else x).view(-1, block)
    scale = blocks.amax(1)
    if signed:
        scale = torch.maximum(scale, blocks.amin(1) / table[0])
    y = torch.where(scale[:, None] == 0, 0.0, blocks / scale[:, None]).view(-1)[:n]
    low = start[_bucket(y, signed)].int()
    low = torch.where(y >= table[low + 1], low + 1, low).clamp(max=table.numel() - 2)  # a binary search takes twice as long
    uniform = (precision.noise_bits(n, key)[0] & 0xFFFFFF).float() * 2.0**-24
    codes = low + (y - table[low] > uniform * (table[low + 1] - table[low]))
    return codes if signed else torch.where((y > 0) & (table[codes] == 0), codes + 1, codes), scale


@functools.cache
def _stochastic_kernel(block, signed):
    # a function for each block size: as an argument torch.compile would take it for a variable, and the step three times as long
    def kernel(x, codes, scale, table, start, key):
        new, new_scale = stochastic_codes(x, table, start, block, key, signed)
        codes.copy_(new if codes.numel() == x.numel() else _packed(new))
        scale.copy_(new_scale)

    return kernel


def _packed(codes):
    return codes[::2] << 4 | codes[1::2]  # two to a byte, in the order of torchao's OptimState4bit


class Coder:
    """One format of codes: `bits` a value, `block` values to a scale. Its table of values is made once for a device."""

    def __init__(self):
        self.tables = {}

    def takes(self, n):
        """Whether the moment of a tensor of n values is coded; else it stays fp32."""
        return n >= SMALLEST

    def new(self, n, device):
        """n zeros: (codes uint8 [n * bits / 8], scales fp32 [ceil(n / block)])."""
        return torch.zeros(n * self.bits // 8, dtype=torch.uint8, device=device), torch.zeros(math.ceil(n / self.block), device=device)

    def table_bytes(self, signed, stochastic):
        """What the tables of one moment take; all tensors share them."""
        return 4 * 2**self.bits + stochastic * (1 + signed) * OCTAVES * PER_OCTAVE

    def table(self, signed, device):
        """fp32 [2^bits], sorted: what each code stands for, times its block's scale."""
        if (signed, device) not in self.tables:
            self.tables[signed, device] = self.values(signed).to(device)
        return self.tables[signed, device]

    def start(self, signed, device):
        """The `lookup` of the table."""
        if ("start", signed, device) not in self.tables:
            self.tables["start", signed, device] = lookup(self.values(signed), signed).to(device)
        return self.tables["start", signed, device]

    def store(self, x, codes, scale, signed, key, run):
        """Write fp32 x [n] into codes and scales in place: to the nearest code, or stochastically under `key` (see `precision.noise_key`).

        run(kernel, *args) calls a kernel, compiled or not."""
        table = self.table(signed, x.device)
        if key is None:
            self.nearest(x, codes, scale, table, run)
        else:
            run(_stochastic_kernel(self.block, signed), x, codes, scale, table, self.start(signed, x.device), key)


class Int8(Coder):
    """bitsandbytes' blockwise 8-bit states. Raises precision.RecipeError where it is not installed."""

    bits, block = 8, 256

    def __init__(self):
        super().__init__()
        self.library = precision._import_peer("bitsandbytes.functional", "--opt8bit", "bitsandbytes")

    def values(self, signed):
        return self.library.create_dynamic_map(signed=signed)

    def load(self, codes, scale, signed, run):
        """fp32 [n] that codes and scales stand for."""
        return self.library.dequantize_blockwise(codes, absmax=scale, code=self.table(signed, codes.device), blocksize=self.block)

    def nearest(self, x, codes, scale, table, run):
        self.library.quantize_blockwise(x, code=table, absmax=scale, out=codes, blocksize=self.block)


class Int4(Coder):
    """torchao's 4-bit states, two codes to a byte. Its unsigned map has no value below 1/16 of the block's largest. Raises
    precision.RecipeError where it is not installed."""

    bits, block = 4, 128

    def __init__(self):
        super().__init__()
        self.library = precision._import_peer("torchao.optim.subclass_4bit", "--opt4bit", "torchao")
        self.load_kernel, self.nearest_kernel = _torchao_kernels(self.library)

    def takes(self, n):
        return n >= SMALLEST and n % self.block == 0  # torchao's rule too

    def values(self, signed):
        return torch.tensor(self.library.get_qmap_signed() if signed else self.library.get_qmap_unsigned())

    def load(self, codes, scale, signed, run):
        """fp32 [n] that codes and scales stand for."""
        return run(self.load_kernel, codes, scale, self.table(signed, codes.device))

    def nearest(self, x, codes, scale, table, run):
        run(self.nearest_kernel, x, codes, scale, table)


@functools.cache  # one function object each, so that each is compiled once
def _torchao_kernels(library):
    def load_kernel(codes, scale, table):
        return library.dequant_with_qmap(torch.stack([codes >> 4, codes & 15], dim=-1), table, scale).view(-1)

    def nearest_kernel(x, codes, scale, table):
        scaled, new_scale = library.scale_tensor(x, Int4.block)
        codes.copy_(_packed(library.quantize_4bit_with_qmap(scaled, table)))
        scale.copy_(new_scale)

    return load_kernel, nearest_kernel


CODERS = {"int8": Int8, "int4": Int4}
