"""What the tests of data.py and folders.py share: small images, and the contract of every data set."""
import numpy as np
import pytest
import torch
from PIL import Image

from lowprec.errors import Refused
from tasks.data import load


def everything(part):
    return part[list(range(len(part)))]


def check(found, targets="labels"):
    """The contract of Data, for any set; returns all images and targets."""
    assert found.targets == targets
    assert len(found.fingerprint) == 16 and int(found.fingerprint, 16) >= 0
    size, pairs = found.image_size, [everything(found.train), everything(found.heldout)]
    for images, target in pairs:
        assert images.dtype == torch.float32 and target.dtype == torch.int64
        assert images.shape == (len(target), found.channels, size, size)
        assert images.min() >= -1 and images.max() <= 1
        assert target.shape == ((len(images), size, size) if targets == "masks" else (len(images),))
        assert target.min() >= 0 and target.max() < max(found.num_classes, 1)
    return [torch.cat(parts) for parts in zip(*pairs, strict=True)]


def refused(*words, **arguments):
    """load(**arguments) is refused in one printable line that contains the words."""
    with pytest.raises(Refused) as caught:
        load(**arguments)
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert str(word) in message, message
    return message


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels)).save(path, **options)
    return path


def grey(value, size=(20, 20)):
    return np.full(size, value, np.uint8)


def rgb(value, size=(20, 20)):
    return np.full((*size, 3), value, np.uint8)


def same(a, b):
    """Whether two data sets hold the same images and targets in the same order."""
    parts = [(a.train, b.train), (a.heldout, b.heldout)]
    return all(torch.equal(x, y) for one, other in parts
               for x, y in zip(everything(one), everything(other), strict=True))
