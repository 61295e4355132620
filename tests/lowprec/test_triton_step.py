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

from lowprec import kernels, rounding
from lowprec.kernels import compiled, exact_step
from lowprec.optimizers.average import EMA
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.state import KINDS, Coded, Plain
from lowprec.rounding import ema_kernel

ROOT = Path(__file__).resolve().parents[2]
triton = pytest.importorskip("triton", reason="needs Triton, which torch brings along on Linux alone")

# where a step asks for the bits of torch's lerp and addcmul
EXACT = [
    case
    for case in CASES
    if case[1] == "fp32" and (case[3] == "nearest" or case[2] in ("remainder", "master"))
]


def nearest_root(t):
    """fp32 roots, each to nearest: MKL, which torch asks on a CPU, misses one of 160."""
    return torch.from_numpy(np.sqrt(t.numpy()))


KEYS = [rounding.noise_key(3, 7, 12345, kind) for kind in (1, 2)]  # of the codes of each moment


def tensors_of(held):
    return [t for moment in held for t in moment.tensors().values()]


def outside(kernel):
    """A kernel of tensors as one of state.Held: codes are read before it and written after it."""

    def whole(p, g, held, *others):
        values = [moment.read(compiled=False) for moment in held]
        kernel(p, g, values, *others)
        for moment, value, key in zip(held, values, KEYS, strict=True):
            moment.put_back(value, key, compiled=False)

    return whole


@outside
def exact(p, g, moments, low, row, numbers, key, optimizer):
    """exact_step.run, with the nearest root of each second moment."""
    m, v = moments
    root = torch.empty(N)
    exact_step.update_moments(g, m, v, row, numbers, root)
    root.copy_(nearest_root(v))
    exact_step._weight_kernel(p, m, root, low, row)


def by_triton(p, g, held, low, row, numbers, key, optimizer, exact=False):
    from lowprec.kernels import Step, triton_step

    how = dict(numbers=numbers, row=row, key=key, stochastic=optimizer.by_noise, compiled=False)
    moments = dict(moments=held, keys=KEYS, way=rounding.way_of(*low), low=low)
    triton_step.run(Step(rule="adamw", exact=exact, weights=[p], gradients=[g], **moments, **how))


def step_of_held(case, kernel, in_codes=()):
    """[tensor] after a step by a kernel of state.Held. in_codes: the moments that are in int8 codes."""
    kept = []

    def with_held(p, g, moments, *others):
        for name, values, key in zip(AdamW.moments, moments, KEYS, strict=True):
            kept.append(Plain(values))
            if name in in_codes:
                kept[-1] = KINDS["int8"].zeros(N, CPU, AdamW.signed[name])
                kept[-1].write(values, key, compiled=False)
        kernel(p, g, kept, *others)

    return step(case, with_held) + tensors_of(kept)


# moments in codes: (what completes the weights, which moments are in codes)
IN_CODES = [
    *((low, ("exp_avg", "exp_avg_sq")) for low in LOWS),
    *(("none", (name,)) for name in ("exp_avg", "exp_avg_sq")),
]
CPU = torch.device("cpu")


def averaged(low, average, kernel):
    """The average after a step by kernel(average, p, low, ...) from the weights of a case."""
    p, _, _, low = flat(("bf16", "fp32", low, "nearest"))
    dtype, stochastic = average
    shadow = draw(N, seed=6).to(DTYPES[dtype])
    kernel(shadow, p, low, torch.tensor([1e-2]), rounding.noise_key(4, 7, 12345), stochastic)
    return [shadow]


def average_by_triton(*args):
    from lowprec.kernels.triton_step import ema

    ema(*args)


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
    """Entries of `trained_in_codes` that differ where triton_step takes a CPU for a GPU. No code may be
    decoded outside of the kernel then.
    """
    from lowprec.kernels import triton_step

    kernels.KERNELS = ("triton_step", "exact_step")
    theirs = trained_in_codes()
    triton_step.takes = lambda s: s.rule == "adamw"
    Coded.read = None
    return differing(theirs, trained_in_codes())


def interpreted():
    """{case: entries that differ}, in a process whose Triton interprets."""
    # compiling all cases takes minutes; test_adamw.py shows that compiled code writes the same bits, but for
    # roots, which it takes to the nearest
    compiled._compiled, torch.Tensor.sqrt = uncompiled, nearest_root
    found = {}
    by_torch = outside(generic)
    for case in CASES:
        found[str(case)] = differing(step_of_held(case, by_torch), step_of_held(case, by_triton))
    rounds_fma_once()
    exactly = functools.partial(by_triton, exact=True)
    for case in EXACT:
        found[f"exact {case}"] = differing(step_of_held(case, exact), step_of_held(case, exactly))
    for low, names in IN_CODES:
        case = "bf16", "fp32", low, "stochastic"
        pair = (exact, exactly) if low == "remainder" else (by_torch, by_triton)
        found[f"in codes {low, names}"] = differing(*(step_of_held(case, kernel, names) for kernel in pair))
    for low, kind in itertools.product(LOWS, AVERAGES):
        both = (averaged(low, kind, kernel) for kernel in (ema_kernel, average_by_triton))
        found[str((low, kind))] = differing(*both)
    found["handed over"] = handed_over()
    print(json.dumps(found))


def test_the_kernel_writes_the_bits_of_the_cpu():
    """Of steps, moments in codes and averages, and of the exact step; an optimiser hands its codes over."""
    code = "import test_triton_step as t; t.interpreted()"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "lowprec")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    differences = json.loads(ended.stdout.splitlines()[-1])
    assert len(differences) == len(CASES) + len(EXACT) + len(IN_CODES) + len(LOWS) * len(AVERAGES) + 1
    assert {case: count for case, count in differences.items() if count} == {}


# ---- Compiled, without a GPU -------------------------------------------------------------------------------


def instructions(exact, kind, stretches=0, **options):
    """{floating-point instruction} of the kernel as compiled for a GPU. stretches: of moments in codes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowprec.kernels import triton_step

    moment = "*u8" if stretches else "*fp32"
    pointers = dict(p="*bf16", g="*bf16", m=moment, v=moment, low="*i16", row="*fp32", key="*i32")
    pointers.update(n="i32")
    for name in ("m", "v"):
        of_codes = {f"{name}_{part}": "*fp32" for part in ("scales", "table", "line")}
        pointers.update({**of_codes, f"{name}_key": "*i32"})
    constants = dict(STOCHASTIC=True, EXACT=exact, KIND=kind, BLOCK=triton_step.ENTRIES_A_PROGRAM)
    constants.update(M_STRETCHES=stretches, V_STRETCHES=stretches)
    signature = {**pointers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=triton_step._adamw, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return set(re.findall(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|ex2)\.[a-z0-9_.]*f32)\b", ptx))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_every_operation_rounds_once(cache):
    from lowprec.kernels.triton_step import COMPILE_OPTIONS

    rounds = {f"{name}.rn.f32" for name in ("mul", "add", "sub", "div", "sqrt")}
    assert instructions(False, 3, **COMPILE_OPTIONS) == rounds
    assert instructions(False, 3, stretches=7, **COMPILE_OPTIONS) == rounds
    # torch's lerp and addcmul, which an exact step equals, do contract
    assert instructions(True, 3, **COMPILE_OPTIONS) - rounds == {"fma.rn.f32"}


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
        average = EMA(named, 0.9, low_part=optimizer.low_part)
        for k in range(5):
            for i, p in enumerate(params):
                p.grad = draw(*p.shape, seed=100 * k + i).bfloat16().to(device)
            optimizer.step()
            average.update()
        found[device] = [t.cpu() for t in average.shadow.values()]
        found[device] += [p.detach().cpu() for p in params]
        found[device] += [optimizer.moment(p, name).cpu() for p in params for name in optimizer.moments]
    # the exact step of a CPU takes its roots from MKL, which misses the nearest in one of 160
    exact = writing.get("master") == "split" or (not moments and writing.get("update") != "stochastic")
    entries = sum(t.numel() for t in found["cpu"])
    assert differing(found["cpu"], found["cuda"]) <= (entries // 10_000 if exact else 0)
