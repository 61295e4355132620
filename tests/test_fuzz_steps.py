"""Each replacement of fuzz_steps.py once: a step after it is right, or refused."""

import common
import fuzz_steps
import pytest

eager = common.eager
CASES = range(len(fuzz_steps.REPLACEMENTS))


def test_a_step_with_replaced_tensors_is_right_or_refused():
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package)
    fuzz_steps.settle()
    assert fuzz_steps.findings(CASES) == []
