"""Two checkpoints of any program: what is named, what is healthy, and that bad input ends in one line."""

import copy
import functools
import pickle
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from lowprec import Precision, recipe
from lowprec.__main__ import main
from lowprec.optimizers import rounded
from lowprec.watch import compare

ROOT = Path(__file__).resolve().parents[2]
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


@functools.cache
def kept(steps):
    return whole(*trained(steps))


def saved(steps):
    return copy.deepcopy(kept(steps))


def files(tmp_path, before, after, suffix="pt"):
    paths = [tmp_path / f"{name}.{suffix}" for name in ("before", "after")]
    for path, content in zip(paths, (before, after), strict=True):
        save_file(content, path) if suffix == "safetensors" else torch.save(content, path)
    return [str(path) for path in paths]


def named(capsys, words, status=1):
    """{site: tensors} of what the command prints."""
    capsys.readouterr()
    assert compare.main(words) == status, capsys.readouterr()
    said = capsys.readouterr().out
    found = compare.compare(*words).findings
    sites = {}
    for f in found:
        if f.severity != "note":
            sites.setdefault(f.site, []).append(f.tensor)
    assert said.splitlines()[-1].startswith("healthy") == (status == 0)
    return sites


def test_a_whole_checkpoint_is_healthy(tmp_path, capsys):
    assert named(capsys, files(tmp_path, whole(*trained(5)), whole(*trained(30))), 0) == {}


def test_bf16_weights_that_do_not_move_are_named(tmp_path, capsys):
    before, after = (trained(steps, BF16, lr=1e-5)[0].state_dict() for steps in (0, 30))
    sites = named(capsys, files(tmp_path, before, after, "safetensors"))
    assert sites["gains"] == ["1.weight"] and "2.weight" in sites["update"]


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


def states_after(steps, optimizer, **flags):
    """The state of a Precision in pure bf16."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16))
    run = Precision(net, recipe(pure_bf16=True, **flags), lr=1e-3, optimizer=optimizer, ema_decay=None)
    for _ in range(steps):
        x = torch.randn(8, 16)
        run.backward(F.mse_loss(run(x), x.flip(1)))
        run.step()
    return run.state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_file_that_says_that_it_is_rounded_by_noise(tmp_path, capsys, optimizer):
    """Growing moments don't show it, nor do gains that stand at 1. Muon's file holds two optimisers."""
    by_noise = [states_after(steps, optimizer, stochastic=True) for steps in (4, 8)]
    assert named(capsys, files(tmp_path, *by_noise), 0) == {}
    to_nearest = [states_after(steps, optimizer) for steps in (4, 8)]
    assert {"exp_avg_sq", "gains"} <= named(capsys, files(tmp_path, *to_nearest)).keys()


# ---- Optimiser states --------------------------------------------------------------------------------------


def states(checkpoint):
    return checkpoint["optimizer"]["state"]


def without(*names):
    def change(early, late):
        for state in states(late).values():
            for name in names:
                del state[name]

    return change


def of_one(name, value):
    return lambda checkpoint: states(checkpoint)[3].update({name: value})


def lost(*numbers):
    return lambda early, late: [states(late).pop(i) for i in numbers]


# what spoils the later of two whole checkpoints -> words of the line
IMPOSSIBLE = {
    "a sparse weight": (lambda c: c["model"].update({"2.weight": torch.eye(16).to_sparse()}), "is sparse"),
    "a weight on meta": (lambda c: c["model"].update({"2.weight": torch.ones(8, 16, device="meta")}), "meta"),
    "a sparse state": (of_one("exp_avg_sq", torch.ones(8, 16).to_sparse()), "is sparse"),
    "a state on meta": (of_one("exp_avg", torch.ones(8, 16, device="meta")), "meta"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("spoil, words", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_tensors_without_values_are_one_line_and_status_2(tmp_path, capsys, spoil, words):
    early, late = saved(5), saved(30)
    spoil(late)
    assert main(["compare", *files(tmp_path, early, late)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    assert words in said.err and "after.pt" in said.err, said


def zeroed(*names):
    return lambda early, late: [state[name].zero_() for state in states(late).values() for name in names]


def cast(early, late):
    states(late)[0]["exp_avg_sq"] = states(late)[0]["exp_avg_sq"].to(BF16)


EACH = [f"optimizer.{i}" for i in range(5)]
LOST = "have no state, although they had one before"
# what spoils the later of two whole checkpoints: (early, late) -> what is named, words of the first finding
SPOILT = {
    "an average at its start": (lambda early, late: late.update(ema=early["ema"]), "ema", None, ""),
    "an average of the start": (lambda early, late: late.update(ema=early["model"]), "ema", None, ""),
    "an average that is none": (lambda early, late: late.update(ema=late["model"]), "ema", None, ""),
    "a counter that stood": (
        lambda early, late: states(late)[3].update(step=states(early)[3]["step"]),
        *("step", ["optimizer.3"], ""),
    ),
    "three states of five": (lost(0, 1, 3), "state", [""], f"3 of 5 parameters {LOST}"),
    "all states": (lost(0, 1, 2, 3, 4), "state", [""], f"5 of 5 parameters {LOST}"),
    "what states held": (without("step", "exp_avg", "exp_avg_sq"), "state", [""], "5 of 5 parameters have"),
    "second moments": (zeroed("exp_avg_sq"), "exp_avg_sq", EACH, ""),
    # of all tensors even without exp_avg, which would tell of one alone
    "both moments": (zeroed("exp_avg_sq", "exp_avg"), "exp_avg_sq", None, ""),
    # narrow, and not so before
    "a state that was cast": (cast, "exp_avg_sq", 2 * ["optimizer.0"], "it was fp32 before"),
}


@pytest.mark.parametrize("spoil, site, tensors, words", SPOILT.values(), ids=SPOILT)
def test_what_spoils_a_checkpoint_is_named_and_nothing_else(tmp_path, capsys, spoil, site, tensors, words):
    early, late = saved(5), saved(30)
    spoil(early, late)
    paths = files(tmp_path, early, late)
    found = named(capsys, paths)
    assert found.keys() == {site} and tensors in (None, found[site])
    assert words in compare.compare(*paths).findings[0].text


def test_weights_alone_behind_a_whole_checkpoint_are_no_fault(tmp_path, capsys):
    before, after = files(tmp_path, saved(5), {key: saved(40)[key] for key in ("model", "ema")})
    assert named(capsys, [before, after], status=0) == {}
    assert "holds no optimiser" in str(compare.compare(before, after))


@pytest.mark.parametrize("step", ["seven", torch.ones(2), float("nan"), None])
def test_a_strange_step_counter_ends_in_no_traceback(tmp_path, capsys, step):
    early, late = saved(5), saved(30)
    of_one("step", step)(late)
    assert named(capsys, files(tmp_path, early, late), 0) == {}


def test_a_tensor_whose_gradients_were_all_zero_is_no_reset(tmp_path, capsys):
    early, late = saved(5), saved(30)
    for state in (states(early)[3], states(late)[3]):
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    late["model"]["2.weight"] = early["model"]["2.weight"]
    assert "exp_avg_sq" not in named(capsys, files(tmp_path, early, late))  # that it did not move is named


def test_an_optimiser_before_its_first_step_has_no_state(tmp_path, capsys):
    assert named(capsys, files(tmp_path, saved(0), saved(30)), 0) == {}


OTHERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[3:]}, {"params": p[:3], "weight_decay": 0.0}]),
    "ours": lambda p: rounded.AdamW(p, lr=1e-3, compiled=False),
    "ours in 8 bits": lambda p: rounded.AdamW(p, lr=1e-2, compiled=False, exp_avg="int8", exp_avg_sq="int8"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_states_of_other_optimisers_are_healthy(tmp_path, capsys, make):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    optimizer, pair = make(list(net.parameters())), []
    for _ in range(2):
        for _ in range(9):
            optimizer.zero_grad()
            net(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
        pair.append(copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()}))
    assert named(capsys, files(tmp_path, *pair), 0) == {}


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
        "a folder": (good, str(tmp_path), "a folder, and not a checkpoint"),
        "a number": (good, made("number.pt", 3), "no named tensors"),
        "a tensor": (good, made("tensor.pt", torch.ones(3)), "no named tensors"),
        "empty": (good, made("empty.pt", b"", raw=True), "cut short"),
        "half": (good, made("half.pt", half, raw=True), "cut short"),
        "text": (good, made("text.bin", b"not a checkpoint\n" * 9, raw=True), "no checkpoint"),
        "no safetensors": (good, made("x.safetensors", b"{}" * 40, raw=True), "no checkpoint"),
        "code": (good, made("code.pt", pickle.dumps({"w": Runs()}, protocol=2), raw=True), "run code"),
        "an object": (good, made("object.pt", {"w": Runs()}), "run code"),
        "another net": (good, made("other.pt", nn.Linear(3, 3).state_dict()), "different nets"),
        "another shape": (good, made("shape.pt", wider), "0.weight is ["),
    }


def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for what, (before, after, words) in bad(tmp_path).items():
        for pair in ((before, after), (after, before)):
            assert main(["compare", *pair]) == 2, what
            said = capsys.readouterr()
            assert said.out == "" and said.err.count("\n") == 1, (what, said)
            assert said.err.startswith("lowprec: ") and words in said.err, (what, said)
    assert not Path("was-run").exists()
    for words in ([], ["one"], ["a", "b", "c"]):
        assert main(["compare", *words]) == 2 and "usage" in capsys.readouterr().err


def test_the_command(tmp_path, monkeypatch, capsys):
    words = files(tmp_path, trained(0)[0].state_dict(), trained(9)[0].state_dict(), "safetensors")
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "doctor.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "healthy: nothing is losing information"
