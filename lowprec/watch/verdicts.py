"""What a doctor says: findings, the limits that make a figure one, and the verdict on the whole.

    print(Diagnosis("step 300", findings, {"update": 0.001}))   # a line a finding, the worst first

Both doctors speak through this file: `watch.Watch` about tensors of anyone's loop, doctor.py about sites of a
run. Copy it; it needs nothing.
"""

import dataclasses
import math
import textwrap

WIDTH = 120
ALIKE = 12  # lines about one site; the others like them are counted

# When a figure becomes a finding, and when a severe one: one that can ruin samples by itself.
LIMITS = {
    # share of the wanted movement of the weights that is not written. fp32, stochastic, Kahan and split
    # measure 0.00, nearest at lr 3e-4 half of it: in experiment 001 such weights still draw digits. Severe
    # where hardly anything of all tensors arrives, as in finetuning at lr 1e-6 (experiment 035)
    "update": (0.05, 0.9),
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

# ---- Findings ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Finding:
    site: str
    severity: str  # severe: can ruin samples by itself; moderate: costs quality; note: nothing is lost
    text: str
    remedy: str
    tensor: str = ""  # "" for a site as a whole
    figure: float = 0.0  # the larger, the worse, among findings of one site

    @property
    def beside(self):
        """Whether it is a further average (--average), which generation reads only when asked to."""
        return self.site.startswith("average ")

    @property
    def title(self):
        return f"{self.site} of {self.tensor}" if self.tensor else self.site

    @property
    def rank(self):
        """What findings are sorted by: the worst first."""
        return self.beside, SEVERITIES.index(self.severity), -self.figure


@dataclasses.dataclass
class Diagnosis:
    """findings: list of Finding, the one to blame first. sound: {site: share lost, or relative change} of
    what else was examined. harm: what the worst findings can cause.
    """

    head: str
    findings: list
    sound: dict
    harm: str = "bad samples"

    @property
    def status(self):
        """Exit status: 0 healthy, 1 findings."""
        return int(any(f.severity != "note" for f in self.findings))

    @property
    def verdict(self):
        losing = [f for f in self.findings if f.severity != "note"]
        read = [f for f in losing if not f.beside]
        if not losing:
            return "healthy: nothing is losing information"
        if not read:
            return "what generation reads is healthy; the findings are in averages kept beside it"
        if read[0].severity == "severe":
            return f"most likely to blame for {self.harm}: {read[0].title}"
        harmless = f"nothing found here causes {self.harm} by itself"
        return f"{harmless}; most likely to blame for lost quality: {read[0].title}"

    def __str__(self):
        shown, hidden = _not_too_many(self.findings)
        heads = ("tensor", "site", "severity", "finding")
        rows = [(f.tensor, f.site, f.severity, f"{f.text} -> {f.remedy}") for f in shown]
        if rows:
            rows.insert(0, heads)
        first = 0 if any(f.tensor for f in shown) else 1  # no column of tensors where there are none
        widths = [max((len(row[i]) for row in rows), default=0) + 2 for i in range(first, 3)]
        lines = [self.head]
        for row in rows:
            line = "".join(f"{cell:<{width}}" for cell, width in zip(row[first:3], widths, strict=True))
            indent = min(sum(widths), WIDTH // 2)
            lines += textwrap.wrap(line + row[3], WIDTH, subsequent_indent=" " * indent)
        lines += [f"... and {count} more findings of {site}" for site, count in hidden.items()]
        if self.sound:
            sound = ", ".join(f"{name} {share:.2%}" for name, share in self.sound.items())
            line = f"sound (share lost, or relative change): {sound}"
            lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ")
        return "\n".join([*lines, self.verdict])


def _not_too_many(findings):
    """(findings to print, {site: how many of its findings are not printed})."""
    shown, hidden, count = [], {}, {}
    for f in findings:
        count[f.site] = count.get(f.site, 0) + 1
        if count[f.site] <= ALIKE:
            shown.append(f)
        else:
            hidden[f.site] = hidden.get(f.site, 0) + 1
    return shown, hidden
