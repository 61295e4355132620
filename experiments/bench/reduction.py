"""bench.py reduction: what do sums in bf16 inside a matrix product cost a gradient?

On CUDA torch lets a product of bf16 matrices add up partial sums in bf16, unless
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False; CPUs add in fp32. Gradients of one
batch under autocast are compared with those in fp64 on the CPU. Without a GPU the CPU's row stands alone.
"""

import math

import torch
import torch.nn.functional as F

from benchmarks.common import Command, check_nets, nets_flag, parse_net, prepared, progress_bar
from harness.printing import markdown_table
from lowprec.precision import recipe
from lowprec.rules import check_machine

REDUCTION_NETS = ["dit:S/4:32:16", "unet:small:32:16"]


def check(args):
    check_nets(args.nets)
    check_machine(recipe(bf16=True).on(args.device), args.device)


def batch_gradients(net, device, weights):
    """The gradients of one batch under autocast in bf16 as one vector, fp64 on the CPU.

    weights: those of the net, as state_dict() names them. A GPU's generator would draw others from the same
    seed.
    """
    run, inputs, velocity = prepared(net, {"bf16": True}, torch.device(device))
    run.model.load_state_dict(weights)
    run.backward(F.mse_loss(run(*inputs), velocity))
    return as_vector(run.params)


def exact_gradients(net):
    """(the weights of a net, its gradients of the same batch in fp64), both on the CPU."""
    run, inputs, velocity = prepared(net, {}, torch.device("cpu"))
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    model = run.model.double()
    x, t, y = inputs
    F.mse_loss(model(x.double(), t.double(), y), velocity.double()).backward()
    return weights, as_vector(model.parameters())


def as_vector(params):
    return torch.cat([p.grad.flatten().double().cpu() for p in params])


def gradient_decibels(found, exact):
    """Signal to noise of gradients, 10 log10(|exact|^2 / |found - exact|^2)."""
    noise = (found - exact).square().sum().item()
    return 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf


def ways_to_add(device):
    """[(what the table calls it, device, whether partial sums may be bf16)]"""
    found = [("CPU", "cpu", False)]
    if device.type == "cuda":
        found += [("GPU, partial sums in bf16 allowed", device, True), ("GPU, sums in fp32", device, False)]
    return found


def reduction(args, clock):
    """Rows (dicts): net, name, and decibels of its gradients under autocast."""
    rows, setting = [], torch.backends.cuda.matmul
    before = setting.allow_bf16_reduced_precision_reduction
    todo = ways_to_add(args.device)
    with progress_bar(len(args.nets) * len(todo)) as bar:
        for word in args.nets:
            net = parse_net(word)
            weights, exact = exact_gradients(net)
            for name, device, allowed in todo:
                setting.allow_bf16_reduced_precision_reduction = allowed
                found = batch_gradients(net, device, weights)
                rows.append(dict(net=word, name=name, decibels=gradient_decibels(found, exact)))
                bar.update()
    setting.allow_bf16_reduced_precision_reduction = before
    print("\ngradients under autocast, signal to noise against fp64\n")
    print(reduction_table(rows))
    return rows


def reduction_table(rows):
    """Markdown of the rows of `reduction`."""
    lines = [[row["net"], row["name"], f"{row['decibels']:.2f}"] for row in rows]
    return markdown_table([["net", "where", "dB"], *lines])


COMMAND = Command(
    "reduction",
    "gradients where products may add up in bf16",
    reduction,
    flags=(nets_flag(*REDUCTION_NETS),),
    check=check,
)
