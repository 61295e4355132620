"""bench.py conformance: each planted defect is called by its name and nothing else is."""

import copy
import math

import common
import pytest
import torch
from common import BF16
from torch.distributed.tensor import DTensor

from benchmarks import conformance
from benchmarks.conformance import DrawnSize
from benchmarks.conformance_command import CHECKS, CHECKS_OF_KIND, answer_of
from benchmarks.conformance_writes import writes
from benchmarks.subjects import OptimizerSubject

eager = common.eager
SMALL = DrawnSize(side=128, steps=30, decay_steps=125, before=40, after=350, path=(800, 1000))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(conformance, "SIZE", SMALL)
    with torch.compiler.set_stance("force_eager"):
        yield


def found(subject, *checks):
    """{check: Result} of the findings."""
    known = CHECKS_OF_KIND[subject.kind]
    results = {check: answer_of(known[check], subject) for check in checks or known}
    return {check: result for check, result in results.items() if result.verdict == "finding"}


# ---- Planted defects ---------------------------------------------------------------------------------------


class Right(torch.optim.Optimizer):
    """AdamW on bf16 weights with fp32 arithmetic; noise goes by (seed, step, place). The rest breaks it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, seed=0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self.seed = seed

    @torch.no_grad()
    def step(self, closure=None):
        start = 0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=self.zeros(p), exp_avg_sq=self.zeros(p))
                state["step"] += 1
                self.update(p, self.gradient(p), state, group, start)
                start += p.numel()

    def load_state_dict(self, state):
        """torch's loader casts states to the dtype of the weights."""
        saved = [entry for _, entry in sorted(state["state"].items())]
        super().load_state_dict(state)
        for mine, theirs in zip(self.state.values(), saved, strict=True):
            mine.update({name: copy.deepcopy(theirs[name]) for name in theirs})

    def zeros(self, p):
        return torch.zeros_like(p, dtype=torch.float32)

    def gradient(self, p):
        return p.grad.float()

    def update(self, p, g, state, group, start):
        (beta1, beta2), t = group["betas"], state["step"]
        m = state["exp_avg"].float().lerp(g, 1 - beta1)
        v = state["exp_avg_sq"].float().lerp(g * g, 1 - beta2)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        x = self.decayed(p, group["lr"] * group["weight_decay"]) - group["lr"] * step
        p.copy_(self.rounded(x, self.draw(p, t, start)) if p.dtype == BF16 else x)

    def decayed(self, p, share):
        return p.float() * (1 - share)

    def draw(self, p, step, start):
        """int32 like p, from a long row of which the tensor takes its place."""
        generator = torch.Generator().manual_seed(self.key(p, step, start))
        row = torch.randint(0, 1 << 16, (start + p.numel(),), generator=generator, dtype=torch.int32)
        return row[start:].view(p.shape)

    def key(self, p, step, start):
        return 1000 * step + self.seed

    def rounded(self, x, noise):
        up = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
        return torch.where(x.isfinite(), up, x).to(BF16)


class Nearest(Right):
    def rounded(self, x, noise):
        return x.to(BF16)


class Truncated(Right):
    """Seven eighths of the noise that is needed: too often down."""

    def rounded(self, x, noise):
        return super().rounded(x, noise - (noise >> 3))


class SharedByTensors(Right):
    def draw(self, p, step, start):
        return super().draw(p, step, 0)


class SameEachStep(Right):
    def key(self, p, step, start):
        return self.seed


class SameForEachSeed(Right):
    def key(self, p, step, start):
        return 1000 * step


class BeginsAgain(Right):
    """A generator that is not saved."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.generator = torch.Generator().manual_seed(self.seed)

    def draw(self, p, step, start):
        return torch.randint(0, 1 << 16, p.shape, generator=self.generator, dtype=torch.int32)


class KeyedByShape(Right):
    def key(self, p, step, start):
        return 1000 * step + self.seed + p.numel()


class Unkeyed(Right):
    """Draws differ from run to run, whatever the seed."""

    drawn = 0

    def key(self, p, step, start):
        Unkeyed.drawn += 1
        return Unkeyed.drawn


class FrozenV(Right):
    def zeros(self, p):
        return torch.zeros_like(p)


class DecayOfItsOwn(Right):
    def decayed(self, p, share):
        return p.mul(1 - share).float()


class Forgets(Right):
    """The counter that corrects the bias is no part of the state."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for state in self.state.values():
            state["step"] = 0


class CastByTheLoader(Right):
    load_state_dict = torch.optim.Optimizer.load_state_dict


class Spreads(Right):
    """A sum over the tensor, as a norm that clips: what is no number reaches all."""

    def gradient(self, p):
        return p.grad.float() + 0 * p.grad.sum()


class Hides(Right):
    def gradient(self, p):
        return p.grad.float().nan_to_num()

    def decayed(self, p, share):
        return super().decayed(p, share).nan_to_num()


class NoNumbersBelow(Right):
    """A fixed floor under weights."""

    def decayed(self, p, share):
        return torch.where(p.float().abs() < 1e-30, 0.0, p.float()) * (1 - share)


class NoScalars(Right):
    def gradient(self, p):
        return p.grad.float()[:] if p.numel() else p.grad[0]


def own(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Shards(Right):
    """It takes DTensors, and draws the noise of a shard's place in the whole tensor."""

    def zeros(self, p):
        return super().zeros(own(p))

    def gradient(self, p):
        return own(p.grad).float()

    def update(self, p, g, state, group, start):
        super().update(own(p), g, state, group, start + self.first(p))

    def first(self, p):
        return p.device_mesh.get_rank() * own(p).numel() if isinstance(p, DTensor) else 0


class AlikeOnAllRanks(Shards):
    def first(self, p):
        return 0


class OfTheGlobalGenerator(Shards):
    """No defect, as torchao and torchastic do it: the program has to save torch's generator."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0):
        super().__init__(params, lr, betas, weight_decay)

    def draw(self, p, step, start):
        return torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)


WRITES = {"write of 1/10 ulp", "write of 1/3 ulp", "write of 1/2 ulp"}
PLANTED = {
    Right: {},
    OfTheGlobalGenerator: {},
    Shards: {},
    AlikeOnAllRanks: {"noise of ranks": "share their noise (+1.00)", "sharded": "get other bits"},
    Nearest: dict.fromkeys(WRITES, "writes are biased") | {"decay alone": "weight decay alone: 0%"},
    Truncated: dict.fromkeys(WRITES, "writes are biased") | {"decay alone": "weight decay alone"},
    SharedByTensors: {"noise of tensors": "share their noise", "split in two": "get other bits"},
    SameEachStep: {"noise of steps": "repeats from step to step", "noise after resume": "begins again"}
    | {"decay alone": "weight decay alone"},
    SameForEachSeed: {"noise of seeds": "other seeds share"},
    BeginsAgain: {"noise after resume": "begins again", "exact resume": "differs in"},
    KeyedByShape: {"split in two": "get other bits"},
    FrozenV: {"v after a drop": "times too high"},
    DecayOfItsOwn: {"decay alone": "weight decay alone: 0%"},
    Forgets: {"exact resume": "differs in", "noise after resume": "begins again"},
    CastByTheLoader: {"exact resume": "gives states of other dtypes"},
    Spreads: {"NaN": "NaN spreads from one entry to 16383 others", "infinity": "to 16383 others"},
    Hides: {"NaN": "NaN in a gradient is turned into a number; NaN in a weight is"},
    NoNumbersBelow: {"extremes": "a zero gradient changes"},
    NoScalars: {"sizes": "size empty"},
}


def planted(kind):
    seed = set() if kind is OfTheGlobalGenerator else {"seed"}
    return OptimizerSubject(kind.__name__, kind, {"lr", "betas", "weight_decay"} | seed)


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_defect_is_called_by_its_name_and_nothing_else_is(kind):
    findings = found(planted(kind))
    said = {check: result.said for check, result in findings.items()}
    assert set(said) == set(PLANTED[kind]), said
    for check, words in PLANTED[kind].items():
        assert words in said[check]


def test_every_check_has_a_defect_that_it_finds():
    told = {check for checks in PLANTED.values() for check in checks}
    assert told == set(CHECKS) - {"compiled", "state B/param"}, "the first has a test of its own"


def test_noise_that_nobody_can_repeat_is_found():
    findings = found(planted(Unkeyed), "noise of seeds", "exact resume")
    assert "two runs of one seed differ" in findings["noise of seeds"].said and "exact resume" in findings


def test_shards_get_the_bits_of_the_whole_or_are_not_claimed():
    shown = {kind: answer_of(CHECKS["sharded"], planted(kind)) for kind in (Right, Shards, AlikeOnAllRanks)}
    assert shown[Right].shown == "takes no DTensor" and "DTensor" in shown[Right].figures["error"]
    assert shown[Shards].shown == "same bits" and shown[Shards].verdict == "holds"
    # the second shard alone: its noise is another than that of its place
    assert 0 < shown[AlikeOnAllRanks].figures["differ"] < 0.5
    assert abs(answer_of(CHECKS["noise of ranks"], planted(Shards)).figures["correlation"]) < 0.1
    assert not torch.distributed.is_initialized()


def test_noise_of_the_global_generator_is_told_where_it_needs_the_program():
    subject = planted(OfTheGlobalGenerator)
    assert answer_of(CHECKS["exact resume"], subject).shown == "by torch's generator"
    for check, shown in (("sharded", "by torch's generator"), ("noise of ranks", "+1.000 if seeded alike")):
        result = answer_of(CHECKS[check], subject)
        assert (result.verdict, result.shown) == ("not claimed", shown)
    again = answer_of(CHECKS["noise after resume"], subject)
    assert again.verdict == "holds" and again.figures["anew"] > 0.9
    assert "where a script seeds torch's generator at each start" in again.said


@pytest.mark.parametrize("fraction", [1 / 10, 1 / 3, 1 / 2])
def test_the_mean_of_writes_and_its_standard_error_are_those_of_the_draws(fraction):
    result = writes(planted(Right), SMALL, fraction)
    draws = 128 * 128 // 4 * 30
    assert result.figures["draws"] == draws > 100_000
    for mean, error in zip(result.figures["mean"], result.figures["standard_error"], strict=True):
        assert error == pytest.approx(math.sqrt(fraction * (1 - fraction) / draws), rel=0.1)
        assert abs(mean) < 5 * error
    lost = writes(planted(Nearest), SMALL, 1 / 3).figures
    # counted away from zero: a step that shortens a weight and is lost leaves it too long
    assert lost["mean"] == pytest.approx([1 / 3, -1 / 3, -1 / 3, 1 / 3], rel=1e-3)
    cut = writes(planted(Truncated), SMALL, fraction).figures["mean"]
    assert all(mean < -0.01 for mean in cut), "down, whatever the sign"


def test_steps_of_another_size_and_decay_by_way_of_the_gradient_are_no_findings():
    class Doubled(Right):
        def update(self, p, g, state, group, start):
            super().update(p, g, state, {**group, "lr": 2 * group["lr"]}, start)

    class Coupled(Right):
        def update(self, p, g, state, group, start):
            g = g + group["weight_decay"] * p.float()
            super().update(p, g, state, {**group, "weight_decay": 0.0}, start)

    doubled = planted(Doubled)
    assert doubled.unit(64) == pytest.approx(2, rel=1e-2) and not found(doubled, *WRITES)
    assert answer_of(CHECKS["decay alone"], planted(Coupled)).shown == "not decoupled"


def test_what_holds_of_each_entry_alone_is_not_claimed_where_entries_are_coupled():
    class ByNorm(Right):
        """Steps of the length of the whole gradient, and vectors are refused when it is made."""

        def __init__(self, params, *args, **options):
            params = list(params)
            assert all(p.dim() == 2 for p in params), "matrices alone"
            super().__init__(params, *args, **options)

        def update(self, p, g, state, group, start):
            state["exp_avg"].copy_(g)
            x = p.float() - group["lr"] * g / g.norm() * g.numel() ** 0.5
            p.copy_(self.rounded(x, self.draw(p, state["step"], start)) if p.dtype == BF16 else x)

    subject = planted(ByNorm)
    assert not subject.elementwise and planted(Right).elementwise
    results = {check: answer_of(ask, subject) for check, ask in CHECKS.items()}
    coupled = {check for check, result in results.items() if result.shown == conformance.NOT_ELEMENTWISE}
    assert coupled == {"split in two", "sharded", "NaN", "extremes"}
    assert results["sizes"].shown == "1 of 7, 6 refused" and results["sizes"].verdict == "holds"
    assert results["v after a drop"].shown != "1.00", "it keeps none"
    assert not any(results[check].verdict == "finding" for check in WRITES)


@pytest.mark.compiled
def test_a_compiled_step_that_drops_a_rounding_is_found():
    class Fused(Right):
        wrong = True

        def update(self, p, g, state, group, start):
            wrong = self.wrong

            @torch.compile(backend="eager")
            def step(p):
                p.sub_(0.05 if wrong and torch.compiler.is_compiling() else 0.02)

            step(p)

    wrong = answer_of(CHECKS["compiled"], planted(Fused))
    assert wrong.verdict == "finding" and "other values than the eager one" in wrong.said
    Fused.wrong = False
    assert answer_of(CHECKS["compiled"], planted(Fused)).shown == "same bits"
    assert answer_of(CHECKS["compiled"], planted(Right)).shown == "compiles nothing"
