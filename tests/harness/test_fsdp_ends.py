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
from fsdp_runs import LOW, RUN, TASK
from rank_server import ranks_messages, until, workers

from harness import checkpoints

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
    (worker,) = workers(numbers[1])
    os.kill(worker, signal.SIGKILL)
    assert [ranks.wait(number) for number in numbers] == [2, 2]
    (said,) = ranks.said()
    assert "a process that reads data was ended" in said and "the same command resumes" in said
    assert "Traceback" not in ranks.messages.read_text()


def checkpointed(ranks):
    until(Path("runs/run/checkpoint.json").exists, lambda: ranks_messages(ranks))


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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux alone tells the workers of torchrun")
def test_a_killed_worker_of_torchrun_ends_it_in_our_line_and_the_same_command_finishes(ranks):
    Path("lines.py").write_text(TASK)
    words = ["--fsdp", "--task", "lines.py:Lines", *RUN, *LOW, "--name", "run", "--checkpoint_every", 4]
    first = ranks.torchrun(2, *words, "--steps", 10**6)
    checkpointed(ranks)
    _, last = workers(first)
    os.kill(last, signal.SIGKILL)
    begun = time.monotonic()
    assert ranks.wait(first) and time.monotonic() - begun < 30
    # as the survivor hears of it: by its connection, or by torchrun's SIGTERM; torchrun's page repeats it
    ours = r"^(?! ).*(another process of this run has ended|interrupted); the same command (resumes|starts)"
    assert len(re.findall(ours, ranks_messages(ranks), re.M)) == 1, ranks_messages(ranks)
    done = checkpoints.read("runs/run")["step"]
    assert ranks(2, None, *words, "--steps", done + 2) == [0, 0], ranks_messages(ranks)
    assert checkpoints.read("runs/run")["step"] == done + 2
    assert [row["step"] for row in cli.metrics()] == list(range(2, done + 3, 2))
