"""Repeats an experiment: arms x seeds, each run a `python train.py ...` command that a person could type.

    python experiments/run.py 001                          every run that results.jsonl does not hold yet
    python experiments/run.py 001 --dry_run                their commands
    python experiments/run.py 001 --arm fp32 --seeds 0-2   some of them
    python experiments/run.py 001 --check --seeds 0        again, in a temporary folder, beside the record;
                                                           on another kind of machine with a partner, and
                                                           the gap of the pair is compared
    python experiments/run.py 001 --check --note           and keep what came out, for the experiment's page
    python experiments/run.py 001 --mixed                  also beside records of another kind of CPU

An experiment is a folder NNN-slug with an experiment.toml (definition.py has its keys); results.jsonl takes a
line a run (records.py). All arms of a seed run together, so that pairs are complete early. Interrupt it and
start it again: finished runs are recorded, unfinished ones resume. A run that fails is recorded with its last
message; --retry runs it again. A run that an arm samples from, or starts from, and that is not there is run
first, and recorded where it belongs. Runs of a pair belong on one kind of CPU, since bf16 products are summed
in another order on another: a run whose partner was recorded elsewhere is refused without --mixed, and marked
in the report with it. Nothing is recorded while the code has changes that are in no commit.
Exit status: 0, 1 a check that differs or compared nothing, or a run that another process has, 2 a mistake.
"""

import argparse
import contextlib
import io
import itertools
import math
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
from multiprocessing import connection
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.log import records  # noqa: E402
from experiments.log.analysis import differences, machine_of, scores_by_seed  # noqa: E402
from experiments.log.definition import (  # noqa: E402
    HERE,
    ROOT,
    RUNS,
    load_experiment,
    run_command_words,
    run_key,
    run_label,
    typed_run,
)
from harness.ending import Ended, ends_once  # noqa: E402
from harness.flags import OneLineParser, checked, natural  # noqa: E402
from harness.run_folder import environment  # noqa: E402
from lowprec.errors import Refused  # noqa: E402
from lowprec.machine import cpu_threads  # noqa: E402

# ---- The house: all that this file asks of train.py and trainer.py -----------------------------------------


def flags_of_words(words):
    """{flag: value} of a training's words, defaults included."""
    import strategies
    import train

    table = strategies.flag_table(train.task_flag_of(words))
    given = vars(train.build_parser(table).parse_args(words))
    kind = strategies.find_task(given.get("task", "rflow"))
    return {**table.defaults(), **strategies.task_defaults(kind, given), **given}


def dry_run(words):
    """Exit status of `train.py <words> --dry_run`."""
    import train

    return train.main([*words, "--dry_run"])


def dry_sample(words):
    """Set up what --sample does from the checkpoint of a training, which may not be there yet."""
    import strategies
    import trainer

    trainer.Trainer(strategies.settle(flags_of_words(words)), dry=True, draws=True)


# ---- Before the runs ---------------------------------------------------------------------------------------


def validate_arms(arms, seed, runs=RUNS):
    """Dry-run the arms here: a typo is one line before the first run, not a column of failed ones."""
    for arm in arms:
        if arm.trained.after and not (Path(runs) / run_label(arm.trained.start, seed)).exists():
            continue  # its flags name a folder that is still to come
        words = run_command_words(arm.trained, seed, runs)
        words = words[words.index("train.py") + 1 :]
        said, code = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                if arm.of:
                    dry_sample(words + arm.flags)
                else:
                    code = dry_run(words)
        except SystemExit as stop:
            code = stop.code
        except Refused as error:
            code = 2
            said.write(str(error))
        if code and code > 128:  # a signal asks this process to end
            raise Ended(code - 128)
        if code:
            last = said.getvalue().strip().splitlines()[-1].removeprefix("train.py: ")
            raise Refused(f"{arm.experiment.number}, arm {arm.name}: {last}")


def planned_runs(arms, seeds, done, runs):
    """[(arm, seed)] still to run, seed by seed.

    A training that an arm samples or starts from comes before it, and runs again if its folder is gone.
    """
    todo = []

    def finished(arm, seed):
        return (Path(runs) / run_label(arm, seed) / "summary.json").exists()

    def need(arm, seed):
        """The run itself, after the one that it starts from."""
        if arm.after and not finished(arm.start, seed):
            need(arm.start, seed)
        todo.append((arm, seed))

    for seed in seeds:
        for arm in arms:
            if run_key(arm, seed) in done:
                continue
            if arm.of and not (run_key(arm.trained, seed) in done and finished(arm.trained, seed)):
                need(arm.trained, seed)
            need(arm, seed)
    return list(dict.fromkeys(todo))


# ---- The runs ----------------------------------------------------------------------------------------------


def typed_in(words, log, folder, environment):
    """`python <words>` typed in a folder, in this process: output dropped, messages in the file `log`."""
    os.setsid()  # Ctrl-C reaches the runs once, from run.py, and they write their checkpoints
    parent = multiprocessing.parent_process()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Path(log).unlink(missing_ok=True)  # a new file: a process that still has this run writes to the old one
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os.chdir(folder)
    os.environ.update(environment)  # the fork server's is as old as the server
    sys.argv, sys.path[0] = words, folder
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def end_with(parent):
    """Ask this process to stop once its parent has ended, killed or not: it writes its checkpoint."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


PRELOADED_MODULES = ["trainer", "models", "torch._dynamo", "torch.utils.tensorboard", "torchvision.utils"]


def fork_server():
    """Where the runs' processes come from.

    A server that has imported the libraries once forks each run: a short one is half imports. This process
    can't fork them itself: that needs a process without threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED_MODULES)
    return processes


def execute_runs(todo, jobs, runs):
    """Run [(arm, seed)] in parallel, in order, an arm after the run it needs.

    Yields (arm, seed, exit status) as they end. Left early, it asks the runs to stop and waits for them.
    """
    waiting, running, failed = list(todo), {}, set()
    processes = fork_server()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        while waiting or running:
            for arm, seed in list(waiting):
                unfinished = {run_key(a, s) for a, s in [*waiting, *running.values()]}
                # of the run that must end before this one starts, or its own
                needed = run_key(arm.start if arm.after else arm.trained, seed)
                if len(running) == jobs or (needed != run_key(arm, seed) and needed in unfinished):
                    continue
                waiting.remove((arm, seed))
                log = Path(runs) / f"{run_label(arm, seed)}.log"
                if needed in failed:
                    log.write_text(f"the run of {arm.of or arm.after} that it needs failed\n")
                    failed.add(run_key(arm, seed))
                    yield arm, seed, 1
                    continue
                words = run_command_words(arm, seed, runs), str(log), os.getcwd(), dict(os.environ)
                process = processes.Process(target=typed_in, args=words)
                process.start()
                running[process] = arm, seed
            # of nothing it would wait for ever
            ended = running and connection.wait([process.sentinel for process in running])
            for process in [p for p in running if p.sentinel in ended]:
                arm, seed = running.pop(process)
                process.join()
                if process.exitcode:
                    failed.add(run_key(arm, seed))
                yield arm, seed, process.exitcode
    finally:
        for process in running:
            process.terminate()  # not SIGINT, which a child of a background shell inherits as ignored
        for process in running:
            process.join(60)
            process.kill()


# ---- The command -------------------------------------------------------------------------------------------


def run_experiment(experiment, args):
    """Do what the command line says; returns the exit status."""
    names = args.arm or [arm.name for arm in experiment.arms]
    if args.check and not args.arm:
        names = [experiment.baseline]
    arms = list(dict.fromkeys(experiment.arm(name).source for name in names))
    seeds = args.seeds or (experiment.seeds[:1] if args.check else experiment.seeds)
    known = known_records(experiment, arms, repair=not (args.check or args.dry_run))
    if args.check:
        arms = with_partners(experiment, arms, seeds, known)
    for seed in seeds:
        if seed not in experiment.seeds:
            listed = f"the seeds of experiment {experiment.number}: {experiment.seeds}"
            raise Refused(f"seed {seed} is not among {listed}; add it there")
    done = {k for k, record in known.items() if not (args.retry and "failed" in record)}
    if args.check:
        done = set()
    with tempfile.TemporaryDirectory() if args.check else contextlib.nullcontext(args.runs) as runs:
        todo = planned_runs(arms, seeds, done, runs)
        if args.dry_run:
            every = todo or planned_runs(arms, seeds, set(), runs)
            print("\n".join(typed_run(arm, seed, args.runs) for arm, seed in every))
            if not todo:
                print("all recorded: --check runs them again beside their records", file=sys.stderr)
            return 0
        wanted = {run_key(arm, seed) for arm in arms for seed in seeds}
        missing = sorted(wanted - set(known))
        if args.check and missing:
            number, name, seed = missing[0]
            what = f"no record of arm {name}, seed {seed} to compare with"
            raise Refused(f"experiment {number} has {what}; run it first")
        if not args.check:
            refuse_changed_code(todo)
        if not (args.check or args.mixed):
            refuse_mixed_pairs(experiment, [run for run in todo if run_key(*run) not in done], known)
        Path(runs).mkdir(parents=True, exist_ok=True)
        validate_arms(dict.fromkeys(arm for arm, _ in todo), seeds[0], runs)
        return follow_runs(experiment, args, todo, runs, wanted, known, done)


def this_environment():
    """The facts of the machine that runs are recorded on, as a record has them."""
    import torch

    facts = environment("cuda" if torch.cuda.is_available() else "cpu")
    return records.picked_keys(facts, records.MACHINE_KEYS)


def refuse_changed_code(todo):
    """Raise Refused if a record would name a commit that does not hold the code that ran."""
    if todo and environment("cpu")["clean"] is False:
        raise Refused(
            "the code has changes that are in no commit, so nobody could repeat what is recorded: commit "
            "them (git status lists them); --check records nothing"
        )


def partners(experiment, arm):
    """The arms whose records stand in a pair with this one's."""
    pairs = [(a.source, a.base.source) for a in experiment.arms]
    found = [other for pair in pairs if arm in pair for other in pair if other is not arm]
    return list(dict.fromkeys(found))


def refuse_mixed_pairs(experiment, todo, known):
    """Raise Refused if a run would stand in a pair with a record of another kind of machine."""
    machine = machine_of({"env": this_environment()}) if todo else ""
    for arm, seed in todo:
        for other in partners(experiment, arm):
            record = known.get(run_key(other, seed))
            if record and machine_of(record) not in (machine, "unknown machine"):
                raise Refused(
                    f"{run_label(arm, seed)} would be paired with {run_label(other, seed)}, which was "
                    f"recorded on {machine_of(record)}; this is {machine}: run it there, or add --mixed"
                )


def known_records(experiment, arms, repair):
    """{key: record} of the experiments that these arms read, sample or start from, and of their own."""
    involved = {experiment: None}
    beside = [other for arm in arms for other in partners(experiment, arm)]
    for arm in dict.fromkeys([*arms, *beside]):
        for other in (arm, arm.trained, arm.start, arm.trained.start):
            involved[other.experiment] = None
    return {k: record for e in involved for k, record in records.recorded(e, repair).items()}


FOLDER_IN_USE = " is in use by "  # what Folder.lock says in harness/run_folder.py


def follow_runs(experiment, args, todo, runs, wanted, known, done):
    """Run `todo`, and record each run that ends, or compare it with its record; returns the exit status."""
    status, results, again = 0, execute_runs(todo, args.jobs, runs), {}
    ahead = {run_key(arm, seed) for arm, seed in todo}
    bar = tqdm(
        total=len(wanted | ahead),
        initial=len(wanted - ahead),
        unit="run",
        dynamic_ncols=True,
        desc=experiment.folder.name,
    )
    with contextlib.closing(results), bar:
        for arm, seed, code in results:
            record = records.make_record(arm, seed, runs, code)
            bar.update()
            if code and FOLDER_IN_USE in record["failed"]:
                # another run.py has it, or it writes the last checkpoint after its own has ended
                bar.write(f"{arm.name}, seed {seed}: {record['failed']}; run this again", file=sys.stderr)
                status = 1
            elif not args.check:
                if code:
                    bar.write(f"{arm.name}, seed {seed} failed: {record['failed']}", file=sys.stderr)
                if run_key(arm, seed) not in done:
                    records.append_record(arm.experiment, record)
            elif run_key(arm, seed) in wanted:
                again[run_key(arm, seed)] = record
        if args.check:
            status |= tell_checks(experiment, args, again, known, bar)
    return status


OUTCOMES = {True: "passed", False: "FAILED", None: "NOT COMPARED"}


def tell_checks(experiment, args, again, known, bar):
    """Compare runs made again with their records, or on another machine the gap of each pair of them; returns
    the exit status: 1 where something differs, or was compared with nothing.
    """
    found = {}  # (arm, seed): (same, said)
    for arm in experiment.arms:
        for seed in args.seeds or experiment.seeds:
            record = again.get(run_key(arm.source, seed))
            if record:
                found[arm, seed] = records.compare_records(arm, known[run_key(arm.source, seed)], record)
    paired = set()
    for (arm, seed), (same, _) in list(found.items()):
        base = arm.base
        if same is None and base is not arm and (base, seed) in found:
            new = [again[run_key(one.source, seed)] for one in (arm, base)]
            own, its = map(records.figure_of_record, new, (arm.metric, base.metric))
            gaps = differences(scores_by_seed(arm, known), scores_by_seed(base, known))
            gaps = {at: gap for at, gap in gaps.items() if math.isfinite(gap)}  # of runs that did not diverge
            found[arm, seed] = records.compare_gaps(arm, gaps, own - its, seed)
            paired.add((base, seed))
    for (arm, seed), (same, said) in found.items():
        if same is None and (arm, seed) in paired:
            continue  # its part of a gap
        bar.write(f"{arm.name}, seed {seed}: {OUTCOMES[same]}: {said}")
        if args.note and same is not None:
            record = again[run_key(arm.source, seed)]
            records.note_check(arm, seed, same, said, record, machine_of(record))
    return int(not all(same or key in paired for key, (same, _) in found.items()))


def with_partners(experiment, arms, seeds, known):
    """The arms, and of each that was recorded on another machine one that it makes a pair with."""
    here = this_environment()
    found = list(arms)
    for arm in arms:
        record = known.get(run_key(arm, seeds[0]))
        beside = [other for other in partners(experiment, arm) if run_key(other, seeds[0]) in known]
        if record and beside and not records.same_machine(record, here) and not set(beside) & set(found):
            found.append(beside[0])
    return found


def span_of(word):
    """range(0, 3) of '0-2', range(7, 8) of '7'."""
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


spans = checked(span_of, lambda span: 0 < span.stop - span.start <= 1000, "a seed, or up to 1,000 as in 0-11")


def parsed_arguments(argv):
    parser = OneLineParser(
        prog="run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("number", metavar="NNN", help="number of the experiment")
    several = dict(nargs="+", action="extend")  # a flag given twice adds to itself
    add("--arm", **several, help="these arms (default: all; with --check the baseline)")
    which = "0 1 2 or 0-11 (default: all; with --check the first)"
    add("--seeds", **several, type=spans, metavar="SEED", help=which)
    jobs = "runs at once, one thread each (default: the cores, %(default)s here)"
    add("--jobs", type=natural, default=cpu_threads(), help=jobs)
    add("--check", action="store_true", help="run again in a temporary folder and compare with the record")
    add("--note", action="store_true", help="with --check: keep what came out in checks.jsonl")
    add("--mixed", action="store_true", help="run also what is paired with a record of another kind of CPU")
    add("--retry", action="store_true", help="run those again that failed")
    add("--dry_run", action="store_true", help="print the commands and stop")
    add("--runs", default=RUNS, help="where runs are kept (default: %(default)s in the repository)")
    args = parser.parse_args(argv)
    if args.note and not args.check:
        parser.error("--note keeps what a check came to: add --check")
    args.seeds = list(dict.fromkeys(itertools.chain(*args.seeds or ())))
    return args


def main(argv=None, root=HERE):
    args = parsed_arguments(argv)
    try:
        experiment = load_experiment(args.number, Path(root).resolve())
        args.runs = args.runs if args.runs == RUNS else os.path.abspath(args.runs)
        folder = os.getcwd()
        os.chdir(ROOT)  # the commands are those of the repository's folder
        try:
            return run_experiment(experiment, args)
        finally:
            os.chdir(folder)
    except Refused as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename or args.runs}: {error.strerror}"
        print(f"run.py: can't keep runs: {where}; choose another --runs folder", file=sys.stderr)
        return 2
    except KeyboardInterrupt as asked:
        print("stopped; the same command goes on from here", file=sys.stderr)
        (number,) = asked.args or (signal.SIGINT,)
        return 128 + number


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, ends_once(Ended(signal.SIGTERM)))  # as Ctrl-C: the runs are told to stop
    sys.exit(main())
