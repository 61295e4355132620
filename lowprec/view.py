"""A net called in a recipe's dtypes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .cast import narrowed, to
from .errors import Refused
from .machine import exact_math


class View:
    """A net called as Recipe r says: floating inputs cast, products in its dtype, floating outputs in the
    loss's dtype.

    A loss that the net forms inside comes back in the loss's dtype too, but a net of bf16 weights that forms
    it from bf16 logits has rounded it by then: write `logits.float()` there, as transformers does. The view
    holds no optimiser and shares nothing with a run but what it is given. keep: names of arguments of forward
    that are left as they are (timesteps have a precision of their own), and keys of a dict that is one. A
    forward of `*args` has no names: pass such an argument by keyword. Integer inputs are left too.
    """

    def __init__(self, net: nn.Module, r, methods: Iterable = (), keep: str | Iterable[str] = ()):
        self.net = net
        self.recipe = r
        self.methods = methods
        self.keep = {keep} if isinstance(keep, str) else set(keep)
        self.forward = net  # a compiled or distributed wrapper may take its place
        self.device = next(net.parameters()).device
        base_model: Any = getattr(net, "get_base_model", None)  # PEFT's own forward says *args
        inner = net if base_model is None else base_model()
        self.arguments = list(inspect.signature(inner.forward).parameters)

    @contextmanager
    def context(self):
        """What forward runs in: autocast for 8- and 16-bit products of fp32 weights, TF32 as the recipe says,
        and what the methods ask for.
        """
        r = self.recipe
        with ExitStack() as stack:
            stack.enter_context(self.exact())
            if not r.low_weights and r.compute in ("bf16", "fp16", "fp8"):
                stack.enter_context(torch.autocast(self.device.type, dtype=r.dtype("compute")))
            for method in self.methods:
                stack.enter_context(method.context())
            yield

    def exact(self) -> AbstractContextManager:
        """A context in which fp32 products on CUDA are fp32, or TF32 where the recipe says so."""
        if self.device.type != "cuda":
            return nullcontext()
        return exact_math(self.recipe.compute == "tf32")

    def cast(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) as the net takes them."""
        if not self.recipe.low_weights:
            return args, kwargs
        nameless = [None] * len(args)  # for a forward of *args
        names = [*self.arguments, *nameless]
        args = tuple(self._low(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: self._low(name, value) for name, value in kwargs.items()}

    def _low(self, name, value):
        if name in self.keep:
            return value
        if type(value) is dict and self.keep & value.keys():  # a batch, whose keys are names too
            return {key: self._low(key, part) for key, part in value.items()}
        return to(torch.bfloat16, value, narrowed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns, floating tensors in the loss's dtype. Raises Refused, with the remedy, where
        the net mixes dtypes that it can't.
        """
        args, kwargs = self.cast(args, kwargs)
        try:
            with self.context():
                out = self.forward(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            self._explain(error, {**dict(zip(self.arguments, args, strict=False)), **kwargs})
            raise
        return to(self.recipe.dtype("loss"), out)

    def _explain(self, error, arguments):
        """Raises Refused, with the remedy, where an error of torch comes of mixed dtypes."""
        if "DTensor" in str(error) and "mixed" in str(error):
            raise Refused(
                "fully_shard (--fsdp) gathers weights in forward, and this net calls parts apart from it: "
                "train it without --fsdp, or call them in its forward"
            ) from error
        if not self.recipe.low_weights or not MIXED.search(str(error)):
            return
        hints = []
        buffers = [name for name, b in self.net.named_buffers() if b.dtype == torch.float32]
        if buffers and self.recipe.buffers == "fp32":
            hints.append(
                f"an fp32 buffer ({', '.join(buffers[:3])}) may have met bf16 activations; cast it to "
                "x.dtype in forward, or --set buffers=bf16"
            )
        kept = [name for name in sorted(self.keep) if _is_fp32(arguments.get(name))]
        if kept:
            hints.append(
                f"the argument {kept[0]} stays fp32; cast it to x.dtype in forward, or leave it out of "
                "Precision's keep"
            )
        if hints:
            raise Refused(f"{error}: {'; or '.join(hints)}") from error


# how torch says that two tensors of an operation have different dtypes
MIXED = re.compile(r"(?is)bfloat16.*\bfloat(32|tensor)?\b|\bfloat(32|tensor)?\b.*bfloat16|dtype.*equal")


def _is_fp32(x):
    return torch.is_tensor(x) and x.dtype == torch.float32
