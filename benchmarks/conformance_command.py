"""bench.py conformance: what optimisers and averages that claim low precision keep to, as figures.

    python bench.py conformance                                      ours, and what requirements*.txt install
    python bench.py conformance ours:stochastic torchao              some of them, by name
    python bench.py conformance all "my_package:AdamW(fused=True)"   these and any class, options as in Python
    python bench.py conformance my_file.py:EMA                       a class of a file; an average

A class is an optimiser if it derives from torch.optim.Optimizer. It must take parameters and `lr`, which the
checks set, as they do betas, weight_decay and seed where it has them; betas may be given. Anything else that
can be built over parameters, named parameters or a model, and updated, is an average. The checks are in
conformance.py, each with what it asks and why. They run the steps as written, without torch.compile, save the
one that compares both.

Exit status 0 when all holds, 1 with findings, 2 for bad input. A minute for ours, some minutes for all.
"""

import copy
import functools
import shutil
import sys

import torch
from tqdm import tqdm

from benchmarks import conformance, conformance_shards
from benchmarks.averages import path, progress
from benchmarks.common import tensors_in
from benchmarks.conformance import Result, differing, judged, nothing, unequal
from benchmarks.subjects import BF16, DECAY, NAMES, OURS, PEERS, drawn
from lowprec.errors import first_line
from lowprec.watch import adapters

# ---- What is asked -----------------------------------------------------------------------------------------

def _writes(text, fraction):
    return f"write of {text} ulp", functools.partial(conformance.writes, fraction=fraction)


CHECKS = dict(
    [
        _writes("1/10", 1 / 10),
        _writes("1/3", 1 / 3),
        _writes("1/2", 1 / 2),
        ("decay alone", conformance.decay),
        ("v after a drop", conformance.dropped),
        ("noise of tensors", conformance.between_tensors),
        ("noise of steps", conformance.between_steps),
        ("noise of seeds", conformance.between_seeds),
        ("noise of ranks", conformance_shards.between_ranks),
        ("noise after resume", conformance.after_a_resume),
        ("exact resume", conformance.resume),
        ("split in two", conformance_shards.split),
        ("sharded", conformance_shards.sharded),
        ("compiled", conformance.compiled),
        ("NaN", conformance.nan),
        ("infinity", conformance.infinity),
        ("extremes", conformance.extremes),
        ("sizes", conformance.sizes),
        ("state B/param", conformance.memory),
    ]
)


# ---- Averages ----------------------------------------------------------------------------------------------

def way(subject, size):
    """Does the average arrive? Weights of spread 0.02 go their way; see benchmarks/averages.py.

    In bf16 to nearest an entry stands still once the weight is less than 2^-9 / (1 - decay) of its value
    away. The figures are the share of the way covered, 1 is right, and the distance over the weights' spread,
    both from an fp64 average with the decay that this one says it has.
    """
    with drawn(16):
        weights = path(*size.path)
        start = next(weights)
        model, average = subject.start(start)
        answers, exact = adapters.Average.of(average, model), start.double()
        for weight in weights:
            subject.follow(model, average, weight)
            decay = DECAY if answers.decay is None else answers.decay
            exact = exact + (1 - decay) * (weight.double() - exact)
    share, distance = progress(start, answers.shadow["weight"].detach().cpu(), exact)
    said = f"the average does not arrive: it covers {share:.0%} of its way"
    return judged(0.95 < share < 1.05, f"{share:.3f}, {distance:.1%}", said, share=share, distance=distance)


def average_resume(subject, size):
    """Does the average go on with the same bits? Ten steps, state_dict, a new object, ten more."""
    weights = list(path(20, 500))
    model, average = subject.start(weights[0])
    if not hasattr(average, "state_dict"):
        return nothing("no state_dict")
    with drawn(17):
        for weight in weights[1:11]:
            subject.follow(model, average, weight)
        # over the weights as they are at a resume, not over the initial ones
        model_again, again = subject.start(model.weight.detach())
        again.load_state_dict(copy.deepcopy(average.state_dict()))
        generator, ends = torch.get_rng_state(), []
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
    found = sum(t.nbytes for _, t in tensors_in(shadow.detach())) / 4096
    return Result("holds", f"{found:.2f}", figures=dict(bytes=found))


AVERAGE_CHECKS = {"way, distance": way, "exact resume": average_resume, "state B/param": average_memory}
ASKED = {"optimizer": CHECKS, "average": AVERAGE_CHECKS}


# ---- The command -------------------------------------------------------------------------------------------

def add_arguments(sub):
    help = f"{', '.join(NAMES)}; all (default): all of these that are installed; or a class as module:Class, "
    help += "file.py:Class, 'module:Class(option=value)'"
    sub.add_argument("names", nargs="*", default=[], metavar="module:Class", help=help)


def conforming(args, clock):
    """Rows (dicts), one for each subject and check; args.subjects is what `chosen` gave."""
    rows = []
    total = sum(len(ASKED[subject.kind]) for subject in args.subjects)
    with tqdm(total=total, disable=None, leave=False) as bar, torch.compiler.set_stance("force_eager"):
        for one in args.subjects:
            for check, ask in ASKED[one.kind].items():
                bar.set_postfix_str(f"{one.name}: {check}")
                result = asked(ask, one)
                row = dict(name=one.name, kind=one.kind, package=one.package, version=one.version)
                rows.append({**row, "check": check, **vars(result)})
                bar.update()
            found = [row for row in rows if row["name"] == one.name and row["verdict"] == "finding"]
            tqdm.write(f"{one.name}: {', '.join(row['check'] for row in found) or 'holds'}", file=sys.stdout)
    for kind in ASKED:
        print_tables([row for row in rows if row["kind"] == kind], list(ASKED[kind]))
    print_findings(rows)
    return rows


def asked(ask, subject):
    """The Result of a check; that it failed is one too."""
    try:
        return ask(subject, size=conformance.SIZE)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return Result("finding", "fails", f"fails: {why}", {"error": why})


MARK = {"holds": "", "finding": " !", "not claimed": " (not claimed)", "none": ""}


def print_tables(rows, checks):
    """Checks down, as many subjects across as the terminal takes."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["name"], row["check"]): row["shown"] + MARK[row["verdict"]] for row in rows}
    room, first = shutil.get_terminal_size((110, 24)).columns, max(map(len, checks)) + 2
    while names:
        widths = {n: max(len(n), *(len(cells[n, check]) for check in checks)) + 2 for n in names}
        line, used = [], first
        while names and (not line or used + widths[names[0]] <= room):
            used += widths[names[0]]
            line.append(names.pop(0))
        print("\n" + " " * first + "".join(f"{n:>{widths[n]}}" for n in line))
        for check in checks:
            print(f"{check:<{first}}" + "".join(f"{cells[n, check]:>{widths[n]}}" for n in line))


def print_findings(rows):
    found = [row for row in rows if row["verdict"] == "finding"]
    print("\nwrites: mean of (written - wanted) a step in ulps, away from zero, of the worst signs.")
    print("noise: largest correlation. decay, v, way: 1 is right. !: a finding.\n")
    for row in found:
        print(f"{row['name']}: {row['said']}")
    for row in rows:
        if row["said"] and row["verdict"] != "finding":
            print(f"{row['name']}: {row['said']} (no finding)")
    asked = len(dict.fromkeys(row["name"] for row in rows))
    in_whom = f"{len(found)} findings in {len({row['name'] for row in found})} of {asked}"
    print(in_whom if found else "all holds")


def status(rows):
    """0 when all holds, 1 with findings."""
    return int(any(row["verdict"] == "finding" for row in rows))


# ---- The page ----------------------------------------------------------------------------------------------

CODES = [name for name in PEERS if name.endswith("bit") or name == "bitsandbytes"]
# the tables of docs/conformance.md, and whose columns they have
TABLES = {
    "ours, AdamW": [f"ours:{name}" for name, flags in OURS.items() if "optimizer" not in flags],
    "ours, others": [f"ours:{name}" for name, flags in OURS.items() if "optimizer" in flags],
    "theirs": [name for name in PEERS if name not in CODES and not name.endswith("ema")],
    "theirs, codes": CODES,
    "averages": [name for name in NAMES if "ema" in name],
}


def table(rows, names):
    """Markdown: checks down, the subjects of `names` that were asked across, findings bold."""
    cells = {(row["name"], row["check"]): row for row in rows}
    names = [name for name in names if any(name == asked for asked, _ in cells)]
    kind = next(row["kind"] for row in rows if row["name"] in names)
    lines = [f"| check | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for check in ASKED[kind]:
        found = [cells[name, check] for name in names]
        shown = [f"**{row['shown']}**" if row["verdict"] == "finding" else row["shown"] for row in found]
        lines.append(f"| {check} | {' | '.join(shown)} |")
    return "\n".join(lines)
