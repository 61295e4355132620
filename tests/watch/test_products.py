"""watch/products.py: what another format would do to the products of a loop in fp32 or bf16."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowprec import Watch
from lowprec.errors import Refused


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16))


def train(model, steps=4, spread=0.0, **watched):
    """(a Watch of a loop, its weights after it). spread: decades over which the inputs of a row lie."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=2, **watched)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 32, 64, generator=g) * 10.0 ** (-spread * torch.rand(64, generator=g))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), torch.ones(4, 32, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch, [p.detach().clone() for p in model.parameters()]


def test_it_tells_what_each_format_would_lose_and_changes_no_bit():
    watch, weights = train(net(), products=("mxfp8", "nvfp4"))
    _, alone = train(net())
    assert all(map(torch.equal, weights, alone))
    fine, coarse = watch.products["mxfp8"], watch.products["nvfp4"]
    assert set(fine) == set(coarse) == {"0", "2"}
    for name in fine:
        for ratio in fine[name].snr.values():
            assert 25 < ratio < 45
        for ratio in coarse[name].snr.values():
            assert 14 < ratio < 30
    assert fine["0"].underflow["input"] == 0 and 0.02 < coarse["0"].underflow["input"] < 0.2
    assert fine["0"].saturated == coarse["0"].saturated == dict.fromkeys(("input", "weight", "grad"), 0.0)
    text = str(watch)
    assert "in nvfp4 (e2m1 in blocks of 1 x 16" in text and "weight's gradient" in text
    watch.remove()
    assert not any(m._forward_hooks for m in watch.model.modules())


def test_what_lies_far_below_its_block_vanishes_and_floor_scales_clip():
    watch, _ = train(net(), spread=4.0, products=("nvfp4", "mxfp4"))
    even, _ = train(net(), products=("nvfp4",))
    vanished = watch.products["nvfp4"]["0"].underflow["input"]
    assert vanished > 0.4 and vanished > 3 * even.products["nvfp4"]["0"].underflow["input"]
    assert 0.001 < watch.products["mxfp4"]["0"].saturated["weight"] < 0.2
    assert "becomes zero" in str(watch) and "is clipped" in str(watch)


def test_steps_that_are_not_looked_at_cost_nothing():
    model = net()
    watch, _ = train(model, steps=1, products=("mxfp8",))
    seen = watch.products.totals["mxfp8"]["0"][0].clone()
    model(torch.randn(4, 64)).sum().backward()  # before step 2, which is looked at
    with torch.no_grad():
        model(torch.randn(4, 64))
    assert (watch.products.totals["mxfp8"]["0"][0] > seen).any()
    watch.products.stop()
    seen = watch.products.totals["mxfp8"]["0"][0].clone()
    model(torch.randn(4, 64)).sum().backward()
    assert torch.equal(watch.products.totals["mxfp8"]["0"][0], seen)


def test_unknown_formats_and_nets_without_layers_are_refused():
    with pytest.raises(Refused, match="products='fp9': unknown; choose from mxfp8"):
        train(net(), products=("fp9",))
    conv = nn.Conv2d(1, 4, 3)
    with pytest.raises(Refused, match="no nn.Linear"):
        Watch(conv, torch.optim.SGD(conv.parameters()), products=("mxfp8",))


class WithAnExpert(nn.Module):
    """One layer is called by keyword, the other on no rows at all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.expert = nn.Linear(96, 16)

    def forward(self, x):
        h = self.first(input=x)
        return self.expert(h) + self.expert(h[:, :0]).sum()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "block128"])
def test_a_layer_that_is_called_on_no_rows_or_by_keyword_is_looked_at_all_the_same(kind):
    watch, _ = train(WithAnExpert(), products=(kind,))
    assert set(watch.products[kind]) == {"first", "expert"}
