"""The optimiser's step inside backward: each parameter is updated once its gradient is there, which is freed.

    optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic", exp_avg="int8", exp_avg_sq="int8")
    Release(optimizer)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()   # updates every parameter, and holds no gradient
        optimizer.step()                     # ends the step

A step then holds one tensor's gradient at a time, which spares 2 bytes a parameter in bf16. Its bits are
those of the ordinary step, for noise is keyed by a parameter's place and not by when it is written.

What needs all gradients before the first update can't be had, see RELEASE_RULES. Every backward pass
that reaches a parameter updates it: set requires_grad=False on a net that only passes gradients on. Learning
rates are read in backward, so a schedule moves them before it or after `optimizer.step()`.
"""

import operator

import torch

from ..errors import Refused
from ..optimizers.build import all_ours
from ..precision import clip_factor
from ..rules import Rule
from ..telemetry import report_of_run
from .part import ONE_RANK, Part

# gradients that come all at once, or are to be summed, come too late for an update within backward
OF_A_COMPILED_NET = (
    "the backward pass of a compiled net gives all gradients at once, so --grad_release would free none "
    "early: drop it, or --compile"
)
OF_SEVERAL_PROCESSES = (
    "--grad_release updates before several processes have summed their gradients: use one process, or drop it"
)

# ---- Release -----------------------------------------------------------------------------------------------


class Release:
    """Lets `optimizer` update within backward. optimizer: a subclass of Rounded, or several joined.

    gradient: parameter -> what it is updated by, p.grad or something made of it. clip: largest norm of a
    tensor's gradient, 0 for none. Raises Refused for other optimisers; during backward for a second gradient
    of a parameter in one step, for a sparse one, and where several processes would have to sum them.

    updated: the parameters that this step's backward has updated. hold: whether backward leaves gradients for
    `optimizer.step()`, the ordinary step; set it between steps, as a Watch does for those it looks at.
    watched: a telemetry.StepReport that is shown each write, or None; norms and nonfinite: {parameter: 0-dim
    tensor}, while there is one. before: functions that are called once a step, before the first write.
    """

    def __init__(self, optimizer, gradient=None, clip=0.0, before=()):
        if getattr(optimizer, "released", None) is not None:
            raise Refused("this optimiser updates within backward already: remove() that Release first")
        self.optimizer, self.clip, self.before = optimizer, clip, before
        self.gradient = gradient or operator.attrgetter("grad")
        self.hold, self.watched = False, None
        self.updated, self.norms, self.nonfinite = set(), {}, {}
        self.parts = all_ours(optimizer, "--grad_release")
        self.pieces = {part: ([], []) for part in self.parts}  # what buckets held, and their pieces
        self.items = {}  # parameter -> (its optimiser, what that carries out), of this step
        self.handles = [optimizer.register_step_post_hook(self._ended)]
        self.heard = set()  # parameters whose gradients come here
        for part in self.parts:
            for p in part.all_params():
                if p.requires_grad:
                    self.heard.add(p)
                    self.handles.append(p.register_post_accumulate_grad_hook(self._update))
        optimizer.released = self

    def remove(self):
        """Back to the ordinary step."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.optimizer.released = [], None

    @torch.no_grad()
    def _update(self, p):
        if self.hold:
            return
        if p in self.updated:
            two = f"a parameter of shape {tuple(p.shape)} got a second gradient in one step"
            ways = "do one backward pass a step, then step(), and checkpoint with use_reentrant=False"
            raise Refused(f"grad_release: {two}, and was updated by the first: {ways}")
        if not self.items:
            self._begin()
        part, item = self.items[p]
        grads = {p: self.gradient(p)}
        part.check_tensors(item.piece, [grads[p]])
        p.grad = None
        scale = self._look(part, p, grads)
        part.carry_out(item, grads.get, scale)
        self.updated.add(p)

    def _begin(self):
        """One table for all of the step's updates, whichever of them come."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_world_size() > 1:
                raise Refused(OF_SEVERAL_PROCESSES)
        for wait in self.before:
            wait()
        for part in self.parts:
            for item in part.plan(self._pieces_of(part)):
                self.items[item.piece.params[0]] = part, item

    def _pieces_of(self, part):
        """[(index of the group, bucket of one parameter)] of an optimiser. A state that was assigned since
        the last step lies elsewhere, whoever took it.
        """
        buckets = [(index, bucket) for index, bucket in part._buckets if bucket.begun]
        for _, bucket in buckets:
            part.adopt_state(bucket)
        held, pieces = self.pieces[part]
        now = [bucket.given for _, bucket in buckets]
        if list(map(id, now)) != list(map(id, held)):
            pieces = []
            for index, bucket in buckets:
                pieces += [(index, piece) for piece in part.tensor_by_tensor(bucket)]
            self.pieces[part] = now, pieces
        return pieces

    def _look(self, part, p, grads):
        """What multiplies the gradient of p. Telemetry looks at the write that is to come."""
        scale = 1.0
        if self.clip or self.watched is not None:
            norms = ONE_RANK.norms_of(grads)
        if self.clip:
            scale = {p: clip_factor(norms[p], self.clip)}
        if self.watched is not None:
            self.norms.update(norms)
            self.nonfinite[p] = (~grads[p].isfinite()).sum()
            self.watched.add(grads, scale)
            part.announce({}, 1.0)  # which would hold the gradient
        return scale

    def _ended(self, *_):
        for part in self.parts:
            if any(p.grad is not None and p not in self.heard for p in part.all_params()):
                late = "a parameter came to the optimiser, or was thawed, after grad_release was set up"
                raise Refused(f"{late}, and would keep its gradient: make it once all parameters are there")
        self.updated, self.norms, self.nonfinite = set(), {}, {}
        self.items, self.watched = {}, None


# ---- A run that releases -----------------------------------------------------------------------------------

RELEASE_RULES = (
    Rule(
        lambda run: run.options.accumulate > 1,
        lambda run: (
            f"--accumulate {run.options.accumulate} sums what --grad_release frees at once: "
            "use --accumulate 1 with the --batch_size that fits, or drop --grad_release"
        ),
    ),
    Rule(
        lambda run: run.options.clip_grad,
        lambda run: (
            f"--clip_grad {run.options.clip_grad:g} needs the norm of all gradients before the first "
            "update, and --grad_release holds one at a time: use --clip_tensor "
            f"{run.options.clip_grad:g}, which bounds each tensor's by itself, or --clip_grad 0"
        ),
    ),
    Rule(
        lambda run: run.recipe.loss_scale == "dynamic",
        "--fp16 skips a step in which a gradient overflows, and --grad_release has updated by then: use "
        "--bf16, or --fp16 --set loss_scale=none",
    ),
    Rule(lambda run: run.compiled, OF_A_COMPILED_NET),
    Rule(lambda run: run.processes > 1, OF_SEVERAL_PROCESSES),
    Rule(
        lambda run: run.options.states_on != "device",
        "--grad_release steps within backward, where it is not known which moments come next "
        "(--states_on cpu): leave one out; --opt8bit or --opt4bit makes moments small",
    ),
)


class Released(Part):
    """Each parameter is updated by what all other parts make of its gradient alone."""

    rules = RELEASE_RULES
    frees_gradients = True

    def ready(self, run):
        clip = run.options.clip_tensor
        self.release = Release(run.optimizer, self._gradient, clip, run.before_writing)

    def _gradient(self, p):
        grads = {p: p.grad}
        for part in self.run.parts:
            if part is not self:
                grads = part.gradients(grads)
        return grads[p]

    def check_forward(self, wrapper):
        if hasattr(wrapper, "_orig_mod"):
            raise Refused(OF_A_COMPILED_NET)
        if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
            raise Refused(OF_SEVERAL_PROCESSES)

    @property
    def has_written(self):
        return bool(self.release.updated)

    def observe(self, on):
        self.release.watched = report_of_run(self.run) if on else None

    def measure(self, measures):
        if not self.has_written:
            return
        if self.release.watched is None:
            late = "grad_release has freed the gradients that step(measure=True) should measure"
            raise Refused(f"{late}: call observe(True) before the step's first forward")
        measures.writes = self.release.watched
        measures.norms.update(self.release.norms)
        measures.nonfinite.update(self.release.nonfinite)

    def rows(self, parameters, generation_dtype):
        largest = 0
        for p in self.run.params:
            itemsize = 4 if self.run.keeps_sums else p.element_size()
            largest = max(largest, p.numel() * itemsize)
        why = (
            "freed within backward, where each is used (--grad_release): of one tensor at a time, "
            f"at most {largest / 2**20:.2f} MiB"
        )
        return {"grads": {"bytes": 0.0, "why": why}, "accumulate": {"bytes": 0.0}}
