"""What a run may have besides net, optimiser and averages: the table of its parts.

A part's module is imported once a run wants it. A new part is a class (see part.py) and a row here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..sites import LOW_PRODUCTS


class Place(NamedTuple):
    """Where the class of a part stands, and whether a run, made or asked for, wants it."""

    module: str
    kind: str
    wanted: Callable[[Any], Any]

    def load(self) -> Any:
        return getattr(importlib.import_module(f"..{self.module}", __name__), self.kind)


# the part of micro-batches with weights, also where nobody has asked for several a step
MICRO_BATCHES = Place(
    "parts.micro_batches",
    "MicroBatches",
    lambda run: run.options.accumulate > 1 or run.recipe.sparse24 == "srste",
)
# what changes a run over at its end, once somebody asks for it
FINISH = Place("parts.finish", "finish", lambda run: False)
# Parts are made, and asked in a step, in this order.
PARTS = (
    # sums first: all others see the gradient of the whole step
    MICRO_BATCHES,
    # rows of this rank, before anybody looks at values
    Place("parts.ranks", "NetRanks", lambda run: run.spread),
    # gradients have their own size again before anything is added to them
    Place("parts.loss_scale", "LossScale", lambda run: run.recipe.loss_scale == "dynamic"),
    # adapters: they say which weights are trained
    Place("layers.lora", "Lora", lambda run: run.options.lora),
    # frozen layers in 4 bits, the bases of adapters among them
    Place("layers.nf4", "NF4Base", lambda run: run.recipe.frozen == "nf4"),
    # frozen layers that came in codes
    Place("parts.frozen", "QuantisedBase", lambda run: run.quantised_base),
    # 2:4 sparsity prunes by the weights as they came
    Place("layers.sparsity", "Sparse24", lambda run: run.recipe.sparse24 != "none"),
    # products in 8 bits, or in 4
    Place("layers.fp8", "FP8", lambda run: run.recipe.compute == "fp8"),
    Place("layers.fp4", "FP4", lambda run: run.recipe.compute == "fp4"),
    Place("layers.fp8_attention", "FP8Attention", lambda run: run.recipe.attention == "fp8"),
    # samples in 8 or 4 bits of a net that trains otherwise: it finds the layers that the others left
    Place("layers.quantise", "Quantised", lambda run: run.recipe.quantises),
    # gradients of convolutions that a CPU gets wrong
    Place(
        "parts.onednn",
        "Onednn",
        lambda run: run.convolves_on_cpu and run.recipe.compute in ("bf16", *LOW_PRODUCTS),
    ),
    # averages elsewhere
    Place("parts.average_on_cpu", "AveragesOnCPU", lambda run: run.options.average_on != "device"),
    # moments elsewhere
    Place("parts.offload", "Offloaded", lambda run: run.options.states_on != "device"),
    # updates within backward, of gradients that all others have seen
    Place("parts.release", "Released", lambda run: run.options.grad_release),
)
