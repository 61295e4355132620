"""Moments in the memory of the CPU: see optimizers/offload.py."""

from ..errors import Refused
from ..optimizers.offload import bytes_kept_away, offloaded
from ..optimizers.rounded import Rounded
from .part import Part


class Offloaded(Part):
    """Keeps the moments of our optimisers where `states_on` says."""

    @classmethod
    def of(cls, run):
        run.away = offloaded(run.options.states_on, run.device)
        return cls(run)

    def ready(self, run):
        for optimizer in getattr(run.optimizer, "parts", [run.optimizer]):
            if not isinstance(optimizer, Rounded):
                kind = type(getattr(optimizer, "inner", optimizer))
                owner = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
                ours = "use adamw, sgd, lion, adafactor or muon of ours, or drop it"
                what = f"--states_on cpu knows the states of our optimisers alone, and {owner} is none"
                raise Refused(f"{what}: {ours}")

    def elsewhere(self):
        if self.run.away is None:  # the device is the CPU itself
            return 0, 0
        return bytes_kept_away(self.run.optimizer)
