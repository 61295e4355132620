"""rules.py: every rule about a run has a case here, and says what works instead."""

import types

import pytest
import torch
from common import net
from torch import nn

from lowprec.errors import Refused
from lowprec.optimizers.muon import Muon
from lowprec.optimizers.peers import Peer
from lowprec.optimizers.rounded import AdamW
from lowprec.parts import PARTS
from lowprec.parts.part import Part
from lowprec.parts.ranks import SPREAD_RULES, refuse_whole
from lowprec.parts.release import RELEASE_RULES
from lowprec.precision import Options, Precision, wanted_parts
from lowprec.recipes import recipe
from lowprec.rules import NET_RULES, SETTING_RULES, refuse

PLAIN = recipe()
FP8 = recipe(fp8=True, fp8_backend="emulate")
CASES = [  # facts of a run, words of its refusal
    (dict(clip_grad=-1.0), ["clip_grad=-1.0", "0 or more"]),
    (dict(clip_grad=float("nan")), ["clip_grad=nan"]),
    (dict(clip_tensor=-1.0), ["clip_tensor=-1.0"]),
    (dict(accumulate=0), ["accumulate=0", "1 or more"]),
    (dict(clip_grad=1.0, clip_tensor=1.0), ["exclude each other"]),
    (dict(spread=True, recipe=FP8), ["--fp8", "use --bf16"]),
    (dict(spread=True, recipe=recipe(sparse24="srste")), ["--sparse24", "leave one"]),
    (dict(spread=True, recipe=recipe(sites=["generation=int8"])), ["generation=int8", "leave one"]),
    (
        dict(spread=True, recipe=recipe(sites=["reduce=bf16", "reduce_update=stochastic"])),
        ["reduce_update=stochastic", "leave it out"],
    ),
    (dict(spread=True, grad_release=True), ["--grad_release", "--fsdp"]),
    (dict(spread=True, average_on="cpu"), ["--average_on cpu", "--fsdp"]),
    (dict(spread=True, states_on="cpu"), ["--states_on cpu", "--fsdp"]),
    (dict(grad_release=True, accumulate=2), ["--accumulate 2", "drop --grad_release"]),
    (dict(grad_release=True, clip_grad=0.5), ["--clip_grad 0.5", "--clip_tensor 0.5"]),
    (dict(grad_release=True, recipe=recipe(fp16=True)), ["--fp16", "use --bf16"]),
    (dict(grad_release=True, compiled=True), ["compiled", "--compile"]),
    (dict(grad_release=True, processes=2), ["use one process"]),
    (dict(grad_release=True, states_on="cpu"), ["--states_on cpu", "--opt8bit"]),
]


def asked_for(recipe=PLAIN, spread=False, compiled=False, processes=1, **options):
    facts = dict(recipe=recipe, options=Options(**options), spread=spread, compiled=compiled)
    return types.SimpleNamespace(
        **facts, convolves_on_cpu=False, quantised_base=False, processes=processes
    )


@pytest.mark.parametrize("facts, words", CASES, ids=lambda x: "+".join(x) if isinstance(x, dict) else "")
def test_a_run_that_can_not_be_is_refused(facts, words):
    with pytest.raises(Refused) as refused:
        wanted_parts(asked_for(**facts))
    for word in words:
        assert word in str(refused.value)


def test_every_rule_of_a_run_has_a_case():
    met = set()
    for facts, _ in CASES:
        run = asked_for(**facts)
        tables = [SETTING_RULES, SPREAD_RULES * run.spread, RELEASE_RULES * run.options.grad_release]
        for rules_of_part in tables:
            met.update(rule for rule in rules_of_part if rule.when(run))
    assert met == {*SETTING_RULES, *SPREAD_RULES, *RELEASE_RULES}


def test_a_run_of_defaults_is_refused_by_none():
    wanted_parts(asked_for())
    wanted_parts(asked_for(FP8, compiled=True, processes=8, accumulate=4, clip_grad=1.0, states_on="cpu"))
    wanted_parts(asked_for(spread=True, processes=2, clip_tensor=1.0))
    refuse(NET_RULES, net())


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.DataParallel(nn.Linear(2, 2)), "run.forward = DataParallel(run.model)"),
        (nn.ReLU(), "nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "requires_grad=True"),
    ],
    ids=["wrapped", "empty", "frozen"],
)
def test_a_net_that_can_not_be_trained(model, words):
    with pytest.raises(Refused, match=words.replace("(", r"\(").replace(")", r"\)")):
        refuse(NET_RULES, model)


def test_optimisers_that_step_no_rows():
    params = [nn.Parameter(torch.ones(4, 4))]
    refuse_whole(AdamW(params), "adamw")
    with pytest.raises(Refused, match="Muon steps no rows"):
        refuse_whole(Muon(params), "muon")
    with pytest.raises(Refused, match="mine steps no rows"):
        refuse_whole(Peer(torch.optim.SGD(params, lr=0.1)), "mine")


def test_moments_of_a_strangers_optimiser_stay_where_they_are():
    with pytest.raises(Refused, match="torch's SGD is none"):
        Precision(net(), recipe(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), states_on="cpu")


def test_the_first_rule_that_holds_speaks():
    with pytest.raises(Refused, match="clip_grad=-1"):
        wanted_parts(asked_for(clip_grad=-1, grad_release=True, processes=2))


def test_the_order_of_the_parts_of_a_run():
    """Sums before ranks before the loss scale, methods as they change layers, and release last of all."""
    order = "MicroBatches NetRanks LossScale Lora NF4Base QuantisedBase Sparse24 FP8 FP4 FP8Attention "
    order += "Quantised Onednn AveragesOnCPU Offloaded Released"
    assert [place.kind for place in PARTS] == order.split()
    assert all(issubclass(place.load(), Part) for place in PARTS)
    layers = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
    run = Precision(layers, recipe(fp16=True, sparse24="srste"), lr=1e-3, accumulate=2)
    assert [type(part).__name__ for part in run.parts] == ["MicroBatches", "LossScale", "Sparse24"]
    assert Precision(nn.Linear(4, 4), recipe(pure_bf16=True, stochastic=True)).parts == []
