"""Which part of a matrix never had a gradient: an aligned half, third or quarter of its rows or columns."""

import math
import re

import torch

from ..telemetry import sample_entries


def tables_of(model, named):
    """The parameters of which a batch reads some rows alone: embeddings, and bare tables of positions as
    pos_embed, wpe and pe. named: [(name, parameter)].
    """
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {module.weight for module in model.modules() if isinstance(module, embeddings)}
    return tables | {p for name, p in named if re.search("pos|emb|wpe|^pe$", name.rpartition(".")[2])}


def dead_part(alive, shape, most):
    """Which aligned half, third or quarter of the rows or columns is dead as a whole while the rest lives;
    "" where none is. alive: bool, of a sample (telemetry.sample_entries) of a tensor of this shape.
    """
    if alive.all() or not alive.any():
        return ""
    places = sample_entries(torch.arange(math.prod(shape)), most)
    for dim, what in ((0, "rows"), (1, "columns")):
        size = shape[dim]
        at = places // math.prod(shape[dim + 1 :]) % size
        for parts in (2, 3, 4):
            if size % parts or size < 4 * parts:
                continue
            dead = _only_dead_one(alive, at * parts // size, parts)
            if dead is not None:
                width = size // parts
                return f"{what} {dead * width} to {(dead + 1) * width - 1} of {size}"
    return ""


def _only_dead_one(alive, part_of, parts):
    """The number of the part that is dead, if it alone is; else None. part_of: int64 [n], below `parts`."""
    entries = torch.bincount(part_of, minlength=parts)
    living = torch.bincount(part_of, alive.float(), minlength=parts) / entries.clamp_min(1)
    dead = (living == 0).nonzero().flatten().tolist()
    if len(dead) != 1 or entries[dead[0]] < 16:
        return None
    return dead[0] if living.sum() > 0.9 * (parts - 1) else None
