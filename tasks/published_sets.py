"""Published image sets, read from files that somebody has downloaded: CIFAR-10, MNIST, Fashion-MNIST and
MedMNIST.

No loader runs code that a file brings along.
"""
import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import torch

from lowprec.errors import Refused
from tasks.folders import reading
from tasks.image_sets import in_memory

MAX_LABELS = 10_000  # a larger label is a mistake or an identifier, and a net has a row for each one below it


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


def cifar10(wish):
    root = wish.path.parent if wish.path.name == "cifar-10-batches-py" else wish.path

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
        return [torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*map(batch, names), strict=True)]

    train, heldout = part([f"data_batch_{i}" for i in range(1, 6)]), part(["test_batch"])
    return in_memory("cifar10", wish, train, heldout, 10)


def mnist(wish):
    from torchvision.datasets import MNIST
    raw = wish.path / "MNIST" / "raw"
    if not all(os.path.isfile(raw / url.removesuffix(".gz")) for url, _ in MNIST.resources):
        raise _absent(wish.path, "MNIST")
    with reading(raw.parent, "MNIST"):
        parts = [MNIST(wish.path, train=True), MNIST(wish.path, train=False)]
        if any(len(part.data) != len(part.targets) or part.targets.max() > 9 for part in parts):
            raise ValueError("images and labels don't match")
    return in_memory("mnist", wish, *[(part.data[:, None], part.targets) for part in parts], 10)


PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist lies
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
MOST = 60_000  # images that a file of Fashion-MNIST holds at most


def fashion_mnist(wish):
    own = wish.path is not None
    root = wish.path if own else PACKAGED
    inner = root / "FashionMNIST" / "raw"  # as torchvision downloads it
    root = inner if own and os.path.isdir(inner) else root
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
    return in_memory("fashion_mnist", wish, *parts, 10, classes=CLOTHES)


def _idx(path, own, *item):
    """uint8 [N, *item] of a gzipped idx file: two zero bytes, the type (8 is uint8), the number of
    dimensions, each as a big-endian int32, then the values and nothing else.
    """
    if not os.path.isfile(path):
        owner = ", or --data fashion_mnist:PATH for a folder of your own" if not own else ""
        raise Refused(f"{path.parent} holds no {path.name}: apt-get install dataset-fashion-mnist brings it "
                      f"(to {PACKAGED}){owner}")
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


def medmnist(wish):
    file = wish.path
    if not os.path.isfile(file):
        raise Refused(f"{file} does not exist: give the path of a 2-D .npz file from medmnist.com")
    with reading(file, "a MedMNIST file"), np.load(file, allow_pickle=False) as arrays:
        raw = {name: (arrays[f"{name}_images"], arrays[f"{name}_labels"]) for name in ("train", "test")}
        parts = [(_npz_images(name, images), labels) for name, (images, labels) in raw.items()]
        if any(len(images) != len(labels) for images, labels in parts):
            raise ValueError("images and labels don't match")
        grey, other = (images.shape[1] for images, _ in parts)
        if grey != other:
            raise ValueError(f"train_images have {grey} channels and test_images {other}")
        if all(labels.size == len(labels) for _, labels in parts):
            parts = [(images, _npz_labels(labels)) for images, labels in parts]
            num_classes = 1 + max(int(labels.max()) for _, labels in parts)
        else:
            parts = [(images, torch.zeros(len(labels), dtype=torch.long)) for images, labels in parts]
            num_classes = 0
    return in_memory(file.stem, wish, *parts, num_classes)


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
