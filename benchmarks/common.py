"""What the benches share: nets and recipes by name, a clock, turns, and a process to measure in.

    net = parse_net("unet:small:64:8")                 # ('unet', 'small', 64, 8)
    run, inputs, velocity = prepared(net, RECIPES["bf16"], torch.device("cpu"))
    times = take_turns({"a": a, "b": b}, 15, bar)      # {'a': [what a() returned in each round], 'b': [...]}

`bench.py` compares ways to train on the machine at hand, `benchmarks/gpu.py` every recipe on a GPU.
"""

import multiprocessing
import random
import signal
import time

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import models
from lowprec.errors import Refused
from lowprec.formats import FORMATS
from lowprec.machine import quiet_libraries
from lowprec.optimizers.offload import Offload
from lowprec.precision import Precision, recipe

ADAMW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

# ---- Recipes -----------------------------------------------------------------------------------------------

PURE = dict(pure_bf16=True)
STOCHASTIC = dict(pure_bf16=True, stochastic=True)

# name: flags, as `precision.recipe` takes them
RECIPES = {
    "fp32": {},
    "bf16": dict(bf16=True),
    "pure_bf16": PURE,
    "pure_bf16-stochastic": STOCHASTIC,
    "pure_bf16-kahan": dict(pure_bf16=True, kahan=True),
    "pure_bf16-split": dict(pure_bf16=True, master="split"),
    "opt8bit": dict(opt8bit=True),
    "tf32": dict(sites=["compute=tf32"]),
    "fp16": dict(fp16=True),
    "pure_bf16-stochastic-opt8bit-fp8": dict(STOCHASTIC, opt8bit=True, fp8=True),
    # weights in bf16, dense and semi-structured
    "generate-bf16": STOCHASTIC,
    "generate-bf16-2:4": dict(STOCHASTIC, sparse24="magnitude"),
    # masked dense products
    "bf16-2:4": dict(bf16=True, sparse24="srste"),
    "pure_bf16-stochastic-2:4": dict(STOCHASTIC, sparse24="srste"),
    "bf16-opt8bit": dict(bf16=True, opt8bit=True),
    "bf16-opt4bit": dict(bf16=True, opt4bit=True),
    "pure_bf16-stochastic-opt8bit": dict(STOCHASTIC, opt8bit=True),
    "pure_bf16-stochastic-opt4bit": dict(STOCHASTIC, opt4bit=True),
}
FP8 = []  # names of the recipes that differ in how FP8 is run alone
for backend in ("torchao", "te", "scaled_mm"):
    for scaling in ("tensorwise", "rowwise", "delayed"):
        FP8.append(f"fp8-{backend}-{scaling}")
        RECIPES[FP8[-1]] = dict(fp8=True, fp8_backend=backend, fp8_recipe=scaling)

PRESETS = {"int8": "opt8bit", "int4": "opt4bit"}  # formats of moments that have a flag of their own


def moment_formats():
    """Names of the formats that moments can be held in: those with a flag first, then the others as they are
    registered.
    """
    return [*PRESETS, *(name for name in FORMATS if name not in PRESETS)]


def moments_in(name):
    """The flags that hold both moments in a format."""
    if name in PRESETS:
        return {PRESETS[name]: True}
    return {"sites": [f"exp_avg={name}", f"exp_avg_sq={name}"]}


def typed(flags):
    """Flags as a user types them: dict(pure_bf16=True, master="split") -> '--pure_bf16 --master split'."""
    words = []
    for name, value in flags.items():
        if name == "sites":
            words += [f"--set {setting}" for setting in value]
        else:
            words.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(words)


# ---- Nets --------------------------------------------------------------------------------------------------


def parse_net(spec):
    """'unet:small:64:8' -> ('unet', 'small', 64, 8): model, size, side of the image, batch size. Raises
    Refused.
    """
    parts = spec.split(":")
    if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts[2:]):
        raise Refused(f"--nets {spec}: write MODEL:SIZE:IMAGE:BATCH, as in unet:small:64:8")
    return parts[0], parts[1], int(parts[2]), int(parts[3])


def built(net):
    """The net of a parsed --nets entry, on torch's default device. Raises Refused."""
    kind, size, side, _ = net
    if kind not in models.GENERATIVE:
        raise Refused(f"--nets {kind}:{size}: no such model; choose {' or '.join(models.GENERATIVE)}")
    return models.GENERATIVE[kind](3, 10, side, size)


def check_nets(specs):
    """Raises Refused unless every net can be built; on shapes alone."""
    with torch.device("meta"):
        for spec in specs:
            built(parse_net(spec))


def prepared(net, flags, device):
    """(Precision over the net, its inputs (x, t, y), the velocity it is to predict): the same for every
    recipe. flags: as `precision.recipe` takes them.
    """
    _, _, side, batch = net
    torch.manual_seed(0)
    with device:
        model = built(net)
    flags = dict(flags)
    options = {name: flags.pop(name) for name in ("grad_release", "states_on") if name in flags}
    if options.get("states_on") == "cpu" and device.type == "cpu":
        options["states_on"] = Offload(OneMemory())
    run = Precision(model, recipe(**flags), **options, **ADAMW)
    generator = torch.Generator().manual_seed(0)
    x, velocity = (torch.randn(batch, 3, side, side, generator=generator).to(device) for _ in range(2))
    t, y = torch.linspace(0, 999, batch, device=device), torch.arange(batch) % 10
    return run, (x, t, y.to(device)), velocity


class OneMemory:
    """The traffic of an offload.Offload where there is no GPU: the same rooms and copies, made at once.
    rooms: bytes of those of all steps.
    """

    def __init__(self):
        self.rooms = 0

    def memory(self, t):
        return t

    def room(self, n):
        self.rooms += n
        return torch.empty(n, dtype=torch.uint8)

    def copy(self, way, pairs, after):
        for target, source in pairs:
            target.copy_(source)

    def now(self):
        """Nothing is ever under way."""

    def need(self, copied):
        """As `now`."""

    wait = need


# ---- Memory ----------------------------------------------------------------------------------------------


def forget_tables(optimizer):
    """Drop the tables of the formats that an optimiser holds its moments in. All optimisers share them: after
    its next step they hold what it needs, and no more.
    """
    for form in getattr(optimizer, "coders", {}).values():
        getattr(form, "tables", {}).clear()


def state_bytes(optimizer):
    """Bytes of all tensors in an optimiser's state and tables of codes, storage that several share counted
    once.
    """
    tensors = [t for state in optimizer.state.values() for _, t in tensors_in(state)]
    for form in getattr(optimizer, "coders", {}).values():
        tensors += getattr(form, "tables", {}).values()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def tensors_in(state, path=""):
    """[(where, plain tensor)] of a state: of dicts and lists within it, of classes of tensors that hold
    others, as torchao's and SDNQ's codes do, and of other classes that hold tensors, as FlashOptim's do.
    """
    if is_traceable_wrapper_subclass(state):
        names = state.__tensor_flatten__()[0]
        state = {name: getattr(state, name) for name in names}
    if torch.is_tensor(state):
        return [(path, state)]
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        state = {name: t for name, t in getattr(state, "__dict__", {}).items() if torch.is_tensor(t)}
    parts = [tensors_in(value, f"{path}.{name}" if path else str(name)) for name, value in state.items()]
    return [found for part in parts for found in part]


# ---- Moments -----------------------------------------------------------------------------------------------


def after_a_drop(optimizer, p, read, before, after, bar=None, beta2=None, quiet=False):
    """(v of the entries whose gradients dropped, v of the others), each over the exact mean v.

    Standard normal gradients for `before` steps, then every other entry's times 0.01 for `after` steps: in
    each block of codes the scale stays, while half of the values should fall. read() gives exp_avg_sq [n] as
    the optimiser holds it. The draws are made on the CPU. beta2: that of the optimiser's groups unless given.
    quiet: let a quarter of the entries have small gradients all along, and count them nowhere. They are what
    the smallest code of a block stands for, so that the dropped ones lie between a block's two ends.
    """
    generator, places = torch.Generator().manual_seed(0), torch.arange(p.numel())
    dropped = places % 2 == 0
    heights = torch.where(places % 4 == 1, 1e-3, 1.0) if quiet else torch.ones(())
    exact, beta2 = torch.zeros(p.numel()), beta2 or optimizer.param_groups[0]["betas"][1]
    for step in range(before + after):
        grad = torch.randn(p.numel(), generator=generator) * heights
        grad = torch.where(dropped, 0.01 * grad, grad) if step >= before else grad
        exact = beta2 * exact + (1 - beta2) * grad.square()
        p.grad = grad.to(p.device, p.dtype).view_as(p)
        optimizer.step()
        if bar:
            bar.update()
    held = read().cpu()
    others = places % 4 == 3 if quiet else ~dropped
    return tuple((held[half].mean() / exact[half].mean()).item() for half in (dropped, others))


# ---- Time --------------------------------------------------------------------------------------------------


class Clock:
    """Marks in time on a device and the milliseconds between them; on CUDA events, which don't hold up the
    queue.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        return start.elapsed_time(end) if self.cuda else (end - start) * 1e3


def timed(step, clock, steps=1):
    """Milliseconds a step, of `steps` in a row."""
    clock.wait()
    start = clock.mark()
    for _ in range(steps):
        step()
    end = clock.mark()
    clock.wait()
    return clock.ms(start, end) / steps


def _nothing(name):
    pass


def take_turns(actions, repeats, bar, prepare=_nothing):
    """{name: [result of actions[name]() in each round]}; each round runs all of them once, in an order of its
    own. prepare(name) is called before each.
    """
    results, order, rng = {name: [] for name in actions}, list(actions), random.Random(0)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            prepare(name)
            bar.set_postfix_str(str(name), refresh=False)
            results[name].append(actions[name]())
            bar.update()
    return results


# ---- A process for cells -----------------------------------------------------------------------------------


class Lost(Exception):
    """A process gave no result. timeout: because it took too long."""

    def __init__(self, message, timeout=False):
        super().__init__(message)
        self.timeout = timeout


def _serve(function, pipe):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the other one ends this one
    quiet_libraries()
    try:
        while True:
            pipe.send(function(pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass


class Worker:
    """Calls function(argument) in a process of its own, which is started when needed and replaced after it is
    lost or closed.
    """

    def __init__(self, function, method="spawn"):
        self.function, self.context, self.process = function, multiprocessing.get_context(method), None

    def do(self, argument, seconds):
        """The function's result. Raises Lost after `seconds`, or when the process ends."""
        if self.process is None:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=_serve, args=(self.function, theirs))
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(argument)
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            lost = Lost(f"took longer than {seconds:.0f} s", timeout=True)
        except (EOFError, OSError):
            self.process.join(10)
            lost = Lost(f"its process ended, exit status {self.process.exitcode}")
        self.close(wait=0)
        raise lost

    def close(self, wait=10):
        """End the process, by force after `wait` seconds."""
        if self.process is not None:
            self.pipe.close()  # it ends when it has nobody to listen to
            self.process.join(wait)
            self.process.kill()
            self.process.join()
            self.process = None


class Here:
    """Calls the function in this process."""

    def __init__(self, function):
        self.function = function

    def do(self, argument, seconds):
        return self.function(argument)

    def close(self):
        pass


# ---- Words -------------------------------------------------------------------------------------------------


def cell(value, spec):
    """A figure of a table, '-' where there is none."""
    return "-" if value is None else format(value, spec)
