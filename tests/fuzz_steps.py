"""What becomes of a step when somebody's code replaced one of its tensors?

    python tests/fuzz_steps.py                 500 cases under an address sanitizer, where g++ has one
    python tests/fuzz_steps.py --plain         without it
    python tests/fuzz_steps.py --only 17 138   these cases, with what they wrote

A case is a function of its number. It makes an optimiser of four tensors, takes two steps, replaces a weight,
a gradient, a moment or a low part, and takes two more, in a process of its own. A line of refusal is right,
if nothing has moved by then; and so is a step that moves each weight as the rule does in float64, from the
tensors that stand there. All else is a finding: a crash, an access out of bounds, another error or step.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from lowprec import SGD, Adafactor, AdamW, Lion, Muon, Refused  # noqa: E402
from lowprec.formats import FORMATS  # noqa: E402
from lowprec.kernels import compiled, cpu_step  # noqa: E402
from lowprec.rounding import exact_weight  # noqa: E402

CASES = 500
LONGEST = 60  # seconds that a case may take
# two that are alike; one whose moments are too few for codes; one that ends within a block of codes
SHAPES = (64, 80), (16, 24), (64, 80), (70, 67)
LOW_PARTS = {  # what completes a weight: way -> its name and dtype
    "kahan": ("compensation", torch.bfloat16),
    "split": ("remainder", torch.int16),
    "split8": ("remainder", torch.int8),
    "fp32 master": ("master", torch.float32),
}


def draw(*shape, seed, scale):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- Optimisers --------------------------------------------------------------------------------------------

# way -> (options, how far from the value that it stands for a weight may be, as a share of it)
WAYS = {
    "fp32": ({}, 1e-6),
    "nearest": ({}, 2**-8),
    "stochastic": (dict(update="stochastic"), 2**-7),
    "kahan": (dict(kahan=True), 2**-15),
    "split": (dict(master="split"), 1e-6),
    "split8": (dict(master="split8", update="stochastic"), 2**-14),
    "fp32 master": (dict(master="fp32"), 1e-6),
    "eco": (dict(update="eco"), 2**-8),
}
MOMENTS = "fp32", "bf16", "int8", "int4", "flash8", "e4m3", "e5m2", "log4"


def adamw(held, g, old, step, group):
    """(update, {moment: its new value}) in float64. old: {moment: value}; step: the number of this step."""
    beta1, beta2 = group["betas"]
    m = old["exp_avg"] + (1 - beta1) * (g - old["exp_avg"])
    v = beta2 * old["exp_avg_sq"] + (1 - beta2) * g * g
    root = v.sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
    return -group["lr"] / (1 - beta1**step) * m / root, dict(exp_avg=m, exp_avg_sq=v)


def sgd(held, g, old, step, group):
    m = group["momentum"] * old["momentum"] + g
    return -group["lr"] * m, dict(momentum=m)


def lion(held, g, old, step, group):
    beta1, beta2 = group["betas"]
    m = old["exp_avg"]
    update = -group["lr"] * (m + (1 - beta1) * (g - m)).sign()
    return update, dict(exp_avg=m + (1 - beta2) * (g - m))


def adafactor(held, g, old, step, group):
    share, squares = step ** group["beta2_decay"], g * g + group["eps"][0]
    rows = old["row_var"].lerp(squares.mean(1, keepdim=True), share)
    columns = old["col_var"].lerp(squares.mean(0, keepdim=True), share)
    direction = g / (rows * columns / rows.mean()).sqrt()
    size = max(rms(held), group["eps"][1]) * min(group["lr"], step**-0.5)
    return -direction * size / max(1, rms(direction) / group["clip"]), dict(row_var=rows, col_var=columns)


def rms(t):
    return t.square().mean().sqrt().item()


def muon(held, g, old, step, group):
    m = old["momentum"].lerp(g, 1 - group["momentum"])
    x = g.lerp(m, group["momentum"])
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return -group["lr"] * 0.2 * max(x.shape) ** 0.5 * x, dict(momentum=m)


class Rule(NamedTuple):
    kind: type
    reference: object
    moments: tuple
    options: dict


RULES = {
    "AdamW": Rule(AdamW, adamw, ("exp_avg", "exp_avg_sq"), {}),
    "SGD": Rule(SGD, sgd, ("momentum",), dict(momentum=0.9)),
    "Lion": Rule(Lion, lion, ("exp_avg",), {}),
    "Adafactor": Rule(Adafactor, adafactor, ("row_var", "col_var"), {}),
    "Muon": Rule(Muon, muon, ("momentum",), {}),
}


class Case(NamedTuple):
    number: int
    rule: str
    way: str
    moments: str
    compiled: bool
    some: bool  # whether only some tensors have gradients
    by_hand: bool  # whether gradients are given to `step`
    replacement: str
    target: int  # of SHAPES
    name: int  # which tensor of its state


def case(number):
    dice = random.Random(f"case {number}")
    rule = dice.choice(["AdamW", "AdamW", *RULES])
    way = dice.choice([way for way in WAYS if way != "eco" or rule in ("AdamW", "SGD")])
    moments = dice.choice(MOMENTS[:2] if rule == "Adafactor" else MOMENTS)
    replacement = list(REPLACEMENTS)[number % len(REPLACEMENTS)]
    booleans = [dice.random() < share for share in (0.8, 0.3, 0.3)]
    return Case(number, rule, way, moments, *booleans, replacement, dice.randrange(4), dice.randrange(4))


def made(chosen):
    """(parameters, optimiser)."""
    rule, (options, _) = RULES[chosen.rule], WAYS[chosen.way]
    dtype = torch.float32 if chosen.way == "fp32" else torch.bfloat16
    params = [torch.nn.Parameter(draw(*s, seed=i, scale=0.1).to(dtype)) for i, s in enumerate(SHAPES)]
    kinds = dict.fromkeys(rule.moments, chosen.moments)
    if chosen.moments == "log4" and "exp_avg_sq" not in kinds:
        kinds = dict.fromkeys(kinds, "int4")  # it holds second moments
    elif chosen.moments == "log4":
        kinds["exp_avg"] = "int4"
    more = dict(lr=0.05, weight_decay=0.1, compiled=chosen.compiled, kinds=kinds)
    return params, rule.kind(params, **options, **rule.options, **more)


# ---- Replacements ------------------------------------------------------------------------------------------


def filled(like, shape, dtype=None):
    """Positive values of another size than those that stand there."""
    values = draw(*shape, seed=99, scale=3.0).abs()
    return values.to(dtype or like.dtype)


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def within_another(t):
    wider = filled(t, (t.numel() + 3,))
    return wider[3:].view(t.shape)


# what can stand for a tensor
TENSORS = {
    "longer": lambda t: filled(t, (t.shape[0] * 3, *t.shape[1:])),
    "a little longer": lambda t: filled(t, (t.shape[0] + 1, *t.shape[1:])),
    "shorter": lambda t: filled(t, (t.shape[0] // 2, *t.shape[1:])),
    "of three values": lambda t: filled(t, (3,)),
    "empty": lambda t: filled(t, (0,)),
    "a number": lambda t: filled(t, ()),
    "flat": lambda t: filled(t, (t.numel(),)),
    "turned": lambda t: filled(t, t.shape[::-1]),
    "with other strides": lambda t: filled(t, t.shape[::-1]).T,
    "expanded": lambda t: filled(t, (1,) * t.dim()).expand(t.shape),
    "every second value": lambda t: filled(t, (*t.shape[:-1], 2 * t.shape[-1]))[..., ::2],
    "within another": within_another,
    "freed": freed,
    "a copy": lambda t: t.clone(),
    "other values": lambda t: filled(t, t.shape),
    "fp32": lambda t: filled(t, t.shape, torch.float32),
    "bf16": lambda t: filled(t, t.shape, torch.bfloat16),
    "fp16": lambda t: filled(t, t.shape, torch.float16),
    "fp64": lambda t: filled(t, t.shape, torch.float64),
    "int32": lambda t: filled(t, t.shape, torch.int32),
    "int8": lambda t: filled(t, t.shape, torch.int8),
    "sparse": lambda t: filled(t, t.shape).to_sparse(),
    "meta": lambda t: t.to("meta"),
}


class Place(NamedTuple):
    """What a replacement may change: the tensors of a parameter, its state, another one like it."""

    optimizer: torch.optim.Optimizer
    p: torch.nn.Parameter
    alike: torch.nn.Parameter  # of the same shape, if there is one
    unlike: torch.nn.Parameter
    name: str  # of a tensor in the state
    grads: dict

    @property
    def state(self):
        return self.optimizer.state[self.p]


def by_data(owner, new):
    owner.data = new


def swap_data(a, b):
    a.data, b.data = b.data, a.data


def swap_state(place, other):
    states = place.optimizer.state
    states[place.p], states[other] = states[other], states[place.p]


def take(name):
    """Replacements of all kinds by TENSORS[name]."""
    new = TENSORS[name]
    return {
        f"weight.data {name}": lambda at: by_data(at.p, new(at.p.data)),
        f"gradient {name}": lambda at: at.grads.update({at.p: new(at.grads[at.p])}),
        f"state assigned, {name}": lambda at: at.state.update({at.name: new(at.state[at.name])}),
        f"state.data {name}": lambda at: by_data(at.state[at.name], new(at.state[at.name])),
    }


REPLACEMENTS = {kind: act for name in TENSORS for kind, act in take(name).items()} | {
    "weight freed in place": lambda at: at.p.data.untyped_storage().resize_(0),
    "state freed in place": lambda at: at.state[at.name].untyped_storage().resize_(0),
    "two like weights swapped": lambda at: swap_data(at.p, at.alike),
    "two unlike weights swapped": lambda at: swap_data(at.p, at.unlike),
    "two like gradients swapped": lambda at: swap_data(at.grads[at.p], at.grads[at.alike]),
    "two unlike gradients swapped": lambda at: swap_data(at.grads[at.p], at.grads[at.unlike]),
    "two like states swapped": lambda at: swap_state(at, at.alike),
    "two unlike states swapped": lambda at: swap_state(at, at.unlike),
    "state in place": lambda at: at.state[at.name].zero_(),
    "state deleted": lambda at: at.state.pop(at.name),
    "state of a parameter emptied": lambda at: at.state.clear(),
    "state of a parameter deleted": lambda at: at.optimizer.state.pop(at.p),
    "state cleared": lambda at: at.optimizer.state.clear(),
    "state a new dict": lambda at: setattr(at.optimizer, "state", defaultdict(dict)),
    "state None": lambda at: at.state.update({at.name: None}),
    "state a float": lambda at: at.state.update({at.name: 0.0}),
    "state a list": lambda at: at.state.update({at.name: [0.0]}),
    "step a tensor": lambda at: at.state.update(step=torch.tensor(7.0)),
    "step zero": lambda at: at.state.update(step=0),
    "step deleted": lambda at: at.state.pop("step"),
}

# ---- What is right -----------------------------------------------------------------------------------------


class Unfit(Exception):
    """The tensors that stand there make no step: it must be refused."""


def values(t, shape, what):
    """A tensor as float64. Raises Unfit where it has another shape, or where its memory is not there."""
    if not torch.is_tensor(t) or t.layout != torch.strided or not t.is_cpu:
        raise Unfit(f"{what} is no tensor in memory")
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    if (t.storage_offset() + reach) * t.element_size() > t.untyped_storage().nbytes():
        raise Unfit(f"{what} has no memory")
    if t.shape != shape:
        raise Unfit(f"{what} is {list(t.shape)} and not {list(shape)}")
    return t.detach().double()


def shape_of(p, name):
    if p.dim() < 2 or name not in ("row_var", "col_var"):
        return p.shape
    rows, columns = p.shape
    return torch.Size([rows, 1] if name == "row_var" else [1, columns])


def moment(optimizer, p, name):
    """float64 value of a moment as it stands in the state; zeros where none does."""
    state = optimizer.state.get(p, {})
    shape = shape_of(p, name)
    if name not in state:
        if f"{name}_scale" in state:
            raise Unfit(f"{name} has scales and no codes")
        return torch.zeros(shape, dtype=torch.float64)
    codes, scales = state[name], state.get(f"{name}_scale")
    if scales is None or torch.is_tensor(codes) and codes.shape == shape and codes.is_floating_point():
        found = values(codes, shape, name)
        if not codes.is_floating_point():
            raise Unfit(f"{name} is in {codes.dtype}")
        return found
    coder, n = optimizer.coders[name], shape.numel()
    bytes_of_codes, blocks = coder.sizes(n)
    # codes of one byte a value are in its shape, where several tensors share their block
    values(codes, shape if getattr(codes, "shape", None) == shape else torch.Size([bytes_of_codes]), name)
    values(scales, torch.Size([blocks]), f"{name}_scale")
    if codes.dtype != torch.uint8 or not scales.is_floating_point():
        raise Unfit(f"{name} is in {codes.dtype} with scales in {scales.dtype}")
    codes, scales = codes.reshape(-1).contiguous(), scales.float().contiguous()
    signed = optimizer.signed.get(name, True)
    return coder.decode(codes, scales, n, signed, compiled=False).double().view(shape)


def held(chosen, optimizer, p):
    """The float64 value that a weight stands for."""
    values(p, p.shape, "weight")
    name, dtype = LOW_PARTS.get(chosen.way, (None, None))
    low = optimizer.state.get(p, {}).get(name)
    if low is None:
        return p.detach().double()
    values(low, p.shape, name)
    if p.dtype != torch.bfloat16 or low.is_floating_point() != dtype.is_floating_point:
        raise Unfit(f"{name} in {low.dtype} beside a weight in {p.dtype}")
    return exact_weight(p.detach().contiguous(), low.to(dtype).contiguous()).double()


def step_of(optimizer, p):
    step = optimizer.state.get(p, {}).get("step", 0)
    if not isinstance(step, (int, torch.Tensor)) or step < 0:
        raise Unfit(f"step is {step}")
    return int(step) + 1


class Wanted(NamedTuple):
    held: torch.Tensor
    moments: dict
    tolerance: torch.Tensor


def wanted(chosen, optimizer, p, g):
    """What the next step makes of p, from the tensors that stand there. Raises Unfit."""
    now = held(chosen, optimizer, p)
    if not p.is_floating_point() or (p.numel() > 1 and 0 in p.stride() and p.is_contiguous() is False):
        raise Unfit("values of the weight lie in one place, or are whole numbers")
    gradient = values(g, p.shape, "gradient")
    rule, (_, share) = RULES[chosen.rule], WAYS[chosen.way]
    group = optimizer.param_groups[0]
    old = {name: moment(optimizer, p, name) for name in rule.moments}
    update, new = rule.reference(now, gradient, old, step_of(optimizer, p), group)
    then = now * (1 - group["lr"] * group["weight_decay"]) + update
    if chosen.way == "fp32":  # and somebody may have cast it since
        share = {torch.float16: 2**-10, torch.bfloat16: 2**-8}.get(p.dtype, share)
    tolerance = share * torch.maximum(then.abs(), now.abs()) + 1e-3 * update.abs().max()
    return Wanted(then, new, tolerance)


def far_from(chosen, optimizer, p, right):
    """What the step made wrong of p; None where all is right."""
    off = (held(chosen, optimizer, p) - right.held).abs() > right.tolerance
    if chosen.rule == "Lion":  # where gradient and momentum cancel, the sign is open
        off = off & (off.double().mean() > 1e-3)
    if off.any():
        return f"weights: {off.double().mean():.0%} of them"
    if chosen.way == "eco":
        return None  # rounding errors are in its moments
    for name, value in right.moments.items():
        coded = f"{name}_scale" in optimizer.state[p]
        share, top = (0.55, 0.2) if coded else (2**-7, 1e-5)
        off = (moment(optimizer, p, name) - value).abs() > share * value.abs() + top * value.abs().max()
        if off.any():
            return f"{name}: {off.double().mean():.0%} of it"
    return None


# ---- A case ------------------------------------------------------------------------------------------------


def gradients(params, step):
    draws = [draw(*p.shape, seed=1000 * step + i, scale=0.3) for i, p in enumerate(params)]
    return {p: g.to(p.dtype) for p, g in zip(params, draws, strict=True)}


def replace(chosen, params, optimizer, grads):
    p = params[chosen.target]
    names = [name for name in optimizer.state[p] if name != "step"]
    alike = params[{0: 2, 2: 0}.get(chosen.target, chosen.target)]
    name = names[chosen.name % len(names)]
    unlike = params[(chosen.target + 1) % 4]
    REPLACEMENTS[chosen.replacement](Place(optimizer, p, alike, unlike, name, grads))


def as_bytes(params, optimizer):
    """All tensors that a step may write, where they can be read."""
    found = []
    for p in params:
        for t in (p, *optimizer.state.get(p, {}).values()):
            with contextlib.suppress(Unfit, RuntimeError):
                if torch.is_tensor(t):
                    found.append(values(t, t.shape, "").clone())
    return found


def finding(chosen):
    """What is wrong with a case, as a short text; None where nothing is."""
    params, optimizer = made(chosen)
    for step in range(2):
        optimizer.step(grads=gradients(params, step))
    for step in (2, 3):
        grads = gradients(params, step)
        if step == 2 or chosen.replacement.startswith(("gradient", "two like g", "two unlike g")):
            try:
                replace(chosen, params, optimizer, grads)
            except (RuntimeError, TypeError, NotImplementedError):
                return None  # torch does not let anybody do that
        if chosen.some:
            del grads[params[(chosen.target + 3) % 4]]
        found = wrong_step(chosen, params, optimizer, grads)
        if found:
            return found
    return None


def wrong_step(chosen, params, optimizer, grads):
    """What is wrong with the next step."""
    try:
        right = {p: wanted(chosen, optimizer, p, g) for p, g in grads.items()}
        unfit = None
    except Unfit as error:
        right, unfit = {}, str(error)
    before = as_bytes(params, optimizer)
    try:
        take_step(chosen, params, optimizer, grads)
    except Refused as error:
        after = as_bytes(params, optimizer)
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            return "refused after half a step"
        return "refused in many lines" if "\n" in str(error) else None
    except RuntimeError:
        return None  # torch itself says so
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    if unfit:
        return f"taken, though {unfit}"
    try:
        wrong = [far_from(chosen, optimizer, p, right[p]) for p in right]
    except Unfit as error:
        return f"after the step {error}"
    return next((f"wrong {text}" for text in wrong if text), None)


def take_step(chosen, params, optimizer, grads):
    if chosen.by_hand:
        optimizer.step(grads=grads)
        return
    for p in params:
        p.grad = None
    for p, g in grads.items():
        try:
            p.grad = g
        except RuntimeError:  # torch's own check: .data gets round it
            p.grad = torch.zeros_like(p)
            p.grad.data = g
    optimizer.step()


# ---- In processes ------------------------------------------------------------------------------------------


def tried(chosen, shown=False):
    """What a case finds, in a process of its own; None for nothing."""
    reader, writer = os.pipe()
    log = tempfile.TemporaryFile()
    number = os.fork()
    if number == 0:
        _be_the_case(chosen, writer, log)
    os.close(writer)
    end, done, status = time.monotonic() + LONGEST, 0, 0
    while not done and time.monotonic() < end:
        time.sleep(0.005)
        done, status = os.waitpid(number, os.WNOHANG)
    if not done:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        return "it does not end"
    log.seek(0)
    written = log.read().decode(errors="replace")
    if shown:
        print(written)
    said = os.fdopen(reader).read()
    if status == 0 and said:
        return json.loads(said)
    return end_of(os.waitstatus_to_exitcode(status), written)


def _be_the_case(chosen, writer, log):
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    status = 70
    try:
        os.write(writer, json.dumps(finding(chosen)).encode())
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def end_of(code, written):
    """Why a process ended that said nothing."""
    for line in written.splitlines():
        if "ERROR: AddressSanitizer: " in line:
            return "out of bounds: " + line.partition("Sanitizer: ")[2].partition(" on ")[0]
    if code < 0:
        return f"crash: {signal.Signals(-code).name}"
    return f"the script itself fails: {written.splitlines()[-1] if written else code}"


def settle():
    """Load what all cases need, before they are forked."""
    cpu_step.library()
    for coder in FORMATS.values():
        coder.require()


def findings(numbers, shown=False):
    """[(case, what it finds)]."""
    found = []
    for number in numbers:
        chosen = case(number)
        what = tried(chosen, shown)
        if what:
            found.append((chosen, what))
    return found


def library_of_gcc(name):
    """Its path; None where g++ has none."""
    if not shutil.which("g++"):
        return None
    words = ["g++", f"-print-file-name={name}"]
    path = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None


def under_a_sanitizer():
    """Start this script again so that each access out of bounds ends its process. It builds the C++ once."""
    libraries = [library_of_gcc(name) for name in ("libasan.so", "libstdc++.so")]
    if None in libraries:
        sys.exit("fuzz_steps: g++ has no address sanitizer here: install it, or take --plain")
    folder = Path(tempfile.gettempdir()) / f"lowprec_sanitized_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    compiler = folder / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O1 -fsanitize=address\n')
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "LD_PRELOAD": " ".join(libraries),
        "OMP_NUM_THREADS": "1",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv, "--plain"], environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=CASES, help="how many")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these cases, and what they wrote")
    parser.add_argument("--plain", action="store_true", help="without the sanitizer")
    given = parser.parse_args()
    if not given.plain:
        under_a_sanitizer()
    torch.set_num_threads(1)
    # what torch.compile makes takes seconds, and checks shapes by itself
    compiled._compiled = lambda kernel: (kernel, contextlib.nullcontext)
    settle()
    numbers = given.only or range(given.cases)
    found = findings(numbers, shown=bool(given.only))
    kinds = defaultdict(list)
    for chosen, what in found:
        kinds[chosen.replacement, re.split("[,:]", what)[0]].append((chosen, what))
    for (replacement, _), its in sorted(kinds.items()):
        chosen, what = its[0]
        numbers_of_kind = " ".join(str(other.number) for other, _ in its)
        of = f"{chosen.rule}, {chosen.way}, moments {chosen.moments}"
        print(f"{replacement}: {what} ({of}; --only {numbers_of_kind})")
    print(f"{len(found)} of {len(numbers)} cases, in {len(kinds)} kinds, find something")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
