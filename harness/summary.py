"""The end of a finished run: its scores, its export and summary.json. run: a trainer.Trainer."""

import sys
import time

import torch

from harness.files import write_json
from harness.run_folder import peak_memory
from lowprec.parts.activations import Meter
from lowprec.parts.loss_scale import LossScale


def finish(run):
    """Score, export, write the summary; then what the run's parts add to it, which may fail. Returns the
    summary on the main rank, None on others: they give their rows of a net that is spread.
    """
    c, precision = run.config, run.precision
    if not run.ranks.main:
        run.score()
        if c.export:
            run.export(c.export)
        return None
    started = time.perf_counter()
    print("scoring ...", file=sys.stderr, flush=True)
    images = run.step * c.batch_size * c.accumulate
    images_per_second = images / max(run.seconds, 1e-9)
    kind, number = run.task.items
    scaling = precision.part(LossScale)
    summary = {
        "step": run.step,
        "parameters": sum(p.numel() for p in precision.params),
        "seconds": run.seconds,
        "images_per_second": images_per_second,
        "skipped_steps": scaling.skipped if scaling else 0,
        "bytes_per_parameter": precision.ledger().state_bytes,
        "scores": run.score(),
        "reference": run.task.reference(),
        "peak_memory": run.peak or peak_memory(run.device),
        "scoring_seconds": time.perf_counter() - started,
    }
    meter = precision.part(Meter)
    if meter:
        summary["activations"] = meter.json()
    summary[f"{kind}_per_second"] = images_per_second * number
    if run.validation.every:
        summary["validation"] = run.validation.json()
    if c.export:
        run.export(c.export)
    run.folder.close()
    write_json(run.folder / "summary.json", summary)
    figures = _figures_of_parts(run)
    if figures:
        summary.update(figures)
        write_json(run.folder / "summary.json", summary)
    return summary


def _figures_of_parts(run):
    """What the parts tell of a finished run. Memory that does not suffice costs that figure alone."""
    found = {}
    for part in run.precision.parts:
        try:
            found.update(part.finish(run.precision, run.fixed_loss))
        except torch.OutOfMemoryError:
            name = type(part).__name__
            print(f"no memory left for the last figures of {name}; all else is written", file=sys.stderr)
    return found
