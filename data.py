"""Every data set of the laboratory, behind one word.

    python -c "import data; print(data.load('digits', task='rflow'))"

spec                what it is                                                               what is held out
digits              scikit-learn's 1,797 handwritten digits, 8x8 (default to generate)       500, stratified
synthetic           MONAI's discs in noise with their masks, 64x64 (default to segment)      64 of 320
folder:PATH         images, class folders optional; to segment PATH/images and PATH/masks,   a tenth, by hash of name
                    each image and its mask under one stem
cifar10:PATH        torchvision's download (cifar-10-batches-py)                             its 10,000 test images
mnist:PATH          torchvision's download (MNIST/raw)                                       its 10,000 test images
medmnist:FILE.npz   a 2-D MedMNIST file; unlabelled if an image has several labels           its test part; val unused
nifti:PATH          axial slices of a .nii or .nii.gz volume, or of a folder of them;        a tenth of the volumes,
                    to segment PATH/images and PATH/masks again                              or of the slices of one

Images are cropped to their central square and resized to image_size (bilinear, antialiased; masks: nearest pixel).
The classes of a mask are the distinct values of all masks in ascending order: 0 and 255 become 0 and 1, ids 0..K-1 stay
themselves. A tenth is at least one, and a set of one image is refused. No loader runs code that a file brings along.
"""
import hashlib
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

TASKS = ("rflow", "reflow", "ddpm", "segment")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MASKS = (".png", ".bmp", ".tif", ".tiff")  # lossy formats blur class ids into the values between them
VOLUMES = (".nii", ".nii.gz")
MAX_CLASSES = 200  # more distinct values than this are antialiasing, not class ids
CACHE_BYTES = 512 * 2**20  # image files are decoded once for as long as the results fit


class DataError(ValueError):
    """A mistake in the user's data or in how it is named; the message is one line: what is wrong and what to do."""

    def __init__(self, message: str):
        if message.startswith("Caught DataError in "):  # DataLoader workers send a traceback: its last line is ours
            message = message.strip().splitlines()[-1].partition("DataError: ")[2]
        super().__init__(" ".join(message.splitlines()))


@dataclass
class Data:
    """A data set in two disjoint parts, train and heldout, both map-style: len(part), and part[[3, 1, 4]] ->
    (images float32 [B, C, H, W] in [-1, 1], target). When kind is "generation" the target is int64 class labels [B],
    zeros if there are none (num_classes 0); when it is "segmentation", int64 masks [B, H, W], and num_classes counts
    the background. A part suits DataLoader(part, sampler=<yields lists>, batch_size=None, num_workers=N).
    name is fit for a file name; fingerprint, 16 hex digits, stands for the content, the image size and the split."""
    name: str
    train: torch.utils.data.Dataset = field(repr=False)
    heldout: torch.utils.data.Dataset = field(repr=False)
    channels: int
    num_classes: int
    image_size: int
    fingerprint: str
    kind: str

    def __str__(self):
        return (f"{self.name} ({self.kind}): {len(self.train)} + {len(self.heldout)} held-out images, {self.channels}x"
                f"{self.image_size}x{self.image_size}, {self.num_classes or 'no'} classes, {self.fingerprint}")


def load(spec: str | None, task: str, image_size: int | None = None, seed: int = 0) -> Data:
    """The data set that spec names (see the table above; None: digits, or synthetic to segment) for a task of TASKS.
    image_size None keeps its own size, 64 for folders and volumes. seed draws synthetic and touches no other set.
    Raises DataError."""
    if task not in TASKS:
        raise DataError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if image_size is not None and image_size < 8:
        raise DataError(f"image size {image_size} is too small: give at least 8")
    segment = task == "segment"
    spec = ("synthetic" if segment else "digits") if spec is None else spec
    kind, _, where = spec.partition(":")
    if kind not in SETS:
        forms = ", ".join(form for form, _ in SETS.values())
        raise DataError(f"unknown data set {spec!r}: " +
                        (f"did you mean folder:{spec}" if Path(spec).exists() else f"choose one of {forms}"))
    form, loader = SETS[kind]
    if bool(where) != (":" in form):
        raise DataError(f"{kind} {'takes no' if where else 'needs a'} path: write --data {form}")
    if segment and kind not in ("synthetic", "folder", "nifti"):
        raise DataError(f"{kind} has no masks: segment synthetic, folder:PATH or nifti:PATH")
    return loader(Path(where).expanduser(), segment, image_size, seed)


# ---- The two kinds of part: tensors in memory, and files read when they are asked for -------------------------------

class Tensors(torch.utils.data.Dataset):
    """images [N, C, H, W], uint8 or float32 in [-1, 1]; target [N] labels or [N, H, W] masks. Resized at access, so
    that a large image_size costs the memory of a batch, not of the whole set."""

    def __init__(self, images: torch.Tensor, target: torch.Tensor, size: int):
        self.images, self.target, self.size = images, target, size

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index: list[int]):
        images, target = self.images[index], self.target[index]
        if images.dtype == torch.uint8:
            images = images.float() / 127.5 - 1
        return _square(images, self.size), (_square_mask(target, self.size) if target.ndim > 1 else target).long()


class Files(torch.utils.data.Dataset):
    """items: (image path, label), or (image path, mask path) with the mask values that become classes 0, 1, ..."""

    def __init__(self, items: list, channels: int, size: int, values: np.ndarray | None):
        self.items, self.channels, self.size, self.values = items, channels, size, values
        self.cache, self.room = {}, CACHE_BYTES // (size * size * (4 * channels + 8 * (values is not None)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index: list[int]):
        images, targets = zip(*map(self._item, index))
        return torch.stack(images), torch.stack(targets)

    def _item(self, i):
        if i in self.cache:
            return self.cache[i]
        path, target = self.items[i]
        image = _square(_decode(path, self.channels)[None], self.size)[0]
        if self.values is None:
            target = torch.tensor(target)
        else:
            classes = torch.from_numpy(np.searchsorted(self.values, _decode_mask(target)))
            target = _square_mask(classes[None], self.size)[0].long()
        if len(self.cache) < self.room:
            self.cache[i] = image, target
        return image, target


def _square(x, size, **how):
    """[B, C, H, W] -> its central square as [B, C, size, size]."""
    side = min(x.shape[-2:])
    top, left = ((n - side) // 2 for n in x.shape[-2:])
    x = x[..., top:top + side, left:left + side]
    if side == size:
        return x.contiguous()
    if how:
        return F.interpolate(x, (size, size), **how)
    return F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(-1, 1)  # 1 may come out as 1 + 1e-7


def _square_mask(x, size):
    # "nearest-exact" has its pixel centres where bilinear has them; plain "nearest" shifts masks against images.
    return _square(x[:, None].float(), size, mode="nearest-exact")[:, 0]


def _data(name, segment, train, heldout, channels, num_classes, size, content):
    """Data with a fingerprint of content: arrays by their bytes, anything else by its repr."""
    digest = hashlib.sha256(repr((segment, channels, num_classes, size, len(train), len(heldout))).encode())
    for part in content:
        digest.update(part.numpy() if isinstance(part, torch.Tensor) else repr(part).encode())
    return Data(re.sub(r"[^\w.-]+", "_", name), train, heldout, channels, num_classes, size, digest.hexdigest()[:16],
                "segmentation" if segment else "generation")


def _in_memory(name, segment, train, heldout, num_classes, size):
    size = size or min(train[0].shape[-2:])
    return _data(name, segment, Tensors(*train, size), Tensors(*heldout, size), train[0].shape[1], num_classes, size,
                 [*train, *heldout])


# ---- Built in -------------------------------------------------------------------------------------------------------

def _digits(_, segment, size, seed):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1  # 0..16 -> [-1, 1], exact in fp32
    labels = torch.from_numpy(digits.target).long()
    split = train_test_split(np.arange(len(labels)), test_size=500, stratify=digits.target, random_state=0)
    train, heldout = ((images[part], labels[part]) for part in split)
    return _in_memory("digits", segment, train, heldout, 10, size)


def _synthetic(_, segment, size, seed, count=320, heldout=64, classes=3):
    from monai.data.synthetic import create_test_image_2d
    size, random = size or 64, np.random.RandomState(seed % 2**32)
    # Noise up to half the brightest class outshines the darkest one in places: no threshold solves the task.
    pairs = [create_test_image_2d(size, size, num_objs=10, rad_min=max(1, size // 16), rad_max=max(2, size // 5),
                                  noise_max=0.5, num_seg_classes=classes, random_state=random) for _ in range(count)]
    images, masks = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*pairs))
    images = images.float()[:, None] * 2 - 1
    target = masks.to(torch.uint8) if segment else torch.zeros(count, dtype=torch.long)
    train, heldout = ((images[part], target[part]) for part in (slice(heldout, None), slice(heldout)))
    return _in_memory("synthetic", segment, train, heldout, classes + 1 if segment else 0, size)


# ---- Folders of images ----------------------------------------------------------------------------------------------

def _folder(root, segment, size, seed):
    _check_layout(root, segment, "folder")
    triples, names = (_pairs(root, IMAGES, MASKS), []) if segment else _labelled(root)
    heads, values, size = _map(lambda triple: _header(triple[1]), triples), None, size or 64
    if segment:
        def distinct(triple, head):
            (_, image, mask), (_, width, height) = triple, head
            ids = _decode_mask(mask)
            if ids.shape != (height, width):
                raise DataError(f"mask {mask} is {ids.shape[1]}x{ids.shape[0]} but image {image} is {width}x{height}: "
                                "make them the same size")
            return np.unique(ids)
        values = _mask_values(root, _map(distinct, triples, heads))
    channels = 1 if all(mode in ("1", "L", "LA") or mode.startswith("I;16") for mode, *_ in heads) else 3
    chosen = _held_out(root, [name for name, *_ in triples])
    train, heldout = (Files([rest for name, *rest in triples if (name in chosen) == part], channels, size, values)
                      for part in (False, True))
    content = [(name, image.stat().st_size, target.stat().st_size if segment else target)
               for name, image, target in triples]
    return _data(f"folder-{root.resolve().name}", segment, train, heldout, channels,
                 len(values) if segment else len(names), size, [content, values.tolist() if segment else names])


def _check_layout(root, segment, kind):
    """Refuses a folder that is laid out for something else, before its parts pass for classes."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: check the path" if root.exists() else
                        f"{root} does not exist: check the path")
    with _reading(root, "a folder"):
        has = {p.name for p in root.iterdir() if p.is_dir()}
    if segment and not has >= {"images", "masks"}:
        raise DataError(f"{root} has no folders images and masks: to segment it needs both, with the same file names")
    if not segment and has >= {"images", "masks"}:
        raise DataError(f"{root} holds images and masks: use --data {kind}:{root / 'images'}, or --task segment")
    if not segment and "train" in has and has & {"test", "val", "valid", "validation"}:
        raise DataError(f"{root} is split into train and others: use --data {kind}:{root / 'train'}")


def _listing(folder, suffixes, pattern="**/*"):
    """Files with one of the suffixes, by name; without hidden ones (macOS leaves ._a.png beside a.png)."""
    return sorted(p for p in folder.glob(pattern) if p.name.lower().endswith(suffixes) and p.is_file()
                  and not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _labelled(root):
    """[(name, image, label)] and the names of the classes: root's folders, sorted, or none if root holds images."""
    flat = _listing(root, IMAGES, "*")
    folders = {p.name: _listing(p, IMAGES) for p in sorted(root.iterdir()) if p.is_dir() and p.name[0] != "."}
    if not flat and not any(folders.values()):
        raise DataError(f"{root} holds no images ({', '.join(IMAGES)}): give a folder of images or of class folders")
    if flat and any(folders.values()):
        raise DataError(f"{root} holds images beside class folders: move the images into one of them or away")
    if not flat and not all(folders.values()):
        empty = next(name for name, files in folders.items() if not files)
        raise DataError(f"class folder {root / empty} holds no images: fill or remove it")
    groups = [flat] if flat else folders.values()
    return ([(p.relative_to(root).as_posix(), p, label) for label, files in enumerate(groups) for p in files],
            [] if flat else list(folders))


def _pairs(root, suffixes, mask_suffixes):
    """[(stem, image, mask)] of root/images and root/masks, which must match one to one."""
    def by_stem(folder, allowed):
        stems = {}
        for p in _listing(folder, allowed):
            stem = re.sub(r"(\.nii\.gz|\.[^./]+)$", "", p.relative_to(folder).as_posix(), flags=re.I)
            if stem in stems:
                raise DataError(f"{p} has the stem of {stems[stem].name}: rename or remove one")
            stems[stem] = p
        return stems
    images, masks = by_stem(root / "images", suffixes), by_stem(root / "masks", mask_suffixes)
    if not images:
        raise DataError(f"{root / 'images'} is empty: put images there ({', '.join(suffixes)})")
    for stem in sorted(images.keys() ^ masks.keys()):
        if stem in images:
            forms = " or ".join(mask_suffixes)
            raise DataError(f"image {images[stem]} has no mask: add {root / 'masks' / stem} with suffix {forms}")
        raise DataError(f"mask {masks[stem]} has no image: add {root / 'images' / stem} or remove the mask")
    return [(stem, images[stem], masks[stem]) for stem in sorted(images)]


def _mask_values(root, values):
    """The sorted distinct values of all masks; a value's place is its class id."""
    values = np.unique(np.concatenate(values))
    if len(values) < 2:
        raise DataError(f"{root / 'masks'} holds the value {values[0]:g} alone: masks need background and a class")
    if len(values) > MAX_CLASSES:
        raise DataError(f"{root / 'masks'} holds {len(values)} values: save class ids, without antialiasing")
    return values


def _held_out(root, names):
    """The tenth of the names whose hashes are smallest: adding files moves few others from part to part."""
    if len(names) < 2:
        raise DataError(f"{root} holds a single image: give at least two, one to train on and one to hold out")
    ranked = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    return set(ranked[:max(1, round(len(names) / 10))])


def _map(function, *items):
    with ThreadPoolExecutor() as pool:  # a folder on a network disk is mostly waiting
        return list(pool.map(function, *items))


@contextmanager
def _reading(path, what="an image"):
    """Decoders raise nearly everything on a broken file: all of it becomes a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as e:
        raise DataError(f"cannot read {path} as {what} ({str(e) or type(e).__name__}): replace or remove it") from None


def _header(path):
    """(mode, width, height) as displayed, without decoding; checks what a format lets one check so (a PNG's CRCs)."""
    with _reading(path), Image.open(path) as image:
        mode, extent = image.mode, image.size
        if image.format in ("JPEG", "MPO") and image.getexif().get(0x0112, 1) >= 5:  # EXIF orientation: on its side
            extent = extent[::-1]
        image.verify()
    if mode in ("I", "F"):
        raise DataError(f"{path} has 32-bit pixels, whose range is unknown: save it with 8 or 16 bits")
    return mode, *extent


def _decode(path, channels):
    """float32 [channels, H, W] in [-1, 1]: upright by EXIF, transparency on white, 16 bits from their full range."""
    with _reading(path), Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            return torch.from_numpy(np.asarray(image).astype(np.float32) / 32767.5 - 1).expand(channels, -1, -1)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"), np.float32) / 127.5 - 1
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1)


def _decode_mask(path):
    """int64 [H, W]: the values, or the palette entries, of a single-channel image."""
    with _reading(path, "a mask"), Image.open(path) as image:
        if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
            raise DataError(f"mask {path} is {image.mode}: save it as one channel of integer class ids")
        return np.asarray(image).astype(np.int64)


# ---- Published sets -------------------------------------------------------------------------------------------------

class _Inert:
    """Takes whatever a pickle would build it from, and does nothing with it."""

    def __init__(self, *args):
        pass

    def __setstate__(self, state):
        self.state = state


class _CifarUnpickler(pickle.Unpickler):
    """Reads plain values and the state of numpy arrays. CIFAR-10 comes as pickles, which may name any function to be
    called; here the three names that an array needs stand for _Inert, and any other is refused."""

    def find_class(self, module, name):
        if (module.replace("_core", "core"), name) not in {
                ("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}:
            raise ValueError(f"it calls {module}.{name}, which CIFAR-10 has no use for")
        return _Inert


def _absent(root, name):
    return DataError(f"{root} holds no {name}: download it with python -c "
                     f"\"import torchvision; torchvision.datasets.{name}({str(root)!r}, download=True)\"")


def _cifar10(root, segment, size, seed):
    root = root.parent if root.name == "cifar-10-batches-py" else root

    def part(names):
        batches = []
        for path in (root / "cifar-10-batches-py" / name for name in names):
            if not path.is_file():
                raise _absent(root, "CIFAR10")
            with _reading(path, "a batch of CIFAR-10"), open(path, "rb") as file:
                batch = _CifarUnpickler(file, encoding="bytes").load()
                images = np.frombuffer(batch[b"data"].state[-1], np.uint8).reshape(-1, 3, 32, 32)
                labels = np.array(batch[b"labels"], np.int64)
                if len(images) != len(labels) or not set(labels.tolist()) <= set(range(10)):
                    raise ValueError("images and labels don't match")
            batches.append((images, labels))
        return [torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*batches)]
    train, heldout = part([f"data_batch_{i}" for i in range(1, 6)]), part(["test_batch"])
    return _in_memory("cifar10", segment, train, heldout, 10, size)


def _mnist(root, segment, size, seed):
    from torchvision.datasets import MNIST
    if not all((root / "MNIST" / "raw" / url.removesuffix(".gz")).is_file() for url, _ in MNIST.resources):
        raise _absent(root, "MNIST")
    with _reading(root / "MNIST", "MNIST"):
        parts = [MNIST(root, train=True), MNIST(root, train=False)]
        if any(len(part.data) != len(part.targets) or part.targets.max() > 9 for part in parts):
            raise ValueError("images and labels don't match")
    return _in_memory("mnist", segment, *[(part.data[:, None], part.targets) for part in parts], 10, size)


def _medmnist(file, segment, size, seed):
    if not file.is_file():
        raise DataError(f"{file} does not exist: give the path of a 2-D .npz file from medmnist.com")

    def part(arrays, name):
        images, labels = arrays[f"{name}_images"], arrays[f"{name}_labels"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] != 3):
            raise ValueError(f"{name}_images is {images.dtype} {list(images.shape)}, not uint8 [N, H, W(, 3)]")
        if len(images) != len(labels) or not len(images):
            raise ValueError("images and labels don't match")
        images = torch.from_numpy(images.reshape(*images.shape[:3], -1)).permute(0, 3, 1, 2).contiguous()
        return images, torch.from_numpy(labels.reshape(len(labels), -1).astype(np.int64))
    with _reading(file, "a MedMNIST file"), np.load(file, allow_pickle=False) as arrays:
        parts = [part(arrays, "train"), part(arrays, "test")]
    single = all(labels.shape[1] == 1 for _, labels in parts)
    num_classes = 1 + max(int(labels.max()) for _, labels in parts) if single else 0
    train, heldout = ((images, labels[:, 0] if single else torch.zeros(len(labels), dtype=torch.long))
                      for images, labels in parts)
    return _in_memory(file.stem, segment, train, heldout, num_classes, size)


# ---- Volumes --------------------------------------------------------------------------------------------------------

def _nifti(root, segment, size, seed):
    """Slices of all volumes, in memory, each volume scaled by its 0.5th and 99.5th percentile; of these, slices with at
    least 2 % of their pixels above a tenth of the range. A volume is held out whole, since neighbouring slices look
    alike; when there is only one, its uppermost tenth is."""
    if root.is_file() and not segment:
        triples = [(root.name, root, None)]
    else:
        _check_layout(root, segment, "nifti")
        triples = _pairs(root, VOLUMES, VOLUMES) if segment else [
            (p.relative_to(root).as_posix(), p, None) for p in _listing(root, VOLUMES)]
    if not triples:
        raise DataError(f"{root} holds no volumes ({', '.join(VOLUMES)}): give one, or a folder of them")
    images, targets, owners, values, size, content = [], [], [], [], size or 64, []
    for name, file, mask_file in triples:
        volume = _volume(file)
        low, high = np.percentile(volume, (0.5, 99.5))  # so that a few hot voxels don't set the scale
        unit = np.clip((volume - low) / max(high - low, 1e-12), 0, 1)
        keep = (unit > 0.1).mean((1, 2)) >= 0.02
        if not keep.any():
            raise DataError(f"volume {file} has no slice with anything to see: remove it")
        images.append(_square(torch.from_numpy(unit[keep]).float()[:, None] * 2 - 1, size))
        targets.append(torch.zeros(len(images[-1])))
        owners += [name] * len(images[-1])
        content += [name] + [hashlib.sha256(f.read_bytes()).hexdigest() for f in (file, mask_file) if f]
        if segment:
            mask = _volume(mask_file)
            if mask.shape != volume.shape:
                raise DataError(f"mask {mask_file} has {mask.shape[::-1]} voxels but volume {file} "
                                f"{volume.shape[::-1]}: make them the same size")
            if (mask % 1).any():
                raise DataError(f"mask {mask_file} holds fractions: save it as integer class ids")
            targets[-1] = _square_mask(torch.from_numpy(mask[keep]), size)
            values.append(np.unique(mask))
    images, target = torch.cat(images), torch.cat(targets).long()
    if len(triples) > 1:
        chosen = _held_out(root, sorted(set(owners)))
        held = torch.tensor([name in chosen for name in owners])
    else:
        chosen = _held_out(root, [str(i) for i in range(len(images))])
        held = torch.arange(len(images)) >= len(images) - len(chosen)
    if segment:
        values = _mask_values(root, values)
        target = torch.from_numpy(np.searchsorted(values, target.numpy()).astype(np.uint8))
    train, heldout = (Tensors(images[part], target[part], size) for part in (~held, held))
    return _data(f"nifti-{root.resolve().name}", segment, train, heldout, 1, len(values), size, content)


def _volume(path):
    """float32 [Z, Y, X]: axial slices from the feet up, each with the front of the body on top (by the affine)."""
    import nibabel
    with _reading(path, "a NIfTI volume"):
        voxels = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj, dtype=np.float32)
    shape = (*voxels.shape, 1, 1)[:3]
    if not voxels.size or voxels.size != np.prod(shape):
        raise DataError(f"volume {path} has shape {voxels.shape}: save one 3-D volume a file")
    if not np.isfinite(voxels).all():
        raise DataError(f"volume {path} holds NaN or infinity: replace them, by the background's value for instance")
    return np.ascontiguousarray(voxels.reshape(shape).transpose(2, 1, 0)[:, ::-1])


SETS = {"digits": ("digits", _digits), "synthetic": ("synthetic", _synthetic), "folder": ("folder:PATH", _folder),
        "cifar10": ("cifar10:PATH", _cifar10), "mnist": ("mnist:PATH", _mnist),
        "medmnist": ("medmnist:FILE.npz", _medmnist), "nifti": ("nifti:PATH", _nifti)}
