"""Moments in codes of tensors of any length."""


import common
import pytest
import test_moments
import torch
from common import (
    KINDS,
    coder,
    refused,
    same_state,
    through_a_file,
)
from torch import nn

from lowprec.optimizers.rounded import AdamW

eager = common.eager
feed = test_moments.feed
gradients = test_moments.gradients
optimizer = test_moments.optimizer


LENGTHS = (4097, 5001)


@pytest.mark.parametrize("update", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_odd_lengths_step_and_resume_bit_for_bit(kind, update):
    grads = gradients(LENGTHS, 4)

    def made():
        params = [nn.Parameter(torch.ones(n)) for n in LENGTHS]
        return params, optimizer(kind, params, update=update, lr=0.01, seed=4)

    params, whole = made()
    feed(whole, params, grads[:2])
    saved = through_a_file({"optimizer": whole.state_dict(), "params": [p.detach() for p in params]})
    feed(whole, params, grads[2:])
    others, resumed = made()
    with torch.no_grad():
        for p, t in zip(others, saved["params"], strict=True):
            p.copy_(t)
    resumed.load_state_dict(saved["optimizer"])
    feed(resumed, others, grads[2:])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q) and same_state(whole.state[p], resumed.state[q])
    for p in params:
        c, state = coder(kind), whole.state[p]
        codes, scales = c.sizes(p.numel())
        assert state["exp_avg"].shape == (codes,) and state["exp_avg_scale"].shape == (scales,)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_odd_lengths_are_near_those_of_fp32(kind):
    grads = gradients(LENGTHS, 3)
    params, exact = ([nn.Parameter(torch.ones(n)) for n in LENGTHS] for _ in range(2))
    made, reference = optimizer(kind, params), AdamW(exact)
    feed(made, params, grads)
    feed(reference, exact, grads)
    # half a gap of the largest value of a block; a block holds one decade
    tolerance = {"int8": 0.03, "int4": 0.35, "log4": 0.5, "e4m3": 0.1, "e5m2": 0.2, "flash8": 0.03}[kind]
    for p, q in zip(params, exact, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value, wanted = made.moment(p, name), reference.moment(q, name)
            assert value.shape == wanted.shape == (p.numel(),)
            assert (value - wanted).norm() < tolerance * wanted.norm()
            end = slice(p.numel() - p.numel() % 128, None)  # the shorter last block is no worse
            assert (value - wanted)[end].norm() < 2 * tolerance * wanted[end].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_odd_lengths_are_those_allocated(kind):
    params = [nn.Parameter(torch.ones(n)) for n in (*LENGTHS, 100)]
    made = optimizer(kind, params, update="stochastic")
    feed(made, params, gradients([*LENGTHS, 100], 1))
    state = [made.state[p] for p in params]
    told, c = made.nbytes(), coder(kind)
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        own = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for s in state
            for t in tensors(s, name)
        }
        assert told[name] == sum(own.values()) + c.table_bytes(signed, True)
        assert sum(own.values()) == 4 * 100 + sum(-(-n * c.bits // 8) + 4 * -(-n // c.block) for n in LENGTHS)
    assert told["kahan"] == told["master"] == 0


def tensors(state, name):
    return [state[key] for key in (name, f"{name}_scale") if key in state]


def test_a_state_that_was_kept_in_fp32_by_the_old_rule_is_encoded():
    """4-bit moments of tensors that end within a block of 128 were fp32 in checkpoints of format 1."""
    coder("int4")
    shapes = [(4097,), (64, 128), (100,)]
    params, exact = ([nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    made, reference = optimizer("int4", params), AdamW(exact)
    feed(made, params, gradients(shapes, 2))
    feed(reference, exact, gradients(shapes, 2))
    saved, fp32 = through_a_file(made.state_dict()), reference.state_dict()["state"]
    for name in ("exp_avg", "exp_avg_sq"):
        del saved["state"][0][f"{name}_scale"]
        saved["state"][0][name] = fp32[0][name]
    again = [nn.Parameter(torch.ones(s)) for s in shapes]
    loaded = optimizer("int4", again)
    loaded.load_state_dict(saved)
    assert loaded.state[again[0]]["exp_avg"].dtype == torch.uint8
    for name in ("exp_avg", "exp_avg_sq"):
        wanted = reference.moment(exact[0], name)
        assert (loaded.moment(again[0], name) - wanted).norm() < 0.2 * wanted.norm()
    assert same_state(loaded.state[again[1]], made.state[params[1]])
    feed(loaded, again, gradients(shapes, 1))
    # a moment that was coded then is none now
    saved["state"][1] = fp32[1]
    refused(lambda: optimizer("int4", again).load_state_dict(saved), "another model or recipe")
