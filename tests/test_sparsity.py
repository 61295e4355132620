"""sparsity.py: masks against brute force, SR-STE against its formula, the invariant after every step of every recipe, and the commands."""
import itertools
import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import models
import precision
import train
import sparsity
import trainer
from precision import Precision, RecipeError, exact_weight, recipe
from sparsity import Sparse24, SparsityError, is_two_of_four, two_of_four
from test_train import (  # noqa: F401, the fixture applies to every test here
    after_step, assert_same, checkpoint, command, content, draw, in_a_folder_of_its_own, metrics, no_training, one_line, quick, summary)

BF16 = torch.bfloat16
gpu = pytest.mark.gpu


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Masks ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_mask_is_the_best_two_of_four_by_magnitude(dtype):
    weight = normal(64, 128).to(dtype)
    mask = two_of_four(weight)
    assert mask.dtype == torch.bool and mask.shape == weight.shape
    groups, kept = weight.float().abs().reshape(-1, 4), mask.reshape(-1, 4)
    assert (kept.sum(1) == 2).all()
    best = torch.stack([groups[:, list(pair)].sum(1) for pair in itertools.combinations(range(4), 2)]).amax(0)
    assert torch.equal((groups * kept).sum(1), best)


@pytest.mark.parametrize("four, kept", [
    ((1, 1, 1, 1), (1, 1, 0, 0)), ((0, 0, 0, 0), (1, 1, 0, 0)), ((-1, 1, -1, 2), (1, 0, 0, 1)), ((0, 3, 3, 3), (0, 1, 1, 0)), ((1, 2, 2, 1), (0, 1, 1, 0)),
    ((2, 1, 1, 1), (1, 1, 0, 0)), ((-0.0, 0.0, 0.0, 1), (1, 0, 0, 1)), ((1, 2, 3, 4), (0, 0, 1, 1)), ((float("inf"), 1, float("-inf"), 2), (1, 0, 1, 0))])
def test_of_equal_magnitudes_the_first_stay(four, kept):
    for dtype in (torch.float32, BF16):
        assert two_of_four(torch.tensor([four], dtype=dtype)).int().tolist() == [list(kept)]


def test_the_check_counts_along_the_input():
    weight = torch.zeros(4, 8)
    weight[:, :2] = 1  # every column of the first two is full, every row has two of four
    assert is_two_of_four(weight) and not is_two_of_four(weight.T.contiguous())
    weight[3, 3] = 1e-30
    assert not is_two_of_four(weight)


def test_attention_and_mlp_are_covered_and_conditions_embeddings_and_head_are_not():
    with torch.device("meta"):
        dit = set(sparsity.covered(models.build("dit", "rflow", 1, 10, 8)))
        unet = set(sparsity.covered(models.build("unet", "rflow", 1, 10, 8)))
    assert dit == {f"blocks.{i}.{name}" for i in range(4) for name in ("attention.qkv", "attention.proj", "mlp.0", "mlp.2")}
    assert unet == {"middle_block.attention.attn.qkv", "middle_block.attention.attn.out_proj"}

    class Own(nn.Linear):
        pass

    odd = nn.ModuleDict(dict(a=nn.Linear(6, 8), b=Own(8, 8), c=nn.Conv2d(8, 8, 1), final=nn.Linear(8, 8), outer=nn.Linear(8, 8)))
    assert set(sparsity.covered(odd)) == {"outer"}


def test_a_net_without_such_layers_is_refused_in_one_line():
    for mode in ("magnitude", "srste"):
        with pytest.raises(RecipeError, match=f"^--sparse24 {mode}: this net has no Linear.*--model dit.*$"):
            Precision(nn.Conv2d(4, 4, 1), recipe(sparse24=mode))
    with pytest.raises(RecipeError, match="--sparse24 half: unknown; choose from none, magnitude, srste"):
        recipe(sparse24="half")
    assert recipe(sites=["sparse24=srste"]) == recipe(sparse24="srste")


# ---- SR-STE ---------------------------------------------------------------------------------------------------------

def test_srste_is_its_formula():
    # W <- W - lr (g(W masked) + lambda (not mask) W), arXiv 2102.04010, three steps in float64
    x, target, lr, decay = normal(16, 8).double(), normal(16, 3, seed=1).double(), 0.1, 0.3
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
        sparse.add_to({p: p.grad for p in layer.parameters()})
        optimizer.step()
        optimizer.zero_grad()
    assert (masks[0] != masks[2]).any(), "the mask has to change for this to test that it is taken anew"
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=0, atol=1e-7)  # the decay term is computed in fp32
    torch.testing.assert_close(layer.bias.detach(), bias, rtol=0, atol=1e-7)


RECIPES = {
    "fp32": {}, "bf16": dict(bf16=True), "stochastic": dict(pure_bf16=True, stochastic=True), "kahan": dict(pure_bf16=True, kahan=True),
    "kahan+stochastic": dict(pure_bf16=True, kahan=True, stochastic=True), "split": dict(pure_bf16=True, master="split"),
    "master fp32": dict(pure_bf16=True, master="fp32"), "opt8bit": dict(opt8bit=True), "nearest": dict(pure_bf16=True),
}


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def run_of(mode, flags, model=None, **options):
    options = dict(lr=1e-2, weight_decay=0.1, ema_decay=0.5, clip_grad=1.0) | options
    return Precision(model or small(), recipe(sparse24=mode, **flags), **options)


def steps(run, n, seed=0):
    for i in range(n):
        for micro in range(run.accumulate):
            x = normal(32, 16, seed=100 * seed + 10 * i + micro)
            run.backward(F.mse_loss(run(x), x[:, :8].float()))
        run.step()
        yield i


@pytest.mark.parametrize("flags", [{}, dict(fp16=True), dict(pure_bf16=True, stochastic=True), dict(pure_bf16=True, master="split")], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_decay_joins_the_gradient_once_a_step_unscaled_and_in_fp32(flags, accumulate, monkeypatch):
    monkeypatch.setattr(precision.Precision, "_optimizer_step", lambda self, grads, scale: seen.append({p: g.clone() for p, g in grads.items()}))
    seen, runs = [], [run_of("srste", flags, sparse24_decay=decay, clip_grad=0.0, accumulate=accumulate) for decay in (0.0, 1e-4)]
    for run in runs:
        list(steps(run, 1))
    for layer, without, with_decay in zip(range(0, 5, 2), *([seen[k][runs[k].model[i].weight] for i in range(0, 5, 2)] for k in (0, 1))):
        assert with_decay.dtype == torch.float32
        weight = runs[1].model[layer].weight.detach()
        assert torch.equal(with_decay, without.add(torch.where(two_of_four(weight), 0, weight.float()), alpha=1e-4))
        pruned = ~two_of_four(weight)
        assert (with_decay != without)[pruned].float().mean() > 0.9  # in a bf16 gradient most of it would be lost
        if flags.get("pure_bf16"):
            assert (with_decay.to(BF16) != without.to(BF16))[pruned].float().mean() < 0.9


def test_forward_reads_the_masked_weight_and_the_gradient_reaches_all():
    run = run_of("srste", {})
    weight, x = run.model[0].weight, normal(5, 16)
    masked = torch.where(two_of_four(weight), weight, 0)
    assert torch.equal(run.model[0](x), F.linear(x, masked, run.model[0].bias))
    run.model[0](x).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand_as(weight))
    assert not is_two_of_four(weight)


def test_the_masked_layer_compiles_without_a_break():
    run = run_of("srste", {})
    compiled, x = torch.compile(run.model, backend="aot_eager", fullgraph=True), normal(4, 16)
    expected = torch.autograd.grad(run.model(x).square().sum(), run.params)
    assert_same(list(torch.autograd.grad(compiled(x).square().sum(), run.params)), list(expected))


# ---- The invariant --------------------------------------------------------------------------------------------------

def covered_weights(run):
    return {f"{name}.weight": module.weight.detach() for name, module in run.sparse.layers.items()}


@pytest.mark.parametrize("name, optimizer", [*((name, "adamw") for name in RECIPES), ("fp32", "torch"), ("nearest", "torch")])
def test_a_fixed_mask_holds_after_every_step_in_all_that_completes_a_weight(name, optimizer):
    run = run_of("magnitude", RECIPES[name], optimizer=optimizer, averages=("0.9:bf16",))
    masks = {k: v.clone() for k, v in run.sparse.masks.items()}
    assert all((m.reshape(-1, 4).sum(1) == 2).all() for m in masks.values()) and len(masks) == 3
    start = {k: v.clone() for k, v in covered_weights(run).items()}
    for _ in steps(run, 4):
        for layer, mask in masks.items():
            p = run.sparse.layers[layer].weight
            low = run.low_part(p)
            moments = [] if name == "opt8bit" else [run.optimizer.state[p]["exp_avg"], run.optimizer.state[p]["exp_avg_sq"]]
            for t in (p, exact_weight(p.detach(), low), *moments, run.ema.shadow[f"{layer}.weight"], run.averages["0.9:bf16"].shadow[f"{layer}.weight"],
                      *([] if low is None else [low])):
                assert not t[~mask].any()
            assert torch.equal(run.sparse.masks[layer], mask)
    for k, before in start.items():
        assert (covered_weights(run)[k] != before)[masks[k.removesuffix(".weight")]].float().mean() > 0.5, "what is left trains"
    generated = run.generator().model
    assert all(is_two_of_four(m.weight) for m in generated.modules() if isinstance(m, nn.Linear))


def test_an_optimiser_that_moves_zeros_is_put_right():
    run = run_of("magnitude", {}, optimizer="torch")
    run.optimizer.step = lambda: [p.data.add_(1e-3) for p in run.params]
    list(steps(run, 1))
    assert all(is_two_of_four(w) for w in covered_weights(run).values())


@pytest.mark.parametrize("name", RECIPES)
def test_srste_reads_two_of_four_after_every_step_and_generates_from_an_average_of_two_of_four(name, monkeypatch):
    run = run_of("srste", RECIPES[name])
    read = []
    linear = F.linear
    monkeypatch.setattr(sparsity.F, "linear", lambda x, weight, bias: read.append(weight.detach()) or linear(x, weight, bias))
    for _ in steps(run, 4):
        assert len(read) == 3 and all(is_two_of_four(w) for w in read)
        assert [w.dtype for w in read] == [p.dtype for p in covered_weights(run).values()]
        read.clear()
        for source in ("ema", "raw"):
            assert all(is_two_of_four(run.weights(source)[k]) for k in covered_weights(run))
    assert not any(is_two_of_four(w) for w in covered_weights(run).values()), "the weights themselves stay dense"
    assert not is_two_of_four(run.ema.shadow["2.weight"])
    net = run.generator()
    for k, value in run.ema.shadow.items():
        expected = torch.where(two_of_four(value), value, 0) if k in covered_weights(run) else value
        assert torch.equal(net.model.get_parameter(k), expected.to(run.params[0].dtype))
    assert not any(isinstance(m, sparsity.MaskedLinear) for m in net.model.modules())


def test_the_mask_is_chosen_before_the_weights_become_bf16():
    for flags in ({}, dict(pure_bf16=True), dict(pure_bf16=True, master="split")):
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        model[0].weight.data = torch.tensor([[1.0, 1.001, 1.002, 0.5]])  # three equal numbers in bf16
        run = run_of("magnitude", flags, model)
        assert (run.model[0].weight != 0).tolist() == [[False, True, True, False]]
        if flags.get("master"):
            assert torch.equal(run.weights("raw")["0.weight"], torch.tensor([[0.0, 1.001, 1.002, 0.0]]))


@pytest.mark.parametrize("name", ["fp32", "kahan+stochastic", "split"])
def test_state_goes_through_a_file_and_training_goes_on_bit_for_bit(name, tmp_path):
    for mode in ("magnitude", "srste"):
        whole = run_of(mode, RECIPES[name])
        list(steps(whole, 2))
        if mode == "magnitude":  # zeros that the mask keeps: it can't be guessed from the weights
            whole.sparse.masks["0"] = whole.sparse.masks["0"].roll(1, dims=0)
            whole.sparse.hold(whole.low_part)
        torch.save(whole.state_dict(), tmp_path / "state.pt")
        other = run_of(mode, RECIPES[name], small(seed=7))
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for run in (whole, other):
            list(steps(run, 2, seed=1))
        assert_same(other.state_dict(), whole.state_dict())


def test_a_dense_state_is_pruned_on_loading_and_masks_of_another_net_are_refused():
    dense = Precision(small(), recipe(pure_bf16=True, master="split"))
    list(steps(dense, 2))
    run = run_of("magnitude", dict(pure_bf16=True, master="split"), small(seed=7))
    run.load_state_dict(dense.state_dict())
    for k, w in covered_weights(run).items():
        mask = two_of_four(dense.model.get_parameter(k))
        assert torch.equal(w, torch.where(mask, dense.model.get_parameter(k), 0)) and torch.equal(run.sparse.masks[k.removesuffix(".weight")], mask)
        assert is_two_of_four(run.weights("raw")[k])
    with pytest.raises(SparsityError, match="belong to another net"):
        run.sparse.load_state_dict({"masks": {"0": torch.ones(2, 4, dtype=torch.bool)}}, run.low_part)


# ---- Kernels, FLOPs, ledger -----------------------------------------------------------------------------------------

def test_shapes_that_the_kernels_take():
    kernels = lambda *shape: sparsity.kernels(shape, BF16)
    assert kernels(32, 64) == kernels(64, 128) == ["cuSPARSELt", "CUTLASS"]
    assert kernels(16, 16) == kernels(32, 32) == kernels(16, 64) == kernels(48, 80) == ["cuSPARSELt"]
    assert kernels(8, 64) == kernels(64, 8) == kernels(24, 64) == []


def test_which_backend_a_gpu_runs(monkeypatch):
    for available, capability, expected in ((True, (8, 0), "cuSPARSELt"), (True, (9, 0), "cuSPARSELt"), (False, (8, 6), "CUTLASS"), (False, (9, 0), None)):
        monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert sparsity.backend("cuda") == expected


def test_flops_are_counted_by_layer_and_kind():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(2), nn.Linear(16, 32, bias=False), nn.Linear(32, 4))
    layers, totals = sparsity.forward_flops(net.to("meta"), torch.empty(2, 3, 4, 4, device="meta"))
    assert layers["2"] == 2 * 2 * 8 * 16 * 32 and layers["3"] == 2 * 2 * 8 * 32 * 4 and layers["0"] == totals["convolution"] == 2 * 2 * 16 * 8 * 3 * 9
    assert totals["linear"] == layers["2"] + layers["3"] and totals["attention"] == 0


def row_of(out):
    return next(line for line in out.splitlines() if line.startswith("sparse24 "))


def test_the_ledger_names_layers_share_of_the_flops_and_what_runs_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    share = {}
    for model in ("dit", "unet"):
        assert quick("--model", model, "--sparse24", "srste", name=model, steps=1) == 0
        out = capsys.readouterr().out
        share[model] = float(row_of(out).split("Linears = ")[1].split("%")[0])
        assert "sparse kernels can't run here (needs compute capability 8.0)" in row_of(out)
        (row,) = [r for r in json.loads(Path(f"runs/{model}/ledger.json").read_text())["sites"] if r["site"] == "sparse24"]
        assert row["value"] == "srste" and row["bytes"] == 0
        assert sum(layer["flops"] for layer in row["layers"]) == pytest.approx(share[model] / 100, abs=1e-3)
        assert all(f"{layer['layers']} " in out for layer in row["layers"])
        if model == "dit":
            assert {(r["layers"], r["count"], tuple(r["shape"])) for r in row["layers"]} == {
                ("blocks.*.attention.qkv", 4, (192, 64)), ("blocks.*.attention.proj", 4, (64, 64)), ("blocks.*.mlp.0", 4, (256, 64)),
                ("blocks.*.mlp.2", 4, (64, 256))}
    assert share["dit"] > 90 and share["unet"] < 5
    ledger = run_of("magnitude", dict(pure_bf16=True)).ledger()  # without FLOPs, as in a loop of one's own
    assert "two of four along the input of 3 Linears; 1 too small for any sparse kernel" in row_of(str(ledger)) and "no kernel: too small" in str(ledger)
    (row,) = [r for r in ledger.rows if r["site"] == "sparse24"]
    assert row["bytes"] * ledger.parameters == pytest.approx(sum(w.numel() for w in covered_weights(run_of("magnitude", {})).values()))


@pytest.mark.parametrize("machine, dtype, said", [
    (("native", ""), torch.float32, "take bf16 weights"), (("native", ""), BF16, "by cuSPARSELt"), (("no", "because"), BF16, "can't run here \\(because\\)")])
def test_what_the_ledger_says_of_generation(machine, dtype, said, monkeypatch):
    monkeypatch.setattr(sparsity, "backend", lambda device: "cuSPARSELt")
    report = Sparse24(small(), "magnitude", machine=machine).report(dtype)
    assert sum(row["count"] for row in report["layers"]) == 3
    assert re.search(said, report["why"])


@gpu
@pytest.mark.parametrize("mode", ["magnitude", "srste"])
def test_sparse_kernels_equal_the_masked_dense_product(mode):
    torch.manual_seed(0)
    run = Precision(models.build("dit", "rflow", 1, 10, 32, "S/2").cuda(), recipe(pure_bf16=True, stochastic=True, sparse24=mode))
    for p in run.params:
        p.data.add_(0.02 * torch.randn_like(p))  # a new net returns zeros
    run.sparse.hold(run.low_part)
    for average in run.averages.values():
        average.decay = 0.0
        average.update()
    net = run.generator()
    converted = [m for m in net.model.modules() if isinstance(m, sparsity.KernelLinear)]
    if sparsity.backend("cuda") is None:
        pytest.skip("this torch has no cuSPARSELt, and CUTLASS's kernels stop at compute capability 8.x")
    assert len(converted) == 48
    run.sparse.machine = ("no", "the masked dense product, to compare with")
    dense = run.generator()
    x, t, y = torch.randn(8, 1, 32, 32, device="cuda"), torch.rand(8, device="cuda") * 1000, torch.arange(8, device="cuda")
    with torch.no_grad():
        got, expected = net(x, t, y), dense(x, t, y)
    assert expected.std() > 0.1
    assert (got - expected).norm() / expected.norm() < 0.02


# ---- The command ----------------------------------------------------------------------------------------------------

def sparse_weights(tensors):
    return [t for name, t in tensors.items() if name.endswith(("qkv.weight", "proj.weight", "mlp.0.weight", "mlp.2.weight"))]


def test_train_with_autocast_prune_and_draw(monkeypatch, capsys):
    assert quick("--model", "dit", "--bf16", "--lr", 1e-2, "--ema_decay", 0.5) == 0
    before = content("runs")
    dense = summary()["scores"]["ema"]
    capsys.readouterr()
    pruned = draw(monkeypatch, "runs/run", "--sparse24", "magnitude", "--export", "pruned.safetensors")["ema"]
    assert "sparse kernels can't run here" in capsys.readouterr().out
    assert math.isfinite(pruned["frechet"]) and pruned != dense
    assert draw(monkeypatch, "runs/run", "--set", "sparse24=magnitude")["ema"] == pruned
    assert draw(monkeypatch, "runs/run", "--sparse24", "magnitude", "--set", "generation=fp32")["ema"] != pruned
    assert draw(monkeypatch, "runs/run", "--sparse24", "none")["ema"] == dense
    average, exported = checkpoint()["precision"]["averages"]["ema"]["shadow"], load_file("pruned.safetensors")
    assert len(sparse_weights(exported)) == 16 and all(map(is_two_of_four, sparse_weights(exported)))
    for name, t in average.items():
        kept = exported[name] != 0
        assert torch.equal(exported[name][kept], t[kept])
    record = json.loads(Path("runs/run/samples/step000004-sparse24_magnitude.json").read_text())
    assert any(row["site"] == "sparse24" and row["layers"] for row in record["ledger"]["sites"])
    assert content("runs").items() >= before.items()


def test_runs_from_before_the_flag_are_pruned_too(monkeypatch):
    assert quick("--model", "dit") == 0
    state = checkpoint()
    for key in ("sparse24", "sparse24_decay", "finetune"):
        del state["config"][key]
    torch.save(state, "runs/run/checkpoint.pt")
    assert draw(monkeypatch, "runs/run", "--sparse24", "magnitude")["ema"] != summary()["scores"]["ema"]


PURE = ["--model", "dit", "--pure_bf16", "--stochastic"]


def test_train_in_pure_bf16_prune_finetune_and_draw(monkeypatch):
    assert quick(*PURE, name="dense") == 0
    pruned = draw(monkeypatch, "runs/dense", "--sparse24", "magnitude", "--export", "pruned.safetensors")["ema"]
    started = []
    with monkeypatch.context() as patch:
        original = trainer.Trainer.fit
        patch.setattr(trainer.Trainer, "fit", lambda run: started.append({k: v.clone() for k, v in run.precision.weights("ema").items()}) or original(run))
        assert quick(*PURE, "--finetune", "runs/dense", "--sparse24", "magnitude", name="tuned") == 0
    expected = load_file("pruned.safetensors")
    for name, t in started[0].items():  # the average of a new run starts from its weights: bf16 images of the fp32 average
        assert torch.equal(t, expected[name].to(BF16).float())
    state = checkpoint("tuned")["precision"]
    assert len(state["sparse24"]["masks"]) == 16 and all(m.dtype == torch.bool for m in state["sparse24"]["masks"].values())
    assert all(map(is_two_of_four, sparse_weights(state["model"]) + sparse_weights(state["averages"]["ema"]["shadow"])))
    tuned = summary("tuned")["scores"]["ema"]
    assert tuned != pruned and draw(monkeypatch, "runs/tuned") == {"ema": tuned}


@pytest.mark.parametrize("source", ["--lr 1e-2 --ema_decay 0.5", "--pure_bf16 --stochastic --set ema=bf16", "--optimizer torch --bf16"])
@pytest.mark.parametrize("flags", ["", "--pure_bf16 --master split", "--pure_bf16 --kahan", "--opt8bit --bf16"])
def test_finetuning_starts_from_the_average_in_any_recipe(source, flags, monkeypatch):
    assert quick(*source.split(), name="source", steps=2) == 0
    average = checkpoint("source")["precision"]["averages"]["ema"]["shadow"]
    seen = []

    def fit(run):
        seen.append(run.precision.weights("raw"))
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "fit", fit)
    assert quick(*flags.split(), "--finetune", "runs/source/checkpoint.pt", name="tuned") == 130
    for name, t in seen[0].items():
        if "kahan" in flags:
            torch.testing.assert_close(t, average[name].float(), rtol=2**-16, atol=1e-30)
        else:
            assert torch.equal(t, average[name].float())


RESUMED = ["--pure_bf16 --kahan --stochastic --finetune source --sparse24 magnitude", "--pure_bf16 --master split --finetune source --sparse24 magnitude",
           "--bf16 --sparse24 srste", "--pure_bf16 --stochastic --sparse24 srste --accumulate 2"]


@pytest.mark.parametrize("flags", RESUMED)
def test_an_interrupted_sparse_run_equals_an_uninterrupted_one_bit_for_bit(flags, monkeypatch):
    if "source" in flags:
        assert quick("--model", "dit", "--runs", ".", name="source", steps=2) == 0
    flags = ["--model", "dit", *flags.split(), "--log_every", 3, "--checkpoint_every", 4]
    assert quick(*flags, name="whole", steps=6) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda run: run._asked_to_stop(signal.SIGTERM, None))
        assert quick(*flags, name="stopped", steps=6) == 143
    shutil.rmtree("source", ignore_errors=True)  # a run that has its own checkpoint needs no other
    assert quick(*flags, name="stopped", steps=6) == 0
    assert_same(checkpoint("stopped")["precision"], checkpoint("whole")["precision"])
    assert metrics("stopped") == metrics("whole") and summary("stopped")["scores"] == summary("whole")["scores"]


def test_an_srste_run_takes_its_decay_and_is_drawn_as_it_was_trained(monkeypatch):
    assert quick("--model", "dit", "--sparse24", "srste", name="a") == 0
    assert quick("--model", "dit", "--sparse24", "srste", "--sparse24_decay", 0.01, name="b", steps=2) == 0
    trained = summary("a")["scores"]
    assert metrics("a")[0]["grad_norm"] != metrics("b")[0]["grad_norm"]
    assert draw(monkeypatch, "runs/a", "--sparse24", "magnitude") == trained  # pruned by their own magnitudes all the same
    assert quick("--model", "dit", "--finetune", "runs/a", "--sparse24", "magnitude", name="c", steps=1) == 0


REFUSED = {
    "--sparse24 magnitude": "add --finetune RUN",
    "--model dit --set sparse24=magnitude": "add --finetune RUN",
    "--sparse24 srste --task segment --image_size 16": "no Linear layer inside its blocks",
    "--sparse24_decay 0.1": "belongs to --sparse24 srste",
    "--sparse24 half": "invalid choice",
    "--finetune nowhere": "no checkpoint at nowhere",
    "--finetune runs/dit": "was trained with --model dit, and this run has --model unet",
    "--finetune runs/dit --model dit --size S": "--size tiny, and this run has --size S",
    "--finetune runs/dit --model dit --size tiny/4": "--size",
    "--finetune runs/dit --model dit --task ddpm": "--task rflow",
    "--finetune runs/dit --model dit --velocity noise-clean": "--velocity clean-noise",
    "--finetune runs/dit --model dit --data synthetic": "--data digits",
    "--finetune runs/srste --model dit": "add --sparse24 magnitude or srste",
    "--finetune runs/srste/checkpoint.pt --model dit --name dit": "holds a run with other flags" ,
    "--finetune runs/torn --model dit": "no checkpoint of this program",
    "--sample runs/dit --sparse24 srste": "--sample takes --sparse24 magnitude",
    "--sample runs/dit --set sparse24=srste": "--sample takes --sparse24 magnitude",
    "--sample runs/dit --finetune runs/srste": "--finetune can't differ",
    "--sample runs/dit --sparse24_decay 0.1": "--sparse24_decay can't differ",
}


def test_what_makes_no_sense_is_refused_in_one_line_and_nothing_is_written(capsys):
    assert quick("--model", "dit", name="dit", steps=1) == 0 and quick("--model", "dit", "--sparse24", "srste", name="srste", steps=1) == 0
    Path("runs/torn").mkdir()
    Path("runs/torn/checkpoint.pt").write_bytes(Path("runs/dit/checkpoint.pt").read_bytes()[:5000])
    before = content(".")
    for flags, said in REFUSED.items():
        capsys.readouterr()
        assert command(*flags.split()) == 2, flags
        assert said in one_line(capsys), flags
        assert content(".") == before, flags


def test_a_name_says_where_it_started_and_how_sparse_it_is():
    train.build_parser()
    name = lambda **flags: train.run_name({**train.DEFAULTS, **flags})
    assert name(finetune="runs/amp/", sparse24="magnitude", model="dit") == "dit-finetune_amp-sparse24_magnitude"
    assert name(finetune="runs/amp/checkpoint.pt") == "finetune_amp"
