"""How much of the ceiling 1/4 sum s |m| stochastic writes reach in so many steps; see foresee.py.

With P = sqrt(v) and the Hessian H of a loss, Adam descends in the Hessian A = P^-1/2 H P^-1/2. The noise of
writes has the covariance W = diag(s |m|) there, and once the learning rates of all steps add up to S, it has
added

    1/4 trace(W (1 - exp(-2 A S)))

to the loss. The trace is an average over random vectors (stochastic Lanczos quadrature, Ubaru, Chen and Saad
2017, doi 10.1137/16M1104974): a few products of H with a vector each, and no eigenvector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

PROBES, DEPTH = 2, 12  # random vectors; products with each


def settled(
    loss: Callable[[], torch.Tensor],
    parameters: list[nn.Parameter],
    scale: torch.Tensor,
    noise: torch.Tensor,
    travelled: float,
) -> float:
    """What the writes have added to a loss. parameters: fp32; scale, noise: sqrt(v) and s |m| of all their
    entries, flat fp32 [n]; travelled: the sum of the learning rates of the steps. Raises RuntimeError for a
    loss that can't be differentiated twice.
    """
    root, sizes = scale.sqrt(), [p.numel() for p in parameters]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        slopes = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)

        def curved(x):
            parts = [t.view_as(p) for t, p in zip((x / root).split(sizes), parameters, strict=True)]
            found = torch.autograd.grad(slopes, parameters, parts, retain_graph=True, materialize_grads=True)
            return torch.cat([t.flatten() for t in found]) / root

        draw = torch.Generator().manual_seed(0)
        total = 0.0
        for _ in range(PROBES):
            signs = torch.randint(0, 2, noise.shape, generator=draw).to(noise.device) * 2 - 1
            steep, shares = quadrature(curved, noise.sqrt() * signs, DEPTH)
            total += float((shares * -torch.expm1(-2 * steep.clamp_min(0) * travelled)).sum())
    return total / PROBES / 4


def quadrature(product: Callable, start: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(nodes, weights), float64 [k]: start' f(A) start is about sum of weight f(node). product(x): A x, of a
    symmetric A; start: [n].
    """
    norm = start.norm()
    vectors, diagonal, beside = [start / norm], [], []
    for _ in range(min(depth, len(start))):
        x = product(vectors[-1])
        diagonal.append(torch.dot(x, vectors[-1]))
        for other in vectors:  # as exact arithmetic would have it
            x = x - torch.dot(x, other) * other
        beside.append(x.norm())
        if beside[-1] <= 1e-6 * max(map(abs, diagonal)):
            break
        vectors.append(x / beside[-1])
    off = torch.stack(beside[: len(diagonal) - 1]) if len(diagonal) > 1 else start.new_zeros(0)
    matrix = torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1)
    nodes, eigenvectors = torch.linalg.eigh(matrix.double())
    return nodes, norm.double().square() * eigenvectors[0].square()
