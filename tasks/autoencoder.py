"""The nets of --task vae: MONAI's AutoencoderKL, and beside it the critic of --adversarial."""

import math

import torch
from torch import nn

from harness.flags import of_size
from lowprec.machine import monai_alone

# size: (channels per level, residual blocks per level, latent channels). Each level but the first halves the
# image. tiny leaves half of the values of an 8x8 digit: 2x4x4 of 64.
AUTOENCODER_SIZES = {
    "tiny": ((16, 32), 1, 2),
    "small": ((32, 64, 64), 1, 4),
    "base": ((128, 256, 512), 2, 4),
}


def autoencoder_kl(channels, size=None, latent_channels=None):
    """MONAI's AutoencoderKL in fp32; latent_channels None: those of the size. Raises Refused."""
    with monai_alone():
        from monai.networks.nets import AutoencoderKL

    widths, blocks, latents = of_size("vae", size or "tiny", AUTOENCODER_SIZES)
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
    with monai_alone():
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
        self.roles = {f"vae.decoder.blocks.{len(self.vae.decoder.blocks) - 1}": {"head"}}  # for roles.roles

    def forward(self, x, noise=None, part=""):
        if part == "encode":
            return self.vae.encode(x)
        if part == "decode":
            return self.vae.decode(x)
        mean, std = self.vae.encode(x)
        images = self.vae.decode(mean + std * noise.to(mean.dtype))
        found = {"images": images, "mean": mean, "std": std}
        if self.critic is not None:
            # One optimiser serves two opponents: a step is one backward pass of the sum of their losses. The
            # critic's loss reads detached reconstructions and moves the critic alone. The generator's loss
            # reads the critic with detached weights: its gradient reaches the reconstruction, and no weight
            # of the critic.
            found["real"] = self.critic(x)[-1]
            found["fake"] = self.critic(images.detach())[-1]
            detached = {name: p.detach() for name, p in self.critic.named_parameters()}
            found["fooled"] = torch.func.functional_call(self.critic, detached, (images,))[-1]
        return found

    def get_extra_state(self):
        """The side that it was trained on, for whoever reads the checkpoint."""
        return torch.tensor(self.image_size)

    def set_extra_state(self, state):
        pass  # a net that is fine-tuned keeps its own
