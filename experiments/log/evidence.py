"""What a claim may refer to: figures of arms and of benchmarks' records, tests, flags, files.

{NUMBER/ARM.FIGURE} is a figure of ARM_FIGURES, or a word of ARM_WORDS; {bench:RECORD FIGURE ARGUMENT / ...}
is one of BENCH_FIGURES, by what the record's "bench" says. claims.py fills them into its table.

    evidence.figure("011/bf16.difference")                          0.0196, "+0.020"
    evidence.figure("bench:cpu-training-64x64 speed unet:small:64:8 / bf16")
"""

import ast
import dataclasses
import functools
import json
import statistics
from pathlib import Path

from experiments.log.analysis import (
    comparison,
    levels,
    loss_comparison,
    machine_of,
    of_nearest,
    records_of,
    scores,
    verdict,
)
from experiments.log.records import value
from experiments.log.tables import decimals_of
from lowprec.errors import Refused


class Pending(Exception):
    """Something that is planned and has no record yet. The message is the command that makes it."""


# ---- Figures of an arm -------------------------------------------------------------------------------------


def percent(x):
    return f"{100 * x:.0f} %" if abs(x) >= 0.1 else f"{100 * x:.1f} %"


def small_percent(x):
    said = f"{100 * x:+.2f} %"
    return said[1:] if said[1:] == "0.00 %" else said


def signed_percent(x):
    return f"{100 * x:+.1f} %"


@dataclasses.dataclass
class Seen:
    """An arm with its records, and its baseline's of the same seeds."""

    arm: object
    known: dict

    def __post_init__(self):
        self.experiment = self.arm.experiment
        self.pairs, self.result = comparison(self.experiment, self.arm, self.known)
        self.loss_result = loss_comparison(self.experiment, self.arm, self.known)[2]
        self.own = scores(self.experiment, self.arm, self.known)
        base = self.experiment.arm(self.arm.baseline)
        against = scores(self.experiment, base, self.known)
        self.base = {seed: score for seed, score in against.items() if seed in self.own}
        self.records = records_of(self.experiment, self.arm, self.known)
        self.base_records = records_of(self.experiment, base, self.known)

    def held(self, metric):
        """The mean over the records of a figure, as "final_loss"."""
        return statistics.fmean(value(r, metric) for r in self.records.values() if "failed" not in r)

    def ratio(self, metric):
        """The same, over that of the baseline in the same seeds."""
        seeds = [seed for seed in self.records if seed in self.base_records]
        own, base = (
            statistics.fmean(value(records[seed], metric) for seed in seeds)
            for records in (self.records, self.base_records)
        )
        return own / base

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
    "achieved_share": (lambda s: s.result.achieved / abs(statistics.fmean(s.base.values())), percent),
    "margin_share": (lambda s: s.arm.margin / abs(statistics.fmean(s.base.values())), percent),
    "harm": (lambda s: of_nearest(s.experiment, s.arm, s.known)[0], percent),
    "loss_harm": (lambda s: of_nearest(s.experiment, s.arm, s.known)[1], percent),
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
    "kept_share": (lambda s: s.ratio("activation_bytes"), percent),
    "speed": (lambda s: 1 / s.ratio("seconds"), "{:.1f}"),
    "covered": (lambda s: sum(next(iter(s.records.values()))["flops_share"].values()), percent),
    "survival": (lambda s: s.last("update_survival"), percent),
    "moved": (lambda s: s.last("exp_avg_sq_moved"), percent),
}
ARM_WORDS = {
    "verdict": lambda s: verdict(s.pairs, s.result),
    "interval": lambda s: f"[{written(s, s.result.low, '+')}, {written(s, s.result.high, '+')}]",
}


def written(seen, x, form):
    if callable(form):
        return form(x)
    return form.format(x) if "{" in form else f"{x:{form}.{decimals_of(seen.arm.margin)}f}"


# ---- Figures of a benchmark's record -----------------------------------------------------------------------


def row_of(rows, **wanted):
    """The row with these values. Pending when there is none: records may be older than a row."""
    for row in rows:
        if all(row.get(name) == x for name, x in wanted.items()):
            return row
    raise Pending(", ".join(map(str, wanted.values())))


def ms(row):
    if not row["ms"]:
        raise Pending(row["name"])
    return statistics.median(row["ms"])


def part_of(rows, net, flags="", part="bytes_per_parameter"):
    return row_of([row for row in rows if "weights" in row], net=net, flags=flags)[part]


def saved(rows, net, flags, part="bytes_per_parameter"):
    return 1 - part_of(rows, net, flags, part) / part_of(rows, net, "", part)


def share(rows, net, flags, part):
    return part_of(rows, net, flags, part) / part_of(rows, net, flags)


def kept_bytes(rows, net, recipe, again=False):
    """Bytes kept for backward at the largest batch that was measured."""
    here = [row for row in rows if row.get("again") is again and row["net"] == net]
    batch = max((row["batch"] for row in here), default=None)
    return row_of(here, recipe=recipe, batch=batch)["total"]


def kept(rows, net, recipe):
    return kept_bytes(rows, net, recipe) / kept_bytes(rows, net, "fp32")


def again(rows, net, recipe):
    return kept_bytes(rows, net, recipe, again=True) / kept_bytes(rows, net, recipe)


def billion(rows, net, recipe, flags):
    """GB of a net of a billion parameters, whose activations document 002 puts at 8 GB in fp32."""
    return part_of(rows, net, flags) + 8 * kept(rows, net, recipe)


def trained_speed(rows, net, recipe):
    return ms(row_of(rows, net=net, recipe="fp32")) / ms(row_of(rows, net=net, recipe=recipe))


def system(rows, table, name):
    return row_of(rows, table=table, name=name)


def item_ms(row):
    return ms(row) / row["items_a_step"]


def first_of(rows, table):
    return next((row for row in rows if row["table"] == table), None) or system(rows, table, "its first row")


def system_speed(rows, table, name):
    return item_ms(first_of(rows, table)) / item_ms(system(rows, table, name))


def system_kept(rows, table, name):
    own, first = system(rows, table, name), first_of(rows, table)
    ms(own), ms(first)  # a row that could not run says nothing about memory
    return own["kept"]["total"] / first["kept"]["total"]


def system_fits(rows, table, name):
    """How many times as many items fit into the bytes that the first row keeps for backward."""
    own, first = system(rows, table, name), first_of(rows, table)
    return own["items_a_step"] / first["items_a_step"] / system_kept(rows, table, name)


def loop_speed(rows, net, loop, kind):
    """Speed of a step against the bare loop in fp32."""
    return row_of(rows, net=net, loop=loop, kind=kind)["ratio"]


def score(rows, table, name):
    row = system(rows, table, name)
    if "score" not in row:
        raise Pending(f"{table}, {name}")
    return row["score"][1]


def times(rows, layout, name, other):
    return ms(row_of(rows, layout=layout, name=name)) / ms(row_of(rows, layout=layout, name=other))


def gpu_speed(rows, net, recipe, other):
    """Speed of an eager step against that of another recipe, each beside bf16 in its own rounds."""

    def beside(name):
        row = row_of([row for row in rows if not row["compile"]], net=net, recipe=name)
        return statistics.median(row["reference_ms"]) / ms(row)

    return beside(recipe) / beside(other)


BENCH_FIGURES = {  # what a record's "bench" says: {figure: (function of its rows, how it is written)}
    "memory": {
        "bytes": (part_of, "{:.2f}"),
        "saved": (saved, percent),
        "share": (share, percent),
        "kept": (kept, percent),
        "again": (again, percent),
        "fits": (lambda *at: 1 / kept(*at), "{:.1f}"),
        "billion": (billion, "{:.1f}"),
    },
    "training": {"speed": (trained_speed, "{:.1f}")},
    "gpu": {"speed": (gpu_speed, "{:.2f}")},
    "systems": {
        "speed": (system_speed, "{:.2f}"),
        "kept": (system_kept, percent),
        "fits": (system_fits, "{:.1f}"),
        "rate": (lambda *at: 1e3 / item_ms(system(*at)), "{:.0f}"),
        "epoch": (lambda *at: ms(system(*at)) * system(*at)["epoch_steps"] / 1e3, "{:.1f}"),
        "bytes": (lambda *at: system(*at)["bytes_per_parameter"], "{:.2f}"),
        "score": (score, "{:.3f}"),
    },
    "peers": {"speed": (loop_speed, "{:.2f}")},
    "optimizers": {"times": (times, "{:.1f}")},
    "moments": {"excess": (lambda rows, name: row_of(rows, name=name)["dropped"], "{:.2f}")},
}

# ---- What is there -----------------------------------------------------------------------------------------


class Evidence:
    """Everything that a claim may refer to.

    experiments, known: as report.py has them. base: the root of the repository. planned: numbers of
    experiments and "bench:NAME" that may lack what is asked of them.
    """

    def __init__(self, experiments, known, root, base, planned=()):
        self.experiments = {e.number: e for e in experiments}
        self.known, self.root, self.base = known, Path(root), Path(base)
        self.planned = set(planned)

    # -- arms

    def arm(self, name):
        """"011/bf16" -> Arm. Refused, or Pending where its experiment is planned and has no record."""
        number, _, arm = name.partition("/")
        experiment = self.experiments.get(number)
        names = [a.name for a in experiment.arms] if experiment else []
        if arm in names:
            return experiment.arm(arm)
        begun = any(key[0] == number for key in self.known)
        if number in self.planned and not begun:
            raise Pending(f"python experiments/run.py {number}")
        if experiment is None:
            raise Refused(f"there is no experiment {number}, which arm:{name} names")
        raise Refused(f"experiment {number} has no arm '{arm}'; it has {', '.join(names)}")

    @functools.cache  # noqa: B019, one Evidence a table
    def seen(self, name):
        arm = self.arm(name)
        seen = Seen(arm, self.known)
        if not seen.own:
            raise Pending(f"python experiments/run.py {arm.experiment.number}")
        return seen

    def arm_figure(self, reference):
        """"011/bf16.difference" -> (number or None, text)."""
        name, _, figure = reference.rpartition(".")
        if figure not in {**ARM_FIGURES, **ARM_WORDS}:
            known = ", ".join([*ARM_FIGURES, *ARM_WORDS])
            raise Refused(f"{{{reference}}}: an arm has no figure '{figure}'; it has {known}")
        seen = self.seen(name)
        if seen.pairs < 2 and seen.arm.name != seen.arm.baseline:
            raise Pending(f"python experiments/run.py {seen.experiment.number}")
        try:
            if figure in ARM_WORDS:
                return None, ARM_WORDS[figure](seen)
            compute, form = ARM_FIGURES[figure]
            x = compute(seen)
            return x, written(seen, x, form)
        except (KeyError, StopIteration, AttributeError, TypeError, statistics.StatisticsError):
            raise Refused(f"{{{reference}}}: the records of {name} do not hold that") from None

    # -- benchmarks

    @functools.cache  # noqa: B019
    def record(self, name):
        path = self.root / "bench" / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        if f"bench:{name}" in self.planned:
            raise Pending(f"python bench.py {name.removeprefix('cpu-')} --out experiments/bench/{name}.json")
        raise Refused(f"there is no record experiments/bench/{name}.json, which bench:{name} names")

    def bench_figure(self, reference):
        """"bench:cpu-memory kept dit:S/8:64:1 / bf16" -> (number, text)."""
        name, figure, *rest = reference.removeprefix("bench:").split(" ", 2)
        record = self.record(name)
        figures = BENCH_FIGURES.get(record["bench"], {})
        if figure not in figures:
            raise Refused(f"{{{reference}}}: this record has no figure '{figure}', but {', '.join(figures)}")
        compute, form = figures[figure]
        try:
            x = compute(record["results"], *(" ".join(rest).split(" / ")))
        except Pending as missing:
            if f"bench:{name}" in self.planned:
                command = record["command"].partition(" --out")[0]
                raise Pending(command) from None
            raise Refused(f"{{{reference}}}: the record has no row for {missing}") from None
        except TypeError:
            raise Refused(f"{{{reference}}}: arguments are set apart by ' / ', and these don't fit") from None
        return x, form(x) if callable(form) else form.format(x)

    def figure(self, reference):
        is_bench = reference.startswith("bench:")
        return self.bench_figure(reference) if is_bench else self.arm_figure(reference)

    # -- references

    def check(self, reference):
        """Raise Refused unless the reference names something that exists, Pending if it has no record yet."""
        kind, colon, name = reference.partition(":")
        checks = {
            "arm": self.seen,
            "bench": self.record,
            "test": self._check_test,
            "flag": check_flag,
            "file": self._check_file,
        }
        if not colon or kind not in checks:
            raise Refused(f"'{reference}' is no reference; they begin with {', '.join(checks)} and a colon")
        checks[kind](name)

    def _check_file(self, name):
        if not (self.base / name).is_file():
            raise Refused(f"there is no file {name}")

    def _check_test(self, name):
        file, _, test = name.partition("::")
        self._check_file(file)
        if test not in self._tests(file):
            raise Refused(f"{file} has no test '{test}'")

    @functools.cache  # noqa: B019
    def _tests(self, file):
        tree = ast.parse((self.base / file).read_text())
        return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def machine(self, reference):
        """{names of the machines} of the records behind a reference."""
        kind, _, name = reference.partition(":")
        try:
            if kind == "bench":
                facts = [self.record(name)["machine"]]
            elif kind == "arm":
                facts = [record.get("env", {}) for record in self.seen(name).records.values()]
            else:
                return set()
        except Pending:
            return set()
        names = {machine_of({"env": fact}) for fact in facts}
        return {name.replace("(R)", "") for name in names}


@functools.cache
def known_flags():
    """(flags.Table of train.py, {site: Site} of all tasks)."""
    import strategies
    from lowprec import recipes

    sites = {**recipes.SITES, **recipes.OF_OPTIMIZERS}
    for task in strategies.TASKS.values():
        sites |= task.sites
    return strategies.table(), sites


def check_flag(words):
    """Raise Refused unless `words`, "--bf16" or "--set generation=int8", are flags of train.py."""
    name, _, given = words.removeprefix("--").partition(" ")
    table, sites = known_flags()
    if name not in [*table.defaults(), "config", "dry_run", "check", "sample", "diagnose"]:
        raise Refused(f"train.py has no flag --{name}")
    if name == "set":
        site, _, wanted = given.partition("=")
        if site not in sites or not set(wanted.split("+")) <= set(sites[site].values):
            raise Refused(f"--set {given}: there is no such site, or it has no such value")
    elif name == "task" and given:
        import strategies

        strategies.find(given)
    elif given and table[name].choices and given not in table[name].choices:
        raise Refused(f"--{name} has no value {given}; it has {', '.join(table[name].choices)}")
