"""bench.py --gpu, without a GPU: the cells, the record, the page, the budget, and the processes."""

import fcntl
import json
import math
import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from common import cpu_scales_rows

import bench
from benchmarks import gpu, gpu_cells, gpu_plan, gpu_record, subjects
from benchmarks.worker import Here, Lost, Worker
from experiments.bench import largest_batch, reduction
from lowprec.errors import Refused


@pytest.fixture(autouse=True)
def eager():
    """Not compiled: these tests are about the record, not about the kernels."""
    with torch.compiler.set_stance("force_eager"):
        yield


NET = "dit:tiny:8:2"


def dry_run(folder, *more):
    options = ["--nets", NET, "--compile", "off", "--out", str(folder)]
    assert bench.main(["--gpu", "--dry_run", *options, *more]) == 0
    record = json.loads((folder / "gpu-dry-run.json").read_text())
    return record, {gpu_cells.cell_key(row): row for row in record["results"]}


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    return folder, *dry_run(folder)


@cpu_scales_rows
def test_a_dry_run_runs_every_recipe(dry):
    folder, record, rows = dry
    assert {name for _, name, _ in rows} == set(gpu.GPU_RECIPES)
    for (_, name, _), row in rows.items():
        if row["status"] == "refused":
            not_here = ("tf32", "pure_bf16-flashoptim", "fp8-te-", "fp8-torchao-delayed")
            assert name.startswith(not_here), row["note"]
            assert row["note"] and "\n" not in row["note"] and "ms" not in row
            continue
        assert row["status"] == "measured", row["note"]
        assert len(row["ms"]) == len(row["reference_ms"]) == 1
        assert row["ms"][0] > 0 and row["first_step_s"] > 0
        assert row["peak_bytes"] is None, "the resident set of one process says nothing about one recipe"
        assert (row["flops_share"] is not None) == ("fp8" in name or "2:4" in name)
    assert rows[NET, "fp8-scaled_mm-rowwise", False]["flops_share"] > 0.9
    losses = [row["loss"] for row in rows.values() if "loss" in row]
    assert len(losses) > 12
    assert max(losses) - min(losses) < 1e-3 * losses[0], "recipes got different weights or inputs"
    assert rows[NET, "pure_bf16-stochastic-opt8bit-fp8", False]["bytes_per_parameter"] < 7
    assert {"sources", "libraries", "cuda", "commit", "torch"} <= set(record["machine"])
    assert record["command"].startswith("python bench.py --gpu --dry_run")


def test_the_page_has_a_line_a_cell(dry):
    folder, record, rows = dry
    text = (folder / "gpu-dry-run.md").read_text()
    assert text == gpu_record.record_page(record)
    lines = {
        (m[1], m[2] == "yes"): m[0]
        for m in re.finditer(r"^\| `([^`]+)` \| (yes|no) \|.*$", text, re.M)
    }
    assert set(lines) == {key[1:] for key in rows}
    assert lines["bf16", False].startswith(
        f"| `bf16` | no | {2e3 / rows['dit:tiny:8:2', 'bf16', False]['ms'][0]:.1f} | 1.00 | - | 16.00 | - | "
    )
    assert lines["tf32", False].endswith("use fp32 or bf16 |")


def test_run_again_it_measures_what_is_missing_or_was_refused(dry, tmp_path, monkeypatch):
    _, record, rows = dry
    kept = [dict(row) for row in record["results"] if row["recipe"] not in ("bf16", "fp32")]
    kept[1].update(status="out of memory", note="too large")
    (tmp_path / "gpu-dry-run.json").write_text(json.dumps({**record, "results": kept}))
    seen = []

    def measured_again(cell, **_):
        seen.append(gpu_cells.cell_key(cell))
        return {**rows[gpu_cells.cell_key(cell)], "loss": -1.0}

    monkeypatch.setattr(gpu, "measure_cell", measured_again)
    _, again = dry_run(tmp_path)
    refused = {k for k, row in rows.items() if row["status"] == "refused"} - {gpu_cells.cell_key(kept[1])}
    assert set(seen) == {k for k in rows if k[1] in ("bf16", "fp32")} | refused
    assert set(again) == set(rows) and all(
        again[gpu_cells.cell_key(row)] == row for row in kept if gpu_cells.cell_key(row) not in seen
    )
    seen.clear()
    dry_run(tmp_path, "--retry", "--only", kept[1]["recipe"])
    assert gpu_cells.cell_key(kept[1]) in seen


def test_it_does_not_go_on_in_a_record_of_other_code(tmp_path, dry, capsys):
    _, record, _ = dry
    (tmp_path / "gpu-dry-run.json").write_text(
        json.dumps({**record, "machine": {**record["machine"], "sources": "other"}})
    )
    capsys.readouterr()
    assert bench.main(["--gpu", "--dry_run", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "other code or versions" in err and "--fresh" in err


FAULTS = {
    "bf16": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    "fp32": RuntimeError("an illegal\nmemory access"),
    "tf32": Refused("no such thing here"),
    "pure_bf16-kahan": KeyError("k"),
}


def test_a_cell_that_fails_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    saved, real = [], gpu.save_record
    monkeypatch.setattr(gpu, "save_record", lambda *args: saved.append(1) or real(*args))

    def contender(cell, device, dry):
        if cell["recipe"] in FAULTS:
            raise FAULTS[cell["recipe"]]
        return lambda: torch.tensor(0.5), lambda: dict(
            batch_size=2, parameters=1, bytes_per_parameter=8.0, flops_share=None
        )

    monkeypatch.setattr(gpu_cells, "contender", contender)
    names = [*FAULTS, "pure_bf16-split"]
    _, rows = dry_run(tmp_path, "--only", *names, "--compile", "off")
    rows = {row["recipe"]: row for row in rows.values()}
    assert {name: row["status"] for name, row in rows.items()} == {
        "bf16": "out of memory",
        "fp32": "failed",
        "tf32": "refused",
        "pure_bf16-kahan": "failed",
        "pure_bf16-split": "measured",
    }
    assert rows["fp32"]["note"] == "RuntimeError: an illegal" and rows["tf32"]["note"] == "no such thing here"
    assert (
        rows["pure_bf16-split"]["note"] == "no ratio: bf16 does not fit beside it"
        and "reference_ms" not in rows["pure_bf16-split"]
    )
    assert len(saved) == len(names), "written after every cell"
    assert "images/s, - x bf16" in capsys.readouterr().out


def test_the_budgets_end_is_no_fault_of_the_cell(monkeypatch):
    class Slow(Here):
        def do(self, cell, seconds):
            raise Lost("took longer", timeout=True)

    monkeypatch.setattr(gpu, "Here", Slow)
    todo, rows = gpu_cells.cells([NET]), {}
    args = SimpleNamespace(dry_run=True, budget=5, cell_limit=300, jobs=1)
    assert (
        gpu.measure_all(todo, rows, lambda: None, args, 1, torch.device("cpu")) == len(todo)
        and not rows
    )
    args = SimpleNamespace(dry_run=True, budget=None, cell_limit=300, jobs=1)
    assert gpu.measure_all(todo, rows, lambda: None, args, 1, torch.device("cpu")) == 0
    assert {row["note"] for row in rows.values()} == {"took longer"} and len(rows) == len(todo)


def test_cells_are_measured_at_once_by_as_many_processes_and_none_is_lost(monkeypatch):
    both = threading.Barrier(2)  # broken unless two cells are under way together

    class Fake(Here):
        def do(self, cell, seconds):
            both.wait(timeout=60)
            return {**cell, "status": "refused", "note": "said"}

    monkeypatch.setattr(gpu, "Here", Fake)
    todo, rows = gpu_cells.cells([NET])[:8], {}
    args = SimpleNamespace(dry_run=True, budget=None, cell_limit=300, jobs=2)
    assert gpu.measure_all(todo, rows, lambda: None, args, 1, torch.device("cpu")) == 0
    assert set(rows) == {gpu_cells.cell_key(cell) for cell in todo}


def test_a_process_measures_alone_and_builds_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_cells, "GPU_LOCK", tmp_path / "turn")

    def another(kind):
        with open(gpu_cells.GPU_LOCK, "w") as other:
            fcntl.flock(other, kind | fcntl.LOCK_NB)

    on_gpu = SimpleNamespace(type="cuda")
    with gpu_cells.gpu_turn(on_gpu, fcntl.LOCK_SH):
        another(fcntl.LOCK_SH)
        with pytest.raises(BlockingIOError):
            another(fcntl.LOCK_EX)
    with gpu_cells.gpu_turn(on_gpu, fcntl.LOCK_EX), pytest.raises(BlockingIOError):
        another(fcntl.LOCK_SH)
    another(fcntl.LOCK_EX)


def test_a_process_that_hangs_or_ends_is_replaced():
    # fork, for speed: these functions need nothing of what torch set up
    for function, argument, words in (
        (time.sleep, 60, "took longer than 1 s"),
        (os._exit, 3, "exit status 3"),
        (math.sqrt, -1, "exit status 1"),
    ):
        worker = Worker(function, "fork")
        with pytest.raises(Lost, match=words) as lost:
            worker.do(argument, 1 if function is time.sleep else 60)
        assert worker.process is None and lost.value.timeout == (function is time.sleep)
    worker = Worker(math.sqrt, "fork")
    assert worker.do(4, 60) == 2.0
    process = worker.process
    assert worker.do(9, 60) == 3.0 and worker.process is process
    worker.close(wait=0)  # a fork holds the pipe's other end too, and never learns that nobody listens
    assert worker.do(16, 60) == 4.0 and worker.process is not process
    worker.close(wait=0)


@pytest.mark.gpu
def test_the_gpu_bench_runs_on_one(tmp_path):
    names = ["bf16", "fp32", "pure_bf16-stochastic", "generate-bf16"]
    argv = ["--gpu", "--nets", "dit:tiny:8:16", "--only", *names, "--compile", "off", "--repeats", "2"]
    with torch.compiler.set_stance("default"):
        assert bench.main([*argv, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu-*.json")
    rows = {row["recipe"]: row for row in json.loads(path.read_text())["results"]}
    assert all(
        row["status"] == "measured" and len(row["ms"]) == 2 and row["peak_bytes"] > 0 for row in rows.values()
    ), rows
    assert rows["fp32"]["peak_bytes"] > 20 * rows["fp32"]["parameters"], (
        "weights, gradients, moments and average"
    )
    assert (
        2 * rows["fp32"]["parameters"]
        < rows["generate-bf16"]["peak_bytes"]
        < rows["pure_bf16-stochastic"]["peak_bytes"]
    )


# ---- The plan ----------------------------------------------------------------------------------------------


def test_the_plan_fits_into_half_an_hour_and_needs_a_gpu(capsys):
    assert sum(step.seconds + 10 for step in gpu_plan.PLAN) <= 1800
    assert bench.main(["--gpu", "--plan"]) == 0
    printed = capsys.readouterr().out
    for step in gpu_plan.PLAN:
        assert f"| {step.name} | {step.seconds} | `python {step.words}` |" in printed
    assert bench.main(["--gpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_step_of_the_plan_keeps_its_budget_and_leaves_its_outcome(tmp_path):
    steps = [
        gpu_plan.PlannedStep("a", 60, "-c print('said')", ""),
        gpu_plan.PlannedStep("b", 60, "-c 1/0", ""),
        gpu_plan.PlannedStep("c", 1, "-c __import__('time').sleep(60)", ""),
    ]
    path = tmp_path / "plan.json"
    assert gpu_plan.run_steps(steps, path, {}) == 1
    kept = json.loads(path.read_text())["steps"]
    assert [step["ended"] for step in kept] == ["done", "failed", "stopped"]
    assert kept[0]["said"] == ["said"] and "ZeroDivisionError" in kept[1]["said"][-1]
    assert kept[2]["seconds"] < 30


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 7, 40, 41, 1000])
def test_the_largest_batch_is_found_to_a_sixteenth(limit):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest_batch.largest_that_fits(fits, most=512)
    assert found <= min(limit, 512) <= found + max(0, found // 16)
    assert len(tried) == len(set(tried)) < 16


def test_the_search_for_a_batch_is_rehearsed_on_a_cpu_and_refused_without_a_limit(tmp_path, capsys):
    words = "batch --device cpu --nets dit:tiny:8:1 --recipes fp32 pure_bf16-stochastic".split()
    assert bench.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nothing says when it is full; --most 4" in said
    out = tmp_path / "batch.json"
    assert bench.main([*words, "--most", "4", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["batch"] for row in rows] == [4, 4]
    assert rows[1]["told"] > rows[0]["told"] > 1000  # what `advise` tells of this machine


def test_a_search_that_is_interrupted_keeps_what_it_found(tmp_path, monkeypatch, capsys):
    def searched(spec, name, args):
        if name == "pure_bf16-stochastic":
            raise KeyboardInterrupt
        return dict(net=spec, recipe=name, batch=3, used_bytes=None, tried=[2, 3, 4])

    monkeypatch.setattr(largest_batch, "searched", searched)
    out = tmp_path / "batch.json"
    words = "batch --device cpu --most 4 --nets dit:tiny:8:1 --recipes".split()
    assert bench.main([*words, "fp32", "pure_bf16-stochastic", "--out", str(out)]) == 0
    assert [row["recipe"] for row in json.loads(out.read_text())["results"]] == ["fp32"]
    assert "what was found is kept" in capsys.readouterr().err
    assert bench.main([*words, "pure_bf16-stochastic", "--out", str(tmp_path / "none.json")]) == 130
    assert not (tmp_path / "none.json").exists()


@pytest.mark.gpu
def test_the_search_for_a_batch_on_cuda(tmp_path):
    out = tmp_path / "batch.json"
    words = "batch --nets dit:tiny:8:1 --recipes fp32 pure_bf16-stochastic --most 4".split()
    assert bench.main([*words, "--out", str(out)]) == 0
    for row in json.loads(out.read_text())["results"]:
        assert row["batch"] == 4 and row["used_bytes"] > 0


def test_a_peers_optimiser_is_a_cell_like_others(monkeypatch):
    monkeypatch.setitem(subjects.PEER_CLASSES, "flashoptim", "torch.optim:AdamW")
    cell = dict(net=NET, recipe="pure_bf16-flashoptim", compile=False)
    row = gpu_cells.measure_cell(cell, device="cpu", rounds=1, dry=True)
    assert row["status"] == "measured" and row["bytes_per_parameter"] == pytest.approx(8, abs=0.1)


def test_gradients_in_bf16_carry_a_few_hundred_times_their_rounding():
    found, exact = torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])
    assert reduction.gradient_decibels(found, exact) == pytest.approx(33.979, abs=1e-3)
    [row] = reduction.reduction(SimpleNamespace(nets=[NET], device=torch.device("cpu")), None)
    assert 35 < row["decibels"] < 70
