"""How a run ends: signals, losses that are no numbers, and the line and exit status of each kind of error."""

import errno
import math
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

from harness.ranks import Followed
from lowprec.errors import Refused
from lowprec.optimizers.buckets import local_tensor

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# ---- In the loop -------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Asked to stop by a signal; the checkpoint is written. args: message, signal number."""


class StopRequest:
    """Within it SIGINT, SIGTERM and SIGHUP ask the loop to stop after its step. signal: the number of the one
    that came, or None.
    """

    def __init__(self):
        self.signal = None
        self._came_at = 0.0
        self._handlers_before = {}

    def __enter__(self):
        for signum in ENDING_SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:  # as nohup leaves it
                continue
            self._handlers_before[signum] = signal.signal(signum, self.ask)

    def __exit__(self, *error):
        for signum, handler in self._handlers_before.items():
            signal.signal(signum, handler)
        self._handlers_before = {}

    def ask(self, signum, frame=None):
        """Handle a signal. A second one ends the process at once; but not within a second: torchrun passes on
        the Ctrl-C that its processes have had already.
        """
        if self.signal and time.monotonic() - self._came_at > 1:
            raise KeyboardInterrupt
        self.signal = signum
        self._came_at = time.monotonic()


def check_loss(loss, report, step, folder):
    """Raise Refused for a loss (a float) that is no number. report: what rounding did in that step."""
    if math.isfinite(loss):
        return
    bad = report.get("nonfinite_grads")
    grads = f", {bad} gradient entries are not finite" if bad else ""
    remedy = "lower --lr, add --clip_grad 1 or --warmup, or use a wider format (--bf16 for --fp16)"
    raise Refused(f"the loss is {loss} at step {step}{grads}: {remedy}; {what_is_kept(folder)}")


def check_weights(run, step, folder, ranks, device):
    """Raise Refused on all ranks where a weight or a moment of a Precision `run` is not finite on one: the
    last step's loss was taken before it wrote them, and a moment that is infinite lets its weight stand.
    """
    bad = _not_finite(run)
    if not ranks.any(int(bool(bad)), device):
        return
    example = f", {bad} for one" if bad else ""
    raise Refused(
        f"weights or moments are not finite after step {step}{example}: lower --lr, or add --clip_grad 1 or "
        f"--warmup; {what_is_kept(folder)}"
    )


def what_is_kept(folder):
    return f"metrics.jsonl and the checkpoint before, if there is one, in {folder} are kept"


def _not_finite(run):
    """The name of a weight, or of a moment, that is not finite; "" where all are."""
    for name, p in run.named_params:
        if not local_tensor(p.detach()).isfinite().all():
            return name
        for site in run.recipe.moments:
            moment = run.optimizer.moment(p, site)
            if moment is not None and not moment.isfinite().all():
                return f"{site} of {name}"
    return ""


# ---- Of the command ----------------------------------------------------------------------------------------

COMMAND_RESUMES = "the same command starts again, a training from its last checkpoint if there is one"
CHECKPOINT_IS_WHOLE = "the checkpoint before, if there is one, is whole"
OVERFLOW_ERROR = "without overflow"
MEMORY_ERRORS = ("can't allocate memory", "out of memory", "not enough memory", "size calculation overflowed")


class Ended(KeyboardInterrupt):
    """Asked to end by a signal, where no checkpoint can be written. args: the signal's number."""


def _raise_ended(signum, frame):
    raise Ended(signum)


def ends_once(error):
    """A handler that raises `error`, once: `timeout` sends a process SIGTERM, and then its group."""

    def handle(signum, frame):
        signal.signal(signum, signal.SIG_IGN)
        raise error

    return handle


@contextmanager
def ended_by(*signals):
    """Within it these signals raise Ended, unless the caller ignores or handles them. Gives those that do."""
    changed = {}
    before = sys.unraisablehook

    def later(unraisable):
        """Send a signal again that came within a callback of weakref or __del__, which can raise nothing."""
        error = unraisable.exc_value
        if isinstance(error, Ended):
            threading.Timer(0.01, os.kill, (os.getpid(), error.args[0])).start()
        else:
            before(unraisable)

    sys.unraisablehook = later
    if threading.current_thread() is threading.main_thread():
        for signum in signals:
            handler = signal.getsignal(signum)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                changed[signum] = handler
                signal.signal(signum, _raise_ended)
    try:
        yield changed
    finally:
        sys.unraisablehook = before
        for signum, handler in changed.items():
            signal.signal(signum, handler)


def line_and_status(error):
    """(line, exit status) of an exception that is no fault of the program; (None, 1) of any other."""
    if isinstance(error, Stopped):
        message, signum = error.args
        return message, 128 + signum
    if isinstance(error, Followed):
        return "", 2  # the main process says why
    if isinstance(error, Refused):
        return f"train.py: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        signum = error.args[0] if error.args else signal.SIGINT
        return f"interrupted; {COMMAND_RESUMES}", 128 + signum
    line = _line_of_system(error)
    if line:
        return f"train.py: {line}", 2
    return None, 1


def _line_of_system(error):
    """What a person reads where disk, memory or fp32 is too small, or a file can't be had; else None."""
    text = str(error)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            again = "free some, then run the same command again"
            return f"no space left on the device: {again}; {CHECKPOINT_IS_WHOLE}"
        if error.errno is not None:
            where = f"{error.filename}: " if error.filename is not None else ""
            return str(Refused(where + error.strerror))
    too_large = isinstance(error, RuntimeError) and any(words in text for words in MEMORY_ERRORS)
    if isinstance(error, MemoryError) or too_large:
        smaller = "a smaller --batch_size or --size needs less, and --sample_batch where images are drawn"
        return f"not enough memory: {smaller}; {COMMAND_RESUMES}"
    if isinstance(error, RuntimeError) and OVERFLOW_ERROR in text:  # of torch, for a number that it is given
        return f"a step is too large for fp32: use a smaller --lr; {CHECKPOINT_IS_WHOLE}"
    return None
