"""Low-precision training of any PyTorch model, in any loop.

    from lowprec import Precision, recipe

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.999)
    for x, y in loader:
        loss = F.mse_loss(run(x), y)      # run(...) is the model in the recipe's precision
        run.backward(loss)
        run.step()

`python -m lowprec` says what this machine can do. The folder also works under another name, inside a package.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `as` tells type checkers that users may import the name from here
    from .advice.answer import advise as advise
    from .errors import Refused as Refused
    from .optimizers.adafactor import Adafactor as Adafactor
    from .optimizers.average import EMA as EMA
    from .optimizers.lion import Lion as Lion
    from .optimizers.muon import Muon as Muon
    from .optimizers.protect import protect as protect
    from .optimizers.rounded import AdamW as AdamW
    from .optimizers.sgd import SGD as SGD
    from .parts.offload import Offload as Offload
    from .parts.release import Release as Release
    from .precision import Precision as Precision
    from .recipes import Recipe as Recipe
    from .recipes import recipe as recipe
    from .sites import SITES as SITES
    from .sites import Site as Site
    from .trials.foresee import foresee as foresee
    from .trials.trial import trial as trial
    from .view import View as View
    from .watch.compare import compare as compare
    from .watch.watch import Watch as Watch

__version__ = "0.1.0"

# name -> the module that defines it. A module is imported when one of its names is first asked for, so that
# `import lowprec` takes no time and nobody who wants an optimiser loads the Watch.
_MODULES = {
    "Adafactor": "optimizers.adafactor",
    "AdamW": "optimizers.rounded",
    "EMA": "optimizers.average",
    "Lion": "optimizers.lion",
    "Muon": "optimizers.muon",
    "Offload": "parts.offload",
    "Precision": "precision",
    "Recipe": "recipes",
    "Refused": "errors",
    "Release": "parts.release",
    "SGD": "optimizers.sgd",
    "SITES": "sites",
    "Site": "sites",
    "View": "view",
    "Watch": "watch.watch",
    "advise": "advice.answer",
    "compare": "watch.compare",
    "foresee": "trials.foresee",
    "protect": "optimizers.protect",
    "recipe": "recipes",
    "trial": "trials.trial",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__():
    return sorted({*globals(), *__all__})
