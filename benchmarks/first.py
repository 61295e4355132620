"""bench.py first: how long each task's first command takes, and what comes out.

The commands of README's table of tasks, one after another and alone on the machine, each a process of its
own as a user starts it, in folders that are deleted at the end (--runs keeps them). A row: seconds from the
start of the command to its end, seconds to every picture, and the scores. It says when there is something to
look at and what it is worth. It compares nothing: the seconds are this machine's.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lowprec.errors import Refused

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "--pure_bf16 --stochastic"
SHORT = "--steps 500 --ema_warmup"  # without a warm-up the average has not arrived by then
RESNET = "--task classify --model resnet18"
DISTILL = "--task distill --teacher {runs}/teacher"


@dataclass(frozen=True)
class First:
    """A first command. flags: of train.py. score: the one that README shows, a key of the averaged weights'
    scores. said: its words there. needs: whose run it starts from.
    """

    flags: str
    score: str
    said: str
    needs: tuple[str, ...] = ()


# name of the run's folder: what makes it; in this order, for some start from the run of an earlier one
FIRST = {
    "default": First(RECIPE, "frechet", "Fréchet distance {}"),
    "dit": First("--model dit", "frechet", "Fréchet distance {}"),
    "ddpm": First("--task ddpm --steps 5000", "frechet", "Fréchet distance {}"),
    "segment": First(f"--task segment {SHORT}", "mean_iou", "IoU {}"),
    "classify": First("--task classify", "accuracy", "accuracy {}"),
    "resnet18": First(f"{RESNET} {SHORT}", "accuracy", "accuracy {}"),
    "vit": First("--task classify --model vit", "accuracy", "accuracy {}"),
    "language": First("--task language", "bits_a_byte", "{} bits a byte"),
    "bdh": First(f"--task language --model bdh {SHORT}", "bits_a_byte", "{} bits a byte"),
    "vae": First("--task vae", "psnr", "PSNR {} dB"),
    "latent": First("--vae {runs}/vae", "frechet", "Fréchet distance {}", ("vae",)),
    "steve": First("--task steve", "fg_ari", "FG-ARI {}"),
    "slotcontrast": First("--task slotcontrast", "fg_ari", "FG-ARI {}"),
    "consistency": First("--task consistency", "frechet", "Fréchet distance {}"),
    "teacher": First("", "frechet", "Fréchet distance {}"),
    "distill": First(DISTILL, "frechet", "Fréchet distance {}", ("teacher",)),
    "perceptual": First("--perceptual 0.1", "frechet", "Fréchet distance {}"),
}


def with_needs(names):
    """The names with those whose runs they start from, in the order of FIRST."""
    wanted = set(names)
    for name in names:
        wanted.update(FIRST[name].needs)
    return [name for name in FIRST if name in wanted]


def first(args, clock):
    rows = []
    with tempfile.TemporaryDirectory() as passing:
        for name in (bar := tqdm(with_needs(args.only), disable=None, leave=False)):
            bar.set_postfix_str(name)
            rows.append(_measured(name, args.runs or passing, args))
            bar.write(_line(rows[-1]))
    return rows


def _measured(name, runs, args):
    """The row of a command. Raises Refused when the command fails."""
    typed = FIRST[name].flags + (f" --steps {args.steps}" if args.steps else "")
    flags = shlex.split(typed.format(runs=runs))
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--name", name, "--runs", runs]
    command += ["--device", args.device.type]
    if args.threads:
        command += ["--threads", str(args.threads)]
    if (Path(runs) / name).exists():
        raise Refused(f"--runs {runs}: it holds {name} already, which would go on; choose another folder")
    began, start = time.time(), time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refused(f"{shlex.join(command[1:])}: exit status {ended.returncode}: {last}")
    folder = Path(runs) / name
    summary = json.loads((folder / "summary.json").read_text())
    pictures = sorted((folder / "samples").iterdir(), key=lambda path: path.stat().st_mtime)
    return dict(
        name=name,
        command=shlex.join(["python", "train.py", *shlex.split(typed.format(runs="runs"))]),
        seconds=seconds,
        training_seconds=summary["seconds"],
        steps=summary["step"],
        parameters=summary["parameters"],
        pictures={path.name: path.stat().st_mtime - began for path in pictures},
        scores={key: value for key, value in summary["scores"]["ema"].items() if isinstance(value, float)},
    )


def table(rows):
    """Markdown of the rows: what docs/speed.md shows."""
    lines = ["| command | steps | first picture, minutes | end, minutes | what comes out |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        seen = min(row["pictures"].values()) / 60
        times = f"{seen:.1f} | {minutes(row)}"
        lines.append(f"| `{row['command']}` | {row['steps']:,} | {times} | {result(row)} |")
    return "\n".join(lines)


def minutes(row):
    """'1.8': from the start of the command to its end."""
    return f"{row['seconds'] / 60:.1f}"


def _line(row):
    return f"{row['name']:<14}{minutes(row):>6} minutes  {result(row)}"


def result(row):
    """'Fréchet distance 0.088': what came out, in README's words."""
    how = FIRST[row["name"]]
    return how.said.format(f"{row['scores'][how.score]:.3g}")
