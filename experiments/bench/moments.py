"""bench.py moments: does exp_avg_sq fall when half of the gradients drop to a hundredth? (2 minutes)

In each way that it can be held: fp32, bf16, and every format of codes, each to nearest and with stochastic
rounding, and in bitsandbytes' own AdamW8bit.
"""

import torch

from benchmarks.common import ADAMW_OPTIONS, Command, Flag, moment_formats, moments_in, progress_bar
from benchmarks.conformance_writes import after_a_drop
from benchmarks.records import of_record
from harness.printing import markdown_table
from lowprec.optimizers import build, rounded
from lowprec.precision import recipe
from lowprec.rules import check_machine

MOMENT_HOLDERS = ["fp32 nearest", "bitsandbytes"]
for kind in ("bf16", *moment_formats()):
    MOMENT_HOLDERS += [f"{kind} nearest", f"{kind} stochastic"]


def check(args):
    for name in moment_formats():
        check_machine(recipe(**moments_in(name)), args.device)


def holder(name, device="cpu"):
    """(optimiser, its parameter of 4,096 zeros, callable that reads exp_avg_sq).

    name: 'bitsandbytes', or '<exp_avg_sq> <update>' of ours.
    """
    p = torch.nn.Parameter(torch.zeros(4096, device=device))
    if name == "bitsandbytes":
        still = dict(ADAMW_OPTIONS, lr=0.0, weight_decay=0.0)
        optimizer = build.build(name, [p], recipe(opt8bit=True), **still)
    else:
        kind, update = name.split()
        optimizer = rounded.AdamW([p], lr=0.0, exp_avg_sq=kind, update=update)

    def read():
        return optimizer.moment(p, "exp_avg_sq").float()

    return optimizer, p, read


def moments(args, clock):
    """Rows (dicts): name, and exp_avg_sq over the exact one, of the dropped half and of the others."""
    rows = []
    with progress_bar(len(MOMENT_HOLDERS) * (args.before + args.after)) as bar:
        for name in MOMENT_HOLDERS:
            bar.set_postfix_str(name)
            optimizer, p, read = holder(name, args.device)
            dropped, others = after_a_drop(optimizer, p, read, args.before, args.after, bar)
            rows.append(dict(name=name, dropped=dropped, others=others))
    print(f"\nexp_avg_sq over the exact one, {args.before} steps before the drop, {args.after} after\n")
    print(moments_table(rows))
    return rows


def moments_table(rows):
    """Markdown of the rows of `moments`."""
    title = {"bitsandbytes": "int8, bitsandbytes' own AdamW8bit"}
    lines = []
    for row in rows:
        name = title.get(row["name"], row["name"].replace(" ", ", "))
        lines.append([name, f"{row['dropped']:.2f}", f"{row['others']:.2f}"])
    return markdown_table([["exp_avg_sq", "of the dropped half", "of the others"], *lines])


TABLES = {"docs/formats.md": {"moments": of_record(moments_table, "cpu-moments")}}

COMMAND = Command(
    "moments",
    "exp_avg_sq after a drop of gradients, by how it is held",
    moments,
    flags=(Flag("--before", 1000, "steps before the drop"), Flag("--after", 3000, "steps after it")),
    check=check,
)
