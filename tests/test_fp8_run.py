"""FP8 in whole runs: recipes, training, generation, resume, commands, and on a GPU."""

import json
import weakref
from pathlib import Path

import cli
import common
import pytest
import torch
import torch.nn.functional as F
from common import refused, through_a_file
from eight_bit import dit, draw, method, net, snr
from torch import nn

import strategies
import train
from harness.checkpoints import read as read_checkpoint
from lowprec.layers import fp8, fp8_product
from lowprec.layers.fp8 import FP8, Options
from lowprec.precision import Precision, Recipe, recipe
from trainer import Trainer

BF16 = torch.bfloat16
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_hopper = pytest.mark.skipif(not hopper, reason="needs compute capability 8.9")
eager = common.eager
in_a_folder_of_its_own = cli.in_a_folder_of_its_own


# ---- Recipes and runs --------------------------------------------------------------------------------------


def test_recipes_of_the_flags():
    assert recipe(fp8=True) == Recipe(compute="fp8", fp8=Options()) == recipe(sites=["compute=fp8"])
    history = dict(fp8_recipe="delayed", amax_history_len=16, amax_compute_algo="most_recent")
    pure = recipe(fp8=True, pure_bf16=True, stochastic=True, fp8_format="e4m3", **history)
    assert pure.weights == "bf16" and pure.fp8 == Options("auto", "e4m3", "delayed", 16, "most_recent")
    assert pure.dtype("compute") == BF16 and recipe(pure_bf16=True).fp8 is None
    for flag, field in Options.flags.items():
        assert train.DEFAULTS[flag] == getattr(Options(), field)


def timesteps(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 1000


def trained(r, count, device="cpu", steps=8):
    """(losses, run) of a DiT that learns to repeat what it is given."""
    run, losses = Precision(dit().to(device), r, lr=2e-3), []
    y = (torch.arange(count) % 10).to(device)
    for step in range(steps):
        x, t = draw(count, 1, 8, 8, seed=step).to(device), timesteps(count, step).to(device)
        loss = F.mse_loss(run(x, t, y), x)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses, run


def furthest(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def test_a_dit_trained_in_fp8_stays_close_to_bf16():
    exact, _ = trained(recipe(bf16=True), 32)
    assert exact[-1] < 0.8 * exact[0]
    pure = dict(fp8=True, pure_bf16=True, stochastic=True, fp8_format="e4m3")
    for flags in (dict(fp8=True), dict(fp8=True, fp8_recipe="delayed"), pure):
        got, run = trained(recipe(**flags), 32)
        assert got != exact and furthest(got, exact) < 0.03 * exact[0], flags
        # fp32 or bf16 weights, whatever the products read
        assert {p.dtype for p in run.params} == {BF16 if "pure_bf16" in flags else torch.float32}


def test_generation_is_without_fp8_unless_asked():
    x, t, y = draw(8, 1, 8, 8), timesteps(8), torch.arange(8)
    outs = {}
    for value in ("compute", "fp8", "fp32"):
        torch.manual_seed(1)
        run = Precision(dit(), recipe(fp8=True, sites=[f"generation={value}"]))
        for p in run.params:
            p.data.add_(0.05 * torch.randn_like(p))
        sampler = run.generator("raw")
        outs[value] = sampler(x, t, y)
        kinds = {type(m) for m in sampler.net.modules()}
        assert (fp8.Linear in kinds) == (value == "fp8")
        assert isinstance(run.model.blocks[0].mlp[0], fp8.Linear)
    assert 15 < snr(outs["fp8"], outs["fp32"]) < snr(outs["compute"], outs["fp32"]) - 5
    plain = Precision(dit(), recipe(bf16=True))
    plain.model.load_state_dict(run.model.state_dict())
    assert torch.equal(plain(x, t, y), outs["compute"])


def test_a_state_without_another_backends_scales_loads():
    """A run may go on where another backend is chosen: scales stay behind, weights do not."""
    delayed = Precision(net(), recipe(fp8=True, fp8_recipe="delayed"))
    plain = Precision(net(1), recipe(fp8=True))
    delayed.backward(delayed(draw(16, 16)).sum())
    delayed.step()
    plain.load_state_dict(delayed.state_dict())
    assert torch.equal(plain.model.first.weight, delayed.model.first.weight)
    other = Precision(net(1), recipe(fp8=True, fp8_recipe="delayed"))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.model.first.weight, plain.model.first.weight)
    assert not other.model.first.scaling.scale.any()
    state = plain.state_dict()
    del state["model"]["second.weight"]
    refused(lambda: plain.load_state_dict(state), "lacks the weight second.weight")


def test_a_run_generates_through_the_scales_of_its_training():
    """Delayed scaling: a copy that multiplies in FP8 keeps the scales, and neither changes the other's."""
    sites = ["generation=fp8"]
    run = Precision(net(), recipe(fp8=True, fp8_recipe="delayed", fp8_backend="emulate", sites=sites))
    for step in range(2):
        run.backward(run(draw(16, 16, seed=step)).square().mean())
        run.step()
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    drawn = run.generator("raw")
    assert torch.equal(drawn.net.first.scaling.scale, run.model.first.scaling.scale)
    assert drawn.net.first.scaling.scale.all()
    drawn(draw(16, 16) * 100)
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    assert all(torch.equal(value, state[name]) for name, value in drawn.net.state_dict().items())


def test_the_noise_of_gradients_is_measured_on_one_copy_at_a_time(monkeypatch):
    """Three copies of a large net at the end of a run need memory that training left none of."""
    run = Precision(net(), recipe(fp8=True))
    run.backward(run(draw(16, 16)).square().mean())
    run.step()
    alive, most, real = [], [], fp8.copied

    def counting(net):
        made = real(net)
        alive.append(weakref.ref(made))
        most.append(sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(fp8, "copied", counting)
    found = method(run, FP8).finish(run, lambda model: model(draw(16, 16, seed=1)).square().mean())
    assert 15 < found["gradient_snr"]["fp8"] < found["gradient_snr"]["bf16"] - 5
    assert most == [1, 1, 1]


# ---- Commands ----------------------------------------------------------------------------------------------


def test_drawing_from_a_finished_run_in_8_bits(capsys):
    assert cli.quick("--model", "dit", steps=2) == 0
    assert "gradient_snr" not in cli.summary()
    scores = {}
    for kind in ("int8", "fp8"):
        capsys.readouterr()
        assert cli.command("--sample", "runs/run", "--set", f"generation={kind}", "--name", kind) == 0
        drawn = json.loads(Path(f"runs/run/samples/{kind}.json").read_text())
        scores[kind] = drawn["scores"]["ema"]["sliced_wasserstein"]
        said = capsys.readouterr().out
        assert "20 of 25 linear layers" in said and 0.9 < drawn["ledger"]["flops_share"]["generation"] < 1
        assert drawn["ledger"]["generation"]["format"] == {"int8": "int8", "fp8": "hybrid"}[kind]
    assert max(scores.values()) < 1.05 * min(scores.values())
    assert cli.command("--sample", "runs/run", "--set", "generation=int8", "--sparse24", "magnitude") == 2


def test_the_summary_tells_the_noise_of_fp8_gradients():
    flags = "--model dit --fp8 --fp8_recipe delayed --pure_bf16 --stochastic --set islands=embed"
    rest = "--lr 1e-2 --samples 2 --sample_steps 1"
    assert cli.quick(*flags.split(), *rest.split(), steps=12) == 0
    kinds = [f"fp8_{what}_{name}" for what in ("underflow", "saturated") for name in fp8_product.FP8_OPERANDS]
    assert all(0 <= row[share] < 0.5 for row in cli.metrics() for share in kinds)
    told = json.loads(Path("runs/run/ledger.json").read_text())["fp8"]
    assert len(told["layers"]) == 20 and told["recipe"] == "delayed" and told["flops_share"] > 0.9
    found = cli.summary()["gradient_snr"]
    assert 15 < found["fp8"] < found["bf16"] - 7 < 50
    trainer = Trainer(strategies.settle(cli.checkpoint()["config"]))
    trainer.load_state_dict(read_checkpoint("runs/run"))
    trainer.train, model = trainer.data.train, trainer.precision.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = method(trainer.precision, FP8).finish(trainer.precision, trainer.fixed_loss)
    assert again == {"gradient_snr": found}, "a function of the checkpoint"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
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
    for a, b in zip(*results, strict=True):
        assert snr(b, a) > (45 if name == "rowwise" else 60)


BACKENDS = [
    ("te", "tensorwise"),
    ("te", "delayed"),
    ("torchao", "tensorwise"),
    ("torchao", "rowwise"),
    ("scaled_mm", "tensorwise"),
    ("scaled_mm", "delayed"),
    ("emulate", "tensorwise"),
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("backend, name", BACKENDS)
@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True, stochastic=True)], ids=str)
def test_every_backend_trains_a_dit_on_cuda(backend, name, flags):
    pytest.importorskip({"te": "transformer_engine.pytorch", "torchao": "torchao"}.get(backend, "torch"))
    r = recipe(fp8=True, fp8_backend=backend, fp8_recipe=name, **flags)
    exact, _ = trained(recipe(**flags) if flags else recipe(bf16=True), 20, "cuda")
    losses, run = trained(r, 20, "cuda")
    assert furthest(losses, exact) < 0.05 * exact[0]
    run.ledger()
    x, t, y = draw(20, 1, 8, 8).cuda(), timesteps(20).cuda(), torch.arange(20).cuda() % 10
    assert run.generator()(x, t, y).isfinite().all()
    again = Precision(dit(1).cuda(), r, lr=2e-3)
    again.load_state_dict(through_a_file(run.state_dict()))
    torch.testing.assert_close(again(x, t, y), run(x, t, y))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_a_compiled_dit_is_one_graph_on_cuda(name):
    x, t, y = draw(64, 1, 8, 8).cuda(), timesteps(64).cuda(), torch.arange(64).cuda() % 10
    runs = [Precision(dit().cuda(), recipe(fp8=True, fp8_backend="scaled_mm", fp8_recipe=name)) for _ in "ab"]
    runs[1].forward = torch.compile(runs[1].model, fullgraph=True)
    for step in range(3):
        reports = []
        for run in runs:
            run.observe(step == 1)
            run.backward(F.mse_loss(run(x, t, y), x))
            reports.append(run.step(measure=step == 1))
        assert len({key for key in reports[1] if key.startswith("fp8_")}) == (6 if step == 1 else 0)
    assert snr(runs[1](x, t, y).detach(), runs[0](x, t, y).detach()) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [3, 64])
def test_a_finished_net_is_drawn_alike_on_cuda_and_cpu(kind, rows):
    x, t, y, outs = draw(rows, 1, 8, 8), torch.linspace(0, 999, rows), torch.arange(rows) % 10, {}
    for device in ("cpu", "cuda"):
        model = dit(1)
        for i, p in enumerate(model.parameters()):
            p.data.add_(0.05 * draw(*p.shape, seed=i))
        run = Precision(model.to(device), recipe(sites=[f"generation={kind}"]))
        outs[device] = run.generator("raw")(x.to(device), t.to(device), y.to(device)).cpu()
    assert snr(outs["cuda"], outs["cpu"]) > 30  # sums in another order cross edges between codes


def test_a_command_ends_in_bf16_for_the_last_percent_of_its_steps(capsys):
    flags = "--dry_run --model dit --fp4 nvfp4 --fp4_keep last:1 --fp4_finish 15 --steps 200"
    train.run_command(flags.split())
    text = capsys.readouterr().out
    assert "bf16 from step 170 on" in text and "last:1 in bf16" in text
    words = "--dry_run --model dit --bf16 --fp4_finish 15".split()
    refused(lambda: train.run_command(words), "add that, or drop it")
