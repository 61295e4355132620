"""What each recipe was measured to cost in held-out loss: the rows of evidence.json, beside this file.

    all_rows()                                        every comparison with fp32
    nearest("pure_bf16+stochastic", kind="GPT")       the comparison that is most like a training
    nearest_speed("H100", "DiT", 130_000_000)         how fast recipes were on a machine
    others()                                          what other people found

experiments/report.py writes the file from the records of experiments/. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

EVIDENCE_FILE = Path(__file__).with_name("evidence.json")
LEAST_PAIRS = 3  # pairs; a comparison of fewer says nothing, and nearest() passes over it
FP32 = "fp32"  # the key of the recipe without any flag

# flags that make a recipe, in the order of its key: their defaults. Which program multiplies in FP8 changes
# no recipe.
DEFAULT_OF_FLAG: dict[str, Any] = {
    "bf16": False,
    "fp16": False,
    "pure_bf16": False,
    "stochastic": False,
    "kahan": False,
    "master": "none",
    "finish": None,
    "opt8bit": False,
    "opt4bit": False,
    "fp8": False,
    "fp8_format": "hybrid",
    "fp8_recipe": "tensorwise",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "fp4": "none",
    "fp4_hadamard": 16,
    "fp4_grads": "stochastic",
    "fp4_weights": "2d",
    "fp4_keep": "none",
    "fp4_finish": 0.0,
    "sparse24": "none",
    "set": (),
}

KIND_OF_MODEL = {  # --model: what a row calls the net
    "unet": "U-Net",
    "dit": "DiT",
    "gpt": "GPT",
    "bdh": "BDH",
    "moe": "mixture of experts",
    "cnn": "CNN",
    "resnet18": "ResNet",
    "vit": "ViT",
    "kl": "autoencoder",
    "steve": "STEVE",
    "slotcontrast": "SlotContrast",
}


class EvidenceRow(NamedTuple):
    """One recipe against fp32 on one net. change, low and high: of the held-out loss, in percent of fp32's,
    with the ends of the 95 % interval; above 0 is worse.
    """

    kind: str  # of net: "U-Net", "DiT", "GPT" …
    task: str  # of train.py: "rflow", "language" …
    data: str
    regime: str  # "from scratch" or "finetune"
    recipe: str  # as recipe_key() writes it
    optimizer: str
    parameters: int  # 0: not known
    steps: int
    batch: int
    lr: float
    change: float
    low: float
    high: float
    pairs: int
    weights: str  # "average" or "last": those that were scored
    experiment: str  # number of the folder in experiments/

    @property
    def flags(self) -> str:
        """What train.py is told: "--pure_bf16 --stochastic"."""
        words = flags_of_recipe(self.recipe)
        if self.optimizer != "adamw":
            words += ["--optimizer", self.optimizer]
        return " ".join(words)


class Speed(NamedTuple):
    """How many times as fast as the recipe `against` others trained one net on one machine."""

    hardware: str  # as advice.machines.Machine has it
    kind: str
    parameters: int
    net: str  # "unet:small:64:8": model, size, side of the image, examples a step
    record: str  # of experiments/bench
    against: str  # the recipe that has speed 1: "fp32", "fp32 with TF32"
    how: str  # "compiled", "not compiled"
    ratios: dict[str, float]  # by recipe


class Other(NamedTuple):
    """What other people found of a recipe, by their own measure."""

    recipe: str
    said: str
    source: str


class NearestRow(NamedTuple):
    """A row, and in words how it differs from what was asked for."""

    row: EvidenceRow
    differs: tuple[str, ...]


@functools.cache
def _read_file() -> dict[str, Any]:
    return json.loads(EVIDENCE_FILE.read_text(encoding="utf-8"))


def all_rows() -> list[EvidenceRow]:
    """Every comparison with fp32."""
    return [EvidenceRow(*values) for values in _read_file()["rows"]]


def others() -> list[Other]:
    """What other people found, not checked here."""
    return [Other(*values) for values in _read_file()["others"]]


def nearest_speed(hardware: str, kind: str | None, parameters: int) -> Speed | None:
    """The record on this hardware of the net that is most like one asked about: of its kind before others,
    then nearest in size. None without any.
    """
    found = [row for row in map(Speed._make, _read_file()["speeds"]) if row.hardware == hardware]

    def distance(row):
        return row.kind != kind, _size_gap(row.parameters, parameters)

    return min(found, key=distance, default=None)


def miniatures(recipe: str) -> list[tuple[float, float]]:
    """[(tried, whole)] of a recipe: its change in percent with a tenth of the steps, and with all of them."""
    return [(tried, whole) for own, tried, whole, _ in _read_file()["miniatures"] if own == recipe]


def caution() -> str:
    """How far the rows reach, in two sentences."""
    return _read_file()["caution"]


def recipe_key(flags: Mapping[str, Any]) -> str:
    """"pure_bf16+stochastic+opt8bit" of {"pure_bf16": True, …}; values that are defaults, and flags that are
    not of DEFAULT_OF_FLAG, may stand there too. "fp32" for none. A --set counts by its sites, in alphabetical
    order.
    """
    parts: list[str] = []
    for name, default in DEFAULT_OF_FLAG.items():
        value = flags.get(name, default)
        if name == "set":
            parts += sorted(value or ())
        elif value is True:
            parts.append(name)
        elif value != default:
            parts.append(f"{name}={value}")
    return "+".join(parts) or FP32


def flags_of_recipe(recipe: str) -> list[str]:
    """The words of train.py that a key stands for: ["--pure_bf16", "--set", "ema=bf16"]."""
    parts: list[str] = []
    for part in recipe.split("+"):
        if parts and part not in DEFAULT_OF_FLAG and "=" not in part:
            parts[-1] += f"+{part}"  # a site whose value is a list: islands=norm+embed
        elif part != FP32:
            parts.append(part)
    words: list[str] = []
    for part in parts:
        name, _, value = part.partition("=")
        if name not in DEFAULT_OF_FLAG:
            words += ["--set", part]
        else:
            words.append(f"--{name}")
            words += [value] if value else []
    return words


def typed(flags: Mapping[str, Any]) -> str:
    """Flags of train.py, or arguments of `recipe`, as a user types them: dict(pure_bf16=True, master="split")
    -> '--pure_bf16 --master split'.
    """
    words = []
    for name, value in flags.items():
        flag = "--set" if name == "sites" else f"--{name}"
        for one in value if isinstance(value, list) else [value]:
            words.append(flag if one is True else f"{flag} {one}")
    return " ".join(words)


def nearest(
    recipe: str,
    kind: str | None = None,
    regime: str | None = None,
    lr: float | None = None,
    parameters: int | None = None,
    *,
    optimizer: str = "adamw",
    weights: str | None = None,
) -> NearestRow | None:
    """The row of this recipe and optimiser that is most like a training, or None without any.

    Rows differ first by the regime, then by the kind of net, then by the weights that are scored, then by how
    many times the learning rate and the parameters are those asked for. What is None counts nowhere.
    """
    same_recipe = [r for r in all_rows() if (r.recipe, r.optimizer) == (recipe, optimizer)]
    found = [r for r in same_recipe if r.pairs >= LEAST_PAIRS]
    if not found:
        return None
    asked = {"regime": regime, "kind": kind, "weights": weights}

    def distance(row):
        unlike = [wanted not in (None, getattr(row, name)) for name, wanted in asked.items()]
        return [*unlike, _size_gap(row.lr, lr) + _size_gap(row.parameters, parameters), -row.pairs]

    row = min(found, key=distance)
    differs = []
    for name, wanted in asked.items():
        own = getattr(row, name)
        if wanted not in (None, own):
            differs.append(f"{name} {own}, not {wanted}")
    if _size_gap(row.lr, lr) > math.log(1.01):
        differs.append(f"lr {row.lr:g}, not {lr:g}")
    if parameters and row.parameters and _size_gap(row.parameters, parameters) > math.log(1.1):
        differs.append(f"{short_count(row.parameters)} parameters, not {short_count(parameters)}")
    return NearestRow(row, tuple(differs))


def _size_gap(own: float, wanted: float | None) -> float:
    """How far two sizes are apart: the logarithm of their ratio. 0 where one is not known."""
    if not own or not wanted:
        return 0.0
    return abs(math.log(own / wanted))


def short_count(count: float) -> str:
    """'0.16 M' of 164,689."""
    for name, unit in (("B", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e6:.2f} M"


def row_in_words(row: EvidenceRow) -> str:
    """In words: +0.06 % [-0.18, +0.29] from fp32's on a DiT of 4.17 M parameters, 6 pairs (037)"""
    article = "an" if row.kind[0] in "aeio" else "a"
    size = ""
    if row.parameters:
        size = f" of {short_count(row.parameters)} parameters"
    change = f"{row.change:+.2f} % [{row.low:+.2f}, {row.high:+.2f}]"
    return f"{change} from fp32's on {article} {row.kind}{size}, {row.pairs} pairs ({row.experiment})"
