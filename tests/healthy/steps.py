"""Healthy loops: odd gradients, learning rates and low precision that loses nothing."""

import copy

import torch
import torch.nn.functional as F
from healthy.shared import EVERY, LOOPS, STEPS, adam, draw, loop, mlp, task, trained
from torch import nn

from lowprec import Precision, Watch, recipe

# ---- Gradients ---------------------------------------------------------------------------------------------


def accumulated(micro, set_to_none=True):
    net = mlp()
    optimizer = adam(net)
    watch = Watch(net, optimizer, every=EVERY)
    for step in range(STEPS):
        for part in range(micro):
            (task(net, step * micro + part) / micro).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return watch


LOOPS["accumulation of 4"] = lambda: accumulated(4)
LOOPS["accumulation of 16"] = lambda: accumulated(16)
LOOPS["gradients set to zero"] = lambda: accumulated(2, set_to_none=False)


def clipped(clip):
    net = mlp()
    return trained(net, between=lambda step: clip(net.parameters()))


LOOPS["clipping by norm"] = lambda: clipped(lambda p: nn.utils.clip_grad_norm_(p, 1.0))
LOOPS["clipping hard"] = lambda: clipped(lambda p: nn.utils.clip_grad_norm_(p, 1e-3))
LOOPS["clipping by value"] = lambda: clipped(lambda p: nn.utils.clip_grad_value_(p, 1e-3))


@loop
def adaptive_clipping():
    net = mlp()

    def clip(step):
        for p in net.parameters():
            most = 0.01 * p.norm().clamp_min(1e-3)
            p.grad.mul_((most / p.grad.norm().clamp_min(1e-9)).clamp(max=1))

    return trained(net, between=clip)


@loop
def gradient_noise():
    net = mlp()

    def add(step):
        for i, p in enumerate(net.parameters()):
            p.grad.add_(draw(1000 * step + i, *p.shape), alpha=1e-4)

    return trained(net, between=add)


@loop
def gradient_centralisation():
    net = mlp()
    for p in net.parameters():
        if p.ndim == 2:
            p.register_hook(lambda g: g - g.mean(1, keepdim=True))
    return trained(net)


@loop
def two_losses_two_backwards():
    def loss(net, step):
        task(net, step).backward()
        return 0.1 * net(draw(step, 8, 32)).square().mean()

    return trained(mlp(), loss=loss)


@loop
def gradient_penalty_of_the_input():
    def loss(net, step):
        x = draw(step, 16, 32).requires_grad_()
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, x.detach().roll(1, 1)) + 0.01 * g.square().mean()

    return trained(mlp(), loss=loss)


@loop
def inner_gradient_of_maml():
    def loss(net, step):
        params = dict(net.named_parameters())
        x = draw(step, 16, 32)
        inner = F.mse_loss(torch.func.functional_call(net, params, (x,)), x)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(net, fast, (x,)), x.roll(1, 1))

    return trained(mlp(), loss=loss)


@loop
def first_order_maml():
    def loss(net, step):
        fast = copy.deepcopy(net)
        x = draw(step, 16, 32)
        grads = torch.autograd.grad(F.mse_loss(fast(x), x), list(fast.parameters()))
        params = zip(net.named_parameters(), grads, strict=True)
        moved = {name: p - 0.1 * g for (name, p), g in params}
        return F.mse_loss(torch.func.functional_call(net, moved, (x,)), x.roll(1, 1))

    return trained(mlp(), loss=loss)


@loop
def reptile():
    net = mlp()

    def pull(step):
        if step % 10:
            return
        fast = copy.deepcopy(net)
        inner = torch.optim.SGD(fast.parameters(), lr=0.05)
        task(fast, step).backward()
        inner.step()

    return trained(net, after=pull)


@loop
def sharpness_aware():
    net, before = mlp(), []

    def loss(net, step):
        task(net, step).backward()
        params = list(net.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in params])
        before[:] = [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, [0.05 * p.grad / norm for p in params])
        net.zero_grad()
        return task(net, step)

    def back(step):
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters()), before)

    return trained(net, loss=loss, between=back)


@loop
def closure():
    net = mlp()
    optimizer = adam(net)
    watch = Watch(net, optimizer, every=EVERY)
    for step in range(STEPS):

        def again(step=step):
            optimizer.zero_grad()
            loss = task(net, step)
            loss.backward()
            return loss

        optimizer.step(again)
    return watch


@loop
def a_batch_that_is_skipped():
    net = mlp()
    optimizer = adam(net)
    watch = Watch(net, optimizer, every=EVERY)
    for step in range(STEPS):
        optimizer.zero_grad()
        task(net, step).backward()
        if step % 7:  # the loss was thought to be too large
            optimizer.step()
    return watch


@loop
def checkpointed_activations():
    def loss(net, step):
        x = draw(step, 32, 32)
        half = torch.utils.checkpoint.checkpoint(net[:3], x, use_reentrant=False)
        return F.mse_loss(net[3:](half), x.roll(1, 1))

    return trained(mlp(), loss=loss)


# ---- Learning rates ----------------------------------------------------------------------------------------


def scheduled(make, **options):
    net = mlp()
    optimizer = adam(net, **options)
    scheduler = make(optimizer)
    return trained(net, optimizer, after=lambda step: scheduler.step())


rates = torch.optim.lr_scheduler
LOOPS["warm-up from 0"] = lambda: scheduled(lambda o: rates.LambdaLR(o, lambda step: min(1, step / 20)))
LOOPS["rate of 0 at first"] = lambda: scheduled(lambda o: rates.LambdaLR(o, lambda step: float(step >= 15)))
LOOPS["cosine to 0"] = lambda: scheduled(lambda o: rates.CosineAnnealingLR(o, STEPS))
LOOPS["one cycle"] = lambda: scheduled(lambda o: rates.OneCycleLR(o, 1e-2, total_steps=STEPS + 1))
LOOPS["warm restarts"] = lambda: scheduled(lambda o: rates.CosineAnnealingWarmRestarts(o, 10))
LOOPS["tenfold drop"] = lambda: scheduled(lambda o: rates.StepLR(o, 20))
LOOPS["small rate"] = lambda: scheduled(lambda o: rates.ConstantLR(o), lr=1e-5)
LOOPS["large decay"] = lambda: scheduled(lambda o: rates.ConstantLR(o), weight_decay=1.0)
LOOPS["beta2 of 0.95"] = lambda: scheduled(lambda o: rates.ConstantLR(o), betas=(0.9, 0.95))
LOOPS["no momentum"] = lambda: scheduled(lambda o: rates.ConstantLR(o), betas=(0.0, 0.99))
LOOPS["eps of 1e-3"] = lambda: scheduled(lambda o: rates.ConstantLR(o), eps=1e-3)


@loop
def rate_finder():
    net = mlp()
    optimizer = adam(net, lr=1e-6)

    def raise_rate(step):
        optimizer.param_groups[0]["lr"] *= 1.1

    return trained(net, optimizer, after=raise_rate)


@loop
def layerwise_rates():
    net = mlp()
    groups = [{"params": list(layer.parameters()), "lr": 1e-3 * 0.5**i} for i, layer in enumerate(net)]
    return trained(net, torch.optim.AdamW([group for group in groups if group["params"]]))


@loop
def a_group_with_rate_0():
    net = mlp()
    groups = [{"params": list(net[:3].parameters()), "lr": 0.0}, {"params": list(net[3:].parameters())}]
    return trained(net, torch.optim.AdamW(groups, lr=1e-3))


# ---- Low precision that loses nothing ----------------------------------------------------------------------


@loop
def autocast_to_bf16():
    def loss(net, step):
        x = draw(step, 32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        return F.mse_loss(out.float(), x.roll(1, 1))

    return trained(mlp(), loss=loss)


def scaled(enabled):
    net = mlp()
    optimizer = adam(net)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    watch = Watch(net, optimizer, every=EVERY)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16 if enabled else torch.bfloat16):
            loss = task(net, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return watch


LOOPS["GradScaler in fp16"] = lambda: scaled(True)
LOOPS["GradScaler that is off"] = lambda: scaled(False)


def in_recipe(**flags):
    run = Precision(mlp(), recipe(**flags), lr=1e-3, ema_decay=0.9, clip_grad=1.0)
    watch = Watch(run.model, run.optimizer, run.ema, every=EVERY)
    for step in range(STEPS):
        run.backward(task(run, step))
        run.step()
    return watch


RECIPES = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "stochastic": dict(pure_bf16=True, stochastic=True),
    "split": dict(pure_bf16=True, master="split"),
    "fp32 master": dict(pure_bf16=True, master="fp32"),
}
for label, flags in RECIPES.items():
    LOOPS[f"recipe {label}"] = lambda flags=flags: in_recipe(**flags)
