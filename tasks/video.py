"""Clips with the masks of their objects, and what the tasks on them share: data, scores and pictures.

    --data sprites          moving discs, squares and triangles drawn here, with exact masks (default)
    --data folder:PATH      PATH/<clip>/<frame>.png, and PATH/masks/<clip>/<frame>.png where there are masks

A batch is (clips fp32 [B, T, 3, H, W] in [-1, 1], masks int64 [B, T, H, W]): 0 is the background, each other
number an object, the same in all frames of a clip. Training reads the clips alone; the masks score.

steve.py and slotcontrast.py hold the two tasks, slots.py the encoder that both have.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from harness.flags import Flag, natural, several
from lowprec.errors import Refused
from tasks import folders, video_metrics
from tasks.data import square, square_mask
from tasks.task import Task, picture

# ---- Sprites -----------------------------------------------------------------------------------------------

SHAPES = ("disc", "square", "triangle")
CLIPS, HELDOUT = 1024, 64
SIDE = 24  # pixels, where --image_size does not say
SPRITES = (2, 4)  # fewest and most in a clip
# Half a side, as a share of the image's: 6 to 10 pixels across at 24. Masks are found on a grid of half the
# resolution, on which smaller ones would be a cell or two.
HALF_SIDE = (1 / 8, 1 / 5)
SPEED = 1 / 12  # most, as a share of the image's side a frame, along each axis
TEXTURE = 0.1  # standard deviation of the background around its grey, of a range of 2


@dataclass
class Scene:
    """What is drawn, for N clips of up to S sprites; a later sprite lies in front of an earlier one.

    place, speed [N, S, 2]: centre (x, y) in pixels in the first frame, and pixels a frame; half [N, S]: half
    a side, in pixels; shape [N, S]: index of SHAPES; colour [N, S, 3] in [-1, 1]; there [N, S]: whether the
    clip has this sprite; ground [N, 3, H, W]: the background.
    """

    place: torch.Tensor
    speed: torch.Tensor
    half: torch.Tensor
    shape: torch.Tensor
    colour: torch.Tensor
    there: torch.Tensor
    ground: torch.Tensor

    @classmethod
    def drawn(cls, clips, side, generator):
        """A Scene of `clips` clips of side x side pixels, a function of the generator's state."""
        n, s = clips, SPRITES[1]

        def uniform(*shape, low=0.0, high=1.0):
            return low + (high - low) * torch.rand(n, *shape, generator=generator)

        half = uniform(s, low=side * HALF_SIDE[0], high=side * HALF_SIDE[1])
        room = side - 2 * half  # what the centre may move in
        place = half[..., None] + uniform(s, 2) * room[..., None]
        speed = uniform(s, 2, low=-side * SPEED, high=side * SPEED)
        shape = (uniform(s) * len(SHAPES)).long()
        # Hues of one clip lie evenly around the circle, so that its sprites differ.
        hue = (uniform(1) + (torch.arange(s) + uniform(s, low=-0.25, high=0.25)) / s) % 1
        colour = _colour(hue, uniform(s, low=0.7, high=1.0)) * 2 - 1
        count = SPRITES[0] + (uniform() * (SPRITES[1] - SPRITES[0] + 1)).long()
        there = torch.arange(s) < count[:, None]
        return cls(place, speed, half, shape, colour, there, _texture(n, side, generator))

    def at(self, t):
        """Centres [N, S, 2] in frame t. A sprite turns round where it touches a border."""
        low = self.half[..., None]
        room = self.ground.shape[-1] - 2 * low
        travelled = (self.place - low + self.speed * t) % (2 * room)  # there and back again
        return low + torch.minimum(travelled, 2 * room - travelled)

    def frames(self, count):
        """(clips fp32 [N, count, 3, H, W], masks int64 [N, count, H, W])."""
        pairs = [self._frame(t) for t in range(count)]
        return tuple(torch.stack(parts, 1) for parts in zip(*pairs, strict=True))

    def _frame(self, t):
        image, side = self.ground.clone(), self.ground.shape[-1]
        mask = torch.zeros(len(image), side, side, dtype=torch.int64)
        centres, pixel = torch.arange(side) + 0.5, self.at(t)
        for s in range(self.half.shape[1]):  # from the back to the front
            dx = centres[None, None, :] - pixel[:, s, 0, None, None]  # [N, 1, W]
            dy = centres[None, :, None] - pixel[:, s, 1, None, None]  # [N, H, 1]
            inside = _inside(dx, dy, self.half[:, s, None, None], self.shape[:, s, None, None])
            inside = inside & self.there[:, s, None, None]
            mask = torch.where(inside, s + 1, mask)
            image = torch.where(inside[:, None], self.colour[:, s, :, None, None], image)
        return image, mask


def _inside(dx, dy, half, shape):
    """Whether a pixel's centre, dx to the right of and dy below a sprite's, lies in it. A triangle stands on
    its base and is as high as wide.
    """
    square = (dx.abs() <= half) & (dy.abs() <= half)
    disc = dx.square() + dy.square() <= half.square()
    triangle = square & (2 * dx.abs() <= dy + half)
    return torch.where(shape == 0, disc, torch.where(shape == 1, square, triangle))


def _colour(hue, value):
    """RGB [..., 3] in [0, 1] of full saturation less a little. hue, value [...] in [0, 1]."""
    angle = (hue[..., None] + torch.tensor([0, 2, 1]) / 3) % 1
    ramp = (6 * (angle - 0.5).abs() - 1).clamp(0, 1)
    return value[..., None] * (0.1 + 0.9 * ramp)


def _texture(n, side, generator):
    """Backgrounds [n, 3, side, side]: a grey, coarse blotches on it, and fine noise."""
    grey = torch.rand(n, 1, 1, 1, generator=generator) * 0.8 - 0.4
    coarse = torch.randn(n, 1, 4, 4, generator=generator)
    coarse = F.interpolate(coarse, (side, side), mode="bilinear", align_corners=True)
    fine = torch.randn(n, 1, side, side, generator=generator)
    return (grey + TEXTURE * (coarse + 0.3 * fine)).expand(-1, 3, -1, -1).clamp(-1, 1)


# ---- Data sets ---------------------------------------------------------------------------------------------


class Clips(torch.utils.data.Dataset):
    """Clips in memory: uint8 [N, T, 3, H, W], so that a thousand take little, and masks uint8 [N, T, H, W]
    or None.
    """

    def __init__(self, clips, masks):
        self.clips, self.masks = clips, masks

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        clips = self.clips[index].float() / 127.5 - 1
        return (clips,) if self.masks is None else (clips, self.masks[index].long())


class Windows(torch.utils.data.Dataset):
    """windows: (frame paths, mask paths or None, ids): files that are read when they are asked for, and kept
    while they fit. ids: the values of the clip's masks that become 1, 2, ...
    """

    def __init__(self, windows, size):
        self.windows, self.size, self.kept, self.bytes = windows, size, {}, 0

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return tuple(torch.stack(part) for part in zip(*map(self._window, index), strict=True))

    def _window(self, i):
        if i in self.kept:
            return self.kept[i]
        frames, masks, ids = self.windows[i]
        found = (torch.stack([square(folders.decode(path, 3)[None], self.size)[0] for path in frames]),)
        if masks is not None:
            found += (torch.stack([self._mask(path, ids) for path in masks]),)
        self.bytes += sum(part.nbytes for part in found)
        if self.bytes < CACHE_BYTES:
            self.kept[i] = found
        return found

    def _mask(self, path, ids):
        mask = folders.decode_mask(path)
        numbers = np.where(mask == 0, 0, np.searchsorted(ids, mask) + 1)
        return square_mask(torch.from_numpy(numbers)[None], self.size)[0].long()


CACHE_BYTES = 512 * 2**20


@dataclass
class Videos:
    """A data set of clips in two disjoint parts. masks: whether the second part of a batch is there.
    fingerprint, 16 hex digits, stands for the content, the image size and the split.
    """

    name: str
    train: torch.utils.data.Dataset = field(repr=False)
    heldout: torch.utils.data.Dataset = field(repr=False)
    image_size: int
    frames: int
    masks: bool
    fingerprint: str
    channels: int = 3
    num_classes: int = 0

    def __str__(self):
        shape = f"{self.frames}x3x{self.image_size}x{self.image_size}"
        masks = "masks" if self.masks else "no masks"
        return (
            f"{self.name}: {len(self.train)} + {len(self.heldout)} held-out clips, {shape}, {masks}, "
            f"{self.fingerprint}"
        )


def sprites(size, frames, seed, clips=CLIPS, heldout=HELDOUT):
    """Videos of moving sprites, drawn once: a function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    images, masks = Scene.drawn(clips + heldout, size, generator).frames(frames)
    images = ((images + 1) * 127.5).round().to(torch.uint8)
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16]
    masks = masks.to(torch.uint8)
    parts = Clips(images[heldout:], masks[heldout:]), Clips(images[:heldout], masks[:heldout])
    return Videos("sprites", *parts, size, frames, True, digest)


def folder(root, size, frames):
    """Videos of the clips in a folder; each is cut into windows of `frames` frames, and a rest is left out.

    A tenth of the clips, by the hash of their names, is held out. Raises Refused.
    """
    root = Path(root).expanduser()
    clips, masks = _clips(root)
    paths = [path for files in clips.values() for path in files]
    mask_paths = [path for files in masks.values() for path in files]
    seen, seen_masks = folders.survey(paths, mask_paths)
    about = dict(zip([*paths, *mask_paths], [*seen, *seen_masks], strict=True))
    ids = {}
    for name, files in clips.items():
        _check_clip(name, files, frames, about)
        ids[name] = _ids(root, name, files, masks[name], about) if masks else None
    chosen = folders.held_out(root, list(clips), "clip")

    def windows(names):
        for name in names:
            own = masks.get(name)
            for start in range(0, len(clips[name]) - frames + 1, frames):
                part = slice(start, start + frames)
                yield clips[name][part], own[part] if own else None, ids[name]

    train = Windows(list(windows([name for name in clips if name not in chosen])), size)
    heldout = Windows(list(windows([name for name in clips if name in chosen])), size)
    content = [(p.relative_to(root).as_posix(), about[p].sha256) for p in [*paths, *mask_paths]]
    digest = hashlib.sha256(repr((content, size, frames, sorted(chosen))).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "_", f"folder-{root.resolve().name}")
    return Videos(name, train, heldout, size, frames, bool(masks), digest)


def _clips(root):
    """({clip: frames}, {clip: masks}), by name; the second is empty where there is no folder of masks."""
    folders.check_layout(root, False, "folder")
    clips, masks = _folders_of(root, folders.IMAGES), {}
    clips.pop("masks", None)
    if not clips:
        raise Refused(f"{root} holds no clips: give {root / 'CLIP' / 'FRAME.png'}, a folder of frames a clip")
    for name, files in clips.items():
        if len(files) < 2:
            held = "one frame" if files else "no frames"
            raise Refused(f"clip {root / name} has {held}: give it at least two, or remove it")
    if (root / "masks").is_dir():
        masks = _folders_of(root / "masks", folders.MASKS)
        for name in sorted(masks.keys() - clips.keys()):
            raise Refused(f"masks {root / 'masks' / name} have no clip: add {root / name}, or remove them")
    if masks:
        masks = {name: _pair(root, name, files, masks.get(name, [])) for name, files in clips.items()}
    return clips, masks


def _folders_of(root, suffixes):
    """{folder: its images} of the folders in `root`, by name."""
    inner = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return {path.name: sorted(folders.listing(path, suffixes, deep=False), key=_in_time) for path in inner}


def _in_time(path):
    """frame2 before frame10."""
    parts = re.split(r"([0-9]+)", path.name)  # text and numbers in turn
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _pair(root, name, frames, masks):
    """The masks of a clip in the order of its frames."""
    by_stem = {path.stem: path for path in masks}
    missing = [path for path in frames if path.stem not in by_stem]
    if missing:
        wanted = root / "masks" / name / f"{missing[0].stem}.png"
        raise Refused(f"frame {missing[0]} has no mask: add {wanted}, or remove {root / 'masks'}")
    extra = sorted(by_stem.keys() - {path.stem for path in frames})
    if extra:
        frame = root / name / f"{extra[0]}.png"
        raise Refused(f"mask {by_stem[extra[0]]} has no frame: add {frame}, or remove it")
    return [by_stem[path.stem] for path in frames]


def _check_clip(name, files, frames, about):
    """Refuse a clip that is too short, or whose frames differ in size."""
    first = about[files[0]]
    for path in files:
        if (about[path].width, about[path].height) != (first.width, first.height):
            sizes = f"{about[path].width}x{about[path].height}, and {files[0].name} is"
            raise Refused(
                f"clip {name}: {path} is {sizes} {first.width}x{first.height}: make the frames of a clip one "
                "size"
            )
    if len(files) < frames:
        raise Refused(
            f"clip {files[0].parent} has {len(files)} frames, and --frames is {frames}: give --frames "
            f"{len(files)}, or remove it"
        )


def _ids(root, name, files, masks, about):
    """The sorted values that the masks of a clip give its objects."""
    triples = [(None, image, mask) for image, mask in zip(files, masks, strict=True)]
    folders.check_extents(triples, [about[path] for path in files], [about[path] for path in masks])
    values = np.unique(np.concatenate([about[path].values for path in masks]))
    where = root / "masks" / name
    if not (values != 0).any():
        raise Refused(f"the masks of {where} show no instance, 0 alone: number the objects from 1")
    if len(values) > folders.MAX_CLASSES:
        raise Refused(f"the masks of {where} hold {len(values)} values: save ids, without antialiasing")
    return values[values != 0]


# ---- What the tasks on clips share -------------------------------------------------------------------------

# one colour a slot, the same in all frames
COLOURS = torch.tensor(
    [
        *([60, 60, 70], [230, 80, 60], [60, 160, 230], [240, 200, 60], [90, 200, 120], [180, 100, 220]),
        *([250, 150, 200], [130, 90, 50], [120, 220, 220], [170, 170, 170], [20, 90, 160], [190, 230, 90]),
        *([120, 20, 60], [250, 250, 250], [10, 120, 90]),
    ]
)
ROWS = 6  # clips in a picture
SCORED = 16  # clips that go through the net at once


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
            "how many parts a clip is divided into at most (default: 5 for tiny, 15 for base)",
            type=several,
            fits=True,
        ),
        Flag("clips", CLIPS, "clips of --data sprites to train on", type=natural),
    )

    sizes = {}  # {--size: what the net is built of}, each with `slots`

    @property
    def size(self):
        """What --size stands for."""
        name = self.config.size or "tiny"
        if name not in self.sizes:
            raise Refused(f"no size {name!r} for task {self.config.task!r}: use {' or '.join(self.sizes)}")
        return self.sizes[name]

    @property
    def slots(self):
        return self.config.slots or self.size.slots

    @classmethod
    def load(cls, config):
        """Videos. The image size is 24 for sprites and 64 for folders, or --image_size. Raises Refused."""
        c = config
        word, _, where = (c.data or cls.implied["data"]).partition(":")
        if c.image_size is not None and c.image_size < 16:
            raise Refused(f"--image_size {c.image_size} is too small for clips: give at least 16")
        if word == "sprites" and not where:
            return sprites(c.image_size or SIDE, c.frames, c.seed, c.clips)
        if c.clips != CLIPS:
            raise Refused(f"--clips {c.clips} is of --data sprites, and a folder has its own: drop it")
        if word == "folder" and where:
            return folder(where, c.image_size or 64, c.frames)
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
        clips = self.data.heldout[list(range(min(ROWS, len(self.data.heldout))))][0]
        seen = self.see(model, clips.to(rng.device), rng)
        drawn = self.shown(clips, {name: value.float().cpu() for name, value in seen.items()})
        slots = segmented(seen["masks"], clips.shape[-1]).cpu()  # [B, T, H, W]
        coloured = COLOURS[slots % len(COLOURS)].permute(0, 1, 4, 2, 3) / 127.5 - 1
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
        sums, count, truth, found = {}, 0, [], []
        for start in range(0, len(self.data.heldout), SCORED):
            batch = self.data.heldout[list(range(start, min(start + SCORED, len(self.data.heldout))))]
            clips = batch[0].to(rng.device)
            seen = self.see(model, clips, rng)
            for name, value in self.errors(clips, seen).items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(clips)
            count += len(clips)
            if self.data.masks:
                truth.append(batch[1])
                found.append(segmented(seen["masks"], clips.shape[-1]).cpu())
        result = {name: value / count for name, value in sums.items()}
        if truth:
            result.update(video_metrics.scores(torch.cat(truth), torch.cat(found)))
        return result

    def reference(self):
        """{"floor": scores of the true masks, "ceiling": of upright stripes, one a slot}."""
        if not self.data.masks:
            return {}
        masks = self.data.heldout[list(range(len(self.data.heldout)))][1]
        stripes = torch.arange(masks.shape[-1]) * self.slots // masks.shape[-1]
        return {
            "floor": video_metrics.scores(masks, masks),
            "ceiling": video_metrics.scores(masks, stripes.expand_as(masks)),
        }


def segmented(masks, side):
    """int64 [B, T, side, side]: the slot that has the largest share of a pixel. masks [B, T, K, h, w]."""
    large = F.interpolate(masks.flatten(0, 1).float(), (side, side), mode="bilinear", align_corners=False)
    return large.argmax(1).unflatten(0, masks.shape[:2])
