"""--trial: what each recipe costs on a net of train.py, tried in little; see lowprec/trials.

training and settle make a trainer.TaskTraining and strategies.Run, which stand above this room.
"""

from harness.advice import BATCH_OF_A_RUN
from harness.flags import check_none
from lowprec.advice.command import whole_number
from lowprec.advice.plot import check_picture
from lowprec.rules import refuse
from lowprec.trials import command
from lowprec.trials.trial import run_trial

HELP = """What each recipe costs on a net of train.py: whole trainings in little, in pairs with the same seed.

    python train.py --trial --task language --steps 3000 --budget 20m

Flags of task, net and training say what is trained. A trial takes a tenth of --steps and of the
warm-up, and its average forgets ten times as fast. The score is the loss of the task on held-out data.
"""

IDLE_GROUPS = ("precision", "run")  # flags that say nothing of what is trained
IDLE = ("epochs", "validate_every", "early_stop", "fsdp", "profile")


def main(words, training, settle, table, subject_of):
    """The exit status of `train.py --trial` with these words. training(given), settle(given, typed): of flags
    that were typed, {flag: value}; table: of all flags; subject_of(run, name): what advise is asked about.
    """
    parser = command.build_trial_parser("train.py --trial", HELP)
    parser.add_argument("--trial_steps", type=whole_number, help="of a training; default: a tenth of --steps")
    args, rest = parser.parse_known_args(words)
    given = vars(table.parser("train.py --trial", "the flags of train.py").parse_args(rest))
    idle = [name for name in given if name in IDLE or table[name].group in IDLE_GROUPS]
    check_none(idle, "--trial, which tries --recipes")
    whole = settle(given, typed=True)
    refuse((BATCH_OF_A_RUN,), whole.config)
    little = in_little(whole.config, args.trial_steps)

    def trained(arm, seed):
        flags = dict(arm.flags)
        recipe = {**flags, "set": flags.pop("sites")} if "sites" in flags else flags
        return training({**given, **little, **recipe, "seed": seed})

    name = " ".join(["python train.py", *rest])
    out = args.out or f"trial-{whole.config.name}.json"
    check_picture("--out", out, ".json")
    answer = run_trial(
        trained,
        subject_of(whole, name),
        whole.config.batch_size,
        recipes=args.recipes,
        steps=little["steps"],
        within=args.within,
        budget=args.budget,
        seed=whole.config.seed,
        file=out,
        quiet=args.json,
        plan={},
    )
    return command.shown(answer, out, args.json)


def in_little(config, steps):
    """{flag: value} of a run in little: fewer steps, a warm-up and an average that are as much shorter."""
    steps = steps or max(1, config.steps // 10)
    share = steps / config.steps
    return {
        "steps": steps,
        "warmup": round(config.warmup * share),
        "ema_decay": max(0.0, 1 - (1 - config.ema_decay) / share),
        "sample_every": 0,
        "checkpoint_every": 0,
    }
