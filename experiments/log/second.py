"""A second reading of records: scores and held-out losses of the last weights, for experiments whose averages
still hold a part of the initial weights. It was decided on after the results, and its page says so.
"""

from experiments.log import stats
from experiments.log.analysis import HELD_OUT, differences, loss_comparison, records_of
from experiments.log.records import is_number
from experiments.log.tables import decimals_of, figure_text, interval_text, percent
from harness.printing import markdown_table

LAST_WEIGHTS = "raw"  # what a record calls the last weights


def second_reading(experiment, known):
    """The paragraph and the table of an experiment with a `second_reading`, else ''."""
    if not experiment.second_reading:
        return ""
    name = experiment.metric.rpartition(".")[2]
    score, loss = (f"{figure} of the last weights" for figure in (name, "held-out loss"))
    rows = [["arm", f"{score}: difference [95 % CI]", "achieved margin", f"{loss}, % [95 % CI]"]]
    for arm in experiment.arms:
        if arm.metric == experiment.metric and arm.name != arm.baseline:
            rows += second_row(arm, name, known)
    head = f"**Second reading, decided on after the results.** {experiment.second_reading.strip()}"
    return f"{head}\n\n{markdown_table(rows)}"


def second_row(arm, name, known):
    """[[text]] of one arm; [] where its runs, or its baseline's, were not scored with their last weights."""
    own = last_scores(arm, name, known)
    base = last_scores(arm.base, name, known)
    changes = list(differences(own, base).values())
    if len(changes) < 2:
        return []
    result = stats.equivalence(changes, arm.margin, lower_is_better=arm.lower_is_better)
    digits = decimals_of(arm.margin)
    share = result.achieved / (sum(base.values()) / len(base))
    achieved = f"{figure_text(result.achieved, digits)} ({percent(share)})"
    kind, _, loss = loss_comparison(arm, known, LAST_WEIGHTS)
    told = interval_text(loss, 2) if loss and kind == HELD_OUT else "-"
    return [[arm.name, interval_text(result, digits), achieved, told]]


def last_scores(arm, name, known):
    """{seed: score} of the last weights."""
    found = {}
    for seed, record in records_of(arm, known).items():
        score = record.get("scores", {}).get(LAST_WEIGHTS, {}).get(name)
        if is_number(score):
            found[seed] = score
    return found
