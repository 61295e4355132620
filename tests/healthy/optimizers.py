"""Healthy loops: optimisers, torch's, other people's and ours."""

import functools
import importlib

import torch
from healthy.shared import LOOPS, STEPS, mlp, trained

from lowprec.optimizers import lion, muon, rounded, sgd


def torchs():
    optim = torch.optim
    return {
        "AdamW": lambda net: optim.AdamW(net.parameters()),
        "AdamW fused": lambda net: optim.AdamW(net.parameters(), fused=True),
        "Adam L2": lambda net: optim.Adam(net.parameters(), weight_decay=0.01),
        "AMSGrad": lambda net: optim.AdamW(net.parameters(), amsgrad=True),
        "NAdam": lambda net: optim.NAdam(net.parameters(), decoupled_weight_decay=True, weight_decay=0.01),
        "RAdam": lambda net: optim.RAdam(net.parameters()),
        "Adamax": lambda net: optim.Adamax(net.parameters()),
        "ASGD": lambda net: optim.ASGD(net.parameters()),
        "Rprop": lambda net: optim.Rprop(net.parameters()),
        "RMSprop": lambda net: optim.RMSprop(net.parameters(), lr=1e-3, centered=True, momentum=0.9),
        "Adagrad": lambda net: optim.Adagrad(net.parameters()),
        "Adadelta": lambda net: optim.Adadelta(net.parameters()),
        "Adafactor": lambda net: optim.Adafactor(net.parameters()),
        "SGD": lambda net: optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        "SGD plain": lambda net: optim.SGD(net.parameters(), lr=0.1),
    }


TIMM = (
    *("adamw", "nadamw", "lamb", "adan", "lion", "cadamw", "mars", "adopt", "laprop", "adafactorbv", "radam"),
    *("rmsproptf", "novograd", "sgdw", "muon", "kron", "lookahead_adamw", "adabelief", "madgrad", "sgdp"),
    *("adamp", "lars"),
)


def of_timm(net, name):
    optim = importlib.import_module("timm.optim")
    return optim.create_optimizer_v2(net, opt=name, lr=1e-3, weight_decay=0.05)


PYTORCH_OPTIMIZER = (
    *("stableadamw", "ademamix", "soap", "shampoo", "scalableshampoo", "adammini", "grams", "fira", "galore"),
    *("apollo", "spam", "tam", "adatam", "tiger", "amos", "came", "adalite", "schedulefreeadamw"),
    *("simplifiedademamix", "ano", "racs", "alice", "splus", "emofact", "adagc", "adashift", "ranger21"),
    *("padam", "yogi", "adanorm", "dadaptadam", "aggmo", "adapnm", "qhadam", "swats", "gravity"),
    *("fadam", "grokfastadamw", "focus", "kate", "exadam", "stablespam", "vsgd", "qhm", "conda"),
)


def of_package(net, name):
    package = importlib.import_module("pytorch_optimizer")
    options = {"num_iterations": STEPS} if name == "ranger21" else {}
    of_net = net if name == "adammini" else net.parameters()
    return package.load_optimizer(name)(of_net, lr=1e-3, **options)


def single(module, kind, **options):
    def make(net):
        return getattr(importlib.import_module(module), kind)(net.parameters(), **options)

    return make


SINGLE = {
    "schedulefree AdamW": single("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=10),
    "schedulefree SGD": single("schedulefree", "SGDScheduleFree", lr=0.1),
    "schedulefree RAdam": single("schedulefree", "RAdamScheduleFree", lr=1e-3),
    "prodigy": single("prodigyopt", "Prodigy", lr=1.0),
    "prodigy safeguard": single("prodigyopt", "Prodigy", lr=1.0, safeguard_warmup=True, slice_p=11),
    "lion": single("lion_pytorch", "Lion", lr=1e-4),
    "came": single("came_pytorch", "CAME", lr=1e-4, betas=(0.9, 0.999, 0.9999)),
}


def with_optimizer(make):
    """A loop with a validation in its middle."""
    net = mlp()
    optimizer = make(net)
    has_modes = hasattr(optimizer, "train")
    if has_modes:
        optimizer.train()

    def validate(step):
        if has_modes and step == 30:
            optimizer.eval()
            optimizer.train()

    return trained(net, optimizer, after=validate)


def with_vectors_elsewhere(matrices):
    """Muon, whose vectors belong to AdamW."""
    net = mlp()
    ours = matrices([p for p in net.parameters() if p.ndim > 1])
    others = torch.optim.AdamW([p for p in net.parameters() if p.ndim < 2])
    return trained(net, ours, after=lambda step: (others.step(), others.zero_grad()), others=[others])


def ours(kind, **options):
    net = mlp()
    return trained(net, kind(net.parameters(), compiled=False, **options))


MADE = {f"torch {name}": make for name, make in torchs().items()}
MADE |= {f"timm {name}": functools.partial(of_timm, name=name) for name in TIMM}
MADE |= {f"pytorch_optimizer {name}": functools.partial(of_package, name=name) for name in PYTORCH_OPTIMIZER}
for name, make in (MADE | SINGLE).items():
    LOOPS[name] = functools.partial(with_optimizer, make)
LOOPS["torch Muon"] = lambda: with_vectors_elsewhere(torch.optim.Muon)
LOOPS["our Muon"] = lambda: with_vectors_elsewhere(lambda params: muon.Muon(params, compiled=False))
LOOPS["our AdamW"] = lambda: ours(rounded.AdamW)
LOOPS["our SGD"] = lambda: ours(sgd.SGD, lr=0.05, momentum=0.9)
LOOPS["our Lion"] = lambda: ours(lion.Lion)
