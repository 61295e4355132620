"""Image classification: cross-entropy on three nets, of which two have BatchNorm, and accuracy.

    python train.py --task classify                                    digits, a small CNN: a minute
    python train.py --task classify --model vit --data fashion_mnist   another net, other data
    python train.py --task classify --pure_bf16 --stochastic           any recipe, as with every task

    --model    net                                              --size (tiny by default)
    cnn        three stages of 3x3 convolutions with BatchNorm  tiny, small, base
    resnet18   torchvision's (arXiv 1512.03385)                 it has one
    vit        torchvision's vision transformer (2010.11929)    tiny, small, Ti (that of arXiv 2012.12877)

A short run wants --ema_decay 0.99, see Classify.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from harness.flags import of_size
from harness.ranks import ranks_here
from lowprec.attention import attention_kernel
from lowprec.errors import Refused
from tasks.task import Task, picture

EXAMINED_IMAGES = 1024  # held-out images that validate and preview look at
CLASSIFIED_AT_ONCE = 256  # images scored at once
PICTURED_CLASSES = 12  # classes that a picture has room for
# of values in [-1, 1]
GREEN = (-0.7, 0.6, -0.5)
RED = (0.9, -0.6, -0.6)

# ---- A small CNN -------------------------------------------------------------------------------------------

# size: (channels a stage, convolutions a stage)
CNNS = {"tiny": ((32, 64, 128), 1), "small": ((64, 128, 256), 2), "base": ((128, 256, 512), 3)}


def cnn(channels, num_classes, image_size, size=None):
    """x [B, C, H, W] -> logits [B, num_classes]. Each stage but the first begins by halving the image."""
    widths, depth = of_size("cnn", size or "tiny", CNNS)
    layers = OrderedDict()
    before = channels
    for stage, width in enumerate(widths):
        if stage:
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
        for i in range(depth):
            layers[f"conv{stage}_{i}"] = nn.Conv2d(before, width, 3, padding=1, bias=False)
            layers[f"norm{stage}_{i}"] = nn.BatchNorm2d(width)
            layers[f"act{stage}_{i}"] = nn.ReLU()
            before = width
    layers["mean"] = nn.AdaptiveAvgPool2d(1)  # [B, width, H / 4, W / 4] -> [B, width, 1, 1]
    layers["flat"] = nn.Flatten()
    layers["final"] = nn.Linear(before, num_classes)
    return nn.Sequential(layers)


# ---- ResNet-18 ---------------------------------------------------------------------------------------------


def resnet18(channels, num_classes, image_size, size=None):
    """torchvision's ResNet-18. x [B, C, H, W] -> logits [B, num_classes].

    Its stem halves the image twice, which leaves little of a small one. Below 64 pixels the stem is a 3x3
    convolution of stride 1 without max-pooling, as in section 4.2 of arXiv 1512.03385; from 64 on it is
    torchvision's 7x7 of stride 2 with max-pooling. Either takes the data's channels. All else is as
    torchvision has it.
    """
    from torchvision.models import resnet18

    if size is not None:
        of_size("resnet18", size, {})
    net = resnet18(num_classes=num_classes)
    if image_size < 64:
        net.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
        net.maxpool = nn.Identity()
    else:
        net.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    return net


# ---- Vision transformer ------------------------------------------------------------------------------------

# size: (layers, width, heads)
VITS = {"tiny": (4, 64, 2), "small": (6, 128, 4), "Ti": (12, 192, 3)}
PATCHES = (4, 8, 16)  # patches a side: the least, what is aimed at, the most


def patch_size(image_size):
    """Side of a patch in pixels: the divisor of image_size, 2 or more, that leaves the number of patches a
    side nearest to 8. Raises Refused where none leaves 4 to 16.
    """
    least, aim, most = PATCHES

    def fitting(size):
        sides = [size // p for p in range(2, size + 1) if size % p == 0]
        return [side for side in sides if least <= side <= most]

    found = fitting(image_size)
    if found:
        return image_size // min(found, key=lambda side: abs(side - aim))
    nearest_first = sorted(range(8, 2 * image_size + 8), key=lambda size: abs(size - image_size))
    instead = next(size for size in nearest_first if fitting(size))
    raise Refused(
        f"image size {image_size} can't be cut into {least} to {most} patches a side for vit: "
        f"use --image_size {instead}"
    )


def vit(channels, num_classes, image_size, size=None):
    """torchvision's VisionTransformer with a patch that suits the image (`patch_size`), the data's channels
    and no dropout. x [B, C, H, W] -> logits [B, num_classes].
    """
    from torchvision.models import VisionTransformer  # it takes a second, which --help does not wait for

    class ViT(VisionTransformer):
        roles = {"conv_proj": {"embedding"}}

        def forward(self, x):
            tokens = (self.image_size // self.patch_size) ** 2 + 1
            # autocast takes it to bf16, although x is fp32
            with attention_kernel(x.device, torch.bfloat16, tokens):
                return super().forward(x)

    layers, width, heads = of_size("vit", size or "tiny", VITS)
    patch = patch_size(image_size)
    net = ViT(
        image_size=image_size,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
        num_classes=num_classes,
    )
    if channels != 3:
        net.conv_proj = nn.Conv2d(channels, width, patch, patch)
        # as torchvision draws it
        nn.init.trunc_normal_(net.conv_proj.weight, std=math.sqrt(1 / (channels * patch**2)))
        nn.init.zeros_(net.conv_proj.bias)
    return net


# ---- Task --------------------------------------------------------------------------------------------------


class Classify(Task):
    """Images [B, C, H, W] and labels int64 [B] -> logits [B, classes], by cross-entropy in nats, in fp32.

    BatchNorm normalises by the batch while it trains, and by running means and variances afterwards, which
    move by a tenth a step; under the site `buffers` they are fp32. Scores are taken with averaged weights
    beside the running statistics of the last weights. That fits once the average has arrived; before, it
    costs more than in a net without BatchNorm. The CNN on digits, average of 0.999, held-out loss with these
    statistics and with statistics taken anew: 2.40 and 2.09 nats after 100 steps, 0.22 and 0.10 after 1,000.
    A short run wants --ema_decay 0.99: 0.018 and 0.018 after 1,000. On several processes each normalises by
    its own rows, as in torch's DistributedDataParallel, and the first one's running statistics are kept.
    """

    implied = {"model": "cnn", "size": "tiny", "data": "digits"}
    watched = ("accuracy", "higher")

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        if data.num_classes > PICTURED_CLASSES:
            self.unprinted = ("recall",)

    @classmethod
    def load(cls, config):
        data = super().load(config)
        if data.num_classes < 2:
            found = "one class" if data.num_classes else "no classes"
            raise Refused(
                f"{data.name} has {found}, and there is nothing to tell apart: take digits, mnist:PATH, or "
                "folder:PATH with a folder a class"
            )
        _check_classes(data, data.train, "to train on")
        _check_classes(data, data.heldout, "held out")
        return data

    # -- the net

    @classmethod
    def sizes_of_nets(cls):
        return {"cnn": CNNS, "resnet18": (), "vit": VITS}

    def nets(self):
        return {"cnn": cnn, "resnet18": resnet18, "vit": vit, **self.own_net()}

    def net(self):
        net = super().net()
        c, r = self.config, self.recipe
        if c.model != "vit" and r.low_weights and r.buffers == "bf16" and "norm" in r.islands:
            raise Refused(
                "islands=norm keeps BatchNorm's weights in fp32 and buffers=bf16 its statistics in bf16, and "
                "one kernel takes both: drop one of the two"
            )
        # where the last maps are one pixel, a single image leaves nothing to take a variance of
        world = ranks_here().world
        if c.model == "resnet18" and c.batch_size <= world and self.data.image_size <= 8:
            raise Refused(
                f"--batch_size {c.batch_size}: images of {self.data.image_size} pixels end as one pixel in "
                f"resnet18, and BatchNorm needs two values: use --batch_size {2 * world} or more"
            )
        return net

    # -- training

    def loss(self, model, batch, rng, step):
        """Mean cross-entropy. The model returns logits in fp32. Nothing in it is random."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    # -- scores

    def preview(self, model, rng):
        """Held-out images as a confusion matrix, see `_confusion`."""
        some = self._some()
        return {"confusion": self._confusion(some, *self._predict(model, some, rng.device))}

    def validate(self, model, rng):
        """Accuracy and loss on up to EXAMINED_IMAGES held-out images, the same each time."""
        scores = self._scores(*self._predict(model, self._some(), rng.device))
        return {name: scores[name] for name in ("accuracy", "loss")}

    def _some(self):
        """Indices of held-out images: folders come sorted by class, and each class has its share."""
        draw = torch.Generator().manual_seed(0)
        return torch.randperm(len(self.data.heldout), generator=draw)[:EXAMINED_IMAGES]

    def evaluate(self, model, rng):
        """(scores, pictures) of all held-out images: accuracy, error (1 - accuracy), loss in nats, and
        recall, the accuracy of each class.
        """
        everything = torch.arange(len(self.data.heldout))
        found = self._predict(model, everything, rng.device)
        return self._scores(*found), {"confusion": self._confusion(everything, *found)}

    @torch.no_grad()
    def _predict(self, model, indices, device):
        """(logits fp32 [N, classes], labels [N]) of held-out images."""
        logits, labels = [], []
        for part in indices.split(CLASSIFIED_AT_ONCE):
            images, target = self.data.heldout[part.tolist()]
            logits.append(model(images.to(device)).float().cpu())
            labels.append(target)
        return torch.cat(logits), torch.cat(labels)

    def _scores(self, logits, labels):
        right = (_answer(logits) == labels).double()
        accuracy = right.mean().item()
        recall = [right[labels == k].mean().item() for k in range(self.data.num_classes)]
        loss = F.cross_entropy(logits.double(), labels).item()
        return {
            "accuracy": accuracy,
            "error": 1 - accuracy,
            "loss": loss if math.isfinite(loss) else math.inf,
            "recall": recall,
        }

    def _confusion(self, indices, logits, labels):
        """A confusion matrix made of images, [3, H, W]: a row a class, a column an answer.

        A cell holds the image of its class that got its answer most firmly, green where the answer is right,
        red where it is wrong; the fuller the colour, the larger the share of the row. Nobody was answered so
        where a cell is empty. Of many classes the PICTURED_CLASSES with most errors are drawn.
        """
        answer = _answer(logits)
        errors = torch.bincount(labels[answer != labels], minlength=self.data.num_classes)
        shown = errors.argsort(descending=True, stable=True)[:PICTURED_CLASSES].sort().values.tolist()
        certainty = logits.softmax(1).amax(1)
        cells = []
        for true_class in shown:
            in_row = labels == true_class
            for answered in shown:
                in_cell = in_row & (answer == answered)
                colour = GREEN if answered == true_class else RED
                cells.append(self._cell(indices, certainty, in_cell, in_row, colour))
        return picture(torch.stack(cells), len(shown))

    def _cell(self, indices, certainty, in_cell, in_row, colour):
        """The framed image [3, S, S] in [-1, 1] of a cell. in_cell, in_row: bool [N], which images are."""
        size = self.data.image_size
        border = max(1, size // 14)
        side = size + 2 * border
        if not in_cell.any():
            return torch.full((3, side, side), -0.2)
        best = indices[torch.where(in_cell, certainty, -1.0).argmax()].item()
        image = self.data.heldout[[best]][0][0]  # [C, H, W]
        if self.data.channels != 3:
            image = image.mean(0, keepdim=True).expand(3, -1, -1)
        strength = (in_cell.sum() / in_row.sum()).sqrt().clamp(min=0.5)
        colour = torch.tensor(colour) * strength - (1 - strength)
        framed = colour[:, None, None].repeat(1, side, side)
        framed[:, border:-border, border:-border] = image
        return framed


def _check_classes(data, part, purpose):
    """Raise Refused for classes without an image in a part."""
    counts = torch.bincount(part.labels(), minlength=data.num_classes)
    empty = (counts == 0).nonzero().flatten().tolist()
    if not empty:
        return
    named = ", ".join(f"{i} ({data.classes[i]})" if data.classes else f"{i}" for i in empty[:3])
    if len(empty) > 3:
        named += " and others"
    raise Refused(
        f"{data.name}: class {named} of {data.num_classes} has no image {purpose}: add images of it, or "
        "remove it"
    )


def _answer(logits):
    """int64 [N], the class of the largest of logits [N, classes]; -1, which is no class, where one is NaN or
    infinite.
    """
    return torch.where(logits.isfinite().all(1), logits.argmax(1), -1)
