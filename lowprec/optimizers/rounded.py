"""AdamW, and what every optimiser here shares: arithmetic in fp32, and writes as a recipe says.

    optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic")        # bf16 weights, any loop
    loss.backward()
    optimizer.step()

Read `adamw`, the paper, then `write_step`, the only place where anything is rounded, then `Rounded`, which
gathers tensors into a few flat buckets and takes such a step of each, or lets a kernel write the same bits.
A new optimiser is a function like `adamw`, and a class with its moments and its numbers.
"""

import functools
import inspect
import itertools
import math
import operator
from typing import NamedTuple

import torch

from .. import kernels
from ..errors import Refused, check_choice
from ..formats import FORMATS
from ..kernels.compiled import fused
from ..machine import settle_vector_math
from ..rounding import (
    ALONE,
    LOST_BITS,
    WAY_OF_MASTER,
    Noise,
    chosen_way,
    key_words,
    noise_bits,
    on_grid,
)
from .answers import RoundedAnswers
from .buckets import ALL, Bucket, StepTable, Writing, local_tensor, rows_of, scale_of, whole_alone
from .groups import OPTIONS_NOT_OURS, check_dtypes, check_numbers, check_options, check_rule, name_of
from .state import HERE, KINDS, KeptState, described, holds

# ---- AdamW -------------------------------------------------------------------------------------------------


class AdamWNumbers(NamedTuple):
    """What a step of AdamW reads."""

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    root_correction: float  # sqrt(1 - beta2^step): divides the root of exp_avg_sq
    eps: float
    rate: float  # -learning rate / (1 - beta1^step)


def adamw(g, moments, n):
    """(fp32 update, new moments): AdamW (arXiv 1711.05101, algorithm 2) before anything is rounded. Decay is
    that of all optimisers here, in `write_step`. n: AdamWNumbers, each a 0-dim tensor.
    """
    m, v = moments
    m = (g - m) * n.one_minus_beta1 + m  # line 7
    v = n.one_minus_beta2 * g * g + v * n.beta2  # line 8
    update = (n.rate * m) / (v.sqrt() / n.root_correction + n.eps)  # lines 9, 10 and 12
    return update, (m, v)


kernels.RULES[adamw] = "adamw"

# ---- One step ----------------------------------------------------------------------------------------------


def write_step(direction, kind, way, p, g, moments, low, row, key, stochastic):
    """One step of an optimiser on flat vectors [n], in place. All arithmetic is fp32; only the writes differ.

    direction: as `adamw`; kind: the class of its numbers; way: a rounding.Way. low: [what completes p], or
    []. row, key: of a buckets.StepTable. stochastic: whether noise rounds, or to nearest.
    """
    decay, scale, *numbers = row.unbind()
    n = kind(*numbers)
    of_weight, of_moments = None, [None] * len(moments)
    if stochastic:
        first, second = noise_bits(p.numel(), key)
        # bf16 takes the low 16 bits: two words are noise for a weight and three moments
        of_weight, of_moments = first, [first >> 16, second, second >> 16][: len(moments)]
    update, new = direction(g.float() * scale, [m.float() for m in moments], n)
    # decay is part of the fp32 sum: lr * decay near 1e-6 of a weight would never survive a write of its own
    x = way.held(p, *low) * decay + update
    now = way.write(x, p, of_weight, *low)
    new = way.returned(x - now, new, n)
    for m, value, noise in zip(moments, new, of_moments, strict=True):
        m.copy_(on_grid(value, LOST_BITS[m.dtype], noise))


@functools.cache
def step_kernel(direction, kind, way):
    """`write_step` of these, as torch.compile takes it: one function for each."""

    def kernel(*flat):
        write_step(direction, kind, way, *flat)

    return kernel


def run_step(direction, s):
    """Let the first kernel that takes a kernels.Step carry it out, or `write_step`."""
    if (s.compiled or s.exact) and kernels.carried_out(s):
        return
    (p,), (g,) = s.weights, s.gradients
    values = [held.read(s.compiled) for held in s.moments]
    how = direction, type(s.numbers), s.way
    flat = p, g, values, s.low, s.row, s.key, s.stochastic
    if s.compiled:
        fused(step_kernel(*how), *flat)
    else:
        write_step(*how, *flat)
    for held, value, key in zip(s.moments, values, s.keys, strict=True):
        held.put_back(value, key, s.compiled)


# ---- What all share ----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Values `start` to `end` of a piece, which are updated at once, and the row of the table for them."""

    row: int
    start: int
    end: int


class Work(NamedTuple):
    """The next step of one piece: a bucket, or one parameter of it. numbers: what `Rounded.numbers` said."""

    piece: Bucket
    numbers: tuple
    step: int
    table: StepTable
    parts: list


class WithoutCompiler(torch.optim.Optimizer):
    """torch's, without what keeps torch.compile out of these calls: the first of them would load the
    compiler, which takes as long as loading torch.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)


class Rounded(RoundedAnswers, KeptState, WithoutCompiler):
    """What every optimiser here shares. A new one has `moments`, `numbers` and `direction`; see AdamW.

    params: fp32 or bf16 parameters, mixed freely, or groups with rates, betas and decay of their own. How
    bf16 weights are written: `update` is 'nearest', 'stochastic' or 'eco' (to nearest, and what is rounded
    away goes into the momentum, arXiv 2601.22101; the rest is stochastic); `kahan` adds a bf16 compensation
    buffer (2 bytes); `master` 'split' adds an int16 remainder (2 bytes, the exact fp32 master), 'split8' an
    int8 one (1 byte: a master of 24 bits, which `update` rounds), 'fp32' a full copy (4 bytes). Moments are
    held as `states` says, or each as its keyword or `kinds`, {moment: kind}, says: 'fp32', 'bf16', or codes
    of `formats.FORMATS` with a scale a block (small tensors in fp32), rounded as `update` says. Rounding
    noise is a function of (seed, step, place in the parameter list). compiled: fuse the step by a compiler.
    away: a lowprec.Offload, which keeps the moments in the memory of the CPU. param_names: {parameter: its
    name}, for what is refused. A parameter that is frozen has no state before its first gradient. fused,
    foreach, and flags of torch's that are off, as amsgrad: taken for its sake, and do nothing.
    Raises Refused for other dtypes of parameters, for tensors without memory of their own, and for a
    state_dict of other shapes.
    """

    moments: tuple[str, ...] = ()  # names of the values that it keeps for each weight
    sites: dict = {}  # {name: Site} of those that not every optimiser has
    flags: dict = {}  # {flag: default}, where its own default is another than AdamW's
    of_run: dict = {}  # {option: default} of build.build, where torch's optimiser of this name has another
    # the optimiser of the parameters that this one does not take, see build.divided_groups
    others: str | None = None
    signed = {"exp_avg": True, "exp_avg_sq": False}  # whether values may be negative; True for others
    # (error, new moments, numbers) -> new moments, such that the next steps add up to the error: for 'eco'
    feedback = None
    # values of a coded tensor that are in fp32 at once, 8 MiB for both moments, which stay in the cache of a
    # CPU; on a GPU four times as many, for a quarter of the kernels
    PIECE = 1 << 20

    def __init__(
        self,
        params,
        defaults,
        *,
        update="nearest",
        kahan=False,
        master="none",
        seed=0,
        compiled=True,
        states="fp32",
        kinds=None,
        away=None,
        param_names=None,
        fused=None,
        foreach=None,
        **named,
    ):
        settle_vector_math()
        check_choice("update", update, ("nearest", "stochastic", "eco"))
        check_choice("master", master, ("none", *WAY_OF_MASTER))
        check_choice("kahan", kahan, (False, True))
        if not isinstance(seed, int):
            raise Refused(f"seed={seed!r}: a whole number")
        self.update, self.kahan, self.master = update, kahan, master
        self.way = chosen_way(update, kahan, master, self.feedback)  # of bf16 weights
        self.by_noise = update != "nearest"  # what is rounded
        self.seed, self.compiled, self.home = seed, compiled, away or HERE
        self.param_names = param_names or {}
        check_rule(named, "an optimiser", type(self).__name__)
        kinds_by_name = {option: kind for option, kind in named.items() if option not in OPTIONS_NOT_OURS}
        self.kinds = {**dict.fromkeys(self.moments, states), **kinds_by_name, **(kinds or {})}
        if unknown := set(self.kinds) - set(self.moments):
            known = ", ".join(self.moments)
            raise TypeError(f"{type(self).__name__} has no option '{min(unknown)}'; its moments: {known}")
        for name, kind in self.kinds.items():
            check_choice(name, kind, KINDS)
        # {moment: Format} of those in codes
        self.coders = {name: FORMATS[kind] for name, kind in self.kinds.items() if kind in FORMATS}
        for coder in self.coders.values():
            coder.require()
        formats = {name: coder.name for name, coder in self.coders.items()}
        self.codes = {"codes": formats} if formats else {}  # what a state_dict and its groups tell of them
        self.rows = ALL
        self._buckets = []  # (index of the parameter group, bucket)
        self._params_of_groups = []  # [parameters] of each, as they came
        self.bucket_of = {}  # parameter that has a state -> its bucket
        self.held_of = {}  # parameter -> {moment: state.Held of it}
        self.given_of = {}  # parameter -> [(name, view, its address)] that its state was given
        self._position = 0  # of the next parameter, by which its noise is numbered
        super().__init__(params, defaults)

    def numbers(self, group, step):
        """What `direction` reads at this step, from a group's options: a NamedTuple of float."""
        raise NotImplementedError

    @staticmethod
    def direction(g, moments, n):
        """(update, new moments) of gradient g [n] and old moments, fp32 [n] each. n: `numbers`, each a 0-dim
        tensor. Elementwise: torch.compile fuses it.
        """
        raise NotImplementedError

    def check_group(self, group):
        """Raises Refused for options of a parameter group with which training can't be meant. group: all that
        it has, defaults too.
        """
        check_numbers(group)
        self.way.check(group, type(self).__name__)

    # -- parameters and their state

    def add_param_group(self, param_group):
        check_options(param_group, self)
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        rows = rows_of(params)
        try:
            check_dtypes([p for p in params if p.requires_grad], self)
            if rows is not ALL and not self.by_rows:
                raise Refused(whole_alone(type(self).__name__))
        except Refused:
            self.param_groups.pop()
            raise
        if rows is not ALL:
            self.rows = rows
        group.update(self.codes)
        self._params_of_groups.append(list(params))
        keys, blocks = [], []  # parameters of equal keys may share a bucket
        for i, p in enumerate(params):
            kinds = [self.kind_of(p, name) for name in self.moments]
            blocks.append(max((kind.together for kind in kinds), default=1))
            # a block of codes must not cross into the next tensor: one that ends within a block is alone
            alone = i if p.numel() % blocks[-1] or not self.by_rows else None
            keys.append((p.dtype, p.device, *[kind.name for kind in kinds], alone))
        for bucket in rows.buckets(params, keys, blocks):
            bucket.start += self._position
            trained = [p.requires_grad for p in bucket.params]
            for own in [bucket] if all(trained) else bucket.one_by_one():
                self._buckets.append((len(self.param_groups) - 1, own))
                if own.params[0].requires_grad:
                    self._begin(own)
        self._position += sum(p.numel() for p in params)

    def shape(self, p, name):
        """The shape in which a moment of p is held; one without entries where it keeps none."""
        return p.shape

    def kind_of(self, p, name):
        """The kind in which a moment of p is held, see state.KINDS."""
        kind = KINDS[self.kinds[name]]
        return kind if math.prod(self.shape(p, name)) >= kind.smallest else KINDS["fp32"]

    def _writing(self, bucket):
        """The Writing of a bucket that has its moments."""
        first, way = bucket.params[0], self.way
        if way.name is not None and first.dtype != torch.bfloat16:
            way = ALONE  # nothing completes fp32
        exact = kernels.RULES.get(self.direction) == "adamw"
        if self.by_noise and first.dtype in way.loses:
            exact = False
        if not all(held.reads_fp32 for held in bucket.moments.values()):
            exact = False
        names, at_once = self.moments, None  # of those that have a key of noise of their own
        if self.by_rows:
            names = [name for name, held in bucket.moments.items() if held.keyed]
        keyed = tuple(Noise.EXP_AVG + self.moments.index(name) for name in names)
        if self.by_rows and keyed:
            # a large coded tensor is updated in parts, so that few of its moments are in fp32 at once
            at_once = self.PIECE if first.is_cpu else 4 * self.PIECE
        return Writing(way, exact, keyed, at_once)

    def _begin(self, bucket):
        """Zeros for the moments of a bucket, and what completes its weights as they are now."""
        for name in self.moments:
            if any(math.prod(self.shape(p, name)) for p in bucket.params):
                bucket.moments[name] = self.home.keep(self.new_moment(bucket, name))
        bucket.writing = self._writing(bucket)
        way = bucket.writing.way
        if way.name is not None:
            bucket.low = {way.name: way.low(bucket.gather(bucket.params).detach())}
        bucket.begun = True
        for p in bucket.params:
            self.bucket_of[p] = bucket
            self.state[p] = {"step": 0}
        self.share_state(bucket)

    def low_part(self, p):
        bucket = self.bucket_of.get(p)
        return None if bucket is None else self.state[p].get(bucket.writing.way.name)

    def begun(self):
        """The buckets that have a state."""
        return [bucket for _, bucket in self._buckets if bucket.begun]

    def begin_state(self, p):
        """Begin the state of a parameter that was frozen."""
        for _, bucket in self._buckets:
            if not bucket.begun and bucket.params[0] is p:
                check_dtypes([p], self)
                self._begin(bucket)

    def new_moment(self, bucket, name):
        """A state.Held of zeros."""
        first = bucket.params[0]
        home, shape = self.home.place or first.device, self.shape(first, name)
        kind, signed = self.kind_of(first, name), self.signed.get(name, True)
        if shape == first.shape:
            return kind.zeros(bucket.numel, home, signed)
        return kind.zeros(math.prod(shape), home, signed, shape)

    def share_state(self, bucket):
        """Give each parameter its views of the bucket's state, which checkpoints hold."""
        held, states = bucket.of_each()
        for p, moments, views in zip(bucket.params, held, states, strict=True):
            self.held_of[p] = moments
            self.state[p] = {"step": self.state[p]["step"], **views}
            self.given_of[p] = [(name, view, view.data_ptr()) for name, view in views.items()]
        bucket.names = list(states[0])
        bucket.given = [view for views in states for view in views.values()]
        bucket.places = [view.data_ptr() for view in bucket.given]

    def adopt_state(self, bucket):
        """Take the values of tensors that somebody put into `state`, and begin anew where it was emptied, as
        torch does. Raises Refused for a tensor that the bucket can't hold.
        """
        states = [self.state.get(p, {}) for p in bucket.params]
        now = [state.get(name) for state in states for name in bucket.names]
        if all(map(operator.is_, now, bucket.given)) and [t.data_ptr() for t in now] == bucket.places:
            return
        _, own = bucket.of_each()
        taken = []  # {name: values} of each parameter, {} where its state was emptied
        for p, state, views in zip(bucket.params, states, own, strict=True):
            named = views if state.keys() - {"step"} else {}
            for name, view in named.items():
                if not holds(view, state.get(name)) or state[name].device != view.device:
                    here, there = described(view), described(state.get(name))
                    raise Refused(
                        f"{name} of {name_of(p, self)} is {there} in the optimiser's state, and steps hold "
                        f"{here}: assign one of that kind, clear the whole state, or make a new optimiser"
                    )
            taken.append({name: state[name] for name in named})
        # in new memory: the old may be the state of another parameter by now
        for name, held in bucket.moments.items():
            bucket.moments[name] = self.home.keep(held.mapped(torch.clone))
        bucket.low = {name: low.clone() for name, low in bucket.low.items()}
        _, own = bucket.of_each()
        for p, state, views, values in zip(bucket.params, states, own, taken, strict=True):
            self.state[p] = {"step": int(state.get("step", 0)) if values else 0}
            for name, view in views.items():
                if values:
                    view.copy_(values[name])
                elif name == bucket.writing.way.name:
                    view.copy_(bucket.writing.way.low(local_tensor(p)))
                else:
                    view.zero_()
        self.share_state(bucket)

    def tensor_by_tensor(self, bucket):
        """A bucket for each parameter of one, with the same noise and its share of the state."""
        found = bucket.one_by_one()
        for alone in found:
            if alone is not bucket:
                (p,) = alone.params
                alone.begun, alone.writing = True, bucket.writing
                for name, held in self.held_of[p].items():
                    alone.moments[name] = held.mapped(torch.flatten)
                alone.low = {name: self.state[p][name].view(-1) for name in bucket.low}
        return found

    # -- one step

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        """One update. A parameter without a gradient is left alone, as in torch.

        grads: {parameter: tensor} in place of p.grad. grad_scale: a number or a 0-dim tensor that multiplies
        them, or one for each of them, {parameter: number}.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        now = [group["params"] for group in self.param_groups]
        known = self._params_of_groups
        same = list(map(len, now)) == list(map(len, known))
        if not (same and all(map(operator.is_, itertools.chain(*now), itertools.chain(*known)))):
            ways = "add_param_group takes more of them; for others in their place make a new optimiser"
            raise Refused(f"the parameters of param_groups were changed by hand: {ways}")
        grad_of = operator.attrgetter("grad") if grads is None else grads.get
        one_scale_each = isinstance(grad_scale, dict)
        pieces = []
        for index, bucket in self._buckets:
            pieces += [(index, piece) for piece in self._pieces(bucket, grad_of, one_scale_each)]
        work = self.plan(pieces, 1.0 if one_scale_each else grad_scale)
        for exchange in self.rows.before_step:
            exchange([item.piece for item in work], grad_of)
        for item in self.home.passing(work):
            self.carry_out(item, grad_of, grad_scale)
        return loss

    def _pieces(self, bucket, grad_of, apart):
        """What a bucket updates at once: all of it, or tensor by tensor where some have no gradient, another
        dtype of it, or other steps behind them, or where they are to be `apart`.
        """
        params = bucket.params
        grads = [grad_of(p) for p in params]
        present = [g for g in grads if g is not None]
        if not present:
            return []
        if not bucket.begun:
            self.begin_state(params[0])
        # kernels go by pointers: nothing that they are given may be shorter than the state was made for
        if any(g.is_sparse for g in present) or not (
            [g.shape for g in present] == [p.shape for p in params] == bucket.shapes
            and {p.dtype for p in params} == {bucket.dtype}
            and all(g.data_ptr() for g in present)
            and all(p.data_ptr() and p.is_contiguous() for p in params)
        ):
            self.check_tensors(bucket, grads)
        self.adopt_state(bucket)
        steps = {self.state[p].get("step") for p in params}
        dtypes = {g.dtype for g in present}
        if not apart and len(present) == len(grads) and len(steps) == 1 and len(dtypes) == 1:
            return [bucket]
        alone = self.tensor_by_tensor(bucket)
        return [piece for piece, g in zip(alone, grads, strict=True) if g is not None]

    def check_tensors(self, bucket, grads):
        """Raises Refused for tensors that are not what the state of a bucket was made for. A parameter that
        was cast is written in its new dtype from now on.
        """
        bucket.check(functools.partial(name_of, optimizer=self), grads)
        if any(p.dtype != bucket.dtype for p in bucket.params):
            check_dtypes(bucket.params, self)
            if self.way.name is not None:
                late = "a parameter was cast after the optimiser was made"
                beside = f"its {self.way.name} ({self.way.site})"
                raise Refused(f"{late}, and {beside} does not fit it: cast the model first")
            if len({p.dtype for p in bucket.params}) == 1:
                bucket.dtype = bucket.params[0].dtype
                bucket.writing = self._writing(bucket)

    def plan(self, pieces, grad_scale=1.0):
        """The next step of these pieces, [(index of the group, bucket)]: a list of Work. grad_scale: a number
        or a tensor. A part of a piece has a row of the table, and behind it those of its `keyed` moments.
        """
        work, tables = [], {}
        for index, piece in pieces:
            first, group = piece.params[0], self.param_groups[index]
            table = tables.setdefault(first.device, StepTable(first.device))
            if "step" not in self.state[first]:
                raise Refused("the step of a state was deleted: restore it, or clear the whole state")
            step = self.state[first]["step"] + 1
            decay = 1 - float(group["lr"]) * group["weight_decay"]
            numbers = self.numbers(group, step)
            if not math.isfinite(decay) or any(map(math.isnan, numbers)):
                self.check_group(group)  # a schedule divides by 0, say
            parts = []
            for start, end, position, ahead in piece.rows(piece.writing.at_once):
                parts.append(Part(len(table.keys), start, end))
                for kind in (Noise.WEIGHT, *piece.writing.keyed):
                    table.numbers.append([decay, 1.0, *numbers])
                    table.keys.append([*key_words(self.seed, step, position, kind, ahead), 0])
            work.append(Work(piece, numbers, step, table, parts))
        for table in tables.values():
            table.fill(grad_scale)
        return work

    def carry_out(self, work, grad_of, grad_scale=1.0):
        """Update one piece. grad_scale: {parameter: number} is still to be written into the table; one for
        all is there.
        """
        piece, parts, params = work.piece, work.parts, work.piece.params
        grads = [grad_of(p).resolve_neg() for p in params]  # kernels read memory, not torch's mark on it
        for p in params:
            self.state[p]["step"] = work.step
        if isinstance(grad_scale, dict):
            for part in parts:
                work.table.numbers[part.row][kernels.PLACE_OF_SCALE] = scale_of(grad_scale, params[0])
        if self.compiled and len(params) > 1 and len(parts) == 1:
            # small tensors are updated where they are, if a kernel takes them so: they need no copies then
            if kernels.carried_out(self._step_of(work, parts[0], params, grads)):
                return
        weights, g = piece.gather(params), piece.gather_gradients(grads)
        for part in parts:
            at = slice(part.start, part.end)
            self._update(work, part, weights[at], g[at])
        piece.scatter(weights, params)

    def _update(self, work, part, p, g):
        """Update flat weights p [n] and their state from gradient g [n], in place."""
        run_step(self.direction, self._step_of(work, part, [p], [g]))

    def _step_of(self, work, part, weights, gradients):
        """What a kernel is given, see kernels.Step."""
        piece, table, row = work.piece, work.table, part.row
        moments, low = list(piece.moments.values()), list(piece.low.values())
        if part.end - part.start < piece.numel:
            moments = [held.part(part.start, part.end) for held in moments]
            low = [t[part.start : part.end] for t in low]
        keys = []
        for held in moments:
            row += held.keyed  # their rows follow that of the weight
            keys.append(table.keys[row] if self.by_noise and held.keyed else None)
        return kernels.Step(
            rule=kernels.RULES.get(self.direction),
            exact=piece.writing.exact,
            weights=weights,
            gradients=gradients,
            moments=moments,
            keys=keys,
            way=piece.writing.way,
            low=low,
            numbers=work.numbers,
            row=table.numbers[part.row],
            key=table.keys[part.row],
            stochastic=self.by_noise,
            compiled=self.compiled,
        )


# ---- AdamW as an optimiser ---------------------------------------------------------------------------------


class AdamW(Rounded):
    """AdamW (arXiv 1711.05101), all arithmetic in fp32 in the order of torch.optim.AdamW.

    Defaults are torch's, weight decay of 0.01 among them. Arguments beyond torch's: see Rounded; exp_avg and
    exp_avg_sq say how the moments are held. With fp32 moments and an exact master the result equals
    torch.optim.AdamW on fp32 weights bit for bit on a CPU.
    """

    moments = ("exp_avg", "exp_avg_sq")
    direction = staticmethod(adamw)

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, **writing):
        options = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(params, options, **writing)

    def numbers(self, group, step):
        beta1, beta2 = group["betas"]
        return AdamWNumbers(
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            root_correction=(1 - beta2**step) ** 0.5,
            eps=group["eps"],
            rate=-float(group["lr"]) / (1 - beta1**step),
        )

    @staticmethod
    def feedback(error, moments, n):
        m, v = moments
        # decaying by beta1, it makes steps of (1 - beta1) error, beta1 (1 - beta1) error, ...
        share = n.one_minus_beta1 / (1 - n.one_minus_beta1)
        back = error * share * (v.sqrt() / n.root_correction + n.eps) / n.rate
        return torch.where(error == 0, m, m + back), v  # a rate of 0 makes no error
