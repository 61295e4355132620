"""Products and convolutions of bf16 and fp16 numbers on a CPU that has no instructions for them.

    cpu_products.settle_products(device)     # from now on, in this process, such a CPU takes them in fp32

Such a CPU (no avx512_bf16, amx_bf16 or Arm's bf16: most laptops) takes 30 to 90 times as long over a product
in bf16 as over the same in fp32, as torch's own code for it goes one number at a time. Here the inputs are
made fp32, the product is taken in fp32 and its result is rounded once to nearest. That is what a matrix unit
does with bf16: exact products, summed in fp32, rounded once. Sums are taken in another order, so the last bit
of a result can differ from torch's own. All other tensors are left to torch's kernels, whose bits stay.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..machine import BF16_FEATURES, cpu_features

SLOW_DTYPES = (torch.bfloat16, torch.float16)
REPLACED_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "convolution_backward")
OPERATORS_WITH_OUT = ("mm", "addmm", "bmm", "baddbmm", "addmv")  # torch.compile calls these, with `out`


def settle_products(device: torch.device) -> None:
    """Put the products of this module in the place of torch's, once a process, where `device` is a CPU that
    has no instructions for bf16.
    """
    if device.type == "cpu" and not cpu_features() & BF16_FEATURES:
        install_products()


@functools.cache
def install_products() -> torch.library.Library:
    """Put the products of this module in the place of torch's, on any CPU."""
    library = torch.library.Library("aten", "IMPL")  # what it holds is taken back when it is freed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in REPLACED_OPERATORS:
            in_fp32 = functools.partial(_computed_in_fp32, torch.library.get_kernel(f"aten::{name}", "CPU"))
            products = {f"aten::{name}": in_fp32}
            if name in OPERATORS_WITH_OUT:
                products[f"aten::{name}.out"] = functools.partial(_written_to_out, in_fp32)
            for full_name, product in products.items():
                choose = functools.partial(_chosen, torch.library.get_kernel(full_name, "CPU"), product)
                library.impl(full_name, choose, "CPU", with_keyset=True)
    return library


def _chosen(kernel, product, keyset, *args, **kwargs):
    """An operator by `product` where an input is slow, by torch's kernel elsewhere."""
    if _dtype_of(args) in SLOW_DTYPES:
        return product(keyset, *args, **kwargs)
    return kernel.call_boxed(keyset, *args, **kwargs)


def _dtype_of(args):
    """The one dtype of all tensors, or None: torch's kernel then says that they differ."""
    dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor)}
    return dtypes.pop() if len(dtypes) == 1 else None


def is_replaced(function: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether this module takes a call of an operator, as aten.mm.default, with these arguments."""
    name = function._schema.name.removeprefix("aten::")
    return name in REPLACED_OPERATORS and _dtype_of(args) in SLOW_DTYPES


def bytes_of_copies(args: Sequence[Any], out: Any) -> int:
    """Bytes in fp32 that such a call holds for a moment: of its inputs and of its results."""
    values = [value for value in [*args, *tree_leaves(out)] if isinstance(value, torch.Tensor)]
    return sum(4 * value.numel() for value in values)


def _computed_in_fp32(kernel, keyset, *args, **kwargs):
    """The kernel's results for the same arguments in fp32, each rounded to the dtype of the inputs."""
    dtype = _dtype_of(args)
    wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
    result = kernel.call_boxed(keyset, *wide, **kwargs)
    if isinstance(result, torch.Tensor):
        return result.to(dtype)
    return tuple(part if part is None else part.to(dtype) for part in result)


def _written_to_out(in_fp32, keyset, *args, out, **kwargs):
    return out.copy_(in_fp32(keyset, *args, **kwargs))
