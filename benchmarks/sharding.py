"""What each of several GPUs holds of a net that `train.py --fsdp` spreads over them, from shapes alone.

    python -m benchmarks.sharding                # the table in the README: seconds, no memory, no GPU
    python bench.py sharding --ranks 2      # beside what real processes allocate: a DiT-S/8, a minute

What is held and what is gathered are told in ledger.py; `train.py --fsdp --dry_run` says them of any run.
Activations are neither, see `bench.py memory`. tests/harness/test_fsdp.py makes the same comparison for a
small net.
"""

import json
import socket
import tempfile
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.common import built, parse_net
from lowprec import fsdp
from lowprec.activations import blocks
from lowprec.ledger import WORLDS, gathered, held
from lowprec.optimizers import buckets
from lowprec.precision import Precision, recipe
from models import DiT

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


# ---- Measured ----------------------------------------------------------------------------------------------


def measured(args, clock):
    """Rows of `bench.py sharding`: {net, flags, rank, ranks, held, said}, bytes; gloo, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        words = (args.ranks, port, args.threads or 1, list(product(args.nets, RECIPES)), out)
        mp.spawn(of_a_process, words, nprocs=args.ranks)
        rows = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(args.ranks)]
    rows = [row for turn in zip(*rows, strict=True) for row in turn]
    print(measured_table(rows))
    return rows


def of_a_process(rank, ranks, port, threads, cases, out):
    """Write the rows of a rank. cases: [(net, flags)]."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    rows = []
    for net, flags in tqdm(cases, unit="recipe", disable=True if rank else None):
        sizes = allocated(parse_net(net), recipe(**RECIPES[flags]), ranks)
        rows.append(dict(net=net, flags=flags, rank=rank, ranks=ranks, **sizes))
    Path(out, f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def allocated(net, r, ranks):
    """{held: bytes of what this process holds of a spread net after a backward pass; said: by `held`}."""
    torch.manual_seed(0)
    said = held(Precision(built(net), r), ranks)
    whole = built(net)
    run = Precision(fsdp.spread(whole, r, torch.device("cpu"), blocks(whole)), r)
    _, _, side, batch = net
    x = torch.randn(batch, 3, side, side)
    run.backward(F.mse_loss(run(x, torch.linspace(0, 999, batch), torch.arange(batch) % 10), x))
    return dict(held=bytes_of(run), said=said)


def bytes_of(run):
    """Of the weights, gradients, states and average that this process holds of a spread Precision."""
    own = [t for p in run.params for t in (buckets.local(p), buckets.local(p.grad))]
    own += [t for p in run.params for name, t in run.optimizer.state[p].items() if name != "step"]
    return sum(t.nbytes for t in [*own, *run.ema.shadow.values()])


def measured_table(rows):
    """Markdown: a line a net and recipe, of its first rank, which holds the most."""
    ranks = rows[0]["ranks"]
    head = f"| net | flags | one of {ranks} holds, MiB | by arithmetic | bytes off |"
    lines = [head, "|---" * 5 + "|"]
    for row in rows:
        if row["rank"] == 0:
            sizes = " | ".join(f"{row[name] / 2**20:.1f}" for name in ("held", "said"))
            off = round(row["held"] - row["said"])
            lines.append(f"| {row['net']} | {row['flags']} | {sizes} | {off} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
