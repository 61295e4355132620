"""What the tests of the library share: numbers, optimisers in every way of writing, runs of every recipe."""

import contextlib
import functools
import io
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lowprec.errors import Refused
from lowprec.formats import FORMATS
from lowprec.kernels import compiled as compiling
from lowprec.layers import fp8_product
from lowprec.optimizers.rounded import AdamW, Rounded
from lowprec.parts.average_on_cpu import OnCPU
from lowprec.parts.micro_batches import MicroBatches
from lowprec.precision import Precision, recipe
from lowprec.rounding import exact_weight

BF16 = torch.bfloat16
cpu_scales_rows = pytest.mark.skipif(
    not fp8_product.CPU_SCALES_ROWS, reason="this torch multiplies FP8 on a CPU with one scale a tensor alone"
)


@pytest.fixture(autouse=True)
def eager(request, monkeypatch):
    """Kernels as they are: compiling takes seconds, and test_adamw.py and test_formats.py show that compiled
    ones do the same. A file takes it by `eager = common.eager`."""
    if not any(request.node.get_closest_marker(name) for name in ("gpu", "compiled")):
        monkeypatch.setattr(compiling, "_compiled", uncompiled)


def uncompiled(kernel):
    return kernel, contextlib.nullcontext


@contextlib.contextmanager
def default_dtype(dtype):
    """A context in which torch makes floating tensors in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def alone():
    """A process group of one. A file takes it by `alone = common.alone`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- Numbers -----------------------------------------------------------------------------------------------


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def from_bits(*bits):
    """fp32 [n] of bit patterns."""
    words = [b - (1 << 32) if b >> 31 else b for b in bits]
    return torch.tensor(words, dtype=torch.int32).view(torch.float32)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x):
    return x.detach().contiguous().view(INTEGERS[x.element_size()])


def same(a, b):
    """Equal bit for bit (NaN equals itself)."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a @ b / (a.norm() * b.norm())).item()


NAN_BITS = (0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)
ODD_BITS = (0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x00008000, 0x007FFFFF)
LARGE_BITS = (0x7F7FFFFF, 0xFF7FFFFF, 0x3F808000, 0xBF818000)
SPECIALS = from_bits(*NAN_BITS, *ODD_BITS, *LARGE_BITS)


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same_state(a, b):
    """Whether two entries of an optimiser's state, tensors and numbers, are equal bit for bit."""
    assert a.keys() == b.keys()
    return all(same(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key] for key in a)


def refused(call, *words):
    """Run call and return the message of the Refused that it must raise: one line that holds all words."""
    with pytest.raises(Refused) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


# ---- Codes -------------------------------------------------------------------------------------------------

TABLES = ["int8", "int4", "log4"]
FLOATS = ["e4m3", "e5m2"]
KINDS = [*TABLES, *FLOATS, "flash8"]
PACKAGE = {"int8": "bitsandbytes", "int4": "torchao", "log4": "torchao"}


def coder(kind):
    """A format; the test is skipped where its package is missing."""
    if kind in PACKAGE:
        pytest.importorskip(PACKAGE[kind])
    return FORMATS[kind]


# ---- Optimisers --------------------------------------------------------------------------------------------

MODES = {
    "fp32": dict(dtype=torch.float32),
    "fp32, bf16 moments": dict(dtype=torch.float32, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16"),
    "nearest": dict(exp_avg="bf16", exp_avg_sq="bf16"),
    "stochastic": dict(update="stochastic", exp_avg="bf16", exp_avg_sq="bf16"),
    "stochastic, fp32 moments": dict(update="stochastic"),
    "kahan": dict(kahan=True, exp_avg="bf16", exp_avg_sq="bf16"),
    "kahan+stochastic": dict(kahan=True, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16"),
    "split": dict(master="split"),
    "split8": dict(master="split8", update="stochastic", exp_avg="bf16", exp_avg_sq="bf16"),
    "fp32 master": dict(master="fp32"),
}
SHAPES = [(1,), (7,), (3, 5), (16,), (16, 6, 3, 3), (33,), (129, 7), (2000,)]


def make(mode, initial, lr=1e-3, compiled=False, **more):
    """(parameters, optimiser) of a mode, holding the fp32 tensors `initial` as exactly as the mode can."""
    options = dict(weight_decay=0.0) | MODES[mode] | more
    dtype = options.pop("dtype", BF16)
    params = [nn.Parameter(t.to(dtype, copy=True)) for t in initial]
    optimizer = AdamW(params, lr, compiled=compiled, **options)
    for p, t in zip(params, initial, strict=True):
        optimizer.set_exact(p, t)
    return params, optimizer


@functools.cache
def gradients(step, shapes=tuple(SHAPES)):
    """bf16 gradients whose scale changes from step to step; some entries are 0, some tiny."""
    g = torch.Generator().manual_seed(step)
    scale = 10.0 ** (step % 7 - 4)
    return [
        (torch.randn(s, generator=g) * scale * (torch.rand(s, generator=g) > 0.1)).to(BF16) for s in shapes
    ]


def held(optimizer, p):
    return exact_weight(p.detach(), optimizer.low_part(p))


class Numbers(NamedTuple):
    toward_mean: float
    toward_momentum: float
    rate: float


class Lion(Rounded):
    """A stranger's optimiser: Lion (arXiv 2302.06675), the sign of a mean of gradient and momentum."""

    moments = ("exp_avg",)

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **writing):
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay), **writing)

    def numbers(self, group, step):
        return Numbers(1 - group["betas"][0], 1 - group["betas"][1], -group["lr"])

    @staticmethod
    def direction(g, moments, n):
        (m,) = moments
        return n.rate * (m + n.toward_mean * (g - m)).sign(), (m + n.toward_momentum * (g - m),)


# ---- Runs --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """(x [B,1,H,W], t [B]) -> [B,1,H,W]: a small net with all that islands know: norm, embedding, head."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.time_embed = nn.Linear(1, width)
        self.norm = nn.GroupNorm(2, width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t=None):
        h = self.stem(x)
        if t is not None:
            h = h + self.time_embed((t[:, None] / 1000).to(h.dtype))[:, :, None, None]
        return self.out(self.middle(F.silu(self.norm(h))))


RECIPES = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "fp16": dict(fp16=True),
    "pure_bf16": dict(pure_bf16=True),
    "stochastic": dict(pure_bf16=True, stochastic=True),
    "kahan": dict(pure_bf16=True, kahan=True),
    "kahan+stochastic": dict(pure_bf16=True, kahan=True, stochastic=True),
    "split": dict(pure_bf16=True, master="split"),
    "fp32 master": dict(pure_bf16=True, master="fp32"),
    "opt8bit": dict(opt8bit=True),
    "stochastic opt8bit": dict(pure_bf16=True, stochastic=True, opt8bit=True),
    "kahan opt8bit": dict(pure_bf16=True, kahan=True, opt8bit=True),
    "split opt8bit": dict(pure_bf16=True, master="split", opt8bit=True),
    "opt4bit": dict(opt4bit=True, stochastic=True),
    "stochastic opt4bit": dict(pure_bf16=True, stochastic=True, opt4bit=True),
    "split opt4bit": dict(pure_bf16=True, master="split", opt4bit=True),
    "split8": dict(pure_bf16=True, master="split8", stochastic=True),
    "eco": dict(pure_bf16=True, sites=["update=eco"]),
    "fp8 moments": dict(pure_bf16=True, stochastic=True, sites=["exp_avg=e5m2", "exp_avg_sq=e4m3"]),
    "bf16 moments": dict(bf16=True, sites=["exp_avg=bf16", "exp_avg_sq=bf16", "update=stochastic"]),
    "bf16 average": dict(pure_bf16=True, stochastic=True, sites=["ema=bf16", "ema_update=stochastic"]),
    "islands": dict(pure_bf16=True, stochastic=True, sites=["islands=norm+embed+final", "accumulate=fp32"]),
}
PEERS = ["torchastic", "optimi", "adamw_bf16", "torchao", "torch"]  # of bf16 weights


def net(seed=0, width=8):
    torch.manual_seed(seed)
    return Net(width)


def batches(count, seed=0, device="cpu"):
    """[(x [8,1,8,8], y: x blurred)]: what Net can learn."""
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(8, 1, 8, 8, generator=g).to(device) for _ in range(count)]
    return [(x, F.avg_pool2d(x, 3, 1, 1)) for x in xs]


def start(name="fp32", model=None, **options):
    """A Precision of a recipe: a name of RECIPES, or flags."""
    flags = RECIPES[name] if isinstance(name, str) else name
    return Precision(model or net(), recipe(**flags), **options)


def fp32_sums(run):
    """{parameter: fp32 sum of its gradients} of the micro-batches since the last step."""
    part = run.part(MicroBatches)
    return {} if part is None else part.sums


def equal(run, other):
    """Whether two runs hold the same bits: weights, states, and the averages of the second one."""
    other.optimizer.state_dict()  # waits
    for (name, p), q in zip(run.named_params, other.params, strict=True):
        assert same(p.detach(), q.detach()), name
        assert same_state(run.optimizer.state[p], other.optimizer.state[q]), name
    for name, average in other.averages.items():
        for key, value in average.shadow.items():
            assert same(value, run.averages[name].shadow[key]), (name, key)
    return True


def train(run, count, seed=0, measure=False):
    reports = []
    for x, y in batches(count, seed):
        for _ in range(run.options.accumulate):
            run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
        reports.append(run.step(measure=measure))
    return reports


def waits_for_nothing(run):
    """Train three steps on a GPU. The last one raises where it waits for the GPU."""
    for step, (x, y) in enumerate(batches(3, device="cuda")):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            run.backward(F.mse_loss(run(x), y))
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def steps(run, count=4, first=0, measure=False, gaps=False):
    """Train Net; with gaps every second step leaves its time_embed without a gradient. Returns reports."""
    reports = []
    for step, (x, y) in list(enumerate(batches(first + count)))[first:]:
        run.observe(measure)
        t = None if gaps and step % 2 == 0 else torch.arange(8.0)
        run.backward(F.mse_loss(run(x, t), y))
        reports.append(run.step(measure=measure))
    return reports


# ---- Averages on the CPU -----------------------------------------------------------------------------------


class Slow:
    """A Traffic whose copies are done at the last moment that its promises allow."""

    def __init__(self):
        self.waiting, self.copies = [], 0

    def memory(self, n, dtype):
        return torch.full((n,), 77).to(dtype)

    def copy(self, pairs):
        self.waiting += pairs
        self.copies += 1

    def wait(self):
        for targets, sources in self.waiting:
            (weights, low), (now, low_now) = targets, sources()
            for target, source in zip([weights, *low], [now, *low_now], strict=True):
                target.copy_(source)
        self.waiting = []

    before_writing = wait


def moved_to_the_cpu(run):
    """The run, with averages as they are kept on the CPU beside a GPU."""
    for name, old in run.averages.items():
        dtype = {torch.float32: "fp32", BF16: "bf16"}[old.dtype]
        options = dict(low_part=run.low_part, warmup=old.warmup, seed=old.seed, traffic=Slow())
        run.averages[name] = OnCPU(run.named_params, old.full_decay, dtype, old.update_mode, **options)
    run.ema = run.averages["ema"]
    run.before_writing[:] = [average.traffic.before_writing for average in run.averages.values()]
    return run
