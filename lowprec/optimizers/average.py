"""The average of the weights, computed in fp32 and written as a recipe says.

    average = EMA(model, decay=0.999)
    ...
    optimizer.step()
    average.update()                     # average.shadow is {name: tensor}

parts/average_on_cpu.py keeps it in the memory of the CPU while the weights are on a GPU.
"""

import torch
from torch import nn

from ..errors import Refused, check_choice
from ..kernels import move_average
from ..rounding import DTYPE_OF_NAME, WAYS_TO_ROUND, Noise, key_words, way_of
from .buckets import StepTable, rows_of
from .state import counts, described

# ---- The average -------------------------------------------------------------------------------------------


class EMA:
    """Exponential moving average of weights: ema += (1-decay)(w - ema), computed in fp32, written as `dtype`
    and `update` say.

    named_params: a module, or [(name, parameter)]. low_part: parameter -> what completes it to the value held
    (see `rounding.exact_weight`), so that an exact master is averaged, not its bf16 image. warmup: let the
    decay start low, so that an average of 0.999 has left the initial weights after hundreds of steps, see
    `decay`. In bf16 to nearest, an entry stops moving once |w - ema| < half an ulp / (1-decay): at decay
    0.9999 that is 20 to 40 times the value itself, so the average never leaves its start.
    """

    note = ""  # what the ledger says of where it is
    before_writing: tuple = ()  # called before the weights are next written

    def __init__(
        self,
        named_params,
        decay,
        dtype="fp32",
        update="nearest",
        *,
        warmup=False,
        low_part=None,
        seed=0,
        compiled=True,
    ):
        check_choice("dtype", dtype, ("fp32", "bf16"))
        check_choice("update", update, WAYS_TO_ROUND)
        if not 0 <= decay <= 1:
            raise Refused(f"decay={decay}: it must lie from 0 to 1")
        self.full_decay, self.warmup = decay, warmup
        self.dtype, self.update_mode = DTYPE_OF_NAME[dtype], update
        self.seed, self.compiled = seed, compiled
        if isinstance(named_params, nn.Module):
            named_params = named_params.named_parameters()
        try:
            self.names, self.params = zip(*named_params, strict=True)
        except (TypeError, ValueError) as error:
            raise Refused("an EMA takes a module, or a list of (name, parameter)") from error
        self.low_part = low_part or {}.get  # None of each
        self.step = 0
        keys = [(p.dtype, p.device, getattr(self.low_part(p), "dtype", None)) for p in self.params]
        self._buckets = rows_of(self.params).buckets(self.params, keys)
        self.shadow = dict.fromkeys(self.names)  # in the order of the parameters, whatever bucket each is in
        self._views = {}  # as in shadow, but for what somebody assigned there
        for bucket in self._buckets:
            weights, low = self._inputs(bucket)
            bucket.flat = way_of(*low).held(weights, *low).detach().to(self.dtype, copy=True)
            self._share(bucket)

    def _share(self, bucket):
        views = bucket.views(bucket.flat, bucket.params)
        for i, view in zip(bucket.indices, views, strict=True):
            self.shadow[self.names[i]] = self._views[self.names[i]] = view

    def __setstate__(self, state):
        self.__dict__.update(state)
        for bucket in self._buckets:
            self._share(bucket)  # plain pickle makes a tensor of its own of each view

    @property
    def decay(self):
        """The decay of the last update, number t: min(decay, (1 + t) / (10 + t)) with a warm-up, or constant.

        Of the initial weights that leaves 10! (t + 1)! / (t + 10)!, 3e-21 after 1,000 steps; an average of
        constant decay 0.999 holds 37 % of them then. It is the schedule of TensorFlow's
        ExponentialMovingAverage. A bias correction (dividing by 1 - decay^t) removes the initial weights too,
        but keeps those of the first steps, which are hardly better, with nearly the same weight as the last.
        """
        if not self.warmup:
            return self.full_decay
        return min(self.full_decay, (1 + self.step) / (10 + self.step))

    @decay.setter
    def decay(self, value):
        self.full_decay = value

    def _inputs(self, bucket):
        """(weights, [what completes them] or []), flat."""
        params = bucket.params
        if [p.shape for p in params] != bucket.shapes or not all(p.data_ptr() for p in params):
            bucket.check(dict(zip(self.params, self.names, strict=True)).get, [None] * len(params))
        weights = bucket.gather(params)
        lows = [self.low_part(p) for p in bucket.params]  # a finish may have begun them
        if lows[0] is None:
            return weights, []
        return weights, [bucket.gather(lows)]

    @torch.no_grad()
    def update(self):
        """Take one step towards the weights as they are now. Raises Refused for weights of another shape."""
        self.step += 1
        self._move()

    def catch_up(self):
        """Called before the average is read by another way than `shadow`."""

    def _move(self):
        for name, view in self._views.items():
            if self.shadow[name] is not view:  # an average that somebody assigned is taken
                view.copy_(self.shadow[name])
                self.shadow[name] = view
        table, rows = StepTable(self._buckets[0].flat.device), {}
        for bucket in self._buckets:
            for _, _, position, ahead in bucket.rows():
                rows[bucket] = len(table.keys)
                table.numbers.append([1 - self.decay])
                table.keys.append([*key_words(self.seed, self.step, position, Noise.AVERAGE, ahead), 0])
        table.fill()
        stochastic = self.update_mode == "stochastic"
        for bucket, row in rows.items():
            weights, low = self._inputs(bucket)
            how = table.numbers[row], table.keys[row], stochastic, self.compiled
            move_average(bucket.flat, weights, low, way_of(*low), *how)

    def state_dict(self):
        return {"step": self.step, "shadow": dict(self.shadow)}

    def check_state(self, state):
        """Raises Refused for the averages of another model or dtype, and for none."""
        own = {name: described(value) for name, value in self.shadow.items()}
        theirs = {name: described(value) for name, value in state.get("shadow", {}).items()}
        if theirs != own or not counts(state.get("step")):
            raise Refused("the averaged weights are absent, or belong to another model or another ema dtype")

    def load_state_dict(self, state):
        """Raises Refused as `check_state`."""
        self.check_state(state)
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)
        self.step = int(state["step"])
