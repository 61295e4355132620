"""Whether fp32 weights were rebuilt from bf16 ones, as a resume does that saved no masters."""

import torch

from ..telemetry import values_here
from .adapters import accumulates
from .net_state import rounded_values

ENTRIES = 64


class Masters:
    """Looks at a few entries of the largest fp32 matrix at each step, and at all weights at the first one.

    named: [(name, parameter)]. Nothing waits for a GPU.
    """

    def __init__(self, named, pick):
        self.named = named
        self.pick = pick
        self.at_first = []  # names of those that were bf16 numbers when the watch began, beside moments
        matrices = [one for one in named if _is_matrix(one[1])]
        self.name, self.p = max(matrices, key=lambda one: one[1].numel(), default=(None, None))
        self.first = None

    def begin(self, state_of):
        """Look at all weights before the first step. state_of: parameter -> what the optimiser keeps."""
        for name, p in self.named:
            moments = [value for key, value in state_of(p).items() if accumulates(key, value)]
            if p.dtype == torch.float32 and any(bool(values_here(value).any()) for value in moments):
                if _are_bf16(self.pick(p)):
                    self.at_first.append(name)

    def step(self, step):
        """Look at a few entries before a step."""
        if self.p is None:
            return
        flat = values_here(self.p).detach().flatten()
        if self.first is None:
            self.index = torch.arange(ENTRIES, device=flat.device) * (flat.numel() // ENTRIES)
            self.first = self.rounded = flat[self.index]
            self.seen_wide = torch.zeros((), dtype=torch.bool, device=flat.device)
            self.times, self.at = self.seen_wide.int(), self.seen_wide.int()
        now = flat[self.index]
        narrow = (now.bfloat16() == now).all()
        # what is put back to its start was not rounded
        rebuilt = narrow & self.seen_wide & (now != self.first).any()
        self.seen_wide = self.seen_wide | ~narrow
        self.rounded = torch.where(rebuilt, now, self.rounded)
        self.at = torch.where(rebuilt & (self.times == 0), step, self.at)
        self.times = self.times + rebuilt

    def rebuilt(self):
        """(name, step, times) of the matrix that was rounded between two steps; None where it was not."""
        if self.p is None or self.first is None or not int(self.times) or not _are_bf16(self.rounded):
            return None
        return self.name, int(self.at), int(self.times)


def _is_matrix(p):
    here = values_here(p)
    return p.dtype == torch.float32 and p.dim() > 1 and here.numel() >= ENTRIES and here.is_contiguous()


def _are_bf16(values):
    return torch.equal(values.bfloat16().float(), values) and rounded_values(values)
