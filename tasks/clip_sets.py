"""Clips with the masks of their objects: drawn sprites, or folders of frames.

    --data sprites          moving discs, squares and triangles (sprites.py), with exact masks (default)
    --data folder:PATH      PATH/<clip>/<frame>.png, and PATH/masks/<clip>/<frame>.png where there are masks

A batch is (clips fp32 [B, T, 3, H, W] in [-1, 1], masks int64 [B, T, H, W]): 0 is the background, each other
number an object, the same in all frames of a clip.
"""

import hashlib
import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from lowprec.errors import Refused
from tasks import folders
from tasks.image_sets import CACHE_BYTES, square, square_mask
from tasks.sprites import Scene

SPRITE_CLIPS = 1024  # sprites to train on
HELDOUT_CLIPS = 64
SPRITE_SIDE = 24  # pixels, where --image_size does not say


class Clips(torch.utils.data.Dataset):
    """Clips in memory: uint8 [N, T, 3, H, W], so that a thousand take little, and masks uint8 [N, T, H, W]
    or None.
    """

    def __init__(self, clips, masks):
        self.clips = clips
        self.masks = masks

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        clips = self.clips[index].float() / 127.5 - 1
        if self.masks is None:
            return (clips,)
        return clips, self.masks[index].long()


class FrameFiles(torch.utils.data.Dataset):
    """windows: (frame paths, mask paths or None, ids): files that are read when they are asked for, and kept
    while they fit. ids: the values of the clip's masks that become 1, 2, ...; white: as of decode_image.
    """

    def __init__(self, windows, size, white):
        self.windows = windows
        self.size = size
        self.white = white
        self.kept = {}  # what has been read, by number
        self.bytes = 0  # of all that has been read

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        windows = [self._window(i) for i in index]
        return tuple(torch.stack(part) for part in zip(*windows, strict=True))

    def _window(self, i):
        if i in self.kept:
            return self.kept[i]
        frames, masks, ids = self.windows[i]
        images = [square(folders.decode_image(path, 3, self.white)[None], self.size)[0] for path in frames]
        found = (torch.stack(images),)
        if masks is not None:
            masks = [self._mask(path, ids) for path in masks]
            found = *found, torch.stack(masks)
        self.bytes += sum(part.nbytes for part in found)
        if self.bytes < CACHE_BYTES:
            self.kept[i] = found
        return found

    def _mask(self, path, ids):
        mask = folders.decode_mask(path)
        numbers = np.where(mask == 0, 0, np.searchsorted(ids, mask) + 1)
        return square_mask(torch.from_numpy(numbers)[None], self.size)[0].long()


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
    notes: list = field(default_factory=list, repr=False)  # lines that are printed before a run

    def __str__(self):
        shape = f"{self.frames}x3x{self.image_size}x{self.image_size}"
        masks = "masks" if self.masks else "no masks"
        return (
            f"{self.name}: {len(self.train)} + {len(self.heldout)} held-out clips, {shape}, {masks}, "
            f"{self.fingerprint}"
        )


def sprites(size, frames, seed, clips=SPRITE_CLIPS, heldout=None):
    """Videos of moving sprites, drawn once: a function of the arguments. HELDOUT_CLIPS of them by default are
    held out, for scores.
    """
    heldout = heldout or HELDOUT_CLIPS
    generator = torch.Generator().manual_seed(seed)
    images, masks = Scene.drawn(clips + heldout, size, generator).frames(frames)
    images = ((images + 1) * 127.5).round().to(torch.uint8)
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16]
    masks = masks.to(torch.uint8)
    train = Clips(images[heldout:], masks[heldout:])
    held = Clips(images[:heldout], masks[:heldout])
    return Videos("sprites", train, held, size, frames, True, digest)


def folder(root, size, frames, white=folders.WHITE_16_BIT):
    """Videos of the clips in a folder; each is cut into windows of `frames` frames, and a rest is left out.

    white: the value of white in files of 16 bits. A tenth of the clips, by the hash of their names, is held
    out. Raises Refused.
    """
    root = Path(root).expanduser()
    clips, masks = _clips(root, frames)
    paths = list(chain(*clips.values()))
    mask_paths = list(chain(*masks.values()))
    seen, seen_masks = folders.survey(paths, mask_paths)
    about = dict(zip([*paths, *mask_paths], [*seen, *seen_masks], strict=True))
    ids = dict.fromkeys(clips)  # {clip: the values of its masks}
    for name, files in clips.items():
        _check_clip(files, about)
        if masks:
            ids[name] = _ids(root, name, files, masks[name], about)

    chosen = folders.held_out_names(root, list(clips), "clip")
    train, heldout = [], []
    for name, files in clips.items():
        part = heldout if name in chosen else train
        for start in range(0, len(files) - frames + 1, frames):
            window = slice(start, start + frames)
            part.append((files[window], masks[name][window] if masks else None, ids[name]))

    content = [(path.relative_to(root).as_posix(), about[path].sha256) for path in [*paths, *mask_paths]]
    facts = content, size, frames, sorted(chosen)
    if white != folders.WHITE_16_BIT:
        facts = *facts, white
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "_", f"folder-{root.resolve().name}")
    train, heldout = FrameFiles(train, size, white), FrameFiles(heldout, size, white)
    notes = folders.notes_on_images(seen, white, "first", "name")
    return Videos(name, train, heldout, size, frames, bool(masks), digest, notes=notes)


def _clips(root, frames):
    """({clip: frames}, {clip: masks}), by name; the second is empty where there is no folder of masks.
    Refuses a clip of fewer than `frames`.
    """
    folders.check_layout(root, "labels", "folder")
    clips = _folders_of(root, folders.IMAGE_SUFFIXES)
    clips.pop("masks", None)
    frame = root / "CLIP" / "FRAME.png"
    folders.some_of(clips, root, "clips", f"give {frame}, a folder of frames a clip")
    for name, files in clips.items():
        if len(files) < frames:
            instead = f"give --frames {len(files)}" if len(files) > 1 else "give it more"
            short = f"{root / name} has {len(files)} frames, and --frames is {frames}"
            raise Refused(f"{short}: {instead}, or remove it")
    if not (root / "masks").is_dir():
        return clips, {}
    found = _folders_of(root / "masks", folders.MASK_SUFFIXES)
    for name in sorted(found.keys() - clips.keys()):
        raise Refused(f"masks {root / 'masks' / name} have no clip: add {root / name}, or remove them")
    if not found:
        return clips, {}
    masks = {name: _in_order(root, name, files, found.get(name, [])) for name, files in clips.items()}
    return clips, masks


def _folders_of(root, suffixes):
    """{folder: its images} of the folders in `root`, by name."""
    found = {}
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            found[path.name] = sorted(folders.files_with_suffix(path, suffixes, deep=False), key=_by_number)
    return found


def _by_number(path):
    """A key that sorts frame2 before frame10."""
    parts = re.split(r"([0-9]+)", path.name)  # text and numbers in turn
    parts[1::2] = [int(number) for number in parts[1::2]]
    return parts, path.name


def _in_order(root, name, frames, masks):
    """The masks of a clip in the order of its frames."""
    by_stem = {path.stem: path for path in masks}
    folders.check_partners(
        ("frame", root / name, {path.stem: path for path in frames}),
        ("mask", root / "masks" / name, by_stem),
        folders.MASK_SUFFIXES,
    )
    return [by_stem[path.stem] for path in frames]


def _check_clip(files, about):
    """Refuse a clip whose frames differ in size."""
    first = about[files[0]].size
    for path in files:
        size = about[path].size
        folders.check_sizes(size == first, f"frame {path}", size, f"frame {files[0].name}", first)


def _ids(root, name, files, masks, about):
    """The sorted values that the masks of a clip give its objects."""
    triples = [(name, image, mask) for image, mask in zip(files, masks, strict=True)]
    seen = [about[path] for path in files]
    seen_masks = [about[path] for path in masks]
    folders.check_extents(triples, seen, seen_masks)
    values = folders.mask_values(root / "masks" / name, [mask.values for mask in seen_masks])
    return values[values != 0]
