"""Segmentation: Dice and cross-entropy on MONAI's U-Net.

    python train.py --task segment                           MONAI's discs in noise
    python train.py --task segment --data folder:PATH        PATH/images and PATH/masks
    python train.py --task segment --dims 3 --batch_size 4   MONAI's balls in noise; --data nifti:PATH

Scores are Dice and IoU of each class, of all pixels pooled (metrics.py).
"""

import functools

import torch
from torch.utils.data import BatchSampler

from harness.flags import Flag
from lowprec.machine import monai_alone
from tasks import data as datasets
from tasks import metrics
from tasks.task import Task, picture

PICTURED_IMAGES = 8  # held-out images in a preview
SEGMENTED_AT_ONCE = 64  # images scored at once
# one colour a class, in 0..255; a net of more classes begins again
PALETTE = [[0, 0, 0], [230, 80, 60], [60, 160, 230], [240, 200, 60], [90, 200, 120], [180, 100, 220]]


class Segment(Task):
    """Images [B, C, H, W] and masks int64 [B, H, W] -> logits [B, classes, H, W]; with --dims 3 cubes
    [B, C, D, H, W] and so on.
    """

    flags = (
        Flag("dims", 2, "3: volumes, in cubes of --image_size a side", type=int, choices=(2, 3), fits=True),
    )
    targets = "masks"
    implied = {"size": "tiny", "data": "synthetic"}
    watched = ("mean_iou", "higher")

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        with monai_alone():
            from monai.losses import DiceCELoss

        self.criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)

    @classmethod
    def load(cls, config):
        c = config
        return datasets.load_by_flags(c, c.data or cls.implied["data"], cls.targets, c.dims)

    @classmethod
    def sizes_of_nets(cls):
        from models import SEGMENTATION_UNETS

        return {"unet": SEGMENTATION_UNETS}

    def nets(self):
        from models import SEGMENTING

        nets = {name: functools.partial(build, dims=self.config.dims) for name, build in SEGMENTING.items()}
        return {**nets, **self.own_net()}

    def loss(self, model, batch, rng, step):
        """Dice + cross-entropy of images [B, C, H, W] against masks [B, H, W]. Nothing in it is random."""
        images, masks = batch
        return self.criterion(model(images), masks[:, None])

    @torch.no_grad()
    def validate(self, model, rng):
        """Held-out loss, and mean IoU and Dice of the foreground classes, over all held-out images."""
        loss = super().validate(model, rng)
        scores = metrics.dice_and_iou(self._confusion(model, rng))
        return {**loss, "mean_iou": scores["mean_iou"], "mean_dice": scores["mean_dice"]}

    def preview(self, model, rng):
        """Held-out images, below them their masks, below those the predictions. Of cubes the middle slice."""
        count = min(PICTURED_IMAGES, len(self.data.heldout))
        images, masks = self.data.heldout[list(range(count))]
        with torch.no_grad():
            predicted = model(images.to(rng.device)).argmax(1).cpu()  # [B, classes, H, W] -> [B, H, W]
        if self.config.dims == 3:
            middle = images.shape[2] // 2
            images, masks, predicted = images[:, :, middle], masks[:, middle], predicted[:, middle]
        grey = (images.mean(1, keepdim=True).repeat(1, 3, 1, 1) + 1) / 2
        rows = torch.cat([grey, _coloured(masks), _coloured(predicted)])  # [3 B, 3, H, W]
        return {"segmentation": picture(rows * 2 - 1, len(images))}

    @torch.no_grad()
    def evaluate(self, model, rng):
        """(scores, pictures): mean Dice and IoU of the foreground classes and each class's, over all
        held-out images.
        """
        return metrics.dice_and_iou(self._confusion(model, rng)), self.preview(model, rng)

    def _confusion(self, model, rng):
        """Pixel counts of all held-out images, or volumes, see metrics.confusion."""
        heldout = self.data.heldout
        counts = 0
        if self.config.dims == 3:
            with monai_alone():
                from monai.inferers import sliding_window_inference

            sides, at_once = [self.data.image_size] * 3, self.config.batch_size
            for volume in heldout.volumes:
                whole = volume.voxels[None].to(rng.device)
                predicted = sliding_window_inference(whole, sides, at_once, model).float().cpu()
                counts = counts + metrics.confusion(predicted, volume.mask.long(), self.data.num_classes)
            return counts
        for index in BatchSampler(range(len(heldout)), SEGMENTED_AT_ONCE, False):
            images, masks = heldout[index]
            predicted = model(images.to(rng.device)).float().cpu()
            counts = counts + metrics.confusion(predicted, masks, self.data.num_classes)
        return counts


def _coloured(classes):
    """int [B, H, W] -> a colour a class, [B, 3, H, W] in [0, 1]."""
    palette = torch.tensor(PALETTE) / 255
    return palette[classes % len(palette)].permute(0, 3, 1, 2)
