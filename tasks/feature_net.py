"""The small net in whose features generated images are scored, and how it is fitted and kept.

    python -m tasks.feature_net      fits it to the training digits, prints the accuracy, writes the file

That file, digits_features.safetensors, was made once (10 seconds) and is committed, so that every figure is
measured with the same yardstick. The held-out digits are only scored. On one machine the file comes out the
same each time; another CPU may round differently. Images are float [N, C, H, W] in [-1, 1] throughout.
"""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from harness.files import read_tensors, write_atomically
from lowprec.layers.flops import module_flops
from lowprec.machine import exact_math

DIGITS_NET_FILE = Path(__file__).with_name("digits_features.safetensors")
# of a stored net; raise it when the net or its fitting changes, so that kept nets are fitted anew
NET_FORMAT = 1
DIGITS_NET_SEED = 0


@contextmanager
def _exact_fp32(x):
    """fp32 arithmetic whatever the run has chosen: a yardstick rounded like the arm it measures is none."""
    with exact_math(), torch.autocast(x.device.type, enabled=False):
        yield


class FeatureNet(nn.Module):
    """Small convolutional classifier whose 32 features are the space of the Fréchet distance and KID.

    Images of any size and floating dtype are computed in fp32, resized (bilinear, antialiased) to image_size.
    With GroupNorm and no dropout, train and eval mode are one function and features do not depend on the
    batch. `supervised`: the classes are the data set's own, not the rotations of fit_feature_net without
    labels.
    """

    def __init__(self, channels: int, num_classes: int, image_size: int, supervised: bool = True):
        super().__init__()
        if image_size < 8:
            raise ValueError(f"FeatureNet needs images of at least 8x8 pixels, got {image_size}x{image_size}")
        self.channels = channels
        self.num_classes = num_classes
        self.image_size = image_size
        self.supervised = supervised

        def block(inputs, outputs, stride=1):
            return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]

        first_stride = 2 if image_size > 32 else 1  # a large image's first layers would cost most of the time
        layers = block(channels, 32, first_stride)
        width = 32
        for _ in range(int(math.log2(image_size / first_stride / 4))):  # until the side is 4 to 7 pixels
            layers += block(width, 64, stride=2) + block(64, 64)
            width = 64
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 32))
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(32, num_classes))
        self.register_buffer("center", torch.zeros(32))  # of the raw features over the training images
        self.register_buffer("scale", torch.ones(32))

    def resize(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] of any floating dtype -> fp32 [N, C, image_size, image_size]."""
        images = images.float()
        size = (self.image_size, self.image_size)
        if images.shape[-2:] == size:
            return images
        return F.interpolate(images, size, mode="bilinear", antialias=True)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] -> fp32 [N, 32], of mean 0 and std 1 over the images the net was fitted to."""
        with _exact_fp32(images):
            return (self.body(self.resize(images)) - self.center) / self.scale

    @torch.no_grad()
    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """features() of any number of images, 512 at a time, on the net's device."""
        device = self.center.device
        return torch.cat([self.features(part.to(device)) for part in images.split(512)])

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """fp32 [N, 32] -> fp32 logits [N, num_classes]."""
        with _exact_fp32(features):
            return self.head(features * self.scale + self.center)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] -> fp32 logits [N, num_classes]."""
        return self.classify(self.features(images))


FITTING_STEPS = 1000
FITTING_BATCH = 128


@torch.enable_grad()
def fit_feature_net(
    images: torch.Tensor,
    labels: torch.Tensor | None = None,
    num_classes: int = 0,
    seed: int = 0,
    steps: int = FITTING_STEPS,
    batch_size: int = FITTING_BATCH,
) -> FeatureNet:
    """Fit a frozen FeatureNet to images [N, C, H, W] in [-1, 1], at their size up to 64x64, on their device.

    With labels int64 [N] in [0, num_classes), two classes or more, it is a classifier. Otherwise it learns by
    how many quarter turns an image was rotated (Gidaris et al. 2018, arXiv 1803.07728). The augmentation,
    shifts of an eighth of the side and noise of std up to 0.1, is light on purpose: features that ignore a
    defect can't score it. All randomness comes from `seed`; the global generator stays as it was. Takes 10
    seconds at 8x8 and a minute or two at 32x32 and above on 2 CPU cores.
    """
    supervised = labels is not None and num_classes >= 2
    device = images.device
    size = min(64, max(8, *images.shape[-2:]))
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FeatureNet(images.shape[1], num_classes if supervised else 4, size, supervised).to(device)
    images = net.resize(images)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    title = "fitting the net that scores samples, once"
    for _ in tqdm(range(steps), title, leave=False, unit="step", dynamic_ncols=True):
        index = torch.randint(len(images), (batch_size,), generator=draw)
        x = _shifted(images[index.to(device)], size // 8, draw)
        if supervised:
            target = labels[index.to(labels.device)].to(device)
        else:
            target = torch.randint(4, (batch_size,), generator=draw).to(device)
            turns = target.tolist()
            x = torch.stack([torch.rot90(x[i], turns[i], (1, 2)) for i in range(batch_size)])
        noise = torch.randn(x.shape, generator=draw) * torch.rand(batch_size, 1, 1, 1, generator=draw)
        loss = F.cross_entropy(net(x + 0.1 * noise.to(device)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    net.eval().requires_grad_(False)
    raw = net.features_of(images)
    net.center = raw.mean(0)
    net.scale = raw.std(0, correction=0).clamp(min=1e-6)
    return net


def flops_of_fitting(channels: int, image_size: int) -> float:
    """FLOPs of the forward passes of fit_feature_net on images of that size."""
    side = min(64, image_size)
    flops, _ = module_flops(FeatureNet(channels, 4, side).body, (torch.empty(1, channels, side, side),))
    return flops[""] * FITTING_STEPS * FITTING_BATCH


def _shifted(images, most, generator):
    """Images [B, C, S, S], each moved by up to `most` pixels along either axis; its border fills the rest."""
    count, size = len(images), images.shape[-1]
    x = F.pad(images, [most] * 4, mode="replicate").permute(0, 2, 3, 1)  # [B, H, W, C]
    first = torch.randint(2 * most + 1, (2, count, 1), generator=generator)
    rows, columns = first + torch.arange(size)  # [B, S] each
    x = x[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return x.permute(0, 3, 1, 2)


def save_feature_net(net: FeatureNet, path: str | Path, **notes) -> None:
    """Write a net, what rebuilds it and `notes` as safetensors, whole or not at all. May raise Refused."""
    facts = {
        "format": NET_FORMAT,
        "channels": net.channels,
        "num_classes": net.num_classes,
        "image_size": net.image_size,
        "supervised": net.supervised,
        **notes,
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}
    # One entry of metadata: safetensors writes several in random order, and equal nets should be equal files.
    content = safetensors.torch.save(tensors, metadata={"feature_net": json.dumps(facts)})
    write_atomically(path, lambda file: file.write(content))


def load_feature_net(path: str | Path) -> FeatureNet:
    """Read what save_feature_net wrote, frozen. ValueError for a damaged file or another format."""
    tensors, metadata = read_tensors(path)
    try:
        facts = json.loads(metadata["feature_net"])
        if facts["format"] != NET_FORMAT:
            raise ValueError(f"format {facts['format']}, expected {NET_FORMAT}")
        net = FeatureNet(facts["channels"], facts["num_classes"], facts["image_size"], facts["supervised"])
        net.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a feature net that this version reads: {error}") from error
    return net.eval().requires_grad_(False)


def main() -> None:
    from tasks import data

    torch.set_num_threads(1)  # the order of the sums in backward depends on the number of threads
    digits = data.load("digits")
    images, labels = digits.train[list(range(len(digits.train)))]
    heldout_images, heldout_labels = digits.heldout[list(range(len(digits.heldout)))]
    net = fit_feature_net(images, labels, digits.num_classes, DIGITS_NET_SEED)
    accuracy = (net(heldout_images).argmax(1) == heldout_labels).double().mean().item()
    save_feature_net(
        net,
        DIGITS_NET_FILE,
        data=digits.name,
        seed=DIGITS_NET_SEED,
        heldout_accuracy=accuracy,
        command="python -m tasks.feature_net",
    )
    print(
        f"{DIGITS_NET_FILE.name}: {sum(p.numel() for p in net.parameters()):,} parameters, "
        f"held-out accuracy {accuracy:.4f} ({len(heldout_labels)} digits)"
    )


if __name__ == "__main__":
    main()
