"""What a Watch takes of the time of the steps."""

import time

MOST_SHARE = 0.05  # of the time of the steps, where the watch chooses its looks by itself
LOOKS_AT_ANY_COST = 3


class Clock:
    """Within it the time is the watch's own; the rest since it began is that of the steps."""

    def __init__(self):
        self.began = None
        self.spent = 0.0
        self.depth = 0

    def __enter__(self):
        if self.depth == 0:
            self.entered = time.perf_counter()
            self.began = self.began or self.entered
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1
        if self.depth == 0:
            self.spent += time.perf_counter() - self.entered

    def share(self, more=0.0):
        """Time spent, and so many seconds more, over the time of the steps; 0.0 before there is any."""
        if self.began is None:
            return 0.0
        of_steps = time.perf_counter() - self.began - self.spent
        return (self.spent + more) / max(of_steps, 1e-9)

    def can_afford_another(self, looks):
        return looks < LOOKS_AT_ANY_COST or self.share(self.spent / looks) <= MOST_SHARE
