"""release.py: updates within backward have the bits of the ordinary step, and hold no gradient."""

import functools
import weakref

import cli
import common
import pytest
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
from torch.utils.checkpoint import checkpoint

from lowprec.optimizers.average import EMA
from lowprec.optimizers.build import build
from lowprec.optimizers.rounded import AdamW
from lowprec.parts.release import Release, Released
from lowprec.precision import Precision, recipe
from lowprec.watch.watch import Watch

eager = common.eager
OURS = ["adamw", "sgd", "lion", "adafactor", "muon"]


def twins(flags, **options):
    """(a run, the same run that releases)."""
    make = functools.partial(start, flags, weight_decay=0.1, averages=["0.9:bf16:stochastic"], seed=3)
    return (
        make(net(width=16), **options),
        make(net(width=16), **{k: v for k, v in options.items() if k != "accumulate"}, grad_release=True),
    )


# ---- The same bits -----------------------------------------------------------------------------------------


METHODS = [dict(sparse24="srste"), dict(sparse24="magnitude"), dict(fp8=True)]


@pytest.mark.parametrize("flags", METHODS, ids=str)
def test_methods_see_each_gradient(flags):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 1)

        def forward(self, x):
            for block in self.blocks:
                x = x + F.gelu(block(x))
            return self.head(x)

    runs, backend = [], {"fp8_backend": "emulate"} if "fp8" in flags else {}
    for on in (False, True):
        torch.manual_seed(0)
        r = recipe(pure_bf16=True, stochastic=True, **flags, **backend)
        runs.append(Precision(Blocks(), r, lr=1e-2, grad_release=on))
        for step in range(3):
            x = common.draw(8, 32, seed=step)
            runs[-1].backward(runs[-1](x).square().mean())
            runs[-1].step()
    assert equal(*runs)


@pytest.mark.parametrize("name", ["fp32", "stochastic", "stochastic opt8bit"])
def test_each_tensor_is_clipped_by_its_own_norm(name):
    plain, released = twins(name, clip_tensor=1e-3)
    assert all(
        abs(a["grad_norm"] - b["grad_norm"]) == 0
        for a, b in zip(steps(plain, measure=True), steps(released, measure=True), strict=True)
    )
    assert equal(plain, released)
    # SGD without momentum moves each tensor by lr times its clipped gradient; short ones are left
    run = start("fp32", optimizer="sgd", lr=1.0, momentum=0.0, clip_tensor=1e-3, grad_release=True)
    before = [p.detach().clone() for p in run.params]
    steps(run, 1, first=1)
    moved = [(p.detach() - old).norm().item() for p, old in zip(run.params, before, strict=True)]
    assert max(moved) == pytest.approx(1e-3, rel=1e-3) and sum(m > 0.99e-3 for m in moved) > 1
    assert min(moved) < 0.9e-3


def test_a_measured_step_says_so_before_its_forward():
    run = start("stochastic", grad_release=True)
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x), y))
    refused(lambda: run.step(measure=True), "observe(True)")


# ---- Nets of every kind ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table that is read at both ends, a layer that is used twice, blocks that may be computed again."""

    def __init__(self, again=None):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(2, 2)
        self.again = again

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            if self.again is None:
                x = x + F.gelu(self.layer(x))
            else:
                x = x + checkpoint(lambda x: F.gelu(self.layer(x)), x, use_reentrant=self.again)
        return self.head(x)


def tied(on, again=None, flags=None, count=4):
    torch.manual_seed(0)
    run = Precision(Tied(again), recipe(**(flags or RECIPES["stochastic"])), lr=1e-2, grad_release=on)
    ids = torch.randint(0, 16, (4, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        logits = run(ids[:, :-1])
        run.backward(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        run.step()
    return run


@pytest.mark.parametrize("again", [None, False])
@pytest.mark.parametrize("flags", [{}, RECIPES["stochastic opt4bit"]], ids=str)
def test_tied_weights_layers_used_twice_and_blocks_computed_again(again, flags):
    run = tied(True, again, flags)
    assert equal(tied(False, None, flags), run)
    assert run.optimizer.state[run.model.never.weight]["step"] == 0


def test_a_second_gradient_in_one_step_is_refused():
    run = start("stochastic", grad_release=True)
    (x, y) = batches(1)[0]
    run.backward(F.mse_loss(run(x), y))
    refused(lambda: run.backward(F.mse_loss(run(x), y)), "second gradient", "step()")
    refused(lambda: tied(True, again=True, count=1), "second gradient", "use_reentrant=False")


def test_a_weight_that_a_later_product_reads_ends_in_an_error_and_not_in_other_numbers():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):  # the second layer's weight is read, without a gradient of its own, before it
            return self.second(self.first(x) @ self.second.weight.detach())

    run = Precision(Read(), recipe(), grad_release=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.backward(run(torch.randn(3, 4)).square().mean())


def test_a_part_that_is_frozen_later_and_one_that_thaws():
    def trained(on):
        run = start("stochastic", grad_release=on)
        steps(run, 1)
        run.model.stem.requires_grad_(False)
        steps(run, 1)
        run.model.stem.requires_grad_(True)
        steps(run, 2)
        return run

    assert equal(trained(False), trained(True))


def test_no_gradient_at_all_is_refused_as_ever():
    run = start("fp32", grad_release=True)
    refused(run.step, "found no gradients")


# ---- In a loop of one's own --------------------------------------------------------------------------------


def test_removed_it_is_the_ordinary_step():
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), compiled=False)
    release = Release(optimizer)
    refused(lambda: Release(optimizer), "within backward already")
    release.remove()
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None and optimizer.released is None


@pytest.mark.parametrize("early", [True, False])
def test_a_watch_sees_what_it_sees_of_the_ordinary_step(early):
    found = []
    for on in (False, True):
        run = start("pure_bf16", lr=1e-4, grad_release=on)
        watch = Watch(run.model, run.optimizer, run.ema, every=2) if early else None
        steps(run, 1) if not early else None
        watch = watch or Watch(run.model, run.optimizer, run.ema, every=2)
        steps(run, 7, first=1)
        found.append((str(watch), watch.shares()))
        release = getattr(run.optimizer, "released", None)
        assert release is None or not release.hold or watch.due
    assert found[0] == found[1]


def test_a_watch_that_was_there_first_leaves_out_the_step_it_could_not_see():
    run = start("pure_bf16", lr=1e-4, grad_release=True)
    run.part(Released).release.remove()
    watch = Watch(run.model, run.optimizer, every=50)
    run.part(Released).release = Release(run.optimizer)
    steps(run, 2)
    assert watch.steps == 2 and watch.looks == 0 and "without a gradient" not in str(watch)


# ---- What it refuses ---------------------------------------------------------------------------------------


def test_an_optimiser_of_others_is_refused():
    said = "use adamw, sgd, lion, adafactor or muon"
    refused(lambda: start({}, grad_release=True, optimizer="torch"), said)


def test_compiled_and_distributed_nets_are_refused(monkeypatch):
    refused(lambda: Precision(torch.compile(net()), grad_release=True), "--compile")
    run = start("fp32", grad_release=True)
    with pytest.raises(Exception, match="--compile"):
        run.forward = torch.compile(run.model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    refused(lambda: steps(run, 1), "several processes")


def test_sparse_gradients_are_refused():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, ids):
            return self.table(ids)

    run = Precision(Table(), grad_release=True)
    refused(lambda: run.backward(run(torch.arange(3)).sum()), "sparse=False")


def test_a_parameter_that_comes_late_is_refused_and_keeps_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = AdamW(model[0].parameters(), lr=1e-2, compiled=False)
    Release(optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(torch.ones(2, 4)).sum().backward()
    refused(optimizer.step, "after grad_release was set up")


# ---- What others put in its place --------------------------------------------------------------------------


def test_a_state_that_was_cleared_begins_anew_and_a_parameter_of_another_shape_is_refused():
    found = []
    for released in (False, True):
        p = nn.Parameter(torch.ones(4, 4))
        optimizer = AdamW([p], lr=0.1, compiled=False)
        if released:
            Release(optimizer)
        for step in range(4):
            if step == 2:
                optimizer.state.clear()
            (p * (step - 0.5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(p.detach().clone())
    assert torch.equal(*found)
    p.data = torch.ones(400, 400)
    refused(lambda: p.sum().backward(), "is [400, 400], and was [4, 4]")


@pytest.mark.parametrize("look", [lambda o, p: None, lambda o, p: o.moment(p, "exp_avg")])
def test_a_moment_that_was_assigned_is_what_steps_even_where_somebody_looked_at_it(look):
    found = []
    for released in (False, True):
        p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        optimizer = AdamW([p, q], lr=0.1, compiled=False)
        if released:
            Release(optimizer)
        for _ in range(3):
            (p + 2 * q).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state[p]["exp_avg"] = torch.ones(4)
            look(optimizer, p)
        found.append((p.detach().clone(), optimizer.state_dict()["state"][1]["exp_avg"]))
    assert all(map(torch.equal, *found))


# ---- Memory ------------------------------------------------------------------------------------------------


def layers(count=6, width=128):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


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
    row = next(row for row in run.ledger().rows if row["site"] == "grads")
    assert row["bytes"] == 0 and "0.06 MiB" in row["why"], "one gradient"


# ---- What a GPU would wait for -----------------------------------------------------------------------------


class HostCopies(TorchDispatchMode):
    """Counts what a GPU's step would wait for: tensors made of numbers, and numbers read from tensors."""

    def __init__(self):
        super().__init__()
        self.made = self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func is torch.ops.aten.lift_fresh.default
        self.read += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def host_copies(count, flags, on=False):
    """(tensors made of numbers, numbers read) in the second step of `count` parameters and their average."""
    params = [nn.Parameter(common.draw(64, 65, seed=i).to(BF16)) for i in range(count)]  # enough for codes
    optimizer = build(flags.get("optimizer", "adamw"), params, recipe(**flags), lr=1e-3)
    average = EMA([(str(i), p) for i, p in enumerate(params)], 0.9, compiled=False)
    if on:
        Release(optimizer)
    for _ in range(2):
        with HostCopies() as copies:
            torch.cat([p.view(-1) for p in params]).sum().backward()
            optimizer.step()
            average.update()
        optimizer.zero_grad()
    return copies.made, copies.read


STEPS = ["stochastic", "kahan", "split", "stochastic opt8bit", "stochastic opt4bit", "fp8 moments"]
STEPS = {name: RECIPES[name] for name in STEPS}
STEPS |= {name: dict(RECIPES["stochastic"], optimizer=name) for name in OURS[1:]}


@pytest.mark.parametrize("name, on", [*((name, False) for name in STEPS), ("stochastic", True)])
def test_a_step_copies_a_fixed_number_of_tensors_from_the_host_and_reads_none(name, on):
    few, many = (host_copies(count, STEPS[name], on) for count in (2, 20))
    assert few == many == (4, 0), "a table of numbers and one of keys, of the step and of the average"


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


def test_where_an_average_is_kept():
    assert type(start("fp32", average_on="cpu").ema) is EMA  # beside weights that are there too
    refused(lambda: start("fp32", average_on="disk"), "choose from device, cpu")


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
@pytest.mark.parametrize("clip, on", [("clip_grad", False), ("clip_tensor", False), ("clip_tensor", True)])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_cuda_waits_for_nothing(name, clip, on):
    flags, wide = STEPS[name], net(width=32).cuda()  # wide enough for codes
    run = start(flags, wide, optimizer=flags.get("optimizer", "adamw"), grad_release=on, **{clip: 1.0})
    common.waits_for_nothing(run)


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


def test_several_processes_are_refused(folder, capsys, monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert cli.quick("--grad_release", *PURE) == 2
    assert "one process" in cli.one_line(capsys) and not list(tmp_path.iterdir())
