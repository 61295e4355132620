"""fp8.py: what is covered, backends, finished nets in 8 bits."""

import contextlib
import json
import math
import sys
import types

import common
import pytest
import torch
from common import cpu_scales_rows, refused, through_a_file
from eight_bit import Bare, Net, dit, draw, method, net, snr
from torch import nn

import models
import train
from lowprec.layers import fp8, fp8_backends, fp8_product, quantise
from lowprec.layers.fp8 import FP8, Options, convert
from lowprec.precision import Precision, Recipe, recipe

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
        return fp8.signal_to_noise(fp8.gradients(low, low, loss), fp8.gradients(reference, reference, loss))

    assert snr(low)["all"] == math.inf
    got = {}
    for form in ("hybrid", "e4m3", "e5m2"):
        low = net()
        convert(low, Options(format=form))
        got[form] = snr(low)
        assert set(got[form]) == {n for n, _ in low.named_parameters()} | {"all"}
        assert low.first.weight.grad is None
    assert got["hybrid"]["all"] > 20 and got["e5m2"]["all"] < got["hybrid"]["all"] < got["e4m3"]["all"]


# ---- Options and backends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(backend="cutlass"), ["--fp8_backend cutlass", "auto, te, torchao, scaled_mm, emulate"]),
        (dict(format="e3m4"), ["--fp8_format e3m4", "hybrid, e4m3, e5m2"]),
        (dict(recipe="block"), ["--fp8_recipe block"]),
        (dict(recipe="delayed", amax_compute_algo="mean"), ["--amax_compute_algo mean", "max, most_recent"]),
        (dict(recipe="delayed", amax_history_len=0), ["--amax_history_len 0"]),
        (dict(amax_history_len=16), ["--amax_history_len", "--fp8_recipe delayed"]),
        (
            dict(recipe="rowwise", amax_compute_algo="most_recent"),
            ["--fp8_recipe rowwise", "--fp8_recipe delayed"],
        ),
    ],
)
def test_options_that_make_no_sense(options, words):
    refused(lambda: Options(**options), *words)


@cpu_scales_rows
def test_transformer_engine_absent_is_said_with_what_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    works = "here works --fp8_backend scaled_mm or emulate"
    all_work = "here works --fp8_backend torchao or scaled_mm or emulate"

    def says(options, device, *words):
        refused(lambda: fp8.resolve(options, device), *words)

    says(Options(backend="te"), "cpu", "--fp8_backend te", "requirements-te.txt", all_work)
    says(Options(backend="te", recipe="rowwise"), "cpu", f"no rowwise scaling; {all_work}")
    says(Options(backend="torchao", recipe="delayed"), "cpu", f"torchao has no delayed scaling; {works}")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    says(Options(backend="torchao"), "cpu", "torchao can't be imported", works)
    says(Options(), "mps", "mps", "use --bf16")


def test_a_meta_device_settles_nothing():
    assert fp8.resolve(Options(), "meta") == Options()
    with torch.device("meta"):
        model = net()
    covered = convert(model, Options(recipe="delayed"))
    assert type(model.first) is nn.Linear and list(covered.layers) == ["first", "second"]


@pytest.mark.parametrize(
    "installed, options, chosen",
    [
        (("te", "torchao"), {}, "te"),
        (("te", "torchao"), dict(recipe="delayed"), "te"),
        (("te", "torchao"), dict(recipe="rowwise"), "torchao"),
        (("te", "torchao"), dict(format="e5m2"), "scaled_mm"),
        (("torchao",), {}, "torchao"),
        (("torchao",), dict(recipe="delayed"), "scaled_mm"),
        ((), {}, "scaled_mm"),
    ],
)
@cpu_scales_rows
def test_auto_on_hopper(installed, options, chosen, monkeypatch):
    class Module:
        autocast = None

    names = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}
    present = [names[package] for package in installed]

    def try_import(name):
        return (Module, None) if name in present else (None, "absent")

    monkeypatch.setattr(fp8_backends, "try_import", try_import)
    monkeypatch.setattr("lowprec.formats.fp8_cores", lambda device: True)
    assert fp8.resolve(Options(**options), "cuda").backend == chosen
    monkeypatch.setattr("lowprec.formats.fp8_cores", lambda device: False)
    assert fp8.resolve(Options(**options), "cuda").backend == "emulate"
    assert fp8.resolve(Options(**options), "cpu").backend == "scaled_mm"
    if "te" in installed:
        refused(lambda: fp8.resolve(Options(backend="te"), "cuda"), "compute capability 8.9")


@pytest.fixture
def fake_te(monkeypatch):
    """Stand-in for Transformer Engine with what fp8_layers.py touches of it, as its 2.x sources have it;
    multiplies without FP8.
    """
    log = types.SimpleNamespace(recipes=[], regions=[], multiplied=[])

    class Recipe:
        def __init__(self, **fields):
            self.fields = fields
            log.recipes.append(self)

        def delayed(self):
            return type(self).__name__ == "DelayedScaling"

    class Linear(nn.Linear):
        def __init__(self, k, n, bias=True, params_dtype=None, device=None):
            super().__init__(k, n, bias, dtype=params_dtype, device=device)
            self.fp8_meta = {}

        def init_fp8_metadata(self, num_gemms=1):
            assert log.regions, "outside of te.autocast"
            for key in ("scaling_fwd", "scaling_bwd"):
                new = types.SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
                self.fp8_meta.setdefault(key, new)

        def forward(self, x):
            if x.dim() != 2 or x.shape[0] % 8 or x.shape[1] % 16:
                raise ValueError(x.shape)
            log.multiplied.append(len(log.regions))
            self.init_fp8_metadata()
            self.fp8_meta["scaling_fwd"].scale += 1
            return super().forward(x)

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        log.regions.append((enabled, recipe))
        yield
        log.regions.pop()

    recipes = {name: type(name, (Recipe,), {}) for name in ("DelayedScaling", "Float8CurrentScaling")}
    formats = types.SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3")
    modules = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.pytorch": dict(Linear=Linear, autocast=autocast),
        "transformer_engine.common.recipe": dict(recipes, Format=formats),
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    monkeypatch.setattr("lowprec.formats.fp8_cores", lambda device: True)
    return log


def test_what_transformer_engine_is_handed(fake_te):
    history = dict(amax_history_len=4, amax_compute_algo="most_recent")
    r = recipe(fp8=True, fp8_recipe="delayed", fp8_format="e4m3", **history)
    run, plain, x = Precision(net(), r), Precision(net(), recipe(bf16=True)), draw(3, 16)
    assert fake_te.recipes[0].fields == dict(fp8_format="E4M3", **history)
    assert run.recipe.fp8.backend == "te" and "Transformer Engine" in str(run.ledger())
    assert [n for n, _ in run.named_params] == [n for n, _ in plain.named_params]
    assert torch.equal(run(x), plain(x)), "3 rows, padded and cut"
    run.backward(run(x).square().sum())
    run.step()
    assert not fake_te.regions and type(run.generator().net.first) is nn.Linear
    state = run.state_dict()
    assert state["model"]["first._extra_state"]["scaling_fwd"]["scale"].tolist() == [3, 3, 3]
    again = Precision(net(1), r)
    again.load_state_dict(through_a_file(run.state_dict()))
    assert again.model.first.fp8_meta["scaling_fwd"].scale.tolist() == [3.0] * 3
    assert torch.equal(again(x), run(x))
    elsewhere = Precision(net(1), recipe(fp8=True, fp8_backend="emulate"))
    elsewhere.load_state_dict(run.state_dict())
    assert torch.equal(elsewhere.model.first.weight, run.model.first.weight)
    current = method(Precision(net(), recipe(fp8=True)), FP8).te_recipe
    assert type(current).__name__ == "Float8CurrentScaling" and current.fields == dict(fp8_format="HYBRID")


def test_transformer_engine_draws_from_finished_nets(fake_te):
    """A net that trains in FP8 keeps its context when it generates so; a quantised one brings its own."""
    x = draw(3, 16)
    for flags in (dict(fp8=True), dict(fp8=True, fp8_recipe="delayed"), dict(bf16=True)):
        run = Precision(net(), recipe(**flags, sites=["generation=fp8"]))
        run(x)
        fake_te.multiplied.clear()
        drawn = run.generator("raw")
        assert drawn(x).isfinite().all() and fake_te.multiplied == [1, 1], flags
        assert not fake_te.regions
    quantise.quantise(model := net(), "fp8")
    with torch.no_grad():
        assert model(x).isfinite().all() and fake_te.multiplied[2:] == [1, 1]


@pytest.mark.parametrize(
    "options", [dict(), dict(recipe="rowwise"), dict(recipe="rowwise", format="e4m3")], ids=str
)
@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True)], ids=str)
@cpu_scales_rows
def test_torchao_agrees_with_ours_on_a_cpu(options, flags):
    pytest.importorskip("torchao")
    x = draw(20, 16)
    fields = {f"fp8_{k}": v for k, v in options.items()}
    theirs = Precision(net(), recipe(fp8=True, fp8_backend="torchao", **flags, **fields))
    ours = Precision(net(), recipe(fp8=True, fp8_backend="scaled_mm", **flags, **fields))
    plain = Precision(net(), recipe(**flags) if flags else Recipe())
    grads = []
    for run in (theirs, ours, plain):
        run.backward(run(x).square().mean())
        grads.append(torch.cat([p.grad.flatten().float() for p in run.params]))
    assert type(theirs.model.first).__name__ == "Float8Linear" and "torchao" in str(theirs.ledger())
    for got in grads[:2]:
        assert 20 < snr(got, grads[2]) < 45
    if not options:  # the same rule: what differs is where bf16 rounds
        assert snr(grads[0], grads[1]) > snr(grads[0], grads[2]) + 3
    assert type(theirs.generator().net.first) is nn.Linear


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@cpu_scales_rows
def test_torchao_takes_what_leaves_an_attention(name):
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(32, 32))
    options = Options(backend="torchao", recipe=name)
    heads = draw(2, 2, 16, 16, dtype=BF16)  # [B, heads, tokens, width of a head]
    x = heads.transpose(1, 2).flatten(2).transpose(0, 1).requires_grad_()  # a view whose rows lie apart
    assert not x.is_contiguous()
    fp8.convert(model, options)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, model(x.contiguous())) and x.grad.isfinite().all()


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
