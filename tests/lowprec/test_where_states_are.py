"""offload.py: where moments lie, and where not."""


import cli
import common
import pytest
import test_states_on_cpu
import torch
import torch.nn.functional as F
from common import RECIPES, batches, net, refused, start
from torch import nn

import train
from benchmarks import memory
from lowprec.parts import offload
from lowprec.parts.offload import Offload, Traffic, bytes_kept_away, offloaded
from lowprec.precision import Precision, recipe

eager = common.eager
Late = test_states_on_cpu.Late
small_buckets = test_states_on_cpu.small_buckets


# ---- Where it is, and where not ----------------------------------------------------------------------------


def test_where_moments_are_kept():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert offloaded("cpu", cpu) is None and offloaded("device", cuda) is None
    assert start("fp32", states_on="cpu").away is None, "on a CPU they are there already"
    refused(lambda: start("fp32", states_on="disk"), "device or on the cpu")


@pytest.mark.parametrize("name", ["stochastic", "split opt8bit"])
def test_a_plan_says_what_the_gpu_holds(name):
    with torch.device("meta"):
        model = net(width=256)
    run = start(name, model, states_on="cpu")
    n = sum(p.numel() for p in run.params)
    away, once = bytes_kept_away(run.optimizer)
    ledger, other = run.ledger(), start(name, model).ledger()
    assert ledger.state_bytes == other.state_bytes and other.away is None
    assert ledger.away == (away / n, once)
    both = sum(run.optimizer.nbytes()[moment] for moment in ("exp_avg", "exp_avg_sq"))
    assert both - 2**14 <= away <= both, "but for tables of codes, which all tensors share"
    assert f"{away / n:.2f} of them in the memory of the CPU" in str(ledger)
    assert "on_cpu" in "".join(ledger.json()) and "on_cpu" not in "".join(other.json())
    for row in ledger.rows:
        assert ("memory of the CPU" in row["why"]) == row["site"].startswith("exp_avg")


def test_bench_memory_counts_both_memories():
    args = type("Args", (), dict(device=torch.device("cpu")))
    plain, away = (
        memory.allocated_row("dit:tiny:8:2", dict(memory.PURE_BF16_STOCHASTIC, **more), args)
        for more in ({}, dict(states_on="cpu"))
    )
    assert away["bytes_per_parameter"] == plain["bytes_per_parameter"] == away["ledger"] == 8
    assert away["on_cpu"] == 4 and "on_cpu" not in plain and 0 < away["rooms"] < 4.01
    assert memory.OFFLOADED in memory.WAYS_TO_WRITE
    table = memory.memory_table({"": plain, "--pure_bf16 --stochastic --states_on cpu": away})
    assert "| 8.00, 4.00 of them on the GPU |" in table


PURE = ("--pure_bf16", "--stochastic")
folder = cli.in_a_folder_of_its_own


def test_the_command_says_that_a_cpu_needs_none(capsys):
    assert cli.quick(*PURE, name="plain") == 0
    assert cli.quick(*PURE, name="run", steps=2) == 0
    capsys.readouterr()
    assert cli.quick(*PURE, "--states_on", "cpu", name="run") == 0, "it may differ when a run goes on"
    assert "--states_on cpu changes nothing: the weights are on the CPU too" in capsys.readouterr().out
    cli.assert_same(*(cli.checkpoint(name)["precision"] for name in ("plain", "run")))
    assert cli.command("--dry_run", *PURE, "--states_on", "cpu") == 0
    assert "4.00 of them in the memory of the CPU" in capsys.readouterr().out


@pytest.mark.parametrize("recipe_", ["stochastic", "split"])
def test_a_whole_run_with_moments_away(recipe_, monkeypatch, small_buckets):
    """The command as on a GPU, but for the device."""
    flags = [*PURE] if recipe_ == "stochastic" else ["--pure_bf16", "--master", "split"]
    assert cli.quick(*flags, name="plain") == 0
    made = []

    def everywhere(where, device):
        made.append(Offload(Late()) if where == "cpu" else None)
        return made[-1]

    monkeypatch.setattr(offload, "offloaded", everywhere)
    assert cli.quick(*flags, "--states_on", "cpu", name="run", steps=2) == 0
    assert cli.quick(*flags, "--states_on", "cpu", name="run") == 0
    assert all(made) and made[0].traffic.count > 10
    cli.assert_same(*(cli.checkpoint(name)["precision"] for name in ("plain", "run")))


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--states_on", "disk"), "invalid choice"),
        (("--states_on", "cpu", "--grad_release", "--clip_grad", 0), "--opt8bit"),
        (("--states_on", "cpu", "--optimizer", "torch"), "muon"),
    ],
)
def test_the_command_refuses_in_one_line(flags, said, capsys, tmp_path):
    assert cli.quick(*flags) == 2
    assert said in cli.one_line(capsys) and not list(tmp_path.iterdir())


def test_what_else_is_refused():
    refused(lambda: start("pure_bf16", states_on="cpu", optimizer="torchastic"), "torchastic", "adamw")
    refused(lambda: start("fp32", states_on="cpu", grad_release=True), "leave one out")


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp16"])
def test_steps_on_cuda_have_the_same_bits(name, small_buckets):
    runs = [start(name, net(width=16).cuda(), lr=1e-2, states_on=where) for where in ("device", "cpu")]
    for run in runs:
        for x, y in batches(8, device="cuda"):
            run.backward(F.mse_loss(run(x), y))
            run.step()
    runs[1].optimizer.state_dict()
    for p, q in zip(*(run.params for run in runs), strict=True):
        assert torch.equal(p, q)
        for key, value in runs[0].optimizer.state[p].items():
            own = runs[1].optimizer.state[q][key]
            assert value == own if key == "step" else torch.equal(value.cpu(), own.cpu())
            assert key == "step" or own.is_pinned() == key.startswith("exp_avg")


@pytest.mark.gpu
def test_the_gpu_holds_two_buckets_within_a_step_and_none_after():
    def peak(where):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
        run = Precision(model, recipe(), lr=1e-3, states_on=where)
        run.averages = {}
        for _ in range(2):
            run.backward(run(torch.ones(2, 2048, device="cuda")).square().mean())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    (there, after), (away, after_away) = peak("device"), peak("cpu")
    bucket = 2048 * 2048 * 8
    assert after - after_away > 7.9 * bucket and there - away > 5.5 * bucket


@pytest.mark.gpu
def test_a_step_on_cuda_waits_for_nothing():
    run = start("stochastic opt8bit", net(width=16).cuda(), states_on="cpu")
    assert isinstance(run.away.traffic, Traffic)
    for step, (x, y) in enumerate(batches(3, device="cuda")):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            run.backward(F.mse_loss(run(x), y))
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_command_on_cuda(capsys):
    assert cli.quick(*PURE, "--device", "cuda", name="plain") == 0
    assert cli.quick(*PURE, "--device", "cuda", "--states_on", "cpu", name="run", steps=2) == 0
    assert cli.quick(*PURE, "--device", "cuda", "--states_on", "cpu", name="run") == 0
    assert "in the memory of the CPU" in capsys.readouterr().out
    assert train.FLAGS["states_on"].kind == "machine"
