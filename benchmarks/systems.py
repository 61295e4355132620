"""bench.py systems: a step of segmentation, language and video, as three documents compare configurations.

Each row of a table is a command of train.py, set up by the Trainer itself. All rows of a table take turns,
step by step, so that other load meets them alike. Columns: items a second and seconds an epoch of the median
step, the speed as a ratio to the first row, bytes a parameter of weights, gradients and states, what a
forward pass keeps for backward, and the held-out score after --train steps. A row that this machine can't
run says why. Two more tables, dvae-512 and dvae-4096, are of STEVE's discrete VAE by itself, with so many
tokens, and have no score.
"""

import contextlib
import io
import shlex
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import strategies
from benchmarks.common import ADAMW, cell, take_turns
from harness.validation import steps_an_epoch
from lowprec.activations import Meter
from lowprec.errors import Refused
from lowprec.precision import Precision
from tasks.steve import BITS, PATCH
from trainer import Trainer

SEGMENT = "--task segment --image_size 64"
LANGUAGE = "--task language --model bdh --batch_size 32"
STEVE = "--task steve --vocab_size 512"
FP8 = "--fp8 --fp8_backend emulate"
STOCHASTIC = "--pure_bf16 --stochastic"

# table: {row: flags}; the first row is what the others are compared with
TABLES = {
    "segment": {
        "fp32, batch 8": f"{SEGMENT} --batch_size 8",
        "bf16, batch 8": f"{SEGMENT} --batch_size 8 --bf16",
        "bf16, batch 16": f"{SEGMENT} --batch_size 16 --bf16",
        "bf16, batch 8, compiled": f"{SEGMENT} --batch_size 8 --bf16 --compile",
        "fp16, batch 8": f"{SEGMENT} --batch_size 8 --fp16",
        "pure bf16 stochastic, batch 8": f"{SEGMENT} --batch_size 8 {STOCHASTIC}",
    },
    "language": {
        "fp32": LANGUAGE,
        "bf16": f"{LANGUAGE} --bf16",
        "bf16, 8-bit states": f"{LANGUAGE} --bf16 --opt8bit",
        "fp8 (emulated)": f"{LANGUAGE} {FP8}",
        "fp8 (emulated), 8-bit states": f"{LANGUAGE} {FP8} --opt8bit",
        "pure bf16 stochastic, 8-bit states": f"{LANGUAGE} {STOCHASTIC} --opt8bit",
    },
    "steve": {
        "fp32, batch 2": f"{STEVE} --batch_size 2",
        "bf16, batch 4": f"{STEVE} --batch_size 4 --bf16",
        "bf16, batch 6": f"{STEVE} --batch_size 6 --bf16",
        "pure bf16 stochastic, batch 6": f"{STEVE} --batch_size 6 {STOCHASTIC}",
    },
}

# tables that run where --only names them; a record of their own holds them
APART = {
    f"dvae-{size}": {
        name: f"--task steve --vocab_size {size} --batch_size 2 {flags}".strip()
        for name, flags in {
            "fp32": "",
            "bf16": "--bf16",
            "pure bf16 stochastic": STOCHASTIC,
            "pure bf16 stochastic, logits too": f"{STOCHASTIC} --set logits=bf16",
        }.items()
    }
    for size in (512, 4096)
}


class Contender:
    """A run that takes single steps. flags: of train.py. Raises Refused."""

    def __init__(self, flags, folder, steps, device):
        words = [*shlex.split(flags), "--runs", folder, "--device", device.type]
        words += ["--steps", str(max(1, steps)), "--ema_warmup"]  # few steps: the average must have arrived
        table = strategies.table()
        given = vars(table.parser("bench.py", "").parse_args(words))
        self.run = Trainer(strategies.settle({**given, "name": "bench"}, typed=True))
        self.run.ready()

    def step(self):
        """Milliseconds of one optimiser step."""
        started = time.perf_counter()
        self.run.train_step(measure=False)
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    def row(self):
        """What is known after a step."""
        run = self.run
        kind, number = run.task.items
        return {
            "batch_size": run.config.batch_size,
            "epoch_steps": steps_an_epoch(run.config, run.task.train_count()),
            "items": kind,
            "items_a_step": run.config.batch_size * run.config.accumulate * number,
            "parameters": sum(p.numel() for p in run.precision.params),
            "bytes_per_parameter": run.precision.ledger().state_bytes,
            "kept": run.precision.kept.json(),
        }

    def score(self, steps):
        """(name, value) of the watched score on held-out data, once `steps` steps are done."""
        while self.run.step < steps:
            self.run.train_step(measure=False)
        run = self.run
        scores = run.task.validate(run.precision.generator(), run._fixed_rng())
        return run.task.watched[0], scores[run.task.watched[0]]


class Reconstruct(nn.Module):
    """Frames [B, 3, H, W] through a discrete VAE and back. bits: of the noise, as steve.STEVE has them."""

    def __init__(self, dvae):
        super().__init__()
        self.dvae = dvae

    def forward(self, frames, bits):
        return self.dvae.decode(self.dvae.sample(self.dvae.encode(frames), bits, 1.0)[0])


class Alone(Contender):
    """The discrete VAE of a run of --task steve, trained by itself on the frames of one batch."""

    def __init__(self, flags, folder, steps, device):
        super().__init__(flags, folder, steps, device)
        run = self.run
        torch.manual_seed(0)
        net = Reconstruct(run.task.net().dvae).to(run.device)
        self.precision = Precision(net, run.precision.recipe, **ADAMW)
        self.frames = next(run.new_batches())[0].to(run.device).flatten(0, 1)  # [B T, 3, H, W]
        n, _, h, w = self.frames.shape
        self.shape = n, run.task.vocabulary, h // PATCH, w // PATCH

    def step(self):
        started = time.perf_counter()
        bits = torch.randint(2**BITS, self.shape, dtype=torch.int32, device=self.run.device)
        with Meter(self.precision.model) as self.kept:
            loss = F.mse_loss(self.precision(self.frames, bits), self.frames)
        self.precision.backward(loss)
        self.precision.step()
        return (time.perf_counter() - started) * 1e3

    def row(self):
        config = self.run.config
        return {
            "batch_size": config.batch_size,
            "epoch_steps": steps_an_epoch(config, self.run.task.train_count()),
            "items": "frames",
            "items_a_step": self.shape[0],
            "parameters": sum(p.numel() for p in self.precision.params),
            "bytes_per_parameter": self.precision.ledger().state_bytes,
            "kept": self.kept.json(),
        }

    def score(self, steps):
        return "score", None


def systems(args, clock):
    """Rows (dicts) of all tables."""
    timed = args.repeats + 2  # steps, which train as well
    if 0 < args.train < timed:
        raise Refused(f"--train {args.train}: timing takes {timed} steps; give as many, or 0 for no score")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for table in args.only:
            rows += compare(table, args, folder)
            print(f"\n{table}\n\n{table_of([row for row in rows if row['table'] == table])}", flush=True)
    return rows


def compare(table, args, folder):
    """Rows of one table: its contenders take turns."""
    rows, contenders, named = [], {}, {**TABLES, **APART}[table]
    total = len(named) * (args.repeats + 2)
    with tqdm(total=total, disable=None, leave=False) as bar:
        for name, flags in named.items():
            bar.set_postfix_str(f"{table}: first step of {name}")
            row = dict(table=table, name=name, flags=flags, note="", ms=[])
            rows.append(row)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    made = Alone if table in APART else Contender
                    contenders[name] = contender = made(flags, folder, args.train, args.device)
            except Refused as error:
                row["note"] = str(error)
                continue
            row["first_step_s"] = contender.step() / 1e3
            contender.step()
            row.update(contender.row())
            bar.update()
        actions = {name: contender.step for name, contender in contenders.items()}
        times = take_turns(actions, args.repeats, bar)
        for row in rows:
            if row["name"] in contenders:
                row["ms"] = times[row["name"]]
                if args.train:
                    row["score"] = contenders[row["name"]].score(args.train)
    return rows


def table_of(rows):
    """Markdown of one table's rows."""
    ran = [row for row in rows if row["ms"]]
    if not ran:
        return "\n".join(f"{row['name']}: {row['note']}" for row in rows)
    kind, first = ran[0]["items"], statistics.median(ran[0]["ms"]) / ran[0]["items_a_step"]
    score = ran[0]["score"][0] if "score" in ran[0] else "score"
    heads = ["configuration", f"{kind} a second", "speed", "seconds an epoch", "bytes a parameter"]
    heads += ["kept for backward, MiB", score]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        if row["note"]:
            lines.append(f"| {row['name']} | {row['note']}" + " |" * (len(heads) - 1))
            continue
        ms = statistics.median(row["ms"])
        cells = [f"{1e3 * row['items_a_step'] / ms:.0f}", f"{first / (ms / row['items_a_step']):.2f}"]
        cells += [f"{ms * row['epoch_steps'] / 1e3:.1f}", f"{row['bytes_per_parameter']:.2f}"]
        cells += [f"{row['kept']['total'] / 2**20:.1f}", cell(row.get("score", ("", None))[1], ".4f")]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)
