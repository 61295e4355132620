"""Sums over the samples of many tensors, a column a tensor."""

import functools

import torch


class Sums:
    """Sums over the entries of several tensors, one column a tensor: `sums` is float64 [fields, tensors].

    They stay on their device until they are asked for.
    """

    fields: tuple[str, ...] = ()

    def __init__(self, tensors=1):
        self.sums = torch.zeros(len(self.fields), tensors, dtype=torch.float64)

    def put(self, rows, index, lengths):
        """Add to some fields. rows: {field: [n]}, n entries of any dtype: lengths[0] of tensor index[0], and
        so on. Returns {field: what was added, float64 [tensors]}.
        """
        found = totals(list(rows.values()), lengths)
        self.sums = self.sums.to(found.device)
        for name, of_tensors in zip(rows, found, strict=True):
            self.row(name)[index] += of_tensors
        return dict(zip(rows, found, strict=True))

    def row(self, field):
        """The sums of one field, float64 [tensors]; to be changed in place."""
        return self.sums[self.fields.index(field)]

    def of(self, tensor):
        """The same sums of one tensor alone; those of all are brought to the CPU."""
        self.sums = self.sums.cpu()
        one = type(self)()
        one.sums = self.sums[:, tensor : tensor + 1]
        return one

    def __getattr__(self, name):
        if name.startswith("_") or name not in type(self).fields:
            raise AttributeError(name)
        return float(self.row(name).sum())


def totals(rows, lengths):
    """Rows [n] of any dtype -> float64 [rows, tensors]: sums over the entries of each tensor."""
    table = torch.empty(len(rows), rows[0].numel(), device=rows[0].device)  # fp32: torch sums in a tree
    for i, row in enumerate(rows):
        table[i] = row
    return torch.stack([part.sum(1) for part in table.split(lengths, 1)], 1).double()


def one_an_entry(values, lengths, like):
    """One number a tensor -> one an entry, fp32 on the device of `like`; 0-dim where all are the same."""
    if len(set(values)) == 1:
        return torch.tensor(values[0], dtype=torch.float32, device=like.device)
    values = torch.tensor(values, dtype=torch.float32, device=like.device)
    return values[_numbers(tuple(lengths), like.device)]


@functools.lru_cache(4)
def _numbers(lengths, device):
    """int64 [n]: which tensor an entry is of."""
    lengths = torch.tensor(lengths, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths)
