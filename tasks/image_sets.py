"""A data set of images in two parts, and the two kinds of part: tensors in memory, and files that are read
when they are asked for. data.py says which sets there are.
"""

import hashlib
import re
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from tasks import folders

CACHE_BYTES = 512 * 2**20  # image files are decoded once for as long as the results fit


@dataclass
class Data:
    """A data set in two disjoint parts, train and heldout.

    Both are map-style: len(part), and part[[3, 1, 4]] -> (images float32 [B, C, H, W] in [-1, 1], target).
    When targets is "labels" the target is int64 [B], zeros if there are no classes (num_classes 0). When it
    is "masks" the target is int64 [B, H, W], and num_classes counts the background. When it is "inputs" the
    target is another image [B, num_classes, H, W].
    A part suits DataLoader(part, sampler=<yields lists>, batch_size=None, num_workers=N).
    `name` is fit for a file name. `fingerprint`, 16 hex digits, stands for the content, the image size and
    the split. `yardstick` names the feature net that is committed for this very set, where there is one.
    `classes` are the names of the labels, where the set has names. `notes` say what may not be meant.
    part.labels() tells the labels of a part without its images.
    """

    name: str
    train: torch.utils.data.Dataset = field(repr=False)
    heldout: torch.utils.data.Dataset = field(repr=False)
    channels: int
    num_classes: int
    image_size: int
    fingerprint: str
    targets: str
    dims: int = 2  # 3: images [B, C, D, H, W]
    yardstick: str | None = None
    # where the targets are a condition, and the images have no classes: classes of masks, channels of images
    condition_channels: int = 0
    classes: tuple = field(default=(), repr=False)
    notes: list = field(default_factory=list, repr=False)

    def __str__(self):
        shape = "x".join([str(self.channels), *[str(self.image_size)] * self.dims])
        return (
            f"{self.name} ({self.targets}): {len(self.train)} + {len(self.heldout)} held-out images, "
            f"{shape}, {self.num_classes or 'no'} classes, {self.fingerprint}"
        )


class Tensors(torch.utils.data.Dataset):
    """images [N, C, H, W], uint8 or float32 in [-1, 1]; target [N] labels or [N, H, W] masks.

    They are resized at access, so that a large image_size costs the memory of a batch, not of the whole set.
    """

    def __init__(self, images: torch.Tensor, target: torch.Tensor, size: int):
        self.images = images
        self.target = target
        self.size = size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: list[int]):
        images = self.images[index]
        target = self.target[index]
        if images.dtype == torch.uint8:
            images = images.float() / 127.5 - 1
        if target.ndim > 1:
            target = square_mask(target, self.size)
        return square(images, self.size), target.long()

    def labels(self):
        """int64 [N]"""
        return self.target.long()


class Files(torch.utils.data.Dataset):
    """items: (image path or folders.Page, label), (image path, mask path) with the mask values that become
    0, 1, ..., or (image path, path of another image) with the channels of that; white: of images of 16 bits.
    """

    def __init__(
        self,
        items: list,
        channels: int,
        size: int,
        values: np.ndarray | None,
        white: int = folders.WHITE_16_BIT,
        others: int = 0,
    ):
        self.items = items
        self.channels = channels
        self.size = size
        self.values = values
        self.white = white
        self.others = others
        bytes_a_pixel = 4 * (channels + others)  # fp32
        if values is not None:
            bytes_a_pixel += 8  # an int64 mask
        self.cache = {}
        self.room = CACHE_BYTES // (size * size * bytes_a_pixel)  # of so many items

    def __len__(self):
        return len(self.items)

    def labels(self):
        """int64 [N]"""
        return torch.tensor([label for _, label in self.items], dtype=torch.long)

    def __getitem__(self, index: list[int]):
        items = [self._item(i) for i in index]
        images, targets = zip(*items, strict=True)
        return torch.stack(images), torch.stack(targets)

    def _item(self, i):
        if i in self.cache:
            return self.cache[i]
        path, target = self.items[i]
        image = self._image(path, self.channels)
        if self.others:
            target = self._image(target, self.others)
        elif self.values is None:
            target = torch.tensor(target)
        else:
            classes = torch.from_numpy(np.searchsorted(self.values, folders.decode_mask(target)))
            target = square_mask(classes[None], self.size)[0].long()
        if len(self.cache) < self.room:
            self.cache[i] = image, target
        return image, target

    def _image(self, path, channels):
        return square(folders.decode_image(path, channels, self.white)[None], self.size)[0]


def square(x, size, **how):
    """[B, C, H, W] -> its central square as [B, C, size, size]."""
    height, width = x.shape[-2:]
    side = min(height, width)
    top = (height - side) // 2
    left = (width - side) // 2
    x = x[..., top : top + side, left : left + side]
    if side == size:
        return x.contiguous()
    if how:
        return F.interpolate(x, (size, size), **how)
    # The weights of a pixel may sum to 1 + 1e-7.
    return F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(-1, 1)


def square_mask(x, size):
    """[B, H, W] -> its central square as fp32 [B, size, size]."""
    # "nearest-exact" has its pixel centres where bilinear has them; "nearest" shifts masks against images.
    return square(x[:, None].float(), size, mode="nearest-exact")[:, 0]


def data_set(
    name, wish, train, heldout, channels, num_classes, size, content, yardstick=None, classes=(), notes=()
):
    """Data with a fingerprint of content: tensors by their bytes, anything else by its repr."""
    facts = (wish.targets == "masks", channels, num_classes, size, len(train), len(heldout))
    digest = hashlib.sha256(repr(facts).encode())
    for piece in content:
        digest.update(piece.numpy() if isinstance(piece, torch.Tensor) else repr(piece).encode())
    return Data(
        name=re.sub(r"[^\w.-]+", "_", name),
        train=train,
        heldout=heldout,
        channels=channels,
        num_classes=num_classes,
        image_size=size,
        fingerprint=digest.hexdigest()[:16],
        targets=wish.targets,
        dims=wish.dims,
        yardstick=yardstick,
        classes=tuple(classes),
        notes=list(notes),
    )


def in_memory(name, wish, train, heldout, num_classes, yardstick=None, classes=()):
    """Data of two pairs (images [N, C, H, W], labels [N] or masks [N, H, W]), see Tensors."""
    images, _ = train
    size = wish.size or min(images.shape[-2:])
    return data_set(
        name,
        wish,
        Tensors(*train, size),
        Tensors(*heldout, size),
        channels=images.shape[1],
        num_classes=num_classes,
        size=size,
        content=[*train, *heldout],
        yardstick=yardstick,
        classes=classes,
    )
