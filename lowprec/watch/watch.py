"""Watch anyone's training loop: which tensors lose what their optimiser and their average want to write.

    watch = Watch(model, optimizer, ema=ema)     # any torch optimiser, any loop
    ...                                          # train as ever
    print(watch)                                 # a line for each tensor that loses something, worst first

It hangs on the optimiser's step and looks at one step in `every`, on samples of at most 8,192 entries a
tensor, fewer in small nets, that come from all rows and columns alike. The training keeps its bits: nothing
is written, and no random number of the process is drawn. A figure is named only where it is certain: what
chance can explain is not. `bench.py watch` shows what it costs.

    watch.findings()      the same for a program: a list of verdicts.Finding, the worst first
    watch.shares()        {tensor: {"update": share lost, "exp_avg_sq": ..., "ema": ...}}
    watch.remove()        takes it off the optimiser

For gradients that a closure computes (Lightning) it looks once the closure is done. Copy it with writes,
write_errors, adapters, net_state, verdicts, verdict_rows and the files that peers needs.
"""

import functools
import itertools
import math
import sys

import torch

from ..errors import Refused
from ..telemetry import StepReport, sample, stays
from . import findings, net_state
from .adapters import Average, answering, check_states, grad_scale, hooked, renew, skips, steps_of
from .verdicts import Diagnosis
from .write_errors import Errors
from .writes import Sums, Tally, Writes, totals

__all__ = ["StepReport", "Tally", "Watch", "Writes", "sample", "stays"]

MOST, LEAST = 1 << 12, 5 << 9  # entries of a tensor's sample, see telemetry.sample


class Steps(Sums):
    """What else is counted in a look, a column a tensor."""

    fields = (
        "decay",  # sum of (written - the rest of what was wanted) times the decay wanted
        "decay_wanted",  # sum of the decay wanted, squared
        "decay_error",  # variance of `decay`
        "infinite",  # gradients that are not finite
        "graded",  # gradients that are not 0
        "judged",  # those of looks at the second moment
        "faint",  # those of them whose second moment is below the optimiser's eps, squared
        "subnormal",  # those of an fp16 product that have lost bits or nearly all
        "moved",  # weights that the step changed, of looks that were followed to the next step
        "back",  # those of them that were put back before the next step
        "masked",  # those of these that were put back to 0, or to the bound of all: masks, WGAN's clipping
        "stood",  # looks between which the average did not move, although away from its weight
    )


class Facts:
    """What is remembered of one tensor beside sums."""

    def __init__(self):
        self.first = None  # its sample at the first look
        self.looks = self.idle = 0  # looks with a gradient, and with one that is 0 everywhere
        self.without = 0  # looks without one
        self.rates = set()  # its learning rates
        self.at_zero = self.zero_since = 0  # the last looks at which that was 0, and the step of the first
        self.v_dtype = self.cast = None  # dtype of exp_avg_sq at first; (old, new) once it got narrower
        self.v_reset = None  # (step, share of exp_avg_sq below what beta2 leaves of it; None for all 0)
        self.counter = None  # what its step counter said first, and our own count then
        self.counted = None  # (dtype of the counter, looks in which it did not count, its last value)
        self.behind = 0  # how many steps less than we it has counted
        self.fell = None  # (a count, a later and smaller one)
        self.before = None  # the counter before a step


class Watch:
    """See above. model: the net that the optimiser trains, wrapped or not. optimizer: a torch optimiser or
    what wraps one, as Accelerate does. ema: a module, {name: tensor}, torch's AveragedModel, diffusers'
    EMAModel, EMA, or None. every: steps between two looks; the first step is looked at too.
    others: further optimisers of this net, whose parameters are theirs, as with Muon beside AdamW.
    most: entries of a sample, see telemetry.sample; by default an eighth of what a tensor of the net has on
    average, from LEAST to MOST, so that a look at a small net is as cheap as its steps.

    Raises Refused for an optimiser or an average of no known kind, and for states of AdamW that are cut.
    """

    def __init__(self, model, optimizer, ema=None, every=50, most=None, others=()):
        if every < 1:
            raise Refused(f"every={every}: looks are at least one step apart")
        self.model, self.every, self.steps, self.looks = _plain(model), int(every), 0, 0
        self.depth, self.frame = 0, None  # of calls of step within a step; the frame of the outermost
        if not isinstance(self.model, torch.nn.Module):
            raise Refused(f"Watch takes the model as an nn.Module, not {type(model).__name__}")
        self.optimizer = hooked(optimizer)
        self.answers = answering(self.optimizer)
        groups = [group for other in others for group in hooked(other).param_groups]
        self.elsewhere = {p for group in groups for p in group["params"]}
        first = next(self.model.parameters(), None)
        if first is None:
            raise Refused("the model has no parameters: there is nothing to watch")
        self.most = most or _usual(self.model)
        self.pick = functools.partial(_picked, most=self.most, device=first.device)
        self.ema = None if ema is None else Average.of(ema, self.model)
        self.buffers = net_state.snapshot(self.model, self.pick)
        self.named, self.copies = self._paired()
        check_states(self.optimizer, self.named)
        count = len(self.named)
        averages = {} if self.ema is None else {"ema": self.ema}
        self.writes = Writes(self.answers, self.named, averages, self.pick)
        self.errors, self.moment_errors, self.extra = Errors(count), Errors(count), Steps(count)
        self.facts = [Facts() for _ in self.named]
        self.clips, self.sums_of_gradients, self.uncleared = [], {}, False
        self.shrunk = []  # (what is left of a gradient when a step begins, norm of all gradients then)
        self.accumulators = {}  # {name of a state: Tally}, of optimisers that step copies
        self.forgotten = {}  # tensor: (backward passes whose gradients were cleared before a step, of all)
        self.seconds = None  # (step, tensors, lengths, exp_avg_sq after it) of the last look
        self.alive = None  # (tensors, lengths, entries that ever had a gradient, looks)
        self.rarely = False  # whether the average moves once in some looks
        self.count = None  # (its counter, the step that changed it last, the most steps between changes)
        self.looking = self.follow = self.waiting = False
        self.departed = 0.0  # the largest share of weights that differ from the copies that are stepped
        self.groups, self.orphans = {}, {}
        self.partial, self.hooks = {}, []
        self.compiled = model is not self.model and hasattr(model, "_orig_mod")
        self.handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        self._hold(True)

    def remove(self):
        """Take the watch off the optimiser; what it found stays."""
        for handle in (*self.handles, *self.hooks):
            handle.remove()
        self.handles, self.hooks = [], []
        self._hold(False)

    def _paired(self):
        """([(name, parameter)], copies): those that the optimiser steps, named as in the model.

        An optimiser that steps fp32 copies of the weights has none of the model's own: they are paired in
        order, and `copies` is {name: the model's parameter}.
        """
        named = dict(self.model.named_parameters())
        stepped = {p for group in self.optimizer.param_groups for p in group["params"]}
        own = [(name, p) for name, p in named.items() if p in stepped]
        if own:
            return own, {}
        trained = [(name, p) for name, p in named.items() if p.requires_grad]
        others = [p for group in self.optimizer.param_groups for p in group["params"]]
        if [p.shape for p in others] != [p.shape for _, p in trained]:
            raise Refused("the optimiser has no parameter of this model: give the model that it trains")
        pairs = zip(trained, others, strict=True)
        return [(name, other) for (name, _), other in pairs], dict(trained)

    # -- one step

    def _due(self, step):
        return step == 1 or step % self.every == 0

    def _before(self, optimizer, args, kwargs):
        if self.depth and not _runs(self.frame):
            self._failed()
        self.depth += 1
        if self.depth > 1:  # a subclass that calls its parent's step, which has the same hooks
            return None
        self.frame = sys._getframe(1)
        return self._begin(args, kwargs)

    def _failed(self):
        """Forget a step that ended by an exception: the hook after it was never called."""
        self.depth, self.steps = 0, self.steps - 1
        self.looking = self.follow = self.waiting = False
        self.writes.look, self.writes.shadows, self.partial = None, {}, {}
        self._disarm()

    @torch.no_grad()
    def _begin(self, args, kwargs):
        self.steps += 1
        self.follow &= not self._freed()
        if self.follow:
            self._followed()
        if not self._due(self.steps) or self._freed() or skips(self.optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not callable(closure):
            self._look(kwargs)
            return None

        def and_look():  # the gradients are there once the closure is done
            loss = closure()
            with torch.no_grad():
                if not self.looking:
                    self._look(kwargs)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": and_look}
        return (args[0], and_look, *args[2:]), kwargs

    def _look(self, kwargs):
        renew(self.answers)
        check_states(self.optimizer, self.named)
        if hasattr(self.answers, "accumulated"):
            self.answers.accumulated = {}
        self.groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        if self.waiting:
            self._average(last=True)
        scale = kwargs.get("grad_scale", 1.0)
        if not isinstance(scale, dict):  # else each tensor is clipped by its own norm
            if torch.is_tensor(scale) or scale != 1.0:
                self.clips.append(scale)
            scale = scale / grad_scale(self.optimizer)
        # by turns, which halves what they cost
        self.writes.at = {"averages"} if self.looks % 2 and self.ema is not None else {"moments"}
        self.writes.before(self.optimizer, (), {**kwargs, "grad_scale": scale})
        self.looking = self.writes.look is not None
        self._compare_sums(kwargs.get("grads"))
        self._remember(self.writes.look)
        self.looks += 1

    @torch.no_grad()
    def _after(self, optimizer, args, kwargs):
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        self.frame = None
        if self.looking:
            self._stepped()
        # the step after a look too: what became of its weights is seen before that writes
        self._hold(self.follow or self._due(self.steps + 1))
        if self._due(self.steps + 1) and not self.compiled:
            self._arm()

    def _freed(self):
        """Whether backward has updated parameters and freed their gradients, see release.Release."""
        release = getattr(self.optimizer, "released", None)
        return release is not None and bool(release.updated)

    def _hold(self, on):
        """Let the next step, which is to be looked at, be the ordinary one: with the same bits, and with all
        its gradients in memory.
        """
        release = getattr(self.optimizer, "released", None)
        if release is not None:
            release.hold = on

    def _remember(self, look):
        """What is known of each tensor before the step."""
        for name, p in self.model.named_parameters() if not self.copies else ():
            if p.requires_grad and p not in self.groups and p not in self.elsewhere and p.grad is not None:
                self.orphans[name] = self.orphans.get(name, False) or bool(p.grad.any())
        here = {} if look is None else {i: k for k, i in enumerate(look.index)}
        if look is not None:
            self._living(look)
        quiet = [] if look is None else _zero(look.g, look.lengths)
        if look is not None and look.v is not None:
            self._resets(look, quiet)
        for i, (_, p) in enumerate(self.named):
            facts = self.facts[i]
            if facts.first is None:
                facts.first = self.pick(p).clone()
            if i not in here:  # a sparse gradient is one, though it is not looked at
                facts.without += p.numel() > 0 and (p.grad is None or not p.grad.is_sparse)
                continue
            facts.looks += 1
            facts.idle += quiet[here[i]]
            rate = float(self.groups[p].get("lr", 1.0))
            facts.rates.add(rate)
            facts.at_zero = 0 if rate else facts.at_zero + 1
            facts.zero_since = self.steps if facts.at_zero == 1 else facts.zero_since
            state = _state(self.answers, p)
            facts.before = steps_of(state)
            self._cast(facts, state)

    def _living(self, look):
        """Which entries have ever had a gradient."""
        alive, looks = look.g != 0, 1
        if self.alive is not None and self.alive[:2] == (look.index, look.lengths):
            alive, looks = alive | self.alive[2], self.alive[3] + 1
        self.alive = look.index, look.lengths, alive, looks

    def _resets(self, look, quiet):
        """Find second moments that are less than beta2 leaves of them: 0 beside an exp_avg, 0 in all tensors
        after steps, or entries far below those of the last look.
        """
        sums = totals([look.v], look.lengths)[0].tolist()
        here = [k for k, dtype in enumerate(look.v_dtypes) if dtype is not None and not quiet[k]]
        whole, fell = not any(sums[k] for k in here), self._fell(look)
        for k in here:
            p, facts = look.params[k], self.facts[look.index[k]]
            m = None if sums[k] else self.answers.moment(p, "exp_avg", self.pick)
            # no smaller: fp32 holds no square of that
            beside = m is not None and m.abs().max() > 1e-15
            if not sums[k] and (beside or (whole and steps_of(_state(self.answers, p)))):
                facts.v_reset = self.steps, None
            elif fell[k] > 0.1:
                facts.v_reset = self.steps, fell[k]

    def _fell(self, look):
        """Share of each tensor's exp_avg_sq that is far less than beta2 leaves of the last look's."""
        then, index, lengths, before = self.seconds or (0, None, None, None)
        if (index, lengths) != (look.index, look.lengths):
            return [0.0] * len(look.lengths)
        least, steps = [], self.steps - then - 1
        for p, dtype in zip(look.params, look.v_dtypes, strict=True):
            beta = self.answers.decay(p, "exp_avg_sq")[0] if dtype is not None else math.nan
            t = steps_of(_state(self.answers, p)) or self.steps
            # codes round too coarsely, and what has become small may be rounded away
            known = beta**steps > 0.2 and t > steps and not self.answers.coded(p, "exp_avg_sq")
            # an average that corrects its own bias forgets more at first
            least.append(0.7 * beta**steps * (1 - beta ** (t - steps)) / (1 - beta**t) if known else 0.0)
        fell = look.v < look.spread(least) * before
        return (totals([fell], lengths)[0].cpu() / torch.tensor(lengths)).tolist()

    def _cast(self, facts, state):
        v, m = state.get("exp_avg_sq"), state.get("exp_avg")
        if not torch.is_tensor(v) or not torch.is_tensor(m) or type(v) is not torch.Tensor:
            return
        if facts.v_dtype is None:
            facts.v_dtype = v.dtype
        elif v.element_size() < facts.v_dtype.itemsize and facts.cast is None:
            facts.cast = facts.v_dtype, v.dtype, self.steps

    def _stepped(self):
        """Compare what the step wrote, and what its counters count."""
        look, writes = self.writes.look, self.writes
        writes.stepped()
        plain = [
            dtype if self.answers.low_part(p) is None else None
            for p, dtype in zip(look.params, look.dtypes, strict=True)
        ]
        held, new = look.held.split(look.lengths), look.new.split(look.lengths)
        target = (look.held + look.update).split(look.lengths)
        self.errors.add(look.index, held, target, new, plain)
        if look.v is not None:
            v, aim, new_v = (t.split(look.lengths) for t in (look.v, look.aim, look.new_v))
            self.moment_errors.add(look.index, v, aim, new_v, look.v_dtypes, [t.clamp_min(1e-30) for t in v])
            self.seconds = self.steps, look.index, look.lengths, look.new_v
        self._accumulated()
        self._count(look)
        for i, p in zip(look.index, look.params, strict=True):
            self._counter(self.facts[i], _state(self.answers, p).get("step"))
        self.looking, self.follow = False, True

    def _accumulated(self):
        """Compare the other states with those of the fp32 copies that were stepped."""
        stepped = getattr(self.answers, "accumulated", None) or {}
        for i, (_, p) in enumerate(self.named):
            for name, (before, aim) in stepped.get(p, {}).items():
                held = _state(self.answers, p).get(name)
                now = self.pick(held) if torch.is_tensor(held) else before[:0]
                if now.shape == before.shape:
                    tally = self.accumulators.setdefault(name, Tally(len(self.named)))
                    still = stays(before.to(now.dtype), aim) & (before.to(now.dtype) == before)
                    tally.add(still, before, aim, now.float(), index=[i], lengths=[now.numel()])
        if stepped:
            self.answers.accumulated = {}

    def _count(self, look):
        decayed = [self._decayed(p) for p in look.params]
        finite, graded = look.g.isfinite(), look.g != 0
        rest = decay = torch.zeros_like(look.g)
        if any(decayed):
            decay = look.spread(decayed) * -look.held
            rest = (look.new - look.held) - (look.update - decay)
            good = rest.isfinite() & decay.isfinite() & finite & (decay != 0)
            rest, decay = rest.where(good, 0.0), decay.where(good, 0.0)
            # scaled: squares of small numbers would be 0 in fp32
            size = decay.abs().max().clamp_min(1e-30)
            rest, decay = rest / size, decay / size
        judged = faint = torch.zeros_like(graded)
        if look.v is not None:
            eps = [self._eps(p) for p in look.params]
            corrected = look.spread([1 / max(1e-12, 1 - self._beta(p)) for p in look.params])
            judged, faint = graded, graded & (look.new_v * corrected < look.spread(eps).square())
        subnormal = torch.zeros_like(graded)
        for at in self._from_fp16(look):
            subnormal[at] = graded[at] & (look.g[at].abs() < 2**-14)
        rows = [rest * decay, decay * decay, (rest - decay).square() * decay.square(), ~finite]
        self.extra.put([*rows, graded, judged, faint, subnormal], look.index, look.lengths)

    @staticmethod
    def _from_fp16(look):
        """Slices of the tensors whose gradients are all numbers of fp16: what a product in fp16 gave."""
        ends = [0, *itertools.accumulate(look.lengths)]
        first = look.g[torch.tensor(ends[:-1], device=look.g.device)]
        fits = (first.half().float() == first).tolist()
        for k, p in enumerate(look.params):
            at = slice(ends[k], ends[k + 1])
            may = fits[k] and p.dtype != torch.bfloat16
            if may and torch.equal(look.g[at].half().float(), look.g[at]):
                yield at

    def _decayed(self, p):
        known = getattr(self.answers, "decayed", None)
        return known(p) if known else 0.0

    def _eps(self, p):
        eps = self.groups[p].get("eps", 0.0)
        return float(eps) if isinstance(eps, (int, float)) else 0.0

    def _beta(self, p):
        """beta2^t at the step that was done: what the second moment still lacks; 0.0 where there is none."""
        beta, t = self.answers.decay(p, "exp_avg_sq") if hasattr(self.answers, "decay") else (math.nan, 0)
        return 0.0 if math.isnan(beta) or math.isinf(t) else beta ** max(1, t)

    def _counter(self, facts, after):
        """Compare a tensor's step counter with itself before the step, and with our own count."""
        value = steps_of({"step": after})
        if value is None:
            return
        dtype = after.dtype if torch.is_tensor(after) else None
        _, stuck, last = facts.counted or (dtype, 0, None)
        if last is not None and value < last:
            facts.fell, facts.counter = (last, value), None
        if facts.counter is None:
            facts.counter = value, self.steps
        facts.behind = (self.steps - facts.counter[1]) - (value - facts.counter[0])
        facts.counted = dtype, stuck + (facts.before == value), value

    # -- between two steps

    def _followed(self):
        """What was done since the step: whether weights were put back, and what the average took over."""
        look, now = self.writes.look, None
        self.follow = False
        if look is not None:
            now = torch.cat([self.answers.held(p, self.pick) for p in look.params])
            moved = look.new != look.held
            back = moved & (now == look.held)
            tops = [part.abs().max().expand(part.numel()) for part in now.split(look.lengths)]
            bound = (look.held == 0) | (look.held.abs() == torch.cat(tops))
            rows = [moved, back, back & bound]
            self.extra.put(rows, look.index, look.lengths, first=Steps.fields.index("moved"))
            self._copies(look)
        self._average(held=now)

    def _copies(self, look):
        """How far the model's own weights are from the copies that the optimiser steps."""
        for i, p in zip(look.index, look.params, strict=True) if self.copies else ():
            name = self.named[i][0]
            own = self.pick(self.copies[name])
            off = (own != self.pick(p).to(own.dtype)).float().mean()
            self.departed = max(self.departed, float(off))

    def _average(self, last=False, held=None):
        """Compare the average, once it has moved. Loops that average every few steps are waited for until the
        next look.
        """
        if self.ema is None or not self.writes.shadows:
            return
        self._counted()
        index, before = self.writes.shadows["ema"]
        shadow = self.ema.shadow
        here = list(zip(index, before, strict=True))
        taken = [self.pick(shadow[self.named[i][0]]) for i in index]
        same = [torch.equal(now, b) for now, b in zip(taken, before, strict=True)]
        if all(same) and not last:
            self.waiting = True
            return
        if not self.waiting:
            known = self.writes.look is not None and self.writes.look.index == index
            self.writes.averaged(held if known else None, taken)
        else:  # how many steps it took is not known: only who was left behind
            away = [bool((self.pick(self.named[i][1]).float() != b.float()).any()) for i, b in here]
            self.writes.shadows = {}
            self.rarely |= not all(same)
            none_due = self._none_due()
            looks = self.extra.sums[Steps.fields.index("stood")]
            for i, stood, off in zip(index, same, away, strict=True):
                if not (all(same) and none_due):
                    looks[i] = (looks[i] + float(off)) * stood
        self.waiting = False

    def _counted(self):
        """Notice that the average's counter has changed."""
        count, (known, at, most) = self.ema.counts(), self.count or (None, 0, 0)
        if count != known:
            most = max(most, self.steps - at) if known is not None else most
            self.count = count, self.steps, most

    def _none_due(self):
        """Whether all of the average may stand between two looks: SWA moves once an epoch."""
        if self.count is None or self.count[0] is None:
            return self.rarely
        return self.steps - self.count[1] <= self.count[2]

    # -- sums of micro-batches

    def _arm(self):
        """Listen to the gradients of the next step, micro-batch after micro-batch: where they are summed in
        16 bits, and whether they start from nothing. Some 16 tensors at each look: what sums one of them sums
        all.
        """
        self.partial = {}
        chosen = [(i, p) for i, (_, p) in enumerate(self.named) if p.requires_grad]
        turns = 1 + len(chosen) // 16
        for k, (i, p) in enumerate(chosen):
            if k == 0 or (p.dtype in net_state.NARROW and k % turns == self.looks % turns):
                self.hooks.append(p.register_hook(functools.partial(self._hear, i, p)))

    @torch.no_grad()
    def _hear(self, i, p, g):
        if g.is_sparse:
            return
        part = self.pick(g).float().clone()
        if i not in self.partial:
            left = p.grad is not None and not p.grad.is_sparse and bool(p.grad.any())
            self.partial[i] = Partial(part, left)
            return
        partial = self.partial[i]
        partial.count += 1
        partial.sum += part
        if p.grad is None or (i == next(iter(self.partial)) and not p.grad.any()):
            partial.cleared, partial.last, partial.times = partial.count - 1, part, partial.times + 1
        elif partial.last is not None:
            partial.last += part

    def _disarm(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _compare_sums(self, grads):
        self._disarm()
        one_process = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        for i, partial in self.partial.items() if one_process else ():
            p = self.named[i][1]
            g = p.grad if grads is None else grads.get(p)
            if g is None:
                continue
            # what another optimiser's backward left is no fault where it is cleared before its own
            left = partial.left and not partial.cleared
            self.uncleared |= left
            if left:
                continue
            g = self.pick(g)
            error, left = _apart(g, partial.sum)
            if error < 0.02:
                self.shrunk.append((left, self._norm() if left < 1e-3 else math.nan))
            if partial.count < 2:
                continue
            if p.dtype in net_state.NARROW:
                most, times, _ = self.sums_of_gradients.get(i, (0.0, 0, 0))
                self.sums_of_gradients[i] = most + error, times + 1, partial.count
            # an optimiser that sums by itself takes gradients away, and forgets none; SAM clears them once,
            # and so does a discriminator, of what backward passes for its generator have left
            if partial.times > 1 and error > 0.1 and _apart(g, partial.last)[0] < 0.02:
                self.forgotten[i] = partial.cleared, partial.count
        self.partial = {}

    def _norm(self):
        """Norm of all gradients, from their samples."""
        look = self.writes.look
        if look is None:
            return math.nan
        squares = totals([look.g.square()], look.lengths)[0].tolist()
        sizes = [p.numel() / n for p, n in zip(look.params, look.lengths, strict=True)]
        return math.sqrt(sum(s * size for s, size in zip(squares, sizes, strict=True)))

    # -- what was found

    def state(self, p):
        """What the optimiser keeps for a parameter, a dict."""
        return _state(self.answers, p)

    def findings(self):
        """List of verdicts.Finding, the worst first; those of severity "note" lose nothing."""
        return self.diagnosis().findings

    def shares(self):
        """{tensor: {site: share of what was wanted that was not written}}, of what could be measured."""
        return findings.shares(self)

    def diagnosis(self):
        """A verdicts.Diagnosis: str(), status (0 healthy, 1 findings), findings and sound."""
        found, sound = findings.findings(self)
        head = f"{self.steps} steps, {self.looks} of them looked at, {len(self.named)} tensors"
        return Diagnosis(f"{head} of {type(self.model).__name__}", found, sound, harm="bad results")

    def __str__(self):
        return str(self.diagnosis())


class Partial:
    """The gradients of one tensor, backward pass after backward pass. left: gradients were there before the
    first one. cleared: passes whose gradients are gone, in so many `times`; last: the sum of those since, or
    None.
    """

    def __init__(self, part, left):
        self.count, self.sum, self.left = 1, part, left
        self.cleared, self.times, self.last = 0, 0, None


def _apart(g, exact):
    """(relative distance of a gradient from a sum, but for a factor, and that factor): clipping and averaging
    over micro-batches scale it.
    """
    g, exact = g.double(), exact.double()
    scale = float((g * exact).sum() / exact.square().sum().clamp_min(1e-300))
    return float((g - scale * exact).norm() / (scale * exact).norm().clamp_min(1e-300)), scale


def _runs(frame):
    """Whether a frame is among those that wait for this call."""
    caller = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _usual(model):
    sizes = [p.numel() for p in model.parameters()]
    return min(MOST, max(LEAST, sum(sizes) // (8 * len(sizes))))


def _zero(flat, lengths):
    """Whether all entries of each tensor are 0; a GPU is waited for once."""
    return (~torch.stack([part.any() for part in flat.split(lengths)])).tolist()


def _picked(t, most, device):
    taken = sample(t, most)
    return taken if taken.device == device else taken.to(device)


def _state(answers, p):
    owner = answers.owner[p] if hasattr(answers, "owner") else answers
    state = getattr(owner, "inner", owner).state
    return state[p] if p in state else {}


def _plain(model):
    """The net within torch.compile's, DistributedDataParallel's or Accelerate's wrapper."""
    model = getattr(model, "_orig_mod", model)
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return _plain(model.module) if isinstance(model, wrappers) else model
