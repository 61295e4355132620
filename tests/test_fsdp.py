"""A net that fully_shard spreads over ranks: the same bits on 1, 2 and 4 of them as on one that spreads
nothing; checkpoints that any number of ranks reads; a rank that is killed. Real processes, gloo, tiny nets.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import cli
import fsdp_jobs
import pytest
import rank_server
import torch
from cli import ROOT, assert_same, command, process
from rank_server import ranks_messages, told
from safetensors.torch import load_file

import bench_sharding
import checkpoints
import sharding
import shards
from machine import Refused

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
ranks, server = rank_server.ranks, rank_server.server

TASK = '''
import torch.nn.functional as F
from torch import nn
from tasks import Task


class Data:
    name, channels, num_classes, image_size = "lines", 1, 0, 8

    class Set:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            import torch
            x = torch.tensor([[i / 64, 1.0, i % 5, i % 3] for i in index])
            return x, x.sin()

    train = heldout = Set()

    def __str__(self):
        return self.name


class Lines(Task):
    @classmethod
    def load(cls, config, index=None):
        return Data()

    def net(self):
        net = nn.Sequential(nn.Linear(4, 70), nn.ModuleList(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 4))
        del net[1]
        return net

    def loss(self, model, batch, rng, step):
        x, y = batch
        return F.mse_loss(model(x), y)

    def evaluate(self, model, rng):
        x, y = self.data.train[list(range(8))]
        return {"error": float(F.mse_loss(model(x), y))}, {}
'''
RUN = "--batch_size 8 --sample_every 0 --warmup 0 --threads 1 --log_every 2 --clip_grad 0".split()
RUN += ["--device", "cpu"]
LOW = ["--pure_bf16", "--stochastic", "--opt8bit"]


# ---- The same bits -----------------------------------------------------------------------------------------

RECIPES = {
    1: ["stochastic opt8bit"],
    2: ["fp32", "split", "stochastic opt4bit", "bf16 average", "norm island"],
    4: ["stochastic", "kahan+stochastic", "stochastic opt8bit"],
}


@pytest.mark.parametrize("world", RECIPES)
def test_any_number_of_ranks_trains_to_the_bits_of_one_that_spreads_nothing(world, ranks):
    """Weights, average, moments and what completes weights, and the ledger's bytes a parameter."""
    found = told(ranks, world, "same_bits", RECIPES[world])
    assert found == {name: [] for name in RECIPES[world]}


@pytest.mark.parametrize("world", [4])
def test_rows_that_cut_blocks_of_codes_step_to_the_same_bits(world, ranks):
    found = told(ranks, world, "pieces")
    assert len(found) == 4 and not any(found.values()), found


def test_norms_and_telemetry_are_those_of_the_whole_net(ranks):
    two, four = (told(ranks, world, "clipped") for world in (2, 4))
    for name in two:
        if name != "fp16":  # products in 16 bits: gradients of 2 ranks are added before they are rounded
            assert two[name][0] == pytest.approx(four[name][0], rel=1e-9), name
            assert two[name][1] == four[name][1], name
    one, spread = two["one rank"][0], two["spread"][0]
    assert spread == pytest.approx(one, rel=2e-6)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    assert told(ranks, 2, "overflow") == {"skipped": 1, "moved": []}


def test_the_generator_draws_what_that_of_one_rank_draws(ranks):
    assert told(ranks, 2, "drawn") == {"same": True}


# ---- Memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_the_bytes_that_the_table_says(world, ranks):
    names = ["fp32", "split", "stochastic opt8bit", "stochastic opt4bit"]
    for name, (held, said) in told(ranks, world, "measured", names).items():
        # a block of codes that ranks share is held by each of them
        assert held == pytest.approx(said, rel=0.04 if "bit" in name else 1e-12), name


def test_the_table_in_the_readme_is_what_the_arithmetic_says():
    smallest = {"DiT-XL/2": bench_sharding.NETS["DiT-XL/2"]}
    readme = (ROOT / "README.md").read_text()
    for row in bench_sharding.rows(smallest):
        assert f"| {' | '.join(row)} |" in readme
    assert readme.count("| DiT, 7 B |") == len(bench_sharding.RECIPES)


# ---- Checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,saving,loading", [("stochastic opt8bit", 2, 4), ("split opt4bit", 4, 1)])
def test_a_state_goes_through_dcp_to_another_number_of_ranks(name, saving, loading, ranks):
    ended = ranks(saving, "saved", name, "folder", "whole.pt")
    assert ended == [0] * saving, ranks_messages(ranks)
    assert told(ranks, loading, "loaded", name, "folder", "whole.pt") == []


@pytest.fixture
def run(ranks):
    """run(world, *flags): train.py of a small task; on one process without torchrun where world is 0."""
    Path("lines.py").write_text(TASK)
    task = ["--task", "lines.py:Lines", *RUN, *LOW]

    def train(world, *flags, name="run"):
        words = [*task, "--name", name, *map(str, flags)]
        return ranks(world, None, "--fsdp", *words) if world else command(*words)

    same = ["--fsdp", *task, "--name", "run"]
    train.start = lambda world, *flags: ranks.start(world, None, *same, *flags)
    return train


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
        (lambda: plain.write_text("{"), "can't be read"),
    ):
        damage()
        with pytest.raises(Refused, match=word):
            checkpoints.read(path)
        victim.write_bytes(whole)
        (victim.parent / "extra").unlink(missing_ok=True)
        plain.write_text(json.dumps(content))
    assert checkpoints.read(path)["step"] == 1


def test_a_killed_rank_ends_all_in_one_line_and_fewer_ranks_resume(run, ranks):
    numbers = run.start(4, "--steps", 10**6, "--checkpoint_every", 2)
    end = time.monotonic() + 60
    while not Path("runs/run/checkpoint.json").exists():
        assert time.monotonic() < end, ranks_messages(ranks)
        time.sleep(0.01)
    os.kill(numbers[2], signal.SIGKILL)
    begun = time.monotonic()
    assert sorted(ranks.wait(number) for number in numbers) == [-9, 2, 2, 2]
    assert time.monotonic() - begun < 60
    assert "another process of this run has ended; the same command resumes" in ranks.said()[0]
    assert "Traceback" not in ranks.messages.read_text()
    done = checkpoints.read("runs/run")["step"]
    assert run(2, "--steps", done + 1) == [0, 0], ranks_messages(ranks)
    assert checkpoints.read("runs/run")["step"] == done + 1
    assert not list(Path("runs/run").glob("*.part"))


# ---- Bad input ---------------------------------------------------------------------------------------------


def test_what_can_not_be_spread_is_refused_in_a_line(ranks):
    said = told(ranks, 2, "refused")
    words = {
        "adafactor": "adamw, sgd or lion",
        "muon": "adamw, sgd or lion",
        "torch": "adamw, sgd or lion",
        "fp8": "--bf16 or --pure_bf16",
        "sparse24": "leave one of the two out",
        "int8": "leave one out",
        "grad_release": "leave one out",
        "average_on": "leave one out",
        "states_on": "leave one out",
        "generator": "blank=",
    }
    assert said.keys() == words.keys()
    for name, line in said.items():
        assert line and words[name] in line and "\n" not in line, (name, line)


def test_without_torchrun_it_says_how_to_start(run, capsys):
    assert command(*RUN, "--task", "lines.py:Lines", "--fsdp") == 2
    assert "torchrun --nproc_per_node" in cli.one_line(capsys)
    assert not Path("runs").exists()
    assert command(*RUN, "--task", "lines.py:Lines", "--fsdp", "--dry_run") == 0


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--batch_size", 9], "use a multiple of 2"),
        (["--fp8", "--fp8_backend", "emulate"], "--fp8 needs whole tensors"),
        (["--optimizer", "muon"], "adamw, sgd or lion"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line_of_one_rank(flags, word, ranks):
    Path("lines.py").write_text(TASK)
    low = [] if "--fp8" in flags else LOW[:2]
    assert ranks(2, None, "--task", "lines.py:Lines", "--fsdp", *RUN, *low, *flags) == [2, 2]
    assert word in ranks.said()[0] and "Traceback" not in ranks.messages.read_text()
    assert not Path("runs").exists()


def test_ranks_with_other_flags_are_refused(run, ranks):
    port, numbers = ranks.port(), []
    for rank, lr in enumerate(("0.1", "0.2")):
        words = ["--task", "lines.py:Lines", "--fsdp", *RUN, "--lr", lr]
        numbers.append(ranks.alone(rank, 2, port, *words))
    assert [ranks.wait(number) for number in numbers] == [2, 2]
    assert ranks.said() == [
        "train.py: rank 1 was started with --lr 0.2, rank 0 with 0.1: start all with the same command"
    ]


# ---- Parts -------------------------------------------------------------------------------------------------


def test_a_tree_of_values_comes_back_from_json():
    state = {"a": (1, 2.5, [None, True]), 3: {"x": torch.arange(3)}, "b": {"$odd": "name"}, "c": float("inf")}
    tensors = {}
    tree = json.loads(json.dumps(shards._apart(state, tensors)))
    assert_same(shards._together(tree, lambda leaf: tensors[leaf["$tensor"]]), state)


def test_a_plain_tensor_is_no_part():
    assert sharding.part_of(torch.zeros(3)) is None and sharding.Over.of(fsdp_jobs.build()) is None


# ---- On GPUs -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with NCCL")
def test_two_gpus_train_to_the_bits_of_one(tmp_path):
    Path("lines.py").write_text(TASK)
    words = [str(ROOT / "train.py"), "--task", "lines.py:Lines", *RUN, *LOW, "--steps", "4"]
    words += ["--device", "cuda"]
    for count in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        assert process(*launch, *words, "--fsdp", "--name", f"on{count}").wait(300) == 0
    one, two = (checkpoints.read(f"runs/on{count}")["precision"]["model"] for count in (1, 2))
    assert all((one[k].float() - two[k].float()).abs().max() < 0.05 for k in one)
