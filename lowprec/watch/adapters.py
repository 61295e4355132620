"""Other people's optimisers and averages, asked the questions that ours answer. They are read, never changed.

    answers = answering(torch.optim.AdamW(model.parameters()))      # held, moment, wanted; see Rounded
    average = Average.of(EMAModel(model.parameters()), model)       # shadow, decay

What an optimiser wants is known by the arithmetic of AdamW from the states it holds, or by letting the
optimiser itself step an fp32 copy of one tensor. Both work on samples where the update of an entry depends on
that entry alone.
"""

import copy
import inspect
import math
import random
import sys
from collections import OrderedDict, defaultdict
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import Refused
from ..optimizers import peers
from ..rounding import exact_weight
from ..telemetry import values_here
from .averages import Average

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
        if _takes_hooks(optimizer):
            return optimizer
        held = getattr(optimizer, "__dict__", {})
        names = [name for name in NAMES_OF_WRAPPED if name in held]
        if not names:
            break
        optimizer = held[names[0]]
    kind = type(optimizer).__name__
    raise Refused(f"Watch takes a torch optimiser or a wrapper that holds one, not {kind}")


def _takes_hooks(optimizer):
    # a wrapper that never called torch's __init__ has the methods and not what they need
    return "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", {})


def answering(optimizer):
    """Something that answers for an optimiser: itself, the adapter of a peer, or a Stranger."""
    if hasattr(optimizer, "wanted") and hasattr(optimizer, "held"):
        return optimizer
    package = type(optimizer).__module__.partition(".")[0]
    by_package = {"optimi": peers.Optimi, "torchastic": peers.Torchastic, "bitsandbytes": peers.Bitsandbytes}
    kind = by_package.get(package, Stranger)
    if kind is not Stranger and "adamw" not in type(optimizer).__name__.lower():
        kind = Stranger
    return kind(optimizer)


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
        fix = "restore the optimiser's state, or clear it to begin anew"
        moments = ["exp_avg", "exp_avg_sq"]
        if groups[p].get("amsgrad"):
            moments.append("max_exp_avg_sq")
        for moment in moments:
            held = state.get(moment)
            if not torch.is_tensor(held):
                raise Refused(f"the optimiser's state of {name} has no {moment}: {fix}")
            if held.shape != p.shape:
                shapes = f"the shape {list(held.shape)}, and the parameter {list(p.shape)}"
                raise Refused(f"{moment} of {name} has {shapes}: {fix}")
        if steps_of(state) is None:
            raise Refused(f"the optimiser's state of {name} has no number of steps: {fix}")


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
        self.accumulated = None  # {parameter: {name: (its state, what the copy made of it)}}, if wanted
        kind, module = type(inner).__name__, type(inner).__module__
        torchs = module.startswith("torch.optim.")
        # whether its update is AdamW's, whether it is known how it rounds, whether entries are independent
        self.exact = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) or kind in ADAMW_CLASSES
        self.known = self.exact or module.startswith("torch.optim")
        self.elementwise = torchs and kind in ELEMENTWISE_CLASSES
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
        adams = "adamw" in type(self.inner).__name__.lower() and self.forms_v
        if not self.known and not adams:
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
        return super().decayed(p) if self._by_arithmetic(p) and not self._coupled(p) else 0.0

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
        if decoupled is None:
            decoupled = "adamw" in type(self.inner).__name__.lower() or not self._plain_adam()
        return not decoupled

    def _plain_adam(self):
        adam = isinstance(self.inner, torch.optim.Adam) and not isinstance(self.inner, torch.optim.AdamW)
        return adam or type(self.inner).__name__ == "Adam"

    def _by_arithmetic(self, p):
        group, state = self._group(p), self.state.get(p, {})
        if not self.exact or group.get("amsgrad") or group.get("maximize") or "betas" not in group:
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
        alike = {}  # {(group, steps, device): numbers of the parameters that AdamW's arithmetic tells}
        for i, p in enumerate(params):
            if self._by_arithmetic(p):
                key = id(self._group(p)), self.step_of(p), p.device
                alike.setdefault(key, []).append(i)
                continue
            update = self._by_a_copy(p, pick)
            if update is not None:
                found[i] = update
        for (_, step, _), members in alike.items():
            theirs = [params[i] for i in members]
            g = [gradients[i] for i in members]
            values = torch.cat([held[i] for i in members])
            update = self._adamw_of(theirs, g, values, step, pick)
            lengths = [part.numel() for part in g]
            for i, part in zip(members, update.split(lengths), strict=True):
                found[i] = part
        return found

    def step_of(self, p):
        """The number of steps that the optimiser counts for p; None where it counts none."""
        step = self.state.get(p, {}).get("step", self._group(p).get("step"))
        return None if step is None else int(step)

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

    def _by_a_copy(self, p, pick):
        """The update that the optimiser gives an fp32 copy of p, or of its sample; None where it fails."""
        if p in self.silent or p.grad is None:
            return None
        take = pick if self.elementwise else (lambda t: values_here(t).clone())
        twin = torch.nn.Parameter(take(p).float().clone())
        twin.grad = take(p.grad).float() / grad_scale(self.inner)
        given = twin.grad.clone()
        try:
            with undrawn(p.device), torch.no_grad():
                states = self._step(p, twin, take)
        except Exception:  # a stranger's code may need what a copy of one tensor does not have
            self.silent.add(p)
            return None
        if not self.known and self.forms_v:
            self.forms_v = self._is_adams(p, given, states, take)
        if self.accumulated is not None and self.known:
            self.accumulated[p] = dict(self._accumulators(p, states, pick))
        update = twin.detach() - take(p).float()
        return update if self.elementwise else pick(update)

    def _is_adams(self, p, g, stepped, take):
        """Whether the step of a copy left beta2 v + (1 - beta2) g^2. Grokfast, for one, takes another g."""
        after, held = stepped.get("exp_avg_sq"), self.state.get(p, {}).get("exp_avg_sq")
        beta, _ = self.decay(p, "exp_avg_sq")
        if not torch.is_tensor(after) or after.shape != g.shape or math.isnan(beta):
            return True
        before = take(held).float() if torch.is_tensor(held) else torch.zeros_like(g)
        wanted = beta * before + (1 - beta) * g.square()
        return float((after - wanted).abs().sum()) <= 0.01 * float(wanted.abs().sum())

    def draws(self, p):
        """Whether a step of p draws random numbers, by which it could round; None where that can't be seen. A
        copy of its dtypes is stepped.
        """
        twin = torch.nn.Parameter(values_here(p).detach().clone())
        twin.grad = torch.full_like(twin, 1e-3) if p.grad is None else values_here(p.grad).clone()
        drawing = Drawing()
        try:
            with undrawn(p.device), torch.no_grad(), torch.compiler.set_stance("force_eager"), drawing:
                self._step(p, twin, values_here, wide=False)
        except Exception:  # see _by_a_copy
            return None
        return drawing.seen

    def _accumulators(self, p, stepped, pick):
        """(name, (fp32 sample of a state of p, and of the one that a step of the copy left)): all but second
        moments, which are looked at by themselves.
        """
        for name, value in self.state.get(p, {}).items():
            judged_elsewhere = name in self.names["exp_avg_sq"]
            if judged_elsewhere or name not in stepped or not accumulates(name, value):
                continue
            after = stepped[name].flatten() if self.elementwise else pick(stepped[name])
            before = pick(value).float().clone()
            if after.shape == before.shape:
                yield name, (before, after.float())

    def _step(self, p, twin, take, wide=True):
        """Step the copy; its states then. wide: they are fp32."""
        inner = self.inner
        # copying would run its __setstate__, which changes shared groups
        other = object.__new__(type(inner))
        # a scheduler's wrapper of `step` is bound to the optimiser itself
        shared = ("step", "param_groups", "state")
        own = {name: apart(value) for name, value in vars(inner).items() if name not in shared}
        vars(other).update(own)
        group = {name: apart(value) for name, value in self._group(p).items() if name != "params"}
        other.param_groups = [{**group, "params": [twin]}]
        other.state = defaultdict(dict)
        state = self._copied_state(p, take, wide)
        if state:
            other.state[twin] = state
        other._optimizer_step_pre_hooks = OrderedDict()
        other._optimizer_step_post_hooks = OrderedDict()
        inspect.unwrap(type(inner).step)(other)
        return other.state[twin]

    def _copied_state(self, p, take, wide):
        """The state of p, in fp32 or as it is; of tensors of its shape what `take` takes."""
        copied = {}
        for name, value in self.state.get(p, {}).items():
            if not torch.is_tensor(value):
                copied[name] = copy.deepcopy(value)
                continue
            alike = value.dim() > 0 and value.shape == p.shape
            value = take(value).clone() if alike else values_here(value).clone()
            copied[name] = value.float() if wide and value.is_floating_point() else value
        return copied


class Drawing(TorchDispatchMode):
    """Within it, `seen` tells whether torch has drawn a random number."""

    seen = False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in operation.tags
        return operation(*args, **(kwargs or {}))


def apart(value):
    """What a copy of an optimiser may change without changing the original's: small tensors, generators, and
    lists and dicts of them. Parameters stay the same, and large tensors: it would take long to copy them.
    """
    if torch.is_tensor(value):
        small = not isinstance(value, torch.nn.Parameter) and value.numel() <= 1 << 12
        return value.detach().clone() if small else value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) is dict:
        return {key: apart(held) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(apart, value))
    drawn = type(value).__module__.partition(".")[0] in ("random", "numpy")
    return copy.deepcopy(value) if drawn else value


@contextmanager
def undrawn(device):
    """Within it, what is drawn from the global generators of torch, Python and numpy is not missing later."""
    numpy = sys.modules.get("numpy")
    of_python = random.getstate()
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def accumulates(name, value):
    """Whether a state is a sum over steps: a tensor of fractions that does not complete the weight."""
    return (
        torch.is_tensor(value)
        and value.is_floating_point()
        and value.dim() > 0
        and name not in NAMES_OF_LOW_PARTS
    )


def grad_scale(optimizer):
    """What GradScaler has left to a fused optimiser to divide gradients by."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def skips(optimizer):
    """Whether a fused optimiser will pass by the step that begins: GradScaler has told it of an overflow."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
