"""Adapters beside frozen layers: lowprec/layers/lora.py."""

import pytest
import torch
from common import BF16, draw, eager, same  # noqa: F401
from torch import nn

from lowprec.errors import Refused
from lowprec.precision import Precision, recipe

FROZEN = ["frozen=bf16"]
RECIPES = {  # name: (flags, dtype of the adapters, dtype of what lies beside them)
    "fp32": ({}, torch.float32, torch.float32),
    "fp32 beside bf16": (dict(bf16=True, sites=FROZEN), torch.float32, BF16),
    "bf16": (dict(pure_bf16=True, sites=FROZEN), BF16, BF16),
    "stochastic": (dict(pure_bf16=True, stochastic=True, sites=FROZEN), BF16, BF16),
}


class Net(nn.Module):
    """Convolution, linear layer and head, of images [n, 3, 8, 8] -> [n, 10]."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.Linear(256, 32), nn.SiLU(), nn.Linear(32, 32))
        self.wide = nn.Conv2d(16, 16, 3, padding=2, dilation=2, padding_mode="circular")
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(self.wide(self.conv(x)).flatten(1)))


def new_net():
    torch.manual_seed(0)
    return Net()


def trained(flags, steps=3, rank=4):
    run = Precision(new_net(), recipe(**flags), lr=1e-2, lora=rank)
    for step in range(steps):
        one_step(run, step)
    return run


def one_step(run, step):
    run.backward(run(draw(4, 3, 8, 8, seed=step)).square().mean())
    run.step()


@pytest.mark.parametrize("name", RECIPES)
def test_adapters_train_and_the_rest_does_not(name):
    flags, own, beside = RECIPES[name]
    run = trained(flags)
    before = new_net().state_dict()
    factors = {key: p for key, p in run.model.named_parameters() if p.requires_grad}
    assert len(factors) == 6 and all("lora_" in key and p.dtype == own for key, p in factors.items())
    assert all(p.any() for p in factors.values())  # the second factor has left 0
    for key, p in run.model.named_parameters():
        if key not in factors:
            assert p.dtype == beside and same(p, before[key.replace(".base", "")].to(beside))
    assert run.ledger().json()["parameters"] == sum(p.numel() for p in factors.values())


@pytest.mark.parametrize("name", RECIPES)
def test_merged_weights_load_into_the_net_as_it_came(name):
    run = trained(RECIPES[name][0], steps=9)
    net, x = new_net(), draw(4, 3, 8, 8, seed=9)
    before = net(x)
    net.load_state_dict(run.weights("raw"))
    wanted = run.generator("raw")(x).float()
    exact = name == "fp32"
    torch.testing.assert_close(net(x), wanted, rtol=1e-5 if exact else 0.05, atol=1e-6 if exact else 0.02)
    assert (net(x) - before).abs().max() > 0.05


def test_adapters_begin_as_nothing():
    run = Precision(new_net(), recipe(), lora=4)
    x = draw(4, 3, 8, 8)
    assert same(run(x), new_net()(x))


@pytest.mark.parametrize(
    "flags, rank, said",
    [
        (dict(fp8=True), 4, "drop --fp8"),
        (dict(sparse24="srste"), 4, "drop --fp8, --fp4, --sparse24"),
        ({}, 300, "no linear layer or convolution wider than 300"),
    ],
)
def test_what_goes_with_no_adapters(flags, rank, said):
    with pytest.raises(Refused, match=said):
        trained(flags, steps=0, rank=rank)


def test_a_layer_of_two_names_has_one_adapter():
    model = new_net()
    model.again = model.body[0]
    model.block = model.body
    run = Precision(model, recipe(), lr=1e-2, lora=4)
    one_step(run, 0)
    one_step(run, 1)
    assert model.again is model.body[0] and model.again.lora_up.weight.any()
    merged = run.weights("raw")
    assert same(merged["again.weight"], merged["body.0.weight"])
    assert same(merged["block.0.weight"], merged["body.0.weight"])
    assert not same(merged["body.0.weight"], new_net().body[0].weight)


class Asking(Net):
    """As T5: its code reads the dtype of a layer's weight."""

    def forward(self, x):
        h = self.body(self.wide(self.conv(x)).flatten(1))
        return self.head(h.to(self.body[2].weight.dtype))


@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
def test_code_that_reads_a_layers_weight_goes_on(frozen):
    run = Precision(Asking(), recipe(bf16=True, sites=[f"frozen={frozen}"]), lora=4)
    one_step(run, 0)
    assert run.model.body[0].weight.shape == (32, 256)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_layer_whose_weight_is_computed_gets_no_adapter():
    net = new_net()
    nn.utils.weight_norm(net.body[0])
    before = set(net.state_dict())
    run = Precision(net, recipe(), lora=4)
    one_step(run, 0)
    assert set(run.weights()) == before


class Tied(Net):
    """A net one of whose layers has the weight of another, as a decoder may have an embedding's."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(32, 32)
        self.decoder.weight = self.body[2].weight

    def forward(self, x):
        return self.head(self.decoder(self.body(self.wide(self.conv(x)).flatten(1))))


def test_merged_weights_are_those_of_the_run_where_layers_share_a_weight():
    model, other = Tied(), Tied()
    run = Precision(model, recipe(), lr=1e-2, lora=4, ema_decay=0.0)
    for step in range(3):
        one_step(run, step)
    other.load_state_dict(run.weights("raw"))
    x = draw(4, 3, 8, 8)
    torch.testing.assert_close(other(x), run(x))


@pytest.mark.parametrize("flags", [dict(bf16=True), dict(pure_bf16=True, stochastic=True)], ids=str)
def test_a_base_in_float8_is_kept_computed_with_and_resumed(flags):
    def begun():
        net = new_net()
        for layer in (net.body[0], net.body[2]):
            layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
        return net, Precision(net, recipe(**flags), lr=1e-2, lora=4, ema_decay=None)

    exact = new_net()
    for layer in (exact.body[0], exact.body[2]):
        layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn).float()
    x = draw(4, 3, 8, 8)
    net, run = begun()
    torch.testing.assert_close(run(x), exact(x), rtol=0.05, atol=0.02)
    before = net.body[0].base.weight.clone()
    one_step(run, 0)
    saved = run.state_dict()
    _, other = begun()
    other.load_state_dict(saved)
    for each in (run, other):
        one_step(each, 1)
    assert before.dtype == torch.float8_e4m3fn and same(net.body[0].base.weight.float(), before.float())
    assert all(map(same, run.weights("raw").values(), other.weights("raw").values()))
