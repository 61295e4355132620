"""Trains a net in the number formats that its flags choose, and says what they cost.

    python train.py --pure_bf16 --stochastic     digits out of noise, in bf16 weights, gradients and states:
                                                 a few minutes on 2 cores
    python train.py --check                      what this machine runs natively, and the flags to start with
    python train.py --advise --model dit         what training a net takes and costs in each recipe
    python train.py --trial --model dit          what each recipe costs on it, tried in short trainings
    python train.py --dry_run --pure_bf16        the precision of every tensor and the settled flags
    python train.py --sample runs/NAME           draw again from a run's weights
    python train.py --diagnose runs/NAME         which tensors of a run are losing information
    python train.py --task mine.py:Mine          a task of your own, see tasks/task.py
    torchrun --nproc_per_node=2 train.py         the same run on two processes

The same command again resumes an interrupted run. Bad input ends with one line and exit status 2.
"""

import os
import signal
import sys
import textwrap

if __name__ == "__main__":  # not where it is imported: importing the libraries below takes seconds
    DEFAULT = signal.SIG_DFL, signal.default_int_handler
    SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    EARLY = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) in DEFAULT}

    def too_early(signum, frame):
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"stopped before anything was written\n")
        os._exit(128 + signum)

    for signum in EARLY:
        signal.signal(signum, too_early)


import strategies
from harness import batch_size, code
from harness.advice import advice_lines, late_average
from harness.checkpoints import read as read_checkpoint
from harness.ending import ended_by, line_and_status
from harness.flags import OneLineParser, check_none, read_yaml
from harness.printing import late_scores, print_head, print_ledger, print_scores, print_summary, start_here
from harness.ranks import check_alone, leave, main_alone_prints, speaks_first, write_error_file
from lowprec.advice import check
from lowprec.errors import Forgiving, Refused, end_of_reader
from lowprec.machine import quiet_libraries
from trainer import TaskTraining, Trainer

FLAGS = strategies.flag_table()
DEFAULTS = FLAGS.defaults()
VERBS = ("config", "ledger", "dry_run", "check", "list", "sample", "diagnose")


# ---- Flags -------------------------------------------------------------------------------------------------


def build_parser(table=FLAGS):
    """A parser of the flags of a table and of what the program does in place of training."""
    text = textwrap.dedent(__doc__ or "")  # none under python -OO
    parser = table.parser("train.py", text, shown=("config", "list"))
    run = parser.add_argument_group("beside training")
    run.add_argument(
        "--config", metavar="FILE.yaml", help="flags as keys of a YAML file; the command line wins"
    )
    run.add_argument(
        "--ledger", action="store_true", help="print the precision of every tensor, not of the low ones alone"
    )
    group = parser.add_argument_group("instead of training").add_mutually_exclusive_group()
    group.add_argument(
        "--dry_run", action="store_true", help="print the precision ledger and the settled flags, and stop"
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="print what this machine runs natively, emulates or can't, and stop",
    )
    group.add_argument(
        "--list",
        action="store_true",
        help="name the tasks, with their nets and sizes, the data, optimisers and recipes, and stop",
    )
    group.add_argument(
        "--advise",
        action="store_true",
        help="say what training this net takes and costs in each recipe, and stop; --advise --help lists its "
        "own flags, as --gpu and --plot",
    )
    group.add_argument(
        "--trial",
        action="store_true",
        help="try what each recipe costs on this net, in short trainings; --trial --help lists its own flags",
    )
    group.add_argument(
        "--diagnose",
        metavar="CHECKPOINT",
        help="examine a checkpoint or run folder, finished or running, and name what is losing information; "
        f"exit status 0: healthy, 1: findings; {_may_differ(table, 'diagnose')} may differ",
    )
    group.add_argument(
        "--sample",
        metavar="CHECKPOINT",
        help="draw and score from a checkpoint or run folder; --name labels its pictures and scores; "
        f"{_may_differ(table, 'sample')} may differ from its training",
    )
    return parser


def _may_differ(table, verb):
    return ", ".join(f"--{row.name}" for row in table.rows if row.accepts(verb) and row.kind != "code")


def task_flag_of(argv):
    """The --task of a command line, before its flags are known: each task has flags of its own.

    Where there is none on the line, it is that of --config, of the run to --sample or --diagnose, or the
    default.
    """
    parser = OneLineParser(prog="train.py", add_help=False, allow_abbrev=False)
    for name in ("task", "config", "sample", "diagnose"):
        parser.add_argument(f"--{name}")
    words, _ = parser.parse_known_args(argv)
    if words.task is not None:
        return words.task
    if words.config is not None:
        task = read_yaml(words.config, parser).get("task")
        if task is not None:
            return str(task)
    path = words.sample
    if path is None:
        path = words.diagnose
    if path is None or "-h" in argv or "--help" in argv:
        return DEFAULTS["task"]
    task = str(read_checkpoint(path)["config"].get("task", DEFAULTS["task"]))
    code.check_typed("task", task)
    return task


# ---- What the command does ---------------------------------------------------------------------------------


def train(given, command, dry=False, whole_ledger=False):
    """Train, or with `dry` print what would be trained. given: the flags typed."""
    if given.get("epochs") and "steps" in given:
        raise Refused("--epochs and --steps both say how long to train: give one of them")
    run = strategies.settle(given, typed=True)
    if run.config.batch_size == "auto":
        run = run.replaced(batch_size=batch_size.chosen_batch_size(Trainer, run, dry))
    trainer = Trainer(run, command, dry=dry)
    of_a_rank = [trainer.line_of_a_rank()] if dry and trainer.config.fsdp else []
    ledger = trainer.precision.ledger()
    print_head(trainer.task, trainer.table, trainer.device, ledger, trainer.folder)
    print_ledger(ledger, trainer.kind.sites, whole=dry or whole_ledger)
    for line in of_a_rank:
        print(line)
    every, params = trainer.validation.every, trainer.precision.params
    advice = advice_lines(trainer.config, trainer.recipe, trainer.device, every, params)
    for line in [*trainer.notes, *trainer.task.notes(), *advice]:
        print(f"warning: {line}")
    print(flush=True)
    if dry:
        print("what each flag is, but for those that are off:")
        print(settled_flags(trainer.config))
        return 0
    summary = trainer.fit()
    if summary:
        print_scores(trainer.task, summary["scores"], summary["reference"])
        if late_average(trainer.config) and trainer.config.weights == "ema":
            print(late_scores(late_average(trainer.config)))
        kind, _ = trainer.task.items
        print_summary(summary, trainer.device, kind, trainer.folder, trainer.config.runs)
        if trainer.was_finished:
            print("it was finished before, and nothing was trained now: another --name begins anew")
    del trainer  # its DistributedDataParallel holds what leave() is to end
    leave()
    return 0


def settled_flags(config):
    """What each flag is in a run, without those that are off, in a few lines."""
    words = []
    for name, value in vars(config).items():
        if value is None or value is False or value in ("", []):
            continue
        if value is True:
            words.append(f"--{name}")
        else:
            shown = ",".join(value) if isinstance(value, list) else value
            words.append(f"--{name}={shown}")
    return textwrap.fill(" ".join(words), 110, break_long_words=False, break_on_hyphens=False)


def sample_and_score(path, given, command, table):
    """Draw and score from a checkpoint or a run's folder."""
    checkpoint = read_checkpoint(path)
    trained = vars(table.obeyed(checkpoint["config"]))
    table.check_given(given, "sample", trained)
    if given.get("vae") and not trained["vae"]:
        raise Refused(f"--vae {given['vae']}: this run was trained on images, not in latents; drop it")
    folder = path
    if not os.path.isdir(path):
        folder = os.path.dirname(path) or "."
    values = {**trained, "runs": yardsticks_folder(folder), **given}
    values["set"] = trained["set"] + given.get("set", [])
    trainer = Trainer(strategies.settle(values), command, draws=True, folder=folder)
    label = given.get("name") or _label(checkpoint["step"], given, table)
    scores = trainer.draw(checkpoint, label)
    if trainer.precision.ledger().flops_share:
        print(f"{trainer.precision.ledger()}\n")
    print_scores(trainer.task, scores, trainer.task.reference())
    share = late_average(trainer.config.replaced(steps=checkpoint["step"]))
    if share and list(scores) == ["ema"]:
        print(f"the average holds {share:.0%} of the initial weights: --weights raw draws the last ones")
    print(f"pictures: {trainer.folder}/samples/{label}-*.png   scores: {trainer.folder}/samples/{label}.json")
    return 0


def yardsticks_folder(folder):
    """Where nets that score are kept for a run's folder: beside it where its training kept them, else in it.
    A folder that came from elsewhere has no say about others.
    """
    beside = os.path.dirname(os.path.abspath(folder))
    if os.path.isdir(os.path.join(beside, "feature_nets")):
        return beside
    return folder


def _label(step, given, table):
    """What the pictures of a drawing are called: the step, and the flags that differ."""
    label = f"step{step:06d}"
    named = {name: value for name, value in given.items() if table[name].kind != "machine"}
    unlike = {name: value for name, value in named.items() if value != table[name].default}
    if unlike:
        label += "-" + table.name(table.typed(unlike), unlike=True)
    for name, value in named.items():  # the training may have had another value than the default
        if name not in unlike:
            label += f"-{name}_{value}"
    return label


def print_diagnosis(path, given, table):
    """Print a diagnosis; 0: healthy, 1: findings."""
    import doctor

    diagnosis = doctor.diagnose(path, table, given)
    print(diagnosis)
    return diagnosis.status


def print_advice(words):
    """Print what training a net takes and costs; words: flags of its task, and of advice/command.py."""
    from lowprec.advice import command

    def subject(own):
        return strategies.advice_subject(own, task_flag_of(own))

    return command.main(words, "train.py --advise", subject)


def print_trial(words, table):
    """Try what each recipe costs on a net, and print it."""
    from harness import trials  # it loads scipy and all of advice

    def training(given):
        return TaskTraining(Trainer(strategies.settle(given, typed=True)))

    return trials.main(words, training, strategies.settle, table, strategies.subject_of)


def for_a_billion():
    """The first rows of what --advise says of this machine, for a net of a billion parameters."""
    from lowprec.advice import text
    from lowprec.advice.answer import advise
    from lowprec.advice.subjects import of_count

    head = "for a net of a billion parameters, without activations (--advise says it of yours, in full):"
    return "\n".join([head, *text.short_text(advise(of_count(1e9)))])


def _of_file(values, given):
    """The flags of a YAML file, without those that the flags `given` on the command line replace."""
    if "steps" in given:
        values.pop("epochs", None)
    if given.get("epochs"):
        values.pop("steps", None)
    return values


def run_command(argv):
    """Do what a command line says; returns the exit status."""
    code.forget()
    if "--advise" in argv:
        return print_advice([word for word in argv if word != "--advise"])
    table = strategies.flag_table(task_flag_of(argv))
    if "--trial" in argv:
        check_alone("trial")
        return print_trial([word for word in argv if word != "--trial"], table)
    parser = build_parser(table)
    given = vars(parser.parse_args(argv))
    strategies.trust(given)
    verbs = {name: given.pop(name) for name in VERBS if name in given}
    if "list" in verbs:
        print(strategies.listing())
        return 0
    if "check" in verbs:
        others = [*given, *({"config"} & verbs.keys())]
        check_none(others, "--check, which looks at the machine alone", "drop it; --dry_run reads it")
        print(check.report(start_here))
        print(f"\n{for_a_billion()}")
        return 0
    if "config" in verbs:
        given = {**_of_file(table.read_yaml(verbs["config"], parser), given), **given}
    command = ["train.py", *argv]
    for verb in ("sample", "diagnose"):
        if verb in verbs:
            check_alone(verb)
    if "diagnose" in verbs:
        return print_diagnosis(verbs["diagnose"], given, table)
    if "sample" in verbs:
        return sample_and_score(verbs["sample"], given, command, table)
    return train(given, command, dry="dry_run" in verbs, whole_ledger="ledger" in verbs)


# ---- How it ends -------------------------------------------------------------------------------------------


def main(argv=None):
    if argv is None:
        argv = sys.argv[1:]
        sys.stderr = Forgiving(sys.stderr)
    quiet_libraries()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal can't show is no error
            stream.reconfigure(errors="backslashreplace")
    with ended_by(signal.SIGTERM, signal.SIGHUP, signal.SIGINT) as signals, main_alone_prints():
        return exit_status_of(argv, signals)


def exit_status_of(argv, signals):
    """The exit status of run(argv), once its last line is printed. signals: those that end it."""
    try:
        try:
            return run_command(argv)
        finally:
            # torchrun sends SIGTERM to all processes once one has died, while they print why
            for signum in signals:
                signal.signal(signum, signal.SIG_IGN)
    except BrokenPipeError:
        return end_of_reader()
    except SystemExit as ended:
        if hasattr(ended, "line"):  # a flag that makes no sense
            write_error_file(ended.line)
        raise
    except (Exception, KeyboardInterrupt) as error:
        line, status = line_and_status(error)
        if line is None:
            raise
        if line:
            if speaks_first():
                print(line, file=sys.stderr)
            write_error_file(line)
        return status


if __name__ == "__main__":
    for signum, handler in EARLY.items():
        signal.signal(signum, handler)
    sys.exit(main())
