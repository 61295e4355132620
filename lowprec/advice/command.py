"""python -m lowprec advise: which recipe to train a net in, and what it takes and costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from .. import evidence
from ..errors import Refused
from . import plot, subjects
from .answer import advise

HELP = """Which recipe to train a net in on a machine: bytes, speed and quality of each, the best first.

    python -m lowprec advise --params 7e9 --gpu H100 --gpus 8
    python -m lowprec advise --config config.json --memory 24GiB --from finetune --lr 1e-5
    python -m lowprec advise --net mine.py:build --image_size 64 --plot recipes.png

In the laboratory's folder, train.py asks the same of its own nets, and takes their flags too:

    python train.py --advise --task rflow --model dit --size XL/2 --image_size 64 --gpu "RTX 4090"
"""

REGIME_OF_START = {"scratch": "from scratch", "finetune": "finetune"}


class AdviceParser(argparse.ArgumentParser):
    """Its errors are one line."""

    def print_help(self, file=None):
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own hides that it can't

    def error(self, message):
        raise Refused(message)


def whole_number(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: write a whole number, 1 or more")
    return int(text)


def number_of_parameters(text: str) -> float:
    """As an argument: 7e9, 7000M or 7B."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    unit = units.get(text[-1:].lower())
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: write how many parameters the net has, as in 7e9 or 7B"
        ) from None


def build_advice_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command, without the flags of train.py."""
    parser = AdviceParser(
        prog=prog,
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    net = parser.add_argument_group("the net: one of these")
    net.add_argument("--net", metavar="FILE.py:FUNCTION", help="a function that returns it, or (net, loss)")
    net.add_argument("--config", metavar="FILE.json", help="a config of transformers or diffusers")
    net.add_argument(
        "--params",
        type=number_of_parameters,
        metavar="N",
        help="its number of parameters, as in 7e9 or 7B",
    )
    net.add_argument("--kind", help=f"what it is most like: {', '.join(evidence.KIND_OF_MODEL.values())}")
    machine = parser.add_argument_group("the machine: this one, where nothing is said")
    machine.add_argument("--gpu", metavar="NAME", help='as in "RTX 4090"')
    machine.add_argument("--memory", metavar="SIZE", help="of one GPU, as in 24GiB")
    machine.add_argument("--gpus", type=whole_number, default=1, help="how many; the net is spread over them")
    job = parser.add_argument_group("the job")
    starts = [*REGIME_OF_START]
    job.add_argument("--from", dest="start", choices=starts, default="scratch", help="default: scratch")
    job.add_argument("--lr", type=float, help="learning rate")
    job.add_argument(
        "--batch", type=whole_number, help="examples a step on each GPU; default: 8, or as many as fit"
    )
    job.add_argument("--image_size", type=whole_number, help="pixels of the side of an image")
    job.add_argument("--seq", type=whole_number, help="tokens of an example")
    job.add_argument(
        "--average",
        choices=["yes", "no"],
        help="count a moving average of the weights; default: yes; no for transformers' nets and --params",
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--time", action="store_true", help="time a few real steps of each, here")
    answer.add_argument("--trial", metavar="FILE.json", help="show the costs that a trial found")
    answer.add_argument("--plot", metavar="FILE.png", help="draw the memory and the loss of each recipe")
    answer.add_argument("--json", action="store_true", help="print it for a program")
    return parser


def refuse_shapes(args, source: str, names: list[str]) -> None:
    """Raise Refused where one of these flags was given: they say what a net is called with, and beside this
    source of the net they would do nothing.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise Refused(f"--{name} changes nothing beside {source}: drop it")


def subject_of(args, rest: list[str], build: Callable[[list[str]], subjects.Subject] | None):
    """The Subject that the command line names. rest: words that the parser does not know; build: see main."""
    named = [name for name in ("net", "config", "params") if getattr(args, name) is not None]
    if build and not named:
        refuse_shapes(args, "a net of train.py", ["seq"])
        size = [] if args.image_size is None else ["--image_size", str(args.image_size)]
        return build(rest + size)
    if rest:
        raise Refused(
            f"{rest[0]}: no such flag; python -m lowprec advise --help lists them. A net of train.py, with "
            "its flags and none of --net, --config and --params: python train.py --advise"
        )
    if len(named) != 1:
        raise Refused("say which net: one of --net, --config and --params")
    if args.net:
        return subjects.of_file(args.net, args.image_size, args.seq)
    if args.config:
        refuse_shapes(args, "--config", ["image_size"])
        return subjects.of_config(args.config, args.seq)
    refuse_shapes(args, "--params", ["image_size", "seq"])
    return subjects.of_count(args.params)


def main(
    argv: list[str],
    prog: str = "python -m lowprec advise",
    build: Callable[[list[str]], subjects.Subject] | None = None,
) -> int:
    """The exit status of the command with these words. Raises Refused for bad ones.

    build(words): the Subject where no flag of this command names one; words: those that it does not know.
    """
    args, rest = build_advice_parser(prog).parse_known_args(argv)
    if args.plot:
        plot.check_picture("--plot", args.plot)
    subject = subject_of(args, rest, build)
    advice = advise(
        subject,
        gpu=args.gpu,
        memory=args.memory,
        gpus=args.gpus,
        regime=REGIME_OF_START[args.start],
        lr=args.lr,
        batch=args.batch,
        kind=args.kind,
        average=None if args.average is None else args.average == "yes",
        time=args.time,
        trial=args.trial,
    )
    if args.plot:
        plot.draw_plot(advice, args.plot)
    if args.json:
        print(json.dumps(advice.json(), indent=1))
    else:
        print(advice)
    return 0
