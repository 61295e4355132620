"""What a training step writes, against what fp32 arithmetic wanted to write.

    report = StepReport(optimizer, grads, scale, named_params, shadow)
    optimizer.step(grads=grads, grad_scale=scale)
    print(report.written())                     # {'update_survival': 0.53, 'update_ratio': 0.0021, ...}
    average.update()
    print(report.averaged())                    # {'ema_moved': 1.0}

An optimiser computes in fp32 and writes into fewer bits. What fp32 wanted is compared with what was written:
`StepReport` counts the entries of one step, for a run's telemetry; `Writes` adds up the movement of several,
tensor by tensor, for the doctors. Both ask an optimiser three of its five questions (see Rounded) and
know no optimiser by name:

    held(p, pick)           the fp32 value that it holds for parameter p
    moment(p, name, pick)   a moment in fp32 or bf16, decoded where it is codes; None where there is none
    wanted(p, g, pick)      the fp32 update that it wants before any rounding; None where it can't tell

`pick` is a function tensor -> flat sample. It is applied to every tensor that an answer is made of, so that
an answer about 4 billion entries costs what one about 65,536 does. `adapters.py` makes anyone's optimiser
answer.
"""

import functools
import math

import torch

from ..optimizers.buckets import scale_of
from ..telemetry import announce, sample

# ---- Many steps, added up ----------------------------------------------------------------------------------


class Sums:
    """Sums over the entries of several tensors, one column a tensor: `sums` is float64 [fields, tensors].

    They stay on their device until they are asked for.
    """

    fields = ()

    def __init__(self, tensors=1):
        self.sums = torch.zeros(len(self.fields), tensors, dtype=torch.float64)

    def put(self, rows, index=None, lengths=None, first=0):
        """Add rows, one [n] for each field from `first` on: lengths[0] entries of tensor index[0], and so on.
        """
        if lengths is None:
            index, lengths = [0], [rows[0].numel()]
        found = totals(rows, lengths)
        self.sums = self.sums.to(found.device)
        self.sums[first : first + len(rows), index] += found

    def of(self, tensor):
        """The same sums of one tensor alone."""
        one = type(self)()
        one.sums = self.sums[:, tensor : tensor + 1]
        return one

    def columns(self):
        """The sums of each tensor, a list; brought to the CPU together."""
        self.sums = self.sums.cpu()
        return [self.of(i) for i in range(self.sums.shape[1])]

    def __getattr__(self, name):
        if name.startswith("_") or name not in type(self).fields:
            raise AttributeError(name)
        return float(self.sums[self.fields.index(name)].sum())


def totals(rows, lengths):
    """Rows [n] of any dtype -> float64 [rows, tensors]: sums over the entries of each tensor."""
    table = torch.empty(len(rows), rows[0].numel(), device=rows[0].device)  # fp32: torch sums in a tree
    for i, row in enumerate(rows):
        table[i] = row
    return torch.stack([part.sum(1) for part in table.split(lengths, 1)], 1).double()


class Tally(Sums):
    """Of the entries of a site: the movement wanted, and what was written of it.

    A write is judged by sums, not entry by entry: stochastic rounding leaves most entries where they are and
    is right on average. `threatened` is the part of the wanted movement that rounding to nearest would lose,
    `written` and `error` what became of that part; `arrived` and `miss` what became of all of it.
    """

    fields = ("entries", "threatened_entries", "wanted", "threatened", "written", "error", "arrived", "miss")

    def add(self, stays, old, target, new, among=True, scale=1.0, index=None, lengths=None):
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
        among, threatened = counts, counts & stays
        step, moved = step.where(among, 0.0), moved.where(among, 0.0)
        size, along, miss = step.abs(), moved.copysign(moved * step), (moved - step).square()
        of_threatened = [row.where(threatened, 0.0) for row in (size, along, miss)]
        self.put([among, threatened, size, *of_threatened, along, miss], index, lengths)

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

    def unwritten(self, spread=0.0, sure=6):
        """Share of the wanted movement, large steps included, that was not written for sure: less `sure`
        standard errors. spread: variance that chance alone accounts for where the optimiser rounds by it.
        """
        noise = sure * math.sqrt(max(self.miss, spread))
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


class Squares(Sums):
    fields = ("square", "steps")  # means of g^2, one a step; steps that were added


def rounded(values, dtypes, lengths):
    """fp32 [n] rounded to nearest in the dtype of each tensor, as fp32."""
    if len(set(dtypes)) == 1:
        return values.to(dtypes[0]).float()
    parts = zip(values.split(lengths), dtypes, strict=True)
    return torch.cat([part.to(dtype).float() for part, dtype in parts])


def each(values, lengths, like):
    """One number a tensor -> one an entry, fp32 on the device of `like`; 0-dim where all are the same."""
    if len(set(values)) == 1:
        return torch.tensor(values[0], dtype=torch.float32, device=like.device)
    values = torch.tensor(values, dtype=torch.float32, device=like.device)
    return values[_numbers(tuple(lengths), like.device)]


@functools.lru_cache(4)
def _numbers(lengths, device):
    """int64 [n]: which tensor an entry is of."""
    lengths = torch.tensor(lengths, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths)


class Look:
    """Flat fp32 samples of all tensors that one step writes, one after the other: before it, and after.

    rows: [(number of the tensor, parameter, its gradient [n], fp32)]. index, lengths: the number of each
    tensor and how many entries it has here. What can't be told is NaN. update: what is wanted of the weights;
    aim: what v should become; `after` adds new (the value held) and new_v. moments: whether to look at v;
    else v and aim are None.
    """

    def __init__(self, optimizer, rows, pick, moments=True):
        self.optimizer, self.pick = optimizer, pick
        self.index, self.params = [i for i, _, _ in rows], [p for _, p, _ in rows]
        gradients = [g for _, _, g in rows]
        self.lengths = [g.numel() for g in gradients]
        self.dtypes = [p.dtype for p in self.params]
        self.g = torch.cat(gradients)
        self.number = _numbers(tuple(self.lengths), self.g.device)
        self.held = self._held()
        self.stored = self._stored()
        self.update = torch.cat(self._wanted(gradients))
        self.v = self.new_v = self.aim = None
        if moments:
            self._aim(gradients)

    def _aim(self, gradients):
        optimizer, pick = self.optimizer, self.pick
        self.v, self.v_dtypes = self._v()  # a dtype of None: there is no such moment
        of = zip(self.params, self.v_dtypes, strict=True)
        betas = [math.nan if dtype is None else optimizer.decay(p, "exp_avg_sq")[0] for p, dtype in of]
        # in Python's float64: 1 - 0.999 in fp32 is off by 1e-5 of itself
        beta, rest = self.spread(betas), self.spread([1 - beta for beta in betas])
        seen = self.g
        if hasattr(optimizer, "gradient"):  # with decay, where that is added to it
            pairs = zip(self.params, gradients, strict=True)
            seen = torch.cat([optimizer.gradient(p, g, pick) for p, g in pairs])
        self.aim = beta * self.v + rest * seen * seen

    def _stored(self):
        if torch.equal(rounded(self.held, self.dtypes, self.lengths), self.held):
            return self.held  # nothing completes these weights
        return torch.cat([self.pick(p).float() for p in self.params])

    def _held(self):
        return torch.cat([self.optimizer.held(p, self.pick) for p in self.params])

    def _wanted(self, gradients):
        together = getattr(self.optimizer, "wanted_together", None)
        if together is not None:
            return together(self.params, gradients, self.pick, self.held)
        updates = [
            self.optimizer.wanted(p, g, self.pick) for p, g in zip(self.params, gradients, strict=True)
        ]
        return [
            torch.full_like(g, math.nan) if update is None else update
            for update, g in zip(updates, gradients, strict=True)
        ]

    def _v(self):
        found = [self.optimizer.moment(p, "exp_avg_sq", self.pick) for p in self.params]
        missing = torch.full((max(self.lengths),), math.nan, device=self.g.device)
        parts = zip(found, self.lengths, strict=True)
        flat = torch.cat([missing[:n] if v is None else v.float() for v, n in parts])
        return flat, [None if v is None else v.dtype for v in found]

    def after(self):
        """Look again, once the step is done."""
        self.new = self._held()
        if self.v is not None:
            self.new_v, _ = self._v()

    def spread(self, values, dtype=torch.float32):
        """One value a tensor -> one an entry."""
        return each(values, self.lengths, self.g).to(dtype)


class Writes:
    """What the writes of several steps lost: Tallies of weights, of second moments and of each average, with
    one column a tensor of `named_params`.

    optimizer: answers `decay` and `coded` too (see Rounded). averages: {name: EMA, or what has
    its `shadow` and `decay`, which may be None}. `before` is a pre-step hook of torch optimisers; call
    `after` once the averages have been updated, or `stepped` after the step and `averaged` after the average.
    """

    def __init__(self, optimizer, named_params, averages, pick=sample):
        self.optimizer, self.named_params, self.ema, self.pick = optimizer, list(named_params), averages, pick
        count = len(self.named_params)
        self.weights, self.moments, self.growth = Tally(count), Tally(count), Tally(count)
        self.averages = {name: Tally(count) for name in averages}
        self.squares = Squares(count)
        self.look, self.shadows = None, {}
        self.at = {"moments", "averages"}  # what the next look compares, beside weights

    @torch.no_grad()
    def before(self, optimizer, args, kwargs):
        """Look at what a step with these arguments is about to write."""
        grads = kwargs.get("grads")
        scale = kwargs.get("grad_scale", 1.0)
        announce(self.optimizer, grads, scale)
        rows = []
        for i, (_, p) in enumerate(self.named_params):
            g = p.grad if grads is None else grads.get(p)
            if g is not None and not g.is_sparse and p.numel():
                rows.append((i, p, self.pick(g).float() * scale_of(scale, p)))
        self.look = Look(self.optimizer, rows, self.pick, "moments" in self.at) if rows else None
        for name, average in self.ema.items() if "averages" in self.at else ():
            self.shadows[name] = self._shadow(average)

    def _shadow(self, average):
        """(numbers of the tensors that the average has, their samples, cloned)."""
        shadow = average.shadow
        here = [(i, shadow[key]) for i, (key, _) in enumerate(self.named_params) if key in shadow]
        return [i for i, _ in here], [self.pick(t).clone() for _, t in here]

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
        stays = rounded(target, look.dtypes, look.lengths) == look.stored
        self.weights.add(stays, look.held, target, look.new, **at)
        if look.v is None or not any(look.v_dtypes):
            return
        dtypes = [dtype or torch.float32 for dtype in look.v_dtypes]
        # of codes all may stay: with its block's scale a code moves although it stays the same
        coded = look.spread([self.optimizer.coded(p, "exp_avg_sq") for p in look.params], torch.bool)
        may_stay = coded | (rounded(look.aim, dtypes, look.lengths) == look.v)
        floor = look.v.clamp_min(1e-30)
        shrinks = (look.aim < look.v) & (look.v > 1e-30)
        self.moments.add(may_stay, look.v, look.aim, look.new_v, shrinks, floor, **at)
        grows = look.aim > look.v
        self.growth.add(may_stay, look.v, look.aim, look.new_v, grows, look.aim.clamp_min(1e-30), **at)
        share = look.spread([1 / n for n in look.lengths])
        self.squares.put([look.g.square() * share, share], **at)

    @torch.no_grad()
    def averaged(self, held=None, now=None):
        """Compare what the averages took over. Entries within 2 ulp of their weight are left out: they are as
        near to it as their format lets them be.

        held, now: what the optimiser holds of the tensors that the only average has, flat, and their samples
        in the average, where that is known already.
        """
        for name, (index, before) in self.shadows.items():
            if not index:
                continue
            average, shadow = self.ema[name], self.ema[name].shadow
            named = [self.named_params[i] for i in index]
            lengths = [t.numel() for t in before]
            weights = held
            if weights is None:
                pairs = zip(named, before, strict=True)
                weights = torch.cat([self.optimizer.held(p, self.pick).to(b.device) for (_, p), b in pairs])
            old = torch.cat([b.float() for b in before])
            taken = now or [self.pick(shadow[key]) for key, _ in named]
            dtypes = [b.dtype for b in before]
            new, gap = torch.cat([t.float() for t in taken]), weights - old
            if torch.equal(new, rounded(weights, dtypes, lengths)):
                continue  # it took the weights as they are, as most averages do at their first step
            rate = measured_rate(old, new, gap) if average.decay is None else 1 - average.decay
            target = old + rate * gap
            far = gap.abs() > 2 * each([torch.finfo(dtype).eps for dtype in dtypes], lengths, old) * old.abs()
            kept = rounded(target, dtypes, lengths) == old
            self.averages[name].add(kept, old, target, new, far, index=index, lengths=lengths)
        self.look, self.shadows = None, {}

    def excess(self):
        """The second moments over the mean of g^2: 1 when they are right, None where there are none.

        It is the geometric mean of the tensors' ratios, weighted by size: single entries are too noisy.
        """
        logs, entries = 0.0, 0
        for (_, p), squares in zip(self.named_params, self.squares.columns(), strict=True):
            if not squares.steps:
                continue
            v = self.optimizer.moment(p, "exp_avg_sq", self.pick)
            if v is None:
                continue
            beta, t = self.optimizer.decay(p, "exp_avg_sq")
            v, g = float(v.double().mean()) / (1 - beta**t), squares.square / squares.steps
            if v > 0 and g > 0:
                logs += p.numel() * math.log(v / g)
                entries += p.numel()
        return math.exp(logs / entries) if entries else None


def measured_rate(old, new, gap):
    """The share of its distance that an average went, where nobody says: the median of the entries that
    moved. 0.0 where none did.
    """
    moved = (new != old) & (gap != 0)
    ratios = ((new - old) / gap)[moved]
    return float(ratios.median()) if ratios.numel() else 0.0
