"""Counts the FLOPs of a net by module and by kind of operation, on shapes alone.

    by_module, by_kind = module_flops(net, (x, t), backward=True)
    by_module["blocks.0.mlp.0"], by_kind["convolution"]

A multiplication and an addition count as two. Only products and convolutions count, by torch's own formulas.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..parts.first_call import named_tensors
from ..view import copied

LAYER_OF_OPERATOR = {  # the other products are those of activations
    "mm": "linear",
    "addmm": "linear",
    "_scaled_mm": "linear",
    "_grouped_mm": "linear",
    "convolution": "convolution",
    "_convolution": "convolution",
    "convolution_backward": "convolution",
}


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of what runs within it. `running`: names of the modules whose forward runs now."""

    def __init__(self):
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # it imports triton

        self.formulas = {torch.ops.aten._grouped_mm: _grouped_flops, **flop_registry}
        self.running = []
        self.by_module = {}
        self.by_kind = dict.fromkeys(("linear", "convolution", "attention"), 0)
        self.made = {}  # number of a node of the autograd graph -> module whose forward made it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        operation = function._overloadpacket
        if operation not in self.formulas:
            return out
        flops = self.formulas[operation](*args, **(kwargs or {}), out_val=out)
        self.by_kind[LAYER_OF_OPERATOR.get(operation.__name__, "attention")] += flops
        name = self._module()
        self.by_module[name] = self.by_module.get(name, 0) + flops
        return out

    def _module(self):
        """Name of the innermost module that the current operation belongs to. One of backward belongs to the
        module whose forward it differentiates.
        """
        node = torch._C._current_autograd_node()
        if node is not None and not self.running:
            return self.made.get(node._sequence_nr(), "")
        name = self.running[-1] if self.running else ""
        self.made[torch.autograd._get_sequence_nr() - 1] = name
        return name

    def watch(self, net):
        """Let `running` follow the modules of `net`, from now on."""
        for name, module in net.named_modules():
            enter, leave = self._hooks(name)
            module.register_forward_pre_hook(enter)
            # after an exception too: activation checkpointing leaves what it runs again by one
            module.register_forward_hook(leave, always_call=True)

    def _hooks(self, name):
        def enter(module, args):
            self.running.append(name)

        def leave(module, args, out):
            self.running.pop()

        return enter, leave


def module_flops(net, args, kwargs=None, backward=False):
    """({qualified name: FLOPs}, {"linear" | "convolution" | "attention": FLOPs}) of net(*args, **kwargs).

    Nothing is computed, and `net` is left alone: a copy without values runs on the meta device, on the shapes
    of the arguments, which may be any tree of tensors. A module's figure contains those of its parts; a
    module without products has none. backward: count forward and backward; trainable parameters get
    gradients, the arguments don't. Raises what the copy raises, RuntimeError for a net that looks at values.
    """
    shape_of = functools.partial(torch.empty_like, device="meta")
    args, kwargs = tree_map_only(torch.Tensor, shape_of, (tuple(args), dict(kwargs or {})))
    twin = without_values(net, "meta")  # what its forward stores stays there
    counter = _Counter()
    counter.watch(twin)
    # attention as plain products: fused kernels count in other ways, and the device chooses among them
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(counter)
        outputs = [t.sum() for _, t in named_tensors("", twin(*args, **kwargs)) if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs)
    by_module = {}
    for name, flops in counter.by_module.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            whole = ".".join(parts[:depth])
            by_module[whole] = by_module.get(whole, 0) + flops
    return by_module, counter.by_kind


def _grouped_flops(a, b, *args, out_val=None, **kwargs):
    """FLOPs of the products of a mixture of experts, of which torch has no formula: rows of `a` that each go
    to one of the matrices of `b`, or, in backward, rows of both that belong to one expert.
    """
    rows = a.shape[-2] if b.dim() == 2 else a.numel() // a.shape[-1]
    return 2 * rows * a.shape[-1] * b.shape[-1]


# ---- Nets of shapes alone ----------------------------------------------------------------------------------


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
