"""What a net holds that no step writes: frozen parameters, parameters that no optimiser has, rounded buffers.

Nothing here needs a step: a look at names, flags and values is enough.
"""

import re

import torch

NARROW = (torch.bfloat16, torch.float16)

# ---- Parameters --------------------------------------------------------------------------------------------


def frozen_by_plan(net):
    """({name of a part: how many frozen parameters}, [names of those that stand alone]).

    What is frozen while others of its kind train (`blocks.3.mlp.weight` beside `blocks.2.mlp.weight`) stands
    alone, unless all that come before it are frozen too. The rest is a plan: a text encoder, the first
    blocks, all that a LoRA leaves as it is.
    """
    order = dict(net.named_parameters())
    frozen = [name for name, p in order.items() if not p.requires_grad]
    if not frozen:
        return {}, []
    kinds, trains = {}, {name for name, p in order.items() if p.requires_grad}
    for name in order:
        kinds.setdefault(kind(name), []).append(name)
    places = {name: i for i, name in enumerate(order)}
    first_trained = min((places[name] for name in trains), default=len(order))
    parts, alone = {}, []
    whole = [part for part in _containers(net) if not any(n.startswith(part + ".") for n in trains)]
    for name in frozen:
        if places[name] > first_trained and any(other in trains for other in kinds[kind(name)]):
            alone.append(name)
        else:
            part = next((module for module in whole if name.startswith(module + ".")), name)
            parts[part] = parts.get(part, 0) + 1
    return parts, alone


def kind(name):
    """A name without its numbers: tensors of one kind are repeated from block to block."""
    return re.sub(r"\d+", "N", name)


def _containers(net):
    """Names of the parts that hold parts with parameters, the outermost first."""
    found = []
    for name, module in net.named_modules():
        holds = [child for child in module.children() if any(True for _ in child.parameters())]
        if name and holds:
            found.append(name)
    return found


# ---- Buffers -----------------------------------------------------------------------------------------------


def snapshot(net, pick):
    """{name: sample} of the buffers that are fp32 now, to compare with later."""
    return {name: pick(b).clone() for name, b in _floating(net) if b.dtype == torch.float32}


def broken_buffers(net, before, pick):
    """{name: entries that are not finite} of buffers that were finite at the `snapshot`."""
    found = {}
    for name, b in _floating(net):
        was = before.get(name)
        if was is not None and bool(was.isfinite().all()):
            found[name] = int((~pick(b).isfinite()).sum())
    return {name: count for name, count in found.items() if count}


def rounded_buffers(net, before, pick):
    """{name: (what is wrong, relative error or None)} of buffers that hold values of 16 bits.

    before: `snapshot` of the net when it was made. Zeros, ones, powers of two and whole numbers that 16 bits
    hold lose nothing, and are not named.
    """
    found = {}
    for name, b in _floating(net):
        values = pick(b).float()
        if not rounded_values(values):
            continue
        was, error = before.get(name), None
        if was is not None and was.shape == values.shape and torch.equal(was.bfloat16(), values.bfloat16()):
            off = (was.double() - values.double()).norm() / was.double().norm().clamp_min(1e-300)
            error = float(off) or None
        held = str(b.dtype).removeprefix("torch.")
        what = f"held in {held}" if b.dtype in NARROW else "fp32 that holds rounded values only"
        found[name] = what, error
    return found


def rounded_values(values, bits=5):
    """Whether fp32 [n] all fit into bf16 or fp16, and many of them need more than `bits` bits."""
    values = values[values.isfinite() & (values != 0)]
    if values.numel() < 4:
        return False
    exact = values.bfloat16().float() == values
    fits = bool(exact.all()) or bool((values.half().float() == values).all())
    if not fits or bool((values == values.round()).all()):
        return False
    mantissa, _ = torch.frexp(values)
    plain = torch.frac(mantissa * 2**bits) == 0
    return float(plain.float().mean()) < 0.75


def _floating(net):
    return [(name, b) for name, b in net.named_buffers() if b.is_floating_point() and b.numel()]
