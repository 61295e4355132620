"""Parameter groups, options and saved states that an optimiser of ours can't heed are refused, and a refusal
leaves it as it was.
"""

import copy
import math

import pytest
import torch
from common import refused
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lowprec import EMA, SGD, Adafactor, AdamW, Lion, Muon, Precision, Release


def parameter(shape=(4,)):
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones(shape)
    return p


# ---- Options of one group ----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_a_rule_that_is_not_ours_is_refused_of_a_group_and_of_an_optimiser(option):
    refused(lambda: AdamW([{"params": [parameter()], option: True}]), option)
    AdamW([{"params": [parameter()], option: False}]).step()  # torch writes these into saved groups
    refused(lambda: AdamW([parameter()], **{option: True}), option)
    AdamW([parameter()], **{option: False}).step()  # as many calls of torch's AdamW write it


@pytest.mark.parametrize("option", [dict(update="stochastic"), dict(exp_avg="bf16"), dict(seed=1)])
def test_what_holds_for_all_groups_is_refused_in_one(option):
    refused(lambda: AdamW([{"params": [parameter()], **option}]), "second optimiser", *option)


def test_a_momentum_of_one_group_is_its_own():
    SGD([{"params": [parameter()], "momentum": 0.5}]).step()
    refused(lambda: Lion([{"params": [parameter()], "exp_avg": "bf16"}]), "exp_avg")


@pytest.mark.parametrize("options", [dict(clip=0.0), dict(clip=None), dict(beta2_decay=0.8)])
def test_adafactor_refuses_what_trains_nothing_or_makes_nan(options):
    refused(lambda: Adafactor([parameter()], **options), *options)
    refused(lambda: Adafactor([{"params": [parameter()], **options}]), *options)
    Adafactor([parameter()], clip=math.inf, beta2_decay=0.0).step()


@pytest.mark.parametrize("options", [dict(lr=None), dict(eps=None), dict(kahan="off"), dict(seed=None)])
def test_an_option_of_another_type_is_refused_when_it_is_given(options):
    refused(lambda: AdamW([parameter()], **options), *options)


def test_a_late_group_that_is_refused_is_not_there():
    optimizer = AdamW([parameter()])
    refused(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]}), "float16")
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    optimizer.add_param_group({"params": [parameter()]})
    optimizer.step()
    assert len(optimizer.state_dict()["param_groups"]) == 2


# ---- What is changed by hand -------------------------------------------------------------------------------


def appended(optimizer):
    optimizer.param_groups[0]["params"].append(parameter())


def replaced(optimizer):
    group = optimizer.param_groups[0]
    old, group["params"][0] = group["params"][0], parameter()
    optimizer.state[group["params"][0]] = optimizer.state.pop(old)


def with_a_group_more(optimizer):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [parameter()]})


@pytest.mark.parametrize("change", [appended, replaced, with_a_group_more])
def test_parameters_that_were_changed_by_hand_are_refused_at_the_step(change):
    first = parameter()
    optimizer = AdamW([first])
    optimizer.step()
    change(optimizer)
    before = first.detach().clone()
    refused(optimizer.step, "add_param_group", "new optimiser")
    assert torch.equal(first, before)


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("exp_avg", torch.zeros(3), "exp_avg of parameter 0 of group 0 is float32 [3]"),
        ("exp_avg", "text", "a str"),
        ("exp_avg", torch.zeros(4, device="meta"), "float32 [4] on meta"),
        ("exp_avg", None, "missing"),
    ],
)
def test_a_moment_that_does_not_fit_is_refused(name, value, says):
    p = parameter()
    optimizer = stepped(AdamW, [p])
    optimizer.state[p][name] = value
    before = p.detach().clone()
    refused(optimizer.step, says, "make a new optimiser")
    assert torch.equal(p, before)


@pytest.mark.parametrize("released", (False, True))
def test_a_state_without_its_step_is_refused(released):
    p = parameter()
    optimizer = stepped(AdamW, [p])
    if released:
        Release(optimizer)
    del optimizer.state[p]["step"]
    step = p.sum().backward if released else optimizer.step
    refused(step, "the step of a state was deleted", "clear the whole state")


def test_a_weight_made_of_other_tensors_is_refused_by_its_name():
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    refused(lambda: Precision(net), "weight is a TwoTensor")


def with_another_shape(p):
    p.data = torch.ones(400, 400)
    p.grad = torch.ones(400, 400)


def with_a_shorter_gradient(p):
    p.grad.data = torch.ones(3)


def freed(p):
    p.data.untyped_storage().resize_(0)


def overlapping(p):
    p.data = torch.ones(100).as_strided((16, 8), (3, 1))


@pytest.mark.parametrize("how", (with_another_shape, freed))
def test_no_average_is_taken_of_tensors_that_are_not_those_it_was_made_of(how):
    p = nn.Parameter(torch.ones(16, 8))
    average = EMA([("weight", p)], 0.9)
    how(p)
    refused(average.update, "weight")


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("how", (with_another_shape, with_a_shorter_gradient, freed, overlapping))
@pytest.mark.parametrize("kind", (AdamW, SGD, Lion, Adafactor))
def test_no_step_is_taken_of_tensors_that_are_not_those_of_the_state(kind, how, compiled):
    p = nn.Parameter(torch.ones(16, 8))
    p.grad = torch.ones_like(p)
    optimizer = kind([p], compiled=compiled)
    optimizer.step()
    p.grad = torch.ones_like(p)
    with torch.no_grad():
        p.grad = None if how is with_another_shape else p.grad
        how(p)
    refused(optimizer.step, "parameter 0 of group 0")


def test_a_gradient_that_is_negated_by_a_mark_alone_is_read_so():
    p = parameter()
    p.grad = torch._neg_view(p.grad)  # as the imaginary part of a conjugate is
    AdamW([p], lr=0.1).step()
    assert (p > 1).all()


def test_a_frozen_parameter_has_no_state_before_its_first_gradient():
    frozen = [nn.Parameter(torch.zeros(4, 4).to(dtype), False) for dtype in (torch.float16, torch.uint8)]
    later, trained = parameter(shape=(4, 4)), parameter(shape=(4, 4))
    later.requires_grad_(False)
    later.grad = None
    optimizer = AdamW([*frozen, later, trained])
    optimizer.step()
    assert set(optimizer.state) == {trained} and set(optimizer.state_dict()["state"]) == {3}
    later.requires_grad_(True)
    later.grad = torch.ones_like(later)
    optimizer.step()
    assert optimizer.state[later]["step"] == 1 and optimizer.state[trained]["step"] == 2


@pytest.mark.parametrize("option, value", [("lr", math.nan), ("betas", (math.nan, 0.9)), ("eps", math.nan)])
def test_an_option_that_becomes_no_number_is_refused(option, value):
    p = parameter()
    optimizer = stepped(AdamW, [p])
    optimizer.param_groups[0][option] = value
    before = p.detach().clone()
    refused(optimizer.step, f"{option}={value}")
    assert torch.equal(p, before)
    refused(lambda: AdamW([parameter()]).load_state_dict(optimizer.state_dict()), f"{option}={value}")


def test_options_that_a_wrapper_puts_into_each_group_are_taken_where_they_are_the_same():
    groups = [{"params": [parameter()], "update": "stochastic", "exp_avg": "bf16", "dampening": 0}]
    AdamW(groups, update="stochastic", exp_avg="bf16", capturable=False).step()
    refused(lambda: AdamW(groups), "update='stochastic' in a parameter group")


@pytest.mark.parametrize("kind", (AdamW, SGD, Lion, Adafactor, Muon))
def test_one_word_says_how_all_moments_are_held(kind):
    p = parameter(shape=(4, 4))
    optimizer = kind([p], states="bf16")
    moments = [t for name, t in optimizer.state[p].items() if name != "step"]
    assert moments and all(t.dtype == torch.bfloat16 for t in moments)


@pytest.mark.parametrize("kind", (AdamW, Muon))
def test_a_set_of_parameters_which_has_no_order_is_refused_as_in_torch(kind):
    with pytest.raises(TypeError, match="ordered"):
        kind([{"params": {parameter(shape=(4, 4)), parameter(shape=(4, 4))}}])


@pytest.mark.parametrize("options", [dict(kahan=True), dict(master="split"), dict(master="fp32")])
def test_a_cast_after_the_optimiser_that_would_lose_the_exact_weight_is_refused(options):
    net = nn.Linear(4, 4)
    optimizer = AdamW(net.parameters(), **options)
    net.bfloat16()
    net(torch.ones(1, 4).bfloat16()).sum().backward()
    refused(optimizer.step, "cast the model first", *options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_to_what_it_can_not_write_is_refused(dtype):
    net = nn.Linear(4, 4)
    optimizer = AdamW(net.parameters())
    net.to(dtype)
    net(torch.ones(1, 4, dtype=dtype)).sum().backward()
    refused(optimizer.step, str(dtype))


def test_a_late_cast_to_bf16_alone_goes_on():
    net = nn.Linear(4, 4)
    optimizer = AdamW(net.parameters(), lr=0.1, update="stochastic")
    net.bfloat16()
    before = copy.deepcopy(net.weight)
    net(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert not torch.equal(net.weight, before)


# ---- Saved states ------------------------------------------------------------------------------------------


def stepped(kind, params, **options):
    optimizer = kind(params, **options)
    for p in params:
        p.grad = torch.rand_like(p)
    optimizer.step()
    return optimizer


def test_a_refused_state_leaves_all_of_the_old_one():
    shapes = (4, 4), (4, 4)
    optimizer = stepped(AdamW, [parameter(shape=shape) for shape in shapes])
    before = copy.deepcopy(optimizer.state_dict())
    other = stepped(AdamW, [parameter(shape=shape) for shape in ((4, 4), (2, 8))]).state_dict()
    differs = "exp_avg is float32 [2, 8] there, and float32 [4, 4] here"
    refused(lambda: optimizer.load_state_dict(other), differs)
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] += 1
    other["state"][1]["step"] = math.nan
    refused(lambda: optimizer.load_state_dict(other), "step is nan there, and 1 here")
    other["state"][1] = {**before["state"][1], "exp_avg": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    refused(lambda: optimizer.load_state_dict(other), "exp_avg is float8_e4m3fn")
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, saved in before["state"].items():
        for name, value in saved.items():
            assert torch.equal(torch.as_tensor(after["state"][i][name]), torch.as_tensor(value))


def test_hooks_of_loading_are_called_as_in_torch():
    optimizer, heard = Muon([parameter(shape=(4, 4))]), []

    def faster(_, state):
        heard.append("before")
        groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(faster)
    optimizer.register_load_state_dict_post_hook(lambda _: heard.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5
