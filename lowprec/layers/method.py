"""What a method is that changes how a model multiplies (FP8, 2:4 sparsity, 8-bit generation), and what a
layer is.

A `Method` is attached to a run. `precision.Precision` calls every attached method at the same places and
knows none of them by name. A new one is a class with the parts it needs and a place in precision.METHODS.
"""

import re
from contextlib import nullcontext

from torch import nn


class Method:
    """The places at which a run asks. Every default does nothing."""

    key = ""  # name of its state in a checkpoint; "": it has none beyond the model's own
    needs_sums = False  # whether bf16 gradients must be summed in fp32 for it
    generates = None  # the value of the site generation in which copies of the model keep it

    @classmethod
    def attach(cls, model, recipe, **options):
        """The method that `recipe` asks for, or None. The model is still as it came; raises machine.Refused.
        """

    def convert(self, model):
        """Change layers of the model, which now has the dtype of the recipe's weights."""

    def context(self):
        """What forward runs in."""
        return nullcontext()

    def observe(self, on):
        """Whether the next step is measured."""

    def on_grads(self, grads):
        """Change gradients {parameter: tensor} in place, once a step, with all micro-batches summed."""

    def after_step(self, low_part):
        """After the optimiser's step, before the averages. low_part: parameter -> what completes it. Returns
        telemetry.
        """
        return {}

    def plain(self, model):
        """A context in which the model multiplies without this method, and copies of it are made so."""
        return nullcontext()

    def freeze(self, net, generation):
        """Make `net`, a copy with its final weights, ready to generate as the site `generation` says."""

    def values(self, values):
        """{name: tensor}: weights as generation and export read them."""
        return values

    def adapt(self, own, saved):
        """`saved`, a state_dict of the model, as one for the model whose state_dict is `own`."""
        return saved

    def state_dict(self):
        return {}

    def load_state_dict(self, state, low_part):
        """Take a saved state; None when the run that was saved did not have this method."""

    def count_flops(self, model, args, kwargs):
        """Count what `rows` and `details` tell as shares, on shapes alone."""

    def rows(self, parameters, generation_dtype):
        """{site: {"why": text, "bytes": bytes a parameter or None, ...}} for the ledger."""
        return {}

    def details(self):
        """{name: object with str(), json() and share} printed below the ledger."""
        return {}

    def finish(self, run, loss):
        """{name: figure} for the summary of a finished run; loss(model) is the loss of one fixed batch."""
        return {}


# ---- What a layer is ---------------------------------------------------------------------------------------

NORMS = (
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
# the head: a part called so anywhere in the name, or one of these at the top of the net
TOP = "out|fc|head|heads|classifier|score|proj_out|conv_out"
HEAD = re.compile(rf"(.*\.)?(final|lm_head)(\.|$)|({TOP})(\.|$)")
# a layer that reads one vector an image, not one a token: every value of its block depends on it
CONDITION = re.compile(r".*(modulation|time_emb)")
EMBEDDING = re.compile(r".*(embed|\b(wte|wpe)(\.|$))")


def role(name, module):
    """What a layer is to its net, by type and qualified name: a set of norm, embedding, head and condition.

    The set is empty for the layers that do the work. A norm inside the head is both.
    """
    found = set()
    if isinstance(module, NORMS) or type(module).__name__.endswith("RMSNorm"):
        found.add("norm")
    if isinstance(module, nn.Embedding) or EMBEDDING.match(name):
        found.add("embedding")
    if HEAD.match(name):
        found.add("head")
    if CONDITION.match(name):
        found.add("condition")
    return found


def roles(net):
    """{qualified name: set of roles} of all modules. A net may declare its own: `roles = {"name.of.a.part":
    {"head"}}`.
    """
    declared = getattr(net, "roles", None)
    if not isinstance(declared, dict):  # a net may have something else of that name
        declared = {}

    def of(name, module):
        for part, its_roles in declared.items():
            if name == part or name.startswith(part + "."):
                return set(its_roles)
        return role(name, module)

    return {name: of(name, module) for name, module in net.named_modules()}
