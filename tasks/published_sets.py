"""Published image sets, read from files that somebody has downloaded. Their test images are held out.

    cifar10:PATH        torchvision's download (cifar-10-batches-py), 10,000 test images
    mnist:PATH          torchvision's download (MNIST/raw), 10,000 test images
    fashion_mnist       Debian's package dataset-fashion-mnist, or fashion_mnist:PATH, 10,000 test images
    medmnist:FILE.npz   a 2-D MedMNIST file; no labels if an image has several; its part val is not used

No loader runs code that a file brings along.
"""

import gzip
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch

from harness.files import check_file
from tasks.folders import refusing_unreadable, some_of
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


def _check_there(path, root, name):
    """Raise Refused unless a file of torchvision's data set `name` is there."""
    remedy = f'"import torchvision; torchvision.datasets.{name}({str(root)!r}, download=True)"'
    some_of(os.path.isfile(path), root, name, f"download it with python -c {remedy}")


def cifar10(wish):
    root = wish.path.parent if wish.path.name == "cifar-10-batches-py" else wish.path
    train = _cifar_part(root, [f"data_batch_{i}" for i in range(1, 6)])
    heldout = _cifar_part(root, ["test_batch"])
    return in_memory("cifar10", wish, train, heldout, 10)


def _cifar_part(root, names):
    """(images uint8 [N, 3, 32, 32], labels int64 [N]) of some batches."""
    batches = [_cifar_batch(root, name) for name in names]
    images = np.concatenate([images for images, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return torch.from_numpy(images), torch.from_numpy(labels)


def _cifar_batch(root, name):
    path = root / "cifar-10-batches-py" / name
    _check_there(path, root, "CIFAR10")
    with refusing_unreadable(path, "a batch of CIFAR-10"), open(path, "rb") as file:
        content = _CifarUnpickler(file, encoding="bytes").load()
        images = np.frombuffer(content[b"data"].state[-1], np.uint8).reshape(-1, 3, 32, 32)
        labels = np.array(content[b"labels"], np.int64)
        if len(images) != len(labels) or not set(labels.tolist()) <= set(range(10)):
            raise ValueError("images and labels don't match")
        return images, labels


def mnist(wish):
    from torchvision.datasets import MNIST

    raw = wish.path / "MNIST" / "raw"
    for url, _ in MNIST.resources:
        _check_there(raw / url.removesuffix(".gz"), wish.path, "MNIST")
    with refusing_unreadable(raw.parent, "MNIST"):
        train = MNIST(wish.path, train=True)
        heldout = MNIST(wish.path, train=False)
        for part in (train, heldout):
            if len(part.data) != len(part.targets) or part.targets.max() > 9:
                raise ValueError("images and labels don't match")
    return in_memory(
        "mnist",
        wish,
        (train.data[:, None], train.targets),
        (heldout.data[:, None], heldout.targets),
        num_classes=10,
    )


FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist lies
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
MOST_IMAGES = 60_000  # images that a file of Fashion-MNIST holds at most


def fashion_mnist(wish):
    own = wish.path is not None
    root = FASHION_MNIST_FOLDER
    if own:
        downloaded = wish.path / "FashionMNIST" / "raw"  # as torchvision downloads it
        root = downloaded if os.path.isdir(downloaded) else wish.path
    parts = []
    for name in ("train", "t10k"):
        images = _idx(root / f"{name}-images-idx3-ubyte.gz", own, 28, 28)  # uint8 [N, 28, 28]
        labels = _idx(root / f"{name}-labels-idx1-ubyte.gz", own)  # uint8 [N]
        with refusing_unreadable(root, "Fashion-MNIST"):
            if len(images) != len(labels) or labels.max() >= len(CLOTHES):
                raise ValueError(f"images and labels named {name} don't match")
        parts.append((torch.from_numpy(images[:, None]), torch.from_numpy(labels)))
    return in_memory("fashion_mnist", wish, *parts, 10, classes=CLOTHES)


def _idx(path, own, *item):
    """uint8 [N, *item] of a gzipped idx file: two zero bytes, the type (8 is uint8), the number of
    dimensions, each as a big-endian int32, then the values and nothing else. own: whether the user named
    the folder.
    """
    remedy = f"apt-get install dataset-fashion-mnist brings it (to {FASHION_MNIST_FOLDER})"
    if not own:
        remedy += ", or --data fashion_mnist:PATH for a folder of your own"
    some_of(os.path.isfile(path), path.parent, path.name, remedy)
    with refusing_unreadable(path, "a file of Fashion-MNIST"), gzip.open(path) as file:
        dims = 1 + len(item)
        header = np.frombuffer(file.read(4 + 4 * dims), ">i4")
        if len(header) != 1 + dims or header[0] != 0x0800 + dims:
            raise ValueError(f"it does not begin as an idx file of uint8 with {dims} dimensions")
        count, *rest = header[1:].tolist()
        if rest != list(item) or not 0 < count <= MOST_IMAGES:
            wanted = f"up to {MOST_IMAGES:,} x {list(item)}"
            raise ValueError(f"it holds {header[1:].tolist()} values, not {wanted}")
        size = count * int(np.prod(item, dtype=int))
        content = file.read(size + 1)  # one byte more: so that a longer file is seen, and its checksum read
        if len(content) != size:
            found = "more" if len(content) > size else "fewer"
            raise ValueError(f"it holds {found} than the {size:,} bytes that its header says")
        return np.frombuffer(bytearray(content), np.uint8).reshape(count, *item)


def medmnist(wish):
    file = wish.path
    check_file(file)
    with refusing_unreadable(file, "a MedMNIST file"):
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no .npz file, and those of medmnist.com are")
    with refusing_unreadable(file, "a MedMNIST file"), np.load(file, allow_pickle=False) as arrays:
        train_labels = arrays["train_labels"]
        test_labels = arrays["test_labels"]
        train = _npz_images("train", arrays["train_images"])
        test = _npz_images("test", arrays["test_images"])
        if len(train) != len(train_labels) or len(test) != len(test_labels):
            raise ValueError("images and labels don't match")
        if train.shape[1] != test.shape[1]:
            channels = f"{train.shape[1]} channels and test_images {test.shape[1]}"
            raise ValueError(f"train_images have {channels}")
        if train_labels.size == len(train) and test_labels.size == len(test):
            train_labels = _npz_labels(train_labels)
            test_labels = _npz_labels(test_labels)
            num_classes = 1 + max(int(train_labels.max()), int(test_labels.max()))
        else:  # several labels an image
            train_labels = torch.zeros(len(train), dtype=torch.long)
            test_labels = torch.zeros(len(test), dtype=torch.long)
            num_classes = 0
    return in_memory(file.stem, wish, (train, train_labels), (test, test_labels), num_classes)


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
