"""Convolutions over fewer values than their kernel is wide, whose bf16 weight gradient torch's oneDNN gets
wrong on some CPUs.

    Onednn(run).convert(net)  # such a layer's gradient is taken without oneDNN from now on, where it is wrong
    faulty_convolutions()     # ['3x3x3 over a depth of 2', ...]: which known ones are wrong on this machine

Seen with torch 2.14.1 on CPUs with avx512_bf16: the gradient reads memory that nobody has written, see
docs/evidence.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..cast import Border
from ..roles import CONVOLUTIONS
from .part import Part


class Convolution(NamedTuple):
    """What torch.ops.aten.convolution_backward takes behind three tensors."""

    bias_sizes: list | None
    stride: list
    padding: list
    dilation: list
    transposed: bool
    output_padding: list
    groups: int


class Onednn(Part):
    """Looks at each convolution of a net in its first call with gradients: from then on, the gradient of one
    that is wrong by oneDNN is taken without. A layer over wider inputs is let go after that call.
    """

    def convert(self, net):
        for module in net.modules():
            if isinstance(module, CONVOLUTIONS):
                module.register_forward_hook(LookAtCall())


class LookAtCall(Border):
    """A hook after forward: see Onednn."""

    def __call__(self, module, args, out):
        if torch.compiler.is_compiling() or not torch.is_tensor(out) or out.grad_fn is None:
            return
        node = out.grad_fn
        if node.name() != "ConvolutionBackward0" or not _is_narrow(node):
            for number, hook in list(module._forward_hooks.items()):
                if hook is self:
                    del module._forward_hooks[number]
        elif node._saved_weight.dtype == torch.bfloat16 and _is_wrong(node, out):
            node.register_prehook(lambda gradients: _use_onednn(False))
            node.register_hook(lambda found, gradients: _use_onednn(True))


def _use_onednn(on):
    torch.backends.mkldnn.enabled = on


def _is_narrow(node):
    """Whether the kernel is wider than the input along some axis."""
    extents = node._saved_input.shape[2:]
    kernel = node._saved_weight.shape[2:]
    return any(width > extent for width, extent in zip(kernel, extents, strict=True))


_found_wrong: dict[tuple, bool] = {}  # geometry -> whether its gradient is wrong on this machine


def _is_wrong(node, out):
    x, weight = node._saved_input, node._saved_weight
    bias = node._saved_bias_sym_sizes_opt
    geometry = Convolution(
        None if bias is None else list(bias),
        list(node._saved_stride),
        list(node._saved_padding),
        list(node._saved_dilation),
        node._saved_transposed,
        list(node._saved_output_padding),
        node._saved_groups,
    )
    shapes = tuple(x.shape), x.stride(), tuple(weight.shape), tuple(out.shape), str(geometry)
    if not x.is_cpu or not torch.backends.mkldnn.enabled:
        return False
    if shapes not in _found_wrong:
        _found_wrong[shapes] = is_wrong(x, weight, out, geometry)
    return _found_wrong[shapes]


def is_wrong(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, geometry: Convolution) -> bool:
    """Whether the weight gradient of a convolution is another with oneDNN than without it, by more than bf16
    explains. The tensors say shapes, strides and dtypes; what is multiplied is drawn apart.
    """
    draw = torch.Generator().manual_seed(0)
    x, weight, g = (torch.empty_like(t).normal_(generator=draw) for t in (x, weight, out.detach()))
    before = torch.backends.mkldnn.enabled
    try:
        _use_onednn(False)
        right = weight_gradient(g, x, weight, geometry).float()
        _use_onednn(True)
        for _ in range(3):
            _leave_behind(float("nan"), weight, x, g)
            found = weight_gradient(g, x, weight, geometry).float()
            if not (found - right).norm() <= 0.05 * right.norm():  # NaN is wrong
                return True
    finally:
        _use_onednn(before)
    return False


def weight_gradient(g, x, weight, geometry):
    """The weight gradient of a convolution as autograd takes it, in the dtype of the weight."""
    wanted = [True, True, geometry.bias_sizes is not None]
    return torch.ops.aten.convolution_backward(g, x, weight, *geometry, wanted)[1]


def _leave_behind(value, *tensors):
    """Fill memory of the sizes that a product may take with `value`, and give it back: who reads what it has
    not written will find that.
    """
    sizes = {t.numel() * factor for t in tensors for factor in (1, 2, 4)}
    kept = [torch.full((size,), value) for size in sizes for _ in range(4)]
    kept.clear()


# ---- What the commands say ---------------------------------------------------------------------------------

KNOWN_FAULTY: dict[str, tuple[type, dict[str, Any], tuple[int, ...]]] = {
    "3x3x3 over a depth of 2": (nn.Conv3d, dict(padding=1), (2, 32, 2, 6, 6)),
    "3x3 with stride 2 over one pixel": (nn.Conv2d, dict(padding=1, stride=2), (2, 32, 1, 1)),
}


def faulty_convolutions() -> list[str]:
    """The known convolutions whose bf16 weight gradient is wrong on this machine's CPU."""
    found = []
    for name, (kind, options, shape) in KNOWN_FAULTY.items():
        layer = kind(32, 32, 3, device="cpu", dtype=torch.bfloat16, **options)
        out = layer(torch.ones(shape, device="cpu", dtype=torch.bfloat16))
        if _is_wrong(out.grad_fn, out):
            found.append(name)
    return found


def fault_line() -> str:
    """What `python -m lowprec` and `train.py --check` say of them; "" where all are right."""
    wrong = faulty_convolutions()
    if not wrong:
        return ""
    return (
        f"torch's bf16 weight gradient of a convolution {' and '.join(wrong)} is wrong on this CPU: "
        "Precision takes it without oneDNN; in a loop of your own set torch.backends.mkldnn.enabled = False"
    )
