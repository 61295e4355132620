"""Which role a layer has in its net: norm, embedding, head, condition."""

import re

from torch import nn

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

    found = {}
    for name, module in net.named_modules():
        found[name] = role(name, module)
        for part, roles_of_part in declared.items():
            if name == part or name.startswith(f"{part}."):
                found[name] = set(roles_of_part)
                break
    return found
