"""optim.Rounded: noise, groups, state; what every optimiser of ours has."""

import copy
import functools
import itertools
import math
import pickle
import threading
import warnings

import pytest
import torch
from common import (
    BF16,
    SHAPES,
    correlation,
    default_dtype,
    draw,
    gradients,
    held,
    make,
    refused,
    same,
    same_state,
)
from torch import nn

from lowprec.kernels import exact_step
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.average import EMA
from lowprec.optimizers.buckets import Bucket
from lowprec.optimizers.muon import Muon
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD
from lowprec.precision import Precision
from lowprec.recipes import recipe

# ---- Noise of a step ---------------------------------------------------------------------------------------


def test_no_draw_from_the_global_generator():
    p = nn.Parameter(draw(100).to(BF16))
    p.grad = draw(100).to(BF16)
    optimizer = AdamW([p], 1e-2, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16", compiled=False)
    ema = EMA([("p", p)], 0.99, "bf16", "stochastic", compiled=False)
    state, before, average = torch.random.get_rng_state(), p.detach().clone(), ema.shadow["p"].clone()
    optimizer.step()
    ema.update()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not same(p, before) and not same(ema.shadow["p"], average)


def stochastic_twins(groups):
    """Where each of three equal parameters moved, in a stochastic step of 0.4 ulp with equal gradients."""
    params = [nn.Parameter(torch.full((20000,), 1.0, dtype=BF16)) for _ in range(3)]
    arguments = [{"params": [p]} for p in params] if groups else params
    optimizer = AdamW(arguments, 0.4 * 2**-8, update="stochastic", compiled=False)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [(p < 1).double() for p in params]


@pytest.mark.parametrize("small", [1 << 18, 1])  # copied into one bucket, or a bucket each
@pytest.mark.parametrize("groups", [False, True])
def test_equal_parameters_get_different_noise(monkeypatch, small, groups):
    monkeypatch.setattr(Bucket, "SMALL", small)
    moved = stochastic_twins(groups)
    for m in moved:
        assert abs(m.mean().item() - 0.4) < 5 * math.sqrt(0.24 / 20000)
    for a, b in itertools.combinations(moved, 2):
        assert abs(correlation(a, b)) < 5 / math.sqrt(20000)


# ---- As in torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_parameters_without_gradients_are_left_alone_as_in_torch(mode):
    initial = [draw(*s, seed=i, scale=0.1) for i, s in enumerate(SHAPES)]
    params, optimizer = make(mode, initial, 1e-2, weight_decay=0.1)
    reference = [nn.Parameter(t.clone()) for t in initial]
    theirs = torch.optim.AdamW(reference, 1e-2, weight_decay=0.1)
    for step in range(12):
        for i, (p, q, g) in enumerate(zip(params, reference, gradients(step), strict=True)):
            p.grad, q.grad = (g.to(p.dtype), g.float()) if (step + i) % 4 and i != 2 else (None, None)
        optimizer.step()
        theirs.step()
    for i, (p, q) in enumerate(zip(params, reference, strict=True)):
        assert same(held(optimizer, p), q.detach())
        assert optimizer.state[p]["step"] == (0 if i == 2 else theirs.state[q]["step"])
    assert same(held(optimizer, params[2]), initial[2])


def test_groups_schedulers_and_late_groups_work_as_in_torch():
    initial = [draw(*s, seed=i, scale=0.1) for i, s in enumerate(SHAPES[:6])]
    ours, theirs = [nn.Parameter(t.clone()) for t in initial], [nn.Parameter(t.clone()) for t in initial]
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params, kind in ((ours, functools.partial(AdamW, compiled=False)), (theirs, torch.optim.AdamW)):
            first = {"params": params[:2], "lr": 1e-2}
            second = {"params": params[2:4], "weight_decay": 0.3, "betas": (0.8, 0.9)}
            optimizer = kind([first, second], lr=1e-3, weight_decay=0.0)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            steps.append((optimizer, scheduler))
        for step in range(8):
            if step == 3:
                for params, (optimizer, scheduler) in zip((ours, theirs), steps, strict=True):
                    optimizer.add_param_group({"params": params[4:], "lr": 5e-3})
                    scheduler.base_lrs.append(5e-3)
            for params, (optimizer, scheduler) in zip((ours, theirs), steps, strict=True):
                for p, g in zip(params, gradients(step, tuple(SHAPES[:6])), strict=True):
                    p.grad = g.float()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for p, q, t in zip(ours, theirs, initial, strict=True):
        assert same(p.detach(), q.detach()) and not same(p.detach(), t)
    assert [g["lr"] for g in steps[0][0].param_groups] == [g["lr"] for g in steps[1][0].param_groups]


def test_fp32_and_bf16_parameters_mix():
    dtypes = (BF16, torch.float32, BF16, torch.float32)
    weights = [nn.Parameter(draw(30, seed=i).to(dtype)) for i, dtype in enumerate(dtypes)]
    reference = [nn.Parameter(p.detach().clone()) for p in weights if p.dtype == torch.float32]
    optimizer = AdamW(weights, 1e-2, master="split", compiled=False)
    theirs = torch.optim.AdamW(reference, 1e-2)
    for p in weights:
        p.grad = draw(30, seed=9).to(p.dtype)
    for q in reference:
        q.grad = draw(30, seed=9)
    optimizer.step()
    theirs.step()
    assert same(weights[1].detach(), reference[0].detach())
    assert same(weights[3].detach(), reference[1].detach())
    assert optimizer.low_part(weights[1]) is None and optimizer.low_part(weights[0]).dtype == torch.int16


# ---- State -------------------------------------------------------------------------------------------------


def test_what_torchs_own_loader_casts_is_refused():
    # to the dtype of the parameter, which is why AdamW.load_state_dict is its own
    (p,), optimizer = make("split", [draw(20)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    _, second = make("split", [draw(20)])
    load = torch.optim.Optimizer.load_state_dict
    refused(lambda: load(second, optimizer.state_dict()), "remainder", "is bfloat16 [20]", "hold int16 [20]")


def test_states_of_other_models_and_recipes_are_refused():
    _, optimizer = make("stochastic", [draw(20), draw(30)])
    saved = optimizer.state_dict()

    def loading(mode, *sizes, state=saved):
        return lambda: make(mode, [draw(n) for n in sizes])[1].load_state_dict(state)

    refused(loading("stochastic", 20, 31), "exp_avg is bfloat16 [30] there, and bfloat16 [31] here")
    refused(loading("stochastic", 20), "2 parameters", "1")
    refused(loading("split", 20, 30), "another model or recipe")
    refused(loading("kahan", 20, 30), "another model or recipe")
    two = AdamW([{"params": [nn.Parameter(draw(20))]}, {"params": [nn.Parameter(draw(30))]}])
    refused(lambda: two.load_state_dict(saved), "another model")
    unused = torch.optim.AdamW([nn.Parameter(draw(20)), nn.Parameter(draw(30))])
    loading("fp32", 20, 30, state=unused.state_dict())()  # torch makes its states at the first step
    refused(loading("split", 20, 30, state=unused.state_dict()), "another model or recipe")


# ---- What is refused, and copies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(update="Stochastic"), "choose from nearest, stochastic"),
        (dict(master="Split"), "choose from none, fp32, split, split8"),
        (dict(exp_avg="int-8"), "exp_avg='int-8'"),
        (dict(exp_avg_sq="bfloat16"), "exp_avg_sq='bfloat16'"),
        (dict(kahan=True, master="split"), "drop one"),
    ],
)
def test_a_misspelt_way_of_writing_is_refused(options, said):
    refused(lambda: AdamW([nn.Parameter(torch.ones(4, dtype=BF16))], **options), said)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    refused(AdamW(embedding.parameters(), compiled=False).step, "sparse=False")


@pytest.mark.parametrize("make", [lambda net: AdamW(net.parameters()), Precision], ids=["alone", "Precision"])
def test_a_lazy_layer_is_refused_before_its_first_call(make):
    net = nn.Sequential(nn.LazyLinear(2))
    refused(lambda: make(net), "lazy layer", "first call")
    net(torch.ones(1, 3))
    make(net)


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.turn).abs()


@pytest.mark.parametrize("optimizer", ["adamw", "torch"])
def test_complex_parameters_are_refused(optimizer):
    refused(lambda: Precision(Turning(), recipe(), optimizer=optimizer), "real and imaginary parts in fp32")


TORCHS = {AdamW: torch.optim.AdamW, SGD: torch.optim.SGD, Muon: torch.optim.Muon}


@pytest.mark.parametrize("kind", [*TORCHS, Adafactor])
def test_defaults_are_those_of_torch(kind):
    matrix = nn.Parameter(torch.ones(2, 2))
    ours = kind([matrix], fused=True, foreach=False).defaults
    theirs = TORCHS.get(kind, torch.optim.Adafactor)([matrix]).defaults
    shared = ours.keys() & theirs.keys() - {"eps"} if kind is Adafactor else ours.keys() & theirs.keys()
    assert {"lr", "weight_decay"} <= shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_a_state_of_groups_of_other_sizes_is_refused():
    params = [nn.Parameter(torch.ones(2)) for _ in range(4)]

    def of(*sizes):
        parts = iter(torch.tensor(range(4)).split(sizes))
        return AdamW([dict(params=[params[i] for i in part], lr=float(len(part))) for part in parts])

    refused(lambda: of(3, 1).load_state_dict(of(1, 3).state_dict()), "groups of [1, 3]", "[3, 1]")


def test_a_loaded_rate_is_a_copy():
    one, other = (AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    other.param_groups[0]["lr"].fill_(0.1)
    assert one.param_groups[0]["lr"] == 0.5


COPIES = [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
def test_a_copy_steps_itself_and_saves_what_it_stepped(copied):
    layer = nn.Linear(8, 4).to(BF16)
    optimizer = AdamW(layer.parameters(), 0.1, compiled=False, exp_avg="bf16", update="stochastic")
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # it puts a step of its own in the optimiser's place
    x = torch.ones(2, 8, dtype=BF16)

    def moved(net, stepped):
        net(x).sum().backward()
        stepped.step()
        return [p.detach().clone() for p in net.parameters()]

    start = [p.detach().clone() for p in layer.parameters()]
    other, its = copied((layer, optimizer))
    after = moved(other, its)
    assert all(map(torch.equal, layer.parameters(), start))
    saved = its.state_dict()["state"]
    assert saved[0]["step"] == 1 and all(saved[i][name].any() for i in saved for name in optimizer.moments)
    assert all(map(torch.equal, moved(layer, optimizer), after))


def test_a_pickled_average_reads_what_it_moved():
    p = nn.Parameter(torch.ones(4))
    named, held = pickle.loads(pickle.dumps((p, EMA([("p", p)], 0.5, compiled=False))))
    with torch.no_grad():
        named.fill_(3.0)
    held.update()
    assert held.shadow["p"].tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [BF16, torch.float64])
@pytest.mark.parametrize(
    "options", [dict(master="split"), *(dict(exp_avg=kind, update="stochastic") for kind in ("int8", "e4m3"))]
)
def test_torchs_default_dtype_changes_nothing(options, dtype, monkeypatch):
    if "int8" in options.values():
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(exact_step, "_of_thread", threading.local())  # what it keeps is made anew

    start, *grads = (draw(64, 80, seed=seed).to(BF16) for seed in range(4))

    def after():
        p = nn.Parameter(start.clone())
        optimizer = AdamW([p], 1e-2, compiled=False, **options)
        for p.grad in grads:
            optimizer.step()
        return optimizer.state_dict()["state"][0] | {"p": p.detach()}

    with default_dtype(dtype):
        found = after()
    assert same_state(found, after())


def test_torchs_default_device_is_not_the_steps():
    p = nn.Parameter(torch.ones(4))
    optimizer = AdamW([p], 0.1, compiled=False)
    with torch.device("meta"):
        p.grad = torch.ones(4, device="cpu")
        optimizer.step()
    assert (p < 1).all()
