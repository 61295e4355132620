"""precision.Precision: the documented loop, steps, accumulation, clipping, loss scaling, state."""

import copy
import inspect
import math
import textwrap
import warnings

import common
import pytest
import torch
import torch.nn.functional as F
from common import (
    BF16,
    RECIPES,
    batches,
    fp32_sums,
    net,
    refused,
    same,
    same_state,
    start,
    through_a_file,
    train,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lowprec import precision
from lowprec.parts.loss_scale import LossScale
from lowprec.precision import Precision, recipe
from lowprec.rounding import DTYPE_OF_NAME

eager, alone = common.eager, common.alone

# ---- The loop in the header of precision.py ----------------------------------------------------------------


def documented_loop():
    """The indented block of the module's docstring, without the numbers of its lines."""
    lines = [line for line in precision.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 7 and lines[0].lstrip().startswith("run = Precision(")
    return textwrap.dedent("\n".join(lines))


def six_lines(flags, device="cpu"):
    """Runs the documented loop as it stands, with another recipe."""
    model, (x, y) = net().to(device), batches(1, seed=1, device=device)[0]
    before = F.mse_loss(model(x), y).item()
    names = dict(Precision=Precision, recipe=lambda **shown: recipe(**flags), model=model, F=F)
    names["loader"] = batches(60, device=device)
    exec(documented_loop(), names)
    assert F.mse_loss(names["run"](x), y).item() < 0.6 * before, "nothing was learned"
    out = names["net"](x)
    assert out.shape == y.shape and out.dtype == torch.float32 and out.isfinite().all()


@pytest.mark.parametrize("name", ["fp32", "fp16", "stochastic"])
def test_six_lines_turn_a_loop_into_any_recipe(name, capsys):
    six_lines(RECIPES[name])
    assert "bytes a parameter" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "pure_bf16", "stochastic", "kahan", "split"])
def test_six_lines_on_cuda(name):
    six_lines(RECIPES[name], "cuda")


# ---- A step ------------------------------------------------------------------------------------------------


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
    assert all(same(p, q) for p, q in zip(run.params, model.parameters(), strict=True))


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
    assert all(same(p, q) for p, q in zip(run.params, model.parameters(), strict=True))
    fp32 = start("fp32", lr=1e-2)
    train(fp32, 5)
    assert not all(same(p, q) for p, q in zip(run.params, fp32.params, strict=True)), "autocast did nothing"


def test_a_step_without_gradients_is_refused():
    for name in ("fp32", "fp16", "split"):
        run = start(name)
        refused(run.step, "no gradients", "backward(loss)")
        refused(lambda run=run: run.step(measure=True), "no gradients")


def test_frozen_and_unused_parameters_are_left_alone():
    model = net()
    model.stem.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = start("fp32", model, weight_decay=0.1)
    for x, y in batches(2):
        run.backward(F.mse_loss(run(x), y))  # no timestep: time_embed gets no gradient
        run.step(measure=True)
    after = dict(model.named_parameters())
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert moved == {n for n in after if n.startswith(("norm", "middle", "out"))}
    assert "stem.weight" not in dict(run.named_params) and "stem.weight" not in run.ema.shadow
    assert same(run.weights("ema")["stem.weight"], before["stem.weight"])


@pytest.mark.parametrize("name", ["fp32", "stochastic", "kahan", "split", "fp8 moments", "islands"])
def test_a_step_reads_no_number_back(name):
    # on a GPU it would wait for it; on the meta device there is none, and reading one is an error
    accumulate = 2 if name == "islands" else 1
    model = net(width=32).to("meta")
    run = start(name, model, clip_grad=1.0, accumulate=accumulate, averages=["0.9:bf16"])
    x = torch.empty(8, 1, 8, 8, device="meta")
    for _ in range(2):
        for _ in range(accumulate):
            run.backward(F.mse_loss(run(x, torch.empty(8, device="meta")), x))
        assert run.step() == {}
    assert run.params[0].is_meta and run.optimizer.state[run.params[0]]["step"] == 2


# ---- Gradient accumulation ---------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.a(x)


def accumulated(site, micro_batches=64):
    """(what the optimiser is handed, the mean of the micro-batches' bf16 gradients in fp64)."""
    flags = dict(pure_bf16=True, sites=[f"accumulate={site}"])
    run, alone = (start(flags, Linear(), accumulate=m) for m in (micro_batches, 1))
    total = 0
    g = torch.Generator().manual_seed(1)
    for _ in range(micro_batches):
        x, y = (torch.randn(16, 64, generator=g) for _ in range(2))
        run.backward(F.mse_loss(run(x), y + 0.5 * x))
        alone.backward(F.mse_loss(alone(x), y + 0.5 * x))
        total = total + alone.params[0].grad.double()
        alone.params[0].grad = None
    handed = fp32_sums(run)[run.params[0]] if site == "fp32" else run.params[0].grad
    return run, handed, total / micro_batches


def test_fp32_accumulation_is_exact_and_bf16_accumulation_is_not():
    error = {}
    for site in ("fp32", "bf16"):
        run, got, exact = accumulated(site)
        assert got.dtype == DTYPE_OF_NAME[site] and run.keeps_sums == (site == "fp32")
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
    assert state["step"] == 1 and not fp32_sums(run)


def test_ranks_can_sum_their_gradients():
    run = start(dict(pure_bf16=True, master="split", sites=["accumulate=fp32"]), accumulate=2)
    handed = []
    run.reduce_sums = lambda sums: handed.append([t.dtype for t in sums.values()])
    train(run, 1)
    assert handed == [[torch.float32] * len(run.params)]


# ---- Clipping and loss scaling -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "torch"])
def test_clipping_equals_torch(optimizer):
    run = start("fp32", lr=1e-2, clip_grad=0.05, optimizer=optimizer)
    free, model = start("fp32", lr=1e-2), net()
    reference = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    reports = train(run, 10, measure=True)
    train(free, 10)
    clipped = 0
    for (x, y), report in zip(batches(10), reports, strict=True):
        F.mse_loss(model(x, torch.arange(8.0)), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-3), "the norm before clipping"
        clipped += norm > 0.05
        reference.step()
        reference.zero_grad()
    assert clipped > 5
    for p, q in zip(run.params, model.parameters(), strict=True):
        ours, theirs = run.optimizer.state[p], reference.state[q]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    squares = [sum(r.optimizer.moment(p, "exp_avg_sq").sum() for p in r.params) for r in (free, run)]
    assert squares[0] > 2 * squares[1]


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
    for p, q in zip(*(run.params for run in runs), strict=True):
        assert same(runs[0].optimizer.state[p]["exp_avg_sq"], runs[1].optimizer.state[q]["exp_avg_sq"])


def test_an_overflow_skips_the_step_and_is_counted():
    run = start("fp16", lr=1e-2)
    train(run, 2)
    scaling = run.part(LossScale)
    scale, skipped = scaling.scaler.get_scale(), scaling.skipped
    before = {n: w.clone() for n, w in run.weights("raw").items()}
    states = copy.deepcopy(run.optimizer.state_dict()["state"])
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x * 1e6, torch.arange(8.0)), y))  # beyond 65504
    report = run.step(measure=True)
    assert scaling.skipped == report["skipped_steps"] == skipped + 1
    assert report["loss_scale"] == scaling.scaler.get_scale() == scale / 2
    assert report["nonfinite_grads"] > 0 and "update_survival" not in report
    assert all(same(run.weights("raw")[n], before[n]) for n in before)
    after = run.optimizer.state_dict()["state"]
    assert all(same_state(after[i], states[i]) for i in states)
    (report,) = train(run, 1, measure=True)
    assert scaling.skipped == skipped + 1 and report["update_survival"] > 0.9
    assert not all(same(run.weights("raw")[n], before[n]) for n in before)


def test_loss_scaling_changes_nothing_but_the_range():
    run = start("fp16", lr=1e-2)
    (x, y) = batches(1)[0]
    tiny = 1e-7 * F.mse_loss(run(x, torch.arange(8.0)), y)  # gradients that fp16 alone would flush to 0
    run.backward(tiny)
    report = run.step(measure=True)
    sums = [run.optimizer.state[p]["exp_avg"].abs().sum().item() for p in run.params]
    assert run.part(LossScale).skipped == 0 and min(sums) > 0
    expected = start("fp32", lr=1e-2)
    expected.backward(1e-7 * F.mse_loss(expected(x, torch.arange(8.0)), y))
    norm = expected.step(measure=True)["grad_norm"]
    assert report["grad_norm"] == pytest.approx(norm, rel=0.1), "the norm is that of unscaled gradients"
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


def test_the_loss_scale_starts_grows_and_falls_as_told():
    options = dict(init_loss_scale=64.0, growth_factor=4.0, growth_interval=1, backoff_factor=0.25)
    run = start("fp16", lr=1e-3, **options)
    train(run, 1)
    scaling = run.part(LossScale)
    assert scaling.scaler.get_scale() == 256
    x, y = batches(1)[0]
    run.backward(1e7 * F.mse_loss(run(x, torch.arange(8.0)), y))
    run.step()
    assert scaling.skipped == 1 and scaling.scaler.get_scale() == 64


class Overflowing(nn.Module):
    """Its product `second` gives infinity in fp16, or takes gradients that are, as `where` says."""

    def __init__(self, where):
        super().__init__()
        self.first, self.second, self.where = nn.Linear(8, 8), nn.Linear(8, 8), where

    def forward(self, x):
        h = self.first(x)
        if self.where == "output":
            return self.second(h * 1e6)
        return self.second(h).float() * (1e9 if self.where == "gradient" else 1.0)


def told_of(run, count):
    """What `count` steps of a run warn of."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            run.backward(run(x).sum())
            run.step()
    assert all(warning.filename == __file__ for warning in told)
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_a_run_that_skips_every_step_says_once_where_it_overflows(where):
    run = Precision(Overflowing(where), recipe(fp16=True), lr=1e-3)
    assert told_of(run, 16) == []
    (line,) = told_of(run, 30)  # the scale has fallen from 2^16 to under 1
    place = {"output": "the output of 'second'", "gradient": "the gradient of the output of 'second'"}[where]
    assert "17 steps in a row" in line and place in line and "bf16" in line
    assert run.part(LossScale).skipped > 17
    assert not any(module._forward_hooks for module in run.model.modules())


def test_a_scale_that_falls_until_gradients_fit_is_no_fault():
    run = Precision(Overflowing("nowhere"), recipe(fp16=True), lr=1e-3, init_loss_scale=2.0**30)
    before = run.weights("raw")["first.weight"].clone()
    assert told_of(run, 30) == []
    assert 10 < run.part(LossScale).skipped < 20 and not same(before, run.weights("raw")["first.weight"])
    run = Precision(Overflowing("nowhere"), recipe(fp16=True), lr=1e-3, init_loss_scale=2.0**44)
    (line,) = told_of(run, 50)
    assert "20 steps in a row" in line and run.part(LossScale).skipped < 40


# ---- State -------------------------------------------------------------------------------------------------


def without(state, part, name):
    del state[part][name]


def of_another_kind(change):
    """A change of a state: of one of its weights."""

    def spoil(state):
        name = list(state["model"])[-1]
        state["model"][name] = change(state["model"][name])

    return spoil


def average_of_another_shape(state):
    shadow = state["averages"]["ema"]["shadow"]
    shadow[list(shadow)[-1]] = torch.zeros(9)


def moments_of_another_shape(state):
    states = state["optimizer"]["state"]
    states[max(states)]["exp_avg"] = torch.zeros(9)


SPOILT = {
    "a weight less": lambda state: without(state, "model", list(state["model"])[-1]),
    "a weight more": lambda state: state["model"].update(more=torch.zeros(3)),
    "another shape": of_another_kind(lambda t: torch.zeros(7)),
    "int32": of_another_kind(lambda t: t.int()),
    "float64": of_another_kind(lambda t: t.double()),
    "no tensor": of_another_kind(lambda t: "text"),
    "sparse": of_another_kind(lambda t: t.to_sparse()),
    "no optimiser": lambda state: state.pop("optimizer"),
    "no average": lambda state: without(state, "averages", "ema"),
    "an average without a count": lambda state: state["averages"]["ema"].update(step=None),
    "average": average_of_another_shape,
    "moments": moments_of_another_shape,
    "no loss scale": lambda state: state.update(scaler={}),
    "a loss scale of 0": lambda state: state["scaler"].update(scale=0.0),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("options", [{}, dict(lora=2)], ids=["whole", "adapters"])
def test_a_state_that_is_refused_has_changed_nothing(spoil, options):
    run = start("fp16", net(width=32), lr=1e-2, **options)
    train(run, 1)
    state = copy.deepcopy(run.state_dict())
    train(run, 2)
    before = copy.deepcopy(run.state_dict())
    spoil(state)
    refused(lambda: run.load_state_dict(state))
    for a, b in zip(tree_leaves(before), tree_leaves(run.state_dict()), strict=True):
        assert same(a, b) if torch.is_tensor(a) else a == b


def test_runs_of_other_recipes_and_models_are_refused():
    saved = start("stochastic").state_dict()
    refused(lambda: start("split").load_state_dict(saved), "another model or recipe")
    refused(lambda: start("bf16 average").load_state_dict(saved), "another ema dtype")


# ---- Without an average ------------------------------------------------------------------------------------


def test_a_run_without_an_average_has_no_bytes_of_one():
    run = start("stochastic", lr=1e-2, ema_decay=None)
    (*_, report) = train(run, 3, measure=True)
    assert "ema_moved" not in report and run.ema is None and not run.averages
    (row,) = [row for row in run.ledger().rows if row["site"] == "ema"]
    assert row["bytes"] == 0 and "ema_decay=None" in row["why"]


def test_a_run_without_an_average_draws_from_its_last_weights_saves_and_loads():
    run = start("stochastic", lr=1e-2, ema_decay=None)
    train(run, 2)
    refused(run.generator, "this run holds raw")
    ((x, _),) = batches(1)
    assert run.generator("raw")(x, torch.arange(8.0)).isfinite().all()
    again = start("stochastic", lr=1e-2, ema_decay=None)
    again.load_state_dict(through_a_file(run.state_dict()))
    train(run, 2)
    train(again, 2)
    assert all(same(a, b) for a, b in zip(run.params, again.params, strict=True))
    refused(lambda: start("stochastic").load_state_dict(run.state_dict()), "averaged weights are absent")


def test_the_signature_names_every_option():
    shown = inspect.signature(Precision).parameters
    assert list(shown)[:2] == ["model", "r"] and shown["ema_decay"].default == 0.999
    run = start("stochastic", **{name: p.default for name, p in shown.items() if p.kind is p.KEYWORD_ONLY})
    assert run.options == precision.Options() and len(shown) > 30


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(TypeError, match="'learning_rate'"):
        Precision(net(), recipe(), learning_rate=1.0)
    assert Precision(net(), recipe(), sparse24_decay=None).recipe == recipe()


def test_a_wrapped_net_is_refused_and_wrapping_the_cast_one_is_not(alone):
    wrapped = nn.parallel.DistributedDataParallel
    refused(lambda: Precision(wrapped(net()), recipe()), "DistributedDataParallel", "run.model")
    refused(lambda: Precision(nn.DataParallel(net()), recipe()), "DataParallel")
    model = net()
    early, run = wrapped(model), Precision(model, recipe(pure_bf16=True, stochastic=True))
    refused(lambda: setattr(run, "forward", early), "after Precision")
    before = run.params[0].detach().clone()
    run.forward = wrapped(run.model)
    train(run, 2)
    assert not torch.equal(run.params[0], before)
    exact = net()
    run, early = Precision(exact, recipe()), wrapped(exact)  # fp32 weights stay what they are
    run.forward = early


@pytest.mark.parametrize("options", [{}, dict(accumulate=2), dict(optimizer="muon")])
def test_a_parameter_that_comes_late_is_refused(options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    run, late = Precision(model, recipe(), **options), {"params": list(model[0].parameters())}
    model[0].requires_grad_(True)
    if "optimizer" in options:
        refused(lambda: run.optimizer.add_param_group(late), "give all groups at the start")
        return
    run.optimizer.add_param_group(late)
    run.backward(run(torch.ones(2, 8)).sum())
    refused(run.step, "requires_grad=True, and freeze it then")


def test_groups_may_come_from_a_generator_and_not_in_a_set():
    model = nn.Linear(8, 1)
    run = Precision(model, recipe(), groups=({"params": [p]} for p in model.parameters()))
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 1]
    refused(lambda: Precision(model, recipe(), groups=[{"params": set(model.parameters())}]), "a set")


def test_gradients_of_before_belong_to_no_step():
    def after(earlier):
        torch.manual_seed(0)
        model, x = nn.Linear(8, 1), torch.ones(4, 8)
        if earlier:
            (model(x) * 100).sum().backward()
        run = Precision(model, recipe(), lr=0.1, optimizer="sgd")
        run.backward(run(x).square().mean())
        run.step()
        return model.weight.detach()

    assert torch.equal(after(True), after(False))


@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True)], ids=["fp32", "bf16"])
def test_finite_masks_stay_finite(flags):
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return (super().forward(x) + mask).softmax(-1)

    mask = torch.zeros(4, 8)
    mask[1], mask[2, 1:] = torch.finfo(torch.float32).min, -math.inf
    out = Precision(Masked(8, 8), recipe(**flags))(torch.ones(4, 8), mask)
    assert out.isfinite().all() and out[2].tolist() == [1.0] + [0.0] * 7


def test_torchs_fast_path_does_not_pass_a_methods_layers_by():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    try:
        run = Precision(nn.Sequential(layer, nn.Linear(16, 2)), recipe(sparse24="srste"))
        run.model.eval()
        with_gradients = run(x).detach()
        with torch.no_grad():
            assert torch.equal(run(x), with_gradients)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_norms_of_all_parameters_travel_to_the_other_ranks_as_one(alone):
    model = net()
    for layer in (model.stem, model.middle, model.out, model):
        fully_shard(layer)
    run = start("stochastic", model, clip_grad=1.0)
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step()
    sums = [event for event in profile.events() if event.name == "c10d::allreduce_"]
    assert len(sums) == 1 and isinstance(run.params[0], DTensor)
