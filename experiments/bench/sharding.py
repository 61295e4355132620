"""What each of several GPUs holds of a net that `train.py --fsdp` spreads over them, from shapes alone.

    python bench.py sharding --ranks 2      # beside what real processes allocate: a DiT-S/8, a minute

What is held and what is gathered are told in lowprec/ledger.py; `train.py --fsdp --dry_run` says them of any
run. Activations are neither, see `bench.py memory`.
"""

import json
import tempfile
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.common import (
    BYTES_A_GIB,
    Command,
    Flag,
    built_net,
    check_nets,
    nets_flag,
    parse_net,
)
from benchmarks.records import of_record
from harness.printing import markdown_table
from lowprec.advice import footprint
from lowprec.optimizers import buckets
from lowprec.parts.activations import recomputed_blocks
from lowprec.parts.ranks import WORLDS_SHOWN, gathered_at_once, held_by_rank, spread_over_ranks
from lowprec.precision import Precision, recipe
from models import DiT

SHARDED_NETS = {  # depth, width, heads; patch 2 on 32x32 latents of 4 channels, 1,000 classes
    "DiT-XL/2": (28, 1152, 16),
    "DiT, 1 B": (28, 1408, 16),
    "DiT, 7 B": (42, 3072, 24),
}
SHARDED_RECIPES = {
    "(none)": {},
    "`--pure_bf16 --master split`": dict(pure_bf16=True, master="split"),
    "`--pure_bf16 --stochastic`": dict(pure_bf16=True, stochastic=True),
    "`--pure_bf16 --stochastic --opt8bit`": dict(pure_bf16=True, stochastic=True, opt8bit=True),
    "`--pure_bf16 --stochastic --opt4bit`": dict(pure_bf16=True, stochastic=True, opt4bit=True),
}

# ---- By arithmetic -----------------------------------------------------------------------------------------


def arithmetic_rows(nets=SHARDED_NETS):
    """[[net, flags, gathered, held on 1, on 8, on 64 GPUs]], in GiB."""
    found = []
    for (name, (depth, width, heads)), (flags, options) in product(nets.items(), SHARDED_RECIPES.items()):
        with torch.device("meta"):
            net = DiT(4, 1000, 32, 2, depth, width, heads)
        run = Precision(net, recipe(**options))
        sizes = [gathered_at_once(run, recomputed_blocks(net))]
        sizes += [sum(held_by_rank(run, world).values()) for world in WORLDS_SHOWN]
        found.append([name, flags, *(f"{size / BYTES_A_GIB:.1f}" for size in sizes)])
    return found


def table():
    """The rows in Markdown."""
    heads = ["net", "flags", "gathered"]
    for world in WORLDS_SHOWN:
        heads.append("1 GPU" if world == 1 else f"{world} GPUs")
    return markdown_table([heads, *arithmetic_rows()])


# ---- Measured ----------------------------------------------------------------------------------------------


def check(args):
    check_nets(args.nets)


def measured(args, clock):
    """Rows (dicts): net, flags, rank, ranks, bytes held, and said by arithmetic; gloo, on the CPU."""
    cases = list(product(args.nets, SHARDED_RECIPES))
    with tempfile.TemporaryDirectory() as folder:
        words = (args.ranks, args.threads or 1, cases, folder)
        mp.set_forkserver_preload([__name__])  # the libraries are imported once for all of them
        mp.start_processes(of_a_process, words, nprocs=args.ranks, start_method="forkserver")
        by_rank = [json.loads(rank_file(rank, folder).read_text()) for rank in range(args.ranks)]
    rows = []
    for of_all_ranks in zip(*by_rank, strict=True):
        rows += of_all_ranks
    print(measured_table(rows))
    return rows


def rank_file(rank, folder):
    return Path(folder, f"{rank}.json")


def of_a_process(rank, ranks, threads, cases, folder):
    """Write the rows of a rank. cases: [(net, flags)]."""
    torch.set_num_threads(threads)
    meeting_point = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", meeting_point, rank=rank, world_size=ranks)
    rows = []
    for net, flags in tqdm(cases, unit="recipe", disable=True if rank else None):
        sizes = held_and_said_of_net(parse_net(net), recipe(**SHARDED_RECIPES[flags]), ranks)
        rows.append(dict(net=net, flags=flags, rank=rank, ranks=ranks, **sizes))
    rank_file(rank, folder).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def held_and_said_of_net(net, r, ranks):
    """held_and_said of a net of --nets in a recipe."""
    torch.manual_seed(0)
    whole = built_net(net)
    spread = built_net(net)
    spread = spread_over_ranks(spread, r, torch.device("cpu"), recomputed_blocks(spread))
    _, _, side, batch = net
    x = torch.randn(batch, 3, side, side)
    inputs = x, torch.linspace(0, 999, batch), torch.arange(batch) % 10
    return held_and_said(Precision(spread, r), whole, inputs, x, ranks)


def held_and_said(spread, whole, inputs, target, ranks):
    """{held: bytes of what this process holds after a backward pass; said: by `python -m lowprec advise`}.

    spread: Precision over a net on all ranks; whole: the same net, on this rank alone.
    """
    spread.backward(F.mse_loss(spread(*inputs), target))
    said = footprint.held_by_gpu(whole, spread.recipe, ranks)
    return dict(held=bytes_of_process(spread), said=said.total - said.gathered)


def bytes_of_process(run):
    """Of weights, buffers, gradients, states and average: what this process holds of a spread Precision."""
    tensors = [*run.ema.shadow.values(), *run.model.buffers()]
    tensors += [p for p in run.model.parameters() if not p.requires_grad]
    for p in run.params:
        tensors += [buckets.local_tensor(p), buckets.local_tensor(p.grad)]
        tensors += [t for name, t in run.optimizer.state[p].items() if name != "step"]
    return sum(t.nbytes for t in tensors)


def measured_table(rows):
    """Markdown: a line a net and recipe, of its first rank, which holds the most."""
    heads = ["net", "flags", f"one of {rows[0]['ranks']} holds, MiB", "by arithmetic", "bytes off"]
    lines = []
    for row in rows:
        if row["rank"] == 0:
            off = round(row["held"] - row["said"])
            sizes = [f"{row['held'] / 2**20:.1f}", f"{row['said'] / 2**20:.1f}"]
            lines.append([row["net"], row["flags"], *sizes, str(off)])
    return markdown_table([heads, *lines])


TABLES = {
    "docs/many_gpus.md": {"sharded": table, "sharding": of_record(measured_table, "cpu-sharding")},
}

COMMAND = Command(
    "sharding",
    "bytes of each process under --fsdp, as allocated and by arithmetic",
    measured,
    flags=(nets_flag("dit:S/8:64:2"), Flag("--ranks", 2, "processes, on the CPU")),
    check=check,
    cpu_only=True,
)
