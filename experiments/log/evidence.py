"""Figures of arms that experiments/front.md names, as in "the loss changes by {011/stochastic.held_out}".

    Evidence(experiments, known).figure("011/bf16.held_out")       "+0.02 %"
    filled_text(text, evidence)                                    the text with its figures

{NUMBER/ARM.FIGURE} is one of ARM_FIGURES.
"""

import re
import statistics

from experiments.log.analysis import (
    HELD_OUT,
    comparison,
    levels,
    loss_comparison,
    records_of,
    scores_by_seed,
)
from experiments.log.tables import decimals_of
from lowprec.errors import Refused


def small_percent(x):
    said = f"{x:+.2f} %"
    return said[1:] if said[1:] == "0.00 %" else said


def score_mean(arm, known):
    return score_text(arm, statistics.fmean(scores_by_seed(arm, known).values()))


def score_text(arm, x):
    return f"{x:.{decimals_of(arm.margin)}f}"


def held_out(end):
    """A figure of the held-out loss against the baseline's: its "mean", or an end of its interval."""

    def figure(arm, known):
        kind, _, change = loss_comparison(arm, known)
        return small_percent(getattr({HELD_OUT: change}[kind], end))

    return figure


def loss_change(arm, known):
    """The training loss against the baseline's in the same seeds."""
    own = records_of(arm, known)
    base = records_of(arm.base, known)
    both = [seed for seed in own if seed in base]
    of_own, of_base = (statistics.fmean(runs[seed]["final_loss"] for seed in both) for runs in (own, base))
    return f"{100 * (of_own / of_base - 1):+.1f} %"


def level(name):
    return lambda arm, known: score_text(arm, levels(arm.experiment, known)[name])


ARM_FIGURES = {
    "mean": score_mean,
    "held_out": held_out("mean"),
    "held_out_low": held_out("low"),
    "held_out_high": held_out("high"),
    "loss_change": loss_change,
    "floor": level("real images"),
    "ceiling": level("noise"),
}


class Evidence:
    """The arms of all experiments, for the placeholders of a text.

    experiments, known: as report.py has them.
    """

    def __init__(self, experiments, known):
        self.experiments = {e.number: e for e in experiments}
        self.known = known

    def figure(self, reference):
        """"011/bf16.held_out" -> its text. Raises Refused."""
        name, _, figure = reference.rpartition(".")
        number, _, arm_name = name.partition("/")
        try:
            arm = self.experiments[number].arm(arm_name)
            pairs, _ = comparison(arm, self.known)
            if pairs < 2 and arm.name != arm.baseline:
                raise LookupError
            return ARM_FIGURES[figure](arm, self.known)
        except (LookupError, AttributeError, statistics.StatisticsError):
            wanted = f"an experiment, an arm, one of {', '.join(ARM_FIGURES)}, and two pairs of records"
            raise Refused(f"{{{reference}}}: there is no such figure; it takes {wanted}") from None


def filled_text(text, evidence):
    """The text with a figure in place of each {reference}."""
    return re.sub(r"\{([^{}]*)\}", lambda match: evidence.figure(match[1]), text)
