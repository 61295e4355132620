"""What a training step writes, against what fp32 arithmetic wanted to write.

An optimiser computes in fp32 and writes into fewer bits. `Writes` adds up, tensor by tensor, what fp32 wanted
and what was written. It knows no optimiser by name and asks three things (adapters.py lets anyone's answer):

    held(p, pick)           the fp32 value that it holds for parameter p
    moment(p, name, pick)   a moment in fp32 or bf16, decoded where it is codes; None where there is none
    wanted(p, g, pick)      the fp32 update that it wants before any rounding; None where it can't tell

`pick` takes a tensor to its flat sample. It is applied to every tensor that an answer is made of, so that an
answer about 4 billion entries costs what one about 65,536 does.
"""

import math

import torch

from ..telemetry import announce, sample_entries
from .sums import Sums, one_an_entry

# ---- Many steps, added up ----------------------------------------------------------------------------------


class Tally(Sums):
    """Of the entries of a site: the movement wanted, and what was written of it.

    A write is judged by sums, not entry by entry: stochastic rounding leaves most entries where they are and
    is right on average. `threatened` is the part of the wanted movement that rounding to nearest would lose,
    `written` and `error` what became of that part; `arrived` and `miss` what became of all of it.
    """

    fields = ("entries", "threatened_entries", "wanted", "threatened", "written", "error", "arrived", "miss")

    def add(self, stays, old, target, new, among=True, scale=1.0, *, index, lengths):
        """Add one write of [n] entries.

        stays: whether rounding the target to nearest may lose the move. old, target, new: fp32 values held
        before, wanted, and held after. among: the entries that count. scale: what a movement is measured in.
        index, lengths: see `Sums.put`.
        """
        step, moved = target - old, new - old
        if torch.is_tensor(scale):
            step, moved = step / scale, moved / scale
        # what is not finite times 0 is NaN
        counts = torch.addcmul(step * 0, moved, torch.zeros_like(moved)) == 0
        counts &= step != 0
        if torch.is_tensor(among):
            counts &= among
        threatened = counts & stays
        step, moved = step.where(counts, 0.0), moved.where(counts, 0.0)
        wanted = step.abs()
        arrived = moved.copysign(moved * step)  # against the step: below 0
        miss = (moved - step).square()
        rows = {
            "entries": counts,
            "threatened_entries": threatened,
            "wanted": wanted,
            "threatened": wanted.where(threatened, 0.0),
            "written": arrived.where(threatened, 0.0),
            "error": miss.where(threatened, 0.0),
            "arrived": arrived,
            "miss": miss,
        }
        self.put(rows, index, lengths)

    @property
    def lost(self):
        """Share of the wanted movement that was lost for sure: less 3 standard errors of what noise leaves
        uncertain.
        """
        noise = 3 * math.sqrt(self.error)
        return max(0.0, self.threatened - self.written - noise) / max(self.wanted, 1e-300)

    @property
    def lost_to_nearest(self):
        """The same where it is known that nothing is left to chance: rounding is to nearest."""
        return max(0.0, self.threatened - self.written) / max(self.wanted, 1e-300)

    def unwritten(self, spread=0.0):
        """Share of the wanted movement, large steps included, that was not written for sure: less 6 standard
        errors. spread: variance that chance alone accounts for where the optimiser rounds by it.
        """
        noise = 6 * math.sqrt(max(self.miss, spread))
        return max(0.0, self.wanted - self.arrived - noise) / max(self.wanted, 1e-300)

    @property
    def share(self):
        """Written over wanted: 1 where all is written."""
        return self.arrived / max(self.wanted, 1e-300)

    @property
    def stuck(self):
        """Share of the entries whose wanted step is under half an ulp."""
        return self.threatened_entries / max(1, self.entries)

    @property
    def kept(self):
        """Share of those steps, by size, that was written all the same."""
        return self.written / max(self.threatened, 1e-300)


def rounded_by_tensor(values, dtypes, lengths):
    """fp32 [n] rounded to nearest in the dtype of each tensor, as fp32."""
    if len(set(dtypes)) == 1:
        return values.to(dtypes[0]).float()
    parts = zip(values.split(lengths), dtypes, strict=True)
    return torch.cat([part.to(dtype).float() for part, dtype in parts])


class Look:
    """Flat fp32 samples of all tensors that one step writes, one after the other: before it, and after.

    rows: [(number of the tensor, parameter, its gradient [n], fp32)]. index, lengths: the number of each
    tensor and how many entries it has here. What can't be told is NaN. update: what is wanted of the weights;
    m: exp_avg, None for optimisers of this library; aim: what v should become; `after` adds new (the value
    held), new_m and new_v. moments: whether to look at v; else v and aim are None.
    """

    def __init__(self, optimizer, rows, pick, moments=True):
        self.optimizer = optimizer
        self.pick = pick
        self.index = [i for i, _, _ in rows]
        self.params = [p for _, p, _ in rows]
        gradients = [g for _, _, g in rows]
        self.lengths = [g.numel() for g in gradients]
        self.dtypes = [p.dtype for p in self.params]
        self.g = torch.cat(gradients)
        self.held = self._held()
        self.stored = self._stored()
        self.update = torch.cat(optimizer.wanted_together(self.params, gradients, pick, self.held))
        self.m = self._first_moments()
        self.codes = self.momentum_in_codes()
        self.v = self.new_v = self.aim = self.new = None
        if moments:
            self._aim(gradients)

    def _aim(self, gradients):
        self.v, self.v_dtypes = self.read("exp_avg_sq")  # a dtype of None: there is no such moment
        betas = [math.nan] * len(self.params)
        for k, p in enumerate(self.params):
            if self.v_dtypes[k] is not None:
                betas[k] = self.optimizer.decay(p, "exp_avg_sq")[0]
        beta = self.spread(betas)
        # in Python's float64: 1 - 0.999 in fp32 is off by 1e-5 of itself
        rest = self.spread([1 - beta for beta in betas])
        seen = self.g
        if hasattr(self.optimizer, "gradient"):  # with decay, where that is added to it
            pairs = zip(self.params, gradients, strict=True)
            seen = torch.cat([self.optimizer.gradient(p, g, self.pick) for p, g in pairs])
        self.aim = beta * self.v + rest * seen * seen

    def _stored(self):
        if torch.equal(rounded_by_tensor(self.held, self.dtypes, self.lengths), self.held):
            return self.held  # nothing completes these weights
        return torch.cat([self.pick(p).float() for p in self.params])

    def _held(self):
        return torch.cat([self.optimizer.held(p, self.pick) for p in self.params])

    def _first_moments(self):
        return self.read("exp_avg")[0] if hasattr(self.optimizer, "inner") else None

    def momentum_in_codes(self):
        """{k: momentum of tensor k, fp32 [n]}, of those in codes if the step orthogonalises it, as Muon's."""
        if "orthogonalise" not in getattr(self.optimizer, "sites", ()):
            return {}
        coded = {k: p for k, p in enumerate(self.params) if self.optimizer.coded(p, "momentum")}
        return {k: self.optimizer.moment(p, "momentum", self.pick).float().clone() for k, p in coded.items()}

    def read(self, name):
        """(a moment of all tensors, fp32 [n], NaN where there is none; [its dtypes])."""
        found = [self.optimizer.moment(p, name, self.pick) for p in self.params]
        missing = torch.full((max(self.lengths),), math.nan, device=self.g.device)
        parts = zip(found, self.lengths, strict=True)
        flat = torch.cat([missing[:n] if v is None else v.float() for v, n in parts])
        return flat, [None if v is None else v.dtype for v in found]

    def after(self):
        """Look again, once the step is done."""
        self.new = self._held()
        self.new_m = self._first_moments()
        if self.v is not None:
            self.new_v, _ = self.read("exp_avg_sq")

    def spread(self, values, dtype=torch.float32):
        """One value a tensor -> one an entry, [n]; 0-dim where all are the same."""
        return one_an_entry(values, self.lengths, self.g).to(dtype)


class Writes:
    """What the writes of several steps lost: Tallies of weights and of second moments, with one column a
    tensor of `named_params`.

    optimizer: answers `decay` and `coded` too (see Rounded). `before` is a pre-step hook of torch optimisers;
    call `after` once the step is done.
    """

    def __init__(self, optimizer, named_params, pick=sample_entries):
        self.optimizer = optimizer
        self.named_params = list(named_params)
        self.pick = pick
        count = len(self.named_params)
        self.weights = Tally(count)
        self.moments = Tally(count)  # second moments that shrink
        self.growth = Tally(count)  # second moments that grow
        self.look = None  # at the step that was begun; None where it has no gradients
        self.with_moments = True  # whether the next look compares second moments too

    @torch.no_grad()
    def before(self, optimizer, args, kwargs):
        """Look at what a step with these arguments is about to write."""
        grads = kwargs.get("grads")
        scale = kwargs.get("grad_scale", 1.0)
        announce(self.optimizer, grads, scale)
        rows = []
        for i, (_, p) in enumerate(self.named_params):
            g = p.grad if grads is None else grads.get(p)
            if g is None or g.is_sparse:
                continue
            sample = self.pick(g)
            if sample.numel():  # a rank may have no rows of a tensor
                factor = scale.get(p, 1.0) if isinstance(scale, dict) else scale
                rows.append((i, p, sample.float() * factor))
        self.look = Look(self.optimizer, rows, self.pick, self.with_moments) if rows else None

    @torch.no_grad()
    def after(self):
        """Compare it with what the optimiser wrote."""
        look = self.look
        if look is None or look.new is not None:  # of an earlier step, where a loss scaler skips this one
            return
        look.after()
        at = dict(index=look.index, lengths=look.lengths)
        target = look.held + look.update
        may_stay = rounded_by_tensor(target, look.dtypes, look.lengths) == look.stored
        self.weights.add(may_stay, look.held, target, look.new, **at)
        if look.v is not None and any(look.v_dtypes):
            self._add_moments(look, at)

    def _add_moments(self, look, at):
        dtypes = [dtype or torch.float32 for dtype in look.v_dtypes]
        # of codes all may stay: with its block's scale a code moves although it stays the same
        coded = look.spread([self.optimizer.coded(p, "exp_avg_sq") for p in look.params], torch.bool)
        may_stay = coded | (rounded_by_tensor(look.aim, dtypes, look.lengths) == look.v)
        shrinks = (look.aim < look.v) & (look.v > 1e-30)
        self.moments.add(may_stay, look.v, look.aim, look.new_v, shrinks, look.v.clamp_min(1e-30), **at)
        grows = look.aim > look.v
        self.growth.add(may_stay, look.v, look.aim, look.new_v, grows, look.aim.clamp_min(1e-30), **at)
