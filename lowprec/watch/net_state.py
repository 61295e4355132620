"""What a net holds that no step writes: frozen parameters, parameters that no optimiser has, rounded buffers.

Nothing here needs a step: a look at names, flags and values is enough.
"""

import re

import torch

NARROW_DTYPES = (torch.bfloat16, torch.float16)
LAST_WHOLE_NUMBER = {torch.bfloat16: 256, torch.float16: 2048}  # up to which all are held


def dtype_name(dtype):
    """bf16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp16", "bf16")


# ---- Parameters --------------------------------------------------------------------------------------------


def frozen_by_plan(net):
    """({name of a part: how many frozen parameters}, [names of those that stand alone]).

    What is frozen behind one of its kind that trains (`blocks.3.mlp.weight` behind `blocks.2.mlp.weight`)
    stands alone. The rest is a plan: a text encoder, the first blocks, all that a LoRA leaves as it is.
    """
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    frozen_parts = []  # that hold parts with parameters, the outermost first
    for part, module in net.named_modules():
        if part and any(map(has_parameters, module.children())) and not _holds_one(part, trained):
            frozen_parts.append(part)
    parts, alone, kinds_that_train = {}, [], set()
    for name, p in net.named_parameters():
        kind = re.sub(r"\d+", "N", name)  # tensors of one kind are repeated from block to block
        if p.requires_grad:
            kinds_that_train.add(kind)
        elif kind in kinds_that_train:
            alone.append(name)
        else:
            outermost = next((part for part in frozen_parts if _holds_one(part, [name])), name)
            parts[outermost] = parts.get(outermost, 0) + 1
    return parts, alone


def _holds_one(part, names):
    return any(name.startswith(part + ".") for name in names)


def has_parameters(module):
    return next(module.parameters(), None) is not None


# ---- Buffers -----------------------------------------------------------------------------------------------


def rounded_values(values):
    """Whether fp32 [n] all fit into bf16 or fp16, and many of them need more than 5 bits."""
    values = values[values.isfinite() & (values != 0)]
    if values.numel() < 4:
        return False
    exact = values.bfloat16().float() == values
    fits = bool(exact.all()) or bool((values.half().float() == values).all())
    if not fits or bool((values == values.round()).all()):
        return False
    mantissa, _ = torch.frexp(values)
    plain = torch.frac(mantissa * 2**5) == 0
    return float(plain.float().mean()) < 0.75


def floating_buffers(net):
    return [(name, b) for name, b in net.named_buffers() if b.is_floating_point() and b.numel()]


def rounded_to_bf16(b, made):
    """Whether all values of buffer b fit into bf16, and are not those that it was made with."""
    same = torch.equal(b.float(), made.to(b.device).float())
    return not same and torch.equal(b.bfloat16().float(), b.float())
