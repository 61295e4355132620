"""train.py --fsdp on ranks: what it says before it starts, checkpoints that any number of ranks reads, bad
input. Real processes, gloo, tiny nets.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import cli
import fsdp_runs
import pytest
import rank_server
import torch
from cli import assert_same, command
from fsdp_runs import DIT, LOW, RUN, TASK
from rank_server import ranks_messages
from safetensors.torch import load_file

from experiments.bench import sharding
from harness import checkpoints, shards
from harness.run_folder import Folder
from lowprec.errors import Refused

ranks = rank_server.ranks
run, norms = fsdp_runs.run, fsdp_runs.norms


SIZE = r" ([\d.]+) MiB"


@pytest.mark.parametrize("flags", list(sharding.SHARDED_RECIPES)[1:4:2])  # with low parts, and with codes
def test_a_dry_run_says_what_a_rank_holds_as_the_table_does(flags, capsys, monkeypatch):
    Path("lines.py").write_text(TASK + DIT)
    given = [] if flags == "(none)" else flags.strip("`").split()
    words = ["--task", "lines.py:Dit", "--fsdp", "--dry_run", *RUN, *given]
    monkeypatch.setattr(sharding, "BYTES_A_GIB", 1 << 20)
    table = {row[1]: row[2:] for row in sharding.arithmetic_rows({"small": (2, 128, 4)})}[flags]
    for world, columns in (("1", [1, 2, 3]), ("8", [2])):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert command(*words) == 0
        (line,) = re.findall(r"a rank holds, .*", capsys.readouterr().out)
        held, once = line.split(";")
        assert re.findall(rf"{SIZE} as one of \d+", held) == [table[i] for i in columns]
        assert re.findall(SIZE, once) == table[:1]


def test_a_run_goes_on_with_the_same_bits_on_any_number_of_ranks_and_without(run, ranks):
    """Two ranks train two steps. Each other number reads that and writes it again, and one process draws."""
    assert run(2, "--steps", 2) == [0, 0], ranks_messages(ranks)
    first = checkpoints.read("runs/run")
    assert first["step"] == 2 and first["config"]["fsdp"] is True
    assert sorted(first["precision"]["optimizer"]["state"]) == list(range(6))
    for world in (4, 1, 0):
        shutil.copytree("runs/run", f"runs/on{world}")
        status = run(world, "--steps", 3, name=f"on{world}")
        assert status in (0, [0] * world), ranks_messages(ranks)
    four, one, none = (checkpoints.read(f"runs/on{world}") for world in (4, 1, 0))
    for state in (one, none):
        state["precision"]["model"] = dict(state["precision"]["model"])
    assert_same(one["precision"], none["precision"])  # one rank that spreads, and one that does not
    assert four["step"] == 3 and four["precision"]["averages"]["ema"]["step"] == 3
    assert not Path("runs/on0/checkpoint.json").exists() and Path("runs/on0/checkpoint.pt").exists()
    assert not Path("runs/on1/checkpoint.pt").exists()
    assert command("--sample", "runs/on4", "--task", "lines.py:Lines", "--device", "cpu") == 0
    # and back: what one process wrote is spread again
    assert run(2, "--steps", 4, "--export", "ema.safetensors", name="on0") == [0, 0], ranks_messages(ranks)
    final = checkpoints.read("runs/on0")["precision"]
    exported = load_file("ema.safetensors")
    assert_same(exported, {name: final["averages"]["ema"]["shadow"][name] for name in exported})


def buffers():
    return [torch.load(f"buffers-{rank}") for rank in range(2)]


def test_running_statistics_and_tied_weights_go_on_bit_for_bit(norms, ranks):
    """On each rank, whose statistics are its own from one step to the next."""
    flags, held = "--pure_bf16 --stochastic", []
    for name, steps in (("whole", 4), ("run", 2), ("run", 4)):
        assert norms(2, *flags.split(), "--steps", steps, name=name) == [0, 0], ranks_messages(ranks)
        held.append(buffers())
    whole, _, resumed = held
    assert_same(resumed, whole)
    assert not torch.equal(whole[0]["1.running_mean"], whole[1]["1.running_mean"])
    one, other = (checkpoints.read(f"runs/{name}")["precision"] for name in ("whole", "run"))
    assert_same(one, other)
    assert torch.equal(one["model"]["2.weight"], one["model"]["3.weight"])
    assert norms(0, *flags.split(), "--steps", 5) == 0  # and without ranks


def test_norms_with_statistics_are_read_in_fp32_as_without_fsdp(norms, ranks):
    assert norms(1, "--bf16", "--steps", 3, name="spread") == [0], ranks_messages(ranks)
    assert norms(0, "--bf16", "--steps", 3, name="one") == 0
    spread, one = (checkpoints.read(f"runs/{name}")["precision"]["model"] for name in ("spread", "one"))
    assert_same(dict(spread), dict(one))


def test_a_unet_trains_in_bf16(ranks):
    words = "--model unet --size tiny --bf16 --fsdp --threads 1 --steps 2 --device cpu".split()
    assert ranks(2, None, *words, *cli.QUICK) == [0, 0], ranks_messages(ranks)


def test_the_best_is_kept_under_the_name_that_is_printed(norms, ranks):
    flags = ["--validate_every", 1, "--early_stop", 2]
    assert norms(2, *flags, "--steps", 9) == [0, 0], ranks_messages(ranks)
    said = ranks.printed()
    assert "stopped early: best held-out error 1.0000 at step 1, kept as runs/run/best.json" in said
    for name in ("best.json", "best.pt"):  # as the other runs' is called
        words = ["--sample", f"runs/run/{name}", "--task", "lines.py:Norms", "--device", "cpu"]
        assert command(*words, "--name", name) == 0
        assert json.loads(Path(f"runs/run/samples/{name}.json").read_text())["step"] == 1


def test_what_is_read_is_what_was_written(run, capsys):
    assert run(2, "--steps", 1) == [0, 0]
    path = Path("runs/run")
    plain = path / "checkpoint.json"
    content = json.loads(plain.read_text())
    assert {p.suffix for p in path.glob("checkpoint-*/*")} == {".safetensors"}  # no pickle among them
    victim = next(path.glob("checkpoint-*/*"))
    whole = victim.read_bytes()
    for damage, word in (
        (lambda: victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])), "is damaged"),
        (lambda: victim.unlink(), "is missing"),
        (lambda: (victim.parent / "extra").touch(), "does not belong there"),
        (lambda: plain.write_text(json.dumps({**content, "folder": "../x"})), "is damaged"),
        (lambda: plain.write_text("{"), "can't read"),
    ):
        damage()
        with pytest.raises(Refused, match=word):
            checkpoints.read(path)
        victim.write_bytes(whole)
        (victim.parent / "extra").unlink(missing_ok=True)
        plain.write_text(json.dumps(content))
    assert checkpoints.read(path)["step"] == 1


# ---- Bad input ---------------------------------------------------------------------------------------------


def test_without_torchrun_it_says_how_to_start(run, capsys):
    assert command(*RUN, "--task", "lines.py:Lines", "--fsdp") == 2
    assert "torchrun --nproc_per_node" in cli.one_line(capsys)
    assert not Path("runs").exists()
    assert command(*RUN, "--task", "lines.py:Lines", "--fsdp", "--dry_run") == 0


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--fp8", "--fp8_backend", "emulate"], "--fp8 needs whole tensors"),
        (["--compile"], "--compile with --fsdp: torch's compiler stops at each hook of fully_shard"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line_of_one_rank(flags, word, ranks):
    Path("lines.py").write_text(TASK)
    low = [] if "--fp8" in flags else LOW[:2]
    assert ranks(2, None, "--task", "lines.py:Lines", "--fsdp", *RUN, *low, *flags) == [2, 2]
    (said,) = ranks.said()
    assert word in said and "Traceback" not in ranks.messages.read_text()
    assert not Path("runs").exists()


CAN_NOT = ["--set reduce=bf16 --set reduce_update=stochastic", "--states_on cpu", "--compile"]


@pytest.mark.parametrize("flags", CAN_NOT)
def test_a_dry_run_refuses_what_a_run_does_in_the_same_line(flags, ranks, capsys):
    Path("lines.py").write_text(TASK)
    words = ["--task", "lines.py:Lines", "--fsdp", *RUN, *flags.split()]
    assert ranks(1, None, *words) == [2], ranks_messages(ranks)
    assert command(*words, "--dry_run") == 2
    assert [cli.one_line(capsys)] == ranks.said() and not Path("runs").exists()


def test_ranks_with_other_flags_are_refused(run, ranks):
    port, numbers = ranks.port(), []
    for rank, lr in enumerate(("0.1", "0.2")):
        words = ["--task", "lines.py:Lines", "--fsdp", *RUN, "--lr", lr]
        numbers.append(ranks.alone(rank, 2, port, *words))
    assert [ranks.wait(number) for number in numbers] == [2, 2]
    assert ranks.said() == [
        "train.py: rank 1 was started with --lr 0.2, rank 0 with 0.1: start all with the same command"
    ]


# ---- What is left ------------------------------------------------------------------------------------------


def test_a_new_checkpoint_removes_old_ones_and_no_folder_of_the_users():
    new = "checkpoint-00000120"
    kept = [new, "checkpoint-00000100-backup", "checkpoint-1", "checkpoint-00000100.old", "best-00000100"]
    gone = ["00000100", "00000100-2", "00000120.part", "123456789"]
    for name in [*kept, *(f"checkpoint-{number}" for number in gone)]:
        Path(name).mkdir()
    shards._remove_folders_but(Path("checkpoint.json").absolute(), Path(new).absolute())
    assert sorted(path.name for path in Path().iterdir()) == sorted(kept)


@pytest.mark.parametrize("whole", ["00000004", None])
def test_what_a_kill_left_of_a_checkpoint_goes_at_the_next_start(whole):
    for name in ("00000004", "00000006", "00000006.part"):
        Path("run", f"checkpoint-{name}").mkdir(parents=True)
    if whole:
        Path("run/checkpoint.json").write_text(json.dumps({"folder": f"checkpoint-{whole}"}))
    left = [f"checkpoint-{whole}"] if whole else []
    ledger = SimpleNamespace(json=dict)
    Folder("run").begin(["train.py"], {}, ledger, torch.device("cpu"), 0)
    assert [path.name for path in Path("run").glob("checkpoint-*")] == left
