"""Tasks: closed-form oracles in place of nets, randomness from the given generator alone, and the guards on
schedule, sampler and timesteps.
"""

import math

import common
import pytest
import torch
from generating import FLAGS, Recorder, batch, make, noise_from, rmse, velocity_to

import models
import strategies
from lowprec.errors import Refused
from lowprec.precision import Precision, recipe
from tasks import data
from tasks.diffusion import DDPM, RFlow
from tasks.generation import BINS, TIMESTEPS
from tasks.task import Rng, Task, to_device

eager = common.eager


@pytest.fixture(scope="module")
def discs():
    return data.load("synthetic", "masks", image_size=16)


# ---- Randomness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_all_randomness_comes_from_the_given_generator(kind, digits):
    task, net = make(kind, digits, label_dropout=0.5), Recorder(0.1)
    before = torch.get_rng_state()
    first = task.loss(net, batch(digits), Rng(1), 0)
    torch.manual_seed(99)
    assert torch.equal(first, task.loss(net, batch(digits), Rng(1), 0))
    assert not torch.equal(first, task.loss(net, batch(digits), Rng(2), 0))
    assert (
        torch.equal(net.x[0], net.x[1])
        and torch.equal(net.t[0], net.t[1])
        and torch.equal(net.labels[0], net.labels[1])
    )
    torch.set_rng_state(before)
    task.loss(net, batch(digits), Rng(1), 0)
    task.loss_by_timestep(net, *batch(digits), Rng(1))
    task.preview(net, Rng(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [RFlow, DDPM])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_label_dropout(kind, share, digits):
    task, net = make(kind, digits, label_dropout=share), Recorder()
    images, labels = batch(digits, 1000)
    task.loss(net, (images, labels), Rng(3), 0)
    dropped = net.labels[0] == digits.num_classes
    assert float(dropped.float().mean()) == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)
    assert torch.equal(net.labels[0][~dropped], labels[~dropped])


def test_how_timesteps_are_drawn(digits):
    t = make(RFlow, digits).draw_timesteps(Rng(0), 20000)
    assert t.min() >= 0 and t.max() < TIMESTEPS
    assert float(t.mean()) == pytest.approx(500, abs=8) and float(t.std()) == pytest.approx(
        TIMESTEPS / math.sqrt(12), abs=5
    )
    logit = torch.logit(
        make(RFlow, digits, timestep_sampling="logit-normal").draw_timesteps(Rng(0), 20000) / TIMESTEPS
    )
    assert float(logit.mean()) == pytest.approx(0, abs=0.03) and float(logit.std()) == pytest.approx(
        1, abs=0.03
    )
    t = make(DDPM, digits).draw_timesteps(Rng(0), 20000)
    assert not t.is_floating_point() and t.min() == 0 and t.max() == TIMESTEPS - 1


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_the_loss_by_timestep_is_repeatable_and_each_bin_its_own(kind, digits):
    task, net = make(kind, digits), Recorder(0.2)
    first = task.loss_by_timestep(net, *batch(digits), Rng(5))
    assert len(first) == BINS == 10 and all(math.isfinite(value) for value in first)
    assert (
        task.loss_by_timestep(net, *batch(digits), Rng(5))
        == first
        != task.loss_by_timestep(net, *batch(digits), Rng(6))
    )
    for k, t in enumerate(net.t[:BINS]):
        assert k * 100 <= t.min() and t.max() < (k + 1) * 100


# ---- Guidance ----------------------------------------------------------------------------------------------


def test_guidance_is_null_plus_w_times_the_difference(digits):
    calls = []

    def net(x, t, labels):
        calls.append(len(x))
        return torch.where(labels == digits.num_classes, 1.0, 2.0 + labels)[:, None, None, None].expand_as(x)

    task, (images, labels) = make(RFlow, digits), batch(digits, 6)
    t = torch.full((6,), 300.0)

    def want(w):
        return (1 + w * (2 + labels - 1))[:, None, None, None].expand_as(images).float()

    for w in (0.0, 0.5, 1.0, 3.0):
        torch.testing.assert_close(task.predict(net, images, t, labels, guidance=w), want(w))
    assert calls == [12, 12, 6, 12]  # a weight of 1 needs no second half
    noise = torch.zeros_like(images)
    torch.testing.assert_close(make(RFlow, digits, guidance=3.0).sample(net, labels, noise, 4), want(3.0))


# ---- Rectified flow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("velocity,sign", [("clean-noise", 1.0), ("noise-clean", -1.0)])
@pytest.mark.parametrize("steps", [1, 7])
def test_rflow_returns_the_only_data_point(velocity, sign, steps, digits):
    task, (images, labels) = make(RFlow, digits, velocity=velocity), batch(digits, 10)
    point = images[:1]
    noise = Rng(0).normal(10, *point.shape[1:])
    assert rmse(task.sample(velocity_to(point, sign), labels, noise, steps), point.expand_as(noise)) < 1e-5
    # the same field is what training asks for; the other sign is not
    exact = task.errors(
        velocity_to(point, sign), point.expand_as(noise), labels, noise, torch.full((10,), 400.0)
    )
    assert float(exact.max()) < 1e-8
    assert (
        float(
            task.errors(
                velocity_to(point, -sign), point.expand_as(noise), labels, noise, torch.full((10,), 400.0)
            ).mean()
        )
        > 1
    )


def test_a_bf16_sampler_misses_the_end_and_fp32_does_not(digits):
    images, labels = batch(digits, 16)
    noise = Rng(0).normal(*images.shape)

    def residual(sites, steps):
        def net(x, t, labels):
            return images - noise  # a constant velocity: any number of steps ends on the images

        return rmse(make(RFlow, digits, sites).sample(net, labels, noise, steps), images) / rmse(
            images, noise
        )

    assert max(residual([], steps) for steps in (10, 100, 1000)) < 1e-4
    few, many, most = (residual(["sampler=bf16"], steps) for steps in (10, 100, 1000))
    assert 0.002 < few < 0.02 and 0.03 < many < 0.15 and most > 0.5


def test_the_trace_holds_the_ranges_of_every_step(digits):
    task, trace = make(RFlow, digits), []
    noise = Rng(0).normal(10, 1, 8, 8)
    task.sample(Recorder(0.5), torch.zeros(10, dtype=torch.long), noise, 4, trace)
    assert [row["t"] for row in trace] == [1000, 750, 500, 250, 0]
    assert (
        trace[0]["x_min"] == float(noise.min())
        and trace[0]["prediction_max"] == 0.5
        and "prediction_max" not in trace[-1]
    )


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_timesteps_reach_the_net_in_the_dtype_of_their_site(kind, digits):
    values = []
    for sites in ([], ["timesteps=bf16"]):
        net = Recorder()
        task = make(kind, digits, sites)
        images, labels = batch(digits, 1000)
        task.loss(net, (images, labels), Rng(0), 0)
        task.sample(net, labels[:2], images[:2], 5)
        assert {t.dtype for t in net.t} == {task.recipe.dtype("timesteps")}
        values.append(net.t[0].float())
    exact, rounded = values
    assert not torch.equal(exact, rounded) and len(rounded.unique()) < len(exact.unique())
    assert 0.5 < float((exact - rounded).abs().max()) <= 2


# ---- DDPM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 10, 50])
def test_ddim_returns_the_only_data_point(steps, digits):
    task, (images, labels) = make(DDPM, digits), batch(digits, 10)
    noise = Rng(0).normal(*images.shape)
    assert (
        rmse(task.sample(noise_from(images[:1], task), labels, noise, steps), images[:1].expand_as(noise))
        < 1e-3
    )


def test_ddpm_asks_for_the_noise(digits):
    task, (images, labels) = make(DDPM, digits, min_snr=0.0), batch(digits, 10)
    noise, t = Rng(0).normal(*images.shape), torch.arange(10) * 100 + 50
    assert float(task.errors(noise_from(images, task), images, labels, noise, t).max()) < 1e-4
    torch.testing.assert_close(task.errors(Recorder(), images, labels, noise, t), noise.square())


@pytest.mark.parametrize("gamma", [0.0, 1.0, 5.0])
def test_min_snr_weights(gamma, digits):
    task, (images, labels) = make(DDPM, digits, min_snr=gamma), batch(digits, 8)
    noise, t = Rng(0).normal(*images.shape), torch.tensor([0, 1, 10, 100, 250, 500, 900, 999])
    plain = task.errors(Recorder(), images, labels, noise, t, weighted=False)
    ratio = (task.errors(Recorder(), images, labels, noise, t) / plain).mean((1, 2, 3))
    # MONAI's linear schedule, written out: betas from 1e-4 to 0.02
    alpha = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, TIMESTEPS, dtype=torch.float64), 0)[t]
    snr = alpha / (1 - alpha)
    want = (
        torch.minimum(snr, torch.tensor(gamma, dtype=torch.float64)) / snr
        if gamma
        else torch.ones(8, dtype=torch.float64)
    )
    torch.testing.assert_close(ratio.double(), want, rtol=1e-3, atol=0)


# ---- The guard ---------------------------------------------------------------------------------------------


def test_one_bf16_call_ruins_the_schedule_for_good(digits):
    """What the guard is for: scheduler=bf16 calls MONAI as a model in bf16 would."""
    task, (images, labels) = make(DDPM, digits, ["scheduler=bf16"]), batch(digits, 16)
    noise, oracle = Rng(0).normal(*images.shape), noise_from(images[:1], task)
    assert rmse(task.sample(oracle, labels, noise, 1000), images[:1].expand_as(noise)) < 1e-3
    before = task.scheduler.alphas_cumprod.clone()
    task.loss(Recorder(), (images, labels), Rng(0), 0)
    assert task.scheduler.alphas_cumprod.dtype == torch.bfloat16
    assert not torch.equal(task.scheduler.alphas_cumprod.float(), before)
    assert (1 - task.scheduler.alphas_cumprod[:2]).max() == 0  # no noise is left in the first timesteps
    after = task.sample(oracle, labels, noise, 1000)
    assert not after.isfinite().all() or rmse(after, images[:1].expand_as(noise)) > 0.01


@pytest.mark.parametrize("flags", [dict(pure_bf16=True, stochastic=True), dict(bf16=True)])
def test_the_default_recipes_leave_the_schedule_alone(flags, digits):
    r = recipe(**flags, more=DDPM.sites)
    task = DDPM(digits, r, FLAGS.typed({"sample_steps": 3}))
    torch.manual_seed(0)
    run = Precision(models.GENERATIVE["dit"](1, 10, 8), r)

    def buffers():
        return {
            name: value.clone()
            for name, value in vars(task.scheduler).items()
            if torch.is_tensor(value) and name != "timesteps"
        }

    before, (images, labels) = buffers(), batch(digits, 16)
    assert before["alphas_cumprod"].dtype == torch.float32
    for seed in range(3):
        run.backward(task.loss(run, (images, labels), Rng(seed), 0))
        run.step()
    task.preview(run.generator(), Rng(0))
    task.loss_by_timestep(run.generator(), images, labels, Rng(0))
    for name, value in buffers().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name


# ---- What a task decides -----------------------------------------------------------------------------------


def test_weight_decay_spares_norms_biases_and_embeddings(digits):
    task = make(RFlow, digits, model="dit", weight_decay=0.1)
    net = task.net()
    shrunk, spared = task.groups(net)
    names = {p: name for name, p in net.named_parameters()}
    assert "weight_decay" not in shrunk and spared["weight_decay"] == 0
    assert len(shrunk["params"]) + len(spared["params"]) == len(names)
    kept = {names[p] for p in spared["params"]}
    assert {"y_embed.weight", "x_embed.weight", "blocks.0.mlp.0.bias"} <= kept
    assert "blocks.0.mlp.0.weight" not in kept and "final.linear.weight" not in kept
    unet = make(RFlow, digits, weight_decay=0.1)
    net = unet.net()
    spared = {id(p) for p in unet.groups(net)[1]["params"]}
    assert all(id(m.weight) in spared for m in net.modules() if isinstance(m, torch.nn.GroupNorm))
    assert make(RFlow, digits, weight_decay=0.1, weight_decay_on="all").groups(net) is None
    assert make(RFlow, digits).groups(net) is None  # one group: the numbers of runs without decay stay


def test_tasks_are_found_by_name_or_in_a_file(tmp_path):
    assert strategies.find_task("rflow") is RFlow
    file = tmp_path / "mine.py"
    file.write_text("from tasks import Task\nclass Mine(Task):\n    pass\nother = 3\n")
    assert issubclass(strategies.find_task(f"{file}:Mine"), Task)
    assert strategies.find_task(f"{file}:Mine") is strategies.find_task(f"{file}:Mine")
    for spec, said in (
        ("paint", "invalid choice"),
        (f"{file}", "invalid choice"),
        (f"{file}:other", "no class other"),
        (f"{file}:Yours", "no class Yours"),
        (f"{file}:", "none was named"),
        (f"{tmp_path}/yours.py:Mine", "no file"),
    ):
        with pytest.raises(Refused, match=said):
            strategies.find_task(spec)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):  # a mistake in the file shows where it is
        strategies.find_task(f"{tmp_path}/broken.py:Mine")


def test_a_derived_task_may_change_a_default(tmp_path):
    file = tmp_path / "guided.py"
    row = 'Flag("guidance", 3.0, "stronger", "generation", kind="draw", type=float)'
    imports = "from tasks import Flag\nfrom tasks.diffusion import RFlow\n"
    file.write_text(f"{imports}class Guided(RFlow):\n    flags = ({row},)\n")
    run = strategies.settle({"task": f"{file}:Guided"})
    table, config = run.table, run.config
    assert config.guidance == 3.0 and config.label_dropout == 0.1 and config.velocity == "clean-noise"
    own = list(strategies.flag_table("rflow").defaults())
    assert list(table.defaults()) == own  # in its place, and nothing twice
    assert strategies.flag_table().defaults()["guidance"] == 1.0


def test_batches_of_any_nest_reach_the_device():
    x = torch.ones(2)
    moved = to_device({"a": [x, (x,)], "b": x, "c": 3}, "meta")
    assert moved["a"][1][0].device.type == moved["b"].device.type == "meta" and moved["c"] == 3
