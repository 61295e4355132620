"""What a person reads: scores, summaries, and what a machine can do."""

import math

import torch

from harness.shards import file_of
from harness.validation import BEST
from lowprec.machine import device_facts, recommended_flags, support


def layout(rows):
    """Lines of left-aligned first and right-aligned further columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def score_table(scores, reference, unprinted=()):
    """Scores of each source of weights beside the floor (real images) and the ceiling (noise)."""
    columns = dict(scores)
    if reference:
        columns["real (floor)"], columns["noise (ceiling)"] = reference["floor"], reference["ceiling"]
    rows = [["score", *columns]]
    for key, value in next(iter(scores.values())).items():
        if key in unprinted:
            continue
        found = [column.get(key) for column in columns.values()]
        if isinstance(value, list):
            for i in range(len(value)):
                rows.append(
                    [f"{key} of class {i}", *(_cell(f[i] if isinstance(f, list) else f) for f in found)]
                )
        else:
            rows.append([key, *map(_cell, found)])
    return layout(rows)


def _cell(value):
    return "-" if value is None else f"{value:.4f}"


def print_check():
    spelled = {
        "fp32": "(none)",
        "tf32": "--set compute=tf32",
        "bf16": "--bf16, --pure_bf16",
        "fp16": "--fp16",
        "fp8": "--fp8",
        "opt8bit": "--opt8bit",
        "opt4bit": "--opt4bit",
        "sparse24": "--sparse24 (kernels)",
    }
    for device in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        kind, capability, features = device_facts(device)
        found = support(kind, capability, features)
        print(f"{device}: {torch.cuda.get_device_name() if device == 'cuda' else kind}")
        rows = [[f"  {spelled[name]}", name, *found[name]] for name in found if name in spelled]
        print(layout([["", "flag", "here", "why"], *rows]))
        flag, why = recommended_flags(found)
        print(f"  start with: python train.py {flag}\n  {why}\n")
    print(layout(number_formats()))


def number_formats():
    """Rows: what the floating-point formats can hold."""
    rows = [["format", "bits", "largest", "smallest normal", "next after 1", "decimal digits"]]
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        facts = torch.finfo(getattr(torch, name))
        digits = f"{-math.log10(facts.eps / 2):.1f}"
        figures = (facts.max, facts.smallest_normal, 1 + facts.eps)
        rows.append([name, str(facts.bits), *(f"{figure:.9g}" for figure in figures), digits])
    return rows


def print_scores(trainer, scores, reference):
    """The table of scores, and what else the task has to say."""
    print(score_table(scores, reference, trainer.task.unprinted))
    for source, found in scores.items():
        text = trainer.task.told(found)
        if text:
            print(f"\n{source}:\n{text}")


def print_summary(trainer, summary):
    print_scores(trainer, summary["scores"], summary["reference"])
    memory = f"peak memory {summary['peak_memory'] / 2**20:.0f} MiB"
    if trainer.device.type == "cpu":
        memory += " (the process, libraries included)"
    if "activations" in summary:
        memory += f", {summary['activations']['total'] / 2**20:.1f} MiB kept for backward"
    skipped = summary["skipped_steps"]
    if skipped:
        memory += f", {skipped} steps skipped by the loss scaler"
    print(
        f"\n{summary['step']} steps in {summary['seconds']:.0f} s + {summary['scoring_seconds']:.0f} s of "
        f"scoring, {_rate(trainer, summary)}, {memory}"
    )
    if "validation" in summary:
        found = summary["validation"]
        best = f"best held-out {found['watched']} {_cell(found['best'])} at step {found['step']}, kept as "
        best += str(file_of(trainer.folder / BEST))
        if found["step"] is None:
            best = f"no held-out {found['watched']} was found, so there is no {BEST}"
        print("stopped early: " * found["stopped"] + best)
    print(f"pictures: {trainer.folder}/samples/   curves: tensorboard --logdir {trainer.config.runs}")


def _rate(trainer, summary):
    """'830 images a second'."""
    kind, _ = trainer.task.items
    return f"{summary.get(f'{kind}_per_second', 0):.0f} {kind} a second"
