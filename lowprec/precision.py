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

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from . import fsdp, gradients, ledger, saving
from .cast import Cast
from .errors import Refused
from .first_call import FirstCall
from .frozen import frozen_view, weights_of
from .frozen_weights import warn_of_averages
from .gradients import ByParameter, clip_scale, gradients_of, norms_where_needed, sum_up
from .kernels import cpu_products
from .layers import convolutions
from .layers.fp4 import FP4
from .layers.fp8 import FP8
from .layers.fp8_attention import FP8Attention
from .layers.lora import Lora
from .layers.nf4 import NF4Base
from .layers.quantise import Quantised
from .layers.sparsity import Sparse24
from .machine import settle_vector_math
from .module import CastModule
from .optimizers import buckets, build
from .optimizers.average import average_kind
from .optimizers.offload import offloaded
from .optimizers.release import Release
from .recipes import SITES, Recipe, Site, parse_average, recipe
from .rules import NET_RULES, check_wrapped, is_compiled, refuse, refuse_optimizer
from .run_options import (
    RunOptions,
    check_averages_gradients,
    check_calls_the_model,
    check_method_options,
    checked_recipe,
    trained_groups,
)
from .sites import LOW_PRODUCTS
from .slips import MicroBatches, Slips
from .telemetry import StepReport
from .view import View

__all__ = ["SITES", "Precision", "Recipe", "Refused", "Site", "View", "recipe"]
METHODS = (Lora, NF4Base, Sparse24, FP8, FP4, FP8Attention, Quantised)


class Precision:
    """A recipe carried out: attaches the recipe's methods, casts `model` in place, makes optimiser, averages
    and loss scaler, in this order.

    Call it like the model; backward(loss) after each micro-batch; step() after the last. torch's schedulers
    work on `run.optimizer`. Raises Refused as `recipe` and `build.build` do, and by the tables of rules.py;
    TypeError for an unknown argument.

    model: any nn.Module, on its device, compiled or not. It may take any arguments and return any tree of
    tensors. r: its Recipe; None: fp32 everywhere.

    groups: parameter groups with their own lr, weight_decay or optimizer; None: one group of all that are
    trained. optimizer: see build.build; lr, betas, eps (a pair for Adafactor), momentum, nesterov: None for
    its own. accumulate: micro-batches a step. clip_grad: largest gradient norm, 0 for none; clip_tensor: the
    same of each tensor by itself. grad_release: update within backward, see release.py. states_on: where
    moments are kept, 'device' or 'cpu', see offload.py.

    ema_decay: of the average 'ema', whose dtype and rounding are sites of the recipe; None for no average.
    ema_warmup: let it start low, see average.EMA. averages: further ones, as 'DECAY:DTYPE[:UPDATE]'.
    average_on: where they are kept, 'device' or 'cpu'.

    init_loss_scale, growth_factor, backoff_factor, growth_interval: as of torch.amp.GradScaler. seed: of the
    rounding noise. keep: arguments of forward whose dtype is left alone. dtypes: {name or pattern: 'fp32' or
    'bf16'} of single buffers and frozen weights. fp32_modules: names or patterns of modules that compute in
    fp32 with fp32 weights, islands by name. fp32_outputs: of modules whose outputs are fp32, as of a head
    whose logits become a loss within the net. blank: builds the net anew, for the generator of a model that
    fully_shard has spread, see fsdp.py. method_options: sparse24_decay; lora, the rank of adapters beside
    frozen layers, see layers/lora.py; fp4_until: the step from which on layers in FP4 compute in bf16;
    calibrate: () -> calls the model on data, for generation_rounding=gptq, see layers/quantise.py.
    """

    def __init__(
        self,
        model: nn.Module,
        r: Recipe | None = None,
        *,
        groups: Iterable[dict] | None = None,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | tuple[float, float] | None = None,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float = 0.0,
        optimizer: Any = "adamw",
        ema_decay: float | None = 0.999,
        ema_warmup: bool = False,
        averages: Iterable[str] = (),
        clip_grad: float = 0.0,
        clip_tensor: float = 0.0,
        accumulate: int = 1,
        grad_release: bool = False,
        average_on: str = "device",
        states_on: Any = "device",
        init_loss_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        seed: int = 0,
        keep: Iterable[str] = ("t", "timestep", "timesteps"),
        dtypes: Mapping[str, str] | None = None,
        fp32_modules: Iterable[str] = (),
        fp32_outputs: Iterable[str] = (),
        blank: Callable[[], nn.Module] | None = None,
        **method_options: Any,
    ):
        options = RunOptions.of(locals())
        settle_vector_math()
        check_method_options(METHODS, method_options)
        self.model = net = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        refuse(NET_RULES, net)
        self.options = options
        self.clip_grad = options.clip_grad
        self.clip_tensor = options.clip_tensor
        self.accumulate = accumulate
        self.blank = blank
        self.device = next(net.parameters()).device
        self.ranks = fsdp.ranks_of(net)  # those that the net is spread over, or None
        r = checked_recipe(r).keeping(*options.optimizers)
        self.recipe = r if self.device.type == "meta" else r.on(self.device)
        options.check(self.recipe, model, spread=self.ranks is not None)
        options.check_optimizer(net, adapted=bool(method_options.get("lora")))
        if self.recipe.compute not in ("fp32", "tf32"):
            cpu_products.settle_products(self.device)

        self._methods(method_options)
        originals = self._cast(model)
        self._optimizer(originals)
        self._averages()
        self._scaler()

        self.sums: ByParameter = {}  # the fp32 sum of each parameter's gradients over micro-batches
        self.micro_batches = MicroBatches()
        self.slips = Slips(self)
        self.reduce_sums = None  # set by a distributed trainer: averages `self.sums` over the ranks
        self.kept = None  # an activations.Meter of a forward pass, for the ledger
        if grad_release:
            self.release = Release(self.optimizer, self._gradient, self.clip_tensor, self._before_writing)

    # -- the parts of a run, in the order in which they are made

    def _methods(self, method_options):
        """Attach the methods that the recipe asks for, to the model as it came."""
        self.methods = []
        for kind in METHODS:
            method = kind.attach(self.model, self.recipe, seed=self.options.seed, **method_options)
            if method is not None:
                self.methods.append(method)

    def _cast(self, forward):
        """Bring the model to the recipe's dtypes. Returns its fp32 weights, of which an exact master is made,
        in the order of `params`; [] where there is none.
        """
        net = self.model
        r = self.recipe
        originals = []
        if r.low_weights and (r.master != "none" or r.kahan == "on"):
            trained = [p for p in net.parameters() if p.requires_grad]
            originals = [buckets.local_tensor(p).float().clone() for p in trained]
        self.cast = Cast(net, r, self.options)
        for method in self.methods:
            method.convert(net)
        if self.methods and any(isinstance(m, nn.TransformerEncoderLayer) for m in net.modules()):
            # in eval without gradients torch's fast path reads the weights, and calls no layer
            torch.backends.mha.set_fastpath_enabled(False)
        if self.device.type == "cpu" and r.compute in ("bf16", *LOW_PRODUCTS) and not is_compiled(forward):
            convolutions.attach(net)
        self.release = None  # a release.Release, where backward updates
        self.view_of_model = View(net, r, self.methods, self.options.keep)
        self.view_of_model.first_call = FirstCall(net)
        if r.low_weights and self.cast.averages:
            self.view_of_model.moves_average = True
            warn_of_averages(self.cast.averages, r)
        self.forward = forward
        return originals

    def _optimizer(self, originals):
        """Make the optimiser of all parameters that are trained, and its exact master of the `originals`."""
        self.named_params = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in self.named_params]
        for p in self.params:
            p.grad = None  # what an earlier backward left belongs to no step of this run
        options = self.options
        groups = self.params
        if options.groups is not None:
            groups = trained_groups(options.groups, self.named_params)
        self.away = offloaded(options.states_on, self.device)  # what keeps the moments elsewhere, or None
        self.optimizer = build.build(
            options.optimizer, groups, self.recipe, net=self.model, away=self.away, **options.of_optimizer
        )
        self.optimizer_name = build.title_of_optimizer(self.optimizer, options.optimizer)
        spread = self.ranks is not None
        refuse_optimizer(self.optimizer, self.optimizer_name, spread=spread, states_on=options.states_on)
        self.optimizer.attach(self.model)
        self.low_part = self.optimizer.low_part
        with torch.no_grad():
            for p, original in zip(self.params, originals, strict=False):  # not from its bf16 image
                self.optimizer.set_exact(p, original)

    def _averages(self):
        """Make the average 'ema', if any, which the optimiser may write within its step, and further ones."""
        options = self.options
        kind = average_kind(options.average_on, self.device)
        make = functools.partial(kind, self.named_params, low_part=self.low_part, seed=options.seed)
        r = self.recipe
        self.ema, self.averages = None, {}
        if options.ema_decay is not None:
            self.ema = make(options.ema_decay, r.ema, r.ema_update, warmup=options.ema_warmup)
            self.averages["ema"] = self.ema
        for part in getattr(self.optimizer, "parts", [self.optimizer]):
            part.average = self.ema
        for spec in options.averages:
            self.averages[spec] = make(*parse_average(spec))

    def _scaler(self):
        """Make the loss scaler, which does nothing but for fp16."""
        dynamic = self.recipe.loss_scale == "dynamic"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dynamic, **self.options.of_scaler)
        self.skipped = 0  # steps whose gradients were not finite

    @property
    def forward(self) -> Callable:
        """What __call__ runs: the model, or a compiled or distributed wrapper of it."""
        return self.view_of_model.forward

    @forward.setter
    def forward(self, wrapper: Callable) -> None:
        if self.release is not None:
            check_wrapped(wrapper)
        if self.recipe.low_weights:
            check_averages_gradients(wrapper)
        check_calls_the_model(wrapper, self.view_of_model)
        self.view_of_model.forward = wrapper

    @property
    def module(self) -> CastModule:
        """An nn.Module that takes the net's place in a module that calls it: see module.py."""
        return self.view_of_model.module

    # -- one training step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model on any arguments. Floating outputs, a loss formed inside among them, come back in the
        loss's dtype.
        """
        return self.view_of_model(*args, **kwargs)

    def observe(self, on: bool) -> None:
        """Say before a step's first forward whether it will be measured. Methods then count what their casts
        lose.
        """
        for method in self.methods:
            method.observe(on)
        if self.release is not None:
            self.release.watched = self._report() if on else None

    @property
    def keeps_sums(self) -> bool:
        """Whether micro-batches are summed in fp32 beside p.grad: fp32 gradients add up there already."""
        several = self.accumulate > 1 or any(method.needs_sums for method in self.methods)
        return several and self.recipe.low_weights and self.recipe.accumulate == "fp32"

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward of one micro-batch's mean loss, 0-dim. Gradients are averaged over `accumulate` calls, or,
        with weights (numbers of tokens, say), over all calls before a step: sum(weight * g) / sum(weight).
        Raises Refused within no_sync() of DistributedDataParallel where sums are kept in fp32, and for
        weights where several processes average their gradients.
        """
        with self.view_of_model.exact():
            self.scaler.scale(loss / self.micro_batches.divisor(self, weight)).backward()
        if self.keeps_sums:
            sum_up(self)

    @torch.no_grad()
    def step(self, measure: bool = False) -> dict[str, float]:
        """Clip, update weights and averages, clear gradients. Returns {} or, with `measure`, what rounding
        did:

        see telemetry.StepReport; grad_norm; nonfinite_grads: entries; loss_scale and skipped_steps for fp16;
        and what the methods tell after observe(True). Raises Refused for gradients that are sparse or absent,
        and for parameters that the optimiser was given later.
        """
        self.optimizer.collect()
        if self.reduce_sums and self.sums:
            self.reduce_sums(self.sums)
        grads = gradients_of(self)
        self.slips.check(self, grads)
        self.scaler.unscale_(self.optimizer)
        for method in self.methods:
            method.on_grads(grads)
        norms = norms_where_needed(self, grads, measure)
        scale = clip_scale(norms, self.clip_grad, self.clip_tensor)
        report = {}
        writes = None  # a StepReport of what the step writes
        if measure:
            writes = self._started_report()
            report.update(gradients.measures_of_gradients(self, grads, norms))
            writes.add(grads, scale)
        skipped_before = self.skipped
        self._before_writing()
        self._optimizer_step(scale)
        for method in self.methods:
            report.update(method.after_step(self.low_part))
        if writes is not None:
            if self.skipped == skipped_before:  # a skipped step has no updates that could survive
                report.update(writes.written())
            report["skipped_steps"] = self.skipped
            if self.scaler.is_enabled():
                report["loss_scale"] = self.scaler.get_scale()
        for average in self.averages.values():
            average.update()
        if writes is not None and self.ema is not None:
            self.ema.catch_up()
            report.update(writes.averaged())
        self.zero_grad()
        return report

    def zero_grad(self) -> None:
        """Forget the gradients since the last step, sums of micro-batches in fp32 included: those of a batch
        that is not to count, or what the backward pass of another run has left in this net. step() ends so.
        """
        self.sums = {}
        self.micro_batches.forget()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def has_released(self) -> bool:
        """Whether backward has updated parameters of this step, see release.py."""
        return self.release is not None and bool(self.release.updated)

    def _gradient(self, p):
        """What backward updates p by, where gradients are released."""
        g = p.grad.float() if self.keeps_sums else p.grad
        for method in self.methods:
            method.on_grads({p: g})
        return g

    def _report(self):
        sum_over_ranks = None if self.ranks is None else self.ranks.sum
        shadow = {} if self.ema is None else self.ema.shadow
        return StepReport(self.optimizer, {}, 1.0, self.named_params, shadow, sum_over_ranks)

    def _started_report(self):
        """The StepReport of this step: the one that backward has shown its writes to, or a new one."""
        if not self.has_released:
            return self._report()
        if self.release.watched is None:
            raise Refused(
                "grad_release has freed the gradients that step(measure=True) should measure: call "
                "observe(True) before the step's first forward"
            )
        return self.release.watched

    def _before_writing(self):
        """Averages that are read on a stream of their own are waited for, on the device."""
        for average in self.averages.values():
            average.before_writing()

    def _optimizer_step(self, scale):
        options = dict(grads=self.sums or None, grad_scale=scale)
        if not self.scaler.is_enabled():
            self.optimizer.step(**options)
            return
        old = self.scaler.get_scale()
        self.scaler.step(self.optimizer, **options)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < old  # the scaler backs off exactly when it skipped

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

    def frozen(self, source: str = "ema", **sites: str) -> View | None:
        """The `generator` with some sites changed: frozen("raw", generation="fp32")."""
        return frozen_view(self, source, sites)

    def view(self, net: nn.Module, methods: Iterable = (), **sites: str) -> View:
        """`net`, a copy of the model, called as this run's recipe with some sites changed says."""
        return View(net, self.recipe.replace(**sites), methods, self.view_of_model.keep)

    def weights(self, source: str = "ema") -> dict[str, torch.Tensor]:
        """{name: tensor}: the net's state_dict with averaged ('ema' or a further average, in its dtype) or
        last ('raw', the fp32 values held) weights, buffers and frozen parameters beside them; pruned under
        sparse24, with the adapters of lora merged.

        It loads into the net as it was before the run. Of a model that is spread over ranks all of them call
        this, and the first gets it, on the CPU, the others {}. Raises Refused for a source that this run does
        not hold.
        """
        values = weights_of(self, source)
        for method in self.methods:
            values = method.as_it_came(values)
        return values

    # -- state

    def state_dict(self, trainable_only: bool = False) -> dict[str, Any]:
        """Tensors and plain values only: loads with weights_only=True. trainable_only: without the
        weights that were frozen from the start, say the base of adapters; buffers are in it.

        Of a model that is spread over ranks DTensors and state.Chunks, of this rank's parts, as
        torch.distributed.checkpoint saves and loads them on any number of ranks.
        """
        return saving.state_of(self, trainable_only)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state_dict of the same recipe, of whole tensors too where the model is spread over ranks.
        Raises Refused, KeyError or RuntimeError for another one's.
        """
        saving.load_state(self, state)

    def ledger(self) -> ledger.Ledger:
        """The precision of this run: a row for each site, with value, bytes a parameter, and why."""
        return ledger.of_run(self, self.recipe.sites)
