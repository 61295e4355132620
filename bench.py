"""Speed and memory of the recipes and of other libraries' optimisers, as ratios measured side by side.

    python bench.py optimizers --out found.json     one command; --help lists all, and --gpu is one more
    python bench.py training --help                 its flags

Contenders take turns, in an order shuffled for each round, so that other load on the machine meets all of
them alike. A figure is the median over the rounds; --out FILE keeps every single time. Bad input ends with
one line and exit status 2. docs/speed.md, docs/formats.md and docs/evidence.md show what came out.
"""

import argparse
import signal
import sys

import torch

from benchmarks.common import DeviceClock, Flag, record, without_folder
from experiments.bench import files
from harness.ending import ends_once
from harness.files import check_place, write_json
from harness.flags import OneLineParser
from harness.ranks import check_cuda
from harness.run_folder import environment
from lowprec.errors import Refused, end_of_reader
from lowprec.machine import quiet_libraries

COMMANDS = {file.COMMAND.name: file.COMMAND for file in files() if hasattr(file, "COMMAND")}
NOT_SETTINGS = ("bench", "out", "subjects")  # of the arguments


def build_parser():
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="bench.py", formatter_class=form, description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True, metavar=" | ".join(COMMANDS))
    for command in COMMANDS.values():
        sub = commands.add_parser(command.name, help=command.help)
        for flag in (*flags_of_all(command), *command.flags):
            flag.add_to(sub)
    return parser


def flags_of_all(command):
    """What every command takes that bench.py runs."""
    if command.run:
        return []
    found = [
        Flag("--device", "auto", "where it is measured", choices=["auto", "cpu", "cuda"]),
        Flag("--threads", None, "CPU threads, in place of what torch chooses"),
        Flag("--out", None, "write machine, versions and every time as JSON", type=str, metavar="FILE"),
    ]
    if command.repeats:
        found.insert(0, Flag("--repeats", command.repeats, "rounds"))
    return found


def choose_device(command, word):
    """The torch.device of --device for a command. Raises Refused."""
    if command.cpu_only and word == "cuda":
        raise Refused(f"--device cuda: {command.name} measures on the CPU alone; leave --device out")
    if word == "cuda":
        check_cuda("--device cuda", "use --device cpu")
    on_gpu = word != "cpu" and torch.cuda.is_available() and not command.cpu_only
    return torch.device("cuda" if on_gpu else "cpu")


def measure_and_write(args, argv):
    """Run a command that was parsed, and write what it found. Returns the exit status. Raises Refused."""
    command = COMMANDS[args.bench]
    if command.run:
        return command.run(args, argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.device = choose_device(command, args.device)
    if args.out:
        check_place("--out", args.out)
    command.check(args)
    machine = environment(args.device)
    print_machine(machine, args.device)
    rows = command.measure(args, DeviceClock(args.device))
    if args.out:
        settings = settings_of(args)
        write_json(args.out, record(args.bench, argv, machine, settings, rows))
        what = "time" if command.repeats else "figure"
        print(f"every single {what} is in {args.out}")
    return command.status(rows)


def print_machine(machine, device):
    name = machine["gpu"] if device.type == "cuda" else machine["cpu"]
    bf16 = " ".join(machine["bf16"]) or "no bf16 instructions"
    print(f"{name}, {machine['threads']} threads, {bf16}, torch {machine['torch']}", flush=True)


def settings_of(args):
    """The arguments as a record holds them."""
    settings = {}
    for name, value in vars(args).items():
        if name not in NOT_SETTINGS:
            settings[name] = without_folder(value)
    settings["device"] = str(args.device)
    return settings


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    words = list(argv)
    if "--gpu" in words:  # the only command that is written as a flag, too
        words.remove("--gpu")
        words.insert(0, "gpu")
    args = build_parser().parse_args(words)
    quiet_libraries()
    try:
        status = measure_and_write(args, argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return end_of_reader()
    except Refused as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, ends_once(KeyboardInterrupt()))  # as Ctrl-C
    sys.exit(main())
