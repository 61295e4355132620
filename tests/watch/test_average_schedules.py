"""Watch on averages whose rate changes, and on schedules and counters."""

import copy

import pytest
import test_averages
import torch
from test_watch_loop import eager, losing, net, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowprec.rounding import stochastic_round
from lowprec.watch.averages import Average
from lowprec.watch.watch import Watch

eager = eager
Holder = test_averages.Holder
KINDS = test_averages.KINDS
RATE = test_averages.RATE
away = test_averages.away
watched = test_averages.watched


class Warmed:
    """A stranger's average with a warm-up: `get_decay` of the number of updates, as EMAModel's."""

    def __init__(self, model, last=0.99):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.decay = last
        self.optimization_step = 0
        self.goes_by = lambda: self.get_decay(self.optimization_step)

    def get_decay(self, step):
        return min(self.decay, (1 + step) / (10 + step))

    def update(self, model):
        self.optimization_step += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.goes_by())


class Numbered(Warmed):
    """The same, whose warm-up only `num_updates` shows, as torch_ema's."""

    get_decay = None

    def __init__(self, model, last=0.99):
        super().__init__(model, last)
        self.goes_by = lambda: min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))

    @property
    def num_updates(self):
        return self.optimization_step


class Called(Warmed):
    """The same, whose decay is a function of `updates`, as ultralytics' ModelEMA; its net is `ema`."""

    def __init__(self, model, last=0.99):
        super().__init__(model, last)
        self.ema = copy.deepcopy(model)
        self.shadow, self.updates = dict(self.ema.named_parameters()), 0
        self.decay = lambda updates: last * (1 - 2.0 ** (-updates / 10))
        self.goes_by = lambda: self.decay(self.updates)
        self.get_decay = self.optimization_step = None

    def update(self, model):
        self.updates += 1
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.shadow[name].lerp_(p.detach(), 1 - self.goes_by())


def diffusers_average(model):
    from diffusers.training_utils import EMAModel

    return EMAModel(model.parameters(), decay=0.99)


def timm_v2(model):
    return pytest.importorskip("timm.utils").ModelEmaV2(model, decay=0.9)


def timm_v3(model):
    return pytest.importorskip("timm.utils").ModelEmaV3(model, decay=0.99, use_warmup=True)


def of_ema_pytorch(model):
    ema = pytest.importorskip("ema_pytorch").EMA
    return ema(model, beta=0.99, update_every=1, update_after_step=3, inv_gamma=1.0, power=0.75)


def torchs_mean(model):
    return AveragedModel(model)


def torchs(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def update_of(average, model):
    """The ordinary update of each kind."""
    kind = type(average).__name__
    if kind == "ModelEmaV3":
        steps = iter(range(1, 1000))
        return lambda: average.update(model, next(steps))
    by_kind = {
        "EMAModel": lambda: average.step(model.parameters()),
        "ModelEmaV2": lambda: average.update(model),
        "EMA": lambda: average.update(),
        "AveragedModel": lambda: average.update_parameters(model),
    }
    return by_kind.get(kind, lambda: average.update(model))


def run(make, spoil=None, steps=30, every=3, update=None):
    """(Watch, average) of a loop. spoil: called with (average, model, step) before each update."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    average = make(model)
    watch = Watch(model, optimizer, average, every=every)
    usual = update_of(average, model)
    done = iter(range(steps))

    def move():
        if spoil:
            spoil(average, model, next(done))
        usual()

    train(model, optimizer, steps, move)
    return watch


SCHEDULED = [
    Warmed,
    Numbered,
    Called,
    diffusers_average,
    timm_v2,
    timm_v3,
    of_ema_pytorch,
    torchs,
    torchs_mean,
]


@pytest.mark.parametrize("make", SCHEDULED)
def test_a_schedule_or_warm_up_is_healthy(make):
    watch = run(make)
    assert losing(watch) == set(), str(watch)


def tensors_of(average, model):
    return [t for name, t in Average.of(average, model).shadow.items()]


def moved_twice_back(average, model, step):
    """A sign flip in other people's classes: twice the way of the last update back."""
    with torch.no_grad():
        for t, p in zip(tensors_of(average, model), model.parameters(), strict=True):
            t.sub_(0.5 * (p - t))


@pytest.mark.parametrize("make", [Warmed, timm_v2, torchs, of_ema_pytorch])
def test_a_flipped_sign_is_named_in_each_class(make):
    found = run(make, moved_twice_back).findings()[0]
    assert found.site == "ema" and found.severity == "severe" and "away" in found.text, found


def at_its_last_decay(average, model, step):
    average.goes_by = lambda: 0.99


def at_no_decay(average, model, step):
    average.goes_by = lambda: 0.05


@pytest.mark.parametrize("spoil", [at_its_last_decay, at_no_decay])
@pytest.mark.parametrize("make", [Warmed, Called])
def test_a_rate_that_its_schedule_does_not_say_is_named(make, spoil):
    found = run(make, spoil, steps=80, every=10).findings()[0]
    assert found.site == "ema" and "of the way a step, and its decay" in found.text, found


def test_a_mean_that_forgets_how_many_it_holds_is_named():
    watch = run(torchs_mean, lambda average, model, step: average.n_averaged.fill_(1))
    assert any("stands at 2" in f.text for f in watch.findings()), str(watch)


def begun_anew(name):
    def spoil(average, model, step):
        if step == 20:
            old = getattr(average, name)
            old.zero_() if torch.is_tensor(old) else setattr(average, name, 0)

    return spoil


RESET = [
    (Warmed, "optimization_step"),
    (Called, "updates"),
    (diffusers_average, "optimization_step"),
    (torchs, "n_averaged"),
    (torchs_mean, "n_averaged"),
    (of_ema_pytorch, "step"),
]


@pytest.mark.parametrize("make, name", RESET)
def test_a_counter_that_is_reset_is_named(make, name):
    watch = run(make, begun_anew(name))
    assert any("counter of the average fell" in f.text for f in watch.findings()), str(watch)
    assert watch.diagnosis().verdict.startswith("most likely to blame for bad results: ema: the counter of")


def test_a_counter_that_is_reset_between_all_looks_is_named():
    """Each look at the average then reads the same number."""

    def reset(average, model, step):
        if step % 6 == 0:
            average.optimization_step = 0

    watch = run(Numbered, reset)
    assert any("fell from" in f.text for f in watch.findings()), str(watch)


def test_a_counter_that_stands_is_named():
    def spoil(average, model, step):
        average.optimization_step = 0

    watch = run(Warmed, spoil)
    assert any("counter of the average stands at 1" in f.text for f in watch.findings()), str(watch)


def in_bf16(flip, stochastic):
    def update(average, p, step):
        gap = p.float() - average.float()
        target = (average.float() + flip * RATE * gap).flatten()
        if not stochastic:
            average.copy_(target.view_as(average))
            return
        noise = torch.randint(1 << 16, target.shape, dtype=torch.int32)
        average.copy_(stochastic_round(target, noise).view_as(average))

    return update


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_a_flipped_sign_in_bf16_is_named(kind, stochastic):
    watch = watched(in_bf16(-1, stochastic), kind, dtype=torch.bfloat16)
    found = watch.findings()[0]
    assert found.site == "ema" and "away from its weight" in found.text, str(watch)


def test_two_bf16_operations_are_no_flipped_sign():
    def update(average, p, step):
        average.mul_(1 - RATE).add_(p.bfloat16(), alpha=RATE)

    watch = watched(update, Holder, dtype=torch.bfloat16)
    assert not any("away from its weight" in f.text for f in watch.findings()), str(watch)
