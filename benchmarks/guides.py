"""bench.py guides: statements of guides on low precision that a CPU can test in a few minutes.

    python bench.py guides --threads 1 --out experiments/bench/cpu-guides.json

docs/claims.md has the statements. Predictions, written before the first run, and committed after one of a
single step, which tells `bare` and `attention` whole:
loading: data of this size lie in memory. The default run waits for them in under 3 % of a step without
    workers, and two workers save less than that.
casting: under autocast an input that was cast to bf16 by hand costs a step less than 5 %, either way.
bare: BDH holds under 1 % of its parameters in nn.Linear, which is all that a 4-bit linear layer replaces; a
    GPT over 80 %.
attention: products of queries, keys and values are under 10 % of the FLOPs of a DiT-XL/2 on latents of
    32x32, so FP8 at twice the speed there gains under 5 % of a step. In FP8 (e4m3) their output keeps 25 to
    35 dB, in bf16 over 45 dB.
drawing: the held-out loss of a finished U-Net rises by under 0.1 % with weights in 8-bit integers, 0.5 to 5 %
    in 4-bit integers and 0.3 to 4 % in 4-bit floats (e2m1), in blocks of 16 with an fp32 scale each.
divergence: at 300 times its rate AdamW in pure bf16 ends its steps with a loss above that of its start, or
    with none. Clipping at 1, which guides advise, does not mend that, since AdamW divides by the gradient's
    size; the usual rate does.
"""

import itertools
import math
import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.common import Clock, Command, markdown, parse_net, prepared, timed, training_step
from benchmarks.fp16_weights import Training, Way
from harness.batches import end_workers
from harness.flags import natural
from lowprec.kernels import cpu_products
from lowprec.layers.flops import module_flops
from trainer import Trainer

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 16


# ---- Speed -------------------------------------------------------------------------------------------------


class Timed:
    """An iterator that counts the seconds in which it is waited for."""

    def __init__(self, inner):
        self.inner, self.seconds = inner, 0.0

    def __iter__(self):
        return self

    def __next__(self):
        start = time.perf_counter()
        found = next(self.inner)
        self.seconds += time.perf_counter() - start
        return found


def loading(args):
    found = []
    for workers in (0, 2):
        run = Trainer({"workers": workers, "name": "bench", "threads": 1})
        run.ready()
        run.train_step(False)
        inner, run.batches = run.batches, Timed(run.batches)
        start = time.perf_counter()
        for _ in range(args.steps):
            run.train_step(False)
        share = 100 * run.batches.seconds / (time.perf_counter() - start)
        end_workers(inner)
        found.append((f"share of a step that waits for data, {workers} workers", share, "%"))
    return found


def casting(args):
    run, (x, t, y), velocity = prepared(parse_net("unet:tiny:8:64"), dict(bf16=True), args.device)
    low = x.bfloat16()
    left_alone = training_step(run, (x, t, y), velocity)

    def by_hand():
        loss = F.mse_loss(run(low, t, y), velocity)
        run.backward(loss)
        run.step()

    clock, ratios = Clock(args.device), []
    left_alone()
    for _ in range(args.steps):
        ratios.append(timed(by_hand, clock) / timed(left_alone, clock))
    share = 100 * statistics.median(ratios)
    return [("a step with inputs cast by hand, of one that leaves them alone", share, "%")]


# ---- What a format reaches ---------------------------------------------------------------------------------


def bare(args):
    found = []
    for model in ("bdh", "gpt"):
        net = Trainer({"task": "language", "model": model, "name": "bench"}, dry=True).new_net("meta")
        inside = 0
        for module in net.modules():
            if isinstance(module, torch.nn.Linear):
                inside += module.weight.numel()
        share = 100 * inside / sum(p.numel() for p in net.parameters())
        found.append((f"parameters of {model} in nn.Linear", share, "%"))
    return found


def decibels(found, exact):
    return 10 * math.log10((exact.square().sum() / (found - exact).square().sum()).item())


def attended(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def in_e4m3(x):
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def attention(args):
    import models

    with torch.device("meta"):
        net = models.GENERATIVE["dit"](3, 10, 32, "XL/2")
        inputs = torch.empty(1, 3, 32, 32), torch.empty(1), torch.empty(1, dtype=torch.int64)
    _, by_kind = module_flops(net, inputs, {}, backward=True)
    share = 100 * by_kind["attention"] / sum(by_kind.values())
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 16, 256, 72, generator=generator)
    exact = attended(q, k, v)
    found = [("attention's share of the FLOPs of a DiT-XL/2, 256 tokens", share, "%")]
    ways = {"e4m3": in_e4m3, "bf16": lambda x: x.bfloat16().float()}
    for name, way in ways.items():
        kept = decibels(attended(way(q), way(k), way(v)), exact)
        found.append((f"attention with queries, keys and values in {name}", kept, "dB"))
    return found


def in_blocks(weight, levels):
    """`weight` with each block of 16 values at the nearest of `levels`, scaled to its largest value."""
    flat = weight.flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / levels[-1]
    near = torch.bucketize(blocks.abs() / scale.clamp_min(1e-30), (levels[1:] + levels[:-1]) / 2)
    return (levels[near] * scale * blocks.sign()).flatten()[: len(flat)].view_as(weight)


LEVELS = {"8-bit integers": torch.arange(128.0), "4-bit integers": torch.arange(8.0), "4-bit floats": E2M1}


def drawing(args):
    changes = {name: [] for name in LEVELS}
    for seed in range(args.seeds):
        training = trained(args, seed)
        before = training.heldout()
        weights = [(p, p.detach().clone()) for p in training.net.parameters() if p.dim() > 1]
        for name, levels in LEVELS.items():
            with torch.no_grad():
                for p, exact in weights:
                    p.copy_(in_blocks(exact, levels))
            changes[name].append(100 * (training.heldout() / before - 1))
    return [of_seeds(f"held-out loss with weights in {name}", values) for name, values in changes.items()]


def trained(args, seed):
    training = Training(Way(torch.float32), seed, 5 * args.steps, 1e-3)
    for number in range(5 * args.steps):
        training.step(number)
    return training


def of_seeds(what, values):
    return what, statistics.fmean(values), "%", values


# ---- Divergence --------------------------------------------------------------------------------------------


def divergence(args):
    found = []
    for lr, clip in itertools.product((0.3, 1e-3), (0.0, 1.0)):
        changes = []
        for seed in range(args.seeds):
            flags = {"pure_bf16": True, "stochastic": True, "lr": lr, "clip_grad": clip, "seed": seed}
            run = Trainer({**flags, "warmup": 0, "name": "bench", "threads": 1})
            run.ready()
            losses = [run.train_step(False)[0].item() for _ in range(args.steps)]
            changes.append(100 * (statistics.fmean(losses[-5:]) / losses[0] - 1))
        how = f"clipped at {clip:g}" if clip else "not clipped"
        found.append(of_seeds(f"training loss at the end against the start, rate {lr:g}, {how}", changes))
    return found


# ---- The command -------------------------------------------------------------------------------------------

QUESTIONS = (loading, casting, bare, attention, drawing, divergence)


def add_arguments(parser):
    parser.add_argument("--steps", type=natural, default=40, help="of each timing and training (default: 40)")
    parser.add_argument("--seeds", type=natural, default=3, help="of each training (default: 3)")


def guides(args, clock):
    """Rows (dicts): question, what, value, unit, values by seed."""
    cpu_products.settle(args.device)
    rows = []
    for question in QUESTIONS:
        for what, value, unit, *values in question(args):
            row = dict(question=question.__name__, what=what, value=value, unit=unit)
            rows.append({**row, "values": sum(values, [])})
            print(f"{what}: {shown(rows[-1])}", flush=True)
    return rows


def shown(row):
    """'+1.2 % (+1.0 to +1.4)' of a change by seeds, '3.1 %' of one figure."""
    unit, values = row["unit"], row["values"]
    if not values:
        return f"{row['value']:.1f} {unit}"
    return f"{row['value']:+.2f} {unit} ({min(values):+.2f} to {max(values):+.2f}, {len(values)} seeds)"


def table(rows):
    return markdown(["measured", "figure"], [[row["what"], shown(row)] for row in rows])


COMMAND = Command(
    "guides",
    "statements of guides that a CPU can test in minutes",
    guides,
    add_arguments=add_arguments,
    cpu_only=True,
)
