"""Averages in the memory of the CPU, of weights on a GPU: they take no memory there."""

import functools

import torch

from ..optimizers.average import EMA
from .part import Part


class OnCPU(EMA):
    """An EMA in the memory of the CPU, of weights on a GPU.

    `update` lets a stream of its own copy the weights into pinned memory while the GPU goes on with the next
    forward pass, and the CPU does the arithmetic of that copy at the next update, or once `shadow` is asked
    for. So the host waits for copies of the step before alone. Weights are written after what stands in
    `before_writing`, which Precision calls; whoever writes them otherwise calls it too. traffic: what copies,
    a WeightTraffic.
    """

    note = "in the memory of the CPU (--average_on cpu)"

    def __init__(self, named_params, *args, traffic=None, **options):
        named_params = list(named_params)
        self.traffic = traffic or WeightTraffic(named_params[0][1].device)
        self.before_writing = (self.traffic.before_writing,)
        self.behind, self._taken = False, {}  # whether a copy is still to be averaged; {bucket: what it is}
        super().__init__(named_params, *args, **options)

    def _inputs(self, bucket):
        if bucket not in self._taken:
            self._take([bucket])
            self.traffic.wait()
        return self._taken[bucket]

    def _take(self, buckets):
        """Start copies of weights, and of what completes them."""
        copies = []
        for bucket in buckets:
            if bucket not in self._taken:
                self._taken[bucket] = self._memory_of(bucket)
            copies.append((self._taken[bucket], functools.partial(super()._inputs, bucket)))
        self.traffic.copy(copies)

    def _memory_of(self, bucket):
        """Pinned memory for what `_inputs` gives of a bucket."""
        first = self.params[bucket.indices[0]]
        low = [t for t in [self.low_part(first)] if t is not None]
        weights, *low = [self.traffic.memory(bucket.numel, t.dtype) for t in (first, *low)]
        return weights, low

    @torch.no_grad()
    def update(self):
        self.catch_up()
        self.step += 1
        self._take(self._buckets)
        self.behind = True

    @torch.no_grad()
    def catch_up(self):
        if self.behind:
            self.traffic.wait()
            self.behind = False
            self._move()

    @property
    def shadow(self):
        self.catch_up()
        return self._shadow

    @shadow.setter
    def shadow(self, value):
        self._shadow = value


class WeightTraffic:
    """Copies from a GPU into pinned memory, on a stream of their own."""

    def __init__(self, device):
        self.device = device
        self.stream, self.done = torch.cuda.Stream(device), torch.cuda.Event()

    def memory(self, n, dtype):
        return torch.empty(n, dtype=dtype, device="cpu", pin_memory=True)

    def copy(self, pairs):
        """Start to copy, after what the GPU was given so far. pairs: [(targets, function that gives the
        sources)], each of them (weights, [what completes them] or []), flat.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # what is gathered there is freed for that stream alone
            for (weights, low), sources in pairs:
                now, low_now = sources()
                for target, source in zip([weights, *low], [now, *low_now], strict=True):
                    target.copy_(source, non_blocking=True)
            self.done.record(self.stream)

    def before_writing(self):
        """Let what the GPU is given from now on wait for the copies; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(self.done)

    def wait(self):
        """Let the host wait for the copies."""
        self.done.synchronize()


class AveragesOnCPU(Part):
    """Lets a run keep its averages there, where its weights are on a GPU."""

    @classmethod
    def of(cls, run):
        if run.device.type == "cuda":
            run.average_kind = OnCPU
        return cls(run)
