"""FP8 training: the matrix products of nn.Linear layers in 8-bit floats. docs/formats.md explains the words.

    covered = fp8.convert(model, fp8.Options(recipe="delayed"))    # in place: nn.Linear multiplies in FP8
    for x, y in loader:
        with torch.autocast(x.device.type, torch.bfloat16), covered.context():
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        covered.step()                                             # delayed scaling: roll the amax histories
    print(covered)                                                 # what is covered, what is not, and why
    with covered.plain(model): evaluate(model)                     # without FP8
"""

import dataclasses
import math
import re
from contextlib import nullcontext

import torch
import torch.distributed as dist

from ..cast import without_borders
from ..view import View, copied
from . import fp8_backends, fp8_product, stacks
from .coverage import PREFIXES_OF_HOOKS, Coverage
from .fp8_backends import Options
from .fp8_product import Linear, Scaling, matmul
from .swap import swapped

__all__ = [
    "FP8",
    "Linear",
    "Options",
    "Scaling",
    "convert",
    "matmul",
]


# ---- Training in FP8 ---------------------------------------------------------------------------------------


class FP8(Coverage):
    """FP8 products of a model that trains; what `convert` returns. generation: the recipe's site.

    Every nn.Linear is covered whose features are multiples of 16, but for embeddings and the last layer
    (roles.roles), every `Scaling`, and stacks of matrices. Raises Refused as `resolve` and `Coverage` do.
    """

    takes_stacks = True
    generates: str | None = "fp8"  # the value of the site generation under which copies keep it
    key_of_scales = re.compile(r"(.*\.)?(amax_history|scale|_extra_state)$")

    def __init__(self, model, options, flag="--fp8", instead="--bf16", generation=""):
        device = next(model.parameters()).device
        self.options = options = options.resolve(device)
        self.multiple = options.multiple
        self.generation = generation
        self.swaps = []  # see swap.swapped
        backend = options.backend
        self.functional_by = "emulate"
        if options.plan:
            self.functional_by = backend
        elif backend != "emulate" and _has_kernels(options.formats, device):
            self.functional_by = "scaled_mm"
        names = {"te": "Transformer Engine", "torchao": "torchao, scaled_mm"}
        super().__init__(model, names.get(backend, self.functional_by), options.words, flag, instead)
        self.te_recipe = None
        if backend == "te" and device.type != "meta":
            self.te_recipe = fp8_backends.te_recipe(self.options)

    @classmethod
    def of(cls, run):
        return cls(run.model, run.recipe.fp8, generation=run.recipe.generation)

    def convert(self, model, alone=False):
        """Swap the layers of `model`, in place. alone: Transformer Engine's need no context around them."""
        if self.device.type == "meta":
            return
        new = {linear: self._layer_for(linear, alone) for linear in self.linears.values()}
        self.swaps = swapped(model, new)
        for name, scaling in self.bare.items():
            scaling.switch(self._options_of(name), self.device)
        for name, scaling in self.stacks.items():
            stacks.take_products(model.get_submodule(name), scaling)
        self.on = True

    def switch(self, on):
        for parent, attribute, linear, low in self.swaps:
            setattr(parent, attribute, low if on else linear)
        for name, scaling in self.bare.items():
            scaling.options = self._options_of(name) if on else None
        self.on = on

    def _options_of(self, name):
        """How a product that is no nn.Linear's is taken."""
        options, is_stack = self.options, name in self.stacks
        if is_stack and options.recipe == "delayed":
            # a history of amaxes for each matrix of a stack is not kept: its scales are those of now
            return Options(backend="emulate", format=options.format)
        if is_stack:
            return dataclasses.replace(options, backend="emulate")
        if not options.plan and options.backend != "emulate":
            return dataclasses.replace(options, backend="scaled_mm")
        return options

    def _layer_for(self, linear, alone):
        """A layer over the parameters of an nn.Linear, with its hooks, which multiplies in FP8."""
        if self.options.backend == "te":
            new = fp8_backends.te_linear(linear, self.te_recipe, alone)
        elif self.options.backend == "torchao" and not self.options.plan:
            new = fp8_backends.torchao_linear(linear, self.options)
        else:
            new = Linear(linear, self.options)
        new.train(linear.training)
        for attribute, value in vars(linear).items():
            # other people's stay in force, and can be removed as before
            if attribute.startswith(PREFIXES_OF_HOOKS):
                setattr(new, attribute, value)
        return new

    @property
    def scalings(self):
        """The Scaling of each product of ours, in the order of the net."""
        found, layers = [], set()
        for *_, layer in self.swaps:
            if isinstance(layer, Linear) and layer not in layers:  # once: a layer may have several names
                layers.add(layer)
                found.append(layer.scaling)
        return found + list(self.bare.values())

    def context(self):
        """What forward runs in, beside autocast: te.autocast for Transformer Engine, else nothing."""
        if self.te_recipe is None:
            return nullcontext()
        import transformer_engine.pytorch as te

        return te.autocast(enabled=True, recipe=self.te_recipe)

    def observe(self, on):
        """Count, from now on or no longer, what the casts of this file's layers round to 0 and clip."""
        for scaling in self.scalings:
            scaling.counts = None
            if on:
                scaling.counts = torch.zeros(3, 4, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def step(self):
        """End an optimiser step: under delayed scaling the histories roll and scales follow, alike on all
        ranks.

        Returns the shares counted since observe(True), {} if none were: fp8_underflow_<operand>, non-zero
        values that became 0, and fp8_saturated_<operand>, values clipped; operands are input, weight, grad.
        In FP4 they begin with fp4_.
        """
        scalings = self.scalings
        if self.options.recipe == "delayed" and scalings:
            _share_largest_amaxes(scalings)
            for scaling in scalings:
                scaling.roll()
        counts = [scaling.counts for scaling in scalings if scaling.counts is not None]
        if not counts:
            return {}
        totals = torch.stack(counts).sum(0).tolist()  # 3 operands x 4 counts, see fp8_product._count_losses
        report = {}
        kind = self.format.lower()
        names = fp8_product.FP8_OPERANDS
        for name, (zeroed, nonzero, clipped, everything) in zip(names, totals, strict=True):
            report[f"{kind}_underflow_{name}"] = zeroed / max(1, nonzero)
            report[f"{kind}_saturated_{name}"] = clipped / max(1, everything)
        return report

    def after_step(self):
        return self.step()

    def values(self, values):
        """Without the scales, which the net did not have as it came."""
        found = {}
        for name, value in values.items():
            module, _, _ = name.rpartition(".")
            if module not in self.functional:
                found[name] = value
        return found

    def adapt(self, own, saved):
        """Scales that another backend wrote are left out, those that it did not write stay as they are:
        another machine may resume with another backend.
        """
        found = {}
        for key, value in own.items():
            if self.key_of_scales.match(key):
                found[key] = value
        for key, value in saved.items():
            if key in own or not self.key_of_scales.match(key):
                found[key] = value
        return found

    def rows(self, parameters, generation_dtype):
        rows = {"compute": {"why": self.summary()}}
        if self.generation == "compute":
            rows["generation"] = {"why": f"samples are drawn without {self.format}, in bf16"}
        return rows

    def details(self):
        return {self.format.lower(): self}

    def _settings(self):
        return dataclasses.asdict(self.options)

    def finish(self, run, loss):
        """{"gradient_snr": {"fp8": dB, "bf16": dB}}: signal-to-noise ratio of the gradients of loss(model), a
        scalar of one batch, against those of an fp32 copy of the weights; "bf16" of that copy under autocast,
        which is what FP8 training would be without FP8. One copy of the net at a time is held.
        """
        exact = self._gradients_without_fp8(run, loss, "fp32")
        bf16 = signal_to_noise(self._gradients_without_fp8(run, loss, "bf16"), exact)
        low = copied(run.model)  # a copy: delayed scaling records what it sees
        own = signal_to_noise(gradients_of_loss(self._view(run, low, [self]), low, loss), exact)
        return {"gradient_snr": {self.format.lower(): own, "bf16": bf16}}

    def _gradients_without_fp8(self, run, loss, compute):
        """Of a copy of the net with fp32 weights, whose products are taken in `compute`."""
        with self.plain(run.model):
            net = without_borders(copied(run.model)).float()
        view = self._view(run, net, compute=compute, weights="fp32", grads="fp32", islands="none")
        return gradients_of_loss(view, net, loss)

    def _view(self, run, net, methods=(), **sites):
        """A copy of the net, called as the run's recipe with some sites changed says."""
        return View(net, run.recipe.replace(**sites), methods, run.view_of_model.keep)


def _has_kernels(formats, device):
    """Whether torch._scaled_mm multiplies the three pairs of operands of a layer on this device."""
    x, w, g = formats
    for one, other in ((x, w), (g, w), (g, x)):
        refusal = fp8_product.scaled_mm_refusal(device, one.dtype, other.dtype)
        if refusal:
            return False
    return True


def _share_largest_amaxes(scalings):
    """Let the amaxes of this step be the largest of all ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    amax = torch.stack([scaling.amax_history[0] for scaling in scalings])  # [products, 3]
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    for scaling, row in zip(scalings, amax, strict=True):
        scaling.amax_history[0] = row


def convert(model, options=None):
    """Put `model`'s products in FP8, in place, over the same parameters, under the same names -> `FP8`.

    A model on the meta device keeps its layers, the report alone is made. Raises Refused when no layer is
    eligible, or when the options can't run on the model's device.
    """
    covered = FP8(model, options or Options())
    covered.convert(model)
    return covered


# ---- The noise of gradients --------------------------------------------------------------------------------


def gradients_of_loss(model, net, loss):
    """{parameter name: gradient or None} of loss(model), where model calls `net`. No .grad is touched."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss(model), list(trained.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def signal_to_noise(low, exact):
    """Signal-to-noise ratio of gradients `low` against `exact`, dB: 10 log10 of |g|^2 / |g' - g|^2 over all
    parameters that have both; infinite for equal ones.
    """
    signal = noise = 0.0
    for name, g in exact.items():
        if g is not None and low[name] is not None:
            signal += g.double().square().sum().item()
            noise += (low[name].double() - g.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
