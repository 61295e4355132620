"""Repeats an experiment: arms x seeds, each run a `python train.py ...` command that a person could type.

    python experiments/run.py 001                              every run that experiments/001-*/results.jsonl does not hold yet
    python experiments/run.py 001 --dry_run                    their commands
    python experiments/run.py 001 --arm fp32 --seeds 0-2       some of them
    python experiments/run.py 001 --check --arm fp32 --seeds 0 again, in a temporary folder, compared with the record

An experiment is a folder NNN-slug with an experiment.toml (the fields of `Experiment` and `Arm` below); results.jsonl takes a line a run.
All arms of a seed run together, so that pairs are complete early. Interrupt it and start it again: finished runs are recorded, unfinished ones
resume. A run that fails is recorded with its last message; --retry runs it again. Exit status: 0, 1 a check that differs, 2 a mistake.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
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
    note: str = ""
    metric: str = ""   # this one and the next two: where they differ from the experiment's
    margin: float = 0.0
    baseline: str = ""


@dataclasses.dataclass(eq=False)
class Experiment:
    title: str
    question: str
    prediction: str
    margin: float      # in the unit of metric, fixed before the runs
    metric: str        # "ema.frechet": weights (ema, raw, or an --average), then a key of their scores
    seeds: list
    common: list       # flags of every training, as typed
    baseline: str
    arms: list
    believed: str = ""
    lower_is_better: bool = True
    verdict: str = ""  # the author's, once the results are there

    def arm(self, name):
        found = next((a for a in self.arms if a.name == name), None)
        if found is None:
            raise ExperimentError(f"experiment {self.number} has no arm '{name}'; it has {', '.join(a.name for a in self.arms)}")
        return found

    def runs_of(self, arm):
        """The arm whose records hold this arm's scores: itself, unless it only reads another's."""
        return self.arm(arm.of) if arm.of and not arm.flags else arm


def _fill(kind, table, where):
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise ExperimentError(f"{where}: unknown key '{key}'; the keys are {', '.join(fields)}")
        wanted = fields[key].type
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ExperimentError(f"{where}: {key} is a {wanted.__name__}, not {value!r}")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in table]
    if missing:
        raise ExperimentError(f"{where}: '{missing[0]}' is missing")
    return kind(**table)


def folders(root=HERE):
    """{number: folder} of all experiments."""
    return {path.parent.name[:3]: path.parent for path in sorted(Path(root).glob("[0-9][0-9][0-9]-*/experiment.toml"))}


def load(number, root=HERE):
    """The Experiment of a number ("007" or "7"), with `number` and `folder`. Raises ExperimentError."""
    known, number = folders(root), str(number).zfill(3)
    if number not in known:
        raise ExperimentError(f"no experiment {number}; there are: {', '.join(f.name for f in known.values()) or 'none yet'}")
    path = known[number] / "experiment.toml"
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is not TOML: {error}") from None
    experiment = _fill(Experiment, table, path)
    experiment.number, experiment.folder = number, known[number]
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
        arm.metric, arm.margin = arm.metric or experiment.metric, arm.margin or experiment.margin
        arm.baseline = experiment.arm(arm.baseline or experiment.baseline).name
        if arm.of and experiment.arm(arm.of).of:
            raise ExperimentError(f"{path}: arm {arm.name} is of {arm.of}, which trains nothing itself; name the arm that trains")
        if not all(isinstance(flag, str) for flag in experiment.common + arm.flags):
            raise ExperimentError(f"{path}: flags are strings, as typed: [\"--steps\", \"3000\"]")
    return experiment


def label(experiment, arm, seed):
    return f"{experiment.number}-{arm.name}-seed{seed}"


def command(experiment, arm, seed, runs=RUNS):
    """The words after `python` of one run. The folder of a run is runs/<label>; an arm that only samples leaves its files in it."""
    name = label(experiment, arm, seed)
    if arm.of:
        return ["train.py", "--sample", f"{runs}/{label(experiment, experiment.arm(arm.of), seed)}", *arm.flags, "--threads", "1", "--name", name]
    return ["train.py", *experiment.common, *arm.flags, "--seed", str(seed), "--threads", "1", "--name", name, "--runs", runs]


def typed(experiment, arm, seed):
    return shlex.join(["python", *command(experiment, arm, seed)])


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


def by_run(records):
    """{(arm, seed): record}; of several, the last."""
    return {(r["arm"], r["seed"]): r for r in records}


def _curves(path, most=30):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]  # a run that was killed leaves half a line
    kept = rows[::-1][:: -(-len(rows) // most) or 1][::-1]
    short = lambda x: x if x is None or isinstance(x, int) else float(f"{x:.5g}")
    last = [r["loss"] for r in rows if r["step"] > 0.9 * rows[-1]["step"]]
    return sum(last) / max(1, len(last)), {k: [short(r.get(k)) for r in kept] for k in CURVES if any(k in r for r in rows)}


def make_record(experiment, arm, seed, runs, code):
    """The line of a finished run, from the files in its folder. final_loss: the mean over the last tenth of the steps."""
    record = {"arm": arm.name, "seed": seed, "command": typed(experiment, arm, seed), **({"of": arm.of} if arm.of else {})}
    folder = Path(runs) / label(experiment, experiment.arm(arm.of) if arm.of else arm, seed)
    read = lambda name: json.loads((folder / name).read_text())
    if (folder / "env.json").exists():
        env = read("env.json")
        record |= {"env": {k: env[k] for k in ("cpu", "gpu", "bf16", "torch", "python")}, "commit": env["commit"], "clean": env["clean"]}
    final_loss, curves = _curves(folder / "metrics.jsonl")
    if code != 0:
        log = Path(runs) / f"{label(experiment, arm, seed)}.log"
        lines = re.split(r"[\r\n]+", log.read_text(errors="replace").strip()) if log.exists() else [""]
        said = lines[-1].removeprefix("train.py: ").replace(str(runs), RUNS)
        return record | {"failed": said or "no message", "exit": code, "curves": {} if arm.of else curves}
    summary = read("summary.json")
    result = read(f"samples/{label(experiment, arm, seed)}.json") if arm.of else summary
    record["scores"] = {source: {k: v for k, v in s.items() if k != "trace"} for source, s in result["scores"].items()}
    record["reference"] = {end: {k: v for k, v in s.items() if not k.startswith("pixel_")} for end, s in result["reference"].items()}
    record |= {"seconds": 0.0 if arm.of else summary["seconds"], "scoring_seconds": result["scoring_seconds"]}
    record |= {k: summary[k] for k in ("images_per_second", "peak_memory", "bytes_per_parameter")}
    return record | {"final_loss": final_loss} | ({} if arm.of else {"curves": curves})


# -- runs


def validate(experiment, arms, seed):
    """Dry-run the arms here: a typo is one line before the first run, not a column of failed ones."""
    import train

    for arm in arms:
        trained = experiment.arm(arm.of) if arm.of else arm
        words = command(experiment, trained, seed)[1:] + (arm.flags if arm.of else []) + ["--dry_run"]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                code = train.main(words)
        except SystemExit as stop:
            code = stop.code
        if code:
            raise ExperimentError(f"{experiment.number}, arm {arm.name}: {said.getvalue().strip().splitlines()[-1].removeprefix('train.py: ')}")


def execute(experiment, todo, jobs, runs):
    """Run [(arm, seed)] in parallel, in order, an arm that samples after the run it reads; yields (arm, seed, exit status) as they end."""
    waiting, running, failed = list(todo), {}, set()
    try:
        while waiting or running:
            for arm, seed in list(waiting):
                unfinished = {(a.name, s) for a, s in [*waiting, *running.values()]}
                if len(running) == jobs or (arm.of, seed) in unfinished:
                    continue
                waiting.remove((arm, seed))
                log = Path(runs) / f"{label(experiment, arm, seed)}.log"
                log.parent.mkdir(parents=True, exist_ok=True)
                if (arm.of, seed) in failed:
                    log.write_text(f"the run of {arm.of} that it reads failed\n")
                    yield arm, seed, 1
                    continue
                with open(log, "w") as errors:
                    # a session of its own: Ctrl-C reaches the children once, from here, and they write their checkpoints
                    process = subprocess.Popen([sys.executable, *command(experiment, arm, seed, runs)], stdout=subprocess.DEVNULL, stderr=errors,
                                               env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
                running[process] = arm, seed
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                arm, seed = running.pop(process)
                failed |= {(arm.name, seed)} if process.returncode else set()
                yield arm, seed, process.returncode
    finally:
        for process in running:
            process.terminate()  # not SIGINT, which a child of a background shell inherits as ignored
        for process in running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def plan(experiment, arms, seeds, done, runs):
    """[(arm, seed)] still to run, seed by seed; a training that an arm samples from comes before it, again if its folder is gone."""
    todo = []
    for seed in seeds:
        for arm in dict.fromkeys(map(experiment.arm, arms)):
            if (arm.name, seed) in done:
                continue
            trained = experiment.arm(arm.of) if arm.of else arm
            gone = (trained.name, seed) not in done or not (Path(runs) / label(experiment, trained, seed) / "summary.json").exists()
            todo += [(trained, seed)] if gone else []
            todo += [(arm, seed)]
    return list(dict.fromkeys(todo))


def compare(experiment, arm, old, new, records):
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
    spread = [value(r, arm.metric) for r in records if r["arm"] == arm.name and "failed" not in r]
    tolerance = 4 * max(arm.margin, statistics.stdev(spread) if len(spread) > 2 else 0)
    return abs(a - b) <= tolerance, f"{said}; another machine or torch than recorded, tolerance {tolerance:.3g}"


def value(record, metric):
    """A score of a finished run: "ema.frechet", "0.9999:bf16.frechet", "raw.mean_dice"."""
    source, _, key = metric.rpartition(".")
    try:
        return float(record["scores"][source][key])
    except (KeyError, TypeError):
        held = [f"{s}.{k}" for s, scores in record["scores"].items() for k, v in scores.items() if isinstance(v, (int, float))]
        raise ExperimentError(f"arm {record['arm']}, seed {record['seed']}: no score '{metric}'; its record holds {', '.join(held)}") from None


def run(experiment, args):
    path = experiment.folder / "results.jsonl"
    records = read_results(path, repair=not (args.check or args.dry_run))
    names = [a.name for a in experiment.arms]
    for record in records:
        if record["arm"] not in names:
            raise ExperimentError(f"{path} holds arm '{record['arm']}', which experiment.toml lacks: put it back, or delete its lines")
        expected = typed(experiment, experiment.arm(record["arm"]), record["seed"])
        if record["command"] != expected:
            raise ExperimentError(f"{path}: arm {record['arm']}, seed {record['seed']} was run with other flags than experiment.toml has now: "
                                  f"give the changed arm another name, or delete its lines")
    recorded = by_run(records)
    arms = args.arm or ([experiment.baseline] if args.check else names)
    arms = [experiment.runs_of(experiment.arm(a)).name for a in arms]
    seeds = args.seeds or (experiment.seeds[:1] if args.check else experiment.seeds)
    if unknown := [s for s in seeds if s not in experiment.seeds]:
        raise ExperimentError(f"seed {unknown[0]} is not among the seeds of experiment {experiment.number}: {experiment.seeds}; add it there")
    done = set() if args.check else {k for k, r in recorded.items() if not (args.retry and "failed" in r)}
    with tempfile.TemporaryDirectory() if args.check else contextlib.nullcontext(args.runs) as runs:
        todo = plan(experiment, arms, seeds, done, runs)
        if args.dry_run:
            print("\n".join(typed(experiment, arm, seed) for arm, seed in todo) or "all recorded")
            return 0
        wanted = {(a, s) for a in arms for s in seeds}
        if args.check and (missing := sorted(wanted - set(recorded))):
            raise ExperimentError(f"{path} has no record of arm {missing[0][0]}, seed {missing[0][1]} to compare with; run it first")
        validate(experiment, dict((a.name, a) for a, _ in todo).values(), seeds[0])
        status, results = 0, execute(experiment, todo, args.jobs, runs)
        bar = tqdm(total=len(wanted | {(a.name, s) for a, s in todo}), initial=len(wanted & done), unit="run", dynamic_ncols=True, desc=experiment.folder.name)
        with contextlib.closing(results), bar:
            for arm, seed, code in results:
                record = make_record(experiment, arm, seed, runs, code)
                bar.update()
                if args.check:
                    if (arm.name, seed) in wanted:
                        same, said = compare(experiment, arm, recorded[arm.name, seed], record, records)
                        bar.write(f"{arm.name}, seed {seed}: {'same' if same else 'DIFFERENT'}: {said}")
                        status |= not same
                    continue
                if code:
                    bar.write(f"{arm.name}, seed {seed} failed: {record['failed']}", file=sys.stderr)
                if (arm.name, seed) not in done:
                    with open(path, "a") as file:
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
