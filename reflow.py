"""Reflow (arXiv 2209.03003, section 2.2): pairs of noise and a teacher's image of it, from which a student learns straight paths.

    python train.py --name teacher
    python train.py --task reflow --teacher runs/teacher --sample_steps 1

A rectified flow trained on independent pairs of image and noise has curved paths, since where two straight lines cross
it can only follow their mean; few large steps leave such a path. Its own pairs, noise and the image that its ODE leads
to, cross less: a second flow trained on them (2-rectified flow; in InstaFlow, arXiv 2309.06380, the step that makes
one-step generation of large images work) has nearly straight ones, and one step lands near their end. A student can be
a teacher in turn.

`--pairs` images are drawn once, in `--teacher_steps` steps (half as many, about twice their error, which should stay far
below the student's), from the teacher's averaged weights in the teacher's own recipe and with its own guidance, each
label equally often. They are kept in the run's folder with a hash of those weights; while they are there a resumed run
reads them. The student starts from the same weights, in its own recipe. Once trained it needs neither pairs nor teacher.
"""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from tqdm import tqdm

from data import Tensors
from precision import hash64
from strategies import Rng
from trainer import RunError, Trainer, read_checkpoint, write_atomically

PAIRS = "pairs.safetensors"
# What both must agree in: the student starts from the teacher's weights, and the same numbers must mean the same velocity.
SHARED = ("model", "size", "data", "image_size", "velocity")
ITSELF = {"size": "tiny", "data": "digits"}  # what a flag that was not given stands for


def _place(spec):
    """'folder:/a/photos/' -> 'folder:photos': a data set may have moved since the teacher was trained."""
    kind, colon, path = spec.partition(":")
    return kind + colon + os.path.basename(os.path.normpath(path)) if colon else spec


def read_pairs(folder):
    """The training set of a student's folder: fp32 [B, 2C, H, W], clean images and their noise, with labels int64 [B]."""
    with safe_open(Path(folder) / PAIRS, "pt") as file:
        pairs = {name: file.get_tensor(name) for name in ("images", "noise", "labels")}
    return Tensors(torch.cat([pairs["images"], pairs["noise"]], dim=1), pairs["labels"], pairs["images"].shape[-1])


class Teacher:
    """A trained rectified flow, read from a checkpoint or run folder, for `Trainer(config, teacher=...)`.

    flags: what the user gave; values of SHARED among them must be the teacher's. defaults: of all flags, for those that
    are younger than the checkpoint. `shared` holds the teacher's values of SHARED, for the student's config. Raises
    RunError before anything is written or drawn, and what Trainer raises when the teacher's own recipe or data can't be
    had here.
    """

    def __init__(self, path, flags, defaults):
        self.path, self.checkpoint = path, read_checkpoint(path)
        checkpoint = self.checkpoint
        trained = {**defaults, **checkpoint["config"]}
        if trained["task"] not in ("rflow", "reflow"):
            raise RunError(f"--teacher {path} was trained with --task {trained['task']}: reflow straightens the paths of a rectified flow; "
                           f"give a checkpoint of --task rflow or reflow")
        self.shared = {flag: trained[flag] for flag in SHARED}
        for flag in ("model", "size", "data", "velocity"):
            given, its = (values.get(flag) or ITSELF.get(flag) for values in (flags, self.shared))
            if flag in flags and (_place(given) != _place(its) if flag == "data" else given != its):
                self._refuse(flag, its, given)
        self.shared["data"] = flags.get("data", self.shared["data"])
        here = {flag: flags.get(flag, defaults[flag]) for flag in ("device", "threads", "runs")}
        # Only the average is read: neither the optimiser nor the batches that made it have to be possible here.
        unused = {"optimizer": "adamw", "average": [], "accumulate": 1, "batch_size": int(os.environ.get("WORLD_SIZE", 1)), "export": ""}
        self.run = Trainer({**trained, **self.shared, **here, **unused}, dry=True, draws=True)
        if flags.get("image_size") not in (None, self.run.data.image_size):
            self._refuse("image_size", self.run.data.image_size, flags["image_size"])
        self.model, self.average = checkpoint["precision"]["model"], checkpoint["precision"]["averages"]["ema"]
        shapes = {name: p.shape for name, p in self.run.precision.named_params}
        if {name: value.shape for name, value in self.average["shadow"].items()} != shapes:
            raise RunError(f"--teacher {path}: its weights don't fit {self.run.data.name} as it is now ({self.run.data}): "
                           f"give the data it was trained on")
        digest = hashlib.sha256()
        for name, value in sorted(self.average["shadow"].items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
        self.fingerprint = digest.hexdigest()

    def _refuse(self, flag, its, given):
        raise RunError(f"--{flag} {given} differs from the teacher's {its}: the student starts from the weights of "
                       f"{self.path}; drop --{flag}")

    def check(self, folder):
        """Raises RunError if `folder` holds pairs that can't be read, or another teacher's."""
        path = Path(folder) / PAIRS
        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as file:
                drawn_by = (file.metadata() or {}).get("teacher")
        except (SafetensorError, OSError):
            raise RunError(f"{path} is cut short or holds no pairs: remove it, and the same command draws them again") from None
        if drawn_by != self.fingerprint:
            raise RunError(f"{path} holds the pairs of another teacher than {self.path} holds now: give that teacher, or another --name")

    def prepare(self, run):
        """The pairs of a student's Trainer as its training set: fp32 [B, 2C, H, W], clean images and their noise, with
        labels int64 [B]; from the run's folder, or drawn and written there. Raises RunError when the images are not
        finite or can't be written."""
        path = run.folder / PAIRS
        if not path.exists():
            pairs = self._draw(run)
            if run.rank == 0:
                content = safetensors_bytes(pairs, metadata={"teacher": self.fingerprint, "steps": str(run.config["teacher_steps"])})
                write_atomically(path, lambda file: file.write(content))
            if run.world > 1:
                dist.barrier()  # before the others read it
        self.run = self.checkpoint = self.model = self.average = None  # no memory of theirs is needed in training
        return read_pairs(run.folder)

    def _draw(self, run):
        c, data, teacher = run.config, run.data, self.run
        noise = Rng(hash64(c["seed"], 6) >> 1).normal(c["pairs"], data.channels, data.image_size, data.image_size)
        labels = torch.arange(c["pairs"]) % max(1, data.num_classes)
        images = torch.zeros_like(noise, device=run.device)
        tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32  # of the process: each Precision sets its recipe's
        precision = teacher._precision(run.device)
        precision.model.load_state_dict(self.model)
        precision.ema.load_state_dict(self.average)
        net = precision.generator()
        batches = range(0, c["pairs"], c["sample_batch"])[run.rank :: run.world]
        with tqdm(total=c["pairs"], unit="pair", disable=run.rank > 0, dynamic_ncols=True, desc="the teacher's pairs") as bar:
            for start in batches:
                part = slice(start, start + c["sample_batch"])
                images[part] = teacher.strategy.sample(net, labels[part].to(run.device), noise[part].to(run.device), c["teacher_steps"])
                bar.update(min(len(images[part]) * run.world, c["pairs"] - bar.n))
        torch.set_float32_matmul_precision(tf32[0])
        torch.backends.cudnn.allow_tf32 = tf32[1]
        if run.world > 1:
            dist.all_reduce(images)  # each image is drawn by one rank and zero on the others: the sum is exact
        if not images.isfinite().all():
            raise RunError(f"--teacher {self.path} draws images that are not finite: train it again, or draw from it with "
                           f"--sample to see them")
        return {"images": images.cpu(), "noise": noise, "labels": labels}
