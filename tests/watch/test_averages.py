"""An average is judged by what it should be: finite, of its weights' size and sign, on its way to them."""

import copy

import pytest
import torch
from test_watch_loop import losing, net, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowprec.errors import Refused
from lowprec.rounding import stochastic_round
from lowprec.watch import compare
from lowprec.watch.averages import Average
from lowprec.watch.watch import Watch

RATE = 0.05


class Holder:
    """A stranger's average: an object with `shadow` and `decay`."""

    def __init__(self, shadow):
        self.shadow = shadow
        self.decay = 1 - RATE


class Listed:
    """Another one, with tensors in order."""

    def __init__(self, shadow):
        self.shadow_params = list(shadow.values())
        self.decay = 1 - RATE


KINDS = {"dict": lambda shadow: shadow, "object": Holder, "list": Listed}


def once(change, at=20):
    """An average that something else writes once, between two looks."""

    def update(average, p, step):
        average.lerp_(p, RATE)
        if step == at:
            change(average)

    return update


NOT_FINITE = "entries of its sample are not finite"
JUMP = "times as far as its weight was away"
# the update of a tensor -> words of its finding
BROKEN = {
    "nan": (once(lambda average: average[..., 0].fill_(torch.nan), at=9), NOT_FINITE),
    "infinite": (once(lambda average: average.mul_(torch.inf), at=9), NOT_FINITE),
    "much too large": (lambda average, p, step: average.copy_(1e4 * p), "times as large as its weight"),
    "minus the weights": (lambda average, p, step: average.copy_(-p), "the other sign"),
    "towards minus the weights": (lambda average, p, step: average.lerp_(-p, RATE), "away from its weight"),
    "a sign flip": (
        lambda average, p, step: average.add_((average - p) * RATE),
        *("severe", "away from its weight", "the sign"),
    ),
    "a rate of 1.5": (lambda average, p, step: average.lerp_(p, 1.5), "1.5 of the way"),
    "a copy": (lambda average, p, step: average.copy_(p), "averages nothing"),
    "negated once": (once(lambda average: average.neg_()), JUMP),
    "emptied once": (once(lambda average: average.zero_()), JUMP),
    "doubled once": (once(lambda average: average.mul_(2.0)), JUMP),
    "through bf16": (
        lambda average, p, step: average.copy_(average.lerp(p, RATE).bfloat16()),
        "all its values are bf16 numbers",
    ),
    "always 0": (lambda average, p, step: average.zero_(), "has not moved between two looks"),
    "moved twice a step": (
        lambda average, p, step: average.lerp_(p, RATE).lerp_(p, RATE),
        "of the way a step, and its decay 0.95 says 0.05",
    ),
    "of another net": (
        lambda average, p, step: average.lerp_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p), RATE),
        *("severe", "this net"),
    ),
    "of another order": (lambda average, p, step: average.lerp_(p.flip(0), RATE), "severe", "this net"),
    "fading": (lambda average, p, step: average.mul_(1 - RATE), "severe", "this net"),
}


class Counting(Holder):
    """Counts its updates."""

    def __init__(self, shadow):
        super().__init__(shadow)
        self.num_updates = 0


@pytest.mark.parametrize("counts", [False, True])
def test_an_average_that_is_never_updated_is_named(counts):
    """Whether its counter says so, or counts updates that write nothing."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    average = Counting({name: p.detach().clone() for name, p in model.named_parameters()})
    watch = Watch(model, optimizer, average, every=3)

    def count():
        average.num_updates += counts

    train(model, optimizer, 36, count)
    says = "has not moved between two looks" if counts else "never updated: its counter says 0"
    assert says in watch.findings()[0].text, str(watch)


def watched(update, kind, steps=36, dtype=torch.float32):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shadow = {name: p.detach().clone().to(dtype) for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, kind(shadow), every=3)
    done = [0]

    def move():
        for name, p in model.named_parameters():
            update(shadow[name], p.detach(), done[0])
        done[0] += 1

    train(model, optimizer, steps, move)
    return watch


# the kinds take turns; a dict says no decay
IN_KINDS = [(name, list(KINDS)[number % 3]) for number, name in enumerate(BROKEN)]


@pytest.mark.parametrize("name, kind", IN_KINDS)
def test_a_broken_average_is_named(name, kind):
    update, *words = BROKEN[name]
    watch = watched(update, KINDS[kind])
    found = [f for f in watch.findings() if f.site == "ema" and f.severity != "note"]
    assert {f.tensor for f in found} >= {"0.weight", "3.weight"}, str(watch)
    said = next(f"{f.severity}: {f.text} -> {f.remedy}" for f in found if f.tensor == "0.weight")
    assert all(part in said for part in words), said
    assert watch.diagnosis().status == 1


def test_an_average_that_is_the_weights_themselves_is_named():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = Watch(model, optimizer, {name: p.detach() for name, p in model.named_parameters()}, every=3)
    train(model, optimizer, 12)
    assert "they share their memory" in watch.findings()[0].text, str(watch)


def test_an_average_without_some_trained_tensors_is_named():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters() if name[0] != "3"}
    watch = Watch(model, optimizer, shadow, every=3)
    named = dict(model.named_parameters())
    train(model, optimizer, 12, lambda: [t.lerp_(named[name].detach(), RATE) for name, t in shadow.items()])
    (found,) = [f for f in watch.findings() if f.severity != "note"]
    assert "no average of 2 of the 6 tensors that train, as 3.weight" in found.text, str(watch)


def in_bf16(rate, at_random=True):
    """The update of an average in bf16 that goes so much of the way to its weight."""

    def update(average, p, step):
        target = average.float().lerp(p.float(), rate).flatten()
        if at_random:
            target = stochastic_round(target, torch.randint(1 << 16, target.shape, dtype=torch.int32))
        average.copy_(target.view_as(average))

    return update


def test_a_healthy_average_in_bf16_is_healthy():
    """healthy/weights.py has those in fp32."""
    assert losing(watched(in_bf16(RATE), Listed, dtype=torch.bfloat16)) == set()


def test_a_small_bias_that_changes_its_sign_is_healthy():
    """Its average then has the other sign, rightly."""
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = Watch(model, optimizer, shadow, every=2)
    for step in range(20):
        optimizer.zero_grad()
        sign = 1.0 if step < 10 else -1.0
        (sign * model(torch.ones(3, 4))).mean().backward()
        optimizer.step()
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)
    assert losing(watch) == set(), str(watch)


# ---- Two checkpoints ---------------------------------------------------------------------------------------

SPOILT = {
    "nan": (lambda w: w * torch.nan, "not finite"),
    "infinite": (lambda w: w * torch.inf, "not finite"),
    "ten thousand times too large": (lambda w: w * 1e4, "times as large as its weight"),
    "minus the weights": (lambda w: -w, "the other sign"),
}


@pytest.mark.parametrize("spoil, words", SPOILT.values(), ids=SPOILT)
def test_a_broken_average_in_a_checkpoint_is_named(tmp_path, spoil, words):
    torch.manual_seed(0)
    w = torch.randn(64, 64)
    before, after = tmp_path / "before.pt", tmp_path / "after.pt"
    torch.save({"model": {"w": w}, "ema": {"w": w.clone()}}, before)
    torch.save({"model": {"w": w + 0.1}, "ema": {"w": w + 0.05}}, after)
    assert compare.compare(before, after).status == 0
    torch.save({"model": {"w": w + 0.1}, "ema": {"w": spoil(w)}}, after)
    found = compare.compare(before, after).findings
    assert (found[0].site, found[0].severity, found[0].tensor) == ("ema", "severe", "ema.w")
    assert words in found[0].text


# ---- Averages within the net -------------------------------------------------------------------------------


class Teaching(nn.Module):
    """BYOL, DINO and MoCo: the forward pass moves a frozen copy of the student."""

    def __init__(self, move, dtype):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).to(dtype)
        self.move = move

    def forward(self, x):
        with torch.no_grad():
            if self.move:
                for t, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    self.move(t, p)
            target = self.teacher(x.to(next(self.teacher.parameters()).dtype)).float()
        return (self.student(x) - target - x).square().mean()


def by_lerp(t, p):
    t.lerp_(p.to(t.dtype), 0.004)


def by_data(t, p):
    t.data = t.data * 0.996 + p.data.to(t.dtype) * 0.004


def away(t, p):
    t.lerp_(p.to(t.dtype), -0.01)


def taught(move, dtype, steps=40):
    torch.manual_seed(0)
    model = Teaching(move, dtype)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    watch = Watch(model, optimizer, every=4)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(32, 16)).backward()
        optimizer.step()
    return watch


@pytest.mark.parametrize("move", [by_lerp, by_data])
def test_a_teacher_in_bf16_that_falls_behind_is_named(move):
    watch = taught(move, torch.bfloat16)
    found = {f.tensor: f.text for f in watch.findings() if f.site == "ema"}
    assert {"teacher.0.weight", "teacher.2.weight"} <= set(found), str(watch)
    assert "bf16" in found["teacher.0.weight"], str(watch)


def test_a_teacher_that_goes_away_is_named():
    watch = taught(away, torch.float32)
    found = watch.findings()[0]
    assert found.tensor.startswith("teacher.") and "away" in found.text, str(watch)


def test_a_teacher_that_is_written_and_stays_is_named():
    watch = taught(lambda t, p: t.mul_(1.0), torch.float32)
    found = watch.findings()[0]
    assert found.severity == "severe" and found.tensor.startswith("teacher."), str(watch)
    assert "has not moved" in found.text, str(watch)


def by_copy(t, p):
    t.copy_(p)


@pytest.mark.parametrize("move", [None, by_copy])
def test_healthy_teachers_and_references(move):
    watch = taught(move, torch.bfloat16)
    assert losing(watch) == set(), str(watch)


# ---- Averages of other forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [nn.DataParallel, lambda m: torch.compile(m, backend="eager"), dict])
def test_the_average_of_a_wrapped_net_is_read(wrapped):
    model = net()
    if wrapped is dict:
        average = {f"module.{name}": p.detach().clone() for name, p in model.named_parameters()}
    else:
        average = torchs(wrapped(model))
    found = Watch(model, torch.optim.SGD(model.parameters(), 0.1), average).averages.average
    assert set(found.shadow) == set(dict(model.named_parameters()))
    assert found.decay == (None if wrapped is dict else 0.9)


def test_an_average_of_a_part_without_names_is_refused():
    model = net()
    part = Listed({name: p.detach().clone() for name, p in model[3].named_parameters()})
    with pytest.raises(Refused, match="no names"):
        Watch(model, torch.optim.SGD(model.parameters(), 0.1), part)


class Shell(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


@pytest.mark.parametrize("averages_the_shell, rate, found", [(True, 0.1, False), (False, -0.1, True)])
def test_an_average_of_what_holds_the_net_is_read_and_one_of_what_it_holds(averages_the_shell, rate, found):
    model = net()
    averaged, watched = (Shell(model), model) if averages_the_shell else (model, Shell(model))
    average = {name: p.detach().clone() for name, p in averaged.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    watch = Watch(watched, optimizer, average, every=2)

    def move():
        for name, p in averaged.named_parameters():
            average[name].lerp_(p.detach(), rate)

    train(model, optimizer, 12, move)
    assert any(site == "ema" for site, _ in losing(watch)) is found, str(watch)


def test_an_average_of_another_net_is_refused_with_a_name_of_each():
    model = net()
    with pytest.raises(Refused, match=r"as 0\.weight; it has other\.weight: watch the module"):
        Watch(model, torch.optim.AdamW(model.parameters()), {"other.weight": torch.ones(3)})


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


@pytest.mark.parametrize("make", [Numbered, Called, of_ema_pytorch])
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


@pytest.mark.parametrize("make", [Warmed, timm_v2, torchs])
def test_a_flipped_sign_is_named_in_each_class(make):
    found = run(make, moved_twice_back).findings()[0]
    assert found.site == "ema" and found.severity == "severe" and "away" in found.text, found


def at_its_last_decay(average, model, step):
    average.goes_by = lambda: 0.99


def at_no_decay(average, model, step):
    average.goes_by = lambda: 0.05


@pytest.mark.parametrize("make, spoil", [(Warmed, at_its_last_decay), (Called, at_no_decay)])
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
    (torchs_mean, "n_averaged"),
    (of_ema_pytorch, "step"),
]


@pytest.mark.parametrize("make, name", RESET)
def test_a_counter_that_is_reset_is_named(make, name):
    watch = run(make, begun_anew(name))
    assert any("counter of the average fell" in f.text for f in watch.findings()), str(watch)
    assert watch.diagnosis().verdict.startswith("most likely to blame for bad results: ema: the counter of")


def test_a_counter_that_stands_is_named():
    def spoil(average, model, step):
        average.optimization_step = 0

    watch = run(Warmed, spoil)
    assert any("counter of the average stands at 1" in f.text for f in watch.findings()), str(watch)


@pytest.mark.parametrize("at_random", [False, True])
def test_a_flipped_sign_in_bf16_is_named(at_random):
    watch = watched(in_bf16(-RATE, at_random), Holder, dtype=torch.bfloat16)
    found = watch.findings()[0]
    assert found.site == "ema" and "away from its weight" in found.text, str(watch)


def test_two_bf16_operations_are_no_flipped_sign():
    def update(average, p, step):
        average.mul_(1 - RATE).add_(p.bfloat16(), alpha=RATE)

    watch = watched(update, Holder, dtype=torch.bfloat16)
    assert not any("away from its weight" in f.text for f in watch.findings()), str(watch)
