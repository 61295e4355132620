"""Other people's optimisers: one of ours in a dozen lines, several for one model, any of torch's."""

import functools
import math

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, Lion, batches, correlation, draw, net, refused, same, start, through_a_file, train
from torch import nn

from lowprec.optimizers import build
from lowprec.optimizers.rounded import AdamW
from lowprec.recipes import recipe

eager = common.eager

# ---- A stranger's optimiser --------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True, master="split")], ids=["fp32", "split"])
def test_a_strangers_lion_is_ours(flags):
    found = []
    for kind in (Lion, "lion"):
        params = [nn.Parameter(draw(n, seed=n).to(BF16 if flags else torch.float32)) for n in (7, 600, 4097)]
        optimizer = build.build(kind, params, recipe(**flags), lr=1e-2, weight_decay=0.1)
        for step in range(10):
            grads = {p: draw(len(p), seed=step) for p in params}
            wanted = [optimizer.held(p) + optimizer.wanted(p, g) for p, g in grads.items()]
            optimizer.step(grads=grads)
        for p, w in zip(params, wanted, strict=True):
            torch.testing.assert_close(optimizer.held(p), w, rtol=1e-6, atol=1e-8)
        found.append([optimizer.held(p) for p in params])
    assert all(map(same, *found))


def test_an_unknown_option_of_a_strangers_optimiser_is_an_error():
    with pytest.raises(TypeError, match="Lion has no option 'exp_avg_sq'"):
        Lion([nn.Parameter(torch.ones(3))], exp_avg_sq="bf16")


# ---- Groups ------------------------------------------------------------------------------------------------


def in_groups(model):
    """Matrices and convolutions by the default optimiser, the rest by Lion."""
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": large, "lr": 2e-3, "weight_decay": 0.1},
        {"params": small, "lr": 5e-4, "optimizer": Lion, "betas": (0.9, 0.99)},
    ]


def joined(flags, seed=0, optimizer="adamw", **options):
    model = net(seed)
    return start(flags, model, groups=in_groups(model), optimizer=optimizer, ema_decay=0.9, **options)


def cosine(run, steps=10):
    return torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, steps)


@pytest.mark.parametrize("flags", [{}, dict(pure_bf16=True, master="split")], ids=["fp32", "split"])
def test_each_group_is_stepped_by_its_own_optimiser_and_options(flags):
    run, model = joined(flags), net()
    groups = in_groups(model)
    adamw = torch.optim.AdamW(groups[0]["params"], lr=2e-3, weight_decay=0.1)
    lion = Lion(groups[1]["params"], lr=5e-4, betas=(0.9, 0.99))
    assert [type(part) for part in run.optimizer.parts] == [AdamW, Lion]
    schedules = [cosine(run), *(torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in (adamw, lion))]
    for step in range(8):
        for p, q in zip(run.params, model.parameters(), strict=True):
            q.grad = draw(*q.shape, seed=step).to(BF16).float()
            p.grad = q.grad.to(p.dtype)
        run.step(measure=step % 2 == 1)
        adamw.step()
        lion.step()
        for schedule in schedules:
            schedule.step()
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates == [adamw.param_groups[0]["lr"], lion.param_groups[0]["lr"]] and rates[0] < 0.2 * 2e-3
    weights = run.weights("raw")
    for name, q in model.named_parameters():
        assert same(weights[name].detach(), q.detach()), name


def test_joined_optimisers_answer_for_each_parameter():
    run = joined(dict(pure_bf16=True, stochastic=True), clip_grad=1.0)
    (report,) = train(run, 1, measure=True)
    assert 0 < report["update_survival"] <= 1 and 0 < report["exp_avg_sq_moved"] <= 1
    middle, gain = run.model.middle.weight, run.model.norm.weight
    assert run.optimizer.moment(middle, "exp_avg_sq") is not None
    assert run.optimizer.moment(gain, "exp_avg_sq") is None
    assert run.optimizer.moment(gain, "exp_avg").numel() == gain.numel()
    assert run.optimizer.decayed(middle) == pytest.approx(2e-4) and run.optimizer.decayed(gain) == 0
    assert run.optimizer.decay(gain, "exp_avg") == (0.9, 1)
    count = {size: sum(p.numel() for p in run.params if (p.dim() > 1) == size) for size in (True, False)}
    told = run.optimizer.nbytes()
    assert told["exp_avg"] == 2 * (count[True] + count[False]) and told["exp_avg_sq"] == 2 * count[True]
    n = count[True] + count[False]
    assert run.ledger().state_bytes * n == pytest.approx(4 * n + sum(told.values()), abs=0.01)
    assert run.optimizer_name == "AdamW and Lion"


def test_joined_optimisers_share_no_noise():
    model = nn.ModuleList([nn.Linear(200, 100, bias=False) for _ in range(2)])
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(1.0)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "optimizer": Lion}]
    run = start(dict(pure_bf16=True, stochastic=True), model, groups=groups, lr=0.4 * 2**-8)
    for p in run.params:
        p.grad = torch.ones_like(p)
    run.step()
    moved = [(p.detach() < 1).double().flatten() for p in run.params]
    for m in moved:
        assert abs(m.mean().item() - 0.4) < 5 * math.sqrt(0.24 / 20000)
    assert abs(correlation(*moved)) < 5 / math.sqrt(20000)


def test_a_state_that_is_refused_is_taken_by_none_of_the_joined():
    flags = dict(pure_bf16=True, stochastic=True)
    run = joined(flags)
    refused(lambda: run.load_state_dict(start(flags, net()).state_dict()), "joined")
    state = through_a_file(run.optimizer.state_dict())
    train(run, 1)
    before = [run.optimizer.moment(p, "exp_avg").clone() for p in run.params]
    state["parts"][1]["param_groups"][0]["params"].pop()
    refused(lambda: run.optimizer.load_state_dict(state), "another model")
    after = [run.optimizer.moment(p, "exp_avg") for p in run.params]
    assert all(map(same, before, after)), "the first part has taken its share of a state that was refused"


@pytest.mark.parametrize("of_second", [{}, {"optimizer": Lion}], ids=["alone", "joined"])
def test_optimisers_take_a_closure(of_second):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [p]}, {"params": [q], **of_second}]
    made = build.build("adamw", groups, recipe(), lr=0.1)

    def closure():
        made.zero_grad()
        loss = (p**2 + q**2).sum()
        loss.backward()
        return loss

    assert made.step(closure).item() == 6 and (p < 1).all() and (q < 1).all()


def test_groups_are_complete_and_distinct():
    def grouping(*groups):
        return lambda: start({}, model, groups=list(groups))

    model = net()
    missing = {"params": [p for name, p in model.named_parameters() if name != "out.bias"]}
    refused(grouping(missing), "out.bias", "in 0 of them", "requires_grad=False")
    everything = {"params": list(model.parameters())}
    refused(grouping(everything, {"params": [model.out.bias], "optimizer": Lion}), "out.bias is in 2 of")
    model.out.bias.requires_grad_(False)
    assert len(grouping(missing)().params) == len(missing["params"])


@pytest.mark.parametrize("form", ["generator", "named", "one tensor"])
def test_groups_take_what_torch_takes(form):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    first = {"generator": model[0].parameters(), "named": model[0].named_parameters()}.get(form)
    groups = [{"params": first or list(model[0].parameters())}, {"params": model[1].weight, "lr": 0.0}]
    if form != "one tensor":
        groups[1]["params"] = [model[1].weight]
    run = start({}, model, groups=groups, lr=1e-2)
    before = [p.detach().clone() for p in run.params]
    run.backward(run(torch.ones(2, 4)).square().mean())
    run.step()
    moved = [not same(p.detach(), q) for p, q in zip(run.params, before, strict=True)]
    assert moved == [True, True, False]


# ---- Any optimiser of torch's ------------------------------------------------------------------------------


class Wide(torch.optim.Optimizer):
    """Momentum in fp32, whatever the weights are: torch's own loader would cast it to their dtype."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros(p.shape))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * momentum)


STRANGERS = {
    "Wide": functools.partial(Wide, lr=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD without momentum": functools.partial(torch.optim.SGD, lr=0.5),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
}

WITH_FLAGS = [(name, dict(pure_bf16=True)) for name in STRANGERS]
WITH_FLAGS += [("SGD", {}), ("RMSprop", {}), ("SGD", dict(fp16=True))]


@pytest.mark.parametrize("name, flags", WITH_FLAGS, ids=str)
def test_any_optimiser_of_torch_trains_is_measured_counted_and_resumes(name, flags):
    run = start(flags, net(), optimizer=STRANGERS[name], clip_grad=1.0, ema_decay=0.9)
    losses, (x, y) = [], batches(1)[0]
    for _ in range(15):
        loss = F.mse_loss(run(x, torch.arange(8.0)), y)
        losses.append(loss.item())
        run.backward(loss)
        report = run.step(measure=True)
        assert 0 < report.get("update_survival", 1) <= 1  # a step that fp16 skips has none
    assert losses[-1] < 0.9 * losses[0] and run.generator()(x).isfinite().all()
    n = sum(p.numel() for p in run.params)
    states = [t for state in run.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    told = sum(2 * p.nbytes for p in run.params) + sum(t.nbytes for t in states if t.dim())
    assert run.ledger().state_bytes * n == pytest.approx(told, abs=0.01)
    whys = {row["why"] for row in run.ledger().rows if row["site"] in ("exp_avg", "exp_avg_sq")}
    assert whys == {f"as {name.split()[0]} does it"}
    if name == "SGD":
        p = run.params[0]
        (momentum,) = [t for t in run.optimizer.state[p].values() if torch.is_tensor(t)]
        assert torch.equal(run.optimizer.moment(p, "exp_avg").flatten().float(), momentum.flatten().float())
        assert run.optimizer.moment(p, "exp_avg_sq") is None
    saved = through_a_file(run.state_dict())
    other = start(flags, net(seed=1), optimizer=STRANGERS[name], clip_grad=1.0, ema_decay=0.9)
    other.load_state_dict(saved)
    for r in (run, other):
        train(r, 2, seed=1)
    assert all(same(a.detach(), b.detach()) for a, b in zip(run.params, other.params, strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        dict(opt8bit=True),
        dict(pure_bf16=True, master="split"),
        dict(pure_bf16=True, sites=["update=eco"]),
        dict(pure_bf16=True, kahan=True, stochastic=True),
    ],
    ids=str,
)
def test_what_belongs_to_ours_is_refused_beside_a_strangers_optimiser(flags):
    sgd = STRANGERS["SGD"]
    refused(lambda: start(flags, net(), optimizer=sgd), "belong to ours")
    mixed = [{"params": net().parameters(), "optimizer": sgd}]
    refused(lambda: build.build("adamw", mixed, recipe(**flags)), "belong to ours")
