"""EXPERIMENTS.md, which is made whole from experiments/front.md, and experiments/missed.md.

{011/stochastic.held_out} there is a figure of an arm (evidence.py), {all: stochastic.median} one of a recipe
over all nets (overview.py). {{effects}}, {{table}}, {{index}}, {{missed}} and {{links}} are the figure, the
table of nets and recipes, the list of experiments, how many predictions were missed, and where [011] leads.
"""

import re

from experiments.log import overview
from experiments.log.analysis import comparison, stands_apart, verdict_by_rule
from experiments.log.evidence import Evidence, filled_text
from experiments.log.tables import compact_table
from lowprec.errors import Refused

FRONT_SOURCE = "front.md"
MISSED_PAGE = "missed.md"
EMPTY_FRONT = "# Experiments\n\n{{effects}}\n\n{{table}}\n\n{{index}}\n\n{{missed}}\n\n{{links}}\n"
FRONT_HEAD = "<!-- made by python experiments/report.py from experiments/front.md -->\n"
HEAD_OF_MISSED = (
    "<!-- made by python experiments/report.py from the keys `missed` of experiments -->\n"
    "# Negative results and missed predictions\n"
)
ALL_NETS = re.compile(r"\{all: ([^{}]+)\}")


def front_page(experiments, known, root):
    """EXPERIMENTS.md. Raises Refused."""
    path = root / FRONT_SOURCE
    text = path.read_text(encoding="utf-8") if path.exists() else EMPTY_FRONT
    rows = overview.overview_rows(experiments, known)
    figure = f"![the held-out loss of each recipe on each net]({root.name}/effects.png)"
    parts = {
        "effects": figure if rows else "",
        "table": overview.overview_table(experiments, known),
        "index": index(experiments, known),
        "missed": missed_told(experiments, root.name),
        "links": links_told(experiments, known, root.name),
    }
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    try:
        text = ALL_NETS.sub(lambda match: overview.figure_of(match[1], rows), text)
        text = filled_text(text, Evidence(experiments, known))
    except Refused as error:
        raise Refused(f"{FRONT_SOURCE}: {error}") from None
    return FRONT_HEAD + text


VERDICT_WORDS = {  # in the order of the index: what it calls them
    "equal": "equal",
    "slightly worse": "slightly worse",
    "better": "better",
    "worse": "worse",
    "undecided": "open",
    "waits": "waiting",
}


def index(experiments, known):
    """A line an experiment: its number, its title, and how many of its comparisons ended how."""
    lines = [["", "experiment", "comparisons"]]
    planned = [e.number for e in experiments if not has_begun(e, known)]
    for e in experiments:
        if e.number in planned:
            continue
        told = counted(tally(e, known))
        if apart := counted(tally(e, known, apart=True)):
            told += f"; apart: {apart}" if told else f"apart: {apart}"
        lines.append([f"[{e.number}]", e.title.replace("|", "\\|"), told or "none yet"])
    if planned:
        lines.append(["", f"Predicted, not run yet: {spans(planned)}", ""])
    return compact_table(lines)


def spans(numbers):
    """'052 to 054, 061' of the ascending numbers of experiments."""
    found = []
    for number in numbers:
        if found and int(number) == int(found[-1][-1]) + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in found)


def has_begun(experiment, known):
    """Whether an experiment has a record of its own."""
    return any(key[0] == experiment.number for key in known)


def counted(counts):
    """'3 equal, 1 worse'"""
    return ", ".join(f"{counts[name]} {word}" for name, word in VERDICT_WORDS.items() if name in counts)


def tally(experiment, known, apart=False):
    """{verdict: how many arms} of an experiment; of those that stand apart, or of the others."""
    counts = {}
    for arm in experiment.arms:
        _, result = comparison(experiment, arm, known)
        if arm.name == arm.baseline or not result or stands_apart(experiment, arm, known) != apart:
            continue
        said = verdict_by_rule(experiment, arm, known)
        counts[said] = counts.get(said, 0) + 1
    return counts


def missed_told(experiments, root_name):
    """How many negative results and missed predictions there are, and where they stand."""
    count = sum(len(e.missed) for e in experiments)
    by = sum(bool(e.missed) for e in experiments)
    page = f"{root_name}/{MISSED_PAGE}"
    return f"[{count} in {by} of the experiments]({page}), a line each."


def missed_page(experiments):
    """The titles of negative results and missed predictions."""
    lines = [HEAD_OF_MISSED]
    for e in experiments:
        for title in e.missed:
            lines.append(f"- [{e.number}]({e.folder.name}/README.md) {title}")
    return "\n".join(lines) + "\n"


def links_told(experiments, known, root_name):
    """Where the numbers of experiments that have begun lead: a folder shows its README.md."""
    lines = []
    for e in experiments:
        if has_begun(e, known):
            lines.append(f"[{e.number}]: {root_name}/{e.folder.name}")
    return "\n".join(lines)
