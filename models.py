"""The nets: MONAI's U-Nets where MONAI has them, and a DiT (Peebles & Xie, arXiv 2212.09748) of our own.

    python -c "import models; print(models.GENERATIVE['dit'](channels=1, num_classes=10, image_size=8))"

    registry    name  net                                     size (tiny by default, for a CPU)
    GENERATIVE  unet  monai.networks.nets.DiffusionModelUNet  tiny, mini, small, base, large
    GENERATIVE  dit   DiT, below                              tiny, mini, S, B, L, XL; S/2 or XL/4: patch size
    SEGMENTING  unet  monai.networks.nets.UNet                tiny, small, base

Nothing here decides a precision: nets follow what is done to them, and lowprec/roles.py tells by the names of
layers what is worth an island: `embed` for embeddings, `final` or MONAI's `out` for the last layer.
"""

import math
import re
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from harness.flags import of_size
from lowprec.attention import PLAIN_UP_TO_TOKENS, Attend
from lowprec.errors import Refused
from lowprec.machine import monai_alone

with monai_alone():
    from monai.networks.blocks import ResidualUnit
    from monai.networks.nets import DiffusionModelUNet, UNet

# size: (channels per level, residual blocks per level, levels with self-attention). Each level but the
# first halves the image; the middle block, at the lowest, always attends.
DIFFUSION_UNETS = {
    "tiny": ((16, 32), 1, (False, False)),
    "mini": ((32, 64, 64), 1, (False, False, False)),
    "small": ((64, 128), 1, (False, False)),
    "base": ((128, 256, 256), 2, (False, True, True)),
    "large": ((128, 256, 384, 512), 2, (False, False, True, True)),
}
# size: (channels per level, residual units per level)
SEGMENTATION_UNETS = {
    "tiny": ((16, 32, 64, 128), 1),
    "small": ((16, 32, 64, 128, 256), 2),
    "base": ((32, 64, 128, 256, 512), 2),
}
# size: (depth, width, heads). S to XL are the paper's table 1. mini/4: for images of 28x28 on one core. tiny:
# of widths 64, 96 and 128 the first made the best digits in equal time on one core.
DITS = {
    "tiny": (4, 64, 2),
    "mini": (6, 192, 3),
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}
FREQUENCIES = 256  # width of DiT's sinusoid of t, as in the authors' code


def check_image_size(net, image_size, multiple, least):
    """Raises Refused unless image_size is a multiple of `multiple`, and `least` or more; net: what to call
    it.
    """
    if image_size >= least and image_size % multiple == 0:
        return
    below = image_size // multiple * multiple
    fitting = [n for n in (below, max(below + multiple, least)) if n >= least]
    raise Refused(
        f"image size {image_size} does not fit {net}, which needs a multiple of {multiple}, {least} or more; "
        f"use {' or '.join(map(str, fitting))}"
    )


# ---- MONAI's U-Nets ----------------------------------------------------------------------------------------


class DiffusionUNet(DiffusionModelUNet):
    """MONAI's DiffusionModelUNet, called as net(x, t, y).

    MONAI computes the sinusoid of t in fp32 whatever the dtype of t, and casts it to that of x: timesteps
    in bf16 cost this net their own rounding and no more.
    """

    def forward(self, x, t, y):
        return super().forward(x, t, class_labels=y)


def diffusion_unet(channels, num_classes, image_size, size=None, given=0):
    size = size or "tiny"
    widths, res_blocks, attention = of_size("unet", size, DIFFUSION_UNETS)
    factor = 2 ** (len(widths) - 1)
    check_image_size(f"the {size} unet", image_size, factor, factor)
    highest = len(widths) - 1  # the highest level that attends
    if True in attention:
        highest = attention.index(True)
    return DiffusionUNet(
        spatial_dims=2,
        in_channels=channels + given,
        out_channels=channels,
        channels=widths,
        num_res_blocks=res_blocks,
        attention_levels=attention,
        norm_num_groups=min(32, widths[0] // 4),
        num_head_channels=min(64, widths[-1] // 2),
        num_class_embeds=num_classes + 1,
        use_combined_linear=True,
        # MONAI's name for F.scaled_dot_product_attention
        use_flash_attention=(image_size // 2**highest) ** 2 > PLAIN_UP_TO_TOKENS,
    )


class SegmentationUNet(UNet):
    """MONAI's UNet with its last residual unit, the one that gives the logits, named `final`; unchanged
    otherwise.
    """

    def recomputed(self):
        """Its residual units, for activations.recompute: MONAI nests them in Sequentials."""
        return [m for m in self.modules() if isinstance(m, ResidualUnit)]

    def _get_up_layer(self, in_channels, out_channels, strides, is_top):
        up = super()._get_up_layer(in_channels, out_channels, strides, is_top)
        return nn.Sequential(OrderedDict(up=up[0], final=up[1])) if is_top else up


def segmentation_unet(channels, num_classes, image_size, size=None, dims=2):
    size = size or "tiny"
    widths, res_units = of_size("unet (segment)", size, SEGMENTATION_UNETS)
    factor = 2 ** (len(widths) - 1)
    # At twice the factor the lowest map is 2x2: instance norm of a single pixel is undefined, and torch
    # refuses it.
    check_image_size(f"the {size} segmentation unet", image_size, factor, 2 * factor)
    # Instance norm, MONAI's default: MONAI also normalises a map of num_classes channels, which no fixed
    # number of groups divides. Affine, so that a channel can regain the scale that the norm takes away.
    return SegmentationUNet(
        spatial_dims=dims,
        in_channels=channels,
        out_channels=num_classes,
        channels=widths,
        strides=(2,) * (len(widths) - 1),
        num_res_units=res_units,
        norm=("INSTANCE", {"affine": True}),
    )


# ---- DiT ---------------------------------------------------------------------------------------------------


def sinusoid(t, width):
    """Embeds timesteps [B] as [B, width]: cos(t w_i), sin(t w_i), w_i = 10000^(-2i / width) (arXiv
    2006.11239).

    All of it is computed in the dtype of t (integers count as fp32), on purpose: t in bf16 shows what a
    model gets that is bf16 throughout, where angles from 256 to 1000 are rounded to multiples of 2 or 4
    radians. For the exact embedding hand t over in fp32.
    """
    t = t if t.is_floating_point() else t.float()
    steps = torch.arange(width // 2, dtype=t.dtype, device=t.device)
    # .to: autocast on CUDA returns exp in fp32, which would hide the rounding that t in bf16 asks for
    freqs = torch.exp(steps * (-2 * math.log(10000.0) / width)).to(t.dtype)
    angles = t[:, None] * freqs  # [B, width / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def position_embedding(side, width):
    """Fixed 2-D sin-cos embedding of a grid, [side * side, width] fp32, half of the channels for the row,
    half for the column (width divisible by 4); computed in fp64 and rounded once.
    """
    freqs = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * freqs
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = line[:, None].expand(side, side, -1), line[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1).float()  # [side, side, width] -> [side^2, width]


def modulate(x, shift, scale):
    """x [B, tokens, width], scaled and shifted by one vector [B, width] an image."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTAttention(nn.Module):
    """Self-attention, x [B, tokens, width] -> the same shape."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attend = Attend()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        # [B, tokens, 3 width] -> [B, tokens, 3, heads, width / heads] -> 3 x [B, heads, tokens, width /
        # heads]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # [B, heads, tokens, width / heads] -> [B, tokens, width]
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """DiT block with adaLN-Zero: the condition sets shift, scale and gate of both branches (section 3.2).

    forward: x [B, tokens, width], c [B, width], the condition after its SiLU -> [B, tokens, width]. The
    modulation starts at zero, gates included, so a new block is the identity.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = DiTAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, c):
        # [B, 6 width] -> 6 x [B, width]
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiTFinal(nn.Module):
    """DiT's last layer: modulated norm, then a Linear to the values of a patch; both Linears start at zero.
    """

    def __init__(self, width, patch_values):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, patch_values)

    def forward(self, x, c):
        shift, scale = self.modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm(x), shift, scale))


class DiT(nn.Module):
    """Diffusion transformer (arXiv 2212.09748) that predicts the target alone (learn_sigma=False).

    forward: x [B,C,H,W], t [B] floating, its dtype the precision of the sinusoid (see `sinusoid`), y [B]
    int64 in [0, num_classes], the last one the null label -> [B,C,H,W] in the dtype of the last layer. A
    new net returns zeros.
    """

    def __init__(self, channels, num_classes, image_size, patch, depth, width, heads, given=0):
        super().__init__()
        self.patch = patch
        self.x_embed = nn.Linear((channels + given) * patch**2, width)
        self.t_embed = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.y_embed = nn.Embedding(num_classes + 1, width)
        self.register_buffer("pos_embed", position_embedding(image_size // patch, width), persistent=False)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.final = DiTFinal(width, channels * patch**2)
        self._init_weights()

    def _init_weights(self):  # as in the authors' code
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
                if name.endswith("modulation") or name == "final.linear":
                    nn.init.zeros_(module.weight)
                elif name.startswith("t_embed"):
                    nn.init.normal_(module.weight, std=0.02)
                else:
                    nn.init.xavier_uniform_(module.weight)
        nn.init.normal_(self.y_embed.weight, std=0.02)

    def forward(self, x, t, y):
        side = x.shape[2] // self.patch
        # [B, C, H, W] -> [B, C patch^2, side, side] -> [B, tokens, C patch^2] -> [B, tokens, width]
        h = self.x_embed(F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2))
        # The residual stream takes the dtype of x: bf16 in a bf16 net even if the buffer stayed in fp32,
        # and fp32 under autocast.
        h = h + self.pos_embed.to(x.dtype)
        # Only now is the sinusoid cast, and to the weights' dtype, so that an fp32 island gets it unrounded.
        c = self.t_embed(sinusoid(t, FREQUENCIES).to(self.t_embed[0].weight.dtype)) + self.y_embed(y)
        c = F.silu(c)
        for block in self.blocks:
            h = block(h, c)
        h = self.final(h, c)
        # [B, tokens, C patch^2] -> [B, C patch^2, side, side] -> [B, C, H, W]
        return F.pixel_shuffle(h.transpose(1, 2).unflatten(2, (side, side)), self.patch)


def dit(channels, num_classes, image_size, size=None, given=0):
    size = size or "tiny"
    name, slash, patch = size.partition("/")
    if slash and not re.fullmatch("[1-9][0-9]{0,2}", patch):
        name = size
    depth, width, heads = of_size("dit (and S/4: of patch size 4)", name, DITS)
    patch = int(patch or 2)
    check_image_size(f"a dit of patch size {patch}", image_size, patch, patch)
    return DiT(channels, num_classes, image_size, patch, depth, width, heads, given=given)


# ---- Registries --------------------------------------------------------------------------------------------

# Each entry builds a net in fp32 on torch's default device, its initial weights drawn from torch's global
# generator: build(channels, num_classes, image_size, size=None). A task names the registry that it takes.

# called as net(x [B, C, H, W], t [B] floating, timesteps in [0, 1000), y [B] int64 labels) -> [B, C, H, W].
# The label num_classes is the null label of classifier-free guidance (Ho & Salimans, arXiv 2207.12598), which
# the caller puts in place of labels: no net drops labels by itself. given: channels of x behind the C, of a
# condition image
GENERATIVE = {"unet": diffusion_unet, "dit": dit}
# called as net(x [B, C, H, W]) -> logits [B, num_classes, H, W]
SEGMENTING = {"unet": segmentation_unet}
