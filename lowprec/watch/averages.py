"""Other people's averages of the weights, read as ours are: their tensors, their decay, their counter."""

import inspect

import torch

from ..errors import Refused

# what an average that is an object calls the net that it holds
HOLDERS = ("module", "ema_model", "averaged_model", "model")


class Average:
    """An average of the weights, whoever keeps it.

    read: () -> {name: tensor}. decays: () -> its decay, None where nobody says. counts: () -> how often it
    was updated, None where nobody counts.
    """

    def __init__(self, read, decays=lambda: None, counts=lambda: None):
        self.read = read
        self.decays = decays
        self.counts = counts

    @property
    def begun(self):
        """Whether it may have been updated: SWA begins late in a run."""
        return self.counts() != 0

    @property
    def shadow(self):
        """{name of a parameter: its average}."""
        return self.read()

    @property
    def decay(self):
        return self.decays()

    @classmethod
    def of(cls, ema, model):
        """An Average of a module, a dict of tensors, torch's AveragedModel, diffusers' EMAModel, EMA,
        or an object that holds one of them. Raises Refused for anything else, and where no name fits.
        """
        if isinstance(getattr(ema, "shadow_params", None), list):  # diffusers' EMAModel, torch_ema
            decays = lambda: _first_number(ema, ("cur_decay_value", "decay"))  # noqa: E731
            return cls(lambda: _named_in_order(ema.shadow_params, model), decays)
        found = cls._by_name(ema)
        if found is None:
            raise Refused(
                f"ema: {type(ema).__name__} is no average that Watch can read: give the module, a dict "
                f"{{name: tensor}}, AveragedModel, EMAModel or EMA"
            )
        names = {name for name, _ in model.named_parameters()}
        if not names & set(found.shadow):
            raise Refused("ema: none of its tensors has the name of a parameter of the model")
        return found

    @classmethod
    def _by_name(cls, ema):
        """An Average of something whose tensors have names; None for anything else."""
        if isinstance(ema, dict):
            return cls(lambda: ema)
        if isinstance(getattr(ema, "shadow", None), dict):  # EMA
            return cls(lambda: ema.shadow, lambda: _first_number(ema, ("decay",)))
        held = [getattr(ema, name, None) for name in HOLDERS]
        nets = [net for net in held if isinstance(net, torch.nn.Module)]
        if nets:
            return cls(lambda: _parameters(nets[0]), lambda: _decay_of_module(ema), lambda: _updates(ema))
        if isinstance(ema, torch.nn.Module):
            return cls(lambda: _parameters(ema))
        return None


def _named_in_order(tensors, model):
    """{name: tensor} of a list in the order of all parameters, or of those that train."""
    named = list(model.named_parameters())
    if len(tensors) != len(named):
        named = [(name, p) for name, p in named if p.requires_grad]
    return {name: t for (name, _), t in zip(named, tensors, strict=False)}


def _parameters(module):
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}


def _updates(ema):
    """How often an average was updated; None where it has no counter."""
    return int(ema.n_averaged) if hasattr(ema, "n_averaged") else None


def _first_number(ema, names):
    """The first of these attributes that is a number; None where none is."""
    for name in names:
        value = getattr(ema, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _decay_of_module(ema):
    """AveragedModel keeps its decay in a closure; without a function it is a plain mean, of no decay."""
    for function in (getattr(ema, "multi_avg_fn", None), getattr(ema, "avg_fn", None)):
        if inspect.isfunction(function):
            decay = inspect.getclosurevars(inspect.unwrap(function)).nonlocals.get("decay")
            return float(decay) if isinstance(decay, float) else None
    current = getattr(ema, "get_current_decay", None)
    if callable(current):
        return float(current())
    return _first_number(ema, ("decay",))
