"""All nets and all recipes at once: how far the held-out loss lies from fp32's, in percent.

A cell compares the runs of a recipe with fp32 runs of the same net, seed by seed. Cells are found by their
flags: a recipe is what an arm adds to the flags of its baseline. Where several experiments hold the same
comparison, the one with the most pairs stands. So no cell is chosen by hand, and no two rows share an fp32
run.

    overview_rows(experiments, known)     [NetRow], the smallest nets of a kind first
    overview_table(experiments, known)    Markdown, a row a net that AdamW trains
    summary(rows, recipe)                 a recipe over all nets
"""

import dataclasses
import statistics
from collections import Counter

from experiments.log import stats
from experiments.log.analysis import loss_comparison, training_flags, weights_of_score
from experiments.log.tables import compact_table
from lowprec.errors import Refused

RECIPE_TITLES = {  # the flags that a recipe adds to fp32's: what the tables call it
    "--bf16": "autocast",
    "--bf16 --opt8bit": "autocast, 8-bit states",
    "--pure_bf16": "to nearest",
    "--pure_bf16 --stochastic": "stochastic",
    "--pure_bf16 --kahan --stochastic": "stochastic, Kahan",
    "--pure_bf16 --master split": "split master",
    "--pure_bf16 --stochastic --opt8bit": "stochastic, 8-bit states",
    "--fp8": "FP8 products",
}
EMULATED_FLAGS = ("--fp8_backend", "emulate")  # says where FP8 runs, and changes no recipe

# the fp32 runs that a row is compared with: (what the tables call net and data, its parameters)
NETS_OF_BASELINES = {
    "000/fp32": ("U-Net, digits, the default run", 164_689),
    "001/fp32": ("U-Net, digits, lr 3e-4", 164_689),
    "012/fp32": ("U-Net, digits, lr 1e-3, shorter", 164_689),
    "012/fp32-scale-4": ("the same, weights times 4", 164_689),
    "012/fp32-lr-1e-4": ("the same, lr 1e-4", 164_689),
    "012/fp32-lr-3e-5": ("the same, lr 3e-5", 164_689),
    "039/unet-cosine-64-fp32": ("U-Net, digits, rate to zero", 164_689),
    "039/unet-cosine-512-fp32": ("the same, batches of 512", 164_689),
    "070/fp32": ("U-Net, digits from blurred digits", 164_833),
    "007/ddpm-fp32": ("U-Net, digits, noise prediction", 164_689),
    "017/noise-fp32": ("the same, 100 steps", 164_689),
    "014/reflow-fp32": ("U-Net, reflow student", 164_689),
    "033/fp32-4": ("U-Net, student of 4 steps", 164_689),
    "033/fp32-2": ("U-Net, student of 2 steps", 164_689),
    "033/fp32-1": ("U-Net, student of 1 step", 164_689),
    "032/fp32": ("U-Net, consistency model", 164_689),
    "029/fp32": ("U-Net, latents of digits", 164_689),
    "028/fp32": ("autoencoder, digits", 141_669),
    "072/lion-fp32": ("U-Net, Lion", 164_689),
    "072/sgd-fp32": ("U-Net, SGD", 164_689),
    "072/adafactor-fp32": ("U-Net, Adafactor", 164_689),
    "072/muon-fp32": ("U-Net, Muon", 164_689),
    "036/fp32": ("U-Net, Fashion-MNIST, 1.1 M", 1_063_905),
    "060/fp32-eps-1e-6": ("the same, eps 1e-6", 1_063_905),
    "076/fp32": ("the same, fresh seeds", 1_063_905),
    "060/fp32-eps-1e-4": ("the same, eps 1e-4", 1_063_905),
    "053/fp32-lr-3e-3": ("the same, lr 3e-3", 1_063_905),
    "053/fp32-lr-3e-3-beta2-0.95": ("the same, lr 3e-3, beta2 0.95", 1_063_905),
    "074/fp32": ("the same, fresh seeds", 1_063_905),
    "053/fp32-beta2-0.95": ("the same, beta2 0.95", 1_063_905),
    "053/fp32-lr-3.33e-4": ("the same, lr 3.3e-4", 1_063_905),
    "053/fp32-lr-3.33e-4-beta2-0.95": ("the same, lr 3.3e-4, beta2 0.95", 1_063_905),
    "071/fp32": ("the same, lr 1e-2, beta2 0.95", 1_063_905),
    "055/lion-fp32": ("U-Net, Fashion-MNIST, 1.1 M, Lion", 1_063_905),
    "055/sgd-fp32": ("U-Net, Fashion-MNIST, 1.1 M, SGD", 1_063_905),
    "055/adafactor-fp32": ("U-Net, Fashion-MNIST, 1.1 M, Adafactor", 1_063_905),
    "055/muon-fp32": ("U-Net, Fashion-MNIST, 1.1 M, Muon", 1_063_905),
    "075/unet-fp32": ("U-Net, Fashion-MNIST, 1.1 M, Adafactor, zeros grow sooner", 1_063_905),
    "052/unet-fp32": ("U-Net, Fashion-MNIST, 1.1 M, GPU", 1_063_905),
    "057/unet-fp32-1e-5": ("U-Net, finetuning at lr 1e-5", 1_063_905),
    "057/unet-fp32-1e-6": ("U-Net, finetuning at lr 1e-6", 1_063_905),
    "011/fp32": ("DiT, digits", 328_964),
    "058/dit-fp32": ("DiT, digits, 100,000 steps", 328_964),
    "058/unet-fp32": ("U-Net, digits, 100,000 steps", 164_689),
    "039/dit-constant-64-fp32": ("DiT, digits, shorter", 328_964),
    "039/dit-constant-512-fp32": ("the same, batches of 512", 328_964),
    "039/dit-cosine-64-fp32": ("DiT, digits, rate to zero", 328_964),
    "039/dit-cosine-64-decay-fp32": ("the same, decay 0.1", 328_964),
    "039/dit-cosine-512-fp32": ("the same, batches of 512", 328_964),
    "062/fp32": ("DiT, digits, lr 5e-4", 328_964),
    "066/lion-fp32": ("DiT, Lion", 328_964),
    "066/sgd-fp32": ("DiT, SGD", 328_964),
    "066/adafactor-fp32": ("DiT, Adafactor", 328_964),
    "066/muon-fp32": ("DiT, Muon", 328_964),
    "037/fp32": ("DiT, Fashion-MNIST, 4.2 M", 4_167_568),
    "059/fp32": ("the same, twelve other seeds", 4_167_568),
    "052/dit-fp32": ("DiT, Fashion-MNIST, 4.2 M, GPU", 4_167_568),
    "056/lion-fp32": ("DiT, Fashion-MNIST, 4.2 M, Lion", 4_167_568),
    "056/sgd-fp32": ("DiT, Fashion-MNIST, 4.2 M, SGD", 4_167_568),
    "056/adafactor-fp32": ("DiT, Fashion-MNIST, 4.2 M, Adafactor", 4_167_568),
    "056/muon-fp32": ("DiT, Fashion-MNIST, 4.2 M, Muon", 4_167_568),
    "075/dit-fp32": ("DiT, Fashion-MNIST, 4.2 M, Adafactor, zeros grow sooner", 4_167_568),
    "057/dit-fp32-1e-5": ("DiT, finetuning at lr 1e-5", 4_167_568),
    "057/dit-fp32-1e-6": ("DiT, finetuning at lr 1e-6", 4_167_568),
    "043/fp32": ("DiT, Fashion-MNIST, 32 M, H100", 32_478_736),
    "026/fp32": ("CNN, classification", 94_186),
    "026/cosine-fp32": ("the same, rate to zero", 94_186),
    "026/vit-fp32": ("ViT, classification", 202_186),
    "025/gpt-fp32": ("GPT, text, 0.2 M", 217_664),
    "067/fp32": ("GPT, text, 0.8 M", 836_736),
    "069/lion-fp32": ("GPT, Lion", 836_736),
    "069/sgd-fp32": ("GPT, SGD", 836_736),
    "069/adafactor-fp32": ("GPT, Adafactor", 836_736),
    "069/muon-fp32": ("GPT, Muon", 836_736),
    "038/gpt-fp32": ("GPT, text, 2.7 M", 2_730_432),
    "054/lion-fp32": ("GPT, text, 2.7 M, Lion", 2_730_432),
    "054/sgd-fp32": ("GPT, text, 2.7 M, SGD", 2_730_432),
    "054/adafactor-fp32": ("GPT, text, 2.7 M, Adafactor", 2_730_432),
    "054/muon-fp32": ("GPT, text, 2.7 M, Muon", 2_730_432),
    "052/gpt-fp32": ("GPT, text, 2.7 M, GPU", 2_730_432),
    "061/fp32": ("GPT, text, 2.7 M, H100", 2_730_432),
    "035/fp32-1e-5": ("GPT, finetuning at lr 1e-5", 836_736),
    "035/fp32-1e-6": ("GPT, finetuning at lr 1e-6", 836_736),
    "025/bdh-fp32": ("BDH, text, 0.2 M", 229_376),
    "038/bdh-fp32": ("BDH, text, 0.85 M", 851_968),
    "030/fp32": ("STEVE, video", 379_235),
    "031/fp32": ("SlotContrast, 300 steps", 121_473),
    "044/fp32": ("SlotContrast, objects found", 121_537),
}
FEWEST_PAIRS = 3  # pairs; a cell of fewer stands in the table, and counts nowhere
USUAL_PAIRS = 6  # pairs of most cells


@dataclasses.dataclass
class RecipeOnNet:
    """One recipe on one net. change: stats.Equivalence of the held-out loss, in percent of fp32's."""

    arm: object
    pairs: int
    change: object

    @property
    def half(self):
        """Half of the 95 % interval."""
        return self.change.high - self.change.mean

    @property
    def error(self):
        """The standard error of the mean."""
        return self.half / stats.errors_in_half_interval(self.pairs)

    @property
    def counts(self):
        """Whether there are enough pairs to say anything."""
        return self.pairs >= FEWEST_PAIRS

    @property
    def side(self):
        """Where the interval lies: 'worse' above 0, 'better' below, 'open' around it."""
        if not self.counts:
            return "open"
        if self.change.low > 0:
            return "worse"
        return "better" if self.change.high < 0 else "open"


@dataclasses.dataclass
class NetRow:
    net: str
    parameters: int
    numbers: list  # of the experiments that its cells come from
    cells: dict  # {recipe: Cell}

    @property
    def by_adamw(self):
        """Whether AdamW trains it, as all nets but those of the experiments with other optimisers."""
        return not any("--optimizer" in training_flags(cell.arm.trained) for cell in self.cells.values())


# ---- Finding the cells -------------------------------------------------------------------------------------


def recipe_of_arm(arm, base):
    """The key of RECIPE_TITLES that an arm adds to its baseline, or None."""
    own, against = Counter(recipe_flags(arm)), Counter(recipe_flags(base))
    if against - own:
        return None
    added = sorted((own - against).elements())
    for flags in RECIPE_TITLES:
        if sorted(flags.split()) == added:
            return flags
    return None


def recipe_flags(arm):
    flags = training_flags(arm.trained)
    at = flags.index(EMULATED_FLAGS[0]) if EMULATED_FLAGS[0] in flags else None
    if at is not None and flags[at + 1] == EMULATED_FLAGS[1]:
        del flags[at : at + 2]
    return flags


def cell_of(experiment, arm, known):
    """(recipe, Cell) of an arm, or None where it is no recipe beside fp32 with a held-out loss."""
    base = experiment.arm(arm.baseline)
    samples_alone = arm.source.of and arm.source.flags
    if arm is base or samples_alone or weights_of_score(arm) != weights_of_score(base):
        return None
    recipe = recipe_of_arm(arm, base)
    if recipe is None:
        return None
    kind, pairs, change = loss_comparison(experiment, arm, known)
    if change is None or kind != "held-out loss":
        return None
    return recipe, RecipeOnNet(arm, pairs, change)


def overview_rows(experiments, known):
    """[NetRow] in the order of NETS_OF_BASELINES; nets without a name there come last, under that of their
    fp32 arm.
    """
    found = {}
    for experiment in experiments:
        for arm in experiment.arms:
            hit = cell_of(experiment, arm, known)
            if hit is None:
                continue
            recipe, cell = hit
            source = experiment.arm(arm.baseline).source
            cells = found.setdefault(f"{source.experiment.number}/{source.name}", {})
            if recipe not in cells or cell.pairs > cells[recipe].pairs:
                cells[recipe] = cell
    named = [net_row(name, found.pop(name)) for name in NETS_OF_BASELINES if name in found]
    return named + [net_row(name, cells) for name, cells in found.items()]


def net_row(name, cells):
    net, parameters = NETS_OF_BASELINES.get(name, (name, 0))
    numbers = {cell.arm.experiment.number for cell in cells.values()}
    return NetRow(net, parameters, sorted(numbers), cells)


# ---- What the pages show -----------------------------------------------------------------------------------


def change_text(cell):
    """'+0.36 ±0.04', bold where the interval lies above 0, followed by the pairs unless they are six."""
    if cell is None:
        return ""
    decimals = 1 if abs(cell.change.mean) >= 10 else 2
    text = f"{cell.change.mean:+.{decimals}f} ±{cell.half:.{decimals}f}"
    if cell.pairs != USUAL_PAIRS:
        text += f" ({cell.pairs})"
    return f"**{text}**" if cell.side == "worse" else text


def overview_table(experiments, known):
    """Markdown: nets that AdamW trains down, recipes across; the last rows sum up each recipe on all nets."""
    found = overview_rows(experiments, known)
    lines = [["net and data", *RECIPE_TITLES.values(), "pages"]]
    for row in [row for row in found if row.by_adamw]:
        cells = [change_text(row.cells.get(recipe)) for recipe in RECIPE_TITLES]
        lines.append([row.net, *cells, " ".join(f"[{number}]" for number in row.numbers)])
    together, median, worse = ["**all nets together**"], ["median of the nets"], ["nets above 0"]
    for recipe in RECIPE_TITLES:
        over_nets = summary(found, recipe)
        together.append(pooled_words(over_nets))
        median.append(f"{over_nets.median:+.2f}" if over_nets else "")
        worse.append(f"{over_nets.worse} of {over_nets.nets}" if over_nets else "")
    for line in (together, median, worse):
        lines.append([*line, ""])
    return compact_table(lines)


@dataclasses.dataclass
class Summary:
    """A recipe over all nets, in percent.

    mean, half: by random effects. median: of the nets' means. largest: the largest mean of those whose
    interval lies above 0, or 0.
    """

    mean: float
    half: float
    median: float
    largest: float
    nets: int
    pairs: int
    worse: int  # nets whose interval lies above 0
    better: int


def summary(rows, recipe):
    """Summary of the nets that have enough pairs of a recipe; None for fewer than two nets."""
    means, errors, sides, pairs, largest = [], [], [], 0, 0.0
    for row in rows:
        cell = row.cells.get(recipe)
        if cell is None or not cell.counts:
            continue
        means.append(cell.change.mean)
        errors.append(cell.error)
        sides.append(cell.side)
        pairs += cell.pairs
        if cell.side == "worse":
            largest = max(largest, cell.change.mean)
    if len(means) < 2:
        return None
    mean, half = stats.random_effects(means, errors)
    counts = dict(nets=len(means), pairs=pairs, worse=sides.count("worse"), better=sides.count("better"))
    return Summary(mean, half, statistics.median(means), largest, **counts)


def pooled_words(over_nets):
    if over_nets is None:
        return ""
    words = f"{over_nets.mean:+.2f} ±{over_nets.half:.2f} ({over_nets.pairs})"
    return f"**{words}**" if over_nets.mean > over_nets.half else words


def figure_of(words, rows):
    """'stochastic.median' -> '-0.01 %': a figure of a Summary, by what the tables call the recipe."""
    name, _, figure = words.rpartition(".")
    named = {title: recipe for recipe, title in RECIPE_TITLES.items()}
    if name not in named or figure not in Summary.__dataclass_fields__:
        raise Refused(f"{{all: {words}}}: no such recipe or figure")
    over_nets = summary(rows, named[name])
    if over_nets is None:
        raise Refused(f"{{all: {words}}} has no record yet")
    x = getattr(over_nets, figure)
    if isinstance(x, int):
        return str(x)
    return f"{x:.2f} %" if figure == "half" else f"{x:+.2f} %"


def on_the_largest_net(recipe, experiments, known):
    """['+0.06 [-0.18, +0.29] (6)', 'DiT, …'] of the largest net with enough pairs of a recipe, trained from
    scratch. Of two records of it the one with more pairs.
    """
    having = []
    for row in overview_rows(experiments, known):
        cell = row.cells.get(recipe)
        if cell and cell.counts and "--finetune" not in cell.arm.flags:
            having.append(row)
    row = max(having, key=lambda row: (row.parameters, row.cells[recipe].pairs))
    cell = row.cells[recipe]
    change = cell.change
    interval = f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}] ({cell.pairs})"
    if cell.side == "worse":
        interval = f"**{interval}**"
    number = cell.arm.experiment.number
    folder = cell.arm.experiment.folder.name
    return [interval, f"{row.net} ([{number}](experiments/{folder}/README.md))"]


# ---- The figure --------------------------------------------------------------------------------------------

DRAWN_RECIPES = ("--bf16", "--pure_bf16", "--pure_bf16 --stochastic", "--pure_bf16 --kahan --stochastic")
DRAWN_RECIPES += ("--pure_bf16 --master split", "--pure_bf16 --stochastic --opt8bit")


def overview_data(experiments, known):
    """{"recipes": [title], "rows": [{"net", "cells"}]} of the main recipes.

    cells: [mean, low, high, pairs] for each recipe, or None.
    """
    drawn = []
    for row in overview_rows(experiments, known):
        cells = []
        for recipe in DRAWN_RECIPES:
            cell = row.cells.get(recipe)
            change = cell.change if cell else None
            cells.append([change.mean, change.low, change.high, cell.pairs] if cell else None)
        if any(cells):
            drawn.append({"net": row.net, "cells": cells})
    return {"recipes": [RECIPE_TITLES[recipe] for recipe in DRAWN_RECIPES], "rows": drawn}
