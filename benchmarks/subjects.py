"""Who is asked: an optimiser or an average of anyone's, from a name of the command line.

    subject("ours:stochastic", "cpu")                              # as --pure_bf16 --stochastic makes it
    subject("torchao.optim:_AdamW(bf16_stochastic_round=True)", "cpu")
    subject("mine.py:EMA(decay=0.99)", "cpu")                      # a class of a file

A Subject makes its optimiser again and again, over tensors that a check gives it (conformance.py).
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import math
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from benchmarks.averages import RULES
from benchmarks.common import PURE, STOCHASTIC
from lowprec.errors import Refused, first_line
from lowprec.machine import try_import
from lowprec.optimizers import rounded
from lowprec.precision import recipe
from lowprec.watch import adapters

BF16 = torch.bfloat16
WEIGHT, ULP = 1.25, 2.0**-7  # weights of the checks, and the gap between bf16 numbers there
GRADIENT = 2.0**-4
BETAS, DECAY = (0.9, 0.999), 0.999  # of moments, of averages

# ---- Subjects ----------------------------------------------------------------------------------------------


class Subject:
    """An optimiser under examination. build(params, **options) makes one; takes: which options it knows."""

    kind = "optimizer"

    def __init__(self, name, build, takes, betas=BETAS, package="", version="", device="cpu"):
        self.name, self.build, self.takes, self.betas = name, build, takes, betas
        self.package, self.version, self.device = package, version, device
        self._fp32, self._elementwise, self._units = None, None, {}

    def start(self, weights, lr=ULP, dtype=BF16, **more):
        """(parameters, optimiser) from tensors; more: weight_decay, seed, where they are known."""
        params = [nn.Parameter(w.to(self.device, dtype, copy=True)) for w in weights]
        return params, self.over(params, lr, **more)

    def over(self, params, lr, **more):
        options = {"lr": lr, "betas": self.betas, "weight_decay": 0.0, **more}
        return self.build(params, **{name: value for name, value in options.items() if name in self.takes})

    @property
    def fp32(self):
        """Whether it takes fp32 weights."""
        if self._fp32 is None:
            weights = [torch.full((16, 16), WEIGHT)]
            try:
                params, optimizer = self.start(weights, dtype=torch.float32)
                feed(params, optimizer, [torch.full_like(weights[0], GRADIENT)])
                self._fp32 = bool((params[0] != WEIGHT).any())
            except Exception:
                self._fp32 = False
        return self._fp32

    def unit(self, side):
        """The length of a step over lr under constant gradients, of a square tensor: 1 for AdamW and Lion."""
        if side not in self._units:
            moved = self.wanted(full(side), full(side, GRADIENT), ULP / 4, steps=30)
            self._units[side] = abs(moved.mean().item()) / 30 / (ULP / 4)
            if not self._units[side] > 0 or math.isinf(self._units[side]):
                raise Refused(f"{self.name} does not move its weights")
        return self._units[side]

    @property
    def elementwise(self):
        """Whether the step of an entry depends on that entry alone: whether weights go the same way in two
        halves, fp32 ones where it takes them. True too where noise of torch's generator hides that.
        """
        if self._elementwise is None:
            generator = torch.Generator().manual_seed(2)
            weights, grads = (torch.randn(128, 128, generator=generator) for _ in range(2))

            def run(rows, seed):
                with drawn(seed):
                    kind = torch.float32 if self.fp32 else BF16
                    params, optimizer = self.start(weights.split(rows), ULP / self.unit(128), kind)
                    for _ in range(2):
                        feed(params, optimizer, (0.01 * grads).split(rows))
                return torch.cat([values(p) for p in params])

            whole, halves = run(128, 3), run(64, 3)  # each half has enough values for codes
            near = (whole - halves).norm() < 1e-3 * (whole - weights).norm()
            self._elementwise = bool(near) or bool((whole != run(128, 4)).any())
        return self._elementwise

    def wanted(self, weights, grads, lr, steps):
        """fp64, like weights: how far `steps` equal gradients move them where nothing is lost."""
        at = weights if self.fp32 else torch.zeros_like(weights)
        with drawn(7):
            params, optimizer = self.start([at], lr, torch.float32 if self.fp32 else BF16)
            for _ in range(steps):
                feed(params, optimizer, [grads])
        return values(params[0]) - at.double()


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


def values(t):
    """fp64 on the CPU."""
    return t.detach().double().cpu()


def full(side, value=WEIGHT):
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


class Ruled:
    """An average by a rule of benchmarks/averages.py, of a Model."""

    def __init__(self, rule, model):
        self.rule, self.steps, self.generator = rule, 0, torch.Generator().manual_seed(0)
        self.shadow = {"weight": model.weight.detach().clone()}

    @property
    def decay(self):
        return self.rule.decay_at(DECAY, self.steps) if self.rule.due(self.steps) else 1.0

    @torch.no_grad()
    def update(self, model):
        self.steps += 1
        if self.rule.due(self.steps):
            old, new = self.shadow["weight"], model.weight.detach()
            self.shadow["weight"] = self.rule.update(old, new, 1 - self.decay, self.generator)


# ---- Who is asked ------------------------------------------------------------------------------------------

BF16_MOMENTS = ["exp_avg=bf16", "exp_avg_sq=bf16"]
# a name: the flags that make it; optimizer is another than AdamW
OURS = {
    "nearest": PURE,
    "stochastic": STOCHASTIC,
    "kahan": dict(PURE, kahan=True),
    "kahan-stochastic": dict(STOCHASTIC, kahan=True),
    "split": dict(PURE, master="split"),
    "split-stochastic": dict(STOCHASTIC, master="split", sites=BF16_MOMENTS),
    "stochastic-8bit": dict(STOCHASTIC, opt8bit=True),
    "stochastic-4bit": dict(STOCHASTIC, opt4bit=True),
    "sgd": dict(STOCHASTIC, optimizer="sgd"),
    "lion": dict(STOCHASTIC, optimizer="lion"),
    "adafactor": dict(STOCHASTIC, optimizer="adafactor"),
    "muon": dict(STOCHASTIC, optimizer="muon"),
}
OUR_AVERAGES = {
    "ema-fp32": {},
    "ema-bf16": dict(dtype="bf16"),
    "ema-bf16-stochastic": dict(dtype="bf16", update="stochastic"),
}
# a name: the class as its authors publish it
PEERS = {
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
    "torch-ema": "torch.optim.swa_utils:AveragedModel",
    "diffusers-ema": "diffusers.training_utils:EMAModel",
}
# a name: the rule of a tool that is no package, as benchmarks/averages.py writes it
TOOLS = {
    "onetrainer-ema": "OneTrainer",
    "onetrainer-ema-stochastic": "OneTrainer, stochastic",
    "ai-toolkit-ema": "ai-toolkit",
}
NAMES = [*(f"ours:{name}" for name in (*OURS, *OUR_AVERAGES)), *PEERS, *TOOLS]


def chosen(names, device):
    """The subjects of a command line; 'all' or no name stands for NAMES, but for what is not installed.
    Raises Refused for what can't be imported, made or stepped.
    """
    found, absent = [], []
    for name in names or ["all"]:
        for one in NAMES if name == "all" else [name]:
            try:
                found.append(subject(one, device))
            except Refused as error:
                if name != "all":
                    raise
                absent.append(f"{one}: not asked: {error}")
    print("\n".join(absent), end="\n" if absent else "")
    return found


def subject(name, device):
    """A Subject or AverageSubject by a name of NAMES or as `module:Class(option=value)`. Raises Refused."""
    if name.startswith("ours:"):
        return _ours(name, device)
    if name in TOOLS:
        rule = RULES[TOOLS[name]]
        return AverageSubject(name, functools.partial(Ruled, rule), Ruled.update, device=device)
    made = _called(name, PEERS.get(name, name), device)
    _tried(made)
    return made


def _ours(name, device):
    short = name.removeprefix("ours:")
    if short in OUR_AVERAGES:
        options = OUR_AVERAGES[short]

        def average(model):
            return rounded.EMA(list(model.named_parameters()), DECAY, **options)

        return AverageSubject(name, average, lambda ema, model: ema.update(), device=device)
    if short not in OURS:
        raise Refused(f"{name}: unknown; ours are {', '.join([*OURS, *OUR_AVERAGES])}")
    r, kind = recipe(**OURS[short]), OURS[short].get("optimizer", "adamw")

    def build(params, **options):
        return build.build(kind, params, r, **options)

    build([nn.Parameter(torch.ones(1))])  # a format's package may be absent
    return Subject(name, build, {"lr", "betas", "weight_decay", "seed"}, device=device)


def _called(name, text, device):
    """The subject of `module:Class(option=value)`."""
    module, found, call = text.partition(":") if not text.endswith(".py") else (text, "", "")
    if not found or not call:
        known = ", ".join(NAMES)
        raise Refused(f"{name}: write module:Class, 'module:Class(option=value)', or one of {known}")
    kind, options = _parsed(name, call)
    package, home = _imported(name, module)
    made = home
    for part in kind.split("."):
        made = getattr(made, part, None)
    if not inspect.isclass(made):
        raise Refused(f"{name}: {module} has no class {kind}")
    where = dict(package=package, version=_version(package), device=device)
    takes = _keywords(made)
    if issubclass(made, torch.optim.Optimizer):
        if "lr" not in takes:
            raise Refused(f"{name}: {kind} takes no lr, which the checks set")
        known = {"lr", "betas", "weight_decay", "seed"} & set(takes)
        known -= set(options) & {"betas"}
        own = {key: value for key, value in options.items() if key not in known}

        def build(params, **given):
            return made(params, **own, **given)

        return Subject(name, build, known, tuple(options.get("betas", BETAS)), **where)
    return _average(name, made, takes, options, where)


def _keywords(made):
    """[what a class's constructor takes], those of the classes that it hands its keywords on to included. One
    that hands them on to nobody, and names none, takes what every optimiser does.
    """
    found = []
    for base in made.__mro__:
        if "__init__" in vars(base):
            takes = inspect.signature(base.__init__).parameters
            found += [word for word in list(takes)[1:] if word not in found]
            if all(p.kind != p.VAR_KEYWORD for p in takes.values()):
                break
    takes = inspect.signature(made.__init__).parameters.values()
    if "lr" not in found and any(p.kind == p.VAR_KEYWORD for p in takes):
        found += ["lr", "betas", "weight_decay"]
    return found


def _parsed(name, call):
    """('Class', {option: value}) of `Class(option=value)`; values are literals or dtypes as torch.float32."""
    wrong = Refused(f"{name}: write the class as in Python, 'module:Class(option=value)', with plain values")
    try:
        tree = ast.parse(call, mode="eval").body
        kind, keywords = (tree.func, tree.keywords) if isinstance(tree, ast.Call) else (tree, [])
        if isinstance(tree, ast.Call) and tree.args:
            raise wrong
        if not isinstance(kind, (ast.Name, ast.Attribute)):
            raise wrong
        return ast.unparse(kind), {keyword.arg: _value(keyword.value) for keyword in keywords}
    except (SyntaxError, ValueError, TypeError):
        raise wrong from None


def _value(node):
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        dtype = getattr(torch, node.attr, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return ast.literal_eval(node)


def _imported(name, module):
    """(its package, the module) of a dotted name or of a file. Raises Refused."""
    if not module.endswith(".py"):
        found, error = try_import(module)
        if found is None:
            raise Refused(f"{name}: {module} can't be imported ({error}): pip install its package")
        return module.partition(".")[0], found
    file = Path(module).expanduser()
    if not file.is_file():
        raise Refused(f"{name}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"conformance_{file.stem}", file.resolve())
    found = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(found)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise Refused(f"{name}: {file} can't be imported ({why})") from None
    return "", found


def _version(package):
    for distribution in metadata.packages_distributions().get(package, []):
        return metadata.version(distribution)
    return ""


def _average(name, made, takes, options, where):
    """An AverageSubject of a class that is no optimiser: over named parameters, parameters or a model."""
    over = {"named": lambda m: list(m.named_parameters()), "param": lambda m: list(m.parameters())}
    over |= {"model": lambda m: m, "module": lambda m: m, "net": lambda m: m}
    first = takes[0] if takes else ""
    read = next((read for word, read in over.items() if first.startswith(word)), None)
    updates = ("update_parameters", "update", "step")
    update = next((method for method in updates if callable(getattr(made, method, None))), None)
    if read is None or update is None:
        what = "neither derives from torch.optim.Optimizer nor is an average of parameters or of a model"
        raise Refused(f"{name}: {made.__name__} {what}")
    own = dict(options)
    decay = next((word for word in ("decay", "beta", "ema_decay") if word in takes), None)
    if decay:
        own.setdefault(decay, DECAY)
    elif "multi_avg_fn" in takes:  # torch's
        own["multi_avg_fn"] = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    wants = list(inspect.signature(getattr(made, update)).parameters.values())[1:]
    wants = [p for p in wants if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    wants = [p.name.startswith(("model", "module", "net")) for p in wants]  # the model, or its parameters

    def step(average, model):
        given = [model if whole else list(model.parameters()) for whole in wants]
        return getattr(average, update)(*given)

    return AverageSubject(name, lambda model: made(read(model), **own), step, **where)


def _tried(subject):
    """Make one and step it. Raises Refused, in one line, where that fails."""
    doing = "made for"
    try:
        with drawn(0), torch.compiler.set_stance("force_eager"):
            if subject.kind == "average":
                weight = torch.ones(64, dtype=BF16)
                model, average = subject.start(weight)
                step = functools.partial(subject.follow, model, average, weight)
            else:
                step = functools.partial(feed, *subject.start([full(8)]), [full(8, GRADIENT)])
            doing = "stepped with"
            step()
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise Refused(f"{subject.name}: it can't be {doing} bf16 weights ({why})") from None
    if subject.kind == "average":
        adapters.Average.of(average, model)
