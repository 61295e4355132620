"""bench.py peers: one training step of the same net, batch and loss in four loops.

The loops are a bare one of torch (fused AdamW, the average of torch.optim.swa_utils), Lightning's Trainer,
Accelerate's, and this program's. All of them draw the same batches, form the same loss, clip the gradient's
norm alike and keep an average of the weights. They take turns step by step, so that other load meets them
alike; the figure of each is a ratio to the bare loop in fp32. "bf16 weights" is what each loop offers under
that name: rounding to nearest and an average in bf16, except here, where weights round stochastically and the
average is fp32.

With --tasks: a step of each task in fp32, in the bare loop and here, with the task's own net, data and loss.
"""

import contextlib
import copy
import io
import logging
import statistics
import tempfile
import threading
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from benchmarks.common import take_turns, timed
from benchmarks.systems import Contender
from lowprec import cast
from lowprec.attention import attend
from lowprec.errors import Refused
from lowprec.machine import quiet_import
from lowprec.rounding import Stream, stream
from tasks.task import Rng

NETS = {
    "U-Net, 64x64": "--task rflow --model unet --size small --image_size 64 --batch_size 8",
    "DiT S/8, 64x64": "--task rflow --model dit --size S/8 --image_size 64 --batch_size 8",
    "GPT": "--task language --model gpt --batch_size 16",
}
FIRST = "bare loop, fp32"

# ---- The loops ---------------------------------------------------------------------------------------------


class Job:
    """What every loop trains: a net, its batches and its loss, as a Trainer sets them up."""

    def __init__(self, flags, folder, device):
        self.run = Contender(flags, folder, 10**6, device).run
        self.config, self.task = self.run.config, self.run.task
        self.net = copy.deepcopy(self.run.precision.model)
        self.count = 0

    def batches(self):
        return self.run.new_batches()

    def loss(self, net, batch):
        self.count += 1
        rng = Rng(stream(self.config.seed, Stream.BATCH, self.count, 0), 0, 1, self.run.device)
        return self.task.loss(net, batch, rng, self.count)

    def optimizer(self, net):
        c = self.config
        options = dict(lr=c.lr, betas=(0.9, c.beta2), weight_decay=c.weight_decay, fused=True)
        return torch.optim.AdamW(net.parameters(), **options)

    def clip(self, net):
        if self.config.clip_grad:
            nn.utils.clip_grad_norm_(net.parameters(), self.config.clip_grad)

    def average(self, net, decay=None):
        decay = self.config.ema_decay if decay is None else decay
        return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def averages(self, net):
        """All averages that a run keeps: its own, and the one that a task's loss reads as its target."""
        found = [self.average(net)]
        for spec in self.task.averages().values():
            found.append(self.average(net, float(spec.partition(":")[0])))
            self.task.target = lambda model, target=found[-1].module: target
        return found


class In16(nn.Module):
    """A net of bf16 weights that takes and gives fp32, as the losses here do."""

    def __init__(self, net):
        super().__init__()
        self.net = net.bfloat16()

    def forward(self, *args, **kwargs):
        args, kwargs = cast.to(torch.bfloat16, (args, kwargs))
        return cast.to(torch.float32, self.net(*args, **kwargs))


def bare(job, kind):
    """step() of a loop of torch alone."""
    net = In16(job.net) if kind == "bf16 weights" else job.net
    optimizer, averages, batches = job.optimizer(net), job.averages(net), job.batches()

    def step():
        with torch.autocast(job.run.device.type, torch.bfloat16, enabled=kind == "bf16"):
            loss = job.loss(net, next(batches))
        loss.backward()
        job.clip(net)
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(net)

    return step


def accelerate(job, kind):
    """step() by Accelerate, which has one mode in a process: bf16 autocast."""
    library = quiet_import("accelerate", "bench.py peers", "accelerate")
    accelerator = library.Accelerator(mixed_precision="bf16", cpu=job.run.device.type == "cpu")
    net, optimizer = accelerator.prepare(job.net, job.optimizer(job.net))
    average, batches = job.average(job.net), job.batches()

    def step():
        with accelerator.autocast():
            loss = job.loss(net, next(batches))
        accelerator.backward(loss)
        if job.config.clip_grad:
            accelerator.clip_grad_norm_(net.parameters(), job.config.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(accelerator.unwrap_model(net))

    return step


class Handed:
    """Batches for a loop that can't be called step by step: it runs in a thread and waits for each batch."""

    def __init__(self, batches, main):
        self.batches, self.error = batches, None
        self.asked, self.given = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._guarded, args=(main,), daemon=True).start()
        self.asked.acquire()

    def _guarded(self, main):
        try:
            main(self)
        except Exception as error:  # told where the step was asked for
            self.error = error
        self.asked.release()

    def __iter__(self):
        while True:
            self.asked.release()
            self.given.acquire()
            yield next(self.batches)

    def step(self):
        """Hand over a batch, and wait for the loop to ask for the next."""
        self.given.release()
        self.asked.acquire()
        if self.error:
            raise self.error


def lightning(job, kind):
    """step() by Lightning's Trainer: it asks for a batch ahead, and trains on one each time."""
    library = quiet_import("lightning", "bench.py peers", "lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = In16(job.net) if kind == "bf16 weights" else job.net

        def training_step(self, batch, index):
            return job.loss(self.net, batch)

        def configure_optimizers(self):
            return job.optimizer(self)

        def configure_gradient_clipping(self, *given, **named):
            job.clip(self)  # Lightning's own clipping refuses fused optimisers

    def main(handed):
        precision = {"fp32": "32-true", "bf16": "bf16-mixed", "bf16 weights": "bf16-true"}[kind]
        trainer = library.Trainer(
            accelerator="cpu" if job.run.device.type == "cpu" else "gpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            max_steps=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[EMAWeightAveraging(decay=job.config.ema_decay)],
        )
        trainer.fit(Module(), handed)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return Handed(job.batches(), main).step


LOOPS = {"bare loop": bare, "Lightning": lightning, "Accelerate": accelerate}
OURS = {"fp32": "", "bf16": "--bf16", "bf16 weights": "--pure_bf16 --stochastic"}
ROWS = [(loop, kind) for loop in ("bare loop", "Lightning") for kind in OURS]
ROWS += [("Accelerate", "bf16"), *(("ours", kind) for kind in OURS)]


def stepper(loop, kind, flags, folder, device):
    """step() of one row."""
    if loop == "ours":
        return Contender(f"{flags} {OURS[kind]}", folder, 10**6, device).step
    return LOOPS[loop](Job(flags, folder, device), kind)


# ---- What the machine could do -----------------------------------------------------------------------------


def operations(device, dtype):
    """{name: a call} of bare operations in a dtype. Attention is forward and backward, of the GPT's shape."""
    a, x = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((1024, 1024), (8, 64, 64, 64)))
    kernel = torch.randn(64, 64, 3, 3, device=device, dtype=dtype)
    heads = [torch.randn(16, 4, 128, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def attention(attend):
        out = attend(*heads, is_causal=True)
        torch.autograd.grad(out, heads, out.detach())

    return {
        "matmul": lambda: torch.mm(a, a),
        "convolution": lambda: F.conv2d(x, kernel),
        "attention as torch chooses it": lambda: attention(F.scaled_dot_product_attention),
        "attention as chosen here": lambda: attention(attend),
    }


def machine_ratios(device, clock, repeats):
    """{name: seconds in fp32 / seconds in bf16} of bare operations, taken by turns."""
    calls = {dtype: operations(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    cells = [(name, dtype) for name in calls[torch.float32] for dtype in calls]
    with tqdm(total=len(cells) * repeats, disable=None, leave=False) as bar:
        acts = {(name, dtype): calls[dtype][name] for name, dtype in cells}
        turns = {cell: lambda act=act: timed(act, clock, 3) for cell, act in acts.items()}
        times = take_turns(turns, repeats, bar)
    ms = {cell: statistics.median(each) for cell, each in times.items()}
    return {name: ms[name, torch.float32] / ms[name, torch.bfloat16] for name in calls[torch.float32]}


# ---- The command -------------------------------------------------------------------------------------------

WARM_UP = 4  # steps: compiling, states, and the batch that Lightning fetches ahead


def peers(args, clock):
    """Rows (dicts): net, loop, kind, ms of each round, or a note."""
    if args.tasks is not None:
        return beside_bare(args, clock)
    ratios = machine_ratios(args.device, clock, args.repeats)
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"bf16 against fp32, bare operations of this machine: {shown}", flush=True)
    rows = [dict(net="bare operation", loop=name, kind="bf16", ratio=r) for name, r in ratios.items()]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        for net in args.only:
            rows += compare(net, args, folder, clock)
            print(f"\n{net}\n\n{table_of([row for row in rows if row['net'] == net])}", flush=True)
    if args.out:
        draw(rows, Path(args.out).with_suffix(".png"))
    return rows


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and on batches of unknown size
        yield


def compare(net, args, folder, clock):
    """Rows of one net: its loops take turns."""
    rows, steps = [], {}
    with tqdm(total=len(ROWS) * (args.repeats + 1), disable=None, leave=False) as bar:
        for loop, kind in ROWS:
            bar.set_postfix_str(f"{net}: first steps of {loop}, {kind}")
            row = dict(net=net, loop=loop, kind=kind, flags=NETS[net], ms=[], note="")
            rows.append(row)
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    step = stepper(loop, kind, NETS[net], folder, args.device)
                    for _ in range(WARM_UP):
                        step()
            except Refused as error:
                row["note"] = str(error)
                continue
            steps[f"{loop}, {kind}"] = step
            bar.update()
        actions = {name: lambda step=step: timed(step, clock) for name, step in steps.items()}
        times = take_turns(actions, args.repeats, bar)
    for row in rows:
        row["ms"] = times.get(f"{row['loop']}, {row['kind']}", [])
    _add_ratios(rows)
    return rows


def _add_ratios(rows):
    """Speed against the first row: the median over rounds of the ratio within a round."""
    first = next(row["ms"] for row in rows if f"{row['loop']}, {row['kind']}" == FIRST)
    for row in rows:
        if row["ms"]:
            row["ratio"] = statistics.median(a / b for a, b in zip(first, row["ms"], strict=True))


def table_of(rows):
    """Markdown: a line a loop, a column a kind of precision, speed against the bare loop in fp32."""
    found = {(row["loop"], row["kind"]): row for row in rows}
    lines = [f"| loop | {' | '.join(OURS)} |", "|---" * (len(OURS) + 1) + "|"]
    for loop in (*LOOPS, "ours"):
        cells = [found.get((loop, kind)) for kind in OURS]
        shown = ["-" if row is None else row["note"] or f"{row['ratio']:.2f}" for row in cells]
        lines.append(f"| {loop} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw(rows, path):
    """A picture of bars: for each net the speed of each loop against the bare one in fp32."""
    from matplotlib.figure import Figure

    nets = list(dict.fromkeys(row["net"] for row in rows if "ms" in row))
    figure = Figure(figsize=(4.2 * len(nets), 3.6), layout="constrained")
    colours = dict(zip(OURS, ("#8c8c8c", "#4c72b0", "#dd8452"), strict=True))
    for axis, net in zip(figure.subplots(1, len(nets), squeeze=False)[0], nets, strict=True):
        shown = [row for row in rows if row["net"] == net and row.get("ms")]
        for place, row in enumerate(reversed(shown)):
            bar = axis.barh(place, row["ratio"], color=colours[row["kind"]])
            axis.bar_label(bar, fmt="%.2f", padding=2, fontsize=8)
        labels = [f"{row['loop']}, {row['kind']}" for row in reversed(shown)]
        axis.set_yticks(range(len(shown)), labels, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(net, fontsize=10)
        axis.set_xlabel("speed of a step, bare fp32 loop = 1", fontsize=8)
        axis.margins(x=0.12)
    figure.savefig(path, dpi=110)


# ---- Each task beside a bare loop --------------------------------------------------------------------------

# a row of what a task is: its flags. {flow}, {vae}: folders of runs of one step
TASKS = {
    "classify, CNN": "--task classify",
    "classify, ResNet-18": "--task classify --model resnet18",
    "classify, ViT": "--task classify --model vit",
    "segment": "--task segment",
    "language, BDH": "--task language --model bdh",
    "vae": "--task vae",
    "rflow in latents": "--task rflow --vae {vae}",
    "rflow, perceptual": "--task rflow --perceptual 0.1",
    "consistency": "--task consistency",
    "distill": "--task distill --teacher {flow}",
    "steve": "--task steve",
    "slotcontrast": "--task slotcontrast",
}
STARTED = {"flow": "--task rflow --samples 16 --sample_steps 2", "vae": "--task vae"}
ROUND = 300  # ms of steps that a loop does in a row, at least
BESIDE = ("bare loop", "ours")


def beside_bare(args, clock):
    """Rows (dicts): task, loop, flags, steps a round, ms a step of each round."""
    rows, names = [], args.tasks or list(TASKS)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        asked = "".join(TASKS[name] for name in names)
        started = {name: start(name, folder, args.device) for name in STARTED if f"{{{name}}}" in asked}
        with tqdm(total=len(names) * 2 * (args.repeats + 1), disable=None, leave=False) as bar:
            for name in names:
                rows += task_rows(name, TASKS[name].format(**started), folder, args, clock, bar)
    print(tasks_table(rows), flush=True)
    return rows


def start(name, folder, device):
    """The folder of a run of one step, which other tasks start from."""
    import train

    words = f"--steps 1 --sample_every 0 --ema_warmup --name {name}"
    words = [*STARTED[name].split(), *words.split(), "--runs", folder, "--device", device.type]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = train.main(words)
    if status:
        raise Refused(f"the run of one step that {name} is did not end: {said.getvalue().strip()[-200:]}")
    return f"{folder}/{name}"


def task_rows(name, flags, folder, args, clock, bar):
    """The two rows of one task, whose loops take turns."""
    steps = {}
    for loop in BESIDE:
        bar.set_postfix_str(f"{name}: first steps of {loop}")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            steps[loop] = stepper(loop, "fp32", flags, folder, args.device)
            for _ in range(WARM_UP):
                steps[loop]()
        bar.update()
    count = max(1, round(ROUND / timed(steps["ours"], clock)))
    actions = {loop: lambda step=step: timed(step, clock, count) for loop, step in steps.items()}
    times = take_turns(actions, args.repeats, bar)
    shared = dict(task=name, kind="fp32", flags=TASKS[name], steps=count)
    return [dict(shared, loop=loop, ms=times[loop]) for loop in BESIDE]


def beside(rows, task):
    """[time of a step here / that of the bare loop, of each round] of a task."""
    bare, ours = (next(r["ms"] for r in rows if (r["task"], r["loop"]) == (task, loop)) for loop in BESIDE)
    return [b / a for a, b in zip(bare, ours, strict=True)]


def tasks_table(rows):
    """Markdown: a line a task."""
    lines = ["| task | command | bare loop, ms | ours, ms | ours / bare loop | half of the rounds |"]
    lines.append("|---" * 6 + "|")
    for task in dict.fromkeys(row["task"] for row in rows):
        bare, ours = (next(r for r in rows if (r["task"], r["loop"]) == (task, loop)) for loop in BESIDE)
        ratios = beside(rows, task)
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        cells = [task, f"`{bare['flags']}`", *(f"{statistics.median(row['ms']):.0f}" for row in (bare, ours))]
        cells += [f"{statistics.median(ratios):.2f}", f"{low:.2f} to {high:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
