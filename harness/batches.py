"""The order of the training data, a function of the seed alone, and the processes that read them."""

import signal

import torch

from lowprec.rounding import Stream, stream

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BatchIndices:
    """Index lists, one a micro-batch, from `start` on: shuffled epochs laid end to end, a rank's own rows.

    Each epoch's order is a function of (seed, epoch).
    """

    def __init__(self, n, batch_size, seed, start=0, rank=0, world=1):
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self.start, self.rank, self.world = start, rank, world

    def __iter__(self):
        own = self.batch_size // self.world
        position, epoch, order = self.start * self.batch_size, None, None
        while True:
            batch = []
            for at in range(position + self.rank * own, position + (self.rank + 1) * own):
                if at // self.n != epoch:
                    epoch = at // self.n
                    draw = torch.Generator().manual_seed(stream(self.seed, Stream.ORDER, epoch))
                    order = torch.randperm(self.n, generator=draw).tolist()
                batch.append(order[at % self.n])
            position += self.batch_size
            yield batch


def ignore_signals(worker):
    # Ctrl-C reaches every process of a terminal, and SLURM and torchrun signal whole groups: the trainer ends
    # its own workers once it has written its checkpoint
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
