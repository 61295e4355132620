"""What all benches share: recipes and nets by name, the clock, the runner of turns, tables, and the record.

    run, inputs, velocity = prepared(parse_net("unet:small:64:8"), RECIPES["bf16"], torch.device("cpu"))
    cell = Cell("bf16", dict(recipe="bf16"), [partial(in_turn, step, clock)])
    rows = take_turns([cell, other], 15, bar)             # [{'recipe': 'bf16', 'ms': [15 figures]}, ...]

Each file of this folder answers one question, with a Command that `python bench.py NAME` runs.
"""

import datetime
import os
import random
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tqdm import tqdm

import models
from harness.flags import natural
from lowprec.errors import Refused
from lowprec.formats import FORMATS
from lowprec.parts.offload import Offload
from lowprec.precision import Precision, recipe

BYTES_A_MIB, BYTES_A_GIB = 2**20, 2**30
ADAMW_OPTIONS = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

# ---- Commands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A flag of a command, or a word without dashes. A default that is a list lets it take several; False
    makes a switch.
    """

    name: str
    default: object
    help: str
    type: Callable = natural
    choices: Iterable | None = None
    metavar: str | None = None
    many: str = ""  # argparse's nargs, where the default does not tell

    def add_to(self, parser):
        if self.default is False:
            parser.add_argument(self.name, help=self.help, action="store_true")
            return
        options = {"help": self.help, "default": self.default}
        several = self.many or isinstance(self.default, list)
        if several:
            options["nargs"] = self.many or ("+" if self.name.startswith("-") else "*")
        if self.choices is not None:
            options |= {"choices": list(self.choices), "metavar": "NAME"}
            options["help"] += f"; of: {'; '.join(self.choices)}"
        else:
            options |= {"type": self.type, "metavar": self.metavar}
        if self.default not in (None, []):
            shown = " ".join(map(str, self.default)) if several else self.default
            is_all = self.choices is not None and self.default == list(self.choices)
            options["help"] += f" (default: {'all' if is_all else shown})"
        parser.add_argument(self.name, **options)


def nets_flag(*default):
    return Flag("--nets", list(default), "what is trained", type=str, metavar="MODEL:SIZE:IMAGE:BATCH")


@dataclass(frozen=True)
class Command:
    """One question, as a command of bench.py.

    measure(args, clock): the rows (dicts) that are its record; it prints its tables on the way.
    help: its line in --help. repeats: rounds unless --repeats says otherwise, None where nothing is timed.
    flags: its own. check(args): raises Refused for what can't work, before anything is measured.
    status(rows): the exit status. cpu_only: whether it leaves a GPU alone. run(args, argv): the exit status,
    in place of all this, of one that chooses its device and keeps its record by itself.
    """

    name: str
    help: str
    measure: Callable | None = None
    repeats: int | None = None
    flags: tuple = ()
    check: Callable = lambda args: None
    status: Callable = lambda rows: 0
    cpu_only: bool = False
    run: Callable | None = None


# ---- Recipes -----------------------------------------------------------------------------------------------

PURE_BF16 = dict(pure_bf16=True)
PURE_BF16_STOCHASTIC = dict(pure_bf16=True, stochastic=True)

# {name: flags as `precision.recipe` takes them}
RECIPES = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "pure_bf16": PURE_BF16,
    "pure_bf16-stochastic": PURE_BF16_STOCHASTIC,
    "pure_bf16-kahan": dict(pure_bf16=True, kahan=True),
    "pure_bf16-split": dict(pure_bf16=True, master="split"),
    "opt8bit": dict(opt8bit=True),
    "tf32": dict(sites=["compute=tf32"]),
    "fp16": dict(fp16=True),
    "pure_bf16-stochastic-opt8bit-fp8": dict(PURE_BF16_STOCHASTIC, opt8bit=True, fp8=True),
    # weights in bf16, dense and semi-structured
    "generate-bf16": PURE_BF16_STOCHASTIC,
    "generate-bf16-2:4": dict(PURE_BF16_STOCHASTIC, sparse24="magnitude"),
    # masked dense products
    "bf16-2:4": dict(bf16=True, sparse24="srste"),
    "pure_bf16-stochastic-2:4": dict(PURE_BF16_STOCHASTIC, sparse24="srste"),
    "bf16-opt8bit": dict(bf16=True, opt8bit=True),
    "bf16-opt4bit": dict(bf16=True, opt4bit=True),
    "pure_bf16-stochastic-opt8bit": dict(PURE_BF16_STOCHASTIC, opt8bit=True),
    "pure_bf16-stochastic-opt4bit": dict(PURE_BF16_STOCHASTIC, opt4bit=True),
}
RECIPES["pure_bf16-flashoptim"] = PURE_BF16
FP8_RECIPES = []  # names of the recipes that differ only in how FP8 is run
for backend in ("torchao", "te", "scaled_mm"):
    for scaling in ("tensorwise", "rowwise", "delayed"):
        name = f"fp8-{backend}-{scaling}"
        FP8_RECIPES.append(name)
        RECIPES[name] = dict(fp8=True, fp8_backend=backend, fp8_recipe=scaling)

# formats of moments that have a flag of their own
PRESETS = {"int8": "opt8bit", "int4": "opt4bit"}


def moment_formats():
    """Names of the formats that moments can be held in: those with a flag first, then the others in order."""
    names = list(PRESETS)
    for name in FORMATS:
        if name not in PRESETS:
            names.append(name)
    return names


def moments_in(name):
    """The flags that hold both moments in a format."""
    if name in PRESETS:
        return {PRESETS[name]: True}
    return {"sites": [f"exp_avg={name}", f"exp_avg_sq={name}"]}


# ---- Nets --------------------------------------------------------------------------------------------------


def parse_net(spec):
    """'unet:small:64:8' -> ('unet', 'small', 64, 8): model, size, side of the image, batch size.

    Raises Refused.
    """
    kind, *rest = spec.split(":")
    if len(rest) != 3 or not all(number.isdigit() and int(number) for number in rest[1:]):
        raise Refused(f"--nets {spec}: write MODEL:SIZE:IMAGE:BATCH, as in unet:small:64:8")
    size, side, batch = rest
    return kind, size, int(side), int(batch)


def built_net(net):
    """The net of a parsed --nets entry, on torch's default device. Raises Refused."""
    kind, size, side, _ = net
    if kind not in models.GENERATIVE:
        raise Refused(f"--nets {kind}:{size}: no such model; choose {' or '.join(models.GENERATIVE)}")
    return models.GENERATIVE[kind](3, 10, side, size)


def check_nets(specs):
    """Raises Refused unless every net can be built; on shapes alone."""
    with torch.device("meta"):
        for spec in specs:
            built_net(parse_net(spec))


def prepared(net, flags, device, **options):
    """(Precision over the net, its inputs (x, t, y), the velocity that it is to predict).

    The same for every recipe: x and velocity [B, 3, H, W] fp32, t [B] fp32, y [B] int64. flags: as
    `precision.recipe` takes them, and grad_release and states_on. options: of Precision.
    """
    torch.manual_seed(0)
    with device:
        model = built_net(net)
    of_recipe = dict(flags)
    for name in ("grad_release", "states_on"):
        if name in of_recipe:
            options[name] = of_recipe.pop(name)
    if options.get("states_on") == "cpu" and device.type == "cpu":
        options["states_on"] = Offload(OneMemory())
    if "optimizer" not in options:  # else it is made with them
        options.update(ADAMW_OPTIONS)
    run = Precision(model, recipe(**of_recipe), **options)
    return run, *batch_of(net, device)


def batch_of(net, device):
    """((x, t, y), velocity) of a net, as `prepared` says. They are drawn on the CPU: the same everywhere."""
    _, _, side, batch = net
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, side, side, generator=generator).to(device)
    velocity = torch.randn(batch, 3, side, side, generator=generator).to(device)
    t = torch.linspace(0, 999, batch, device=device)
    y = torch.arange(batch) % 10
    return (x, t, y.to(device)), velocity


def loss_of_images(side):
    """What `advise` calls a net of --nets with: loss(model, n) on n images of `side` pixels."""

    def loss(model, n):
        (x, t, y), velocity = batch_of((None, None, side, n), torch.get_default_device())
        return F.mse_loss(model(x, t, y), velocity)

    return loss


def training_step(run, inputs, velocity):
    """callable() of one step: forward, backward, optimiser, average. It returns the loss."""

    def step():
        loss = F.mse_loss(run(*inputs), velocity)
        run.backward(loss)
        run.step()
        return loss

    return step


class OneMemory:
    """The traffic of an offload.Offload where there is no GPU: the same rooms and copies, made at once.

    rooms: bytes of those of all steps.
    """

    def __init__(self):
        self.rooms = 0

    def memory(self, t):
        return t

    def room(self, n):
        self.rooms += n
        return torch.empty(n, dtype=torch.uint8)

    def copy(self, way, pairs, after):
        for target, source in pairs:
            target.copy_(source)

    def now(self):
        """Nothing is ever under way."""

    def need(self, copied):
        """As `now`."""

    wait = need


# ---- Time --------------------------------------------------------------------------------------------------


class DeviceClock:
    """Marks in time on a device, and the milliseconds between them.

    On CUDA the marks are events, which don't hold up the queue.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        if self.cuda:
            return start.elapsed_time(end)
        return (end - start) * 1e3


def timed(step, clock, steps=1):
    """Milliseconds a step, of `steps` in a row."""
    clock.wait()
    start = clock.mark()
    for _ in range(steps):
        step()
    end = clock.mark()
    clock.wait()
    return clock.ms(start, end) / steps


# ---- The runner --------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One row of a record, and what it does when its turn comes.

    turns: callables without arguments that return {column: figure}. One that can't run here has no turns, and
    says why in row["note"].
    """

    name: str
    row: dict
    turns: list = field(default_factory=list)


def in_turn(step, clock, steps=1, column="ms"):
    """A turn, once its arguments are bound: milliseconds a step under the name of a column."""
    return {column: timed(step, clock, steps)}


def take_turns(cells, repeats, bar):
    """The rows of all cells, to whose columns each of their turns adds a figure a round.

    A round runs every turn once, in an order of its own, so that other load on the machine meets all alike.
    """
    turns = []
    for cell in cells:
        for turn in cell.turns:
            turns.append((cell, turn))
    order = random.Random(0)
    for _ in range(repeats):
        order.shuffle(turns)
        for cell, turn in turns:
            bar.set_postfix_str(cell.name, refresh=False)
            for column, figure in turn().items():
                cell.row.setdefault(column, []).append(figure)
            bar.update()
    return [cell.row for cell in cells]


def started_cells(names, make, bar, title=""):
    """[Cell] of make(name), which takes the first steps of each."""
    cells = []
    for name in names:
        bar.set_postfix_str(f"{title}: first steps of {name}")
        cells.append(make(name))
        bar.update()
    return cells


def progress_bar(total):
    """A bar that is shown on a terminal and leaves nothing behind."""
    return tqdm(total=total, disable=None, leave=False)


# ---- Tables and records ------------------------------------------------------------------------------------


def rows_by(rows, column):
    """{value of a column: its rows}, in the order of the rows."""
    groups = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return groups


def or_dash(value, form):
    """A figure of a table, '-' where there is none."""
    return "-" if value is None else format(value, form)


def record(bench, argv, machine, settings, rows):
    """What a command leaves in its --out file, as experiments/log reads it."""
    words = [without_folder(word) for word in argv]
    return {
        "bench": bench,
        "command": shlex.join(["python", "bench.py", *words]),
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "settings": settings,
        "results": rows,
    }


def without_folder(word):
    """A path by its last part alone: a record says nothing of the folders of a machine."""
    if isinstance(word, str) and os.path.isabs(word):
        return os.path.basename(word)
    return word
