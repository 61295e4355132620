"""Speed and memory of the recipes and of other libraries' optimisers, as ratios measured side by side.

    python bench.py optimizers    one step on 10 million parameters, ours and peers (requirements-bench.txt)
    python bench.py training      images a second of U-Nets and DiTs under each recipe; the whole step
    python bench.py memory        bytes of weights, gradients and states, each way to hold them, and of what
                                  is kept for backward, by recipe and batch (benchmarks/memory.py)
    python bench.py systems       segmentation, language and video, as documents compare configurations
                                  (benchmarks/systems.py)
    python bench.py peers         a whole step in a bare loop, Lightning, Accelerate and here
                                  (benchmarks/loops.py)
    python bench.py sharding      what each process holds of a net under --fsdp, beside what --dry_run says
                                  (benchmarks/sharding.py)
    python bench.py moments       whether exp_avg_sq falls when half of the gradients drop to a hundredth
    python bench.py watch         what watch.Watch costs of a step (benchmarks/watch.py)
    python bench.py first         how long each task's first command takes, and what comes out
                                  (benchmarks/first.py)
    python bench.py conformance   what any optimiser or average of low precision keeps to, as figures
                                  (benchmarks/conformance_command.py)
    python bench.py --gpu         everything that needs a GPU, on nets of real size (benchmarks/gpu.py)

What it shows: the fused step is the fastest of those that round stochastically or carry a Kahan compensation,
in tensors of mixed sizes as in a real net and in a few large ones; bf16 speeds up training where the machine
multiplies in bf16; telemetry costs under 2 % of a step. Contenders take turns, in an order shuffled for each
round, so that other load on the machine meets all of them alike. A figure is the median over the rounds;
--out FILE keeps every single time. Optimisers and formats come from their registries: a new one is one more
row here. Cost on 2 cores: about 4 minutes and 3 GiB for `optimizers` (more the first time: torchao compiles
each shape), about 5 minutes for `training`, 2 minutes and 2 GiB for `memory`, 2 minutes for `moments`. Bad
input ends with one line and exit status 2.
"""

import argparse
import datetime
import os
import shlex
import sys
from pathlib import Path

import torch

from benchmarks import conformance_command, first, gpu, loops, sharding, subjects, systems, watch
from benchmarks.common import (
    RECIPES,
    Clock,
    check_nets,
    moment_formats,
    moments_in,
)
from benchmarks.memory import check_kept, memory
from benchmarks.optimizers import CONTENDERS, LAYOUTS, optimizers
from benchmarks.training import HOLDERS, NETS, ON_REQUEST, TRAINED, moments, training
from harness.files import write_json
from harness.flags import Parser, count, natural
from harness.run_folder import environment
from lowprec.errors import Refused
from lowprec.machine import quiet_libraries
from lowprec.precision import recipe
from lowprec.rules import check_machine

# ---- Training ----------------------------------------------------------------------------------------------

TRAINED += ("opt8bit", *ON_REQUEST)


# ---- The second moment after a drop ------------------------------------------------------------------------

for kind in ("bf16", *moment_formats()):
    HOLDERS += [f"{kind} nearest", f"{kind} stochastic"]


# ---- The command -------------------------------------------------------------------------------------------

COMMANDS = {
    "optimizers": optimizers,
    "training": training,
    "memory": memory,
    "sharding": sharding.measured,
    "moments": moments,
    "systems": systems.systems,
    "peers": loops.peers,
    "watch": watch.watching,
    "first": first.first,
    "conformance": conformance_command.conforming,
}


def build_parser():
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench.py", formatter_class=form, description=__doc__)
    names = " | ".join([*COMMANDS, "--gpu"])
    commands = parser.add_subparsers(dest="bench", required=True, metavar=names)

    def command(name, repeats, help):
        sub = commands.add_parser(name, help=help)
        if repeats:
            sub.add_argument("--repeats", type=natural, default=repeats, help=f"rounds (default: {repeats})")
        sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="(default: auto)")
        sub.add_argument("--threads", type=natural, help="CPU threads (default: as torch chooses)")
        out = "write machine, versions and every single time as JSON"
        sub.add_argument("--out", metavar="FILE", help=out)
        return sub

    def choice(sub, flag, choices, default, help):
        sub.add_argument(flag, nargs="+", choices=list(choices), default=default, metavar="NAME", help=help)

    def nets(sub, default):
        form, help = "MODEL:SIZE:IMAGE:BATCH", f"default: {' '.join(default)}"
        sub.add_argument("--nets", nargs="+", default=default, metavar=form, help=help)

    sub = command("optimizers", 15, "one optimiser step, ours and peers")
    sub.add_argument("--parameters", type=natural, default=10_000_000, help="default: 10_000_000")
    sub.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: both")
    names = list(CONTENDERS)
    choice(sub, "--only", names, names, "optimisers to run (default: all): " + ", ".join(names))
    sub = command("training", 7, "one training step under each recipe")
    nets(sub, NETS)
    names = [name for name in TRAINED if name not in ON_REQUEST]
    choice(sub, "--recipes", TRAINED, names, f"default: all but the last two of {', '.join(TRAINED)}")
    every = "steps between two measurements of telemetry (default: 50)"
    sub.add_argument("--measure_every", type=natural, default=50, help=every)
    sub = command("moments", None, "exp_avg_sq after a drop of gradients, by how it is held")
    sub.add_argument("--before", type=natural, default=1000, help="steps before the drop (default: 1000)")
    sub.add_argument("--after", type=natural, default=3000, help="steps after it (default: 3000)")
    sub = command("memory", None, "bytes a parameter of every combination, as allocated")
    nets(sub, ["dit:S/8:64:1", "unet:small:64:1"])
    sub.add_argument("--batches", nargs="+", type=natural, default=[2, 8, 32], help="default: 2 8 32")
    sub = command("sharding", None, "bytes of each process under --fsdp, as allocated and by arithmetic")
    nets(sub, ["dit:S/8:64:2"])
    sub.add_argument("--ranks", type=natural, default=2, help="processes, on the CPU (default: 2)")
    sub = command("systems", 9, "a step of other systems than diffusion, as documents compare them")
    names = list(systems.TABLES)
    apart = list(systems.APART)
    said = f"tables (default: all of these): {', '.join(names)}; or {' '.join(apart)}"
    choice(sub, "--only", names + apart, names, said)
    steps = "steps that each is trained to before it is scored, 0 for no scores (default: 300)"
    sub.add_argument("--train", type=count, default=300, help=steps)
    sub = command("peers", 9, "a step of the same net in other people's loops")
    names = list(loops.NETS)
    choice(sub, "--only", names, names, "nets (default: all): " + ", ".join(names))
    tasks = list(loops.TASKS)
    each = "these tasks (all: no name) beside a bare loop, in fp32: " + "; ".join(tasks)
    sub.add_argument("--tasks", nargs="*", choices=tasks, metavar="NAME", help=each)
    sub = command("watch", 9, "a step with and without watch.Watch")
    nets(sub, watch.NETS)
    sub.add_argument("--every", type=natural, default=50, help="steps between two looks (default: 50)")
    sub = command("first", None, "how long each task's first command takes, and what comes out")
    names = list(first.FIRST)
    choice(sub, "--only", names, names, "commands to run (default: all): " + ", ".join(names))
    sub.add_argument("--steps", type=natural, help="other than each task's own number, to try it")
    sub.add_argument("--runs", metavar="DIR", help="keep the runs here (default: they are deleted)")
    sub = command("conformance", None, "what optimisers and averages of low precision keep to")
    conformance_command.add_arguments(sub)
    gpu.add_command(commands)
    return parser


def check(args):
    """Choose the device, and find what can't work before it is measured. Raises Refused."""
    if args.bench == "sharding":
        if args.device == "cuda":
            raise Refused("--device cuda: sharding counts bytes of processes on the CPU; leave --device out")
        args.device = "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no CUDA device here; use --device cpu")
    cuda = args.device != "cpu" and torch.cuda.is_available()
    args.device = torch.device("cuda" if cuda else "cpu")
    if args.out:
        out = Path(args.out).absolute()
        if out.is_dir():
            raise Refused(f"--out {args.out}: that is a folder; name a file")
        if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            raise Refused(f"--out {args.out}: no such folder, or no right to write there; name a file")
    if args.bench in ("training", "memory", "watch", "sharding"):
        check_nets(args.nets)
    if args.bench == "memory":
        check_kept(args)
    if args.bench == "conformance":
        args.subjects = subjects.chosen(args.names, args.device)
    wanted = [RECIPES[name] for name in args.recipes] if args.bench == "training" else []
    if args.bench in ("memory", "moments"):
        wanted += [moments_in(name) for name in moment_formats()]
    for flags in wanted:
        check_machine(recipe(**flags), args.device)


def measure(args, argv):
    """Run a command that was parsed, and write what it found. Returns the exit status."""
    if args.threads:
        torch.set_num_threads(args.threads)
    check(args)
    machine = environment(args.device)
    bf16 = " ".join(machine["bf16"]) or "no bf16 instructions"
    device = machine["gpu"] if args.device.type == "cuda" else machine["cpu"]
    print(f"{device}, {machine['threads']} threads, {bf16}, torch {machine['torch']}", flush=True)
    rows = COMMANDS[args.bench](args, Clock(args.device))
    status = conformance_command.status(rows) if args.bench == "conformance" else 0
    if not args.out:
        return status
    own = {name: value for name, value in vars(args).items() if name not in ("bench", "out", "subjects")}
    settings = {name: _named(value) for name, value in own.items()}
    settings["device"] = str(args.device)
    record = dict(bench=args.bench, command=shlex.join(["python", "bench.py", *map(_named, argv)]))
    record.update(date=datetime.date.today().isoformat(), machine=machine, settings=settings, results=rows)
    write_json(args.out, record)
    print(f"every single {'time' if 'repeats' in settings else 'figure'} is in {args.out}")
    return status


def _named(word):
    """A path by its last part alone: a record says nothing of the folders of a machine."""
    return os.path.basename(word) if isinstance(word, str) and os.path.isabs(word) else word


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    words = ["gpu", *(word for word in argv if word != "--gpu")] if "--gpu" in argv else argv
    args = build_parser().parse_args(words)
    quiet_libraries()
    try:
        if args.bench == "gpu":
            return gpu.main(args, argv)
        return measure(args, argv)
    except Refused as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
