"""What a kernel of AdamW's step must do as the torch code does it, for the tests of each such kernel."""

import itertools

import torch
from common import draw

from lowprec import rounding
from lowprec.kernels import compiled
from lowprec.optimizers import rounded
from lowprec.optimizers.rounded import AdamW
from lowprec.rounding import way_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOWS = ("none", "remainder", "compensation", "master")
CASES = [
    (weights, moments, low, update)
    for weights, moments, low, update in itertools.product(DTYPES, DTYPES, LOWS, ("nearest", "stochastic"))
    if weights == "bf16" or low == "none"
]
AVERAGES = (("fp32", False), ("bf16", False), ("bf16", True))  # dtype, stochastic
N = 1300  # two blocks of a kernel, and part of a block of codes


def flat(case):
    """(p, g, [m, v], [low part] or []) of a case, with what rounding must leave alone among them."""
    weights, moments, low, _ = case
    p, g = draw(N, seed=1).to(DTYPES[weights]), draw(N, seed=2, scale=0.01).to(DTYPES[weights])
    m = draw(N, seed=3, scale=0.01).to(DTYPES[moments])
    v = draw(N, seed=4, scale=0.01).square().to(DTYPES[moments])
    p[0], p[1], g[2], g[3] = float("inf"), float("nan"), float("inf"), float("nan")
    g[4] = m[4] = v[4] = 0
    g[5], v[5], m[6] = 1e-30, 0, 1e-39  # squares to 0; a denormal
    lows = {
        "none": [],
        "remainder": [draw(N, seed=5, scale=9000).to(torch.int16)],
        "compensation": [draw(N, seed=5, scale=1e-3).bfloat16()],
        "master": [p.float() + draw(N, seed=5, scale=1e-4)],
    }
    return p, g, [m, v], lows[low]


def step(case, kernel):
    """[tensor] after kernel(p, g, moments, low, row, numbers, key, optimizer)."""
    p, g, moments, low = flat(case)
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.1, update=case[3])
    numbers = optimizer.numbers(optimizer.param_groups[0], 7)
    row = torch.tensor([1 - 1e-4, 0.5, *numbers])
    kernel(p, g, moments, low, row, numbers, rounding.noise_key(3, 7, 12345), optimizer)
    return [p, *moments, *low]


def generic(p, g, moments, low, row, numbers, key, optimizer):
    kernel = rounded.step_kernel(optimizer.direction, type(numbers), way_of(*low))
    compiled.fused(kernel, p, g, moments, low, row, key, optimizer.by_noise)


def differing(ours, theirs):
    """Entries that differ in value, NaN being equal to NaN."""
    pairs = zip(ours, theirs, strict=True)
    return sum(int(((a != b) & ~((a != a) & (b != b))).sum()) for a, b in pairs)
