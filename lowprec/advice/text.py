"""An Advice in words: a table, a recommendation, and what they rest on."""

from __future__ import annotations

from .. import evidence

GIB = 2**30


def written(advice) -> str:
    """The whole answer, as `python -m lowprec advise` prints it."""
    subject = advice.subject
    gpus = "" if advice.gpus == 1 else f" x {advice.gpus}, the rows of all tensors spread over them (--fsdp)"
    lines = [
        f"{subject.name}: {subject.parameters:,} trained parameters"
        + (f", a {subject.kind}" if subject.kind else "; what kind of net it is is not known"),
        f"on {advice.machine.name}{gpus}; {advice.batch} examples a step on each",
        "",
        *_table(advice),
        "",
        *recommendation(advice),
        "",
        *_notes(advice),
    ]
    return "\n".join(lines)


# ---- The table ---------------------------------------------------------------------------------------------

HEAD = ["flags", "GiB", "weights", "grads", "states", "average", "activations", "fits", "batch", "speed"]


def _table(advice):
    cells = [HEAD]
    for row in advice.rows:
        fits = "no" if not row.fits else "yes"
        if row.how[0] != "native":
            fits += f", {row.how[0]}"
        most = "-" if row.most is None else f"<= {row.most:,}"
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
    lines = _aligned(cells)
    quality = []
    width = max(len(row.candidate.typed) for row in advice.rows)
    for row in advice.rows:
        said = row.said_of_quality(advice.subject.parameters)
        quality.append(f"{row.candidate.typed:<{width}}  {said}")
    return [*lines, "", "held-out loss against fp32, % [95 % interval]:", *quality]


def gib(size: float) -> str:
    """'1.25', in GiB."""
    return f"{size / GIB:.3g}" if size >= 0.001 * GIB else f"{size / GIB:.1g}"


def _aligned(cells):
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *rest in cells:
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return lines


# ---- The recommendation ------------------------------------------------------------------------------------


def recommendation(advice) -> list[str]:
    """What to start with and why, what the next smaller recipe gives up, and what to watch."""
    best = advice.best
    if best is None:
        least = min(advice.rows, key=lambda row: row.total)
        need = f"the least is {gib(least.total)} GiB, with {least.candidate.typed}"
        return [f"Nothing fits: {need}. More GPUs (--gpus), a smaller batch or a frozen base need less."]
    flags = best.candidate.typed
    lines = [f"start with {flags if best.candidate.flags else 'no flag: fp32'}, {_why(best, advice)}"]
    if best.candidate.flags:
        lines.append(f"in a loop of your own: {best.candidate.line}")
    smaller = next_smaller(advice)
    if smaller is not None:
        saved = best.total - smaller.total
        lines.append(f"{smaller.candidate.typed} saves {gib(saved)} GiB more; lost: {smaller.candidate.lost}")
    lines.append(f"to watch: {best.candidate.watch} (lowprec.Watch prints it)")
    return lines


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
    lines = []
    if advice.no_activations:
        lines.append(advice.no_activations)
    else:
        lines.append(
            "GiB is the most at once: gradients come while activations go, so it can be less than the sum of "
            "the columns. Activations are found by a pass over shapes, as torch computes on a CPU."
        )
    if advice.machine.is_cpu:
        lines.append("the process itself, Python and its libraries, is in the sum")
    else:
        share = f"{advice.machine.margin:.0%}"
        lines.append(f"{share} of a GPU's memory is left free, for CUDA itself and for what fragments it")
    if not advice.subject.average:
        lines.append("without a moving average of the weights, which takes 4 bytes a parameter more")
    lines += advice.refused
    lines.append(f"Quality: {evidence.caution()}")
    return lines
