"""Statistics of paired runs: whether an arm equals its baseline, is better or worse; how many pairs it takes.

    python -c "from experiments.stats import power_n; print(power_n(sd=0.5, effect=0.3))"
"""
import math
from dataclasses import dataclass

import torch
from scipy import optimize, stats


@dataclass(frozen=True)
class Equivalence:
    mean: float             # of the paired differences
    low: float              # confidence interval of the true mean
    high: float
    verdict: str            # equal, better, worse or undecided
    smallest_effect: float  # true mean difference that this many pairs detect with 80 % power


def equivalence(differences, margin: float, alpha: float = 0.05, lower_is_better: bool = True) -> Equivalence:
    """Verdict on paired differences (arm minus baseline, one a seed) for a margin fixed before the runs.

    equal: two one-sided t-tests at alpha reject a true mean beyond the margin (TOST, Schuirmann 1987,
    doi 10.1007/BF01068419), that is, the 1 - 2 alpha interval lies inside (-margin, margin). A difference
    that is significant and within the margin is equal.
    better, worse: not equal, and the 1 - alpha interval [low, high] excludes 0.
    undecided: anything else. It is not equal.

    Diverged runs: the same infinity everywhere is better or worse, any other mixture with values that are not
    finite is undecided. ValueError: fewer than two pairs, or a margin not above 0.
    """
    x = torch.as_tensor(differences, dtype=torch.float64).flatten()
    n, mean = len(x), x.mean().item()
    if n < 2 or not margin > 0:
        found = f"{n} pairs and margin {margin}"
        raise ValueError(f"equivalence needs two pairs or more and a margin above 0, got {found}")
    side = "better" if (mean < 0) == lower_is_better else "worse"
    if not x.isfinite().all():
        if (x == x[0]).all():
            return Equivalence(mean, mean, mean, side, math.nan)
        return Equivalence(mean, math.nan, math.nan, "undecided", math.nan)
    sd = x.std().item()
    narrow, wide = (stats.t.isf(tail, n - 1) * sd / math.sqrt(n) for tail in (alpha, alpha / 2))
    low, high = float(mean - wide), float(mean + wide)
    if abs(mean) + narrow < margin:
        verdict = "equal"
    elif low > 0 or high < 0:
        verdict = side
    else:
        verdict = "undecided"
    most = 4 * stats.t.isf(alpha / 2, n - 1)  # sds; an effect that large is missed by no number of pairs
    smallest = sd * optimize.brentq(lambda effect: _power(effect, n, alpha) - 0.8, 0, most)
    return Equivalence(mean, low, high, verdict, smallest)


def power_n(sd: float, effect: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Pairs a two-sided paired t-test needs to detect a true mean `effect` of differences whose std is `sd`.

    ValueError: sd or effect not above 0.
    """
    if not (sd > 0 and effect > 0):
        raise ValueError(f"power_n needs sd and effect above 0, got {sd} and {effect}")
    z = stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power)
    n = max(2, math.ceil((z * sd / effect) ** 2))  # enough if sd were known; the t-test needs a few more
    while _power(effect / sd, n, alpha) < power:
        n += 1
    return n


def _power(effect, n, alpha):
    """Power of a two-sided paired t-test of n pairs, with the effect in sds.

    Significance with the wrong sign detects nothing, so only one tail counts.
    """
    return float(stats.nct.sf(stats.t.isf(alpha / 2, n - 1), n - 1, effect * math.sqrt(n)))
