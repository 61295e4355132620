"""What an average takes over from the weights, against what its decay says; whether it was left behind."""

import torch

from ..telemetry import sample_entries
from .averages import fastest_rate, measured_rate, said_rate
from .sums import Sums, one_an_entry, totals
from .writes import Tally, rounded_by_tensor


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
        "stood",  # looks between which it did not move, although away from its weight
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


class AverageWrites:
    """What the moves of an average took over, a column a tensor of `named_params`: `taken`, a Tally, and
    `path`, an Averaging.

    average: averages.Average. optimizer: says what it holds of a parameter. Called as Writes.
    """

    def __init__(self, average, optimizer, named_params, pick=sample_entries):
        self.average = average
        self.optimizer = optimizer
        self.named_params = list(named_params)
        self.pick = pick
        self.taken = Tally(len(self.named_params))
        self.path = Averaging(len(self.named_params))
        # (numbers of its tensors, it and its weights at the last move, the step of that, the fastest rate
        # that it may have had)
        self.last = None
        self.forget()

    def forget(self):
        """Forget what was remembered."""
        self.remembered = None  # (numbers of the tensors that it has, their samples before it moved)

    @torch.no_grad()
    def before(self, *_):
        """Look at it before it moves; a pre-step hook, as that of Writes."""
        shadow = self.average.shadow
        index, samples = [], []
        for i, (name, _) in enumerate(self.named_params):
            if name not in shadow:
                continue
            sample = self.pick(shadow[name])
            if sample.numel():
                index.append(i)
                samples.append(sample.clone())
        self.remembered = index, samples

    @torch.no_grad()
    def after(self, held=None):
        """Compare it with that, once it has moved. Entries within 2 ulp of their weight are left out: they
        are as near to it as their format lets them be.

        held: (numbers of tensors, what the optimiser holds of them, flat), where that is known already.
        """
        index, before = self.remembered or ([], [])  # none of a step that a loss scaler skips
        self.forget()
        if not index:
            return
        named = [self.named_params[i] for i in index]
        lengths = [t.numel() for t in before]
        dtypes = [t.dtype for t in before]
        known, held = held or (None, None)
        if known != index:
            parts = [
                self.optimizer.held(p, self.pick).to(t.device)
                for (_, p), t in zip(named, before, strict=True)
            ]
            held = torch.cat(parts)
        shadow = self.average.shadow
        old = torch.cat([t.float() for t in before])
        new = torch.cat([self.pick(shadow[name]).float() for name, _ in named])
        rounded = rounded_by_tensor(held, dtypes, lengths)
        gap = held - old
        ulps = one_an_entry([torch.finfo(dtype).eps for dtype in dtypes], lengths, old) * old.abs()
        far = gap.abs() > 2 * ulps
        narrow = any(dtype.itemsize < 4 for dtype in dtypes)
        rate = measured_rate(old, new, gap, narrow)
        said = said_rate(self.average, rate)
        then, average_then, held_then, step, rate_then = self.last or (None, None, None, 0, 0.0)
        # where nobody says, the highest that was ever seen
        fastest = fastest_rate(self.average) or max(rate, rate_then)
        if then == index and average_then.shape == old.shape:
            ways = [held_then - average_then, held - average_then]
            self.path.compare(old, average_then, ways, index, lengths)
            most = 1 - (1 - min(1.0, max(fastest, rate_then, 0.0))) ** (self.average.step - step)
            if most < 0.25 and not narrow:
                self.path.overtake(old, average_then, ways, index, lengths)
        self.path.compare(new, old, [gap], index, lengths)
        self.path.add(old, new, held, rounded, far, said or 0.0, index, lengths)
        self.last = index, new, held, self.average.step, fastest
        if torch.equal(new, rounded):
            return  # it took the weights as they are, as most averages do at their first step
        target = old + (rate if said is None else said) * gap
        may_stay = rounded_by_tensor(target, dtypes, lengths) == old
        self.taken.add(may_stay, old, target, new, far, index=index, lengths=lengths)


class AverageWatch(AverageWrites):
    """An average between two looks of a Watch."""

    def __init__(self, average, optimizer, named_params, pick):
        super().__init__(average, optimizer, named_params, pick)
        self.waiting = False  # for an average that did not move at the step of the look
        self.moves_rarely = False  # it moved between two looks all the same
        self.stood_at = {}  # {number of a tensor: its sample where it stood last}
        self.count = None  # what its own counter says; None where it has none
        self.fell = None  # (what it said, a smaller number that it said later)
        self.put_back = False  # whether it fell to what an earlier average counted
        self.counts_up = False  # whether it ever said more
        self.moves = 0  # looks at which the average moved, where there is a counter
        self.counted_at = 0  # the step that changed the counter last
        self.longest_pause = 0  # the most steps between two changes

    def forget(self):
        super().forget()
        self.waiting = False

    def follow(self, step, last=False, held=None):
        """Compare the average, once it has moved. One that moves every few steps is waited for until the next
        look. step: of the loop. last: this is that look. held: see `after`.
        """
        if self.remembered is None:
            return
        self.average.step = step
        updated = self.count_now(step)
        if self.put_back:
            self.forget()
            return
        stood = self.stood()
        if all(stood) and not last:
            self.waiting = True
            return
        self.moves += self.count is not None and not all(stood)
        self._forget_stood(stood)
        if self.waiting:
            self.add_stood(stood, not updated and self._may_stand(step))
        else:
            self.after(held)

    def stood(self):
        """[Whether each tensor that is remembered is as it was]."""
        index, before = self.remembered
        shadow = self.average.shadow
        now = [self.pick(shadow[self.named_params[i][0]]) for i in index]
        return [torch.equal(*pair) for pair in zip(now, before, strict=True)]

    def _forget_stood(self, stood):
        """What stood, and has moved by now, moves rarely."""
        index, before = self.remembered
        looks = self.path.row("stood")
        for i, now, stands in zip(index, before, stood, strict=True):
            then = self.stood_at.pop(i, None)
            moved = then is not None and not (stands and torch.equal(then, now))
            if moved:
                looks[i] = 0.0
                self.moves_rarely = True
            if stands:
                self.stood_at[i] = now

    def add_stood(self, stood, may_stand):
        """Count the tensors whose average was left behind: how many steps it took is not known. stood: [bool
        of each that is remembered]. may_stand: whether all of them may.
        """
        index, before = self.remembered
        self.forget()
        self.moves_rarely |= not all(stood)
        if all(stood) and may_stand:
            return
        looks = self.path.row("stood")
        for i, then, has_stood in zip(index, before, stood, strict=True):
            p = self.named_params[i][1]
            away = bool((self.pick(p).float() != then.float()).any())
            looks[i] += float(has_stood and away)

    def count_now(self, step):
        """Notice that the average's counter has changed. Returns whether it counts an update since."""
        count = self.average.counts()
        self.put_back = False
        if count == self.count:
            return False
        if self.count is not None:
            self.counts_up = True
            if count is not None and count < self.count:
                self.put_back = count > step - self.counted_at
                if self.put_back:
                    self.last = None
                else:
                    self.fell = self.count, count
            self.longest_pause = max(self.longest_pause, step - self.counted_at)
        counts_more = self.count is not None and count is not None and count > self.count
        self.count, self.counted_at = count, step
        return counts_more and self.average.counts_updates

    def _may_stand(self, step):
        """Whether all of the average may stand between two looks: SWA moves once an epoch."""
        if self.count is None:
            return self.moves_rarely
        return step - self.counted_at <= self.longest_pause
