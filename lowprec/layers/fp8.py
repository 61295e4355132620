"""FP8 training: matrix products of 8-bit floats. Ada, Hopper and later have them in hardware; elsewhere the
same numbers come slower. Needs torch alone; copy it with fp8_layers, machine, formats, rounding, method and
flops.

    covered = fp8.convert(model, fp8.Options(recipe="delayed"))    # in place: nn.Linear multiplies in FP8
    for x, y in loader:
        with torch.autocast(x.device.type, torch.bfloat16), covered.context():
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        covered.step()                                             # delayed scaling: roll the amax histories
    print(covered)                                                 # what is covered, what is not, and why
    with covered.plain(model): evaluate(model)                     # without FP8

`quantise(model, "fp8")` and, through torchao, `quantise(model, "int8")` put a finished net in 8 bits, to draw
from it. A model of bare nn.Parameter gets one `Scaling` a product, `self.scaling = fp8.Scaling()`, and calls
`fp8.matmul(x, self.w, self.scaling)` in forward; `convert` switches it on.

An operand x is stored as round(x * scale) in e4m3 (3 mantissa bits, largest value 448) or e5m2 (2 bits,
57344). The scale is fp32 and brings the operand's largest magnitude, amax, to the top of the format (arXiv
2209.05433). Products are summed in fp32, divided by both scales and rounded once. Formats: hybrid (inputs and
weights e4m3, gradients e5m2), e4m3, e5m2. Recipes say where the scale comes from:

    tensorwise  this tensor's amax (Transformer Engine: Float8CurrentScaling)
    rowwise     the amax of each row, or column, along which a product sums
    delayed     the amaxes of past steps (Transformer Engine: DelayedScaling). It lags: what grows from zero
                is clipped for some steps, which the fp8_saturated_* shares of `FP8.step` show

Backends: te (Transformer Engine 2.x, requirements-te.txt), torchao, scaled_mm (ours, by torch._scaled_mm
where device and formats allow), emulate (ours: the same 8-bit operands, decoded and multiplied in fp32,
anywhere). Convolutions, products of activations, norms, embeddings, the last layer and the loss are never in
FP8.

Compile the model. A cast reads its operand twice, for the amax and to round it. Run one by one, these passes
can cost more than the product saves. Small layers gain nothing for the same reason: what a layer of K inputs
and N outputs saves grows with K * N * rows, and what its casts cost with (K + N) * rows. There is no least
size: every layer that the kernels take is covered. On a CPU the numbers are those of a GPU and the speed is
not: a step takes longer than in fp32, by scaled_mm still longer than by emulate.
"""

import copy
import dataclasses
import math
import re
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from ..machine import Refused, try_import
from . import fp8_product
from .flops import module_flops
from .fp8_product import Linear, Options, Scaling, matmul, resolve
from .method import Method, roles

__all__ = [
    "FP8",
    "Linear",
    "Options",
    "Quantised",
    "Scaling",
    "convert",
    "matmul",
    "quantise",
    "resolve",
]

# ---- What is covered ---------------------------------------------------------------------------------------

CONVOLUTIONS = nn.modules.conv._ConvNd
# how the attributes of a module begin that hold its hooks
HOOKS = ("_forward_", "_backward_", "_is_full_backward_")


def layer_refusal(name, module, its_roles):
    """Why an nn.Linear or convolution stays out of 8 bits, or None. its_roles: see method.roles."""
    if isinstance(module, CONVOLUTIONS):
        return "convolution: stays as it is"
    if "embedding" in its_roles:
        return "embedding"
    if "head" in its_roles:
        return "last layer"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is more than an nn.Linear"
    if "weight" not in module._parameters:
        return "its weight is computed from others"
    if not name:
        return "the model is this one layer: wrap it in a module"
    return fp8_product.shape_refusal(module.in_features, module.out_features)


def _note_shape(scaling):
    """A hook that tells `scaling` whether its product can be in FP8, when a copy of it is called."""

    def note(module, args):
        scaling.decide(*args[1].shape[-2:])

    return note


class Coverage(Method):
    """Which layers of a model are multiplied in 8 bits; print it.

    linears {name: nn.Linear}: those that are. functional {name: Scaling}: products of bare parameters.
    left_out {name: reason}. layers {name: (inputs, outputs, how it is multiplied)}. flops: None before
    `count_flops`, then {name: FLOPs}, under "all" those of all products and convolutions. backward: whether
    the FLOPs are those of a step, or of a forward. flag, instead: words of a refusal. Raises Refused when no
    layer is eligible.
    """

    format, own, bare, backward = "FP8", "", True, True

    def __init__(self, model, how, scaling, flag, instead):
        self.device, self.scaling, self.flops = next(model.parameters()).device, scaling, None
        self.linears, self.functional, self.left_out = {}, {}, {}
        role_of = roles(model)
        for name, module in model.named_modules():
            if isinstance(module, Scaling) and self.bare:
                self.functional[name] = module
            elif isinstance(module, Scaling):
                self.left_out[name] = f"bare parameters: {self.format} takes nn.Linear alone"
            elif isinstance(module, nn.Linear | CONVOLUTIONS):
                if why := layer_refusal(name, module, role_of[name]):
                    self.left_out[name] = why
                else:
                    self.linears[name] = module
        if not self.linears and not self.functional:
            self._refuse(flag, instead)
        self.layers = {name: (m.in_features, m.out_features, how) for name, m in self.linears.items()}

    def _refuse(self, flag, instead):
        reason = "it has no nn.Linear, and convolutions stay as they are"
        for name, why in self.left_out.items():
            if not why.startswith("convolution"):
                reason = f"'{name}' is left out ({why})"
                break
        what = f"no layer of this net can be multiplied in {self.format}"
        raise Refused(f"{flag}: {what}, {reason}; use {instead}")

    def count_flops(self, model, args, kwargs=None):
        """Fill in `flops` from one pass over shapes, once. args, kwargs: of the model, in the dtypes it
        takes.

        `flops` stays None for a net that can't run on the meta device.
        """
        if self.flops is not None:
            return
        notes = [s.register_forward_pre_hook(_note_shape(s)) for s in self.functional.values()]
        try:
            with self.plain(model):
                by_module, by_kind = module_flops(model, args, kwargs, self.backward)
        except Exception:  # a net that looks at values can't run on shapes: no share is told
            return
        finally:
            for note in notes:
                note.remove()
        inside = {name: by_module.get(name, 0) for name in (*self.layers, *self.functional)}
        self.flops = {**inside, "all": sum(by_kind.values())}

    @property
    def share(self):
        """Share of the FLOPs of products and convolutions in 8 bits, or None before `count_flops`."""
        if self.flops is None:
            return None
        inside = [name for name, scaling in self.functional.items() if not scaling.left_out]
        return sum(self.flops[name] for name in (*self.layers, *inside)) / max(1, self.flops["all"])

    def _part(self, *names):
        if self.flops is None:
            return ""
        return f", {sum(self.flops[name] for name in names) / max(1, self.flops['all']):.1%}"

    def summary(self):
        """One line: scaling, backend, how much is covered."""
        covered = len(self.layers) + len(self.functional)
        linears = covered + sum(not why.startswith("convolution") for why in self.left_out.values())
        share = "" if self.share is None else f", {self.share:.1%} of the FLOPs of products and convolutions"
        how = {how for *_, how in self.layers.values()} | ({self.own} if self.functional else set())
        return f"{self.scaling}, by {' and '.join(sorted(how))}: {covered} of {linears} linear layers{share}"

    def _settings(self):
        return {"format": self.format, "scaling": self.scaling}

    def json(self):
        layers = []
        for name, (inputs, outputs, how) in self.layers.items():
            layers.append(dict(name=name, inputs=inputs, outputs=outputs, matmul=how))
        for name, scaling in self.functional.items():
            layers.append(dict(name=name, matmul=self.own))
            if scaling.left_out:
                layers[-1]["left_out"] = scaling.left_out
        if self.flops is not None:
            for layer in layers:
                layer["flops"] = self.flops[layer["name"]]
        total = self.flops and self.flops["all"]
        rest = dict(layers=layers, left_out=self.left_out, flops_share=self.share, flops=total)
        return {**self._settings(), **rest}

    def __str__(self):
        lines = [f"{self.format}: {self.summary()}"]
        alike = {}  # layers that differ in a number of their name alone -> their names
        for name, layer in self.layers.items():
            alike.setdefault((re.sub(r"\d+", "*", name), *layer), []).append(name)
        for (pattern, k, n, how), names in alike.items():
            what = names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
            lines.append(f"  {what}: {k} to {n}, {how}{self._part(*names)}")
        for name, scaling in self.functional.items():
            how = f"left out, {scaling.left_out}" if scaling.left_out else self.own
            lines.append(f"  {name}: {how}{self._part(name)}")
        reasons = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(f"  not in {self.format}: {', '.join(names[:4])}{more} ({why})")
        return "\n".join(lines)


# ---- Training in FP8 ---------------------------------------------------------------------------------------


class FP8(Coverage):
    """FP8 products of a model that trains; what `convert` returns. generation: the recipe's site.

    Every nn.Linear is covered whose features are multiples of 16, but for embeddings and the last layer
    (method.roles), and every `Scaling`.
    """

    generates = "fp8"  # the value of the site generation under which copies keep it
    key_of_scales = re.compile(r"(.*\.)?(amax_history|scale|_extra_state)$")

    def __init__(self, model, options, flag="--fp8", instead="--bf16", generation=""):
        device = next(model.parameters()).device
        self.options, self.generation, self.swaps = resolve(options, device), generation, []
        x, w, g = (form.dtype for form in options.formats)
        pairs = (x, w), (g, w), (g, x)
        kernels = not any(fp8_product.scaled_mm_refusal(device, *pair) for pair in pairs)
        backend = self.options.backend
        self.own = "scaled_mm" if kernels and backend != "emulate" else "emulate"
        how = {"te": "Transformer Engine", "torchao": "torchao, scaled_mm"}.get(backend, self.own)
        super().__init__(model, how, f"{options.format}, {options.recipe} scaling", flag, instead)
        te = backend == "te" and device.type != "meta"
        self.te_recipe = fp8_product.te_recipe(self.options) if te else None

    @classmethod
    def attach(cls, model, recipe, **_):
        if recipe.compute == "fp8":
            return cls(model, recipe.fp8, generation=recipe.generation)

    def convert(self, model, alone=False):
        """Swap the layers of `model`, in place. alone: Transformer Engine's need no context around them."""
        if self.device.type == "meta":
            return
        places = {}  # a layer may have several names
        for name, module in model.named_modules(remove_duplicate=False):
            places.setdefault(module, []).append(name)
        for linear in self.linears.values():
            if self.options.backend == "te":
                new = fp8_product.te_linear(linear, self.te_recipe, alone)
            elif self.options.backend == "torchao":
                new = fp8_product.torchao_linear(linear, self.options)
            else:
                new = Linear(linear, self.options)
            new.train(linear.training)
            for attribute, value in vars(linear).items():
                if attribute.startswith(HOOKS):  # other people's stay in force, and can be removed as before
                    setattr(new, attribute, value)
            for place in places[linear]:
                parent, _, attribute = place.rpartition(".")
                self.swaps.append((model.get_submodule(parent), attribute, linear, new))
        for parent, attribute, _, new in self.swaps:
            setattr(parent, attribute, new)
        ours = "emulate" if self.options.backend == "emulate" else "scaled_mm"
        for scaling in self.functional.values():
            scaling.switch(dataclasses.replace(self.options, backend=ours), self.device)

    @property
    def scalings(self):
        own = [new.scaling for new in dict.fromkeys(new for *_, new in self.swaps) if isinstance(new, Linear)]
        return own + list(self.functional.values())

    def context(self):
        """What forward runs in, beside autocast: te.autocast for Transformer Engine, else nothing."""
        if self.te_recipe is None:
            return nullcontext()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=self.te_recipe)

    @contextmanager
    def plain(self, model):
        """Within it, `model` (the one converted) has its nn.Linear back and multiplies without FP8; copies
        made in it stay so.
        """
        layers = [getattr(parent, attribute) for parent, attribute, *_ in self.swaps]
        options = [scaling.options for scaling in self.functional.values()]
        for parent, attribute, linear, _ in self.swaps:
            setattr(parent, attribute, linear)
        for scaling in self.functional.values():
            scaling.options = None
        try:
            yield
        finally:
            for (parent, attribute, *_), layer in zip(self.swaps, layers, strict=True):
                setattr(parent, attribute, layer)
            for scaling, option in zip(self.functional.values(), options, strict=True):
                scaling.options = option

    def observe(self, on):
        """Count, from now on or no longer, what the casts of this file's layers round to 0 and clip."""
        for scaling in self.scalings:
            scaling.counts = torch.zeros(3, 4, dtype=torch.float64, device=self.device) if on else None

    @torch.no_grad()
    def step(self):
        """End an optimiser step: under delayed scaling the histories roll and scales follow, alike on all
        ranks.

        Returns the shares counted since observe(True), {} if none were: fp8_underflow_<operand>, non-zero
        values that became 0, and fp8_saturated_<operand>, values clipped; operands are input, weight, grad.
        """
        scalings = self.scalings
        if self.options.recipe == "delayed" and scalings:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                amax = torch.stack([s.amax_history[0] for s in scalings])  # [products, 3]
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
                for scaling, row in zip(scalings, amax, strict=True):
                    scaling.amax_history[0] = row
            for scaling in scalings:
                scaling.roll()
        counts = [s.counts for s in scalings if s.counts is not None]
        if not counts:
            return {}
        report = {}
        for name, row in zip(fp8_product.OPERANDS, torch.stack(counts).sum(0).tolist(), strict=True):
            zeroed, nonzero, clipped, everything = row
            report[f"fp8_underflow_{name}"] = zeroed / max(1, nonzero)
            report[f"fp8_saturated_{name}"] = clipped / max(1, everything)
        return report

    def after_step(self, low_part):
        return self.step()

    def values(self, values):
        """Without the scales, which the net did not have as it came."""
        return {k: v for k, v in values.items() if k.rpartition(".")[0] not in self.functional}

    def adapt(self, own, saved):
        """Scales that another backend wrote are left out, those that it did not write stay as they are:
        another machine may resume with another backend.
        """
        kept = {key: value for key, value in saved.items() if key in own or not self.key_of_scales.match(key)}
        return {**{key: value for key, value in own.items() if self.key_of_scales.match(key)}, **kept}

    def rows(self, parameters, generation_dtype):
        rows = {"compute": {"why": self.summary()}}
        if self.generation == "compute":
            rows["generation"] = {"why": "samples are drawn without FP8, in bf16"}
        return rows

    def details(self):
        return {"fp8": self}

    def _settings(self):
        return dataclasses.asdict(self.options)

    def finish(self, run, loss):
        """{"gradient_snr": {"fp8": dB, "bf16": dB}}: signal-to-noise ratio of the gradients of loss(model), a
        scalar of one batch, against those of an fp32 copy of the weights; "bf16" of that copy under autocast,
        which is what FP8 training would be without FP8. One copy of the net at a time is held.
        """
        sites = dict(weights="fp32", grads="fp32", islands="none")

        def exact_copy(compute):
            with self.plain(run.model):
                net = run.cast.undo(copy.deepcopy(run.model)).float()
            return gradients(run.view(net, compute=compute, **sites), net, loss)

        exact = exact_copy("fp32")
        bf16 = signal_to_noise(exact_copy("bf16"), exact)["all"]
        low = copy.deepcopy(run.model)  # a copy: delayed scaling records what it sees
        fp8 = signal_to_noise(gradients(run.view(low, methods=(self,)), low, loss), exact)["all"]
        return {"gradient_snr": {"fp8": fp8, "bf16": bf16}}


def convert(model, options=None):
    """Put `model`'s products in FP8, in place, over the same parameters, under the same names -> `FP8`.

    A model on the meta device keeps its layers, the report alone is made. Raises Refused when no layer is
    eligible, or when the options can't run on the model's device.
    """
    covered = FP8(model, options or Options())
    covered.convert(model)
    return covered


# ---- A finished net ----------------------------------------------------------------------------------------


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


# ---- The noise of gradients --------------------------------------------------------------------------------


def gradients(model, net, loss):
    """{parameter name: gradient or None} of loss(model), where model calls `net`. No .grad is touched."""
    names, params = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(model), params, allow_unused=True), strict=True))


def signal_to_noise(low, exact):
    """Signal-to-noise ratio of gradients `low` against `exact`, {name: dB} and "all": 10 log10 of |g|^2 /
    |g' - g|^2. Parameters without a gradient are left out; equal gradients give infinity.
    """
    signal, noise = {}, {}
    for name, g in exact.items():
        if g is not None and low[name] is not None:
            signal[name] = g.double().square().sum().item()
            noise[name] = (low[name].double() - g.double()).square().sum().item()
    signal["all"], noise["all"] = sum(signal.values()), sum(noise.values())
    return {name: _decibel(signal[name], noise[name]) for name in signal}


def _decibel(signal, noise):
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
