"""Weights of a finished net rounded by GPTQ beside the nearest, onto the same grids."""

import common
import pytest
import torch
from common import draw, refused
from torch import nn

from lowprec.layers.block_formats import BLOCK_FORMATS
from lowprec.layers.quantise import quantise
from lowprec.precision import Precision, recipe

eager = common.eager
KINDS = ["int8", "mxfp8_weights", "mxfp4_weights", "nvfp4_weights", "nvfp4"]


class Net(nn.Module):
    """Two layers that are quantised, one of which is not called, and a head that is not quantised."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.unused, self.head = (nn.Linear(64, 64, bias=False) for _ in range(3))
        nn.init.normal_(self.wide.weight, std=0.1)
        nn.init.eye_(self.head.weight)

    def forward(self, x):
        return self.head(self.wide(x))


def made(kind, inputs=None):
    """A Net in a format, by GPTQ where there are inputs to calibrate with, and the report."""
    net = Net()
    calibrate = None if inputs is None else lambda: net(inputs)
    return net, quantise(net, kind, calibrate)


def weight_of(net):
    weight = net.wide.weight
    return weight.qdata * weight.scale if hasattr(weight, "qdata") else weight.detach()


def alike(count=1024):
    """Inputs [count, 64] that have much in common; input 5 is always 0."""
    mixed = draw(count, 8, seed=1) @ draw(8, 64, seed=2) + 0.3 * draw(count, 64, seed=3)
    mixed[:, 5] = 0
    return mixed


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_change_less_than_to_nearest_and_weights_stay_on_the_grid(kind):
    x = alike()
    exact = Net()(x)
    net, report = made(kind, x)
    own, nearest = report.rounding.errors["wide"]
    assert own < 0.6 * nearest and f"{own:.2%}" in report.summary()
    assert report.rounding.unseen == ["unused"] and "did not call them: unused" in str(report)
    if kind.endswith("_weights"):  # others round what comes in as well
        for low, said in ((net, own), (made(kind)[0], nearest)):
            far = (low(x) - exact).norm() / exact.norm()
            assert far.item() == pytest.approx(said, rel=1e-3)
    low = weight_of(net)
    if kind != "int8":
        assert on_grid(low, BLOCK_FORMATS[kind.removesuffix("_weights")])


def on_grid(low, form):
    """Whether each block of the weights is some scale of the format times values of its element."""
    sizes = torch.exp2(torch.arange(-20, 17, 1 / 64))  # some of each gap between two values
    values = form.element.round(torch.cat([-sizes, torch.zeros(1), sizes])).unique()
    if form.scale.name == "e8m0":
        scales = 2.0 ** torch.arange(-20, 10)
    else:
        scales = form.scale.grid.round(sizes).unique()
        scales = scales[scales > 0]
        scales = scales * form.scale.tensor(Net().wide.weight, form.element)
    blocks = low.reshape(-1, 1, form.length) / scales[:, None]  # [blocks, scales, values]
    above = torch.searchsorted(values, blocks).clamp(1, len(values) - 1)
    off = torch.minimum((blocks - values[above]).abs(), (blocks - values[above - 1]).abs())
    return (off <= 1e-6 * blocks.abs()).all(2).any(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest(kind):
    by_gptq, _ = made(kind, torch.eye(64))
    nearest, _ = made(kind)
    x = draw(16, 64)
    assert torch.equal(by_gptq(x), nearest(x))


def test_a_run_calibrates_the_net_that_it_draws_with():
    x = alike()
    r = recipe(sites=["generation=nvfp4_weights", "generation_rounding=gptq"])
    run = Precision(Net(), r, calibrate=lambda view: view(x))
    nearest = Precision(Net(), r.replace(generation_rounding="nearest")).generator("raw")(x)
    far = [(run.generator("raw")(x) - Net()(x)).norm(), (nearest - Net()(x)).norm()]
    assert far[0] < 0.6 * far[1]
    assert "weights by GPTQ" in str(run.ledger())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: made("fp8", draw(4, 64)), ["fp8 has no grid", "mxfp8"]),
        (lambda: made("int8", draw(4, 64) * float("nan")), ["GPTQ", "'wide'", "NaN"]),
        (lambda: quantise(Net(), "int8", lambda: None), ["called no layer"]),
        (lambda: recipe(sites=["generation_rounding=gptq"]), ["generation=compute", "generation=int8"]),
        (
            lambda: Precision(Net(), recipe(sites=["generation=int8", "generation_rounding=gptq"])),
            ["calibrate=", "nearest"],
        ),
    ],
)
def test_what_can_not_be_is_refused(call, words):
    refused(call, *words)
