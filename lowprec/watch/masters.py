"""Whether fp32 weights were rebuilt from bf16 ones, as a resume does that saved no masters."""

import torch

from ..telemetry import values_here
from .adapters import accumulates
from .gradients import AT_ONCE
from .net_state import rounded_values

ENTRIES = 64


class Masters:
    """Looks at a few entries of the largest fp32 matrix at each step, and at all weights at the first one.

    named: [(name, parameter)].
    """

    def __init__(self, named, pick):
        self.named = named
        self.pick = pick
        self.at_first = []  # names of those that were bf16 numbers when the watch began, beside moments
        matrices = [one for one in named if _is_matrix(one[1])]
        self.name, self.p = max(matrices, key=lambda one: one[1].numel(), default=(None, None))
        self.kept = []  # entries before the last steps
        self.first, self.seen_wide = None, False  # its first entries; whether they were ever no bf16 numbers
        self.at, self.times, self.last = 0, 0, 0  # the step that found them rounded, how often, the last step

    def begin(self, state_of):
        """Look at all weights before the first step. state_of: parameter -> what the optimiser keeps."""
        for name, p in self.named:
            moments = [value for key, value in state_of(p).items() if accumulates(key, value)]
            if p.dtype == torch.float32 and any(bool(values_here(value).any()) for value in moments):
                values = self.pick(p)
                if torch.equal(values.bfloat16().float(), values) and rounded_values(values):
                    self.at_first.append(name)

    def step(self, step):
        """Keep a few entries before a step."""
        if self.p is None:
            return
        flat = values_here(self.p).detach().flatten()
        if flat.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        now = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].clone()
        if self.kept and (now.shape, now.dtype) != (self.kept[0].shape, self.kept[0].dtype):
            self.kept, self.first, self.seen_wide = [], None, False  # something made it anew
        self.kept.append(now)
        self.last = step
        if len(self.kept) >= AT_ONCE:
            self._read()

    def _read(self):
        """Look at what was kept, of several steps."""
        if not self.kept:
            return
        entries, self.kept = torch.stack([now.cpu() for now in self.kept]), []
        if entries.dtype != torch.float32:
            return
        if self.first is None or self.first.shape != entries[0].shape:
            self.first, self.seen_wide = entries[0], False
        narrow = (entries.bfloat16() == entries).all(1)
        # what is put back to its start was not rounded
        narrow &= (entries != self.first).any(1)
        wide = (entries.bfloat16() != entries).any(1)
        for k in range(len(entries)):
            self.seen_wide |= bool(wide[k])
            if narrow[k] and self.seen_wide and rounded_values(entries[k]):
                self.times += 1
                self.at = self.at or self.last - len(entries) + 1 + k

    def rebuilt(self):
        """(name, step, times): the matrix that was rounded between two steps, when first, and how often."""
        self._read()
        return self.name, self.at, self.times


def _is_matrix(p):
    here = values_here(p)
    return p.dtype == torch.float32 and p.dim() > 1 and here.numel() >= ENTRIES and here.is_contiguous()
