"""SlotContrast: objects of a video found by what stays the same from frame to frame (arXiv 2412.14295).

    python train.py --task slotcontrast

Slots (slots.py) are taken from the features of a frozen net and must give these features back: a small MLP
decodes each slot at each place, and a softmax over slots mixes what they say. A second loss asks that a slot
be most similar to itself in the next frame, among all slots of all clips of the batch:

    loss = mean (features - decoded)^2 + weight cross-entropy(cos(s_t, s_t+1) / 0.1, identity)
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from harness.flags import Flag, amount, positive
from lowprec.sites import SITES
from tasks.slots import Encoder, Numerics, Place, Slots, SlotsBlock, as_is, coordinates, into

FROZEN = replace(SITES["frozen"], values=("cast", "kept", "fp32", "bf16"))
FEATURE_SEED = 0  # of the frozen net, whatever the run's


@dataclass(frozen=True)
class SlotContrastSize:
    """width: of the slots; features: channels of the frozen net; hidden: of the decoder's layers, which are
    `layers`; stride: of the frozen net; contrast: weight of the contrastive loss.
    """

    slots: int
    width: int
    features: int
    hidden: int
    layers: int
    heads: int
    stride: int
    contrast: float


SLOTCONTRAST_SIZES = {
    "tiny": SlotContrastSize(5, 64, 32, 64, 2, 4, 2, 0.05),
    # as published, on features of the width of DINOv2's
    "base": SlotContrastSize(15, 128, 768, 1024, 3, 4, 14, 0.5),
}


# ---- The net -----------------------------------------------------------------------------------------------


class Features(nn.Module):
    """Frames [B, 3, H, W] -> features [B, N, channels], by random convolutions that are never trained. A
    norm without weights brings each place to mean 0 and variance 1.

    The published frozen net is DINOv2, whose features tell objects of photographs apart. Here the weights are
    random, the same in every run: nothing has to be recognised in the sprites, and random features keep what
    tells them apart, colour and edges (distances survive a random projection). For photographs put a trained
    net in the place of this one.
    """

    def __init__(self, channels, stride):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 2 * stride + 1, stride, stride)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1)
        generator = torch.Generator().manual_seed(FEATURE_SEED)
        with torch.no_grad():
            for conv in (self.first, self.second):
                fan = conv.weight[0].numel()
                drawn = torch.randn(conv.weight.shape, generator=generator, device="cpu")
                conv.weight.copy_(drawn * (2 / fan) ** 0.5)
                conv.bias.copy_(torch.randn(channels, generator=generator, device="cpu") * 0.1)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.second(F.relu(self.first(x))).flatten(2).transpose(1, 2)
        return F.layer_norm(x, x.shape[-1:])


class MaskedMLP(nn.Module):
    """slots [B, K, width] -> (features [B, N, channels], masks [B, K, N], which sum to 1 over slots)."""

    def __init__(self, width, hidden, layers, channels, side, numerics):
        super().__init__()
        self.numerics = numerics
        self.side = side
        self.position = nn.Linear(4, width)
        mlp = []
        before = width
        for _ in range(layers):
            mlp += [nn.Linear(before, hidden), nn.ReLU()]
            before = hidden
        self.mlp = nn.Sequential(*mlp)
        self.final = nn.Linear(hidden, channels + 1)

    def forward(self, slots):
        places = coordinates(self.side, slots.device).flatten(1).t()  # [N, 4]
        position = self.position(into(self.position, places))  # [N, width]
        x = into(self.mlp, slots)[:, :, None] + into(self.mlp, position)  # [B, K, N, width]
        out = self.final(into(self.final, self.mlp(x)))
        features = out[..., :-1]
        scores = out[..., -1]
        with as_is(scores):
            masks = scores.to(self.numerics.softmax).softmax(1)
        return (features * masks[..., None].to(features.dtype)).sum(1), masks


class SlotContrast(nn.Module):
    """forward: clips [B, T, 3, H, W] -> {"error" [B, T, N], the mean squared error of a place's features;
    "contrast" [T - 1, K B], cross-entropy of a slot with itself in the next frame; "masks" [B, T, K, h, w];
    "slots" [B, T, K, width]}.

    Slots begin from learnt vectors, one a slot: the contrast then tells apart the same slot of two clips. On
    several processes each contrasts the slots of its own clips. heat: the temperature of the contrast.
    """

    def __init__(self, size, slots, image_size, numerics, heat=0.1):
        super().__init__()
        self.numerics = numerics
        self.heat = heat
        self.features = Features(size.features, size.stride)
        self.place = Place(size.features)
        self.norm = nn.LayerNorm(size.features)
        self.mlp = nn.Sequential(
            nn.Linear(size.features, 2 * size.features), nn.ReLU(), nn.Linear(2 * size.features, size.width)
        )
        self.start = nn.Parameter(torch.randn(1, slots, size.width))
        self.encoder = Encoder(size.width, size.heads, numerics, first=3)
        self.side = -(-image_size // size.stride)
        self.decoder = MaskedMLP(size.width, size.hidden, size.layers, size.features, self.side, numerics)

    def forward(self, clips):
        b, t = clips.shape[:2]
        features = self.features(clips.flatten(0, 1))  # [B T, N, channels]
        grid = features.transpose(1, 2).unflatten(2, (self.side, self.side))
        placed = self.place(grid).flatten(2).transpose(1, 2)  # [B T, N, channels]
        inputs = self.mlp(SlotsBlock.normed(self.norm, placed, self.mlp)).unflatten(0, (b, t))
        slots, _ = self.encoder(inputs, self.start.expand(b, -1, -1))
        decoded, masks = self.decoder(slots.flatten(0, 1))
        with as_is(decoded):
            error = (decoded.float() - features.float()).square().mean(-1)
        return {
            "error": error.unflatten(0, (b, t)),
            "contrast": self.contrast(slots),
            "masks": masks.unflatten(0, (b, t)).unflatten(3, (self.side, self.side)),
            "slots": slots,
        }

    def contrast(self, slots):
        """slots [B, T, K, width] -> [T - 1, B K]"""
        with as_is(slots):
            unit = F.normalize(slots.to(self.numerics.logits), dim=-1).transpose(0, 1).flatten(1, 2)
            logits = unit[:-1] @ unit[1:].transpose(1, 2) / self.heat  # [T - 1, B K, B K]
            return -logits.log_softmax(-1).diagonal(dim1=1, dim2=2)


def build(size=SLOTCONTRAST_SIZES["tiny"], slots=None, image_size=24, recipe=None, heat=0.1):
    """A SlotContrast of one of SLOTCONTRAST_SIZES. recipe: a Recipe with the sites of this task; None: fp32
    at all of them.
    """
    return SlotContrast(size, slots or size.slots, image_size, Numerics(recipe), heat)


# ---- The task ----------------------------------------------------------------------------------------------


class Contrast(Slots):
    flags = (
        Flag(
            "contrast_weight",
            None,
            "weight of the slot-contrastive loss (default: 0.05 for tiny, 0.5 for base)",
            type=amount,
        ),
        Flag("contrast_temperature", 0.1, "temperature of the slot-contrastive loss", type=positive),
    )
    # the features are read in the dtype of the net that learns from them, unless one says otherwise
    sites = {**Slots.sites, "frozen": FROZEN}
    judged = {"softmax": ("masks", "slots"), "logits": ("contrast",), "recurrent": ("masks", "slots")}
    defaults = {"batch_size": 8, "ema_decay": 0.99}
    implied = {"model": "slotcontrast", "size": "tiny", "data": "sprites"}
    sizes = SLOTCONTRAST_SIZES

    @property
    def weight(self):
        own = self.config.contrast_weight
        return self.size.contrast if own is None else own

    def nets(self):
        heat = self.config.contrast_temperature

        def make(channels, num_classes, image_size, size):
            return build(self.size, self.slots, image_size, self.recipe, heat)

        return {"slotcontrast": make}

    def loss(self, model, batch, rng, step):
        """Error of the features and contrast of the slots of clips [B, T, 3, H, W]. It draws nothing."""
        seen = model(batch[0])
        return seen["error"].mean() + self.weight * seen["contrast"].mean()

    def see(self, model, clips, rng):
        return model(clips)

    def errors(self, clips, seen):
        """loss: as in training; feature_error: mean squared, of features of variance 1; contrast: nats a
        slot.
        """
        error, contrast = seen["error"].mean(), seen["contrast"].mean()
        loss = error + self.weight * contrast
        return {"loss": loss, "feature_error": error, "contrast": contrast}

    def shown(self, clips, seen):
        """Each slot in the mean colour of what it takes: the net decodes features, not pixels."""
        side = clips.shape[-1]
        masks = F.interpolate(seen["masks"].flatten(0, 1), (side, side), mode="bilinear")  # [B T, K, H, W]
        weights = masks.unflatten(0, clips.shape[:2])[:, :, :, None]  # [B, T, K, 1, H, W]
        sums = (weights * clips[:, :, None]).sum((-2, -1), keepdim=True)
        colours = sums / weights.sum((-2, -1), keepdim=True).clamp_min(1e-6)
        return (weights * colours).sum(2)
