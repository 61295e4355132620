"""Validation during training: looks, the best weights, patience, epochs, and resume in the middle of it."""

import copy
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import torch
from cli import SEGMENT, after_step, assert_same, checkpoint, command, metrics, quick, summary

import trainer
from harness.checkpoints import read as read_checkpoint
from harness.validation import Validation, steps_an_epoch
from tasks import segment

LOOK = [*SEGMENT, "--lr", 1e-2, "--ema_decay", 0, "--validate_every", 2]


def scripted(monkeypatch, scores):
    """Let the looks of a segmentation find these IoUs, one after the other."""
    left = list(scores)
    monkeypatch.setattr(
        segment.Segment, "validate", lambda self, model, rng: {"mean_iou": left.pop(0), "loss": 1.0}
    )


# ---- The watched score -------------------------------------------------------------------------------------


def test_the_best_is_the_lowest_or_the_highest_and_never_nan():
    for better, order in (("lower", [3.0, 5.0, 2.0, 2.0, float("nan")]), ("higher", [3.0, 1.0, 4.0, 4.0])):
        seen = Validation(("x", better), every=1, patience=2)
        taken = [seen.take({"x": value}, step) for step, value in enumerate(order)]
        assert taken[:4] == [True, False, True, False] and not any(taken[4:])
        assert (seen.best, seen.step) == (order[2], 2) and seen.exhausted == (len(order) == 5)
    first = Validation(("x", "lower"), 1, 0)
    assert not first.take({"x": float("nan")}, 1) and first.best is None and not first.exhausted
    with pytest.raises(ValueError, match="lower or higher"):
        Validation(("x", "smaller"), 1, 0)


def test_an_epoch_shows_every_item_once():
    config = SimpleNamespace(batch_size=8, accumulate=2)
    assert [steps_an_epoch(config, count) for count in (1, 16, 17, 160)] == [1, 1, 2, 10]


# ---- In a run ----------------------------------------------------------------------------------------------


def test_held_out_scores_are_those_of_the_final_evaluation_and_change_no_bit_of_the_training():
    assert quick(*LOOK, steps=4) == 0
    rows = [row for row in metrics() if "heldout_mean_iou" in row]
    assert [row["step"] for row in rows] == [2, 4] and rows[0]["heldout_loss"] > rows[1]["heldout_loss"]
    scores = summary()["scores"]["ema"]
    assert [rows[-1][f"heldout_{name}"] for name in ("mean_iou", "mean_dice")] == [
        scores[name] for name in ("mean_iou", "mean_dice")
    ]
    assert quick(*LOOK[:-2], name="blind", steps=4) == 0
    assert_same(checkpoint()["precision"], checkpoint("blind")["precision"])
    assert "validation" not in summary("blind") and not Path("runs/blind/best.pt").exists()


def test_a_run_that_is_too_short_for_a_look_says_so(capsys):
    assert quick(*LOOK[:-1], 9, "--early_stop", 3, steps=2) == 0
    said = capsys.readouterr().out
    assert "--early_stop never looks at held-out data: the first look is after 9 steps" in said
    assert "so there is no best.pt" in said and not Path("runs/run/best.pt").exists()


def test_a_task_without_a_measure_of_its_own_watches_the_held_out_loss():
    assert quick("--task", "ddpm", "--validate_every", 2) == 0
    assert [row["step"] for row in metrics() if row.get("heldout_loss", 0) > 0] == [2, 4]
    assert summary()["validation"]["watched"] == "loss"


def test_the_best_weights_are_kept_and_can_be_scored(monkeypatch, capsys):
    scripted(monkeypatch, [0.1, 0.5, 0.3])
    kept = []
    after_step(monkeypatch, 4, lambda run: kept.append(copy.deepcopy(run.precision.weights("raw"))))
    assert quick(*LOOK, steps=6) == 0
    assert summary()["validation"] == {"watched": "mean_iou", "best": 0.5, "step": 4, "stopped": False}
    best = read_checkpoint("runs/run/best.pt")
    assert best["step"] == 4 and checkpoint()["step"] == 6
    assert all(torch.equal(best["precision"]["model"][name], value) for name, value in kept[0].items())
    assert "best held-out mean_iou 0.5000 at step 4, kept as runs/run/best.pt" in capsys.readouterr().out
    assert command("--sample", "runs/run/best.pt") == 0


def test_training_ends_when_patience_does_and_the_same_command_does_nothing_more(monkeypatch, capsys):
    scripted(monkeypatch, [0.1, 0.5, 0.4, 0.5, 0.9])
    flags = [*LOOK, "--early_stop", 2]
    assert quick(*flags, steps=40) == 0
    assert checkpoint()["step"] == 8 and summary()["validation"]["stopped"]
    assert "stopped early: best held-out mean_iou 0.5000 at step 4" in capsys.readouterr().out
    monkeypatch.setattr(trainer.Trainer, "train_step", lambda *args: pytest.fail("it trained"))
    assert quick(*flags, steps=40) == 0


def test_a_resumed_run_has_waited_as_long_and_kept_the_same_best(monkeypatch):
    flags, scores = [*LOOK, "--early_stop", 3], [0.1, 0.5, 0.4, 0.3, 0.2]
    scripted(monkeypatch, scores)
    assert quick(*flags, name="whole", steps=40) == 0
    scripted(monkeypatch, scores)
    with monkeypatch.context() as patch:
        after_step(patch, 7, lambda run: run.stop.ask(2))
        assert quick(*flags, name="stopped", steps=40) == 130
    assert quick(*flags, name="stopped", steps=40) == 0
    assert_same(checkpoint("stopped")["precision"], checkpoint("whole")["precision"])
    assert summary("stopped")["validation"] == summary("whole")["validation"]
    best = [read_checkpoint(f"runs/{name}/best.pt") for name in ("stopped", "whole")]
    assert_same(best[0]["precision"], best[1]["precision"])


def test_epochs_say_the_steps_and_when_to_look():
    assert command(*cli.LOOP, *SEGMENT, "--name", "run", "--epochs", 2, "--batch_size", 64) == 0
    assert checkpoint()["step"] == 8  # 256 images
    assert [row["step"] for row in metrics() if "heldout_mean_iou" in row] == [4, 8]
    assert command(*cli.LOOP, *SEGMENT, "--name", "run", "--epochs", 3, "--batch_size", 64) == 0
    assert checkpoint()["step"] == 12


# ---- Presets -----------------------------------------------------------------------------------------------

CONFIGS = sorted((cli.ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_preset_resolves(path, capsys):
    # drawing 512x512 discs takes seconds
    assert command("--config", path, "--image_size", 32, "--dry_run") == 0
    resolved = {}
    for word in capsys.readouterr().out.partition("what each flag is")[2].split():
        name, equals, value = word.removeprefix("--").partition("=")
        resolved[name] = value if equals else "true"  # a switch that is off is not shown
    for line in path.read_text().splitlines():
        key, colon, value = line.split("#")[0].partition(":")
        if colon and key != "image_size":
            assert resolved.get(key.strip(), "false").lower() == value.strip().lower(), line
