"""The tables of docs/speed.md, from the records in experiments/bench. doc_tables.py puts them on the page.

    tables_of_speed()     {name of a table: a function that makes it}
    rows_of_record(name)  the rows of a record
"""

import functools
import json
import statistics

from benchmarks import first, gpu_record, largest_batch
from benchmarks.common import BYTES_A_GIB
from experiments.bench import loops, systems
from experiments.log.definition import HERE
from experiments.log.tables import markdown_table

BENCH_FOLDER = HERE / "bench"
H100 = "gpu-nvidia-h100-80gb-hbm3"
H100_COMPILED = "gpu-nvidia-h100-80gb-hbm3-compiled"
H100_STATES = "gpu-nvidia-h100-80gb-hbm3-states"
H100_BATCH = "gpu-nvidia-h100-80gb-hbm3-batch"
H100_BATCH_OF_UNET = "gpu-nvidia-h100-80gb-hbm3-batch-unet"
H200 = "gpu-nvidia-h200"
H200_STATES = "gpu-nvidia-h200-states"

# ---- Records of benchmarks ---------------------------------------------------------------------------------


@functools.cache
def rows_of_record(name):
    """The rows of a benchmark's record."""
    return json.loads((BENCH_FOLDER / f"{name}.json").read_text(encoding="utf-8"))["results"]


def median_ms(rows, **wanted):
    """Milliseconds of the row with these values, or None."""
    for row in rows:
        if row.get("ms") and all(row.get(key) == value for key, value in wanted.items()):
            return statistics.median(row["ms"])
    return None


def milliseconds(record, net):
    """{recipe: median milliseconds of a step}. A later record on the H100 has further recipes. Their times
    are given as they would be in the first: both have stochastic rounding.
    """
    found = _milliseconds(record, net)
    if record == H100_COMPILED:
        shared = "pure_bf16-stochastic"
        later = _milliseconds(H100_STATES, net)
        for recipe, time in later.items():
            found.setdefault(recipe, time * found[shared] / later[shared])
    return found


def _milliseconds(record, net):
    return {
        row["recipe"]: statistics.median(row["ms"])
        for row in rows_of_record(record)
        if row["net"] == net and row.get("ms")
    }


# ---- docs/speed.md -----------------------------------------------------------------------------------------

OPTIMIZER_ROWS = {  # what the record calls it: (what the page calls it, how a bf16 write is protected)
    "stochastic": ("ours, `--stochastic`", "stochastic: weights and both moments"),
    "kahan": ("ours, `--kahan`", "compensated"),
    "kahan-stochastic": ("ours, `--kahan --stochastic`", "compensated and stochastic"),
    "split": ("ours, `--master split`", "exact fp32 master, fp32 moments"),
    "stochastic-8bit": ("ours, `--stochastic --opt8bit`", "stochastic: weights and codes of both moments"),
    "stochastic-4bit": ("ours, `--stochastic --opt4bit`", "stochastic: weights and codes of both moments"),
    "stochastic-e4m3": (
        "ours, `--stochastic`, states in e4m3",
        "stochastic: weights and codes of both moments",
    ),
    "stochastic-sgd": ("ours, `--stochastic --optimizer sgd`", "stochastic: weights and momentum"),
    "stochastic-lion": ("ours, `--stochastic --optimizer lion`", "stochastic: weights and momentum"),
    "stochastic-adafactor": ("ours, `--stochastic --optimizer adafactor`", "stochastic: weights and moments"),
    "stochastic-muon": ("ours, `--stochastic --optimizer muon`", "stochastic: weights and momentum"),
    "optimi": ("torch-optimi, Kahan", "compensated"),
    "torchao": ("torchao, stochastic", "stochastic weights"),
    "torchastic": ("torchastic", "stochastic: weights and both moments"),
    "heavyball": ("HeavyBall, stochastic", "stochastic: weights and both moments"),
    "adamw-bf16": ("adamw-bf16", "compensated and stochastic"),
    "sdnq": ("SDNQ", "stochastic weights"),
    "bitsandbytes": ("bitsandbytes 8-bit", "not"),
    "torch-fused": ("torch, fused", "not"),
    "fp32": ("ours, fp32 weights", "fp32, nothing to protect"),
    "torch-fused-fp32": ("torch, fused, fp32 weights", "fp32, nothing to protect"),
}


def optimizers_table(record):
    rows = rows_of_record(record)
    table = [["optimiser", "271 tensors of mixed sizes", "4 large tensors", "how a bf16 write is protected"]]
    for name, (said, protection) in OPTIMIZER_ROWS.items():
        mixed = median_ms(rows, name=name, layout="mixed")
        large = median_ms(rows, name=name, layout="large")
        if mixed and large:
            table.append([said, f"{mixed:.1f}", f"{large:.1f}", protection])
    return markdown_table(table)


TRAINED_NETS = {  # (record, net): what the page calls it
    ("cpu-training-64x64", "unet:small:64:8"): "U-Net, 64 and 128 channels, 64x64 images",
    ("cpu-training-64x64", "dit:S/8:64:8"): "DiT S/8, 64x64 images",
    ("cpu-training-8x8", "unet:tiny:8:64"): "tiny U-Net, 8x8 images: overheads hide the gain",
    ("cpu-training-8x8", "dit:tiny:8:64"): "tiny DiT, 8x8 images",
}


def training_table():
    table = [["net", "`--bf16`", "`--pure_bf16 --stochastic`", "record in `experiments/bench/`"]]
    for (record, net), said in TRAINED_NETS.items():
        rows = rows_of_record(record)
        fp32 = median_ms(rows, net=net, recipe="fp32")
        speeds = []
        for recipe in ("bf16", "pure_bf16-stochastic"):
            speeds.append(f"{fp32 / median_ms(rows, net=net, recipe=recipe):.1f}")
        table.append([said, *speeds, f"`{record}.json`, `{net}`"])
    return markdown_table(table)


PRODUCT_NETS = {"unet:tiny:8:64": "tiny U-Net, 8x8 images", "dit:tiny:8:64": "tiny DiT, 8x8 images"}


def products_table():
    """Whole steps on a CPU without bf16 instructions, as speeds against fp32."""
    table = [["net", "`--bf16`", "`--pure_bf16 --stochastic`", "`--bf16` with torch's own products"]]
    columns = (
        ("cpu-products", "bf16"),
        ("cpu-products", "pure_bf16-stochastic"),
        ("cpu-products-of-torch", "bf16"),
    )
    for net, said in PRODUCT_NETS.items():
        speeds = []
        for record, recipe in columns:
            fp32 = median_ms(rows_of_record(record), net=net, recipe="fp32")
            speeds.append(f"{fp32 / median_ms(rows_of_record(record), net=net, recipe=recipe):.2f}")
        table.append([said, *speeds])
    return markdown_table(table)


def loops_table(net):
    rows = [row for row in rows_of_record("cpu-peers") if row["net"] == net]
    return loops.net_table(rows).replace("| loop |", f"| {net} |", 1)


def bare_and_ours_table(record):
    """Speeds of the bare loop and of ours, a column a net."""
    ratios = {}
    for row in rows_of_record(record):
        ratios[row["loop"], row["kind"], row["net"]] = f"{row['ratio']:.2f}"
    table = [["loop", *loops.LOOP_NETS]]
    for kind in ("fp32", "bf16", "bf16 weights"):
        for loop in ("bare loop", "ours"):
            table.append([f"{loop}, {kind}", *(ratios[loop, kind, net] for net in loops.LOOP_NETS)])
    return markdown_table(table)


def systems_table(name):
    return systems.system_table([row for row in rows_of_record("cpu-systems") if row["table"] == name])


def gpu_table(record, net):
    whole = json.loads((BENCH_FOLDER / f"{record}.json").read_text(encoding="utf-8"))
    rows = [row for row in whole["results"] if row["net"] == net]
    return gpu_record.docs_table({**whole, "results": rows})


def gpu_peaks_table():
    """Peak memory of a compiled step on an H200: a row a recipe, a column a net."""
    rows = rows_of_record(H200)
    nets = list(dict.fromkeys(row["net"] for row in rows))
    titles = [f"{gpu_record.GPU_NET_TITLES[net]}, batch of {net.rpartition(':')[2]}" for net in nets]
    table = [["peak GiB, compiled", *titles]]
    for name in dict.fromkeys(row["recipe"] for row in rows):
        peaks = []
        for net in nets:
            found = [row["peak_bytes"] for row in rows if row["net"] == net and row["recipe"] == name]
            peaks.append(f"{found[0] / BYTES_A_GIB:.2f}" if found else "-")
        table.append([f"`{name}`", *peaks])
    return markdown_table(table)


# ---- The page -------------------------------------------------------------------------------------------


def tables_of_speed():
    """{name of a table: a function that makes it}."""
    found = {
        "optimizers": functools.partial(optimizers_table, "cpu-optimizers"),
        "optimizers amd": functools.partial(optimizers_table, "cpu-optimizers-amd"),
        "optimizers avx2": functools.partial(optimizers_table, "cpu-optimizers-avx2"),
        "training": training_table,
        "products": products_table,
        "peers amd": functools.partial(bare_and_ours_table, "cpu-peers-amd"),
        "first": lambda: first.table(rows_of_record("cpu-first")),
        "tasks": lambda: loops.task_speeds_table(rows_of_record("cpu-tasks")),
        "gpu": functools.partial(gpu_table, H100, "dit:B/2:32:64"),
        "gpu compiled DiT": functools.partial(gpu_table, H100_COMPILED, "dit:XL/2:64:8"),
        "gpu compiled U-Net": functools.partial(gpu_table, H100_COMPILED, "unet:base:64:32"),
        "gpu states DiT H100": functools.partial(gpu_table, H100_STATES, "dit:XL/2:64:8"),
        "gpu states DiT": functools.partial(gpu_table, H200_STATES, "dit:XL/2:64:8"),
        "gpu states U-Net": functools.partial(gpu_table, H200_STATES, "unet:base:64:32"),
        "gpu peaks": gpu_peaks_table,
        "gpu batch": lambda: largest_batch.table(
            rows_of_record(H100_BATCH) + rows_of_record(H100_BATCH_OF_UNET)
        ),
    }
    for net in loops.LOOP_NETS:
        found[f"peers {net}"] = functools.partial(loops_table, net)
    for name in systems.SYSTEM_TABLES:
        found[f"systems {name}"] = functools.partial(systems_table, name)
    return found
