"""The dynamic loss scale of fp16, by torch.amp.GradScaler: a step whose gradients overflow is left out."""

import torch

from .part import Part


class LossScale(Part):
    """Scales the loss up and the gradients down again. skipped: steps whose gradients were not finite."""

    def __init__(self, run):
        self.optimizer = None
        self.skipped = 0
        self.scaler = torch.amp.GradScaler(
            run.device.type,
            init_scale=run.options.init_loss_scale,
            growth_factor=run.options.growth_factor,
            backoff_factor=run.options.backoff_factor,
            growth_interval=run.options.growth_interval,
        )

    def ready(self, run):
        self.optimizer = run.optimizer

    @property
    def param_groups(self):
        """Of the optimiser, for which the scaler takes this part: it calls `step` unless it skips one."""
        return self.optimizer.param_groups

    def loss(self, loss):
        return self.scaler.scale(loss)

    def gradients(self, grads):
        if grads:  # the run refuses a step without any
            self.scaler.unscale_(self)
        return grads

    def around(self, write):
        self.step = write
        return self._step_unless_overflown

    def _step_unless_overflown(self):
        before = self.scaler.get_scale()
        self.scaler.step(self)
        self.step = None  # which holds the gradients
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before  # the scaler backs off exactly when it skipped

    def figures(self):
        return {"skipped_steps": self.skipped, "loss_scale": self.scaler.get_scale()}

    def state_dict(self):
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]
