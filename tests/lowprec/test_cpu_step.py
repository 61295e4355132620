"""The compiled pass of a step on a CPU: its bits against those of the torch code, and the step without
it.
"""

import itertools
import subprocess

import numpy as np
import pytest
import torch
from common import default_dtype, draw, uncompiled
from step_cases import AVERAGES, CASES, DTYPES, LOWS, N, differing, flat, step

from lowprec import kernels
from lowprec.formats import FORMATS
from lowprec.kernels import compiled, cpu_step
from lowprec.optimizers import buckets, rounded
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.lion import Lion
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD
from lowprec.optimizers.state import Plain
from lowprec.rounding import ema_kernel, noise_key, way_of

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(cpu_step.library() is None, reason="needs AVX2 and GCC")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nearest_root(monkeypatch):
    """The torch code without torch.compile, with the nearest root that a compiled one has: MKL misses it in
    one of 160.
    """
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda v: torch.from_numpy(np.sqrt(v.numpy())))


@pytest.fixture
def not_compiled(monkeypatch):
    """What is left to torch.compile runs as it is: compiling takes seconds."""
    monkeypatch.setattr(compiled, "_compiled", uncompiled)


@pytest.fixture
def afresh():
    cpu_step.library.cache_clear()
    yield
    cpu_step.library.cache_clear()


# ---- The step ----------------------------------------------------------------------------------------------


def eager(p, g, moments, low, row, numbers, key, optimizer):
    how = optimizer.direction, type(numbers), way_of(*low)
    rounded.write_step(*how, p, g, moments, low, row, key, optimizer.by_noise)


def by_cpu_step(p, g, moments, low, row, numbers, key, optimizer):
    moments = list(map(Plain, moments))
    tensors = dict(weights=[p], gradients=[g], moments=moments, keys=[None, None], low=low)
    how = dict(rule="adamw", exact=False, way=way_of(*low), stochastic=optimizer.by_noise, compiled=True)
    cpu_step.run(kernels.Step(**tensors, **how, numbers=numbers, row=row, key=key))


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_step_has_the_bits_of_the_torch_code(case, nearest_root):
    assert differing(step(case, eager), step(case, by_cpu_step)) == 0


KINDS = {
    "int8": dict(exp_avg="int8", exp_avg_sq="int8"),
    "one in bf16": dict(exp_avg="int8", exp_avg_sq="bf16"),
    "another in fp32": dict(exp_avg="fp32", exp_avg_sq="int8"),
    "int8 and a split master": dict(exp_avg="int8", exp_avg_sq="int8", master="split"),
    "int8 and Kahan": dict(exp_avg="int8", exp_avg_sq="int8", kahan=True),
    "int4": dict(exp_avg="int4", exp_avg_sq="int4"),
    "e4m3": dict(exp_avg="e4m3", exp_avg_sq="e4m3"),
    "e5m2": dict(exp_avg="e5m2", exp_avg_sq="e5m2"),
    "e4m3 and e5m2": dict(exp_avg="e4m3", exp_avg_sq="e5m2"),
    "4 and 8 bits": dict(exp_avg="int4", exp_avg_sq="int8"),
    "bf16": dict(exp_avg="bf16", exp_avg_sq="bf16"),
    "exact": dict(master="split"),
}


def trained(kinds, steps=5, dtype=torch.bfloat16, spoilt=False, optimizer=AdamW):
    """[tensor]: weights and states after some steps of tensors of many sizes."""
    shapes = (60, 231), (4096,), (5000,), (33, 17), (7,), (2**16 + 300,)
    weights = [draw(*shape, seed=i, scale=0.05).to(dtype) for i, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = optimizer(params, lr=1e-3, weight_decay=0.1, seed=3, **{"update": "stochastic", **kinds})
    optimizer.PIECE = 1 << 15  # so that the largest tensor has three, which threads share
    for at in range(steps):
        for i, p in enumerate(params):
            size = 10 ** (-6 * torch.rand(p.shape, generator=torch.Generator().manual_seed(at)))
            p.grad = (draw(*p.shape, seed=100 * at + i) * size).to(dtype)
            if spoilt and at == 2:
                p.grad.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        optimizer.step(grad_scale=0.5 if at == 1 else 1.0)
    states = [t for p in params for name, t in sorted(optimizer.state[p].items()) if name != "step"]
    return [p.detach() for p in params] + states


@needs_kernel
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_optimiser_writes_the_same_bits_without_it(kinds, nearest_root):
    """Finite values and, after the second step, NaN and infinities among them."""
    ours = trained(kinds, steps=4, spoilt=True)
    assert differing(ours, trained({**kinds, "compiled": False}, steps=4, spoilt=True)) == 0


OTHERS = {"SGD": (SGD, {}), "SGD, Nesterov": (SGD, {"momentum": 0.9, "nesterov": True}), "Lion": (Lion, {})}
WRITES = [
    *(("stochastic", {}, form) for form in ("fp32", "bf16", "int8", "int4")),
    *(("nearest", {"update": "nearest"}, form) for form in ("bf16", "int8")),
    ("Kahan", {"kahan": True}, "bf16"),
    ("a split master", {"master": "split"}, "fp32"),
    ("an fp32 master", {"master": "fp32"}, "fp32"),
]


@needs_kernel
@pytest.mark.parametrize("name, writes, form", WRITES)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_other_optimisers_write_the_same_bits_without_it(other, name, writes, form, not_compiled):
    kind, options = other
    how = {**options, **writes, "kinds": {kind.moments[0]: form}}
    ours = trained(how, steps=4, spoilt=True, optimizer=kind)
    theirs = trained({**how, "compiled": False}, steps=4, spoilt=True, optimizer=kind)
    assert differing(ours, theirs) == 0


@needs_kernel
@pytest.mark.parametrize("name, writes, form", [row for row in WRITES if row[2] in ("fp32", "bf16")])
def test_what_needs_the_whole_tensor_is_written_with_the_same_bits(name, writes, form, not_compiled):
    how = {**writes, "kinds": dict.fromkeys(Adafactor.moments, form)}
    ours = trained(how, steps=4, optimizer=Adafactor)
    theirs = trained({**how, "compiled": False}, steps=4, optimizer=Adafactor)
    assert differing(ours, theirs) == 0


@needs_kernel
def test_it_is_what_steps(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_step, "run", lambda s: calls.append(s.rule))
    monkeypatch.setattr(kernels, "fused", None)
    of_lion, of_sgd = dict(kinds={"exp_avg": "int8"}), dict(kinds={"momentum": "bf16"})
    for kinds, kind in ((KINDS["int8"], AdamW), (KINDS["exact"], AdamW), (of_lion, Lion), (of_sgd, SGD)):
        trained(kinds, steps=1, optimizer=kind)
        assert set(calls) == {kind.__name__.lower()}
        calls.clear()
    monkeypatch.setattr(cpu_step, "write", lambda *args: calls.append("a moment"))
    trained({"kinds": dict.fromkeys(Adafactor.moments, "bf16")}, steps=1, optimizer=Adafactor)
    assert set(calls) == {"given", "a moment"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", (AdamW, SGD, Lion))
def test_a_direction_of_ones_own_is_what_steps(kind, dtype, monkeypatch):
    monkeypatch.setattr("lowprec.kernels.compiled._compiled", uncompiled)

    class Own(kind):
        @staticmethod
        def direction(g, moments, n):
            return -0.5 * g, moments

    p = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    p.grad = torch.ones_like(p)
    Own([p], lr=1e-3).step()
    assert (p == -0.5).all()


@needs_kernel
@pytest.mark.parametrize("kinds", ({}, KINDS["bf16"], KINDS["int8"]), ids=("fp32", "bf16", "int8"))
def test_small_tensors_are_updated_where_they_are(kinds, monkeypatch):
    params = [torch.nn.Parameter(draw(*shape).bfloat16()) for shape in ((300,), (64, 80), (64, 80), (7,))]
    optimizer = AdamW(params, update="stochastic", **kinds)
    assert any(len(bucket.params) > 1 for _, bucket in optimizer._buckets)
    for p in params:
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(buckets, "_flatten_dense_tensors", None)
    optimizer.step()
    assert all((p != draw(*p.shape).bfloat16()).any() for p in params)


@needs_kernel
def test_tensors_in_another_order_of_memory_are_copied(nearest_root):
    def weights(compiled):
        kernel = draw(32, 16, 3, 3).bfloat16().to(memory_format=torch.channels_last)
        params = [torch.nn.Parameter(kernel), torch.nn.Parameter(draw(9).bfloat16())]
        optimizer = AdamW(params, lr=1e-2, update="stochastic", compiled=compiled, **KINDS["bf16"])
        for seed in range(3):
            params[0].grad, params[1].grad = draw(32, 16, 3, 3, seed=seed).bfloat16(), draw(9).bfloat16()
            optimizer.step()
        return [p.detach().clone() for p in params]

    assert differing(weights(True), weights(False)) == 0


@needs_kernel
@pytest.mark.parametrize("kinds", ({}, KINDS["int8"]), ids=("fp32 moments", "int8"))
def test_fp32_weights_are_written_with_the_bits_of_the_torch_code(kinds):
    """Those of torch.optim.AdamW, see test_adamw.py."""
    ours = trained(kinds, dtype=torch.float32)
    assert differing(ours, trained({**kinds, "compiled": False}, dtype=torch.float32)) == 0


@needs_kernel
@pytest.mark.parametrize("is_mkls", [True, False], ids=["of MKL", "of no known kind"])
@pytest.mark.parametrize("kinds, dtype", [({}, torch.float32), (KINDS["exact"], torch.bfloat16)], ids=str)
def test_a_root_that_is_called_or_left_to_torch_has_the_same_bits(
    kinds, dtype, is_mkls, monkeypatch, not_compiled
):
    """As on a CPU whose root has none of the known formulas."""
    address = cpu_step._root_of_mkl()
    if is_mkls and address is None:
        pytest.skip("this torch has no MKL")
    wanted = trained({**kinds, "compiled": False}, dtype=dtype)
    monkeypatch.setattr(cpu_step, "torch_root", lambda: (cpu_step.ROOT_CALLED, address) if is_mkls else None)
    assert differing(trained(kinds, dtype=dtype), wanted) == 0


@needs_kernel
@pytest.mark.filterwarnings("ignore:invalid value")
def test_roots_of_every_size():
    """Of each power of two, zeros, denormals, the largest number, infinity, NaN and what is below zero."""
    powers = torch.arange(-149, 128).double().exp2()[:, None]
    sizes = powers * (1 + torch.rand(len(powers), 64, dtype=torch.float64))
    ends = torch.tensor([0, -0.0, torch.inf, torch.nan, -1, torch.finfo(torch.float32).max])
    x = torch.cat([sizes.flatten().float(), ends, torch.full((3,), 1e-45)])
    nearest = torch.from_numpy(np.sqrt(x.numpy()))
    assert differing([cpu_step.roots(x, cpu_step.ROOT_NEAREST)], [nearest]) == 0
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # where MKL has that formula
        of_mkl = cpu_step.roots(x, cpu_step.ROOT_OF_MKL)
        apart = (of_mkl.view(torch.int32) - nearest.view(torch.int32)).abs()[~nearest.isnan()]
        assert apart.max() == 1 and 0 < (apart > 0).float().mean() < 0.02
        assert (of_mkl.isnan() == nearest.isnan()).all()
    kind, address = cpu_step.torch_root() or (None, None)
    if kind is not None:
        assert differing([cpu_step.roots(x, kind, address)], [torch.sqrt(x)]) == 0


@needs_kernel
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_autograd_sees_what_it_writes(kinds):
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([p], update="stochastic", **kinds)
    loss = (p * p).sum()
    states = [t for name, t in optimizer.state[p].items() if name != "step"]
    before = [t._version for t in (p, *states)]
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(t._version > old for t, old in zip((p, *states), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernel
def test_the_number_of_threads_changes_no_bit(threads):
    threads(1)
    alone = trained(KINDS["int8"])
    threads(3)
    assert differing(alone, trained(KINDS["int8"])) == 0


# ---- The average -------------------------------------------------------------------------------------------

AVERAGED = list(itertools.product(DTYPES, LOWS, AVERAGES))


@needs_kernel
@pytest.mark.parametrize("n", (N, 5))
@pytest.mark.parametrize("weights, low, average", AVERAGED, ids=str)
def test_the_average_has_the_bits_of_the_torch_code(weights, low, average, n):
    dtype, stochastic = average
    p, _, _, low = flat((weights, "fp32", low, "nearest"))
    shadow = draw(N, seed=6).to(DTYPES[dtype])
    shadow[7], shadow[8], shadow[9] = torch.inf, torch.nan, 1e-39
    p, shadow, low = p[:n], shadow[:n], [t[:n] for t in low]
    found = []
    for kernel in (ema_kernel, cpu_step.ema):
        found.append([shadow.clone()])
        kernel(found[-1][0], p, low, torch.tensor([1e-2]), noise_key(4, 7, 12345), stochastic)
    assert differing(*found) == 0
    ours = found[1][0]
    assert n == 5 or (ours != shadow)[10:].any()


@needs_kernel
def test_an_average_of_several_chunks_goes_on_with_its_noise(threads):
    p, shadow = draw(100_000).bfloat16(), draw(100_000, seed=1).bfloat16()
    how = p, [], torch.tensor([0.1]), noise_key(1, 2, 3), True
    theirs = shadow.clone()
    ema_kernel(theirs, *how)
    for count in (1, 3):
        threads(count)
        ours = shadow.clone()
        cpu_step.ema(ours, *how)
        assert torch.equal(ours, theirs)


# ---- Codes -------------------------------------------------------------------------------------------------


def both(form, x, signed, seed=0):
    """((codes, scales) by the torch code, the same by cpu_step) of fp32 x [n]."""
    coder, key = FORMATS[form], noise_key(seed, 2, 3)
    theirs, ours = coder.new(x.numel(), CPU), coder.new(x.numel(), CPU)
    coder.encode(x, *theirs, signed, key, compiled=False)
    cpu_step.encode(x, coder.operand(*ours, signed, key))
    return theirs, ours


@needs_kernel
@pytest.mark.parametrize("form", ("int8", "int4", "e4m3", "e5m2"))
@pytest.mark.parametrize("signed", (True, False))
@pytest.mark.parametrize("n", (1, 15, 256, 1000, 2**16 + 77))
def test_codes_have_the_bits_of_the_torch_code(n, signed, form):
    x = draw(n, seed=1) * 10 ** (-9 * torch.rand(n, generator=torch.Generator().manual_seed(1)))
    x = x if signed else x.abs()
    x[::7] = 0
    for spoilt in (False, True):
        if spoilt:
            x[n // 2 :: 300], x[n // 3 :: 300], x[n // 4 :: 300] = torch.nan, torch.inf, 1e-41
        theirs, ours = both(form, x, signed)
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


@needs_kernel
@pytest.mark.parametrize("form", ("int8", "int4"))
@pytest.mark.parametrize("signed", (True, False))
def test_every_stretch_of_codes_is_found(signed, form):
    """Values at each end of a stretch, a bit below and above, in a block whose largest is 1."""
    ends = FORMATS[form].line(signed, CPU)[:, 0]
    above, below = (ends.nextafter(torch.tensor(end)) for end in (2.0, -1.0))
    near = torch.cat([ends, above, below.clamp(min=0)])
    x = torch.cat([near, -near if signed else near, torch.ones(1), torch.zeros(256 - 2 * len(near) - 1)])
    for seed in range(20):
        theirs, ours = both(form, x, signed, seed)
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


@needs_kernel
@pytest.mark.parametrize("form", ("e4m3", "e5m2"))
@pytest.mark.parametrize("signed", (True, False))
@pytest.mark.parametrize("largest", (1.0, 2e-40, 1e38))
def test_every_8_bit_float_is_found(signed, form, largest):
    """All numbers of the format, a bit below and above each, and the largest in every block."""
    coder = FORMATS[form]
    numbers = coder.values(torch.arange(128, dtype=torch.uint8).view(coder.dtype))
    numbers = numbers[numbers <= coder.top]
    above, below = (numbers.nextafter(torch.tensor(end)) for end in (1e6, -1e6))
    near = torch.cat([numbers, above, below if signed else below.clamp(min=0)])
    x = (torch.cat([near, -near]) if signed else near) * (largest / coder.top)
    x[::256] = largest
    for seed in range(20):
        theirs, ours = both(form, x, signed, seed)
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


def test_curves_and_the_nearest_codes_are_left_to_others():
    for name, key in (("flash8", noise_key(0, 0)), ("e4m3", None), ("int8", None), ("int4", None)):
        codes = FORMATS[name].new(256, CPU)
        assert not cpu_step.takes_operand(FORMATS[name].operand(*codes, True, key))


def test_a_table_with_three_ends_within_a_power_of_two_has_no_chart():
    line = torch.tensor([[0.0, 0, 1], [0.3, 1, 2], [0.4, 2, 3]])
    assert cpu_step.chart(line) is not None
    line = torch.cat([line, torch.tensor([[0.45, 3, 4.0]])])
    assert cpu_step.chart(line) is None


@needs_kernel
def test_what_torch_makes_by_default_does_not_matter(afresh):
    cpu_step.chart_of.cache_clear()
    line = FORMATS["int8"].line(True, CPU)
    with default_dtype(torch.bfloat16), torch.device("meta"):
        own = cpu_step.chart_of(line)
    wanted = cpu_step.chart(line).view(torch.uint8)
    assert bytes(own) == bytes(wanted.tolist())


# ---- Where it can't be -------------------------------------------------------------------------------------


def test_a_cpu_without_avx2_does_without(afresh, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert cpu_step.library() is None
    assert not cpu_step.fits([torch.zeros(1)], [torch.zeros(1)])


@pytest.mark.parametrize("error", (subprocess.CalledProcessError(1, "g++"), OSError("no such file")), ids=str)
def test_a_compiler_that_fails_leaves_the_step_to_torch(afresh, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(cpu_step, "_compiled_library", fail)
    assert cpu_step.library() is None
    assert not cpu_step.fits([torch.zeros(1)], [torch.zeros(1)])
