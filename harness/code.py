"""FILE.py:NAME on a command line: a task, a net or an optimiser of one's own.

    python train.py --task mine.py:Mine             a class derived from tasks.Task
    python train.py --model mine.py:build           a function that makes a net
    python train.py --optimizer mine.py:Signum      a class: lowprec's Rounded or torch's Optimizer

A checkpoint names such files too, and may be a stranger's. So only what was typed is run.
"""

import importlib.util
import inspect
import sys
from pathlib import Path

import torch

from lowprec.errors import Refused

_typed = set()  # by the command that is carried out


def is_code(spec):
    """Whether the value of a flag names a file of code."""
    return isinstance(spec, str) and spec.rpartition(":")[0].endswith(".py")


def typed(*specs):
    """Say that whoever gave this command has typed them."""
    _typed.update(specs)


def forget():
    """A new command: nothing is typed yet."""
    _typed.clear()


def check_typed(flag, spec):
    """Raise Refused for a file of code that nobody has typed."""
    if is_code(spec) and spec not in _typed:
        alone = f"--{flag} {spec} stands in a checkpoint, and a checkpoint alone runs no code"
        raise Refused(f"{alone}: add --{flag} {spec} if that file is yours")


def load(flag, spec, wanted, test):
    """What FILE.py:NAME holds, where test(it) is true. wanted: what to call that, with {} for its name.
    Raises Refused; an error in the file is its own.
    """
    check_typed(flag, spec)
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise Refused(f"--{flag} {spec}: there is no file {path}")
    found = getattr(module_of(path.resolve()), name, None)
    if not test(found):
        raise Refused(f"--{flag} {spec}: {path} holds no {wanted.format(name or '(none was named)')}")
    return found


def module_of(path):
    """A file as a module, run once. path: an absolute one."""
    name = f"task_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and Path(known.__file__) == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def built(spec, build, *args):
    """The net that the function of --model `spec` makes of these arguments. Raises Refused."""
    try:
        inspect.signature(build).bind(*args)
    except TypeError as error:
        raise Refused(f"--model {spec} is called with {len(args)} arguments: {error}") from None
    return _checked("model", spec, build(*args))


def strangers_optimizer(spec, options):
    """What makes the optimiser of --optimizer `spec`, a class or function of torch's kind, of parameters,
    with those of the options that it takes.
    """
    make = load("optimizer", spec, "class or function {}", callable)
    taken = inspect.signature(make).parameters
    own = {name: value for name, value in options.items() if name in taken and value is not None}

    def made(params):
        return _checked("optimizer", spec, make(params, **own))

    return made


RETURNED = {  # flag: what its function returns, and how it is called
    "model": (torch.nn.Module, "torch.nn.Module"),
    "optimizer": (torch.optim.Optimizer, "torch.optim.Optimizer"),
}


def _checked(flag, spec, made):
    """What a function of a file made. Raises Refused for anything else than RETURNED says."""
    kind, name = RETURNED[flag]
    if not isinstance(made, kind):
        raise Refused(f"--{flag} {spec} gave a {type(made).__name__}: return a {name}")
    return made
