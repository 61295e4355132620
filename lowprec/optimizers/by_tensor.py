"""Optimisers beside AdamW, each a short class after `optim.Rounded`, and the table of them all.

    optimizer = Lion(model.parameters(), lr=1e-4, update="stochastic")          # bf16 weights, any loop
    run = Precision(model, recipe(pure_bf16=True, stochastic=True), optimizer="muon")

SGD and Lion update each entry by itself, as AdamW does: a `direction` on flat vectors. Adafactor and Muon
look at a whole tensor: `ByTensor` gives them its shape, and they give back the fp32 update. All writing is
that of `Rounded`: to nearest, stochastically, with Kahan compensation, beside an exact master, in codes.
Weight decay is decoupled in all of them (arXiv 1711.05101). Needs torch alone; copy it.
"""

import math

import torch
from torch import nn

from ..kernels.exact_step import DECAY, SCALE
from ..layers.method import role, roles
from ..machine import Refused
from ..rounding import DTYPES, Noise, exact_weight, fused, key_words, noise_bits, rounded, write_weight
from .buckets import scale_of
from .rounded import BY_HAND, AdamW, Rounded

# ---- Entry by entry ----------------------------------------------------------------------------------------


class SGD(Rounded):
    """SGD with momentum, as torch.optim.SGD forms it: m = momentum m + g. Decay is decoupled (SGDW)."""

    moments = sites = ("momentum",)
    flags = {"lr": 0.01}

    def __init__(self, params, lr=0.01, momentum=0.9, nesterov=False, weight_decay=0.0, **writing):
        options = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def numbers(self, group, step):
        momentum, ahead = group["momentum"], bool(group["nesterov"])
        # the step is lr (a g + b m)
        return [momentum, float(ahead), momentum if ahead else 1.0, -float(group["lr"])]

    @staticmethod
    def direction(g, moments, h):
        m = moments[0] * h[2] + g
        return h[5] * (h[3] * g + h[4] * m), (m,)

    def decay(self, p, name):
        known = name in self.moments
        return (self._group(p)["momentum"], math.inf) if known else (math.nan, 0)


class Lion(Rounded):
    """Lion (arXiv 2302.06675): the sign of a mean of gradient and momentum. All steps have the size lr."""

    moments = ("exp_avg",)
    flags = {"lr": 1e-4, "beta2": 0.99}

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **writing):
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay), **writing)

    def numbers(self, group, step):
        beta1, beta2 = group["betas"]
        return [1 - beta1, 1 - beta2, -float(group["lr"])]

    @staticmethod
    def direction(g, moments, h):
        (m,) = moments
        mean = m + h[2] * (g - m)
        # the sign of NaN is 0 in torch: the entry would stand still for ever, and nobody would see why
        sign = torch.where(mean == mean, mean.sign(), mean)
        return h[4] * sign, (m + h[3] * (g - m),)

    def decay(self, p, name):
        known = name in self.moments
        return (self._group(p)["betas"][1], math.inf) if known else (math.nan, 0)


BY_HAND.update({SGD.direction: "sgd", Lion.direction: "lion"})

# ---- Tensor by tensor --------------------------------------------------------------------------------------


class ByTensor(Rounded):
    """An optimiser whose update of an entry depends on its whole tensor: each tensor is a bucket of its own.

    One has `moments`, `shape`, `numbers` and `update_tensor`; see Adafactor. `direction` is not asked.
    """

    announced = None  # (grads, scale) that `announce` told of
    by_rows = False

    def shape(self, p, name):
        """The shape in which a moment of p is held; None for one that it does not keep."""
        return p.shape

    def update_tensor(self, g, moments, numbers, held):
        """(fp32 update, new moments) of one tensor, from its gradient g, scaled, its moments {name: tensor}
        and the weight held, all fp32 in their shapes. numbers: what `numbers` said, a list of float.
        """
        raise NotImplementedError

    # -- state

    def size(self, p, name):
        shape = self.shape(p, name)
        return 0 if shape is None else math.prod(shape)

    def _alike(self, i, p):
        return i

    def _shares(self, name, flat, bucket):
        (p,) = bucket.params
        if name in self.moments and name not in self._coded(p):
            return [flat.view(self.shape(p, name))]
        return super()._shares(name, flat, bucket)

    def _whole(self, p, state):
        """{name: fp32 moment of p in its shape}, of those that it keeps."""
        names = [name for name in self.moments if name in state]
        loaded = {name: self._loaded(name, state, self.size(p, name)).to(p.device) for name in names}
        return {name: t.float().view(self.shape(p, name)) for name, t in loaded.items()}

    # -- one step

    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        self.announced = None
        return super().step(closure, grads=grads, grad_scale=grad_scale)

    def _rows(self, table, index, step, piece):
        """As Rounded's: one row for the tensor, whose key rounds the weight, then one for each moment."""
        group = self.param_groups[index]
        numbers = [1 - float(group["lr"]) * group["weight_decay"], 1.0]
        row = table.add(numbers, key_words(self.seed, step, piece.start))
        for kind, _ in enumerate(self.moments, Noise.EXP_AVG):
            table.add(numbers, key_words(self.seed, step, piece.start, kind))
        return [(row, 0, piece.numel)]

    def _moved_along(self, piece, rows):
        return None  # the direction needs the whole tensor, and is not in the kernel that writes

    def _apply(self, at, p, g, state, grad_scale, average=None):
        piece, table, row, index, step = at
        if not piece.numel:  # it holds no moments
            return
        (parameter,), h = piece.params, table.numbers[row]
        low, stochastic = self._low(state), self.update == "stochastic"
        held, g = exact_weight(p, low), (g.float() * h[SCALE]).view(parameter.shape)
        numbers = self.numbers(self.param_groups[index], step)
        old = self._whole(parameter, state)
        delta, new = self.update_tensor(g, old, numbers, held.view(parameter.shape))
        x = held * h[DECAY] + delta.reshape(-1)
        fused(_write_kernel, x, p, low, table.keys[row], stochastic, compiled=self.compiled)
        for further, name in enumerate(self.moments, row + 1):
            if name in state:
                key = table.keys[further] if stochastic else None
                self._keep(name, new[name].reshape(-1), state, key)

    def _keep(self, name, value, state, key):
        """Write fp32 `value` [n] as the moment is held."""
        if f"{name}_scale" in state:
            signed = self.signed.get(name, True)
            self.coders[name].encode(value, state[name], state[f"{name}_scale"], signed, key, self.compiled)
            return
        held = state[name].view(-1)
        key = key if held.dtype == torch.bfloat16 else None
        fused(_moment_kernel, value, held, key, compiled=self.compiled)

    # -- questions

    def announce(self, grads, grad_scale):
        self.announced = grads, grad_scale

    def wanted_together(self, params, gradients, pick=torch.flatten, held=None):
        """As Rounded's; NaN where a sample of the gradient is given and the whole was not announced."""
        return [self._wanted(p, g, pick) for p, g in zip(params, gradients, strict=True)]

    @torch.no_grad()
    def _wanted(self, p, g, pick):
        whole = self._gradient(p, g)
        if whole is None:
            return torch.full_like(g, math.nan, dtype=torch.float32)
        group, state = self._group(p), self._settled(p, *self.moments)
        held = exact_weight(p.detach(), self.low_part(p))
        numbers = self.numbers(group, state["step"] + 1)
        delta, _ = self.update_tensor(whole.view(p.shape), self._whole(p, state), numbers, held)
        return pick(delta - float(group["lr"]) * group["weight_decay"] * held)

    def _gradient(self, p, g):
        """The whole scaled gradient of p, fp32; None where it is not known."""
        if g.numel() == p.numel():
            return g.float()
        grads, scale = self.announced or ({}, 1.0)
        found = p.grad if grads is None else grads.get(p)
        return None if found is None else found.detach().float() * scale_of(scale, p)


def _write_kernel(x, p, low, key, stochastic):
    write_weight(x, p, low, noise_bits(x.numel(), key)[0] if stochastic else None)


def _moment_kernel(value, held, key):
    held.copy_(rounded(value, held.dtype, None if key is None else noise_bits(value.numel(), key)[0]))


class Adafactor(ByTensor):
    """Adafactor (arXiv 1804.04235) without momentum: of a matrix the means of g^2 by row and by column.

    A convolution's kernel [out, in, ...] is the matrix [out, rest]; vectors keep all of exp_avg_sq. A step
    is min(lr, 1/sqrt(t)) of the tensor's RMS (at least eps[1]), clipped to an RMS of `clip` before that. So
    a tensor that starts at zero, as the last layer of many diffusion nets, grows slowly at first. The squares
    decay by 1 - t^beta2_decay. eps[0] is added to g^2, as the paper has it; torch.optim.Adafactor
    bounds their mean instead, by 1.2e-7, which changes gradients below 3e-4.
    """

    moments = ("row_var", "col_var", "exp_avg_sq")
    sites = ("row_var", "col_var")
    signed = dict.fromkeys(moments, False)
    flags = {"lr": 1e-2}

    def __init__(
        self, params, lr=1e-2, beta2_decay=-0.8, eps=(1e-30, 1e-3), clip=1.0, weight_decay=0.0, **writing
    ):
        options = dict(lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), clip=clip, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def shape(self, p, name):
        if p.dim() < 2:
            return p.shape if name == "exp_avg_sq" else None
        rows = p.shape[0]
        return {"row_var": (rows, 1), "col_var": (1, p.numel() // max(1, rows))}.get(name)

    def numbers(self, group, step):
        rate = min(float(group["lr"]), step**-0.5)
        return [step ** group["beta2_decay"], rate, *group["eps"], group["clip"]]

    def update_tensor(self, g, moments, numbers, held):
        rest, rate, eps1, eps2, clip = numbers
        squares, new = g.square() + eps1, {}
        if "row_var" in moments:
            squares = squares.flatten(1)  # [out, in, ...] -> [out, rest]
            rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
            new["row_var"] = moments["row_var"].lerp(rows, rest)
            new["col_var"] = moments["col_var"].lerp(columns, rest)
            # rows * columns / mean(rows) would be 0 in fp32 for small gradients: a root of each factor
            by_row = (new["row_var"] / new["row_var"].mean()).rsqrt()
            update = (g.flatten(1) * by_row * new["col_var"].rsqrt()).view_as(g)
        else:
            new["exp_avg_sq"] = moments["exp_avg_sq"].lerp(squares, rest)
            update = g * new["exp_avg_sq"].rsqrt()
        size = _rms(held).clamp_min(eps2) * rate / (_rms(update) / clip).clamp_min(1.0)
        return -size * update, new

    def decay(self, p, name):
        step = self.state[p]["step"] + 1
        known = name in self.moments
        return (1 - step ** self._group(p)["beta2_decay"], math.inf) if known else (math.nan, 0)


def _rms(t):
    return torch.linalg.vector_norm(t) / max(1, t.numel()) ** 0.5


class Muon(ByTensor):
    """Muon (Keller Jordan 2024): the momentum of a matrix, its singular values brought near 1.

    For matrices of hidden layers; a convolution's kernel [out, in, ...] is the matrix [out, rest]. The other
    parameters belong to AdamW, see `divided`. orthogonalise: the dtype of the Newton-Schulz iteration, "fp32"
    or "bf16", as published. adjust: "match_rms_adamw" (arXiv 2502.16982) makes steps as long as AdamW's, so
    that one learning rate serves both; "original" multiplies by sqrt(max(1, rows / columns)).
    """

    moments = ("momentum",)
    sites = ("momentum", "orthogonalise")
    others = "adamw"

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.0,
        orthogonalise="fp32",
        adjust="match_rms_adamw",
        **writing,
    ):
        self.dtype, self.adjust = DTYPES[orthogonalise], ADJUST[adjust]
        options = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def add_param_group(self, param_group):
        params = [param_group["params"]] if torch.is_tensor(param_group["params"]) else param_group["params"]
        param_group = {**param_group, "params": list(params)}
        given = [p[1] if isinstance(p, tuple) else p for p in param_group["params"]]
        if any(p.dim() < 2 for p in given if torch.is_tensor(p)):
            alone = "Muon takes matrices and kernels of convolutions, and here is a vector"
            raise Refused(f"{alone}: give biases, norms, embeddings and heads to AdamW (peers.build does)")
        super().add_param_group(param_group)

    def numbers(self, group, step):
        return [group["momentum"], float(bool(group["nesterov"])), float(group["lr"])]

    def update_tensor(self, g, moments, numbers, held):
        momentum, ahead, lr = numbers
        m = moments["momentum"].lerp(g, 1 - momentum)
        matrix = (g.lerp(m, momentum) if ahead else m).flatten(1)  # [out, in, ...] -> [out, rest]
        update = orthogonalised(matrix, self.dtype).float()
        return (-lr * self.adjust(*matrix.shape) * update).reshape(g.shape), {"momentum": m}

    def decay(self, p, name):
        known = name in self.moments
        return (self._group(p)["momentum"], math.inf) if known else (math.nan, 0)


ADJUST = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}


def orthogonalised(matrix, dtype, steps=5, eps=1e-7):
    """A matrix [m, n] with the singular vectors of this one and singular values between 0.7 and 1.2, by the
    quintic Newton-Schulz iteration of Muon in `dtype`, which the result has.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype, copy=True)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))  # so that no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


# ---- The choice --------------------------------------------------------------------------------------------

OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "lion": Lion, "adafactor": Adafactor, "muon": Muon}


def kinds(name):
    """The classes that serve --optimizer `name`, itself first; () for what is none of ours. name: of
    OPTIMIZERS, or a class.
    """
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else name
    if not (isinstance(kind, type) and issubclass(kind, Rounded)):
        return ()
    return (kind, *kinds(kind.others)) if kind.others else (kind,)


def divided(groups, name, net=None):
    """Parameter groups of which each optimiser has what it takes: those of an optimiser with `others` in two.

    name: the optimiser of groups without an `optimizer`. net: tells hidden layers; None: by shape alone.
    """
    found = []
    for group in groups:
        kind = group.get("optimizer", name)
        others = next((k.others for k in kinds(kind)), None)
        if others is None:
            found.append(group)
            continue
        params = [group["params"]] if torch.is_tensor(group["params"]) else list(group["params"])
        hidden = hidden_matrices(params if net is None else net)
        own = [p for p in params if p in hidden]
        rest = [p for p in params if p not in hidden]
        parts = ((own, kind), (rest, others))
        found += [{**group, "params": part, "optimizer": its} for part, its in parts if part]
    return found


def hidden_matrices(net):
    """The set of the parameters that Muon takes: matrices and kernels of the layers between the first and the
    last. Not embeddings, heads and norms, as `method.roles` and names say, nor the first convolution.

    net: a module, or parameters without names, of which all matrices and kernels are meant.
    """
    if not isinstance(net, nn.Module):
        return {p for p in net if _matrix(p, p.dim() > 2)}
    found, role_of, first = set(), roles(net), True
    apart = {"norm", "embedding", "head"}
    for name, module in net.named_modules():
        convolution = isinstance(module, nn.modules.conv._ConvNd)
        for own, p in module.named_parameters(recurse=False):
            full = f"{name}.{own}".removeprefix(".")
            if convolution and first and p.dim() > 1:
                first = False
            elif _matrix(p, convolution) and not apart & (role_of[name] | role(full, module)):
                found.add(p)
    tables = {p for m in net.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return found - tables  # a head that is tied to an embedding among them


def _matrix(p, convolution):
    """Whether p has rows and columns: a vector that is laid out as a matrix has none."""
    return (p.dim() == 2 or convolution and p.dim() > 2) and min(p.flatten(1).shape) > 1
