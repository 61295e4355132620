"""Every precision decision of a training run, in one file that needs nothing but torch. Copy it into any project; with it fp8.py, states.py
or sparsity.py for 8-bit products, moments in codes or 2:4 weights.

A run holds a handful of kinds of tensor ("sites"): weights, master copy, gradients, moments, average, timesteps ... A `Recipe` says for
each where it lives and how it is rounded; `Precision` carries the recipe out on any model. Your loop becomes any recipe in six lines:

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.999)      # 1  casts the model, makes AdamW and EMA
    for x, y in loader:
        loss = F.mse_loss(run(x), y)                                                               # 2  run(...) is the model
        run.backward(loss)                                                                         # 3  loss scaling, accumulation
        run.step()                                                                                 # 4  AdamW, rounding, EMA
    net = run.generator()                                                                          # 5  a copy holding the averaged weights
    print(run.ledger())                                                                            # 6  site, dtype, rounding, bytes, why

Contents: sites and recipes / what this machine can do / rounding / AdamW / EMA / Precision. The reasons behind each guard stand where the
guard stands. bf16 has 8 significant bits: neighbouring values (an ulp) lie 2^-8 to 2^-7 of the value apart, and a change below half of
that is lost when rounding to nearest; most of this file follows from that one sentence.
"""

import copy
import dataclasses
import functools
import importlib
import math
import os
import platform
import re
import warnings
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CODES = {"int8": "8-bit codes in blocks of 256, format of bitsandbytes", "int4": "4-bit codes in blocks of 128, format of torchao"}  # states.py


class RecipeError(ValueError):
    """A recipe that makes no sense or that this machine can't run. The message is one line: what is wrong, and what works instead."""


def _beside(module, need, instead):
    """A file of this repository that only some recipes load. Raises RecipeError where precision.py was copied without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RecipeError(f"{need} the file {module}.py beside precision.py: copy it too, or {instead}") from None


# ---------------------------------------------------------------------------------------------------------------------------------------
# Sites and recipes


@dataclasses.dataclass(frozen=True)
class Site:
    values: tuple[str, ...]
    why: dict[str, str]  # value -> the reason that the ledger prints


SITES = {
    "weights": Site(("fp32", "bf16"), {"fp32": "forward reads full precision", "bf16": "half the bytes; forward reads 8 significant bits"}),
    "master": Site(("none", "fp32", "split"), {
        "none": "the weights are the only copy", "fp32": "a second, full-precision copy takes the updates",
        "split": "bf16 weight + int16 remainder = the exact fp32 master in 4 bytes"}),
    "update": Site(("nearest", "stochastic"), {
        "nearest": "updates under half an ulp are lost", "stochastic": "rounds up with probability = distance: nothing is lost on average, some noise is added"}),
    "kahan": Site(("off", "on"), {"off": "", "on": "a bf16 buffer keeps what each weight write rounded away"}),
    "compute": Site(("fp32", "tf32", "bf16", "fp16", "fp8"), {
        "fp32": "", "tf32": "fp32 storage, 10-bit mantissa inside tensor cores", "bf16": "matmuls and convolutions read 8 significant bits",
        "fp16": "11 significant bits, range 6e-8 .. 65504: needs dynamic loss scaling",
        "fp8": "matmuls of nn.Linear read 3 or 4 significant bits, scaled; all else computes in bf16"}),
    "loss_scale": Site(("none", "dynamic"), {
        "none": "", "dynamic": "keeps fp16 gradients between 6e-8 and 65504: backs off at an overflow, grows again"}),
    "grads": Site(("fp32", "bf16"), {"fp32": "", "bf16": "autograd leaves a gradient in its weight's dtype"}),
    "accumulate": Site(("fp32", "bf16"), {"fp32": "micro-batches are summed exactly enough", "bf16": "each micro-batch adds a rounding error"}),
    "exp_avg": Site(("fp32", "bf16", *CODES), {"fp32": "", "bf16": "1-beta1 = 0.1 is far above an ulp", **CODES}),
    "exp_avg_sq": Site(("fp32", "bf16", *CODES), {"fp32": "", "bf16": "1-beta2 must beat half an ulp (2^-8), or be rounded stochastically", **CODES}),
    "ema": Site(("fp32", "bf16"), {
        "fp32": "1-decay is far below a bf16 ulp: the average needs fp32", "bf16": "steps of (1-decay)(w-ema) fall under half an ulp"}),
    "ema_update": Site(("nearest", "stochastic"), {"nearest": "", "stochastic": "a bf16 average that moves in expectation"}),
    "islands": Site(("none", "norm", "embed", "final"), {"none": ""}),
    "timesteps": Site(("fp32", "bf16"), {"fp32": "bf16 holds only 507 of the values 0..999", "bf16": "0..999 collapse to 507 values"}),
    "sampler": Site(("fp32", "bf16"), {"fp32": "x + v dt: small steps need the bits", "bf16": "x + v dt loses dt below half an ulp of x"}),
    "loss": Site(("fp32", "bf16"), {"fp32": "sums need the bits", "bf16": "the loss is formed from bf16 differences"}),
    "scheduler": Site(("fp32", "bf16"), {
        "fp32": "noise schedule is only ever called with fp32 samples", "bf16": "unguarded: one bf16 call turns MONAI's schedule buffers into bf16"}),
    "generation": Site(("compute", "fp32", "bf16", "autocast", "fp8", "int8"), {
        "compute": "samples are drawn in the precision that was trained", "fp32": "samples are drawn from an fp32 copy of the weights",
        "bf16": "samples are drawn from a bf16 copy of the weights: conversion after training", "fp8": "samples are drawn through the FP8 layers",
        "int8": "samples are drawn through int8 layers", "autocast": "samples are drawn from an fp32 copy under bf16 autocast"}),
    "reduce": Site(("fp32", "bf16"), {"fp32": "gradients of all ranks are summed in fp32", "bf16": "half the traffic, one rounding more"}),
    "sparse24": Site(("none", "magnitude", "srste"), {"none": "", "magnitude": "pruned once, the mask is fixed", "srste": "pruned anew at each step"}),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Where each kind of tensor lives and how it is rounded: one field a site, values as in SITES. The defaults are fp32 everywhere.

    Build one with `recipe(...)`, which applies presets, the user's single sites, and the refusals.
    """

    weights: str = "fp32"
    master: str = "none"
    update: str = "nearest"
    kahan: str = "off"
    compute: str = "fp32"
    loss_scale: str = "none"
    grads: str = "fp32"
    accumulate: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    ema: str = "fp32"
    ema_update: str = "nearest"
    islands: str = "none"
    timesteps: str = "fp32"
    sampler: str = "fp32"
    loss: str = "fp32"
    scheduler: str = "fp32"
    generation: str = "compute"
    reduce: str = "fp32"
    sparse24: str = "none"
    fp8: object = None  # no site: fp8.Options when compute is fp8

    def dtype(self, site):
        """torch dtype of a site that holds fp32, bf16 or fp16; of compute=fp8 what computes beside the FP8 layers."""
        value = getattr(self, site)
        return DTYPES["bf16" if value == "fp8" else value]

    def on(self, device):
        """The recipe with what depends on the machine settled: which backend runs FP8. Raises RecipeError when none can."""
        return dataclasses.replace(self, fp8=_fp8("resolve", self.fp8, device)) if self.fp8 else self

    @property
    def quantises(self):
        """Whether samples are drawn in 8 bits from a net that was not trained so."""
        return self.generation == "int8" or self.generation == "fp8" and not self.fp8

    @property
    def low_weights(self):
        return self.weights == "bf16"

    @property
    def coded(self):
        """The kinds of codes that moments are held in: a subset of {'int8', 'int4'}."""
        return {self.exp_avg, self.exp_avg_sq} & set(CODES)

    def warnings(self, *, beta2=0.999, ema_decay=0.999, lr=1e-3, weight_decay=0.0, micro_batches=1):
        """Recipes that run but lose something: one line each, with the arithmetic. [] for a healthy recipe."""
        lost = []
        bare = self.low_weights and self.update == "nearest" and self.kahan == "off" and self.master == "none"
        if bare:
            lost.append(f"update=nearest on bf16 weights: a step of lr={lr:g} on a weight of 0.05 is {lr / 0.05:.2g} of it, and steps under "
                        f"2^-9..2^-8 (0.002..0.004) of a weight vanish; add --stochastic, --kahan or --master split")
            if weight_decay:
                lost.append(f"weight decay moves a weight by lr*wd = {lr * weight_decay:.2g} of itself, below half an ulp (0.002): alone it is "
                            f"always lost in bf16; --stochastic keeps it")
        if self.exp_avg_sq == "bf16" and self.update == "nearest" and 1 - beta2 < 2**-8:
            lost.append(f"exp_avg_sq=bf16, nearest: decaying by 1-beta2 = {1 - beta2:.2g} is under half an ulp (2^-9..2^-8), so v can grow and "
                        f"never shrink; use --stochastic, --set exp_avg_sq=fp32 or beta2 <= 0.99")
        if self.exp_avg_sq in CODES and self.update == "nearest":
            gap = "0.35 % to 28 %" if self.exp_avg_sq == "int8" else "3 % to 50 %"
            lost.append(f"exp_avg_sq={self.exp_avg_sq}, nearest: a decay by 1-beta2 = {1 - beta2:.2g} under half a gap between codes ({gap} of the value) is "
                        f"lost: where some gradients of a block drop, their v stays too high and their steps too short; add --stochastic")
        if self.ema == "bf16" and self.ema_update == "nearest" and 1 - ema_decay < 2**-7:
            lost.append(f"ema=bf16, nearest: an entry moves only while |w-ema| > {2**-9 / (1 - ema_decay):.2g} |ema| (half an ulp over 1-decay): "
                        f"the average freezes far from the weights; use --set ema=fp32 (default) or ema_update=stochastic")
        if self.ema == "bf16" and self.ema_update == "stochastic" and 1 - ema_decay < 2**-7:
            # each write adds noise of up to an ulp that decays only at rate 1-decay: the stationary spread is ulp * sqrt(1/12 .. 1/4) / sqrt(2(1-decay)) in the worst case
            lost.append(f"ema=bf16, stochastic: unbiased, but rounding noise of an entry settles near {0.4 * 2**-8 / math.sqrt(2 * (1 - ema_decay)):.1%} "
                        f"of its value; --set ema=fp32 (default) has none")
        if self.compute == "fp16" and self.loss_scale == "none":
            lost.append("loss_scale=none with fp16: gradients below 6e-8 become 0 and above 65504 infinite; use --set loss_scale=dynamic (default)")
        if self.timesteps == "bf16":
            lost.append("timesteps=bf16: 0..999 become 507 distinct values, up to 2 apart; use --set timesteps=fp32 (default)")
        if self.sampler == "bf16":
            lost.append("sampler=bf16: x + v dt rounds at every step; with 100 steps a constant velocity misses its end by several percent; "
                        "use --set sampler=fp32 (default)")
        if self.scheduler == "bf16":
            lost.append("scheduler=bf16: MONAI keeps alphas_cumprod in the dtype of its last call; in bf16 the first timesteps have sigma = 0; "
                        "use --set scheduler=fp32 (default)")
        if self.low_weights and self.accumulate == "bf16" and micro_batches > 1:
            lost.append(f"accumulate=bf16 over {micro_batches} micro-batches: relative error near {2**-9 * math.sqrt(micro_batches / 3):.2%} of the "
                        f"gradient; --set accumulate=fp32 costs 4 bytes a parameter")
        return lost


FP8_FLAGS = {"fp8_backend": "auto", "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "amax_history_len": 1024, "amax_compute_algo": "max"}


def _fp8(function, *args):
    """A function of fp8.py; its errors are errors of the recipe."""
    fp8 = _beside("fp8", "products in 8 bits need", "use bf16")
    try:
        return getattr(fp8, function)(*args)
    except fp8.FP8Error as error:
        raise RecipeError(str(error)) from None


def recipe(*, bf16=False, fp16=False, pure_bf16=False, stochastic=False, kahan=False, master="none", opt8bit=False, opt4bit=False, fp8=False, sparse24="none",
           sites=(), **fp8_flags):
    """The recipe that a set of flags composes; `sites` are single settings ("ema=bf16"), applied after the flags; fp8_flags as in FP8_FLAGS.

    Raises RecipeError for an unknown site or value and for combinations that make no sense, naming the nearest one that does.
    """
    if master not in SITES["master"].values:
        raise RecipeError(f"--master {master}: unknown; choose from {', '.join(SITES['master'].values)}")
    if unknown := set(fp8_flags) - set(FP8_FLAGS):
        raise TypeError(f"recipe() got an unexpected keyword argument '{sorted(unknown)[0]}'")
    if sparse24 not in SITES["sparse24"].values:
        raise RecipeError(f"--sparse24 {sparse24}: unknown; choose from {', '.join(SITES['sparse24'].values)}")
    chosen = [name for name, on in (("--bf16", bf16), ("--fp16", fp16), ("--pure_bf16", pure_bf16)) if on]
    if len(chosen) > 1:
        raise RecipeError(f"{' and '.join(chosen)} exclude each other: choose one (--bf16 keeps fp32 weights, --pure_bf16 does not)")
    if opt8bit and opt4bit:
        raise RecipeError("--opt8bit and --opt4bit exclude each other: choose one, or set the moments one by one (--set exp_avg=int4 --set exp_avg_sq=int8)")
    if not pure_bf16:
        fp32_alone = stochastic and not (opt8bit or opt4bit)
        for name, on in (("--stochastic", fp32_alone), ("--kahan", kahan), (f"--master {master}", master != "none")):
            if on:
                raise RecipeError(f"{name} says how bf16 weights are written, and these weights are fp32: add --pure_bf16")
    if fp8 and (bf16 or fp16):
        raise RecipeError(f"--fp8 and {chosen[0]} exclude each other: --fp8 computes what is not in FP8 in bf16; drop {chosen[0]}")
    fields = {}
    if bf16:
        fields.update(compute="bf16")
    if fp16:
        fields.update(compute="fp16")
    if pure_bf16:
        # An exact master promises fp32 AdamW bit for bit, which bf16 moments would break; --set exp_avg=bf16 takes them back.
        moments = "bf16" if master == "none" else "fp32"
        fields.update(weights="bf16", compute="bf16", grads="bf16", accumulate="bf16", exp_avg=moments, exp_avg_sq=moments, master=master,
                      kahan="on" if kahan else "off")
    if stochastic:
        fields.update(update="stochastic")
    if opt8bit or opt4bit:
        fields.update(dict.fromkeys(("exp_avg", "exp_avg_sq"), "int8" if opt8bit else "int4"))
    if fp8:
        fields.update(compute="fp8")
    fields["sparse24"] = sparse24
    for setting in sites:
        site, _, value = setting.partition("=")
        if site not in SITES:
            raise RecipeError(f"--set {setting}: unknown site '{site}'; the sites are {', '.join(SITES)}")
        parts = value.split("+") if site == "islands" else [value]
        for part in parts:
            if part not in SITES[site].values:
                raise RecipeError(f"--set {setting}: '{part}' is no value of {site}; choose from {', '.join(SITES[site].values)}"
                                  + (" (join several with +)" if site == "islands" else ""))
        if site == "islands" and "none" in parts and len(parts) > 1:
            raise RecipeError(f"--set {setting}: 'none' stands alone")
        fields[site] = value
    if fields.get("compute") == "fp16":
        fields.setdefault("loss_scale", "dynamic")
    given = [flag for flag, default in FP8_FLAGS.items() if fp8_flags.get(flag, default) != default]
    if fields.get("compute") == "fp8":
        fields["fp8"] = _fp8("Options", *(fp8_flags.get(flag, default) for flag, default in FP8_FLAGS.items()))
    elif given:
        raise RecipeError(f"--{given[0]} {fp8_flags[given[0]]} says how FP8 is run, and this recipe computes in {fields.get('compute', 'fp32')}: add --fp8")
    if fields["sparse24"] == "srste" and fields.get("weights") == "bf16" and not any(s.startswith("accumulate=") for s in sites):
        fields["accumulate"] = "fp32"  # its decay, some 1e-4 of a weight, would be rounded away in a bf16 gradient
    result = Recipe(**fields)
    _refuse(result)
    return result


def _refuse(r):
    low = r.low_weights
    checks = [
        (low and r.compute not in ("bf16", "fp8"), f"weights=bf16 with compute={r.compute}: bf16 weights are multiplied in bf16; use compute=bf16, or --{r.compute if r.compute == 'fp16' else 'bf16'} with fp32 weights"),
        (r.loss_scale == "dynamic" and r.compute != "fp16", f"loss_scale=dynamic with compute={r.compute}: only fp16 needs it; drop it, or add --fp16"),
        (r.grads != r.weights, f"grads={r.grads} with weights={r.weights}: autograd leaves a gradient in its weight's dtype; set accumulate=fp32 for an fp32 sum of micro-batches"),
        (not low and r.accumulate == "bf16", "accumulate=bf16 with fp32 weights: their gradients are fp32 already; use accumulate=fp32, or --pure_bf16"),
        (not low and r.master != "none", f"master={r.master} with fp32 weights: they are their own master; add --pure_bf16"),
        (not low and r.kahan == "on", "kahan=on with fp32 weights: nothing is rounded away; add --pure_bf16"),
        (not low and r.islands != "none", f"islands={r.islands} with fp32 weights: all parameters are fp32 already; add --pure_bf16"),
        (r.kahan == "on" and r.master != "none", f"kahan=on with master={r.master}: the master is exact, there is nothing to compensate; drop one of the two"),
        (r.update == "stochastic" and not (low and r.master == "none") and "bf16" not in (r.exp_avg, r.exp_avg_sq) and not r.coded,
         "update=stochastic, but no tensor is written in bf16 or codes: " + ("the master is exact; drop --stochastic or add --set exp_avg=bf16 --set exp_avg_sq=bf16" if low else "add --pure_bf16, or --set exp_avg=bf16 --set exp_avg_sq=bf16")),
        (r.sparse24 != "none" and r.compute == "fp8", f"sparse24={r.sparse24} with compute=fp8: the masked products are taken in bf16; drop --fp8 or --sparse24"),
        (r.sparse24 != "none" and r.quantises,
         f"generation={r.generation} with sparse24={r.sparse24}: sparse kernels read weights in bf16; drop one of the two"),
        (r.ema_update == "stochastic" and r.ema == "fp32", "ema_update=stochastic with ema=fp32: nothing is rounded; add --set ema=bf16 or drop it"),
    ]
    for wrong, message in checks:
        if wrong:
            raise RecipeError(message)


# ---------------------------------------------------------------------------------------------------------------------------------------
# What this machine can do


def cpu_features():
    """Instruction-set names of this CPU ('avx512_bf16', 'amx_bf16', ...), from the kernel where it tells, else from torch."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    probes = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported", "amx_fp16": "_is_amx_fp16_supported"}
    return {name for name, probe in probes.items() if getattr(torch.cpu, probe, lambda: False)()}


def device_facts(device):
    """(kind, capability, features) of a device: ('cuda', (9, 0), set()), ('cpu', None, {'avx512_bf16', ...}), ('rocm' | 'mps', None, set())."""
    kind = torch.device(device).type
    if kind == "cuda":
        return ("rocm", None, set()) if torch.version.hip else ("cuda", torch.cuda.get_device_capability(device), set())
    return kind, None, cpu_features() if kind == "cpu" else set()


def support(kind, capability=None, features=frozenset()):
    """For each precision, how a machine runs it: {'bf16': ('native' | 'emulated' | 'no', reason), ...}.

    A pure function of the facts, so that the tables for machines that are not at hand can be tested: NVIDIA compute capability 8.0 for
    bf16 and TF32, 7.0 for fp16, 8.9 for fp8; x86 avx512_bf16 or amx_bf16, Arm bf16; Apple's MPS.
    """
    table = {"fp32": ("native", "every machine")}
    if kind == "cuda":
        name = f"compute capability {capability[0]}.{capability[1]}"
        table["tf32"] = ("native", name) if capability >= (8, 0) else ("no", f"{name}; TF32 tensor cores start at 8.0")
        if capability >= (8, 0):
            table["bf16"] = ("native", name)
        elif capability >= (7, 0):
            table["bf16"] = ("emulated", f"{name}; bf16 arithmetic starts at 8.0: runs without speed-up, prefer --fp16")
        else:
            table["bf16"] = ("no", f"{name}; bf16 arithmetic starts at 8.0, its emulation at 7.0: use fp32")
        table["fp16"] = ("native", name) if capability >= (7, 0) else ("emulated", f"{name}; fp16 tensor cores start at 7.0: prefer fp32")
        table["fp8"] = ("native", name) if capability >= (8, 9) else ("emulated", f"{name}; fp8 tensor cores start at 8.9: the same numbers, slower than fp32")
        table["opt8bit"] = ("native", "bitsandbytes CUDA kernels")
        table["opt4bit"] = ("native", "torchao, by torch.compile")
        table["sparse24"] = ("native", name) if capability >= (8, 0) else ("no", f"{name}; sparse tensor cores start at 8.0")
    elif kind == "rocm":
        table["tf32"] = ("no", "a mode of NVIDIA tensor cores")
        table["bf16"] = table["fp16"] = ("native", "AMD matrix cores, MI200 and later")
        table["fp8"] = ("no", "not measured on AMD here")
        table["opt8bit"] = ("no", "bitsandbytes on ROCm is not measured here")
        table["opt4bit"] = ("no", "torchao on ROCm is not measured here")
        table["sparse24"] = ("no", "NVIDIA sparse tensor cores only")
    elif kind == "mps":
        table["tf32"] = ("no", "a mode of NVIDIA tensor cores")
        table["bf16"] = ("emulated", "Apple GPU: correct, no speed-up promised")
        table["fp16"] = ("no", "no loss scaler for MPS in torch: use --bf16 or fp32")
        table["fp8"] = table["sparse24"] = ("no", "needs an NVIDIA GPU")
        table["opt8bit"] = ("no", "bitsandbytes has no MPS kernels")
        table["opt4bit"] = ("no", "torchao on MPS is not measured here")
    else:
        bf16 = sorted(features & {"avx512_bf16", "amx_bf16", "bf16"})
        fp16 = sorted(features & {"avx512_fp16", "amx_fp16"})
        table["tf32"] = ("no", "a mode of NVIDIA tensor cores; use fp32 or bf16")
        table["bf16"] = ("native", " ".join(bf16)) if bf16 else ("emulated", "this CPU has neither avx512_bf16 nor amx_bf16: correct, but slower than fp32")
        # measured on a Xeon with avx512_fp16, torch 2.14: Linear layers at the speed of fp32 and better, a convolution's gradients 50 times slower
        why = f"{' '.join(fp16)}: a convolution's gradients take 50 times as long as in fp32" if fp16 else "no avx512_fp16 or amx_fp16: 30 to 60 times slower than fp32"
        table["fp16"] = ("emulated", f"{why}; use --bf16")
        table["fp8"] = ("emulated", "no FP8 arithmetic in CPUs: the same numbers as on a GPU, slower than fp32")
        table["opt8bit"] = ("native", "bitsandbytes CPU kernels")
        table["opt4bit"] = ("native", "torchao, by torch.compile")
        table["sparse24"] = ("no", "needs compute capability 8.0")
    return table


def recommended_flags(table):
    """(flags, reason) to start with on a machine whose `support` table this is."""
    if table["bf16"][0] == "native":
        return "--bf16", "fp32 weights, bf16 matmuls: fp32's quality; when memory is short, --pure_bf16 --stochastic halves weights, gradients and states"
    if table["fp16"][0] == "native":
        return "--fp16", "fp16 tensor cores without bf16: dynamic loss scaling is on"
    return "", "this machine has no fast 16-bit arithmetic: plain fp32 is fastest; --pure_bf16 --stochastic still halves the memory"


def check_machine(r, device):
    """Warnings for what `device` only emulates. Raises RecipeError when it can't run the recipe at all."""
    table = support(*device_facts(device))
    level, reason = table[r.compute]
    if level == "no":
        raise RecipeError(f"compute={r.compute} can't run on {torch.device(device).type}: {reason}")
    notes = [f"compute={r.compute} is emulated here: {reason}"] if level == "emulated" else []
    for kind in sorted(r.coded):
        flag = {"int8": "opt8bit", "int4": "opt4bit"}[kind]
        level, reason = table[flag]
        if level == "no":
            raise RecipeError(f"--{flag} can't run on {torch.device(device).type}: {reason}; --pure_bf16 --stochastic saves 8 of 16 bytes without it")
        _coder(kind)
    return notes


# ---------------------------------------------------------------------------------------------------------------------------------------
# Rounding
#
# Noise is a hash of (seed, step, position), never a draw from a global generator: an interrupted run resumes with the same noise, all
# ranks of a replicated run round alike, and no two parameters share noise. The functions are plain elementwise torch, so that
# torch.compile fuses a whole optimiser step into one pass over memory.


def hash64(*words):
    """A 64-bit integer from integers: splitmix64 (Steele et al. 2014, doi 10.1145/2714064.2660195) folded over the words."""
    state = 0
    for word in words:
        state = (state ^ (word & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state = z ^ z >> 31
    return state


def noise_key(seed, step, position=0, stream=0, device="cpu"):
    """int32 [3]: two key words for (seed, step, stream, high part of position) and the first element's position, for `noise_bits`."""
    key = hash64(seed, step, stream, position >> 32)
    words = [key & 0xFFFFFFFF, key >> 32, position & 0xFFFFFFFF]
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32, device=device)


def _mix(h):
    # "lowbias32" of Chris Wellons' hash-prospector; torch shifts int32 arithmetically, hence the masks, and int32 products wrap
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


def noise_bits(n, key):
    """Two independent int32 [n] of uniform bits for elements key[2], key[2]+1, ... under the key words key[0], key[1]."""
    h = _mix(torch.arange(n, dtype=torch.int32, device=key.device) + key[2] + key[0])
    # the second key word enters between two rounds, so that different steps give unrelated sequences, not shifted ones
    first = _mix(h + key[1])
    return first, _mix(first ^ 0x5BD1E995)


def stochastic_round(x, noise):
    """fp32 [n] -> bf16 [n]: up with probability (x - lower) / (upper - lower), so that the mean is x. `noise` int32 [n] or one int, low 16 bits used.

    Adding 16 uniform bits below the kept 16 carries with just that probability. Infinities and NaN stay as they are.
    """
    rounded = ((x.view(torch.int32) + (noise & 0xFFFF)) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def split_master(x):
    """fp32 -> (bf16 weight, int16 remainder) with (weight << 16) + remainder = the bits of x, exactly.

    The weight is x rounded half up in its bit pattern: rounding half to even would need a remainder of +2^15 on ties, one more than int16
    holds. A NaN keeps its weight NaN (its payload may change).
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & -65536
    # by way of fp32, not of int16: torch.compile vectorises no conversion between int16 and bf16
    weight = torch.where(x == x, high.view(torch.float32), x).to(torch.bfloat16)
    return weight, torch.where(x == x, bits - high, 0).to(torch.int16)


def exact_weight(p, low=None):
    """The fp32 value an optimiser holds for weight `p`: with `low` None p itself, int16 a split master, bf16 a Kahan buffer, fp32 a master."""
    if low is None:
        return p.float()
    if low.dtype == torch.int16:
        return (p.float().view(torch.int32) + low.to(torch.int32)).view(torch.float32)
    return p.float() + low.float() if low.dtype == torch.bfloat16 else low


def write_weight(x, p, low=None, noise=None):
    """Write fp32 x into weight `p` and its `low` part in place; `noise` int32 rounds the last bf16 written stochastically, None to nearest."""
    if low is None:
        p.copy_(_round(x, p.dtype, noise))
    elif low.dtype == torch.int16:
        high, remainder = split_master(x)
        p.copy_(high)
        low.copy_(remainder)
    elif low.dtype == torch.bfloat16:
        # Kahan: the weight is the nearest bf16, the buffer takes the rest. With noise the rest itself is rounded stochastically: the sum of
        # both is then unbiased, and forward still reads the nearest weight. Rounding goes by the bits ("noise" of half an ulp is round to
        # nearest): a fused kernel keeps x in fp32 across a cast to bf16 and back, and x - x would leave the buffer at 0.
        nearest = stochastic_round(x, 0x8000)
        p.copy_(nearest)
        low.copy_(_round(x - nearest.float(), low.dtype, noise))
    else:
        low.copy_(x)
        p.copy_(x)


def _round(x, dtype, noise):
    return stochastic_round(x, noise) if noise is not None and dtype == torch.bfloat16 else x.to(dtype)


def _fma(a, b, c):
    # a*b + c rounded once, as torch's CPU kernels for lerp and addcmul compute it: the product of two fp32 is exact in float64. Only where
    # equal bits are promised; float64 takes twice the time
    return (a.double() * b.double() + c.double()).float()


@functools.cache
def _compiled(kernel):
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # one graph a combination of dtypes
    return torch.compile(kernel, dynamic=True, fullgraph=True, options=_compile_options())


def _compile_options():
    # torch.compile tells GCC not to vectorise loops, and writes each change between fp32 and its bits as a loop: letting GCC vectorise makes
    # the stochastic step on CPU 2.5 times faster. Its results don't change, since contraction and reordering of sums stay off.
    from torch._inductor import config, cpp_builder

    try:
        gcc = cpp_builder.is_gcc()
    except RuntimeError:  # no compiler: the call of the kernel will tell
        gcc = False
    if gcc and platform.machine() in ("x86_64", "AMD64") and getattr(config.cpp, "march", "") is None:
        return {"cpp.march": "native -ftree-loop-vectorize"}
    return None


def _run_kernel(kernel, *args, compiled=True):
    """Call the kernel fused by torch.compile; where there is no compiler, warn once and call it as it is."""
    if compiled and kernel not in _run_kernel.failed:
        try:
            return _compiled(kernel)(*args)
        except Exception as error:  # no C++ compiler, no Triton, an unsupported device: nothing has been written yet
            # the eager step needs more memory, and what is full now would make it the choice for the rest of the process
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, (torch._dynamo.exc.TorchDynamoException, RuntimeError, OSError)):
                raise
            if not _run_kernel.failed:
                warnings.warn(f"torch.compile can't build the fused step here ({type(error).__name__}); using the slower eager one", stacklevel=3)
            _run_kernel.failed.add(kernel)
    return kernel(*args)


_run_kernel.failed = set()


# ---------------------------------------------------------------------------------------------------------------------------------------
# AdamW


class _Bucket:
    """Tensors of one dtype and device that a kernel sees as one flat vector: a large one as a view, small ones copied together."""

    SMALL = 1 << 18  # elements; below it the fixed cost of a call outweighs the copies

    def __init__(self, indices, tensors, start):
        self.indices, self.start = indices, start
        self.numel = sum(tensors[i].numel() for i in indices)

    @staticmethod
    def group(tensors, keys):
        """Buckets over `tensors` such that each holds only equal `keys` (hashables); their order and starts depend on shapes alone."""
        buckets, open_, start = [], {}, 0
        for i, t in enumerate(tensors):
            if t.numel() >= _Bucket.SMALL:
                buckets.append([i])
            else:
                batch = open_.get(keys[i])
                if batch is None or sum(tensors[j].numel() for j in batch) + t.numel() > _Bucket.SMALL:
                    batch = open_[keys[i]] = []
                    buckets.append(batch)
                batch.append(i)
        result = []
        for indices in buckets:
            result.append(_Bucket(indices, tensors, start))
            start += result[-1].numel
        return result

    def gather(self, tensors):
        """Flat [numel]: a view of a single contiguous tensor, else a copy."""
        if len(tensors) == 1:
            return tensors[0].reshape(-1)
        return _flatten_dense_tensors(tensors)

    def scatter(self, flat, tensors):
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            torch._foreach_copy_(list(tensors), self.views(flat, tensors))

    def views(self, flat, tensors):
        return _unflatten_dense_tensors(flat, tensors)


def _moments(g, exp_avg, exp_avg_sq, h, fma):
    g, m, v = g.float() * h[7], exp_avg.float(), exp_avg_sq.float()
    return fma(g - m, h[1], m), fma(h[3] * g, g, v * h[2])


def _stepped(x, m, root, h):
    # weight decay belongs to the fp32 update: lr*wd near 1e-6 of a weight would never survive a bf16 write of its own
    return x * h[0] + (h[6] * m) / (root / h[4] + h[5])


def _adamw_kernel(p, g, exp_avg, exp_avg_sq, low, h, key, stochastic):
    """One AdamW step on flat vectors, in place. All arithmetic is fp32 in the order of torch.optim.AdamW; only the writes differ by recipe.

    h, fp32 [8]: 1-lr*wd, 1-beta1, beta2, 1-beta2, sqrt(1-beta2^t), eps, -lr/(1-beta1^t), gradient scale.
    """
    m, v = _moments(g, exp_avg, exp_avg_sq, h, lambda a, b, c: a * b + c)
    x = _stepped(exact_weight(p, low), m, v.sqrt(), h)
    first, second = noise_bits(p.numel(), key) if stochastic else (None, None)
    write_weight(x, p, low, first)
    exp_avg.copy_(_round(m, exp_avg.dtype, first >> 16 if stochastic else None))
    exp_avg_sq.copy_(_round(v, exp_avg_sq.dtype, second))


def _moments_kernel(g, exp_avg, exp_avg_sq, h):
    m, v = _moments(g, exp_avg, exp_avg_sq, h, _fma)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _weight_kernel(p, exp_avg, root, low, h):
    write_weight(_stepped(exact_weight(p, low), exp_avg, root, h), p, low)


def _coder(kind):
    return _beside("states", f"moments in {kind} need", "keep moments in fp32 or bf16").CODERS[kind]()


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose arithmetic is always fp32; recipes differ only in how results are written back.

    params: fp32 or bf16, mixed freely. For bf16 ones `update` is 'nearest' or 'stochastic', `kahan` adds a bf16 compensation buffer (2
    bytes), `master` 'split' an int16 remainder (2 bytes, the exact fp32 master) or 'fp32' a full copy (4 bytes). exp_avg and exp_avg_sq are
    'fp32' or 'bf16', or 'int8' or 'int4' codes with a scale a block (see states.py; small tensors in fp32), rounded as `update` says: for
    bf16 and codes alike the value kept is right on average when it is 'stochastic'. With fp32 moments and an exact master the result equals
    torch.optim.AdamW on fp32 weights bit for bit on CPU.
    Rounding noise is a function of (seed, step, place in the parameter list). step() accepts a gradient scale (clipping) and gradients other
    than p.grad (fp32 accumulators). Raises RecipeError for unsupported dtypes and for a state_dict of other shapes.
    """

    PIECE = 1 << 22  # values of a coded tensor that are in fp32 at once: 32 MiB for both moments

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, update="nearest", kahan=False, master="none",
                 exp_avg="fp32", exp_avg_sq="fp32", seed=0, compiled=True):
        kinds = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.coders = {name: _coder(kind) for name, kind in kinds.items() if kind in CODES}
        self.moments = {name: DTYPES.get(kind, torch.float32) for name, kind in kinds.items()}  # of tensors that are not coded
        self.update, self.kahan, self.master, self.seed, self.compiled = update, kahan, master, seed, compiled
        self._buckets = []  # (index of the parameter group, bucket)
        self._position = 0
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        for p in params:
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise RecipeError(f"AdamW takes fp32 and bf16 parameters, not {p.dtype}: keep fp16 in autocast (--fp16) and the weights in fp32")
        # blocks of codes must not cross from one tensor into the next: a coded tensor that ends within a block gets a bucket of its own
        coded = [[name for name, coder in self.coders.items() if coder.takes(p.numel())] for p in params]
        ends = [i if names and p.numel() % 256 else None for i, (p, names) in enumerate(zip(params, coded))]
        for bucket in _Bucket.group(params, [(p.dtype, p.device, *names, end) for p, names, end in zip(params, coded, ends)]):
            bucket.start += self._position
            bucket.params = [params[i] for i in bucket.indices]
            first = bucket.params[0]
            new = functools.partial(torch.zeros, bucket.numel, device=first.device)
            bucket.state = {}
            for name, dtype in self.moments.items():
                if name in coded[bucket.indices[0]]:
                    bucket.state[name], bucket.state[f"{name}_scale"] = self.coders[name].new(bucket.numel, first.device)
                else:
                    bucket.state[name] = new(dtype=dtype)
            if first.dtype == torch.bfloat16:
                if self.kahan:
                    bucket.state["compensation"] = new(dtype=torch.bfloat16)
                elif self.master == "split":
                    bucket.state["remainder"] = new(dtype=torch.int16)
                elif self.master == "fp32":
                    bucket.state["master"] = bucket.gather([p.detach() for p in bucket.params]).float()
            for p in bucket.params:
                self.state[p] = {"step": 0}
            for name, flat in bucket.state.items():
                whole = flat.numel() == bucket.numel  # else packed codes or scales: to each tensor its share of a flat vector
                shares = bucket.views(flat, bucket.params) if whole else flat.split([flat.numel() * p.numel() // bucket.numel for p in bucket.params])
                for p, view in zip(bucket.params, shares):
                    self.state[p][name] = view
            self._buckets.append((len(self.param_groups) - 1, bucket))
        self._position += sum(p.numel() for p in params)

    @staticmethod
    def _low(state):
        return next((state[name] for name in ("compensation", "remainder", "master") if name in state), None)

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        """One update. grads: {parameter: tensor} instead of p.grad; a parameter without a gradient is left alone, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_of = grads.get if grads is not None else lambda p: p.grad
        for index, bucket in self._buckets:
            present = [grad_of(p) is not None for p in bucket.params]
            steps = {self.state[p]["step"] for p in bucket.params}
            dtypes = {grad_of(p).dtype for p, here in zip(bucket.params, present) if here}
            if all(present) and len(steps) == 1 and len(dtypes) == 1:
                params = [p.detach() for p in bucket.params]
                flat = bucket.gather(params)
                self._apply(index, steps.pop() + 1, flat, bucket.gather([grad_of(p) for p in bucket.params]), bucket.state, bucket.start, grad_scale)
                bucket.scatter(flat, params)
                for p in bucket.params:
                    self.state[p]["step"] += 1
                continue
            start = bucket.start
            for p, here in zip(bucket.params, present):
                if here:  # the same noise as in the bucket: it depends on the position alone
                    state = self.state[p]
                    state["step"] += 1
                    flat = p.detach().reshape(-1)
                    tensors = {name: t.view(-1) for name, t in state.items() if name != "step"}
                    self._apply(index, state["step"], flat, grad_of(p).reshape(-1), tensors, start, grad_scale)
                    p.copy_(flat.view(p.shape))
                start += p.numel()
        return loss

    @staticmethod
    def _scalars(group, step, grad_scale, device):
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return torch.tensor([1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5, group["eps"],
                             -lr / (1 - beta1**step), grad_scale], dtype=torch.float32, device=device)

    def _apply(self, index, step, p, g, state, position, grad_scale):
        coded = [name for name in self.coders if f"{name}_scale" in state]
        if coded and p.numel() > self.PIECE:  # the fp32 moments of a piece at a time; noise depends on the position alone
            n = p.numel()
            for start in range(0, n, self.PIECE):
                end = min(start + self.PIECE, n)
                part = {name: t[start * t.numel() // n:end * t.numel() // n] for name, t in state.items()}
                self._apply(index, step, p[start:end], g[start:end], part, position + start, grad_scale)
            return
        h = self._scalars(self.param_groups[index], step, grad_scale, p.device)
        key = noise_key(self.seed, step, position, device=p.device)
        run, low = functools.partial(_run_kernel, compiled=self.compiled), self._low(state)
        m, v = (self._loaded(name, state, run) for name in ("exp_avg", "exp_avg_sq"))
        stochastic = self.update == "stochastic" and p.dtype == torch.bfloat16 and (low is None or low.dtype == torch.bfloat16)
        if p.is_cpu and not stochastic and m.dtype == v.dtype == torch.float32:
            # torch.sqrt on CPU is not correctly rounded where it comes from MKL, a compiled one is: for the promise of equal bits take torch's
            run(_moments_kernel, g, m, v, h)
            run(_weight_kernel, p, m, v.sqrt(), low, h)
        else:
            run(_adamw_kernel, p, g, m, v, low, h, key, self.update == "stochastic")
        for stream, name in enumerate(coded, 2):
            key = noise_key(self.seed, step, position, stream, p.device) if self.update == "stochastic" else None
            self.coders[name].store(m if name == "exp_avg" else v, state[name], state[f"{name}_scale"], name == "exp_avg", key, run)

    def _loaded(self, name, state, run):
        if f"{name}_scale" not in state:
            return state[name]
        return self.coders[name].load(state[name].view(-1), state[f"{name}_scale"], name == "exp_avg", run)

    def moment(self, p, name):
        """exp_avg or exp_avg_sq of parameter `p`: the tensor held or, where it is codes, the fp32 values [numel] that they stand for."""
        return self._loaded(name, self.state[p], functools.partial(_run_kernel, compiled=self.compiled))

    @torch.no_grad()
    def set_exact(self, p, value):
        """Let parameter `p` hold fp32 `value` (same shape) as exactly as the recipe can: rounding to nearest, remainders filled."""
        write_weight(value.to(p.device, torch.float32), p, self._low(self.state[p]))

    def low_part(self, p):
        """What completes weight `p` to the value held: int16 remainder, bf16 compensation, fp32 master, or None. See `exact_weight`."""
        return self._low(self.state[p]) if p in self.state else None

    def load_state_dict(self, state_dict):
        # torch's own loader casts floating states to the parameter's dtype: fp32 moments of bf16 weights would come back in bf16
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        if len(ids) != len(params) or len(state_dict["param_groups"]) != len(self.param_groups):
            raise RecipeError(f"optimiser state of {len(ids)} parameters does not fit a model with {len(params)}: it belongs to another model")
        for p, i in zip(params, ids):
            saved, state = state_dict["state"].get(i, {}), self.state[p]
            shapes = {k: (v.shape, v.dtype) for k, v in state.items() if k != "step"}
            if {k: (v.shape, v.dtype) for k, v in saved.items() if k != "step"} != shapes:
                raise RecipeError("optimiser state has other shapes or dtypes than this recipe: it was written by another model or recipe")
            for name in shapes:
                state[name].copy_(saved[name])
            state["step"] = int(saved["step"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update({k: v for k, v in saved.items() if k != "params"})


PEERS = {  # --optimizer: (package to import, name on the package index)
    "adamw": None, "torch": None, "torchastic": ("torchastic", "torchastic"), "optimi": ("optimi", "torch-optimi"),
    "adamw_bf16": ("adamw_bf16", "adamw-bf16"), "torchao": ("torchao", "torchao"), "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
}
PEER_MOMENTS = {"exp_avg": ("exp_avg", "ema", "state1"), "exp_avg_sq": ("exp_avg_sq", "ema_squared", "state2")}  # what peers call them


def _import_peer(module, flag, package=None):
    import logging

    for name in ("torchao", "bitsandbytes"):  # both log about extensions that a CPU does not have
        logging.getLogger(name).setLevel(logging.ERROR)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # and torch about torchao's use of it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(f"{flag} needs the package {package or module}, which can't be imported ({error}): pip install {package or module}") from None
    finally:
        logging.disable(disabled)


def build_optimizer(name, params, r, *, lr, betas, eps, weight_decay, seed):
    """The optimiser of a recipe: ours, whatever holds its moments, or the peer that `name` asks for, as its authors publish it.

    Raises RecipeError when a peer is unknown, absent, or can't serve the recipe.
    """
    common = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    if name not in PEERS:
        raise RecipeError(f"--optimizer {name}: unknown; choose from {', '.join(PEERS)}")
    if name == "adamw":
        return AdamW(params, **common, update=r.update, kahan=r.kahan == "on", master=r.master, exp_avg=r.exp_avg, exp_avg_sq=r.exp_avg_sq, seed=seed)
    if r.update == "stochastic" or r.kahan == "on" or r.master != "none":
        raise RecipeError(f"--optimizer {name} rounds in its own way: drop --stochastic, --kahan and --master, which belong to ours")
    if name == "bitsandbytes":
        if (r.exp_avg, r.exp_avg_sq) != ("int8", "int8"):
            raise RecipeError("--optimizer bitsandbytes is its AdamW8bit, which holds both moments in 8 bits: add --opt8bit")
        return _import_peer(name, "--optimizer bitsandbytes").optim.AdamW8bit(params, **common)
    if r.coded:
        raise RecipeError(f"--opt8bit and --opt4bit are ours: drop --optimizer {name} (--opt8bit --optimizer bitsandbytes is the published one)")
    if name == "torch":
        return torch.optim.AdamW(params, **common)
    if not r.low_weights or r.islands != "none":
        raise RecipeError(f"--optimizer {name} is for bf16 parameters only: add --pure_bf16 and no islands")
    peer = _import_peer(PEERS[name][0], f"--optimizer {name}", PEERS[name][1])
    if name == "optimi":
        return peer.AdamW(params, **common, decouple_lr=False, kahan_sum=True)
    if name == "adamw_bf16":
        return peer.AdamWBF16(params, **common)
    if name == "torchao":
        return _import_peer("torchao.optim", "--optimizer torchao", "torchao")._AdamW(params, **common, bf16_stochastic_round=True)
    return peer.AdamW(params, **common)


# ---------------------------------------------------------------------------------------------------------------------------------------
# EMA


def _ema_kernel(shadow, p, low, h, key, stochastic):
    s = shadow.float()
    s = s + (exact_weight(p, low) - s) * h[0]
    shadow.copy_(_round(s, shadow.dtype, noise_bits(s.numel(), key)[0] if stochastic else None))


class EMA:
    """Exponential moving average of weights: ema += (1-decay)(w - ema), computed in fp32, written as `dtype` and `update` say.

    named_params: [(name, parameter)]. low_part: parameter -> what completes it to the value held (see `exact_weight`), so that an exact
    master is averaged, not its bf16 image. In bf16 to nearest, an entry stops moving once |w - ema| < half an ulp / (1-decay): at
    decay 0.9999 that is 20 to 40 times the value itself, so the average never leaves its start.
    """

    def __init__(self, named_params, decay, dtype="fp32", update="nearest", *, low_part=lambda p: None, seed=0, compiled=True):
        self.decay, self.dtype, self.update_mode, self.seed, self.compiled = decay, DTYPES[dtype], update, seed, compiled
        self.names, self.params = zip(*named_params)
        self.low_part, self.step = low_part, 0
        lows = [low_part(p) for p in self.params]
        keys = [(p.dtype, p.device, low.dtype if low is not None else None) for p, low in zip(self.params, lows)]
        self._buckets = _Bucket.group(self.params, keys)
        self.shadow = dict.fromkeys(self.names)  # in the order of the parameters, whatever bucket each is in
        for bucket in self._buckets:
            params, low = self._inputs(bucket)
            bucket.flat = exact_weight(params, low).detach().to(self.dtype, copy=True)
            for i, view in zip(bucket.indices, bucket.views(bucket.flat, [self.params[i] for i in bucket.indices])):
                self.shadow[self.names[i]] = view

    def _inputs(self, bucket):
        params = [self.params[i].detach() for i in bucket.indices]
        lows = [self.low_part(self.params[i]) for i in bucket.indices]
        return bucket.gather(params), None if lows[0] is None else bucket.gather(lows)

    @torch.no_grad()
    def update(self):
        """Take one step towards the weights as they are now."""
        self.step += 1
        for bucket in self._buckets:
            params, low = self._inputs(bucket)
            h = torch.tensor([1 - self.decay], dtype=torch.float32, device=params.device)
            key = noise_key(self.seed, self.step, bucket.start, stream=1, device=params.device)
            _run_kernel(_ema_kernel, bucket.flat, params, low, h, key, self.update_mode == "stochastic", compiled=self.compiled)

    def state_dict(self):
        return {"step": self.step, "shadow": dict(self.shadow)}

    def load_state_dict(self, state):
        if {k: (v.shape, v.dtype) for k, v in state["shadow"].items()} != {k: (v.shape, v.dtype) for k, v in self.shadow.items()}:
            raise RecipeError("the averaged weights belong to another model or another ema dtype")
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)
        self.step = state["step"]


def parse_average(spec):
    """'0.999:bf16:stochastic' -> (0.999, 'bf16', 'stochastic'); the update is 'nearest' when left out. Raises RecipeError."""
    decay, _, rest = spec.partition(":")
    dtype, _, update = rest.partition(":")
    try:
        good = 0 <= float(decay) < 1 and dtype in SITES["ema"].values and (update or "nearest") in SITES["ema_update"].values
    except ValueError:
        good = False
    if not good:
        raise RecipeError(f"--average {spec}: write DECAY:DTYPE or DECAY:DTYPE:UPDATE, as in 0.9999:bf16 or 0.999:bf16:stochastic")
    return float(decay), dtype, update or "nearest"


# ---------------------------------------------------------------------------------------------------------------------------------------
# Precision: a recipe carried out on a model

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.RMSNorm)


def island_modules(model, islands):
    """Modules that own parameters and stay fp32: norm = normalisation layers, embed = 'embed' in the name, final = 'out' at the head of the
    name or 'final' anywhere in it. Raises RecipeError when the net has none of a kind that was asked for."""
    owners = [(name, m) for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    belongs = {"norm": lambda name, m: isinstance(m, NORMS), "embed": lambda name, m: "embed" in name,
               "final": lambda name, m: re.match(r"out(\.|$)|(.*\.)?final(\.|$)", name)}
    chosen = []
    for island in islands.split("+") if islands != "none" else []:
        found = [m for name, m in owners if belongs[island](name, m)]
        if not found:
            raise RecipeError(f"--set islands={islands}: this net has no {island} parameters to keep in fp32; leave {island} out")
        chosen += [m for m in found if m not in chosen]
    return chosen


def _sparse24(model, r, decay):
    if r.sparse24 == "none":
        return None
    sparsity = _beside("sparsity", "2:4 weights need", "use sparse24=none")
    try:
        device = next(model.parameters()).device
        return sparsity.Sparse24(model, r.sparse24, decay, support(*device_facts(device))["sparse24"])
    except sparsity.SparsityError as error:
        raise RecipeError(str(error)) from None


def _cast_model(model, r):
    """Bring the model's parameters and buffers to the recipe's weight dtype; islands keep fp32 and cast at their borders."""
    if not r.low_weights:
        return model.float()
    islands = island_modules(model, r.islands)
    exact = [{name: t.clone() for name, t in module.state_dict().items()} for module in islands]
    model.to(torch.bfloat16)
    for module, values in zip(islands, exact):
        module.float().load_state_dict(values)
        module.register_forward_pre_hook(lambda m, args: tuple(a.float() if torch.is_tensor(a) and a.is_floating_point() else a for a in args))
        module.register_forward_hook(lambda m, args, out: out.to(torch.bfloat16))
    return model


def _uncast(net):
    """A copy of a cast model whose islands no longer cast at their borders."""
    for m in net.modules():
        m._forward_hooks.clear()
        m._forward_pre_hooks.clear()
    return net


class Precision:
    """A recipe carried out: casts `model` in place, owns optimiser, average, loss scaler and accumulators, and measures what rounding does.

    model: any nn.Module, on its device. accumulate: micro-batches a step. clip_grad: largest gradient norm, 0 for none. averages: further
    averages kept beside the recipe's, as 'DECAY:DTYPE[:UPDATE]', to compare what generation reads after one training. growth_interval: steps
    without an overflow after which a dynamic loss scale doubles. sparse24_decay: lambda of sparse24=srste, None for the paper's (see sparsity.py,
    which a recipe with sparse24 needs beside this file).
    Call it like the model; backward(loss) after each micro-batch; step() after the last. Raises RecipeError as `recipe` and
    `build_optimizer` do.
    """

    def __init__(self, model, r=Recipe(), *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, optimizer="adamw", ema_decay=0.999,
                 averages=(), clip_grad=0.0, accumulate=1, growth_interval=2000, seed=0, sparse24_decay=None):
        device = next(model.parameters()).device
        r = r if device.type == "meta" else r.on(device)
        self.sparse = _sparse24(model, r, sparse24_decay)  # first: it prunes by the weights as they came, not by their bf16 images
        self.recipe, self.clip_grad, self.accumulate, self.optimizer_name = r, clip_grad, accumulate, optimizer
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        originals = [p.detach().float().clone() for _, p in named] if r.low_weights and (r.master != "none" or r.kahan == "on") else None
        self.model = _cast_model(model, r)
        self.quantised = _fp8("quantise", self.model, r.generation, True) if r.quantises else None  # the report; generator() does it
        self.fp8, self.example = _fp8("convert", self.model, r.fp8) if r.fp8 else None, None  # example: shapes that FLOPs are counted on
        self.forward = self.model  # what __call__ runs: the trainer puts a compiled or distributed wrapper here
        self.named_params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in self.named_params]
        self.device = self.params[0].device
        self.optimizer = build_optimizer(optimizer, self.params, r, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, seed=seed)
        self.low_part = getattr(self.optimizer, "low_part", lambda p: None)
        if originals is not None:  # the master starts from the fp32 initial weights, not from their bf16 image
            for p, original in zip(self.params, originals):
                self.optimizer.set_exact(p, original)
        if optimizer == "torchastic":
            self._torchastic = _import_peer("torchastic", "--optimizer torchastic").StochasticAccumulator
            self._torchastic.assign_hooks(self.model)
        average = functools.partial(EMA, self.named_params, low_part=self.low_part, seed=seed)
        self.ema = average(ema_decay, r.ema, r.ema_update)
        self.averages = {"ema": self.ema, **{spec: average(*parse_average(spec)) for spec in averages}}
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=r.loss_scale == "dynamic", growth_interval=growth_interval)
        self.sums = {}  # parameter -> fp32 sum of its micro-batches' gradients
        self.reduce_sums = None  # set by a distributed trainer: sums `self.sums` over the ranks
        self.skipped = 0
        self.set_tf32()

    # -- one training step

    def set_tf32(self):
        """Allow TF32 or forbid it, for the whole process, as this recipe says: the last one made decides, so call it where several take turns."""
        # said for every recipe: left alone, cuDNN convolves fp32 tensors in TF32
        torch.set_float32_matmul_precision("high" if self.recipe.compute == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.recipe.compute == "tf32"

    @contextmanager
    def autocast(self):
        """The context that forward runs in: torch.autocast for 8- and 16-bit compute on fp32 weights, and Transformer Engine's; else nothing."""
        r, none = self.recipe, nullcontext()
        low = not r.low_weights and r.compute in ("bf16", "fp16", "fp8")
        with torch.autocast(self.device.type, dtype=r.dtype("compute")) if low else none, self.fp8.context() if self.fp8 else none:
            yield

    def __call__(self, x, *args):
        """The model on x (cast to the weights' dtype unless integer) and further arguments as they are: a timestep keeps its own site's dtype.

        Returns the output in the dtype of the loss site.
        """
        if (self.fp8 or self.quantised) and self.example is None:
            self.example = [a.detach().to("meta") if torch.is_tensor(a) else a for a in (x, *args)]
        with self.autocast():
            out = self.forward(self._cast(x), *args)
        return out.to(self.recipe.dtype("loss"))

    def _cast(self, x):
        return x.to(torch.bfloat16) if self.recipe.low_weights and x.is_floating_point() else x

    def observe(self, on):
        """Say before a step's first forward whether it will be measured: FP8 layers then count what their casts lose, for step()'s report."""
        if self.fp8:
            self.fp8.observe(on)

    @property
    def keeps_sums(self):
        # fp32 gradients add up in p.grad already; bf16 ones need a place of their own to be summed in fp32
        return (self.accumulate > 1 or self.recipe.sparse24 == "srste") and self.recipe.low_weights and self.recipe.accumulate == "fp32"

    def backward(self, loss):
        """Backward of one micro-batch's mean loss; gradients are averaged over `accumulate` calls."""
        self.scaler.scale(loss / self.accumulate).backward()
        if self.keeps_sums:
            for p in self.params:
                if p.grad is not None:
                    self.sums[p] = p.grad.float() if p not in self.sums else self.sums[p].add_(p.grad)
                    p.grad = None

    @torch.no_grad()
    def step(self, measure=False):
        """Clip, update weights and average, clear gradients. Returns {} or, with `measure`, what rounding did to this step:

        update_survival: share of the non-zero weight updates that changed the value held; exp_avg_sq_moved and ema_moved: share of
        entries that changed where there was something to change; update_ratio: |update| / |weight|; grad_norm; nonfinite_grads: entries;
        loss_scale and skipped steps for fp16; for FP8, after observe(True), what fp8.Covered.step returns. Shares are taken on up to 65,536
        entries a bucket, evenly spread.
        """
        if self.optimizer_name == "torchastic":
            for p in self.params:  # reassign_grad_buffer fails on a parameter that got no gradient; give it a zero one
                if not hasattr(p, "acc_grad"):
                    p.acc_grad = torch.zeros_like(p)
            self._torchastic.reassign_grad_buffer(self.model)
        if self.reduce_sums and self.sums:
            self.reduce_sums(list(self.sums.values()))
        grads = self.sums or {p: p.grad for p in self.params if p.grad is not None}
        if not grads:
            raise RecipeError("step() found no gradients: call backward(loss) before it, with a loss that depends on the model's parameters")
        self.scaler.unscale_(self.optimizer)
        if self.sparse:
            self.sparse.add_to(grads)
        report, scale = self.fp8.step() if self.fp8 else {}, 1.0
        if self.clip_grad or measure:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()), dtype=torch.float32)))
            if self.clip_grad:
                scale = min(1.0, self.clip_grad / (norm.item() + 1e-6)) if norm.isfinite() else 1.0
            if measure:
                report["grad_norm"] = norm.item()
                report["nonfinite_grads"] = sum(int((~g.isfinite()).sum()) for g in grads.values())
        before, skipped = self._snapshot(grads, scale) if measure else None, self.skipped
        self._optimizer_step(grads, scale)
        if self.sparse:
            self.sparse.hold(self.low_part)
        if measure:
            if self.skipped == skipped:  # a skipped step has no updates that could survive
                report.update(self._update_report(before))
            report["skipped_steps"] = self.skipped
            if self.scaler.is_enabled():
                report["loss_scale"] = self.scaler.get_scale()
            shadows = [self._sample(t).clone() for t in self.ema.shadow.values()]
        for average in self.averages.values():
            average.update()
        if measure:
            report["ema_moved"] = self._ema_report(shadows)
        self.sums = {}
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _optimizer_step(self, grads, scale):
        ours = isinstance(self.optimizer, AdamW)
        if not ours and scale != 1.0:
            torch._foreach_mul_(list(grads.values()), scale)
        if not ours and self.sums:
            for p, g in self.sums.items():
                p.grad = g.to(p.dtype)
        options = dict(grad_scale=scale, grads=self.sums or None) if ours else {}
        if not self.scaler.is_enabled():
            self.optimizer.step(**options)
            return
        old = self.scaler.get_scale()
        self.scaler.step(self.optimizer, **options)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < old  # the scaler backs off exactly when it skipped

    # -- what rounding does

    @staticmethod
    def _sample(t):
        t = t.detach().reshape(-1)
        return t[:: max(1, t.numel() // 65536)]

    def _held(self, p):
        low = self.low_part(p)
        return exact_weight(self._sample(p), None if low is None else self._sample(low))

    def moment(self, p, name):
        """exp_avg or exp_avg_sq of parameter `p` as the optimiser holds it, codes as the fp32 values that they stand for; None where a peer keeps no such tensor."""
        if isinstance(self.optimizer, AdamW):
            return self.optimizer.moment(p, name)
        state = self.optimizer.state.get(p, {})
        found = next((state[k] for k in PEER_MOMENTS[name] if k in state), None)
        if not torch.is_tensor(found) or found.numel() != p.numel():
            return None
        if found.dtype == torch.uint8:
            i = 1 if name == "exp_avg" else 2
            library = _import_peer("bitsandbytes.functional", "--optimizer bitsandbytes", "bitsandbytes")
            return library.dequantize_blockwise(found, absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256)
        return found

    def _snapshot(self, grads, scale):
        rows = []
        for p, g in grads.items():
            g, held, moment = self._sample(g), self._held(p).clone(), self.moment(p, "exp_avg_sq")
            moment = None if moment is None else self._sample(moment).clone()
            rows.append((p, g != 0, held, self._intended(p, g.float() * scale, held, moment), moment))
        return rows

    def _update_report(self, rows):
        wanted = survived = moving = moved = 0
        update_norm = weight_norm = 0.0
        for p, has_grad, held, target, moment in rows:
            after = self._held(p)
            want = has_grad if target is None else target != 0
            wanted += int(want.sum())
            survived += int((want & (after != held)).sum())
            change = (after - held) if target is None else target
            update_norm += float(change.double().square().sum())
            weight_norm += float(held.double().square().sum())
            if moment is not None:
                new = self._sample(self.moment(p, "exp_avg_sq"))
                changeable = has_grad | (moment != 0)
                moving += int(changeable.sum())
                moved += int((changeable & (new != moment)).sum())
        report = {"update_survival": survived / max(1, wanted), "update_ratio": math.sqrt(update_norm / max(weight_norm, 1e-30))}
        if moving:
            report["exp_avg_sq_moved"] = moved / moving
        return report

    def _intended(self, p, g, held, exp_avg_sq):
        """The fp32 update that the next step of our AdamW, or of bitsandbytes', wants before any rounding of weight or moments; None for other peers."""
        if exp_avg_sq is None or self.optimizer_name not in ("adamw", "bitsandbytes"):
            return None
        group = next(group for group in self.optimizer.param_groups if any(p is q for q in group["params"]))
        h = AdamW._scalars(group, self.optimizer.state[p]["step"] + 1, 1.0, p.device)
        m, v = _moments(g, self._sample(self.moment(p, "exp_avg")), exp_avg_sq, h, lambda a, b, c: a * b + c)
        return h[6] * m / (v.sqrt() / h[4] + h[5]) - group["lr"] * group["weight_decay"] * held

    def _ema_report(self, before):
        moving = moved = 0
        for (name, p), old in zip(self.named_params, before):
            differs = self._held(p) != old.float()
            moving += int(differs.sum())
            moved += int((differs & (self._sample(self.ema.shadow[name]) != old)).sum())
        return moved / max(1, moving)

    # -- reading the weights

    @torch.no_grad()
    def generator(self, source="ema"):
        """A frozen copy of the model for generation, called like `run`, holding averaged ('ema' or a further average) or last ('raw') weights.

        Its precision is the generation site's: 'compute' as trained, but FP8 layers compute in bf16; 'fp8' through those; 'fp32' a full-precision
        copy, 'autocast' that copy under bf16; 'bf16' a copy in bf16 whatever was trained; 'int8', and 'fp8' of a net trained otherwise: the
        autocast copy with its Linear layers quantised (fp8.quantise). Raises RecipeError for a source that this run does not hold.
        """
        r = self.recipe
        with self.fp8.plain(self.model) if self.fp8 and r.generation != "fp8" else nullcontext():
            net = copy.deepcopy(self.model).requires_grad_(False).eval()
        if r.generation in ("fp32", "bf16", "autocast") or r.quantises:
            _uncast(net)
            low = r.generation == "bf16"
            net.to(torch.bfloat16 if low else torch.float32)
            r = Recipe(weights="bf16" if low else "fp32", compute="fp32" if r.generation == "fp32" else "bf16",
                       timesteps=r.timesteps, sampler=r.sampler, loss=r.loss)
        values = self.weights(source)
        for name, p in net.named_parameters():
            if name in values:
                p.copy_(values[name])
        if self.sparse:
            self.sparse.convert(net)
        view = copy.copy(self)
        view.model = view.forward = net
        view.recipe = r
        view.fp8 = _fp8("quantise", net, self.recipe.generation) if self.recipe.quantises else self.fp8 if r.generation == "fp8" else None
        return view

    def gradient_snr(self, loss):
        """{"fp8": dB, "bf16": dB}: signal-to-noise ratio of the gradients of loss(run), a scalar of one batch, against those of an fp32
        copy of the weights; "bf16" of that copy under autocast, which is what FP8 training would be without FP8. For compute=fp8."""
        def view(net, r, covered=None):
            made = copy.copy(self)
            made.model = made.forward = net
            made.recipe, made.fp8 = r, covered
            return made

        with self.fp8.plain(self.model):
            exact, bf16 = (_uncast(copy.deepcopy(self.model)).float() for _ in range(2))
        low, site = copy.deepcopy(self.model), self.recipe.loss  # a copy: delayed scaling records what it sees
        runs = {exact: view(exact, Recipe(loss=site)), bf16: view(bf16, Recipe(compute="bf16", loss=site)),
                low: view(low, self.recipe, self.fp8)}
        snr = lambda net: _fp8("gradient_snr", net, exact, lambda model: loss(runs[model]))["all"]
        return {"fp8": snr(low), "bf16": snr(bf16)}

    def weights(self, source="ema"):
        """{name: tensor} of averaged ('ema' or a further average, in its dtype) or last ('raw', fp32 value held) weights, pruned under sparse24.

        Raises RecipeError for a source that this run does not hold."""
        if source not in ("raw", *self.averages):
            raise RecipeError(f"weights '{source}': this run holds {', '.join(['raw', *self.averages])}")
        if source != "raw":
            values = dict(self.averages[source].shadow)
        else:
            values = {name: exact_weight(p.detach(), self.low_part(p)) for name, p in self.named_params}
        return self.sparse.prune(values) if self.sparse else values

    # -- state

    def state_dict(self):
        """Tensors and plain values only: loads with weights_only=True."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "averages": {k: a.state_dict() for k, a in self.averages.items()},
                "scaler": self.scaler.state_dict(), "skipped": self.skipped, **({"sparse24": self.sparse.state_dict()} if self.sparse else {})}

    def load_state_dict(self, state):
        self.model.load_state_dict(self.fp8.adapt(self.model.state_dict(), state["model"]) if self.fp8 else state["model"])
        if isinstance(self.optimizer, AdamW):
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            _load_peer_state(self.optimizer, state["optimizer"])
        if self.sparse:
            self.sparse.load_state_dict(state.get("sparse24"), self.low_part)
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]

    def ledger(self):
        """The precision of this run: `Ledger` of (site, value, bytes a parameter or None, why), bytes as allocated."""
        r, n = self.recipe, sum(p.numel() for p in self.params)
        low = {"compensation": 0, "remainder": 0, "master": 0}
        moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        for p in self.params:
            if isinstance(self.optimizer, AdamW):
                for name, t in self.optimizer.state[p].items():
                    if name != "step":
                        (low if name in low else moments)[name.removesuffix("_scale")] += t.nbytes
            else:
                for name in moments:
                    moments[name] += _peer_moment_bytes(self.optimizer_name, r, p)
                low["compensation"] += p.numel() * {"optimi": 2, "adamw_bf16": 2}.get(self.optimizer_name, 0)
        plain = {}  # moment held in codes -> parameters whose moment is not
        for name in moments:
            if getattr(r, name) in CODES:
                coder = _coder(getattr(r, name))
                plain[name] = sum(p.numel() for p in self.params if not coder.takes(p.numel()))
                moments[name] += coder.table_bytes(name == "exp_avg", r.update == "stochastic") * (plain[name] < n)  # shared by all tensors
        weights = sum(p.nbytes for p in self.params)
        islands = sum(p.numel() for p in self.params if p.dtype == torch.float32) if r.low_weights else 0
        sizes = {"weights": weights / n, "grads": weights / n, "master": (low["remainder"] + low["master"]) / n, "kahan": low["compensation"] / n,
                 "exp_avg": moments["exp_avg"] / n, "exp_avg_sq": moments["exp_avg_sq"] / n,
                 "accumulate": 4.0 if self.keeps_sums else 0.0,
                 "ema": sum(t.nbytes for average in self.averages.values() for t in average.shadow.values()) / n}
        if self.fp8 and self.fp8.flops is None and self.example is not None:
            self.fp8.count_flops(self.model, self._cast(self.example[0]), *self.example[1:])
        if self.quantised and self.quantised.flops is None and self.example is not None:
            with self.fp8.plain(self.model) if self.fp8 else nullcontext():
                self.quantised.count_flops(self.model, self._cast(self.example[0]), *self.example[1:], backward=False)
        rows = []
        for site, spec in SITES.items():
            value = getattr(r, site)
            why = spec.why.get(value, f"{islands:,} of {n:,} parameters stay fp32")
            if site == "update" and value == "nearest" and "bf16" not in (r.weights, r.exp_avg, r.exp_avg_sq):
                why = "changes of a moment under half a gap between codes are lost" if r.coded else ""  # nothing is written in bf16
            if site in plain:
                why += f"; {plain[site]:,} of {n:,} in small tensors stay fp32"
            if self.optimizer_name != "adamw" and site in ("update", "exp_avg", "exp_avg_sq", "kahan"):
                why = f"as {self.optimizer_name} does it"
            if site == "compute" and self.fp8:
                why = self.fp8.summary()
            if site == "generation" and value == "compute" and self.fp8:
                why = "samples are drawn without FP8, in bf16"
            if site == "generation" and self.quantised:
                why = f"quantised after training: {self.quantised.summary()}; all else in bf16"
            rows.append(dict(site=site, value=value, bytes=sizes.get(site), why=why))
            if site == "sparse24" and self.sparse:
                found = self.sparse.report(torch.bfloat16 if r.generation == "bf16" or (r.low_weights and r.generation == "compute") else torch.float32)
                rows[-1].update(bytes=found["bytes"] / n, why=f"{why}: {found['why']}", layers=found["layers"])
        details = {"fp8": self.fp8, "generation": self.quantised}
        return Ledger(rows, n, {name: detail for name, detail in details.items() if detail})


class Ledger:
    """The printable table of a run's sites; `rows` and `json()` for programs. details: {name: what a site covers}, with str(), json() and
    share, the share of the FLOPs."""

    STATE = ("weights", "grads", "accumulate", "master", "kahan", "exp_avg", "exp_avg_sq")

    def __init__(self, rows, parameters, details={}):
        self.rows, self.parameters, self.details = rows, parameters, details
        self.state_bytes = sum(row["bytes"] for row in rows if row["site"] in self.STATE)

    @property
    def flops_share(self):
        """{"fp8" | "generation" | "sparse24": share of the FLOPs that it covers}, where known."""
        shares = {row["site"]: sum(layer["flops"] or 0 for layer in row["layers"]) for row in self.rows if "layers" in row}
        return {name: share for name, share in [*shares.items(), *((n, d.share) for n, d in self.details.items())] if share is not None}

    def json(self):
        return {"parameters": self.parameters, "bytes_per_parameter": self.state_bytes, "sites": self.rows, "flops_share": self.flops_share,
                **{name: detail.json() for name, detail in self.details.items()}}

    def __str__(self):
        lines = [f"{'site':<11} {'value':<11} {'bytes/param':>11}  why"]
        for row in self.rows:
            size = "" if row["bytes"] is None else f"{row['bytes']:.2f}"
            lines.append(f"{row['site']:<11} {row['value']:<11} {size:>11}  {row['why']}".rstrip())
            if "layers" in row:
                import sparsity
                lines += sparsity.lines(row["layers"])
        lines.append(f"{self.parameters:,} parameters; weights + gradients + optimiser: {self.state_bytes:.2f} bytes a parameter "
                     f"({self.parameters * self.state_bytes / 2**20:.1f} MiB; fp32: 16)")
        return "\n".join([*lines, *map(str, self.details.values())])


def _peer_moment_bytes(name, r, p):
    """Bytes of one moment of `p` in an optimiser that allocates at its first step. bitsandbytes: 1 byte a value + an fp32 absmax a block of
    256, and plain fp32 for tensors under 4096 values."""
    n = p.numel()
    if r.exp_avg == "int8":
        return 4 * n if n < 4096 else n + 4 * math.ceil(n / 256)
    return n * p.element_size()


def _load_peer_state(optimizer, state):
    """torch's loader casts floating states to the parameter's dtype; put each saved tensor back as it was saved."""
    optimizer.load_state_dict(state)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in state["param_groups"] for i in group["params"]]
    for p, i in zip(params, ids):
        for name, value in state["state"].get(i, {}).items():
            if torch.is_tensor(value):
                optimizer.state[p][name] = value.to(p.device, copy=True) if value.dim() else value.clone()


def cpu_threads():
    """Cores this process may use: what a two-process run has to share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
