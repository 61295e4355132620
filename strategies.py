"""The tasks that come with the program, how a task is found, and how the flags of a run are settled.

    rflow        rectified flow (diffusion.py)
    reflow       rectified flow on pairs of noise and a teacher's image of it (reflow.py)
    distill      progressive distillation (distillation.py): one step in place of two of a teacher's
    consistency  consistency models (consistency.py): one step from noise to image, with or without a teacher
    ddpm         noise prediction with DDIM sampling (diffusion.py)
    vae          MONAI's AutoencoderKL (vae.py), in whose latents rflow and ddpm train with --vae
    segment      Dice + cross-entropy on a U-Net (segment.py)
    classify     cross-entropy on a CNN, ResNet-18 or ViT (classify.py)
    language     the next byte of a text, by a GPT or BDH (language.py)
    steve        objects of a video as slots, from which its discrete tokens are predicted (steve.py)
    slotcontrast objects of a video as slots that stay the same from frame to frame (slotcontrast.py)

A new task is a class (see tasks/task.py) and an entry in TASKS; or no entry, with --task FILE.py:CLASS.
"""

import dataclasses
import inspect

import torch

import options
from harness import code, flags
from lowprec.advice.subjects import Subject
from lowprec.errors import Refused
from lowprec.evidence import KIND_OF_MODEL
from lowprec.optimizers.adafactor import Adafactor
from lowprec.optimizers.build import OPTIMIZERS, classes_of
from lowprec.optimizers.rounded import AdamW, Rounded
from lowprec.recipes import Recipe
from precision import PRECISION_FLAGS, recipe_of_run
from tasks.classify import Classify
from tasks.consistency import Consistency
from tasks.diffusion import DDPM, RFlow
from tasks.distillation import Distill
from tasks.language import Language
from tasks.reflow import Reflow
from tasks.segment import Segment
from tasks.slotcontrast import Contrast
from tasks.steve import Steve
from tasks.task import Rng, Task
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


def find_task(spec):
    """The class of a --task: an entry of TASKS, or FILE.py:CLASS. Raises Refused; an error in the file is
    its own.
    """
    if spec in TASKS:
        return TASKS[spec]
    if not code.is_code(spec):
        raise Refused(
            f"--task {spec}: invalid choice; choose one of {', '.join(TASKS)}, or give a task of your own "
            "as FILE.py:CLASS"
        )
    code.typed(spec)  # train.py asks of a checkpoint's before
    return code.load("task", spec, "class {} derived from tasks.Task", _derived_from(Task))


def _derived_from(base):
    return lambda found: isinstance(found, type) and issubclass(found, base)


def listing():
    """What there is to choose from, as a text: tasks with their nets and sizes, data, optimisers, recipes."""
    from lowprec.advice.answer import CANDIDATES
    from lowprec.optimizers.peers import PEER_OPTIMIZERS
    from tasks.data import DATA_SETS

    lines = ["--task, with each --model and its --size (the first of each is the default):"]
    for name, kind in TASKS.items():
        nets = []
        for net, sizes in kind.sizes_of_nets().items():
            nets.append(f"{net} ({', '.join(sizes)})" if sizes else net)
        lines.append(f"  {name:<13}{', '.join(nets)}")
    forms = [known.form for known in DATA_SETS.values()]
    recipes = "\n  ".join(candidate.typed for candidate in CANDIDATES)
    return "\n".join([
        *lines,
        "  or FILE.py:CLASS of your own",
        f"--data: {', '.join(forms)}",
        "  language: text:FILE; steve and slotcontrast: sprites, folder:PATH",
        f"--optimizer: {', '.join(OPTIMIZERS)}",
        f"  as others publish them: {', '.join(PEER_OPTIMIZERS)}",
        "recipes, without flags fp32; --advise says what each costs:",
        f"  {recipes}",
    ])  # fmt: skip


# ---- Their flags -------------------------------------------------------------------------------------------


def flag_rows(*kinds):
    """The flags of some tasks, and then those of the classes that they share: [Flag].

    Of two rows with one name that of the derived class stays.
    """
    classes = list(kinds)
    for kind in kinds:
        classes += kind.__mro__[1:]
    found = {}
    for one in classes:
        for row in vars(one).get("flags", ()):
            found.setdefault(row.name, row)
    return list(found.values())


def flag_table(spec=None):
    """flags.FlagTable of what a run of --task `spec` reads, the general flags and its own; None: of what runs
    of all TASKS read. A flag has the same place in all of them.
    """
    before = options.TASK_FLAGS + options.TRAINING_FLAGS + PRECISION_FLAGS
    after = options.SCORING_FLAGS + options.MACHINE_FLAGS + options.RUN_FLAGS
    of_tasks = flag_rows(*TASKS.values())
    in_order = [*before, *of_tasks, *after]
    if spec is None:
        return flags.FlagTable(in_order)
    own = {row.name: row for row in flag_rows(find_task(spec))}
    here = {*own, *(row.name for row in before + after)}
    rows = [own.get(row.name, row) for row in in_order if row.name in here]
    names_of = {name: {row.name for row in flag_rows(kind)} for name, kind in TASKS.items()}
    elsewhere = {}
    for row in of_tasks:
        if row.name not in here:
            owners = [name for name, names in names_of.items() if row.name in names]
            elsewhere[row.name] = _whose(row.name, owners, spec)
    return flags.FlagTable([*rows, *own.values()], own, elsewhere)


def _whose(flag, owners, spec):
    """What is said of a flag that belongs to other tasks than --task `spec`, its `owners`."""
    if len(owners) == 1:
        tasks, add = owners[0], f"add --task {owners[0]}"
    else:
        tasks, add = f"{', '.join(owners[:-1])} and {owners[-1]}", "add one of these"
    return f"--{flag} is for --task {tasks}, and this is --task {spec}: {add}, or drop it"


def task_defaults(kind, given):
    """{flag: default} where task, --optimizer or --clip_tensor has another than the flag's row."""
    found = dict(kind.own_defaults())
    of_optimizer = classes_of(given.get("optimizer", "adamw"))
    if of_optimizer:
        found.update(of_optimizer[0].flags)
    if given.get("clip_tensor"):
        found["clip_grad"] = 0.0
    return found


def trust(given):
    """Take the files of code among {flag: value} as typed by whoever runs this."""
    code.typed(*filter(code.is_code, given.values()))


def _know_optimizer(spec):
    """Let a class of a file that rounds as ours do be known as ours are, by its --optimizer."""
    if code.is_code(spec):
        found = code.load("optimizer", spec, "class or function {}", callable)
        if _derived_from(Rounded)(found):
            OPTIMIZERS[spec] = found


# ---- The flags of a run ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The flags of one run, settled. kind: the class of its task; table: the rows of all flags; config: their
    values; recipe: what those of precision come to.
    """

    kind: type
    table: flags.FlagTable
    config: flags.Config
    recipe: Recipe

    def replaced(self, **values):
        """A copy with other values of flags that the recipe does not depend on."""
        return dataclasses.replace(self, config=self.config.replaced(**values))


def settle(values, typed=False):
    """The Run of {flag: value}, a dict or a Config; a flag that is missing has the default of its task, its
    optimiser or its row. Raises Refused where flags don't go together.

    typed: whether somebody typed them. Then the task decides further ones, as a teacher's net decides its
    student's, and the run gets a name. Else they are those of a run that began before, which its files hold.
    """
    if not isinstance(values, dict):
        values = vars(values)
    if typed:
        trust(values)
    _know_optimizer(values.get("optimizer"))
    kind = find_task(values.get("task", "rflow"))
    known = flag_table(values.get("task", "rflow"))
    whole = {**task_defaults(kind, values), **values}
    if typed:
        config = known.typed(whole)
        config = known.config({**vars(config), **kind.settle(known, values)})
        config.name = config.name or known.name(config)
    else:
        config = known.config(whole)
    _refuse_idle(kind, config, known)
    kind.check(config)
    return Run(kind, known, config, recipe_of_run(config, known, kind.sites))


def _refuse_idle(kind, config, known):
    """Raise Refused for a flag that does nothing beside the others."""
    optimizers = classes_of(config.optimizer)
    takes_betas = any("betas" in inspect.signature(one).parameters for one in optimizers)
    for flag, taken, takers in (
        ("beta2", not optimizers or takes_betas, "adamw, lion or muon"),
        ("eps", not optimizers or AdamW in optimizers, "adamw or muon, or --least_rms for adafactor"),
        ("least_rms", optimizers == (Adafactor,), "adafactor"),
    ):
        value = getattr(config, flag)
        if value != known[flag].default and not taken:
            has_none = f"--{flag} {value:g}: --optimizer {config.optimizer} has no {flag}"
            raise Refused(f"{has_none}; drop it, or choose {takers}")
    alone = []  # (what was typed, the flag without which it does nothing)
    for row in known.rows:
        value = getattr(config, row.name)
        if row.needs and value != row.default:
            alone.append((f"--{row.name} {value}", row.needs))
    for setting in config.set:
        alone.append((f"--set {setting}", kind.needs.get(setting.partition("=")[0])))
    for typed, needed in alone:
        if needed and getattr(config, needed) == known[needed].default:
            raise Refused(f"{typed} does nothing without --{needed}: add that, or drop it")


# ---- A net without a run -----------------------------------------------------------------------------------

# groups of flags that say nothing of a net, its data and its loss
GROUPS_BESIDE_ADVICE = ("training", "precision", "machine", "run")


def advice_subject(words, spec=None):
    """What `train.py --advise` asks about: an advice.subjects.Subject with the net of these flags on the meta
    device, and the task's own loss. spec: the --task among them.
    """
    table = flag_table(spec)
    given = vars(table.parser("train.py --advise", "the flags of train.py").parse_args(words))
    idle = [name for name in given if table[name].group in GROUPS_BESIDE_ADVICE and name != "finetune"]
    flags.check_none(
        idle,
        "--advise, which tells of each recipe with AdamW",
        "write --batch" if idle[:1] == ["batch_size"] else "drop it",
    )
    return subject_of(settle(given, typed=True), " ".join(["python train.py", *words]))


def subject_of(run, name):
    """The advice.subjects.Subject of a Run's net, on the meta device, with the task's own loss."""
    task = run.kind(run.kind.load(run.config), run.recipe, run.config)
    with torch.device("meta"):
        net = task.net()

    def loss(model, n):
        return task.loss(model, task.data.train[[0] * n], Rng(0), 0)

    model = getattr(run.config, "model", "")
    return Subject(name, net, loss, "", KIND_OF_MODEL.get(model))
