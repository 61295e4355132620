"""Which layers of a net are multiplied in 8 or 4 bits, and their share of its products."""

import re

from torch import nn

from ..errors import Refused
from ..parts.part import Method
from ..roles import CONVOLUTIONS, roles
from . import fp8_product
from .flops import module_flops
from .fp8_product import Scaling
from .stacks import stacks_of

# ---- What a layer is ---------------------------------------------------------------------------------------

# how the reasons begin for which weights that belong to no linear layer are left out
NO_LINEAR_LAYER = ("convolution", "several matrices")
# how the attributes of a module begin that hold its hooks
PREFIXES_OF_HOOKS = ("_forward_", "_backward_", "_is_full_backward_")


def layer_refusal(name, module, its_roles, multiple):
    """Why an nn.Linear or convolution stays out of 8 bits, or None. its_roles: see roles.roles. multiple: of
    inputs and outputs.
    """
    if isinstance(module, CONVOLUTIONS):
        return f"{NO_LINEAR_LAYER[0]}: stays as it is"
    if "embedding" in its_roles:
        return "embedding"
    if "head" in its_roles:
        return "last layer"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is more than an nn.Linear"
    if "weight" not in module._parameters:
        return "its weight is computed from others"
    if not name:
        return "the model is this one layer: wrap it in a module"
    return fp8_product.shape_refusal(module.in_features, module.out_features, multiple)


def _note_shape(scaling):
    """A hook that tells `scaling` whether its product can be in FP8, when a copy of it is called."""

    def note(module, args):
        scaling.decide(*args[1].shape[-2:])

    return note


class Coverage(Method):
    """Which layers of a model are multiplied in 8 bits; print it.

    linears {name: nn.Linear}: those that are. functional {name: Scaling}: products of bare parameters. stacks
    {name: Scaling}: those of modules that hold several matrices in one parameter, see stacks.py. left_out
    {name: reason}. layers {name: (inputs, outputs, how it is multiplied)}. flops: None before `count_flops`,
    then {name: FLOPs}, under "all" those of all products and convolutions. backward: whether the FLOPs are
    those of a step, or of a forward. flag, instead: words of a refusal. Raises Refused when no layer is
    eligible.
    """

    format = "FP8"
    functional_by = ""  # who multiplies by bare parameters
    takes_parameters = True  # whether these are covered
    takes_stacks = False  # whether stacks of matrices are
    backward = True
    multiple = fp8_product.DIMENSION_MULTIPLE  # of the inputs and outputs of a layer

    def __init__(self, model, how, scaling, flag, instead):
        self.device = next(model.parameters()).device
        self.scaling = scaling
        self.flops = None
        self.linears = {}
        self.functional = {}
        self.stacks = {}
        self.left_out = {}
        role_of = roles(model)
        for name, module in model.named_modules():
            self._place(name, module, role_of[name])
        if not self.linears and not self.bare:
            self._refuse(flag, instead)
        self.layers = {name: (m.in_features, m.out_features, how) for name, m in self.linears.items()}

    def _place(self, name, module, its_roles):
        """Put a module where it belongs: among linears, functional or left_out, or nowhere."""
        if isinstance(module, Scaling):
            if self.takes_parameters:
                self.functional[name] = module
                module.multiple = self.multiple
            else:
                self.left_out[name] = f"bare parameters: {self.format} takes nn.Linear alone"
        elif isinstance(module, nn.Linear | CONVOLUTIONS):
            why = layer_refusal(name, module, its_roles, self.multiple)
            if why:
                self.left_out[name] = why
            else:
                self.linears[name] = module
        elif stacks := stacks_of(module):
            self._place_stacks(name, module, stacks)

    def _place_stacks(self, name, module, stacks):
        refusals = [fp8_product.shape_refusal(*p.shape[1:], self.multiple) for p in stacks.values()]
        has_own = any(isinstance(part, Scaling) for part in module.modules())
        if self.takes_stacks and name and not any(refusals) and not has_own:
            self.stacks[name] = Scaling()
            return
        for own_name, why in zip(stacks, refusals, strict=True):
            said = f": {why}" if why and self.takes_stacks else ""
            full_name = f"{name}.{own_name}".removeprefix(".")
            self.left_out[full_name] = f"{NO_LINEAR_LAYER[1]} in one parameter{said}"

    @property
    def bare(self):
        """{name: Scaling} of all products that are no nn.Linear's."""
        return {**self.functional, **self.stacks}

    def _refuse(self, flag, instead):
        reason = "it has no nn.Linear, and convolutions stay as they are"
        for name, why in self.left_out.items():
            if not why.startswith(NO_LINEAR_LAYER):
                reason = f"'{name}' is left out ({why})"
                break
        what = f"no layer of this net can be multiplied in {self.format}"
        raise Refused(f"{flag}: {what}, {reason}; use {instead}")

    def count_flops(self, model, args, kwargs=None):
        """Fill in `flops` from one pass over shapes, once. args, kwargs: of the model, in the dtypes it
        takes.

        `flops` stays None for a net that can't run on the meta device.
        """
        if self.flops is not None:
            return
        hooks = [s.register_forward_pre_hook(_note_shape(s)) for s in self.functional.values()]
        try:
            with self.plain(model):
                by_module, by_kind = module_flops(model, args, kwargs, self.backward)
        except Exception:  # a net that looks at values can't run on shapes: no share is told
            return
        finally:
            for hook in hooks:
                hook.remove()
        self.flops = {name: by_module.get(name, 0) for name in (*self.layers, *self.bare)}
        for name in self.stacks:  # without the modules inside
            inside = [f"{name}.{part}" for part, _ in model.get_submodule(name).named_children()]
            self.flops[name] -= sum(by_module.get(part, 0) for part in inside)
        self.flops["all"] = sum(by_kind.values())

    @property
    def share(self):
        """Share of the FLOPs of products and convolutions in 8 bits, or None before `count_flops`."""
        if self.flops is None:
            return None
        covered = list(self.layers)
        covered += [name for name, scaling in self.bare.items() if not scaling.left_out]
        return self._share_of(covered)

    def _share_of(self, names):
        return sum(self.flops[name] for name in names) / max(1, self.flops["all"])

    def summary(self):
        """One line: scaling, backend, how much is covered."""
        covered = len(self.layers) + len(self.bare)
        left_out = [why for why in self.left_out.values() if not why.startswith(NO_LINEAR_LAYER)]
        linears = covered + len(left_out)
        backends = {how for *_, how in self.layers.values()}
        backends.update(self._how_of(name) for name in self.bare)
        by = " and ".join(sorted(backends))
        share = "" if self.share is None else f", {self.share:.1%} of the FLOPs of products and convolutions"
        return f"{self.scaling}, by {by}: {covered} of {linears} linear layers{share}"

    def _settings(self):
        return {"format": self.format, "scaling": self.scaling}

    def json(self):
        """Plain values: the settings, {name, inputs, outputs, matmul, flops} of each layer, and the rest."""
        layers = []
        for name, (inputs, outputs, how) in self.layers.items():
            layers.append({"name": name, "inputs": inputs, "outputs": outputs, "matmul": how})
        for name, scaling in self.bare.items():
            layer = {"name": name, "matmul": self._how_of(name)}
            if scaling.left_out:
                layer["left_out"] = scaling.left_out
            layers.append(layer)
        total = None
        if self.flops is not None:
            total = self.flops["all"]
            for layer in layers:
                layer["flops"] = self.flops[layer["name"]]
        return {
            **self._settings(),
            "layers": layers,
            "left_out": self.left_out,
            "flops_share": self.share,
            "flops": total,
        }

    def __str__(self):
        lines = [f"{self.format}: {self.summary()}"]
        lines += self._lines_of_layers()
        lines += self._lines_left_out()
        return "\n".join(lines)

    def _how_of(self, name):
        """How a product that is no nn.Linear's is taken."""
        return "emulate" if name in self.stacks else self.functional_by

    def _lines_of_layers(self):
        """A line for each group of layers that differ in a number of their name alone."""
        said = {name: f"{inputs} to {outputs}, {how}" for name, (inputs, outputs, how) in self.layers.items()}
        for name, scaling in self.bare.items():
            said[name] = f"left out, {scaling.left_out}" if scaling.left_out else self._how_of(name)
        names_of = {}
        for name, text in said.items():
            names_of.setdefault((re.sub(r"\d+", "*", name), text), []).append(name)
        lines = []
        for (pattern, text), names in names_of.items():
            title = names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
            share = "" if self.flops is None else f", {self._share_of(names):.1%}"
            lines.append(f"  {title}: {text}{share}")
        return lines

    def _lines_left_out(self):
        """A line for each reason."""
        names_of = {}
        for name, why in self.left_out.items():
            names_of.setdefault(why, []).append(name)
        lines = []
        for why, names in names_of.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(f"  not in {self.format}: {', '.join(names[:4])}{more} ({why})")
        return lines
