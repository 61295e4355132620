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
from ..sites import LOW_PRODUCTS

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


class Lora(Method):
    """Adapters of this rank on all linear layers and convolutions of `model` but embeddings, the head and
    layers that share their weight, in place; all its own parameters are frozen. Raises Refused where no layer
    is wider than the rank.
    """

    def __init__(self, model, rank):
        self.rank = rank
        self.layers = []  # names of the modules that are Adapted
        role_of = roles(model)
        stay = {module for name, module in model.named_modules() if role_of[name] & ROLES_LEFT_OUT}
        stay |= _with_shared_weights(model)
        named = model.named_modules(remove_duplicate=False)  # a layer may have several names
        found = [(name, module) for name, module in named if name and takes_adapter(module, rank)]
        model.requires_grad_(False)
        adapted = {}
        for name, module in found:
            if module in stay:
                continue
            if module not in adapted:
                adapted[module] = Adapted(module, rank)
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, adapted[module])
            self.layers.append(name)
        if not self.layers:
            raise Refused(f"lora={rank}: this net has no linear layer or convolution wider than {rank}")

    @classmethod
    def of(cls, run):
        rank, r = run.options.lora, run.recipe
        if rank is True or not isinstance(rank, int) or rank < 1:
            raise Refused(f"lora={rank!r}: the rank is a whole number, 1 or more")
        if any(isinstance(module, Adapted) for module in run.model.modules()):
            raise Refused("lora: this net has adapters already; build it anew")
        if r.compute in LOW_PRODUCTS or r.sparse24 != "none" or r.quantises:
            instead = "drop --fp8, --fp4, --sparse24 or the site generation"
            raise Refused(f"lora={rank} goes with layers in fp32 or bf16: {instead}")
        if run.spread:
            raise Refused(f"lora={rank}: adapters are not spread over ranks yet; drop --fsdp")
        return cls(run.model, rank)

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
