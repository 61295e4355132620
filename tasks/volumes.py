"""Volumes in three dimensions, for --task segment --dims 3: all on one grid, and trained on in cubes.

MONAI's Spacing brings volumes and masks to the median spacing of their set. What is scored are whole held-out
volumes on that grid, see segment.py.
"""

from typing import NamedTuple

import numpy as np
import torch

from lowprec.errors import Refused
from lowprec.machine import monai_alone
from tasks import folders

with monai_alone():
    from monai.data import MetaTensor
    from monai.data.utils import dense_patch_slices
    from monai.transforms import Spacing, SpatialPad

BACKGROUND = -0.8  # a tenth of the range [-1, 1]
LEAST_SEEN = 0.02  # of the voxels of a cube that is trained on lie above the background


class Volume(NamedTuple):
    voxels: torch.Tensor  # fp32 [1, Z, Y, X] in [-1, 1]
    mask: torch.Tensor  # fp32 [1, Z, Y, X]
    spacing: np.ndarray  # in mm, [Z, Y, X]


class Cubes(torch.utils.data.Dataset):
    """Cubes of `volumes`, which overlap by half, without those that show nothing. cubes[[3, 1]] -> (fp32
    [2, 1, side, side, side] in [-1, 1], classes int64 [2, side, side, side]).
    """

    def __init__(self, volumes, side):
        self.volumes = volumes
        self.places = []
        for volume in volumes:
            shape = volume.voxels.shape[1:]
            for place in dense_patch_slices(shape, [side] * 3, [side // 2] * 3):
                place = (slice(None), *place)
                if (volume.voxels[place] > BACKGROUND).float().mean() >= LEAST_SEEN:
                    self.places.append((volume, place))

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        chosen = [self.places[i] for i in index]
        voxels = torch.stack([volume.voxels[place] for volume, place in chosen])
        masks = torch.cat([volume.mask[place] for volume, place in chosen])
        return voxels, masks.long()


def read(file, mask_file):
    """The Volume of a file and its mask, or the Refused that they are worth."""
    try:
        voxels, spacing = folders.decode_volume(file)
        mask = folders.decode_mask_volume(mask_file, file, voxels.shape)
        with folders.refusing_unreadable(file, "a volume"):
            if not (spacing > 0).all():
                raise ValueError("it does not say how far its voxels lie apart; write its affine")
    except Refused as error:
        return error
    unit = torch.from_numpy(folders.unit_range(voxels)).float()
    return Volume(unit[None] * 2 - 1, torch.from_numpy(mask)[None], spacing)


def on_one_grid(volumes, side):
    """`volumes` at their median spacing, padded where they are smaller than a cube of `side`."""
    grid = np.median([volume.spacing for volume in volumes], axis=0)
    found = []
    for volume in volumes:
        affine = np.diag([*volume.spacing, 1.0])
        parts = []
        for part, mode, background in ((volume.voxels, "bilinear", -1), (volume.mask, "nearest", 0)):
            moved = Spacing(grid, mode=mode, dtype=torch.float32)(MetaTensor(part, affine=affine))
            parts.append(SpatialPad([side] * 3, value=background)(moved).as_tensor())
        found.append(Volume(*parts, grid))
    return found
