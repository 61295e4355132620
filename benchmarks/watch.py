"""bench.py watch: a training step with and without a look of watch.Watch, in turn.

The share of a step is that of one look in `every` steps. Between looks the watch counts, and no more. With
one thread on a CPU the process's own time is measured: what others take of the machine does not count.
"""

import statistics
import time
from itertools import product

import torch

from benchmarks.common import (
    RECIPES,
    Cell,
    Command,
    DeviceClock,
    Flag,
    check_nets,
    in_turn,
    nets_flag,
    parse_net,
    prepared,
    progress_bar,
    take_turns,
    timed,
    training_step,
)
from benchmarks.records import of_record
from harness.printing import markdown_table
from lowprec.watch.watch import Watch

RECIPES_WATCHED = ["fp32", "bf16", "pure_bf16-stochastic"]
WATCHED_NETS = ["unet:small:32:8", "dit:S/8:64:8", "unet:tiny:8:64"]
NEVER = 10**9  # steps between two looks
STEPS_A_TURN = 4  # a turn


class OwnTime(DeviceClock):
    """CPU time of this process."""

    def mark(self):
        return time.process_time()


def check(args):
    check_nets(args.nets)


def watching(args, clock):
    """Rows (dicts): net, recipe, ms of a step, of a look and of a step between looks, share of a step."""
    if args.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = OwnTime(args.device)
    rows = []
    with progress_bar(len(args.nets) * len(RECIPES_WATCHED) * 3 * args.repeats) as bar:
        for spec, name in product(args.nets, RECIPES_WATCHED):
            rows.append(measured(spec, name, args, clock, bar))
    print(f"\n{table(rows, args.every)}")
    return rows


class Watched:
    """A run whose steps are taken without a watch, with one that looks, and with one that waits."""

    def __init__(self, spec, recipe, args, clock):
        self.clock = clock
        run, inputs, velocity = prepared(parse_net(spec), RECIPES[recipe], args.device)
        self.step = training_step(run, inputs, velocity)
        self.step()  # the compiled step is built
        self.watch = Watch(run.model, run.optimizer, run.ema, every=args.every)
        self.step()
        self.watch.remove()

    def bare(self):
        return in_turn(self.step, self.clock, STEPS_A_TURN, "bare")

    def look(self):
        return {"look": self.under_watch(self.followed_step, every=1)}

    def idle(self):
        return {"idle": self.under_watch(self.step, every=NEVER)}

    def under_watch(self, step, every):
        """Milliseconds a step with the watch's hooks in place."""
        watch = self.watch
        watch.every, watch.steps = every, 1
        watch.handles = [
            watch.optimizer.register_step_pre_hook(watch._before),
            watch.optimizer.register_step_post_hook(watch._after),
        ]
        ms = timed(step, self.clock, STEPS_A_TURN)
        watch.remove()
        return ms

    def followed_step(self):
        self.step()
        if self.watch.follow:
            with torch.no_grad():
                self.watch._followed()  # what the next step would begin with


def measured(spec, recipe, args, clock, bar):
    """The row of a net under a recipe."""
    run = Watched(spec, recipe, args, clock)
    cell = Cell(f"{spec}, {recipe}", {}, [run.bare, run.look, run.idle])
    (times,) = take_turns([cell], args.repeats, bar)
    rounds = list(zip(times["bare"], times["look"], times["idle"], strict=True))
    looks = [look - bare for bare, look, _ in rounds]
    return dict(
        net=spec,
        recipe=recipe,
        step_ms=times["bare"],
        look_ms=looks,
        idle_ms=[max(0.0, idle - bare) for bare, _, idle in rounds],
        share=statistics.median(looks) / args.every / statistics.median(times["bare"]),
    )


def table(rows, every=50):
    """Markdown: a step, a look, and the share of a step that a look in `every` steps is."""
    lines = []
    for row in rows:
        step, look = (f"{statistics.median(row[name]):.0f} ms" for name in ("step_ms", "look_ms"))
        lines.append([f"`{row['net']}`", f"`{row['recipe']}`", step, look, f"{row['share']:.1%}"])
    head = ["net, size, image, batch", "recipe", "step", "look", f"share at every={every}"]
    return markdown_table([head, *lines])


TABLES = {"docs/faults.md": {"looks": of_record(table, "cpu-watch")}}

COMMAND = Command(
    "watch",
    "a step with and without watch.Watch",
    watching,
    repeats=9,
    flags=(nets_flag(*WATCHED_NETS), Flag("--every", 50, "steps between two looks")),
    check=check,
)
