"""sparsity.py: masks of two in four."""

import itertools

import common
import pytest
import test_sparsity
import torch
from common import refused
from torch import nn

import models
from lowprec.layers import sparsity
from lowprec.layers.sparsity import Sparse24, two_of_four
from lowprec.precision import Precision, recipe

eager = common.eager
BF16 = test_sparsity.BF16
is_two_of_four = test_sparsity.is_two_of_four
normal = test_sparsity.normal


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_mask_is_the_best_two_of_four_by_magnitude(dtype):
    weight = normal(64, 128).to(dtype)
    mask = two_of_four(weight)
    assert mask.dtype == torch.bool and mask.shape == weight.shape
    groups, kept = weight.float().abs().reshape(-1, 4), mask.reshape(-1, 4)
    assert (kept.sum(1) == 2).all()
    pairs = itertools.combinations(range(4), 2)
    best = torch.stack([groups[:, list(pair)].sum(1) for pair in pairs]).amax(0)
    assert torch.equal((groups * kept).sum(1), best)


@pytest.mark.parametrize(
    "four, kept",
    [
        ((1, 1, 1, 1), (1, 1, 0, 0)),
        ((0, 0, 0, 0), (1, 1, 0, 0)),
        ((-1, 1, -1, 2), (1, 0, 0, 1)),
        ((0, 3, 3, 3), (0, 1, 1, 0)),
        ((1, 2, 2, 1), (0, 1, 1, 0)),
        ((2, 1, 1, 1), (1, 1, 0, 0)),
        ((-0.0, 0.0, 0.0, 1), (1, 0, 0, 1)),
        ((1, 2, 3, 4), (0, 0, 1, 1)),
        ((float("inf"), 1, float("-inf"), 2), (1, 0, 1, 0)),
    ],
)
def test_of_equal_magnitudes_the_first_stay(four, kept):
    for dtype in (torch.float32, BF16):
        assert two_of_four(torch.tensor([four], dtype=dtype)).int().tolist() == [list(kept)]


def test_the_check_counts_along_the_input():
    weight = torch.zeros(4, 8)
    weight[:, :2] = 1  # every column of the first two is full, every row has two of four
    assert is_two_of_four(weight) and not is_two_of_four(weight.T.contiguous())
    weight[3, 3] = 1e-30
    assert not is_two_of_four(weight)


def test_attention_and_mlp_are_covered_and_conditions_embeddings_and_head_are_not():
    with torch.device("meta"):
        nets = {name: build(1, 10, 8) for name, build in models.GENERATIVE.items()}
        found = {name: set(sparsity.linears_to_prune(net)) for name, net in nets.items()}
    layers = ("attention.qkv", "attention.proj", "mlp.0", "mlp.2")
    assert found["dit"] == {f"blocks.{i}.{name}" for i in range(4) for name in layers}
    attention = "middle_block.attention.attn"
    assert found["unet"] == {f"{attention}.qkv", f"{attention}.out_proj"}

    class Own(nn.Linear):
        pass

    layers = dict(a=nn.Linear(6, 8), b=Own(8, 8), c=nn.Conv2d(8, 8, 1))
    odd = nn.ModuleDict(dict(layers, final=nn.Linear(8, 8), outer=nn.Linear(8, 8)))
    assert set(sparsity.linears_to_prune(odd)) == {"outer"}


def test_the_head_and_the_embeddings_of_a_language_model_stay_dense():
    """However they are named, and where a net says itself what its layers are."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("wte", "wpe", "block", "lm_head", "first", "last")
            for name in names:
                setattr(self, name, nn.Linear(16, 16))

    net = Language()
    assert list(sparsity.linears_to_prune(net)) == ["block", "first", "last"]
    net.roles = {"first": {"embedding"}, "last": {"head"}, "block": {"condition"}, "lm_head": set()}
    assert list(sparsity.linears_to_prune(net)) == ["lm_head"]
    before = net.block.weight.clone()
    Sparse24(net, "magnitude")
    assert is_two_of_four(net.lm_head.weight) and torch.equal(net.block.weight, before)


def test_a_net_without_such_layers_is_refused_in_one_line():
    for mode in ("magnitude", "srste"):
        asked = recipe(sparse24=mode)
        said = refused(lambda asked=asked: Precision(nn.Conv2d(4, 4, 1), asked), "--model dit")
        assert said.startswith(f"--sparse24 {mode}: this net has no Linear")
    words = "--sparse24 half: unknown; choose from none, magnitude, srste"
    refused(lambda: recipe(sparse24="half"), words)
    assert recipe(sites=["sparse24=srste"]) == recipe(sparse24="srste")
