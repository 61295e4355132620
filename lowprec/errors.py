"""The one exception for every refusal of one line, and what refusals share."""

import math
import os
import sys
from contextlib import contextmanager, suppress

import torch


class Refused(ValueError):
    """What was asked for makes no sense, or can't be had here. The message is one line: what is wrong, and
    what works instead.
    """

    def __init__(self, message=""):
        # a DataLoader worker sends a traceback: its last line is ours
        if message.startswith("Caught Refused in "):
            message = message.strip().splitlines()[-1].partition("Refused: ")[2]
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))  # \\n for a new line
        if len(line) > 1000:
            line = f"{line[:500]} ... {line[-400:]}"
        super().__init__(line)


def check_choice(what, value, choices):
    """Raises Refused for a value that is none of the choices."""
    if value not in choices:
        raise Refused(f"{what}={value!r}: unknown; choose from {', '.join(map(str, choices))}")


def check_number(name, number, least=None):
    """Raises Refused for a number below `least`; without one, for a number that is not above 0 and finite."""
    if not (0 < number < math.inf if least is None else number >= least):
        allowed = "above 0" if least is None else f"{least} or more"
        raise Refused(f"{name}={number:g}: it must be {allowed}")


def check_several(name, texts):
    """Raises Refused for one text where a list of them belongs."""
    if isinstance(texts, str):
        raise Refused(f"{name}={texts!r} is one text, and a list is asked for: write {name}=[{texts!r}]")


def end_of_reader():
    """The exit status of a program whose output nobody reads any more, as after `| head`. What is left to
    print goes nowhere from here on, not into a second error.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


class Forgiving:
    """A stream for sys.stderr that loses what can't be written, on a full disk say: it is no result."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()

    def flush(self):
        pass


@contextmanager
def in_one_line(said):
    """Within it an error of other people's code, which may raise anything, becomes a Refused: `said`, its
    class and its first line.
    """
    try:
        yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(f"{said} {type(error).__name__}: {first_line(error)}") from error


def first_line(error):
    """The first line with words in an exception's text, or its class's name."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def out_of_memory(error):
    """Whether an exception says that a GPU's memory is full, as torch or CUDA's libraries do."""
    said = "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError)
