"""The mean of paired differences with its interval, at looks that are planned."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..machine import quiet_import

# pairs after which a trial looks whether it is done, and the two-sided level of each look that makes 5 % of
# all of them together: twice experiments/log/stats.py's even_level(LOOKS, 0.025)
LOOKS = (3, 4, 6, 8, 12, 16, 24)
LEVEL_OF_A_LOOK = 0.0121
LEVEL_OF_WHOLE = 0.2  # of the interval of a whole training: four of five are to lie within


@dataclass(frozen=True)
class Mean:
    """The mean of paired differences, with the interval and the p of a look at a level below 0.05."""

    mean: float
    low: float
    high: float
    p: float  # two-sided, of no difference; so scaled that 0.05 is its limit at every level
    pairs: int

    @property
    def half(self):
        return self.high - self.mean


def mean_at_level(differences, level: float = 0.05) -> Mean:
    """The Mean of differences, two or more."""
    x = torch.as_tensor(differences, dtype=torch.float64)
    n, mean = len(x), x.mean().item()
    error = x.std().item() / math.sqrt(n)
    half = float(student().isf(level / 2, n - 1)) * error
    p = 2 * tail_of_t(abs(mean), error, n)
    return Mean(mean, mean - half, mean + half, min(1.0, p * 0.05 / level), n)


def of_whole_training(changes, recorded) -> tuple[float, float]:
    """The ends, in percent, between which the change of a whole training is foreseen, at LEVEL_OF_WHOLE.

    changes: of the pairs that were tried, two or more, in percent. recorded: (tried, whole) of two settings
    or more. It is Student's prediction interval of the gap of one more setting, on the scale of asinh: there
    a change below 1 % is as it is, and one above its logarithm. The interval of what was tried is added, the
    distances from the middle in squares. experiments/078-miniatures has what it held.
    """
    gaps = mean_at_level([math.asinh(whole) - math.asinh(tried) for tried, whole in recorded], LEVEL_OF_WHOLE)
    half = gaps.half * math.sqrt(gaps.pairs + 1)  # of one more setting, not of their mean
    own = mean_at_level(changes, LEVEL_OF_WHOLE)
    middle, low, high = map(math.asinh, (own.mean, own.low, own.high))
    foreseen = middle + gaps.mean
    ends = foreseen - math.hypot(middle - low, half), foreseen + math.hypot(high - middle, half)
    return math.sinh(ends[0]), math.sinh(ends[1])


def pairs_needed(mean: Mean, half: float) -> int:
    """After how many pairs, one of LOOKS, an interval is likely to be that narrow to either side."""
    n = mean.pairs
    spread = mean.half * math.sqrt(n) / float(student().isf(LEVEL_OF_A_LOOK / 2, n - 1))
    for pairs in LOOKS:
        if spread * float(student().isf(LEVEL_OF_A_LOOK / 2, pairs - 1)) / math.sqrt(pairs) <= half:
            return pairs
    return LOOKS[-1]


def student() -> Any:
    """scipy's distribution of t. Raises Refused without that package."""
    return quiet_import("scipy.stats", "an interval of paired trainings").t


def tail_of_t(distance, error, n):
    """Probability that a t of n - 1 degrees of freedom lies that many standard errors up."""
    if error == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    return float(student().sf(distance / error, n - 1))
