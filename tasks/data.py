"""Every data set of the laboratory, behind one word: data.load("digits"). In brackets what is held out.

    digits            1,797 handwritten digits, 8x8, from digits.safetensors (500, stratified)
    synthetic         MONAI's discs in noise with their masks, 64x64 (64 of 320)
    folder:PATH       images, class folders optional; with masks PATH/images and PATH/masks, each image and
                      its mask under one stem; with inputs PATH/inputs and PATH/targets in the same way
                      (a tenth, one at least, by the hash of the name)
    nifti:PATH        axial slices of a .nii or .nii.gz volume, or of a folder of them; with masks PATH/images
                      and PATH/masks again (a tenth of the volumes, or of the slices of one)
    dicom:PATH        the same of a folder of .dcm files, or of one with a folder for each series; no masks
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
    white: int = folders.WHITE_16_BIT
    pages: str = "first"
    labels: str = "folders"
    skip_broken: bool = False
    dims: int = 2  # 3: volumes as volumes, not as slices

    @property
    def masks(self):
        """Whether the targets are masks."""
        return self.targets == "masks"


def load_by_flags(config, spec: str, targets: str, dims: int = 2) -> Data:
    """The data set of a run's flags. dims: 3 for volumes as volumes."""
    c = config
    reading = dict(white=c.white, pages=c.pages, labels=c.labels, skip_broken=c.skip_broken, dims=dims)
    return load(spec, targets, c.image_size, c.seed, **reading)


def load(
    spec: str,
    targets: str = "labels",
    image_size: int | None = None,
    seed: int = 0,
    **reading,
) -> Data:
    """The data set that `spec` names (see the table above), with its "labels", its "masks" or, of a folder,
    its "inputs" as targets.

    image_size None keeps the set's own size, 64 for folders and volumes. `seed` draws synthetic and touches
    no other set. reading, for folders: white, the value of white in files of 16 bits; pages, which images of
    a file of several, "first" or "all"; labels, "folders" or "none"; skip_broken; dims, 3 for the volumes of
    a set with masks, in cubes of image_size (32). Raises Refused.
    """
    if targets not in ("labels", "masks", "inputs"):
        raise ValueError(f"targets are labels, masks or inputs, not {targets!r}")
    word, _, where = spec.partition(":")
    if word not in DATA_SETS:
        instead = f"choose one of {', '.join(known.form for known in DATA_SETS.values())}"
        if spec and os.path.exists(spec):
            instead = f"did you mean folder:{spec}"
        raise Refused(f"unknown data set {spec!r}: {instead}")
    form, loader, gives = DATA_SETS[word]
    optional = "[" in form
    takes_path = ":" in form
    if takes_path != bool(where) and not optional:
        raise Refused(f"{word} {'needs a' if takes_path else 'takes no'} path: write --data {form}")
    wanted = [targets, "volumes"] if reading.get("dims") == 3 else [targets]
    for what in wanted:
        if what not in gives:
            raise Refused(f"{word} has no {what}: {WHERE_ELSE[what]}")
    # an unknown ~name stays as it is, and is no folder
    path = Path(os.path.expanduser(where)) if where else None
    wish = Wish(path, targets, image_size, seed, **reading)
    taken = {"folder": READING, "nifti": ("skip_broken",), "dicom": ("skip_broken",)}.get(word, ())
    if targets != "labels":  # each image has one file of them
        taken = [flag for flag in taken if flag not in ("pages", "labels")]
    refuse_ways_to_read_files(wish, taken)
    return loader(wish)


READING = ("white", "pages", "labels", "skip_broken")  # flags that say how files of images are read


def refuse_ways_to_read_files(wish, taken=()):
    """Raises Refused for those of READING that differ from their defaults and are not `taken`. wish: a Wish,
    or flags.
    """
    for flag in READING:
        if getattr(wish, flag) != Wish._field_defaults[flag] and flag not in taken:
            alone = ", without masks or inputs" if flag in ("pages", "labels") else ""
            raise Refused(f"--{flag} says how image files are read, of --data folder:PATH{alone}: drop it")


# ---- Built in ----------------------------------------------------------------------------------------------


CUBE = 32  # voxels a side, where --image_size does not say it
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
        from monai.data.synthetic import create_test_image_2d, create_test_image_3d

    size = wish.size or 64
    create, sides = create_test_image_2d, (size, size)
    if wish.dims == 3:
        size = wish.size or CUBE
        count, heldout = 12, 3
        create, sides = create_test_image_3d, (2 * size,) * 3
    random = np.random.RandomState(wish.seed % 2**32)
    images, masks = [], []
    for _ in range(count):
        image, mask = create(
            *sides,
            num_objs=10,
            rad_min=max(1, sides[0] // 16),
            rad_max=max(2, sides[0] // 5),
            # up to half the brightest class, which outshines the darkest in places: no threshold solves it
            noise_max=0.5,
            num_seg_classes=classes,
            random_state=random,
        )
        images.append(image)
        masks.append(mask)
    images = torch.from_numpy(np.stack(images)).float()[:, None] * 2 - 1
    if wish.dims == 3:
        from tasks.volumes import Volume

        masks = torch.from_numpy(np.stack(masks)).float()[:, None]
        found = [Volume(*parts, np.ones(3)) for parts in zip(images, masks, strict=True)]
        content = [images, masks]
        return _in_cubes("synthetic", wish, found[heldout:], found[:heldout], classes + 1, content)
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
    folders.check_layout(wish.path, wish.targets, "folder", wish.labels)
    if wish.targets == "labels":
        return _labelled_folder(wish)
    return _masked_folder(wish) if wish.masks else _paired_folder(wish)


def _masked_folder(wish):
    root = wish.path
    triples = folders.matched_pairs(root, {"images": folders.IMAGE_SUFFIXES, "masks": folders.MASK_SUFFIXES})
    images = [image for _, image, _ in triples]
    masks = [mask for _, _, mask in triples]
    looks = folders.survey(images, masks, broken_too=True)
    notes, triples, seen, seen_masks = folders.without_broken(wish.skip_broken, triples, *looks)
    folders.check_extents(triples, seen, seen_masks)
    values = folders.mask_values(root / "masks", [mask.values for mask in seen_masks])
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    targets = [mask.sha256 for mask in seen_masks]
    return _of_files(wish, triples, seen, targets, chosen, values.tolist(), notes, values)


def _paired_folder(wish):
    root = wish.path
    parts = {"targets": folders.IMAGE_SUFFIXES, "inputs": folders.IMAGE_SUFFIXES}
    triples = folders.matched_pairs(root, parts)
    count = len(triples)
    files = [image for _, image, _ in triples] + [other for _, _, other in triples]
    seen, _ = folders.survey(files, [], broken_too=True)
    looks = seen[:count], seen[count:]
    notes, triples, seen, others = folders.without_broken(wish.skip_broken, triples, *looks)
    folders.check_shapes(triples, seen, others)
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    hashes = [other.sha256 for other in others]
    return _of_files(wish, triples, seen + others, hashes, chosen, range(_channels(others)), notes)


def _channels(seen):
    return 1 if all(folders.is_grey(image.mode) for image in seen) else 3


def _labelled_folder(wish):
    root = wish.path
    triples, classes = folders.labelled_images(root, wish.labels)
    look, _ = folders.survey([image for _, image, _ in triples], [], wish.pages, broken_too=True)
    notes, triples, seen = folders.without_broken(wish.skip_broken, triples, look)
    chosen = folders.held_out_names(root, [name for name, _, _ in triples])
    chosen = folders.with_every_class(chosen, triples)
    targets = [label for _, _, label in triples]
    return _of_files(wish, triples, seen, targets, chosen, classes, notes)


def _of_files(wish, triples, seen, targets, chosen, classes, notes, values=None):
    """Data of a folder. triples: (name, image, its label, mask or input); seen: a folders.SeenFile an image,
    and an input behind them; targets: what the fingerprint reads of a label, mask or input; chosen: the names
    held out; classes: as many as labels, masks or channels of the inputs have; notes: on what is left out;
    values: those of the masks.
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
    notes += folders.left_out(wish.path, (*folders.IMAGE_SUFFIXES, *folders.MASK_SUFFIXES))
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
        notes=notes + folders.notes_on_images(seen, wish.white, wish.pages, wish.targets),
    )


# ---- Volumes -----------------------------------------------------------------------------------------------


def _nifti(wish):
    return _volumes(wish, "nifti", folders.matched_volumes(wish.path, wish.masks))


def _dicom(wish):
    folders.check_layout(wish.path, wish.targets, "dicom")
    return _volumes(wish, "dicom", folders.dicom_series(wish.path))


def _volumes(wish, kind, rows):
    """Slices of all volumes, in memory, each volume scaled by its 0.5th and 99.5th percentile.

    Only slices with at least 2 % of their pixels above a tenth of the range are kept. A volume is held out
    whole, since neighbouring slices look alike. When there is only one, its uppermost tenth is held out.
    """
    if wish.dims == 3:
        return _whole_volumes(wish, kind, rows)
    root = wish.path
    size = wish.size or 64
    looks = [_seen_volume(name, file, mask_file, size) for name, file, mask_file in rows]
    notes, _, looks = folders.without_broken(wish.skip_broken, rows, looks)
    owners, content = [], []
    for look in looks:
        owners += [look.name] * len(look.images)
        content += look.content
    images = torch.cat([look.images for look in looks])
    targets = torch.cat([look.targets for look in looks]).long()
    values = []
    if wish.masks:
        values = folders.mask_values(root / "masks", [look.values for look in looks])
        targets = torch.from_numpy(np.searchsorted(values, targets.numpy()).astype(np.uint8))
    held = _held_slices(root, owners)
    train = Tensors(images[~held], targets[~held], size)
    heldout = Tensors(images[held], targets[held], size)
    name = f"{kind}-{root.resolve().name}"
    return data_set(name, wish, train, heldout, 1, len(values), size, content, notes=notes)


def _whole_volumes(wish, kind, rows):
    """All volumes in memory, on one grid. A tenth of them is held out."""
    from tasks import volumes  # with MONAI, which takes seconds to import

    root = wish.path
    looks = [volumes.read(file, mask_file) for _, file, mask_file in rows]
    notes, rows, looks = folders.without_broken(wish.skip_broken, rows, looks)
    values = folders.mask_values(root / "masks", [look.mask.unique().numpy() for look in looks])
    chosen = folders.held_out_names(root, [name for name, _, _ in rows], "volume")
    content = [(name, *map(folders.sha256, files)) for name, *files in rows]
    train, heldout = [], []
    whole = volumes.on_one_grid(looks, wish.size or CUBE)
    for (name, _, _), volume in zip(rows, whole, strict=True):
        classes = np.searchsorted(values, volume.mask.numpy()).astype(np.float32)
        part = heldout if name in chosen else train
        part.append(volume._replace(mask=torch.from_numpy(classes)))
    name = f"{kind}-{root.resolve().name}"
    return _in_cubes(name, wish, train, heldout, len(values), content, notes)


def _in_cubes(name, wish, train, heldout, num_classes, content, notes=()):
    """Data of two lists of volumes.Volume on one grid, their masks of classes."""
    from tasks.volumes import Cubes

    size = wish.size or CUBE
    parts = Cubes(train, size), Cubes(heldout, size)
    return data_set(name, wish, *parts, 1, num_classes, size, content, notes=notes)


class _SeenVolume(NamedTuple):
    name: str
    images: torch.Tensor  # [slices, 1, size, size]
    targets: torch.Tensor  # [slices], zeros, or of masks [slices, size, size]
    values: np.ndarray | None  # of the whole mask
    content: list  # for the fingerprint


def _seen_volume(name, file, mask_file, size):
    """_SeenVolume of a file, or the Refused that it is worth."""
    try:
        volume, _ = folders.decode_volume(file)  # [Z, Y, X]
        unit = folders.unit_range(volume)
        keep = (unit > 0.1).mean((1, 2)) >= 0.02
        folders.some_of(keep.any(), file, "slice with anything to see", "remove it")
        images = square(torch.from_numpy(unit[keep]).float()[:, None] * 2 - 1, size)
        content = [name, folders.sha256(file)]
        if mask_file is None:
            return _SeenVolume(name, images, torch.zeros(len(images)), None, content)
        mask = folders.decode_mask_volume(mask_file, file, volume.shape)
        targets = square_mask(torch.from_numpy(mask[keep]), size)
        return _SeenVolume(name, images, targets, np.unique(mask), [*content, folders.sha256(mask_file)])
    except Refused as error:
        return error


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
    gives: tuple = ("labels",)  # targets, and whether as volumes


WHERE_ELSE = {  # what a set may lack: where it is
    "masks": "to segment use --data synthetic, folder:PATH or nifti:PATH",
    "inputs": "use --data folder:PATH, pairs in PATH/inputs and PATH/targets",
    "volumes": "--dims 3 takes --data nifti:PATH",
}
DATA_SETS = {
    "digits": _Set("digits", _digits),
    "synthetic": _Set("synthetic", _synthetic, ("labels", "masks", "volumes")),
    "folder": _Set("folder:PATH", _image_folder, ("labels", "masks", "inputs")),
    "cifar10": _Set("cifar10:PATH", cifar10),
    "mnist": _Set("mnist:PATH", mnist),
    "fashion_mnist": _Set("fashion_mnist[:PATH]", fashion_mnist),
    "medmnist": _Set("medmnist:FILE.npz", medmnist),
    "nifti": _Set("nifti:PATH", _nifti, ("labels", "masks", "volumes")),
    "dicom": _Set("dicom:PATH", _dicom),
}
