"""bench.py optimizers: one step on 10 million parameters, ours, other libraries', and copying the same bytes.

4 minutes and 3 GiB on 2 cores; more the first time, for torchao compiles each shape. Other libraries:
requirements-bench.txt.
"""

import math
import statistics
from dataclasses import dataclass

import torch

from benchmarks import subjects
from benchmarks.allocated import count_of, forget_tables, state_bytes
from benchmarks.common import (
    ADAMW_OPTIONS,
    PRESETS,
    PURE_BF16,
    PURE_BF16_STOCHASTIC,
    Cell,
    Command,
    Flag,
    in_turn,
    moment_formats,
    moments_in,
    or_dash,
    progress_bar,
    rows_by,
    started_cells,
    take_turns,
    timed,
)
from benchmarks.records import median_ms, of_record
from harness.printing import markdown_table
from lowprec.advice.text import layout
from lowprec.errors import Refused
from lowprec.optimizers import build, peers
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.precision import Recipe, recipe


@dataclass(frozen=True)
class Contender:
    """protection: what keeps small updates from being lost.

    optimizer: a name for `build.build`, or None for what is no optimiser of the recipes.
    """

    protection: str
    recipe: Recipe
    optimizer: str | None = "adamw"

    @property
    def ours(self):
        return self.optimizer in OPTIMIZERS


# what is known of a peer; any other is one "as its authors publish it"
PROTECTION = {
    "torchastic": "stochastic w m v",
    "torchao": "stochastic w",
    "optimi": "compensated w",
    "adamw_bf16": "compensated w, stochastic w m",
    "bitsandbytes": "none",
    "torch": "none",
    "heavyball": "stochastic w m v",
    "sdnq": "stochastic w",
    "sdnq-8bit": "stochastic w",
    "flashoptim": "w in 24 bits",
}
# peers that train.py does not offer, see subjects.PEER_CLASSES
UNLISTED_PEERS = ("heavyball", "sdnq", "sdnq-8bit", "flashoptim")


def contenders():
    """{name: Contender}: ways to write with AdamW, formats of its moments, our other optimisers, peers, and
    three yardsticks.
    """
    pure, stochastic = recipe(**PURE_BF16), recipe(**PURE_BF16_STOCHASTIC)
    rows = {
        "stochastic": Contender("stochastic w m v", stochastic),
        "nearest": Contender("none", pure),
        "kahan": Contender("compensated w", recipe(**PURE_BF16, kahan=True)),
        "kahan-stochastic": Contender(
            "compensated w, stochastic m v", recipe(**PURE_BF16_STOCHASTIC, kahan=True)
        ),
        "split": Contender("exact w", recipe(**PURE_BF16, master="split")),
        "fp32": Contender("fp32 weights", Recipe()),
    }
    for name in moment_formats():
        label = PRESETS.get(name, name).removeprefix("opt")
        in_codes = recipe(**PURE_BF16_STOCHASTIC, **moments_in(name))
        rows[f"stochastic-{label}"] = Contender("stochastic w m v", in_codes)
    for name in OPTIMIZERS:
        if name != "adamw":
            rows[f"stochastic-{name}"] = Contender("stochastic, all of it", stochastic, name)
    for name in listed_peers():
        r = recipe(**PURE_BF16, opt8bit=True) if name == "bitsandbytes" else pure
        protection = PROTECTION.get(name, "as its authors publish it")
        rows[name.replace("_", "-")] = Contender(protection, r, name)
    for name in UNLISTED_PEERS:
        rows[name] = Contender(PROTECTION[name], pure, None)
    rows["torch-fused"] = Contender("none", pure, None)
    rows["torch-fused-fp32"] = Contender("fp32 weights", Recipe(), None)
    rows["copy"] = Contender("moves the bytes of a step", pure, None)
    return rows


def listed_peers():
    """The peers that train.py offers: those in PROTECTION in its order, then new ones."""
    known = [name for name in PROTECTION if name in peers.PEER_OPTIMIZERS]
    new = [name for name in peers.PEER_OPTIMIZERS if name not in PROTECTION]
    return known + new


CONTENDERS = contenders()
LAYOUTS = ["mixed", "large"]
COPIED_BYTES = 14  # a parameter: a step on bf16 reads w, g, m, v and writes w, m, v, as does copying 7 bytes


# ---- Steps -------------------------------------------------------------------------------------------------


def layout_shapes(layout, n):
    """Shapes of n parameters.

    'large': four vectors. 'mixed': blocks of four widths as in a U-Net or transformer, where most tensors are
    vectors and most values lie in kernels and matrices.
    """
    if layout == "large":
        quarter, rest = divmod(n, 4)
        sizes = [quarter + 1] * rest + [quarter] * (4 - rest)
        return [(size,) for size in sizes if size]
    block = []
    for w in (32, 64, 128, 256):
        block += [(w, w, 3, 3), (w,), (w,), (w,), (w, w), (w,)]
        block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    shapes = []
    left = n
    while left:
        shape = block[len(shapes) % len(block)]
        if math.prod(shape) > left:
            return [*shapes, (left,)]
        shapes.append(shape)
        left -= math.prod(shape)
    return shapes


def make_step(name, params):
    """(callable that does one step on `params`, the optimiser or None). Raises Refused."""
    contender = CONTENDERS[name]
    if name == "copy":
        return copying(params), None
    if name.startswith("torch-fused"):
        optimizer = torch.optim.AdamW(params, **ADAMW_OPTIONS, fused=True)
    elif name in UNLISTED_PEERS:
        optimizer = subjects.subject_of_name(name, params[0].device).over(params, **ADAMW_OPTIONS)
    else:
        options = ADAMW_OPTIONS
        if contender.ours and contender.optimizer != "adamw":  # its eps may be another thing
            options = dict(lr=ADAMW_OPTIONS["lr"], weight_decay=ADAMW_OPTIONS["weight_decay"])
        optimizer = build.build(contender.optimizer, params, contender.recipe, **options)
    own = getattr(optimizer, "inner", optimizer)  # a peer's own step, without our adapter
    return own.step, optimizer


def copying(params):
    """callable() that moves COPIED_BYTES a parameter."""
    size = COPIED_BYTES // 2 * count_of(params)
    source = torch.ones(size, dtype=torch.uint8, device=params[0].device)
    target = torch.zeros_like(source)

    def copy():
        target.copy_(source)

    return copy


class Contest:
    """The contenders of one layout, all on the same weights and gradients."""

    def __init__(self, layout, args, clock, bar):
        self.layout, self.args, self.clock, self.bar = layout, args, clock, bar
        generator = torch.Generator().manual_seed(0)
        shapes = layout_shapes(layout, args.parameters)
        self.weights = [torch.randn(s, generator=generator) * 0.05 for s in shapes]
        sources = [torch.randn(s, generator=generator) * 1e-3 for s in shapes]
        self.grads, self.fresh = {}, {}
        for dtype in (torch.bfloat16, torch.float32):
            self.grads[dtype] = [g.to(args.device, dtype) for g in sources]
            self.fresh[dtype] = [g.clone() for g in self.grads[dtype]]

    def rows(self):
        """Rows (dicts): name, protection, ms of each round, bytes of state a parameter, or a note why not."""
        cells = started_cells(self.args.only, self.start, self.bar, self.layout)
        return take_turns(cells, self.args.repeats, self.bar)

    def start(self, name):
        """The Cell of a contender, after its first steps."""
        contender = CONTENDERS[name]
        row = dict(layout=self.layout, tensors=len(self.weights), name=name, protection=contender.protection)
        row.update(note="", first_step_s=None, state_bytes=None, moved_bytes=COPIED_BYTES, ms=[])
        dtype = contender.recipe.dtype("weights")
        params = [torch.nn.Parameter(w.to(self.args.device, dtype)) for w in self.weights]
        self.refill(params, dtype)
        try:
            step, optimizer = make_step(name, params)
            forget_tables(optimizer)
            row["first_step_s"] = timed(step, self.clock) / 1e3
            self.refill(params, dtype)
            timed(step, self.clock)
        except Refused as error:
            row["note"] = without_who_needs_it(str(error))
            return Cell(name, row)
        except Exception as error:  # a peer that fails, say for want of a compiler, is a line
            if contender.ours:  # a bug of ours is not
                raise
            row["note"] = f"fails here: {type(error).__name__}"
            return Cell(name, row)
        if optimizer is not None:
            row["state_bytes"] = state_bytes(optimizer) / self.args.parameters
            # weights, gradients and states are read, weights and states written
            row["moved_bytes"] = 3 * dtype.itemsize + 2 * row["state_bytes"]

        def turn():
            self.refill(params, dtype)
            return in_turn(step, self.clock)

        return Cell(name, row, [turn])

    def refill(self, params, dtype):
        """The gradients as after a backward: adamw-bf16 leaves zeros behind, heavyball none at all."""
        torch._foreach_copy_(self.grads[dtype], self.fresh[dtype])
        for p, g in zip(params, self.grads[dtype], strict=True):
            p.grad = g


def without_who_needs_it(refusal):
    """'not installed: pip install optimi' where a package is absent; else the refusal as it is."""
    if "pip install" not in refusal:
        return refusal
    return "not installed: " + refusal.rsplit(": ", 1)[1]


# ---- The command -------------------------------------------------------------------------------------------


def optimizers(args, clock):
    """Rows (dicts) of all layouts, see Contest.rows."""
    rows = []
    with progress_bar(len(args.layouts) * len(args.only) * (args.repeats + 1)) as bar:
        for layout in args.layouts:
            rows += Contest(layout, args, clock, bar).rows()
    for layout, of_layout in rows_by(rows, "layout").items():
        print_layout(layout, of_layout, args)
    ours = [name for name, contender in CONTENDERS.items() if contender.ours]
    print("\nratio: to ours, stochastic. of copy: bytes a second that a step moves, over those of copying.")
    print("w weights, m exp_avg, v exp_avg_sq. ours: " + ", ".join(ours))
    return rows


def print_layout(name, rows, args):
    medians = {row["name"]: statistics.median(row["ms"] or [math.inf]) for row in rows}
    count = f"{args.parameters:,} parameters in {rows[0]['tensors']} tensors"
    print(f"\n{name}: {count}, {args.repeats} rounds")
    heads = ("ms (median)", "fastest", "ratio", "of copy", "state B/param", "first step s")
    lines = [("optimiser", *heads, "protects small updates")]
    for row in sorted(rows, key=lambda row: medians[row["name"]]):
        if row["note"]:
            lines.append((row["name"], *("-" for _ in heads), row["note"]))
            continue
        median = medians[row["name"]]
        ratio = median / medians["stochastic"] if "stochastic" in medians else None
        share = row["moved_bytes"] / COPIED_BYTES * medians["copy"] / median if "copy" in medians else None
        times = f"{median:.2f}", f"{min(row['ms']):.2f}", or_dash(ratio, ".2f"), or_dash(share, ".0%")
        sizes = or_dash(row["state_bytes"], ".2f"), f"{row['first_step_s']:.2f}"
        lines.append((row["name"], *times, *sizes, row["protection"]))
    print(layout(lines))


# ---- The page ----------------------------------------------------------------------------------------------

OPTIMIZER_ROWS = {  # what the record calls it: (what the page calls it, how a bf16 write is protected)
    "stochastic": ("ours, `--stochastic`", "stochastic: weights and both moments"),
    "kahan": ("ours, `--kahan`", "compensated"),
    "kahan-stochastic": ("ours, `--kahan --stochastic`", "compensated and stochastic"),
    "split": ("ours, `--master split`", "exact fp32 master, fp32 moments"),
    "stochastic-8bit": ("ours, `--stochastic --opt8bit`", "stochastic: weights and codes of both moments"),
    "stochastic-4bit": ("ours, `--stochastic --opt4bit`", "stochastic: weights and codes of both moments"),
    "stochastic-e4m3": (
        "ours, `--stochastic`, states in e4m3",
        "stochastic: weights and codes of both moments",
    ),
    "stochastic-sgd": ("ours, `--stochastic --optimizer sgd`", "stochastic: weights and momentum"),
    "stochastic-lion": ("ours, `--stochastic --optimizer lion`", "stochastic: weights and momentum"),
    "stochastic-adafactor": ("ours, `--stochastic --optimizer adafactor`", "stochastic: weights and moments"),
    "stochastic-muon": ("ours, `--stochastic --optimizer muon`", "stochastic: weights and momentum"),
    "optimi": ("torch-optimi, Kahan", "compensated"),
    "torchao": ("torchao, stochastic", "stochastic weights"),
    "torchastic": ("torchastic", "stochastic: weights and both moments"),
    "heavyball": ("HeavyBall, stochastic", "stochastic: weights and both moments"),
    "adamw-bf16": ("adamw-bf16", "compensated and stochastic"),
    "sdnq": ("SDNQ", "stochastic weights"),
    "bitsandbytes": ("bitsandbytes 8-bit", "not"),
    "torch-fused": ("torch, fused", "not"),
    "fp32": ("ours, fp32 weights", "fp32, nothing to protect"),
    "torch-fused-fp32": ("torch, fused, fp32 weights", "fp32, nothing to protect"),
}


def docs_table(rows):
    """What docs/speed.md shows of a record."""
    lines = []
    for name, (said, protection) in OPTIMIZER_ROWS.items():
        mixed = median_ms(rows, name=name, layout="mixed")
        large = median_ms(rows, name=name, layout="large")
        if mixed and large:
            lines.append([said, f"{mixed:.1f}", f"{large:.1f}", protection])
    heads = ["optimiser", "271 tensors of mixed sizes", "4 large tensors", "how a bf16 write is protected"]
    return markdown_table([heads, *lines])


TABLES = {
    "docs/speed.md": {
        "optimizers": of_record(docs_table, "cpu-optimizers"),
        "optimizers amd": of_record(docs_table, "cpu-optimizers-amd"),
        "optimizers avx2": of_record(docs_table, "cpu-optimizers-avx2"),
    }
}

COMMAND = Command(
    "optimizers",
    "one optimiser step, ours and peers",
    optimizers,
    repeats=15,
    flags=(
        Flag("--parameters", 10_000_000, "how many are stepped"),
        Flag("--layouts", LAYOUTS, "of what sizes their tensors are", choices=LAYOUTS),
        Flag("--only", list(CONTENDERS), "optimisers to run", choices=CONTENDERS),
    ),
)
