"""An Advice in words: a table, a recommendation, and what they rest on."""

from __future__ import annotations

from .. import evidence
from .machines import GIB


def full_text(advice) -> str:
    """The whole answer, as `python -m lowprec advise` prints it."""
    subject = advice.subject
    examples = f"{advice.batch} examples a step"
    if advice.is_batch_chosen:
        examples += ", as many as fit: accumulate sums more"
    machine = f"on {advice.machine.name}; {examples}"
    if advice.gpus > 1:
        spread = "on each; the rows of all tensors are spread over them (--fsdp)"
        machine = f"on {advice.gpus} x {advice.machine.name}; {examples} {spread}"
    kind = f"a {subject.kind}" if subject.kind else "of no known kind: --kind says what it is most like"
    lines = [
        f"{subject.name}: {subject.parameters:,} trained parameters, {kind}",
        machine,
        "",
        *_table(advice),
        "",
        *_quality(advice),
        "",
        *recommendation(advice),
        "",
        *_notes(advice),
    ]
    return "\n".join(lines)


def short_text(advice) -> list[str]:
    """The first rows of the table, their quality, and the recommendation."""
    return [*_table(advice, 4), "", *_quality(advice, 4), "", *recommendation(advice)]


# ---- The table ---------------------------------------------------------------------------------------------

TABLE_HEADER = [
    *("flags", "GiB at once", "weights", "gradients", "states", "average", "activations"),
    *("fits", "largest batch", "speed"),
]


def _table(advice, rows=None):
    cells = [TABLE_HEADER]
    for row in advice.rows[:rows]:
        fits = "no" if not row.fits else "yes"
        if row.how[0] != "native":
            fits += f", {row.how[0]}"
        most = "-" if row.most is None else f"{row.most:,}"
        speed = "-" if row.speed is None else f"{row.speed:.2f}"
        held = row.held
        cells.append(
            [
                row.candidate.typed,
                gib(row.total),
                gib(held.weights + held.gathered),
                gib(held.gradients),
                gib(held.states),
                gib(held.average),
                "-" if row.activations is None else gib(row.activations),
                fits,
                most,
                speed,
            ]
        )
    lines = layout(cells).splitlines()
    fitting = [row.fits and row.how[0] != "no" for row in advice.rows[:rows]]
    if False in fitting:
        lines.insert(1 + fitting.index(False), "-- what follows does not fit, or does not run there --")
    return lines


def _quality(advice, rows=None):
    width = max(len(row.candidate.typed) for row in advice.rows[:rows])
    lines = [
        "change of the held-out loss against fp32 [95 % interval], plus is worse, on the nearest net that "
        "was measured, with its pairs of runs (and the experiment):"
    ]
    for row in advice.rows[:rows]:
        said = row.said_of_quality(advice.subject.parameters)
        lines.append(f"{row.candidate.typed:<{width}}  {said}")
    return lines


def gib(size: float) -> str:
    """'1.25', in GiB."""
    return f"{size / GIB:#.3g}".rstrip(".") if size >= 0.001 * GIB else f"{size / GIB:.1g}"


def layout(rows, further=str.rjust):
    """Lines of a left-aligned first column and right-aligned further ones. rows: lists of as many texts."""
    first_width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [further(cell, width) for cell, width in zip(rest, widths, strict=True)]
        lines.append("  ".join([first.ljust(first_width), *cells]).rstrip())
    return "\n".join(lines)


# ---- The recommendation ------------------------------------------------------------------------------------


def recommendation(advice) -> list[str]:
    """What to start with and why, what the next smaller recipe gives up, and what to watch."""
    best = advice.best
    if best is None:
        return [_nothing_fits(advice)]
    flags = best.candidate.typed
    lines = [f"start with {flags if best.candidate.flags else 'no flag: fp32'}, {_why(best, advice)}"]
    lines.append(f"in a loop of your own: {best.line}")
    if best.candidate.recomputes:
        lines.append("where `from lowprec.parts.activations import recompute`")
    smaller = next_smaller(advice)
    if smaller is not None:
        less = f"{smaller.candidate.typed} takes {gib(best.total - smaller.total)} GiB less"
        lines.append(f"{less}. Against fp32 it gives up: {smaller.candidate.lost}")
    if best.candidate.flags:
        lines.append(f"to look at in lowprec.Watch: {best.candidate.watch}")
    return lines


def _nothing_fits(advice):
    least = min(advice.rows, key=lambda row: row.total)
    said = f"Nothing fits: the least is {gib(least.total)} GiB, with {least.candidate.typed}"
    if least.most:
        return f"{said}. With --batch {least.most} that fits."
    return f"{said}. More GPUs (--gpus) need less, and so does a finetuning of adapters (--from finetune)."


def _why(best, advice):
    memory = f"it takes {gib(best.total)} of {gib(advice.machine.memory)} GiB"
    if not best.candidate.flags:
        if advice.machine.support["bf16"][0] == "native":
            return f"since {memory}, and what is smaller was measured to cost more than half a percent"
        return f"since this machine has no fast 16-bit arithmetic, and {memory}"
    if best.quality is None:
        return f"since {memory}; what it costs in quality was not measured"
    row = best.quality.row
    if row.low > 0:
        return f"since {memory}; it costs {row.change:.2f} % of the held-out loss on the nearest net measured"
    return f"since {memory}, and no cost of it was seen on the nearest net measured"


def next_smaller(advice):
    """The row that takes the next fewer bytes than the best one, at least a tenth fewer, of those that fit
    and were not measured to cost much; None where there is none.
    """
    best = advice.best
    smaller = []
    for row in advice.rows:
        if row.fits and row.how[0] != "no" and not row.is_worse and row.total < 0.9 * best.total:
            smaller.append(row)
    return max(smaller, key=lambda row: row.total, default=None)


# ---- What it rests on --------------------------------------------------------------------------------------


def _notes(advice):
    machine = advice.machine
    lines = []
    if advice.no_activations:
        lines.append(advice.no_activations)
    else:
        lines.append(
            "GiB at once can be less than the sum of the columns: gradients come while activations go. "
            "Activations are found by a pass over shapes, as torch computes on a CPU."
        )
    kept = "what the estimate may miss" if machine.is_cpu else "CUDA itself and what fragments it"
    lines.append(f"A recipe fits where {machine.margin:.0%} of the memory is left free, for {kept}.")
    if machine.is_cpu:
        lines.append("The process itself, its libraries and what it keeps of freed memory are counted too.")
    if not advice.subject.average:
        lines.append("No moving average of the weights is counted; --average yes adds 4 bytes a parameter.")
    if advice.speeds_from:
        lines.append(f"Speed is how many times as fast as {advice.speeds_against}: {advice.speeds_from}.")
    else:
        lines.append("Speed was not measured on this kind of machine; --time measures it where it runs.")
    lines += advice.refused
    lines.append(f"Quality: {evidence.caution()}")
    others = advice.found_by_others()
    if others:
        lines += ["", "What others found, by their own measures, and was not repeated here:"]
    for other in others:
        lines.append(f"{' '.join(evidence.flags_of_recipe(other.recipe))}: {other.said} ({other.source})")
    return lines
