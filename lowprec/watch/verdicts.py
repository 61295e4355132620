"""What a doctor says: findings, the limits that make a figure one, and the verdict on the whole.

    print(Diagnosis("step 300", findings, {"update": 0.001}))   # a line a finding, the worst first

All doctors speak through this file: `Watch` about tensors of anyone's loop, `compare` about two checkpoints,
doctor.py about sites of a run.
"""

import dataclasses
import math
import textwrap

LINE_WIDTH = 120

# When a figure becomes a finding, and when a severe one: one that can ruin samples by itself.
FINDING_LIMITS = {
    # share of the wanted movement of the weights that is not written. fp32, stochastic, Kahan and split
    # measure 0.00, nearest at lr 3e-4 half of it. Severe where a tenth of what all tensors want is lost: no
    # such share is known to be safe (experiment 012)
    "update": (0.05, 0.1),
    # the same for decay alone, which is either written or not
    "weight decay": (0.5, math.inf),
    # the same of an average, among entries more than 2 ulp from their weight: closer ones are as good as the
    # format allows. From a quarter on the average trails far behind its weights, whatever its decay says
    # (decay 0.99 in bf16)
    "ema": (0.05, 0.25),
    # the same of the shrinking of v. At beta2 = 0.99 bf16 loses the last steps before v = g^2, and little is
    # gained by them; at 0.999 all
    "exp_avg_sq": (0.3, math.inf),
    # relative error of the summed gradient. One rounding to bf16, which no recipe of bf16 gradients avoids,
    # is 0.0017
    "accumulate": (0.004, 0.1),
}

SEVERITIES = ("severe", "moderate", "note")
# What a lost share of these costs, the most first. An average in bf16 draws noise (experiment 007), weights
# to nearest end a GPT 51 % above fp32, of which gains are 1 % (035), and v to nearest a DiT 0.3 % (040)
SITES_BY_COST = ("ema", "update", "gains", "", "exp_avg_sq", "weight decay")

# What weights to nearest cost by the share of updates that were lost when the run ended: the net, by how
# many percent its held-out loss was above fp32's, the experiment.
COSTS_OF_NEAREST = {
    0.19: ("GPT", 1.60, "025"),
    0.40: ("U-Net", 1.76, "012"),
    0.57: ("DiT", 3.14, "011"),
    0.77: ("U-Net", 32.42, "012"),
    0.89: ("U-Net", 64.45, "012"),
    0.95: ("GPT", 50.57, "035"),
}


def cost_of_nearest(lost):
    """What the recorded run that lost most nearly this share of its updates lost by it."""
    share = min(COSTS_OF_NEAREST, key=lambda share: abs(share - lost))
    net, loss, experiment = COSTS_OF_NEAREST[share]
    lost = f"a {net} that lost {share:.0%} of its steps"
    return f"{lost} ended {loss:.2g} % above fp32's held-out loss (experiment {experiment})"


# ---- Findings ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Finding:
    """One thing that is wrong.

    Attributes:
        site: what loses information: "update", "exp_avg_sq", "ema", "step", "grads", ...
        severity: "severe" can ruin results by itself, "moderate" costs quality, "note" loses nothing.
        text: what was measured.
        remedy: what to do.
        tensor: its name; "" for a site as a whole.
        figure: the larger, the worse, among findings of one site and severity.
        cause: what findings share that are one row of the table; "" where that is their text.
        place: where it stands among findings of its severity; None: by its site.
        whole: what the last line says, in place of its text, where it speaks of the whole net.
    """

    site: str
    severity: str
    text: str
    remedy: str
    tensor: str = ""
    figure: float = 0.0
    cause: str = ""
    place: int | None = None
    whole: str = ""

    @property
    def beside(self) -> bool:
        """Whether it is a further average (--average), which generation reads only when asked to."""
        return self.site.startswith("average ")

    @property
    def rank(self):
        """What findings are sorted by: the worst first."""
        place = self.place
        if place is None:
            place = SITES_BY_COST.index(self.site) if self.site in SITES_BY_COST else 0
        return self.beside, SEVERITIES.index(self.severity), place, -self.figure


class Row:
    """Findings of one cause and remedy, the worst first."""

    def __init__(self, findings):
        self.findings = findings
        self.worst = findings[0]

    @property
    def tensors(self):
        """Their number, and the worst three by name."""
        names = [f.tensor for f in self.findings]
        if len(names) == 1:
            return names[0]
        return f"{len(names)} tensors, the worst {', '.join(names[:3])}"

    @property
    def title(self):
        number = f"{len(self.findings)} tensors, the worst " if len(self.findings) > 1 else ""
        return f"{self.worst.site} of {number}{self.worst.tensor}" if self.worst.tensor else self.worst.site

    @property
    def text(self):
        """What a line of the table says."""
        which = f"{self.tensors}: " if len(self.findings) > 1 else ""
        return f"{which}{self.worst.text} -> {self.worst.remedy}"

    @property
    def advice(self):
        """What the last line adds to the title, where the text has a cause."""
        return f": {self.worst.whole or self.worst.text} -> {self.worst.remedy}" if self.worst.cause else ""


def rows_of(findings):
    """[Row], in the order of their worst findings."""
    alike = {}
    for f in findings:
        alike.setdefault((f.site, f.severity, f.cause or f.text, f.remedy), []).append(f)
    return [Row(found) for found in alike.values()]


@dataclasses.dataclass
class Diagnosis:
    """What was examined and found; str() is the table that is printed, with the verdict as its last line.

    Attributes:
        head: what was examined, in a line.
        findings: the one to blame first.
        sound: {site: share lost, or relative change} of what else was examined.
        harm: what the worst findings can cause.
        examined: whether anything was looked at.
    """

    head: str
    findings: list[Finding]
    sound: dict[str, float]
    harm: str = "bad samples"
    examined: bool = True

    @property
    def status(self) -> int:
        """Exit status: 0 healthy, 1 findings; notes are none."""
        return int(any(f.severity != "note" for f in self.findings))

    @property
    def verdict(self) -> str:
        """One line on the whole."""
        losing = [f for f in self.findings if f.severity != "note"]
        read = [f for f in losing if not f.beside]
        if not losing and not self.examined:
            return "no step was looked at yet, so nothing is known"
        if not losing:
            return "healthy: nothing is losing information"
        if not read:
            return "what generation reads is healthy; the findings are in averages kept beside it"
        # of what is lost by shares, the cause that most tensors have
        rows = [row for row in rows_of(read) if row.worst.rank[:3] == read[0].rank[:3]]
        blamed = rows[0]
        if read[0].rank[2] > 0:
            blamed = max(rows, key=lambda row: len(row.findings))
        if read[0].severity == "severe":
            return f"most likely to blame for {self.harm}: {blamed.title}{blamed.advice}"
        harmless = f"nothing found here causes {self.harm} by itself"
        return f"{harmless}; most likely to blame for lost quality: {blamed.title}{blamed.advice}"

    def __str__(self) -> str:
        lines = [self.head, *self._table()]
        if self.sound:
            sound = ", ".join(f"{name} {share:.2%}" for name, share in self.sound.items())
            line = f"sound (share lost, or relative change): {sound}"
            lines += textwrap.wrap(line, LINE_WIDTH, subsequent_indent="  ")
        return "\n".join([*lines, self.verdict])

    def _table(self):
        """Lines with a row a finding."""
        rows = rows_of(self.findings)
        if not rows:
            return []
        columns = ["tensor", "site", "severity"]
        if not any(f.tensor for f in self.findings):
            del columns[0]
        table = [columns, *([getattr(row.worst, name) for name in columns] for row in rows)]
        texts = ["finding", *(row.text for row in rows)]
        widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
        indent = " " * min(sum(widths), LINE_WIDTH // 2)
        lines = []
        for row, text in zip(table, texts, strict=True):
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
            lines += textwrap.wrap("".join([*cells, text]), LINE_WIDTH, subsequent_indent=indent)
        return lines
