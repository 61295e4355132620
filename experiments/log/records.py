"""Records of runs: experiments/*/results.jsonl has a line a run, made from the files that the run left.

A record holds the arm, the seed and the command, where it ran (env, commit, clean; of an arm that only
samples also trained_on, where its training ran), and what came of it: scores {source of weights: {name:
figure}}, the reference scores of real images and noise, seconds, final_loss, curves; or, of a run that
failed, its last message.
"""

import json
import re
import statistics
import sys
from pathlib import Path

from experiments.log.definition import RUNS, run_key, run_label, typed_run
from harness.files import read_json, read_lines, write_atomically
from harness.run_folder import environment
from lowprec.errors import Refused

MACHINE_KEYS = ("cpu", "gpu", "bf16", "torch", "python")
CODE_KEYS = ("commit", "clean")
CURVE_KEYS = ("step", "loss", "update_survival", "exp_avg_sq_moved", "ema_moved", "loss_scale")

# ---- results.jsonl -----------------------------------------------------------------------------------------


def read_records(path, repair=False):
    """Records of results.jsonl, [] without one.

    A half-written last line is left out with a warning, and cut off with `repair`.
    """
    path = Path(path)
    if not path.exists():
        return []
    records = read_lines(path)
    lines = path.read_bytes().splitlines(keepends=True)
    numbers = [i for i, line in enumerate(lines, start=1) if line.strip()]
    if len(records) < len(numbers):
        said = "the last line is half written and ignored; its run is repeated"
        print(f"warning: {path}: {said}", file=sys.stderr)
        lines = lines[: numbers[-1] - 1]
    whole = b"".join(lines)
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"
    if repair and len(whole) != path.stat().st_size:
        write_atomically(path, lambda file: file.write(whole))
    return records


def append_record(experiment, record):
    with open(experiment.folder / "results.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def note_check(arm, seed, same, said, record, machine):
    """Keep what a check of one run came to, in checks.jsonl beside the records."""
    found = dict(arm=arm.name, seed=seed, same=same, said=said, machine=machine)
    for name in CODE_KEYS:
        found[name] = record.get(name)
    with open(arm.experiment.folder / "checks.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")


def noted_checks(experiment):
    """The checks of an experiment; of several of one run on one kind of machine, the last."""
    found = {}
    for check in read_lines(experiment.folder / "checks.jsonl"):
        found[check["arm"], check["seed"], check["machine"]] = check
    return list(found.values())


def recorded(experiment, repair=False):
    """{key: record} of an experiment; of several for one run, the last.

    Raises Refused for records of other arms or flags.
    """
    path, found = experiment.folder / "results.jsonl", {}
    arms = {arm.name: arm for arm in experiment.arms}
    for record in read_records(path, repair):
        name, seed = record["arm"], record["seed"]
        if name not in arms or record["command"] != typed_run(arms[name], seed):
            raise Refused(
                f"{path}: arm {name}, seed {seed} was run with other flags than experiment.toml has now: "
                "put them back, give the changed arm another name, or delete its lines"
            )
        found[run_key(arms[name], seed)] = record
    return found


# ---- From a run to its record ------------------------------------------------------------------------------


def make_record(arm, seed, runs, code):
    """The record of a run that ended with this exit status, from the files in its folder.

    final_loss is the mean over the last tenth of the steps.
    """
    record = {"arm": arm.name, "seed": seed, "command": typed_run(arm, seed)}
    if arm.of:
        record["of"] = arm.of
    folder = Path(runs) / run_label(arm.trained, seed)
    if (folder / "env.json").exists():
        env = read_json(folder / "env.json")
        if arm.of:  # it was sampled here and now, whatever machine and code trained it
            record["trained_on"] = picked_keys(env, ("cpu", "gpu", "commit"))
            env = environment("cuda" if env["gpu"] else "cpu")
        record["env"] = picked_keys(env, MACHINE_KEYS)
        record |= picked_keys(env, CODE_KEYS)
    final_loss, curves = _curves(folder / "metrics.jsonl")
    curves = {} if arm.of else {"curves": curves}
    if code != 0:
        return record | {"failed": _last_message(arm, seed, runs), "exit": code, "curves": {}} | curves
    return record | _results(arm, seed, folder) | {"final_loss": final_loss} | curves


def picked_keys(table, names):
    return {name: table[name] for name in names}


def _results(arm, seed, folder):
    """Scores and cost. Of an arm that only samples: its own scores, and the figures of the training."""
    summary, ledger = read_json(folder / "summary.json"), {}
    result = summary
    if arm.of:
        result = read_json(folder / "samples" / f"{run_label(arm, seed)}.json")
        ledger = result.get("ledger", {})
    elif (folder / "ledger.json").exists():
        ledger = read_json(folder / "ledger.json")
    scores, reference = {}, {}
    for source, own in result["scores"].items():
        scores[source] = {**own, "trace": _thinned(own["trace"])} if "trace" in own else own
    for end, own in result["reference"].items():
        reference[end] = {name: value for name, value in own.items() if not name.startswith("pixel_")}
    found = {
        "scores": scores,
        "reference": reference,
        "seconds": 0.0 if arm.of else summary.get("seconds"),
        "scoring_seconds": result.get("scoring_seconds", 0.0),
    }
    for name in ("images_per_second", "peak_memory", "bytes_per_parameter", "gradient_snr"):
        if name in summary:
            found[name] = summary[name]
    activations = summary.get("activations")
    if isinstance(activations, dict) and not arm.of:
        found["activation_bytes"] = activations.get("total")
    if ledger.get("flops_share"):
        found["flops_share"] = ledger["flops_share"]
    return found


def _thinned(trace):
    """The trace of ranges at some eleven even steps, first and last included, numbers to 4 digits."""
    at = {round(i * (len(trace) - 1) / 10) for i in range(11)} if trace else ()
    return [{k: float(f"{v:.4g}") for k, v in trace[i].items()} for i in sorted(at)]


def _curves(path):
    """(mean loss of the last tenth of the steps, {name: values} at some 30 steps, the last included)."""
    rows = read_lines(path)
    if not rows:
        return 0.0, {}
    every = -(-len(rows) // 30)
    kept = rows[::-1][::every][::-1]
    last = [row["loss"] for row in rows if "loss" in row and row["step"] > 0.9 * rows[-1]["step"]]
    written = set().union(*rows)
    curves = {}
    for name in CURVE_KEYS:
        if name in written:
            curves[name] = [_short(row.get(name)) for row in kept]
    return sum(last) / max(1, len(last)), curves


def _short(x):
    return float(f"{x:.5g}") if isinstance(x, float) else x


def _last_message(arm, seed, runs):
    log = Path(runs) / f"{run_label(arm, seed)}.log"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    last = re.split(r"[\r\n]+", text)[-1]
    return last.removeprefix("train.py: ").replace(str(runs), RUNS) or "no message"


# ---- What a record says ------------------------------------------------------------------------------------


def is_number(x):
    """A float, NaN and infinity among them, or an int."""
    return type(x) in (float, int)


def figure_of_record(record, metric):
    """A figure of a finished run.

    A score, as in "ema.frechet", "0.9999:bf16.frechet", "raw.mean_dice", or a figure of the training, as in
    "final_loss", "gradient_snr.fp8". "ema.loss_by_timestep" is the mean over its bins, the held-out loss.
    Raises Refused.
    """
    source, _, name = metric.rpartition(".")
    try:
        holder = {**record, **record["scores"]}[source] if source else record
        return statistics.fmean(holder[name]) if name == "loss_by_timestep" else float(holder[name])
    except (KeyError, TypeError, ValueError):
        held = []
        for source, own in record["scores"].items():
            held += [f"{source}.{k}" for k, v in own.items() if is_number(v)]
        where = f"arm {record['arm']}, seed {record['seed']}"
        raise Refused(f"{where}: no score '{metric}'; its record holds {', '.join(held)}") from None


def compare_records(arm, old, new):
    """(same, message) of a run made again, of the scores that the old record holds.

    On the same CPU they are the same to the last bit. Elsewhere one run says nothing: same is None.
    """
    if "failed" in old or "failed" in new:
        if old.get("failed") == new.get("failed"):
            return True, f"failed as recorded: {old['failed']}"
        was, now = old.get("failed", "finished"), new.get("failed", "finished")
        return False, f"recorded: {was}; now: {now}"
    figures, found = dict(_leaves(old["scores"])), dict(_leaves(new["scores"]))
    moved = [name for name, x in figures.items() if repr(found.get(name)) != repr(x)]
    if not moved:
        return True, "all scores equal to the last bit"
    a, b = figure_of_record(old, arm.metric), figure_of_record(new, arm.metric)
    said = f"{arm.metric} {a:.6g} recorded (commit {short_commit(old)}), "
    said += f"{b:.6g} now (commit {short_commit(new)})"
    if not same_machine(old, new.get("env", {})):
        return None, f"{said}; another machine or torch than recorded, where a run alone can't be compared"
    some = f"{len(moved)} of {len(figures)} scores differ, the first {moved[0]}"
    return False, f"{said}; {some}; same CPU and torch, where equal bits are expected"


def same_machine(record, env):
    """Whether a run on a machine with these facts has the bits of the record."""
    return {**record.get("env", {}), "python": 0} == {**env, "python": 0} and not env.get("gpu")


def compare_gaps(arm, recorded_gaps, gap, seed):
    """(same, message) of the gap between an arm and its baseline, made again on another machine.

    recorded_gaps: {seed: gap}. It lies within 4 sd of those from the one of its seed; of two gaps within the
    margin.
    """
    spread = list(recorded_gaps.values())
    tolerance = 4 * statistics.stdev(spread) if len(spread) > 2 else arm.margin
    said = f"{arm.metric} against {arm.baseline} {recorded_gaps[seed]:+.4g} recorded, {gap:+.4g} now; "
    said += f"another machine or torch than recorded, tolerance {tolerance:.3g}"
    return abs(gap - recorded_gaps[seed]) <= tolerance, said


def short_commit(record):
    return str(record.get("commit"))[:7]


def _leaves(value, path=""):
    """("ema.trace.3.t", number or text) of each leaf of nested dicts and lists."""
    if not isinstance(value, (dict, list)):
        yield path[1:], value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(part, f"{path}.{name}")
