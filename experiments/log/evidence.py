"""Figures of arms that a text names, as in "the loss changes by {011/stochastic.held_out}".

{NUMBER/ARM.FIGURE} is one of ARM_FIGURES, or one of ARM_WORDS.

    Evidence(experiments, known).figure("011/bf16.difference")     "+0.004"
    filled_text(text, evidence)                                    the text with its figures
"""

import dataclasses
import functools
import re
import statistics

from experiments.log.analysis import (
    comparison,
    levels,
    loss_comparison,
    of_nearest,
    records_of,
    scores_by_seed,
    verdict_by_rule,
)
from experiments.log.records import figure_of_record
from experiments.log.tables import decimals_of
from lowprec.errors import Refused

# ---- Figures of an arm -------------------------------------------------------------------------------------


def whole_percent(x):
    return f"{100 * x:.0f} %" if abs(x) >= 0.1 else f"{100 * x:.1f} %"


def small_percent(x):
    said = f"{100 * x:+.2f} %"
    return said[1:] if said[1:] == "0.00 %" else said


def signed_percent(x):
    return f"{100 * x:+.1f} %"


@dataclasses.dataclass
class ArmSeen:
    """An arm with its records, and its baseline's of the same seeds."""

    arm: object
    known: dict

    def __post_init__(self):
        self.experiment = self.arm.experiment
        self.pairs, self.result = comparison(self.experiment, self.arm, self.known)
        self.loss_result = loss_comparison(self.experiment, self.arm, self.known)[2]
        self.own = scores_by_seed(self.experiment, self.arm, self.known)
        base = self.experiment.arm(self.arm.baseline)
        against = scores_by_seed(self.experiment, base, self.known)
        self.base = {seed: score for seed, score in against.items() if seed in self.own}
        self.records = records_of(self.experiment, self.arm, self.known)
        self.base_records = records_of(self.experiment, base, self.known)

    def held(self, metric):
        """The mean over the records of a figure, as "final_loss"."""
        finished = [r for r in self.records.values() if "failed" not in r]
        return statistics.fmean(figure_of_record(r, metric) for r in finished)

    def ratio(self, metric):
        """The same, over that of the baseline in the same seeds."""
        own, base = [], []
        for seed, record in self.records.items():
            if seed in self.base_records:
                own.append(figure_of_record(record, metric))
                base.append(figure_of_record(self.base_records[seed], metric))
        return statistics.fmean(own) / statistics.fmean(base)

    def last(self, curve):
        """The mean over the records of the end of a curve."""
        ends = [r["curves"][curve][-1] for r in self.records.values() if r.get("curves", {}).get(curve)]
        return statistics.fmean(ends)


ARM_FIGURES = {  # name: (the figure of a Seen, how it is written: decimals as of the margin, or a format)
    "mean": (lambda s: statistics.fmean(s.own.values()), ""),
    "baseline": (lambda s: statistics.fmean(s.base.values()), ""),
    "difference": (lambda s: s.result.mean, "+"),
    "low": (lambda s: s.result.low, "+"),
    "high": (lambda s: s.result.high, "+"),
    "margin": (lambda s: s.arm.margin, "{:g}"),
    "n": (lambda s: s.pairs, "{:d}"),
    "times": (lambda s: statistics.fmean(s.own.values()) / statistics.fmean(s.base.values()), "{:.1f}"),
    "change": (lambda s: s.result.mean / statistics.fmean(s.base.values()), signed_percent),
    "achieved": (lambda s: s.result.achieved, ""),
    "achieved_share": (lambda s: s.result.achieved / abs(statistics.fmean(s.base.values())), whole_percent),
    "margin_share": (lambda s: s.arm.margin / abs(statistics.fmean(s.base.values())), whole_percent),
    "harm": (lambda s: of_nearest(s.experiment, s.arm, s.known)[0], whole_percent),
    "loss_harm": (lambda s: of_nearest(s.experiment, s.arm, s.known)[1], whole_percent),
    "held_out": (lambda s: s.loss_result.mean / 100, small_percent),
    "held_out_low": (lambda s: s.loss_result.low / 100, small_percent),
    "held_out_high": (lambda s: s.loss_result.high / 100, small_percent),
    "held_out_achieved": (lambda s: s.loss_result.achieved / 100, lambda x: f"{100 * x:.2f} %"),
    "floor": (lambda s: levels(s.experiment, s.known)["real images"], ""),
    "ceiling": (lambda s: levels(s.experiment, s.known)["noise"], ""),
    "loss": (lambda s: s.held("final_loss"), "{:.4f}"),
    "loss_change": (lambda s: s.ratio("final_loss") - 1, signed_percent),
    "bytes": (lambda s: s.held("bytes_per_parameter"), "{:.4g}"),
    "kept": (lambda s: s.held("activation_bytes") / 2**20, "{:.1f}"),
    "kept_share": (lambda s: s.ratio("activation_bytes"), whole_percent),
    "speed": (lambda s: 1 / s.ratio("seconds"), "{:.1f}"),
    "covered": (lambda s: sum(next(iter(s.records.values()))["flops_share"].values()), whole_percent),
    "survival": (lambda s: s.last("update_survival"), whole_percent),
    "moved": (lambda s: s.last("exp_avg_sq_moved"), whole_percent),
}
ARM_WORDS = {
    "verdict": lambda s: verdict_by_rule(s.experiment, s.arm, s.known),
    "interval": lambda s: f"[{score_text(s, s.result.low, '+')}, {score_text(s, s.result.high, '+')}]",
}


def score_text(seen, x, form):
    if callable(form):
        return form(x)
    return form.format(x) if "{" in form else f"{x:{form}.{decimals_of(seen.arm.margin)}f}"


# ---- Figures in a text -------------------------------------------------------------------------------------


class Evidence:
    """The arms of all experiments, for the placeholders of a text.

    experiments, known: as report.py has them.
    """

    def __init__(self, experiments, known):
        self.experiments = {e.number: e for e in experiments}
        self.known = known

    @functools.cache  # noqa: B019, one Evidence a page
    def seen(self, name):
        """"011/bf16" -> Seen. Raises Refused for what does not exist or has no record."""
        number, _, arm_name = name.partition("/")
        experiment = self.experiments.get(number)
        if experiment is None:
            raise Refused(f"there is no experiment {number}, which {{{name}}} names")
        seen = ArmSeen(experiment.arm(arm_name), self.known)
        if not seen.own:
            raise Refused(f"{{{name}}} has no record yet: python experiments/run.py {number}")
        return seen

    def figure(self, reference):
        """"011/bf16.difference" -> its text. Raises Refused."""
        name, _, figure = reference.rpartition(".")
        if figure not in {**ARM_FIGURES, **ARM_WORDS}:
            known = ", ".join([*ARM_FIGURES, *ARM_WORDS])
            raise Refused(f"{{{reference}}}: an arm has no figure '{figure}'; it has {known}")
        seen = self.seen(name)
        if seen.pairs < 2 and seen.arm.name != seen.arm.baseline:
            raise Refused(f"{{{reference}}}: fewer than two pairs are recorded")
        try:
            if figure in ARM_WORDS:
                return ARM_WORDS[figure](seen)
            compute, form = ARM_FIGURES[figure]
            return score_text(seen, compute(seen), form)
        except (KeyError, StopIteration, AttributeError, TypeError, statistics.StatisticsError):
            raise Refused(f"{{{reference}}}: the records of {name} do not hold that") from None


def filled_text(text, evidence):
    """The text with a figure in place of each {reference}."""
    return re.sub(r"\{([^{}]*)\}", lambda match: evidence.figure(match[1]), text)
