"""Recipes: for each kind of tensor of a run where it lives and how it is rounded, and the flags that compose
them.

    r = recipe(pure_bf16=True, stochastic=True, sites=["ema=bf16"])
    r.weights, r.update, r.dtype("ema")                     # 'bf16', 'stochastic', torch.bfloat16
    r.warnings(lr=1e-4)                                     # what the recipe loses, with the arithmetic

sites.py lists the kinds of tensor ("sites"), rules.py what is refused and warned of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import rules
from .errors import Refused, check_choice, check_several
from .optimizers.build import OPTIMIZERS, classes_of
from .rounding import DTYPE_OF_NAME, WAY_OF_MASTER, Way, chosen_way
from .rules import check_machine
from .sites import BLOCKS_OF_GENERATION, CODE_FORMATS, LOW_PRODUCTS, SITES, Site

__all__ = ["MOMENTS", "OF_OPTIMIZERS", "SITES", "Recipe", "Site", "check_machine", "parse_average", "recipe"]


def sites_of(*optimizers) -> dict[str, Site]:
    """{name: Site} of what these optimisers, names or classes, have beside SITES."""
    found = {}
    for optimizer in optimizers:
        for kind in classes_of(optimizer):
            found.update(kind.sites)
    return found


OF_OPTIMIZERS = sites_of(*OPTIMIZERS)


def _moments_among(sites):
    """Names of moments: those of AdamW, and those that follow one of these."""
    return tuple(name for name, site in sites.items() if {name, site.follows} & {"exp_avg", "exp_avg_sq"})


MOMENTS = _moments_among({**SITES, **OF_OPTIMIZERS})

# ---- Recipes -----------------------------------------------------------------------------------------------


class Recipe:
    """A value for each site, read as an attribute: `r.weights`. The defaults are fp32 everywhere.

    Build one with `recipe(...)`, which applies presets, the user's single sites, and the refusals. A recipe
    is a value: `==`, hash and `replace`. more: {name: Site} of the sites that belong to a task or an
    optimiser. fp8: an `fp8.Options` when compute is fp8; fp4: an `FP4Options` when it is fp4. Raises
    TypeError for an unknown site, Refused for two ways of writing a weight that exclude each other.
    """

    def __init__(
        self, more: Mapping[str, Site] | None = None, fp8: Any = None, fp4: Any = None, **values: str
    ):
        self.more = dict(more or {})
        self.fp8 = fp8
        self.fp4 = fp4
        self.values = {name: site.values[0] for name, site in self.sites.items()}
        unknown = set(values) - set(self.values)
        if unknown:
            raise TypeError(f"Recipe() got an unexpected keyword argument '{min(unknown)}'")
        self.values.update(values)
        vars(self).update(self.values)
        self.low_weights = self.values["weights"] == "bf16"  # whether the weights are bf16
        # whether products read 16 bits a number, or fewer
        self.narrow_products = self.values["compute"] not in ("fp32", "tf32")
        # whether a step runs in torch's autocast: such products of fp32 weights
        self.autocasts = self.narrow_products and not self.low_weights
        # whether samples are drawn in 8 or 4 bits from a net that was not trained so
        drawn_in = self.values["generation"]
        self.quantises = drawn_in in ("int8", *BLOCKS_OF_GENERATION) or (drawn_in == "fp8" and not fp8)
        self.weight_dtypes = {DTYPE_OF_NAME[self.values["weights"]], torch.float32}  # of trained ones
        # how bf16 weights are written
        self.way: Way = chosen_way(self["update"], self["kahan"] == "on", self["master"])

    @property
    def sites(self) -> dict[str, Site]:
        """{name: Site} of all its sites, in the order of the ledger."""
        return {**SITES, **self.more}

    def __getattr__(self, name: str) -> str:
        raise AttributeError(f"a recipe has no site '{name}'")

    def __getitem__(self, site: str) -> str:
        return self.values[site]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash((frozenset(self.values.items()), self.fp8, self.fp4))

    def _all(self):
        return self.values, self.fp8, self.fp4

    def __repr__(self) -> str:
        changed = [f"{k}={v!r}" for k, v in self.values.items() if v != self.sites[k].values[0]]
        return f"Recipe({', '.join(changed)})"

    def replace(self, **values: str) -> Recipe:
        """The recipe with some sites changed. Raises TypeError for an unknown site."""
        return Recipe(self.more, self.fp8, self.fp4, **{**self.values, **values})

    def dtype(self, site: str) -> torch.dtype:
        """torch dtype of a site that holds fp32, bf16 or fp16; of compute=fp8 and fp4 what computes beside
        their layers.
        """
        value = self.values[site]
        return DTYPE_OF_NAME["bf16" if value in LOW_PRODUCTS else value]

    def on(self, device: torch.device | str) -> Recipe:
        """The recipe with what depends on the machine settled: which backend runs FP8 or FP4. Raises Refused
        when none can.
        """
        device = torch.device(device)
        options = [each and each.resolve(device) for each in (self.fp8, self.fp4)]
        return Recipe(self.more, *options, **self.values) if any(options) else self

    @property
    def moments(self) -> list[str]:
        """The sites of an optimiser's moments."""
        return [name for name in _moments_among(self.sites) if name in self.values]

    @property
    def coded(self) -> set[str]:
        """The formats of codes that moments are held in: a subset of formats.FORMATS."""
        return {self[name] for name in self.moments} & set(CODE_FORMATS)

    def keeping(self, *optimizers) -> Recipe:
        """The recipe with the sites of these optimisers, names or classes. Raises Refused for a moment that
        one of them can't hold so.
        """
        values = _values_for(optimizers, self.values)
        if values == self.values:
            return self
        return Recipe({**sites_of(*optimizers), **self.more}, self.fp8, self.fp4, **values)

    @property
    def generation_dtype(self) -> torch.dtype:
        """torch dtype of the weights that generation reads."""
        reads_bf16 = self.generation == "bf16" or (self.low_weights and self.generation == "compute")
        return torch.bfloat16 if reads_bf16 else torch.float32

    def warnings(
        self,
        *,
        beta2: float = 0.999,
        ema_decay: float = 0.999,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        micro_batches: int = 1,
        optimizer: Any = "adamw",
    ) -> list[str]:
        """What a recipe that runs loses: one line each, with the arithmetic. [] for a healthy recipe.
        optimizer: its name; one of `peers.PEER_OPTIMIZERS` writes in its own way.
        """
        found = list(rules.losses(self, beta2, ema_decay, lr, weight_decay, micro_batches, optimizer))
        for name, site in self.sites.items():
            if self[name] in site.warn:
                found.append(site.warn[self[name]])
        return found


# ---- Flags -------------------------------------------------------------------------------------------------

BF16_MOMENTS = dict(exp_avg="bf16", exp_avg_sq="bf16")
# an exact master promises fp32 AdamW bit for bit, which bf16 moments would break; --set exp_avg=bf16 takes
# them back
FP32_MOMENTS = dict(exp_avg="fp32", exp_avg_sq="fp32")


def _moments_beside(way):
    """{moment: value}: fp32 beside a master that loses nothing."""
    return BF16_MOMENTS if torch.bfloat16 in way.loses else FP32_MOMENTS


LOW = dict(weights="bf16", compute="bf16", grads="bf16", accumulate="bf16")
# flag of recipe(): its value -> {site: value} that it sets; a flag further down has the last word
FLAGS: dict[str, Callable[[Any], dict[str, str]]] = {
    "bf16": lambda on: dict(compute="bf16"),
    "fp16": lambda on: dict(compute="fp16"),
    "pure_bf16": lambda on: {**LOW, **BF16_MOMENTS},
    "master": lambda kind: {"master": kind, **_moments_beside(WAY_OF_MASTER[kind])},
    "kahan": lambda on: dict(kahan="on"),
    "stochastic": lambda on: dict(update="stochastic"),
    "opt8bit": lambda on: dict(exp_avg="int8", exp_avg_sq="int8"),
    "opt4bit": lambda on: dict(exp_avg="int4", exp_avg_sq="int4"),
    "fp8": lambda on: dict(compute="fp8"),
    "fp4": lambda kind: dict(compute="fp4"),
    "sparse24": lambda kind: dict(sparse24=kind),
}


def recipe(
    *,
    bf16: bool = False,
    fp16: bool = False,
    pure_bf16: bool = False,
    stochastic: bool = False,
    kahan: bool = False,
    master: str = "none",
    opt8bit: bool = False,
    opt4bit: bool = False,
    fp8: bool = False,
    fp4: str = "none",
    sparse24: str = "none",
    sites: Iterable[str] = (),
    more: Mapping[str, Site] | None = None,
    optimizer: Any = "adamw",
    **flags_of_products: Any,
) -> Recipe:
    """The recipe that a set of flags composes.

    sites: single settings ("ema=bf16"), applied after the flags. more: {name: Site} of a task. optimizer: its
    name or class, whose sites the recipe has. flags_of_products: `flags` of fp8_backends.Options and of
    fp4.FP4Options. Raises Refused for an unknown site or value and for combinations that make no sense,
    naming the nearest that does; TypeError for an unknown flag.
    """
    flags = {flag: value for flag, value in locals().items() if flag in FLAGS}
    check_several("sites", sites)
    check_choice("master", master, SITES["master"].values)
    check_choice("sparse24", sparse24, SITES["sparse24"].values)
    rules.refuse_exclusive(flags)
    values = {}
    for flag, sites_of_flag in FLAGS.items():
        if flags[flag] not in (False, "none"):
            values.update(sites_of_flag(flags[flag]))
    task_sites = dict(more or {})
    sites = list(sites)
    chosen = _sites_of_settings(sites, {**SITES, **sites_of(optimizer), **task_sites}, optimizer)
    values.update(chosen)
    if values.get("compute") == "fp16":
        values.setdefault("loss_scale", "dynamic")
    decays = values.get("sparse24") == "srste" and values.get("weights") == "bf16"
    if decays and "accumulate" not in chosen:
        values["accumulate"] = "fp32"  # the decay, some 1e-4 of a weight, would be rounded away in bf16
    values = _values_for([optimizer], values, chosen)
    compute = values.get("compute", "fp32")
    options = {}
    if flags_of_products or compute in LOW_PRODUCTS:
        options = _options_of_products(compute, flags.get(compute), flags_of_products)
    result = Recipe({**sites_of(optimizer), **task_sites}, **options, **values)
    rules.refuse(rules.RECIPE_RULES, result)
    return result


def _sites_of_settings(settings, known, optimizer):
    """{site: value} of "site=value" texts. known: {name: Site}."""
    values = {}
    for setting in settings:
        site, _, value = setting.partition("=")
        if site not in known:
            owners = [name for name in OPTIMIZERS if site in sites_of(name)]
            wrong = f"unknown site '{site}'; the sites are {', '.join(known)}"
            if owners:
                wrong = f"{site} is a site of --optimizer {' and '.join(owners)}"
                wrong += f", and this is {_title(optimizer)}"
            raise Refused(f"--set {setting}: {wrong}")
        choices = known[site].values
        joins_values = site == "islands"
        parts = value.split("+") if joins_values else [value]
        if not set(parts) <= set(choices) or ("none" in parts and len(parts) > 1):
            hint = " (join several with +, but none stands alone)" if joins_values else ""
            raise Refused(
                f"--set {setting}: {value!r} is no value of {site}; choose from {', '.join(choices)}{hint}"
            )
        values[site] = value
    return values


def _options_of_products(compute, asked, flags):
    """{compute: how its products are taken}, {} for those of 16 and 32 bits. asked: the flag that asks for
    `compute`. Raises Refused for flags of products in FP8 or FP4 where they are not taken so, TypeError for
    unknown ones.
    """
    kinds = {}
    for name, (module, kind) in LOW_PRODUCTS.items():
        kinds[name] = getattr(importlib.import_module(f".{module}", __package__), kind)
    unknown = set(flags).difference(*[kind.flags for kind in kinds.values()])
    if unknown:
        raise TypeError(f"recipe() got an unexpected keyword argument '{min(unknown)}'")
    for name, kind in kinds.items():
        for flag, field in kind.flags.items():
            if name != compute and flags.get(flag, getattr(kind, field)) != getattr(kind, field):
                remedy = "drop it" if compute in LOW_PRODUCTS else f"add --{kind.asked_by}"
                raise Refused(
                    f"--{flag} {flags[flag]} says how {name.upper()} is run, and this recipe computes in "
                    f"{compute}: {remedy}"
                )
    if compute not in kinds:
        return {}
    kind = kinds[compute]
    own = {kind.flags[flag]: value for flag, value in flags.items() if flag in kind.flags}
    return {compute: kind.of(asked, **own)}


# ---- Sites of optimisers -----------------------------------------------------------------------------------


def _values_for(optimizers, values, chosen=()):
    """{site: value} with the sites that the optimisers have, and the defaults of those moments of AdamW that
    none of them keeps. Raises Refused for a value that one can't have, and where a moment that none keeps is
    among the `chosen` sites.
    """
    values = dict(values)
    kept = set()
    classes = {optimizer: classes_of(optimizer) for optimizer in optimizers}
    for optimizer, kinds in classes.items():
        for kind in kinds:
            kept.update(kind.moments)
            for name, site in kind.sites.items():
                if name in values:
                    continue
                values[name] = _unset(site, values)
                if values[name] not in site.values:
                    raise Refused(
                        f"{site.follows}={values[name]} with --optimizer {_title(optimizer)}: its second "
                        "moments are a number a row and a column, too few for codes; drop --opt8bit or "
                        f"--opt4bit, or --set {name}=bf16 too"
                    )
    if not all(classes.values()):  # other people's may keep anything
        return values
    for site in ("exp_avg", "exp_avg_sq"):
        if site in kept:
            continue
        if site in chosen:
            raise Refused(
                f"--set {site}={values[site]}: --optimizer {' and '.join(map(_title, classes))} keeps no "
                f"{site}; its moments: {', '.join(sorted(kept))}"
            )
        if site in values:
            values[site] = SITES[site].values[0]
    return values


def _unset(site, values):
    """The value of an optimiser's site where nothing is said."""
    if not site.follows:
        return site.values[0]
    if site.follows != "compute":
        return values.get(site.follows, "fp32")
    # an exact master promises the bits of fp32
    exact = values.get("master") in rules.EXACT_MASTERS
    return "bf16" if values.get("compute") in ("bf16", *LOW_PRODUCTS) and not exact else "fp32"


def _title(optimizer):
    return optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", str(optimizer))


# ---- Averages ----------------------------------------------------------------------------------------------


def parse_average(spec: str) -> tuple[float, str, str]:
    """'0.999:bf16:stochastic' -> (0.999, 'bf16', 'stochastic'); the update is 'nearest' when left out. Raises
    Refused.
    """
    decay, _, rest = spec.partition(":")
    dtype, _, update = rest.partition(":")
    update = update or "nearest"
    known = dtype in SITES["ema"].values and update in SITES["ema_update"].values
    try:
        good = known and 0 <= float(decay) < 1
    except ValueError:
        good = False
    if not good:
        forms = "DECAY:DTYPE or DECAY:DTYPE:UPDATE, as in 0.9999:bf16 or 0.999:bf16:stochastic"
        raise Refused(f"--average {spec}: write {forms}")
    return float(decay), dtype, update
