"""The two products within attention in FP8, queries by keys and probabilities by values: attention=fp8.

    self.attend = Attend()                 # in a net's __init__; lowprec.attention
    y = self.attend(q, k, v)               # as F.scaled_dot_product_attention

Operands are e4m3 and gradients e5m2, each tensor scaled by its own amax. The softmax between the products is
fp32. torch has no kernel for it: the same 8-bit operands are multiplied in fp32 on any machine.
"""

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..attention import Attend
from ..errors import Refused
from ..formats import FORMATS
from ..parts.part import Method
from .fp8_product import amax_of, current_scale, decode_fp8

ATTENTION_OPERANDS = "input", "probability", "grad"  # input: queries, keys and values
ATTENTION_INPUT, ATTENTION_PROBABILITY, ATTENTION_GRAD = range(3)


def _rounded_operand(x, form, counts, operand):
    """(fp32 values that the codes of x [..., M, N] stand for, inverse scale [1, 1]). counts: float64 [3, 2],
    to which the magnitude that became zero and all of it are added, or None.
    """
    scale = current_scale(amax_of(x.flatten(0, -2)), form.top)
    values = decode_fp8(form.cast(x, scale).contiguous())
    if counts is not None:
        size = x.abs().double()
        counts[operand] += torch.stack([size[values == 0].sum(), size.sum()])
    return values, scale.reciprocal()


class _AttentionProduct(torch.autograd.Function):
    """fp32 a [..., M, K] @ b [..., K, N], and both products of its backward pass, of FP8 operands."""

    @staticmethod
    def forward(ctx, a, b, kind, counts):
        form = FORMATS["e4m3"]
        a, a_inverse = _rounded_operand(a, form, counts, kind)
        b, b_inverse = _rounded_operand(b, form, counts, ATTENTION_INPUT)
        ctx.save_for_backward(a, a_inverse, b, b_inverse)
        ctx.counts = counts
        return (a @ b) * (a_inverse * b_inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        a, a_inverse, b, b_inverse = ctx.saved_tensors
        g, g_inverse = _rounded_operand(g, FORMATS["e5m2"], ctx.counts, ATTENTION_GRAD)
        da = (g @ b.transpose(-1, -2)) * (g_inverse * b_inverse)
        db = (a.transpose(-1, -2) @ g) * (g_inverse * a_inverse)
        return da, db, None, None


def attend_in_fp8(q, k, v, counts=None, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """As F.scaled_dot_product_attention, without grouped heads: q [..., N, d], k, v [..., M, d] -> as q."""
    with torch.autocast(q.device.type, enabled=False):
        scores = _AttentionProduct.apply(q.float(), k.float().transpose(-1, -2), ATTENTION_INPUT, counts)
        scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        share = F.dropout(scores.softmax(-1), dropout_p) if dropout_p else scores.softmax(-1)
        return _AttentionProduct.apply(share, v.float(), ATTENTION_PROBABILITY, counts).to(q.dtype)


class FP8Attention(Method):
    """The attentions of a model that are an `Attend`, in FP8. Raises Refused where none is."""

    generates = "fp8"

    def __init__(self, model):
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, Attend)}
        self.counts = None
        self.device = next(model.parameters()).device
        if not self.layers:
            raise Refused(
                "attention=fp8: no attention of this net is a lowprec.attention.Attend(), whose products can "
                "be taken in FP8; put one in place of F.scaled_dot_product_attention, or drop it"
            )

    @classmethod
    def of(cls, run):
        return cls(run.model)

    def convert(self, model):
        self.switch(True)

    def switch(self, on):
        for layer in self.layers.values():
            layer.by = attend_in_fp8 if on else None
        self.on = on

    def observe(self, on):
        self.counts = None
        if on:
            self.counts = torch.zeros(3, 2, dtype=torch.float64, device=self.device)
        for layer in self.layers.values():
            layer.counts = self.counts

    def after_step(self):
        """attention_underflow_<operand>: share of the magnitude of an operand that casts made zero."""
        if self.counts is None:
            return {}
        found = {}
        for name, (zeroed, everything) in zip(ATTENTION_OPERANDS, self.counts.tolist(), strict=True):
            found[f"attention_underflow_{name}"] = zeroed / max(everything, 1e-300)
        return found

    def rows(self, parameters, generation_dtype):
        count = len(self.layers)
        why = f"both products of {count} attentions in e4m3, their gradients in e5m2; emulated"
        return {"attention": {"why": why}}
