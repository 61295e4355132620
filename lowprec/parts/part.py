"""A part of a run: what it has besides a net, an optimiser and averages.

`Precision` calls all its parts at the same places and knows none of them by name: FP8 products, 2:4 sparsity,
the loss scale of fp16, sums of micro-batches. A new one is a class with the places it needs and a row of
precision.PARTS.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ..view import copied


class Part:
    """The places at which a run asks. Every default does nothing. run: a precision.Precision."""

    rules: tuple = ()  # rules.Rule of runs that can't have it; each gets the run
    generates: str | None = None  # the value of the site generation in which copies of the net keep it
    keeps_sums = False  # whether it sums gradients in fp32, apart from p.grad
    frees_gradients = False  # whether gradients are gone after backward, one by one
    has_written = False  # whether backward has updated weights of this step

    def __init__(self, run):
        self.run = run

    @classmethod
    def of(cls, run):
        """The part, for a run that wants it. The net is still as it came; raises Refused."""
        return cls(run)

    # -- the net

    def convert(self, net):
        """Change layers of the net, which now has the dtypes of the recipe."""

    def ready(self, run):
        """The optimiser is there."""

    def check_forward(self, wrapper):
        """Raise Refused for a wrapper of the net that this part does not go with."""

    def context(self):
        """What the net is called in."""
        return nullcontext()

    def plain(self, net):
        """A context in which the net computes without this part, and copies of it are made so."""
        return nullcontext()

    def freeze(self, view, generation):
        """Make the net of `view`, a copy with its final weights, ready to generate as the site `generation`
        says.
        """

    # -- a step, in this order

    def observe(self, on):
        """Whether the next step is measured."""

    def loss(self, loss):
        """The loss of a micro-batch that backward begins with."""
        return loss

    def after_backward(self):
        """After the backward pass of each micro-batch."""

    def measure(self, measures):
        """A measured step begins. measures: a telemetry.Measures."""

    def gradients(self, grads):
        """{parameter: gradient} of a step, perhaps changed in place."""
        return grads

    def around(self, write):
        """What is called in the place of write(), the optimiser's step."""
        return write

    def after_step(self):
        """After the optimiser's step. The averages follow. Returns telemetry."""
        return {}

    def figures(self):
        """{name: number} of a measured step."""
        return {}

    def forget(self):
        """The gradients since the last step are forgotten, or used."""

    # -- weights and state

    def values(self, values):
        """{name: tensor}: weights as generation and export read them."""
        return values

    def as_it_came(self, values):
        """{name: tensor}: `values` under the names that the net had before the run."""
        return values

    def state_dict(self):
        """{key: value} that it has in the state of a run."""
        return {}

    def adapt(self, own, saved):
        """`saved`, a state_dict of the net, as one for the net whose state_dict is `own`."""
        return saved

    def check_state(self, state):
        """Raise Refused where the state of a run can't be loaded. Nothing has been changed yet."""

    def load_state_dict(self, state):
        """Take its own of the state of a run, which may have been saved without this part."""

    # -- the ledger

    def count_flops(self, net, args, kwargs):
        """Count what `rows` and `details` tell as shares, on shapes alone."""

    def rows(self, parameters, generation_dtype):
        """{site: {"why": text, "bytes": bytes a parameter or None, ...}} for the ledger."""
        return {}

    def details(self):
        """{name: object with str(), json() and share} printed below the ledger."""
        return {}

    def elsewhere(self):
        """(bytes of states that are in the memory of the CPU, those on the GPU at once within a step)."""
        return 0, 0

    def finish(self, run, loss):
        """{name: figure} for the summary of a finished run; loss(model) is the loss of one fixed batch."""
        return {}


class Method(Part):
    """A part that changes how layers of the net multiply: FP8, 2:4 sparsity, 8-bit generation. The net is
    called in its `context`.
    """

    on = False  # whether layers multiply by it now

    def switch(self, on):
        """Let the layers multiply by it, or as they came."""

    @contextmanager
    def plain(self, net):
        was_on = self.on
        self.switch(False)
        try:
            yield
        finally:
            self.switch(was_on)

    def ready(self, run):
        if any(isinstance(module, nn.TransformerEncoderLayer) for module in run.model.modules()):
            # in eval without gradients torch's fast path reads the weights, and calls no layer
            torch.backends.mha.set_fastpath_enabled(False)


class OneRank:
    """What a net that is not spread asks of its ranks: as parts.ranks.NetRanks, and nothing to do."""

    sum = staticmethod(lambda number: number)

    @staticmethod
    def norms_of(grads):
        """{parameter: 2-norm of its gradient, fp32, 0-dim}. grads: {parameter: tensor}."""
        return dict(zip(grads, torch._foreach_norm(list(grads.values()), dtype=torch.float32), strict=True))

    def lasting_parameters(self, net):
        """(name, parameter) of those that are the same in a step and between steps."""
        return net.named_parameters()

    def copy(self, run, values):
        return copied(run.model)

    def gathered(self, values):
        return values

    def wrapped(self, state, averages):
        return state

    def cut(self, state, run):
        return state


ONE_RANK = OneRank()
