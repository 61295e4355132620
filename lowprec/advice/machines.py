"""The machine that is asked about: this one, a GPU by its name, or so much memory.

    this_machine()                this machine
    gpu_by_name("RTX 4090")       one of GPUS
    bytes_of_text("24GiB")        bytes
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from ..errors import Refused
from ..machine import device_facts, support

GIB = 2**30


class Machine(NamedTuple):
    """name: as a person says it; memory: bytes of one GPU, or of the machine; support: see machine.support.
    margin: share of the memory that is left free, for what fragments it, and for CUDA's own. hardware: what
    records of speeds call it, "" where that is not known.
    """

    name: str
    memory: int
    support: dict[str, tuple[str, str]]
    is_cpu: bool
    margin: float = 0.1
    hardware: str = ""


MARGIN_OF_CPU_PEAK = 0.1  # how far a peak may lie above what is told, see docs/advise.md

# name -> (GiB, compute capability), as NVIDIA's data sheets have them
GPUS = {
    "RTX 2060": (6, (7, 5)),
    "RTX 2080 Ti": (11, (7, 5)),
    "RTX 3060": (12, (8, 6)),
    "RTX 3080": (10, (8, 6)),
    "RTX 3090": (24, (8, 6)),
    "RTX 4060": (8, (8, 9)),
    "RTX 4060 Ti 16GB": (16, (8, 9)),
    "RTX 4070": (12, (8, 9)),
    "RTX 4080": (16, (8, 9)),
    "RTX 4090": (24, (8, 9)),
    "RTX 5070": (12, (12, 0)),
    "RTX 5080": (16, (12, 0)),
    "RTX 5090": (32, (12, 0)),
    "RTX A6000": (48, (8, 6)),
    "RTX 6000 Ada": (48, (8, 9)),
    "GTX 1080 Ti": (11, (6, 1)),
    "P100": (16, (6, 0)),
    "T4": (16, (7, 5)),
    "V100 16GB": (16, (7, 0)),
    "V100": (32, (7, 0)),
    "A10": (24, (8, 6)),
    "A30": (24, (8, 0)),
    "A40": (48, (8, 6)),
    "A100 40GB": (40, (8, 0)),
    "A100": (80, (8, 0)),
    "L4": (24, (8, 9)),
    "L40S": (48, (8, 9)),
    "H100": (80, (9, 0)),
    "H200": (141, (9, 0)),
    "B200": (180, (10, 0)),
}


def this_machine() -> Machine:
    """This machine: its first GPU, or its CPU and the memory that this process may use."""
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        name = torch.cuda.get_device_name(0)
        return Machine(name, memory, support(*device_facts("cuda")), False, hardware=kind_of_gpu(name))
    memory = _memory_of_cpu()
    name, facts = f"this machine's CPU, {_gib(memory)}", device_facts("cpu")
    return Machine(name, memory, support(*facts), True, MARGIN_OF_CPU_PEAK, kind_of_cpu(facts[2]))


def kind_of_gpu(name: str) -> str:
    """The entry of GPUS of a GPU as torch calls it ("NVIDIA H100 80GB HBM3"); its own name without any."""
    inside = [known for known in GPUS if _name_without_maker(known) in _name_without_maker(name)]
    return max(inside, key=len, default=name)


def kind_of_cpu(features: Collection[str]) -> str:
    """What decides how fast a CPU is in 16 bits."""
    found = " ".join(sorted({"avx512_bf16", "amx_bf16", "bf16"} & set(features)))
    return f"CPU with {found}" if found else "CPU without bf16 instructions"


def _memory_of_cpu():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container may have less
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(memory, int(file.read()))
    except (OSError, ValueError):
        return memory


def gpu_by_name(name: str) -> Machine:
    """The GPU of this name, whose case, blanks and maker do not matter. Raises Refused for one that GPUS does
    not have.
    """
    wanted = _name_without_maker(name)
    for known, (memory, capability) in GPUS.items():
        if _name_without_maker(known) == wanted:
            facts = support("cuda", capability)
            return Machine(f"{known}, {memory} GiB", memory * GIB, facts, False, hardware=known)
    raise Refused(
        f"--gpu {name}: not known here; give its memory, as in --memory 24GiB, or one of {', '.join(GPUS)}"
    )


def _name_without_maker(name):
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def gpu_of_memory(text: str) -> Machine:
    """A GPU of so much memory, of which nothing else is known: one that runs bf16 natively."""
    memory = bytes_of_text(text)
    return Machine(f"a GPU of {_gib(memory)}", memory, support("cuda", (8, 0)), False)


def bytes_of_text(text: str) -> int:
    """Bytes of '24GiB', '24GB' or '512MiB'. Raises Refused for another text, and for less than a MiB."""
    units = {"": 1, "m": 2**20, "mib": 2**20, "mb": 10**6, "g": GIB, "gib": GIB, "gb": 10**9, "tib": 2**40}
    found = re.fullmatch(r"([0-9.]+) *([a-z]*)", str(text).strip().lower())
    try:
        number, unit = found.groups() if found else ("", "")
        memory = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        memory = 0
    if memory < 2**20:
        raise Refused(f"--memory {text}: write a number and a unit, as in 24GiB or 512MiB")
    return memory


def _gib(memory):
    return f"{memory / GIB:.3g} GiB"


# what compiled code and its buffers add to a process once it trains, as measured
BYTES_OF_COMPILED_CODE = 50 * 2**20
# The GNU C library does not give back the last 64 MiB of memory that was freed: mallopt(3),
# M_MMAP_THRESHOLD, whose largest value is 32 MiB; M_TRIM_THRESHOLD becomes twice that.
BYTES_KEPT_BY_MALLOC = 64 * 2**20


def bytes_of_process(net: nn.Module) -> int:
    """Bytes that this process would hold beside tensors if it trained on a CPU: Python, the libraries that it
    has imported, torch's compiler, which makes the optimiser's step, and freed memory that the C library
    keeps. The net's own bytes do not count.
    """
    importlib.import_module("torch._inductor.compile_fx")
    try:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
    own = [t for t in [*net.parameters(), *net.buffers()] if t.device.type != "meta"]
    return max(0, resident - sum(t.nbytes for t in own)) + BYTES_OF_COMPILED_CODE + BYTES_KEPT_BY_MALLOC
