"""What the tasks on clips share: their data (clip_sets.py), scores (video_metrics.py) and pictures.

Training reads the clips alone; the masks score. steve.py and slotcontrast.py hold the two tasks, slots.py the
encoder that both have.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler

from harness.flags import Flag, natural, of_size, several
from lowprec.errors import Refused
from lowprec.rules import Rule
from tasks import video_metrics
from tasks.clip_sets import SPRITE_CLIPS, SPRITE_SIDE, folder, sprites
from tasks.data import refuse_ways_to_read_files
from tasks.task import Task, picture

# one colour a slot, the same in all frames
SLOT_COLOURS = torch.tensor(
    [
        [60, 60, 70],
        [230, 80, 60],
        [60, 160, 230],
        [240, 200, 60],
        [90, 200, 120],
        [180, 100, 220],
        [250, 150, 200],
        [130, 90, 50],
        [120, 220, 220],
        [170, 170, 170],
        [20, 90, 160],
        [190, 230, 90],
        [120, 20, 60],
        [250, 250, 250],
        [10, 120, 90],
    ]
)
PICTURED_CLIPS = 6  # clips in a picture
CLIPS_AT_ONCE = 16  # clips that go through the net at once


class Video(Task):
    """A task on clips. Its net gives a dict with "masks" [B, T, K, h, w], the share of each slot in a pixel;
    `shown` says what else is drawn, and `errors` what else is scored.
    """

    flags = (
        Flag(
            "frames",
            4,
            "frames a clip, of --data sprites or cut from those of a folder",
            type=several,
        ),
        Flag(
            "slots",
            None,
            "how many parts a clip is divided into at most (default: 15 for base, 5 for smaller ones)",
            type=several,
            fits=True,
        ),
        Flag("clips", SPRITE_CLIPS, "clips of --data sprites to train on", type=natural),
    )

    rules = (
        Rule(
            lambda c: c.image_size and c.image_size < 16,
            lambda c: f"--image_size {c.image_size} is too small for clips: give at least 16",
        ),
        Rule(
            lambda c: c.clips != SPRITE_CLIPS and c.data not in (None, "sprites"),
            lambda c: f"--clips {c.clips} is of --data sprites, and a folder has its own: drop it",
        ),
    )
    sizes = {}  # {--size: what the net is built of}, each with `slots`

    @property
    def size(self):
        """What --size stands for."""
        return of_size(self.config.model, self.config.size or "tiny", self.sizes)

    @classmethod
    def sizes_of_nets(cls):
        return {cls.implied["model"]: cls.sizes}

    @property
    def slots(self):
        return self.config.slots or self.size.slots

    @classmethod
    def load(cls, config):
        """Videos. The image size is 24 for sprites and 64 for folders, or --image_size. Raises Refused."""
        c = config
        word, _, where = (c.data or cls.implied["data"]).partition(":")
        if word == "sprites" and not where:
            refuse_ways_to_read_files(c)
            return sprites(c.image_size or SPRITE_SIDE, c.frames, c.seed, c.clips)
        if word == "folder" and where:
            refuse_ways_to_read_files(c, ("white",))
            return folder(where, c.image_size or 64, c.frames, c.white)
        raise Refused(
            f"--data {c.data}: {c.task} learns from clips; use --data sprites, or folder:PATH with "
            "PATH/CLIP/FRAME.png"
        )

    def example(self):
        d = self.data
        return (torch.empty(2, d.frames, 3, d.image_size, d.image_size, device="meta"),), {}

    def see(self, model, clips, rng):
        """What the net says of clips [B, T, 3, H, W] when it is asked and not trained: a dict."""
        raise NotImplementedError(f"{type(self).__name__}.see")

    def shown(self, clips, seen):
        """A picture of the reconstruction, [B, T, 3, H, W] in [-1, 1]."""
        raise NotImplementedError(f"{type(self).__name__}.shown")

    def errors(self, clips, seen):
        """{name: mean over the batch} of what is scored without masks."""
        raise NotImplementedError(f"{type(self).__name__}.errors")

    @torch.no_grad()
    def preview(self, model, rng):
        """A row a held-out clip: its frames, their reconstruction, and the slot that takes each pixel."""
        count = min(PICTURED_CLIPS, len(self.data.heldout))
        clips = self.data.heldout[list(range(count))][0]
        seen = self.see(model, clips.to(rng.device), rng)
        drawn = self.shown(clips, {name: value.float().cpu() for name, value in seen.items()})
        slots = segmented(seen["masks"], clips.shape[-1]).cpu()  # [B, T, H, W]
        coloured = SLOT_COLOURS[slots % len(SLOT_COLOURS)].permute(0, 1, 4, 2, 3) / 127.5 - 1
        columns = torch.cat([clips, drawn, coloured], 1)  # [B, 3 T, 3, H, W]
        return {"slots": picture(columns.flatten(0, 1), columns.shape[1])}

    @torch.no_grad()
    def evaluate(self, model, rng):
        """(scores, pictures) of all held-out clips."""
        return self.validate(model, rng), self.preview(model, rng)

    @torch.no_grad()
    def validate(self, model, rng):
        """{name: score} of the held-out clips: `loss` and the errors, and where there are masks those of
        video_metrics.py.
        """
        heldout = self.data.heldout
        sums = {}
        truth, found = [], []
        for index in BatchSampler(range(len(heldout)), CLIPS_AT_ONCE, False):
            batch = heldout[index]
            clips = batch[0].to(rng.device)
            seen = self.see(model, clips, rng)
            for name, value in self.errors(clips, seen).items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(clips)
            if self.data.masks:
                truth.append(batch[1])
                found.append(segmented(seen["masks"], clips.shape[-1]).cpu())
        result = {name: total / len(heldout) for name, total in sums.items()}
        if truth:
            result.update(video_metrics.video_scores(torch.cat(truth), torch.cat(found)))
        return result

    def reference(self):
        """{"floor": scores of the true masks, "ceiling": of upright stripes, one a slot}."""
        if not self.data.masks:
            return {}
        masks = self.data.heldout[list(range(len(self.data.heldout)))][1]
        stripes = torch.arange(masks.shape[-1]) * self.slots // masks.shape[-1]
        return {
            "floor": video_metrics.video_scores(masks, masks),
            "ceiling": video_metrics.video_scores(masks, stripes.expand_as(masks)),
        }


def segmented(masks, side):
    """int64 [B, T, side, side]: the slot that has the largest share of a pixel. masks [B, T, K, h, w]."""
    large = F.interpolate(masks.flatten(0, 1).float(), (side, side), mode="bilinear", align_corners=False)
    return large.argmax(1).unflatten(0, masks.shape[:2])
