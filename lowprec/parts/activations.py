"""What a forward pass keeps for its backward pass: measured, and given up for time.

    with Meter(model) as kept:
        loss = F.mse_loss(model(x), y)
    print(kept)                 # 12.3 MiB kept for backward: bfloat16 10.1, float32 2.2; casts of weights 0.4

    recompute(model)            # keep what enters each block alone, and compute the rest again in backward

The meter counts the tensors that autograd saves (torch.autograd.graph.saved_tensors_hooks): each storage
once, with all its bytes, by dtype. Parameters and buffers of the model are left out, since they are there
anyway. Copies of a weight in another dtype, which autocast makes and keeps, are counted apart. What a
compiled net keeps is counted too. It works in any loop.
"""

import functools
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import Refused
from .part import Part

# nodes of autograd behind which a weight is still the same numbers
NODES_OF_COPIES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")

# ---- Measuring ---------------------------------------------------------------------------------------------


class Meter(Part):
    """Bytes that autograd saves while it is entered. As a part of a run it has a row in the ledger.

    model: whose parameters and buffers are not counted. After it: `bytes` {dtype name: bytes}, `casts`, bytes
    of copies of weights, and `total`, all of them.
    """

    def __init__(self, model):
        self._known = {_storage(t) for t in [*model.parameters(), *model.buffers()]}
        self._weights = set(model.parameters())
        self._seen = {}  # storages are held, so that none is freed and its address used again
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t)
        self.bytes = {}
        self.casts = 0

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._seen.clear()
        return self._hooks.__exit__(*error)

    def _keep(self, tensor):
        self._count(tensor)
        # without its graph: what an operation keeps of its own output would keep the operation, for good
        return tensor.detach()

    def _count(self, tensor):
        key = _storage(tensor)
        if key is None or key in self._known or key in self._seen:
            return
        storage = tensor.untyped_storage()
        self._seen[key] = storage
        if _source(tensor) in self._weights:
            self.casts += storage.nbytes()
        else:
            name = str(tensor.dtype).removeprefix("torch.")
            self.bytes[name] = self.bytes.get(name, 0) + storage.nbytes()

    @property
    def total(self):
        """All bytes."""
        return sum(self.bytes.values()) + self.casts

    def rows(self, parameters, generation_dtype):
        largest = max(self.bytes, key=self.bytes.get, default="")
        return {"activations": {"value": largest, "bytes": self.total / parameters, "why": str(self)}}

    def json(self):
        """{"bytes": {dtype name: bytes}, "casts": bytes, "total": bytes}."""
        return {"bytes": self.bytes, "casts": self.casts, "total": self.total}

    def __str__(self):
        largest_first = sorted(self.bytes.items(), key=lambda item: -item[1])
        parts = [f"{name} {_mib(size)}" for name, size in largest_first]
        if self.casts:
            parts.append(f"casts of weights {_mib(self.casts)}")
        return f"{_mib(self.total)} MiB kept for backward: {', '.join(parts)}"


def _mib(size):
    return f"{size / 2**20:.1f}"


def _storage(tensor):
    """What tells one memory from another; None for a tensor without memory of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper, whose parts are saved by themselves
        return None


def _source(tensor):
    """The parameter that a tensor is a copy or a view of, or None."""
    node = tensor.grad_fn
    while node is not None and type(node).__name__ in NODES_OF_COPIES:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


# ---- Computing again ---------------------------------------------------------------------------------------


def recomputed_blocks(model):
    """The parts of a net that are computed again: what its method `recomputed()` lists, or the members of its
    outermost ModuleLists.
    """
    if hasattr(model, "recomputed"):
        return list(model.recomputed())
    found = []
    inside = None  # how the names of all that is inside the last ModuleList begin
    for name, module in model.named_modules():  # a module comes before its parts
        if not isinstance(module, nn.ModuleList) or (inside and name.startswith(inside)):
            continue
        found += module
        inside = f"{name}."
    return found


def recompute(model):
    """Let each block keep its inputs alone, and compute the rest again in backward, with the same bits.

    torch.utils.checkpoint without reentrance; dropout draws the same numbers again, and BatchNorm's running
    statistics move once. Returns how many blocks there are. Raises Refused when the net has none.
    """
    found = recomputed_blocks(model)
    if not found:
        raise Refused(
            "--checkpoint_activations: this net has no blocks (an nn.ModuleList, or a method `recomputed` "
            "that lists them); leave it out, or use a smaller --batch_size with --accumulate"
        )
    for block in found:
        block.forward = functools.partial(_compute_again, type(block).forward, block)
    return len(found)


def _compute_again(forward, block, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    # a forward pass changes their running statistics
    norms = [m for m in block.modules() if getattr(m, "track_running_stats", False) and m.training]
    contexts = {}
    if norms:
        contexts["context_fn"] = lambda: (nullcontext(), _statistics_kept(norms))
    return checkpoint(forward, block, *args, use_reentrant=False, **contexts, **kwargs)


@contextmanager
def _statistics_kept(norms):
    """Within it these norms change copies of their statistics, not the statistics."""
    before = {norm: dict(norm._buffers) for norm in norms}
    for norm, buffers in before.items():
        norm._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for norm, buffers in before.items():
            norm._buffers.update(buffers)
