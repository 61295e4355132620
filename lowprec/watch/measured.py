"""What a Watch has measured, brought to the CPU once: of the whole run, and tensor by tensor."""

import functools
import math

import torch

from ..roles import roles
from .adapters import accumulates
from .net_state import NARROW_DTYPES
from .writes import Tally

HARDLY_WRITTEN = 0.02  # a share written that is as good as none
# those of this library that step as others do, by the names of these
OPTIMIZERS_HERE = {name: name for name in ("AdamW", "SGD", "Lion", "Adafactor", "Muon")} | {"Adam": "AdamW"}
MEASURED_SITES = ("update", "exp_avg_sq", "ema")


class Measured:
    """The sums of a watch."""

    def __init__(self, watch):
        self.watch = watch
        self.names = [name for name, _ in watch.named]
        self.known = getattr(watch.answers, "known", True)
        # torch's own round to nearest, and often several times a step, which looks like noise
        self.torchs = type(getattr(watch.answers, "inner", None)).__module__.startswith("torch.optim")
        self.by_chance = not self.torchs and self._may_draw()
        # small tensors say too little: all that one optimiser writes are rounded alike
        self.weights_to_nearest = not self.by_chance or watch.errors.to_nearest
        self.moments_to_nearest = not self.by_chance or watch.moment_errors.to_nearest
        self.tensors = [Tensor(self, i, watch.averages) for i in range(len(self.names))]
        self.looked_at = [one for one in self.tensors if one.facts.looks]
        self.averaged = [*self.tensors, *watch.teachers.tensors(self)]

    def _may_draw(self):
        """Whether the optimiser may round by chance: all that draws random numbers, or can't be seen."""
        sees = getattr(self.watch.answers, "draws", None)
        narrow = [p for _, p in self.watch.named if p.dtype in NARROW_DTYPES and p.numel()]
        stepped = [p for p in narrow if self.watch.state(p)]
        return sees is None or not stepped or sees(stepped[0]) is not False  # one speaks for all

    @functools.cached_property
    def norm_weights(self):
        """Names of the gains of norms."""
        role_of = roles(self.watch.model)
        found = set()
        for name in self.names:
            module = name.rpartition(".")[0]
            if name.endswith(("weight", "gamma")) and "norm" in role_of.get(module, ()):
                found.add(name)
        return found

    @functools.cached_property
    def lost_of_all(self):
        """Share of the wanted movement of all weights that was not written."""
        return self.total().get("update", 0.0)

    @functools.cached_property
    def stuck_of_all(self):
        """Share of the updates of all weights in 16 bits that are under half an ulp."""
        narrow = [one.weight for one in self.tensors if one.narrow]
        return sum(t.threatened_entries for t in narrow) / max(1, sum(t.entries for t in narrow))

    @functools.cached_property
    def line_of_code(self):
        """What writes the steps of this optimiser without loss."""
        optimizer = getattr(self.watch.answers, "inner", self.watch.answers)
        kind = type(optimizer).__name__
        if any(one.p.dtype == torch.float16 for one in self.tensors):
            return "fp32 weights, with the products under autocast"
        if kind not in OPTIMIZERS_HERE:
            return 'lowprec.protect(optimizer, update="stochastic")'
        return f'lowprec.{OPTIMIZERS_HERE[kind]}(params, lr=..., update="stochastic")'

    @functools.cached_property
    def all_zero(self):
        """Whether the gradients of all tensors were 0 at each look, and backward gave them so."""
        for one in self.looked_at:
            if one.facts.idle != one.facts.looks or one.change.zeroed:
                return False
            # a product of two factors of 0 has gradients of 0: another row's
            if one.p.dim() > 1 and not bool(self.watch.pick(one.p).any()):
                return False
        return len(self.looked_at) > 1

    @functools.cached_property
    def seen_breaking(self):
        """Whether a look saw what first was not finite: gradients, or what a step wrote."""
        return any(one.extra.burst or one.extra.infinite or one.change.spoilt for one in self.tensors)

    @functools.cached_property
    def some_rates_live(self):
        """Whether there is a tensor whose learning rate does not stay at 0."""
        return not all(one.rate_stays_zero for one in self.looked_at)

    @functools.cached_property
    def led_back(self):
        """Minus the cosine of the steps of all weights and of what moves them after the step."""
        sums = self.watch.extra
        return sums.against / max(math.sqrt(sums.drift * sums.beside), 1e-300)

    @functools.cached_property
    def shrinks(self):
        """Whether what moves weights after the step makes them smaller, as a decay by hand."""
        # of all together: a bias that began at 0 is made smaller by each way back
        sums = self.watch.extra
        return sums.shrunk > 0.9 * math.sqrt(sums.drift * sums.shrinkable)

    @functools.cached_property
    def accumulators_lost(self):
        """{name of a state: [share of what it should take over that was not written, tensor by tensor]}, of
        torch's own optimisers that are no AdamW.
        """
        if not self.torchs:
            return {}
        found = {}
        for site, sums in self.watch.accumulators.items():
            tensors = map(sums.of, range(len(self.names)))
            found[site] = [max(one.unwritten(), one.lost_to_nearest) for one in tensors]
        return found

    @functools.cached_property
    def alive(self):
        """{number of a tensor: which entries of its sample ever had a gradient}; {} after few looks."""
        if self.watch.alive is None or self.watch.alive.looks < 3:
            return {}
        alive = self.watch.alive
        return dict(zip(alive.tensors, alive.entries.cpu().split(alive.lengths), strict=True))

    def total(self):
        """{site: share lost of what all tensors wanted}."""
        found = {}
        for site in MEASURED_SITES:
            wanted, lost = [], []
            for one in self.tensors:
                share = one.lost(site)
                if share is not None:
                    wanted_of_one = one.tally(site).wanted
                    wanted.append(wanted_of_one)
                    lost.append(wanted_of_one * share)
            if wanted:
                found[site] = sum(lost) / max(sum(wanted), 1e-300)
        return found


class Tensor:
    """What was measured of one tensor. averages: average_watch.AverageWatch that has its average."""

    may_be_copied = False  # whether its average may be set to the weights now and then

    def __init__(self, seen, i, averages):
        self.seen = seen
        self.i = i
        self.watch = watch = seen.watch
        self.name, self.p = watch.named[i]
        self.weight = watch.writes.weights.of(i)
        if getattr(watch.answers, "forms_v", True):
            self.moment, self.grown = watch.writes.moments.of(i), watch.writes.growth.of(i)
        else:  # sums of a stranger's second moment that is not Adam's say nothing
            self.moment, self.grown = Tally(), Tally()
        self.error = watch.errors.of(i)
        self.moment_error = watch.moment_errors.of(i)
        self.ema = averages.average
        self.average, self.averaging = averages.taken.of(i), averages.path.of(i)
        self.extra = watch.extra.of(i)
        self.change = watch.gradients.changes.of(i)  # of its gradient between backward and the step
        self.facts = watch.facts[i]

    @property
    def narrow(self):
        """Whether the weight is held in 16 bits."""
        return self.p.dtype in NARROW_DTYPES

    def tally(self, site):
        return {"update": self.weight, "exp_avg_sq": self.moment, "ema": self.average}[site]

    def shares(self):
        """{site: share lost}, of the sites that were measured."""
        found = {}
        for site in MEASURED_SITES:
            share = self.lost(site)
            if share is not None:
                found[site] = share
        return found

    def lost(self, site):
        """Share of the wanted movement that was not written for sure; None where nothing was wanted."""
        tally = self.tally(site)
        if not tally.entries:
            return None
        if site == "ema":
            if self.average_stands_by_rounding:
                return tally.lost_to_nearest
            return tally.unwritten()
        is_weight = site == "update"
        error = self.error if is_weight else self.moment_error
        if error.variance == 0:  # not plain 16 bits: fp32, a master, a compensation, codes
            if is_weight and not self.seen.known:
                return tally.lost
            return tally.unwritten()
        if self.to_nearest(error):
            return tally.lost_to_nearest
        return tally.unwritten(error.spread)

    def to_nearest(self, error):
        """Whether writes in 16 bits, of which these are the errors, go to nearest."""
        if not self.seen.by_chance:
            return True
        of_all = self.seen.weights_to_nearest if error is self.error else self.seen.moments_to_nearest
        return of_all if error.to_nearest is None else error.to_nearest

    @property
    def average_stands_by_rounding(self):
        """Whether an average in 16 bits stands where rounding to nearest would leave it."""
        return self.average.threatened > 0 and self.average.written < HARDLY_WRITTEN * self.average.threatened

    @property
    def average_dtype(self):
        shadow = self.ema.shadow
        return shadow[self.name].dtype if self.name in shadow else torch.float32

    @property
    def average_is_narrow(self):
        return self.average_dtype in NARROW_DTYPES

    @property
    def unmoved(self):
        """Share of the sampled entries that are as they were at the first look."""
        first = self.facts.first
        if first is None:
            return 0.0
        return float((self.watch.pick(self.p) == first).float().mean())

    @property
    def ones(self):
        """Share of the sampled entries that are exactly 1."""
        return float((self.watch.pick(self.p) == 1.0).float().mean())

    @property
    def rate_stays_zero(self):
        """Whether its learning rate was 0 at the last looks, for longer than a schedule takes to begin."""
        return self.facts.at_zero >= max(3, 0.25 * self.facts.looks)

    @property
    def v(self):
        """Its second moments, fp32 or bf16 [n]; None where there are none."""
        return self.watch.answers.moment(self.p, "exp_avg_sq", self.watch.pick)

    @property
    def eps_lost_in_fp16(self):
        """Its eps where a state of it is fp16, in which that is 0; 0.0 where it is not."""
        eps = self.watch.groups.get(self.p, {}).get("eps")
        if not isinstance(eps, (int, float)) or torch.tensor(float(eps)).half() > 0:
            return 0.0
        states = [value for name, value in self.watch.state(self.p).items() if accumulates(name, value)]
        return float(eps) if any(value.dtype == torch.float16 for value in states) else 0.0

    @property
    def counter_is_narrow(self):
        return self.facts.counted is not None and self.facts.counted[0] in NARROW_DTYPES
