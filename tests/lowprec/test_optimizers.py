"""optimizers.py: SGD, Lion, Adafactor and Muon by their equations, in every way of writing; their sites."""

import itertools
import math
import pickle

import cli
import common
import pytest
import torch
from common import BF16, correlation, draw, held, refused, same
from torch import nn

from lowprec.kernels import cpu_products
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.optimizers.muon import Muon, orthogonalised
from lowprec.precision import Precision, recipe
from lowprec.telemetry import sample_entries

eager = common.eager
in_a_folder_of_its_own = cli.in_a_folder_of_its_own

OURS = [name for name in OPTIMIZERS if name != "adamw"]
each = pytest.mark.parametrize("name", OURS)
SHAPES = [(7,), (30, 20), (6, 4, 3, 3), (129, 7)]
MATRICES = [shape for shape in SHAPES if len(shape) > 1]
DECAY = dict(weight_decay=0.1)


def made(name, tensors, dtype=torch.float32, **options):
    """(parameters that hold `tensors` exactly, an optimiser of them) without a recipe."""
    params = [nn.Parameter(t.to(dtype, copy=True)) for t in tensors]
    kind = OPTIMIZERS[name]
    optimizer = kind(params, compiled=False, **(kind.of_run | dict(weight_decay=0.0) | options))
    for p, t in zip(params, tensors, strict=True):
        optimizer.set_exact(p, t)
    return params, optimizer


def initial(name, seed=0):
    shapes = MATRICES if name == "muon" else SHAPES
    return [draw(*shape, seed=seed + i, scale=0.1) for i, shape in enumerate(shapes)]


def feed(optimizer, params, steps, scale=1.0, first=0):
    """Steps with gradients that bf16 holds exactly."""
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            g = (draw(*p.shape, seed=100 * step + i) * scale).to(BF16)
            p.grad = g.to(p.dtype)
        optimizer.step()


def against(name, theirs, shapes, steps=30, scale=1.0, tolerance=1e-6, **options):
    """Ours beside an optimiser of torch that has the same weights as matrices: [out, rest]."""
    tensors = [draw(*shape, seed=i, scale=0.1) for i, shape in enumerate(shapes)]
    ours, optimizer = made(name, tensors, **options)
    flat = [t.flatten(1).clone() if t.dim() > 2 else t.clone() for t in tensors]
    reference = [nn.Parameter(t) for t in flat]
    other = theirs(reference)
    for step in range(steps):
        for i, (p, q) in enumerate(zip(ours, reference, strict=True)):
            p.grad = draw(*p.shape, seed=100 * step + i) * scale
            q.grad = p.grad.view(q.shape).clone()
        optimizer.step()
        other.step()
    for p, q, t in zip(ours, reference, tensors, strict=True):
        torch.testing.assert_close(p.detach().view(q.shape), q.detach(), rtol=tolerance, atol=tolerance / 10)
        assert (p.detach() - t).abs().mean() > 100 * tolerance, "the test sees nothing"


# ---- By their equations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs(nesterov):
    options = dict(lr=0.03, momentum=0.9, nesterov=nesterov)
    against("sgd", lambda params: torch.optim.SGD(params, **options), SHAPES, **options)


@pytest.mark.parametrize("momentum, nesterov", [(0.9, False), (0.8, True), (0.0, False)])
def test_sgd_with_decoupled_decay_in_fp64(momentum, nesterov):
    params, optimizer = made("sgd", initial("sgd"), lr=0.03, momentum=momentum, nesterov=nesterov, **DECAY)
    weights = [p.detach().double() for p in params]
    buffers = [torch.zeros_like(w) for w in weights]
    for step in range(20):
        feed(optimizer, params, 1, first=step)
        for w, m, p in zip(weights, buffers, params, strict=True):
            g = p.grad.double()
            m.mul_(momentum).add_(g)
            w.mul_(1 - 0.03 * 0.1).sub_(0.03 * (g + momentum * m if nesterov else m))
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p.detach(), w.float(), rtol=1e-5, atol=1e-6)


def test_lion_in_fp64():
    params, optimizer = made("lion", initial("lion"), lr=1e-2, betas=(0.9, 0.99), **DECAY)
    weights = [p.detach().double() for p in params]
    moments = [torch.zeros_like(w) for w in weights]
    for step in range(20):
        feed(optimizer, params, 1, first=step)
        for w, m, p in zip(weights, moments, params, strict=True):
            g = p.grad.double()
            w.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * (0.9 * m + 0.1 * g).sign())
            m.mul_(0.99).add_(0.01 * g)
    for p, w, m in zip(params, weights, moments, strict=True):
        torch.testing.assert_close(p.detach(), w.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.moment(p, "exp_avg"), m.float().flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_adafactor_is_torchs(scale):
    options = dict(lr=0.01, weight_decay=0.1)
    theirs = lambda params: torch.optim.Adafactor(params, **options)  # noqa: E731
    against("adafactor", theirs, SHAPES, scale=scale, tolerance=1e-5, **options)


def test_adafactor_counts_a_small_tensor_as_eps_of_weights_as_torchs_does():
    options, least = dict(lr=0.01, weight_decay=0.1), 0.3  # the weights have 0.1
    theirs = lambda params: torch.optim.Adafactor(params, eps=(None, least), **options)  # noqa: E731
    against("adafactor", theirs, SHAPES, tolerance=1e-5, eps=(1e-30, least), **options)


def adafactor_in_fp64(w, m, g, step, lr):
    """One step of algorithms 4 and 6 of arXiv 1804.04235, with decoupled decay 0.1. m: {name: moment}."""
    squares, rest = g * g + 1e-30, step**-0.8
    if w.dim() > 1:
        m["row"] = (1 - rest) * m.get("row", 0) + rest * squares.mean(1, keepdim=True)
        m["column"] = (1 - rest) * m.get("column", 0) + rest * squares.mean(0, keepdim=True)
        v = m["row"] * m["column"] / m["row"].mean()
    else:
        v = m["v"] = (1 - rest) * m.get("v", 0) + rest * squares
    u = g / v.sqrt()
    u = u / max(1.0, u.square().mean().sqrt().item())
    size = max(1e-3, w.square().mean().sqrt().item()) * min(lr, step**-0.5)
    return w * (1 - lr * 0.1) - size * u


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12])  # torch's own bounds the mean of g^2 at 1.2e-7
def test_adafactor_by_the_papers_equations_whatever_the_scale_of_gradients(scale):
    params, optimizer = made("adafactor", initial("adafactor"), lr=0.02, **DECAY)
    weights = [p.detach().double().clone() for p in params]
    moments = [{} for _ in params]
    for step in range(1, 16):
        feed(optimizer, params, 1, scale, first=step)
        for i, p in enumerate(params):
            w, g = weights[i], p.grad.double()
            view = (lambda t: t.flatten(1)) if w.dim() > 1 else (lambda t: t)
            weights[i] = adafactor_in_fp64(view(w), moments[i], view(g), step, 0.02).view_as(w)
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p.detach(), w.float(), rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(adjust, nesterov):
    options = dict(lr=0.01, momentum=0.95, nesterov=nesterov, weight_decay=0.1)
    theirs = lambda params: torch.optim.Muon(params, **options, adjust_lr_fn=adjust)  # noqa: E731
    against("muon", theirs, MATRICES, orthogonalise="bf16", adjust=adjust, **options)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_newton_schulz_keeps_singular_vectors_and_evens_the_values(shape, dtype):
    left, _, right = torch.linalg.svd(draw(*shape).double(), full_matrices=False)
    values = torch.linspace(1, 0.2, min(shape)).double()
    x = orthogonalised((left @ values.diag() @ right).float(), dtype)
    assert x.dtype == dtype and x.shape == shape
    in_their_frame = left.T @ x.double() @ right.T
    got = in_their_frame.diag()
    assert got.min() > 0.6 and got.max() < 1.3
    off = (in_their_frame - got.diag()).abs().max()
    assert off < (1e-4 if dtype == torch.float32 else 0.05)
    assert not orthogonalised(torch.zeros(shape), dtype).any()


STACKS = [((4, 20, 30), {}), ((4, 30, 20), {}), ((2, 3, 16, 8), {"kernels": False})]


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("shape, option", STACKS, ids=str)
def test_muon_steps_each_matrix_of_a_stack_as_if_it_were_alone(shape, option, compiled):
    stack = nn.Parameter(draw(*shape))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach().flatten(0, -3)]
    whole = [{"params": [stack], **option}]
    optimizers = [Muon(params, lr=0.1, compiled=compiled) for params in (whole, alone)]
    for step in range(3):
        stack.grad = draw(*shape, seed=step + 1)
        for p, g in zip(alone, stack.grad.flatten(0, -3), strict=True):
            p.grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, stack.detach().flatten(0, -3), alone))


def test_muon_takes_a_kernel_of_three_dimensions_where_it_is_told():
    kernel, matrix = (nn.Parameter(draw(*shape)) for shape in ((6, 4, 3), (6, 12)))
    with torch.no_grad():
        matrix.copy_(kernel.flatten(1))
    for p, option in ((kernel, {"kernels": True}), (matrix, {})):
        p.grad = draw(6, 12, seed=1).view(p.shape)
        Muon([{"params": [p], **option}], lr=0.1, compiled=False).step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_muon_says_what_its_momentum_loses_in_4_bits_and_what_it_leaves_to_others():
    with pytest.warns(UserWarning, match="Muon with its momentum in 4 bits"):
        Muon([nn.Parameter(draw(64, 64))], kinds={"momentum": "int4"}, compiled=False)
    in_4_bits = recipe(optimizer="muon", sites=("momentum=int4",))
    assert any("4 bits" in line for line in in_4_bits.warnings(optimizer="muon"))
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    rows = {row["site"]: row["why"] for row in Precision(net, optimizer="muon").ledger().rows}
    assert "20 of 180 weights are left to adamw" in rows["momentum"], rows["momentum"]


def test_muon_in_bf16_has_fast_products_in_any_loop(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_products, "settle_products", asked.append)
    Muon([nn.Parameter(draw(8, 8))])
    assert not asked, "fp32 needs none"
    Muon([nn.Parameter(draw(8, 8))], orthogonalise="bf16")
    assert asked == [torch.device("cpu")]


# ---- Writes ------------------------------------------------------------------------------------------------

WAYS = {
    "nearest": {},
    "stochastic": dict(update="stochastic"),
    "kahan": dict(kahan=True),
    "kahan+stochastic": dict(kahan=True, update="stochastic"),
}
KEPT = {"sgd": "momentum", "lion": "exp_avg", "muon": "momentum", "adafactor": "row_var"}


def moved_once(name, lr, gradient=0.77, **writing):
    """(weights after one step from 1.0, their optimiser): 40,000 equal entries, equal fp32 gradients."""
    p = nn.Parameter(torch.ones(200, 200, dtype=BF16 if writing else torch.float32))
    optimizer = OPTIMIZERS[name]([p], lr=lr, weight_decay=0.0, compiled=False, **writing)
    optimizer.step(grads={p: torch.full(p.shape, gradient)})
    return p, optimizer


@each
def test_stochastic_writes_are_right_on_average_and_nearest_ones_are_not(name):
    step = (1 - moved_once(name, 1e-2)[0].detach().double()).mean().item()
    lr = 1e-2 * 0.3 * 2**-8 / step  # a step of 0.3 of an ulp below 1
    wanted = moved_once(name, lr)[0].detach().double().mean().item() - 1
    assert abs(wanted) == pytest.approx(0.3 * 2**-8, rel=0.02)
    moved = moved_once(name, lr, update="stochastic")[0].detach().double() - 1
    assert abs(moved.mean().item() - wanted) < 5 * moved.std().item() / 200
    assert moved.unique().numel() == 2
    assert not (moved_once(name, lr, update="nearest")[0].detach() != 1).any()


@each
def test_moments_in_bf16_are_right_on_average_by_noise_of_their_own(name):
    kept, lr = KEPT[name], {"muon": 0.06}.get(name, 1.5e-3)  # steps of some tenths of an ulp
    p, exact = moved_once(name, lr)
    q, low = moved_once(name, lr, update="stochastic", kinds={kept: "bf16"})
    wanted, value = exact.moment(p, kept).double().mean(), low.moment(q, kept)
    assert value.dtype == BF16 and value.unique().numel() > 1
    value, n = value.double(), value.numel()
    assert abs(value.mean() - wanted) < 5 * value.std() / math.sqrt(n)
    if n == p.numel():
        moved = (q.detach() != 1).double().flatten()
        assert 0.1 < moved.mean() < 0.9 and abs(correlation(moved, value)) < 5 / 200


@each
def test_noise_depends_on_place_step_and_seed_alone(name):
    def choices(seed, alone):
        params = [nn.Parameter(torch.ones(100, 100, dtype=BF16)) for _ in range(2)]
        lr = dict(sgd=1e-3, lion=1e-3, adafactor=1e-3, muon=0.05)[name]
        optimizer = OPTIMIZERS[name](
            params, lr=lr, weight_decay=0.0, update="stochastic", seed=seed, compiled=False
        )
        found = []
        for _ in range(2):
            for i, p in enumerate(params):
                p.grad = None if alone and not i else torch.ones_like(p)
            before = params[1].detach().clone()
            optimizer.step()
            found.append((params[1] != before).double().flatten())
        return [(params[0] != 1).double().flatten(), *found]

    one, alone, other = choices(0, False), choices(0, True), choices(1, False)
    assert same(one[1], alone[1]) and same(one[2], alone[2]), "a missing gradient changed the noise"
    for a, b in itertools.combinations([one[0], one[1], other[1]], 2):
        assert 0.01 < a.mean() < 0.99 and abs(correlation(a, b)) < 0.05


@pytest.mark.parametrize("master", ["split", "fp32"])
@each
def test_an_exact_master_has_the_bits_of_fp32(name, master):
    tensors = initial(name)
    params, optimizer = made(name, tensors, lr=1e-2, **DECAY)
    low, exact = made(name, tensors, BF16, lr=1e-2, master=master, **DECAY)
    feed(optimizer, params, 15)
    feed(exact, low, 15)
    for p, q, t in zip(params, low, tensors, strict=True):
        assert same(held(exact, q), p.detach()) and not same(p.detach(), t)
        assert q.dtype == BF16 and exact.low_part(q) is not None


@each
def test_kahan_follows_fp32_far_closer_than_nearest(name):
    lr = dict(sgd=2e-5, lion=1e-5, adafactor=2e-4, muon=2e-5)[name]
    tensors = initial(name)
    ends = {}
    for way in ("fp32", "nearest", "kahan"):
        dtype = torch.float32 if way == "fp32" else BF16
        params, optimizer = made(name, tensors, dtype, lr=lr, **WAYS.get(way, {}))
        for _ in range(60):
            for i, p in enumerate(params):
                p.grad = draw(*p.shape, seed=i).to(p.dtype)
            optimizer.step()
        ends[way] = torch.cat([held(optimizer, p).flatten() for p in params])
    start = torch.cat([t.flatten() for t in tensors])

    def off(way):
        return ((ends[way] - ends["fp32"]).norm() / (ends["fp32"] - start).norm()).item()

    assert off("kahan") < 0.1 < 0.4 < off("nearest")


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
def test_the_momentum_in_codes(name, kind):
    common.coder(kind)
    tensors = [draw(70, 90, seed=1, scale=0.1)]  # 6,300 values: the last block is not full
    (p,), exact = made(name, tensors, lr=1e-3)
    (q,), coded = made(name, tensors, lr=1e-3, update="stochastic", kinds={KEPT[name]: kind})
    feed(exact, [p], 8)
    feed(coded, [q], 8)
    assert coded.coded(q, KEPT[name]) and coded.state[q][KEPT[name]].dtype == torch.uint8
    a, b = exact.moment(p, KEPT[name]), coded.moment(q, KEPT[name])
    assert (a - b).norm() < (0.05 if kind == "int8" else 0.1) * a.norm()
    assert coded.nbytes()[KEPT[name]] < 1.4 * 6300 and coded.plain(KEPT[name]) == 0
    assert coded.still(q) and not coded.moment(q, KEPT[name]).any()


def test_nothing_is_read_back_from_a_device():
    # on the meta device to read a number is an error
    for name, dtype in itertools.product(OURS, (torch.float32, BF16)):
        shapes = MATRICES if name == "muon" else SHAPES
        params = [nn.Parameter(torch.empty(shape, device="meta", dtype=dtype)) for shape in shapes]
        optimizer = OPTIMIZERS[name](params, update="stochastic", kahan=True, compiled=False)
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step(grad_scale=torch.empty((), dtype=torch.float64, device="meta"))


# ---- Questions ---------------------------------------------------------------------------------------------


@each
def test_wanted_is_what_an_fp32_step_does(name):
    params, optimizer = made(name, initial(name), lr=1e-2, **DECAY)
    feed(optimizer, params, 3)
    grads = {p: draw(*p.shape, seed=77 + i) for i, p in enumerate(params)}
    wanted = optimizer.wanted_together(params, [0.5 * g.flatten() for g in grads.values()])
    before = [p.detach().clone() for p in params]
    optimizer.step(grads=grads, grad_scale=0.5)
    for p, old, update in zip(params, before, wanted, strict=True):
        torch.testing.assert_close(p.detach() - old, update.view_as(p), rtol=1e-4, atol=1e-6)
        assert optimizer.decayed(p) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_sample_of_what_is_wanted_comes_from_the_whole_gradient(name):
    pick = lambda t: sample_entries(t, 16)  # noqa: E731
    params, optimizer = made(name, initial(name), lr=1e-2)
    feed(optimizer, params, 2)
    grads = {p: draw(*p.shape, seed=i) for i, p in enumerate(params)}
    some = [0.5 * pick(g) for g in grads.values()]
    whole = [pick(optimizer.wanted(p, 0.5 * g.flatten()).view_as(p)) for p, g in grads.items()]
    for p in params:
        p.grad = None
    unknown = optimizer.wanted_together(params, some, pick)
    large = [i for i, p in enumerate(params) if p.numel() >= 32]
    assert large and all(unknown[i].isnan().all() for i in large)
    optimizer.announce(grads, 0.5)
    for a, b in zip(optimizer.wanted_together(params, some, pick), whole, strict=True):
        assert same(a, b)
    optimizer.step(grads=grads, grad_scale=0.5)
    assert optimizer.announced is None


def test_moments_are_told_by_name_and_shape():
    params, optimizer = made("adafactor", initial("adafactor"))
    feed(optimizer, params, 3)
    vector, matrix, kernel, _ = params
    assert optimizer.state[matrix]["row_var"].shape == (30, 1)
    assert optimizer.state[kernel]["col_var"].shape == (1, 36)
    assert optimizer.moment(matrix, "exp_avg_sq") is None and not optimizer.clear(matrix, "exp_avg_sq")
    assert optimizer.moment(vector, "exp_avg_sq").shape == (7,)
    assert optimizer.decay(vector, "exp_avg_sq") == (pytest.approx(1 - 4**-0.8), math.inf)
    assert optimizer.still(matrix) and optimizer.moment(matrix, "row_var").all()  # no move without g
    for name, options in (("sgd", {}), ("lion", {}), ("muon", {})):
        params, optimizer = made(name, initial(name), **options)
        assert math.isnan(optimizer.decay(params[0], "exp_avg_sq")[0])
        assert optimizer.moment(params[0], "exp_avg_sq") is None


def test_muon_is_pickled_and_refuses_what_it_does_not_know():
    params = [nn.Parameter(torch.eye(3))]
    made = pickle.loads(pickle.dumps(Muon(params, adjust="original")))
    (p,) = made.param_groups[0]["params"]
    p.grad = torch.ones(3, 3)
    made.step()
    assert not torch.equal(p, params[0])
    refused(lambda: Muon(params, adjust="rms"), "adjust='rms': unknown")
    refused(lambda: Muon(params, orthogonalise="fp16"), "choose from fp32, bf16")
