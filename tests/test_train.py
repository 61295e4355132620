"""The command: every task and recipe for a few steps, the run's folder, resume bit for bit, several processes, and what bad input gets."""
import errno
import functools
import hashlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import metrics as metrics_module
import precision
import train
import trainer

ROOT = Path(trainer.__file__).parent
QUICK = "--batch_size 8 --samples 20 --sample_steps 2 --log_every 2 --sample_every 0 --warmup 0".split()
SEGMENT = ["--task", "segment", "--image_size", "16"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # building fused kernels takes longer than these runs; the subprocesses below do use them
    monkeypatch.setattr(precision, "_compiled", lambda kernel: kernel)


def command(*flags):
    """Exit status of train.py with these flags, in this process."""
    try:
        return train.main([str(flag) for flag in flags])
    except SystemExit as ended:
        return ended.code


def quick(*flags, name="run", steps=4):
    return command(*QUICK, "--name", name, "--steps", steps, *flags)


def checkpoint(name="run"):
    return torch.load(f"runs/{name}/checkpoint.pt", weights_only=True)


def metrics(name="run"):
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def summary(name="run"):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


def content(folder):
    """{file: hash} of everything in a folder."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).rglob("*") if p.is_file()}


def one_line(capsys):
    """The only line that a failed command left on stderr."""
    lines = [line for line in capsys.readouterr().err.split("\n") if line and "step/s" not in line]  # but for the progress bar
    assert len(lines) == 1 and lines[0].startswith("train.py: "), lines
    return lines[0]


def assert_same(a, b, where="state"):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            assert_same(*pair, f"{where}[{i}]")
    elif torch.is_tensor(a):
        bits = lambda t: t.detach().contiguous().reshape(-1).view(torch.uint8)
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)), where
    else:
        assert a == b, where


def after_step(monkeypatch, number, act):
    """Let act(trainer) happen when `number` steps are done."""
    original = trainer.Trainer.train_step

    def step(self, measure):
        result = original(self, measure)
        if self.step == number:
            act(self)
        return result

    monkeypatch.setattr(trainer.Trainer, "train_step", step)


def no_training(monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "train_step", lambda *args: pytest.fail("it trained"))


# ---- The run and its folder -----------------------------------------------------------------------------------------

RECIPES = {  # flags: sites as the ledger must show them
    "": {"weights": "fp32", "compute": "fp32", "exp_avg": "fp32", "ema": "fp32"},
    "--bf16": {"weights": "fp32", "compute": "bf16"},
    "--fp16 --batch_size 2 --set generation=fp32": {"weights": "fp32", "compute": "fp16"},  # CPUs emulate fp16: draw without
    "--pure_bf16": {"weights": "bf16", "grads": "bf16", "exp_avg_sq": "bf16", "update": "nearest", "ema": "fp32", "timesteps": "fp32", "sampler": "fp32", "loss": "fp32"},
    "--pure_bf16 --stochastic": {"weights": "bf16", "update": "stochastic"},
    "--pure_bf16 --kahan": {"kahan": "on", "update": "nearest"},
    "--pure_bf16 --kahan --stochastic": {"kahan": "on", "update": "stochastic"},
    "--pure_bf16 --master split": {"weights": "bf16", "master": "split", "exp_avg": "fp32"},
    "--pure_bf16 --master fp32": {"weights": "bf16", "master": "fp32", "exp_avg": "fp32"},
    "--opt8bit": {"exp_avg": "int8", "exp_avg_sq": "int8"},
    "--opt8bit --optimizer bitsandbytes": {"exp_avg": "int8", "exp_avg_sq": "int8"},
    "--pure_bf16 --stochastic --opt4bit": {"exp_avg": "int4", "exp_avg_sq": "int4", "update": "stochastic"},
    "--pure_bf16 --optimizer torchastic": {"weights": "bf16"},
    "--pure_bf16 --optimizer optimi": {"weights": "bf16"},
    "--pure_bf16 --optimizer adamw_bf16": {"weights": "bf16"},
    "--pure_bf16 --stochastic --set islands=norm+embed": {"islands": "norm+embed"},
    "--set ema=bf16": {"ema": "bf16"},
    "--pure_bf16 --accumulate 2 --set accumulate=fp32": {"accumulate": "fp32"},
    "--pure_bf16 --stochastic --weights both --average 0.9:bf16": {"update": "stochastic"},
}


def check_folder(name, generated=True):
    folder = Path("runs", name)
    flags = json.loads((folder / "config.json").read_text())
    assert flags["command"].startswith("train.py ") and flags["flags"].keys() == train.DEFAULTS.keys()
    assert {"torch", "monai", "python", "cpu", "commit"} <= json.loads((folder / "env.json").read_text()).keys()
    rows = metrics(name)
    assert [row["step"] for row in rows] == [2, 4]
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 and row["grad_norm"] > 0 and row["nonfinite_grads"] == 0 for row in rows if "loss_scale" not in row)
    pictures = sorted((folder / "samples").glob("*.png"))
    assert pictures
    for path in pictures:
        pixels = np.asarray(Image.open(path))
        assert pixels.shape[1] >= 8 * 48 and pixels.std() > 10  # a row of eight that a person sees, and not one grey
    state = checkpoint(name)
    assert state["step"] == 4
    found = summary(name)
    assert found["step"] == 4 and found["seconds"] > 0 and found["images_per_second"] > 0 and found["peak_memory"] > 2**20
    for scores in found["scores"].values():
        assert math.isfinite(scores["frechet" if generated else "mean_dice"])
        if generated:
            assert len(scores["loss_by_timestep"]) == 10
    return state, found


@pytest.mark.parametrize("flags", RECIPES)
def test_every_recipe_trains_scores_and_leaves_a_whole_folder(flags, capsys):
    for peer in {"optimi", "adamw_bf16"} & set(flags.split()):
        pytest.importorskip(peer, reason=f"{peer} comes with requirements-bench.txt")
    assert quick(*flags.split()) == 0
    _, found = check_folder("run")
    sites = {row["site"]: row["value"] for row in json.loads(Path("runs/run/ledger.json").read_text())["sites"]}
    assert sites.items() >= RECIPES[flags].items()
    out = capsys.readouterr().out
    assert "bytes a parameter" in out and "real (floor)" in out and "noise (ceiling)" in out and "images a second" in out
    assert found["scores"].keys() == ({"ema", "raw"} if "both" in flags else {"ema"})


@pytest.mark.parametrize("flags", ["--model dit", "--task ddpm", "--task ddpm --model dit", "--task segment --image_size 16",
                                   "--task segment --image_size 16 --pure_bf16 --stochastic", "--model dit --pure_bf16 --stochastic --guidance 2"])
def test_every_task_and_net(flags):
    assert quick(*flags.split(), "--sample_every", 2) == 0
    state, _ = check_folder("run", generated="segment" not in flags)
    assert Path("runs/run/samples/step000002.png").exists()
    start = torch.tensor([t.float().abs().sum() for t in state["precision"]["averages"]["ema"]["shadow"].values()])
    assert start.isfinite().all()


def test_torchao_takes_the_learning_rate(monkeypatch):
    pytest.importorskip("torchao", reason="torchao comes with requirements-bench.txt")
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function or (lambda f: f))
    assert quick("--pure_bf16", "--optimizer", "torchao", "--warmup", 4) == 0
    assert [row["lr"] for row in metrics()] == pytest.approx([5e-4, 1e-3])


def test_curves_survive_a_resume_in_tensorboard(monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with monkeypatch.context() as patch:
        after_step(patch, 4, lambda run: run._asked_to_stop(signal.SIGTERM, None))
        assert quick(steps=8) == 143
    assert quick(steps=8) == 0
    events = EventAccumulator("runs/run")
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6, 8]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in metrics()])
    assert "samples" in events.Tags()["images"]


def test_all_randomness_comes_from_the_seed():
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name) % 1000)  # what the process drew before changes nothing
        assert quick("--pure_bf16", "--stochastic", "--seed", seed, name=name) == 0
    assert_same(checkpoint("a")["precision"], checkpoint("b")["precision"])
    assert metrics("a") == metrics("b") and summary("a")["scores"] == summary("b")["scores"]
    assert metrics("a")[0]["loss"] != metrics("c")[0]["loss"]


def test_accumulated_micro_batches_equal_one_batch():
    assert quick("--accumulate", 2, "--task", "segment", "--image_size", 16, name="two", steps=1) == 0
    assert quick("--batch_size", 16, "--task", "segment", "--image_size", 16, name="one", steps=1) == 0
    # Dice is a mean of the images' own, so that a batch's loss is the mean of its halves'; a norm over a batch would break this
    assert metrics("two")[0]["loss"] == pytest.approx(metrics("one")[0]["loss"], rel=1e-5)
    assert metrics("two")[0]["grad_norm"] == pytest.approx(metrics("one")[0]["grad_norm"], rel=1e-3)


# ---- Resume ---------------------------------------------------------------------------------------------------------

RESUMED = ["", "--bf16", "--fp16 --batch_size 2 --set generation=fp32", "--pure_bf16 --stochastic", "--pure_bf16 --kahan --stochastic", "--pure_bf16 --master split",
           "--pure_bf16 --optimizer torchastic", "--opt8bit --optimizer bitsandbytes --model dit", "--pure_bf16 --stochastic --opt8bit --model dit",
           "--pure_bf16 --stochastic --set ema=bf16 --set ema_update=stochastic "
           "--accumulate 2 --set accumulate=fp32 --average 0.9:bf16:stochastic", "--task ddpm --model dit --pure_bf16 --stochastic",
           "--task segment --image_size 16 --pure_bf16 --master fp32"]


@pytest.mark.parametrize("flags", RESUMED)
def test_an_interrupted_run_equals_an_uninterrupted_one_bit_for_bit(flags, monkeypatch, capsys):
    flags = [*flags.split(), "--log_every", 3, "--checkpoint_every", 4]
    assert quick(*flags, name="whole", steps=8) == 0

    with monkeypatch.context() as patch:  # between two logged steps
        after_step(patch, 5, lambda run: run._asked_to_stop(signal.SIGTERM, None))
        capsys.readouterr()
        assert quick(*flags, name="stopped", steps=8) == 143
    assert "stopped at step 5 of 8" in capsys.readouterr().err and checkpoint("stopped")["step"] == 5
    assert quick(*flags, name="stopped", steps=8) == 0

    def crash(run):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        after_step(patch, 7, crash)
        with pytest.raises(ZeroDivisionError):
            quick(*flags, name="crashed", steps=8)
    assert checkpoint("crashed")["step"] == 4 and metrics("crashed")[-1]["step"] == 6
    with open("runs/crashed/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert quick(*flags, name="crashed", steps=8) == 0

    whole = checkpoint("whole")
    assert [row["step"] for row in metrics("whole")] == [3, 6, 8]
    for name in ("stopped", "crashed"):
        again = checkpoint(name)
        assert_same(again["precision"], whole["precision"])
        assert_same([again["step"], again["interval"], again["since"]], [8, whole["interval"], whole["since"]])
        assert Path(f"runs/{name}/metrics.jsonl").read_text() == Path("runs/whole/metrics.jsonl").read_text()
        assert summary(name)["scores"] == summary("whole")["scores"]
        assert summary(name)["skipped_steps"] == summary("whole")["skipped_steps"]


def test_finished_runs_print_again_score_again_export_and_extend(monkeypatch, capsys):
    assert quick() == 0
    table = capsys.readouterr().out.split("parameters; weights")[1]
    before = content("runs/run")
    with monkeypatch.context() as patch:
        no_training(patch)
        assert quick() == 0
        assert capsys.readouterr().out.split("parameters; weights")[1] == table
        assert content("runs/run") == before
        assert quick("--export", "ema.safetensors") == 0
        assert_same(load_file("ema.safetensors"), checkpoint()["precision"]["averages"]["ema"]["shadow"])
        assert quick("--weights", "raw", "--samples", 30) == 0
        assert summary()["scores"].keys() == {"raw"}
    assert quick(steps=6) == 0
    assert quick(steps=6, name="straight") == 0
    assert summary()["step"] == 6 and [row["step"] for row in metrics()] == [2, 4, 6]
    assert_same(checkpoint()["precision"], checkpoint("straight")["precision"])


def test_an_extension_that_dies_before_its_scores_is_not_taken_for_finished(monkeypatch):
    assert quick() == 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_finish", lambda self: (_ for _ in ()).throw(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            quick(steps=6)
    assert quick(steps=6) == 0
    assert summary()["step"] == 6


def process(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.parametrize("number,status,flags", [(signal.SIGTERM, 143, ["--pure_bf16", "--stochastic"]), (signal.SIGINT, 130, ["--workers", 1])])
def test_a_signal_ends_a_real_process_with_a_checkpoint(number, status, flags):
    child = process(ROOT / "train.py", *QUICK, "--name", "run", "--steps", 100000, *flags, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline and not (Path("runs/run/metrics.jsonl").exists() and len(metrics()) > 1):
            time.sleep(0.05)
        os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)  # Ctrl-C reaches the workers too
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == status, err
    last = err.rstrip("\n").split("\n")[-1]
    assert re.search(r"stopped at step \d+ of 100000; the same command resumes", last) and "Traceback" not in err
    done = checkpoint()["step"]
    assert done > 2 and quick(*flags, steps=done + 2) == 0
    assert summary()["step"] == done + 2 and metrics()[-1]["step"] == done + 2


def test_ctrl_c_outside_of_the_loop_is_one_line(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.datasets, "load", interrupted)
    assert quick() == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes from the last checkpoint\n"


def test_signals_are_the_callers_again_after_training():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert quick(steps=1) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# ---- Folders and checkpoints that don't fit -------------------------------------------------------------------------

class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def plant_truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def plant_pickle(path):
    path.write_bytes(pickle.dumps(Payload(), protocol=2))


def plant_zipped_pickle(path):
    torch.save({"format": 1, "step": Payload()}, path)


def plant_tensor(path):
    torch.save(torch.zeros(3), path)


def plant_little(path):
    torch.save({"format": 1}, path)


@pytest.mark.parametrize("plant", [plant_truncated, plant_pickle, plant_zipped_pickle, plant_tensor, plant_little])
def test_a_file_that_is_no_checkpoint_is_refused_and_never_run(plant, capsys):
    assert quick() == 0
    plant(Path("runs/run/checkpoint.pt"))
    before = content("runs")
    capsys.readouterr()
    assert quick(steps=6) == 2
    assert "no checkpoint of this program" in one_line(capsys)
    assert command("--sample", "runs/run") == 2
    assert "no checkpoint of this program" in one_line(capsys)
    assert content("runs") == before and not Path("executed").exists()


@pytest.mark.parametrize("flags,said", [(["--lr", 1e-4], "--lr was 0.001 and is 0.0001"), (["--pure_bf16"], "--pure_bf16 was False and is True"),
                                        (["--model", "dit"], "--model was unet and is dit"), (["--set", "ema=bf16"], "--set was [] and is ['ema=bf16']")])
def test_a_folder_of_other_flags_is_refused(flags, said, capsys):
    assert quick() == 0
    before = content("runs")
    capsys.readouterr()
    assert quick(*flags, steps=6) == 2
    line = one_line(capsys)
    assert said in line and "--name" in line
    assert content("runs") == before


def test_a_folder_from_before_a_flag_existed_goes_on(capsys):
    assert quick() == 0
    path = Path("runs/run/config.json")
    old = json.loads(path.read_text())
    del old["flags"]["growth_interval"]
    path.write_text(json.dumps(old))
    capsys.readouterr()
    assert quick("--growth_interval", "7", steps=6) == 2 and "--growth_interval was 2000 and is 7" in one_line(capsys)
    assert quick(steps=6) == 0 and json.loads(Path("runs/run/summary.json").read_text())["step"] == 6


def test_a_checkpoint_of_another_model_is_refused(capsys):
    assert quick() == 0 and quick("--model", "dit", name="dit") == 0 and quick("--pure_bf16", name="pure") == 0
    for other in ("dit", "pure"):
        os.replace(f"runs/{other}/checkpoint.pt", "runs/run/checkpoint.pt")
        before = content("runs")
        capsys.readouterr()
        assert quick(steps=6) == 2
        assert "another model or recipe" in one_line(capsys)
        assert content("runs") == before


@pytest.mark.parametrize("kind", ["files", "a file", "broken config"])
def test_a_folder_of_something_else_is_refused(kind, capsys):
    Path("runs").mkdir()
    if kind == "a file":
        Path("runs/run").write_text("mine")
    else:
        Path("runs/run").mkdir()
        Path("runs/run", "config.json" if kind == "broken config" else "thesis.tex").write_text("mine")
    assert quick() == 2
    assert "--name" in one_line(capsys)
    assert len(content("runs")) == 1


def test_no_space_for_a_checkpoint(monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda run: patch.setattr(os, "fsync", full))
        assert quick("--checkpoint_every", 2) == 2
    assert "no space left" in one_line(capsys)
    assert checkpoint()["step"] == 2 and not list(Path("runs").rglob("*.part"))
    assert quick("--checkpoint_every", 2) == 0 and summary()["step"] == 4


def test_no_space_for_a_line_of_metrics(monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.Trainer, "_log", full)
    assert quick() == 2
    assert "no space left" in one_line(capsys)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_good_checkpoint(capsys):
    assert quick("--lr", 1e30, "--log_every", 50, "--checkpoint_every", 1, steps=60) == 2
    line = one_line(capsys)
    assert re.search(r"the loss is (nan|inf) at step \d+", line) and "--lr" in line
    assert all(t.isfinite().all() for t in checkpoint()["precision"]["model"].values())


# ---- Bad input ------------------------------------------------------------------------------------------------------

def picture(path, size=16, value=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(path.name)).integers(0, 255, (size, size), dtype=np.uint8) if value is None else np.full((size, size), value, np.uint8)
    Image.fromarray(pixels).save(path)


def plant_inputs():
    """Everything that BAD_INPUT names."""
    Path("empty").mkdir()
    for name in "abc":
        picture(Path("unreadable", f"{name}.png"))
        picture(Path("three", f"{name}.png"))
        picture(Path("masked/images", f"{name}.png"))
        picture(Path("masked/masks", f"{name}.png"), value=1)
    Path("unreadable/b.png").write_bytes(b"not an image")
    Path("masked/masks/b.png").unlink()
    files = {"unknown.yaml": "stepz: 3", "type.yaml": "steps: many", "list.yaml": "- steps", "bad.yaml": "steps: [3", "flag.yaml": "pure_bf16: 1",
             "value.yaml": "set: {ema: bf17}", "nested.yaml": "lr: {a: 1}", "binary.yaml": "\0\1"}
    for name, text in files.items():
        Path(name).write_text(text)


BAD_INPUT = {
    "--data folder:nowhere": "nowhere",
    "--data nowhere": "unknown data set",
    "--data folder:empty": "holds no images",
    "--data folder:unreadable --image_size 8": "b.png",
    "--task segment --data folder:masked": "b.png",
    "--task segment --data digits": "no masks",
    "--data medmnist:nowhere.npz": "nowhere.npz",
    "--data nifti:nowhere": "nowhere",
    "--data cifar10:nowhere": "nowhere",
    "--set emma=bf16": "unknown site 'emma'",
    "--set ema=bf17": "'bf17' is no value of ema",
    "--set ema": "no value of ema",
    "--average 0.9": "DECAY:DTYPE",
    "--config unknown.yaml": "unknown key 'stepz'",
    "--config type.yaml": "'many' is not a whole number",
    "--config list.yaml": "flag: value",
    "--config bad.yaml": "not YAML",
    "--config binary.yaml": "not YAML",
    "--config flag.yaml": "true or false",
    "--config value.yaml": "'bf17' is no value of ema",
    "--config nested.yaml": "not a number",
    "--config nowhere.yaml": "nowhere.yaml",
    "--config empty": "empty",
    "--bf16 --pure_bf16": "exclude each other",
    "--stochastic": "add --pure_bf16",
    "--kahan": "add --pure_bf16",
    "--master split": "add --pure_bf16",
    "--pure_bf16 --kahan --master split": "drop one",
    "--opt8bit --opt4bit": "exclude each other",
    "--opt8bit --optimizer torchao": "drop --optimizer torchao",
    "--optimizer bitsandbytes": "add --opt8bit",
    "--set compute=tf32": "can't run on cpu",
    "--device cuda": "no CUDA device",
    "--optimizer adamx": "unknown; choose from",
    "--optimizer torchastic": "add --pure_bf16",
    "--task segment --model dit": "no model 'dit'",
    "--size huge": "unknown size",
    "--image_size 9": "9",
    "--image_size 4": "too small",
    "--stepz 3": "unrecognized arguments",
    "--step 3": "unrecognized arguments",  # no abbreviations: a new flag would change their meaning
    "--steps many": "'many' is not a whole number",
    "--steps 0": "above 0",
    "--lr nan": "above 0",
    "--lr -1": "--lr",
    "--ema_decay 1": "below 1",
    "--label_dropout 2": "from 0 to 1",
    "--sample_steps 1001": "from 1 to 1000",
    "--task paint": "invalid choice",
    "--sample nowhere": "no checkpoint at nowhere",
    "--sample empty": "no checkpoint at empty",
    "--sample=": "no checkpoint",
    "--check --dry_run": "not allowed with",
    "--samples 1": "above 1",
    "--export nowhere/ema.safetensors": "no folder nowhere",
    "--data folder:three --image_size 8": "add images",
    "--pure_bf16 --model dit --set islands=norm": "islands",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2_and_leaves_nothing(flags, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plant_inputs()
    before = content(".")
    assert command("--steps", 2, "--batch_size", 2, *flags.split()) == 2
    line = one_line(capsys)
    assert BAD_INPUT[flags] in line
    assert content(".") == before and not Path("runs").exists()


@pytest.mark.parametrize("flags,said", [(["--batch_size", 9], "use a multiple of 2"), (["--pure_bf16", "--optimizer", "torchastic"], "--optimizer torchastic")])
def test_what_several_processes_cannot_do(flags, said, capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert quick(*flags) == 2
    assert said in one_line(capsys) and not Path("runs").exists()


def test_a_real_process_says_one_line_too():
    child = process(ROOT / "train.py", "--data", "folder:nowhere")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 2 and out == "" and err.count("\n") == 1 and err.startswith("train.py: ")


# ---- Flags ----------------------------------------------------------------------------------------------------------

def test_a_yaml_file_equals_the_flags_and_the_command_line_wins(capsys):
    Path("run.yaml").write_text("steps: 7\nlr: 1e-4\npure_bf16: true\nstochastic: true\nfp16: false\nmodel: dit\ndata:\nset: {ema: bf16, islands: embed}\naverage: [0.9:bf16]\n")
    assert command("--config", "run.yaml", "--dry_run") == 0
    from_file = capsys.readouterr().out
    flags = "--steps 7 --lr 1e-4 --pure_bf16 --stochastic --model dit --set ema=bf16 --set islands=embed --average 0.9:bf16".split()
    assert command(*flags, "--dry_run") == 0
    assert capsys.readouterr().out == from_file and "--lr 0.0001\n" in from_file
    assert command("--config", "run.yaml", "--steps", 9, "--set", "ema=fp32", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "--steps 9\n" in out and "--set ['ema=fp32']\n" in out and "--model dit\n" in out
    Path("kahan.yaml").write_text("pure_bf16: true\nset: {kahan: on}\n")  # a YAML parser reads: true
    assert command("--config", "kahan.yaml", "--dry_run") == 0
    assert re.search(r"^kahan +on ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("flags", ["", "--task ddpm --model dit --size XL/2 --image_size 64 --pure_bf16 --master split", "--fp16", "--opt8bit",
                                   "--task segment --pure_bf16 --stochastic", "--pure_bf16 --optimizer torchastic", "--fp8 --model dit"])
def test_dry_run_prints_flags_and_ledger_and_writes_nothing(flags, capsys, monkeypatch, tmp_path):
    no_training(monkeypatch)
    assert command("--dry_run", *flags.split()) == 0
    out = capsys.readouterr().out
    for flag in train.DEFAULTS:
        assert re.search(rf"^--{flag}\b", out, re.M), flag
    for site in precision.SITES:
        assert re.search(rf"^{site} ", out, re.M), site
    assert not list(tmp_path.iterdir())


def test_check_prints_the_matrix(capsys, tmp_path):
    assert not command("--check")
    out = capsys.readouterr().out
    for word in ("cpu", "--bf16", "--fp16", "--fp8", "--opt8bit", "tf32", "start with: python train.py"):
        assert word in out
    assert not list(tmp_path.iterdir())


def test_help_names_every_flag(capsys):
    assert command("--help") == 0
    out = capsys.readouterr().out
    for flag in [*train.DEFAULTS, "config", "dry_run", "check", "sample"]:
        assert re.search(rf"^  --{flag}\b", out, re.M), flag


def test_every_flag_is_read(monkeypatch):
    """A flag that nothing reads would parse and do nothing."""
    read = set()

    class Recorded(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def __reduce__(self):  # into the checkpoint as what it is
            return dict, (dict(self),)

    assert quick(name="teacher", steps=1) == 0
    original = trainer.Trainer.__init__
    monkeypatch.setattr(trainer.Trainer, "__init__", lambda self, config, *args, **options: original(self, Recorded(config), *args, **options))
    assert quick(name="a", steps=2) == 0 and quick("--task", "ddpm", name="b", steps=1) == 0
    assert quick("--task", "reflow", "--teacher", "runs/teacher", "--pairs", 8, name="c", steps=1) == 0
    assert read == train.DEFAULTS.keys()


def test_names_of_folders():
    name = lambda **flags: train.run_name({**train.DEFAULTS, **flags})
    train.build_parser()
    assert name() == "default"
    assert name(pure_bf16=True, stochastic=True) == "pure_bf16-stochastic"
    assert name(lr=1e-4, model="dit", set=["ema=bf16", "islands=norm+embed"]) == "dit-lr0.0001-ema_bf16-islands_norm+embed"
    assert name(device="cpu", threads=2, runs="elsewhere", name="x", log_every=1) == "default"
    assert "/" not in name(data="folder:/a/../b", size="XL/2") and len(name(data="folder:" + "x" * 999)) <= 200


def test_the_folder_is_named_after_the_flags():
    assert command(*QUICK, "--steps", 1, "--kahan", "--pure_bf16") == 0
    assert os.listdir("runs") == ["steps1-batch_size8-warmup0-pure_bf16-kahan-sample_steps2-samples20"]


# ---- Drawing again --------------------------------------------------------------------------------------------------

def draw(monkeypatch, *flags):
    found = []
    with monkeypatch.context() as patch:
        no_training(patch)
        original = train.score_table
        patch.setattr(train, "score_table", lambda scores, reference: found.append(scores) or original(scores, reference))
        assert command("--sample", *flags) == 0
    return json.loads(json.dumps(found[0]))


def test_sample_draws_what_the_run_drew_and_only_its_settings_change_it(monkeypatch, capsys):
    assert quick("--pure_bf16", "--stochastic", "--weights", "both", "--lr", 1e-2, "--ema_decay", 0.5) == 0
    trained, weights = summary()["scores"], content("runs")
    assert draw(monkeypatch, "runs/run") == trained
    assert draw(monkeypatch, "runs/run/checkpoint.pt") == trained
    assert Image.open("runs/run/samples/step000004-ema.png").size == Image.open("runs/run/samples/ema.png").size
    assert draw(monkeypatch, "runs/run", "--weights", "raw") == {"raw": trained["raw"]}
    for flags in (["--sample_steps", 5], ["--set", "sampler=bf16"], ["--set", "generation=fp32"], ["--set", "generation=autocast"], ["--guidance", 3],
                  ["--samples", 30], ["--set", "timesteps=bf16"], ["--seed", 1]):
        scores = draw(monkeypatch, "runs/run", "--weights", "ema", *flags)
        assert math.isfinite(scores["ema"]["frechet"]) and scores["ema"] != trained["ema"], flags
    assert len(draw(monkeypatch, "runs/run", "--sample_steps", 5)["ema"]["trace"]) == 6
    assert content("runs").items() >= weights.items()  # nothing of the run was written over
    assert len(list(Path("runs/run/samples").glob("step000004-*.png"))) >= 9


@pytest.mark.parametrize("flags,said", [(["--lr", "1"], "--lr can't differ"), (["--model", "dit"], "--model can't differ"),
                                        (["--set", "ema=bf16"], "another model or recipe"), (["--set", "emma=bf16"], "unknown site")])
def test_sample_refuses_what_was_fixed_by_training(flags, said, capsys):
    assert quick() == 0
    before = content("runs")
    capsys.readouterr()
    assert command("--sample", "runs/run", *flags) == 2
    assert said in one_line(capsys) and content("runs") == before


@pytest.mark.parametrize("flags", [[], ["--pure_bf16", "--stochastic", "--set", "ema=bf16"]])
def test_export_is_the_average(flags, monkeypatch):
    assert quick(*flags, "--export", "ema.safetensors") == 0
    average = checkpoint()["precision"]["averages"]["ema"]["shadow"]
    assert_same(load_file("ema.safetensors"), average)
    draw(monkeypatch, "runs/run", "--export", "again.safetensors")
    assert_same(load_file("again.safetensors"), average)


def test_other_data_and_labels_of_none(monkeypatch):
    monkeypatch.setattr(metrics_module, "cached_feature_net", functools.partial(metrics_module.cached_feature_net, steps=20))  # a quick one
    for i in range(40):
        picture(Path("mine", f"{i}{'x' * i}.png"))
    assert quick("--data", "folder:mine", "--image_size", 8, "--samples", 8) == 0
    scores = summary()["scores"]["ema"]
    assert math.isfinite(scores["frechet"]) and math.isfinite(summary()["reference"]["floor"]["frechet"])
    assert draw(monkeypatch, "runs/run")["ema"] == scores


# ---- Several processes ----------------------------------------------------------------------------------------------

def torchrun(*flags, status=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # the same kernels as in this process
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(ROOT / "train.py"), *QUICK, *map(str, flags)],
                          capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode == 0) == (status == 0), done.stderr[-3000:]
    return done


def difference(a, b):
    """|a - b| over |b| of the trained weights of two runs, as one vector."""
    a, b = (torch.cat([t.double().flatten() for t in checkpoint(name)["precision"]["model"].values()]) for name in (a, b))
    return float((a - b).norm() / b.norm())


def test_two_processes_train_what_one_does_and_resume():
    done = torchrun("--name", "two", "--steps", 3, "--checkpoint_every", 2)
    assert done.stdout.count("real (floor)") == 1  # one rank speaks
    torchrun("--name", "two", "--steps", 6, "--checkpoint_every", 2)
    assert quick("--checkpoint_every", 2, name="one", steps=6) == 0
    assert quick(name="less", steps=5) == 0
    assert difference("two", "one") < 1e-4 < difference("less", "one")
    assert [row["step"] for row in metrics("two")] == [2, 3, 4, 6]
    for mine, other in zip([row for row in metrics("two") if row["step"] == 6], metrics("one")[-1:]):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4) and mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert summary("two")["scores"]["ema"]["frechet"] == pytest.approx(summary("one")["scores"]["ema"]["frechet"], rel=1e-2)


def test_two_processes_in_pure_bf16_with_accumulation_and_a_bf16_reduction():
    flags = ["--pure_bf16", "--stochastic", "--accumulate", 2, "--set", "accumulate=fp32", "--set", "reduce=bf16"]
    torchrun("--name", "two", "--steps", 4, *flags)
    assert quick(*flags[:-2], name="one") == 0 and quick(*flags[:-2], name="less", steps=3) == 0
    assert difference("two", "one") < difference("less", "one")
    assert metrics("two")[-1]["loss"] == pytest.approx(metrics("one")[-1]["loss"], rel=0.01)
    assert metrics("two")[-1]["grad_norm"] == pytest.approx(metrics("one")[-1]["grad_norm"], rel=0.05)


@pytest.mark.parametrize("flags", [(), ("--pure_bf16",)], ids=str)
def test_reversed_velocity_trains_the_mirror_image(flags):
    """The last layer starts at zero and takes the sign; every other weight takes the same steps, bit for bit (experiment 004)."""
    for velocity in ("clean-noise", "noise-clean"):
        assert quick("--velocity", velocity, "--lr", "1e-2", *flags, name=velocity) == 0
    one, other = (checkpoint(name)["precision"]["model"] for name in ("clean-noise", "noise-clean"))
    last = [key for key in one if not torch.equal(one[key], other[key])]
    assert last == ["out.2.conv.weight", "out.2.conv.bias"] and all(torch.equal(one[key], -other[key]) for key in last)


def test_a_reader_that_ends_early_is_no_error(tmp_path):
    """`train.py --dry_run | head -1`: the pipe breaks at the next line, and that is all."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--dry_run"], stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
