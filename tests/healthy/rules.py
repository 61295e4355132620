"""Healthy loops: classes that are AdamW or Adam by descent or by name, and have a rule of their own."""

import collections
import types

import torch
from healthy.shared import LOOPS, mlp, trained

RULES = []


def rule(make):
    """Enter a class and its loop."""
    RULES.append(make)
    LOOPS[f"rule {make.__name__}"] = lambda: with_rule(make)
    return make


def with_rule(make, lr=1e-3):
    net = mlp()
    return trained(net, make(net.parameters(), lr=lr, weight_decay=0.1))


class Rule(torch.optim.AdamW):
    """AdamW, of which a class changes one line."""

    def gradient(self, p, g, state, group):
        return g

    def second(self, g, state):
        return g.square()

    def update(self, p, g, u, group):
        return u

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=p * 0.0, exp_avg_sq=p * 0.0)
                state["step"] += 1
                self.place, t = i, state["step"].item()
                g = self.gradient(p, p.grad, state, group)
                p.mul_(1 - lr * group["weight_decay"] * self.decays)
                state["exp_avg"].lerp_(g, 1 - b1)
                state["exp_avg_sq"].lerp_(self.second(g, state), 1 - b2)
                corrected = self.corrects
                root = (state["exp_avg_sq"] / (1 - b2**t * corrected)).sqrt() + group["eps"]
                u = state["exp_avg"] / (1 - b1**t * corrected) / root
                p.sub_(lr * self.update(p, g, u, group))

    decays, corrects = True, True


@rule
class Cautious(Rule):
    def update(self, p, g, u, group):
        mask = (u * g > 0).float()
        return u * mask / mask.mean().clamp_min(1e-3)


@rule
class AdaBelief(Rule):
    def second(self, g, state):
        return (g - state["exp_avg"]).square()


@rule
class Lamb(Rule):
    def update(self, p, g, u, group):
        return u * (p.norm() / u.norm()).clamp(0, 10) * 0.1


@rule
class AdamMini(Rule):
    def second(self, g, state):
        return g.square().mean().expand_as(g)


@rule
class Grokfast(Rule):
    def gradient(self, p, g, state, group):
        state["slow"] = state.get("slow", torch.zeros_like(g)).lerp(g, 0.02)
        return g + 2.0 * state["slow"]


@rule
class NoBias(Rule):
    corrects = False


@rule
class VectorsDoNotDecay(Rule):
    def update(self, p, g, u, group):
        return u if p.dim() > 1 else u - group["weight_decay"] * p / (1 - group["lr"] * group["weight_decay"])


@rule
class LayerwiseRates(Rule):
    def update(self, p, g, u, group):
        return u * 0.7**self.place


@rule
class CountsInAnObject(Rule):
    """Its rate falls by a count that an object of its own keeps."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.kept = types.SimpleNamespace(count=0, sizes=collections.defaultdict(float))

    def update(self, p, g, u, group):
        self.kept.count += 1
        self.kept.sizes[self.place] += float(u.square().sum())
        return u / (1 + 0.01 * self.kept.count + self.kept.sizes[self.place])


@rule
class HalvesGradients(torch.optim.AdamW):
    """Puts other gradients in place, of parameters that the class has beside its groups."""

    held = []

    def __init__(self, params, **options):
        super().__init__(params, **options)
        type(self).held = self.param_groups[0]["params"]

    def step(self, closure=None):
        for p in self.held:
            p.grad = p.grad * 0.5
        super().step()


@rule
class ClippedTogether(Rule):
    def gradient(self, p, g, state, group):
        norm = sum(q.grad.square().sum() for q in group["params"] if q.grad is not None).sqrt()
        return g * (0.1 / norm).clamp(max=1)


@rule
class DecayTowardStart(Rule):
    decays = False

    def update(self, p, g, u, group):
        self.start = getattr(self, "start", {})
        self.start.setdefault(p, p.clone())
        return u + group["weight_decay"] * (p - self.start[p])


@rule
class AdamW(torch.optim.Optimizer):
    """A foreign one whose decay is coupled."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad + group["weight_decay"] * p, self.state[p]
                if not state:
                    state.update(step=0, exp_avg=p * 0.0, exp_avg_sq=p * 0.0)
                state["step"] += 1
                state["exp_avg"].lerp_(g, 0.1)
                state["exp_avg_sq"].lerp_(g.square(), 0.001)
                root = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt()
                p.sub_(group["lr"] * state["exp_avg"] / (1 - 0.9 ** state["step"]) / (root + 1e-8))


@rule
class Masked(torch.optim.AdamW):
    """A mask after the parent's step, kept by parameter."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.masks = {p: torch.rand_like(p) > 0.5 for p in self.param_groups[0]["params"] if p.dim() > 1}

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p, mask in self.masks.items():
                p.mul_(mask)


@rule
class Trust(torch.optim.Adam):
    """The parent's step, then made shorter or longer by a ratio of norms."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        super().step()
        with torch.no_grad():
            for p, old in zip(params, before, strict=True):
                way = p - old
                p.copy_(old + way * (old.norm() / way.norm().clamp_min(1e-12)).clamp(0.1, 10) * 0.01)


@rule
class Lookahead(torch.optim.AdamW):
    """Slow weights every fifth step, within it."""

    slow, count = None, 0

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.slow = self.slow or {p: p.detach().clone() for p in params}
        super().step()
        self.count += 1
        with torch.no_grad():
            for p in params if self.count % 5 == 0 else ():
                self.slow[p] = self.slow[p].lerp(p, 0.5)
                p.copy_(self.slow[p])


@rule
class StepsAtEachFourthCall(torch.optim.AdamW):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 4 == 0:
            super().step()


@rule
class StepsAnother(torch.optim.Optimizer):
    """A wrapper: it has the groups of the optimiser that it steps."""

    def __init__(self, params, **options):
        self.inner = torch.optim.AdamW(params, **options)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()
