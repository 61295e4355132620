"""What can't be had, in tables of rules, each a condition with its sentence; and what a recipe loses.

    refuse(RECIPE_RULES, r)    # raises Refused with the sentence of the first rule that holds
    lines = losses(r, ...)     # of a recipe that works

All rules of a table get one argument, the facts:

    RECIPE_RULES     Recipe        which sites go together
    NET_RULES        nn.Module     the model of a Precision
    SETTING_RULES    a run         the other arguments of a Precision; its parts have rules of their own
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
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


def refuse(rules: tuple[Rule, ...], facts: Any) -> None:
    """Raise Refused with the sentence of the first rule that holds."""
    for rule in rules:
        if rule.when(facts):
            raise Refused(rule.says(facts) if callable(rule.says) else rule.says)


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

# ---- What a recipe loses -----------------------------------------------------------------------------------


def losses(r, beta2, ema_decay, lr, weight_decay, micro_batches, optimizer) -> Iterator[str]:
    """What a Recipe that works loses, a line each. The numbers that decide it: as of Recipe.warnings."""
    peer = PEER_OPTIMIZERS.get(optimizer)
    writes = {"update": r.update, "kahan": r.kahan, "moments": r.update}
    if peer:
        writes.update(peer.writes)

    def remedy(text):
        """What keeps the loss away: a peer knows none of our ways to round."""
        return f"use --stochastic without --optimizer {optimizer}" if peer else text

    # how long a step is beside a weight, of the optimisers whose steps have the size lr: AdamW and Lion
    step_size = ""
    if not {"momentum", "row_var"} & set(r.values):
        step_size = f"a step of lr={lr:g} on a weight of 0.05 is {lr / 0.05:.2g} of it, and "

    # small updates that go into the momentum, and come back late: at 1e-4 they still come in time
    returns_late = r.low_weights and writes["update"] == "eco" and lr <= 1e-5
    if returns_late:
        yield (
            f"update=eco on bf16 weights: {step_size}steps under 2^-9..2^-8 (0.002..0.004) "
            "of a weight wait in the momentum until they add up: the lower the rate, the longer; "
            f"{remedy('at the rates of a finetuning use --stochastic instead')}"
        )
    keeps_nothing = writes["kahan"] == "off" and r.master == "none"
    small_updates = r.low_weights and writes["update"] == "nearest" and keeps_nothing
    if small_updates:
        yield (
            f"update=nearest on bf16 weights: {step_size}steps under 2^-9..2^-8 "
            f"(0.002..0.004) of a weight vanish; {remedy('add --stochastic, --kahan or --master split')}"
        )
    decays_to_nearest = r.low_weights and writes.get("decay") == "nearest"
    if weight_decay and (small_updates or decays_to_nearest):
        yield (
            f"weight decay moves a weight by lr*wd = {lr * weight_decay:.2g} of itself, "
            f"below half an ulp (0.002): alone it is always lost in bf16; {remedy('--stochastic keeps it')}"
        )

    yield from _losses_of_moments(r, beta2, writes["moments"] == "nearest", remedy)
    yield from _losses_of_an_average(r, ema_decay)
    if r.compute == "fp16" and r.loss_scale == "none":
        yield (
            "loss_scale=none with fp16: gradients below 6e-8 become 0 and above 65504 infinite; use --set "
            "loss_scale=dynamic (default)"
        )
    if r.low_weights and r.accumulate == "bf16" and micro_batches > 1:
        yield (
            f"accumulate=bf16 over {micro_batches} micro-batches: relative error near "
            f"{2**-9 * math.sqrt(micro_batches / 3):.2%} of the gradient; --set accumulate=fp32 costs "
            "4 bytes a parameter"
        )


def _losses_of_moments(r, beta2, nearest, remedy):
    """As `losses`, of second moments. nearest: whether moments are rounded so."""
    if r.exp_avg_sq == "bf16" and nearest and 1 - beta2 < 2**-8:
        yield (
            f"exp_avg_sq=bf16, nearest: decaying by 1-beta2 = {1 - beta2:.2g} is under half an "
            "ulp (2^-9..2^-8), so v can grow and never shrink; "
            f"{remedy('use --stochastic, --set exp_avg_sq=fp32 or beta2 <= 0.99')}"
        )
    form = FORMATS.get(r.exp_avg_sq, Format())  # of floats one that loses nothing
    if form.gap and nearest:
        yield (
            f"exp_avg_sq={form.name}, nearest: a decay by 1-beta2 = {1 - beta2:.2g} "
            f"under half a gap between codes ({form.gap} of the value) is lost: where some gradients of a "
            f"block drop, their v stays too high and their steps too short; {remedy('add --stochastic')}"
        )
    if form.lowest > 0.01:
        yield (
            f"exp_avg_sq={form.name}: no code lies below {form.lowest:g} of the "
            f"largest in a block, so entries whose gradients are below {form.lowest**0.5:g} of its "
            "largest take steps too short; --set exp_avg_sq=log4 (as many bits) or int8 reaches further down"
        )
    factors = [name for name in ("row_var", "col_var") if r.values.get(name) == "bf16"]
    if factors and nearest:
        yield (
            f"{' and '.join(factors)} in bf16, nearest: at step t they move by t^-0.8 of a "
            "difference, from step 1,000 on under half an ulp (2^-8), so they stand still; use --stochastic "
            "or --set row_var=fp32 --set col_var=fp32"
        )


def _losses_of_an_average(r, ema_decay):
    """As `losses`."""
    # it moves by less than half an ulp of bf16 where it is near the weights
    slow_average = r.ema == "bf16" and 1 - ema_decay < 2**-7
    if slow_average and r.ema_update == "nearest":
        yield (
            f"ema=bf16, nearest: an entry moves only while |w-ema| > "
            f"{2**-9 / (1 - ema_decay):.2g} |ema| (half an ulp over 1-decay): the average freezes far from "
            "the weights; use --set ema=fp32 (default) or ema_update=stochastic"
        )
    if slow_average and r.ema_update == "stochastic":
        # each write adds up to an ulp, which decays at rate 1-decay only: relative noise settles near
        # ulp * sqrt(1/12 .. 1/4) / sqrt(2 (1-decay)), of which this is the worst
        noise = 0.4 * 2**-8 / math.sqrt(2 * (1 - ema_decay))
        yield (
            f"ema=bf16, stochastic: unbiased, but rounding noise of an entry settles near "
            f"{noise:.1%} of its value; --set ema=fp32 (default) has none"
        )
