"""Products in MXFP8, FP8 of blocks and FP4: operands, gradients on average, runs, refusals."""

import dataclasses
import functools

import common
import pytest
import torch
from common import refused, through_a_file
from eight_bit import Bare, dit, draw, net, snr
from torch import nn

from lowprec.errors import Refused
from lowprec.layers import block_product, fp4
from lowprec.layers.block_formats import BLOCK_FORMATS
from lowprec.layers.block_product import rotated
from lowprec.layers.fp4 import FP4Options
from lowprec.layers.fp8 import FP8, Options, Scaling
from lowprec.layers.fp8_product import INPUT_OPERAND
from lowprec.layers.quantise import quantise
from lowprec.precision import Precision, recipe
from lowprec.rounding import noise_key

eager = common.eager


def products(options, x, w, g, step=0):
    """y = x w and both gradients, as fp32."""
    left, right = x.clone().requires_grad_(), w.clone().requires_grad_()
    scaling = Scaling(options, x.device)
    scaling.key.copy_(noise_key(0, step))
    y = scaling(left, right)
    y.backward(g)
    return y.detach(), left.grad, right.grad


def operands(m=64, k=128, n=64):
    return draw(m, k), draw(k, n, seed=1, scale=0.1), draw(m, n, seed=2, scale=1e-4)


def test_mxfp8_is_torchaos_own_emulation():
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common import KernelPreference

    x, w, g = (t.bfloat16() for t in operands())
    left, right = x.clone().requires_grad_(), w.t().contiguous().requires_grad_()
    by_torch = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    elements = [torch.float8_e4m3fn] * 3
    mode = config.ScaleCalculationMode.RCEIL
    y = mx_mm.apply(left, right, *elements, 32, KernelPreference.EMULATED, *by_torch, mode, False)
    y.backward(g)
    exact = y.detach(), left.grad, right.grad.t()
    ours = products(Options(recipe="mxfp8", format="e4m3", backend="emulate"), x, w, g)
    for got, wanted in zip(ours, exact, strict=True):
        assert got.dtype == torch.bfloat16 and snr(got.float(), wanted.float()) > 50  # the order of sums


@pytest.mark.parametrize(
    "options, bounds",
    [
        (Options(recipe="mxfp8", format="e4m3"), (28, 28, 28)),
        (Options(recipe="mxfp8"), (28, 24, 24)),
        (Options(recipe="block128"), (28, 24, 24)),
        (Options(recipe="block128_fp32", format="e4m3"), (28, 28, 28)),
        (FP4Options(), (16, 14, 14)),
        (FP4Options(grads="nearest", hadamard=0, weights="1d"), (17, 17, 17)),
        (FP4Options("mxfp4", grads="nearest"), (15, 15, 15)),
        (FP4Options("nvfp4_ue5m3"), (16, 14, 14)),
        (FP4Options(grads="eden", hadamard=128), (16, 14.5, 14.5)),
    ],
    ids=lambda value: getattr(value, "words", ""),
)
def test_each_recipe_has_the_noise_of_its_digits(options, bounds):
    x, w, g = operands(128, 128, 128)
    exact = x @ w, g @ w.t(), x.t() @ g
    for got, wanted, least in zip(products(options, x, w, g), exact, bounds, strict=True):
        assert least < snr(got, wanted) < least + 3


def test_a_square_weight_is_the_same_in_forward_and_backward():
    form = BLOCK_FORMATS["nvfp4"]
    x, w, g = operands()
    low_w = form.square().rounded(w, 0)
    y, dx, dw = products(FP4Options(grads="nearest", hadamard=0), x, w, g)
    assert torch.equal(y, form.rounded(x, 1) @ low_w)
    assert torch.equal(dx, form.rounded(g, 1) @ low_w.t())
    assert torch.equal(dw, form.rounded(x, 0).t() @ form.rounded(g, 0))
    row = products(FP4Options(grads="nearest", hadamard=0, weights="1d"), x, w, g)
    assert torch.equal(row[0], form.rounded(x, 1) @ form.rounded(w, 0))
    assert torch.equal(row[1], form.rounded(g, 1) @ form.rounded(w, 1).t())


@pytest.mark.parametrize("grads, hadamard", [("stochastic", 0), ("stochastic", 16), ("eden", 32)])
def test_gradients_are_right_on_average(grads, hadamard):
    """Those of stochastic gradients approach the product of what the other operand was rounded to."""
    options = FP4Options(grads=grads, hadamard=hadamard)
    x, w, g = operands(64, 64, 64)
    g[:, :8] *= 30  # many of the others are near zero in their block
    form = BLOCK_FORMATS["nvfp4"]
    exact = g @ form.square().rounded(w, 0).t()
    draws = [products(options, x, w, g, step)[1] for step in range(64)]
    mean = torch.stack(draws).mean(0)
    assert snr(mean, exact) > snr(draws[0], exact) + 13  # 18 where nothing but noise is left
    assert torch.equal(products(options, x, w, g, 3)[1], draws[3])


def test_each_operand_of_eden_has_noise_of_its_own():
    """Where codes are to the nearest the scales alone carry the noise, and without it they have a bias."""
    x, w, g = operands(64, 64, 64)
    options = FP4Options(grads="eden", hadamard=32)
    own = [noise_key(0, place) for place in range(5)]
    exact = block_product._gradients_by_eden(options.plan, x, w, g, own, (True, True))
    of = {0: "dx", 1: "dw", 2: "dx and dw", 3: "dx", 4: "dw"}  # 2: the rotation
    for place, changed in of.items():
        keys = list(own)
        keys[place] = noise_key(1, place)
        found = block_product._gradients_by_eden(options.plan, x, w, g, keys, (True, True))
        pairs = zip(("dx", "dw"), found, exact, strict=True)
        assert " and ".join(name for name, a, b in pairs if not torch.equal(a, b)) == changed


@pytest.mark.parametrize("size", [2, 16, 128])
def test_a_rotation_spreads_an_outlier_and_keeps_the_sum(size):
    x, _, g = operands(150, 64, 48)
    turned = [rotated(t, size, noise_key(0, 1)) for t in (x, g)]
    assert snr(turned[0].t() @ turned[1], x.t() @ g) > 100
    assert len(turned[0]) == -(-150 // size) * size
    one = torch.zeros(size, 1)
    one[1] = 1.0
    assert torch.allclose(rotated(one, size, noise_key(0, 1)).abs(), torch.full((size, 1), size**-0.5))
    signs = {tuple(rotated(one, size, noise_key(0, step)).sign().flatten().tolist()) for step in range(16)}
    assert len(signs) == 2  # those of one token: drawn anew in each step


# ---- Kernels -----------------------------------------------------------------------------------------------


def test_kernels_that_were_never_run_are_taken_where_they_are_asked_for_alone(monkeypatch):
    cuda = torch.device("cuda")
    mxfp8 = Options(recipe="mxfp8", format="e4m3")
    asked = FP4Options(backend="torchao"), dataclasses.replace(mxfp8, backend="torchao")
    monkeypatch.setattr(fp4, "try_import", lambda name: (object(), None))
    monkeypatch.setattr("lowprec.layers.block_formats.device_facts", lambda device: ("cuda", (10, 0), set()))
    monkeypatch.setattr("lowprec.formats.fp8_cores", lambda device: True)
    for options in (FP4Options(), mxfp8):
        assert options.resolve(cuda).backend == "emulate"
    for options in asked:
        assert options.resolve(cuda).backend == "torchao"
    others = dict(hadamard=0), dict(recipe="mxfp4"), dict(grads="nearest"), dict(weights="1d")
    for other in others:
        options = FP4Options(backend="torchao", **other)
        refused(lambda options=options: options.resolve(cuda), "--fp4_backend torchao", "default of each")
    assert FP4Options(backend="torchao", keep="last:2").resolve(cuda).multiple == 128
    monkeypatch.setattr("lowprec.layers.block_formats.device_facts", lambda device: ("cuda", (9, 0), set()))
    for options in asked:
        refused(lambda options=options: options.resolve(cuda), "compute capability 10.0", "emulate")
    monkeypatch.setattr(fp4, "try_import", lambda name: (None, "absent"))
    refused(lambda: asked[0].resolve(cuda), "can't be imported (absent)")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [FP4Options(backend="torchao"), Options(recipe="mxfp8", format="e4m3", backend="torchao")]
)
def test_kernels_have_the_noise_of_the_emulation(options):
    cuda = torch.device("cuda")
    try:
        native = options.resolve(cuda)
    except Refused as refusal:
        pytest.skip(str(refusal))
    x, w, g = (t.to(cuda).bfloat16() for t in operands(128, 128, 128))
    emulated = dataclasses.replace(options, backend="emulate")
    exact = x.float() @ w.float(), g.float() @ w.float().t(), x.float().t() @ g.float()
    for got, ours, wanted in zip(
        products(native, x, w, g), products(emulated, x, w, g), exact, strict=True
    ):
        assert abs(snr(got.float(), wanted) - snr(ours.float(), wanted)) < 3


# ---- Runs --------------------------------------------------------------------------------------------------


def batch(seed=0):
    x = draw(8, 1, 8, 8, seed=seed)
    return x, torch.linspace(0, 1, 8), torch.zeros(8, dtype=torch.long)


def steps(run, first, last):
    for step in range(first, last):
        run.observe(True)
        run.backward((run(*batch(step)) - 1).square().mean())
        report = run.step()
    return report


def test_a_run_resumes_with_the_same_bits_and_ends_in_bf16():
    r = recipe(fp4="nvfp4", fp4_keep="last:1")
    whole = Precision(dit(), r, lr=1e-3, seed=5, fp4_until=4)
    report = steps(whole, 0, 3)
    assert 0 < report["fp4_underflow_grad"] < 0.6 and report["fp4_saturated_input"] < 0.1
    saved = through_a_file(whole.state_dict())
    resumed = Precision(dit(1), r, lr=1e-3, seed=5, fp4_until=4)
    resumed.load_state_dict(saved)
    for run in (whole, resumed):
        assert len(steps(run, 3, 4)) and steps(run, 4, 6) == {}
    for a, b in zip(whole.params, resumed.params, strict=True):
        assert torch.equal(a, b)
    plain = Precision(dit(), recipe(bf16=True))
    plain.model.load_state_dict(whole.model.state_dict())
    assert torch.equal(whole(*batch()), plain(*batch()))
    words = str(whole.ledger())
    assert "bf16 from step 4 on" in words and "(--fp4_keep last:1)" in words
    assert 0.5 < whole.ledger().flops_share["fp4"] < 0.9


def test_another_seed_and_another_step_draw_other_noise():
    """And so do the layers of one step: no two gradients are rounded by the same numbers."""
    runs = [Precision(dit(), recipe(fp4="nvfp4"), seed=seed) for seed in (0, 0, 1)]
    keys = [torch.stack([s.key for s in run.methods[0].scalings]) for run in runs]
    assert torch.equal(keys[0], keys[1]) and not (keys[0] == keys[2]).all(1).any()
    assert len(torch.unique(keys[0], dim=0)) == len(keys[0])
    steps(runs[0], 0, 1)
    now = torch.stack([s.key for s in runs[0].methods[0].scalings])
    assert not (now[:, :2] == keys[0][:, :2]).all(1).any()


def test_bare_parameters_train_in_fp4():
    model = Bare()
    run = Precision(model, recipe(fp4="nvfp4"))
    x = draw(4, 1, 16, 16)
    with torch.no_grad():
        exact = run(x)
    assert {s.left_out for s in model.scalings} == {"", "10 outputs: no multiple of 16"}
    run.backward(run(x).square().mean())
    assert all(p.grad.abs().sum() > 0 for p in run.params)
    with run.methods[0].plain(model):
        assert 8 < snr(exact, run(x)) < 25


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(fp4="nvfp4", fp4_hadamard=12), "fp4_hadamard=12: unknown; choose from 0, 2, 4"),
        (dict(fp4="nvfp4", fp4_hadamard=1), "fp4_hadamard=1: unknown"),
        (dict(fp4="nvfp4", fp4_keep="first:2"), "--fp4_keep first:2: write last:K"),
        (dict(fp4="nvfp4", fp4_keep="last:0"), "--fp4_keep last:0"),
        (dict(fp4="int4"), "fp4='int4': unknown"),
        (dict(fp4="nvfp4", fp4_backend="te"), "fp4_backend='te': unknown"),
        (dict(bf16=True, fp4_backend="torchao"), "computes in bf16: add --fp4 nvfp4"),
        (dict(fp4="mxfp4", fp4_grads="eden"), "--fp4 nvfp4"),
        (dict(fp4="nvfp4", fp4_grads="eden", fp4_hadamard=8), "--fp4_hadamard 128"),
        (dict(fp4="nvfp4", sparse24="srste"), "compute=fp4 with sparse24=srste"),
        (dict(fp4="nvfp4", fp8=True), "--fp4 and --fp8 exclude each other"),
        (dict(fp4="nvfp4", bf16=True), "--fp4 and --bf16 exclude each other"),
        (dict(bf16=True, fp4_grads="nearest"), "computes in bf16: add --fp4 nvfp4"),
        (dict(fp8=True, fp4_weights="1d"), "computes in fp8: drop it"),
        (dict(fp8=True, fp4_hadamard=0), "drop it"),
        (dict(fp4="nvfp4", fp8_recipe="delayed"), "drop it"),
        (dict(fp8=True, bf16=True), "--fp8 and --bf16 exclude each other"),
        (dict(fp8=True, fp16=True), "--fp8 and --fp16"),
        (dict(fp8_format="e4m3"), "--fp8_format e4m3"),
        (dict(pure_bf16=True, amax_history_len=8), "computes in bf16: add --fp8"),
        (dict(fp8=True, amax_history_len=8), "--fp8_recipe delayed"),
        (dict(sites=["generation=int8"], sparse24="srste"), "generation=int8 with sparse24=srste"),
        (dict(sites=["generation=nvfp4"], sparse24="srste"), "generation=nvfp4 with sparse24=srste"),
    ],
)
def test_recipes_that_make_no_sense(flags, words):
    refused(lambda: recipe(**flags), words)


def test_nets_that_can_not_are_told_which_layer_and_why():
    conv = nn.Sequential(nn.Conv2d(1, 16, 3))
    odd = nn.Sequential(nn.Linear(96, 40), nn.Linear(40, 16))
    block = dict(fp8=True, fp8_recipe="block128")
    by_torchao = dict(fp8=True, fp8_recipe="mxfp8", fp8_format="e4m3", fp8_backend="torchao")
    cases = [
        (conv, dict(fp4="nvfp4"), "convolutions stay as they are"),
        (odd, dict(fp4="mxfp4"), "'0' is left out (40 outputs: no multiple of 32)"),
        (odd, block, "'0' is left out (96 inputs and 40 outputs: no multiple of 128)"),
        (net(), dict(fp4="nvfp4", fp4_keep="last:2"), "0 blocks"),
        (dit(), dict(fp4="nvfp4", fp4_keep="last:99"), "leaves none in FP4"),
        (net(), by_torchao, "compute capability 10.0 or later; here works --fp8_backend emulate"),
        (net(), dict(fp4="nvfp4", fp4_backend="torchao"), "capability 10.0 or later; use --fp4_backend emul"),
    ]
    for model, flags, words in cases:
        refused(functools.partial(Precision, model, recipe(**flags)), words)
    assert Precision(net(), recipe(fp8=True, fp8_recipe="mxfp8")).part(FP8).options.backend == "emulate"


def test_what_casts_lose_is_counted():
    scaling = Scaling(FP4Options(grads="nearest"))
    scaling.counts = torch.zeros(3, 4, dtype=torch.float64)
    x = torch.ones(16, 32)
    x[:, ::2] = 1e-3  # under a quarter of the smallest step of a block
    scaling(x, torch.ones(32, 16))
    assert scaling.counts[INPUT_OPERAND].tolist() == [256, 512, 0, 512]


def test_a_run_that_has_ended_in_bf16_goes_back_to_fp4_with_an_earlier_checkpoint():
    run = Precision(dit(), recipe(fp4="nvfp4"), lr=1e-3, seed=5, fp4_until=2)
    start = through_a_file(run.state_dict())
    weights = []
    for _ in range(2):
        run.load_state_dict(start)
        steps(run, 0, 3)
        weights.append([p.detach().clone() for p in run.params])
    for a, b in zip(*weights, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_weights_alone_or_activations_too_are_in_the_format(name):
    form = BLOCK_FORMATS[name]
    x = draw(32, 64)
    found = {}
    for kind in (name, f"{name}_weights"):
        torch.manual_seed(0)
        net = nn.ModuleDict({part: nn.Linear(64, 64, bias=False) for part in ("a", "b", "head")})
        w = [layer.weight.detach() for layer in net.values()]
        covered = quantise(net, kind)
        assert list(covered.layers) == ["a", "b"] and name.upper() in str(covered)
        found[kind] = x
        with torch.no_grad():
            for layer in net.values():
                found[kind] = layer(found[kind])
    low = [form.rounded(weight, 1).t() for weight in w[:2]]
    hidden = form.rounded(x, 1) @ low[0]
    assert torch.equal(found[name], form.rounded(hidden, 1) @ low[1] @ w[2].t())
    assert torch.equal(found[f"{name}_weights"], x @ low[0] @ low[1] @ w[2].t())


def test_a_run_draws_in_the_format_of_its_site():
    x = draw(8, 1, 8, 8), torch.linspace(0, 1, 8), torch.zeros(8, dtype=torch.long)
    far = {}
    exact = None
    for kind in ("fp32", "mxfp8", "nvfp4_weights", "nvfp4"):
        net = dit()
        nn.init.normal_(net.final.linear.weight, std=0.1)
        for block in net.blocks:
            nn.init.normal_(block.modulation.weight, std=0.1)
        run = Precision(net, recipe(bf16=True, sites=[f"generation={kind}"]))
        with torch.no_grad():
            y = run.generator("raw")(*x)
        exact = y if exact is None else exact
        far[kind] = (y - exact).norm().item()
        if kind == "nvfp4":
            assert "weights and activations in e2m1" in str(run.ledger())
    assert 0 == far["fp32"] < far["mxfp8"] < far["nvfp4_weights"] < far["nvfp4"] < 0.5 * exact.norm()


def test_a_net_without_layers_to_quantise_is_refused():
    refused(lambda: quantise(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 16)), "nvfp4"), "24 inputs")
