"""Recipes: for each kind of tensor of a run where it lives and how it is rounded, and the flags that compose
them.

    r = recipe(pure_bf16=True, stochastic=True, sites=["ema=bf16"])
    r.weights, r.update, r.dtype("ema")                     # 'bf16', 'stochastic', torch.bfloat16
    r.warnings(lr=1e-4)                                     # what the recipe loses, with the arithmetic

SITES lists the kinds of tensor ("sites") with the values that each may have and the reason for each. Refusals
and warnings are rows: a condition and a sentence.
"""

import dataclasses
import math

import torch

from .errors import Refused
from .formats import FORMATS
from .layers import fp8
from .machine import device_facts, support
from .optimizers.build import OPTIMIZERS, kinds
from .optimizers.peers import PEERS
from .rounding import DTYPES

# ---- Sites -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """One kind of tensor. values: what it may be held in or how it may be written, the default first.

    why: {value: the reason that the ledger prints}. warn: {value: what a recipe with that value loses}.
    """

    values: tuple
    why: dict = dataclasses.field(default_factory=dict)
    warn: dict = dataclasses.field(default_factory=dict)


CODES = {name: form.why for name, form in FORMATS.items()}
SITES = {
    "weights": Site(
        ("fp32", "bf16"),
        {"fp32": "forward reads full precision", "bf16": "half the bytes; forward reads 8 significant bits"},
    ),
    "master": Site(
        ("none", "fp32", "split"),
        {
            "none": "the weights are the only copy",
            "fp32": "a second, full-precision copy takes the updates",
            "split": "bf16 weight + int16 remainder = the exact fp32 master in 4 bytes",
        },
    ),
    "update": Site(
        ("nearest", "stochastic"),
        {
            "nearest": "updates under half an ulp are lost",
            "stochastic": "rounds up with probability = distance: nothing is lost on average, "
            "some noise is added",
        },
    ),
    "kahan": Site(("off", "on"), {"on": "a bf16 buffer keeps what each weight write rounded away"}),
    "compute": Site(
        ("fp32", "tf32", "bf16", "fp16", "fp8"),
        {
            "tf32": "fp32 storage, 10-bit mantissa inside tensor cores",
            "bf16": "matmuls and convolutions read 8 significant bits",
            "fp16": "11 significant bits, range 6e-8 .. 65504: needs dynamic loss scaling",
            "fp8": "matmuls of nn.Linear read 3 or 4 significant bits, scaled; all else computes in bf16",
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
    "exp_avg": Site(("fp32", "bf16", *CODES), {"bf16": "1-beta1 = 0.1 is far above an ulp", **CODES}),
    "exp_avg_sq": Site(
        ("fp32", "bf16", *CODES),
        {"bf16": "1-beta2 must beat half an ulp (2^-8), or be rounded stochastically", **CODES},
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
        {"fp32": "frequencies and running statistics keep their bits", "bf16": "cast like the weights"},
        {
            "bf16": "buffers=bf16: RoPE frequencies and running statistics keep 8 bits; "
            "use --set buffers=fp32 (default)"
        },
    ),
    "loss": Site(
        ("fp32", "bf16"),
        {"fp32": "sums need the bits", "bf16": "the loss is formed from bf16 differences"},
    ),
    "generation": Site(
        ("compute", "fp32", "bf16", "autocast", "fp16", "fp8", "int8"),
        {
            "compute": "samples are drawn in the precision that was trained",
            "fp32": "samples are drawn from an fp32 copy of the weights",
            "bf16": "samples are drawn from a bf16 copy of the weights: conversion after training",
            "fp8": "samples are drawn through the FP8 layers",
            "int8": "samples are drawn through int8 layers",
            "autocast": "samples are drawn from an fp32 copy under bf16 autocast",
            "fp16": "samples are drawn from an fp32 copy under fp16 autocast: above 65504 is infinity",
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
}

SLOW = {"bf16": "from step 1,000 on it moves by t^-0.8 of a difference, which needs stochastic rounding"}

# those that an optimiser has beside or in place of exp_avg and exp_avg_sq, which are AdamW's
OF_OPTIMIZERS = {
    "momentum": Site(("fp32", "bf16", *CODES), {"bf16": "1-momentum is far above an ulp", **CODES}),
    "row_var": Site(("fp32", "bf16"), {"fp32": "one number a row of a matrix: hardly any bytes", **SLOW}),
    "col_var": Site(("fp32", "bf16"), {"fp32": "one number a column of a matrix", **SLOW}),
    "orthogonalise": Site(
        ("fp32", "bf16"),
        {
            "fp32": "Newton-Schulz in full precision",
            "bf16": "Newton-Schulz as published: singular values end between 0.7 and 1.2 in either",
        },
    ),
}
# the site whose value they have where nothing is said
LIKE = {"momentum": "exp_avg", "row_var": "exp_avg_sq", "col_var": "exp_avg_sq"}
MOMENTS = ("exp_avg", "exp_avg_sq", *LIKE)

# ---- Recipes -----------------------------------------------------------------------------------------------


class Recipe:
    """A value for each site, read as an attribute: `r.weights`. The defaults are fp32 everywhere.

    Build one with `recipe(...)`, which applies presets, the user's single sites, and the refusals. more:
    {name: Site} of the sites that belong to a task or an optimiser. fp8: an `fp8.Options` when compute is
    fp8.
    """

    def __init__(self, more=None, fp8=None, **values):
        self.more, self.fp8 = more or {}, fp8
        self.values = {name: site.values[0] for name, site in self.sites.items()}
        if unknown := set(values) - set(self.values):
            raise TypeError(f"Recipe() got an unexpected keyword argument '{sorted(unknown)[0]}'")
        self.values.update(values)

    @property
    def sites(self):
        return {**SITES, **self.more}

    def __getattr__(self, name):
        if name in self.__dict__.get("values", ()):
            return self.__dict__["values"][name]
        raise AttributeError(f"a recipe has no site '{name}'")

    def __getitem__(self, site):
        return self.values[site]

    def __eq__(self, other):
        return isinstance(other, Recipe) and (self.values, self.fp8) == (other.values, other.fp8)

    def __hash__(self):
        return hash((*self.values.items(), self.fp8))

    def __repr__(self):
        changed = [f"{k}={v!r}" for k, v in self.values.items() if v != self.sites[k].values[0]]
        return f"Recipe({', '.join(changed)})"

    def replace(self, **values):
        """The recipe with some sites changed."""
        return Recipe(self.more, self.fp8, **{**self.values, **values})

    def dtype(self, site):
        """torch dtype of a site that holds fp32, bf16 or fp16; of compute=fp8 what computes beside the FP8
        layers.
        """
        value = self.values[site]
        return DTYPES["bf16" if value == "fp8" else value]

    def on(self, device):
        """The recipe with what depends on the machine settled: which backend runs FP8. Raises Refused when
        none can.
        """
        return Recipe(self.more, fp8.resolve(self.fp8, device), **self.values) if self.fp8 else self

    @property
    def low_weights(self):
        return self.weights == "bf16"

    @property
    def quantises(self):
        """Whether samples are drawn in 8 bits from a net that was not trained so."""
        return self.generation == "int8" or (self.generation == "fp8" and not self.fp8)

    @property
    def moments(self):
        """The sites of an optimiser's moments."""
        return [name for name in MOMENTS if name in self.values]

    @property
    def coded(self):
        """The formats of codes that moments are held in: a subset of formats.FORMATS."""
        return {self[name] for name in self.moments} & set(CODES)

    def keeping(self, *optimizers):
        """The recipe with the sites of these optimisers, names or classes. Raises Refused for a moment that
        one of them can't hold so.
        """
        values, more = _of_optimizers(self.values, optimizers)
        return Recipe({**more, **self.more}, self.fp8, **values)

    @property
    def generation_dtype(self):
        """torch dtype of the weights that generation reads."""
        low = self.generation == "bf16" or (self.low_weights and self.generation == "compute")
        return torch.bfloat16 if low else torch.float32

    def warnings(
        self, *, beta2=0.999, ema_decay=0.999, lr=1e-3, weight_decay=0.0, micro_batches=1, optimizer="adamw"
    ):
        """Recipes that run but lose something: one line each, with the arithmetic. [] for a healthy recipe.
        optimizer: its name; one of `peers.PEERS` writes in its own way.
        """
        rows = _losses(self, beta2, ema_decay, lr, weight_decay, micro_batches, optimizer)
        lost = [text for wrong, text in rows if wrong]
        return lost + [site.warn[self[name]] for name, site in self.sites.items() if self[name] in site.warn]


def _losses(r, beta2, ema_decay, lr, weight_decay, micro_batches, optimizer):
    """[(whether a recipe loses something, what it loses and what keeps it)]."""
    written = {"update": r.update, "kahan": r.kahan, "moments": r.update}
    written.update(PEERS[optimizer].writes if optimizer in PEERS else {})
    nearest = written["moments"] == "nearest"
    bare = r.low_weights and (written["update"], written["kahan"], r.master) == ("nearest", "off", "none")
    undecayed = bare or (r.low_weights and written.get("decay") == "nearest")

    def keeps(remedy):
        return f"use --stochastic without --optimizer {optimizer}" if optimizer in PEERS else remedy

    gap = {"int8": "0.35 % to 28 %", "int4": "3 % to 50 %", "e4m3": "3 % to 6 %", "e5m2": "6 % to 12 %"}
    of_value = f"half a gap between codes ({gap.get(r.exp_avg_sq)} of the value)"
    half_gap = f"a decay by 1-beta2 = {1 - beta2:.2g} under {of_value}"
    slow = 1 - ema_decay < 2**-7
    factored = [name for name in ("row_var", "col_var") if name in r.values and r[name] == "bf16"]
    # steps of AdamW and Lion have the size lr
    step = f"a step of lr={lr:g} on a weight of 0.05 is {lr / 0.05:.2g} of it, and "
    step = "" if {"momentum", "row_var"} & set(r.values) else step
    # each write of a bf16 average adds noise of up to an ulp, which decays at rate 1-decay only: it settles
    # near ulp * sqrt(1/12 .. 1/4) / sqrt(2 (1-decay)), of which this is the worst
    settled = 0.4 * 2**-8 / math.sqrt(2 * (1 - ema_decay))
    summed = 2**-9 * math.sqrt(micro_batches / 3)
    return [
        (
            bare,
            f"update=nearest on bf16 weights: {step}"
            "steps under 2^-9..2^-8 (0.002..0.004) of a weight vanish; "
            + keeps("add --stochastic, --kahan or --master split"),
        ),
        (
            undecayed and weight_decay,
            f"weight decay moves a weight by lr*wd = {lr * weight_decay:.2g} of itself, below half an ulp "
            "(0.002): alone it is always lost in bf16; " + keeps("--stochastic keeps it"),
        ),
        (
            r.exp_avg_sq == "bf16" and nearest and 1 - beta2 < 2**-8,
            f"exp_avg_sq=bf16, nearest: decaying by 1-beta2 = {1 - beta2:.2g} is under half an ulp "
            "(2^-9..2^-8), so v can grow and never shrink; "
            + keeps("use --stochastic, --set exp_avg_sq=fp32 or beta2 <= 0.99"),
        ),
        (
            r.exp_avg_sq in CODES and nearest,
            f"exp_avg_sq={r.exp_avg_sq}, nearest: {half_gap} is lost: where some gradients of a block drop, "
            "their v stays too high and their steps too short; " + keeps("add --stochastic"),
        ),
        (
            factored and nearest,
            f"{' and '.join(factored)} in bf16, nearest: at step t they move by t^-0.8 of a difference, from "
            "step 1,000 on under half an ulp (2^-8), so they stand still; use --stochastic or --set "
            "row_var=fp32 --set col_var=fp32",
        ),
        (
            r.ema == "bf16" and r.ema_update == "nearest" and slow,
            f"ema=bf16, nearest: an entry moves only while |w-ema| > {2**-9 / (1 - ema_decay):.2g} |ema| "
            "(half an ulp over 1-decay): the average freezes far from the weights; use --set ema=fp32 "
            "(default) or ema_update=stochastic",
        ),
        (
            r.ema == "bf16" and r.ema_update == "stochastic" and slow,
            f"ema=bf16, stochastic: unbiased, but rounding noise of an entry settles near {settled:.1%} of "
            "its value; --set ema=fp32 (default) has none",
        ),
        (
            r.compute == "fp16" and r.loss_scale == "none",
            "loss_scale=none with fp16: gradients below 6e-8 become 0 and above 65504 infinite; use --set "
            "loss_scale=dynamic (default)",
        ),
        (
            r.low_weights and r.accumulate == "bf16" and micro_batches > 1,
            f"accumulate=bf16 over {micro_batches} micro-batches: relative error near {summed:.2%} of the "
            "gradient; --set accumulate=fp32 costs 4 bytes a parameter",
        ),
    ]


FP8_FLAGS = {
    "fp8_backend": "auto",
    "fp8_format": "hybrid",
    "fp8_recipe": "tensorwise",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
}


def recipe(
    *,
    bf16=False,
    fp16=False,
    pure_bf16=False,
    stochastic=False,
    kahan=False,
    master="none",
    opt8bit=False,
    opt4bit=False,
    fp8=False,
    sparse24="none",
    sites=(),
    more=None,
    optimizer="adamw",
    **fp8_flags,
):
    """The recipe that a set of flags composes.

    sites: single settings ("ema=bf16"), applied after the flags. more: {name: Site} of a task. optimizer: its
    name or class, whose sites the recipe has. fp8_flags: see FP8_FLAGS. Raises Refused for an unknown site or
    value and for combinations that make no sense, naming the nearest that does.
    """
    if unknown := set(fp8_flags) - set(FP8_FLAGS):
        raise TypeError(f"recipe() got an unexpected keyword argument '{sorted(unknown)[0]}'")
    for site, value in (("master", master), ("sparse24", sparse24)):
        if value not in SITES[site].values:
            raise Refused(f"--{site} {value}: unknown; choose from {', '.join(SITES[site].values)}")
    flags = dict(bf16=bf16, fp16=fp16, pure_bf16=pure_bf16, stochastic=stochastic, kahan=kahan, master=master)
    _refuse_flags(**flags, opt8bit=opt8bit, opt4bit=opt4bit, fp8=fp8)
    values = {"sparse24": sparse24}
    if bf16 or fp16:
        values["compute"] = "bf16" if bf16 else "fp16"
    if pure_bf16:
        values.update(dict.fromkeys(("weights", "compute", "grads", "accumulate"), "bf16"))
        # an exact master promises fp32 AdamW bit for bit, which bf16 moments would break; --set exp_avg=bf16
        # takes them back
        values.update(dict.fromkeys(("exp_avg", "exp_avg_sq"), "bf16" if master == "none" else "fp32"))
        values.update(master=master, kahan="on" if kahan else "off")
    if stochastic:
        values["update"] = "stochastic"
    if opt8bit or opt4bit:
        values.update(dict.fromkeys(("exp_avg", "exp_avg_sq"), "int8" if opt8bit else "int4"))
    if fp8:
        values["compute"] = "fp8"
    own = {site: OF_OPTIMIZERS[site] for kind in kinds(optimizer) for site in kind.sites}
    said = _settings(sites, {**SITES, **own, **(more or {})}, optimizer)
    values.update(said)
    if values.get("compute") == "fp16":
        values.setdefault("loss_scale", "dynamic")
    summed = any(setting.startswith("accumulate=") for setting in sites)
    if values["sparse24"] == "srste" and values.get("weights") == "bf16" and not summed:
        # its decay, some 1e-4 of a weight, would be rounded away in a bf16 gradient
        values["accumulate"] = "fp32"
    values, own = _of_optimizers(values, [optimizer], said)
    more = {**own, **(more or {})}
    result = Recipe(more, _fp8_options(values.get("compute", "fp32"), fp8_flags), **values)
    for wrong, message in _refusals(result):
        if wrong:
            raise Refused(message)
    return result


def _of_optimizers(values, optimizers, said=()):
    """(values, {site: Site}): with those that the optimisers have, and without those of moments that none of
    them keeps. said: names of sites that were set one by one.
    """
    kept = [kind for name in optimizers for kind in kinds(name)]
    more = {site: OF_OPTIMIZERS[site] for kind in kept for site in kind.sites}
    values = dict(values)
    for site in [site for site in more if site not in values]:
        values[site] = _unsaid(site, values)
        if values[site] not in more[site].values:
            what = f"{LIKE[site]}={values[site]} with --optimizer {_title(optimizers[0])}"
            few = "its second moments are a number a row and a column, too few for codes"
            raise Refused(f"{what}: {few}; drop --opt8bit or --opt4bit, or --set {site}=bf16 too")
    if not all(kinds(name) for name in optimizers):  # a peer, which may keep anything
        return values, more
    moments = {moment for kind in kept for moment in kind.moments}
    for site in ("exp_avg", "exp_avg_sq"):
        if site in said and site not in moments:
            its = f"--optimizer {_title(optimizers[0])} keeps no {site}"
            raise Refused(f"--set {site}={values[site]}: {its}; its moments: {', '.join(sorted(moments))}")
        if site not in moments and site in values:
            values[site] = SITES[site].values[0]
    return values, more


def _unsaid(site, values):
    """The value of an optimiser's site where nothing is said."""
    if site in LIKE:
        return values.get(LIKE[site], "fp32")
    # as the products are; but an exact master promises the bits of fp32
    low = values.get("compute") in ("bf16", "fp8") and values.get("master", "none") == "none"
    return "bf16" if low else "fp32"


def _title(optimizer):
    return optimizer if isinstance(optimizer, str) else optimizer.__name__


def _settings(settings, known, optimizer):
    """{site: value} of "site=value" texts."""
    values = {}
    for setting in settings:
        site, _, value = setting.partition("=")
        if site in OF_OPTIMIZERS and site not in known:
            theirs = " and ".join(name for name in OPTIMIZERS if any(site in k.sites for k in kinds(name)))
            its = f"{site} is a site of --optimizer {theirs}"
            raise Refused(f"--set {setting}: {its}, and this is {_title(optimizer)}")
        if site not in known:
            raise Refused(f"--set {setting}: unknown site '{site}'; the sites are {', '.join(known)}")
        parts = value.split("+") if site == "islands" else [value]
        for part in parts:
            if part not in known[site].values:
                choices = ", ".join(known[site].values)
                choices += " (join several with +)" if site == "islands" else ""
                raise Refused(f"--set {setting}: '{part}' is no value of {site}; choose from {choices}")
        if site == "islands" and "none" in parts and len(parts) > 1:
            raise Refused(f"--set {setting}: 'none' stands alone")
        values[site] = value
    return values


def _fp8_options(compute, flags):
    given = [flag for flag, default in FP8_FLAGS.items() if flags.get(flag, default) != default]
    if compute == "fp8":
        return fp8.Options(*(flags.get(flag, default) for flag, default in FP8_FLAGS.items()))
    if given:
        says = f"--{given[0]} {flags[given[0]]} says how FP8 is run"
        raise Refused(f"{says}, and this recipe computes in {compute}: add --fp8")
    return None


def _refuse_flags(*, bf16, fp16, pure_bf16, stochastic, kahan, master, opt8bit, opt4bit, fp8):
    chosen = [f"--{name}" for name, on in (("bf16", bf16), ("fp16", fp16), ("pure_bf16", pure_bf16)) if on]
    if len(chosen) > 1:
        keeps = "--bf16 keeps fp32 weights, --pure_bf16 does not"
        raise Refused(f"{' and '.join(chosen)} exclude each other: choose one ({keeps})")
    if opt8bit and opt4bit:
        one_by_one = "set the moments one by one (--set exp_avg=int4 --set exp_avg_sq=int8)"
        raise Refused(f"--opt8bit and --opt4bit exclude each other: choose one, or {one_by_one}")
    alone = stochastic and not (opt8bit or opt4bit)
    for name, on in (("--stochastic", alone), ("--kahan", kahan), (f"--master {master}", master != "none")):
        if on and not pure_bf16:
            says = f"{name} says how bf16 weights are written"
            raise Refused(f"{says}, and these weights are fp32: add --pure_bf16")
    if fp8 and (bf16 or fp16):
        why = f"--fp8 computes what is not in FP8 in bf16; drop {chosen[0]}"
        raise Refused(f"--fp8 and {chosen[0]} exclude each other: {why}")


def _refusals(r):
    """[(whether a recipe makes no sense, what is wrong and what does)]."""
    low = r.low_weights
    flag = "fp16" if r.compute == "fp16" else "bf16"
    bf16_moments = "bf16" in [r[name] for name in r.moments]
    nothing_rounded = not (low and r.master == "none") and not bf16_moments and not r.coded
    own = [name for name in r.moments if name in r.more]
    moments = " ".join(f"--set {name}=bf16" for name in own or ("exp_avg", "exp_avg_sq"))
    instead = f"add --pure_bf16, or {moments}"
    if low:
        instead = f"the master is exact; drop --stochastic or add {moments}"
    return [
        (
            low and r.compute not in ("bf16", "fp8"),
            f"weights=bf16 with compute={r.compute}: bf16 weights are multiplied in bf16; use compute=bf16, "
            f"or --{flag} with fp32 weights",
        ),
        (
            r.loss_scale == "dynamic" and r.compute != "fp16",
            f"loss_scale=dynamic with compute={r.compute}: only fp16 needs it; drop it, or add --fp16",
        ),
        (
            r.grads != r.weights,
            f"grads={r.grads} with weights={r.weights}: autograd leaves a gradient in its weight's dtype; "
            "set accumulate=fp32 for an fp32 sum of micro-batches",
        ),
        (
            not low and r.accumulate == "bf16",
            "accumulate=bf16 with fp32 weights: their gradients are fp32 already; use accumulate=fp32, or "
            "--pure_bf16",
        ),
        (
            not low and r.master != "none",
            f"master={r.master} with fp32 weights: they are their own master; add --pure_bf16",
        ),
        (not low and r.kahan == "on", "kahan=on with fp32 weights: nothing is rounded away; add --pure_bf16"),
        (
            not low and r.islands != "none",
            f"islands={r.islands} with fp32 weights: all parameters are fp32 already; add --pure_bf16",
        ),
        (
            not low and r.buffers == "bf16",
            "buffers=bf16 with fp32 weights: buffers follow the weights; add --pure_bf16, or drop it",
        ),
        (
            r.kahan == "on" and r.master != "none",
            f"kahan=on with master={r.master}: the master is exact, there is nothing to compensate; drop one "
            "of the two",
        ),
        (
            r.update == "stochastic" and nothing_rounded,
            f"update=stochastic, but no tensor is written in bf16 or codes: {instead}",
        ),
        (
            r.sparse24 != "none" and r.compute == "fp8",
            f"sparse24={r.sparse24} with compute=fp8: the masked products are taken in bf16; drop --fp8 or "
            "--sparse24",
        ),
        (
            r.sparse24 != "none" and r.quantises,
            f"generation={r.generation} with sparse24={r.sparse24}: sparse kernels read weights in bf16; "
            "drop one of the two",
        ),
        (
            r.ema_update == "stochastic" and r.ema == "fp32",
            "ema_update=stochastic with ema=fp32: nothing is rounded; add --set ema=bf16 or drop it",
        ),
        (
            r.reduce_update == "stochastic" and r.reduce == "fp32",
            "reduce_update=stochastic with reduce=fp32: nothing is rounded; add --set reduce=bf16 or drop it",
        ),
    ]


def check_machine(r, device):
    """Warnings for what `device` only emulates. Raises Refused when it can't run the recipe at all."""
    table, kind = support(*device_facts(device)), torch.device(device).type
    level, reason = table[r.compute]
    if level == "no":
        raise Refused(f"compute={r.compute} can't run on {kind}: {reason}")
    for name in sorted(r.coded):
        flag = {"int8": "opt8bit", "int4": "opt4bit"}.get(name)
        if flag and table[flag][0] == "no":
            instead = "--pure_bf16 --stochastic saves 8 of 16 bytes without it"
            raise Refused(f"--{flag} can't run on {kind}: {table[flag][1]}; {instead}")
        FORMATS[name].require()
    return [f"compute={r.compute} is emulated here: {reason}"] if level == "emulated" else []


def parse_average(spec):
    """'0.999:bf16:stochastic' -> (0.999, 'bf16', 'stochastic'); the update is 'nearest' when left out. Raises
    Refused.
    """
    decay, _, rest = spec.partition(":")
    dtype, _, update = rest.partition(":")
    update = update or "nearest"
    try:
        good = 0 <= float(decay) < 1 and dtype in SITES["ema"].values and update in SITES["ema_update"].values
    except ValueError:
        good = False
    if not good:
        forms = "DECAY:DTYPE or DECAY:DTYPE:UPDATE, as in 0.9999:bf16 or 0.999:bf16:stochastic"
        raise Refused(f"--average {spec}: write {forms}")
    return float(decay), dtype, update
