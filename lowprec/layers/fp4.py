"""FP4 training: the matrix products of nn.Linear layers in 4-bit floats. docs/formats.md explains the words.

    run = Precision(model, recipe(fp4="nvfp4", fp4_keep="last:2"), fp4_until=8500)

What the papers switch has an option each: a random Hadamard rotation of what the weight's gradient sums over,
stochastic gradients, square blocks of weights (arXiv 2509.25149), MS-EDEN (arXiv 2601.22813), the last blocks
in bf16, and bf16 for the last steps.
"""

import dataclasses
import functools
from typing import ClassVar

from ..errors import Refused, check_choice
from ..machine import try_import
from ..parts.activations import recomputed_blocks
from ..rounding import Noise, noise_key
from .block_formats import BLOCK_FORMATS, TwoLevels, asked_by
from .block_product import Plan
from .fp8 import FP8

FP4_CHOICES = {
    "fp4_hadamard": (0, *(2**power for power in range(1, 11))),
    "fp4_grads": ("stochastic", "nearest", "eden"),
    "fp4_weights": ("2d", "1d"),
    "fp4_backend": ("emulate", "torchao"),
}


@dataclasses.dataclass(frozen=True)
class FP4Options:
    """How products are taken in FP4.

    recipe: one of BLOCK_FORMATS. hadamard: size of the random rotation, 0 for
    none. grads: how gradients are rounded: stochastic, nearest or eden. weights: 2d for square blocks, which
    forward and backward share, or 1d. keep: 'last:K' leaves the last K blocks of the net in bf16. backend:
    who multiplies, see `resolve`.

    Raises Refused for unknown values and for MS-EDEN without a rotation or without scales of two levels.
    """

    recipe: str = "nvfp4"
    hadamard: int = 16
    grads: str = "stochastic"
    weights: str = "2d"
    keep: str = "none"
    backend: str = "emulate"

    asked_by: ClassVar = "fp4 nvfp4"  # as of fp8_backends.Options
    flags: ClassVar = {f"fp4_{name}": name for name in ("hadamard", "grads", "weights", "keep", "backend")}

    @classmethod
    def of(cls, asked, **own):
        """As of fp8_backends.Options. asked: the format, or "none" for the default."""
        return cls(**own) if asked == "none" else cls(asked, **own)

    def __post_init__(self):
        check_choice("fp4", self.recipe, asked_by("fp4"))
        for flag, choices in FP4_CHOICES.items():
            check_choice(flag, getattr(self, self.flags[flag]), choices)
        kind, _, count = self.keep.partition(":")
        if self.keep != "none" and not (kind == "last" and count.isdigit() and int(count)):
            raise Refused(f"--fp4_keep {self.keep}: write last:K, as in last:2, or none")
        if self.grads == "eden":
            has_scales = isinstance(BLOCK_FORMATS[self.recipe].scale, TwoLevels)
            if not has_scales or self.hadamard < self.plan.weight.length:
                raise Refused(
                    "--fp4_grads eden needs the scales of --fp4 nvfp4 and a rotation of "
                    f"{self.plan.weight.length} values or more, as --fp4_hadamard 128; or use "
                    "--fp4_grads stochastic"
                )

    @property
    def kept(self):
        """How many of the last blocks stay in bf16."""
        return 0 if self.keep == "none" else int(self.keep.partition(":")[2])

    @property
    def plan(self):
        """The Plan of the products."""
        return _plan_of_products(self.recipe, self.hadamard, self.grads, self.weights)

    @property
    def multiple(self):
        """What inputs and outputs of a layer are multiples of."""
        return 128 if self.backend == "torchao" else self.plan.multiple

    @property
    def words(self):
        """What the ledger says of it."""
        rotation = f"Hadamard {self.hadamard}" if self.hadamard else "no rotation"
        kept = f", {self.keep} in bf16" if self.kept else ""
        return f"{self.recipe}, {rotation}, {self.grads} gradients, {self.weights} weight blocks{kept}"

    def resolve(self, device):
        """The same, if its backend runs on the device. emulate runs anywhere. torchao: its kernels, on GPUs
        with FP4 and with the default of each option. Nobody has run them from here yet, so nothing but an
        explicit choice takes them. Raises Refused where they can't run.
        """
        refusal = self._refusal(device)
        if refusal:
            raise Refused(f"--fp4_backend torchao: {refusal}; use --fp4_backend emulate")
        return self

    def _refusal(self, device):
        """Why the backend can't run on the device, or None."""
        if self.backend == "emulate" or device.type == "meta":
            return None
        if self != FP4Options(keep=self.keep, backend="torchao"):
            return "its kernels know nvfp4 with the default of each --fp4 switch alone"
        library, error = try_import("torchao.prototype.moe_training.nvfp4_training")
        if library is None:
            return f"torchao's kernels of nvfp4 can't be imported ({error})"
        if not BLOCK_FORMATS[self.recipe].native(device):
            return "torchao's kernels of nvfp4 need an NVIDIA GPU of compute capability 10.0 or later"
        return None


@functools.cache
def _plan_of_products(recipe, hadamard, gradients, weights):
    form = BLOCK_FORMATS[recipe]
    return Plan(form, form.square() if weights == "2d" else form, form, hadamard, gradients)


class FP4(FP8):
    """FP4 products of a model that trains. seed: of the noise. until: the step from which on the layers
    compute in bf16, None for never.
    """

    format = "FP4"
    generates = None

    def __init__(self, model, options, seed=0, until=None, generation=""):
        self.inside = []  # how the names of layers in the kept blocks begin
        if options.kept:
            self.inside = _names_of_last_blocks(model, options)
        self.seed = seed
        self.until = until
        self.steps = 0
        super().__init__(model, options, f"--fp4 {options.recipe}", generation=generation)

    @classmethod
    def of(cls, run):
        r, options = run.recipe, run.options
        return cls(run.model, r.fp4, options.seed, options.fp4_until, r.generation)

    def _place(self, name, module, its_roles):
        super()._place(name, module, its_roles)
        if name.startswith(tuple(self.inside)) and (name in self.linears or name in self.bare):
            for placed in (self.linears, self.functional, self.stacks):
                placed.pop(name, None)
            self.left_out[name] = f"--fp4_keep {self.options.keep}"

    def convert(self, model, alone=False):
        super().convert(model, alone)
        self._next_step()

    @property
    def has_ended(self):
        """Whether the layers compute in bf16 by now."""
        return self.until is not None and self.steps >= self.until

    def observe(self, on):
        super().observe(on and not self.has_ended)

    def _next_step(self):
        """Bring the noise, and from `until` on bf16, to the step that comes."""
        if self.has_ended:
            self.switch(False)
            return
        for place, scaling in enumerate(self.scalings):
            if scaling.options is not None:  # on the meta device no layer is switched
                key = noise_key(self.seed, self.steps, place << 32, Noise.PRODUCT, scaling.key.device)
                scaling.key.copy_(key)

    def after_step(self):
        report = self.step()
        self.steps += 1
        self._next_step()
        return report

    def state_dict(self):
        return {"fp4": {"steps": self.steps}}

    def load_state_dict(self, state):
        if "fp4" not in state:
            return
        had_ended = self.has_ended
        self.steps = state["fp4"]["steps"]
        if had_ended and not self.has_ended:
            self.switch(True)
        self._next_step()

    def summary(self):
        end = "" if self.until is None else f", bf16 from step {self.until} on"
        return super().summary() + end


def _names_of_last_blocks(model, options):
    parts = recomputed_blocks(model)
    if options.kept >= len(parts):
        raise Refused(
            f"--fp4_keep {options.keep}: this net has {len(parts)} blocks (an nn.ModuleList, or what a "
            "method `recomputed` lists), and that leaves none in FP4; keep fewer, or use --fp4_keep none"
        )
    last = {id(block) for block in parts[-options.kept :]}
    return [f"{name}." for name, module in model.named_modules() if id(module) in last]
