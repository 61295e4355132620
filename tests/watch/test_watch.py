"""What rounding does to a step: samples are even, and counts and sums are those of the tensors themselves."""

import math

import pytest
import torch

from lowprec.optimizers.average import EMA
from lowprec.optimizers.rounded import AdamW
from lowprec.rounding import stochastic_round
from lowprec.telemetry import StepReport, sample_entries
from lowprec.watch.average_watch import AverageWrites
from lowprec.watch.averages import Average
from lowprec.watch.writes import Tally, Writes

# ---- Samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 1024, 3, 3), (50304, 768)])
def test_a_sample_sees_all_columns(shape):
    # only the values are needed: each entry holds its own column
    columns = torch.arange(shape[-1], dtype=torch.float32).expand(shape)
    seen = sample_entries(columns)
    assert seen.numel() < 1 << 17
    share = seen.unique().numel() / min(shape[-1], seen.numel())
    assert share > 0.99, f"{share:.1%} of the columns"


def test_a_sample_is_evenly_spread_and_reaches_the_end():
    for n in (131_072, 300_000, 1_000_003, 1 << 20, 6_300_000):
        seen = sample_entries(torch.arange(float(n)))
        stride = int(seen[1] - seen[0])
        assert (seen.diff() == stride).all() and seen[0] == 0 and n - seen[-1] <= stride
        assert math.gcd(stride, n) == 1
        # the next stride that fits is near the one that would give 65,536 entries
        assert 32_768 <= seen.numel() <= 1 << 17


def test_a_sample_is_flat_and_holds_no_graph():
    t = torch.ones(3, 4, requires_grad=True) * 2
    assert sample_entries(t).shape == (12,) and not sample_entries(t).requires_grad
    turned = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(sample_entries(turned), turned.flatten())
    assert sample_entries(torch.tensor(3.0)).tolist() == [3.0]


# ---- One step ----------------------------------------------------------------------------------------------


def adamw(*tensors, lr=1e-3, **options):
    params = [torch.nn.Parameter(t) for t in tensors]
    return AdamW(params, lr=lr, compiled=False, **options), params


def stepped(optimizer, params, grads, scale=1.0):
    """(report of one step, held before, held after)"""
    names = [(str(i), p) for i, p in enumerate(params)]
    report = StepReport(optimizer, grads, scale, names, {})
    before = [optimizer.held(p).clone() for p in params]
    optimizer.step(grads=grads, grad_scale=scale)
    return report.written(), before, [optimizer.held(p).clone() for p in params]


WRITING = {
    "fp32": (torch.float32, {}),
    "nearest": (torch.bfloat16, {}),
    "stochastic": (torch.bfloat16, dict(update="stochastic")),
    "kahan": (torch.bfloat16, dict(kahan=True, exp_avg_sq="bf16")),
    "split": (torch.bfloat16, dict(master="split")),
    "8-bit codes": (torch.bfloat16, dict(update="stochastic", exp_avg="int8", exp_avg_sq="int8")),
}


@pytest.mark.parametrize("dtype, options", WRITING.values(), ids=WRITING)
def test_the_report_counts_what_was_written(dtype, options, scale=0.3):
    torch.manual_seed(0)
    optimizer, params = adamw(torch.randn(70, 60).to(dtype), torch.randn(5).to(dtype), lr=3e-3, **options)
    for _ in range(3):
        # no randn: it draws zeros now and then (torch 2.11), whose updates do not count
        grads = {p: torch.empty(p.shape).uniform_(0.1, 2).to(dtype) for p in params}
        moments = [optimizer.moment(p, "exp_avg_sq").clone() for p in params]
        wanted = [optimizer.wanted(p, grads[p].float().flatten() * 0.3) for p in params]
        report, before, after = stepped(optimizer, params, grads, scale)
        changed = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
        assert report["update_survival"] == pytest.approx(changed / 4205, abs=1e-9)
        step, size = (math.sqrt(sum(float(t.double().square().sum()) for t in ts)) for ts in (wanted, before))
        assert report["update_ratio"] == pytest.approx(step / size, rel=1e-6)
        new = [optimizer.moment(p, "exp_avg_sq") for p in params]
        moved = sum(int((a != b).sum()) for a, b in zip(new, moments, strict=True))
        assert report["exp_avg_sq_moved"] == pytest.approx(moved / 4205, abs=1e-9)


class Unknown:
    """An optimiser that can tell neither what it wants nor its moments."""

    def held(self, p, pick):
        return pick(p.detach())

    def moment(self, p, name, pick):
        return None

    def wanted(self, p, g, pick):
        return None


def test_an_optimiser_that_can_not_tell_is_judged_by_what_it_did():
    p = torch.nn.Parameter(torch.full((4,), 2.0))
    grads = {p: torch.tensor([1.0, 1.0, 1.0, 0.0])}
    report = StepReport(Unknown(), grads, 1.0, [("p", p)], {})
    with torch.no_grad():
        p[:2] += 0.5
    written = report.written()
    assert written == {"update_survival": 2 / 3, "update_ratio": math.sqrt(0.5) / 4}


@pytest.mark.parametrize("dtype, low, high", [("fp32", 1.0, 1.0), ("bf16", 0.0, 0.3)])
def test_the_average_is_counted(dtype, low, high):
    torch.manual_seed(0)
    optimizer, (p, still) = adamw(torch.randn(4000), torch.ones(100))
    names = [("p", p), ("still", still)]
    average = EMA(names, 0.999, dtype, low_part=optimizer.low_part, compiled=False)
    grads = {p: torch.randn(4000)}
    report = StepReport(optimizer, grads, 1.0, names, average.shadow)
    optimizer.step(grads=grads)
    old = average.shadow["p"].clone()
    average.update()
    differs = optimizer.held(p) != old.float()
    moved = int((differs & (average.shadow["p"] != old)).sum())
    share = report.averaged()["ema_moved"]  # the weight that stands still is not counted
    assert share == pytest.approx(moved / int(differs.sum()), abs=1e-9) and low <= share <= high


# ---- Many steps --------------------------------------------------------------------------------------------


def test_the_tally_forgives_noise_and_not_loss():
    torch.manual_seed(0)
    stored = (torch.rand(20_000) + 0.5).bfloat16()
    old, target = stored.float(), stored.float() * 1.0002  # a tenth of half an ulp
    noise = torch.randint(1 << 16, (20_000,), dtype=torch.int32)
    half = stochastic_round(old + (target - old) / 2, noise)
    writes = {
        "nearest": target.bfloat16(),
        "exact": target,
        "stochastic": stochastic_round(target, noise),
        "half": half,
    }
    tallies = {}
    for name, new in writes.items():
        tallies[name] = Tally()
        one = dict(index=[0], lengths=[20_000])
        tallies[name].add(target.to(stored.dtype) == stored, old, target, new.float(), **one)
    assert tallies["nearest"].lost > 0.95 and 0.2 < tallies["half"].lost < 0.5
    assert tallies["exact"].lost == tallies["stochastic"].lost == 0.0
    assert all(t.stuck == 1.0 for t in tallies.values())


def test_a_step_that_a_loss_scaler_skips_is_compared_with_nothing():
    net = torch.nn.Linear(8, 8)
    named = list(net.named_parameters())
    optimizer, average = AdamW(net.parameters(), lr=1e-3), EMA(named, decay=0.9)
    writes = Writes(optimizer, named)
    averaged = AverageWrites(Average.of(average, net), optimizer, named)
    for look in (writes, averaged):
        optimizer.register_step_pre_hook(look.before)
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    average.update()
    counts = []
    for _ in range(2):
        writes.after()
        averaged.after()
        counts.append((writes.weights.entries, averaged.path.entries))
    assert counts == [(72, 72)] * 2
