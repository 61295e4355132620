"""Every data set of the laboratory, behind one word.

    python -c "import data; print(data.load('digits'))"

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
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lowprec.errors import Refused
from lowprec.machine import without
from tasks import folders
from tasks.image_sets import Data, Files, Tensors, data_set, in_memory, square, square_mask
from tasks.published_sets import cifar10, fashion_mnist, medmnist, mnist


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
        near = f"did you mean folder:{spec}" if spec and os.path.exists(spec) else f"choose one of {forms}"
        raise Refused(f"unknown data set {spec!r}: {near}")
    form, loader, has_masks = SETS[word]
    if "[" not in form and bool(where) != (":" in form):
        raise Refused(f"{word} {'takes no' if where else 'needs a'} path: write --data {form}")
    if targets == "masks" and not has_masks:
        raise Refused(f"{word} has no masks: to segment use --data synthetic, folder:PATH or nifti:PATH")
    # an unknown ~name stays as it is, and is no folder
    path = Path(os.path.expanduser(where)) if where else None
    return loader(Wish(path, targets == "masks", image_size, seed))


# ---- Built in ----------------------------------------------------------------------------------------------

def _digits(wish):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1  # 0..16 -> [-1, 1], exact in fp32
    labels = torch.from_numpy(digits.target).long()
    split = train_test_split(np.arange(len(labels)), test_size=500, stratify=digits.target, random_state=0)
    train, heldout = ((images[part], labels[part]) for part in split)
    return in_memory("digits", wish, train, heldout, 10, "digits" if wish.size in (None, 8) else None)


def _synthetic(wish, count=320, heldout=64, classes=3):
    with without("transformers"):
        from monai.data.synthetic import create_test_image_2d
    size, random = wish.size or 64, np.random.RandomState(wish.seed % 2**32)
    # Noise up to half the brightest class outshines the darkest one in places: no threshold solves the task.
    discs = {"num_objs": 10, "rad_min": max(1, size // 16), "rad_max": max(2, size // 5),
             "noise_max": 0.5, "num_seg_classes": classes, "random_state": random}
    pairs = [create_test_image_2d(size, size, **discs) for _ in range(count)]
    images, masks = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*pairs, strict=True))
    images = images.float()[:, None] * 2 - 1
    target = masks.to(torch.uint8) if wish.masks else torch.zeros(count, dtype=torch.long)
    train, heldout = ((images[part], target[part]) for part in (slice(heldout, None), slice(heldout)))
    return in_memory("synthetic", wish._replace(size=size), train, heldout, classes + 1 if wish.masks else 0)


# ---- Folders of images -------------------------------------------------------------------------------------

def _folder(wish):
    root, size = wish.path, wish.size or 64
    folders.check_layout(root, wish.masks, "folder")
    if wish.masks:
        triples = folders.pairs(root, folders.IMAGES, folders.MASKS)
        seen, seen_masks = folders.survey([t[1] for t in triples], [t[2] for t in triples])
        folders.check_extents(triples, seen, seen_masks)
        values = folders.mask_values(root, [mask.values for mask in seen_masks])
        targets, classes = [mask.sha256 for mask in seen_masks], values.tolist()
    else:
        triples, classes = folders.labelled(root)
        seen, _ = folders.survey([t[1] for t in triples], [])
        targets, values = [label for _, _, label in triples], None
    channels = 1 if all(folders.is_grey(image.mode) for image in seen) else 3
    chosen = folders.held_out(root, [name for name, *_ in triples])
    chosen = chosen if wish.masks else folders.with_every_class(chosen, triples)
    train = Files([rest for name, *rest in triples if name not in chosen], channels, size, values)
    heldout = Files([rest for name, *rest in triples if name in chosen], channels, size, values)
    content = [(t[0], image.sha256, target) for t, image, target in zip(triples, seen, targets, strict=True)]
    return data_set(f"folder-{root.resolve().name}", wish, train, heldout, channels, len(classes), size,
                 [content, classes], classes=() if wish.masks else classes)


# ---- Volumes -----------------------------------------------------------------------------------------------

def _nifti(wish):
    """Slices of all volumes, in memory, each volume scaled by its 0.5th and 99.5th percentile.

    Only slices with at least 2 % of their pixels above a tenth of the range are kept. A volume is held out
    whole, since neighbouring slices look alike. When there is only one, its uppermost tenth is held out.
    """
    root, size = wish.path, wish.size or 64
    triples = folders.volumes(root, wish.masks)
    images, targets, owners, values, content = [], [], [], [], []
    for name, file, mask_file in triples:
        volume = folders.decode_volume(file)  # [Z, Y, X]
        low, high = np.percentile(volume, (0.5, 99.5))  # so that a few hot voxels don't set the scale
        unit = np.clip((volume - low) / max(high - low, 1e-12), 0, 1)
        keep = (unit > 0.1).mean((1, 2)) >= 0.02
        if not keep.any():
            raise Refused(f"volume {file} has no slice with anything to see: remove it")
        images.append(square(torch.from_numpy(unit[keep]).float()[:, None] * 2 - 1, size))
        owners += [name] * len(images[-1])
        content += [name, *(folders.sha256(path) for path in (file, mask_file) if path)]
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
    train, heldout = (Tensors(images[part], target[part], size) for part in (~held, held))
    return data_set(f"nifti-{root.resolve().name}", wish, train, heldout, 1, len(values), size, content)


class _Set(NamedTuple):
    form: str
    load: object
    has_masks: bool = False


SETS = {
    "digits": _Set("digits", _digits),
    "synthetic": _Set("synthetic", _synthetic, has_masks=True),
    "folder": _Set("folder:PATH", _folder, has_masks=True),
    "cifar10": _Set("cifar10:PATH", cifar10),
    "mnist": _Set("mnist:PATH", mnist),
    "fashion_mnist": _Set("fashion_mnist[:PATH]", fashion_mnist),
    "medmnist": _Set("medmnist:FILE.npz", medmnist),
    "nifti": _Set("nifti:PATH", _nifti, has_masks=True),
}
