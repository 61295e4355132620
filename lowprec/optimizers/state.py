"""The state of an optimiser: how a moment is held, where states live, and how they are saved and loaded.

A moment reads and writes itself. A step asks `Held` for values and gives new ones back; that some are codes
with a scale a block, it does not know. A checkpoint has a moment under its name, and scales under NAME_scale.
"""

import copy
import dataclasses
import math

import torch

from .. import kernels
from ..errors import Refused
from ..formats import FORMATS, Format
from ..rounding import DTYPE_OF_NAME
from .buckets import ENTRIES_A_BLOCK, was_freed
from .groups import check_groups

# ---- Held --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    """A moment as a tensor, fp32 or bf16 [n]. shape: of one that has other entries than its parameter."""

    values: torch.Tensor
    shape: tuple | None = None
    keyed = False  # whether it is written by a key of noise of its own: codes are, and nothing else
    reads_fp32 = property(lambda held: held.values.dtype == torch.float32)

    def read(self, compiled=True):
        """What a step computes with and writes into, flat: here the tensor itself."""
        return self.values

    def put_back(self, values, key, compiled=True):
        """Take what `read` gave, once a step has written into it."""

    def write(self, x, key, compiled=True):
        """Write fp32 x [n] by the noise of `key`, or to nearest where it is None."""
        kernels.write(x, self.values, key, compiled)

    def operand(self, key):
        """As kernels write it by the noise of `key`: a kernels.Operand; None for codes that none writes."""
        return kernels.Operand(self.values)

    def clear(self):
        """Set it to zero."""
        self.values.zero_()

    def part(self, start, end):
        """The values from start to end alone."""
        return Plain(self.values[start:end])

    def tensors(self):
        """{suffix of the name in a checkpoint: flat tensor}."""
        return {"": self.values}

    def mapped(self, change):
        """The same with change(t) in the place of each of its `tensors`, in their order."""
        return Plain(change(self.values), self.shape)

    def split(self, bucket):
        """[Held], one for each parameter of the bucket, whose tensors are in its shape."""
        if self.shape is not None:
            return [Plain(self.values.view(self.shape), self.shape)]
        return [Plain(view) for view in bucket.views(self.values, bucket.params)]

    def nbytes(self, n):
        """Bytes of a moment of n entries that is held so."""
        return self.values.nbytes if self.shape is not None else n * self.values.element_size()

    def nbytes_of_tables(self, stochastic):
        """Bytes of what all moments of its kind share."""
        return 0


@dataclasses.dataclass
class Coded:
    """A moment of n values in codes of a formats.Format: uint8 `values`, and fp32 scales, both flat."""

    coder: Format
    values: torch.Tensor
    scales: torch.Tensor
    n: int
    signed: bool
    keyed = reads_fp32 = True

    def read(self, compiled=True):
        """fp32 [n] that the codes stand for."""
        if not self.n:
            return self.scales.new_zeros(0)
        return self.coder.decode(self.values.view(-1), self.scales, self.n, self.signed, compiled)

    def write(self, x, key, compiled=True):
        """As Plain's, into codes."""
        self.coder.encode(x, self.values.view(-1), self.scales, self.signed, key, compiled)

    put_back = write

    def operand(self, key):
        return self.coder.operand(self.values, self.scales, self.signed, key)

    def clear(self):
        self.scales.zero_()  # codes are zero where their scale is

    def part(self, start, end):
        coder = self.coder
        codes = self.values[start * coder.bits // 8 : -(-end * coder.bits // 8)]
        scales = self.scales[start // coder.block : -(-end // coder.block)]
        return Coded(coder, codes, scales, end - start, self.signed)

    def tensors(self):
        return {"": self.values, "_scale": self.scales}

    def mapped(self, change):
        return Coded(self.coder, change(self.values), change(self.scales), self.n, self.signed)

    def split(self, bucket):
        numbers = [p.numel() for p in bucket.params] if len(bucket.params) > 1 else [self.n]
        sizes = [self.coder.sizes(n) for n in numbers]
        codes = bucket.views_of_codes(self.values, [codes for codes, _ in sizes])
        scales = self.scales.split([scales for _, scales in sizes])
        return [Coded(self.coder, *own, self.signed) for own in zip(codes, scales, numbers, strict=True)]

    def nbytes(self, n):
        codes, scales = self.coder.sizes(n)
        return codes * self.values.element_size() + scales * self.scales.element_size()

    def nbytes_of_tables(self, stochastic):
        return self.coder.table_bytes(self.signed, stochastic)


# ---- Kinds -------------------------------------------------------------------------------------------------


class InNumbers:
    """A kind in which moments are held: each value a number of this dtype."""

    together = 1  # entries that no part of a tensor may divide
    smallest = 0  # values of a moment that is held so; smaller ones are held in fp32

    def __init__(self, name):
        self.name, self.dtype = name, DTYPE_OF_NAME[name]

    def zeros(self, n, device, signed, shape=None):
        """The Held of n zeros. shape: as of Plain."""
        return Plain(torch.zeros(n, dtype=self.dtype, device=device), shape)

    def taken(self, name, p, signed, saved):
        """A saved state of parameter p, {name: value}, with the moment `name` as it is held now."""
        return saved


class InCodes:
    """As InNumbers: codes of a format."""

    together = ENTRIES_A_BLOCK

    def __init__(self, coder):
        self.name, self.smallest, self.coder = coder.name, coder.smallest, coder

    def zeros(self, n, device, signed, shape=None):
        return Coded(self.coder, *self.coder.new(n, device), n, signed)

    def taken(self, name, p, signed, saved):
        old, n = saved.get(name), p.numel()
        was_plain = torch.is_tensor(old) and (old.shape, old.dtype) == (p.shape, torch.float32)
        if not (was_plain and self.coder.stayed(n)):
            return saved
        held = self.zeros(n, old.device, signed)  # it was saved before codes took any length
        held.write(old.flatten(), None)
        return {**saved, **{name + suffix: t for suffix, t in held.tensors().items()}}


KINDS: dict[str, InNumbers | InCodes] = {name: InNumbers(name) for name in ("fp32", "bf16")}
KINDS.update({name: InCodes(coder) for name, coder in FORMATS.items()})

# ---- Home --------------------------------------------------------------------------------------------------


class Home:
    """Where moments live: here, on the device of their weights. offload.py has another."""

    place: torch.device | None = None  # where moments are made; None: beside their weights

    def keep(self, held):
        """A new moment, as it is kept."""
        return held

    def settle(self):
        """Let the host wait until moments may be read and written where they live."""

    passing = staticmethod(iter)  # yields each item of a step with its moments on the device

    def note(self):
        """What the ledger adds to the row of a moment."""
        return ""


HERE = Home()

# ---- Copies ------------------------------------------------------------------------------------------------


def own_attributes(optimizer):
    """What a copy of an optimiser takes along: all but hooks and a scheduler's `step`, which are bound to the
    original. torch's own __getstate__ keeps three attributes alone.
    """
    kept = {}
    for name, value in vars(optimizer).items():
        if name != "step" and not name.startswith("_optimizer_"):
            kept[name] = value
    return kept


# ---- Save and load -----------------------------------------------------------------------------------------


class KeptState:
    """The part of `Rounded` that saves and loads its state."""

    def __getstate__(self):
        self.home.settle()
        return own_attributes(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        for bucket in self.begun():  # plain pickle makes a tensor of its own of each view
            self.adopt_state(bucket)

    def state_dict(self):
        self.home.settle()
        for bucket in self.begun():
            self.adopt_state(bucket)
        state = self.rows.wrap(super().state_dict(), self)
        state = {**state, **self.codes}
        if self.by_noise:  # what `compare` can't see in a moment
            state = {**state, "rounded": "stochastic"}
        return state

    def load_state_dict(self, state_dict):
        """Take a state_dict of the same recipe, or of torch's AdamW where states are fp32. Raises Refused for
        one of another model or recipe.

        torch's own loader casts floating states to the parameter's dtype: fp32 moments of bf16 weights would
        come back in bf16.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.take_state(self.checked_state(state_dict))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def checked_state(self, state_dict):
        """What `take_state` takes: the state of each parameter, the options of each group."""
        self.home.settle()
        state_dict = self.rows.cut(state_dict, self.state_dict)
        groups = state_dict["param_groups"]
        check_groups(groups, self)
        self._check_formats(state_dict)
        states, options = [], []
        for group, saved in zip(self.param_groups, groups, strict=True):
            options.append({**copy.deepcopy(saved), "params": group["params"]})
            self.check_group({**group, **options[-1]})
            for p, i in zip(group["params"], saved["params"], strict=True):
                states.append((p, self._checked(p, i, state_dict["state"].get(i, {}))))
        return states, options

    def take_state(self, checked):
        states, options = checked
        for p, state in states:  # nothing is refused by now: half a state would be neither
            self._take(p, state)
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)

    def _check_formats(self, state_dict):
        own = self.codes.get("codes", {})
        # format 1 of checkpoints does not tell: it had these two, of other shapes; all codes of 8 bits have
        # the same
        untold = {name: kind for name, kind in own.items() if kind in ("int8", "int4")}
        # torch's tools for checkpoints keep groups and states alone
        of_groups = [group["codes"] for group in state_dict["param_groups"] if "codes" in group]
        theirs = state_dict.get("codes", of_groups[0] if of_groups else untold)
        if theirs != own:
            said = ", ".join(f"{name} in {kind}" for name, kind in theirs.items()) or "no codes"
            raise Refused(f"optimiser state with {said}: it was written by another model or recipe")

    def _checked(self, p, number, saved):
        """A saved state of p, its moments in codes where p's are; {} of a parameter without a step."""
        if not saved and (p not in self.bucket_of or not self.bucket_of[p].low):
            return {}  # torch keeps nothing of a parameter without a step
        if p not in self.bucket_of:  # frozen here, and trained where that was saved
            self.begin_state(p)
        saved, own = dict(saved), self.state[p]
        if saved.keys() == {"momentum_buffer"}:  # of torch's SGD and Muon, which count no steps
            saved = {"step": 0, "momentum": saved["momentum_buffer"]}
        for name in self.moments:
            saved = self.kind_of(p, name).taken(name, p, self.signed.get(name, True), saved)
        for name in [*own, *saved]:
            here, there = own.get(name), saved.get(name)
            if not (holds(here, there) or name == "step" and counts(there)):
                refuse_value(f"optimiser state of parameter {number}", name, there, here)
        return saved

    def _take(self, p, saved):
        """Copy a state that was checked."""
        if p not in self.bucket_of:
            return
        state = self.state[p]
        for name in state.keys() - {"step"}:
            if saved:
                state[name].copy_(saved[name])
            else:
                state[name].zero_()
        state["step"] = int(saved["step"]) if saved else 0


def holds(view, t):
    """Whether a view of the state can hold the values of t, which nothing is lost of."""
    both = torch.is_tensor(t) and torch.is_tensor(view)
    if not both or (t.shape, t.layout, t.is_meta) != (view.shape, view.layout, view.is_meta) or was_freed(t):
        return False
    both_float = t.is_floating_point() and view.is_floating_point() and t.itemsize > 1
    widens = both_float and torch.promote_types(t.dtype, view.dtype) == view.dtype
    return t.dtype == view.dtype or widens


def refuse_value(state, name, there, here):
    """Raise Refused for what a saved state has of a name, `there`, that can't be held `here`."""
    differs = f"{name} is {described(there)} there, and {described(here)} here"
    raise Refused(f"{state}: {differs}: it was written by another model or recipe")


def counts(t):
    """Whether t is a number of steps."""
    one = isinstance(t, int | float) or torch.is_tensor(t) and t.numel() == 1
    return one and 0 <= float(t) < math.inf


def described(t):
    """What is in a state, in words: of a tensor its dtype and shape."""
    if t is None:
        return "missing"
    if isinstance(t, int | float):
        return str(t)
    if not torch.is_tensor(t):
        return f"a {type(t).__name__}"
    dtype = str(t.dtype).removeprefix("torch.")
    where = "" if t.device.type in ("cpu", "cuda") else f" on {t.device.type}"
    return f"{dtype} {list(t.shape)}{where}"
