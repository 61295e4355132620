"""What it costs to watch: a training step with and without a look of watch.Watch, in turn (bench.py watch).

The share of a step is that of one look in `every` steps. Between looks the watch counts, and no more. With
one thread on a CPU the process's own time is measured: what others take of the machine does not count.
"""

import statistics
import time
from functools import partial

import torch
from tqdm import tqdm

from benchmarks.common import RECIPES, Clock, parse_net, prepared, take_turns, timed
from lowprec.watch.watch import Watch

RECIPES_WATCHED = ["fp32", "bf16", "pure_bf16-stochastic"]
NETS = ["unet:small:32:8", "dit:S/8:64:8", "unet:tiny:8:64"]


class OwnTime(Clock):
    """CPU time of this process."""

    def mark(self):
        return time.process_time()


def watching(args, clock):
    if args.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = OwnTime(args.device)
    rows = []
    with tqdm(total=len(args.nets) * 3 * 3 * args.repeats, disable=None, leave=False) as bar:
        for spec in args.nets:
            for name in RECIPES_WATCHED:
                rows.append({"net": spec, "recipe": name, **_measured(spec, name, args, clock, bar)})
    print(f"\n{'net':<20}{'recipe':<24}{'step ms':>9}{'look ms':>9}{f'every {args.every} steps':>18}")
    for row in rows:
        step, look = (statistics.median(row[key]) for key in ("step_ms", "look_ms"))
        print(f"{row['net']:<20}{row['recipe']:<24}{step:>9.2f}{look:>9.2f}{row['share']:>18.2%}")
    return rows


def _measured(spec, name, args, clock, bar):
    run, inputs, velocity = prepared(parse_net(spec), RECIPES[name], args.device)

    def step():
        run.backward((run(*inputs) - velocity).square().mean())
        run.step()

    step()  # the compiled step is built
    watch = Watch(run.model, run.optimizer, run.ema, every=args.every)
    step()
    watch.remove()

    def watched(every):
        watch.every, watch.steps = every, 1
        watch.handles = [
            watch.optimizer.register_step_pre_hook(watch._before),
            watch.optimizer.register_step_post_hook(watch._after),
        ]
        times = timed(followed if every == 1 else step, clock, steps=4)
        watch.remove()
        return times

    def followed():
        step()
        if watch.follow:
            with torch.no_grad():
                watch._followed()  # what the next step would begin with

    turns = {"bare": partial(timed, step, clock, 4)}
    turns |= {"look": partial(watched, 1), "idle": partial(watched, 10**9)}
    times = take_turns(turns, args.repeats, bar)
    looks = [look - bare for look, bare in zip(times["look"], times["bare"], strict=True)]
    idle = [max(0.0, a - b) for a, b in zip(times["idle"], times["bare"], strict=True)]
    share = statistics.median(looks) / args.every / statistics.median(times["bare"])
    return dict(step_ms=times["bare"], look_ms=looks, idle_ms=idle, share=share)
