"""What the doctor asks of a task that generates images: what timesteps, sampler and path lose.

generation.py says which figure is a finding. Every figure compares the run's own precision with an exact one.
"""

import torch

from lowprec.watch.verdicts import Finding
from tasks.condition import given

TIMESTEPS = 1000  # of a whole way from the noise to an image, or back
LEARNT_ERROR = 0.001  # mean squared error up to which the perfect net below counts as what a loss asks for


@torch.no_grad()
def examine(task, exam):
    """Judge the sites of `task`, a Generation, on held-out images. exam: a doctor.Examination."""
    batch = images, targets = task.heldout_images(exam.device, exam.images)
    labels, condition = task.labels_and_condition(images, targets)
    task.space.probe(exam, task.recipe)
    clean = task.space.mean(images)
    exact = exam.task(timesteps="fp32", **task.guard)
    rng = exam.rng(1)
    net = given(exam.net(), condition)
    noise = rng.normal(*clean.shape)

    spy = Spy()
    exact.errors(spy, clean, labels, noise, exact.draw_timesteps(rng, len(clean)))
    noised, t = spy.x, spy.t
    probe_timesteps(exam, exact, net, noised, t, labels)

    # as many images as the doctor has time for, two at least
    steps = task.config.sample_steps
    affordable = exam.work / (exam.pixels * steps)
    count = int(max(2, min(len(noised), affordable)))
    if condition is not None:
        net = given(net, condition[:count])
    start = labels[:count], rng.normal(count, *noised.shape[1:]), steps
    reference = exam.task(sampler="fp32", **task.guard).sample(net, *start)
    change = exam.relative(exam.task(**task.guard).sample(net, *start), reference)
    text = f"{count} images drawn in {steps} steps differ by {change:.1%} from those of an fp32 state"
    exam.judge("sampler", change, text, "--set sampler=fp32")
    task.probe_schedule(exam, net, batch, start, reference)
    if task.noised and task.answer:
        probe_path(task, exam, clean, labels, noise)


def probe_timesteps(exam, exact, net, x, t, labels):
    """Judge what timesteps become on their way to the net. exact: the task with fp32 timesteps; x [B, C, H,
    W]: images noised at timesteps t [B].
    """
    every = torch.arange(TIMESTEPS, dtype=torch.float32, device=x.device)
    spy = Spy()
    first = x[:1].expand(TIMESTEPS, -1, -1, -1)
    exam.task().predict(spy, first, every, labels[:1].expand(TIMESTEPS))
    distinct = spy.t.unique().numel()
    off = float((spy.t.double() - every.double()).abs().max())
    received = exam.task().predict(net, x, t.float(), labels)
    change = exam.relative(received, exact.predict(net, x, t.float(), labels))
    text = (
        f"0..{TIMESTEPS - 1} reach the net as {distinct} values, up to {off:g} off; its prediction changes "
        f"by {change:.2%}"
    )
    exam.judge("timesteps", change, text, "--set timesteps=fp32", certain=distinct < TIMESTEPS)


def probe_path(task, exam, images, labels, noise):
    """Judge whether the sampler goes from noise to the images [B, C, H, W] where its net answers perfectly,
    and by states that are as noisy as their timesteps say. No weights are needed, and no training.
    """
    exact = exam.task(timesteps="fp32", sampler="fp32", **task.guard)
    n = len(images)
    t = exact.bin_timesteps((torch.arange(n, device=images.device) + 0.5) / n)
    net = Perfect(exact, images, noise)
    learnt = exact.errors(net, images, labels, noise, t, weighted=False).mean()
    if not learnt < LEARNT_ERROR:  # so is NaN
        text = "not known whether the sampler leads to clean images: this loss learns something else"
        exam.found.append(Finding("path", "note", text, "look at the pictures"))
        return
    net = Perfect(exact, images, noise)
    start = exact.noised(images, noise, exact.bin_timesteps(torch.ones(n, device=images.device)))
    end = exact.sample(net, labels, start, task.config.sample_steps)
    missed = exam.relative(noise + end - images, noise)
    text = (
        f"with a perfect net the sampler's states are up to {net.off:.0%} of the noise away from where "
        f"their timesteps say, and its images {missed:.0%} from the true ones"
    )
    remedy = "let each step of `sample` go where `noised` puts the next timestep, from noise to 0"
    exam.judge("path", max(net.off, missed), text, remedy)


class Spy:
    """A net that keeps what it was called with last, and answers with zeros."""

    def __call__(self, x, t, labels):
        self.x = x
        self.t = t
        return torch.zeros_like(x)


class Perfect:
    """A net that answers what leads from anywhere to `images` [B, C, H, W]. `off`: by how much, at most, what
    it was called with was noisier or cleaner than its timestep says, in units of `noise`.
    """

    def __init__(self, task, images, noise):
        self.task = task
        self.images = images
        self.size = noise.square().mean().sqrt()
        self.off = 0.0

    def __call__(self, x, t, labels):
        images = self.images.repeat(len(x) // len(self.images), 1, 1, 1)  # guidance asks twice at once
        t = t.float().clamp(0, TIMESTEPS)
        zeros = torch.zeros_like(images)
        added = x.float() - self.task.noised(images, zeros, t)
        sigma = self.task.noised(zeros, zeros + 1, t).clamp_min(1e-6)
        found = added.square().mean().sqrt() / self.size
        wanted = sigma.square().mean().sqrt()
        self.off = max(self.off, float((found - wanted).abs()))
        return self.task.answer(images, added / sigma)
