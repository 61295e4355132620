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

import precision

SMALLEST = 4096  # values; both libraries keep the moments of smaller tensors in full


def broken_line(table):
    """fp32 [S, 3]: how codes rise with the value, from a table's zero upward (from its first value if it has none): a row (value, code, codes a
    unit of value) for each stretch of equal gaps. Between codes it is linear; both libraries' tables take 1 to 15 rows."""
    table = table[table >= 0].double()
    gaps = table.diff()
    starts = [0] + [i for i in range(1, len(gaps)) if abs(gaps[i] / gaps[i - 1] - 1) > 1e-4]
    ends = starts[1:] + [len(gaps)]
    return torch.tensor([[table[a], a, (b - a) / (table[b] - table[a])] for a, b in zip(starts, ends)], dtype=torch.float32)


def stochastic_codes(x, table, line, key, signed):
    """fp32 [blocks, width] -> (codes int32 alike, scales fp32 [blocks]) such that the mean of table[code] * scale over keys is x.

    table: sorted fp32 code values; line: its `broken_line`. A signed table ends at 1 on one side only (-0.993 or -0.8875 on the other): the scale is chosen so that
    both sides of the block fit, where the libraries clip. One value is not unbiased: exp_avg_sq between 0 and the smallest positive code
    takes that code, since a zero under the root would make a step of exp_avg / eps.
    """
    scale = x.amax(1)
    if signed:
        scale = torch.maximum(scale, x.amin(1) / table[0])
    y = torch.where(scale[:, None] == 0, 0.0, x / scale[:, None])
    # where on the line |y| lies, by comparison with each stretch: reading tables is the one thing that torch.compile can't vectorise here
    code = torch.zeros_like(y)
    for value, first, rise in line.unbind(0):
        code = torch.where(y.abs() >= value, first + (y.abs() - value) * rise, code)
    uniform = (precision.noise_bits(x.numel(), key)[0].view(x.shape) & 0xFFFFFF).float() * 2.0**-24
    whole = code.floor()
    code = (whole + (code - whole > uniform)).int()
    if signed:  # the negative side mirrors the positive one
        zero = table.numel() // 2 - 1
        code = torch.where(y < 0, zero - code, zero + code)
    else:
        code = torch.where((y > 0) & (code == 0) & (table[0] == 0), 1, code)
    return code.clamp(0, table.numel() - 1), scale  # a quotient may lie an ulp beyond the table


@functools.cache
def _stochastic_kernel(signed):
    def kernel(x, codes, scale, table, line, key):
        new, new_scale = stochastic_codes(x, table, line, key, signed)
        codes.copy_(new if codes.shape == x.shape else _packed(new))
        scale.copy_(new_scale)

    return kernel


def _packed(codes):
    return codes[..., ::2] << 4 | codes[..., 1::2]  # two to a byte, in the order of torchao's OptimState4bit


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
        return self.table(signed, torch.device("cpu")).nbytes + stochastic * self.line(signed, torch.device("cpu")).nbytes

    def table(self, signed, device):
        """fp32 [2^bits], sorted: what each code stands for, times its block's scale."""
        if (signed, device) not in self.tables:
            self.tables[signed, device] = self.values(signed).to(device)
        return self.tables[signed, device]

    def line(self, signed, device):
        """The `broken_line` of the table."""
        if ("line", signed, device) not in self.tables:
            self.tables["line", signed, device] = broken_line(self.values(signed)).to(device)
        return self.tables["line", signed, device]

    def store(self, x, codes, scale, signed, key, run):
        """Write fp32 x [n] into codes and scales in place: to the nearest code, or stochastically under `key` (see `precision.noise_key`).

        run(kernel, *args) calls a kernel, compiled or not."""
        table = self.table(signed, x.device)
        if key is None:
            return self.nearest(x, codes, scale, table, run)
        kernel, line = _stochastic_kernel(signed), self.line(signed, x.device)
        whole = x.numel() // self.block
        n = whole * self.block
        if whole:
            run(kernel, x[:n].view(whole, -1), codes[: n * self.bits // 8].view(whole, -1), scale[:whole], table, line, key)
        if n < x.numel():  # a last, shorter block; its noise begins where that of the others ends
            run(kernel, x[n:][None], codes[n * self.bits // 8 :][None], scale[whole:], table, line, key + key.new_tensor([0, 0, n]))


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
