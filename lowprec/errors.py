"""The one exception for every refusal of one line, and what refusals share."""

import torch


class Refused(ValueError):
    """What was asked for makes no sense, or can't be had here. The message is one line: what is wrong, and
    what works instead.
    """

    def __init__(self, message=""):
        # a DataLoader worker sends a traceback: its last line is ours
        if message.startswith("Caught Refused in "):
            message = message.strip().splitlines()[-1].partition("Refused: ")[2]
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
        super().__init__(line if len(line) <= 1000 else f"{line[:500]} ... {line[-400:]}")


def check_choice(what, value, choices):
    """Raises Refused for a value that is none of the choices."""
    if value not in choices:
        raise Refused(f"{what}={value!r}: unknown; choose from {', '.join(choices)}")


def first_line(error):
    """The first line with words in an exception's text, or its class's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def out_of_memory(error):
    """Whether an exception says that a GPU's memory is full, as torch or CUDA's libraries do."""
    full = "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
    return full or isinstance(error, torch.OutOfMemoryError)
