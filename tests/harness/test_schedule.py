"""What is a function of the step alone."""

import math
from types import SimpleNamespace

import pytest

from lowprec.trials.schedule import lr_factor


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_learning_rate_is_a_function_of_the_step(schedule):
    config = SimpleNamespace(lr_schedule=schedule, warmup=10, steps=110)
    factors = [lr_factor(config, step) for step in range(111)]
    assert factors[:10] == [(step + 1) / 10 for step in range(10)] and factors[10] == 1
    middle, last = factors[60], factors[110]
    if schedule == "constant":
        assert set(factors[10:]) == {1.0}
    else:
        assert middle == pytest.approx(0.5) and last == pytest.approx(0, abs=1e-12)
        assert all(a > b for a, b in zip(factors[10:], factors[11:], strict=False))
    if schedule == "linear":
        assert factors[35] == pytest.approx(0.75)
    if schedule == "cosine":
        assert factors[35] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
