"""Loops that others write, and what went wrong in them: weights that something else writes, containers of
every kind, two nets that train each other, numbers that make no sense, states of torch's optimisers.
"""

import collections
import copy
import dataclasses
import pickle
import types

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, fp32_sums, refused
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowprec
from lowprec.optimizers.rounded import AdamW
from lowprec.precision import Precision, recipe
from lowprec.watch.watch import Watch

LOW = dict(pure_bf16=True, stochastic=True)
eager = common.eager


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def trained(run, steps, after=lambda: None):
    for i in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        run.backward(run(x).square().mean())
        run.step()
        after()


# ---- Weights that something else writes --------------------------------------------------------------------


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_weights_of_a_file_count_whatever_the_master_was(master):
    run = Precision(net(), recipe(pure_bf16=True, master=master), lr=1e-4)
    trained(run, 1)
    written = {name: torch.full_like(w, 0.5) for name, w in run.model.state_dict().items()}
    written["0.bias"] = torch.zeros(16, dtype=BF16)
    run.model.load_state_dict(written)
    for p in run.params:
        held = run.optimizer.held(p).view(p.shape)
        assert ((held - p.float()).abs() <= 2**-8 * p.float().abs() + 1e-38).all()  # half of the last bit
    trained(run, 3)
    for name, w in run.weights("raw").items():
        assert (w - written[name]).abs().max() < 4e-3, name


# ---- Containers --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Out:
    x: torch.Tensor
    aux: torch.Tensor = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.x = self.x / 2


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 4), kind

    def forward(self, x, notes=None):
        y = self.layer(x)
        if notes is not None:
            notes.append(y) if isinstance(notes, list) else notes.update(y=y)
        if self.kind is Out:
            out = Out(y)
            out.aux = y.mean()
            return out
        if self.kind is types.SimpleNamespace:
            return self.kind(x=y)
        return self.kind([y]) if issubclass(self.kind, list) else self.kind(x=y)


class Rows(list):
    pass


class Named(dict):
    pass


Fields = collections.namedtuple("Fields", "x")


@pytest.mark.parametrize("kind", [Out, Rows, Named, Fields, collections.UserDict, types.SimpleNamespace])
@pytest.mark.parametrize("flags", [{}, LOW], ids=["fp32", "bf16"])
def test_a_net_returns_what_it_likes(kind, flags):
    torch.manual_seed(0)
    run, x = Precision(Returns(kind), recipe(**flags)), torch.ones(2, 8)
    own, out = run.model(x.to(next(run.model.parameters()).dtype)), run(x)
    assert type(out) is kind
    parts = []
    for o in (own, out):
        if isinstance(o, (list, tuple)):
            parts.append(list(o))
        else:
            parts.append(list((vars(o) if hasattr(o, "x") else o).values()))
    assert [p.dtype for p in parts[1]] == [torch.float32] * len(parts[0])
    assert all(torch.equal(a.float(), b) for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("flags", [{}, LOW], ids=["fp32", "bf16"])
def test_a_net_writes_into_what_it_is_given(flags):
    run = Precision(Returns(Named), recipe(**flags))
    listed, cache = [], {}
    run(torch.ones(2, 8), listed), run(torch.ones(2, 8), notes=cache)
    assert len(listed) == len(cache) == 1


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, t=None):
        self.seen = x["t"] if isinstance(x, dict) else t
        return self.layer(x["x"] if isinstance(x, dict) else x)


class Adapted(nn.Module):
    """As PEFT wraps a model."""

    def __init__(self):
        super().__init__()
        self.base = Timed()

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


def test_timesteps_keep_their_bits_in_wrappers_and_batches():
    t, run, plain = torch.tensor([999.0, 703.5]), Precision(Adapted(), recipe(**LOW)), Timed()
    run(torch.ones(2, 4), t)
    assert torch.equal(run.model.base.seen, t)
    Precision(plain, recipe(**LOW))({"x": torch.ones(2, 4), "t": t})
    assert torch.equal(plain.seen, t)


def test_a_name_alone_is_kept():
    run = Precision(Timed(), recipe(**LOW), keep="target")  # of which t is a part
    run(torch.ones(2, 4), torch.ones(2))
    assert run.model.seen.dtype == BF16


def test_a_sparse_input_is_cast():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, edges, x):
            return self.layer(x) * edges.values().sum()

    run = Precision(Graph(), recipe(**LOW))
    assert run(torch.eye(8).to_sparse().coalesce(), torch.ones(8, 8)).isfinite().all()


# ---- Steps -------------------------------------------------------------------------------------------------


def test_two_nets_that_train_each_other_learn_as_torchs():
    def made():
        torch.manual_seed(0)
        return nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def losses(g, d, i):
        torch.manual_seed(i)
        z, x = torch.randn(16, 4), torch.randn(16, 8)
        yield (F.softplus(-d(x)) + F.softplus(d(g(z).detach()))).mean()
        yield F.softplus(-d(g(z))).mean()

    nets = made()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.0) for m in nets]
    runs = [Precision(m, lr=1e-2) for m in made()]
    for i in range(20):
        for (one, other), k in zip(zip(losses(*nets, i), losses(*runs, i), strict=True), (1, 0), strict=True):
            optimizers[k].zero_grad()
            one.backward()
            optimizers[k].step()
            runs[k].zero_grad()
            runs[k].backward(other)
            runs[k].step()
    for m, run in zip(nets, runs, strict=True):
        for p, q in zip(m.parameters(), run.params, strict=True):
            assert torch.equal(p, q)


def test_zero_grad_forgets_sums_of_micro_batches():
    run = Precision(net(), recipe(sites=("accumulate=fp32",), **LOW), lr=1e-2, accumulate=2)
    run.backward(1e6 * run(torch.ones(2, 8)).sum())
    assert fp32_sums(run)
    run.zero_grad()
    assert not fp32_sums(run) and all(p.grad is None for p in run.params)


def test_sums_that_ddp_would_not_see_are_refused():
    run = Precision(net(), recipe(sites=("accumulate=fp32",), **LOW), accumulate=2)

    class Wrapped(nn.Module):  # as DistributedDataParallel within no_sync()
        require_backward_grad_sync = False

        def forward(self, x):
            return run.model(x)

    run.forward = Wrapped()
    refused(lambda: run.backward(run(torch.ones(2, 8)).sum()), "leave no_sync() out")


def test_a_net_that_keeps_its_auxiliary_loss_draws():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.loss = nn.Linear(8, 4), None

        def forward(self, x):
            y = self.layer(x)
            self.loss = y.square().mean()
            return y

    run = Precision(Router())
    run.backward(run(torch.ones(2, 8)).mean() + run.model.loss)
    run.step()
    assert run.generator()(torch.ones(2, 8)).shape == (2, 4) and run.model.loss.grad_fn is not None


def test_a_second_run_of_a_net_with_islands():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    Precision(model, recipe(sites=("islands=norm",), **LOW))
    assert Precision(model)(torch.ones(2, 8)).dtype == torch.float32
    assert not model[1]._forward_pre_hooks and not model[1]._forward_hooks


def test_products_in_fp8_have_no_second_derivative():
    layers = nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)
    run = Precision(nn.Sequential(*layers), recipe(fp8=True, fp8_backend="emulate"))
    x = torch.randn(16, 32, requires_grad=True)
    (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        g.square().sum().backward()


@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3"])
def test_codes_are_copied_and_pickled(kind):
    torch.manual_seed(0)
    layer = nn.Linear(128, 64)
    optimizer = AdamW(layer.parameters(), exp_avg=kind, exp_avg_sq=kind, compiled=False)
    for p in layer.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for p, q in zip(layer.parameters(), twin.param_groups[0]["params"], strict=True):
            assert torch.equal(optimizer.moment(p, "exp_avg"), twin.moment(q, "exp_avg"))


# ---- What makes no sense -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *(dict(lr=lr) for lr in (-1e-2, float("nan"), "1e-3")),
        *(dict(betas=betas) for betas in ((0.9, 1.5), (1.0, 0.999), (0.9,))),
        dict(eps=-1.0),
        dict(weight_decay=-1.0),
        dict(ema_decay=1.5),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense(options):
    name = next(iter(options)).removeprefix("ema_")
    refused(lambda: Precision(net(), recipe(), **options), f"{name}=")


def test_an_optimiser_that_asks_for_a_closure():
    refused(lambda: Precision(net(), optimizer=torch.optim.LBFGS), "LBFGS asks for a closure")


def test_dtypes_that_have_a_remedy():
    refused(lambda: AdamW(nn.Linear(2, 2).double().parameters()), "call model.float() before")
    refused(lambda: AdamW(nn.Linear(2, 2).half().parameters()), "--fp16")


def test_computed_weights_stay_out_of_fp8():
    computed = nn.utils.weight_norm(nn.Linear(32, 32))
    run = Precision(nn.Sequential(computed, nn.Linear(32, 32), nn.Linear(32, 32)), recipe(fp8=True))
    assert run(torch.randn(16, 32)).isfinite().all()
    assert "its weight is computed from others" in str(run.methods[0])


# ---- States of torch's optimisers --------------------------------------------------------------------------


def stepped(kind, **options):
    model = net()
    unused = nn.Linear(2, 2)
    optimizer = kind([*model.parameters(), *unused.parameters()], lr=1e-2, **options)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer.state_dict()


def ours(model, state):
    optimizer = AdamW([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=1e-2, compiled=False)
    optimizer.load_state_dict(state)
    return optimizer


def test_a_parameter_without_a_step_is_no_other_model():
    model, state = stepped(torch.optim.AdamW)
    optimizer = ours(model, state)
    assert [optimizer.state[p]["step"] for p in optimizer.param_groups[0]["params"]] == [1] * 4 + [0] * 2


@pytest.mark.parametrize(
    "kind, options, said",
    [
        (torch.optim.AdamW, dict(maximize=True), "uphill"),
        (torch.optim.AdamW, dict(amsgrad=True), "amsgrad"),
        (torch.optim.Adam, dict(weight_decay=0.1), "L2 decay"),
        (torch.optim.RAdam, dict(decoupled_weight_decay=True), "RAdam or NAdam"),
        (torch.optim.NAdam, dict(decoupled_weight_decay=True), "RAdam or NAdam"),
        (torch.optim.Adafactor, dict(), "clip"),
        (torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1), "L2 decay"),
        (torch.optim.Muon, dict(), "original"),
    ],
    ids=["maximize", "amsgrad", "l2", "radam", "nadam", "adafactor", "sgd", "muon"],
)
def test_states_of_another_rule_are_refused(kind, options, said):
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    theirs = kind([p], lr=1e-2, **options)
    theirs.step()
    kind = getattr(lowprec, kind.__name__, AdamW)
    refused(lambda: kind([p], lr=1e-2).load_state_dict(theirs.state_dict()), said)


@pytest.mark.parametrize(
    "kind, options, own",
    [
        (torch.optim.SGD, dict(momentum=0.9), {}),
        (torch.optim.SGD, {}, {}),  # which keeps nothing
        (torch.optim.Muon, dict(weight_decay=0.1), dict(adjust="original", orthogonalise="bf16")),
        (torch.optim.AdamW, {}, {}),
    ],
    ids=["sgd", "sgd without momentum", "muon", "adamw"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_state_of_torch_goes_on_in_ours(kind, options, own, dtype):
    """Of bf16 weights theirs is in bf16, and is widened."""
    p, g = nn.Parameter(torch.ones(4, 8, dtype=dtype)), torch.arange(32.0).view(4, 8).to(dtype)
    theirs = kind([p], lr=1e-2, **options)
    p.grad = g
    theirs.step()
    q = nn.Parameter(p.detach().clone())
    ours = getattr(lowprec, kind.__name__)([q], lr=1.0, **own)
    ours.load_state_dict(theirs.state_dict())
    p.grad, q.grad = g.flip(0), g.flip(0)
    theirs.step()
    ours.step()
    torch.testing.assert_close(q, p, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-6)


def test_a_state_without_its_step_is_refused():
    model, state = stepped(torch.optim.AdamW)
    del state["state"][0]["step"]
    refused(lambda: ours(model, state), "step is missing there")


# ---- Watch -------------------------------------------------------------------------------------------------


def looked_at(every, average_every, begin=0):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(model)
    watch = Watch(model, optimizer, average, every=every)
    for i in range(300):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :4].tanh()).backward()
        optimizer.step()
        if i >= begin and (i + 4) % average_every == 0:  # between two looks
            average.update_parameters(model)
    return watch


@pytest.mark.parametrize("average_every, begin", [(50, 100), (15, 0)])
def test_an_average_once_an_epoch_is_no_finding(average_every, begin):
    assert "healthy" in str(looked_at(10, average_every, begin)).splitlines()[-1]
