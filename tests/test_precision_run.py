"""precision.py, whole: steps by `Precision` under every recipe, what it measures, ledger, state, copies."""

import copy
import io
import itertools
import json
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import precision
from precision import AdamW, Precision, Recipe, RecipeError, build_optimizer, exact_weight, island_modules, recipe

BF16 = torch.bfloat16
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors gain nothing from more, and lose much when the cores are busy
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def eager(request, monkeypatch):
    if not request.node.get_closest_marker(
        "gpu"
    ):  # test_precision.py shows that a compiled step is the same, after seconds of compiling
        monkeypatch.setattr(precision, "_run_kernel", lambda kernel, *args, compiled=True: kernel(*args))


class Net(nn.Module):
    """(x [B,1,H,W], t [B]) -> [B,1,H,W]: a small net with all that islands know: norm, embedding, head."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.time_embed = nn.Linear(1, width)
        self.norm = nn.GroupNorm(2, width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t=None):
        h = self.stem(x)
        if t is not None:
            h = h + self.time_embed((t[:, None] / 1000).to(h.dtype))[:, :, None, None]
        return self.out(self.middle(F.silu(self.norm(h))))


RECIPES = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "fp16": dict(fp16=True),
    "pure_bf16": dict(pure_bf16=True),
    "stochastic": dict(pure_bf16=True, stochastic=True),
    "kahan": dict(pure_bf16=True, kahan=True),
    "kahan+stochastic": dict(pure_bf16=True, kahan=True, stochastic=True),
    "split": dict(pure_bf16=True, master="split"),
    "fp32 master": dict(pure_bf16=True, master="fp32"),
    "opt8bit": dict(opt8bit=True),
    "stochastic opt8bit": dict(pure_bf16=True, stochastic=True, opt8bit=True),
    "kahan opt8bit": dict(pure_bf16=True, kahan=True, opt8bit=True),
    "split opt8bit": dict(pure_bf16=True, master="split", opt8bit=True),
    "opt4bit": dict(opt4bit=True, stochastic=True),
    "stochastic opt4bit": dict(pure_bf16=True, stochastic=True, opt4bit=True),
    "split opt4bit": dict(pure_bf16=True, master="split", opt4bit=True),
    "bf16 moments": dict(bf16=True, sites=["exp_avg=bf16", "exp_avg_sq=bf16", "update=stochastic"]),
    "bf16 average": dict(pure_bf16=True, stochastic=True, sites=["ema=bf16", "ema_update=stochastic"]),
    "islands": dict(pure_bf16=True, stochastic=True, sites=["islands=norm+embed+final", "accumulate=fp32"]),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def net(seed=0, width=8):
    torch.manual_seed(seed)
    return Net(width)


def batches(count, seed=0, device="cpu"):
    """[(x [8,1,8,8], y: x blurred)]: what Net can learn."""
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(8, 1, 8, 8, generator=g).to(device) for _ in range(count)]
    return [(x, F.avg_pool2d(x, 3, 1, 1)) for x in xs]


def start(name="fp32", model=None, **options):
    return Precision(model or net(), recipe(**(RECIPES[name] if isinstance(name, str) else name)), **options)


def train(run, count, seed=0, measure=False):
    reports = []
    for x, y in batches(count, seed):
        for _ in range(run.accumulate):
            run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
        reports.append(run.step(measure=measure))
    return reports


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def refused(call, *words):
    with pytest.raises(RecipeError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# ----------------------------------------------------------------------------------------------------------------------
# The loop in the header of precision.py


def documented_loop():
    """The indented block of the module's docstring, without the numbers of its lines."""
    lines = [line for line in precision.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 7 and lines[0].lstrip().startswith("run = Precision(")
    return textwrap.dedent("\n".join(lines))


def six_lines(flags, device="cpu"):
    """Runs the documented loop as it stands, with another recipe; -> (its names, its losses)."""
    losses = []

    def mse_loss(out, y):
        losses.append(F.mse_loss(out, y))
        return losses[-1]

    class Functional:
        pass

    Functional.mse_loss = staticmethod(mse_loss)
    names = dict(
        Precision=Precision,
        recipe=lambda **shown: recipe(**flags),
        model=net().to(device),
        F=Functional,
        loader=batches(60, device=device),
    )
    exec(documented_loop(), names)
    return names, [loss.item() for loss in losses]


def check_six_lines(names, losses):
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), "nothing was learned"
    x, y = batches(1, seed=1, device=names["run"].device)[0]
    out = names["net"](x)
    assert out.shape == y.shape and out.dtype == torch.float32 and out.isfinite().all()


@every_recipe
def test_six_lines_turn_a_loop_into_any_recipe(name, capsys):
    names, losses = six_lines(RECIPES[name])
    check_six_lines(names, losses)
    assert "bytes a parameter" in capsys.readouterr().out
    dtypes = {p.dtype for p in names["model"].parameters()}
    wanted = (
        {torch.float32}
        if not RECIPES[name].get("pure_bf16")
        else {BF16, torch.float32}
        if name == "islands"
        else {BF16}
    )
    assert dtypes == wanted


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "pure_bf16", "stochastic", "kahan", "split"])
def test_six_lines_on_cuda(name):
    check_six_lines(*six_lines(RECIPES[name], "cuda"))


@pytest.mark.gpu
@needs_cuda
def test_fp32_convolves_in_fp32_on_cuda():
    conv, x = nn.Conv2d(64, 64, 3).cuda(), torch.randn(4, 64, 32, 32, device="cuda")
    exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double())
    error = {}
    for compute in ("fp32", "tf32"):
        run = start(dict(sites=[f"compute={compute}"]), copy.deepcopy(conv))
        error[compute] = ((run(x).double() - exact).norm() / exact.norm()).item()
    assert error["fp32"] < 1e-6 < 1e-5 < error["tf32"]


def test_fp32_is_not_left_to_the_backends_default():
    # cuDNN convolves fp32 tensors in TF32 unless told otherwise
    start(dict(sites=["compute=tf32"]))
    assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "high"
    start("fp32")
    assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"


# ----------------------------------------------------------------------------------------------------------------------
# A step


@pytest.mark.parametrize("name", ["fp32", "split", "fp32 master"])
def test_starts_from_the_fp32_weights(name):
    model = net()
    wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = start(name, model)
    for source in ("raw", "ema"):
        assert all(same(run.weights(source)[n], wanted[n]) for n in wanted)


def test_fp32_equals_a_bare_torch_loop():
    run, model = start("fp32", lr=1e-2, weight_decay=0.1), net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    train(run, 10)
    for x, y in batches(10):
        F.mse_loss(model(x, torch.arange(8.0)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(same(p, q) for p, q in zip(run.params, model.parameters()))


def test_bf16_equals_torch_autocast():
    run, model = start("bf16", lr=1e-2), net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    train(run, 5)
    for x, y in batches(5):
        with torch.autocast("cpu", BF16):
            out = model(x, torch.arange(8.0))
        F.mse_loss(out.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(same(p, q) for p, q in zip(run.params, model.parameters()))
    fp32 = start("fp32", lr=1e-2)
    train(fp32, 5)
    assert not all(same(p, q) for p, q in zip(run.params, fp32.params)), "autocast did nothing"


def test_split_and_fp32_master_train_alike():
    a, b = start("split", lr=1e-2, clip_grad=0.5), start("fp32 master", lr=1e-2, clip_grad=0.5)
    train(a, 10), train(b, 10)
    for source in ("raw", "ema"):
        one, two = a.weights(source), b.weights(source)
        assert all(same(one[n], two[n]) for n in one)


def test_inputs_are_cast_but_timesteps_and_integers_are_not():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)

        def forward(self, x, *args):
            seen.extend([x.dtype, *(a.dtype for a in args)])
            return self.embedding(x) if not x.is_floating_point() else x * self.embedding.weight[0, 0]

    run = start("pure_bf16", Spy())
    assert run(torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.long)).dtype == torch.float32
    assert seen == [BF16, torch.float32, torch.int64]
    assert run(torch.tensor([1, 2])).shape == (2, 4)
    assert start(dict(pure_bf16=True, sites=["loss=bf16"]), Spy())(torch.ones(3)).dtype == BF16
    assert start("fp32", Spy())(torch.ones(3)).dtype == torch.float32 and seen[-1] == torch.float32


def test_a_step_without_gradients_is_refused():
    for name in ("fp32", "fp16", "split"):
        run = start(name)
        refused(run.step, "no gradients", "backward(loss)")
        refused(lambda: run.step(measure=True), "no gradients")


def test_frozen_and_unused_parameters_are_left_alone():
    model = net()
    model.stem.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = start("fp32", model, weight_decay=0.1)
    for x, y in batches(2):
        run.backward(F.mse_loss(run(x), y))  # no timestep: time_embed gets no gradient
        run.step(measure=True)
    after = dict(model.named_parameters())
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        n for n in after if n.startswith(("norm", "middle", "out"))
    }
    assert "stem.weight" not in run.weights("ema")


# -- gradient accumulation


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.a(x)


def accumulated(site, micro_batches=64):
    """(what the optimiser is handed, the mean of the micro-batches' bf16 gradients in fp64)."""
    run, alone = (
        start(dict(pure_bf16=True, sites=[f"accumulate={site}"]), Linear(), accumulate=m) for m in (micro_batches, 1)
    )
    total = 0
    g = torch.Generator().manual_seed(1)
    for _ in range(micro_batches):
        x, y = (torch.randn(16, 64, generator=g) for _ in range(2))
        run.backward(F.mse_loss(run(x), y + 0.5 * x))
        alone.backward(F.mse_loss(alone(x), y + 0.5 * x))
        total = total + alone.params[0].grad.double()
        alone.params[0].grad = None
    handed = run.sums[run.params[0]] if site == "fp32" else run.params[0].grad
    return run, handed, total / micro_batches


def test_fp32_accumulation_is_exact_and_bf16_accumulation_is_not():
    error = {}
    for site in ("fp32", "bf16"):
        run, got, exact = accumulated(site)
        assert got.dtype == precision.DTYPES[site] and run.keeps_sums == (site == "fp32")
        error[site] = ((got.double() - exact).norm() / exact.norm()).item()
    predicted = 2**-9 * math.sqrt(64 / 3)  # the figure of the warning, 0.9 %
    assert error["fp32"] < 1e-6 and predicted / 3 < error["bf16"] < 3 * predicted


def test_the_optimiser_reads_the_fp32_sum():
    run, total, exact = accumulated("fp32")
    total = total.clone()
    assert run.params[0].grad is None
    run.step()
    state = run.optimizer.state[run.params[0]]
    torch.testing.assert_close(state["exp_avg"].float(), 0.1 * total, rtol=2**-8, atol=1e-9)
    assert state["step"] == 1 and not run.sums


@pytest.mark.parametrize("name", ["fp32", "split"])
def test_accumulation_averages(name):
    flags = RECIPES[name] | (dict(sites=["accumulate=fp32"]) if name == "split" else {})
    one, two = start(flags, lr=1e-2), start(flags, lr=1e-2, accumulate=4)
    (x, y), t = batches(1)[0], torch.arange(8.0)
    one.backward(F.mse_loss(one(x, t), y))
    for _ in range(4):  # the same batch four times is the same gradient
        two.backward(F.mse_loss(two(x, t), y))
    gradient = lambda run: [run.sums.get(p, p.grad).float() for p in run.params]
    for a, b in zip(gradient(one), gradient(two)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    one.step(), two.step()
    for a, b in zip(one.weights("raw").values(), two.weights("raw").values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_ranks_can_sum_their_gradients():
    run = start(dict(pure_bf16=True, master="split", sites=["accumulate=fp32"]), accumulate=2)
    handed = []
    run.reduce_sums = lambda tensors: handed.append([t.dtype for t in tensors])
    train(run, 1)
    assert handed == [[torch.float32] * len(run.params)]


# -- clipping and loss scaling


@pytest.mark.parametrize("optimizer", ["adamw", "torch"])
def test_clipping_equals_torch(optimizer):
    run, free, model = start("fp32", lr=1e-2, clip_grad=0.05, optimizer=optimizer), start("fp32", lr=1e-2), net()
    reference = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    reports = train(run, 10, measure=True)
    train(free, 10)
    clipped = 0
    for (x, y), report in zip(batches(10), reports):
        F.mse_loss(model(x, torch.arange(8.0)), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-3), "the norm before clipping"
        clipped += norm > 0.05
        reference.step()
        reference.zero_grad()
    assert clipped > 5
    for p, q in zip(run.params, model.parameters()):
        ours, theirs = run.optimizer.state[p], reference.state[q]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    free_sq = torch.cat([free.optimizer.state[p]["exp_avg_sq"].flatten() for p in free.params]).sum()
    assert free_sq > 2 * torch.cat([run.optimizer.state[p]["exp_avg_sq"].flatten() for p in run.params]).sum()


@pytest.mark.parametrize("name", ["stochastic", "split", "islands", "stochastic opt8bit", "fp16"])
def test_clipping_limits_the_gradient_the_optimiser_sees(name):
    norms = {}
    for clip in (0.0, 0.01):
        run = start(name, net(width=32), clip_grad=clip, accumulate=2 if name == "islands" else 1, lr=0.0)
        train(run, 1)
        first = [run.optimizer.moment(p, "exp_avg") for p in run.params]
        norms[clip] = torch.cat([m.float().flatten() for m in first]).norm().item() / 0.1
    assert norms[0.01] <= 0.0101 < 0.05 < norms[0.0]
    assert norms[0.01] > 0.0099


def test_small_gradients_are_not_stretched_to_the_limit():
    runs = [start("fp32", lr=1e-2, clip_grad=clip) for clip in (0.0, 1e6)]
    for run in runs:
        train(run, 2)
    for p, q in zip(*(run.params for run in runs)):
        assert same(runs[0].optimizer.state[p]["exp_avg_sq"], runs[1].optimizer.state[q]["exp_avg_sq"])


def test_an_overflow_skips_the_step_and_is_counted():
    run = start("fp16", lr=1e-2)
    train(run, 2)
    scale, skipped = run.scaler.get_scale(), run.skipped
    before = {n: w.clone() for n, w in run.weights("raw").items()}
    states = copy.deepcopy(run.optimizer.state_dict()["state"])
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x * 1e6, torch.arange(8.0)), y))  # beyond 65504
    report = run.step(measure=True)
    assert run.skipped == report["skipped_steps"] == skipped + 1
    assert report["loss_scale"] == run.scaler.get_scale() == scale / 2
    assert report["nonfinite_grads"] > 0 and "update_survival" not in report
    assert all(same(run.weights("raw")[n], before[n]) for n in before)
    after = run.optimizer.state_dict()["state"]
    assert all(
        after[i]["step"] == states[i]["step"] and same(after[i]["exp_avg"], states[i]["exp_avg"]) for i in states
    )
    (report,) = train(run, 1, measure=True)
    assert run.skipped == skipped + 1 and report["update_survival"] > 0.9
    assert not all(same(run.weights("raw")[n], before[n]) for n in before)


def test_loss_scaling_changes_nothing_but_the_range():
    run = start("fp16", lr=1e-2)
    (x, y) = batches(1)[0]
    tiny = 1e-7 * F.mse_loss(run(x, torch.arange(8.0)), y)  # gradients that fp16 alone would flush to 0
    run.backward(tiny)
    report = run.step(measure=True)
    sums = [run.optimizer.state[p]["exp_avg"].abs().sum().item() for p in run.params]
    assert run.skipped == 0 and min(sums) > 0
    expected = start("fp32", lr=1e-2)
    expected.backward(1e-7 * F.mse_loss(expected(x, torch.arange(8.0)), y))
    assert report["grad_norm"] == pytest.approx(expected.step(measure=True)["grad_norm"], rel=0.1), (
        "the norm is that of unscaled gradients"
    )
    wanted = [expected.optimizer.state[p]["exp_avg"].abs().sum().item() for p in expected.params]
    assert sums == pytest.approx(wanted, rel=0.1)


def test_without_a_loss_scale_fp16_gradients_vanish_or_overflow():
    bare = dict(fp16=True, sites=["loss_scale=none"])
    (x, y) = batches(1)[0]
    run = start(bare, lr=1e-2)
    run.backward(1e-7 * F.mse_loss(run(x, torch.arange(8.0)), y))
    run.step()
    assert min(run.optimizer.state[p]["exp_avg"].abs().sum().item() for p in run.params) == 0
    run = start(bare, lr=1e-2)
    run.backward(1e7 * F.mse_loss(run(x, torch.arange(8.0)), y))
    report = run.step(measure=True)
    assert report["nonfinite_grads"] > 0 and report["skipped_steps"] == 0 and "loss_scale" not in report
    assert not all(p.isfinite().all() for p in run.params)


def test_the_loss_scale_doubles_after_steps_without_overflow():
    run = start("fp16", lr=1e-3, growth_interval=2)
    train(run, 4)
    assert run.skipped == 0 and run.scaler.get_scale() == 4 * 65536


def test_only_fp16_scales():
    for name in ("fp32", "bf16", "stochastic"):
        run = start(name)
        (report,) = train(run, 1, measure=True)
        assert not run.scaler.is_enabled() and "loss_scale" not in report and report["skipped_steps"] == 0


# -- islands


ISLANDS = {
    "none": (),
    "norm": ("norm",),
    "embed": ("time_embed",),
    "final": ("out",),
    "norm+embed": ("norm", "time_embed"),
    "norm+embed+final": ("norm", "time_embed", "out"),
}


@pytest.mark.parametrize("islands", ISLANDS)
def test_islands_stay_fp32_and_train(islands):
    model = net()
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = start(dict(pure_bf16=True, stochastic=True, sites=[f"islands={islands}"]), model, lr=1e-2, clip_grad=1.0)
    for n, p in model.named_parameters():
        kept = n.startswith(ISLANDS[islands])
        assert p.dtype == (torch.float32 if kept else BF16), n
        assert torch.equal(p, original[n]) if kept else torch.equal(p, original[n].to(BF16)), (
            "an island starts from its fp32 weights"
        )
    seen = []
    model.middle.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model.norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    losses = [F.mse_loss(run(x, torch.arange(8.0)), y).item() for x, y in batches(1)]
    train(run, 20)
    losses += [F.mse_loss(run(x, torch.arange(8.0)), y).item() for x, y in batches(1)]
    assert losses[1] < losses[0] and set(seen) == {BF16}, "the rest of the net is bf16"
    count = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    row = next(r for r in run.ledger().rows if r["site"] == "islands")
    assert row["value"] == islands and (islands == "none" or f"{count:,} of" in row["why"])


def test_island_modules_by_kind_and_name():
    model = nn.ModuleDict(
        {
            "label_embed": nn.Embedding(3, 4),
            "block": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4)),
            "final": nn.ModuleDict({"norm": nn.RMSNorm(4), "linear": nn.Linear(4, 4)}),
            "layout": nn.Linear(4, 4),
            "up": nn.ModuleDict({"final": nn.Linear(4, 4), "out": nn.Linear(4, 4)}),
            "outer": nn.Linear(4, 4),
        }
    )
    names = {m: n for n, m in model.named_modules()}
    found = lambda islands: {names[m] for m in island_modules(model, islands)}
    assert found("none") == set()
    assert found("norm") == {"block.0", "block.2", "final.norm"}
    assert found("embed") == {"label_embed"}
    assert found("final") == {"final.norm", "final.linear", "up.final"}
    assert found("norm+final") == found("norm") | found("final")
    assert len(island_modules(model, "norm+final")) == 5, "each module once"
    assert island_modules(net(), "final")[0].out_channels == 1
    for islands in ("final", "norm", "norm+embed"):
        refused(
            lambda: island_modules(nn.Sequential(nn.Linear(2, 2)), islands),
            f"islands={islands}",
            "this net has no",
            "leave",
        )


def test_running_statistics_of_an_island_stay_fp32():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    model[1].running_mean.fill_(1 / 3)
    run = start(dict(pure_bf16=True, sites=["islands=norm"]), model)
    assert same(model[1].running_mean, torch.full((4,), 1 / 3)) and model[1].num_batches_tracked.dtype == torch.int64
    run(torch.randn(2, 1, 4, 4))
    assert model[1].running_mean.dtype == torch.float32 and model[1].num_batches_tracked == 1


# ----------------------------------------------------------------------------------------------------------------------
# Copies for generation


@pytest.mark.parametrize("name", ["fp32", "bf16", "stochastic", "kahan", "split", "islands", "bf16 average"])
@pytest.mark.parametrize("generation", ["compute", "fp32", "bf16", "autocast"])
def test_generator_holds_the_asked_weights_in_the_asked_precision(name, generation):
    flags = RECIPES[name]
    run = start({**flags, "sites": [*flags.get("sites", ()), f"generation={generation}"]}, lr=1e-2, ema_decay=0.9)
    train(run, 5)
    inside = []
    for source in ("ema", "raw"):
        got = run.generator(source)
        for (n, p), trained in zip(got.model.named_parameters(), run.params):
            assert p.dtype == {"compute": trained.dtype, "bf16": BF16}.get(generation, torch.float32)
            assert torch.equal(p, run.weights(source)[n].to(p.dtype)), "the weights that were asked for"
            assert not p.requires_grad and p.data_ptr() != trained.data_ptr()
        assert not got.model.training
        got.model.middle.register_forward_hook(lambda m, args, out: inside.append(out.dtype))
        out = got(batches(1)[0][0], torch.arange(8.0))
        assert out.dtype == torch.float32 and not out.requires_grad
        low = name != "fp32" if generation == "compute" else generation in ("bf16", "autocast")
        assert inside[-1] == (BF16 if low else torch.float32)
    assert not torch.equal(run.generator("ema").model.out.weight, run.generator("raw").model.out.weight)
    assert run.model.training and all(p.requires_grad for p in run.params), "training goes on"
    train(run, 1)


def test_generation_by_fp32_reads_the_exact_master():
    run = start(dict(pure_bf16=True, master="split", sites=["generation=fp32"]), lr=1e-2)
    train(run, 3)
    weight = run.generator("raw").model.middle.weight
    assert same(weight.detach(), exact_weight(run.model.middle.weight.detach(), run.low_part(run.model.middle.weight)))
    assert (weight != run.model.middle.weight.float()).any()


def test_further_averages_ride_along():
    run = start("stochastic", ema_decay=0.9, averages=["0.5:fp32", "0.9:bf16", "0.9:fp32"], lr=1e-2)
    train(run, 10)
    assert list(run.averages) == ["ema", "0.5:fp32", "0.9:bf16", "0.9:fp32"]
    assert all(same(a, b) for a, b in zip(run.weights("ema").values(), run.weights("0.9:fp32").values()))
    assert {w.dtype for w in run.weights("0.9:bf16").values()} == {BF16}
    assert not torch.equal(run.generator("0.5:fp32").model.out.weight, run.generator("ema").model.out.weight)
    refused(lambda: start("fp32", averages=["0.9"]), "DECAY:DTYPE")
    refused(lambda: run.generator("0.8:fp32"), "raw, ema, 0.5:fp32")


# ----------------------------------------------------------------------------------------------------------------------
# What rounding does


def first_step(name, weights, lr, **options):
    """(run, weights before, report) of the first step of a model that is one parameter: |update| is lr everywhere."""
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(weights.clone())
    run = start(name, model, lr=lr, **options)
    before = model.weight.detach().clone()
    model.weight.grad = (
        torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)).sign().to(model.weight.dtype)
    )
    return run, before, run.step(measure=True)


def bf16_weights(std, n=65536):
    return (torch.randn(n, 1, generator=torch.Generator().manual_seed(0)) * std).to(BF16).float()


def ulps(weights):
    """Spacing of bf16 at |weights|."""
    return 2.0 ** (torch.frexp(weights.double())[1].double() - 8)


@pytest.mark.parametrize(
    "std, lr, low, high",
    [(0.02, 1e-4, 0.83, 0.93), (0.05, 1e-4, 0.42, 0.52), (0.1, 1e-4, 0.20, 0.30), (0.05, 1e-5, 0.04, 0.08)],
)
def test_survival_to_nearest_is_as_predicted(std, lr, low, high):
    weights = bf16_weights(std)
    run, before, report = first_step("pure_bf16", weights, lr)
    predicted = (lr > ulps(weights) / 2).double().mean().item()
    assert report["update_survival"] == pytest.approx(predicted, abs=0.02)
    assert low < report["update_survival"] < high  # measured elsewhere: 88, 47, 25 and 6 %
    assert report["update_survival"] == pytest.approx((run.params[0] != before).double().mean().item(), abs=1e-6)
    assert report["update_ratio"] == pytest.approx(lr / std, rel=0.02)


def test_survival_with_stochastic_rounding_is_the_update_in_ulps():
    weights = bf16_weights(0.05)
    _, _, report = first_step("stochastic", weights, 1e-5)
    predicted = (
        (1e-5 / ulps(weights)).clamp(max=1).mean().item()
    )  # an update of a tenth of an ulp moves one weight in ten, by ten times as much
    assert report["update_survival"] == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize(
    "name, least",
    [("fp32", 1.0), ("split", 1.0), ("fp32 master", 1.0), ("kahan", 0.99), ("kahan+stochastic", 0.98), ("bf16", 1.0)],
)
def test_exact_ways_to_hold_a_weight_lose_no_update(name, least):
    _, _, report = first_step(name, bf16_weights(0.05), 1e-5)
    assert report["update_survival"] >= least


def test_weight_decay_alone_counts_as_a_wanted_update():
    for name, survived in (("pure_bf16", 0.0), ("split", 1.0)):
        model = nn.Linear(8, 8, bias=False)
        run = start(name, model, lr=1e-3, weight_decay=0.01)
        model.weight.grad = torch.zeros_like(model.weight)
        assert run.step(measure=True)["update_survival"] == pytest.approx(survived, abs=0.02)


def test_frozen_second_moment_and_average_show():
    moved = {}
    for name, sites in (("pure_bf16", ["ema=bf16"]), ("fp32", [])):
        run = start({**RECIPES[name], "sites": sites}, nn.Linear(64, 64, bias=False), lr=1e-4, ema_decay=0.9999)
        p = run.params[0]
        for step in range(30):
            p.grad = torch.full_like(p, 1.0 if step < 20 else 0.01)
            report = run.step(measure=True)
        moved[name] = (report["exp_avg_sq_moved"], report["ema_moved"])
    assert moved["pure_bf16"][0] == 0.0 and moved["pure_bf16"][1] < 0.02  # only entries near 0 have ulps small enough
    assert moved["fp32"][0] == 1.0 and moved["fp32"][1] > 0.95


def test_nonfinite_gradients_are_counted_not_hidden():
    run = start("stochastic")
    train(run, 1)
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    run.model.out.weight.grad.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=BF16)
    report = run.step(measure=True)
    assert report["nonfinite_grads"] == 3 and not math.isfinite(report["grad_norm"])
    assert run.model.out.weight.isnan().sum() == 3, "the weights show it"


def test_a_report_is_made_only_when_asked_and_is_plain_numbers():
    run = start("stochastic")
    assert train(run, 1) == [{}]
    (report,) = train(run, 1, measure=True)
    assert set(report) == {
        "update_survival",
        "update_ratio",
        "exp_avg_sq_moved",
        "ema_moved",
        "grad_norm",
        "nonfinite_grads",
        "skipped_steps",
    }
    assert json.loads(json.dumps(report)) == report


@every_recipe
def test_measuring_changes_nothing(name):
    runs = [start(name, lr=1e-2, clip_grad=1.0, ema_decay=0.9) for _ in range(2)]
    for run, measure in zip(runs, (False, True)):
        train(run, 5, measure=measure)
    for source in ("raw", "ema"):
        assert all(same(a, b) for a, b in zip(runs[0].weights(source).values(), runs[1].weights(source).values()))


@pytest.mark.parametrize("name", ["fp32", "stochastic", "split", "islands"])
def test_measuring_pairs_each_weight_with_its_own_average(monkeypatch, name):
    # large and small tensors lie in different buckets: their order is not that of the parameters
    monkeypatch.setattr(precision._Bucket, "SMALL", 100)
    run = start(name, lr=1e-2, ema_decay=0.5)
    for report in train(run, 3, measure=True):
        assert report["ema_moved"] > 0.95


def test_large_tensors_are_sampled_evenly():
    t = torch.arange(300_000.0)
    sample = Precision._sample(t)
    assert 65536 <= sample.numel() <= 2 * 65536 and sample[-1] > 299_990 and (sample.diff() == sample.diff()[0]).all()


# ----------------------------------------------------------------------------------------------------------------------
# The ledger

PEERS = [
    ("torchastic", "torchastic"),
    ("optimi", "optimi"),
    ("adamw_bf16", "adamw_bf16"),
    ("torchao", "torchao"),
    ("torch", "torch"),
]


def allocated(run):
    """Bytes after one step: (weights, gradients, their fp32 sums and optimiser; the average; the sums alone). Shared memory counts once."""
    (x, y) = batches(1)[0]
    for _ in range(run.accumulate):
        run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    sums = sum(t.nbytes for t in run.sums.values())
    gradients = (
        sum(getattr(p, "acc_grad", p.grad).nbytes for p in run.params)
        if not sums
        else sum(p.nbytes for p in run.params)
    )
    run.step()
    states = {}
    for p in run.params:
        for t in run.optimizer.state[p].values():
            if torch.is_tensor(t) and t.dim():  # a step counter is no state of a weight
                states[t.data_ptr()] = t.nbytes
    for coder in getattr(run.optimizer, "coders", {}).values():
        states.update({t.data_ptr(): t.nbytes for t in coder.tables.values()})
    return (
        sum(p.nbytes for p in run.params) + gradients + sums + sum(states.values()),
        sum(t.nbytes for t in run.ema.shadow.values()),
        sums,
    )


def check_ledger(run):
    n = sum(p.numel() for p in run.params)
    ledger = run.ledger()
    state, average, sums = allocated(run)
    assert ledger.state_bytes * n == pytest.approx(state, abs=0.01)
    size = {row["site"]: row["bytes"] for row in ledger.rows}
    assert size["ema"] * n == pytest.approx(average, abs=0.01)
    assert size["accumulate"] * n == pytest.approx(sums, abs=0.01)
    assert [row["site"] for row in ledger.rows] == list(precision.SITES)
    assert json.loads(json.dumps(ledger.json()))["bytes_per_parameter"] == ledger.state_bytes
    assert f"{ledger.state_bytes:.2f} bytes a parameter" in str(ledger) and f"{n:,} parameters" in str(ledger)
    assert run.ledger().rows == ledger.rows, "a step changes nothing"
    return ledger


@every_recipe
def test_ledger_equals_the_bytes_allocated(name):
    check_ledger(
        start(name, net(width=32), accumulate=2 if name == "islands" else 1)
    )  # 32*32*9 values: 8-bit states begin at 4,096


@pytest.mark.parametrize("optimizer, package", PEERS)
def test_ledger_of_peers(optimizer, package):
    pytest.importorskip(package)
    ledger = check_ledger(start("pure_bf16", net(width=32), optimizer=optimizer))
    assert [row["why"] for row in ledger.rows if row["site"] == "exp_avg_sq"] == [f"as {optimizer} does it"]


@pytest.mark.parametrize(
    "name, size",
    [
        ("fp32", 16),
        ("bf16", 16),
        ("fp16", 16),
        ("pure_bf16", 8),
        ("stochastic", 8),
        ("kahan", 10),
        ("kahan+stochastic", 10),
        ("split", 14),
        ("fp32 master", 16),
        ("bf16 moments", 12),
    ],
)
def test_bytes_a_parameter(name, size):
    ledger = start(name).ledger()
    assert ledger.state_bytes == size and f"optimiser: {size}.00 bytes" in str(ledger)


def test_ledger_says_why():
    rows = {row["site"]: row for row in start("split").ledger().rows}
    assert rows["master"]["value"] == "split" and "exact" in rows["master"]["why"] and rows["master"]["bytes"] == 2
    assert rows["ema"]["value"] == "fp32" and "fp32" in rows["ema"]["why"] and rows["timesteps"]["bytes"] is None


# ----------------------------------------------------------------------------------------------------------------------
# State


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_recipe
def test_saved_and_loaded_run_continues_bit_for_bit(name):
    options = dict(
        lr=1e-2, ema_decay=0.9, seed=3, clip_grad=1.0, weight_decay=0.1, accumulate=2, averages=["0.5:bf16:stochastic"]
    )
    run = start(name, net(width=32), **options)
    train(run, 3)
    saved = through_a_file(run.state_dict())
    train(run, 3, seed=1)
    other = start(name, net(seed=1, width=32), **options)
    other.load_state_dict(saved)
    train(other, 3, seed=1)
    for source in ("raw", *run.averages):
        for (n, a), b in zip(run.weights(source).items(), other.weights(source).values()):
            assert same(a, b), f"{source} {n}"
    for p, q in zip(run.params, other.params):
        assert same(p.detach(), q.detach())
        for key, a in run.optimizer.state[p].items():
            b = other.optimizer.state[q][key]
            assert same(a, b) if torch.is_tensor(a) else a == b
    assert run.scaler.state_dict() == other.scaler.state_dict() and run.skipped == other.skipped


@pytest.mark.parametrize("optimizer", ["torch", "optimi"])
def test_peers_continue_bit_for_bit(optimizer):
    pytest.importorskip(optimizer)
    run = start("pure_bf16", optimizer=optimizer, lr=1e-2)
    train(run, 3)
    saved = through_a_file(run.state_dict())
    other = start("pure_bf16", net(seed=1), optimizer=optimizer, lr=1e-2)
    other.load_state_dict(saved)
    for r in (run, other):
        train(r, 3, seed=1)
    assert all(same(a.detach(), b.detach()) for a, b in zip(run.params, other.params))


def test_runs_of_other_recipes_and_models_are_refused():
    saved = start("stochastic").state_dict()
    refused(lambda: start("split").load_state_dict(saved), "another model or recipe")
    refused(lambda: start("bf16 average").load_state_dict(saved), "another ema dtype")


def test_equal_seeds_repeat_and_others_do_not():
    runs = [start("stochastic", seed=seed, lr=1e-2) for seed in (0, 0, 1)]
    for run in runs:
        train(run, 5)
    same_weights = [
        all(same(a, b) for a, b in zip(runs[0].weights("raw").values(), r.weights("raw").values())) for r in runs
    ]
    assert same_weights == [True, True, False]


# ----------------------------------------------------------------------------------------------------------------------
# Peers


@pytest.mark.parametrize("optimizer, package", PEERS)
def test_peers_train_and_are_measured(optimizer, package):
    pytest.importorskip(package)
    torch.manual_seed(0)
    run = start("pure_bf16", optimizer=optimizer, lr=1e-2, clip_grad=1.0, ema_decay=0.9)
    x, y = batches(1)[0]
    loss = lambda: F.mse_loss(run(x, torch.arange(8.0)), y).item()
    before = loss()
    reports = train(run, 20, measure=True)
    assert loss() < 0.8 * before
    assert all(0 < r["update_survival"] <= 1 and math.isfinite(r["grad_norm"]) for r in reports)
    assert all(r["exp_avg_sq_moved"] > 0 for r in reports[1:])  # peers make their moments in the first step


def test_torchastic_accumulates_by_itself_and_stands_unused_parameters():
    pytest.importorskip("torchastic")
    run = start("pure_bf16", optimizer="torchastic", accumulate=4, lr=1e-2)
    before = run.model.out.weight.detach().clone()
    unused = run.model.time_embed.weight.detach().clone()
    for x, y in batches(4):
        run.backward(F.mse_loss(run(x), y))  # no timestep: time_embed gets no gradient
    run.step()
    assert not same(run.model.out.weight.detach(), before) and same(run.model.time_embed.weight.detach(), unused)


@pytest.mark.parametrize("name, optimizer", [("opt8bit", "adamw"), ("opt8bit", "bitsandbytes"), ("fp32", "adamw")])
def test_the_update_that_is_expected_is_the_one_that_fp32_weights_take(name, optimizer):
    """Also of bitsandbytes' step, from its own codes: a reading of its moments that was off would show."""
    run = start(name, net(width=24), optimizer=optimizer, lr=1e-2, weight_decay=0.1)
    train(run, 3)
    p, state = run.model.middle.weight, run.optimizer.state[run.model.middle.weight]
    assert p.numel() >= 4096 and any(t.dtype == torch.uint8 for t in state.values() if torch.is_tensor(t)) == (name == "opt8bit")
    x, y = batches(1, seed=7)[0]
    run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    held = p.detach().flatten().clone()
    expected = run._intended(p, p.grad.flatten().clone(), held, run.moment(p, "exp_avg_sq").flatten())
    run.step()
    moved = p.detach().flatten() - held
    assert (moved - expected).norm() < 1e-4 * expected.norm() and expected.norm() > 0


PEER_REFUSALS = [
    ("sgd", {}, ["--optimizer sgd", "unknown", "torchastic"]),
    ("torchastic", {}, ["--optimizer torchastic", "bf16 parameters only", "--pure_bf16"]),
    ("optimi", dict(bf16=True), ["--optimizer optimi", "--pure_bf16"]),
    ("torchao", dict(pure_bf16=True, sites=["islands=norm"]), ["--optimizer torchao", "no islands"]),
    ("torchastic", dict(pure_bf16=True, stochastic=True), ["--optimizer torchastic", "drop --stochastic"]),
    ("torch", dict(pure_bf16=True, kahan=True), ["--optimizer torch", "--kahan"]),
    ("torch", dict(pure_bf16=True, master="split"), ["--optimizer torch", "--master"]),
    ("torch", dict(opt8bit=True), ["--opt8bit", "drop --optimizer torch"]),
    ("torchao", dict(pure_bf16=True, opt4bit=True), ["--opt4bit", "drop --optimizer torchao"]),
    ("bitsandbytes", dict(pure_bf16=True), ["AdamW8bit", "add --opt8bit"]),
    ("bitsandbytes", dict(opt4bit=True), ["AdamW8bit", "add --opt8bit"]),
    ("bitsandbytes", dict(pure_bf16=True, stochastic=True, opt8bit=True), ["--optimizer bitsandbytes", "drop --stochastic"]),
]


@pytest.mark.parametrize("optimizer, flags, words", PEER_REFUSALS, ids=lambda x: "")
def test_peers_refuse_what_they_cannot_serve(optimizer, flags, words):
    params = [nn.Parameter(torch.ones(3))]
    refused(
        lambda: build_optimizer(
            optimizer, params, recipe(**flags), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, seed=0
        ),
        *words,
    )


def test_our_optimizer_takes_its_settings_from_the_recipe():
    for name, flags in RECIPES.items():
        r = recipe(**flags)
        optimizer = build_optimizer(
            "adamw",
            [nn.Parameter(torch.ones(3, dtype=BF16))],
            r,
            lr=1e-3,
            betas=(0.8, 0.9),
            eps=1e-6,
            weight_decay=0.2,
            seed=9,
        )
        assert isinstance(optimizer, AdamW)
        assert (optimizer.update, optimizer.kahan, optimizer.master, optimizer.seed) == (
            r.update,
            r.kahan == "on",
            r.master,
            9,
        )
        assert optimizer.moments == {
            name: precision.DTYPES.get(getattr(r, name), torch.float32) for name in ("exp_avg", "exp_avg_sq")
        }
        assert set(optimizer.coders) == {name for name in optimizer.moments if getattr(r, name) in precision.CODES}
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 1e-6, 0.2)
    assert Recipe() == recipe() and list(itertools.islice(RECIPES, 1)) == ["fp32"]
