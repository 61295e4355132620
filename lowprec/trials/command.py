"""python -m lowprec trial: what each recipe costs on a net of one's own, tried in little."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from ..advice.command import AdviceParser, whole_number
from ..advice.plot import check_picture
from ..advice.subjects import run_file
from .book import Book
from .training import usual_schedule
from .trial import USUAL_RECIPES, trial

HELP = """What each recipe costs on a net of your own: whole trainings in little, in pairs with the same seed.

    python -m lowprec trial mine.py --lr 3e-4 --budget 10m

mine.py defines

    build()                the net
    loss(model, batch)     the mean loss of a batch; model is called like the net
    batches(seed)          batches to train on, one a step
    held_out()             a few batches to score on

and, if it likes, `options`, a dict of Precision's (lr, betas, weight_decay, clip_grad, ema_decay),
groups(net), and schedule(step, steps), what the rate is multiplied by; without one a tenth of the steps are
warm-up, and a cosine follows. The same command goes on where an interrupted one ended.
"""

ASKED = ("build", "loss", "batches", "held_out")


def build_trial_parser(prog: str, description: str = HELP) -> argparse.ArgumentParser:
    """The parser of the command, without what names the net."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = AdviceParser(prog=prog, description=description, formatter_class=raw, allow_abbrev=False)
    what = parser.add_argument_group("what is tried")
    what.add_argument(
        "--recipes",
        nargs="+",
        metavar="RECIPE",
        help=f"flags joined by +; default: {' '.join(USUAL_RECIPES)}. fp32, the reference, and bf16, which "
        "is autocast, are always tried",
    )
    until = parser.add_argument_group("how long: until the first of these is reached")
    until.add_argument(
        "--within",
        type=float,
        default=0.3,
        metavar="PERCENT",
        help="the interval of each mean change is no wider than this to either side, or lies beyond it; "
        "default: 0.3",
    )
    until.add_argument("--budget", default="10m", help="time for all trainings, as 90s or 2h; default: 10m")
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--out", metavar="FILE.json", help="where trainings are kept; the picture beside it")
    answer.add_argument("--json", action="store_true", help="print it for a program")
    return parser


def shown(answer: Book, out: str, as_json: bool) -> int:
    """Print an answer and draw it beside its file; the exit status."""
    picture = Path(out).with_suffix(".png")
    answer.draw(picture)
    print(json.dumps(answer.json(), indent=1) if as_json else f"{answer}\n\n{out} and {picture}")
    return 0


def main(argv: list[str], prog: str = "python -m lowprec trial") -> int:
    """The exit status of the command with these words. Raises Refused for bad ones."""
    parser = build_trial_parser(prog)
    parser.add_argument("file", metavar="FILE.py", help="see above")
    parser.add_argument("--steps", type=whole_number, default=300, help="of a training; default: 300")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; default: 0")
    parser.add_argument("--lr", type=float, help="the largest learning rate; default: that of `options`")
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="whose weights it starts from")
    args = parser.parse_args(argv)
    mine = run_file(args.file, ASKED, "FILE.py")
    options = dict(getattr(mine, "options", {}))
    if args.lr is not None:
        options["lr"] = args.lr
    out = args.out or f"trial-{Path(args.file).stem}.json"
    check_picture("--out", out, ".json")
    answer = trial(
        *(getattr(mine, name) for name in ASKED),
        recipes=args.recipes,
        steps=args.steps,
        within=args.within,
        budget=args.budget,
        seed=args.seed,
        start=args.start,
        file=out,
        groups=getattr(mine, "groups", None),
        schedule=getattr(mine, "schedule", usual_schedule),
        version=hashlib.sha256(Path(args.file).expanduser().read_bytes()).hexdigest()[:12],
        quiet=args.json,
        **options,
    )
    return shown(answer, out, args.json)
