"""Healthy loops, in which Watch must find nothing, one of each client and framework: see planted.py."""

import test_clients as clients
import torch
from planted import BF16, by_accelerate, by_lightning, by_task, by_trainer, healthy

from lowprec.optimizers import rounded

LOW = dict(dtype=BF16)


def ours(loop, **options):
    """As the library casts a net: buffers stay fp32."""
    fresh = dict(loop.client.build().named_buffers())
    for module_name, module in loop.net.named_modules():
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point():
                setattr(module, name, fresh[f"{module_name}.{name}".lstrip(".")].clone())
    loop.opt(rounded.AdamW, compiled=False, **options)


@healthy("bf16 autocast", "GPT-2", autocast=BF16)
def _(loop):
    loop.average(0.99)


@healthy("our AdamW, stochastic", "Llama", **LOW)
def _(loop):
    ours(loop, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16", weight_decay=0.1)


@healthy("8-bit codes, stochastic", "DiT", **LOW)
def _(loop):
    ours(loop, update="stochastic", exp_avg="int8", exp_avg_sq="int8", weight_decay=0.1)


@healthy("diffusers' EMAModel of an fp32 net", "U-Net")
def _(loop):
    loop.diffusers_average(0.999)


@healthy("SGD with momentum and decay", "ResNet", lr=1e-2)
def _(loop):
    loop.opt(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)


@healthy("torchastic", "Llama", **LOW)
def _(loop):
    torchastic = clients.need("torchastic")
    ours(loop)
    loop.opt(torchastic.AdamW, weight_decay=0.01)


@healthy("Accelerate", "Accelerate")
def _(steps):
    return by_accelerate(steps, weight_decay=0.01)


@healthy("Lightning, by a closure", "Lightning")
def _(steps):
    return by_lightning(steps)


@healthy("transformers' Trainer", "Trainer")
def _(steps):
    return by_trainer(steps, weight_decay=0.01)


@healthy("rflow, pure bf16 stochastic", "our rflow")
def _(steps):
    return by_task(steps, "--pure_bf16", "--stochastic", "--weight_decay", "0.1")


@healthy("ddpm, split master", "our ddpm")
def _(steps):
    return by_task(steps, "--task", "ddpm", "--pure_bf16", "--master", "split")
