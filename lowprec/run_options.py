"""The arguments of a Precision, checked, and the parameter groups that it is given."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .errors import Refused, check_several
from .layers.method import Method
from .optimizers.groups import check_numbers
from .recipes import Recipe, recipe
from .rules import PARALLEL_WRAPPERS, RUN_RULES, RunFacts, is_compiled, refuse

if TYPE_CHECKING:
    from .view import View


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The arguments of a Precision after the recipe; its docstring says what they mean."""

    groups: list[dict] | None
    lr: float | None
    betas: tuple[float, float] | None
    eps: float | tuple[float, float] | None
    momentum: float | None
    nesterov: bool | None
    weight_decay: float
    optimizer: Any
    ema_decay: float | None
    ema_warmup: bool
    averages: Iterable[str]
    clip_grad: float
    clip_tensor: float
    accumulate: int
    grad_release: bool
    average_on: str
    states_on: Any
    init_loss_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    seed: int
    keep: Iterable[str]
    dtypes: Mapping[str, str] | None
    fp32_modules: Iterable[str]
    fp32_outputs: Iterable[str]
    blank: Callable[[], torch.nn.Module] | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RunOptions:
        """From the arguments of Precision by name, of which some are not its own."""
        own = {field.name: arguments[field.name] for field in dataclasses.fields(cls)}
        for name in ("averages", "fp32_modules", "fp32_outputs"):
            check_several(name, own[name])
            own[name] = tuple(own[name])  # which may be read more than once
        for name in ("clip_grad", "clip_tensor"):
            own[name] = own[name] or 0.0  # None is none
        if own["groups"] is not None:
            own["groups"] = [_listed(group) for group in own["groups"]]
        return cls(**own)

    def check(self, r, forward: Callable, spread: bool) -> None:
        """Raise Refused for what Recipe r can't be trained with. forward: what calls the net. spread: whether
        fully_shard has spread the net over ranks.
        """
        facts = RunFacts(
            r,
            spread=spread,
            compiled=is_compiled(forward),
            accumulate=self.accumulate,
            clip_grad=self.clip_grad,
            clip_tensor=self.clip_tensor,
            grad_release=self.grad_release,
            average_on=self.average_on,
            states_on=self.states_on,
        )
        refuse(RUN_RULES, facts)

    def check_optimizer(self, net: torch.nn.Module, adapted: bool) -> None:
        """Raise Refused for options and groups that no optimiser takes, while the net is still as it came.
        adapted: whether adapters are what will be trained.
        """
        check_numbers({name: value for name, value in self.of_optimizer.items() if value is not None})
        if self.groups is not None and not adapted:
            trained_groups(self.groups, [(name, p) for name, p in net.named_parameters() if p.requires_grad])

    @property
    def optimizers(self) -> list:
        """Names or classes of all optimisers that are asked for."""
        found = [self.optimizer]
        for group in self.groups or ():
            if "optimizer" in group:
                found.append(group["optimizer"])
        return found

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """What build.build takes by name."""
        return dict(
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )

    @property
    def of_scaler(self) -> dict[str, float]:
        """What torch.amp.GradScaler takes by name."""
        return dict(
            init_scale=self.init_loss_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )


def checked_recipe(r: Any) -> Recipe:
    """The second argument of Precision, of which None is fp32. Raises Refused for what is no Recipe."""
    if r is None:
        return Recipe()
    if not hasattr(r, "keeping"):
        raise Refused(
            f"the second argument of Precision is a recipe, and this is a {type(r).__name__}: write "
            "Precision(model, recipe(pure_bf16=True))"
        )
    return r


def check_method_options(kinds: tuple[type[Method], ...], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that no class of methods takes, as Python does for other arguments;
    Refused for one of recipe().
    """
    known: set[str] = set()
    for kind in kinds:
        known.update(inspect.signature(kind.attach).parameters)
    unknown = set(options) - known
    if unknown:
        name = min(unknown)
        if name in inspect.signature(recipe).parameters:
            given = f"{name}={options[name]!r}"
            raise Refused(f"{name}= belongs to the recipe: Precision(model, recipe({given}))")
        raise TypeError(f"Precision() got an unexpected keyword argument '{name}'")


# ---- Parameter groups --------------------------------------------------------------------------------------


def parameters_in(params: Any) -> list[torch.Tensor]:
    """The parameters of a group as torch takes them: one, an iterable, or an iterable of (name, parameter).
    Raises Refused for a set.
    """
    if torch.is_tensor(params):
        return [params]
    if isinstance(params, set | frozenset):
        raise Refused("groups: a set has no order that a resume could rely on; give a list of parameters")
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _listed(group):
    if not isinstance(group, Mapping) or "params" not in group:
        raise Refused('groups: a list of dicts is asked for, each with its "params"')
    return {**group, "params": parameters_in(group["params"])}


def trained_groups(groups: list[dict], named_params: list[tuple[str, torch.nn.Parameter]]) -> list[dict]:
    """The groups with the parameters that are trained alone. named_params: [(name, parameter)] of these.
    Raises Refused where one of them is in no group or in several, and for one that is not among them.
    """
    times: collections.Counter = collections.Counter()
    for group in groups:
        times.update(group["params"])
    for name, p in named_params:
        if times[p] > 1:
            raise Refused(f"groups: parameter {name} is in more than one of them; leave it in one")
    for name, p in named_params:
        if p not in times:
            raise Refused(f"groups: parameter {name} is in none of them; add it, or set requires_grad=False")
    trained = {p for _, p in named_params}
    if any(p.requires_grad and p not in trained for p in times):
        raise Refused(
            "groups: a parameter of them is none of the model's, and would never be trained; put it into a "
            "module with the net, and make Precision of that"
        )
    found = []
    for group in groups:
        own = [p for p in group["params"] if p in trained]
        found.append({**group, "params": own})
    return found


# ---- Wrappers ----------------------------------------------------------------------------------------------


def check_calls_the_model(wrapper: Callable, view: View) -> None:
    """Raise Refused for a wrapper of run.module, which would call itself."""
    modules = wrapper.modules() if isinstance(wrapper, torch.nn.Module) else ()
    if any(module.__dict__.get("_view") is view for module in modules):
        raise Refused(
            "run.module calls run.forward: give run.forward a wrapper of run.model, or leave it and wrap "
            "run.module where the loss is formed"
        )


def check_averages_gradients(wrapper: Callable) -> None:
    """Raise Refused for a DistributedDataParallel that was made of fp32 weights which are bf16 now: its hooks
    are on what gathered fp32 gradients, and a change of dtype makes that anew.
    """
    if not isinstance(wrapper, PARALLEL_WRAPPERS[0]):
        return
    if "BFloat16" not in wrapper._get_ddp_logging_data().get("dtypes", "BFloat16"):
        raise Refused(
            "this DistributedDataParallel was made of fp32 weights, and averages no gradient now: make it of "
            "run.model after Precision"
        )
