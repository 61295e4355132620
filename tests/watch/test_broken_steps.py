"""Steps whose rate, gradients, states or weights are not what they should be: each is named rightly."""

import pytest
import torch
from test_broken_runs import FIRST, Loop, says
from test_watch_loop import eager, net

from lowprec.watch.watch import Watch

eager = eager


def rate_below_zero(loop):
    """A schedule that goes on beyond its end."""
    loop.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - loop.step / 6)


def once_more(loop):
    loop.optimizer.step()


def through_bf16(loop):
    for p in loop.named.values():
        p.copy_(p.bfloat16())


def swapped(loop):
    """As after a checkpoint that was read wrongly."""
    if loop.step == 7:
        for state in loop.optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def forgetful(loop):
    loop.optimizer.state.clear()


STEPS = {  # what happens after backward, what after the step, and the worst finding
    "a rate below 0": (rate_below_zero, None, ("update", "", "learning rate was below 0", "severe")),
    "a step twice": (once_more, None, ("grads", "", "read the gradients of the step before once more")),
    "weights through bf16": (
        None,
        through_bf16,
        ("update", FIRST, "its values are bf16 numbers after", "severe"),
    ),
    "moments swapped": (None, swapped, ("exp_avg_sq", FIRST, "are below 0, which no mean of", "severe")),
    "states emptied": (None, forgetful, ("step", "", "states were empty at 100% of the looks", "severe")),
}


@pytest.mark.parametrize("graded, stepped, worst", STEPS.values(), ids=STEPS)
def test_a_step_that_is_none_is_named(graded, stepped, worst):
    says(Loop(graded, stepped).watch, *worst)


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
