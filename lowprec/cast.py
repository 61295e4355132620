"""A net brought to a recipe's dtypes: bf16 weights, islands that stay fp32, buffers.
"""

import collections
import copy
import dataclasses
import inspect
import operator
import re
import types
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import Refused
from .machine import exact_math
from .optimizers import buckets
from .roles import roles

# ---- Parts of a net ----------------------------------------------------------------------------------------


def _island_modules(model, islands):
    """Modules that own parameters and stay fp32. Raises Refused when the net has none of a kind that was
    asked for.
    """
    role_of, chosen = roles(model), []
    owners = [(name, m) for name, m in model.named_modules() if _own(m)]
    for island in islands.split("+") if islands != "none" else []:
        wanted = {"norm": "norm", "embed": "embedding", "final": "head"}[island]
        found = [m for name, m in owners if wanted in role_of[name]]
        if not found:
            none = f"this net has no {island} parameters to keep in fp32"
            raise Refused(f"--set islands={islands}: {none}; leave {island} out")
        chosen += [m for m in found if m not in chosen]
    shared = {p for m in chosen for p in _own(m)}  # a tied head is an island with its embedding
    return [m for _, m in owners if m in chosen or shared & set(_own(m))]


def _own(module):
    return list(module.parameters(recurse=False))


def _keeps_statistics(module):
    # one kernel takes the statistics and the weights, in one dtype
    return getattr(module, "running_mean", None) is not None and bool(_own(module))


def narrowed(x, dtype):
    """x in `dtype`, where finite values stay finite: a mask of torch.finfo(torch.float32).min would become
    -inf in bf16, and a softmax over a row of -inf is NaN.
    """
    top = torch.finfo(dtype).max
    if torch.finfo(x.dtype).max > top and x.layout == torch.strided:
        x = torch.where(x.isfinite(), x.clamp(-top, top), x)
    return x.to(dtype)


def _parts(x):
    """({key: value}, set(x, key, value)) of an object that torch's trees take for a leaf, and that may hold
    tensors; (None, None) of any other.
    """
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
        return {name: getattr(x, name) for name in names}, object.__setattr__
    if isinstance(x, types.SimpleNamespace):
        return dict(vars(x)), setattr
    if isinstance(x, dict | collections.UserDict):
        return dict(x), operator.setitem
    if isinstance(x, list):
        return dict(enumerate(x)), operator.setitem
    return None, None


def to(dtype, tree, cast=torch.Tensor.to):
    """`tree` with its floating tensors in dtype; itself where they are already, since a net may write into
    what it is given. cast: (tensor, dtype) -> tensor.
    """

    def convert(x):
        if torch.is_tensor(x):
            return cast(x, dtype) if x.is_floating_point() else x
        parts, put = _parts(x)
        new = {key: to(dtype, value, cast) for key, value in (parts or {}).items()}
        changed = {key: value for key, value in new.items() if value is not parts[key]}
        x = copy.copy(x) if changed else x
        for key, value in changed.items():
            put(x, key, value)
        return x

    leaves, form = tree_flatten(tree)
    new = [convert(leaf) for leaf in leaves]
    return tree_unflatten(new, form) if any(a is not b for a, b in zip(new, leaves, strict=True)) else tree


def _into_island(module, args, kwargs):
    return to(torch.float32, (args, kwargs))


def _out_of_island(module, args, out):
    return to(torch.bfloat16, out)


def exact_modules(model, r):
    """(islands, norm layers with running statistics): modules of a net in bf16 whose weights stay fp32."""
    whole = [m for m in model.modules() if _keeps_statistics(m)] if r.buffers == "fp32" else []
    return _island_modules(model, r.islands), whole


class Cast:
    """A model brought to the recipe's dtypes, in place. islands keep fp32 weights and cast at their borders.

    whole: norm layers with running statistics, whose weights stay fp32 with their buffers.
    """

    def __init__(self, model, r):
        self.hooks, self.whole = [], []
        for module in model.modules():  # of an earlier Precision, whose islands these need not be
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [i for i, hook in hooks.items() if hook in (_into_island, _out_of_island)]:
                    del hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
        if not r.low_weights:
            model.float()
            return
        islands, self.whole = exact_modules(model, r)
        exact = {p for m in (*islands, *self.whole) for p in m.parameters(recurse=False)}
        own = {p: torch.float32 if p in exact else torch.bfloat16 for p in model.parameters()}
        own = {p: dtype for p, dtype in own.items() if p.is_floating_point()}
        if any(map(buckets.is_spread, own)):  # what fully_shard keeps follows Module.to alone, not p.data
            model._apply(lambda t: t.to(own.get(t, t.dtype)))
        else:
            for p, dtype in own.items():
                p.data = p.data.to(dtype)
        for module in model.modules():
            for name, b in module.named_buffers(recurse=False):
                if b.is_floating_point():
                    setattr(module, name, b.to(r.dtype("buffers")))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # its weights are views of one tensor, which the cast replaced
        names = {m: name for name, m in model.named_modules()}
        for module in islands:
            before = module.register_forward_pre_hook(_into_island, with_kwargs=True)
            after = module.register_forward_hook(_out_of_island)
            self.hooks.append((names[module], before.id, after.id))

    def undo(self, net):
        """Take the border casts out of `net`, a copy of the model; other people's hooks stay."""
        for name, before, after in self.hooks:
            module = net.get_submodule(name)
            module._forward_pre_hooks.pop(before, None)
            module._forward_pre_hooks_with_kwargs.pop(before, None)
            module._forward_hooks.pop(after, None)
        return net


class View:
    """A net called as a recipe says: floating inputs cast, products in its dtype, floating outputs in the
    loss's dtype.

    A loss that the net forms inside comes back in the loss's dtype too, but a net of bf16 weights that forms
    it from bf16 logits has rounded it by then: write `logits.float()` there, as transformers does. The view
    holds no optimiser and shares nothing with a run but what it is given. keep: names of arguments of forward
    that are left as they are (timesteps have a precision of their own), and keys of a dict that is one. A
    forward of `*args` has no names: pass such an argument by keyword. Integer inputs are left too.
    """

    def __init__(self, net, r, methods=(), keep=()):
        self.net, self.recipe, self.methods = net, r, methods
        self.keep = {keep} if isinstance(keep, str) else set(keep)
        self.forward = net  # a compiled or distributed wrapper may take its place
        self.device = next(net.parameters()).device
        inner = net.get_base_model() if hasattr(net, "get_base_model") else net  # PEFT's says *args
        self.arguments = list(inspect.signature(inner.forward).parameters)

    @contextmanager
    def context(self):
        """What forward runs in: autocast for 8- and 16-bit products of fp32 weights, TF32 as the recipe says,
        and what the methods ask for.
        """
        r = self.recipe
        with ExitStack() as stack:
            stack.enter_context(self.exact())
            if not r.low_weights and r.compute in ("bf16", "fp16", "fp8"):
                stack.enter_context(torch.autocast(self.device.type, dtype=r.dtype("compute")))
            for method in self.methods:
                stack.enter_context(method.context())
            yield

    def exact(self):
        """A context in which fp32 products on CUDA are fp32, or TF32 where the recipe says so."""
        return exact_math(self.recipe.compute == "tf32") if self.device.type == "cuda" else nullcontext()

    def cast(self, args, kwargs):
        """(args, kwargs) as the net takes them."""
        if not self.recipe.low_weights:
            return args, kwargs
        names = [*self.arguments, *[None] * len(args)]
        args = tuple(self._low(name, a) for name, a in zip(names, args, strict=False))
        return args, {name: self._low(name, a) for name, a in kwargs.items()}

    def _low(self, name, value):
        if name in self.keep:
            return value
        if type(value) is dict and self.keep & value.keys():  # a batch, whose keys are names too
            return {key: self._low(key, part) for key, part in value.items()}
        return to(torch.bfloat16, value, narrowed)

    def __call__(self, *args, **kwargs):
        args, kwargs = self.cast(args, kwargs)
        try:
            with self.context():
                out = self.forward(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            self._explain(error, {**dict(zip(self.arguments, args, strict=False)), **kwargs})
            raise
        return to(self.recipe.dtype("loss"), out)

    def _explain(self, error, arguments):
        """Raises Refused, with the remedy, where an error of torch comes of mixed dtypes."""
        if "DTensor" in str(error) and "mixed" in str(error):
            apart = "fully_shard (--fsdp) gathers weights in forward, and this net calls parts apart from it"
            raise Refused(f"{apart}: train it without --fsdp, or call them in its forward") from error
        if not (self.recipe.low_weights and MIXED.search(str(error))):
            return
        buffers = [name for name, b in self.net.named_buffers() if b.dtype == torch.float32]
        kept = [name for name in sorted(self.keep) if _is_fp32(arguments.get(name))]
        hints = []
        if buffers and self.recipe.buffers == "fp32":
            what = f"an fp32 buffer ({', '.join(buffers[:3])}) may have met bf16 activations"
            hints.append(f"{what}; cast it to x.dtype in forward, or --set buffers=bf16")
        if kept:
            what = f"the argument {kept[0]} stays fp32"
            hints.append(f"{what}; cast it to x.dtype in forward, or leave it out of Precision's keep")
        if hints:
            raise Refused(f"{error}: {'; or '.join(hints)}") from error


# how torch says that two tensors of an operation have different dtypes
MIXED = re.compile(r"(?is)bfloat16.*\bfloat(32|tensor)?\b|\bfloat(32|tensor)?\b.*bfloat16|dtype.*equal")


def _is_fp32(x):
    return torch.is_tensor(x) and x.dtype == torch.float32
