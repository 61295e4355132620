"""release.py: what is held, small tensors, averages on the CPU, the command."""

import functools
import weakref

import cli
import common
import pytest
import test_release
import torch
import torch.nn.functional as F
from common import (
    BF16,
    RECIPES,
    batches,
    equal,
    moved_to_the_cpu,
    net,
    refused,
    same,
    start,
    steps,
    through_a_file,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.optimizers.average import EMA, OnCPU, average_kind
from lowprec.optimizers.build import build
from lowprec.optimizers.rounded import AdamW
from lowprec.parts.release import Release, Released
from lowprec.precision import Precision, recipe

eager = common.eager
Allocations = test_release.Allocations
OURS = test_release.OURS
adamw = test_release.adamw


# ---- Memory ------------------------------------------------------------------------------------------------


def layers(count=6, width=128):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@pytest.mark.parametrize("states, bytes_", [("opt8bit", 4.03), ("opt4bit", 3.06)])
def test_bytes_a_parameter_as_allocated(states, bytes_):
    pytest.importorskip({"opt8bit": "bitsandbytes", "opt4bit": "torchao"}[states])
    measured(states, False)  # makes the tables that all optimisers share
    ordinary, _ = measured(states, False)
    released, ledger = measured(states, True)
    assert ordinary == pytest.approx(bytes_ + 2, abs=0.02) and released == pytest.approx(bytes_, abs=0.02)
    assert ledger.state_bytes == pytest.approx(bytes_, abs=0.03), "with tables of codes, of 2 KB"
    row = next(row for row in ledger.rows if row["site"] == "grads")
    assert row["bytes"] == 0 and "freed within backward" in row["why"] and "0.03 MiB" in row["why"]


def measured(states, on):
    """(bytes a parameter that are held after backward, but for the average; the ledger)."""
    with Allocations() as meter:
        r = recipe(pure_bf16=True, stochastic=True, **{states: True})
        run = Precision(layers(), r, grad_release=on, lr=1e-4)
        for _ in range(2):
            loss = run(torch.ones(2, 128)).square().mean()
            run.backward(loss)
            meter.mark("after backward")
            run.step()
    average = sum(t.nbytes for t in run.ema.shadow.values())
    return (meter.held["after backward"] - average) / sum(p.numel() for p in run.params), run.ledger()


def test_one_gradient_is_there_at_a_time():
    run, alive, most = Precision(layers(), recipe(), grad_release=True), weakref.WeakSet(), 0
    release = run.part(Released).release
    update = release.gradient

    def seen(p):
        nonlocal most
        alive.add(p.grad)
        most = max(most, len(alive))
        return update(p)

    release.gradient = seen
    run.observe(True)  # telemetry holds none either
    run.backward(run(torch.ones(2, 128)).square().mean())
    assert most <= 2 and not len(alive)
    run.step(measure=True)


# ---- Small tensors -----------------------------------------------------------------------------------------


class Small(TorchDispatchMode):
    """Counts the tensors below 1 KB that are made, each memory once."""

    def __init__(self):
        super().__init__()
        self.count, self.kept, self.known = 0, [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        given = {t.untyped_storage()._cdata for t in leaves if torch.is_tensor(t)}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...)
            given = set()
        for t in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(t) and t.untyped_storage().nbytes() < 1024:
                if t.untyped_storage()._cdata not in self.known | given:
                    self.count += 1
                    self.kept.append(t)  # so that no address is used again
                    self.known.add(t.untyped_storage()._cdata)
        return out


def small_tensors(count, make, on=False):
    """How many one step of `count` parameters and its average make."""
    params = [nn.Parameter(common.draw(40, 40, seed=i).to(BF16)) for i in range(count)]
    optimizer = make(params)
    average = EMA([(str(i), p) for i, p in enumerate(params)], 0.9, compiled=False)
    if on:
        Release(optimizer)
    found = []
    for _ in range(2):
        for p in params if not on else ():
            p.grad = torch.ones_like(p)
        with Small() as small:
            if on:
                torch.cat([p.view(-1) for p in params]).sum().backward()
            optimizer.step()
            average.update()
        found.append(small.count)
    return found[-1]


MAKES = {
    "stochastic": functools.partial(adamw, compiled=False),
    "split": functools.partial(AdamW, master="split", compiled=False),
    "fp32 moments": functools.partial(AdamW, compiled=False),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_step_makes_a_fixed_number_of_small_tensors(name):
    few, many = (small_tensors(count, MAKES[name]) for count in (10, 400))  # one bucket, and three
    assert few == many == 4, "a table of numbers and one of keys, of the step and of the average"


@pytest.mark.parametrize("name", MAKES)
def test_so_does_a_step_within_backward(name):
    few, many = (small_tensors(count, MAKES[name], on=True) for count in (10, 100))
    assert many <= few == 4 + 2, "as many, and two of the loss; a long table is not small"


class HostCopies(TorchDispatchMode):
    """Counts what a GPU's step would wait for: tensors made of numbers, and numbers read from tensors."""

    def __init__(self):
        super().__init__()
        self.made = self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func is torch.ops.aten.lift_fresh.default
        self.read += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def host_copies(count, flags):
    """(tensors made of numbers, numbers read) in the second step of `count` parameters."""
    params = [nn.Parameter(common.draw(64, 65, seed=i).to(BF16)) for i in range(count)]  # enough for codes
    optimizer = build(flags.get("optimizer", "adamw"), params, recipe(**flags), lr=1e-3)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        with HostCopies() as copies:
            optimizer.step()
    return copies.made, copies.read


STEPS = ["stochastic", "kahan", "split", "stochastic opt8bit", "stochastic opt4bit", "fp8 moments"]
STEPS = {name: RECIPES[name] for name in STEPS}
STEPS |= {name: dict(RECIPES["stochastic"], optimizer=name) for name in OURS[1:]}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_copies_a_fixed_number_of_tensors_from_the_host_and_reads_none(name):
    few, many = (host_copies(count, STEPS[name]) for count in (2, 20))
    assert few == many == (2, 0), "a table of numbers and one of keys"


# ---- Averages on the CPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, release", [("kahan", False), ("split opt8bit", True), ("bf16 average", True)])
def test_an_average_on_the_cpu_has_the_same_bits(name, release):
    make = functools.partial(start, name, lr=1e-2, averages=["0.9:bf16:stochastic"], ema_warmup=True)
    plain, ours = make(net()), moved_to_the_cpu(make(net(), grad_release=release))
    steps(plain), steps(ours)
    assert ours.ema.behind and ours.ema.traffic.copies == len(ours.ema._buckets) + 4
    assert equal(plain, ours) and not ours.ema.behind
    assert steps(plain, 1, 4, measure=True) == steps(ours, 1, 4, measure=True)
    again = moved_to_the_cpu(make(net(), grad_release=release))
    steps(again, 1)
    again.load_state_dict(through_a_file(ours.state_dict()))
    steps(plain, 2, 5), steps(again, 2, 5)
    assert equal(plain, again)
    for key, value in plain.weights("ema").items():
        assert same(value, again.weights("ema")[key])
    x = batches(1)[0][0]
    assert same(plain.generator()(x), again.generator()(x))


def test_a_write_that_does_not_wait_would_be_seen():
    plain, ours = start("fp32", lr=1e-2), moved_to_the_cpu(start("fp32", lr=1e-2))
    ours.before_writing = lambda: None
    steps(plain), steps(ours)
    assert not same(plain.ema.shadow["stem.weight"], ours.ema.shadow["stem.weight"])


def test_where_an_average_is_kept():
    assert average_kind("cpu", torch.device("cuda")) is OnCPU
    assert average_kind("cpu", torch.device("cpu")) is EMA is average_kind("device", torch.device("cuda"))
    refused(lambda: start("fp32", average_on="disk"), "device or on the cpu")


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stochastic", "stochastic opt8bit", "split"])
def test_released_steps_on_cuda_have_the_same_bits(name):
    runs = [start(name, net(width=16).cuda(), lr=1e-2, grad_release=on) for on in (False, True)]
    for run in runs:
        for x, y in batches(4, device="cuda"):
            run.backward(F.mse_loss(run(x), y))
            run.step()
    assert equal(*runs)


@pytest.mark.gpu
def test_an_average_on_the_cpu_follows_one_on_cuda():
    runs = [start("stochastic", net().cuda(), lr=1e-2, average_on=where) for where in ("device", "cpu")]
    for run in runs:
        for x, y in batches(8, device="cuda"):
            run.backward(F.mse_loss(run(x), y))
            run.step()
    for key, value in runs[0].ema.shadow.items():
        own = runs[1].ema.shadow[key]
        assert own.device.type == "cpu"
        torch.testing.assert_close(own, value.cpu(), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("clip, on", [("grad", False), ("tensor", False), ("tensor", True)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_cuda_waits_for_nothing(name, clip, on):
    flags, options = STEPS[name], {f"clip_{clip}": 1.0, "grad_release": on}
    model = net(width=32).cuda()  # large enough for codes
    run = start(flags, model, optimizer=flags.get("optimizer", "adamw"), **options)
    made = batches(3, device="cuda")
    for step, (x, y) in enumerate(made):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            run.backward(F.mse_loss(run(x), y))
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- The command -------------------------------------------------------------------------------------------

folder = cli.in_a_folder_of_its_own
PURE = ("--pure_bf16", "--stochastic", "--clip_tensor", 1)


def test_the_command_and_its_resume(folder, capsys):
    assert cli.quick(*PURE, name="plain") == 0
    assert cli.quick(*PURE, "--grad_release", name="run", steps=2) == 0
    assert "freed within backward" in capsys.readouterr().out
    assert cli.quick(*PURE, "--grad_release", "--average_on", "cpu", name="run") == 0
    assert "--average_on cpu" in capsys.readouterr().out
    states = [cli.checkpoint(name)["precision"] for name in ("plain", "run")]
    cli.assert_same(*states)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in cli.metrics("run")]
    plain = [{k: v for k, v in row.items() if k != "seconds"} for row in cli.metrics("plain")]
    assert [row.keys() for row in rows] == [row.keys() for row in plain]
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(r["loss"], r["grad_norm"]) for r in plain]


@pytest.mark.parametrize(
    "flags, said",
    [
        ((), "--clip_tensor 1"),
        (("--clip_grad", 0, "--accumulate", 2), "--accumulate 1"),
        (("--clip_grad", 0, "--compile"), "--compile"),
        (("--clip_grad", 0, "--fp16"), "--bf16"),
        (("--clip_grad", 1, "--clip_tensor", 1), "exclude each other"),
        (("--clip_grad", 0, "--optimizer", "torch"), "muon"),
    ],
)
def test_the_command_refuses_in_one_line(folder, flags, said, capsys, tmp_path):
    assert cli.quick("--grad_release", *flags) == 2
    assert said in cli.one_line(capsys) and not list(tmp_path.iterdir())


def test_several_processes_are_refused(folder, capsys, monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert cli.quick("--grad_release", *PURE) == 2
    assert "one process" in cli.one_line(capsys) and not list(tmp_path.iterdir())
