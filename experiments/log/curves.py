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
    held_out_loss,
    loss_comparison,
    records_of,
    scores_by_seed,
    weights_of_score,
)

# ---- Curves ------------------------------------------------------------------------------------------------


def series(experiment, known):
    """{series: [(x, mean, sd)]} of the arms that are points of a curve."""
    found = {}
    for arm in experiment.arms:
        values = finite_scores(arm, known)
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
        held = bytes_of_runs(records_of(arm, known).values())
        if held is None:
            continue
        if arm.name == arm.baseline:
            points.append((arm.name, held, 0.0, None, None, "baseline"))
            continue
        change = loss_comparison(arm, known, weights)[2]
        if change is not None:
            points.append((arm.name, held, change.mean, change.low, change.high, side_of_zero(change)))
    return sorted(points, key=lambda point: -point[1])


def bytes_of_runs(records):
    """Bytes a parameter of the first of these runs that finished, or None."""
    for record in records:
        if "bytes_per_parameter" in record:
            return round(record["bytes_per_parameter"], 2)
    return None


def side_of_zero(change):
    """Where the 95 % interval of a change of the loss lies."""
    if change.low > 0:
        return "worse"
    return "better" if change.high < 0 else "undecided"


def loss_weights(experiment, known):
    """ "raw" where every run was scored with its last weights too, else None: those that each arm reads. An
    average of few steps still holds a part of the initial weights.
    """
    for arm in experiment.arms:
        for record in records_of(arm, known).values():
            if "failed" not in record and held_out_loss(record, "raw")[0] != HELD_OUT:
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
        values, seeds = scores_of_all(experiment, arms, known)
        if len(seeds) < 2:
            continue
        group = factorial(names, arms, values, seeds)
        if group["effects"]:
            groups.append(group)
    return groups


def scores_of_all(experiment, arms, known):
    """({arm: {seed: score}}, the seeds for which each arm has a score whose logarithm can be taken)."""
    values, seeds = {}, list(experiment.seeds)
    for arm in arms:
        own = values[arm] = scores_by_seed(arm, known)
        seeds = [seed for seed in seeds if 0 < own.get(seed, 0) < math.inf]
    return values, seeds


def factorial(names, arms, values, seeds):
    """One group: `names` of the factors, `values` {arm: {seed: score}}."""
    half = len(names) // 2  # the first half of the factors spans the rows, the second the columns
    rows = settings_of_factors(arms, names[:half])
    columns = settings_of_factors(arms, names[half:])
    mean = {}
    for arm in arms:
        mean[tuple(arm.cell.values())] = statistics.fmean(values[arm][seed] for seed in seeds)
    cells = []
    for row in rows:
        cells.append([mean.get(row + column) for column in columns])
    return {
        "title": f"{len(names)} factors, {len(arms)} cells, {len(seeds)} seeds",
        "effects": effects(names, arms, values, seeds),
        "rows": [_spot_in_words(names[:half], row) for row in rows],
        "columns": [_spot_in_words(names[half:], column) for column in columns],
        "cells": cells,
    }


def settings_of_factors(arms, names):
    """[the levels of these factors], each once, in the order of the arms."""
    return list(dict.fromkeys(levels_of(arm, names) for arm in arms))


def levels_of(arm, names):
    return tuple(arm.cell[name] for name in names)


def _spot_in_words(names, spot):
    return ", ".join(f"{name} {level}" for name, level in zip(names, spot, strict=True))


def effects(names, arms, values, seeds):
    """[(name, times, low, high)] of each factor, then of each pair, that has cells on every side."""
    cells = Cells(names, arms, values, seeds)
    found = []
    for i, name in enumerate(names):
        faulty, sound = cells.mean_logs({i: True}), cells.mean_logs({i: False})
        if faulty and sound:
            fault = cells.fault(i)
            logs = [a - b for a, b in zip(faulty, sound, strict=True)]
            found.append(_ratio_and_interval(f"{name} {fault}", logs))
    for i, j in itertools.combinations(range(len(names)), 2):
        logs = cells.of_a_pair(i, j)
        if logs:
            found.append(_ratio_and_interval(f"{names[i]} x {names[j]}", logs))
    return found


class Cells:
    """The cells of a factorial experiment, each factor of which is sound or faulty in a cell."""

    def __init__(self, names, arms, values, seeds):
        self.arms, self.values, self.seeds = arms, values, seeds
        healthy = arms[0]
        for arm in arms[::-1]:
            if arm.name == arm.baseline:
                healthy = arm
        self.levels, self.faults = {}, {}
        for arm in arms:
            self.levels[arm] = levels_of(arm, names)
            pairs = zip(self.levels[arm], levels_of(healthy, names), strict=True)
            self.faults[arm] = [level != sound for level, sound in pairs]

    def fault(self, i):
        """The faulty level of factor i in the first cell that has it."""
        for arm in self.arms:
            if self.faults[arm][i]:
                return self.levels[arm][i]
        return None

    def mean_logs(self, wanted):
        """[mean log score of a seed] over some cells, [] without one. wanted: {factor: whether faulty}."""
        chosen = list(self.arms)
        for i, faulty in wanted.items():
            chosen = [arm for arm in chosen if self.faults[arm][i] == faulty]
        if not chosen:
            return []
        logs = []
        for seed in self.seeds:
            logs.append(statistics.fmean(math.log10(self.values[arm][seed]) for arm in chosen))
        return logs

    def of_a_pair(self, i, j):
        """[by how much i's effect on the log score is larger where j is faulty] of the seeds, or []."""
        both, first = self.mean_logs({i: True, j: True}), self.mean_logs({i: True, j: False})
        second, none = self.mean_logs({i: False, j: True}), self.mean_logs({i: False, j: False})
        if not (both and first and second and none):
            return []
        return [b - s - f + n for b, s, f, n in zip(both, second, first, none, strict=True)]


def _ratio_and_interval(name, logs):
    result = stats.equivalence(logs, 1.0)
    return name, 10**result.mean, 10**result.low, 10**result.high


def generation_ranges(experiment, known):
    """{arm: [{"t", "x_min", ...}]}: the traces of generation, mean over seeds."""
    if not experiment.ranges:
        return {}
    found = {}
    for arm in experiment.arms:
        traces = own_scores_named(arm, known, "trace")
        # one tuple a step, of the same step in the traces of all seeds
        means = list(map(mean_step, zip(*filter(None, traces), strict=False)))
        if means:
            found[arm.name] = means
    return found


def mean_step(step):
    """{figure: mean over the seeds} of one step of several traces."""
    return {name: statistics.fmean(trace[name] for trace in step) for name in step[0]}


def own_scores_named(arm, known, name):
    """[a score of the weights that an arm reads], of the runs that have it."""
    found = []
    for record in records_of(arm, known).values():
        own = record.get("scores", {}).get(weights_of_score(arm), {})
        if name in own:
            found.append(own[name])
    return found


def losses_by_timestep(experiment, known):
    """{arm: (timesteps, loss)}, means over seeds; cells of a factorial experiment are left out."""
    found = {}
    for arm in experiment.arms:
        losses = own_scores_named(arm, known, "loss_by_timestep")
        if losses and not arm.cell:
            count = len(losses[0])
            found[arm.name] = [(k + 0.5) * 1000 / count for k in range(count)], mean_curve(losses)
    return found


def training_curves(experiment, known):
    """{figure of the training: {arm: (steps, values)}}, means over the seeds that ran longest."""
    panels, trained = {}, set()
    for arm in experiment.arms:
        if arm.trained in trained:
            continue
        trained.add(arm.trained)
        longest, same = longest_curves(records_of(arm, known).values())
        for name in figures.AXIS_LABELS:
            own = [curve[name] for curve in same if name in curve]
            if own:
                panels.setdefault(name, {})[arm.name] = longest, mean_curve(own)
    return panels


def longest_curves(records):
    """(the steps of the longest of these runs, [the curves of all that have these steps])."""
    longest, same = [], []
    for record in records:
        curve = record.get("curves")
        if not curve:
            continue
        if len(curve["step"]) > len(longest):
            longest, same = curve["step"], []
        if curve["step"] == longest:
            same.append(curve)
    return longest, same


def mean_curve(rows):
    """Elementwise mean of equally long lists, over the finite entries; NaN where there are none."""
    means = []
    for column in zip(*rows, strict=False):
        finite = [v for v in column if v is not None and math.isfinite(v)]
        means.append(statistics.fmean(finite) if finite else math.nan)
    return means
