"""bench.py conformance: what optimisers and averages that claim low precision keep to, as figures.

    python bench.py conformance                                      ours, and what requirements*.txt install
    python bench.py conformance ours:stochastic torchao              some of them, by name
    python bench.py conformance all "my_package:AdamW(fused=True)"   these and any class, options as in Python
    python bench.py conformance my_file.py:EMA                       a class of a file; an average

A class is an optimiser if it derives from torch.optim.Optimizer and takes parameters and `lr`. Another class
with a method update, update_parameters or step is an average. The checks set lr, betas, weight_decay and
seed. They run the steps as written, without torch.compile, save the one that compares both. Exit status 0
when all holds, 1 with findings, 2 for bad input. A minute for ours, some minutes for all.
"""

import copy
import functools
import sys
from functools import partial

import torch
from tqdm import tqdm

from benchmarks import (
    conformance,
    conformance_noise,
    conformance_shards,
    conformance_steps,
    conformance_writes,
    subjects,
)
from benchmarks.allocated import tensors_in
from benchmarks.averages import progress, weight_path
from benchmarks.common import Command, Flag, progress_bar, rows_by
from benchmarks.conformance import Result, differing, judged, nothing, unequal
from benchmarks.records import of_record
from benchmarks.subjects import (
    AVERAGE_DECAY,
    BF16,
    OUR_OPTIMIZERS,
    PEER_CLASSES,
    SUBJECT_NAMES,
    drawn,
    in_words,
)
from harness.printing import markdown_table
from lowprec.advice.text import layout
from lowprec.watch import adapters

# ---- What is asked -----------------------------------------------------------------------------------------


def writes_of(fraction):
    return functools.partial(conformance_writes.writes, fraction=fraction)


CHECKS = {
    "write of 1/10 ulp": writes_of(1 / 10),
    "write of 1/3 ulp": writes_of(1 / 3),
    "write of 1/2 ulp": writes_of(1 / 2),
    "decay alone": conformance_writes.decay,
    "v after a drop": conformance_writes.dropped,
    "noise of tensors": conformance_noise.between_tensors,
    "noise of steps": conformance_noise.between_steps,
    "noise of seeds": conformance_noise.between_seeds,
    "noise of ranks": conformance_shards.between_ranks,
    "noise after resume": conformance_noise.after_a_resume,
    "exact resume": conformance_steps.resume,
    "split in two": conformance_shards.split,
    "sharded": conformance_shards.sharded,
    "compiled": conformance_writes.compiled,
    "NaN": conformance_steps.nan,
    "infinity": conformance_steps.infinity,
    "extremes": conformance_steps.extremes,
    "sizes": conformance_steps.sizes_and_layouts,
    "state B/param": conformance_steps.state_memory,
}


# ---- Averages ----------------------------------------------------------------------------------------------


def average_arrives(subject, size):
    """Does the average arrive? Weights of spread 0.02 go their way; see benchmarks/averages.py.

    In bf16 to nearest an entry stands still once the weight is less than 2^-9 / (1 - decay) of its value
    away. The figures are the share of the way covered, 1 is right, and the distance over the weights' spread,
    both from an fp64 average with the decay that this one says it has.
    """
    with drawn(16):
        weights = weight_path(*size.path)
        start = next(weights)
        model, average = subject.start(start)
        answers = adapters.Average.of(average, model)
        exact = start.double()
        for weight in weights:
            subject.follow(model, average, weight)
            decay = AVERAGE_DECAY if answers.decay is None else answers.decay
            exact = exact + (1 - decay) * (weight.double() - exact)
    share, distance = progress(start, answers.shadow["weight"].detach().cpu(), exact)
    said = f"the average does not arrive: it covers {share:.0%} of its way"
    return judged(0.95 < share < 1.05, f"{share:.3f}, {distance:.1%}", said, share=share, distance=distance)


def average_resume(subject, size):
    """Does the average go on with the same bits? Ten steps, state_dict, a new object, ten more."""
    weights = list(weight_path(20, 500))
    model, average = subject.start(weights[0])
    if not hasattr(average, "state_dict"):
        return nothing("no state_dict")
    with drawn(17):
        for weight in weights[1:11]:
            subject.follow(model, average, weight)
        # over the weights as they are at a resume, not over the initial ones
        model_again, again = subject.start(model.weight.detach())
        again.load_state_dict(copy.deepcopy(average.state_dict()))
        generator = torch.get_rng_state()
        ends = []
        for net, one in ((model, average), (model_again, again)):
            torch.set_rng_state(generator)
            for weight in weights[11:]:
                subject.follow(net, one, weight)
            ends.append([adapters.Average.of(one, net).shadow["weight"].detach()])
    share = unequal(*ends)
    said = f"a resumed average differs in {share:.1%} of its values"
    return judged(not share, differing(share), said, differ=share)


def average_memory(subject, size):
    """Bytes of the average a parameter."""
    model, average = subject.start(torch.ones(4096, dtype=BF16))
    shadow = adapters.Average.of(average, model).shadow["weight"]
    found = sum(t.nbytes for t in tensors_in(shadow.detach())) / 4096
    return Result("holds", f"{found:.2f}", figures=dict(bytes=found))


AVERAGE_CHECKS = {
    "way, distance": average_arrives,
    "exact resume": average_resume,
    "state B/param": average_memory,
}
CHECKS_OF_KIND = {"optimizer": CHECKS, "average": AVERAGE_CHECKS}


# ---- The command -------------------------------------------------------------------------------------------


def check(args):
    """Imports and steps each subject once. Raises Refused."""
    args.subjects = subjects.chosen_subjects(args.names, args.device)


def conforming(args, clock):
    """Rows (dicts), one for each subject and check; args.subjects is what `check` set."""
    rows = []
    total = sum(len(CHECKS_OF_KIND[subject.kind]) for subject in args.subjects)
    with progress_bar(total) as bar, torch.compiler.set_stance("force_eager"):
        for subject in args.subjects:
            found = rows_of_subject(subject, bar)
            rows += found
            findings = [row["check"] for row in found if row["verdict"] == "finding"]
            tqdm.write(f"{subject.name}: {', '.join(findings) or 'holds'}", file=sys.stdout)
    by_kind = rows_by(rows, "kind")
    for kind, checks in CHECKS_OF_KIND.items():
        print_tables(by_kind.get(kind, []), list(checks))
    print_findings(rows)
    return rows


def rows_of_subject(subject, bar):
    whose = dict(name=subject.name, kind=subject.kind, package=subject.package, version=subject.version)
    rows = []
    for check, ask in CHECKS_OF_KIND[subject.kind].items():
        bar.set_postfix_str(f"{subject.name}: {check}")
        result = answer_of(ask, subject)
        rows.append({**whose, "check": check, **vars(result)})
        bar.update()
    return rows


def answer_of(ask, subject):
    """The Result of a check; that it failed is one too."""
    try:
        return ask(subject, size=conformance.SIZE)
    except Exception as error:
        why = in_words(error)
        return Result("finding", "fails", f"fails: {why}", {"error": why})


VERDICT_MARKS = {"holds": "", "finding": " !", "not claimed": " (not claimed)", "none": ""}


ACROSS = 5  # subjects in a table: they fit a terminal of 110 characters


def print_tables(rows, checks):
    """Checks down, ACROSS subjects across."""
    cells = {(row["name"], row["check"]): row["shown"] + VERDICT_MARKS[row["verdict"]] for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    for start in range(0, len(names), ACROSS):
        some = names[start : start + ACROSS]
        lines = [[check, *(cells[name, check] for name in some)] for check in checks]
        print("\n" + layout([["", *some], *lines]))


def print_findings(rows):
    findings = [row for row in rows if row["verdict"] == "finding"]
    print("\nwrites: mean of (written - wanted) a step in ulps, away from zero, of the worst signs.")
    print("noise: largest correlation. decay, v, way: 1 is right. !: a finding.\n")
    for row in findings:
        print(f"{row['name']}: {row['said']}")
    for row in rows:
        if row["said"] and row["verdict"] != "finding":
            print(f"{row['name']}: {row['said']} (no finding)")
    if findings:
        print(f"{len(findings)} findings in {len(rows_by(findings, 'name'))} of {len(rows_by(rows, 'name'))}")
    else:
        print("all holds")


# ---- The page ----------------------------------------------------------------------------------------------


def table_with(name):
    """Which table of docs/evidence-tables.md has a subject's column."""
    if "ema" in name:
        return "averages"
    if name in PEER_CLASSES:
        return "theirs, codes" if name.endswith("bit") or name == "bitsandbytes" else "theirs"
    flags = OUR_OPTIMIZERS[name.removeprefix("ours:")]
    return "ours, others" if "optimizer" in flags else "ours, AdamW"


SUBJECTS_OF_TABLES = {}  # a table of docs/evidence-tables.md: whose columns it has
for name in SUBJECT_NAMES:
    SUBJECTS_OF_TABLES.setdefault(table_with(name), []).append(name)


def table(rows, names):
    """Markdown: checks down, the subjects of `names` that were asked across, findings bold."""
    shown = {}
    kinds = {}
    for row in rows:
        text = row["shown"]
        shown[row["name"], row["check"]] = f"**{text}**" if row["verdict"] == "finding" else text
        kinds[row["name"]] = row["kind"]
    names = [name for name in names if name in kinds]
    lines = []
    for check in CHECKS_OF_KIND[kinds[names[0]]]:
        lines.append([check, *(shown[name, check] for name in names)])
    return markdown_table([["check", *names], *lines])


TABLES_OF_PAGE = {}
for name, columns in SUBJECTS_OF_TABLES.items():
    TABLES_OF_PAGE[name] = of_record(partial(table, names=columns), "cpu-conformance")
TABLES = {"docs/evidence-tables.md": TABLES_OF_PAGE}

NAMES_HELP = (
    f"{', '.join(SUBJECT_NAMES)}; all (default): all of these that are installed; or a class as "
    "module:Class, file.py:Class, 'module:Class(option=value)'"
)
COMMAND = Command(
    "conformance",
    "what optimisers and averages of low precision keep to",
    conforming,
    flags=(Flag("names", [], NAMES_HELP, type=str, metavar="module:Class"),),
    check=check,
    status=lambda rows: int(any(row["verdict"] == "finding" for row in rows)),
)
