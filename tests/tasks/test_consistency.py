"""Consistency models: the boundary, the solution as a fixed point, the target average in every dtype,
sampling in few steps, a teacher's steps.
"""


import cli
import common
import pytest
import torch
from cli import (
    assert_same,
    checkpoint,
    metrics,
    quick,
    summary,
)
from common import moved_to_the_cpu, same
from generating import batch, make, velocity_to

import strategies
import train
from lowprec.precision import Precision, recipe
from tasks.consistency import HUBER_C, Consistency, fresh_noise
from tasks.generation import TIMESTEPS
from tasks.task import Rng
from trainer import Trainer

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

CONSISTENCY = ["--task", "consistency"]


def learn(*flags, name="run", steps=4):
    return quick(*CONSISTENCY, *flags, name=name, steps=steps)


class Small(torch.nn.Module):
    """A net like the task's in little: a velocity from x, t and the label."""

    def __init__(self):
        super().__init__()
        self.net, self.embed = common.net(1), torch.nn.Embedding(11, 1)

    def forward(self, x, t, labels):
        return self.net(x, t) + self.embed(labels)[:, :, None, None]


def running(task, flags=(), **recipe_flags):
    """A Precision of Small in the task's recipe, with the averages that it asks for."""
    torch.manual_seed(3)
    task.recipe = recipe(more=Consistency.sites, sites=flags, **recipe_flags)
    return Precision(Small(), task.recipe, lr=1e-2, averages=list(task.averages().values()))


def steps(task, run, digits, count):
    for step in range(count):
        run.backward(task.loss(run, batch(digits, 8), Rng(step), step))
        yield run.step()


# ---- The function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("velocity", ["clean-noise", "noise-clean"])
def test_the_end_of_a_clean_image_is_itself_whatever_the_net_says(velocity, digits):
    task, x = make(Consistency, digits, velocity=velocity), batch(digits)[0]
    labels, start = torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    for net in (Small(), lambda x, t, labels: 1e4 * torch.ones_like(x)):
        with torch.no_grad():
            assert same(task.end(net, x, labels, start), x)
            assert not same(task.end(net, x, labels, start + 1), x)


@pytest.mark.parametrize("velocity", ["clean-noise", "noise-clean"])
@pytest.mark.parametrize("flags", [{}, {"perceptual": 0.5}, {"intervals": 1}, {"intervals": 320}])
def test_the_solution_of_one_image_is_a_fixed_point_of_the_loss(flags, velocity, digits):
    """All paths of a set that holds one image end there: its exact velocity makes f constant, the loss 0."""
    task, point = make(Consistency, digits, velocity=velocity, **flags), batch(digits, 1)[0]
    held = point.expand(64, -1, -1, -1), torch.zeros(64, dtype=torch.int64)
    exact = velocity_to(point, task.sign)

    def net(x, t, labels):  # at t = 0 nothing depends on it
        return torch.where(t[:, None, None, None] > 0, exact(x, t.clamp(min=1e-9), labels), 0.0)

    def shifted(x, t, labels):
        return net(x, t, labels) + 0.3

    assert abs(float(task.loss(net, held, Rng(0), 0))) < 0.02 * float(task.loss(shifted, held, Rng(0), 0))
    assert float(task.loss(shifted, held, Rng(0), 0)) > 0.1
    noise = Rng(1).normal(64, 1, 8, 8)
    for count in (1, 2, 4):
        drawn = task.sample(net, held[1], noise, count)
        torch.testing.assert_close(drawn, held[0], rtol=0, atol=1e-5)


def test_the_loss_written_out(digits):
    """In float64, from the same draws: neighbouring points, ends, pseudo-Huber, weight."""
    task, (images, labels) = make(Consistency, digits, intervals=5, double_every=2), batch(digits)
    net = Small().double()
    rng, cut = Rng(4), 10  # two steps are done: halved once
    labels_in = torch.where(rng.uniform(16) < 0.1, 10, labels)
    noise, k = rng.normal(*images.shape).double(), (rng.uniform(16) * cut).floor().double()

    def end(s):
        wide = s[:, None, None, None]
        x = (1 - wide) * images.double() + wide * noise
        return x + wide * net(x, s * 1000, labels_in)

    apart = (end((k + 1) / cut) - end(k / cut)).pow(2).mean((1, 2, 3))
    wanted = cut * ((apart + HUBER_C**2).sqrt() - HUBER_C).mean()
    found = task.loss(net.float(), (images, labels), Rng(4), 3)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)


def test_intervals_are_halved_by_the_step_alone(digits):
    task = make(Consistency, digits, intervals=10, double_every=100)
    assert [task.intervals(step) for step in (0, 99, 100, 250, 10**9)] == [10, 10, 20, 40, 1280]
    task = make(Consistency, digits, intervals=30, double_every=0)
    assert {task.intervals(step) for step in (0, 1000, 10**9)} == {30}
    assert make(Consistency, digits, intervals=5000).intervals(10**6) == 5000


# ---- The target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"pure_bf16": True}, {"pure_bf16": True, "kahan": True}])
@pytest.mark.parametrize("held", ["fp32", "bf16"])
def test_the_target_is_an_average_written_out(held, flags, digits):
    task = make(Consistency, digits, target_decay=0.9)
    run = running(task, [f"target={held}"], **flags)
    dtype = torch.float32 if held == "fp32" else torch.bfloat16
    shadow = {name: value.to(dtype, copy=True) for name, value in run.weights("raw").items()}
    for _ in steps(task, run, digits, 5):
        for name, value in run.weights("raw").items():
            before = shadow[name].float()
            shadow[name] = (before + (value - before) * torch.tensor(1 - 0.9)).to(dtype)
    average = run.averages[f"0.9:{held}:nearest"]
    assert_same(dict(average.shadow), {name: shadow[name] for name in average.shadow})
    # and this is what the loss asks, rounded to what the net multiplies in
    task.target(run)(batch(digits, 8)[0], torch.zeros(8), torch.zeros(8, dtype=torch.int64))
    compute = torch.bfloat16 if flags else torch.float32
    read = {name: p.detach() for name, p in task.target(run).view.net.named_parameters()}
    assert_same(read, {name: shadow[name].to(compute) for name in read})


def test_a_target_that_is_kept_on_the_cpu_is_read_when_it_is_there(digits):
    """Beside a GPU such an average counts its step before the numbers are moved."""
    task = make(Consistency, digits, target_decay=0.5)
    losses = []
    for moved in (lambda run: run, moved_to_the_cpu):
        run = moved(running(task))
        told = []
        for step in range(5):
            loss = task.loss(run, batch(digits, 8), Rng(step), step)
            told.append(float(loss.detach()))
            run.backward(loss)
            run.step()
        losses.append(told)
    assert losses[0] == losses[1] and len(set(losses[0])) == 5


def test_a_bf16_target_stands_still_and_stochastic_rounding_moves_it(digits):
    """The fault of a bf16 average, inside the loop: at decay 0.999 a step is a thousandth of the distance."""
    moved = {}
    for sites in (["target=fp32"], ["target=bf16"], ["target=bf16", "target_update=stochastic"]):
        task = make(Consistency, digits, target_decay=0.999)
        run = running(task, sites)
        (average,) = (run.averages[spec] for spec in task.averages().values())
        for p in run.params:  # a start without zeros, which any step moves
            p.data += 0.1 * p.data.sign() + 0.1 * (p.data == 0)
        for name, p in run.named_params:
            average.shadow[name].copy_(p.detach())
        start = {name: value.float().clone() for name, value in average.shadow.items()}
        list(steps(task, run, digits, 40))
        now, weights = average.shadow, run.weights("raw")
        toward = sum(((now[n].float() - start[n]) * (weights[n] - start[n])).sum() for n in start)
        moved[sites[-1]] = float(toward / sum((weights[n] - start[n]).square().sum() for n in start))
    exact = moved["target=fp32"]
    assert 0.005 < exact < 0.05
    assert abs(moved["target=bf16"]) < 0.1 * exact
    assert 0.5 * exact < moved["target_update=stochastic"] < 2 * exact


def test_the_loss_asks_the_target_and_teaches_the_student_alone(digits):
    task = make(Consistency, digits, target_decay=0.9)
    run = running(task)
    list(steps(task, run, digits, 2))
    (average,) = (run.averages[spec] for spec in task.averages().values())

    def gradient():
        run.optimizer.zero_grad(set_to_none=True)
        loss = task.loss(run, batch(digits, 8), Rng(9), 2)
        run.backward(loss)
        return float(loss), torch.cat([p.grad.flatten() for p in run.params])

    loss, found = gradient()
    assert all(p.grad is None for p in task.target(run).view.net.parameters())
    # the same by hand: ends of the averaged weights are constants
    net = Small()
    net.load_state_dict({name: value.clone() for name, value in average.shadow.items()})
    task.target = lambda model: net
    again, by_hand = gradient()
    assert loss == again and same(found, by_hand) and all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        net.embed.weight += 1
    assert gradient()[0] != loss


# ---- Generation --------------------------------------------------------------------------------------------


def test_two_steps_written_out(digits):
    task, noise = make(Consistency, digits), Rng(0).normal(6, 1, 8, 8)
    labels = torch.arange(6)

    def net(x, t, labels):
        return -0.7 * x + 0.1 * (t / TIMESTEPS)[:, None, None, None]

    first = noise + net(noise, torch.full((6,), 1000.0), labels)
    again = 0.5 * first + 0.5 * fresh_noise(noise, 500)
    wanted = again + 0.5 * net(again, torch.full((6,), 500.0), labels)
    torch.testing.assert_close(task.sample(net, labels, noise, 2), wanted)
    trace = []
    task.sample(net, labels, noise, 2, trace)
    assert [row["t"] for row in trace] == [1000, 500, 0]


def test_fresh_noise_is_a_function_of_the_images_own():
    noise = Rng(0).normal(200, 1, 8, 8)
    one = fresh_noise(noise, 500)
    assert same(one, torch.cat([fresh_noise(noise[:7], 500), fresh_noise(noise[7:], 500)]))
    assert one.std() == pytest.approx(1, abs=0.03) and abs(float(one.mean())) < 0.03
    for other in (noise, fresh_noise(noise, 250), one.roll(1, 0)):
        assert abs(float((one * other).mean())) < 0.03


# ---- Training ----------------------------------------------------------------------------------------------


def test_it_learns_to_draw_in_two_steps():
    flags = "--lr 3e-3 --ema_decay 0.8 --target_decay 0.8 --double_every 0 --intervals 5".split()
    assert learn(*flags, name="start", steps=1) == 0
    assert learn(*flags, "--validate_every", 25, steps=50) == 0
    start, end = (summary(name)["scores"]["ema"]["frechet"] for name in ("start", "run"))
    assert end < 0.8 * start
    rows = metrics()
    assert [row["step"] for row in rows if "heldout_frechet" in row] == [25, 50]
    assert summary()["validation"]["watched"] == "frechet"


# ---- With a teacher ----------------------------------------------------------------------------------------


@pytest.fixture
def teacher():
    assert quick("--name", "teacher", "--ema_decay", 0.5, steps=3) == 0
    return "runs/teacher"


def test_a_student_starts_from_its_teacher_and_follows_its_steps(teacher):
    assert learn("--teacher", teacher, "--lr", 1e-12, "--ema_decay", 0.0, "--warmup", 1, steps=1) == 0
    average = checkpoint("teacher")["precision"]["averages"]["ema"]["shadow"]
    for name, value in checkpoint()["precision"]["model"].items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=1e-9)
    flags = {**train.DEFAULTS, "task": "consistency", "teacher": teacher, "name": "other"}
    run = Trainer(strategies.settle(flags), draws=True)
    run.task.train_set(run)
    x, labels = Rng(0).normal(4, 1, 8, 8), torch.arange(4)
    velocity = run.task.live[1](x, torch.full((4,), 800.0), labels)
    found = run.task.teach(x, labels, torch.full((4,), 800.0), torch.full((4,), 700.0))
    torch.testing.assert_close(found, x + 0.1 * velocity)


# ---- What does not fit -------------------------------------------------------------------------------------
