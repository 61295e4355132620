"""How a command ends: signals, and the line and exit status of each kind of error."""

import errno
import signal
import threading
from contextlib import contextmanager

from harness.ranks import Followed
from lowprec.errors import Refused

RESUMES = "the same command resumes from the last checkpoint"
KEPT = "the last checkpoint is whole"
OVERFLOWN = "without overflow"
MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "size calculation overflowed")


class Ended(KeyboardInterrupt):
    """Asked to end by a signal, where no checkpoint can be written. args: the signal's number."""


def _end(signum, frame):
    raise Ended(signum)


@contextmanager
def ended_by(*signals):
    """Within it these signals raise Ended, unless the caller ignores or handles them. Gives those that do."""
    by_default = signal.SIG_DFL, signal.default_int_handler
    before = {signum: signal.getsignal(signum) for signum in signals}
    mine = {signum: handler for signum, handler in before.items() if handler in by_default}
    if threading.current_thread() is not threading.main_thread():
        mine = {}
    for signum in mine:
        signal.signal(signum, _end)
    try:
        yield mine
    finally:
        for signum, handler in mine.items():
            signal.signal(signum, handler)


def said_of(error):
    """(line, exit status) of an exception that is no fault of the program; (None, 1) of any other."""
    if isinstance(error, Stopped):
        return error.args[0], 128 + error.args[1]
    if isinstance(error, Followed):
        return "", 2  # the main process says why
    if isinstance(error, Refused):
        return f"train.py: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {RESUMES}", 128 + (error.args[0] if error.args else signal.SIGINT)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = "no space left on the device: free some, then run the same command again"
            return f"train.py: {full}; {KEPT}", 2
        if error.errno is not None:
            where = f"{error.filename}: " if error.filename is not None else ""
            return f"train.py: {Refused(where + error.strerror)}", 2
    text = str(error)
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(s in text for s in MEMORY):
        smaller = "a smaller --batch_size or --size needs less, and --sample_batch where images are drawn"
        return f"train.py: not enough memory: {smaller}; {RESUMES}", 2
    if isinstance(error, RuntimeError) and OVERFLOWN in text:  # of torch, for a number that it is given
        return f"train.py: a step is too large for fp32: use a smaller --lr; {KEPT}", 2
    return None, 1


class Stopped(Exception):
    """Asked to stop by a signal; the checkpoint is written. args: message, signal number."""
