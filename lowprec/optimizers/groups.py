"""What is refused of a parameter group: one that is given to an optimiser, and one of a saved state."""

import math

import torch
from torch.nn.parameter import is_lazy

from ..errors import Refused

LAZY_LAYER = "a lazy layer has no weights before its first call: call the model once on a batch before this"
SPARSE_GRADIENT = "a sparse gradient can't be rounded: make the nn.Embedding with sparse=False"
REMEDY_FOR_DTYPE = {
    torch.float16: "keep fp16 in autocast (--fp16) and the weights in fp32",
    torch.float64: "call model.float() before",
    torch.complex64: "hold real and imaginary parts in fp32",
    torch.complex128: "hold real and imaginary parts in fp32",
}


def check_numbers(group):
    """Raises Refused for an option of a parameter group with which training can't be meant."""
    for name in ("lr", "eps", "weight_decay", "momentum"):
        option = group.get(name, 0.0)
        values = option if isinstance(option, (tuple, list)) else [option]  # Adafactor has two eps
        for value in values:
            if value is not None and (isinstance(value, str) or not 0 <= float(value) < math.inf):
                raise Refused(f"{name}={option!r}: it must be a number, 0 or more")
    betas = group.get("betas", ())
    if betas and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise Refused(f"betas={betas}: two numbers from 0 to below 1")


def check_dtypes(params, name):
    """Raises Refused for parameters that the optimiser of this name can't write."""
    for p in params:
        if is_lazy(p):
            raise Refused(LAZY_LAYER)
        if p.dtype not in (torch.float32, torch.bfloat16):
            what = f"{name} takes fp32 and bf16 parameters, not {p.dtype}"
            raise Refused(f"{what}: {REMEDY_FOR_DTYPE.get(p.dtype, 'leave it out of the groups')}")


# what torch's optimisers can do, and these can't: {option of a group: what it would be}
OPTIONS_NOT_OURS = {
    "maximize": "goes uphill (maximize)",
    "amsgrad": "keeps the largest second moment (amsgrad)",
}


def check_groups(saved, own, name):
    """Raise Refused for saved parameter groups that don't fit `own`, or of another rule than that of the
    optimiser called `name`.
    """
    own_sizes = [len(group["params"]) for group in own]
    sizes = [len(group["params"]) for group in saved]
    if sizes != own_sizes:
        theirs = f"optimiser state of {sum(sizes)} parameters in groups of {sizes}"
        ours = f"a model with groups of {own_sizes}"
        raise Refused(f"{theirs} does not fit {ours}: it belongs to another model")
    for group in saved:
        for option, what in OPTIONS_NOT_OURS.items():
            if group.get(option):
                raise Refused(f"optimiser state of a training that {what}: {name} does not")
        if "decoupled_weight_decay" in group and "amsgrad" not in group:  # its states look like AdamW's
            raise Refused(f"optimiser state of RAdam: start {name} without it, a new rule")
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            raise Refused("optimiser state of Adam with L2 decay: AdamW's decay is another; set it to 0")
