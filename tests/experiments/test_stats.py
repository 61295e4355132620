"""experiments/log/stats.py: verdicts and intervals against scipy, error rates and power by simulation.

    python -m pytest tests/experiments/test_stats.py
"""
import math

import numpy as np
import pytest
import torch
from scipy import stats

from experiments.log.stats import equivalence


def verdict(differences, margin, **options):
    return equivalence(differences, margin, **options).verdict


def test_interval_and_verdict_against_scipy():
    seen = set()
    for seed in range(120):
        rng = np.random.default_rng(seed)
        x = rng.normal(rng.choice([0, 0.5, 2]), rng.choice([0.3, 1]), rng.integers(2, 12))
        found = equivalence(x.tolist(), margin=0.8)
        interval = stats.ttest_1samp(x, 0).confidence_interval(0.95)
        assert (found.mean, found.low, found.high) == pytest.approx((x.mean(), interval.low, interval.high))
        above, below = (stats.ttest_1samp(x, bound, alternative=side).pvalue
                        for bound, side in ((-0.8, "greater"), (0.8, "less")))
        if max(above, below) < 0.05:
            wanted = "equal"
        elif stats.ttest_1samp(x, 0).pvalue < 0.05:
            wanted = "worse" if x.mean() > 0 else "better"
        else:
            wanted = "undecided"
        assert found.verdict == wanted
        seen.add(wanted)
    assert {"equal", "worse", "undecided"} <= seen


def test_side_follows_lower_is_better():
    x = [2.0, 2.1, 1.9, 2.2]
    assert verdict(x, 1) == "worse" and verdict(x, 1, lower_is_better=False) == "better"
    minus = [-value for value in x]
    assert verdict(minus, 1) == "better" and verdict(minus, 1, lower_is_better=False) == "worse"


def test_significant_and_within_the_margin_is_equal():
    found = equivalence([0.10, 0.11, 0.12, 0.10], margin=0.5)
    assert found.low > 0 and found.verdict == "equal"
    assert verdict([0.0, 0.0], margin=1e-9) == "equal"  # runs that agree bit for bit
    assert equivalence([2.0, 2.0, 2.0], 1.0).p_equal == 1.0 and equivalence([1.0, 1.0], 1.0).p_equal == 0.5
    assert verdict([0.1, -0.1], margin=0.5) == "undecided"  # a small mean of two pairs shows nothing


def test_coverage_and_error_rates_by_simulation():
    true, margin = 1.0, 1.0
    found = [equivalence(x, margin) for x in np.random.default_rng(0).normal(true, 0.5, (1500, 6))]
    covered = np.mean([e.low <= true <= e.high for e in found])
    assert covered == pytest.approx(0.95, abs=0.02)
    # at a true difference as large as the margin, "equal" may be said wrongly in at most alpha of the cases
    assert np.mean([e.verdict == "equal" for e in found]) == pytest.approx(0.05, abs=0.02)
    found = [equivalence(x, 3.0) for x in np.random.default_rng(1).normal(0, 0.5, (300, 6))]
    assert np.mean([e.verdict == "equal" for e in found]) > 0.95


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_smallest_effect_is_detected_with_80_percent_power(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x = 0.7 * (x - x.mean()) / x.std()
    effect = equivalence(x, 1).smallest_effect
    simulated = np.random.default_rng(0).normal(effect, 0.7, (20000, n))
    t = simulated.mean(1) / (simulated.std(1, ddof=1) / math.sqrt(n))
    assert np.mean(t > stats.t.ppf(0.975, n - 1)) == pytest.approx(0.8, abs=0.015)


def test_diverged_runs():
    assert verdict([math.inf, math.inf, math.inf], 1) == "worse"
    assert verdict([math.inf, math.inf], 1, lower_is_better=False) == "better"
    for mixture in ([math.inf, 0.0, 0.1], [math.nan, math.nan], [math.inf, -math.inf], [0.0, 0.0, math.nan]):
        found = equivalence(mixture, 1)
        assert found.verdict == "undecided" and not math.isfinite(found.mean)


def test_too_few_pairs_or_no_margin_is_refused():
    with pytest.raises(ValueError, match="two pairs"):
        equivalence([0.5], 1)
    with pytest.raises(ValueError, match="margin above 0"):
        equivalence([0.5, 0.4], 0)
