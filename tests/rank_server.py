"""Fixtures and questions of tests whose ranks are real processes: forks of tests/many_ranks.py."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import many_ranks
import pytest


def start_server():
    """The line to a fork of this process that many_ranks serves. It ends with this process."""
    ours, its = socket.socketpair()
    if not os.fork():
        ours.close()
        many_ranks.serve(its.makefile("rw"))
    its.close()
    return ours.makefile("rw")


# Before any test runs: a process with threads may be forked while one of them holds a lock.
SERVER = start_server()


def ask(*words):
    """What the server answers."""
    print(json.dumps(words), file=SERVER, flush=True)
    return json.loads(SERVER.readline())


@pytest.fixture
def ranks():
    """ranks(world, job or None, *words) -> exit statuses; ranks.start gives process numbers instead."""
    running = []

    def start(world, job, *words):
        words = [word if job else str(word) for word in words]
        begin.messages = Path(f"messages-{len(list(Path().glob('messages-*')))}").absolute()
        found = ask("ranks", world, job, words, str(begin.messages), os.getcwd())
        running.extend(found)
        return found

    def one(*words):
        begin.messages = Path(f"messages-{len(list(Path().glob('messages-*')))}").absolute()
        running.append(ask("run", list(map(str, words)), {}, str(begin.messages)))
        return running[-1]

    def alone(number, world, port, *words, job=None):
        begin.messages = Path("messages-alone").absolute()
        running.append(ask("rank", number, world, port, job, words, str(begin.messages), os.getcwd()))
        return running[-1]

    def torchrun(world, *words):
        begin.messages = Path("messages-torchrun").absolute()
        running.append(ask("torchrun", world, list(map(str, words)), str(begin.messages), os.getcwd()))
        return running[-1]

    def wait(number):
        running.remove(number)
        return ask("wait", number)

    def begin(world, job, *words):
        return [wait(number) for number in start(world, job, *words)]

    def said():
        return re.findall(r"train\.py: [^\r\n]+", begin.messages.read_text())

    def printed():
        return Path(f"{begin.messages}.out").read_text()

    begin.start, begin.wait, begin.said, begin.printed = start, wait, said, printed
    begin.one, begin.alone, begin.torchrun, begin.port = one, alone, torchrun, lambda: ask("port")
    yield begin
    for number in list(running):
        os.killpg(number, signal.SIGKILL)
        wait(number)


def told(ranks, world, job, *words):
    """What the first rank of a job found."""
    assert ranks(world, job, *words, "told.json") == [0] * world, ranks_messages(ranks)
    return json.loads(Path("told.json").read_text())


def ranks_messages(ranks):
    """What the ranks of the last job said."""
    return ranks.messages.read_text()[-9000:]


def until(true, said=str):
    """Wait. said: what to show where it does not come true."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, said()
        time.sleep(0.01)


def workers(number):
    """The processes that a process has forked, in order."""
    return list(map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split()))
