"""How products are taken in FP8, and who multiplies: torch, torchao, Transformer Engine, or an emulation."""

import dataclasses
import functools
from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..errors import Refused, check_choice, check_number
from ..machine import try_import
from .block_formats import BLOCK_FORMATS, E4M3, E5M2, asked_by
from .block_product import Plan
from .fp8_product import (
    DIMENSION_MULTIPLE,
    FP8_E4M3,
    FP8_E5M2,
    GRAD_OPERAND,
    INPUT_OPERAND,
    WEIGHT_OPERAND,
    scaled_mm_refusal,
)

# ---- How products are taken --------------------------------------------------------------------------------

OPERAND_FORMATS = {
    "hybrid": (FP8_E4M3, FP8_E4M3, FP8_E5M2),
    "e4m3": (FP8_E4M3, FP8_E4M3, FP8_E4M3),
    "e5m2": (FP8_E5M2, FP8_E5M2, FP8_E5M2),
}
FP8_CHOICES = {
    "backend": ("auto", "te", "torchao", "scaled_mm", "emulate"),
    "format": tuple(OPERAND_FORMATS),
    "recipe": ("delayed", "tensorwise", "rowwise", *asked_by("fp8_recipe")),
    "amax_compute_algo": ("max", "most_recent"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How products are taken in FP8.

    backend: who multiplies, see `resolve`. format: hybrid (inputs and weights e4m3, gradients
    e5m2), e4m3 or e5m2. recipe: where a scale comes from. tensorwise: this tensor's amax; rowwise: that of
    each row or column along which a product sums; delayed: that of past steps, of which amax_history_len are
    kept and amax_compute_algo is taken; a name of BLOCK_FORMATS: those of its blocks.

    Raises Refused for unknown values, and for amax settings of a recipe that keeps no history.
    """

    backend: str = "auto"
    format: str = "hybrid"
    recipe: str = "tensorwise"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    asked_by: ClassVar = "fp8"  # the flag of recipe(); flags: those that set a field
    flags: ClassVar = {
        "fp8_backend": "backend",
        "fp8_format": "format",
        "fp8_recipe": "recipe",
        "amax_history_len": "amax_history_len",
        "amax_compute_algo": "amax_compute_algo",
    }

    @classmethod
    def of(cls, asked, **own):
        """The options of a recipe. asked: what the flag says that asks for it. own: fields."""
        return cls(**own)

    def __post_init__(self):
        for name, choices in FP8_CHOICES.items():
            check_choice(name if name.startswith("amax") else f"fp8_{name}", getattr(self, name), choices)
        check_number("amax_history_len", self.amax_history_len, 1)
        says_how = (self.amax_history_len, self.amax_compute_algo) != (1024, "max")
        if self.recipe != "delayed" and says_how:
            raise Refused(
                f"--fp8_recipe {self.recipe} keeps no history of amax: --amax_history_len and "
                f"--amax_compute_algo need --fp8_recipe delayed"
            )

    @property
    def formats(self):
        """Formats of input, weight and gradient."""
        return OPERAND_FORMATS[self.format]

    @property
    def plan(self):
        """The Plan of products with a scale a block; None for other recipes."""
        return _block_plan(self.recipe, self.format) if self.recipe in BLOCK_FORMATS else None

    @property
    def words(self):
        """What the ledger says of it."""
        return f"{self.format}, {self.recipe} scaling"

    def resolve(self, device):
        """The options with a backend that can run them on the device: on GPUs with FP8 tensor cores te, then
        torchao, then scaled_mm; elsewhere, and with a scale a block, scaled_mm, then emulate. A meta device
        settles nothing.

        Raises Refused, naming the backends that can, when the one asked for can't.
        """
        device = torch.device(device)
        if device.type == "meta":
            return self
        wanted = [self.backend]
        if self.backend == "auto":
            wanted = ["scaled_mm", "emulate"]
            if FP8_E4M3.native(device) and not self.plan:  # torchao's mxfp8 has not been run from here yet
                wanted = ["te", "torchao", *wanted]
        for backend in wanted:
            refusal = backend_refusal(backend, self, device)
            if refusal is None:
                return dataclasses.replace(self, backend=backend)
        known = FP8_CHOICES["backend"][1:]
        others = [other for other in known if backend_refusal(other, self, device) is None]
        instead = f"here works --fp8_backend {' or '.join(others)}" if others else "use --bf16"
        raise Refused(f"--fp8_backend {self.backend}: {refusal}; {instead}")

    @property
    def multiple(self):
        """What inputs and outputs of a layer are multiples of."""
        return self.plan.multiple if self.plan else DIMENSION_MULTIPLE


@functools.cache
def _block_plan(recipe, format):
    elements = {"e4m3": E4M3, "e5m2": E5M2}
    x, w, g = (
        dataclasses.replace(BLOCK_FORMATS[recipe], element=elements[form.name])
        for form in OPERAND_FORMATS[format]
    )
    return Plan(x, w.square() if recipe.startswith("block") else w, g)


# ---- Who multiplies ----------------------------------------------------------------------------------------


def backend_refusal(backend, options, device):
    """Why a backend can't carry out the options on a device, or None."""
    if backend == "te":
        return _te_refusal(options, device)
    if backend == "torchao":
        return _torchao_refusal(options, device)
    if device.type == "mps":
        return "torch has no float8 on mps"
    if backend == "scaled_mm" and options.plan:
        return "scaled_mm is called with one scale a tensor or a row"
    if backend == "scaled_mm":
        return scaled_mm_refusal(device, FP8_E4M3.dtype, FP8_E4M3.dtype)
    return None


def _te_refusal(options, device):
    if options.recipe == "rowwise":
        return "Transformer Engine has no rowwise scaling"
    if options.plan:
        return f"Transformer Engine's own recipe of {options.recipe} is not connected here"
    if options.format == "e5m2":
        return "Transformer Engine trains in hybrid and e4m3 only"
    te, error = try_import("transformer_engine.pytorch")
    if te is None:
        return f"Transformer Engine can't be imported ({error}); requirements-te.txt installs it"
    if not hasattr(te, "autocast"):
        return "this Transformer Engine is too old; requirements-te.txt installs another"
    if not FP8_E4M3.native(device):
        return "Transformer Engine needs an NVIDIA GPU of compute capability 8.9 or later"
    return None


def _torchao_refusal(options, device):
    if options.recipe == "delayed":
        return "torchao has no delayed scaling"
    if options.format == "e5m2":
        return "no kernel multiplies e5m2 by e5m2"
    if options.plan and not (options.recipe == "mxfp8" and options.format == "e4m3"):
        return "of block scaling, torchao's mxfp8 with --fp8_format e4m3 alone is connected here"
    module, error = try_import("torchao.float8")
    if module is None:
        return f"torchao can't be imported ({error}); pip install -r requirements.txt"
    if options.plan and not BLOCK_FORMATS[options.recipe].native(device):
        return "torchao's kernels of mxfp8 need an NVIDIA GPU of compute capability 10.0 or later"
    if device.type == "cpu" and options.recipe == "rowwise":
        return scaled_mm_refusal(device, FP8_E4M3.dtype, FP8_E4M3.dtype)
    if device.type != "cpu" and not FP8_E4M3.native(device):
        return "torchao needs a CPU, or an NVIDIA GPU of compute capability 8.9 or later"
    return None


def te_recipe(options):
    """Transformer Engine's recipe of these Options."""
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

    form = Format.HYBRID if options.format == "hybrid" else Format.E4M3
    if options.recipe != "delayed":
        return Float8CurrentScaling(fp8_format=form)
    return DelayedScaling(
        fp8_format=form,
        amax_history_len=options.amax_history_len,
        amax_compute_algo=options.amax_compute_algo,
    )


def te_linear(linear, recipe, alone):
    """A Transformer Engine Linear over the parameters of an nn.Linear.

    alone: it enters te.autocast itself, as a finished net does that draws.
    """
    import transformer_engine.pytorch as te

    class TELinear(te.Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1])  # [..., K] -> [M, K], M a multiple of 16
            padded = F.pad(rows, (0, 0, 0, -len(rows) % DIMENSION_MULTIPLE))
            context = te.autocast(enabled=True, recipe=recipe) if alone else nullcontext()
            with context:
                y = super().forward(padded)
            return y[: len(rows)].reshape(*x.shape[:-1], self.out_features)

        # Transformer Engine's own extra state is a pickle, and loading one can run code: these are the same
        # tensors, as tensors
        def get_extra_state(self):
            if not recipe.delayed() or "scaling_fwd" not in self.fp8_meta:
                return {}
            state = {}
            for key in ("scaling_fwd", "scaling_bwd"):
                own = self.fp8_meta[key]
                state[key] = {"scale": own.scale.cpu(), "amax_history": own.amax_history.cpu()}
            return state

        def set_extra_state(self, state):
            if not state:
                return
            with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                self.init_fp8_metadata()
            for key, tensors in state.items():
                self.fp8_meta[key].scale.copy_(tensors["scale"])
                self.fp8_meta[key].amax_history.copy_(tensors["amax_history"])

    new = TELinear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
    new.weight = linear.weight
    if linear.bias is not None:
        new.bias = linear.bias
    return new


def torchao_linear(linear, options):
    """torchao's Float8Linear over the parameters of an nn.Linear."""
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity
    from torchao.float8 import float8_linear as library

    class Float8Linear(library.Float8Linear):
        def forward(self, x):
            if self.weight.device.type == "cpu":  # torchao heeds autocast on CUDA alone
                x = x.to(self.weight.dtype)
            # torchao reshapes its operand to a matrix, and can't copy one with a scale a row; what leaves an
            # attention is a transposed view
            return super().forward(x.contiguous())

    rowwise = options.recipe == "rowwise"
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    casts = [CastConfig(scaling_granularity=granularity, target_dtype=form.dtype) for form in options.formats]
    config = Float8LinearConfig(
        cast_config_input=casts[INPUT_OPERAND],
        cast_config_weight=casts[WEIGHT_OPERAND],
        cast_config_grad_output=casts[GRAD_OPERAND],
        round_scales_to_power_of_2=rowwise,  # as torchao's own rowwise recipe
        pad_inner_dim=True,
    )
    new = library.Float8Linear.from_float(linear, config)
    new.__class__ = Float8Linear
    return new
