"""Which recipe to train a net in on a machine: bytes, speed and quality of each, the best first.

    print(advise(model, memory="24GiB", lr=1e-4))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any, NamedTuple

from torch import nn

from .. import evidence
from ..errors import Refused, check_choice, check_number, in_one_line
from ..parts.activations import recomputed_blocks
from ..recipes import recipe
from ..rules import NET_RULES, refuse
from ..sites import LOW_PRODUCTS
from . import machines
from .footprint import Demand, Held, demand, held_by_gpu
from .machines import Machine
from .subjects import Subject, of_module
from .timing import seconds_a_step

USUAL_BATCH = 8
REGIMES = ("from scratch", "finetune")
# percent of the loss: a recipe whose interval lies above that comes after all others that fit
WORSE_ABOVE_PERCENT = 0.5

# ---- The recipes -------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """flags: of `recipe`; options: of Precision. arithmetic: the row of machine.support that it needs. lost:
    what it gives up against fp32; watch: the site of a Watch that would see that go wrong, and what it says.
    recomputes: whether activations are computed again in the backward pass.
    """

    flags: Mapping[str, Any]
    arithmetic: str
    lost: str
    watch: str
    options: Mapping[str, Any] = {}
    recomputes: bool = False

    @property
    def typed(self) -> str:
        """As flags of train.py; "(none)" for fp32."""
        again = {"checkpoint_activations": True} if self.recomputes else {}
        return evidence.typed({**self.flags, **self.options, **again}) or "(none)"

    @property
    def key(self) -> str:
        """As the evidence calls the recipe."""
        return evidence.recipe_key({**self.flags, "set": self.flags.get("sites")})

    def line(self, average: bool) -> str:
        """As a line of a loop of one's own, with a moving average of the weights or without."""
        flags = ", ".join(f"{name}={value!r}" for name, value in self.flags.items())
        options = dict(self.options) if average else {**self.options, "ema_decay": None}
        others = "".join(f", {name}={value!r}" for name, value in options.items())
        line = f"Precision(model, recipe({flags}){others})"
        return f"recompute(model); {line}" if self.recomputes else line


PURE_BF16 = {"pure_bf16": True}
STOCHASTIC_BF16 = {"pure_bf16": True, "stochastic": True}
GRADIENTS_COLUMN = "`grads`: gradients that are 0, not finite, or too small for fp16"
UPDATE_COLUMN = "`update`: what share of a step the weights keep"
MOMENT_COLUMN = "`exp_avg_sq`: what codes keep of small entries of the second moment"

DIGITS_OF_ALL = "digits of products, gradients, moments and weights"

# in the order in which to try them: each takes fewer bytes than the one before, but for the last two
CANDIDATES = (
    Candidate({"bf16": True}, "bf16", "digits of products", GRADIENTS_COLUMN),
    Candidate({"fp16": True}, "fp16", "range of products, which loss scaling gives back", GRADIENTS_COLUMN),
    Candidate({}, "fp32", "nothing", "nothing in particular: it is the reference"),
    Candidate({"bf16": True, "opt8bit": True}, "bf16", "digits of products and moments", MOMENT_COLUMN),
    Candidate({**PURE_BF16, "master": "split"}, "bf16", "digits of products and gradients", GRADIENTS_COLUMN),
    Candidate(
        {**STOCHASTIC_BF16, "kahan": True},
        "bf16",
        "digits of products, gradients and moments, and hardly any of the weights",
        UPDATE_COLUMN,
    ),
    Candidate(STOCHASTIC_BF16, "bf16", f"{DIGITS_OF_ALL}, right in the mean", UPDATE_COLUMN),
    Candidate(
        {**STOCHASTIC_BF16, "opt8bit": True}, "bf16", f"{DIGITS_OF_ALL}, more of the moments", MOMENT_COLUMN
    ),
    Candidate(
        {**STOCHASTIC_BF16, "opt8bit": True},
        "bf16",
        f"{DIGITS_OF_ALL}; clipping by the norm of all gradients, and micro-batches",
        UPDATE_COLUMN,
        {"grad_release": True},
    ),
    Candidate(
        {**STOCHASTIC_BF16, "opt4bit": True}, "bf16", f"{DIGITS_OF_ALL}, most of the moments", MOMENT_COLUMN
    ),
    Candidate({"fp8": True}, "fp8", "digits and range of products", GRADIENTS_COLUMN),
    Candidate(PURE_BF16, "bf16", "every update under half an ulp of its weight", UPDATE_COLUMN),
)

DIGITS_OF_ADAPTERS = "digits of all; of the change of each layer all but a part of rank 8"
DIGITS_OF_BASE = "all but 4.5 bits of each frozen weight"
AGAIN = "a third more arithmetic: the forward pass of each block is done twice"
# for nets of which no training of all weights fits
OPT8BIT_BF16 = {**STOCHASTIC_BF16, "opt8bit": True}
RECOMPUTED = (
    Candidate(STOCHASTIC_BF16, "bf16", f"{DIGITS_OF_ALL}; {AGAIN}", UPDATE_COLUMN, {}, True),
    Candidate(OPT8BIT_BF16, "bf16", f"{DIGITS_OF_ALL}; {AGAIN}", MOMENT_COLUMN, {}, True),
    Candidate(
        OPT8BIT_BF16,
        "bf16",
        f"{DIGITS_OF_ALL}; clipping by the norm of all gradients, and micro-batches; {AGAIN}",
        UPDATE_COLUMN,
        {"grad_release": True},
        True,
    ),
)


def _adapters(base, lost, recomputes):
    """LoRA beside a frozen base held so."""
    flags = {**STOCHASTIC_BF16, "sites": [f"frozen={base}"]}
    return Candidate(flags, "bf16", lost, UPDATE_COLUMN, {"lora": 8}, recomputes)


ADAPTERS = (
    _adapters("bf16", DIGITS_OF_ADAPTERS, False),
    _adapters("bf16", f"{DIGITS_OF_ADAPTERS}; {AGAIN}", True),
    _adapters("nf4", f"{DIGITS_OF_ADAPTERS}; {DIGITS_OF_BASE}", False),
    _adapters("nf4", f"{DIGITS_OF_ADAPTERS}; {DIGITS_OF_BASE}; {AGAIN}", True),
)
# 4 bits were measured to cost more than what these give up
ALL_CANDIDATES = (*CANDIDATES[:-3], *RECOMPUTED, *CANDIDATES[-3:], *ADAPTERS)

# ---- One row -----------------------------------------------------------------------------------------------


class RecipeRow(NamedTuple):
    """What one recipe takes and costs. Bytes are of one GPU.

    activations: the most at once, None where the net can't be called. total: the most at once of all. most:
    examples that fit on a GPU, None where that is not known. how: "native", "emulated" or "no", and why.
    quality: the nearest measurement, or None. speed: how many times as fast as Advice.speeds_against, None
    where it was not measured.
    """

    candidate: Candidate
    held: Held
    activations: float | None
    total: float
    fits: bool
    most: int | None
    how: tuple[str, str]
    quality: evidence.NearestRow | None
    speed: float | None

    @property
    def is_worse(self) -> bool:
        """Whether it was measured to cost more than WORSE_ABOVE_PERCENT, its whole interval above that."""
        return self.quality is not None and self.quality.row.low > WORSE_ABOVE_PERCENT

    @property
    def line(self) -> str:
        """As a line of a loop of one's own that holds what the row says."""
        return self.candidate.line(average=self.held.average > 0)

    def said_of_quality(self, parameters: int) -> str:
        """The change of the held-out loss, on which net, and how far that is from the one asked about."""
        if not self.candidate.flags:
            return "fp32, the reference"
        if self.quality is None:
            return "not measured"
        row, differs = self.quality
        parts = [evidence.row_in_words(row).replace(" from fp32's on", ",")]
        if row.parameters:
            parts += _times_as_large(parameters / row.parameters)
        for text in differs:
            if not text.endswith(" parameters") and "parameters, not" not in text:
                parts.append(text)
        return "; ".join(parts)

    def json(self) -> dict[str, Any]:
        """Plain values for a program."""
        found = {
            "flags": self.candidate.typed,
            "line": self.line,
            **{f"{name}_bytes": round(value) for name, value in self.held._asdict().items()},
            "activation_bytes": self.activations,
            "total_bytes": round(self.total),
            "fits": self.fits,
            "largest_batch": self.most,
            "machine": list(self.how),
            "speed": self.speed,
            "quality": None,
        }
        if self.quality is not None:
            found["quality"] = {**self.quality.row._asdict(), "differs": list(self.quality.differs)}
        return found


def _times_as_large(ratio):
    if 0.5 < ratio < 2:
        return []
    if ratio >= 2:
        return [f"yours is {ratio:,.0f} times as large"]
    return [f"it is {1 / ratio:,.0f} times as large as yours"]


# ---- The answer --------------------------------------------------------------------------------------------


class Advice:
    """The answer: `rows`, the best first; str() for a person, json() for a program."""

    def __init__(self, subject: Subject, machine: Machine, gpus: int, batch: int):
        self.subject, self.machine, self.gpus, self.batch = subject, machine, gpus, batch
        self.is_batch_chosen = False  # smaller than the usual one, which does not fit
        self.rows: list[RecipeRow] = []
        self.no_activations = subject.no_loss  # why they are left out; "" where they are not
        self.refused: list[str] = []  # why this net can't be trained in a recipe, a line each
        self.speeds_from = ""  # what the speeds were measured on; "" without any
        self.speeds_against = ""  # the recipe that has speed 1

    @property
    def best(self) -> RecipeRow | None:
        """The recipe to start with, or None where none fits."""
        first = self.rows[0]
        return first if first.fits else None

    def found_by_others(self) -> list[evidence.Other]:
        """What other people found of the recipes of `rows`."""
        keys = {row.candidate.key for row in self.rows}
        return [other for other in evidence.others() if other.recipe in keys]

    def json(self) -> dict[str, Any]:
        """Plain values for a program."""
        return {
            "net": self.subject.name,
            "kind": self.subject.kind,
            "parameters": self.subject.parameters,
            "machine": self.machine.name,
            "memory_bytes": self.machine.memory,
            "gpus": self.gpus,
            "batch": self.batch,
            "rows": [row.json() for row in self.rows],
            "speeds_from": self.speeds_from,
            "speeds_against": self.speeds_against,
            "found_by_others": [other._asdict() for other in self.found_by_others()],
            "caution": evidence.caution(),
        }

    def __str__(self) -> str:
        from . import text  # the words, which nobody needs who asks for the rows

        return text.full_text(self)


def advise(
    model: nn.Module | Subject,
    loss: Callable | None = None,
    *,
    gpu: str | None = None,
    memory: str | None = None,
    gpus: int = 1,
    regime: str = "from scratch",
    lr: float | None = None,
    batch: int | None = None,
    image_size: int | None = None,
    seq: int | None = None,
    kind: str | None = None,
    average: bool | None = None,
    time: bool = False,
    trial: str | None = None,
    patience: float = 30.0,
) -> Advice:
    """What training `model` takes and costs in each recipe, on a machine: this one, or `gpu` by its name, or
    one with so much `memory` ("24GiB"); on `gpus` of them its rows are spread as by --fsdp.

    model: any nn.Module, which is left as it is and may be on the meta device. loss(model, n): the loss, a
    scalar, of the callable `model` on n examples that it makes itself; without it image_size or seq say what
    the net is called with. batch: examples a step on each GPU; None: 8, or as many as fit. regime: "from
    scratch" or "finetune". kind: of net, as evidence.KIND_OF_MODEL has it. average: whether a moving average
    is kept. time: measure the speed here, by real steps. trial: a file of lowprec.trial, whose costs take the
    place of the nearest measured ones. patience: seconds of this thread for a forward and
    backward pass over shapes, behind which activations are left out. Raises Refused.

    Where no training of all weights fits there are rows that compute activations again, and of a finetuning
    rows of adapters beside a frozen base in bf16 or in 4 bits.
    """
    for name, number in dict(gpus=gpus, batch=batch, image_size=image_size, seq=seq).items():
        if number is not None:
            check_number(name, number, 1)
    if lr is not None:
        check_number("lr", lr)
    check_choice("regime", regime, REGIMES)
    subject = model if isinstance(model, Subject) else of_module(model, loss, image_size, seq)
    if kind is not None:
        check_choice("kind", kind, evidence.KIND_OF_MODEL.values())
        subject = subject._replace(kind=kind)
    if average is not None:
        subject = subject._replace(average=average)
    refuse(NET_RULES, subject.net)
    machine = _machine(gpu, memory)
    if time and (gpu or memory):
        raise Refused("time: steps can be timed on this machine alone; leave gpu and memory out")
    advice = Advice(subject, machine, gpus, batch or USUAL_BATCH)
    _Sizes(advice, regime, lr, trial, patience).fill_rows(batch)
    if time:
        advice.rows = _timed_rows(advice.rows, subject, advice.batch)
        advice.speeds_against = "fp32" if machine.is_cpu else "fp32 without TF32"
        advice.speeds_from = "this net on this machine, a few steps each"
    else:
        _take_speeds_of_a_record(advice)
    advice.rows.sort(key=_key_of_order)
    return advice


def _machine(gpu, memory):
    if gpu is None:
        return machines.this_machine() if memory is None else machines.gpu_of_memory(memory)
    found = machines.gpu_by_name(gpu)
    return found if memory is None else found._replace(memory=machines.bytes_of_text(memory))


class _Sizes:
    """Finds the rows of an advice. trial, patience: as of `advise`. found: [(candidate, Held, Demand or
    None)]; tried: {recipe: NearestRow} of the trial.
    """

    def __init__(self, advice, regime, lr, trial, patience):
        self.advice, self.regime, self.lr = advice, regime, lr
        self.patience, self.found, self.demands, self.tried = patience, [], {}, {}
        if trial is not None:
            from ..trials.book import evidence_of

            self.tried = evidence_of(trial)
        on_cpu = advice.machine.is_cpu
        self.process = machines.bytes_of_process(advice.subject.net) if on_cpu else 0

    def fill_rows(self, batch):
        """Add the rows. batch: as of `advise`."""
        advice = self.advice
        self.add(CANDIDATES)
        if not self.found:
            raise Refused(advice.refused[0])
        batches = [batch] if batch else range(USUAL_BATCH, 0, -1)
        if self._fits(batches[0]):
            return
        self.add(RECOMPUTED)
        is_found = any(map(self._fits, batches))
        if self.regime == "finetune":
            self.add(ADAPTERS)
            any(map(self._fits, [advice.batch] if is_found else batches))

    def add(self, candidates):
        """Find what these take."""
        advice, subject = self.advice, self.advice.subject
        for candidate in candidates:
            if not _is_offered(candidate, advice):
                continue
            r = recipe(**candidate.flags)
            try:
                size = held_by_gpu(subject.net, r, advice.gpus, subject.average, **candidate.options)
                self.found.append((candidate, size, self._demand(candidate, r)))
            except Refused as error:
                advice.refused.append(str(error))

    def _demand(self, candidate, r):
        """Its Demand; None where activations are left out."""
        advice, machine = self.advice, self.advice.machine
        how = {"lora": candidate.options.get("lora", 0), "recomputes": candidate.recomputes}
        key = _of_products(r, advice.gpus), *how.values()
        if key not in self.demands and not advice.no_activations:
            how["in_fp32"] = machine.is_cpu and machine.support["bf16"][0] == "emulated"
            how["on_gpu"] = not machine.is_cpu
            if not self.demands:  # backward takes twice as long, and each later pass as long as the first
                how["until"] = thread_time() + self.patience / 3
            net, loss = advice.subject.net, advice.subject.loss
            try:
                self.demands[key] = demand(net, loss, key[0], advice.batch, **how)
            except Refused as error:
                advice.no_activations = f"activations are left out: {error}"
        return self.demands.get(key)

    def _fits(self, batch):
        """Write the rows, of this batch. Whether one of them is one to take."""
        self.advice.batch = batch
        self.advice.rows = [self._row(*size) for size in self.found]
        # one fits, runs, and was not measured to cost much
        is_good = any(row.fits and row.how[0] != "no" and not row.is_worse for row in self.advice.rows)
        self.advice.is_batch_chosen = is_good and batch < USUAL_BATCH
        return is_good

    def _row(self, candidate, size, need):
        advice = self.advice
        quality = None
        if candidate.flags:
            near = advice.subject.kind, self.regime, self.lr, advice.subject.parameters
            quality = self.tried.get(candidate.key) or evidence.nearest(candidate.key, *near)
        how = _how_it_runs(candidate, advice.machine)
        room = _room_of_recipe(candidate, size, need, advice, self.process)
        return RecipeRow(candidate, size, *room, how, quality, None)


def _how_it_runs(candidate, machine):
    """("native", "emulated" or "no", why) of its arithmetic; of its states where these don't run at all."""
    for states in ("opt8bit", "opt4bit"):
        if candidate.flags.get(states) and machine.support[states][0] == "no":
            return machine.support[states]
    return machine.support[candidate.arithmetic]


def _is_offered(candidate, advice):
    if candidate.arithmetic == "fp16":  # else bf16 has the same bytes and a larger range
        return advice.machine.support["bf16"][0] != "native"
    if candidate.recomputes and (advice.no_activations or not recomputed_blocks(advice.subject.net)):
        return False
    # what --fsdp refuses: gradients that are freed can't be summed over GPUs, and FP8 needs whole tensors
    return advice.gpus == 1 or not (candidate.options or candidate.arithmetic == "fp8")


def _of_products(r, gpus):
    """A recipe with the same products and dtypes of weights: what activations depend on."""
    compute = "bf16" if r.compute in (*LOW_PRODUCTS, "fp16") else r.compute
    weights = r.weights
    if gpus > 1 and compute == "bf16":  # a net that is spread is gathered in bf16: no copies by autocast
        weights = "bf16"
    return recipe().replace(weights=weights, compute=compute, frozen=r.frozen)


def _room_of_recipe(candidate, size: Held, need: Demand | None, advice, process):
    """(activations, total, whether that fits, most examples that fit) of one recipe."""
    machine = advice.machine
    room = machine.memory * (1 - machine.margin)
    fixed = size.total + process
    if need is None:
        return None, fixed, fixed <= room, None
    need = need.of(advice.batch)
    spread_or_freed = fixed + need.activations
    staying = fixed - size.gradients + max(size.gradients, need.most)
    if advice.gpus > 1:
        total = spread_or_freed
    elif "grad_release" in candidate.options:
        total = min(spread_or_freed, staying)
    else:
        total = staying
    most = max(0, int(need.batch + (room - total) / need.each))
    return need.activations, total, total <= room, most


def _key_of_order(row):
    """What sorts rows: those that run and fit, that cost nothing much, and that the machine runs natively."""
    at = ALL_CANDIDATES.index(row.candidate)
    return row.how[0] == "no", not row.fits, row.is_worse, row.how[0] != "native", at


def _take_speeds_of_a_record(advice):
    subject = advice.subject
    found = evidence.nearest_speed(advice.machine.hardware, subject.kind, subject.parameters)
    if found is None:
        return
    rows = []
    for row in advice.rows:
        plain = not row.candidate.options and not row.candidate.recomputes
        speed = found.ratios.get(row.candidate.key) if plain else None
        rows.append(row._replace(speed=speed))
    advice.rows = rows
    advice.speeds_against = found.against
    size = evidence.short_count(found.parameters)
    advice.speeds_from = (
        f"a {found.kind} of {size} parameters ({found.net}), {found.how}, on: {found.hardware} "
        f"(experiments/bench/{found.record}.json)"
    )


def _timed_rows(rows, subject, batch):
    if subject.loss is None:
        raise Refused(f"time: {subject.no_loss}")
    seconds = {}
    for row in rows:
        candidate = row.candidate
        if row.fits and row.how[0] != "no" and not candidate.recomputes:
            r = recipe(**candidate.flags)
            with in_one_line(f"time: {candidate.typed} fails in a step:"):
                seconds[candidate.typed] = seconds_a_step(subject, r, batch, **candidate.options)
    reference = seconds.get("(none)")
    found = []
    for row in rows:
        own = seconds.get(row.candidate.typed)
        speed = reference / own if own and reference else None
        found.append(row._replace(speed=speed))
    return found
