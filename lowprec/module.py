"""A View as an nn.Module, for nets that sit in another module, which calls them.

diffusion = GaussianDiffusion(unet)          # a wrapper of yours or another library's
run = Precision(unet, recipe(pure_bf16=True, stochastic=True))
diffusion.model = run.module                 # in the net's place
run.backward(diffusion(x))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .copies import copied
from .errors import Refused

# what nn.Module keeps in each module for calls of it: these are the stand-in's own
ATTRIBUTES_OF_CALLS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
# how the names of methods begin whose tensors are no activations
PREFIXES_NOT_CAST = ("_", "save", "load", "set_")


class CastModule(nn.Module):
    """Stands in for the net of a View. Calls of it, and of methods that the net's class defines, such as
    encode(), take and give what the View does: inputs are cast, floating outputs have the loss's dtype.

    All else is the net's own: parameters, buffers, modules and state_dict under the same names, train and
    eval, attributes, read and written. A deepcopy holds a copy of the net and nothing of the run.
    """

    def __init__(self, view):
        super().__init__()
        own = {name: self.__dict__[name] for name in ATTRIBUTES_OF_CALLS}
        self.__dict__.clear()
        self.__dict__.update(own, _view=view)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._view.around = DistributedDataParallel._active_ddp_module
        return self._view(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_view" not in self.__dict__:  # while it is being copied or unpickled
            raise AttributeError(name)
        value = getattr(self._view.net, name)
        if not inspect.ismethod(value) or name.startswith(PREFIXES_NOT_CAST) or hasattr(nn.Module, name):
            return value
        return functools.partial(self._view.call, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise Refused(
                "run.module can't be given another class, as fully_shard gives one: spread or change the net "
                "itself, and make Precision then"
            )
        setattr(self._view.net, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._view.net, name)

    def __deepcopy__(self, memo: dict) -> CastModule:
        view = self._view
        net = copied(view.net, memo)
        return CastModule(type(view)(net, view.recipe, view.methods, view.keep))

    def __repr__(self) -> str:
        return repr(self._view.net)

    # what a class of nets may define in its own way

    def train(self, mode: bool = True) -> CastModule:
        self._view.net.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._view.net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._view.net.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._view.net._load_from_state_dict(*args, **kwargs)

    def _apply(self, change: Callable, *args: Any, **kwargs: Any) -> CastModule:
        held = self._view.recipe.dtype("weights")
        if change(torch.empty(0, dtype=held)).dtype != held:  # of float(), half(), to(dtype)
            raise Refused("run.module can't be cast: the recipe says what its weights are; cast a copy")
        self._view.net._apply(change, *args, **kwargs)
        return self
