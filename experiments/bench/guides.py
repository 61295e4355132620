"""bench.py guides: statements of guides on low precision that a CPU can test in a few minutes.

    python bench.py guides --threads 1 --out experiments/bench/cpu-guides.json

docs/evidence-tables.md has the statements. Predictions, written before the first run, and committed after one
of a single step, which tells `bare` and `attention` whole:
loading: data of this size lie in memory. The default run waits for them in under 3 % of a step without
    workers, and two workers save less than that.
casting: under autocast an input that was cast to bf16 by hand costs a step less than 5 %, either way.
bare: BDH holds under 1 % of its parameters in nn.Linear, which is all that a 4-bit linear layer replaces; a
    GPT over 80 %.
attention: products of queries, keys and values are under 10 % of the FLOPs of a DiT-XL/2 on latents of
    32x32, so FP8 at twice the speed there gains under 5 % of a step. In FP8 (e4m3) their output keeps 25 to
    35 dB, in bf16 over 45 dB.
drawing: the held-out loss of a finished U-Net rises by under 0.1 % with weights in 8-bit integers, 0.5 to 5 %
    in 4-bit integers and 0.3 to 4 % in 4-bit floats (e2m1), in blocks of 16 with an fp32 scale each. With
    AWQ (arXiv 2306.00978), which scales each input channel by a power of its mean size before it rounds to
    4-bit integers, the rise is 0.5 to 0.95 of that to nearest: blocks of 16 part large values from small ones
    already.
divergence: at 300 times its rate AdamW in pure bf16 ends its steps with a loss above that of its start, or
    with none. Clipping at 1, which guides advise, does not mend that, since AdamW divides by the gradient's
    size; the usual rate does.
conditions: a net that sees a blurred image beside the noise has a smaller loss, and its last weights lose by
    rounding what others lose: within 0.5 % of fp32 when written stochastically, 0.3 to 6 % above it when
    written to nearest. (Missed, see docs/evidence-tables.md. Averaged weights, and the net that sees noise
    alone, came after the first run, to see why.)
ranges: with images in 0 to 1 in place of -1 to 1 a net in fp32 draws as many values outside of the range,
    between 20 and 60 %, most of them by less than a tenth of the range: digits are mostly black, and an error
    goes either way. So the clamp makes many values black or white in a sound training, and is no sign of a
    fault.
"""

import itertools
import math
import statistics
import time

import torch
import torch.nn.functional as F

import strategies
from benchmarks.common import Command, DeviceClock, Flag, parse_net, prepared, timed, training_step
from benchmarks.records import of_record
from experiments.bench.fp16_weights import Training, Way
from harness.batches import end_workers
from harness.printing import markdown_table
from lowprec.kernels import cpu_products
from lowprec.layers.flops import module_flops
from lowprec.rounding import Stream, stream
from tasks.condition import given
from tasks.task import Rng, to_device
from trainer import Trainer

FP4_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
WEIGHTS_A_BLOCK = 16


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
        run = Trainer(strategies.settle({"workers": workers, "name": "bench", "threads": 1}))
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

    clock, ratios = DeviceClock(args.device), []
    left_alone()
    for _ in range(args.steps):
        ratios.append(timed(by_hand, clock) / timed(left_alone, clock))
    share = 100 * statistics.median(ratios)
    return [("a step with inputs cast by hand, of one that leaves them alone", share, "%")]


# ---- What a format reaches ---------------------------------------------------------------------------------


def bare(args):
    found = []
    for model in ("bdh", "gpt"):
        run = strategies.settle({"task": "language", "model": model, "name": "bench"})
        net = Trainer(run, dry=True).new_net("meta")
        inside = 0
        for module in net.modules():
            if isinstance(module, torch.nn.Linear):
                inside += module.weight.numel()
        share = 100 * inside / sum(p.numel() for p in net.parameters())
        found.append((f"parameters of {model} in nn.Linear", share, "%"))
    return found


def error_in_decibels(found, exact):
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
        kept = error_in_decibels(attended(way(q), way(k), way(v)), exact)
        found.append((f"attention with queries, keys and values in {name}", kept, "dB"))
    return found


def in_blocks(weight, levels):
    """`weight` with each block of 16 values at the nearest of `levels`, scaled to its largest value."""
    flat = weight.flatten()
    blocks = F.pad(flat, (0, -len(flat) % WEIGHTS_A_BLOCK)).view(-1, WEIGHTS_A_BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / levels[-1]
    near = torch.bucketize(blocks.abs() / scale.clamp_min(1e-30), (levels[1:] + levels[:-1]) / 2)
    return (levels[near] * scale * blocks.sign()).flatten()[: len(flat)].view_as(weight)


INT4_LEVELS = torch.arange(8.0)
LEVELS = {"8-bit integers": torch.arange(128.0), "4-bit integers": INT4_LEVELS, "4-bit floats": FP4_LEVELS}
AWQ = "4-bit integers by AWQ"
AWQ_POWERS = [step / 10 for step in range(11)]


def inputs_of_layers(training):
    """{linear layer or convolution: what it is called with on a batch of the training images}"""
    found, hooks = {}, []

    def keep(layer, inputs):
        found[layer] = inputs[0]

    for module in training.net.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            hooks.append(module.register_forward_pre_hook(keep))
    batch = to_device(next(training.batches), torch.device("cpu"))
    training.task.loss(training, batch, Rng(0), 0)
    for hook in hooks:
        hook.remove()
    return found


def in_blocks_by_awq(layer, x, levels):
    """The weight of a layer in blocks, its input channels scaled before by that power of their mean size over
    `x` with which the layer's output changes least.
    """
    exact = layer.weight.detach().clone()
    channel = 1 if x.dim() == 4 else x.dim() - 1
    size = x.abs().mean([dim for dim in range(x.dim()) if dim != channel]).clamp_min(1e-6)
    wanted = layer(x)
    best, least = exact, math.inf
    for power in AWQ_POWERS:
        scale = size.pow(power).view(1, -1, *[1] * (exact.dim() - 2))
        layer.weight.copy_(in_blocks(exact * scale, levels) / scale)
        error = (layer(x) - wanted).square().mean().item()
        if error < least:
            best, least = layer.weight.clone(), error
    layer.weight.copy_(exact)
    return best


def drawing(args):
    changes = {name: [] for name in (*LEVELS, AWQ)}
    for seed in range(args.seeds):
        training = trained_losses(args, seed)
        before = training.heldout()
        weights = [(p, p.detach().clone()) for p in training.net.parameters() if p.dim() > 1]
        with torch.no_grad():
            inputs = inputs_of_layers(training)
            by_awq = {}
            for layer, x in inputs.items():
                by_awq[layer.weight] = in_blocks_by_awq(layer, x, INT4_LEVELS)
            for name, values in changes.items():
                for p, exact in weights:
                    if name == AWQ and p in by_awq:
                        p.copy_(by_awq[p])
                    else:
                        p.copy_(in_blocks(exact, LEVELS.get(name, INT4_LEVELS)))
                values.append(100 * (training.heldout() / before - 1))
    return [of_seeds(f"held-out loss with weights in {name}", values) for name, values in changes.items()]


def trained_losses(args, seed):
    training = Training(Way(torch.float32), seed, 5 * args.steps, 1e-3)
    for number in range(5 * args.steps):
        training.step(number)
    return training


def of_seeds(what, values, unit="%"):
    return what, statistics.fmean(values), unit, values


# ---- Divergence --------------------------------------------------------------------------------------------


def divergence(args):
    found = []
    for lr, clip in itertools.product((0.3, 1e-3), (0.0, 1.0)):
        changes = []
        for seed in range(args.seeds):
            flags = {"pure_bf16": True, "stochastic": True, "lr": lr, "clip_grad": clip, "seed": seed}
            run = Trainer(strategies.settle({**flags, "warmup": 0, "name": "bench", "threads": 1}))
            run.ready()
            losses = [run.train_step(False)[0].item() for _ in range(args.steps)]
            changes.append(100 * (statistics.fmean(losses[-5:]) / losses[0] - 1))
        how = f"clipped at {clip:g}" if clip else "not clipped"
        found.append(of_seeds(f"training loss at the end against the start, rate {lr:g}, {how}", changes))
    return found


# ---- What a net sees and draws -----------------------------------------------------------------------------


def run_of(args, seed, with_noise=None, **flags):
    """A Trainer of the default U-Net after 15 times as many steps as were asked for. with_noise: in place of
    the task's.
    """
    flags = {"seed": seed, "steps": 15 * args.steps, "name": "bench", "threads": 1, **flags}
    run = Trainer(strategies.settle(flags))
    if with_noise is not None:
        run.task.with_noise = with_noise
    run.ready()
    for _ in range(run.config.steps):
        run.train_step(False)
    return run


def conditions(args):
    ways = {"stochastically": {"pure_bf16": True, "stochastic": True}, "to nearest": {"pure_bf16": True}}
    found = []
    for condition, sources in {"none": ["ema"], "blurred": ["ema", "raw"]}.items():
        changes = {(name, source): [] for name in ways for source in sources}
        for seed in range(args.seeds):
            exact = run_of(args, seed, condition=condition, ema_warmup=True)
            for name, flags in ways.items():
                run = run_of(args, seed, condition=condition, ema_warmup=True, **flags)
                for source in sources:
                    change = 100 * (heldout(run, source) / heldout(exact, source) - 1)
                    changes[name, source].append(change)
        beside = "noise alone" if condition == "none" else "a blurred image"
        for (name, source), values in changes.items():
            weights = "averaged" if source == "ema" else "last"
            what = f"held-out loss from {beside}, {weights} weights, written {name}"
            found.append(of_seeds(what, values))
    return found


def heldout(run, source):
    """The mean loss of averaged ("ema") or last ("raw") weights on held-out images and their conditions, over
    the timesteps.
    """
    task = run.task
    images, targets = task.heldout_images(run.device)
    labels, condition = task.labels_and_condition(images, targets)
    model = given(run.precision.generator(source), condition)
    fixed = Rng(stream(run.config.seed, Stream.FIXED))
    return statistics.fmean(task.loss_by_timestep(model, images, labels, fixed))


def ranges(args):
    found = []
    for low in (-1.0, 0.0):
        outside, far = [], []
        for seed in range(args.seeds):
            drawn = drawn_in(args, seed, low)
            beyond = torch.maximum(low - drawn, drawn - 1) / (1 - low)  # of the range; below 0 within it
            outside.append(100 * (beyond > 0).float().mean().item())
            far.append(100 * (beyond > 0.1).float().mean().item())
        images = f"images in {low:g} to 1"
        found.append(of_seeds(f"drawn outside of the range, {images}", outside, "% of values"))
        found.append(of_seeds(f"by more than a tenth of the range, {images}", far, "% of values"))
    return found


def drawn_in(args, seed, low):
    """Images [100, C, H, W] drawn by a net that was trained on images in `low` to 1."""

    def scaled(images, rng):
        return low + (images + 1) / 2 * (1 - low), rng.normal(*images.shape)

    run = run_of(args, seed, scaled)
    task = run.task
    labels = torch.arange(100) % task.data.num_classes
    noise = Rng(stream(seed, Stream.FIXED)).normal(len(labels), *task.space.shape)
    return task.sample(run.precision.generator("raw"), labels, noise, run.config.sample_steps)


# ---- The command -------------------------------------------------------------------------------------------

QUESTIONS = (loading, casting, bare, attention, drawing, divergence, conditions, ranges)


def guides(args, clock):
    """Rows (dicts): question, what, value, unit, values by seed."""
    cpu_products.settle_products(args.device)
    rows = []
    for question in QUESTIONS:
        for what, value, unit, *values in question(args):
            row = dict(question=question.__name__, what=what, value=value, unit=unit)
            rows.append({**row, "values": sum(values, [])})
            print(f"{what}: {guide_text(rows[-1])}", flush=True)
    return rows


def guide_text(row):
    """'+1.2 % (+1.0 to +1.4)' of a change by seeds, '3.1 %' of one figure."""
    unit, values = row["unit"], row["values"]
    if not values:
        return f"{row['value']:.1f} {unit}"
    sign = "+" if unit == "%" else ""  # of a change
    mean, low, high = (f"{value:{sign}.2f}" for value in (row["value"], min(values), max(values)))
    return f"{mean} {unit} ({low} to {high}, {len(values)} seeds)"


def table(rows):
    return markdown_table([["measured", "figure"], *[[row["what"], guide_text(row)] for row in rows]])


GUIDE_TEXTS = {  # question: (what guides say, whether it holds)
    "loading": (
        "if there is no speed-up, raise num_workers",
        "not for data that lie in memory: hardly a step waits for them, and workers cost more",
    ),
    "casting": ("casting inputs by hand under autocast makes training slow", "not seen on a CPU"),
    "bare": ("a 4-bit linear layer cannot hold a model of bare parameters", "holds for BDH"),
    "attention": (
        "FP8 speeds up attention",
        "of small use to a DiT even at twice the speed, by arithmetic; speed itself was not measured",
    ),
    "drawing": (
        "nets infer in FP4",
        "4 bits cost the loss something without further training, and AWQ is not seen to help this net; "
        "whether it is fast takes a GPU",
    ),
    "divergence": (
        "against NaN lower the learning rate, and clip gradients",
        "a rate 300 times too high gave no NaN here, and a loss that hardly falls or rises. The usual rate "
        "mends that; clipping at 1 does not, since AdamW divides by the gradient's size",
    ),
    "conditions": (
        "a net may see more than labels",
        "holds for stochastic rounding. To nearest a net that sees the blurred image loses more than one "
        "that sees noise alone",
    ),
    "ranges": (
        "values outside of the range of the data are clamped to black and white, a sign of a fault",
        "a sound net in fp32 draws such values too, close to the range, whether images are in -1 to 1 or in "
        "0 to 1; values far outside are rare",
    ),
}


def docs_table(rows):
    """What docs/evidence-tables.md shows."""
    lines = []
    for question, (said, verdict) in GUIDE_TEXTS.items():
        own = [row for row in rows if row["question"] == question]
        found = "; ".join(f"{row['what']}: {guide_text(row)}" for row in own)
        lines.append([said, found, verdict])
    return markdown_table([["the guides say", "measured here", "holds?"], *lines])


TABLES = {"docs/evidence-tables.md": {"guides": of_record(docs_table, "cpu-guides")}}

COMMAND = Command(
    "guides",
    "statements of guides that a CPU can test in minutes",
    guides,
    flags=(Flag("--steps", 40, "of each timing and training"), Flag("--seeds", 3, "of each training")),
    cpu_only=True,
)
