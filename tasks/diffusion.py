"""The two kinds of generation, each with its loss and its sampler.

    rflow    rectified flow (arXiv 2209.03003) with MONAI's RFlowScheduler: x_t = (1-s) clean + s noise,
             velocity = clean - noise
    ddpm     noise prediction (arXiv 2006.11239) with min-SNR weighting (arXiv 2303.09556) and DDIM sampling
             (arXiv 2010.02502)

`model` is a Precision or View: called like a net, it returns fp32 (the loss site's dtype).
"""

import torch
import torch.nn.functional as F

from harness.flags import Flag, amount
from lowprec.machine import monai_alone
from lowprec.recipes import Site
from lowprec.rounding import DTYPE_OF_NAME
from lowprec.rules import Rule
from tasks.generation import TIMESTEPS, Generation

# relative error of 1 - alphas_cumprod: 1e-4 at t = 0, which fp32 forms from a number next to 1 to 1e-3
SCHEDULER_ERROR = 0.01


class RFlow(Generation):
    """Rectified flow. t in [0, TIMESTEPS]: 0 is clean, TIMESTEPS noise."""

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
        with monai_alone():
            from monai.networks.schedulers import RFlowScheduler  # it takes seconds to import

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


def _nearest_divisor(steps):
    """Of TIMESTEPS."""
    divisors = [n for n in range(1, TIMESTEPS + 1) if TIMESTEPS % n == 0]
    return min(divisors, key=lambda n: abs(n - steps))


class DDPM(Generation):
    """Noise prediction at whole timesteps t in [0, TIMESTEPS), drawn by DDIM."""

    flags = (
        Flag("min_snr", 5.0, "gamma of min-SNR weighting for ddpm, 0 for none", "generation", type=amount),
    )
    sites = {**Generation.sites, "scheduler": SCHEDULER}
    rules = (
        *Generation.rules,
        Rule(
            lambda c: TIMESTEPS % c.sample_steps,
            lambda c: f"--sample_steps {c.sample_steps}: MONAI's DDIM steps are {TIMESTEPS} // steps apart, "
            f"so ddpm needs a divisor; use {_nearest_divisor(c.sample_steps)}",
        ),
    )
    limits = {
        **Generation.limits,
        # relative RMS change of the images drawn with the noise schedule as one use leaves it
        "scheduler": (0.002, 0.1),
    }
    guard = {"scheduler": "fp32"}

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        with monai_alone():
            from monai.networks.schedulers import DDIMScheduler

        # One object adds noise and samples, as MONAI's tutorials do. Its add_noise casts alphas_cumprod to
        # the dtype of the images and keeps it so: one call with bf16 images leaves sigma = 0 at the first
        # timesteps and NaN in every later sample, in whatever precision.
        self.scheduler = DDIMScheduler(num_train_timesteps=TIMESTEPS, clip_sample=self.space.bounded)
        # ours, for weights: out of reach of that cast
        self.schedule = self.scheduler.alphas_cumprod.double().clone()

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
            weight = snr.clamp(max=gamma) / snr
            error = error * weight.to(error.dtype)[:, None, None, None]
        return error

    def clean(self, x, noise, t):
        """(the clean images that a noise in x [B, C, H, W] stands for, a weight [B] for each).

        x_t = a clean + sigma noise: clean = (x_t - sigma noise) / a, where a falls to 0.006. The weight a
        takes that division back: the term's gradient goes with sigma, as rectified flow's goes with s.
        """
        alpha = self.schedule.to(t.device)[t][:, None, None, None]  # [B, 1, 1, 1], a squared
        a = alpha.sqrt().float()
        sigma = (1 - alpha).sqrt().float()
        return (x - sigma * noise) / a, a.flatten()

    def advance(self, noise, t, x, following):
        return self.scheduler.step(noise, t, x)[0].to(x.dtype)

    def probe_schedule(self, exam, net, batch, start, reference):
        used = exam.task(sampler="fp32")
        # as training uses it: MONAI's add_noise may leave its buffer in the dtype of the images
        used.loss(net, batch, exam.rng(2), 0)
        drawn = used.sample(net, *start)
        buffer = used.scheduler.alphas_cumprod
        before = 1 - used.schedule  # sigma squared
        after = 1 - buffer.double().cpu()
        error = float(((after - before) / before).abs().max())
        zeros = int((after == 0).sum())
        change = exam.relative(drawn, reference)
        not_finite = float((~drawn.isfinite()).float().mean())
        dtype = next(name for name, dtype in DTYPE_OF_NAME.items() if dtype == buffer.dtype)
        text = (
            f"after one add_noise alphas_cumprod is {dtype}: sigma^2 is up to {error:.0%} off and 0 at "
            f"{zeros} timesteps, where a sampler divides by it; images drawn in {start[-1]} steps differ by "
            f"{change:.1%}, {not_finite:.0%} of their pixels are not finite"
        )
        exam.judge("scheduler", change, text, "--set scheduler=fp32", certain=error > SCHEDULER_ERROR)
