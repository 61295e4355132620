"""precision.View and Cast: arguments and outputs, mixed dtypes, islands."""

import functools

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, batches, draw, net, refused, same, start, train
from torch import nn

from lowprec.cast import exact_modules
from lowprec.precision import Precision
from lowprec.recipes import recipe
from lowprec.roles import roles

eager = common.eager
LOW = dict(pure_bf16=True, stochastic=True)

# ---- Arguments and outputs ---------------------------------------------------------------------------------


class Spy(nn.Module):
    """Remembers the dtypes of what it is given; multiplies by an entry of a table, or looks up in it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.seen = []

    def forward(self, x, t=None, *more, scale=None, **rest):
        named = {"x": x, "t": t, "scale": scale, **rest, **{str(i): value for i, value in enumerate(more)}}
        self.seen.append({name: value.dtype for name, value in named.items() if value is not None})
        return self.embedding(x) if not x.is_floating_point() else x * self.embedding.weight[0, 0]


def seen(flags, *args, **kwargs):
    model = Spy()
    out = start(flags, model)(*args, **kwargs)
    return model.seen[-1], out.dtype


one, whole = torch.ones(3), torch.arange(3)


def test_inputs_are_cast_but_timesteps_and_integers_are_not():
    dtypes, out = seen(LOW, one, one, whole, one)
    assert dtypes == {"x": BF16, "t": torch.float32, "0": torch.int64, "1": BF16} and out == torch.float32
    assert seen(LOW, whole)[1] == torch.float32
    assert seen(dict(pure_bf16=True, sites=["loss=bf16"]), one)[1] == BF16
    assert seen({}, one, one) == ({"x": torch.float32, "t": torch.float32}, torch.float32)
    assert seen(dict(bf16=True), one)[0] == {"x": torch.float32}  # autocast's business
    assert seen(LOW, one.double(), scale=one.half())[0] == {"x": BF16, "scale": BF16}


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_named_exceptions_keep_their_dtype(by):
    def call(t, **options):
        model = Spy()
        run = Precision(model, recipe(**LOW), **options)
        run(one, t) if by == "position" else run(x=one, t=t)
        return model.seen[-1]

    assert call(one.double()) == {"x": BF16, "t": torch.float64}
    assert call(one, keep=()) == {"x": BF16, "t": BF16}
    assert call(one, keep=("x",)) == {"x": torch.float32, "t": BF16}


@pytest.mark.parametrize("name", ["t", "timestep", "timesteps"])
def test_what_samplers_call_a_time_is_left_alone(name):
    dtypes, _ = seen(LOW, one, **{name: one, "guidance": one})
    assert dtypes == {"x": BF16, name: torch.float32, "guidance": BF16}


def test_a_generator_casts_as_its_run_does():
    run = Precision(Spy(), recipe(**LOW), keep=("scale",))
    generator = run.generator()
    generator(one, one, scale=one)
    assert generator.net.seen[-1] == {"x": BF16, "t": BF16, "scale": torch.float32}
    generator = run.frozen("raw", generation="fp32")
    generator(one, scale=one.half())
    assert generator.net.seen[-1] == {"x": torch.float32, "scale": torch.float16}


class WithLoss(nn.Module):
    """Forms its loss itself and returns a tree."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch, *, reduction="mean"):
        out = self.layer(batch["x"])
        loss = F.mse_loss(out.float(), batch["y"].float(), reduction=reduction)
        return {"loss": loss, "more": (out, [out.argmax(1), "text", None, 3])}


@pytest.mark.parametrize("flags", [{}, dict(bf16=True), dict(fp16=True), LOW], ids=str)
def test_a_loss_inside_comes_back_in_fp32_with_any_tree(flags):
    torch.manual_seed(0)
    run = start(flags, WithLoss(), lr=1e-2)
    x = draw(16, 8)
    losses = []
    for _ in range(40):
        out = run({"x": x, "y": x, "name": "a"}, reduction="mean")
        low, (index, *rest) = out["more"]
        assert out["loss"].dtype == low.dtype == torch.float32 and out["loss"].dim() == 0
        assert index.dtype == torch.int64 and rest == ["text", None, 3]
        losses.append(out["loss"].item())
        run.backward(out["loss"])
        run.step()
    assert losses[-1] < 0.7 * losses[0]
    # bf16 outputs came back as fp32 ones: they have 8 significant bits
    assert same(low, low.to(BF16).float()) == (flags in (dict(bf16=True), LOW))


def test_the_callers_tensors_stay_as_they_are():
    x, t = torch.full((3,), 1 / 3), torch.full((3,), 1 / 3)
    batch = {"x": x, "y": [t]}

    class Net(nn.Linear):
        def forward(self, batch):
            batch["x"].mul_(0)  # of the copy
            return super().forward(batch["x"])

    start(LOW, Net(3, 3))(batch)
    assert batch["x"] is x and batch["y"][0] is t and same(x, torch.full((3,), 1 / 3))


# ---- Mixed dtypes ------------------------------------------------------------------------------------------


class Projected(nn.Module):
    """Meets an fp32 buffer with a bf16 activation, as `meet` says."""

    def __init__(self, meet):
        super().__init__()
        self.layer, self.meet = nn.Linear(8, 8), meet
        self.register_buffer("basis", torch.eye(8))

    def forward(self, x, t=None):
        return self.meet(self.layer(x), self.basis, t)


MEETINGS = {
    "matmul": lambda h, basis, t: h @ basis,
    "linear": lambda h, basis, t: F.linear(h, basis),
    "convolution": lambda h, basis, t: F.conv1d(h[None], basis[:, :, None].mT.expand(-1, 2, -1)),
    "einsum": lambda h, basis, t: torch.einsum("bi,ij->bj", h, basis),
    "index_put": lambda h, basis, t: h.clone().index_put((torch.tensor([0]),), basis[:1]),
}


@pytest.mark.parametrize("how", MEETINGS)
def test_mixed_dtypes_name_the_buffer_and_the_remedy(how):
    x = torch.ones(2, 8)
    words = ("cast it to x.dtype in forward", "dtypes={'basis': 'bf16'}", "recipe(bf16=True)")
    refused(lambda: start(LOW, Projected(MEETINGS[how]))(x), *words)
    remedy = start(dict(LOW, sites=["buffers=bf16"]), Projected(MEETINGS[how]))
    assert remedy(x).isfinite().all()
    assert start({}, Projected(MEETINGS[how]))(x).isfinite().all()


def test_mixed_dtypes_name_an_argument_that_is_left_alone():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Parameter(torch.eye(8))

        def forward(self, x, t):
            return x + t @ self.time

    x = torch.ones(2, 8)
    words = ("the argument t stays fp32", "fp32 there: t;", "cast it to x.dtype in forward", "keep")
    refused(lambda: start(LOW, Timed())(x, x), *words)
    refused(lambda: start(LOW, Timed())(x, t=x), *words)
    assert start(LOW, Timed(), keep=())(x, x).dtype == torch.float32


def test_other_errors_of_a_model_stay_as_they_are():
    def shapes(h, basis, t):
        return h @ basis[:3].to(h.dtype)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        start(LOW, Projected(shapes))(torch.ones(2, 8))


# ---- Islands -----------------------------------------------------------------------------------------------

ISLANDS = {
    "none": (),
    "norm": ("norm",),
    "embed": ("time_embed",),
    "final": ("out",),
    "norm+embed": ("norm", "time_embed"),
    "norm+embed+final": ("norm", "time_embed", "out"),
}


@pytest.mark.parametrize("islands", ISLANDS)
def test_islands_stay_fp32_and_train(islands):
    model = net()
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = start(dict(LOW, sites=[f"islands={islands}"]), model, lr=1e-2, clip_grad=1.0)
    for n, p in model.named_parameters():
        dtype = torch.float32 if n.startswith(ISLANDS[islands]) else BF16
        assert same(p.detach(), original[n].to(dtype)), f"{n}: an island starts from its fp32 weights"
    seen = []
    model.middle.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model.norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    (x, y) = batches(1)[0]
    before = F.mse_loss(run(x, torch.arange(8.0)), y).item()
    train(run, 20)
    after = F.mse_loss(run(x, torch.arange(8.0)), y).item()
    assert after < before and set(seen) == {BF16}, "the rest of the net is bf16"
    count = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    row = next(r for r in run.ledger().rows if r["site"] == "islands")
    assert row["value"] == islands and (islands == "none" or f"{count:,} of" in row["why"])


def test_an_island_computes_in_fp32_by_position_and_keyword():
    seen = []

    class Norm(nn.LayerNorm):
        def forward(self, x, bias):
            seen.append((x.dtype, bias.dtype))
            return super().forward(x) + bias

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), Norm(8)

        def forward(self, x):
            return self.first(self.norm(self.norm(x, x), bias=x))

    start(dict(LOW, sites=["islands=norm"]), Net())(torch.ones(2, 8))
    assert seen == [(torch.float32, torch.float32)] * 2


def parts():
    return nn.ModuleDict(
        {
            "label_embed": nn.Embedding(3, 4),
            "block": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4)),
            "final": nn.ModuleDict({"norm": nn.RMSNorm(4), "linear": nn.Linear(4, 4)}),
            "layout": nn.Linear(4, 4),
            "up": nn.ModuleDict({"final": nn.Linear(4, 4), "out": nn.Linear(4, 4)}),
            "outer": nn.Linear(4, 4),
        }
    )


def islands_of(model, islands):
    return exact_modules(model, recipe(**LOW, sites=[f"islands={islands}"]))[0]


def test_island_modules_by_kind_and_name():
    model = parts()
    names = {m: n for n, m in model.named_modules()}

    def found(islands):
        return {names[m] for m in islands_of(model, islands)}

    assert found("none") == set()
    assert found("norm") == {"block.0", "block.2", "final.norm"}
    assert found("embed") == {"label_embed"}
    assert found("final") == {"final.norm", "final.linear", "up.final"}
    assert found("norm+final") == found("norm") | found("final")
    assert len(islands_of(model, "norm+final")) == 5, "each module once"
    assert islands_of(net(), "final")[0].out_channels == 1
    bare = nn.Sequential(nn.Linear(2, 2))
    for islands in ("final", "norm", "norm+embed"):
        words = (f"islands={islands}", "this net has no", "leave")
        refused(functools.partial(islands_of, bare, islands), *words)


def test_roles_by_type_and_name_and_as_a_net_declares_them():
    model = parts()
    found = {name: role for name, role in roles(model).items() if role}
    assert found == {
        "label_embed": {"embedding"},
        "block.0": {"norm"},
        "block.2": {"norm"},
        "final": {"head"},
        "final.norm": {"norm", "head"},
        "final.linear": {"head"},
        "up.final": {"head"},
    }
    model.roles = {"up": {"head"}, "block.0": set()}
    found = roles(model)
    assert found["up.out"] == {"head"} and found["block.0"] == set() and found["block.2"] == {"norm"}
    names = {m: n for n, m in model.named_modules()}
    assert "up.out" in {names[m] for m in islands_of(model, "final")}


class OwnNorm(nn.Module):
    """nanoGPT's and T5's kind: a norm whose class is called anything."""

    def __init__(self, width, offset=True, axis=-1):
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 0.7))
        self.bias = nn.Parameter(torch.zeros(width)) if offset else None
        self.axis = axis

    def forward(self, x):
        x = (x - x.mean(self.axis, keepdim=True)) / (x.std(self.axis, keepdim=True) + 1e-6)
        shape = [-1] + [1] * (x.dim() - 2) if self.axis == 1 else [-1]
        x = x * self.gain.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)


class OwnScale(OwnNorm):
    def forward(self, x):
        return x * self.gain


class OwnTanh(OwnNorm):
    def forward(self, x):
        return (self.gain * x).tanh()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_are_known_by_what_they_do(device):
    norms = (OwnNorm(8), OwnNorm(8, offset=False), OwnNorm(8, axis=1))
    net = nn.Sequential(nn.Linear(8, 8), *norms, OwnScale(8), OwnTanh(8), nn.PReLU(8)).to(device)
    assert [name for name, found in roles(net).items() if "norm" in found] == ["1", "2", "3"]
    start(dict(LOW, sites=["islands=norm"]), net)
    assert net[1].gain.dtype == torch.float32 and net[4].gain.dtype == BF16


class Graph:
    """What a net may be given that is no tree of tensors."""

    def __init__(self):
        self.x, self.edges, self.name = draw(4, 8), torch.arange(4), "a graph"


def test_the_tensors_of_an_object_are_cast_in_a_copy():
    class Net(nn.Linear):
        def forward(self, graph):
            self.seen = graph.x.dtype, graph.edges.dtype, graph.name, type(graph)
            return super().forward(graph.x)

    graph = Graph()
    run = start(LOW, Net(8, 8))
    assert run(graph).dtype == torch.float32
    assert run.model.seen == (BF16, torch.int64, "a graph", Graph) and graph.x.dtype == torch.float32


def test_what_can_not_be_copied_is_one_line():
    run = start(LOW, torch.jit.script(nn.Sequential(nn.Linear(8, 8))))
    run.backward(run(draw(2, 8)).square().mean())
    run.step()
    refused(run.generator, "TorchScript", "run.weights()")


@pytest.mark.parametrize("islands", ["embed", "final"])
def test_a_tied_head_is_an_island_with_its_embedding(islands):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.block = nn.Embedding(10, 8), nn.Linear(8, 8)
            self.lm_head = nn.Linear(8, 10, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids):
            return self.lm_head(self.block(self.wte(ids)))

    model = Language()
    run = start(dict(LOW, sites=[f"islands={islands}"]), model)
    assert model.wte.weight.dtype == torch.float32 and model.block.weight.dtype == BF16
    assert model.lm_head.weight is model.wte.weight
    assert run(torch.arange(5)).shape == (5, 10)


class Rotary(nn.Module):
    """(x [B, 16]) -> [B, 16]: frequencies like RoPE's, statistics of a norm, a mask."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(8) / 8), persistent=False)
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool))

    def forward(self, x):
        angles = 1000 * torch.arange(len(x))[:, None] * self.frequencies
        h = self.layer(x) * torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype)
        return self.last(self.norm(h)).masked_fill(~self.mask, 0)


def train_rotary(run, steps):
    for step in range(steps):
        x = draw(32, 16, seed=step) + 3
        run.backward((run(x) - x).square().mean())
        run.step()


CAST, NORM = "buffers=bf16", dict(dtypes={"norm": "bf16"})
ADAPTERS = dict(lora=4, dtypes={"frequencies": "bf16"})
HELD = [  # flags, sites, options, what is frozen, dtypes of the frequencies and of the norm
    (LOW, [], {}, None, torch.float32, torch.float32),
    (LOW, [CAST], {}, None, BF16, BF16),
    (LOW, [CAST, "islands=norm"], {}, None, BF16, torch.float32),
    (LOW, [CAST], dict(fp32_modules=["norm"]), None, BF16, torch.float32),
    (dict(bf16=True), ["frozen=bf16"], ADAPTERS, None, BF16, torch.float32),
    *((flags, [], NORM, "norm", torch.float32, BF16) for flags in ({}, dict(bf16=True), LOW)),
]


@pytest.mark.parametrize("flags, sites, options, frozen, frequencies, norm", HELD)
def test_what_buffers_are_held_in(flags, sites, options, frozen, frequencies, norm):
    torch.manual_seed(0)
    model = Rotary()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    train_rotary(start(dict(flags, sites=sites), model, lr=1e-2, **options), 3)
    assert model.frequencies.dtype == frequencies and model.mask.dtype == torch.bool
    mean = model.norm.running_mean
    assert mean.dtype == model.norm.running_var.dtype == model.norm.weight.dtype == norm
    assert same(mean.float(), mean.to(BF16).float()) == (norm == BF16), "fp32 statistics have fp32's bits"
    assert model.norm.num_batches_tracked.dtype == torch.int64 and model.norm.num_batches_tracked == 3


def test_buffers_of_an_fp32_net_stay_and_complex_ones_too():
    model = Rotary()
    model.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
    before = model.turns.clone()
    for flags in ({}, LOW):
        start(flags, model)
        assert torch.equal(model.turns, before) and model.frequencies.dtype == torch.float32
