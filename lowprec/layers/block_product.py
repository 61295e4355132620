"""One product whose operands are rounded in blocks that share a scale: block_formats.py has the formats.

    y = multiply(x, w, dtype, options, key)       # x [M, K], w [K, N], all three products of a training step

Operands are brought to the values of their codes and multiplied in fp32, as kernels sum: they differ in the
order of sums.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..rounding import noise_bits
from .block_formats import BlockFormat

# ---- Plans -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the operands of a layer's products are rounded.

    input, weight, grad: BlockFormats; no input format: weights alone are rounded, as for generation.
    hadamard: 0, or the size of the random rotation of what the weight's gradient sums over (arXiv
    2509.25149). gradients: nearest, stochastic, or eden, for which both operands of both backward products
    are rotated and rounded anew from what forward read (arXiv 2601.22813).
    """

    input: BlockFormat | None
    weight: BlockFormat
    grad: BlockFormat | None = None
    hadamard: int = 0
    gradients: str = "nearest"

    @property
    def multiple(self):
        """What divides inputs and outputs of a weight that can be multiplied so."""
        return max(form.length for form in (self.input, self.weight, self.grad) if form)


# ---- Rotations ---------------------------------------------------------------------------------------------


@functools.cache
def _hadamard(size, device):
    """fp32 [size, size]: Sylvester's Hadamard matrix over the root of its size: its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(x, size, key):
    """fp32: x [M, K] with each `size` rows mixed by a random rotation, whose signs `key` draws.

    M is filled up with zero rows. Of two operands that one key rotates the sum over rows stays what it was.
    """
    x = F.pad(x.float(), (0, 0, 0, -len(x) % size))
    signs = (noise_bits(size, key)[1] & 1) * 2.0 - 1.0
    groups = x.view(-1, size, x.shape[1])
    return torch.matmul(_hadamard(size, x.device) * signs, groups).view(x.shape)


# ---- Products ----------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """x [M, K], w [K, N] -> x w in out_dtype, operands rounded as `plan` says. key: of the noise of this step
    and layer, int32 [3], see rounding.noise_key. counts: None, or float64 [3, 4] that what `BlockFormat.lost`
    finds of input, weight and gradient is added to.
    """

    @staticmethod
    def forward(ctx, x, w, out_dtype, plan, key, counts):
        if counts is not None:
            counts[0] += plan.input.lost(x, 1)
            counts[1] += plan.weight.lost(w, 0)
        low_x = plan.input.rounded(x, 1)
        low_w = plan.weight.rounded(w, 0)
        ctx.plan = plan
        ctx.counts = counts
        ctx.dtypes = (x.dtype, w.dtype)
        of_forward = plan.gradients == "eden"
        square = plan.weight.height > 1  # it rounds alike whichever way a product sums
        ctx.save_for_backward(low_x if of_forward else x, low_w if of_forward or square else w, key)
        return _fp32_product(low_x, low_w).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        plan = ctx.plan
        x, w, key = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        keys = _keys(key, g) if plan.gradients != "nearest" or plan.hadamard else [None] * 5
        if ctx.counts is not None:
            ctx.counts[2] += plan.grad.lost(g, 1)
        backward = _gradients_by_eden if plan.gradients == "eden" else _gradients_rounded
        dx, dw = backward(plan, x, w, g, keys, ctx.needs_input_grad)
        dx = None if dx is None else dx.to(x_dtype)
        dw = None if dw is None else dw.to(w_dtype)
        return dx, dw, None, None, None, None


def _keys(key, g):
    """Five keys of noise, of which no two micro-batches of a step have the same: their gradients differ."""
    of_batch = g[0].float().contiguous().view(torch.int32).sum(dtype=torch.int32)
    numbers = torch.arange(1, 6, dtype=torch.int32, device=key.device) * 0x61C88647
    keys = key.repeat(5, 1)
    keys[:, 1] += of_batch + numbers
    return list(keys)


def _gradients_rounded(plan, x, w, g, keys, needed):
    """(dx, dw) of operands to the nearest, and of gradients stochastically where the plan says so."""
    of_dx, of_dw = keys[:2] if plan.gradients == "stochastic" else (None, None)
    dx = dw = None
    if needed[0]:
        low_w = w if plan.weight.height > 1 else plan.weight.rounded(w, 1)
        dx = _fp32_product(plan.grad.rounded(g, 1, of_dx), low_w.t())
    if needed[1]:
        if plan.hadamard:
            x, g = (rotated(operand, plan.hadamard, keys[2]) for operand in (x, g))
        dw = _fp32_product(plan.input.rounded(x, 0).t(), plan.grad.rounded(g, 0, of_dw))
    return dx, dw


def _gradients_by_eden(plan, x, w, g, keys, needed):
    """(dx, dw): a rotation, and MS-EDEN, of both operands of each product."""
    form = plan.grad.with_eden(plan.hadamard)

    def product(a, b, first, second):
        """a^T b of what sums over rows."""
        a, b = (rotated(operand, plan.hadamard, keys[2]) for operand in (a, b))
        return _fp32_product(form.rounded(a, 0, first).t(), form.rounded(b, 0, second))

    dx = product(g.t(), w.t(), keys[0], keys[3]) if needed[0] else None
    dw = product(x, g, keys[1], keys[4]) if needed[1] else None
    return dx, dw


def _fp32_product(a, b):
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def multiply(x, w, out_dtype, options, key, counts=None):
    """x [M, K] @ w [K, N] in out_dtype, with gradients, as `options` say: their `plan` and `backend`. K and N
    divide by its `multiple`. key, counts: as of Product.
    """
    plan = options.plan
    if plan.input is None:
        return x @ plan.weight.rounded(w, 0).to(w.dtype)
    if options.backend == "torchao":
        return _by_torchao(x, w, plan).to(out_dtype)
    return Product.apply(x, w, out_dtype, plan, key, counts)


# of torchao's rotation. Always these: it keeps a matrix for each vector that it saw
ROTATION_SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, -1, 1)


def _by_torchao(x, w, plan):
    """The same by torchao's kernels, which are for bf16 operands on Blackwell. Their noise is torch's own."""
    rows = F.pad(x, (0, 0, 0, -len(x) % 128)).bfloat16()
    weight = w.t().contiguous().bfloat16()
    if plan.hadamard:
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

        y = nvfp4_linear(rows, weight, sign_vector=ROTATION_SIGNS)
    else:
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference

        y = _to_mxfp8_then_scaled_mm(rows, weight, KernelPreference.AUTO, ScaleCalculationMode.RCEIL)
    return y[: len(x)]
