"""Image files and volumes in folders: which ones there are, what they hold, and that each can be read.

    python -c "from tasks import folders; print(folders.labelled_images(folders.Path('photos'))[0][:3])"

Only the formats below are ever opened, whatever a file is called.
"""

import hashlib
import importlib.util
import io
import logging
import os
import re
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from lowprec.errors import Refused

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")
MASK_SUFFIXES = (".png", ".bmp", ".tif", ".tiff")  # lossy formats blur class ids into the values between them
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")  # PIL opens 40 more, EPS by Ghostscript for one
if importlib.util.find_spec("pillow_heif"):  # what phones write, read where its package is here
    import pillow_heif

    pillow_heif.register_heif_opener()
    IMAGE_SUFFIXES += (".heic", ".heif")
    IMAGE_FORMATS += ("HEIF",)
# may hold several images; those of a phone's JPEG are aids for the first
PAGED_FORMATS = ("PNG", "WEBP", "TIFF", "GIF")
MASK_FORMATS = ("PNG", "BMP", "TIFF")
VOLUME_SUFFIXES = (".nii", ".nii.gz")
WHITE_16_BIT = 65535  # in an image of 16 bits
MAX_CLASSES = 200  # more distinct values than this are antialiasing, not class ids

# PIL warns of what it could read all the same. What it can't read is refused.
warnings.filterwarnings("ignore", module=r"PIL\.")


# ---- Refusals ----------------------------------------------------------------------------------------------


@contextmanager
def refusing_unreadable(path, what="an image"):
    """Decoders raise nearly everything on a broken file. All of it becomes a Refused that names the file. Who
    finds a fault within raises ValueError.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        remedy = "replace or remove it"
        if getattr(error, "strerror", None):  # of the system: the file itself may be good
            why, remedy = error.strerror, "check the path and its permissions"
        raise Refused(f"cannot read {path} as {what} ({why}): {remedy}") from None


def some_of(found, root: Path, what: str, remedy: str):
    """`found`, which may not be empty. Raises Refused: root holds no such thing."""
    if not found:
        raise Refused(f"{root} holds no {what}: {remedy}")
    return found


def check_sizes(alike: bool, one: str, size: tuple, other: str, its: tuple, remedy="make them the same size"):
    """Refuses two files that are not `alike`. one, other: what they are called; size, its: those of each."""
    if not alike:
        shown, shown_its = ("x".join(map(str, sides)) for sides in (size, its))
        raise Refused(f"{one} is {shown} but {other} is {shown_its}: {remedy}")


# ---- Layouts -----------------------------------------------------------------------------------------------


PARTS_OF_FOLDERS = {  # targets: (folders of the same names, that of the images, what reads both)
    "masks": (("images", "masks"), "images", "--task segment"),
    "inputs": (("inputs", "targets"), "targets", "--condition inputs"),
}


def check_layout(root: Path, targets: str, kind: str, labels: str = "folders"):
    """Refuses a folder that can't be read, or whose parts are something else than classes."""
    with refusing_unreadable(root, "a folder"):
        has = {entry.name for entry in os.scandir(root) if entry.is_dir()}
    for wanted, (parts, images, option) in PARTS_OF_FOLDERS.items():
        if targets == wanted and not has >= set(parts):
            missing = f"{root} has no folders {' and '.join(parts)}"
            raise Refused(f"{missing}: {option} needs both, with equal names")
        if targets == "labels" and labels != "none" and has >= set(parts):
            found = f"{root} holds {' and '.join(parts)}"
            raise Refused(f"{found}: use --data {kind}:{root / images}, or {option}")
    if targets != "labels" or labels == "none":
        return
    if "train" in has and has & {"test", "val", "valid", "validation"}:
        raise Refused(f"{root} is split into train and others: use --data {kind}:{root / 'train'}")


def files_with_suffix(folder: Path, suffixes: tuple, deep: bool = True) -> list[Path]:
    """Files with one of the suffixes, by name; without hidden ones (macOS leaves ._a.png beside a.png)."""

    def fail(error):
        raise error

    found = []
    with refusing_unreadable(folder, "a folder"):
        for where, inner, names in os.walk(folder, onerror=fail):
            inner[:] = [name for name in inner if deep and not name.startswith(".")]  # where it walks on
            for name in names:
                if name.lower().endswith(suffixes) and not name.startswith("."):
                    found.append(Path(where, name))
    return sorted(path for path in found if os.path.isfile(path))


def left_out(folder: Path, suffixes: tuple) -> list[str]:
    """A line on the files below a folder that have none of the suffixes, by kind and number; [] for none."""
    kinds = Counter()
    for path in files_with_suffix(folder, ("",)):
        if not path.name.lower().endswith(suffixes):
            kinds[path.suffix.lower() or "without a suffix"] += 1
    if not kinds:
        return []
    found = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return [f"files that are left out of {folder}: {found}"]


def labelled_images(root: Path, labels: str = "folders") -> tuple[list, list[str]]:
    """[(name, image, label)] and the classes' names: root's folders, sorted, or none if root holds images.
    labels "none": all images below root, without classes.
    """
    images = f"images ({', '.join(IMAGE_SUFFIXES)})"
    remedy = "give a folder of images or of class folders"
    if labels == "none":
        found = some_of(files_with_suffix(root, IMAGE_SUFFIXES), root, images, remedy)
        return [(path.relative_to(root).as_posix(), path, 0) for path in found], []
    flat = files_with_suffix(root, IMAGE_SUFFIXES, deep=False)
    classes = {}
    for path in sorted(root.iterdir()):
        if os.path.isdir(path) and not path.name.startswith("."):
            classes[path.name] = files_with_suffix(path, IMAGE_SUFFIXES)
    some_of(flat or any(classes.values()), root, images, remedy)
    if flat and any(classes.values()):
        raise Refused(
            f"{root} holds images beside class folders: move the images into one of them or away, or add "
            "--labels none, which takes all below without classes"
        )
    if flat:
        return [(path.name, path, 0) for path in flat], []
    for name, files in classes.items():
        some_of(files, root / name, "images", "fill or remove it")
    triples = []
    for label, files in enumerate(classes.values()):
        triples += [(path.relative_to(root).as_posix(), path, label) for path in files]
    return triples, list(classes)


def matched_pairs(root: Path, parts: dict[str, tuple]) -> list:
    """[(stem, image, its partner)] of two folders in root, which must match one to one. parts: {folder:
    suffixes}, as {"images": IMAGE_SUFFIXES, "masks": MASK_SUFFIXES}.
    """
    (first, suffixes), (second, partner_suffixes) = parts.items()
    image, partner = first.removesuffix("s"), second.removesuffix("s")
    images = _by_stem(root / first, suffixes)
    partners = _by_stem(root / second, partner_suffixes)
    some_of(images, root / first, f"images ({', '.join(suffixes)})", "put some there")
    check_partners((image, root / first, images), (partner, root / second, partners), partner_suffixes)
    return [(stem, images[stem], partners[stem]) for stem in sorted(images)]


def check_partners(images: tuple, partners: tuple, suffixes: tuple):
    """Refuses an image without its partner, and the reverse. images, partners: (what one is called, the
    folder, {stem: file}); suffixes: of partners.
    """
    image, folder_of_images, own = images
    partner, folder_of_partners, its = partners
    for stem in sorted(own.keys() ^ its.keys()):
        alone = f"{image} {own.get(stem)} has no {partner}"
        remedy = f"add {folder_of_partners / stem} with suffix {' or '.join(suffixes)}"
        if stem in its:
            alone = f"{partner} {its[stem]} has no {image}"
            remedy = f"add {folder_of_images / stem} or remove the {partner}"
        raise Refused(f"{alone}: {remedy}")


def _by_stem(folder, suffixes):
    stems = {}
    for path in files_with_suffix(folder, suffixes):
        stem = re.sub(r"(\.nii\.gz|\.[^./]+)$", "", path.relative_to(folder).as_posix(), flags=re.I)
        if stem in stems:
            raise Refused(f"{path} has the stem of {stems[stem].name}: rename or remove one")
        stems[stem] = path
    return stems


def matched_volumes(root: Path, masks: bool) -> list:
    """[(name, volume, its mask or None)] of one file or of a folder."""
    if os.path.isfile(root) and not masks:
        return [(root.name, root, None)]
    if os.path.isdir(root / "imagesTr"):  # as the Medical Segmentation Decathlon lays it out
        if masks:
            return matched_pairs(root, {"imagesTr": VOLUME_SUFFIXES, "labelsTr": VOLUME_SUFFIXES})
        root = root / "imagesTr"
    check_layout(root, "masks" if masks else "labels", "nifti")
    if masks:
        return matched_pairs(root, {"images": VOLUME_SUFFIXES, "masks": VOLUME_SUFFIXES})
    paths = files_with_suffix(root, VOLUME_SUFFIXES)
    some_of(paths, root, f"volumes ({', '.join(VOLUME_SUFFIXES)})", "give one, or a folder of them")
    return [(path.relative_to(root).as_posix(), path, None) for path in paths]


def dicom_series(root: Path) -> list:
    """[(name, folder, None)] of root and the folders below it that hold .dcm files: a series each."""
    if importlib.util.find_spec("pydicom") is None:
        raise Refused(f"--data dicom:{root} is read by pydicom, which is not here: pip install pydicom")
    folders = sorted({path.parent for path in files_with_suffix(root, (".dcm",))})
    some_of(folders, root, ".dcm files", "give a folder of them, or one with a folder a series")
    return [(folder.relative_to(root).as_posix(), folder, None) for folder in folders]


def held_out_names(root: Path, names: list[str], noun: str = "image") -> set[str]:
    """The tenth of the names whose hashes are smallest: adding files moves few others from part to part."""
    if len(names) < 2:
        raise Refused(f"{root} holds a single {noun}: give at least two, one to train on and one to hold out")
    ranked = sorted(names, key=_hash)
    return set(ranked[: max(1, round(len(names) / 10))])


def with_every_class(chosen: set[str], triples: list) -> set[str]:
    """`chosen`, and the name with the smallest hash of each class of two or more that has none in it."""
    chosen = set(chosen)
    by_label = {}
    for name, _, label in triples:
        by_label.setdefault(label, []).append(name)
    for names in by_label.values():
        if len(names) > 1 and not chosen.intersection(names):
            chosen.add(min(names, key=_hash))
    return chosen


def _hash(name):
    return hashlib.sha256(os.fsencode(name)).digest()


def check_extents(triples: list, images: list, masks: list):
    """Refuses a mask of another size than its image. triples: (name, image, mask); images and masks: the
    SeenFile of each.
    """
    for (_, path, mask_path), image, mask in zip(triples, images, masks, strict=True):
        check_sizes(image.size == mask.size, f"mask {mask_path}", mask.size, f"image {path}", image.size)


def check_shapes(triples: list, images: list, others: list):
    """Refuses an input of another shape than its target, whose central square shows another part. It may have
    fewer pixels. triples: (name, target, input); images and others: the SeenFile of each.
    """
    for (_, path, other_path), image, other in zip(triples, images, others, strict=True):
        off = abs(image.width * other.height - other.width * image.height)
        alike = off <= max(image.width, image.height)  # but for one pixel of the input
        whose = f"input {other_path}", other.size, f"target {path}", image.size
        check_sizes(alike, *whose, "give both the same shape")


def mask_values(folder: Path, values: list) -> np.ndarray:
    """The sorted distinct values of the masks in a folder, from those of each; a value's place is its class
    id.
    """
    values = np.unique(np.concatenate(values))
    if not 2 <= len(values) <= MAX_CLASSES:
        found = f"the value {values[0]:g} alone" if len(values) == 1 else f"{len(values)} values"
        wanted = f"up to {MAX_CLASSES} class ids, of a background and a class at least, without antialiasing"
        raise Refused(f"{folder} holds {found}: save {wanted}")
    return values


# ---- What a file holds -------------------------------------------------------------------------------------


class SeenFile(NamedTuple):
    """What one look at a file told."""

    mode: str  # of the first page that is no grey one, where all are read
    width: int  # as displayed: upright by EXIF
    height: int
    sha256: str
    values: list | None = None  # the distinct values of a mask, sorted; None for an image
    largest: int = 0  # value of an image of 16 bits
    pages: int = 1  # images in the file

    @property
    def size(self):
        return self.width, self.height


class Page(NamedTuple):
    """One image of a file of several."""

    path: Path
    number: int


def decode_image(image: Path | Page, channels: int, white: int = WHITE_16_BIT) -> torch.Tensor:
    """float32 [channels, H, W] in [-1, 1]: upright by EXIF, transparency on white, 16 bits from 0 to `white`.
    """
    path, page = image if isinstance(image, Page) else (image, 0)
    with refusing_unreadable(path), _open(path, IMAGE_FORMATS) as image:
        if page:
            image.seek(page)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            pixels = torch.from_numpy(np.asarray(image).astype(np.float32) / (white / 2) - 1).clamp(max=1)
            return pixels.expand(channels, -1, -1)  # [H, W] -> [channels, H, W]
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"), np.float32) / 127.5 - 1
        pixels = pixels.reshape(*pixels.shape[:2], channels)  # [H, W] -> [H, W, 1]
        return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_mask(path: Path, content: io.BytesIO | None = None) -> np.ndarray:
    """int64 [H, W]: the values, or the palette entries, of a single-channel image."""
    with refusing_unreadable(path, "a mask"), _open(content or path, MASK_FORMATS) as image:
        if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
            raise ValueError(f"it is {image.mode}; save it as one channel of integer class ids")
        return np.asarray(ImageOps.exif_transpose(image)).astype(np.int64)


def is_grey(mode: str) -> bool:
    return mode in ("1", "L", "LA") or mode.startswith("I;16")


def _open(source, formats):
    try:
        return Image.open(source, formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"its content is none of {', '.join(formats)}") from None


def _seen_file(path, is_mask, pages):
    """SeenFile of a file, all that is read of it decoded. Raises Refused where that is damaged or of
    unknown range.
    """
    formats = MASK_FORMATS if is_mask else IMAGE_FORMATS
    values = None
    largest, count = 0, 1
    with refusing_unreadable(path, "a mask" if is_mask else "an image"):
        content = io.BytesIO(path.read_bytes())
        with _open(content, formats) as image:
            mode = image.mode
            image.verify()  # the checksums of a PNG, which decoding passes over
        if is_mask:
            ids = decode_mask(path, content)
            height, width = ids.shape
            values = np.unique(ids).tolist()
        else:
            with _open(content, formats) as image:
                width, height = ImageOps.exif_transpose(image).size
                if image.format in PAGED_FORMATS:
                    count = image.n_frames
                for number in range(count if pages == "all" else 1):
                    image.seek(number)
                    image.load()
                    if image.mode in ("I", "F"):
                        unknown = "32-bit pixels, whose range is unknown"
                        raise ValueError(f"it has {unknown}; save it with 8 or 16 bits")
                    if image.mode.startswith("I;16"):
                        largest = max(largest, int(np.asarray(image).max()))
                    if is_grey(mode):
                        mode = image.mode
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    return SeenFile(mode, width, height, digest, values, largest, count)


def notes_on_images(seen: list, white: int, pages: str, targets: str) -> list[str]:
    """What may not be meant of images of which these are the SeenFile: a line each, with what mends it."""
    found = []
    largest = max(image.largest for image in seen)
    of_range = (1 << largest.bit_length()) - 1  # of as many bits as they use
    if white == WHITE_16_BIT and 0 < of_range < WHITE_16_BIT:
        found.append(
            f"images of 16 bits reach {largest:,} of {WHITE_16_BIT:,}, and are read by the full range, as "
            f"nearly black ones: if they have {largest.bit_length()} bits add --white {of_range}"
        )
    if white < largest:
        found.append(f"--white {white}: images of 16 bits reach {largest:,}, and what is above is white")
    several = sum(image.pages > 1 for image in seen)
    if several and pages == "first":
        remedy = "--pages all reads them all"
        if targets != "labels":
            remedy = f"save each as a file with its own {targets}"
        found.append(f"{several} of {len(seen)} files hold several images; the first is read: {remedy}")
    return found


# ---- Volumes -----------------------------------------------------------------------------------------------


def decode_volume(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """float32 [Z, Y, X], axial slices from the feet up, each with the body's front on top (by the affine),
    and the distance of neighbours along Z, Y and X in mm. path: a file of NIfTI, or a folder that holds one
    series of DICOM.
    """
    import nibabel

    # it tells of what it can't read in lines of its own, and raises an error as well
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)
    with refusing_unreadable(path, "a series of DICOM" if path.is_dir() else "a NIfTI volume"):
        image = _dicom_image(path) if path.is_dir() else nibabel.load(path)
        upright = nibabel.as_closest_canonical(image)
        voxels = np.asarray(upright.dataobj, dtype=np.float32)
        spacing = nibabel.affines.voxel_sizes(upright.affine)[::-1]
        shape = (*voxels.shape, 1, 1)[:3]
        if not voxels.size or voxels.size != np.prod(shape):
            raise ValueError(f"it has shape {voxels.shape}; save one 3-D volume a file")
        if not np.isfinite(voxels).all():
            raise ValueError("it holds NaN or infinity; put another value there, say the background's")
    # [X, Y, Z] -> [Z, Y, X]
    return np.ascontiguousarray(voxels.reshape(shape).transpose(2, 1, 0)[:, ::-1]), spacing


def unit_range(volume: np.ndarray) -> np.ndarray:
    """A volume from 0 to 1, by its percentiles: so that a few hot voxels don't set the scale."""
    low, high = np.percentile(volume, (0.5, 99.5))
    return np.clip((volume - low) / max(high - low, 1e-12), 0, 1)


def decode_mask_volume(path: Path, volume: Path, shape: tuple) -> np.ndarray:
    """float32 [Z, Y, X] of whole numbers, with the shape of its volume."""
    mask, _ = decode_volume(path)
    check_sizes(mask.shape == shape, f"mask {path}", mask.shape[::-1], f"volume {volume}", shape[::-1])
    with refusing_unreadable(path, "a mask"):
        if (mask % 1).any():
            raise ValueError("it holds fractions; save it as integer class ids")
    return mask


def _dicom_image(folder):
    """A series of DICOM as nibabel has images, by MONAI's reader."""
    import nibabel
    from monai.data.image_reader import PydicomReader

    reader = PydicomReader()
    voxels, facts = reader.get_data(reader.read(folder))
    return nibabel.Nifti1Image(np.asarray(voxels, np.float32), np.asarray(facts["affine"]))


def sha256(path: Path) -> str:
    """Of a file, or of the files of a folder."""
    if path.is_dir():
        hashes = [sha256(file) for file in files_with_suffix(path, (".dcm",))]
        return hashlib.sha256(repr(hashes).encode()).hexdigest()
    with refusing_unreadable(path, "a file"):
        return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- All files ---------------------------------------------------------------------------------------------


def survey(images: list, masks: list, pages: str = "first", broken_too: bool = False) -> tuple[list, list]:
    """[SeenFile] of the images, and of the masks. pages: those that are read of an image, "first" or "all".
    Raises the Refused of the first file that is damaged; or has it in that file's place, where broken_too.
    """

    def see(path, is_mask):
        try:
            return _seen_file(path, is_mask, pages)
        except Refused as error:
            return error

    with ThreadPoolExecutor() as pool:  # a folder on a network disk is mostly waiting
        seen = list(pool.map(lambda path: see(path, False), images))
        seen_masks = list(pool.map(lambda path: see(path, True), masks))
    for found in [*seen, *seen_masks]:
        if isinstance(found, Refused) and not broken_too:
            raise found
    return seen, seen_masks


def without_broken(skip: bool, rows: list, *looks: list) -> tuple:
    """(notes, rows, *looks) without the rows where a look, a list as long as rows, holds a Refused. Raises
    the first of these unless `skip`.
    """
    broken = [found for look in looks for found in look if isinstance(found, Refused)]
    if not broken:
        return [], rows, *looks
    if not skip:
        raise Refused(f"{broken[0]}; --skip_broken leaves out all such files")
    whole = []
    for of_row in zip(rows, *looks, strict=True):
        if not any(isinstance(one, Refused) for one in of_row):
            whole.append(of_row)
    if not whole:
        raise broken[0]
    note = f"{len(rows) - len(whole)} of {len(rows)} items have a broken file and are left out: {broken[0]}"
    return [note], *map(list, zip(*whole, strict=True))
