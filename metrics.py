"""Scores: how good generated images and masks are, and whether an experiment's arms are equal, better or worse.

Generated images are compared with held-out real ones in the features of one small frozen fp32 net (Fréchet distance,
KID, label accuracy) and on their pixels (sliced Wasserstein, mean, std, range). A figure means little alone:
reference_scores gives the floor (real training images in place of samples) and the ceiling (Gaussian noise). Masks get
Dice and IoU per class, paired runs a confidence interval and an equivalence test. Nothing is hidden: one NaN or
infinite pixel makes every distance infinite.

    python -c "import data, metrics; d = data.load(None, 'rflow'); real = lambda s: s[list(range(len(s)))]; \
               print(metrics.reference_scores(metrics.digits_net(), *real(d.train), real(d.heldout)[0]))"

Costs about a second for 1,300 digits on one CPU core. Images are float [N, C, H, W] in [-1, 1] throughout.
"""
import contextlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from scipy import optimize, stats
from torch import nn

DIGITS_FILE = Path(__file__).with_name("digits_features.safetensors")
FORMAT = 1  # of a stored net; raise it when FeatureNet or its fitting changes, so that cached nets are fitted anew


# ------------------------------------------------------------------------------------------------------- feature net

@contextlib.contextmanager
def _exact_fp32(device_type: str):
    """fp32 arithmetic whatever the run has chosen. torch may put TF32 (its default in CUDA convolutions) or bf16 in the
    place of fp32, and a yardstick that is rounded like the arm it measures is none."""
    backends = torch.backends
    knobs = [backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul]
    before = [knob.fp32_precision for knob in knobs]
    try:
        for knob in knobs:
            knob.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for knob, precision in zip(knobs, before):
            knob.fp32_precision = precision


class FeatureNet(nn.Module):
    """Small convolutional classifier whose 32 features are the space of the Fréchet distance and KID.

    Images of any size and floating dtype are computed in fp32, resized (bilinear, antialiased) to the net's image_size.
    With GroupNorm and no dropout, train and eval mode are one function and features do not depend on the batch.
    `supervised`: the classes are the data set's own, not the rotations of fit_feature_net without labels.
    """

    def __init__(self, channels: int, num_classes: int, image_size: int, supervised: bool = True):
        super().__init__()
        if image_size < 8:
            raise ValueError(f"FeatureNet needs images of at least 8x8 pixels, got {image_size}x{image_size}")
        self.channels, self.num_classes, self.image_size = channels, num_classes, image_size
        self.supervised = supervised

        def block(inputs, outputs, stride=1):
            return [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()]

        first_stride = 2 if image_size > 32 else 1  # the first layers of larger images would cost most of the time
        layers, width = block(channels, 32, first_stride), 32
        for _ in range(int(math.log2(image_size / first_stride / 4))):  # halve the side until it is 4 to 7 pixels
            layers += block(width, 64, stride=2) + block(64, 64)
            width = 64
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 32))
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(32, num_classes))
        self.register_buffer("center", torch.zeros(32))  # of the raw features over the training images
        self.register_buffer("scale", torch.ones(32))

    def resize(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] of any floating dtype -> fp32 [N, C, image_size, image_size]."""
        images, size = images.float(), (self.image_size, self.image_size)
        return images if images.shape[-2:] == size else F.interpolate(images, size, mode="bilinear", antialias=True)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] -> fp32 [N, 32], of mean 0 and std 1 over the images that the net was fitted to."""
        with _exact_fp32(images.device.type):
            return (self.body(self.resize(images)) - self.center) / self.scale

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """fp32 [N, 32] -> fp32 logits [N, num_classes]."""
        with _exact_fp32(features.device.type):
            return self.head(features * self.scale + self.center)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, C, H, W] -> fp32 logits [N, num_classes]."""
        return self.classify(self.features(images))


@torch.enable_grad()
def fit_feature_net(images: torch.Tensor, labels: torch.Tensor | None = None, num_classes: int = 0, seed: int = 0,
                    steps: int = 1000, batch_size: int = 128) -> FeatureNet:
    """Fit a frozen FeatureNet to images [N, C, H, W] in [-1, 1], at their size up to 64x64, on the images' device.

    With labels int64 [N] in [0, num_classes), two classes or more, it is a classifier. Otherwise it learns by how many
    quarter turns an image was rotated (Gidaris et al. 2018, arXiv 1803.07728). The augmentation, shifts of an eighth of
    the side and noise of std up to 0.1, is light on purpose: features that ignore a defect can't score it.
    All randomness comes from `seed`; the global generator stays as it was. Takes 10 seconds at 8x8 and a minute or two
    at 32x32 and above on 2 CPU cores.
    """
    supervised = labels is not None and num_classes >= 2
    draw, device = torch.Generator().manual_seed(seed), images.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FeatureNet(images.shape[1], num_classes if supervised else 4, min(64, max(8, *images.shape[-2:])),
                         supervised)
    net = net.to(device)
    images, size, shift = net.resize(images), net.image_size, net.image_size // 8
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        index = torch.randint(len(images), (batch_size,), generator=draw)
        x = F.pad(images[index.to(device)], [shift] * 4, mode="replicate").permute(0, 2, 3, 1)
        rows, columns = torch.randint(2 * shift + 1, (2, batch_size, 1), generator=draw) + torch.arange(size)
        x = x[torch.arange(batch_size)[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if supervised:
            target = labels[index.to(labels.device)].to(device)
        else:
            target = torch.randint(4, (batch_size,), generator=draw).to(device)
            x = torch.stack([torch.rot90(image, turns, (1, 2)) for image, turns in zip(x, target.tolist())])
        noise = torch.randn(x.shape, generator=draw) * torch.rand(batch_size, 1, 1, 1, generator=draw)
        loss = F.cross_entropy(net(x + 0.1 * noise.to(device)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    net.eval().requires_grad_(False)
    raw = _features(net, images)
    net.center, net.scale = raw.mean(0), raw.std(0, correction=0).clamp(min=1e-6)
    return net


def save_feature_net(net: FeatureNet, path: str | Path, **notes) -> None:
    """Write a net, what rebuilds it and `notes` as safetensors, beside and then renamed: nobody reads half a file."""
    facts = {"format": FORMAT, "channels": net.channels, "num_classes": net.num_classes, "image_size": net.image_size,
             "supervised": net.supervised, **notes}
    # one entry of metadata: safetensors writes several in random order, and equal nets should be equal files
    content = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()},
                                     metadata={"feature_net": json.dumps(facts)})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_feature_net(path: str | Path) -> FeatureNet:
    """Read what save_feature_net wrote, frozen. FileNotFoundError; ValueError for a damaged file or another format."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["feature_net"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}, expected {FORMAT}")
        net = FeatureNet(*(facts[name] for name in ("channels", "num_classes", "image_size", "supervised")))
        net.load_state_dict(tensors)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a feature net that this version reads: {error}") from error
    return net.eval().requires_grad_(False)


def digits_net() -> FeatureNet:
    """The committed classifier of scikit-learn's digits (1 channel, 8x8, 10 classes), made once by fit_features.py."""
    return load_feature_net(DIGITS_FILE)


def cached_feature_net(name: str, fingerprint: str, images: torch.Tensor, labels: torch.Tensor | None, num_classes: int,
                       cache_dir: str | Path, seed: int = 0, steps: int = 1000) -> FeatureNet:
    """fit_feature_net once per data set, kept in cache_dir under its name, fingerprint, shape, labelling and seed.

    A cached file that is damaged or of another format is fitted anew and replaced. OSError: can't write cache_dir.
    """
    kind = f"{num_classes}classes" if labels is not None and num_classes >= 2 else "rotations"
    stem = re.sub(r"[^A-Za-z0-9]+", "_", name)[-60:]
    shape = "x".join(map(str, images.shape[1:]))
    path = Path(cache_dir) / f"{stem}-{fingerprint}-{shape}-{kind}-seed{seed}.safetensors"
    try:
        return load_feature_net(path).to(images.device)
    except (FileNotFoundError, ValueError):
        pass
    net = fit_feature_net(images, labels, num_classes, seed, steps)
    save_feature_net(net, path, data=name, seed=seed)
    return net


# --------------------------------------------------------------------------------------------------------- distances

def _pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    if a.shape[1:] != b.shape[1:] or min(len(a), len(b)) < 2:
        raise ValueError(f"two or more of one shape needed on both sides, got {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = (x.detach().flatten(1).cpu().double() for x in (a, b))
    return a, b, bool(a.isfinite().all() and b.isfinite().all())


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Squared 2-Wasserstein distance of the Gaussians fitted to features [N, D] and [M, D]; inf if any is not finite.

    |mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a^1/2 S_b S_a^1/2)^1/2), float64, by symmetric eigen-decompositions (Heusel et
    al. 2017, arXiv 1706.08500, eq. 6). Biased upwards, more so with fewer samples: compare figures of equal counts.
    """
    a, b, finite = _pair(a, b)
    if not finite:
        return math.inf
    cov_a, cov_b = (torch.atleast_2d(x.T.cov()) for x in (a, b))
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    return max(distance.item(), 0.0)


def kid(a: torch.Tensor, b: torch.Tensor) -> float:
    """Unbiased squared MMD of features [N, D], [M, D] under the kernel (x.y / D + 1)^3; inf if any is not finite.

    Around 0, often below, when the distributions are equal. Binkowski et al. 2018, arXiv 1801.01401, but over all pairs
    in place of averaged subsets.
    """
    a, b, finite = _pair(a, b)
    if not finite:
        return math.inf

    def total(x, y):  # in slices of rows: all pairs of 10,000 images at once would take 800 MB
        return sum((rows @ y.T / x.shape[1] + 1).pow(3).sum().item() for rows in x.split(1024))

    def within(x):
        return (total(x, x) - (x.square().mean(1) + 1).pow(3).sum().item()) / (len(x) * (len(x) - 1))

    return within(a) + within(b) - 2 * total(a, b) / (len(a) * len(b))


def sliced_wasserstein(a: torch.Tensor, b: torch.Tensor, seed: int = 0, projections: int = 128) -> float:
    """Sliced 2-Wasserstein distance of images [N, C, H, W], [M, C, H, W] in pixel values; inf if any is not finite.

    Root mean square over orthonormal directions fixed by `seed`, as many as values in an image, at most `projections`.
    Unequal counts meet at interpolated quantiles. Bonneel et al. 2015, doi 10.1007/s10851-014-0506-3.
    """
    a, b, finite = _pair(a, b)
    if not finite:
        return math.inf
    draw = torch.Generator().manual_seed(seed)
    directions = torch.randn(a.shape[1], min(a.shape[1], projections), generator=draw, dtype=torch.float64)
    directions, count = torch.linalg.qr(directions).Q, max(len(a), len(b))

    def quantiles(x):  # [N, D] -> [count, directions], at the levels (i + 1/2) / count
        x = (x @ directions).sort(0).values
        at = ((torch.arange(count).double() + 0.5) * len(x) / count - 0.5).clamp(0, len(x) - 1)
        return x[at.floor().long()].lerp(x[at.ceil().long()], at.frac()[:, None])

    return (quantiles(a) - quantiles(b)).square().mean().sqrt().item()


# -------------------------------------------------------------------------------------------------------- generation

def pixel_stats(images: torch.Tensor) -> dict[str, float]:
    """min, max, mean, std of all values, and `outside`: the share not in [-1, 1]. NaN shows as nan, and as outside."""
    x = images.detach().cpu().double()
    return {"min": x.min().item(), "max": x.max().item(), "mean": x.mean().item(), "std": x.std(correction=0).item(),
            "outside": 1 - (x.abs() <= 1).double().mean().item()}


@torch.no_grad()
def _features(net: FeatureNet, images: torch.Tensor) -> torch.Tensor:
    device = next(net.parameters()).device
    return torch.cat([net.features(x.to(device)) for x in images.split(512)])


def generation_scores(net: FeatureNet, samples: torch.Tensor, labels: torch.Tensor | None,
                      heldout_images: torch.Tensor) -> dict[str, float | None]:
    """Scores of samples [N, C, H, W] wanted as labels int64 [N], against all held-out real images [M, C, H, W].

    frechet, kid, sliced_wasserstein: lower is better. label_accuracy: share that the net reads as wanted; None
    without labels or with a self-supervised net. pixel_min, _max, _mean, _std, _outside: of the samples as they came.
    All else sees them clamped to [-1, 1], as a saved picture is, except that an infinite pixel becomes NaN and not 1:
    a sample with one makes every distance inf and is a miss in label_accuracy. Want the classes in the data set's own
    proportions: labels drawn at random cost more Fréchet distance than the floor of a stratified split has.
    """
    images = samples.detach().float()
    images = images.clamp(-1, 1).masked_fill(~images.isfinite(), math.nan)
    features, real = _features(net, images), _features(net, heldout_images)
    accuracy = None
    if labels is not None and net.supervised:
        with torch.no_grad():
            logits = net.classify(features)
        right = (logits.argmax(1) == labels.to(logits.device)) & logits.isfinite().all(1)
        accuracy = right.double().mean().item()
    return {"frechet": frechet_distance(features, real), "kid": kid(features, real), "label_accuracy": accuracy,
            "sliced_wasserstein": sliced_wasserstein(images, heldout_images),
            **{f"pixel_{name}": value for name, value in pixel_stats(samples).items()}}


def reference_scores(net: FeatureNet, train_images: torch.Tensor, train_labels: torch.Tensor | None,
                     heldout_images: torch.Tensor, seed: int = 0, count: int | None = None) -> dict[str, dict]:
    """{"floor", "ceiling"}: generation_scores of real training images, and of noise N(0, 1), in place of samples.

    Both use `count` images, drawn without replacement by `seed`; all training images if None or more than there are.
    Give the number of samples that will be scored: the Fréchet distance depends on it. A stratified split is more alike
    than chance, so the floor of KID can be below 0. The net was fitted on the training images, so the floor's label
    accuracy flatters; the held-out accuracy is what a perfect sampler can reach.
    """
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train_images), generator=draw)[:count]
    labels = None if train_labels is None else train_labels[chosen]
    noise = torch.randn(len(chosen), *train_images.shape[1:], generator=draw)
    return {"floor": generation_scores(net, train_images[chosen], labels, heldout_images),
            "ceiling": generation_scores(net, noise, labels, heldout_images)}


# ------------------------------------------------------------------------------------------------------ segmentation

def confusion(predicted: torch.Tensor, masks: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Pixel counts int64 [num_classes, num_classes + 1], truth by prediction: add up the batches', then dice_and_iou.

    predicted: logits [N, num_classes, H, W] or classes [N, H, W]; masks: int64 [N, H, W]. The last column holds pixels
    with a NaN or infinite logit: argmax would pick a class for them, here they are misses. ValueError for wrong shapes,
    or classes outside [0, num_classes).
    """
    if predicted.ndim == masks.ndim + 1:
        predicted = predicted.argmax(1).masked_fill(~predicted.isfinite().all(1), num_classes)
    elif predicted.is_floating_point() or ((predicted < 0) | (predicted >= num_classes)).any():
        raise ValueError(f"predictions are neither logits [N, {num_classes}, H, W] nor classes below {num_classes}")
    if predicted.shape != masks.shape or ((masks < 0) | (masks >= num_classes)).any():
        raise ValueError(f"masks {tuple(masks.shape)} do not fit predictions {tuple(predicted.shape)} and the classes")
    cells = masks.long().flatten() * (num_classes + 1) + predicted.long().flatten()
    return cells.bincount(minlength=num_classes * (num_classes + 1)).reshape(num_classes, num_classes + 1).cpu()


def dice_and_iou(counts: torch.Tensor) -> dict:
    """counts of confusion() -> dice, iou (lists by class, background first), mean_dice, mean_iou of the foreground.

    Of all pixels pooled, not averaged over images. A class neither in the masks nor predicted is nan and left out of
    the means; one that is predicted but not there is 0 and counts.
    """
    hits, truth, predicted = counts.diagonal().double(), counts.sum(1), counts[:, :-1].sum(0)
    dice, iou = 2 * hits / (truth + predicted), hits / (truth + predicted - hits)
    return {"dice": dice.tolist(), "iou": iou.tolist(),
            "mean_dice": dice[1:].nanmean().item(), "mean_iou": iou[1:].nanmean().item()}


def segmentation_scores(predicted: torch.Tensor, masks: torch.Tensor, num_classes: int) -> dict:
    """dice_and_iou of one batch, or of a whole set at once; arguments and errors as in confusion."""
    return dice_and_iou(confusion(predicted, masks, num_classes))


# ------------------------------------------------------------------------------------------------------- equivalence

@dataclass(frozen=True)
class Equivalence:
    mean: float             # of the paired differences
    low: float              # confidence interval of the true mean
    high: float
    verdict: str            # equal, better, worse or undecided
    smallest_effect: float  # true mean difference that this many pairs detect with 80 % power


def _power(effect: float, n: int, alpha: float) -> float:
    # Two-sided paired t-test, effect in sds. Significance with the wrong sign detects nothing: only one tail counts.
    return float(stats.nct.sf(stats.t.isf(alpha / 2, n - 1), n - 1, effect * math.sqrt(n)))


def equivalence(differences, margin: float, alpha: float = 0.05, lower_is_better: bool = True) -> Equivalence:
    """Verdict on paired differences (arm minus baseline, one a seed) for a margin that was fixed before the runs.

    equal: two one-sided t-tests at alpha reject a true mean beyond the margin (TOST, Schuirmann 1987,
    doi 10.1007/BF01068419), that is, the 1 - 2 alpha interval lies inside (-margin, margin). A difference that is
    significant and within the margin is equal. Else better or worse: the 1 - alpha interval [low, high] excludes 0.
    Else undecided, which is not equal. Diverged runs: the same infinity everywhere is better or worse, any other
    mixture with values that are not finite is undecided. ValueError: fewer than two pairs, or a margin not above 0.
    """
    x = torch.as_tensor(differences, dtype=torch.float64).flatten()
    n, mean = len(x), x.mean().item()
    if n < 2 or not margin > 0:
        raise ValueError(f"equivalence needs two pairs or more and a margin above 0, got {n} pairs and margin {margin}")
    side = "better" if (mean < 0) == lower_is_better else "worse"
    if not x.isfinite().all():
        low, verdict = (mean, side) if (x == x[0]).all() else (math.nan, "undecided")
        return Equivalence(mean, low, low, verdict, math.nan)
    sd = x.std().item()
    narrow, wide = (stats.t.isf(tail, n - 1) * sd / math.sqrt(n) for tail in (alpha, alpha / 2))
    low, high = float(mean - wide), float(mean + wide)
    if abs(mean) + narrow < margin:
        verdict = "equal"
    else:
        verdict = side if low > 0 or high < 0 else "undecided"
    most = 4 * stats.t.isf(alpha / 2, n - 1)  # sds; an effect that large is missed by no number of pairs
    return Equivalence(mean, low, high, verdict, sd * optimize.brentq(lambda d: _power(d, n, alpha) - 0.8, 0, most))


def power_n(sd: float, effect: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Pairs a two-sided paired t-test needs to detect a true mean `effect` of differences whose std is `sd`."""
    if not (sd > 0 and effect > 0):
        raise ValueError(f"power_n needs sd and effect above 0, got {sd} and {effect}")
    z = stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power)
    n = max(2, math.ceil((z * sd / effect) ** 2))  # enough if sd were known; the t-test needs as many or a few more
    while _power(effect / sd, n, alpha) < power:
        n += 1
    return n
