"""bench.py: what it runs, in which order, and what it writes. No speed is asserted: a test machine has others
on it.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import options
import precision
from benchmarks import (
    fp16_weights,
    gpu_cells,
    guides,
    loops,
    memory,
    moments,
    optimizers,
    other_loops,
    sharding,
    systems,
    training,
)
from benchmarks.allocated import state_bytes
from benchmarks.common import RECIPES, Cell, parse_net, take_turns
from harness import flags
from lowprec import machine, recipes, view
from lowprec.kernels import cpu_products
from lowprec.optimizers import build, peers

SMALL = ["optimizers", "--parameters", "2000", "--layouts", "large"]


@pytest.fixture(autouse=True)
def eager():
    """Not compiled: these tests are about the table, not about the kernels."""
    with torch.compiler.set_stance("force_eager"):
        yield


def run(tmp_path, *argv):
    out, device = tmp_path / "out.json", [] if "--device" in argv else ["--device", "cpu"]
    assert bench.main([*argv, *device, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_optimizers_writes_every_single_time(tmp_path, capsys):
    names = [
        "stochastic",
        "kahan",
        "split",
        "fp32",
        "stochastic-8bit",
        "stochastic-4bit",
        "torchastic",
        "bitsandbytes",
        "torch",
        "torch-fused",
        "torch-fused-fp32",
        "copy",
    ]
    result = run(tmp_path, "optimizers", "--parameters", "6000", "--repeats", "2", "--only", *names)
    assert result["bench"] == "optimizers" and result["settings"]["parameters"] == 6000
    assert result["machine"]["torch"] == torch.__version__
    assert {"cpu", "threads", "bf16", "gpu"} <= set(result["machine"])
    assert result["command"].startswith("python bench.py optimizers --parameters 6000")
    rows = [(row["layout"], row["name"]) for row in result["results"]]
    assert rows == [(layout, name) for layout in ("mixed", "large") for name in names]
    for row in result["results"]:
        assert len(row["ms"]) == 2 and min(row["ms"]) > 0 and row["first_step_s"] > 0 and not row["note"]
    state = {row["name"]: row["state_bytes"] for row in result["results"] if row["layout"] == "large"}
    assert [state[n] for n in ("stochastic", "kahan", "split", "fp32", "torchastic")] == [4, 6, 10, 8, 4]
    fused = [state[n] for n in ("torch-fused", "torch-fused-fp32")]  # torch counts steps in tensors
    assert fused == pytest.approx([4, 8], abs=0.01) and state["copy"] is None
    table = capsys.readouterr().out
    for layout in ("mixed", "large"):
        part = table[table.index(f"\n{layout}: 6,000 parameters") :]
        assert all(any(line.startswith(name + " ") for line in part.splitlines()) for name in names)


def test_ratio_is_to_ours_stochastic(tmp_path, capsys):
    result = run(tmp_path, *SMALL, "--repeats", "3", "--only", "stochastic", "torch")
    medians = {row["name"]: sorted(row["ms"])[1] for row in result["results"]}
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert float(lines["stochastic"][3]) == 1
    assert float(lines["torch"][3]) == pytest.approx(medians["torch"] / medians["stochastic"], abs=0.006)
    assert lines["torch"][4] == "-"  # nothing was copied


def test_an_optimiser_that_drops_its_gradients_is_given_them_before_each_step(monkeypatch):
    seen = []

    def make_step(name, params):
        def step():
            seen.append(all(p.grad is not None and p.grad.any() for p in params))
            for p in params:
                p.grad = None

        return step, None

    monkeypatch.setattr(optimizers, "make_step", make_step)
    assert bench.main(["optimizers", "--only", "nearest", "--parameters", "5000", "--repeats", "3"]) == 0
    assert len(seen) == 2 * (2 + 3) and all(seen)  # in both layouts


def test_bytes_moved_are_compared_with_copying(tmp_path, capsys):
    names = ["stochastic", "fp32", "split", "copy"]
    result = run(tmp_path, *SMALL, "--repeats", "3", "--only", *names)
    rows = {row["name"]: row for row in result["results"]}
    assert [rows[name]["moved_bytes"] for name in names] == [14, 28, 26, 14]
    a_byte = {name: sorted(row["ms"])[1] / row["moved_bytes"] for name, row in rows.items()}
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name in names:
        share = float(lines[name][4].rstrip("%")) / 100
        assert share == pytest.approx(a_byte["copy"] / a_byte[name], abs=0.006), name


def test_every_optimiser_of_ours_takes_part(tmp_path):
    names = [name for name, contender in optimizers.CONTENDERS.items() if contender.ours]
    result = run(tmp_path, *SMALL, "--repeats", "1", "--only", *names)
    assert {"stochastic", "stochastic-adafactor", "stochastic-muon"} < set(names)
    assert all(row["ms"] and not row["note"] for row in result["results"])


def test_a_peer_that_train_py_does_not_offer_takes_part(tmp_path, monkeypatch, capsys):
    (tmp_path / "heavyball.py").write_text(
        "import torch\n\n\nclass AdamW(torch.optim.AdamW):\n"
        "    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), storage_dtype=None):\n"
        "        super().__init__(params, lr=lr, betas=betas)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "sdnq", None)
    rows = {row["name"]: row for row in run(tmp_path, *SMALL, "--only", "heavyball", "sdnq")["results"]}
    assert rows["heavyball"]["ms"] and not rows["heavyball"]["note"] and rows["sdnq"]["ms"] == []
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("sdnq "))
    assert line.split(maxsplit=1)[1].startswith("not installed: pip install")


FLASH = """
import torch

class Held:
    def __init__(self, p):
        self._quantized = torch.zeros(p.numel(), dtype=torch.int8)

class FlashAdamW(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, master_weight_bits=24):
        if not {gpu}:
            raise NotImplementedError("Quantization requires a CUDA device.")
        super().__init__(params, lr=lr)

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p] = dict(exp_avg=Held(p), exp_avg_sq=Held(p))
"""


@pytest.mark.parametrize("gpu", [True, False])
def test_flashoptim_takes_part_where_a_gpu_is(gpu, tmp_path, monkeypatch, capsys):
    (tmp_path / "flashoptim.py").write_text(FLASH.replace("{gpu}", str(gpu)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashoptim", raising=False)
    (row,) = run(tmp_path, *SMALL, "--layouts", "large", "--only", "flashoptim")["results"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("flashoptim "))
    assert bool(row["ms"]) == gpu and ("requires a CUDA device" in line) != gpu
    if gpu:
        assert row["state_bytes"] == 2.0  # codes that an object of its own holds
    monkeypatch.delitem(sys.modules, "flashoptim")


def test_a_peer_that_is_not_installed_is_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimi", None)
    result = run(tmp_path, *SMALL, "--repeats", "2", "--only", "optimi", "torch")
    rows = {row["name"]: row for row in result["results"]}
    assert rows["optimi"]["ms"] == [] and len(rows["torch"]["ms"]) == 2
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("optimi "))
    assert line.split(maxsplit=1)[1] == "not installed: pip install torch-optimi"


def test_a_bug_of_ours_is_no_line(monkeypatch):
    def broken(name, params):
        raise TypeError("a bug")

    monkeypatch.setattr(optimizers, "make_step", broken)
    with pytest.raises(TypeError):
        bench.main(["optimizers", "--parameters", "2000", "--only", "stochastic"])
    assert bench.main(["optimizers", "--parameters", "2000", "--only", "torch"]) == 0


def test_every_peer_of_ours_has_a_contender_and_a_version_range():
    named = {contender.optimizer for contender in optimizers.CONTENDERS.values() if contender.optimizer}
    assert named == {*build.OPTIMIZERS, *peers.PEERS}
    root = Path(bench.__file__).parent
    files = ("requirements.txt", "requirements-bench.txt")
    wanted = "".join((root / name).read_text() for name in files).splitlines()
    for package in (peer.package for peer in peers.PEERS.values()):
        assert any(line.startswith(package + ">=") and "<" in line for line in wanted), package


def test_moments_of_any_length_are_held_in_codes(tmp_path):
    # 10,003 and 10,002 values: no multiple of a block
    names = ["stochastic-8bit", "stochastic-4bit", "stochastic-e4m3", "bitsandbytes"]
    argv = ["optimizers", "--parameters", "40010", "--layouts", "large", "--repeats", "1", "--only", *names]
    state = {row["name"]: row["state_bytes"] for row in run(tmp_path, *argv)["results"]}
    assert 1.06 < state["stochastic-4bit"] < 1.1
    for name in ("stochastic-8bit", "stochastic-e4m3", "bitsandbytes"):
        assert 2.03 < state[name] < 2.1, name


NEW_FORMAT = """
import copy
FORMATS["e4m3-64"] = copy.copy(FORMATS["e4m3"])
FORMATS["e4m3-64"].name, FORMATS["e4m3-64"].block = "e4m3-64", 64
"""
NEW = """
import torch
from typing import NamedTuple
from lowprec.optimizers.build import OPTIMIZERS
from lowprec.optimizers.peers import PEERS, Torch
from lowprec.optimizers.rounded import Rounded

class Numbers(NamedTuple):
    share: float
    rate: float


class Signs(Rounded):
    moments = ("exp_avg",)
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **writing):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **writing)
    def numbers(self, group, step):
        return Numbers(share=1 - group["betas"][0], rate=-float(group["lr"]))
    @staticmethod
    def direction(g, moments, n):
        m = (g - moments[0]) * n.share + moments[0]
        return n.rate * m.sign(), (m,)

OPTIMIZERS["signs"] = Signs
PEERS["new_peer"] = Torch
import bench
from benchmarks import memory, moments, optimizers

names = ["stochastic-e4m3-64", "stochastic-signs", "new-peer"]
with torch.compiler.set_stance("force_eager"):
    argv = ["--repeats", "1", "--device", "cpu", "--out", "out.json", "--only", *names]
    assert bench.main(["optimizers", "--parameters", "20000", "--layouts", "large", *argv]) == 0
print([list(optimizers.CONTENDERS), list(memory.STATES), moments.HOLDERS])
"""


def test_rows_come_from_the_registries_and_new_ones_follow_the_old(tmp_path):
    root = Path(bench.__file__).parent
    shutil.copytree(root / "lowprec", tmp_path / "lowprec")
    formats = tmp_path / "lowprec" / "formats.py"
    before, head, rows = formats.read_text().partition("\nFORMATS = {")
    formats.write_text(before + head + rows.replace("\n}\n", "\n}\n" + NEW_FORMAT, 1))
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", NEW]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    contenders, states, holders = ast.literal_eval(done.stdout.splitlines()[-1])
    for found, known, new in (
        (contenders, list(optimizers.CONTENDERS), {"stochastic-e4m3-64", "stochastic-signs", "new-peer"}),
        (states, list(memory.STATES), {"--set exp_avg=e4m3-64 --set exp_avg_sq=e4m3-64"}),
        (holders, moments.HOLDERS, {"e4m3-64 nearest", "e4m3-64 stochastic"}),
    ):
        assert set(found) == {*known, *new} and [name for name in found if name not in new] == known
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert not any(row["note"] for row in rows.values())
    assert rows["stochastic-signs"]["state_bytes"] == 2 and rows["new-peer"]["state_bytes"] > 4
    # two codes, and two fp32 scales to 32 values
    assert rows["stochastic-e4m3-64"]["state_bytes"] == pytest.approx(2 + 2 * 4 / 64, abs=0.01)


def test_the_rows_that_stood_before_the_registries_keep_their_order():
    names = "stochastic nearest kahan kahan-stochastic split fp32 stochastic-8bit stochastic-4bit torchastic "
    names += "torchao optimi adamw-bf16 bitsandbytes torch torch-fused copy"
    assert [name for name in optimizers.CONTENDERS if name in names.split()] == names.split()
    assert list(memory.STATES)[:3] == ["", "--opt8bit", "--opt4bit"]
    kinds = ("bf16", "int8", "int4")
    before = [f"{kind} {update}" for kind in kinds for update in ("nearest", "stochastic")]
    assert moments.HOLDERS[:8] == ["fp32 nearest", "bitsandbytes", *before]


@pytest.mark.parametrize("layout", ["mixed", "large"])
@pytest.mark.parametrize("n", [1, 3, 6000, 10_000_000])
def test_layouts_hold_just_as_many_parameters(layout, n):
    sizes = [torch.Size(s).numel() for s in optimizers.layout_shapes(layout, n)]
    assert sum(sizes) == n and min(sizes) > 0
    if n == 10_000_000:
        mixed = len(sizes) > 200 and max(sizes) > 500_000 and sorted(sizes)[len(sizes) // 2] < 5000
        assert mixed if layout == "mixed" else len(sizes) == 4


def test_contenders_take_turns():
    bar = SimpleNamespace(set_postfix_str=lambda *a, **k: None, update=lambda: None)
    seen = []

    def turn(name):
        seen.append(name)
        return {"ms": len(seen)}

    cells = [Cell(name, dict(name=name), [partial(turn, name)]) for name in "abc"]
    cells.append(Cell("d", dict(name="d", note="not installed")))
    rows = take_turns(cells, 20, bar)
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"] and "ms" not in rows[3]
    for row in rows[:3]:
        assert row["ms"] == [place for place, name in enumerate(seen, 1) if name == row["name"]]
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds), "one ran twice before another ran once"
    assert len(set(rounds)) > 2, "always in one order: each would always inherit the same contender's caches"


def test_shared_storage_is_counted_once():
    table = torch.zeros(256)
    first = {"step": 3, "code": torch.zeros(10, dtype=torch.uint8), "table": table}
    optimizer = SimpleNamespace(state={0: first, 1: {"table": table, "half": table[:128]}})
    assert state_bytes(optimizer) == 10 + 1024


def test_training_writes_every_single_time(tmp_path, capsys):
    nets, recipes = ["unet:tiny:8:2", "dit:tiny:8:2"], ["fp32", "pure_bf16-stochastic", "opt8bit"]
    result = run(tmp_path, "training", "--nets", *nets, "--recipes", *recipes, "--repeats", "2")
    rows = [(row["net"], row["recipe"]) for row in result["results"]]
    assert rows == [(net, name) for net in nets for name in recipes]
    for row in result["results"]:
        assert all(len(row[key]) == 2 for key in ("ms", "step_ms", "measured_ms", "measured_step_ms"))
        assert all(0 < part < whole for part, whole in zip(row["step_ms"], row["ms"], strict=True))
        assert row["peak_bytes"] is None, "the resident set of one process says nothing about one recipe"
    size = {
        row["recipe"]: row["bytes_per_parameter"]
        for row in result["results"]
        if row["net"].startswith("unet")
    }
    assert size["fp32"] == 16 and size["pure_bf16-stochastic"] == 8 and 10 < size["opt8bit"] < 16
    table = capsys.readouterr().out
    assert "unet:tiny:8:2" in table and table.count("pure_bf16-stochastic") == 2


@pytest.mark.parametrize("whose, asked", [("ours", True), ("torch", False)])
def test_training_takes_torchs_own_products_where_asked(whose, asked, tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr(cpu_products, "settle", devices.append)
    words = "--nets dit:tiny:8:2 --recipes bf16 --repeats 1 --products".split()
    run(tmp_path, "training", *words, whose)
    assert bool(devices) == asked


def test_recipes_that_take_turns_keep_their_own_tf32(monkeypatch):
    monkeypatch.setattr(recipes, "check_machine", lambda *_: [])  # a CPU has no TF32, but takes the setting
    monkeypatch.setattr(gpu_cells, "check_machine", lambda *_: [])
    exact = machine.exact_math
    monkeypatch.setattr(view.View, "exact", lambda self: exact(self.recipe.compute == "tf32"))
    knobs = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [knob.fp32_precision for knob in knobs]
    seen = []

    def look(*_):
        seen.append([knob.fp32_precision for knob in knobs])

    runs, cpu = {}, torch.device("cpu")
    for name in ("tf32", "fp32"):
        run, step = training.make_run(parse_net("dit:tiny:8:2"), RECIPES[name], cpu)
        run.model.register_forward_pre_hook(look)
        runs[name] = step
    for name in ("tf32", "fp32", "tf32"):
        runs[name](False)
    assert seen == [["tf32", "tf32"], ["ieee", "ieee"], ["tf32", "tf32"]]
    cell = dict(net="dit:tiny:8:2", recipe="tf32", compile=False)
    step, _ = gpu_cells.contender(cell, cpu, dry=True)
    reference, _ = gpu_cells.contender(gpu_cells.reference_of(cell), cpu, dry=True)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        for turn, expected in ((step, "tf32"), (reference, "ieee"), (step, "tf32")):
            seen.clear()
            turn()
            assert seen and all(found == [expected, expected] for found in seen)
    finally:
        hook.remove()
    assert [knob.fp32_precision for knob in knobs] == before, "a step leaves torch's settings as they were"


def test_memory_writes_what_is_allocated_and_the_ledger_agrees(tmp_path, capsys):
    every = run(tmp_path, "memory", "--nets", "dit:tiny:8:2", "--batches", "2", "4")["results"]
    rows, kept = ([row for row in every if ("again" in row) == again] for again in (False, True))
    assert len(rows) == len(memory.WRITES) * len(memory.STATES)
    for row in rows:
        assert row["bytes_per_parameter"] == pytest.approx(row["ledger"], abs=1e-9), row["flags"]
        assert row["bytes_per_parameter"] == pytest.approx(
            row["weights"] + row["gradients"] + row["states"], abs=1e-9
        )
    size = {row["flags"]: row["bytes_per_parameter"] for row in rows}
    assert (
        size[""] == 16
        and size["--pure_bf16"] == 8
        and 5 < size["--pure_bf16 --stochastic --opt4bit"] < size["--pure_bf16 --stochastic --opt8bit"] < 8
    )
    table = capsys.readouterr().out
    assert f"| `--pure_bf16 --kahan` | 10.00 | {size['--pure_bf16 --kahan --opt8bit']:.2f} | " in table
    assert len(kept) == 2 * 2 * len(memory.KEPT)
    total = {(row["recipe"], row["batch"], row["again"]): row["total"] for row in kept}
    assert total["stochastic", 4, False] < 0.7 * total["fp32", 4, False]
    assert total["fp32", 4, True] < 0.4 * total["fp32", 4, False] < 0.9 * total["fp32", 2, False] * 2
    sums = re.search(r"^\| fp32 \| 4.0 \| 4.0 \| 8.0 \| 8.0 \| 24.0 \|$", table, re.M)
    assert sums, "a billion parameters in fp32, by document 002's arithmetic"


def test_systems_run_what_train_runs_and_say_what_they_cannot(tmp_path, capsys, monkeypatch):
    small = "--task segment --image_size 16 --batch_size 8"
    table = {"fp32": small, "bf16": f"{small} --bf16", "fp8": f"{small} --fp8 --fp8_backend te"}
    monkeypatch.setattr(systems, "TABLES", {"segment": table})
    argv = ["systems", "--only", "segment", "--repeats", "2", "--train", "6"]
    assert bench.main([*argv[:-1], "3"]) == 2
    assert "--train 3: timing takes 4 steps" in capsys.readouterr().err
    rows = run(tmp_path, *argv)["results"]
    assert [row["name"] for row in rows] == list(table)
    assert "here works" in rows[2]["note"] and not rows[2]["ms"]
    for row in rows[:2]:
        assert len(row["ms"]) == 2 and row["epoch_steps"] == 32 and row["items_a_step"] == 8
        assert row["score"][0] == "mean_iou" and 0 < row["score"][1] < 1
    assert sum(rows[1]["kept"]["bytes"].values()) < sum(rows[0]["kept"]["bytes"].values())
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("| fp32 |")).split(" | ")[2] == "1.00"


def test_the_flags_in_the_table_of_bytes_are_those_of_train():
    table = flags.Table(precision.PRECISION + options.MACHINE)
    parser = table.parser("train.py", "")
    for write, writing in memory.WRITES.items():
        for state, holding in memory.STATES.items():
            config = table.config(vars(parser.parse_args(f"{write} {state}".split())))
            typed = precision.recipe(sites=config.set, **table.pick(config, "recipe"))
            arguments = memory.together(writing, holding)
            for apart in ("grad_release", "states_on"):
                arguments.pop(apart, None)
            assert typed == precision.recipe(**arguments), (write, state)
            assert config.grad_release == ("grad_release" in writing)
            assert config.states_on == writing.get("states_on", "device")


def test_a_table_of_bytes_older_than_a_format_is_still_drawn():
    rows = {name: dict(bytes_per_parameter=8.0) for name in ("", "--opt8bit", "--pure_bf16")}
    rows["--pure_bf16 --opt8bit"] = dict(bytes_per_parameter=6.0)
    lines = memory.memory_table(rows).splitlines()
    assert lines == [
        "| flags | alone | with `--opt8bit` |",
        "|---|---|---|",
        "| (none) | 8.00 | 8.00 |",
        "| `--pure_bf16` | 8.00 | 6.00 |",
    ]


def test_processes_hold_what_arithmetic_says(tmp_path, capsys, monkeypatch):
    two = list(sharding.RECIPES.items())[1:4:2]  # with low parts, and with codes
    monkeypatch.setattr(sharding, "RECIPES", dict(two))
    rows = run(tmp_path, "sharding", "--nets", "dit:tiny:8:2", "--ranks", "2")["results"]
    wanted = [(flags, rank) for flags in sharding.RECIPES for rank in (0, 1)]
    assert [(row["flags"], row["rank"]) for row in rows] == wanted
    for row in rows:  # a block of codes that ranks share is held by each of them
        assert row["held"] == pytest.approx(row["said"], rel=0.04 if "bit" in row["flags"] else 1e-3)
    assert "| one of 2 holds, MiB |" in capsys.readouterr().out


def test_moments_compares_every_way_to_hold_one(tmp_path, capsys):
    rows = run(tmp_path, "moments", "--before", "20", "--after", "10")["results"]
    assert [row["name"] for row in rows] == moments.HOLDERS
    assert all(row["dropped"] > 0.9 and row["others"] > 0.9 for row in rows)
    assert rows[0]["dropped"] == pytest.approx(1, abs=1e-4) == rows[0]["others"]
    table = capsys.readouterr().out
    assert f"| int8, stochastic | {rows[5]['dropped']:.2f} | {rows[5]['others']:.2f} |" in table


def test_weights_in_blocks_lie_at_the_nearest_level():
    weight = torch.linspace(-3, 5, 37).view(1, 37)
    for levels in guides.LEVELS.values():
        held = guides.in_blocks(weight, levels)
        for block, exact in zip(held[0].split(16), weight[0].split(16), strict=True):
            places = levels * exact.abs().max() / levels[-1]
            nearest = (exact.abs()[:, None] - places).abs().amin(1)
            assert torch.allclose((block - exact).abs(), nearest, atol=1e-6)


def test_guides_write_a_row_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(guides, "QUESTIONS", (guides.bare, guides.attention))
    rows = run(tmp_path, "guides")["results"]
    found = {row["what"]: row["value"] for row in rows}
    assert len(rows) == 5 and found["parameters of bdh in nn.Linear"] == 0
    assert 20 < found["attention with queries, keys and values in e4m3"] < 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, -0.1, 3e-5, -1e-8, 0.0])
def test_a_stochastic_write_to_16_bits_is_right_on_average(dtype, value):
    x = torch.full((100_000,), value)
    held = fp16_weights.stochastic(x, dtype, torch.Generator().manual_seed(0))
    places = held.unique().float()
    assert held.dtype == dtype and len(places) <= 2
    assert places.min() <= x[0] <= places.max()
    assert (held.double().mean() - x[0]).abs() <= 0.01 * (places.max() - places.min())


def test_fp16_writes_a_row_for_each_way_and_seed(tmp_path, monkeypatch):
    ways = {name: fp16_weights.WAYS[name] for name in ("fp32", "fp16 weights, Kahan")}
    monkeypatch.setattr(fp16_weights, "WAYS", ways)
    monkeypatch.chdir(tmp_path)
    rows = run(tmp_path, "fp16", "--steps", "2", "--seeds", "1")["results"]
    assert [row["name"] for row in rows] == list(ways)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-3) and rows[0]["loss"] != rows[1]["loss"]


def test_peers_take_turns_with_other_peoples_loops(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    small = "--task rflow --model dit --size tiny/4 --image_size 8 --batch_size 2 --clip_grad 1"
    monkeypatch.setattr(loops, "NETS", {"small": small})
    out = tmp_path / "record.json"
    assert bench.main(["peers", "--only", "small", "--repeats", "2", "--out", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["results"] if row["net"] == "small"]
    assert {(row["loop"], row["kind"]) for row in rows} == set(loops.ROWS)
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 and not row["note"] for row in rows)
    assert next(row["ratio"] for row in rows if f"{row['loop']}, {row['kind']}" == loops.FIRST) == 1
    printed = capsys.readouterr().out
    assert "| Lightning | " in printed and "| Accelerate | - | " in printed
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("loop", ["bare loop", "Lightning", "Accelerate"])
def test_a_peers_loop_trains_its_net(loop, tmp_path):
    """Each step feeds one batch, moves the weights and the average: none is left out to look fast."""
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    flags = "--task rflow --model dit --size tiny/4 --image_size 8 --batch_size 2 --lr 1e-2"
    job = other_loops.Job(flags, str(tmp_path), torch.device("cpu"))
    clipped = []
    job.clip, clip = lambda net: clipped.append(clip(net)), job.clip
    step = other_loops.LOOPS[loop](job, "bf16")
    for _ in range(3):
        step()
    counted, before = job.count, [p.detach().clone() for p in job.net.parameters()]
    step()
    assert job.count == counted + 1 and (clipped or loop == "Accelerate")
    moved = [not torch.equal(p, old) for p, old in zip(job.net.parameters(), before, strict=True)]
    assert all(moved)


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "first | conformance | --gpu"),
        (["optimizers", "--parameters", "0"], "whole number above 0"),
        (["optimizers", "--repeats", "many"], "whole number above 0"),
        (["optimizers", "--only", "adam"], "adam"),
        (["optimizers", "--layouts", "small"], "small"),
        (["optimizers", "--out", "no/such/folder/x.json"], "no such folder"),
        (["optimizers", "--out", "."], "a folder"),
        (["training", "--nets", "unet:small:64"], "MODEL:SIZE:IMAGE:BATCH"),
        (["training", "--nets", "unet:small:64:0"], "MODEL:SIZE:IMAGE:BATCH"),
        (["training", "--nets", "unet:huge:64:8"], "huge"),
        (["training", "--nets", "vae:tiny:8:8"], "vae"),
        (["training", "--recipes", "fp4"], "fp4"),
        (["training", "--recipes", "tf32"], "tf32"),
        (["training", "--steps", "3"], "--steps"),
        (["memory", "--nets", "vae:tiny:8:8"], "vae"),
        (["memory", "--repeats", "3"], "--repeats"),
        (["--gpu", "--dry_run", "--only", "fp4*"], "fp4*: fits no recipe"),
        (["--gpu", "--dry_run", "--nets", "dit:XXL/2:32:8"], "XXL/2"),
        (["--gpu", "--dry_run", "--out", "no/such/folder"], "no such folder"),
        (["--gpu", "--dry_run", "--budget", "0"], "whole number above 0"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(argv, words, capsys):
    try:
        status = bench.main(argv)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("bench.py") and words in err


def test_every_test_that_needs_a_gpu_is_marked_so():
    """pytest -m gpu runs just these. Found by what they do: skip without a CUDA device, or put tensors on
    one.
    """
    marked = 0
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.FunctionDef)
                or not node.name.startswith("test_")
                or node.name == "test_every_test_that_needs_a_gpu_is_marked_so"
            ):
                continue
            decorators = [ast.unparse(d) for d in node.decorator_list]
            is_marked = any(d in ("gpu", "pytest.mark.gpu") for d in decorators)
            body = "\n".join(map(ast.unparse, node.body))
            needs = any(
                d in ("needs_cuda", "needs_hopper") or "skipif(not torch.cuda" in d for d in decorators
            )
            needs = needs or re.search(r"\.cuda\(\)|device='cuda'|\.to\('cuda'\)", body) is not None
            assert is_marked or not needs, (
                f"{path.name}: {node.name} needs a GPU, and is not marked pytest.mark.gpu"
            )
            marked += is_marked
    assert marked >= 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_gets_one_line(capsys):
    assert bench.main(["optimizers", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_both_run_on_cuda(tmp_path):
    names = ["stochastic", "torch-fused", "copy"]
    result = run(tmp_path, *SMALL, "--device", "cuda", "--repeats", "2", "--only", *names)
    assert all(min(row["ms"]) > 0 for row in result["results"])
    recipes = ["fp32", "tf32", "bf16"]
    net = ["--nets", "unet:tiny:8:2"]
    result = run(tmp_path, "training", "--device", "cuda", *net, "--recipes", *recipes, "--repeats", "2")
    assert all(row["peak_bytes"] > 16 * row["parameters"] for row in result["results"])
