"""python tests/forked.py: runs train.py in forks of one process that has imported everything once.

It says "ready", and then takes a JSON list a line. ["run", words, environment, file of messages] answers with
the process's number; the process leads a group of its own. ["wait", number] answers with its exit status,
negative for a signal; a process that does not end is killed. Kernels are not compiled.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import common
import matplotlib.figure  # noqa: F401  these are what runs import once they need it
import sklearn.datasets  # noqa: F401
import sklearn.metrics  # noqa: F401
import sklearn.model_selection  # noqa: F401
import torch
import torch.utils.tensorboard  # noqa: F401
import torchvision.utils  # noqa: F401

import train
from harness import run_folder
from lowprec.kernels import compiled

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


def run(words, environment, messages):
    return forked(lambda: train.main(words), environment, messages)


def wait(number):
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
    compiled._compiled = common.uncompiled
    cli.shorten()
    run_folder.environment("cpu")
    gc.freeze()  # what was imported is no garbage: no fork looks through it
    print("ready", flush=True)
    for line in sys.stdin:
        act, *arguments = json.loads(line)
        print({"run": run, "wait": wait}[act](*arguments), flush=True)
