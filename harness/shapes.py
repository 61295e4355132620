"""What values that are read from a file must be: tests of plain values, and `check`, which refuses in one
line.

JSON and checkpoints may come from anywhere, and a wrong type would end far from the file that holds it.
"""

import math

from lowprec.errors import Refused

LARGEST = 2**53  # counts beyond it are no counts: float64 can't tell them apart

# ---- Plain values ------------------------------------------------------------------------------------------


def is_text(x):
    return isinstance(x, str)


def is_whole(x):
    return type(x) is int and 0 <= x < LARGEST


def is_number(x):
    """A float, NaN and infinity among them, or an int."""
    return type(x) is float or (type(x) is int and abs(x) < 2**63)


def is_finite(x):
    return is_number(x) and math.isfinite(x)


def is_amount(x):
    """A finite number, 0 or more."""
    return is_finite(x) and x >= 0


# ---- Values made of others ---------------------------------------------------------------------------------


def maybe(test):
    return lambda x: x is None or test(x)


def listing(test):
    return lambda x: isinstance(x, list) and all(map(test, x))


def table(test=lambda x: True):
    """A dict whose keys are text and whose values pass `test`."""
    return lambda x: isinstance(x, dict) and all(is_text(key) and test(value) for key, value in x.items())


def fields(tests):
    """A dict that holds each of these keys, with values that pass {key: test}."""
    return lambda x: isinstance(x, dict) and all(key in x and test(x[key]) for key, test in tests.items())


# ---- Refusals ----------------------------------------------------------------------------------------------


def check(value, rows, where):
    """Raise Refused unless a dict fits. rows: {key: (test, what it is, whether it must be there)}; where: the
    beginning of the message.
    """
    for name, (test, what, needed) in rows.items():
        if name not in value:
            if needed:
                raise Refused(f"{where} (it has no '{name}')")
        elif not test(value[name]):
            raise Refused(f"{where} (its '{name}' is not {what})")
