"""One FP8 product: its scales, its three matrix products, and the layers of ours that take it.

    y = matmul(x, self.w, self.scaling)      # of bare parameters [K, N], with self.scaling = Scaling()

An operand x is stored as round(x * scale) in e4m3 (3 mantissa bits, largest value 448) or e5m2 (2 bits,
57344). The scale is fp32 and brings amax, the operand's largest magnitude, to the top of the format (arXiv
2209.05433). Products are summed in fp32, divided by both scales and rounded once.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..formats import FORMATS
from ..rounding import noise_key
from . import block_product

# the operands of the three products of a layer: y = x w, dx = g w^T, dw = x^T g
INPUT_OPERAND, WEIGHT_OPERAND, GRAD_OPERAND = range(3)
FP8_OPERANDS = ("input", "weight", "grad")
FP8_E4M3, FP8_E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
# what CUDA's FP8 kernels ask of every contracted and every output dimension; kept on all devices
DIMENSION_MULTIPLE = 16


# ---- Scales ------------------------------------------------------------------------------------------------


def amax_of(x, dim=None):
    """Largest magnitude of x [M, N]: of all, fp32 [1, 1], or along dim, fp32 [1, N] or [M, 1].

    NaN and infinity show.
    """
    if dim is None:
        least, most = x.aminmax()
        return torch.maximum(-least, most).float().view(1, 1)
    least, most = x.aminmax(dim=dim, keepdim=True)
    return torch.maximum(-least, most).float()


def current_scale(amax, top):
    """top / amax, at most the largest fp32; 1 where amax is 0.

    An infinite amax gives 0: its product is NaN, and seen.
    """
    scale = (top / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax == 0, 1.0, scale)


def delayed_scale(amax, old, top):
    """Transformer Engine's rule: `current_scale`, but the old scale where amax is 0, infinite or NaN."""
    return torch.where((amax > 0) & amax.isfinite(), current_scale(amax, top), old)


def roll_history(history, scale, tops, algo="max"):
    """End a step of delayed scaling, in place, as Transformer Engine does.

    history [N, S]: row 0 the amax of this step, then those of past steps, the oldest first; scale [S];
    tops [S]. New scales come from the largest of the history ("max") or from row 0 ("most_recent"); then the
    history is rolled by -1 and row 0 cleared.
    """
    amax = history.amax(0) if algo == "max" else history[0].clone()
    scale.copy_(delayed_scale(amax, scale, tops))
    history.copy_(history.roll(-1, 0))
    history[0] = 0


# ---- Products ----------------------------------------------------------------------------------------------


def _cpu_scales_rows():
    """Whether torch._scaled_mm takes a scale for each row on a CPU; torch 2.11 does not."""
    codes = torch.zeros(16, 16, dtype=FP8_E4M3.dtype, device="cpu")
    scales = torch.ones(16, 1, device="cpu")
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


CPU_SCALES_ROWS = _cpu_scales_rows()  # not asked within a product, which torch.compile traces


def scaled_mm_refusal(device, a, b):
    """Why torch._scaled_mm can't multiply dtypes a and b on a device, or None."""
    if a == b == torch.float8_e5m2:
        return "no kernel multiplies e5m2 by e5m2"
    if device.type == "cuda" and not FP8_E4M3.native(device):
        return "FP8 tensor cores start at compute capability 8.9"
    if device.type == "cpu" and not CPU_SCALES_ROWS:
        return f"torch {torch.__version__} takes one scale a tensor on a CPU"
    if device.type not in ("cuda", "cpu", "meta"):
        return f"torch has no FP8 product on {device.type}"
    return None


def shape_refusal(k, n, multiple=DIMENSION_MULTIPLE):
    """Why a weight of k inputs and n outputs can't be multiplied in FP8, or None."""
    odd = []
    if k % multiple:
        odd.append(f"{k} inputs")
    if n % multiple:
        odd.append(f"{n} outputs")
    return f"{' and '.join(odd)}: no multiple of {multiple}" if odd else None


def decode_fp8(codes):
    """fp32, exactly: what FP8 codes stand for."""
    if type(codes) is not torch.Tensor:  # torch.compile traces this: a table would be a constant of the graph
        return codes.float()
    form = FP8_E4M3 if codes.dtype == FP8_E4M3.dtype else FP8_E5M2
    return form.values(codes)


def product(a, b, out_dtype, emulated=False):
    """[M, N] in out_dtype of operands a (fp8 [M, K], inverse scale) and b (fp8 [K, N], inverse scale).

    A scale is [1, 1], or [M, 1] and [1, N]. M, K and N are multiples of 16. emulated, or without a kernel,
    the operands are multiplied in fp32, not bf16: FP8 values are exact in both, but only fp32 leaves the sums
    unrounded until the scales are off, as the kernels do.
    """
    a, a_inverse = a
    b, b_inverse = b
    # autocast would reach into the kernel of a CPU (torch 2.14) and round operands, scale and all, to bf16
    with torch.autocast(a.device.type, enabled=False):
        if emulated or scaled_mm_refusal(a.device, a.dtype, b.dtype):
            return ((decode_fp8(a) @ decode_fp8(b)) * a_inverse * b_inverse).to(out_dtype)
        return _scaled_mm(a, a_inverse, b, b_inverse, out_dtype)


def _scaled_mm(a, a_inverse, b, b_inverse, out_dtype):
    rowwise = a_inverse.numel() > 1 or b_inverse.numel() > 1
    scale_a = a_inverse.flatten()[:, None]
    scale_b = b_inverse.flatten()[None]
    if a.device.type == "cpu":
        # its kernel for one scale a tensor takes a thousand times as long on some CPUs (Xeon, torch 2.14)
        scale_a = scale_a.expand(len(a), 1).contiguous()
        scale_b = scale_b.expand(1, b.shape[1]).contiguous()
    # cuBLAS wants a in rows and b in columns; its rowwise kernel writes bf16 alone
    columns = b if b.t().is_contiguous() else b.t().contiguous().t()
    out = torch.bfloat16 if rowwise else out_dtype
    y = torch._scaled_mm(a.contiguous(), columns, scale_a=scale_a, scale_b=scale_b, out_dtype=out)
    return y.to(out_dtype)


class _Scaler:
    """Rounds the operands of one product. history [N, 3], scale [3]: state of delayed scaling, or None.

    recording: whether history takes the amaxes. counts: None, or float64 [3, 4] that `_count_losses` adds to.
    """

    def __init__(self, options, history, scale, recording, counts):
        self.options = options
        self.history = history
        self.scale = scale
        self.recording = recording
        self.counts = counts
        self.rowwise = options.recipe == "rowwise"
        self.emulated = options.backend == "emulate"

    def __call__(self, x, operand, dim):
        """x [M, N], an operand of a product that sums along dim -> (fp8 [M, N], fp32 inverse scale)."""
        form = self.options.formats[operand]
        amax = amax_of(x, dim if self.rowwise else None)
        scale = current_scale(amax, form.top)
        if self.scale is not None:
            old = self.scale[operand].view(1, 1)
            scale = torch.where(old > 0, old, scale)
            if self.recording:
                self.history[0, operand] = torch.maximum(self.history[0, operand], amax.view(()))
        codes = form.cast(x, scale)
        if self.counts is not None:
            self.counts[operand] += _count_losses(x, scale, codes)
        return codes, scale.reciprocal()


def _count_losses(x, scale, codes):
    """int64 [4]: values that a cast zeroed, non-zero values, values that it clipped, all values."""
    finfo = torch.finfo(codes.dtype)
    rounds_to_top = finfo.max * (1 + finfo.eps / 3.5)  # up to half an ulp over 1.75 * 2^n
    clipped = (x.float() * scale).abs() > rounds_to_top
    nonzero = x != 0
    zeroed = nonzero & (codes.float() == 0)
    return torch.stack([zeroed.sum(), nonzero.sum(), clipped.sum(), torch.ones_like(clipped).sum()])


def _transposed(operand):
    codes, inverse_scale = operand
    return codes.t(), inverse_scale.t()


class _FP8Product(torch.autograd.Function):
    """x [M, K], w [K, N] -> x w in out_dtype; all three products of a training step in FP8.

    torch.compile takes it into its graph as one call, so all it reads are arguments: tensors and constants.
    """

    @classmethod
    @functools.cache
    def register(cls):
        """Tell torch.compile so: when a layer is put in FP8, since this imports the compiler for a second."""
        torch.compiler.allow_in_graph(cls)
        torch.compiler.allow_in_graph(block_product.Product)

    @staticmethod
    def forward(ctx, x, w, out_dtype, *state):
        scaler = _Scaler(*state)
        a = scaler(x, INPUT_OPERAND, 1)
        b = scaler(w, WEIGHT_OPERAND, 0)
        ctx.scaler = scaler
        ctx.dtypes = (x.dtype, w.dtype)
        if scaler.rowwise:
            ctx.save_for_backward(x, w)  # a scale a row belongs to one direction of summing: rounded anew
        else:
            ctx.save_for_backward(*a, *b)
        return product(a, b, out_dtype, scaler.emulated)

    @staticmethod
    @once_differentiable  # codes know nothing of the inputs they stand for
    def backward(ctx, g):
        scaler = ctx.scaler
        x_dtype, w_dtype = ctx.dtypes
        saved = ctx.saved_tensors
        dx = dw = None
        along_n = scaler(g, GRAD_OPERAND, 1)
        if ctx.needs_input_grad[0]:
            w = scaler(saved[1], WEIGHT_OPERAND, 1) if scaler.rowwise else saved[2:]
            dx = product(along_n, _transposed(w), x_dtype, scaler.emulated)
        if ctx.needs_input_grad[1]:
            x = scaler(saved[0], INPUT_OPERAND, 0) if scaler.rowwise else saved[:2]
            along_m = scaler(g, GRAD_OPERAND, 0) if scaler.rowwise else along_n
            # dw^T = g^T x: kernels take e5m2 as their first operand alone
            dw = product(_transposed(along_m), x, w_dtype, scaler.emulated).t()
        without_gradient = [None] * (len(ctx.needs_input_grad) - 2)
        return dx, dw, *without_gradient


# ---- Layers ------------------------------------------------------------------------------------------------


class Scaling(nn.Module):
    """The scales of one product x w, its state a part of the model's. Off, it is x @ w; `convert` or `switch`
    puts it in FP8.

    Called with x [..., K] and w [K, N], or x [..., H or 1, M, K] and w [H, K, N]; returns x @ w in autocast's
    dtype or that of x. A w whose K or N is no multiple of 16 is multiplied without FP8; after the first call
    `left_out` says so. Under delayed scaling an operand's first use, which has no past, is scaled by its own
    amax: Transformer Engine starts at scale 1, where small gradients round to 0. counts: None, or float64
    [3, 4], what the casts of this step lost.
    """

    def __init__(self, options=None, device=None):
        super().__init__()
        self.options = None
        self.counts = None
        self.multiple = DIMENSION_MULTIPLE  # of the inputs and outputs of w
        self.left_out = None  # why w stays out of FP8; "": it does not; None: not known yet
        if options is not None:
            self.switch(options, device)

    def switch(self, options, device=None):
        """FP8 on as `options` say; state is made anew."""
        _FP8Product.register()
        self.options = options
        self.multiple = options.multiple
        if options.plan:
            # of the noise that the next step's codes are written with: see fp8.FP8.seed
            self.register_buffer("key", noise_key(0, 0, device=device), persistent=False)
        if options.recipe == "delayed":
            history = torch.zeros(options.amax_history_len, 3, dtype=torch.float32, device=device)
            self.register_buffer("amax_history", history)
            scale = torch.zeros(3, dtype=torch.float32, device=device)  # 0: no past
            self.register_buffer("scale", scale)

    def decide(self, k, n):
        """Say in `left_out`, once, whether a w of k inputs and n outputs stays out of FP8."""
        if self.left_out is None:
            self.left_out = shape_refusal(k, n, self.multiple) or ""

    def forward(self, x, w):
        """x [..., K] or [..., H or 1, M, K], w [K, N] or [H, K, N] -> x @ w, in autocast's dtype or x's."""
        if not torch.compiler.is_compiling():  # a graph writes no attributes
            self.decide(*w.shape[-2:])
        if self.options is None or x.is_meta or x.numel() == 0:
            return x @ w
        if w.dim() == 3:
            heads = x.expand(*x.shape[:-3], w.shape[0], *x.shape[-2:]).unbind(-3)
            products = [self(one, weight) for one, weight in zip(heads, w.unbind(0), strict=True)]
            return torch.stack(products, dim=-3)
        if shape_refusal(*w.shape, self.multiple):
            return x @ w
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        history = scale = None
        if self.options.recipe == "delayed":
            history = self.amax_history
            scale = self.scale
        rows = x.reshape(-1, x.shape[-1])  # [..., K] -> [M, K]
        if self.options.plan:
            y = block_product.multiply(rows, w, dtype, self.options, self.key, self.counts)
            return y.reshape(*x.shape[:-1], w.shape[-1])
        # the weight's gradient sums over rows: zero rows bring them to a multiple of 16 and add nothing
        padded = F.pad(rows, (0, 0, 0, -len(rows) % DIMENSION_MULTIPLE))
        y = _FP8Product.apply(padded, w, dtype, self.options, history, scale, self.training, self.counts)
        return y[: len(rows)].reshape(*x.shape[:-1], w.shape[-1])

    @torch.no_grad()
    def roll(self):
        """End a step of delayed scaling."""
        if self.options is not None and self.options.recipe == "delayed":
            tops = self.scale.new_tensor([form.top for form in self.options.formats])
            roll_history(self.amax_history, self.scale, tops, self.options.amax_compute_algo)


def matmul(x, w, state):
    """x @ w in FP8 for a model that holds bare parameters: x [..., K], w [K, N] or [H, K, N], state its
    `Scaling`.
    """
    return state(x, w)


class Linear(nn.Linear):
    """nn.Linear over the same parameters, its product in FP8; the bias is added in the output's dtype."""

    def __init__(self, linear, options):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.scaling = Scaling(options, linear.weight.device)

    def forward(self, x):
        """x [..., in_features] -> [..., out_features], in autocast's dtype or that of x."""
        y = self.scaling(x, self.weight.t())
        return y if self.bias is None else y + self.bias.to(y.dtype)
