"""bench.py batch: the largest batch that trains under each recipe on this GPU. (3 minutes)

    python bench.py batch                      DiT-XL/2 on images of 64x64, and a U-Net
    python bench.py batch --most 4 --device cpu --nets dit:tiny:8:1     a rehearsal: sizes up to 4, no limit

Two training steps are taken with 2, 4, 8 ... images until memory does not suffice, and then with sizes
between the last that fitted and the first that did not, to a sixteenth. A tenth of the free memory stays
free. Beside what was found stands what `python -m lowprec advise` says of the net on this machine.
"""

import contextlib
import sys

import torch

from benchmarks.common import (
    RECIPES,
    Command,
    Flag,
    batch_of,
    built_net,
    check_nets,
    loss_of_images,
    nets_flag,
    or_dash,
    parse_net,
    prepared,
    progress_bar,
    rows_by,
    training_step,
)
from benchmarks.records import H100, of_record
from harness.batch_size import TrialMemory, largest_power_of_two, never_full, survives
from harness.printing import markdown_table
from lowprec.advice.answer import advise
from lowprec.errors import Refused
from lowprec.evidence import typed
from lowprec.precision import recipe
from lowprec.rules import check_machine

BATCH_NETS = ["dit:XL/2:64:1", "unet:base:64:1"]
LARGEST_TRIED = 4096
BATCH_RECIPES = (
    "fp32",
    "bf16",
    "bf16-opt8bit",
    "pure_bf16-split",
    "pure_bf16-stochastic",
    "pure_bf16-stochastic-opt8bit",
)


def check(args):
    check_nets(args.nets)
    why = never_full(args.device)
    if why and not args.most:
        raise Refused(f"batch --device {args.device}: {why}; --most 4 rehearses it")
    for name in args.recipes:
        check_machine(recipe(**RECIPES[name]), args.device)


def largest_that_fits(fits, most):
    """The largest size, at most `most`, for which fits(size) holds, to a sixteenth of itself; 0 for none."""
    good = largest_power_of_two(fits, most)
    bad = min(2 * good or 1, most + 1)
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def searched(spec, name, args):
    """The row of a recipe on a net: the batch that was found, and the bytes that it took."""
    kind, size, side, _ = parse_net(spec)
    on_gpu = args.device.type == "cuda"
    used = {}
    with TrialMemory(args.device) if on_gpu else contextlib.nullcontext() as memory:
        run, *_ = prepared((kind, size, side, 1), RECIPES[name], args.device)

        def fits(batch):
            if on_gpu:
                memory.clear()
            fine = survives(lambda: two_steps(run, (kind, size, side, batch), args.device))
            for p in run.params:  # what a step that failed has left
                p.grad = None
            used[batch] = memory.used() if on_gpu else None
            return fine

        found = largest_that_fits(fits, args.most or LARGEST_TRIED)
    return dict(net=spec, recipe=name, batch=found, used_bytes=used.get(found), tried=sorted(used))


def advised_batches(spec):
    """{flags: the largest batch that `advise` tells of a net on this machine}."""
    net = parse_net(spec)
    with torch.device("meta"):
        model = built_net(net)
    rows = advise(model, loss_of_images(net[2])).rows
    return {row.candidate.typed.replace("(none)", ""): row.most for row in rows}


def two_steps(run, net, device):
    """The second step is the one that holds moments while gradients come."""
    step = training_step(run, *batch_of(net, device))
    step()
    step()


def batch(args, clock):
    """Rows (dicts): net, recipe, largest batch, bytes it took, sizes tried, the batch that `advise` tells;
    those found so far where it is interrupted.
    """
    rows = []
    try:
        search_all(args, rows)
    except KeyboardInterrupt:
        if not rows:
            raise
        print("interrupted; what was found is kept", file=sys.stderr)
    print(table(rows))
    return rows


def search_all(args, rows):
    with progress_bar(len(args.nets) * len(args.recipes)) as bar:
        for spec in args.nets:
            told = advised_batches(spec)
            for name in args.recipes:
                bar.set_postfix_str(f"{spec} {name}")
                rows.append({**searched(spec, name, args), "told": told.get(typed(RECIPES[name]))})
                bar.write(f"{spec} {name}: {rows[-1]['batch']}")
                bar.update()


def table(rows):
    """Markdown: the batch of each recipe, how many times the first one's it is, and what `advise` tells."""
    lines = []
    for spec, of_net in rows_by(rows, "net").items():
        first = of_net[0]["batch"]
        for row in of_net:
            times = f"{row['batch'] / first:.2f}" if first else "-"
            told = or_dash(row["told"], "d")
            lines.append([spec.rpartition(":")[0], row["recipe"], str(row["batch"]), times, told])
    return markdown_table([["net", "recipe", "largest batch", "times the first", "advise tells"], *lines])


TABLES = {"docs/speed.md": {"gpu batch": of_record(table, f"{H100}-batch", f"{H100}-batch-unet")}}

COMMAND = Command(
    "batch",
    "the largest batch that fits under each recipe on this GPU",
    batch,
    flags=(
        nets_flag(*BATCH_NETS),
        Flag("--recipes", list(BATCH_RECIPES), "what is tried", choices=RECIPES),
        Flag("--most", None, f"largest size that is tried, in place of {LARGEST_TRIED}"),
    ),
    check=check,
)
