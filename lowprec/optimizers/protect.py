"""Any torch optimiser on bf16 weights: it steps fp32 copies, which are written back stochastically or with
Kahan compensation.

    optimizer = protect(Prodigy(model.parameters()), update="stochastic")    # after model.to(torch.bfloat16)
    loss.backward()
    optimizer.step()

The rule, its options and its state stay the optimiser's own. It sees fp32 weights and gradients, so the state
that it makes is fp32 too.
"""

import copy
import operator
import warnings
from collections import defaultdict
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .. import kernels
from ..errors import Refused, check_choice
from ..rounding import ALONE, KAHAN, exact_weight, noise_key, uniform
from .answers import params_of
from .buckets import scale_of
from .groups import check_dtypes, name_of
from .peers import Peer, check_closure
from .state import own_attributes

WAYS = {"stochastic": ALONE, "kahan": KAHAN}
WRITES = {"stochastic": {"update": "stochastic"}, "kahan": {"kahan": "on"}}  # as the ledger says it
COPIES_AT_ONCE = 1 << 22  # entries of fp32 copies that are there together, where no tensor alone has more


def protect(optimizer, update="stochastic", seed=0):
    """A torch optimiser that steps as `optimizer` steps fp32 weights, on bf16 ones. fp32 ones may be among
    them.

    update: "stochastic" rounds each write so that it is right on average; "kahan" keeps what was rounded away
    in a bf16 buffer, "compensation" in the state, of 2 bytes a parameter. Noise is a function of (seed, step,
    place in the parameter list): a resumed run goes on bit for bit. Learning-rate schedulers work on either
    of the two optimisers; step, save and load this one.

    A step holds fp32 copies of COPIES_AT_ONCE entries or of the largest tensor, and their gradients: 8 bytes
    an entry. Where a trial on small tensors shows that the step of one depends on the others, as Prodigy's,
    it holds those of all tensors (`together`). Quantised weights of torchao and SDNQ are stepped
    dequantised, and round by themselves.

    Raises Refused for other dtypes, for an optimiser that needs a closure, as LBFGS, for one that is
    captured in a CUDA graph or differentiated through, and for a net spread by fully_shard.
    """
    return Protected(optimizer, update, seed)


class Protected(Peer):
    """What `protect` makes. inner: the optimiser. together: whether all tensors are stepped at once."""

    def __init__(self, inner, update="stochastic", seed=0):
        check_choice("update", update, WAYS)
        _check_optimizer(inner)
        self.update, self.seed = update, int(seed)
        self.trained = None  # the weights to go on with, while those to evaluate are in their place
        super().__init__(inner)
        for group in self.param_groups:
            self._begin(group)
        self.low = WAYS[update].name
        self.writes = {**WRITES[update], "exp_avg": "fp32", "exp_avg_sq": "fp32"}
        self._widen()  # what it made at once, as torch's Adagrad
        self.together = _trial(inner)
        inner.register_step_pre_hook(_refuse_bare_step)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._begin(self.param_groups[-1])

    def _begin(self, group):
        group.setdefault("written", 0)  # how many steps: the noise goes by it
        for p in group["params"]:
            _check_parameter(p, self)

    # -- one step

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        """One update; see Rounded.step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        grad_of = operator.attrgetter("grad") if grads is None else grads.get
        given = {p: grad_of(p) for p in self.all_params() if grad_of(p) is not None}
        places = self._places()

        def copied(p):
            _check_parameter(p, self)  # it may have been frozen, or cast since
            q = _copy(p, self.low_part(p))
            q.grad = given[p].to(torch.float32)
            if torch.is_tensor(grad_scale) or grad_scale != 1.0:
                q.grad = q.grad * scale_of(grad_scale, p)
            return q

        def written(p, q):
            way = WAYS[self.update] if p.dtype == torch.bfloat16 else ALONE
            if is_traceable_wrapper_subclass(p):  # quantised weights of torchao and SDNQ
                p.copy_(q)
            elif way is ALONE:
                flat = p.flatten()
                kernels.write(q.flatten(), flat, noise_key(self.seed, *places[p], device=p.device), True)
                p.copy_(flat.view_as(p))
            else:
                way.write(q, p, None, self.state[p].setdefault(way.name, way.low(p)))

        in_turns(self.inner, self._turns(given), self.inner.step, copied, written)
        for group in self.param_groups:
            group["written"] += 1
        return loss

    def _turns(self, params):
        """Lists of parameters, each of which is stepped at once."""
        if self.together:
            return [list(params)]
        turns, room = [], 0
        for p in params:
            if p.numel() > room:
                turns.append([])
                room = COPIES_AT_ONCE
            turns[-1].append(p)
            room -= p.numel()
        return turns

    def _places(self):
        """{parameter: (step, position)}, which number its noise."""
        found, position = {}, 0
        for group in self.param_groups:
            for p in group["params"]:
                found[p] = group["written"] + 1, position
                position += p.numel()
        return found

    # -- schedule-free optimisers evaluate other weights than they train

    @torch.no_grad()
    def eval(self):
        """Put the weights to evaluate in the place of the trained ones, which are kept beside them."""
        if self.has_modes and self.trained is None:
            self.trained = [p.detach().clone() for p in self.all_params()]
            self._switch(self.inner.eval)

    @torch.no_grad()
    def train(self):
        """Put the trained weights back, bit for bit."""
        if self.has_modes:
            self._switch(self.inner.train)
        if self.trained is not None:
            torch._foreach_copy_(self.all_params(), self.trained)
            self.trained = None

    def _switch(self, call):
        in_turns(self.inner, self._turns(self.all_params()), call, _copy, lambda p, q: p.copy_(q))

    @contextmanager
    def reading(self):
        self.eval()
        try:
            yield self.has_modes
        finally:
            self.train()

    # -- questions, see Answers

    def low_part(self, p):
        return self.state.get(p, {}).get(self.low)

    # -- state

    def take_state(self, state_dict):
        super().take_state(state_dict)
        if any("written" not in group for group in self.param_groups):  # a state of the optimiser alone
            for group in self.param_groups:
                group["written"] = 0
            self._widen()

    def _widen(self):
        """Bring what the optimiser kept in bf16, as it does beside bf16 weights, to fp32."""
        for p, state in self.state.items():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dtype == torch.bfloat16 == p.dtype:
                    state[name] = value.float()


@torch.no_grad()
def in_turns(optimizer, turns, call, copied, written):
    """Call a method of an optimiser on copies of its parameters, once for each of `turns`, which see the same
    options. copied(p): a copy, with its gradient; written(p, copy): what is done with it after the call.
    """
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    options = [dict(group) for group in groups]
    try:
        for turn in turns:
            copies = {p: copied(p) for p in turn}
            for group, before, own in zip(groups, options, members, strict=True):
                group.clear()
                group.update(before, params=[copies[p] for p in own if p in copies])
            _move_states(optimizer.state, copies.items())
            try:
                call()
            finally:
                _move_states(optimizer.state, [(q, p) for p, q in copies.items()])
            for p, q in copies.items():
                written(p, q.detach())
    finally:
        for group, own in zip(groups, members, strict=True):
            group["params"] = own


def _move_states(states, pairs):
    """Give the state of one parameter to another. An empty one is none: optimisers make their own."""
    for before, after in pairs:
        own = states.pop(before, None)
        if own:
            states[after] = own


def _copy(p, low=None):
    """An fp32 parameter of the value of p and its low part; of an fp32 one in the same memory."""
    value = p.detach()
    value = value.dequantize().float() if is_traceable_wrapper_subclass(p) else exact_weight(value, low)
    q = nn.Parameter(value)
    vars(q).update(vars(p))  # marks that a program has put on it
    return q


def _refuse_bare_step(inner, args, kwargs):
    if any(p.dtype == torch.bfloat16 for p in params_of(inner.param_groups)):  # a copy is fp32
        raise Refused("step() of a protected optimiser rounds to nearest: step what protect returned")


# ---- What it can't do --------------------------------------------------------------------------------------


def _check_optimizer(inner):
    kind = type(inner).__name__
    if not isinstance(inner, torch.optim.Optimizer):
        raise Refused(f"protect takes a torch.optim.Optimizer, not {kind}")
    check_closure(inner)
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in inner.param_groups):
            raise Refused(f"protect takes no {option}=True: it numbers its noise on the host")
    if hasattr(inner, "held"):
        raise Refused(f"{kind} writes bf16 weights by itself: give it update='stochastic' or kahan=True")


def _check_parameter(p, optimizer):
    if not is_traceable_wrapper_subclass(p):
        if p.requires_grad:
            check_dtypes([p], optimizer)
    elif type(p).dequantize is torch.Tensor.dequantize:
        raise Refused(f"{name_of(p, optimizer)} is a {type(p.data).__name__}, which protect can't step")


# ---- Whether tensors are stepped each by itself ------------------------------------------------------------

SIZE_OF_TRIAL = 4  # entries along each dimension
SCALES_OF_TRIAL = (1e-3, 1.0, 1e3, 1.0)  # of the gradients of each step: some are clipped


@torch.no_grad()
def _trial(inner):
    """Whether an optimiser must step all tensors at once: whether small ones end elsewhere, by a bit, where
    each is stepped by itself. Raises Refused where it steps copies otherwise than weights.
    """

    def end(turns=None):
        """What small tensors end with, in one list. turns(tensors): as of `in_turns`; None: plain steps."""
        torch.default_generator.manual_seed(0)
        optimizer, params = _small(inner)
        for step, scale in enumerate(SCALES_OF_TRIAL, 1):
            for i, p in enumerate(params):
                p.grad = (uniform(p.shape, noise_key(i, step)) - 0.4) * scale
            if turns is None:
                optimizer.step()
            else:
                in_turns(optimizer, turns(params), optimizer.step, _twin, lambda p, q: p.copy_(q))
        return tree_leaves([[p.detach() for p in params], optimizer.state_dict()])

    def each_alone(params):
        return [[p] for p in params]

    def all_together(params):
        return [params]

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = end()
            for turns in (each_alone, all_together):
                with suppress(Exception):  # as of one that reads the first parameter of each group
                    if _same(end(turns), expected):
                        return turns is all_together
            if not _same(end(), expected):  # it draws noise of its own
                return True
        except Exception:  # a stranger's code, which may not take such small tensors
            return True
    raise Refused(f"{type(inner).__name__} steps copies of weights otherwise than weights: use it without")


def _twin(p):
    q = nn.Parameter(p.detach().clone())
    q.grad = p.grad.clone()
    return q


def _same(one, two):
    for a, b in zip(one, two, strict=True):
        if torch.is_tensor(a):
            if not torch.equal(a, b):
                return False
        elif isinstance(a, int | float | str) and a != b:
            return False
    return True


def _small(inner):
    """(a copy of an optimiser without a state, its parameters): two small ones of each group."""
    chosen, memo = [], {id(inner.state): defaultdict(dict)}
    for group in inner.param_groups:
        memo.update((id(p), None) for p in group["params"])
        for p in [p for p in group["params"] if p.requires_grad][:2]:
            shape = [min(SIZE_OF_TRIAL, n) for n in p.shape]
            chosen.append(nn.Parameter(uniform(shape, noise_key(len(chosen), 0)) - 0.5))
            memo[id(p)] = chosen[-1]
    optimizer = object.__new__(type(inner))
    optimizer.__setstate__(copy.deepcopy(own_attributes(inner), memo))
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not None]
    return optimizer, chosen
