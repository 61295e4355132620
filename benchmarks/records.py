"""Records of benchmarks, which the tables of docs/ are made from.

A file of benchmarks/ or experiments/bench/ that owns a table says so in TABLES, {page: {name of the table: a
callable that makes it}}; experiments/log/doc_tables.py puts them on the pages.
"""

import functools
import json
import statistics
from pathlib import Path

RECORDS = Path(__file__).resolve().parent.parent / "experiments" / "bench"
H100 = "gpu-nvidia-h100-80gb-hbm3"
H100_COMPILED = f"{H100}-compiled"
H100_STATES = f"{H100}-states"


@functools.cache
def whole_record(name):
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of_record(name):
    return whole_record(name)["results"]


def of_record(table, *names):
    """A callable that makes a table of the rows of these records."""

    def make():
        rows = []
        for name in names:
            rows += rows_of_record(name)
        return table(rows)

    return make


def median_ms(rows, **wanted):
    """Milliseconds of the row with these values, or None."""
    for row in rows:
        if row.get("ms") and all(row.get(key) == value for key, value in wanted.items()):
            return statistics.median(row["ms"])
    return None


def milliseconds(record, net):
    """{recipe: median milliseconds of a step}. A later record on the H100 has further recipes. Their times
    are given as they would be in the first: both have stochastic rounding.
    """
    found = _milliseconds(record, net)
    if record == H100_COMPILED:
        shared = "pure_bf16-stochastic"
        later = _milliseconds(H100_STATES, net)
        for recipe, time in later.items():
            found.setdefault(recipe, time * found[shared] / later[shared])
    return found


def _milliseconds(record, net):
    return {
        row["recipe"]: statistics.median(row["ms"])
        for row in rows_of_record(record)
        if row["net"] == net and row.get("ms")
    }
