"""Tensors of a step gathered into few flat vectors, and its numbers into two tables. Needs torch alone; copy
it.
"""

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# ---- Buckets -----------------------------------------------------------------------------------------------


class Bucket:
    """Tensors of one dtype and device that a kernel sees as one flat vector: a large one as a view, small
    ones copied together.
    """

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

    def gather_gradients(self, tensors):
        """As `gather`."""
        return self.gather(tensors)

    def scatter(self, flat, tensors):
        """Copy flat [numel] back, unless it is a view."""
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            torch._foreach_copy_(list(tensors), self.views(flat, tensors))

    def views(self, flat, tensors):
        return _unflatten_dense_tensors(flat, tensors)

    def length(self, n):
        """How many of `n` values of a state are held here: all of them, see sharding.Rows."""
        return n

    def rows(self, size=None):
        """[(first value, last, position, values of that row that come before)]: what one key of noise is for,
        in parts of `size`. Noise is numbered from the position on.
        """
        size = size or max(1, self.numel)
        starts = range(0, self.numel, size)
        return [(start, min(start + size, self.numel), self.start + start, 0) for start in starts]


class Table:
    """The numbers and noise keys of all kernel calls of a step, as one tensor each: on CUDA two copies a
    step, not two a bucket, and none that waits.
    """

    def __init__(self, device):
        self.device, self.numbers, self.keys = device, [], []

    def add(self, numbers, words):
        """The row that will hold `numbers` and the words of a noise key."""
        self.numbers.append(numbers)
        self.keys.append([*words, 0])  # four words: rows stay aligned to 16 bytes
        return len(self.numbers) - 1

    def fill(self):
        if not self.keys:  # a rank that holds no row of any tensor
            self.add([1.0, 1.0], (0, 0, 0))
        self.all_numbers = self._on_device(torch.tensor(self.numbers, dtype=torch.float32, device="cpu"))
        all_keys = self._on_device(torch.tensor(self.keys, dtype=torch.int32, device="cpu"))
        self.numbers, self.keys = self.all_numbers.unbind(), all_keys.unbind()

    def _on_device(self, t):
        if self.device.type != "cuda":
            return t.to(self.device)
        return t.pin_memory().to(self.device, non_blocking=True)


def scale_of(grad_scale, p):
    """What the gradient of parameter p is multiplied by. grad_scale: of all, or {parameter: of each}."""
    return grad_scale.get(p, 1.0) if isinstance(grad_scale, dict) else grad_scale
