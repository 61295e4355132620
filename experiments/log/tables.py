"""The table of an experiment: what its page shows of each arm, and what a file beside it keeps.

columns(experiment, known)         [{column: text}] of the arms, every column that there is
shown_columns(rows, experiment)    Markdown of the few that a reader compares by
csv_text(rows)                     all of them, as experiments/NNN-slug/table.csv
"""

import csv
import io
import math
import shlex
import statistics

from experiments.log.analysis import (
    SLIGHTLY_WORSE,
    WAITING_VERDICT,
    comparison,
    is_loss,
    loss_comparison,
    of_nearest,
    pairs_across_machines,
    records_of,
    scores_by_seed,
    shown_margin,
    verdict,
    verdict_by_rule,
    weights_of_score,
)
from experiments.log.definition import look_of
from experiments.log.records import figure_of_record
from harness.printing import markdown_table

DIFFERENCE, ACHIEVED = "difference [95 % CI]", "achieved margin"
LOSS_ACHIEVED, BYTES = "achieved, %", "bytes a parameter"
SHARE_OF_HARM = "share of nearest's harm: score, loss"
KEPT_FOR_BACKWARD = "kept for backward, MiB"
LAST_COLUMNS = ("training loss", BYTES, KEPT_FOR_BACKWARD, "seconds")

# ---- Numbers -----------------------------------------------------------------------------------------------


def figure_text(x, decimals, sign=""):
    if x is None or math.isnan(x):
        return "-"
    return f"{x:{sign}.{decimals}f}" if math.isfinite(x) else f"{x:{sign}}"


def interval_text(result, decimals):
    """'+0.100 [+0.050, +0.150]'"""
    low, high = figure_text(result.low, decimals, "+"), figure_text(result.high, decimals, "+")
    return f"{figure_text(result.mean, decimals, '+')} [{low}, {high}]"


def mean_and_sd(values, decimals):
    """'mean ± sd'"""
    if not values:
        return "-"
    mean = figure_text(statistics.fmean(values), decimals)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return mean
    return f"{mean} ± {figure_text(statistics.stdev(values), decimals)}"


def decimals_of(margin):
    """Decimals that show a hundredth of the margin's leading digit."""
    return max(0, 2 - math.floor(math.log10(margin)))


def percent(x):
    """'3.1 %' of 0.031; three digits at most."""
    size = abs(100 * x)
    if size >= 9.95:
        return f"{100 * x:.0f} %"
    if size >= 0.95:
        return f"{100 * x:.1f} %"
    return f"{100 * x:.2f} %"


# ---- Words -------------------------------------------------------------------------------------------------


def flags_added(arm):
    """What an arm adds to the common flags, in words."""
    flags = f"`{shlex.join(arm.flags)}`"
    if arm.of and arm.flags:
        said = f"samples from {arm.of}: {flags}"
    elif arm.of:
        said = f"reads {arm.metric} of {arm.of}"
    elif arm.flags:
        said = flags
    else:
        said = "-"
    return f"{said} ({arm.note})" if arm.note else said


def heading(experiment):
    """The metric's name; without its weights where arms read different ones."""
    metrics = {arm.metric for arm in experiment.arms}
    return experiment.metric if len(metrics) == 1 else experiment.metric.rpartition(".")[2]


def score_title(experiment):
    """The column of scores: the metric's name, or "score" where arms read metrics of several names."""
    names = {arm.metric.rpartition(".")[2] for arm in experiment.arms}
    return heading(experiment) if len(names) == 1 else "score"


def verdict_words(arm, known):
    """A verdict as the pages print it: 'equal within 0.03', 'slightly worse, within 0.03', 'worse'."""
    pairs, result = comparison(arm, known)
    said = verdict_by_rule(arm, known)
    if arm.experiment.looks and result is None and pairs:
        said = WAITING_VERDICT
    if said == WAITING_VERDICT:
        return f"no verdict before {look_of(arm.experiment, pairs)[0]} pairs"
    if said == "undecided":
        return "not shown to differ"
    if said == SLIGHTLY_WORSE and verdict(pairs, result) != "equal":
        return f"{said} (score not shown to differ)"
    if said not in ("equal", SLIGHTLY_WORSE):
        return said
    within = f"within {margin_words(arm, result)}"
    if said == SLIGHTLY_WORSE:
        return f"{said}, {within}"
    better = result.high < 0 if arm.lower_is_better else result.low > 0
    return f"slightly better, {within}" if better else f"equal {within}"


def margin_words(arm, result):
    margin = shown_margin(arm, result)
    return f"{margin:g}" if margin == arm.margin else figure_text(margin, decimals_of(arm.margin))


def loss_words(arm, known):
    """The verdict on the loss, '; loss equal within 0.3 %', where a margin was set for it, or ''."""
    _, loss_pairs, loss = loss_comparison(arm, known)
    if not loss or not arm.experiment.loss_margin or is_loss(arm.metric):
        return ""
    said = verdict(loss_pairs, loss)
    words = {"equal": f"equal within {arm.experiment.loss_margin:g} %", "undecided": "not shown to differ"}
    return f"; loss {words.get(said, said)}"


# ---- Rows --------------------------------------------------------------------------------------------------


def columns(experiment, known):
    return [arm_row(arm, known) for arm in experiment.arms]


def arm_row(arm, known):
    """{column: text} of one arm; columns without a value are left out."""
    values = list(scores_by_seed(arm, known).values())
    row = {"arm": arm.name, "adds": flags_added(arm)}
    row[score_title(arm.experiment)] = mean_and_sd(values, decimals_of(arm.margin))
    row |= difference_columns(arm, known, values)
    finished = [r for r in records_of(arm, known).values() if "scores" in r]
    if finished:
        row |= score_columns(arm, finished) | cost_columns(arm, finished)
    return row


def difference_columns(arm, known, values):
    """The columns about the differences of an arm, with these scores, from its baseline."""
    digits = decimals_of(arm.margin)
    _, result = comparison(arm, known)
    kind, _, loss = loss_comparison(arm, known)
    loss_title = f"{kind}, % [95 % CI]"
    row = {DIFFERENCE: "-", ACHIEVED: "-", loss_title: "-", LOSS_ACHIEVED: "-"}
    if arm.baseline == arm.name:
        return {**row, "verdict": "baseline", "n": str(len(values)), "detectable": "-"}
    if result:
        row[DIFFERENCE] = interval_text(result, digits)
        row[ACHIEVED] = achieved_words(arm, known, result)
    if loss:
        row[loss_title] = interval_text(loss, 2)
        row[LOSS_ACHIEVED] = figure_text(loss.achieved, 2)
    shares = of_nearest(arm, known)
    if shares != (None, None):
        row[SHARE_OF_HARM] = ", ".join(map(share_words, shares))
    row["verdict"] = whole_verdict(arm, known)
    row["n"] = pairs_words(arm, known)
    row["detectable"] = figure_text(result.smallest_effect, digits) if result else "-"
    row["p of no difference"] = p_text(result, "p_difference")
    row["p of a margin or more"] = p_text(result, "p_equal")
    return row


def share_words(share):
    return "-" if share is None else percent(share)


def achieved_words(arm, known, result):
    """'0.028 (2.9 %)': the achieved margin, and what it is of the baseline's score."""
    said = figure_text(result.achieved, decimals_of(arm.margin))
    own = scores_by_seed(arm, known)
    base = scores_by_seed(arm.base, known)
    mean = statistics.fmean(base[seed] for seed in base if seed in own)
    if math.isfinite(result.achieved) and math.isfinite(mean) and mean:
        said += f" ({percent(result.achieved / abs(mean))})"
    return said


def whole_verdict(arm, known):
    """The verdict on the score, that on the loss, and the baseline where it is not the experiment's."""
    said = verdict_words(arm, known)
    if not said.startswith("no verdict"):  # both are read at one look
        said += loss_words(arm, known)
    if arm.baseline != arm.experiment.baseline:
        said += f" (against {arm.baseline})"
    return said


def pairs_words(arm, known):
    """'6', '5 of 6', or '6, 4 across CPUs'."""
    pairs, _ = comparison(arm, known)
    mixed = pairs_across_machines(arm, known)
    said = str(pairs)
    if pairs < len(arm.experiment.seeds):
        said += f" of {len(arm.experiment.seeds)}"
    if mixed:
        said += f", {mixed} across CPUs"
    return said


def p_text(result, which):
    return f"{getattr(result, which):.2g}" if result else "-"


def score_columns(arm, finished):
    """Scores beside the arm's own, where every finished run has them."""
    found, weights = {}, weights_of_score(arm)
    _, _, name = arm.metric.rpartition(".")
    extra = {
        "label accuracy": (weights, "label_accuracy", 3),
        f"raw.{name}": ("raw", name, decimals_of(arm.margin)),
    }
    for title, (source, score_name, places) in extra.items():
        metric = f"{source}.{score_name}"
        own = [r["scores"].get(source, {}).get(score_name) for r in finished]
        if None not in own and metric != arm.metric:
            found[title] = mean_and_sd(values_of(finished, metric), places)
    return found


def values_of(records, metric):
    return [figure_of_record(record, metric) for record in records]


def cost_columns(arm, finished):
    first = finished[0]
    found = {
        "training loss": mean_and_sd(values_of(finished, "final_loss"), 4),
        BYTES: f"{first['bytes_per_parameter']:.5g}",
    }
    if first.get("activation_bytes"):
        found[KEPT_FOR_BACKWARD] = f"{first['activation_bytes'] / 2**20:.3g}"
    if shares := first.get("flops_share"):
        parts = [f"{share:.1%} in {share_covers(arm, name)}" for name, share in shares.items()]
        found["of the FLOPs"] = ", ".join(parts)
    if all("gradient_snr" in r for r in finished):
        for name in first["gradient_snr"]:  # the low format, and bf16
            title = "in bf16, dB" if name == "bf16" else f"gradient SNR in {name.upper()}, dB"
            found[title] = mean_and_sd(values_of(finished, f"gradient_snr.{name}"), 1)
    found["seconds"] = figure_text(statistics.fmean(r["seconds"] + r["scoring_seconds"] for r in finished), 0)
    return found


def share_covers(arm, name):
    """What a share in a record's flops_share is in: 'FP8', '2:4', or the value of the generation site."""
    setting = "8 bits"
    for flag in arm.source.flags:
        if flag.startswith("generation="):
            setting = flag.removeprefix("generation=")
    return {"fp8": "FP8", "sparse24": "2:4", "generation": setting}.get(name, name)


# ---- The two forms -----------------------------------------------------------------------------------------


def names_of(rows):
    """The columns of all rows; LAST_COLUMNS stand last also where another belongs to later arms only."""
    names = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    for name in LAST_COLUMNS:
        if name in names:
            names[name] = names.pop(name)
    return list(names)


def shown_columns(rows, experiment):
    order = ["arm", score_title(experiment), DIFFERENCE, ACHIEVED, "held-out loss, % [95 % CI]"]
    order += ["training loss, % [95 % CI]", LOSS_ACHIEVED, SHARE_OF_HARM, "verdict", "n", BYTES]
    order.append(KEPT_FOR_BACKWARD)
    least = {KEPT_FOR_BACKWARD: 2}  # older records lack it, and one arm alone compares with nothing
    names = []
    for name in order:
        told = sum(row.get(name, "-") != "-" for row in rows)
        if told >= least.get(name, 1):
            names.append(name)
    return markdown_table([names, *cells_of(rows, names)])


def cells_of(rows, names):
    """[[text]] of these columns, "-" where a row has none."""
    return [[row.get(name, "-") for name in names] for row in rows]


def csv_text(rows):
    names = names_of(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(cells_of(rows, names))
    return file.getvalue()
