"""flops.py: products counted by hand, by module and by kind, forward and backward; nothing stays behind."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import models
from lowprec.layers.flops import module_flops
from lowprec.parts.first_call import named_tensors


def product(rows, k, n):
    return 2 * rows * k * n


def test_products_of_experts_count():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 8, 16))

        def forward(self, x):
            ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * 4
            return torch._grouped_mm(x, self.up.to(x.dtype), ends).relu()

    net = Experts().bfloat16()
    x = torch.zeros(16, 8, dtype=torch.bfloat16)
    product = 2 * 16 * 8 * 16  # each row goes through one expert
    assert module_flops(net, (x,))[1]["linear"] == product
    assert module_flops(net, (x,), backward=True)[1]["linear"] == 2 * product, "x needs no gradient"


def test_flops_are_counted_by_layer_and_kind():
    layers = nn.Flatten(2), nn.Linear(16, 32, bias=False), nn.Linear(32, 4)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)
    by_module, by_kind = module_flops(net, (torch.empty(2, 3, 4, 4),))
    assert by_module["2"] == product(2 * 8, 16, 32) and by_module["3"] == product(2 * 8, 32, 4)
    assert by_module["0"] == by_kind["convolution"] == product(2 * 16, 3 * 9, 8)
    assert by_kind["linear"] == by_module["2"] + by_module["3"] and by_kind["attention"] == 0
    assert by_module[""] == sum(by_kind.values()) and "1" not in by_module


class Shared(nn.Module):
    """Two Linears that read the same tensor, a third on the parameter of the first, and attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.left, self.right = (nn.Linear(16, 16) for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def forward(self, x, *, scale=1.0):  # [B, T, 16]
        h = self.embed(x)
        q, k = self.left(h), self.right(h)
        h = h + F.scaled_dot_product_attention(q, k, h) * scale
        return self.tail(h)


def test_backward_counts_where_forward_did():
    """The gradient of a tensor that several layers read is complete only once all of them gave theirs; each
    product still counts for its own layer.
    """
    net, x = Shared(), torch.empty(2, 5, 16)
    forward, _ = module_flops(net, (x,))
    step, by_kind = module_flops(net, (x,), backward=True)
    one = product(10, 16, 16)
    assert forward["embed"] == forward["left"] == forward["tail.0"] == one
    assert step["embed"] == 2 * one  # nobody asks for the gradient of the input
    assert step["left"] == step["right"] == step["tail.0"] == 3 * one
    assert step["tail.1"] == 3 * product(10, 16, 4) and step["tail"] == step["tail.0"] + step["tail.1"]
    assert by_kind["attention"] == 3 * 2 * product(2 * 5, 16, 5)
    assert by_kind["linear"] == sum(step[name] for name in ("embed", "left", "right", "tail"))
    net.left.requires_grad_(False)
    assert module_flops(net, (x,), backward=True)[0]["left"] == 2 * one  # dx alone


@pytest.mark.parametrize("name, size", [("unet", "tiny"), ("dit", "tiny")])
@pytest.mark.parametrize("backward", [False, True])
def test_the_total_is_torchs_own(name, size, backward):
    with torch.device("meta"):
        net = models.GENERATIVE[name](1, 10, 32, size)
        args = torch.empty(2, 1, 32, 32), torch.empty(2), torch.empty(2, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            out = net(*args)
            if backward:
                out.sum().backward()
    by_module, by_kind = module_flops(net, args, backward=backward)
    assert by_module[""] == sum(by_kind.values()) == counter.get_total_flops()


def test_any_arguments_and_any_outputs():
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        rest: dict

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
            self.tied.weight = self.linear.weight

        def forward(self, batch, *, twice=False, mask=None):
            assert mask is None and batch["names"] == ["a"]
            h = self.linear(batch["x"][0])
            h = self.tied(h) if twice else h
            return Output(h.sum(), {"logits": (h, None), "count": 3})

    batch = {"x": [torch.empty(4, 8)], "names": ["a"]}
    by_module, _ = module_flops(Model(), (batch,), {"twice": True}, backward=True)
    assert by_module == {
        "linear": 2 * product(4, 8, 8),
        "tied": 3 * product(4, 8, 8),
        "": 5 * product(4, 8, 8),
    }
    assert module_flops(Model(), (), {"batch": batch})[0]["linear"] == product(4, 8, 8)
    assert [t.shape for _, t in named_tensors("", Model()(batch))] == [(), (4, 8)]


def test_nothing_is_computed_and_nothing_stays():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            return F.dropout(self.linear(self.norm(x)))

    net = Normed()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    random_state = torch.get_rng_state()
    module_flops(net, (torch.full((4, 8), torch.nan),), backward=True)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters()) and torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_what_a_forward_keeps_does_not_reach_the_net():
    """Some nets make a table of positions at their first call: one without values would break the next."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(8, 8), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None]
            return self.linear(x + self.table)

    net = Lazy()
    assert module_flops(net, (torch.empty(4, 8),), backward=True)[0][""] == 2 * product(4, 8, 8)
    assert net.table is None and net(torch.zeros(4, 8)).isfinite().all()


def test_a_net_that_looks_at_values_is_a_runtime_error_and_leaves_nothing():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) * x.sum().item()

    net = Looks()
    with pytest.raises(RuntimeError):
        module_flops(net, (torch.ones(4, 8),))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_recomputed_activations_count_as_they_run():
    class Checkpointed(Shared):
        def forward(self, x):
            h = self.embed(x)
            return torch.utils.checkpoint.checkpoint(self.tail, h, use_reentrant=False)

    one, last = product(10, 16, 16), product(10, 16, 4)
    step, _ = module_flops(Checkpointed(), (torch.empty(2, 5, 16),), backward=True)
    # torch stops running again at the last product, whose result nobody needs
    assert step["tail.0"] == 4 * one and step["tail.1"] == 3 * last
    assert step[""] == 2 * one + step["tail"] == 6 * one + 3 * last
