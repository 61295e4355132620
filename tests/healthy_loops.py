"""More than 200 healthy training loops under the Watch: each alarm is printed, and is a false one.

    pip install pytorch_optimizer timm schedulefree prodigyopt lion-pytorch came-pytorch diffusers
    WATCH_STEPS=60 python tests/healthy_loops.py     all of them: about ten minutes on one core
    python tests/healthy_loops.py timm critic        those whose names hold one of the words, of 24 steps

pytest does not collect it: it needs the packages above, and names the loops that a missing one keeps from
running. A loop is healthy when it is fp32, or a recipe that loses nothing, and does what its authors meant.
Notes of the Watch are no alarms. Exit status: 1 where there was an alarm.
"""

import collections
import contextlib
import io
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from healthy import nets, optimizers, rules, shared, steps, weights  # noqa: F401 - they enter their loops


def findings_of(name):
    """(alarms, number of notes) of a loop."""
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = shared.LOOPS[name]().findings()
    alarms = [finding for finding in found if finding.severity != "note"]
    return alarms, len(found) - len(alarms)


def main(words):
    torch.set_num_threads(1)
    chosen = [name for name in shared.LOOPS if not words or any(word in name for word in words)]
    names = collections.defaultdict(list)  # outcome -> loops
    start = time.perf_counter()
    for name in chosen:
        names[outcome(name)].append(name)
    counts = ", ".join(f"{len(found)} {what}" for what, found in sorted(names.items()))
    print(f"\n{len(chosen)} loops in {time.perf_counter() - start:.0f} s: {counts}")
    for what in ("with an alarm", "not run"):
        print(f"{what}: {', '.join(names[what]) or 'none'}")
    return 1 if names["with an alarm"] else 0


def outcome(name):
    """Run a loop and print what came of it."""
    try:
        alarms, notes = findings_of(name)
    except Exception as error:  # of a package, which may be another version
        print(f"{name:45} not run: {type(error).__name__}: {str(error)[:150]}", flush=True)
        return "not run"
    what = "with an alarm" if alarms else "healthy"
    print(f"{name:45} {what}{f', {notes} notes' if notes else ''}", flush=True)
    by_site = collections.defaultdict(list)
    for alarm in alarms:
        by_site[alarm.site].append(alarm)
    for site, found in by_site.items():
        first = found[0]
        place = f"{site} of {len(found)} tensors, as {first.tensor}"
        print(f"    {first.severity} {place}: {first.text}", flush=True)
    return what


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
