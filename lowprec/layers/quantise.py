"""A finished net that generates in numbers of 8 or 4 bits.

    covered = quantise(net, "int8")              # in place; or "fp8", "nvfp4", "nvfp4_weights" …
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        y = net(x)
"""

import dataclasses

from ..block_formats import BLOCK_FORMATS
from ..errors import Refused
from ..machine import try_import
from ..sites import BLOCKS_OF_GENERATION
from .block_product import Plan
from .fp8 import FP8
from .fp8_product import Options
from .method import Coverage, Method


class Int8(Coverage):
    """Linear layers in int8 by torchao: a scale a row of weights, a scale a token of activations."""

    format = "int8"
    takes_parameters = False
    backward = False

    def __init__(self, model, flag, instead):
        device = next(model.parameters()).device
        self.library, error = try_import("torchao.quantization")
        if self.library is None:
            raise Refused(
                f"{flag} needs the package torchao, which can't be imported ({error}): pip install torchao, "
                f"or use {instead}"
            )
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


class Blocks(FP8):
    """Linear layers and products of bare parameters in a format of block_formats.py."""

    backward = False

    def __init__(self, model, kind, flag, instead):
        self.format = kind.removesuffix("_weights").upper()
        super().__init__(model, BlockOptions(kind), flag, instead)


def _coverage(model, kind):
    flag = f"--set generation={kind}"
    instead = "--set generation=bf16"
    if kind == "int8":
        return Int8(model, flag, instead)
    if kind in BLOCKS_OF_GENERATION:
        return Blocks(model, kind, flag, instead)
    report = FP8(model, Options(), flag, instead)
    report.backward = False
    return report


def quantise(model, kind):
    """Post-training quantisation: put a finished `model`'s layers, in place, in 'fp8', 'int8' or a key of
    sites.BLOCKS_OF_GENERATION to draw from it. Returns its `Coverage`.

    Call the model under autocast to bf16. The layers are those that fp8.convert takes. fp8: with the default
    options, each tensor scaled by its own amax. int8: by torchao, a scale a row of weights, a scale a token
    of activations, taken from it at each call, sums in int32. Others: weights and activations in a format of
    block_formats.py, or, as in 'nvfp4_weights', weights alone, which are then multiplied in bf16. Raises
    Refused when no layer is eligible, or torchao is absent.
    """
    report = _coverage(model, kind)
    report.convert(model, alone=True)
    return report


class Quantised(Method):
    """A recipe whose samples are drawn in 8 or 4 bits, of a net that trains otherwise. kind: see quantise."""

    def __init__(self, model, kind):
        self.kind = kind
        self.report = _coverage(model, kind)

    @classmethod
    def attach(cls, model, recipe, **_):
        if not recipe.quantises:
            return None
        return cls(model, recipe.generation)

    def freeze(self, net, generation):
        if generation == self.kind:
            quantise(net, self.kind)

    def count_flops(self, model, args, kwargs=None):
        self.report.count_flops(model, args, kwargs)

    def rows(self, parameters, generation_dtype):
        return {"generation": {"why": f"quantised after training: {self.report.summary()}; all else in bf16"}}

    def details(self):
        return {"generation": self.report}
