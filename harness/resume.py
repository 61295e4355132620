"""A run goes on: its folder is opened, its checkpoint read, and a new one written. run: a trainer.Trainer."""

import torch

from harness import shards
from harness.checkpoints import check_optimizer, fitting
from harness.run_folder import CHECKPOINT, peak_memory
from lowprec.errors import Refused
from lowprec.parts.activations import Meter


def open_folder(run):
    """Create or resume the run's folder. Returns its summary if the run is finished and scored, else None."""
    c, folder = run.config, run.folder

    def differences(old):
        return run.table.differences(old, c)

    folder.check(differences)
    run.ranks.first(folder.lock, run.device)
    if folder.has_checkpoint:
        checkpoint = _read_own_part(run, differences)
        if checkpoint.get("data") and _data_fingerprint(run) not in ("", checkpoint["data"]):
            other = f"{folder} holds a run on other data than --data {c.data} is now"
            raise Refused(f"{other}: give this one another --name")
        restore_checkpoint(run, checkpoint)
        if run.finished:
            _restore_figures(run, checkpoint)
    if run.step > c.steps:
        longer = f"{folder} has {run.step:,} steps behind it, and --steps is {c.steps:,}"
        raise Refused(f"{longer}: give a shorter run another --name")
    before = None
    if run.finished:
        before = folder.summary()
    if before and _scored_alike(run):
        return before
    run.ranks.wait()  # every rank has read the folder before one writes
    if run.ranks.main:
        logged = run.step - run.interval
        folder.begin(run.command, vars(c), run.precision.ledger(), run.device, run.step, logged)
    if before:
        run.peak = before["peak_memory"]
    return None


def _read_own_part(run, differences):
    """What the folder's checkpoint holds, of a net that is spread this rank's rows alone."""
    path = run.folder / CHECKPOINT
    if run.ranks.spread and shards.is_there(path):
        found = shards.read_own_shards(path, run.precision, run.ranks, run.device)
        return run.folder.checked(found, differences)
    return run.folder.checkpoint(differences)


def _scored_alike(run):
    """Whether the run in the folder was scored as this one is to be."""
    old = run.table.config(run.folder.flags())
    for row in run.table.rows:
        if row.kind == "extent" and row.name != "steps":
            if getattr(old, row.name) != getattr(run.config, row.name):
                return False
    return True


def _data_fingerprint(run):
    """What stands for the content of the data; "" where a task of a file does not tell."""
    return str(getattr(run.data, "fingerprint", ""))


def restore_checkpoint(run, checkpoint):
    """Continue from a checkpoint's step. Raises Refused when it belongs to another model or recipe."""
    state = checkpoint["precision"]
    with fitting("the checkpoint"):
        check_optimizer(state["optimizer"], run.precision.optimizer.state_dict(), checkpoint["step"])
        run.precision.load_state_dict(state)
    run.step = checkpoint["step"]
    run.seconds = checkpoint["seconds"]
    run.interval = checkpoint["interval"]
    run.since = torch.tensor(checkpoint["since"], device=run.device)
    if "validation" in checkpoint:
        run.validation.load_state_dict(checkpoint["validation"])


def _restore_figures(run, checkpoint):
    """What a step tells, for a run that will do none. Older checkpoints hold neither figure."""
    run.peak = checkpoint.get("peak")
    kept = checkpoint.get("activations")
    if kept:
        meter = Meter(run.precision.model)
        meter.bytes, meter.casts = kept["bytes"], kept["casts"]
        run.precision.parts.append(meter)


def save_checkpoint(run, seconds, since, name=CHECKPOINT):
    """Write a checkpoint. seconds: of training; since: the sum of the losses since the last logged line."""
    state = {
        "config": vars(run.config),
        "step": run.step,
        "seconds": seconds,
        # the losses of a half-finished logging interval belong to the state: a resumed run logs what an
        # uninterrupted one logs
        "interval": run.interval,
        "since": since,
        "validation": run.validation.state_dict(),
        "precision": run.precision.state_dict(),
        "data": _data_fingerprint(run),
        "peak": peak_memory(run.device),
    }
    meter = run.precision.part(Meter)
    if meter:
        state["activations"] = meter.json()
    if run.ranks.spread:
        shards.write_shards(run.folder / name, state, run.ranks, run.device)
    else:
        run.folder.save(state, name)
