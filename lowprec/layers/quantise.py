"""A finished net that generates in 8-bit numbers."""

from ..errors import Refused
from ..machine import try_import
from .fp8 import FP8
from .fp8_product import Options
from .method import Coverage, Method


class Int8(Coverage):
    """Linear layers in int8 by torchao: a scale a row of weights, a scale a token of activations."""

    format, bare, backward = "int8", False, False

    def __init__(self, model, flag, instead):
        device = next(model.parameters()).device
        self.library, error = try_import("torchao.quantization")
        if self.library is None:
            missing = f"needs the package torchao, which can't be imported ({error})"
            raise Refused(f"{flag} {missing}: pip install torchao, or use {instead}")
        if device.type not in ("cpu", "cuda", "meta"):
            only = f"torchao's int8 products are for CPU and CUDA, and this is {device.type}"
            raise Refused(f"{flag}: {only}; use {instead}")
        scaling = "a scale a row of weights, a scale a token of activations"
        super().__init__(model, "torchao", scaling, flag, instead)

    def convert(self, model, alone=True):
        if self.device.type == "meta":
            return
        from torchao.utils import should_reduce_range

        # without VNNI a CPU adds pairs of products in 16 bits: torchao then asks for 7-bit operands
        narrow = should_reduce_range(self.device)
        kind = self.library.Int8DynamicActivationInt8WeightConfig
        config = kind(set_inductor_config=False, reduce_range=narrow)
        self.library.quantize_(model, config, filter_fn=lambda module, name: name in self.linears)


def _quantised(model, kind):
    flag, instead = f"--set generation={kind}", "--set generation=bf16"
    if kind == "int8":
        return Int8(model, flag, instead)
    report = FP8(model, Options(), flag, instead)
    report.backward = False
    return report


def quantise(model, kind):
    """Post-training quantisation: put a finished `model`'s layers, in place, in 'fp8' or 'int8' to draw from
    it. Returns its `Coverage`.

    Call the model under autocast to bf16. The layers are those that `convert` takes. fp8: `convert` with the
    default options, each tensor scaled by its own amax. int8: by torchao, a scale a row of weights, a scale a
    token of activations, taken from it at each call, sums in int32. Not weight-only, which saves memory
    alone: int8 kernels need both operands in 8 bits, and it costs little. The velocity of a trained DiT keeps
    40.7 dB against fp32 with int8 activations, 44.2 with bf16 ones, 46.8 by autocast alone, 29.7 in fp8.
    Raises Refused when no layer is eligible, or torchao is absent.
    """
    report = _quantised(model, kind)
    report.convert(model, alone=True)
    return report


class Quantised(Method):
    """A recipe whose samples are drawn in 8 bits, of a net that trains otherwise. kind: 'fp8' or 'int8'."""

    generates = None

    def __init__(self, model, kind):
        self.kind, self.report = kind, _quantised(model, kind)

    @classmethod
    def attach(cls, model, recipe, **_):
        if recipe.generation == "int8" or (recipe.generation == "fp8" and recipe.compute != "fp8"):
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
