"""A server that runs train.py, and jobs of fsdp_jobs.py on several ranks: forks of one process that has
imported everything once.

It takes a JSON list a line. ["run", words, environment, file of messages] answers with the number of a
process, which leads a group of its own; ["code", text, file of messages] with one that runs a text; ["bound",
words, folder, file of messages] with one that the modes of files bind. ["ranks", world, job or null, words,
file of messages, folder] answers with the process numbers of the ranks, whose store a process of its own
hosts, as torchrun does; ["rank", number, world, port, ...] starts one of them without it, at a port that
["port"] tells; ["torchrun", world, words, file of messages, folder] answers with the number of torchrun's own
process, whose workers are forks; ["wait", number] with an exit status, negative for a signal. What does not
end is killed. What ranks print is in a file beside that of their messages. Kernels are not compiled.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
import warnings

import cli
import common
import fsdp_jobs
import matplotlib.figure  # noqa: F401  these are what runs import once they need it
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.utils.tensorboard  # noqa: F401
import torchvision.utils  # noqa: F401
from forked import LONGEST, forked, wait
from torch.distributed import run as distributed_run
from torch.distributed.launcher.api import elastic_launch

import train
from harness import run_folder
from lowprec.formats import FORMATS
from lowprec.kernels import compiled


def run(words, environment, messages):
    return forked(lambda: train.main(words), environment, messages)


def code(text, messages):
    def act():
        atexit._clear()  # what this process has registered
        try:
            exec(text, {})
        finally:
            atexit._run_exitfuncs()

    return forked(act, {}, messages)


def bound(words, folder, messages):
    """As run, in a folder, by a process that the modes of files bind. They don't bind root, unless it gives
    its capabilities away.
    """

    def act():
        os.chdir(folder)
        if os.geteuid() == 0:
            give_capabilities_away()
        return train.main(words)

    return forked(act, {}, messages)


def give_capabilities_away():
    """capset(2) with nothing in it: this process is root by name alone."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@functools.cache
def host():
    """(pipe to ask, pipe that answers) of a process that keeps stores, and ends with this one."""
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(ask)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        stores = []
        while os.read(asked, 1):
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            os.write(tell, b"%5d" % stores[-1].port)
        os._exit(0)
    return ask, told


def ranks(world, *more):
    ask, told = host()
    os.write(ask, b".")
    port = int(os.read(told, 5))
    return [rank(number, world, port, *more, "True") for number in range(world)]


def rank(number, world, port, job, words, messages, folder, hosted="False"):
    place = dict(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world))
    place.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=hosted)

    def act():
        os.chdir(folder)
        signal.alarm(LONGEST)
        os.dup2(os.open(f"{messages}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        try:
            return train.main(words) if job is None else getattr(fsdp_jobs, job)(*words)
        finally:
            sys.stdout.flush()

    return forked(act, place, messages)


def torchrun(world, words, messages, folder):
    def act():
        os.chdir(folder)
        flags = f"--nproc_per_node {world} --start_method fork --rdzv_backend c10d".split()
        args = distributed_run.parse_args([*flags, "--rdzv_endpoint", "localhost:0", "train.py"])
        config, _, _ = distributed_run.config_from_args(args)
        elastic_launch(config, worker)(words)

    return forked(act, {}, messages)


def worker(words):
    sys.exit(train.main(words))


ACTS = {act.__name__: act for act in (run, code, bound, ranks, rank, torchrun, wait, port)}


def serve(line):
    """Answer what comes by a text file that both ends write, until the other end is closed; then end."""
    try:
        as_started_by_hand()
        asked = line.readline()
        compiled._compiled = common.uncompiled
        cli.shorten()
        run_folder.environment("cpu")
        for form in FORMATS.values():
            form.require()
        gc.freeze()  # what was imported is no garbage: no fork looks through it
        while asked:
            act, *rest = json.loads(asked)
            print(json.dumps(ACTS[act](*rest)), file=line, flush=True)
            asked = line.readline()
    finally:
        os._exit(0)


def as_started_by_hand():
    """Undo what pytest has changed in this process, a fork of it: what is said goes to its own stderr."""
    os.setsid()  # Ctrl-C is for pytest, which closes the line
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    warnings.showwarning = show_warning


def show_warning(message, category, filename, lineno, file=None, line=None):
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
