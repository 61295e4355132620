"""python tests/two_ranks.py FLAGS: train.py on two ranks, forks of one process that share its imports.

That process has to be a new one: autograd refuses to work in a fork of a process where it has started its
threads. Kernels are not compiled. The exit status is 0 when both ranks ended with 0.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common

import train
from lowprec.kernels import compiled


def rank(number, port):
    own = str(number)
    os.environ.update(RANK=own, LOCAL_RANK=own, WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os._exit(train.main(sys.argv[1:]))


def main():
    compiled._compiled = common.uncompiled
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(number, port)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
