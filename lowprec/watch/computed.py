"""What a net computes in low precision, against what an fp32 copy of it computes."""

import math

import torch
from torch.utils import _pytree as pytree


class Recorder:
    """A net that is called like `net` and keeps what it was called with the first time: self.inputs = (args,
    kwargs).
    """

    def __init__(self, net):
        self.net = net
        self.inputs = None

    def __call__(self, *args, **kwargs):
        if self.inputs is None:
            self.inputs = args, kwargs
        return self.net(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.net, name)


def relative(a, b):
    """Relative RMS difference of tensor a from b; inf where either is not finite."""
    a, b = a.double(), b.double()
    difference = (a - b).square().mean().sqrt()
    size = b.square().mean().sqrt()
    value = float(difference / size.clamp_min(1e-300))
    return math.inf if math.isnan(value) else value


def relative_tree(a, b):
    """`relative` of all floating tensors in two trees alike."""
    leaves = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    pairs = [(x, y) for x, y in leaves if torch.is_tensor(x) and x.is_floating_point()]
    return relative(torch.cat([x.flatten() for x, _ in pairs]), torch.cat([y.flatten() for _, y in pairs]))


def count_not_finite(tree):
    """{innermost name: entries that are not finite} of tensors of more than one number, in a nest of dicts
    and lists.
    """
    found = {}

    def count(value, name):
        if isinstance(value, dict):
            for key, inner in value.items():
                count(inner, key)
        elif isinstance(value, list):
            for inner in value:
                count(inner, name)
        elif torch.is_tensor(value) and value.is_floating_point() and value.numel() > 1:
            found[str(name)] = found.get(str(name), 0) + int((~value.isfinite()).sum())

    count(tree, "")
    return found
