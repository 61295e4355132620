"""Repeats an experiment: arms x seeds, each run a `python train.py ...` command that a person could type.

    python experiments/run.py 001                              every run that experiments/001-*/results.jsonl does not hold yet
    python experiments/run.py 001 --dry_run                    their commands
    python experiments/run.py 001 --arm fp32 --seeds 0-2       some of them
    python experiments/run.py 001 --check --arm fp32 --seeds 0 again, in a temporary folder, compared with the record

An experiment is a folder NNN-slug with an experiment.toml (the fields of `Experiment` and `Arm` below); results.jsonl takes a line a run.
All arms of a seed run together, so that pairs are complete early. Interrupt it and start it again: finished runs are recorded, unfinished ones
resume. A run that fails is recorded with its last message; --retry runs it again. An arm may be `of` another, its own experiment's or, as
"001/fp32", another's: with flags it samples from that training, without it reads its scores. An arm `after` another starts from that one's
run, whose folder is {after} in its flags. What either needs and is not there is run first, and recorded where it belongs.
Exit status: 0, 1 a check that differs, 2 a mistake.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
RUNS = "runs/experiments"
CURVES = ("step", "loss", "update_survival", "exp_avg_sq_moved", "ema_moved", "loss_scale")


class ExperimentError(ValueError):
    """A mistake in an experiment's files or in the command line. The message is one line: what is wrong and what to do."""


@dataclasses.dataclass(eq=False)
class Arm:
    name: str
    flags: list        # what it adds to the common ones
    of: str = ""       # it trains nothing: it samples, with its flags, from this arm's run; without flags it reads that run's scores
    after: str = ""    # it trains from the finished run of this arm: {after} in its flags is that run's folder
    note: str = ""
    metric: str = ""   # this one and the next two: where they differ from the experiment's
    margin: float = 0.0
    baseline: str = ""
    cell: dict = dataclasses.field(default_factory=dict)  # {factor: level} of a factorial experiment
    series: str = ""   # with x: a point of the curve of this name
    x: float = 0.0
    headline: str = ""  # a row of this name in the table that EXPERIMENTS.md opens with

    # set by load: experiment, the one it belongs to; trained, the arm whose run it reads, or itself; source, the arm whose records hold its
    # scores; start, the arm that it trains after, or itself


@dataclasses.dataclass(eq=False)
class Experiment:
    title: str
    question: str
    prediction: str
    margin: float      # in the unit of metric, fixed before the runs
    metric: str        # "ema.frechet": weights (ema, raw, or an --average), then a key of their scores; or a figure of the run, see `value`
    seeds: list
    common: list       # flags of every training, as typed
    baseline: str
    arms: list
    believed: str = ""
    lower_is_better: bool = True
    verdict: str = ""  # the author's, once the results are there
    x_label: str = ""  # what the x of the arms is
    ranges: bool = False  # report the ranges that generation runs through
    by_bytes: bool = False  # draw the score against bytes a parameter

    def arm(self, name):
        found = next((a for a in self.arms if a.name == name), None)
        if found is None:
            raise ExperimentError(f"experiment {self.number} has no arm '{name}'; it has {', '.join(a.name for a in self.arms)}")
        return found


def _fill(kind, table, where):
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise ExperimentError(f"{where}: unknown key '{key}'; the keys are {', '.join(fields)}")
        wanted = fields[key].type
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ExperimentError(f"{where}: {key} is a {wanted.__name__}, not {value!r}")
    missing = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING and name not in table]
    if missing:
        raise ExperimentError(f"{where}: '{missing[0]}' is missing")
    return kind(**table)


def folders(root=HERE):
    """{number: folder} of all experiments."""
    return {path.parent.name[:3]: path.parent for path in sorted(Path(root).glob("[0-9][0-9][0-9]-*/experiment.toml"))}


def load(number, root=HERE, loaded=None):
    """The Experiment of a number ("007" or "7"), with `number` and `folder`; `loaded` {number: Experiment} holds those read before. Raises ExperimentError."""
    known, number, loaded = folders(root), str(number).zfill(3), {} if loaded is None else loaded
    if number in loaded:
        return loaded[number]
    if number not in known:
        raise ExperimentError(f"no experiment {number}; there are: {', '.join(f.name for f in known.values()) or 'none yet'}")
    path = known[number] / "experiment.toml"
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is not TOML: {error}") from None
    experiment = _fill(Experiment, table, path)
    experiment.number, experiment.folder = number, known[number]
    loaded[number] = experiment
    experiment.arms = [_fill(Arm, a, f"{path}: an arm") if isinstance(a, dict) else a for a in experiment.arms]
    names = [getattr(a, "name", None) for a in experiment.arms]
    for wrong, what in [
        (None in names or not names, "arms are tables: [[arms]] with name and flags"),
        (len(set(names)) < len(names), "two arms have one name"),
        (not all(re.fullmatch(r"[A-Za-z0-9][\w.+=-]*", str(n)) for n in names), "names of arms become folders: letters, digits and _.+=- only"),
        (not experiment.margin > 0, "margin must be above 0"),
        (not experiment.seeds or not all(type(s) is int and s >= 0 for s in experiment.seeds), "seeds are whole numbers, 0 or more"),
        (len(set(experiment.seeds)) < len(experiment.seeds), "a seed is listed twice"),
    ]:
        if wrong:
            raise ExperimentError(f"{path}: {what}")
    for arm in experiment.arms:
        arm.experiment, arm.metric, arm.margin = experiment, arm.metric or experiment.metric, arm.margin or experiment.margin
        arm.baseline = experiment.arm(arm.baseline or experiment.baseline).name
        if not all(isinstance(flag, str) for flag in experiment.common + arm.flags):
            raise ExperimentError(f"{path}: flags are strings, as typed: [\"--steps\", \"3000\"]")
    for arm in experiment.arms:
        _link(arm, root, loaded)
        for other in (arm.trained, arm.start):
            if lacking := [s for s in experiment.seeds if s not in other.experiment.seeds]:
                raise ExperimentError(f"{path}: arm {arm.name} needs {other.name} of experiment {other.experiment.number}, which has no seed {lacking[0]}; add it there")
        if bool(arm.after) != any("{after}" in flag for flag in arm.flags) or arm.after and arm.of:
            raise ExperimentError(f"{path}: arm {arm.name}: an arm with `after` trains (no `of`), and {{after}} stands in its flags for that run's folder")
    return experiment


def _link(arm, root, loaded, seen=()):
    """Set arm.trained, arm.source and arm.start from its `of` and `after`, which name an arm of its experiment or, as "001/fp32", of another."""
    where = f"{arm.experiment.folder / 'experiment.toml'}: arm {arm.name}"
    arm.trained = arm.source = arm.start = arm

    def named(words):
        number, _, name = words.rpartition("/")
        other = (load(number, root, loaded) if number else arm.experiment).arm(name)
        if other in (arm, *seen):
            raise ExperimentError(f"{where} leads back to itself by way of {words}")
        _link(other, root, loaded, (arm, *seen))
        return other

    if arm.of:
        other = named(arm.of)
        arm.trained, arm.source = other.trained, arm if arm.flags else other.source
    if arm.after:
        other = named(arm.after)
        arm.start = other.trained
    if (arm.of and arm.flags or arm.after) and other.source is not other.trained:
        raise ExperimentError(f"{where} needs the run of {other.name}, which trains nothing itself; name the arm that trains")


def label(arm, seed):
    return f"{arm.experiment.number}-{arm.name}-seed{seed}"


def key(arm, seed):
    """What a run and its record are found by."""
    return arm.experiment.number, arm.name, seed


def command(arm, seed, runs=RUNS):
    """The words after `python` of one run. The folder of a run is runs/<label>; an arm that only samples leaves its files in it."""
    if arm.of:
        return ["train.py", "--sample", f"{runs}/{label(arm.trained, seed)}", *arm.flags, "--threads", "1", "--name", label(arm, seed)]
    flags = [flag.replace("{after}", f"{runs}/{label(arm.start, seed)}") for flag in arm.experiment.common + arm.flags]
    return ["train.py", *flags, "--seed", str(seed), "--threads", "1", "--name", label(arm, seed), "--runs", runs]


def typed(arm, seed):
    return shlex.join(["python", *command(arm, seed)])


# -- results.jsonl


def read_results(path, repair=False):
    """Records of results.jsonl, [] without one. A half-written last line is left out with a warning, and cut off with `repair`."""
    path = Path(path)
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    records = []
    for i, line in enumerate(lines):
        try:
            record = json.loads(line)
            record["arm"], record["seed"], record["command"]
            records.append(record)
        except (ValueError, KeyError, TypeError):
            if i + 1 < len(lines):
                raise ExperimentError(f"{path}: line {i + 1} is no record of a run; mend or delete it") from None
            print(f"warning: {path}: the last line is half written and ignored; its run is repeated", file=sys.stderr)
            lines.pop()
    whole = "".join(lines) if not lines or lines[-1].endswith("\n") else "".join(lines) + "\n"
    if repair and path.exists() and len(whole) != path.stat().st_size:
        beside = path.with_name(path.name + ".part")
        beside.write_text(whole)
        os.replace(beside, path)
    return records


def recorded(experiment, repair=False):
    """{key: record} of an experiment; of several for one run, the last. Raises ExperimentError for records of other arms or flags."""
    path, found = experiment.folder / "results.jsonl", {}
    names = [a.name for a in experiment.arms]
    for record in read_results(path, repair):
        if record["arm"] not in names:
            raise ExperimentError(f"{path} holds arm '{record['arm']}', which experiment.toml lacks: put it back, or delete its lines")
        arm = experiment.arm(record["arm"])
        if record["command"] != typed(arm, record["seed"]):
            raise ExperimentError(f"{path}: arm {arm.name}, seed {record['seed']} was run with other flags than experiment.toml has now: "
                                  f"give the changed arm another name, or delete its lines")
        found[key(arm, record["seed"])] = record
    return found


def _curves(path, most=30):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]  # a run that was killed leaves half a line
    kept = rows[::-1][:: -(-len(rows) // most) or 1][::-1]
    short = lambda x: x if x is None or isinstance(x, int) else float(f"{x:.5g}")
    last = [r["loss"] for r in rows if r["step"] > 0.9 * rows[-1]["step"]]
    return sum(last) / max(1, len(last)), {k: [short(r.get(k)) for r in kept] for k in CURVES if any(k in r for r in rows)}


def _thinned(trace, most=11):
    """The trace of ranges at about `most` evenly spaced steps, first and last included, numbers to 4 digits."""
    at = sorted({round(i * (len(trace) - 1) / (most - 1)) for i in range(most)}) if trace else []
    return [{k: float(f"{v:.4g}") for k, v in trace[i].items()} for i in at]


def make_record(arm, seed, runs, code):
    """The line of a finished run, from the files in its folder. final_loss: the mean over the last tenth of the steps."""
    record = {"arm": arm.name, "seed": seed, "command": typed(arm, seed), **({"of": arm.of} if arm.of else {})}
    folder = Path(runs) / label(arm.trained, seed)
    read = lambda name: json.loads((folder / name).read_text())
    if (folder / "env.json").exists():
        env = read("env.json")
        record |= {"env": {k: env[k] for k in ("cpu", "gpu", "bf16", "torch", "python")}, "commit": env["commit"], "clean": env["clean"]}
    final_loss, curves = _curves(folder / "metrics.jsonl")
    if code != 0:
        log = Path(runs) / f"{label(arm, seed)}.log"
        lines = re.split(r"[\r\n]+", log.read_text(errors="replace").strip()) if log.exists() else [""]
        said = lines[-1].removeprefix("train.py: ").replace(str(runs), RUNS)
        return record | {"failed": said or "no message", "exit": code, "curves": {} if arm.of else curves}
    summary = read("summary.json")
    result = read(f"samples/{label(arm, seed)}.json") if arm.of else summary
    record["scores"] = {source: {k: _thinned(v) if k == "trace" else v for k, v in s.items()} for source, s in result["scores"].items()}
    record["reference"] = {end: {k: v for k, v in s.items() if not k.startswith("pixel_")} for end, s in result["reference"].items()}
    record |= {"seconds": 0.0 if arm.of else summary["seconds"], "scoring_seconds": result["scoring_seconds"]}
    record |= {k: summary[k] for k in ("images_per_second", "peak_memory", "bytes_per_parameter", "gradient_snr") if k in summary}
    ledger = result.get("ledger", {}) if arm.of else read("ledger.json") if (folder / "ledger.json").exists() else {}
    record |= {"flops_share": ledger["flops_share"]} if ledger.get("flops_share") else {}
    return record | {"final_loss": final_loss} | ({} if arm.of else {"curves": curves})


# -- runs


def validate(arms, seed, runs=RUNS):
    """Dry-run the arms here: a typo is one line before the first run, not a column of failed ones."""
    import train
    from trainer import Trainer

    for arm in arms:
        if arm.trained.after and not (Path(runs) / label(arm.trained.start, seed)).exists():
            continue  # its flags name a folder that is still to come
        words = command(arm.trained, seed, runs)[1:]
        said, code = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                if arm.of:  # what --sample sets up from the run's checkpoint, which may not be there yet
                    flags = vars(train.build_parser().parse_args(words + arm.flags))
                    Trainer({**train.DEFAULTS, **flags}, dry=True, draws=True)
                else:
                    code = train.main([*words, "--dry_run"])
        except SystemExit as stop:
            code = stop.code
        except ValueError as error:  # the mistakes that train.main says in one line
            code = 2
            said.write(str(error))
        if code:
            raise ExperimentError(f"{arm.experiment.number}, arm {arm.name}: {said.getvalue().strip().splitlines()[-1].removeprefix('train.py: ')}")


def typed_in(words, log, folder, environment):
    """`python <words>` typed in a folder, in this process, a child of its own: output dropped, messages in the file `log`."""
    os.setsid()  # Ctrl-C reaches the runs once, from run.py, and they write their checkpoints
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.chdir(folder)
    os.environ.update(environment)  # the fork server's is as old as the server
    sys.argv, sys.path[0] = words, folder
    runpy.run_path(words[0], run_name="__main__")


def execute(todo, jobs, runs):
    """Run [(arm, seed)] in parallel, in order, an arm after the run it needs; yields (arm, seed, exit status) as they end."""
    waiting, running, failed = list(todo), {}, set()
    # A server that has imported the libraries once forks each run: a short one is half imports. Not from here: a fork needs a process without threads.
    processes = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
    if processes.get_start_method() == "forkserver":
        processes.set_forkserver_preload(["trainer"])
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        while waiting or running:
            for arm, seed in list(waiting):
                unfinished = {key(a, s) for a, s in [*waiting, *running.values()]}
                needed = key(arm.start if arm.after else arm.trained, seed)
                if len(running) == jobs or (needed != key(arm, seed) and needed in unfinished):
                    continue
                waiting.remove((arm, seed))
                log = Path(runs) / f"{label(arm, seed)}.log"
                log.parent.mkdir(parents=True, exist_ok=True)
                if needed in failed:
                    log.write_text(f"the run of {arm.of or arm.after} that it needs failed\n")
                    yield arm, seed, 1
                    continue
                process = processes.Process(target=typed_in, args=(command(arm, seed, runs), str(log), os.getcwd(), dict(os.environ)))
                process.start()
                running[process] = arm, seed
            time.sleep(0.1)
            for process in [p for p in running if p.exitcode is not None]:
                arm, seed = running.pop(process)
                failed |= {key(arm, seed)} if process.exitcode else set()
                yield arm, seed, process.exitcode
    finally:
        for process in running:
            process.terminate()  # not SIGINT, which a child of a background shell inherits as ignored
        for process in running:
            process.join(60)
            process.kill()


def plan(arms, seeds, done, runs):
    """[(arm, seed)] still to run, seed by seed; a training that an arm samples or starts from comes before it, again if its folder is gone."""
    todo = []

    def need(arm, seed):
        """The run itself, after the one that it starts from."""
        if arm.after and not (Path(runs) / label(arm.start, seed) / "summary.json").exists():
            need(arm.start, seed)
        todo.append((arm, seed))

    for seed in seeds:
        for arm in arms:
            if key(arm, seed) in done:
                continue
            if arm.of and not (key(arm.trained, seed) in done and (Path(runs) / label(arm.trained, seed) / "summary.json").exists()):
                need(arm.trained, seed)
            need(arm, seed)
    return list(dict.fromkeys(todo))


def compare(arm, old, new, records):
    """(same, message) of a run made again. On the same CPU, to the last bit; elsewhere within 4 sd of the arm's seeds or 4 margins."""
    if "failed" in old or "failed" in new:
        same = old.get("failed") == new.get("failed")
        return same, f"failed as recorded: {old['failed']}" if same else f"recorded: {old.get('failed', 'finished')}; now: {new.get('failed', 'finished')}"
    if json.dumps(old["scores"], sort_keys=True) == json.dumps(new["scores"], sort_keys=True):
        return True, "all scores equal to the last bit"
    a, b = value(old, arm.metric), value(new, arm.metric)
    said = f"{arm.metric} {a:.6g} recorded (commit {str(old.get('commit'))[:7]}), {b:.6g} now (commit {str(new.get('commit'))[:7]})"
    if {**old["env"], "python": 0} == {**new["env"], "python": 0} and not new["env"]["gpu"]:
        return False, f"{said}; same CPU and torch, where equal bits are expected"
    spread = [value(r, arm.metric) for r in records if "failed" not in r]
    tolerance = 4 * max(arm.margin, statistics.stdev(spread) if len(spread) > 2 else 0)
    return abs(a - b) <= tolerance, f"{said}; another machine or torch than recorded, tolerance {tolerance:.3g}"


def value(record, metric):
    """A score of a finished run: "ema.frechet", "0.9999:bf16.frechet", "raw.mean_dice"; or a figure of its training: "final_loss",
    "gradient_snr.fp8"."""
    source, _, name = metric.rpartition(".")
    try:
        return float({**record, **record["scores"]}[source][name] if source else record[name])
    except (KeyError, TypeError):
        held = [f"{s}.{k}" for s, scores in record["scores"].items() for k, v in scores.items() if isinstance(v, (int, float))]
        raise ExperimentError(f"arm {record['arm']}, seed {record['seed']}: no score '{metric}'; its record holds {', '.join(held)}") from None


def run(experiment, args):
    arms = args.arm or ([experiment.baseline] if args.check else [a.name for a in experiment.arms])
    arms = list(dict.fromkeys(experiment.arm(name).source for name in arms))
    involved = dict.fromkeys([experiment, *(a.experiment for arm in arms for a in (arm, arm.trained, arm.start, arm.trained.start))])
    records = {k: r for e in involved for k, r in recorded(e, repair=not (args.check or args.dry_run)).items()}
    seeds = args.seeds or (experiment.seeds[:1] if args.check else experiment.seeds)
    if unknown := [s for s in seeds if s not in experiment.seeds]:
        raise ExperimentError(f"seed {unknown[0]} is not among the seeds of experiment {experiment.number}: {experiment.seeds}; add it there")
    done = set() if args.check else {k for k, r in records.items() if not (args.retry and "failed" in r)}
    with tempfile.TemporaryDirectory() if args.check else contextlib.nullcontext(args.runs) as runs:
        todo = plan(arms, seeds, done, runs)
        if args.dry_run:
            print("\n".join(typed(arm, seed) for arm, seed in todo) or "all recorded")
            return 0
        wanted = {key(a, s) for a in arms for s in seeds}
        if args.check and (missing := sorted(wanted - set(records))):
            raise ExperimentError(f"experiment {missing[0][0]} has no record of arm {missing[0][1]}, seed {missing[0][2]} to compare with; run it first")
        validate(dict.fromkeys(arm for arm, _ in todo), seeds[0], runs)
        status, results = 0, execute(todo, args.jobs, runs)
        ahead = {key(a, s) for a, s in todo}
        bar = tqdm(total=len(wanted | ahead), initial=len(wanted - ahead), unit="run", dynamic_ncols=True, desc=experiment.folder.name)
        with contextlib.closing(results), bar:
            for arm, seed, code in results:
                record = make_record(arm, seed, runs, code)
                bar.update()
                if args.check:
                    if key(arm, seed) in wanted:
                        same, said = compare(arm, records[key(arm, seed)], record, [r for k, r in records.items() if k[:2] == key(arm, seed)[:2]])
                        bar.write(f"{arm.name}, seed {seed}: {'same' if same else 'DIFFERENT'}: {said}")
                        status |= not same
                    continue
                if code:
                    bar.write(f"{arm.name}, seed {seed} failed: {record['failed']}", file=sys.stderr)
                if key(arm, seed) not in done:
                    with open(arm.experiment.folder / "results.jsonl", "a") as file:
                        file.write(json.dumps(record) + "\n")
    return status


def _seeds(words):
    try:
        spans = [[int(end) for end in word.split("-")] for word in words]
        return list(dict.fromkeys(s for span in spans for s in range(span[0], span[-1] + 1)))
    except ValueError:
        raise ExperimentError(f"--seeds {' '.join(words)}: write numbers or ranges, as in 0 1 2 or 0-11") from None


def main(argv=None, root=HERE):
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("number", metavar="NNN", help="number of the experiment")
    parser.add_argument("--arm", nargs="+", help="these arms (default: all; with --check the baseline)")
    parser.add_argument("--seeds", nargs="+", metavar="SEED", help="0 1 2 or 0-11 (default: all; with --check the first)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                        help="runs at once, one thread each (default: the cores, %(default)s here)")
    parser.add_argument("--check", action="store_true", help="run again in a temporary folder and compare with the record")
    parser.add_argument("--retry", action="store_true", help="run those again that failed")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and stop")
    parser.add_argument("--runs", default=RUNS, help="where runs are kept (default: %(default)s in the repository)")
    args = parser.parse_args(argv)
    try:
        args.seeds = _seeds(args.seeds) if args.seeds else None
        if args.jobs < 1:
            raise ExperimentError("--jobs is 1 or more")
        experiment = load(args.number, Path(root).resolve())
        args.runs = args.runs if args.runs == RUNS else os.path.abspath(args.runs)
        os.chdir(ROOT)  # the commands are those of the repository's folder
        return run(experiment, args)
    except ExperimentError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the runs are told to stop
    sys.exit(main())
