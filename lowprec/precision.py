"""A training run in a recipe, of any model, in any loop.

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.999)  # makes AdamW
    for x, y in loader:
        loss = F.mse_loss(run(x), y)         # run(...) is the model, called with any arguments
        run.backward(loss)                   # loss scaling, accumulation
        run.step()                           # AdamW, rounding, average
    net = run.generator()                    # called like the model, with the averaged weights
    print(run.ledger())                      # site, value, bytes, why

One option of torch is set for the whole process: where FP8 or 2:4 sparsity meets an
nn.TransformerEncoderLayer, its fast path, which would pass by them, is turned off.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .cast import CAST_SINCE, Cast, without_borders
from .errors import Refused, check_choice, check_several
from .kernels import cpu_products
from .machine import settle_vector_math
from .optimizers import build
from .optimizers.average import EMA
from .optimizers.buckets import local_tensor
from .optimizers.groups import SPARSE_GRADIENT, check_numbers
from .optimizers.state import described
from .parts import FINISH, MICRO_BATCHES, PARTS
from .parts.part import ONE_RANK, Method, Part
from .recipes import SITES, Recipe, Site, parse_average, recipe
from .roles import CONVOLUTIONS
from .rounding import exact_weight
from .rules import NET_RULES, SETTING_RULES, refuse
from .view import CastModule, View

if TYPE_CHECKING:
    from .ledger import Ledger

__all__ = ["SITES", "Options", "Precision", "Recipe", "Refused", "Site", "View", "recipe"]

# {parameter: its gradient, or a number of it}
ByParameter = dict[nn.Parameter, torch.Tensor]

# ---- What a run is asked for -------------------------------------------------------------------------------


@dataclasses.dataclass
class Options:
    """The arguments of a Precision after model and recipe."""

    groups: Any = None  # dicts of "params", with an lr, weight_decay or optimizer of their own; None: one
    optimizer: Any = "adamw"  # see build.build
    lr: float | None = None  # this and the next four: None for the optimiser's own
    betas: tuple[float, float] | None = None
    eps: float | tuple[float, float] | None = None  # a pair for Adafactor
    momentum: float | None = None
    nesterov: bool | None = None
    weight_decay: float = 0.0
    accumulate: int = 1  # micro-batches a step
    clip_grad: float = 0.0  # largest norm of the gradient, 0 for none
    clip_tensor: float = 0.0  # the same of each tensor by itself
    grad_release: bool = False  # update within backward, see parts/release.py
    states_on: Any = "device"  # where moments are kept: 'device' or 'cpu', see parts/offload.py
    seed: int = 0  # of the rounding noise
    ema_decay: float | None = 0.999  # of the average 'ema', whose dtype and rounding are sites; None for none
    ema_warmup: bool = False  # let it start low, see average.EMA
    averages: Iterable[str] = ()  # further ones, as 'DECAY:DTYPE[:UPDATE]'
    average_on: str = "device"  # where they are kept: 'device' or 'cpu', see parts/average_on_cpu.py
    init_loss_scale: float = 2.0**16  # this and the next three: as of torch.amp.GradScaler
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    keep: Iterable[str] = ("t", "timestep", "timesteps")  # arguments of forward whose dtype is left alone
    dtypes: Mapping[str, str] | None = None  # {name or pattern: 'fp32', 'bf16'} of buffers and frozen weights
    fp32_modules: Iterable[str] = ()  # names or patterns of modules that compute in fp32 with fp32 weights
    fp32_outputs: Iterable[str] = ()  # of modules whose outputs are fp32, as logits of a loss within the net
    blank: Callable[[], nn.Module] | None = None  # builds the net anew, for copies of one that is spread
    lora: int = 0  # the rank of adapters beside frozen layers, see layers/lora.py
    sparse24_decay: float | None = None  # lambda of SR-STE, None for the paper's
    fp4_until: int | None = None  # the step from which on layers in FP4 compute in bf16
    calibrate: Callable | None = None  # () -> calls the net on data, for generation_rounding=gptq

    def __post_init__(self):
        for name in ("averages", "fp32_modules", "fp32_outputs"):
            check_several(name, getattr(self, name))
            setattr(self, name, tuple(getattr(self, name)))  # which may be read more than once
        check_choice("average_on", self.average_on, ("device", "cpu"))
        self.clip_grad = self.clip_grad or 0.0  # None is none
        self.clip_tensor = self.clip_tensor or 0.0
        if self.groups is not None:
            self.groups = list(map(build.listed_group, self.groups))
        names = ("lr", "betas", "eps", "momentum", "nesterov", "weight_decay", "seed")
        # what build.build takes by name
        self.of_optimizer = {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def shows_options(init: Callable) -> Callable:
    """`init` with its options by name in its signature, for help() and editors."""
    signature = inspect.signature(init)
    own = list(signature.parameters.values())[:-1]
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(Options).parameters.values()]
    init.__signature__ = signature.replace(parameters=own + named)  # type: ignore[attr-defined]
    return init


def wanted_parts(run: Any) -> list[type[Part]]:
    """The classes of the parts that a run has. Raises Refused for what can't be trained. run: a Precision, or
    recipe, options, spread, compiled and processes of one that is asked for.
    """
    kinds = [place.load() for place in PARTS if place.wanted(run)]
    for rules in (SETTING_RULES, *[kind.rules for kind in kinds]):
        refuse(rules, run)
    return kinds


FREEZE_LATER = (
    "make Precision of the whole model, spread (fully_shard) if it is to be, while all that is ever trained "
    "has requires_grad=True, and freeze it then"
)

# {value of the site generation that casts the copy anew: what that computes in}
GENERATION_BY_CAST = {"fp32": "fp32", "bf16": "bf16", "autocast": "bf16", "fp16": "fp16"}

# ---- A run -------------------------------------------------------------------------------------------------


class Precision:
    """A recipe carried out: makes the parts that the recipe asks for, casts `model` in place, makes optimiser
    and averages, in this order.

    Call it like the model; backward(loss) after each micro-batch; step() after the last. torch's schedulers
    work on `run.optimizer`. Raises Refused as `recipe` and `build.build` do, and by the tables of rules.py;
    TypeError for an unknown argument.

    model: any nn.Module, on its device, compiled or not. It may take any arguments and return any tree of
    tensors. r: its Recipe; None: fp32 everywhere. options: see Options.
    """

    STEPS_BETWEEN_WALKS = 64  # through all modules for parameters that came late, too slow for each step
    processes = 1

    @shows_options
    def __init__(self, model: nn.Module, r: Recipe | None = None, **options: Any):
        unknown = options.keys() - Options.__dataclass_fields__.keys()
        if unknown:
            _refuse_name(min(unknown), options)
        self.options = Options(**options)
        settle_vector_math()
        self.model = net = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        if not isinstance(net, nn.Module):
            raise Refused(f"the first argument of Precision is a model, and this is a {type(net).__name__}")
        refuse(NET_RULES, net)
        self.device = next(net.parameters()).device
        self.compiled = net is not model
        convolves = any(isinstance(module, CONVOLUTIONS) for module in net.modules())
        self.convolves_on_cpu = convolves and self.device.type == "cpu" and not self.compiled
        self.spread = any(hasattr(p, "device_mesh") for p in net.parameters())  # by fully_shard, over ranks
        self.quantised_base = any(hasattr(p, "quant_state") for p in net.parameters())  # by bitsandbytes
        r = Recipe() if r is None else r
        if not hasattr(r, "keeping"):
            raise Refused(
                f"the second argument of Precision is a recipe, and this is a {type(r).__name__}: write "
                "Precision(model, recipe(pure_bf16=True))"
            )
        of_groups = [group["optimizer"] for group in self.options.groups or () if "optimizer" in group]
        self.recipe = r.keeping(self.options.optimizer, *of_groups)  # with the sites of its optimisers
        kinds = wanted_parts(self)
        # what no optimiser takes is refused while the net is still as it came
        check_numbers(self.options.of_optimizer)
        if self.options.groups is not None:
            trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
            build.trained_groups(self.options.groups, trained)

        self.ranks: Any = ONE_RANK
        # called before the weights are next written, in a step or within backward
        self.before_writing: list[Callable[[], None]] = []
        self.finished = ""  # the kind of its finish, once it has begun
        self.away = None  # the offload.Offload that keeps the moments elsewhere
        self.average_kind: type[EMA] = EMA
        self.parts: list[Part] = []
        for kind in kinds:
            self.parts.append(kind.of(self))
        # those that change how layers multiply
        self.methods: list[Method] = [part for part in self.parts if isinstance(part, Method)]

        originals = self._cast(model)
        self.named_params = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self.params = [p for _, p in self.named_params]
        for p in self.params:
            p.grad = None  # what an earlier backward left belongs to no step of this run
        self.optimizer = self.new_optimizer(self.recipe)
        self.low_part = self.optimizer.low_part
        for part in self.parts:
            part.ready(self)
        with torch.no_grad():
            for p, original in zip(self.params, originals, strict=False):
                self.optimizer.set_exact(p, original)  # of the fp32 weights, not of their bf16 image

        # the average 'ema', if any, and further ones
        how = dict(low_part=self.low_part, seed=self.options.seed)
        make: Callable[..., EMA] = functools.partial(self.average_kind, self.named_params, **how)
        self.ema, self.averages = None, {}
        if self.options.ema_decay is not None:
            held = self.recipe.ema, self.recipe.ema_update
            self.ema = make(self.options.ema_decay, *held, warmup=self.options.ema_warmup)
            self.averages["ema"] = self.ema
        for spec in self.options.averages:
            self.averages[spec] = make(*parse_average(spec))
        for average in self.averages.values():
            self.before_writing += average.before_writing

        self.backwards = 0  # passes since the last step
        self.reduce_sums: Callable | None = None  # of a distributed trainer: averages fp32 sums over ranks
        # what there is to train now: what comes later is refused at a step
        self._parameters = set(net.parameters())  # also those that are frozen
        self._frozen = [(name, p) for name, p in net.named_parameters() if not p.requires_grad]
        self._count_in_groups = sum(len(group["params"]) for group in self.optimizer.param_groups)
        self._gradients_last_step = None  # how many
        self._steps_until_walk = self.STEPS_BETWEEN_WALKS
        self.optimizer.register_step_pre_hook(_refuse_bare_step)

    # -- what is made, in this order

    def _cast(self, forward):
        """Bring the net to the recipe's dtypes. Returns its fp32 weights, of which an exact master is made,
        in the order of `params`; [] where there is none.
        """
        net, r = self.model, self.recipe
        originals = []
        if r.low_weights and r.way.name is not None:
            trained = [p for p in net.parameters() if p.requires_grad]
            originals = [local_tensor(p).float().clone() for p in trained]
        self.cast = Cast(net, r, self.options)
        for part in self.parts:
            part.convert(net)
        if r.narrow_products:
            cpu_products.settle_products(self.device)
        self.view_of_model = View(net, r, self.methods, self.options.keep)
        self.view_of_model.forward = forward
        self.view_of_model.tells = True
        self.view_of_model.moves_average = r.low_weights and bool(self.cast.averages)
        return originals

    def new_optimizer(self, recipe: Recipe) -> Any:
        """An optimiser of all parameters that are trained, as this recipe has it."""
        groups = self.params
        if self.options.groups is not None:
            groups = build.trained_groups(self.options.groups, self.named_params)
        return build.build(
            self.options.optimizer,
            groups,
            recipe,
            net=self.model,
            away=self.away,
            **self.options.of_optimizer,
        )

    @property
    def optimizer_name(self) -> str:
        """What the ledger calls the optimiser."""
        return build.title_of_optimizer(self.optimizer, self.options.optimizer)

    def part(self, kind: type) -> Any:
        """The part of this class, or None."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return None

    @property
    def forward(self) -> Callable:
        """What __call__ runs: the model, or a compiled or distributed wrapper of it."""
        return self.view_of_model.forward

    @forward.setter
    def forward(self, wrapper: Callable) -> None:
        for part in self.parts:
            part.check_forward(wrapper)
        self.view_of_model.check_forward(wrapper)
        self.view_of_model.forward = wrapper

    @property
    def module(self) -> CastModule:
        """An nn.Module that takes the net's place in a module that calls it: see view.py."""
        return self.view_of_model.module

    # -- one training step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model on any arguments. Floating outputs, a loss formed inside among them, come back in the
        loss's dtype.
        """
        return self.view_of_model(*args, **kwargs)

    def observe(self, on: bool) -> None:
        """Say before a step's first forward whether it will be measured. Parts then count what their casts
        lose.
        """
        for part in self.parts:
            part.observe(on)

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward of one micro-batch's mean loss, 0-dim. Gradients are averaged over `accumulate` calls, or,
        with weights (numbers of tokens, say), over all calls before a step: sum(weight * g) / sum(weight).
        Raises Refused within no_sync() of DistributedDataParallel where sums are kept in fp32, and for
        weights where several processes average their gradients.
        """
        if not (torch.is_tensor(loss) and loss.numel() == 1 and loss.requires_grad):
            what = "one number that depends on weights (requires_grad)"
            raise Refused(f"backward(loss) takes {what}, and this is {described(loss)}")
        if weight is not None:
            kind = MICRO_BATCHES.load()
            if self.part(kind) is None:  # each step has had one micro-batch until now
                self.parts.insert(0, kind(self))
            self.part(kind).weigh(weight)
        for part in self.parts:
            loss = part.loss(loss)
        with self.view_of_model.exact():
            loss.backward()
        for part in self.parts:
            part.after_backward()
        self.backwards += 1

    @torch.no_grad()
    def step(self, measure: bool = False) -> dict[str, float]:
        """Clip, update weights and averages, clear gradients. Returns {} or, with `measure`, what rounding
        did:

        see telemetry.StepReport; grad_norm; nonfinite_grads: entries; loss_scale and skipped_steps for fp16;
        and what the parts tell after observe(True). Raises Refused for gradients that are sparse or absent,
        for parameters that the optimiser was given later, and for a net that was cast since.
        """
        parts = self.parts
        if measure:
            from .telemetry import Measures

            parts = [*parts, Measures(self)]
        if not self.recipe.weight_dtypes.issuperset(map(operator.attrgetter("dtype"), self.params)):
            raise Refused(CAST_SINCE)
        for collect in self.optimizer.collecting:
            collect()
        grads = {p: p.grad for p in self.params if p.grad is not None}
        for part in parts:
            grads = part.gradients(grads)
        self._check(grads)
        scale: float | torch.Tensor | ByParameter = 1.0
        if self.options.clip_grad or self.options.clip_tensor:
            scale = self.clip(grads)
        write = functools.partial(self.optimizer.step, grads=grads, grad_scale=scale)
        for part in reversed(parts):  # the first one is the outermost: it says whether there is a write
            write = part.around(write)
        for wait in self.before_writing:
            wait()
        write()
        report = {}
        for part in parts:
            report.update(part.after_step())
        for average in self.averages.values():
            average.update()
        if measure:
            report.update(parts[-1].figures())
        self.zero_grad()
        return report

    def clip(self, grads: ByParameter) -> float | torch.Tensor | ByParameter:
        """A factor of gradients that clips them: a number, a 0-dim tensor, or {parameter: 0-dim tensor}."""
        options = self.options
        if not grads:
            return 1.0
        norms = self.ranks.norms_of(grads)
        of_each = torch.stack(list(norms.values()))
        if options.clip_grad:
            return clip_factor(torch.linalg.vector_norm(of_each), options.clip_grad)
        scales = clip_factor(of_each, options.clip_tensor)
        return dict(zip(norms, scales.unbind(), strict=True))

    def zero_grad(self) -> None:
        """Forget the gradients since the last step, sums of micro-batches in fp32 included: those of a batch
        that is not to count, or what the backward pass of another run has left in this net. step() ends so.
        """
        for part in self.parts:
            part.forget()
        self.backwards = 0
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def keeps_sums(self) -> bool:
        """Whether micro-batches are summed in fp32 beside p.grad: fp32 gradients add up there already."""
        return any(part.keeps_sums for part in self.parts)

    # -- slips in a loop that would cost a training in silence, refused at the step that makes them

    def _check(self, grads):
        """Raise Refused for gradients that can't be, and for parameters that came after Precision."""
        if any(g.is_sparse for g in grads.values()):
            raise Refused(SPARSE_GRADIENT)
        has_any = bool(grads) or any(part.has_written for part in self.parts)
        late = [name for name, p in self._frozen if p.requires_grad and p.grad is not None]
        self._steps_until_walk -= 1
        was_replaced = len(grads) != self._gradients_last_step  # a layer that was replaced gets none
        if not has_any or was_replaced or self._steps_until_walk == 0:
            self._gradients_last_step = len(grads)
            self._steps_until_walk = self.STEPS_BETWEEN_WALKS
            named = self.ranks.lasting_parameters(self.model)
            late += [name for name, p in named if p.requires_grad and p not in self._parameters]
        if late:
            where = f"parameter {late[0]} was frozen, or not in the model, when Precision was made"
            raise Refused(f"{where}, and would never be trained: {FREEZE_LATER}")
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._count_in_groups:
            where = "the optimiser has parameters that this run does not average, clip or sum"
            raise Refused(f"{where}: {FREEZE_LATER}")
        if not has_any:
            raise Refused(
                "step() found no gradients: call backward(loss) before it, with a loss that depends on the "
                "model's parameters"
            )

    def finish(self, kind: str) -> None:
        """Write exactly from the next step on, at the end of a training in bf16 weights, where rounding costs
        most. kind: 'split', bf16 weights beside an int16 remainder, with fp32 moments; or 'fp32', all of it.
        A state_dict tells, and a run that loads it is finished so too. Raises Refused where the weights are
        written exactly already, and for what parts/finish.py lists.
        """
        FINISH.load()(self, kind)

    # -- reading the weights

    def generator(self, source: str = "ema") -> View | None:
        """A frozen copy of the model for generation, called like `run`: averaged ('ema' or a further average)
        or last ('raw') weights, in the precision of the site `generation`. A View, which shares nothing with
        this run.

        'compute' as trained, but FP8 layers compute in bf16; 'fp8' through those; 'fp32' a full-precision
        copy, 'autocast' that copy under bf16, 'fp16' under fp16; 'bf16' a copy in bf16 whatever was trained;
        'int8', and 'fp8' of a net trained otherwise: the autocast copy with its Linear layers quantised
        (quantise.quantise); 'mxfp8', 'nvfp4_weights' and other formats in blocks: the same in that format.
        Raises Refused for a source that this run does not hold.

        Of a model that is spread over ranks all of them call this, and the first has the copy, the others
        None.
        """
        return self.frozen(source)

    @torch.no_grad()
    def frozen(self, source: str = "ema", **sites: str) -> View | None:
        """The `generator` with some sites changed: frozen("raw", generation="fp32")."""
        for name, value in sites.items():
            check_choice(name, value, SITES[name].values)
        r = self.recipe.replace(**sites)
        values = self._values(source)
        staying = [part for part in self.parts if part.generates == r.generation]
        with ExitStack() as stack:
            for part in self.parts:
                if part not in staying:
                    stack.enter_context(part.plain(self.model))
            net = self.ranks.copy(self, values)
        if net is None:
            return None
        net.requires_grad_(False).eval()
        converts = r.generation in GENERATION_BY_CAST or r.quantises
        if converts:
            without_borders(net)
            weights = "bf16" if r.generation == "bf16" else "fp32"
            compute = GENERATION_BY_CAST.get(r.generation, "bf16")
            r = r.replace(weights=weights, grads=weights, compute=compute, islands="none")
            Cast(net, r, self.options, frozen=False)
        for name, p in net.named_parameters():
            if name in values:
                p.copy_(values[name])
        view = View(net, r, staying, self.view_of_model.keep)
        for part in self.parts:
            part.freeze(view, r.generation)
        return view

    @torch.no_grad()
    def weights(self, source: str = "ema") -> dict[str, torch.Tensor]:
        """{name: tensor}: the net's state_dict with averaged ('ema' or a further average, in its dtype) or
        last ('raw', the fp32 values held) weights, buffers and frozen parameters beside them; pruned under
        sparse24, with the adapters of lora merged.

        It loads into the net as it was before the run. Of a model that is spread over ranks all of them call
        this, and the first gets it, on the CPU, the others {}. Raises Refused for a source that this run does
        not hold.
        """
        values = self._values(source)
        for part in self.parts:
            values = part.as_it_came(values)
        return values

    def _values(self, source):
        """`weights` under the names that the net has now."""
        trained = {}
        if source in self.averages:
            shadow = self.averages[source].shadow
            trained = {p: shadow[name] for name, p in self.named_params}
        elif source == "raw":
            with self.optimizer.reading() as swapped:  # a copy of weights that are only lent
                for p in self.params:
                    held = exact_weight(local_tensor(p), self.low_part(p))
                    trained[p] = held.clone() if swapped else held
        else:
            held = ", ".join(["raw", *self.averages])
            raise Refused(f"weights '{source}': this run holds {held}")
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.plain(self.model))
            values = dict(self.model.state_dict())
            for name, p in self.model.named_parameters(remove_duplicate=False):  # tied weights have several
                if p in trained:
                    values[name] = trained[p]
        for part in self.parts:
            values = part.values(values)
        return self.ranks.gathered(values)

    # -- state

    def state_dict(self, trainable_only: bool = False) -> dict[str, Any]:
        """Tensors and plain values only: loads with weights_only=True. trainable_only: without the
        weights that were frozen from the start, say the base of adapters; buffers are in it.

        Of a model that is spread over ranks DTensors and state.Chunks, of this rank's parts, as
        torch.distributed.checkpoint saves and loads them on any number of ranks.
        """
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "scaler": {},  # a checkpoint has these two whether or not the loss is scaled
            "skipped": 0,
        }
        if trainable_only:
            state["trainable_only"] = True
            trained = set(self.params)  # also those that were frozen since: they have moments and an average
            own = {n for n, p in self.model.named_parameters(remove_duplicate=False) if p in trained}
            own.update(name for name, _ in self.model.named_buffers(remove_duplicate=False))
            state["model"] = {name: t for name, t in state["model"].items() if name in own}
        if self.finished:
            state["finish"] = self.finished
        for part in self.parts:
            state.update(part.state_dict())
        return self.ranks.wrapped(state, self.averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state_dict of the same recipe, of whole tensors too where the model is spread over ranks.
        Raises Refused for another one's, before anything is changed.
        """
        lacking = {"model", "optimizer", "averages"} - state.keys()
        if lacking:
            raise Refused(f"this is no state of a run, as run.state_dict() gives: it has no {min(lacking)!r}")
        state = self.ranks.cut(state, self)
        weights = self._checked_weights(state)
        for name, average in self.averages.items():
            average.check_state(state["averages"].get(name, {}))
        for part in self.parts:
            part.check_state(state)
        if state.get("finish", self.finished) != self.finished:
            FINISH.load()(self, state["finish"], state["optimizer"])
        self.optimizer.load_state_dict(state["optimizer"])  # which refuses the state of another recipe first
        # what is missing was frozen from the start; a quantised base reads no keys beside its codes
        self.model.load_state_dict(weights, strict=False)
        for part in self.parts:
            part.load_state_dict(state)
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])

    def _checked_weights(self, state):
        """The weights of a saved state as the net's load_state_dict takes them. Raises Refused for others."""
        held = self.model.state_dict()
        weights = state["model"]
        for part in self.parts:
            weights = part.adapt(held, weights)
        wanted = dict(self.named_params) if state.get("trainable_only") else held
        for name in wanted:
            if name not in weights:
                raise Refused(f"the checkpoint lacks the weight {name}: it is another net's")
        for name, t in weights.items():
            own = held.get(name)
            if name not in held or torch.is_tensor(own) and not (torch.is_tensor(t) and _fits(t, own)):
                differs = f"{name} is {described(t)} in the checkpoint, and {described(own)} in this net"
                raise Refused(f"weight {differs}: it is another net's")
        return weights

    def ledger(self) -> Ledger:
        """The precision of this run: a row for each site, with value, bytes a parameter, and why."""
        from .ledger import of_run

        return of_run(self, self.recipe.sites)


# ---- What is asked for -------------------------------------------------------------------------------------


def _refuse_name(name, options):
    """Raise TypeError for an option that is none, as Python does; Refused for one of recipe()."""
    if name in inspect.signature(recipe).parameters:
        raise Refused(f"{name}= belongs to the recipe: Precision(model, recipe({name}={options[name]!r}))")
    raise TypeError(f"Precision() got an unexpected keyword argument '{name}'")


def clip_factor(norm, most):
    """What multiplies gradients of this norm, a tensor, so that it is at most `most`; 1 where it is not
    finite. A tensor: on CUDA nothing waits for its value.
    """
    wanted = (most / (norm.double() + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), wanted, 1.0)


def _refuse_bare_step(optimizer, args, kwargs):
    if "grads" not in kwargs:  # run.step() gives them
        raise Refused(
            "run.optimizer.step() would leave out clipping, loss scaling and the average: call run.step()"
        )


# ---- Saved states ------------------------------------------------------------------------------------------


def _fits(saved, own):
    """Whether a saved tensor is one of the net's: floats of up to 32 bits stand for one another."""
    alike = (saved.shape, saved.layout, saved.is_meta) == (own.shape, own.layout, own.is_meta)
    floats = saved.is_floating_point() and own.is_floating_point() and saved.dtype.itemsize <= 4
    return alike and (floats or saved.dtype == own.dtype)
