"""Which role a layer has in its net: norm, embedding, head, condition."""

import copy
import re
import weakref

import torch
from torch import nn

NORM_CLASSES = (
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
CONVOLUTIONS = nn.modules.conv._ConvNd  # of one to three dimensions, and transposed ones

# the head: a part called so anywhere in the name, or one of these at the top of the net
HEADS_AT_THE_TOP = "out|fc|head|heads|classifier|score|proj_out|conv_out"
HEAD_NAME = re.compile(rf"(.*\.)?(final|lm_head)(\.|$)|({HEADS_AT_THE_TOP})(\.|$)")
# a layer that reads one vector an image, not one a token: every value of its block depends on it
CONDITION_NAME = re.compile(r".*(modulation|time_emb)")
EMBEDDING_NAME = re.compile(r".*(embed|\b(wte|wpe)(\.|$))")


def role(name, module):
    """What a layer is to its net, by type and qualified name: a set of norm, embedding, head and condition.

    The set is empty for the layers that do the work. A norm inside the head is both.
    """
    found = set()
    if isinstance(module, NORM_CLASSES) or type(module).__name__.endswith("RMSNorm") or normalises(module):
        found.add("norm")
    if isinstance(module, nn.Embedding) or EMBEDDING_NAME.match(name):
        found.add("embedding")
    if HEAD_NAME.match(name):
        found.add("head")
    if CONDITION_NAME.match(name):
        found.add("condition")
    return found


def normalises(module):
    """Whether a module of gains and offsets alone gives the same for 8 times its input, as norms do: nets
    bring norms of their own, under names of their own. Its forward is tried on the CPU, with gains of 1.
    """
    own = dict(module.named_parameters(recurse=False))
    if len(own) != sum(1 for _ in module.parameters()):
        return False
    widths = {p.numel() if p.dim() == 1 else 1 for p in own.values()}
    of_torch = type(module).__module__.startswith("torch.nn")
    if of_torch or len(own) not in (1, 2) or len(widths) > 1 or widths == {1} or list(module.buffers()):
        return False
    if module not in _FOUND_TO_NORMALISE:
        _FOUND_TO_NORMALISE[module] = _same_for_a_multiple(module, own, widths.pop())
    return _FOUND_TO_NORMALISE[module]


_FOUND_TO_NORMALISE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # module -> what was found


@torch.no_grad()
def _same_for_a_multiple(module, own, width):
    twin = copy.copy(module)  # beside the module: its forward alone is called, no hook
    twin.__dict__ = {**vars(module), "training": False, "_parameters": {}}
    for name in own:
        is_offset = "bias" in name or "beta" in name
        twin._parameters[name] = torch.full((width,), 0.0 if is_offset else 1.0, device="cpu")
    x = torch.sin(torch.arange(1.0, 2 * width + 1, device="cpu")).view(2, width)
    for shape in ((2, width), (2, width, 1, 1)):
        try:
            one, other = twin.forward(x.view(shape)), twin.forward(8 * x.view(shape))
        except Exception:  # it takes something else: it may be any net's
            continue
        if torch.is_tensor(one) and one.shape == shape and one.any():
            return bool(torch.allclose(one, other, rtol=1e-2, atol=1e-3))
    return False


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
