"""The Triton kernel of AdamW's step: its bits against the CPU's, by Triton's interpreter; the instructions
that it compiles to; and the bits on a GPU where there is one.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from common import draw, uncompiled
from step_cases import AVERAGES, CASES, DTYPES, LOWS, N, differing, flat, generic, step

from lowprec import rounding
from lowprec.formats import FORMATS, Coded
from lowprec.kernels import choose, compiled, exact_step
from lowprec.optimizers.adamw import AdamW
from lowprec.optimizers.average import EMA
from lowprec.rounding import StepAverage, ema_kernel

ROOT = Path(__file__).resolve().parents[2]
triton = pytest.importorskip("triton", reason="needs Triton, which torch brings along on Linux alone")

# where choose.step asks for the bits of torch's lerp and addcmul
EXACT = [
    case
    for case in CASES
    if case[1] == "fp32" and (case[3] == "nearest" or case[2] in ("remainder", "master"))
]


def nearest_root(t):
    """fp32 roots, each to nearest: MKL, which torch asks on a CPU, misses one of 160."""
    return torch.from_numpy(np.sqrt(t.numpy()))


def exact(p, g, moments, low, row, numbers, key, optimizer, average):
    """exact_step.adamw, with the nearest root of each second moment."""
    m, v = moments
    root = torch.empty(N)
    exact_step.update_moments(g, m, v, row, numbers, root)
    root.copy_(nearest_root(v))
    exact_step._weight_kernel(p, m, root, low, row, average)


def by_triton(p, g, moments, low, row, numbers, key, optimizer, average, exact=False):
    from lowprec.kernels.triton_step import adamw

    adamw(p, g, moments, low, row, key, optimizer.update == "stochastic", exact, average)


def averaged(low, average, kernel):
    """The average after a step by kernel(average, p, low) from the weights of a case."""
    p, _, _, low = flat(("bf16", "fp32", low, "nearest"))
    dtype, stochastic = average
    shadow = draw(N, seed=6).to(DTYPES[dtype])
    moved = StepAverage(shadow, torch.tensor([1e-2]), rounding.noise_key(4, 7, 12345), stochastic)
    kernel(moved, p, low)
    return [shadow]


def average_by_triton(*args):
    from lowprec.kernels.triton_step import ema

    ema(*args)


def generic_average(average, p, low):
    flat, *how = average
    compiled.fused(ema_kernel, flat, p, low, *how)


# moments in codes: (what completes the weights, which moments are in codes)
IN_CODES = [
    *((low, ("exp_avg", "exp_avg_sq")) for low in LOWS),
    *(("none", (name,)) for name in ("exp_avg", "exp_avg_sq")),
]
CPU = torch.device("cpu")


def in_codes(moments, names):
    """Moments of which those in `names` are int8 codes, with noise of their own."""
    found, coder = [], FORMATS["int8"]
    for kind, (name, values) in enumerate(zip(AdamW.moments, moments, strict=True)):
        signed = AdamW.signed[name]
        codes, scales = coder.new(N, CPU)
        coder.encode(values, codes, scales, signed, rounding.noise_key(9, kind), compiled=False)
        key = rounding.noise_key(3, 7, 12345, kind + 1)
        found.append(Coded(coder, codes, scales, signed, key) if name in names else values)
    return found


def outside(kernel):
    """The kernel with codes that are read before it and written after it."""

    def whole(p, g, moments, *others):
        values = [m if torch.is_tensor(m) else m.decoded(N, compiled=False) for m in moments]
        kernel(p, g, values, *others)
        for held, value in zip(moments, values, strict=True):
            if not torch.is_tensor(held):
                held.encode(value, compiled=False)

    return whole


def step_in_codes(case, kernel):
    """[tensor] after a step of bf16 weights by the kernel. case: of IN_CODES."""
    low, names = case
    kept = []

    def with_codes(p, g, moments, *others):
        kept.extend(in_codes(moments, names))
        kernel(p, g, kept, *others)

    tensors = step(("bf16", "fp32", low, "stochastic"), AVERAGES[3], with_codes)
    for moment in kept:
        tensors += [moment] if torch.is_tensor(moment) else [moment.codes, moment.scales]
    return tensors


# ---- By the interpreter ------------------------------------------------------------------------------------


def rounds_fma_once():
    """The interpreter's tl.fma rounds the product, and then the sum. In fp64 the product is exact, and the
    sum so near that rounding it again makes no difference here.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    InterpreterBuilder.create_fma = fma


def trained_in_codes():
    """Weights after two steps with moments in int8 codes, by whatever kernel makes them."""
    params = [torch.nn.Parameter(draw(n, seed=n).bfloat16()) for n in (5000, 70)]
    optimizer = AdamW(params, update="stochastic", exp_avg="int8", exp_avg_sq="int8")
    for at in range(2):
        for p in params:
            p.grad = draw(p.numel(), seed=at).bfloat16()
        optimizer.step()
    return [p.detach() for p in params]


def handed_over():
    """Entries of `trained_in_codes` that differ where choose.step takes a CPU for a GPU. No code may be
    decoded outside of the kernel then.
    """
    from lowprec.kernels import triton_step

    choose.by_cpu_step = lambda s: False
    theirs = trained_in_codes()
    choose._triton_for = lambda *flat: triton_step
    Coded.decoded = None
    return differing(theirs, trained_in_codes())


def interpreted():
    """{case: entries that differ}, in a process whose Triton interprets. Averages take turns."""
    # compiling all cases takes minutes; test_adamw.py shows that compiled code writes the same bits, but for
    # roots, which it takes to the nearest
    compiled._compiled, torch.Tensor.sqrt = uncompiled, nearest_root
    found = {}
    for k, case in enumerate(CASES):
        average = AVERAGES[(k + k // len(AVERAGES)) % len(AVERAGES)]
        found[str(case)] = differing(step(case, average, generic), step(case, average, by_triton))
    rounds_fma_once()
    for k, case in enumerate(EXACT):
        average = AVERAGES[k % len(AVERAGES)]
        ours = step(case, average, functools.partial(by_triton, exact=True))
        found[f"exact {case}"] = differing(step(case, average, exact), ours)
    for case in IN_CODES:
        exactly = case[0] == "remainder"
        theirs = step_in_codes(case, outside(exact if exactly else generic))
        ours = step_in_codes(case, functools.partial(by_triton, exact=exactly))
        found[f"in codes {case}"] = differing(theirs, ours)
    for low, kind in itertools.product(LOWS, AVERAGES[1:]):
        both = (averaged(low, kind, kernel) for kernel in (generic_average, average_by_triton))
        found[str((low, kind))] = differing(*both)
    found["handed over"] = handed_over()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def differences():
    code = "import test_triton_step as t; t.interpreted()"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "lowprec")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_kernel_writes_the_bits_of_the_cpu(case, differences):
    assert differences[str(case)] == 0


@pytest.mark.parametrize("case", EXACT, ids="-".join)
def test_the_exact_step_has_the_bits_of_torchs_operations(case, differences):
    assert differences[f"exact {case}"] == 0


@pytest.mark.parametrize("case", IN_CODES, ids=str)
def test_moments_in_codes_have_the_bits_of_the_torch_code(case, differences):
    assert differences[f"in codes {case}"] == 0


def test_an_optimiser_hands_its_codes_over(differences):
    assert differences["handed over"] == 0


@pytest.mark.parametrize("low, average", itertools.product(LOWS, AVERAGES[1:]), ids=str)
def test_the_average_has_the_bits_of_the_cpu(low, average, differences):
    assert differences[str((low, average))] == 0


# ---- Compiled, without a GPU -------------------------------------------------------------------------------


def instructions(exact, kind, capability=80, stretches=0, **options):
    """{floating-point instruction} of the kernel as compiled for a GPU. stretches: of moments in codes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowprec.kernels import triton_step

    moment = "*u8" if stretches else "*fp32"
    pointers = dict(p="*bf16", g="*bf16", m=moment, v=moment, low="*i16", row="*fp32", key="*i32")
    pointers.update(average="*bf16", average_share="*fp32", average_key="*i32", n="i32")
    for name in ("m", "v"):
        of_codes = {f"{name}_{part}": "*fp32" for part in ("scales", "table", "line")}
        pointers.update({**of_codes, f"{name}_key": "*i32"})
    constants = dict(STOCHASTIC=True, EXACT=exact, KIND=kind, AVERAGE=2, BLOCK=triton_step.ENTRIES_A_PROGRAM)
    constants.update(M_STRETCHES=stretches, V_STRETCHES=stretches)
    signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=triton_step._adamw, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return set(re.findall(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|ex2)\.[a-z0-9_.]*f32)\b", ptx))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", [80, 90])
def test_every_operation_rounds_once(capability, cache):
    from lowprec.kernels.triton_step import COMPILE_OPTIONS

    rounds = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "div", "sqrt")}
    assert instructions(False, 1, capability, **COMPILE_OPTIONS) == rounds
    assert instructions(False, 1, capability, stretches=7, **COMPILE_OPTIONS) == rounds
    # torch's lerp and addcmul, which an exact step equals, do contract
    assert instructions(True, 1, capability, **COMPILE_OPTIONS) - rounds == {"fma.rn.f32"}


def test_without_the_option_products_would_be_contracted(cache):
    assert "fma.rn.f32" in instructions(False, 0)


# ---- On a GPU ----------------------------------------------------------------------------------------------

WRITING = [{}, {"update": "stochastic"}, {"update": "stochastic", "kahan": True}, {"master": "split"}]
MOMENTS = [{}, {"exp_avg": "bf16", "exp_avg_sq": "bf16"}]
CODES = {"exp_avg": "int8", "exp_avg_sq": "int8"}
BY_NOISE = [*WRITING[1:3], {"update": "stochastic", "master": "split"}]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "writing, moments", [*itertools.product(WRITING, MOMENTS), *((how, CODES) for how in BY_NOISE)], ids=str
)
def test_a_gpu_writes_the_bits_of_a_cpu(writing, moments):
    weights = [draw(*shape, seed=i).bfloat16() for i, shape in enumerate([(700, 500), (50,), (3, 3)])]
    found = {}
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(w.to(device, copy=True)) for w in weights]
        optimizer = AdamW(params, lr=1e-3, weight_decay=0.1, **writing, **moments)
        named = list(zip("abc", params, strict=True))
        optimizer.average = EMA(named, 0.9, low_part=optimizer.low_part)
        for k in range(5):
            for i, p in enumerate(params):
                p.grad = draw(*p.shape, seed=100 * k + i).bfloat16().to(device)
            optimizer.step()
            optimizer.average.update()
        found[device] = [t.cpu() for t in optimizer.average.shadow.values()]
        found[device] += [p.detach().cpu() for p in params]
        found[device] += [optimizer.moment(p, name).cpu() for p in params for name in optimizer.moments]
    # the exact step of a CPU takes its roots from MKL, which misses the nearest in one of 160
    exact = writing.get("master") == "split" or (not moments and writing.get("update") != "stochastic")
    entries = sum(t.numel() for t in found["cpu"])
    assert differing(found["cpu"], found["cuda"]) <= (entries // 10_000 if exact else 0)
