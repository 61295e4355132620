"""python tests/forked.py: runs train.py in forks of one process that has imported everything once.

It says "ready", and then takes a JSON list a line. ["run", words, environment, file of messages] answers with
the process's number; the process leads a group of its own. ["wait", number] answers with its exit status,
negative for a signal. Kernels are not compiled.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import torch.utils.tensorboard  # noqa: F401
import torchvision.utils  # noqa: F401

import rounding
import runs
import train


def run(words, environment, messages):
    number = os.fork()
    if number:
        return number
    os.setsid()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    status = 70
    try:
        status = train.main(words)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


if __name__ == "__main__":
    rounding._compiled = common.uncompiled
    runs.environment("cpu")
    print("ready", flush=True)
    for line in sys.stdin:
        act, *arguments = json.loads(line)
        print({"run": run, "wait": wait}[act](*arguments), flush=True)
