"""The norm of a net's weights over the steps of its run, read from its checkpoints while it trains.

    python experiments/058-hundred-thousand-steps/norms.py           beside `run.py 058`: writes norms.jsonl
    python experiments/058-hundred-thousand-steps/norms.py --table   what it holds, as a table

A run keeps its last checkpoint alone, one each 5,000 steps here, so this has to look while it lasts. Stop it
by Ctrl-C. A line holds the name of the run, the step, and the Euclidean norm of all matrices and kernels,
which weight decay is meant for, in fp64.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from harness.checkpoints import read  # noqa: E402
from lowprec.errors import Refused  # noqa: E402

NORMS = HERE / "norms.jsonl"
SHOWN = range(20_000, 100_001, 20_000)


def known():
    """{(run, step): norm} of norms.jsonl."""
    if not NORMS.exists():
        return {}
    rows = [json.loads(line) for line in NORMS.read_text().splitlines()]
    return {(row["run"], row["step"]): row["norm"] for row in rows}


def norm(weights):
    squares = [value.double().square().sum().item() for value in weights.values() if value.dim() > 1]
    return math.sqrt(sum(squares))


def look(runs, found):
    """Add what the checkpoints in the folder `runs` hold to norms.jsonl and to `found`."""
    for folder in sorted(runs.glob("058-*/")):
        try:
            checkpoint = read(folder)
        except Refused:  # it has none yet
            continue
        key = folder.name, checkpoint["step"]
        if key not in found:
            found[key] = norm(checkpoint["precision"]["model"])
            with NORMS.open("a") as file:
                row = {"run": key[0], "step": key[1], "norm": found[key]}
                file.write(json.dumps(row) + "\n")


def table(found):
    """Norms of each arm at some steps, the mean of its seeds."""
    by_arm = {}
    for (run, step), value in found.items():
        arm = run.removeprefix("058-").rpartition("-seed")[0]
        by_arm.setdefault(arm, {}).setdefault(step, []).append(value)
    print("| arm |", " | ".join(f"step {step:,}" for step in SHOWN), "|")
    print("| --- |", " | ".join("---" for _ in SHOWN), "|")
    for arm, values in by_arm.items():
        cells = [f"{statistics.mean(values[step]):.2f}" if step in values else "-" for step in SHOWN]
        print(f"| {arm} |", " | ".join(cells), "|")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiments", help="folder of the runs")
    parser.add_argument("--table", action="store_true", help="print what norms.jsonl holds")
    args = parser.parse_args()
    found = known()
    if args.table:
        table(found)
        return
    while True:
        look(args.runs, found)
        time.sleep(20)


if __name__ == "__main__":
    main()
