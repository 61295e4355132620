"""An average in bf16 as other tools keep it: each rule on the same path of weights, beside an fp64 average.

    python bench.py averages                        5,000 steps, half a minute on one core

The rules are the arithmetic of three tools, written anew: which decay at which step, which operations, and in
which dtype each of them rounds. Nothing else of those tools is used.

    diffusers       EMAModel.step (0.42): shadows in the dtype of the weights; decay 0 at the first step, then
                    min(decay, (1 + t) / (10 + t)); s -= (1 - decay) * (s - p), each operation rounded to bf16
    foreach         the same with foreach=True: the product is added before it is rounded
    OneTrainer      EMAModuleWrapper.step: min(decay, (1 + t) / (10 + t)); e += (1 - decay) * (p - e), each
                    operation rounded, every `interval` steps, 5 unless the user says otherwise
    OneTrainer sr   with its option for stochastic rounding, which a user has to switch on
    ai-toolkit      ExponentialMovingAverage.update: constant decay, fp32 arithmetic, stochastic rounding

The path: weights of spread 0.02, as in a large matrix, go their own way at a falling pace, as training moves
them, and jump to and fro by a hundredth of their spread. They are bf16 values, as these tools hold them. Each
rule is compared with an fp64 average of the same decay schedule over the same values, so that no figure
measures the schedule. Two figures a rule: the share of the way from the initial weights that it has covered
(1 is right), and how far it is from the fp64 average, as a share of the weights' spread.
"""

import math

import torch

from benchmarks.common import Command, Flag, rows_by
from lowprec.advice.text import layout

PATH_STEPS, PATH_ENTRIES, WEIGHT_SPREAD = 5000, 20_000, 0.02
DECAYS = (0.99, 0.999, 0.9999)

# ---- The path ----------------------------------------------------------------------------------------------


def weight_path(steps=PATH_STEPS, n=PATH_ENTRIES, seed=0):
    """Yields bf16 weights [n], first the initial ones, then those after each step."""
    draw = torch.Generator().manual_seed(seed)
    start = WEIGHT_SPREAD * torch.randn(n, generator=draw)
    way = WEIGHT_SPREAD * torch.randn(n, generator=draw)  # as far as the weights are large, in all
    yield start.to(torch.bfloat16)
    for step in range(1, steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        noise = 0.01 * WEIGHT_SPREAD * torch.randn(n, generator=draw)
        yield (start + done * way + noise).to(torch.bfloat16)


# ---- The rules ---------------------------------------------------------------------------------------------


def warmed(decay, t):
    return min(decay, (1 + t) / (10 + t))


def diffusers_decay(decay, step):
    """The decay of update number `step`, from 1: the first copies the weights."""
    return 0.0 if step <= 1 else warmed(decay, step - 1)


def stochastic_bf16(x, draw):
    """fp32 x in bf16, up or down with the probability of the distance: 16 random bits are added and cut."""
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=draw)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class AverageRule:
    """An average. decay_at(decay, step) from 1 on; update(average, p, one_minus_decay, draw) -> average."""

    def __init__(self, decay_at, update, interval=1):
        self.decay_at, self.update, self.interval = decay_at, update, interval

    def due(self, step):
        return step % self.interval == 0


def _in_place(s, p, rest, draw):  # three roundings
    return s - rest * (s - p)


def _foreach(s, p, rest, draw):  # two: torch adds with alpha in fp32
    return torch.sub(s, s - p, alpha=rest)


def _added(s, p, rest, draw):
    return s + rest * (p - s)


def _rounded_up_or_down(s, p, rest, draw):
    s32 = s.float()
    return stochastic_bf16(s32 - rest * (s32 - p.float()), draw)


def _fp32(s, p, rest, draw):
    return s.float() + rest * (p.float() - s.float())


def _constant(decay, step):
    return decay


RULES = {
    "fp32, constant": AverageRule(_constant, _fp32),
    "fp32, warm-up": AverageRule(warmed, _fp32),
    "diffusers": AverageRule(diffusers_decay, _in_place),
    "diffusers, foreach": AverageRule(diffusers_decay, _foreach),
    "OneTrainer": AverageRule(warmed, _added, interval=5),
    "OneTrainer, every step": AverageRule(warmed, _added),
    "OneTrainer, stochastic": AverageRule(warmed, _rounded_up_or_down),
    "ai-toolkit": AverageRule(_constant, _rounded_up_or_down),
}

# ---- Measuring ---------------------------------------------------------------------------------------------


def measure_rules(decay, steps=PATH_STEPS, n=PATH_ENTRIES, seed=0, rules=RULES):
    """{rule: (share of the way that the fp64 average went, distance from it over the weights' spread)}."""
    weights, draw = weight_path(steps, n, seed), torch.Generator().manual_seed(seed + 1)
    start = next(weights)
    averages = dict.fromkeys(rules, start)
    exact = dict.fromkeys(rules, start.double())
    for step, p in enumerate(weights, 1):
        wide = p.double()
        for name, rule in rules.items():
            if rule.due(step):
                rest = 1 - rule.decay_at(decay, step)
                averages[name] = rule.update(averages[name], p, rest, draw)
                exact[name] = exact[name] + rest * (wide - exact[name])
    return {name: progress(start, average, exact[name]) for name, average in averages.items()}


def progress(start, average, exact):
    """(share of the way from `start` to `exact`, fp64, that `average` has covered, its distance from `exact`
    over the weights' spread); all [n].
    """
    way, gone = exact - start.double(), average.double() - start.double()
    distance = (average.double() - exact).square().mean().sqrt() / WEIGHT_SPREAD
    return float(gone @ way / (way @ way)), float(distance)


def compared(args, clock):
    """The rows of all rules at all decays; prints them as a table."""
    rows = []
    for decay in DECAYS:
        for rule, (share, distance) in measure_rules(decay, args.steps).items():
            rows.append(dict(rule=rule, decay=decay, share=share, distance=distance))
    print("share of the way covered (1 is right) and distance from the fp64 average / spread of the weights")
    lines = [["", *(f"decay {decay:g}" for decay in DECAYS)]]
    for rule, its in rows_by(rows, "rule").items():
        lines.append([rule, *(f"{row['share']:.3f}  {row['distance']:.2%}" for row in its)])
    print(layout(lines))
    return rows


COMMAND = Command(
    "averages",
    "averages in bf16 as other tools keep them, beside one in fp64",
    compared,
    flags=(Flag("--steps", PATH_STEPS, "of the path of weights"),),
    cpu_only=True,
)
