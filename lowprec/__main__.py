"""The library's own command.

    python -m lowprec                        its version, what this machine can do, which kernels it would use
    python -m lowprec compare BEFORE AFTER   two checkpoints of any program: what did training move?

Exit status: 0, 1 for findings of `compare`, 2 for bad input, which ends in one line.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path

import torch

from . import __version__
from .kernels import cpu_step
from .layers.convolutions import fault_line
from .machine import device_facts, recommended_flags, support

# the flags that `recommended_flags` gives -> the same as arguments of the library
START = {
    "--bf16": "recipe(bf16=True); short of memory: recipe(pure_bf16=True, stochastic=True)",
    "--fp16": "recipe(fp16=True)",
    "": "recipe(), which is fp32; short of memory: recipe(pure_bf16=True, stochastic=True)",
}


def version_lines():
    """Which lowprec this is and where it lies; and another one that is installed, where there is one."""
    here = Path(__file__).resolve().parent
    lines = [f"lowprec {__version__} in {here}, with torch {torch.__version__}"]
    try:
        installed = importlib.metadata.distribution("lowprec")
    except importlib.metadata.PackageNotFoundError:
        return lines
    place = Path(installed.locate_file("lowprec")).resolve()
    if place != here and place.is_dir():
        lines.append(f"lowprec {installed.version} is installed too, in {place}; this command uses {here}")
    return lines


def kernel_line(device):
    """Who makes an optimiser step on a device: 'cpu' or 'cuda'."""
    if device == "cuda":
        return "kernels: Triton, where it can be imported; else torch.compile"
    if cpu_step.library() is not None:
        return "kernels: the hand-written step of AdamW, SGD and Lion (AVX-512 and GCC); else torch.compile"
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "kernels: torch.compile; the hand-written step needs AVX-512 and GCC"
    return "kernels: none, there is no C++ compiler: the same results by plain torch, slower; install g++"


PACKAGES = {"opt8bit": "bitsandbytes", "opt4bit": "torchao"}  # without which a kind of states can't be had


def missing(arithmetic):
    """What `report` adds where a package is not installed."""
    package = PACKAGES.get(arithmetic)
    if package is None or importlib.util.find_spec(package) is not None:
        return ""
    return f"; not installed: pip install {package}"


def report():
    """What `python -m lowprec` prints."""
    lines = version_lines()
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        kind, capability, features = device_facts(device)
        name = torch.cuda.get_device_name() if device == "cuda" else kind
        found = support(kind, capability, features)
        lines += ["", f"{device}: {name}"]
        for arithmetic, (here, why) in found.items():
            lines.append(f"  {arithmetic:9} {here:9} {why}{missing(arithmetic)}")
        lines.append(f"  {kernel_line(device)}")
        flags, _ = recommended_flags(found)
        lines.append(f"  start with {START[flags]}")
    if wrong := fault_line():
        lines += ["", wrong]
    return "\n".join(lines)


def main(argv=None):
    """The exit status of `python -m lowprec` with these words."""
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    if not argv:
        print(report())
        return 0
    if argv[0] == "compare":
        from .watch import compare

        return compare.main(argv[1:])
    print(f"lowprec: unknown command {argv[0]!r}; there is: compare BEFORE AFTER", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
