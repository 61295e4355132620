"""The tables of README.md and docs/ that are made from records.

On a page such a table stands below a line <!-- NAME -->, up to the next empty line. `report.py` writes it,
and `report.py --check` says whether it is the one that the records give.

    updated_pages(base, experiments, known)     {path: text} of all pages with their tables
"""

import functools

from benchmarks import training
from benchmarks.common import BYTES_A_GIB
from experiments import bench
from experiments.log import overview, stats
from experiments.log.analysis import loss_comparison, scores_by_seed
from experiments.log.tables import interval_text
from harness.printing import markdown_table
from lowprec.advice.answer import advise
from lowprec.advice.subjects import of_count
from lowprec.errors import Refused

# ---- docs/recipes.md and docs/advise.md --------------------------------------------------------------------

MACHINES = {  # columns of the table of docs/advise.md: parameters, memory of a GPU, number of GPUs
    "0.8 B, 16 GiB": (0.8e9, "16GiB", 1),
    "1.5 B, a GPU of 24 GiB": (1.5e9, "24GiB", 1),
    "40 B, 8 GPUs of 80 GiB": (40e9, "80GiB", 8),
}


def recipes_table(found):
    head = ["flags", "bytes", "held-out loss against fp32, %", "against autocast, %", "net"]
    table = [[*head, "speed: U-Net, CPU", "speed: DiT-XL/2, H100"]]
    cells = overview.on_largest_nets(found, list(filter(None, overview.BYTES)))
    for flags, size in overview.BYTES.items():
        if not flags:
            table.append(["(none): fp32", size, "0, the reference", "-", "-", "1", "1"])
            continue
        speeds = [training.speed_text(column, flags) for column in ("U-Net, 64x64 images", training.ON_GPU)]
        table.append([f"`{flags}`", size, *cells[flags], *speeds])
    return markdown_table(table)


def fits_table():
    """What `python -m lowprec advise --params N --memory SIZE --gpus K` says of each recipe."""
    columns = []  # {the words of a recipe, in any order: its cell}
    for count, each, gpus in MACHINES.values():
        column = {}
        for row in advise(of_count(count), memory=each, gpus=gpus).rows:
            fits = "fits" if row.fits else "no"
            words = frozenset(row.candidate.typed.split())
            column[words] = f"{fits}: {row.total / BYTES_A_GIB:.1f}"
        columns.append(column)
    table = [["flags", *MACHINES]]
    for flags in overview.BYTES:
        words = frozenset((flags or "(none)").split())
        cells = [column.get(words, "refused") for column in columns]
        table.append([f"`{flags}`" if flags else "(none): fp32", *cells])
    return markdown_table(table)


SCORES = ("frechet", "kid", "label_accuracy", "sliced_wasserstein")


def default_run_table(experiments, known):
    record = known["000", "pure-bf16-stochastic", 0]
    columns = record["scores"]["ema"], record["reference"]["floor"], record["reference"]["ceiling"]
    table = [["score", "this run", "real", "noise"]]
    for name in SCORES:
        table.append([name, *(f"{column[name]:.4f}" for column in columns)])
    return markdown_table(table)


# ---- docs/formats.md and docs/recipes.md -------------------------------------------------------------------

ROUNDED_ARMS = {  # --set generation=: the arms of experiment 062 that round weights to nearest, and by GPTQ
    "int8": ("int8", None),
    "mxfp8": ("mxfp8", None),
    "nvfp4_weights": ("nvfp4-weights", "nvfp4-weights-gptq"),
    "mxfp4_weights": ("mxfp4-weights", "mxfp4-weights-gptq"),
    "nvfp4": ("nvfp4", "nvfp4-gptq"),
    "mxfp4": ("mxfp4", None),
}


NOT_RECORDED = "-"


def loss_change(arm, known):
    """'+0.37 [+0.33, +0.40] (6)': the change of the held-out loss in percent, its interval, pairs."""
    _, pairs, change = loss_comparison(arm, known)
    return f"{interval_text(change, 2)} ({pairs})" if change else NOT_RECORDED


def rounded_table(experiment, known):
    def said(name):
        return loss_change(experiment.arm(name), known) if name else NOT_RECORDED

    table = [["`--set generation=`", "weights to nearest", "weights by GPTQ"]]
    for value, (nearest, by_gptq) in ROUNDED_ARMS.items():
        table.append([f"`{value}`", said(nearest), said(by_gptq)])
    return markdown_table(table)


READ_SUFFIX = "-read"  # how the name of an arm ends that draws with what another trained, in its format
PAIRED_SUFFIX = "-paired"  # and of one that is compared with another baseline


def from_scratch_table(experiment, known):
    """The arms of an experiment that trained: their flags, and what each loses against the baseline. Arms
    that read the same runs again have columns.
    """
    arms = {arm.name: arm for arm in experiment.arms}
    columns = {}  # how the names of arms end: the column that they fill
    for name, arm in arms.items():
        if name.endswith(READ_SUFFIX):
            columns[READ_SUFFIX] = "products of the same format when it is scored"
        if name.endswith(PAIRED_SUFFIX):
            columns[PAIRED_SUFFIX] = f"against `{' '.join(arms[arm.baseline].flags)}`, %"
    table = [["flags", "held-out loss, %", *columns.values()]]
    for name, arm in arms.items():
        trains = arm.flags and not (arm.of or arm.after)
        change = loss_change(arm, known) if trains else NOT_RECORDED
        if change == NOT_RECORDED:
            continue
        row = [f"`{' '.join(arm.flags)}`", change]
        for ending in columns:
            again = arms.get(f"{name}{ending}")
            row.append(loss_change(again, known) if again else NOT_RECORDED)
        table.append(row)
    return markdown_table(table)


OTHER_OPTIMIZERS = ("sgd", "lion", "adafactor", "muon")
TRAINED_BY_OTHERS = {  # a column: its experiment
    "GPT, 0.8 M": "069",
    "GPT, 2.7 M": "054",
    "DiT, 0.3 M": "066",
    "DiT, 4.2 M": "056",
    "U-Net, 0.2 M": "072",
    "U-Net, 1.1 M": "055",
}
# end of an arm's name: flags
FLAGS_OF_WRITING = {"stochastic": "--pure_bf16 --stochastic", "nearest": "--pure_bf16"}


def others_table(experiments, known):
    """What each way of writing costs with each optimiser, against fp32 with the same optimiser."""
    table = [["flags", *TRAINED_BY_OTHERS]]
    for written, flags in FLAGS_OF_WRITING.items():
        for optimizer in OTHER_OPTIMIZERS:
            cells = []
            for number in TRAINED_BY_OTHERS.values():
                cells.append(loss_change(experiments[number].arm(f"{optimizer}-{written}"), known))
            table.append([f"`{flags} --optimizer {optimizer}`", *cells])
    return markdown_table(table)


# a column: (experiment, what the names of its net's arms begin with, the rate they end with)
FINETUNED_NETS = {
    "GPT, lr 1e-5": ("035", "", "1e-5"),
    "GPT, 1e-6": ("035", "", "1e-6"),
    "U-Net, 1e-5": ("057", "unet-", "1e-5"),
    "U-Net, 1e-6": ("057", "unet-", "1e-6"),
    "DiT, 1e-5": ("057", "dit-", "1e-5"),
    "DiT, 1e-6": ("057", "dit-", "1e-6"),
}
WHOLE_NET_ARMS = {  # flags of a finetuning: what the arms with them are called
    "--pure_bf16": "nearest",
    "--pure_bf16 --stochastic": "stochastic",
    "--pure_bf16 --kahan --stochastic": "kahan-stochastic",
    "--bf16": "bf16",
}
ADAPTED_NETS = {
    "U-Net, lr 1e-4": ("057", "unet-", "1e-4"),
    "U-Net, 1e-5": ("057", "unet-", "1e-5"),
    "DiT, 1e-4": ("057", "dit-", "1e-4"),
    "DiT, 1e-5": ("057", "dit-", "1e-5"),
}
ADAPTER_ARMS = {"--pure_bf16": "lora-nearest", "--pure_bf16 --stochastic": "lora-stochastic"}


def finetuned_table(columns, rows, fp32, experiments, known):
    """What each recipe keeps of what fp32 gains by a finetuning, in percent. columns: FINETUNED_NETS or
    ADAPTED_NETS; rows: WHOLE_NET_ARMS or ADAPTER_ARMS; fp32: what their baseline is called.
    """
    table = [["flags", *columns]]
    for flags, name in rows.items():
        cells = []
        for number, net, rate in columns.values():
            names = (f"{net}before", f"{net}{fp32}-{rate}", f"{net}{name}-{rate}")
            cells.append(share_kept(experiments[number], names, known))
        table.append([f"`{flags}`", *cells])
    return markdown_table(table)


def share_kept(experiment, names, known):
    """'49 ± 6 (3)': the percentage that one arm keeps of what another gains over a third, half of its 95 %
    interval, and pairs; '-' of an arm that is not there. names: of the third, the other and the one.
    """
    arms = {arm.name: arm for arm in experiment.arms}
    if not all(name in arms for name in names):
        return "-"
    before, best, own = (scores_by_seed(arms[name], known) for name in names)
    shares = []
    for seed in own:
        if seed in best and seed in before:
            shares.append(100 * (before[seed] - own[seed]) / (before[seed] - best[seed]))
    if len(shares) < 2:
        return "-"
    found = stats.equivalence(shares, margin=1.0)
    return f"{found.mean:.1f} ± {found.high - found.mean:.1f} ({len(shares)})"


# ---- All pages ---------------------------------------------------------------------------------------------


def tables_of_pages(experiments, known):
    """{page: {name of a table: a function that makes it}}."""
    found = overview.settings(experiments, known)
    experiments = {one.number: one for one in experiments}
    pages = {
        "README.md": {"claim": lambda: overview.claim(found)},
        "docs/recipes.md": {
            "recipes": lambda: recipes_table(found),
            "default run": lambda: default_run_table(experiments, known),
            "others": lambda: others_table(experiments, known),
            "finetuned": lambda: finetuned_table(FINETUNED_NETS, WHOLE_NET_ARMS, "fp32", experiments, known),
            "adapters": lambda: finetuned_table(ADAPTED_NETS, ADAPTER_ARMS, "lora-fp32", experiments, known),
        },
        "docs/advise.md": {"fits": fits_table},
        "docs/formats.md": {
            "rounded": lambda: rounded_table(experiments["062"], known),
        },
    }
    for one in experiments.values():
        for page, name in one.tables.items():
            pages.setdefault(page, {})[name] = functools.partial(from_scratch_table, one, known)
    for file in bench.files():
        for page, tables in getattr(file, "TABLES", {}).items():
            pages.setdefault(page, {}).update(tables)
    return pages


def with_table(text, name, table, page):
    """The page with this table below its marker. Raises Refused."""
    marker = f"<!-- {name} -->\n"
    if text.count(marker) != 1:
        raise Refused(f"{page}: the line '{marker.strip()}' must stand there once, above its table")
    before, after = text.split(marker)
    _, _, rest = f"\n{after}".partition("\n\n")  # the table that is there, or none yet
    return f"{before}{marker}{table}\n\n{rest}"


def updated_pages(base, experiments, known):
    """{path: text} of README.md and the pages of docs/ in the folder `base`. Raises Refused."""
    found = {}
    for page, parts in tables_of_pages(experiments, known).items():
        path = base / page
        text = path.read_text(encoding="utf-8")
        for name, table in parts.items():
            text = with_table(text, name, table(), page)
        found[path] = text
    return found
