"""Kernels fused by torch.compile; where there is no compiler they run as they are, with one warning."""

import functools
import platform
import warnings
from contextlib import nullcontext

import torch

# AssertionError: torch imports its compiler a second time, after its cache could not be written
BUILD_ERRORS = (RuntimeError, OSError, ImportError, AssertionError)
RECOMPILE_LIMIT = 64  # one graph a combination of dtypes; torch's default is 8


@functools.cache
def _compiled(kernel):
    if torch._dynamo.config.disable:  # TORCH_COMPILE_DISABLE: torch would run the kernel, and then raise
        return kernel, nullcontext
    options = dict(dynamic=True, fullgraph=True, options=_compile_options())
    try:
        return torch.compile(kernel, recompile_limit=RECOMPILE_LIMIT, **options), nullcontext
    except TypeError:  # before torch 2.14 it is a setting of the process: raised while the kernel is called
        # and there it would compile numbers that a kernel closes over as variables, by which it can't shift
        settings = dict(recompile_limit=RECOMPILE_LIMIT, specialize_int=True)
        return torch.compile(kernel, **options), functools.partial(torch._dynamo.config.patch, **settings)


def _compile_options():
    from torch._inductor import config, cpp_builder

    # torch would decide by the first tensor that a kernel sees whether its loop is spread over threads, and
    # keep that on disk: after a small tensor a large one would be left to a single thread
    options = {"cpp.dynamic_threads": True}
    try:
        gcc = cpp_builder.is_gcc()
    except RuntimeError:  # no compiler: the call of the kernel will tell
        gcc = False
    if gcc and platform.machine() in ("x86_64", "AMD64") and getattr(config.cpp, "march", "") is None:
        # torch.compile tells GCC not to vectorise loops, and writes each change between fp32 and its bits as
        # a loop. Letting GCC vectorise these makes the stochastic step on a CPU 2.5 times faster, and in the
        # 512 bits that torch's own vectors have, where GCC would take 256, half as fast again (one thread of
        # an Intel Xeon). Its results don't change, since contraction and reordering of sums stay off.
        options["cpp.march"] = "native -ftree-loop-vectorize -mprefer-vector-width=512"
    return options


def fused(kernel, *args, compiled=True):
    """Call `kernel`, fused by torch.compile; where there is no compiler, warn once and call it as it is."""
    if compiled and kernel not in unfused:
        try:
            call, limit = _compiled(kernel)
            with limit():
                return call(*args)
        except Exception as error:  # no compiler, no Triton, an unsupported device: nothing is written yet
            # the eager step needs more memory: what is full now must not make it the choice for good
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, BUILD_ERRORS):
                raise
            result = kernel(*args)  # arguments that can't work are an error here too, and not the compiler's
            if not unfused:
                what = f"torch.compile can't build the fused step here ({type(error).__name__})"
                warnings.warn(f"{what}; using the slower eager one", stacklevel=3)
            unfused.add(kernel)
            return result
    return kernel(*args)


unfused: set = set()  # kernels that could not be built on this machine
