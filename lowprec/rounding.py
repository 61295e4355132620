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

import torch

from .errors import Refused

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


# ---- Ways to write a weight --------------------------------------------------------------------------------


LOST_BITS = {torch.bfloat16: 16, torch.float32: 0}  # of fp32 x, in a weight or a moment of this dtype


def on_grid(x, lost, noise=None):
    """fp32 x whose `lost` last bits are rounded away, and zero: by the noise, int32, or to nearest, ties to
    even. It is formed from bits: a fused kernel that read x back from bf16 would skip the cast.
    """
    if not lost:
        return x
    bits = x.view(torch.int32)
    below = (1 << lost) - 1
    noise = (below >> 1) + ((bits >> lost) & 1) if noise is None else noise & below
    return torch.where(x == x, ((bits + noise) & ~below).view(torch.float32), x)


class Way:
    """How a weight is written: alone, by noise where there is noise, else to nearest. Others complete it.

    name: of what completes it, its low part, in states and checkpoints; site: that asks for it. code: by
    which hand-written kernels know the way, None where they don't.
    """

    name: str | None = None
    site: str | None = None
    code: int | None = 0
    tells_update = True  # whether what a step wants of a weight is the optimiser's update alone
    loses: tuple = (torch.bfloat16,)  # dtypes of weights into which a write can lose something of fp32 x

    def __eq__(self, other):  # a copied optimiser has copies of ways, and compiles nothing anew
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self):
        return hash(type(self))

    def check(self, group, name):
        """Raises Refused for options of a parameter group of the optimiser `name` with which nothing can be
        written so.
        """

    def low(self, weights):
        """The low part of new weights, flat [n]; None where nothing completes them."""
        return

    def held(self, p, low=None):
        """The fp32 value that weight p stands for. What others wrote into p, weights of a file or a mask,
        counts: the old low part is not to undo it.
        """
        return p.float()

    def write(self, x, p, noise, low=None):
        """Write fp32 x into p and its low part, in place. Returns the fp32 value that is held now.

        noise: int32 that rounds the last bf16 written, or None to round to nearest.
        """
        now = on_grid(x, LOST_BITS[p.dtype], noise)
        p.copy_(now)
        return now

    def returned(self, error, moments, n):
        """The new moments of a step that lost `error` of a weight. Here nothing comes back."""
        return moments


class Kahan(Way):
    """The nearest bf16, and a bf16 buffer with the rest. With noise the rest itself is rounded
    stochastically: the sum of both is then unbiased, and forward still reads the nearest weight.
    """

    name, site, code = "compensation", "kahan", 2

    def low(self, weights):
        return torch.zeros(weights.shape, dtype=torch.bfloat16, device=weights.device)

    def held(self, p, low):
        return p.float() + low.float()

    def write(self, x, p, noise, low):
        nearest = on_grid(x, 16, 0x8000)  # "noise" of half an ulp
        rest = on_grid(x - nearest, 16, noise)
        p.copy_(nearest)
        low.copy_(rest)
        return nearest + rest


class Split(Way):
    """A bf16 weight and an int16 remainder, which together are the bits of x, exactly."""

    name, site = "remainder", "master"
    code: int | None = 3
    loses: tuple = ()

    def low(self, weights):
        return torch.zeros(weights.shape, dtype=torch.int16, device=weights.device)

    def held(self, p, low):
        return self._joined(p, low.to(torch.int32))

    def _joined(self, p, remainder):
        bits = p.float().view(torch.int32)
        # no weight that is written here is 0 with a remainder below 0, which would make a NaN of it
        kept = torch.where((bits & 0x7FFFFFFF) == 0, remainder.clamp(min=0), remainder)
        return (bits + kept).view(torch.float32)

    def write(self, x, p, noise, low):
        weight, remainder = split_master(x)
        p.copy_(weight)
        low.copy_(remainder)
        return x


class Split8(Split):
    """As Split, with the upper half of the remainder alone: a master of 24 bits, which is rounded to."""

    code = None
    loses = torch.bfloat16, torch.float32

    def low(self, weights):
        return torch.zeros(weights.shape, dtype=torch.int8, device=weights.device)

    def held(self, p, low):
        return self._joined(p, low.to(torch.int32) * 256)

    def write(self, x, p, noise, low):
        now = on_grid(x, 8, noise)
        weight, remainder = split_master(now)
        p.copy_(weight)
        low.copy_((remainder.to(torch.int32) >> 8).to(torch.int8))
        return now


class Fp32Master(Way):
    """A copy in fp32, which is written, and its nearest bf16."""

    name, site, code = "master", "master", 1
    loses = ()

    def low(self, weights):
        return weights.float()

    def held(self, p, low):
        # to nearest, a weight is half of its last bit away from its master at most
        away = p.float().view(torch.int32) - low.view(torch.int32) + 0x8000
        return torch.where((away >= 0) & (away <= 0x10000), low, p.float())

    def write(self, x, p, noise, low):
        low.copy_(x)
        p.copy_(x)
        return x


class Eco(Way):
    """To nearest, and what is rounded away goes into the momentum (arXiv 2601.22101).

    feedback: (error, new moments, numbers) -> new moments, such that the next steps add up to the error.
    """

    site, code = "update", None
    loses = torch.bfloat16, torch.float32
    tells_update = False  # a step asks again for what earlier ones rounded away: how much is not told

    def __init__(self, feedback=None):
        self.feedback = feedback

    def check(self, group, name):
        takes = self.feedback and group.get("momentum", group.get("betas", [0])[0])
        if not takes:
            remedy = "take AdamW and set betas[0] above 0, or SGD and set momentum above 0, as 0.9"
            raise Refused(f"update='eco': {name} has no momentum that takes rounding errors: {remedy}")

    def write(self, x, p, noise, low=None):
        return super().write(x, p, None)

    def returned(self, error, moments, n):
        return self.feedback(error, moments, n)


ALONE, KAHAN = Way(), Kahan()
WAY_OF_MASTER = {"fp32": Fp32Master(), "split": Split(), "split8": Split8()}
# by what completes the weight, where that is all that is known
WAY_OF_LOW = {
    torch.bfloat16: KAHAN,
    torch.int16: WAY_OF_MASTER["split"],
    torch.int8: WAY_OF_MASTER["split8"],
    torch.float32: WAY_OF_MASTER["fp32"],
}


def chosen_way(update, kahan, master, feedback=None):
    """The Way of bf16 weights by options of an optimiser. feedback: as of Eco. Raises Refused for two that
    exclude each other.
    """
    ways = {
        "kahan": {True: KAHAN}.get(kahan),
        f"master={master!r}": WAY_OF_MASTER.get(master),
        f"update={update!r}": {"eco": Eco(feedback)}.get(update),
    }
    asked = {option: way for option, way in ways.items() if way is not None}
    if len(asked) > 1:
        both = " beside ".join(asked)
        raise Refused(f"{both}: each keeps what is rounded away of a weight; drop one of the two")
    return next(iter(asked.values()), ALONE)


def way_of(low=None):
    """The Way of weights that `low`, a tensor or None, completes."""
    return ALONE if low is None else WAY_OF_LOW[low.dtype]


def exact_weight(p, low=None):
    """The fp32 value that an optimiser holds for weight p and its low part."""
    return way_of(low).held(p, low)


def write_weight(x, p, low=None, noise=None):
    """Write fp32 x into weight p and its low part, in place. Returns the fp32 value that is held now."""
    return way_of(low).write(x, p, noise, low)


# ---- The average of a weight -------------------------------------------------------------------------------


def ema_kernel(average, weights, low, share, key, stochastic):
    """Move a flat average, fp32 or bf16 [n], towards weights [n] and their low part, in place. low: a list of
    that, or of none.

    share: fp32 [1], of the way that it goes: 1 - decay. key: of the noise, see noise_bits. stochastic:
    whether a bf16 average is rounded so.
    """
    noise = noise_bits(average.numel(), key)[0] if stochastic else None
    old = average.float()
    new = old + (exact_weight(weights, *low) - old) * share[0]
    average.copy_(on_grid(new, LOST_BITS[average.dtype], noise))
