"""What a net of bf16 weights loses at its border, said once: positions that merge, a loss formed in bf16."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..cast import narrowed

MOST_COORDINATES = 8  # coordinates of a position; images are wider
ENOUGH_IN_ORDER = 16  # values in order that are no accident: 16 numbers drawn at random lie so once in 10^13
MANY_HEADS = 4  # heads of a loss
EXACT_INTEGERS = 2**24  # fp32 itself can't hold larger whole numbers apart


# ---- Positions and conditions ------------------------------------------------------------------------------


def what_merges(x: torch.Tensor) -> str:
    """What bf16 loses of an input that holds positions, times, boxes or sizes, in words; "" of any other
    input, and where nothing is lost.

    Pixels, noise and features have neighbours that bf16 can't tell apart too, by chance and without harm. So
    x, fp32 or fp64, counts as positions only if it is one of these:

    - [], [B], [B, N] or [..., up to 8]: whole numbers below 2^24, of which bf16 changes some (from 257 on);
    - [] or [B]: a number for each example, which bf16 changes by a half or more;
    - [N], [B, N], or a column of [..., N, up to 8], with N of 16 or more: values in order (rising or falling
      in each line), of which some become equal in bf16.

    Images and videos have more axes, or longer ones. Reads numbers back from the device.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.is_meta or type(x) is not torch.Tensor:
        return ""
    if x.layout != torch.strided:
        return ""
    is_list = x.dim() <= 2 or (x.dim() == 3 and x.shape[-1] <= MOST_COORDINATES)
    if not is_list or not x.numel():
        return ""
    x = x.detach()
    low = narrowed(x, torch.bfloat16).to(x.dtype)
    plain = x.abs() < EXACT_INTEGERS
    changed = plain & (x != low)
    if not changed.any():
        return ""
    first = changed.flatten().nonzero()[0]
    example = f"{x.flatten()[first].item():.10g} becomes {low.flatten()[first].item():.10g}"
    if bool((x == x.round())[plain].all()):
        return f"{int(changed.sum()):,} of {x.numel():,} whole numbers change: {example}"
    if x.dim() <= 1 and bool(((x - low).abs()[plain] >= 0.5).any()):
        return f"numbers change by a half and more: {example}"
    for lines, low_lines in zip(_lines_of_positions(x), _lines_of_positions(low), strict=True):
        steps = lines.diff()
        if bool((steps >= 0).all() or (steps <= 0).all()):
            before = int((steps != 0).sum())
            left = int((low_lines.diff() != 0).sum())
            if left < before:
                return f"{before - left:,} of {before:,} steps between values in order become 0"
    return ""


def _lines_of_positions(x) -> Iterator[torch.Tensor]:
    """The lines [L, N] of x along which positions may be in order."""
    if x.dim() <= 1:
        candidates = [x.reshape(1, -1)]
    else:
        columns = x.shape[-1] if x.shape[-1] <= MOST_COORDINATES else 0
        candidates = [x[..., column].reshape(-1, x.shape[-2]) for column in range(columns)]
        if x.dim() == 2:
            candidates.append(x)
    for lines in candidates:
        if lines.shape[-1] >= ENOUGH_IN_ORDER:
            yield lines


def named_tensors(name, value) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what an argument or output holds in lists, mappings and dataclasses: keys of dicts
    are names too.
    """
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_tensors(key, part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from named_tensors(name, part)
    elif dataclasses.is_dataclass(value):
        yield from named_tensors(name, vars(value))


# ---- Losses ------------------------------------------------------------------------------------------------


def loss_in_bf16(out: Any) -> tuple[str, torch.Tensor] | None:
    """(its name, it) of the first differentiable bf16 scalar in what a net returns; None for none."""
    for name, x in named_tensors("", out):
        if x.dtype == torch.bfloat16 and x.dim() == 0 and x.requires_grad:
            return name, x
    return None


def last_products(loss: torch.Tensor, net: nn.Module) -> list[str]:
    """The names of the modules whose matrices are the last that a loss depends on: those that make its
    logits. In the order of the net.
    """
    owner_of = {}
    for name, module in net.named_modules():
        for p in module.parameters(recurse=False):
            if name and p.dim() > 1:
                owner_of[p] = name
    found = set()
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        before = [following for following, _ in node.next_functions]
        owners = {owner_of[p] for p in map(_weight_behind, before) if p in owner_of}
        if owners:  # a product: what comes before it is not the head
            found |= owners
        else:
            waiting += before
    return [name for name, _ in net.named_modules() if name in found]


def _weight_behind(node):
    """The parameter that a node of the graph hands on, transposed or viewed perhaps; None for other nodes."""
    while node is not None:
        if hasattr(node, "variable"):
            return node.variable
        if len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None


# ---- What is said ------------------------------------------------------------------------------------------


class FirstCall:
    """Warns, once for each name, of what the calls of a net lose. loss: name of a returned loss that the net
    forms in bf16, once it is known.
    """

    def __init__(self, net: nn.Module):
        self.net = net
        self.names: set[str] = set()  # of inputs that were looked at
        self.waits_for_loss = True
        self.loss = ""

    def check_inputs(self, named: Iterable[tuple[str | None, Any]], keep: set[str]) -> None:
        """Warn of positions that are cast. named: (name, value) of the arguments; keep: names that are not
        cast.
        """
        for argument, value in named:
            if argument in keep:
                continue
            for name, x in named_tensors(argument, value):
                if name in keep or name in self.names:
                    continue
                self.names.add(name)
                lost = what_merges(x)
                if lost:
                    self._warn_of_positions(name, x, lost, keep)

    def _warn_of_positions(self, name, x, lost, keep):
        what = f"the argument '{name}'" if name else "an argument without a name"
        remedy = f"Precision(..., keep={(*sorted(keep), name)}) leaves it as it is"
        if not name:
            remedy = "pass it by keyword, and name it in Precision's keep"
        warnings.warn(
            f"{what} {list(x.shape)} looks like positions or sizes, and is cast to bf16: {lost}; {remedy}",
            stacklevel=7,  # where run(...) is called
        )

    def check_outputs(self, out: Any) -> None:
        """Warn of a loss that was formed in bf16, at the first call with gradients."""
        if not self.waits_for_loss or not torch.is_grad_enabled():
            return
        self.waits_for_loss = False
        found = loss_in_bf16(out)
        if found is None:
            return
        name, loss = found
        self.loss = name or "the loss"
        heads = tuple(last_products(loss, self.net))
        remedy = "fp32_outputs= of the last layers"
        if 0 < len(heads) <= MANY_HEADS:  # a compiled net is one node of the graph, and names all
            remedy = f"Precision(..., fp32_outputs={heads})"
        warnings.warn(
            f"{type(self.net).__name__} computes {self.loss} in bf16, so it and its gradient have 8 "
            f"significant bits: {remedy} gives it fp32 logits",
            stacklevel=5,  # where run(...) is called
        )
