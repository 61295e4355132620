"""Every data set of the laboratory, behind one word: data.load("digits"). In brackets what is held out.

    digits            1,797 handwritten digits, 8x8, from digits.safetensors (500, stratified)
    synthetic         MONAI's discs in noise with their masks, 64x64 (64 of 320)
    folder:PATH       images, class folders optional; with masks PATH/images and PATH/masks, each image and
                      its mask under one stem; with inputs PATH/inputs and PATH/targets in the same way
                      (a tenth, one at least, by the hash of the name)
    nifti:PATH        axial slices of a .nii or .nii.gz volume, or of a folder of them; with masks PATH/images
                      and PATH/masks again (a tenth of the volumes, or of the slices of one)
    cifar10:PATH, mnist:PATH, fashion_mnist[:PATH], medmnist:FILE.npz: see published_sets.py

Images are cropped to their central square and resized; the distinct values of all masks become 0, 1, ...

digits.safetensors holds scikit-learn's load_digits() in the order of its train_test_split, random_state=0:
who trains on digits does not wait for scikit-learn to be imported. They are the test digits of E. Alpaydin
and C. Kaynak in the UCI repository (10.24432/C50P49, CC BY 4.0).
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from harness.files import read_tensors
from lowprec.errors import Refused
from lowprec.machine import monai_alone
from tasks import folders
from tasks.image_sets import Data, Files, Tensors, data_set, in_memory, square, square_mask
from tasks.published_sets import cifar10, fashion_mnist, medmnist, mnist


class Wish(NamedTuple):
    """What a loader is asked for: the arguments of load(), the path apart from the word."""

    path: Path | None
    targets: str
    size: int | None
    seed: int
    white: int
    pages: str

    @property
    def masks(self):
        """Whether the targets are masks."""
        return self.targets == "masks"


def load(
    spec: str,
    targets: str = "labels",
    image_size: int | None = None,
    seed: int = 0,
    white: int = folders.WHITE_16_BIT,
    pages: str = "first",
) -> Data:
    """The data set that `spec` names (see the table above), with its "labels", its "masks" or, of a folder,
    its "inputs" as targets.

    image_size None keeps the set's own size, 64 for folders and volumes. `seed` draws synthetic and touches
    no other set. white: the value of white in files of 16 bits; pages: which images of a file of several,
    "first" or "all". Raises Refused.
    """
    if targets not in ("labels", "masks", "inputs"):
        raise ValueError(f"targets are labels, masks or inputs, not {targets!r}")
    if image_size is not None and image_size < 8:
        raise Refused(f"image size {image_size} is too small: give at least 8")
    word, _, where = spec.partition(":")
    if word not in DATA_SETS:
        if spec and os.path.exists(spec):
            raise Refused(f"unknown data set {spec!r}: did you mean folder:{spec}")
        forms = ", ".join(known.form for known in DATA_SETS.values())
        raise Refused(f"unknown data set {spec!r}: choose one of {forms}")
    form, loader, has_masks = DATA_SETS[word]
    optional = "[" in form
    takes_path = ":" in form
    if not optional and takes_path and not where:
        raise Refused(f"{word} needs a path: write --data {form}")
    if not takes_path and where:
        raise Refused(f"{word} takes no path: write --data {form}")
    if targets == "masks" and not has_masks:
        raise Refused(f"{word} has no masks: to segment use --data synthetic, folder:PATH or nifti:PATH")
    if targets == "inputs" and word != "folder":
        raise Refused(f"{word} has no pairs: use --data folder:PATH with PATH/inputs and PATH/targets")
    if word != "folder":
        refuse_ways_to_read_files(white, pages)
    # an unknown ~name stays as it is, and is no folder
    path = Path(os.path.expanduser(where)) if where else None
    return loader(Wish(path, targets, image_size, seed, white, pages))


def refuse_ways_to_read_files(white, pages):
    """Raises Refused for --white and --pages beside data that are no folder of images."""
    for flag, changed in (("white", white != folders.WHITE_16_BIT), ("pages", pages != "first")):
        if changed:
            raise Refused(f"--{flag} says how image files are read, for --data folder:PATH: drop it")


# ---- Built in ----------------------------------------------------------------------------------------------


DIGITS_FILE = Path(__file__).with_name("digits.safetensors")
DIGITS_TRAINED = 1297  # of the file's digits; the others are held out


def _digits(wish):
    digits, _ = read_tensors(DIGITS_FILE)
    images = digits["images"].float()[:, None] / 8 - 1  # 0..16 -> [-1, 1], exact in fp32
    labels = digits["labels"].long()
    return in_memory(
        "digits",
        wish,
        (images[:DIGITS_TRAINED], labels[:DIGITS_TRAINED]),
        (images[DIGITS_TRAINED:], labels[DIGITS_TRAINED:]),
        num_classes=10,
        yardstick="digits" if wish.size in (None, 8) else None,
    )


def _synthetic(wish, count=320, heldout=64, classes=3):
    with monai_alone():
        from monai.data.synthetic import create_test_image_2d

    size = wish.size or 64
    random = np.random.RandomState(wish.seed % 2**32)
    images, masks = [], []
    for _ in range(count):
        image, mask = create_test_image_2d(
            size,
            size,
            num_objs=10,
            rad_min=max(1, size // 16),
            rad_max=max(2, size // 5),
            # up to half the brightest class, which outshines the darkest in places: no threshold solves it
            noise_max=0.5,
            num_seg_classes=classes,
            random_state=random,
        )
        images.append(image)
        masks.append(mask)
    images = torch.from_numpy(np.stack(images)).float()[:, None] * 2 - 1
    if wish.masks:
        targets = torch.from_numpy(np.stack(masks)).to(torch.uint8)
    else:
        targets = torch.zeros(count, dtype=torch.long)
    return in_memory(
        "synthetic",
        wish._replace(size=size),
        (images[heldout:], targets[heldout:]),
        (images[:heldout], targets[:heldout]),
        num_classes=classes + 1 if wish.masks else 0,
    )


# ---- Folders of images -------------------------------------------------------------------------------------


def _image_folder(wish):
    folders.check_layout(wish.path, wish.targets, "folder")
    if wish.targets == "labels":
        return _labelled_folder(wish)
    if wish.pages == "all":
        raise Refused(
            f"--pages all: the pages of an image have no {wish.targets}; save each as a file of its own"
        )
    return _masked_folder(wish) if wish.masks else _paired_folder(wish)


def _masked_folder(wish):
    root = wish.path
    triples = folders.matched_pairs(root, {"images": folders.IMAGE_SUFFIXES, "masks": folders.MASK_SUFFIXES})
    images = [image for _, image, _ in triples]
    masks = [mask for _, _, mask in triples]
    seen, seen_masks = folders.survey(images, masks)
    folders.check_extents(triples, seen, seen_masks)
    values = folders.mask_values(root, [mask.values for mask in seen_masks])
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    targets = [mask.sha256 for mask in seen_masks]
    return _of_files(wish, triples, seen, targets, chosen, values.tolist(), values)


def _paired_folder(wish):
    root = wish.path
    parts = {"targets": folders.IMAGE_SUFFIXES, "inputs": folders.IMAGE_SUFFIXES}
    triples = folders.matched_pairs(root, parts)
    count = len(triples)
    files = [image for _, image, _ in triples] + [other for _, _, other in triples]
    seen, _ = folders.survey(files, [])
    folders.check_shapes(triples, seen[:count], seen[count:])
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    hashes = [other.sha256 for other in seen[count:]]
    return _of_files(wish, triples, seen, hashes, chosen, range(_channels(seen[count:])))


def _channels(seen):
    return 1 if all(folders.is_grey(image.mode) for image in seen) else 3


def _labelled_folder(wish):
    root = wish.path
    triples, classes = folders.labelled_images(root)
    seen, _ = folders.survey([image for _, image, _ in triples], [], wish.pages)
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    chosen = folders.with_every_class(chosen, triples)
    targets = [label for _, _, label in triples]
    return _of_files(wish, triples, seen, targets, chosen, classes)


def _of_files(wish, triples, seen, targets, chosen, classes, values=None):
    """Data of a folder. triples: (name, image, its label, mask or input); seen: a folders.SeenFile an image,
    and an input behind them; targets: what the fingerprint reads of a label, mask or input; chosen: the names
    held out; classes: as many as labels, masks or channels of the inputs have; values: those of the masks.
    """
    size = wish.size or 64
    channels = _channels(seen[: len(triples)])
    others = len(classes) if wish.targets == "inputs" else 0
    train, heldout, content = [], [], []
    for (name, image, target), its, of_target in zip(triples, seen, targets, strict=False):
        part = heldout if name in chosen else train
        part.append((image, target))
        if wish.pages == "all":
            part += [(folders.Page(image, number), target) for number in range(1, its.pages)]
        content.append((name, its.sha256, of_target))
    changed = [how for how in (wish.white, wish.pages) if how not in (folders.WHITE_16_BIT, "first")]
    return data_set(
        f"folder-{wish.path.resolve().name}",
        wish,
        Files(train, channels, size, values, wish.white, others),
        Files(heldout, channels, size, values, wish.white, others),
        channels,
        len(classes),
        size,
        [content, classes, *changed],
        classes=classes if wish.targets == "labels" else (),
        notes=folders.notes_on_images(seen, wish.white, wish.pages, wish.targets),
    )


# ---- Volumes -----------------------------------------------------------------------------------------------


def _nifti(wish):
    """Slices of all volumes, in memory, each volume scaled by its 0.5th and 99.5th percentile.

    Only slices with at least 2 % of their pixels above a tenth of the range are kept. A volume is held out
    whole, since neighbouring slices look alike. When there is only one, its uppermost tenth is held out.
    """
    root = wish.path
    size = wish.size or 64
    images, targets, owners, values, content = [], [], [], [], []
    for name, file, mask_file in folders.matched_volumes(root, wish.masks):
        volume = folders.decode_volume(file)  # [Z, Y, X]
        unit, keep = _visible(file, volume)
        images.append(square(torch.from_numpy(unit[keep]).float()[:, None] * 2 - 1, size))
        count = len(images[-1])
        owners += [name] * count
        content += [name, folders.sha256(file)]
        if wish.masks:
            content.append(folders.sha256(mask_file))
            mask = folders.decode_mask_volume(mask_file, file, volume.shape)
            targets.append(square_mask(torch.from_numpy(mask[keep]), size))
            values.append(np.unique(mask))
        else:
            targets.append(torch.zeros(count))
    images = torch.cat(images)
    targets = torch.cat(targets).long()
    if wish.masks:
        values = folders.mask_values(root, values)
        targets = torch.from_numpy(np.searchsorted(values, targets.numpy()).astype(np.uint8))
    held = _held_slices(root, owners)
    train = Tensors(images[~held], targets[~held], size)
    heldout = Tensors(images[held], targets[held], size)
    return data_set(f"nifti-{root.resolve().name}", wish, train, heldout, 1, len(values), size, content)


def _visible(file, volume):
    """(a volume [Z, Y, X] scaled to [0, 1], whether there is something to see in a slice, bool [Z])."""
    low, high = np.percentile(volume, (0.5, 99.5))  # so that a few hot voxels don't set the scale
    unit = np.clip((volume - low) / max(high - low, 1e-12), 0, 1)
    keep = (unit > 0.1).mean((1, 2)) >= 0.02
    if not keep.any():
        raise Refused(f"volume {file} has no slice with anything to see: remove it")
    return unit, keep


def _held_slices(root, owners):
    """bool [N], whether a slice is held out. owners: the name of each slice's volume."""
    names = sorted(set(owners))
    if len(names) > 1:
        chosen = folders.held_out_names(root, names)
        return torch.tensor([name in chosen for name in owners])
    count = len(folders.held_out_names(root, [str(i) for i in range(len(owners))]))
    return torch.arange(len(owners)) >= len(owners) - count


# ---- The table ---------------------------------------------------------------------------------------------


class _Set(NamedTuple):
    form: str
    load: object
    has_masks: bool = False


DATA_SETS = {
    "digits": _Set("digits", _digits),
    "synthetic": _Set("synthetic", _synthetic, has_masks=True),
    "folder": _Set("folder:PATH", _image_folder, has_masks=True),
    "cifar10": _Set("cifar10:PATH", cifar10),
    "mnist": _Set("mnist:PATH", mnist),
    "fashion_mnist": _Set("fashion_mnist[:PATH]", fashion_mnist),
    "medmnist": _Set("medmnist:FILE.npz", medmnist),
    "nifti": _Set("nifti:PATH", _nifti, has_masks=True),
}
