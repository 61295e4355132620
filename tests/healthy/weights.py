"""Healthy loops: parts that move and that don't, and averages of the weights."""

import copy
import importlib

import torch
import torch.nn.functional as F
from healthy.shared import LOOPS, STEPS, adam, draw, loop, mlp, next_token, task, trained
from torch import nn

from lowprec import EMA

# ---- Parts that move, and that don't -----------------------------------------------------------------------


@loop
def frozen_backbone():
    net = mlp()
    net[:3].requires_grad_(False)
    return trained(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))


@loop
def frozen_parts_in_the_optimiser():
    net = mlp()
    net[:3].requires_grad_(False)
    return trained(net)


@loop
def gradual_unfreezing():
    net = mlp()
    net[:3].requires_grad_(False)

    def thaw(step):
        if step == 25:
            net[:3].requires_grad_(True)

    return trained(net, after=thaw)


@loop
def two_optimisers_of_two_halves():
    net = mlp()
    first = torch.optim.AdamW(net[:3].parameters(), lr=1e-3)
    second = torch.optim.SGD(net[3:].parameters(), lr=0.05, momentum=0.9)
    return trained(net, first, after=lambda step: (second.step(), second.zero_grad()), others=[second])


class Zeroed(nn.Module):
    """A branch behind a zero weight, as of ControlNet, ReZero and adaLN-zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = mlp(), mlp()
        self.gate = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return self.trunk(x) + self.gate * self.branch(x)


LOOPS["zero gate"] = lambda: trained(Zeroed())


@loop
def zero_last_layer():
    net = mlp()
    nn.init.zeros_(net[5].weight)
    nn.init.zeros_(net[5].bias)
    return trained(net)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = choice == i
            if rows.any():
                out[rows] = weight[rows, None] * expert(x[rows])
        return out


LOOPS["mixture of experts"] = lambda: trained(Experts())


@loop
def an_expert_that_is_rarely_asked():
    net = Experts()
    with torch.no_grad():
        net.gate.bias[3] = -2.0
    return trained(net)


class Depth(nn.Module):
    """Layers that a step leaves out by chance."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == 0 or torch.rand(()) > 0.3:
                x = x + layer(x).relu()
        return x


LOOPS["stochastic depth"] = lambda: trained(Depth())


@loop
def an_unused_head():
    net = nn.ModuleDict({"net": mlp(), "head": nn.Linear(32, 4)})
    return trained(net, loss=lambda net, step: task(net["net"], step))


@loop
def tied_weights():
    torch.manual_seed(0)
    embedding, body, head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
    head.weight = embedding.weight
    net = nn.Sequential(embedding, body, nn.GELU(), head)
    return trained(net, loss=next_token)


@loop
def rare_tokens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 50))
    return trained(net, loss=next_token)


@loop
def weights_clipped_after_a_step():
    net = mlp()

    @torch.no_grad()
    def clamp(step):
        for p in net.parameters():
            p.clamp_(-0.1, 0.1)

    return trained(net, after=clamp)


@loop
def weights_of_unit_norm():
    net = mlp()

    @torch.no_grad()
    def project(step=0):
        for p in net.parameters():
            if p.ndim == 2:
                p.div_(p.norm(dim=1, keepdim=True))

    project()
    return trained(net, after=project)


@loop
def pruned_weights():
    net = mlp()
    masks = {p: draw(9, *p.shape) > 0 for p in net.parameters() if p.ndim == 2}

    @torch.no_grad()
    def prune(step):
        for p, mask in masks.items():
            p.mul_(mask)

    prune(0)
    return trained(net, after=prune)


class LowRank(nn.Module):
    """A frozen layer with two factors beside it, as LoRA has."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))

    @torch.no_grad()
    def merge(self, keep):
        """Add the factors to the layer, and begin them anew: the first of them too, unless it is kept."""
        self.layer.weight += self.up.weight @ self.down.weight
        nn.init.zeros_(self.up.weight)
        if not keep:
            self.down.reset_parameters()


def with_factors():
    """(net, optimiser): factors beside three frozen layers."""
    net = mlp()
    for i in (0, 3, 5):
        net[i] = LowRank(net[i])
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)


LOOPS["adapters"] = lambda: trained(*with_factors())


def low_rank(forget, keep=False):
    """ReLoRA, arXiv 2307.05695. forget: (optimizer, parameter) -> what becomes of its state."""
    net, optimizer = with_factors()

    @torch.no_grad()
    def restart(step):
        if step not in (25, 45):
            return
        for layer in (net[0], net[3], net[5]):
            layer.merge(keep)
            for p in (layer.up.weight, layer.down.weight):
                forget(optimizer, p)

    return trained(net, optimizer, after=restart)


def drop_state(optimizer, p):
    optimizer.state.pop(p)


def prune_state(optimizer, p):
    """All but a hundredth of both moments."""
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[p][name]
        moment.mul_(torch.rand_like(moment) > 0.99)


LOOPS["low rank, pruned at restarts"] = lambda: low_rank(prune_state)
LOOPS["low rank, dropped at restarts"] = lambda: low_rank(drop_state)
LOOPS["low rank, with one factor kept"] = lambda: low_rank(drop_state, keep=True)


@loop
def saved_and_loaded():
    net = mlp()
    optimizer = adam(net)

    def reload(step):
        if step == 30:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            net.load_state_dict(copy.deepcopy(net.state_dict()))

    return trained(net, optimizer, after=reload)


# ---- Averages ----------------------------------------------------------------------------------------------


def averaged(make, update):
    net = mlp()
    ema = make(net)
    return trained(net, ema=ema, after=lambda step: update(ema, net, step))


def lerp_all(own, theirs, weight):
    with torch.no_grad():
        for a, b in zip(own, theirs, strict=True):
            a.lerp_(b.detach(), weight)


def follow(average, net, weight):
    lerp_all(average.values(), net.parameters(), weight)


def of_dict(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def of_torch(net, **how):
    return torch.optim.swa_utils.AveragedModel(net, **how)


def of_diffusers(net):
    training = importlib.import_module("diffusers.training_utils")
    return training.EMAModel(net.parameters(), decay=0.99, use_ema_warmup=True)


def of_timm_average(net, kind):
    return getattr(importlib.import_module("timm.utils"), kind)(net, decay=0.99)


def ours_average(net):
    return EMA(net.named_parameters(), 0.99)


update_torch = lambda ema, net, step: ema.update_parameters(net)  # noqa: E731
decayed = torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
AVERAGES = {
    "a dict": (of_dict, lambda ema, net, step: follow(ema, net, 0.01)),
    "a module": (copy.deepcopy, lambda ema, net, step: lerp_all(ema.parameters(), net.parameters(), 0.01)),
    "torch": (lambda net: of_torch(net, multi_avg_fn=decayed), update_torch),
    "torch with buffers": (lambda net: of_torch(net, multi_avg_fn=decayed, use_buffers=True), update_torch),
    "the mean of all": (of_torch, update_torch),
    "diffusers": (of_diffusers, lambda ema, net, step: ema.step(net.parameters())),
    "timm": (lambda net: of_timm_average(net, "ModelEmaV2"), lambda ema, net, step: ema.update(net)),
    "timm V3": (lambda net: of_timm_average(net, "ModelEmaV3"), lambda ema, net, step: ema.update(net, step)),
    "every fifth step": (
        of_dict,
        lambda ema, net, step: follow(ema, net, 0.05) if step % 5 == 4 else None,
    ),
    "warming up": (
        of_dict,
        lambda ema, net, step: follow(ema, net, 1 - min(0.99, (1 + step) / (10 + step))),
    ),
    "beginning late": (
        of_dict,
        lambda ema, net, step: follow(ema, net, 1.0 if step < STEPS // 3 else 0.01),
    ),
    "slow": (of_dict, lambda ema, net, step: follow(ema, net, 1e-4)),
}
for label, parts in AVERAGES.items():
    LOOPS[f"average: {label}"] = lambda parts=parts: averaged(*parts)


@loop
def our_average():
    net = mlp()
    ema = ours_average(net)
    return trained(net, ema=ema, after=lambda step: ema.update())


@loop
def a_teacher_inside():
    net = nn.ModuleDict({"student": mlp(), "teacher": mlp().requires_grad_(False)})

    def loss(net, step):
        x = draw(step, 32, 32)
        return F.mse_loss(net["student"](x + 0.1 * draw(step + 9999, 32, 32)), net["teacher"](x) + 0.1 * x)

    def move(step):
        lerp_all(net["teacher"].parameters(), net["student"].parameters(), 0.004)

    params = net["student"].parameters()
    return trained(net, torch.optim.AdamW(params, lr=1e-3), loss=loss, after=move)


@loop
def a_target_net_that_is_copied():
    net = mlp()
    target = copy.deepcopy(net)

    def copy_over(step):
        if step % 20 == 19:
            target.load_state_dict(net.state_dict())

    def loss(net, step):
        x = draw(step, 32, 32)
        with torch.no_grad():
            value = 0.9 * target(x.roll(1, 0)) + x
        return F.smooth_l1_loss(net(x), value)

    return trained(net, loss=loss, after=copy_over)


@loop
def lookahead_by_hand():
    net = mlp()
    slow = of_dict(net)

    def look(step):
        if step % 5 == 4:
            lerp_all(slow.values(), net.parameters(), 0.5)
            lerp_all(net.parameters(), slow.values(), 1.0)

    return trained(net, after=look)
