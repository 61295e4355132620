"""What a process of `bench.py advice` does: it trains a net of train.py for two steps and prints its peak.

It imports no more than train.py does, for libraries are most of what a process holds of a small net.
"""

import json
import sys
from pathlib import Path

import torch

import strategies
from lowprec.advice import timing
from lowprec.recipes import recipe


def main(cell):
    """cell: JSON of flags, recipe, examples a step, threads."""
    words, flags, batch, threads = json.loads(cell)
    torch.set_num_threads(threads)
    timing.seconds_a_step(strategies.advice_subject(words), recipe(**flags), batch, steps=1)
    print(peak())


def peak():
    """Bytes that this process had in memory at most; Linux alone says it."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
