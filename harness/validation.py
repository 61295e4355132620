"""Validation during training: when it is due, which step was the best so far, and when patience ends.

    python train.py --task segment --epochs 100 --early_stop 20

The scores come from `Task.validate`; `Task.watched` names the one that decides. The best weights are kept as
best.pt, a checkpoint like checkpoint.pt: --sample runs/NAME/best.pt scores them.
"""

import math

BEST_FILE = "best.pt"


class Validation:
    """The watched score of a run over time.

    watched: (name, "lower" or "higher"), which is better. every: steps between two looks, 0 for none.
    patience: looks without a better score after which the run ends, 0 for no end.
    """

    def __init__(self, watched, every, patience):
        self.name, better = watched
        if better not in ("lower", "higher"):
            raise ValueError(f"watched says lower or higher, not {better!r}")
        self.sign = 1
        if better == "higher":
            self.sign = -1
        self.every, self.patience = every, patience
        self.best = self.step = None  # the best score, and the step of it
        self.waited = 0  # looks since then

    def take(self, scores, step):
        """Take the scores of a look; True when the watched one is the best so far. NaN never is."""
        value = scores[self.name]
        better = self.best is None or self.sign * value < self.sign * self.best
        if better and not math.isnan(value):
            self.best, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self):
        """Whether patience has ended."""
        return bool(self.patience) and self.waited >= self.patience

    def state_dict(self):
        return {"best": self.best, "step": self.step, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.step, self.waited = state["best"], state["step"], state["waited"]

    def json(self):
        """What summary.json says."""
        return {"watched": self.name, "best": self.best, "step": self.step, "stopped": self.exhausted}


def is_due(every, step):
    """Whether what happens `every` so many steps, 0 for never, happens after this step."""
    return bool(every) and step % every == 0


def steps_an_epoch(config, count):
    """Optimiser steps of one pass over `count` training items."""
    return math.ceil(count / (config.batch_size * config.accumulate))
