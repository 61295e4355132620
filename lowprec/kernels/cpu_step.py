"""The step of AdamW, SGD and Lion and the codes of their moments on a CPU, as one compiled pass with the bits
of the torch code. It is built from cpu_step.cpp by GCC.

    if fits(p, g):
        update("adamw", p, g, moments, low, h, key, stochastic)   # flat, in place; h, key: rows of a Table

torch.compile makes a kernel of the same step, whose one loop waits for each hash of noise and at the start of
each page of memory, and which can't vectorise the reading of tables. This one is written by hand for AVX-512:
the first call compiles it, which takes some seconds, and keeps the result beside torch's compiled kernels.
Where that can't be, `fits` says no and torch.compile does the step, with the same bits.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import increment_version

SOURCE = Path(__file__).with_suffix(".cpp")
# each operation rounds once: no product is contracted with a sum
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp -shared -fPIC".split()
RULES = {"adamw": 0, "sgd": 1, "lion": 2}  # as in cpu_step.cpp
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.int16: 3, torch.uint8: 4}
FEW = 1 << 15  # values below which a second thread costs more than it does


# ---- The library -------------------------------------------------------------------------------------------


class Moment(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("bits", "has_sign")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "table", "chart", "key")),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rule", "of_weight", "of_gradient", "of_low")),
        ("of_moments", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32) for name in ("stochastic", "exact", "root")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ends", "weights", "gradients")),
        *((name, ctypes.c_int32) for name in ("of_average", "average_stochastic", "threads", "floored")),
        *((name, ctypes.c_void_p) for name in ("low", "shadow", "h", "average_h", "key", "average_key")),
        ("called", ctypes.c_void_p),
        ("moments", Moment * 2),
    ]


@functools.cache
def library():
    """The compiled cpu_step.cpp; None where the CPU has no AVX-512, or there is no GCC."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        return ctypes.CDLL(str(_built()))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return None


def _built():
    """The path of the compiled library. Raises what `library` catches."""
    from torch._inductor import cpp_builder
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compiler = cpp_builder.get_cpp_compiler()
    if not cpp_builder.is_gcc():
        raise RuntimeError(f"{compiler} is not GCC")
    target = subprocess.run([compiler, *FLAGS, "-Q", "--help=target"], check=True, capture_output=True).stdout
    name = hashlib.sha256(SOURCE.read_bytes() + target + " ".join(FLAGS).encode()).hexdigest()[:20]
    path = Path(cache_dir()) / "cpu_step" / f"{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # processes that build it together do not meet
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(own)], check=True, capture_output=True)
        own.replace(path)
    return path


NEAREST, OF_MKL, CALLED = range(3)  # as in cpu_step.cpp


@functools.cache
def root():
    """(kind, address): how torch.sqrt takes a root on this CPU. NEAREST: rounded to the nearest. OF_MKL: as
    the library MKL does on an Intel CPU with AVX-512, which rounds one in 160 to the other neighbour. CALLED:
    in another way of MKL's, by the function at that address. None where it is none of these.
    """
    for kind in (NEAREST, OF_MKL):
        if all(torch.equal(roots(x, kind), torch.sqrt(x)) for x in _trials()):
            return kind, None
    address = _root_of_mkl()
    if address and all(torch.equal(roots(x, CALLED, address), torch.sqrt(x)) for x in _trials(1 << 16)):
        return CALLED, address
    return None


def _root_of_mkl():
    """The address of the function of MKL that torch.sqrt calls; None where there is none."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).vmsSqrt
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


def _trials(size=1 << 24):
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
    place = (ctypes.c_void_p(at) for at in (address, x.data_ptr(), found.data_ptr()))
    library().roots(kind, *place, ctypes.c_int64(x.numel()))
    return found


# ---- The step ----------------------------------------------------------------------------------------------


def fits(p, g):
    """Whether `update` can take weights p and gradients g, tensors or lists of them, each of one dtype:
    contiguous ones, on a CPU that has what it needs.
    """
    if not _listed(p)[0].is_cpu or library() is None:
        return False
    return all(t.is_cpu and t.dtype in FLOATS and t.is_contiguous() for t in (*_listed(p), *_listed(g)))


FLOATS = torch.float32, torch.bfloat16


def update(rule, p, g, moments, low, h, key, stochastic, average=None, exact=False, floored=False):
    """One step on p [n], its moments and its low part, in place. rule: of RULES.

    p, g: weights and their gradients, a tensor or a list of them, whose values follow each other in all else.
    moments: of fp32 or bf16 [n], or `Codes`, whose blocks no two tensors share. h: fp32, the `numbers` of the
    optimiser behind decay and scale. key: int32, see `rounding.noise_bits`. average: what moves along,
    see average.EMA.along, or None. exact: with the bits of torch's lerp, addcmul and sqrt, see exact_step;
    `floored` as its `vanishes` says.
    """
    weights, gradients = _listed(p), _listed(g)
    flat, average_h, average_key, average_stochastic = average or (None, None, None, False)
    of_root, called = root() if exact else (NEAREST, None)
    ends = list(itertools.accumulate(t.numel() for t in weights))
    lists = (ctypes.c_int64 * len(ends))(*ends), _addresses(weights), _addresses(gradients)
    step = Step(
        RULES[rule],
        *map(_kind, (weights[0], gradients[0], low)),
        tuple(map(_kind, moments)),
        stochastic and not exact,  # what is exact needs no noise
        exact,
        of_root,
        len(ends),
        *map(ctypes.addressof, lists),
        _kind(flat),
        average_stochastic,
        _threads(ends[-1]),
        floored,
        *map(_address, (low, flat, h, average_h, key, average_key)),
        called,
        tuple(map(_moment, moments)),
    )
    library().update(ctypes.byref(step))
    _written(*weights, low, flat, *moments)


def _kind(t):
    return 0 if t is None else KINDS[t.data.dtype]  # of a tensor, or of Codes


def _address(t):
    return None if t is None else t.data_ptr()


def _addresses(tensors):
    return (ctypes.c_void_p * len(tensors))(*map(_address, tensors))


def _listed(t):
    return t if isinstance(t, (list, tuple)) else [t]


class Codes(NamedTuple):
    """A moment in codes of 8 or 4 bits, as `formats.Int8` and `Int4` have them, and what writes it: codes
    uint8, scales fp32, what codes stand for fp32 [2^bits], the `chart` of that table's line, the key of the
    noise int32 [3], and whether it has a sign.
    """

    data: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor
    chart: ctypes.Array
    key: torch.Tensor
    signed: bool


def encode(x, codes):
    """Write fp32 x [n] into `codes`, stochastically."""
    n = x.numel()
    moment = ctypes.byref(_moment(codes))
    library().encode_all(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(n), moment, _threads(n))
    _written(codes)


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
        bits = len(m.table).bit_length() - 1
        data, scales, table, key = (t.data_ptr() for t in (m.data, m.scales, m.table, m.key))
        chart = ctypes.addressof(m.chart)
        return Moment(bits, m.signed, data, scales, table, chart, key)
    return Moment(0, False, m.data_ptr())


def _written(*changed):
    """Tell autograd, which sees no write by pointer: a backward that needs the old values is an error."""
    parts = (t[:2] if isinstance(t, Codes) else (t,) for t in changed if t is not None)
    increment_version(list(itertools.chain.from_iterable(parts)))


def _threads(n):
    return 1 if n < FEW else torch.get_num_threads()
