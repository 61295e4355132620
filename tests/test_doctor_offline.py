"""Two checkpoints of any program: what is named, what is healthy, and that bad input ends in one line."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import doctor_offline

ROOT = Path(__file__).resolve().parent.parent
BF16 = torch.bfloat16


def trained(steps=0, dtype=torch.float32, lr=1e-3):
    """(net, optimiser, average) after some steps, the same from the start each time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    average = copy.deepcopy(net)
    for _ in range(steps):
        # tokens above 29 never come: whole rows stay
        net(torch.randint(30, (64,))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), net.parameters(), strict=True):
                a.lerp_(p, 0.1)
    return net, optimizer, average


def whole(net, optimizer, average):
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": average.state_dict(),
        "step": 7,
        "args": {"lr": 1e-3, "names": ["a", None]},
    }


def files(tmp_path, before, after, suffix="pt"):
    paths = [tmp_path / f"{name}.{suffix}" for name in ("before", "after")]
    for path, content in zip(paths, (before, after), strict=True):
        save_file(content, path) if suffix == "safetensors" else torch.save(content, path)
    return [str(path) for path in paths]


def named(capsys, words, status=1):
    """{site: tensors} of what the command prints."""
    capsys.readouterr()
    assert doctor_offline.main(words) == status, capsys.readouterr()
    said = capsys.readouterr().out
    found = doctor_offline.compare(*map(doctor_offline.read, words)).findings
    sites = {}
    for f in found:
        if f.severity != "note":
            sites.setdefault(f.site, []).append(f.tensor)
    assert said.splitlines()[-1].startswith("healthy") == (status == 0)
    return sites


def test_weights_that_trained_are_healthy(tmp_path, capsys):
    before, after = trained(0)[0].state_dict(), trained(30)[0].state_dict()
    for suffix in ("safetensors", "pt", "bin"):
        assert named(capsys, files(tmp_path, before, after, suffix), 0) == {}


def test_a_whole_checkpoint_is_healthy(tmp_path, capsys):
    assert named(capsys, files(tmp_path, whole(*trained(5)), whole(*trained(30))), 0) == {}


def test_bf16_weights_that_do_not_move_are_named(tmp_path, capsys):
    before, after = (trained(steps, BF16, lr=1e-5)[0].state_dict() for steps in (0, 30))
    sites = named(capsys, files(tmp_path, before, after, "safetensors"))
    assert sites["gains"] == ["1.weight"] and "2.weight" in sites["update"]


def test_one_layer_that_did_not_train(tmp_path, capsys):
    before, after = trained(0)[0].state_dict(), trained(30)[0].state_dict()
    after["2.weight"] = before["2.weight"]
    assert named(capsys, files(tmp_path, before, after)) == {"update": ["2.weight"]}


def test_nothing_moved(tmp_path, capsys):
    same = trained(3)[0].state_dict()
    assert named(capsys, files(tmp_path, same, same)) == {"update": [""]}  # of all of them, not of each


def test_tokens_that_never_come_are_not_named(tmp_path, capsys):
    before, after = (trained(steps, BF16, lr=1e-2)[0].state_dict() for steps in (0, 30))
    after["0.weight"][5:] = before["0.weight"][5:]
    assert named(capsys, files(tmp_path, before, after), 0) == {}
    after["0.weight"][:, 4:] = before["0.weight"][:, 4:]  # columns are no tokens
    assert named(capsys, files(tmp_path, before, after)) == {"update": ["0.weight"]}


def test_states_in_bf16_and_counters(tmp_path, capsys):
    early, late = whole(*trained(5)), whole(*trained(300))
    for checkpoint in (early, late):
        for state in checkpoint["optimizer"]["state"].values():
            state["exp_avg_sq"] = state["exp_avg_sq"].to(BF16)
            state["step"] = state["step"].to(BF16)
    # it can only grow: what had shrunk stands where it was
    for old, new in zip(
        early["optimizer"]["state"].values(), late["optimizer"]["state"].values(), strict=True
    ):
        new["exp_avg_sq"] = torch.maximum(old["exp_avg_sq"], new["exp_avg_sq"])
    sites = named(capsys, files(tmp_path, early, late))
    assert set(sites) == {"exp_avg_sq", "step"} and len(sites["step"]) == 5


def test_a_state_cast_between_the_two(tmp_path, capsys):
    early, late = whole(*trained(5)), whole(*trained(30))
    late["optimizer"]["state"][0]["exp_avg_sq"] = late["optimizer"]["state"][0]["exp_avg_sq"].to(BF16)
    paths = files(tmp_path, early, late)
    assert named(capsys, paths)["exp_avg_sq"] == ["optimizer.0"] * 2  # narrow, and not so before
    found = doctor_offline.compare(*map(doctor_offline.read, paths)).findings
    assert found[0].text == "it was fp32 before"


def test_an_average_that_stands_at_its_start(tmp_path, capsys):
    early, late = whole(*trained(5)), whole(*trained(30))
    late["ema"] = early["ema"]
    assert set(named(capsys, files(tmp_path, early, late))) == {"ema"}
    late["ema"] = early["model"]
    assert set(named(capsys, files(tmp_path, early, late))) == {"ema"}
    late["ema"] = late["model"]
    assert set(named(capsys, files(tmp_path, early, late))) == {"ema"}


def test_a_counter_that_did_not_count(tmp_path, capsys):
    early, late = whole(*trained(5)), whole(*trained(30))
    late["optimizer"]["state"][3]["step"] = early["optimizer"]["state"][3]["step"]
    assert named(capsys, files(tmp_path, early, late)) == {"step": ["optimizer.3"]}


# ---- Bad input ---------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self):
        return Path.touch, (Path("was-run"),)


def bad(tmp_path):
    """{what: (BEFORE, AFTER, words)}"""
    good = str(tmp_path / "good.pt")
    torch.save(trained()[0].state_dict(), good)

    def made(name, content, raw=False):
        path = tmp_path / name
        path.write_bytes(content) if raw else torch.save(content, path)
        return str(path)

    wider = {**trained()[0].state_dict(), "0.weight": torch.ones(41, 16)}
    half = Path(good).read_bytes()[: len(Path(good).read_bytes()) // 2]
    return {
        "missing": (good, str(tmp_path / "nowhere.pt"), "no such file"),
        "a folder": (good, str(tmp_path), "no such file"),
        "a number": (good, made("number.pt", 3), "no named tensors"),
        "a tensor": (good, made("tensor.pt", torch.ones(3)), "no named tensors"),
        "empty": (good, made("empty.pt", b"", raw=True), "cut short"),
        "half": (good, made("half.pt", half, raw=True), "cut short"),
        "text": (good, made("text.bin", b"not a checkpoint\n" * 9, raw=True), "no checkpoint"),
        "no safetensors": (good, made("x.safetensors", b"{}" * 40, raw=True), "no checkpoint"),
        "code": (good, made("code.pt", pickle.dumps({"w": Runs()}, protocol=2), raw=True), "run code"),
        "an object": (good, made("object.pt", {"w": Runs()}), "run code"),
        "another net": (good, made("other.pt", nn.Linear(3, 3).state_dict()), "different nets"),
        "another shape": (good, made("shape.pt", wider), "0.weight has the shapes"),
    }


def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for what, (before, after, words) in bad(tmp_path).items():
        for pair in ((before, after), (after, before)):
            assert doctor_offline.main(list(pair)) == 2, what
            said = capsys.readouterr()
            assert said.out == "" and said.err.count("\n") == 1, (what, said)
            assert said.err.startswith("doctor.py: ") and words in said.err, (what, said)
    assert not Path("was-run").exists()
    for words in ([], ["one"], ["a", "b", "c"]):
        assert doctor_offline.main(words) == 2 and "usage" in capsys.readouterr().err


def test_the_command(tmp_path):
    words = files(tmp_path, trained(0)[0].state_dict(), trained(9)[0].state_dict(), "safetensors")
    command = [sys.executable, str(ROOT / "doctor.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1] == "healthy: nothing is losing information"
