"""The site frozen=nf4: frozen linear layers in 4 bits beside what trains."""

import common
import pytest
import torch
from common import refused
from torch import nn

from lowprec import Precision, recipe
from lowprec.layers import nf4


def test_values_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.get_4bit_type("nf4", device="cpu").float()
    assert torch.allclose(nf4.nf4_values(), theirs / theirs.max(), atol=1e-4)
    w = torch.randn(70, 129, generator=torch.Generator().manual_seed(0))
    back = nf4.decode_nf4(*nf4.encode_nf4(w), w.shape)
    codes, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    wanted = functional.dequantize_4bit(codes, state).view_as(w)
    assert torch.allclose(back, wanted, atol=2e-3) and 0.05 < (back - w).norm() / w.norm() < 0.12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        self.last = nn.Linear(64, 3)

    def forward(self, x):
        return self.last(x + self.inner(x))


def run_of(seed=0, lora=4, **flags):
    torch.manual_seed(seed)
    return Precision(Net(), recipe(sites=["frozen=nf4"], **flags), lora=lora, lr=1e-2, ema_decay=0.9)


def trained(run, steps=20):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = (run(x).float() - x[:, :3]).square().mean()
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("flags", [{}, dict(bf16=True), dict(pure_bf16=True, stochastic=True)], ids=str)
def test_adapters_train_beside_it_and_resume_bit_for_bit(flags):
    run = run_of(**flags)
    held = {k: v.clone() for k, v in run.model.state_dict().items() if k.endswith(("codes", "scales"))}
    losses = trained(run)
    assert losses[-1] < losses[0] and len(held) == 4
    assert all(torch.equal(run.model.state_dict()[k], v) for k, v in held.items())
    saved = common.through_a_file(run.state_dict())
    after = trained(run, 2)
    other = run_of(seed=1, **flags)
    other.load_state_dict(saved)
    assert trained(other, 2) == after
    (row,) = [row for row in run.ledger().rows if row["site"] == "frozen"]
    assert row["value"] == "nf4" and "16,384 weights of 2 linear layers" in row["why"]
    x = torch.randn(4, 64)
    drawn = run.generator()
    assert any(isinstance(m, nf4.NF4Linear) for m in drawn.net.modules()) and drawn(x).isfinite().all()
    merged = run.weights("raw")
    assert merged["inner.0.weight"].shape == (128, 64)


def test_gradients_are_those_of_the_decoded_weight():
    torch.manual_seed(0)
    linear = nn.Linear(64, 64).requires_grad_(False)
    layer, x = nf4.NF4Linear(linear), torch.randn(5, 64, requires_grad=True)
    decoded = nf4.decode_nf4(layer.codes, layer.scales, layer.shape)
    y = layer(x)
    assert torch.allclose(y, x @ decoded.t() + linear.bias, atol=1e-6)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(dx, 2 * y @ decoded, atol=1e-5)


def test_a_net_without_frozen_layers_is_refused():
    refused(lambda: run_of(lora=0), "no frozen nn.Linear", "--lora 8")


SAME_LAYERS = [dict(fp8=True), dict(fp4="nvfp4"), dict(bf16=True, sparse24="magnitude")]


@pytest.mark.parametrize("flags", SAME_LAYERS, ids=str)
def test_what_would_take_the_same_layers_is_refused(flags):
    refused(lambda: recipe(**flags, sites=["frozen=nf4"]), "frozen=nf4 with", "drop one")


def test_a_layer_of_several_names_is_one_in_4_bits():
    model = Net().requires_grad_(False)
    model.last.requires_grad_(True)
    model.again = model.inner[0]
    model.block = model.inner
    run = Precision(model, recipe(sites=["frozen=nf4"]))
    assert model.again is model.inner[0] is model.block[0] and isinstance(model.again, nf4.NF4Linear)
    weights = run.weights("raw")
    assert torch.equal(weights["again.weight"], weights["inner.0.weight"])
    assert torch.equal(weights["block.0.weight"], weights["inner.0.weight"])
