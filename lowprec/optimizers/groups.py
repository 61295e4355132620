"""What is refused of a parameter group: one that is given to an optimiser, and one of a saved state."""

import math

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import Refused

LAZY_LAYER = "a lazy layer has no weights before its first call: call the model once on a batch before this"
SPARSE_GRADIENT = "a sparse gradient can't be rounded: make the nn.Embedding with sparse=False"
REMEDY_FOR_DTYPE = {
    torch.float16: "keep fp16 in autocast (--fp16) and the weights in fp32",
    torch.float64: "call model.float() before",
    torch.complex64: "hold real and imaginary parts in fp32",
    torch.complex128: "hold real and imaginary parts in fp32",
}


# what torch's optimisers can do, and these can't: {option of a group: what it would be}
OPTIONS_NOT_OURS = {
    "maximize": "goes uphill (maximize)",
    "amsgrad": "keeps the largest second moment (amsgrad)",
    "dampening": "dampens the momentum (dampening)",
    "capturable": "is captured in a CUDA graph (capturable)",
    "differentiable": "is differentiated through (differentiable)",
}
OPTIONS_OF_ALL_GROUPS = ("update", "kahan", "master", "seed", "compiled")


def name_of(p, optimizer):
    """How a line calls a parameter: by its name where the optimiser was given names, else by its place."""
    if p in optimizer.param_names:
        return optimizer.param_names[p]
    for number, group in enumerate(optimizer.param_groups):
        for i, q in enumerate(group["params"]):
            if q is p:
                names = group.get("param_names")
                return names[i] if names else f"parameter {i} of group {number}"
    return "a parameter"


def check_options(group, optimizer):
    """Raises Refused for an option of one group that the optimiser would not heed. Wrappers put those of all
    groups into each: they may stand there.
    """
    name = type(optimizer).__name__
    check_rule(group, "a parameter group", name)
    own = {option: getattr(optimizer, option) for option in OPTIONS_OF_ALL_GROUPS} | optimizer.kinds
    for option, value in own.items():
        if option in group and option not in optimizer.defaults and group[option] != value:
            all_groups = f"{name} takes it for all groups: make a second optimiser for these parameters"
            raise Refused(f"{option}={group[option]!r} in a parameter group: {all_groups}")


def check_rule(group, what, name):
    """Raises Refused for a group, of `what`, that asks for another rule than that of the optimiser `name`."""
    for option, does in OPTIONS_NOT_OURS.items():
        if group.get(option):
            raise Refused(f"{what} that {does}: {name} does not")


def check_numbers(group):
    """Raises Refused for an option of a parameter group with which training can't be meant."""
    for name in ("lr", "eps", "weight_decay", "momentum"):
        option = group.get(name, 0.0)
        values = option if isinstance(option, (tuple, list)) else [option]  # Adafactor has two eps
        for value in values:
            if value is None or isinstance(value, str) or not 0 <= float(value) < math.inf:
                raise Refused(f"{name}={option!r}: it must be a number, 0 or more")
    betas = group.get("betas", ())
    if betas and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise Refused(f"betas={betas}: two numbers from 0 to below 1")


def check_dtypes(params, optimizer):
    """Raises Refused for parameters that the optimiser can't write."""
    for p in params:
        if is_lazy(p):
            raise Refused(LAZY_LAYER)
        if p.dtype not in (torch.float32, torch.bfloat16):
            what = f"{type(optimizer).__name__} takes fp32 and bf16 parameters, not {p.dtype}"
            raise Refused(f"{what}: {REMEDY_FOR_DTYPE.get(p.dtype, 'leave it out of the groups')}")
        if is_traceable_wrapper_subclass(p) and not hasattr(p, "device_mesh"):
            what = f"{name_of(p, optimizer)} is a {type(p.data).__name__}, which has no memory of its own"
            raise Refused(f"{what}: train it by torch's own optimiser, or dequantise it first")


def check_sizes(saved, optimizer):
    """Raises Refused for saved parameter groups of other lengths than those of `optimizer`."""
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in saved]
    if sizes != own_sizes:
        theirs = f"optimiser state of {sum(sizes)} parameters in groups of {sizes}"
        ours = f"a model with groups of {own_sizes}"
        raise Refused(f"{theirs} does not fit {ours}: it belongs to another model")


def check_groups(saved, optimizer):
    """Raises Refused for saved parameter groups that don't fit those of `optimizer`, or of another rule."""
    check_sizes(saved, optimizer)
    name = type(optimizer).__name__
    for group in saved:
        check_rule(group, "optimiser state of a training", name)
        if "decoupled_weight_decay" in group and "amsgrad" not in group:  # their states look like AdamW's
            raise Refused(f"optimiser state of RAdam or NAdam: start {name} without it, a new rule")
        if missing := sorted(optimizer.defaults.keys() - group.keys()):
            raise Refused(f"optimiser state without {missing[0]}: it is another optimiser's than {name}")
        decoupled = group.get("decoupled_weight_decay", "dampening" not in group)  # torch's SGD has no choice
        if group.get("weight_decay") and not decoupled:
            raise Refused(f"optimiser state with L2 decay: {name}'s is decoupled; set it to 0 in its groups")
