"""rules.py: every rule about a run has a case here, and says what works instead."""

import pytest
import torch
from common import net
from torch import nn

from lowprec import rules
from lowprec.errors import Refused
from lowprec.optimizers.adamw import AdamW
from lowprec.optimizers.muon import Muon
from lowprec.optimizers.peers import Peer
from lowprec.recipes import recipe
from lowprec.rules import (
    COMMAND_RULES,
    NET_RULES,
    OPTIMIZER_RULES,
    PartFacts,
    RunFacts,
    refuse,
    refuse_optimizer,
)

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
    (dict(spread=True, compiled=True), ["--compile with --fsdp"]),
    (dict(grad_release=True, accumulate=2), ["--accumulate 2", "drop --grad_release"]),
    (dict(grad_release=True, clip_grad=0.5), ["--clip_grad 0.5", "--clip_tensor 0.5"]),
    (dict(grad_release=True, recipe=recipe(fp16=True)), ["--fp16", "use --bf16"]),
    (dict(grad_release=True, compiled=True), ["compiled", "--compile"]),
    (dict(grad_release=True, processes=2), ["use one process"]),
    (dict(grad_release=True, states_on="cpu"), ["--states_on cpu", "--opt8bit"]),
]


@pytest.mark.parametrize("facts, words", CASES, ids=lambda x: "+".join(x) if isinstance(x, dict) else "")
def test_a_run_that_can_not_be_is_refused(facts, words):
    with pytest.raises(Refused) as refused:
        refuse(COMMAND_RULES, RunFacts(**{"recipe": PLAIN, **facts}))
    for word in words:
        assert word in str(refused.value)


def test_every_rule_of_a_run_has_a_case():
    met = set()
    for facts, _ in CASES:
        asked_for = RunFacts(**{"recipe": PLAIN, **facts})
        met.update(rule for rule in COMMAND_RULES if rule.when(asked_for))
    assert met == set(COMMAND_RULES)


def test_a_run_of_defaults_is_refused_by_none():
    refuse(COMMAND_RULES, RunFacts(PLAIN))
    much = RunFacts(FP8, compiled=True, processes=8, accumulate=4, clip_grad=1.0, states_on="cpu")
    refuse(COMMAND_RULES, much)
    refuse(COMMAND_RULES, RunFacts(PLAIN, spread=True, processes=2, clip_tensor=1.0))
    refuse(NET_RULES, net())


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.DataParallel(nn.Linear(2, 2)), "run.forward = DataParallel(run.model)"),
        (nn.ReLU(), "no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "requires_grad=True"),
    ],
    ids=["wrapped", "empty", "frozen"],
)
def test_a_net_that_can_not_be_trained(model, words):
    with pytest.raises(Refused, match=words.replace("(", r"\(").replace(")", r"\)")):
        refuse(NET_RULES, model)


def test_optimisers_that_a_run_can_not_step_by():
    params = [nn.Parameter(torch.ones(4, 4))]
    ours, theirs = AdamW(params), Peer(torch.optim.SGD(params, lr=0.1))
    refuse_optimizer(ours, "adamw", spread=True, states_on="cpu")
    refuse_optimizer(theirs, "sgd")
    with pytest.raises(Refused, match="Muon steps no rows"):
        refuse_optimizer(Muon(params), "muon", spread=True)
    with pytest.raises(Refused, match="mine steps no rows"):
        refuse_optimizer(theirs, "mine", spread=True)
    with pytest.raises(Refused, match="torch's SGD is none"):
        refuse_optimizer(theirs, "mine", states_on="cpu")
    both = PartFacts(theirs, "mine", spread=True, states_on="cpu")
    assert len(rules.sentences(OPTIMIZER_RULES, both)) == 2


def test_the_first_rule_that_holds_speaks():
    with pytest.raises(Refused, match="clip_grad=-1"):
        refuse(COMMAND_RULES, RunFacts(PLAIN, clip_grad=-1, grad_release=True, processes=2))
