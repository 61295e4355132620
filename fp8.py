"""FP8 training: matrix products of 8-bit floats, in hardware on Ada, Hopper and later, elsewhere as the same numbers. Needs torch; copy it.

    covered = fp8.convert(model, fp8.Options(recipe="delayed"))      # nn.Linear -> FP8 in place; embeddings and the last layer stay
    for x, y in loader:
        with torch.autocast(x.device.type, torch.bfloat16), covered.context():
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        covered.step()                                               # delayed scaling: roll the amax histories
    print(covered)                                                   # layers, how each is multiplied, what was left out and why
    with covered.plain(model): evaluate(model)                       # without FP8

A finished net is quantised for drawing from it by `quantise(model, "fp8")` or, through torchao, `quantise(model, "int8")`.
A model of bare nn.Parameter has a `Scaling` per product instead: `self.scaling = fp8.Scaling()`, and `fp8.matmul(x, self.w, self.scaling)`
in forward; `convert` switches it on.

An operand x is stored as round(x * scale) in e4m3 (3 mantissa bits, largest value 448) or e5m2 (2 bits, 57344), with an fp32 scale that
brings its largest magnitude, amax, to the top of the format (arXiv 2209.05433). Products are summed in fp32, divided by both scales and
rounded once. Formats: hybrid (inputs and weights e4m3, gradients e5m2), e4m3, e5m2. Recipes, where the scale comes from:

    tensorwise  this tensor's amax (Transformer Engine: Float8CurrentScaling)
    rowwise     the amax of each row, or column, along which a product sums
    delayed     the amaxes of past steps (Transformer Engine: DelayedScaling). It lags: what grows from zero is clipped for some steps,
                which the fp8_saturated_* shares of `Covered.step` show

Backends: te (Transformer Engine 2.x, requirements-te.txt), torchao, scaled_mm (this file, by torch._scaled_mm where device and formats
allow), emulate (this file: the same 8-bit operands, decoded and multiplied in fp32, anywhere). Convolutions, attention products, norms,
embeddings, the last layer and the loss are never in FP8. On a CPU the numbers are those of a GPU and the speed is not: a step takes longer
than in fp32, by scaled_mm still longer than by emulate.
"""

import dataclasses
import functools
import importlib
import logging
import math
import re
import warnings
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRAD = range(3)  # the operands of the three products of a layer: y = x w, dx = g w^T, dw = x^T g
OPERANDS = ("input", "weight", "grad")
FORMATS = {"hybrid": (E4M3, E4M3, E5M2), "e4m3": (E4M3, E4M3, E4M3), "e5m2": (E5M2, E5M2, E5M2)}
CHOICES = {"backend": ("auto", "te", "torchao", "scaled_mm", "emulate"), "format": tuple(FORMATS), "recipe": ("delayed", "tensorwise", "rowwise"),
           "amax_compute_algo": ("max", "most_recent")}
MULTIPLE = 16  # what CUDA's FP8 kernels ask of every contracted and every output dimension; kept on all devices


class FP8Error(ValueError):
    """FP8 as asked can't run here. The message is one line: what is wrong, and what works instead."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How products are taken in FP8; see the top of this file. margin: delayed scaling stays 2^margin below the top of the format.

    Raises FP8Error for unknown values, and for amax settings of a recipe that keeps no history.
    """

    backend: str = "auto"
    format: str = "hybrid"
    recipe: str = "tensorwise"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0

    def __post_init__(self):
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                flag = name if name.startswith("amax") else f"fp8_{name}"
                raise FP8Error(f"--{flag} {getattr(self, name)}: unknown; choose from {', '.join(values)}")
        if self.amax_history_len < 1:
            raise FP8Error(f"--amax_history_len {self.amax_history_len}: a history has 1 step or more")
        if self.recipe != "delayed" and (self.amax_history_len, self.amax_compute_algo, self.margin) != (1024, "max", 0):
            raise FP8Error(f"--fp8_recipe {self.recipe} keeps no history of amax: --amax_history_len and --amax_compute_algo need "
                           f"--fp8_recipe delayed")

    @property
    def dtypes(self):
        """torch dtypes of input, weight and gradient."""
        return FORMATS[self.format]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Rounding and scales


def cast(x, scale, dtype):
    """x * scale in `dtype`, to nearest, values beyond its largest becoming that one; NaN stays. x any float, scale fp32 that broadcasts.

    The product is fp32: in bf16 it would be rounded twice. The clamp is needed, since torch's own cast to e5m2 overflows to infinity.
    """
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp_(-top, top).to(dtype)


def amax_of(x, dim=None):
    """Largest magnitude of x [M, N], fp32 [1, 1], or that along dim, [1, N] or [M, 1]. NaN and infinity show."""
    if dim is None:
        low, high = x.aminmax()
        return torch.maximum(-low, high).float().view(1, 1)
    low, high = x.aminmax(dim=dim, keepdim=True)
    return torch.maximum(-low, high).float()


def current_scale(amax, top, margin=0):
    """top / amax / 2^margin, at most the largest fp32; 1 where amax is 0. An infinite amax gives 0: its product is NaN, and seen."""
    scale = (top / amax / 2**margin).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax == 0, 1.0, scale)


def delayed_scale(amax, old, top, margin=0):
    """Transformer Engine's rule: top / amax / 2^margin, at most the largest fp32; the old scale where amax is 0, infinite or NaN."""
    return torch.where((amax > 0) & amax.isfinite(), current_scale(amax, top, margin), old)


def roll(history, scale, tops, algo="max", margin=0):
    """End a step of delayed scaling, in place, as Transformer Engine does. history [N, S]: row 0 the amax of this step, then of past ones
    from the oldest on; scale [S]; tops [S]. New scales come from the largest of the history or from row 0 (most_recent); then the history
    is rolled by -1 and row 0 cleared."""
    amax = history.amax(0) if algo == "max" else history[0].clone()
    scale.copy_(delayed_scale(amax, scale, tops, margin))
    history.copy_(history.roll(-1, 0))
    history[0] = 0


# ---------------------------------------------------------------------------------------------------------------------------------------
# Products


def _hopper(device):
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_mm_refusal(device, a, b):
    """Why torch._scaled_mm can't multiply formats a and b on a device, or None."""
    if a == b == E5M2:
        return "no kernel multiplies e5m2 by e5m2"
    if device.type == "cuda" and not _hopper(device):
        return "FP8 tensor cores start at compute capability 8.9"
    return None if device.type in ("cuda", "cpu", "meta") else f"torch has no FP8 product on {device.type}"


@functools.cache
def _values(dtype, device):
    """fp32 [256]: what each byte of an 8-bit format stands for."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


def decode(x):
    """FP8 x [M, N] in fp32, exactly. By table on a CPU, where torch's own conversion takes 2 to 15 times as long."""
    if x.device.type != "cpu":
        return x.float()
    if not x.is_contiguous():
        return decode(x.t()).t() if x.t().is_contiguous() else decode(x.contiguous())
    return _values(x.dtype, x.device).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def product(a, b, out_dtype, emulated=False):
    """[M, N] in out_dtype of operands (fp8 [M, K], inverse scale) and (fp8 [K, N], inverse scale); a scale is [1, 1], or [M, 1] and [1, N].

    M, K and N are multiples of 16. emulated, or without a kernel, the operands are multiplied in fp32, not bf16: FP8 values are exact in
    both, but only fp32 leaves the sums unrounded until the scales are off, as the kernels do.
    """
    (a, a_inverse), (b, b_inverse) = a, b
    if not emulated and scaled_mm_refusal(a.device, a.dtype, b.dtype) is None:
        rowwise = a_inverse.numel() > 1 or b_inverse.numel() > 1
        scale_a, scale_b = a_inverse.flatten()[:, None], b_inverse.flatten()[None]
        if a.device.type == "cpu":  # its kernel for one scale a tensor takes a thousand times as long on some CPUs (Xeon, torch 2.14)
            scale_a, scale_b = scale_a.expand(len(a), 1).contiguous(), scale_b.expand(1, b.shape[1]).contiguous()
        # cuBLAS wants a in rows and b in columns; its rowwise kernel writes bf16 alone
        columns = b if b.t().is_contiguous() else b.t().contiguous().t()
        return torch._scaled_mm(a.contiguous(), columns, scale_a=scale_a, scale_b=scale_b,
                                out_dtype=torch.bfloat16 if rowwise else out_dtype).to(out_dtype)
    with torch.autocast(a.device.type, enabled=False):
        return ((decode(a) @ decode(b)) * a_inverse * b_inverse).to(out_dtype)


def _t(pair):
    return pair[0].t(), pair[1].t()


class _Product(torch.autograd.Function):
    """x [M, K], w [K, N] -> x w in out_dtype, all three products of a training step in FP8."""

    @staticmethod
    def forward(ctx, x, w, scaling, out_dtype):
        a, b = scaling.quantise(x, INPUT, 1), scaling.quantise(w, WEIGHT, 0)
        ctx.scaling, ctx.dtypes = scaling, (x.dtype, w.dtype)
        # a scale a row belongs to one direction of summing: rowwise quantises anew, the others keep the 8-bit operands
        ctx.save_for_backward(*((x, w) if scaling.rowwise else (*a, *b)))
        return product(a, b, out_dtype, scaling.emulated)

    @staticmethod
    def backward(ctx, g):
        scaling, (x_dtype, w_dtype), saved = ctx.scaling, ctx.dtypes, ctx.saved_tensors
        dx = dw = None
        along_n = scaling.quantise(g, GRAD, 1)
        if ctx.needs_input_grad[0]:
            w = scaling.quantise(saved[1], WEIGHT, 1) if scaling.rowwise else saved[2:]
            dx = product(along_n, _t(w), x_dtype, scaling.emulated)
        if ctx.needs_input_grad[1]:
            x = scaling.quantise(saved[0], INPUT, 0) if scaling.rowwise else saved[:2]
            along_m = scaling.quantise(g, GRAD, 0) if scaling.rowwise else along_n
            dw = product(_t(along_m), x, w_dtype, scaling.emulated).t()  # the gradient first: kernels take e5m2 only there
        return dx, dw, None, None


class Scaling(nn.Module):
    """The scales of one product x w, its state a part of the model's. Off, it is x @ w; `convert` or `switch` puts it in FP8.

    Called with x [..., K] and w [K, N], or x [..., H or 1, M, K] and w [H, K, N]; returns x @ w in autocast's dtype or that of x.
    A w whose K or N is no multiple of 16 is multiplied without FP8, and `left_out` says so. Under delayed scaling an operand's first use,
    which has no past, is scaled by its own amax: Transformer Engine starts at scale 1, where small gradients round to 0.
    """

    def __init__(self, options=None, device=None):
        super().__init__()
        self.options, self.observing, self.counts, self.left_out = None, False, None, None
        if options is not None:
            self.switch(options, device)

    def switch(self, options, device=None):
        """FP8 on as `options` say; state is made anew."""
        self.options = options
        if options.recipe == "delayed":
            self.register_buffer("amax_history", torch.zeros(options.amax_history_len, 3, device=device))
            self.register_buffer("scale", torch.zeros(3, device=device))  # 0: no past

    @property
    def rowwise(self):
        return self.options.recipe == "rowwise"

    @property
    def emulated(self):
        return self.options.backend == "emulate"

    def quantise(self, x, operand, dim):
        """x [M, N] as INPUT, WEIGHT or GRAD of a product that sums along dim -> (fp8 [M, N], fp32 inverse scale)."""
        dtype = self.options.dtypes[operand]
        amax = amax_of(x, dim if self.rowwise else None)
        scale = current_scale(amax, torch.finfo(dtype).max, self.options.margin)
        if self.options.recipe == "delayed":
            old = self.scale[operand].view(1, 1)
            scale = torch.where(old > 0, old, scale)
            if self.training:
                self.amax_history[0, operand] = torch.maximum(self.amax_history[0, operand], amax.view(()))
        q = cast(x, scale, dtype)
        if self.observing:
            self._count(x, scale, q, operand)
        return q, scale.reciprocal()

    def _count(self, x, scale, q, operand):
        if self.counts is None:
            self.counts = torch.zeros(3, 4, dtype=torch.float64, device=x.device)
        finfo = torch.finfo(q.dtype)
        clipped = (x.float() * scale).abs() > finfo.max * (1 + finfo.eps / 3.5)  # above half an ulp over 1.75 * 2^n
        nonzero = x != 0
        zeroed = nonzero & (q.float() == 0)
        self.counts[operand] += torch.stack([zeroed.sum(), nonzero.sum(), clipped.sum(), torch.ones_like(clipped).sum()])

    def forward(self, x, w):
        if self.options is None or x.is_meta or x.numel() == 0:
            return x @ w
        if w.dim() == 3:
            heads = x.expand(*x.shape[:-3], w.shape[0], *x.shape[-2:]).unbind(-3)
            return torch.stack([self(one, each) for one, each in zip(heads, w.unbind(0))], dim=-3)
        self.left_out = shape_refusal(*w.shape)
        if self.left_out:
            return x @ w
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = x.reshape(-1, x.shape[-1])
        # the weight's gradient sums over rows: zero rows bring them to a multiple of 16 and add nothing
        padded = F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))
        return _Product.apply(padded, w, self, dtype)[: len(rows)].reshape(*x.shape[:-1], w.shape[-1])

    @torch.no_grad()
    def roll(self):
        if self.options is not None and self.options.recipe == "delayed":
            tops = self.scale.new_tensor([torch.finfo(d).max for d in self.options.dtypes])
            roll(self.amax_history, self.scale, tops, self.options.amax_compute_algo, self.options.margin)


def matmul(x, w, state):
    """x @ w in FP8 for a model that holds bare parameters: x [..., K], w [K, N] or [H, K, N], state its `Scaling`. See there."""
    return state(x, w)


class Linear(nn.Linear):
    """nn.Linear over the same parameters, its product in FP8; the bias is added in the output's dtype."""

    def __init__(self, linear, options):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.weight, self.bias = linear.in_features, linear.out_features, linear.weight, linear.bias
        self.scaling = Scaling(options, linear.weight.device)

    def forward(self, x):
        y = self.scaling(x, self.weight.t())
        return y if self.bias is None else y + self.bias.to(y.dtype)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Backends


def _import(name):
    """(module, None), or (None, why it can't be imported)."""
    quiet = logging.root.manager.disable  # they log about parts that this machine lacks
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), None
    except Exception as error:  # a library that finds no CUDA raises what it likes
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    finally:
        logging.disable(quiet)


def backend_refusal(backend, options, device):
    """Why a backend can't carry out the options on a device, or None."""
    if backend == "te":
        if options.recipe == "rowwise":
            return "Transformer Engine has no rowwise scaling"
        if options.format == "e5m2":
            return "Transformer Engine trains in hybrid and e4m3 only"
        te, error = _import("transformer_engine.pytorch")
        if te is None:
            return f"Transformer Engine can't be imported ({error}); requirements-te.txt installs it"
        if not hasattr(te, "autocast"):
            return "this Transformer Engine is too old; requirements-te.txt installs another"
        return None if _hopper(device) else "Transformer Engine needs an NVIDIA GPU of compute capability 8.9 or later"
    if backend == "torchao":
        if options.recipe == "delayed":
            return "torchao has no delayed scaling"
        if options.format == "e5m2":
            return "no kernel multiplies e5m2 by e5m2"
        module, error = _import("torchao.float8")
        if module is None:
            return f"torchao can't be imported ({error}); pip install -r requirements.txt"
        works = device.type == "cpu" or _hopper(device)
        return None if works else "torchao needs a CPU, or an NVIDIA GPU of compute capability 8.9 or later"
    if device.type == "mps":
        return "torch has no float8 on mps"
    return scaled_mm_refusal(device, E4M3, E4M3) if backend == "scaled_mm" else None


def resolve(options, device):
    """The options with a backend that can run them on the device: te, then torchao, on GPUs with FP8 tensor cores, else scaled_mm, else emulate.

    Raises FP8Error, naming the backends that can, when the one asked for can't.
    """
    device = torch.device(device)
    refusals = {}

    def works(backend):
        refusals[backend] = backend_refusal(backend, options, device)
        return refusals[backend] is None

    if options.backend == "auto":
        candidates = ("te", "torchao", "scaled_mm", "emulate") if _hopper(device) else ("scaled_mm", "emulate")
        chosen = next(filter(works, candidates), None)
        if chosen is None:
            raise FP8Error(f"--fp8 can't run on {device.type}: {refusals['emulate']}; use --bf16")
        return dataclasses.replace(options, backend=chosen)
    if not works(options.backend):
        others = [b for b in CHOICES["backend"][1:] if b != options.backend and works(b)]
        instead = f"here works --fp8_backend {' or '.join(others)}" if others else "use --bf16"
        raise FP8Error(f"--fp8_backend {options.backend}: {refusals[options.backend]}; {instead}")
    return options


def _te_recipe(options):
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

    form = Format.HYBRID if options.format == "hybrid" else Format.E4M3
    if options.recipe == "delayed":
        return DelayedScaling(fp8_format=form, amax_history_len=options.amax_history_len, amax_compute_algo=options.amax_compute_algo,
                              margin=options.margin)
    return Float8CurrentScaling(fp8_format=form)


def _te_linear(linear, recipe):
    """A Transformer Engine Linear over the parameters of an nn.Linear."""
    import transformer_engine.pytorch as te

    class TELinear(te.Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1])
            return super().forward(F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE)))[: len(rows)].reshape(*x.shape[:-1], self.out_features)

        # Transformer Engine's own extra state is a pickle, and loading one can run code: the same tensors, as tensors
        def get_extra_state(self):
            if not recipe.delayed() or "scaling_fwd" not in self.fp8_meta:
                return {}
            states = {key: self.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")}
            return {key: {"scale": s.scale.cpu(), "amax_history": s.amax_history.cpu()} for key, s in states.items()}

        def set_extra_state(self, state):
            if not state:
                return
            with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                self.init_fp8_metadata()
            for key, tensors in state.items():
                self.fp8_meta[key].scale.copy_(tensors["scale"])
                self.fp8_meta[key].amax_history.copy_(tensors["amax_history"])

    new = TELinear(linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=linear.weight.dtype,
                   device=linear.weight.device)
    new.weight = linear.weight
    if linear.bias is not None:
        new.bias = linear.bias
    return new


def _torchao_linear(linear, options):
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear

    granularity = ScalingGranularity.AXISWISE if options.recipe == "rowwise" else ScalingGranularity.TENSORWISE
    casts = [CastConfig(scaling_granularity=granularity, target_dtype=dtype) for dtype in options.dtypes]
    config = Float8LinearConfig(cast_config_input=casts[INPUT], cast_config_weight=casts[WEIGHT], cast_config_grad_output=casts[GRAD],
                                round_scales_to_power_of_2=options.recipe == "rowwise",  # as torchao's own rowwise recipe
                                pad_inner_dim=True)
    new = Float8Linear.from_float(linear, config)
    if linear.weight.device.type == "cpu":  # torchao heeds autocast on CUDA alone
        new.register_forward_pre_hook(lambda m, args: (args[0].to(m.weight.dtype),))
    # torchao reshapes its operand to a matrix, and can't copy one with a scale a row; what leaves an attention is a transposed view
    new.register_forward_pre_hook(lambda m, args: (args[0].contiguous(),))
    return new


# ---------------------------------------------------------------------------------------------------------------------------------------
# A model

EXCLUDE = {  # reason: qualified names that stay out of FP8
    "embedding": re.compile("embed"),
    "last layer": re.compile(r"(.*\.)?(final|lm_head)(\.|$)|out(\.|$)"),
}
CONVOLUTIONS = nn.modules.conv._ConvNd


def shape_refusal(k, n):
    """Why a weight of k inputs and n outputs can't be multiplied in FP8, or None."""
    odd = [f"{value} {what}" for value, what in ((k, "inputs"), (n, "outputs")) if value % MULTIPLE]
    return f"{' and '.join(odd)}: no multiple of {MULTIPLE}" if odd else None


def layer_refusal(name, module):
    """Why an nn.Linear or convolution stays out of 8 bits, or None."""
    if isinstance(module, CONVOLUTIONS):
        return "convolution: stays as it is"
    for reason, pattern in EXCLUDE.items():
        if pattern.match(name) or reason == "embedding" and pattern.search(name):
            return reason
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is more than an nn.Linear"
    return shape_refusal(module.in_features, module.out_features) if name else "the model is this one layer: wrap it in a module"


def _eligible(model, flag, what, instead):
    """({name: nn.Linear}, {name: Scaling}, {name: reason} of what is left out) of a model. Raises FP8Error when nothing is eligible."""
    modules = list(model.named_modules())
    functional = {name: m for name, m in modules if isinstance(m, Scaling) and what == "FP8"}
    layers = {name: m for name, m in modules if isinstance(m, (nn.Linear, CONVOLUTIONS))}
    left_out = {name: why for name, m in layers.items() if (why := layer_refusal(name, m))}
    left_out |= {name: f"bare parameters: {what} takes nn.Linear alone" for name, m in modules
                 if isinstance(m, Scaling) and name not in functional}
    linears = {name: m for name, m in layers.items() if name not in left_out}
    if not linears and not functional:
        first = next(((n, w) for n, w in left_out.items() if not w.startswith("convolution")), None)
        reason = f"'{first[0]}' is left out ({first[1]})" if first else "it has no nn.Linear, and convolutions stay as they are"
        raise FP8Error(f"{flag}: no layer of this net can be multiplied in {what}, {reason}; use {instead}")
    return linears, functional, left_out


def convert(model, options=Options(), flag="--fp8", instead="--bf16", dry=False):
    """Put `model`'s products in FP8, in place, over the same parameters, under the same names. Returns what was `Covered`.

    Every nn.Linear is covered whose features are multiples of 16, but for embeddings and the last layer, found by name (EXCLUDE), and every
    `Scaling`. Raises FP8Error when nothing is, or when the options can't run on the model's device; flag and instead are words of it.
    dry, or a model on the meta device: the layers stay, the report alone is made.
    """
    device = next(model.parameters()).device
    if device.type != "meta":
        options = resolve(options, device)
    linears, functional, left_out = _eligible(model, flag, "FP8", instead)
    covered = Covered(options, linears, functional, left_out, device)
    if dry or device.type == "meta":
        return covered
    for name, linear in linears.items():
        if options.backend == "te":
            new = _te_linear(linear, covered.te_recipe)
        else:
            new = _torchao_linear(linear, options) if options.backend == "torchao" else Linear(linear, options)
        parent, _, attribute = name.rpartition(".")
        covered.swaps.append((model.get_submodule(parent), attribute, linear, new.train(linear.training)))
        setattr(*covered.swaps[-1][:2], new)
    for scaling in functional.values():
        scaling.switch(dataclasses.replace(options, backend="emulate" if options.backend == "emulate" else "scaled_mm"), device)
    return covered


def quantise(model, kind, dry=False):
    """Post-training quantisation: put a finished `model`'s layers, in place, in 'fp8' or 'int8' to draw from it. Returns its `Coverage`.

    Call the model under autocast to bf16. The layers are those that `convert` takes. fp8: `convert` with the default options, each tensor
    scaled by its own amax. int8: by torchao, a scale a row of weights, a scale a token of activations, taken from it at each call, sums in
    int32. Not weight-only, which saves memory alone: int8 kernels need both operands in 8 bits, and it costs little. The velocity of a
    trained DiT keeps 40.7 dB against fp32 with int8 activations, 44.2 with bf16 ones, 46.8 by autocast alone, 29.7 in fp8.
    dry: the layers stay, the report alone is made. Raises FP8Error when no layer is eligible, or torchao is absent.
    """
    flag, instead = f"--set generation={kind}", "--set generation=bf16"
    if kind == "fp8":
        return convert(model, flag=flag, instead=instead, dry=dry)
    device = next(model.parameters()).device
    library, error = _import("torchao.quantization")
    if library is None:
        raise FP8Error(f"{flag} needs the package torchao, which can't be imported ({error}): pip install torchao, or use {instead}")
    if device.type not in ("cpu", "cuda", "meta"):
        raise FP8Error(f"{flag}: torchao's int8 products are for CPU and CUDA, and this is {device.type}; use {instead}")
    linears, _, left_out = _eligible(model, flag, "int8", instead)
    scaling = "a scale a row of weights, a scale a token of activations"
    covered = Coverage("int8", scaling, {name: (m, "torchao") for name, m in linears.items()}, left_out)
    if not dry and device.type != "meta":
        # without VNNI a CPU adds pairs of products in 16 bits: torchao then asks for 7-bit operands
        narrow = importlib.import_module("torchao.utils").should_reduce_range(device)
        config = library.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=narrow)
        library.quantize_(model, config, filter_fn=lambda module, name: name in linears)
    return covered


class Coverage:
    """Which layers of a model are multiplied in 8 bits. `layers` {name: (inputs, outputs, how it is multiplied)}, `left_out`
    {name: reason}; print it for both. `functional` {name: Scaling}: products of bare parameters."""

    functional = {}

    def __init__(self, format, scaling, linears, left_out):
        self.format, self.scaling, self.left_out = format, scaling, left_out
        self.layers = {name: (m.in_features, m.out_features, how) for name, (m, how) in linears.items()}
        self.flops = None  # {name: FLOPs of a step, or of a forward}, under "all" those of all products and convolutions

    def context(self):
        """What forward runs in, beside autocast."""
        return nullcontext()

    def plain(self, model):
        return nullcontext()

    # -- what is covered

    def count_flops(self, model, *example, backward=True):
        """Fill in `flops` from one forward, and backward, of shapes alone; example: the model's arguments, in the dtypes it takes.
        `flops` stays None for a net that can't run on the meta device."""
        from torch.func import functional_call
        from torch.utils.flop_counter import FlopCounterMode

        def shape_of(t):
            return torch.empty_like(t, device="meta").requires_grad_(backward and t.requires_grad) if torch.is_tensor(t) else t

        flops = dict.fromkeys([*self.layers, *self.functional], 0)

        def count(name, x, w):  # a multiplication and an addition for each of the products that autograd makes: y, dx, dw
            if name in self.functional:
                self.functional[name].left_out = shape_refusal(*w.shape[-2:])
            heads = w.shape[0] if w.dim() == 3 and x.shape[-3] == 1 else 1
            flops[name] += 2 * x.numel() * w.shape[-1] * heads * (1 + x.requires_grad + w.requires_grad)

        with self.plain(model), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            linears = [(n, model.get_submodule(n)) for n in self.layers]
            hooks = [m.register_forward_pre_hook(lambda m, args, n=n: count(n, args[0], m.weight.t())) for n, m in linears]
            hooks += [m.register_forward_pre_hook(lambda m, args, n=n: count(n, *args)) for n, m in self.functional.items()]
            state = {name: shape_of(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
            try:
                out = functional_call(model, state, tuple(shape_of(a) for a in example)).sum()
                if backward:
                    out.backward()
            except RuntimeError:  # a net that looks at values can't run on shapes: no share is told
                return
            finally:
                for hook in hooks:
                    hook.remove()
        self.flops = {**flops, "all": counter.get_total_flops()}

    @property
    def share(self):
        """Share of the FLOPs of products and convolutions in 8 bits, or None before `count_flops`."""
        if self.flops is None:
            return None
        inside = [n for n, s in self.functional.items() if not s.left_out] + list(self.layers)
        return sum(self.flops[name] for name in inside) / max(1, self.flops["all"])

    def summary(self):
        """One line: scaling, backend, how much is covered."""
        n = len(self.layers) + len(self.functional)
        linears = n + sum(not why.startswith("convolution") for why in self.left_out.values())
        share = "" if self.share is None else f", {self.share:.1%} of the FLOPs of products and convolutions"
        how = sorted({how for *_, how in self.layers.values()} | ({self.own} if self.functional else set()))
        return f"{self.scaling}, by {' and '.join(how)}: {n} of {linears} linear layers{share}"

    def _settings(self):
        return {"format": self.format, "scaling": self.scaling}

    def json(self):
        layers = [dict(name=name, inputs=i, outputs=o, matmul=how) for name, (i, o, how) in self.layers.items()]
        for name, scaling in self.functional.items():
            layers.append(dict(name=name, matmul=self.own, **({"left_out": scaling.left_out} if scaling.left_out else {})))
        for layer in layers:
            if self.flops is not None:
                layer["flops"] = self.flops[layer["name"]]
        return {**self._settings(), "layers": layers, "left_out": self.left_out, "flops_share": self.share,
                "flops": self.flops and self.flops["all"]}

    def __str__(self):
        groups = {}
        for name, (i, o, how) in self.layers.items():
            groups.setdefault((re.sub(r"\d+", "*", name), i, o, how), []).append(name)
        lines = [f"{self.format}: {self.summary()}"]
        for (pattern, i, o, how), names in groups.items():
            what = f"{names[0]}" if len(names) == 1 else f"{pattern} ({len(names)})"
            part = "" if self.flops is None else f", {sum(self.flops[n] for n in names) / max(1, self.flops['all']):.1%}"
            lines.append(f"  {what}: {i} to {o}, {how}{part}")
        for name, scaling in self.functional.items():
            part = "" if self.flops is None else f", {self.flops[name] / max(1, self.flops['all']):.1%}"
            lines.append(f"  {name}: {'left out, ' + scaling.left_out if scaling.left_out else self.own}{part}")
        reasons = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append(f"  not in {self.format}: {shown} ({why})")
        return "\n".join(lines)


class Covered(Coverage):
    """What `convert` put in FP8: the report of `Coverage`, and the layers' state."""

    def __init__(self, options, linears, functional, left_out, device):
        pairs = {(options.dtypes[a], options.dtypes[b]) for a, b in ((INPUT, WEIGHT), (GRAD, WEIGHT), (GRAD, INPUT))}
        self.own = "emulate" if options.backend == "emulate" or any(scaled_mm_refusal(device, *pair) for pair in pairs) else "scaled_mm"
        how = {"te": "Transformer Engine", "torchao": "torchao, scaled_mm"}.get(options.backend, self.own)
        super().__init__("FP8", f"{options.format}, {options.recipe} scaling", {name: (m, how) for name, m in linears.items()}, left_out)
        self.options, self.functional, self.swaps = options, functional, []
        self.te_recipe = _te_recipe(options) if options.backend == "te" and device.type != "meta" else None

    def _settings(self):
        return dataclasses.asdict(self.options)

    @property
    def scalings(self):
        own = [new.scaling for *_, new in self.swaps if isinstance(new, Linear)]
        return own + list(self.functional.values())

    def context(self):
        """What forward runs in: te.autocast for Transformer Engine, else nothing."""
        if self.te_recipe is None:
            return nullcontext()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=self.te_recipe)

    @contextmanager
    def plain(self, model):
        """Within it, `model` (the one converted) has its nn.Linear back and multiplies without FP8; copies made in it stay so."""
        options = [s.options for s in self.functional.values()]
        for parent, attribute, linear, _ in self.swaps:
            setattr(parent, attribute, linear)
        for scaling in self.functional.values():
            scaling.options = None
        try:
            yield
        finally:
            for parent, attribute, _, new in self.swaps:
                setattr(parent, attribute, new)
            for scaling, option in zip(self.functional.values(), options):
                scaling.options = option

    def observe(self, on):
        """Count, from now on or no longer, what the casts of this file's layers round to 0 and clip."""
        for scaling in self.scalings:
            scaling.observing, scaling.counts = on, None

    @torch.no_grad()
    def step(self):
        """End an optimiser step: under delayed scaling the histories roll and scales follow, alike on all ranks.

        Returns the shares counted since observe(True), {} if none were: fp8_underflow_<operand>, non-zero values that became 0, and
        fp8_saturated_<operand>, values clipped; operands are input, weight and grad.
        """
        scalings = self.scalings
        if self.options.recipe == "delayed" and scalings:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                amax = torch.stack([s.amax_history[0] for s in scalings])
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
                for scaling, row in zip(scalings, amax):
                    scaling.amax_history[0] = row
            for scaling in scalings:
                scaling.roll()
        counts = [s.counts for s in scalings if s.counts is not None]
        if not counts:
            return {}
        report = {}
        for name, (zeroed, nonzero, clipped, all_) in zip(OPERANDS, torch.stack(counts).sum(0).tolist()):
            report[f"fp8_underflow_{name}"] = zeroed / max(1, nonzero)
            report[f"fp8_saturated_{name}"] = clipped / max(1, all_)
        return report

    def adapt(self, own, saved):
        """`saved`, a state_dict, as one for the model whose state_dict is `own`: scales that another backend wrote are left out, those it
        did not write stay as they are. Another machine may resume with another backend."""
        scales = re.compile(r"(.*\.)?(amax_history|scale|_extra_state)$")
        kept = {key: value for key, value in saved.items() if key in own or not scales.match(key)}
        return {**{key: value for key, value in own.items() if scales.match(key)}, **kept}


def gradient_snr(low, reference, loss):
    """Signal-to-noise ratio of `low`'s gradients against `reference`'s, {parameter: dB} and "all": 10 log10 of |g|^2 / |g' - g|^2.

    low, reference: models whose named_parameters agree, say FP8 and fp32 copies of one net; loss(model) -> scalar on one batch, and one batch is a
    noisy measure: average over several. No .grad is touched. Parameters without a gradient are left out; equal gradients give infinity.
    """
    grads = []
    for net in (low, reference):
        names, params = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad))
        grads.append(dict(zip(names, torch.autograd.grad(loss(net), params, allow_unused=True))))
    signal, noise = {}, {}
    for name, exact in grads[1].items():
        if exact is not None and grads[0][name] is not None:
            exact = exact.double()
            signal[name], noise[name] = exact.square().sum().item(), (grads[0][name].double() - exact).square().sum().item()
    signal["all"], noise["all"] = sum(signal.values()), sum(noise.values())
    return {name: _decibel(signal[name], noise[name]) for name in signal}


def _decibel(signal, noise):
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
