"""Rows of a Watch's verdict that no loop of the other files shows, or whose limit none meets: one case in
which a row speaks, and one beside it in which it is silent.

The cases are written into the sums and facts of a watch over a healthy loop, just beyond a limit and just
within it. tests/faults.py shows the other rows on loops.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_watch_loop import losing, net, train

from lowprec.telemetry import sample_entries
from lowprec.watch import findings
from lowprec.watch.faults.gradients import dead_part
from lowprec.watch.gradients import Partial
from lowprec.watch.watch import Watch

BF16 = torch.bfloat16
LAST = "3.weight"  # of the net: a matrix of 4 x 64
STEPS = 12


def watched(dtype=torch.float32, steps=STEPS, average=True):
    """A Watch of 7 looks at a loop that loses nothing."""
    model = net()
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    watch = Watch(model, optimizer, shadow if average else None, every=2)

    def move():
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)

    train(model, optimizer, steps, move)
    return watch


def number(watch, tensor):
    return [name for name, _ in watch.named].index(tensor)


def put(sums, column, **values):
    for name, value in values.items():
        sums.sums[type(sums).fields.index(name), column] = value


def weights(tensor=LAST, **values):
    return lambda watch: put(watch.writes.weights, number(watch, tensor), **values)


def moments(**values):
    return lambda watch: put(watch.writes.moments, number(watch, LAST), **values)


def directed(cosine):
    average = dict(cosine=cosine, directed=1.0)
    return lambda watch: put(watch.averages.path, number(watch, LAST), **average)


def stands(arrived):
    def change(watch):
        for sums in (watch.writes.moments, watch.writes.growth):
            put(sums, number(watch, LAST), **WANTED, arrived=arrived)

    return change


def gone(share):
    def change(watch):
        extra(judged=100, v_gone=100 * share)(watch)
        p = dict(watch.named)[LAST]
        watch.optimizer.state[p]["exp_avg_sq"] = watch.optimizer.state[p]["exp_avg_sq"].bfloat16()

    return change


def masked(share):
    """So many gradients are set to 0 at each look, and a quarter of the weights is 0."""

    def change(watch):
        put(watch.gradients.changes, number(watch, LAST), looks=1, parts_zeroed=share)
        dict(watch.named)[LAST].data[0] = 0

    return change


def averages(decay=None, dtype=torch.float32, **values):
    def change(watch):
        put(watch.averages.taken, number(watch, LAST), **values)
        shadow = {name: t.to(dtype) for name, t in watch.averages.average.shadow.items()}
        watch.averages.average = SimpleNamespace(shadow=shadow, decay=decay, begun=True)

    return change


def extra(**values):
    return lambda watch: put(watch.extra, number(watch, LAST), **values)


def facts(**values):
    def change(watch):
        vars(watch.facts[number(watch, LAST)]).update(values)

    return change


def all_of(**values):
    def change(watch):
        for one in watch.facts:
            vars(one).update(values)

    return change


def errors(kind="errors", **values):
    """What stochastic rounding would look like, with these sums of one tensor in it."""
    usual = dict(
        entries=1000, chance=300, strays=300, score=0.0, variance=100.0, moves=100.0, looks=7, burst=7
    )

    def change(watch):
        # torch's own never round stochastically
        watch.answers.inner = SimpleNamespace(state=watch.answers.state)
        put(getattr(watch, kind), number(watch, LAST), **{**usual, **values})

    return change


def clips(scale):
    return lambda watch: watch.clips.extend([scale] * 7)


def shrunk(left, norm, step=1e-3):
    """What most looks saw: 6 of the healthy loop saw nothing of it. step: the largest, over the weights."""

    def change(watch):
        watch.gradients.shrunk += [(left, norm)] * 7
        watch.gradients.largest_step = step

    return change


def stated(dtype):
    def change(watch):
        p = dict(watch.named)[LAST]
        watch.answers.inner, watch.answers.exact = watch.optimizer, True
        watch.optimizer.state[p]["momentum_buffer"] = torch.ones_like(p, dtype=dtype)

    return change


def summed(error):
    return lambda watch: watch.gradients.sums.update({number(watch, LAST): (7 * error, 7, 8)})


def heard(cleared, last, times=0):
    """A look at a step after 4 backward passes, gradients having been cleared before the last one or not, one
    by one or so many `times`."""

    def change(watch):
        i = number(watch, LAST)
        p = watch.named[i][1]
        parts = torch.randn(4, 256)
        partial = Partial(parts.sum(0), False)
        partial.count, partial.cleared, partial.last = 4, cleared, parts[3]
        partial.times = times or cleared
        watch.gradients.partial = {i: partial}
        p.grad = (parts[3] if last else parts.sum(0)).view_as(p)
        watch.gradients.compare(None, watch.writes.look)

    return change


def departed(share):
    def change(watch):
        watch.copies, watch.departed = dict(watch.named), share

    return change


def ungrouped(graded):
    def change(watch):
        p = dict(watch.named)[LAST]
        del watch.groups[p]
        p.grad = torch.ones_like(p) if graded else None

    return change


def frozen(*names):
    def change(watch):
        for name in names:
            dict(watch.named)[name].requires_grad_(False)

    return change


def buffer(before, after):
    def change(watch):
        watch.model.register_buffer("table", after)
        watch.buffers["table"] = before.clone()

    return change


def faint(share):
    def change(watch):
        for i in range(len(watch.named)):
            put(watch.extra, i, judged=100, faint=100 * share)

    return change


SOME = torch.linspace(0.1, 0.9, 64)
WANTED = dict(entries=100, wanted=1.0, miss=0.0)
# what it says: (site, severity, words, change that makes it speak, change that leaves it silent)
ROWS = {
    "chance": (
        "update",
        "moderate",
        "wanted movement is not written",
        weights(wanted=1.0, arrived=0.8, miss=0.02**2),
        weights(wanted=1.0, arrived=0.8, miss=0.03**2),
    ),
    "twice": (
        "update",
        "severe",
        "1.6 times as far",
        weights(**WANTED, arrived=1.6),
        weights(**WANTED, arrived=1.4),
    ),
    "few put back": ("update", "severe", "put back", extra(moved=8, back=8), extra(moved=7, back=7)),
    "decay by chance": (
        "weight decay",
        "moderate",
        "weight decay",
        extra(decay_wanted=1.0, decay=0.0, decay_error=0.08**2),
        extra(decay_wanted=1.0, decay=0.0, decay_error=0.09**2),
    ),
    "rate": (
        "update",
        "note",
        "its learning rate was 0",
        facts(looks=7, at_zero=7),
        facts(looks=7, at_zero=2),
    ),
    "rate of all": (
        "update",
        "moderate",
        "the learning rate has been 0 since step 6",
        all_of(looks=8, at_zero=3, zero_since=6),
        all_of(looks=20, at_zero=3, zero_since=6),
    ),
    "a state in bf16 of who knows": ("momentum_buffer", "note", "how much, is not known", stated(BF16), None),
    "v stands": ("exp_avg_sq", "severe", "it stands still", stands(0.01), stands(0.03)),
    "v gone": ("exp_avg_sq", "severe", "6% of the second moments are 0 in bf16", gone(0.06), gone(0.04)),
    "a mask": ("grads", "note", "set to 0 between backward", masked(0.25), masked(0.3)),
    "elsewhere": ("ema", "severe", "not toward its weight", directed(0.4), directed(0.6)),
    "v grows": (
        "exp_avg_sq",
        "moderate",
        "it grows where it should shrink",
        moments(**WANTED, arrived=-1.0),
        moments(**WANTED, arrived=0.8),
    ),
    "step stuck": (
        "step",
        "moderate",
        "did not count at 2",
        facts(counted=(torch.float32, 2, 5.0)),
        facts(counted=(torch.float32, 0, 5.0)),
    ),
    "step narrow": ("step", "moderate", "can't count beyond 2048", facts(counted=(torch.half, 0, 5.0)), None),
    "step behind": ("step", "note", "5 behind the 12", facts(behind=5), facts(behind=2)),
    "all steps behind": (
        "step",
        "moderate",
        "of all tensors are 5 or more behind the 12",
        all_of(behind=5),
        all_of(behind=4),
    ),
    "one step in time": (
        "step",
        "moderate",
        "behind the 12",
        all_of(behind=6),
        lambda w: (all_of(behind=6)(w), facts(behind=0)(w)),
    ),
    "half of the steps without": (  # gradients that come and go in the rhythm of the looks
        "step",
        "moderate",
        "behind the 12",
        all_of(behind=6),
        lambda w: (all_of(behind=6)(w), facts(looks=0)(w)),
    ),
    "noise again": (
        "noise",
        "moderate",
        "correlate by 0.70",
        errors(again=70.0, again_variance=100.0, again_size=100.0),
        errors(again=50.0, again_variance=100.0, again_size=100.0),
    ),
    "noise of v": (
        "noise of exp_avg_sq",
        "moderate",
        "errs away",
        errors("moment_errors", score=70.0),
        errors("moment_errors", score=50.0),
    ),
    "no gradient": (
        "grads",
        "note",
        "never has a gradient",
        facts(looks=0, without=7),
        facts(looks=6, without=1),
    ),
    "v cast": (
        "exp_avg_sq",
        "moderate",
        "cast from fp32 to bf16",
        facts(cast=(torch.float32, BF16, 3)),
        None,
    ),
    "step stuck, narrow": (
        "step",
        "moderate",
        "stands at 256: bf16 holds no 257",
        facts(counted=(BF16, 1, 256.0)),
        facts(counted=(torch.float32, 0, 256.0)),
    ),
    "v zero in fp16": (
        "exp_avg_sq",
        "severe",
        "fp16 holds no squares so small",
        facts(v_reset=(4, None), v_dtype=torch.half),
        facts(v_reset=(4, None), v_dtype=BF16),
    ),
    "few subnormal": (
        "grads",
        "moderate",
        "below fp16",
        extra(graded=8, subnormal=8),
        extra(graded=7, subnormal=7),
    ),
    "faint": ("grads", "severe", "60% of the second moments", faint(0.6), faint(0.4)),
    "a loss scale": ("grads", "moderate", "clipping leaves", shrunk(3e-7, 1e-6), shrunk(2.0**-16, 1e-6)),
    "divided": ("grads", "severe", "the net stands still", shrunk(3e-7, 1e-6, 9e-6), shrunk(3e-7, 1e-6)),
    "a loss scale, clipped": ("grads", "moderate", "clipping leaves", shrunk(3e-7, 1e-6), shrunk(3e-7, 1.0)),
    "clipped": ("grads", "moderate", "clipping leaves 0.0005", clips(5e-4), clips(2e-3)),
    "summed": ("accumulate", "moderate", "8 micro-batches of gradients is 0.50%", summed(5e-3), summed(3e-3)),
    "SAM": ("accumulate", "severe", "the first 2", heard(2, True), heard(1, True)),
    "a generator's": ("accumulate", "severe", "the first 2", heard(2, True), heard(2, True, times=1)),
    "copies": ("optimizer", "severe", "60% of the weights differ", departed(0.6), departed(0.4)),
    "in no group, unused": ("optimizer", "note", "in no group", ungrouped(False), None),
    "frozen by plan": ("frozen", "note", "parameters don't train", frozen("0.weight"), frozen("3.weight")),
    "a narrow buffer": ("buffers", "moderate", "held in bfloat16", buffer(SOME, SOME.bfloat16()), None),
    "a broken buffer": (
        "buffers",
        "severe",
        "1 entries of its sample are not finite",
        buffer(SOME, torch.where(SOME[3] == SOME, torch.inf, SOME)),
        buffer(torch.full((4,), -torch.inf), torch.full((4,), -torch.inf)),  # a mask
    ),
}


@pytest.fixture(scope="module")
def healthy():
    with pytest.MonkeyPatch.context():
        return watched()


def changed(watch, change):
    watch = copy.deepcopy(watch)
    change(watch)
    return watch


def says(watch, site, severity, words):
    found, _ = findings.findings(watch)
    return [f for f in found if (f.site, f.severity) == (site, severity) and words in f.text]


def test_the_loop_beneath_is_healthy(healthy):
    assert healthy.looks == 7 and losing(healthy) == set()


@pytest.mark.parametrize("site, severity, words, speaks, silent", ROWS.values(), ids=ROWS)
def test_a_row_speaks_and_is_silent(healthy, site, severity, words, speaks, silent):
    watch = changed(healthy, speaks)
    found = says(watch, site, severity, words)
    assert found, str(watch)
    assert all(f.remedy for f in found)
    if silent is not None:
        watch = changed(healthy, silent)
        assert says(watch, site, severity, words.split("%")[-1].strip()) == [], str(watch)


def test_every_row_is_sorted_the_worst_first(healthy):
    watch = healthy
    for row in ("twice", "rate of all", "step narrow", "copies", "summed"):
        watch = changed(watch, ROWS[row][3])
    ranks = [f.rank for f in watch.findings()]
    assert ranks == sorted(ranks) and len(ranks) >= 3


def test_an_average_late_in_a_long_loop_is_a_finding(healthy):
    young = changed(healthy, averages(0.9999, **WANTED, arrived=1.0))
    averages(0.9999, **WANTED, arrived=1.0)
    put(young.averages.taken, 0, **WANTED, arrived=1.0)
    assert says(young, "ema", "note", "100% of the start remains after 12 steps")
    young.steps = 3000
    assert says(young, "ema", "moderate", "74% of the start remains after 3000 steps")


# ---- Parts of a matrix -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (96, 16, 3, 3), (768, 2304)])
@pytest.mark.parametrize("parts, k", [(2, 1), (3, 1), (4, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_dead_part_is_found_in_a_sample(shape, parts, k, dim):
    alive = torch.ones(shape, dtype=torch.bool)
    size = shape[dim]
    if size % parts:
        pytest.skip("it can't be divided")
    start = k * size // parts
    alive.narrow(dim, start, size // parts).fill_(False)
    words = f"{'rows' if dim == 0 else 'columns'} {start} to {start + size // parts - 1} of {size}"
    assert dead_part(sample_entries(alive, 1024), shape, 1024) == words


def test_scattered_zeros_are_no_dead_part():
    torch.manual_seed(0)
    for share in (0.1, 0.5, 0.9):
        assert dead_part(torch.rand(96 * 32) > share, (96, 32), 1 << 12) == ""
    rows = torch.ones(96, 32, dtype=torch.bool)
    rows[10:30] = False  # units that died
    assert dead_part(rows.flatten(), (96, 32), 1 << 12) == ""
