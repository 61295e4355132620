"""What another format would do to the products of a net that trains without it.

    watch = Watch(model, optimizer, products=("mxfp8", "nvfp4"))
    ...                                          # train as ever
    watch.products["nvfp4"]["blocks.0.mlp.0"]    # Loss: shares that vanish or are clipped, dB of each product
    print(watch)                                 # the layers that would lose most, in each format

The operands of nn.Linear layers, as a step has them, are rounded beside the training, on any machine.
"""

import dataclasses
import functools
import math

import torch
from torch import nn

from ..errors import Refused, check_choice
from ..layers.block_formats import BLOCK_FORMATS

ROWS_SAMPLED = 256  # of a layer's inputs and gradients that are looked at: whole blocks of each format
LAYERS_SHOWN = 4  # layers of each format that are printed
OPERAND_NAMES = ("input", "weight", "grad")
PRODUCT_NAMES = ("output", "input's gradient", "weight's gradient")


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a format would do to one layer, over all looks.

    underflow: {operand: share of its non-zero values that become zero}; saturated: {operand: share of its
    values that are clipped}; snr: {product: signal-to-noise ratio, dB, beside operands that are not rounded}.
    """

    underflow: dict[str, float]
    saturated: dict[str, float]
    snr: dict[str, float]

    @property
    def worst(self) -> float:
        """The lowest of the ratios, dB."""
        return min(self.snr.values())

    def __str__(self) -> str:
        text = ", ".join(f"{name} {db:.0f} dB" for name, db in self.snr.items())
        lost = [f"{share:.0%} of {name}" for name, share in self.underflow.items() if share >= 0.005]
        clipped = [f"{share:.1%} of {name}" for name, share in self.saturated.items() if share >= 0.0005]
        if lost:
            text += f"; becomes zero: {', '.join(lost)}"
        if clipped:
            text += f"; is clipped: {', '.join(clipped)}"
        return text


class Products:
    """Listens to the nn.Linear layers of a model in the steps that a Watch looks at. names: of BLOCK_FORMATS.
    Raises Refused for an unknown name, and for a model without such layers.
    """

    def __init__(self, model, names):
        self.forms = {}
        self.totals = {}  # {format: {layer: (float64 [3, 4], float64 [3, 2])}}
        for name in names:
            check_choice("products", name, BLOCK_FORMATS)
            self.forms[name] = BLOCK_FORMATS[name]
            self.totals[name] = {}
        self.layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        if names and not self.layers:
            raise Refused("products: the model has no nn.Linear, and convolutions have none of these formats")
        self.handles = []

    def listen(self):
        """From now on, until `stop`: the next step is to be looked at."""
        if self.forms and not self.handles:
            for name, layer in self.layers.items():
                seen = functools.partial(self._seen, name)
                self.handles.append(layer.register_forward_hook(seen, with_kwargs=True))

    def stop(self):
        """The gradients of the step are there."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _seen(self, name, layer, args, kwargs, out):
        x = args[0] if args else kwargs["input"]
        # an expert without tokens is called on no rows
        if torch.is_grad_enabled() and torch.is_tensor(out) and out.requires_grad and x.numel():
            x = x.detach().reshape(-1, x.shape[-1])[:ROWS_SAMPLED].clone()
            out.register_hook(functools.partial(self._measure, name, layer, x))

    @torch.no_grad()
    def _measure(self, name, layer, x, g):
        g = g.reshape(-1, g.shape[-1])[:ROWS_SAMPLED]
        with torch.autocast(g.device.type, enabled=False):
            x, w, g = x.float(), layer.weight.detach().float().t(), g.float()
            exact = x @ w, g @ w.t(), x.t() @ g
            for kind, form in self.forms.items():
                losses, noise = self._of(name, kind, g.device)
                losses += torch.stack([form.lost(x, 1), form.lost(w, 0), form.lost(g, 1)])
                for place, (got, wanted) in enumerate(zip(_products(form, x, w, g), exact, strict=True)):
                    noise[place, 0] += wanted.double().square().sum()
                    noise[place, 1] += (got.double() - wanted.double()).square().sum()

    def _of(self, name, kind, device):
        if name not in self.totals[kind]:
            zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
            self.totals[kind][name] = zeros(3, 4), zeros(3, 2)
        return self.totals[kind][name]

    def __getitem__(self, kind: str) -> dict[str, Loss]:
        """{layer: Loss} of a format."""
        return {name: _loss_of_layer(*sums) for name, sums in self.totals[kind].items()}

    def __str__(self) -> str:
        lines = []
        for kind, form in self.forms.items():
            worst = sorted(self[kind].items(), key=lambda item: item[1].worst)
            lines.append(f"in {kind} ({form.why}), of {len(worst)} nn.Linear layers:")
            for name, loss in worst[:LAYERS_SHOWN]:
                lines.append(f"  {name}: {loss}")
            rest = worst[LAYERS_SHOWN:]
            if rest:
                lines.append(f"  and {len(rest)} more, from {rest[0][1].worst:.0f} dB on")
        return "\n".join(lines)


def _products(form, x, w, g):
    """The three products of operands x [M, K], w [K, N] and g [M, N] to the nearest."""
    rounded = functools.partial(form.rounded, compiled=False)  # a look is rare: it is not worth a compilation
    yield rounded(x, 1) @ rounded(w, 0)
    yield rounded(g, 1) @ rounded(w, 1).t()
    yield rounded(x, 0).t() @ rounded(g, 0)


def _loss_of_layer(losses, noise):
    underflow, saturated, snr = {}, {}, {}
    for operand, (zeroed, nonzero, clipped, everything) in zip(OPERAND_NAMES, losses.tolist(), strict=True):
        underflow[operand] = zeroed / max(1, nonzero)
        saturated[operand] = clipped / max(1, everything)
    for product, (signal, off) in zip(PRODUCT_NAMES, noise.tolist(), strict=True):
        snr[product] = 10 * math.log10(signal / off) if signal and off else math.inf
    return Loss(underflow, saturated, snr)
