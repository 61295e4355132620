"""stacks.py: products of the matrices that lie in one parameter, as the experts of a mixture."""

import copy

import common
import pytest
import torch
import torch.nn.functional as F
from common import draw
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec.layers.fp4 import FP4, FP4Options
from lowprec.layers.fp8 import FP8, Options, convert, matmul
from lowprec.layers.fp8_product import Scaling
from lowprec.precision import Precision, recipe

eager = common.eager
EXPERTS, WIDTH, INNER = 3, 32, 64
ENDS = torch.tensor([5, 5, 14], dtype=torch.int32)  # the second gets no row, and two rows go nowhere


def by_slices(x, w):
    parts = [F.linear(part, one) for part, one in zip(x[:14].split([5, 0, 9]), w, strict=True)]
    return torch.cat([*parts, x.new_zeros(2, w.shape[1])])


def by_matmul(x, w):
    parts = [part @ w[i].t() for i, part in enumerate(x[:14].split([5, 0, 9]))]
    return torch.cat([*parts, x.new_zeros(2, w.shape[1])])


def by_groups(x, w):
    return torch._grouped_mm(x, w.transpose(1, 2), offs=ENDS)


def by_gathering(x, w):
    return torch.einsum("mk,mnk->mn", x[:2], w[torch.tensor([0, 2])])


class Experts(nn.Module):
    def __init__(self, way, scale=0.1):
        super().__init__()
        self.way = way
        self.up = nn.Parameter(draw(EXPERTS, INNER, WIDTH, scale=scale))

    def forward(self, x):
        return self.way(x, self.up)


class Routed(Experts):
    """It has a layer of its own inside."""

    def __init__(self, way):
        super().__init__(way)
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.inside(x))


class Net(nn.Module):
    def __init__(self, way=by_slices):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(way)
        self.head = nn.Linear(INNER, 4)

    def forward(self, x):
        return self.head(self.experts(self.first(x)))


OPTIONS = [
    Options(backend="emulate"),
    Options(backend="emulate", recipe="rowwise"),
    Options(backend="emulate", recipe="mxfp8"),
    FP4Options(hadamard=0, grads="nearest"),
]


@pytest.mark.parametrize("way", [by_slices, by_matmul, by_groups])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.recipe)
def test_each_matrix_is_multiplied_as_it_would_be_alone(way, options):
    model = nn.ModuleDict({"experts": Experts(way)})
    kind = FP4 if isinstance(options, FP4Options) else FP8
    covered = kind(model, options)
    covered.convert(model)
    x, g = draw(16, WIDTH, seed=1).requires_grad_(), draw(16, INNER, seed=2)
    y = model["experts"](x)
    y.backward(g)
    found = y, x.grad, model["experts"].up.grad
    w, scaling = model["experts"].up.detach().clone().requires_grad_(), Scaling(options)
    x = x.detach().clone().requires_grad_()
    parts = [matmul(part, one.t(), scaling) for part, one in zip(x[:14].split([5, 0, 9]), w, strict=True)]
    expected = torch.cat([*parts, x.new_zeros(2, INNER)])
    expected.backward(g)
    for one, two in zip(found, (expected, x.grad, w.grad), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    exact = by_slices(x, w)
    off = ((y - exact).norm() / exact.norm()).item()
    assert 1e-3 < off < 0.2 and list(covered.stacks) == ["experts"]


def test_a_batch_of_products_is_taken_by_each_matrix():
    def way(x, w):
        return torch.bmm(x.expand(EXPERTS, *x.shape), w.transpose(1, 2))

    model = nn.ModuleDict({"experts": Experts(way)})
    convert(model, Options(backend="emulate"))
    x, w = draw(16, WIDTH, seed=1), model["experts"].up
    expected = [matmul(x, one.t(), Scaling(Options(backend="emulate"))) for one in w]
    assert torch.equal(model["experts"](x), torch.stack(expected))


def test_the_report_says_what_is_covered_and_plain_is_plain():
    model, plain = Net(), Net()
    covered = convert(model, Options(backend="emulate"))
    x = draw(16, WIDTH, seed=1)
    assert not torch.equal(model(x), plain(x)) and covered.left_out == {"head": "last layer"}
    assert "experts: emulate" in str(covered) and "2 of 3 linear layers" in str(covered)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with covered.plain(model):
        assert torch.equal(model(x), plain(x))
        apart = copy.deepcopy(model)
    assert torch.equal(apart(x), plain(x)) and not torch.equal(model(x), plain(x))


def test_flops_are_counted_once():
    model = Net()
    model.experts = Routed(lambda x, w: torch.bmm(x.expand(EXPERTS, *x.shape), w.transpose(1, 2)).sum(0))
    covered = convert(model, Options(backend="emulate"))
    covered.count_flops(model, (draw(16, WIDTH),))
    assert covered.flops["experts"] == 3 * 2 * 16 * WIDTH * EXPERTS * INNER
    head = 3 * 2 * 16 * INNER * 4
    assert covered.share == 1 - head / covered.flops["all"]


def test_a_product_that_is_not_seen_is_left_out_and_said():
    model = Net(by_gathering)
    covered = convert(model, Options(backend="emulate"))
    model(draw(16, WIDTH))
    assert "experts: left out, its matrices are multiplied in no way that is known" in str(covered)


def test_matrices_of_odd_sizes_are_left_out():
    model = Net()
    model.experts.up = nn.Parameter(torch.zeros(EXPERTS, 20, WIDTH))
    covered = convert(model, Options(backend="emulate"))
    assert not covered.stacks and "20 inputs: no multiple of 16" in covered.left_out["experts.up"]


@pytest.mark.parametrize("flags", [dict(fp8=True, fp8_recipe="delayed"), dict(fp4="nvfp4")], ids=str)
def test_a_run_trains_computes_again_and_resumes(flags):
    class Again(Net):
        def forward(self, x):
            y = checkpoint(self.experts, self.first(x), use_reentrant=False)
            return self.head(y)

    x = draw(16, WIDTH, seed=1)

    def begun(kind):
        return Precision(kind(), recipe(**flags), lr=1e-2, ema_decay=None, seed=3)

    def step(run):
        loss = (run(x) - 1).square().mean()
        run.backward(loss)
        run.step()
        return loss.item()

    run, again = begun(Net), begun(Again)
    losses = [step(run) for _ in range(20)]
    assert [step(again) for _ in range(3)] == losses[:3] and losses[-1] < 0.5 * losses[0]
    other = begun(Net)
    other.load_state_dict(copy.deepcopy(run.state_dict()))
    assert [step(run) for _ in range(2)] == [step(other) for _ in range(2)]
