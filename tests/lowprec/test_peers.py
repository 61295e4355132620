"""peers.py: other people's optimisers by name, and the choice by name."""

import copy
import functools
import math

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, PEERS, batches, net, refused, same, start, through_a_file, train
from torch import nn

from lowprec import precision
from lowprec.optimizers import build, peers
from lowprec.optimizers.answers import Answers
from lowprec.recipes import recipe

eager = common.eager

# ---- Questions ---------------------------------------------------------------------------------------------


def test_joined_optimisers_pass_on_every_question_that_has_a_default():
    questions = {name for name, value in vars(Answers).items() if callable(value) and name[0] != "_"}
    made_of_others = {"all_params", "wanted_together"}
    assert questions - vars(build.Joined).keys() == made_of_others


# ---- Peers -------------------------------------------------------------------------------------------------


def test_a_state_of_ours_goes_on_in_torchs_to_the_bit():
    ours, theirs = start("fp32", net()), start("fp32", net(), lr=None, optimizer=torch.optim.AdamW)
    theirs.optimizer.param_groups[0]["weight_decay"] = 0.0
    train(ours, 2)
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    for run in (ours, theirs):
        train(run, 2, seed=1)
    assert all(map(same, ours.weights("raw").values(), theirs.weights("raw").values()))


@pytest.mark.parametrize("begun", [False, True])
def test_a_peer_refuses_the_state_of_another_model(begun):
    def peer(*shapes):
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        made = peers.Torch.make(params, {"lr": 0.1})
        for p in params:
            p.grad = torch.ones_like(p)
        return made

    other = peer((4, 4), (2, 3))
    other.step()
    made = peer((4, 4), (3, 2))
    if begun:
        made.step()
    before = copy.deepcopy(made.state_dict())
    refused(lambda: made.load_state_dict(other.state_dict()), "exp_avg is float32 [2, 3] there")
    refused(lambda: peer((4, 4)).load_state_dict(other.state_dict()), "groups of [2]", "groups of [1]")
    assert str(made.state_dict()) == str(before)


@pytest.mark.parametrize("optimizer", [*PEERS, "bitsandbytes"])
def test_peers_train_are_measured_and_resume(optimizer):
    pytest.importorskip(optimizer)
    torch.manual_seed(0)
    flags = dict(pure_bf16=True, opt8bit=optimizer == "bitsandbytes")
    options = dict(optimizer=optimizer, lr=1e-2, clip_grad=1.0, ema_decay=0.9)
    run = start(flags, net(width=24), **options)
    x, y = batches(1)[0]

    def loss():
        with torch.no_grad():
            return F.mse_loss(run(x, torch.arange(8.0)), y).item()

    before = loss()
    reports = train(run, 20, measure=True)
    assert loss() < 0.8 * before
    assert all(0 < r["update_survival"] <= 1 and math.isfinite(r["grad_norm"]) for r in reports)
    assert all(r["exp_avg_sq_moved"] > 0 for r in reports[1:])  # peers make their moments in the first step
    if optimizer in ("torch", "optimi", "bitsandbytes"):  # the others round by torch's generator
        other = start(flags, net(seed=1, width=24), **options)
        other.load_state_dict(through_a_file(run.state_dict()))
        for r in (run, other):
            train(r, 3, seed=1)
        assert all(same(a.detach(), b.detach()) for a, b in zip(run.params, other.params, strict=True))


def test_torchastic_accumulates_by_itself_and_stands_unused_parameters():
    pytest.importorskip("torchastic")
    run = start("pure_bf16", optimizer="torchastic", accumulate=4, lr=1e-2)
    before = run.model.out.weight.detach().clone()
    unused = run.model.time_embed.weight.detach().clone()
    for x, y in batches(4):
        run.backward(F.mse_loss(run(x), y))  # no timestep: time_embed gets no gradient
    run.step()
    assert not same(run.model.out.weight.detach(), before)
    assert same(run.model.time_embed.weight.detach(), unused)


EXPECTED = [
    ("opt8bit", "adamw"),
    ("opt8bit", "bitsandbytes"),
    ("fp32", "adamw"),
    ("fp32", "torch"),
]


@pytest.mark.parametrize("name, optimizer", EXPECTED)
def test_the_update_that_is_expected_is_the_one_that_fp32_weights_take(name, optimizer):
    """Also of bitsandbytes' step, from its own codes: a reading of its moments that was off would show."""
    run = start(name, net(width=24), optimizer=optimizer, lr=1e-2, weight_decay=0.1)
    train(run, 3)
    p = run.model.middle.weight
    codes = [t for t in run.optimizer.state[p].values() if torch.is_tensor(t) and t.dtype == torch.uint8]
    assert p.numel() >= 4096 and bool(codes) == (name == "opt8bit")
    x, y = batches(1, seed=7)[0]
    run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    held = p.detach().flatten().clone()
    expected = run.optimizer.wanted(p, 0.5 * p.grad.flatten())
    run.optimizer.step(grads={q: q.grad for q in run.params}, grad_scale=0.5)
    moved = p.detach().flatten() - held
    assert (moved - expected).norm() < 1e-4 * expected.norm() and expected.norm() > 0
    assert run.optimizer.still(p) and not run.optimizer.moment(p, "exp_avg").any()


PEER_REFUSALS = [
    ("adam", {}, ["--optimizer='adam'", "unknown", "sgd", "torchastic"]),
    ("torchastic", {}, ["--optimizer torchastic", "bf16 parameters only", "--pure_bf16"]),
    ("optimi", dict(bf16=True), ["--optimizer optimi", "--pure_bf16"]),
    ("torchao", dict(pure_bf16=True, sites=["islands=norm"]), ["--optimizer torchao", "no islands"]),
    ("torchastic", dict(pure_bf16=True, stochastic=True), ["--optimizer torchastic", "drop --stochastic"]),
    ("torch", dict(pure_bf16=True, kahan=True), ["--optimizer torch", "--kahan"]),
    ("torch", dict(pure_bf16=True, master="split"), ["--optimizer torch", "--master"]),
    ("torch", dict(opt8bit=True), ["--optimizer torch", "--opt8bit"]),
    ("torchao", dict(pure_bf16=True, opt4bit=True), ["--optimizer torchao", "--opt4bit"]),
    ("bitsandbytes", dict(pure_bf16=True), ["in int8", "add --opt8bit"]),
    ("bitsandbytes", dict(opt4bit=True), ["in int8", "add --opt8bit"]),
    (
        "bitsandbytes",
        dict(pure_bf16=True, stochastic=True, opt8bit=True),
        ["--optimizer bitsandbytes", "drop --stochastic"],
    ),
]


@pytest.mark.parametrize("optimizer, flags, words", PEER_REFUSALS, ids=lambda x: "")
def test_peers_refuse_what_they_cannot_serve(optimizer, flags, words):
    params = [nn.Parameter(torch.ones(3))]
    refused(lambda: build.build(optimizer, params, recipe(**flags)), *words)


def test_the_names_are_those_that_can_be_built():
    assert build.OPTIMIZER_NAMES[0] == "adamw"
    # a FILE.py:CLASS that another test named was entered beside them
    built = {name for name in (*build.OPTIMIZERS, *peers.PEER_OPTIMIZERS) if ":" not in name}
    assert set(build.OPTIMIZER_NAMES) == built >= {*PEERS, "bitsandbytes"}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_known_before_its_first_step(name):
    pytest.importorskip(name)
    made = build.build(name, [nn.Parameter(torch.ones(3, dtype=BF16))], recipe(pure_bf16=True))
    assert isinstance(made, peers.PEER_OPTIMIZERS[name])
    assert not made.by_recipe and made.nbytes()["exp_avg"] == 6
    assert build.title_of_optimizer(made, name) == name


# ---- How peers write, as the ledger and the warnings say it ------------------------------------------------

WRITES = {  # optimiser: the ledger's rows, and what --dry_run warns of with weight decay
    "torch": ({"update": "nearest", "kahan": "off"}, ["update=nearest", "weight decay", "exp_avg_sq=bf16"]),
    "torchastic": ({"update": "stochastic", "kahan": "off"}, []),
    "optimi": ({"update": "nearest", "kahan": "on"}, ["weight decay", "exp_avg_sq=bf16"]),
    "adamw_bf16": ({"update": "stochastic", "kahan": "on"}, ["exp_avg_sq=bf16"]),
    "torchao": ({"update": "stochastic", "kahan": "off"}, ["exp_avg_sq=bf16"]),
}


@pytest.mark.parametrize("optimizer", PEERS)
def test_the_ledger_says_how_a_peer_writes(optimizer):
    pytest.importorskip(optimizer)
    rows, warned = WRITES[optimizer]
    run = start("pure_bf16", optimizer=optimizer)
    told = {row["site"]: row["value"] for row in run.ledger().rows}
    assert {site: told[site] for site in rows} == rows
    lines = run.recipe.warnings(weight_decay=0.01, optimizer=optimizer)
    assert [any(line.startswith(start) for start in warned) for line in lines] == [True] * len(warned)
    assert all(line.endswith(f"use --stochastic without --optimizer {optimizer}") for line in lines)


def test_a_part_without_gradients_is_passed_by():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, both):
            return self.b(self.a(x)) if both else self.a(x)

    model = Two()
    groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "optimizer": sgd}]
    run = peers_run(model, groups)
    for both in (True, False):
        before = model.b.weight.detach().clone()
        run.backward(run(torch.ones(2, 8), both).square().mean())
        run.step()
        assert torch.equal(before, model.b.weight) != both


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def peers_run(model, groups=None, **options):
    return precision.Precision(model, recipe(), groups=groups, clip_grad=1e-3, **options)


@pytest.mark.parametrize("optimizer", ["muon", sgd])
def test_a_copy_of_a_run_steps_itself(optimizer):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    run = peers_run(model, optimizer=optimizer)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 10)
    other, before = copy.deepcopy(run), [p.detach().clone() for p in run.params]
    other.backward(other(torch.ones(2, 8)).sum())
    other.step()
    assert all(map(torch.equal, run.params, before))
    assert not any(map(torch.equal, other.params, before))


class TwoPlaces(torch.optim.SGD):
    """Trains weights in one place and evaluates them in another, as schedule-free optimisers do."""

    training = False

    def train(self):
        self._shift(0.0 if self.training else 1.0)
        self.training = True

    def eval(self):
        self._shift(-1.0 if self.training else 0.0)
        self.training = False

    @torch.no_grad()
    def _shift(self, by):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(by).mul_(1 + 1e-6)  # the way back is not exact

    def step(self, closure=None):
        assert self.training, "call train() first"
        return super().step(closure)


@pytest.mark.parametrize("joined", [False, True])
def test_an_optimiser_with_modes_trains_in_one_and_is_read_in_the_other(joined):
    model, optimizer = net(), functools.partial(TwoPlaces, lr=1e-2)
    halves = [{"params": model.out.parameters(), "optimizer": functools.partial(TwoPlaces, lr=1e-3)}]
    halves += [{"params": [p for name, p in model.named_parameters() if not name.startswith("out")]}]
    run = start("fp32", model, optimizer=optimizer, groups=halves if joined else None)
    train(run, 2)
    held = {name: p.detach().clone() for name, p in run.named_params}
    read = run.weights("raw")
    assert all(torch.allclose(read[name], held[name] - 1, atol=1e-5) for name in held)
    drawn = run.generator("raw").net
    assert all(same(p.detach(), read[name]) for name, p in drawn.named_parameters())
    assert all(same(p.detach(), held[name]) for name, p in run.named_params), "training goes on"
    train(run, 1)


@pytest.mark.parametrize("kind", (torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW))
def test_how_a_moment_decays_is_told_where_it_is_known(kind):
    params = [nn.Parameter(torch.ones(3))]
    known = build.build(lambda ps: kind(ps, lr=0.1), params, recipe()).decay(params[0], "exp_avg_sq")[0]
    assert known == 0.999 if kind is torch.optim.AdamW else math.isnan(known)
