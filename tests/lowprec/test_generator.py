"""Copies of a run for generation, and its weights: what they hold, and that they share nothing with it."""

import copy
import functools
import gc
import types
import weakref

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, RECIPES, batches, draw, net, refused, same, start, train
from torch import nn

from lowprec.cast import without_borders
from lowprec.rounding import exact_weight

eager = common.eager
GENERATIONS = ["compute", "fp32", "bf16", "autocast", "fp16"]
every_generation = pytest.mark.parametrize("generation", GENERATIONS)


def run_of(name, generation, model=None, **options):
    flags = RECIPES[name]
    sites = [*flags.get("sites", ()), f"generation={generation}"]
    return start({**flags, "sites": sites}, model, lr=1e-2, ema_decay=0.9, **options)


# ---- What it holds -----------------------------------------------------------------------------------------


HELD = [("islands", generation) for generation in GENERATIONS]
HELD += [(name, "compute") for name in ("fp32", "bf16", "kahan", "bf16 average")] + [("fp32", "bf16")]


@pytest.mark.parametrize("name, generation", HELD)
def test_generator_holds_the_asked_weights_in_the_asked_precision(name, generation):
    run = run_of(name, generation)
    train(run, 5)
    inside = []
    for source in ("ema", "raw"):
        got = run.generator(source)
        for (n, p), trained in zip(got.net.named_parameters(), run.params, strict=True):
            assert p.dtype == {"compute": trained.dtype, "bf16": BF16}.get(generation, torch.float32)
            assert torch.equal(p, run.weights(source)[n].to(p.dtype)), "the weights that were asked for"
            assert not p.requires_grad and p.data_ptr() != trained.data_ptr()
        assert not got.net.training
        got.net.middle.register_forward_hook(lambda m, args, out: inside.append(out.dtype))
        out = got(batches(1)[0][0], torch.arange(8.0))
        assert out.dtype == torch.float32 and not out.requires_grad
        low = name != "fp32" if generation == "compute" else generation in ("bf16", "autocast")
        dtype = torch.float16 if generation == "fp16" else BF16 if low else torch.float32
        assert inside[-1] == dtype
    assert not torch.equal(run.generator("ema").net.out.weight, run.generator("raw").net.out.weight)
    assert run.model.training and all(p.requires_grad for p in run.params), "training goes on"
    train(run, 1)


def test_generation_by_fp32_reads_the_exact_master():
    run = run_of("split", "fp32")
    train(run, 3)
    weight, trained = run.generator("raw").net.middle.weight, run.model.middle.weight
    assert same(weight.detach(), exact_weight(trained.detach(), run.low_part(trained)))
    assert (weight != trained.float()).any()


def test_frozen_changes_single_sites():
    run = run_of("stochastic", "compute")
    train(run, 3)
    x, _ = batches(1)[0]
    wide, low = run.frozen("raw", generation="fp32"), run.generator("raw")
    assert wide.net.out.weight.dtype == torch.float32 and low.net.out.weight.dtype == BF16
    assert run.recipe.generation == "compute" and low.recipe == run.recipe
    torch.testing.assert_close(wide(x), low(x), atol=0.05, rtol=0.05)
    assert not torch.equal(wide(x), low(x))


def test_further_averages_ride_along():
    run = start("stochastic", ema_decay=0.9, averages=["0.5:fp32", "0.9:bf16", "0.9:fp32"], lr=1e-2)
    train(run, 10)
    assert list(run.averages) == ["ema", "0.5:fp32", "0.9:bf16", "0.9:fp32"]
    one, two = run.weights("ema"), run.weights("0.9:fp32")
    assert all(same(one[name], two[name]) for name in one)
    assert {w.dtype for w in run.weights("0.9:bf16").values()} == {BF16}
    assert not torch.equal(run.generator("0.5:fp32").net.out.weight, run.generator("ema").net.out.weight)
    refused(lambda: start("fp32", averages=["0.9"]), "DECAY:DTYPE")
    refused(lambda: run.generator("0.8:fp32"), "raw, ema, 0.5:fp32")
    refused(lambda: run.weights("emma"), "'emma'", "raw, ema")


# ---- What it shares ----------------------------------------------------------------------------------------


def storages(tensors):
    return {t.untyped_storage().data_ptr() for t in tensors}


def held_by(run):
    found = [*run.model.parameters(), *run.model.buffers()]
    for average in run.averages.values():
        found += average.shadow.values()
    for state in run.optimizer.state.values():
        found += [t for t in state.values() if torch.is_tensor(t)]
    return found


class Normed(nn.Module):
    """Statistics of a norm, a frozen layer, and one layer under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again = self.first
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, t=None):
        return self.tied(self.again(self.frozen(self.norm(self.first(x)))))


def normed(seed=0):
    torch.manual_seed(seed)
    return Normed()


def train_normed(run, steps=5):
    for step in range(steps):
        x = draw(32, 8, seed=step) + 2
        run.backward(F.mse_loss(run(x), x))
        run.step()


@every_generation
def test_a_generator_shares_nothing_with_its_run(generation):
    run = run_of("split", generation, normed())
    train_normed(run)
    before = [t.detach().clone() for t in held_by(run)]
    for source in ("ema", "raw"):
        got = run.generator(source)
        own = [*got.net.parameters(), *got.net.buffers()]
        assert not storages(own) & storages(held_by(run))
        with torch.no_grad():
            for t in own:
                t.zero_()
        got.net.train()(torch.ones(4, 8, dtype=got.net.first.weight.dtype))  # its statistics move
        assert all(torch.equal(a, b) for a, b in zip(held_by(run), before, strict=True))
        for part in ("step", "backward", "optimizer", "params", "ema", "state_dict"):
            assert not hasattr(got, part), f"a generator has no {part}"
    # and the other way round
    got = run.generator("raw")
    weights = [p.clone() for p in got.net.parameters()]
    train_normed(run, 2)
    assert all(torch.equal(p, w) for p, w in zip(got.net.parameters(), weights, strict=True))


@pytest.mark.parametrize("generation", ["compute", "fp32"])
def test_a_generator_keeps_nothing_of_its_run_alive(generation):
    run = run_of("islands", generation)
    train(run, 1)
    generator = run.generator()
    parts = [run, run.optimizer, run.model, run.ema, run.model.out.weight, run.ema.shadow["out.weight"]]
    alive = [weakref.ref(part) for part in parts]
    del run, parts
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    assert generator(batches(1)[0][0]).isfinite().all()


# ---- Hooks -------------------------------------------------------------------------------------------------


def hooks(model):
    """How many hooks of each kind a net has."""
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
    )
    return [sum(len(getattr(m, kind)) for m in model.modules()) for kind in kinds]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["stochastic", "islands"])
@pytest.mark.parametrize("generation", ["compute", "fp32", "autocast"])
def test_hooks_of_the_user_survive_and_ours_go(name, generation, when):
    model, called = net(), []

    def zero(module, args, out):
        return out * 0

    def doubled(module, args, kwargs):
        return (2 * args[0],), kwargs

    def put():
        model.middle.register_forward_hook(zero)
        model.norm.register_forward_pre_hook(doubled, with_kwargs=True)
        model.norm.register_forward_hook(lambda module, args, out: called.append(module))

    if when == "before":
        put()
    run = run_of(name, generation, model)
    if when == "after":
        put()
    train(run, 1)
    of_run = hooks(run.model)
    generator = run.generator("raw")
    x, _ = batches(1)[0]
    out = generator(x, torch.arange(8.0))
    assert called[-1] is generator.net.norm
    bias = exact_weight(model.out.bias.detach(), run.low_part(model.out.bias))
    torch.testing.assert_close(out, bias.expand_as(out), atol=1e-3, rtol=0)  # nothing comes through
    assert hooks(run.model) == of_run, "the run keeps its hooks"
    ours_stay = name == "islands" and generation == "compute"
    assert hooks(generator.net) == (of_run if ours_stay else [2, 1, 1, 0])
    train(run, 1)


def test_undo_leaves_the_original_alone():
    run = run_of("islands", "compute")
    before = hooks(run.model)
    bare = without_borders(copy.deepcopy(run.model))
    assert hooks(bare) == [0, 0, 0, 0] and hooks(run.model) == before != hooks(bare)


# ---- Weights -----------------------------------------------------------------------------------------------

WEIGHTS = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "stochastic": dict(pure_bf16=True, stochastic=True),
    "split": dict(pure_bf16=True, master="split"),
    "islands": dict(pure_bf16=True, sites=["islands=norm"]),
    "cast buffers": dict(pure_bf16=True, sites=["buffers=bf16"]),
    "bf16 average": RECIPES["bf16 average"],
}


LOADED = [(name, source) for name in WEIGHTS for source in ("ema", "raw")] + [("fp32", "0.5:bf16")]


@pytest.mark.parametrize("name, source", LOADED)
def test_weights_load_strictly_into_the_plain_net(name, source):
    model = normed()
    frozen = model.frozen.weight.detach().clone()
    run = start(WEIGHTS[name], model, lr=1e-2, ema_decay=0.9, averages=["0.5:bf16"])
    train_normed(run)
    values = run.weights(source)
    assert list(values) == list(model.state_dict())
    plain = normed(seed=1)
    plain.load_state_dict(values, strict=True)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(
            getattr(plain.norm, key), getattr(model.norm, key).to(getattr(plain.norm, key).dtype)
        )
    assert plain.norm.num_batches_tracked == 5 and plain.norm.running_mean.abs().sum() > 0
    assert torch.equal(plain.frozen.weight, frozen), "frozen weights keep their bits"
    assert values["first.weight"] is values["again.weight"] is values["tied.weight"]
    trained = dict(run.named_params)["first.weight"]
    if source == "raw":
        assert same(values["first.weight"], exact_weight(trained.detach(), run.low_part(trained)))
    else:
        assert values["first.weight"] is run.averages[source].shadow["first.weight"]
    x = draw(4, 8)
    copied = run.frozen(source, generation="fp32")
    with torch.no_grad():
        torch.testing.assert_close(copied(x), plain.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_tied_weight_is_one_in_a_generator_too(name):
    run = start(WEIGHTS[name], normed())
    train_normed(run, 1)
    for generation in GENERATIONS:
        got = run.frozen("raw", generation=generation).net
        assert got.tied.weight is got.first.weight and got.again is got.first
        assert got.norm.num_batches_tracked == 1


# ---- Functions in place of forward -------------------------------------------------------------------------


def by_closure(layer):
    own = layer.forward

    def forward(x, again=True):  # it knows itself
        return own(x) * 2 if again else forward(x)

    return forward


def by_partial(layer):
    own = layer.forward
    return functools.update_wrapper(functools.partial(lambda module, x: own(x) + module.bias, layer), own)


def by_another(layer):
    """As kohya's adapters: the method of a module that knows what it replaces."""
    adapter = nn.Module()
    adapter.own = layer.forward
    adapter.call = types.MethodType(lambda self, x: self.own(x) * 2, adapter)
    return adapter.call


def by_diffusers(layer):
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.apply_layerwise_casting(layer, torch.float8_e4m3fn, BF16)
    return layer.forward


@pytest.mark.parametrize("replace", [by_closure, by_partial, by_another, by_diffusers])
@pytest.mark.parametrize("name", ["bf16", "stochastic"])
def test_a_copy_calls_its_own_layer_where_a_function_stands_for_forward(name, replace):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net[0].requires_grad_(replace is not by_diffusers)
    net[0].forward = replace(net[0])
    run = start(RECIPES[name], net, lr=1e-2)
    x = draw(4, 8)
    generations = ["compute", "autocast" if replace is by_diffusers else "fp32"]  # it computes in bf16
    copies = [run.frozen("raw", generation=generation) for generation in generations]
    before = [each(x) for each in copies]
    for y in before:
        torch.testing.assert_close(y.float(), run(x).detach().float(), rtol=0.05, atol=0.02)
    if replace is by_partial:
        assert all(hasattr(each.net[0].forward, "__wrapped__") for each in copies), "a note of update_wrapper"
    for p in run.params:
        p.data.add_(1.0)
    for each, y in zip(copies, before, strict=True):
        assert torch.equal(each(x), y)
