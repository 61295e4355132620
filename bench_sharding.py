"""What each of several GPUs holds of a net that `train.py --fsdp` spreads over them, from shapes alone.

    python bench_sharding.py                # the table in the README: seconds, no memory, no GPU

Held are the first rank's rows, which are the most, of weights, gradients, states and the average, as
`--dry_run` counts them for one process. Gathered is what a block needs whole for a moment: its weights and
the next one's, which are fetched ahead, its gradients, and the weights that are in no block. Activations are
neither, see `bench.py memory`. tests/test_fsdp.py compares "held" with what real ranks allocate.
"""

import torch

from activations import blocks
from models import DiT
from precision import Precision, recipe

NETS = {  # depth, width, heads; patch 2 on 32x32 latents of 4 channels, 1,000 classes
    "DiT-XL/2": (28, 1152, 16),
    "DiT, 1 B": (28, 1408, 16),
    "DiT, 7 B": (42, 3072, 24),
}
RECIPES = {
    "(none)": {},
    "`--pure_bf16 --master split`": dict(pure_bf16=True, master="split"),
    "`--pure_bf16 --stochastic`": dict(pure_bf16=True, stochastic=True),
    "`--pure_bf16 --stochastic --opt8bit`": dict(pure_bf16=True, stochastic=True, opt8bit=True),
    "`--pure_bf16 --stochastic --opt4bit`": dict(pure_bf16=True, stochastic=True, opt4bit=True),
}
WORLDS = (1, 8, 64)
GIB = 1 << 30


def held(run, world):
    """Bytes that the first of `world` ranks holds of a Precision `run`, which may be on the meta device."""
    total, average = 0.0, sum(average.dtype.itemsize for average in run.averages.values())
    for p in run.params:
        rows = p.shape[0] if p.dim() else 1
        share = -(-rows // world) / max(1, rows)
        states = sum(t.nbytes for name, t in run.optimizer.state[p].items() if name != "step")
        total += share * (2 * p.nbytes + states + average * p.numel())
    return total


def gathered(run, parts):
    """Bytes of whole weights and gradients that are there at once, at most. parts: the blocks."""
    compute = 2 if run.recipe.compute in ("bf16", "fp16") else 4
    sizes = [sum(p.numel() for p in block.parameters()) for block in parts]
    rest = sum(p.numel() for p in run.params) - sum(sizes)
    return compute * (3 * max(sizes, default=0) + rest)


def rows(nets=NETS):
    """[[net, flags, gathered, held on 1, on 8, on 64 GPUs]], in GiB."""
    found = []
    for name, (depth, width, heads) in nets.items():
        for flags, options in RECIPES.items():
            with torch.device("meta"):
                net = DiT(4, 1000, 32, 2, depth, width, heads)
            run = Precision(net, recipe(**options))
            sizes = [gathered(run, blocks(net)), *(held(run, world) for world in WORLDS)]
            found.append([name, flags, *(f"{size / GIB:.1f}" for size in sizes)])
    return found


def table():
    """The rows in Markdown."""
    head = ["net", "flags", "gathered", *(f"{world} GPU{'s' * (world > 1)}" for world in WORLDS)]
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows())]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    print(table())
