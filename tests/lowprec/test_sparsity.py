"""sparsity.py: SR-STE against its formula, the invariant after every step of every
recipe, kernels and ledger.
"""

import copy
import itertools

import common
import pytest
import torch
import torch.nn.functional as F
from cli import assert_same
from common import RECIPES, draw, refused, same, through_a_file
from eight_bit import method
from torch import nn

import models
from lowprec.layers import sparsity
from lowprec.layers.sparsity import Sparse24, two_of_four
from lowprec.precision import Precision, recipe
from lowprec.rounding import exact_weight

BF16 = torch.bfloat16
gpu = pytest.mark.gpu
eager = common.eager


def is_two_of_four(weight):
    """Whether at most two of each four entries along the last dimension differ from zero."""
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


# ---- SR-STE ------------------------------------------------------------------------------------------------


def test_srste_is_its_formula():
    torch.manual_seed(0)
    # W <- W - lr (g(W masked) + lambda (not mask) W), arXiv 2102.04010, three steps in float64
    x, target, lr, decay = draw(16, 8).double(), draw(16, 3, seed=1).double(), 0.1, 0.3
    layer = nn.Linear(8, 3).double()
    expected, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    sparse = Sparse24(nn.Sequential(layer), "srste", decay)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    masks = []
    for _ in range(3):
        order = expected.abs().reshape(3, 2, 4).argsort(-1, descending=True)
        mask = torch.zeros(3, 2, 4, dtype=torch.double).scatter_(2, order[..., :2], 1.0).reshape(3, 8)
        masks.append(mask)
        error = 2 * (x @ (expected * mask).T + bias - target) / target.numel()
        expected = expected - lr * (error.T @ x + decay * (1 - mask) * expected)
        bias = bias - lr * error.sum(0)

        F.mse_loss(layer(x), target).backward()
        sparse.gradients({p: p.grad for p in layer.parameters()})
        optimizer.step()
        assert sparse.after_step() == {}
        optimizer.zero_grad()
    assert (masks[0] != masks[2]).any(), "the mask has to change for this to test that it is taken anew"
    exact = dict(rtol=0, atol=1e-7)  # the decay term is computed in fp32
    torch.testing.assert_close(layer.weight.detach(), expected, **exact)
    torch.testing.assert_close(layer.bias.detach(), bias, **exact)


NAMES = "fp32 bf16 stochastic kahan kahan+stochastic split opt8bit pure_bf16".split() + ["fp32 master"]


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def run_of(mode, flags, model=None, **options):
    options = dict(lr=1e-2, weight_decay=0.1, ema_decay=0.5, clip_grad=1.0) | options
    return Precision(model or small(), recipe(sparse24=mode, **flags), **options)


def sparse_of(run):
    return method(run, Sparse24)


def steps(run, n, seed=0):
    for i in range(n):
        for micro in range(run.options.accumulate):
            x = draw(32, 16, seed=100 * seed + 10 * i + micro)
            run.backward(F.mse_loss(run(x), x[:, :8].float()))
        run.step()
        yield i


@pytest.mark.parametrize(
    "flags",
    [{}, dict(fp16=True), dict(pure_bf16=True, stochastic=True), dict(pure_bf16=True, master="split")],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_decay_joins_the_gradient_once_a_step_unscaled_and_in_fp32(flags, accumulate):
    seen = []

    def keep(optimizer, args, kwargs):
        seen.append({p: g.clone() for p, g in kwargs["grads"].items()})

    options = dict(clip_grad=0.0, accumulate=accumulate, lr=0.0)
    runs = [run_of("srste", flags, sparse24_decay=decay, **options) for decay in (0.0, 1e-4)]
    for run in runs:
        run.optimizer.register_step_pre_hook(keep)
        list(steps(run, 1))
    for i in (0, 2, 4):
        weight = runs[1].model[i].weight.detach()
        without, decayed = (grads[run.model[i].weight] for grads, run in zip(seen, runs, strict=True))
        assert decayed.dtype == torch.float32
        dense = ~two_of_four(weight)
        assert torch.equal(decayed, without.add(torch.where(dense, weight.float(), 0), alpha=1e-4))
        # in a bf16 gradient most of it would be lost
        assert (decayed != without)[dense].float().mean() > 0.9
        if flags.get("pure_bf16"):
            assert (decayed.to(BF16) != without.to(BF16))[dense].float().mean() < 0.9


def test_forward_reads_the_masked_weight_and_the_gradient_reaches_all():
    run = run_of("srste", {})
    weight, x = run.model[0].weight, draw(5, 16)
    masked = torch.where(two_of_four(weight), weight, 0)
    assert torch.equal(run.model[0](x), F.linear(x, masked, run.model[0].bias))
    run.model[0](x).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand_as(weight))
    assert not is_two_of_four(weight)


def test_the_masked_layer_compiles_without_a_break():
    run = run_of("srste", {})
    compiled, x = torch.compile(run.model, backend="aot_eager", fullgraph=True), draw(4, 16)
    expected = torch.autograd.grad(run.model(x).square().sum(), run.params)
    found = torch.autograd.grad(compiled(x).square().sum(), run.params)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_plain_multiplies_by_the_dense_weight_and_so_do_copies():
    run = run_of("srste", {})
    sparse, x = sparse_of(run), draw(5, 16)
    dense, masked = F.linear(x, run.model[0].weight, run.model[0].bias), run.model[0](x)
    with sparse.plain(run.model):
        with sparse.plain(run.model):
            pass
        twin = copy.deepcopy(run.model)
        assert torch.equal(run.model[0](x), dense)
    assert torch.equal(run.model[0](x), masked) and torch.equal(twin[0](x), dense)


# ---- The invariant -----------------------------------------------------------------------------------------


def covered_weights(run):
    return {f"{name}.weight": module.weight.detach() for name, module in sparse_of(run).layers.items()}


@pytest.mark.parametrize(
    "name, optimizer", [*((name, "adamw") for name in NAMES), ("fp32", "torch"), ("pure_bf16", "torch")]
)
def test_a_fixed_mask_holds_after_every_step_in_all_that_completes_a_weight(name, optimizer):
    run = run_of("magnitude", RECIPES[name], optimizer=optimizer, averages=("0.9:bf16",))
    sparse = sparse_of(run)
    masks = {k: v.clone() for k, v in sparse.masks.items()}
    assert all((m.reshape(-1, 4).sum(1) == 2).all() for m in masks.values()) and len(masks) == 3
    start = {k: v.clone() for k, v in covered_weights(run).items()}
    for _ in steps(run, 4):
        for layer, mask in masks.items():
            p = sparse.layers[layer].weight
            low = run.low_part(p)
            held = [p, exact_weight(p.detach(), low)] + ([] if low is None else [low])
            if name != "opt8bit":  # a coded moment may hold the smallest code where the gradient is zero
                held += [run.optimizer.moment(p, which).view_as(p) for which in ("exp_avg", "exp_avg_sq")]
            held += [average.shadow[f"{layer}.weight"] for average in run.averages.values()]
            assert not any(t[~mask].any() for t in held)
            assert torch.equal(sparse.masks[layer], mask)
    for k, before in start.items():
        moved = (covered_weights(run)[k] != before)[masks[k.removesuffix(".weight")]]
        assert moved.float().mean() > 0.5, "what is left trains"
    layers = [m for m in run.generator().net.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 3 and all(is_two_of_four(m.weight) for m in layers)


def test_an_optimiser_that_moves_zeros_is_put_right():
    run = run_of("magnitude", {}, optimizer="torch")
    run.optimizer.step = lambda **_: [p.data.add_(1e-3) for p in run.params]
    list(steps(run, 1))
    assert all(is_two_of_four(w) for w in covered_weights(run).values())


@pytest.mark.parametrize("name", NAMES)
def test_srste_reads_two_of_four_after_every_step_and_generates_from_an_average_of_two_of_four(
    name, monkeypatch
):
    run = run_of("srste", RECIPES[name])
    read, linear = [], F.linear

    def reading(x, weight, bias):
        read.append(weight.detach())
        return linear(x, weight, bias)

    monkeypatch.setattr(sparsity.F, "linear", reading)
    for _ in steps(run, 4):
        assert len(read) == 3 and all(is_two_of_four(w) for w in read)
        assert [w.dtype for w in read] == [p.dtype for p in covered_weights(run).values()]
        read.clear()
        for source in ("ema", "raw"):
            assert all(is_two_of_four(run.weights(source)[k]) for k in covered_weights(run))
    # the weights themselves stay dense
    assert not any(is_two_of_four(w) for w in covered_weights(run).values())
    assert not is_two_of_four(run.ema.shadow["2.weight"])
    net = run.generator().net
    for k, value in run.ema.shadow.items():
        expected = torch.where(two_of_four(value), value, 0) if k in covered_weights(run) else value
        assert torch.equal(net.get_parameter(k), expected.to(run.params[0].dtype))
    assert not any(isinstance(m, sparsity.MaskedLinear) for m in net.modules())


def test_the_mask_is_chosen_before_the_weights_become_bf16():
    for flags in ({}, dict(pure_bf16=True), dict(pure_bf16=True, master="split")):
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        model[0].weight.data = torch.tensor([[1.0, 1.001, 1.002, 0.5]])  # three equal numbers in bf16
        run = run_of("magnitude", flags, model)
        assert (run.model[0].weight != 0).tolist() == [[False, True, True, False]]
        if flags.get("master"):
            assert torch.equal(run.weights("raw")["0.weight"], torch.tensor([[0.0, 1.001, 1.002, 0.0]]))


@pytest.mark.parametrize("name", ["fp32", "kahan+stochastic", "split"])
def test_state_goes_through_a_file_and_training_goes_on_bit_for_bit(name):
    for mode in ("magnitude", "srste"):
        whole = run_of(mode, RECIPES[name])
        list(steps(whole, 2))
        if mode == "magnitude":  # zeros that the mask keeps: it can't be guessed from the weights
            sparse = sparse_of(whole)
            sparse.masks["0"] = sparse.masks["0"].roll(1, dims=0)
            sparse.after_step()
        other = run_of(mode, RECIPES[name], small(seed=7))
        other.load_state_dict(through_a_file(whole.state_dict()))
        for run in (whole, other):
            list(steps(run, 2, seed=1))
        assert_same(other.state_dict(), whole.state_dict())


def test_a_dense_state_is_pruned_on_loading():
    dense = Precision(small(), recipe(pure_bf16=True, master="split"))
    list(steps(dense, 2))
    run = run_of("magnitude", dict(pure_bf16=True, master="split"), small(seed=7))
    run.load_state_dict(dense.state_dict())
    sparse = sparse_of(run)
    for k, w in covered_weights(run).items():
        weight = dense.model.get_parameter(k)
        mask = two_of_four(weight)
        assert torch.equal(w, torch.where(mask, weight, 0))
        assert torch.equal(sparse.masks[k.removesuffix(".weight")], mask)
        assert is_two_of_four(run.weights("raw")[k])


# ---- Kernels, FLOPs, ledger --------------------------------------------------------------------------------


def test_shapes_that_the_kernels_take():
    def kernels(*shape):
        return sparsity.kernels_that_take(shape, BF16)

    assert kernels(32, 64) == kernels(64, 128) == ["cuSPARSELt", "CUTLASS"]
    assert kernels(16, 16) == kernels(32, 32) == kernels(16, 64) == kernels(48, 80) == ["cuSPARSELt"]
    assert kernels(8, 64) == kernels(64, 8) == kernels(24, 64) == []


def test_which_backend_a_gpu_runs(monkeypatch):
    for available, capability, expected in [
        (True, (8, 0), "cuSPARSELt"),
        (True, (9, 0), "cuSPARSELt"),
        (False, (8, 6), "CUTLASS"),
        (False, (9, 0), None),
    ]:
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda found=available: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert sparsity.sparse_backend("cuda") == expected


def rows_of(run):
    (row,) = [row for row in run.ledger().rows if row["site"] == "sparse24"]
    return row


def test_the_ledger_without_flops():
    run = run_of("magnitude", dict(pure_bf16=True))
    row, said = rows_of(run), str(run.ledger())
    why = "two of four along the input of 3 Linears; 1 too small for any sparse kernel"
    assert row["why"].startswith(f"pruned once, the mask is fixed: {why}") and why in said
    assert "no kernel: too small" in said
    masked = sum(w.numel() for w in covered_weights(run).values())
    assert row["bytes"] * run.ledger().parameters == pytest.approx(masked)


@pytest.mark.parametrize("mode", ["magnitude", "srste"])
def test_the_ledger_tells_shares_once_the_net_was_called(mode):
    run = run_of(mode, {})
    run(draw(4, 16, 8).transpose(1, 2))  # not contiguous: torch takes other products
    row = rows_of(run)
    assert "3 Linears = 100.0% of the forward FLOPs (other Linears 0.0%, convolutions 0.0%," in row["why"]
    shares = [layer["flops"] for layer in row["layers"]]
    assert shares == [16 / 88, 64 / 88, 8 / 88] and run.ledger().flops_share["sparse24"] == sum(shares)


@pytest.mark.parametrize(
    "machine, dtype, said",
    [
        (("native", ""), torch.float32, "take bf16 weights"),
        (("native", ""), BF16, "by cuSPARSELt"),
        (("no", "because"), BF16, "can't run here (because)"),
    ],
)
def test_what_the_ledger_says_of_generation(machine, dtype, said, monkeypatch):
    monkeypatch.setattr(sparsity, "sparse_backend", lambda device: "cuSPARSELt")
    row = Sparse24(small(), "magnitude", machine=machine).rows(1, dtype)["sparse24"]
    assert sum(layer["count"] for layer in row["layers"]) == 3 and said in row["why"]


@gpu
@pytest.mark.parametrize("mode", ["magnitude", "srste"])
def test_sparse_kernels_equal_the_masked_dense_product(mode):
    torch.manual_seed(0)
    net = models.GENERATIVE["dit"](1, 10, 32, "S/2").cuda()
    run = Precision(net, recipe(pure_bf16=True, stochastic=True, sparse24=mode))
    for p in run.params:
        p.data.add_(0.02 * torch.randn_like(p))  # a new net returns zeros
    sparse = sparse_of(run)
    sparse.after_step()
    for average in run.averages.values():
        average.decay = 0.0
        average.update()
    fast = run.generator()
    converted = [m for m in fast.net.modules() if isinstance(m, sparsity.KernelLinear)]
    if sparsity.sparse_backend("cuda") is None:
        pytest.skip("this torch has no cuSPARSELt, and CUTLASS's kernels stop at compute capability 8.x")
    assert len(converted) == 48
    sparse.machine = ("no", "the masked dense product, to compare with")
    dense = run.generator()
    x, y = torch.randn(8, 1, 32, 32, device="cuda"), torch.arange(8, device="cuda")
    t = torch.rand(8, device="cuda") * 1000
    with torch.no_grad():
        got, expected = fast(x, t, y), dense(x, t, y)
    assert expected.std() > 0.1
    assert (got - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_mask_is_the_best_two_of_four_by_magnitude(dtype):
    weight = draw(64, 128).to(dtype)
    mask = two_of_four(weight)
    assert mask.dtype == torch.bool and mask.shape == weight.shape
    groups, kept = weight.float().abs().reshape(-1, 4), mask.reshape(-1, 4)
    assert (kept.sum(1) == 2).all()
    pairs = itertools.combinations(range(4), 2)
    best = torch.stack([groups[:, list(pair)].sum(1) for pair in pairs]).amax(0)
    assert torch.equal((groups * kept).sum(1), best)


@pytest.mark.parametrize(
    "four, kept",
    [
        ((1, 1, 1, 1), (1, 1, 0, 0)),
        ((0, 0, 0, 0), (1, 1, 0, 0)),
        ((-1, 1, -1, 2), (1, 0, 0, 1)),
        ((0, 3, 3, 3), (0, 1, 1, 0)),
        ((1, 2, 2, 1), (0, 1, 1, 0)),
        ((2, 1, 1, 1), (1, 1, 0, 0)),
        ((-0.0, 0.0, 0.0, 1), (1, 0, 0, 1)),
        ((1, 2, 3, 4), (0, 0, 1, 1)),
        ((float("inf"), 1, float("-inf"), 2), (1, 0, 1, 0)),
    ],
)
def test_of_equal_magnitudes_the_first_stay(four, kept):
    for dtype in (torch.float32, BF16):
        assert two_of_four(torch.tensor([four], dtype=dtype)).int().tolist() == [list(kept)]


def test_attention_and_mlp_are_covered_and_conditions_embeddings_and_head_are_not():
    with torch.device("meta"):
        nets = {name: build(1, 10, 8) for name, build in models.GENERATIVE.items()}
        found = {name: set(sparsity.linears_to_prune(net)) for name, net in nets.items()}
    layers = ("attention.qkv", "attention.proj", "mlp.0", "mlp.2")
    assert found["dit"] == {f"blocks.{i}.{name}" for i in range(4) for name in layers}
    attention = "middle_block.attention.attn"
    assert found["unet"] == {f"{attention}.qkv", f"{attention}.out_proj"}

    class Own(nn.Linear):
        pass

    layers = dict(a=nn.Linear(6, 8), b=Own(8, 8), c=nn.Conv2d(8, 8, 1))
    odd = nn.ModuleDict(dict(layers, final=nn.Linear(8, 8), outer=nn.Linear(8, 8)))
    assert set(sparsity.linears_to_prune(odd)) == {"outer"}


def test_the_head_and_the_embeddings_of_a_language_model_stay_dense():
    """However they are named, and where a net says itself what its layers are."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("wte", "wpe", "block", "lm_head", "first", "last")
            for name in names:
                setattr(self, name, nn.Linear(16, 16))

    net = Language()
    assert list(sparsity.linears_to_prune(net)) == ["block", "first", "last"]
    net.roles = {"first": {"embedding"}, "last": {"head"}, "block": {"condition"}, "lm_head": set()}
    assert list(sparsity.linears_to_prune(net)) == ["lm_head"]
    before = net.block.weight.clone()
    Sparse24(net, "magnitude")
    assert is_two_of_four(net.lm_head.weight) and torch.equal(net.block.weight, before)


def test_a_net_without_such_layers_is_refused_in_one_line():
    for mode in ("magnitude", "srste"):
        asked = recipe(sparse24=mode)
        said = refused(lambda asked=asked: Precision(nn.Conv2d(4, 4, 1), asked), "--model dit")
        assert said.startswith(f"--sparse24 {mode}: this net has no Linear")
    words = "sparse24='half': unknown; choose from none, magnitude, srste"
    refused(lambda: recipe(sparse24="half"), words)
    assert recipe(sites=["sparse24=srste"]) == recipe(sparse24="srste")
