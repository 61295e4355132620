"""STEVE: objects of a video found by predicting its own discrete tokens from slots (arXiv 2205.14065).

    python train.py --task steve
    python train.py --task steve --size mini --published_start     slots that find some objects (091)

A discrete VAE turns each 4x4 patch of a frame into one of --vocab_size tokens. A recurrent slot encoder
(slots.py) reads the frames, and a causal transformer predicts the tokens of a frame one after the other from
its slots alone. Two losses train parts that share no weight, each with a learning rate of its own:

    dVAE             sum over pixels (x - decoded soft tokens)^2, a mean over frames      --lr
    encoder, decoder sum over tokens of -log p(token | those before it, slots)            --lr / 3, --lr
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from harness.flags import Flag, natural, positive, several
from lowprec.recipes import Site
from tasks.slots import (
    SLOT_LIMITS,
    SLOT_SITES,
    Encoder,
    FrameEncoder,
    Numerics,
    Slots,
    SlotsBlock,
    as_is,
    into,
    start_evenly,
)

GUMBEL_BITS = 23  # (n + 1/2) / 2^23 is exact in fp32, and neither 0 nor 1
PATCH = 4  # pixels a side of a token's patch
DROPOUT = 0.1  # of the decoder over tokens

GUMBEL = Site(
    ("fp32", "bf16", "bf16-open"),
    {
        "fp32": "-log(-log u) of a 23-bit u in (0, 1): between -2.8 and 16.6",
        "bf16": "u keeps 8 bits and stays in (0, 1): no value above 5.5, which one in 256 should exceed",
        "bf16-open": "u rounds to 1 once in 512 draws, and the noise is infinite there",
    },
    {
        "bf16": "gumbel=bf16: noise above 5.5, one value in 256, is cut off; use --set gumbel=fp32 (default)",
        "bf16-open": "gumbel=bf16-open: one value in 512 is infinite, and the loss is NaN; use --set "
        "gumbel=fp32 (default)",
    },
)


@dataclass(frozen=True)
class SteveSize:
    """width: of slots and transformer; channels: of the encoder's convolutions; dvae: of the dVAE; stride: of
    the encoder's first convolution, None: 2 above 64 pixels; vocabulary: number of tokens;
    temperature_steps: until the temperature is lowest; kernels: sides of the encoder's convolutions;
    token_noise: the noise that tokens are drawn with in training, as a share of Gumbel noise.
    """

    slots: int
    width: int
    channels: int
    dvae: int
    blocks: int
    heads: int
    stride: int | None
    vocabulary: int
    temperature_steps: int
    kernels: tuple = (5, 5, 5, 5)
    token_noise: float = 1.0


STEVE_SIZES = {
    "tiny": SteveSize(5, 64, 32, 32, 2, 4, 2, 64, 500),
    # tiny finds no object: whole Gumbel noise drowns the tokens of a short training, and a place of its
    # encoder sees 29 pixels where a frame has 24. Here a place sees 9.
    "mini": SteveSize(5, 64, 32, 32, 2, 4, 2, 64, 500, (5, 3, 1, 1), 0.1),
    "base": SteveSize(15, 192, 64, 64, 8, 4, None, 512, 30_000),  # as published, whose vocabulary was 4096
}


# ---- Discrete VAE ------------------------------------------------------------------------------------------


def convolutions(*shapes):
    """1x1 and 3x3 convolutions with a ReLU after each. shapes: (in, out, kernel)."""
    layers = []
    for before, after, kernel in shapes:
        layers += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU()]
    return layers


class DVAE(nn.Module):
    """Frames [B, 3, H, W] <-> tokens on a grid of H/4 x W/4 (arXiv 2102.12092, as in arXiv 2110.11405).

    noise: with less than 1 tokens are drawn from the probabilities to the power of 1 / noise.
    """

    def __init__(self, vocabulary, width, numerics, noise=1.0):
        super().__init__()
        w = width
        self.numerics = numerics
        self.noise = noise
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w, PATCH, PATCH),
            nn.ReLU(),
            *convolutions(*[(w, w, 1)] * 6),
            nn.Conv2d(w, vocabulary, 1),
        )
        up = [(w, w, 3), (w, w, 1), (w, w, 1), (w, 4 * w, 1)]
        self.decoder = nn.Sequential(
            *convolutions((vocabulary, w, 1), *up),
            nn.PixelShuffle(2),
            *convolutions(*up),
            nn.PixelShuffle(2),
            nn.Conv2d(w, 3, 1),
        )
        start_evenly(self)

    def encode(self, frames):
        """Log-probabilities of tokens [B, V, H/4, W/4], in the dtype of the logits."""
        logits = self.encoder(frames)
        with as_is(logits):
            return logits.to(self.numerics.logits).log_softmax(1)

    def decode(self, tokens):
        """[B, V, H/4, W/4] -> frames [B, 3, H, W]"""
        return self.decoder(into(self.decoder, tokens))

    def sample(self, z, bits, temperature):
        """(soft tokens, numbers of the hard ones [B, H/4, W/4]) of log-probabilities z [B, V, H/4, W/4], by a
        Gumbel-softmax (arXiv 1611.01144).

        bits: int32 of z's shape in [0, 2^23), from which the noise is made; None: no noise. One draw serves
        the soft tokens and, by its largest entry, the hard ones: both have the law that they should. The
        noise comes as whole numbers, which no recipe rounds.
        """
        with as_is(z):
            noisy = z
            if bits is not None:
                noisy = (z + self.noise * gumbel(bits, self.numerics.gumbel)).to(z.dtype)
            return (noisy / temperature).softmax(1), noisy.detach().argmax(1)


def gumbel(bits, how="fp32"):
    """Gumbel noise -log(-log u) of whole numbers in [0, 2^23). how: a value of the site `gumbel`; a bf16 u is
    followed by bf16 logarithms.
    """
    u = (bits + 0.5) / 2**GUMBEL_BITS  # exact in fp32
    if how != "fp32":
        u = u.bfloat16()
    if how == "bf16":
        u = u.clamp(2**-24, 1 - 2**-8)  # the neighbour of 1; nothing below 2^-24 is drawn
    return -torch.log(-torch.log(u))


def temperature(step, steps):
    """Of the Gumbel-softmax at a step: from 1 to 0.1 by half a cosine over `steps`, then 0.1."""
    done = min(1.0, step / steps)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


# ---- Decoder over tokens -----------------------------------------------------------------------------------


class Decoder(nn.Module):
    """tokens int64 [B, L] and slots [B, K, width] -> -log p(token | those before it, slots), [B, L]."""

    def __init__(self, vocabulary, length, width, blocks, heads, numerics):
        super().__init__()
        self.numerics = numerics
        self.token_embed = nn.Embedding(vocabulary + 1, width)  # the last one begins a sequence
        self.position_embed = nn.Embedding(length, width)
        self.slot = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(
            SlotsBlock(width, heads, DROPOUT, causal=True, cross=True) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.final = nn.Linear(width, vocabulary, bias=False)
        for table in (self.token_embed, self.position_embed):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens, slots):
        start = torch.full_like(tokens[:, :1], self.token_embed.num_embeddings - 1)
        before = torch.cat([start, tokens[:, :-1]], 1)  # a token is predicted from those before it
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token_embed(before) + self.position_embed(places))
        context = self.slot(into(self.slot, slots))
        for block in self.blocks:
            x = block(x, context)
        logits = self.final(SlotsBlock.normed(self.norm, x, self.final))  # [B, L, V]
        with as_is(logits):
            logs = logits.to(self.numerics.logits).log_softmax(-1)
        return -logs.gather(-1, tokens[..., None])[..., 0]


# ---- The net -----------------------------------------------------------------------------------------------


def start_as_published(net):
    """Weights of linear layers that keep the variance (Xavier), and tables of variance 1. Those of torch keep
    a third of it, so slots begin by sharing each place evenly.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight)


class STEVE(nn.Module):
    """forward: clips [B, T, 3, H, W], the slots' noise [B, K, width], and to train bits [B * T, V, H/4, W/4]
    and a temperature -> {"reconstruction" as clips; "nll" [B, T, L] of the tokens; "masks" [B, T, K, h, w];
    "slots" [B, T, K, width]}. Without bits tokens are the most probable ones, and what is decoded are they.
    """

    def __init__(self, size, slots, vocabulary, image_size, numerics, token_noise):
        super().__init__()
        self.numerics = numerics
        self.count = slots
        self.width = size.width
        stride = size.stride or (2 if image_size > 64 else 1)
        self.dvae = DVAE(vocabulary, size.dvae, numerics, token_noise)
        self.pixels = FrameEncoder(size.channels, size.width, stride, size.kernels)
        self.mean = nn.Parameter(torch.randn(1, 1, size.width) * size.width**-0.5)
        self.log_scale = nn.Parameter(torch.randn(1, 1, size.width) * size.width**-0.5)
        self.encoder = Encoder(size.width, size.heads, numerics)
        length = (image_size // PATCH) ** 2
        self.decoder = Decoder(vocabulary, length, size.width, size.blocks, size.heads, numerics)

    def forward(self, clips, noise, bits=None, temperature=1.0):
        b, t = clips.shape[:2]
        frames = clips.flatten(0, 1)
        z = self.dvae.encode(frames)
        soft, tokens = self.dvae.sample(z, bits, temperature)
        if bits is None:
            soft = F.one_hot(tokens, z.shape[1]).permute(0, 3, 1, 2)
        decoded = self.dvae.decode(soft)
        inputs = self.pixels(frames).unflatten(0, (b, t))  # [B, T, N, width]
        slots, attention = self.encoder(inputs, self.mean + self.log_scale.exp() * noise)
        nll = self.decoder(tokens.flatten(1), slots.flatten(0, 1))  # [B T, L]
        side = math.isqrt(attention.shape[2])
        return {
            "reconstruction": decoded.unflatten(0, (b, t)),
            "nll": nll.unflatten(0, (b, t)),
            "masks": attention.transpose(2, 3).unflatten(3, (side, side)),
            "slots": slots,
        }


def build(
    size=STEVE_SIZES["tiny"],
    slots=None,
    vocabulary=None,
    image_size=24,
    recipe=None,
    token_noise=None,
    published_start=False,
):
    """A STEVE of one of STEVE_SIZES. recipe: a Recipe with the sites of this task; None: fp32 at all of
    them. Raises Refused.
    """
    from models import check_image_size  # with MONAI, which takes seconds to import

    check_image_size(f"steve, with its patches of {PATCH} pixels", image_size, PATCH, 2 * PATCH)
    vocabulary = vocabulary or size.vocabulary
    token_noise = token_noise or size.token_noise
    net = STEVE(size, slots or size.slots, vocabulary, image_size, Numerics(recipe), token_noise)
    if published_start:
        start_as_published(net)
    return net


# ---- The task ----------------------------------------------------------------------------------------------


class Steve(Slots):
    flags = (
        Flag(
            "vocab_size",
            None,
            "tokens of the discrete VAE (default: 64 for tiny and mini, 512 for base)",
            type=several,
            fits=True,
        ),
        Flag(
            "temperature_steps",
            None,
            "steps in which the temperature of the Gumbel-softmax falls from 1 to 0.1 (default: 500 for "
            "tiny and mini, 30000 for base)",
            type=natural,
        ),
        Flag(
            "token_noise",
            None,
            "noise that tokens are drawn with in training, as a share of the Gumbel noise that draws them by "
            "their probabilities (default: 1 for tiny and base, 0.1 for mini)",
            type=positive,
        ),
        Flag(
            "published_start",
            False,
            "first weights of linear layers and tables as in the published code; torch's are smaller",
        ),
        Flag("lr_dvae", 1.0, "learning rate of the discrete VAE, times --lr", type=positive),
        Flag("lr_encoder", 0.3333, "learning rate of the slot encoder, times --lr", type=positive),
        Flag("lr_decoder", 1.0, "learning rate of the token decoder, times --lr", type=positive),
    )
    sites = {**SLOT_SITES, "gumbel": GUMBEL}
    limits = {
        **SLOT_LIMITS,
        # largest gap between the shares of noise that lie below a value, in the run's precision and in fp32.
        # A u of 8 bits makes it 0.002 to 0.004; below 0.001 nothing was rounded
        "gumbel": (0.001, 0.1),
    }
    judged = {"softmax": ("masks", "slots"), "logits": ("nll",), "recurrent": ("masks", "slots")}
    defaults = {"batch_size": 8, "lr": 2e-3, "steps": 2000, "ema_decay": 0.99}
    implied = {"model": "steve", "size": "tiny", "data": "sprites"}
    sizes = STEVE_SIZES

    @property
    def vocabulary(self):
        return self.config.vocab_size or self.size.vocabulary

    def nets(self):
        c = self.config

        def make(channels, num_classes, image_size, size):
            parts = self.size, self.slots, self.vocabulary, image_size, self.recipe
            return build(*parts, c.token_noise, c.published_start)

        return {"steve": make}

    def groups(self, net):
        """Three learning rates: of the dVAE, of the encoder and of the decoder."""
        c = self.config
        rates = {"dvae": c.lr_dvae, "decoder": c.lr_decoder}  # all else encodes
        part_of = {p: name.split(".")[0] for name, p in net.named_parameters()}
        by_rate = {}  # {(rate, weight decay): parameters}
        for group in super().groups(net) or [{"params": list(net.parameters())}]:
            decay = group.get("weight_decay", c.weight_decay)
            for p in group["params"]:
                rate = rates.get(part_of[p], c.lr_encoder)
                by_rate.setdefault((rate, decay), []).append(p)
        groups = []
        for (rate, decay), params in by_rate.items():
            groups.append({"params": params, "lr": c.lr * rate, "weight_decay": decay})
        return groups

    # -- training

    def loss(self, model, batch, rng, step):
        """Squared error and cross-entropy of clips [B, T, 3, H, W], each summed over a frame. Slots and
        Gumbel noise are drawn from `rng`.
        """
        clips = batch[0]
        seen = model(clips, self.noise(clips, rng), self.bits(clips, rng), self.temperature(step))
        error = (seen["reconstruction"] - clips.to(seen["reconstruction"].dtype)).square()
        return error.sum((2, 3, 4)).mean() + seen["nll"].sum(2).mean()

    def temperature(self, step):
        return temperature(step, self.config.temperature_steps or self.size.temperature_steps)

    def noise(self, clips, rng):
        """Standard normal [B, K, width] of the first slots."""
        return rng.normal(len(clips), self.slots, self.size.width)

    def bits(self, clips, rng):
        """int32 [B T, V, H/4, W/4] in [0, 2^23): the randomness of the tokens."""
        b, t = clips.shape[:2]
        side = self.data.image_size // PATCH
        shape = b * t, self.vocabulary, side, side
        return (rng.uniform(math.prod(shape)) * 2**GUMBEL_BITS).int().view(shape)

    # -- scoring

    def see(self, model, clips, rng):
        return model(clips, self.noise(clips, rng))

    def shown(self, clips, seen):
        return seen["reconstruction"]

    def errors(self, clips, seen):
        """loss: as in training, of the most probable tokens. mse: squared error a pixel and channel of what
        they decode to; nll: nats a token.
        """
        error = (seen["reconstruction"] - clips).square()
        loss = error.sum((2, 3, 4)).mean() + seen["nll"].sum(2).mean()
        return {"loss": loss, "mse": error.mean(), "nll": seen["nll"].mean()}

    @torch.no_grad()
    def probes(self, exam):
        """The sites of the slots, and the noise of the tokens."""
        super().probes(exam)
        bits = self.bits(exam.some(2)[0], exam.rng(2)).flatten()
        own = gumbel(bits, self.recipe["gumbel"]).float()
        exact, _ = gumbel(bits).sort()
        at = torch.linspace(0, len(bits) - 1, 1000, device=bits.device).long()
        ranks = torch.searchsorted(own.sort().values, exact[at], right=True)
        gap = float((ranks - at - 1).abs().max()) / len(bits)
        infinite = float(own.isinf().float().mean())
        text = (
            f"the largest noise is {float(own.max()):.3g} where fp32 has {float(exact[-1]):.3g}, "
            f"{infinite:.2%} of it is infinite, and up to {gap:.2%} lies on the wrong side of a value"
        )
        exam.judge("gumbel", max(gap, infinite), text, "--set gumbel=fp32", certain=infinite > 0)
