"""Do the tests find faults? Plants one fault after another in a copy of the repository and runs the tests.

    python tests/mutations.py                  each against its 3 nearest files of tests, until one fails
    python tests/mutations.py --open           those alone that nothing has killed so far
    python tests/mutations.py --only NAME      this one alone
    python tests/mutations.py --list           all of them, by hand and by rule, and where they stand
    python tests/mutations.py --report         those that nothing has killed so far

A fault is caught when a test fails, or hangs. The exit status is 1 if more than ALLOWED survive. A line of
mutations.jsonl says of each mutation which tests killed it (these are tried first) and which missed it. One
that changes nothing that a test could see has the reason there as "equivalent", and is not tried.
Nothing else is written outside a temporary folder.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mutations_by_hand
import mutations_by_rule
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).with_suffix(".jsonl")
ALLOWED = 10  # mutations that may survive
LIMIT = 180  # seconds that one file of tests may take
NOTHING_RAN = pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR
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


def tests_pass(words, copy, limit):
    """Whether pytest with these words passes in the copy, in a process of its own; None where no test ran.

    The process is forked from this one, which has imported nothing of the repository.
    """
    pid = os.fork()
    if pid == 0:
        _become_pytest(words, copy)
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


def _become_pytest(words, copy):
    os.setsid()  # what the tests start ends with them
    os.chdir(copy)
    sys.path = [str(copy), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    for name in ("budgets", "mutations_by_hand", "mutations_by_rule"):  # the copy has its own
        del sys.modules[name]
    output = os.open(copy / "pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
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


# ---- All of them -------------------------------------------------------------------------------------------


def words_of(test):
    """["tests/FILE"] or ["tests/FILE", "-k", CHOSEN] of a text of a record."""
    name, _, chosen = test.partition(" ")
    return [f"tests/{name}", *(["-k", chosen] if chosen else [])]


def everything(folder):
    """{name: Mutation} of all, by hand and by rule."""
    found = [mutations_by_hand.found(row, folder) for row in mutations_by_hand.BY_HAND]
    found = [mutation for mutation in found if mutation] + mutations_by_rule.chosen(folder)
    return {mutation.name: mutation for mutation in found}


def read_records(mutations):
    """{name: its record} of these mutations."""
    records = {name: dict(mutation=name, killed_by=[], missed_by=[]) for name in mutations}
    for row in map(json.loads, RECORDS.read_text().splitlines()):
        if row["mutation"] in records:
            records[row["mutation"]] = row
    return records


def nearest(mutation, record, folder):
    """Tests by how likely they see a mutation, as words for pytest: those that killed it before, then files
    by how often they name its function and its module.
    """
    room, _, module = mutation.file.removesuffix(".py").replace("/", ".").rpartition(".")
    imported = re.compile(
        rf"{room}\.{module} import|from {room} import .*\b{module}\b|import {module}$", re.M
    )
    function = re.compile(rf"\b{mutation.function.rpartition('.')[2].strip('_') or module}\b")
    scores = {}
    for path in (folder / "tests").rglob("test_*.py"):
        if path.name not in NO_TESTS_OF_CODE:
            text = path.read_text()
            of_its_name = path.stem.removeprefix("test_") in (module, f"{module}s")
            named = 30 * of_its_name + 20 * bool(imported.search(text)) + len(function.findall(text))
            in_its_room = path.parent.name == room.partition(".")[0]
            scores[str(path.relative_to(folder / "tests"))] = named * (2 if in_its_room else 1)
    near = sorted((name for name in scores if scores[name]), key=scores.get, reverse=True)
    return list(dict.fromkeys((*record["killed_by"], *near)))


def try_all(copy, mutations, records, files, minutes, again=True):
    """Try mutations until the time is over, each against its nearest tests until some fail. Returns how many
    survive. again: also against tests that missed them before.
    """
    end = time.monotonic() + 60 * minutes
    survivors = 0
    for name, mutation in mutations.items():
        record, survives = records[name], True
        tests = nearest(mutation, record, copy)[:files]
        for test in tests if again else [test for test in tests if test not in record["missed_by"]]:
            left = end - time.monotonic()
            with planted(mutation, copy):
                survives = tests_pass(words_of(test), copy, min(LIMIT, left)) is not False
            if time.monotonic() > end:
                return survivors  # a test that was not done says nothing
            for known, here in (("missed_by", survives), ("killed_by", not survives)):
                record[known] = [*(old for old in record[known] if old != test), *([test] if here else [])]
            print(f"{test} {'misses' if survives else 'kills'} {line_of(mutation, copy)}", flush=True)
            if not survives:
                break
        survivors += survives
        RECORDS.write_text("".join(json.dumps(records[known]) + "\n" for known in sorted(records)))
    return survivors


def report(mutations):
    records = read_records(mutations)
    killed = [name for name in records if records[name]["killed_by"]]
    missed = [name for name in records if records[name]["missed_by"] and name not in killed]
    alike = [name for name in records if "equivalent" in records[name]]
    missed = [name for name in missed if name not in alike]
    print(
        f"{len(killed)} of {len(records)} are killed, {len(alike)} change nothing, "
        f"{len(missed)} survived what was tried:"
    )
    for name in missed:
        print(f"{line_of(mutations[name])}\n    by {', '.join(records[name]['missed_by'])}")


def line_of(mutation, folder=ROOT):
    at = f"{mutation.file}:{mutation.lines[0]} {mutation.function}"
    text = (folder / mutation.file).read_bytes()[mutation.start : mutation.end].decode()
    return f"{mutation.name} {at}: {' '.join(text.split())} -> {' '.join(mutation.new.split())}"


# ---- The command -------------------------------------------------------------------------------------------


def arguments(known):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help="these alone; see --list")
    parser.add_argument("--open", action="store_true", help="those alone that nothing has killed so far")
    parser.add_argument("--files", type=int, default=3, help="of tests, that each is tried against")
    parser.add_argument("--minutes", type=float, default=600, help="how long to go on")
    parser.add_argument("--list", action="store_true", help="print all and where they stand, run nothing")
    parser.add_argument("--report", action="store_true", help="print those that nothing has killed so far")
    return parser.parse_args()


def main():
    mutations = everything(ROOT)
    given = arguments(mutations)
    for row in mutations_by_hand.BY_HAND:
        if row.name not in mutations:
            print(f"{row.name}: its text stands nowhere, or in several places")
    if given.list:
        for mutation in mutations.values():
            print(line_of(mutation))
        return 0
    if given.report:
        report(mutations)
        return 0
    records = read_records(mutations)
    chosen = given.only or [name for name in mutations if "equivalent" not in records[name]]
    if given.open:
        chosen = [name for name in chosen if not records[name]["killed_by"]]
        chosen.sort(key=lambda name: len(records[name]["missed_by"]))
    sys.dont_write_bytecode = True  # a file that changes within a second would be taken for its old self
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)
    for package in ("torch._dynamo", "torch._inductor.config", "bitsandbytes", "torchao"):
        importlib.import_module(package)  # here once, and not in each process
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        copy_repository(copy)
        there = everything(copy)
        chosen = {name: there[name] for name in chosen}
        survivors = try_all(copy, chosen, records, given.files, given.minutes, again=not given.open)
    print(f"{survivors} of {len(chosen)} survive")
    return int(survivors > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
