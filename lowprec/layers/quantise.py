"""A finished net that generates in numbers of 8 or 4 bits.

    covered = quantise(net, "int8")              # in place; or "fp8", "nvfp4", "nvfp4_weights" …
    covered = quantise(net, "nvfp4", calibrate=lambda: [net(x) for x in batches])       # weights by GPTQ
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        y = net(x)
"""

import dataclasses
from typing import NamedTuple

from torch import nn

from ..errors import Refused
from ..machine import quiet_import
from ..parts.part import Method
from ..sites import BLOCKS_OF_GENERATION
from . import gptq
from .block_formats import BLOCK_FORMATS
from .block_product import Plan
from .coverage import Coverage
from .fp8 import FP8
from .fp8_backends import Options


class Rounding(NamedTuple):
    """What GPTQ did to the weights of a net. errors: {layer: (gptq.output_error of it, that of the nearest)}.
    unseen: layers that the calibration did not call; they have the nearest.
    """

    errors: dict
    unseen: list

    def __str__(self):
        own, nearest = (sum(column) / len(self.errors) for column in zip(*self.errors.values(), strict=True))
        text = (
            f"weights by GPTQ: on the inputs of the calibration the outputs of {len(self.errors)} layers "
            f"change by {own:.2%} on average, and to nearest by {nearest:.2%}"
        )
        if self.unseen:
            text += f"; to nearest, since the calibration did not call them: {', '.join(self.unseen)}"
        return text


class AfterTraining(Coverage):
    """Layers of a finished net whose weights are rounded once. A format says with `nearest`, `grid` and `put`
    how.
    """

    backward = False
    rounding = None  # a Rounding, where GPTQ has rounded

    def nearest(self, layer):
        """fp32 [N, K]: what the weight of a converted layer stands for."""
        raise NotImplementedError

    def grid(self, layer):
        """(inputs that share a scale, grid) of a converted layer, as `gptq.rounded_by_gptq` takes them."""
        raise NotImplementedError

    def put(self, layer, low):
        """Give a converted layer the weights fp32 [N, K], which lie on its grid."""
        raise NotImplementedError

    def convert_by_gptq(self, model, calibrate):
        """Quantise the layers of `model`, in place. calibrate(): calls it as it is."""
        exact = {name: linear.weight for name, linear in self.linears.items()}
        hessians = gptq.gather_hessians(self.linears, calibrate)
        if not hessians:
            raise Refused("GPTQ: the calibration called no layer that is quantised; let it call the net")
        self.convert(model, alone=True)
        errors = {}
        for name, hessian in hessians.items():
            layer = model.get_submodule(name)
            nearest = self.nearest(layer)
            low = gptq.rounded_by_gptq(exact[name].float(), hessian, *self.grid(layer))
            errors[name] = tuple(gptq.output_error(exact[name], each, hessian) for each in (low, nearest))
            self.put(layer, low)
        unseen = [name for name in (*self.linears, *self.functional) if name not in hessians]
        self.rounding = Rounding(errors, unseen)

    def summary(self):
        text = super().summary()
        return text if self.rounding is None else f"{text}; {self.rounding}"


class Int8Layers(AfterTraining):
    """Linear layers in int8 by torchao: a scale a row of weights, a scale a token of activations."""

    format = "int8"
    takes_parameters = False

    def __init__(self, model, flag, instead):
        device = next(model.parameters()).device
        self.library = quiet_import("torchao.quantization", flag)
        if device.type not in ("cpu", "cuda", "meta"):
            raise Refused(
                f"{flag}: torchao's int8 products are for CPU and CUDA, and this is {device.type}; "
                f"use {instead}"
            )
        scaling = "a scale a row of weights, a scale a token of activations"
        super().__init__(model, "torchao", scaling, flag, instead)

    def convert(self, model, alone=True):
        """Quantise the layers of `model`, in place."""
        if self.device.type == "meta":
            return
        from torchao.utils import should_reduce_range

        # without VNNI a CPU adds pairs of products in 16 bits: torchao then asks for 7-bit operands
        narrow = should_reduce_range(self.device)
        config = self.library.Int8DynamicActivationInt8WeightConfig(
            set_inductor_config=False, reduce_range=narrow
        )
        self.library.quantize_(model, config, filter_fn=lambda module, name: name in self.linears)

    def nearest(self, layer):
        return layer.weight.qdata * layer.weight.scale

    def grid(self, layer):
        scale = layer.weight.scale
        top = 63 if layer.weight.reduce_range else 127

        def rounds(x):
            return (x * (1 / scale)).round().clamp(-top - 1, top) * scale

        return layer.in_features, lambda x: rounds

    def put(self, layer, low):
        layer.weight.qdata.copy_((low / layer.weight.scale).round())


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """How a finished net multiplies in blocks. recipe: of BLOCKS_OF_GENERATION."""

    recipe: str
    backend: str = "emulate"

    @property
    def plan(self):
        """The Plan of its products: weights in blocks along their inputs, and activations, or not."""
        form = BLOCK_FORMATS[self.recipe.removesuffix("_weights")]
        return Plan(None if self.recipe.endswith("_weights") else form, form)

    @property
    def multiple(self):
        """What inputs and outputs of a layer are multiples of."""
        return self.plan.multiple

    @property
    def words(self):
        """What the ledger says of it."""
        what = "weights and activations" if self.plan.input else "weights alone"
        return f"{what} in {self.plan.weight.why}"

    def resolve(self, device):
        """The same: no kernels are connected."""
        return self


@dataclasses.dataclass(frozen=True)
class OnGrid:
    """In place of the BlockFormat of a weight that lies on the grid already: a block whose largest value
    GPTQ moved would else take another scale.
    """

    height: int = 1

    def rounded(self, w, dim):
        """The same, fp32."""
        return w.float()


@dataclasses.dataclass(frozen=True)
class OnGridOptions(BlockOptions):
    """BlockOptions of a layer whose weight GPTQ has rounded."""

    @property
    def plan(self):
        plan = super().plan
        return Plan(plan.input, OnGrid())


class Blocks(AfterTraining, FP8):
    """Linear layers and products of bare parameters in a format of block_formats.py."""

    def __init__(self, model, kind, flag, instead):
        self.format = kind.removesuffix("_weights").upper()
        super().__init__(model, BlockOptions(kind), flag, instead)

    def nearest(self, layer):
        return self.options.plan.weight.rounded(layer.weight, 1)

    def grid(self, layer):
        form = self.options.plan.weight
        element, scale = form.element, form.scale
        tensor = scale.tensor(layer.weight, element)

        def of_block(x):
            held = scale.held(x.abs().amax(1, keepdim=True), element, tensor, up=False)

            def rounds(x):
                return element.round(scale.scaled(x, held, tensor)) * scale.value(held, tensor)

            return rounds

        return form.length, of_block

    def put(self, layer, low):
        layer.weight = nn.Parameter(low, requires_grad=False)
        layer.scaling.options = OnGridOptions(self.options.recipe)


def _coverage(model, kind):
    flag = f"--set generation={kind}"
    instead = "--set generation=bf16"
    if kind == "int8":
        return Int8Layers(model, flag, instead)
    if kind in BLOCKS_OF_GENERATION:
        return Blocks(model, kind, flag, instead)
    report = FP8(model, Options(), flag, instead)
    report.backward = False
    return report


def quantise(model, kind, calibrate=None):
    """Post-training quantisation: put a finished `model`'s layers, in place, in 'fp8', 'int8' or a key of
    sites.BLOCKS_OF_GENERATION to draw from it. Returns its `Coverage`.

    Call the model under autocast to bf16. The layers are those that fp8.convert takes. fp8: with the default
    options, each tensor scaled by its own amax. int8: by torchao, a scale a row of weights, a scale a token
    of activations, taken from it at each call, sums in int32. Others: weights and activations in a format of
    block_formats.py, or, as in 'nvfp4_weights', weights alone, which are then multiplied in bf16.

    Weights are rounded to nearest, or by GPTQ (see gptq.py) where `calibrate` is given: a function without
    arguments that calls the model on data like those it was trained on. The report's summary then says what
    either changes. Raises Refused when no layer is eligible, torchao is absent, or for fp8 with calibrate.
    """
    report = _coverage(model, kind)
    if calibrate is None:
        report.convert(model, alone=True)
    elif isinstance(report, AfterTraining):
        report.convert_by_gptq(model, calibrate)
    else:
        raise Refused(f"{kind} has no grid for GPTQ: its scale goes with each call; use mxfp8")
    return report


class Quantised(Method):
    """A recipe whose samples are drawn in 8 or 4 bits, of a net that trains otherwise. kind: see quantise.
    calibrate: None, or a function of a View that calls it on training data, for GPTQ.
    """

    def __init__(self, model, kind, calibrate=None):
        self.kind = kind
        self.calibrate = calibrate
        self.report = _coverage(model, kind)

    @classmethod
    def of(cls, run):
        r, calibrate = run.recipe, run.options.calibrate
        if r.generation_rounding != "gptq":
            return cls(run.model, r.generation)
        if calibrate is None:
            raise Refused(
                "generation_rounding=gptq reads what the layers are given: Precision(..., calibrate=lambda "
                "net: [net(x) for x in batches]), or leave the site at nearest"
            )
        return cls(run.model, r.generation, calibrate)

    def freeze(self, view, generation):
        if generation != self.kind:
            return
        if self.calibrate is None:
            quantise(view.net, self.kind)
        else:
            found = quantise(view.net, self.kind, lambda: self.calibrate(view))
            self.report.rounding = found.rounding

    def count_flops(self, model, args, kwargs=None):
        self.report.count_flops(model, args, kwargs)

    def rows(self, parameters, generation_dtype):
        return {"generation": {"why": f"quantised after training: {self.report.summary()}; all else in bf16"}}

    def details(self):
        return {"generation": self.report}
