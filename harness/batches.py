"""The order of the training data, a function of the seed alone, and the processes that read them."""

import signal

import torch

from harness.ending import ENDING_SIGNALS
from lowprec.rounding import Stream, stream


class BatchIndices:
    """Index lists, one a micro-batch, from micro-batch `start` on: shuffled epochs laid end to end, a rank's
    own rows. n: items of the data; batch_size: of all ranks together.

    Each epoch's order is a function of (seed, epoch).
    """

    def __init__(self, n, batch_size, seed, start=0, rank=0, world=1):
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self.start, self.rank, self.world = start, rank, world

    def __iter__(self):
        own = self.batch_size // self.world
        position = self.start * self.batch_size
        epoch, order = None, None
        while True:
            batch = []
            first = position + self.rank * own
            for at in range(first, first + own):
                if at // self.n != epoch:
                    epoch = at // self.n
                    draw = torch.Generator().manual_seed(stream(self.seed, Stream.ORDER, epoch))
                    order = torch.randperm(self.n, generator=draw).tolist()
                batch.append(order[at % self.n])
            position += self.batch_size
            yield batch


def read_batches(data, config, ranks, step):
    """An iterator over the micro-batches of a run from optimiser step `step` on, a rank's rows of each.

    data: what `Task.train_set` returned.
    """
    start = step * config.accumulate
    indices = BatchIndices(len(data), config.batch_size, config.seed, start, ranks.rank, ranks.world)
    loader = torch.utils.data.DataLoader(
        data,
        sampler=indices,
        batch_size=None,
        num_workers=config.workers,
        worker_init_fn=ignore_signals,
    )
    # workers start with this mask, so that no signal reaches one before it ignores them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*ENDING_SIGNALS, signal.SIGCHLD])
    try:
        return iter(loader)
    finally:
        if config.workers:
            # torch's handler raises for a worker that was killed, wherever the process is just then.
            # Without it the loader says so, up to 5 seconds later, where it waits for a batch
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(batches):
    """End the processes that an iterator of `read_batches` reads with, if it has any."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def ignore_signals(worker):
    # Ctrl-C reaches every process of a terminal, and SLURM and torchrun signal whole groups: the trainer ends
    # its own workers once it has written its checkpoint
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
