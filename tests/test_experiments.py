"""The log: experiments/run.py, experiments/report.py, and the EXPERIMENTS.md of this repository, which must be what its results give."""

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import train
from experiments import report, run

ROOT = Path(run.ROOT)
TOML = """
title = "Rounding"
question = "Does it matter how a bf16 weight is written?"
believed = "No."
prediction = "Yes."
margin = 0.5
metric = "ema.frechet"
seeds = [0, 1, 2, 3, 4, 5]
common = ["--steps", "4", "--batch_size", "8", "--samples", "64", "--sample_steps", "2", "--log_every", "2", "--sample_every", "0"]
baseline = "fp32"
[[arms]]
name = "fp32"
flags = []
[[arms]]
name = "nearest"
flags = ["--pure_bf16"]
[[arms]]
name = "sampler"
of = "fp32"
flags = ["--set", "sampler=bf16"]
note = "state of the sampler alone"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """experiments/001-rounding in a temporary folder; returns the experiments folder. run.main changes the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "experiments", TOML)
    return tmp_path / "experiments"


def write(root, toml, records=()):
    (root / "001-rounding").mkdir(parents=True, exist_ok=True)
    (root / "001-rounding/experiment.toml").write_text(toml)
    (root / "001-rounding/results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def record(experiment, name, seed, frechet, **more):
    arm, scores = experiment.arm(name), {"frechet": frechet, "label_accuracy": 0.5, "loss_by_timestep": [0.5, 0.4 + seed]}
    return {"arm": name, "seed": seed, "command": run.typed(arm, seed), "commit": "a" * 40, "clean": True,
            "env": {"cpu": "c", "gpu": None, "bf16": [], "torch": "2", "python": "3"}, "scores": {"ema": scores, "raw": {"frechet": 2 * frechet}},
            "reference": {"floor": {"frechet": 0.1}, "ceiling": {"frechet": 60.0}}, "seconds": 30.0, "scoring_seconds": 6.0, "images_per_second": 100.0,
            "peak_memory": 1, "bytes_per_parameter": 16.0, "final_loss": 0.4 + seed / 100, "curves": {"step": [2, 4], "loss": [1.0, 0.5 + seed]}, **more}


def records_of(experiment, shift=(0.0, 0.9, 0.01)):
    spread = np.random.default_rng(0)
    base = {s: 1.5 + 0.2 * spread.standard_normal() for s in experiment.seeds}
    return [record(experiment, a.name, s, base[s] + by * (1 + 0.1 * spread.standard_normal())) for s in experiment.seeds for a, by in zip(experiment.arms, shift)]


def fails(capsys, root, *words):
    """run.main must end with status 2 and one line; returns the line."""
    capsys.readouterr()
    assert run.main(list(words), root) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("run.py: "), said.err
    return said.err


def commands(capsys, root, *words):
    capsys.readouterr()
    assert run.main(["001", "--dry_run", *words], root) == 0
    return capsys.readouterr().out.splitlines()


# -- what a user may get wrong


@pytest.mark.parametrize("old, new, said", [
    ("margin = 0.5", "margin = 0.5\nmargins = 1", "unknown key 'margins'"),
    ("note = ", "remark = ", "unknown key 'remark'"),
    ("prediction = \"Yes.\"\n", "", "'prediction' is missing"),
    ("margin = 0.5", "margin = \"small\"", "margin is a float"),
    ("margin = 0.5", "margin = 0", "margin must be above 0"),
    ("margin = 0.5", "margin = ", "is not TOML"),
    ("baseline = \"fp32\"", "baseline = \"fp64\"", "no arm 'fp64'"),
    ("of = \"fp32\"", "of = \"sampler\"", "leads back to itself"),
    ("note = ", "cell = 3 #", "cell is a dict"),
    ("flags = [\"--pure_bf16\"]", "flags = [\"--pure_bf16\"]\nafter = \"fp32\"", "{after} stands in its flags"),
    ("of = \"fp32\"", "of = \"7/fp32\"", "no experiment 007"),
    ("name = \"nearest\"", "name = \"fp32\"", "two arms have one name"),
    ("name = \"nearest\"", "name = \"../x\"", "names of arms become folders"),
    ("seeds = [0, 1, ", "seeds = [0, 0, ", "seed is listed twice"),
    ("\"4\", \"--batch", "4, \"--batch", "flags are strings"),
])
def test_a_wrong_toml_is_one_line(folder, capsys, old, new, said):
    assert old in TOML
    write(folder, TOML.replace(old, new, 1))
    assert said in fails(capsys, folder, "001", "--dry_run")


def test_unknown_experiment_arm_and_seed_name_what_exists(folder, capsys):
    assert "001-rounding" in fails(capsys, folder, "002")
    assert "fp32, nearest, sampler" in fails(capsys, folder, "001", "--arm", "kahan")
    assert "[0, 1, 2, 3, 4, 5]" in fails(capsys, folder, "001", "--seeds", "6")
    assert "0 1 2 or 0-11" in fails(capsys, folder, "001", "--seeds", "first")
    assert "no record of arm fp32, seed 0" in fails(capsys, folder, "001", "--check")


def test_a_flag_that_train_refuses_stops_before_the_first_run(folder, capsys):
    write(folder, TOML.replace('"--pure_bf16"', '"--pure_bf61"'))
    assert "arm nearest: unrecognized arguments: --pure_bf61" in fails(capsys, folder, "001")
    write(folder, TOML.replace('"--pure_bf16"', '"--stochastic"'))
    assert "add --pure_bf16" in fails(capsys, folder, "001")
    assert not (folder / "001-rounding/results.jsonl").read_text()


def test_only_a_half_written_last_line_is_forgiven(folder, capsys):
    experiment, path = run.load("1", folder), folder / "001-rounding/results.jsonl"
    write(folder, TOML, records_of(experiment))
    whole = path.read_text()
    path.write_text(whole[:-200])
    assert commands(capsys, folder) == [run.typed(experiment.arm("fp32"), 5), run.typed(experiment.arm("sampler"), 5)]
    assert len(run.read_results(path, repair=True)) == 17
    assert "half written" in capsys.readouterr().err
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:-1])
    path.write_text(whole[200:])
    assert "line 1 is no record" in fails(capsys, folder, "001")
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 2
    path.write_text(whole.rstrip("\n"))  # whole, without its line end: kept, and the next line starts on its own
    assert len(run.read_results(path, repair=True)) == 18 and path.read_text() == whole


def test_results_of_other_flags_are_not_mixed_in(folder, capsys):
    records = records_of(run.load("1", folder))
    write(folder, TOML.replace('"--steps", "4"', '"--steps", "5"'), records)
    assert "other flags than experiment.toml" in fails(capsys, folder, "001")
    write(folder, TOML.replace('name = "nearest"', 'name = "near"'), records)
    assert "holds arm 'nearest'" in fails(capsys, folder, "001")


# -- what is run


def test_the_commands_are_those_a_person_types(folder, capsys):
    common = "python train.py --steps 4 --batch_size 8 --samples 64 --sample_steps 2 --log_every 2 --sample_every 0"
    assert commands(capsys, folder, "--seeds", "0-1") == [
        f"{common} --seed 0 --threads 1 --name 001-fp32-seed0 --runs runs/experiments",
        f"{common} --pure_bf16 --seed 0 --threads 1 --name 001-nearest-seed0 --runs runs/experiments",
        "python train.py --sample runs/experiments/001-fp32-seed0 --set sampler=bf16 --threads 1 --name 001-sampler-seed0",
        f"{common} --seed 1 --threads 1 --name 001-fp32-seed1 --runs runs/experiments",
        f"{common} --pure_bf16 --seed 1 --threads 1 --name 001-nearest-seed1 --runs runs/experiments",
        "python train.py --sample runs/experiments/001-fp32-seed1 --set sampler=bf16 --threads 1 --name 001-sampler-seed1"]


def test_what_is_recorded_is_skipped(folder, capsys):
    experiment = run.load("1", folder)
    write(folder, TOML, [record(experiment, "fp32", 0, 1.0), record(experiment, "nearest", 0, 1.0), record(experiment, "nearest", 1, 1.0, failed="the loss is nan")])
    names = lambda *words: [re.search(r"--name (\S+)", c)[1] for c in commands(capsys, folder, *words)]
    assert names("--arm", "fp32", "nearest", "--seeds", "0", "1") == ["001-fp32-seed1"]
    assert names("--arm", "nearest", "--seeds", "1", "--retry") == ["001-nearest-seed1"]
    # the run that an arm samples from is needed again when its folder is gone, and not when it is there
    assert names("--arm", "sampler", "--seeds", "0") == ["001-fp32-seed0", "001-sampler-seed0"]
    kept = folder.parent / "runs/001-fp32-seed0/summary.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert names("--arm", "sampler", "--seeds", "0", "--runs", str(folder.parent / "runs")) == ["001-sampler-seed0"]


FAKE = '''
import json, os, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
if "--sample" in words:
    folder = Path(value("--sample"))
    assert (folder / "summary.json").exists(), "sampled before it was trained"
    out = folder / f"samples/{value('--name')}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"scores": {"ema": {"frechet": 3.0}}, "reference": {}, "scoring_seconds": 1.0, "ledger": {"flops_share": {"generation": 0.9}}}))
    sys.exit()
folder = Path(value("--runs")) / value("--name")
folder.mkdir(parents=True)
(folder / "env.json").write_text(json.dumps(dict(cpu="c", gpu=None, bf16=[], torch="2", python="3", commit="b" * 40, clean=True)))
if "nearest" in str(folder) and value("--seed") == "1":
    print(f"50%|##\\rtrain.py: the loss is nan at step 2; {folder} is kept", file=sys.stderr)
    sys.exit(2)
if "WAIT" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "stopped").touch(), sys.exit(130)))
    (folder / "started").touch()
    time.sleep(30)
time.sleep(0.3)
(folder / "ledger.json").write_text(json.dumps({"flops_share": {}}))
(folder / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\\n" for s in range(1, 101)) + '{"half')
(folder / "summary.json").write_text(json.dumps({"scores": {"ema": {"frechet": 2.0, "trace": [{"t": t, "x_min": -t / 3} for t in range(100, -1, -1)]}}, "reference": {}, "seconds": 5.0, "scoring_seconds": 1.0,
                                                 "images_per_second": 9.0, "peak_memory": 1, "bytes_per_parameter": 8, "gradient_snr": {"fp8": 20.0, "bf16": 40.0}}))
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A train.py that does nothing, quickly; validation still asks the real one."""
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(run, "ROOT", tmp_path)


def test_records_hold_scores_and_failures(folder, fake, capsys):
    assert run.main(["001", "--seeds", "0", "1", "--jobs", "3", "--arm", "sampler", "nearest", "fp32"], folder) == 0
    assert "nearest, seed 1 failed: the loss is nan at step 2" in capsys.readouterr().err
    records = {key[1:]: record for key, record in run.recorded(run.load("1", folder)).items()}
    assert set(records) == {(a, s) for a in ("fp32", "nearest", "sampler") for s in (0, 1)}
    fp32, sampled, failed = records["fp32", 0], records["sampler", 1], records["nearest", 1]
    assert fp32["scores"]["ema"]["frechet"] == 2.0 and [step["t"] for step in fp32["scores"]["ema"]["trace"]] == list(range(100, -1, -10)) and fp32["seconds"] == 5.0 and fp32["commit"] == "b" * 40
    assert fp32["final_loss"] == pytest.approx(np.mean([1 / s for s in range(91, 101)])) and len(fp32["curves"]["step"]) <= 30 and fp32["curves"]["step"][-1] == 100
    assert run.value(fp32, "gradient_snr.fp8") == 20.0 and "flops_share" not in fp32 and sampled["flops_share"] == {"generation": 0.9}
    assert sampled["of"] == "fp32" and sampled["scores"] == {"ema": {"frechet": 3.0}} and sampled["seconds"] == 0
    assert failed["failed"] == "the loss is nan at step 2; runs/experiments/001-nearest-seed1 is kept" and failed["exit"] == 2 and "scores" not in failed
    before = (folder / "001-rounding/results.jsonl").read_text()
    assert run.main(["001", "--seeds", "0", "1"], folder) == 0  # a failure is a result: not repeated
    assert (folder / "001-rounding/results.jsonl").read_text() == before
    check = ["001", "--check", "--arm", "sampler", "nearest", "--seeds", "1"]
    assert run.main(check, folder) == 0  # it fails again, as recorded
    (folder / "001-rounding/results.jsonl").write_text(before.replace('"frechet": 3.0', '"frechet": 3.0001'))
    assert run.main(check, folder) == 1 and "sampler, seed 1: DIFFERENT" in capsys.readouterr().out
    # a training repeated for an arm that samples from it, its folder being gone, is recorded once
    shutil.rmtree(folder.parent / "runs")
    (folder / "001-rounding/results.jsonl").write_text("".join(line for line in before.splitlines(keepends=True) if '"of"' not in line))
    capsys.readouterr()
    assert run.main(["001", "--seeds", "0", "1"], folder) == 0
    assert sorted((folder / "001-rounding/results.jsonl").read_text().splitlines()) == sorted(before.splitlines())
    done, total = re.findall(r"(\d+)/(\d+) \[", capsys.readouterr().err)[-1]
    assert done == total  # the bar counts a training that is repeated once


def test_interrupted_runs_are_told_to_stop_and_nothing_is_recorded(folder, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("WAIT", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts its children with SIGINT ignored
    started = tmp_path / "runs/experiments/001-fp32-seed0/started"

    def interrupt():
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run.main(["001", "--arm", "fp32", "--seeds", "0", "--jobs", "1"], folder) == 130
    assert started.with_name("stopped").exists()
    assert not (folder / "001-rounding/results.jsonl").read_text()


def test_a_tiny_experiment_runs_and_checks(folder, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling costs more than these four steps
    words = ["001", "--arm", "sampler", "--seeds", "0", "--runs", str(folder.parent / "runs")]
    assert run.main(words, folder) == 0
    path = folder / "001-rounding/results.jsonl"
    trained, sampled = run.read_results(path)
    assert trained["command"].endswith("--runs runs/experiments") and str(folder.parent) not in path.read_text()
    assert trained["curves"]["step"] == [2, 4] and len(trained["scores"]["ema"]["loss_by_timestep"]) == 10 and [step["t"] for step in trained["scores"]["ema"]["trace"]][-1] == 0
    assert sampled["scores"]["ema"]["frechet"] != trained["scores"]["ema"]["frechet"]
    assert run.main(["001", "--check", "--arm", "fp32", "--seeds", "0"], folder) == 0
    assert "same: all scores equal to the last bit" in capsys.readouterr().out
    assert report.main(["--runs", str(folder.parent / "runs")], folder, folder.parent / "EXPERIMENTS.md") == 0
    assert {p.name for p in (folder / "001-rounding").glob("*.png")} == {"samples.png", "loss_by_timestep.png", "curves.png"}


def test_check_is_exact_on_the_same_machine_and_tolerant_elsewhere(folder):
    experiment = run.load("1", folder)
    arm, records = experiment.arm("fp32"), records_of(experiment)
    old = records[0]
    again = lambda by, **env: record(experiment, "fp32", 0, old["scores"]["ema"]["frechet"] + by, env={**old["env"], **env})
    verdict = lambda new: run.compare(arm, old, new, [r for r in records if r["arm"] == "fp32"])[0]
    assert verdict(again(0.0)) and not verdict(again(1e-12))
    assert verdict(again(1.9, cpu="other")) and not verdict(again(2.1, cpu="other"))  # 4 margins
    assert not verdict({**again(0.0), "failed": "the loss is nan"})


# -- what experiments share

SECOND = TOML.replace("Rounding", "More").split("[[arms]]")[0] + """
arms = [
    {name = "fp32", of = "001/fp32", flags = []},
    {name = "raw", of = "fp32", flags = [], metric = "raw.frechet"},
    {name = "sampler", of = "fp32", flags = ["--set", "sampler=bf16"]},
    {name = "again", of = "sampler", flags = [], metric = "raw.frechet", margin = 9},
    {name = "student", after = "fp32", flags = ["--export", "{after}/student.safetensors"]},
]
"""


def second(root, toml=SECOND):
    (root / "002-more").mkdir(exist_ok=True)
    (root / "002-more/experiment.toml").write_text(toml)
    return run.load("2", root)


def test_an_arm_reads_samples_or_starts_from_another_experiments_run(folder, fake, capsys, monkeypatch):
    experiment = second(folder)
    assert [a.source.name for a in experiment.arms] == ["fp32", "fp32", "sampler", "sampler", "student"]
    assert {a.trained.experiment.number for a in experiment.arms[:4]} == {"001"} and experiment.arm("student").start is experiment.arm("fp32").trained
    assert run.main(["002", "--seeds", "0", "--dry_run"], folder) == 0
    planned = [re.search(r"--name (\S+)", c)[1] for c in capsys.readouterr().out.splitlines()]
    assert planned == ["001-fp32-seed0", "002-sampler-seed0", "002-student-seed0"]
    assert run.main(["002", "--seeds", "0", "--arm", "student", "--dry_run"], folder) == 0
    assert [re.search(r"--name (\S+)", c)[1] for c in capsys.readouterr().out.splitlines()] == ["001-fp32-seed0", "002-student-seed0"]
    assert run.main(["002", "--seeds", "0", "--jobs", "3"], folder) == 0
    own, other = ([r["arm"] for r in run.read_results(folder / name / "results.jsonl")] for name in ("002-more", "001-rounding"))
    assert sorted(own) == ["sampler", "student"] and other == ["fp32"]
    record = run.recorded(experiment)["002", "student", 0]
    assert "--export runs/experiments/001-fp32-seed0/student.safetensors" in record["command"]
    assert run.main(["002", "--seeds", "0", "--dry_run"], folder) == 0 and capsys.readouterr().out == "all recorded\n"
    shutil.rmtree(folder.parent / "runs")  # what an arm starts from is trained again when its folder is gone, and what is recorded is not
    (folder / "002-more/results.jsonl").write_text("")
    assert run.main(["002", "--seeds", "0", "--dry_run"], folder) == 0
    assert [re.search(r"--name (\S+)", c)[1] for c in capsys.readouterr().out.splitlines()] == planned


@pytest.mark.parametrize("old, new, said", [
    ('of = "001/fp32"', 'of = "003/fp32"', "no experiment 003"),
    ('of = "001/fp32"', 'of = "001/fp64"', "no arm 'fp64'"),
    ('of = "001/fp32"', 'of = "raw"', "leads back to itself"),
    ('after = "fp32"', 'after = "sampler"', "trains nothing itself"),
    ('"{after}/student.safetensors"', '"student.safetensors"', "{after} stands in its flags"),
    ("seeds = [0,", "seeds = [7, 0,", "has no seed 7"),
])
def test_a_wrong_reference_is_one_line(folder, capsys, old, new, said):
    assert old in SECOND
    with pytest.raises(run.ExperimentError, match=re.escape(said)):
        second(folder, SECOND.replace(old, new, 1))
    assert said in fails(capsys, folder, "002")


def test_scores_of_another_experiment_make_the_table(folder):
    records = records_of(run.load("1", folder))
    write(folder, TOML, records)
    second(folder)
    document = folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0
    first, rows = table(document.read_text()), table(document.read_text(), "002")
    assert rows["fp32"]["frechet"] == first["fp32"]["ema.frechet"] and rows["raw"]["frechet"] == first["fp32"]["raw.frechet"]
    assert rows["sampler"]["frechet"] == "-"


# -- what is reported


def table(text, number="001"):
    """Rows of the generated table as {column: cell}."""
    rows = [[c.strip() for c in line.strip("| ").split(" | ")] for line in text[text.index(f"generated: {number} begin") :].splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}


def test_every_number_of_the_table_comes_from_the_results(folder):
    experiment = run.load("1", folder)
    records = records_of(experiment)
    write(folder, TOML, records)
    document = folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0
    rows = table(document.read_text())
    values = {a.name: np.array([r["scores"]["ema"]["frechet"] for r in records if r["arm"] == a.name]) for a in experiment.arms}
    for name, x in values.items():
        row, d = rows[name], x - values["fp32"]
        assert row["ema.frechet"] == f"{x.mean():.3f} ± {x.std(ddof=1):.3f}"
        assert row["raw.frechet"] == f"{2 * x.mean():.3f} ± {2 * x.std(ddof=1):.3f}" and row["label accuracy"] == "0.500 ± 0.000"
        assert row["training loss"] == f"{0.425:.4f} ± {np.std(np.arange(6) / 100, ddof=1):.4f}"
        assert (row["n"], row["bytes a parameter"], row["seconds"]) == ("6", "16", "36")
        if name != "fp32":
            half = stats.t.ppf(0.975, 5) * d.std(ddof=1) / 6**0.5
            assert row["difference [95 % CI]"] == f"{d.mean():+.3f} [{d.mean() - half:+.3f}, {d.mean() + half:+.3f}]"
            effect = float(row["detectable"]) / d.std(ddof=1) * 6**0.5
            if d.std() > 0.01:
                assert stats.nct.sf(stats.t.ppf(0.975, 5), 5, effect) == pytest.approx(0.8, abs=0.02)
    assert [rows[name]["verdict"] for name in rows] == ["baseline", "worse", "equal"]
    lines = document.read_text().splitlines()
    overview = lines[lines.index("<!-- generated: overview begin -->") + 3]
    assert overview.endswith("| equal: sampler; worse: nearest | 6 min on 2 cores |")  # 18 runs of 36 s on 2 cores
    assert not any(line.startswith("| Its net") for line in lines)
    edit = folder / experiment.folder.name / "experiment.toml"
    edit.write_text(edit.read_text().replace('name = "nearest"', 'name = "nearest"\nheadline = "Its net"', 1))
    assert report.main([], folder, document) == 0
    headline = [line for line in document.read_text().splitlines() if line.startswith("| Its net")]
    assert headline == [f"| Its net ([001](#experiment-001)) | 16 | {rows['fp32']['ema.frechet']} | {rows['nearest']['ema.frechet']} | "
                        f"{rows['nearest']['difference [95 % CI]']} | {experiment.margin:g} | worse, n = 6 |"]


def test_again_changes_nothing_and_the_prose_stays(folder):
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    write(folder, TOML, records_of(experiment))
    assert report.main([], folder, document) == 0
    document.write_text(document.read_text().replace("### What happened\n", "### What happened\n\nNearest loses.\n"))
    state = lambda: {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in [document, *(folder / "001-rounding").iterdir()]}
    before = state()
    assert report.main(["--check"], folder, document) == 0
    assert report.main([], folder, document) == 0 and state() == before
    for path in (folder / "001-rounding").glob("*.png"):  # drawn anew, the bytes are the same
        path.unlink()
    assert report.main([], folder, document) == 0 and {k: v[0] for k, v in state().items()} == {k: v[0] for k, v in before.items()}
    write(folder, TOML, records_of(experiment, shift=(0.0, 2.0, 0.01)))
    assert report.main(["--check"], folder, document) == 1 and report.main([], folder, document) == 0
    assert "Nearest loses." in document.read_text() and document.read_bytes() != before["EXPERIMENTS.md"][0]


def test_a_new_section_stands_where_its_number_belongs(folder):
    """Also before sections that are there, whose prose stays."""
    document = folder.parent / "EXPERIMENTS.md"
    second(folder)
    shutil.move(folder / "001-rounding", folder.parent / "aside")
    (folder / "002-more/experiment.toml").write_text(TOML)
    assert report.main([], folder, document) == 0
    document.write_text(document.read_text() + "\nWhat I saw.\n")
    shutil.move(folder.parent / "aside", folder / "001-rounding")
    assert report.main([], folder, document) == 0
    text = document.read_text()
    assert re.findall(r"^## (\d+)", text, re.M) == ["001", "002"] and text.endswith("\nWhat I saw.\n")
    assert report.main(["--check"], folder, document) == 0


def test_a_diverged_run_counts_and_a_killed_one_does_not(folder):
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        if r["arm"] == "nearest":
            r["failed"] = "the loss is nan at step 7: lower --lr"
        if (r["arm"], r["seed"]) == ("sampler", 3):
            r["failed"] = "Killed"
    write(folder, TOML, [{k: v for k, v in r.items() if k != "scores" or "failed" not in r} for r in records])
    assert report.main([], folder, document) == 0
    text = document.read_text()
    rows = table(text)
    assert (rows["nearest"]["ema.frechet"], rows["nearest"]["verdict"], rows["nearest"]["n"]) == ("inf", "worse", "6")
    assert (rows["sampler"]["verdict"], rows["sampler"]["n"]) == ("equal", "5")
    assert "- sampler, seed 3: Killed" in text and text.count("- nearest, seed") == 6


def test_an_arm_may_read_another_score_of_a_run_or_have_its_own_baseline(folder, capsys):
    more = '[[arms]]\nname = "raw"\nof = "fp32"\nflags = []\nmetric = "raw.frechet"\n[[arms]]\nname = "pair"\nflags = ["--bf16"]\nbaseline = "nearest"\n'
    write(folder, TOML + more)
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    assert len(commands(capsys, folder, "--seeds", "0")) == 4  # reading needs no run
    write(folder, TOML + more, records_of(experiment, shift=(0.0, 0.9, 0.01, 0.0)) + [record(experiment, "pair", s, 2.0) for s in experiment.seeds])
    write(folder, TOML + more, [r for r in map(json.loads, (folder / "001-rounding/results.jsonl").read_text().splitlines()) if r["arm"] != "raw"])
    assert report.main([], folder, document) == 0
    rows = table(document.read_text())
    mean = lambda row: float(row["frechet"].split(" ")[0])
    assert mean(rows["raw"]) == pytest.approx(2 * mean(rows["fp32"]), abs=2e-3) and "of fp32" in rows["raw"]["adds"]
    assert float(rows["pair"]["difference [95 % CI]"].split(" ")[0]) == pytest.approx(2.0 - mean(rows["nearest"]), abs=2e-3)
    assert rows["pair"]["verdict"].endswith("(against nearest)")


FACTORS = TOML.split("[[arms]]")[0] + "ranges = true\nx_label = \"share\"\narms = [" + ",".join(
    f'{{name = "{u}-{e}", flags = ["--lr", "1e-{i + 2}"], cell = {{update = "{u}", ema = "{e}"}}, series = "{u}", x = {1 + (e == "bf16")}}}'
    for i, (u, e) in enumerate([("stochastic", "fp32"), ("stochastic", "bf16"), ("nearest", "fp32"), ("nearest", "bf16")])) + "]"


def test_effects_of_factors_are_ratios_of_cells(folder):
    write(folder, FACTORS.replace('baseline = "fp32"', 'baseline = "stochastic-fp32"'))
    experiment = run.load("1", folder)
    spread = np.random.default_rng(0)
    cells = {"stochastic-fp32": 0.1, "stochastic-bf16": 10.0, "nearest-fp32": 0.3, "nearest-bf16": 15.0}
    trace = [{"t": t, "x_min": -t / 250, "x_max": 4.0, "x_mean": 0.1, **({"prediction_min": -2.0, "prediction_max": 2.0} if t else {})} for t in (1000, 500, 0)]
    records = [record(experiment, name, s, mean * np.exp(0.1 * spread.standard_normal())) for s in experiment.seeds for name, mean in cells.items()]
    for r in records:
        r["scores"]["ema"]["trace"] = trace
    write(folder, FACTORS.replace('baseline = "fp32"', 'baseline = "stochastic-fp32"'), records)
    document = folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0
    logs = {name: np.log10([r["scores"]["ema"]["frechet"] for r in records if r["arm"] == name]) for name in cells}
    s_f, s_b, n_f, n_b = logs.values()
    expected = {"update nearest": (n_f + n_b - s_f - s_b) / 2, "ema bf16": (s_b + n_b - s_f - n_f) / 2, "update x ema": n_b - n_f - s_b + s_f}
    text = document.read_text()
    found = {line.split("|")[1].strip(): [float(c) for c in line.split("|")[2:5]] for line in text.splitlines() if line.startswith(("| update ", "| ema "))}
    assert set(found) == set(expected)
    for name, values in expected.items():
        half = stats.t.ppf(0.975, 5) * values.std(ddof=1) / 6**0.5
        assert found[name] == pytest.approx([10 ** (values.mean() + by) for by in (0, -half, half)], abs=0.006)
    assert "| nearest-bf16 | -4.00 → 0.00 | 4.00 → 4.00 | 0.10 → 0.10 | -2.00 → -2.00 | 2.00 → 2.00 |" in text
    assert {p.name for p in (folder / "001-rounding").glob("*.png")} == {"curves.png", "factorial.png", "series.png", "ranges.png"}
    assert report.factorials(experiment, {k: r for k, r in run.recorded(experiment).items() if k[1] != "nearest-fp32"}) == []  # a missing cell: no effects


def test_noise_of_gradients_and_covered_flops_are_columns_and_a_metric(folder):
    toml = TOML.replace('flags = ["--pure_bf16"]', 'flags = ["--fp8"]').replace("sampler=bf16", "generation=int8") \
        + '[[arms]]\nname = "noise"\nof = "nearest"\nflags = []\nmetric = "gradient_snr.bf16"\nbaseline = "noise"\n'
    write(folder, toml)
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    records = records_of(experiment)
    for r in records:
        r |= {"nearest": {"gradient_snr": {"fp8": 20.0 + r["seed"], "bf16": 40.0}, "flops_share": {"fp8": 0.953}}, "sampler": {"flops_share": {"generation": 0.5}}}.get(r["arm"], {})
    write(folder, toml, [r for r in records if r["arm"] != "noise"])
    assert report.main([], folder, document) == 0
    rows = table(document.read_text())
    assert rows["nearest"]["gradient SNR in FP8, dB"] == f"22.5 ± {np.std(range(6), ddof=1):.1f}" and rows["nearest"]["of the FLOPs"] == "95.3% in FP8"
    assert rows["sampler"]["of the FLOPs"] == "50.0% in int8" and rows["fp32"]["of the FLOPs"] == rows["fp32"]["in bf16, dB"] == "-"
    assert rows["noise"]["frechet"] == "40.000 ± 0.000" and rows["fp32"]["training loss"] != "-"


def test_score_against_bytes_a_parameter(folder):
    toml = TOML.replace("margin = 0.5", "margin = 0.5\nby_bytes = true")
    write(folder, toml)
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    assert report.main([], folder, document) == 0 and not (folder / "001-rounding/bytes.png").exists(), "nothing ran"
    records = [{**r, "bytes_per_parameter": {"fp32": 16.0, "nearest": 8.0, "sampler": 10.14}[r["arm"]]} for r in records_of(experiment)]
    write(folder, toml, records)
    recorded = run.recorded(experiment)
    points = report.by_bytes(experiment, recorded)
    assert [(p[0], p[1], p[5]) for p in points] == [("fp32", 16.0, "baseline"), ("sampler", 10.14, "equal"), ("nearest", 8.0, "worse")]
    values = {a.name: np.array([r["scores"]["ema"]["frechet"] for r in records if r["arm"] == a.name]) for a in experiment.arms}
    for name, _, mean, low, high, _ in points:
        assert mean == pytest.approx(values[name].mean())
        if name == "fp32":
            assert low is high is None
            continue
        half = stats.t.ppf(0.975, 5) * (values[name] - values["fp32"]).std(ddof=1) / 6**0.5
        assert (low, high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    # one seed alone has no interval; a run that diverged no place
    few = {k: r for k, r in recorded.items() if k[2] == 0}
    few[run.key(experiment.arm("nearest"), 0)] = {"arm": "nearest", "seed": 0, "failed": "the loss is nan at step 2"}
    assert [p[2:5] for p in report.by_bytes(experiment, few)] == [(values[a][0], None, None) for a in ("fp32", "sampler")]
    assert report.main([], folder, document) == 0
    assert (folder / "001-rounding/bytes.png").stat().st_size > 5000 and "](experiments/001-rounding/bytes.png)" in document.read_text()


def test_lost_markers_and_missing_scores_are_one_line(folder, capsys):
    experiment, document = run.load("1", folder), folder.parent / "EXPERIMENTS.md"
    write(folder, TOML, records_of(experiment))
    report.main([], folder, document)
    document.write_text(document.read_text().replace("<!-- generated: 001 end -->", ""))
    assert report.main([], folder, document) == 2 and "must each stand there once" in capsys.readouterr().err
    write(folder, TOML.replace("ema.frechet", "ema.fid"), records_of(experiment))
    assert report.main([], folder, document) == 2 and "no score 'ema.fid'" in capsys.readouterr().err


# -- this repository's own log

EXPERIMENTS = [run.load(number) for number in run.folders()]
DOCUMENT = ROOT / "EXPERIMENTS.md"
logged = pytest.mark.skipif(not DOCUMENT.exists(), reason="there is no EXPERIMENTS.md yet")


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.folder.name)
def test_arms_differ_from_their_baseline_in_their_flags_alone(experiment):
    parser = train.build_parser()
    parse = lambda flags: {**train.DEFAULTS, **vars(parser.parse_args(flags))}
    named = lambda arm: {flag.removeprefix("--") for flag in arm.flags if flag.startswith("--")}
    everything = lambda arm: arm.trained.experiment.common + arm.trained.flags + (arm.source.flags if arm.of else [])
    beside = {"average", "weights"}  # what is kept and scored beside the main average: no part of the training
    for arm in experiment.arms:
        base = experiment.arm(arm.baseline)
        mine, other = parse(everything(arm)), parse(everything(base))
        differ = {k for k in mine if mine[k] != other[k]}
        assert differ <= beside | {flag for a in (arm, base) for b in (a, a.trained, a.source) for flag in named(b)}, arm.name
        assert arm is base or differ or arm.metric != base.metric, f"{arm.name} is its baseline again"
    run.recorded(experiment)  # raises when a record's command is not the one of its arm


@logged
def test_the_log_is_what_the_results_give():
    assert report.main(["--check"]) == 0


def test_a_short_arm_of_the_log_gives_its_record_again(capsys):
    e = run.load("17")
    if ("017", "fp32", 0) not in run.recorded(e):
        pytest.skip("experiment 017 is not recorded yet")
    assert run.main(["017", "--check", "--arm", "fp32", "--seeds", "0"]) == 0, capsys.readouterr().out
    assert "fp32, seed 0: same" in capsys.readouterr().out


@logged
def test_every_command_of_the_log_dry_runs(capsys):
    text = DOCUMENT.read_text()
    blocks = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    found = [shlex.split(c, comments=True)[1:] for c in dict.fromkeys(blocks + re.findall(r"`([^`\n]+)`", text)) if c.startswith("python ")]
    known = {tuple(run.command(arm.source, e.seeds[0])): (e, arm.source) for e in EXPERIMENTS for arm in e.arms}
    assert found
    for script, *words in found:
        if script == "experiments/run.py":
            assert run.main([*words, "--dry_run"]) == 0, words
        elif (script, *words) in known:  # generated; those that sample are dry-run with the flags of their training
            e, arm = known[script, *words]
            run.validate([arm], e.seeds[0])
        elif script == "train.py":
            given = vars(train.build_parser().parse_args(words))
            if not given.keys() & {"sample", "check", "diagnose"}:
                assert train.main([*words, "--dry_run"]) == 0, words
        else:
            assert (ROOT / script).exists(), script
        capsys.readouterr()


@logged
def test_figures_in_the_prose_are_those_of_the_tables():
    """Every decimal fraction that the author writes is a figure of the generated parts, rounded to as many places."""
    text = DOCUMENT.read_text()
    parts = re.split(r"<!-- generated: \w+ (?:begin|end) -->", text)
    prose, generated = " ".join(parts[::2]), " ".join(parts[1::2])
    fraction = r"(?<![\w.])\d+\.\d+(?![\w.]*\d)"
    known = [float(x) for x in re.findall(r"\d+\.?\d*(?:e-?\d+)?", generated)]
    unknown = [x for x in dict.fromkeys(re.findall(fraction, prose)) if not any(f"{v:.{len(x.partition('.')[2])}f}" == x for v in known)]
    assert not unknown
