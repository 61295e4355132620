"""Latent spaces: `--task vae` trains MONAI's AutoencoderKL; latent_space.py trains flows in what it
learnt.

    python train.py --task vae --name vae                 two minutes: reconstructions below their images
    python train.py --vae runs/vae --name latent          a rectified flow in its latents

An encoder gives a mean and a standard deviation for each latent value, the decoder an image of a draw from
them (arXiv 1312.6114; as a first stage of diffusion arXiv 2112.10752). The loss is

    L1 + kl_weight * KL + perceptual * distance in a frozen net + adversarial * (generator's + critic's)

with the mean L1 of a pixel and the KL in nats an image, from the encoder's Gaussian to N(0, 1).

**One optimiser, two opponents.** With --adversarial the net holds MONAI's PatchDiscriminator beside the
autoencoder, and a step is one backward pass of one sum. The critic's loss reads detached reconstructions: it
moves the critic alone. The generator's loss reads the critic through a functional call with detached
weights: its gradient reaches the reconstruction and no weight of the critic. So each part follows its own
loss, at the cost of a third forward pass of a small net. Both are least squares (arXiv 1611.04076), and have
one weight: what is left to Adam is each part's direction.

**Precision.** Training follows the recipe like any task. `vae_encode` and `vae_decode` say in what a trained
autoencoder is evaluated, each half for itself: `python train.py --sample runs/vae --set vae_decode=fp16`.
"""

import math
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from harness.flags import Flag, amount, natural
from lowprec.errors import Refused
from lowprec.machine import exact_math, without
from lowprec.recipes import Site
from tasks import metrics, perceptual
from tasks.task import VALIDATED, Task, picture, two_of_each

# size: (channels per level, residual blocks per level, latent channels). Each level but the first halves the
# image. tiny leaves half of the values of an 8x8 digit: 2x4x4 of 64.
SIZES = {
    "tiny": ((16, 32), 1, 2),
    "small": ((32, 64, 64), 1, 4),
    "base": ((128, 256, 512), 2, 4),
}
FP16_MAX = 65504.0
SMALLEST = math.exp(-15)  # of a standard deviation, as MONAI clamps it
NO_DIFFERENCE = 150.0  # dB, what a signal without any error counts as: fp32 arithmetic leaves 130 to 140
PICTURED = 16
ENCODED = 256  # images encoded or decoded at once, whatever the batch: the same bits each time

# ---- The net -----------------------------------------------------------------------------------------------


def autoencoder_kl(channels, size=None, latent_channels=None):
    """MONAI's AutoencoderKL in fp32; latent_channels None: those of the size. Raises Refused."""
    with without("transformers"):
        from monai.networks.nets import AutoencoderKL

    size = size or "tiny"
    if size not in SIZES:
        raise Refused(f"unknown size {size!r} for vae; choose one of {', '.join(SIZES)}")
    widths, blocks, latents = SIZES[size]
    return AutoencoderKL(
        spatial_dims=2,
        in_channels=channels,
        out_channels=channels,
        num_res_blocks=blocks,
        channels=widths,
        attention_levels=(False,) * len(widths),  # the middle, at the lowest level, attends
        latent_channels=latent_channels or latents,
        norm_num_groups=min(32, widths[0] // 4),
        use_combined_linear=True,
    )


def factor_of(vae):
    """How many pixels a side of a latent stands for."""
    return 2 ** (len(vae.encoder.channels) - 1)


def critic(channels, image_size):
    """MONAI's PatchDiscriminator. GroupNorm in place of BatchNorm: its three calls a step see three kinds of
    batch, whose statistics would mix.
    """
    with without("transformers"):
        from monai.networks.nets import PatchDiscriminator

    layers = max(1, min(3, int(math.log2(image_size)) - 2))  # 8 pixels: 1; the last map is 2x2 or more
    norm = ("GROUP", {"num_groups": 8})
    return PatchDiscriminator(2, channels=16, in_channels=channels, num_layers_d=layers, norm=norm)


class Autoencoder(nn.Module):
    """An AutoencoderKL, `vae`, and with `adversarial` its opponent, `critic`, as one net.

    forward: images [B, C, H, W], noise [B, c, h, w] -> a dict of `images` [B, C, H, W], `mean` and `std`
    [B, c, h, w]; with a critic also its verdicts [B, 1, h', w']: `real` on the images, `fake` on detached
    reconstructions, and `fooled` on reconstructions by a critic without gradient. part="encode": images ->
    (mean, std); part="decode": latents [B, c, h, w] -> images.
    """

    def __init__(self, channels, image_size, size=None, latent_channels=None, adversarial=False):
        super().__init__()
        self.vae = autoencoder_kl(channels, size, latent_channels)
        self.critic = critic(channels, image_size) if adversarial else None
        self.image_size = image_size
        self.roles = {f"vae.decoder.blocks.{len(self.vae.decoder.blocks) - 1}": {"head"}}  # for method.roles

    def forward(self, x, noise=None, part=""):
        if part == "encode":
            return self.vae.encode(x)
        if part == "decode":
            return self.vae.decode(x)
        mean, std = self.vae.encode(x)
        images = self.vae.decode(mean + std * noise.to(mean.dtype))
        found = {"images": images, "mean": mean, "std": std}
        if self.critic is not None:
            still = {name: p.detach() for name, p in self.critic.named_parameters()}
            found["real"] = self.critic(x)[-1]
            found["fake"] = self.critic(images.detach())[-1]
            found["fooled"] = torch.func.functional_call(self.critic, still, (images,))[-1]
        return found

    def get_extra_state(self):
        """The side that it was trained on, for whoever reads the checkpoint."""
        return torch.tensor(self.image_size)

    def set_extra_state(self, state):
        pass  # a net that is fine-tuned keeps its own


# ---- One half in a precision of its own --------------------------------------------------------------------

WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}  # site value: dtype of weights and activations
AUTOCAST = {"autocast": torch.bfloat16, "autocast_fp16": torch.float16}
# relative RMS change of latents or images: 0.02 is 34 dB, some grey levels
LIMITS = {"vae_encode": (0.02, 0.3), "vae_decode": (0.02, 0.3)}


def half_site(site, half, before=()):
    """The Site of `half`, the encoder or the decoder. before: values ahead of fp32, the first the default."""
    infinite = f"activations above 65504 become infinite (see the score overflow); use --set {site}=autocast"
    return Site(
        (*before, "fp32", "autocast", "bf16", "autocast_fp16", "fp16"),
        {
            "compute": f"the {half} of a vae is drawn from as the site generation says",
            "fp32": f"the {half} of a vae in full precision",
            "autocast": f"the {half} of a vae with fp32 weights, its products and convolutions in bf16",
            "bf16": f"weights and activations of a vae's {half} in 8 significant bits",
            "autocast_fp16": f"the {half} of a vae with fp32 weights, products and convolutions in fp16",
            "fp16": f"weights and activations of a vae's {half} in 11 significant bits, up to 65504",
        },
        {
            "bf16": f"{site}=bf16: every layer of the {half} rounds to 8 bits, about 1 % of its output in "
            f"the end; use --set {site}=fp32",
            "autocast_fp16": f"{site}=autocast_fp16: {infinite}",
            "fp16": f"{site}=fp16: {infinite}",
        },
    )


class Frozen:
    """A trained AutoencoderKL in the precision that a site names: fp32, autocast, bf16, autocast_fp16, fp16.

    weights: its state_dict. What it takes is cast, what it gives is fp32.
    """

    def __init__(self, build, weights, precision="fp32"):
        self.dtype, self.low = WEIGHTS.get(precision, torch.float32), AUTOCAST.get(precision)
        self.vae = build()
        self.vae.load_state_dict({name: value.float() for name, value in weights.items()})
        self.vae = self.vae.to(self.dtype).eval().requires_grad_(False)

    @contextmanager
    def _at(self, device):
        self.vae.to(device)
        low = torch.autocast(device.type, dtype=self.low) if self.low else nullcontext()
        with torch.no_grad(), exact_math(), low:
            yield

    def encode(self, images):
        """images [B, C, H, W] -> (mean, std), each fp32 [B, c, h, w]."""
        with self._at(images.device):
            mean, std = self.vae.encode(images.to(self.dtype))
        return mean.float(), std.float()

    def decode(self, latents):
        """latents [B, c, h, w] -> images fp32 [B, C, H, W]."""
        with self._at(latents.device):
            return self.vae.decode(latents.to(self.dtype)).float()


class Ranges:
    """What the layers of a net give while the context is open: `overflow`, the share of their values that
    fp16 can't hold (above 65504, infinite or NaN), and `largest`, the greatest finite magnitude.
    """

    def __init__(self, net):
        self.net, self.over, self.count, self.largest, self.hooks = net, 0, 0, 0.0, []

    def __enter__(self):
        for module in self.net.modules():
            if not isinstance(module, (nn.Sequential, nn.Identity)):  # they pass on what others gave
                self.hooks.append(module.register_forward_hook(self._see))
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def _see(self, module, args, out):
        if not torch.is_tensor(out):
            return
        size = out.detach().float().abs()
        fits = size <= FP16_MAX  # False for NaN
        self.over += int((~fits).sum())
        self.count += size.numel()
        self.largest = max(self.largest, float(torch.where(size.isfinite(), size, 0.0).max()))

    @property
    def overflow(self):
        return self.over / max(1, self.count)


def decibels(signal, error):
    """10 log10 of the ratio of two mean squares, 150 at most; -inf where the error is not finite."""
    signal, error = float(signal), float(error)
    if not math.isfinite(error):
        return -math.inf
    return min(NO_DIFFERENCE, 10 * math.log10(max(signal, 1e-300) / max(error, 1e-300)))


def snr(of, against):
    """Signal-to-noise ratio in dB of a tensor against the one that it should be."""
    of, against = of.double(), against.double()
    return decibels(against.square().mean(), (of - against).square().mean())


def spread(mean, std):
    """Standard deviation of draws from Gaussians of these means and standard deviations, over all values."""
    mean, std = mean.double(), std.double()
    return float((mean.var(correction=0) + std.square().mean()).sqrt())


def judge_halves(exam, recipe, frozen, images):
    """A line of the doctor for each half whose site says another precision than fp32.

    frozen: precision -> Frozen. images [B, C, H, W].
    """
    exact = frozen("fp32")
    latents = exact.encode(images)[0]
    for site, wanted in (("vae_encode", latents), ("vae_decode", exact.decode(latents))):
        if recipe[site] in ("compute", "fp32"):
            continue
        low = frozen(recipe[site])
        with Ranges(low.vae) as ranges:
            given = low.encode(images)[0] if site == "vae_encode" else low.decode(latents)
        change = exam.relative(given, wanted)
        text = f"what this half of the vae gives differs by {change:.2%} from fp32's"
        if ranges.overflow:
            text += f"; {ranges.overflow:.2%} of its activations don't fit fp16"
        overflows = bool(ranges.overflow) and "fp16" in recipe[site]
        exam.judge(site, change, text, f"--set {site}=autocast, or fp32", certain=overflows)


# ---- The task ----------------------------------------------------------------------------------------------


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
        "perceptual": perceptual.SITE,
    }
    implied = {"model": "kl", "size": "tiny", "data": "digits"}
    limits = LIMITS
    watched = ("l1", "lower")

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        self._scorer = self._distance = None

    @classmethod
    def check(cls, config):
        perceptual.check(config)

    @classmethod
    def load(cls, config):
        return two_of_each(super().load(config))

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
        widths, _, latents = SIZES[c.size or "tiny"]
        side = self.data.image_size // 2 ** (len(widths) - 1)
        return c.latent_channels or latents, side, side

    def example(self):
        d = self.data
        images = torch.empty(2, d.channels, d.image_size, d.image_size, device="meta")
        return (images, images.new_empty(2, *self.latent_shape())), {}

    # -- training

    def loss(self, model, batch, rng, step):
        """The loss of images [B, C, H, W] in [-1, 1], see the head of this file. The noise of the latents is
        drawn from `rng`.
        """
        c, images = self.config, batch[0]
        found = model(images, rng.normal(len(images), *self.latent_shape()))
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
        half, nets = {}, []
        for part in ("encode", "decode"):
            value = self.recipe[f"vae_{part}"]
            if value == "compute":
                half[part] = partial(model, part=part)
                nets.append(model.net.vae)
            else:
                frozen = self.frozen(model, value)
                half[part] = getattr(frozen, part)
                nets.append(frozen.vae)
        return half["encode"], half["decode"], nets

    def frozen(self, model, precision):
        """The autoencoder of a View in another precision, on the CPU until it is called."""
        own = model.net.state_dict()
        weights = {name.removeprefix("vae."): w for name, w in own.items() if name.startswith("vae.")}

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
        """l1 and psnr of the means of up to VALIDATED held-out images."""
        images, _ = metrics.subset(self.data.heldout, VALIDATED)
        made = torch.cat([self._made(model, part.to(rng.device)) for part in images.split(ENCODED)])
        return {"l1": float((made - images).abs().mean()), "psnr": psnr(made, images)}

    @staticmethod
    def _made(model, images):
        mean, _ = model(images, part="encode")
        return model(mean.float(), part="decode").float().cpu()

    def preview(self, model, rng):
        """Held-out images, each row of them above its reconstructions."""
        images, _ = metrics.subset(self.data.heldout, PICTURED)
        encode, decode, _ = self.halves(model)
        with torch.no_grad():
            made = decode(encode(images.to(rng.device))[0].float()).float().cpu()
        return {"reconstructions": _rows(images, made)}

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
        with ExitStack() as stack:
            ranges = [stack.enter_context(Ranges(net)) for net in {id(net): net for net in nets}.values()]
            for part in images.split(ENCODED):
                mean, std = (x.float() for x in encode(part.to(rng.device)))
                means.append(mean.cpu())
                stds.append(std.cpu())
                made.append(decode(mean).float().cpu())
        mean, std, made = torch.cat(means), torch.cat(stds), torch.cat(made)
        scores = self._compare(made, images, labels, rng.device)
        scores["kl"], scores["latent_std"] = float(kl(mean, std).mean()), spread(mean, std)
        scores["overflow"] = sum(r.over for r in ranges) / max(1, sum(r.count for r in ranges))
        scores["largest"] = max(r.largest for r in ranges)
        scores["fp32_snr"] = self._against_fp32(model, images, made, rng.device)
        return scores, {"reconstructions": _rows(images[:PICTURED], made[:PICTURED])}

    def _against_fp32(self, model, images, made, device):
        try:
            exact = self.frozen(model, "fp32")
        except Refused:
            return None
        parts = images.split(ENCODED)
        return snr(made, torch.cat([exact.decode(exact.encode(x.to(device))[0]).cpu() for x in parts]))

    def _compare(self, made, images, labels, device="cpu"):
        device = device if torch.device(device).type == "cuda" else "cpu"
        found = metrics.generation_scores(
            self.scorer(device), made, labels if self.data.num_classes else None, images
        )
        found = {name: value for name, value in found.items() if not name.startswith("pixel_")}
        l1 = float((made - images).abs().mean())
        return {"l1": l1, "psnr": psnr(made, images), "snr": snr(made, images), **found}

    def reference(self):
        """{"floor": the held-out images themselves, "ceiling": noise N(0, 1) in their place}."""
        images, labels = metrics.subset(self.data.heldout)
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        made = {"floor": images, "ceiling": noise}
        return {name: self._compare(x, images, labels) for name, x in made.items()}

    def probes(self, exam):
        net, images = exam.net(generation="fp32"), exam.some(exam.images)[0]
        judge_halves(exam, self.recipe, lambda precision: self.frozen(net, precision), images)


# ---- Losses ------------------------------------------------------------------------------------------------


def kl(mean, std):
    """[B] KL of N(mean, std^2) from N(0, 1), each [B, c, h, w], in nats an image (arXiv 1312.6114, B)."""
    variance = std.float().clamp(min=SMALLEST).square()
    return 0.5 * (mean.float().square() + variance - 1 - variance.log()).flatten(1).sum(1)


def critics_loss(found):
    """Least squares (arXiv 1611.04076): 1 for images and 0 for reconstructions."""
    return 0.5 * ((found["real"] - 1).square().mean() + found["fake"].square().mean())


def generators_loss(found):
    return 0.5 * (found["fooled"] - 1).square().mean()


def psnr(made, images):
    """Peak signal-to-noise ratio in dB of images [B, C, H, W] whose range is [-1, 1]."""
    return decibels(4.0, (made.double() - images.double()).square().mean())


def _rows(images, made):
    """A picture [C, H, W]: rows of eight images, below each their reconstructions."""
    pairs = zip(images.split(8), made.split(8), strict=True)
    return picture(torch.cat([torch.cat(pair) for pair in pairs]), 8)
