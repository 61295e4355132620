"""Optimisers whose arithmetic is fp32 and whose writes are as a recipe says.

    optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic")        # bf16 weights, any loop
    loss.backward()
    optimizer.step()

`Rounded` owns what all share: buckets, rounding, low parts, codes, noise, state. An optimiser is its moments
and its direction, two functions of a few lines (see AdamW). Telemetry and doctor ask it five questions and
know no class:

    step(grads, grad_scale)     one update
    held(p)                     the fp32 value that parameter p stands for
    moment(p, name)             a moment of p, codes as the values they stand for
    wanted(p, g)                the fp32 update that gradient g asks for, before any rounding
    nbytes()                    bytes of state by site
"""

import copy
import functools
import math
import operator
from typing import NamedTuple

import torch

from ..errors import Refused, check_choice
from ..formats import FORMATS, Coded
from ..kernels import choose
from ..kernels.numbers import SCALE, WeightNumbers, named
from ..machine import settle_vector_math
from ..rounding import (
    DTYPES,
    NO_AVERAGE,
    UPDATES,
    Noise,
    exact_weight,
    key_words,
    noise_bits,
    rounded,
    write_weight,
)
from .buckets import BLOCK, Bucket, Rows, Table, exchange, grouped, is_spread, local, scale_of, whole_alone
from .state import cut, wrapped_states

# what completes a weight, and its site
LOW = {"compensation": "kahan", "remainder": "master", "master": "master"}

# ---- Rounded -----------------------------------------------------------------------------------------------


@functools.cache
def _kernel(direction, kind):
    """One step of an optimiser on flat vectors [n], in place. All arithmetic is fp32; only the writes differ
    by recipe. direction: of the optimiser; kind: the class of its numbers.
    """

    def kernel(p, g, moments, low, row, key, stochastic, average):
        weight, own = named(row, kind)
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
        write_weight(x, p, low, noise)
        average.follow(x, p, low, noise)
        for m, value, bits in zip(moments, new, noise_of_moments, strict=False):
            m.copy_(rounded(value, m.dtype, bits))

    return kernel


MASTERS = "none", "split", "fp32"
SPARSE = "a sparse gradient can't be rounded: make the nn.Embedding with sparse=False"
# what torch's optimisers can do, and these can't: {option of a group: what it would be}
NOT_OURS = {"maximize": "goes uphill (maximize)", "amsgrad": "keeps the largest second moment (amsgrad)"}
REMEDIES = {
    torch.float16: "keep fp16 in autocast (--fp16) and the weights in fp32",
    torch.float64: "call model.float() before",
    torch.complex64: "hold real and imaginary parts in fp32",
    torch.complex128: "hold real and imaginary parts in fp32",
}


def check_numbers(group):
    """Raises Refused for an option of a parameter group with which training can't be meant."""
    for name in ("lr", "eps", "weight_decay", "momentum"):
        value = group.get(name, 0.0)
        several = value if isinstance(value, (tuple, list)) else [value]  # Adafactor has two eps
        if any(isinstance(x, str) or not 0 <= float(x) < math.inf for x in several if x is not None):
            raise Refused(f"{name}={value!r}: it must be a number, 0 or more")
    betas = group.get("betas", ())
    if betas and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise Refused(f"betas={betas}: two numbers from 0 to below 1")


def own_attributes(optimizer):
    """What a copy of an optimiser takes along: all but hooks and a scheduler's `step`, which are bound to the
    original. torch's own __getstate__ keeps three attributes alone.
    """
    kept = vars(optimizer).items()
    return {name: value for name, value in kept if name != "step" and not name.startswith("_optimizer_")}


class Work(NamedTuple):
    """The next step of one piece: a bucket, or one parameter of it. numbers: what `Rounded.numbers` said.
    rows: [(row of the table, first value, last)] of the parts in which it is updated.
    """

    numbers: tuple
    step: int
    piece: Bucket
    table: Table
    rows: list


class Rounded(torch.optim.Optimizer):
    """What every optimiser here shares. A new one has `moments`, `numbers` and `direction`; see AdamW.

    params: fp32 or bf16 parameters, mixed freely, or groups with options of their own. How bf16 weights are
    written: `update` is 'nearest' or 'stochastic'; `kahan` adds a bf16 compensation buffer (2 bytes);
    `master` 'split' adds an int16 remainder (2 bytes, the exact fp32 master), 'fp32' a full copy (4 bytes).
    Each moment is held as its keyword or `kinds`, {moment: kind}, says: 'fp32', 'bf16', or codes of
    `formats.FORMATS` with a scale a block (small tensors in fp32), rounded as `update` says. Rounding noise
    is a function of (seed, step, place in the parameter list). compiled: fuse the step by torch.compile.
    away: an offload.Offload, which keeps the moments in the memory of the CPU. `average` may be set to an EMA
    of the same parameters whose `update` follows each step: what it can, the step then moves in the pass that
    writes the weights. Raises Refused for other dtypes of parameters, and for a state_dict of other shapes.
    """

    moments = ()  # names of the values that it keeps for each weight
    sites = {}  # {name: Site} of those that not every optimiser has
    flags = {}  # {flag: default}, where its own default is another than AdamW's
    average = None  # an EMA that is moved along
    others = None  # the optimiser of the parameters that this one does not take, see optimizers.divided
    signed = {"exp_avg": True, "exp_avg_sq": False}
    by_recipe = True  # whether it writes as the recipe says; peers write in their own way
    by_rows = True  # whether it steps some rows of a tensor as it steps them all, see sharding
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
        **named,
    ):
        settle_vector_math()
        check_choice("update", update, UPDATES)
        check_choice("master", master, MASTERS)
        if kahan and master != "none":
            raise Refused(f"kahan beside master={master!r}: an exact master loses nothing; drop kahan")
        self.update, self.kahan, self.master = update, kahan, master
        self.seed, self.compiled, self.away = seed, compiled, away
        if unknown := {*named, *(kinds or {})} - set(self.moments):
            raise TypeError(f"{type(self).__name__} has no option '{sorted(unknown)[0]}'")
        kinds = {**dict.fromkeys(self.moments, "fp32"), **named, **(kinds or {})}
        for name, kind in kinds.items():
            check_choice(name, kind, ("fp32", "bf16", *FORMATS))
        self.coders = {name: FORMATS[kind] for name, kind in kinds.items() if kind in FORMATS}
        for coder in self.coders.values():
            coder.require()
        # of the tensors that are not coded
        self.dtypes = {name: DTYPES.get(kind, torch.float32) for name, kind in kinds.items()}
        self._buckets = []  # (index of the parameter group, bucket)
        self.rows_of = {}  # parameter that is spread over ranks -> its bucket
        self._position = 0
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

    # -- state

    def add_param_group(self, param_group):
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        for p in params:
            if p.dtype not in (torch.float32, torch.bfloat16):
                what = f"{type(self).__name__} takes fp32 and bf16 parameters, not {p.dtype}"
                raise Refused(f"{what}: {REMEDIES.get(p.dtype, 'leave it out of the groups')}")
        if not self.by_rows and any(map(is_spread, params)):
            raise Refused(whole_alone(type(self).__name__))
        alike = [self._alike(i, p) for i, p in enumerate(params)]
        for bucket in grouped(params, alike, lambda p: BLOCK if self._coded(p) else 1):
            bucket.start += self._position
            bucket.params = [params[i] for i in bucket.indices]
            if isinstance(bucket, Rows):
                self.rows_of[bucket.params[0]] = bucket
            bucket.state = self._new_state(bucket)
            for p in bucket.params:
                self.state[p] = {"step": 0}
            self._share(bucket)
            self._buckets.append((len(self.param_groups) - 1, bucket))
        self._position += sum(p.numel() for p in params)

    def size(self, p, name):
        """How many values the moment of p has; 0 where it keeps none."""
        return p.numel()

    def _coded(self, p):
        return [name for name, coder in self.coders.items() if coder.takes(self.size(p, name))]

    def _alike(self, i, p):
        # blocks of codes must not cross from one tensor into the next: a coded tensor that ends within a
        # block gets a bucket of its own
        coded = self._coded(p)
        return p.dtype, p.device, *coded, i if coded and p.numel() % 256 else None

    def _new_state(self, bucket):
        first, state = bucket.params[0], {}
        zeros = functools.partial(torch.zeros, device=first.device)
        home = first.device if self.away is None else self.away.home
        for name, dtype in self.dtypes.items():
            n = bucket.length(sum(self.size(p, name) for p in bucket.params))
            if name in self._coded(first):
                state[name], state[f"{name}_scale"] = self.coders[name].new(n, home)
            elif n or isinstance(bucket, Rows):
                state[name] = torch.zeros(n, dtype=dtype, device=home)
        state = state if self.away is None else self.away.keep(state)
        if first.dtype == torch.bfloat16:
            if self.kahan:
                state["compensation"] = zeros(bucket.numel, dtype=torch.bfloat16)
            elif self.master == "split":
                state["remainder"] = zeros(bucket.numel, dtype=torch.int16)
            elif self.master == "fp32":
                state["master"] = bucket.gather([local(p) for p in bucket.params]).float()
        return state

    def _share(self, bucket):
        for name, flat in bucket.state.items():
            for p, share in zip(bucket.params, self._shares(name, flat, bucket), strict=True):
                self.state[p][name] = share

    def _shares(self, name, flat, bucket):
        """Views of a bucket's flat state, one a parameter: in its shape, packed codes and scales flat."""
        moment, which = name.removesuffix("_scale"), int(name.endswith("_scale"))
        if isinstance(bucket, Rows) and f"{moment}_scale" in bucket.state:
            return [flat]
        if flat.numel() == bucket.numel:
            return bucket.views(flat, bucket.params)
        coder = self.coders[moment]
        return flat.split([coder.sizes(self.size(p, moment))[which] for p in bucket.params])

    @staticmethod
    def _low(state):
        return next((state[name] for name in LOW if name in state), None)

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
        grad_of = operator.attrgetter("grad") if grads is None else grads.get
        one_each = isinstance(grad_scale, dict)
        pieces = []
        for index, bucket in self._buckets:
            pieces += [(index, piece) for piece in self._pieces(bucket, grad_of, one_each)]
        work = self.planned(pieces)
        exchange([item.piece for item in work], grad_of)
        if not one_each and (torch.is_tensor(grad_scale) or grad_scale != 1.0):
            for table in {id(item.table): item.table for item in work}.values():
                table.all_numbers[:, SCALE] = grad_scale
        for item in work if self.away is None else self.away.passing(work):
            self.carry_out(item, grad_of, grad_scale)
        return loss

    def planned(self, pieces):
        """The next step of these pieces, [(index of the group, bucket)]: a list of Work."""
        work, tables = [], {}
        for index, piece in pieces:
            first = piece.params[0]
            table = tables.setdefault(first.device, Table(first.device))
            step = self.state[first]["step"] + 1
            numbers = self.numbers(self.param_groups[index], step)
            rows = self._rows(table, index, numbers, step, piece)
            work.append(Work(numbers, step, piece, table, rows))
        for table in tables.values():
            table.fill()
        return work

    def carry_out(self, work, grad_of, grad_scale):
        """Update one piece. grad_scale: as of `step`; one for each parameter is still to be written into the
        table, one for all is there.
        """
        piece, rows = work.piece, work.rows
        for p in piece.params:
            self.state[p]["step"] = work.step
        params = [local(p) for p in piece.params]
        grads = [grad_of(p) for p in piece.params]
        if isinstance(grad_scale, dict):
            scale = scale_of(grad_scale, piece.params[0])
            for row, _, _ in rows:
                work.table.numbers[row][SCALE] = scale
        if len(params) > 1 and len(rows) == 1:
            # small tensors are updated where they are, if a kernel takes them so: they need no copies then
            if choose.by_cpu_step(self._kernel_step(work, rows[0][0], params, grads, piece.state)):
                return
        flat, g = piece.gather(params), piece.gather_gradients(grads)
        average = self._average_of(piece, rows)
        if len(rows) == 1:
            self._update(work, rows[0][0], flat, g, piece.state, average)
        else:
            for row, start, end in rows:
                state = {name: self._part(name, t, start, end) for name, t in piece.state.items()}
                part = average.part(start, end)
                self._update(work, row, flat[start:end], g[start:end], state, part)
        piece.scatter(flat, params)

    def _update(self, work, row, p, g, state, average):
        """Update flat weights p [n] and their state from gradient g [n], in place. row: of the table."""
        choose.step(self._kernel_step(work, row, [p], [g], state, average))

    def _kernel_step(self, work, row, weights, gradients, state, average=NO_AVERAGE):
        """What a kernel is given: see choose.Step."""
        keys = self._code_keys(state, work.table, row)
        return choose.Step(
            direction=self.direction,
            kernel=_kernel(self.direction, type(work.numbers)),
            weights=weights,
            gradients=gradients,
            moments=[self._moment_of(name, state, keys.get(name)) for name in self.moments],
            low=self._low(state),
            numbers=work.numbers,
            row=work.table.numbers[row],
            key=work.table.keys[row],
            stochastic=self.update == "stochastic",
            average=average,
            compiled=self.compiled,
        )

    def _average_of(self, piece, rows):
        """The StepAverage of what the kernel writes; NO_AVERAGE where the average is to follow by itself."""
        if self.average is None or type(piece) is not Bucket or len(piece.params) > 1:
            return NO_AVERAGE
        if len(rows) > 1 and not piece.params[0].is_cpu:  # the keys of its parts would be copies to wait for
            return NO_AVERAGE
        return self.average.of_step(piece.params[0])

    def _pieces(self, bucket, grad_of, apart):
        """What a bucket updates at once: all of it, or tensor by tensor where some have no gradient, another
        dtype of it, or other steps behind them, or where they are to be `apart`.
        """
        grads = [grad_of(p) for p in bucket.params]
        if all(g is None for g in grads):
            return []
        if any(g is not None and g.is_sparse for g in grads):
            raise Refused(SPARSE)
        steps = {self.state[p]["step"] for p in bucket.params}
        dtypes = {g.dtype for g in grads if g is not None}
        if not apart and all(g is not None for g in grads) and len(steps) == 1 and len(dtypes) == 1:
            return [bucket]
        alone = [bucket] if isinstance(bucket, Rows) else self.tensor_by_tensor(bucket)
        return [piece for piece, g in zip(alone, grads, strict=True) if g is not None]

    def tensor_by_tensor(self, bucket):
        """A bucket for each parameter of one, with the same noise: that depends on the position alone."""
        found, start = [], bucket.start
        for p in bucket.params:
            alone = Bucket([0], [p], start)
            alone.params = [p]
            alone.state = {name: t.view(-1) for name, t in self.state[p].items() if name != "step"}
            found.append(alone)
            start += p.numel()
        return found

    def _rows(self, table, index, numbers, step, piece):
        """[(row of the table, first value, last)] of one piece; a large coded one in parts, so that few of
        its moments are in fp32 at once. The keys of codes are in the rows that follow.
        """
        numbers = [*self._weight_numbers(index), *numbers]
        coded = self._coded(piece.params[0])
        size = self.PIECE if piece.params[0].is_cpu else 4 * self.PIECE
        rows = []
        for start, end, position, ahead in piece.rows(size if coded else None):
            row = table.add(numbers, key_words(self.seed, step, position, ahead=ahead))
            rows.append((row, start, end))
            for name in coded:
                kind = Noise.EXP_AVG + self.moments.index(name)
                table.add(numbers, key_words(self.seed, step, position, kind, ahead))
        return rows

    def _weight_numbers(self, index):
        """The WeightNumbers of a group. The scale of gradients is written into the table once it is known."""
        group = self.param_groups[index]
        return WeightNumbers(decay=1 - float(group["lr"]) * group["weight_decay"], scale=1.0)

    def _code_keys(self, state, table, row):
        """{moment that is coded: key of the noise of its codes, or None where they are the nearest}."""
        coded = [name for name in self.coders if f"{name}_scale" in state]
        stochastic = self.update == "stochastic"
        return {name: table.keys[at] if stochastic else None for at, name in enumerate(coded, row + 1)}

    def _part(self, name, t, start, end):
        """Values start to end of a flat state."""
        coder = self.coders.get(name.removesuffix("_scale"))
        if name.endswith("_scale"):
            return t[start // coder.block : -(-end // coder.block)]
        if coder is None or t.dtype == torch.float32:  # a small tensor's moment stays fp32
            return t[start:end]
        return t[start * coder.bits // 8 : -(-end * coder.bits // 8)]

    def _moment_of(self, name, state, key=None):
        """A moment as it is held: a tensor, or Coded, to be written by the noise of `key`."""
        if f"{name}_scale" not in state:
            return state[name]
        codes, scales = state[name].view(-1), state[f"{name}_scale"].view(-1)
        return Coded(self.coders[name], codes, scales, self.signed.get(name, True), key)

    def _loaded(self, name, state, n):
        """A moment as a tensor: as it is held, or the fp32 [n] that its codes stand for."""
        held = self._moment_of(name, state)
        return held.decoded(n, self.compiled) if choose.is_coded(held) else held

    def __getstate__(self):
        return own_attributes(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        if "_buckets" in state and self.away is None:
            for _, bucket in self._buckets:
                self._share(bucket)  # plain pickle makes a tensor of its own of each view

    # -- questions

    def low_part(self, p):
        """What completes weight p to the value held: int16 remainder, bf16 compensation, fp32 master, or
        None.
        """
        return self._low(self.state[p]) if p in self.state else None

    def held(self, p, pick=torch.flatten):
        """The fp32 value held for parameter p. pick: tensor -> flat, which takes all of it or a sample."""
        low = self.low_part(p)
        return exact_weight(pick(local(p)), None if low is None else pick(low))

    def moment(self, p, name, pick=torch.flatten):
        """A moment of p, flat, as `pick` takes it: as held, or the fp32 values that its codes stand for."""
        if name not in self.moments or name not in self.state[p]:
            return None
        rows = self.rows_of.get(p)
        if rows is not None and self.coded(p, name):
            found = self._loaded(name, self.state[p], rows.numel) if rows.numel else local(p).float()
            return pick(rows.views(found, [p])[0])
        return pick(self._loaded(name, self._settled(p, name), self.size(p, name))).to(p.device)

    def _settled(self, p, *names):
        """The state of p after the last step, wherever it is; codes of these moments on the device of p."""
        state = self.state[p]
        if self.away is None:
            return state
        self.away.settle()
        codes = [key for name in names for key in (name, f"{name}_scale") if self.coded(p, name)]
        return {**state, **{key: state[key].to(p.device) for key in codes}}

    def wanted(self, p, g, pick=torch.flatten):
        """The fp32 update that gradient g (flat, as `pick` takes it) asks of the next step, before any
        rounding.
        """
        return self.wanted_together([p], [g], pick)[0]

    def wanted_together(self, params, gradients, pick=torch.flatten, held=None):
        """[what `wanted` says of each parameter]: those of one group and step in one vector. held: what
        `held` says of all of them, flat, where that is known already.
        """
        held = None if held is None else held.split([g.numel() for g in gradients])
        found, alike = [None] * len(params), {}
        of_group = {p: group for group in self.param_groups for p in group["params"]}
        for i, p in enumerate(params):
            alike.setdefault((id(of_group[p]), self.state[p]["step"], p.device), []).append(i)
        for (_, step, device), members in alike.items():
            some, g = [params[i] for i in members], torch.cat([gradients[i].float() for i in members])
            group = of_group[some[0]]
            numbers = self.numbers(group, step + 1)
            row = torch.tensor(numbers, dtype=torch.float32, device=device)
            numbers = type(numbers)(*row)
            parts = [[self.moment(p, name, pick).float() for p in some] for name in self.moments]
            delta, _ = self.direction(g, [torch.cat(part) for part in parts], numbers)
            values = [self.held(params[i], pick) if held is None else held[i] for i in members]
            update = delta - float(group["lr"]) * group["weight_decay"] * torch.cat(values)
            lengths = [gradients[i].numel() for i in members]
            for i, part in zip(members, update.split(lengths), strict=True):
                found[i] = part
        return found

    def decayed(self, p):
        """Share of p that weight decay takes at each step: lr * weight decay."""
        group = self._group(p)
        return float(group["lr"]) * group["weight_decay"]

    def decay(self, p, name):
        """(beta, t): the decay of a moment at the next step, NaN for one that it does not keep, and the steps
        that its bias correction counts.
        """
        if name not in self.moments:
            return math.nan, 0
        return self._group(p)["betas"][self.moments.index(name)], self.state[p]["step"]

    def coded(self, p, name):
        """Whether the moment of p is held in codes."""
        return f"{name}_scale" in self.state[p]

    def clear(self, p, name):
        """Set the moment of p to zero, in place. False where that can't be done."""
        held = self._settled(p).get(f"{name}_scale" if self.coded(p, name) else name)
        return held is not None and held.zero_() is held

    def still(self, p):
        """Set to zero what moves p without a gradient. False where that can't be done."""
        return all(self.clear(p, name) for name in self.moments if self.signed.get(name, True))

    def _group(self, p):
        return next(group for group in self.param_groups if any(p is q for q in group["params"]))

    def nbytes(self):
        """{site: bytes} of the state as allocated: the moments, kahan and master."""
        total = dict.fromkeys([*self.moments, "kahan", "master"], 0)
        for group in self.param_groups:
            for p in group["params"]:
                for name, t in self.state[p].items():
                    if name != "step":
                        total[LOW.get(name, name.removesuffix("_scale"))] += self._bytes(p, name, t)
        for name, coder in self.coders.items():  # tables that all tensors share
            if any(self.coded(p, name) for p in self.state):
                total[name] += coder.table_bytes(self.signed.get(name, True), self.update == "stochastic")
        return total

    def _bytes(self, p, name, t):
        """Bytes of a state of p, on all ranks together where p is spread over them."""
        if p not in self.rows_of:
            return t.nbytes
        sizes = self.coded_sizes(p, name)
        return t.element_size() * (sizes(p.numel()) if sizes else p.numel())

    def coded_sizes(self, p, name):
        """A function, entries of p -> how many values the state `name` has for them, where it is codes or
        their scales; else None.
        """
        moment, which = name.removesuffix("_scale"), int(name.endswith("_scale"))
        if moment not in self.coders or not self.coded(p, moment):
            return None
        return lambda n: self.coders[moment].sizes(n)[which]

    def plain(self, name):
        """How many parameters keep the moment in fp32 although it is held in codes: those of small tensors.
        """
        sizes = [self.size(p, name) for group in self.param_groups for p in group["params"]]
        return sum(n for n in sizes if not self.coders[name].takes(n))

    def notes(self):
        """{site: text} that the ledger adds to its reasons."""
        n = self._position
        found = {name: f"; {self.plain(name):,} of {n:,} in small tensors stay fp32" for name in self.coders}
        for name in self.moments if self.away is not None else ():
            found[name] = found.get(name, "") + "; in the memory of the CPU (--states_on cpu)"
        return found

    # -- around a run

    def announce(self, grads, grad_scale):
        """Called before `wanted` is asked of the next step, with what that step will be given."""

    def attach(self, model):
        """Called once with the model, for optimisers that hang on its gradients."""

    def collect(self):
        """Called at a step before gradients are read."""

    @torch.no_grad()
    def set_exact(self, p, value):
        """Let parameter p hold fp32 `value` (same shape) as exactly as the recipe can: to nearest, remainders
        filled.
        """
        write_weight(value.to(p.device, torch.float32), local(p), self._low(self.state[p]))

    def state_dict(self):
        if self.away is not None:
            self.away.settle()
        state = wrapped_states(self, super().state_dict()) if self.rows_of else super().state_dict()
        return {**state, "codes": self._formats()} if self.coders else state

    def _formats(self):
        return {name: coder.name for name, coder in self.coders.items()}

    def load_state_dict(self, state_dict):
        """Take a state_dict of the same recipe, or of torch's AdamW where states are fp32. Raises Refused for
        one of another model or recipe.

        torch's own loader casts floating states to the parameter's dtype: fp32 moments of bf16 weights would
        come back in bf16.
        """
        if self.away is not None:
            self.away.settle()
        if self.rows_of:
            state_dict = cut(state_dict, self.state_dict())
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own, theirs = ([len(g["params"]) for g in o] for o in (self.param_groups, state_dict["param_groups"]))
        if theirs != own:
            theirs = f"optimiser state of {sum(theirs)} parameters in groups of {theirs}"
            raise Refused(f"{theirs} does not fit a model with groups of {own}: it belongs to another model")
        # format 1 does not tell: it had these two, of other shapes; all codes of 8 bits have the same
        old = {name: kind for name, kind in self._formats().items() if kind in ("int8", "int4")}
        codes = state_dict.get("codes", old)
        if codes != self._formats():
            theirs = ", ".join(f"{name} in {kind}" for name, kind in codes.items()) or "no codes"
            raise Refused(f"optimiser state with {theirs}: it was written by another model or recipe")
        for group in state_dict["param_groups"]:
            if other := next((what for name, what in NOT_OURS.items() if group.get(name)), None):
                raise Refused(f"optimiser state of a training that {other}: {type(self).__name__} does not")
            if "decoupled_weight_decay" in group and "amsgrad" not in group:  # its states look like AdamW's
                raise Refused(f"optimiser state of RAdam: start {type(self).__name__} without it, a new rule")
            if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
                raise Refused("optimiser state of Adam with L2 decay: AdamW's decay is another; set it to 0")
        for p, i in zip(params, ids, strict=True):
            self._load(p, state_dict["state"].get(i, {}))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: copy.deepcopy(v) for k, v in saved.items() if k != "params"})

    def _load(self, p, saved):
        saved, state = dict(saved), self.state[p]
        if not saved and self._low(state) is None:  # torch keeps nothing of a parameter without a step
            for name in state.keys() - {"step"}:
                state[name].zero_()
            state["step"] = 0
            return
        for name in self._coded(p):  # saved before codes took any length: encoded now
            coder, old = self.coders[name], saved.get(name)
            kept = torch.is_tensor(old) and (old.shape, old.dtype) == (p.shape, torch.float32)
            if kept and p not in self.rows_of and coder.stayed(p.numel()):
                signed = self.signed.get(name, True)
                saved[name], saved[f"{name}_scale"] = coder.new(p.numel(), old.device)
                coder.encode(old.float().flatten(), saved[name], saved[f"{name}_scale"], signed)
        shapes = {k: (v.shape, v.dtype) for k, v in state.items() if k != "step"}
        if {k: (v.shape, v.dtype) for k, v in saved.items() if k != "step"} != shapes:
            wrong = "optimiser state has other shapes or dtypes than this recipe"
            raise Refused(f"{wrong}: it was written by another model or recipe")
        for name in shapes:
            state[name].copy_(saved[name])
        state["step"] = int(saved["step"])
