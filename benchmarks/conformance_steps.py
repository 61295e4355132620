"""Checks of conformance: an exact resume, NaN and infinity, extreme numbers, tensors of any size, bytes."""

import math

import torch
from torch import nn

from benchmarks.allocated import state_bytes
from benchmarks.conformance import (
    NOT_ELEMENTWISE,
    Result,
    continued,
    differing,
    judged,
    not_claimed,
    random_grads,
    random_weights,
    unequal,
    weights_and_states,
)
from benchmarks.subjects import BF16, FIRST_WEIGHT, GRADIENT, ULP, drawn, feed, full, in_fp64
from lowprec.errors import first_line

# ---- Resume ------------------------------------------------------------------------------------------------


def resume(subject, size):
    """Does a run go on with the same bits? Three steps, state_dict, a new object, three more.

    A state that is not saved, or cast to the weights' dtype by the loader, goes another way from there. "by
    torch's generator" means: only if the program saves and restores that too. The figure is the share of all
    values that differ.
    """
    shapes = [(128, 128), (7, 9)]
    grads = random_grads(shapes, 6)
    lr = ULP / 4
    weights = random_weights(shapes)

    def tail(params, optimizer):
        for g in grads[3:]:
            feed(params, optimizer, g)
        return weights_and_states(optimizer, params)

    with drawn(8):
        params, optimizer = subject.start(weights, lr)
        for g in grads[:3]:
            feed(params, optimizer, g)
        copy, other_copy = (continued(subject, params, optimizer, lr) for _ in range(2))
        kept_dtypes = dtypes(params, optimizer) == dtypes(*copy)
        generator = torch.get_rng_state()
        whole = tail(params, optimizer)
        torch.set_rng_state(generator)
        restored = unequal(whole, tail(*copy))
    with drawn(9):
        alone = unequal(whole, tail(*other_copy))
    said = f"a resumed run differs in {restored:.1%} of all values from an uninterrupted one"
    if not kept_dtypes:
        said += "; load_state_dict gives states of other dtypes than were saved"
    shown = "by torch's generator" if alone and not restored else differing(restored)
    return judged(not restored, shown, said, restored=restored, alone=alone)


def dtypes(params, optimizer):
    return [t.dtype for t in weights_and_states(optimizer, params)]


# ---- Values ------------------------------------------------------------------------------------------------


def stepped(subject, weights, gradients, lr=1e-3, dtype=BF16):
    """fp64 weights after a step for each of the gradients."""
    with drawn(14):
        params, optimizer = subject.start([weights], lr, dtype)
        for g in gradients:
            feed(params, optimizer, [g])
    return in_fp64(params[0])


def spreading(subject, value):
    """(entries beside the struck one that are not finite, by which ways the struck one is hidden).

    The worst of the two ways to strike: by the gradient and by the weight.
    """
    place = (3, 5)
    ((clean,),) = random_grads([(128, 128)], 1)
    spread = 0
    hidden = []
    for by in ("gradient", "weight"):
        weights = full(128)
        struck = clean.clone()
        if by == "gradient":
            struck[place] = value
        else:
            weights[place] = value
        after = stepped(subject, weights, [struck, clean, clean])
        bad = ~after.isfinite()
        spread = max(spread, int(bad.sum() - bad[place].int()))
        if not bad[place]:
            hidden.append(by)
    return spread, hidden


def nan(subject, size):
    """Does a NaN stay where it is? One in a gradient or in a weight, then two clean steps.

    It must not spread to other entries (a block's scale in codes takes it to the whole block), and must not
    become a number: a run that diverged would look healthy. The figure is how many other entries it reaches.
    """
    spread, hidden = spreading(subject, math.nan)
    figures = dict(others=spread, hidden=hidden)
    if spread and not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE, **figures)
    said = [f"NaN spreads from one entry to {spread} others"] if spread else []
    said += [f"NaN in a {by} is turned into a number" for by in hidden]
    shown = f"{spread} others"
    if hidden:
        shown += ", hidden"
    return judged(not said, shown, "; ".join(said), **figures)


def infinity(subject, size):
    """Does an infinity stay where it is? As `nan`; that a clipped gradient makes it a number is no fault."""
    spread, hidden = spreading(subject, math.inf)
    figures = dict(others=spread, hidden=hidden)
    if spread and not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE, **figures)
    said = f"an infinity spreads from one entry to {spread} others"
    return judged(not spread, f"{spread} others", said, **figures)


def extremes(subject, size):
    """Do denormal and very large numbers go through? And does a zero gradient leave every weight as it is?

    Weights from 2^-133 (bf16's smallest) to its largest number, zeros and ties. Then gradients of 2^-130, and
    of 1e15, whose squares fp32 still holds.
    """
    g = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-133, 128, (128, 128), generator=g).float())
    weights = (torch.randn(128, 128, generator=g) * scale).clamp(-3.3e38, 3.3e38).to(BF16)
    largest = torch.finfo(BF16).max
    weights[0, :4] = torch.tensor([0.0, -0.0, largest, -largest], dtype=BF16)
    wrong = []
    changed = int((stepped(subject, weights, [torch.zeros(128, 128)]) != in_fp64(weights)).sum())
    if changed:
        wrong.append(f"a zero gradient changes {changed} weights")
    for height in (2.0**-130, 1e15):
        after = stepped(subject, weights, [weights.float().sign() * height] * 2)
        broken = int((~after.isfinite()).sum())
        if broken:
            wrong.append(f"gradients of {height:.0e} make {broken} finite weights infinite or NaN")
    if wrong and not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE)
    shown = f"{len(wrong)} wrong" if wrong else "as they should"
    return judged(not wrong, shown, "; ".join(wrong))


# ---- Sizes -------------------------------------------------------------------------------------------------


def layouts(device="cpu"):
    """{name: bf16 weights}: odd sizes, none at all, no dimension, and two whose entries are not in order."""

    def weights(*shape):
        return torch.full(shape, FIRST_WEIGHT, dtype=BF16, device=device)

    return {
        "1": weights(1),
        "7": weights(7),
        "4097": weights(4097),
        "empty": weights(0),
        "0-d": weights(),
        "not contiguous": weights(64, 64).T,
        "every other": weights(4200)[::2],
    }


def sizes_and_layouts(subject, size):
    """Are tensors of any size and layout stepped?

    Alone and beside one of ordinary size, whose weights then are looked at too. A step of four ulps, which no
    rounding hides. A class may refuse one when it is made.
    """
    failed = {}
    refused = []
    names = list(layouts())
    for name in names:
        try:
            fault = fault_of_layout(subject, name)
        except TensorRefused:
            refused.append(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
        else:
            if fault:
                failed[name] = fault
    shown = f"{len(names) - len(failed) - len(refused)} of {len(names)}"
    if refused:
        shown += f", {len(refused)} refused"
    said = "; ".join(f"a tensor of size {name}: {why}" for name, why in failed.items())
    return judged(not failed, shown, said, failed=failed, refused=refused)


class TensorRefused(Exception):
    """A class can't be made over a tensor."""


def fault_of_layout(subject, name):
    """What is wrong with the steps of a tensor of `layouts`, or "". Raises TensorRefused."""
    lr = 4 * ULP / subject.unit(64)
    for beside in ([], [full(64).to(subject.device, BF16)]):
        with drawn(15):
            # made here: Subject.start would copy the entries into order
            params = [nn.Parameter(w) for w in (layouts(subject.device)[name], *beside)]
            try:
                optimizer = subject.over(params, lr)
            except Exception as error:
                raise TensorRefused from error
            for _ in range(2):
                feed(params, optimizer, [torch.full_like(p, GRADIENT) for p in params])
        # two steps of four ulps, with room for optimisers whose steps depend on the shape
        most = 64 if subject.elementwise else math.inf
        for p in params:
            moved = (FIRST_WEIGHT - in_fp64(p)) / ULP
            if not ((moved > 0.5) & (moved < most)).all():
                return "is not moved as it should be"
    return ""


def state_memory(subject, size):
    """Bytes of state a parameter, as allocated: what a claim of low precision is about. No verdict."""
    params, optimizer = subject.start([full(256)])
    feed(params, optimizer, [full(256, GRADIENT)])
    found = state_bytes(optimizer) / 256**2
    return Result("holds", f"{found:.2f}", figures=dict(bytes=found))
