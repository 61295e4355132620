"""Every data set of the laboratory, behind one word.

    python -c "from tasks import data; print(data.load('digits'))"

spec                what it is                                                      what is held out
digits              scikit-learn's 1,797 handwritten digits, 8x8                    500, stratified
synthetic           MONAI's discs in noise with their masks, 64x64                  64 of 320
folder:PATH         images, class folders optional; with masks PATH/images and      a tenth, by hash of name
                    PATH/masks, each image and its mask under one stem
cifar10:PATH        torchvision's download (cifar-10-batches-py)                    its 10,000 test images
mnist:PATH          torchvision's download (MNIST/raw)                              its 10,000 test images
fashion_mnist       Debian's package dataset-fashion-mnist, or fashion_mnist:PATH   its 10,000 test images
medmnist:FILE.npz   a 2-D MedMNIST file; no labels if an image has several          its test part; val unused
nifti:PATH          axial slices of a .nii or .nii.gz volume, or of a folder of     a tenth of the volumes, or
                    them; with masks PATH/images and PATH/masks again               of the slices of one

Images are cropped to their central square and resized to image_size (bilinear, antialiased; masks: nearest
pixel). The classes of a mask are the distinct values of all masks in ascending order: 0 and 255 become 0 and
1, ids 0..K-1 stay themselves. A tenth is at least one, and a set of one image is refused. No loader runs code
that a file brings along. folders.py finds, checks and decodes image files and volumes.
"""
import gzip
import hashlib
import os
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from lowprec.errors import Refused
from lowprec.machine import without
from tasks import folders
from tasks.folders import reading

MAX_LABELS = 10_000  # a larger label is a mistake or an identifier, and a net has a row for each one below it
CACHE_BYTES = 512 * 2**20  # image files are decoded once for as long as the results fit


@dataclass
class Data:
    """A data set in two disjoint parts, train and heldout.

    Both are map-style: len(part), and part[[3, 1, 4]] -> (images float32 [B, C, H, W] in [-1, 1], target).
    When targets is "labels" the target is int64 [B], zeros if there are no classes (num_classes 0). When it
    is "masks" the target is int64 [B, H, W], and num_classes counts the background.
    A part suits DataLoader(part, sampler=<yields lists>, batch_size=None, num_workers=N).
    `name` is fit for a file name. `fingerprint`, 16 hex digits, stands for the content, the image size and
    the split. `yardstick` names the feature net that is committed for this very set, where there is one.
    `classes` are the names of the labels, where the set has names. part.labels() tells the labels of a part
    without its images.
    """
    name: str
    train: torch.utils.data.Dataset = field(repr=False)
    heldout: torch.utils.data.Dataset = field(repr=False)
    channels: int
    num_classes: int
    image_size: int
    fingerprint: str
    targets: str
    yardstick: str | None = None
    classes: tuple = field(default=(), repr=False)

    def __str__(self):
        shape = f"{self.channels}x{self.image_size}x{self.image_size}"
        return (f"{self.name} ({self.targets}): {len(self.train)} + {len(self.heldout)} held-out images, "
                f"{shape}, {self.num_classes or 'no'} classes, {self.fingerprint}")


class Wish(NamedTuple):
    """What a loader is asked for: the arguments of load(), the path apart from the word."""
    path: Path | None
    masks: bool
    size: int | None
    seed: int


def load(spec: str, targets: str = "labels", image_size: int | None = None, seed: int = 0) -> Data:
    """The data set that `spec` names (see the table above), with its "labels" or its "masks" as targets.

    image_size None keeps the set's own size, 64 for folders and volumes. `seed` draws synthetic and touches
    no other set. Raises Refused.
    """
    if targets not in ("labels", "masks"):
        raise ValueError(f"targets are labels or masks, not {targets!r}")
    if image_size is not None and image_size < 8:
        raise Refused(f"image size {image_size} is too small: give at least 8")
    word, _, where = spec.partition(":")
    if word not in SETS:
        forms = ", ".join(known.form for known in SETS.values())
        remedy = f"choose one of {forms}"
        if spec and os.path.exists(spec):
            remedy = f"did you mean folder:{spec}"
        raise Refused(f"unknown data set {spec!r}: {remedy}")
    form, loader, has_masks = SETS[word]
    if where and ":" not in form:
        raise Refused(f"{word} takes no path: write --data {form}")
    if not where and ":" in form and "[" not in form:
        raise Refused(f"{word} needs a path: write --data {form}")
    if targets == "masks" and not has_masks:
        raise Refused(f"{word} has no masks: to segment use --data synthetic, folder:PATH or nifti:PATH")
    path = None
    if where:
        path = Path(os.path.expanduser(where))  # an unknown ~name stays as it is, and is no folder
    return loader(Wish(path, targets == "masks", image_size, seed))


# ---- The two kinds of part: tensors in memory, and files read when they are asked for ----------------------

class Tensors(torch.utils.data.Dataset):
    """images [N, C, H, W], uint8 or float32 in [-1, 1]; target [N] labels or [N, H, W] masks.

    They are resized at access, so that a large image_size costs the memory of a batch, not of the whole set.
    """

    def __init__(self, images: torch.Tensor, target: torch.Tensor, size: int):
        self.images, self.target, self.size = images, target, size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: list[int]):
        images, target = self.images[index], self.target[index]
        if images.dtype == torch.uint8:
            images = images.float() / 127.5 - 1
        if target.ndim > 1:
            target = square_mask(target, self.size)
        return square(images, self.size), target.long()

    def labels(self):
        """int64 [N]"""
        return self.target.long()


class Files(torch.utils.data.Dataset):
    """items: (image path, label), or (image path, mask path) with the mask values that become 0, 1, ..."""

    def __init__(self, items: list, channels: int, size: int, values: np.ndarray | None):
        self.items, self.channels, self.size, self.values = items, channels, size, values
        pixel_bytes = 4 * channels
        if values is not None:
            pixel_bytes += 8  # of its mask
        self.cache = {}
        self.room = CACHE_BYTES // (size * size * pixel_bytes)

    def __len__(self):
        return len(self.items)

    def labels(self):
        """int64 [N]"""
        return torch.tensor([label for _, label in self.items], dtype=torch.long)

    def __getitem__(self, index: list[int]):
        images, targets = zip(*map(self._item, index), strict=True)
        return torch.stack(images), torch.stack(targets)

    def _item(self, i):
        if i in self.cache:
            return self.cache[i]
        path, target = self.items[i]
        image = square(folders.decode(path, self.channels)[None], self.size)[0]
        if self.values is None:
            target = torch.tensor(target)
        else:
            classes = torch.from_numpy(np.searchsorted(self.values, folders.decode_mask(target)))
            target = square_mask(classes[None], self.size)[0].long()
        if len(self.cache) < self.room:
            self.cache[i] = image, target
        return image, target


def square(x, size, **how):
    """[B, C, H, W] -> its central square as [B, C, size, size]."""
    side = min(x.shape[-2:])
    top, left = ((n - side) // 2 for n in x.shape[-2:])
    x = x[..., top:top + side, left:left + side]
    if side == size:
        return x.contiguous()
    if how:
        return F.interpolate(x, (size, size), **how)
    # The weights of a pixel may sum to 1 + 1e-7.
    return F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(-1, 1)


def square_mask(x, size):
    # "nearest-exact" has its pixel centres where bilinear has them; "nearest" shifts masks against images.
    return square(x[:, None].float(), size, mode="nearest-exact")[:, 0]


def _data(name, wish, train, heldout, channels, num_classes, size, content, yardstick=None, classes=()):
    """Data with a fingerprint of content: tensors by their bytes, anything else by its repr."""
    facts = (wish.masks, channels, num_classes, size, len(train), len(heldout))
    digest = hashlib.sha256(repr(facts).encode())
    for part in content:
        if isinstance(part, torch.Tensor):
            digest.update(part.numpy())
        else:
            digest.update(repr(part).encode())
    return Data(
        name=re.sub(r"[^\w.-]+", "_", name),
        train=train,
        heldout=heldout,
        channels=channels,
        num_classes=num_classes,
        image_size=size,
        fingerprint=digest.hexdigest()[:16],
        targets="masks" if wish.masks else "labels",
        yardstick=yardstick,
        classes=tuple(classes),
    )


def _in_memory(name, wish, train, heldout, num_classes, yardstick=None, classes=()):
    size = wish.size or min(train[0].shape[-2:])
    parts = Tensors(*train, size), Tensors(*heldout, size)
    return _data(name, wish, *parts, train[0].shape[1], num_classes, size, [*train, *heldout], yardstick,
                 classes)


# ---- Built in ----------------------------------------------------------------------------------------------

def _digits(wish):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1  # 0..16 -> [-1, 1], exact in fp32
    labels = torch.from_numpy(digits.target).long()
    split = train_test_split(np.arange(len(labels)), test_size=500, stratify=digits.target, random_state=0)
    train, heldout = ((images[part], labels[part]) for part in split)
    yardstick = None
    if wish.size in (None, 8):
        yardstick = "digits"
    return _in_memory("digits", wish, train, heldout, 10, yardstick)


def _synthetic(wish, count=320, heldout=64, classes=3):
    with without("transformers"):
        from monai.data.synthetic import create_test_image_2d
    size = wish.size or 64
    random = np.random.RandomState(wish.seed % 2**32)
    # Noise up to half the brightest class outshines the darkest one in places: no threshold solves the task.
    discs = {"num_objs": 10, "rad_min": max(1, size // 16), "rad_max": max(2, size // 5),
             "noise_max": 0.5, "num_seg_classes": classes, "random_state": random}
    pairs = [create_test_image_2d(size, size, **discs) for _ in range(count)]
    images = torch.from_numpy(np.stack([image for image, _ in pairs])).float()[:, None] * 2 - 1
    if wish.masks:
        target = torch.from_numpy(np.stack([mask for _, mask in pairs])).to(torch.uint8)
        num_classes = classes + 1
    else:
        target = torch.zeros(count, dtype=torch.long)
        num_classes = 0
    train = images[heldout:], target[heldout:]
    heldout = images[:heldout], target[:heldout]
    return _in_memory("synthetic", wish._replace(size=size), train, heldout, num_classes)


# ---- Folders of images -------------------------------------------------------------------------------------

def _folder(wish):
    root, size = wish.path, wish.size or 64
    folders.check_layout(root, wish.masks, "folder")
    if wish.masks:
        triples = folders.pairs(root, folders.IMAGES, folders.MASKS)  # (name, image, mask)
    else:
        triples, classes = folders.labelled(root)  # (name, image, label)
    names = [name for name, _, _ in triples]
    images = [image for _, image, _ in triples]
    targets = [target for _, _, target in triples]
    if wish.masks:
        seen, seen_masks = folders.survey(images, targets)
        folders.check_extents(triples, seen, seen_masks)
        values = folders.mask_values(root, [mask.values for mask in seen_masks])
        facts = [mask.sha256 for mask in seen_masks]
        classes, names_of_classes = values.tolist(), ()
    else:
        seen, _ = folders.survey(images, [])
        values, facts, names_of_classes = None, targets, classes
    chosen = folders.held_out(root, names)
    if not wish.masks:
        chosen = folders.with_every_class(chosen, triples)
    channels = 3
    if all(folders.is_grey(image.mode) for image in seen):
        channels = 1
    train = Files([rest for name, *rest in triples if name not in chosen], channels, size, values)
    heldout = Files([rest for name, *rest in triples if name in chosen], channels, size, values)
    content = list(zip(names, [image.sha256 for image in seen], facts, strict=True))
    return _data(
        f"folder-{root.resolve().name}",
        wish,
        train,
        heldout,
        channels,
        len(classes),
        size,
        [content, classes],
        classes=names_of_classes,
    )


# ---- Published sets ----------------------------------------------------------------------------------------

class _Inert:
    """Takes whatever a pickle would build it from, and does nothing with it."""

    def __init__(self, *args):
        pass

    def __setstate__(self, state):
        self.state = state


class _CifarUnpickler(pickle.Unpickler):
    """Reads plain values and the state of numpy arrays.

    CIFAR-10 comes as pickles, and a pickle may name any function to be called. Here _Inert stands for the
    three names that an array needs, and any other name is refused.
    """
    ALLOWED = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}

    def find_class(self, module, name):
        if (module.replace("_core", "core"), name) not in self.ALLOWED:
            raise ValueError(f"it calls {module}.{name}, which CIFAR-10 has no use for")
        return _Inert


def _absent(root, name):
    return Refused(f"{root} holds no {name}: download it with python -c "
                   f"\"import torchvision; torchvision.datasets.{name}({str(root)!r}, download=True)\"")


def _cifar10(wish):
    root = wish.path
    if root.name == "cifar-10-batches-py":
        root = root.parent

    def batch(name):
        path = root / "cifar-10-batches-py" / name
        if not os.path.isfile(path):
            raise _absent(root, "CIFAR10")
        with reading(path, "a batch of CIFAR-10"), open(path, "rb") as file:
            content = _CifarUnpickler(file, encoding="bytes").load()
            images = np.frombuffer(content[b"data"].state[-1], np.uint8).reshape(-1, 3, 32, 32)
            labels = np.array(content[b"labels"], np.int64)
            if len(images) != len(labels) or not set(labels.tolist()) <= set(range(10)):
                raise ValueError("images and labels don't match")
            return images, labels

    def part(names):
        batches = [batch(name) for name in names]
        images = np.concatenate([images for images, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        return torch.from_numpy(images), torch.from_numpy(labels)

    train = part([f"data_batch_{i}" for i in range(1, 6)])
    heldout = part(["test_batch"])
    return _in_memory("cifar10", wish, train, heldout, 10)


def _mnist(wish):
    from torchvision.datasets import MNIST
    raw = wish.path / "MNIST" / "raw"
    if not all(os.path.isfile(raw / url.removesuffix(".gz")) for url, _ in MNIST.resources):
        raise _absent(wish.path, "MNIST")
    with reading(raw.parent, "MNIST"):
        parts = []
        for is_train in (True, False):
            part = MNIST(wish.path, train=is_train)
            if len(part.data) != len(part.targets) or part.targets.max() > 9:
                raise ValueError("images and labels don't match")
            parts.append((part.data[:, None], part.targets))
    return _in_memory("mnist", wish, *parts, 10)


PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist lies
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
MOST = 60_000  # images that a file of Fashion-MNIST holds at most


def _fashion_mnist(wish):
    own = wish.path is not None
    root = PACKAGED
    if own:
        root = wish.path
        downloaded = root / "FashionMNIST" / "raw"  # by torchvision
        if os.path.isdir(downloaded):
            root = downloaded
    parts = []
    for name in ("train", "t10k"):
        images = _idx(root / f"{name}-images-idx3-ubyte.gz", own, 28, 28)  # uint8 [N, 28, 28]
        labels = _idx(root / f"{name}-labels-idx1-ubyte.gz", own)  # uint8 [N]
        if len(images) != len(labels):
            raise Refused(f"{root} holds {len(images)} images and {len(labels)} labels named {name}: replace "
                          f"the two files")
        if labels.max() > 9:
            raise Refused(f"{root}: a label of {name} is {labels.max()}, and Fashion-MNIST has 0 to 9: "
                          f"replace {name}-labels-idx1-ubyte.gz")
        parts.append((torch.from_numpy(images[:, None]), torch.from_numpy(labels)))
    return _in_memory("fashion_mnist", wish, *parts, 10, classes=CLOTHES)


def _idx(path, own, *item):
    """uint8 [N, *item] of a gzipped idx file: two zero bytes, the type (8 is uint8), the number of
    dimensions, each as a big-endian int32, then the values and nothing else.
    """
    if not os.path.isfile(path):
        remedy = f"apt-get install dataset-fashion-mnist brings it (to {PACKAGED})"
        if not own:
            remedy += ", or --data fashion_mnist:PATH for a folder of your own"
        raise Refused(f"{path.parent} holds no {path.name}: {remedy}")
    with reading(path, "a file of Fashion-MNIST"), gzip.open(path) as file:
        dims = 1 + len(item)
        header = np.frombuffer(file.read(4 + 4 * dims), ">i4")
        if len(header) != 1 + dims or header[0] != 0x0800 + dims:
            raise ValueError(f"it does not begin as an idx file of uint8 with {dims} dimensions")
        count, *rest = header[1:].tolist()
        if rest != list(item) or not 0 < count <= MOST:
            raise ValueError(f"it holds {header[1:].tolist()} values, not up to {MOST:,} x {list(item)}")
        size = count * int(np.prod(item, dtype=int))
        content = file.read(size + 1)  # one byte more: so that a longer file is seen, and its checksum read
        if len(content) != size:
            what = "more" if len(content) > size else "fewer"
            raise ValueError(f"it holds {what} than the {size:,} bytes that its header says")
        return np.frombuffer(bytearray(content), np.uint8).reshape(count, *item)


def _medmnist(wish):
    file = wish.path
    if not os.path.isfile(file):
        raise Refused(f"{file} does not exist: give the path of a 2-D .npz file from medmnist.com")
    with reading(file, "a MedMNIST file"), np.load(file, allow_pickle=False) as arrays:
        images, labels = [], []
        for name in ("train", "test"):
            images.append(_npz_images(name, arrays[f"{name}_images"]))
            labels.append(arrays[f"{name}_labels"])
            if len(images[-1]) != len(labels[-1]):
                raise ValueError("images and labels don't match")
        channels, other = images[0].shape[1], images[1].shape[1]
        if channels != other:
            raise ValueError(f"train_images have {channels} channels and test_images {other}")
        if all(own.size == len(own) for own in labels):
            labels = [_npz_labels(own) for own in labels]
            num_classes = 1 + max(int(own.max()) for own in labels)
        else:  # an image has several
            labels = [torch.zeros(len(own), dtype=torch.long) for own in labels]
            num_classes = 0
    train, heldout = zip(images, labels, strict=True)
    return _in_memory(file.stem, wish, train, heldout, num_classes)


def _npz_images(name, images):
    """uint8 [N, H, W] or [N, H, W, 3] -> [N, C, H, W]"""
    shaped = images.ndim == 3 or images.ndim == 4 and images.shape[-1] == 3
    if images.dtype != np.uint8 or not shaped or not images.size:
        raise ValueError(f"{name}_images is {images.dtype} {list(images.shape)}, not uint8 [N, H, W(, 3)]")
    return torch.from_numpy(images.reshape(*images.shape[:3], -1)).permute(0, 3, 1, 2).contiguous()


def _npz_labels(labels):
    """[N] or [N, 1] of any kind of number -> int64 [N]. Checked before the cast, which hides a bad label."""
    labels = labels.reshape(-1)
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"its labels are {labels.dtype}, not whole numbers")
    bad = labels[~((labels >= 0) & (labels < MAX_LABELS) & (labels == np.floor(labels)))]  # so is NaN
    if len(bad):
        raise ValueError(f"a label is {bad[0]}: number the classes 0, 1, 2, ... below {MAX_LABELS:,}")
    return torch.from_numpy(labels.astype(np.int64))


# ---- Volumes -----------------------------------------------------------------------------------------------

def _nifti(wish):
    """Slices of all volumes, in memory, each volume scaled by its 0.5th and 99.5th percentile.

    Only slices with at least 2 % of their pixels above a tenth of the range are kept. A volume is held out
    whole, since neighbouring slices look alike. When there is only one, its uppermost tenth is held out.
    """
    root, size = wish.path, wish.size or 64
    triples = folders.volumes(root, wish.masks)
    images, targets = [], []
    owners = []  # the name of each slice's volume
    values, content = [], []
    for name, file, mask_file in triples:
        volume = folders.decode_volume(file)  # [Z, Y, X]
        low, high = np.percentile(volume, (0.5, 99.5))  # so that a few hot voxels don't set the scale
        unit = np.clip((volume - low) / max(high - low, 1e-12), 0, 1)
        keep = (unit > 0.1).mean((1, 2)) >= 0.02
        if not keep.any():
            raise Refused(f"volume {file} has no slice with anything to see: remove it")
        images.append(square(torch.from_numpy(unit[keep]).float()[:, None] * 2 - 1, size))
        owners += [name] * len(images[-1])
        content += [name, folders.sha256(file)]
        if mask_file:
            content.append(folders.sha256(mask_file))
        if wish.masks:
            mask = folders.decode_mask_volume(mask_file, file, volume.shape)
            targets.append(square_mask(torch.from_numpy(mask[keep]), size))
            values.append(np.unique(mask))
        else:
            targets.append(torch.zeros(len(images[-1])))
    images, target = torch.cat(images), torch.cat(targets).long()
    if len(triples) > 1:
        chosen = folders.held_out(root, sorted(set(owners)))
        held = torch.tensor([name in chosen for name in owners])
    else:
        count = len(folders.held_out(root, [str(i) for i in range(len(images))]))
        held = torch.arange(len(images)) >= len(images) - count
    if wish.masks:
        values = folders.mask_values(root, values)
        target = torch.from_numpy(np.searchsorted(values, target.numpy()).astype(np.uint8))
    train = Tensors(images[~held], target[~held], size)
    heldout = Tensors(images[held], target[held], size)
    return _data(f"nifti-{root.resolve().name}", wish, train, heldout, 1, len(values), size, content)


class _Set(NamedTuple):
    form: str
    load: object
    has_masks: bool = False


SETS = {
    "digits": _Set("digits", _digits),
    "synthetic": _Set("synthetic", _synthetic, has_masks=True),
    "folder": _Set("folder:PATH", _folder, has_masks=True),
    "cifar10": _Set("cifar10:PATH", _cifar10),
    "mnist": _Set("mnist:PATH", _mnist),
    "fashion_mnist": _Set("fashion_mnist[:PATH]", _fashion_mnist),
    "medmnist": _Set("medmnist:FILE.npz", _medmnist),
    "nifti": _Set("nifti:PATH", _nifti, has_masks=True),
}
