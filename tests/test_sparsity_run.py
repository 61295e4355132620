"""2:4 sparsity by commands: train with the mask, prune a finished run, train what is left, draw, resume."""

import json
import math
import shutil
import signal
from pathlib import Path

import cli
import pytest
import torch
from cli import (
    after_step,
    assert_same,
    checkpoint,
    command,
    content,
    draw,
    metrics,
    no_training,
    one_line,
    quick,
    summary,
)
from safetensors.torch import load_file
from test_sparsity import is_two_of_four

import trainer

BF16 = torch.bfloat16
in_a_folder_of_its_own = cli.in_a_folder_of_its_own
LAYERS = ("qkv.weight", "proj.weight", "mlp.0.weight", "mlp.2.weight")


def sparse_weights(tensors):
    return [t for name, t in tensors.items() if name.endswith(LAYERS)]


def test_train_with_autocast_prune_and_draw(monkeypatch, capsys):
    assert quick("--model", "dit", "--bf16", "--lr", 1e-2, "--ema_decay", 0.5) == 0
    before = content("runs")
    dense = summary()["scores"]["ema"]
    capsys.readouterr()
    pruned = draw(monkeypatch, "runs/run", "--sparse24", "magnitude", "--export", "pruned.safetensors")["ema"]
    assert "sparse kernels can't run here" in capsys.readouterr().out
    assert math.isfinite(pruned["frechet"]) and pruned != dense
    assert draw(monkeypatch, "runs/run", "--set", "sparse24=magnitude")["ema"] == pruned
    exact = draw(monkeypatch, "runs/run", "--sparse24", "magnitude", "--set", "generation=fp32")["ema"]
    assert exact != pruned
    assert draw(monkeypatch, "runs/run", "--sparse24", "none")["ema"] == dense
    average = checkpoint()["precision"]["averages"]["ema"]["shadow"]
    exported = load_file("pruned.safetensors")
    assert len(sparse_weights(exported)) == 16 and all(map(is_two_of_four, sparse_weights(exported)))
    for name, t in average.items():
        kept = exported[name] != 0
        assert torch.equal(exported[name][kept], t[kept])
    record = json.loads(Path("runs/run/samples/step000004-sparse24_magnitude.json").read_text())
    assert any(row["site"] == "sparse24" and row["layers"] for row in record["ledger"]["sites"])
    assert content("runs").items() >= before.items()


PURE = ["--model", "dit", "--pure_bf16", "--stochastic"]


def test_train_in_pure_bf16_prune_finetune_and_draw(monkeypatch):
    assert quick(*PURE, name="dense") == 0
    export = ("--export", "pruned.safetensors")
    pruned = draw(monkeypatch, "runs/dense", "--sparse24", "magnitude", *export)["ema"]
    started, original = [], trainer.Trainer.fit

    def fit(run):
        started.append({k: v.clone() for k, v in run.precision.weights("ema").items()})
        return original(run)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "fit", fit)
        assert quick(*PURE, "--finetune", "runs/dense", "--sparse24", "magnitude", name="tuned") == 0
    expected = load_file("pruned.safetensors")
    # the average of a new run starts from its weights: bf16 images of the fp32 average
    for name, t in started[0].items():
        assert torch.equal(t, expected[name].to(BF16).float())
    state = checkpoint("tuned")["precision"]
    masks = state["sparse24"]["masks"].values()
    assert len(masks) == 16 and all(mask.dtype == torch.bool for mask in masks)
    average = state["averages"]["ema"]["shadow"]
    assert all(map(is_two_of_four, [*sparse_weights(state["model"]), *sparse_weights(average)]))
    tuned = summary("tuned")["scores"]["ema"]
    assert tuned != pruned and draw(monkeypatch, "runs/tuned")["ema"] == tuned


@pytest.mark.parametrize(
    "source, flags",
    [
        ("--optimizer torch --lr 1e-2 --ema_decay 0.5", "--pure_bf16 --kahan"),
        ("--pure_bf16 --stochastic --set ema=bf16", "--opt8bit --bf16"),
    ],
)
def test_finetuning_starts_from_the_average_in_any_recipe(source, flags, monkeypatch):
    assert quick(*source.split(), name="source", steps=2) == 0
    average = checkpoint("source")["precision"]["averages"]["ema"]["shadow"]
    seen = []

    def fit(run):
        seen.append(run.precision.weights("raw"))
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "fit", fit)
    assert quick(*flags.split(), "--finetune", "runs/source/checkpoint.pt", name="tuned") == 130
    for name, t in seen[0].items():
        if "kahan" in flags:
            torch.testing.assert_close(t, average[name].float(), rtol=2**-16, atol=1e-30)
        else:
            assert torch.equal(t, average[name].float())


def test_an_interrupted_sparse_run_equals_an_uninterrupted_one_bit_for_bit(monkeypatch):
    assert quick("--model", "dit", "--runs", ".", name="source", steps=1) == 0
    flags = "--model dit --pure_bf16 --master split --finetune source --sparse24 magnitude --log_every 3"
    assert quick(*flags.split(), name="whole", steps=4) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 2, lambda run: run.stop.ask(signal.SIGTERM))
        assert quick(*flags.split(), name="stopped", steps=4) == 143
    shutil.rmtree("source")  # a run that has its own checkpoint needs no other
    assert quick(*flags.split(), name="stopped", steps=4) == 0
    assert_same(checkpoint("stopped")["precision"], checkpoint("whole")["precision"])
    assert metrics("stopped") == metrics("whole")
    assert summary("stopped")["scores"] == summary("whole")["scores"]


def test_an_srste_run_takes_its_decay_and_is_drawn_as_it_was_trained(monkeypatch):
    assert quick("--model", "dit", "--sparse24", "srste", name="a") == 0
    assert quick("--model", "dit", "--sparse24", "srste", "--sparse24_decay", 0.01, name="b", steps=2) == 0
    trained = summary("a")["scores"]
    assert metrics("a")[0]["grad_norm"] != metrics("b")[0]["grad_norm"]
    # pruned by their own magnitudes all the same
    assert draw(monkeypatch, "runs/a", "--sparse24", "magnitude") == trained
    assert quick("--model", "dit", "--finetune", "runs/a", "--sparse24", "magnitude", name="c", steps=1) == 0


REFUSED = {
    "--sparse24 magnitude": "add --finetune RUN",
    "--model dit --set sparse24=magnitude": "add --finetune RUN",
    "--sparse24 srste --task segment --image_size 16": "no Linear layer inside its blocks",
    "--sparse24_decay 0.1": "belongs to --sparse24 srste",
    "--finetune runs/dit": "was trained with --model dit, and this run has --model unet",
    "--finetune runs/dit --model dit --size S": "--size tiny, and this run has --size S",
    "--finetune runs/dit --model dit --size tiny/4": "--size",
    "--finetune runs/dit --model dit --task ddpm": "--task rflow",
    "--finetune runs/dit --model dit --velocity noise-clean": "--velocity clean-noise",
    "--finetune runs/srste --model dit": "add --sparse24 magnitude or srste",
    "--finetune runs/srste/checkpoint.pt --model dit --name dit": "holds a run with other flags",
    "--sample runs/dit --sparse24 srste": "--sample takes --sparse24 magnitude",
    "--sample runs/dit --set sparse24=srste": "--sample takes --sparse24 magnitude",
    "--sample runs/dit --finetune runs/srste": "--finetune can't differ",
    "--sample runs/dit --sparse24_decay 0.1": "--sparse24_decay can't differ",
    "--sample runs/dit --set ema=bf16": "another model or recipe",
}


def test_what_makes_no_sense_is_refused_in_one_line_and_nothing_is_written(capsys, monkeypatch):
    assert quick("--model", "dit", name="dit", steps=1) == 0
    assert quick("--model", "dit", "--sparse24", "srste", name="srste", steps=1) == 0
    no_training(monkeypatch)
    before = content(".")
    for flags, said in REFUSED.items():
        capsys.readouterr()
        assert command(*flags.split()) == 2, flags
        assert said in one_line(capsys), flags
        assert content(".") == before, flags
