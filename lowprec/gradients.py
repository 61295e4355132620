"""The gradients of one step of a Precision, before the optimiser has them."""

from __future__ import annotations

import torch

from .errors import Refused
from .optimizers import buckets
from .optimizers.groups import SPARSE_GRADIENT
from .optimizers.release import clip_factor, norms_of

# {parameter: its gradient, or a number of it}
ByParameter = dict[torch.nn.Parameter, torch.Tensor]
Scale = float | torch.Tensor | ByParameter


def sum_up(run) -> None:
    """Add a micro-batch's gradients to the run's fp32 sums. Raises Refused within no_sync() of DDP."""
    parallel = run.view_of_model.parallel
    if run.reduce_sums is None and parallel is not None and not parallel.require_backward_grad_sync:
        raise Refused(
            "micro-batches are summed in fp32 apart from p.grad: DDP would average the last alone: leave "
            "no_sync() out, or take sites=('accumulate=bf16',)"
        )
    for p in run.params:
        if p.grad is None:
            continue
        if p in run.sums:
            run.sums[p].add_(p.grad)
        else:
            # a copy of an fp32 gradient too: DDP may have given a view of its bucket, which it writes anew
            run.sums[p] = p.grad.to(torch.float32, copy=True)
        p.grad = None


def gradients_of(run) -> ByParameter:
    """{parameter: the mean of its gradients over all micro-batches}, of a net that is spread over ranks this
    rank's rows. Raises Refused where one is sparse, or where there is none.
    """
    grads = run.sums or {p: p.grad for p in run.params if p.grad is not None}
    if run.ranks is not None:
        grads = {p: buckets.local_tensor(g) for p, g in grads.items()}
    if any(g.is_sparse for g in grads.values()):
        raise Refused(SPARSE_GRADIENT)
    if not grads and not run.has_released:
        run.slips.refuse_new(run)
        raise Refused(
            "step() found no gradients: call backward(loss) before it, with a loss that depends on the "
            "model's parameters"
        )
    factor = run.micro_batches.factor(run.accumulate)
    if factor != 1.0:
        torch._foreach_mul_(list(grads.values()), factor)
    return grads


def norms_where_needed(run, grads: ByParameter, measure: bool) -> ByParameter:
    """{parameter: 2-norm of its whole gradient, fp32, 0-dim}; {} where nobody asks for it."""
    if not grads or not (run.clip_grad or run.clip_tensor or measure):
        return {}
    return norms_of(grads) if run.ranks is None else run.ranks.norms_of(grads)


def clip_scale(norms: ByParameter, clip_grad: float, clip_tensor: float) -> Scale:
    """What the step multiplies gradients by: a number, a 0-dim tensor, or {parameter: 0-dim tensor}."""
    if clip_grad:
        return clip_factor(norm_of_all(norms.values()), clip_grad)
    if clip_tensor and norms:
        scales = clip_factor(torch.stack(list(norms.values())), clip_tensor)
        return dict(zip(norms, scales.unbind(), strict=True))
    return 1.0


def measures_of_gradients(run, grads: ByParameter, norms: ByParameter) -> dict[str, float]:
    """{grad_norm, nonfinite_grads} of this step, of what backward has updated too."""
    nonfinite = {p: (~g.isfinite()).sum() for p, g in grads.items()}
    if run.has_released:
        norms = {**run.release.norms, **norms}
        nonfinite = {**run.release.nonfinite, **nonfinite}
    norm = norm_of_all(norms[p] for p in run.params if p in norms)
    count = sum(map(int, nonfinite.values()))
    if run.ranks is not None:
        count = int(run.ranks.sum(count))
    return {"grad_norm": norm.item(), "nonfinite_grads": count}


def norm_of_all(norms) -> torch.Tensor:
    """The norm of tensors that have these norms: 0-dim."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))
