"""GPTQ: the weights of a finished layer, rounded so that what the layer puts out changes least.

    hessians = gather_hessians({"fc": net.fc}, calibrate)   # what the inputs of the layer have in common
    low = rounded_by_gptq(net.fc.weight, hessians["fc"], 16, grid)

arXiv 2210.17323, algorithm 1: inputs are rounded one after another, and what rounding one has changed in the
output is taken back by those that are still exact. Grids and scales are those of the nearest rounding; a
block takes its scale when its turn comes.
"""

import torch

from ..errors import Refused

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to each entry of it
INPUTS_AT_ONCE = 128  # inputs whose changes reach the inputs behind them in one product


@torch.no_grad()
def gather_hessians(linears, calibrate):
    """{name: float64 [K, K]}: the sum of 2 x x^T over all inputs x [K] of each nn.Linear that was called.

    linears: {name: nn.Linear}. calibrate(): calls the net on data like those it was trained on. Raises
    Refused for inputs that are no numbers.
    """
    found = {}

    def hook(name):
        def add(module, args, kwargs):
            x = args[0] if args else kwargs["input"]
            rows = x.reshape(-1, module.in_features).float()
            with torch.autocast(rows.device.type, enabled=False):
                found[name] = found.get(name, 0.0) + 2 * (rows.t() @ rows).double()

        return add

    handles = []
    for name, linear in linears.items():
        handles.append(linear.register_forward_pre_hook(hook(name), with_kwargs=True))
    try:
        calibrate()
    finally:
        for handle in handles:
            handle.remove()
    for name, hessian in found.items():
        if not hessian.isfinite().all():
            raise Refused(f"GPTQ: the inputs of '{name}' hold NaN or infinity while the net is calibrated")
    return {name: hessian for name, hessian in found.items() if hessian.any()}


@torch.no_grad()
def rounded_by_gptq(weight, hessian, block, grid):
    """fp32 [N, K]: weight [N, K] on the grid, given the layer's Hessian [K, K] of `gather_hessians`.

    block: inputs that share a scale: a divisor of 128, or K. grid(fp32 [N, block]) -> a function that brings
    fp32 [N, 1] of these inputs to the grid.
    """
    left = weight.double()  # what is still to be rounded
    low = torch.empty_like(weight, dtype=torch.float32)
    inverse = _inverse_root(hessian)
    inputs = weight.shape[1]
    for start in range(0, inputs, INPUTS_AT_ONCE):
        end = min(start + INPUTS_AT_ONCE, inputs)
        errors = torch.empty(len(weight), end - start, dtype=torch.float64, device=weight.device)
        for k in range(start, end):
            if k % block == 0:
                to_grid = grid(left[:, k : k + block].float())
            low[:, k : k + 1] = to_grid(left[:, k : k + 1].float())
            error = (left[:, k] - low[:, k]) / inverse[k, k]
            left[:, k:end] -= error[:, None] * inverse[k, k:end]
            errors[:, k - start] = error
        left[:, end:] -= errors @ inverse[start:end, end:]
    return low


def _inverse_root(hessian):
    """Upper triangular U with U^T U the inverse of the damped Hessian: its row k says how the inputs behind k
    make up for an error of input k.
    """
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian)).to(hessian)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def output_error(weight, low, hessian):
    """Root mean square error of the layer's output with weights `low` for `weight`, as a share of the root
    mean square output, on the inputs of the Hessian.
    """
    error = weight.double() - low.double()
    power = ((weight.double() @ hessian) * weight.double()).sum()
    return (((error @ hessian) * error).sum() / power).clamp(min=0).sqrt().item()
