"""Muon: orthogonalised momentum for the matrices of hidden layers."""

import dataclasses
import math
import sys
import warnings
from typing import NamedTuple

import torch
from torch import nn

from ..errors import Refused, check_choice
from ..formats import Site
from ..kernels import cpu_products
from ..roles import CONVOLUTIONS, role, roles
from ..rounding import DTYPE_OF_NAME
from .by_tensor import ByTensor, Rooms
from .sgd import MOMENTUM

ORTHOGONALISE = Site(
    ("fp32", "bf16"),
    {
        "fp32": "Newton-Schulz in full precision",
        "bf16": "Newton-Schulz as published: singular values end between 0.7 and 1.2 in either",
    },
    follows="compute",
)


FOUR_BITS = (  # experiments/083-muon-in-4-bits; the 7 to 20 % are of somebody else's net
    "Muon with its momentum in 4 bits ended 0.9 to 1.3 % above fp32's held-out loss on a small GPT, and 7 to "
    "20 % in a trial on another net; in int8 0.1 to 0.2 %: hold it in int8 or bf16"
)
MOMENTUM_OF_MUON = dataclasses.replace(MOMENTUM, warn={"int4": FOUR_BITS, "log4": FOUR_BITS})


class MuonNumbers(NamedTuple):
    """What a step reads."""

    momentum: float
    nesterov: bool
    lr: float
    kernel_dims: int  # dimensions from which on a parameter is the kernel of a convolution


class Muon(ByTensor):
    """Muon (Keller Jordan 2024): the momentum of a matrix, its singular values brought near 1.

    For matrices of hidden layers. A parameter of 3 dimensions, as the experts of a mixture, is a stack of
    matrices, each stepped as if it were alone. A convolution's kernel [out, in, ...] is the matrix
    [out, rest]: a parameter of 4 dimensions and more. A group with kernels=True has kernels of 3 dimensions
    too, one with kernels=False has none. The other parameters belong to AdamW, see `divided_groups`. Defaults
    are those of torch.optim.Muon but for adjust.
    orthogonalise: the dtype of the Newton-Schulz iteration, "fp32" or "bf16", as published.
    adjust: "match_rms_adamw" (arXiv 2502.16982) makes steps as long as AdamW's, so that one learning rate
    serves both; "original", which is torch's, multiplies by sqrt(max(1, rows / columns)).
    """

    moments = ("momentum",)
    sites = {"momentum": MOMENTUM_OF_MUON, "orthogonalise": ORTHOGONALISE}
    others = "adamw"

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.1,
        orthogonalise="fp32",
        adjust="match_rms_adamw",
        **writing,
    ):
        check_choice("orthogonalise", orthogonalise, ORTHOGONALISE.values)
        check_choice("adjust", adjust, FACTOR_OF_ADJUST)
        self.dtype = DTYPE_OF_NAME[orthogonalise]
        self.adjust = adjust
        options = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, options, **writing)
        if self.kinds["momentum"] in MOMENTUM_OF_MUON.warn:
            warnings.warn(FOUR_BITS, stacklevel=2)

    def add_param_group(self, param_group):
        params = param_group["params"]
        if isinstance(params, set):
            super().add_param_group(param_group)  # which refuses what has no order, as torch does
        params = [params] if torch.is_tensor(params) else list(params)
        for p in params:
            p = p[1] if isinstance(p, tuple) else p  # (name, parameter)
            if torch.is_tensor(p) and p.dim() < 2:
                what = "Muon takes matrices and kernels of convolutions, and here is a vector"
                remedy = "give biases, norms, embeddings and heads to AdamW (optimizers.build does)"
                raise Refused(f"{what}: {remedy}")
            if torch.is_tensor(p) and self.dtype == torch.bfloat16:
                cpu_products.settle_products(p.device)
        param_group = {**param_group, "params": params}
        super().add_param_group(param_group)

    def check_group(self, group):
        super().check_group(group)
        theirs = group.get("adjust_lr_fn", self.adjust) or "original"
        if theirs != self.adjust:
            raise Refused(f"steps of torch's Muon are adjusted as {theirs!r}: make Muon(adjust={theirs!r})")

    def numbers(self, group, step):
        kernel_dims = {None: 4, True: 3, False: sys.maxsize}[group.get("kernels")]
        return MuonNumbers(group["momentum"], bool(group["nesterov"]), float(group["lr"]), kernel_dims)

    def update_tensor(self, g, moments, numbers, held, room):
        m = torch.lerp(moments["momentum"], g, 1 - numbers.momentum, out=room("momentum", g))
        mean = g.lerp_(m, numbers.momentum) if numbers.nesterov else m
        if g.dim() == 2 or g.dim() >= numbers.kernel_dims:
            matrices = mean.flatten(1)[None]  # [out, in, ...] -> [1, out, rest]
        else:
            matrices = mean.flatten(0, -3)  # [..., rows, columns] -> [stack, rows, columns]
        if len(matrices) == 1:
            direction = orthogonalised(matrices[0], self.dtype, room=room).float()
        else:
            direction = room("stack", matrices)
            for matrix, place in zip(matrices, direction, strict=True):
                place.copy_(orthogonalised(matrix, self.dtype, room=room))
        rate = -numbers.lr * FACTOR_OF_ADJUST[self.adjust](*matrices.shape[1:])
        return direction.reshape(g.shape), rate, {"momentum": m}

    def decay(self, p, name):
        known = name in self.moments
        return (self._group(p)["momentum"], math.inf) if known else (math.nan, 0)


FACTOR_OF_ADJUST = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}


def orthogonalised(matrix, dtype, room=None):
    """A matrix [m, n] with the singular vectors of this one and singular values between 0.7 and 1.2, by five
    quintic Newton-Schulz iterations of Muon in `dtype`, which the result has. room: by_tensor.Rooms, in which
    the result may lie.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    room = Rooms() if room is None else room
    x = room("x", matrix, dtype=dtype).copy_(matrix)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=1e-7))  # so that no singular value is above 1
    square = x.size(0), x.size(0)
    for at in range(5):
        gram = torch.mm(x, x.T, out=room("gram", matrix, square, dtype))
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c, out=room("factor", matrix, square, dtype))
        x = torch.addmm(x, factor, x, beta=a, out=room(f"x {at % 2}", matrix, x.shape, dtype))
    return x.T if tall else x


def hidden_matrices(net):
    """The set of the parameters that Muon takes: matrices, stacks and kernels of the layers between the first
    and the last. Not embeddings, heads and norms, as `roles.roles` and names say, nor the first convolution.
    """
    role_of = roles(net)
    stacks = stacks_of(net)
    found, tables = set(), set()
    is_first = True  # convolution
    for name, module in net.named_modules():
        convolution = isinstance(module, CONVOLUTIONS)
        for own, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                tables.add(p)
            full = f"{name}.{own}".removeprefix(".")
            apart = {"norm", "embedding", "head"} & (role_of[name] | role(full, module))
            if convolution and is_first and p.dim() > 1:
                is_first = False
            elif (p in stacks or _matrix(p, convolution)) and not apart:
                found.add(p)
    return found - tables  # a head that is tied to an embedding among them


def stacks_of(net):
    """The set of a net's parameters that are stacks of matrices, as the experts of a mixture."""
    kernels = {p for m in net.modules() if isinstance(m, CONVOLUTIONS) for p in m.parameters()}
    return {p for p in net.parameters() if p.dim() == 3 and min(p.shape) > 1 and p not in kernels}


def _matrix(p, convolution):
    """Whether p has rows and columns: a vector that is laid out as a matrix has none."""
    return (p.dim() == 2 or convolution and p.dim() > 2) and min(p.flatten(1).shape) > 1
