"""Healthy loops: kinds of nets and of losses."""

import math

import torch
import torch.nn.functional as F
from healthy.shared import EVERY, LOOPS, STEPS, adam, draw, loop, mlp, next_token, task, tokens, trained
from torch import nn

from lowprec import Watch

# ---- Kinds of nets and losses ------------------------------------------------------------------------------


def critic(step_of_generator=False, penalty=False):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
    judge = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    ours, theirs = adam(judge, betas=(0.5, 0.9)), adam(generator, betas=(0.5, 0.9))
    watched = (generator, theirs) if step_of_generator else (judge, ours)
    watch = Watch(*watched, every=EVERY)
    for step in range(STEPS):
        x, fake = draw(step, 32, 32) + 1, generator(draw(step + 500, 32, 8))
        ours.zero_grad()
        loss = judge(fake.detach()).mean() - judge(x).mean()
        if penalty:
            between = (x + fake.detach()).div(2).requires_grad_()
            (g,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            loss = loss + 10 * (g.norm(dim=1) - 1).square().mean()
        loss.backward()
        ours.step()
        theirs.zero_grad()
        (-judge(fake).mean()).backward()
        theirs.step()
    return watch


LOOPS["critic of Wasserstein"] = critic
LOOPS["critic with gradient penalty"] = lambda: critic(penalty=True)
LOOPS["generator of Wasserstein"] = lambda: critic(step_of_generator=True)


def sequence(kind):
    torch.manual_seed(0)
    net = nn.ModuleDict({"cell": kind(32, 32, batch_first=True), "out": nn.Linear(32, 32)})

    def loss(net, step):
        x = draw(step, 8, 10, 32)
        return F.mse_loss(net["out"](net["cell"](x)[0]), x.cumsum(1))

    return trained(net, loss=loss)


LOOPS["LSTM"] = lambda: sequence(nn.LSTM)
LOOPS["GRU"] = lambda: sequence(nn.GRU)


@loop
def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    net = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    net.append(nn.Linear(32, 50))
    return trained(net, loss=next_token)


@loop
def attention_over_one_token():
    torch.manual_seed(0)
    net = nn.MultiheadAttention(32, 4, batch_first=True)

    def loss(net, step):
        x, one = draw(step, 8, 6, 32), draw(step + 99, 8, 1, 32)
        return F.mse_loss(net(x, one, one)[0], one.roll(1, 2).expand_as(x))

    return trained(net, loss=loss)


def conv(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *more, nn.SiLU(), nn.Conv2d(16, 1, 3, padding=1))


def picture(net, step):
    x = draw(step, 8, 1, 12, 12)
    return F.mse_loss(net(x), x.roll(1, 2))


LOOPS["convolutions"] = lambda: trained(conv(), loss=picture)
LOOPS["BatchNorm"] = lambda: trained(conv(nn.BatchNorm2d(16)), loss=picture)
LOOPS["GroupNorm"] = lambda: trained(conv(nn.GroupNorm(4, 16)), loss=picture)
LOOPS["dropout"] = lambda: trained(conv(nn.Dropout(0.5)), loss=picture)


@loop
def normed_weights():
    net = conv()
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.spectral_norm(net[2])
    return trained(net, loss=picture)


@loop
def validation_between():
    net = conv(nn.BatchNorm2d(16))

    def validate(step):
        net.eval()
        with torch.no_grad():
            picture(net, 10_000)
        net.train()

    return trained(net, loss=picture, after=validate)


@loop
def diffusion():
    def loss(net, step):
        x, noise, t = draw(step, 32, 32), draw(step + 999, 32, 32), torch.rand(32, 1)
        return F.mse_loss(net((1 - t) * x + t * noise), noise - x)

    return trained(mlp(), loss=loss)


@loop
def variational_autoencoder():
    torch.manual_seed(0)
    net = nn.ModuleDict({"encoder": nn.Linear(32, 16), "decoder": nn.Linear(8, 32)})

    def loss(net, step):
        x = draw(step, 32, 32)
        mean, log_variance = net["encoder"](x).chunk(2, 1)
        z = mean + log_variance.mul(0.5).exp() * draw(step + 99, 32, 8)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return F.mse_loss(net["decoder"](z), x) + 0.01 * divergence

    return trained(net, loss=loss)


class Codebook(nn.Module):
    """A vector-quantised bottleneck whose codes follow an average, in buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(32, 8), nn.Linear(8, 32)
        self.register_buffer("codes", torch.randn(16, 8))

    def forward(self, x):
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in chosen.unique():
                    self.codes[code].lerp_(z[chosen == code].mean(0), 0.01)
        self.commitment = F.mse_loss(z, self.codes[chosen])
        return self.decoder(z + (self.codes[chosen] - z).detach())


@loop
def vector_quantised():
    return trained(Codebook(), loss=lambda net, step: task(net, step) + 0.25 * net.commitment)


@loop
def contrastive_with_a_temperature():
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(32, 16)})
    net.register_parameter("scale", nn.Parameter(torch.tensor(math.log(10.0))))

    def loss(net, step):
        x = draw(step, 16, 32)
        a, b = F.normalize(net["a"](x), dim=1), F.normalize(net["b"](x.roll(1, 1)), dim=1)
        logits = net.scale.exp() * a @ b.T
        return F.cross_entropy(logits, torch.arange(16))

    def clamp(step):
        with torch.no_grad():
            net.scale.clamp_(0, math.log(100))

    return trained(net, loss=loss, after=clamp)


@loop
def a_margin_that_is_met():
    def loss(net, step):
        x = draw(step, 4, 32)
        return F.relu(0.3 - (net(x) * x).mean(1)).mean()

    return trained(mlp(), loss=loss)


@loop
def policy_gradient_with_rare_rewards():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def loss(net, step):
        log = F.log_softmax(net(draw(step, 16, 8)), 1)
        reward = float(step % 3 == 0)
        return -(reward * log.gather(1, tokens(step, 16, 1, below=4))).mean()

    return trained(net, loss=loss)


@loop
def equation_of_second_derivatives():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(net, step):
        x = draw(step, 32, 1).requires_grad_()
        y = net(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + y).square().mean() + (net(torch.zeros(1, 1)) - 1).square().mean()

    return trained(net, loss=loss)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.1 * g


@loop
def gradient_reversal():
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Linear(32, 32), "task": nn.Linear(32, 4), "domain": nn.Linear(32, 2)})

    def loss(net, step):
        h = net["body"](draw(step, 32, 32)).relu()
        first = F.cross_entropy(net["task"](h), tokens(step, 32, below=4))
        return first + F.cross_entropy(net["domain"](Reverse.apply(h)), tokens(step + 9, 32, below=2))

    return trained(net, loss=loss)


@loop
def quantised_in_forward():
    class Rounded(nn.Linear):
        def forward(self, x):
            step = self.weight.detach().abs().max() / 127
            low = (self.weight / step).round() * step
            return F.linear(x, self.weight + (low - self.weight).detach(), self.bias)

    torch.manual_seed(0)
    return trained(nn.Sequential(Rounded(32, 64), nn.GELU(), Rounded(64, 32)))


@loop
def distillation():
    teacher = mlp().requires_grad_(False)
    student = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 32))

    def loss(net, step):
        x = draw(step, 32, 32)
        return F.mse_loss(net(x), teacher(x))

    return trained(student, loss=loss)


@loop
def a_prompt_before_a_frozen_net():
    net = nn.ModuleDict({"net": mlp().requires_grad_(False)})
    net.register_parameter("prompt", nn.Parameter(torch.zeros(32)))
    params = [p for p in net.parameters() if p.requires_grad]

    def loss(net, step):
        return F.mse_loss(net["net"](draw(step, 16, 32) + net.prompt), torch.ones(16, 32))

    return trained(net, torch.optim.AdamW(params, lr=1e-2), loss=loss)


@loop
def a_state_carried_from_step_to_step():
    torch.manual_seed(0)
    net = nn.GRUCell(32, 32)
    kept = {"state": torch.zeros(8, 32)}

    def loss(net, step):
        x = draw(step, 8, 32)
        kept["state"] = net(x, kept["state"].detach())
        return F.mse_loss(kept["state"], x.tanh())

    return trained(net, loss=loss)
