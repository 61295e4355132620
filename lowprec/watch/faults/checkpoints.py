"""Faults of two checkpoints of a run: of their weights, averages and states, and of the files as a whole."""

import functools
import re

import torch

from ..adapters import steps_of
from ..fault import Faults, Figure
from ..gradients import ENOUGH_ENTRIES
from ..net_state import LAST_WHOLE_NUMBER, NARROW_DTYPES, dtype_name
from .averages import BEGIN_ANEW, CHECK_ITS_SIGN, CHECK_ITS_UPDATE
from .moments import AVOID_FP16, RESTORE_SECOND_MOMENT

of_saved_weight = Faults()  # SavedWeight
of_saved_average = Faults()  # SavedAverage, where weights moved
of_saved_state = Faults()  # SavedState
of_checkpoints = Faults()  # compare.Pair

# nobody trains these: frequencies, positions by sine, statistics
NAMES_NOT_TRAINED = re.compile(r"inv_freq|freqs|position_ids|pos_embed$|num_batches|running_(mean|var)$")

# ---- Weights -----------------------------------------------------------------------------------------------


class SavedWeight:
    """A weight of both files, `before` as the later one would hold it: what rounding changed has not moved.

    by_noise: whether the file says that weights are rounded stochastically. Small steps then move few
    entries, each by a whole ulp, and nothing is lost.
    """

    def __init__(self, name: str, before: torch.Tensor, after: torch.Tensor, by_noise: bool = False):
        self.name = name
        self.by_noise = by_noise
        self.dtype = after.dtype
        self.start = before
        held = held_dtype(after)
        self.before, self.after = rounded(before, held, self.dtype), rounded(after)
        # what the values of the earlier file were rounded to on the way to the later one, or None
        self.rounded_to = next((d for d in (held, self.dtype) if loses_digits(before, d)), None)

    @property
    def moved(self):
        return not torch.equal(self.before, self.after)


def rounded(t, *dtypes):
    """The values of t, rounded to one dtype after the other, as numbers that can be compared."""
    for dtype in dtypes:
        t = t.to(dtype)
    return t.double() if t.dtype == torch.float64 else t.float()


def held_dtype(t):
    """The dtype whose values t holds: its own, or a coarser one that something has rounded it to."""
    some = t.flatten()[:4096]
    if len(rounded(some).unique()) < 16:  # 0, 1 and their like are numbers of any dtype
        return t.dtype
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        is_coarser = torch.finfo(dtype).eps > torch.finfo(t.dtype).eps
        if is_coarser and not (loses_digits(some, dtype) or loses_digits(t, dtype)):
            return dtype
    return t.dtype


def loses_digits(t, dtype):
    return not torch.equal(rounded(t, dtype).double(), rounded(t).double())


@of_saved_weight("weights", "{figure:,.0f} entries are not finite", "an earlier one", above=0.0,
                 severity="severe", rank=9.0)
def entries_not_finite(one):
    """Entries that are not finite."""
    return int((~one.after.float().isfinite()).sum())


of_standstill = functools.partial(
    of_saved_weight,
    family="still",
    above=0.5,
    remedy="was it frozen? else updates under half an ulp are lost: fp32 or stochastically rounded weights",
)


@of_standstill("gains", "{ones:.0%} of its {count:,} gains are exactly 1.0, as they start")
def gains_at_one(one):
    """Share of gains that are exactly 1 in both."""
    if one.after.dim() != 1 or one.after.numel() < 8 or NAMES_NOT_TRAINED.search(one.name):
        return None
    if one.moved and one.by_noise:
        return None
    before, after = (float((side == 1.0).float().mean()) for side in (one.before, one.after))
    return Figure(min(before, after), ones=after, count=one.after.numel())


@of_standstill("update", "{figure:.0%} of its entries did not change[ in {dtype}]")
def unchanged(one):
    """Share of the entries that did not change; of fp32 tensors where none did."""
    if NAMES_NOT_TRAINED.search(one.name) or not one.after.any():
        return None
    narrow = one.dtype.itemsize < 4
    if one.moved and (one.by_noise or not narrow):
        return None
    changed = one.before != one.after
    if changed.dim() == 2 and changed.any():
        changed = changed[changed.any(1)]  # a row that did not is of a token that never came
    return Figure(1 - float(changed.float().mean()), dtype=dtype_name(one.dtype) if narrow else None)


of_no_training = functools.partial(of_checkpoints, "update", family="untrained", severity="severe")


@of_no_training("nothing was trained: the later file is a copy of the earlier one in {dtypes}",
                "was it saved after training, from the net that trained?")
def only_rounded(pair):
    """All weights of the later file are those of the earlier one, rounded."""
    dtypes = dict.fromkeys(dtype_name(one.rounded_to) for one in pair.weights if one.rounded_to)
    return Figure(dtypes=" and ".join(dtypes)) if pair.stands and dtypes else None


@of_no_training("no weight changed at all", "are these two of one run?")
def nothing_trained(pair):
    """No weight changed."""
    return pair.stands


@of_checkpoints("weights", "{count} of {all} tensors are {dtype} and hold {narrow} numbers alone, unlike "
                "before: something rounded them",
                "save and load weights as they are; nothing, if a file in {narrow} was wanted")
def rounded_on_the_way(pair):
    """Wide tensors that hold numbers of a narrower dtype alone, which they did not before."""
    found = [one for one in pair.weights if one.rounded_to not in (None, one.dtype)]
    if pair.stands or not found:
        return None
    dtype, narrow = dtype_name(found[0].dtype), dtype_name(found[0].rounded_to)
    return Figure(count=len(found), all=len(pair.weights), dtype=dtype, narrow=narrow)


# the factor of an adapter that begins as 0, in PEFT, diffusers, kohya's scripts and LyCORIS
BEGINS_AT_0 = re.compile(r"lora_(embedding_)?B\b|lora[._]up\b|hada_w2_a|lokr_w2(_b)?\b|lambda_b\b|zero_proj")
of_dead_adapter = functools.partial(
    of_checkpoints,
    "adapter",
    family="dead adapters",
    remedy="was it trained, and saved from the right net? In PEFT the names of the adapter's parameters tell",
)


@of_dead_adapter("all {count} factors as {name} are 0: the adapter does nothing", severity="severe", rank=4.0)
def dead_adapter(pair):
    """All factors of an adapter that begin as 0 are 0."""
    factors = [one for one in pair.weights if BEGINS_AT_0.search(one.name) and one.after.numel()]
    if pair.stands or not factors or any(one.after.any() for one in factors):
        return None
    return Figure(count=len(factors), name=factors[0].name)


@of_dead_adapter("it is 0, as it begins: here the adapter does nothing", rank=1.0)
def dead_factors(pair):
    """Factors of an adapter that begin as 0 and still are, while others are not."""
    for one in () if pair.stands or dead_adapter(pair) else pair.weights:
        if BEGINS_AT_0.search(one.name) and one.after.numel() and not one.after.any():
            yield Figure(tensor=one.name)


# ---- Averages ----------------------------------------------------------------------------------------------


class SavedAverage:
    """before: None where the earlier checkpoint has no averages. weight: None where none has its name."""

    def __init__(self, name, before, after, weight):
        self.name, self.before, self.after, self.weight = name, before, after, weight


def equal_values(a, b):
    """Whether a holds the values of b, rounded to its dtype."""
    if a.shape != b.shape or not a.numel():
        return False
    return torch.equal(rounded(a), rounded(b, held_dtype(a), a.dtype))


severe_of_ema = functools.partial(of_saved_average, "ema", family="average", severity="severe")
EACH_STEP = "average after each step, in fp32"


severe_of_ema("{figure:,.0f} entries are not finite", BEGIN_ANEW, above=0.0, rank=9.0)(entries_not_finite)


@severe_of_ema("the average is {figure:,.0f} times as large as its weight", CHECK_ITS_UPDATE, above=10.0,
               rank=4.0)
def average_too_large(one):
    """Norm of the average over that of its weight."""
    size = 0.0 if one.weight is None else float(one.weight.after.double().norm())
    return float(one.after.double().norm()) / size if size else None


@severe_of_ema("the average has the other sign than its weight", CHECK_ITS_SIGN, above=0.9, rank=3.0)
def average_of_other_sign(one):
    """Minus the cosine of the average and its weight."""
    if one.weight is None or one.after.numel() < ENOUGH_ENTRIES or one.after.shape != one.weight.after.shape:
        return None
    a, b = one.after.double(), one.weight.after.double()
    norms = float(a.norm() * b.norm())
    return -float((a * b).sum()) / norms if norms > 0 else None


@severe_of_ema("the average equals that of the earlier checkpoint, while weights moved", EACH_STEP, rank=2.0)
def average_stands(one):
    """Equals that of the earlier checkpoint."""
    return one.before is not None and equal_values(one.before, one.after)


@severe_of_ema("the average equals the weights of the earlier checkpoint", EACH_STEP, rank=1.5)
def average_is_start(one):
    """Equals the weights of the earlier checkpoint, which have moved."""
    return one.weight is not None and one.weight.moved and equal_values(one.after, one.weight.start)


@of_checkpoints("ema", "the average equals the weights: it averages nothing",
                "was the average saved, or the weights twice?", rank=1.0)
def averages_nothing(pair):
    """All averages equal their weights, which have moved."""
    paired = [one for one in pair.averages if one.weight is not None and one.after.numel()]
    alike = pair.trained and paired and all(equal_values(one.after, one.weight.after) for one in paired)
    return Figure(tensor=paired[0].name) if alike else None


# ---- States of the optimiser -------------------------------------------------------------------------------


class SavedState:
    """What an optimiser keeps for one parameter, in both files. stochastic: whether the later one says
    that it is rounded so.
    """

    def __init__(self, name, before, after, stochastic=False):
        self.name, self.before, self.after = name, before, after
        self.m, self.v = tensor_of(after, "exp_avg"), tensor_of(after, "exp_avg_sq")
        self.v_before = tensor_of(before, "exp_avg_sq")
        self.step = steps_of(after)
        self.to_nearest = self.v is not None and self.v.dtype in NARROW_DTYPES and not stochastic

    @property
    def v_changed(self):
        known = self.v is not None and self.v_before is not None and self.v.shape == self.v_before.shape
        return known and not torch.equal(self.v, self.v_before)

    @property
    def shrunk(self):
        """Share of the entries of exp_avg_sq that shrank; None where that is not known."""
        return float((self.v.float() < self.v_before.float()).float().mean()) if self.v_changed else None


def tensor_of(state, name):
    found = state.get(name)
    return found if torch.is_tensor(found) else None


of_narrow_v = functools.partial(of_saved_state, "exp_avg_sq", family="narrow v")
of_counter = functools.partial(
    of_saved_state, "step", remedy="fp32 or integer counters", family="counter", rank=1.0
)


@of_narrow_v("exp_avg_sq is {dtype}, and {figure:.0%} of its entries shrank",
             "nothing, if it is rounded stochastically", above=0.02, severity="note", rank=0.0)
def v_can_shrink(one):
    """Share of the entries of a 16-bit exp_avg_sq that shrank."""
    known = one.to_nearest and one.shrunk is not None
    return Figure(one.shrunk, dtype=dtype_name(one.v.dtype)) if known else None


@of_narrow_v("exp_avg_sq is {dtype}: rounded to nearest it can grow and not shrink[; {shrunk:.1%} of its "
             "entries shrank]", "fp32 states, or stochastic rounding; nothing, if they are rounded so")
def v_is_narrow(one):
    """Held in 16 bits, and not rounded stochastically as far as the file tells."""
    return Figure(dtype=dtype_name(one.v.dtype), shrunk=one.shrunk) if one.to_nearest else None


@of_saved_state("exp_avg_sq", "it was fp32 before", "put states back as they were saved", rank=2.0)
def v_cast(one):
    """Fp32 in the earlier checkpoint, and 16 bits now."""
    was_wide = one.v_before is not None and one.v_before.dtype == torch.float32
    return was_wide and one.v is not None and one.v.dtype in NARROW_DTYPES


@of_counter("its step counter is {dtype} and says {step:g}: it can't count beyond {most}",
            severe_above=0.9999)
def counter_is_narrow(one):
    """What a counter in 16 bits says, over what it can count to."""
    held = tensor_of(one.after, "step")
    if held is None or held.dtype not in NARROW_DTYPES or one.step is None:
        return None
    most = LAST_WHOLE_NUMBER[held.dtype]
    return Figure(one.step / most, dtype=dtype_name(held.dtype), step=one.step, most=most)


@of_counter("its step counter says {step:g} in both, while its moments changed")
def counter_stands(one):
    """Says the same in both, while exp_avg_sq changed."""
    stands = one.step is not None and one.step == steps_of(one.before) and one.v_changed
    return Figure(step=one.step) if stands else None


of_reset = functools.partial(of_checkpoints, "exp_avg_sq", family="reset", severity="severe", rank=3.0)


@of_reset("all zero after {step:g} steps: fp16 holds no squares so small", AVOID_FP16)
def v_reset_in_fp16(pair):
    """0 everywhere in fp16, after steps."""
    return [figure for figure in v_reset(pair) if figure.words["dtype"] == torch.float16]


@of_reset("all zero after {step:g} steps: the second moment was reset", RESTORE_SECOND_MOMENT)
def v_reset(pair):
    """0 everywhere after steps, of a tensor beside an exp_avg, or of all tensors."""
    held = [one for one in pair.states if one.step and one.v is not None]
    zero = [one for one in held if not one.v.any()]
    for one in zero:
        # one tensor may never have had a gradient but 0; all of them did
        if len(zero) == len(held) or (one.m is not None and one.m.any()):
            yield Figure(tensor=one.name, step=one.step, dtype=one.v.dtype)


@of_checkpoints("state", "the later checkpoint holds no optimiser: states are not compared",
                "nothing, if it is weights alone", severity="note")
def no_optimizer(pair):
    """The earlier checkpoint holds an optimiser, and the later one none."""
    return bool(pair.before.states) and not pair.after.has_optimizer


@of_checkpoints("state", "{figure:.0f} of {all} parameters have no state, although they had one before",
                "save and restore the whole of optimizer.state_dict()", above=0.0, severity="severe",
                rank=4.0)
def lost_states(pair):
    """Parameters that had a state, and have none now."""
    if not pair.after.has_optimizer:
        return None
    before, after = pair.before.states, pair.after.states
    return Figure(sum(bool(state) and not after.get(key) for key, state in before.items()), all=len(before))
