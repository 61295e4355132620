"""fp32 met inside a net of bf16 weights: what works by itself, what the caller is told, and that it helps."""

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, draw, refused, start, through_a_file
from torch import nn
from torch.nn.utils import parametrizations

eager = common.eager
LOW = dict(pure_bf16=True, stochastic=True)


class FrozenNorm(nn.Module):
    """Statistics and gains in buffers alone, as torchvision's FrozenBatchNorm2d."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x):
        return x * self.scale


class Codebook(nn.Module):
    """A codebook in a buffer that training moves, as in VQ-VAE: (the nearest codes, how far they are)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("code", draw(16, 8))

    def forward(self, x):
        nearest = torch.cdist(x.float(), self.code).argmin(-1)
        if self.training:
            self.code.index_add_(0, nearest, 1e-3 * x.detach().float())
        found = self.code[nearest]
        return x + (found - x).detach(), F.mse_loss(x.float(), found)


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(8, 8), Codebook(), nn.Linear(8, 8)

    def forward(self, x):
        x, commitment = self.codebook(self.encoder(x))
        return self.decoder(x), commitment


class Table(nn.Module):
    """Returns fp32 on purpose: a table of another shape than its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", draw(3, 8))

    def forward(self, x):
        return self.angles


def test_modules_with_buffers_alone_give_back_bf16():
    run = start(LOW, nn.Sequential(nn.Linear(8, 8), FrozenNorm(8), nn.Linear(8, 8)))
    run.backward(run(draw(2, 8)).square().mean())
    run.step()
    assert run.view_of_model.adapted == [], "no layer was given fp32"
    assert run.generator()(draw(2, 8)).shape == (2, 8)
    assert run.frozen("raw", generation="bf16")(draw(2, 8)).shape == (2, 8)
    run = start(LOW, Coded())
    before = run.model.codebook.code.clone()
    out, commitment = run(draw(2, 8))
    run.backward(out.square().mean() + commitment)
    run.step()
    moved = run.model.codebook.code != before
    assert moved.any() and run.model.codebook.code.dtype == commitment.dtype == torch.float32
    held = commitment.detach().to(BF16).float()
    assert not torch.equal(commitment, held), "a scalar stays fp32"
    net = nn.ModuleList([Table(), nn.Linear(8, 8)])
    start(LOW, net)
    assert net[0](draw(2, 8).to(BF16)).dtype == torch.float32


@pytest.mark.parametrize("kind", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_layers_train(kind):
    run = start(LOW, nn.Sequential(kind(nn.Linear(8, 8)), nn.Linear(8, 8)), lr=1e-2)
    for step in range(3):
        run.backward((run(draw(4, 8, seed=step)) - 1).square().mean())
        run.step()
    assert run.model[0].weight.dtype == BF16
    assert run.frozen("ema", generation="fp32")(draw(2, 8)).isfinite().all()


class Inner(nn.Module):
    """Meets fp32 with bf16, as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(8, 8)
        self.register_buffer("bias", torch.zeros(8))
        self.plain = torch.eye(8)  # neither buffer nor parameter

    def forward(self, x):
        if self.how == "a buffer":
            shifted = x + self.bias
            return F.linear(shifted, self.fc.weight)
        if self.how == "a plain attribute":
            return self.fc(x) @ self.plain
        if self.how == "made in forward":
            grid = torch.ones(8, 8)
            return self.fc(x) @ grid
        return x + torch.linalg.inv(self.fc.weight)[0]


class Outer(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Inner(how)

    def forward(self, x):
        return self.inner(self.first(x))


HOWS = {
    "a buffer": ("shifted", "dtypes={'inner.bias': 'bf16'}"),
    "a plain attribute": ("self.plain", "`return self.fc(x) @ self.plain`"),
    "made in forward": ("grid",),
    "no kernel": ("torch has no bf16 kernel for this",),
}


@pytest.mark.parametrize("how", HOWS)
def test_the_caller_is_told_where_and_every_remedy_works(how):
    x = draw(2, 8)
    words = (*HOWS[how], "inner (Inner)", "test_mixed.py:", "recipe(bf16=True)", "fp32_modules=('inner',)")
    refused(lambda: start(LOW, Outer(how))(x), *words)
    start(dict(bf16=True), Outer(how))(x)
    run = start(LOW, Outer(how), fp32_modules=("inner",))
    run.backward(run(x).square().mean())
    run.step()
    assert run.model.inner.fc.weight.dtype == torch.float32 and run.model.first.weight.dtype == BF16
    if how == "a buffer":
        assert start(LOW, Outer(how), dtypes={"inner.bias": "bf16"})(x).dtype == torch.float32


class Embedded(nn.Module):
    """Layers of torch's that are given fp32: by sines of whole times, by a promotion, by x.float()."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.time, self.blocks = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.out = nn.LayerNorm(8)

    def forward(self, x, t):
        x = self.drop(self.norm(x)) + self.time(torch.sin(t[:, None] * torch.arange(8)))
        for block in self.blocks:
            x = block(x.float())
        return self.out(x.float())


def test_layers_that_are_given_fp32_cast_it_from_the_first_call_on():
    def run_of(seed):
        torch.manual_seed(seed)
        return start(LOW, Embedded(), lr=1e-2, ema_decay=0.9)

    def train(run, first, last):
        losses = []
        for step in range(first, last):
            torch.manual_seed(step)
            loss = run(draw(4, 8, seed=step), torch.arange(4)).square().mean()
            run.backward(loss)
            run.step()
            losses.append(loss.item())
        return losses

    run = run_of(0)
    with pytest.warns(UserWarning, match="^time, blocks.0, blocks.1 and 1 more: given fp32") as said:
        train(run, 0, 2)
    assert len(said) == 1 and "fp32_modules=('time', 'blocks.0', 'blocks.1')" in str(said[0].message)
    assert run.model.norm.num_batches_tracked == 2, "the first call counts once"
    saved = through_a_file(run.state_dict())
    rest = train(run, 2, 4)
    again = run_of(1)
    again.load_state_dict(saved)
    assert train(again, 2, 4) == rest
    for generation in ("compute", "bf16", "fp32"):
        assert run.frozen("ema", generation=generation)(draw(4, 8), torch.arange(4)).isfinite().all()
    assert not any(module._forward_pre_hooks for module in run_of(0).model.modules()), "not before"


def test_a_layer_that_widens_by_itself_is_told():
    class Upcasts(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    words = ("0 (Upcasts)", "x.float()", "recipe(bf16=True)")
    refused(lambda: start(LOW, nn.Sequential(Upcasts(8, 8)))(draw(2, 8)), *words)


def test_a_wrapper_is_told_of_run_module():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x):
            return F.linear(torch.randn(2, 8), self.model[0].weight)

    refused(lambda: start(LOW, Wrapper())(draw(2, 8)), "'model' alone", "run.module")


def test_buffers_are_held_by_name():
    net = Coded()
    net.register_buffer("rope", torch.rand(4))
    run = start(LOW, net, dtypes={"rope": "bf16"})
    assert net.rope.dtype == BF16 and net.codebook.code.dtype == torch.float32
    run = start(dict(LOW, sites=["buffers=bf16"]), net, dtypes={"codebook": "fp32"})
    assert net.rope.dtype == BF16 and run.model.codebook.code.dtype == torch.float32
    refused(lambda: start(LOW, Coded(), dtypes={"*.codes": "fp32"}), "'*.codes'", "no buffer")
    refused(lambda: start(LOW, Coded(), dtypes={"encoder*": "fp32"}), "islands")
    refused(lambda: start(LOW, Coded(), dtypes={"*.code": "fp16"}), "fp32 or bf16")
    refused(lambda: start(LOW, Coded(), fp32_modules=("decode",)), "fp32_modules", "'decode'")


# ---- Buffers that promote ----------------------------------------------------------------------------------


class Scales(nn.Module):
    """A part that multiplies what it gets by an fp32 buffer, before a stranger's layer or in place of one."""

    def __init__(self, calls):
        super().__init__()
        self.register_buffer("eps", torch.zeros(1))
        self.gain = nn.Parameter(torch.ones(1))
        self.inner = Strange() if calls else None

    def forward(self, x):
        x = (self.gain + self.eps) * x
        return x if self.inner is None else self.inner(x)


class Strange(nn.Module):
    """A linear layer that is none of torch's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("kinds", ["calls calls", "scales inner", "inner scales inner"])
def test_the_buffer_that_promoted_an_input_is_named_with_the_cure(kinds):
    makes = {"calls": lambda: Scales(True), "scales": lambda: Scales(False), "inner": Strange}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(makes[kind]() for kind in kinds.split())

        def forward(self, x):
            for conv in self.convs:
                x = conv(x)
            return x

    said = refused(lambda: start(LOW, Net())(draw(4, 8)), "dtypes={'convs.*.eps': 'bf16'}")
    assert "self.weight.dtype" in said
    run = start(LOW, Net(), dtypes={"convs.*.eps": "bf16"})
    run.backward(run(draw(4, 8)).square().mean())
    run.step()
