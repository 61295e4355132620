"""What each of several GPUs holds of a net that `train.py --fsdp` spreads over them, from shapes alone.

    python bench_sharding.py                # the table in the README: seconds, no memory, no GPU

What is held and what is gathered are told in ledger.py; `train.py --fsdp --dry_run` says them of any run.
Activations are neither, see `bench.py memory`. tests/test_fsdp.py compares "held" with what real ranks
allocate.
"""

import torch

from activations import blocks
from ledger import WORLDS, gathered, held
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
GIB = 1 << 30


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
