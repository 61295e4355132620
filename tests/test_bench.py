"""bench.py: what it runs, in which order, and what it writes. No speed is asserted: a test machine has others on it."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import bench


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
    names = ["stochastic", "kahan", "split", "fp32", "stochastic-8bit", "stochastic-4bit", "torchastic", "bitsandbytes", "torch", "torch-fused", "copy"]
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
    assert state["copy"] is None
    table = capsys.readouterr().out
    for layout in ("mixed", "large"):
        part = table[table.index(f"\n{layout}: 6,000 parameters"):]
        assert all(any(line.startswith(name + " ") for line in part.splitlines()) for name in names)


def test_ratio_is_to_ours_stochastic(tmp_path, capsys):
    result = run(tmp_path, *SMALL, "--repeats", "3", "--only", "stochastic", "torch")
    medians = {row["name"]: sorted(row["ms"])[1] for row in result["results"]}
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert float(lines["stochastic"][3]) == 1
    assert float(lines["torch"][3]) == pytest.approx(medians["torch"] / medians["stochastic"], abs=0.006)


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

    monkeypatch.setattr(bench, "make_step", broken)
    with pytest.raises(TypeError):
        bench.main(["optimizers", "--parameters", "2000", "--only", "stochastic"])
    assert bench.main(["optimizers", "--parameters", "2000", "--only", "torch"]) == 0


def test_every_peer_of_ours_has_a_contender_and_a_version_range():
    import precision

    assert {optimizer for _, _, optimizer in bench.CONTENDERS.values() if optimizer} == set(precision.PEERS)
    root = bench.Path(bench.__file__).parent
    wanted = "".join((root / name).read_text() for name in ("requirements.txt", "requirements-bench.txt")).splitlines()
    for package in (peer[1] for peer in precision.PEERS.values() if peer):
        assert any(line.startswith(package + ">=") and "<" in line for line in wanted), package


@pytest.mark.parametrize("layout", ["mixed", "large"])
@pytest.mark.parametrize("n", [1, 3, 6000, 10_000_000])
def test_layouts_hold_just_as_many_parameters(layout, n):
    sizes = [torch.Size(s).numel() for s in bench.layout_shapes(layout, n)]
    assert sum(sizes) == n and min(sizes) > 0
    if n == 10_000_000:
        mixed = len(sizes) > 200 and max(sizes) > 500_000 and sorted(sizes)[len(sizes) // 2] < 5000
        assert mixed if layout == "mixed" else len(sizes) == 4


def test_contenders_take_turns():
    bar, seen = SimpleNamespace(set_postfix_str=lambda *a, **k: None, update=lambda: None), []
    actions = {name: lambda name=name: seen.append(name) or name.upper() for name in "abc"}
    results = bench.take_turns(actions, 20, bar)
    assert results == {name: [name.upper()] * 20 for name in "abc"}
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds), "a contender ran twice before another ran once"
    assert len(set(rounds)) > 2, "always in one order: each would always inherit the same contender's caches"


def test_shared_storage_is_counted_once():
    table = torch.zeros(256)
    first = {"step": 3, "code": torch.zeros(10, dtype=torch.uint8), "table": table}
    assert bench.state_bytes(SimpleNamespace(state={0: first, 1: {"table": table, "half": table[:128]}})) == 10 + 1024


def test_training_writes_every_single_time(tmp_path, capsys):
    nets, recipes = ["unet:tiny:8:2", "dit:tiny:8:2"], ["fp32", "pure_bf16-stochastic", "opt8bit"]
    result = run(tmp_path, "training", "--nets", *nets, "--recipes", *recipes, "--repeats", "2")
    rows = [(row["net"], row["recipe"]) for row in result["results"]]
    assert rows == [(net, name) for net in nets for name in recipes]
    for row in result["results"]:
        assert all(len(row[key]) == 2 for key in ("ms", "step_ms", "measured_ms", "measured_step_ms"))
        assert all(0 < part < whole for part, whole in zip(row["step_ms"], row["ms"]))
        assert row["peak_bytes"] is None, "the resident set of one process says nothing about one recipe"
    size = {row["recipe"]: row["bytes_per_parameter"] for row in result["results"] if row["net"].startswith("unet")}
    assert size["fp32"] == 16 and size["pure_bf16-stochastic"] == 8 and 10 < size["opt8bit"] < 16
    table = capsys.readouterr().out
    assert "unet:tiny:8:2" in table and table.count("pure_bf16-stochastic") == 2


def test_memory_writes_what_is_allocated_and_the_ledger_agrees(tmp_path, capsys):
    rows = run(tmp_path, "memory", "--nets", "dit:tiny:8:2")["results"]
    assert len(rows) == len(bench.WRITES) * len(bench.STATES)
    for row in rows:
        assert row["bytes_per_parameter"] == pytest.approx(row["ledger"], abs=1e-9), row["flags"]
        assert row["bytes_per_parameter"] == pytest.approx(row["weights"] + row["gradients"] + row["states"], abs=1e-9)
    size = {row["flags"]: row["bytes_per_parameter"] for row in rows}
    assert size[""] == 16 and size["--pure_bf16"] == 8 and 5 < size["--pure_bf16 --stochastic --opt4bit"] < size["--pure_bf16 --stochastic --opt8bit"] < 8
    table = capsys.readouterr().out
    assert f"| `--pure_bf16 --kahan` | 10.00 | {size['--pure_bf16 --kahan --opt8bit']:.2f} | " in table


def test_moments_compares_every_way_to_hold_one(tmp_path, capsys):
    rows = run(tmp_path, "moments", "--before", "20", "--after", "10")["results"]
    assert [row["name"] for row in rows] == bench.HOLDERS
    assert all(row["dropped"] > 0.9 and row["others"] > 0.9 for row in rows)
    assert rows[0]["dropped"] == pytest.approx(1, abs=1e-4) == rows[0]["others"]
    table = capsys.readouterr().out
    assert f"| int8, stochastic | {rows[5]['dropped']:.2f} | {rows[5]['others']:.2f} |" in table


@pytest.mark.parametrize("argv, words", [
    ([], "optimizers | training | memory | moments"),
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
])
def test_bad_input_gets_one_line_and_status_2(argv, words, capsys):
    try:
        status = bench.main(argv)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("bench.py") and words in err


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
