"""What stochastic writes will add to the loss of task.py's net, foreseen from fp32 alone.

    python experiments/077-noise-of-writes/forecast.py     a line of JSON for each size of batch and rate

An fp32 training by torch's own Adam gives each weight w its moments m and v, averaged over the second half of
the steps; a Hessian H of the loss is computed exactly at the optimum. With s the gap of bf16 at a weight, a
write of the step d = rate m / sqrt(v) adds a variance of s^2 f (1 - f), f the fraction of a gap that d is,
which is about s |d| for small d. Then

    ceiling    E = 1/4 sum s |m|                                  whatever the rate and H
    forecast   F = 1/(4 rate) sum_k D_k (1 - exp(-2 rate l_k T))  after T steps

where l_k are the eigenvalues of v^-1/4 H v^-1/4, and D_k the variances of writes in their directions. F is
mode by mode what is left of E when T steps are too few for a direction to settle.
"""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # task.py imports the tasks of the repository

RATES = (1e-3, 3e-4, 1e-4)
BATCHES = (16, 128)
STEPS = 6000


def bowl():
    """task.py beside this file."""
    spec = spec_from_file_location("bowl", Path(__file__).with_name("task.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def hessian(task):
    """Of the mean square at the optimum: twice the mean product of the output's derivatives, in float64."""
    net = task.bowl_net().double()
    x = task.inputs_of(torch.randn(4096, task.INPUTS, generator=torch.Generator().manual_seed(7))).double()
    parts = {name: p.detach() for name, p in net.named_parameters()}

    def output(parts, one):
        return torch.func.functional_call(net, parts, one[None]).squeeze()

    rows = torch.func.vmap(torch.func.grad(output), (None, 0))(parts, x)
    jacobian = torch.cat([rows[name].flatten(1) for name in parts], 1)
    return 2 * jacobian.T @ jacobian / len(x)


def gaps(w):
    return torch.exp2(torch.floor(torch.log2(w.abs().clamp_min(1e-30))) - 7)


def forecast(task, curvature, rate, batch):
    """(E, F) of one rate and size of batch."""
    net, drawn = task.bowl_net(), torch.Generator().manual_seed(5)
    target = task.bowl_net()
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    ceilings, scales, variances = [], [], []
    for step in range(1, STEPS + 1):
        x = task.inputs_of(torch.randn(batch, task.INPUTS, generator=drawn))
        with torch.no_grad():
            y = target(x) + torch.randn(batch, 1, generator=drawn)
        loss = (net(x) - y).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step > STEPS // 2 and step % 20 == 0:
            states = [adam.state[p] for p in net.parameters()]
            w = flat(net.parameters())
            m = flat(s["exp_avg"] for s in states) / (1 - 0.9**step)
            v = flat(s["exp_avg_sq"] for s in states) / (1 - 0.999**step)
            s, scale = gaps(w), v.sqrt() + 1e-8
            part = (rate * m / scale).abs() / s
            part = part - part.floor()
            ceilings.append((s * m.abs()).sum() / 4)
            scales.append(scale)
            variances.append(s * s * part * (1 - part))
    scale = torch.stack(scales).mean(0).double()
    variance = torch.stack(variances).mean(0).double()
    root = scale.rsqrt()
    steep, directions = torch.linalg.eigh(root[:, None] * curvature * root)
    in_directions = (directions.square() * (variance * scale)[:, None]).sum(0)
    settled = -torch.expm1(-2 * rate * steep.clamp_min(0) * STEPS)
    return float(torch.stack(ceilings).mean()), float((in_directions * settled).sum() / (4 * rate))


def rows():
    task = bowl()
    curvature = hessian(task)
    for batch in BATCHES:
        for rate in RATES:
            ceiling, foreseen = forecast(task, curvature, rate, batch)
            yield {"batch": batch, "rate": rate, "ceiling": ceiling, "forecast": foreseen}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows():
        print(json.dumps(row), flush=True)
