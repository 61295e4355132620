"""How a number is written into fewer bits: stochastic rounding, exact masters, Kahan compensation.

    noise, _ = noise_bits(x.numel(), noise_key(seed, step))
    weight.copy_(stochastic_round(x, noise))               # fp32 [n] -> bf16 [n], right on average

bf16 has 8 significant bits. Neighbouring values (an ulp) lie 2^-8 to 2^-7 of the value apart, and rounding to
nearest loses every change below half of that. The functions here keep such a change: on average, or exactly.

Noise is a hash of (seed, step, position), never a draw from a global generator. So an interrupted run resumes
with the same noise, all ranks of a replicated run round alike, and no two parameters share noise. All
functions are plain elementwise torch: torch.compile fuses a whole optimiser step into one pass over memory.
"""

import enum
import math
from typing import NamedTuple

import torch

DTYPE_OF_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS_TO_ROUND = "nearest", "stochastic"  # how a bf16 number is written

# ---- Randomness --------------------------------------------------------------------------------------------


class Stream(enum.IntEnum):
    """One number for each use of randomness. A change of a number changes every run, so they only ever grow.
    """

    ORDER = 1  # of the data, by epoch
    INIT = 2  # initial weights
    GLOBAL = 3  # torch's global generator, by step: dropout, and peers that round by that generator
    BATCH = 4  # timesteps, noise and label dropout, by step and micro-batch
    FIXED = 5  # previews and scores
    PAIRS = 6  # noise of a teacher's pairs
    PROBE = 7  # the fixed loss that gradients are compared on
    DOCTOR = 8  # what the doctor draws
    RENOISE = 9  # what a consistency model's further steps add to an image
    CALIBRATION = 10  # batches whose inputs GPTQ rounds by


class Noise(enum.IntEnum):
    """The same for the bits that round: whose write they are for."""

    WEIGHT = 0  # and, from the same words, the optimiser's bf16 moments
    AVERAGE = 1
    EXP_AVG = 2  # codes of the first moment, and those of each further one from here on
    EXP_AVG_SQ = 3
    REDUCE = 1 << 16  # gradients that processes send each other
    PRODUCT = 1 << 17  # gradients as operands of a product in FP4


def hash64(*words):
    """A 64-bit integer from integers: splitmix64 (Steele et al. 2014, doi 10.1145/2714064.2660195) folded
    over them.
    """
    state = 0
    for word in words:
        state = (state ^ (word & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state = z ^ z >> 31
    return state


def stream(seed, kind, step=None, *more):
    """A seed below 2^63 for torch.Generator.manual_seed: of one use of randomness (`kind`, a Stream), at one
    step.
    """
    at = () if step is None else (step,)
    return hash64(seed, *at, kind, *more) >> 1


def key_words(seed, step, position=0, kind=Noise.WEIGHT, ahead=0):
    """Three int32 for `noise_bits`: two hashed words for (seed, step, kind, high part of position), and the
    position. ahead: how many entries after it begin, where those before are elsewhere.
    """
    key = hash64(seed, step, kind, position >> 32)
    words = key & 0xFFFFFFFF, key >> 32, (position + ahead) & 0xFFFFFFFF
    return [word - (1 << 32) if word >> 31 else word for word in words]


def noise_key(seed, step, position=0, kind=Noise.WEIGHT, device="cpu"):
    """`key_words` as a tensor, int32 [3]."""
    return torch.tensor(key_words(seed, step, position, kind), dtype=torch.int32, device=device)


def _mix_bits(h):
    # "lowbias32" of Chris Wellons' hash-prospector. torch shifts int32 arithmetically, hence the masks;
    # products wrap
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


def noise_bits(n, key):
    """Two independent int32 [n] of uniform bits, for elements key[2], key[2] + 1, ... under the words key[0],
    key[1].
    """
    h = _mix_bits(torch.arange(n, dtype=torch.int32, device=key.device) + key[2] + key[0])
    # the second word enters between two rounds: different steps give unrelated sequences, not shifted ones
    first = _mix_bits(h + key[1])
    return first, _mix_bits(first ^ 0x5BD1E995)


def uniform(shape, key):
    """fp32 of this shape, uniform in [0, 1), by 24 bits of noise each. key: as of noise_bits."""
    bits, _ = noise_bits(math.prod(shape), key)
    return (bits.view(shape) & 0xFFFFFF).float() * 2.0**-24


# ---- Rounding ----------------------------------------------------------------------------------------------


def stochastic_round(x, noise):
    """fp32 [n] -> bf16 [n]: up with probability (x - lower) / (upper - lower), so that the mean is x.

    noise: int32 [n] or one int, of which the low 16 bits count. Adding 16 uniform bits below the 16 that are
    kept carries with just that probability. Infinities and NaN stay as they are.
    """
    rounded_bits = ((x.view(torch.int32) + (noise & 0xFFFF)) & -65536).view(torch.float32)
    return torch.where(x == x, rounded_bits, x).to(torch.bfloat16)  # infinity carries nothing: it stays


def rounded(x, dtype, noise=None):
    """fp32 x in `dtype`: bf16 stochastically where there is noise, anything else to nearest."""
    if noise is not None and dtype == torch.bfloat16:
        return stochastic_round(x, noise)
    return x.to(dtype)


def split_master(x):
    """fp32 -> (bf16 weight, int16 remainder) with (weight << 16) + remainder = the bits of x, exactly.

    The weight is x rounded half up in its bit pattern. Rounding half to even would need a remainder of +2^15
    on ties, one more than int16 holds. A NaN keeps its weight NaN; its payload may change.
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & -65536
    # by way of fp32, not of int16: torch.compile vectorises no conversion between int16 and bf16
    weight = torch.where(x == x, high.view(torch.float32), x).to(torch.bfloat16)
    # not torch.where, which makes a tensor of the 0 where it isn't compiled
    return weight, (bits - high).masked_fill(x != x, 0).to(torch.int16)


def exact_weight(p, low=None):
    """The fp32 value that an optimiser holds for weight `p`, given what completes it.

    low: None (p itself), int16 or int8 (the remainder of a split master, exact or of 24 bits), bf16 (a Kahan
    buffer) or fp32 (a master).
    What others wrote into p, weights of a file or a mask, counts: the old low part is not to undo it.
    """
    if low is None:
        return p.float()
    if low.dtype == torch.bfloat16:
        return p.float() + low.float()
    bits = p.float().view(torch.int32)
    if low.dtype in (torch.int16, torch.int8):
        low = low.to(torch.int32) * (1 if low.dtype == torch.int16 else 256)
        # no weight that is written here is 0 with a remainder below 0, which would make a NaN of it
        return (bits + torch.where((bits & 0x7FFFFFFF) == 0, low.clamp(min=0), low)).view(torch.float32)
    away = bits - low.view(torch.int32) + 0x8000  # to nearest, a weight is half of its last bit away at most
    return torch.where((away >= 0) & (away <= 0x10000), low, p.float())


def write_weight(x, p, low=None, noise=None):
    """Write fp32 x into weight `p` and its `low` part, in place.

    noise: int32 that rounds the last bf16 written stochastically, or None to round to nearest.
    """
    if low is None:
        p.copy_(rounded(x, p.dtype, noise))
    elif low.dtype in (torch.int16, torch.int8):
        high, remainder = split_master(x if low.dtype == torch.int16 else on_24_bits(x, noise))
        p.copy_(high)
        low.copy_(remainder if low.dtype == torch.int16 else (remainder.to(torch.int32) >> 8).to(torch.int8))
    elif low.dtype == torch.bfloat16:
        # Kahan: the weight is the nearest bf16, the buffer takes the rest. With noise the rest itself is
        # rounded stochastically: the sum of both is then unbiased, and forward still reads the nearest
        # weight. Rounding goes by the bits ("noise" of half an ulp is round to nearest), because a fused
        # kernel keeps x in fp32 across a cast to bf16 and back, and x - x would leave the buffer at 0.
        nearest = stochastic_round(x, 0x8000)
        p.copy_(nearest)
        low.copy_(rounded(x - nearest.float(), low.dtype, noise))
    else:
        low.copy_(x)
        p.copy_(x)


def value_once_written(x, dtype, low=None, noise=None):
    """The fp32 value that is held once `write_weight` has written x into a weight of `dtype`.

    It is formed from bits: a fused kernel that read it back from the weight would skip the cast to bf16.
    low: a tensor of the dtype of the weight's low part.
    """
    if low is None:
        return _on_grid(x, noise) if dtype == torch.bfloat16 else x
    if low.dtype == torch.int8:
        return on_24_bits(x, noise)
    if low.dtype != torch.bfloat16:
        return x
    nearest = _on_grid(x, 0x8000)
    return nearest + _on_grid(x - nearest, noise)


def _on_grid(x, noise):
    """`rounded` to bf16, as fp32 whose low 16 bits are zero."""
    return _without_low_bits(x, noise, 16)


def on_24_bits(x, noise=None):
    """fp32 x to a number of 16 significant bits, which a bf16 weight and an int8 remainder hold: to nearest,
    or stochastically by the noise.
    """
    return _without_low_bits(x, noise, 8)


def _without_low_bits(x, noise, count):
    bits = x.view(torch.int32)
    below = (1 << count) - 1
    # to nearest: ties to even
    noise = (below >> 1) + ((bits >> count) & 1) if noise is None else noise & below
    return torch.where(x == x, ((bits + noise) & ~below).view(torch.float32), x)


# ---- The average of a weight -------------------------------------------------------------------------------


def ema_kernel(average, weights, low, share, key, stochastic):
    """Move a flat average, fp32 or bf16 [n], towards weights [n] and their low part, in place.

    share: fp32 [1], of the way that it goes: 1 - decay. key: of the noise, see noise_bits. stochastic:
    whether a bf16 average is rounded so.
    """
    noise = noise_bits(average.numel(), key)[0] if stochastic else None
    old = average.float()
    new = old + (exact_weight(weights, low) - old) * share[0]
    average.copy_(rounded(new, average.dtype, noise))


class StepAverage(NamedTuple):
    """The average of some weights, which the kernel that writes them moves in the same pass. Fields as of
    ema_kernel. Without `flat` there is none, and nothing is done.
    """

    flat: torch.Tensor | None = None
    share: torch.Tensor | None = None
    key: torch.Tensor | None = None
    stochastic: bool = False

    def follow(self, x, p, low, noise=None):
        """Move towards the weights `p`, once write_weight(x, p, low, noise) has written them."""
        if self.flat is not None:
            now = value_once_written(x, p.dtype, low, noise)
            ema_kernel(self.flat, now, None, self.share, self.key, self.stochastic)

    def part(self, start, end):
        """The average of the weights from `start` to `end` alone, with the noise of their places."""
        if self.flat is None:
            return self
        key = self.key
        if self.stochastic and start:
            key = key + torch.tensor([0, 0, start, 0], dtype=torch.int32)
        return self._replace(flat=self.flat[start:end], key=key)


NO_AVERAGE = StepAverage()
