"""Every optimiser of ours by its equations and in every way of writing; sites of those beside AdamW."""

import itertools
import math
import pickle

import cli
import common
import pytest
import torch
from common import BF16, RECIPES, correlation, draw, held, net, refused, same
from fuzz_steps import RULES, shape_of
from torch import nn

import strategies
import trainer
from lowprec import recipes
from lowprec.kernels import cpu_products
from lowprec.optimizers import build
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.optimizers.lion import Lion
from lowprec.optimizers.muon import Muon, hidden_matrices, orthogonalised
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD
from lowprec.precision import Precision
from lowprec.recipes import Recipe, recipe
from lowprec.telemetry import sample_entries
from lowprec.watch.watch import Watch

eager = common.eager
in_a_folder_of_its_own = cli.in_a_folder_of_its_own

OURS = [name for name in OPTIMIZERS if name != "adamw"]
each = pytest.mark.parametrize("name", OURS)
every = pytest.mark.parametrize("name", OPTIMIZERS)
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


def initial(name):
    shapes = MATRICES if name == "muon" else SHAPES
    return [draw(*shape, seed=i, scale=0.1) for i, shape in enumerate(shapes)]


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


# the weights have 0.1: below `least` they count as that
@pytest.mark.parametrize("scale, least", [(1.0, 1e-3), (30.0, 1e-3), (1.0, 0.3)])
def test_adafactor_is_torchs(scale, least):
    options = dict(lr=0.01, weight_decay=0.1)
    theirs = lambda params: torch.optim.Adafactor(params, eps=(None, least), **options)  # noqa: E731
    against("adafactor", theirs, SHAPES, scale=scale, tolerance=1e-5, eps=(1e-30, least), **options)


BY_EQUATIONS = [(name, {}, 1.0) for name in OPTIMIZERS]
BY_EQUATIONS += [("sgd", dict(momentum=0.0), 1.0)]
# torch's own bounds the mean of squares at 1.2e-7
BY_EQUATIONS += [("adafactor", {}, scale) for scale in (1e-6, 1e-12)]


@pytest.mark.parametrize("name, options, scale", BY_EQUATIONS)
def test_steps_go_by_the_equations_of_the_paper_in_fp64(name, options, scale):
    rule = RULES[OPTIMIZERS[name].__name__]
    tensors = [draw(*shape, seed=i, scale=0.1) for i, shape in enumerate(((30, 20), (129, 7)))]
    params, optimizer = made(name, tensors, **{"lr": 0.02, **rule.options, **options, **DECAY})
    weights, (group,) = [t.double() for t in tensors], optimizer.param_groups
    moments = [{m: torch.zeros(shape_of(p, m)).double() for m in rule.moments} for p in params]
    for step in range(1, 16):
        feed(optimizer, params, 1, scale, first=step)
        for i, p in enumerate(params):
            update, moments[i] = rule.reference(weights[i], p.grad.double(), moments[i], step, group)
            weights[i] = weights[i] * (1 - group["lr"] * group["weight_decay"]) + update
    for p, w, values in zip(params, weights, moments, strict=True):
        torch.testing.assert_close(p.detach(), w.float(), rtol=1e-4, atol=1e-5)
        for moment, value in values.items():
            found = optimizer.moment(p, moment).view(value.shape)
            torch.testing.assert_close(found, value.float(), rtol=1e-4, atol=1e-6 * scale**2)


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

KEPT = {"sgd": "momentum", "lion": "exp_avg", "muon": "momentum", "adafactor": "row_var"}
KEPT["adamw"] = "exp_avg_sq"


def moved_once(name, lr, **writing):
    """(weights after one step from 1.0, their optimiser): 40,000 equal entries, equal fp32 gradients."""
    p = nn.Parameter(torch.ones(200, 200, dtype=BF16 if writing else torch.float32))
    optimizer = OPTIMIZERS[name]([p], lr=lr, weight_decay=0.0, compiled=False, **writing)
    optimizer.step(grads={p: torch.full(p.shape, 0.77)})
    return p, optimizer


@every
def test_stochastic_writes_are_right_on_average_and_nearest_ones_are_not(name):
    step = (1 - moved_once(name, 1e-2)[0].detach().double()).mean().item()
    lr = 1e-2 * 0.3 * 2**-8 / step  # a step of 0.3 of an ulp below 1
    wanted = moved_once(name, lr)[0].detach().double().mean().item() - 1
    assert abs(wanted) == pytest.approx(0.3 * 2**-8, rel=0.02)
    moved = moved_once(name, lr, update="stochastic")[0].detach().double() - 1
    assert abs(moved.mean().item() - wanted) < 5 * moved.std().item() / 200
    assert moved.unique().numel() == 2
    assert not (moved_once(name, lr, update="nearest")[0].detach() != 1).any()


@every
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


@every
def test_noise_depends_on_place_step_and_seed_alone(name):
    def choices(seed, alone):
        params = [nn.Parameter(torch.ones(100, 100, dtype=BF16)) for _ in range(2)]
        lr = dict(adamw=1e-3, sgd=1e-3, lion=1e-3, adafactor=1e-3, muon=0.05)[name]
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
@every
def test_an_exact_master_has_the_bits_of_fp32(name, master):
    tensors = initial(name)
    params, optimizer = made(name, tensors, lr=1e-2, **DECAY)
    low, exact = made(name, tensors, BF16, lr=1e-2, master=master, **DECAY)
    feed(optimizer, params, 15)
    feed(exact, low, 15)
    for p, q, t in zip(params, low, tensors, strict=True):
        assert same(held(exact, q), p.detach()) and not same(p.detach(), t)
        assert q.dtype == BF16 and exact.low_part(q) is not None


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
    assert coded.nbytes()[KEPT[name]] < 1.4 * 6300 and coded.notes()[KEPT[name]].startswith("; 0 of 6,300")
    assert coded.still(q) and not coded.moment(q, KEPT[name]).any()


# ---- Questions ---------------------------------------------------------------------------------------------


@every
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


# ---- Runs --------------------------------------------------------------------------------------------------

LR = {"sgd": 0.02, "lion": 1e-3}


def run_of(name, key, seed=0, **options):
    if "opt" in key:
        pytest.importorskip("bitsandbytes" if "8" in key else "torchao")
    options = {"optimizer": name, "ema_decay": 0.9, "lr": LR.get(name), "clip_grad": 1.0, **options}
    return Precision(net(seed, width=24), recipe(**RECIPES[key]), **options)


def steps_and_moments(optimizer):
    parts = getattr(optimizer, "parts", [optimizer])
    return [(one.steps_of(p), one.moment(p, m)) for one in parts for p in one.state for m in one.moments]


@pytest.mark.parametrize("kind", ["split", "fp32"])
@pytest.mark.parametrize(
    "name, key", [("adamw", "kahan"), ("muon", "stochastic"), ("adafactor", "pure_bf16")]
)
def test_a_finish_changes_no_value_writes_exactly_and_resumes_bit_for_bit(name, key, kind):
    run, again = run_of(name, key), run_of(name, key)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    common.train(run, 3)
    before = {k: t.float().clone() for k, t in run.weights("raw").items()}
    behind = steps_and_moments(run.optimizer)
    run.finish(kind)
    assert all(same(t.float(), before[k]) for k, t in run.weights("raw").items())
    for (now, moment), (then, old) in zip(steps_and_moments(run.optimizer), behind, strict=True):
        assert now == then == 3 and (moment is old is None or same(moment.float(), old.float()))
    schedule.step()  # it still reaches the groups: the steps below are smaller
    averages = {name: t.clone() for name, t in run.ema.shadow.items()}
    (report,) = common.train(run, 1, measure=True)
    for name, raw in run.weights("raw").items():
        if name in averages:  # it follows what is held exactly, not its bf16 image
            assert torch.allclose(run.ema.shadow[name], averages[name].lerp(raw.float(), 0.1), 1e-5, 1e-8)
    assert run.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    assert report["update_survival"] > 0.999
    states = [t for state in run.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    held = sum(t.nbytes for t in states) + 2 * sum(p.nbytes for p in run.params)
    told = run.ledger().state_bytes * sum(p.numel() for p in run.params)
    assert told == pytest.approx(held, abs=0.01)
    again.load_state_dict(common.through_a_file(run.state_dict()))
    for one in (run, again):
        common.train(one, 2, seed=1)
    for source in ("raw", "ema"):
        assert all(same(t, again.weights(source)[k]) for k, t in run.weights(source).items())
    refused(lambda: run.finish(kind), f"finished with {kind} already")


@pytest.mark.parametrize("kind", ["split", "fp32"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_refused_state_of_a_finished_run_begins_no_finish(name, kind):
    done, run = run_of(name, "kahan"), run_of(name, "kahan")
    for one in (done, run):
        common.train(one, 2)
    done.finish(kind)
    state, behind = done.state_dict(), steps_and_moments(run.optimizer)
    part = state["optimizer"].get("parts", [state["optimizer"]])[-1]
    held = part["state"][min(part["state"])]
    held[next(key for key, t in held.items() if torch.is_tensor(t))] = torch.zeros(3)
    refused(lambda: run.load_state_dict(state), "another model or recipe")
    for (now, moment), (then, old) in zip(steps_and_moments(run.optimizer), behind, strict=True):
        assert now == then and (moment is old is None or same(moment, old))
    assert not run.finished and run.recipe.kahan == "on"


def test_what_can_not_be_finished_is_refused():
    refused(lambda: run_of("adamw", "bf16").finish("split"), "fp32 throughout", "add --pure_bf16")
    refused(lambda: run_of("adamw", "split").finish("fp32"), "--master split writes exactly")
    refused(lambda: run_of("adamw", "pure_bf16").finish("half"), "finish", "split", "fp32")
    refused(
        lambda: run_of("adamw", "pure_bf16", grad_release=True, clip_grad=0.0).finish("split"),
        "leave one out",
    )


def test_sites_have_rows_and_values_of_their_own():
    run = run_of("muon", "stochastic")
    rows = {row["site"]: row for row in run.ledger().rows}
    assert rows["momentum"]["value"] == rows["exp_avg"]["value"] == "bf16"
    assert rows["momentum"]["bytes"] > rows["exp_avg"]["bytes"] > 0
    assert rows["orthogonalise"]["value"] == "bf16" and "Newton-Schulz" in str(run.ledger())
    assert run.optimizer_name == "Muon and AdamW"
    rows = {row["site"]: row for row in run_of("sgd", "stochastic").ledger().rows}
    assert rows["exp_avg"]["why"] == rows["exp_avg_sq"]["why"] == "sgd keeps none"
    assert rows["exp_avg"]["bytes"] == 0 and rows["momentum"]["bytes"] == 2
    assert "orthogonalise" not in rows and "row_var" not in rows
    assert {"momentum", "row_var"}.isdisjoint(row["site"] for row in run_of("adamw", "fp32").ledger().rows)


def test_sites_follow_the_flags_and_can_be_set():
    low = dict(pure_bf16=True)
    assert recipe(**low, optimizer="sgd").momentum == "bf16"
    assert recipe(**low, master="split", optimizer="muon").orthogonalise == "fp32"  # the bits of fp32
    assert recipe(bf16=True, optimizer="muon").orthogonalise == "bf16"
    assert recipe(optimizer="muon").orthogonalise == recipe(optimizer="muon").momentum == "fp32"
    assert recipe(opt8bit=True, optimizer="sgd").coded == {"int8"}
    r = recipe(sites=["momentum=bf16", "orthogonalise=bf16"], optimizer="muon")
    run = Precision(net(), r, optimizer="muon")
    assert run.recipe == r == r.keeping("muon")
    states = [item for state in run.optimizer.state.values() for item in state.items()]
    held = {name: t.dtype for name, t in states if name != "step"}
    assert held == dict(momentum=BF16, exp_avg=torch.float32, exp_avg_sq=torch.float32)
    assert run.optimizer.parts[0].dtype == BF16
    assert recipe(optimizer="adamw") == recipe() == Recipe() == Recipe().keeping("adamw")
    assert recipe(optimizer="torch").moments == ["exp_avg", "exp_avg_sq"]
    warned = recipe(**low, optimizer="adafactor").warnings()
    assert any(line.startswith("row_var and col_var in bf16") for line in warned)
    sound = recipe(**low, stochastic=True, optimizer="adafactor").warnings()
    assert not any("row_var" in line for line in sound)
    assert not any("exp_avg_sq" in line for line in recipe(**low, optimizer="sgd").warnings())


REFUSED = {
    "a site of others": (dict(sites=["momentum=bf16"]), ["sgd and muon", "this is adamw"]),
    "a site of muon": (
        dict(sites=["orthogonalise=bf16"], optimizer="sgd"),
        ["--optimizer muon", "this is sgd"],
    ),
    "a moment that is not kept": (
        dict(sites=["exp_avg_sq=bf16"], optimizer="lion"),
        ["lion keeps no exp_avg_sq", "exp_avg"],
    ),
    "a value": (dict(sites=["row_var=int8"], optimizer="adafactor"), ["no value of row_var", "fp32, bf16"]),
    "codes": (dict(opt8bit=True, optimizer="adafactor"), ["too few for codes", "--set row_var=bf16"]),
    "nothing rounded": (
        dict(pure_bf16=True, master="split", stochastic=True, optimizer="sgd"),
        ["drop --stochastic or add --set momentum=bf16"],
    ),
}


@pytest.mark.parametrize("flags, words", REFUSED.values(), ids=REFUSED)
def test_what_an_optimiser_lacks_is_refused_in_one_line(flags, words):
    refused(lambda: recipe(**flags), *words)


def test_options_that_an_optimiser_lacks_are_refused():
    params = [nn.Parameter(torch.ones(4, 4))]
    for name in ("adamw", "lion", "adafactor", "torch"):
        words = "--momentum", "sgd and muon"
        refused(lambda name=name: build.build(name, params, recipe(), momentum=0.5), *words)
    refused(lambda: build.build("adamw", params, recipe(), nesterov=True), "--nesterov", "sgd and muon")
    refused(lambda: strategies.settle({"optimizer": "sgd", "beta2": 0.9}), "--beta2 0.9", "sgd has no beta2")
    refused(lambda: Muon([nn.Parameter(torch.ones(4))]), "here is a vector", "AdamW")
    refused(lambda: build.build("adam", params, recipe()), "unknown", "sgd, lion, adafactor, muon")
    assert build.build("sgd", params, recipe(), momentum=0.0).defaults["momentum"] == 0.0


def test_defaults_are_the_optimisers_own_until_a_flag_says_otherwise():
    settled = {name: strategies.settle({"optimizer": name}).config for name in OPTIMIZERS}
    assert {name: c.lr for name, c in settled.items()} == {
        "adamw": 1e-3, "sgd": 0.01, "lion": 1e-4, "adafactor": 0.01, "muon": 1e-3,
    }  # fmt: skip
    assert settled["lion"].beta2 == 0.99 and settled["adamw"].beta2 == 0.999
    assert strategies.settle({"optimizer": "sgd", "lr": 0.3}).config.lr == 0.3
    for name, config in settled.items():
        (group, *_) = Precision(net(), optimizer=name).optimizer.param_groups
        assert group["lr"] == config.lr, "the class and its flags say two things"
    (group,) = Precision(net(), optimizer="sgd", momentum=0.5, nesterov=True).optimizer.param_groups
    assert (group["momentum"], group["nesterov"]) == (0.5, True)


# ---- Which parameters are whose ----------------------------------------------------------------------------


def names_of(model, params):
    return {name for name, p in model.named_parameters() if any(p is q for q in params)}


def test_muon_takes_the_matrices_of_hidden_layers():
    model = net()
    run = Precision(model, optimizer="muon")
    muon, adamw = run.optimizer.parts
    assert (type(muon), type(adamw)) == (Muon, AdamW)
    of_muon = names_of(model, [p for group in muon.param_groups for p in group["params"]])
    assert of_muon == {"middle.weight"}  # not the first convolution, the embedding, the norm, the head
    assert len(run.optimizer.owner) == len(run.params)


class Text(nn.Module):
    """A language model with a tied head, a position table that is no module, and a vector that looks like a
    matrix."""

    def __init__(self):
        super().__init__()
        self.wte, self.attn, self.norm = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2), nn.LayerNorm(8)
        self.up, self.decode = nn.Linear(8, 16), nn.Linear(8, 20, bias=False)
        self.decode.weight = self.wte.weight
        self.pos_embed, self.gate = nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(1, 8))
        self.lm_head = nn.Linear(16, 8)


def test_embeddings_heads_and_vectors_are_not_hidden_matrices():
    model = Text()
    model.experts = nn.Parameter(torch.zeros(3, 8, 8))
    hidden = {"attn.in_proj_weight", "attn.out_proj.weight", "up.weight", "experts"}
    assert names_of(model, hidden_matrices(model)) == hidden
    model.roles = {"up": {"head"}}  # as the net declares it
    assert names_of(model, hidden_matrices(model)) == hidden - {"up.weight"}


def test_groups_keep_their_options_and_may_name_an_optimiser():
    model = net()
    groups = [
        {"params": [model.middle.weight, model.middle.bias], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if "middle" not in name], "optimizer": "sgd"},
    ]
    run = Precision(model, recipe(pure_bf16=True, stochastic=True), groups=groups, optimizer="muon")
    assert [type(part) for part in run.optimizer.parts] == [Muon, AdamW, SGD]
    found = [(g["lr"], g["weight_decay"], len(g["params"])) for g in run.optimizer.param_groups]
    assert found == [(2e-3, 0.1, 1), (2e-3, 0.1, 1), (0.01, 0.0, 8)]
    assert run.recipe.momentum == run.recipe.exp_avg_sq == "bf16"
    common.train(run, 3)
    others = [p for p in run.params if p is not model.middle.bias]
    assert run.optimizer.nbytes()["momentum"] == 2 * sum(p.numel() for p in others)


# ---- The doctor --------------------------------------------------------------------------------------------


def watched(name, key, lr=None):
    run = run_of(name, key, **({"lr": lr} if lr else {}))
    watch = Watch(run.model, run.optimizer, run.ema, every=3, most=512)
    common.train(run, 24)
    watch.remove()
    return watch


@each
def test_watch_is_silent_about_what_works(name):
    watch = watched(name, "stochastic")
    assert [f for f in watch.findings() if f.severity != "note"] == [], str(watch)
    assert watch.looks >= 8 and watch.shares()["middle.weight"]["update"] < 0.02


@each
def test_watch_names_updates_that_are_lost_to_nearest(name):
    small = dict(sgd=1e-4, lion=1e-5, adafactor=1e-4, muon=1e-5)[name]
    watch = watched(name, "pure_bf16", small)
    lost = {f.tensor for f in watch.findings() if f.site == "update" and f.severity != "note"}
    assert "middle.weight" in lost, str(watch)
    assert watch.shares()["middle.weight"]["update"] > 0.3


# ---- The command -------------------------------------------------------------------------------------------


def test_every_site_of_an_optimiser_is_explained():
    for name, site in recipes.OF_OPTIMIZERS.items():
        theirs = [key for key in OPTIMIZERS if any(name in kind.sites for kind in build.classes_of(key))]
        assert theirs and set(site.values) - {"fp32"} <= set(site.why)
    for kind in OPTIMIZERS.values():
        assert set(kind.moments) <= set(recipes.MOMENTS) and kind.__doc__
    assert set(Adafactor.signed.values()) == {False} and Lion.flags["lr"] == 1e-4


def test_an_eps_in_a_loop_belongs_to_those_that_have_one_and_is_a_pair_of_adafactors():
    for name in ("sgd", "lion"):
        refused(lambda name=name: Precision(nn.Linear(4, 4), optimizer=name, eps=1e-6), "--optimizer adamw")

    def made(eps):
        return Precision(nn.Linear(4, 4), optimizer="adafactor", eps=eps).optimizer

    refused(lambda: made(0.05), "a pair, of squares and of weights, as (1e-30, 0.001)")
    assert made((1e-30, 0.05)).param_groups[0]["eps"] == (1e-30, 0.05)


EPS = [({"optimizer": "adafactor", "least_rms": 0.05}, (1e-30, 0.05)), ({"eps": 1e-3}, 1e-3)]


@pytest.mark.parametrize("flags, eps", EPS)
def test_an_eps_reaches_the_optimiser(flags, eps):
    run = trainer.Trainer(strategies.settle({**flags, "batch_size": 4}))
    assert [group["eps"] for group in run.precision.optimizer.param_groups] == [eps]


def test_adafactor_says_that_zeros_grow_late(capsys):
    assert cli.quick("--optimizer", "adafactor", steps=1) == 0
    assert "matrices start at zero and grow late" in capsys.readouterr().out
