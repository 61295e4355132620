"""bench.py memory: what training takes, as allocated. (3 minutes, 3 GiB)

Two tables a net. The first has bytes a parameter of weights, gradients and optimiser states, for each way to
write a weight and to hold the moments. The second has what a forward pass keeps for backward, by recipe and
batch, with and without --checkpoint_activations. A third adds both up for a net of a billion parameters:
states by the bytes allocated here, activations as 8 GB in fp32 times the share of fp32's measured here.
"""

import gc
from itertools import product

import torch
import torch.nn.functional as F

from benchmarks.allocated import count_of, forget_tables, state_bytes
from benchmarks.common import (
    PURE_BF16,
    PURE_BF16_STOCHASTIC,
    RECIPES,
    Command,
    Flag,
    check_nets,
    moment_formats,
    moments_in,
    nets_flag,
    parse_net,
    prepared,
    progress_bar,
    rows_by,
    training_step,
)
from benchmarks.records import of_record
from harness.printing import markdown_table
from lowprec.evidence import typed
from lowprec.formats import FORMATS
from lowprec.parts import offload
from lowprec.parts.activations import Meter, recompute
from lowprec.precision import recipe
from lowprec.rules import check_machine

# ---- Weights, gradients, states ----------------------------------------------------------------------------


def ways_to_hold():
    """{flags as typed: flags} of the moments: without codes, and in each format.

    Formats of equal bits and blocks take the same bytes: the first stands for all.
    """
    found = {"": {}}
    seen = set()
    for name in moment_formats():
        size = FORMATS[name].bits, FORMATS[name].block
        if size not in seen:
            seen.add(size)
            found[typed(moments_in(name))] = moments_in(name)
    return found


# how weights are written (rows) and moments held (columns), as flags of train.py
KAHAN = dict(PURE_BF16, kahan=True)
GRADS_RELEASED = dict(PURE_BF16_STOCHASTIC, grad_release=True)
OFFLOADED = dict(PURE_BF16_STOCHASTIC, states_on="cpu")
SPLITS = [dict(PURE_BF16, master=master) for master in ("split", "split8")]
ECO = dict(PURE_BF16, sites=["update=eco"])
WAYS_TO_WRITE = (
    {},
    PURE_BF16,
    PURE_BF16_STOCHASTIC,
    GRADS_RELEASED,
    OFFLOADED,
    KAHAN,
    dict(KAHAN, stochastic=True),
    *SPLITS,
    ECO,
)
WRITES = {typed(flags): flags for flags in WAYS_TO_WRITE}
MOMENT_FLAGS = ways_to_hold()


def check(args):
    check_nets(args.nets)
    for flags in ACTIVATION_RECIPES.values():
        check_machine(recipe(**flags), args.device)
    for name in moment_formats():
        check_machine(recipe(**moments_in(name)), args.device)


def memory(args, clock):
    """The rows of `state_rows` and of `activation_rows`."""
    allocated_rows = state_rows(args)
    return allocated_rows + activation_rows(args, allocated_rows)


def state_rows(args):
    """Rows (dicts): net, flags, bytes a parameter of weights, gradients and states, as allocated and as the
    ledger says. on_cpu: those that a GPU holds within a step alone; rooms: what it holds of them then.
    """
    rows = []
    cases = list(product(args.nets, WRITES.values(), MOMENT_FLAGS.values()))
    with progress_bar(len(cases)) as bar:
        for spec, write, state in cases:
            flags = joined_flags(write, state)
            bar.set_postfix_str(f"{spec} {typed(flags)}")
            rows.append(allocated_row(spec, flags, args))
            gc.collect()  # a run is a circle of objects, which Python else frees some cases later
            bar.update()
    for spec, of_net in rows_by(rows, "net").items():
        here = {row["flags"]: row for row in of_net}
        what = f"{here['']['parameters']:,} parameters; weights + gradients + states, bytes a parameter"
        print(f"\n{spec} (model:size:image:batch): {what}\n")
        print(memory_table(here))
    return rows


def joined_flags(write, state):
    """The arguments of recipe() for a way to write weights and one to hold moments."""
    flags = {**write, **state}
    if "sites" in flags:
        flags["sites"] = [*write.get("sites", ()), *state.get("sites", ())]
    return flags


def allocated_row(spec, flags, args):
    """The row of one net under one recipe, after a step."""
    size = {}

    def look(*_):
        size["gradients"] = sum(p.grad.nbytes for p in run.params if p.grad is not None)

    with torch.compiler.set_stance("force_eager"):  # what is allocated does not depend on it
        run, inputs, velocity = prepared(parse_net(spec), flags, args.device)
        size["weights"] = sum(p.nbytes for p in run.params)
        forget_tables(run.optimizer)
        run.optimizer.register_step_pre_hook(look)
        training_step(run, inputs, velocity)()
        size["states"] = state_bytes(run.optimizer)
    n = count_of(run.params)
    row = dict(net=spec, flags=typed(flags), parameters=n)
    for name in ("weights", "gradients", "states"):
        row[name] = size[name] / n
    if run.away is not None:
        on_cpu, once = offload.bytes_kept_away(run.optimizer)
        row.update(on_cpu=on_cpu / n, rooms=getattr(run.away.traffic, "rooms", once) / n)
    row["bytes_per_parameter"] = sum(size.values()) / n
    row["ledger"] = run.ledger().state_bytes
    return row


def memory_table(rows):
    """Markdown: ways to write a weight down, ways to hold the moments across.

    rows: {flags: row of `state_rows`}; ways that have none, in a record older than they are, are left out.
    """
    states = [state for state in MOMENT_FLAGS if state in rows]
    heads = ["flags"]
    for state in states:
        heads.append(f"with `{state}`" if state else "alone")
    lines = []
    for write in WRITES:
        if write in rows:
            cells = [bytes_shown(rows[f"{write} {state}".strip()]) for state in states]
            lines.append([f"`{write}`" if write else "(none)", *cells])
    return markdown_table([heads, *lines])


def bytes_shown(row):
    size = row["bytes_per_parameter"]
    if "on_cpu" not in row:
        return f"{size:.2f}"
    return f"{size:.2f}, {size - row['on_cpu']:.2f} of them on the GPU"


# ---- What is kept for backward -----------------------------------------------------------------------------

EMULATED_FP8 = dict(fp8=True, fp8_backend="emulate")
ACTIVATION_RECIPES = {
    "fp32": {},
    "bf16": RECIPES["bf16"],
    "stochastic": PURE_BF16_STOCHASTIC,
    "fp8": EMULATED_FP8,
    "stochastic, 8-bit states": dict(PURE_BF16_STOCHASTIC, opt8bit=True),
    "stochastic, 8-bit states, fp8": dict(PURE_BF16_STOCHASTIC, opt8bit=True, **EMULATED_FP8),
    "mxfp8": dict(EMULATED_FP8, fp8_recipe="mxfp8"),
    "nvfp4": dict(fp4="nvfp4"),
}
BILLION = 10**9  # parameters
FP32_ACTIVATIONS = 8.0  # GB for a billion parameters, as document 002 of CLAIMS.md says


def activation_rows(args, allocated_rows):
    """Rows (dicts): net, recipe, batch, whether blocks are computed again, and what is kept, by dtype."""
    rows = []
    cases = list(product(args.nets, ACTIVATION_RECIPES, (False, True), args.batches))
    with progress_bar(len(cases)) as bar:
        for spec, name, again, batch in cases:
            rows.append(activation_row(spec, name, ACTIVATION_RECIPES[name], batch, again, args))
            gc.collect()
            bar.update()
    for spec, here in rows_by(rows, "net").items():
        print(f"\n{spec}: kept for backward, MiB by batch; with blocks computed again in brackets\n")
        print(kept_table(here, args.batches))
        print(f"\nthe same, for a net of {BILLION:,} parameters, GB\n")
        print(billion_table(here, allocated_rows, max(args.batches)))
    return rows


def activation_row(spec, name, flags, batch, again, args):
    """The row of one net, recipe and batch, of one forward pass."""
    model, size, side, _ = parse_net(spec)
    with torch.compiler.set_stance("force_eager"):
        run, inputs, velocity = prepared((model, size, side, batch), flags, args.device)
        if again:
            recompute(run.model)
        with Meter(run.model) as meter:
            F.mse_loss(run(*inputs), velocity)
    return dict(net=spec, recipe=name, batch=batch, again=again, flags=typed(flags), **meter.json())


def kept_table(rows, batches):
    """Markdown: recipes down, batches across."""
    size = {(row["recipe"], row["batch"], row["again"]): row["total"] / 2**20 for row in rows}
    lines = []
    for name in ACTIVATION_RECIPES:
        cells = [f"{size[name, batch, False]:.1f} ({size[name, batch, True]:.1f})" for batch in batches]
        share = size[name, batches[-1], False] / size["fp32", batches[-1], False]
        lines.append([name, *cells, f"{share:.0%}"])
    return markdown_table([["recipe", *map(str, batches), "share of fp32's"], *lines])


def billion_table(rows, allocated_rows, batch):
    """Markdown: weights, gradients, states and activations of a billion parameters, in GB."""
    total = {row["recipe"]: row["total"] for row in rows if row["batch"] == batch and not row["again"]}
    of_net = rows_by(allocated_rows, "net")[rows[0]["net"]]
    by_flags = {row["flags"]: row for row in of_net}
    lines = []
    for name, flags in ACTIVATION_RECIPES.items():
        row = by_flags[flags_of_states(flags)]
        sizes = [row[part] * BILLION / 1e9 for part in ("weights", "gradients", "states")]
        sizes.append(FP32_ACTIVATIONS * total[name] / total["fp32"])
        sizes.append(sum(sizes))
        lines.append([name, *(f"{size:.1f}" for size in sizes)])
    head = ["recipe", "weights", "gradients", "states", "kept for backward", "together"]
    return markdown_table([head, *lines])


def flags_of_states(flags):
    """Those of a recipe's flags, as typed, that decide what weights, gradients and states take."""
    of_states = dict(flags)
    for of_products in (*EMULATED_FP8, "fp8_recipe", "fp4", "bf16"):
        of_states.pop(of_products, None)
    return typed(of_states)


DOCS_NET = "dit:S/8:64:1"


def docs_table(rows):
    """What docs/formats.md shows of a record."""
    return memory_table({row["flags"]: row for row in rows if row["net"] == DOCS_NET and "weights" in row})


TABLES = {"docs/formats.md": {"memory": of_record(docs_table, "cpu-memory")}}

COMMAND = Command(
    "memory",
    "bytes a parameter of every combination, as allocated",
    memory,
    flags=(
        nets_flag("dit:S/8:64:1", "unet:small:64:1"),
        Flag("--batches", [2, 8, 32], "examples of a forward pass"),
    ),
    check=check,
)
