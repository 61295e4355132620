"""What can't be had, and what a recipe loses: tables of rules, each a condition with its sentence.

    refuse(RECIPE_RULES, r)                # raises Refused with the sentence of the first rule that holds
    lines = sentences(LOSS_RULES, losses)  # of all rules that hold

All rules of a table get one argument, the facts:

    RECIPE_RULES     Recipe        which sites go together
    NET_RULES        nn.Module     the model of a Precision
    SETTING_RULES    a run         the other arguments of a Precision; its parts have rules of their own
    LOSS_RULES       LossFacts     what a recipe that works loses
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .errors import Refused
from .formats import FORMATS, Format
from .machine import device_facts, support
from .optimizers.groups import LAZY_LAYER, REMEDY_FOR_DTYPE
from .optimizers.peers import PEER_OPTIMIZERS
from .rounding import ALONE
from .sites import BLOCKS_OF_GENERATION, LOW_PRODUCTS

EXACT_MASTERS = "split", "fp32"  # masters that are fp32, bit for bit
PARALLEL_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


@dataclasses.dataclass(frozen=True)
class Rule:
    """when: facts -> whether the rule holds. says: its sentence, or facts -> the sentence."""

    when: Callable[[Any], Any]
    says: str | Callable[[Any], str]

    def sentence(self, facts: Any) -> str:
        """What the rule says of these facts."""
        return self.says(facts) if callable(self.says) else self.says


def refuse(rules: tuple[Rule, ...], facts: Any) -> None:
    """Raise Refused with the sentence of the first rule that holds."""
    for rule in rules:
        if rule.when(facts):
            raise Refused(rule.sentence(facts))


def sentences(rules: tuple[Rule, ...], facts: Any) -> list[str]:
    """The sentences of all rules that hold, in the order of the table."""
    return [rule.sentence(facts) for rule in rules if rule.when(facts)]


# ---- Flags -------------------------------------------------------------------------------------------------


# flags of which a recipe takes one at most, with what tells them apart
EXCLUSIVE_FLAGS = (
    (("bf16", "fp16", "pure_bf16"), "--bf16 keeps fp32 weights, --pure_bf16 does not"),
    (("fp4", "fp8", "bf16", "fp16"), "beside products in 4 or 8 bits all else is computed in bf16"),
    (("opt8bit", "opt4bit"), "or set the moments one by one, --set exp_avg=int4 --set exp_avg_sq=int8"),
)


def refuse_exclusive(flags: dict[str, Any]) -> None:
    """Raise Refused for two of EXCLUSIVE_FLAGS at once. flags: {flag of recipe(): value}."""
    for names, what_tells in EXCLUSIVE_FLAGS:
        given = [f"--{name}" for name in names if flags[name] not in (False, "none")]
        if len(given) > 1:
            raise Refused(f"{' and '.join(given)} exclude each other: choose one ({what_tells})")


# ---- Recipes -----------------------------------------------------------------------------------------------


def _rounds_nothing(r):
    """Whether a recipe writes neither weights nor moments in bf16 or in codes."""
    low_written = r.low_weights and torch.bfloat16 in r.way.loses
    bf16_moments = "bf16" in [r[name] for name in r.moments]
    return not (low_written or bf16_moments or r.coded)


def _of_low_weights(r):
    """Settings of a recipe that are for bf16 weights: ["site=value"]."""
    of_low = {"accumulate": "bf16", "buffers": "bf16"}
    said = [f"{site}={value}" for site, value in of_low.items() if r[site] == value]
    if r.way is not ALONE:
        said.append(f"{r.way.site}={r[r.way.site]}")
    if r.islands != "none":
        said.append(f"islands={r.islands}")
    return said


def _takers_of_layers(r):
    """What a recipe does to the linear layers, of which it can do one thing: ["site=value"]."""
    takes = {
        "frozen": r.frozen == "nf4",
        "compute": r.compute in LOW_PRODUCTS,
        "sparse24": r.sparse24 != "none",
    }
    return [f"{site}={r[site]}" for site in takes if takes[site]]


def _rounds_into(site):
    """A Rule: a site that is rounded stochastically is not held in fp32."""
    return Rule(
        lambda r: r[f"{site}_update"] == "stochastic" and r[site] == "fp32",
        f"{site}_update=stochastic with {site}=fp32: nothing is rounded; add --set {site}=bf16 or drop it",
    )


def _something_to_round(r):
    """What gives stochastic rounding something to do."""
    of_its_optimizer = [name for name in r.moments if name in r.more]
    moments = " ".join(f"--set {name}=bf16" for name in of_its_optimizer or ("exp_avg", "exp_avg_sq"))
    if r.low_weights:
        return f"the master is exact; drop --stochastic or add {moments}"
    return f"add --pure_bf16, or {moments}"


RECIPE_RULES = (
    Rule(
        lambda r: r.low_weights and r.compute not in ("bf16", *LOW_PRODUCTS),
        lambda r: f"weights=bf16 with compute={r.compute}: bf16 weights are multiplied in bf16; "
        f"use compute=bf16, or {'--fp16' if r.compute == 'fp16' else '--bf16'} with fp32 weights",
    ),
    Rule(
        lambda r: r.loss_scale == "dynamic" and r.compute != "fp16",
        lambda r: f"loss_scale=dynamic with compute={r.compute}: only fp16 needs it; drop it, or add --fp16",
    ),
    Rule(
        lambda r: r.grads != r.weights,
        lambda r: f"grads={r.grads} with weights={r.weights}: autograd leaves a gradient in its weight's "
        "dtype; set accumulate=fp32 for an fp32 sum of micro-batches",
    ),
    Rule(
        lambda r: not r.low_weights and _of_low_weights(r),
        lambda r: f"{_of_low_weights(r)[0]} with fp32 weights: they, their gradients and their buffers are "
        "fp32 already; add --pure_bf16, or drop it",
    ),
    Rule(
        lambda r: r.update == "stochastic" and _rounds_nothing(r),
        lambda r: "--stochastic (update=stochastic), but no tensor is written in bf16 or codes: "
        f"{_something_to_round(r)}",
    ),
    Rule(
        lambda r: len(_takers_of_layers(r)) > 1,
        lambda r: f"{' with '.join(_takers_of_layers(r))}: each would take the linear layers; drop one",
    ),
    Rule(
        lambda r: r.sparse24 != "none" and r.quantises,
        lambda r: f"generation={r.generation} with sparse24={r.sparse24}: sparse kernels read weights in "
        "bf16; drop one of the two",
    ),
    Rule(
        lambda r: r.generation_rounding == "gptq" and r.generation not in ("int8", *BLOCKS_OF_GENERATION),
        lambda r: f"generation_rounding=gptq with generation={r.generation}: it rounds a finished net's "
        "weights to int8 or to blocks; add --set generation=int8, or nvfp4_weights",
    ),
    _rounds_into("ema"),
    _rounds_into("reduce"),
)

# ---- Machines ----------------------------------------------------------------------------------------------


SMALL_WITHOUT_CODES = "; --pure_bf16 --stochastic saves 8 of 16 bytes without it"


def check_machine(r, device: torch.device | str) -> list[str]:
    """What `device` only emulates of Recipe r: a line each. Raises Refused where it can't run the recipe, or
    where a package for its moments is absent.
    """
    here = support(*device_facts(device))
    level, reason = here[r.compute]
    needed = [(f"compute={r.compute}", level, reason)]
    formats = [FORMATS[name] for name in sorted(r.coded)]
    for flag in [form.flag for form in formats if form.flag]:
        needed.append((f"--{flag}", here[flag][0], here[flag][1] + SMALL_WITHOUT_CODES))
    for what, its_level, why in needed:
        if its_level == "no":
            raise Refused(f"{what} can't run on {torch.device(device).type}: {why}")
    for form in formats:
        form.require()
    return [f"compute={r.compute} is emulated here: {reason}"] if level == "emulated" else []


# ---- Runs --------------------------------------------------------------------------------------------------

NET_RULES = (
    Rule(
        lambda net: isinstance(net, PARALLEL_WRAPPERS),
        lambda net: f"the model is a {type(net).__name__}: give the net in it, then "
        f"run.forward = {type(net).__name__}(run.model)",
    ),
    Rule(
        lambda net: not any(p.requires_grad for p in net.parameters()),
        "no parameter has requires_grad=True: there is nothing to train",
    ),
    Rule(lambda net: any(map(is_lazy, net.parameters())), LAZY_LAYER),
    Rule(
        lambda net: any(p.is_complex() and p.requires_grad for p in net.parameters()),
        f"the model trains complex parameters: {REMEDY_FOR_DTYPE[torch.complex64]}",
    ),
)


def _at_least(name, least):
    """A Rule of the setting `name`; NaN is refused too."""
    return Rule(
        lambda run: not getattr(run.options, name) >= least,
        lambda run: f"{name}={getattr(run.options, name)}: it must be {least} or more",
    )


SETTING_RULES = (
    _at_least("clip_grad", 0),
    _at_least("clip_tensor", 0),
    _at_least("accumulate", 1),
    Rule(
        lambda run: run.options.clip_grad and run.options.clip_tensor,
        "--clip_grad and --clip_tensor exclude each other: set one of them to 0",
    ),
)

# gradients that come all at once, or are to be summed, come too late for an update within backward
RELEASE_ALONE_RULES = (
    Rule(
        lambda run: run.compiled,
        "the backward pass of a compiled net gives all gradients at once, so --grad_release would free none "
        "early: drop it, or --compile",
    ),
    Rule(
        lambda run: run.processes > 1,
        "--grad_release updates before several processes have summed their gradients: use one process, or "
        "drop it",
    ),
)


def check_alone(forward: Callable | None = None, processes: int = 1) -> None:
    """Raise Refused where gradients come too late to be released. forward: what calls the net, if that is not
    the net itself.
    """
    if isinstance(forward, PARALLEL_WRAPPERS[0]):
        processes = 2
    compiled = hasattr(forward, "_orig_mod")  # torch.compile made it of a module
    refuse(RELEASE_ALONE_RULES, types.SimpleNamespace(compiled=compiled, processes=processes))


# ---- What a recipe loses -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LossFacts:
    """A recipe and the numbers that decide what it loses; optimizer: its name, or its class."""

    recipe: Any
    beta2: float
    ema_decay: float
    lr: float
    weight_decay: float
    micro_batches: int
    optimizer: Any

    @property
    def peer(self) -> Any:
        """What is known of an optimiser by other people; None for others."""
        return PEER_OPTIMIZERS.get(self.optimizer)

    def remedy(self, text: str) -> str:
        """What keeps the loss away: a peer knows none of our ways to round."""
        if self.peer:
            return f"use --stochastic without --optimizer {self.optimizer}"
        return text

    @functools.cached_property
    def writes(self) -> dict[str, str]:
        """How the optimiser writes weights, moments and decay."""
        r = self.recipe
        own = {"update": r.update, "kahan": r.kahan, "moments": r.update}
        return {**own, **self.peer.writes} if self.peer else own

    @property
    def nearest_moments(self) -> bool:
        """Whether moments are rounded to nearest."""
        return self.writes["moments"] == "nearest"

    @property
    def format(self) -> Format:
        """Of the codes of second moments; of floats one that loses nothing."""
        return FORMATS.get(self.recipe.exp_avg_sq, Format())

    @property
    def small_updates(self) -> bool:
        """Whether updates of bf16 weights under half an ulp are lost."""
        keeps_nothing = self.writes["kahan"] == "off" and self.recipe.master == "none"
        return self.recipe.low_weights and self.writes["update"] == "nearest" and keeps_nothing

    @property
    def returns_late(self) -> bool:
        """Whether such updates go into the momentum, and come back late: at 1e-4 they still come in time."""
        return self.recipe.low_weights and self.writes["update"] == "eco" and self.lr <= 1e-5

    @property
    def decay(self) -> bool:
        """Whether weight decay, taken by itself, is lost."""
        decays_to_nearest = self.recipe.low_weights and self.writes.get("decay") == "nearest"
        return bool(self.weight_decay) and (self.small_updates or decays_to_nearest)

    @property
    def step_size(self) -> str:
        """How long a step is beside a weight, of the optimisers whose steps have the size lr: AdamW and Lion.
        """
        if {"momentum", "row_var"} & set(self.recipe.values):
            return ""
        return f"a step of lr={self.lr:g} on a weight of 0.05 is {self.lr / 0.05:.2g} of it, and "

    @property
    def factors(self) -> list[str]:
        """Second moments by row and column that are held in bf16."""
        return [name for name in ("row_var", "col_var") if self.recipe.values.get(name) == "bf16"]

    @property
    def slow_average(self) -> bool:
        """Whether the average moves by less than half an ulp of bf16 where it is near the weights."""
        return self.recipe.ema == "bf16" and 1 - self.ema_decay < 2**-7

    @property
    def average_noise(self) -> float:
        """Relative noise of a bf16 average that is rounded stochastically.

        Each write adds up to an ulp, which decays at rate 1-decay only: it settles near ulp * sqrt(1/12 ..
        1/4) / sqrt(2 (1-decay)), of which this is the worst.
        """
        return 0.4 * 2**-8 / math.sqrt(2 * (1 - self.ema_decay))


LOSS_RULES = (
    Rule(
        lambda lost: lost.returns_late,
        lambda lost: f"update=eco on bf16 weights: {lost.step_size}steps under 2^-9..2^-8 (0.002..0.004) "
        "of a weight wait in the momentum until they add up: the lower the rate, the longer; "
        f"{lost.remedy('at the rates of a finetuning use --stochastic instead')}",
    ),
    Rule(
        lambda lost: lost.small_updates,
        lambda lost: f"update=nearest on bf16 weights: {lost.step_size}steps under 2^-9..2^-8 "
        f"(0.002..0.004) of a weight vanish; {lost.remedy('add --stochastic, --kahan or --master split')}",
    ),
    Rule(
        lambda lost: lost.decay,
        lambda lost: f"weight decay moves a weight by lr*wd = {lost.lr * lost.weight_decay:.2g} of itself, "
        f"below half an ulp (0.002): alone it is always lost in bf16; {lost.remedy('--stochastic keeps it')}",
    ),
    Rule(
        lambda lost: lost.recipe.exp_avg_sq == "bf16" and lost.nearest_moments and 1 - lost.beta2 < 2**-8,
        lambda lost: f"exp_avg_sq=bf16, nearest: decaying by 1-beta2 = {1 - lost.beta2:.2g} is under half an "
        "ulp (2^-9..2^-8), so v can grow and never shrink; "
        f"{lost.remedy('use --stochastic, --set exp_avg_sq=fp32 or beta2 <= 0.99')}",
    ),
    Rule(
        lambda lost: lost.format.gap and lost.nearest_moments,
        lambda lost: f"exp_avg_sq={lost.format.name}, nearest: a decay by 1-beta2 = {1 - lost.beta2:.2g} "
        f"under half a gap between codes ({lost.format.gap} of the value) is lost: where some gradients of a "
        f"block drop, their v stays too high and their steps too short; {lost.remedy('add --stochastic')}",
    ),
    Rule(
        lambda lost: lost.format.lowest > 0.01,
        lambda lost: f"exp_avg_sq={lost.format.name}: no code lies below {lost.format.lowest:g} of the "
        f"largest in a block, so entries whose gradients are below {lost.format.lowest**0.5:g} of its "
        "largest take steps too short; --set exp_avg_sq=log4 (as many bits) or int8 reaches further down",
    ),
    Rule(
        lambda lost: lost.factors and lost.nearest_moments,
        lambda lost: f"{' and '.join(lost.factors)} in bf16, nearest: at step t they move by t^-0.8 of a "
        "difference, from step 1,000 on under half an ulp (2^-8), so they stand still; use --stochastic or "
        "--set row_var=fp32 --set col_var=fp32",
    ),
    Rule(
        lambda lost: lost.slow_average and lost.recipe.ema_update == "nearest",
        lambda lost: f"ema=bf16, nearest: an entry moves only while |w-ema| > "
        f"{2**-9 / (1 - lost.ema_decay):.2g} |ema| (half an ulp over 1-decay): the average freezes far from "
        "the weights; use --set ema=fp32 (default) or ema_update=stochastic",
    ),
    Rule(
        lambda lost: lost.slow_average and lost.recipe.ema_update == "stochastic",
        lambda lost: f"ema=bf16, stochastic: unbiased, but rounding noise of an entry settles near "
        f"{lost.average_noise:.1%} of its value; --set ema=fp32 (default) has none",
    ),
    Rule(
        lambda lost: lost.recipe.compute == "fp16" and lost.recipe.loss_scale == "none",
        "loss_scale=none with fp16: gradients below 6e-8 become 0 and above 65504 infinite; use --set "
        "loss_scale=dynamic (default)",
    ),
    Rule(
        lambda lost: lost.recipe.low_weights and lost.recipe.accumulate == "bf16" and lost.micro_batches > 1,
        lambda lost: f"accumulate=bf16 over {lost.micro_batches} micro-batches: relative error near "
        f"{2**-9 * math.sqrt(lost.micro_batches / 3):.2%} of the gradient; --set accumulate=fp32 costs "
        "4 bytes a parameter",
    ),
)
