"""2:4 sparsity of Linear layers: of every four weights that lie side by side along the input, at most two are
not zero.

    python train.py --model dit --sparse24 srste                         trains with the mask
    python train.py --sample runs/dit --sparse24 magnitude               prunes a finished run, draws from it
    python train.py --model dit --finetune runs/dit --sparse24 magnitude prunes it, then trains what is left

In a loop of one's own:

    sparse = Sparse24(model, "srste")
    loss.backward()
    sparse.on_grads({p: p.grad for p in model.parameters()})
    optimizer.step()
    sparse.after_step()

NVIDIA's sparse tensor cores (Ampere and later) skip the zeros of such a matrix. Only Linear layers gain, no
convolution: a run's ledger lists the layers covered and their share of the forward FLOPs. Elsewhere the zeros
are multiplied like any other number: same results, no speed.

Covered: attention and MLP layers of the blocks; these are what SparseGPT (arXiv 2301.00774) prunes in a
language model, embeddings and head stay dense. The projections of the condition into each block, which a
language model lacks, stay dense too: they read one vector an image and not one a token, so there is nothing
to gain in speed, and every value of their block depends on them. method.roles says which layers these are.
And dense by need: inputs that are no multiple of 4, subclasses of nn.Linear (their forward is not ours to
know).

magnitude  The two largest of four stay, by the fp32 weights that training starts from; the mask is fixed.
           Pruned entries get no gradient and are zero after every step in the weight and in its remainder,
           compensation or master. The average keeps the mask as well.
srste      SR-STE (arXiv 2102.04010): the weights stay dense, and forward reads the two largest of four of the
           weight as it is stored. The gradient goes straight through to all four, and decay * weight is added
           to it where the weight is pruned. The term joins the gradient, before clipping, because AdamW would
           hardly notice it as a decoupled decay (arXiv 2404.01847). It is added once a step, in fp32: a bf16
           gradient would round it away, so bf16 weights keep an fp32 sum of their gradients (accumulate=fp32,
           4 bytes a parameter). Rounding, compensation and split master apply to the dense weight, and so
           does the average: one of masked weights would mix masks that change, and not be 2:4 either.

What generation and export read is always 2:4: averaged or last weights, pruned by their own magnitudes (for
magnitude, no change). Training multiplies masked dense matrices on every device. torchao's training kernels
find other masks, 2:4 in 4x4 tiles so that the transposed weight is sparse too: another algorithm, with other
results. Generation uses torch's semi-structured kernels where it can.
"""

import re
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Refused
from ..machine import device_facts, support
from ..roles import roles
from .flops import module_flops
from .method import Method

DECAY = 2e-4  # lambda of SR-STE in its authors' code
MODES = {"magnitude": "pruned once, the mask is fixed", "srste": "pruned anew at each step"}
STAY_DENSE = {"embedding", "head", "condition"}
BACKENDS = {  # names in torch.sparse
    "cuSPARSELt": "SparseSemiStructuredTensorCUSPARSELT",
    "CUTLASS": "SparseSemiStructuredTensorCUTLASS",
}


# ---- Masks and layers --------------------------------------------------------------------------------------


def two_of_four(weight):
    """bool mask, shaped like `weight` [..., n], n a multiple of 4: True for the two largest magnitudes of
    each four, of equal ones the first.
    """
    a, b, c, d = weight.detach().abs().unflatten(-1, (-1, 4)).unbind(-1)  # four [..., n / 4]
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    # an entry stays that wins two of its three comparisons
    wins = [(ab, ac, ad), (~ab, bc, bd), (~ac, ~bc, cd), (~ad, ~bd, ~cd)]
    kept = [(x & y) | (x & z) | (y & z) for x, y, z in wins]
    return torch.stack(kept, dim=-1).flatten(-2)  # [..., n / 4, 4] -> [..., n]


def pruned(weight):
    """`weight` with the two of four largest, zeros elsewhere."""
    return torch.where(two_of_four(weight), weight, 0)


class _Masked(torch.autograd.Function):
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
        return F.linear(x, _Masked.apply(self.weight), self.bias)


class KernelLinear(nn.Linear):
    """nn.Linear whose weight is a semi-structured tensor: torch's kernels take a view of their input, so it
    has to be contiguous.
    """

    def forward(self, x):
        return F.linear(x.contiguous(), self.weight, self.bias)


def covered(model):
    """{name: module} of the Linear layers that 2:4 sparsity takes."""
    role_of, found = roles(model), {}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, MaskedLinear) and module.in_features % 4 == 0:
            if not role_of[name] & STAY_DENSE:
                found[name] = module
    return found


# ---- Kernels -----------------------------------------------------------------------------------------------


def kernels(shape, dtype):
    """Names of BACKENDS whose kernels take a weight [out, in] of this dtype; their least sizes are torch's
    (bf16: 16x16 and 32x64).
    """
    found = []
    for name, kind in BACKENDS.items():
        limits = getattr(torch.sparse, kind)._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
        if limits and shape[0] % limits.sparse_min_rows == 0 == shape[1] % limits.sparse_min_cols:
            found.append(name)
    return found


def backend(device):
    """The name in BACKENDS that this CUDA device runs, or None: CUTLASS's kernels are built for compute
    capability 8 alone.
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

    key = "sparse24"

    def __init__(self, model, mode, decay=None, machine=None):
        self.mode, self.decay = mode, DECAY if decay is None else decay
        device = next(model.parameters()).device
        self.machine = machine or support(*device_facts(device))["sparse24"]
        self.needs_sums = mode == "srste"
        self.layers, self.masks, self.flops = covered(model), {}, None
        if not self.layers:
            none = "this net has no Linear layer inside its blocks, and convolutions are never 2:4"
            raise Refused(f"--sparse24 {mode}: {none}; use --model dit or a generative unet")
        if mode == "srste":
            self._set_class(MaskedLinear)
        else:
            self._prune(lambda p: None)

    @classmethod
    def attach(cls, model, recipe, sparse24_decay=None, **_):
        """It prunes by the weights as they came, not by their bf16 images."""
        if recipe.sparse24 != "none":
            return cls(model, recipe.sparse24, sparse24_decay)

    def _set_class(self, kind):
        # the parameter and its name stay: checkpoints and averages are those of a dense run
        for module in self.layers.values():
            module.__class__ = kind

    @torch.no_grad()
    def _prune(self, low_part):
        self.masks = {name: two_of_four(m.weight) for name, m in self.layers.items()}
        self._hold(low_part)

    @torch.no_grad()
    def on_grads(self, grads):
        """Change the gradients {parameter: tensor} in place, once a step: none for fixed zeros, SR-STE's
        decay for entries pruned now.
        """
        for name, module in self.layers.items():
            g = grads.get(module.weight)
            if g is None:
                continue
            if self.mode == "srste":
                weight = module.weight
                g.add_(torch.where(two_of_four(weight), 0, weight.float()), alpha=self.decay)
            else:
                g.masked_fill_(~self.masks[name], 0)

    def after_step(self, low_part=lambda p: None):
        self._hold(low_part)
        return {}

    @torch.no_grad()
    def _hold(self, low_part):
        """Zero what a fixed mask prunes, in the weights and in what completes them (`low_part`: parameter ->
        tensor or None).

        An optimiser that sees no gradient and no moments leaves a zero alone; that all of them do is not for
        us to promise.
        """
        for name, mask in self.masks.items():
            weight = self.layers[name].weight
            for t in (weight, low_part(weight)):
                if t is not None:
                    t.masked_fill_(~mask, 0)

    # -- reading the weights

    @contextmanager
    def plain(self, model):
        """Within it, `model` (the one attached to) multiplies by its dense weights; copies made in it stay
        so.
        """
        kind = type(next(iter(self.layers.values())))
        self._set_class(nn.Linear)
        try:
            yield
        finally:
            self._set_class(kind)

    def values(self, values):
        """{name: tensor} with the covered weights pruned to the two of four largest by their own magnitudes;
        the others as they are.
        """
        names = {f"{name}.weight" for name in self.layers}
        return {name: pruned(t) if name in names else t for name, t in values.items()}

    def freeze(self, net, generation):
        """Let `net`, a copy of the model that holds pruned weights, run dense, or by the sparse kernels those
        layers that have one here.
        """
        for name in self.layers:
            module = net.get_submodule(name)
            module.__class__ = nn.Linear
            weight = module.weight
            here = backend(weight.device) if weight.is_cuda and self.machine[0] == "native" else None
            if here not in kernels(weight.shape, weight.dtype):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "prototype stage"
                kind = getattr(torch.sparse, BACKENDS[here])
                sparse = kind.from_dense(weight.detach().contiguous())
            module.weight = nn.Parameter(sparse, requires_grad=False)
            module.__class__ = KernelLinear

    # -- state and report

    def state_dict(self):
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state, low_part):
        """Take the masks of a saved run; state None is a dense run's, whose weights, loaded already, are
        pruned.
        """
        if self.mode == "srste":
            return
        if state is None or not state["masks"]:
            self._prune(low_part)
            return
        saved = state["masks"]
        if {name: m.shape for name, m in saved.items()} != {name: m.shape for name, m in self.masks.items()}:
            raise Refused("the 2:4 masks belong to another net")
        for name, mask in saved.items():
            self.masks[name].copy_(mask)

    def count_flops(self, model, args, kwargs=None):
        """Let the report name shares of the forward FLOPs; args, kwargs: of the model. Counted once."""
        if self.flops is not None:
            return
        with self.plain(model):
            try:
                self.flops = module_flops(model, args, kwargs)
            except Exception:  # a net that looks at values can't run on shapes: no share is told
                pass

    def rows(self, parameters, generation_dtype):
        """{"sparse24": {"bytes": of the masks a parameter, "why", "layers", "lines"}} for the ledger.

        layers: a row a group of like layers: name with * for a number, count, shape [out, in], share of the
        FLOPs (or None), kernels that take it. generation_dtype: of the weights that generation reads.
        """
        groups = self._groups()
        found = {
            "bytes": sum(mask.nbytes for mask in self.masks.values()) / parameters,
            "why": f"{MODES[self.mode]}: {self._why(groups, generation_dtype)}",
            "layers": groups,
            "lines": lines(groups),
        }
        return {"sparse24": found}

    def _groups(self):
        per_layer, totals = self.flops or ({}, {})
        total, groups = sum(totals.values()), {}
        for name, module in self.layers.items():
            pattern, shape = re.sub(r"\.\d+(?=\.)", ".*", name), tuple(module.weight.shape)
            if (pattern, shape) not in groups:
                takers = kernels(shape, torch.bfloat16)
                share = 0.0 if total else None
                row = dict(layers=pattern, count=0, shape=list(shape), flops=share, kernels=takers)
                groups[pattern, shape] = row
            groups[pattern, shape]["count"] += 1
            if total:
                groups[pattern, shape]["flops"] += per_layer.get(name, 0) / total
        return list(groups.values())

    def _why(self, groups, generation_dtype):
        why = f"two of four along the input of {len(self.layers)} Linears"
        if self.flops:
            totals = self.flops[1]
            total, share = sum(totals.values()), sum(row["flops"] or 0 for row in groups)
            linear, convolution, attention = (kind / total for kind in totals.values())
            why += f" = {share:.1%} of the forward FLOPs (other Linears {linear - share:.1%}, "
            why += f"convolutions {convolution:.1%}, attention products {attention:.1%})"
        small = sum(row["count"] for row in groups if not row["kernels"])
        if small:
            why += f"; {small} too small for any sparse kernel"
        generation = self._generation(generation_dtype)
        return f"{why}; training multiplies masked dense matrices, generation {generation}"

    def _generation(self, dtype):
        device = next(iter(self.layers.values())).weight.device
        if device.type == "meta":
            return "too, or sparse kernels on CUDA in bf16"
        if self.machine[0] != "native":
            return f"too: sparse kernels can't run here ({self.machine[1]})"
        if dtype not in (torch.bfloat16, torch.float16):
            return "too: the sparse kernels take bf16 weights"
        if backend(device) is None:
            return "too: this torch has no cuSPARSELt, and CUTLASS's kernels stop at compute capability 8.x"
        return f"sparse ones by {backend(device)}"


def lines(groups):
    """The groups of layers of `Sparse24.rows` as lines of text."""
    width = max(len(row["layers"]) for row in groups)
    text = []
    for row in groups:
        shape = "x".join(map(str, row["shape"]))
        share = "" if row["flops"] is None else f"{row['flops']:>6.1%}  "
        takers = ", ".join(row["kernels"]) or "no kernel: too small"
        text.append(f"  {row['layers']:<{width}} {row['count']:>3} x {shape:<10} {share}{takers}")
    return text
