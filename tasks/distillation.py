"""Progressive distillation (arXiv 2202.00512): a student learns to go in one step as far as its teacher goes
in two. One run is one round; round after round the steps halve.

    python train.py --name teacher
    python train.py --task distill --teacher runs/teacher --name half4      from 8 steps to 4
    python train.py --task distill --teacher runs/half4 --name half2        4 to 2
    python train.py --task distill --teacher runs/half2 --name half1        2 to 1
"""

import torch
import torch.nn.functional as F

from lowprec.errors import Refused
from lowprec.rules import Rule
from tasks.diffusion import RFlow
from tasks.generation import BINS, TIMESTEPS
from tasks.students import FLOWS, NEEDS_TEACHER, OWN_TIMES, TEACHER, TEACHER_STEPS, Student

FIRST_STEPS = 8  # of a teacher that draws in any number


class Distill(Student):
    """One round of progressive distillation. A batch is images and labels, as for rflow.

    A rectified flow (or a reflow student) teaches in --teacher_steps steps; a distilled student teaches in
    the steps that it draws in. The student starts from its teacher's weights and is trained at the times of
    its own steps alone. From x_t, a noised training image, the teacher takes two Euler steps to x_e; the
    student's velocity at t should lead there in one:

        velocity = (x_e - x_t) / (s_t - s_e)        s = t / 1000, velocities towards the clean image

    Its squared error is averaged as in rectified flow. Each step of training asks the teacher twice.
    """

    rules = (
        NEEDS_TEACHER,
        *Student.rules,
        OWN_TIMES,
        Rule(
            lambda c: c.teacher_steps % 2,
            lambda c: f"--teacher_steps {c.teacher_steps}: two of the teacher's steps make one of the "
            f"student's; use {c.teacher_steps + 1}",
        ),
        Rule(
            lambda c: c.perceptual,
            "--perceptual compares clean images, and --task distill learns where its teacher goes: drop "
            "--perceptual",
        ),
    )

    flags = (TEACHER, TEACHER_STEPS)
    teachers = (*FLOWS, "distill")

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        times = super().times(config.teacher_steps)  # the teacher's, from the noise on
        grid = torch.tensor([*times, 0.0]).flip(0)  # ascending: end, middle, start, middle, start ...
        # each [student's steps]
        self.ends = grid[:-2:2]
        self.middles = grid[1:-1:2]
        self.starts = grid[2::2].contiguous()

    # -- before the run

    @classmethod
    def own_defaults(cls):
        return {**super().own_defaults(), "teacher_steps": FIRST_STEPS, "sample_steps": FIRST_STEPS // 2}

    @classmethod
    def settle_steps(cls, teacher, given):
        """The student draws in half its teacher's steps; a distilled teacher's are known."""
        steps = given.get("teacher_steps")
        if teacher.config.task == "distill":
            known = teacher.config.teacher_steps // 2
            if steps and steps != known:
                raise Refused(
                    f"--teacher_steps {steps}: {teacher.path} was distilled to draw in {known}; drop "
                    "--teacher_steps"
                )
            if known == 1:
                raise Refused(
                    f"--teacher {teacher.path} draws in one step: there is nothing left to halve; give a "
                    "teacher of two steps or more"
                )
            steps = known
        steps = steps or FIRST_STEPS
        return {"teacher_steps": steps, "sample_steps": given.get("sample_steps", max(1, steps // 2))}

    def train_set(self, run):
        self.bring_teacher(run)
        return super().train_set(run)

    # -- training

    def draw_timesteps(self, rng, n):
        return self.bin_timesteps(rng.uniform(n))

    def bin_timesteps(self, fraction):
        """The student's own times [B] for fractions [B] of all times, from 0 to below 1."""
        index = (fraction * len(self.starts)).long().clamp(max=len(self.starts) - 1)
        return self.starts.to(fraction.device)[index]

    def wanted(self, x, labels, t):
        """The velocity fp32 [B, C, H, W] that leads from x at the student's times t [B] to where two of the
        teacher's steps lead.
        """
        index = torch.searchsorted(self.starts.to(t.device), t)
        middle = self.middles.to(t.device)[index]
        end = self.ends.to(t.device)[index]
        halfway = self.teach(x, labels, t, middle)
        there = self.teach(halfway, labels, middle, end)
        return self.sign * (there - x) / ((t - end) / TIMESTEPS)[:, None, None, None]

    def errors(self, model, images, labels, noise, t, weighted=True):
        """Squared errors [B, C, H, W] of velocities at the student's times t [B], against the teacher's."""
        x = self.scheduler.add_noise(images, noise, t)
        velocity = self.predict(model, x, t, labels)
        return F.mse_loss(velocity, self.wanted(x, labels, t).to(velocity.dtype), reduction="none")

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean squared distance from the velocities of images and noise, at the nearest of the
        student's times: what rectified flow learns, and not the student's aim. It needs no teacher.
        """
        bins = []
        for k in range(BINS):
            t = self.bin_timesteps((k + rng.uniform(len(images))) / BINS)
            noise = rng.normal(*images.shape)
            bins.append(RFlow.errors(self, model, images, labels, noise, t).float().mean().item())
        return bins

    # -- generation

    def times(self, steps):
        """The student's own times where it draws in its own number of steps."""
        times = super().times(steps)  # and the scheduler is told how many
        if steps != len(self.starts):
            return times
        return [int(t) for t in self.starts.flip(0)]
