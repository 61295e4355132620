"""The record of bench.py --gpu: the machine, what may be continued, and the tables.

A page has a table a net. `x bf16`: speed against the eager bf16 cell, of the rounds in which both took turns.
`peak GiB`: what the allocator held above its start during one step. `FLOP share`: of the step in FP8, or of
the forward pass in 2:4 layers. `first step s`: compiling included.
"""

import hashlib
import json
import statistics
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.common import BYTES_A_GIB, or_dash, rows_by
from benchmarks.gpu_cells import GPU_RECIPES, cell_key, cells
from benchmarks.records import H100, H100_COMPILED, H100_STATES, of_record
from harness.files import write_atomically, write_json
from harness.printing import markdown_table
from harness.run_folder import environment
from lowprec.errors import Refused

ROOT = Path(__file__).resolve().parent.parent
# 32x32 with patches of 2: 256 tokens, as the latents of 256x256 images in the DiT paper; 64x64: 1024 tokens,
# as those of 512x512
GPU_NET_TITLES = {"dit:B/2:32:64": "DiT-B/2", "dit:XL/2:64:8": "DiT-XL/2, 64x64", "unet:base:64:32": "U-Net"}
# what the figures depend on, besides lowprec/
SOURCES = ("models.py", "benchmarks/allocated.py", "benchmarks/common.py", "benchmarks/gpu_cells.py")


def facts_of_machine(device):
    """Machine, versions, commit, and a hash of the sources.

    A commit says little where there is no git, or the tree is not clean.
    """
    files = sorted((ROOT / "lowprec").rglob("*.py"))
    files += [ROOT / name for name in SOURCES]
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    packages = ("triton", "torchao", "transformer_engine", "bitsandbytes")
    facts = environment(device)
    facts["cuda"] = torch.version.cuda
    facts["libraries"] = {package: package_version(package) for package in packages}
    facts["sources"] = sources[:16]
    return facts


def package_version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def same_machine(old, new):
    """Whether figures of two machines (as `facts_of_machine`) belong in one record.

    A library that only one of them has is no difference.
    """
    if any(old[k] != new[k] for k in ("gpu", "torch", "cuda", "sources")):
        return False
    for name, version in new["libraries"].items():
        before = old["libraries"].get(name)
        if None not in (before, version) and before != version:
            return False
    return True


def by_key(rows):
    return {cell_key(row): row for row in rows}


def load_record(path, machine, fresh):
    """{key: row} measured earlier. Raises Refused for a record of other code or another machine."""
    if fresh or not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        if same_machine(record["machine"], machine):
            return by_key(record["results"])
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{path} can't be read: move it away, or measure anew with --fresh") from None
    other = record["machine"]
    versions = f"commit {str(other.get('commit'))[:8]}, torch {other['torch']}"
    raise Refused(
        f"{path} was measured by other code or versions ({versions}): --fresh measures anew and replaces it, "
        "--out FOLDER keeps both"
    )


def save_record(path, record):
    write_json(path, record)
    write_atomically(path.with_suffix(".md"), lambda file: file.write(record_page(record).encode()))


# ---- Figures -----------------------------------------------------------------------------------------------


def images_per_second(row):
    return row["batch_size"] / statistics.median(row["ms"]) * 1e3


def times_bf16(row):
    """'1.25': the speed against bf16, '-' where that could not run beside it."""
    if not row.get("reference_ms"):
        return "-"
    return f"{statistics.median(row['reference_ms']) / statistics.median(row['ms']):.2f}"


def peak_gib(row):
    return or_dash(row["peak_bytes"] and row["peak_bytes"] / 2**30, ".2f")


def cell_line(row):
    """What a cell came to, in a few words."""
    if row["status"] != "measured":
        return row["note"]
    words = f"{images_per_second(row):.1f} images/s, {times_bf16(row)} x bf16"
    if row["peak_bytes"] is not None:
        words += f", {peak_gib(row)} GiB"
    return words


# ---- The page ----------------------------------------------------------------------------------------------

COLUMNS = ("recipe", "compiled", "images/s", "x bf16", "peak GiB", "bytes a parameter", "FLOP share", "loss")
COLUMNS += ("first step s", "note")


def record_page(record):
    """The record as markdown: a table a net; cells that could not be measured with the reason."""
    machine = record["machine"]
    rows = by_key(record["results"])
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items() if version)
    changed = "" if machine["clean"] else " (changed or unknown)"
    versions = f"torch {machine['torch']}, CUDA {machine['cuda']}, {libraries}"
    code = f"commit {str(machine['commit'])[:8]}{changed}, sources {machine['sources']}"
    parts = [
        f"# {machine['gpu'] or machine['cpu']}",
        f"Written by `{record['command']}`, {record['date']}: {versions}; {code}. "
        "`benchmarks/gpu_record.py` says what the columns are.",
    ]
    if "caution" in record:  # written into a record by hand, where a measurement was disturbed
        parts.append(record["caution"])
    nets = [*record["settings"]["nets"], *rows_by(record["results"], "net")]
    for net in dict.fromkeys(nets):
        parts.append(record_title(net, record["results"]))
        parts.append(table_of_net(net, rows))
    return "\n\n".join(parts) + "\n"


def record_title(net, rows):
    words = f"## {GPU_NET_TITLES.get(net, net)}\n\n`{net}` (model:size:image:batch)"
    for row in rows:
        if row["net"] == net and "parameters" in row:
            return f"{words}, {row['parameters']:,} parameters"
    return words


def table_of_net(net, rows):
    order = list(GPU_RECIPES)
    lines = []
    for cell in sorted(cells([net]), key=lambda cell: order.index(cell["recipe"])):
        row = rows.get(cell_key(cell))
        if row is None:  # not tried
            continue
        compiled = "yes" if cell["compile"] else "no"
        note = (row["note"] or row.get("how", "")).replace("|", "\\|")
        lines.append([f"`{cell['recipe']}`", compiled, *row_figures(row), note])
    return markdown_table([COLUMNS, *lines])


def row_figures(row):
    """The seven cells of a row between `compiled` and `note`."""
    if row["status"] != "measured":
        return ["-"] * 7
    return [
        f"{images_per_second(row):.1f}",
        times_bf16(row),
        peak_gib(row),
        or_dash(row["bytes_per_parameter"], ".2f"),
        or_dash(row["flops_share"], ".1%"),
        or_dash(row.get("loss"), ".4f"),
        f"{row['first_step_s']:.1f}",
    ]


def docs_table(record):
    """What was measured, as docs/speed.md shows it: a table a net, a line a recipe.

    `x bf16`, peak and bytes are those of the eager step, where there is one.
    """
    rows = {cell_key(row): row for row in record["results"] if row["status"] == "measured"}
    tables = []
    for net in dict.fromkeys(net for net, *_ in rows):
        lines = []
        for name in GPU_RECIPES:
            eager = rows.get((net, name, False))
            compiled = rows.get((net, name, True))
            if eager or compiled:
                lines.append([f"`{name}`", *docs_figures(eager, compiled)])
        heads = ("images a second", "compiled", "x bf16", "peak GiB", "bytes a parameter")
        tables.append(markdown_table([[GPU_NET_TITLES.get(net, net), *heads], *lines]))
    return "\n\n".join(tables)


def docs_figures(eager, compiled):
    speeds = [or_dash(row and images_per_second(row), ".0f") for row in (eager, compiled)]
    row = eager or compiled
    return [*speeds, times_bf16(row), peak_gib(row), or_dash(row["bytes_per_parameter"], ".2f")]


def peaks_table(rows):
    """Peak memory of a compiled step on an H200: a row a recipe, a column a net."""
    nets = list(dict.fromkeys(row["net"] for row in rows))
    titles = [f"{GPU_NET_TITLES[net]}, batch of {net.rpartition(':')[2]}" for net in nets]
    lines = []
    for name in dict.fromkeys(row["recipe"] for row in rows):
        peaks = []
        for net in nets:
            found = [row["peak_bytes"] for row in rows if row["net"] == net and row["recipe"] == name]
            peaks.append(f"{found[0] / BYTES_A_GIB:.2f}" if found else "-")
        lines.append([f"`{name}`", *peaks])
    return markdown_table([["peak GiB, compiled", *titles], *lines])


def one_net(record, net):
    """A callable that makes the table of one net of a record."""
    return of_record(lambda rows: docs_table({"results": [row for row in rows if row["net"] == net]}), record)


DIT, UNET = "dit:XL/2:64:8", "unet:base:64:32"
TABLES = {
    "docs/speed.md": {
        "gpu": one_net(H100, "dit:B/2:32:64"),
        "gpu compiled DiT": one_net(H100_COMPILED, DIT),
        "gpu compiled U-Net": one_net(H100_COMPILED, UNET),
        "gpu states DiT H100": one_net(H100_STATES, DIT),
        "gpu states DiT": one_net("gpu-nvidia-h200-states", DIT),
        "gpu states U-Net": one_net("gpu-nvidia-h200-states", UNET),
        "gpu peaks": of_record(peaks_table, "gpu-nvidia-h200"),
    }
}
