"""The learning rates of train.py, by which it trains, and by which `foresee` looks ahead."""

import math


def lr_factor(config, step):
    """What the learning rates are multiplied by at `step`, a function of the step alone: linear warm-up, then
    --lr_schedule.
    """
    warm = 1.0
    if config.warmup:
        warm = min(1.0, (step + 1) / config.warmup)
    if config.lr_schedule == "constant":
        return warm
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    done = min(1.0, max(0.0, done))
    if config.lr_schedule == "linear":
        return warm * (1 - done)
    return warm * ((1 + math.cos(math.pi * done)) / 2)
