"""Reflow (arXiv 2209.03003, section 2.2): pairs of noise and a teacher's image of it, from which a student
learns straight paths.

    python train.py --name teacher
    python train.py --task reflow --teacher runs/teacher --sample_steps 1

The pairs are drawn once and kept in the run's folder with a hash of the teacher's weights; a resumed run
reads them there. Once trained the student needs neither pairs nor teacher, and can be a teacher in turn.
"""

import torch
from safetensors.torch import save as safetensors_bytes
from tqdm import tqdm

from harness.files import read_tensors, write_atomically
from harness.flags import Flag, natural
from lowprec.errors import Refused
from lowprec.rounding import Stream, stream
from lowprec.rules import check_machine
from tasks.generation import BINS
from tasks.image_sets import Tensors
from tasks.students import NEEDS_TEACHER, TEACHER, TEACHER_STEPS, Student
from tasks.task import Rng

PAIRS_FILE = "pairs.safetensors"


def read_pairs(path, data, count):
    """(the training set in a file of pairs: fp32 [B, 2 C, H, W], clean images and their noise, with labels
    int64 [B]; the fingerprint of the teacher that drew them). Raises Refused for pairs of other data.
    """
    pairs, facts = read_tensors(path)
    images = (torch.float32, (count, data.channels, data.image_size, data.image_size))
    wanted = {"images": images, "noise": images, "labels": (torch.int64, (count,))}
    good = {name: (t.dtype, tuple(t.shape)) for name, t in pairs.items()} == wanted
    if good:
        both = torch.cat([pairs["images"], pairs["noise"]], dim=1)
        known = pairs["labels"].ge(0) & pairs["labels"].lt(max(1, data.num_classes))
        good = bool(both.isfinite().all() and known.all())
    if not good:
        raise Refused(
            f"{path} holds no {count} pairs of {data.name}: remove it, and the same command draws them again"
        )
    return Tensors(both, pairs["labels"], data.image_size), facts.get("teacher")


class Reflow(Student):
    """Rectified flow whose noise comes with its image: a training batch is [B, 2 C, H, W], clean images and
    their noise.

    A rectified flow trained on independent pairs of image and noise has curved paths: where two straight
    lines cross, it can only follow their mean. Few large steps leave such a path. Its own pairs, noise and
    the image that its ODE leads to, cross less. A second flow trained on them (2-rectified flow; in
    InstaFlow, arXiv 2309.06380, the step that makes one-step generation of large images work) has nearly
    straight paths, and one step lands near their end.

    The teacher draws `--pairs` images in `--teacher_steps` steps, from its averaged weights, in its own
    recipe and with its own guidance, each label equally often. Half as many steps make about twice the
    error, which should stay far below the student's.
    """

    flags = (
        TEACHER,
        Flag(
            "pairs",
            8192,
            "for --task reflow: pairs of noise and image that the teacher draws before training",
            "generation",
            type=natural,
        ),
        TEACHER_STEPS,
    )
    rules = (NEEDS_TEACHER, *Student.rules)
    teacher = None  # read by `start`, forgotten once its pairs are drawn

    # -- the teacher

    def start(self, run):
        self.teacher = teacher = self.read_teacher(run)
        path = run.folder / PAIRS_FILE
        if path.exists():
            teacher.check_known(read_pairs(path, self.data, self.config.pairs)[1], path)
        else:
            check_machine(teacher.recipe, run.device)
        return None if run.folder.has_checkpoint else teacher.checkpoint

    # -- the pairs

    def train_count(self):
        return self.config.pairs

    def train_set(self, run):
        """The pairs in the run's folder; drawn and written there by a run that trains and has none yet."""
        path = run.folder / PAIRS_FILE
        if run.draws and not path.exists():
            raise Refused(
                f"--diagnose takes a student some steps further on its teacher's pairs, and {path} is not "
                "there: give the run's own folder"
            )
        if not path.exists():
            pairs = self._draw(run)
            if run.ranks.main:
                facts = {"teacher": self.teacher.fingerprint, "steps": str(self.config.teacher_steps)}
                content = safetensors_bytes(pairs, metadata=facts)
                write_atomically(path, lambda file: file.write(content))
            run.ranks.wait()  # before the others read it
        self.teacher = None  # training needs no memory of it
        return read_pairs(path, self.data, self.config.pairs)[0]

    def _draw(self, run):
        """{"images", "noise", "labels"} of all pairs, on the CPU; each rank draws its share of the images."""
        c = self.config
        d = self.data
        rng = Rng(stream(c.seed, Stream.PAIRS))
        noise = rng.normal(c.pairs, d.channels, d.image_size, d.image_size)  # [pairs, C, H, W]
        labels = torch.arange(c.pairs) % max(1, d.num_classes)
        images = torch.zeros_like(noise, device=run.device)
        task, net = self.teacher.generator(d, run.device)
        rank, world = run.ranks.rank, run.ranks.world
        bar = tqdm(
            total=c.pairs, unit="pair", disable=rank > 0, dynamic_ncols=True, desc="the teacher's pairs"
        )
        with bar:
            for start in range(0, c.pairs, c.sample_batch)[rank::world]:
                part = slice(start, start + c.sample_batch)
                part_labels = labels[part].to(run.device)
                part_noise = noise[part].to(run.device)
                images[part] = task.sample(net, part_labels, part_noise, c.teacher_steps)
                bar.update(min(len(images[part]) * world, c.pairs - bar.n))
        run.ranks.sum(images)  # each image is drawn by one rank and zero on the others: the sum is exact
        if not images.isfinite().all():
            raise Refused(
                f"--teacher {self.teacher.path} draws images that are not finite: train it again, or draw "
                "from it with --sample to see them"
            )
        return {"images": images.cpu(), "noise": noise, "labels": labels}

    # -- the loss

    def with_noise(self, images, rng):
        return images.chunk(2, dim=1)  # [B, 2 C, H, W] -> 2 x [B, C, H, W]

    @torch.no_grad()
    def loss_by_timestep(self, model, images, labels, rng):
        """[BINS] mean loss on pairs of noise and the model's own image of it, of as many labels as `images`
        has.

        It is 0 where the paths are straight (the straightness of arXiv 2209.03003, section 2.2). Real
        images with independent noise, the measure for rflow, are not what this task learns; nor does this
        need the teacher.
        """
        noise = rng.normal(*images.shape)
        own = self.sample(model, labels, noise, self.config.sample_steps)
        bins = []
        for k in range(BINS):
            t = self.bin_timesteps((k + rng.uniform(len(own))) / BINS)
            bins.append(self.errors(model, own, labels, noise, t).float().mean().item())
        return bins
