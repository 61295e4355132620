"""Other people's optimisers and averages, asked the questions that ours answer. They are read, never changed.

    answers = answering(torch.optim.AdamW(model.parameters()))      # held, moment, wanted; see Rounded
    average = Average.of(EMAModel(model.parameters()), model)       # shadow, decay

What an optimiser wants is known by the arithmetic of AdamW from the states it holds, where its step is
torch's own or was seen to be the same, or by letting the optimiser itself step fp32 copies (twins.py). Both
work on samples where the update of an entry depends on that entry alone.
"""

import inspect
import math

import torch

from ..errors import Refused
from ..optimizers import peers
from ..rounding import exact_weight
from ..telemetry import values_here
from .averages import Average
from .twins import Drawing, stepped_twins

__all__ = ["Average", "answering", "hooked"]

# what wrappers call the optimiser that they hold
NAMES_OF_WRAPPED = ("optimizer", "_optimizer", "base_optimizer")

# what a state that completes a bf16 weight is called, here and elsewhere
NAMES_OF_LOW_PARTS = (
    "kahan_comp",
    "compensation",
    "remainder",
    "shift",
    "master",
    "master_param",
    "fp32_param",
)
DTYPES_OF_LOW_PARTS = (torch.float32, torch.bfloat16, torch.int16, torch.int8)
# classes whose update is AdamW's or Adam's
ADAMW_CLASSES = {"Adam", "AdamW", "_AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"}
ADAMW_CLASSES |= {"FusedAdam", "FusedAdamW", "CPUAdam", "DeepSpeedCPUAdam"}
PACKAGES_OF_ADAMW = {"torchao", "apex", "deepspeed", "transformer_engine", "colossalai"}
WITHOUT_DECAY = {"weight_decay": 0.0, "wd": 0.0}  # options of a group
# torch's optimisers that add weight decay to the gradient
COUPLED_DECAY = {"RMSprop", "NAdam", "RAdam", "Adagrad"}
# torch's optimisers whose update of an entry depends on that entry alone
ELEMENTWISE_CLASSES = "SGD RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop Adam AdamW".split()

# ---- Which optimiser, which model --------------------------------------------------------------------------


def unwrapped(model):
    """The net within torch.compile's, DistributedDataParallel's or Accelerate's wrapper."""
    model = getattr(model, "_orig_mod", model)
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return unwrapped(model.module) if isinstance(model, wrappers) else model


def hooked(optimizer):
    """The optimiser whose step is hooked: what a wrapper as Accelerate's holds. Raises Refused for others."""
    for _ in range(8):
        held = getattr(optimizer, "__dict__", {})
        # a wrapper that never called torch's __init__ has the methods and not what they need
        if "_optimizer_step_pre_hooks" in held:
            return optimizer
        names = [name for name in NAMES_OF_WRAPPED if name in held]
        if not names:
            break
        optimizer = held[names[0]]
    kind = type(optimizer).__name__
    raise Refused(f"Watch takes a torch optimiser or a wrapper that holds one, not {kind}")


def answering(optimizer):
    """Something that answers for an optimiser: itself, the adapter of a peer, or a Stranger."""
    if hasattr(optimizer, "wanted") and hasattr(optimizer, "held"):
        return optimizer
    by_package = {"optimi": peers.Optimi, "torchastic": peers.Torchastic, "bitsandbytes": peers.Bitsandbytes}
    peer = by_package.get(type(optimizer).__module__.partition(".")[0])
    is_known = peer is not None and "adamw" in type(optimizer).__name__.lower()
    return (peer if is_known else Stranger)(optimizer)


def renew(answers):
    """Let an adapter read the states again that its optimiser has now: a resume may have replaced them."""
    if hasattr(answers, "inner"):
        answers.param_groups, answers.state = answers.inner.param_groups, answers.inner.state
        answers.groups = {p: group for group in answers.param_groups for p in group["params"]}


def steps_of(state):
    """What a state's step counter says; None where it has none, or something else by that name."""
    step = state.get("step")
    if torch.is_tensor(step):
        step = step.item() if step.numel() == 1 else None
    return float(step) if isinstance(step, (int, float)) else None


def check_states(optimizer, named):
    """Raise Refused for a state that torch's AdamW or Adam could not step. named: [(name, parameter)]."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in named:
        state = optimizer.state.get(p)
        if not state:
            continue  # it begins at the first gradient
        moments = ["exp_avg", "exp_avg_sq"]
        if groups[p].get("amsgrad"):
            moments.append("max_exp_avg_sq")
        lacks = [] if steps_of(state) is not None else ["number of steps"]
        for moment in moments:
            held = state.get(moment)
            if not torch.is_tensor(held) or held.shape != p.shape:
                lacks.append(f"{moment} of the shape {list(p.shape)}")
        if lacks:
            fix = "restore the optimiser's state, or clear it to begin anew"
            raise Refused(f"the optimiser's state of {name} has no {' and no '.join(lacks)}: {fix}")


# ---- Any torch optimiser -----------------------------------------------------------------------------------


class Stranger(peers.Peer):
    """Any torch optimiser as one that answers. inner: the optimiser."""

    names = {
        "exp_avg": ("exp_avg", "momentum_buffer", "ema", "state1"),
        "exp_avg_sq": ("exp_avg_sq", "square_avg", "ema_squared"),
    }

    def __init__(self, inner):
        super().__init__(inner)
        self.silent = set()  # parameters whose copy could not be stepped
        self.forms_v = True  # whether a stranger's second moment is seen to be Adam's
        # of copies that the last look stepped:
        self.accumulated = {}  # {parameter: {name: (its state, what the copy made of it)}}
        self.decays = {}  # {parameter: what weight decay does of its update}
        kind, module = type(inner).__name__, type(inner).__module__
        adam = isinstance(inner, torch.optim.Adam)
        torchs = inspect.unwrap(type(inner).step) is inspect.unwrap(torch.optim.Adam.step)
        published = kind in ADAMW_CLASSES and module.partition(".")[0] in PACKAGES_OF_ADAMW
        # whether its update is AdamW's, whether it is known how it rounds, whether entries are independent
        self.exact = torchs or published
        # a step of its own may be AdamW's all the same: it is held against the copies of the first looks
        self.on_trial = not self.exact and (adam or kind in ADAMW_CLASSES)
        self.known = self.exact or module.startswith("torch.optim")
        self.elementwise = module.startswith("torch.optim.") and kind in ELEMENTWISE_CLASSES
        renew(self)

    def _group(self, p):
        return self.groups[p]

    def low_part(self, p):
        state = self.state.get(p, {})
        names = [name for name in NAMES_OF_LOW_PARTS if name in state]
        found = state[names[0]] if names else None
        fits = torch.is_tensor(found) and found.shape == p.shape and found.dtype in DTYPES_OF_LOW_PARTS
        return found if fits else None

    def held(self, p, pick=torch.flatten):
        low = self.low_part(p)
        if low is not None and low.dtype == torch.float32:
            return pick(low)  # however the weight was rounded from it
        return exact_weight(pick(p.detach()), None if low is None else pick(low))

    def decoded(self, held, p, name):
        return values_here(held)

    def coded(self, p, name):
        return type(self._state(p, name)) not in (torch.Tensor, type(None))  # torchao's codes are a class

    def decay(self, p, name):
        """(beta, t); NaN where it is not known how the optimiser forms this moment."""
        adams = isinstance(self.inner, torch.optim.Adam) or "adamw" in type(self.inner).__name__.lower()
        if not self.known and not (adams and self.forms_v):
            return math.nan, 0
        group = self._group(p)
        steps = int(steps_of(self.state.get(p, {})) or 0)
        if "betas" in group:
            beta1, beta2 = group["betas"]
            return float(beta1 if name == "exp_avg" else beta2), steps
        return float(group.get("alpha", math.nan)), steps

    def decayed(self, p):
        """Share of p that weight decay takes at a step; 0.0 where decay goes by way of the gradient, or where
        that is not known.
        """
        exact = self.exact and self._by_arithmetic(p)
        return super().decayed(p) if exact and not self._coupled(p) else 0.0

    def gradient(self, p, g, pick=torch.flatten):
        """The gradient that the moments take: with weight decay where that goes by way of the gradient."""
        group = self._group(p)
        if group.get("maximize"):
            g = -g
        decay = group.get("weight_decay", 0.0)
        coupled = type(self.inner).__name__ in COUPLED_DECAY and not group.get("decoupled_weight_decay")
        if decay and (coupled or (self.exact and self._coupled(p))):
            g = g + decay * self.held(p, pick)
        return g

    def _coupled(self, p):
        # torch's Adam adds it to the gradient, AdamW does not; since 2.7 a group tells
        decoupled = self._group(p).get("decoupled_weight_decay", self._group(p).get("adam_w_mode"))
        if decoupled is not None:
            return not decoupled
        kind = type(self.inner).__name__
        adam = isinstance(self.inner, torch.optim.Adam) and not isinstance(self.inner, torch.optim.AdamW)
        return (adam or kind == "Adam") and "adamw" not in kind.lower()

    def _by_arithmetic(self, p):
        group, state = self._group(p), self.state.get(p, {})
        if not (self.exact or self.on_trial) or "betas" not in group:
            return False
        if group.get("amsgrad") or group.get("maximize"):
            return False
        return not state or {"exp_avg", "exp_avg_sq"} <= set(state)

    # -- what it wants

    def wanted(self, p, g, pick=torch.flatten):
        return self.wanted_together([p], [g], pick)[0]

    def wanted_together(self, params, gradients, pick, held=None):
        """[fp32 update of each parameter, NaN where it can't be told], all tensors of one group at once.
        held: what `held` says of all of them, flat, where that is known already.
        """
        if held is None:
            held = [self.held(p, pick) for p in params]
        else:
            held = held.split([g.numel() for g in gradients])
        found = [torch.full_like(g, math.nan) for g in gradients]
        told = [i for i, p in enumerate(params) if self._by_arithmetic(p)]
        computed = self._adamw_of_all(told, params, gradients, held, pick)
        stepped = [i for i in range(len(params)) if i not in computed or self.on_trial]
        self.decays, self.accumulated = {}, {}
        twins = self._by_copies([params[i] for i in stepped], pick)
        updates = {}
        for i, twin in zip(stepped, twins, strict=True):
            if twin is not None:
                updates[i] = self._sample(twin.update, pick)
        if self.on_trial and not self._try(params, computed, held, updates):
            computed = {}
        for i, update in {**updates, **computed}.items():
            found[i] = update
        return found

    def step_of(self, p):
        """The number of steps that the optimiser counts for p; None where it counts none."""
        step = self.state.get(p, {}).get("step", self._group(p).get("step"))
        return None if step is None else int(step)

    def _adamw_of_all(self, told, params, gradients, held, pick):
        """{i: update of parameter i by AdamW's arithmetic}, of those that are told."""
        alike = {}  # {(group, steps, device): numbers of parameters}
        for i in told:
            p = params[i]
            alike.setdefault((id(self._group(p)), self.step_of(p), p.device), []).append(i)
        found = {}
        for (_, step, _), members in alike.items():
            theirs = [params[i] for i in members]
            g = [gradients[i] for i in members]
            values = torch.cat([held[i] for i in members])
            update = self._adamw_of(theirs, g, values, step, pick)
            found.update(zip(members, update.split([len(part) for part in g]), strict=True))
        return found

    def _adamw_of(self, params, gradients, held, step, pick):
        """AdamW's update of parameters of one group after so many steps, fp32 [n]."""
        group = self._group(params[0])
        lr, decay, eps = (float(group.get(name, 0.0)) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = (float(beta) for beta in group["betas"])
        g = torch.cat(gradients)
        m = self._moments(params, gradients, "exp_avg", pick)
        v = self._moments(params, gradients, "exp_avg_sq", pick)
        if self._coupled(params[0]):
            g = g + decay * held
            decay = 0.0
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        t = (step or 0) + 1
        if group.get("bias_correction", True):
            m = m / (1 - beta1**t)
            v = v / (1 - beta2**t)
        return -lr * (m / (v.sqrt() + eps) + decay * held)

    def _moments(self, params, gradients, name, pick):
        """A moment of several parameters, fp32 [n]; 0 before the first step."""
        found = []
        for p, g in zip(params, gradients, strict=True):
            moment = self.moment(p, name, pick)
            found.append(torch.zeros_like(g) if moment is None else moment.float())
        return torch.cat(found)

    def _by_copies(self, params, pick):
        """[Twin of each parameter that has taken a step of the optimiser, None where that fails]. What weight
        decay did of it stands in `decays`.
        """
        can = [p for p in params if p not in self.silent and p.grad is not None]
        if not can:
            return [None] * len(params)
        take = pick if self.elementwise else values_here
        twins = dict(zip(can, stepped_twins(self.inner, can, take), strict=True))
        self.silent |= {p for p, twin in twins.items() if twin is None}
        decaying = [p for p in can if twins[p] and any(self._group(p).get(name) for name in WITHOUT_DECAY)]
        if decaying:  # once more, without it
            for twin in stepped_twins(self.inner, decaying, take, **WITHOUT_DECAY):
                whole = twins[twin.p] if twin is not None else None
                if whole is not None and not whole.rounds:
                    self.decays[twin.p] = self._sample(whole.update - twin.update, pick)
        for p, twin in twins.items():
            if not self.known:
                self.forms_v &= twin is not None and self._is_adams(twin)
            elif twin is not None:
                self.accumulated[p] = dict(self._accumulators(twin, pick))
        return [twins.get(p) for p in params]

    def _sample(self, t, pick):
        return t if self.elementwise else pick(t)

    def _is_adams(self, twin):
        """Whether the step of a copy left beta2 v + (1 - beta2) g^2. Grokfast, for one, takes another g."""
        held = self.state.get(twin.p, {}).get("exp_avg_sq")
        g, after = twin.gradient, twin.state.get("exp_avg_sq")
        beta, _ = self.decay(twin.p, "exp_avg_sq")
        if not torch.is_tensor(after) or after.shape != g.shape or math.isnan(beta):
            return True
        before = twin.copied(held).float() if torch.is_tensor(held) else torch.zeros_like(g)
        wanted = beta * before + (1 - beta) * g.square()
        return float((after - wanted).abs().sum()) <= 0.01 * float(wanted.abs().sum())

    def _try(self, params, computed, held, updates):
        """Whether AdamW's arithmetic and the copies of a look agree. If they do and have states, a class with
        a step of its own is AdamW's from then on, and if they don't it never is.
        """
        if not self.forms_v or computed.keys() != updates.keys():
            self.on_trial = False
            return False
        agree, times, decays = True, set(), set()
        for i, a in computed.items():
            p, u = params[i], updates[i]
            after = held[i] + u
            rounds = p.dtype.itemsize < 4 and bool((after.to(p.dtype).float() == after).all())
            gap = 2 * torch.finfo(p.dtype).eps if rounds else torch.finfo(torch.float32).eps
            slack = 1e-3 * float(a.abs().sum()) + gap * float(after.abs().sum() + held[i].abs().sum())
            decay = -super().decayed(p) * held[i]
            kept = 1.0 if p not in self.decays or self._coupled(p) else self._part_kept(p, decay, slack)
            if kept == 0.0:
                a = a - decay
            # what is written twice, or put back, is AdamW's with a slip; any other factor is another rule
            fits = [k for k in (1, 2, 0) if float((u - k * a).abs().sum()) <= max(k, 0.5) * slack]
            agree &= bool(fits) and (kept is not None or fits[0] != 1)
            times.update(fits[:1])
            if fits[:1] == [1]:
                decays.add((p.dim() > 1, kept))
        # and so is decay that some matrices lack; vectors without it are a rule, and so is none at all
        lacks = {is_matrix for is_matrix, kept in decays if kept == 0.0}
        agree &= not lacks or (True in lacks and (True, 1.0) in decays)
        agree &= times in ({1}, {2}, {0, 1})
        self.on_trial = agree
        if agree:
            self.decays = {}
        if agree and any(self.state.get(p) for p in params):
            self.exact = self.known = True
            self.on_trial = False
        return agree

    def _part_kept(self, p, decay, slack):
        """1.0 where the copies of p decay as AdamW, 0.0 where they don't, None where they do otherwise."""
        size, found = float(decay.abs().sum()), self.decays[p]
        if float((found - decay).abs().sum()) <= 0.1 * size + 1e-3 * slack:
            return 1.0
        return 0.0 if float(found.abs().sum()) <= 0.1 * size else None

    def decay_of(self, p, held):
        """What weight decay does of the next update, fp32 [n]; 0 where that is not known."""
        if p in self.decays and not self.exact:
            return self.decays[p]
        return -self.decayed(p) * held

    def draws(self, p):
        """Whether a step of p draws random numbers, by which it could round; None where that can't be seen. A
        copy of its dtypes is stepped.
        """
        drawing = Drawing()
        with drawing:
            twins = stepped_twins(self.inner, [p], values_here, wide=False)
        return None if twins == [None] else drawing.seen

    def _accumulators(self, twin, pick):
        """(name, (fp32 sample of a state of p, and of the one that a step of the copy left)): all but second
        moments, which are looked at by themselves.
        """
        for name, value in self.state.get(twin.p, {}).items():
            judged_elsewhere = name in self.names["exp_avg_sq"]
            if judged_elsewhere or name not in twin.state or not accumulates(name, value):
                continue
            after = self._sample(twin.state[name], pick).flatten()
            before = pick(value).float().clone()
            if after.shape == before.shape:
                yield name, (before, after.float())


def accumulates(name, value):
    """Whether a state is a sum over steps: a tensor of fractions that does not complete the weight."""
    return (
        torch.is_tensor(value)
        and value.is_floating_point()
        and value.dim() > 0
        and name not in NAMES_OF_LOW_PARTS
    )


def skips(optimizer):
    """Whether a fused optimiser will pass by the step that begins: GradScaler has told it of an overflow."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
