"""What the records of an experiment say: scores and differences, effects of factors, curves, ranges.

Everything here takes an Experiment and `known`, {key: record} of all experiments, and returns plain data.
"""

import dataclasses
import itertools
import math
import re
import statistics

from experiments.log import figures, stats
from experiments.log.definition import key, look_of
from experiments.log.records import is_number, value

WAITS = "waits"  # a verdict between two looks that were planned
LOSSES = ("loss", "nats_a_byte", "l1")  # scores that are a loss on held-out data, beside loss_by_timestep
DIVERGED = re.compile(r"the loss is (nan|-?inf)")

# ---- Scores ------------------------------------------------------------------------------------------------


def weights_of(arm):
    """The weights whose scores an arm reads: 'ema' of 'ema.frechet'."""
    return arm.metric.rpartition(".")[0]


def segments(arm):
    return "segment" in arm.trained.experiment.common + arm.trained.flags


def writes_text(arm):
    return "language" in arm.trained.experiment.common + arm.trained.flags


def score(record, metric, lower_is_better):
    """Score of a run: infinitely bad if it diverged, None if it failed for a reason that measures nothing."""
    if "failed" not in record:
        return value(record, metric)
    if not DIVERGED.search(record["failed"]):
        return None  # killed, out of memory
    return math.inf if lower_is_better else -math.inf


def records_of(experiment, arm, known):
    """{seed: record} of the runs that an arm's scores are read from, in the order of the seeds."""
    keys = {seed: key(arm.source, seed) for seed in experiment.seeds}
    return {seed: known[k] for seed, k in keys.items() if k in known}


def scores(experiment, arm, known):
    """{seed: score} of an arm, in the order of the seeds."""
    found = {}
    for seed, record in records_of(experiment, arm, known).items():
        figure = score(record, arm.metric, arm.lower_is_better)
        if figure is not None:
            found[seed] = figure
    return found


def finite_scores(experiment, arm, known):
    return [v for v in scores(experiment, arm, known).values() if math.isfinite(v)]


def comparison(experiment, arm, known):
    """(pairs, stats.Equivalence, or None with fewer than two) of an arm against its baseline."""
    own = scores(experiment, arm, known)
    base = scores(experiment, experiment.arm(arm.baseline), known)
    differences = [own[seed] - base[seed] for seed in own if seed in base]
    if len(differences) < 2:
        return len(differences), None
    due, level = look_of(experiment, len(differences))
    lower = arm.lower_is_better
    result = stats.equivalence(differences, arm.margin, level, lower_is_better=lower)
    if experiment.looks and len(differences) != due:
        result = dataclasses.replace(result, verdict=WAITS)
    return len(differences), result


def verdict(pairs, result):
    if result:
        return result.verdict
    return "no pairs yet" if pairs == 0 else "undecided"


# ---- Held-out loss -----------------------------------------------------------------------------------------


HELD_OUT = "held-out loss"


def held_out(record, weights):
    """(what it is, figure) of the loss of a finished run on held-out data; of its training without one.

    `weights` are those whose scores are read, "" for a figure of the training.
    """
    own = record.get("scores", {}).get(weights, {})
    bins = own.get("loss_by_timestep")
    if bins and all(is_number(loss) for loss in bins):
        return HELD_OUT, statistics.fmean(bins)
    for name in LOSSES:
        if is_number(own.get(name)):
            return HELD_OUT, own[name]
    return "training loss", record["final_loss"]


def is_loss(metric):
    """Whether a score is itself the loss on held-out data: one quantity has one verdict."""
    return metric.rpartition(".")[2] in (*LOSSES, "loss_by_timestep")


def task_of(arm):
    task = ""
    flags = arm.trained.experiment.common + arm.trained.flags
    for flag, word in itertools.pairwise(flags):
        if flag == "--task":
            task = word
    return task


def finished(records):
    return {seed: r for seed, r in records.items() if "failed" not in r}


def diverged(record):
    return DIVERGED.search(record.get("failed", "")) is not None


def loss_comparison(experiment, arm, known, weights=None):
    """(what it is, pairs, stats.Equivalence or None) of an arm's loss against its baseline's, in percent.

    weights: those whose loss is read; those of each arm's own score where none are named. Paired as the
    scores are. None where a run failed, or where the two train on different tasks.
    """
    base_arm = experiment.arm(arm.baseline)
    own_records = records_of(experiment, arm, known)
    base_records = records_of(experiment, base_arm, known)
    own_losses = losses(finished(own_records), weights or weights_of(arm))
    base_losses = losses(finished(base_records), weights or weights_of(base_arm))
    kind, own, base = of_one_kind(own_losses, base_losses)
    seeds = [seed for seed in own if seed in base and base[seed] > 0]
    changes = [100 * (own[seed] / base[seed] - 1) for seed in seeds]
    runs = [*own_records.values(), *base_records.values()]
    if any(map(diverged, runs)):  # the runs that did not would speak for those that did
        return kind, len(changes), None
    if task_of(arm) != task_of(base_arm):  # another task has another loss
        return kind, len(changes), None
    if len(changes) < 2 or not all(map(math.isfinite, changes)):
        return kind, len(changes), None
    _, level = look_of(experiment, len(changes))
    return kind, len(changes), stats.equivalence(changes, experiment.loss_margin or 1.0, level)


def losses(records, weights):
    """{seed: (held-out loss or None, training loss)} of finished runs."""
    found = {}
    for seed, record in records.items():
        kind, loss = held_out(record, weights)
        found[seed] = loss if kind == HELD_OUT else None, record["final_loss"]
    return found


def of_one_kind(own, base):
    """(what it is, {seed: loss} of an arm, the same of its baseline): a loss that all these runs have."""
    held = [held for held, _ in [*own.values(), *base.values()]]
    if held and None not in held:
        kind, at = HELD_OUT, 0
    else:
        kind, at = "training loss", 1
    own_losses = {seed: both[at] for seed, both in own.items()}
    base_losses = {seed: both[at] for seed, both in base.items()}
    return kind, own_losses, base_losses


SLIGHTLY_WORSE = "slightly worse"


def verdict_by_rule(experiment, arm, known):
    """The verdict of an arm, by the score and by the loss.

    An arm whose score is equal to the baseline's, or not shown to differ, is "slightly worse" where the 95 %
    interval of its loss lies above 0, and where its score is worse by less than the margin.
    """
    pairs, result = comparison(experiment, arm, known)
    said = verdict(pairs, result)
    if said not in ("equal", "undecided"):
        return said
    loss = loss_comparison(experiment, arm, known)[2]
    if loss and loss.low > 0:
        return SLIGHTLY_WORSE
    bad_side = result and (result.low > 0 if arm.lower_is_better else result.high < 0)
    if said == "equal" and bad_side:
        return SLIGHTLY_WORSE
    return said


# ---- The harm of rounding to nearest -----------------------------------------------------------------------


def nearest_of(experiment, arm):
    """The arm that rounds to nearest beside this one: its flags are those of the baseline and --pure_bf16."""
    base = experiment.arm(arm.baseline)
    wanted = sorted([*training_flags(base.trained), "--pure_bf16"])
    for other in experiment.arms:
        if other is arm or other.source.of or other.baseline != base.name:
            continue
        same_score = other.metric.rpartition(".")[2] == arm.metric.rpartition(".")[2]
        same_weights = weights_of(other) == weights_of(base)
        if same_score and same_weights and sorted(training_flags(other.trained)) == wanted:
            return other
    return None


def training_flags(arm):
    """The flags of a training without those that only keep or score something beside it."""
    flags, kept = arm.experiment.common + arm.flags, []
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag not in ("--average", "--weights") and before not in ("--average", "--weights"):
            kept.append(flag)
    return kept


def of_nearest(experiment, arm, known):
    """(share of nearest's harm to the score, to the loss) of an arm; None where nearest does none."""
    nearest = nearest_of(experiment, arm)
    if nearest is None:
        return None, None
    _, own = comparison(experiment, arm, known)
    _, harm = comparison(experiment, nearest, known)
    own_loss = loss_comparison(experiment, arm, known)[2]
    harm_of_loss = loss_comparison(experiment, nearest, known)[2]
    return share(own, harm), share(own_loss, harm_of_loss)


def share(own, harm):
    """Of two Equivalences the ratio of means, where the second's interval excludes 0."""
    if own is None or harm is None or not harm.low * harm.high > 0 or not math.isfinite(own.mean):
        return None
    return own.mean / harm.mean


# ---- Machines ----------------------------------------------------------------------------------------------


def machine_of(record):
    """The kind of machine: a GPU's name, or a CPU's without the clock that some hosts add ("@ 2.10GHz")."""
    facts = record.get("env", {})
    return facts.get("gpu") or (facts.get("cpu") or "").partition(" @ ")[0] or "unknown machine"


def across(experiment, arm, known):
    """How many pairs of an arm with its baseline were recorded on two kinds of machine."""
    own = records_of(experiment, arm, known)
    base = records_of(experiment, experiment.arm(arm.baseline), known)
    return sum(machine_of(own[seed]) != machine_of(base[seed]) for seed in own if seed in base)


# ---- Runs --------------------------------------------------------------------------------------------------


def needed(experiment, known):
    """{key: record} of all runs that an experiment's scores come from, other experiments' included."""
    wanted = set()
    for arm in experiment.arms:
        for read in (arm.source, arm.trained):
            wanted.add(key(read, 0)[:2])
    return {k: r for k, r in known.items() if k[:2] in wanted and k[2] in experiment.seeds}


def levels(experiment, known):
    """{"real images": score, "noise": score}, where the task has them; of videos those of masks.

    They depend on the number of samples, so they are those of the baseline's own records, not of the training
    that it samples from.
    """
    reference = reference_of(experiment, known)
    name = experiment.metric.rpartition(".")[2]
    if name.endswith("ari"):
        ends = {"true masks": "floor", "upright stripes": "ceiling"}
    else:
        ends = {"real images": "floor", "noise": "ceiling"}
    found = {}
    for title, end in ends.items():
        level = reference.get(end, {}).get(name)
        if is_number(level):
            found[title] = level
    return found


def reference_of(experiment, known):
    """What real images and noise score, of the first record that says so, the baseline's first, or {}."""
    for arm in [experiment.arm(experiment.baseline), *experiment.arms]:
        for record in records_of(experiment, arm, known).values():
            if record.get("reference"):
                return record["reference"]
    return {}


# ---- Curves, factors, ranges -------------------------------------------------------------------------------


def series(experiment, known):
    """{series: [(x, mean, sd)]} of the arms that are points of a curve."""
    found = {}
    for arm in experiment.arms:
        values = finite_scores(experiment, arm, known)
        if arm.series and values:
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            found.setdefault(arm.series, []).append((arm.x, statistics.fmean(values), sd))
    return found


def by_bytes(experiment, known):
    """[(arm, bytes a parameter, mean score, low, high, verdict)], most bytes first, of the arms that ran.

    low and high: the 95 % interval of the arm's paired difference from its baseline, around its mean. The
    spread over seeds, which all arms share, is not in it. The baseline's own are None.
    """
    points = []
    for arm in experiment.arms:
        held = [r for r in records_of(experiment, arm, known).values() if "bytes_per_parameter" in r]
        values = finite_scores(experiment, arm, known)
        if not held or not values:
            continue
        _, result = comparison(experiment, arm, known)
        said = verdict_by_rule(experiment, arm, known)
        mean, low, high = statistics.fmean(values), None, None
        if arm.name == arm.baseline:
            said = "baseline"
        elif result and math.isfinite(result.mean):
            low, high = (mean + end - result.mean for end in (result.low, result.high))
        points.append((arm.name, round(held[0]["bytes_per_parameter"], 2), mean, low, high, said))
    return sorted(points, key=lambda point: -point[1])


def factorials(experiment, known):
    """Groups of arms with the same factors, for which all cells and seeds are there: their cells and effects.

    Effects are factors on the score: means of log scores, paired by seed, with t intervals. A main effect is
    the faulty level against the baseline's level, averaged over all other factors. That of a pair is the
    first's effect where the second is faulty over where it isn't.
    """
    by_factors = {}
    for arm in experiment.arms:
        if arm.cell:
            by_factors.setdefault(tuple(arm.cell), []).append(arm)
    groups = []
    for names, arms in by_factors.items():
        values = {arm: scores(experiment, arm, known) for arm in arms}
        seeds = [seed for seed in experiment.seeds if has_all_cells(seed, values)]
        if len(seeds) < 2:
            continue
        group = factorial(names, arms, values, seeds)
        if group["effects"]:
            groups.append(group)
    return groups


def has_all_cells(seed, values):
    """Whether each arm of {arm: {seed: score}} has a score of this seed whose logarithm can be taken."""
    return all(0 < scores.get(seed, 0) < math.inf for scores in values.values())


def factorial(names, arms, values, seeds):
    """One group: `names` of the factors, `values` {arm: {seed: score}}."""
    half = len(names) // 2  # the first half of the factors spans the rows, the second the columns
    rows = settings_of(arms, names[:half])
    columns = settings_of(arms, names[half:])
    mean = {}
    for arm in arms:
        mean[tuple(arm.cell.values())] = statistics.fmean(values[arm][seed] for seed in seeds)
    return {
        "title": f"{len(names)} factors, {len(arms)} cells, {len(seeds)} seeds",
        "effects": effects(names, arms, values, seeds),
        "rows": [_words(names[:half], row) for row in rows],
        "columns": [_words(names[half:], column) for column in columns],
        "cells": [[mean.get(row + column) for column in columns] for row in rows],
    }


def settings_of(arms, names):
    """[the levels of these factors], each once, in the order of the arms."""
    found = {}
    for arm in arms:
        found[tuple(arm.cell[name] for name in names)] = None
    return list(found)


def _words(names, spot):
    return ", ".join(f"{name} {setting}" for name, setting in zip(names, spot, strict=True))


def effects(names, arms, values, seeds):
    """[(name, times, low, high)] of each factor, then of each pair, that has cells on every side."""
    healthy = next((arm.cell for arm in arms if arm.name == arm.baseline), arms[0].cell)
    faults = {arm: tuple(arm.cell[name] != healthy[name] for name in names) for arm in arms}

    def mean_logs(*wanted):
        """{seed: mean log score} of the cells with these factors (index, faulty); None without a cell."""
        chosen = [arm for arm in arms if all(faults[arm][i] == faulty for i, faulty in wanted)]
        if not chosen:
            return None
        return {s: statistics.fmean(math.log10(values[arm][s]) for arm in chosen) for s in seeds}

    found = []
    for i, name in enumerate(names):
        faulty, sound = mean_logs((i, True)), mean_logs((i, False))
        if faulty and sound:
            fault = next(arm.cell[name] for arm in arms if faults[arm][i])
            found.append(_times(f"{name} {fault}", [faulty[s] - sound[s] for s in seeds]))
    for i, j in itertools.combinations(range(len(names)), 2):
        sides = itertools.product((True, False), repeat=2)
        corners = [mean_logs((i, first), (j, second)) for first, second in sides]
        if all(corners):
            both, only_first, only_second, none = corners
            logs = [both[s] - only_second[s] - only_first[s] + none[s] for s in seeds]
            found.append(_times(f"{names[i]} x {names[j]}", logs))
    return found


def _times(name, logs):
    result = stats.equivalence(logs, 1.0)
    return (name, *(10**v for v in (result.mean, result.low, result.high)))


def ranges(experiment, known):
    """{arm: [{"t", "x_min", ...}]}: the traces of generation, mean over seeds."""
    if not experiment.ranges:
        return {}
    found = {}
    for arm in experiment.arms:
        records = records_of(experiment, arm, known).values()
        traces = [own_scores(arm, record).get("trace") for record in records]
        # one tuple a step, of the same step in the traces of all seeds
        steps = zip(*filter(None, traces), strict=False)
        means = [mean_step(step) for step in steps]
        if means:
            found[arm.name] = means
    return found


def mean_step(step):
    """{figure: mean over the seeds} of one step of several traces."""
    return {name: statistics.fmean(trace[name] for trace in step) for name in step[0]}


def own_scores(arm, record):
    """Every score of the weights that an arm reads, {} if the run has none."""
    return record.get("scores", {}).get(weights_of(arm), {})


def bins(experiment, known):
    """{arm: (timesteps, loss)}, means over seeds; cells of a factorial experiment are left out."""
    found = {}
    for arm in experiment.arms:
        own = [own_scores(arm, r) for r in records_of(experiment, arm, known).values()]
        losses = [scores["loss_by_timestep"] for scores in own if "loss_by_timestep" in scores]
        if losses and not arm.cell:
            count = len(losses[0])
            found[arm.name] = [(k + 0.5) * 1000 / count for k in range(count)], mean_curve(losses)
    return found


def curves(experiment, known):
    """{figure of the training: {arm: (steps, values)}}, means over the seeds that ran longest."""
    panels, trained = {}, set()
    for arm in experiment.arms:
        if arm.trained in trained:
            continue
        trained.add(arm.trained)
        own = [r["curves"] for r in records_of(experiment, arm, known).values() if r.get("curves")]
        longest = max((curve["step"] for curve in own), key=len, default=[])
        for name in figures.LABELS:
            same = [curve[name] for curve in own if name in curve and curve["step"] == longest]
            if same:
                panels.setdefault(name, {})[arm.name] = longest, mean_curve(same)
    return panels


def mean_curve(rows):
    """Elementwise mean of equally long lists, over the finite entries; NaN where there are none."""
    means = []
    for column in zip(*rows, strict=False):
        finite = [v for v in column if v is not None and math.isfinite(v)]
        means.append(statistics.fmean(finite) if finite else math.nan)
    return means
