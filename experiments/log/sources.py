"""Figures that a source in prose names: <!-- source: final_loss of 001/bf16 over 001/fp32, seeds 0-5 -->

A source is one or more parts, with a semicolon between them. A part is one of

    METRIC of NNN/ARM                                  means, spreads and ends over its seeds
    METRIC of NNN/ARM minus [METRIC of] NNN/ARM        differences, paired by seed
    METRIC of NNN/ARM over [METRIC of] NNN/ARM         changes in percent, paired by seed, and ratios

and may end with ", seed 4" or ", seeds 0-5". METRIC is a figure of the run (final_loss, gradient_snr.fp8,
curve.ema_moved: the end of its curve), or of its scores (ema.frechet, 0.999:bf16.label_accuracy). Of the
scores, held_out is the loss on held-out data, and last_x_min stands at the end of the sampler's ranges. Any
other source is words, and taken at its word.
"""
import math
import re
import statistics

from scipy import stats

from experiments.log.analysis import held_out, records_of
from experiments.log.records import is_number

ARM = r"\d{3}/[\w.-]+"
PART = re.compile(
    rf"(?P<metric>\S+) of (?P<arm>{ARM})"
    rf"(?: (?P<against>minus|over) (?:(?P<other>\S+) of )?(?P<base>{ARM}))?"
    r"(?:, seeds? (?P<first>\d+)(?:-(?P<last>\d+))?)?"
)
PASSED_OVER = re.compile(r"pixel_|kid$|sliced_wasserstein$")  # scores that no page shows


class NoFigure(Exception):
    """A source names what no record holds."""


class Figures:
    """What records give: plain numbers, and numbers in percent."""

    def __init__(self):
        self.plain, self.percent = set(), set()

    def add(self, *values):
        self.plain.update(float(x) for x in values if is_number(x) and math.isfinite(x))

    def share(self, *values):
        """Parts of a whole, in percent."""
        self.percent.update(100 * x for x in values if is_number(x) and math.isfinite(x))

    def ratio(self, x):
        """One figure over another: times as much, or percent more or less."""
        if is_number(x) and math.isfinite(x) and x:
            self.plain.update((float(x), 1 / x))
            self.share(x, 1 - x, x - 1)

    def have(self, places, value, signed, percent):
        for x in self.percent if percent else self.plain:
            x = x if signed else abs(x)
            if math.isclose(round(x, places), value, rel_tol=1e-9, abs_tol=1e-12):
                return True
        return False


def figures_of(source, experiments, known):
    """The Figures that a source gives, of {number: Experiment}; None where the source is words.

    NoFigure: a part names no experiment, no arm, or a figure that its records don't hold.
    """
    parts = [PART.fullmatch(part.strip()) for part in source.split(";")]
    if not all(parts):
        return None
    found = Figures()
    for part in parts:
        of_part(found, part, experiments, known)
    return found


def of_part(found, part, experiments, known):
    own = values(part["metric"], part["arm"], experiments, known)
    first, last = part["first"], part["last"] or part["first"]
    seeds = range(int(first), int(last) + 1) if first else own
    own = {seed: own[seed] for seed in seeds if seed in own}
    if not own:
        raise NoFigure(f"{part[0]} (no run of these seeds)")
    if part["against"] is None:
        figures = summary(list(own.values()))
        found.add(*figures)
        if all(0 <= x <= 1 for x in own.values()):
            found.share(*figures)
        return
    base = values(part["other"] or part["metric"], part["base"], experiments, known)
    pairs = [(own[seed], base[seed]) for seed in own if seed in base]
    if not pairs:
        raise NoFigure(f"{part[0]} (no pairs)")
    if part["against"] == "minus":
        found.add(*summary([x - y for x, y in pairs]))
        return
    changes = [x / y - 1 for x, y in pairs if y]
    for x in summary(changes):
        found.share(x)
        found.add(100 * x, 1 + x)  # "by 0.09 % [0.05, 0.13]" writes the sign of percent once


def values(metric, named, experiments, known):
    """{seed: figure} of the finished runs of NNN/ARM."""
    number, name = named.split("/")
    if number not in experiments or name not in {arm.name for arm in experiments[number].arms}:
        raise NoFigure(f"{named} (no such arm)")
    experiment = experiments[number]
    weights = metric.rpartition(".")[0]
    rows = {
        seed: flat(record, (weights,))
        for seed, record in records_of(experiment, experiment.arm(name), known).items()
    }
    found = {seed: row[metric] for seed, row in rows.items() if metric in row}
    if not found:
        raise NoFigure(f"{metric} of {named} (no such figure)")
    return found


def flat(record, sources):
    """{name: number} of a finished record: scores of these weights, and the ends of curves and ranges."""
    if "failed" in record:
        return {}
    found = {name: x for name, x in record.items() if is_number(x)}
    for source in sources:
        own = record["scores"].get(source, {})
        found |= {f"{source}.{k}": x for k, x in own.items() if is_number(x) and not PASSED_OVER.match(k)}
        last = own.get("trace", [{}])[-1]
        found |= {f"{source}.last_{k}": x for k, x in last.items()}
        if own:
            found[f"{source}.held_out"] = held_out(record, source)[1]
    for group in ("flops_share", "gradient_snr"):
        found |= {f"{group}.{name}": x for name, x in record.get(group, {}).items()}
    for name, curve in record.get("curves", {}).items():
        if curve and is_number(curve[-1]):
            found[f"curve.{name}"] = curve[-1]
    return found


# ---- Statistics of a few numbers ---------------------------------------------------------------------------


def spread(values):
    """Mean and standard deviation of the finite ones."""
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return []
    return [statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else 0.0]


def summary(values):
    """The spread, the values themselves, and the ends of the 90 % and 95 % intervals of the mean."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return spread(values)
    mean, sd = spread(values)
    found = [mean, sd, *values]
    for tail in (0.05, 0.025):
        half = float(stats.t.isf(tail, len(values) - 1)) * sd / math.sqrt(len(values))
        found += [mean - half, mean + half]
    return found
