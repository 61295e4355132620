"""A run that updates within backward: see optimizers/release.py."""

from ..errors import Refused
from ..optimizers.release import Release
from ..rules import RELEASE_ALONE_RULES, Rule, check_wrapped
from ..telemetry import report_of_run
from .part import Part

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
    *RELEASE_ALONE_RULES,
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
        check_wrapped(wrapper)

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
