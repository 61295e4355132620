"""The numbers of a step: a row of fp32, which every kernel reads by the names below.

A row is WeightNumbers, followed by the numbers of the optimiser. cpu_step.cpp has structs of the same names
and fields; the order of the fields is that of the row.
"""

from typing import NamedTuple


class WeightNumbers(NamedTuple):
    """What every row begins with."""

    decay: float  # 1 - learning rate * weight decay: multiplies the weight
    scale: float  # multiplies the gradient


class AdamWNumbers(NamedTuple):
    """Of `AdamW.direction`."""

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_correction: float  # sqrt(1 - beta2^step): divides the root of exp_avg_sq
    eps: float
    rate: float  # -learning rate / (1 - beta1^step)


class SGDNumbers(NamedTuple):
    """Of `SGD.direction`."""

    momentum: float
    of_gradient: float  # the step is rate * (of_gradient * gradient + of_momentum * new momentum)
    of_momentum: float
    rate: float  # -learning rate


class LionNumbers(NamedTuple):
    """Of `Lion.direction`."""

    one_minus_beta1: float
    one_minus_beta2: float
    rate: float  # -learning rate


def named_numbers(row, kind):
    """(WeightNumbers, kind) of a row, fp32 [n]: each field a 0-dim tensor."""
    values = [row[i] for i in range(len(WeightNumbers._fields) + len(kind._fields))]
    count = len(WeightNumbers._fields)
    return WeightNumbers(*values[:count]), kind(*values[count:])


def place(name, kind=WeightNumbers):
    """The place of a field in the row of an optimiser whose numbers are of this kind."""
    if kind is WeightNumbers:
        return WeightNumbers._fields.index(name)
    return len(WeightNumbers._fields) + kind._fields.index(name)


PLACE_OF_SCALE = place("scale")
