"""precision.Precision: what a stranger may give it, and what it refuses."""

import math

import common
import pytest
import torch
import torch.distributed as dist
from common import net, refused, train
from torch import nn

from lowprec.precision import Precision, recipe

eager = common.eager


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(TypeError, match="'learning_rate'"):
        Precision(net(), recipe(), learning_rate=1.0)
    assert Precision(net(), recipe(), sparse24_decay=None).recipe == recipe()


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def test_a_parameter_may_be_frozen_for_a_while():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    run, seen = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=0.1), []
    for trained in (False, True):
        model[0].requires_grad_(trained)
        run.backward(run(torch.ones(2, 8)).sum())
        run.step()
        seen.append(model[0].weight.detach().clone())
    assert not torch.equal(*seen)


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
