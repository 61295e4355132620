"""What the average took over between two looks of a Watch, and whether it was left behind."""

import torch


class AverageWatch:
    """average: averages.Average, or None. writes: writes.Writes, with its samples of the average before it
    moved. extra: facts.Steps, whose `stood` is counted here.
    """

    def __init__(self, average, writes, extra):
        self.average = average
        self.writes = writes
        self.extra = extra
        self.names = [name for name, _ in writes.named_params]
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

    def compare(self, step, last=False, held=None):
        """Compare the average, once it has moved. One that moves every few steps is waited for until the next
        look. step: of the loop. last: this is that look. held: what the optimiser holds now of all tensors of
        the look.
        """
        if self.average is None or not self.writes.shadows:
            return
        self.average.step = self.writes.step = step
        updated = self.count_now(step)
        if self.put_back:
            self.writes.forget()
            self.waiting = False
            return
        index, before = self.writes.shadows["ema"]
        shadow = self.average.shadow
        taken = [self.writes.pick(shadow[self.names[i]]) for i in index]
        stood = [torch.equal(now, then) for now, then in zip(taken, before, strict=True)]
        if all(stood) and not last:
            self.waiting = True
            return
        self.moves += self.count is not None and not all(stood)
        self._forget_stood(index, before, stood)
        if self.waiting:
            self._add_stood(index, before, stood, not updated and self._may_stand(step))
        else:
            look = self.writes.look
            of_all = look is not None and look.index == index
            self.writes.averaged(held if of_all else None, taken)
        self.waiting = False

    def _forget_stood(self, index, before, stood):
        """What stood, and has moved by now, moves rarely."""
        looks = self.extra.row("stood")
        for i, now, stands in zip(index, before, stood, strict=True):
            then = self.stood_at.pop(i, None)
            moved = then is not None and not (stands and torch.equal(then, now))
            if moved:
                looks[i] = 0.0
                self.moves_rarely = True
            if stands:
                self.stood_at[i] = now

    def _add_stood(self, index, before, stood, may_stand):
        """Count the tensors whose average was left behind: how many steps it took is not known."""
        self.writes.shadows = {}
        self.moves_rarely |= not all(stood)
        if all(stood) and may_stand:
            return
        looks = self.extra.row("stood")
        for i, then, has_stood in zip(index, before, stood, strict=True):
            p = self.writes.named_params[i][1]
            away = bool((self.writes.pick(p).float() != then.float()).any())
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
                    self.writes.last.clear()
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
