"""bench.py first: how long each task's first command takes, and what comes out.

The commands run one after another, alone on the machine, each in a process of its own as a user starts it.
Their folders are deleted at the end (--runs keeps them). A row: seconds from the start of the command to its
end, seconds to every picture, and the scores. It compares nothing: the seconds are this machine's.
"""

import json
import os
import shlex
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Command, Flag, progress_bar
from benchmarks.records import of_record
from experiments.bench import printed_by_python
from harness.printing import markdown_table
from lowprec.errors import Refused

FIRST_RECIPE = "--pure_bf16 --stochastic"
SHORT_RUN = "--steps 500 --ema_warmup"  # without a warm-up the average has not arrived by then
RESNET = "--task classify --model resnet18"
DISTILL = "--task distill --teacher {runs}/teacher"


@dataclass(frozen=True)
class FirstCommand:
    """A first command.

    flags: of train.py. score: the one that the table shows, a key of the averaged weights' scores. said: its
    words there. needs: whose run it starts from.
    """

    flags: str
    score: str
    said: str
    needs: tuple[str, ...] = ()


# {name of the run's folder: what makes it}; in this order, for some start from the run of an earlier one
FIRST_COMMANDS = {
    "default": FirstCommand(FIRST_RECIPE, "frechet", "Fréchet distance {}"),
    "dit": FirstCommand("--model dit", "frechet", "Fréchet distance {}"),
    "ddpm": FirstCommand("--task ddpm --steps 5000", "frechet", "Fréchet distance {}"),
    "segment": FirstCommand(f"--task segment {SHORT_RUN}", "mean_iou", "IoU {}"),
    "classify": FirstCommand("--task classify", "accuracy", "accuracy {}"),
    "resnet18": FirstCommand(f"{RESNET} {SHORT_RUN}", "accuracy", "accuracy {}"),
    "vit": FirstCommand("--task classify --model vit", "accuracy", "accuracy {}"),
    "language": FirstCommand("--task language", "bits_a_byte", "{} bits a byte"),
    "bdh": FirstCommand(f"--task language --model bdh {SHORT_RUN}", "bits_a_byte", "{} bits a byte"),
    "vae": FirstCommand("--task vae", "psnr", "PSNR {} dB"),
    "latent": FirstCommand("--vae {runs}/vae", "frechet", "Fréchet distance {}", ("vae",)),
    "steve": FirstCommand("--task steve", "fg_ari", "FG-ARI {}"),
    "slotcontrast": FirstCommand("--task slotcontrast", "fg_ari", "FG-ARI {}"),
    "consistency": FirstCommand("--task consistency", "frechet", "Fréchet distance {}"),
    "teacher": FirstCommand("", "frechet", "Fréchet distance {}"),
    "distill": FirstCommand(DISTILL, "frechet", "Fréchet distance {}", ("teacher",)),
    "perceptual": FirstCommand("--perceptual 0.1", "frechet", "Fréchet distance {}"),
}


def with_needs(names):
    """The names with those whose runs they start from, in the order of FIRST_COMMANDS."""
    wanted = set(names)
    for name in names:
        wanted.update(FIRST_COMMANDS[name].needs)
    return [name for name in FIRST_COMMANDS if name in wanted]


def first(args, clock):
    """Rows (dicts), see `measured`. Raises Refused when a command fails."""
    rows = []
    names = with_needs(args.only)
    with tempfile.TemporaryDirectory() as scratch, progress_bar(len(names)) as bar:
        for name in names:
            bar.set_postfix_str(name)
            row = measured(name, os.path.abspath(args.runs or scratch), args)
            rows.append(row)
            bar.write(f"{name:<14}{minutes(row):>6} minutes  {result(row)}")
            bar.update()
    return rows


def measured(name, runs, args):
    """The row of a command. Raises Refused when the command fails."""
    folder = Path(runs) / name
    if folder.exists():
        raise Refused(f"--runs {runs}: it holds {name} already, which would go on; choose another folder")
    typed = FIRST_COMMANDS[name].flags
    if args.steps:
        typed += f" --steps {args.steps}"
    began = time.time()
    seconds = seconds_of([*shlex.split(typed.format(runs=runs)), "--name", name, "--runs", runs], args)
    summary = json.loads((folder / "summary.json").read_text())
    pictures = sorted((folder / "samples").iterdir(), key=lambda path: path.stat().st_mtime)
    scores = summary["scores"]["ema"]
    return dict(
        name=name,
        command=shlex.join(["python", "train.py", *shlex.split(typed.format(runs="runs"))]),
        seconds=seconds,
        training_seconds=summary["seconds"],
        steps=summary["step"],
        parameters=summary["parameters"],
        pictures={path.name: path.stat().st_mtime - began for path in pictures},
        scores={key: value for key, value in scores.items() if isinstance(value, float)},
    )


def seconds_of(flags, args):
    """From the start of train.py to its end. Raises Refused when it fails."""
    words = ["train.py", *flags, "--device", args.device.type]
    if args.threads:
        words += ["--threads", str(args.threads)]
    start = time.perf_counter()
    printed_by_python(words)
    return time.perf_counter() - start


READ_LATER = {"vae": "vae", "teacher": "teacher"}  # row: the --name of a run that a later command reads


def typed_row(row):
    """The command of a row, as one types it so that the later commands find its run."""
    name = READ_LATER.get(row["name"])
    return row["command"] if name is None else f"{row['command']} --name {name}"


def table(rows):
    """Markdown of the rows: what docs/speed.md shows."""
    lines = []
    for row in rows:
        seen = min(row["pictures"].values()) / 60
        command = f"`{typed_row(row)}`"
        lines.append([command, f"{row['steps']:,}", f"{seen:.1f}", minutes(row), result(row)])
    head = ["command", "steps", "first picture, minutes", "end, minutes", "what comes out"]
    return markdown_table([head, *lines])


def minutes(row):
    """'1.8': from the start of the command to its end."""
    return f"{row['seconds'] / 60:.1f}"


def result(row):
    """'Fréchet distance 0.088': what came out, in README's words."""
    how = FIRST_COMMANDS[row["name"]]
    return how.said.format(f"{row['scores'][how.score]:.3g}")


DIGITS = "digits"
TASK_TEXTS = {  # name of a first command: (the task, what one sees)
    "default": ("diffusion", DIGITS),
    "dit": ("diffusion transformer", "digits; `--size S/2` … `XL/2`"),
    "ddpm": ("noise prediction", "digits, by DDIM sampling"),
    "segment": ("segmentation", "masks beside predictions, Dice and IoU; `--config configs/production.yaml`"),
    "classify": ("classification", "accuracy, and held-out images as a confusion matrix"),
    "resnet18": ("the same with a ResNet-18", "11 million parameters"),
    "vit": ("the same with a small ViT", "attention in place of convolutions"),
    "language": ("language", "a text that the net writes, nats and bits a byte, tokens a second"),
    "bdh": ("the same with BDH", "bare parameters, linear attention"),
    "vae": ("autoencoder", "reconstructions below their images, PSNR"),
    "latent": ("latent diffusion", "digits drawn in its latents; also `--task ddpm`, `--model dit`"),
    "steve": ("objects in video", "reconstructions, slots as masks; more by `--size mini --published_start`"),
    "slotcontrast": ("objects in video", "slots that find the objects and follow them"),
    "consistency": ("one to four steps", "digits in two steps, learnt from data alone"),
    "teacher": ("a teacher for the next one", "digits, with `--name teacher`"),
    "distill": ("half the steps", "a student that takes one step for two of its teacher's"),
    "perceptual": ("a perceptual term", "digits, trained on features too"),
}


def tasks_table(rows):
    """What docs/tasks.md shows."""
    lines = []
    for row in rows:
        task, seen = TASK_TEXTS[row["name"]]
        lines.append([task, f"`{typed_row(row)}`", minutes(row), result(row), seen])
    return markdown_table([["task", "command", "minutes", "what came out", "what you see"], *lines])


TABLES = {
    "docs/speed.md": {"first": of_record(table, "cpu-first")},
    "docs/tasks.md": {"first commands": of_record(tasks_table, "cpu-first")},
}

COMMAND = Command(
    "first",
    "how long each task's first command takes, and what comes out",
    first,
    flags=(
        Flag("--only", list(FIRST_COMMANDS), "commands to run", choices=FIRST_COMMANDS),
        Flag("--steps", None, "other than each task's own number, to try it"),
        Flag("--runs", None, "keep the runs here, which are deleted otherwise", type=str, metavar="DIR"),
    ),
)
