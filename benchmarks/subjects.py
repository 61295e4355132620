"""Who bench.py conformance asks: an optimiser or an average of anyone's, by a name of the command line.

    subject_of_name("ours:stochastic", "cpu")                      # as --pure_bf16 --stochastic makes it
    subject_of_name("torchao.optim:_AdamW(bf16_stochastic_round=True)", "cpu")
    subject_of_name("mine.py:EMA(decay=0.99)", "cpu")              # a class of a file

A Subject makes its optimiser again and again, over tensors that a check gives it.
"""

import contextlib
import functools
import inspect
import math
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from benchmarks.averages import RULES
from benchmarks.common import PURE_BF16, PURE_BF16_STOCHASTIC
from harness import code
from lowprec.errors import Refused, first_line, in_one_line
from lowprec.machine import try_import
from lowprec.optimizers.average import EMA
from lowprec.optimizers.build import build as build_optimizer
from lowprec.precision import recipe
from lowprec.watch import adapters

BF16 = torch.bfloat16
FIRST_WEIGHT, ULP = 1.25, 2.0**-7  # weights of the checks, and the gap between bf16 numbers there
GRADIENT = 2.0**-4
BETAS, AVERAGE_DECAY = (0.9, 0.999), 0.999  # of moments, of averages

# ---- Subjects ----------------------------------------------------------------------------------------------


class OptimizerSubject:
    """An optimiser under examination. build(params, **options) makes one; takes: which options it knows."""

    kind = "optimizer"

    def __init__(self, name, build, takes, betas=BETAS, package="", version="", device="cpu"):
        self.name, self.build, self.takes, self.betas = name, build, takes, betas
        self.package, self.version, self.device = package, version, device
        self._units = {}

    def start(self, weights, lr=ULP, dtype=BF16, **more):
        """(parameters, optimiser) from tensors; more: weight_decay, seed, where they are known."""
        params = [nn.Parameter(w.to(self.device, dtype, copy=True)) for w in weights]
        return params, self.over(params, lr, **more)

    def over(self, params, lr, **more):
        options = {"lr": lr, "betas": self.betas, "weight_decay": 0.0, **more}
        known = {name: value for name, value in options.items() if name in self.takes}
        return self.build(params, **known)

    @functools.cached_property
    def fp32(self):
        """Whether it takes fp32 weights."""
        try:
            params, optimizer = self.start([full(16)], dtype=torch.float32)
            feed(params, optimizer, [full(16, GRADIENT)])
        except Exception:
            return False
        return bool((params[0] != FIRST_WEIGHT).any())

    def unit(self, side):
        """The length of a step over lr under constant gradients, of a square tensor: 1 for AdamW and Lion."""
        if side not in self._units:
            moved = self.wanted(full(side), full(side, GRADIENT), ULP / 4, steps=30)
            unit = abs(moved.mean().item()) / 30 / (ULP / 4)
            if not 0 < unit < math.inf:
                raise Refused(f"{self.name} does not move its weights")
            self._units[side] = unit
        return self._units[side]

    @functools.cached_property
    def elementwise(self):
        """Whether the step of an entry depends on that entry alone.

        Found by whether weights go the same way in two halves, fp32 ones where it takes them. True too where
        noise of torch's generator hides that.
        """
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(128, 128, generator=generator)
        grads = 0.01 * torch.randn(128, 128, generator=generator)
        dtype = torch.float32 if self.fp32 else BF16

        def run(rows, seed):
            with drawn(seed):
                params, optimizer = self.start(weights.split(rows), ULP / self.unit(128), dtype)
                for _ in range(2):
                    feed(params, optimizer, grads.split(rows))
            return torch.cat([in_fp64(p) for p in params])

        whole = run(128, seed=3)
        halves = run(64, seed=3)  # each half has enough values for codes
        is_near = (whole - halves).norm() < 1e-3 * (whole - weights).norm()
        return bool(is_near) or bool((whole != run(128, seed=4)).any())

    def wanted(self, weights, grads, lr, steps):
        """fp64, like weights: how far `steps` equal gradients move them where nothing is lost."""
        at, dtype = torch.zeros_like(weights), BF16
        if self.fp32:
            at, dtype = weights, torch.float32
        with drawn(7):
            params, optimizer = self.start([at], lr, dtype)
            for _ in range(steps):
                feed(params, optimizer, [grads])
        return in_fp64(params[0]) - at.double()


def feed(params, optimizer, grads):
    """One step. Gradients are copied: some optimisers write into them."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g.to(p.device, p.dtype, copy=True)
    optimizer.step()


@contextlib.contextmanager
def drawn(seed):
    """Within it torch's global generator starts from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def in_fp64(t):
    """fp64 on the CPU."""
    return t.detach().double().cpu()


def full(side, value=FIRST_WEIGHT):
    return torch.full((side, side), value)


class Model(nn.Module):
    """One bf16 weight [n]."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


class AverageSubject:
    """An average under examination. build(model) makes one; step(average, model) takes the weights in."""

    kind = "average"

    def __init__(self, name, build, step, package="", version="", device="cpu"):
        self.name, self.build, self.step = name, build, step
        self.package, self.version, self.device = package, version, device

    def start(self, weight):
        model = Model(weight.to(self.device))
        return model, self.build(model)

    def follow(self, model, average, weight):
        with torch.no_grad():
            model.weight.copy_(weight)
        self.step(average, model)


class RuledAverage:
    """An average by a rule of benchmarks/averages.py, of a Model."""

    def __init__(self, rule, model):
        self.rule = rule
        self.steps = 0
        self.generator = torch.Generator().manual_seed(0)
        self.shadow = {"weight": model.weight.detach().clone()}

    @property
    def decay(self):
        if not self.rule.due(self.steps):
            return 1.0
        return self.rule.decay_at(AVERAGE_DECAY, self.steps)

    @torch.no_grad()
    def update(self, model):
        self.steps += 1
        if self.rule.due(self.steps):
            old, new = self.shadow["weight"], model.weight.detach()
            self.shadow["weight"] = self.rule.update(old, new, 1 - self.decay, self.generator)


# ---- Who is asked ------------------------------------------------------------------------------------------

BF16_MOMENTS = ["exp_avg=bf16", "exp_avg_sq=bf16"]
# {name: the flags that make it}; optimizer is another than AdamW
OUR_OPTIMIZERS = {
    "nearest": PURE_BF16,
    "stochastic": PURE_BF16_STOCHASTIC,
    "kahan": dict(PURE_BF16, kahan=True),
    "kahan-stochastic": dict(PURE_BF16_STOCHASTIC, kahan=True),
    "split": dict(PURE_BF16, master="split"),
    "split-stochastic": dict(PURE_BF16_STOCHASTIC, master="split", sites=BF16_MOMENTS),
    "stochastic-8bit": dict(PURE_BF16_STOCHASTIC, opt8bit=True),
    "stochastic-4bit": dict(PURE_BF16_STOCHASTIC, opt4bit=True),
    "sgd": dict(PURE_BF16_STOCHASTIC, optimizer="sgd"),
    "lion": dict(PURE_BF16_STOCHASTIC, optimizer="lion"),
    "adafactor": dict(PURE_BF16_STOCHASTIC, optimizer="adafactor"),
    "muon": dict(PURE_BF16_STOCHASTIC, optimizer="muon"),
}
OUR_AVERAGES = {
    "ema-fp32": {},
    "ema-bf16": dict(dtype="bf16"),
    "ema-bf16-stochastic": dict(dtype="bf16", update="stochastic"),
}
# {name: the class as its authors publish it}
PEER_CLASSES = {
    "torch": "torch.optim:AdamW",
    "torchao": "torchao.optim:_AdamW(bf16_stochastic_round=True)",
    "torchao-8bit": "torchao.optim:AdamW8bit(bf16_stochastic_round=True)",
    "torchao-4bit": "torchao.optim:AdamW4bit(bf16_stochastic_round=True)",
    "optimi": "optimi:AdamW(kahan_sum=True)",
    "adamw-bf16": "adamw_bf16:AdamWBF16",
    "torchastic": "torchastic:AdamW",
    "bitsandbytes": "bitsandbytes.optim:AdamW8bit",
    "heavyball": "heavyball:AdamW(storage_dtype='bfloat16')",
    "sdnq": "sdnq.optim:AdamW",
    "sdnq-8bit": "sdnq.optim:AdamW(use_quantized_buffers=True)",
    "flashoptim": "flashoptim:FlashAdamW(master_weight_bits=24)",  # on CUDA alone
    "torch-ema": "torch.optim.swa_utils:AveragedModel"
    "(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))",
    "diffusers-ema": "diffusers.training_utils:EMAModel",
}
# {name: the rule of a tool that is no package, as benchmarks/averages.py writes it}
TOOLS = {
    "onetrainer-ema": "OneTrainer",
    "onetrainer-ema-stochastic": "OneTrainer, stochastic",
    "ai-toolkit-ema": "ai-toolkit",
}
SUBJECT_NAMES = [f"ours:{name}" for name in (*OUR_OPTIMIZERS, *OUR_AVERAGES)]
SUBJECT_NAMES += [*PEER_CLASSES, *TOOLS]


def chosen_subjects(names, device):
    """The subjects of a command line; 'all' or no name stands for SUBJECT_NAMES without those not installed.

    Raises Refused for what can't be imported, made or stepped.
    """
    found = []
    for name in names or ["all"]:
        if name == "all":
            found += all_installed(device)
        else:
            found.append(subject_of_name(name, device))
    return found


def all_installed(device):
    found = []
    for name in SUBJECT_NAMES:
        try:
            found.append(subject_of_name(name, device))
        except Refused as error:
            print(f"{name}: not asked: {error}")
    return found


def subject_of_name(name, device):
    """One by a name of SUBJECT_NAMES or as `module:Class(option=value)`. Raises Refused."""
    if name.startswith("ours:"):
        return subject_of_ours(name, device)
    if name in TOOLS:
        rule = RULES[TOOLS[name]]
        return AverageSubject(name, functools.partial(RuledAverage, rule), RuledAverage.update, device=device)
    made = subject_of_class(name, PEER_CLASSES.get(name, name), device)
    try_one_step(made)
    return made


# ---- Ours --------------------------------------------------------------------------------------------------


def subject_of_ours(name, device):
    short = name.removeprefix("ours:")
    if short in OUR_AVERAGES:
        return average_of_ours(name, OUR_AVERAGES[short], device)
    if short not in OUR_OPTIMIZERS:
        raise Refused(f"{name}: unknown; ours are {', '.join([*OUR_OPTIMIZERS, *OUR_AVERAGES])}")
    r = recipe(**OUR_OPTIMIZERS[short])
    kind = OUR_OPTIMIZERS[short].get("optimizer", "adamw")

    def build(params, **options):
        return build_optimizer(kind, params, r, **options)

    build([nn.Parameter(torch.ones(1))])  # a format's package may be absent
    return OptimizerSubject(name, build, {"lr", "betas", "weight_decay", "seed"}, device=device)


def average_of_ours(name, options, device):
    def build(model):
        return EMA(list(model.named_parameters()), AVERAGE_DECAY, **options)

    def step(ema, model):
        ema.update()

    return AverageSubject(name, build, step, device=device)


# ---- Classes of others -------------------------------------------------------------------------------------


def subject_of_class(name, text, device):
    """The subject of `module:Class(option=value)`. Raises Refused."""
    try:
        module, call = text.split(":", 1)
        kind, options = class_and_options(call)
    except Exception:
        known = ", ".join(SUBJECT_NAMES)
        form = f"write module:Class, 'module:Class(option=value)' with plain values, or one of {known}"
        raise Refused(f"{name}: {form}") from None
    made = imported(name, module)
    for part in kind.split("."):
        made = getattr(made, part, None)
    if not inspect.isclass(made):
        raise Refused(f"{name}: {module} has no class {kind}")
    package = "" if module.endswith(".py") else module.partition(".")[0]
    where = dict(package=package, version=distribution_version(package), device=device)
    if issubclass(made, torch.optim.Optimizer):
        return optimizer_subject(name, made, options, where)
    return average_subject(name, made, options, where)


def class_and_options(call):
    """('Class', {option: value}) of `Class(option=value)`, Python that knows torch."""
    kind, bracket, inside = call.partition("(")
    if not bracket:
        return kind, {}
    return kind, eval(f"dict({inside}", {"__builtins__": {}, "dict": dict, "torch": torch})


def imported(name, module):
    """The module of a dotted name or of a file. Raises Refused."""
    if not module.endswith(".py"):
        found, error = try_import(module)
        if found is None:
            raise Refused(f"{name}: {module} can't be imported ({error}): pip install its package")
        return found
    with in_one_line(f"{name} can't be imported:"):
        return code.module_of(Path(module).expanduser().resolve())


@functools.cache
def distributions():
    """{package: its distributions}; it takes a second."""
    return metadata.packages_distributions()


def distribution_version(package):
    for distribution in distributions().get(package, []):
        return metadata.version(distribution)
    return ""


def in_words(error):
    return f"{type(error).__name__}: {first_line(error)}"


def optimizer_subject(name, made, options, where):
    """A Subject of a class. One that takes any keyword is given what every optimiser takes."""
    parameters = inspect.signature(made).parameters
    takes = set(parameters)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        takes |= {"lr", "betas", "weight_decay"}
    if "lr" not in takes:
        raise Refused(f"{name}: {made.__name__} takes no lr, which the checks set")
    known = takes & {"lr", "betas", "weight_decay", "seed"}
    betas = tuple(options.get("betas", BETAS))
    own = {option: value for option, value in options.items() if option not in known}

    def build(params, **given):
        return made(params, **own, **given)

    return OptimizerSubject(name, build, known, betas, **where)


UPDATE_METHODS = ("update_parameters", "update", "step")  # methods that take the weights into an average


def average_subject(name, made, options, where):
    """An AverageSubject of a class that has a method of UPDATE_METHODS.

    Its constructor and that method are given the model where their arguments are called model, module or net,
    and the model's parameters elsewhere.
    """
    update = next((method for method in UPDATE_METHODS if hasattr(made, method)), None)
    if update is None:
        what = "neither derives from torch.optim.Optimizer nor is an average of parameters or of a model"
        raise Refused(f"{name}: {made.__name__} {what}")
    parameters = inspect.signature(made).parameters
    first = next(iter(parameters), "")
    if "decay" in parameters:
        options = {"decay": AVERAGE_DECAY, **options}
    _, *wanted = inspect.signature(getattr(made, update)).parameters.values()
    needed = [p.name for p in wanted if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]

    def build(model):
        return made(argument_for(first, model), **options)

    def step(average, model):
        getattr(average, update)(*(argument_for(word, model) for word in needed))

    return AverageSubject(name, build, step, **where)


def argument_for(word, model):
    if word.startswith(("model", "module", "net")):
        return model
    return list(model.parameters())


def try_one_step(made):
    """Make one and step it. Raises Refused, in one line, where that fails."""
    weights = torch.ones(64, dtype=BF16) if made.kind == "average" else [full(8)]
    with drawn(0), torch.compiler.set_stance("force_eager"):
        with in_one_line(f"{made.name}: it can't be made for bf16 weights:"):
            first, second = made.start(weights)
        with in_one_line(f"{made.name}: it can't be stepped with bf16 weights:"):
            if made.kind == "average":
                made.follow(first, second, weights)
            else:
                feed(first, second, [full(8, GRADIENT)])
    if made.kind == "average":
        adapters.Average.of(second, first)
