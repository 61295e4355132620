"""What precision, telemetry, the ledger and the doctor ask of an optimiser, whatever its class.

`Answers` has a default for each question. `RoundedAnswers` answers for our own optimisers, from their state.

    p is a parameter, `name` that of a moment; pick: tensor -> flat tensor, all of it or a sample.

    held(p, pick)               the fp32 value that p stands for
    low_part(p)                 what completes p to that value
    moment(p, name, pick)       a moment, codes as the values they stand for
    coded(p, name)              whether the moment is held in codes
    decay(p, name)              how a moment decays
    decayed(p)                  how much of p weight decay takes
    wanted(p, g, pick)          the fp32 update that gradient g asks for, before any rounding
    wanted_together(...)        the same for several parameters
    nbytes(), notes()           bytes of state, and remarks, by site
    clear(p, name), still(p)    set a moment to zero; set to zero what moves p without a gradient
    set_exact(p, value)         let p hold a value
    reading()                   a context in which the weights are those to evaluate
    announce                    called before a step
    collecting                  what is called before gradients are read
"""

import math
from contextlib import nullcontext

import torch

from ..rounding import exact_weight, write_weight
from .buckets import local_tensor


def params_of(groups):
    """The parameters of parameter groups, in their order."""
    found = []
    for group in groups:
        found += group["params"]
    return found


# ---- Defaults ----------------------------------------------------------------------------------------------


class Answers:
    """A mixin for optimisers: the questions, with the answers of one of which nothing special is known."""

    by_recipe = True  # whether it writes as the recipe says; peers write in their own way
    by_rows = True  # whether it steps some rows of a tensor as it steps them all, see parts/spread.py
    compiled = False
    collecting: tuple = ()  # called at a step before gradients are read, by those that hang on these
    param_names: dict = {}  # {parameter: its name}, where they are known

    def low_part(self, p):
        """What completes weight p to the value held: remainder, bf16 compensation, fp32 master, or
        None.
        """
        return

    def held(self, p, pick=torch.flatten):
        """The fp32 value held for parameter p, flat."""
        return exact_weight(pick(local_tensor(p)), *map(pick, self._beside(p)))

    def _beside(self, p):
        """[what completes weight p], or []."""
        return [t for t in [self.low_part(p)] if t is not None]

    def moment(self, p, name, pick=torch.flatten):
        """A moment of p, flat: as held, or the fp32 values that its codes stand for; None where it has none.
        """
        return

    def coded(self, p, name):
        """Whether the moment of p is held in codes."""
        return False

    def decay(self, p, name):
        """(beta, t): the decay of a moment at the next step, NaN for one that it does not keep, and the steps
        that its bias correction counts.
        """
        return math.nan, 0

    def decayed(self, p):
        """Share of p that weight decay takes at each step: lr * weight decay."""
        group = self._group(p)
        return float(group["lr"]) * group.get("weight_decay", 0.0)

    def wanted(self, p, g, pick=torch.flatten):
        """The fp32 update that gradient g (flat, as `pick` takes it) asks of the next step, before any
        rounding; None where the state does not tell.
        """
        return

    def wanted_together(self, params, gradients, pick=torch.flatten, held=None):
        """[what `wanted` says of each parameter], NaN for None. held: what `held` says of all of them, flat,
        where that is known already.
        """
        found = []
        for p, g in zip(params, gradients, strict=True):
            update = self.wanted(p, g, pick)
            if update is None:
                update = torch.full_like(g, math.nan)
            found.append(update)
        return found

    def nbytes(self):
        """{site: bytes} of the state as allocated."""
        return {}

    def notes(self):
        """{site: text} that the ledger adds to its reasons."""
        return {}

    def clear(self, p, name):
        """Set the moment of p to zero, in place. False where that can't be done."""
        return False

    def still(self, p):
        """Set to zero what moves p without a gradient. False where that can't be done."""
        return self.clear(p, "exp_avg")

    def set_exact(self, p, value):
        """Let parameter p hold fp32 `value` (same shape) as exactly as it can."""
        p.copy_(value)

    def announce(self, grads, grad_scale):
        """Called before `wanted` is asked of the next step, with what that step will be given."""

    def reading(self):
        """A context in which the weights are those to evaluate. It gives whether these are others than those
        that are trained, as of schedule-free optimisers.
        """
        return nullcontext(False)

    def all_params(self):
        """The parameters of all groups, in their order."""
        return params_of(self.param_groups)

    def _group(self, p):
        for group in self.param_groups:
            if any(p is q for q in group["params"]):
                return group
        raise KeyError("a parameter of no group")


# ---- Ours --------------------------------------------------------------------------------------------------


class RoundedAnswers(Answers):
    """The answers of `Rounded`."""

    def moment(self, p, name, pick=torch.flatten):
        held = self._settled(p).get(name)
        if held is None:
            return None
        values = held.read(self.compiled).to(p.device)
        return pick(self.bucket_of[p].own_rows(values))

    def _settled(self, p):
        """{moment: state.Held} of p after the last step, wherever it is."""
        self.home.settle()
        state = self.state.get(p, {})
        for name, view, place in self.given_of.get(p, ()):  # its own alone: a bucket may have hundreds
            if state.get(name) is not view or view.data_ptr() != place:
                self.adopt_state(self.bucket_of[p])
                break
        return self.held_of.get(p, {})

    def coded(self, p, name):
        held = self.held_of.get(p, {}).get(name)
        return held is not None and held.keyed

    def decay(self, p, name):
        if name not in self.moments:
            return math.nan, 0
        return self._group(p)["betas"][self.moments.index(name)], self.steps_of(p)

    def steps_of(self, p):
        """How many steps p has behind it."""
        self._settled(p)
        return self.state.get(p, {}).get("step", 0)

    def wanted(self, p, g, pick=torch.flatten):
        return self.wanted_together([p], [g], pick)[0]

    def wanted_together(self, params, gradients, pick=torch.flatten, held=None):
        """As of Answers: the parameters of one group and step in one vector."""
        if not self.way.tells_update:
            return [torch.full_like(g, math.nan, dtype=torch.float32) for g in gradients]
        lengths = [g.numel() for g in gradients]
        held = [self.held(p, pick) for p in params] if held is None else held.split(lengths)
        found = [None] * len(params)
        for group, step, device, members in self._alike(params):
            numbers = self.numbers(group, step + 1)
            numbers = type(numbers)(*torch.tensor(numbers, dtype=torch.float32, device=device))
            g = torch.cat([gradients[i].float() for i in members])
            moments = []
            for name in self.moments:
                values = [self.moment(params[i], name, pick).float() for i in members]
                moments.append(torch.cat(values))
            update, _ = self.direction(g, moments, numbers)
            decay = float(group["lr"]) * group["weight_decay"]
            update = update - decay * torch.cat([held[i] for i in members])
            parts = update.split([lengths[i] for i in members])
            for i, part in zip(members, parts, strict=True):
                found[i] = part
        return found

    def _alike(self, params):
        """[(group, step, device, indices of the parameters that are alike in these)]."""
        group_of = {}
        for group in self.param_groups:
            group_of.update(dict.fromkeys(group["params"], group))
        found = {}
        for i, p in enumerate(params):
            group, step = group_of[p], self.steps_of(p)
            _, _, _, members = found.setdefault((id(group), step, p.device), (group, step, p.device, []))
            members.append(i)
        return list(found.values())

    def clear(self, p, name):
        held = self._settled(p).get(name)
        if held is None:
            return False
        held.clear()
        return True

    def still(self, p):
        moving = [name for name in self.moments if self.signed.get(name, True)]
        return all(self.clear(p, name) for name in moving)

    @torch.no_grad()
    def set_exact(self, p, value):
        write_weight(value.to(p.device, torch.float32), local_tensor(p), self.low_part(p))

    def nbytes(self):
        """{site: bytes} of the state as allocated: the moments, kahan and master; of a tensor that is spread
        over ranks, on all of them together.
        """
        total = dict.fromkeys([*self.moments, "kahan", "master"], 0)
        tables = {}  # that all tensors share
        for bucket in self.begun():
            for name, held in bucket.moments.items():
                total[name] += held.nbytes(bucket.whole)
                tables[name] = max(tables.get(name, 0), held.nbytes_of_tables(self.by_noise))
            for low in bucket.low.values():
                total[bucket.writing.way.site] += bucket.whole * low.element_size()
        for name, size in tables.items():
            total[name] += size
        return total

    def notes(self):
        whole = sum(p.numel() for p in self.bucket_of)
        found = dict.fromkeys(self.moments, "")
        for name, coder in self.coders.items():
            sizes = [math.prod(self.shape(p, name)) for p in self.bucket_of]
            plain = sum(n for n in sizes if n < coder.smallest)
            found[name] = f"; {plain:,} of {whole:,} in small tensors stay fp32"
        return {name: note + self.home.note() for name, note in found.items()}
