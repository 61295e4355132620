"""A finished net that generates in MXFP8, MXFP4 or NVFP4, with weights alone or activations too."""

import common
import pytest
import torch
from common import refused
from eight_bit import dit, draw
from torch import nn

from lowprec.block_formats import BLOCK_FORMATS
from lowprec.layers.quantise import quantise
from lowprec.precision import Precision, recipe

eager = common.eager


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_weights_alone_or_activations_too_are_in_the_format(name):
    form = BLOCK_FORMATS[name]
    x = draw(32, 64)
    found = {}
    for kind in (name, f"{name}_weights"):
        torch.manual_seed(0)
        net = nn.ModuleDict({part: nn.Linear(64, 64, bias=False) for part in ("a", "b", "head")})
        w = [layer.weight.detach() for layer in net.values()]
        covered = quantise(net, kind)
        assert list(covered.layers) == ["a", "b"] and name.upper() in str(covered)
        found[kind] = x
        with torch.no_grad():
            for layer in net.values():
                found[kind] = layer(found[kind])
    low = [form.rounded(weight, 1).t() for weight in w[:2]]
    hidden = form.rounded(x, 1) @ low[0]
    assert torch.equal(found[name], form.rounded(hidden, 1) @ low[1] @ w[2].t())
    assert torch.equal(found[f"{name}_weights"], x @ low[0] @ low[1] @ w[2].t())


def test_a_run_draws_in_the_format_of_its_site():
    x = draw(8, 1, 8, 8), torch.linspace(0, 1, 8), torch.zeros(8, dtype=torch.long)
    far = {}
    exact = None
    for kind in ("fp32", "mxfp8", "nvfp4_weights", "nvfp4"):
        net = dit()
        nn.init.normal_(net.final.linear.weight, std=0.1)
        for block in net.blocks:
            nn.init.normal_(block.modulation.weight, std=0.1)
        run = Precision(net, recipe(bf16=True, sites=[f"generation={kind}"]))
        with torch.no_grad():
            y = run.generator("raw")(*x)
        exact = y if exact is None else exact
        far[kind] = (y - exact).norm().item()
        if kind == "nvfp4":
            assert "weights and activations in e2m1" in str(run.ledger())
    assert 0 == far["fp32"] < far["mxfp8"] < far["nvfp4_weights"] < far["nvfp4"] < 0.5 * exact.norm()


def test_what_can_not_be_is_refused():
    refused(lambda: recipe(sparse24="srste", sites=["generation=nvfp4"]), "generation=nvfp4 with sparse24")
    refused(lambda: quantise(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 16)), "nvfp4"), "24 inputs")
