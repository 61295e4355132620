"""The step of AdamW, SGD and Lion, the average, and the codes of moments on a CPU, each as one compiled pass
with the bits of the torch code.

    if fits([p], [g]):
        update("adamw", [p], [g], moments, low, row, key, stochastic)   # in place; row, key: of a StepTable

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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import increment_version

from ..rounding import NO_AVERAGE

CPP_SOURCE = Path(__file__).with_suffix(".cpp")
CPP_HEADERS = [CPP_SOURCE.with_name(name) for name in ("cpu_vectors.h", "cpu_codes.h")]
# each operation rounds once: no product is contracted with a sum
COMPILER_FLAGS = (
    "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp -shared -fPIC".split()
)
RULE_NUMBERS = {"adamw": 0, "sgd": 1, "lion": 2, "given": 3}  # as in cpu_step.cpp
DTYPE_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.int16: 3, torch.uint8: 4}
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


def fits(p, g, low=None):
    """Whether `update` can take lists of weights p and of gradients g, each of one dtype: contiguous ones, on
    a CPU that has what it needs; and what completes them.
    """
    if not p[0].is_cpu or library() is None:
        return False
    if low is not None and low.dtype not in DTYPE_NUMBERS:
        return False
    return all(t.is_cpu and t.dtype in FLOAT_DTYPES and t.is_contiguous() for t in (*p, *g))


def update(rule, p, g, moments, low, row, key, stochastic, average=NO_AVERAGE, exact=False, floored=False):
    """One step on weights p, their moments and their low part, in place. rule: of RULE_NUMBERS.

    p, g: lists of weights and of their gradients, whose values follow each other in all else.
    moments: of fp32 or bf16 [n], or `Codes`, whose blocks no two tensors share. row: fp32, the numbers of the
    optimiser behind WeightNumbers. key: int32, see `rounding.noise_bits`. average: a StepAverage. exact: with
    the bits of torch's lerp, addcmul and sqrt; `floored` as exact_step.smallest_root_vanishes says.
    """
    kind_of_root, called = torch_root() if exact else (ROOT_NEAREST, None)
    weights, gradients, ends = _addresses(p), _addresses(g), _ends(p)
    step = CppStep(
        rule=RULE_NUMBERS[rule],
        of_weight=_dtype_number(p[0]),
        of_gradient=_dtype_number(g[0]),
        of_low=_dtype_number(low),
        of_moments=tuple(map(_dtype_number, moments)),
        stochastic=stochastic and not exact,  # what is exact needs no noise
        exact=exact,
        root=kind_of_root,
        count=len(p),
        ends=ctypes.addressof(ends),
        weights=ctypes.addressof(weights),
        gradients=ctypes.addressof(gradients),
        of_average=_dtype_number(average.flat),
        average_stochastic=average.stochastic,
        threads=_threads(ends[-1]),
        floored=floored,
        low=_address(low),
        shadow=_address(average.flat),
        numbers=_address(row),
        average_share=_address(average.share),
        key=_address(key),
        average_key=_address(average.key),
        called=called,
        moments=tuple(map(_moment, moments)),
    )
    library().update(ctypes.byref(step))
    _mark_as_written(*p, low, average.flat, *moments)


def ema(average, p, low):
    """Move a StepAverage towards the weights p [n] and their low part, in place, as rounding.ema_kernel does.
    """
    weights, ends = _addresses([p]), _ends([p])
    step = CppStep(
        of_weight=_dtype_number(p),
        of_low=_dtype_number(low),
        count=1,
        ends=ctypes.addressof(ends),
        weights=ctypes.addressof(weights),
        of_average=_dtype_number(average.flat),
        average_stochastic=average.stochastic,
        threads=_threads(ends[-1]),
        low=_address(low),
        shadow=_address(average.flat),
        average_share=_address(average.share),
        average_key=_address(average.key),
    )
    library().ema(ctypes.byref(step))
    _mark_as_written(average.flat)


def write(x, held, key):
    """Write fp32 x [n] into bf16 `held` [n], stochastically by the noise of `key`."""
    places = map(ctypes.c_void_p, (held.data_ptr(), key.data_ptr()))
    n = x.numel()
    library().write_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n), *places, _threads(n))
    _mark_as_written(held)


def _dtype_number(t):
    return 0 if t is None else DTYPE_NUMBERS[t.dtype]  # of a tensor, or of Codes


def _address(t):
    return None if t is None else t.data_ptr()


def _addresses(tensors):
    return (ctypes.c_void_p * len(tensors))(*map(_address, tensors))


def _ends(tensors):
    """Where each tensor ends in the vector of all of them, as a C array."""
    ends = list(itertools.accumulate(t.numel() for t in tensors))
    return (ctypes.c_int64 * len(ends))(*ends)


class Codes(NamedTuple):
    """A moment in codes of 8 or 4 bits, and what writes it: codes uint8, scales fp32, the key of the noise
    int32 [3], and whether it has a sign.

    Of codes in a table, as `formats.Int8` and `Int4` have them: what they stand for fp32 [2^bits], and the
    `chart` of the table's line. Of 8-bit floats, `formats.Float8`: the bits of the mantissa, 3 or 2.
    """

    data: torch.Tensor
    scales: torch.Tensor
    key: torch.Tensor
    signed: bool
    bits: int = 8
    table: torch.Tensor | None = None
    chart: ctypes.Array | None = None
    mantissa: int = 0

    @property
    def dtype(self):
        return self.data.dtype


def encode(x, codes):
    """Write fp32 x [n] into `codes`, stochastically."""
    n = x.numel()
    moment = ctypes.byref(_moment(codes))
    library().encode_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n), moment, _threads(n))
    _mark_as_written(codes)


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


def _moment(m):
    if isinstance(m, Codes):
        return CppMoment(
            bits=m.bits,
            has_sign=m.signed,
            mantissa=m.mantissa,
            data=_address(m.data),
            scales=_address(m.scales),
            table=_address(m.table),
            chart=None if m.chart is None else ctypes.addressof(m.chart),
            key=_address(m.key),
        )
    return CppMoment(data=_address(m))


def _mark_as_written(*changed):
    """Tell autograd, which sees no write by pointer: a backward that needs the old values is an error."""
    tensors = []
    for t in changed:
        if isinstance(t, Codes):
            tensors += [t.data, t.scales]
        elif t is not None:
            tensors.append(t)
    increment_version(tensors)


def _threads(n):
    return 1 if n < VALUES_FOR_ONE_THREAD else torch.get_num_threads()
