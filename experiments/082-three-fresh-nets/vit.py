"""A ViT of timm on Fashion-MNIST, from Debian's package dataset-fashion-mnist. Loss: cross-entropy.

python -m lowprec trial experiments/082-three-fresh-nets/vit.py --steps 100
"""

import gzip
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

FOLDER = Path("/usr/share/datasets/fashion-mnist")
BATCH = 32

options = dict(lr=1e-3, weight_decay=0.01, clip_grad=1.0)


def build():
    return timm.models.VisionTransformer(
        img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2
    )


def read(part):
    """Images [N, 1, 28, 28] in [-1, 1] and labels [N] of "train" or "t10k"."""
    with gzip.open(FOLDER / f"{part}-images-idx3-ubyte.gz") as file:
        images = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8)
    with gzip.open(FOLDER / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)
    return images.view(-1, 1, 28, 28).float() / 127.5 - 1, labels.long()


IMAGES, LABELS = read("train")
HELD_OUT = [x[:2048] for x in read("t10k")]


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def batches(seed):
    drawn = torch.Generator().manual_seed(seed)
    while True:
        index = torch.randint(len(IMAGES), (BATCH,), generator=drawn)
        yield IMAGES[index], LABELS[index]


def held_out():
    return zip(*(x.split(512) for x in HELD_OUT), strict=True)
