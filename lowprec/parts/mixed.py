"""What a net of bf16 weights is told when it meets fp32: where, which tensor, and what to do."""

from __future__ import annotations

import linecache
import os
import re
from typing import Any

import torch
from torch import nn

from ..cast import CAST_SINCE, Into
from ..errors import Refused, first_line
from ..kernels import cpu_products

# how torch says that two tensors of an operation have different dtypes, or that it has no bf16 kernel
MIXED_DTYPES_ERROR = re.compile(
    r"(?is)bfloat16.*\bfloat(32|tensor)?\b|\bfloat(32|tensor)?\b.*bfloat16|dtype.*equal|mixed dtype"
)
NO_BF16_KERNEL_ERROR = re.compile(r"not implemented for '?BFloat16|not supported. Got BFloat16")
FOLDER_OF_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
DOTTED_NAME = re.compile(r"[A-Za-z_][\w.]*")
# words of torch where fully_shard has spread the net: what to do
OF_FULLY_SHARD = {
    ("DTensor", "mixed"): "fully_shard (--fsdp) gathers weights in forward, and this net calls parts apart "
    "from it: train it without --fsdp, or call them in its forward",
    ("uniform original parameter dtype",): "fully_shard gathers a block in one dtype, and a block of this "
    "net has norms or islands that stay fp32 beside its bf16 weights: spread these first by themselves, "
    "fully_shard(block.norm)",
}
USE_AUTOCAST = "or take recipe(bf16=True), which keeps fp32 weights and casts for each product"


def explain(error: Exception, view: Any, arguments: dict) -> None:
    """Raises Refused, with the remedy, where an error of torch in a call of a View comes of mixed dtypes.
    arguments: {name: value} of the call, as the net got them.
    """
    if not view.recipe.weight_dtypes.issuperset(p.dtype for p in view.net.parameters() if p.requires_grad):
        raise Refused(CAST_SINCE) from error
    text = str(error)
    for words, line in OF_FULLY_SHARD.items():
        if all(word in text for word in words):
            raise Refused(line) from error
    if "Float8" in text:
        raise Refused(
            f"{_Place(error, view.net)}: its weight is in float8, which torch multiplies with nothing else: "
            f"cast it in forward, as diffusers' layerwise casting does, {USE_AUTOCAST}"
        ) from error
    if not view.recipe.low_weights:
        return
    if NO_BF16_KERNEL_ERROR.search(text):
        what = "torch has no bf16 kernel for this"
    elif MIXED_DTYPES_ERROR.search(text):
        what = "fp32 met bf16"
    else:
        return
    place = _Place(error, view.net)
    if what == "fp32 met bf16":
        if all(p.dtype == torch.float32 for p in view.net.parameters()):
            raise Refused(CAST_SINCE) from error
        hints = _hints(place, view, arguments)
    else:
        hints = _fp32_module(place)
    remedies = "; ".join([*hints, USE_AUTOCAST])
    raise Refused(f"{place}: {what} ({first_line(error)}): {remedies}") from error


def _fp32_module(place):
    module = place.name_of.get(place.called)
    if not module:
        return []
    pattern = _without_numbers(module)
    return [f"Precision(..., fp32_modules={(pattern,)}) computes '{pattern}' in fp32"]


def adapt(error: Exception, view: Any) -> bool:
    """Let a layer of torch's that the net gave fp32, and that raised an error for it, take bf16 from now on,
    with all layers that differ from it in a number of their name alone. Returns whether there was one.
    """
    if not MIXED_DTYPES_ERROR.search(str(error)):
        return False
    place = _Place(error, view.net)
    name = place.name_of.get(place.module)
    if place.leaf is None or not _takes_bf16(place.module) or not _is_fp32(place.leaf.f_locals.get("input")):
        return False
    numbered = _without_numbers(name)
    for module, other in place.name_of.items():
        if _without_numbers(other) == numbered and _takes_bf16(module):
            module.register_forward_pre_hook(Into(torch.bfloat16), with_kwargs=True)
            view.adapted.append(other or type(module).__name__)
    return True


def _takes_bf16(module):
    """Whether it is a layer of torch's with bf16 weights that was not adapted yet."""
    if not type(module).__module__.startswith("torch.nn"):
        return False
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Into):
            return False
    return any(p.dtype == torch.bfloat16 for p in module.parameters(recurse=False))


def _without_numbers(name):
    return re.sub(r"\b\d+\b", "*", name)


def _hints(place, view, arguments):
    """What to do about the tensors that are fp32 where the error arose."""
    net = view.net
    found = place.fp32()
    buffers = _sharing_memory(found, dict(net.named_buffers()))
    frozen_weights = {}
    for name, p in net.named_parameters():
        if not p.requires_grad:
            frozen_weights[name] = p
    frozen = _sharing_memory(found, frozen_weights)
    kept = []
    for name in sorted(view.keep & arguments.keys()):
        if _is_fp32(arguments[name]):
            kept.append(name)
    hints = []
    if found:
        alike = "self.weight" if "x" in found else "x"
        hints.append(f"fp32 there: {', '.join(list(found)[:4])}; cast it to {alike}.dtype in forward")
    if buffers:
        hints.append(f"for a buffer that training does not change: {_cast_buffers(buffers)}")
    elif place.buffers_before():
        before = place.buffers_before()
        hints.append(f"where the fp32 buffer {before[0]} made it so: {_cast_buffers(before)}")
    hints += _fp32_module(place)
    if frozen:
        hints.append(f"the frozen weight {frozen[0]} is cast by recipe(..., sites=['frozen=cast'])")
    part = _only_part_with_weights(net)
    if part and not buffers:
        hints.append(f"give Precision '{part}' alone, which has all weights, and put run.module in its place")
    if kept:
        hints.append(f"the argument {kept[0]} stays fp32: leave it out of Precision's keep")
    return hints


def _cast_buffers(names):
    dtypes = {_without_numbers(name): "bf16" for name in names}
    return f"Precision(..., dtypes={dtypes})"


class _Place:
    """Where in a net an error arose. str(): the module, and the line of code that is not torch's."""

    def __init__(self, error: Exception, net: nn.Module):
        self.net = net
        self.name_of = {module: name for name, module in net.named_modules()}
        self.module: nn.Module | None = None  # the innermost one whose code ran
        self.called: nn.Module | None = None  # the innermost one whose forward ran
        self.frames: list = []  # of code that is not torch's, within the call of the net
        self.leaf = None  # the frame of a layer of torch's that was given the tensor
        step = error.__traceback__
        while step is not None:
            self._pass(step.tb_frame, step.tb_lineno)
            step = step.tb_next

    def _pass(self, frame, line):
        owner = frame.f_locals.get("self")
        inside = isinstance(owner, nn.Module) and owner in self.name_of
        in_torch = frame.f_code.co_filename.startswith((FOLDER_OF_TORCH, cpu_products.__file__))
        if inside:
            self.module = owner
            if frame.f_code.co_name == "forward":
                self.called = owner
            self.leaf = frame if in_torch else None
        if self.module is not None and not in_torch:
            self.frames.append((frame, line))

    def __str__(self) -> str:
        if self.module is None:
            return type(self.net).__name__
        name = self.name_of[self.module]
        kind = type(self.module).__name__
        title = f"{name} ({kind})" if name else kind
        if not self.frames:
            return title
        frame, line = self.frames[-1]
        path = frame.f_code.co_filename
        code = linecache.getline(path, line).strip()
        where = f"{os.path.basename(path)}:{line}"
        return f"{title}, {where} `{code}`" if code else f"{title}, {where}"

    def buffers_before(self) -> list[str]:
        """The names of fp32 buffers with which an input can have been promoted: of the modules that called
        this one, else of any but norms.
        """
        modules = [frame.f_locals.get("self") for frame, _ in reversed(self.frames)]
        for among in ([m for m in modules if m in self.name_of], self.name_of):
            found = []
            for module in among:
                for name, b in module.named_buffers(self.name_of[module], recurse=False):
                    if _is_fp32(b) and not hasattr(module, "running_mean"):
                        found.append(name)
            if found:
                return found[:3]
        return []

    def fp32(self) -> dict[str, torch.Tensor]:
        """{name in the code: fp32 tensor} of that line; of all that its function knows, where it names none
        but what it has computed.
        """
        found: dict = {}
        if self.leaf is not None and _is_fp32(self.leaf.f_locals.get("input")):
            found["its input"] = self.leaf.f_locals["input"]
        if not self.frames:
            return found
        frame, line = self.frames[-1]
        for name in DOTTED_NAME.findall(linecache.getline(frame.f_code.co_filename, line)):
            value = _value_at(frame.f_locals, name)
            if _is_fp32(value):
                found[name] = value
        others = dict(frame.f_locals)
        names_attribute = any(name.startswith("self.") for name in found)
        if self.leaf is None and not names_attribute and isinstance(frame.f_locals.get("self"), nn.Module):
            others = {**dict(frame.f_locals["self"].named_buffers("self", recurse=False)), **others}
        for name, value in others.items():
            if _is_fp32(value):
                found.setdefault(name, value)
        return found


def _value_at(names, dotted):
    """The tensor that a dotted name stands for, or None."""
    first, *rest = dotted.split(".")
    value = names.get(first)
    for part in rest:
        known = vars(value) if hasattr(value, "__dict__") else {}
        for place in (
            known,
            known.get("_parameters", {}),
            known.get("_buffers", {}),
            known.get("_modules", {}),
        ):
            if part in place:
                value = place[part]
                break
        else:
            return value if torch.is_tensor(value) else None
    return value


def _sharing_memory(found, named):
    """The names of tensors that any of `found` is, or is a view of."""
    name_of = {}
    for name, t in named.items():
        if _is_fp32(t):
            name_of[t.untyped_storage().data_ptr()] = name
    sharing = []
    for t in found.values():
        name = name_of.get(t.untyped_storage().data_ptr())
        if name is not None and name not in sharing:
            sharing.append(name)
    return sharing


def _only_part_with_weights(net):
    """The name of the one part of a net that has parameters, as in a wrapper; None for other nets."""
    if next(net.parameters(recurse=False), None) is not None:
        return None
    parts = []
    for name, part in net.named_children():
        if next(part.parameters(), None) is not None:
            parts.append(name)
    if len(parts) != 1:
        return None
    return parts[0]


def _is_fp32(x):
    return torch.is_tensor(x) and x.dtype == torch.float32
