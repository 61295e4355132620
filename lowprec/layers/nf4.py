"""Frozen linear layers held in NF4, 4.5 bits a weight (QLoRA, arXiv 2305.14314): the site frozen=nf4.

    run = Precision(net, recipe(pure_bf16=True, stochastic=True, sites=["frozen=nf4"]), lora=8)

A weight is one of 16 quantiles of a normal distribution times the largest of its block of 64. It is decoded
for each product, and again in the backward pass, so that no decoded copy is kept.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Refused
from ..parts.part import Method
from ..roles import roles
from .swap import swapped

WEIGHTS_A_SCALE = 64
SMALLEST_LAYER = 4096  # weights of a layer, below which it stays as it is


@functools.cache
def nf4_values():
    """fp32 [16], sorted: 0, eight quantiles above it and seven below; the largest is 1 (appendix E)."""
    # the mean of 1 - 1/32 and 1 - 1/30: no quantile is infinite
    highest = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(highest, 0.5, 9, dtype=torch.float64))[:-1]
    below = -torch.special.ndtri(torch.linspace(highest, 0.5, 8, dtype=torch.float64))[:-1]
    values = torch.cat([above, below, torch.zeros(1, dtype=torch.float64)]).sort().values
    return (values / values.max()).float()


def encode_nf4(w):
    """(codes uint8 [n / 2], scales fp32 [n / 64]) of a weight of n values, the last block filled up."""
    flat = F.pad(w.detach().float().flatten(), (0, -w.numel() % WEIGHTS_A_SCALE)).view(-1, WEIGHTS_A_SCALE)
    scales = flat.abs().amax(1)
    shares = flat / scales.clamp(min=1e-30)[:, None]
    values = nf4_values().to(w.device)
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2).to(torch.uint8).flatten()
    return codes[::2] << 4 | codes[1::2], scales


def decode_nf4(codes, scales, shape):
    """fp32 of a shape."""
    pairs = torch.stack([codes >> 4, codes & 15], 1).flatten().int()
    values = (
        nf4_values().to(codes.device).index_select(0, pairs).view(-1, WEIGHTS_A_SCALE)
        * scales.float()[:, None]
    )
    return values.flatten()[: shape.numel()].view(shape)


class _NF4Product(torch.autograd.Function):
    """x [..., in] -> x by the decoded weight [out, in], in the dtype of x."""

    @staticmethod
    def forward(ctx, x, codes, scales, shape):
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return x @ decode_nf4(codes, scales, shape).to(x.dtype).t()

    @staticmethod
    def backward(ctx, g):
        return g @ decode_nf4(*ctx.saved_tensors, ctx.shape).to(g.dtype), None, None, None


class NF4Linear(nn.Module):
    """A frozen nn.Linear whose weight is held in NF4; its bias stays as it is."""

    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.out_features, self.in_features = self.shape
        codes, scales = encode_nf4(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    @property
    def weight(self):
        """Decoded, fp32: for code of a net that asks for its dtype, as T5's does."""
        return decode_nf4(self.codes, self.scales, self.shape)

    def forward(self, x):
        """x [..., in] -> [..., out], in autocast's dtype or that of x."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y = _NF4Product.apply(x, self.codes, self.scales, self.shape)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class NF4Base(Method):
    """The frozen nn.Linear of `model` in NF4, in place. Raises Refused where there is none."""

    def __init__(self, model):
        role_of = roles(model)
        taken = {module for name, module in model.named_modules() if takes_nf4(module, role_of[name])}
        named = model.named_modules(remove_duplicate=False)  # a layer may have several names
        self.layers = [name for name, module in named if module in taken]
        if not self.layers:
            raise Refused(
                f"frozen=nf4: this net has no frozen nn.Linear of {SMALLEST_LAYER:,} weights or more; train "
                "adapters (--lora 8), freeze some, or drop it"
            )

    @classmethod
    def of(cls, run):
        return cls(run.model)

    def convert(self, model):
        new = {linear: NF4Linear(linear) for linear in set(map(model.get_submodule, self.layers))}
        swapped(model, new)
        self.shapes = {name: model.get_submodule(name).shape for name in self.layers}
        self.bytes = sum(module.codes.nbytes + module.scales.nbytes for module in new.values())

    def values(self, values):
        """The decoded weights under their own names."""
        found = dict(values)
        for name, shape in self.shapes.items():
            codes, scales = found.pop(f"{name}.codes"), found.pop(f"{name}.scales")
            found[f"{name}.weight"] = decode_nf4(codes, scales, shape)
        return found

    def rows(self, parameters, generation_dtype):
        count = sum(shape.numel() for shape in self.shapes.values())
        why = f"{count:,} weights of {len(self.layers)} linear layers take {self.bytes / 2**20:.1f} MiB"
        return {"frozen": {"value": "nf4", "why": why}}


def takes_nf4(module, its_roles):
    """Whether a layer is held in NF4."""
    if type(module) is not nn.Linear or its_roles & {"embedding", "head"}:
        return False
    return not any(p.requires_grad for p in module.parameters()) and module.weight.numel() >= SMALLEST_LAYER
