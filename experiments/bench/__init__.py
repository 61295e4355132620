"""Questions that were asked once, beside the records that answer them. bench.py runs them too.

    files()     all of benchmarks/ and of this folder; COMMAND is one of bench.py, TABLES are those of docs/
"""

import importlib
import pkgutil


def files():
    found = []
    for package in ("benchmarks", __name__):
        for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            found.append(importlib.import_module(file.name))
    return found
