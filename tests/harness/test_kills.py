"""Signals and kill -9 to real processes, at any moment: the same command resumes, and the end is bit for bit
that of a run that was left alone. One process at a time has a run's folder.
"""

import errno
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import rank_server
from cli import ROOT, assert_same, checkpoint, command, metrics, process, summary
from rank_server import ask, ranks_messages, until, workers
from tensorboard.summary.writer.record_writer import RecordWriter

from harness.checkpoints import read as read_checkpoint

ranks = rank_server.ranks
RUN = "--task classify --batch_size 8 --sample_every 0 --warmup 0 --threads 1".split()
RUN += ["--log_every", "2"]
LONG = ["--steps", "50", "--pure_bf16", "--stochastic"]  # long enough to be met by a signal


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """The folder of a run of LONG that nothing interrupts."""
    folder = tmp_path_factory.mktemp("left_alone")
    words = [*RUN, *LONG, "--runs", str(folder), "--name", "whole"]
    assert ask("wait", ask("run", words, {}, str(folder / "messages"))) == 0
    return folder / "whole"


@pytest.fixture
def start(ranks):
    """start(*flags) -> the number of a process that trains."""

    def begin(*flags):
        return ranks.one(*RUN, "--runs", os.path.abspath("runs"), "--name", "run", *flags)

    begin.wait, begin.said = ranks.wait, lambda: last_line(ranks.messages)
    return begin


def last_line(messages):
    """Of a file of messages, which holds no traceback."""
    text = messages.read_text()
    assert "Traceback" not in text and "Exception" not in text, text[-3000:]
    return re.split(r"[\r\n]+", text.strip())[-1]


def has_logged(count=2):
    path = Path("runs/run/metrics.jsonl")
    return lambda: path.exists() and path.read_text().count("\n") >= count


def same_run(a, b):
    assert_same(checkpoint(a)["precision"], checkpoint(b)["precision"])
    assert Path(f"runs/{a}/metrics.jsonl").read_text() == Path(f"runs/{b}/metrics.jsonl").read_text()
    assert summary(a)["scores"] == summary(b)["scores"]


# ---- kill -9 -----------------------------------------------------------------------------------------------


def test_killed_at_any_moment_the_same_command_resumes_bit_for_bit(start):
    flags = ["--steps", 12, "--checkpoint_every", 3, "--pure_bf16", "--stochastic", "--workers", 1]
    begun = time.monotonic()
    assert start.wait(start(*flags, "--name", "whole")) == 0
    whole, seed = time.monotonic() - begun, random.randrange(10**6)
    draw = random.Random(seed)
    ends = []
    for _ in range(2):
        number = start(*flags)
        time.sleep(draw.uniform(0, whole))
        os.kill(number, signal.SIGKILL)
        ends.append(start.wait(number))
    assert start.wait(start(*flags)) == 0, (seed, start.said())
    same_run("run", "whole")
    assert not list(Path("runs/run").glob("*.part")), ends
    start.said()


def test_a_worker_that_is_killed_ends_the_run_in_one_line(start):
    number = start("--steps", 10**6, "--workers", 2, "--checkpoint_every", 4)
    until(has_logged(4))
    os.kill(workers(number)[0], signal.SIGKILL)
    assert start.wait(number) == 2
    assert "process that reads data was ended" in start.said()
    done = checkpoint()["step"]
    assert start.wait(start("--steps", done + 1, "--workers", 2)) == 0 and summary()["step"] == done + 1


# ---- Signals -----------------------------------------------------------------------------------------------


SIGNALLED = [(signal.SIGINT, ("--workers", 2)), (signal.SIGHUP, ())]


@pytest.mark.parametrize("number,flags", SIGNALLED, ids=str)
def test_a_signal_to_the_group_leaves_a_checkpoint_and_one_line(number, flags, start, left_alone):
    run = start(*LONG, *flags)
    until(has_logged())
    os.killpg(run, number)
    assert start.wait(run) == 128 + number
    assert re.fullmatch(r"stopped at step \d+ of 50; the same command resumes from there", start.said())
    assert 4 <= checkpoint()["step"] < 50
    assert start.wait(start(*LONG, *flags)) == 0
    Path("runs/whole").symlink_to(left_alone)
    same_run("run", "whole")


def test_a_signal_while_workers_start_is_one_line_too(start):
    draw = random.Random()
    for name in ("first", "second"):
        run = start("--steps", 10**6, "--workers", 2, "--name", name)
        until(Path(f"runs/{name}/.lock").exists)  # this run's own: a lock's file outlives its run
        time.sleep(draw.uniform(0, 0.2))
        os.killpg(run, signal.SIGTERM)
        assert start.wait(run) == 143
        assert "; the same command " in start.said()


def test_a_signal_while_libraries_import_is_one_line(tmp_path, monkeypatch):
    number = signal.SIGHUP
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = process(ROOT / "train.py", *RUN, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    assert child.stdout.readline() == "importing\n"
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert (out, err) == ("", "stopped before anything was written\n")
    assert child.returncode == 128 + number and [p.name for p in tmp_path.glob("*")] == ["torch.py"]


def test_nohup_holds_while_libraries_import(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import signal\nprint(signal.getsignal(signal.SIGHUP).name)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = process(ROOT / "train.py", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert child.communicate(timeout=20)[0] == "SIG_IGN\n"


LAST_WORDS = """
import os, signal, sys
import train

def speaks_first():
    print("asked", file=sys.stderr)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # of torchrun, for one that has died
        os.kill(os.getpid(), signum)
    return True

train.speaks_first = speaks_first
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
status = train.main(["--sample", "runs/nothing.pt"])
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
sys.exit(status)
"""


def end_of(code):
    """(exit status, what was said) of a process that runs this code."""
    number = ask("code", code, os.path.abspath("messages"))
    return ask("wait", number), Path("messages").read_text()


def test_a_signal_during_the_last_words_does_not_cut_them_off():
    status, said = end_of(LAST_WORDS)
    asked, line = said.splitlines()
    assert status == 2 and asked == "asked" and "runs/nothing.pt" in line


AT_ODD_MOMENTS = {
    "within a weakref's callback": """
import os, signal, time, weakref
from harness.ending import Ended, ended_by

class Gone: pass

def callback(_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)

try:
    with ended_by(signal.SIGTERM):
        one = Gone()
        kept = weakref.ref(one, callback)
        del one
        time.sleep(10)
except Ended as ended:
    raise SystemExit(128 + ended.args[0])
""",
    "twice": """
import atexit, os, signal
from harness.ending import ends_once

signal.signal(signal.SIGTERM, ends_once(SystemExit(143)))
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
""",
}


@pytest.mark.parametrize("moment", AT_ODD_MOMENTS)
def test_a_signal_at_an_odd_moment_leaves_no_traceback(moment):
    assert end_of(AT_ODD_MOMENTS[moment]) == (128 + signal.SIGTERM, "")


# ---- The lock ----------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_until_the_first_has_ended_by_whatever(start):
    first = start("--steps", 10**6, "--checkpoint_every", 2, "--workers", 1)
    until(has_logged(4))
    assert start.wait(start("--steps", 10**6)) == 2
    assert f"runs/run is in use by process {first}" in start.said()
    os.kill(first, signal.SIGKILL)  # its worker lives on for seconds
    assert start.wait(first) == -9
    done = checkpoint()["step"]
    assert start.wait(start("--steps", done + 1)) == 0 and summary()["step"] == done + 1
    assert [row["step"] for row in metrics()][:4] == [2, 4, 6, 8]
    assert command(*RUN, "--name", "run", "--steps", done + 1) == 0  # and nothing of it stays


def test_where_there_are_no_locks_it_says_so_and_goes_on(monkeypatch, capsys):
    def absent(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", absent)
    assert command(*RUN, "--name", "run", "--steps", 1) == 0
    assert "can't be locked here (No locks available)" in capsys.readouterr().err


def test_ranks_share_one_lock_and_one_that_is_killed_ends_them_all(start, ranks):
    flags = [*RUN, "--name", "run", "--steps", 10**6, "--checkpoint_every", 2]
    first = ranks.start(2, None, *flags)
    messages = ranks.messages
    until(has_logged(2))
    assert ranks(2, None, *flags) == [2, 2]
    assert "runs/run is in use by process" in last_line(ranks.messages)
    os.kill(first[1], signal.SIGKILL)
    assert ranks.wait(first[1]) == -9 and ranks.wait(first[0]) == 2
    assert "another process of this run has ended; the same command resumes" in last_line(messages)
    done = checkpoint()["step"]
    assert start.wait(start("--steps", done + 1)) == 0  # on one rank, too


def test_a_rank_killed_at_any_moment_under_fsdp_resumes_bit_for_bit(ranks):
    flags = [*RUN, "--fsdp", "--steps", 8, "--checkpoint_every", 2, "--pure_bf16", "--stochastic", "--name"]
    assert ranks(2, None, *flags, "whole") == [0, 0], ranks_messages(ranks)
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    numbers = ranks.start(2, None, *flags, "run")
    until(has_logged(draw.randrange(3)))
    time.sleep(draw.uniform(0, 0.1))
    killed = numbers.pop(draw.randrange(2))
    os.kill(killed, signal.SIGKILL)
    # as torchrun ends the others; one that still waits for the first to come hears no SIGTERM
    os.kill(numbers[0], signal.SIGTERM)
    late = threading.Timer(5, os.kill, (numbers[0], signal.SIGKILL))
    late.start()
    ends = ranks.wait(killed), ranks.wait(numbers[0])
    late.cancel()
    assert ranks(2, None, *flags, "run") == [0, 0], ranks_messages(ranks)
    one, other = (read_checkpoint(f"runs/{name}") for name in ("run", "whole"))
    assert one["step"] == other["step"] == 8
    assert_same(one["precision"], other["precision"])
    assert metrics("run") == metrics("whole") and summary("run")["scores"] == summary("whole")["scores"]
    assert not list(Path("runs/run").glob("*.part")), ends


# ---- A full disk -------------------------------------------------------------------------------------------


def test_a_disk_that_fills_while_curves_are_written_is_one_line(monkeypatch, capsys):
    written = []

    def full(self, data):
        written.append(data)
        if len(written) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest has one of its own
    assert command(*RUN, "--name", "run", "--steps", 100, "--checkpoint_every", 2) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("train.py: ") == 1
    assert "no space left on the device" in err.strip().split("\n")[-1]
    assert checkpoint()["step"] >= 2
