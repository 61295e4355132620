"""What a forward pass keeps for backward: counted against sums by hand; given up without a changed bit."""

import copy
import gc
import json
import weakref
from pathlib import Path

import cli
import common
import pytest
import torch
import torch.nn.functional as F
from cli import SEGMENT, assert_same, checkpoint, quick, summary
from torch import nn

import models
from lowprec.errors import Refused
from lowprec.parts.activations import Meter, recompute, recomputed_blocks
from lowprec.precision import Precision, recipe
from models import DIFFUSION_UNETS, GENERATIVE, SEGMENTING

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
eager = common.eager

# ---- The meter ---------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))


def test_each_storage_counts_once_and_weights_do_not():
    model, x, target = net(), torch.randn(16, 4), torch.randn(16, 2)
    with Meter(model) as kept:
        F.mse_loss(model(x), target).backward()
    # the input, the output of ReLU (kept by it and by the second layer), and both sides of the loss
    assert kept.bytes == {"float32": 4 * (16 * 4 + 16 * 8 + 2 * 16 * 2)} and kept.casts == 0
    assert kept.json() == {"bytes": kept.bytes, "casts": 0, "total": kept.total}


def test_a_part_of_a_storage_counts_with_all_its_bytes():
    whole, weight = torch.randn(64, 4), nn.Parameter(torch.randn(4, 4))
    with Meter(nn.ParameterList([weight])) as kept:
        whole[:8] @ weight
    assert kept.total == whole.nbytes


def test_copies_of_weights_are_told_apart():
    model, x = net(), torch.randn(16, 4)
    with Meter(model) as kept, torch.autocast("cpu", torch.bfloat16):
        model(x)
    # the first layer's input, and the output of ReLU
    assert kept.bytes == {"bfloat16": 2 * (16 * 4 + 16 * 8)}
    # the second layer's weight: the first one's is needed for the gradient of x alone, which nobody asks for
    assert kept.casts == 2 * 8 * 2
    assert str(kept).startswith("0.0 MiB kept for backward: bfloat16") and "casts of weights" in str(kept)


def test_a_forward_pass_whose_gradients_nobody_asks_for_is_forgotten():
    model, x = net(), torch.randn(16, 4)
    weight = weakref.ref(model[2].weight)
    with Meter(model):
        model(x).tanh()  # which keeps its own output
    del model
    gc.collect()
    assert weight() is None


def test_nothing_is_kept_without_gradients():
    model = net()
    with Meter(model) as kept, torch.no_grad():
        model(torch.randn(16, 4))
    assert kept.total == 0


def test_the_gradients_are_those_without_a_meter():
    model, x = net(), torch.randn(16, 4)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with Meter(model):
        loss = model(x).sum()
    metered = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, plain, metered))


# ---- Computing again ---------------------------------------------------------------------------------------

RECIPES = [
    ("unet", dict(bf16=True)),
    ("unet", dict(pure_bf16=True, stochastic=True)),
    ("dit", dict(fp8=True, fp8_backend="emulate", fp8_recipe="delayed")),
    ("dit", dict(pure_bf16=True, stochastic=True, sparse24="srste")),
]


def trained(name, flags, again, steps=3):
    """(state, meter) after some steps; `again`: with activation checkpointing."""
    torch.manual_seed(0)
    run = Precision(GENERATIVE[name](1, 10, 8), recipe(**flags), lr=1e-2, seed=0)
    if again:
        assert recompute(run.model) == len(recomputed_blocks(run.model)) > 2
    x, t, y = torch.randn(8, 1, 8, 8), torch.rand(8) * 1000, torch.arange(8)
    for _ in range(steps):
        with Meter(run.model) as kept:
            loss = F.mse_loss(run(x, t, y), x)
        run.backward(loss)
        run.step()
    return run.state_dict(), kept


@pytest.mark.parametrize("name, flags", RECIPES, ids=str)
def test_blocks_computed_again_give_the_same_bits_from_less_memory(name, flags, monkeypatch):
    monkeypatch.setattr(models, "DIFFUSION_UNETS", DIFFUSION_UNETS)  # the U-Net as it is
    (plain, all_kept), (again, inputs_kept) = (trained(name, flags, again) for again in (False, True))
    assert_same(again, plain)
    assert inputs_kept.total < 0.4 * all_kept.total


class Layers(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), inner(), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_dropout_draws_the_same_again():
    torch.manual_seed(0)
    model, x, found = Layers(lambda: nn.Dropout(0.5)), torch.randn(4, 8), []
    for again in (False, True):
        if again:
            recompute(model)
        torch.manual_seed(1)
        found.append(torch.autograd.grad(model(x).sum(), list(model.parameters())))
    assert all(map(torch.equal, *found))


def test_running_statistics_move_once():
    torch.manual_seed(0)
    plain, x = Layers(lambda: nn.BatchNorm1d(8)), torch.randn(16, 8)
    again = copy.deepcopy(plain)
    recompute(again)
    for net in (plain, again):
        for _ in range(3):
            net(x).square().mean().backward()
    assert_same(plain.state_dict(), again.state_dict())
    grads = ([p.grad for p in net.parameters()] for net in (plain, again))
    assert all(map(torch.equal, *grads))


def test_a_net_names_its_blocks_or_its_outermost_lists_do():
    segmenting = SEGMENTING["unet"](1, 4, 32)
    assert len(recomputed_blocks(segmenting)) > 4 and recomputed_blocks(GENERATIVE["dit"](1, 10, 8))[0].norm1
    nested = nn.ModuleDict({"outer": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)])])})
    assert recomputed_blocks(nested) == list(nested["outer"])
    with pytest.raises(Refused, match="this net has no blocks"):
        recompute(net())


# ---- The command -------------------------------------------------------------------------------------------


def test_the_command_says_what_is_kept_and_keeps_less(capsys):
    flags = [*SEGMENT, "--pure_bf16", "--stochastic"]
    assert quick(*flags, name="plain", steps=2) == 0
    said = capsys.readouterr().out
    assert quick(*flags, name="less", steps=1) == 0
    assert quick(*flags, "--checkpoint_activations", name="less", steps=2) == 0  # it may differ at a resume
    assert_same(checkpoint("less")["precision"], checkpoint("plain")["precision"])
    plain, less = (summary(name)["activations"] for name in ("plain", "less"))
    assert less["total"] < 0.75 * plain["total"]  # a U-Net keeps its skip connections
    assert f"{plain['total'] / 2**20:.1f} MiB kept for backward" in said
    row = json.loads(Path("runs/plain/ledger.json").read_text())["sites"][-1]
    assert row["site"] == "activations" and row["value"] == "bfloat16"
    assert row["bytes"] == pytest.approx(plain["total"] / summary("plain")["parameters"])
