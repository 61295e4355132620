"""fp8.py: what is covered, finished nets in 8 bits."""

import json
import math
import sys

import common
import pytest
import torch
from common import cpu_scales_rows, refused
from eight_bit import Bare, Net, dit, draw, method, net, snr
from torch import nn

import models
import train
from lowprec.layers import fp8, fp8_product, quantise
from lowprec.layers.fp8 import FP8, Options, convert
from lowprec.precision import Precision, recipe

BF16 = torch.bfloat16
eager = common.eager


# ---- What is covered ---------------------------------------------------------------------------------------


def test_convert_covers_by_shape_and_place_under_the_same_names():
    model, plain = net(), net()
    names = [n for n, _ in model.named_parameters()]
    weight = model.first.weight
    covered = convert(model)
    assert [n for n, _ in model.named_parameters()] == names and model.first.weight is weight
    assert list(covered.layers) == ["first", "second"]
    assert covered.left_out == {
        "x_embed": "embedding",
        "narrow": "12 outputs: no multiple of 16",
        "final": "last layer",
    }
    assert model.state_dict().keys() == plain.state_dict().keys()  # only delayed scaling has a state
    x = draw(16, 16)
    assert not torch.equal(model(x), plain(x)) and snr(model(x).detach(), plain(x).detach()) > 20
    with covered.plain(model):
        assert torch.equal(model(x), plain(x)) and type(model.first) is nn.Linear
    assert type(model.first) is fp8.Linear


@cpu_scales_rows
def test_the_report_counts_flops_by_hand():
    model = net()
    covered = convert(model)
    covered.count_flops(model, (torch.empty(10, 16, device="meta"),))

    def linear(k, n, products=3):
        return 2 * 10 * k * n * products

    inside = linear(32, 64) + linear(64, 32)
    # nobody asks for the gradient of the input
    everything = inside + linear(16, 32, 2) + linear(32, 12) + linear(12, 16)
    assert covered.flops == {"first": linear(32, 64), "second": linear(64, 32), "all": everything}
    assert covered.share == inside / everything
    text, report = str(covered), covered.json()
    assert f"2 of 5 linear layers, {inside / everything:.1%}" in text and "first: 32 to 64, scaled_mm" in text
    assert "narrow (12 outputs: no multiple of 16)" in text and "final (last layer)" in text
    assert report["flops_share"] == covered.share
    first = dict(name="first", inputs=32, outputs=64, matmul="scaled_mm", flops=linear(32, 64))
    assert report["layers"][0] == first
    assert json.loads(json.dumps(report)) == report and report["backend"] == "scaled_mm"
    assert "emulate" in str(convert(net(), Options(format="e5m2")))


@pytest.mark.parametrize("model, least, most", [("dit", 0.9, 0.99), ("unet", 0.001, 0.1)])
@cpu_scales_rows
def test_most_of_a_dit_is_covered_and_little_of_a_unet(model, least, most, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--dry_run", "--fp8", "--model", model]) == 0
    out = capsys.readouterr().out
    share = float(out.split("linear layers, ")[1].split("%")[0]) / 100
    assert least < share < most
    assert ("convolution: stays as it is" in out) == (model == "unet")
    assert ("blocks.*.attention.qkv (4): 64 to 192, scaled_mm" in out) == (model == "dit")


def test_the_layers_of_our_nets_that_are_covered():
    attention_and_mlp = ("attention.qkv", "attention.proj", "mlp.0", "mlp.2", "modulation")
    blocks = {f"blocks.{i}.{name}" for i in range(4) for name in attention_and_mlp}
    with torch.device("meta"):
        nets = {name: build(1, 10, 8) for name, build in models.GENERATIVE.items()}
    assert set(convert(nets["dit"]).layers) == blocks
    embedded = [f"{part}.resnets.0.time_emb_proj" for part in ("down_blocks.0", "down_blocks.1")]
    embedded += ["middle_block.resnet_1.time_emb_proj", "middle_block.resnet_2.time_emb_proj"]
    embedded += [f"up_blocks.{i}.resnets.{k}.time_emb_proj" for i in (0, 1) for k in (0, 1)]
    attention = [f"middle_block.attention.attn.{name}" for name in ("qkv", "out_proj")]
    assert set(convert(nets["unet"]).layers) == {*embedded, *attention}


def test_a_net_may_say_itself_what_its_layers_are():
    """Names say what is an embedding or the head, unless the net does: the same roles that islands go by."""

    class Told(Net):
        roles = {"second": {"head"}, "final": set()}

    found = convert(Told())
    assert (
        found.left_out["second"] == "last layer" and found.left_out["final"] == "12 inputs: no multiple of 16"
    )
    words = nn.ModuleDict(dict(wte=nn.Linear(16, 16), inner=nn.Linear(16, 16), lm_head=nn.Linear(16, 16)))
    assert convert(words).left_out == {"wte": "embedding", "lm_head": "last layer"}


def test_a_net_without_fp8_layers_is_refused():
    none = "no nn.Linear, and convolutions stay as they are; use --bf16"
    refused(lambda: convert(nn.Sequential(nn.Conv2d(1, 16, 3))), none)
    refused(lambda: convert(nn.Sequential(nn.Linear(12, 16))), "'0' is left out (12 inputs")
    refused(lambda: convert(nn.Linear(16, 16)), "wrap it in a module")


def test_hooks_of_other_people_stay():
    """Adapters, steering and feature taps: a converted layer calls them as the plain one did."""
    model, x, seen = net(), draw(16, 16), []
    tap = model.first.register_forward_hook(lambda m, args, out: seen.append(type(m)) or 0 * out)
    before = model.second.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    exact = model(x).detach()
    covered = convert(model, Options(backend="emulate"))
    assert snr(model(x).detach(), exact) > 20
    with covered.plain(model):
        assert torch.equal(model(x), exact)
    assert seen == [nn.Linear, fp8.Linear, nn.Linear]
    for handle in (tap, before):
        handle.remove()
    exact = net()(x)
    assert snr(model(x).detach(), exact.detach()) > 20 and len(seen) == 3
    with covered.plain(model):
        assert torch.equal(model(x), exact)


def test_plain_within_plain_stays_plain():
    model = net()
    covered = convert(model)
    with covered.plain(model):
        with covered.plain(model):
            assert type(model.first) is nn.Linear
        assert type(model.first) is nn.Linear
    assert type(model.first) is fp8.Linear


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_a_model_of_bare_parameters(name):
    x = draw(3, 1, 16, 16)
    plain, model = Bare(), Bare()
    y = plain(x)
    assert torch.equal(model(x), y), "off until it is asked for"
    covered = convert(model, Options(recipe=name))
    covered.count_flops(model, (x,))
    assert "scalings.2: left out, 10 outputs" in str(covered) and covered.share < 1
    out = model(x)
    assert not torch.equal(out, y) and snr(out.detach(), y.detach()) > 18
    y.square().mean().backward()
    out.square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert snr(p.grad, q.grad) > 14
    rows = 3 * 16
    assert covered.flops["scalings.0"] == 2 * 2 * rows * 16 * 32 * 2
    assert covered.flops["scalings.1"] == 3 * 2 * rows * 64 * 16
    assert covered.share == (covered.flops["scalings.0"] + covered.flops["scalings.1"]) / covered.flops["all"]
    with covered.plain(model):
        assert torch.equal(model(x), y)
    if name == "delayed":
        covered.step()
        assert covered.scalings[0].scale.all() and "scalings.0.amax_history" in model.state_dict()
        assert not covered.scalings[2].scale.any()


def test_what_is_exported_of_bare_parameters_loads_into_the_plain_net():
    run = Precision(Bare(), recipe(fp8=True, fp8_recipe="delayed", fp8_backend="emulate"))
    run.backward(run(draw(3, 1, 16, 16)).square().mean())
    run.step()
    plain = Bare()
    plain.load_state_dict(run.weights("raw"))
    assert torch.equal(plain.widen, run.model.widen) and "scalings.0.scale" in run.state_dict()["model"]


def test_gradient_snr():
    reference, low = net(), net()
    x = draw(32, 16)

    def loss(model):
        return model(x).square().mean()

    def snr(low):
        own, exact = (fp8.gradients_of_loss(net, net, loss) for net in (low, reference))
        return fp8.signal_to_noise(own, exact)

    assert snr(low)["all"] == math.inf
    got = {}
    for form in ("hybrid", "e4m3", "e5m2"):
        low = net()
        convert(low, Options(format=form))
        got[form] = snr(low)
        assert set(got[form]) == {n for n, _ in low.named_parameters()} | {"all"}
        assert low.first.weight.grad is None
    assert got["hybrid"]["all"] > 20 and got["e5m2"]["all"] < got["hybrid"]["all"] < got["e4m3"]["all"]


# ---- A finished net ----------------------------------------------------------------------------------------


def test_int8_is_a_scale_a_row_and_a_scale_a_token():
    layer, x = nn.Linear(64, 48, bias=False), draw(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    layer.weight.data = draw(48, 64, seed=1) * torch.logspace(-3, 3, 48)[:, None]
    exact, model = layer(x).detach(), nn.Sequential(layer)
    covered = quantise.quantise(model, "int8")
    got = model(x)
    for along in (0, 1):  # small rows and small columns are as exact as large ones
        pairs = zip(got.unbind(along), exact.unbind(along), strict=True)
        assert min(snr(g, e) for g, e in pairs) > 12
    assert snr(got, exact) < 50
    assert covered.layers == {"0": (64, 48, "torchao")}


PURE = dict(pure_bf16=True, stochastic=True, sites=["islands=embed+final"])


@pytest.mark.parametrize(
    "kind, least, most, flags",
    [
        ("int8", 43, 50, {}),
        ("int8", 43, 50, PURE),
        ("int8", 43, 50, dict(fp8=True)),
        ("fp8", 35, 43, {}),
        ("fp8", 35, 43, PURE),
    ],
    ids=str,
)
def test_a_finished_net_is_drawn_in_8_bits(kind, least, most, flags):
    x, y = draw(8, 1, 8, 8), torch.arange(8)
    t = torch.rand(8, generator=torch.Generator().manual_seed(0)) * 1000
    layers = ("attention.qkv", "attention.proj", "mlp.0", "mlp.2", "modulation")
    outs, covered = {}, {f"blocks.{i}.{name}" for i in range(4) for name in layers}
    for value in ("fp32", kind):
        sites = [*flags.get("sites", ()), f"generation={value}"]
        run = Precision(dit(1), recipe(**{**flags, "sites": sites}))
        for p in run.params:
            p.data.add_(0.05 * torch.randn_like(p))
        state = {name: p.clone() for name, p in run.model.state_dict().items()}
        sampler = run.generator("raw")
        outs[value] = sampler(x, t, y)
        assert torch.equal(outs[value], run.generator("raw")(x, t, y))

    def in_8_bits(module):
        weight = getattr(module, "weight", None)
        return isinstance(module, fp8.Linear) or type(weight).__name__ == "Int8Tensor"

    assert {name for name, m in sampler.net.named_modules() if in_8_bits(m)} == covered
    assert least < snr(outs[kind], outs["fp32"]) < most
    left = run.model.state_dict()
    assert all(torch.equal(left[name], p) for name, p in state.items()), "the net that trains stays as it is"
    run(x, t, y)
    ledger = run.ledger()
    found = ledger.json()["generation"]
    assert {layer["name"] for layer in found["layers"]} == covered
    assert found["left_out"]["x_embed"] == "embedding"
    # by hand: 4 blocks, 16 tokens, width 64; products of activations are not covered
    block = 2 * 8 * (16 * 64 * (3 * 64 + 64 + 8 * 64) + 64 * 6 * 64)
    assert sum(layer["flops"] for layer in found["layers"]) == 4 * block
    assert ledger.flops_share["generation"] == found["flops_share"] > 0.9
    assert "20 of 25 linear layers" in next(row["why"] for row in ledger.rows if row["site"] == "generation")


def test_bare_parameters_are_quantised_to_fp8_alone():
    x = draw(4, 1, 5, 16)
    exact, low = Bare(), Bare()
    refused(lambda: quantise.quantise(Bare(), "int8"), "generation=int8", "bare parameters")
    covered = quantise.quantise(low, "fp8")
    covered.count_flops(low, (x,))
    assert 15 < snr(low(x).detach(), exact(x).detach()) < 35
    assert covered.flops["scalings.0"] == 2 * 4 * 2 * 5 * 16 * 32


def test_int8_without_torchao_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    instead = "pip install torchao, or use --set generation=bf16"
    asked = recipe(sites=["generation=int8"])
    refused(lambda: Precision(net(), asked), "generation=int8 needs the package torchao", instead)


def test_a_layer_of_several_names_is_in_fp8_under_each():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.again, self.layers, self.out = self.first, nn.ModuleList([self.first]), nn.Linear(32, 4)

        def forward(self, x):
            return self.out(self.again(self.layers[0](x)))

    model = Shared()
    run = Precision(model, recipe(fp8=True, fp8_backend="emulate", fp8_recipe="delayed", amax_history_len=4))
    assert model.first is model.again is model.layers[0] and isinstance(model.first, fp8_product.Linear)
    run.backward(run(draw(16, 32)).square().mean())
    run.step()
    history = model.first.scaling.amax_history
    assert history[-1].all() and not history[:-1].any()  # rolled once, whatever its names
    with method(run, FP8).plain(model):
        assert type(model.again) is nn.Linear and model.again is model.layers[0]
    assert isinstance(model.layers[0], fp8_product.Linear)
