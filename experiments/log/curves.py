"""What the figures of an experiment show: curves, recipes by bytes, effects of factors, ranges of generation.

Everything here takes an Experiment and `known`, {key: record} of all experiments, and returns plain data.
"""

import itertools
import math
import statistics

from experiments.log import figures, stats
from experiments.log.analysis import (
    HELD_OUT,
    finite_scores,
    held_out,
    loss_comparison,
    records_of,
    scores,
    weights_of,
)

# ---- Curves ------------------------------------------------------------------------------------------------


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
    """[(arm, bytes a parameter, change of the held-out loss in percent, low, high, where the interval lies)].

    The most bytes stand first. The loss is that of loss_weights(); low and high are the ends of its 95 %
    interval. The baseline stands at 0, without an interval. Arms without two pairs are left out.
    """
    weights = loss_weights(experiment, known)
    points = []
    for arm in experiment.arms:
        held = bytes_of(records_of(experiment, arm, known).values())
        if held is None:
            continue
        if arm.name == arm.baseline:
            points.append((arm.name, held, 0.0, None, None, "baseline"))
            continue
        change = loss_comparison(experiment, arm, known, weights)[2]
        if change is not None:
            points.append((arm.name, held, change.mean, change.low, change.high, side(change)))
    return sorted(points, key=lambda point: -point[1])


def bytes_of(records):
    """Bytes a parameter of the first of these runs that finished, or None."""
    for record in records:
        if "bytes_per_parameter" in record:
            return round(record["bytes_per_parameter"], 2)
    return None


def side(change):
    """Where the 95 % interval of a change of the loss lies."""
    if change.low > 0:
        return "worse"
    return "better" if change.high < 0 else "undecided"


def loss_weights(experiment, known):
    """ "raw" where every run was scored with its last weights too, else None: those that each arm reads. An
    average of few steps still holds a part of the initial weights.
    """
    for arm in experiment.arms:
        for record in records_of(experiment, arm, known).values():
            if "failed" not in record and held_out(record, "raw")[0] != HELD_OUT:
                return None
    return "raw"


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
