"""fp8.py: its options, and the backends that do its products."""

import contextlib
import sys
import types

import common
import pytest
import torch
from common import cpu_scales_rows, refused, through_a_file
from eight_bit import draw, method, net, snr
from torch import nn

from lowprec.layers import fp8, fp8_backends, quantise
from lowprec.layers.fp8 import FP8, Options, convert
from lowprec.precision import Precision, Recipe, recipe

BF16 = torch.bfloat16
eager = common.eager


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(backend="cutlass"), ["fp8_backend='cutlass'", "auto, te, torchao, scaled_mm, emulate"]),
        (dict(format="e3m4"), ["fp8_format='e3m4'", "hybrid, e4m3, e5m2"]),
        (dict(recipe="block"), ["fp8_recipe='block'"]),
        (dict(recipe="delayed", amax_compute_algo="mean"), ["amax_compute_algo='mean'", "max, most_recent"]),
        (dict(recipe="delayed", amax_history_len=0), ["amax_history_len=0"]),
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
        refused(lambda: options.resolve(device), *words)

    says(Options(backend="te"), "cpu", "--fp8_backend te", "requirements-te.txt", all_work)
    says(Options(backend="te", recipe="rowwise"), "cpu", f"no rowwise scaling; {all_work}")
    says(Options(backend="torchao", recipe="delayed"), "cpu", f"torchao has no delayed scaling; {works}")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    says(Options(backend="torchao"), "cpu", "torchao can't be imported", works)
    says(Options(), "mps", "mps", "use --bf16")


def test_a_meta_device_settles_nothing():
    assert Options().resolve("meta") == Options()
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
    assert Options(**options).resolve("cuda").backend == chosen
    monkeypatch.setattr("lowprec.formats.fp8_cores", lambda device: False)
    assert Options(**options).resolve("cuda").backend == "emulate"
    assert Options(**options).resolve("cpu").backend == "scaled_mm"
    if "te" in installed:
        refused(lambda: Options(backend="te").resolve("cuda"), "compute capability 8.9")


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
    assert "Transformer Engine" in str(run.ledger())
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
