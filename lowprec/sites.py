"""The sites: each kind of tensor of a run, with the values that it may have and the reason for each.

A row is a formats.Site. SITES are those of every run. An optimiser has its own in `Rounded.sites`, a task in
`Task.sites`.
"""

from __future__ import annotations

from .formats import CODE_FORMATS, Site
from .layers.block_formats import BLOCK_FORMATS

# values of compute in which nn.Linear reads 8 or 4 bits, all else bf16: where the options of each stand
LOW_PRODUCTS = {"fp8": ("layers.fp8_backends", "Options"), "fp4": ("layers.fp4", "FP4Options")}
_BLOCKS = [name for name, form in BLOCK_FORMATS.items() if form.draws]
# and with weights alone in these formats, what they multiply in bf16
_KINDS_OF_BLOCKS = [*_BLOCKS, *[f"{name}_weights" for name in _BLOCKS]]
BLOCKS_OF_GENERATION = {
    kind: f"samples are drawn through layers in {kind.removesuffix('_weights')}" for kind in _KINDS_OF_BLOCKS
}

SITES = {
    "weights": Site(
        ("fp32", "bf16"),
        {"fp32": "forward reads full precision", "bf16": "half the bytes; forward reads 8 significant bits"},
    ),
    "master": Site(
        ("none", "fp32", "split", "split8"),
        {
            "none": "the weights are the only copy",
            "fp32": "a second, full-precision copy takes the updates",
            "split": "bf16 weight + int16 remainder = the exact fp32 master in 4 bytes",
            "split8": "bf16 weight + int8 remainder = a master of 16 significant bits in 3 bytes",
        },
    ),
    "update": Site(
        ("nearest", "stochastic", "eco"),
        {
            "nearest": "updates under half an ulp are lost",
            "eco": "to nearest, and what is rounded away goes into the momentum; moments stochastically",
            "stochastic": "rounds up with probability = distance: nothing is lost on average, "
            "some noise is added",
        },
    ),
    "kahan": Site(("off", "on"), {"on": "a bf16 buffer keeps what each weight write rounded away"}),
    "compute": Site(
        ("fp32", "tf32", "bf16", "fp16", *LOW_PRODUCTS),
        {
            "tf32": "fp32 storage, 10-bit mantissa inside tensor cores",
            "bf16": "matmuls and convolutions read 8 significant bits",
            "fp16": "11 significant bits, range 6e-8 .. 65504: needs dynamic loss scaling",
            "fp8": "matmuls of nn.Linear read 3 or 4 significant bits, scaled; all else computes in bf16",
            "fp4": "matmuls of nn.Linear read 2 significant bits, scaled in blocks; all else is in bf16",
        },
    ),
    "loss_scale": Site(
        ("none", "dynamic"),
        {"dynamic": "keeps fp16 gradients between 6e-8 and 65504: backs off at an overflow, grows again"},
    ),
    "grads": Site(("fp32", "bf16"), {"bf16": "autograd leaves a gradient in its weight's dtype"}),
    "accumulate": Site(
        ("fp32", "bf16"),
        {"fp32": "micro-batches are summed exactly enough", "bf16": "each micro-batch adds a rounding error"},
    ),
    "exp_avg": Site(
        ("fp32", "bf16", *CODE_FORMATS),
        {"bf16": "1-beta1 = 0.1 is far above an ulp", **CODE_FORMATS},
    ),
    "exp_avg_sq": Site(
        ("fp32", "bf16", *CODE_FORMATS),
        {"bf16": "1-beta2 must beat half an ulp (2^-8), or be rounded stochastically", **CODE_FORMATS},
    ),
    "ema": Site(
        ("fp32", "bf16"),
        {
            "fp32": "1-decay is far below a bf16 ulp: the average needs fp32",
            "bf16": "steps of (1-decay)(w-ema) fall under half an ulp",
        },
    ),
    "ema_update": Site(("nearest", "stochastic"), {"stochastic": "a bf16 average that moves in expectation"}),
    "islands": Site(("none", "norm", "embed", "final")),
    "buffers": Site(
        ("fp32", "bf16"),
        {
            "fp32": "frequencies and running statistics keep their bits",
            "bf16": "cast like the weights; a counter among them stops at 256",
        },
        {
            "bf16": "buffers=bf16: RoPE frequencies and running statistics keep 8 bits; "
            "use --set buffers=fp32 (default)"
        },
    ),
    "frozen": Site(
        ("kept", "cast", "fp32", "bf16", "nf4"),
        {
            "kept": "in the dtype in which the net came, but averages of other parts in fp32",
            "cast": "in the dtype of the weights that are trained",
            "fp32": "brought to full precision",
            "bf16": "half the bytes of fp32",
            "nf4": "linear layers in 4.5 bits a weight, decoded for each product",
        },
    ),
    "loss": Site(
        ("fp32", "bf16"),
        {"fp32": "sums need the bits", "bf16": "the loss is formed from bf16 differences"},
    ),
    "generation": Site(
        ("compute", "fp32", "bf16", "autocast", "fp16", "fp8", "int8", *BLOCKS_OF_GENERATION),
        {
            "compute": "samples are drawn in the precision that was trained",
            "fp32": "samples are drawn from an fp32 copy of the weights",
            "bf16": "samples are drawn from a bf16 copy of the weights: conversion after training",
            "fp8": "samples are drawn through the FP8 layers",
            "int8": "samples are drawn through int8 layers",
            "autocast": "samples are drawn from an fp32 copy under bf16 autocast",
            "fp16": "samples are drawn from an fp32 copy under fp16 autocast: above 65504 is infinity",
            **BLOCKS_OF_GENERATION,
        },
    ),
    "generation_rounding": Site(
        ("nearest", "gptq"),
        {
            "nearest": "weights of a finished net go to the nearest value of 8 or 4 bits",
            "gptq": "a weight makes up for what rounding those before it did to the layer's output",
        },
    ),
    "reduce": Site(
        ("fp32", "bf16"),
        {
            "fp32": "gradients of all ranks are summed in fp32",
            "bf16": "half the traffic; sums over W ranks are rounded W - 1 times",
        },
    ),
    "reduce_update": Site(
        ("nearest", "stochastic"),
        {"stochastic": "gradients of all ranks are summed in fp32 and rounded once, without bias"},
    ),
    "sparse24": Site(
        ("none", "magnitude", "srste"),
        {"magnitude": "pruned once, the mask is fixed", "srste": "pruned anew at each step"},
    ),
    "attention": Site(
        ("compute", "fp8"),
        {
            "compute": "queries by keys and probabilities by values are multiplied as all else",
            "fp8": "queries by keys and probabilities by values read 8-bit floats",
        },
    ),
}
