"""EXPERIMENTS.md, which is made whole from experiments/front.md, and experiments/missed.md.

{011/stochastic.held_out} there is a figure of an arm (evidence.py), {all: text: stochastic.median} one of a
recipe over a group of nets (overview.py). {{figure}}, {{table}}, {{index}} and {{missed}} are the figure, the
table of groups, the list of experiments, and how many predictions were missed. [011] becomes a link.
"""

import re

from experiments.log import overview
from experiments.log.analysis import stands_apart
from experiments.log.evidence import Evidence, filled_text
from lowprec.errors import Refused

FRONT_SOURCE = "front.md"
MISSED_PAGE = "missed.md"
SETTINGS_PAGE = "settings.md"
FIGURE = "sizes.png"
EMPTY_FRONT = "# Experiments\n\n{{figure}}\n\n{{table}}\n\n{{index}}\n\n{{missed}}\n"
FRONT_HEAD = "<!-- made by python experiments/report.py from experiments/front.md -->\n"
HEAD_OF_MISSED = (
    "<!-- made by python experiments/report.py from the keys `missed` of experiments -->\n"
    "# Negative results and missed predictions\n"
)
OF_A_GROUP = re.compile(r"\{all: ([^{}]+)\}")


def front_page(experiments, known, settings, root):
    """EXPERIMENTS.md. settings: of overview.py. Raises Refused."""
    path = root / FRONT_SOURCE
    text = path.read_text(encoding="utf-8") if path.exists() else EMPTY_FRONT
    figure = f"![the held-out loss of recipes against fp32, by the size of the net]({root.name}/{FIGURE})"
    parts = {
        "figure": figure if settings else "",
        "table": overview.groups_table(settings),
        "index": index(experiments, known),
        "missed": missed_told(experiments, root.name),
    }
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    try:
        text = OF_A_GROUP.sub(lambda match: overview.figure_of(match[1], settings), text)
        text = filled_text(text, Evidence(experiments, known))
    except Refused as error:
        raise Refused(f"{FRONT_SOURCE}: {error}") from None
    return FRONT_HEAD + linked(text, experiments, root.name)


QUESTIONS = {  # the `about` of an experiment: under which question the index has it
    "noise": "Why does a pure bf16 net draw noise?",
    "images": "Are bf16 weights as good? Images",
    "others": "Text, video, segmentation, classification",
    "settings": "At which rate, eps, decay and length?",
    "finetuning": "In a finetuning?",
    "optimisers": "With other optimisers?",
    "states": "With states in 8 and 4 bits?",
    "products": "With products or weights in fp16, 8 and 4 bits?",
    "sites": "What else must stay in fp32?",
    "chance": "What is chance, and what can be foreseen?",
    "": "More",
}


def index(experiments, known):
    """Under each question a line an experiment: its number and, in words, what was found."""
    lines = []
    for about, question in QUESTIONS.items():
        own = [e for e in experiments if e.about == about and has_begun(e, known)]
        lines += ["", f"**{question}**", ""] if own else []
        lines += [f"- [{e.number}]{apart_mark(e, known)} {e.found or e.title}" for e in own]
    planned = [e.number for e in experiments if not has_begun(e, known)]
    if planned:
        lines += ["", f"Predicted, not run yet: {', '.join(planned)}"]
    return "\n".join(lines).strip()


def apart_mark(experiment, known):
    """'\\*' where git does not show of a comparison that all was fixed before its results."""
    return "\\*" if any(stands_apart(arm, known) for arm in experiment.arms) else ""


def has_begun(experiment, known):
    """Whether an experiment has a record of its own, or a verdict on what is no run of train.py."""
    return bool(experiment.verdict) or any(key[0] == experiment.number for key in known)


def missed_told(experiments, root_name):
    """How many negative results and missed predictions there are, and where they stand."""
    count = sum(len(e.missed) for e in experiments)
    by = sum(bool(e.missed) for e in experiments)
    page = f"{root_name}/{MISSED_PAGE}"
    return f"[{count} in {by} of the experiments]({page})"


def missed_page(experiments):
    """The titles of negative results and missed predictions."""
    lines = [HEAD_OF_MISSED]
    for e in experiments:
        for title in e.missed:
            lines.append(f"- [{e.number}]({e.folder.name}/README.md) {title}")
    return "\n".join(lines) + "\n"


def linked(text, experiments, root_name):
    """A text whose [011] lead to folders: where it stands if it is there once, else by a line at the end."""
    ends = []
    for e in experiments:
        mark, folder = f"[{e.number}]", f"{root_name}/{e.folder.name}"
        if text.count(mark) == 1:
            text = text.replace(mark, f"{mark}({folder})")
        elif mark in text:
            ends.append(f"{mark}: {folder}")
    return "\n".join([text, *ends]) + "\n"
