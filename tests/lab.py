"""For the tests of the log: a small experiment in a folder, its records, and a train.py that does nothing."""

import csv
import json
import os
import subprocess
import sys

import numpy as np

from experiments import run
from experiments.log import definition, figures

# ---- An experiment -----------------------------------------------------------------------------------------

TOML = """
title = "Rounding"
question = "Does it matter how a bf16 weight is written?"
believed = "No."
prediction = "Yes."
margin = 0.5
margin_reason = "Half of what nearest costs."
metric = "ema.frechet"
seeds = [0, 1, 2, 3, 4, 5]
common = ["--steps", "4", "--batch_size", "8", "--samples", "64", "--sample_steps", "2",
          "--log_every", "2", "--sample_every", "0"]
baseline = "fp32"
[[arms]]
name = "fp32"
flags = []
[[arms]]
name = "nearest"
flags = ["--pure_bf16"]
[[arms]]
name = "sampler"
of = "fp32"
flags = ["--set", "sampler=bf16"]
note = "state of the sampler alone"
"""
SECOND_ARMS = """
arms = [
    {name = "fp32", of = "001/fp32", flags = []},
    {name = "raw", of = "fp32", flags = [], metric = "raw.frechet"},
    {name = "sampler", of = "fp32", flags = ["--set", "sampler=bf16"]},
    {name = "again", of = "sampler", flags = [], metric = "raw.frechet", margin = 9},
    {name = "student", after = "fp32", flags = ["--finetune", "{after}"]},
]
"""
SECOND = TOML.replace("Rounding", "More").split("[[arms]]")[0] + SECOND_ARMS


def write(root, toml, records=()):
    """experiments/001-rounding with these records."""
    (root / "001-rounding").mkdir(parents=True, exist_ok=True)
    (root / "001-rounding/experiment.toml").write_text(toml)
    (root / "001-rounding/results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def second(root, toml=SECOND):
    """experiments/002-more, whose arms read, sample or start from those of 001."""
    (root / "002-more").mkdir(exist_ok=True)
    (root / "002-more/experiment.toml").write_text(toml)
    return definition.load_experiment("2", root)


# ---- Its records -------------------------------------------------------------------------------------------


def record(experiment, name, seed, frechet, **more):
    scores = {"frechet": frechet, "label_accuracy": 0.5, "loss_by_timestep": [0.5, 0.4 + seed]}
    return {
        "arm": name,
        "seed": seed,
        "command": definition.typed_run(experiment.arm(name), seed),
        "commit": "a" * 40,
        "clean": True,
        "env": {"cpu": "c", "gpu": None, "bf16": [], "torch": "2", "python": "3"},
        "scores": {"ema": scores, "raw": {"frechet": 2 * frechet}},
        "reference": {"floor": {"frechet": 0.1}, "ceiling": {"frechet": 60.0}},
        "seconds": 30.0,
        "scoring_seconds": 6.0,
        "images_per_second": 100.0,
        "peak_memory": 1,
        "bytes_per_parameter": 16.0,
        "final_loss": 0.4 + seed / 100,
        "curves": {"step": [2, 4], "loss": [1.0, 0.5 + seed]},
        **more,
    }


def records_of(experiment, shift=(0.0, 0.9, 0.01)):
    """A record of every arm and seed: arms differ from the first by about `shift`."""
    spread = np.random.default_rng(0)
    base = {s: 1.5 + 0.2 * spread.standard_normal() for s in experiment.seeds}
    records = []
    for seed in experiment.seeds:
        for arm, by in zip(experiment.arms, shift, strict=False):
            frechet = base[seed] + by * (1 + 0.1 * spread.standard_normal())
            records.append(record(experiment, arm.name, seed, frechet))
    return records


def draw_quickly(monkeypatch):
    """Let the front page's pictures be blank: they take longer than all else that these tests do."""

    def blank(plt, data):
        return plt.figure(figsize=(0.2, 0.2))

    for name in ("sizes", "cost", "loss_by_timestep"):
        monkeypatch.setitem(figures.FIGURES, name, (blank, *figures.FIGURES[name][1:]))


# ---- What the commands say ---------------------------------------------------------------------------------


def fails(capsys, root, *words):
    """run.main must end with status 2 and one line; returns the line."""
    capsys.readouterr()
    try:
        status = run.main(list(words), root)
    except SystemExit as ended:  # the parser's
        status = ended.code
    assert status == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("run.py: "), said.err
    return said.err


def commands(capsys, root, *words):
    capsys.readouterr()
    assert run.main(["001", "--dry_run", *words], root) == 0
    return capsys.readouterr().out.splitlines()


def table(root, name="001-rounding"):
    """Rows of the generated table.csv of an experiment as {arm: {column: cell}}."""
    with open(root / name / "table.csv", newline="") as file:
        return {row["arm"]: row for row in csv.DictReader(file)}


def page(root, name="001-rounding"):
    return (root / name / "README.md").read_text()


def shown(root, name="001-rounding"):
    """Rows of the first table of an experiment's page as {arm: {column: cell}}."""
    lines = [line for line in page(root, name).splitlines() if line.startswith("|")]
    head, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)}


# ---- A train.py --------------------------------------------------------------------------------------------


class Typed:
    """In place of a process of run.py's fork server: the same words typed in a shell."""

    def __init__(self, target, args):
        self.words, self.log, self.folder, self.environment = args
        self.child = None

    def start(self):
        options = dict(cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL)
        with open(self.log, "w") as messages:
            self.child = subprocess.Popen([sys.executable, *self.words], stderr=messages, **options)
        self.sentinel = os.pidfd_open(self.child.pid)
        self.join = self.child.wait

    @property
    def exitcode(self):
        return self.child.poll()


FAKE = r"""
import json, os, signal, sys, time
from pathlib import Path

def value(flag):
    return words[words.index(flag) + 1]

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))

def stop(*_):
    (folder / "stopped").touch()
    sys.exit(130)

words = sys.argv[1:]
if "--sample" in words:
    folder = Path(value("--sample"))
    assert (folder / "summary.json").exists(), "sampled before it was trained"
    write(folder / f"samples/{value('--name')}.json", {
        "scores": {"ema": {"frechet": 3.0}}, "reference": {}, "scoring_seconds": 1.0,
        "ledger": {"flops_share": {"generation": 0.9}},
    })
    sys.exit()
folder = Path(value("--runs")) / value("--name")
folder.mkdir(parents=True)
machine = {"cpu": "c", "gpu": None, "bf16": [], "torch": "2", "python": "3"}
write(folder / "env.json", {**machine, "commit": "b" * 40, "clean": True})
if "nearest" in str(folder) and value("--seed") == "1":
    print(f"50%|##\rtrain.py: the loss is nan at step 2; {folder} is kept", file=sys.stderr)
    sys.exit(2)
if os.environ.get("WAIT"):
    signal.signal(signal.SIGTERM, stop)
    (folder / "started").write_text(str(os.getpid()))
    time.sleep(30)
time.sleep(0.05)
write(folder / "ledger.json", {"flops_share": {}})
lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 101)]
(folder / "metrics.jsonl").write_text("".join(lines) + '{"half')
trace = [{"t": t, "x_min": -t / 3} for t in range(100, -1, -1)]
write(folder / "summary.json", {
    "scores": {"ema": {"frechet": 2.0, "trace": trace}}, "reference": {},
    "seconds": 5.0, "scoring_seconds": 1.0, "images_per_second": 9.0,
    "peak_memory": 1, "bytes_per_parameter": 8,
    "gradient_snr": {"fp8": 20.0, "bf16": 40.0},
})
"""
