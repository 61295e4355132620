"""Statistics of paired runs: whether an arm equals its baseline, is better or worse."""
import functools
import math
from dataclasses import dataclass

import torch
from scipy import optimize, stats

from lowprec.trials.intervals import mean_at_level as mean_at_level  # the log takes it from here
from lowprec.trials.intervals import tail_of_t


@dataclass(frozen=True)
class Equivalence:
    mean: float             # of the paired differences
    low: float              # 95 % confidence interval of the true mean
    high: float
    verdict: str            # equal, better, worse or undecided
    smallest_effect: float  # true mean difference that this many pairs detect with 80 % power
    achieved: float         # the smallest margin within which they would have been called equal
    p_difference: float     # two-sided, of no difference
    p_equal: float          # of a difference of the margin or more
    differs: bool           # whether no difference is rejected, at the level of the look


def equivalence(differences, margin: float, alpha: float = 0.05, lower_is_better: bool = True) -> Equivalence:
    """Verdict on paired differences (arm minus baseline, one a seed) for a margin fixed before the runs.

    equal: two one-sided t-tests at alpha reject a true mean beyond the margin (TOST, Schuirmann 1987,
    doi 10.1007/BF01068419), that is, the 1 - 2 alpha interval lies inside (-margin, margin). A difference
    that is significant and within the margin is equal.
    better, worse: not equal, and the 1 - alpha interval excludes 0.
    undecided: anything else. It is not shown to differ, and not shown equal.
    alpha is that of one look at the data: fewer than 0.05 where more looks were planned (family_level).

    Diverged runs: the same infinity everywhere is better or worse, any other mixture with values that are not
    finite is undecided. ValueError: fewer than two pairs, or a margin not above 0.
    """
    x = torch.as_tensor(differences, dtype=torch.float64).flatten()
    return _equivalence(tuple(x.tolist()), margin, alpha, lower_is_better)


@functools.cache
def _equivalence(differences, margin, alpha, lower_is_better):
    x = torch.tensor(differences, dtype=torch.float64)
    n, mean = len(x), x.mean().item()
    if n < 2 or not margin > 0:
        found = f"{n} pairs and margin {margin}"
        raise ValueError(f"equivalence needs two pairs or more and a margin above 0, got {found}")
    side = "better" if (mean < 0) == lower_is_better else "worse"
    if not x.isfinite().all():
        if (x == x[0]).all():
            return Equivalence(mean, mean, mean, side, math.nan, math.inf, 0.0, 1.0, True)
        return Equivalence(mean, math.nan, math.nan, "undecided", math.nan, math.inf, 1.0, 1.0, False)
    sd = x.std().item()
    error = sd / math.sqrt(n)
    narrow, wide, shown = (stats.t.isf(tail, n - 1) * error for tail in (alpha, alpha / 2, 0.025))
    low, high, achieved = float(mean - shown), float(mean + shown), float(abs(mean) + narrow)
    differs = bool(abs(mean) > wide)
    if achieved < margin:
        verdict = "equal"
    elif differs:
        verdict = side
    else:
        verdict = "undecided"
    smallest = sd * _smallest_effect(n, alpha)
    p_difference = 2 * tail_of_t(abs(mean), error, n)
    p_equal = tail_of_t(margin - abs(mean), error, n)
    return Equivalence(mean, low, high, verdict, smallest, achieved, p_difference, p_equal, differs)


@functools.cache
def _smallest_effect(n, alpha):
    """The effect, in standard deviations of the differences, that n pairs detect with a chance of 0.8."""
    most = 4 * stats.t.isf(alpha / 2, n - 1)  # an effect that large is missed by no number of pairs
    return optimize.brentq(lambda effect: _power(effect, n, alpha) - 0.8, 0, most)


# ---- Several at once ---------------------------------------------------------------------------------------


def holm(ps, alpha: float = 0.05) -> int:
    """How many of these p-values stay significant by Holm's step-down rule (1979, jstor 4615733)."""
    kept = 0
    for i, p in enumerate(sorted(ps)):
        if p > alpha / (len(ps) - i):
            break
        kept += 1
    return kept


def line_with_band(x, y, places):
    """[(place, height, low, high)] of the straight line through points, with its 95 % interval."""
    found = stats.linregress(x, y)
    n, middle = len(x), sum(x) / len(x)
    spread = sum((a - middle) ** 2 for a in x)
    left = sum((b - found.intercept - found.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    wide = float(stats.t.isf(0.025, n - 2)) * math.sqrt(left / (n - 2))
    line = []
    for place in places:
        height = float(found.intercept + found.slope * place)
        half = wide * math.sqrt(1 / n + (place - middle) ** 2 / spread)
        line.append((place, height, height - half, height + half))
    return line


def family_level(pairs, levels) -> float:
    """Chance that one of several looks at growing data rejects a true hypothesis, each at its own one-sided
    level.

    Looks at n and m > n pairs correlate by sqrt(n / m) (Pocock 1977, doi 10.1093/biomet/64.2.191).
    """
    if len(pairs) == 1:
        return levels[0]
    shared = []
    for b in pairs:
        shared.append([math.sqrt(min(a, b) / max(a, b)) for a in pairs])
    bounds = [stats.norm.isf(level) for level in levels]
    return 1 - float(stats.multivariate_normal(cov=shared, seed=0).cdf(bounds))


def even_level(pairs) -> float:
    """The level that each look has where all have the same and together 0.05."""
    low = 0.05 / len(pairs) * 0.9
    return optimize.brentq(lambda level: family_level(pairs, [level] * len(pairs)) - 0.05, low, 0.05)


# ---- Power -------------------------------------------------------------------------------------------------


def _power(effect, n, alpha):
    """Power of a two-sided paired t-test of n pairs, with the effect in sds.

    Significance with the wrong sign detects nothing, so only one tail counts.
    """
    return float(stats.nct.sf(stats.t.isf(alpha / 2, n - 1), n - 1, effect * math.sqrt(n)))
