"""What the records of an experiment say: scores and differences, held-out losses, verdicts, machines.

Everything here takes an Experiment and `known`, {key: record} of all experiments, and returns plain data.
"""

import dataclasses
import itertools
import math
import re
import statistics

from experiments.log import stats
from experiments.log.definition import look_of, run_key
from experiments.log.records import figure_of_record, is_number

WAITING_VERDICT = "waits"  # a verdict between two looks that were planned
LOSS_SCORES = ("loss", "nats_a_byte", "l1")  # those that are a loss on held-out data, beside loss_by_timestep
DIVERGED = re.compile(r"the loss is (nan|-?inf)")

# ---- Scores ------------------------------------------------------------------------------------------------


def weights_of_score(arm):
    """The weights whose scores an arm reads: 'ema' of 'ema.frechet'."""
    return arm.metric.rpartition(".")[0]


def segments(arm):
    return "segment" in arm.trained.experiment.common + arm.trained.flags


def writes_text(arm):
    return "language" in arm.trained.experiment.common + arm.trained.flags


def score(record, metric, lower_is_better):
    """Score of a run: infinitely bad if it diverged, None if it failed for a reason that measures nothing."""
    if "failed" not in record:
        return figure_of_record(record, metric)
    if not DIVERGED.search(record["failed"]):
        return None  # killed, out of memory
    return math.inf if lower_is_better else -math.inf


def records_of(arm, known):
    """{seed: record} of the runs that an arm's scores are read from, in the order of the seeds."""
    found = {}
    for seed in arm.experiment.seeds:
        record = known.get(run_key(arm.source, seed))
        if record is not None:
            found[seed] = record
    return found


def scores_by_seed(arm, known):
    """{seed: score} of an arm, in the order of the seeds."""
    found = {}
    for seed, record in records_of(arm, known).items():
        figure = score(record, arm.metric, arm.lower_is_better)
        if figure is not None:
            found[seed] = figure
    return found


def finite_scores(arm, known):
    return [v for v in scores_by_seed(arm, known).values() if math.isfinite(v)]


def comparison(arm, known):
    """(pairs, stats.Equivalence, or None with fewer than two) of an arm against its baseline."""
    own = scores_by_seed(arm, known)
    base = scores_by_seed(arm.base, known)
    paired = list(differences(own, base).values())
    if len(paired) < 2:
        return len(paired), None
    due, level = look_of(arm.experiment, len(paired))
    result = stats.equivalence(paired, arm.margin, level, lower_is_better=arm.lower_is_better)
    if arm.experiment.looks and len(paired) != due:
        result = dataclasses.replace(result, verdict=WAITING_VERDICT)
    return len(paired), result


def differences(own, base):
    """{seed: own minus base} of {seed: score}, of the seeds that both have."""
    return {seed: own[seed] - base[seed] for seed in own if seed in base}


def verdict(pairs, result):
    if result:
        return result.verdict
    return "no pairs yet" if pairs == 0 else "undecided"


# ---- Held-out loss -----------------------------------------------------------------------------------------


HELD_OUT = "held-out loss"


def held_out_loss(record, weights):
    """(what it is, figure) of the loss of a finished run on held-out data; of its training without one.

    `weights` are those whose scores are read, "" for a figure of the training.
    """
    own = record.get("scores", {}).get(weights, {})
    bins = own.get("loss_by_timestep")
    if bins and all(is_number(loss) for loss in bins):
        return HELD_OUT, statistics.fmean(bins)
    for name in LOSS_SCORES:
        if is_number(own.get(name)):
            return HELD_OUT, own[name]
    return "training loss", record["final_loss"]


def is_loss(metric):
    """Whether a score is itself the loss on held-out data: one quantity has one verdict."""
    return metric.rpartition(".")[2] in (*LOSS_SCORES, "loss_by_timestep")


def shown_margin(arm, result):
    """The margin that a row shows: the planned one, if its reason was written down, else the one that was
    reached. A reason speaks of the experiment's own score, or of losses where that is one.
    """
    own, first = arm.metric, arm.experiment.metric
    same_score = own.rpartition(".")[2] == first.rpartition(".")[2] or (is_loss(own) and is_loss(first))
    return arm.margin if arm.experiment.margin_reason and same_score else result.achieved


def task_of_arm(arm):
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


def loss_comparison(arm, known, weights=None):
    """(what it is, pairs, stats.Equivalence or None) of an arm's loss against its baseline's, in percent.

    As loss_changes; None where a run diverged, or where the two train on different tasks.
    """
    kind, found = loss_changes(arm, known, weights)
    changes = list(found.values())
    if len(changes) < 2 or not all(map(math.isfinite, changes)):
        return kind, len(changes), None
    _, level = look_of(arm.experiment, len(changes))
    return kind, len(changes), stats.equivalence(changes, arm.experiment.loss_margin or 1.0, level)


def loss_changes(arm, known, weights=None):
    """(what it is, {seed: change in percent}) of an arm's loss against its baseline's, paired as scores are.

    weights: those whose loss is read; those of each arm's own score where none are named. A change that can't
    be told is NaN: of runs that diverged, and of two tasks, which have two losses.
    """
    base_arm = arm.base
    own_records = records_of(arm, known)
    base_records = records_of(base_arm, known)
    own_losses = losses(finished(own_records), weights or weights_of_score(arm))
    base_losses = losses(finished(base_records), weights or weights_of_score(base_arm))
    kind, own, base = of_one_kind(own_losses, base_losses)
    # the runs that did not diverge would speak for those that did
    untold = any(map(diverged, [*own_records.values(), *base_records.values()]))
    untold = untold or task_of_arm(arm) != task_of_arm(base_arm)
    changes = {}
    for seed, loss in own.items():
        if base.get(seed, 0) > 0:
            changes[seed] = math.nan if untold else 100 * (loss / base[seed] - 1)
    return kind, changes


def losses(records, weights):
    """{seed: (held-out loss or None, training loss)} of finished runs."""
    found = {}
    for seed, record in records.items():
        kind, loss = held_out_loss(record, weights)
        found[seed] = loss if kind == HELD_OUT else None, record["final_loss"]
    return found


def of_one_kind(own, base):
    """(what it is, {seed: loss} of an arm, the same of its baseline): a loss that all these runs have."""
    held = [held for held, _ in [*own.values(), *base.values()]]
    kind, place = (HELD_OUT, 0) if held and None not in held else ("training loss", 1)
    return kind, *({seed: both[place] for seed, both in table.items()} for table in (own, base))


SLIGHTLY_WORSE = "slightly worse"


def verdict_by_rule(arm, known):
    """The verdict of an arm, by the score and by the loss.

    An arm whose score is equal to the baseline's, or not shown to differ, is "slightly worse" where its loss
    is shown to be higher, and where its score is worse by less than the margin; at the level of its look.
    """
    pairs, result = comparison(arm, known)
    said = verdict(pairs, result)
    if said not in ("equal", "undecided"):
        return said
    if is_on_the_worse_side(loss_comparison(arm, known)[2]):
        return SLIGHTLY_WORSE
    if said == "equal" and is_on_the_worse_side(result, arm.lower_is_better):
        return SLIGHTLY_WORSE
    return said


def is_on_the_worse_side(result, lower_is_better=True):
    """Whether an Equivalence, which may be None, is shown to lie on the side that is worse."""
    return result is not None and result.differs and (result.mean > 0) == lower_is_better


# ---- The harm of rounding to nearest -----------------------------------------------------------------------


def nearest_of(arm):
    """The arm that rounds to nearest beside this one: its flags are those of the baseline and --pure_bf16."""
    base = arm.base
    wanted = sorted([*training_flags(base.trained), "--pure_bf16"])
    for other in arm.experiment.arms:
        if other is arm or other.source.of or other.baseline != base.name:
            continue
        same_score = other.metric.rpartition(".")[2] == arm.metric.rpartition(".")[2]
        same_weights = weights_of_score(other) == weights_of_score(base)
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


def of_nearest(arm, known):
    """(share of nearest's harm to the score, to the loss) of an arm; None where nearest does none."""
    nearest = nearest_of(arm)
    if nearest is None:
        return None, None
    _, own = comparison(arm, known)
    _, harm = comparison(nearest, known)
    own_loss = loss_comparison(arm, known)[2]
    harm_of_loss = loss_comparison(nearest, known)[2]
    share = share_of_harm(own, harm, nearest.lower_is_better)
    return share, share_of_harm(own_loss, harm_of_loss)


def share_of_harm(own, harm, lower_is_better=True):
    """Of two Equivalences the ratio of means, where the second lies on the worse side."""
    if own is None or not is_on_the_worse_side(harm, lower_is_better) or not math.isfinite(own.mean):
        return None
    return own.mean / harm.mean


# ---- What stands apart -------------------------------------------------------------------------------------


def from_changed_code(arm, known):
    """How many of the runs behind a comparison were recorded with changes that are in no commit."""
    base = arm.base
    records = [*records_of(arm, known).values(), *records_of(base, known).values()]
    return sum(record.get("clean") is False for record in records)


def stands_apart(arm, known):
    """Whether git doesn't show for a comparison that prediction, baseline and code were there before the
    results.
    """
    return bool(arm.marked or arm.baseline_was or from_changed_code(arm, known))


# ---- Machines ----------------------------------------------------------------------------------------------


def machine_of(record):
    """The kind of machine: a GPU's name, or a CPU's and how it multiplies bf16: 'AMD EPYC, avx512_bf16'.

    The clock that some hosts add to a name ("@ 2.10GHz") is no part of it. Two CPUs of one name may differ in
    their instructions, and then sum bf16 products in another order.
    """
    facts = record.get("env", {})
    name = facts.get("gpu") or (facts.get("cpu") or "").partition(" @ ")[0] or "unknown machine"
    if facts.get("gpu") or "bf16" not in facts:
        return name
    return f"{name}, {facts['bf16'][0] if facts['bf16'] else 'no bf16'}"


def pairs_across_machines(arm, known):
    """How many pairs of an arm with its baseline were recorded on two kinds of machine."""
    own = records_of(arm, known)
    base = records_of(arm.base, known)
    return sum(machine_of(own[seed]) != machine_of(base[seed]) for seed in own if seed in base)


# ---- Runs --------------------------------------------------------------------------------------------------


def records_needed(experiment, known):
    """{key: record} of all runs that an experiment's scores come from, other experiments' included."""
    wanted = set()
    for arm in experiment.arms:
        for read in (arm.source, arm.trained):
            wanted.add(run_key(read, 0)[:2])
    return {k: r for k, r in known.items() if k[:2] in wanted and k[2] in experiment.seeds}


def levels(experiment, known):
    """{"real images": score, "noise": score}, where the task has them; of videos those of masks.

    They depend on the number of samples, so they are those of the baseline's own records, not of the training
    that it samples from.
    """
    reference = reference_of_records(experiment, known)
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


def reference_of_records(experiment, known):
    """What real images and noise score, of the first record that says so, the baseline's first, or {}."""
    for arm in [experiment.arm(experiment.baseline), *experiment.arms]:
        for record in records_of(arm, known).values():
            if record.get("reference"):
                return record["reference"]
    return {}
