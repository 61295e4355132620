"""The library on models and in loops as people write them in plain torch.

Models that return tuples or dictionaries, are called with keywords, share or freeze parts, recompute
activations or are compiled; torch's schedules on groups with options of their own.
"""

import copy
import io
from collections import namedtuple
from dataclasses import dataclass

import golden
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec.errors import Refused
from lowprec.kernels import compiled as compiling
from lowprec.precision import Precision, recipe

BF16 = torch.bfloat16
LOW = dict(pure_bf16=True, stochastic=True)


class Everything:
    def __contains__(self, kernel):
        return True


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """A fused step is the same, after seconds of compiling; test_adamw.py shows it."""
    monkeypatch.setattr(compiling, "unfused", Everything())


def same(run, other):
    """Whether two runs hold the same bits."""
    return golden.moved(golden.digests(run.state_dict()), golden.digests(other.state_dict())) == []


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- A GPT as in nanoGPT -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):  # [B, T, width]
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=-1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """(tokens int64 [B, T], targets alike) -> (logits [B, T, V], loss or None); the head is the embedding."""

    def __init__(self, width=16, vocabulary=32, layers=2, recompute=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight
        self.recompute = recompute

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(step):
    start = torch.randint(32, (4, 1), generator=torch.Generator().manual_seed(step % 5))
    ids = (start + torch.arange(13)) % 32
    return ids[:, :-1], ids[:, 1:]


def gpt_run(seed=0, net=None, flags=LOW, lr=3e-3):
    torch.manual_seed(seed)
    return Precision(GPT() if net is None else net, recipe(**flags), lr=lr, ema_decay=0.9)


def train_gpt(run, first=0, last=10):
    losses = []
    for step in range(first, last):
        idx, targets = text(step)
        logits, loss = run(idx, targets=targets)
        assert logits.shape == (4, 12, 32)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


def test_a_tuple_with_the_loss_inside():
    run = gpt_run()
    logits, loss = run(*text(0))
    assert loss.dtype == logits.dtype == torch.float32
    logits, none = run(text(0)[0])
    assert logits.shape == (4, 1, 32) and none is None


def test_a_loss_inside_trains_as_in_fp32():
    """Within 3 % of fp32's progress (measured: 1 %). The loss inside has the dtype of the logits, bf16."""
    last = {}
    for name, flags in {"fp32": {}, "bf16": LOW}.items():
        run = gpt_run(flags=flags, lr=2e-2)
        first = outside(run, 0)
        train_gpt(run, last=40)
        last[name] = sum(outside(run, step) for step in range(5)) / 5
    progress = first - last["fp32"]
    assert progress > 0.2 * first
    assert abs(last["bf16"] - last["fp32"]) < 0.03 * progress


@torch.no_grad()
def outside(run, step):
    idx, targets = text(step)
    logits, _ = run(idx, targets)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_positions_and_keywords_are_the_same_call():
    run = gpt_run()
    idx, targets = text(0)
    by_name = run(idx=idx, targets=targets)
    assert all(map(torch.equal, by_name, run(idx, targets)))


def test_resume_of_a_gpt():
    whole = gpt_run()
    train_gpt(whole, last=5)
    state = through_a_file(whole.state_dict())
    train_gpt(whole, 5)
    again = gpt_run(seed=1)
    again.load_state_dict(state)
    train_gpt(again, 5)
    assert same(again, whole)


def test_gradient_checkpointing_changes_nothing():
    plain, recomputed = gpt_run(), gpt_run()
    recomputed.model.recompute = True
    assert train_gpt(plain) == train_gpt(recomputed)
    assert same(plain, recomputed)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["wrapped before", "in place", "as forward"])
def test_a_compiled_model_trains_the_same_bits(how, backend):
    plain = gpt_run()
    torch.manual_seed(0)
    net = GPT()
    if how == "wrapped before":
        compiled = gpt_run(net=torch.compile(net, backend=backend))
    elif how == "in place":
        net.compile(backend=backend)
        compiled = gpt_run(net=net)
    else:
        compiled = gpt_run(net=net)
        compiled.forward = torch.compile(compiled.model, backend=backend)
    assert train_gpt(plain, last=4) == pytest.approx(train_gpt(compiled, last=4), abs=1e-6)
    with torch.no_grad():
        logits, _ = compiled.generator()(text(0)[0])
        torch.testing.assert_close(logits, plain.generator()(text(0)[0])[0])
    fresh = GPT()
    fresh.load_state_dict(compiled.weights("ema"), strict=True)


# ---- Groups and schedules ----------------------------------------------------------------------------------


def two_groups(net):
    gains = [p for p in net.parameters() if p.dim() < 2]
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    decayed = {"params": matrices, "lr": 3e-3, "weight_decay": 0.1}
    return [decayed, {"params": gains, "lr": 1e-3, "weight_decay": 0.0}]


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def test_groups_under_a_schedule_of_torch_are_torchs_adamw():
    """In fp32 the same bits as torch.optim.AdamW with the same groups and the same schedule."""
    torch.manual_seed(0)
    net = GPT()
    reference = copy.deepcopy(net)
    run = Precision(net, recipe(), groups=two_groups(net), lr=1.0, ema_decay=0.9)
    optimizer = torch.optim.AdamW(two_groups(reference), foreach=False)
    schedules = cosine(run.optimizer), cosine(optimizer)
    for step in range(10):
        train_gpt(run, step, step + 1)
        optimizer.zero_grad()
        reference(*text(step))[1].backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        lrs = [group["lr"] for group in run.optimizer.param_groups]
        assert lrs == [group["lr"] for group in optimizer.param_groups]
    assert lrs == pytest.approx([0, 0])
    for (name, p), q in zip(run.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_groups_keep_their_options_in_bf16():
    """Parameters of the group whose rate is zero do not move, and the others do."""
    torch.manual_seed(0)
    net = GPT()
    groups = two_groups(net)
    groups[1]["lr"] = 0.0
    run = Precision(net, recipe(**LOW), groups=groups, lr=1.0, ema_decay=0.9)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    train_gpt(run)
    for name, p in run.model.named_parameters():
        assert torch.equal(p, before[name]) == (p.dim() < 2), name


def test_groups_of_generators_train():
    """`{"params": net.head.parameters()}` is how groups are written: a generator can be read only once."""
    torch.manual_seed(0)
    net = GPT()
    groups = [{"params": net.h.parameters(), "lr": 1e-3}, {"params": net.ln_f.parameters()}]
    groups += [{"params": net.wpe.weight}, {"params": [net.wte.weight]}]  # one parameter alone is a group too
    run = Precision(net, recipe(**LOW), groups=groups, lr=3e-3, ema_decay=0.9)
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [24, 2, 1, 1]
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-3, 3e-3, 3e-3, 3e-3]
    before = [p.detach().clone() for p in run.params]
    train_gpt(run)
    assert not any(torch.equal(p, q) for p, q in zip(run.params, before, strict=True))


def test_a_schedule_resumes():
    def new(seed):
        torch.manual_seed(seed)
        net = GPT()
        run = Precision(net, recipe(**LOW), groups=two_groups(net), ema_decay=0.9)
        return run, cosine(run.optimizer)

    def train(run, schedule, first, last):
        for step in range(first, last):
            train_gpt(run, step, step + 1)
            schedule.step()

    whole, schedule = new(0)
    train(whole, schedule, 0, 5)
    state = through_a_file({"run": whole.state_dict(), "schedule": schedule.state_dict()})
    train(whole, schedule, 5, 10)
    again, schedule = new(1)
    again.load_state_dict(state["run"])
    schedule.load_state_dict(state["schedule"])
    train(again, schedule, 5, 10)
    assert same(again, whole)
    assert [g["lr"] for g in again.optimizer.param_groups] == [g["lr"] for g in whole.optimizer.param_groups]


# ---- Frozen, unused and shared parts -----------------------------------------------------------------------


def test_frozen_parameters_stay_and_are_saved():
    torch.manual_seed(0)
    net = GPT()
    net.h[0].requires_grad_(False)
    net.wpe.weight.requires_grad_(False)
    run = Precision(net, recipe(**LOW), lr=3e-3, ema_decay=0.9)
    frozen = {name: p.detach().clone() for name, p in run.model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 13
    train_gpt(run)
    held = dict(run.model.named_parameters())
    assert all(torch.equal(held[name], value) for name, value in frozen.items())
    assert not set(frozen) & {name for name, _ in run.named_params}

    torch.manual_seed(1)
    other = GPT()
    other.h[0].requires_grad_(False)
    other.wpe.weight.requires_grad_(False)
    again = Precision(other, recipe(**LOW), lr=3e-3, ema_decay=0.9)
    again.load_state_dict(through_a_file(run.state_dict()))
    assert train_gpt(run, 10, 12) == train_gpt(again, 10, 12)
    assert same(again, run)

    plain = GPT()
    plain.load_state_dict(run.weights("ema"), strict=True)
    loaded = dict(plain.named_parameters())
    assert all(torch.equal(loaded[name], value.float()) for name, value in frozen.items())


class Lazy(nn.Module):
    """Two branches; a step uses one of them, and `never` is used by none."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, step):
        return (self.odd if step % 2 else self.even)(x)


def train_lazy(run, first, last):
    for step in range(first, last):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        run.backward((run(x, step) - x).square().mean())
        run.step()


WRITES = [LOW, dict(pure_bf16=True, kahan=True), dict(pure_bf16=True, master="split"), {}]


@pytest.mark.parametrize("flags", WRITES)
def test_a_parameter_without_a_gradient_is_left_alone(flags):
    torch.manual_seed(0)
    run = Precision(Lazy(), recipe(**flags), lr=1e-2, ema_decay=0.9, weight_decay=0.1)
    for step in range(4):
        before = {name: p.detach().clone() for name, p in run.named_params}
        train_lazy(run, step, step + 1)
        moved = {name.split(".")[0] for name, p in run.named_params if not torch.equal(p, before[name])}
        assert moved == {"odd" if step % 2 else "even"}
    again = Precision(Lazy(), recipe(**flags), lr=1e-2, ema_decay=0.9, weight_decay=0.1)
    again.load_state_dict(through_a_file(run.state_dict()))
    train_lazy(run, 4, 7)
    train_lazy(again, 4, 7)
    assert same(again, run)


class Shared(nn.Module):
    """One layer under two names, used three times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in (self.first, self.again, self.first):
            x = self.norm(F.gelu(layer(x)))
        return x


@pytest.mark.parametrize("flags", [LOW, dict(LOW, sites=["islands=norm"]), dict(bf16=True)])
def test_a_shared_module_is_trained_once_and_saved_under_both_names(flags):
    torch.manual_seed(0)
    net = Shared()
    run = Precision(net, recipe(**flags), lr=1e-2, ema_decay=0.9)
    names = [name for name, _ in run.named_params]
    assert names == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    x = torch.randn(16, 8)
    for _ in range(5):
        run.backward((run(x) - x).square().mean())
        run.step()
    assert run.model.again is run.model.first
    values = run.weights("ema")
    assert torch.equal(values["first.weight"], values["again.weight"])
    plain = Shared()
    plain.load_state_dict(values, strict=True)
    frozen = run.frozen("ema", generation="fp32")
    assert frozen.net.again is frozen.net.first
    torch.testing.assert_close(frozen(x), plain(x).detach())


# ---- Hooks of the user -------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["compute", "fp32", "bf16", "autocast"])
@pytest.mark.parametrize("islands", ["none", "norm"])
def test_hooks_of_the_user_survive_in_a_generator(generation, islands):
    """Steering, adapters and feature taps are hooks: a generator without them is another function."""
    torch.manual_seed(0)
    net = GPT()
    net.h[1].register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]),))
    net.h[1].ln_2.register_forward_hook(lambda module, args, out: out * 2)
    sites = [f"generation={generation}", f"islands={islands}"]
    run = Precision(net, recipe(**LOW, sites=sites), lr=3e-3, ema_decay=0.9)
    train_gpt(run, last=2)
    plain = GPT()
    plain.load_state_dict(run.weights("ema"), strict=True)
    plain.h[1].register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]),))
    plain.h[1].ln_2.register_forward_hook(lambda module, args, out: out * 2)
    generator = run.generator()
    with torch.no_grad():
        want, got = plain(text(0)[0])[0], generator(text(0)[0])[0]
    # the same answer for every text, since the last block forgets what came before it; in bf16 or exactly
    assert torch.equal(got[0], got[1])
    torch.testing.assert_close(got, want, atol=1e-5 if generation == "fp32" else 0.05, rtol=0)
    assert len(run.model.h[1]._forward_pre_hooks) == 1  # the run keeps its own too


# ---- What goes in and what comes back ----------------------------------------------------------------------


Answer = namedtuple("Answer", "mean spread")


class Talkative(nn.Module):
    """Takes a tree of inputs, returns one; remembers the dtypes that it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch, scale, *, t=None, mode="mean"):
        self.seen = [batch["x"].dtype, batch["more"][0].dtype, batch["more"][1].dtype, scale.dtype, t.dtype]
        self.mode = mode
        out = self.layer(batch["x"] + batch["more"][0]) * scale
        assert out.dtype == self.layer.weight.dtype
        return {"answer": Answer(out.mean(), out.std()), "ids": batch["more"][1], "name": mode, "none": None}


def test_any_tree_goes_in_and_comes_back():
    torch.manual_seed(0)
    run = Precision(Talkative(), recipe(**LOW))
    ids = torch.arange(3)
    batch = {"x": torch.ones(3, 4), "more": [torch.ones(3, 4), ids], "path": "a/b", "number": 3}
    out = run(batch, torch.ones(1), t=torch.full((3,), 0.3), mode="max")
    # everything in floating point is cast, but a time, where bf16 would merge neighbours, and whole numbers
    assert run.model.seen == [BF16, BF16, torch.int64, BF16, torch.float32]
    assert isinstance(out["answer"], Answer) and out["answer"].mean.dtype == torch.float32
    assert torch.equal(out["ids"], ids) and out["name"] == "max" and out["none"] is None
    assert batch["x"].dtype == torch.float32  # the caller's own
    run.backward(out["answer"].spread)
    run.step()


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def test_a_dataclass_comes_back_in_fp32():
    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return Output(out.square().mean(), out)

    out = Precision(Net(4, 4), recipe(**LOW))(torch.ones(2, 4))
    assert isinstance(out, Output) and out.loss.dtype == out.logits.dtype == torch.float32


class Odd(nn.Module):
    """Parameters of no dimension and of no value."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.layer(x) * self.scale.exp() + self.empty.sum()


@pytest.mark.parametrize("flags", [{}, LOW, dict(pure_bf16=True, master="split"), dict(LOW, opt8bit=True)])
def test_a_scalar_parameter_is_trained(flags):
    torch.manual_seed(0)
    run = Precision(Odd(), recipe(**flags), lr=1e-2, ema_decay=0.9, clip_grad=1.0)
    for _ in range(5):
        run.backward(run(torch.ones(2, 4)).square().mean())
        report = run.step(measure=True)
    assert report["update_survival"] > 0
    assert run.model.scale.shape == () and 1.8 < run.model.scale.item() < 1.99
    again = Precision(Odd(), recipe(**flags), lr=1e-2, ema_decay=0.9, clip_grad=1.0)
    again.load_state_dict(through_a_file(run.state_dict()))
    assert same(again, run)


def test_channels_last_is_torchs_adamw():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3))
    net.to(memory_format=torch.channels_last)
    reference = copy.deepcopy(net)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    run = Precision(net, recipe(), lr=1e-2)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0, foreach=False)
    for _ in range(4):
        run.backward(run(x).square().mean())
        run.step()
        optimizer.zero_grad()
        reference(x).square().mean().backward()
        optimizer.step()
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, net.parameters(), reference.parameters()))


# ---- Buffers -----------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """BatchNorm's statistics, and rotary frequencies that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(4) / 4), persistent=False)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x):  # [B, 8]
        angles = torch.arange(len(x))[:, None] * self.inv_freq
        x = x * torch.cat([angles.cos(), angles.sin()], dim=1).to(x.dtype)
        return self.norm(self.layer(x)).masked_fill(~self.mask, 0)


def train_buffered(run, first=0, last=20):
    for step in range(first, last):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        run.backward((run(x) - x).square().mean())
        run.step()


def test_statistics_and_frequencies_stay_fp32():
    torch.manual_seed(0)
    net = Buffered()
    exact = net.inv_freq.clone()
    run = Precision(net, recipe(**LOW), lr=1e-3, ema_decay=0.9)
    assert net.inv_freq.dtype == torch.float32 and torch.equal(net.inv_freq, exact)
    train_buffered(run)
    # one kernel of torch takes statistics and gains, in one dtype: both are fp32
    assert net.norm.running_var.dtype == net.norm.weight.dtype == torch.float32
    assert net.layer.weight.dtype == BF16
    assert (net.norm.running_mean != net.norm.running_mean.to(BF16)).any()
    assert net.norm.num_batches_tracked == 20 and net.mask.dtype == torch.bool

    torch.manual_seed(1)
    again = Precision(Buffered(), recipe(**LOW), lr=1e-3, ema_decay=0.9)
    again.load_state_dict(through_a_file(run.state_dict()))
    train_buffered(run, 20, 25)
    train_buffered(again, 20, 25)
    assert same(again, run)

    plain = Buffered()
    plain.load_state_dict(run.weights("ema"), strict=True)
    assert torch.equal(plain.norm.running_mean, net.norm.running_mean)
    x = torch.randn(4, 8)
    torch.testing.assert_close(run.frozen("ema", generation="fp32")(x), plain.eval()(x).detach())


def test_buffers_in_bf16_on_request():
    """A recipe may cast them, to see what that loses."""
    torch.manual_seed(0)
    net = Buffered()
    Precision(net, recipe(**LOW, sites=["buffers=bf16"]), lr=1e-3, ema_decay=0.9)
    assert net.inv_freq.dtype == BF16


def test_a_model_without_parameters_is_one_line():
    with pytest.raises(Refused, match="no parameters"):
        Precision(nn.Flatten())
