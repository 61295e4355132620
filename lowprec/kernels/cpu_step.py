"""The step of AdamW, SGD and Lion, the average, and the codes of moments on a CPU, each as one compiled pass
with the bits of the torch code.

    if takes(step):      # a kernels.Step
        run(step)        # in place

It is written by hand in cpu_step.cpp, for AVX-512 and for AVX2: a loop that torch.compile makes waits for
each hash of noise and at each new page of memory, and can't vectorise the reading of tables. The first call
compiles it by GCC, which takes some seconds, and keeps the result.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.autograd.graph import increment_version

from ..rounding import ALONE, way_of
from . import Operand, Step, exact_step

CPP_SOURCE = Path(__file__).with_suffix(".cpp")
CPP_HEADERS = [CPP_SOURCE.with_name(name) for name in ("cpu_vectors.h", "cpu_codes.h")]
# each operation rounds once: no product is contracted with a sum
COMPILER_FLAGS = (
    "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp -shared -fPIC".split()
)
RULE_NUMBERS = {"adamw": 0, "sgd": 1, "lion": 2, "given": 3}  # as in cpu_step.cpp
DTYPE_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}
FLOAT_DTYPES = torch.float32, torch.bfloat16
VALUES_FOR_ONE_THREAD = 1 << 15  # values below which a second thread costs more than it does


# ---- The library -------------------------------------------------------------------------------------------


class CppMoment(ctypes.Structure):
    """As in cpu_step.cpp."""

    _fields_ = [
        ("bits", ctypes.c_int32),
        ("has_sign", ctypes.c_int32),
        ("mantissa", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("chart", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
    ]


class CppStep(ctypes.Structure):
    """As in cpu_step.cpp: a Sort, and what follows it."""

    _fields_ = [
        ("rule", ctypes.c_int32),
        ("of_weight", ctypes.c_int32),
        ("of_gradient", ctypes.c_int32),
        ("of_low", ctypes.c_int32),
        ("of_moments", ctypes.c_int32 * 2),
        ("stochastic", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p),
        ("of_average", ctypes.c_int32),
        ("average_stochastic", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("floored", ctypes.c_int32),
        ("low", ctypes.c_void_p),
        ("shadow", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("average_share", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("average_key", ctypes.c_void_p),
        ("called", ctypes.c_void_p),
        ("moments", CppMoment * 2),
    ]


@functools.cache
def library():
    """The compiled cpu_step.cpp; None where the CPU has neither AVX-512 nor AVX2, or there is no GCC."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        return None
    try:
        return ctypes.CDLL(str(_compiled_library()))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled_library():
    """The path of the compiled library. Raises what `library` catches."""
    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    if b"Free Software Foundation" not in version:
        raise OSError(f"{compiler} is not GCC")
    target = subprocess.run(
        [compiler, *COMPILER_FLAGS, "-Q", "--help=target"], check=True, capture_output=True
    ).stdout
    code = b"".join(file.read_bytes() for file in (CPP_SOURCE, *CPP_HEADERS))
    name = hashlib.sha256(code + target + " ".join(COMPILER_FLAGS).encode()).hexdigest()[:20]
    path = _library_folder() / f"{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # processes that build it together do not meet
        subprocess.run(
            [compiler, *COMPILER_FLAGS, str(CPP_SOURCE), "-o", str(own)], check=True, capture_output=True
        )
        own.replace(path)
    return path


def _library_folder():
    """The folder of libraries that were compiled before: below that of torch's kernels, if one was chosen."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    own = Path(tempfile.gettempdir()) / f"lowprec_{user}"
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", own)) / "cpu_step"


ROOT_NEAREST, ROOT_OF_MKL, ROOT_CALLED = range(3)  # as in cpu_step.cpp


@functools.cache
def torch_root():
    """(kind, address): how torch.sqrt takes a root on this CPU. ROOT_NEAREST: rounded to the nearest.
    ROOT_OF_MKL: as the library MKL does on an Intel CPU with AVX-512, which rounds one in 160 to the other
    neighbour. ROOT_CALLED: in another way of MKL's, by the function at that address. None where it is none of
    these.
    """
    for kind in (ROOT_NEAREST, ROOT_OF_MKL):
        if all(torch.equal(roots(x, kind), torch.sqrt(x)) for x in _trial_values()):
            return kind, None
    address = _root_of_mkl()
    trials = _trial_values(1 << 16)
    if address and all(torch.equal(roots(x, ROOT_CALLED, address), torch.sqrt(x)) for x in trials):
        return ROOT_CALLED, address
    return None


def _root_of_mkl():
    """The address of the function of MKL that torch.sqrt calls; None where there is none."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).vmsSqrt
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


def _trial_values(size=1 << 24):
    """fp32 values, some at a time: from zero on, then those of two powers of two, or the first of them. The
    roots of all others have the same digits.
    """
    whole = dict(device="cpu", dtype=torch.int32)
    ends = torch.tensor([0x7F7FFFFF, 0x7F800000], **whole)
    yield torch.cat([torch.arange(0, 1 << 28, 257, **whole), ends]).view(torch.float32)
    for start in range(0x3F800000, 0x3F800000 + size, 1 << 20):
        yield torch.arange(start, start + min(size, 1 << 20), **whole).view(torch.float32)


def roots(x, kind, address=None):
    """The roots of fp32 x [n], as the step takes them."""
    found = torch.empty_like(x)
    places = map(ctypes.c_void_p, (address, x.data_ptr(), found.data_ptr()))
    library().roots(kind, *places, ctypes.c_int64(x.numel()))
    return found


# ---- The step ----------------------------------------------------------------------------------------------


def takes(s):
    """Whether `run` can carry out a kernels.Step."""
    if not s.compiled or s.rule is None or not fits(s.weights, s.gradients, s.way):
        return False
    for held, key in zip(s.moments, s.keys, strict=True):
        if held.keyed and not takes_operand(held.operand(key)):
            return False
    if not s.exact:
        return True
    # whether `update` has the bits of exact_step.update_moments here, for these numbers of AdamW
    return exact_step.lerp_adds(s.numbers) and torch_root() is not None and _is_exact()


def takes_operand(operand):
    """Whether a pass can read and write codes, a kernels.Operand; None: those that no kernel writes."""
    if operand is None or library() is None:
        return False
    return operand.mantissa > 0 or chart_of(operand.line) is not None


def fits(p, g, way=ALONE):
    """Whether a pass can take lists of weights p and of gradients g, each of one dtype, that are written this
    way: contiguous ones, on a CPU that has what it needs.
    """
    if not p[0].is_cpu or library() is None or way.code is None:
        return False
    return all(t.is_cpu and t.dtype in FLOAT_DTYPES and t.is_contiguous() for t in (*p, *g))


def run(s):
    """Carry out a kernels.Step, in place."""
    kind_of_root, called = torch_root() if s.exact else (ROOT_NEAREST, None)
    weights, gradients = _addresses(s.weights), _addresses(s.gradients)
    # where each tensor ends in the vector of all of them
    ends = (ctypes.c_int64 * len(s.weights))(*itertools.accumulate(t.numel() for t in s.weights))
    operands = [held.operand(key) for held, key in zip(s.moments, s.keys, strict=True)]
    step = CppStep(
        rule=RULE_NUMBERS[s.rule],
        of_weight=DTYPE_NUMBERS[s.weights[0].dtype],
        of_gradient=DTYPE_NUMBERS[s.gradients[0].dtype],
        of_low=s.way.code,
        of_moments=tuple(DTYPE_NUMBERS[operand.data.dtype] for operand in operands),
        stochastic=s.stochastic and not s.exact,  # what is exact needs no noise
        exact=s.exact,
        root=kind_of_root,
        count=len(s.weights),
        ends=ctypes.addressof(ends),
        weights=ctypes.addressof(weights),
        gradients=ctypes.addressof(gradients),
        threads=_threads(ends[-1]),
        floored=s.exact and exact_step.smallest_root_vanishes(s.numbers.beta2, s.numbers.eps),
        low=next((t.data_ptr() for t in s.low), None),
        numbers=s.row.data_ptr(),
        key=s.key.data_ptr(),
        called=called,
        moments=tuple(map(_moment, operands)),
    )
    library().update(ctypes.byref(step))
    written = [*s.weights, *s.low]
    for operand in operands:
        written += [t for t in (operand.data, operand.scales) if t is not None]
    increment_version(written)  # autograd sees no write by pointer: a backward that needs the old is an error


def ema(average, p, low, share, key, stochastic):
    """Move an average [n] towards the weights p [n] and their low part, in place, as rounding.ema_kernel."""
    weights, end = _addresses([p]), ctypes.c_int64(p.numel())
    step = CppStep(
        of_weight=DTYPE_NUMBERS[p.dtype],
        of_low=way_of(*low).code,
        count=1,
        ends=ctypes.addressof(end),
        weights=ctypes.addressof(weights),
        of_average=DTYPE_NUMBERS[average.dtype],
        average_stochastic=stochastic,
        threads=_threads(p.numel()),
        low=next((t.data_ptr() for t in low), None),
        shadow=average.data_ptr(),
        average_share=share.data_ptr(),
        average_key=key.data_ptr(),
    )
    library().ema(ctypes.byref(step))
    increment_version([average])


def write(x, held, key):
    """Write fp32 x [n] into bf16 `held` [n], stochastically by the noise of `key`."""
    places = map(ctypes.c_void_p, (held.data_ptr(), key.data_ptr()))
    n = x.numel()
    library().write_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n), *places, _threads(n))
    increment_version([held])


def _addresses(tensors):
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])


# ---- Codes -------------------------------------------------------------------------------------------------


def encode(x, operand):
    """Write fp32 x [n] into the codes and scales of a kernels.Operand, stochastically."""
    n = x.numel()
    moment = ctypes.byref(_moment(operand))
    library().encode_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n), moment, _threads(n))
    increment_version([operand.data, operand.scales])


def _moment(operand):
    """A kernels.Operand as C++ takes it: in the place of the line on which codes lie its `chart`."""
    moment = CppMoment(bits=operand.bits, has_sign=operand.signed, mantissa=operand.mantissa)
    for name in ("data", "scales", "table", "key"):
        t = getattr(operand, name)
        if t is not None:
            setattr(moment, name, t.data_ptr())
    if operand.line is not None:
        moment.chart = ctypes.addressof(chart_of(operand.line))
    return moment


@functools.lru_cache(maxsize=16)
def chart_of(line):
    """The `chart` of a line as a C array, kept for the process like the code that reads it."""
    found = chart(line)
    if found is None:
        return None
    plain = bytes(found.view(torch.uint8).tolist())
    return (ctypes.c_char * len(plain)).from_buffer_copy(plain)


def chart(line):
    """fp32 [80]: a `formats.broken_line` [S, 3] as vectors of sixteen; None if it does not fit into them.

    Slot 0 is all below the first row, slots 1 to S are the rows. Four vectors give the start of each slot,
    that of the next, its code and its rise. The last holds, in 16 bits each, the slot in which the powers of
    two from 2^-31 to 1 lie: a value goes on from there, past two rows at most.
    """
    value, first, rise = F.pad(line, (0, 0, 1, 0)).unbind(1)
    powers = 2.0 ** torch.arange(-31, 2, dtype=line.dtype, device=line.device)
    slots = torch.searchsorted(line[:, 0].contiguous(), powers, right=True)
    if len(value) > 16 or slots.diff().max() > 2 or slots[0] != (line[:, 0] <= 0).sum():
        return None
    after = F.pad(value[1:], (0, 1), value=torch.inf)
    rows = [F.pad(row, (0, 16 - len(row)), value=torch.inf) for row in (value, after, first, rise)]
    return torch.cat([*rows, slots[:32].to(torch.int16).view(torch.float32)])


def _threads(n):
    return 1 if n < VALUES_FOR_ONE_THREAD else torch.get_num_threads()


# ---- The bits of torch's AdamW -----------------------------------------------------------------------------


@functools.cache
def _is_exact():
    g, own, row = exact_step.trial_step()
    theirs = [t.clone() for t in own]
    exact_step.update_moments(g, *theirs, row, exact_step.NUMBERS_OF_TRIAL, torch.empty_like(g))
    held = []
    for t in own:
        held.append(types.SimpleNamespace(keyed=False, operand=lambda key, t=t: Operand(t)))
    key = torch.zeros(3, dtype=torch.int32)
    tensors = dict(weights=[torch.zeros_like(g)], gradients=[g], moments=held, keys=[None, None], low=[])
    how = dict(rule="adamw", exact=True, way=ALONE, stochastic=False, compiled=True)
    run(Step(**tensors, **how, numbers=exact_step.NUMBERS_OF_TRIAL, row=row, key=key))
    return all(map(torch.equal, own, theirs))
