"""A small share of fuzz_steps.py: a step after somebody replaced one of its tensors is right, or refused."""

import common
import fuzz_steps
import pytest

eager = common.eager
CASES = range(2, 112, 8)


def test_a_step_with_replaced_tensors_is_right_or_refused():
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    fuzz_steps.settle()
    assert fuzz_steps.findings(CASES) == []
