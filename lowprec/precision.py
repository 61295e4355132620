"""The precision of a training run: what each kind of tensor is held in, how it is rounded, and a run that
does so.

A run holds a handful of kinds of tensor ("sites"): weights, master copy, gradients, moments, average ... A
`Recipe` says for each where it lives and how it is rounded. `Precision` carries the recipe out on any model,
in any loop:

    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.999)  # makes AdamW
    for x, y in loader:
        loss = F.mse_loss(run(x), y)         # run(...) is the model, called with any arguments
        run.backward(loss)                   # loss scaling, accumulation
        run.step()                           # AdamW, rounding, average
    net = run.generator()                    # called like the model, with the averaged weights
    print(run.ledger())                      # site, value, bytes, why

bf16 has 8 significant bits: neighbouring values (an ulp) lie 2^-8 to 2^-7 of the value apart, and a change
below half of that is lost when rounding to nearest. Most of this file follows from that one sentence.

It sets
one option of torch for the whole process: where FP8 or 2:4 sparsity meets an nn.TransformerEncoderLayer, its
fast path, which would pass by them, is turned off.
"""

import collections
import copy
import functools
import inspect
from contextlib import ExitStack

import torch
from torch.utils._pytree import tree_map

from . import fsdp, ledger
from .cast import Cast, View
from .errors import Refused
from .layers import fp8, quantise
from .layers.sparsity import Sparse24
from .machine import settle_vector_math
from .optimizers import buckets, build
from .optimizers.average import average_kind
from .optimizers.offload import offloaded
from .optimizers.release import Release, clipping
from .optimizers.release import norms_of as release_norms
from .optimizers.rounded import SPARSE
from .recipes import SITES, Recipe, Site, parse_average, recipe
from .rounding import exact_weight
from .rules import NET, PARALLEL, RUN, RunFacts, check_wrapped, is_compiled, refuse, refuse_optimizer
from .telemetry import StepReport

__all__ = ["SITES", "Precision", "Recipe", "Refused", "Site", "View", "recipe"]
METHODS = (Sparse24, fp8.FP8, quantise.Quantised)


# ---- Precision ---------------------------------------------------------------------------------------------


class Precision:
    """A recipe carried out: casts `model` in place, owns optimiser, average, loss scaler and accumulators.

    model: any nn.Module, on its device, compiled or not. It may take any arguments and return any tree of
    tensors. groups: parameter groups with their own lr, weight_decay or optimizer; None: one group of all
    that are trained. optimizer: see peers.build; lr, betas, eps, momentum, nesterov: None for its own.
    accumulate: micro-batches a step. clip_grad: largest gradient norm, 0 for none; clip_tensor: the same of
    each tensor by itself. grad_release: update within backward, see release.py. average_on: where the
    averages are kept, 'device' or 'cpu'; states_on: the same of moments, see offload.py. ema_warmup: let the
    decay of the recipe's average start low, see average.EMA. averages: further ones beside it, as
    'DECAY:DTYPE[:UPDATE]'. init_loss_scale, growth_factor, backoff_factor, growth_interval: as of
    torch.amp.GradScaler. keep: arguments of forward whose dtype is left alone. blank: builds the net anew,
    for the generator of a model that fully_shard has spread, see fsdp.py. options: of the methods, as
    sparse24_decay. Call it like the model; backward(loss) after each micro-batch; step() after the last.
    torch's schedulers work on `run.optimizer`. Raises Refused as `recipe` and `peers.build` do.
    """

    def __init__(
        self,
        model,
        r=None,
        *,
        groups=None,
        lr=None,
        betas=None,
        eps=None,
        momentum=None,
        nesterov=None,
        weight_decay=0.0,
        optimizer="adamw",
        ema_decay=0.999,
        ema_warmup=False,
        averages=(),
        clip_grad=0.0,
        clip_tensor=0.0,
        accumulate=1,
        grad_release=False,
        average_on="device",
        states_on="device",
        init_loss_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        seed=0,
        keep=("t", "timestep", "timesteps"),
        blank=None,
        **options,
    ):
        settle_vector_math()
        taken = {name for kind in METHODS for name in inspect.signature(kind.attach).parameters}
        if unknown := set(options) - taken:
            raise TypeError(f"Precision() got an unexpected keyword argument '{sorted(unknown)[0]}'")
        r = r or Recipe()
        self.model = net = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        refuse(NET, net)
        self.device = next(net.parameters()).device
        groups = None if groups is None else list(groups)
        r = r.keeping(optimizer, *(group["optimizer"] for group in groups or () if "optimizer" in group))
        self.recipe = r if self.device.type == "meta" else r.on(self.device)
        self.clip_grad, self.clip_tensor, self.accumulate = clip_grad, clip_tensor, accumulate
        # the ranks that the model is spread over, or None
        self.over, self.blank = fsdp.Over.of(net), blank
        asked = RunFacts(
            self.recipe,
            spread=self.over is not None,
            compiled=is_compiled(model),
            accumulate=accumulate,
            clip_grad=clip_grad,
            clip_tensor=clip_tensor,
            grad_release=grad_release,
            average_on=average_on,
            states_on=states_on,
        )
        refuse(RUN, asked)
        self.methods = [made for kind in METHODS if (made := kind.attach(net, self.recipe, **options))]
        exact = r.low_weights and (r.master != "none" or r.kahan == "on")
        trained = [p for p in net.parameters() if p.requires_grad]
        originals = [buckets.local(p).float().clone() for p in trained] if exact else []
        self.cast = Cast(net, self.recipe)
        for method in self.methods:
            method.convert(net)
        if self.methods and any(isinstance(m, torch.nn.TransformerEncoderLayer) for m in net.modules()):
            # in eval without gradients torch's fast path reads the weights, and calls no layer
            torch.backends.mha.set_fastpath_enabled(False)
        self.view_of_model = View(net, self.recipe, self.methods, keep)
        self.release = None  # a release.Release, where backward updates
        self.forward = model
        self.named_params = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self.params = [p for _, p in self.named_params]
        for p in self.params:
            p.grad = None  # what an earlier backward left belongs to no step of this run
        common = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, seed=seed)
        common.update(momentum=momentum, nesterov=nesterov, net=net)
        self.away = offloaded(states_on, self.device)  # what keeps the moments elsewhere, or None
        common.update(away=self.away)
        self.optimizer = build.build(optimizer, self._groups(groups), self.recipe, **common)
        self.optimizer_name = build.title(self.optimizer, optimizer)
        self.grouped = sum(len(group["params"]) for group in self.optimizer.param_groups)
        spread = self.over is not None
        refuse_optimizer(self.optimizer, self.optimizer_name, spread=spread, states_on=states_on)
        self.optimizer.attach(net)
        self.low_part = self.optimizer.low_part
        for p, original in zip(self.params, originals, strict=False):  # not from its bf16 image
            with torch.no_grad():
                self.optimizer.set_exact(p, original)
        kind = average_kind(average_on, self.device)
        average = functools.partial(kind, self.named_params, low_part=self.low_part, seed=seed)
        self.ema = average(ema_decay, r.ema, r.ema_update, warmup=ema_warmup)
        for part in getattr(self.optimizer, "parts", [self.optimizer]):
            part.average = self.ema
        self.averages = {"ema": self.ema, **{spec: average(*parse_average(spec)) for spec in averages}}
        dynamic = r.loss_scale == "dynamic"
        scaling = dict(init_scale=init_loss_scale, growth_factor=growth_factor, backoff_factor=backoff_factor)
        scaling["growth_interval"] = growth_interval
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dynamic, **scaling)
        self.sums = {}  # parameter -> fp32 sum of its micro-batches' gradients
        self.reduce_sums = None  # set by a distributed trainer: averages `self.sums` over the ranks
        self.skipped = 0
        self.example = None  # (args, kwargs) whose shapes FLOPs are counted on
        self.kept = None  # an activations.Meter of a forward pass, for the ledger
        if grad_release:
            self.release = Release(self.optimizer, self._gradient, clip_tensor, self._before_writing)

    def _groups(self, groups):
        if groups is None:
            return self.params
        names = {p: name for name, p in self.named_params}
        groups = [{**group, "params": _listed(group["params"])} for group in groups]
        grouped = collections.Counter(p for group in groups for p in group["params"])
        if twice := [name for p, name in names.items() if grouped[p] > 1]:
            raise Refused(f"groups: parameter {twice[0]} is in more than one of them; leave it in one")
        if missing := [name for p, name in names.items() if p not in grouped]:
            wrong = f"groups: parameter {missing[0]} is in none of them"
            raise Refused(f"{wrong}; add it, or set requires_grad=False")
        return [{**group, "params": [p for p in group["params"] if p in names]} for group in groups]

    @property
    def forward(self):
        """What __call__ runs: the model, or a compiled or distributed wrapper of it."""
        return self.view_of_model.forward

    @forward.setter
    def forward(self, wrapper):
        if self.release is not None:
            check_wrapped(wrapper)
        if isinstance(wrapper, PARALLEL[0]) and self.recipe.low_weights:
            # its hooks are on what gathered fp32 gradients, and a change of dtype makes that anew
            if "BFloat16" not in wrapper._get_ddp_logging_data().get("dtypes", "BFloat16"):
                early = "this DistributedDataParallel was made of fp32 weights, and averages no gradient now"
                raise Refused(f"{early}: make it of run.model after Precision")
        self.view_of_model.forward = wrapper

    # -- one training step

    def __call__(self, *args, **kwargs):
        """The model on any arguments; floating outputs, a loss formed inside among them, come back in the
        loss's dtype.
        """
        if self.example is None and self.methods:
            self.example = tree_map(_shape, (args, kwargs))
        return self.view_of_model(*args, **kwargs)

    def observe(self, on):
        """Say before a step's first forward whether it will be measured; methods then count what their casts
        lose.
        """
        for method in self.methods:
            method.observe(on)
        if self.release is not None:
            self.release.watched = self._report() if on else None

    def _report(self):
        total = self.over and self.over.sum
        return StepReport(self.optimizer, {}, 1.0, self.named_params, self.ema.shadow, total)

    def _gradient(self, p):
        """What backward updates p by, where gradients are released."""
        g = p.grad.float() if self.keeps_sums else p.grad
        for method in self.methods:
            method.on_grads({p: g})
        return g

    @property
    def keeps_sums(self):
        # fp32 gradients add up in p.grad already; bf16 ones need a place of their own to be summed in fp32
        several = self.accumulate > 1 or any(method.needs_sums for method in self.methods)
        return several and self.recipe.low_weights and self.recipe.accumulate == "fp32"

    def backward(self, loss):
        """Backward of one micro-batch's mean loss; gradients are averaged over `accumulate` calls."""
        with self.view_of_model.exact():
            self.scaler.scale(loss / self.accumulate).backward()
        if self.keeps_sums:
            if self.reduce_sums is None and not getattr(self.forward, "require_backward_grad_sync", True):
                apart = "micro-batches are summed in fp32 apart from p.grad: DDP would average the last alone"
                raise Refused(f"{apart}: leave no_sync() out, or take sites=('accumulate=bf16',)")
            for p in self.params:
                if p.grad is not None:
                    self.sums[p] = p.grad.float() if p not in self.sums else self.sums[p].add_(p.grad)
                    p.grad = None

    @torch.no_grad()
    def step(self, measure=False):
        """Clip, update weights and averages, clear gradients. Returns {} or, with `measure`, what rounding
        did:

        see telemetry.StepReport; grad_norm; nonfinite_grads: entries; loss_scale and skipped_steps for fp16;
        and what the methods tell after observe(True).
        """
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self.grouped:
            late = "the optimiser has parameters that this run does not average, clip or sum"
            whole = "make Precision while all that is ever trained has requires_grad=True, and freeze it then"
            raise Refused(f"{late}: {whole}")
        self.optimizer.collect()
        if self.reduce_sums and self.sums:
            self.reduce_sums(self.sums)
        grads = self.sums or {p: p.grad for p in self.params if p.grad is not None}
        norms_of = release_norms if self.over is None else self.over.norms_of
        if self.over:
            grads = {p: buckets.local(g) for p, g in grads.items()}
        if any(g.is_sparse for g in grads.values()):
            raise Refused(SPARSE)
        released = self.release is not None and self.release.updated
        if not grads and not released:
            what = "step() found no gradients: call backward(loss) before it"
            raise Refused(f"{what}, with a loss that depends on the model's parameters")
        self.scaler.unscale_(self.optimizer)
        for method in self.methods:
            method.on_grads(grads)
        report, scale, watched = {}, 1.0, None
        norms = norms_of(grads) if grads and (self.clip_grad or self.clip_tensor or measure) else {}
        if self.clip_grad:
            scale = clipping(_together(norms.values()), self.clip_grad)
        if self.clip_tensor and norms:
            each = clipping(torch.stack(list(norms.values())), self.clip_tensor)
            scale = dict(zip(norms, each.unbind(), strict=True))
        if measure:
            report, watched = self._measured(grads, norms, released)
            watched.add(grads, scale)
        skipped = self.skipped
        self._before_writing()
        self._optimizer_step(scale)
        for method in self.methods:
            report.update(method.after_step(self.low_part))
        if measure:
            if self.skipped == skipped:  # a skipped step has no updates that could survive
                report.update(watched.written())
            report["skipped_steps"] = self.skipped
            if self.scaler.is_enabled():
                report["loss_scale"] = self.scaler.get_scale()
        for average in self.averages.values():
            average.update()
        if measure:
            self.ema.catch_up()
            report.update(watched.averaged())
        self.zero_grad()
        return report

    def zero_grad(self):
        """Forget the gradients since the last step, sums of micro-batches in fp32 included: those of a batch
        that is not to count, or what the backward pass of another run has left in this net. step() ends so.
        """
        self.sums = {}
        self.optimizer.zero_grad(set_to_none=True)

    def _measured(self, grads, norms, released):
        """({grad_norm, nonfinite_grads}, StepReport) of this step, of what backward has updated too."""
        watched, odd = self._report(), {p: (~g.isfinite()).sum() for p, g in grads.items()}
        if released:
            watched = self.release.watched
            if watched is None:
                late = "grad_release has freed the gradients that step(measure=True) should measure"
                raise Refused(f"{late}: call observe(True) before the step's first forward")
            norms, odd = {**self.release.norms, **norms}, {**self.release.nonfinite, **odd}
        norm = _together(norms[p] for p in self.params if p in norms)
        odd = sum(map(int, odd.values()))
        odd = odd if self.over is None else int(self.over.sum(odd))
        return dict(grad_norm=norm.item(), nonfinite_grads=odd), watched

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

    @torch.no_grad()
    def generator(self, source="ema"):
        """A frozen copy of the model for generation, called like `run`: averaged ('ema' or a further average)
        or last ('raw') weights, in the precision of the site `generation`. A View, which shares nothing with
        this run.

        'compute' as trained, but FP8 layers compute in bf16; 'fp8' through those; 'fp32' a full-precision
        copy, 'autocast' that copy under bf16, 'fp16' under fp16; 'bf16' a copy in bf16 whatever was trained;
        'int8', and 'fp8' of a net trained otherwise: the autocast copy with its Linear layers quantised
        (fp8.quantise). Raises Refused for a source that this run does not hold.

        Of a model that is spread over ranks all of them call this, and the first has the copy, the others
        None.
        """
        return self.frozen(source)

    @torch.no_grad()
    def frozen(self, source="ema", **sites):
        """The `generator` with some sites changed: frozen("raw", generation="fp32")."""
        r = self.recipe.replace(**sites)
        values = self.weights(source)
        staying = [method for method in self.methods if method.generates == r.generation]
        with ExitStack() as stack:
            for method in self.methods:
                if method not in staying:
                    stack.enter_context(method.plain(self.model))
            net = _copied(self.model) if self.over is None else self.over.copy(self.blank, values)
            if net is None:
                return None
            net.requires_grad_(False).eval()
        if r.generation in ("fp32", "bf16", "autocast", "fp16") or r.quantises:
            low = r.generation == "bf16"
            own = r.generation if r.generation in ("fp32", "fp16") else "bf16"
            r = r.replace(
                weights="bf16" if low else "fp32",
                grads="bf16" if low else "fp32",
                compute=own,
                islands="none",
            )
            Cast(self.cast.undo(net) if self.over is None else net, r)
        elif self.over:
            Cast(net, r)
        for name, p in net.named_parameters():
            if name in values:
                p.copy_(values[name])
        for method in self.methods:
            method.freeze(net, sites.get("generation", self.recipe.generation))
        return View(net, r, staying, self.view_of_model.keep)

    def view(self, net, methods=(), **sites):
        """`net`, a copy of the model, called as this run's recipe with some sites changed says."""
        return View(net, self.recipe.replace(**sites), methods, self.view_of_model.keep)

    def weights(self, source="ema"):
        """{name: tensor}: the net's state_dict with averaged ('ema' or a further average, in its dtype) or
        last ('raw', the fp32 values held) weights, buffers and frozen parameters beside them; pruned under
        sparse24.

        It loads into the net as it was before the run. Of a model that is spread over ranks all of them call
        this, and the first gets it, on the CPU, the others {}. Raises Refused for a source that this run does
        not hold.
        """
        if source not in ("raw", *self.averages):
            raise Refused(f"weights '{source}': this run holds {', '.join(['raw', *self.averages])}")
        if source == "raw":
            held = {name: (buckets.local(p), self.low_part(p)) for name, p in self.named_params}
            trained = {name: exact_weight(*pair) for name, pair in held.items()}
        else:
            trained = self.averages[source].shadow
        own = {p: trained[name] for name, p in self.named_params}
        with ExitStack() as stack:
            for method in self.methods:
                stack.enter_context(method.plain(self.model))
            values = dict(self.model.state_dict())
            # tied weights have several names
            for name, p in self.model.named_parameters(remove_duplicate=False):
                if p in own:
                    values[name] = own[p]
        for method in self.methods:
            values = method.values(values)
        return values if self.over is None else self.over.gathered(values)

    # -- state

    def state_dict(self):
        """Tensors and plain values only: loads with weights_only=True.

        Of a model that is spread over ranks DTensors and state.Chunks, of this rank's parts, as
        torch.distributed.checkpoint saves and loads them on any number of ranks.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
        }
        state.update((method.key, method.state_dict()) for method in self.methods if method.key)
        return state if self.over is None else self.over.wrapped(state, self.averages)

    def load_state_dict(self, state):
        """Take a state_dict of the same recipe, of whole tensors too where the model is spread over ranks.
        Raises Refused, KeyError or RuntimeError for another one's.
        """
        if self.over:
            state = self.over.cut(state, self.state_dict())
        saved = state["model"]
        for method in self.methods:
            saved = method.adapt(self.model.state_dict(), saved)
        self.model.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        for method in self.methods:
            method.load_state_dict(state.get(method.key), self.low_part)
        for name, average in self.averages.items():
            average.load_state_dict(state["averages"][name])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]

    def ledger(self):
        """The precision of this run: a `ledger.Ledger` of (site, value, bytes a parameter or None, why)."""
        return ledger.of(self, self.recipe.sites)


def _copied(net):
    """A copy of a net. What a forward pass has left in its modules, an auxiliary loss for one, is detached:
    torch copies no tensor with a graph.
    """
    left = [value for module in net.modules() for value in vars(module).values() if torch.is_tensor(value)]
    return copy.deepcopy(net, {id(value): value.detach().clone() for value in left if value.grad_fn})


def _listed(params):
    """The parameters of a group as torch takes them: one, an iterable, or an iterable of (name, parameter).
    """
    if torch.is_tensor(params):
        return [params]
    if isinstance(params, set | frozenset):
        raise Refused("groups: a set has no order that a resume could rely on; give a list of parameters")
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _together(norms):
    """The norm of tensors that have these norms."""
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def _shape(x):
    return x.detach().to("meta") if torch.is_tensor(x) else x
