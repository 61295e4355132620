"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen layers of a net that is finetuned.

    run = Precision(net, recipe(pure_bf16=True, stochastic=True, sites=["frozen=bf16"]), lora=8)
    run.weights()      # the net's own state_dict, the adapters merged into it

The adapters follow the recipe as all trained weights do: their dtype is that of the site weights. The site
frozen says what the layers beside them are held in.
"""

import collections

import torch.nn.functional as F
from torch import nn

from ..errors import Refused
from ..parts.part import Method
from ..roles import roles
from ..rules import Rule
from ..sites import LOW_PRODUCTS
from .swap import swapped

# a subclass has a forward that is not ours to know
ADAPTED_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
ROLES_LEFT_OUT = {"embedding", "head"}


class Adapted(nn.Module):
    """base(x) + lora_up(lora_down(x)): a frozen layer and an adapter, which begins as 0.

    base: nn.Linear or a convolution of one group. rank: channels between the two factors.
    """

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        if isinstance(base, nn.Linear):
            down = nn.Linear(base.in_features, rank, bias=False)
            up = nn.Linear(rank, base.out_features, bias=False)
        else:
            kind = type(base)
            window = dict(stride=base.stride, padding=base.padding, dilation=base.dilation)
            window["padding_mode"] = base.padding_mode
            down = kind(base.in_channels, rank, base.kernel_size, bias=False, **window)
            up = kind(rank, base.out_channels, 1, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_down = down.to(base.weight.device)
        self.lora_up = up.to(base.weight.device)

    @property
    def weight(self):
        """The base's, which code of a net may ask for its dtype, as T5's does."""
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        """x as the base takes it -> what the base gives, in its dtype."""
        if type(self.base) is nn.Linear and self.base.weight.itemsize == 1:  # float8, which has no product
            bias = None if self.base.bias is None else self.base.bias.to(x.dtype)
            y = F.linear(x, self.base.weight.to(x.dtype), bias)
        else:
            y = self.base(x)
        return y + self.lora_up(self.lora_down(x)).to(y.dtype)


LORA_RULES = (
    Rule(
        lambda run: type(run.options.lora) is not int or run.options.lora < 1,
        lambda run: f"lora={run.options.lora!r}: the rank is a whole number, 1 or more",
    ),
    Rule(
        lambda run: (
            run.recipe.compute in LOW_PRODUCTS or run.recipe.sparse24 != "none" or run.recipe.quantises
        ),
        "lora goes with layers in fp32 or bf16: drop --fp8, --fp4, --sparse24 or the site generation",
    ),
    Rule(lambda run: run.spread, "lora: adapters are not spread over ranks yet; drop --fsdp"),
)


class Lora(Method):
    """Adapters of this rank on all linear layers and convolutions of `model` but embeddings, the head and
    layers that share their weight, in place; all its own parameters are frozen. Raises Refused where no layer
    is wider than the rank.
    """

    rules = LORA_RULES

    def __init__(self, model, rank):
        self.rank = rank
        role_of = roles(model)
        stay = {module for name, module in model.named_modules() if role_of[name] & ROLES_LEFT_OUT}
        stay |= _with_shared_weights(model)
        model.requires_grad_(False)
        adapted = {}
        for name, module in model.named_modules():
            if name and module not in stay and takes_adapter(module, rank):
                adapted[module] = Adapted(module, rank)
        swapped(model, adapted)
        named = model.named_modules(remove_duplicate=False)  # a layer may have several names
        self.layers = [name for name, module in named if isinstance(module, Adapted)]
        if not self.layers:
            raise Refused(f"lora={rank}: this net has no linear layer or convolution wider than {rank}")

    @classmethod
    def of(cls, run):
        if any(isinstance(module, Adapted) for module in run.model.modules()):
            raise Refused("lora: this net has adapters already; build it anew")
        return cls(run.model, run.options.lora)

    def as_it_came(self, values):
        for name in self.layers:
            values = merged_adapter(values, name)
        return values

    def rows(self, parameters, generation_dtype):
        why = f"adapters of rank {self.rank} beside {len(self.layers)} frozen layers"
        return {"weights": {"why": why}}


def takes_adapter(module, rank):
    """Whether a layer gets an adapter of this rank."""
    if type(module) not in ADAPTED_CLASSES or "weight" not in module._parameters:
        return False  # a weight that is computed from others, as weight_norm's, can't be merged
    one_group = getattr(module, "groups", 1) == 1
    outputs, inputs = module.weight.shape[:2]
    return one_group and min(outputs, inputs) > rank


def _with_shared_weights(model):
    """The modules whose weight another module has too, as a decoder that is tied to an embedding. An adapter
    of one of them can't be merged into the weight of both.
    """
    owners = collections.defaultdict(list)  # {weight: modules}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners[weight].append(module)
    return {module for modules in owners.values() if len(modules) > 1 for module in modules}


def merged_adapter(values, name):
    """{name: tensor} with the layer `name` as it was before, its adapter added to its weight in fp32."""
    found = dict(values)
    up = found.pop(f"{name}.lora_up.weight").float()  # [out, rank, 1 ...]
    down = found.pop(f"{name}.lora_down.weight").float()  # [rank, in ...]
    weight = found.pop(f"{name}.base.weight").float()  # [out, in ...]
    found[f"{name}.weight"] = weight + (up.flatten(1) @ down.flatten(1)).view_as(weight)
    if f"{name}.base.bias" in found:
        found[f"{name}.bias"] = found.pop(f"{name}.base.bias")
    return found
