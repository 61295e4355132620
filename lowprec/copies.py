"""Copies of nets that have run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .cast import parts_of_leaf
from .errors import Refused


def copied(net: nn.Module, memo: dict | None = None) -> nn.Module:
    """A copy of a net. What a forward pass has left in its modules, an auxiliary loss or a list of attention
    maps, is detached: torch copies no tensor with a graph. memo: as of copy.deepcopy.
    """
    if isinstance(net, torch.jit.ScriptModule):
        raise Refused(
            "a TorchScript net can't be copied: load run.weights() into the nn.Module that it was made of"
        )
    known = {} if memo is None else memo  # deepcopy takes these for copies that it has made already
    for module in net.modules():
        for t in _with_graph(vars(module)):
            known[id(t)] = t.detach().clone()
    return copy.deepcopy(net, known)


def without_values(net: nn.Module, device: str) -> nn.Module:
    """A copy of a net whose tensors have its shapes and dtypes, and values that mean nothing: on the meta
    device, or within a FakeTensorMode, they take no memory.
    """
    return with_tensors(net, functools.partial(_blank, device))


def with_tensors(net: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of a net in which each tensor is what make(tensor) returns. A tied weight stays tied."""
    new = {}  # deepcopy takes these for copies that it has made already
    for module in net.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for tensor in tensors.values():
                if torch.is_tensor(tensor) and id(tensor) not in new:
                    new[id(tensor)] = make(tensor)
    return copied(net, new)


def _blank(device, tensor):
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _with_graph(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree that belong to a graph."""
    for leaf in tree_leaves(tree):
        if torch.is_tensor(leaf):
            if leaf.grad_fn is not None:
                yield leaf
            continue
        parts, _ = parts_of_leaf(leaf)
        for part in parts.values():
            yield from _with_graph(part)
