"""fp32 copies of parameters, stepped by an optimiser's own code. The training keeps its bits.

    for twin in stepped_twins(optimizer, params, take): ...      # twin.update: what it wants of a parameter

The copies stand at the places of their parameters in the groups, so that a step that counts or names its
parameters, or clips all of them together, does what it does in the training.
"""

import collections
import copy
import inspect
import random
import sys
import types
from contextlib import contextmanager, nullcontext

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..telemetry import values_here

MOST_TOGETHER = 1 << 24  # entries that are copied together: a larger net tensor by tensor


class Twin:
    """A copy of parameter p. start: what it held; state: what the optimiser keeps of it; None until stepped.

    take: tensor of the parameter's shape -> what is copied of it. wide: in fp32; else as it is.
    """

    def __init__(self, p, scale, take, wide):
        self.p = p
        self.take = take
        self.wide = wide
        self.param = torch.nn.Parameter(self.copied(p))
        grad = torch.full_like(self.param, 1e-3) if p.grad is None else self.copied(p.grad)
        self.param.grad = grad / scale if scale != 1.0 else grad
        self.start, self.gradient = self.param.detach().clone(), self.param.grad.clone()
        self.state = None

    def copied(self, value):
        """A tensor of the parameter's shape as `take` takes it, another whole; never the same memory."""
        if not torch.is_tensor(value):
            return copy.deepcopy(value)
        alike = value.dim() > 0 and value.shape == self.p.shape
        value = (self.take(value) if alike else values_here(value)).detach().clone()
        return value.float() if self.wide and value.is_floating_point() else value

    @property
    def update(self):
        return self.param.detach() - self.start

    @property
    def rounds(self):
        """Whether the step rounds by itself what it writes in 16 bits, even of an fp32 copy."""
        after = self.param.detach()
        return self.p.dtype.itemsize < 4 and bool((after.to(self.p.dtype).float() == after).all())


def stepped_twins(inner, params, take, wide=True, **options):
    """[Twin of each parameter after a step of `inner`, None where it fails]. options: of the groups, in place
    of theirs, as weight_decay=0.0.
    """
    if sum(take(p).numel() for p in params) <= MOST_TOGETHER:
        found = _stepped(inner, params, take, wide, options)
        if found is not None:
            return found
    found = []
    for p in params:
        found += _stepped(inner, [p], take, wide, options, alone=True) or [None]
    return found


def _stepped(inner, params, take, wide, options, alone=False):
    twins = {p: Twin(p, grad_scale(inner), take, wide) for p in params}
    own = Own(twins, type(inner).__module__)
    try:
        other = _other(inner, twins, own, options, alone)
        trusted = type(inner).__module__.startswith("torch.optim.")
        with undrawn(params[0].device), torch.no_grad(), eagerly(), nullcontext() if trusted else own:
            with in_place(inner):
                inspect.unwrap(type(inner).step)(other)
    except Exception:  # a stranger's code may need what a copy does not have
        return None
    for twin in twins.values():
        twin.state = other.state[twin.param]
    return list(twins.values())


def _other(inner, twins, own, options, alone):
    """An optimiser of the same class and options that has the copies."""
    # copying would run its __setstate__, which changes shared groups
    other = object.__new__(type(inner))
    # a scheduler's wrapper of `step` is bound to the optimiser itself
    shared = ("step", "param_groups", "state")
    vars(other).update({name: own.apart(value) for name, value in vars(inner).items() if name not in shared})
    other.param_groups, other.state = [], collections.defaultdict(dict)
    for group in inner.param_groups:
        if not any(p in twins for p in group["params"]):
            continue
        mine = {name: own.apart(value) for name, value in group.items() if name != "params"}
        mine.update({name: value for name, value in options.items() if name in mine})
        places = [i for i, p in enumerate(group["params"]) if p in twins or not alone]
        if "param_names" in mine:
            mine["param_names"] = [mine["param_names"][i] for i in places]
        mine["params"] = [own.copies.get(group["params"][i], _absent(group["params"][i])) for i in places]
        other.param_groups.append(mine)
    for p, twin in twins.items():
        state = {name: twin.copied(value) for name, value in inner.state.get(p, {}).items()}
        if state:
            other.state[twin.param] = state
    other._optimizer_step_pre_hooks = collections.OrderedDict()
    other._optimizer_step_post_hooks = collections.OrderedDict()
    own.made += [t for state in other.state.values() for t in state.values() if torch.is_tensor(t)]
    return other


def _absent(p):
    """What stands for a parameter that is not copied: it has no gradient."""
    return torch.nn.Parameter(torch.empty(0, device=p.device))


class Own(TorchDispatchMode):
    """What belongs to the copies. Within it, a step that writes to anything else fails before it does."""

    def __init__(self, twins, module):
        super().__init__()
        self.module = module  # of the optimiser's class
        self.copies = {p: twin.param for p, twin in twins.items()}
        self.numbers = {id(p): id(twin.param) for p, twin in twins.items()}
        self.twins = twins
        self.made = [t for twin in twins.values() for t in (twin.param, twin.param.grad)]
        self.objects = {}  # {id of an object: its copy}
        self.memory = None  # addresses of what may be written

    def apart(self, value):
        """What a copy of an optimiser may change without changing the original's: small tensors, generators,
        and containers of them, in which a parameter is its copy. Other parameters stay the same, and large
        tensors: it would take long to copy them.
        """
        if torch.is_tensor(value):
            if isinstance(value, torch.nn.Parameter):
                return self.copies.get(value, value)
            if value.numel() > 1 << 12:
                return value
            self.made.append(value.detach().clone())
            return self.made[-1]
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, torch.optim.Optimizer):
            raise PermissionError("a copy's step would step the training's own optimiser")
        if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
            found = copy.copy(value)
            found.clear()
            for key, held in value.items():
                found[self._key(key)] = self._held(key, held)
            return found
        if type(value) in (list, tuple, set, collections.deque):
            return type(value)(map(self.apart, value))
        if type(value).__module__.partition(".")[0] in ("random", "numpy"):
            return copy.deepcopy(value)
        return self._plain(value)

    def _plain(self, value):
        """A copy of a namespace, or of an object of the module of the optimiser; another is the same: it may
        hold a file.
        """
        kind = type(value)
        is_known = kind is types.SimpleNamespace or kind.__module__ == self.module
        if not is_known or callable(value) or hasattr(kind, "__del__") or isinstance(value, torch.nn.Module):
            return value
        if id(value) not in self.objects:
            self.objects[id(value)] = found = kind.__new__(kind)
            vars(found).update({key: self.apart(inner) for key, inner in vars(value).items()})
        return self.objects[id(value)]

    def _key(self, key):
        if torch.is_tensor(key):
            return self.copies.get(key, key)
        return self.numbers.get(key, key) if type(key) is int else key

    def _held(self, key, held):
        """What a dict of the optimiser's own holds of a parameter, as a state does."""
        if torch.is_tensor(key) and key in self.twins and torch.is_tensor(held):
            self.made.append(self.twins[key].copied(held))
            return self.made[-1]
        return self.apart(held)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.memory is None:
            self.memory = {t.untyped_storage().data_ptr() for t in self.made}
        schema = operation._schema
        if schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[i] if i < len(args) else kwargs.get(argument.name)
                    self._check(written)
        result = operation(*args, **kwargs)
        # torch.tensor(0.0) is dispatched as a view of what it made
        is_new = operation is torch.ops.aten.lift_fresh.default
        if is_new or not any(one.alias_info for one in schema.returns):
            for t in pytree.tree_leaves(result):
                if type(t) is torch.Tensor:
                    self.memory.add(t.untyped_storage().data_ptr())
        return result

    def _check(self, written):
        for t in pytree.tree_leaves(written):
            if type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel():
                if t.untyped_storage().data_ptr() not in self.memory:
                    raise PermissionError("a copy's step writes to the training")


@contextmanager
def in_place(inner):
    """After it parameters have the gradients and the memory that they had; it fails where they had others."""
    before = [(p, p.grad, p.data) for group in inner.param_groups for p in group["params"]]
    try:
        yield
    finally:
        replaced = False
        for p, grad, data in before:
            if p.grad is not grad:
                p.grad, replaced = grad, True
            if p.data_ptr() != data.data_ptr():
                p.data, replaced = data, True
    if replaced:
        raise PermissionError("a copy's step writes to the training")


def eagerly():
    """Within it nothing is compiled. torch._dynamo takes seconds to import: without it nothing is either."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Drawing(TorchDispatchMode):
    """Within it, `seen` tells whether torch has drawn a random number."""

    seen = False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in operation.tags
        return operation(*args, **(kwargs or {}))


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


def grad_scale(optimizer):
    """What GradScaler has left to a fused optimiser to divide gradients by."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
