"""A kind of fault is one function, in a file of faults/:

    @of_tensor("momentum", "its codes are {figure:.0%} off", "8-bit codes or bf16", above=0.05)
    def momentum_in_codes(one):
        '''How far momentum in codes is off where the step orthogonalises it, over its size.'''
        return math.sqrt(one.extra.codes_error / one.extra.codes_size)

The decorator says what it is a fault of, its site, what is said of it, what mends it, and the figure above
which it is one. The function gives the figure, and its docstring says what that is.
`python -m lowprec.watch.findings` prints all of them as a table.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

from .verdicts import SITES_BY_COST, Finding


class Figure:
    """What was measured.

    value: held against the limit of the fault. tensor: its name, "" for all of them, None for what is
    examined. site: in place of the fault's. whole: held against the limit of a severe finding in place of the
    value. costs: the site that costs as much, by which it is sorted, in place of its own. severity: in place
    of the fault's. words: what fills the text, beside {figure}; None for what was not measured.
    """

    def __init__(
        self, value=1.0, /, tensor=None, site=None, whole=None, costs=None, severity=None, **words
    ):
        self.value = float(value)
        self.tensor = tensor
        self.site = site
        self.costs = costs
        self.severity = severity
        self.whole = self.value if whole is None else whole
        self.words = {"figure": self.value}
        self.words.update({name: word for name, word in words.items() if word is not None})


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault.

    site: what loses something. text, remedy: what is said, filled from the words of a figure. A part of the
    text in brackets is left out where a word of it was not measured.
    measure: what is examined -> a number, a Figure, several, or None where there is nothing to judge.
    above: a figure above it is a finding; None: all that is measured is one.
    severity: see verdicts.Finding. severe_above: a figure above it is severe all the same.
    rank: what findings of a site and severity are sorted by, the largest first; None: their figure.
    whole: what the verdict says of the whole net, in place of the text.
    """

    site: str
    text: str
    remedy: str
    measure: Callable
    above: float | None = None
    severity: str = "moderate"
    severe_above: float = math.inf
    rank: float | None = None
    whole: str = ""

    def figures(self, examined):
        """[Figure] of what is examined."""
        found = self.measure(examined)
        if found is None or found is False:
            return []
        if isinstance(found, (int, float)):
            found = Figure(found)
        return [found] if isinstance(found, Figure) else list(found)

    def finding(self, figure, tensor):
        """The Finding that a Figure is; None within the limit. tensor: the name of what is examined."""
        if self.above is not None and not figure.value > self.above:
            return None
        site = figure.site or self.site
        costs = figure.costs or site
        share = SITES_BY_COST.index(costs if costs in SITES_BY_COST else "")
        return Finding(
            site=site,
            severity="severe" if figure.whole > self.severe_above else figure.severity or self.severity,
            text=filled_text(self.text, figure.words),
            remedy=self.remedy.format(**figure.words),
            tensor=tensor if figure.tensor is None else figure.tensor,
            figure=figure.value if self.rank is None else self.rank,
            cause=self.text,
            # what is no share, and no small matter, stands before all that is
            place=-1 if self.rank is not None and self.rank >= 1 else share,
            whole=filled_text(self.whole, figure.words),
        )


class Faults:
    """All faults of one kind of thing. Called, it is the decorator that declares one of them."""

    def __init__(self):
        self.families = {}  # {name: [Fault]}

    def __call__(self, site, text, remedy, family=None, **options):
        """family: a name. Of the faults of a family the first that finds something in a tensor speaks of it.
        options: see Fault.
        """

        def declare(measure):
            fault = Fault(site, text, remedy, measure, **options)
            self.families.setdefault(family or measure.__name__, []).append(fault)
            return measure

        return declare

    def __iter__(self):
        for family in self.families.values():
            yield from family

    def findings(self, examined, tensor="", sound=None):
        """[Finding] of what is examined, whose name is `tensor`; "" for a whole run. sound: a dict that takes
        {site: figure} of what is within its limit, or None.
        """
        found = []
        for family in self.families.values():
            told = set()  # (tensor, site of its own) of which faults before this one have spoken
            for fault in family:
                new = {}
                for figure in fault.figures(examined):
                    about = figure.tensor or None, figure.site
                    finding = None if about in told else fault.finding(figure, tensor)
                    if finding is not None:
                        new.setdefault(about, []).append(finding)
                    elif sound is not None and about not in told:
                        sound[figure.site or fault.site] = figure.value
                told |= new.keys()
                found += itertools.chain(*new.values())
        return found


of_tensor = Faults()  # measured.Tensor, of each that the optimiser steps
of_average = Faults()  # measured.Tensor, of each that has an average
of_run = Faults()  # measured.Measured
of_watch_without_steps = Faults()  # watch.Watch


OPTIONAL_PART = re.compile(r"\[([^\]]*)\]")


def filled_text(template, words):
    """A text with its words; parts in brackets that lack one are left out."""

    def part(match):
        needed = re.findall(r"\{(\w+)", match[1])
        return match[1] if set(needed) <= set(words) else ""

    return OPTIONAL_PART.sub(part, template).format(**words)


# ---- The table ---------------------------------------------------------------------------------------------


def table_of(faults):
    """Faults as Markdown. faults: [Fault]."""
    lines = ["| site | severity | finding where | is above | says | remedy |", "|---|---|---|---|---|---|"]
    for fault in faults:
        severity = fault.severity
        if fault.severe_above < math.inf:
            severity += f", severe above {fault.severe_above:g}"
        limit = "" if fault.above is None else f"{fault.above:g}"
        measured = " ".join(fault.measure.__doc__.split()).removesuffix(".")
        text = OPTIONAL_PART.sub(r"\1", fault.text)
        cells = fault.site, severity, measured, limit, without_words(text), without_words(fault.remedy)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def without_words(template):
    """A template without its words: a share is x %, all others are dots."""
    template = re.sub(r"\{\w+:\.\d%\}", "x %", template)
    return re.sub(r"\{\w+[^}]*\}", "…", template)
