"""Optimisers whose arithmetic is fp32 and whose writes are as a recipe says.

    optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic")        # bf16 weights, any loop
    loss.backward()
    optimizer.step()

A step: tensors are gathered into a few flat buckets, the optimiser's `direction` says the fp32 update, and
the sum is written into weights, low parts and moments. `step_kernel` is that in plain torch; kernels.choose
picks who carries it out. state.py keeps the state; answers.py has what can be asked of an optimiser.
"""

import functools
import inspect
import itertools
import operator
from typing import NamedTuple

import torch

from ..errors import Refused, check_choice
from ..formats import FORMATS
from ..kernels import choose
from ..kernels.numbers import PLACE_OF_SCALE, WeightNumbers, named_numbers
from ..machine import settle_vector_math
from ..rounding import (
    DTYPE_OF_NAME,
    NO_AVERAGE,
    Noise,
    exact_weight,
    key_words,
    noise_bits,
    rounded,
    value_once_written,
    write_weight,
)
from ..sites import SITES
from .answers import RoundedAnswers
from .buckets import (
    ENTRIES_A_BLOCK,
    Bucket,
    RankBucket,
    StepTable,
    exchange,
    group_tensors,
    is_spread,
    local_tensor,
    scale_of,
    whole_alone,
)
from .groups import OPTIONS_NOT_OURS, SPARSE_GRADIENT, check_dtypes, check_numbers, check_options, check_rule
from .state import KeptState, low_of

# ---- One step ----------------------------------------------------------------------------------------------


@functools.cache
def step_kernel(direction, kind, feedback=None):
    """One step of an optimiser on flat vectors [n], in place. All arithmetic is fp32; only the writes differ
    by recipe. direction: of the optimiser; kind: the class of its numbers; feedback: see `Rounded.feedback`,
    where what the write of a weight rounds away is to come back.
    """

    def kernel(p, g, moments, low, row, key, stochastic, average):
        weight, own = named_numbers(row, kind)
        old = [m.float() for m in moments]
        update, new = direction(g.float() * weight.scale, old, own)
        # weight decay belongs to the fp32 update: lr*wd near 1e-6 of a weight would never survive a write of
        # its own
        x = exact_weight(p, low) * weight.decay + update
        noise = None
        noise_of_moments = [None] * len(moments)
        if stochastic:
            noise, second = noise_bits(p.numel(), key)
            noise_of_moments = [noise >> 16, second, second >> 16]
        if feedback is not None:
            noise = None
            new = feedback(x - value_once_written(x, p.dtype), new, own)
        write_weight(x, p, low, noise)
        average.follow(x, p, low, noise)
        for m, value, bits in zip(moments, new, noise_of_moments, strict=False):
            m.copy_(rounded(value, m.dtype, bits))

    return kernel


# ---- Rounded -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Values `start` to `end` of a piece, which are updated at once, and the row of the table for them."""

    row: int
    start: int
    end: int


class Work(NamedTuple):
    """The next step of one piece: a bucket, or one parameter of it. numbers: what `Rounded.numbers` said."""

    numbers: tuple
    step: int
    piece: Bucket
    table: StepTable
    parts: list


class Plain(torch.optim.Optimizer):
    """torch's, without what keeps torch.compile out of these calls: the first of them would load the
    compiler, which takes as long as loading torch.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)


class Rounded(RoundedAnswers, KeptState, Plain):
    """What every optimiser here shares. A new one has `moments`, `numbers` and `direction`; see AdamW.

    params: fp32 or bf16 parameters, mixed freely, or groups with rates, betas and decay of their own. How
    bf16 weights are written: `update` is 'nearest', 'stochastic' or 'eco' (to nearest, and what is rounded
    away goes into the momentum, arXiv 2601.22101; the rest is stochastic); `kahan` adds a bf16 compensation
    buffer (2 bytes); `master` 'split' adds an int16 remainder (2 bytes, the exact fp32 master), 'split8' an
    int8 one (1 byte: a master of 24 bits, which `update` rounds), 'fp32' a full copy (4 bytes). Each moment
    is held as its keyword or `kinds`, {moment: kind}, says: 'fp32', 'bf16', or codes of `formats.FORMATS`
    with a scale a block (small tensors in fp32), rounded as `update` says. Rounding noise is a function of
    (seed, step, place in the parameter list). compiled: fuse the step by a compiler.
    away: an offload.Offload, which keeps the moments in the memory of the CPU. `average` may be set to an EMA
    of the same parameters whose `update` follows each step: what it can, the step then moves in the pass that
    writes the weights. fused, foreach: taken for torch's sake, and do nothing: a step is fused already; and
    amsgrad and maximize, where they are False.
    Raises Refused for other dtypes of parameters, and for a state_dict of other shapes.
    """

    moments: tuple[str, ...] = ()  # names of the values that it keeps for each weight
    sites: dict = {}  # {name: Site} of those that not every optimiser has
    flags: dict = {}  # {flag: default}, where its own default is another than AdamW's
    of_run: dict = {}  # {option: default} of build.build, where torch's optimiser of this name has another
    average = None  # an EMA that is moved within the step
    # the optimiser of the parameters that this one does not take, see build.divided_groups
    others: str | None = None
    signed = {"exp_avg": True, "exp_avg_sq": False}
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
        kinds=None,
        away=None,
        fused=None,
        foreach=None,
        **named,
    ):
        settle_vector_math()
        check_choice("update", update, SITES["update"].values)
        check_choice("master", master, SITES["master"].values)
        if not isinstance(kahan, bool):
            raise Refused(f"kahan={kahan!r}: True or False")
        if not isinstance(seed, int):
            raise Refused(f"seed={seed!r}: a whole number")
        if update == "eco" and self.feedback is None:
            name = type(self).__name__
            raise Refused(f"update='eco': {name} has no momentum that takes rounding errors; AdamW has")
        if update == "eco" and (kahan or master != "none"):
            raise Refused("update='eco' beside kahan or a master, which keep what it rounds away: choose one")
        if kahan and master != "none":
            raise Refused(f"kahan beside master={master!r}, which keeps what is rounded away: drop kahan")
        self.update, self.kahan, self.master = update, kahan, master
        self.seed, self.compiled, self.away = seed, compiled, away
        check_rule(named, "an optimiser", type(self).__name__)
        kinds_by_name = {option: kind for option, kind in named.items() if option not in OPTIONS_NOT_OURS}
        self._hold_moments({**kinds_by_name, **(kinds or {})})
        self._buckets = []  # (index of the parameter group, bucket)
        self._params_of_groups = []  # [parameters] of each, as they came
        self.rank_buckets = {}  # parameter that is spread over ranks -> its bucket
        self._position = 0  # of the next parameter, by which its noise is numbered
        super().__init__(params, defaults)

    def _hold_moments(self, kinds):
        """Set how each moment is held. kinds: {moment: kind}, 'fp32' for those left out."""
        if unknown := set(kinds) - set(self.moments):
            raise TypeError(f"{type(self).__name__} has no option '{sorted(unknown)[0]}'")
        self.coders = {}  # {moment: Format} of those in codes
        self.dtypes = {}  # {moment: dtype} of tensors that are not coded
        for name in self.moments:
            kind = kinds.get(name, "fp32")
            check_choice(name, kind, ("fp32", "bf16", *FORMATS))
            self.dtypes[name] = DTYPE_OF_NAME.get(kind, torch.float32)
            if kind in FORMATS:
                self.coders[name] = FORMATS[kind]
                self.coders[name].require()

    @property
    def by_noise(self):
        """Whether what is rounded is rounded by noise."""
        return self.update != "nearest"

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

    def _check_params(self, params):
        check_dtypes(params, type(self).__name__)
        if not self.by_rows and any(map(is_spread, params)):
            raise Refused(whole_alone(type(self).__name__))

    def add_param_group(self, param_group):
        check_options(param_group, self)
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        try:
            self._check_params(params)
        except Refused:
            self.param_groups.pop()
            raise
        self._params_of_groups.append(list(params))
        keys = [self.bucket_key(i, p) for i, p in enumerate(params)]
        for bucket in group_tensors(params, keys, self._block):
            bucket.start += self._position
            bucket.params = [params[i] for i in bucket.indices]
            bucket.dtype = bucket.params[0].dtype
            if isinstance(bucket, RankBucket):
                self.rank_buckets[bucket.params[0]] = bucket
            bucket.state = self.new_state(bucket)
            for p in bucket.params:
                self.state[p] = {"step": 0}
            self.share_state(bucket)
            self._buckets.append((len(self.param_groups) - 1, bucket))
        self._position += sum(p.numel() for p in params)

    def _block(self, p):
        return ENTRIES_A_BLOCK if self.coded_names(p) else 1

    # -- one step

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        """One update. A parameter without a gradient is left alone, as in torch.

        grads: {parameter: tensor} in place of p.grad. grad_scale: a number or a 0-dim tensor that multiplies
        them, or one for each of them, {parameter: number}.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_unchanged()
        grad_of = operator.attrgetter("grad") if grads is None else grads.get
        one_scale_each = isinstance(grad_scale, dict)
        pieces = []
        for index, bucket in self._buckets:
            pieces += [(index, piece) for piece in self._pieces(bucket, grad_of, one_scale_each)]
        work = self.plan(pieces)
        exchange([item.piece for item in work], grad_of)
        if not one_scale_each and (torch.is_tensor(grad_scale) or grad_scale != 1.0):
            for table in {id(item.table): item.table for item in work}.values():
                table.all_numbers[:, PLACE_OF_SCALE] = grad_scale
        if self.away is not None:
            work = self.away.passing(work)
        for item in work:
            self.carry_out(item, grad_of, grad_scale)
        return loss

    def _check_unchanged(self):
        """Raises Refused where somebody's hand changed what the buckets hold."""
        now = [group["params"] for group in self.param_groups]
        sizes = [len(params) for params in self._params_of_groups]
        all_known = itertools.chain(*self._params_of_groups)
        same = [len(params) for params in now] == sizes
        if not (same and all(map(operator.is_, itertools.chain(*now), all_known))):
            ways = "add_param_group takes more of them; for others in their place make a new optimiser"
            raise Refused(f"the parameters of param_groups were changed by hand: {ways}")
        if self._buckets and not self.state:
            raise Refused("the optimiser's state was taken away: make a new optimiser to begin anew")

    def _check_cast(self, bucket):
        check_dtypes(bucket.params, type(self).__name__)
        if self.kahan or self.master != "none":
            kept = "kahan" if self.kahan else f"master={self.master!r}"
            late = "a parameter was cast after the optimiser was made"
            raise Refused(f"{late}, and {kept} does not fit it: cast the model first")

    def _pieces(self, bucket, grad_of, apart):
        """What a bucket updates at once: all of it, or tensor by tensor where some have no gradient, another
        dtype of it, or other steps behind them, or where they are to be `apart`.
        """
        grads = [grad_of(p) for p in bucket.params]
        present = [g for g in grads if g is not None]
        if any(g.is_sparse for g in present):
            raise Refused(SPARSE_GRADIENT)
        if not present:
            return []
        if {p.dtype for p in bucket.params} != {bucket.dtype}:
            self._check_cast(bucket)
        steps = {self.state[p]["step"] for p in bucket.params}
        dtypes = {g.dtype for g in present}
        if not apart and len(present) == len(grads) and len(steps) == 1 and len(dtypes) == 1:
            return [bucket]
        alone = [bucket] if isinstance(bucket, RankBucket) else self.tensor_by_tensor(bucket)
        return [piece for piece, g in zip(alone, grads, strict=True) if g is not None]

    def plan(self, pieces):
        """The next step of these pieces, [(index of the group, bucket)]: a list of Work."""
        work, tables = [], {}
        for index, piece in pieces:
            first = piece.params[0]
            table = tables.setdefault(first.device, StepTable(first.device))
            step = self.state[first]["step"] + 1
            numbers = self.numbers(self.param_groups[index], step)
            parts = self._add_rows(table, index, numbers, step, piece)
            work.append(Work(numbers, step, piece, table, parts))
        for table in tables.values():
            table.fill()
        return work

    def _add_rows(self, table, index, numbers, step, piece):
        """Add the rows of a piece to the table; returns its Parts. A large coded piece has several, so that
        few of its moments are in fp32 at once. Behind a part's row are those with the keys of its codes.
        """
        numbers = [*self._weight_numbers(index), *numbers]
        coded = self.coded_names(piece.params[0])
        size = None
        if coded:
            size = self.PIECE if piece.params[0].is_cpu else 4 * self.PIECE
        parts = []
        for start, end, position, ahead in piece.rows(size):
            row = table.add(numbers, key_words(self.seed, step, position, ahead=ahead))
            parts.append(Part(row, start, end))
            for name in coded:
                kind = Noise.EXP_AVG + self.moments.index(name)
                table.add(numbers, key_words(self.seed, step, position, kind, ahead))
        return parts

    def _weight_numbers(self, index):
        """The WeightNumbers of a group. The scale of gradients is written into the table once it is known."""
        group = self.param_groups[index]
        return WeightNumbers(decay=1 - float(group["lr"]) * group["weight_decay"], scale=1.0)

    def carry_out(self, work, grad_of, grad_scale):
        """Update one piece. grad_scale: as of `step`; one for each parameter is still to be written into the
        table, one for all is there.
        """
        piece, parts = work.piece, work.parts
        params = [local_tensor(p) for p in piece.params]
        grads = [grad_of(p) for p in piece.params]
        for p in piece.params:
            self.state[p]["step"] = work.step
        if isinstance(grad_scale, dict):
            scale = scale_of(grad_scale, piece.params[0])
            for part in parts:
                work.table.numbers[part.row][PLACE_OF_SCALE] = scale
        if len(params) > 1 and len(parts) == 1:
            # small tensors are updated where they are, if a kernel takes them so: they need no copies then
            if choose.by_cpu_step(self._kernel_step(work, parts[0].row, params, grads, piece.state)):
                return
        weights, g = piece.gather(params), piece.gather_gradients(grads)
        average = self._average_of(piece, parts)
        if len(parts) == 1:
            self._update(work, parts[0].row, weights, g, piece.state, average)
        else:
            for row, start, end in parts:
                state = {name: self.state_part(name, t, start, end) for name, t in piece.state.items()}
                own = average.part(start, end)
                self._update(work, row, weights[start:end], g[start:end], state, own)
        piece.scatter(weights, params)

    def _update(self, work, row, p, g, state, average):
        """Update flat weights p [n] and their state from gradient g [n], in place. row: of the table."""
        choose.step(self._kernel_step(work, row, [p], [g], state, average))

    def _kernel_step(self, work, row, weights, gradients, state, average=NO_AVERAGE):
        """What a kernel is given, see choose.Step."""
        keys = self._code_keys(state, work.table, row)
        eco = self.update == "eco"
        return choose.Step(
            direction=None if eco else self.direction,  # hand-written kernels have no feedback
            kernel=step_kernel(self.direction, type(work.numbers), self.feedback if eco else None),
            weights=weights,
            gradients=gradients,
            moments=[self.held_moment(name, state, keys.get(name)) for name in self.moments],
            low=low_of(state),
            numbers=work.numbers,
            row=work.table.numbers[row],
            key=work.table.keys[row],
            stochastic=self.by_noise,
            average=average,
            compiled=self.compiled,
        )

    def _code_keys(self, state, table, row):
        """{moment that is coded: key of the noise of its codes}; {} where they are the nearest codes."""
        if not self.by_noise:
            return {}
        coded = [name for name in self.coders if f"{name}_scale" in state]
        return {name: table.keys[at] for at, name in enumerate(coded, row + 1)}

    def _average_of(self, piece, parts):
        """The StepAverage of what the kernel writes; NO_AVERAGE where the average is to follow by itself."""
        if self.average is None or type(piece) is not Bucket or len(piece.params) > 1:
            return NO_AVERAGE
        if len(parts) > 1 and not piece.params[0].is_cpu:  # the keys of parts would be copies to wait for
            return NO_AVERAGE
        return self.average.of_step(piece.params[0])
