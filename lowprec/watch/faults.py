"""Kinds of faults as rows: what is measured, from which figure on it is a finding, and what is said of it."""

import dataclasses
import math
import re
from collections.abc import Callable

from .verdicts import SITES_BY_COST, Finding

# of averages, in a loop and in checkpoints
CHECK_ITS_SIGN = "check the sign of its update: average += (1 - decay) * (weight - average)"


@dataclasses.dataclass
class Figure:
    """What a measure found. value: held against the limit of a Fault. words: what fills its text. tensor: its
    name, "" for all of them. whole: held against the limit of a severe finding, where that is not the value.
    """

    value: float
    words: dict = dataclasses.field(default_factory=dict)
    tensor: str | None = None
    whole: float | None = None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault.

    site: what loses something. In `site` and `text` a part in brackets is left out where a word of it was not
    measured.
    limit: a figure above it is a finding; None: all that is measured is one.
    measure: what is examined -> a Figure, or None where there is nothing to judge. The first line of its
    docstring says what the figure is.
    text, remedy: what is said, filled from the words of the figure.
    severity: see verdicts.Finding. severe: a figure above it is severe all the same.
    rank: what findings of a site and severity are sorted by, the largest first; None: their figure.
    whole: what the verdict says of the whole net, in place of the text.
    """

    site: str
    measure: Callable
    text: str
    remedy: str
    limit: float | None = None
    severity: str = "moderate"
    severe: float = math.inf
    rank: float | None = None
    whole: str = ""

    def finding(self, figure, tensor=""):
        """The Finding that a Figure is; None within the limit."""
        if self.limit is not None and not figure.value > self.limit:
            return None
        held = figure.value if figure.whole is None else figure.whole
        site = filled_text(self.site, figure.words)
        share = SITES_BY_COST.index(site if site in SITES_BY_COST else "")
        return Finding(
            site=site,
            severity="severe" if held > self.severe else self.severity,
            text=filled_text(self.text, figure.words),
            remedy=self.remedy.format(**figure.words),
            tensor=tensor if figure.tensor is None else figure.tensor,
            figure=figure.value if self.rank is None else self.rank,
            cause=self.text,
            # what is no share, and no small matter, stands before all that is
            place=-1 if self.rank is not None and self.rank >= 1 else share,
            whole=filled_text(self.whole, figure.words),
        )


def families(*entries):
    """[[Fault]]: lists of rows as they are, and a row alone as a list of one."""
    return [entry if isinstance(entry, list) else [entry] for entry in entries]


OPTIONAL_PART = re.compile(r"\[([^\]]*)\]")


def filled_text(template, words):
    """A text with its words; parts in brackets that lack one are left out."""

    def part(match):
        needed = re.findall(r"\{(\w+)", match[1])
        return match[1] if set(needed) <= set(words) else ""

    return OPTIONAL_PART.sub(part, template).format(**words)


def first_finding(rows, examined, tensor):
    """[what the first row that finds something says], or []. tensor: the name of what is examined."""
    for fault in rows:
        figure = fault.measure(examined)
        finding = None if figure is None else fault.finding(figure, tensor)
        if finding is not None:
            return [finding]
    return []


def findings_by_tensor(rows, examined):
    """[Finding] of rows whose measures give any number of Figures: the first row speaks of a tensor."""
    found, named = [], set()
    for fault in rows:
        figures = [figure for figure in fault.measure(examined) if figure.tensor not in named]
        new = [fault.finding(figure) for figure in figures]
        new = [finding for finding in new if finding is not None]
        named |= {finding.tensor for finding in new}
        found += new
    return found


# ---- The table ---------------------------------------------------------------------------------------------


def faults_table(lists):
    """Rows as Markdown. lists: [[Fault]]."""
    lines = ["| site | severity | finding where | is above | says | remedy |", "|---|---|---|---|---|---|"]
    for rows in lists:
        for fault in rows:
            cells = _cells_of_row(fault)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _cells_of_row(fault):
    severity = fault.severity
    if fault.severe < math.inf:
        severity += f", severe above {fault.severe:g}"
    measured = " ".join(fault.measure.__doc__.split())
    limit = "" if fault.limit is None else f"{fault.limit:g}"
    site = OPTIONAL_PART.sub(r"(\1)", fault.site)
    text = OPTIONAL_PART.sub(r"\1", fault.text)
    return _without_words(site), severity, measured, limit, _without_words(text), _without_words(fault.remedy)


def _without_words(template):
    """A template without its words: a share is x %, all others are dots."""
    template = re.sub(r"\{\w+:\.\d%\}", "x %", template)
    return re.sub(r"\{\w+[^}]*\}", "…", template)
