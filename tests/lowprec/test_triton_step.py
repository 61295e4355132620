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
from lowprec.kernels import compiled, exact_step
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
    exact_step.moments(g, m, v, row, numbers, root)
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
    for low, kind in itertools.product(LOWS, AVERAGES[1:]):
        both = (averaged(low, kind, kernel) for kernel in (generic_average, average_by_triton))
        found[str((low, kind))] = differing(*both)
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


@pytest.mark.parametrize("low, average", itertools.product(LOWS, AVERAGES[1:]), ids=str)
def test_the_average_has_the_bits_of_the_cpu(low, average, differences):
    assert differences[str((low, average))] == 0


# ---- Compiled, without a GPU -------------------------------------------------------------------------------


def instructions(exact, kind, capability=80, **options):
    """{floating-point instruction: how often} of the kernel as compiled for a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowprec.kernels import triton_step

    pointers = dict(p="*bf16", g="*bf16", m="*fp32", v="*fp32", low="*i16", row="*fp32", key="*i32")
    pointers.update(average="*bf16", average_share="*fp32", average_key="*i32", n="i32")
    constants = dict(STOCHASTIC=True, EXACT=exact, KIND=kind, AVERAGE=2, BLOCK=triton_step.BLOCK)
    signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=triton_step._adamw, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return set(re.findall(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|ex2)\.[a-z0-9_.]*f32)\b", ptx))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capability", [80, 90])
def test_every_operation_rounds_once(capability, cache):
    from lowprec.kernels.triton_step import OPTIONS

    rounds = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "div", "sqrt")}
    assert instructions(False, 1, capability, **OPTIONS) == rounds
    # torch's lerp and addcmul, which an exact step equals, do contract
    assert instructions(True, 1, capability, **OPTIONS) - rounds == {"fma.rn.f32"}


def test_without_the_option_products_would_be_contracted(cache):
    assert "fma.rn.f32" in instructions(False, 0)


# ---- On a GPU ----------------------------------------------------------------------------------------------

WRITING = [{}, {"update": "stochastic"}, {"update": "stochastic", "kahan": True}, {"master": "split"}]
MOMENTS = [{}, {"exp_avg": "bf16", "exp_avg_sq": "bf16"}]


@pytest.mark.gpu
@pytest.mark.parametrize("writing, moments", itertools.product(WRITING, MOMENTS), ids=str)
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
    exact = not moments and writing.get("update") != "stochastic"
    entries = sum(t.numel() for t in found["cpu"])
    assert differing(found["cpu"], found["cuda"]) <= (entries // 10_000 if exact else 0)
