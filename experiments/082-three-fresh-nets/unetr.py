"""A UNETR of MONAI on volumes that are drawn: two balls and a box in noise. Loss: Dice and cross-entropy.

python -m lowprec trial experiments/082-three-fresh-nets/unetr.py --steps 30
"""

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNETR

SIDE, BATCH = 32, 1
CRITERION = DiceCELoss(to_onehot_y=True, softmax=True)

options = dict(lr=1e-3, weight_decay=0.01, clip_grad=1.0)


def build():
    shape = dict(img_size=SIDE, feature_size=4, hidden_size=48, mlp_dim=96, num_heads=4)
    return UNETR(1, 3, norm_name="instance", **shape)


def volume(drawn):
    """A volume [1, SIDE, SIDE, SIDE] and its labels alike: 1 in balls, 2 in a box."""
    axis = torch.arange(SIDE)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    labels = torch.zeros(SIDE, SIDE, SIDE)
    for _ in range(2):
        centre = torch.randint(6, SIDE - 6, (3,), generator=drawn)
        radius = 3 + 4 * torch.rand((), generator=drawn)
        labels[(z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2 < radius**2] = 1
    a, b, c = torch.randint(2, SIDE - 12, (3,), generator=drawn).tolist()
    labels[a : a + 8, b : b + 10, c : c + 6] = 2
    noise = 0.7 * torch.randn(labels.shape, generator=drawn)
    return (labels / 2 + noise)[None], labels[None]


def some(drawn, count):
    return tuple(torch.stack(part) for part in zip(*(volume(drawn) for _ in range(count)), strict=True))


def loss(model, batch):
    images, labels = batch
    return CRITERION(model(images).float(), labels)


def batches(seed):
    drawn = torch.Generator().manual_seed(1000 + seed)
    while True:
        yield some(drawn, BATCH)


def held_out():
    drawn = torch.Generator().manual_seed(0)
    return [some(drawn, 8) for _ in range(2)]
