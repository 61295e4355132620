"""2:4 sparsity of Linear layers: of every four weights that lie side by side along the input, at most two are not zero.

    python train.py --model dit --sparse24 srste                               trains with the mask, from the first step
    python train.py --sample runs/dit --sparse24 magnitude                     prunes a finished run and draws from it
    python train.py --model dit --finetune runs/dit --sparse24 magnitude       prunes it, then trains what is left

NVIDIA's sparse tensor cores (Ampere and later) skip the zeros of such a matrix. Only Linear layers gain, no convolution: a run's ledger lists
the layers covered and their share of the forward FLOPs. Elsewhere the zeros are multiplied like any other number: same results, no speed.

Covered: attention and MLP layers of the blocks; these are what SparseGPT (arXiv 2301.00774) prunes in a language model, embeddings and head
stay dense. Dense too: the projections of the condition into each block (`modulation`, `time_emb`), which a language model lacks: they read
one vector an image and not one a token, so there is nothing to gain in speed, and every value of their block depends on them. And dense by
need: inputs that are no multiple of 4, subclasses of nn.Linear (their forward is not ours to know).

magnitude  The two largest of four stay, by the fp32 weights that training starts from; the mask is fixed. Pruned entries get no gradient and
           are zero after every step in the weight and in its remainder, compensation or master. The average keeps the mask as well.
srste      SR-STE (arXiv 2102.04010): the weights stay dense, forward reads the two largest of four of the weight as it is stored, the gradient
           goes straight through to all four, and decay * weight is added to it where the weight is pruned. The term joins the gradient, before
           clipping, because AdamW would hardly notice it as a decoupled decay (arXiv 2404.01847). Added once a step, in fp32: a bf16
           gradient would round it away, so bf16 weights keep an fp32 sum of their gradients (accumulate=fp32, 4 bytes a parameter). Rounding,
           compensation and split master apply to the dense weight, and so does the average: one of masked weights would mix masks that
           change, and not be 2:4 either.

What generation and export read is always 2:4: averaged or last weights, pruned by their own magnitudes (for magnitude, no change).
Training multiplies masked dense matrices on every device. torchao's training kernels find other masks, 2:4 in 4x4 tiles so that the
transposed weight is sparse too: another algorithm, with other results. Generation uses torch's semi-structured kernels where it can.
"""

import re
import warnings

import torch
import torch.nn.functional as F
from torch import nn

DECAY = 2e-4  # lambda of SR-STE in its authors' code
LEFT_DENSE = re.compile(r".*(embed|modulation|time_emb)|out(\.|$)|(.*\.)?final(\.|$)")
BACKENDS = {"cuSPARSELt": "SparseSemiStructuredTensorCUSPARSELT", "CUTLASS": "SparseSemiStructuredTensorCUTLASS"}  # in torch.sparse


class SparsityError(ValueError):
    """A net that can't be made 2:4, or masks of another one. The message is one line: what is wrong and what to do."""


def two_of_four(weight):
    """bool mask, shaped like `weight` [..., n], n a multiple of 4: True for the two largest magnitudes of each four, of equal ones the first."""
    a, b, c, d = weight.detach().abs().unflatten(-1, (-1, 4)).unbind(-1)
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    # an entry stays that wins two of its three comparisons
    wins = [(ab, ac, ad), (~ab, bc, bd), (~ac, ~bc, cd), (~ad, ~bd, ~cd)]
    return torch.stack([(x & y) | (x & z) | (y & z) for x, y, z in wins], dim=-1).flatten(-2)


def is_two_of_four(weight):
    """Whether at most two of each four entries along the last dimension differ from zero."""
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return torch.where(two_of_four(weight), weight, 0)

    @staticmethod
    def backward(ctx, grad):
        return grad


class MaskedLinear(nn.Linear):
    """nn.Linear that multiplies by the two of four of its dense weight; the gradient reaches all four (straight-through)."""

    def forward(self, x):
        return F.linear(x, _Masked.apply(self.weight), self.bias)


class KernelLinear(nn.Linear):
    """nn.Linear whose weight is a semi-structured tensor: torch's kernels take a view of their input, so it has to be contiguous."""

    def forward(self, x):
        return F.linear(x.contiguous(), self.weight, self.bias)


def covered(model):
    """{name: module} of the Linear layers that 2:4 sparsity takes."""
    return {name: m for name, m in model.named_modules()
            if type(m) in (nn.Linear, MaskedLinear) and m.in_features % 4 == 0 and not LEFT_DENSE.match(name)}


def kernels(shape, dtype):
    """Names of BACKENDS whose kernels take a weight [out, in] of this dtype; their least sizes are torch's (bf16: 16x16 and 32x64)."""
    found = []
    for name, kind in BACKENDS.items():
        limits = getattr(torch.sparse, kind)._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
        if limits and shape[0] % limits.sparse_min_rows == 0 == shape[1] % limits.sparse_min_cols:
            found.append(name)
    return found


def backend(device):
    """The name in BACKENDS that this CUDA device runs, or None: CUTLASS's kernels are built for compute capability 8 alone."""
    if torch.backends.cusparselt.is_available():
        return "cuSPARSELt"
    return "CUTLASS" if torch.cuda.get_device_capability(device)[0] == 8 else None


def forward_flops(net, *args):
    """({module name: FLOPs}, {"linear" | "convolution" | "attention": FLOPs}) of net(*args); both on the meta device, so nothing is computed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    kinds = {"mm": "linear", "addmm": "linear", "convolution": "convolution"}  # the rest are products of activations
    totals = dict.fromkeys(("linear", "convolution", "attention"), 0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad(), torch.device("meta"):
        net(*args)
    counts = counter.get_flop_counts()
    for op, flops in counts.pop("Global").items():
        totals[kinds.get(op.__name__, "attention")] += flops
    return {name.partition(".")[2]: sum(ops.values()) for name, ops in counts.items()}, totals


class Sparse24:
    """2:4 sparsity carried out on `model`, in place: mode 'magnitude' prunes its weights, 'srste' changes how its Linears read theirs.

    machine: (level, reason) of 'sparse24' in precision.support. decay: lambda of SR-STE. Raises SparsityError for a net without such layers.
    """

    def __init__(self, model, mode, decay=None, machine=("no", "needs compute capability 8.0")):
        self.mode, self.decay, self.machine = mode, DECAY if decay is None else decay, machine
        self.layers = covered(model)
        if not self.layers:
            raise SparsityError(f"--sparse24 {mode}: this net has no Linear layer inside its blocks, and convolutions are never 2:4; "
                                f"use --model dit or a generative unet")
        self.masks, self.flops = {}, None
        if mode == "srste":
            for module in self.layers.values():
                module.__class__ = MaskedLinear  # the parameter and its name stay: checkpoints and averages are those of a dense run
        else:
            self._prune(lambda p: None)

    @torch.no_grad()
    def _prune(self, low_part):
        self.masks = {name: two_of_four(m.weight) for name, m in self.layers.items()}
        self.hold(low_part)

    # -- a training step

    @torch.no_grad()
    def add_to(self, grads):
        """Change the gradients {parameter: tensor} in place, once a step: none for fixed zeros, SR-STE's decay for entries pruned now."""
        for name, module in self.layers.items():
            g = grads.get(module.weight)
            if g is None:
                continue
            if self.mode == "srste":
                g.add_(torch.where(two_of_four(module.weight), 0, module.weight.float()), alpha=self.decay)
            else:
                g.masked_fill_(~self.masks[name], 0)

    @torch.no_grad()
    def hold(self, low_part):
        """Zero what a fixed mask prunes, in the weights and in what completes them (`low_part`: parameter -> tensor or None).

        An optimiser that sees no gradient and no moments leaves a zero alone; that all of them do is not for us to promise.
        """
        for name, mask in self.masks.items():
            weight = self.layers[name].weight
            for t in (weight, low_part(weight)):
                if t is not None:
                    t.masked_fill_(~mask, 0)

    # -- reading the weights

    def prune(self, values):
        """{name: tensor} with the covered weights pruned to the two of four largest by their own magnitudes; the others as they are."""
        names = {f"{name}.weight" for name in self.layers}
        return {name: torch.where(two_of_four(t), t, 0) if name in names else t for name, t in values.items()}

    def convert(self, net):
        """Let `net`, a copy of the model that holds pruned weights, run dense, or by the sparse kernels those layers that have one here."""
        for name in self.layers:
            module = net.get_submodule(name)
            module.__class__ = nn.Linear
            weight = module.weight
            here = backend(weight.device) if weight.is_cuda and self.machine[0] == "native" else None
            if here in kernels(weight.shape, weight.dtype):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # "prototype stage"
                    sparse = getattr(torch.sparse, BACKENDS[here]).from_dense(weight.detach().contiguous())
                module.weight, module.__class__ = nn.Parameter(sparse, requires_grad=False), KernelLinear

    # -- state and report

    def state_dict(self):
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state, low_part):
        """Take the masks of a saved run; state None is a dense run's, whose weights, loaded already, are pruned."""
        if self.mode == "srste":
            return
        if state is None or not state["masks"]:
            return self._prune(low_part)
        if {k: v.shape for k, v in state["masks"].items()} != {k: v.shape for k, v in self.masks.items()}:
            raise SparsityError("the 2:4 masks belong to another net")
        for name, mask in state["masks"].items():
            self.masks[name].copy_(mask)

    def count_flops(self, net, *args):
        """Let the report name shares of the forward FLOPs, counted on `net`, the model's like on the meta device, called with args."""
        self.flops = forward_flops(net, *args)

    def report(self, dtype):
        """{"bytes": of the masks, "why": a line, "layers": rows} for the ledger; dtype: of the weights that generation reads.

        A row is a group of like layers: name with * for a number, count, shape [out, in], share of the FLOPs (or None), kernels that take it.
        """
        per_layer, totals = self.flops or ({}, {})
        total, rows = sum(totals.values()), {}
        for name, module in self.layers.items():
            key = re.sub(r"\.\d+(?=\.)", ".*", name), tuple(module.weight.shape)
            row = rows.setdefault(key, dict(layers=key[0], count=0, shape=list(key[1]), flops=0.0 if total else None,
                                            kernels=kernels(key[1], torch.bfloat16)))
            row["count"] += 1
            if total:
                row["flops"] += per_layer.get(name, 0) / total
        why = f"two of four along the input of {len(self.layers)} Linears"
        if total:
            share = sum(row["flops"] for row in rows.values())
            why += (f" = {share:.1%} of the forward FLOPs (other Linears {totals['linear'] / total - share:.1%}, convolutions "
                    f"{totals['convolution'] / total:.1%}, attention products {totals['attention'] / total:.1%})")
        small = sum(row["count"] for row in rows.values() if not row["kernels"])
        why += f"; {small} too small for any sparse kernel" if small else ""
        why += f"; training multiplies masked dense matrices, generation {self._generation(dtype)}"
        return {"bytes": sum(mask.nbytes for mask in self.masks.values()), "why": why, "layers": list(rows.values())}

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


def lines(rows):
    """The rows of `Sparse24.report` as lines of text."""
    width = max(len(row["layers"]) for row in rows)
    return [f"  {row['layers']:<{width}} {row['count']:>3} x {'x'.join(map(str, row['shape'])):<10} "
            + ("" if row["flops"] is None else f"{row['flops']:>6.1%}  ") + (", ".join(row["kernels"]) or "no kernel: too small") for row in rows]
