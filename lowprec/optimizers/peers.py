"""Other people's optimisers, which answer as ours do (see answers.py) and round in their own way.

    optimizer = Torchastic.make(params, dict(lr=1e-3))                  # a peer, as its authors publish it
    optimizer = Peer(torch.optim.SGD(model.parameters(), lr=0.1))       # any optimiser of torch's kind

The adapter says what the optimiser holds and wants, where its state tells. A new peer is one class and a row
of PEER_OPTIMIZERS.
"""

import inspect
import math
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from ..errors import Refused
from ..formats import FORMATS
from ..machine import quiet_import
from .answers import Answers, params_of
from .buckets import scale_of
from .groups import check_sizes
from .state import own_attributes, refuse_value


def check_closure(optimizer):
    """Raises Refused for an optimiser that calls a closure within its step, as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refused(f"{type(optimizer).__name__} asks for a closure at each step, and step() here has none")


class Peer(Answers, torch.optim.Optimizer):
    """Any torch optimiser as one that answers. `names`: what it calls the moments, `low`: what completes a
    weight.

    inner: the optimiser. Its parameter groups are this one's, so torch's schedulers work on either.
    """

    names = {"exp_avg": ("exp_avg", "momentum_buffer"), "exp_avg_sq": ("exp_avg_sq",)}
    shaped_as_weights: tuple[str, ...] = ()  # names of states that have the shape of their weight
    low: str | None = None  # name of the state that keeps what rounding lost
    # {site: how it is written}: update, kahan, moments and decay, where not as the recipe says
    writes: dict = {}
    by_recipe = False
    by_rows = False

    def __init__(self, inner):
        self.inner = inner
        super().__init__(params_of(inner.param_groups), {})
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        # as schedule-free optimisers have
        self.has_modes = callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None))
        if self.has_modes:
            inner.train()

    @contextmanager
    def reading(self):
        if not self.has_modes:
            yield False
            return
        trained = [p.detach().clone() for p in self.all_params()]
        self.inner.eval()
        try:
            yield True
        finally:
            self.inner.train()
            with torch.no_grad():  # to the bit: train() computes them back
                torch._foreach_copy_(self.all_params(), trained)

    # -- one step

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        """One update; see Rounded.step. Gradients are scaled in place."""
        if grads is None:
            grads = {p: p.grad for p in self.all_params() if p.grad is not None}
        else:
            grads = {p: grads[p] for p in self.all_params() if p in grads}
        if isinstance(grad_scale, dict):
            for p, g in grads.items():
                g.mul_(scale_of(grad_scale, p))
        elif grads and (torch.is_tensor(grad_scale) or grad_scale != 1.0):
            torch._foreach_mul_(list(grads.values()), float(grad_scale))
        for p, g in grads.items():
            p.grad = g.to(p.dtype)
        return self.inner.step() if closure is None else self.inner.step(closure)

    # -- questions, see Answers

    def _beside(self, p):
        return [t for t in [self.state.get(p, {}).get(self.low)] if t is not None]

    def moment(self, p, name, pick=torch.flatten):
        found = self._state(p, name)
        if found is None:
            return None
        return pick(self.decoded(found, p, name))

    def _state(self, p, name):
        state = self.state.get(p, {})
        for key in self.names.get(name, ()):
            if key not in state:
                continue
            found = state[key]
            if torch.is_tensor(found) and found.numel() == p.numel():
                return found
            return None
        return None

    def decoded(self, held, p, name):
        """The values of a moment, from the tensor that is held."""
        return held

    def clear(self, p, name):
        found = self._state(p, name)
        if found is None:
            return False
        found.zero_()
        return True

    def decay(self, p, name):
        group = self._group(p)
        if name not in self.names or "betas" not in group:
            return math.nan, 0
        step = self.state.get(p, {}).get("step", 0)
        return group["betas"][0 if name == "exp_avg" else 1], int(step)

    def nbytes(self):
        """As allocated: nothing before the first step. What is no first moment counts as a second one."""
        total = dict.fromkeys(("exp_avg", "exp_avg_sq", "kahan", "master"), 0)
        site_of = {**dict.fromkeys(self.names["exp_avg"], "exp_avg"), self.low: "kahan"}
        for state in self.state.values():
            for name, t in state.items():
                if torch.is_tensor(t) and t.dim():  # a step counter is no state of a weight
                    total[site_of.get(name, "exp_avg_sq")] += t.nbytes
        return total

    # -- state

    def __getstate__(self):
        return own_attributes(self)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        """torch's loader casts floating states to the parameter's dtype: each saved tensor goes back as it
        was saved. Raises Refused for a state of other shapes, which torch's loader takes.
        """
        self.take_state(self.checked_state(state_dict))

    def checked_state(self, state_dict):
        check_sizes(state_dict["param_groups"], self)
        for p, saved in self._saved_of_each(state_dict):
            self._check_shapes(p, saved)
        return state_dict

    def take_state(self, state_dict):
        rates = [group.get("initial_lr") for group in self.param_groups]
        self.inner.load_state_dict(state_dict)
        for group, rate in zip(self.inner.param_groups, rates, strict=True):
            if rate is not None:  # states of old do not hold it, and their lr may be that of a warm-up
                group.setdefault("initial_lr", rate)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for p, saved in self._saved_of_each(state_dict):
            self._load(p, saved)

    def _saved_of_each(self, state_dict):
        """[(parameter, its saved state)]."""
        found = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, i in zip(group["params"], saved["params"], strict=True):
                found.append((p, state_dict["state"].get(i, {})))
        return found

    def _check_shapes(self, p, saved):
        own = self.state.get(p, {})
        for name, value in saved.items():
            here = own.get(name, p if name in self.shaped_as_weights else value)
            if torch.is_tensor(value) and (not torch.is_tensor(here) or here.shape != value.shape):
                refuse_value("optimiser state", name, value, here)

    def _load(self, p, saved):
        def copied(value):
            if not torch.is_tensor(value):
                return value
            if not value.dim():  # a step counter stays where it is
                return value.clone()
            return value.to(p.device, copy=True)

        for name, value in saved.items():
            if torch.is_tensor(self.state[p].get(name)) and not torch.is_tensor(value):
                continue  # of a count of steps that is a number, torch's AdamW has made a tensor
            self.state[p][name] = tree_map(copied, value)


# ---- Peers -------------------------------------------------------------------------------------------------


class Published(Peer):
    """An AdamW, as its authors publish it."""

    shaped_as_weights = ("exp_avg", "exp_avg_sq", "ema", "ema_squared")
    low_bytes = 0  # bytes a parameter of the state `low`
    takes_fp32 = False  # whether fp32 weights too
    codes: str | None = None  # the formats.Format of its moments, where these are in codes

    def attach(self, model):
        """Called once with the model whose parameters it steps, if that is known."""

    def wanted(self, p, g, pick=torch.flatten):
        """By AdamW's arithmetic from the moments held; None where these don't tell."""
        group, state = self._group(p), self.state.get(p, {})
        held = self.held(p, pick)
        m = self.moment(p, "exp_avg", pick)
        v = self.moment(p, "exp_avg_sq", pick)
        if state and (m is None or v is None):
            return None
        beta1, t = self.decay(p, "exp_avg")
        beta2, _ = self.decay(p, "exp_avg_sq")
        corrections = (1.0, 1.0)
        if not math.isinf(t):
            corrections = (1 - beta1 ** (t + 1), 1 - beta2 ** (t + 1))
        m = torch.zeros_like(held) if m is None else m.float()
        v = torch.zeros_like(held) if v is None else v.float()
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        step = m / corrections[0] / ((v / corrections[1]).sqrt() + group["eps"])
        return -float(group["lr"]) * (step + group["weight_decay"] * held)

    def moment_bytes(self, p):
        """Bytes of one moment of p; known before the first step allocates it."""
        return p.numel() * p.element_size()

    def nbytes(self):
        params = self.all_params()
        moments = sum(self.moment_bytes(p) for p in params)
        low = self.low_bytes * sum(p.numel() for p in params)
        return {"exp_avg": moments, "exp_avg_sq": moments, "kahan": low, "master": 0}


class Torch(Published):
    """torch.optim.AdamW."""

    package = "torch"
    takes_fp32 = True

    @classmethod
    def make(cls, params, options):
        return cls(torch.optim.AdamW(params, **options))


class Torchastic(Published):
    """torchastic (Lodestone): stochastic rounding of weights, moments and summed gradients, by torch's own
    generator.
    """

    package = "torchastic"
    names = {"exp_avg": ("ema",), "exp_avg_sq": ("ema_squared",)}
    writes = {"update": "stochastic", "moments": "stochastic"}

    @classmethod
    def make(cls, params, options):
        return cls(quiet_import("torchastic", "--optimizer torchastic").AdamW(params, **options))

    def attach(self, model):
        self.model = model
        self.accumulator = quiet_import("torchastic", "--optimizer torchastic").StochasticAccumulator
        self.accumulator.assign_hooks(model)
        self.collecting = (self._collect,)

    def _collect(self):
        for p in self.model.parameters():  # it fails on a parameter that got no gradient: give it a zero one
            if p.requires_grad and not hasattr(p, "acc_grad"):
                p.acc_grad = torch.zeros_like(p)
        self.accumulator.reassign_grad_buffer(self.model)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for p in self.all_params():
            if hasattr(p, "acc_grad"):
                del p.acc_grad


class Optimi(Published):
    """torch-optimi's AdamW with Kahan summation. Its moments are kept corrected: their decay starts at 0."""

    package = "torch-optimi"
    low, low_bytes = "kahan_comp", 2
    writes = {"kahan": "on", "moments": "nearest", "decay": "nearest"}

    @classmethod
    def make(cls, params, options):
        module = quiet_import("optimi", "--optimizer optimi", "torch-optimi")
        return cls(module.AdamW(params, **options, decouple_lr=False, kahan_sum=True))

    def decay(self, p, name):
        group = self._group(p)
        beta = group["beta1" if name == "exp_avg" else "beta2"]
        t = int(group.get("step", 0)) + 1
        return 1 - (1 - beta) / (1 - beta**t), math.inf


class AdamWBF16(Published):
    """adamw-bf16: stochastic writes beside a Kahan-like shift. It saves weight decay up for one large step.

    What it wants is not told: version 0.0.3 forms grad + (1-beta1) exp_avg, which is no average.
    """

    package = "adamw-bf16"
    low, low_bytes = "shift", 2
    writes = {"update": "stochastic", "kahan": "on", "moments": "nearest"}

    @classmethod
    def make(cls, params, options):
        module = quiet_import("adamw_bf16", "--optimizer adamw_bf16", "adamw-bf16")
        inner = module.AdamWBF16(params, **options)
        if not hasattr(inner, "_cuda_graph_capture_health_check"):  # its name in torch 2.14 and before 2.11
            inner._cuda_graph_capture_health_check = inner._accelerator_graph_capture_health_check
        return cls(inner)

    def wanted(self, p, g, pick=torch.flatten):
        return None

    def clear(self, p, name):
        return False  # a step without gradient would not be weight decay alone


class Torchao(Published):
    """torchao's _AdamW with stochastic rounding of bf16 weights. Its learning rate must stay a tensor."""

    package = "torchao"
    writes = {"update": "stochastic", "moments": "nearest"}

    @classmethod
    def make(cls, params, options):
        module = quiet_import("torchao.optim", "--optimizer torchao", "torchao")
        return cls(module._AdamW(params, **options, bf16_stochastic_round=True))


NUMBER_OF_MOMENT = {"exp_avg": 1, "exp_avg_sq": 2}  # by which bitsandbytes calls the moments


class Bitsandbytes(Published):
    """bitsandbytes' AdamW8bit: both moments in 8-bit codes, weights written to nearest."""

    package = "bitsandbytes"
    takes_fp32, codes = True, "int8"
    names = {"exp_avg": ("state1",), "exp_avg_sq": ("state2",)}

    @classmethod
    def make(cls, params, options):
        module = quiet_import("bitsandbytes", "--optimizer bitsandbytes")
        return cls(module.optim.AdamW8bit(params, **options))

    def decoded(self, held, p, name):
        if held.dtype != torch.uint8:
            return held
        library = quiet_import("bitsandbytes.functional", "--optimizer bitsandbytes")
        number, state = NUMBER_OF_MOMENT[name], self.state[p]
        scales, table = state[f"absmax{number}"], state[f"qmap{number}"]
        return library.dequantize_blockwise(held, absmax=scales, code=table, blocksize=256)

    def coded(self, p, name):
        return f"absmax{NUMBER_OF_MOMENT[name]}" in self.state.get(p, {})

    def clear(self, p, name):
        if not self.coded(p, name):
            return super().clear(p, name)
        self.state[p][f"absmax{NUMBER_OF_MOMENT[name]}"].zero_()  # codes are zero where their scale is
        return True

    def nbytes(self):
        found = super().nbytes()
        for name in self.names:
            found[name] += FORMATS["int8"].table_bytes(name == "exp_avg", False)
        return found

    def moment_bytes(self, p):
        # plain fp32 for small tensors; else 1 byte a value and an fp32 scale a block of 256
        n = p.numel()
        return 4 * n if n < 4096 else n + 4 * math.ceil(n / 256)


PEER_OPTIMIZERS = {
    "torch": Torch,
    "torchastic": Torchastic,
    "optimi": Optimi,
    "adamw_bf16": AdamWBF16,
    "torchao": Torchao,
    "bitsandbytes": Bitsandbytes,
}
