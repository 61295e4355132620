"""offload.py: moments in the memory of the CPU have the bits of the ordinary step; nothing is read before it
came, and nothing overwritten before it left.

There is no GPU here, so copies are made by a traffic that knows its promises: at the last moment that they
allow, or at once. `Ordered` proves from the promises alone that two accesses of one memory, one of them a
write, always have an order.
"""

import functools

import cli
import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, RECIPES, batches, equal, net, refused, start, steps
from torch import nn

import train
from benchmarks import memory
from lowprec.optimizers import buckets
from lowprec.optimizers.rounded import AdamW
from lowprec.parts.loss_scale import LossScale
from lowprec.parts.offload import Offload, Traffic, bytes_kept_away, bytes_of_room, offloaded, views_of_room
from lowprec.precision import Precision, recipe
from lowprec.watch.watch import Watch

eager = common.eager

# ---- Traffic without a GPU ---------------------------------------------------------------------------------


class Late:
    """A Traffic whose copies are done at the last moment that its promises allow."""

    def __init__(self):
        self.waiting = {"in": [], "out": []}  # [(number, pairs, what they wait for)]
        self.count, self.most, self.rooms = 0, 0, []

    def memory(self, t):
        return t.clone()

    def room(self, n):
        self.rooms.append(torch.full((n,), 77, dtype=torch.uint8))
        return self.rooms[-1]

    def now(self):
        return None  # what the host asked for is done at once

    def copy(self, way, pairs, after):
        self.count += 1
        self.waiting[way].append((self.count, list(pairs), after))
        return way, self.count

    def need(self, copied):
        way, number = copied
        while self.waiting[way] and self.waiting[way][0][0] <= number:
            _, pairs, after = self.waiting[way].pop(0)
            for event in after:
                if event is not None:
                    self.need(event)
            for target, source in pairs:
                target.copy_(source)

    wait = need


class Early(Late):
    """One whose copies are done at once."""

    def copy(self, way, pairs, after):
        copied = super().copy(way, pairs, after)
        self.need(copied)
        return copied


class Ordered(Early):
    """One that keeps book of who reads and writes which memory, and of what is certain to come before."""

    def __init__(self):
        super().__init__()
        self.book = []  # [(set of what came before, reads, writes)], of copies and of what the GPU is given
        self.of_gpu, self.last, self.numbers = set(), {"in": set(), "out": set()}, {}

    def enter(self, before, reads, writes):
        self.book.append((frozenset(before), reads, writes))
        return {*before, len(self.book) - 1}

    def given(self, states):
        """The GPU is given a step on these."""
        places = [place(t) for t in states]
        self.of_gpu = self.enter(self.of_gpu, places, places)

    def now(self):
        return self.of_gpu

    def copy(self, way, pairs, after):
        before, pairs = set(self.last[way]), list(pairs)
        for event in after:
            before |= event if isinstance(event, set) else self.numbers[event]
        copied = Late.copy(self, way, pairs, [])
        self.last[way] = self.enter(before, [place(s) for _, s in pairs], [place(t) for t, _ in pairs])
        self.numbers[copied] = self.last[way]
        Late.need(self, copied)
        return copied

    def need(self, copied):
        self.of_gpu = self.of_gpu | self.numbers[copied]

    def wait(self, copied):
        """The host waits for nothing in a step."""
        raise AssertionError("the host waited")

    def races(self):
        found = []
        for later, (before, reads, writes) in enumerate(self.book):
            for earlier in range(later):
                its_reads, its_writes = self.book[earlier][1:]
                shared = meet(writes, its_writes) or meet(writes, its_reads) or meet(reads, its_writes)
                if shared and earlier not in before:
                    found.append((earlier, later))
        return found


def place(t):
    return t.untyped_storage().data_ptr(), t.storage_offset() * t.element_size(), t.nbytes


def meet(places, others):
    return any(
        a == b and first < start + n and start < first + m
        for a, first, m in places
        for b, start, n in others
    )


# ---- The same bits -----------------------------------------------------------------------------------------


def twins(name, traffic=Late, width=16, **options):
    """(a run, the same run with its moments away)."""
    make = functools.partial(start, name, lr=1e-2, weight_decay=0.1, seed=3, **options)
    return make(net(width=width)), make(net(width=width), states_on=Offload(traffic()))


@pytest.fixture
def small_buckets(monkeypatch):
    """Many buckets in a small net: of one tensor each, and of several."""
    monkeypatch.setattr(buckets.Bucket, "SMALL", 64)


def test_fp16_skips_steps_as_ever(small_buckets):
    plain, away = twins("fp16", init_loss_scale=2.0**40)
    steps(plain, 12), steps(away, 12)
    assert plain.part(LossScale).skipped == away.part(LossScale).skipped > 0 and equal(plain, away)


@pytest.mark.parametrize("opt", ["opt8bit", "opt4bit"])
def test_large_coded_tensors_have_them(opt):
    """Of more than one bucket, a coded one in pieces, with a last block that is short."""
    made = []
    for away in ("device", Offload(Late())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(700, 701), nn.Linear(701, 400))
        flags = dict(pure_bf16=True, stochastic=True, **{opt: True})
        made.append(Precision(model, recipe(**flags), lr=1e-2, states_on=away))
        made[-1].optimizer.PIECE = 1 << 16
        for _ in range(2):
            made[-1].backward(made[-1](torch.ones(2, 700)).square().mean())
            made[-1].step()
    assert equal(*made)


OPTIONS = [dict(accumulate=2), dict(clip_tensor=1e-3), dict(clip_grad=1e-3)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accumulation_and_clipping_change_nothing(options, small_buckets):
    plain, away = twins("stochastic", **options)
    for run in (plain, away):
        common.train(run, 3)
    assert equal(plain, away)


@pytest.mark.parametrize("name", ["fp32", "split opt8bit", "stochastic opt4bit"])
def test_telemetry_and_watch_tell_the_same(name, small_buckets):
    plain, away = twins(name)
    assert steps(plain, measure=True) == steps(away, measure=True)
    looks = [Watch(run.model, run.optimizer, run.ema, every=1) for run in (plain, away)]
    steps(plain, 3, 4), steps(away, 3, 4)
    assert looks[0].shares() == looks[1].shares() and equal(plain, away)
    p, q = plain.params[0], away.params[0]
    assert away.optimizer.clear(q, "exp_avg") == plain.optimizer.clear(p, "exp_avg")
    steps(plain, 1, 7), steps(away, 1, 7)
    assert equal(plain, away)


# ---- Order -------------------------------------------------------------------------------------------------


class Two(Offload):
    """An Offload that keeps book of the step of each bucket."""

    def passing(self, work):
        for item in super().passing(work):
            self.traffic.given([t for held in item.piece.moments.values() for t in held.tensors().values()])
            yield item


def book(tensors=7):
    params = [nn.Parameter(common.draw(70 + i, seed=i).to(BF16)) for i in range(tensors)]
    away = Two(Ordered())
    optimizer = AdamW(params, 1e-2, update="stochastic", exp_avg="bf16", compiled=False, away=away)
    assert len(optimizer._buckets) == tensors
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return away.traffic


def test_all_accesses_of_a_memory_are_ordered(small_buckets):
    traffic = book()
    assert len(traffic.book) == 3 * 7 * 3, "a copy there, a step and a copy back, of each bucket"
    assert [book(tensors).races() for tensors in (1, 2, 3, 7)] == [[]] * 4
    steps = [n for n, (_, reads, writes) in enumerate(traffic.book) if reads is writes]
    assert steps[:2] == [2, 5]
    for step in steps[:6]:  # while a bucket is stepped the next one is on its way: nothing orders these two
        assert step - 1 not in traffic.book[step][0] and step not in traffic.book[step - 1][0]


def test_a_room_has_what_a_state_needs_and_kernels_can_read_it():
    state = {"a": torch.arange(5).float(), "b": torch.arange(7).to(torch.uint8), "c": torch.ones(3)}
    room = torch.zeros(bytes_of_room(state), dtype=torch.uint8)
    found = views_of_room(room, state)
    for name, t in state.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape
        assert found[name].storage_offset() * t.element_size() % 16 == 0
        found[name].copy_(t)
    assert all(torch.equal(found[name], t) for name, t in state.items())


def test_at_most_two_buckets_are_there_and_the_next_comes_ahead(small_buckets):
    seen = []

    class Seen(Late):
        def copy(self, way, pairs, after):
            pairs = list(pairs)
            seen.append((way, sum(t.nbytes for t, _ in pairs)))
            return super().copy(way, pairs, after)

    run = twins("fp32", Seen)[1]
    steps(run, 1)
    count = len(run.optimizer._buckets)
    assert [way for way, _ in seen] == ["in", "in", *["out", "in"] * (count - 2), "out", "out"]
    away, once = bytes_kept_away(run.optimizer)
    assert sum(n for way, n in seen if way == "in") == away == sum(n for way, n in seen if way == "out")
    rooms = sum(room.numel() for room in run.away.traffic.rooms)
    assert rooms <= once < away


# ---- Where it is, and where not ----------------------------------------------------------------------------


def test_where_moments_are_kept():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert offloaded("cpu", cpu) is None and offloaded("device", cuda) is None
    assert start("fp32", states_on="cpu").away is None, "on a CPU they are there already"
    refused(lambda: start("fp32", states_on="disk"), "choose from device, cpu")


@pytest.mark.parametrize("name", ["stochastic", "split opt8bit"])
def test_a_plan_says_what_the_gpu_holds(name):
    with torch.device("meta"):
        model = net(width=256)
    run = start(name, model, states_on="cpu")
    n = sum(p.numel() for p in run.params)
    away, once = bytes_kept_away(run.optimizer)
    ledger, other = run.ledger(), start(name, model).ledger()
    assert ledger.state_bytes == other.state_bytes and other.away is None
    assert ledger.away == (away / n, once)
    both = sum(run.optimizer.nbytes()[moment] for moment in ("exp_avg", "exp_avg_sq"))
    assert both - 2**14 <= away <= both, "but for tables of codes, which all tensors share"
    assert f"{away / n:.2f} of them in the memory of the CPU" in str(ledger)
    assert "on_cpu" in "".join(ledger.json()) and "on_cpu" not in "".join(other.json())
    for row in ledger.rows:
        assert ("memory of the CPU" in row["why"]) == row["site"].startswith("exp_avg")


def test_bench_memory_counts_both_memories():
    args = type("Args", (), dict(device=torch.device("cpu")))
    plain, away = (
        memory.allocated_row("dit:tiny:8:2", dict(memory.PURE_BF16_STOCHASTIC, **more), args)
        for more in ({}, dict(states_on="cpu"))
    )
    assert away["bytes_per_parameter"] == plain["bytes_per_parameter"] == away["ledger"] == 8
    assert away["on_cpu"] == 4 and "on_cpu" not in plain and 0 < away["rooms"] < 4.01
    assert memory.OFFLOADED in memory.WAYS_TO_WRITE
    table = memory.memory_table({"": plain, "--pure_bf16 --stochastic --states_on cpu": away})
    assert "| 8.00, 4.00 of them on the GPU |" in table


PURE = ("--pure_bf16", "--stochastic")
folder = cli.in_a_folder_of_its_own


# ---- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp16"])
def test_steps_on_cuda_have_the_same_bits(name, small_buckets):
    runs = [start(name, net(width=16).cuda(), lr=1e-2, states_on=where) for where in ("device", "cpu")]
    for run in runs:
        for x, y in batches(8, device="cuda"):
            run.backward(F.mse_loss(run(x), y))
            run.step()
    runs[1].optimizer.state_dict()
    for p, q in zip(*(run.params for run in runs), strict=True):
        assert torch.equal(p, q)
        for key, value in runs[0].optimizer.state[p].items():
            own = runs[1].optimizer.state[q][key]
            assert value == own if key == "step" else torch.equal(value.cpu(), own.cpu())
            assert key == "step" or own.is_pinned() == key.startswith("exp_avg")


@pytest.mark.gpu
def test_the_gpu_holds_two_buckets_within_a_step_and_none_after():
    def peak(where):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
        run = Precision(model, recipe(), lr=1e-3, states_on=where)
        run.averages = {}
        for _ in range(2):
            run.backward(run(torch.ones(2, 2048, device="cuda")).square().mean())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    (there, after), (away, after_away) = peak("device"), peak("cpu")
    bucket = 2048 * 2048 * 8
    assert after - after_away > 7.9 * bucket and there - away > 5.5 * bucket


@pytest.mark.gpu
def test_a_step_on_cuda_waits_for_nothing():
    run = start("stochastic opt8bit", net(width=16).cuda(), states_on="cpu")
    assert isinstance(run.away.traffic, Traffic)
    common.waits_for_nothing(run)


@pytest.mark.gpu
def test_the_command_on_cuda(capsys):
    assert cli.quick(*PURE, "--device", "cuda", name="plain") == 0
    assert cli.quick(*PURE, "--device", "cuda", "--states_on", "cpu", name="run", steps=2) == 0
    assert cli.quick(*PURE, "--device", "cuda", "--states_on", "cpu", name="run") == 0
    assert "in the memory of the CPU" in capsys.readouterr().out
    assert train.FLAGS["states_on"].kind == "machine"
