"""Low-precision training of any PyTorch model, in any loop.

    from lowprec import Precision, recipe

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3)
"""

import importlib

__version__ = "0.1.0"

# name -> the module that defines it; imported when it is first asked for, so that `import lowprec` is cheap
_HOME = {
    "Precision": "precision",
    "View": "precision",
    "SITES": "recipes",
    "Recipe": "recipes",
    "Site": "recipes",
    "recipe": "recipes",
    "AdamW": "optimizers.rounded",
    "SGD": "optimizers.by_tensor",
    "Lion": "optimizers.by_tensor",
    "Adafactor": "optimizers.by_tensor",
    "Muon": "optimizers.by_tensor",
    "EMA": "optimizers.average",
    "Release": "optimizers.release",
    "Offload": "optimizers.offload",
    "Watch": "watch.watch",
    "compare": "watch.compare",
    "Refused": "machine",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__():
    return sorted([*globals(), *__all__])
