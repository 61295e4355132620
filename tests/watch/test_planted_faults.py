"""Watch names each planted fault by site and tensor, and finds nothing in loops that work.

Some steps a case here; WATCH_STEPS=300 runs all of them for as long as that says.
"""

import os

import cli
import faults
import planted
import pytest
import recipes_that_work  # noqa: F401  it fills planted.HEALTHY

from lowprec.watch import findings

STEPS = int(os.environ.get("WATCH_STEPS", "12"))


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    cli.shorten(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)


def named(case):
    return f"{case.client}: {case.name}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*planted.FAULTS, *planted.HELD_OUT], ids=named)
def test_a_planted_fault_is_named(case):
    if case.missed:
        pytest.skip(f"it can't be found: {case.missed}")
    diagnosis = case.run(STEPS).diagnosis()
    ok, losing = planted.says(case, diagnosis)
    assert ok, f"{case.expect} is not named:\n{diagnosis}"
    assert diagnosis.status == 1
    assert not str(diagnosis).splitlines()[-1].startswith("healthy")
    assert all(f.remedy for f in losing)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", planted.HEALTHY, ids=named)
def test_a_loop_that_works_is_healthy(case):
    watch = case.run(STEPS)
    diagnosis = watch.diagnosis()
    assert [f for f in diagnosis.findings if f.severity != "note"] == [], str(diagnosis)
    assert str(diagnosis).splitlines()[-1] == "healthy: nothing is losing information"
    assert diagnosis.status == 0 and watch.looks >= 3


def test_noise_that_is_biased_in_all_tensors_is_not_called_shared():
    case = next(case for case in planted.FAULTS if case.name == "noise only in [0, 1/2)")
    texts = [f.text for f in case.run(STEPS).findings() if f.site == "noise"]
    assert len(texts) >= 3 and all("errs toward zero" in text for text in texts)


def test_the_page_holds_the_table_of_findings():
    """`python -m lowprec.watch.findings docs/faults.md` writes it."""
    assert findings.table() in faults.PAGE.read_text()
