"""Where a flow or a diffusion is learnt: in pixels, or with `--vae RUN` in the latents of a trained VAE.

    python train.py --task vae --name vae
    python train.py --vae runs/vae                       rectified flow; or --task ddpm, or --model dit
    python train.py --vae runs/vae --latent_scale 1      the latents as they are

A space says what shape the net sees (`shape`, of one example), turns images into clean values to be noised
(`draw`, `mean`) and values back into images (`decode`). `latent_scale` and `vae_weights`, a hash, are settled
before a run starts and written into its flags, so that --sample reads the same numbers and another VAE at the
same path is refused. The VAE's folder may move: --vae may be given anew.
"""

import functools
import math

import torch
from torch.utils.data import BatchSampler

from harness.checkpoints import check_whole, fingerprint
from harness.checkpoints import read as read_checkpoint
from harness.flags import Flag, positive
from lowprec.errors import Refused
from tasks import metrics
from tasks.autoencoder import autoencoder_kl, factor_of
from tasks.image_sets import CACHE_BYTES, Tensors
from tasks.vae_halves import ENCODED_IMAGES, Frozen, Ranges, half_site, judge_halves, latent_std, snr

MEASURED_IMAGES = 1000  # training images, at most, that the latent scale is taken from
HASH_DIGITS = 16

LATENT_FLAGS = (
    Flag(
        "vae",
        "",
        "train in the latents of this run of --task vae, a checkpoint or folder; --data and --image_size "
        "are its own unless given",
        "generation",
        kind="place",
        metavar="CHECKPOINT",
        may=("sample", "diagnose"),
        titled=True,
        fits=True,
    ),
    Flag(
        "latent_scale",
        None,
        "with --vae: what latents are multiplied by (default: 1 / std of the training latents, measured)",
        "generation",
        type=positive,
        needs="vae",
    ),
    Flag(
        "vae_weights",
        "",
        "with --vae: the first digits of the SHA-256 of its weights, which a run keeps; another VAE is "
        "refused (default: those that --vae holds)",
        "generation",
        fits=True,
        needs="vae",
    ),
)
LATENT_SITES = {
    "vae_encode": half_site("vae_encode", "encoder"),
    "vae_decode": half_site("vae_decode", "decoder"),
}


def settle_latents(task, table, given):
    """{flag: value} of the flags that --vae decides, {} without it. task: a class, see tasks.Task.settle."""
    if not given.get("vae"):
        return {}
    vae = TrainedVAE(given["vae"])
    shared = {
        "data": given.get("data") or vae.flags["data"],
        "image_size": given.get("image_size") or vae.flags["image_size"],
    }
    config = table.typed({**task.own_defaults(), **given, **shared})
    data = task.load(config)
    vae.check(data, config.vae_weights)
    scale = config.latent_scale or vae.scale(data)
    return {**shared, "latent_scale": scale, "vae_weights": config.vae_weights or vae.fingerprint}


# ---- A trained VAE -----------------------------------------------------------------------------------------


class TrainedVAE:
    """The averaged weights of a run of --task vae, read from its checkpoint or folder. Raises Refused."""

    def __init__(self, path):
        self.path = path
        checkpoint = read_checkpoint(path)
        self.flags = checkpoint["config"]
        check_whole(checkpoint, f"--vae {path}", ["vae"])
        if self.flags.get("sparse24") == "srste":
            raise Refused(f"--vae {path} reads two of four weights (--sparse24 srste): train one without")
        self.weights = {}
        for name, weight in checkpoint["precision"]["averages"]["ema"]["shadow"].items():
            if name.startswith("vae."):
                self.weights[name.removeprefix("vae.")] = weight
        self.fingerprint = fingerprint(self.weights)[:HASH_DIGITS]
        try:
            self.image_size = int(checkpoint["precision"]["model"]["_extra_state"])
            self.channels = self.weights["encoder.blocks.0.conv.weight"].shape[1]
            with torch.device("meta"):
                net = self.build()
            wanted = {name: value.shape for name, value in net.state_dict().items()}
        except (KeyError, IndexError, TypeError, ValueError):
            wanted = None
        found = {name: value.shape for name, value in self.weights.items()}
        wrong = "don't fit the vae that its flags speak of" if found != wanted else ""
        if not all(bool(value.isfinite().all()) for value in self.weights.values()):
            wrong = "are not finite"
        if wrong:
            raise Refused(f"--vae {path}: its weights {wrong}: train it again")
        self.latent_channels = net.latent_channels
        self.side = self.image_size // factor_of(net)

    def build(self):
        """A new AutoencoderKL of its shape."""
        return autoencoder_kl(self.channels, self.flags["size"], self.flags["latent_channels"])

    def frozen(self, precision):
        return Frozen(self.build, self.weights, precision)

    def check(self, data, weights=""):
        """Raise Refused unless it takes the images of `data`, and is the vae of that hash."""
        if weights and not self.fingerprint.startswith(weights):
            raise Refused(
                f"--vae {self.path} holds the weights {self.fingerprint}, and this run was made with "
                f"{weights}: give that vae, or another --name"
            )
        own, its = (f"{one.channels}x{one.image_size}x{one.image_size}" for one in (data, self))
        if own != its:
            raise Refused(
                f"--vae {self.path} was trained on images of {its}, and those of {data.name} are {own} here: "
                f"add --image_size {self.image_size}, or train one on this data"
            )

    def scale(self, data):
        """1 / std of the latents of up to MEASURED_IMAGES training images, in fp32 and to five digits, which
        is more than the sample is worth and less than machines differ by.
        """
        mean, std = encoded(self.frozen("fp32"), metrics.subset(data.train, MEASURED_IMAGES)[0]).chunk(2, 1)
        size = latent_std(mean, std)
        if not (math.isfinite(size) and size > 0):
            raise Refused(f"--vae {self.path} gives latents of standard deviation {size}: train it again")
        return float(f"{1 / size:.5g}")


def encoded(frozen, images):
    """images [N, C, H, W] -> mean and std of their latents [N, 2 c, h, w], on the CPU."""
    parts = [torch.cat(frozen.encode(part), dim=1).cpu() for part in images.split(ENCODED_IMAGES)]
    return torch.cat(parts)


# ---- Spaces ------------------------------------------------------------------------------------------------


def space_of_run(data, recipe, config):
    """Pixels, or the Latents of --vae."""
    return Latents(data, recipe, config) if config.vae else Pixels(data)


class Pixels:
    """Images as they are."""

    bounded = True  # in [-1, 1]: a sampler may clip what it thinks is clean

    def __init__(self, data):
        self.channels = data.channels
        self.side = data.image_size
        self.shape = self.channels, self.side, self.side

    def nets(self, builders):
        """{--model: build(channels, num_classes, image_size, size)} for the data's images."""
        return builders

    def train_set(self, part, device):
        """What is trained on, of the training images `part`."""
        return part

    def draw(self, images, rng):
        """Clean values [B, channels, side, side] of images [B, C, H, W]."""
        return images

    def mean(self, images):
        """The same without randomness."""
        return images

    def decode(self, values):
        """Images [B, C, H, W] of values [B, channels, side, side]."""
        return values

    def scores(self, values, images):
        """Scores beside those of the images. values: some that were drawn; images: some held-out ones."""
        return {}

    def probe(self, exam, recipe):
        """What the space's sites lose, for the doctor."""


class Latents:
    """Scaled latents of a trained VAE (arXiv 2112.10752), each half of it in the precision of its site.

    z = mean + std * noise is drawn for each image anew at every step, and multiplied by the latent scale: 1 /
    std of the training latents, measured at the first start, so that noise N(0, 1) and latents have one size.
    The paper does the same (its appendix G); 0.18215 is what its authors found for their own VAE.

    Encoded training images are kept in memory as mean and std [N, 2 c, h, w] where that is no more than
    CACHE_BYTES; `draw` takes such a batch as well as images.
    """

    bounded = False

    def __init__(self, data, recipe, config):
        self.data = data
        self.vae = TrainedVAE(config.vae)
        self.vae.check(data, config.vae_weights)
        self.channels = self.vae.latent_channels
        self.side = self.vae.side
        self.shape = self.channels, self.side, self.side
        self.encoder = self.vae.frozen(recipe["vae_encode"])
        self.decoder = self.vae.frozen(recipe["vae_decode"])
        self.scale = config.latent_scale or self.vae.scale(data)

    def nets(self, builders):
        return {name: functools.partial(self._built, build) for name, build in builders.items()}

    def _built(self, build, channels, num_classes, image_size, size):
        """What `build` makes for latents in place of images."""
        try:
            return build(self.channels, num_classes, self.side, size)
        except Refused as error:
            shape = "x".join(map(str, self.shape))
            raise Refused(f"the latents of --vae {self.vae.path} are {shape}: {error}") from None

    def train_set(self, part, device):
        """The latents of `part` as tensors, or its images where their latents are too many to keep."""
        values = 2 * self.channels * self.side**2 * len(part)
        if 4 * values > CACHE_BYTES:
            return part
        packed, labels = [], []
        for index in BatchSampler(range(len(part)), ENCODED_IMAGES, False):
            images, their_labels = part[index]
            packed.append(encoded(self.encoder, images.to(device)))
            labels.append(their_labels)
        return Tensors(torch.cat(packed), torch.cat(labels), self.side)

    def draw(self, images, rng):
        if images.shape[1:] != (2 * self.channels, *self.shape[1:]):
            images = torch.cat(self.encoder.encode(images), dim=1)
        mean, std = images.chunk(2, dim=1)  # [B, 2 c, h, w] -> 2 x [B, c, h, w]
        return (mean + std * rng.normal(*mean.shape)) * self.scale

    def mean(self, images):
        return self.encoder.encode(images)[0] * self.scale

    def decode(self, values):
        return self.decoder.decode(values / self.scale)

    def scores(self, values, images):
        """overflow: share of the decoder's activations that fp16 can't hold, and largest, the greatest of
        them; decode_snr and encode_snr: each half against itself in fp32, in dB.
        """
        with Ranges(self.decoder.vae) as ranges:
            decoded = self.decode(values)
        exact = self.vae.frozen("fp32")
        return {
            "overflow": ranges.overflow,
            "largest": ranges.largest,
            "decode_snr": snr(decoded, exact.decode(values / self.scale)),
            "encode_snr": snr(self.encoder.encode(images)[0], exact.encode(images)[0]),
        }

    def probe(self, exam, recipe):
        count = min(exam.images, len(self.data.heldout))
        images = self.data.heldout[list(range(count))][0].to(exam.device)
        judge_halves(exam, recipe, self.vae.frozen, images)
