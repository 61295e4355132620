"""Checkpoints that are damaged or a stranger's: refused in one line, or they change nothing. They run no code
and decide nothing but the weights and the net that these fit.
"""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import attacked
import cli
import pytest
import torch
from attacked import BASE, again, is_refused, line_of
from cli import command, content

from harness import checkpoints
from lowprec.errors import Refused

trained, mine = attacked.trained, attacked.mine

# ---- Damaged checkpoints -----------------------------------------------------------------------------------


def same(a, b):
    try:
        cli.assert_same(a, b)
    except AssertionError:
        return False
    return True


def outcome(path, whole):
    """'refused', 'same' or 'other' of reading a file that was damaged."""
    try:
        return "same" if same(checkpoints.read(path), whole) else "other"
    except Refused:
        return "refused"


def places(size):
    """Sixty bits: anywhere in a file, and in its first and last bytes."""
    draw = random.Random(0)
    anywhere = [draw.randrange(8 * size) for _ in range(40)]
    first = [draw.randrange(8 * 300) for _ in range(8)]
    return anywhere + first + [8 * size - 1 - draw.randrange(8 * 400) for _ in range(12)]


def test_a_flipped_bit_is_refused(mine, capsys):
    path = mine / "checkpoint.pt"
    content, whole = path.read_bytes(), checkpoints.read(path)
    found = []
    for bit in places(len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found.append(outcome(path, whole))
    assert found == ["refused"] * 60
    before = path.read_bytes()
    assert "checkpoint.pt is" in line_of(capsys, again())
    assert path.read_bytes() == before


def test_a_checkpoint_from_before_the_checksum_loads_and_a_flipped_tensor_is_refused(mine):
    path = mine / "checkpoint.pt"
    whole = checkpoints.read(path)
    torch.save(whole, path)  # as it was written once
    content = path.read_bytes()
    assert outcome(path, whole) == "same" and again() == 0
    found = []
    for bit in places(len(content))[:40]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found.append(outcome(path, whole))
    assert "other" not in found and found.count("refused") > 30


def test_a_stranger_reads_a_checkpoint_by_torch_alone(mine):
    assert same(torch.load(mine / "checkpoint.pt", weights_only=True), checkpoints.read(mine))


CUTS = [0, 100, 0.9, -1, -95]


@pytest.mark.parametrize("cut", CUTS)
def test_a_checkpoint_cut_short_or_with_more_behind_is_refused(cut, mine, capsys):
    path = mine / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole)) if isinstance(cut, float) else cut])
    assert "checkpoint" in is_refused(capsys, again)
    path.write_bytes(whole + b"more")
    assert "checkpoint" in is_refused(capsys, again)


# ---- A stranger's checkpoint -------------------------------------------------------------------------------


def plant(path, change):
    """A checkpoint, with a checksum that fits, as change(state) made it."""
    state = checkpoints.read(path)
    state.pop("format")
    change(state)
    with open(path, "w+b") as file:
        checkpoints.write_checkpoint(file, state)


def at(*keys):
    """change(value) -> change of a state, whose value at these keys becomes that one."""

    def to(value):
        def change(state):
            for key in keys[:-1]:
                state = state[key]
            if value is ...:
                del state[keys[-1]]
            else:
                state[keys[-1]] = value

        return change

    return to


def first_tensor(of, act):
    def change(state):
        tensors = state["precision"][of] if of == "model" else state["precision"]["averages"]["ema"]["shadow"]
        name = next(name for name in tensors if torch.is_tensor(tensors[name]))
        tensors[name] = act(tensors[name])

    return change


def optimizer(part, name, value):
    def change(state):
        held = state["precision"]["optimizer"]
        (held["param_groups"][0] if part == "group" else held["state"][0])[name] = value

    return change


def without_a_name(state):
    state["precision"]["model"].popitem()


STATES = {
    "no ema": at("precision", "averages", "ema")(...),
    "a tensor gone": without_a_name,
    "other shape": first_tensor("model", lambda t: torch.zeros(3, 3, 3)),
    "betas": optimizer("group", "betas", (0.5, 0.5)),
    "a tensor's step beyond": optimizer("state", "step", 10**6),
    "groups gone": at("precision", "optimizer", "param_groups")([]),
    "another lr in config": at("config", "lr")(1.0),
}


@pytest.mark.parametrize("name", STATES)
def test_a_checkpoint_of_wrong_values_is_refused(name, mine, capsys):
    plant(mine / "checkpoint.pt", STATES[name])
    is_refused(capsys, again)


@pytest.mark.parametrize("verb", ["--sample", "--diagnose", "--finetune"])
def test_the_file_of_a_task_that_a_checkpoint_names_is_not_run(verb, mine, capsys):
    Path("evil.py").write_text("open('executed', 'w')\n")
    plant(mine / "checkpoint.pt", at("config", "task")("evil.py:Evil"))
    flags = []
    if verb == "--finetune":
        flags = [*BASE, "--steps", 1, "--name", "tuned"]
    is_refused(capsys, command, *flags, verb, "runs/run")
    assert not Path("executed").exists()


def test_a_strangers_checkpoint_writes_nowhere_else_and_sets_nothing(mine, capsys):
    """What --sample of one's own run gives is what a stranger's gives, whatever it says of the machine."""
    assert command("--sample", "runs/run", "--name", "own") == 0
    Path("elsewhere").mkdir()
    lies = dict(
        runs=str(Path("elsewhere").resolve()), name="../../x", export=str(Path("stolen").resolve()),
        threads=10**6, sample_batch=10**12, workers=10**9, device="cuda:99", log_every="often",
        compile="yes", unheard_of="b",
    )  # fmt: skip
    shutil.copytree(mine, "got")
    plant(Path("got/checkpoint.pt"), lambda state: state["config"].update(lies))
    outside = content("."), torch.get_num_threads()
    os.chdir("got")
    # the flags of the machine are not even read for sense: they are left where they are
    assert command("--sample", ".", "--name", "theirs") == 0, capsys.readouterr().err
    os.chdir("..")
    now = {name: value for name, value in content(".").items() if not name.startswith("got/samples/")}
    assert now == {name: v for name, v in outside[0].items() if not name.startswith("got/samples/")}
    assert torch.get_num_threads() == outside[1]
    own, theirs = (json.loads(Path(p).read_text()) for p in ("runs/run/samples/own.json",
                                                              "got/samples/theirs.json"))  # fmt: skip
    assert own["scores"] == theirs["scores"]


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


OTHERS = {  # what makes another file of a checkpoint's
    "code in config": lambda path: plant(path, at("config")(Payload())),
    "code in the model": lambda path: plant(path, at("precision", "model")(Payload())),
    "code in a key": lambda path: plant(path, at("extra")(Payload())),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Payload(), protocol=2)),
    "a zipped pickle": lambda path: torch.save({"format": 1, "step": Payload()}, path),
    "a tensor": lambda path: torch.save(torch.zeros(3), path),
    "little": lambda path: torch.save({"format": 1}, path),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_no_checkpoint_is_refused_and_runs_no_code(name, mine, capsys):
    OTHERS[name](mine / "checkpoint.pt")
    assert "no checkpoint" in is_refused(capsys, again)
    for verb in ("--sample", "--diagnose"):
        assert "no checkpoint" in is_refused(capsys, command, verb, "runs/run")
    assert not Path("executed").exists()
