"""Broken runs that go on as if nothing were wrong: each is named with its cause. Healthy ones beside them,
whose gradients change by plan, are in healthy/steps.py.
"""

import pytest
import torch
from test_watch_loop import losing, net
from torch import nn

from lowprec import rounding
from lowprec.watch.watch import Watch

FIRST, LAST = "0.weight", "3.weight"


class Loop:
    """A loop over a tiny net. A case says what happens after backward and after the step, and how it looks.

    graded, stepped: called with the loop. make: parameters -> optimiser. every: steps between looks.
    """

    def __init__(self, graded=None, stepped=None, make=None, steps=13, every=3, dtype=torch.float32, **watch):
        self.model = net(dtype)
        make = make or (lambda params: torch.optim.AdamW(params, lr=1e-3))
        self.optimizer = make(self.model.parameters())
        self.step = 0
        self.watch = Watch(self.model, self.optimizer, every=every, **watch)
        for self.step in range(steps):
            torch.manual_seed(rounding.hash64(self.step) >> 1)
            self.forward()
            if graded:
                graded(self)
            self.optimizer.step()
            with torch.no_grad():
                if stepped:
                    stepped(self)
        self.watch.remove()

    def forward(self):
        x = torch.randn(32, 16).to(next(self.model.parameters()).dtype)
        self.optimizer.zero_grad()
        (self.model(x).float() - x[:, :4].float()).square().mean().backward()

    @property
    def named(self):
        return dict(self.model.named_parameters())

    def scale(self, factor, part=""):
        for name, p in self.named.items():
            if part in name:
                p.grad.mul_(factor)


def says(watch, site, tensor, words, severity=None):
    """Whether the worst finding is that one."""
    worst = watch.findings()[0]
    assert (worst.site, worst.tensor) == (site, tensor), str(watch)
    assert words in f"{worst.text} -> {worst.remedy}", str(watch)
    assert severity is None or worst.severity == severity, str(watch)
    assert watch.diagnosis().status == 1


# ---- Gradients between backward and the step ---------------------------------------------------------------


def clipped_by_an_fp16_norm(loop):
    """The norm of these gradients is infinite in fp16."""
    for p in loop.named.values():
        p.grad.mul_(2.0**20)
    norm = nn.utils.get_total_norm([p.grad for p in loop.named.values()]).half()
    for p in loop.named.values():
        p.grad.mul_(torch.clamp(1.0 / norm, max=1.0))


def of_first(loop):
    return loop.named[FIRST].grad


ZEROED, SHARE = "set to 0 between backward and the step", "of the entries of its gradient"
GRADIENTS = {
    "times -0.5": (lambda loop: loop.scale(-0.5), "", "multiplied by -0.5", "severe"),
    "times -1": (lambda loop: loop.scale(-1.0), "", "multiplied by -1 ", "severe"),
    "times 0": (lambda loop: loop.scale(0.0), "", ZEROED, "severe"),
    "cleared": (lambda loop: loop.optimizer.zero_grad(), "", ZEROED, "severe"),
    "an infinite norm": (clipped_by_an_fp16_norm, "", "an infinite one, as of fp16", "severe"),
    "a norm of NaN": (lambda loop: loop.scale(torch.nan), "", "finite after backward, and not", "severe"),
    "times infinity": (lambda loop: loop.scale(torch.inf), "", "finite after backward, and not", "severe"),
    "zero at times": (lambda loop: loop.scale(1.0 - loop.step % 2), "", ZEROED, None),
    "one tensor negated": (lambda loop: loop.scale(-1.0, FIRST), FIRST, "its gradient is multi", "severe"),
    "one tensor zeroed": (lambda loop: loop.scale(0.0, FIRST), FIRST, "its gradient is set to 0", "severe"),
    "half negated": (lambda loop: of_first(loop)[:32].neg_(), FIRST, f"50% {SHARE} change", "severe"),
    "half zeroed": (lambda loop: of_first(loop)[:32].zero_(), FIRST, f"50% {SHARE} are set", "moderate"),
    # an aligned part, which else looks as if it were detached
    "columns zeroed": (lambda loop: of_first(loop)[:, :4].zero_(), FIRST, f"25% {SHARE} are set", "moderate"),
}  # fmt: skip


@pytest.mark.parametrize("change, tensor, words, severity", GRADIENTS.values(), ids=GRADIENTS)
def test_a_changed_gradient_is_named(change, tensor, words, severity):
    says(Loop(change).watch, "grads", tensor, words, severity)


def test_a_loss_that_does_not_depend_on_the_net_is_named():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=1)
    for _ in range(5):
        optimizer.zero_grad()
        (0.0 * model(torch.randn(8, 16)).sum()).backward()
        optimizer.step()
    says(watch, "grads", "", "of all tensors are 0 at each look", "severe")


# ---- fp16 and values that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_states_in_fp16_are_named_and_not_the_gradients_that_they_break(make):
    watch = Loop(dtype=torch.half, make=lambda params: make(params, lr=1e-3)).watch
    says(watch, "exp_avg_sq", FIRST, "in fp16 the optimiser's eps is 0", "severe")
    assert {site for site, _ in losing(watch)} == {"exp_avg_sq"}
    assert "smaller eps" not in str(watch) and "lower learning rate" not in str(watch)


def test_states_in_fp16_are_named_where_no_look_saw_the_first_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    watch = None
    for step in range(6):
        if step == 3:
            watch = Watch(model, optimizer, every=1)
        tokens = torch.randint(0, 32, (64,))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(tokens).float(), torch.ones(64, 32))
        (loss * 2.0**14).backward()
        optimizer.step()
    says(watch, "exp_avg_sq", FIRST.replace("3", "0"), "its eps of 1e-08 is 0 in fp16", "severe")


def huge(loop):
    if loop.step == 7:
        loop.named[FIRST].data.fill_(torch.inf)


class DividesBy0(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].data.div_(0.0)


def test_a_second_moment_beyond_fp16_is_named():
    """Of gradients whose loss scale was not taken off."""

    def large(loop):
        loop.scale(1e4 / max(float(p.grad.abs().max()) for p in loop.named.values()))

    watch = Loop(large, dtype=torch.half, make=lambda p: torch.optim.AdamW(p, lr=1e-4, eps=1e-4)).watch
    assert any("holds no squares above 65,504" in f.text for f in watch.findings()), str(watch)


def rate_below_zero(loop):
    """A schedule that goes on beyond its end."""
    loop.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - loop.step / 6)


def through_bf16(loop):
    for p in loop.named.values():
        p.copy_(p.bfloat16())


def swapped(loop):
    """As after a checkpoint that was read wrongly."""
    if loop.step == 7:
        for state in loop.optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def shrunk(loop):
    for p in loop.named.values():
        p.mul_(0.99)


def half_restored(loop):
    kept = loop.__dict__.setdefault("kept", {})
    for name, p in loop.named.items():
        if name in kept:
            p.lerp_(kept[name], 0.5)
        kept[name] = p.clone()


BETAS = (0.999, 0.9)
AFTER = "something else moves it after the step"
STEPS = {  # of a Loop, and the worst finding
    "a rate below 0": (dict(graded=rate_below_zero), "update", "", "learning rate was below 0", "severe"),
    "a step twice": (
        dict(graded=lambda loop: loop.optimizer.step()),
        *("grads", "", "read the gradients of the step before once more"),
    ),
    "through bf16": (dict(stepped=through_bf16), "update", FIRST, "its values are bf16 numbers", "severe"),
    "swapped moments": (dict(stepped=swapped), "exp_avg_sq", FIRST, "below 0, which no mean of", "severe"),
    "no states": (
        dict(stepped=lambda loop: loop.optimizer.state.clear()),
        *("step", "", "states were empty at 100% of the looks", "severe"),
    ),
    "changed weights": (dict(stepped=shrunk), "update", FIRST, AFTER, "moderate"),
    "half restored weights": (dict(stepped=half_restored), "update", FIRST, AFTER, "moderate"),
    "infinite weights, where no look saw it": (
        dict(stepped=huge),
        *("weights", FIRST, "weights of its sample were not finite before a step", "severe"),
    ),
    "a step that divides by 0": (
        dict(make=lambda params: DividesBy0(params, lr=1e-3)),
        *("update", FIRST, "1,024 weights became not finite in a step whose gradients are finite"),
    ),
    "swapped betas": (
        dict(make=lambda params: torch.optim.AdamW(params, lr=1e-3, betas=BETAS)),
        *("optimizer", "", "betas are 0.999 and 0.9"),
    ),
}


@pytest.mark.parametrize("loop, worst", [(loop, worst) for loop, *worst in STEPS.values()], ids=STEPS)
def test_a_step_that_is_none_is_named(loop, worst):
    says(Loop(**loop).watch, *worst)


@pytest.mark.parametrize("watched_before", [True, False])
def test_an_optimizer_of_weights_that_the_net_has_no_more_is_named(watched_before):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=2) if watched_before else None
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    watch = watch or Watch(model, optimizer, every=2)
    for _ in range(7):
        model.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    says(watch, "optimizer", "", "none of its parameters ever has a gradient", "severe")


class Overflowing(Loop):
    """One entry of each batch is infinite; gradients of NaN are made 0 before the step."""

    def forward(self):
        x = torch.randn(32, 16)
        x[0, 0] = torch.inf
        self.optimizer.zero_grad()
        (self.model(x) - x[:, :4]).square().mean().backward()


def hide(loop):
    for p in loop.named.values():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


def test_gradients_that_are_made_finite_are_named():
    says(
        Overflowing(hide).watch, "grads", "", "not finite after backward, and finite when the step", "severe"
    )
