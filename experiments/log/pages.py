"""The page of an experiment: experiments/NNN-slug/README.md.

What stands there between <!-- generated: NAME begin --> and its end is replaced; everything outside is the
author's and stays.
"""

import math
import re
import statistics

from experiments.log import figures, second, stats, tables
from experiments.log.analysis import (
    WAITING_VERDICT,
    comparison,
    finite_scores,
    from_changed_code,
    is_on_the_worse_side,
    levels,
    look_of,
    loss_comparison,
    machine_of,
    pairs_across_machines,
    records_needed,
)
from experiments.log.curves import factorials, generation_ranges
from experiments.log.definition import MARK_TEXTS
from experiments.log.records import noted_checks
from experiments.log.tables import decimals_of, figure_text, percent
from harness.printing import markdown_table
from lowprec.errors import Refused

CORES_OF_A_MACHINE = 2  # that the cost to reproduce is quoted for
TERMS = "[terms](../../EXPERIMENTS.md#terms)"

# ---- Parts that are replaced -------------------------------------------------------------------------------


def edges_of_part(name):
    return f"<!-- generated: {name} begin -->", f"<!-- generated: {name} end -->"


def with_part(text, name, body, where):
    begin, end = edges_of_part(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise Refused(f"{where}: '{begin}' and '{end}' must each stand there once, in this order")
    return text[: text.index(begin) + len(begin)] + f"\n{body}\n" + text[text.index(end) :]


def empty_page():
    """README.md of an experiment that has none: its parts, and headings for the prose."""
    results, last = "\n".join(edges_of_part("results")), "\n".join(edges_of_part("verdict"))
    return f"{results}\n\n## What happened\n\n## What follows\n\n{last}\n"


def experiment_page(experiment, known, old=""):
    """README.md of an experiment, with the prose of the one that is there."""
    where = f"{experiment.folder.name}/README.md"
    used = pairs_looked_at(experiment, old)
    text = with_part(old or empty_page(), "results", results_part(experiment, known, used), where)
    verdict = experiment.verdict.strip().rstrip(".") or "None yet"
    return with_part(text, "verdict", f"**Verdict.** {verdict}.", where)


# ---- Looks -------------------------------------------------------------------------------------------------


def pairs_looked_at(experiment, old):
    """Pairs at which verdicts were read, by the page that is there; Refused if it was its only look, and
    seeds were added since.
    """
    found = re.search(r"<!-- looked at (\d+) pairs -->", old)
    used = int(found[1]) if found else 0
    if not experiment.looks and 0 < used < len(experiment.seeds):
        more = f"its one look, at {used} pairs, is used up, and it has {len(experiment.seeds)} seeds"
        hint = "looks are planned before the runs (`looks` in experiment.toml); take a new number for more"
        raise Refused(f"experiment {experiment.number}: {more}; {hint}")
    return used


def looks_told(experiment, known):
    """Sentences about the looks, where there are several."""
    looks = experiment.looks
    if len(looks) < 2:
        return []
    pairs, given, words, unplanned = [], [], [], []
    for look in looks:
        pairs.append(look.pairs)
        given.append(look.level)
        words.append(f"{look.pairs} pairs (level {look.level:g})")
        if look.unplanned:
            unplanned.append(str(look.pairs))
    total, even = stats.family_level(pairs, given), stats.even_level(pairs)
    said = f"Looks: {', '.join(words)}; the chance that one of them says *equal* wrongly is {percent(total)}."
    if not unplanned:
        if total > 0.0505:
            words = f"its looks together have the level {total:.3f}; with {even:.4f} each it is 0.05"
            raise Refused(f"experiment {experiment.number}: {words}")
        return [said]
    said += f" The look at {' and '.join(unplanned)} was not planned: it was decided on after the first."
    turned = []
    for arm in experiment.arms:
        n, result = comparison(arm, known)
        last = result and n == pairs[-1] and arm.name != arm.baseline
        if last and result.verdict == "equal" and result.p_equal > even:
            turned.append(f"{arm.name} (p = {result.p_equal:.3f})")
    rest = f"two planned looks would have had the level {even:.3f} each"
    if turned:
        said += f" With it {', '.join(turned)} would not be called equal: {rest}."
    else:
        said += f" {rest.capitalize()}."
    return [said]


# ---- The page of an experiment -----------------------------------------------------------------------------


def results_part(experiment, known, used=0):
    """The generated part above the prose."""
    e = experiment
    here = list(records_needed(e, known).values())
    rows = tables.columns(e, known)
    parts = [f"# {e.number} {e.title}", f"**Question.** {e.question}"]
    if e.believed:
        parts.append(f"**What was believed.** {e.believed}")
    parts.append(f"**Prediction, written before the runs.** {e.prediction.strip()}")
    if here:
        parts.append(tables.shown_columns(rows, e))
        parts.append(
            f"A difference is arm minus baseline, paired by seed; EXPERIMENTS.md has the {TERMS}. "
            "More columns (training loss, last weights, seconds, p) are in [table.csv](table.csv)."
        )
    parts.append("\n".join(f"- {sentence}" for sentence in facts_told(e, known, here)))
    if told := second.second_reading(e, known):
        parts.append(told)
    failed = [f"- {r['arm']}, seed {r['seed']}: {r['failed']}" for r in here if "failed" in r]
    if failed:
        parts.append("Runs that failed:\n\n" + "\n".join(failed))
    parts += map(effects_table, factorials(e, known))
    if traces := generation_ranges(e, known):
        parts.append(ranges_table(traces))
    for name, (_, _, title) in figures.FIGURES.items():
        if (e.folder / f"{name}.png").exists():
            parts.append(f"![{title}]({name}.png)")
    parts.append(arms_told(e, rows))
    if done := max(used, complete_pairs(e, known)):
        parts.append(f"<!-- looked at {done} pairs -->")
    return "\n\n".join(parts)


def complete_pairs(experiment, known):
    """len(seeds) once an arm has all its pairs: its verdict was read."""
    full = len(experiment.seeds)
    for arm in experiment.arms:
        if arm.name != arm.baseline and comparison(arm, known)[0] == full:
            return full
    return 0


def arms_told(experiment, rows):
    """What every arm is, folded: tables name arms alone."""
    told = [f"- **{row['arm']}**: {row['adds']}" for row in rows]
    common = " ".join(experiment.common)
    ways = f"`python experiments/run.py {experiment.number} --dry_run` prints the command of every run."
    head = "<details><summary>The arms: what each adds to the common flags</summary>"
    return f"{head}\n\nCommon: `{common or 'none'}`\n\n" + "\n".join(told) + f"\n\n</details>\n\n{ways}"


def facts_told(experiment, known, here):
    """Sentences about margin, levels, looks, machines and the records `here` of the runs."""
    e = experiment
    digits = decimals_of(e.margin)
    said = [margin_told(e, known)]
    base = finite_scores(e.arm(e.baseline), known)
    sd = statistics.stdev(base) if len(base) > 1 else 0
    if sd > 0:
        said.append(f"The baseline's standard deviation over seeds is {figure_text(sd, digits)}.")
    marks = [f"{name} score {figure_text(level, digits)}" for name, level in levels(e, known).items()]
    if marks:
        said.append(f"For scale: {', '.join(marks)}.")
    said += looks_told(e, known)
    if told := holm_told(e, known):
        said.append(told)
    said += fewer_seeds(e, known)
    if told := two_kinds_of_cpu(e, known):
        said.append(told)
    return [*said, *marks_told(e, known), *runs_told(e, here), *map(check_told, noted_checks(e))]


def marks_told(experiment, known):
    """Sentences on the arms of which git does not show that all was fixed before the results."""
    told = []
    for mark, said in MARK_TEXTS.items():
        names = [arm.name for arm in experiment.arms if arm.marked == mark]
        if names:
            told.append(f"{said}: {', '.join(names)}.")
    moved = [f"{arm.name} (was {arm.baseline_was})" for arm in experiment.arms if arm.baseline_was]
    if moved:
        told.append(f"The baseline was changed after the results: {', '.join(moved)}.")
    changed = [arm.name for arm in experiment.arms if from_changed_code(arm, known)]
    if changed:
        told.append(f"Compared by runs of code with changes that are in no commit: {', '.join(changed)}.")
    return told


def two_kinds_of_cpu(experiment, known):
    """A sentence on pairs whose runs were recorded on two kinds of CPU, or ''."""
    each = []
    for arm in experiment.arms:
        mixed = pairs_across_machines(arm, known)
        if arm.name != arm.baseline and mixed:
            pairs, _ = comparison(arm, known)
            each.append(f"{arm.name} {mixed} of {pairs}")
    if not each:
        return ""
    return f"Pairs whose two runs were recorded on different kinds of CPU: {', '.join(each)}."


def runs_told(experiment, here):
    """Sentences about the records `here`: how many there are, where they ran, at which commits."""
    runs = set()
    for arm in experiment.arms:
        runs |= {arm.source, arm.trained}
    expected = len(runs) * len(experiment.seeds)
    machines = ", ".join(sorted(set(map(machine_of, here)))) or "none yet"
    said = f"{len(here)} of {expected} runs, {machines}."
    if not here:
        return [said]
    told = [f"{said} Cost of these records: {cost_text(here)}."]
    if any("of" in record and "trained_on" not in record for record in here):
        told.append("Records of arms that only sample name the machine and commit of the training here.")
    commits = sorted(set(map(commit_words, here)))
    told.append(f"Commit {', '.join(commits)}.")
    return told


def commit_words(record):
    """'1079456b2', or '7c5b23931 with changes' of a run from a tree with changes that were not committed."""
    commit = str(record.get("commit"))[:9]
    return commit if record.get("clean") else f"{commit} with changes"


def check_told(check):
    which = f"{check['arm']}, seed {check['seed']}, on {check['machine']} at commit {check['commit'][:9]}"
    outcome = "passed" if check["same"] else "FAILED"
    return f"Run again: {which}: {outcome}: {check['said']}."


def margin_told(experiment, known):
    """The margin, for scale: in percent of the baseline, and of the harm of rounding to nearest."""
    e = experiment
    base = finite_scores(e.arm(e.baseline), known)
    said = f"Margin {e.margin:g} ({'lower' if e.lower_is_better else 'higher'} is better)"
    if base and statistics.fmean(base):
        said += f", {percent(e.margin / abs(statistics.fmean(base)))} of the baseline's score"
    if harm := harm_of_nearest(e, known):
        said += f" and {percent(e.margin / harm)} of what rounding to nearest costs here"
    if e.loss_margin:
        said += f"; of the loss {e.loss_margin:g} %."
    else:
        said += ". No margin was fixed for the loss."
    if e.margin_reason:
        return f"{said} Why, written before the runs: {e.margin_reason}"
    return f"{said} Why it is as wide was not written down, so a row shows what it reached in its place."


def harm_of_nearest(experiment, known):
    """What the first arm that rounds to nearest loses against the experiment's baseline, or None."""
    for arm in experiment.arms:
        if arm.name.split("-")[-1] != "nearest" or arm.baseline != experiment.baseline:
            continue
        harm = comparison(arm, known)[1]
        if is_on_the_worse_side(harm, arm.lower_is_better) and math.isfinite(harm.mean):
            return abs(harm.mean)
    return None


def holm_told(experiment, known):
    """How many verdicts stand after Holm's correction, where many stand together."""
    differ, equal, loss, levels_read = [], [], [], []
    for arm in experiment.arms:
        n, result = comparison(arm, known)
        if arm.name == arm.baseline or not result or result.verdict == WAITING_VERDICT:
            continue
        differ.append(result.p_difference)
        equal.append(result.p_equal)
        levels_read.append(look_of(experiment, n)[1])
        loss_result = loss_comparison(arm, known)[2]
        if loss_result:
            loss.append(loss_result.p_difference)
    if len(differ) < 5:
        return ""
    level = min(levels_read)  # of the look that is read here

    def alone(ps):
        return sum(x < level for x in ps)

    def kept(ps):
        return stats.holm(ps, level)

    return (
        f"{len(differ)} comparisons stand together. Each alone at {100 * level:g} %, {alone(differ)} differ "
        f"in the score, {alone(equal)} are equal within their margin, and {alone(loss)} differ in the loss; "
        f"with Holm's correction for so many {kept(differ)}, {kept(equal)} and {kept(loss)}."
    )


def fewer_seeds(experiment, known):
    """A sentence on arms that read another experiment's runs over fewer seeds than it has."""
    told = []
    for arm in experiment.arms:
        there = arm.source.experiment
        theirs = arm_that_reads(there, arm.source, arm.metric)
        if there is experiment or theirs is None or arm.baseline == arm.name:
            continue
        n, own = comparison(arm, known)
        more, result = comparison(theirs, known)
        if more > n and own and result.verdict != own.verdict and theirs.baseline != theirs.name:
            words = tables.verdict_words(theirs, known)
            told.append(f"{arm.name} ({words} over the {more} seeds of {there.number})")
    return [f"Over more seeds another verdict: {', '.join(told)}."] if told else []


def arm_that_reads(experiment, source, metric):
    """The first arm of an experiment that reads this figure of these runs, or None."""
    for arm in experiment.arms:
        if arm.source is source and arm.metric == metric:
            return arm
    return None


def effects_table(group):
    rows = [["factor", "times", "from", "to"]]
    for name, *numbers in group["effects"]:
        rows.append([name, *(figure_text(x, 2) for x in numbers)])
    said = (
        f"{group['title'].capitalize()}: what each factor multiplies the score by, averaged over the others, "
        f"with its 95 % interval; of a pair, what the second's fault multiplies the first's effect by."
    )
    return f"{said}\n\n{markdown_table(rows)}"


def ranges_table(traces):
    keys = {
        "state, smallest": "x_min",
        "largest": "x_max",
        "mean": "x_mean",
        "output, smallest": "prediction_min",
        "largest ": "prediction_max",
    }
    rows = [["arm", *(title.strip() for title in keys)]]
    for name, trace in traces.items():
        row = [name]
        for kind in keys.values():
            values = [step[kind] for step in trace if kind in step]
            ends = values[:: max(1, len(values) - 1)]
            row.append(" → ".join(figure_text(v, 2) for v in ends))
        rows.append(row)
    return "Ranges of generation, first step → last, mean over seeds:\n\n" + markdown_table(rows)


def cost_text(records):
    """'12 min on 2 cores + 3 min on NVIDIA ...'"""
    seconds = {}
    for record in records:
        gpu = record.get("env", {}).get("gpu")
        where, share = (gpu, 1) if gpu else (f"{CORES_OF_A_MACHINE} cores", CORES_OF_A_MACHINE)
        spent = record.get("seconds", 0) + record.get("scoring_seconds", 0)
        seconds[where] = seconds.get(where, 0) + spent / share
    parts = []
    for where, s in sorted(seconds.items()):
        parts.append(f"{math.ceil(s / 60)} min on {where}" if s < 5400 else f"{s / 3600:.1f} h on {where}")
    return " + ".join(parts) or "-"
