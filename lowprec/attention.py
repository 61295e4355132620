"""Attention by the kernel that is fast on the device at hand.

    x = attend(q, k, v, is_causal=True)     # as F.scaled_dot_product_attention
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# tokens up to which a CPU runs plain attention in bf16 faster than the flash kernel, whose backward pass
# takes 12 ms there where the plain one takes 0.7 (torch 2.14, batch 64, 4 heads, 16 tokens), 41 where that
# takes 10 (batch 16, 4 heads, 128 tokens), and as long as the plain one at 256
PLAIN_UP_TO_TOKENS = 128


def attend(q, k, v, **options):
    """F.scaled_dot_product_attention. q [B, heads, N, d], k and v [B, heads, M, d], of one dtype
    -> [B, heads, N, d]. options: of torch's function, as is_causal.
    """
    with attention_kernel(q.device, q.dtype, k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, **options)


class Attend(nn.Module):
    """`attend` as a part of a net, so that a recipe may take its products otherwise (site attention). It has
    no weights and no state. by: what is called in place of `attend`, with `counts`, or None.
    """

    by = None
    counts = None

    def forward(self, q, k, v, **options):
        """As `attend`."""
        if self.by is None:
            return attend(q, k, v, **options)
        return self.by(q, k, v, self.counts, **options)


def attention_kernel(device, dtype, tokens):
    """A context with the kernel for `tokens` keys in `dtype`. Both kernels sum in fp32. Enter it around each
    attention and not around a whole net, so that activation checkpointing recomputes with the same kernel.
    """
    plain = device.type == "cpu" and dtype == torch.bfloat16 and tokens <= PLAIN_UP_TO_TOKENS
    return sdpa_kernel(SDPBackend.MATH) if plain else nullcontext()
