"""How a run of --fsdp ends before its time: killed ranks and workers, signals, torchrun, a full disk. Each is
one line, and the same command goes on. Real processes, gloo, tiny nets.
"""

import os
import re
import signal
import time
from pathlib import Path

import cli
import fsdp_runs
import pytest
import rank_server
from cli import ROOT, process
from fsdp_runs import LOW, RUN, TASK
from rank_server import ranks_messages

from harness import checkpoints

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
ranks = rank_server.ranks
run, norms = fsdp_runs.run, fsdp_runs.norms


def test_a_full_disk_of_one_rank_is_one_line_with_a_remedy(norms, ranks):
    for full in (0, 1):
        Path(f"full{full}").write_text("2")
        assert norms(2, "--steps", 5, "--checkpoint_every", 2, name=f"on{full}") == [2, 2]
        (said,) = ranks.said()
        assert f"can't write runs/on{full}/checkpoint.json: File too large" in said
        assert "the one written before is whole; free some space" in said
        assert "Traceback" not in ranks.messages.read_text()
        Path(f"full{full}").unlink()
        assert checkpoints.read(f"runs/on{full}")["step"] == 2
        assert norms(2, "--steps", 5, name=f"on{full}") == [0, 0], ranks_messages(ranks)


def test_a_killed_rank_ends_all_in_one_line_and_fewer_ranks_resume(run, ranks):
    numbers = run.start(4, "--steps", 10**6, "--checkpoint_every", 2)
    checkpointed(ranks)
    os.kill(numbers[2], signal.SIGKILL)
    begun = time.monotonic()
    assert sorted(ranks.wait(number) for number in numbers) == [-9, 2, 2, 2]
    assert time.monotonic() - begun < 60
    (said,) = ranks.said()
    assert "another process of this run has ended; the same command resumes" in said
    assert "Traceback" not in ranks.messages.read_text()
    done = checkpoints.read("runs/run")["step"]
    assert run(2, "--steps", done + 1) == [0, 0], ranks_messages(ranks)
    assert checkpoints.read("runs/run")["step"] == done + 1
    assert not list(Path("runs/run").glob("*.part"))


def test_signals_to_the_process_groups_stop_ranks_with_workers(run, ranks):
    numbers = run.start(2, "--steps", 10**6, "--checkpoint_every", 2, "--workers", 1)
    checkpointed(ranks)
    for number in numbers:
        os.killpg(number, signal.SIGTERM)
    assert [ranks.wait(number) for number in numbers] == [128 + signal.SIGTERM] * 2, ranks_messages(ranks)
    stopped = re.findall(r"stopped at step (\d+) of \d+; the same command resumes", ranks_messages(ranks))
    done = checkpoints.read("runs/run")["step"]
    assert stopped == [str(done)] and not ranks.said()
    assert "Traceback" not in ranks.messages.read_text()
    assert run(2, "--steps", done + 1, "--workers", 1) == [0, 0], ranks_messages(ranks)


def test_a_killed_worker_ends_all_in_one_line(run, ranks):
    numbers = run.start(2, "--steps", 10**6, "--checkpoint_every", 2, "--workers", 1)
    checkpointed(ranks)
    (worker,) = Path(f"/proc/{numbers[1]}/task/{numbers[1]}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert [ranks.wait(number) for number in numbers] == [2, 2]
    (said,) = ranks.said()
    assert "a process that reads data was ended" in said and "the same command resumes" in said
    assert "Traceback" not in ranks.messages.read_text()


def until(true, ranks):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, ranks_messages(ranks)
        time.sleep(0.01)


def checkpointed(ranks):
    until(Path("runs/run/checkpoint.json").exists, ranks)


def test_a_rank_that_is_killed_before_they_met_ends_the_others(ranks):
    """Without torchrun, which would end them; see fsdp_jobs.hurried."""
    Path("lines.py").write_text(TASK)
    words = ["--task", "lines.py:Lines", "--fsdp", *RUN, "DIES"]
    port = ranks.port()
    numbers = [ranks.alone(rank, 2, port, *map(str, words), job="hurried") for rank in (1, 0)]
    begun = time.monotonic()
    assert [ranks.wait(number) for number in numbers] == [-9, 2], ranks_messages(ranks)
    assert time.monotonic() - begun < 10
    (said,) = ranks.said()
    assert "the 2 processes did not meet (" in said and "a process has ended, or was not started" in said
    assert "Traceback" not in ranks.messages.read_text() and not Path("runs").exists()


@pytest.fixture
def torchrun(monkeypatch):
    """torchrun(*flags): it starts train.py on two processes, as a person would, and ends with the test."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # building fused kernels takes longer than these runs
    Path("lines.py").write_text(TASK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, ROOT / "train.py"]
    started = []

    def start(*flags):
        started.append(process(*launch, "--fsdp", "--task", "lines.py:Lines", *RUN, *LOW[:2], *flags))
        return started[-1]

    yield start
    for child in started:
        child.terminate()  # ends its workers too
        child.communicate(timeout=60)


def worker(child, rank):
    """The number of the worker of this rank, of a torchrun that has started its workers."""
    found = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    (number,) = [n for n in found if f"RANK={rank}" in Path(f"/proc/{n}/environ").read_text().split("\0")]
    return int(number)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux alone tells the workers of torchrun")
def test_a_killed_worker_of_torchrun_ends_it_in_our_line_and_the_same_command_finishes(torchrun, ranks):
    words = ["--name", "run", "--steps", 120, "--checkpoint_every", 20]
    first = torchrun(*words)
    end = time.monotonic() + 200  # three processes import their libraries
    while not Path("runs/run/checkpoint.json").exists():
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    os.kill(worker(first, 1), signal.SIGKILL)
    begun = time.monotonic()
    _, said = first.communicate(timeout=60)
    assert first.returncode == 1 and time.monotonic() - begun < 30
    # as the survivor hears of it: by its connection, or by torchrun's SIGTERM; torchrun's page repeats it
    ours = r"^(?! ).*(another process of this run has ended|interrupted); the same command (resumes|starts)"
    assert len(re.findall(ours, said, re.M)) == 1, said
    assert 20 <= checkpoints.read("runs/run")["step"] < 120
    again = ["--task", "lines.py:Lines", "--fsdp", *RUN, *LOW[:2], *words]
    assert ranks(2, None, *again) == [0, 0], ranks_messages(ranks)
    assert "120 steps in" in ranks.printed() and checkpoints.read("runs/run")["step"] == 120
    assert [row["step"] for row in cli.metrics()] == list(range(2, 121, 2))
