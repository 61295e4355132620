"""AdamW that forgets its moments every 400 steps.

    python train.py --optimizer experiments/087-resets-of-moments/optimizer.py:Resetting

The moments begin at zero again, and so does their number of steps, which the correction of their bias reads.
"""

from lowprec.optimizers.rounded import AdamW

PERIOD = 400


class Resetting(AdamW):
    def step(self, *args, **named):
        loss = super().step(*args, **named)
        if any(state["step"] == PERIOD for state in self.state.values()):
            self.state.clear()
        return loss
