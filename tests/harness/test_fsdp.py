"""A net that fully_shard spreads over ranks: the same bits on 1, 2 and 4 of them as on one that spreads
nothing; checkpoints that any number of ranks reads; a rank that is killed. Real processes, gloo, tiny nets.
"""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import cli
import fsdp_jobs
import pytest
import rank_server
import torch
from cli import ROOT, assert_same, command, process
from rank_server import ranks_messages, told
from safetensors.torch import load_file

from benchmarks import sharding
from harness import checkpoints, shards
from harness.run_folder import Folder
from lowprec import fsdp
from lowprec.errors import Refused
from lowprec.optimizers import buckets

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


class Norms(Lines):
    """Running statistics, which each rank leaves in a file, and tied weights. It gets worse and worse."""

    watched, looks = ("error", "lower"), 0

    def net(self):
        wide = [nn.Linear(70, 70), nn.Linear(70, 70)]
        wide[1].weight = wide[0].weight
        norms = [nn.BatchNorm1d(70) for _ in wide]
        return nn.Sequential(nn.Linear(4, 70), norms[0], *wide, norms[1], nn.Tanh(), nn.Linear(70, 4))

    def loss(self, model, batch, rng, step):
        import os
        import resource
        import torch
        rank, full = os.environ.get("RANK", "0"), "full" + os.environ.get("RANK", "0")
        if os.path.exists(full) and step == int(open(full).read()):
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        loss = super().loss(model, batch, rng, step)
        torch.save(dict(model.model.named_buffers()), "buffers-" + rank)
        return loss

    def validate(self, model, rng):
        self.looks += 1
        return {"error": float(self.looks)}
'''
DIT = """

class Dit(Lines):
    def net(self):
        from models import DiT
        return DiT(4, 1000, 32, 2, 2, 128, 4)
"""
RUN = "--batch_size 8 --sample_every 0 --warmup 0 --threads 1 --log_every 2 --clip_grad 0".split()
RUN += ["--device", "cpu"]
LOW = ["--pure_bf16", "--stochastic", "--opt8bit"]


# ---- The same bits -----------------------------------------------------------------------------------------

RECIPES = {
    1: ["stochastic opt8bit", "kahan", "sgd"],
    2: ["fp32", "split", "stochastic opt4bit", "bf16 average", "norm island", "fp32 master", "sgd nearest"],
    4: ["stochastic", "kahan+stochastic", "stochastic opt8bit", "pure_bf16", "kahan", "sgd", "lion"],
}


@pytest.mark.parametrize("world", RECIPES)
def test_any_number_of_ranks_trains_to_the_bits_of_one_that_spreads_nothing(world, ranks):
    """Weights, average, moments and what completes weights, and the ledger's bytes a parameter."""
    found = told(ranks, world, "same_bits", RECIPES[world], "cpu")
    assert found == {name: [] for name in RECIPES[world]}


@pytest.mark.parametrize("world", [4])
def test_rows_that_cut_blocks_of_codes_step_to_the_same_bits(world, ranks):
    found = told(ranks, world, "pieces", "cpu")
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
def test_a_rank_holds_the_bytes_that_advise_says(world, ranks):
    names = ["fp32", "split", "stochastic opt8bit", "stochastic opt4bit"]
    for name, (held, said) in told(ranks, world, "measured", names).items():
        # a block of codes that ranks share is held by each of them
        assert held == pytest.approx(said, rel=0.04 if "bit" in name else 1e-12), name


SIZE = r" ([\d.]+) MiB"


@pytest.mark.parametrize("flags", sharding.RECIPES)
def test_a_dry_run_says_what_a_rank_holds_as_the_table_does(flags, capsys, monkeypatch):
    Path("lines.py").write_text(TASK + DIT)
    given = [] if flags == "(none)" else flags.strip("`").split()
    words = ["--task", "lines.py:Dit", "--fsdp", "--dry_run", *RUN, *given]
    monkeypatch.setattr(sharding, "GIB", 1 << 20)
    table = {row[1]: row[2:] for row in sharding.rows({"small": (2, 128, 4)})}[flags]
    for world, columns in (("1", [1, 2, 3]), ("8", [2])):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert command(*words) == 0
        (line,) = re.findall(r"a rank holds, .*", capsys.readouterr().out)
        held, once = line.split(";")
        assert re.findall(rf"{SIZE} as one of \d+", held) == [table[i] for i in columns]
        assert re.findall(SIZE, once) == table[:1]


# ---- Checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,saving,loading", [("stochastic opt8bit", 2, 4), ("split opt4bit", 4, 1)])
def test_a_state_goes_through_dcp_to_another_number_of_ranks(name, saving, loading, ranks):
    ended = ranks(saving, "saved", name, "folder", "whole.pt")
    assert ended == [0] * saving, ranks_messages(ranks)
    assert told(ranks, loading, "loaded", name, "folder", "whole.pt") == []


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_each_rank_of_a_strangers_loop_gets_its_own_moments_back(kind, ranks):
    if kind == "int8":
        pytest.importorskip("bitsandbytes")
    assert told(ranks, 2, "of_a_stranger", kind, "folder") == [[], []]


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


@pytest.fixture
def norms(ranks):
    """norms(world, *flags): the same of the task of norms and tied weights."""
    Path("lines.py").write_text(TASK)
    task = ["--task", "lines.py:Norms", *RUN]

    def train(world, *flags, name="run"):
        words = [*task, "--name", name, *map(str, flags)]
        return ranks(world, None, "--fsdp", *words) if world else command(*words)

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


def buffers():
    return [torch.load(f"buffers-{rank}") for rank in range(2)]


@pytest.mark.parametrize("flags", ["", "--bf16", "--fp16", "--pure_bf16 --stochastic"])
def test_running_statistics_and_tied_weights_go_on_bit_for_bit(flags, norms, ranks):
    """On each rank, whose statistics are its own from one step to the next."""
    held = []
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


def test_a_language_model_with_a_tied_head_goes_on_bit_for_bit(ranks):
    words = "--task language --size tiny --fsdp --batch_size 4 --threads 1 --log_every 2".split()
    words += "--warmup 0 --sample_every 0 --length 4 --device cpu".split()
    for name, steps in (("whole", 4), ("run", 2), ("run", 4)):
        status = ranks(2, None, *words, "--name", name, "--steps", steps)
        assert status == [0, 0], ranks_messages(ranks)
    whole, run = (checkpoints.read(f"runs/{name}")["precision"] for name in ("whole", "run"))
    assert_same(run, whole)


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


def test_a_full_disk_of_one_rank_is_one_line_with_a_remedy(norms, ranks):
    for full in (0, 1):
        Path(f"full{full}").write_text("2")
        assert norms(2, "--steps", 5, "--checkpoint_every", 2, name=f"on{full}") == [2, 2]
        (said,) = ranks.said()
        assert f"can't write runs/on{full}/checkpoint.json: File too large" in said
        assert "the one written before is whole; free some space" in said
        assert "Traceback" not in ranks.messages.read_text()
        Path(f"full{full}").unlink()
        assert checkpoints.read(f"runs/on{full}")["step"] == 2
        assert norms(2, "--steps", 5, name=f"on{full}") == [0, 0], ranks_messages(ranks)


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
    checkpointed(ranks)
    os.kill(numbers[2], signal.SIGKILL)
    begun = time.monotonic()
    assert sorted(ranks.wait(number) for number in numbers) == [-9, 2, 2, 2]
    assert time.monotonic() - begun < 60
    (said,) = ranks.said()
    assert "another process of this run has ended; the same command resumes" in said
    assert "Traceback" not in ranks.messages.read_text()
    done = checkpoints.read("runs/run")["step"]
    assert run(2, "--steps", done + 1) == [0, 0], ranks_messages(ranks)
    assert checkpoints.read("runs/run")["step"] == done + 1
    assert not list(Path("runs/run").glob("*.part"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_process_groups_stop_ranks_with_workers(signum, run, ranks):
    numbers = run.start(2, "--steps", 10**6, "--checkpoint_every", 2, "--workers", 1)
    checkpointed(ranks)
    for number in numbers:
        os.killpg(number, signum)
    assert [ranks.wait(number) for number in numbers] == [128 + signum] * 2, ranks_messages(ranks)
    stopped = re.findall(r"stopped at step (\d+) of \d+; the same command resumes", ranks_messages(ranks))
    done = checkpoints.read("runs/run")["step"]
    assert stopped == [str(done)] and not ranks.said()
    assert "Traceback" not in ranks.messages.read_text()
    assert run(2, "--steps", done + 1, "--workers", 1) == [0, 0], ranks_messages(ranks)


def test_a_killed_worker_ends_all_in_one_line(run, ranks):
    numbers = run.start(2, "--steps", 10**6, "--checkpoint_every", 2, "--workers", 1)
    checkpointed(ranks)
    (worker,) = Path(f"/proc/{numbers[1]}/task/{numbers[1]}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert [ranks.wait(number) for number in numbers] == [2, 2]
    (said,) = ranks.said()
    assert "a process that reads data was ended" in said and "the same command resumes" in said
    assert "Traceback" not in ranks.messages.read_text()


def until(true, ranks):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, ranks_messages(ranks)
        time.sleep(0.01)


def checkpointed(ranks):
    until(Path("runs/run/checkpoint.json").exists, ranks)


@pytest.mark.parametrize("moment", ["before it comes", "as they meet"])
def test_a_rank_that_is_killed_before_they_met_ends_the_others(moment, ranks):
    """Without torchrun, which would end them; see fsdp_jobs.hurried."""
    Path("lines.py").write_text(TASK)
    words = ["--task", "lines.py:Lines", "--fsdp", *RUN, *(["DIES"] if moment == "as they meet" else [])]
    port = ranks.port()
    numbers = [ranks.alone(rank, 2, port, *map(str, words), job="hurried") for rank in (1, 0)]
    if moment == "before it comes":
        os.kill(numbers[0], signal.SIGKILL)
    begun = time.monotonic()
    assert [ranks.wait(number) for number in numbers] == [-9, 2], ranks_messages(ranks)
    assert time.monotonic() - begun < 10
    (said,) = ranks.said()
    assert "the 2 processes did not meet (" in said and "a process has ended, or was not started" in said
    assert "Traceback" not in ranks.messages.read_text() and not Path("runs").exists()


@pytest.fixture
def torchrun(monkeypatch):
    """torchrun(*flags): one that starts train.py on two processes, as a person would; it ends with the test.
    """
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # building fused kernels takes longer than these runs
    Path("lines.py").write_text(TASK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, ROOT / "train.py"]
    started = []

    def start(*flags):
        started.append(process(*launch, "--fsdp", "--task", "lines.py:Lines", *RUN, *LOW[:2], *flags))
        return started[-1]

    yield start
    for child in started:
        child.terminate()  # ends its workers too
        child.communicate(timeout=60)


def worker(child, rank):
    """The number of the worker of this rank, of a torchrun that has started its workers."""
    found = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    (number,) = [n for n in found if f"RANK={rank}" in Path(f"/proc/{n}/environ").read_text().split("\0")]
    return int(number)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux alone tells the workers of torchrun")
def test_a_killed_worker_of_torchrun_ends_it_in_our_line_and_the_same_command_finishes(torchrun, ranks):
    words = ["--name", "run", "--steps", 120, "--checkpoint_every", 20]
    first = torchrun(*words)
    end = time.monotonic() + 200  # three processes import their libraries
    while not Path("runs/run/checkpoint.json").exists():
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    os.kill(worker(first, 1), signal.SIGKILL)
    begun = time.monotonic()
    _, said = first.communicate(timeout=60)
    assert first.returncode == 1 and time.monotonic() - begun < 30
    # as the survivor hears of it: by its connection, or by torchrun's SIGTERM; torchrun's page repeats it
    ours = r"^(?! ).*(another process of this run has ended|interrupted); the same command resumes"
    assert len(re.findall(ours, said, re.M)) == 1, said
    assert 20 <= checkpoints.read("runs/run")["step"] < 120
    again = ["--task", "lines.py:Lines", "--fsdp", *RUN, *LOW[:2], *words]
    assert ranks(2, None, *again) == [0, 0], ranks_messages(ranks)
    assert "120 steps in" in ranks.printed() and checkpoints.read("runs/run")["step"] == 120
    assert [row["step"] for row in cli.metrics()] == list(range(2, 121, 2))


def test_run_module_in_a_wrapper_takes_the_same_steps_under_ddp_and_fully_shard(ranks):
    differing = told(ranks, 2, "modules")
    assert len(differing) == 4 and not any(differing.values()), differing


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
        (["--compile"], "--compile with --fsdp: torch's compiler stops at each hook of fully_shard"),
        (["--nosuch", 1], "unrecognized arguments: --nosuch 1"),
        (["--task", "nosuch"], "nosuch"),
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


CAN_NOT = [
    "--fp8 --fp8_backend emulate",
    "--pure_bf16 --stochastic --sparse24 srste",
    "--bf16 --set generation=int8",
    "--set reduce=bf16 --set reduce_update=stochastic",
    "--grad_release",
    "--average_on cpu",
    "--states_on cpu",
    "--compile",
    "--optimizer muon",
    "--pure_bf16 --stochastic --optimizer adafactor",
    "--optimizer torch",
]


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


# ---- Parts -------------------------------------------------------------------------------------------------


def test_a_tree_of_values_comes_back_from_json():
    state = {"a": (1, 2.5, [None, True]), 3: {"x": torch.arange(3)}, "b": {"$odd": "name"}, "c": float("inf")}
    tensors = {}
    tree = json.loads(json.dumps(shards._apart(state, tensors)))
    assert_same(shards._together(tree, lambda leaf: tensors[leaf["$tensor"]]), state)


def test_a_plain_tensor_is_no_part():
    assert buckets.part_of(torch.zeros(3)) is None and fsdp.ranks_of(fsdp_jobs.build()) is None


# ---- On GPUs -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with NCCL")
@pytest.mark.parametrize("job, words", [("same_bits", [RECIPES[2]]), ("pieces", [])])
def test_two_gpus_train_to_the_bits_of_one(job, words):
    """As the ranks above do by gloo."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    given = map(json.dumps, [*words, "cuda", "told.json"])
    assert process(*launch, ROOT / "tests/fsdp_jobs.py", job, *given).wait(300) == 0
    found = json.loads(Path("told.json").read_text())
    assert found and not any(found.values()), found


def test_a_new_checkpoint_removes_old_ones_and_no_folder_of_the_users():
    new = "checkpoint-00000120"
    kept = [new, "checkpoint-00000100-backup", "checkpoint-1", "checkpoint-00000100.old", "best-00000100"]
    gone = ["00000100", "00000100-2", "00000120.part", "123456789"]
    for name in [*kept, *(f"checkpoint-{number}" for number in gone)]:
        Path(name).mkdir()
    shards._forget(Path("checkpoint.json").absolute(), Path(new).absolute())
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
