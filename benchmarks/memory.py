"""bench.py memory: what training takes, as allocated.

Two tables a net. The first has bytes a parameter of weights, gradients and optimiser states, for each way to
write a weight and to hold the moments. The second has what a forward pass keeps for backward, by recipe and
batch, with and without --checkpoint_activations. A third does the sum for a net of a billion parameters, the
way document 002 does: states by the ledger's bytes, and what is kept as the share of fp32's that was measured
here, of the 8 GB that the document gives fp32.
"""

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.common import (
    PURE,
    RECIPES,
    STOCHASTIC,
    forget_tables,
    moment_formats,
    moments_in,
    parse_net,
    prepared,
    state_bytes,
    typed,
)
from lowprec.activations import Meter, recompute
from lowprec.optimizers import offload, rounded
from lowprec.precision import recipe
from lowprec.rules import check_machine

# ---- Weights, gradients, states ----------------------------------------------------------------------------


def ways_to_hold():
    """{flags as typed: flags} of the moments: without codes, and in each format. Formats of equal bits and
    blocks take the same bytes: the first stands for all.
    """
    found, seen = {"": {}}, set()
    for name in moment_formats():
        form = rounded.FORMATS[name]
        if (form.bits, form.block) not in seen:
            seen.add((form.bits, form.block))
            found[typed(moments_in(name))] = moments_in(name)
    return found


# how weights are written (rows) and moments held (columns), as flags of train.py
KAHAN = dict(PURE, kahan=True)
RELEASED = dict(STOCHASTIC, grad_release=True)
OFFLOADED = dict(STOCHASTIC, states_on="cpu")
WAYS = ({}, PURE, STOCHASTIC, RELEASED, OFFLOADED)
WAYS += (KAHAN, dict(KAHAN, stochastic=True), dict(PURE, master="split"))
WRITES = {typed(flags): flags for flags in WAYS}
STATES = ways_to_hold()


def memory(args, clock):
    """Rows (dicts): net, flags, bytes a parameter of the weights, gradients and optimiser states allocated,
    and the ledger's word for it; on_cpu: those of them that a GPU holds within a step alone, and rooms: what
    it holds then.
    """
    rows = []
    with tqdm(total=len(args.nets) * len(WRITES) * len(STATES), disable=None, leave=False) as bar:
        for spec in args.nets:
            for write in WRITES.values():
                for state in STATES.values():
                    bar.set_postfix_str(f"{spec} {typed({**write, **state})}")
                    rows.append(allocated(spec, {**write, **state}, args))
                    bar.update()
    for spec in args.nets:
        here = {row["flags"]: row for row in rows if row["net"] == spec}
        what = f"{here['']['parameters']:,} parameters; weights + gradients + states, bytes a parameter"
        print(f"\n{spec} (model:size:image:batch): {what}\n")
        print(memory_table(here))
    return rows + kept(args, rows)


def allocated(spec, flags, args):
    """The row of one net under one recipe, after a step."""
    size = {}

    def look(*_):
        size["gradients"] = sum(p.grad.nbytes for p in run.params if p.grad is not None)

    with torch.compiler.set_stance("force_eager"):  # what is allocated does not depend on it
        run, inputs, velocity = prepared(parse_net(spec), flags, args.device)
        size["weights"] = sum(p.nbytes for p in run.params)
        forget_tables(run.optimizer)
        run.optimizer.register_step_pre_hook(look)
        run.backward(F.mse_loss(run(*inputs), velocity))
        run.step()
        size["states"] = state_bytes(run.optimizer)
    n = sum(p.numel() for p in run.params)
    row = dict(net=spec, flags=typed(flags), parameters=n)
    row.update((name, size[name] / n) for name in ("weights", "gradients", "states"))
    if run.away is not None:
        kept, once = offload.sizes(run.optimizer)
        row.update(on_cpu=kept / n, rooms=getattr(run.away.traffic, "rooms", once) / n)
    return {**row, "bytes_per_parameter": sum(size.values()) / n, "ledger": run.ledger().state_bytes}


def memory_table(rows):
    """Markdown: ways to write a weight down, ways to hold the moments across. rows: {flags: row of `memory`};
    ways that have none, in a record older than they are, are left out.
    """
    writes = [write for write in WRITES if write in rows]
    states = [state for state in STATES if state in rows]
    heads = [f"with `{state}`" if state else "alone" for state in states]
    lines = [f"| flags | {' | '.join(heads)} |", "|---" * (len(states) + 1) + "|"]
    for write in writes:
        cells = [_cell(rows[f"{write} {state}".strip()]) for state in states]
        name = f"`{write}`" if write else "(none)"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row):
    size, away = row["bytes_per_parameter"], row.get("on_cpu")
    return f"{size:.2f}" if away is None else f"{size:.2f}, {size - away:.2f} of them on the GPU"


# ---- What is kept for backward -----------------------------------------------------------------------------

FP8 = dict(fp8=True, fp8_backend="emulate")
KEPT = {"fp32": {}, "bf16": RECIPES["bf16"], "stochastic": STOCHASTIC, "fp8": FP8}
KEPT["stochastic, 8-bit states"] = dict(STOCHASTIC, opt8bit=True)
KEPT["stochastic, 8-bit states, fp8"] = dict(STOCHASTIC, opt8bit=True, **FP8)
BILLION, SAID = 10**9, 8e9  # parameters, and bytes that document 002 gives fp32's activations


def check_kept(args):
    """Raises Refused for a recipe that this machine can't run."""
    for flags in KEPT.values():
        check_machine(recipe(**flags), args.device)


def kept(args, allocated_rows):
    """Rows (dicts): net, recipe, batch, whether blocks are computed again, and what is kept, by dtype."""
    rows = []
    total = len(args.nets) * len(KEPT) * len(args.batches) * 2
    with tqdm(total=total, disable=None, leave=False) as bar:
        for spec in args.nets:
            for name, flags in KEPT.items():
                for again in (False, True):
                    for batch in args.batches:
                        rows.append(kept_by(spec, name, flags, batch, again, args))
                        bar.update()
    for spec in args.nets:
        here = [row for row in rows if row["net"] == spec]
        print(f"\n{spec}: kept for backward, MiB by batch; with blocks computed again in brackets\n")
        print(kept_table(here, args.batches))
        print(f"\nthe same, for a net of {BILLION:,} parameters, GB\n")
        print(billion_table(here, allocated_rows, max(args.batches)))
    return rows


def kept_by(spec, name, flags, batch, again, args):
    """The row of one net, recipe and batch, of one forward pass."""
    net = (*parse_net(spec)[:3], batch)
    with torch.compiler.set_stance("force_eager"):
        run, inputs, velocity = prepared(net, flags, args.device)
        if again:
            recompute(run.model)
        with Meter(run.model) as meter:
            F.mse_loss(run(*inputs), velocity)
    return dict(net=spec, recipe=name, batch=batch, again=again, flags=typed(flags), **meter.json())


def kept_table(rows, batches):
    """Markdown: recipes down, batches across."""
    size = {(row["recipe"], row["batch"], row["again"]): row["total"] / 2**20 for row in rows}
    heads = ["recipe", *map(str, batches), "share of fp32's"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in KEPT:
        cells = [f"{size[name, batch, False]:.1f} ({size[name, batch, True]:.1f})" for batch in batches]
        share = size[name, batches[-1], False] / size["fp32", batches[-1], False]
        lines.append(f"| {name} | {' | '.join(cells)} | {share:.0%} |")
    return "\n".join(lines)


def billion_table(rows, allocated_rows, batch):
    """Markdown: weights, gradients, states and activations of a billion parameters, in GB."""
    total = {row["recipe"]: row["total"] for row in rows if row["batch"] == batch and not row["again"]}
    lines = ["| recipe | weights | gradients | states | kept for backward | together |", "|---" * 6 + "|"]
    for name, flags in KEPT.items():
        alone = {key: value for key, value in flags.items() if key not in (*FP8, "bf16")}
        own = [row for row in allocated_rows if row.get("net", rows[0]["net"]) == rows[0]["net"]]
        held = next(row for row in own if row["flags"] == typed(alone))
        sizes = [held[part] * BILLION / 1e9 for part in ("weights", "gradients", "states")]
        sizes.append(SAID / 1e9 * total[name] / total["fp32"])
        lines.append(f"| {name} | {' | '.join(f'{size:.1f}' for size in [*sizes, sum(sizes)])} |")
    return "\n".join(lines)
