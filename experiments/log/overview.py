"""All settings and all recipes at once: how far the held-out loss lies from fp32's, and from autocast's.

experiments/rules.md has the rules by which this is made. Settings are found by their flags, so nothing is
chosen by hand.

    settings(experiments, known)          [Setting]
    groups_table(found)                   the table of EXPERIMENTS.md: recipes down, groups of nets across
    settings_page(found)                  experiments/settings.md: every setting
    on_largest_nets(found, recipes)       the table of docs/recipes.md: each recipe on its largest net
    claim(found)                          what README.md opens with
    cost_data(found, experiments, known)  the figure of README.md
    figure_data(found)                    the figure of EXPERIMENTS.md
"""

import dataclasses
import functools
import math
import re
import statistics

from experiments.log import stats, tables
from experiments.log.analysis import (
    HELD_OUT,
    WAITING_VERDICT,
    comparison,
    loss_changes,
    records_of,
    weights_of_score,
)
from experiments.log.definition import ROOT, look_of, run_command_words, run_key
from experiments.run import flags_of_words
from harness.printing import compact_table
from lowprec.errors import Refused
from lowprec.evidence import DEFAULT_OF_FLAG, KIND_OF_MODEL, recipe_key, short_count

AUTOCAST, NEAREST, STOCHASTIC = "--bf16", "--pure_bf16", "--pure_bf16 --stochastic"
STOCHASTIC_8BIT = "--pure_bf16 --stochastic --opt8bit"
RECIPE_TITLES = {  # the flags that a recipe adds to fp32's: what the tables call it
    AUTOCAST: "autocast",
    "--bf16 --opt8bit": "autocast, 8-bit states",
    NEAREST: "to nearest",
    STOCHASTIC: "stochastic",
    "--pure_bf16 --kahan --stochastic": "stochastic, Kahan",
    "--pure_bf16 --master split": "split master",
    STOCHASTIC_8BIT: "stochastic, 8-bit states",
    "--fp8": "FP8 products",
}
AGAINST_AUTOCAST = "stochastic against autocast"

PARAMETERS = {  # (--model, --size, what --data begins with): parameters of the net
    ("unet", "tiny", ""): 164_689,
    ("unet", "mini", "fashion_mnist"): 1_063_905,
    ("dit", "tiny", ""): 328_964,
    ("dit", "mini/4", "fashion_mnist"): 4_167_568,
    ("dit", "S/4", "fashion_mnist"): 32_478_736,
    ("gpt", "tiny", ""): 217_664,
    ("gpt", "tiny", "text"): 217_664,  # windows of 64, too
    ("gpt", "1M", "text"): 836_736,
    ("gpt", "3M", "text"): 2_730_432,
    ("moe", "tiny", ""): 611_904,
    ("bdh", "tiny", ""): 229_376,
    ("bdh", "1M", "text"): 851_968,
    ("cnn", "tiny", ""): 94_186,
    ("vit", "tiny", ""): 202_186,
    ("kl", "tiny", ""): 141_669,
    ("steve", "tiny", ""): 379_235,
    ("slotcontrast", "tiny", ""): 121_537,
}
DATA_NAMES = {"": "digits", "fashion_mnist": "Fashion-MNIST", "text": "text"}
TEXT, SMALL, LARGE, FINETUNED = "text", "diffusion below 1 M", "diffusion from 1 M up", "finetuning"
OTHER = "other"  # what is no usual training, and in no group
GROUPS = (TEXT, SMALL, LARGE, FINETUNED)
USUAL = {"eps": None, "beta2": 0.999, "init_scale": 1.0, "optimizer": "adamw"}  # of what is in a group
FEWEST_PAIRS = 3  # pairs; a cell of fewer stands in the page of settings alone
USUAL_PAIRS = 6  # pairs of most cells, and the fewest that a group counts

# ---- Flags -------------------------------------------------------------------------------------------------


@functools.cache
def flags_of(arm):
    """{flag: value} of an arm's training, defaults included."""
    words = run_command_words(arm, arm.experiment.seeds[0])
    words = words[words.index("train.py") + 1 :]
    if "--task" not in words:
        return flags_of_words(words)
    at = words.index("--task") + 1
    spec = words[at]
    if ".py:" in spec:  # a task of a file lies in the repository
        words = [*words[:at], str(ROOT / spec), *words[at + 1 :]]
    return {**flags_of_words(words), "task": spec}


def net_of(flags):
    """The key of PARAMETERS."""
    return flags["model"], flags["size"] or "tiny", (flags["data"] or "").partition(":")[0]


SAID_ELSEWHERE = {  # flags in which the runs of one setting may differ
    *DEFAULT_OF_FLAG,
    *("fp8_backend", "fp4_backend", "growth_interval", "init_loss_scale", "growth_factor", "backoff_factor"),
    *("seed", "noise_seed", "perturb", "average", "weights", "validate_every", "name", "runs"),
    *("device", "threads", "workers", "compile", "log_every", "sample_every", "checkpoint_every"),
    *("samples", "sample_steps", "sample_batch", "length", "prompt", "temperature", "top_k", "guidance"),
}
FOLDER_FLAGS = ("finetune", "teacher", "vae")  # runs that each seed has its own of
# flags in which a recipe and its fp32 may differ without being another training
MAY_DIFFER = {
    *("seed", "name", "optimizer", "fp8_backend", "average", "weights"),
    *DEFAULT_OF_FLAG,
    *FOLDER_FLAGS,
}


def setting_key(flags):
    """What the runs of one setting have in common."""
    found = {name: value for name, value in flags.items() if name not in SAID_ELSEWHERE}
    found |= {name: without_seed(flags.get(name)) for name in FOLDER_FLAGS}
    return tuple(sorted((name, str(value)) for name, value in found.items()))


def without_seed(folder):
    """'033-fp32-4' of 'runs/experiments/033-fp32-4-seed0', the runs of one arm."""
    return re.sub(r"-seed\d+$", "", folder or "").rpartition("/")[2]


# ---- Settings ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Cell:
    """A recipe in a setting. seen: {seed: [loss as a multiple of the reference's]}."""

    seen: dict = dataclasses.field(default_factory=dict)
    level: float = 0.05  # the strictest of its records' looks
    waits: bool = False  # whether a record's page has no verdict yet
    numbers: dict = dataclasses.field(default_factory=dict)  # {of an experiment that it comes from: folder}

    @property
    def ratios(self):
        return {seed: statistics.fmean(several) for seed, several in self.seen.items()}

    @property
    def pairs(self):
        return len(self.seen)

    @functools.cached_property
    def change(self):
        """stats.Mean in percent."""
        return stats.mean_at_level([100 * (ratio - 1) for ratio in self.ratios.values()], self.level)

    def against(self, other):
        """The Cell of this recipe beside another, or None where they share fewer than two seeds."""
        mine, its = self.ratios, other.ratios
        seen = {seed: [mine[seed] / its[seed]] for seed in mine if seed in its}
        if len(seen) < 2:
            return None
        return Cell(seen, min(self.level, other.level), self.waits or other.waits)


@dataclasses.dataclass
class Setting:
    flags: dict  # of its fp32 run
    cells: dict = dataclasses.field(default_factory=dict)  # {recipe, or AGAINST_AUTOCAST: Cell}
    fp32: dict = dataclasses.field(default_factory=dict)  # {seed: a record of fp32}
    read: set = dataclasses.field(default_factory=set)  # keys of (arm, its fp32) that stand in the cells

    @property
    def numbers(self):
        """{number of an experiment that it comes from: its folder}"""
        return {number: folder for cell in self.cells.values() for number, folder in cell.numbers.items()}

    @property
    def parameters(self):
        return PARAMETERS.get(net_of(self.flags), 0)

    @property
    def net(self):
        """'DiT, Fashion-MNIST, 4.17 M'"""
        data = net_of(self.flags)[2]
        named = DATA_NAMES.get(data, data)
        if self.flags["model"] in ("gpt", "bdh", "moe"):
            named = "text"
        if self.flags["model"] in ("steve", "slotcontrast"):
            named = "video"
        size = f", {short_count(self.parameters)}" if self.parameters else ""
        return f"{KIND_OF_MODEL[self.flags['model']]}, {named}{size}"

    @property
    def words(self):
        """What sets it apart from other settings of its net: 'lr 1e-3, 1,200 steps of 16, to zero'"""
        f = self.flags
        said = []
        if f["finetune"]:
            said.append("finetuned")
        if f["task"] in TASK_WORDS:
            said.append(TASK_WORDS[f["task"]])
        if f.get("teacher"):
            said.append(f"of {without_seed(f['teacher'])}")
        if f.get("vae"):
            said.append("in latents")
        if f.get("condition", "none") != "none":
            said.append(f"sees the {f['condition']} image")
        if f["optimizer"] != "adamw":
            said.append(f["optimizer"])
        said.append(f"lr {number(f['lr'])}")
        said += [f"{name} {number(f[name])}" for name in ("beta2", "eps") if not self.is_default(name)]
        if f.get("least_rms"):
            said.append(f"least_rms {f['least_rms']:g}")
        if f["init_scale"] != 1:
            said.append(f"weights times {f['init_scale']:g}")
        said.append(f"{f['steps']:,} steps of {f['batch_size']}")
        said += ["to zero"] if f["lr_schedule"] == "cosine" else []
        said += [f"decay {f['weight_decay']:g}"] if f["weight_decay"] else []
        return ", ".join(said)

    def is_default(self, name):
        """Whether a flag of USUAL is as usual; Lion has a beta2 of its own."""
        return self.flags[name] == USUAL[name] or (name == "beta2" and self.flags["optimizer"] == "lion")

    @property
    def group(self):
        """One of GROUPS, or OTHER."""
        f = self.flags
        if f["task"] not in ("rflow", "ddpm", "language") or not all(map(self.is_default, USUAL)):
            return OTHER
        if f["finetune"]:
            return FINETUNED
        if f["task"] == "language":
            return TEXT
        return SMALL if self.parameters < 1e6 else LARGE


TASK_WORDS = {
    "ddpm": "noise prediction",
    "distill": "student",
    "reflow": "reflow student",
    "consistency": "consistency model",
}


def number(x):
    """'3e-4' of 0.0003, '0.95' of 0.95."""
    if x >= 0.02:
        return f"{x:g}"
    digits, _, power = f"{x:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def settings(experiments, known):
    """[Setting] with a recipe, by net and in the order of the experiments."""
    found = {}
    for experiment in experiments:
        if experiment.miniature:
            continue
        for arm in experiment.arms:
            recipe = recipe_of_arm(arm)
            if recipe is None:
                continue
            kind, changes = loss_changes(arm, known)
            if kind != HELD_OUT or len(changes) < 2 or not all(map(math.isfinite, changes.values())):
                continue
            flags = flags_of(arm.base.trained)
            setting = found.setdefault(setting_key(flags), Setting(flags))
            add_record(setting, recipe, arm, changes, known)
    for setting in found.values():
        own = setting.cells
        if STOCHASTIC in own and AUTOCAST in own:
            beside = own[STOCHASTIC].against(own[AUTOCAST])
            if beside:
                own[AGAINST_AUTOCAST] = beside
    order = {net: place for place, net in enumerate(PARAMETERS)}
    return sorted(found.values(), key=lambda one: order.get(net_of(one.flags), len(order)))


def add_record(setting, recipe, arm, changes, known):
    """Merge what an arm tells of a recipe into a setting. A run that another reads counts once."""
    both = tuple(run_key(one.source, 0) for one in (arm, arm.base))
    if both in setting.read:
        return
    setting.read.add(both)
    cell = setting.cells.setdefault(recipe, Cell())
    cell.numbers[arm.source.experiment.number] = arm.source.experiment.folder.name
    setting.fp32 = records_of(arm.base, known) | setting.fp32
    for seed, change in changes.items():
        cell.seen.setdefault(seed, []).append(1 + change / 100)
    cell.level = min(cell.level, look_of(arm.experiment, len(changes))[1])
    result = comparison(arm, known)[1]
    cell.waits |= result is not None and result.verdict == WAITING_VERDICT


def beside_baseline(arm):
    """({flag: value} of an arm, those of its baseline, the names in which they differ); None unless it trains
    as its baseline but for MAY_DIFFER.
    """
    base = arm.base
    samples_alone = arm.source.of and arm.source.flags
    if arm is base or samples_alone:
        return None
    own, plain = flags_of(arm.trained), flags_of(base.trained)
    unlike = {name for name in own if own[name] != plain.get(name)}
    return (own, plain, unlike) if unlike <= MAY_DIFFER else None


def recipe_of_arm(arm):
    """The key of RECIPE_TITLES that an arm adds to its baseline, which has none; else None."""
    both = beside_baseline(arm)
    if both is None or weights_of_score(arm) != weights_of_score(arm.base):
        return None
    own, plain, unlike = both
    if "optimizer" in unlike or any(plain[name] for name in ("bf16", "pure_bf16", "fp16", "fp8")):
        return None
    return _titled().get(recipe_key({name: own[name] for name in unlike}))


@functools.cache
def _titled():
    """{key of a recipe: its flags as RECIPE_TITLES has them}"""
    return {recipe_key(flags_of_words(flags.split())): flags for flags in RECIPE_TITLES}


# ---- The table of groups -----------------------------------------------------------------------------------

GROUP_ROWS = (  # the recipes of EXPERIMENTS.md
    AGAINST_AUTOCAST,
    STOCHASTIC,
    "--pure_bf16 --kahan --stochastic",
    "--pure_bf16 --master split",
    "--pure_bf16 --stochastic --opt8bit",
    AUTOCAST,
    NEAREST,
)


def of_group(found, group, recipe):
    """[(Setting, Cell)] that a group counts."""
    kept = []
    for setting in found:
        cell = setting.cells.get(recipe)
        if setting.group == group and cell and cell.pairs >= USUAL_PAIRS and not cell.waits:
            kept.append((setting, cell))
    return kept


def title_of(recipe):
    return RECIPE_TITLES.get(recipe, recipe)


def groups_table(found):
    """Markdown: recipes down, groups across."""
    lines = [["", *GROUPS]]
    for recipe in GROUP_ROWS:
        lines.append([f"**{title_of(recipe)}**", *(group_text(found, group, recipe) for group in GROUPS)])
    return compact_table(lines)


def group_text(found, group, recipe):
    """'+0.05 (-0.42 to +0.24); 20 of 2<br>U-Net, digits, 0.16 M: +0.12 ±0.10'"""
    counted = of_group(found, group, recipe)
    if not counted:
        some = any(one.group == group and recipe in one.cells for one in found)
        return "fewer than six pairs" if some else "not measured"
    means = [cell.change.mean for _, cell in counted]
    nets = len({setting.net for setting, _ in counted})
    setting, cell = max(counted, key=lambda one: one[1].change.mean)
    largest = f"{setting.net}: {change_text(cell)}"
    if len(means) == 1:
        return largest
    span = f"({two_digits(min(means))} to {two_digits(max(means))})"
    return f"{two_digits(statistics.median(means))} {span}; {len(means)} of {nets}<br>{largest}"


def two_digits(x):
    text = f"{x:+.1f}" if abs(x) >= 10 else f"{x:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text


def figure_of(words, found):
    """'diffusion from 1 M up: stochastic.median' -> '+0.11 %', of a cell of the table of groups."""
    group, _, rest = words.partition(": ")
    title, _, figure = rest.rpartition(".")
    recipe = next((one for one in GROUP_ROWS if title_of(one) == title), None)
    means = [cell.change.mean for _, cell in of_group(found, group, recipe)]
    figures = {"median": statistics.median, "lowest": min, "highest": max}
    if not means or figure not in figures:
        raise Refused(f"{{all: {words}}}: no such figure, or no record of it yet")
    return f"{two_digits(figures[figure](means))} %"


# ---- The page of settings ----------------------------------------------------------------------------------

SETTINGS_HEAD = """<!-- made by python experiments/report.py -->
# Every setting and every recipe

The change of the held-out loss against fp32 in the same setting, in percent, ± half of the 95 % interval,
over six pairs of runs or as many as in brackets; a plus is worse. "Against autocast" is stochastic rounding
beside autocast, seed by seed. **Bold** withstands Holm's correction for all cells of its table. "To zero":
the rate falls to zero by a cosine, else it is constant. A net's settings are not independent.
[rules.md](rules.md) has the rules, [EXPERIMENTS.md](../EXPERIMENTS.md#terms) the terms.
"""
REST_HEAD = """## What is no usual training

Another eps, beta2 or initial scale than the default, students of a teacher, consistency, other optimisers,
and what is neither text nor diffusion. In no group and no figure of EXPERIMENTS.md."""


def settings_page(found):
    usual = [setting for setting in found if setting.group != OTHER]
    rest = [setting for setting in found if setting.group == OTHER]
    from_scratch = [setting for setting in usual if not setting.flags["finetune"]]
    nets = {setting.net for setting in from_scratch}
    of_other_nets = [setting for setting in rest if setting.net not in nets]
    parts = [SETTINGS_HEAD, "## Text, diffusion and finetuning, by AdamW", settings_table(usual)]
    parts += [
        REST_HEAD,
        settings_table(rest),
        STEPS_HEAD,
        steps_table([*from_scratch, *of_other_nets]),
    ]
    folders = {number: folder for setting in found for number, folder in setting.numbers.items()}
    parts.append("\n".join(f"[{number}]: {folder}/README.md" for number, folder in sorted(folders.items())))
    return "\n\n".join(part.strip() for part in parts).strip() + "\n"


def settings_table(chosen):
    """Markdown: a row a setting, under its net."""
    sure = withstanding([cell for one in chosen for cell in one.cells.values()])
    columns = [*RECIPE_TITLES, AGAINST_AUTOCAST]
    lines = [["net", "setting", *(title_of(recipe) for recipe in columns), "pages"]]
    last = None
    for one in chosen:
        cells = [change_text(one.cells.get(recipe), sure) for recipe in columns]
        pages = " ".join(f"[{number}]" for number in sorted(one.numbers))
        lines.append(["" if one.net == last else one.net, one.words, *cells, pages])
        last = one.net
    return compact_table(lines)


def withstanding(cells):
    """The ids of those Cells that differ from 0 after Holm's correction over all of them."""
    told = sorted((cell for cell in cells if cell.pairs > 1), key=lambda cell: cell.change.p)
    kept = stats.holm([cell.change.p for cell in told])
    return {id(cell) for cell in told[:kept] if not cell.waits}


def change_text(cell, sure=()):
    """'+0.36 ±0.04', followed by the pairs unless they are six; bold where it is among `sure`."""
    if cell is None:
        return ""
    decimals = 1 if abs(cell.change.mean) >= 10 else 2
    text = f"{cell.change.mean:+.{decimals}f} ±{cell.change.half:.{decimals}f}"
    if cell.waits:
        text += f" ({cell.pairs}, open)"
    elif cell.pairs != USUAL_PAIRS:
        text += f" ({cell.pairs})"
    return f"**{text}**" if id(cell) in sure else text


# ---- A share of the loss in steps of fp32 ------------------------------------------------------------------

STEPS_HEAD = """<a id="steps"></a>
## How many steps of fp32 are 0.2 % of the loss

Over the second half of a run the training loss of fp32 falls by so much a step (a straight line through the
logarithms of the recorded losses, one for each seed). 0.2 % divided by that, with the ends of its 95 %
interval: a recipe that loses 0.2 % is about as far as fp32 was so many steps before its end. "-": too noisy
to tell. From recorded curves, at the schedule of the run: each setting from scratch of a net of the first
table, and of a net that the second table alone has. Runs with fewer than four records in their second half
are left out."""
SHARE_IN_STEPS = 0.002


def steps_table(chosen):
    lines = [["net", "setting", "steps of fp32", "of the run"]]
    for one in chosen:
        falls = [fall for record in one.fp32.values() if (fall := fall_of_loss(record)) is not None]
        if len(falls) < FEWEST_PAIRS:
            continue
        found = stats.mean_at_level(falls)
        told = ["-", "-"]
        if found.low > 0:
            steps, few, many = (SHARE_IN_STEPS / x for x in (found.mean, found.high, found.low))
            decimals = 1 if steps < 10 else 0
            interval = f"({few:.{decimals}f} to {many:.{decimals}f})"
            told = [f"{steps:.{decimals}f} {interval}", f"{100 * steps / one.flags['steps']:.1f} %"]
        lines.append([one.net, one.words, *told])
    return compact_table(lines)


def fall_of_loss(record):
    """By which share of itself the training loss falls a step over the second half of a run, or None."""
    curves = record.get("curves", {})
    points = list(zip(curves.get("step", []), curves.get("loss", []), strict=False))
    late = [(step, math.log(loss)) for step, loss in points if loss and 2 * step > points[-1][0]]
    if len(late) < 4:
        return None
    return -statistics.linear_regression(*zip(*late, strict=True)).slope


# ---- README.md and docs/recipes.md -------------------------------------------------------------------------

BYTES = {  # the recipes that pages show: bytes a parameter of the ledger, for a net of large tensors
    "": "16",
    AUTOCAST: "16",
    "--bf16 --opt8bit": "10",
    NEAREST: "8",
    STOCHASTIC: "8",
    "--pure_bf16 --kahan --stochastic": "10",
    "--pure_bf16 --master split": "14",
    STOCHASTIC_8BIT: "6",
    "--fp8": "16",
}


def largest_setting(found, recipe):
    """The Setting of the largest net that was trained with a recipe from scratch, or None."""
    having = []
    for one in found:
        cell = one.cells.get(recipe)
        if cell and cell.pairs >= FEWEST_PAIRS and one.group in (TEXT, SMALL, LARGE):
            having.append(one)
    return max(having, key=lambda one: (one.parameters, one.cells[recipe].pairs), default=None)


def on_largest_nets(found, recipes):
    """{recipe: [against fp32, against autocast, net]} on the largest net of each, trained from scratch."""
    chosen = {recipe: one for recipe in recipes if (one := largest_setting(found, recipe))}
    beside = {}
    for recipe, one in chosen.items():
        own, autocast = one.cells[recipe], one.cells.get(AUTOCAST)
        beside[recipe] = own.against(autocast) if autocast and recipe != AUTOCAST else None
    shown = [one.cells[recipe] for recipe, one in chosen.items()]
    sure = withstanding([*shown, *(cell for cell in beside.values() if cell)])
    lines = {}
    for recipe, one in chosen.items():
        versus = interval_text(beside[recipe], sure) if beside[recipe] else "-"
        own = one.cells[recipe]
        folders = sorted(own.numbers.items())
        pages = [f"[{number}](../experiments/{folder}/README.md)" for number, folder in folders]
        lines[recipe] = [interval_text(own, sure), versus, f"{one.net} ({', '.join(pages)})"]
    return lines


CLAIM = """\
**Training in half of fp32's bytes.** bf16 weights that are written with *stochastic rounding* (up or down at
random, right on average) take 8 bytes a parameter, gradients and AdamW's states included. fp32 takes 16, and
so does bf16 autocast (fp32 weights, bf16 products). On the largest net tried, a diffusion transformer of
{parameters} parameters, that changed the held-out loss by {beside} against autocast and by
{own} against fp32: means and 95 % intervals of {pairs} pairs of short runs. A plain cast
to bf16, which rounds to nearest, changed it by {nearest}. Nothing larger was measured."""


def claim(found):
    """The paragraph of README.md, on the largest net with stochastic rounding."""
    one = largest_setting(found, STOCHASTIC)
    cells = one.cells
    return CLAIM.format(
        own=percent_text(cells[STOCHASTIC]),
        beside=percent_text(cells[AGAINST_AUTOCAST]),
        nearest=percent_text(cells[NEAREST]),
        parameters=f"{one.parameters / 1e6:.0f} million",
        pairs=cells[STOCHASTIC].pairs,
    )


def percent_text(cell):
    """'+0.23 % (-0.03 to +0.49)'"""
    change = cell.change
    return f"{change.mean:+.2f} % ({change.low:+.2f} to {change.high:+.2f})"


DRAWN_COSTS = ("", AUTOCAST, NEAREST, STOCHASTIC, STOCHASTIC_8BIT)


def cost_data(found, experiments, known):
    """{"net", "curves": {recipe: [[step, change, low, high]]}, "bars": {recipe: [bytes, text]}} of the
    largest net with stochastic rounding. A curve is how far the training loss lies above fp32's, in percent.
    """
    setting = largest_setting(found, STOCHASTIC)
    data = {"net": setting.net, "curves": {}, "bars": {}}
    for recipe in DRAWN_COSTS:
        cell = setting.cells.get(recipe)
        told = percent_text(cell) if cell else "the reference"
        data["bars"][title_of(recipe) or "fp32"] = [int(BYTES[recipe]), told]
        if cell:
            data["curves"][title_of(recipe)] = cost_curve(recipe, setting, experiments, known)
    return data


def cost_curve(recipe, setting, experiments, known):
    """[[step, mean, low, high]]: the training loss above fp32's of the same seed, in percent."""
    gaps = {}  # step: of each seed
    for experiment in experiments:
        if experiment.number not in setting.cells[recipe].numbers:
            continue
        arm = next(arm for arm in experiment.arms if recipe_of_arm(arm) == recipe)
        base = records_of(arm.base, known)
        for seed, record in records_of(arm, known).items():
            steps, losses = record["curves"]["step"], record["curves"]["loss"]
            for step, loss, other in zip(steps, losses, base[seed]["curves"]["loss"], strict=True):
                gaps.setdefault(step, []).append(100 * (loss / other - 1))
    points = []
    for step, changes in sorted(gaps.items()):
        mean = stats.mean_at_level(changes)
        points.append([step, mean.mean, mean.low, mean.high])
    return points


def interval_text(cell, sure):
    """'+0.19 [+0.04, +0.33] (6)'"""
    text = f"{tables.interval_text(cell.change, 2)} ({cell.pairs}{', open' * cell.waits})"
    return f"**{text}**" if id(cell) in sure else text


# ---- The figure --------------------------------------------------------------------------------------------

DRAWN_RECIPES = (NEAREST, STOCHASTIC, AUTOCAST)
LINE_PLACES = 25  # at which the line is told


def figure_data(found):
    """{"points": {recipe: [[parameters, mean, low, high, pairs, is text]]}, "line": of line_of_size}"""
    points = {title_of(recipe): [] for recipe in DRAWN_RECIPES}
    for one in found:
        for recipe in DRAWN_RECIPES:
            cell = one.cells.get(recipe)
            if cell and cell.pairs >= FEWEST_PAIRS and one.group in (TEXT, SMALL, LARGE):
                change = cell.change
                where = [one.parameters, change.mean, change.low, change.high]
                points[title_of(recipe)].append([*where, cell.pairs, one.group == TEXT])
    return {"points": points, "line": line_of_size(found)}


def line_of_size(found):
    """[[logarithm of the size, change, low, high]] of stochastic rounding, fitted to a point a net."""
    nets = {}
    for group in (TEXT, SMALL, LARGE):
        for one, cell in of_group(found, group, STOCHASTIC):
            nets.setdefault((one.net, one.parameters), []).append(cell.change.mean)
    if len(nets) < 4:
        return []
    x = [math.log10(parameters) for _, parameters in nets]
    y = [statistics.fmean(means) for means in nets.values()]
    ends = min(x), max(x)
    places = [ends[0] + (ends[1] - ends[0]) * i / (LINE_PLACES - 1) for i in range(LINE_PLACES)]
    return [list(point) for point in stats.line_with_band(x, y, places)]
