"""Watch anyone's training loop: which tensors lose what their optimiser and their average want to write.

    watch = Watch(model, optimizer, ema=ema)     # any torch optimiser, any loop
    ...                                          # train as ever
    print(watch)                                 # a row for each cause of a loss, worst first, and what to do

docs/faults.md tells what it measures and what it can't see; `python -m lowprec.watch.findings` lists all that
it can find.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import Refused, check_number
from ..telemetry import sample_entries
from . import findings
from .adapters import answering, check_states, hooked, renew, skips, unwrapped
from .average_watch import AverageWatch
from .averages import Average
from .clock import MOST_SHARE, Clock
from .facts import Alive, Facts, Steps
from .gradients import Gradients, Passes
from .masters import Masters
from .measured import Measured
from .net_state import floating_buffers
from .products import Products
from .states import States
from .teachers import Teachers
from .twins import grad_scale
from .verdicts import Diagnosis, Finding
from .write_errors import Errors
from .writes import Tally, Writes

# entries of a tensor's sample, see telemetry.sample_entries
LARGEST_SAMPLE, SMALLEST_SAMPLE = 1 << 12, 5 << 9
USUAL_EVERY = 50  # steps between two looks


class Watch:
    """Hangs on an optimiser's step and looks at one step in `every`, at samples of the tensors.

    The training keeps its bits: nothing is written, and no random number of the process is drawn. A figure is
    named only where it is certain: what chance can explain is not. Gradients that a closure computes
    (Lightning) are looked at once the closure is done.

    Args:
        model: the net that the optimiser trains, plain or within torch.compile, DataParallel or
            DistributedDataParallel.
        optimizer: a torch optimiser, or what wraps one, as Accelerate does. It may step fp32 copies of the
            model's parameters, in their order.
        ema: an average of the weights: a module, {name: tensor}, torch's AveragedModel, diffusers' EMAModel,
            this library's EMA, or an object that holds one of them; None where there is none.
        every: steps between two looks. The first step is looked at too. By default 50, and a multiple of it
            where looks would take more than 5 % of the time of the steps.
        most: entries of a sample: about so many of a larger tensor, all of one below twice as many. By
            default an eighth of what a tensor of the net has on average, from 2,560 to 4,096, so that a look
            at a small net is as cheap as its steps.
        others: further optimisers of this net, whose parameters are theirs, as with Muon beside AdamW.
        products: names of BLOCK_FORMATS (layers): say what they would do to its layers, see products.py.
        writes: say what ways of writing bf16 weights would do to it, see lowprec.foresee.

    Raises:
        Refused (a ValueError): `every` below 1, a model without parameters, an optimiser or an average of no
            known kind or of another model, states of torch's AdamW that are cut. The last is raised at a
            look too.
    """

    #: steps done since the watch began
    steps: int
    #: how many of them were looked at
    looks: int

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        ema: Any = None,
        every: int | None = None,
        most: int | None = None,
        others: Iterable[Any] = (),
        products: Iterable[str] = (),
        writes: bool = False,
    ) -> None:
        if every is not None:
            check_number("every", every, 1)
        self.model = unwrapped(model)
        if not isinstance(self.model, torch.nn.Module):
            raise Refused(f"Watch takes the model as an nn.Module, not {type(model).__name__}")
        first = next(self.model.parameters(), None)
        if first is None:
            raise Refused("the model has no parameters: there is nothing to watch")
        self.every = int(every or USUAL_EVERY)
        self.chooses = every is None
        self.clock = Clock()
        self.due = True  # whether the next step is looked at
        self.most = most or usual_sample(self.model)
        self.pick = functools.partial(_picked_entries, most=self.most, device=first.device)
        self.compiled = model is not self.model and hasattr(model, "_orig_mod")
        self.steps = self.looks = 0
        self._watch_optimizer(optimizer, others)
        average = Average(dict) if ema is None else Average.of(ema, self.model)
        self.buffers = {name: self.pick(b).clone() for name, b in floating_buffers(self.model)}
        self.writes = Writes(self.answers, self.named, self.pick)
        self.errors = Errors(len(self.named))
        self.moment_errors = Errors(len(self.named))
        self.extra = Steps(len(self.named))
        self.averages = AverageWatch(average, self.answers, self.named, self.pick)
        self.teachers = Teachers(self.model, self.answers, self.named, self.pick)
        self.accumulators: dict[str, Tally] = {}  # {name of a state: Tally}, of optimisers that step copies
        self.gradients = Gradients(self.named, self.pick, self.clock)
        self.masters = Masters(self.named, self.pick)
        self.passes = Passes(self.model, [] if self.compiled else [p for _, p in self.named], self.pick)
        self.products = Products(self.model, tuple(products))
        self.foresees = writes
        self.clips: list[Any] = []  # grad_scale of the steps
        self.alive = None
        self.depth = 0  # of calls of step within a step
        self.begun_with = None, 0  # see _a_gradient
        self.read = None, 0  # the gradient of the last step, weakly, and how often it was written
        self.again = 0  # steps whose gradients nothing has written since the step before
        self.looking = False  # a look has begun, and its step is not done
        self.follow = False  # the next step compares what has become of the weights since
        self.handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        self._hold(True)
        self._listen()

    def _listen(self):
        if not self.compiled:
            self.gradients.listen()
            self.products.listen()

    def _watch_optimizer(self, optimizer, others):
        self.optimizer = hooked(optimizer)
        self.answers = answering(self.optimizer)
        groups = [group for other in others for group in hooked(other).param_groups]
        self.elsewhere = {p for group in groups for p in group["params"]}
        self.named, self.copies = self._paired()
        check_states(self.optimizer, self.named)
        self.facts = [Facts() for _ in self.named]
        self.states = States(self.answers, self.facts, self.pick)
        self.groups = {}  # {parameter: its group}
        self.orphans = {}  # {name of a parameter in no group: whether it ever had a gradient}
        self.departed = 0.0  # the largest share of weights that differ from the copies that are stepped

    def _paired(self):
        """([(name, parameter)], copies): those that the optimiser steps, named as in the model.

        An optimiser that steps fp32 copies of the weights has none of the model's own: they are paired in
        order, and `copies` is {name: the model's parameter}.
        """
        named = dict(self.model.named_parameters())
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        is_stepped = set(stepped)
        own = [(name, p) for name, p in named.items() if p in is_stepped]
        if own:
            return own, {}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if [p.shape for p in stepped] != [p.shape for p in trained.values()]:
            raise Refused("the optimiser has no parameter of this model: give the model that it trains")
        return list(zip(trained, stepped, strict=True)), trained

    def remove(self) -> None:
        """Take the watch off the optimiser; what it found stays."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.gradients.stop()
        self.passes.remove()
        self.products.stop()
        self._hold(False)

    # -- one step

    @torch.no_grad()
    def _before(self, optimizer, args, kwargs):
        with self.clock:
            gradient, version = self._a_gradient()
            then, then_version = self.begun_with
            if self.depth and (gradient is not then or version != then_version):
                self._forget_step()  # it ended by an exception, after which hooks are not called
            self.depth += 1
            if self.depth > 1:  # a subclass that calls its parent's step, which has the same hooks
                return None
            self.begun_with = gradient, version
            if gradient is not None:
                last, then = self.read
                self.again += last is not None and last() is gradient and version == then
                self.read = weakref.ref(gradient), version
            return self._begin(args, kwargs)

    def _a_gradient(self):
        """(a gradient, how often it was written): the same in a step and in the step within that."""
        for _, p in self.named:
            if p.grad is not None:
                return p.grad, p.grad._version
        return None, 0

    def _forget_step(self):
        self.depth = 0
        self.steps -= 1
        self.looking = self.follow = False
        self.writes.look = None
        self.averages.forget()
        self.gradients.forget()

    def _begin(self, args, kwargs):
        self.steps += 1
        if self.follow and not self._freed():
            self._followed()
        self.follow = False
        if skips(self.optimizer):
            return None
        self.passes.stepped()
        self.masters.step(self.steps)
        if not self.due or self._freed():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(kwargs)
            return None

        def and_look():  # the gradients are there once the closure is done
            try:
                loss = closure()
            except BaseException:
                self._forget_step()
                raise
            with torch.no_grad(), self.clock:
                if not self.looking:
                    self._look(kwargs)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": and_look}
        return (args[0], and_look, *args[2:]), kwargs

    def _look(self, kwargs):
        """Look at what the step is about to write."""
        self.products.stop()
        renew(self.answers)
        check_states(self.optimizer, self.named)
        self.groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        if self.averages.waiting:
            self.averages.follow(self.steps, last=True)
        scale = kwargs.get("grad_scale", 1.0)
        if not isinstance(scale, dict):  # else each tensor is clipped by its own norm
            if torch.is_tensor(scale) or scale != 1.0:
                self.clips.append(scale)
            scale = scale / grad_scale(self.optimizer)
        if self.averages.count is not None:
            self.averages.count_now(self.steps)
        # by turns, which halves what they cost
        turn_of_average = bool(self.looks % 2 and self.averages.average.shadow)
        if turn_of_average:
            self.averages.before()
        self.writes.with_moments = not turn_of_average
        self.writes.before(self.optimizer, (), {**kwargs, "grad_scale": scale})
        self.teachers.before()
        look = self.writes.look
        self.looking = look is not None
        self.gradients.compare(kwargs.get("grads"), look)
        if not self.looks:
            self.masters.begin(self.states.of)
        self._remember_orphans()
        self._remember_gradients(look)
        self.looks += 1

    @torch.no_grad()
    def _after(self, optimizer, args, kwargs):
        with self.clock:
            if self.depth != 1:  # of a step within a step, or of one that nobody has seen begin
                self.depth = max(0, self.depth - 1)
                return
            self.depth = 0
            self.begun_with = None, 0
            if self.looking:
                self._stepped()
            # the step after a look too: what became of its weights is seen before that writes
            is_turn = (self.steps + 1) % self.every == 0
            self.due = is_turn and (not self.chooses or self.clock.can_afford_another(self.looks))
            self._hold(self.follow or self.due)
            if self.due:
                self._listen()

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

    # -- before a step

    def _remember_orphans(self):
        """Which parameters in no group have gradients."""
        if self.copies:
            return
        for name, p in self.model.named_parameters():
            elsewhere = p in self.groups or p in self.elsewhere
            if p.requires_grad and not elsewhere and p.grad is not None:
                self.orphans[name] = self.orphans.get(name, False) or bool(p.grad.any())

    def _remember_gradients(self, look):
        """What is known of each tensor before the step."""
        zero = {}  # {number of a tensor: whether its gradient is 0 everywhere}
        if look is not None:
            self._remember_alive(look)
            # a GPU is waited for once
            is_zero = (~torch.stack([part.any() for part in look.g.split(look.lengths)])).tolist()
            zero = dict(zip(look.index, is_zero, strict=True))
            self.states.find_restarts(look, self.steps)
            if look.v is not None:
                self.states.find_resets(look, self.steps, [not quiet for quiet in is_zero])
        for i, (_, p) in enumerate(self.named):
            facts = self.facts[i]
            if facts.first is None:
                facts.first = self.pick(p).clone()
            if i not in zero:
                # a sparse gradient is one, though it is not looked at
                has_none = p.grad is None or not p.grad.is_sparse
                facts.without += facts.first.numel() > 0 and has_none
                continue
            facts.looks += 1
            facts.idle += zero[i]
            facts.at_rate(float(self.groups[p].get("lr", 1.0)), self.steps)
            self.states.before(facts, p, self.steps)

    def _remember_alive(self, look):
        entries, looks = look.g != 0, 1
        then = self.alive
        if then is not None and (then.tensors, then.lengths) == (look.index, look.lengths):
            entries, looks = entries | then.entries, then.looks + 1
        self.alive = Alive(look.index, look.lengths, entries, looks)

    # -- after a step

    def _stepped(self):
        """Compare what the step wrote, and what its counters count."""
        look = self.writes.look
        self.writes.after()
        dtypes = [
            None if self.answers.low_part(p) is not None else dtype
            for p, dtype in zip(look.params, look.dtypes, strict=True)
        ]
        target = look.held + look.update
        values = [t.split(look.lengths) for t in (look.held, target, look.new)]
        self.errors.add(look.index, *values, dtypes)
        if look.v is not None:
            values = [t.split(look.lengths) for t in (look.v, look.aim, look.new_v)]
            floors = [t.clamp_min(1e-30) for t in values[0]]
            self.moment_errors.add(look.index, *values, look.v_dtypes, floors)
        self._add_accumulators()
        self.extra.add(look, self.answers, self.groups)
        self.extra.add_codes(look, self.answers)
        self.states.stepped(look, self.steps)
        self.looking = False
        self.follow = True

    def _add_accumulators(self):
        """Compare the other states with those of the fp32 copies that were stepped."""
        stepped = getattr(self.answers, "accumulated", {})
        for i, (_, p) in enumerate(self.named):
            for name, (before, aim) in stepped.get(p, {}).items():
                held = self.states.of(p).get(name)
                if not torch.is_tensor(held):
                    continue
                now = self.pick(held)
                if now.shape != before.shape:
                    continue
                tally = self.accumulators.setdefault(name, Tally(len(self.named)))
                narrow = before.to(now.dtype)
                may_stay = (narrow == aim.to(now.dtype)) & (narrow == before)
                tally.add(may_stay, before, aim, now.float(), index=[i], lengths=[now.numel()])

    # -- between two steps

    def _followed(self):
        """What was done since the step: whether weights were put back, and what the average took over."""
        look, held = self.writes.look, None
        if look is not None:
            now = torch.cat([self.answers.held(p, self.pick) for p in look.params])
            held = look.index, now
            self.extra.follow(look, now)
            self.extra.follow_moments(look)
            self._compare_copies(look)
        self.averages.follow(self.steps, held=held)
        self.teachers.compare(self.steps)

    def _compare_copies(self, look):
        """How far the model's own weights are from the copies that the optimiser steps."""
        if not self.copies:
            return
        for i, p in zip(look.index, look.params, strict=True):
            own = self.pick(self.copies[self.named[i][0]])
            off = (own != self.pick(p).to(own.dtype)).float().mean()
            self.departed = max(self.departed, float(off))

    # -- what was found

    def state(self, p: torch.Tensor) -> dict[str, Any]:
        """What the optimiser keeps for a parameter; {} before its first step."""
        return self.states.of(p)

    def findings(self) -> list[Finding]:
        """What loses something, the worst first; a Finding of severity "note" loses nothing."""
        return self.diagnosis().findings

    def shares(self) -> dict[str, dict[str, float]]:
        """{tensor: {site: share of what was wanted that was not written}}, 0 to about 1, of what could be
        measured. Sites: "update" (the weight), "exp_avg_sq" (its shrinking), "ema".
        """
        return {one.name: one.shares() for one in Measured(self).tensors} if self.looks else {}

    def diagnosis(self) -> Diagnosis:
        """The verdict on the whole: its str() is what print(watch) shows."""
        found, sound = findings.findings(self)
        head = f"{self.steps} steps, {self.looks} of them looked at, {len(self.named)} tensors"
        head = f"{head} of {type(self.model).__name__}"
        share = self.clock.share()
        if share > MOST_SHARE and self.looks >= 20:
            head += f"; looking took {share:.0%} of the time of the steps"
            head += "" if self.chooses else ": a larger every= takes less"
        return Diagnosis(head, found, sound, harm="bad results", examined=self.looks > 0)

    def __str__(self) -> str:
        told = self._foreseen() if self.foresees else str(self.products)
        return "\n".join(filter(None, [str(self.diagnosis()), told]))

    def _foreseen(self):
        from ..trials.foresee import foresee

        try:
            return str(foresee(self.model, self.optimizer, products=self.products))
        except Refused as error:
            return f"{error}\n{self.products}".strip()


def usual_sample(model):
    sizes = [p.numel() for p in model.parameters()]
    return min(LARGEST_SAMPLE, max(SMALLEST_SAMPLE, sum(sizes) // (8 * len(sizes))))


def _picked_entries(t, most, device):
    taken = sample_entries(t, most)
    return taken if taken.device == device else taken.to(device)

