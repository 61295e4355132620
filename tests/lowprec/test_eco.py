"""update='eco': what the write of a bf16 weight rounds away goes into the momentum."""

import common
import pytest
import torch
from common import BF16, draw, refused
from torch import nn

from lowprec import Precision, Watch, recipe
from lowprec.optimizers.lion import Lion
from lowprec.optimizers.muon import Muon
from lowprec.optimizers.rounded import AdamW
from lowprec.optimizers.sgd import SGD

eager = common.eager


def regression(made, p, steps=200):
    """Share of the distance to the target matrix that is left after training on noisy batches; weights near
    1, steps of 4e-4."""
    g = torch.Generator().manual_seed(1)
    target = 1 + 0.03 * draw(*p.shape, seed=2)
    before = (torch.ones(p.shape) - target).square().mean()
    for _ in range(steps):
        x = torch.randn(64, p.shape[1], generator=g)
        error = x @ (p.detach().float() - target).T + 0.01 * torch.randn(64, p.shape[0], generator=g)
        p.grad = (error.T @ x / 64).to(p.dtype)
        made.step()
    return ((p.detach().float() - target).square().mean() / before).item()


def ones(dtype):
    return nn.Parameter(torch.ones(64, 64, dtype=dtype))


WAYS = [
    (AdamW, dict(lr=4e-4, exp_avg="bf16", exp_avg_sq="bf16")),
    (SGD, dict(lr=2e-3, momentum=0.9)),
    (SGD, dict(lr=2e-3, momentum=0.9, nesterov=True)),
]


@pytest.mark.parametrize("kind, options", WAYS, ids=["adamw", "sgd", "nesterov"])
def test_steps_below_half_an_ulp_are_kept(kind, options):
    found = []
    for dtype, update in ((torch.float32, "nearest"), (BF16, "nearest"), (BF16, "eco")):
        net = nn.ParameterList([ones(dtype)])
        optimizer = kind(net.parameters(), weight_decay=0.0, compiled=False, update=update, **options)
        watch = Watch(net, optimizer, every=20)
        found.append(regression(optimizer, net[0]))
    exact, nearest, eco = found
    assert exact < 0.05 and nearest > 0.9 and eco < exact + 0.15
    assert "healthy" in str(watch)


@pytest.mark.parametrize("kind, options", WAYS, ids=["adamw", "sgd", "nesterov"])
def test_the_next_steps_add_up_to_the_error(kind, options):
    """Without further gradients, and with a second moment that stands still."""
    if kind is AdamW:
        options = dict(options, betas=(0.9, 1 - 1e-12))
    made = kind([nn.Parameter(torch.ones(3))], weight_decay=0.0, **options)
    error = torch.tensor([1e-3, 0.0, -2e-3])
    group = made.param_groups[0]
    values = made.numbers(group, 10**6)  # the bias of the moments is gone
    numbers = type(values)(*torch.tensor(values))
    moments = [torch.zeros(3), torch.full((3,), 1e-4)][: len(made.moments)]
    moments = made.feedback(error, moments, numbers)
    total = torch.zeros(3)
    for _ in range(300):
        update, moments = made.direction(torch.zeros(3), moments, numbers)
        total += update
    assert torch.allclose(total, error, rtol=1e-3)


def test_a_rate_of_zero_leaves_the_momentum_alone():
    p = ones(BF16)
    made = AdamW([p], lr=0.0, update="eco", compiled=False)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        made.step()
    assert made.state[p]["exp_avg"].isfinite().all() and (p == 1).all()


def test_what_takes_no_error_is_refused():
    params = [nn.Parameter(torch.ones(8, 8, dtype=BF16))]
    refused(lambda: Lion(params, update="eco"), "Lion has no momentum", "take AdamW")
    refused(lambda: Muon(params, update="eco"), "Muon has no momentum")
    refused(lambda: SGD(params, update="eco"), "set momentum above 0")
    refused(lambda: AdamW(params, update="eco", master="split"), "drop one")
    refused(lambda: AdamW(params, update="eco", betas=(0, 0.99)), "set betas[0] above 0")
    refused(lambda: recipe(sites=["update=eco"]), "add --pure_bf16")
    refused(lambda: recipe(pure_bf16=True, kahan=True, sites=["update=eco"]), "drop one of the two")


def test_a_measured_step_says_nothing_of_what_it_cannot_know():
    torch.manual_seed(0)
    run = Precision(nn.Linear(8, 8), recipe(pure_bf16=True, sites=["update=eco"]))
    run.backward(run(torch.randn(4, 8)).square().mean())
    report = run.step(measure=True)
    assert not report["update_survival"] < 1 and "update_ratio" not in report
