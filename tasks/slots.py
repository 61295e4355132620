"""Slots: a clip as a few vectors that follow its objects. What steve.py and slotcontrast.py share.

Slot attention (arXiv 2006.15055) lets slots compete for the pixels of a frame: the softmax runs over slots.
A recurrent encoder (arXiv 2205.14065) carries them from frame to frame: the slots that a predictor expects
are where the attention of the next frame begins. Three sites say in which dtype the net computes the tensors
that bf16 harms most, whatever it computes the rest in; each is fp32 by default in every recipe:

    softmax      attention over slots, and its division by the sum over pixels, to which 1e-8 is added
    logits       scores over a vocabulary or over other slots, up to their log-softmax
    recurrent    the slots themselves, as they are updated and carried over the frames
"""

import math
from contextlib import nullcontext

import torch
from torch import nn

from lowprec.attention import Attend
from lowprec.errors import Refused
from lowprec.recipes import Recipe, Site
from tasks.video import Video

EPSILON = 1e-8  # what slot attention adds before it divides

SLOT_SITES = {
    "softmax": Site(
        ("fp32", "bf16", "fp16"),
        {
            "fp32": "slots compete in full precision, and 1e-8 keeps an empty slot finite",
            "bf16": "shares of pixels keep 8 bits; 1e-8 is nothing beside a share above 5e-6",
            "fp16": "1e-8 is 0: a slot without a pixel divides 0 by 0",
        },
        {
            "bf16": "softmax=bf16: shares of pixels round to 8 bits and their sum over a frame with them; "
            "use --set softmax=fp32 (default)",
            "fp16": "softmax=fp16: the 1e-8 of slot attention is 0, so a slot that no pixel chooses is 0/0; "
            "use --set softmax=fp32 (default)",
        },
    ),
    "logits": Site(
        ("fp32", "bf16"),
        {
            "fp32": "the log-softmax sees differences below an ulp of bf16",
            "bf16": "half the bytes of the largest activations; log 512 = 6.2 has an ulp of 0.03",
        },
        {
            "bf16": "logits=bf16: a log-probability near -6 is rounded to 0.03, contrastive scores up to 10 "
            "to 0.06; use --set logits=fp32 (default)"
        },
    ),
    "recurrent": Site(
        ("fp32", "bf16"),
        {
            "fp32": "each frame adds to the slots of the last: the sum keeps its bits",
            "bf16": "slots are rounded at every update and every frame",
        },
        {
            "bf16": "recurrent=bf16: slots are rounded after each update of each frame; "
            "use --set recurrent=fp32 (default)"
        },
    ),
}

SLOT_LIMITS = {
    # relative RMS change of what the net gives against the same net with this site in fp32. fp32 gives 0
    # exactly; one rounding to bf16 is 0.0017
    "softmax": (0.001, 0.1),
    "logits": (0.001, 0.1),
    "recurrent": (0.001, 0.1),
}


# ---- Precision inside the net ------------------------------------------------------------------------------


class Numerics:
    """The dtypes of the sites above, as the modules of a net read them; all modules of a net share one.

    recipe: of the run; None is fp32.
    """

    def __init__(self, recipe=None):
        recipe = recipe or Recipe(SLOT_SITES)
        if recipe["softmax"] == "fp16" and recipe.compute == "bf16" and not recipe.low_weights:
            raise Refused(
                "--set softmax=fp16 under --bf16: autocast can't mix the two; use softmax=fp32 or bf16"
            )
        self.softmax = recipe.dtype("softmax")
        self.logits = recipe.dtype("logits")
        self.recurrent = recipe.dtype("recurrent")
        self.gumbel = recipe["gumbel"] if "gumbel" in recipe.values else "fp32"


def as_is(x):
    """A context without autocast, which would choose a dtype of its own for a softmax or a logarithm."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext()


def start_evenly(module):
    """Initial weights that keep the variance through convolutions and ReLUs (arXiv 1502.01852). torch's own
    shrink it by a factor of 6 a layer, and nothing is left after the ten of a discrete VAE.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)


def into(layer, x):
    """x in the dtype of a layer's weights: an fp32 state meets bf16 weights here."""
    return x.to(next(layer.parameters()).dtype)


# ---- Attention ---------------------------------------------------------------------------------------------


class SlotsAttention(nn.Module):
    """x [B, N, width] attends to `context` [B, M, width], or to itself -> [B, N, width]. causal: a token sees
    itself and those before it.
    """

    def __init__(self, width, heads, dropout=0.0, causal=False):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.attend = Attend()
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x, context=None):
        context = x if context is None else context
        q = self.split(self.q(x))
        k = self.split(self.k(context))
        v = self.split(self.v(context))
        dropout = self.dropout if self.training else 0.0
        x = self.attend(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.proj(x.transpose(1, 2).flatten(2))

    def split(self, x):
        """[B, N, width] -> [B, heads, N, width / heads]"""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class SlotsBlock(nn.Module):
    """A transformer block with the norm first: x [B, N, width] -> the same, in the dtype of x. cross: whether
    it attends to a `context` [B, M, width] as well.
    """

    def __init__(self, width, heads, dropout=0.0, causal=False, cross=False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SlotsAttention(width, heads, dropout, causal)
        self.norm2 = nn.LayerNorm(width) if cross else None
        self.cross = SlotsAttention(width, heads, dropout) if cross else None
        self.norm3 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, context=None):
        x = x + self.drop(self.attention(self.normed(self.norm1, x, self.attention))).to(x.dtype)
        if self.cross is not None:
            x = x + self.drop(self.cross(self.normed(self.norm2, x, self.cross), context)).to(x.dtype)
        return x + self.drop(self.mlp(self.normed(self.norm3, x, self.mlp))).to(x.dtype)

    @staticmethod
    def normed(norm, x, layer):
        return into(layer, norm(into(norm, x)))


# ---- Slot attention ----------------------------------------------------------------------------------------


class GRUCell(nn.Module):
    """torch's GRUCell on two nn.Linear, with the state apart: state [.., D] keeps its dtype while the gates
    are computed in that of the weights.
    """

    def __init__(self, width):
        super().__init__()
        self.input = nn.Linear(width, 3 * width)
        self.hidden = nn.Linear(width, 3 * width)

    def forward(self, x, state):
        reset, update, new = self.input(into(self.input, x)).to(state.dtype).chunk(3, -1)
        reset_h, update_h, new_h = self.hidden(into(self.hidden, state)).to(state.dtype).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return new + torch.sigmoid(update + update_h) * (state - new)


class SlotAttention(nn.Module):
    """inputs [B, N, width] and slots [B, K, width] -> (slots [B, K, width], attention [B, N, K]), after
    `iterations` rounds of Algorithm 1 of arXiv 2006.15055. The attention of a pixel sums to 1 over slots.
    """

    def __init__(self, width, numerics):
        super().__init__()
        self.width = width
        self.numerics = numerics
        self.norm_inputs = nn.LayerNorm(width)
        self.norm_slots = nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gru = GRUCell(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, inputs, slots, iterations):
        inputs = SlotsBlock.normed(self.norm_inputs, inputs, self.k)
        k = self.k(inputs) * self.width**-0.5
        v = self.v(inputs)
        for i in range(iterations):
            q = self.q(SlotsBlock.normed(self.norm_slots, slots, self.q))
            attention, share = self.compete(k @ q.transpose(1, 2))
            update = share.to(v.dtype).transpose(1, 2) @ v  # [B, K, N] @ [B, N, width]
            slots = self.gru(update, slots)
            if i < iterations - 1:
                slots = slots + self.mlp(SlotsBlock.normed(self.norm_mlp, slots, self.mlp)).to(slots.dtype)
        return slots, attention

    def compete(self, scores):
        """scores [B, N, K] -> attention [B, N, K], which sums to 1 over slots, and the share of each pixel in
        a slot, which sums to 1 over pixels.
        """
        with as_is(scores):
            attention = scores.to(self.numerics.softmax).softmax(-1)
            weights = attention + EPSILON
            return attention, weights / weights.sum(1, keepdim=True)


class Encoder(nn.Module):
    """inputs [B, T, N, width] and first slots [B, K, width] -> (slots [B, T, K, width], attention [B, T, N,
    K]). first: iterations in the first frame, `iterations` in the others.
    """

    def __init__(self, width, heads, numerics, iterations=2, first=2):
        super().__init__()
        self.numerics = numerics
        self.iterations = iterations
        self.first = first
        self.attend = SlotAttention(width, numerics)
        self.predictor = SlotsBlock(width, heads)

    def forward(self, inputs, slots):
        slots = slots.to(self.numerics.recurrent)
        found, attentions = [], []
        for t in range(inputs.shape[1]):
            if t == 0:
                slots, attention = self.attend(inputs[:, t], slots, self.first)
            else:
                slots, attention = self.attend(inputs[:, t], self.predictor(slots), self.iterations)
            found.append(slots)
            attentions.append(attention)
        return torch.stack(found, 1), torch.stack(attentions, 1)


def coordinates(side, device=None):
    """(x, y, 1 - x, 1 - y) of the places of a grid, fp32 [4, side, side] in [0, 1]."""
    line = torch.linspace(0, 1, side, device=device)
    x = line.expand(side, side)
    y = line[:, None].expand(side, side)
    return torch.stack([x, y, 1 - x, 1 - y])


class Place(nn.Module):
    """Adds to a square grid x [B, C, side, side] a learnt map of its coordinates."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return x + self.conv(into(self.conv, coordinates(x.shape[-1], x.device)[None]))


class FrameEncoder(nn.Module):
    """Frames [B, 3, H, W] -> inputs of slot attention [B, N, width], by convolutions, places, norm and MLP.
    stride: of the first convolution; kernels: pixels a side that each of them sees.
    """

    def __init__(self, channels, width, stride, kernels=(5, 5, 5, 5)):
        super().__init__()
        layers = [nn.Conv2d(3, channels, kernels[0], stride, kernels[0] // 2)]
        for kernel in kernels[1:]:
            layers += [nn.ReLU(), nn.Conv2d(channels, channels, kernel, 1, kernel // 2)]
        self.conv = nn.Sequential(*layers)
        start_evenly(self.conv)
        self.place = Place(channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        x = self.place(self.conv(x)).flatten(2).transpose(1, 2)  # [B, N, channels]
        return self.mlp(SlotsBlock.normed(self.norm, x, self.mlp))


# ---- What the tasks share ----------------------------------------------------------------------------------


class Slots(Video):
    """A task whose net has `numerics`, and gives "slots" [B, T, K, width] beside "masks"."""

    sites = SLOT_SITES
    limits = SLOT_LIMITS
    judged = {}  # {site: what the net gives that tells of it}

    @torch.no_grad()
    def probes(self, exam):
        """What the net gives on the run's clips with each site as it is, against the same with it in fp32."""
        clips = exam.some(exam.images)[0]
        for name in SLOT_SITES:
            exact = exam.net(loss="fp32")
            setattr(exact.net.numerics, name, torch.float32)
            found = self.see(exam.net(loss="fp32"), clips, exam.rng(1))
            wanted = self.see(exact, clips, exam.rng(1))
            parts = self.judged[name]
            change = max(exam.relative(found[part], wanted[part]) for part in parts)
            text = f"{' and '.join(parts)} change by {_percent(change)} against this site in fp32"
            exam.judge(name, change, text, f"--set {name}=fp32")


def _percent(change):
    return f"{change:.2%}" if math.isfinite(change) else "values that are not finite"
