"""Scores: how good generated images and masks are.

Generated images are compared with held-out real ones in the features of one small frozen fp32 net (Fréchet
distance, KID, label accuracy) and on their pixels (sliced Wasserstein, mean, std, range). A figure means
little alone: reference_scores gives the floor (real training images in place of samples) and the ceiling
(Gaussian noise). Masks get Dice and IoU per class. Nothing is hidden: one NaN or infinite pixel makes every
distance infinite. Images are float [N, C, H, W] in [-1, 1] throughout.
"""

import contextlib
import fcntl
import math
import os
import re
from pathlib import Path

import torch

from lowprec.errors import Refused
from tasks.feature_net import DIGITS_NET_FILE, FeatureNet, fit_feature_net, load_feature_net, save_feature_net

FITTED_IMAGES = 5000  # images at most; no flag changes the number, so a data set has one yardstick


# ---- Yardstick ---------------------------------------------------------------------------------------------


def subset(part, count: int = FITTED_IMAGES) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, targets) of `count` items of a part of a data.Data, of all if there are fewer.

    The same ones each time, shuffled: folders come sorted by class, and each class has its share.
    """
    draw = torch.Generator().manual_seed(0)
    return part[torch.randperm(len(part), generator=draw)[:count].tolist()]


BALANCED_RATIO = 1.25  # the largest class over the smallest, up to which a set counts as balanced


def labels_like(labels: torch.Tensor, classes: int, count: int) -> torch.Tensor:
    """int64 [count]: labels to draw, mixed, in the proportions of `labels` int64 [M], those of real images.

    In turn, each as often as the others, where all classes are about as frequent: a stratified split of a
    balanced set. 0 throughout for a set without labels.
    """
    sizes = torch.bincount(labels, minlength=classes).double() if classes else torch.ones(1)
    if sizes.max() <= BALANCED_RATIO * sizes.min():
        return torch.arange(count) % len(sizes)
    exact = sizes * count / sizes.sum()
    each = exact.floor().long()
    left = (exact - each).argsort(descending=True, stable=True)[: count - int(each.sum())]
    each[left] += 1  # largest remainders
    places = torch.cat([(torch.arange(n) + 0.5) / n for n in each.tolist()])
    return torch.arange(len(sizes)).repeat_interleave(each)[places.argsort(stable=True)]


def yardstick(data, folder: str | Path, seed: int = 0, steps: int = 1000) -> FeatureNet:
    """The net in whose features samples of a labelled data.Data are scored, on the CPU.

    It is the committed one (feature_net.py) where the set has one. For any other set it is fitted once, on
    up to FITTED_IMAGES training images, and kept in `folder`. A kept file that is damaged or of another
    format is replaced. If the folder can't be written, the net is fitted whenever it is asked for. Runs that
    ask together wait for the one that fits.
    """
    if data.yardstick == "digits":
        return load_feature_net(DIGITS_NET_FILE)
    kind = f"{data.num_classes}classes" if data.num_classes >= 2 else "rotations"
    shape = f"{data.channels}x{data.image_size}x{data.image_size}"
    stem = re.sub(r"[^A-Za-z0-9]+", "_", data.name)[-60:]
    path = Path(folder) / f"{stem}-{data.fingerprint}-{shape}-{kind}-seed{seed}.safetensors"
    unread = contextlib.suppress(OSError, ValueError)
    with unread:
        return load_feature_net(path)
    with _one_at_a_time(path.parent):
        with unread:  # another process may have fitted it meanwhile
            return load_feature_net(path)
        net = fit_feature_net(*subset(data.train), data.num_classes, seed, steps)
        with contextlib.suppress(Refused, OSError):  # a kept net only saves time
            save_feature_net(net, path, data=data.name, seed=seed)
    return net


@contextlib.contextmanager
def _one_at_a_time(folder):
    """Wait until no other process is in here with the same folder. One that can't be locked is no obstacle.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)  # which gives the lock back
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def device_of_scores(device) -> torch.device:
    """Where the yardstick lies for a run on `device`: on its GPU, or on the CPU."""
    device = torch.device(device)
    return device if device.type == "cuda" else torch.device("cpu")


# ---- Distances ---------------------------------------------------------------------------------------------


def _flat(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    if a.shape[1:] != b.shape[1:] or min(len(a), len(b)) < 2:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"two or more of one shape needed on both sides, got {shapes}")
    a = a.detach().flatten(1).cpu().double()
    b = b.detach().flatten(1).cpu().double()
    return a, b, bool(a.isfinite().all() and b.isfinite().all())


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Squared 2-Wasserstein distance of the Gaussians fitted to features [N, D] and [M, D].

    |mu_a - mu_b|^2 + tr(S_a + S_b - 2 (S_a^1/2 S_b S_a^1/2)^1/2) in float64, by symmetric
    eigen-decompositions (Heusel et al. 2017, arXiv 1706.08500, eq. 6); inf if any feature is not finite.
    Biased upwards, more so with fewer samples: compare figures of equal counts.
    """
    a, b, finite = _flat(a, b)
    if not finite:
        return math.inf
    cov_a = torch.atleast_2d(a.T.cov())
    cov_b = torch.atleast_2d(b.T.cov())
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    return max(distance.item(), 0.0)


def kid(a: torch.Tensor, b: torch.Tensor) -> float:
    """Unbiased squared MMD of features [N, D] and [M, D] under the kernel (x.y / D + 1)^3.

    inf if a feature is not finite. Around 0, often below, when the distributions are equal. Binkowski et al.
    2018, arXiv 1801.01401, but over all pairs in place of averaged subsets.
    """
    a, b, finite = _flat(a, b)
    if not finite:
        return math.inf

    def total(x, y):
        """The sum of the kernel over all pairs of rows of x and y."""
        slices = x.split(1024)  # all pairs of 10,000 images at once would take 800 MB
        return sum((rows @ y.T / x.shape[1] + 1).pow(3).sum().item() for rows in slices)

    def within(x):
        """The mean of the kernel over pairs of different rows."""
        with_themselves = (x.square().mean(1) + 1).pow(3).sum().item()
        return (total(x, x) - with_themselves) / (len(x) * (len(x) - 1))

    return within(a) + within(b) - 2 * total(a, b) / (len(a) * len(b))


def sliced_wasserstein(a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> float:
    """Sliced 2-Wasserstein distance of images [N, C, H, W] and [M, C, H, W] in pixel values.

    inf if a value is not finite. Root mean square over orthonormal directions fixed by `seed`: as many as an
    image has values, at most 128. Unequal counts meet at interpolated quantiles. Bonneel et al.
    2015, doi 10.1007/s10851-014-0506-3.
    """
    a, b, finite = _flat(a, b)
    if not finite:
        return math.inf
    draw = torch.Generator().manual_seed(seed)
    directions = torch.randn(a.shape[1], min(a.shape[1], 128), generator=draw, dtype=torch.float64)
    directions = torch.linalg.qr(directions).Q
    count = max(len(a), len(b))

    def quantiles(x):  # [N, D] -> [count, directions], at the levels (i + 1/2) / count
        x = (x @ directions).sort(0).values
        at = ((torch.arange(count).double() + 0.5) * len(x) / count - 0.5).clamp(0, len(x) - 1)
        return x[at.floor().long()].lerp(x[at.ceil().long()], at.frac()[:, None])

    return (quantiles(a) - quantiles(b)).square().mean().sqrt().item()


# ---- Generation --------------------------------------------------------------------------------------------


def pixel_stats(images: torch.Tensor) -> dict[str, float]:
    """min, max, mean, std of all values, and `outside`: the share not in [-1, 1], to which NaN counts."""
    x = images.detach().cpu().double()
    return {
        "min": x.min().item(),
        "max": x.max().item(),
        "mean": x.mean().item(),
        "std": x.std(correction=0).item(),
        "outside": 1 - (x.abs() <= 1).double().mean().item(),
    }


@torch.no_grad()
def generation_scores(
    net: FeatureNet | None, samples: torch.Tensor, labels: torch.Tensor | None, heldout_images: torch.Tensor
) -> dict[str, float | None]:
    """Scores of samples [N, C, H, W] wanted as labels int64 [N], against held-out real images [M, C, H, W].
    Without a net those alone that need none.

    frechet, kid, sliced_wasserstein: lower is better. label_accuracy: share that the net reads as wanted;
    None without labels or with a self-supervised net. pixel_min, _max, _mean, _std, _outside: of the samples
    as they came. All else sees them clamped to [-1, 1], as a saved picture is, except that an infinite pixel
    becomes NaN and not 1: a sample with one makes every distance inf and is a miss in label_accuracy. Want
    the classes in the set's own proportions: labels drawn at random cost more than the floor of a stratified
    split has.
    """
    images = samples.detach().float()
    images = images.clamp(-1, 1).masked_fill(~images.isfinite(), math.nan)
    scores = {}
    if net is not None:
        features = net.features_of(images)
        real = net.features_of(heldout_images)
        scores = {"frechet": frechet_distance(features, real), "kid": kid(features, real)}
        scores["label_accuracy"] = None
        if labels is not None and net.supervised:
            logits = net.classify(features)
            right = (logits.argmax(1) == labels.to(logits.device)) & logits.isfinite().all(1)
            scores["label_accuracy"] = right.double().mean().item()
    scores["sliced_wasserstein"] = sliced_wasserstein(images, heldout_images)
    for name, value in pixel_stats(samples).items():
        scores[f"pixel_{name}"] = value
    return scores


def reference_scores(
    net: FeatureNet | None,
    train_images: torch.Tensor,
    train_labels: torch.Tensor | None,
    heldout_images: torch.Tensor,
    seed: int = 0,
    wanted: torch.Tensor | None = None,
) -> dict:
    """{"floor", "ceiling"}: generation_scores of real training images, and of noise N(0, 1), for samples.

    wanted: int64 [N], the labels of the samples that will be scored. Both use N images, since the Fréchet
    distance depends on their number, and the floor draws each class as often as the samples do, by `seed`,
    without replacement; others stand in where a class has too few. All training images where it is None.
    A stratified split is more alike than chance, so the floor of KID can be below 0. The net was fitted on
    the training images, so the floor's label accuracy flatters; the held-out accuracy is what a perfect
    sampler can reach.
    """
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(train_images), generator=draw)
    if wanted is not None:
        chosen = _as_often(chosen, train_labels, wanted)
    labels = None if train_labels is None else train_labels[chosen]
    noise = torch.randn(len(chosen), *train_images.shape[1:], generator=draw)
    return {
        "floor": generation_scores(net, train_images[chosen], labels, heldout_images),
        "ceiling": generation_scores(net, noise, labels, heldout_images),
    }


def _as_often(order: torch.Tensor, labels: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """N of the places in `order` int64 [M], whose labels come as often as in `wanted` int64 [N]: the first
    ones of each class, and the first of the others where a class has too few.

    labels: int64 [M], or None for a set without, whose first N places are taken.
    """
    if labels is None:
        return order[: len(wanted)]
    labels = labels.cpu()[order]
    before = torch.zeros_like(labels)  # how many of its class stand before each place
    for label in labels.unique():
        own = labels == label
        before[own] = torch.arange(int(own.sum()))
    most = torch.bincount(wanted, minlength=int(labels.max()) + 1)
    fits = before < most[labels]
    return torch.cat([order[fits], order[~fits]])[: len(wanted)]


# ---- Segmentation ------------------------------------------------------------------------------------------


def confusion(predicted: torch.Tensor, masks: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Pixel counts int64 [num_classes, num_classes + 1], truth by prediction.

    They add up over batches, and dice_and_iou reads the sum. predicted: logits [N, num_classes, H, W] or
    classes [N, H, W]; masks: int64 [N, H, W]. The last column holds pixels with a NaN or infinite logit:
    argmax would pick a class for them, here they are misses. ValueError for wrong shapes, or classes outside
    [0, num_classes).
    """
    if predicted.ndim == masks.ndim + 1:
        predicted = predicted.argmax(1).masked_fill(~predicted.isfinite().all(1), num_classes)
    elif predicted.is_floating_point() or ((predicted < 0) | (predicted >= num_classes)).any():
        raise ValueError(
            f"predictions are neither logits [N, {num_classes}, H, W] nor classes below {num_classes}"
        )
    if predicted.shape != masks.shape or ((masks < 0) | (masks >= num_classes)).any():
        raise ValueError(
            f"masks {tuple(masks.shape)} and predictions {tuple(predicted.shape)} do not fit, or a mask "
            f"holds a class outside 0 to {num_classes - 1}"
        )
    cells = masks.long().flatten() * (num_classes + 1) + predicted.long().flatten()
    counts = cells.bincount(minlength=num_classes * (num_classes + 1))
    return counts.reshape(num_classes, num_classes + 1).cpu()


def dice_and_iou(counts: torch.Tensor) -> dict:
    """counts of confusion() -> dice and iou, lists by class, and mean_dice and mean_iou of the foreground.

    The background comes first. Of all pixels pooled, not averaged over images. A class neither in the masks
    nor predicted is nan and left out of the means; one that is predicted but not there is 0 and counts.
    """
    hits = counts.diagonal().double()
    truth = counts.sum(1)
    predicted = counts[:, :-1].sum(0)
    dice = 2 * hits / (truth + predicted)
    iou = hits / (truth + predicted - hits)
    return {
        "dice": dice.tolist(),
        "iou": iou.tolist(),
        "mean_dice": dice[1:].nanmean().item(),
        "mean_iou": iou[1:].nanmean().item(),
    }
