"""What recipes were measured to cost: the keys of recipes, the rows, and the one that is nearest."""

import json

import pytest

from lowprec import evidence


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A function that puts rows, {field: value} beside those of a usual one, into a file of their own."""
    usual = dict(
        kind="U-Net", task="rflow", data="digits", regime="from scratch", recipe="pure_bf16+stochastic",
        optimizer="adamw", parameters=10**6, steps=100, batch=8, lr=1e-3, change=0.1, low=-0.1, high=0.3,
        pairs=6, weights="average", experiment="001",
    )  # fmt: skip

    def store(*changes):
        rows = [list(evidence.EvidenceRow(**{**usual, **change})) for change in changes]
        (tmp_path / "evidence.json").write_text(json.dumps({"rows": rows, "caution": ""}))
        monkeypatch.setattr(evidence, "EVIDENCE_FILE", tmp_path / "evidence.json")
        evidence._read_file.cache_clear()

    yield store
    evidence._read_file.cache_clear()


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        ({}, "fp32", ""),
        ({"bf16": False, "master": "none", "lr": 3}, "fp32", ""),
        ({"opt8bit": True, "stochastic": True, "pure_bf16": True}, "pure_bf16+stochastic+opt8bit", None),
        ({"fp8": True, "fp8_recipe": "delayed", "fp8_backend": "te"}, "fp8+fp8_recipe=delayed", None),
        (
            {"pure_bf16": True, "set": ["islands=norm+embed", "ema=bf16"]},
            "pure_bf16+ema=bf16+islands=norm+embed",
            "--pure_bf16 --set ema=bf16 --set islands=norm+embed",
        ),
    ],
)
def test_a_key_stands_for_the_flags_of_a_recipe_and_for_nothing_else(flags, key, words):
    assert evidence.recipe_key(flags) == key
    if words is not None:
        assert " ".join(evidence.flags_of_recipe(key)) == words


def test_the_nearest_row_differs_least_first_in_the_regime_then_in_the_kind_then_in_size_and_rate(stored):
    stored(
        {"experiment": "scratch", "kind": "GPT"},
        {"experiment": "unet", "regime": "finetune", "lr": 1e-5},
        {"experiment": "far", "regime": "finetune", "kind": "GPT", "lr": 1e-3, "parameters": 10**6},
        {"experiment": "near", "regime": "finetune", "kind": "GPT", "lr": 1e-5, "parameters": 10**6},
        {"experiment": "two pairs", "regime": "finetune", "kind": "GPT", "lr": 1e-6, "pairs": 2},
        {"experiment": "lion", "regime": "finetune", "kind": "GPT", "lr": 1e-6, "optimizer": "lion"},
    )
    asked = ("pure_bf16+stochastic", "GPT", "finetune")
    found = evidence.nearest(*asked, lr=1e-6, parameters=7 * 10**9)
    assert found.row.experiment == "near"
    assert found.differs == ("lr 1e-05, not 1e-06", "1 M parameters, not 7 B")
    assert evidence.nearest(*asked, lr=1e-3).row.experiment == "far"
    assert evidence.nearest(*asked, lr=1e-3).differs == ()
    assert evidence.nearest("pure_bf16+stochastic", "DiT", "finetune", 1e-5).row.experiment == "unet"
    assert evidence.nearest(*asked, optimizer="lion").row.experiment == "lion"
    assert evidence.nearest("fp8") is None


def test_what_the_package_holds_is_measured_and_in_order():
    rows = evidence.all_rows()
    assert len(rows) > 100 and evidence.EVIDENCE_FILE.stat().st_size < 120_000
    for row in rows:
        assert row.low <= row.change <= row.high and row.pairs > 1 and row.parameters > 0, row
        assert evidence.recipe_key({}) != row.recipe
