"""Each half of a trained autoencoder, encoder and decoder, in a precision of its own, and what that costs.

`vae_encode` and `vae_decode` say in what a trained autoencoder is evaluated: the vae task's own, or the one
in whose latents a flow trains (latent_space.py).
"""

import math
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from lowprec.machine import exact_math
from lowprec.recipes import Site

FP16_MAX = 65504.0
NO_DIFFERENCE = 150.0  # dB, what a signal without any error counts as: fp32 arithmetic leaves 130 to 140
ENCODED_IMAGES = 256  # images encoded or decoded at once, whatever the batch: the same bits each time

# value of a site: dtype of weights and activations
WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_DTYPES = {"autocast": torch.bfloat16, "autocast_fp16": torch.float16}
# relative RMS change of latents or images: 0.02 is 34 dB, some grey levels
HALF_LIMITS = {"vae_encode": (0.02, 0.3), "vae_decode": (0.02, 0.3)}


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
        self.dtype = WEIGHT_DTYPES.get(precision, torch.float32)
        self.autocast = AUTOCAST_DTYPES.get(precision)  # None: without
        self.vae = build()
        self.vae.load_state_dict({name: value.float() for name, value in weights.items()})
        self.vae = self.vae.to(self.dtype).eval().requires_grad_(False)

    @contextmanager
    def _at(self, device):
        self.vae.to(device)
        autocast = torch.autocast(device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with torch.no_grad(), exact_math(), autocast:
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
    """What the layers of nets give while the context is open: `overflow`, the share of their values that fp16
    can't hold (above 65504, infinite or NaN), and `largest`, the greatest finite magnitude.
    """

    def __init__(self, *nets):
        self.nets = nets
        self.hooks = []
        self.over = 0  # values that fp16 can't hold
        self.count = 0  # all values
        self.largest = 0.0

    def __enter__(self):
        for net in self.nets:
            for module in net.modules():
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
        finite = torch.where(size.isfinite(), size, 0.0)
        self.largest = max(self.largest, float(finite.max()))

    @property
    def overflow(self):
        return self.over / max(1, self.count)


def ratio_in_decibels(signal, error):
    """10 log10 of the ratio of two mean squares, 150 at most; -inf where the error is not finite."""
    signal = float(signal)
    error = float(error)
    if not math.isfinite(error):
        return -math.inf
    ratio = max(signal, 1e-300) / max(error, 1e-300)
    return min(NO_DIFFERENCE, 10 * math.log10(ratio))


def snr(given, wanted):
    """Signal-to-noise ratio in dB of a tensor against the one that it should be."""
    given = given.double()
    wanted = wanted.double()
    return ratio_in_decibels(wanted.square().mean(), (given - wanted).square().mean())


def latent_std(mean, std):
    """Standard deviation of draws from Gaussians of these means and standard deviations, over all values."""
    between = mean.double().var(correction=0)
    within = std.double().square().mean()
    return float((between + within).sqrt())


def judge_halves(exam, recipe, frozen, images):
    """A line of the doctor for each half whose site says another precision than fp32.

    frozen: precision -> Frozen. images [B, C, H, W].
    """
    exact = frozen("fp32")
    latents = exact.encode(images)[0]
    for site in ("vae_encode", "vae_decode"):
        if recipe[site] in ("compute", "fp32"):
            continue
        low = frozen(recipe[site])
        with Ranges(low.vae) as ranges:
            if site == "vae_encode":
                given = low.encode(images)[0]
                wanted = latents
            else:
                given = low.decode(latents)
                wanted = exact.decode(latents)
        change = exam.relative(given, wanted)
        text = f"what this half of the vae gives differs by {change:.2%} from fp32's"
        if ranges.overflow:
            text += f"; {ranges.overflow:.2%} of its activations don't fit fp16"
        overflows = bool(ranges.overflow) and "fp16" in recipe[site]
        exam.judge(site, change, text, f"--set {site}=autocast, or fp32", certain=overflows)
