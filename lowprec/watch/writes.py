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
from .averages import fastest_rate, measured_rate, said_rate
from .sums import Sums, one_an_entry, totals

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


class Averaging(Sums):
    """Where averages are and where they go, a column a tensor. Of entries away from their weight, finite."""

    fields = (
        "looks",
        "entries",
        "infinite",  # entries that are not finite
        "away",  # entries that differed from their weight before the average moved
        "copied",  # those of them that equal it then
        "square",  # of the average
        "weight_square",
        "product",  # of the average and its weight
        # of entries more than 2 ulp from their weight, which a move may bring nearer:
        "gap_square",  # of the way from the average to its weight, before it moved
        "move_square",  # of what it moved
        "along",  # move times gap
        "path",  # the same without its sign
        "spread",  # the same squared
        "said",  # the rate that it should have, times the square of the gap
        "cosine",  # of the move and the gap, summed over the looks that follow
        "directed",  # looks at which there was a move and a gap
        "jumps",  # times it went much farther than its weight was away
        "jumped",  # how far at most, over the way to its weight
        "overtaken",  # looks by which it had gone much more of the way than its decay lets it
        "overtook",  # how much of the way at most
        "seen",  # of fp32 averages: entries that are not 0 and differ from their weight
        "bf16",  # those of them that are bf16 numbers, where their weight is none
    )

    def add(self, old, new, held, rounded, far, said, index, lengths):
        """Add a move of averages: fp32 [n] before and after, their weights, these in the average's dtype, and
        which are far from their weight. said: the rate that it should have; 0.0 where nobody says.
        """
        away = old != rounded
        finite = old.isfinite() & new.isfinite() & held.isfinite()
        none = torch.zeros_like(old)
        old, new, held = (torch.where(finite, side, none) for side in (old, new, held))
        gap, move = (held - old).where(far, 0.0), (new - old).where(far, 0.0)
        along = move * gap
        differs = finite & (new != 0) & (new != held)
        rows = {
            "looks": one_an_entry([1 / n for n in lengths], lengths, old).expand_as(old),
            "entries": torch.ones_like(old),
            "infinite": ~finite,
            "away": away,
            "copied": away & (new == rounded),
            "square": new.square(),
            "weight_square": held.square(),
            "product": new * held,
            "gap_square": gap.square(),
            "move_square": move.square(),
            "along": along,
            "path": along.abs(),
            "spread": along.square(),
            "said": said * gap.square(),
            "seen": differs,
            "bf16": differs & (new.bfloat16().float() == new) & (held.bfloat16().float() != held),
        }
        sums = self.put(rows, index, lengths)
        size = (sums["gap_square"] * sums["move_square"]).sqrt()
        self.row("cosine")[index] += (sums["along"] / size.clamp_min(1e-300)).where(size > 0, 0.0)
        self.row("directed")[index] += (size > 0).double()

    def compare(self, now, then, ways, index, lengths):
        """Compare averages with what they were, fp32 [n]: they go no farther than their weights are away.
        ways: from the averages then to their weights then and now, [n] each.
        """
        squares = totals([(now - then).square(), then.square(), *[way.square() for way in ways]], lengths)
        jump, size, *reach = squares.sqrt()
        reach = sum(reach)
        jumps = (jump > 1.5 * reach) & (jump > 0.1 * size)
        self.sums = self.sums.to(now.device)
        self.row("jumps")[index] += jumps.double()
        farthest = torch.where(jumps, jump / reach.clamp_min(1e-300), 0.0)
        self.row("jumped")[index] = torch.maximum(self.row("jumped")[index], farthest)

    def overtake(self, now, then, ways, index, lengths):
        """Compare averages that have moved before with where they were, fp32 [n]: their decay lets them go
        less than a quarter of the way to their weights, then or now. ways: as of `compare`.
        """
        before, way = ways
        along, size, other = totals([(now - then) * way, way.square(), before.square()], lengths)
        longer = torch.maximum(size, other) * size
        part = torch.where(longer > 0, along / longer.sqrt().clamp_min(1e-300), 0.0)
        moved = self.row("move_square")[index] > 0
        taken = (part > 0.5) & moved
        self.row("overtaken")[index] += taken.double()
        part = torch.where(taken, part, 0.0)
        self.row("overtook")[index] = torch.maximum(self.row("overtook")[index], part)


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
    aim: what v should become; `after` adds new (the value held) and new_v. moments: whether to look at v;
    else v and aim are None.
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
        self.update = torch.cat(self._wanted(gradients))
        self.v = self.new_v = self.aim = None
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

    def _wanted(self, gradients):
        together = getattr(self.optimizer, "wanted_together", None)
        if together is not None:
            return together(self.params, gradients, self.pick, self.held)
        found = []
        for p, g in zip(self.params, gradients, strict=True):
            update = self.optimizer.wanted(p, g, self.pick)
            found.append(torch.full_like(g, math.nan) if update is None else update)
        return found

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
        if self.v is not None:
            self.new_v, _ = self.read("exp_avg_sq")

    def spread(self, values, dtype=torch.float32):
        """One value a tensor -> one an entry, [n]; 0-dim where all are the same."""
        return one_an_entry(values, self.lengths, self.g).to(dtype)


class Writes:
    """What the writes of several steps lost: Tallies of weights, of second moments and of each average, with
    one column a tensor of `named_params`.

    optimizer: answers `decay` and `coded` too (see Rounded). averages: {name: EMA, or what has
    its `shadow` and `decay`, which may be None}. `before` is a pre-step hook of torch optimisers; call
    `after` once the averages have been updated, or `stepped` after the step and `averaged` after the average.
    """

    def __init__(self, optimizer, named_params, averages, pick=sample_entries):
        self.optimizer = optimizer
        self.named_params = list(named_params)
        self.ema = averages
        self.pick = pick
        count = len(self.named_params)
        self.weights = Tally(count)
        self.moments = Tally(count)  # second moments that shrink
        self.growth = Tally(count)  # second moments that grow
        self.averages = {name: Tally(count) for name in averages}
        self.averaging = {name: Averaging(count) for name in averages}
        # {name of an average: (numbers of its tensors, it and its weights at the last look, the step of that,
        # the fastest rate that it may have had)}
        self.last = {}
        self.step = 0  # of the loop
        self.forget()
        self.at = {"moments", "averages"}  # what the next look compares, beside weights

    def forget(self):
        """Forget the step that was begun."""
        self.look = None
        self.shadows = {}  # {name of an average: (numbers of its tensors, their samples)}

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
        self.look = Look(self.optimizer, rows, self.pick, "moments" in self.at) if rows else None
        if "averages" in self.at:
            for name, average in self.ema.items():
                self.shadows[name] = self._shadow(average)

    def _shadow(self, average):
        """(numbers of the tensors that the average has, their samples, cloned)."""
        shadow = average.shadow
        index, samples = [], []
        for i, (name, _) in enumerate(self.named_params):
            if name not in shadow:
                continue
            sample = self.pick(shadow[name])
            if sample.numel():
                index.append(i)
                samples.append(sample.clone())
        return index, samples

    @torch.no_grad()
    def after(self):
        """Compare it with what was written."""
        self.stepped()
        self.averaged()

    @torch.no_grad()
    def stepped(self):
        """Compare what the optimiser wrote."""
        look = self.look
        if look is None:
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

    @torch.no_grad()
    def averaged(self, held=None, now=None):
        """Compare what the averages took over. Entries within 2 ulp of their weight are left out: they are as
        near to it as their format lets them be.

        held, now: what the optimiser holds of the tensors that the only average has, flat, and their samples
        in the average, where that is known already.
        """
        for name, (index, before) in self.shadows.items():
            if index:
                self._add_average(name, index, before, held, now)
        self.forget()

    def _add_average(self, name, index, before, held, now):
        average = self.ema[name]
        named = [self.named_params[i] for i in index]
        lengths = [t.numel() for t in before]
        dtypes = [t.dtype for t in before]
        if held is None:
            parts = [
                self.optimizer.held(p, self.pick).to(t.device)
                for (_, p), t in zip(named, before, strict=True)
            ]
            held = torch.cat(parts)
        if now is None:
            shadow = average.shadow
            now = [self.pick(shadow[key]) for key, _ in named]
        old = torch.cat([t.float() for t in before])
        new = torch.cat([t.float() for t in now])
        rounded = rounded_by_tensor(held, dtypes, lengths)
        gap = held - old
        ulps = one_an_entry([torch.finfo(dtype).eps for dtype in dtypes], lengths, old) * old.abs()
        far = gap.abs() > 2 * ulps
        narrow = any(dtype.itemsize < 4 for dtype in dtypes)
        rate = measured_rate(old, new, gap, narrow)
        said = said_rate(average, rate)
        then, average_then, held_then, step, rate_then = self.last.get(name, (None, None, None, 0, 0.0))
        # where nobody says, the highest that was ever seen
        fastest = fastest_rate(average) or max(rate, rate_then)
        if then == index and average_then.shape == old.shape:
            ways = [held_then - average_then, held - average_then]
            self.averaging[name].compare(old, average_then, ways, index, lengths)
            most = 1 - (1 - min(1.0, max(fastest, rate_then, 0.0))) ** (self.step - step)
            if most < 0.25 and not narrow:
                self.averaging[name].overtake(old, average_then, ways, index, lengths)
        self.averaging[name].compare(new, old, [gap], index, lengths)
        self.averaging[name].add(old, new, held, rounded, far, said or 0.0, index, lengths)
        self.last[name] = index, new, held, self.step, fastest
        if torch.equal(new, rounded):
            return  # it took the weights as they are, as most averages do at their first step
        target = old + (rate if said is None else said) * gap
        may_stay = rounded_by_tensor(target, dtypes, lengths) == old
        self.averages[name].add(may_stay, old, target, new, far, index=index, lengths=lengths)
