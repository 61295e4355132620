"""The dynamic loss scale of fp16, by torch.amp.GradScaler: a step whose gradients overflow is left out."""

import functools
import math
import warnings

import torch

from ..errors import Refused, check_number
from .part import Part

SKIPPED_IN_A_ROW = 20  # steps, of which a run is told


class LossScale(Part):
    """Scales the loss up and the gradients down again. skipped: steps whose gradients were not finite."""

    def __init__(self, run):
        super().__init__(run)
        self.skipped = 0
        check_number("init_loss_scale", run.options.init_loss_scale)
        self.scaler = torch.amp.GradScaler(
            run.device.type,
            init_scale=run.options.init_loss_scale,
            growth_factor=run.options.growth_factor,
            backoff_factor=run.options.backoff_factor,
            growth_interval=run.options.growth_interval,
        )
        self.still = StandStill(run.model)

    @property
    def param_groups(self):
        """Of the optimiser, for which the scaler takes this part: it calls `step` unless it skips one."""
        return self.run.optimizer.param_groups

    def loss(self, loss):
        return self.scaler.scale(loss)

    def gradients(self, grads):
        if grads:  # the run refuses a step without any
            if not self.run.backwards:
                raise Refused("fp16 scales the loss, and loss.backward() does not: call run.backward(loss)")
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
        scale = self.scaler.get_scale()
        has_skipped = scale < before  # the scaler backs off exactly when it skipped
        self.skipped += has_skipped
        self.still.look(has_skipped, scale, self.scaler.get_backoff_factor())

    def figures(self):
        return {"skipped_steps": self.skipped, "loss_scale": self.scaler.get_scale()}

    def state_dict(self):
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped}

    def check_state(self, state):
        if not 0 < state["scaler"].get("scale", 0.0) < math.inf:
            raise Refused("the checkpoint has no loss scale above 0: it was another recipe's, or failed")

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]


class StandStill:
    """Warns once of a run that skips one step after another, and names the module in which it overflows.

    Some skipped steps are no fault: the scale falls until gradients fit. Below 1 it shrinks them, and they
    overflow as they are.
    """

    def __init__(self, net):
        self.overflow = Overflow(net)  # listens in the step before which it looks bad
        self.in_a_row = 0
        self.warned = False

    def look(self, has_skipped, scale, backoff):
        """A step is over, done or skipped."""
        self.overflow.stop()
        if self.warned or not has_skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row >= SKIPPED_IN_A_ROW or scale < 1:
            self._warn(scale)
        elif self.in_a_row + 1 >= SKIPPED_IN_A_ROW or scale * backoff < 1:  # the next one would be told of
            self.overflow.listen()

    def _warn(self, scale):
        self.warned = True
        where = self.overflow.found or "some gradient is not finite"
        warnings.warn(
            f"fp16: {self.in_a_row} steps in a row were skipped, and the loss scale is down to {scale:g}: "
            f"{where}; if it goes on, nothing is trained: recipe(bf16=True) (--bf16) has the range of fp32",
            stacklevel=6,  # where run.step() is called
        )


class Overflow:
    """Finds the first module of a net whose output, or the gradient of that, is not finite."""

    def __init__(self, net):
        self.net = net
        self.hooks = []  # on every module, from `listen` to `stop`
        self.found = ""  # in words

    def listen(self):
        self.found = ""
        for name, module in self.net.named_modules():
            title = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
            self.hooks.append(module.register_forward_hook(functools.partial(self._look_at_output, title)))

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _look_at_output(self, title, module, args, out):
        if not torch.is_tensor(out) or not out.is_floating_point() or torch.compiler.is_compiling():
            return
        self._note(f"the output of {title} is not finite", out)
        if out.requires_grad:
            gradient = f"the gradient of the output of {title} is not finite"
            self.hooks.append(out.register_hook(functools.partial(self._note, gradient)))

    def _note(self, what, tensor):
        if not self.found and not bool(tensor.isfinite().all()):
            self.found = what
