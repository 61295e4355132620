"""The figures of golden.json, on the machines that have a record there; and that a moved bit is seen."""


import golden
import pytest
import torch

FAST = ("stochastic-dit", "kahan-stochastic", "segment")


def state():
    """A small checkpoint of the same form as Precision.state_dict()."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    moments = {"step": 3, "exp_avg": new(6), "exp_avg_sq": new(6)}
    return {
        "model": {"a.weight": new(2, 3, dtype=torch.bfloat16), "a.steps": torch.tensor(5)},
        "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "averages": {"ema": {"step": 3, "shadow": {"a.weight": new(2, 3)}}},
        "scaler": {},
        "skipped": 0,
    }


# ---- Digests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part, find",
    [
        ("model", lambda s: s["model"]["a.weight"]),
        ("model", lambda s: s["model"]["a.steps"]),
        ("optimizer.exp_avg", lambda s: s["optimizer"]["state"][0]["exp_avg"]),
        ("optimizer.exp_avg_sq", lambda s: s["optimizer"]["state"][0]["exp_avg_sq"]),
        ("averages.ema", lambda s: s["averages"]["ema"]["shadow"]["a.weight"]),
    ],
)
def test_one_bit_of_one_value_moves_the_digest_of_its_part_alone(part, find):
    poisoned = state()
    find(poisoned).view(-1)[-1:].view(torch.uint8)[0] ^= 1
    assert golden.moved(golden.digests(state()), golden.digests(poisoned)) == [part]


def test_dtype_and_shape_count():
    cast, reshaped = state(), state()
    cast["model"]["a.weight"] = cast["model"]["a.weight"].view(torch.int16)  # the same bytes
    reshaped["model"]["a.weight"] = reshaped["model"]["a.weight"].view(3, 2)
    for changed in (cast, reshaped):
        assert golden.moved(golden.digests(state()), golden.digests(changed)) == ["model", "layout"]


def test_a_renamed_tensor_moves_the_layout_alone():
    renamed = state()
    renamed["model"]["b.weight"] = renamed["model"].pop("a.weight")
    assert golden.moved(golden.digests(state()), golden.digests(renamed)) == ["layout"]


# ---- Verdicts and the record -------------------------------------------------------------------------------


def test_a_verdict_names_what_moved():
    known = {"model": "a", "loss": 1.0}
    assert golden.verdict(known, dict(known))[0]
    same, line = golden.verdict(known, {"model": "b", "loss": 1.5})
    assert not same and line.startswith("MOVED   model loss (loss 1.0 -> 1.5)")
    assert golden.verdict(None, known) == (False, "NEW     not recorded on this machine")
    assert golden.verdict(known, {"failed": "why"}) == (False, "FAILED  why")


def test_a_write_keeps_other_machines_and_other_arms(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "RECORD", tmp_path / "golden.json")
    monkeypatch.setattr(golden, "machine", lambda: "old")
    golden.write_record({"fp32": {"loss": 1}})
    monkeypatch.setattr(golden, "machine", lambda: "new")
    golden.write_record({"split": {"loss": 2}})
    golden.write_record({"fp32": {"loss": 3}})
    golden.write_record({"split": {"loss": 4}})
    record = golden.read_record()
    assert record == {"old": {"fp32": {"loss": 1}}, "new": {"fp32": {"loss": 3}, "split": {"loss": 4}}}


# ---- Runs --------------------------------------------------------------------------------------------------


def test_this_machine_trains_what_is_recorded(tmp_path):
    known = golden.read_record().get(golden.machine())
    if known is None:
        pytest.skip(f"golden.json has no figures of this machine: {golden.machine()}")
    found = golden.train_all(FAST, golden.HERE.parent, tmp_path)
    verdicts = {arm: golden.verdict(known.get(arm), figures) for arm, figures in found.items()}
    assert all(same for same, _ in verdicts.values()), verdicts
