"""The small net of fsdp_jobs.py, its runs in a recipe, and what ranks tell each other."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RECIPES, draw
from torch import nn

from lowprec.cast import exact_modules
from lowprec.parts.ranks import spread_over_ranks
from lowprec.parts.spread import part_of, whole_tensor
from lowprec.precision import Precision, recipe

STEPS = 3
MORE = {
    "norm island": dict(pure_bf16=True, stochastic=True, sites=["islands=norm", "accumulate=fp32"]),
    "sgd": RECIPES["stochastic"],
    "lion": RECIPES["stochastic opt8bit"],
}
OPTIONS = {
    "norm island": dict(accumulate=2),
    "sgd": dict(optimizer="sgd"),
    "lion": dict(optimizer="lion"),
}


class Net(nn.Module):
    """[B, 6] -> [B, 3]: rows that 4 ranks can't share evenly, blocks of codes that rows cut, a frozen weight,
    a tied one.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 70)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(70, 70), nn.LayerNorm(70)) for _ in range(2)])
        self.wide = nn.Linear(70, 130, bias=False)
        self.last = nn.Linear(130, 3)
        self.tied = nn.Linear(130, 3)
        self.tied.weight = self.last.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        h = F.silu(self.first(x))
        for block in self.blocks:
            h = h + block(h)
        h = F.silu(self.wide(h))
        return (self.last(h) + self.tied(h)) * self.frozen[0]


def build():
    torch.manual_seed(0)
    return Net()


def batch(step):
    x = draw(8, 6, seed=step)
    return x, x[:, :3].sin()


def start(name, spread, flags=None, device="cpu", **options):
    """A run of a recipe; spread over all ranks by its owner, as torch's own pages show, or on each rank."""
    net, r = build().to(device), recipe(**({**RECIPES, **MORE}[name] if flags is None else flags))
    if spread:
        islands, _ = exact_modules(net, r) if r.low_weights else ((), ())
        net = spread_over_ranks(net, r, torch.device(device), net.blocks, islands)
    return Precision(net, r, lr=1e-2, weight_decay=0.1, ema_decay=0.9, blank=build, **options)


def train(run, first=0, last=STEPS, measure=False):
    for step in range(first, last):
        for _ in range(run.options.accumulate):
            x, y = (t.to(run.params[0].device) for t in batch(step))
            run.backward(F.mse_loss(run(x), y))
        report = run.step(measure=measure)
    return report


def found(run):
    """{name: tensor} of all that a run holds, whole; on the first rank."""
    values = {f"raw/{k}": t for k, t in run.weights("raw").items()}
    values.update((f"ema/{k}", t) for k, t in run.weights("ema").items())
    for name, p in run.named_params:
        part = part_of(p)
        low = run.low_part(p)
        parts = {m: run.optimizer.moment(p, m) for m in run.optimizer.moments}
        parts.update({} if low is None else {"low": low.reshape(-1)})
        for kind, t in parts.items():
            if t is not None:
                rows = t if part is None else t.view(part.rows)
                values[f"{kind}/{name}"] = whole_tensor(rows, part).reshape(p.shape)
    return {name: t.clone() for name, t in values.items()}


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def differing(a, b):
    """Names of tensors that differ in a bit."""
    names = sorted(a.keys() | b.keys())
    return [n for n in names if n not in a or n not in b or not torch.equal(bits(a[n]), bits(b[n]))]


def told(file, content):
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(content))


def meet(device="cpu"):
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
