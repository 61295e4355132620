"""What users of other programs met: faults are named with their cause, healthy loops beside them are not."""

import json
import random
from pathlib import Path

import pytest
import torch
from healthy import rules
from healthy.shared import adam, mlp, task, trained
from torch import nn

from lowprec import AdamW, Muon, Watch, protect
from lowprec.watch import verdicts

BF16 = torch.bfloat16


def losing(watch):
    return [f for f in watch.findings() if f.severity != "note"]


def named(watch, site, words):
    return [f for f in losing(watch) if f.site == site and words in f.text]


# ---- Classes with a rule of their own ----------------------------------------------------------------------


class Drawing(torch.optim.Optimizer):
    """SGD whose noise comes from generators of its own and of Python, at a rate that it changes in place."""

    def __init__(self, params, **options):
        random.seed(0)
        self.own = torch.Generator().manual_seed(0)
        super().__init__(params, dict(rate=torch.tensor(0.1)))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.own) * random.random()
                p.sub_((p.grad + 0.01 * noise) * group["rate"])
                self.state[p]["seen"] = torch.ones_like(p)
            group["rate"].mul_(0.9)


# what a class keeps beside its state, writes elsewhere, or draws
ODD = [rules.CountsInAnObject, rules.HalvesGradients, rules.Masked, rules.Lookahead, rules.StepsAnother]
ODD += [Drawing]


@pytest.mark.parametrize("kind", ODD)
def test_a_rule_of_its_own_keeps_its_bits(kind):
    watch = rules.with_rule(kind)
    watched = [p.detach().clone() for p in watch.model.parameters()]
    alone = mlp()
    optimizer = kind(alone.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(watch.steps):
        optimizer.zero_grad()
        task(alone, step).backward()
        optimizer.step()
    assert all(map(torch.equal, watched, alone.parameters()))


class Scaled(torch.optim.Optimizer):
    """RMSprop-like, written by noise in bf16; `forgets` decay where the weight is bf16."""

    def __init__(self, params, lr, weight_decay, forgets):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.forgets = forgets

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, x, g = self.state[p], p.float(), p.grad.float()
                square = state.setdefault("exp_avg_sq", torch.zeros_like(x)).lerp_(g.square(), 0.05)
                if p.dtype == torch.float32 or not self.forgets:
                    x.mul_(1 - group["lr"] * group["weight_decay"])
                x.sub_(group["lr"] * g / (square.sqrt() + 1e-8))
                if p.dtype == BF16:
                    noise = torch.randint_like(x, 0, 1 << 16, dtype=torch.int32)
                    x = ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
                p.copy_(x)


@pytest.mark.parametrize("forgets", [True, False])
def test_decay_that_another_optimiser_loses(forgets):
    net = mlp().to(BF16)
    watch = trained(net, Scaled(net.parameters(), 1e-3, 2.0, forgets), low_task)
    assert bool(named(watch, "weight decay", "lost")) is forgets, str(watch)
    assert not any("stochastic" in f.remedy for f in losing(watch)), "it rounds by noise already"


def low_task(net, step):
    low = next(net.parameters()).dtype
    return task(lambda x: net(x.to(low)).float(), step)


def test_much_decay_that_is_lost_stands_before_the_update_that_lacks_it():
    net = mlp().to(BF16)
    watch = trained(net, Scaled(net.parameters(), 1e-3, 100.0, True), low_task)
    last = str(watch).splitlines()[-1]
    assert last.startswith("most likely to blame for bad results: weight decay of 7 tensors"), str(watch)
    assert "sound" not in str(watch), "an update that lacks its decay is not sound"


@pytest.mark.parametrize("codes, wrong", [("int4", True), ("int8", False), ("bf16", False)])
def test_momentum_in_4_bits_that_is_orthogonalised(codes, wrong):
    net = nn.Sequential(nn.Linear(32, 128, bias=False), nn.GELU(), nn.Linear(128, 32, bias=False))
    options = dict(lr=1e-3, update="stochastic", kinds={"momentum": codes}, compiled=False)
    watch = trained(net, Muon(net.parameters(), **options))
    assert bool(named(watch, "momentum", "its codes are")) is wrong, str(watch)
    assert wrong or not losing(watch)


# ---- Counters, buffers, averages, masters ------------------------------------------------------------------


def test_a_counter_one_ahead_of_empty_moments_is_a_note_of_its_own():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = mlp()
    optimizer = adam(net)
    get_optimizer_state_dict(net, optimizer)
    watch = trained(net, optimizer)
    assert not losing(watch), str(watch)
    assert "1.34 times too short" in str(watch)


@pytest.mark.parametrize(
    "dtype, by, wrong",
    [(BF16, 20, True), (BF16, 4, False), (torch.float16, 100, True), (torch.float16, 20, False)]
    + [(torch.float32, 100, False)],
)
def test_a_buffer_that_counts_in_16_bits(dtype, by, wrong):
    net = mlp()
    net.register_buffer("tokens", torch.zeros(1, dtype=dtype))
    watch = trained(net, after=lambda step: net.tokens.add_(by))
    assert bool(named(watch, "buffers", "adds to")) is wrong, str(watch)


@pytest.mark.parametrize("rate", [0.002, 0.02])
@pytest.mark.parametrize("overwritten", [13, None])
def test_an_average_that_the_weights_are_written_over_once(overwritten, rate):
    net = mlp()
    average = {name: p.detach().clone() for name, p in net.named_parameters()}

    def move(step):
        for name, p in net.named_parameters():
            average[name].lerp_(p.detach(), 1.0 if step == overwritten else rate)

    watch = trained(net, ema=average, after=move)
    assert bool(named(watch, "ema", "wrote the weights over it")) is bool(overwritten), str(watch)


def rounded(net):
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.to(BF16))


def test_fp32_masters_rebuilt_from_bf16():
    net = mlp()
    optimizer = adam(net)
    between = trained(net, optimizer, after=lambda step: step == 13 and rounded(net))
    between.remove()
    assert named(between, "update", "became bf16 numbers before step 15"), str(between)
    rounded(net)
    resumed = trained(net, optimizer)
    assert len(named(resumed, "update", "bf16 numbers when the watch began")) >= 4, str(resumed)


def test_fp32_weights_that_begin_as_bf16_numbers_are_healthy():
    net = mlp()
    rounded(net)
    start = [p.detach().clone() for p in net.parameters()]
    finder = trained(net)
    finder.remove()
    with torch.no_grad():
        torch._foreach_copy_(list(net.parameters()), start)  # as a search for the rate does

    def put_back(step):
        if step == 20:
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), start)

    for watch in (finder, trained(net, after=put_back)):
        assert not [f for f in losing(watch) if "rebuilt" in f.text], str(watch)


# ---- Loss scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [50_000.0, 2.0**16, 2.0**32])
def test_a_loss_scale_that_is_taken_off_and_was_never_put_on(by):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    watch = trained(net, optimizer, between=lambda step: [p.grad.div_(by) for p in net.parameters()])
    assert named(watch, "grads", f"divided by {by:,.0f}")[0].severity == "severe"


def test_what_divides_gradients_below_eps_is_named():
    net = mlp()
    watch = trained(net, between=lambda step: [p.grad.div_(2.0**40) for p in net.parameters()])
    assert named(watch, "grads", "steps are too short, as gradients are divided by 1,099,511,627,776")


@pytest.mark.parametrize("make", [adam, lambda net: torch.optim.SGD(net.parameters(), 1e-3)])
def test_a_loss_scale_that_was_put_on_is_healthy(make):
    net = mlp()
    watch = trained(
        net,
        make(net),
        lambda net, step: task(net, step) * 2.0**16,
        between=lambda step: [p.grad.div_(2.0**16) for p in net.parameters()],
    )
    assert not losing(watch), str(watch)


class Overflows(nn.Module):
    """A net whose output is not finite in fp16 from one step on, until another."""

    def __init__(self, since, until):
        super().__init__()
        self.net, self.since, self.until, self.now = mlp(), since, until, 0

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            y = self.net(x)
            return y * 1e6 if self.since <= self.now < self.until else y


@pytest.mark.parametrize(
    "since, until, words",
    [
        (0, 999, "no step was done since this watch began, in 60 backward passes: gradients are not finite"),
        (10, 999, "no step was done in the last 50 backward passes: gradients are not finite"),
        (0, 30, None),
        (20, 50, None),
    ],
)
def test_fp16_that_steps_no_more(since, until, words):
    net = Overflows(since, until)
    optimizer = adam(net)
    scaler = torch.amp.GradScaler("cpu")
    watch = Watch(net, optimizer, every=10)
    for net.now in range(60):
        optimizer.zero_grad()
        scaler.scale(task(net, net.now)).backward()
        scaler.step(optimizer)
        scaler.update()
    if words is None:
        assert not losing(watch), str(watch)
    else:
        words += "; first of all the output of Overflows is not finite"
        assert named(watch, "step", words)[0].severity == "severe"
        assert words in str(watch).splitlines()[-1] and "bf16" in str(watch).splitlines()[-1]


# ---- The verdict -------------------------------------------------------------------------------------------


def test_the_last_line_says_what_to_do_about_lost_updates():
    net = mlp().to(BF16)
    watch = trained(net, torch.optim.AdamW(net.parameters(), lr=1e-4), low_task)
    assert {"update", "exp_avg_sq"} <= {f.site for f in losing(watch)}
    *table, last = str(watch).splitlines()
    assert last.startswith("most likely to blame for bad results: update of ")
    assert "of all wanted movement" in last and "(experiment 0" in last
    assert 'lowprec.AdamW(params, lr=..., update="stochastic")' in last
    assert sum("under half an" in line for line in table) <= 2, "what has one cause is one row"
    tensors = [f.tensor for f in losing(watch) if f.site == "update"]
    assert f"{len(tensors)} tensors, the worst {tensors[0]}, {tensors[1]}, {tensors[2]}:" in " ".join(
        " ".join(table).split()
    )


class BySign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.defaults["lr"] * p.grad.sign())


def test_what_mends_the_lost_updates_of_a_foreign_optimiser_is_named_and_mends_them():
    net = mlp().to(BF16)
    watch = trained(net, BySign(net.parameters(), dict(lr=1e-5)), low_task)
    assert 'lowprec.protect(optimizer, update="stochastic")' in str(watch).splitlines()[-1]
    net = mlp().to(BF16)
    watch = trained(net, protect(BySign(net.parameters(), dict(lr=1e-5))), low_task)
    assert not losing(watch), str(watch)


def test_a_second_moment_that_loses_all_does_not_outrank_a_lost_update():
    net = mlp().to(BF16)
    options = dict(update="nearest", exp_avg_sq="bf16", compiled=False)
    watch = trained(net, AdamW(net.parameters(), lr=1e-3, **options), low_task)
    shares = {f.site: f.figure for f in reversed(losing(watch))}
    assert shares["exp_avg_sq"] > shares["update"]
    assert losing(watch)[0].site == "update"


@pytest.mark.parametrize("lost", verdicts.COSTS_OF_NEAREST)
def test_what_a_lost_update_cost_is_what_the_records_say(lost):
    _, loss, number = verdicts.COSTS_OF_NEAREST[lost]
    (folder,) = Path(verdicts.__file__).parents[2].glob(f"experiments/{number}-*")
    (arm,) = [line for line in (folder / "table.csv").read_text().splitlines() if f"+{loss:.2f} [" in line]
    arm = arm.partition(",")[0]
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    ends = [row["curves"]["update_survival"][-1] for row in rows if row["arm"] == arm]
    assert "nearest" in arm and abs(1 - sum(ends) / len(ends) - lost) < 0.015


# ---- Its own time ------------------------------------------------------------------------------------------


def looks_of(every):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    watch = Watch(net, optimizer, every=every)
    for _ in range(400):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return watch


def test_looks_that_cost_more_than_a_twentieth_of_the_steps_become_fewer():
    assert 3 <= looks_of(None).looks < 9 == looks_of(50).looks
    told = looks_of(10)
    assert told.looks == 41 and "of the time of the steps: a larger every= takes less" in str(told)
