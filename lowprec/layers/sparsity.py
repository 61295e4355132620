"""2:4 sparsity of Linear layers: of every four weights that lie side by side along the input, at most two are
not zero.

    sparse = Sparse24(model, "srste")                                    # in a loop of one's own
    loss.backward()
    sparse.gradients({p: p.grad for p in model.parameters()})
    optimizer.step()
    sparse.after_step()

magnitude prunes once, by the weights that training starts from; srste (arXiv 2102.04010) trains dense weights
and multiplies by their two largest of four. docs/formats.md says which layers are covered, and what is exact.
"""

import contextlib
import re
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Refused
from ..machine import device_facts, support
from ..parts.part import Method
from ..roles import roles
from ..sites import SITES
from .flops import module_flops

SRSTE_DECAY = 2e-4  # lambda in its authors' code
# embeddings and head, as in SparseGPT (arXiv 2301.00774); what reads one vector an image, not one a token,
# has no speed to gain, and every value of its block depends on it
STAY_DENSE = {"embedding", "head", "condition"}
CLASS_OF_BACKEND = {  # names in torch.sparse
    "cuSPARSELt": "SparseSemiStructuredTensorCUSPARSELT",
    "CUTLASS": "SparseSemiStructuredTensorCUTLASS",
}


# ---- Masks and layers --------------------------------------------------------------------------------------


def two_of_four(weight):
    """bool mask, shaped like `weight` [..., n], n a multiple of 4: True for the two largest magnitudes of
    each four, of equal ones the first.
    """
    a, b, c, d = weight.detach().abs().unflatten(-1, (-1, 4)).unbind(-1)  # four [..., n / 4]
    # each pair is compared once: of equal ones the first wins
    ab = a >= b
    ac = a >= c
    ad = a >= d
    bc = b >= c
    bd = b >= d
    cd = c >= d
    kept = [_two_hold(ab, ac, ad), _two_hold(~ab, bc, bd), _two_hold(~ac, ~bc, cd), _two_hold(~ad, ~bd, ~cd)]
    return torch.stack(kept, dim=-1).flatten(-2)  # [..., n / 4, 4] -> [..., n]


def _two_hold(x, y, z):
    """Whether two of three comparisons hold: an entry stays that wins so many."""
    return (x & y) | (x & z) | (y & z)


def pruned(weight):
    """`weight` [..., n] with the two of four largest, zeros elsewhere."""
    return torch.where(two_of_four(weight), weight, 0)


class _Pruned(torch.autograd.Function):
    """`pruned`, whose gradient passes as if nothing was (straight-through)."""

    @staticmethod
    def forward(ctx, weight):
        return pruned(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad


class MaskedLinear(nn.Linear):
    """nn.Linear that multiplies by the two of four of its dense weight; the gradient reaches all four
    (straight-through).
    """

    def forward(self, x):
        """x [..., in_features] -> [..., out_features]."""
        return F.linear(x, _Pruned.apply(self.weight), self.bias)


class KernelLinear(nn.Linear):
    """nn.Linear whose weight is a semi-structured tensor: torch's kernels take a view of their input, so it
    has to be contiguous.
    """

    def forward(self, x):
        """x [..., in_features] -> [..., out_features]."""
        return F.linear(x.contiguous(), self.weight, self.bias)


def linears_to_prune(model):
    """{name: module} of the Linear layers that 2:4 sparsity takes: inputs a multiple of 4, no subclass (its
    forward is not ours to know), no role of STAY_DENSE.
    """
    role_of = roles(model)
    found = {}
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, MaskedLinear)
        if is_linear and module.in_features % 4 == 0 and not role_of[name] & STAY_DENSE:
            found[name] = module
    return found


# ---- Kernels -----------------------------------------------------------------------------------------------


def kernels_that_take(shape, dtype):
    """Names of CLASS_OF_BACKEND whose kernels take a weight [out, in] of this dtype; their least sizes are
    torch's (bf16: 16x16 and 32x64).
    """
    found = []
    for name, kind in CLASS_OF_BACKEND.items():
        limits = getattr(torch.sparse, kind)._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
        if limits is None:
            continue
        rows_fit = shape[0] % limits.sparse_min_rows == 0
        columns_fit = shape[1] % limits.sparse_min_cols == 0
        if rows_fit and columns_fit:
            found.append(name)
    return found


def sparse_backend(device):
    """The name in CLASS_OF_BACKEND that this CUDA device runs, or None: CUTLASS's kernels are built for
    compute capability 8 alone.
    """
    if torch.backends.cusparselt.is_available():
        return "cuSPARSELt"
    return "CUTLASS" if torch.cuda.get_device_capability(device)[0] == 8 else None


# ---- Training ----------------------------------------------------------------------------------------------


class Sparse24(Method):
    """2:4 sparsity carried out on `model`, in place: mode 'magnitude' prunes its weights, 'srste' changes how
    its Linears read theirs.

    decay: lambda of SR-STE, None for the paper's. machine: (level, reason) of 'sparse24' in machine.support,
    None to ask for that of the model's device. Raises Refused for a net without such layers.
    """

    def __init__(self, model, mode, decay=None, machine=None):
        self.mode = mode
        self.decay = SRSTE_DECAY if decay is None else decay
        device = next(model.parameters()).device
        self.machine = machine or support(*device_facts(device))["sparse24"]
        self.low_part = lambda p: None  # parameter -> what completes it
        self.layers = linears_to_prune(model)
        self.masks = {}  # name -> bool mask, of mode magnitude
        self.flops = None  # what module_flops tells of a forward pass
        if not self.layers:
            raise Refused(
                f"--sparse24 {mode}: this net has no Linear layer inside its blocks, and convolutions are "
                "never 2:4; use --model dit or a generative unet"
            )
        if mode == "srste":
            self.switch(True)
        else:
            self._prune()

    @classmethod
    def of(cls, run):
        """It prunes by the weights as they came, not by their bf16 images."""
        return cls(run.model, run.recipe.sparse24, run.options.sparse24_decay)

    def ready(self, run):
        super().ready(run)
        self.low_part = run.optimizer.low_part

    def switch(self, on):
        # the parameter and its name stay: checkpoints and averages are those of a dense run
        for module in self.layers.values():
            module.__class__ = MaskedLinear if on else nn.Linear
        self.on = on

    @torch.no_grad()
    def _prune(self):
        self.masks = {name: two_of_four(m.weight) for name, m in self.layers.items()}
        self._hold()

    @torch.no_grad()
    def gradients(self, grads):
        """Change the gradients {parameter: tensor} in place, once a step: none for fixed zeros, SR-STE's
        decay for entries pruned now.
        """
        for name, module in self.layers.items():
            g = grads.get(module.weight)
            if g is None:
                continue
            if self.mode == "srste":
                # in the gradient, before clipping: AdamW would hardly notice a decoupled decay of so small
                # weights (arXiv 2404.01847)
                weight = module.weight
                g.add_(torch.where(two_of_four(weight), 0, weight.float()), alpha=self.decay)
            else:
                g.masked_fill_(~self.masks[name], 0)
        return grads

    def after_step(self):
        """Keep zero what a fixed mask prunes."""
        self._hold()
        return {}

    @torch.no_grad()
    def _hold(self):
        """Zero what a fixed mask prunes, in the weights and in what completes them.

        An optimiser that sees no gradient and no moments leaves a zero alone; that all of them do is not for
        us to promise.
        """
        for name, mask in self.masks.items():
            weight = self.layers[name].weight
            weight.masked_fill_(~mask, 0)
            low = self.low_part(weight)
            if low is not None:
                low.masked_fill_(~mask, 0)

    # -- reading the weights

    def values(self, values):
        """{name: tensor} with the covered weights pruned to the two of four largest by their own magnitudes;
        the others as they are.
        """
        found = dict(values)
        for name in self.layers:
            weight = f"{name}.weight"
            if weight in found:
                found[weight] = pruned(found[weight])
        return found

    def freeze(self, view, generation):
        """Let the net of `view`, a copy of the model that holds pruned weights, run dense, or by the sparse
        kernels those layers that have one here.
        """
        for name in self.layers:
            module = view.net.get_submodule(name)
            module.__class__ = nn.Linear
            weight = module.weight
            if not weight.is_cuda or self.machine[0] != "native":
                continue
            here = sparse_backend(weight.device)
            if here not in kernels_that_take(weight.shape, weight.dtype):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "prototype stage"
                kind = getattr(torch.sparse, CLASS_OF_BACKEND[here])
                sparse = kind.from_dense(weight.detach().contiguous())
            module.weight = nn.Parameter(sparse, requires_grad=False)
            module.__class__ = KernelLinear

    # -- state and report

    def state_dict(self):
        """{"sparse24": {"masks": {name: bool tensor like the weight}}}, {} of them under srste."""
        return {"sparse24": {"masks": dict(self.masks)}}

    def load_state_dict(self, state):
        """Take the masks of a saved run; of a dense run's state the weights, loaded already, are pruned."""
        if self.mode == "srste":
            return
        saved = state.get("sparse24", {}).get("masks", {})
        for name, mask in saved.items():
            self.masks[name].copy_(mask)
        if not saved:
            self._prune()

    def count_flops(self, model, args, kwargs=None):
        """Let the report name shares of the forward FLOPs; args, kwargs: of the model. Counted once."""
        if self.flops is not None:
            return
        with self.plain(model), contextlib.suppress(Exception):  # a net that looks at values has no shapes
            self.flops = module_flops(model, args, kwargs)

    def rows(self, parameters, generation_dtype):
        """{"sparse24": {"bytes": of the masks a parameter, "why", "layers", "lines"}} for the ledger.

        layers: a row a group of like layers: name with * for a number, count, shape [out, in], share of the
        FLOPs (or None), kernels that take it. generation_dtype: of the weights that generation reads.
        """
        groups = self._groups()
        found = {
            "bytes": sum(mask.nbytes for mask in self.masks.values()) / parameters,
            "why": f"{SITES['sparse24'].why[self.mode]}: {self._why(groups, generation_dtype)}",
            "layers": groups,
            "lines": lines_of_groups(groups),
        }
        return {"sparse24": found}

    def _groups(self):
        """The rows of `layers`: layers that differ in a number of their name alone are one."""
        flops_of = {}
        total = 0
        if self.flops is not None:
            flops_of, by_kind = self.flops
            total = sum(by_kind.values())
        groups = {}
        for name, module in self.layers.items():
            pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
            shape = tuple(module.weight.shape)
            if (pattern, shape) not in groups:
                groups[pattern, shape] = {
                    "layers": pattern,
                    "count": 0,
                    "shape": list(shape),
                    "flops": 0.0 if total else None,
                    "kernels": kernels_that_take(shape, torch.bfloat16),
                }
            group = groups[pattern, shape]
            group["count"] += 1
            if total:
                group["flops"] += flops_of.get(name, 0) / total
        return list(groups.values())

    def _why(self, groups, generation_dtype):
        why = f"two of four along the input of {len(self.layers)} Linears"
        if self.flops:
            why += self._shares(groups)
        small = sum(group["count"] for group in groups if not group["kernels"])
        if small:
            why += f"; {small} too small for any sparse kernel"
        generation = self._generation(generation_dtype)
        return f"{why}; training multiplies masked dense matrices, generation {generation}"

    def _shares(self, groups):
        """The FLOPs of these layers beside those of all others."""
        by_kind = self.flops[1]
        total = sum(by_kind.values())
        share = sum(group["flops"] or 0 for group in groups)
        linear, convolution, attention = (flops / total for flops in by_kind.values())
        return (
            f" = {share:.1%} of the forward FLOPs (other Linears {linear - share:.1%}, "
            f"convolutions {convolution:.1%}, attention products {attention:.1%})"
        )

    def _generation(self, dtype):
        device = next(iter(self.layers.values())).weight.device
        if device.type == "meta":
            return "too, or sparse kernels on CUDA in bf16"
        if self.machine[0] != "native":
            return f"too: sparse kernels can't run here ({self.machine[1]})"
        if dtype not in (torch.bfloat16, torch.float16):
            return "too: the sparse kernels take bf16 weights"
        if sparse_backend(device) is None:
            return "too: this torch has no cuSPARSELt, and CUTLASS's kernels stop at compute capability 8.x"
        return f"sparse ones by {sparse_backend(device)}"


def lines_of_groups(groups):
    """The groups of layers of `Sparse24.rows` as lines of text."""
    width = max(len(row["layers"]) for row in groups)
    text = []
    for row in groups:
        shape = "x".join(map(str, row["shape"]))
        share = "" if row["flops"] is None else f"{row['flops']:>6.1%}  "
        takers = ", ".join(row["kernels"]) or "no kernel: too small"
        text.append(f"  {row['layers']:<{width}} {row['count']:>3} x {shape:<10} {share}{takers}")
    return text
