"""experiments/run.py: what is run, what is recorded."""

import contextlib
import errno
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import rank_server
from lab import FAKE, SECOND, TOML, Typed, commands, draw_quickly, fails, record, records_of, second, write
from rank_server import ask, ranks_messages

from experiments import report, run
from experiments.log import definition
from experiments.log import records as log
from harness import run_folder
from lowprec.errors import Refused
from lowprec.optimizers.build import OPTIMIZERS

ranks = rank_server.ranks


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The experiments folder, which holds 001-rounding. run.main changes the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "environment", lambda device: {**run_folder.environment(device), "clean": True})
    write(tmp_path / "experiments", TOML)
    return tmp_path / "experiments"


# ---- What is run -------------------------------------------------------------------------------------------


def names_in(lines):
    """The names of the runs in printed commands."""
    return [re.search(r"--name (\S+)", line)[1] for line in lines]


def test_the_commands_are_those_a_person_types(folder, capsys):
    common = "python train.py --steps 4 --batch_size 8 --samples 64 --sample_steps 2 --log_every 2"
    common += " --sample_every 0"
    sample, sampler = "python train.py --sample runs/experiments/001-fp32", "--set sampler=bf16 --threads 1"
    assert commands(capsys, folder, "--seeds", "0-1") == [
        f"{common} --seed 0 --threads 1 --name 001-fp32-seed0 --runs runs/experiments",
        f"{common} --pure_bf16 --seed 0 --threads 1 --name 001-nearest-seed0 --runs runs/experiments",
        f"{sample}-seed0 {sampler} --name 001-sampler-seed0",
        f"{common} --seed 1 --threads 1 --name 001-fp32-seed1 --runs runs/experiments",
        f"{common} --pure_bf16 --seed 1 --threads 1 --name 001-nearest-seed1 --runs runs/experiments",
        f"{sample}-seed1 {sampler} --name 001-sampler-seed1",
    ]


def test_what_is_recorded_is_skipped(folder, capsys):
    experiment = definition.load_experiment("1", folder)
    records = [record(experiment, name, 0, 1.0) for name in ("fp32", "nearest")]
    records.append(record(experiment, "nearest", 1, 1.0, failed="the loss is nan"))
    write(folder, TOML, records)

    def names(*words):
        return names_in(commands(capsys, folder, *words))

    assert names("--arm", "fp32", "nearest", "--seeds", "0", "1") == ["001-fp32-seed1"]
    twice = ("--arm", "fp32", "--arm", "nearest", "--seeds", "0", "--seeds", "1")
    assert names(*twice) == ["001-fp32-seed1"]
    assert names("--arm", "nearest", "--seeds", "1", "--retry") == ["001-nearest-seed1"]
    # the run that an arm samples from is needed again when its folder is gone, and not when it is there
    assert names("--arm", "sampler", "--seeds", "0") == ["001-fp32-seed0", "001-sampler-seed0"]
    kept = folder.parent / "runs/001-fp32-seed0/summary.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    runs = str(folder.parent / "runs")
    assert names("--arm", "sampler", "--seeds", "0", "--runs", runs) == ["001-sampler-seed0"]


ENVIRONMENT = {"cpu": "c", "gpu": None, "bf16": [], "torch": "2", "python": "3"}
ENVIRONMENT |= {"commit": "d" * 40, "clean": True}  # of the machine that samples; FAKE has that of trainings


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A train.py that does nothing, quickly; validation still asks the real one."""
    monkeypatch.setenv("WAIT", "")  # whatever the fork server was started with
    monkeypatch.setenv("PYTHONPATH", str(definition.ROOT))
    monkeypatch.setattr(run, "PRELOADED_MODULES", ["experiments.run"])  # no libraries of a real train.py
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "environment", lambda device: ENVIRONMENT)
    monkeypatch.setattr(log, "environment", lambda device: ENVIRONMENT)


@pytest.fixture
def quick(fake, monkeypatch):
    """The same, started by itself: it needs none of the libraries that the fork server imports."""
    monkeypatch.setattr(run, "fork_server", lambda: SimpleNamespace(Process=Typed))


AFTER_NEAREST = """
[[arms]]
name = "student"
after = "nearest"
flags = ["--finetune", "{after}"]
[[arms]]
name = "drawn"
of = "student"
flags = ["--set", "sampler=bf16"]
"""


def test_no_link_of_a_chain_starts_after_one_that_failed(folder, quick, capsys):
    write(folder, TOML + AFTER_NEAREST)
    assert run.main(["001", "--seeds", "1", "--arm", "drawn", "fp32", "--jobs", "2"], folder) == 0
    known = log.recorded(definition.load_experiment("1", folder))
    why = {arm: record.get("failed") for (_, arm, _), record in known.items()}
    assert why["fp32"] is None and "the loss is nan" in why["nearest"]
    assert "the run of nearest that it needs failed" in why["student"]
    assert "the run of student that it needs failed" in why["drawn"]
    assert not (folder.parent / "runs/experiments/001-student-seed1").exists()


def test_records_hold_scores_and_failures(folder, quick, capsys):
    words = ["001", "--seeds", "0", "1", "--jobs", "3", "--arm", "sampler", "nearest", "fp32"]
    assert run.main(words, folder) == 0
    assert "nearest, seed 1 failed: the loss is nan at step 2" in capsys.readouterr().err
    path = folder / "001-rounding/results.jsonl"
    experiment = definition.load_experiment("1", folder)
    records = {key[1:]: record for key, record in log.recorded(experiment).items()}
    assert set(records) == {(a, s) for a in ("fp32", "nearest", "sampler") for s in (0, 1)}
    fp32, sampled, failed = records["fp32", 0], records["sampler", 1], records["nearest", 1]
    assert fp32["scores"]["ema"]["frechet"] == 2.0
    assert [step["t"] for step in fp32["scores"]["ema"]["trace"]] == list(range(100, -1, -10))
    assert fp32["seconds"] == 5.0 and fp32["commit"] == "b" * 40
    assert fp32["final_loss"] == pytest.approx(np.mean([1 / s for s in range(91, 101)]))
    assert len(fp32["curves"]["step"]) <= 30 and fp32["curves"]["step"][-1] == 100
    assert log.figure_of_record(fp32, "gradient_snr.fp8") == 20.0
    assert "flops_share" not in fp32 and sampled["flops_share"] == {"generation": 0.9}
    assert sampled["of"] == "fp32" and sampled["seconds"] == 0
    # where it was sampled, beside where its training ran
    assert sampled["commit"] == "d" * 40 and sampled["env"]["cpu"] == "c"
    assert sampled["trained_on"] == {"cpu": "c", "gpu": None, "commit": "b" * 40}
    assert "trained_on" not in fp32
    assert sampled["scores"] == {"ema": {"frechet": 3.0}}
    assert failed["failed"] == "the loss is nan at step 2; runs/experiments/001-nearest-seed1 is kept"
    assert failed["exit"] == 2 and "scores" not in failed
    before = path.read_text()
    assert run.main(["001", "--seeds", "0", "1"], folder) == 0  # a failure is a result: not repeated
    assert path.read_text() == before
    check = ["001", "--check", "--seeds", "1", "--arm"]
    assert run.main([*check, "nearest"], folder) == 0  # it fails again, as recorded
    path.write_text(before.replace('"frechet": 3.0', '"frechet": 3.0001'))
    assert run.main([*check, "sampler"], folder) == 1 and "sampler, seed 1: FAILED" in capsys.readouterr().out
    # a training repeated for an arm that samples from it, its folder being gone, is recorded once
    shutil.rmtree(folder.parent / "runs")
    path.write_text("".join(line for line in before.splitlines(keepends=True) if '"of"' not in line))
    capsys.readouterr()
    assert run.main(["001", "--seeds", "0", "1"], folder) == 0
    assert sorted(path.read_text().splitlines()) == sorted(before.splitlines())
    done, total = re.findall(r"(\d+)/(\d+) \[", capsys.readouterr().err)[-1]
    assert done == total  # the bar counts a training that is repeated once


def test_a_run_beside_records_of_another_kind_of_cpu_is_refused(folder, quick, capsys):
    experiment = definition.load_experiment("1", folder)
    records = [record(experiment, "fp32", seed, 1.0) for seed in experiment.seeds]
    records[1]["env"] = {**records[1]["env"], "cpu": "another"}
    write(folder, TOML, records)
    assert run.main(["001", "--arm", "nearest", "--seeds", "0"], folder) == 0
    said = fails(capsys, folder, "001", "--arm", "nearest", "--seeds", "0-2")
    assert "001-nearest-seed1 would be paired with 001-fp32-seed1, which was recorded on another" in said
    assert "this is c" in said and "--mixed" in said
    second(folder)  # also where the partner is another experiment's
    words = ["002", "--arm", "student", "--seeds", "1"]
    assert run.main(words, folder) == 2 and "001-fp32-seed1" in capsys.readouterr().err
    assert run.main(["001", "--arm", "nearest", "--seeds", "2", "--mixed"], folder) == 0
    held = [(r["arm"], r["seed"]) for r in log.read_records(folder / "001-rounding/results.jsonl")]
    assert held.count(("nearest", 0)) == held.count(("nearest", 2)) == 1 and ("nearest", 1) not in held
    assert run.main(["001", "--arm", "fp32", "--seeds", "1"], folder) == 0, "what is recorded is no new run"


def test_interrupted_runs_are_told_to_stop_and_nothing_is_recorded(folder, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("WAIT", "1")
    # a background shell starts its children with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = tmp_path / "runs/experiments/001-fp32-seed0/started"

    def interrupt():
        while not started.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run.main(["001", "--arm", "fp32", "--seeds", "0", "--jobs", "1"], folder) == 130
    assert started.with_name("stopped").exists()
    assert not (folder / "001-rounding/results.jsonl").read_text()


def wait_for(path, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return path.exists()


def test_a_drawing_has_the_defaults_of_its_training():
    run.dry_sample(["--clip_tensor", "1"])  # which takes the place of the default of --clip_grad
    assert run.flags_of_words(["--optimizer", "lion"])["lr"] == OPTIMIZERS["lion"].flags["lr"]


def test_a_killed_run_py_leaves_no_run_behind(folder, tmp_path, ranks):
    """Its runs see that it is gone and stop as on SIGTERM: with a checkpoint."""
    (tmp_path / "train.py").write_text(FAKE)
    (number,) = ranks.start(1, "waiting_experiment", str(tmp_path), str(folder))
    started = tmp_path / "runs/experiments/001-fp32-seed0/started"
    assert wait_for(started), ranks_messages(ranks)
    os.kill(number, signal.SIGKILL)
    assert wait_for(started.with_name("stopped"), seconds=20)


ALONE = """
import os, pathlib
pathlib.Path('rank' + os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])
if os.environ['RANK'] != '0':
    raise SystemExit
"""


def test_an_arm_of_several_processes_is_started_by_torchrun(folder, fake, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(folder, TOML.replace("flags = []", "flags = []\nprocesses = 2", 1))
    (line,) = commands(capsys, folder, "--seeds", "0", "--arm", "fp32")
    torchrun = "python -m torch.distributed.run --standalone --nproc_per_node 2 "
    assert line.startswith(f"{torchrun}train.py --steps 4 ")
    (tmp_path / "train.py").write_text(ALONE + (tmp_path / "train.py").read_text())
    assert run.main(["001", "--seeds", "0", "--arm", "fp32"], folder) == 0, capsys.readouterr().err
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    (record,) = log.recorded(definition.load_experiment("1", folder)).values()
    assert record["command"] == line and record["scores"]["ema"]["frechet"] == 2.0


@contextlib.contextmanager
def at_work(log_file):
    """A run whose messages go to this file, all the time."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()

    def work():
        with open(log_file, "w") as messages:
            while not ended.wait(0.001):
                print("training: 1 of 4 steps", file=messages, flush=True)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert wait_for(log_file)
        yield
    finally:
        ended.set()
        thread.join()


def test_a_run_that_another_process_has_is_not_recorded_as_failed(
    folder, fake, tmp_path, capsys, monkeypatch
):
    """Another run.py has it, or it has outlived its own while it writes its last checkpoint."""

    def taken(*args):
        raise BlockingIOError(errno.EAGAIN, "taken")

    with monkeypatch.context() as patch, pytest.raises(Refused) as refused:
        patch.setattr(run_folder.fcntl, "lockf", taken)
        run_folder.Folder(tmp_path / "taken").lock()
    said, whole = str(refused.value), (tmp_path / "train.py").read_text()
    text = f"import sys\nprint('train.py: ' + {said!r}, file=sys.stderr)\nsys.exit(2)\n"
    (tmp_path / "train.py").write_text(text)
    words = ["001", "--seeds", "0", "--arm", "fp32", "--jobs", "1"]
    with at_work(tmp_path / "runs/experiments/001-fp32-seed0.log"):
        assert run.main(words, folder) == 1
    assert f"fp32, seed 0: {said}; run this again" in capsys.readouterr().err
    assert log.recorded(definition.load_experiment("1", folder)) == {}
    (tmp_path / "train.py").write_text(whole)
    assert run.main(words, folder) == 0
    assert len(log.recorded(definition.load_experiment("1", folder))) == 1


class Fork:
    """In place of a process of run.py's fork server: one of the tests' server."""

    def __init__(self, target, args):
        (_, *self.words), self.log, _, _ = args

    def start(self):
        self.number = ask("run", self.words, {}, self.log)
        self.sentinel = os.pidfd_open(self.number)

    def join(self):
        self.exitcode = ask("wait", self.number)


def test_a_tiny_experiment_runs_and_checks(folder, capsys, monkeypatch):
    monkeypatch.setattr(run, "fork_server", lambda: SimpleNamespace(Process=Fork))
    words = ["001", "--arm", "sampler", "--seeds", "0", "--runs", str(folder.parent / "runs")]
    assert run.main(words, folder) == 0
    path = folder / "001-rounding/results.jsonl"
    trained, sampled = log.read_records(path)
    assert trained["command"].endswith("--runs runs/experiments")
    assert str(folder.parent) not in path.read_text()
    ema = trained["scores"]["ema"]
    assert trained["curves"]["step"] == [2, 4]
    assert len(ema["loss_by_timestep"]) == 2 and ema["trace"][-1]["t"] == 0
    assert sampled["scores"]["ema"]["frechet"] != ema["frechet"]
    check = ["001", "--check", "--note", "--arm", "fp32", "--seeds", "0"]
    assert run.main(check, folder) == 0
    assert "passed: all scores equal to the last bit" in capsys.readouterr().out
    (noted,) = log.noted_checks(definition.load_experiment("1", folder))
    assert noted["same"] and (noted["arm"], noted["seed"]) == ("fp32", 0)
    draw_quickly(monkeypatch)
    assert report.main(["--runs", str(folder.parent / "runs")], folder, folder.parent / "EXPERIMENTS.md") == 0
    page = (folder / "001-rounding/README.md").read_text()
    assert "Run again: fp32, seed 0, on" in page and "passed: all scores equal to the last bit." in page
    drawn = {p.name for p in (folder / "001-rounding").glob("*.png")}
    assert drawn == {"samples.png", "loss_by_timestep.png", "curves.png"}
    one = definition.load_experiment("1", folder)
    known = log.recorded(one)
    assert report.picture_strips(one, known, folder.parent / "runs")
    monkeypatch.setattr(report, "writes_text", lambda arm: True)  # its pictures are no rows of images
    assert report.picture_strips(one, known, folder.parent / "runs") == []


def test_check_is_exact_on_the_same_machine(folder):
    experiment = definition.load_experiment("1", folder)
    arm, records = experiment.arm("fp32"), records_of(experiment)
    old = records[0]

    def again(by, **env):
        frechet = old["scores"]["ema"]["frechet"] + by
        return record(experiment, "fp32", 0, frechet, env={**old["env"], **env})

    def verdict(new):
        return log.compare_records(arm, old, new)[0]

    assert verdict(again(0.0)) and verdict(again(1e-12)) is False
    assert verdict(again(1e-12, cpu="other")) is None, "a run alone says nothing there"
    assert not verdict({**again(0.0), "failed": "the loss is nan"})
    newer, gone = again(0.0), again(0.0)
    newer["scores"]["ema"]["trace"] = [{"t": 0}]  # a score that is new since
    assert verdict(newer)
    del gone["scores"]["ema"]["label_accuracy"]
    same, said = log.compare_records(arm, old, gone)
    assert not same and "1 of 5 scores differ, the first ema.label_accuracy" in said


def test_check_on_another_machine_compares_the_gap_of_a_pair(folder, quick, capsys):
    assert run.main(["001", "--arm", "fp32", "sampler", "--seeds", "0"], folder) == 0
    path = folder / "001-rounding/results.jsonl"
    before = path.read_text().replace('"cpu": "c"', '"cpu": "another"')
    path.write_text(before.replace('"frechet": 2.0', '"frechet": 2.1').replace("3.0", "3.2"))
    check = ["001", "--check", "--note", "--seeds", "0"]
    assert run.main(check, folder) == 0  # of the baseline, which takes an arm beside it
    said = capsys.readouterr().out
    assert "sampler, seed 0: passed: ema.frechet against fp32 +1.1 recorded, +1 now" in said
    path.write_text(before.replace("3.0", "4.1"))  # the gap was 2.1, and the margin is 0.5
    assert run.main(check, folder) == 1 and "sampler, seed 0: FAILED" in capsys.readouterr().out
    path.write_text(before.replace('"frechet": 2.0', '"frechet": 2.1').splitlines(True)[0])
    assert run.main(check, folder) == 1, "there is nothing to compare with"
    assert "fp32, seed 0: NOT COMPARED" in capsys.readouterr().out


def test_two_cpus_of_one_name_are_two_kinds_where_one_multiplies_bf16():
    for bf16, kind in (([], "c, no bf16"), (["x", "y"], "c, x")):
        assert run.machine_of({"env": {"cpu": "c @ 2 GHz", "bf16": bf16}}) == kind


# ---- What experiments share --------------------------------------------------------------------------------


def test_an_arm_reads_samples_or_starts_from_another_experiments_run(folder, quick, capsys):
    experiment = second(folder)
    assert [a.source.name for a in experiment.arms] == ["fp32", "fp32", "sampler", "sampler", "student"]
    assert {a.trained.experiment.number for a in experiment.arms[:4]} == {"001"}
    assert experiment.arm("student").start is experiment.arm("fp32").trained

    def planned(*words):
        assert run.main(["002", "--seeds", "0", "--dry_run", *words], folder) == 0
        return capsys.readouterr().out.splitlines()

    all_of_it = ["001-fp32-seed0", "002-sampler-seed0", "002-student-seed0"]
    assert names_in(planned()) == all_of_it
    assert names_in(planned("--arm", "student")) == ["001-fp32-seed0", "002-student-seed0"]
    assert run.main(["002", "--seeds", "0", "--jobs", "3"], folder) == 0
    own, other = (log.read_records(folder / name / "results.jsonl") for name in ("002-more", "001-rounding"))
    assert sorted(r["arm"] for r in own) == ["sampler", "student"] and [r["arm"] for r in other] == ["fp32"]
    record = log.recorded(experiment)["002", "student", 0]
    assert "--finetune runs/experiments/001-fp32-seed0 " in record["command"]
    capsys.readouterr()
    assert names_in(planned()) == all_of_it  # though all is recorded
    # what an arm starts from is trained again when its folder is gone, and what is recorded is not
    shutil.rmtree(folder.parent / "runs")
    (folder / "002-more/results.jsonl").write_text("")
    assert names_in(planned()) == all_of_it


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('after = "fp32"', 'after = "sampler"', "trains nothing itself"),
        ("seeds = [0,", "seeds = [7, 0,", "has no seed 7"),
    ],
)
def test_a_wrong_reference_is_one_line(folder, capsys, old, new, said):
    assert old in SECOND
    with pytest.raises(Refused, match=re.escape(said)):
        second(folder, SECOND.replace(old, new, 1))
    assert said in fails(capsys, folder, "002")
