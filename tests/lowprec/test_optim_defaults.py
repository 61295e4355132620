"""optim.Rounded: what it takes where nothing is said."""

import copy
import pickle
import threading

import pytest
import torch
from common import BF16, draw, refused, same_state
from torch import nn

from lowprec.kernels import exact_step
from lowprec.optimizers import build
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.average import EMA
from lowprec.optimizers.muon import Muon
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD
from lowprec.recipes import recipe

TORCHS = {AdamW: torch.optim.AdamW, SGD: torch.optim.SGD, Muon: torch.optim.Muon}


@pytest.mark.parametrize("kind", [*TORCHS, Adafactor])
def test_defaults_are_those_of_torch(kind):
    matrix = nn.Parameter(torch.ones(2, 2))
    ours = kind([matrix], fused=True, foreach=False).defaults
    theirs = TORCHS.get(kind, torch.optim.Adafactor)([matrix]).defaults
    shared = ours.keys() & theirs.keys() - {"eps"} if kind is Adafactor else ours.keys() & theirs.keys()
    assert {"lr", "weight_decay"} <= shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_a_run_and_a_checkpoint_keep_their_options():
    params = [nn.Parameter(torch.ones(2, 2))]
    recorded = {"adamw": dict(weight_decay=0.0), "sgd": dict(lr=0.01, momentum=0.9, weight_decay=0.0)}
    for name, options in recorded.items():
        group = build.build(name, params, recipe(optimizer=name)).param_groups[0]
        assert {option: group[option] for option in options} == options
    saved = AdamW(params, weight_decay=0.0).state_dict()
    resumed = AdamW(params)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["weight_decay"] == 0.0


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
@pytest.mark.parametrize("options", [{}, dict(master="split"), dict(exp_avg="int8", update="stochastic")])
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

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = after()
    finally:
        torch.set_default_dtype(before)
    assert same_state(found, after())


def test_torchs_default_device_is_not_the_steps():
    p = nn.Parameter(torch.ones(4))
    optimizer = AdamW([p], 0.1, compiled=False)
    with torch.device("meta"):
        p.grad = torch.ones(4, device="cpu")
        optimizer.step()
    assert (p < 1).all()
