"""What a machine can do: optional packages, facts of its devices, what runs natively.

    print(support(*device_facts("cpu")))        # {'fp32': ('native', ...), 'bf16': ('emulated', ...), ...}
"""

import functools
import importlib
import logging
import os
import sys
import warnings
from contextlib import contextmanager

import torch

from .errors import Refused, first_line

# ---- Optional packages -------------------------------------------------------------------------------------


def try_import(name):
    """(module, None), or (None, why it can't be imported). Silences what libraries say about parts that this
    machine lacks.
    """
    if sys.modules.get(name) is not None:  # formats ask at each step
        return sys.modules[name], None
    for library in ("torchao", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    quiet = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), None
    except Exception as error:  # a library that finds no CUDA raises what it likes
        return None, first_line(error)
    except SystemExit as error:
        return None, f"it calls sys.exit({error.code!r})"
    finally:
        logging.disable(quiet)


# what MONAI loads wherever it finds it, and no net here needs: it takes longer to load than MONAI itself
BESIDE_MONAI = (
    *("scipy", "sklearn", "pandas", "matplotlib", "torchvision", "transformers"),
    *("huggingface_hub", "requests", "nibabel"),
)


@contextmanager
def monai_alone():
    """Within it, imports of BESIDE_MONAI that have not been loaded yet fail, as if they were not installed.

    What MONAI did not find then it never does: a task of a file that takes such parts of it imports them at
    its top, which is read before anything here imports MONAI.
    """
    absent = [name for name in BESIDE_MONAI if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def quiet_libraries():
    """No messages of libraries about things that this machine does not have."""
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes|monai")
    for name in ("torch.utils.cpp_extension", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_import(name, need, package=None):
    """The module `name`; raises Refused, which says that `need` (a flag, say) needs the package and how to
    install it.
    """
    module, error = try_import(name)
    if module is None:
        package = package or name.partition(".")[0]
        missing = f"{need} needs the package {package}, which can't be imported ({error})"
        raise Refused(f"{missing}: pip install {package}")
    return module


# ---- Facts -------------------------------------------------------------------------------------------------


def cpu_threads():
    """How many cores this process may use: what a run of two processes has to share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_features():
    """Instruction-set names of this CPU ('avx512_bf16', 'amx_bf16', ...), from the kernel where it tells,
    else from torch.
    """
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    probes = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_fp16": "_is_amx_fp16_supported",
    }
    return {name for name, probe in probes.items() if getattr(torch.cpu, probe, bool)()}


def device_facts(device):
    """(kind, capability, features) of a device: ('cuda', (9, 0), set()), ('cpu', None, {'avx512_bf16'}),
    ('rocm', None, set()).
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if torch.version.hip:
            return "rocm", None, set()
        return "cuda", torch.cuda.get_device_capability(device), set()
    features = cpu_features() if kind == "cpu" else set()
    return kind, None, features


def fp8_cores(device):
    """Whether a device has FP8 tensor cores: an NVIDIA GPU of compute capability 8.9 or later."""
    return support(*device_facts(device))["fp8"][0] == "native"


# the functions that torch takes from the CPU's vector library
VECTOR_MATH = (
    *(torch.sqrt, torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10),
    *(torch.sin, torch.cos, torch.tan, torch.tanh, torch.atan),
    *(torch.erf, torch.erfc, torch.erfinv, torch.lgamma),
)


@functools.cache
def settle_vector_math():
    """Call each function of a CPU's vector library once in this process, on one thread.

    The library (oneMKL) chooses a kernel at the first call. Where several threads make that call together,
    one of them can compute its share in low accuracy, thousands of ulp off (pytorch issue 188792, on Xeons
    with AVX-512): a run would differ from its repetition.
    """
    for dtype in (torch.float32, torch.float64):
        few = torch.full((16,), 0.5, dtype=dtype, device="cpu")  # too few values to be shared among threads
        for function in VECTOR_MATH:
            function(few)


@contextmanager
def exact_math(tf32=False):
    """Products and convolutions of fp32 tensors in fp32, or with `tf32` in TF32; on leaving, torch's settings
    are as they were.

    They are settings of the whole process, and torch's defaults differ: cuDNN convolves fp32 tensors in TF32
    unless told otherwise. Since torch 2.9 each backend has one of its own beside the two common ones, and
    reading a common one raises while they disagree. torch.compile reads them, so all are set.
    """
    backends = torch.backends
    with_tf32 = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    without_tf32 = [backends.mkldnn.conv]
    common_before = _common_precision()
    before = {backend: backend.fp32_precision for backend in with_tf32 + without_tf32}
    _set_common_precision("high" if tf32 else "highest", tf32)
    for backend in with_tf32:
        backend.fp32_precision = "tf32" if tf32 else "ieee"
    for backend in without_tf32:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        _set_common_precision(*common_before)
        for backend, precision in before.items():
            backend.fp32_precision = precision


def _common_precision():
    """(of products, of cuDNN's convolutions); None where the settings of the backends disagree."""
    found = []
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    return found


def _set_common_precision(products, convolutions):
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions


# ---- What runs natively ------------------------------------------------------------------------------------


def support(kind, capability=None, features=frozenset()):
    """For each precision, how a machine runs it: {'bf16': ('native' | 'emulated' | 'no', reason), ...}.

    A pure function of the facts, so that the tables of machines that are not at hand can be tested. NVIDIA:
    compute capability 8.0 for bf16 and TF32, 7.0 for fp16, 8.9 for fp8. CPUs: x86 avx512_bf16 or amx_bf16,
    Arm bf16.
    """
    gpus = {"cuda": _support_by_cuda, "rocm": _support_by_rocm, "mps": _support_by_mps}
    table = gpus[kind](capability) if kind in gpus else _support_by_cpu(features)
    return {"fp32": ("native", "every machine"), **table}


BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # one suffices; the last is Arm's
NO_FP4 = "operands are rounded and multiplied in fp32: the numbers of FP4, slower than bf16"


def _support_by_cuda(capability):
    name = f"compute capability {capability[0]}.{capability[1]}"

    def since(least, otherwise):
        return ("native", name) if capability >= least else otherwise

    late = f"{name}; bf16 arithmetic starts at 8.0"
    otherwise_bf16 = ("no", f"{late}, its emulation at 7.0: use fp32")
    if capability >= (7, 0):
        otherwise_bf16 = ("emulated", f"{late}: runs without speed-up, prefer --fp16")
    no_fp8 = f"{name}; fp8 tensor cores start at 8.9: the same numbers, slower than fp32"
    return {
        "tf32": since((8, 0), ("no", f"{name}; TF32 tensor cores start at 8.0")),
        "bf16": since((8, 0), otherwise_bf16),
        "fp16": since((7, 0), ("emulated", f"{name}; fp16 tensor cores start at 7.0: prefer fp32")),
        "fp8": since((8, 9), ("emulated", no_fp8)),
        "fp4": since((10, 0), ("emulated", f"{name}; fp4 tensor cores start at 10.0: {NO_FP4}")),
        "opt8bit": ("native", "bitsandbytes CUDA kernels"),
        "opt4bit": ("native", "torchao, by torch.compile"),
        "sparse24": since((8, 0), ("no", f"{name}; sparse tensor cores start at 8.0")),
    }


def _support_by_rocm(capability):
    cores = ("native", "AMD matrix cores, MI200 and later")
    return {
        "tf32": ("no", "a mode of NVIDIA tensor cores"),
        "bf16": cores,
        "fp16": cores,
        "fp8": ("no", "not measured on AMD here"),
        "fp4": ("emulated", NO_FP4),
        "opt8bit": ("no", "bitsandbytes on ROCm is not measured here"),
        "opt4bit": ("no", "torchao on ROCm is not measured here"),
        "sparse24": ("no", "NVIDIA sparse tensor cores only"),
    }


def _support_by_mps(capability):
    nvidia = ("no", "needs an NVIDIA GPU")
    return {
        "tf32": ("no", "a mode of NVIDIA tensor cores"),
        "bf16": ("emulated", "Apple GPU: correct, no speed-up promised"),
        "fp16": ("no", "no loss scaler for MPS in torch: use --bf16 or fp32"),
        "fp8": nvidia,
        "fp4": ("emulated", NO_FP4),
        "opt8bit": ("no", "bitsandbytes has no MPS kernels"),
        "opt4bit": ("no", "torchao on MPS is not measured here"),
        "sparse24": nvidia,
    }


def _support_by_cpu(features):
    bf16_features = " ".join(sorted(features & BF16_FEATURES))
    fp16_features = " ".join(sorted(features & {"avx512_fp16", "amx_fp16"}))
    in_fp32 = "products are taken in fp32 and rounded: right, and not faster than fp32"
    bf16 = ("emulated", f"this CPU has neither avx512_bf16 nor amx_bf16, so {in_fp32}")
    fp16_reason = f"this CPU has no arithmetic of 16 bits, so {in_fp32}"
    if bf16_features:
        bf16 = ("native", bf16_features)
        fp16_reason = "no avx512_fp16 or amx_fp16: 30 to 60 times slower than fp32"
    if fp16_features:
        # measured on a Xeon with avx512_fp16, torch 2.14: Linear layers at the speed of fp32 and better
        fp16_reason = f"{fp16_features}: a convolution's gradients take 50 times as long as in fp32"
    no_fp8 = "no FP8 arithmetic in CPUs: the same numbers as on a GPU, slower than fp32"
    return {
        "tf32": ("no", "a mode of NVIDIA tensor cores; use fp32 or bf16"),
        "bf16": bf16,
        "fp16": ("emulated", f"{fp16_reason}; use --bf16"),
        "fp8": ("emulated", no_fp8),
        "fp4": ("emulated", NO_FP4),
        "opt8bit": ("native", "bitsandbytes CPU kernels"),
        "opt4bit": ("native", "torchao, by torch.compile"),
        "sparse24": ("no", "needs compute capability 8.0"),
    }
