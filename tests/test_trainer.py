"""The loop: learning rates, places that move, the end of a run, randomness of several ranks."""

import contextlib
import json
import os
import re
import signal
import time
import types
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import torch
from cli import (
    after_step,
    assert_same,
    checkpoint,
    command,
    content,
    finished,
    metrics,
    no_training,
    one_line,
    quick,
    summary,
)

import strategies
import train
import trainer
from harness import printing, progress
from harness.advice import smaller_run
from lowprec import precision
from lowprec.parts.part import Part
from tasks import diffusion, task

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

# ---- Profiling ---------------------------------------------------------------------------------------------


def test_a_profile_traces_the_steps_asked_for_and_changes_no_number(capfd):
    classify = ["--task", "classify"]
    assert quick(*classify, name="plain", steps=9) == 0
    for name, steps in (("traced", 2), ("ended", 50)):  # the second ends while it is traced
        assert quick(*classify, "--profile", steps, name=name, steps=9) == 0
        assert_same(checkpoint(name)["precision"], checkpoint("plain")["precision"])
        said = capfd.readouterr().err
        assert "aten::" in said and f"the trace is in runs/{name}/profile.json" in said
    events = json.loads(Path("runs/traced/profile.json").read_text())["traceEvents"]
    losses = [event for event in events if event.get("name") == "aten::cross_entropy_loss"]
    assert len(losses) == 2, "one a step"
    assert not Path("runs/plain/profile.json").exists()


def test_a_run_too_short_for_a_trace_says_so(capfd):
    assert quick("--profile", 2, steps=3) == 0 and not Path("runs/run/profile.json").exists()
    assert "--profile: the run ended before step 6, where a trace begins" in capfd.readouterr().err


# ---- Learning rate and weight decay ------------------------------------------------------------------------


def test_a_scheduled_run_resumes_exactly_and_ends_where_it_was_to_end(monkeypatch, capsys):
    flags = ["--lr_schedule", "cosine", "--weight_decay", 0.1, "--log_every", 1]
    flags += ["--pure_bf16", "--stochastic", "--finish", "split:50"]
    assert quick(*flags, name="whole", steps=8) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 5, lambda run: run.stop.ask(signal.SIGTERM))
        assert quick(*flags, name="stopped", steps=8) == 143
    before = content("runs/stopped")
    capsys.readouterr()
    assert quick(*flags, name="stopped", steps=12) == 2
    line = one_line(capsys)
    assert "--steps was 8 and is 12" in line and "--lr_schedule cosine ends at --steps" in line
    assert "--finish split:50 is a percentage of --steps" in line
    assert content("runs/stopped") == before
    assert quick(*flags, name="stopped", steps=8) == 0
    assert_same(checkpoint("stopped")["precision"], checkpoint("whole")["precision"])
    rates = [row["lr"] for row in metrics("whole")]
    assert rates[0] == 1e-3 and rates == sorted(rates, reverse=True) and rates[-1] < 5e-5


def test_groups_keep_learning_rates_of_their_own(monkeypatch):
    def groups(self, net):
        params = list(net.parameters())
        return [{"params": params[:4], "lr": 1e-2}, {"params": params[4:]}]

    monkeypatch.setattr(task.Task, "groups", groups)
    for steps, factor in ((1, 0.25), (2, 0.5), (5, 1)):
        assert quick("--warmup", 4, steps=steps) == 0
        rates = [group["lr"] for group in checkpoint()["precision"]["optimizer"]["param_groups"]]
        assert rates == pytest.approx([1e-2 * factor, 1e-3 * factor])


def test_weight_decay_shrinks_matrices_alone_unless_told_otherwise():
    for name, *flags in (
        ("none",),
        ("matrices", "--weight_decay", 10),
        ("all", "--weight_decay", 10, "--weight_decay_on", "all"),
    ):
        assert quick(*flags, name=name, steps=1) == 0
    none, matrices, every = (checkpoint(name)["precision"]["model"] for name in ("none", "matrices", "all"))
    norm = "middle_block.resnet_1.norm1.weight"
    kernel = "middle_block.resnet_1.conv1.conv.weight"
    assert torch.equal(none[norm], matrices[norm]) and not torch.equal(none[norm], every[norm])
    assert torch.equal(matrices[kernel], every[kernel]) and not torch.equal(none[kernel], matrices[kernel])


# ---- Flags of a machine, and of places ---------------------------------------------------------------------


def test_compile_is_no_part_of_a_run(capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda net, **options: compiled.append(net) or net)
    finished()
    assert quick("--compile", steps=6) == 0 and compiled  # switched on at a resume
    assert summary()["step"] == 6
    assert train.FLAGS.name(train.FLAGS.typed({"compile": True})) == "default"


def test_finetuning_from_a_run_older_than_a_flag():
    finished()
    state = checkpoint()
    for flag in ("velocity", "sparse24", "sparse24_decay", "finetune", "lr_schedule", "weight_decay_on"):
        del state["config"][flag]
    torch.save(state, "runs/run/checkpoint.pt")
    assert quick("--finetune", "runs/run", name="new", steps=1) == 0
    assert command("--sample", "runs/run", "--sparse24", "magnitude") == 0


# ---- What a run prints first -------------------------------------------------------------------------------


def head_of(capsys, *flags):
    assert quick(*flags, steps=1) == 0
    return capsys.readouterr().out.partition("\nscore")[0]


def test_an_fp32_run_prints_what_it_trains_and_no_table(capsys):
    said = head_of(capsys).splitlines()
    assert said[0].startswith("digits (labels)") and said[1].startswith("unet, ") and said[1].endswith("cpu")
    assert said[2] == "precision: fp32 everywhere" and "16.00 bytes a parameter" in said[3]
    assert said[4] == "writes to runs/run" and all(line.startswith("warning: ") for line in said[5:] if line)


def test_a_run_prints_the_sites_that_differ_from_fp32_and_with_ledger_all(capsys):
    flags = ["--pure_bf16", "--stochastic", "--set", "islands=norm"]
    said = head_of(capsys, *flags)
    assert "precision: --pure_bf16 --stochastic --set islands=norm\n" in said
    sites = [line.split()[0] for line in said.splitlines() if line and line[0].islower()]
    assert {"weights", "grads", "update", "exp_avg", "islands"} <= set(sites)
    assert not {"ema", "loss", "timesteps", "buffers", "master"} & set(sites)
    whole = head_of(capsys, *flags, "--ledger")
    assert all(f"\n{site} " in whole for site in ("weights", "ema", "loss", "timesteps", "master"))
    assert "ledger" not in json.loads(Path("runs/run/config.json").read_text())["flags"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, ""),
        ({"pure_bf16": True, "opt8bit": True, "kahan": True}, "no record of this recipe"),
        ({"pure_bf16": True, "stochastic": True}, "6 pairs (000)"),
        ({"pure_bf16": True, "stochastic": True, "lr": 1e-9}, "lr 3e-05, not 1e-09"),
    ],
)
def test_a_run_prints_what_its_recipe_was_measured_to_cost(flags, said):
    config = SimpleNamespace(**{**strategies.flag_table().defaults(), **flags})
    line = printing.known_cost(config, parameters=164_689)
    assert said in line and bool(line) == bool(flags)


# ---- The noise of rounding ---------------------------------------------------------------------------------


def test_another_noise_seed_changes_what_rounding_does_and_nothing_else():
    stochastic = {"pure_bf16": True, "stochastic": True}
    trained = {}
    for name, flags in {
        "as before": stochastic,
        "the same": {**stochastic, "noise_seed": 3},
        "other": {**stochastic, "noise_seed": 4},
        "fp32": {},
        "fp32 other": {"noise_seed": 4},
    }.items():
        flags = {**train.DEFAULTS, "batch_size": 8, "warmup": 0, "seed": 3, **flags}
        run = trainer.Trainer(strategies.settle(flags))
        run.ready()
        loss, _ = run.train_step(False)
        trained[name] = loss, run.precision.model.state_dict()
    assert_same(trained["as before"], trained["the same"])
    assert_same(trained["fp32"], trained["fp32 other"])
    assert_same(trained["as before"][0], trained["other"][0])  # the first step: one net, one batch
    with pytest.raises(AssertionError):
        assert_same(trained["as before"], trained["other"])


# ---- The end of a run --------------------------------------------------------------------------------------


class Figures(Part):
    """A part whose last figures take what memory there is."""

    seen = []

    def finish(self, run, loss):
        assert json.loads(Path("runs/run/summary.json").read_text())["scores"]  # all else is safe
        self.seen.append(loss(run).item())
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_last_figures_that_do_not_fit_into_memory_cost_only_themselves(monkeypatch, capsys):
    wanted = types.SimpleNamespace(wanted=lambda run: True, load=lambda: Figures)
    monkeypatch.setattr(precision, "PARTS", (wanted,))
    assert quick("--export", "ema.safetensors") == 0
    assert summary()["scores"] and Path("ema.safetensors").exists()
    assert "no memory left for the last figures" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        no_training(patch)
        assert quick() == 0  # it is finished


def test_the_loss_that_gradients_are_compared_on_is_one_ranks_share(monkeypatch):
    run = trainer.Trainer(strategies.settle({**train.DEFAULTS, "batch_size": 8}))
    run.train, sizes = run.data.train, []
    monkeypatch.setattr(run.task, "loss", lambda model, batch, rng, step: sizes.append(len(batch[0])))
    for run.ranks.world in (1, 4):
        run.fixed_loss(None)
    assert sizes == [8, 2]


def test_peak_memory_is_that_of_training(monkeypatch):
    """Scoring can need more, and says nothing of what training needs."""
    order = []
    monkeypatch.setattr(trainer, "start_peak_memory", lambda device: order.append("start"))
    monkeypatch.setattr(trainer, "peak_memory", lambda device: order.append("read") or 5 << 20)
    original = trainer.Trainer.score
    monkeypatch.setattr(trainer.Trainer, "score", lambda self: order.append("score") or original(self))
    assert quick() == 0
    assert order[0] == "start" and set(order[1:-1]) == {"read"} and order[-1] == "score"
    assert summary()["peak_memory"] == 5 << 20
    monkeypatch.setattr(trainer, "peak_memory", lambda device: 7 << 20)
    assert quick("--samples", 30) == 0  # scored again, nothing trained
    assert summary()["peak_memory"] == 5 << 20


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_good_checkpoint(capsys):
    assert quick("--lr", 1e30, "--log_every", 50, "--checkpoint_every", 1, steps=60) == 2
    line = one_line(capsys)
    assert re.search(r"the loss is (nan|inf) at step \d+", line) and "--lr" in line
    assert all(t.isfinite().all() for t in checkpoint()["precision"]["model"].values())


def test_the_noise_of_an_image_does_not_depend_on_how_many_are_drawn_at_once(monkeypatch):
    """Images of 10x10 pixels: torch's generator goes on elsewhere after a count that is no multiple of 16."""
    assert quick("--model", "dit", "--image_size", 10, steps=1) == 0
    normal = task.Rng.normal
    lies = []
    monkeypatch.setattr(
        task.Rng, "normal", lambda self, n, *s, **on: lies.append((n, on)) or normal(self, n, *s, **on)
    )
    monkeypatch.setattr(diffusion.Generation, "sample", lambda self, model, labels, noise, *rest: noise)
    for name, few in (("few", 3), ("all", 250)):
        assert command("--sample", "runs/run", "--sample_batch", few, "--name", name, "--weights", "raw") == 0
    few, whole = (Path(f"runs/run/samples/{name}-raw.png") for name in ("few", "all"))
    assert few.read_bytes() == whole.read_bytes()
    # a GPU holds that of the images drawn at once, not of all
    assert [on for n, on in lies if n == 20] == [{"device": "cpu"}] * 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
@pytest.mark.parametrize("end", ["finished", "stopped", "crashed"])
def test_files_are_closed_however_a_run_ends(end, monkeypatch):
    def act(run):
        if end == "stopped":
            run.stop.ask(signal.SIGTERM)
        if end == "crashed":
            raise ZeroDivisionError

    after_step(monkeypatch, 3, act)
    with pytest.raises(ZeroDivisionError) if end == "crashed" else contextlib.nullcontext():
        quick()
    opened = [place for place in Path("/proc/self/fd").iterdir() if place.is_symlink()]
    assert metrics() and not [place for place in opened if "metrics.jsonl" in os.readlink(place)]


def test_the_bar_tells_of_compiling_and_counts_from_the_second_step(capsys):
    with progress.Progress("run", 0, 3, hidden=False, compiles=True, smaller="") as shown:
        assert "compiling the optimiser step, once" in capsys.readouterr().err
        before = time.time()
        shown.step()
        assert shown.bar.initial == 1 and shown.bar.start_t >= before
        assert "compiling" not in capsys.readouterr().err.splitlines()[-1]


# ---- Randomness of several ranks ---------------------------------------------------------------------------


def test_ranks_drop_out_differently_and_round_alike(monkeypatch):
    """Dropout is each rank's own. Peers that round by the global generator must write the same on every
    rank.
    """
    drawn = {}
    monkeypatch.setattr(trainer, "Rng", lambda seed, *of_ranks: task.Rng(seed))
    for rank in (0, 1):
        run = trainer.Trainer(strategies.settle({**train.DEFAULTS, "batch_size": 8, "log_every": 1}))
        run.ranks.rank = rank
        run.batches = iter([run.data.train[list(range(8))]])
        loss, step = run.task.loss, run.precision.step
        found = drawn[rank] = []
        monkeypatch.setattr(
            run.task, "loss", lambda *a, loss=loss, found=found: found.append(torch.rand(4)) or loss(*a)
        )
        monkeypatch.setattr(
            run.precision,
            "step",
            lambda step=step, found=found, **k: found.append(torch.rand(4)) or step(**k),
        )
        run.train_step(measure=False)
    (dropout0, rounding0), (dropout1, rounding1) = drawn[0], drawn[1]
    assert not torch.equal(dropout0, dropout1) and torch.equal(rounding0, rounding1)


def advised(fp8=None, kind="cpu", params=(), **config):
    config = SimpleNamespace(**{**train.DEFAULTS, **config})
    recipe = SimpleNamespace(fp8=fp8)
    return train.advice_lines(config, recipe, torch.device(kind), 0, params)


def test_eager_fp8_on_a_gpu_is_slow_and_that_is_said():
    assert "--compile" in advised(object(), "cuda")[0]
    assert advised(object(), "cuda", compile=True) == advised(None, "cuda") == advised(object()) == []


def test_matrices_of_zeros_grow_late_by_adafactor_and_that_is_said():
    matrix, vector = torch.zeros(3, 3), torch.zeros(3)
    [said] = advised(optimizer="adafactor", params=[matrix, matrix, vector])
    assert "2 matrices start at zero" in said
    assert advised(optimizer="adafactor", params=[matrix + 1, vector]) == []
    assert advised(optimizer="adafactor", params=[matrix], least_rms=0.05) == []


def test_an_average_that_does_not_arrive_is_said():
    [said] = advised(steps=500)
    assert "500 steps" in said and "61% of the initial weights" in said and "--ema_warmup" in said
    assert advised(steps=500, ema_warmup=True) == advised(steps=500, ema_decay=0.99) == advised() == []


def test_a_run_of_hours_is_said_once_with_flags_that_make_it_shorter(capsys):
    smaller = smaller_run(SimpleNamespace(size="small", batch_size=64), 64)
    assert smaller == "try --image_size 32 --size tiny --batch_size 16"
    for steps in (9, 10**10):
        with progress.Progress("run", 0, steps, hidden=False, compiles=True, smaller=smaller) as bar:
            for _ in range(3):
                time.sleep(1e-3)
                bar.step()
        assert capsys.readouterr().err.count(f"hours: {smaller}") == (steps > 9)


def test_distances_by_which_noise_is_nearer_than_real_images_are_left_out():
    scores = {"ema": {"frechet": 22.4, "kid": 0.85, "pixel_mean": 0.1}}
    reference = {"floor": {"frechet": 54.1, "kid": 0.1}, "ceiling": {"frechet": 25.8, "kid": 3.7}}
    text = printing.score_table(scores, reference, (), ("frechet", "kid"))
    assert "left out: frechet: " in text and "54.1" not in text and "kid         0.8500" in text


def test_rates_survive_a_checkpoint_written_during_the_warm_up():
    """Checkpoints from before groups had rates of their own hold the last step's rate alone."""
    run = trainer.Trainer(strategies.settle({**train.DEFAULTS, "warmup": 8}))
    state = run.precision.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group.pop("initial_lr", None)
        group["lr"] = 1e-5
    run.load_state_dict({"precision": state, "step": 3, "seconds": 0.0, "interval": 0, "since": 0.0})
    run._set_rates(trainer.lr_factor(run.config, run.step))
    assert [group["lr"] for group in run.precision.optimizer.param_groups] == [1e-3 * 4 / 8]
