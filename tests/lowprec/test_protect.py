"""protect.py: any torch optimiser on bf16 weights, by fp32 copies and writes that keep what nearest loses."""

import copy
import functools

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, net, refused, same, start, through_a_file, train
from torch import nn

import lowprec
from lowprec import protect
from lowprec.optimizers import protect as module

eager = common.eager
# of pytorch_optimizer
FOREIGN = "Lion AdaBelief Adan StableAdamW Lamb SOAP MARS ADOPT Ranger21 Prodigy".split()
OF_TORCH = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-4),
    "foreach": functools.partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "plain SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-3),
}


def optimizer_of(name, params):
    params = list(params)
    if name in OF_TORCH:
        return OF_TORCH[name](params)
    if name == "schedule-free":
        return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=1e-4)
    if name == "bitsandbytes":
        return pytest.importorskip("bitsandbytes").optim.AdamW(params, lr=1e-4)
    if name == "prodigy":
        return pytest.importorskip("prodigyopt").Prodigy(params)
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)
    options = {"num_iterations": 60} if name == "Ranger21" else {}
    return kind(params, lr=1e-4 if name != "Prodigy" else 1.0, **options)


def small(dtype=BF16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32)).to(dtype)


def steps(model, optimizer, begin, end):
    for i in range(begin, end):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        F.mse_loss(model(x.to(model[0].weight.dtype)).float(), x.flip(-1)).backward()
        optimizer.step()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


NAMES = [*OF_TORCH, "schedule-free", "prodigy", *FOREIGN]
each = pytest.mark.parametrize(
    "name, update",
    [(name, "stochastic") for name in NAMES]
    + [(name, "kahan") for name in ("AdamW", "plain SGD", "Adagrad", "SOAP")],
)


@each
def test_it_goes_the_way_of_the_optimiser_on_fp32_weights(name, update):
    reference, model = small().float(), small()
    begin = flat(reference.parameters())
    alone = optimizer_of(name, reference.parameters())
    if name == "schedule-free":
        alone.train()
    steps(reference, alone, 0, 30)
    optimizer = protect(optimizer_of(name, model.parameters()), update)
    steps(model, optimizer, 0, 30)
    wanted = flat(reference.parameters()) - begin
    went = torch.cat([optimizer.held(p) for p in model.parameters()]) - begin
    assert abs(went @ wanted / (wanted @ wanted) - 1) < 0.05  # noise stands across the way
    if update == "kahan":
        assert (went - wanted).norm() < 0.3 * wanted.norm()
    assert optimizer.together == (name in ("Ranger21", "Prodigy", "prodigy"))


@each
def test_it_resumes_bit_for_bit(name, update):
    model = small()
    optimizer = protect(optimizer_of(name, model.parameters()), update, seed=5)
    steps(model, optimizer, 0, 3)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(model, optimizer, 3, 6)
    other = small()
    again = protect(optimizer_of(name, other.parameters()), update, seed=5)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    steps(other, again, 3, 6)
    assert all(map(same, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("name", ["AdamW", "bitsandbytes"])  # which count steps in tensors, and in ints
def test_a_state_of_the_optimiser_alone_goes_on_in_fp32(name):
    model = small()
    alone = optimizer_of(name, model.parameters())
    steps(model, alone, 0, 2)
    optimizer = protect(optimizer_of(name, model.parameters()))
    optimizer.load_state_dict(through_a_file(alone.state_dict()))
    steps(model, optimizer, 2, 4)
    held = [t for state in optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in held if torch.is_tensor(t)} == {torch.float32}


def test_writes_are_right_on_average_and_share_no_noise():
    params = [nn.Parameter(torch.ones(100, 200).to(BF16)) for _ in range(2)]
    optimizer = protect(torch.optim.SGD(params, lr=0.3 * 2**-8), seed=1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = [(p.detach() < 1).double().flatten() for p in params]
    for m in moved:
        assert abs(m.mean().item() - 0.3) < 5 * (0.21 / 20000) ** 0.5
    assert abs(common.correlation(*moved)) < 5 / 20000**0.5


class Counting(torch.optim.SGD):
    """It counts its steps in its groups, and says what it sees of weights at once."""

    entries = []

    def step(self, closure=None):
        self.entries.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_few_copies_are_there_at_once_and_a_step_is_counted_once():
    large, *small = [nn.Parameter(torch.ones(n, dtype=BF16)) for n in (module.COPIES_AT_ONCE, 8, 8)]
    optimizer = protect(Counting([{"params": [large, small[0]]}, {"params": small[1:]}], lr=0.1))
    del Counting.entries[:]
    for p in (large, *small):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert Counting.entries == [large.numel(), 16]
    assert [group["k"] for group in optimizer.param_groups] == [1, 1]


def test_fp32_weights_are_stepped_as_they_are_and_frozen_ones_stay():
    model, reference = small(torch.float32), small(torch.float32)
    for one in (model, reference):
        one[0].weight.requires_grad_(False)
        one[0].weight.data = one[0].weight.half().float()
    steps(model, protect(torch.optim.AdamW(model.parameters(), lr=1e-3)), 0, 4)
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), 0, 4)
    assert all(map(same, model.parameters(), reference.parameters()))


def test_a_copy_and_a_schedule_go_on_as_the_original():
    model = small()
    optimizer = protect(torch.optim.RMSprop(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    steps(model, optimizer, 0, 2)
    schedule.step()
    other, again = copy.deepcopy((model, optimizer))
    steps(model, optimizer, 2, 4)
    steps(other, again, 2, 4)
    assert all(map(same, model.parameters(), other.parameters()))
    assert optimizer.inner.param_groups[0]["lr"] < 1e-3


def test_weights_to_evaluate_stand_in_for_the_trained_ones_which_come_back_to_the_bit():
    model = small()
    optimizer = protect(optimizer_of("schedule-free", model.parameters()))
    steps(model, optimizer, 0, 20)
    trained = copy.deepcopy(model.state_dict())
    optimizer.eval()
    assert not same(model[0].weight.detach(), trained["0.weight"])
    optimizer.train()
    assert all(map(same, model.state_dict().values(), trained.values()))


@pytest.mark.parametrize("flags", [dict(stochastic=True), dict(kahan=True)], ids=str)
def test_a_recipe_protects_the_optimiser_that_it_is_given(flags):
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    run = start(dict(pure_bf16=True, **flags), net(), optimizer=sgd, clip_grad=1.0, ema_decay=0.9)
    (report,) = train(run, 1, measure=True)
    assert isinstance(run.optimizer.inner, torch.optim.SGD) and 0 < report["update_survival"] <= 1
    rows = {row["site"]: row for row in run.ledger().rows}
    assert rows["kahan"]["bytes"] == 2 * ("kahan" in flags) and rows["exp_avg"]["bytes"] == 4
    assert (rows["update"]["value"] == "stochastic") == ("stochastic" in flags)


def test_quantised_weights_are_stepped_and_round_by_themselves():
    quantise = pytest.importorskip("torchao").quantize_
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    model = small()
    quantise(model, int8_weight_only_quantized_training())
    before = model[0].weight.detach().dequantize().clone()
    steps(model, protect(torch.optim.AdamW(model.parameters(), lr=1e-3)), 0, 4)
    assert type(model[0].weight).__name__.startswith("Int8")
    assert 1e-4 < (model[0].weight.detach().dequantize() - before).abs().mean() < 1e-2


class Elsewhere(torch.optim.SGD):
    """It knows its parameters by name, and steps no others."""

    def step(self, closure=None):
        if not hasattr(self, "mine"):
            self.mine = list(self.param_groups[0]["params"])
        for p in self.mine:
            p.sub_(0.1 * p.grad)


def bare_step():
    optimizer = torch.optim.AdamW(small().parameters())
    protect(optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: protect(lowprec.AdamW(small().parameters())), "AdamW writes bf16 weights by itself"),
        (lambda: protect(torch.optim.LBFGS(small().parameters())), "LBFGS asks for a closure"),
        (lambda: protect(torch.optim.AdamW(small().parameters(), capturable=True)), "capturable=True"),
        (lambda: protect(torch.optim.SGD(small(torch.float16).parameters())), "fp32 and bf16"),
        (lambda: protect(torch.optim.SGD(small().parameters()), "nearest"), "choose from stochastic, kahan"),
        (lambda: protect(Elsewhere(small().parameters())), "Elsewhere steps copies of weights otherwise"),
        (bare_step, "step what protect returned"),
        (lambda: protect(small()), "protect takes a torch.optim.Optimizer, not Sequential"),
    ],
)
def test_what_it_can_not_do_is_refused(make, says):
    refused(make, says)
