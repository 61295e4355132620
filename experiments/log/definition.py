"""What an experiment is: a folder NNN-slug with an experiment.toml, whose keys are the fields below.

    load_experiment("001")       the Experiment
    typed_run(arm, seed)         the command of one run, as a person types it

An arm may be `of` another, its own experiment's or, as "001/fp32", another's: with flags it samples from that
training, without it reads its scores. An arm `after` another starts from that one's finished run, whose
folder is {after} in its flags.
"""

import dataclasses
import math
import re
import shlex
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

from harness.files import reading
from lowprec.errors import Refused

HERE = Path(__file__).resolve().parent.parent  # experiments/
ROOT = HERE.parent
RUNS = "runs/experiments"
# An arm may not hold these flags: run.py sets the first four, and the others do something else than train, or
# write to a place of their own.
NOT_AN_ARMS = (
    *("--name", "--runs", "--seed", "--threads"),
    *("--export", "--config", "--dry_run", "--check", "--sample", "--diagnose"),
)


MARK_TEXTS = {  # the `marked` of an arm: what its page says of it
    "together": "Arm, prediction and results first appear in one commit",
    "known": "Added when the records that it reads were known, with a margin set then",
}


@dataclasses.dataclass(eq=False)
class Arm:
    name: str
    flags: list  # what it adds to the common ones
    of: str = ""  # it trains nothing: it samples from this arm's run, or reads that run's scores
    after: str = ""  # it trains from the finished run of this arm
    processes: int = 1  # that train it together, started by torchrun; each has its share of the batch
    note: str = ""
    metric: str = ""  # this one and the next two: where they differ from the experiment's
    margin: float = 0.0
    baseline: str = ""
    higher_is_better: bool = False  # its metric counts up, in an experiment whose own counts down
    cell: dict = dataclasses.field(default_factory=dict)  # {factor: level} of a factorial experiment
    whole: str = ""  # of a miniature: the arm of the training that it stands for, as "012/nearest-lr-1e-3"
    series: str = ""  # with x: a point of the curve of this name
    x: float = 0.0
    marked: str = ""  # one of MARK_TEXTS: why git does not show that its prediction came before its results
    baseline_was: str = ""  # the baseline that it had before its results were there

    # load sets seven more: `experiment`, the one it belongs to; `base`, the arm that it is compared with;
    # `lower_is_better`, of its metric; `trained`, the arm whose run it reads, or itself; `source`, the arm
    # whose records hold its scores; `start`, the arm it trains after, or itself; `needed`, the arm whose run
    # has to be there first, or None


@dataclasses.dataclass
class Look:
    """When verdicts are read, planned before the runs."""

    pairs: int
    level: float  # of a one-sided test
    unplanned: bool = False  # whether it was decided on later


@dataclasses.dataclass(eq=False)
class Experiment:
    title: str
    question: str
    prediction: str
    margin: float  # in the unit of metric, fixed before the runs
    # "ema.frechet": weights (ema, raw, or an --average), then a score; or see records.figure_of_record
    metric: str
    seeds: list
    common: list  # flags of every training, as typed
    baseline: str
    arms: list
    believed: str = ""
    lower_is_better: bool = True
    verdict: str = ""  # the author's, once the results are there
    x_label: str = ""  # what the x of the arms is
    ranges: bool = False  # report the ranges that generation runs through
    by_bytes: bool = False  # draw the score against bytes a parameter
    miniature: bool = False  # its runs stand for longer ones that are recorded too: they are no settings
    margin_reason: str = ""  # why the margin is as wide, written before the runs; without it no row shows it
    loss_margin: float = 0.0  # of the held-out loss, in percent of the baseline's; 0: none was fixed
    looks: list = dataclasses.field(default_factory=list)  # Looks in order; none: one, at all seeds, at 0.05
    missed: list = dataclasses.field(default_factory=list)  # titles of its missed predictions
    about: str = ""  # one of front.QUESTIONS: where the index of EXPERIMENTS.md has it
    found: str = ""  # what it found, in a line of that index; its title without one
    tables: dict = dataclasses.field(default_factory=dict)  # {page of docs/: its table that the arms fill}
    second_reading: str = ""  # why the last weights are scored too, decided on after the results

    # load sets two more: `number` ("007") and `folder`

    def arm(self, name):
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = ", ".join(arm.name for arm in self.arms)
        raise Refused(f"experiment {self.number} has no arm '{name}'; it has {names}")


# ---- Reading -----------------------------------------------------------------------------------------------


def experiment_folders(root=HERE):
    """{number: folder} of all experiments."""
    found = sorted(Path(root).glob("[0-9][0-9][0-9]-*/experiment.toml"))
    return {path.parent.name[:3]: path.parent for path in found}


def load_experiment(number, root=HERE, loaded=None):
    """The Experiment of a number ("007" or "7").

    `loaded` {number: Experiment} holds those read before. Raises Refused.
    """
    number, loaded = str(number).zfill(3), {} if loaded is None else loaded
    if number in loaded:
        return loaded[number]
    known = experiment_folders(root)
    if number not in known:
        names = ", ".join(folder.name for folder in known.values())
        raise Refused(f"no experiment {number}; there are: {names or 'none yet'}")
    path = known[number] / "experiment.toml"
    with reading(path):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    experiment = _filled_dataclass(Experiment, table, path)
    experiment.number, experiment.folder = number, known[number]
    loaded[number] = experiment
    experiment.arms = [_filled_dataclass(Arm, table, f"{path}: an arm") for table in experiment.arms]
    experiment.looks = [_filled_dataclass(Look, table, f"{path}: a look") for table in experiment.looks]
    _refuse_first(_wrong_values(experiment), path)
    for arm in experiment.arms:
        arm.experiment = experiment
        arm.metric = arm.metric or experiment.metric
        arm.margin = arm.margin or experiment.margin
        arm.lower_is_better = experiment.lower_is_better and not arm.higher_is_better
        arm.base = experiment.arm(arm.baseline or experiment.baseline)
        arm.baseline = arm.base.name
    for arm in experiment.arms:
        _link_arm(arm, root, loaded)
        _refuse_first(_wrong_links(arm), path)
    return experiment


def _refuse_first(wrong, path):
    """Raise Refused for the first of the lines that say what is wrong in a file."""
    for line in wrong:
        raise Refused(f"{path}: {line}")


VERDICT_LEVEL = 0.05  # of the one look that is planned where nothing is said


def look_of(experiment, pairs):
    """(pairs of the look that so many pairs are, or are on the way to; its level)."""
    looks = experiment.looks or [Look(len(experiment.seeds), VERDICT_LEVEL)]
    due = looks[-1]
    for look in looks[::-1]:
        if look.pairs >= pairs:
            due = look
    return due.pairs, due.level


def _filled_dataclass(kind, table, where):
    """A dataclass of this kind from a table of TOML, each value checked against the type of its field."""
    _refuse_first(_wrong_keys(kind, table), where)
    return kind(**table)


def _wrong_keys(kind, table):
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            yield f"unknown key '{key}'; the keys are {', '.join(fields)}"
            return
        wanted = fields[key].type
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            yield f"{key} is a {wanted.__name__}, not {value!r}"
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and name not in table:
            yield f"'{name}' is missing"


def _wrong_values(experiment):
    """Lines on values of the right type that make no sense."""
    arms, seeds = experiment.arms, experiment.seeds
    names = {arm.name for arm in arms}
    pairs = [look.pairs for look in experiment.looks]
    sound_seeds = bool(seeds) and all(type(seed) is int and seed >= 0 for seed in seeds)
    for sound, what in [
        (len(names) == len(arms), "two arms have one name"),
        (0 < experiment.margin < math.inf, "margin must be above 0, and finite"),
        (sound_seeds, "seeds are whole numbers, 0 or more"),
        (not sound_seeds or len(set(seeds)) == len(seeds), "a seed is listed twice"),
        (all(map(is_text, experiment.common)), FLAGS_ARE),
        (pairs == sorted(set(pairs)), "looks are in the order of their pairs"),
        (all(0 < look.level <= VERDICT_LEVEL for look in experiment.looks), "a level is above 0, up to 0.05"),
    ]:
        if not sound:
            yield what
    flags = list(experiment.common)
    for arm in arms:
        yield from _wrong_in_arm(arm)
        # an arm that only samples may draw its images from another seed
        flags += [flag for flag in arm.flags if not (arm.of and flag == "--seed")]
    if pairs and len(seeds) > pairs[-1]:
        used = f"its looks are used up at {pairs[-1]} pairs, and it has {len(seeds)} seeds"
        yield f"{used}; looks are planned before the runs: take a new number for more"
    for flag in flags:
        if flag.partition("=")[0] in NOT_AN_ARMS:
            yield f"{flag} is no flag of an arm: {', '.join(NOT_AN_ARMS)} are left to run.py"


FLAGS_ARE = 'flags are strings, as typed: ["--steps", "3000"]'


def is_text(x):
    return isinstance(x, str)


def _wrong_in_arm(arm):
    name = re.fullmatch(r"[A-Za-z0-9][\w.+=-]*", arm.name)
    for sound, what in [
        (name, "names of arms become folders: letters, digits and _.+=- only"),
        (all(map(is_text, arm.flags)), FLAGS_ARE),
        (arm.processes == 1 or not arm.of, "an arm `of` another has no processes"),
        (arm.marked in ("", *MARK_TEXTS), f"marked is one of {', '.join(MARK_TEXTS)}"),
    ]:
        if not sound:
            yield what


# ---- Links between arms ------------------------------------------------------------------------------------


def _link_arm(arm, root, loaded, seen=()):
    """Set arm.trained, arm.source and arm.start from its `of` and `after`.

    Both name an arm of its experiment or, as "001/fp32", of another.
    """
    arm.trained = arm.source = arm.start = arm
    arm.needed = None

    def named(words):
        number, _, name = words.rpartition("/")
        other = (load_experiment(number, root, loaded) if number else arm.experiment).arm(name)
        if other in (arm, *seen):
            raise Refused(f"{arm.experiment.number}/{arm.name} leads back to itself by way of {words}")
        _link_arm(other, root, loaded, (arm, *seen))
        return other

    if arm.of:
        other = named(arm.of)
        arm.trained = other.trained
        arm.source = arm if arm.flags else other.source
    if arm.after:
        other = named(arm.after)
        arm.start = other.trained
    if arm.after or (arm.of and arm.flags):
        arm.needed = other


def _wrong_links(arm):
    if arm.needed and arm.needed.source is not arm.needed.trained:
        why = "which trains nothing itself; name the arm that trains"
        yield f"arm {arm.name} needs the run of {arm.needed.name}, {why}"
    for other in (arm.trained, arm.start):
        for seed in arm.experiment.seeds:
            if seed not in other.experiment.seeds:
                needed = f"{other.name} of experiment {other.experiment.number}, which has no seed {seed}"
                yield f"arm {arm.name} needs {needed}; add it there"
    fills_in = any("{after}" in flag for flag in arm.flags)
    if bool(arm.after) != fills_in or (arm.after and arm.of):
        rule = "an arm with `after` trains (no `of`), and {after} stands in its flags for that run's folder"
        yield f"arm {arm.name}: {rule}"


# ---- Commands ----------------------------------------------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def run_label(arm, seed):
    return f"{arm.experiment.number}-{arm.name}-seed{seed}"


def run_key(arm, seed):
    """What a run and its record are found by."""
    return arm.experiment.number, arm.name, seed


def run_command_words(arm, seed, runs=RUNS):
    """The words after `python` of one run, whose folder is runs/<label>.

    An arm that only samples leaves its files in the folder that it samples from; it draws images from the
    seed that trained it, unless it has a --seed of its own.
    """
    last = ["--threads", "1", "--name", run_label(arm, seed)]
    if arm.of:
        return ["train.py", "--sample", f"{runs}/{run_label(arm.trained, seed)}", *arm.flags, *last]
    start = f"{runs}/{run_label(arm.start, seed)}"
    flags = [flag.replace("{after}", start) for flag in arm.experiment.common + arm.flags]
    words = ["train.py", *flags, "--seed", str(seed), *last, "--runs", runs]
    return words if arm.processes == 1 else [*TORCHRUN, str(arm.processes), *words]


def typed_run(arm, seed, runs=RUNS):
    return shlex.join(["python", *run_command_words(arm, seed, runs)])
