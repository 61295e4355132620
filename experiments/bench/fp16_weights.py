"""bench.py fp16: can weights, or a whole training, be held in fp16? (10 minutes)

The library refuses fp16 weights. The default U-Net is trained here on digits with weights and gradients in
fp16, by AdamW written out below, so that nothing but the dtype and the way of writing differs between rows.
The loss is scaled dynamically for fp16. Held-out loss of the last weights, paired by seed with fp32's.

Predictions, written before the first run, for 400 steps at a rate of 3e-4 and three seeds. Known by then,
from 20 steps of one seed: with both moments in fp16 the loss is no number after some steps, to nearest and
stochastic, and 97 % of exp_avg_sq is 0.
1. fp16 has three significant bits more than bf16: an update may be 8 times smaller before it is lost. To
   nearest, fp16 weights raise the loss by less than a third of what bf16 weights do. Stochastic or Kahan,
   also beside stochastic bf16 moments, it lies within 0.5 % of fp32's.
2. Moments in fp16 do not train with an eps of 1e-8. A gradient of 1e-4 has a square of 1e-8, below the
   smallest fp16 number of 6e-8: where exp_avg_sq is 0, an update is exp_avg / eps. With an eps of 1e-4 they
   train, and end 1 to 30 % above fp32, since most entries are divided by eps alone.
3. No weight leaves the range of fp16, and fewer than 10 of the steps are skipped where moments are wider.
If so, a second moment in fp16 is refused rightly. fp16 weights beside wider moments are possible, and are
left out since bf16 weights have the same bytes, and a range that no net leaves.
"""

import math
import statistics
from typing import NamedTuple

import torch

import strategies
from benchmarks.common import Command, Flag, progress_bar
from benchmarks.records import of_record
from harness.batches import read_batches
from harness.printing import markdown_table
from lowprec.kernels import cpu_products
from lowprec.rounding import Stream, stream
from tasks.task import Rng, to_device
from trainer import Trainer

ADAMW_BETAS, CLIP_NORM = (0.9, 0.999), 1.0
RATE = 3e-4
FIRST_SCALE, GROWS_AFTER = 2.0**16, 2000


class Way(NamedTuple):
    """How weights are held and written, and what the moments are held in."""

    weights: torch.dtype
    update: str = "nearest"  # nearest, stochastic or kahan
    moments: torch.dtype = torch.float32
    eps: float = 1e-8


WAYS_TO_HOLD_WEIGHTS = {
    "fp32": Way(torch.float32),
    "bf16 weights, to nearest": Way(torch.bfloat16),
    "bf16 weights, stochastic": Way(torch.bfloat16, "stochastic"),
    "fp16 weights, to nearest": Way(torch.float16),
    "fp16 weights, stochastic": Way(torch.float16, "stochastic"),
    "fp16 weights, Kahan": Way(torch.float16, "kahan"),
    "fp16 weights, bf16 moments, stochastic": Way(torch.float16, "stochastic", torch.bfloat16),
    "fp16 weights and moments, to nearest": Way(torch.float16, "nearest", torch.float16),
    "fp16 weights and moments, stochastic": Way(torch.float16, "stochastic", torch.float16),
    "the same, eps 1e-4": Way(torch.float16, "stochastic", torch.float16, eps=1e-4),
}


# ---- Writing -----------------------------------------------------------------------------------------------


def stochastic_16_bit(x, dtype, generator):
    """fp32 `x` in a 16-bit dtype: one of its two neighbours there, the nearer one more often, so that the
    mean is x. Subnormal numbers included.
    """
    near = x.to(dtype)
    error = x - near.float()
    up = torch.where(near == 0, True, (error > 0) == (near > 0))  # whether the other has the larger size
    start = torch.where(near == 0, torch.copysign(torch.zeros_like(x), error).to(dtype), near)
    other = (start.view(torch.int16) + torch.where(up, 1, -1).to(torch.int16)).view(dtype)
    gap = (other.float() - near.float()).abs()
    share = torch.where(gap > 0, error.abs() / gap, 0)
    return torch.where(torch.rand(x.shape, generator=generator) < share, other, near)


def rounded_to(x, dtype, update, generator):
    """fp32 `x` as it is held in `dtype`."""
    if update == "stochastic" and dtype != torch.float32:
        return stochastic_16_bit(x, dtype, generator)
    return x.to(dtype)


class FlatAdamW:
    """AdamW without decay on one flat tensor: everything in fp32 but what is held between steps."""

    def __init__(self, weights, lr, way, generator):
        self.weights, self.lr, self.way, self.generator = weights, lr, way, generator
        self.moments = [torch.zeros_like(weights, dtype=way.moments) for _ in ADAMW_BETAS]
        self.lost = torch.zeros_like(weights)  # of Kahan
        self.steps = 0

    @torch.no_grad()
    def step(self, grad):
        """One step by an fp32 gradient."""
        self.steps += 1
        means = []
        for moment, beta, value in zip(self.moments, ADAMW_BETAS, (grad, grad.square()), strict=True):
            mean = beta * moment.float() + (1 - beta) * value
            moment.copy_(rounded_to(mean, self.way.moments, self.way.update, self.generator))
            means.append(moment.float() / (1 - beta**self.steps))
        update = -self.lr * means[0] / (means[1].sqrt() + self.way.eps)
        kahan = self.way.update == "kahan"
        if kahan:
            update += self.lost.float()
        exact = self.weights.float() + update
        self.weights.copy_(rounded_to(exact, self.way.weights, self.way.update, self.generator))
        if kahan:
            self.lost.copy_(exact - self.weights.float())

    def zeros(self):
        """The share of the entries of exp_avg_sq that are 0 while exp_avg is not."""
        means, squares = self.moments
        return (squares[means != 0] == 0).float().mean().item()


# ---- A training --------------------------------------------------------------------------------------------


def flattened(net):
    """One tensor of all weights of `net`, which become views of it."""
    params = list(net.parameters())
    flat = torch.cat([p.detach().flatten() for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.view_as(p)
    return flat


class Training:
    """The default U-Net on digits, weights held as `way` says."""

    def __init__(self, way, seed, steps, lr):
        self.run = Trainer(strategies.settle({"seed": seed, "steps": steps, "lr": lr, "name": "bench"}))
        self.config, self.task = self.run.config, self.run.task
        self.net = self.run.new_net().to(way.weights)
        self.net.train()
        noise = torch.Generator().manual_seed(stream(seed, Stream.GLOBAL))
        self.optimizer = FlatAdamW(flattened(self.net), lr, way, noise)
        self.scale = FIRST_SCALE if way.weights == torch.float16 else 1.0
        self.skipped = self.since = 0
        data = self.task.train_set(self.run)
        self.batches = read_batches(data, self.config, self.run.ranks, 0)

    def __call__(self, x, t, labels):
        """The net as the task calls it: x in the dtype of the weights, its answer in fp32."""
        return self.net(x.to(next(self.net.parameters()).dtype), t, labels).float()

    def step(self, number):
        """One step; False once the loss is not finite."""
        self.optimizer.lr = self.config.lr * min(1.0, (number + 1) / self.config.warmup)
        batch = to_device(next(self.batches), torch.device("cpu"))
        loss = self.task.loss(self, batch, Rng(stream(self.config.seed, Stream.BATCH, number, 0)), number)
        if not math.isfinite(loss.item()):
            return False
        self.net.zero_grad(set_to_none=True)
        (loss * self.scale).backward()
        grad = torch.cat([p.grad.float().flatten() for p in self.net.parameters()]) / self.scale
        norm = grad.norm()
        if not norm.isfinite():
            self.scale, self.since = self.scale / 2, 0
            self.skipped += 1
            return True
        self.optimizer.step(grad * min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        self.since += 1
        if self.scale > 1 and self.since % GROWS_AFTER == 0:
            self.scale *= 2
        return True

    def heldout(self):
        """The mean loss on held-out images, over the timesteps."""
        images, labels = self.task.heldout_images("cpu")
        self.net.eval()
        fixed = Rng(stream(self.config.seed, Stream.FIXED))
        return statistics.fmean(self.task.loss_by_timestep(self, images, labels, fixed))


def trained_row(name, seed, args, bar):
    """The row of one training."""
    training = Training(WAYS_TO_HOLD_WEIGHTS[name], seed, args.steps, RATE)
    ended = args.steps
    for number in range(args.steps):
        bar.update()
        if not training.step(number):
            ended = number
            break
    return dict(
        name=name,
        seed=seed,
        steps=ended,
        loss=training.heldout() if ended == args.steps else math.inf,
        skipped=training.skipped,
        zeros=training.optimizer.zeros(),
        largest_weight=training.optimizer.weights.float().abs().max().item(),
    )


# ---- The command -------------------------------------------------------------------------------------------


def fp16(args, clock):
    """Rows (dicts): name, seed, steps done, held-out loss, skipped steps, share of exp_avg_sq that is 0."""
    cpu_products.settle_products(torch.device("cpu"))
    rows = []
    with progress_bar(len(WAYS_TO_HOLD_WEIGHTS) * args.seeds * args.steps) as bar:
        for seed in range(args.seeds):
            for name in WAYS_TO_HOLD_WEIGHTS:
                bar.set_postfix_str(f"{name}, seed {seed}")
                rows.append(trained_row(name, seed, args, bar))
    print(table(rows))
    return rows


def table(rows):
    """Markdown: the change of the held-out loss against fp32 of the same seed, its mean and its ends."""
    base = {row["seed"]: row["loss"] for row in rows if row["name"] == "fp32"}
    lines = []
    for name in WAYS_TO_HOLD_WEIGHTS:
        own = [row for row in rows if row["name"] == name]
        changes = [100 * (row["loss"] / base[row["seed"]] - 1) for row in own]
        told = "0, the reference"
        if name != "fp32":
            told = f"{statistics.fmean(changes):+.2f} ({min(changes):+.2f} to {max(changes):+.2f})"
        zeros = statistics.fmean(row["zeros"] for row in own)
        skipped = max(row["skipped"] for row in own)
        lines.append([name, told, f"{100 * zeros:.1f}", str(skipped)])
    change = "held-out loss against fp32, %: mean (smallest to largest)"
    return markdown_table([["held in", change, "of exp_avg_sq 0, %", "steps skipped, at most"], *lines])


TABLES = {"docs/formats.md": {"fp16": of_record(table, "cpu-fp16")}}

COMMAND = Command(
    "fp16",
    "weights and moments in fp16, by how they are written",
    fp16,
    flags=(Flag("--steps", 400, "of each training"), Flag("--seeds", 3, "of each training")),
    cpu_only=True,
)
