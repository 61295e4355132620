"""slips.py, and what else a first hour with the library gets wrong: one line each. Micro-batches of unequal
weight.
"""

import warnings

import common
import pytest
import torch
import torch.nn.functional as F
from common import refused
from torch import nn

from lowprec.optimizers.average import EMA
from lowprec.parts.micro_batches import MicroBatches
from lowprec.precision import Precision
from lowprec.recipes import recipe

eager = common.eager
LOW = dict(pure_bf16=True, stochastic=True)
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6))


def started(**options):
    return Precision(mlp(), recipe(**LOW), lr=1e-2, **options)


def train(run):
    run.backward(F.mse_loss(run(X), X))
    run.step()


@pytest.mark.parametrize("flags", [LOW, dict(fp16=True), dict()], ids=str)
def test_the_optimisers_own_step_is_refused(flags):
    run = Precision(mlp(), recipe(**flags), lr=1e-2)
    run.backward(F.mse_loss(run(X), X))
    refused(run.optimizer.step, "call run.step()", "average")
    run.step()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_layer_replaced_after_precision_is_refused_at_the_next_step(steps_before):
    run = started()
    for _ in range(steps_before):
        train(run)
    run.model[2] = nn.Linear(8, 6).bfloat16()
    refused(lambda: train(run), "parameter 2.weight", "not in the model")


@pytest.mark.parametrize("steps_before", [3, 80])
def test_a_layer_added_after_precision_is_refused_within_64_steps(steps_before):
    run = started()
    for _ in range(steps_before):
        train(run)
    run.model.append(nn.Linear(6, 6).bfloat16())

    def go_on():
        for _ in range(64):
            train(run)

    refused(go_on, "parameter 3.weight", "not in the model")


def backward(of):
    run = started()
    run.backward(of(run(X).square()))


def cast_since():
    run = started()
    run.model.float()
    run(X)


def bare_backward(run):
    F.mse_loss(run(X), X).backward()
    run.step()


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters())
MISTAKES = {
    "a dict": (lambda: Precision(mlp(), LOW), ["this is a dict", "recipe("]),
    "an empty dict": (lambda: Precision(mlp(), {}), ["this is a dict"]),
    "flags": (lambda: Precision(mlp(), **LOW), ["belongs to the recipe", "recipe(pure_bf16=True)"]),
    "one site": (lambda: recipe(sites="ema=bf16"), ["sites=['ema=bf16']"]),
    "one module": (lambda: started(fp32_modules="0"), ["fp32_modules=['0']"]),
    "a group without parameters": (lambda: started(groups=[{"lr": 1}]), ['its "params"']),
    "a rank that is no number": (lambda: started(lora=True), ["lora=True", "whole number"]),
    "a rank below 1": (lambda: started(lora=-1), ["lora=-1", "whole number"]),
    "an optimiser": (lambda: Precision(mlp(), optimizer=SGD), ["the class SGD"]),
    "a rate for a stranger": (
        lambda: Precision(mlp(), lr=0.3, optimizer=torch.optim.SGD),
        ["lr=0.3", "functools.partial(torch.optim.SGD, lr=0.3)"],
    ),
    "an unknown site of a copy": (lambda: started().frozen("raw", generation="bf61"), ["bf61", "choose"]),
    "one average": (lambda: started(averages="0.9:fp32"), ["averages=['0.9:fp32']"]),
    "a loss of each example": (lambda: backward(lambda loss: loss.mean(1)), ["one number", "float32 [8]"]),
    "a detached loss": (lambda: backward(lambda loss: loss.mean().detach()), ["float32 []", "requires_grad"]),
    "losses by name": (lambda: backward(lambda loss: {"loss": loss.mean()}), ["this is a dict"]),
    "a net that was cast": (cast_since, ["cast after Precision was made", "assign=True"]),
    "a loss's own backward": (
        lambda: bare_backward(started(accumulate=2)),
        ["mean", "call run.backward(loss)"],
    ),
    "a loss that is not scaled": (
        lambda: bare_backward(Precision(mlp(), recipe(fp16=True))),
        ["fp16", "call run.backward(loss)"],
    ),
    "parameters without names": (lambda: EMA(mlp().parameters(), 0.9), ["list of (name, parameter)"]),
    "a run for a model": (lambda: Precision(started()), ["this is a Precision"]),
}


@pytest.mark.parametrize("call, words", MISTAKES.values(), ids=MISTAKES)
def test_arguments_of_the_wrong_kind(call, words):
    refused(call, *words)


# ---- Micro-batches -----------------------------------------------------------------------------------------


def test_missing_micro_batches_are_said_once():
    run = started(accumulate=4)
    with pytest.warns(UserWarning, match="after 1 micro-batches of accumulate=4"):
        train(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run)
        for _ in range(3):
            run.backward(F.mse_loss(run(X), X))
        train(run)


IDS = torch.randint(0, 50, (6, 16), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, 1).clone()
for row, length in enumerate((16, 2, 9, 1, 16, 4)):
    LABELS[row, length:] = -100


def language_gradient(parts, flags, weighted=True, **options):
    """The gradient of a net of tokens that a step takes, of a batch in so many parts, and the run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    run = Precision(net, recipe(**flags), lr=0.1, optimizer="sgd", momentum=0.0, **options)
    before = run.weights("raw")["1.weight"].float().clone()
    for ids, labels in zip(IDS.chunk(parts), LABELS.chunk(parts), strict=True):
        loss = F.cross_entropy(run(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
        run.backward(loss, weight=(labels != -100).sum() if weighted else None)
    run.step()
    return run.weights("raw")["1.weight"].float() - before, run


@pytest.mark.parametrize(
    "flags, error",
    [({}, 1e-5), (dict(fp16=True), 1e-2), (dict(pure_bf16=True, master="split"), 2e-2)],
    ids=["fp32", "fp16", "bf16"],
)
@pytest.mark.parametrize("parts, accumulate", [(6, 6), (3, 1), (2, 4)])
def test_weights_give_the_gradient_of_the_whole_batch(flags, error, parts, accumulate):
    whole, _ = language_gradient(1, flags, weighted=False)
    found, run = language_gradient(parts, flags, accumulate=accumulate)
    assert (found - whole).norm() < error * whole.norm()
    as_equals, _ = language_gradient(parts, flags, weighted=False, accumulate=parts)
    assert (as_equals - whole).norm() > 0.1 * whole.norm()
    assert not run.part(MicroBatches).total  # the next step starts anew


def test_equal_weights_are_no_weights_to_the_bit():
    run = Precision(mlp(), recipe(), lr=1e-2, accumulate=3)
    other = Precision(mlp(), recipe(), lr=1e-2, accumulate=3)
    for part in X.split(3):
        run.backward(run(part).square().mean())
        other.backward(other(part).square().mean(), weight=7)
    run.step()
    other.step()
    assert all(map(torch.equal, run.params, other.params))


def test_weights_that_make_no_sense():
    run = started()
    loss = run(X).mean()
    refused(lambda: run.backward(loss, weight=0), "above 0")
    run.backward(run(X).mean(), weight=2)
    refused(lambda: run.backward(loss), "every micro-batch")
    run.zero_grad()
    run.backward(run(X).mean())
    refused(lambda: run.backward(loss, weight=2), "every micro-batch")
    run.zero_grad()
    run.reduce_sums = lambda sums: None
    refused(lambda: run.backward(loss, weight=2), "one process alone")


def test_a_parameter_of_a_group_that_is_not_the_nets_is_refused():
    model, beside = mlp(), nn.Parameter(torch.zeros(3))
    groups = [{"params": model.parameters()}, {"params": [beside]}]
    refused(lambda: Precision(model, recipe(), groups=groups), "none of the model's")


def test_a_part_that_was_frozen_and_has_a_gradient_is_refused():
    model = mlp()
    model[0].requires_grad_(False)
    run = Precision(model, recipe(), lr=1e-2)
    train(run)
    model[0].requires_grad_(True)
    refused(lambda: train(run), "0.weight was frozen", "freeze it then")


BAD_OPTIONS = [dict(lr=-1.0), dict(groups=[{"params": []}]), dict(eps=-1.0)]


@pytest.mark.parametrize("bad", BAD_OPTIONS, ids=str)
def test_a_refused_call_leaves_the_model_as_it_is(bad):
    model, r = mlp(), recipe(pure_bf16=True, master="split")
    refused(lambda: Precision(model, r, **bad))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_adapters_are_not_put_upon_adapters():
    run = started(lora=2)
    refused(lambda: Precision(run.model, recipe(), lora=2), "has adapters already")


def test_no_clipping_may_be_written_as_none():
    train(started(clip_grad=None, clip_tensor=None))


def test_names_of_modules_may_come_from_a_generator():
    run = Precision(mlp(), recipe(**LOW), fp32_modules=(name for name in ["0"]))
    copy = run.frozen("raw", generation="bf16").net
    assert copy[0].weight.dtype == torch.float32 and copy[2].weight.dtype == torch.bfloat16
