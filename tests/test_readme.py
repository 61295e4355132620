"""What the README shows works: its loop runs for every recipe, its commands parse, and .ci/run finds its test
command.
"""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from benchmarks import loops, memory, systems, training
from experiments.log import claims, definition
from experiments.log.evidence import Evidence
from experiments.log.records import recorded

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
PAGES = "\n".join([README, FORMATS, SPEED])
LOOP = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "Precision(" in block)


RECIPES = [
    {},
    dict(bf16=True),
    dict(fp16=True),
    dict(pure_bf16=True),
    dict(pure_bf16=True, stochastic=True),
    dict(pure_bf16=True, kahan=True),
    dict(pure_bf16=True, kahan=True, stochastic=True),
    dict(pure_bf16=True, master="split"),
    dict(opt8bit=True),
    dict(pure_bf16=True, stochastic=True, opt4bit=True),
]


@pytest.mark.parametrize("flags", RECIPES, ids=str)
def test_the_six_line_loop_learns_in_every_recipe(flags, capsys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    x = torch.randn(64, 8)
    loader = [(x, x[:, :1] * 2)] * 200
    arguments = ", ".join(f"{k}={v!r}" for k, v in flags.items())
    code = LOOP.replace("recipe(pure_bf16=True, stochastic=True)", f"recipe({arguments})")
    assert arguments in code
    scope = {"model": model, "loader": loader, "F": F}
    before = F.mse_loss(model(x), loader[0][1]).item()
    exec(code, scope)
    assert scope["loss"].item() < 0.2 * before
    assert not any(p.requires_grad for p in scope["net"].net.parameters())
    assert "bytes a parameter" in capsys.readouterr().out


def commands():
    found = re.findall(r"(?:^|`|&& )(?:python|torchrun --nproc_per_node=2) (train\.py[^`#\n]*)", PAGES, re.M)
    return sorted({c.strip() for c in found if "…" not in c and "--help" not in c})


def test_the_readme_has_commands():
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_parses(command):
    if "FILE" in command or "mine.py" in command:
        pytest.skip("names a file of the reader's own; tests/tasks/test_task_file.py runs one")
    # status 2 on an unknown flag or value
    given = vars(train.build_parser().parse_args(shlex.split(command)[1:]))
    assert set(given) <= set(train.FLAGS.defaults()) | {"dry_run", "check", "sample", "diagnose", "config"}


BYTES = re.findall(r"^\| `(--[^`]*)` \| ([\d.]+) \|", README.split("<!-- speeds -->")[0], re.M)


@pytest.mark.parametrize("row", BYTES, ids=lambda row: row[0])
def test_the_bytes_in_the_table_of_flags_are_the_ledgers(row, capsys):
    flags, size = row
    # a net whose tensors are large, as the table assumes: bitsandbytes keeps small ones in fp32
    assert train.main(["--dry_run", "--size", "base", *shlex.split(flags)]) == 0
    said = re.search(r"optimiser: ([\d.]+) bytes", capsys.readouterr().out).group(1)
    assert round(float(said)) == float(size)


def test_the_bytes_of_a_large_net_are_the_ledgers(capsys):
    said = re.search(r"XL/2 they hardly count: ([\d.]+) with .*?, ([\d.]+) with", FORMATS).groups()
    for size, states in zip(said, ("--opt8bit", "--opt4bit"), strict=True):
        net = "--dry_run --model dit --size XL/2 --image_size 64"
        assert train.main(f"{net} --pure_bf16 --stochastic {states}".split()) == 0
        assert f"optimiser: {size} bytes" in capsys.readouterr().out


def bench_rows():
    table = SPEED.split("how a bf16 write is protected |")[1].split("\n\n")[0]
    return re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|", table, re.M)


BENCH_NAMES = {
    "ours, `--stochastic`": "stochastic",
    "ours, `--kahan`": "kahan",
    "ours, `--master split`": "split",
    "ours, `--stochastic --opt8bit`": "stochastic-8bit",
    "ours, `--stochastic --opt4bit`": "stochastic-4bit",
    "ours, `--stochastic --optimizer sgd`": "stochastic-sgd",
    "ours, `--stochastic --optimizer lion`": "stochastic-lion",
    "torchastic": "torchastic",
    "torchao, stochastic": "torchao",
    "torch-optimi, Kahan": "optimi",
    "HeavyBall, stochastic": "heavyball",
    "adamw-bf16": "adamw-bf16",
    "SDNQ": "sdnq",
    "bitsandbytes 8-bit": "bitsandbytes",
    "torch, fused": "torch-fused",
    "ours, fp32 weights": "fp32",
    "torch, fused, fp32 weights": "torch-fused-fp32",
}


def test_the_times_in_the_readme_are_the_recorded_ones():
    results = json.loads((ROOT / "experiments" / "bench" / "cpu-optimizers.json").read_text())["results"]
    median = {(r["name"], r["layout"]): statistics.median(r["ms"]) for r in results if r["ms"]}
    assert {name for name, *_ in bench_rows()} == set(BENCH_NAMES)
    for name, mixed, large in bench_rows():
        times = [f"{median[BENCH_NAMES[name], layout]:.1f}" for layout in ("mixed", "large")]
        assert [mixed, large] == times


def test_the_loops_in_the_readme_are_the_recorded_ones():
    results = json.loads((ROOT / "experiments" / "bench" / "cpu-peers.json").read_text())["results"]
    for net in loops.NETS:
        head, *lines = loops.table_of([row for row in results if row["net"] == net]).splitlines()
        assert "\n".join([head.replace("loop", net, 1), *lines]) in SPEED, net
    older = json.loads((ROOT / "experiments" / "bench" / "cpu-peers-amd.json").read_text())["results"]
    ratio = {(row["loop"], row["net"]): f"{row['ratio']:.2f}" for row in older if row["kind"] == "bf16"}
    ours, bare = ([ratio[loop, net] for net in loops.NETS] for loop in ("ours", "bare loop"))
    said = " ".join(SPEED.split())
    assert "{} times fp32's speed on the U-Net, {} on the DiT and {} on the GPT".format(*ours) in said
    assert "a bare loop had {}, {} and {}".format(*bare) in said


TRAINING = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| `([\w-]+\.json)`, `([^`]+)` \|", SPEED, re.M)


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: row[3])
def test_the_speeds_of_training_in_the_readme_are_the_recorded_ones(row):
    results = json.loads((ROOT / "experiments" / "bench" / row[2]).read_text())["results"]
    median = {r["recipe"]: statistics.median(r["ms"]) for r in results if r["net"] == row[3]}
    ratios = [f"{median['fp32'] / median[recipe]:.1f}" for recipe in ("bf16", "pure_bf16-stochastic")]
    assert ratios == list(row[:2])


SPEEDS = {  # README's column: record, and {flags: name there}
    "U-Net": ("cpu-training-64x64", "unet:small:64:8", "recipe"),
    "DiT S/8": ("cpu-training-64x64", "dit:S/8:64:8", "recipe"),
    "BDH": ("cpu-systems", "language", "name"),
    "H100": ("gpu-nvidia-h100-80gb-hbm3", "dit:B/2:32:64", "recipe"),
}
NAMED = {  # flags: what records call them
    "`--bf16`": ("bf16",),
    "`--pure_bf16 --stochastic`": ("pure_bf16-stochastic",),
    "`--pure_bf16 --kahan`": ("pure_bf16-kahan",),
    "`--pure_bf16 --master split`": ("pure_bf16-split",),
    "`--opt8bit`": ("opt8bit",),
    "`--bf16 --opt8bit`": ("bf16, 8-bit states",),
    "`--pure_bf16 --stochastic --opt8bit`": ("pure bf16 stochastic, 8-bit states",),
    "`--fp8`": ("fp8 (emulated)", "fp8-torchao-tensorwise"),
}


def speeds_of(column):
    """{what the record calls a recipe: its speed, fp32's 1}."""
    file, net, name = next(SPEEDS[key] for key in SPEEDS if key in column)
    rows = json.loads((ROOT / "experiments" / "bench" / f"{file}.json").read_text())["results"]
    found = {}
    for row in rows:
        if row.get("net", row.get("table")) == net and row.get("ms") and not row.get("compile"):
            beside = statistics.median(row["reference_ms"]) if "reference_ms" in row else 1.0
            found[row[name]] = beside * row.get("items_a_step", 1) / statistics.median(row["ms"])
    return {recipe: speed / found["fp32"] for recipe, speed in found.items()}


def test_the_speeds_of_recipes_are_the_recorded_ones():
    head, _, *lines = README.split("<!-- speeds -->\n")[1].split("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    assert len(lines) == len(NAMED) and len(columns) == len(SPEEDS)
    for line in lines:
        flags, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        for column, cell in zip(columns, cells, strict=True):
            speeds = speeds_of(column)
            known = [f"{speeds[name]:.1f}" for name in NAMED[flags] if name in speeds]
            assert cell.partition(",")[0] == (known[0] if known else "-"), (flags, column)


def test_the_scores_of_the_default_run_are_the_recorded_ones():
    lines = (ROOT / "experiments" / "000-default-run" / "results.jsonl").read_text().splitlines()
    record = next(r for r in map(json.loads, lines) if r["arm"] == "pure-bf16-stochastic" and r["seed"] == 0)
    table = README.split("<!-- default run -->")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \| ([-\d.]+) \| ([-\d.]+) \| ([-\d.]+) \|", table, re.M)
    assert [name for name, *_ in rows] == ["frechet", "kid", "label_accuracy", "sliced_wasserstein"]
    for name, *cells in rows:
        columns = record["scores"]["ema"], record["reference"]["floor"], record["reference"]["ceiling"]
        assert cells == [f"{c[name]:.4f}" for c in columns]


FROM_THE_LOG = [  # what README says of experiments, with the figures as EXPERIMENTS.md refers to them
    "Equal to fp32 on the U-Net within {001/stochastic.achieved_share}; on the DiT not shown to differ",
    "Equal to fp32 within {001/bf16.achieved_share} on the U-Net and {011/bf16.achieved_share} on the DiT",
    "(the held-out loss changes by {019/hybrid-tensorwise.held_out}) and not shown to be equal; with "
    "`--fp8_recipe delayed` equal within {019/hybrid-delayed.achieved_share}",
    "Equal within {024/opt8bit.achieved_share} on the U-Net and {018/opt8bit.achieved_share} on the DiT",
    "within {008/kahan.achieved_share} on the U-Net, where the held-out loss changes by {008/kahan.held_out}"
    ", and {011/kahan.achieved_share} on the DiT, where it changes by {011/kahan.held_out}",
    "within {008/kahan-stochastic.achieved_share} on the U-Net and "
    "{011/kahan-stochastic.achieved_share} on the DiT",
    "within {024/stochastic-opt8bit.achieved_share} on the U-Net and "
    "{018/stochastic-opt8bit.achieved_share} on the DiT",
    "within {024/stochastic-opt4bit.achieved_share} on the U-Net, where the training loss changes by "
    "{024/stochastic-opt4bit.loss_change}; on the DiT the distance changes by "
    "{018/stochastic-opt4bit.change}",
    "within {001/stochastic.achieved_share}, and its held-out loss changes by {001/stochastic.held_out}, its "
    "training loss by {001/stochastic.loss_change} (",
    "as usual, to {001/plain.loss_change} from fp32's",
    "the held-out loss of the U-Net rises by {012/nearest-lr-1e-3.held_out} at the default rate, and by "
    "{012/nearest-lr-1e-4.held_out} at `--lr 1e-4`",
    "stochastic rounding is equal within {000/pure-bf16-stochastic.achieved_share} ([000]",
    "nearest changes the held-out loss of a U-Net by {036/nearest.held_out}, and stochastic rounding is "
    "equal to fp32 within {036/stochastic.held_out_achieved} of it",
    "nearest is at {037/nearest.held_out} and stochastic rounding at {037/stochastic.held_out} (95 % "
    "interval {037/stochastic.held_out_low} to {037/stochastic.held_out_high}), not shown to differ",
    "ends at {045/plain.held_out} on that U-Net and at {046/plain.held_out} on that DiT, with an fp32 "
    "average at {045/plain-fp32-average.held_out} and {046/plain-fp32-average.held_out}, by three pairs",
    "ends at {047/gpt-plain.held_out} on the GPT and at {047/bdh-plain.held_out} on BDH, with an fp32 "
    "average at {047/gpt-plain-fp32-average.held_out} and {047/bdh-plain-fp32-average.held_out}, by three",
    "diffusers' rule is {048/diffusers-0.999.held_out} against an fp32 average",
    "stochastic rounding is equal to fp32 within {038/gpt-stochastic.held_out_achieved} of the held-out "
    "loss, and with 8-bit states within {038/gpt-stochastic-opt8bit.held_out_achieved}; nearest is at "
    "{038/gpt-nearest.held_out}. On BDH nearest is at {038/bdh-nearest.held_out}, and stochastic rounding at "
    "{038/bdh-stochastic.held_out},",
    "equal to fp32's within {035/stochastic-1e-5.held_out_achieved} with stochastic rounding, and within "
    "{035/stochastic-1e-6.held_out_achieved} at the lower rate",
    "nearest is at {043/nearest.held_out}, stochastic rounding at {043/stochastic.held_out} and autocast at "
    "{043/bf16.held_out}",
]


def test_the_figures_of_experiments_in_the_readme_are_the_recorded_ones():
    loaded = {}
    experiments = [definition.load(number, loaded=loaded) for number in definition.folders()]
    known = {key: record for e in experiments for key, record in recorded(e).items()}
    evidence = Evidence(experiments, known, ROOT / "experiments", ROOT)
    said = " ".join(README.split())
    for sentence in FROM_THE_LOG:
        assert claims.filled(sentence, evidence)[0] in said


@pytest.mark.parametrize("name", ["memory", "moments"])
def test_the_tables_of_8_and_4_bit_moments_are_the_recorded_ones(name):
    results = json.loads((ROOT / "experiments" / "bench" / f"cpu-{name}.json").read_text())["results"]
    table = FORMATS.split(f"<!-- {name} -->\n")[1].split("\n\n")[0]
    if name == "memory":
        rows = {row["flags"]: row for row in results if row["net"] == "dit:S/8:64:1" and "weights" in row}
        assert table == memory.memory_table(rows)
    else:
        assert table == training.moments_table(results)


@pytest.mark.parametrize("name", systems.TABLES)
def test_the_tables_of_systems_are_the_recorded_ones(name):
    results = json.loads((ROOT / "experiments" / "bench" / "cpu-systems.json").read_text())["results"]
    table = SPEED.split(f"<!-- systems {name} -->\n")[1].split("\n\n")[0]
    assert table == systems.table_of([row for row in results if row["table"] == name])


def test_the_planted_faults_are_those_of_the_doctors_page():
    def rows(page):
        table = page.split("<!-- faults -->\n")[1].split("\n\n")[0]
        return [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]

    shown = rows(README)
    assert shown == rows((ROOT / "docs" / "doctor.md").read_text())
    named = sum(cells[2] != "missed" for cells in shown)
    assert f"The {len(shown)} planted faults" in README
    with_tensor = sum("`" in cells[2] for cells in shown)
    assert f"Of {len(shown)} planted faults" in README
    assert f"`Watch` names {named}, {with_tensor} of them with a tensor" in README


def test_no_table_of_figures_that_nobody_measured_is_shown():
    assert "not measured |" not in PAGES


def test_ci_runs_the_readmes_test_command():
    block = README.split("<!-- tests -->")[1].split("```")[1]
    for part in ("-r requirements.txt", "-r requirements-bench.txt", "ruff check .", "python -m pytest"):
        assert part in block
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()
