"""Forks of a process that has imported everything once; many_ranks.py lets train.py run in them."""

import os
import signal
import sys
import time

import torch

LONGEST = 100  # seconds that a process may take to end


def forked(act, environment, messages):
    """The number of a process that ends with the status that act() gives; its output goes to `messages`."""
    number = os.fork()
    if number:
        return number
    os.setsid()
    # torch makes its pool of threads anew after a fork, which two threads of autograd must not do at once
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    status = 70
    try:
        status = act()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status or 0)


def wait(number):
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
