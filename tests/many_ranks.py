"""python tests/many_ranks.py: runs jobs of fsdp_jobs.py, and train.py, on several ranks: forks of one process
that has imported everything once.

It says "ready", and then takes a JSON list a line. ["ranks", world, job or null, words, file of messages,
folder] answers with the process numbers of the ranks; ["rank", number, world, port, ...] starts one of them,
at a port that ["port"] tells; ["wait", number] answers with an exit status, negative for a signal. A rank
that does not end is killed. Kernels are not compiled.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import fsdp_jobs
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.utils.tensorboard  # noqa: F401
import torchvision.utils  # noqa: F401

import rounding
import runs
import train
from formats import FORMATS

LONGEST = 100  # seconds that a rank may take to end


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ranks(world, *more):
    place = port()
    return [rank(number, world, place, *more) for number in range(world)]


def rank(number, world, port, job, words, messages, folder):
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.chdir(folder)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    signal.alarm(LONGEST)
    # torch makes its pool of threads anew after a fork, which two threads of autograd must not do at once
    torch.set_num_threads(1)
    status = 70
    try:
        status = train.main(words) if job is None else getattr(fsdp_jobs, job)(*words)
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
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


if __name__ == "__main__":
    rounding._compiled = common.uncompiled
    torch.set_num_threads(1)
    runs.environment("cpu")
    for form in FORMATS.values():
        form.require()
    print("ready", flush=True)
    for line in sys.stdin:
        act, *rest = json.loads(line)
        print(json.dumps({"ranks": ranks, "rank": rank, "wait": wait, "port": port}[act](*rest)), flush=True)
    os._exit(0)
