"""Healthy loops raise no alarm: those of tests/healthy that need no package of other people. Run by hand,
tests/healthy_loops.py has those of packages too.
"""

import re

import pytest
from healthy import shared
from healthy_loops import findings_of

OF_OTHERS = re.compile("pytorch_optimizer|timm|schedulefree|prodigy|diffusers|lion$|came$")


@pytest.mark.parametrize("name", [name for name in shared.LOOPS if not OF_OTHERS.search(name)])
def test_a_healthy_loop_raises_no_alarm(name):
    alarms, _ = findings_of(name)
    assert alarms == []
