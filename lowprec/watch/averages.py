"""Other people's averages of the weights, read as ours are: their tensors, their decay, their counter."""

import inspect

import torch

from ..errors import Refused
from .checkpoints import bare_name

# what an average that is an object calls the net that it holds
NAMES_OF_THE_NET = ("module", "ema_model", "averaged_model", "_average_model", "ema", "model")
# and the number of its updates: by which it may warm up, that stands where it is not updated, and others
COUNTERS_OF_WARMUPS = ("optimization_step", "num_updates")
COUNTERS_OF_UPDATES = (*COUNTERS_OF_WARMUPS, "n_averaged", "updates")
COUNTERS = (*COUNTERS_OF_UPDATES, "step")


class Average:
    """An average of the weights, whoever keeps it.

    read: () -> {name: tensor}; `dict` where there is none. ema: what says its decay, its warm-up and its
    counter; None where nobody does.
    """

    def __init__(self, read, ema=None):
        self.read = read
        self.ema = ema
        self.step = 0  # of the loop, as its Watch counts

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
        """Its decay at the last update, or for good; None where nobody says."""
        # AveragedModel keeps its decay in a closure
        for function in self.functions:
            if inspect.isfunction(function):
                decay = inspect.getclosurevars(inspect.unwrap(function)).nonlocals.get("decay")
                return float(decay) if isinstance(decay, float) else None
        current, decays = getattr(self.ema, "get_current_decay", None), getattr(self.ema, "decay", None)
        if callable(current):
            return float(current())
        if inspect.isfunction(decays):  # of the number of updates
            return float(decays(self.counts() or 0))
        return _first_number(self.ema, ("cur_decay_value", "decay"))

    @property
    def functions(self):
        """What a user may give torch's AveragedModel in place of a plain mean."""
        return getattr(self.ema, "multi_avg_fn", None), getattr(self.ema, "avg_fn", None)

    def counts(self):
        """How often it was updated; None where nobody counts."""
        return _first_number(self.ema, COUNTERS)

    @property
    def counts_updates(self):
        """Whether its counter stands where it is not updated: some count calls that do nothing."""
        return _first_number(self.ema, COUNTERS_OF_UPDATES) is not None

    @property
    def may_begin_late(self):
        """Whether it is torch's AveragedModel: SWA begins late in a run."""
        return hasattr(self.ema, "n_averaged")

    @property
    def ranges(self):
        """[(lowest, highest)] decay that it may have now: its decay, or what its schedule or its warm-up says
        at so many updates. [] where nobody says.
        """
        decay, count = self.decay, self.counts()
        schedule = getattr(self.ema, "get_decay", None)
        if isinstance(getattr(self.ema, "cur_decay_value", None), float):  # what get_decay said
            return [(decay, decay)]
        if callable(schedule):
            at = int(self.step if count is None else count)
            # some count before they ask, some after
            now = [_decay_at(schedule, at), _decay_at(schedule, max(0, at - 1))]
            # how many steps its schedule was told is not known: up to all that this loop and others did
            now += [decay] if count is None and decay is not None else []
            return [(min(now), max(now))]
        if decay is None:
            is_mean = isinstance(self.ema, torch.optim.swa_utils.AveragedModel) and not any(self.functions)
            return [(1 - 1 / count, 1 - 1 / count)] if is_mean and count else []
        found = [(decay, decay)]
        count = _first_number(self.ema, COUNTERS_OF_WARMUPS)
        if count is not None:  # as torch_ema, and TensorFlow before it, warm up
            warm = min(decay, (1 + count) / (10 + count))
            found.append((warm, warm))
        return found

    @classmethod
    def of(cls, ema, model):
        """An Average of a module, a dict of tensors, torch's AveragedModel, diffusers' EMAModel, timm's
        ModelEmaV3, ema_pytorch's EMA, this library's, a Precision's, or an object that holds one of them.
        Raises Refused for anything else, and where no name fits.
        """
        if isinstance(getattr(ema, "shadow_params", None), list):  # diffusers' EMAModel, torch_ema
            _named_in_order(ema.shadow_params, model)
            return cls(lambda: _named_in_order(ema.shadow_params, model), ema)
        found = cls._by_name(ema)
        if found is None:
            raise Refused(
                f"ema: {type(ema).__name__} is no average that Watch can read: give the module, a dict "
                f"{{name: tensor}}, AveragedModel, EMAModel or EMA"
            )
        params = dict(model.named_parameters())
        if params.keys() & found.shadow.keys():
            return found
        # the average of a wrapped net, as AveragedModel(DistributedDataParallel(net))
        bare = cls(lambda: {bare_name(key): t for key, t in found.shadow.items()}, found.ema)
        if params.keys() & bare.shadow.keys():
            return bare
        holders = _prefixes(params, bare.shadow)
        if len(holders) == 1:  # the average of a net that holds the model
            return cls(lambda: {name: bare.shadow[holders[0] + name] for name in params}, found.ema)
        parts = _prefixes(bare.shadow, params)
        if len(parts) == 1:  # the average of a part of the model
            return cls(lambda: {parts[0] + key: t for key, t in bare.shadow.items()}, found.ema)
        raise Refused(
            "ema: none of its tensors has the name of a parameter of the model, as "
            f"{next(iter(params))}; it has {next(iter(found.shadow), 'none')}: watch the module of which it "
            "is the average"
        )

    @classmethod
    def _by_name(cls, ema):
        """An Average of something whose tensors have names; None for anything else."""
        if isinstance(ema, dict):
            return cls(lambda: ema)
        own = getattr(ema, "ema", None)
        if isinstance(getattr(own, "shadow", None), dict):  # of a Precision, whose `module` is what trains
            ema = own
        if isinstance(getattr(ema, "shadow", None), dict):  # EMA
            return cls(lambda: ema.shadow, ema)
        held = [getattr(ema, name, None) for name in NAMES_OF_THE_NET]
        nets = [net for net in held if isinstance(net, torch.nn.Module)]
        if nets:
            return cls(lambda: _detached_parameters(nets[0]), ema)
        if isinstance(ema, torch.nn.Module):
            return cls(lambda: _detached_parameters(ema))
        return None


def _prefixes(inner, outer):
    """[What stands before the names of all tensors of `inner` in `outer`], where their shapes agree."""
    first = f".{next(iter(inner), '')}"
    found = []
    for prefix in [name.removesuffix(first) + "." for name in outer if name.endswith(first)]:
        if all(prefix + key in outer and outer[prefix + key].shape == t.shape for key, t in inner.items()):
            found.append(prefix)
    return found


def _named_in_order(tensors, model):
    """{name: tensor}, of all parameters or of those that train, as many as the tensors are."""
    named = dict(model.named_parameters())
    if len(tensors) != len(named):
        named = {name: p for name, p in named.items() if p.requires_grad}
    if [t.shape for t in tensors] != [p.shape for p in named.values()]:
        raise Refused(
            "ema: its tensors have no names, and are not those of the model's parameters in their order: "
            "give the part of the model that it averages, or a dict {name: tensor}"
        )
    return dict(zip(named, tensors, strict=True))


def _detached_parameters(module):
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}


def _first_number(ema, names):
    """The first of these attributes that is a number, or a tensor of one; None where none is."""
    for name in names:
        value = getattr(ema, name, None)
        if torch.is_tensor(value) and value.numel() == 1:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _decay_at(schedule, count):
    try:
        return float(schedule(count))
    except TypeError:  # somebody's own get_decay, which takes nothing
        return float(schedule())


# ---- The rate at which it goes -----------------------------------------------------------------------------


def said_rate(average, measured):
    """The rate that an average should have: of those that its decay, its schedule or its warm-up may say, the
    nearest to the measured one. None where nobody says.
    """
    nearest = [min(max(measured, 1 - high), 1 - low) for low, high in average.ranges]

    def ratio(rate):
        low, high = sorted((abs(rate), abs(measured)))
        return high / max(low, 1e-12)

    return min(nearest, key=ratio, default=None)


def fastest_rate(average):
    """The highest rate that an average may have now; 0.0 where nobody says."""
    return max((1 - low for low, _ in average.ranges), default=0.0)


def measured_rate(old, new, gap, narrow):
    """The share of its distance that an average went, where nobody says: the median of the entries that
    moved. 0.0 where none did. narrow: it is held in 16 bits.
    """
    moved = (new != old) & (gap != 0)
    count = int(moved.sum())
    if not count:
        return 0.0
    if not narrow:
        return float(((new - old) / gap)[moved].median())
    # as many of the farthest: those that rounding to nearest moved, and a fair sample where chance rounds
    farthest = (gap / old.abs().clamp_min(1e-30)).abs().topk(count).indices
    gap = gap[farthest]
    return float(((new - old)[farthest] * gap).sum() / gap.square().sum())
