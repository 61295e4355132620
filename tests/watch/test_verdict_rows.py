"""Each row of a Watch's verdict: one case in which it speaks, and one beside it in which it is silent.

The cases are written into the sums and facts of a watch over a healthy loop, just beyond a limit and just
within it. tests/faults.py shows the rows on loops.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_watch_loop import eager, losing, net, train

from lowprec.telemetry import sample_entries
from lowprec.watch import findings
from lowprec.watch.dead_parts import dead_part
from lowprec.watch.gradients import Partial
from lowprec.watch.watch import Watch
from lowprec.watch.writes import Tally

eager = eager
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


def averages(decay=None, dtype=torch.float32, **values):
    def change(watch):
        put(watch.writes.averages["ema"], number(watch, LAST), **values)
        shadow = {name: t.to(dtype) for name, t in watch.ema.shadow.items()}
        watch.ema = SimpleNamespace(shadow=shadow, decay=decay, begun=True)

    return change


def extra(**values):
    return lambda watch: put(watch.extra, number(watch, LAST), **values)


def facts(**values):
    def change(watch):
        vars(watch.facts[number(watch, LAST)]).update(values)

    return change


def gains(value):
    def change(watch):
        i = number(watch, "1.weight")
        put(watch.writes.weights, i, wanted=1.0, arrived=0.5, miss=0.0)
        watch.named[i][1].data.fill_(value)

    return change


def all_of(**values):
    def change(watch):
        for one in watch.facts:
            vars(one).update(values)

    return change


def decays(share):
    """Decay of which each tensor alone says too little."""

    def change(watch):
        for i in range(len(watch.named)):
            put(watch.extra, i, decay_wanted=1.0, decay=share, decay_error=0.01)

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


def shared(value):
    def change(watch):
        errors()(watch)
        watch.errors.pairs[((1, 2),)] = torch.tensor([[100 * value], [100.0], [100.0]])

    return change


def clips(scale):
    return lambda watch: watch.clips.extend([scale] * 7)


def shrunk(left, norm):
    """What most looks saw: 6 of the healthy loop saw nothing of it."""
    return lambda watch: watch.gradients.shrunk.extend([(left, norm)] * 7)


def accumulated(**values):
    def change(watch):
        watch.answers.inner, watch.answers.exact = watch.optimizer, True
        watch.accumulators["momentum_buffer"] = Tally(len(watch.named))
        put(watch.accumulators["momentum_buffer"], number(watch, LAST), **{**WANTED, **values})

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


def ungraded(start, stop):
    """Columns of the last matrix that never had a gradient."""

    def change(watch):
        index, lengths, alive, looks = watch.alive
        part = alive.split(lengths)[index.index(number(watch, LAST))].view(4, 64)
        part.fill_(True)
        part[:, start:stop] = False

    return change


def faint(share):
    def change(watch):
        for i in range(len(watch.named)):
            put(watch.extra, i, judged=100, faint=100 * share)

    return change


SOME = torch.linspace(0.1, 0.9, 64)
WANTED = dict(entries=100, wanted=1.0, miss=0.0)
HALF = dict(WANTED, threatened=1.0, threatened_entries=100, error=0.0, written=0.0)


def lacks_decay(written):
    """40 % is written of what is wanted of a tensor, and of its decay, which is all of that, this share."""

    def change(watch):
        weights(entries=100, wanted=100.0, miss=0.0, arrived=40.0)(watch)
        extra(decay_wanted=1.0, decay=written, decay_error=0.0, decay_path=100.0, decay_moved=100)(watch)

    return change


# what it says: (site, severity, words, change that makes it speak, change that leaves it silent)
ROWS = {
    "update": (
        "update",
        "moderate",
        "10% of the wanted",
        weights(**WANTED, arrived=0.9),
        weights(**WANTED, arrived=0.96),
    ),
    "chance": (
        "update",
        "moderate",
        "wanted movement is not written",
        weights(wanted=1.0, arrived=0.8, miss=0.02**2),
        weights(wanted=1.0, arrived=0.8, miss=0.03**2),
    ),
    "gains": ("gains", "moderate", "100% of the gains are exactly 1.0", gains(1.0), None),
    "no gains": ("update", "moderate", "50% of the wanted", gains(0.9), None),
    "twice": (
        "update",
        "severe",
        "1.6 times as far",
        weights(**WANTED, arrived=1.6),
        weights(**WANTED, arrived=1.4),
    ),
    "put back": ("update", "severe", "put back", extra(moved=10, back=6), extra(moved=10, back=5)),
    "few put back": ("update", "severe", "put back", extra(moved=8, back=8), extra(moved=7, back=7)),
    "decay": (
        "weight decay",
        "moderate",
        "60% of its weight decay",
        extra(decay_wanted=1.0, decay=0.4, decay_error=0.0),
        extra(decay_wanted=1.0, decay=0.6, decay_error=0.0),
    ),
    "an update that lacks its decay": (
        "weight decay",
        "severe",
        "60% of its weight decay",
        lacks_decay(0.4),
        lacks_decay(0.6),
    ),
    "an update that lacks more than its decay": (
        "update",
        "severe",
        "60% of the wanted",
        lacks_decay(0.6),
        lacks_decay(0.4),
    ),
    "decay by chance": (
        "weight decay",
        "moderate",
        "weight decay",
        extra(decay_wanted=1.0, decay=0.0, decay_error=0.08**2),
        extra(decay_wanted=1.0, decay=0.0, decay_error=0.09**2),
    ),
    "decay of all": ("weight decay", "moderate", "of all tensors", decays(0.2), decays(0.4)),
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
    "v cast": (
        "exp_avg_sq",
        "moderate",
        "cast from fp32 to bf16",
        facts(cast=(torch.float32, BF16, 3)),
        None,
    ),
    "v zero": ("exp_avg_sq", "severe", "all zero at step 4", facts(v_reset=(4, None)), facts(v_reset=None)),
    "v zero in fp16": (
        "exp_avg_sq",
        "severe",
        "fp16 holds no squares so small",
        facts(v_reset=(4, None), v_dtype=torch.half),
        facts(v_reset=(4, None), v_dtype=BF16),
    ),
    "v fell": ("exp_avg_sq", "severe", "60% of it is less at step 4", facts(v_reset=(4, 0.6)), None),
    "a state that stands": (
        "momentum_buffer",
        "moderate",
        "40% of what it should take over is not written",
        accumulated(arrived=0.6),
        accumulated(arrived=0.8),
    ),
    "a state in bf16": (
        "momentum_buffer",
        "note",
        "held in bf16 for 1 tensors; lost of what it should take over: up to 20% of a tensor's",
        lambda w: (accumulated(arrived=0.8)(w), stated(BF16)(w)),
        lambda w: (accumulated(arrived=0.8)(w), stated(torch.float32)(w)),
    ),
    "a state in bf16 of who knows": ("momentum_buffer", "note", "how much, is not known", stated(BF16), None),
    "v shrinks": (
        "exp_avg_sq",
        "moderate",
        "40% of the shrinking",
        moments(**WANTED, arrived=0.6),
        moments(**WANTED, arrived=0.8),
    ),
    "v grows": (
        "exp_avg_sq",
        "moderate",
        "it grows where it should shrink",
        moments(**WANTED, arrived=-1.0),
        moments(**WANTED, arrived=0.8),
    ),
    "average stood": (
        "ema",
        "severe",
        "between two looks",
        lambda w: (averages(arrived=0.0)(w), extra(stood=1)(w)),
        extra(stood=1),
    ),
    "average still": (
        "ema",
        "severe",
        "stands still",
        averages(**WANTED, arrived=0.0),
        averages(**WANTED, arrived=1.0),
    ),
    "average narrow": (
        "ema",
        "severe",
        "can't move in bf16",
        averages(dtype=BF16, **HALF, arrived=0.1),
        averages(dtype=BF16, **{**HALF, "written": 1.0}, arrived=1.0),
    ),
    "average slow": (
        "ema",
        "moderate",
        "it goes 0.04 of the way a step, and its decay 0.9 says 0.1",
        averages(0.9, **WANTED, arrived=0.4),
        averages(0.9, **WANTED, arrived=0.6),
    ),
    "average fast": (
        "ema",
        "moderate",
        "it goes 0.4 of the way a step",
        averages(0.9, **WANTED, arrived=4.0),
        averages(0.9, **WANTED, arrived=2.0),
    ),
    "step put back": ("step", "note", "state was put back", facts(fell=(9, 7), put_back=True), None),
    "step fell": ("step", "severe", "fell from 9 to 2", facts(fell=(9, 2)), None),
    "step stuck, narrow": (
        "step",
        "moderate",
        "stands at 256: bf16 holds no 257",
        facts(counted=(BF16, 1, 256.0)),
        facts(counted=(torch.float32, 0, 256.0)),
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
    "noise in lumps": (
        "noise",
        "moderate",
        "share one noise value",
        errors(burst=40 * 7),
        errors(burst=30 * 7),
    ),
    "noise biased": ("noise", "moderate", "errs toward zero", errors(score=-70.0), errors(score=-50.0)),
    "noise again": (
        "noise",
        "moderate",
        "correlate by 0.70",
        errors(again=70.0, again_variance=100.0, again_size=100.0),
        errors(again=50.0, again_variance=100.0, again_size=100.0),
    ),
    "noise of neighbours": (
        "noise",
        "moderate",
        "neighbours share",
        errors(near=70.0, near_variance=100.0, near_size=100.0),
        errors(near=50.0, near_variance=100.0, near_size=100.0),
    ),
    "noise of v": (
        "noise of exp_avg_sq",
        "moderate",
        "errs away",
        errors("moment_errors", score=70.0),
        errors("moment_errors", score=50.0),
    ),
    "noise shared": ("noise", "moderate", "shares its noise with 0.bias", shared(0.7), shared(0.5)),
    "not finite": ("grads", "severe", "3 gradients of its sample", extra(infinite=3), extra(infinite=0)),
    "no gradient": (
        "grads",
        "note",
        "never has a gradient",
        facts(looks=0, without=7),
        facts(looks=6, without=1),
    ),
    "gradient of 0": ("grads", "note", "0 at each look", facts(looks=7, idle=7), facts(looks=7, idle=6)),
    "subnormal": (
        "grads",
        "moderate",
        "60% of its gradients",
        extra(graded=100, subnormal=60),
        extra(graded=100, subnormal=50),
    ),
    "few subnormal": (
        "grads",
        "moderate",
        "below fp16",
        extra(graded=8, subnormal=8),
        extra(graded=7, subnormal=7),
    ),
    "faint": ("grads", "severe", "60% of the second moments", faint(0.6), faint(0.4)),
    "clipped in place": (
        "grads",
        "moderate",
        "clipping leaves 3e-07",
        shrunk(3e-7, 1e-6),
        shrunk(3e-3, 1e-6),
    ),
    "a loss scale": ("grads", "moderate", "clipping leaves", shrunk(3e-7, 1e-6), shrunk(2.0**-16, 1e-6)),
    "a loss scale and a clip": (
        "grads",
        "moderate",
        "clipping leaves",
        shrunk(3e-7, 1e-6),
        shrunk(3e-7, 1.0),
    ),
    "clipped": ("grads", "moderate", "clipping leaves 0.0005", clips(5e-4), clips(2e-3)),
    "summed": ("accumulate", "moderate", "8 micro-batches of gradients is 0.50%", summed(5e-3), summed(3e-3)),
    "summed badly": ("accumulate", "severe", "20.00% off", summed(0.2), summed(0.3)),
    "forgotten": (
        "accumulate",
        "severe",
        "of 4 backward passes before a step the first 3",
        heard(3, True),
        heard(3, False),
    ),
    "SAM": ("accumulate", "severe", "the first 2", heard(2, True), heard(1, True)),
    "a generator's": ("accumulate", "severe", "the first 2", heard(2, True), heard(2, True, times=1)),
    "uncleared": (
        "grads",
        "severe",
        "still there",
        lambda w: setattr(w.gradients, "uncleared", True),
        lambda w: setattr(w.gradients, "uncleared", False),
    ),
    "half of a matrix": ("grads", "moderate", "columns 32 to 63 of 64", ungraded(32, 64), ungraded(30, 60)),
    "copies": ("optimizer", "severe", "60% of the weights differ", departed(0.6), departed(0.4)),
    "in no group": ("optimizer", "severe", "it has gradients", ungrouped(True), None),
    "in no group, unused": ("optimizer", "note", "in no group", ungrouped(False), None),
    "frozen among others": (
        "frozen",
        "moderate",
        "while others of its kind",
        frozen("3.weight"),
        frozen("0.weight"),
    ),
    "frozen by plan": ("frozen", "note", "parameters don't train", frozen("0.weight"), frozen("3.weight")),
    "a rounded buffer": (
        "buffers",
        "moderate",
        "off its fp32 values",
        buffer(SOME, SOME.bfloat16().float()),
        buffer(SOME, SOME),
    ),
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
    for row in ("update", "gains", "v zero", "average still", "step narrow"):
        watch = changed(watch, ROWS[row][3])
    ranks = [f.rank for f in watch.findings()]
    assert ranks == sorted(ranks) and len(ranks) >= 3


def test_no_step_is_no_health():
    model = net()
    watch = Watch(model, torch.optim.AdamW(model.parameters()))
    assert [(f.site, f.severity) for f in watch.findings()] == [("step", "moderate")]
    assert watch.shares() == {} and watch.diagnosis().status == 1


def test_an_average_late_in_a_long_loop_is_a_finding(healthy):
    young = changed(healthy, averages(0.9999, **WANTED, arrived=1.0))
    averages(0.9999, **WANTED, arrived=1.0)
    put(young.writes.averages["ema"], 0, **WANTED, arrived=1.0)
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
