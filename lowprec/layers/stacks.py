"""Products of stacks of matrices in 8 or 4 bits: the experts of a mixture that lie in one parameter [E, N, K]
or [E, K, N], as transformers 5 holds those of Mixtral, Qwen3, DeepSeek, gpt-oss and Llama 4.

Which expert a row goes to is known in forward alone. So forward runs in a mode that sees the products of the
stack: of one matrix of it, of all, or of groups of rows. Each matrix has scales of its own. All products are
emulated: no kernel for groups is called.
"""

import functools

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

NOT_SEEN = "its matrices are multiplied in no way that is known: by slices, torch.bmm or grouped_mm"


def stacks_of(module):
    """{name: parameter} of the stacks that a module itself holds; not positions [1, N, width]."""
    own = module.named_parameters(recurse=False)
    return {name: p for name, p in own if p.dim() == 3 and p.shape[0] > 1}


class Stacked(TorchFunctionMode):
    """Within it the products of some stacks are taken by `product(x [M, K], w [K, N])`. seen: of how many."""

    def __init__(self, stacks, product):
        super().__init__()
        self.stacks, self.product, self.seen = stacks, product, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        take = TAKEN.get(function)
        if take is None or not self._is_of_stack(args[1]):
            return function(*args, **(kwargs or {}))
        self.seen += 1
        return take(self.product, *args, **(kwargs or {}))

    def _is_of_stack(self, w):
        whole = w if w._base is None else w._base
        return any(whole is stack for stack in self.stacks)


def _linear(product, x, w, bias=None):
    y = product(x, w.t())
    return y if bias is None else y + bias


def _matmul(product, x, w):
    return product(x, w)


def _grouped(product, x, w, offs=None, bias=None, out_dtype=None):
    """Rows offs[e - 1] to offs[e] of x [M, K] by matrix e of w [E, K, N] -> [M, N]; rows behind are 0."""
    ends = [0, *offs.tolist()]
    found = [product(x[begin:end], one) for begin, end, one in zip(ends, ends[1:], w, strict=False)]
    y = F.pad(torch.cat(found), (0, 0, 0, len(x) - ends[-1]))
    return y.to(out_dtype or x.dtype)


TAKEN = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch._grouped_mm: _grouped,
}


def take_products(module, scaling):
    """Let the forward of a module multiply its stacks by `scaling`, a fp8_product.Scaling, while it is on."""
    # a graph of torch.compile can't tell which rows go where
    forward = torch.compiler.disable(_forward)
    module.forward = functools.partial(forward, type(module).forward, module, scaling)


def _forward(forward, module, scaling, *args, **kwargs):
    if scaling.options is None:
        return forward(module, *args, **kwargs)
    with Stacked(list(stacks_of(module).values()), scaling) as mode:
        out = forward(module, *args, **kwargs)
    scaling.left_out = "" if mode.seen else NOT_SEEN
    return out
