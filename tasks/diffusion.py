"""The tasks that generate images: what they share, rectified flow, and DDPM.

    rflow    rectified flow (arXiv 2209.03003) with MONAI's RFlowScheduler: x_t = (1-s) clean + s noise,
             velocity = clean - noise
    ddpm     noise prediction (arXiv 2006.11239) with min-SNR weighting (arXiv 2303.09556) and DDIM sampling
             (arXiv 2010.02502)

`model` is a Precision or View: called like a net, it returns fp32 (the loss site's dtype). Three
sites are these tasks' own: in which dtype timesteps, sampler state and noise schedule live. Under every
flag they are fp32; bf16 is there for experiments that show what it breaks.
"""

import torch
import torch.nn.functional as F

from harness.flags import Flag, amount, several, share, thousand
from lowprec.errors import Refused
from lowprec.machine import without
from lowprec.recipes import Site
from lowprec.rounding import DTYPES
from lowprec.watch.verdicts import Finding
from tasks import latent_space, metrics, perceptual, vae
from tasks.task import Task, picture, two_of_each

TIMESTEPS = 1000
BINS = 10
PREVIEW_ROWS = 6  # pictures a label in a preview
HELDOUT = 256  # held-out images that loss_by_timestep is taken on
# relative error of 1 - alphas_cumprod: 1e-4 at t = 0, which fp32 forms from a number next to 1 to 1e-3
SCHEDULE = 0.01

SITES = {
    "timesteps": Site(
        ("fp32", "bf16"),
        {"fp32": "bf16 holds only 507 of the values 0..999", "bf16": "0..999 collapse to 507 values"},
        {
            "bf16": "timesteps=bf16: 0..999 become 507 distinct values, up to 2 apart; "
            "use --set timesteps=fp32 (default)"
        },
    ),
    "sampler": Site(
        ("fp32", "bf16"),
        {"fp32": "x + v dt: small steps need the bits", "bf16": "x + v dt loses dt below half an ulp of x"},
        {
            "bf16": "sampler=bf16: x + v dt rounds at every step; with 100 steps a constant velocity misses "
            "its end by several percent; use --set sampler=fp32 (default)"
        },
    ),
}


class Generation(Task):
    """What rectified flow and DDPM share: label dropout, guidance, the loss by timestep, sampling and its
    scores.
    """

    flags = (
        Flag(
            "label_dropout",
            0.1,
            "share of labels dropped, for classifier-free guidance",
            "generation",
            type=share,
        ),
        Flag(
            "guidance",
            1.0,
            "classifier-free guidance weight; 1 is none and costs half",
            "generation",
            kind="draw",
            type=amount,
        ),
        Flag("sample_steps", 50, "sampling steps", "generation", kind="draw", type=thousand),
        Flag(
            "samples",
            1000,
            "images drawn for the final scores",
            "generation",
            kind="extent",
            type=several,
            may=("sample",),
        ),
        perceptual.PERCEPTUAL,
        *latent_space.FLAGS,
    )
    sites = {**SITES, "perceptual": perceptual.SITE, **latent_space.SITES}
    limits = {
        # relative RMS change of the prediction; the images suffer when it nears the net's own error. Any
        # timestep lost is a finding as well
        "timesteps": (0.001, 0.1),
        # relative RMS change of the images drawn. An fp32 state gives 0 exactly; 0.2 % is a fifth of a grey
        # level in eight bits
        "sampler": (0.002, 0.1),
        # how far the sampler's states are from where their timesteps say, in units of the noise. A right one
        # gives 0.00, one that noises anew the spread of its noise; one that stands still 1, a wrong sign 2
        "path": (0.15, 0.5),
        **vae.LIMITS,
    }
    implied = {"size": "tiny", "data": "digits"}
    unprinted = ("trace", "loss_by_timestep")
    in_latents = True  # whether the task takes --vae
    guard = {}  # sites of one kind of generation that the doctor keeps exact where it asks of another
    answer = noised = None  # of tasks that don't tell them, the sampler's path isn't examined

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        self._yardstick = self._reference = self._perceptual = None
        self.space = latent_space.space(data, recipe, config)  # what the net sees: pixels, or latents

    @classmethod
    def settle(cls, table, given):
        return latent_space.settle(cls, table, given)

    @classmethod
    def check(cls, config):
        perceptual.check(config)
        latent_space.check(config, cls.in_latents)
        if config.guidance != 1 and config.label_dropout == 0:
            untrained = "reads the net without a label, which --label_dropout 0 never trains"
            raise Refused(f"--guidance {config.guidance:g} {untrained}: train with --label_dropout 0.1")

    @classmethod
    def load(cls, config):
        return two_of_each(super().load(config))

    def nets(self):
        from models import (
            GENERATIVE,
        )  # MONAI takes seconds to import: --help and a mistyped flag don't wait for it

        return self.space.nets(GENERATIVE)

    def example(self):
        images = torch.empty(2, *self.space.shape, device="meta")
        return (images, images.new_empty(2), images.new_empty(2, dtype=torch.int64)), {}

    def train_set(self, run):
        return self.space.train_set(self.data.train, run.device)

    # -- training

    def loss(self, model, batch, rng, step):
        """Mean loss of images [B, C, H, W] in [-1, 1] with labels [B]. Timestep, noise and label dropout
        are drawn from `rng`.
        """
        images, labels = batch
        n = len(images)
        dropped = rng.uniform(n) < self.config.label_dropout
        labels = torch.where(dropped, self.data.num_classes, labels)
        images, noise = self.with_noise(self.space.draw(images, rng), rng)
        t = self.draw_timesteps(rng, n)
        if not self.config.perceptual:
            return self.errors(model, images, labels, noise, t).mean()
        seen = Seen(model)
        loss = self.errors(seen, images, labels, noise, t).mean()
        clean, weight = self.clean(seen.x.float(), seen.answer.float(), t)
        return loss + self.config.perceptual * (weight * self.perceptual_distance(clean, images)).mean()

    def with_noise(self, images, rng):
        """(images, noise) [B, C, H, W] to train on; here the two are independent."""
        return images, rng.normal(*images.shape)

    def perceptual_distance(self, a, b):
        """fp32 [B]: perceptual distance of images [B, C, H, W], in the dtype of its site."""
        if self._perceptual is None:
            net, *_ = self._real(a.device)
            self._perceptual = perceptual.Perceptual(net, self.recipe.dtype("perceptual")).to(a.device)
        return self._perceptual(a, b)

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean unweighted loss in equal bins of the timestep, on the same noise at every call with
        the same rng.
        """
        bins = []
        for k in range(BINS):
            t = self.bin_timesteps((k + rng.uniform(len(images))) / BINS)
            errors = self.errors(model, images, labels, rng.normal(*images.shape), t, weighted=False)
            bins.append(errors.float().mean().item())
        return bins

    def predict(self, model, x, t, labels, guidance=1.0):
        """The net's prediction for x [B, C, H, W] at timesteps t [B], with classifier-free guidance: null +
        w (label - null).

        arXiv 2207.12598. A weight of 1 needs no second half.
        """
        t = t.to(self.recipe.dtype("timesteps"))
        if guidance == 1.0:
            return model(x, t, labels)
        null = torch.full_like(labels, self.data.num_classes)
        both = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))  # [2 B, C, H, W]
        with_label, without = both.chunk(2)
        return without + guidance * (with_label - without)

    # -- generation

    @torch.no_grad()
    def sample(self, model, labels, noise, steps, trace=None):
        """Images [B, C, H, W] fp32 from noise [B, C, H, W] in `steps` steps. trace: a list that receives a
        dict of ranges a step.
        """
        x = noise.to(self.recipe.dtype("sampler"))
        times = self.times(steps)
        for t, following in zip(times, times[1:] + [0], strict=True):
            at = torch.full((len(x),), float(t), device=x.device)
            prediction = self.predict(model, x.float(), at, labels, self.config.guidance).to(x.dtype)
            if trace is not None:
                trace.append({"t": t, **_range("prediction", prediction), **_range("x", x)})
            x = self.advance(prediction, t, x, following)
        if trace is not None:
            trace.append({"t": 0, **_range("x", x)})
        return x.float()

    def preview(self, model, rng):
        """A column a label, the same noise whenever the rng is the same."""
        d = self.data
        columns = max(1, d.num_classes) if d.num_classes <= 20 else 10
        labels = torch.arange(columns).repeat(PREVIEW_ROWS).to(rng.device)
        noise = rng.normal(len(labels), *self.space.shape)
        drawn = self.sample(model, labels * (d.num_classes > 0), noise, self.config.sample_steps)
        return {"samples": picture(self.space.decode(drawn), columns)}

    def evaluate(self, model, rng):
        """(scores, pictures) of config.samples images against held-out real ones.

        Scores also hold loss_by_timestep and the trace of ranges of the first images.
        """
        c, d = self.config, self.data
        labels = self._wanted(c.samples, rng.device)
        images, trace, first = [], [], None
        # drawn at once: torch's generator goes on elsewhere after a count that is no multiple of 16
        noises = rng.normal(c.samples, *self.space.shape, device="cpu").split(c.sample_batch)
        for part, noise in zip(labels.split(c.sample_batch), noises, strict=True):
            drawn = self.sample(model, part, noise.to(rng.device), c.sample_steps, None if images else trace)
            first = drawn if first is None else first
            images.append(self.space.decode(drawn).cpu())
        images = torch.cat(images)  # [samples, C, H, W]
        net, _, _, real, _ = self._real(rng.device)
        wanted = labels.cpu() if d.num_classes else None
        scores = metrics.generation_scores(net, images, wanted, real)
        held_images, held_labels = self._heldout(rng.device)
        scores.update(self.space.scores(first, held_images))
        clean = self.space.mean(held_images)
        scores["loss_by_timestep"] = self.loss_by_timestep(model, clean, held_labels, rng)
        scores["trace"] = trace
        return scores, {"samples": picture(images[: 10 * PREVIEW_ROWS], 10)}

    def reference(self):
        """{"floor": scores of real training images, "ceiling": scores of noise}, against the held-out ones,
        with the labels of the samples.
        """
        if self._reference is None:
            wanted = self._wanted(self.config.samples, "cpu")
            self._reference = metrics.reference_scores(*self._real()[:4], wanted=wanted)
        return self._reference

    def _real(self, device="cpu"):
        """(feature net, training images, their labels or None, held-out images and labels): read once, for
        all scores of a run.
        """
        if self._yardstick is None:
            c, d = self.config, self.data
            device = device if torch.device(device).type == "cuda" else "cpu"
            net = metrics.yardstick(d, f"{c.runs}/feature_nets").to(device)
            images, labels = metrics.subset(d.train, 2 * c.samples)  # enough of each class
            self._yardstick = net, images, labels if d.num_classes else None, *metrics.subset(d.heldout)
        return self._yardstick

    def _wanted(self, count, device):
        """int64 [count]: labels to draw, in the held-out images' proportions."""
        *_, labels = self._real(device)
        return metrics.labels_like(labels, self.data.num_classes, count).to(device)

    def _heldout(self, device, count=HELDOUT):
        images, labels = metrics.subset(self.data.heldout, count)
        return images.to(device), labels.to(device)

    # -- what the sites lose

    @torch.no_grad()
    def probes(self, exam):
        """The net's prediction at timesteps as it receives them, and images drawn with the run's sampler
        state, against exact ones.
        """
        images, labels = self._heldout(exam.device, exam.images)
        self.space.probe(exam, self.recipe)
        batch, images = (images, labels), self.space.mean(images)
        exact, rng, net = exam.task(timesteps="fp32", **self.guard), exam.rng(1), exam.net()
        noise, spy = rng.normal(*images.shape), _Spy()
        exact.errors(spy, images, labels, noise, exact.draw_timesteps(rng, len(images)))
        x, t = spy.x, spy.t  # noised images and their timesteps

        every = torch.arange(TIMESTEPS, dtype=torch.float32, device=x.device)
        exam.task().predict(spy, x[:1].expand(TIMESTEPS, -1, -1, -1), every, labels[:1].expand(TIMESTEPS))
        distinct, off = spy.t.unique().numel(), float((spy.t.double() - every.double()).abs().max())
        received = exam.task().predict(net, x, t.float(), labels)
        change = exam.relative(received, exact.predict(net, x, t.float(), labels))
        text = f"0..999 reach the net as {distinct} values, up to {off:g} off"
        text += f"; its prediction changes by {change:.2%}"
        exam.judge("timesteps", change, text, "--set timesteps=fp32", certain=distinct < TIMESTEPS)

        steps = self.config.sample_steps
        count = int(max(2, min(len(x), exam.work / (exam.pixels * steps))))
        start = labels[:count], rng.normal(count, *x.shape[1:]), steps
        reference = exam.task(sampler="fp32", **self.guard).sample(net, *start)
        change = exam.relative(exam.task(**self.guard).sample(net, *start), reference)
        text = f"{count} images drawn in {steps} steps differ by {change:.1%} from those of an fp32 state"
        exam.judge("sampler", change, text, "--set sampler=fp32")
        self.probe_schedule(exam, net, batch, start, reference)
        if self.noised and self.answer:
            self.probe_path(exam, images, labels, noise)

    def probe_path(self, exam, images, labels, noise):
        """Whether the sampler goes from noise to the images [B, C, H, W] where its net answers perfectly, and
        by states that are as noisy as their timesteps say. No weights are needed, and no training.
        """
        task, n = exam.task(timesteps="fp32", sampler="fp32", **self.guard), len(images)
        t = task.bin_timesteps((torch.arange(n, device=images.device) + 0.5) / n)
        learnt = task.errors(_Perfect(task, images, noise), images, labels, noise, t, weighted=False).mean()
        if not learnt < 0.001:
            text = "not known whether the sampler leads to clean images: this loss learns something else"
            exam.found.append(Finding("path", "note", text, "look at the pictures"))
            return
        net = _Perfect(task, images, noise)
        start = task.noised(images, noise, task.bin_timesteps(torch.ones(n, device=images.device)))
        end = task.sample(net, labels, start, self.config.sample_steps)
        missed = exam.relative(noise + end - images, noise)
        text = (
            f"with a perfect net the sampler's states are up to {net.off:.0%} of the noise away from where "
            f"their timesteps say, and its images {missed:.0%} from the true ones"
        )
        remedy = "let each step of `sample` go where `noised` puts the next timestep, from noise to 0"
        exam.judge("path", max(net.off, missed), text, remedy)

    def probe_schedule(self, exam, net, batch, start, reference):
        """What using the noise schedule does to it; here it holds nothing that could change.

        start: labels, noise and steps of the images `reference`, drawn in fp32.
        """


class Seen:
    """A net that keeps what it was called with last, x [B, C, H, W], and what it answered."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x, t, labels):
        self.x, self.answer = x, self.model(x, t, labels)
        return self.answer


class _Spy:
    """A net that keeps what it was called with last, and answers with zeros."""

    def __call__(self, x, t, labels):
        self.x, self.t = x, t
        return torch.zeros_like(x)


class _Perfect:
    """A net that answers what leads from anywhere to `images` [B, C, H, W]. `off`: by how much, at most, what
    it was called with was noisier or cleaner than its timestep says, in units of `noise`.
    """

    def __init__(self, task, images, noise):
        self.task, self.images, self.size, self.off = task, images, noise.square().mean().sqrt(), 0.0

    def __call__(self, x, t, labels):
        images = self.images.repeat(len(x) // len(self.images), 1, 1, 1)  # guidance asks twice at once
        nothing, t = torch.zeros_like(images), t.float().clamp(0, TIMESTEPS)
        added = x.float() - self.task.noised(images, nothing, t)
        sigma = self.task.noised(nothing, nothing + 1, t).clamp_min(1e-6)
        held = added.square().mean().sqrt() / self.size
        self.off = max(self.off, float((held - sigma.square().mean().sqrt()).abs()))
        return self.task.answer(images, added / sigma)


def _range(name, x):
    x = x.float()
    return {f"{name}_min": x.min().item(), f"{name}_max": x.max().item(), f"{name}_mean": x.mean().item()}


class RFlow(Generation):
    flags = (
        Flag(
            "timestep_sampling",
            "uniform",
            "how training draws rectified-flow timesteps",
            "generation",
            choices=("uniform", "logit-normal"),
        ),
        Flag(
            "velocity",
            "clean-noise",
            "sign of the rectified-flow velocity, in training and sampling alike",
            "generation",
            choices=("clean-noise", "noise-clean"),
            fits=True,
        ),
    )

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        with without("transformers"):
            from monai.networks.schedulers import RFlowScheduler

        # whole steps when sampling; training draws its own
        self.scheduler = RFlowScheduler(TIMESTEPS, use_discrete_timesteps=True)
        self.sign = 1.0 if config.velocity == "clean-noise" else -1.0

    def draw_timesteps(self, rng, n):
        if self.config.timestep_sampling == "logit-normal":  # arXiv 2403.03206, section 3.1
            return torch.sigmoid(rng.normal(n)) * TIMESTEPS
        return rng.uniform(n) * TIMESTEPS

    def bin_timesteps(self, fraction):
        return fraction * TIMESTEPS

    def times(self, steps):
        self.scheduler.set_timesteps(steps)
        return self.scheduler.timesteps.tolist()

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared velocity errors [B, C, H, W] at timesteps t [B] in [0, TIMESTEPS); 0 is clean. All
        timesteps weigh alike.
        """
        t = t.to(self.recipe.dtype("timesteps"))
        velocity = self.predict(model, self.noised(images, noise, t), t, labels)
        return F.mse_loss(velocity, self.answer(images, noise).to(velocity.dtype), reduction="none")

    def noised(self, images, noise, t):
        return self.scheduler.add_noise(images, noise, t)

    def answer(self, images, noise):
        """What a perfect net says about a point between images and noise: the velocity."""
        return self.sign * (images - noise)

    def clean(self, x, velocity, t):
        """(the clean images that a velocity at x [B, C, H, W] stands for, a weight [B] for each).

        x_s = (1-s) clean + s noise and velocity = clean - noise: clean = x_s + s velocity.
        """
        s = t.to(self.recipe.dtype("timesteps")).float() / TIMESTEPS
        return x + s[:, None, None, None] * self.sign * velocity, torch.ones_like(s)

    def advance(self, velocity, t, x, following):
        return self.scheduler.step(self.sign * velocity, t, x, following)[0]


SCHEDULER = Site(
    ("fp32", "bf16"),
    {
        "fp32": "noise schedule is only ever called with fp32 samples",
        "bf16": "unguarded: one bf16 call turns MONAI's schedule buffers into bf16",
    },
    {
        "bf16": "scheduler=bf16: MONAI keeps alphas_cumprod in the dtype of its last call; in bf16 the "
        "first timesteps have sigma = 0; use --set scheduler=fp32 (default)"
    },
)


class DDPM(Generation):
    flags = (
        Flag("min_snr", 5.0, "gamma of min-SNR weighting for ddpm, 0 for none", "generation", type=amount),
    )
    sites = {**Generation.sites, "scheduler": SCHEDULER}
    limits = {
        **Generation.limits,
        # relative RMS change of the images drawn with the noise schedule as one use leaves it
        "scheduler": (0.002, 0.1),
    }
    guard = {"scheduler": "fp32"}

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        with without("transformers"):
            from monai.networks.schedulers import DDIMScheduler

        # One object adds noise and samples, as MONAI's tutorials do. Its add_noise casts alphas_cumprod to
        # the dtype of the images and keeps it so: one call with bf16 images leaves sigma = 0 at the first
        # timesteps and NaN in every later sample, in whatever precision.
        self.scheduler = DDIMScheduler(num_train_timesteps=TIMESTEPS, clip_sample=self.space.bounded)
        # ours, for weights: out of reach of that cast
        self.schedule = self.scheduler.alphas_cumprod.double().clone()

    @classmethod
    def check(cls, config):
        super().check(config)
        steps = config.sample_steps
        if TIMESTEPS % steps == 0:
            return
        divisors = [n for n in range(1, TIMESTEPS + 1) if TIMESTEPS % n == 0]
        near = min(divisors, key=lambda n: abs(n - steps))
        raise Refused(
            f"--sample_steps {steps}: MONAI's DDIM steps are {TIMESTEPS} // steps apart, so ddpm needs a "
            f"divisor; use {near}"
        )

    def draw_timesteps(self, rng, n):
        return self.bin_timesteps(rng.uniform(n))

    def bin_timesteps(self, fraction):
        return (fraction * TIMESTEPS).long().clamp(max=TIMESTEPS - 1)

    def times(self, steps):
        # MONAI spaces its timesteps from 999 to 0, but each of its steps goes from t to t - 1000 // steps;
        # these agree with the steps
        self.scheduler.set_timesteps(steps)
        stride = TIMESTEPS // steps
        return list(range(TIMESTEPS - 1, -1, -stride))

    def add_noise(self, images, noise, t):
        """x_t [B, C, H, W] fp32. scheduler=fp32 hands MONAI fp32 images only; scheduler=bf16 shows what a
        bf16 call does to its buffers.
        """
        dtype = self.recipe.dtype("scheduler")
        return self.scheduler.add_noise(images.to(dtype), noise.to(dtype), t).float()

    def noised(self, images, noise, t):
        return self.add_noise(images, noise, t.long().clamp(max=TIMESTEPS - 1))

    def answer(self, images, noise):
        return noise

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared noise errors [B, C, H, W] at integer timesteps t [B], weighted by min(SNR, gamma) / SNR
        unless gamma is 0.
        """
        predicted = self.predict(model, self.add_noise(images, noise, t), t, labels)
        error = F.mse_loss(predicted, noise.to(predicted.dtype), reduction="none")
        gamma = self.config.min_snr
        if weighted and gamma:
            alpha = self.schedule.to(t.device)[t]  # [B]
            snr = alpha / (1 - alpha)
            error = error * (snr.clamp(max=gamma) / snr).to(error.dtype)[:, None, None, None]
        return error

    def clean(self, x, noise, t):
        """(the clean images that a noise in x [B, C, H, W] stands for, a weight [B] for each).

        x_t = a clean + sigma noise: clean = (x_t - sigma noise) / a, where a falls to 0.006. The weight a
        takes that division back: the term's gradient goes with sigma, as rectified flow's goes with s.
        """
        alpha = self.schedule.to(t.device)[t][:, None, None, None]  # [B, 1, 1, 1], a squared
        clean = (x - (1 - alpha).sqrt().float() * noise) / alpha.sqrt().float()
        return clean, alpha.sqrt().float().flatten()

    def advance(self, noise, t, x, following):
        return self.scheduler.step(noise, t, x)[0].to(x.dtype)

    def probe_schedule(self, exam, net, batch, start, reference):
        used = exam.task(sampler="fp32")
        # as training uses it: MONAI's add_noise may leave its buffer in the dtype of the images
        used.loss(net, batch, exam.rng(2), 0)
        drawn = used.sample(net, *start)
        buffer = used.scheduler.alphas_cumprod
        before, after = 1 - used.schedule, 1 - buffer.double().cpu()
        error, zeros = float(((after - before) / before).abs().max()), int((after == 0).sum())
        change, nan = exam.relative(drawn, reference), float((~drawn.isfinite()).float().mean())
        dtype = next(name for name, dtype in DTYPES.items() if dtype == buffer.dtype)
        text = (
            f"after one add_noise alphas_cumprod is {dtype}: sigma^2 is up to {error:.0%} off and 0 at "
            f"{zeros} timesteps, where a sampler divides by it; images drawn in {start[-1]} steps differ by "
            f"{change:.1%}, {nan:.0%} of their pixels are not finite"
        )
        exam.judge("scheduler", change, text, "--set scheduler=fp32", certain=error > SCHEDULE)
