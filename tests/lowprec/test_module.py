"""run.module: a net in its recipe's precision, inside a wrapper that calls it."""

import copy

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, RECIPES, draw, refused, same, start, through_a_file
from torch import nn

from lowprec.errors import Refused

eager = common.eager
every_precision = pytest.mark.parametrize("name", ["fp32", "bf16", "stochastic", "islands"])


class Unet(nn.Module):
    """What diffusion wrappers ask of a net: attributes, forward, and a method beside it."""

    channels = 1

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.out = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.embed = nn.Embedding(10, 16)
        self.trained_in = []

    def forward(self, x, t):
        return self.out(self.encode(x) + self.embed(t))

    def encode(self, x):
        return self.norm(self.stem(x))

    def train(self, mode=True):
        self.trained_in.append(mode)
        return super().train(mode)


CASTS = {
    "float": lambda module: module.float(),
    "half": lambda module: module.half(),
    "to": lambda module: module.to(torch.float64),
    "in a wrapper": lambda module: nn.Sequential(module).float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_the_module_of_a_run_is_not_cast_by_hand(cast):
    run = start("stochastic", nn.Linear(8, 8))
    refused(lambda: cast(run.module), "run.module can't be cast", "cast a copy")
    run.module.to(torch.bfloat16).to("cpu")
    assert run.module.weight.dtype == BF16 and run.module(draw(2, 8)).dtype == torch.float32


CASTS_OF_NETS = [("fp32", BF16), ("bf16", BF16), ("fp16", torch.float16), ("stochastic", torch.float64)]


@pytest.mark.parametrize("name, dtype", CASTS_OF_NETS, ids=str)
def test_an_autocast_around_it_changes_nothing_and_a_cast_by_hand_is_refused_within_a_step(name, dtype):
    run, x = start(name, nn.Linear(8, 8)), draw(2, 8)
    with torch.autocast("cpu", torch.float16):
        inside = run(x)
    assert same(inside, run(x))
    run.model.to(dtype)
    refused(lambda: (run.backward(run(x).mean()), run.step()), "cast after Precision was made")


class Diffusion(nn.Module):
    """Owns a net and an fp32 schedule, draws noise in fp32, reads an attribute and a method of the net."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("alphas", torch.linspace(0.999, 0.01, 10))

    def forward(self, x):
        assert self.model.channels == 1 and self.model.encode(x).dtype == torch.float32
        t = torch.arange(len(x)) % 10
        a, noise = self.alphas[t, None], torch.randn_like(x)
        guess = self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        assert guess.dtype == x.dtype == torch.float32
        return F.mse_loss(guess, noise)


def wrapped(name, seed=0):
    torch.manual_seed(seed)
    net = Unet()
    wrapper = Diffusion(net)
    run = start(RECIPES[name], net, lr=1e-2, ema_decay=0.9)
    wrapper.model = run.module
    return run, wrapper


def train(run, wrapper, first=0, last=6):
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        loss = wrapper(draw(16, 8, seed=step))
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


@every_precision
def test_a_net_trains_in_its_wrapper_and_resumes(name):
    run, wrapper = wrapped(name)
    inside = []
    run.model.stem.register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    train(run, wrapper, last=3)
    assert set(inside) == {torch.float32 if name == "fp32" else BF16}
    saved = through_a_file({"run": run.state_dict(), "wrapper": wrapper.state_dict()})
    rest = train(run, wrapper, 3)
    again, other = wrapped(name, seed=1)
    again.load_state_dict(saved["run"])
    other.load_state_dict(saved["wrapper"])
    assert train(again, other, 3) == rest


def test_parameters_state_and_mode_are_those_of_the_net():
    run, wrapper = wrapped("stochastic")
    plain = Diffusion(run.model)
    assert [*wrapper.state_dict()] == [*plain.state_dict()]
    assert [n for n, _ in wrapper.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(a is b for a, b in zip(wrapper.parameters(), plain.parameters(), strict=True))
    assert run.module is run.module and isinstance(run.module, nn.Module)
    wrapper.eval()
    assert not run.model.training and not run.module.training and not run.model.norm.training
    assert run.model.trained_in[-1] is False, "the net's own train() is called"
    run.module.train()
    assert run.model.training
    run.module.temperature = 3  # an attribute of the net
    assert run.model.temperature == 3 and "temperature" not in vars(run.module)
    new = {name: torch.zeros_like(t) for name, t in wrapper.state_dict().items()}
    wrapper.load_state_dict(new)
    assert not run.model.out.weight.any()


@every_precision
def test_a_copy_of_the_wrapper_shares_nothing_and_calls_alike(name):
    run, wrapper = wrapped(name)
    train(run, wrapper)
    twin = copy.deepcopy(wrapper)
    x, t = draw(4, 8), torch.arange(4)
    assert same(twin.model(x, t), wrapper.model(x, t))
    before = twin.state_dict()["model.out.weight"].clone()
    train(run, wrapper, 6, 8)
    assert same(twin.state_dict()["model.out.weight"], before)
    twin.model = run.generator().module  # sampling with averaged weights
    assert twin.model(x, t).dtype == torch.float32 and not twin.model.training
    assert same(twin.model(x, t), run.generator()(x, t))


def test_a_wrapper_of_a_net_that_keeps_its_last_activations_is_copied():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = {"maps": [super().forward(x)], "pair": (super().forward(x), 1)}
            return self.kept["maps"][0]

    run = start(RECIPES["stochastic"], Keeps(8, 8))
    run.backward(run.module(draw(2, 8)).square().mean())
    run.step()
    assert copy.deepcopy(nn.Sequential(run.module))(draw(2, 8)).shape == (2, 8)
    assert run.generator()(draw(2, 8)).shape == (2, 8)


def test_methods_that_load_and_save_are_not_cast():
    class Own(Unet):
        def load_average(self, values):
            self.loaded = values["out"].dtype

    run = start(RECIPES["stochastic"], Own())
    run.module.load_average({"out": torch.ones(3)})
    assert run.model.loaded == torch.float32


def test_what_would_call_itself_or_lose_its_parameters_is_refused():
    run = start("stochastic")
    wrapped = nn.Sequential(run.module)
    with pytest.raises(Refused, match="run.module calls run.forward"):
        run.forward = wrapped
    with pytest.raises(Refused, match="fully_shard.*and make Precision then"):
        run.module.__class__ = nn.Sequential  # as fully_shard does
    with pytest.raises(Refused, match="not in the model, when Precision was made"):
        for module in run.model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach().clone()))  # as fully_shard does to a wrapper
        run.step()
