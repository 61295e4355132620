"""The net that is asked about: a module, a file's function, a config of transformers or diffusers, or a
number of parameters.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import Refused, in_one_line
from ..machine import quiet_import

# what the name of a class says of its kind, as lowprec.evidence calls it. Capitals count: a ConditionalVAE
# is no DiT
KIND_OF_CLASS = {
    "U_?[Nn]et|UNET|^unet": "U-Net",
    "D[iI]T(?![a-z])|Dit(?![a-z])|Transformer[23]D": "DiT",
    "CausalLM|GPT|Gpt|Llama|Gemma": "GPT",
    "Res_?[Nn]et|^resnet": "ResNet",
    "V[iI]T(?![a-z])|Vit(?![a-z])|VisionTransformer": "ViT",
    "Auto_?[Ee]ncoder": "autoencoder",
}

USUAL_IMAGE_SIZE = 224  # of nets of transformers that take any
# what a config calls numbers of parts, which are built one by one
COUNT_OF_PARTS = re.compile(r".*(layers?|layers_per_block|experts|blocks|depths?)")
MOST_PARTS = 10_000


class Subject(NamedTuple):
    """loss(model, n): the loss, a scalar, of the callable `model` on n examples that it makes itself; None
    where `no_loss` says why the net can't be called. kind: of net, or None where it is not known. average:
    whether it is trained with a moving average of its weights.
    """

    name: str
    net: nn.Module
    loss: Callable | None
    no_loss: str
    kind: str | None
    average: bool = True

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.net.parameters() if p.requires_grad)


def kind_of(net: nn.Module) -> str | None:
    """The kind of a net by the name of its class."""
    for pattern, kind in KIND_OF_CLASS.items():
        if re.search(pattern, type(net).__name__):
            return kind
    return None


# ---- A module ----------------------------------------------------------------------------------------------


def of_module(net: nn.Module, loss=None, image_size=None, seq=None) -> Subject:
    """A net of one's own. Without a `loss`, image_size (pixels) or seq (tokens) say what it is called with:
    images of as many channels as its first convolution takes, or token numbers. Raises Refused for one of
    these beside a loss.
    """
    if loss is not None and (image_size or seq):
        given = "--image_size" if image_size else "--seq"
        raise Refused(f"{given} says what a net is called with, and this one brings its loss: drop it")
    why = ""
    if loss is None and image_size:
        loss = _image_loss(net, image_size)
    elif loss is None and seq:
        loss = _token_loss(seq)
    elif loss is None:
        why = "nothing says what the net is called with: give --image_size, --seq, or a loss (docs/advise.md)"
    return Subject(type(net).__name__, net, loss, why, kind_of(net))


def _image_loss(net, image_size):
    channels = 3
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            channels = module.in_channels
            break

    def loss(model, n):
        return mean_square(model(torch.randn(n, channels, image_size, image_size)))

    return loss


def _token_loss(seq):
    def loss(model, n):
        return mean_square(model(torch.zeros(n, seq, dtype=torch.long)))

    return loss


def mean_square(out: Any) -> torch.Tensor:
    """A loss of any output: the mean square of its first floating tensor."""
    leaves = tree_leaves(out)
    if not any(map(torch.is_tensor, leaves)) and hasattr(out, "__dict__"):  # an object that holds tensors
        leaves = tree_leaves(list(vars(out).values()))
    for leaf in leaves:
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            return leaf.float().square().mean()
    raise Refused("the net returns no floating tensor")


# ---- A number ----------------------------------------------------------------------------------------------


class _Matrices(nn.Module):
    """So many parameters, in LAYERS layers of one matrix each: several GPUs have a layer or two whole."""

    LAYERS, UNITS = 32, 4096

    def __init__(self, count):
        super().__init__()
        rows = count // (self.LAYERS * self.UNITS) // 16 * 16  # FP8 takes multiples of 16
        rest = count - rows * self.LAYERS * self.UNITS
        self.layers = nn.ModuleList()
        if rows:
            for _ in range(self.LAYERS):
                self.layers.append(nn.Linear(self.UNITS, rows, bias=False, device="meta"))
        if rest:
            self.rest = nn.Parameter(torch.empty(rest, device="meta"))


def of_count(count: float) -> Subject:
    """A net of which the number of parameters alone is known."""
    if not 1 <= count < 1e13:
        raise Refused(f"--params {count:g}: write how many parameters the net has, as in 7e9 or 7B")
    why = "activations are left out: a number of parameters can't be called"
    net = _Matrices(int(count))
    return Subject("a net of which the size alone is known", net, None, why, None, average=False)


# ---- A file ------------------------------------------------------------------------------------------------


def of_file(spec: str, image_size=None, seq=None) -> Subject:
    """FILE.py:FUNCTION, which returns the net, or (net, loss). The file is run. Raises Refused."""
    file, _, function = spec.rpartition(":")
    build = getattr(run_file(file, [function], "--net FILE.py:FUNCTION"), function)
    with in_one_line(f"--net {spec}: {function}() raised"):
        built = build()
    net, loss = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(net, nn.Module):
        raise Refused(f"--net {spec}: {function}() returns no torch.nn.Module")
    return of_module(net, loss, image_size, seq)


def run_file(file: str, functions: Iterable[str], form: str) -> types.ModuleType:
    """FILE.py as a module with all these functions. form: how it is to be named. Raises Refused where it
    lacks one or can't be run.
    """
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise Refused(f"{file}: write {form} of a file that there is")
    loader = SourceFileLoader(f"advised_{path.stem}", str(path))
    module = types.ModuleType(loader.name)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.resolve().parent))  # what it imports from beside it
    try:
        with in_one_line(f"{path}:"):
            loader.exec_module(module)
    finally:
        sys.path.pop(0)
    for name in functions:
        if not callable(getattr(module, name, None)):
            raise Refused(f"{path} has no function {name}; it is asked for {', '.join(functions)}")
    return module


# ---- A config ----------------------------------------------------------------------------------------------


def of_config(file: str, seq=None) -> Subject:
    """A config.json of transformers or diffusers, or its folder, built on the meta device. Raises Refused."""
    path = Path(file)
    text = (path / "config.json" if path.is_dir() else path).read_bytes()
    with in_one_line(f"--config {file}:"):
        config = json.loads(text)
        _check_counts(config)
        if not {"_class_name", "model_type"} & config.keys():
            raise Refused(f"{file} has neither model_type (transformers) nor _class_name (diffusers)")
        if "_class_name" in config:
            return _of_diffusers(config)
        return _of_transformers(config, seq)


def _check_counts(tree, name=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check_counts(value, key)
    elif isinstance(tree, list):
        for value in tree:
            _check_counts(value, name)
    elif isinstance(tree, int | float) and tree > MOST_PARTS and COUNT_OF_PARTS.fullmatch(name):
        raise ValueError(f"{name} is {tree:,}: at most {MOST_PARTS:,} can be built")


def _of_diffusers(config):
    diffusers = quiet_import("diffusers", "--config")
    name = config["_class_name"]
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise Refused(f"--config: diffusers has no net {name}")
    with torch.device("meta"):
        net = kind.from_config(config)
    c = net.config

    def loss(model, n):
        sample = torch.randn(n, c.in_channels, c.sample_size, c.sample_size)
        words = {"timestep": torch.zeros(n, dtype=torch.long)}
        if name == "UNet2DConditionModel":
            words["encoder_hidden_states"] = torch.randn(n, 77, c.cross_attention_dim)
        if name == "DiTTransformer2DModel":
            words["class_labels"] = torch.zeros(n, dtype=torch.long)
        return mean_square(model(sample, **words, return_dict=False))

    known = name in ("UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel")
    why = "" if known else f"activations are left out: what {name} is called with is not known here"
    return Subject(name, net, loss if known else None, why, kind_of(net))


def _of_transformers(config, seq):
    transformers = quiet_import("transformers", "--config")
    settings = transformers.AutoConfig.for_model(**config)
    named = next(iter(config.get("architectures") or ()), None)
    kind = getattr(transformers, named) if named else None
    with torch.device("meta"):
        net = kind(settings) if kind else _largest_of(transformers, settings)
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if isinstance(stored, torch.dtype):  # what a frozen base is held in
        for p in net.parameters():
            p.data = p.data.to(stored)
    name, takes = type(net).__name__, net.main_input_name
    if seq and takes != "input_ids":
        raise Refused(f"--seq {seq} changes nothing: {name} takes {takes}, no tokens")
    what, loss, why = "", None, ""
    if takes == "pixel_values":
        what, loss = _of_images(settings)
    elif takes == "input_ids":
        what, loss = _of_tokens(net, settings, seq)
    else:
        why = f"activations are left out: {name} takes {takes}, of which no example is made here"
    return Subject(f"{name}{what}", net, loss, why, kind_of(net), average=False)


def _largest_of(transformers, settings):
    """The net of a config that names none: of those that transformers builds the one with most parameters.
    The causal language model of an encoder and a decoder is its decoder alone.
    """
    built = []
    for task in ("ForCausalLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForImageTextToText"):
        with suppress(ValueError, AttributeError):  # it has no such net
            kind = getattr(transformers, f"AutoModel{task}")
            built.append(kind.from_config(settings, trust_remote_code=False))
    built.append(transformers.AutoModel.from_config(settings, trust_remote_code=False))
    return max(built, key=lambda net: sum(p.numel() for p in net.parameters()))


def _of_images(settings):
    """(", images of ...", loss) of a net of transformers."""
    size = getattr(settings, "image_size", None) or USUAL_IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)

    def loss(model, n):
        images = torch.randn(n, getattr(settings, "num_channels", 3), height, width)
        return mean_square(model(pixel_values=images))

    return f", images of {height} x {width}", loss


def _of_tokens(net, settings, seq):
    """(", ... tokens", loss) of a net of transformers. seq: how many, None: as many as it takes."""
    longest = getattr(settings, "max_position_embeddings", None)  # some nets have no limit
    if longest and seq and seq > longest:
        raise Refused(f"--seq {seq}: this net has positions for {longest} tokens")
    seq = seq or min(longest or 2048, 2048)

    def loss(model, n):
        tokens = torch.zeros(n, seq, dtype=torch.long)
        if "labels" in inspect.signature(net.forward).parameters and net.can_generate():
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return mean_square(model(input_ids=tokens))

    return f", {seq} tokens", loss
