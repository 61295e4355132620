"""bench.py systems: a step of segmentation, language and video, as three documents compare configurations.

Each row of a table is a command of train.py, set up by the Trainer itself. All rows of a table take turns.
The columns are of the median step; "speed" is a ratio to the first row, the score is that after --train
steps. A row that this machine can't run says why. Two more tables, dvae-512 and dvae-4096, are of STEVE's
discrete VAE by itself, with so many tokens, and have no score.
"""

import contextlib
import io
import shlex
import statistics
import tempfile
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import strategies
from benchmarks.allocated import count_of
from benchmarks.common import (
    ADAMW_OPTIONS,
    Cell,
    Command,
    Flag,
    or_dash,
    progress_bar,
    started_cells,
    take_turns,
)
from benchmarks.records import of_record
from harness.flags import count
from harness.printing import markdown_table
from harness.validation import steps_an_epoch
from lowprec.errors import Refused
from lowprec.parts.activations import Meter
from lowprec.precision import Precision
from tasks.steve import GUMBEL_BITS, PATCH
from trainer import Trainer

SEGMENT_FLAGS = "--task segment --image_size 64"
LANGUAGE_FLAGS = "--task language --model bdh --batch_size 32"
STEVE_FLAGS = "--task steve --vocab_size 512"
EMULATED_FP8_FLAGS = "--fp8 --fp8_backend emulate"
STOCHASTIC_FLAGS = "--pure_bf16 --stochastic"

# table: {row: flags}; the first row is what the others are compared with
SYSTEM_TABLES = {
    "segment": {
        "fp32, batch 8": f"{SEGMENT_FLAGS} --batch_size 8",
        "bf16, batch 8": f"{SEGMENT_FLAGS} --batch_size 8 --bf16",
        "bf16, batch 16": f"{SEGMENT_FLAGS} --batch_size 16 --bf16",
        "bf16, batch 8, compiled": f"{SEGMENT_FLAGS} --batch_size 8 --bf16 --compile",
        "fp16, batch 8": f"{SEGMENT_FLAGS} --batch_size 8 --fp16",
        "pure bf16 stochastic, batch 8": f"{SEGMENT_FLAGS} --batch_size 8 {STOCHASTIC_FLAGS}",
    },
    "language": {
        "fp32": LANGUAGE_FLAGS,
        "bf16": f"{LANGUAGE_FLAGS} --bf16",
        "bf16, 8-bit states": f"{LANGUAGE_FLAGS} --bf16 --opt8bit",
        "fp8 (emulated)": f"{LANGUAGE_FLAGS} {EMULATED_FP8_FLAGS}",
        "fp8 (emulated), 8-bit states": f"{LANGUAGE_FLAGS} {EMULATED_FP8_FLAGS} --opt8bit",
        "pure bf16 stochastic, 8-bit states": f"{LANGUAGE_FLAGS} {STOCHASTIC_FLAGS} --opt8bit",
    },
    "steve": {
        "fp32, batch 2": f"{STEVE_FLAGS} --batch_size 2",
        "bf16, batch 4": f"{STEVE_FLAGS} --batch_size 4 --bf16",
        "bf16, batch 6": f"{STEVE_FLAGS} --batch_size 6 --bf16",
        "pure bf16 stochastic, batch 6": f"{STEVE_FLAGS} --batch_size 6 {STOCHASTIC_FLAGS}",
    },
}

# tables that run where --only names them; a record of their own holds them
DVAE_RECIPES = {
    "fp32": "",
    "bf16": "--bf16",
    "pure bf16 stochastic": STOCHASTIC_FLAGS,
    "pure bf16 stochastic, logits too": f"{STOCHASTIC_FLAGS} --set logits=bf16",
}
TABLES_APART = {}
for size in (512, 4096):
    dvae = f"--task steve --vocab_size {size} --batch_size 2"
    TABLES_APART[f"dvae-{size}"] = {name: f"{dvae} {flags}".strip() for name, flags in DVAE_RECIPES.items()}


def check(args):
    timed = args.repeats + 2  # steps, which train as well
    if 0 < args.train < timed:
        raise Refused(f"--train {args.train}: timing takes {timed} steps; give as many, or 0 for no score")


# ---- Runs --------------------------------------------------------------------------------------------------


class SteppedRun:
    """A run that takes single steps. flags: of train.py. steps: its whole length. Raises Refused."""

    def __init__(self, flags, folder, steps, device):
        words = [*shlex.split(flags), "--runs", folder, "--device", device.type]
        words += ["--steps", str(max(1, steps)), "--ema_warmup"]  # few steps: the average must have arrived
        table = strategies.flag_table()
        given = vars(table.parser("bench.py", "").parse_args(words))
        self.run = Trainer(strategies.settle({**given, "name": "bench"}, typed=True))
        self.run.ready()

    def step(self):
        """Milliseconds of one optimiser step."""
        start = time.perf_counter()
        self.run.train_step(measure=False)
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def row(self):
        """What is known after a step."""
        run = self.run
        kind, number = run.task.items
        items = run.config.batch_size * run.config.accumulate * number
        return self.described(kind, items, run.precision, run.precision.part(Meter))

    def described(self, kind, items_a_step, precision, kept):
        """The facts of a row. kept: an activations.Meter of what a forward pass kept."""
        config = self.run.config
        return {
            "batch_size": config.batch_size,
            "epoch_steps": steps_an_epoch(config, self.run.task.train_count()),
            "items": kind,
            "items_a_step": items_a_step,
            "parameters": count_of(precision.params),
            "bytes_per_parameter": precision.ledger().state_bytes,
            "kept": kept.json(),
        }

    def score(self, steps):
        """(name, value) of the watched score on held-out data, once `steps` steps are done."""
        run = self.run
        while run.step < steps:
            run.train_step(measure=False)
        scores = run.task.validate(run.precision.generator(), run._fixed_rng())
        name = run.task.watched[0]
        return name, scores[name]


class Reconstruct(nn.Module):
    """Frames [B, 3, H, W] through a discrete VAE and back. bits: of the noise, as steve.STEVE has them."""

    def __init__(self, dvae):
        super().__init__()
        self.dvae = dvae

    def forward(self, frames, bits):
        logits = self.dvae.encode(frames)
        tokens, *_ = self.dvae.sample(logits, bits, 1.0)
        return self.dvae.decode(tokens)


class DiscreteVAE(SteppedRun):
    """The discrete VAE of a run of --task steve, trained by itself on the frames of one batch."""

    def __init__(self, flags, folder, steps, device):
        super().__init__(flags, folder, steps, device)
        run = self.run
        torch.manual_seed(0)
        net = Reconstruct(run.task.net().dvae).to(run.device)
        self.precision = Precision(net, run.precision.recipe, **ADAMW_OPTIONS)
        self.frames = next(run.new_batches())[0].to(run.device).flatten(0, 1)  # [B T, 3, H, W]
        n, _, h, w = self.frames.shape
        self.shape = n, run.task.vocabulary, h // PATCH, w // PATCH

    def step(self):
        start = time.perf_counter()
        bits = torch.randint(2**GUMBEL_BITS, self.shape, dtype=torch.int32, device=self.run.device)
        with Meter(self.precision.model) as self.kept:
            loss = F.mse_loss(self.precision(self.frames, bits), self.frames)
        self.precision.backward(loss)
        self.precision.step()
        return (time.perf_counter() - start) * 1e3

    def row(self):
        return self.described("frames", len(self.frames), self.precision, self.kept)

    def score(self, steps):
        return "score", None


# ---- The command -------------------------------------------------------------------------------------------


def systems(args, clock):
    """Rows (dicts) of all tables."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for table in args.only:
            found = compare_systems(table, args, folder)
            rows += found
            print(f"\n{table}\n\n{system_table(found)}", flush=True)
    return rows


def compare_systems(table, args, folder):
    """Rows of one table, whose runs take turns."""
    flags_of = {**SYSTEM_TABLES, **TABLES_APART}[table]
    runs = {}

    def start(name):
        row = dict(table=table, name=name, flags=flags_of[name], note="", ms=[])
        kind = DiscreteVAE if table in TABLES_APART else SteppedRun
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run = kind(flags_of[name], folder, args.train, args.device)
        except Refused as error:
            row["note"] = str(error)
            return Cell(name, row)
        row["first_step_s"] = run.step() / 1e3
        run.step()
        row.update(run.row())
        runs[name] = run
        return Cell(name, row, [partial(turn_of_run, run)])

    with progress_bar(len(flags_of) * (args.repeats + 1)) as bar:
        rows = take_turns(started_cells(flags_of, start, bar, table), args.repeats, bar)
        for row in rows:
            if args.train and row["name"] in runs:
                row["score"] = runs[row["name"]].score(args.train)
    return rows


def turn_of_run(run):
    return {"ms": run.step()}


def system_table(rows):
    """Markdown of one table's rows."""
    ran = [row for row in rows if row["ms"]]
    if not ran:
        return "\n".join(f"{row['name']}: {row['note']}" for row in rows)
    score = ran[0]["score"][0] if "score" in ran[0] else "score"
    heads = ["configuration", f"{ran[0]['items']} a second", "speed", "seconds an epoch", "bytes a parameter"]
    heads += ["kept for backward, MiB", score]
    lines = []
    for row in rows:
        if row["note"]:
            lines.append([row["name"], row["note"], *[""] * (len(heads) - 2)])
        else:
            lines.append([row["name"], *system_figures(row, ms_an_item(ran[0]))])
    return markdown_table([heads, *lines])


def one_table(rows, name):
    return system_table([row for row in rows if row["table"] == name])


def ms_an_item(row):
    return statistics.median(row["ms"]) / row["items_a_step"]


def system_figures(row, first):
    """The cells of a row that ran. first: milliseconds an item of the first row."""
    _, score = row.get("score", ("", None))
    return [
        f"{1e3 / ms_an_item(row):.0f}",
        f"{first / ms_an_item(row):.2f}",
        f"{statistics.median(row['ms']) * row['epoch_steps'] / 1e3:.1f}",
        f"{row['bytes_per_parameter']:.2f}",
        f"{row['kept']['total'] / 2**20:.1f}",
        or_dash(score, ".4f"),
    ]


TABLES = {"docs/speed.md": {}}
for name in SYSTEM_TABLES:
    TABLES["docs/speed.md"][f"systems {name}"] = of_record(partial(one_table, name=name), "cpu-systems")

COMMAND = Command(
    "systems",
    "a step of other systems than diffusion, as documents compare them",
    systems,
    repeats=9,
    flags=(
        Flag("--only", list(SYSTEM_TABLES), "tables", choices=[*SYSTEM_TABLES, *TABLES_APART]),
        Flag("--train", 300, "steps that each is trained to and then scored, 0 for no scores", type=count),
    ),
    check=check,
)
