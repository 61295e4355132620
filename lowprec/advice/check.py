"""What this machine can do: printed by `python -m lowprec` and by `train.py --check`."""

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import torch

from .. import __version__
from ..kernels import cpu_step
from ..machine import device_facts, support
from ..parts.onednn import fault_line

# without which a kind of states can't be had
PACKAGE_OF_STATES = {"opt8bit": "bitsandbytes", "opt4bit": "torchao"}
DTYPES_SHOWN = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def report(start):
    """The library's version; for each device what it runs and where to start; what number formats hold.

    start(flags, reason): the lines that say how to start, of flags of `recommended_flags`.
    """
    lines = version_lines()
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        lines += ["", *device_lines(device, start)]
    if wrong := fault_line():
        lines += ["", wrong]
    return "\n".join([*lines, "", *format_lines()])


def version_lines():
    """Which lowprec this is and where it lies; and another one that is installed, where there is one."""
    here = Path(__file__).resolve().parents[1]
    lines = [f"lowprec {__version__} in {here}, with torch {torch.__version__}"]
    try:
        installed = importlib.metadata.distribution("lowprec")
    except importlib.metadata.PackageNotFoundError:
        return lines
    place = Path(installed.locate_file("lowprec")).resolve()
    if place != here and place.is_dir():
        lines.append(f"lowprec {installed.version} is installed too, in {place}; this command uses {here}")
    return lines


def device_lines(device, start):
    """What one device, 'cpu' or 'cuda', runs natively or emulates, and with which kernels."""
    kind, capability, features = device_facts(device)
    found = support(kind, capability, features)
    name = torch.cuda.get_device_name() if device == "cuda" else kind
    lines = [f"{device}: {name}"]
    for ability, (here, why) in found.items():
        lines.append(f"  {ability:9} {here:9} {why}{missing_package(ability)}")
    lines.append(f"  {kernel_line(device)}")
    lines += [f"  {line}" for line in start(*recommended_flags(found))]
    return lines


def recommended_flags(table):
    """(flags, reason) to start with on a machine whose `support` table this is."""
    if table["bf16"][0] == "native":
        short = "when memory is short, --pure_bf16 --stochastic halves weights, gradients and states"
        equal = "equal to fp32 within small margins (EXPERIMENTS.md)"
        return "--bf16", f"fp32 weights, bf16 matmuls: {equal}; {short}"
    if table["fp16"][0] == "native":
        return "--fp16", "fp16 tensor cores without bf16: dynamic loss scaling is on"
    slow = "this machine has no fast 16-bit arithmetic: plain fp32 is fastest"
    return "", f"{slow}; --pure_bf16 --stochastic still halves the memory"


def missing_package(ability):
    """What a line of `device_lines` adds where a package is not installed."""
    package = PACKAGE_OF_STATES.get(ability)
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"; not installed: pip install {package}"


def kernel_line(device):
    """Who makes an optimiser step on a device: 'cpu' or 'cuda'."""
    if device == "cuda":
        return "kernels: Triton, where it can be imported; else torch.compile"
    if cpu_step.library() is not None:
        return "kernels: the hand-written step of AdamW, SGD and Lion (AVX2 and GCC); else torch.compile"
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "kernels: torch.compile; the hand-written step needs AVX2 and GCC"
    return "kernels: none, there is no C++ compiler: the same results by plain torch, slower; install g++"


def format_lines():
    """What floating-point formats can hold. `digits` are decimal: -log10 of half the gap above 1."""
    lines = ["format         bits         largest  smallest normal  next after 1  digits"]
    for dtype in DTYPES_SHOWN:
        facts = torch.finfo(dtype)
        name = str(dtype).removeprefix("torch.")
        digits = -torch.tensor(facts.eps / 2).log10().item()
        lines.append(
            f"{name:13}  {facts.bits:4}  {facts.max:14.9g}  {facts.smallest_normal:15.9g}  "
            f"{1 + facts.eps:12.9g}  {digits:6.1f}"
        )
    return lines
