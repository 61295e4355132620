"""The tasks that come with the program, and how a task is found.

    rflow    rectified flow (diffusion.py)
    reflow   rectified flow on pairs of noise and a teacher's image of it (reflow.py): straight paths, for
             sampling in 1 to 4 steps
    distill  progressive distillation (distillation.py): one step in place of two of a teacher's
    consistency  consistency models (consistency.py): one step from noise to image, with or without a teacher
    ddpm     noise prediction with DDIM sampling (diffusion.py)
    vae      MONAI's AutoencoderKL, in whose latents rflow and ddpm train with --vae (vae.py)
    segment  Dice + cross-entropy on a U-Net, Dice and IoU per class
    classify cross-entropy on a CNN, ResNet-18 or ViT (classify.py), accuracy
    language the next byte of a text, by a GPT or BDH (language.py)
    steve    objects of a video as slots, from which its discrete tokens are predicted (steve.py)
    slotcontrast objects of a video as slots that stay the same from frame to frame (slotcontrast.py)

A new task is a class (see tasks/task.py) and an entry in TASKS; or no entry, with --task FILE.py:CLASS.
"""

import importlib.util
import sys
from pathlib import Path

import options
from harness import flags
from lowprec.errors import Refused
from lowprec.optimizers.build import arguments, kinds
from precision import PRECISION
from tasks.classify import Classify
from tasks.consistency import Consistency
from tasks.diffusion import DDPM, RFlow
from tasks.distillation import Distill
from tasks.language import Language
from tasks.reflow import Reflow
from tasks.segment import Segment
from tasks.slotcontrast import Contrast
from tasks.steve import Steve
from tasks.task import Task
from tasks.vae import VAE

# ---- The list ----------------------------------------------------------------------------------------------

TASKS = {
    "rflow": RFlow,
    "reflow": Reflow,
    "distill": Distill,
    "consistency": Consistency,
    "ddpm": DDPM,
    "vae": VAE,
    "segment": Segment,
    "classify": Classify,
    "language": Language,
    "steve": Steve,
    "slotcontrast": Contrast,
}


def find(spec):
    """The class of a --task: an entry of TASKS, or FILE.py:CLASS. Raises Refused; an error in the file is
    its own.
    """
    if spec in TASKS:
        return TASKS[spec]
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not file.endswith(".py"):
        raise Refused(
            f"--task {spec}: invalid choice; choose one of {', '.join(TASKS)}, or give a task of your own "
            "as FILE.py:CLASS"
        )
    if not path.is_file():
        raise Refused(f"--task {spec}: there is no file {path}")
    kind = getattr(_module(path.resolve()), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise Refused(
            f"--task {spec}: {path} holds no class {name or '(none was named)'} derived from tasks.Task"
        )
    return kind


def _module(path):
    """A file as a module, run once."""
    name = f"task_{path.stem}"
    known = sys.modules.get(name)
    if known is None or Path(known.__file__) != path:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = known = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(known)
        except BaseException:
            del sys.modules[name]
            raise
    return known


def rows(*kinds):
    """The flags of some tasks, and then those of the classes that they share: [Flag].

    Of two rows with one name that of the derived class stays.
    """
    shared = [base for kind in kinds for base in kind.__mro__[1:]]
    found = {}
    for kind in [*kinds, *shared]:
        for row in vars(kind).get("flags", ()):
            found.setdefault(row.name, row)
    return list(found.values())


def table(spec=None):
    """flags.Table of the general flags, those of TASKS, and those of the task `spec`."""
    own = rows(find(spec)) if spec and spec not in TASKS else []
    before = options.TASK + options.TRAINING + PRECISION
    after = options.SCORING + options.MACHINE + options.RUN
    return flags.Table([*before, *rows(*TASKS.values()), *after, *own])


def defaults(kind, given):
    """{flag: default} where the task, the --optimizer given or --clip_tensor has another than the flag's row.
    """
    own = kinds(given.get("optimizer", "adamw"))
    clipped = {"clip_grad": 0.0} if given.get("clip_tensor") else {}
    return {**kind.own_defaults(), **(own[0].flags if own else {}), **clipped}


def typed(table, given):
    """flags.Config of the flags typed, {flag: value}: with the defaults of their task and optimiser, and with
    what the task settles. Raises Refused.
    """
    kind = find(given.get("task", "rflow"))
    config = table.typed({**defaults(kind, given), **given})
    _refuse_foreign(kind, config)
    return config.replaced(**kind.settle(table, given))


def _refuse_foreign(kind, config):
    """Raise Refused where a flag of another task is set: it would do nothing beside this one."""
    own = {row.name for row in rows(kind)}
    for row in rows(*TASKS.values()):
        if row.name not in own and getattr(config, row.name) != row.default:
            bring = [name for name, task in TASKS.items() if row.name in {row.name for row in rows(task)}]
            several = ", ".join(bring[:-1]) + " and " * (len(bring) > 1) + bring[-1]
            add = f"add --task {bring[0]}" if len(bring) == 1 else "add one of these"
            raise Refused(
                f"--{row.name} is for --task {several}, and this is --task {config.task}: {add}, or drop it"
            )


def settled(values):
    """(task class, flags.Table, flags.Config) of the flags of a run, a dict or a Config. Raises Refused."""
    values = values if isinstance(values, dict) else vars(values)
    kind, known = find(values.get("task", "rflow")), table(values.get("task"))
    config = known.config({**defaults(kind, values), **values})
    _refuse_foreign(kind, config)
    if kinds(config.optimizer) and config.beta2 != known["beta2"].default:
        if not any("betas" in arguments(one) for one in kinds(config.optimizer)):
            its = f"--optimizer {config.optimizer} has no beta2"
            raise Refused(f"--beta2 {config.beta2:g}: {its}; drop it, or choose adamw, lion or muon")
    if config.weight_decay_on != known["weight_decay_on"].default and not config.weight_decay:
        what = f"--weight_decay_on {config.weight_decay_on}: nothing decays without --weight_decay"
        raise Refused(f"{what}; add that, or drop it")
    if config.batch_size == "auto":
        raise Refused("--batch_size auto is a number once a run begins, and this is none yet: give a number")
    kind.check(config)
    return kind, known, config
