"""Consistency models (arXiv 2303.01469): from any point of a noising path straight to its clean end, so that
one step draws an image.

    python train.py --task consistency                              from data alone
    python train.py --task consistency --teacher runs/teacher       along the paths of a trained flow

    x_s = (1-s) clean + s noise            rectified flow's path, s = t / 1000
    f(x, s) = x + s v(x, s)                the net gives v; f(x, 0) = x holds exactly (c_skip = 1, c_out = s)
    loss = distance(f(x_s, s), g(x_r, r))  two neighbouring points of one path, s > r; g: an average of f
"""

import torch

from harness.flags import Flag, count, fraction, natural
from lowprec.errors import Refused
from lowprec.recipes import Site
from lowprec.rounding import Stream, stream
from tasks.generation import TIMESTEPS
from tasks.students import OWN_TIMES, TEACHER, Student

MOST_INTERVALS = 1280  # s1 of arXiv 2310.14189, table 1
HUBER_C = 0.00054  # c of its section 3.3, for a root mean square over pixels

CONSISTENCY_SITES = {
    "target": Site(
        ("fp32", "bf16"),
        {
            "fp32": "average that the loss learns from; a net of bf16 weights reads it rounded",
            "bf16": "average that the loss learns from, in 8 significant bits",
        },
        {
            "bf16": "target=bf16: written to nearest, an entry moves only while its weight is more than half "
            "an ulp over 1-target_decay away (40 % of it at 0.99): use --set target=fp32 (default) or "
            "target_update=stochastic"
        },
    ),
    "target_update": Site(("nearest", "stochastic"), {"stochastic": "a bf16 target moves in expectation"}),
}


class Consistency(Student):
    """A consistency model on rectified flow's paths. A batch is images and labels, as for rflow.

    The loss learns from a target: the same net with an average of the weights, and no gradient. An average
    that trails behind carries the truth from s = 0, where it is known, step by step to s = 1. It is read at
    every step of training, so an average that loses its updates spoils what is learnt, and not samples alone.
    The sites `target` and `target_update` say how it is held. The average is one of the run's: checkpoints
    and resume hold it.
    """

    flags = (
        TEACHER,
        Flag(
            "target_decay",
            0.95,
            "for --task consistency: decay of the averaged weights that the loss learns from; 0 for the "
            "weights themselves",
            "generation",
            type=fraction,
        ),
        Flag(
            "intervals",
            10,
            "for --task consistency: into how many intervals time is cut, at first",
            "generation",
            type=natural,
        ),
        Flag(
            "double_every",
            500,
            f"for --task consistency: steps after which the intervals are halved, up to {MOST_INTERVALS}; 0 "
            "for never",
            "generation",
            type=count,
        ),
    )
    sites = {**Student.sites, **CONSISTENCY_SITES}
    rules = (*Student.rules, OWN_TIMES)
    _target = None  # the Target of the run, made when it is asked for first
    _first = None  # the noise of the images that are being drawn

    @classmethod
    def own_defaults(cls):
        return {**super().own_defaults(), "sample_steps": 2}

    # -- the target

    def averages(self):
        r = self.recipe
        if r["target"] == "fp32" and r["target_update"] == "stochastic":
            raise Refused(
                "target_update=stochastic with target=fp32: nothing is rounded; add --set target=bf16 or "
                "drop it"
            )
        return {"target": f"{self.config.target_decay:g}:{r['target']}:{r['target_update']}"}

    def target(self, model):
        """The net with the averaged weights that `model`, the run, holds now; `model` itself where it holds
        none, as when a frozen net is examined.
        """
        spec = self.averages()["target"]
        if spec not in getattr(model, "averages", {}):
            return model
        if self._target is None or self._target.run is not model:
            self._target = Target(model, spec)
        return self._target

    # -- training

    def train_set(self, run):
        if self.config.teacher:
            self.bring_teacher(run)
        return super().train_set(run)

    def intervals(self, step):
        """Into how many intervals time is cut at a step, a function of the step alone."""
        c = self.config
        doubled = step // c.double_every if c.double_every else 0
        return max(c.intervals, min(MOST_INTERVALS, c.intervals * 2 ** min(doubled, 20)))

    def loss(self, model, batch, rng, step):
        """Mean distance of neighbouring points' ends, of images [B, C, H, W] with labels [B]."""
        images, labels = batch
        n = len(images)
        intervals = self.intervals(step)
        dropped = rng.uniform(n) < self.config.label_dropout
        labels = torch.where(dropped, self.data.num_classes, labels)
        noise = rng.normal(*images.shape)
        k = (rng.uniform(n) * intervals).floor()
        earlier = k * TIMESTEPS / intervals  # [B]
        later = (k + 1) * TIMESTEPS / intervals  # [B], nearer to the noise
        x = self.scheduler.add_noise(images, noise, later)
        if self.live:
            nearer = self.teach(x, labels, later, earlier)
        else:
            nearer = self.scheduler.add_noise(images, noise, earlier)
        with torch.no_grad():
            wanted = self.end(self.target(model), nearer, labels, earlier)
        found = self.end(model, x, labels, later)
        distance = pseudo_huber(found, wanted)
        if self.config.perceptual:
            distance = distance + self.config.perceptual * self.perceptual_distance(found, wanted)
        return intervals * distance.mean()

    def end(self, model, x, labels, t):
        """f(x, t) fp32 [B, C, H, W]: the clean end of the path through x [B, C, H, W] at timesteps t [B]."""
        return self.clean(x, self.predict(model, x, t, labels).float(), t)[0]

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared distances [B, C, H, W] of ends from the images at timesteps t [B]: 0 at t = 0, and what one
        step misses of the image that was noised elsewhere.
        """
        end = self.end(model, self.scheduler.add_noise(images, noise, t), labels, t)
        return (end - images).square()

    # -- generation

    def sample(self, model, labels, noise, steps, trace=None):
        """Images [B, C, H, W] fp32 from noise [B, C, H, W] (arXiv 2303.01469, algorithm 1): an end, noised
        again to an earlier time with fresh noise, its end ... That noise is a function of the image's own.
        """
        self._first = noise
        return super().sample(model, labels, noise, steps, trace)

    def advance(self, velocity, t, x, following):
        end = x + t / TIMESTEPS * self.sign * velocity
        if not following:
            return end
        s = following / TIMESTEPS
        return (1 - s) * end + s * fresh_noise(self._first, following).to(x.dtype)


class Target:
    """A frozen net that holds an average of a run's weights as it is now. run: a Precision; spec: the
    average's name.
    """

    def __init__(self, run, spec):
        self.run = run
        self.spec = spec
        self.step = None  # that the average was at when it was read

    def __call__(self, *args):
        average = self.run.averages[self.spec]
        if self.step != average.step:
            self._read(average)
            self.step = average.step
        return self.view(*args)

    def _read(self, average):
        if self.step is None or self.run.methods:  # a method may change layers on their way into a frozen net
            self.view = self.run.frozen(self.spec, generation="compute")
            self.held = [(p, average.shadow[name]) for name, p in self.view.net.named_parameters()]
            return
        average.catch_up()  # of --average_on cpu, which counts a step before the numbers are there
        own = [p for p, _ in self.held]
        averaged = [shadow for _, shadow in self.held]
        torch._foreach_copy_(own, averaged)


def pseudo_huber(a, b):
    """fp32 [B]: sqrt(mean square + c^2) - c of the differences of a and b [B, C, H, W], arXiv 2310.14189."""
    return ((a - b).square().mean((1, 2, 3)) + HUBER_C**2).sqrt() - HUBER_C


def fresh_noise(noise, number):
    """Standard normal [B, C, H, W] fp32, a function of each image's own noise and of `number`: alike in
    batches of any size.
    """
    drawn = []
    for one in noise.float().cpu():
        word = int(one.flatten()[:2].contiguous().view(torch.int64))
        draw = torch.Generator().manual_seed(stream(word, Stream.RENOISE, number))
        drawn.append(torch.randn(one.shape, generator=draw))
    return torch.stack(drawn).to(noise.device)
