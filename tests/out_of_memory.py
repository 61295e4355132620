"""For the tests of --batch_size auto: a CPU plays a GPU whose memory is full from some batch size on."""

import weakref

import torch

import trainer
from harness import batch_size


class Memory:
    """Stands in for batch_size.TrialMemory: that of a machine that has none to speak of."""

    total = 8 << 30

    def __init__(self, device):
        self.cleared = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Nothing was changed."""

    def clear(self):
        self.cleared += 1

    def used(self):
        return 3 << 30


class Full:
    """Lets steps of more than `limit` examples run out of memory, at the point that `where` names."""

    def __init__(self, monkeypatch, limit, where="backward"):
        self.limit, self.sizes, self.trainers = limit, [], weakref.WeakSet()
        step, backward = trainer.Trainer.train_step, trainer.Precision.backward

        def train_step(run, measure):
            size = run.config.batch_size // run.ranks.world
            self.sizes.append((size, measure))
            self.trainers.add(run)
            self.size = size
            result = step(run, measure)
            if where == "after" and size > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

        def full(precision, loss):
            if where == "backward" and self.size > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return backward(precision, loss)

        monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
        monkeypatch.setattr(trainer.Precision, "backward", full)
        monkeypatch.setattr(batch_size, "TrialMemory", Memory)
        monkeypatch.setattr(batch_size, "check_search", lambda *_: None)
