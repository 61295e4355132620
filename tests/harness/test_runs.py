"""Files of a run: whole or not at all, read with the place of a mistake, exported with tied weights."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli import SEGMENT, after_step, assert_same, checkpoint, no_training, quick, summary
from safetensors.torch import load_file

from harness import progress, run_folder
from lowprec.errors import Refused
from trainer import Trainer

# ---- Files -------------------------------------------------------------------------------------------------


def test_tied_weights_and_buffers_are_exported():
    weight = torch.randn(3, 3)
    weights = {
        "embed.weight": weight,
        "head.weight": weight,
        "mean": torch.ones(3),
        "empty": torch.zeros(0),
        "none": torch.zeros(0),
    }
    run_folder.export("net.safetensors", weights, {"lr": 1e-3}, 7)
    assert_same(load_file("net.safetensors"), weights)


def test_lines_of_json():
    path = Path("rows.jsonl")
    assert run_folder.read_lines(path) == []
    path.write_bytes(b'{"a": 1}\n\n{"a": NaN}\n{"a": 3, "b')
    first, second = run_folder.read_lines(path)
    assert first == {"a": 1} and math.isnan(second["a"])
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert run_folder.read_lines(path) == [{"a": 1}, {"a": 2}]
    for bad in (b'{"a": 1}\n[2]\n', b'{"a": 1}\n\xff\xfe\n', b'{"a": 1}\n{"a"\n{"a": 3}\n'):
        path.write_bytes(bad)
        with pytest.raises(Refused, match=r"rows\.jsonl, line 2: it is no JSON object"):
            run_folder.read_lines(path)


# ---- Lines of metrics --------------------------------------------------------------------------------------


def test_a_checkpoints_seconds_are_those_of_training(monkeypatch):
    """A preview is drawn before the checkpoint of its step is written."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0, time=time.time)
    monkeypatch.setattr(progress, "time", clock)

    def preview(run):
        clock.perf_counter = lambda: 60.0

    monkeypatch.setattr(Trainer, "_preview", preview)
    after_step(monkeypatch, 2, lambda run: run.stop.ask(2))
    assert quick(*SEGMENT, "--sample_every", 2) == 130
    assert checkpoint()["seconds"] == 0


def test_a_signal_while_the_last_checkpoint_is_written_ends_the_run_before_its_scores(monkeypatch, capsys):
    state_dict = Trainer.state_dict

    def asked(run, *more):
        run.stop.ask(2)
        return state_dict(run, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "state_dict", asked)
        assert quick(*SEGMENT) == 130
    assert "stopped after step 4; the same command scores the run" in capsys.readouterr().err
    assert not Path("runs/run/summary.json").exists()
    no_training(monkeypatch)
    assert quick(*SEGMENT) == 0 and summary()["step"] == 4


def interrupted(*args):
    raise KeyboardInterrupt


def test_a_run_scored_again_keeps_what_its_steps_told(monkeypatch):
    """Whether it was scored before, or was interrupted while it was scored."""
    monkeypatch.setattr("trainer.peak_memory", lambda device: 5 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "score", interrupted)
        assert quick(*SEGMENT) == 130
    ledger = Path("runs/run/ledger.json").read_text()
    assert "activations" in ledger
    no_training(monkeypatch)
    for weights in ("ema", "both"):
        assert quick(*SEGMENT, "--weights", weights) == 0
        assert summary()["activations"] == checkpoint()["activations"]
        assert summary()["peak_memory"] == 5 << 20
        assert Path("runs/run/ledger.json").read_text() == ledger
    older = checkpoint()
    del older["activations"], older["peak"]
    torch.save(older, "runs/run/checkpoint.pt")
    assert quick(*SEGMENT, "--weights", "raw") == 0 and "activations" not in summary()
