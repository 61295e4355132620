"""fp8.py: rounding and scales, the three products of a layer, delayed scaling and its state, what is covered, backends, whole runs."""

import contextlib
import io
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8
import models
import precision
import train
from fp8 import E4M3, E5M2, GRAD, INPUT, WEIGHT, FP8Error, Options, Scaling, convert
from precision import Precision, Recipe, RecipeError, recipe
from trainer import Trainer, read_checkpoint

BF16 = torch.bfloat16
FLOAT32_MAX = torch.finfo(torch.float32).max
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_hopper = pytest.mark.skipif(not hopper, reason="needs compute capability 8.9")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(precision, "_compiled", lambda kernel: kernel)  # building fused kernels takes longer than these runs


def draw(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def snr(x, exact):
    """dB of exact over the error of x."""
    exact = exact.double()
    return 10 * math.log10(exact.square().sum() / (x.double() - exact).square().sum())


class Net(nn.Module):
    """Two covered Linears between one that is an embedding, one of odd width, and the last layer."""

    def __init__(self, width=32):
        super().__init__()
        self.x_embed = nn.Linear(16, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.narrow = nn.Linear(width, 12)
        self.final = nn.Linear(12, 16)

    def forward(self, x):
        h = self.x_embed(x)
        h = h + self.second(F.gelu(self.first(h)))
        return self.final(self.narrow(h))


class Bare(nn.Module):
    """A model of bare parameters: two heads widen, one matrix comes back, and one has a shape that FP8 can't take."""

    def __init__(self):
        super().__init__()
        shapes = (2, 16, 32), (64, 16), (16, 10)
        self.widen, self.back, self.odd = (nn.Parameter(draw(*s, seed=i, scale=0.2)) for i, s in enumerate(shapes))
        self.scalings = nn.ModuleList(Scaling() for _ in range(3))

    def forward(self, x):  # [B, 1, T, 16]
        h = fp8.matmul(x, self.widen, self.scalings[0]).relu()
        h = fp8.matmul(h.transpose(1, 2).flatten(2), self.back, self.scalings[1])
        return fp8.matmul(h, self.odd, self.scalings[2])


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Rounding and scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_is_torchs_within_the_range_and_clamps_beyond(dtype):
    top = torch.finfo(dtype).max
    x = torch.cat([draw(5000, scale=s) for s in (1e-3, 1, 40)])
    assert torch.equal(fp8.cast(x, 1.0, dtype).float(), x.to(dtype).float())
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    assert torch.equal(fp8.cast(every, 1.0, dtype).float(), every)
    beyond = torch.tensor([top * 1.5, -1e30, math.inf, -math.inf, math.nan])
    assert torch.equal(fp8.cast(beyond, 1.0, dtype).float().nan_to_num(7), torch.tensor([top, -top, top, -top, 7]))
    # a bf16 operand is scaled in fp32: the product lies above the middle of 1 and 1.125, both formats' next, and in bf16 would lie on it
    if dtype == E4M3:
        assert fp8.cast(torch.tensor([1.0078125], dtype=BF16), torch.tensor([[1.0545]]), dtype).item() == 1.125


def test_amax_and_current_scale():
    x = torch.tensor([[1.0, -3.0, 0.5], [0.25, 0.0, 2.0]], dtype=BF16)
    assert fp8.amax_of(x).tolist() == [[3.0]]
    assert fp8.amax_of(x, 1).tolist() == [[3.0], [2.0]] and fp8.amax_of(x, 0).tolist() == [[1.0, 3.0, 2.0]]
    assert fp8.amax_of(torch.tensor([[1.0, math.nan]])).isnan().all()
    got = fp8.current_scale(torch.tensor([2.0, 0.0, 1e-45, math.inf]), 448.0)
    assert got.tolist() == [224.0, 1.0, pytest.approx(FLOAT32_MAX), 0.0]
    assert fp8.current_scale(torch.tensor(2.0), 448.0, margin=3) == 28.0


TOPS = torch.tensor([448.0, 448.0, 57344.0])


@pytest.mark.parametrize("algo, wanted", [("max", 8.0), ("most_recent", 2.0)])
def test_delayed_scale_is_transformer_engines_rule(algo, wanted):
    """FP8_MAX / amax / 2^margin from the largest or the latest amax; then the history is rolled by -1 and its first row cleared."""
    for margin in (0, 2):
        history = torch.tensor([2.0, 8.0, 1.0, 4.0])[:, None].repeat(1, 3)
        scale = torch.full((3,), 5.0)
        fp8.roll(history, scale, TOPS, algo, margin)
        assert torch.equal(scale, TOPS / wanted / 2**margin)
        assert history[:, 0].tolist() == [0.0, 1.0, 4.0, 2.0]  # 8, the oldest, is gone; 2, the latest, is last


def test_delayed_scale_stays_where_amax_says_nothing():
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-44, 3.0])
    got = fp8.delayed_scale(amax, torch.full((5,), 7.0), 448.0)
    assert got[:3].tolist() == [7.0] * 3 and got[3] == FLOAT32_MAX and got[4] == pytest.approx(448 / 3)
    history, scale = torch.zeros(1, 3), torch.tensor([7.0, 7.0, 7.0])
    history[0, 1] = 14.0
    fp8.roll(history, scale, TOPS)  # a history of one step
    assert scale.tolist() == [7.0, 32.0, 7.0] and not history.any()


def test_amax_is_forgotten_after_the_length_of_the_history():
    history, scale, seen = torch.zeros(4, 3), torch.zeros(3), []
    for amax in [16.0, 1, 1, 1, 1, 1]:
        history[0] = amax
        fp8.roll(history, scale, TOPS)
        seen.append(448 / scale[0].item())
    assert seen == [16, 16, 16, 16, 1, 1]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Products


@pytest.mark.parametrize("a, b", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("out", [BF16, torch.float32])
def test_scaled_mm_and_emulation_agree_to_the_order_of_sums(a, b, rows, out, monkeypatch):
    """Equal up to the last bit of the output: bf16 sums may fall on either side of a middle, rarely."""
    def quantised(x, dtype, dim):
        scale = fp8.current_scale(fp8.amax_of(x, dim if rows else None), torch.finfo(dtype).max)
        return fp8.cast(x, scale, dtype), scale.reciprocal()

    left, right = quantised(draw(48, 256), a, 1), quantised(draw(256, 32, seed=1, scale=0.01), b, 0)
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kw: calls.append(args) or real(*args, **kw))
    kernel = fp8.product(left, right, out)
    assert len(calls) == 1 and kernel.dtype == out
    emulated = fp8.product(left, right, out, emulated=True)
    assert len(calls) == 1 and emulated.dtype == out
    monkeypatch.setattr(fp8, "scaled_mm_refusal", lambda *args: "no")
    assert torch.equal(fp8.product(left, right, out), emulated) and len(calls) == 1
    exact = (left[0].double() @ right[0].double()) * left[1].double() * right[1].double()
    ulp = 2**-8 if out == BF16 or rows else 2**-20
    for got in (kernel, emulated):
        assert (got.double() - exact).abs().max() <= ulp * exact.abs().max()
    assert (kernel != emulated).float().mean() < 0.02 or out == torch.float32


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_decodes_to_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for x in (codes, codes.t(), codes[:, ::2]):
        torch.testing.assert_close(fp8.decode(x), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["scaled_mm", "emulate"])
def test_the_backend_asked_for_multiplies(backend, monkeypatch):
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kw: calls.append(args) or real(*args, **kw))
    model = net()
    covered = convert(model, Options(backend=backend))
    model(draw(16, 16)).sum().backward()
    assert len(calls) == (6 if backend == "scaled_mm" else 0)  # three products of two layers
    assert {how for *_, how in covered.layers.values()} == {backend}


def test_e5m2_is_never_multiplied_by_e5m2_in_the_kernel():
    """CUDA refuses it; the CPU's kernel would take it, and does not get it."""
    for device in ("cpu", "meta"):
        assert "e5m2" in fp8.scaled_mm_refusal(torch.device(device), E5M2, E5M2)
        assert fp8.scaled_mm_refusal(torch.device(device), E5M2, E4M3) is None
    assert "mps" in fp8.scaled_mm_refusal(torch.device("mps"), E4M3, E4M3)


def reference_product(x, w, g, options):
    """y, dx, dw in float64 from operands rounded by torch alone, tensor by tensor."""
    def rounded(t, dtype):
        scale = torch.finfo(dtype).max / t.abs().max()
        return (t * scale).to(dtype).double() / scale.double()

    x, w, g = (rounded(t, d) for t, d in zip((x, w, g), options.dtypes))
    return x @ w, g @ w.t(), x.t() @ g


@pytest.mark.parametrize("form", ["hybrid", "e4m3", "e5m2"])
def test_all_three_products_use_operands_of_the_format(form):
    options = Options(format=form)
    x, w, g = draw(32, 64).requires_grad_(), draw(64, 48, seed=1, scale=0.1).requires_grad_(), draw(32, 48, seed=2, scale=1e-6)
    y = Scaling(options)(x, w)
    y.backward(g)
    for got, exact in zip((y, x.grad, w.grad), reference_product(x.detach(), w.detach(), g, options)):
        assert got.dtype == torch.float32 and snr(got.detach(), exact) > 100
    exact = (x.detach() @ w.detach(), g @ w.detach().t(), x.detach().t() @ g)
    bits = {"hybrid": (28, 24), "e4m3": (28, 28), "e5m2": (22, 22)}[form]  # 6 dB a bit of mantissa, of the coarser operand
    for got, true, least in zip((y, x.grad, w.grad), exact, (bits[0], bits[1], bits[1])):
        assert least < snr(got.detach(), true) < least + 6


def test_hybrid_gradients_are_e5m2(monkeypatch):
    """Seen at the kernel: forward multiplies e4m3 by e4m3; both backward products take e5m2 first."""
    calls, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **kw: calls.append((a.dtype, b.dtype, a.shape, b.shape)) or real(a, b, **kw))
    layer = fp8.Linear(nn.Linear(32, 48), Options())
    layer(draw(16, 32).requires_grad_()).sum().backward()
    assert calls == [(E4M3, E4M3, (16, 32), (32, 48)), (E5M2, E4M3, (16, 48), (48, 32)), (E5M2, E4M3, (48, 16), (16, 32))]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_linear_is_close_to_nn_linear_in_every_recipe(name):
    plain = nn.Linear(64, 32)
    layer = fp8.Linear(plain, Options(recipe=name))
    x, g = draw(4, 10, 64), draw(4, 10, 32, seed=1)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    layer(inputs[0]).backward(g)
    dw, db = plain.weight.grad, plain.bias.grad
    plain.weight.grad = plain.bias.grad = None
    y = plain(inputs[1])
    y.backward(g)
    assert layer.weight is plain.weight and layer(x).shape == y.shape
    assert snr(layer(x).detach(), y.detach()) > 26 and snr(inputs[0].grad, inputs[1].grad) > 24 and snr(dw, plain.weight.grad) > 24
    assert torch.equal(db, plain.bias.grad)


def test_rowwise_keeps_what_one_scale_loses():
    x, w = draw(32, 32), torch.eye(32)
    x[0] *= 1e6
    tensorwise, rowwise = (Scaling(Options(recipe=r))(x, w) for r in ("tensorwise", "rowwise"))
    assert not tensorwise[1:].any() and snr(rowwise[1:], x[1:]) > 26


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
def test_rows_are_padded_with_zeros_and_nothing_else_shows(rows, monkeypatch):
    shapes, real = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **kw: shapes.extend([*a.shape, *b.shape]) or real(a, b, **kw))
    layer = fp8.Linear(nn.Linear(16, 32), Options())
    x = draw(17, 16)
    x[0] = 9  # the amax, in every part
    y = layer(x[:rows])
    y.square().sum().backward()
    assert y.shape == (rows, 32) and all(s % 16 == 0 for s in shapes)
    assert torch.equal(y, layer(x)[:rows])
    assert layer(x[:0]).shape == (0, 32)


def test_autocast_gives_bf16_and_fp32_gradients_of_fp32_weights():
    layer = fp8.Linear(nn.Linear(32, 32), Options())
    with torch.autocast("cpu", BF16):
        y = layer(draw(16, 32))
    assert y.dtype == BF16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert (layer.weight.grad != layer.weight.grad.to(BF16)).any()


def test_an_infinite_operand_is_seen():
    x = draw(16, 16)
    x[3, 3] = math.inf
    assert not Scaling(Options())(x, torch.eye(16)).isfinite().any()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Delayed scaling in layers


DELAYED = Options(recipe="delayed", amax_history_len=3)
SHARES = [f"fp8_{what}_{operand}" for what in ("underflow", "saturated") for operand in ("input", "weight", "grad")]


def test_delayed_scaling_uses_past_steps_and_records_this_one():
    scaling = Scaling(DELAYED)
    w = torch.eye(16)
    one, ten = torch.full((16, 16), 1.0), torch.full((16, 16), 10.0)
    assert torch.equal(scaling(one, w), one)  # no past: its own amax
    assert scaling.amax_history[0].tolist() == [1, 1, 0]
    scaling.roll()
    assert scaling.scale.tolist() == [448, 448, 0] and scaling.amax_history[:, INPUT].tolist() == [0, 0, 1]
    assert torch.equal(scaling(ten, w), one)  # ten times the past: clipped at its top
    assert scaling.amax_history[0, INPUT] == 10
    scaling.roll()
    torch.testing.assert_close(scaling(ten, w), ten)
    scaling.eval()
    scaling(ten * 100, w)
    assert scaling.amax_history[0, INPUT] == 10  # evaluation records nothing


def test_micro_batches_and_repeated_calls_count_as_one_step():
    scaling = Scaling(DELAYED)
    for amax in (2.0, 5.0, 1.0):
        scaling(torch.full((16, 16), amax), torch.eye(16))
    scaling.roll()
    assert scaling.scale[INPUT] == pytest.approx(448 / 5) and scaling.amax_history[:, INPUT].tolist() == [0, 0, 5]


def test_small_gradients_survive_their_first_step():
    """At Transformer Engine's first scale of 1 gradients of 1e-9 would all be 0 in e5m2, whose least value is 1.5e-5."""
    layer = fp8.Linear(nn.Linear(16, 16), DELAYED)
    layer(draw(16, 16)).backward(draw(16, 16, seed=1, scale=1e-9))
    assert layer.weight.grad.abs().max() > 1e-9


def test_observed_shares_are_those_of_the_operands():
    model = nn.Sequential(nn.Linear(16, 16))
    covered = convert(model, DELAYED)
    (scaling,) = covered.scalings
    model(torch.ones(16, 16)).sum().backward()
    covered.step()
    assert covered.step() == {}
    covered.observe(True)
    x = torch.ones(16, 16)
    x[:4], x[4:6], x[6:8] = 1.03, 2.0, 1e-9  # within half an ulp of the top, clipped, lost
    model(x)
    report = covered.step()
    assert report["fp8_saturated_input"] == 2 / 16 and report["fp8_underflow_input"] == 2 / 16
    assert report["fp8_underflow_weight"] == 0 and set(report) == set(SHARES)
    covered.observe(False)
    model(x)
    assert covered.step() == {}


# ---------------------------------------------------------------------------------------------------------------------------------------
# What is covered


def test_convert_covers_by_shape_and_place_under_the_same_names():
    model, plain = net(), net()
    names = [n for n, _ in model.named_parameters()]
    weight = model.first.weight
    covered = convert(model)
    assert [n for n, _ in model.named_parameters()] == names and model.first.weight is weight
    assert list(covered.layers) == ["first", "second"]
    assert covered.left_out == {"x_embed": "embedding", "narrow": "12 outputs: no multiple of 16", "final": "last layer"}
    assert model.state_dict().keys() == plain.state_dict().keys()  # only delayed scaling has a state
    x = draw(16, 16)
    assert not torch.equal(model(x), plain(x)) and snr(model(x).detach(), plain(x).detach()) > 20
    with covered.plain(model):
        assert torch.equal(model(x), plain(x)) and type(model.first) is nn.Linear
    assert type(model.first) is fp8.Linear


def test_the_report_counts_flops_by_hand():
    model = net()
    covered = convert(model)
    covered.count_flops(model, torch.empty(10, 16, device="meta"))
    linear = lambda k, n, products=3: 2 * 10 * k * n * products
    inside = linear(32, 64) + linear(64, 32)
    everything = inside + linear(16, 32, 2) + linear(32, 12) + linear(12, 16)  # nobody asks for the gradient of the input
    assert covered.flops == {"first": linear(32, 64), "second": linear(64, 32), "all": everything}
    assert covered.share == inside / everything
    text, report = str(covered), covered.json()
    assert f"2 of 5 linear layers, {inside / everything:.1%}" in text and "first: 32 to 64, scaled_mm" in text
    assert "narrow (12 outputs: no multiple of 16)" in text and "final (last layer)" in text
    assert report["flops_share"] == covered.share
    assert report["layers"][0] == dict(name="first", inputs=32, outputs=64, matmul="scaled_mm", flops=linear(32, 64))
    assert json.loads(json.dumps(report)) == report and report["backend"] == "scaled_mm"
    assert "emulate" in str(convert(net(), Options(format="e5m2")))


@pytest.mark.parametrize("model, least, most", [("dit", 0.9, 0.99), ("unet", 0.001, 0.1)])
def test_most_of_a_dit_is_covered_and_little_of_a_unet(model, least, most, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--dry_run", "--fp8", "--model", model]) == 0
    out = capsys.readouterr().out
    share = float(out.split("linear layers, ")[1].split("%")[0]) / 100
    assert least < share < most
    assert ("convolution: stays as it is" in out) == (model == "unet")
    assert ("blocks.*.attention.qkv (4): 64 to 192, scaled_mm" in out) == (model == "dit")


def test_a_net_without_fp8_layers_is_refused():
    with pytest.raises(FP8Error, match="no nn.Linear, and convolutions stay as they are; use --bf16"):
        convert(nn.Sequential(nn.Conv2d(1, 16, 3)))
    with pytest.raises(FP8Error, match="'0' is left out .12 inputs"):
        convert(nn.Sequential(nn.Linear(12, 16)))
    with pytest.raises(FP8Error, match="wrap it in a module"):
        convert(nn.Linear(16, 16))


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_a_model_of_bare_parameters(name):
    x = draw(3, 1, 16, 16)
    plain, model = Bare(), Bare()
    y = plain(x)
    assert torch.equal(model(x), y), "off until it is asked for"
    covered = convert(model, Options(recipe=name))
    covered.count_flops(model, torch.empty_like(x, device="meta"))
    assert "scalings.2: left out, 10 outputs" in str(covered) and covered.share < 1
    out = model(x)
    assert not torch.equal(out, y) and snr(out.detach(), y.detach()) > 18
    for m, o in ((plain, y), (model, out)):
        o.square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert snr(p.grad, q.grad) > 14
    rows = 3 * 16
    assert covered.flops["scalings.0"] == 2 * 2 * rows * 16 * 32 * 2 and covered.flops["scalings.1"] == 3 * 2 * rows * 64 * 16
    assert covered.share == (covered.flops["scalings.0"] + covered.flops["scalings.1"]) / covered.flops["all"]
    with covered.plain(model):
        assert torch.equal(model(x), y)
    if name == "delayed":
        covered.step()
        assert covered.scalings[0].scale.all() and "scalings.0.amax_history" in model.state_dict()
        assert not covered.scalings[2].scale.any()


def test_gradient_snr():
    reference, low = net(), net()
    x = draw(32, 16)
    loss = lambda model: model(x).square().mean()
    assert fp8.gradient_snr(low, reference, loss)["all"] == math.inf
    got = {}
    for form in ("hybrid", "e4m3", "e5m2"):
        low = net()
        convert(low, Options(format=form))
        got[form] = fp8.gradient_snr(low, reference, loss)
        assert set(got[form]) == {n for n, _ in low.named_parameters()} | {"all"} and low.first.weight.grad is None
    assert 20 < got["hybrid"]["all"] and got["e5m2"]["all"] < got["hybrid"]["all"] < got["e4m3"]["all"]


# ---------------------------------------------------------------------------------------------------------------------------------------
# Options and backends


@pytest.mark.parametrize("options, words", [
    (dict(backend="cutlass"), ["--fp8_backend cutlass", "auto, te, torchao, scaled_mm, emulate"]),
    (dict(format="e3m4"), ["--fp8_format e3m4", "hybrid, e4m3, e5m2"]), (dict(recipe="block"), ["--fp8_recipe block"]),
    (dict(recipe="delayed", amax_compute_algo="mean"), ["--amax_compute_algo mean", "max, most_recent"]),
    (dict(recipe="delayed", amax_history_len=0), ["--amax_history_len 0"]),
    (dict(amax_history_len=16), ["--amax_history_len", "--fp8_recipe delayed"]),
    (dict(recipe="rowwise", amax_compute_algo="most_recent"), ["--fp8_recipe rowwise", "--fp8_recipe delayed"])])
def test_options_that_make_no_sense(options, words):
    with pytest.raises(FP8Error) as caught:
        Options(**options)
    assert "\n" not in str(caught.value) and all(w in str(caught.value) for w in words)


def test_transformer_engine_absent_is_said_with_what_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(FP8Error) as caught:
        fp8.resolve(Options(backend="te"), "cpu")
    said = str(caught.value)
    assert "\n" not in said and "--fp8_backend te" in said and "requirements-te.txt" in said and "--fp8_backend torchao or scaled_mm or emulate" in said
    with pytest.raises(FP8Error, match="no rowwise scaling; here works --fp8_backend torchao or scaled_mm or emulate"):
        fp8.resolve(Options(backend="te", recipe="rowwise"), "cpu")
    with pytest.raises(FP8Error, match="torchao has no delayed scaling; here works --fp8_backend scaled_mm or emulate"):
        fp8.resolve(Options(backend="torchao", recipe="delayed"), "cpu")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(FP8Error, match="torchao can't be imported .*; here works --fp8_backend scaled_mm or emulate"):
        fp8.resolve(Options(backend="torchao"), "cpu")
    with pytest.raises(FP8Error, match="mps.*use --bf16"):
        fp8.resolve(Options(), "mps")


@pytest.mark.parametrize("installed, options, chosen", [
    (("te", "torchao"), {}, "te"), (("te", "torchao"), dict(recipe="delayed"), "te"), (("te", "torchao"), dict(recipe="rowwise"), "torchao"),
    (("te", "torchao"), dict(format="e5m2"), "scaled_mm"), (("torchao",), {}, "torchao"), (("torchao",), dict(recipe="delayed"), "scaled_mm"),
    ((), {}, "scaled_mm")])
def test_auto_on_hopper(installed, options, chosen, monkeypatch):
    class Module:
        autocast = None

    present = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}
    monkeypatch.setattr(fp8, "_import", lambda name: (Module, None) if name in [present[i] for i in installed] else (None, "absent"))
    monkeypatch.setattr(fp8, "_hopper", lambda device: True)
    assert fp8.resolve(Options(**options), "cuda").backend == chosen
    monkeypatch.setattr(fp8, "_hopper", lambda device: False)
    assert fp8.resolve(Options(**options), "cuda").backend == "emulate"
    assert fp8.resolve(Options(**options), "cpu").backend == "scaled_mm"
    if "te" in installed:
        with pytest.raises(FP8Error, match="compute capability 8.9"):
            fp8.resolve(Options(backend="te"), "cuda")


@pytest.fixture
def fake_te(monkeypatch):
    """Stand-in for Transformer Engine with what fp8.py touches of it, as its 2.x sources have it; multiplies without FP8."""
    log = types.SimpleNamespace(recipes=[], regions=[])

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
                self.fp8_meta.setdefault(key, types.SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3)))

        def forward(self, x):
            if x.dim() != 2 or x.shape[0] % 8 or x.shape[1] % 16:
                raise ValueError(x.shape)
            self.init_fp8_metadata()
            self.fp8_meta["scaling_fwd"].scale += 1
            return super().forward(x)

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        log.regions.append((enabled, recipe))
        yield
        log.regions.pop()

    recipes = {name: type(name, (Recipe,), {}) for name in ("DelayedScaling", "Float8CurrentScaling")}
    modules = {"transformer_engine": {}, "transformer_engine.common": {}, "transformer_engine.pytorch": dict(Linear=Linear, autocast=autocast),
               "transformer_engine.common.recipe": dict(recipes, Format=types.SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3"))}
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["transformer_engine"], "pytorch", sys.modules["transformer_engine.pytorch"], raising=False)
    monkeypatch.setattr(fp8, "_hopper", lambda device: True)
    return log


def test_what_transformer_engine_is_handed(fake_te):
    r = recipe(fp8=True, fp8_recipe="delayed", fp8_format="e4m3", amax_history_len=4, amax_compute_algo="most_recent")
    run, plain, x = Precision(net(), r), Precision(net(), recipe(bf16=True)), draw(3, 16)
    assert fake_te.recipes[0].fields == dict(fp8_format="E4M3", amax_history_len=4, amax_compute_algo="most_recent", margin=0)
    assert run.recipe.fp8.backend == "te" and "Transformer Engine" in str(run.ledger())
    assert [n for n, _ in run.named_params] == [n for n, _ in plain.named_params]
    assert torch.equal(run(x), plain(x)), "3 rows, padded and cut"
    run.backward(run(x).square().sum())
    run.step()
    assert not fake_te.regions and type(run.generator().model.first) is nn.Linear
    state = run.state_dict()
    assert state["model"]["first._extra_state"]["scaling_fwd"]["scale"].tolist() == [3, 3, 3]
    again = Precision(net(1), r)
    again.load_state_dict(torch.load(saved(run), weights_only=True))
    assert torch.equal(again.model.first.fp8_meta["scaling_fwd"].scale, torch.tensor([3.0] * 3)) and torch.equal(again(x), run(x))
    elsewhere = Precision(net(1), recipe(fp8=True, fp8_backend="emulate"))
    elsewhere.load_state_dict(run.state_dict())
    assert torch.equal(elsewhere.model.first.weight, run.model.first.weight)
    current = Precision(net(), recipe(fp8=True))
    assert type(current.fp8.te_recipe).__name__ == "Float8CurrentScaling" and current.fp8.te_recipe.fields == dict(fp8_format="HYBRID")


@pytest.mark.parametrize("options", [dict(), dict(recipe="rowwise"), dict(recipe="rowwise", format="e4m3")], ids=str)
@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True)], ids=str)
def test_torchao_agrees_with_ours_on_a_cpu(options, flags):
    pytest.importorskip("torchao")
    x = draw(20, 16)
    fields = {f"fp8_{k}": v for k, v in options.items()}
    theirs, ours = (Precision(net(), recipe(fp8=True, **flags, fp8_backend=backend, **fields)) for backend in ("torchao", "scaled_mm"))
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
    assert type(theirs.generator().model.first) is nn.Linear


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_torchao_takes_what_leaves_an_attention(name):
    pytest.importorskip("torchao")
    net = nn.Sequential(nn.Linear(32, 32))
    options = Options(backend="torchao", recipe=name)
    heads = draw(2, 2, 16, 16, dtype=BF16)  # [B, heads, tokens, width of a head]
    x = heads.transpose(1, 2).flatten(2).transpose(0, 1).requires_grad_()  # a view whose rows lie apart
    assert not x.is_contiguous()
    fp8.convert(net, options)
    y = net(x)
    y.sum().backward()
    assert torch.equal(y, net(x.contiguous())) and x.grad.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------------------------
# Recipes and runs


def test_recipes_of_the_flags():
    assert recipe(fp8=True) == Recipe(compute="fp8", fp8=Options()) == recipe(sites=["compute=fp8"])
    pure = recipe(fp8=True, pure_bf16=True, stochastic=True, fp8_format="e4m3", fp8_recipe="delayed", amax_history_len=16,
                  amax_compute_algo="most_recent")
    assert pure.weights == "bf16" and pure.fp8 == Options("auto", "e4m3", "delayed", 16, "most_recent")
    assert pure.dtype("compute") == BF16 and recipe(pure_bf16=True).fp8 is None
    for flag, default in precision.FP8_FLAGS.items():
        assert getattr(Options(), flag.removeprefix("fp8_")) == default
    train.build_parser()
    assert {flag: train.DEFAULTS[flag] for flag in precision.FP8_FLAGS} == precision.FP8_FLAGS


@pytest.mark.parametrize("flags, words", [
    (dict(bf16=True, fp8=True), ["--fp8 and --bf16 exclude each other", "drop --bf16"]), (dict(fp16=True, fp8=True), ["--fp8 and --fp16"]),
    (dict(fp8_format="e4m3"), ["--fp8_format e4m3", "add --fp8"]),
    (dict(pure_bf16=True, amax_history_len=8), ["--amax_history_len 8", "computes in bf16", "add --fp8"]),
    (dict(fp8=True, amax_history_len=8), ["--fp8_recipe delayed"]),
    (dict(sites=["generation=int8"], sparse24="srste"), ["generation=int8 with sparse24=srste", "drop one"])])
def test_recipes_that_make_no_sense(flags, words):
    with pytest.raises(RecipeError) as caught:
        recipe(**flags)
    assert "\n" not in str(caught.value) and all(w in str(caught.value) for w in words)


def dit(seed=0):
    torch.manual_seed(seed)
    return models.build("dit", "rflow", channels=1, num_classes=10, image_size=8)


def test_a_dit_trained_in_fp8_stays_close_to_bf16():
    def train_dit(steps=8, **flags):
        run = Precision(dit(), recipe(**flags), lr=2e-3)
        losses = []
        for step in range(steps):
            x, t = draw(32, 1, 8, 8, seed=step), torch.rand(32, generator=torch.Generator().manual_seed(step)) * 1000
            loss = F.mse_loss(run(x, t, torch.arange(32) % 10), x)
            run.backward(loss)
            run.step()
            losses.append(loss.item())
        return losses, run

    exact, _ = train_dit(bf16=True)
    assert exact[-1] < 0.8 * exact[0]
    for flags in (dict(fp8=True), dict(fp8=True, fp8_recipe="delayed"), dict(fp8=True, pure_bf16=True, stochastic=True, fp8_format="e4m3")):
        got, run = train_dit(**flags)
        assert got != exact and max(abs(a - b) for a, b in zip(got, exact)) < 0.03 * exact[0], flags
        # fp32 or bf16 weights, whatever the products read
        assert {p.dtype for p in run.params} == {BF16 if "pure_bf16" in flags else torch.float32}


def test_generation_is_without_fp8_unless_asked():
    x, t, y = draw(8, 1, 8, 8), torch.rand(8) * 1000, torch.arange(8)
    outs = {}
    for value in ("compute", "fp8", "fp32"):
        torch.manual_seed(1)
        run = Precision(dit(), recipe(fp8=True, sites=[f"generation={value}"]))
        for p in run.params:
            p.data.add_(0.05 * torch.randn_like(p))
        sampler = run.generator("raw")
        outs[value] = sampler(x, t, y)
        kinds = {type(m) for m in sampler.model.modules()}
        assert (fp8.Linear in kinds) == (value == "fp8") and isinstance(run.model.blocks[0].mlp[0], fp8.Linear)
    assert 15 < snr(outs["fp8"], outs["fp32"]) < snr(outs["compute"], outs["fp32"]) - 5
    plain = Precision(dit(), recipe(bf16=True))
    plain.model.load_state_dict(run.model.state_dict())
    assert torch.equal(plain(x, t, y), outs["compute"])


# ---------------------------------------------------------------------------------------------------------------------------------------
# A finished net


def test_int8_is_a_scale_a_row_and_a_scale_a_token():
    layer, x = nn.Linear(64, 48, bias=False), draw(20, 64) * torch.logspace(-3, 3, 20)[:, None]
    layer.weight.data = draw(48, 64, seed=1) * torch.logspace(-3, 3, 48)[:, None]
    exact, model = layer(x).detach(), nn.Sequential(layer)
    covered = fp8.quantise(model, "int8")
    got = model(x)
    for along in (0, 1):  # small rows and small columns are as exact as large ones
        assert min(snr(g, e) for g, e in zip(got.unbind(along), exact.unbind(along))) > 12
    assert snr(got, exact) < 50
    assert covered.layers == {"0": (64, 48, "torchao")}


PURE = dict(pure_bf16=True, stochastic=True, sites=["islands=embed+final"])


@pytest.mark.parametrize("kind, least, most, flags", [
    ("int8", 43, 50, {}), ("int8", 43, 50, PURE), ("int8", 43, 50, dict(fp8=True)), ("fp8", 35, 43, {}), ("fp8", 35, 43, PURE)], ids=str)
def test_a_finished_net_is_drawn_in_8_bits(kind, least, most, flags):
    x, t, y = draw(8, 1, 8, 8), torch.rand(8, generator=torch.Generator().manual_seed(0)) * 1000, torch.arange(8)
    outs, covered = {}, {f"blocks.{i}.{name}" for i in range(4) for name in ("attention.qkv", "attention.proj", "mlp.0", "mlp.2", "modulation")}
    for value in ("fp32", kind):
        run = Precision(dit(1), recipe(**{**flags, "sites": [*flags.get("sites", ()), f"generation={value}"]}))
        for p in run.params:
            p.data.add_(0.05 * torch.randn_like(p))
        state = {name: p.clone() for name, p in run.model.state_dict().items()}
        sampler = run.generator("raw")
        outs[value] = sampler(x, t, y)
        assert torch.equal(outs[value], run.generator("raw")(x, t, y))
    low = {name for name, m in sampler.model.named_modules() if isinstance(m, fp8.Linear) or type(getattr(m, "weight", None)).__name__ == "Int8Tensor"}
    assert low == covered and least < snr(outs[kind], outs["fp32"]) < most
    assert all(torch.equal(p, state[name]) for name, p in run.model.state_dict().items()), "the net that trains stays as it is"
    run(x, t, y)
    ledger = run.ledger()
    found = ledger.json()["generation"]
    assert {layer["name"] for layer in found["layers"]} == covered and found["left_out"]["x_embed"] == "embedding"
    # by hand: 4 blocks, 16 tokens, width 64; products of activations are not covered
    block = 2 * 8 * (16 * 64 * (3 * 64 + 64 + 8 * 64) + 64 * 6 * 64)
    assert sum(layer["flops"] for layer in found["layers"]) == 4 * block and ledger.flops_share["generation"] == found["flops_share"] > 0.9
    assert "20 of 25 linear layers" in next(row["why"] for row in ledger.rows if row["site"] == "generation")


def test_bare_parameters_are_quantised_to_fp8_alone():
    x = draw(4, 1, 5, 16)
    exact = Bare()
    with pytest.raises(FP8Error, match="generation=int8.*bare parameters"):
        fp8.quantise(Bare(), "int8")
    low = Bare()
    covered = fp8.quantise(low, "fp8")
    covered.count_flops(low, x, backward=False)
    assert 15 < snr(low(x).detach(), exact(x).detach()) < 35 and covered.flops["scalings.0"] == 2 * 4 * 2 * 5 * 16 * 32


def test_int8_without_torchao_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(RecipeError, match="generation=int8 needs the package torchao.*pip install torchao, or use --set generation=bf16"):
        Precision(net(), recipe(sites=["generation=int8"]))


def test_drawing_from_a_finished_run_in_8_bits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*QUICK, "--steps", "2"]) == 0
    assert "gradient_snr" not in json.loads(Path("runs/run/summary.json").read_text())
    scores = {}
    for kind in ("int8", "fp8"):
        capsys.readouterr()
        assert train.main(["--sample", "runs/run", "--set", f"generation={kind}", "--name", kind]) == 0
        drawn = json.loads(Path(f"runs/run/samples/{kind}.json").read_text())
        scores[kind] = drawn["scores"]["ema"]["sliced_wasserstein"]
        said = capsys.readouterr().out
        assert "20 of 25 linear layers" in said and 0.9 < drawn["ledger"]["flops_share"]["generation"] < 1
        assert drawn["ledger"]["generation"]["format"] == {"int8": "int8", "fp8": "hybrid"}[kind]
    assert max(scores.values()) < 1.05 * min(scores.values())
    assert train.main(["--sample", "runs/run", "--set", "generation=int8", "--sparse24", "magnitude"]) == 2


@pytest.mark.parametrize("weights", ["", "--pure_bf16 --stochastic --set islands=embed"])
def test_the_summary_tells_the_noise_of_fp8_gradients(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for form in ("hybrid", "e5m2"):
        words = [*QUICK, "--fp8", "--fp8_recipe", "delayed", "--fp8_format", form, *weights.split(), "--steps", "12", "--name", form, "--lr", "1e-2",
                 "--samples", "2", "--sample_steps", "1"]
        assert train.main(words) == 0
        found[form] = json.loads(Path(f"runs/{form}/summary.json").read_text())["gradient_snr"]
    assert 15 < found["e5m2"]["fp8"] < found["hybrid"]["fp8"] - 3 < found["hybrid"]["bf16"] - 10 < 50
    trainer = Trainer({**train.DEFAULTS, **json.loads(Path("runs/hybrid/config.json").read_text())["flags"]})
    trainer.restore(read_checkpoint("runs/hybrid"))
    trainer.train, model = trainer.data.train, trainer.precision.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert trainer.precision.gradient_snr(trainer._fixed_loss) == found["hybrid"], "a function of the checkpoint"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()) and all(p.grad is None for p in model.parameters())


QUICK = "--model dit --batch_size 8 --samples 20 --sample_steps 2 --log_every 2 --sample_every 0 --warmup 0 --name run".split()


def test_resume_is_bit_exact(tmp_path, monkeypatch):
    flags = "--fp8 --fp8_recipe delayed --amax_history_len 3 --pure_bf16 --stochastic --accumulate 2"

    def run(folder, *steps):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for n in steps:
            assert train.main([*QUICK, *flags.split(), "--steps", str(n)]) == 0
        return torch.load("runs/run/checkpoint.pt", weights_only=True)["precision"], Path("runs/run/metrics.jsonl").read_text()

    whole, metrics = run("whole", 4)
    parts, again = run("parts", 2, 4)
    assert metrics == again
    states = {k: v for k, v in whole["model"].items() if "scaling" in k}
    assert len(states) == 2 * 20 and all(v.any() for k, v in states.items() if k.endswith("scale"))
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name
    for name, value in whole["averages"]["ema"]["shadow"].items():
        assert torch.equal(value, parts["averages"]["ema"]["shadow"][name]), name
    rows = [json.loads(line) for line in metrics.splitlines()]
    assert all(0 <= row[share] < 0.5 for row in rows for share in SHARES)
    ledger = json.loads(Path("runs/run/ledger.json").read_text())
    assert len(ledger["fp8"]["layers"]) == 20 and ledger["fp8"]["recipe"] == "delayed" and ledger["fp8"]["flops_share"] > 0.9


def test_a_state_without_another_backends_scales_loads():
    """A run may go on where another backend is chosen: scales stay behind, weights do not."""
    delayed, plain = Precision(net(), recipe(fp8=True, fp8_recipe="delayed")), Precision(net(1), recipe(fp8=True))
    delayed.backward(delayed(draw(16, 16)).sum())
    delayed.step()
    plain.load_state_dict(delayed.state_dict())
    assert torch.equal(plain.model.first.weight, delayed.model.first.weight)
    other = Precision(net(1), recipe(fp8=True, fp8_recipe="delayed"))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.model.first.weight, plain.model.first.weight) and not other.model.first.scaling.scale.any()
    with pytest.raises(RuntimeError, match="second.weight"):
        state = plain.state_dict()
        del state["model"]["second.weight"]
        plain.load_state_dict(state)


@pytest.mark.parametrize("flags, words", [
    ("--fp8 --task segment", ["no nn.Linear", "use --bf16"]),
    ("--fp8 --model dit --fp8_backend te", ["--fp8_backend te", "here works --fp8_backend"]),
    ("--model dit --fp8_recipe delayed", ["add --fp8"]),
    ("--task segment --set generation=int8", ["--set generation=int8", "in int8", "no nn.Linear", "use --set generation=bf16"]),
    ("--task segment --set generation=fp8", ["--set generation=fp8", "in FP8", "no nn.Linear", "use --set generation=bf16"]),
    ("--model dit --fp8 --fp8_backend torchao --fp8_recipe delayed", ["torchao has no delayed scaling"]),
    ("--model dit --fp8 --fp8_format e6m1", ["--fp8_format"]), ("--model dit --fp8 --amax_history_len 0", ["--amax_history_len"])])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_bad_flags_get_one_line(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = train.main(flags.split())
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and said.startswith("train.py: ") and all(w in said for w in words)
    assert not list(tmp_path.iterdir())


def test_fp8_is_loaded_only_when_asked_for(monkeypatch):
    monkeypatch.delitem(sys.modules, "fp8")
    Precision(nn.Linear(4, 4), recipe(pure_bf16=True)).ledger()
    assert "fp8" not in sys.modules
    recipe(fp8=True)
    assert "fp8" in sys.modules


# ---------------------------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@needs_cuda
@needs_hopper
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("form", ["hybrid", "e4m3", "e5m2"])
def test_ours_on_cuda_equals_ours_on_a_cpu(name, form):
    results = []
    for device in ("cpu", "cuda"):
        layer = fp8.Linear(nn.Linear(64, 48, device=device), Options(format=form, recipe=name))
        with torch.no_grad():
            layer.weight.copy_(draw(48, 64, scale=0.1))
            layer.bias.zero_()
        x = draw(20, 64, seed=1).to(device).requires_grad_()
        y = layer(x)
        y.backward(draw(20, 48, seed=2).to(device))
        results.append([t.detach().cpu() for t in (y, x.grad, layer.weight.grad)])
    for a, b in zip(*results):
        assert snr(b, a) > (45 if name == "rowwise" else 60)


BACKENDS = [("te", "tensorwise"), ("te", "delayed"), ("torchao", "tensorwise"), ("torchao", "rowwise"), ("scaled_mm", "tensorwise"),
            ("scaled_mm", "delayed"), ("emulate", "tensorwise")]


@pytest.mark.gpu
@needs_cuda
@needs_hopper
@pytest.mark.parametrize("backend, name", BACKENDS)
@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True, stochastic=True)], ids=str)
def test_every_backend_trains_a_dit_on_cuda(backend, name, flags):
    pytest.importorskip({"te": "transformer_engine.pytorch", "torchao": "torchao"}.get(backend, "torch"))
    losses, y = {}, torch.arange(20, device="cuda") % 10
    recipes = {"fp8": recipe(fp8=True, fp8_backend=backend, fp8_recipe=name, **flags), "bf16": recipe(**flags) if flags else recipe(bf16=True)}
    for label, r in recipes.items():
        run = Precision(dit().cuda(), r, lr=2e-3)
        losses[label] = []
        for step in range(8):
            x, t = draw(20, 1, 8, 8, seed=step).cuda(), torch.rand(20, generator=torch.Generator().manual_seed(step)).cuda() * 1000
            loss = F.mse_loss(run(x, t, y), x)
            run.backward(loss)
            run.step()
            losses[label].append(loss.item())
        run.ledger()
        assert run.generator()(x, t, y).isfinite().all()
        if label == "fp8":
            again = Precision(dit(1).cuda(), r, lr=2e-3)
            again.load_state_dict(torch.load(saved(run), weights_only=True))
            torch.testing.assert_close(again(x, t, y), run(x, t, y))
    assert max(abs(a - b) for a, b in zip(losses["fp8"], losses["bf16"])) < 0.05 * losses["bf16"][0]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [3, 64])
def test_a_finished_net_is_drawn_alike_on_cuda_and_cpu(kind, rows):
    x, t, y, outs = draw(rows, 1, 8, 8), torch.linspace(0, 999, rows), torch.arange(rows) % 10, {}
    for device in ("cpu", "cuda"):
        net = dit(1)
        for i, p in enumerate(net.parameters()):
            p.data.add_(0.05 * draw(*p.shape, seed=i))
        run = Precision(net.to(device), recipe(sites=[f"generation={kind}"]))
        outs[device] = run.generator("raw")(x.to(device), t.to(device), y.to(device)).cpu()
    assert snr(outs["cuda"], outs["cpu"]) > 30  # sums in another order cross edges between codes


def saved(run):
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    return file
