"""Do the tests find faults? Plants one fault after another in a copy of the repository and runs the tests.

    python tests/mutations.py                      those placed by hand: some five minutes on one core
    python tests/mutations.py --only NAME NAME     these alone
    python tests/mutations.py --sound              run the chosen tests without any fault: all must pass
    python tests/mutations.py --list               all of them, by hand and by rule, and where they stand
    python tests/mutations.py --run --minutes 60   go on with the matrix: each against all tests of its line
    python tests/mutations.py --report             what the matrix says

A fault is caught when a test fails, or hangs. Of those by hand the exit status is 1 if more than ALLOWED
survive. The matrix is mutations.jsonl, a line a file of tests: names of the mutations that it kills, that it
misses, and that are left to try. Nothing else is written outside a temporary folder.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import mutations_by_hand
import mutations_by_rule
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
MATRIX = Path(__file__).with_suffix(".jsonl")
ALLOWED = 5  # faults placed by hand that may survive
LIMIT = 180  # seconds that one file of tests may take
LONGEST = 1200  # the same without any fault, when its row of the matrix is made
NOTHING_RAN = pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR
# files of tests that the matrix begins with: they take seconds and run much of the core
FIRST = "rounding recipes adamw optim optimizers moments formats average eco groups ledger flags".split()
NO_TESTS_OF_CODE = "test_budgets.py", "test_pages.py", "test_rooms.py", "test_wheel.py"


# ---- Running -----------------------------------------------------------------------------------------------


def copy_repository(folder):
    """Copy the files that git knows, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def tests_pass(words, copy, limit, lines=None):
    """Whether pytest with these words passes in the copy, in a process of its own; None where no test ran.

    The process is forked from this one, which has imported nothing of the repository. lines: a file of
    run_lines.py.
    """
    pid = os.fork()
    if pid == 0:
        _become_pytest(words, copy, lines)
    end = time.monotonic() + limit
    code = None
    while code is None and time.monotonic() < end:
        time.sleep(0.1)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
    if code is None:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None if code in NOTHING_RAN else code == pytest.ExitCode.OK


def _become_pytest(words, copy, lines):
    os.setsid()  # what the tests start ends with them
    os.chdir(copy)
    sys.path = [str(copy), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    for name in ("budgets", "mutations_by_hand", "mutations_by_rule"):  # the copy has its own
        del sys.modules[name]
    output = os.open(copy / "pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if lines:
        os.environ.update(RUN_LINES=str(lines), PYTHONPATH=str(lines.parent))  # sitecustomize.py is there
        sys.path.append(str(copy / "tests"))
        __import__("run_lines")
    status = 1
    try:
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words]))
    finally:
        os._exit(status)


@contextlib.contextmanager
def planted(mutation, copy):
    """A context in which the mutation stands in the copy."""
    file = copy / mutation.file
    sound = file.read_text()
    file.write_text(mutation.apply(sound))
    try:
        yield
    finally:
        file.write_text(sound)


# ---- Placed by hand ----------------------------------------------------------------------------------------


def words_of(test):
    """["tests/FILE"] or ["tests/FILE", "-k", CHOSEN] of a text of `ByHand.tests`."""
    name, _, chosen = test.partition(" ")
    return [f"tests/{name}", *(["-k", chosen] if chosen else [])]


def passes(test, copy):
    found = tests_pass(words_of(test), copy, LIMIT)
    if found is None:
        sys.exit(f"mutations: pytest chose no test by {test}")
    return found


def catcher(row, mutation, copy):
    """The file of tests that fails under the mutation."""
    with planted(mutation, copy):
        for test in row.tests:
            if not passes(test, copy):
                return test.partition(" ")[0]
    return "SURVIVED"


def try_all(chosen, copy):
    """Print what catches each; the number of those that survive, or that stand nowhere."""
    survivors = 0
    for row, mutation in chosen:
        start = time.monotonic()
        caught = catcher(row, mutation, copy) if mutation else "LOST"
        survivors += caught in ("LOST", "SURVIVED")
        print(f"{row.name:<42}{row.file:<36}{caught:<34}{time.monotonic() - start:5.0f} s", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return survivors


def fail_without_fault(chosen, copy):
    """Print the chosen tests that fail in the copy as it is; their number."""
    tests = dict.fromkeys(test for row, _ in chosen for test in row.tests)
    failing = [test for test in tests if not passes(test, copy)]
    for test in failing:
        print(f"fails without any fault: {test}")
    print(f"{len(tests) - len(failing)} of {len(tests)} choices of tests pass")
    return len(failing)


# ---- The matrix --------------------------------------------------------------------------------------------


def everything(folder):
    """{name: Mutation} of all, by hand and by rule."""
    found = [mutations_by_hand.found(row, folder) for row in mutations_by_hand.BY_HAND]
    found = [mutation for mutation in found if mutation] + mutations_by_rule.chosen(folder)
    return {mutation.name: mutation for mutation in found}


def files_of_tests(folder):
    """Names of the files of tests, the cheap ones first."""
    paths = [path for path in (folder / "tests").rglob("test_*.py") if path.name not in NO_TESTS_OF_CODE]
    first = [f"test_{name}.py" for name in FIRST]

    def order(path):
        return first.index(path.name) if path.name in first else len(first), path.stat().st_size

    return [str(path.relative_to(folder / "tests")) for path in sorted(paths, key=order)]


def read_matrix():
    """{file of tests: its row}."""
    lines = MATRIX.read_text().splitlines() if MATRIX.exists() else []
    return {row["tests"]: row for row in map(json.loads, lines)}


def write_matrix(rows):
    new = MATRIX.with_suffix(".new")
    new.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))
    new.replace(MATRIX)


def go_on(copy, mutations, minutes):
    """Fill the matrix until the time is over: first with what no file of tests kills so far."""
    end = time.monotonic() + 60 * minutes
    rows = read_matrix()
    list_now = hashlib.sha256(" ".join(sorted(mutations)).encode()).hexdigest()[:10]
    traced = {}  # file of tests -> what trace() says of it
    for whole in (False, True):
        for name in files_of_tests(copy):
            is_new = name not in rows or rows[name]["list"] != list_now
            if name not in traced and (is_new or left_of(rows, name, whole)) and time.monotonic() < end:
                traced[name] = trace(name, copy, mutations)
                rows[name] = {**new_row(name, mutations, traced[name], rows.get(name)), "list": list_now}
                write_matrix(rows)
            for left in left_of(rows, name, whole) if name in traced else ():
                if time.monotonic() < end:
                    survives = try_one(mutations[left], name, traced[name], copy)
                    rows[name]["left"].remove(left)
                    rows[name]["misses" if survives else "kills"].append(left)
                    write_matrix(rows)


def left_of(rows, name, whole):
    """The mutations to try on a file of tests: all that it runs, or those that no other kills."""
    caught = {known for row in rows.values() for known in row["kills"]}
    return [left for left in rows[name]["left"] if whole or left not in caught]


def try_one(mutation, name, traced, copy):
    """Whether a mutation survives a file of tests: those of it that run its line."""
    words, limit = traced.runs[mutation.name], 30 + 3 * traced.seconds
    with planted(mutation, copy):
        survives = None
        if None not in words:  # else several tests share what runs it
            survives = tests_pass(sorted(words), copy, limit)
        if survives is None:
            survives = tests_pass([f"tests/{name}"], copy, limit)
    print(f"{name} {'misses' if survives else 'kills'} {line_of(mutation, copy)}", flush=True)
    return survives


class Traced(NamedTuple):
    """A file of tests without any fault. runs: {mutation: tests that run its line, None for all of them}."""

    sound: bool
    seconds: float
    runs: dict


def trace(name, copy, mutations):
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.json"
        shutil.copy(ROOT / "tests" / "run_lines.py", lines.with_name("sitecustomize.py"))
        wanted = {}
        for mutation in mutations.values():
            of_file = wanted.setdefault(str(copy / mutation.file), {})
            for line in range(mutation.lines[0], mutation.lines[1] + 1):
                of_file.setdefault(line, []).append(mutation.name)
        lines.write_text(json.dumps(wanted))
        start = time.monotonic()
        sound = tests_pass([f"tests/{name}"], copy, LONGEST, lines)
        seconds = round(time.monotonic() - start, 1)
        seen = lines.with_name("lines.json.seen")
        runs = {}
        for line in seen.read_text().splitlines() if seen.exists() else ():
            known, _, test = line.partition(" ")
            runs.setdefault(known, set()).add(test or None)
    return Traced(bool(sound), seconds, runs)


def new_row(name, mutations, traced, old):
    """The row of a file of tests, with what is known of it."""
    old = old or dict(kills=[], misses=[])
    row = {what: [known for known in old[what] if known in mutations] for what in ("kills", "misses")}
    left = traced.runs.keys() - {*row["kills"], *row["misses"]} if traced.sound else ()
    return dict(tests=name, seconds=traced.seconds, sound=traced.sound, **row, left=sorted(left))


def report(mutations):
    rows = read_matrix()
    killers = {name: [] for name in mutations}
    waiting = Counter()
    for test, row in rows.items():
        for name in row["kills"]:
            killers.get(name, []).append(test)
        waiting.update(row["left"])
    missed = {name for row in rows.values() for name in row["misses"]}
    print(f"{'file of tests':<44}{'seconds':>8}{'kills':>7}{'alone':>7}{'misses':>8}{'left':>6}")
    for test, row in rows.items():
        known = [name for name in row["kills"] if name in mutations]
        alone = sum(killers[name] == [test] for name in known)
        counts = f"{len(known):>7}{alone:>7}{len(row['misses']):>8}{len(row['left']):>6}"
        print(f"{test:<44}{row['seconds']:>8}{counts}{'' if row['sound'] else '  fails without any fault'}")
    groups = {
        "caught": [name for name in mutations if killers[name]],
        "survived all that ran their lines so far": [
            name for name in mutations if name in missed and not killers[name] and not waiting[name]
        ],
        "not caught yet": [name for name in mutations if waiting[name] and not killers[name]],
    }
    known = {name for names in groups.values() for name in names}
    groups["run by no file of tests so far"] = [name for name in mutations if name not in known]
    for title, names in groups.items():
        print(f"\n{title}: {len(names)} of {len(mutations)}")
        if title != "caught":
            for name in names:
                print(line_of(mutations[name]))
    print(f"\n{len(rows)} of {len(files_of_tests(ROOT))} files of tests have a row")


def line_of(mutation, folder=ROOT):
    at = f"{mutation.file}:{mutation.lines[0]} {mutation.function}"
    text = (folder / mutation.file).read_bytes()[mutation.start : mutation.end].decode()
    return f"{mutation.name} {at}: {' '.join(text.split())} -> {' '.join(mutation.new.split())}"


# ---- The command -------------------------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, placed by hand, alone")
    parser.add_argument("--list", action="store_true", help="print all and where they stand, run nothing")
    parser.add_argument("--sound", action="store_true", help="run the chosen tests without any fault")
    parser.add_argument("--run", action="store_true", help="go on with the matrix")
    parser.add_argument("--minutes", type=float, default=60, help="of --run")
    parser.add_argument("--report", action="store_true", help="print what the matrix says")
    given = parser.parse_args()
    unknown = set(given.only or ()) - {row.name for row in mutations_by_hand.BY_HAND}
    if unknown:
        parser.error(f"no mutation placed by hand has the name {min(unknown)}; see --list")
    return given


def by_hand(folder, names):
    """[(row, its Mutation or None)], and a line for each that is not where its row says."""
    chosen = [row for row in mutations_by_hand.BY_HAND if not names or row.name in names]
    chosen = [(row, mutations_by_hand.found(row, folder)) for row in chosen]
    for row, mutation in chosen:
        if mutation is None:
            print(f"{row.name}: its text stands nowhere, or in several places")
        elif mutation.file != row.file:
            print(f"{row.name}: moved from {row.file} to {mutation.file}")
    return chosen


def main():
    given = arguments()
    chosen = by_hand(ROOT, given.only)
    if given.list:
        for mutation in everything(ROOT).values():
            print(line_of(mutation))
        return 0
    if given.report:
        report(everything(ROOT))
        return 0
    sys.dont_write_bytecode = True  # a file that changes within a second would be taken for its old self
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        copy_repository(copy)
        if given.run:
            os.nice(15)
            for package in ("torch._dynamo", "torch._inductor.config", "bitsandbytes", "torchao"):
                importlib.import_module(package)  # here once, and not in each process
            go_on(copy, everything(copy), given.minutes)
            return 0
        if given.sound:
            return int(fail_without_fault(chosen, copy) > 0)
        return int(try_all(chosen, copy) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
