"""recipes.py: what flags compose, refuse and warn of."""

import functools
import itertools

import pytest
import torch
from common import BF16, refused

from lowprec.errors import Refused
from lowprec.recipes import SITES, Recipe, Site, parse_average, recipe

# ---- Flags -------------------------------------------------------------------------------------------------

LOW = dict.fromkeys(("weights", "compute", "grads", "accumulate"), "bf16")
PURE = LOW | dict(exp_avg="bf16", exp_avg_sq="bf16")
COMPOSED = [  # flags -> the sites that differ from fp32 everywhere
    ({}, {}),
    (dict(bf16=True), dict(compute="bf16")),
    (dict(fp16=True), dict(compute="fp16", loss_scale="dynamic")),
    (dict(fp16=True, sites=["loss_scale=none"]), dict(compute="fp16")),
    (dict(sites=["compute=fp16"]), dict(compute="fp16", loss_scale="dynamic")),
    (dict(pure_bf16=True), PURE),
    (dict(pure_bf16=True, stochastic=True), PURE | dict(update="stochastic")),
    (dict(pure_bf16=True, kahan=True), PURE | dict(kahan="on")),
    (dict(pure_bf16=True, kahan=True, stochastic=True), PURE | dict(kahan="on", update="stochastic")),
    (dict(pure_bf16=True, master="split"), PURE | dict(master="split", exp_avg="fp32", exp_avg_sq="fp32")),
    (dict(pure_bf16=True, master="fp32"), PURE | dict(master="fp32", exp_avg="fp32", exp_avg_sq="fp32")),
    (dict(opt8bit=True), dict(exp_avg="int8", exp_avg_sq="int8")),
    (dict(pure_bf16=True, opt8bit=True), PURE | dict(exp_avg="int8", exp_avg_sq="int8")),
    (dict(opt4bit=True), dict(exp_avg="int4", exp_avg_sq="int4")),
    (dict(sites=["exp_avg=flash8"], stochastic=True), dict(exp_avg="flash8", update="stochastic")),
    (
        dict(pure_bf16=True, master="split", stochastic=True, opt8bit=True),
        PURE | dict(master="split", update="stochastic", exp_avg="int8", exp_avg_sq="int8"),
    ),
    (dict(opt8bit=True, sites=["exp_avg=int4"]), dict(exp_avg="int4", exp_avg_sq="int8")),
    (dict(sites=["compute=tf32"]), dict(compute="tf32")),
    (
        dict(pure_bf16=True, sites=["ema=bf16", "ema_update=stochastic"]),
        PURE | dict(ema="bf16", ema_update="stochastic"),
    ),
    (
        dict(pure_bf16=True, master="split", stochastic=True, sites=["exp_avg=bf16"]),
        PURE | dict(master="split", update="stochastic", exp_avg="bf16", exp_avg_sq="fp32"),
    ),
    (dict(pure_bf16=True, sites=["exp_avg=fp32", "exp_avg=bf16"]), PURE),  # the last one wins
    (
        dict(sites=["generation=autocast", "loss=bf16", "reduce=bf16", "reduce_update=stochastic"]),
        dict(generation="autocast", loss="bf16", reduce="bf16", reduce_update="stochastic"),
    ),
    (
        dict(sites=["exp_avg=e5m2", "exp_avg_sq=e4m3", "update=stochastic"]),
        dict(exp_avg="e5m2", exp_avg_sq="e4m3", update="stochastic"),
    ),
]


def flag_name(flags):
    return " ".join(f"{k}={'/'.join(v) if isinstance(v, list) else v}" for k, v in flags.items()) or "none"


@pytest.mark.parametrize("flags, sites", COMPOSED, ids=flag_name)
def test_flags_compose_recipes(flags, sites):
    assert recipe(**flags) == Recipe(**sites)


# sites whose default says nothing: that nothing is done
SILENT = "kahan compute loss_scale grads exp_avg exp_avg_sq ema_update reduce_update islands sparse24".split()


def test_every_default_is_a_value_and_every_value_has_a_reason():
    assert list(Recipe().values) == list(SITES) and Recipe().fp8 is None and Recipe() == recipe()
    for name, site in SITES.items():
        assert Recipe()[name] == getattr(Recipe(), name) == site.values[0]
        told = {"norm", "embed", "final"} if name == "islands" else set()  # by the row itself
        told |= {site.values[0]} if name in SILENT else set()
        missing = set(site.values) - set(site.why) - told
        assert not missing, f"the ledger can't explain {name}={missing}"
        assert set(site.why) | set(site.warn) <= set(site.values)


def test_a_recipe_is_a_value():
    r = recipe(pure_bf16=True, sites=["ema=bf16"])
    assert r == recipe(pure_bf16=True, sites=["ema=bf16"]) and hash(r) == hash(r.replace())
    assert r != recipe(pure_bf16=True) and r.replace(ema="fp32") == recipe(pure_bf16=True)
    assert r.ema == "bf16" and r.dtype("ema") == BF16 and r.replace(ema="fp32").dtype("ema") == torch.float32
    assert "ema='bf16'" in repr(r) and repr(Recipe()) == "Recipe()"
    with pytest.raises(AttributeError, match="no site 'emma'"):
        r.emma  # noqa: B018
    with pytest.raises(TypeError, match="emma"):
        r.replace(emma="bf16")
    with pytest.raises(TypeError, match="stochastik"):
        recipe(stochastik=True)


TIMES = Site(("fp32", "bf16"), {"bf16": "few of them"}, {"bf16": "times=bf16: they collapse"})


def test_a_task_brings_sites_of_its_own():
    r = recipe(pure_bf16=True, stochastic=True, more={"times": TIMES}, sites=["times=bf16"])
    assert r.times == r["times"] == "bf16" and r.dtype("times") == BF16
    assert r.more == {"times": TIMES} and list(r.sites) == [*SITES, "times"]
    assert r.warnings() == ["times=bf16: they collapse"] and r.replace(times="fp32").warnings() == []
    assert r.replace(ema="bf16").times == "bf16" and recipe(more={"times": TIMES}).times == "fp32"
    assert r != recipe(pure_bf16=True, stochastic=True, more={"times": TIMES})
    refused(lambda: recipe(sites=["times=bf16"]), "unknown site 'times'")
    refused(lambda: recipe(more={"times": TIMES}, sites=["times=fp9"]), "no value of times", "fp32, bf16")
    refused(lambda: recipe(more={"times": TIMES}, sites=["time=bf16"]), "unknown site 'time'", "ema", "times")


def test_every_single_setting_resolves_or_is_refused_in_one_line():
    bases = [
        {},
        dict(bf16=True),
        dict(fp16=True),
        dict(pure_bf16=True),
        dict(pure_bf16=True, stochastic=True),
        dict(pure_bf16=True, master="split"),
        dict(fp8=True),
    ]
    resolved = set()
    for flags, (site, spec) in itertools.product(bases, SITES.items()):
        for value in spec.values:
            try:
                assert getattr(recipe(**flags, sites=[f"{site}={value}"]), site) == value
                resolved.add((site, value))
            except Refused as error:
                assert "\n" not in str(error)
    everything = {(site, value) for site, spec in SITES.items() for value in spec.values}
    # each takes two settings at once (COMPOSED has them)
    pairs = {("ema_update", "stochastic"), ("reduce_update", "stochastic"), ("generation_rounding", "gptq")}
    assert everything - resolved == pairs


def test_further_averages_are_named_by_decay_dtype_and_rounding():
    assert parse_average("0.9999:bf16") == (0.9999, "bf16", "nearest")
    assert parse_average("0.999:bf16:stochastic") == (0.999, "bf16", "stochastic")
    wrong = ["", "0.9", "1.0:bf16", "-0.1:fp32", "x:bf16", "0.9:fp8", "0.9:bf16:up", "0.9:bf16:nearest:1"]
    for spec in [*wrong, "nan:bf16"]:
        refused(functools.partial(parse_average, spec), "DECAY:DTYPE")


# ---- Refusals ----------------------------------------------------------------------------------------------


NO_VALUES = [
    (
        dict(sites=[f"{name}=fp9"]),
        [f"--set {name}=fp9", f"'fp9' is no value of {name}", ", ".join(site.values)],
    )
    for name, site in SITES.items()
]
REFUSED = [
    *NO_VALUES,
    (dict(bf16=True, fp16=True), ["--bf16 and --fp16", "choose one"]),
    (dict(bf16=True, pure_bf16=True), ["--bf16 and --pure_bf16"]),
    (dict(fp16=True, pure_bf16=True), ["--fp16 and --pure_bf16"]),
    (dict(stochastic=True), ["--stochastic", "add --pure_bf16"]),
    (dict(bf16=True, stochastic=True), ["--stochastic", "add --pure_bf16"]),
    (dict(kahan=True), ["kahan=on", "add --pure_bf16"]),
    (dict(master="split"), ["master=split", "add --pure_bf16"]),
    (dict(fp16=True, master="fp32"), ["master=fp32", "add --pure_bf16"]),
    (dict(pure_bf16=True, master="double"), ["master='double'", "none, fp32, split"]),
    (dict(sites=["emma=bf16"]), ["--set emma=bf16", "unknown site 'emma'", *SITES]),
    (dict(sites=["ema"]), ["--set ema:", "fp32, bf16"]),
    (dict(sites=["=bf16"]), ["unknown site ''"]),
    (
        dict(pure_bf16=True, sites=["islands=norm+stem"]),
        ["'norm+stem'", "none, norm, embed, final", "join several with +"],
    ),
    (dict(pure_bf16=True, sites=["islands=none+norm"]), ["none stands alone"]),
    (dict(pure_bf16=True, sites=["compute=fp32"]), ["weights=bf16 with compute=fp32", "use compute=bf16"]),
    (dict(sites=["loss_scale=dynamic"]), ["loss_scale=dynamic with compute=fp32", "--fp16"]),
    (dict(pure_bf16=True, sites=["compute=fp16"]), ["weights=bf16 with compute=fp16", "--fp16"]),
    (dict(pure_bf16=True, sites=["grads=fp32"]), ["grads=fp32 with weights=bf16", "accumulate=fp32"]),
    (dict(sites=["grads=bf16"]), ["grads=bf16 with weights=fp32"]),
    (dict(sites=["accumulate=bf16"]), ["accumulate=bf16 with fp32 weights", "--pure_bf16"]),
    (dict(sites=["master=split"]), ["master=split with fp32 weights", "--pure_bf16"]),
    (dict(sites=["kahan=on"]), ["kahan=on with fp32 weights", "--pure_bf16"]),
    (dict(sites=["islands=norm"]), ["islands=norm with fp32 weights", "--pure_bf16"]),
    (dict(pure_bf16=True, kahan=True, master="split"), ["kahan beside master=", "drop one"]),
    (dict(opt8bit=True, opt4bit=True), ["--opt8bit and --opt4bit exclude each other", "choose one"]),
    (dict(opt8bit=True, kahan=True), ["kahan=on", "add --pure_bf16"]),
    (dict(opt4bit=True, master="split"), ["master=split", "add --pure_bf16"]),
    (dict(sites=["update=stochastic"]), ["no tensor is written in bf16", "add --pure_bf16"]),
    (
        dict(pure_bf16=True, master="split", stochastic=True),
        ["no tensor is written in bf16", "drop --stochastic"],
    ),
    (dict(sites=["ema_update=stochastic"]), ["ema_update=stochastic with ema=fp32", "--set ema=bf16"]),
    (dict(sites=["reduce_update=stochastic"]), ["with reduce=fp32", "--set reduce=bf16"]),
]


@pytest.mark.parametrize("flags, words", REFUSED, ids=lambda x: flag_name(x) if isinstance(x, dict) else "")
def test_senseless_combinations_are_refused_with_what_works(flags, words):
    refused(lambda: recipe(**flags), *words)


# ---- Warnings ----------------------------------------------------------------------------------------------


def said(flags, **run):
    return recipe(**flags).warnings(**run)


WARNED = [  # flags, run, words of the one more line that this run gets, a run that does not get it
    (
        dict(pure_bf16=True),
        dict(lr=1e-4),
        ["update=nearest", "lr=0.0001", "0.002 of it", "--stochastic"],
        (dict(pure_bf16=True, stochastic=True), {}),
    ),
    (dict(pure_bf16=True), dict(lr=1e-4), ["update=nearest"], (dict(pure_bf16=True, kahan=True), {})),
    (
        dict(pure_bf16=True, sites=["update=eco"]),
        dict(lr=1e-6),
        ["update=eco", "lr=1e-06", "wait in the momentum"],
        (dict(pure_bf16=True, sites=["update=eco"]), dict(lr=1e-4)),
    ),
    (dict(pure_bf16=True), dict(lr=1e-4), ["update=nearest"], (dict(pure_bf16=True, master="split"), {})),
    (
        dict(pure_bf16=True),
        dict(lr=1e-4, weight_decay=0.01),
        ["weight decay", "1e-06", "--stochastic"],
        (dict(pure_bf16=True), dict(weight_decay=0.0)),
    ),
    (
        dict(pure_bf16=True),
        {},
        ["exp_avg_sq=bf16", "1-beta2 = 0.001", "never shrink"],
        (dict(pure_bf16=True), dict(beta2=0.99)),
    ),
    (dict(pure_bf16=True, kahan=True), {}, ["exp_avg_sq=bf16"], (dict(pure_bf16=True, stochastic=True), {})),
    (dict(sites=["exp_avg_sq=bf16"]), {}, ["exp_avg_sq=bf16", "exp_avg_sq=fp32"], ({}, {})),
    (
        dict(sites=["ema=bf16"]),
        dict(ema_decay=0.9999),
        ["ema=bf16, nearest", "> 20 |ema|", "ema=fp32"],
        (dict(sites=["ema=bf16"]), dict(ema_decay=0.99)),
    ),
    (dict(sites=["ema=bf16"]), dict(ema_decay=0.999), ["> 2 |ema|"], ({}, {})),
    (
        dict(sites=["ema=bf16", "ema_update=stochastic"]),
        {},
        ["ema=bf16, stochastic", "3.5%"],
        (dict(sites=["ema=bf16"]), {}),
    ),
    (
        dict(pure_bf16=True, sites=["buffers=bf16"]),
        {},
        ["buffers=bf16", "RoPE", "buffers=fp32"],
        (dict(pure_bf16=True), {}),
    ),
    (
        dict(pure_bf16=True),
        dict(micro_batches=64),
        ["accumulate=bf16", "64 micro-batches", "0.90%", "accumulate=fp32"],
        (dict(pure_bf16=True), dict(micro_batches=1)),
    ),
    (
        dict(pure_bf16=True),
        dict(micro_batches=8),
        ["accumulate=bf16"],
        (dict(pure_bf16=True, sites=["accumulate=fp32"]), dict(micro_batches=8)),
    ),
    (
        dict(pure_bf16=True, opt8bit=True),
        {},
        ["update=nearest"],
        (dict(pure_bf16=True, opt8bit=True, master="split"), {}),
    ),
    (
        dict(opt8bit=True),
        {},
        ["exp_avg_sq=int8, nearest", "1-beta2 = 0.001", "0.2 % and more", "--stochastic"],
        (dict(opt8bit=True, stochastic=True), {}),
    ),
    (
        dict(opt4bit=True),
        {},
        ["exp_avg_sq=int4, nearest", "3 % to 50 %"],
        (dict(opt4bit=True, stochastic=True), {}),
    ),
    (
        dict(opt4bit=True, stochastic=True, pure_bf16=True),
        {},
        ["below 0.0625 of the largest", "below 0.25 of its largest", "exp_avg_sq=log4"],
        (dict(opt8bit=True, stochastic=True), {}),
    ),
]


@pytest.mark.parametrize("flags, run, words, silent", WARNED, ids=lambda x: "")
def test_lossy_recipes_warn_with_the_arithmetic(flags, run, words, silent):
    matching = [line for line in said(flags, **run) if all(word in line for word in words)]
    assert len(matching) == 1 and "\n" not in matching[0], said(flags, **run)
    assert not [line for line in said(silent[0], **silent[1]) if words[0] in line]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(bf16=True),
        dict(fp16=True),
        dict(opt8bit=True, stochastic=True),
        dict(pure_bf16=True, stochastic=True),
        dict(pure_bf16=True, stochastic=True, sites=["exp_avg=int4", "exp_avg_sq=log4"]),
        dict(pure_bf16=True, sites=["update=eco"]),
        dict(pure_bf16=True, master="split", stochastic=True, opt8bit=True),
        dict(pure_bf16=True, master="split"),
        dict(pure_bf16=True, master="fp32"),
    ],
    ids=flag_name,
)
def test_healthy_recipes_are_silent(flags):
    assert said(flags, weight_decay=0.1, ema_decay=0.9999) == []


def test_equal_recipes_have_one_hash():
    one, other = recipe().keeping("muon", "adafactor"), recipe().keeping("adafactor", "muon")
    assert one == other and hash(one) == hash(other)
