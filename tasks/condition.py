"""A condition image beside the noise: what a generating net may see of the image that it is to draw.

    python train.py --condition blurred                                    digits from their blurred selves
    python train.py --condition halved --data fashion_mnist --model dit    and from half as many pixels a side
    python train.py --condition masks --data folder:PATH                   PATH/images from PATH/masks
    python train.py --condition inputs --data folder:PATH                  PATH/targets from PATH/inputs

The net gets it as further channels of its input, at every timestep, with labels as ever where the data have
them. What it draws for the conditions of held-out images is scored beside these images: psnr (dB, the higher
the better) and distance (perceptual, in the features that score; the lower the better).
"""

import functools

import torch
import torch.nn.functional as F

from harness.flags import Flag

CONDITION_FLAG = Flag(
    "condition",
    "none",
    "an image that the net sees beside the noise: the image blurred, the image with half the pixels a side, "
    "the mask of each image, or of folder:PATH the image of its name in PATH/inputs, to draw PATH/targets",
    "generation",
    choices=("none", "blurred", "halved", "masks", "inputs"),
    fits=True,
)


def channels(kind, data):
    """How many channels the condition has."""
    own = data.condition_channels
    return {"none": 0, "masks": own, "inputs": own}.get(kind, data.channels)


def condition_of(kind, images, targets, classes):
    """(labels int64 [B], condition [B, channels, H, W] in [-1, 1] or None) of images [B, C, H, W] and what
    the data have beside them: labels, masks int64 [B, H, W] of so many classes, or images [B, c, H, W].
    """
    if kind == "inputs":
        return torch.zeros(len(targets), dtype=torch.int64, device=targets.device), targets
    if kind == "masks":
        found = F.one_hot(targets, classes).movedim(-1, 1).to(images.dtype) * 2 - 1
        return targets.new_zeros(len(targets)), found
    if kind == "none":
        return targets, None
    if kind == "halved":
        return targets, F.interpolate(F.avg_pool2d(images, 2), images.shape[-2:])
    around = max(1, images.shape[-1] // 8)  # a mean over a quarter of the side
    return targets, F.avg_pool2d(images, 2 * around + 1, 1, around, count_include_pad=False)


class Given:
    """A net that sees a condition [B, c, H, W] behind the channels of what it is called with."""

    def __init__(self, model, condition):
        self.model, self.condition = model, condition

    def __call__(self, x, t, labels):
        twice = len(x) // len(self.condition)  # guidance asks with and without labels at once
        condition = self.condition.to(x.dtype).repeat(twice, 1, 1, 1)
        return self.model(torch.cat([x, condition], 1), t, labels)


def given(model, condition):
    """The net as it is to be called: itself without a condition. One that has another gets this one."""
    if condition is None:
        return model
    return Given(model.model if isinstance(model, Given) else model, condition)


def taking(builders, count):
    """{--model: build} of nets with so many channels of a condition in their input."""
    if not count:
        return builders
    return {name: functools.partial(build, given=count) for name, build in builders.items()}


def mean_psnr(drawn, real):
    """Peak signal-to-noise ratio in dB of images [B, C, H, W] in [-1, 1], the mean over the images; at most
    100 of each.
    """
    error = (drawn.clamp(-1, 1) - real).double().square().mean((1, 2, 3))
    return (10 * torch.log10(4 / error.clamp(min=4e-10))).mean().item()


def condition_picture(condition):
    """A condition as images [B, 1 or 3, H, W] in [-1, 1]: masks in shades of grey."""
    if condition.shape[1] in (1, 3):
        return condition
    last = condition.shape[1] - 1
    return condition.argmax(1, keepdim=True) / max(1, last) * 2.0 - 1
