"""Tensors of a step gathered into few flat vectors, and its numbers into two tables. Needs torch alone; copy
it.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# ---- Buckets -----------------------------------------------------------------------------------------------


class Bucket:
    """Tensors of one dtype and device that a kernel sees as one flat vector: a large one as a view, small
    ones copied
    together."""

    SMALL = 1 << 18  # elements; below it the fixed cost of a call outweighs the copies

    def __init__(self, indices, tensors, start):
        self.indices, self.start = indices, start
        self.numel = sum(tensors[i].numel() for i in indices)

    @staticmethod
    def group(tensors, keys):
        """Buckets such that each holds only equal `keys` (hashables); their order and starts depend on shapes
        alone.
        """
        buckets, open_ = [], {}
        for i, t in enumerate(tensors):
            if t.numel() >= Bucket.SMALL:
                buckets.append([i])
                continue
            batch = open_.get(keys[i])
            full = batch is not None and sum(tensors[j].numel() for j in batch) + t.numel() > Bucket.SMALL
            if batch is None or full:
                batch = open_[keys[i]] = []
                buckets.append(batch)
            batch.append(i)
        result, start = [], 0
        for indices in buckets:
            result.append(Bucket(indices, tensors, start))
            start += result[-1].numel
        return result

    def gather(self, tensors):
        """Flat [numel]: a view of a single contiguous tensor, else a copy."""
        return tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)

    def scatter(self, flat, tensors):
        """Copy flat [numel] back, unless it is a view."""
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            torch._foreach_copy_(list(tensors), self.views(flat, tensors))

    def views(self, flat, tensors):
        return _unflatten_dense_tensors(flat, tensors)


class Table:
    """The numbers and noise keys of all kernel calls of a step, as one tensor each: on CUDA two copies a
    step, not two
    a bucket, and none that waits."""

    def __init__(self, device):
        self.device, self.numbers, self.keys = device, [], []

    def add(self, numbers, words):
        """The row that will hold `numbers` and the words of a noise key."""
        self.numbers.append(numbers)
        self.keys.append([*words, 0])  # four words: rows stay aligned to 16 bytes
        return len(self.numbers) - 1

    def fill(self):
        self.numbers = self._on_device(torch.tensor(self.numbers, dtype=torch.float32))
        self.keys = self._on_device(torch.tensor(self.keys, dtype=torch.int32))

    def _on_device(self, t):
        if self.device.type != "cuda":
            return t.to(self.device)
        return t.pin_memory().to(self.device, non_blocking=True)
