"""How long one step of an optimiser takes, beside other libraries and beside copying the same bytes."""

import math
import statistics
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from benchmarks import subjects
from benchmarks.common import (
    ADAMW,
    PRESETS,
    PURE,
    STOCHASTIC,
    cell,
    forget_tables,
    moment_formats,
    moments_in,
    state_bytes,
    take_turns,
    timed,
)
from lowprec.errors import Refused
from lowprec.optimizers import build, peers
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.precision import Recipe, recipe


@dataclass(frozen=True)
class Contender:
    """protection: what keeps small updates from being lost. optimizer: a name for `peers.build`, or None for
    what is no optimiser of the recipes.
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
# peers that train.py does not offer, see subjects.PEERS
UNLISTED = ("heavyball", "sdnq", "sdnq-8bit", "flashoptim")


def contenders():
    """{name: Contender}: ways to write with AdamW, formats of its moments, our other optimisers, peers, and
    three yardsticks.
    """
    pure, stochastic = recipe(**PURE), recipe(**STOCHASTIC)
    rows = {
        "stochastic": Contender("stochastic w m v", stochastic),
        "nearest": Contender("none", pure),
        "kahan": Contender("compensated w", recipe(**PURE, kahan=True)),
        "kahan-stochastic": Contender("compensated w, stochastic m v", recipe(**STOCHASTIC, kahan=True)),
        "split": Contender("exact w", recipe(**PURE, master="split")),
        "fp32": Contender("fp32 weights", Recipe()),
    }
    for name in moment_formats():
        label = PRESETS.get(name, name).removeprefix("opt")
        rows[f"stochastic-{label}"] = Contender("stochastic w m v", recipe(**STOCHASTIC, **moments_in(name)))
    for name in OPTIMIZERS:
        if name != "adamw":
            rows[f"stochastic-{name}"] = Contender("stochastic, all of it", stochastic, name)
    known = [name for name in PROTECTION if name in peers.PEERS and name not in UNLISTED]
    for name in [*known, *(name for name in peers.PEERS if name not in PROTECTION)]:
        r = recipe(**PURE, opt8bit=True) if name == "bitsandbytes" else pure
        protection = PROTECTION.get(name, "as its authors publish it")
        rows[name.replace("_", "-")] = Contender(protection, r, name)
    for name in UNLISTED:
        rows[name] = Contender(PROTECTION[name], pure, None)
    rows["torch-fused"] = Contender("none", pure, None)
    rows["torch-fused-fp32"] = Contender("fp32 weights", Recipe(), None)
    rows["copy"] = Contender("moves the bytes of a step", pure, None)
    return rows


CONTENDERS = contenders()
LAYOUTS = ["mixed", "large"]
COPIED = 14  # bytes a parameter: a step on bf16 reads w, g, m, v and writes w, m, v, as does copying 7 bytes


def layout_shapes(layout, n):
    """Shapes of n parameters. 'large': four vectors. 'mixed': blocks of four widths as in a U-Net or
    transformer, where most tensors are vectors and most values lie in kernels and matrices.
    """
    if layout == "large":
        sizes = [n // 4 + (i < n % 4) for i in range(4)]
        return [(size,) for size in sizes if size]
    block = []
    for w in (32, 64, 128, 256):
        block += [(w, w, 3, 3), (w,), (w,), (w,), (w, w), (w,)]
        block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    shapes, left, i = [], n, 0
    while left and math.prod(block[i % len(block)]) <= left:
        shapes.append(block[i % len(block)])
        left -= math.prod(shapes[-1])
        i += 1
    return shapes + [(left,)] * (left > 0)


def make_step(name, params):
    """(callable that does one step on `params`, the optimiser or None). Raises Refused for a missing package.
    """
    contender = CONTENDERS[name]
    if name == "copy":
        moved = COPIED // 2 * sum(p.numel() for p in params)
        source = torch.ones(moved, dtype=torch.uint8, device=params[0].device)
        return partial(torch.zeros_like(source).copy_, source), None
    if name.startswith("torch-fused"):
        made = torch.optim.AdamW(params, **ADAMW, fused=True)
    elif name in UNLISTED:
        made = subjects.subject(name, params[0].device).over(params, **ADAMW)
    else:
        other = contender.ours and contender.optimizer != "adamw"  # its eps may be another thing
        options = {key: ADAMW[key] for key in (("lr", "weight_decay") if other else ADAMW)}
        made = build.build(contender.optimizer, params, contender.recipe, **options)
    return getattr(made, "inner", made).step, made  # a peer's own step, without our adapter


class Contest:
    """The contenders of one layout, all on the same weights and gradients."""

    def __init__(self, layout, args, clock, bar):
        self.layout, self.args, self.clock, self.bar = layout, args, clock, bar
        generator = torch.Generator().manual_seed(0)
        shapes = layout_shapes(layout, args.parameters)
        self.weights = [torch.randn(s, generator=generator) * 0.05 for s in shapes]
        sources = [torch.randn(s, generator=generator) * 1e-3 for s in shapes]
        self.grads, self.fresh, self.params = {}, {}, {}
        for dtype in (torch.bfloat16, torch.float32):
            self.grads[dtype] = [g.to(args.device, dtype) for g in sources]
            self.fresh[dtype] = [g.clone() for g in self.grads[dtype]]

    def refill(self, name):
        """The gradients as after a backward: adamw-bf16 leaves zeros behind, heavyball none at all."""
        dtype = CONTENDERS[name].recipe.dtype("weights")
        torch._foreach_copy_(self.grads[dtype], self.fresh[dtype])
        for p, g in zip(self.params[name], self.grads[dtype], strict=True):
            p.grad = g

    def rows(self):
        """Rows (dicts): name, protection, ms of each round, bytes of state a parameter, or a note why not."""
        rows, actions = [], {}
        for name in self.args.only:
            self.bar.set_postfix_str(f"{self.layout}: first step of {name}")
            row, step = self._started(name)
            rows.append(row)
            if step is not None:
                actions[name] = partial(timed, step, self.clock)
            self.bar.update()
        times = take_turns(actions, self.args.repeats, self.bar, self.refill)
        for row in rows:
            row["ms"] = times.get(row["name"], [])
        return rows

    def _started(self, name):
        """(row, step or None) of a contender after its first steps."""
        contender = CONTENDERS[name]
        row = dict(layout=self.layout, tensors=len(self.weights), name=name, protection=contender.protection)
        row.update(note="", first_step_s=None, state_bytes=None, moved_bytes=COPIED, ms=[])
        dtype = contender.recipe.dtype("weights")
        params = [torch.nn.Parameter(w.to(self.args.device, dtype)) for w in self.weights]
        self.params[name] = params
        self.refill(name)
        try:
            step, optimizer = make_step(name, params)
            forget_tables(optimizer)
            row["first_step_s"] = timed(step, self.clock) / 1e3
            self.refill(name)
            timed(step, self.clock)
        except Refused as error:
            missing = "pip install" in str(error)
            row["note"] = "not installed: " + str(error).rsplit(": ", 1)[1] if missing else str(error)
            return row, None
        except Exception as error:  # a peer that fails, say for want of a compiler, is a line
            if contender.ours:  # a bug of ours is not
                raise
            row["note"] = f"fails here: {type(error).__name__}"
            return row, None
        if optimizer is not None:
            row["state_bytes"] = state_bytes(optimizer) / self.args.parameters
            # weights, gradients and states are read, weights and states written
            row["moved_bytes"] = 3 * dtype.itemsize + 2 * row["state_bytes"]
        return row, step


def optimizers(args, clock):
    rows, rounds = [], args.repeats + 1
    with tqdm(total=len(args.layouts) * len(args.only) * rounds, disable=None, leave=False) as bar:
        for layout in args.layouts:
            rows += Contest(layout, args, clock, bar).rows()
    for layout in args.layouts:
        _print_layout(layout, [row for row in rows if row["layout"] == layout], args)
    ours = [name for name, contender in CONTENDERS.items() if contender.ours]
    print("\nratio: to ours, stochastic. of copy: bytes a second that a step moves, over those of copying.")
    print("w weights, m exp_avg, v exp_avg_sq. ours: " + ", ".join(ours))
    return rows


def _print_layout(layout, rows, args):
    medians = {row["name"]: statistics.median(row["ms"]) for row in rows if row["ms"]}
    unit, copied = medians.get("stochastic"), medians.get("copy")
    count = f"{args.parameters:,} parameters in {rows[0]['tensors']} tensors"
    print(f"\n{layout}: {count}, {args.repeats} rounds")
    heads = f"{'optimiser':<18}{'ms (median)':>12}{'fastest':>9}{'ratio':>8}{'of copy':>9}"
    print(f"{heads}{'state B/param':>15}{'first step s':>14}  protects small updates")
    for row in sorted(rows, key=_median):
        if row["note"]:
            print(f"{row['name']:<18}{row['note']}")
            continue
        median = _median(row)
        ratio = "-" if unit is None else f"{median / unit:.2f}"
        share = "-" if copied is None else f"{row['moved_bytes'] / COPIED * copied / median:.0%}"
        figures = f"{median:>12.2f}{min(row['ms']):>9.2f}{ratio:>8}{share:>9}"
        figures += f"{cell(row['state_bytes'], '.2f'):>15}"
        print(f"{row['name']:<18}{figures}{row['first_step_s']:>14.2f}  {row['protection']}")


def _median(row):
    return statistics.median(row["ms"] or [math.inf])
