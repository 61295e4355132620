"""What `compare` can find in two checkpoints: rows as in findings.py, of weights, averages and states."""

import dataclasses
import re

import torch

from .adapters import steps_of
from .faults import CHECK_ITS_SIGN, Fault, Figure
from .gradients import ENOUGH_ENTRIES
from .measures import dtype_name
from .net_state import NARROW_DTYPES
from .verdicts import Finding

UNCHANGED_LIMIT = 0.5  # share of entries from which on a trained tensor is a finding
GAINS_AT_ONE_LIMIT = 0.5
# nobody trains these: frequencies, positions by sine, statistics
NAMES_NOT_TRAINED = re.compile(r"inv_freq|freqs|position_ids|pos_embed$|num_batches")
NAMES_OF_STATISTICS = ("running_mean", "running_var")


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


def saved_tensor_not_finite(one):
    """entries that are not finite"""
    count = int((~one.after.float().isfinite()).sum())
    return Figure(count, {"count": count})


def gains_at_one(one):
    """share of gains that are exactly 1 in both"""
    if one.after.dim() != 1 or one.after.numel() < 8 or one.name.endswith(NAMES_OF_STATISTICS):
        return None
    if one.moved and one.by_noise:
        return None
    before, after = (float((side == 1.0).float().mean()) for side in (one.before, one.after))
    return Figure(min(before, after), {"ones": after, "count": one.after.numel()})


def unchanged(one):
    """share of the entries that did not change; of fp32 tensors where none did"""
    if not one.after.numel() or one.name.endswith(NAMES_OF_STATISTICS):
        return None
    if NAMES_NOT_TRAINED.search(one.name) or not one.after.any():
        return None
    narrow = one.dtype.itemsize < 4
    if one.moved and (one.by_noise or not narrow):
        return None
    still = 1 - share_changed(one.before, one.after)
    words = {"still": still}
    if narrow:
        words["dtype"] = dtype_name(one.dtype)
    return Figure(still, words)


def share_changed(a, b):
    """Share of entries that changed, without whole rows of a matrix that did not: tokens that never came."""
    changed = a != b
    if changed.dim() == 2 and changed.any():
        changed = changed[changed.any(1)]
    return float(changed.float().mean())


FROZEN_OR_LOST = (
    "was it frozen? else updates under half an ulp are lost: fp32 or stochastically rounded weights"
)
FAULTS_OF_SAVED_WEIGHTS = [
    [
        Fault(
            site="weights",
            limit=0.0,
            measure=saved_tensor_not_finite,
            text="{count:,} entries are not finite",
            remedy="an earlier one",
            severity="severe",
            rank=9.0,
        ),
    ],
    [
        Fault(
            site="gains",
            limit=GAINS_AT_ONE_LIMIT,
            measure=gains_at_one,
            text="{ones:.0%} of its {count:,} gains are exactly 1.0, as they start",
            remedy=FROZEN_OR_LOST,
        ),
        Fault(
            site="update",
            limit=UNCHANGED_LIMIT,
            measure=unchanged,
            text="{still:.0%} of its entries did not change[ in {dtype}]",
            remedy=FROZEN_OR_LOST,
        ),
    ],
]


def nothing_trained(weights):
    """The Finding of two files between which no weight moved."""
    text, remedy = "no weight changed at all", "are these two of one run?"
    dtypes = dict.fromkeys(dtype_name(one.rounded_to) for one in weights if one.rounded_to)
    if dtypes:
        text = f"nothing was trained: the later file is a copy of the earlier one in {' and '.join(dtypes)}"
        remedy = "was it saved after training, from the net that trained?"
    return Finding("update", "severe", text, remedy)


def rounded_on_the_way(weights):
    """[Finding] of wide tensors that hold numbers of a narrower dtype alone, which they did not before."""
    found = [one for one in weights if one.rounded_to not in (None, one.dtype)]
    if not found:
        return []
    dtype, narrow = dtype_name(found[0].dtype), dtype_name(found[0].rounded_to)
    text = f"{len(found)} of {len(weights)} tensors are {dtype} and hold {narrow} numbers alone"
    remedy = f"save and load weights as they are; nothing, if a file in {narrow} was wanted"
    return [Finding("weights", "moderate", f"{text}, unlike before: something rounded them", remedy)]


# the factor of an adapter that begins as 0, in PEFT, diffusers, kohya's scripts and LyCORIS
BEGINS_AT_0 = re.compile(r"lora_(embedding_)?B\b|lora[._]up\b|hada_w2_a|lokr_w2(_b)?\b|lambda_b\b|zero_proj")


def dead_adapters(weights):
    """[Finding] of an adapter that does nothing: the factors that begin as 0 are 0. Where that is so of some,
    each is named.
    """
    begun = [one for one in weights if BEGINS_AT_0.search(one.name) and one.after.numel()]
    dead = [one for one in begun if not one.after.any()]
    if not dead:
        return []
    remedy = (
        "was it trained, and saved from the right net? In PEFT the names of the adapter's parameters tell"
    )
    if len(dead) == len(begun):
        text = f"all {len(dead)} factors as {dead[0].name} are 0: the adapter does nothing"
        return [Finding("adapter", "severe", text, remedy, "", 4.0)]
    text = "it is 0, as it begins: here the adapter does nothing"
    return [Finding("adapter", "moderate", text, remedy, one.name, 1.0) for one in dead]


# ---- Averages ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class SavedAverage:
    """before: None where the earlier checkpoint has no averages. weight: None where none has its name."""

    name: str
    before: torch.Tensor | None
    after: torch.Tensor
    weight: SavedWeight | None


def saved_average_too_large(one):
    """norm of the average over that of its weight"""
    return None if one.weight is None else ratio_of_norms(one.after, one.weight.after)


def saved_average_of_other_sign(one):
    """minus the cosine of the average and its weight"""
    if one.weight is None or one.after.numel() < ENOUGH_ENTRIES:
        return None
    a, b = one.after.double(), one.weight.after.double()
    norms = float(a.norm() * b.norm())
    return Figure(-float((a * b).sum()) / norms) if norms > 0 and a.shape == b.shape else None


def ratio_of_norms(a, b):
    """Figure of the norm of a over that of b; None where b is 0."""
    size = float(b.double().norm())
    if size == 0:
        return None
    times = float(a.double().norm()) / size
    return Figure(times, {"times": times})


def saved_average_stands(one):
    """equals that of the earlier checkpoint"""
    return Figure(1.0) if one.before is not None and equal_values(one.before, one.after) else None


def saved_average_is_start(one):
    """equals the weights of the earlier checkpoint, which have moved"""
    if one.weight is None or not one.weight.moved:
        return None
    return Figure(1.0) if equal_values(one.after, one.weight.start) else None


def equal_values(a, b):
    """Whether a holds the values of b, rounded to its dtype."""
    if a.shape != b.shape or not a.numel():
        return False
    return torch.equal(rounded(a), rounded(b, held_dtype(a), a.dtype))


FAULTS_OF_SAVED_AVERAGES = [
    [
        Fault(
            site="ema",
            limit=0.0,
            measure=saved_tensor_not_finite,
            text="{count:,} entries are not finite",
            remedy="begin the average anew from the weights, and find what wrote it",
            severity="severe",
            rank=9.0,
        ),
        Fault(
            site="ema",
            limit=10.0,
            measure=saved_average_too_large,
            text="the average is {times:,.0f} times as large as its weight",
            remedy="check how the average is updated",
            severity="severe",
            rank=4.0,
        ),
        Fault(
            site="ema",
            limit=0.9,
            measure=saved_average_of_other_sign,
            text="the average has the other sign than its weight",
            remedy=CHECK_ITS_SIGN,
            severity="severe",
            rank=3.0,
        ),
        Fault(
            site="ema",
            limit=None,
            measure=saved_average_stands,
            text="the average equals that of the earlier checkpoint, while weights moved",
            remedy="average after each step, in fp32",
            severity="severe",
            rank=2.0,
        ),
        Fault(
            site="ema",
            limit=None,
            measure=saved_average_is_start,
            text="the average equals the weights of the earlier checkpoint",
            remedy="average after each step, in fp32",
            severity="severe",
            rank=1.5,
        ),
    ],
]


def averages_nothing(averages):
    """[Finding] where all averages equal their weights."""
    paired = [one for one in averages if one.weight is not None and one.after.numel()]
    if not paired or not all(equal_values(one.after, one.weight.after) for one in paired):
        return []
    text = "the average equals the weights: it averages nothing"
    return [
        Finding("ema", "moderate", text, "was the average saved, or the weights twice?", paired[0].name, 1.0)
    ]


# ---- Optimiser states --------------------------------------------------------------------------------------


class SavedState:
    """What an optimiser keeps for one parameter, in both files. stochastic: whether the later one says
    that it is rounded so.
    """

    def __init__(self, name, before, after, stochastic=False):
        self.name = name
        self.stochastic = stochastic
        self.before = before
        self.after = after
        self.v_before = _tensor_of_state(before, "exp_avg_sq")
        self.v = _tensor_of_state(after, "exp_avg_sq")

    @property
    def v_changed(self):
        known = self.v is not None and self.v_before is not None and self.v.shape == self.v_before.shape
        return known and not torch.equal(self.v, self.v_before)

    @property
    def narrow(self):
        return self.v is not None and self.v.dtype in NARROW_DTYPES

    @property
    def shrunk(self):
        """Share of the entries of exp_avg_sq that shrank; None where that is not known."""
        if not self.v_changed:
            return None
        return float((self.v.float() < self.v_before.float()).float().mean())

    @property
    def step(self):
        return steps_of(self.after)


def _tensor_of_state(state, name):
    found = state.get(name)
    return found if torch.is_tensor(found) else None


def saved_v_can_shrink(one):
    """share of the entries of a 16-bit exp_avg_sq that shrank"""
    if not one.narrow or one.stochastic or one.shrunk is None:
        return None
    return Figure(one.shrunk, {"dtype": dtype_name(one.v.dtype), "shrunk": one.shrunk})


def saved_v_is_narrow(one):
    """held in 16 bits, and not rounded stochastically as far as the file tells"""
    if not one.narrow or one.stochastic:
        return None
    words = {"dtype": dtype_name(one.v.dtype)}
    if one.shrunk is not None:
        words["shrunk"] = one.shrunk
    return Figure(1.0, words)


def saved_v_cast(one):
    """fp32 in the earlier checkpoint, and 16 bits now"""
    was_wide = one.v_before is not None and one.v_before.dtype == torch.float32
    return Figure(1.0) if one.narrow and was_wide else None


def saved_counter_narrow(one):
    """what a counter in 16 bits says, over what it can count to"""
    counter = _tensor_of_state(one.after, "step")
    if counter is None or counter.dtype not in NARROW_DTYPES or one.step is None:
        return None
    most = 256 if counter.dtype == torch.bfloat16 else 2048
    words = {"dtype": dtype_name(counter.dtype), "step": one.step, "most": most}
    return Figure(one.step / most, words)


def saved_counter_stands(one):
    """says the same in both, while exp_avg_sq changed"""
    stands = one.step is not None and one.step == steps_of(one.before)
    return Figure(1.0, {"step": one.step}) if stands and one.v_changed else None


HOLD_COUNTERS_WIDE = "fp32 or integer counters"
FAULTS_OF_SAVED_STATES = [
    [
        Fault(
            site="exp_avg_sq",
            limit=0.02,
            measure=saved_v_can_shrink,
            text="exp_avg_sq is {dtype}, and {shrunk:.0%} of its entries shrank",
            remedy="nothing, if it is rounded stochastically",
            severity="note",
            rank=0.0,
        ),
        Fault(
            site="exp_avg_sq",
            limit=None,
            measure=saved_v_is_narrow,
            text="exp_avg_sq is {dtype}: rounded to nearest it can grow and not shrink[; {shrunk:.1%} of its "
            "entries shrank]",
            remedy="fp32 states, or stochastic rounding; nothing, if they are rounded so",
        ),
    ],
    [
        Fault(
            site="exp_avg_sq",
            limit=None,
            measure=saved_v_cast,
            text="it was fp32 before",
            remedy="put states back as they were saved",
            rank=2.0,
        ),
    ],
    [
        Fault(
            site="step",
            limit=None,
            measure=saved_counter_narrow,
            text="its step counter is {dtype} and says {step:g}: it can't count beyond {most}",
            remedy=HOLD_COUNTERS_WIDE,
            severe=0.9999,  # it says the last number that it can
            rank=1.0,
        ),
        Fault(
            site="step",
            limit=None,
            measure=saved_counter_stands,
            text="its step counter says {step:g} in both, while its moments changed",
            remedy=HOLD_COUNTERS_WIDE,
            rank=1.0,
        ),
    ],
]


def resets(states):
    """[Finding] of second moments of 0 after steps. One tensor may never have had a gradient but 0; all of
    them did.
    """
    held = [one for one in states if one.step and one.v is not None]
    zero = [one for one in held if not one.v.any()]
    found = []
    for one in zero:
        first = _tensor_of_state(one.after, "exp_avg")
        if len(zero) == len(held) or (first is not None and first.any()):
            text, remedy = "the second moment was reset", "restore exp_avg_sq at a resume"
            if one.v.dtype == torch.float16:
                text = "fp16 holds no squares so small"
                remedy = "fp32 weights and states, with the products under autocast, or bf16 ones"
            text = f"all zero after {one.step:g} steps: {text}"
            found.append(Finding("exp_avg_sq", "severe", text, remedy, one.name, 3.0))
    return found


def lost_states(before, after):
    """[Finding] of parameters that had a state in the Checkpoint `before` and have none in `after`."""
    if before.states and not after.has_optimizer:
        text = "the later checkpoint holds no optimiser: states are not compared"
        return [Finding("state", "note", text, "nothing, if it is weights alone")]
    lost = [key for key, state in before.states.items() if state and not after.states.get(key)]
    if not lost:
        return []
    text = f"{len(lost)} of {len(before.states)} parameters have no state, although they had one before"
    remedy = "save and restore the whole of optimizer.state_dict()"
    return [Finding("state", "severe", text, remedy, "", 4.0)]
