"""`--task vae` trains MONAI's AutoencoderKL; latent_space.py trains flows in what it learnt.

    python train.py --task vae --name vae                     two minutes: reconstructions below their images
    python train.py --vae runs/vae --name latent              a rectified flow in its latents
    python train.py --sample runs/vae --set vae_decode=fp16   each half in a precision of its own

An encoder gives a mean and a standard deviation for each latent value, the decoder an image of a draw from
them (arXiv 1312.6114; as a first stage of diffusion arXiv 2112.10752).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from harness.flags import Flag, amount, natural
from lowprec.errors import Refused
from tasks import metrics, perceptual
from tasks.autoencoder import AUTOENCODER_SIZES, Autoencoder, autoencoder_kl, factor_of
from tasks.task import VALIDATED_ITEMS, Task, picture, two_of_each
from tasks.vae_halves import (
    ENCODED_IMAGES,
    HALF_LIMITS,
    Frozen,
    Ranges,
    half_site,
    judge_halves,
    latent_std,
    ratio_in_decibels,
    snr,
)

LEAST_STD = math.exp(-15)  # as MONAI clamps it
PICTURED_PAIRS = 16


class VAE(Task):
    """Images in, latents between, images out. `model` returns what Autoencoder.forward does, in fp32."""

    flags = (
        Flag(
            "latent_channels",
            None,
            "with --task vae: channels of a latent (default: by --size)",
            type=natural,
            fits=True,
        ),
        Flag("kl_weight", 1e-6, "with --task vae: weight of the KL in nats an image", type=amount),
        Flag(
            "adversarial",
            0.0,
            "with --task vae: weight of a patch discriminator's loss, for both sides; 0 for none",
            type=amount,
        ),
        perceptual.PERCEPTUAL,
    )
    sites = {
        "vae_encode": half_site("vae_encode", "encoder", before=("compute",)),
        "vae_decode": half_site("vae_decode", "decoder", before=("compute",)),
        "perceptual": perceptual.PERCEPTUAL_SITE,
    }
    needs = {"perceptual": "perceptual"}
    implied = {"model": "kl", "size": "tiny", "data": "digits"}
    limits = HALF_LIMITS
    watched = ("l1", "lower")

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        # made when they are asked for first
        self._scorer = None
        self._distance = None

    @classmethod
    def load(cls, config):
        return two_of_each(super().load(config))

    @classmethod
    def sizes_of_nets(cls):
        return {"kl": AUTOENCODER_SIZES}

    def nets(self):
        return {"kl": self._build}

    def _build(self, channels, num_classes, image_size, size):
        from models import check_image_size

        c = self.config
        net = Autoencoder(channels, image_size, size, c.latent_channels, bool(c.adversarial))
        factor = factor_of(net.vae)
        check_image_size(f"a vae that shrinks by {factor}", image_size, factor, 2 * factor)
        return net

    def latent_shape(self):
        """(c, h, w) of the latents of an image."""
        c = self.config
        widths, _, latents = AUTOENCODER_SIZES[c.size or "tiny"]
        side = self.data.image_size // 2 ** (len(widths) - 1)
        return c.latent_channels or latents, side, side

    def example(self):
        d = self.data
        images = torch.empty(2, d.channels, d.image_size, d.image_size, device="meta")
        return (images, images.new_empty(2, *self.latent_shape())), {}

    # -- training

    def loss(self, model, batch, rng, step):
        """L1 + kl_weight * KL + perceptual * distance + adversarial * (critic's loss + generator's) of images
        [B, C, H, W] in [-1, 1]: the mean L1 of a pixel, the KL in nats an image, the distance in a frozen
        net. The noise of the latents is drawn from `rng`.
        """
        c = self.config
        images = batch[0]
        noise = rng.normal(len(images), *self.latent_shape())
        found = model(images, noise)
        made = found["images"]
        loss = F.l1_loss(made, images.to(made.dtype))
        loss = loss + c.kl_weight * kl(found["mean"], found["std"]).mean()
        if c.perceptual:
            loss = loss + c.perceptual * self.distance(images.device)(made, images).mean()
        if c.adversarial:
            loss = loss + c.adversarial * (critics_loss(found) + generators_loss(found))
        return loss

    def scorer(self, device="cpu"):
        """The frozen net that images are compared in."""
        if self._scorer is None:
            self._scorer = metrics.yardstick(self.data, f"{self.config.runs}/feature_nets")
        return self._scorer.to(device)

    def distance(self, device):
        """perceptual.Perceptual in the precision of its site."""
        if self._distance is None:
            dtype = self.recipe.dtype("perceptual")
            self._distance = perceptual.Perceptual(self.scorer(), dtype).to(device)
        return self._distance

    # -- scoring

    def halves(self, model):
        """(encode, decode, nets that they run) in the precisions of the sites. model: a precision.View."""
        encode, encoder = self._half(model, "encode")
        decode, decoder = self._half(model, "decode")
        return encode, decode, [encoder] if encoder is decoder else [encoder, decoder]

    def _half(self, model, part):
        """(what is called, the net that it runs) of "encode" or "decode"."""
        precision = self.recipe[f"vae_{part}"]
        if precision == "compute":
            return partial(model, part=part), model.net.vae
        frozen = self.frozen(model, precision)
        return getattr(frozen, part), frozen.vae

    def frozen(self, model, precision):
        """The autoencoder of a View in another precision, on the CPU until it is called."""
        weights = {}
        for name, weight in model.net.state_dict().items():
            if name.startswith("vae."):
                weights[name.removeprefix("vae.")] = weight

        def build():
            return autoencoder_kl(self.data.channels, self.config.size, self.config.latent_channels)

        try:
            return Frozen(build, weights, precision)
        except (RuntimeError, AttributeError, NotImplementedError):
            raise Refused(
                f"--set generation={self.recipe.generation} holds the vae in codes: vae_encode and "
                "vae_decode stay as they are, compute"
            ) from None

    @torch.no_grad()
    def validate(self, model, rng):
        """l1 and psnr of the means of up to VALIDATED_ITEMS held-out images."""
        images, _ = metrics.subset(self.data.heldout, VALIDATED_ITEMS)
        made = []
        for part in images.split(ENCODED_IMAGES):
            mean, _ = model(part.to(rng.device), part="encode")
            made.append(model(mean.float(), part="decode").float().cpu())
        made = torch.cat(made)
        return {"l1": float((made - images).abs().mean()), "psnr": psnr(made, images)}

    def preview(self, model, rng):
        """Held-out images, each row of them above its reconstructions."""
        images, _ = metrics.subset(self.data.heldout, PICTURED_PAIRS)
        encode, decode, _ = self.halves(model)
        with torch.no_grad():
            made = decode(encode(images.to(rng.device))[0].float()).float().cpu()
        return {"reconstructions": _rows_of_pairs(images, made)}

    @torch.no_grad()
    def evaluate(self, model, rng):
        """(scores, pictures) of reconstructions from the means, over held-out images, 5,000 at most.

        l1; psnr and snr in dB; kl in nats an image; latent_std of draws; frechet and the other scores of
        generated images; overflow: the share of activations that fp16 can't hold, and largest, the greatest
        of them; fp32_snr: the reconstructions against those of the same weights in fp32, in dB.
        """
        images, labels = metrics.subset(self.data.heldout)
        encode, decode, nets = self.halves(model)
        means, stds, made = [], [], []
        with Ranges(*nets) as ranges:
            for part in images.split(ENCODED_IMAGES):
                mean, std = encode(part.to(rng.device))
                means.append(mean.float().cpu())
                stds.append(std.float().cpu())
                made.append(decode(mean.float()).float().cpu())
        mean = torch.cat(means)
        std = torch.cat(stds)
        made = torch.cat(made)
        scores = self._compare(made, images, labels, rng.device)
        scores["kl"] = float(kl(mean, std).mean())
        scores["latent_std"] = latent_std(mean, std)
        scores["overflow"] = ranges.overflow
        scores["largest"] = ranges.largest
        scores["fp32_snr"] = self._against_fp32(model, images, made, rng.device)
        return scores, {"reconstructions": _rows_of_pairs(images[:PICTURED_PAIRS], made[:PICTURED_PAIRS])}

    def _against_fp32(self, model, images, made, device):
        """SNR in dB of reconstructions against the same weights' in fp32; None of weights in codes."""
        try:
            exact = self.frozen(model, "fp32")
        except Refused:
            return None
        wanted = []
        for part in images.split(ENCODED_IMAGES):
            mean, _ = exact.encode(part.to(device))
            wanted.append(exact.decode(mean).cpu())
        return snr(made, torch.cat(wanted))

    def _compare(self, made, images, labels, device="cpu"):
        """Scores of reconstructions [N, C, H, W] against their images."""
        scorer = self.scorer(metrics.device_of_scores(device))
        wanted = labels if self.data.num_classes else None
        scores = {
            "l1": float((made - images).abs().mean()),
            "psnr": psnr(made, images),
            "snr": snr(made, images),
        }
        for name, value in metrics.generation_scores(scorer, made, wanted, images).items():
            if not name.startswith("pixel_"):
                scores[name] = value
        return scores

    def reference(self):
        """{"floor": the held-out images themselves, "ceiling": noise N(0, 1) in their place}."""
        images, labels = metrics.subset(self.data.heldout)
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        return {
            "floor": self._compare(images, images, labels),
            "ceiling": self._compare(noise, images, labels),
        }

    def probes(self, exam):
        net = exam.net(generation="fp32")
        images = exam.some(exam.images)[0]
        judge_halves(exam, self.recipe, lambda precision: self.frozen(net, precision), images)


# ---- Losses ------------------------------------------------------------------------------------------------


def kl(mean, std):
    """[B] KL of N(mean, std^2) from N(0, 1), each [B, c, h, w], in nats an image (arXiv 1312.6114, B)."""
    variance = std.float().clamp(min=LEAST_STD).square()
    return 0.5 * (mean.float().square() + variance - 1 - variance.log()).flatten(1).sum(1)


def critics_loss(found):
    """Least squares (arXiv 1611.04076): 1 for images and 0 for reconstructions."""
    return 0.5 * ((found["real"] - 1).square().mean() + found["fake"].square().mean())


def generators_loss(found):
    """Least squares: 1 for reconstructions."""
    return 0.5 * (found["fooled"] - 1).square().mean()


def psnr(made, images):
    """Peak signal-to-noise ratio in dB of images [B, C, H, W] whose range is [-1, 1]."""
    return ratio_in_decibels(4.0, (made.double() - images.double()).square().mean())


def _rows_of_pairs(images, made):
    """A picture [C, H, W]: rows of eight images, below each their reconstructions."""
    rows = []
    for row, its_reconstructions in zip(images.split(8), made.split(8), strict=True):
        rows += [row, its_reconstructions]
    return picture(torch.cat(rows), 8)
