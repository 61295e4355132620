"""Questions that were asked once, beside the records that answer them. bench.py runs them too.

    files()     all of benchmarks/ and of this folder; COMMAND is one of bench.py, TABLES are those of docs/
"""

import importlib
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path

from lowprec.errors import Refused

ROOT = Path(__file__).resolve().parent.parent.parent


def files():
    found = []
    for package in ("benchmarks", __name__):
        for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            found.append(importlib.import_module(file.name))
    return found


def printed_by_python(words):
    """What Python prints with these words, in a new process. Raises Refused where it fails."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Refused(f"python {shlex.join(words)}: exit status {done.returncode}: {lines[-1]}")
    return done.stdout
