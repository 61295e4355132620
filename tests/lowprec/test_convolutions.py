"""onednn.py: a weight gradient that oneDNN gets wrong is taken without it. This machine's may be right:
a fault is planted where torch is called."""

import functools

import common
import pytest
import torch
from torch import nn

from lowprec.advice import check
from lowprec.parts import onednn
from lowprec.precision import Precision
from lowprec.recipes import recipe

eager = common.eager


@pytest.fixture
def wrong_by_onednn(monkeypatch):
    """oneDNN leaves a part of every weight gradient unwritten."""
    right = onednn.weight_gradient

    def gradient(*arguments):
        found = right(*arguments)
        if torch.backends.mkldnn.enabled:
            found.view(-1)[:9] = 1e9
        return found

    monkeypatch.setattr(onednn, "weight_gradient", gradient)
    monkeypatch.setattr(onednn, "_found_wrong", {})


NETS = {
    "depth of 2": (nn.Conv3d(4, 8, 3, padding=1), nn.Conv3d(8, 8, 1), (2, 4, 2, 5, 5)),
    "one pixel": (nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 1), (2, 4, 1, 1)),
}


@pytest.mark.parametrize("flag", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("name", NETS)
def test_only_the_gradient_of_a_wrong_layer_goes_without_onednn(name, flag, wrong_by_onednn):
    narrow, other, shape = NETS[name]
    run = Precision(nn.Sequential(narrow, other), recipe(**{flag: True}), lr=1e-3)
    wrapper = run.forward
    seen = {}

    def note(width, gradients):
        seen[width] = torch.backends.mkldnn.enabled

    def watched(x):
        out = wrapper(x)
        node = out.grad_fn
        while node is not None:
            if node.name() == "ConvolutionBackward0":
                width = node._saved_weight.shape[-1]
                node.register_prehook(functools.partial(note, width))
            node = node.next_functions[0][0] if node.next_functions else None
        return out

    run.forward = watched
    for _ in range(2):
        run.backward(run(torch.ones(shape)).square().mean())
        run.step()
        assert seen == {3: False, 1: True}
        assert torch.backends.mkldnn.enabled
    assert not other._forward_hooks, "a layer that is right is looked at once"


def test_the_commands_name_what_is_wrong(wrong_by_onednn):
    assert "3x3x3 over a depth of 2" in check.report(lambda flags, reason: [])


def test_a_layer_that_is_right_keeps_its_kernel(monkeypatch):
    monkeypatch.setattr(onednn, "_found_wrong", {})
    gradient = onednn.weight_gradient

    def right(*arguments):
        with torch.backends.mkldnn.flags(enabled=False):  # with it this machine's own may be wrong
            exact = gradient(*arguments)
        return exact.mul(1.001 if torch.backends.mkldnn.enabled else 1.0)

    monkeypatch.setattr(onednn, "weight_gradient", right)
    assert not onednn.faulty_convolutions()
