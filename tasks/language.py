"""Language: the next byte of a text, by a GPT of nn.Linear layers, by one whose MLPs are mixtures of experts,
or by BDH, whose matrices are bare parameters.

    python train.py --task language --pure_bf16 --stochastic                  a GPT, on the text that is here
    python train.py --task language --model bdh --fp8 --fp8_recipe delayed    BDH, its products in FP8
    python train.py --task language --model moe --optimizer muon              experts, stepped one by one
    python train.py --task language --size 25M --block 512 --data text:FILE   a larger net, a text of your own
    python train.py --task language --finetune runs/NAME --data text:OTHER    go on with another text
    python train.py --sample runs/NAME --prompt "In the beginning" --top_k 3  continue a prompt

A token is a byte, one of 256. docs/repeat.md says where text.txt, the book of Genesis, comes from.
"""

import hashlib
import math
import os
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler

from harness.files import bytes_of_file
from harness.flags import Flag, amount, natural, of_size
from lowprec.attention import Attend
from lowprec.errors import Refused
from lowprec.layers.fp8 import Scaling
from tasks.data import refuse_ways_to_read_files
from tasks.task import Task

VOCABULARY = 256
TEXT_FILE = Path(__file__).parent / "text.txt"  # what is trained on unless --data names a text
MOST_WINDOWS = 1 << 18  # at most so many places of a text that a window of training starts at
HELDOUT_WINDOWS = 256  # at most so many windows that the held-out scores are taken on
WINDOWS_AT_ONCE = 16  # windows scored at once
PROMPT_BYTES = 32  # bytes of held-out text that are continued where no --prompt is given
PICTURED_LINES = 60  # of a text drawn as a picture

# ---- Data --------------------------------------------------------------------------------------------------


class Windows(torch.utils.data.Dataset):
    """Windows of a text, at most `most`, evenly spread over it; they overlap.

    text: uint8 [n]. windows[[3, 1]] -> (inputs, targets), int64 [2, block] each; a target is the byte that
    follows its input.
    """

    def __init__(self, text, block, most):
        self.text = text
        self.block = block
        starts = max(0, len(text) - block)
        self.stride = max(1, math.ceil(starts / most))
        self.count = math.ceil(starts / self.stride)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        starts = torch.tensor(index) * self.stride  # [B]
        at = starts[:, None] + torch.arange(self.block + 1)  # [B] -> [B, block + 1]
        pieces = self.text[at].long()
        return pieces[:, :-1], pieces[:, 1:]


class Text:
    """A text in two parts, train and heldout: the last tenth is held out. Raises Refused for what is no
    readable file, or is too short for a block.
    """

    def __init__(self, path, block):
        content = _bytes_of_text(path)
        held = len(content) // 10
        if held <= block:
            raise Refused(
                f"--data text:{path} has {len(content)} bytes, and its last tenth, which is held out, must "
                f"be longer than a block of {block}: give {10 * (block + 1)} bytes or more, or a smaller "
                "--block"
            )
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        cut = len(content) - held
        self.name = f"text-{Path(path).stem}"
        self.bytes = len(content)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.train = Windows(text[:cut], block, MOST_WINDOWS)
        self.heldout = Windows(text[cut:], block, HELDOUT_WINDOWS)

    def __str__(self):
        return f"{self.name}: {self.bytes:,} bytes, the last tenth held out; SHA-256 {self.fingerprint}..."


def _bytes_of_text(path):
    """The bytes of a file. Raises Refused."""
    path = os.path.expanduser(path)  # an unknown ~name stays as it is
    content = bytes_of_file(path)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or content.count(0) > len(content) // 4:
        raise Refused(
            f"--data text:{path} is in UTF-16 or UTF-32, or no text: bytes are trained on as they are, "
            f"and many of these are 0; convert it: iconv -f UTF-16 -t UTF-8 {path}"
        )
    return content


# ---- GPT ---------------------------------------------------------------------------------------------------

# size: (depth, width, heads); as many parameters as BDH of that size, within a few per cent
GPTS = {"tiny": (4, 64, 4), "1M": (4, 128, 4), "3M": (6, 192, 6), "25M": (8, 512, 8), "100M": (14, 768, 12)}
# size: (depth, width, heads, experts)
MIXTURES = {"tiny": (4, 64, 4, 4), "2M": (4, 128, 4, 4), "35M": (8, 256, 8, 8)}
CHOSEN_EXPERTS = 2  # of a mixture, at each position
BALANCE = 0.01  # of the imbalance of each mixture, in the loss: the weight of the Switch Transformer


class Mixture(nn.Module):
    """In place of an MLP: x [B, T, width] -> (the same shape, imbalance), of the two experts that a router
    chooses at each position, weighted by the softmax of their scores. The matrices of all experts lie in two
    parameters.

    Every expert is computed everywhere, and counts nothing where it was not chosen: so no shape depends on a
    value, at the cost of products that are thrown away.
    """

    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))

    def forward(self, x):
        scores = self.router(x)  # [B, T, E]
        best = scores.topk(CHOSEN_EXPERTS, dim=2).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, True)
        weights = scores.masked_fill(~chosen, -math.inf).softmax(2)
        inner = F.gelu(torch.matmul(x[:, None], self.up))  # [B, E, T, 4 width]
        found = torch.matmul(inner, self.down).transpose(1, 2)  # [B, T, E, width]
        return (weights[..., None] * found).sum(2), imbalance(scores, chosen)


def imbalance(scores, chosen):
    """How unevenly busy experts are, an fp32 number: 1 where all are chosen equally often, and up to
    E / CHOSEN_EXPERTS where a few always are. Of the positions of one micro-batch, on one rank.

    scores, and whether an expert was chosen: [B, T, E]. The Switch Transformer's E sum f P (arXiv 2101.03961,
    equations 4 to 6): f is an expert's share of the choices, which has no gradient, and P its mean
    probability.
    """
    f = chosen.float().mean((0, 1)) / CHOSEN_EXPERTS
    p = scores.float().softmax(2).mean((0, 1))
    return len(f) * (f * p).sum()


class Layer(nn.Module):
    """One layer of a GPT: causal attention, then an MLP or a mixture of experts, each behind an RMSNorm. x,
    and what comes of it: [B, T, width]; with a mixture, (that, its imbalance).
    """

    def __init__(self, width, heads, experts=0):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.norm2 = nn.RMSNorm(width)
        self.attend = Attend()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mixture = None
        if experts:
            self.mixture = Mixture(width, experts)
        else:
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        if self.mixture is None:
            return x + self.mlp(self.norm2(x))
        found, uneven = self.mixture(self.norm2(x))
        return x + found, uneven

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def attention(self, x):
        # [B, T, 3 width] -> [B, T, 3, heads, width / heads] -> three of [B, heads, T, width / heads]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """ids int64 [B, T], T at most `block` -> logits [B, T, 256]. The head is tied to the embedding.

    With experts, in training: (logits, the imbalance of all its mixtures in sum).
    """

    def __init__(self, depth, width, heads, block, experts=0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position_embed = nn.Embedding(block, width)
        self.layers = nn.ModuleList(Layer(width, heads, experts) for _ in range(depth))
        self.final_norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 0.02
            if name.removesuffix(".weight").endswith(("proj", "down")):
                std /= math.sqrt(2 * depth)  # 2 depth layers add to the residual stream: each adds the less
            nn.init.normal_(p, std=std)

    def forward(self, ids):
        x = self.embed(ids) + self.position_embed(torch.arange(ids.shape[1], device=ids.device))
        uneven = []
        for layer in self.layers:
            x = layer(x)
            if layer.mixture is not None:
                x, of_layer = x
                uneven.append(of_layer)
        logits = self.lm_head(self.final_norm(x))
        if uneven and self.training:
            return logits, sum(uneven)
        return logits


# ---- BDH ---------------------------------------------------------------------------------------------------

# size: (layers, width D, heads, factor m). 25M is the published net, 100M that of the guide to FP8 training
BDHS = {
    "tiny": (2, 64, 4, 16),
    "1M": (4, 128, 4, 16),
    "3M": (4, 192, 4, 24),
    "25M": (6, 256, 4, 128),
    "100M": (6, 512, 4, 128),
}
ROTARY_THETA = 2.0**16


def rotary(length, width, device):
    """(cos, sin) of rotary positions, fp32 [length, width]. Values 2i and 2i + 1 share the frequency of
    theta^(-2i / width) radians a position; whole turns are taken off in fp32 before the cosine.

    fp32 in every recipe: at position 512 a phase has made 81 turns, where neighbouring bf16 numbers lie half
    a turn apart.
    """
    pair = torch.arange(width, device=device, dtype=torch.float32).div(2, rounding_mode="floor") * 2
    frequency = ROTARY_THETA ** -(pair / width) / (2 * math.pi)  # turns a position
    turns = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    phase = (turns % 1) * (2 * math.pi)
    return phase.cos(), phase.sin()


def rotate(x, cos, sin):
    """Turn each pair of neighbours of x [..., T, N] by its phase, in fp32; the result has the dtype of x."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)  # (a, b) -> (-b, a)
    return (x * cos + turned * sin).to(x.dtype)


def norm_without_gains(x):
    """Layer norm of the last dimension, without gains."""
    return F.layer_norm(x, x.shape[-1:])


class Hatchling(nn.Module):
    """One layer of BDH: x [B, 1, T, D] -> norm(x + norm((xs relu(y Ev)) D)), of the same shape.

    xs = relu(x E) [B, H, T, N] is sparse and positive; y is the norm of what linear attention, without a
    softmax, reads at the positions before, keys and queries both xs turned by position. A layer owns no
    weights, but a scale for each of its three FP8 products: the layers share the matrices, and not the values
    that meet them.
    """

    def __init__(self, dropout):
        super().__init__()
        self.encode = Scaling()
        self.encode_v = Scaling()
        self.decode = Scaling()
        self.drop = nn.Dropout(dropout)

    def forward(self, x, encoder, encoder_v, decoder, cos, sin):
        xs = F.relu(self.encode(x, encoder))  # [B, H, T, N]
        turned = rotate(xs, cos, sin)
        scores = (turned @ turned.mT).tril(-1)  # [B, H, T, T]: positions before, and not the position itself
        y = norm_without_gains(scores @ x)  # [B, H, T, D]
        ys = F.relu(self.encode_v(y, encoder_v))  # [B, H, T, N]
        gated = self.drop(xs * ys).transpose(1, 2).flatten(2)[:, None]  # -> [B, 1, T, H N]
        return norm_without_gains(x + norm_without_gains(self.decode(gated, decoder)))


class BDH(nn.Module):
    """Dragon Hatchling (arXiv 2509.26507): ids int64 [B, T] -> logits [B, T, 256]. All layers share the
    matrices E [H, D, N], Ev [H, D, N] and D [H N, D], of H heads with N = m D / H neurons each.
    """

    def __init__(self, layers, width, heads, factor, dropout=0.1):
        super().__init__()
        neurons = factor * width // heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.Parameter(torch.empty(heads, width, neurons))
        self.encoder_v = nn.Parameter(torch.empty(heads, width, neurons))
        self.decoder = nn.Parameter(torch.empty(heads * neurons, width))
        self.lm_head = nn.Parameter(torch.empty(width, VOCABULARY))
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)
        self.layers = nn.ModuleList(Hatchling(dropout) for _ in range(layers))

    def forward(self, ids):
        x = norm_without_gains(self.embed(ids))[:, None]  # [B, 1, T, D]
        cos, sin = rotary(ids.shape[1], self.encoder.shape[2], ids.device)
        for layer in self.layers:
            x = layer(x, self.encoder, self.encoder_v, self.decoder, cos, sin)
        return x[:, 0] @ self.lm_head


# ---- The task ----------------------------------------------------------------------------------------------


def drawing_flag(name, default, help, **options):
    """A flag that says how a text is continued; it may differ from run to --sample."""
    return Flag(name, default, help, "generation", kind="draw", **options)


class Language(Task):
    """Predicts the next byte of a text."""

    flags = (
        Flag("block", 128, "bytes of text that the net sees at once", type=natural, fits=True),
        drawing_flag("prompt", "", "text to continue (default: the start of the held-out text)"),
        drawing_flag("length", 256, "bytes to write", type=natural),
        drawing_flag("temperature", 0.8, "how evenly a byte is chosen; 0 takes the likeliest", type=amount),
        drawing_flag("top_k", 40, "choose among that many of the likeliest bytes", type=natural),
    )
    defaults = {"batch_size": 16}
    implied = {"model": "gpt", "size": "tiny", "data": "text"}
    unprinted = ("text",)

    def __init__(self, data, recipe, config):
        super().__init__(data, recipe, config)
        self.items = ("tokens", config.block)

    def __str__(self):
        return f"{self.config.model} of size {self.config.size or self.implied['size']}"

    @classmethod
    def check(cls, config):
        if config.image_size is not None:
            raise Refused(f"--image_size {config.image_size}: a text has no images; drop it")
        refuse_ways_to_read_files(config)

    @classmethod
    def load(cls, config):
        kind, colon, path = (config.data or cls.implied["data"]).partition(":")
        if kind != "text" or (colon and not path):
            raise Refused(f"--data {config.data}: a language net reads text; write --data text:FILE")
        return Text(path or TEXT_FILE, config.block)

    def train_count(self):
        """Windows of one pass over the text: they overlap, and an epoch reads each byte once."""
        return self.data.train.text.numel() // self.config.block

    # -- the net

    @classmethod
    def sizes_of_nets(cls):
        return {"gpt": GPTS, "moe": MIXTURES, "bdh": BDHS}

    def nets(self):
        return {"gpt": self._gpt, "moe": self._mixture, "bdh": self._bdh, **self.own_net()}

    def make(self, build):
        return build(self.config.block, self.config.size or self.implied["size"])

    def _gpt(self, block, size):
        return GPT(*of_size("gpt", size, GPTS), block)

    def _mixture(self, block, size):
        *shape, experts = of_size("moe", size, MIXTURES)
        return GPT(*shape, block, experts)

    def _bdh(self, block, size):
        return BDH(*of_size("bdh", size, BDHS))

    def example(self):
        return (torch.zeros(2, self.config.block, dtype=torch.int64, device="meta"),), {}

    # -- training and scoring

    def loss(self, model, batch, rng, step):
        """Cross-entropy in nats a byte of inputs and targets, int64 [B, T]; in training of a mixture of
        experts also BALANCE times its imbalance. Dropout draws from torch's generator.
        """
        ids, targets = batch
        answer = model(ids)
        if torch.is_tensor(answer):
            return F.cross_entropy(answer.flatten(0, 1), targets.flatten())
        logits, uneven = answer
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + BALANCE * uneven

    def told(self, scores):
        return "\n".join(scores["text"])

    def preview(self, model, rng):
        return {"text": text_picture(self.write(model, rng, self._prompt()))}

    @torch.no_grad()
    def evaluate(self, model, rng):
        """(scores, pictures): nats and bits a byte of the held-out text, the share of its bytes guessed, and
        a text, as [text] among the scores and as a picture.
        """
        heldout = self.data.heldout
        total = 0.0  # nats
        right = 0
        count = 0
        for index in BatchSampler(range(len(heldout)), WINDOWS_AT_ONCE, False):
            ids, targets = heldout[index]
            logits = model(ids.to(rng.device)).float().cpu()  # [B, T, 256]
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            right += (logits.argmax(-1) == targets).sum().item()
            count += targets.numel()
        text = self.write(model, rng, self._prompt())
        nats = total / count
        scores = {
            "nats_a_byte": nats,
            "bits_a_byte": nats / math.log(2),
            "accuracy": right / count,
            "text": [text],
        }
        return scores, {"text": text_picture(text)}

    # -- what it writes

    def _prompt(self):
        """The bytes to continue. What a terminal hands over and is no UTF-8 stays what it was."""
        given = self.config.prompt.encode("utf-8", "surrogateescape")
        return given or bytes(self.data.heldout[[0]][0][0, :PROMPT_BYTES].tolist())

    @torch.no_grad()
    def write(self, model, rng, prompt):
        """The text of `prompt`, bytes, and --length more; the net reads the last --block of them."""
        c = self.config
        ids = torch.tensor([list(prompt)], device=rng.device)  # [1, T]
        for _ in range(c.length):
            logits = model(ids[:, -c.block :])[:, -1].float()  # [1, 256]
            byte = choose_bytes(logits, c.temperature, c.top_k, rng)
            ids = torch.cat([ids, byte[:, None]], dim=1)
        return bytes(ids[0].tolist()).decode("utf-8", "replace")


def choose_bytes(logits, temperature, top_k, rng):
    """A byte for each row of logits [B, 256], int64 [B]: drawn from the softmax over the top_k likeliest of
    logits / temperature; the likeliest where temperature is 0.
    """
    top, byte = logits.topk(min(top_k, logits.shape[1]), dim=1)  # [B, k], likeliest first
    if temperature == 0:
        return byte[:, 0]
    reached = ((top - top[:, :1]) / temperature).softmax(1).cumsum(1)  # [B, k], up to 1
    u = rng.uniform(len(top))[:, None]
    place = (reached < u).sum(1).clamp(max=top.shape[1] - 1)
    return byte.gather(1, place[:, None])[:, 0]


def text_picture(text):
    """The first lines of a text as a picture [3, H, W] in [0, 1], black on white."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    lines = []
    for line in text.split("\n"):
        shown = "".join(char if char.isprintable() else "\ufffd" for char in line)
        lines += textwrap.wrap(shown, 72) or [""]
    page = "\n".join(lines[:PICTURED_LINES])
    font = ImageFont.load_default(14)
    margin = 8
    measuring = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    _, _, right, bottom = measuring.textbbox((margin, margin), page, font, spacing=5)
    image = Image.new("RGB", (int(right) + margin, int(bottom) + margin), "white")
    ImageDraw.Draw(image).text((margin, margin), page, fill="black", font=font, spacing=5)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255  # [H, W, 3] -> [3, H, W]
