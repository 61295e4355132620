"""Healthy loops, in which Watch must find nothing: see planted.py."""

import test_clients as clients
import torch
from planted import BF16, by_accelerate, by_lightning, by_task, by_trainer, healthy

from lowprec.optimizers import rounded
from lowprec.optimizers.average import EMA

LOW = dict(dtype=BF16)


@healthy("fp32 AdamW with weight decay", "GPT-2")
def _(loop):
    loop.opt(weight_decay=0.1)


@healthy("bf16 autocast", "GPT-2", autocast=BF16)
def _(loop):
    loop.average(0.99)


@healthy("our AdamW, stochastic", "Llama", **LOW)
def _(loop):
    ours(loop, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16", weight_decay=0.1)


@healthy("our AdamW, stochastic, lr 1e-6", "GPT-2", lr=1e-6, **LOW)
def _(loop):
    ours(loop, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16")


def ours(loop, **options):
    """As the library casts a net: buffers stay fp32."""
    fresh = dict(loop.client.build().named_buffers())
    for module_name, module in loop.net.named_modules():
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point():
                setattr(module, name, fresh[f"{module_name}.{name}".lstrip(".")].clone())
    loop.opt(rounded.AdamW, compiled=False, **options)


@healthy("split master", "DiT", **LOW)
def _(loop):
    ours(loop, master="split", weight_decay=0.01)
    named, low = list(loop.net.named_parameters()), loop.optimizer.low_part
    loop.ema = EMA(named, 0.9, low_part=low, compiled=False)
    loop.averaging.append(lambda step: loop.ema.update())


@healthy("Kahan compensation and stochastic moments", "Llama", **LOW)
def _(loop):
    ours(loop, kahan=True, update="stochastic", exp_avg="bf16", exp_avg_sq="bf16")


@healthy("8-bit codes, stochastic", "DiT", **LOW)
def _(loop):
    ours(loop, update="stochastic", exp_avg="int8", exp_avg_sq="int8", weight_decay=0.1)


@healthy("a stranger's stochastic AdamW with decay", "GPT-2", lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(weight_decay=0.1)


@healthy("diffusers' EMAModel of an fp32 net", "U-Net")
def _(loop):
    loop.diffusers_average(0.999)


@healthy("torch's AveragedModel", "Llama")
def _(loop):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    loop.ema = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    loop.averaging.append(lambda step: loop.ema.update_parameters(loop.net))


@healthy("an average every fifth step", "GPT-2")
def _(loop):
    loop.average(0.95)
    move = loop.averaging.pop()
    loop.averaging.append(lambda step: step % 5 == 4 and move(step))


@healthy("SGD with momentum and decay", "ResNet", lr=1e-2)
def _(loop):
    loop.opt(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)


@healthy("Adam with L2, AMSGrad", "ResNet")
def _(loop):
    loop.opt(torch.optim.Adam, weight_decay=1e-3, amsgrad=True)


@healthy("RMSprop", "ResNet", lr=1e-4)
def _(loop):
    loop.opt(torch.optim.RMSprop, momentum=0.9)


@healthy("Adafactor", "Llama")
def _(loop):
    loop.opt(torch.optim.Adafactor)


@healthy("the first stage frozen", "ResNet")
def _(loop):
    for name, p in loop.net.named_parameters():
        if name.startswith(("conv1", "bn1", "layer1.0")):
            p.requires_grad_(False)


@healthy("only norms and biases train", "GPT-2")
def _(loop):
    for p in loop.net.parameters():
        p.requires_grad_(p.dim() == 1)


@healthy("a cosine schedule to 0 after warm-up", "DiT")
def _(loop):
    loop.opt()
    shape = lambda step: min(1.0, step / 10) * (1 - step / loop.steps)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, shape)
    loop.after.append(lambda step: schedule.step())


@healthy("8 micro-batches in fp32", "GPT-2")
def _(loop):
    loop.micro, loop.steps = 8, max(6, loop.steps // 4)


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


@healthy("rflow, fp32", "our rflow")
def _(steps):
    return by_task(steps)


@healthy("rflow, pure bf16 stochastic", "our rflow")
def _(steps):
    return by_task(steps, "--pure_bf16", "--stochastic", "--weight_decay", "0.1")


@healthy("ddpm, split master", "our ddpm")
def _(steps):
    return by_task(steps, "--task", "ddpm", "--pure_bf16", "--master", "split")


@healthy("segment, autocast", "our segment")
def _(steps):
    return by_task(steps, "--task", "segment", "--image_size", "16", "--bf16")
