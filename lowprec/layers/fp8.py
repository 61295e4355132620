"""FP8 training: matrix products of 8-bit floats. Ada, Hopper and later have them in hardware; elsewhere the
same numbers come slower.

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

from . import fp8_backends, fp8_product
from .fp8_backends import resolve
from .fp8_product import Linear, Options, Scaling, matmul
from .method import HOOKS, Coverage

__all__ = [
    "FP8",
    "Linear",
    "Options",
    "Scaling",
    "convert",
    "matmul",
    "resolve",
]


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
        self.te_recipe = fp8_backends.te_recipe(self.options) if te else None

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
                new = fp8_backends.te_linear(linear, self.te_recipe, alone)
            elif self.options.backend == "torchao":
                new = fp8_backends.torchao_linear(linear, self.options)
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
