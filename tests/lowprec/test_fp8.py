"""One FP8 product: rounding and scales, the three products of a layer, delayed scaling, torch.compile."""

import json
import math

import common
import pytest
import torch
from common import cpu_scales_rows, refused
from eight_bit import Bare, Net, dit, draw, method, net, snr
from torch import nn

import models
from lowprec.formats import FORMATS
from lowprec.layers import fp8, fp8_product, quantise
from lowprec.layers.fp8 import FP8, Options, Scaling, convert
from lowprec.layers.fp8_product import INPUT_OPERAND
from lowprec.precision import Precision, recipe

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMS = {E4M3: FORMATS["e4m3"], E5M2: FORMATS["e5m2"]}
FLOAT32_MAX = torch.finfo(torch.float32).max


# ---- Rounding and scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_is_torchs_within_the_range_and_clamps_beyond(dtype):
    top, cast = torch.finfo(dtype).max, FORMS[dtype].cast
    x = torch.cat([draw(5000, scale=s) for s in (1e-3, 1, 40)])
    assert torch.equal(cast(x, 1.0).float(), x.to(dtype).float())
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    assert torch.equal(cast(every, 1.0).float(), every)
    beyond = torch.tensor([top * 1.5, -1e30, math.inf, -math.inf, math.nan])
    assert cast(beyond, 1.0).float().nan_to_num(7).tolist() == [top, -top, top, -top, 7]
    if dtype == E4M3:
        # a bf16 operand is scaled in fp32: the product lies above the middle of 1 and 1.125, both formats'
        # next, and in bf16 would lie on it
        assert cast(torch.tensor([1.0078125], dtype=BF16), torch.tensor([[1.0545]])).item() == 1.125


def test_amax_and_current_scale():
    x = torch.tensor([[1.0, -3.0, 0.5], [0.25, 0.0, 2.0]], dtype=BF16)
    assert fp8_product.amax_of(x).tolist() == [[3.0]]
    assert fp8_product.amax_of(x, 1).tolist() == [[3.0], [2.0]] and fp8_product.amax_of(x, 0).tolist() == [
        [1.0, 3.0, 2.0]
    ]
    assert fp8_product.amax_of(torch.tensor([[1.0, math.nan]])).isnan().all()
    got = fp8_product.current_scale(torch.tensor([2.0, 0.0, 1e-45, math.inf]), 448.0)
    assert got.tolist() == [224.0, 1.0, pytest.approx(FLOAT32_MAX), 0.0]


TOPS = torch.tensor([448.0, 448.0, 57344.0])


@pytest.mark.parametrize("algo, wanted", [("max", 8.0), ("most_recent", 2.0)])
def test_delayed_scale_is_transformer_engines_rule(algo, wanted):
    """FP8_MAX / amax from the largest or the latest amax; then the history is rolled by -1 and its first row
    cleared.
    """
    history = torch.tensor([2.0, 8.0, 1.0, 4.0])[:, None].repeat(1, 3)
    scale = torch.full((3,), 5.0)
    fp8_product.roll_history(history, scale, TOPS, algo)
    assert torch.equal(scale, TOPS / wanted)
    assert history[:, 0].tolist() == [0.0, 1.0, 4.0, 2.0]  # 8, the oldest, is gone; 2, the latest, is last


def test_delayed_scale_stays_where_amax_says_nothing():
    amax = torch.tensor([0.0, math.inf, math.nan, 1e-44, 3.0])
    got = fp8_product.delayed_scale(amax, torch.full((5,), 7.0), 448.0)
    assert got[:3].tolist() == [7.0] * 3 and got[3] == FLOAT32_MAX and got[4] == pytest.approx(448 / 3)
    history, scale = torch.zeros(1, 3), torch.tensor([7.0, 7.0, 7.0])
    history[0, 1] = 14.0
    fp8_product.roll_history(history, scale, TOPS)  # a history of one step
    assert scale.tolist() == [7.0, 32.0, 7.0] and not history.any()


# ---- Products ----------------------------------------------------------------------------------------------


def kernel_calls(monkeypatch):
    """A list that fills with (dtype, dtype, shape, shape): the operands that torch's kernel gets."""
    calls, real = [], torch._scaled_mm

    def recording(a, b, **options):
        calls.append((a.dtype, b.dtype, a.shape, b.shape))
        return real(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recording)
    return calls


@pytest.mark.parametrize("a, b", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("out", [BF16, torch.float32])
@cpu_scales_rows
def test_scaled_mm_and_emulation_agree_to_the_order_of_sums(a, b, rows, out, monkeypatch):
    """Equal up to the last bit of the output: bf16 sums may fall on either side of a middle, rarely."""

    def quantised(x, dtype, dim):
        amax = fp8_product.amax_of(x, dim if rows else None)
        scale = fp8_product.current_scale(amax, torch.finfo(dtype).max)
        return FORMS[dtype].cast(x, scale), scale.reciprocal()

    left, right = quantised(draw(48, 256), a, 1), quantised(draw(256, 32, seed=1, scale=0.01), b, 0)
    calls = kernel_calls(monkeypatch)
    kernel = fp8_product.product(left, right, out)
    assert len(calls) == 1 and kernel.dtype == out
    emulated = fp8_product.product(left, right, out, emulated=True)
    assert len(calls) == 1 and emulated.dtype == out
    monkeypatch.setattr(fp8_product, "scaled_mm_refusal", lambda *args: "no")
    assert torch.equal(fp8_product.product(left, right, out), emulated) and len(calls) == 1
    exact = (left[0].double() @ right[0].double()) * left[1].double() * right[1].double()
    ulp = 2**-8 if out == BF16 or rows else 2**-20
    for got in (kernel, emulated):
        assert (got.double() - exact).abs().max() <= ulp * exact.abs().max()
    assert (kernel != emulated).float().mean() < 0.02 or out == torch.float32


def test_autocast_does_not_round_the_operands_again():
    """On a CPU it reaches into torch's kernel, unless it is kept out."""
    form = FORMS[E4M3]
    codes = form.cast(draw(48, 256), 100.0), form.cast(draw(256, 32, seed=1), 100.0)
    pairs = [(x, torch.full((1, 1), 0.0123)) for x in codes]
    for emulated in (False, True):
        exact = fp8_product.product(*pairs, BF16, emulated)
        with torch.autocast("cpu", BF16):
            assert torch.equal(fp8_product.product(*pairs, BF16, emulated), exact)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_decodes_to_its_value(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for x in (codes, codes.t(), codes[:, ::2]):
        torch.testing.assert_close(fp8_product.decode_fp8(x), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["scaled_mm", "emulate"])
@cpu_scales_rows
def test_the_backend_asked_for_multiplies(backend, monkeypatch):
    calls = kernel_calls(monkeypatch)
    model = net()
    covered = convert(model, Options(backend=backend))
    model(draw(16, 16)).sum().backward()
    assert len(calls) == (6 if backend == "scaled_mm" else 0)  # three products of two layers
    assert {how for *_, how in covered.layers.values()} == {backend}


@cpu_scales_rows
def test_e5m2_is_never_multiplied_by_e5m2_in_the_kernel():
    """CUDA refuses it; the CPU's kernel would take it, and does not get it."""
    for device in ("cpu", "meta"):
        assert "e5m2" in fp8_product.scaled_mm_refusal(torch.device(device), E5M2, E5M2)
        assert fp8_product.scaled_mm_refusal(torch.device(device), E5M2, E4M3) is None
    assert "mps" in fp8_product.scaled_mm_refusal(torch.device("mps"), E4M3, E4M3)


def reference_product(x, w, g, options):
    """y, dx, dw in float64 from operands rounded by torch alone, tensor by tensor."""

    def rounded(t, dtype):
        scale = torch.finfo(dtype).max / t.abs().max()
        return (t * scale).to(dtype).double() / scale.double()

    x, w, g = (rounded(t, form.dtype) for t, form in zip((x, w, g), options.formats, strict=True))
    return x @ w, g @ w.t(), x.t() @ g


@pytest.mark.parametrize("form", ["hybrid", "e4m3", "e5m2"])
def test_all_three_products_use_operands_of_the_format(form):
    options = Options(format=form)
    x, w, g = draw(32, 64), draw(64, 48, seed=1, scale=0.1), draw(32, 48, seed=2, scale=1e-6)
    left, right = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = Scaling(options)(left, right)
    y.backward(g)
    products = y.detach(), left.grad, right.grad
    for got, exact in zip(products, reference_product(x, w, g, options), strict=True):
        assert got.dtype == torch.float32 and snr(got, exact) > 100
    # 6 dB a bit of mantissa, of the coarser operand
    forward, backward = {"hybrid": (28, 24), "e4m3": (28, 28), "e5m2": (22, 22)}[form]
    bounds = forward, backward, backward
    for got, exact, least in zip(products, (x @ w, g @ w.t(), x.t() @ g), bounds, strict=True):
        assert least < snr(got, exact) < least + 6


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
    assert snr(layer(x).detach(), y.detach()) > 26
    assert snr(inputs[0].grad, inputs[1].grad) > 24
    assert snr(dw, plain.weight.grad) > 24
    assert torch.equal(db, plain.bias.grad)


def test_rowwise_keeps_what_one_scale_loses():
    x, w = draw(32, 32), torch.eye(32)
    x[0] *= 1e6
    tensorwise, rowwise = (Scaling(Options(recipe=r))(x, w) for r in ("tensorwise", "rowwise"))
    assert not tensorwise[1:].any() and snr(rowwise[1:], x[1:]) > 26


@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@cpu_scales_rows
def test_rows_are_padded_with_zeros_and_nothing_else_shows(rows, monkeypatch):
    calls = kernel_calls(monkeypatch)
    layer = fp8.Linear(nn.Linear(16, 32), Options())
    x = draw(17, 16)
    x[0] = 9  # the amax, in every part
    y = layer(x[:rows])
    y.square().sum().backward()
    sizes = [size for _, _, left, right in calls for size in (*left, *right)]
    assert y.shape == (rows, 32) and len(calls) == 2 and all(size % 16 == 0 for size in sizes)
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


# ---- Delayed scaling in layers -----------------------------------------------------------------------------


DELAYED = Options(recipe="delayed", amax_history_len=3)
SHARES = [f"fp8_{what}_{name}" for what in ("underflow", "saturated") for name in ("input", "weight", "grad")]


@cpu_scales_rows
def test_delayed_scaling_uses_past_steps_and_records_this_one():
    scaling = Scaling(DELAYED)
    w = torch.eye(16)
    one, ten = torch.full((16, 16), 1.0), torch.full((16, 16), 10.0)
    assert torch.equal(scaling(one, w), one)  # no past: its own amax
    assert scaling.amax_history[0].tolist() == [1, 1, 0]
    scaling.roll()
    assert scaling.scale.tolist() == [448, 448, 0]
    assert scaling.amax_history[:, INPUT_OPERAND].tolist() == [0, 0, 1]
    assert torch.equal(scaling(ten, w), one)  # ten times the past: clipped at its top
    assert scaling.amax_history[0, INPUT_OPERAND] == 10
    scaling.roll()
    torch.testing.assert_close(scaling(ten, w), ten)
    scaling.eval()
    scaling(ten * 100, w)
    assert scaling.amax_history[0, INPUT_OPERAND] == 10  # evaluation records nothing


def test_micro_batches_and_repeated_calls_count_as_one_step():
    scaling = Scaling(DELAYED)
    for amax in (2.0, 5.0, 1.0):
        scaling(torch.full((16, 16), amax), torch.eye(16))
    scaling.roll()
    assert scaling.scale[INPUT_OPERAND] == pytest.approx(448 / 5)
    assert scaling.amax_history[:, INPUT_OPERAND].tolist() == [0, 0, 5]


def test_small_gradients_survive_their_first_step():
    """At Transformer Engine's first scale of 1 gradients of 1e-9 would all be 0 in e5m2, whose least value is
    1.5e-5.
    """
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


# ---- torch.compile -----------------------------------------------------------------------------------------


def steps(model, covered, call, shape, autocast):
    """All that three steps of `call`, the model or a compiled one, give and leave behind; the second one is
    measured.
    """
    seen = []
    for i in range(3):
        covered.observe(i == 1)
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = call(draw(*shape, seed=i, scale=1.0 + i))
        grads = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
        report = covered.step()
        assert set(report) == (set(SHARES) if i == 1 else set())
        state = {name: t.clone() for name, t in model.state_dict().items()}
        seen.append((y.detach(), *grads, *state.values(), *map(torch.tensor, report.values())))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
    return seen


COMPILED = [  # kind, recipe, backend, compiler, autocast
    pytest.param(Net, "rowwise", "scaled_mm", "aot_eager", True, marks=cpu_scales_rows),
    (Bare, "delayed", "emulate", "aot_eager", False),
]


@pytest.mark.parametrize("kind, name, backend, compiler, autocast", COMPILED)
def test_a_compiled_model_is_one_graph_with_the_same_numbers(kind, name, backend, compiler, autocast):
    shape = (3, 7, 16) if kind is Net else (3, 1, 5, 16)
    seen = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = kind()
        covered = convert(model, Options(backend=backend, recipe=name))
        call = torch.compile(model, fullgraph=True, backend=compiler) if compiled else model
        seen.append(steps(model, covered, call, shape, autocast))
    for eager, graph in zip(*seen, strict=True):
        for a, b in zip(eager, graph, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_graph_writes_no_attribute():
    """What is left out is decided by an eager call; a graph computes and decides nothing."""
    torch._dynamo.reset()
    model = Bare()
    convert(model, Options(backend="emulate"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = draw(3, 1, 5, 16)
    graph = compiled(x)
    assert [scaling.left_out for scaling in model.scalings] == [None, None, None]
    assert torch.equal(graph, model(x))
    assert [scaling.left_out for scaling in model.scalings] == ["", "", "10 outputs: no multiple of 16"]


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
