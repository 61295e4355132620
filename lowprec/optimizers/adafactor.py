"""Adafactor: a second moment for each row and column of a matrix in place of one for each weight."""

import math
from typing import NamedTuple

import torch

from ..errors import Refused
from ..formats import Site
from .by_tensor import ByTensor

MOVES_SLOWLY = {
    "bf16": "from step 1,000 on it moves by t^-0.8 of a difference, which needs stochastic rounding"
}
ROW_VAR = Site(
    ("fp32", "bf16"),
    {"fp32": "one number a row of a matrix: hardly any bytes", **MOVES_SLOWLY},
    follows="exp_avg_sq",
)
COL_VAR = Site(
    ("fp32", "bf16"), {"fp32": "one number a column of a matrix", **MOVES_SLOWLY}, follows="exp_avg_sq"
)

EPS = 1e-30, 1e-3  # of squares, of weights


class AdafactorNumbers(NamedTuple):
    """What a step reads."""

    one_minus_beta2: float  # step^beta2_decay
    rate: float
    eps_of_squares: float
    eps_of_weights: float
    clip: float


class Adafactor(ByTensor):
    """Adafactor (arXiv 1804.04235) without momentum: of a matrix the means of g^2 by row and by column.

    A convolution's kernel [out, in, ...] is the matrix [out, rest]; vectors keep all of exp_avg_sq. A step
    is min(lr, 1/sqrt(t)) of the tensor's RMS (at least eps[1]), clipped to an RMS of `clip` before that. So
    a tensor that starts at zero, as the last layer of many diffusion nets, grows slowly at first, and sooner
    with a larger eps[1]. The squares decay by 1 - t^beta2_decay. eps[0] is added to g^2, as the paper has it;
    torch.optim.Adafactor bounds their mean instead, by 1.2e-7, which changes gradients below 3e-4.
    """

    moments = ("row_var", "col_var", "exp_avg_sq")
    sites = {"row_var": ROW_VAR, "col_var": COL_VAR}
    signed = dict.fromkeys(moments, False)
    flags = {"lr": 1e-2}

    def __init__(self, params, lr=1e-2, beta2_decay=-0.8, eps=EPS, clip=1.0, weight_decay=0.0, **writing):
        if isinstance(eps, int | float):
            raise Refused(f"eps={eps:g}: adafactor's is a pair, of squares and of weights, as {EPS}")
        options = dict(lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), clip=clip, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def check_group(self, group):
        super().check_group(group)
        clip, beta2_decay = group["clip"], group["beta2_decay"]
        if clip is None or not clip > 0:
            raise Refused(f"clip={clip}: an update has at most this RMS; math.inf bounds none")
        if beta2_decay is None or not beta2_decay <= 0:
            raise Refused(f"beta2_decay={beta2_decay}: a power of the step, 0 or less, as -0.8")

    def shape(self, p, name):
        if p.dim() < 2:
            return p.shape if name == "exp_avg_sq" else (0,)
        rows = p.shape[0]
        return {"row_var": (rows, 1), "col_var": (1, p.numel() // max(1, rows))}.get(name, (0,))

    def numbers(self, group, step):
        rate = min(float(group["lr"]), step**-0.5)
        return AdafactorNumbers(step ** group["beta2_decay"], rate, *group["eps"], group["clip"])

    def update_tensor(self, g, moments, numbers, held, room):
        size_of_weights = _rms(held()).clamp_min(numbers.eps_of_weights)
        # where the weight lay, which is not asked for again
        squares = torch.square(g, out=room("held", g)).add_(numbers.eps_of_squares)
        new = {}
        if "row_var" in moments:
            squares = squares.flatten(1)  # [out, in, ...] -> [out, rest]
            rows = squares.mean(1, keepdim=True)
            columns = squares.mean(0, keepdim=True)
            new["row_var"] = moments["row_var"].lerp(rows, numbers.one_minus_beta2)
            new["col_var"] = moments["col_var"].lerp(columns, numbers.one_minus_beta2)
            # rows * columns / mean(rows) would be 0 in fp32 for small gradients: a root of each factor
            by_row = (new["row_var"] / new["row_var"].mean()).rsqrt()
            direction = g.flatten(1).mul_(by_row).mul_(new["col_var"].rsqrt()).view_as(g)
        else:
            new["exp_avg_sq"] = moments["exp_avg_sq"].lerp(squares, numbers.one_minus_beta2)
            direction = g.mul_(torch.rsqrt(new["exp_avg_sq"], out=squares))
        excess = (_rms(direction) / numbers.clip).clamp_min(1.0)
        return direction, -(size_of_weights * numbers.rate / excess), new

    def decay(self, p, name):
        if name not in self.moments:
            return math.nan, 0
        step = self.state[p]["step"] + 1
        return 1 - step ** self._group(p)["beta2_decay"], math.inf


def _rms(t):
    return torch.linalg.vector_norm(t) / max(1, t.numel()) ** 0.5
