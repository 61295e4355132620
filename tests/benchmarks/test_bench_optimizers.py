"""bench.py optimizers: its contenders, their turns and their rows."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_bench
import torch
from test_bench import SMALL, run

import bench
from benchmarks import optimizers
from benchmarks.allocated import state_bytes
from benchmarks.common import Cell, take_turns
from lowprec.optimizers import build, peers

eager = test_bench.eager

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


def test_every_optimiser_of_ours_takes_part(tmp_path):
    names = [name for name, contender in optimizers.CONTENDERS.items() if contender.ours]
    result = run(tmp_path, *SMALL, "--repeats", "1", "--only", *names)
    assert {"stochastic", "stochastic-adafactor", "stochastic-muon"} < set(names)
    assert all(row["ms"] and not row["note"] for row in result["results"])


def test_bytes_of_codes_that_an_object_of_its_own_holds_are_counted():
    """As flashoptim has them, which needs a GPU."""
    held = SimpleNamespace(_quantized=torch.zeros(2000, dtype=torch.int8))
    assert state_bytes(SimpleNamespace(state={torch.ones(2000): dict(exp_avg=held)})) == 2000


def test_a_peer_that_is_not_installed_is_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimi", None)
    result = run(tmp_path, *SMALL, "--repeats", "2", "--only", "optimi", "torch")
    rows = {row["name"]: row for row in result["results"]}
    assert rows["optimi"]["ms"] == [] and len(rows["torch"]["ms"]) == 2
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("optimi "))
    assert line.endswith("not installed: pip install torch-optimi")


def test_a_bug_of_ours_is_no_line(monkeypatch):
    def broken(name, params):
        raise TypeError("a bug")

    monkeypatch.setattr(optimizers, "make_step", broken)
    with pytest.raises(TypeError):
        bench.main(["optimizers", "--parameters", "2000", "--only", "stochastic"])
    assert bench.main(["optimizers", "--parameters", "2000", "--only", "torch"]) == 0


def test_every_peer_of_ours_has_a_contender_and_a_version_range():
    named = {contender.optimizer for contender in optimizers.CONTENDERS.values() if contender.optimizer}
    assert named == {*build.OPTIMIZERS, *peers.PEER_OPTIMIZERS}
    root = Path(bench.__file__).parent
    files = ("requirements.txt", "requirements-bench.txt")
    wanted = "".join((root / name).read_text() for name in files).splitlines()
    for package in (peer.package for peer in peers.PEER_OPTIMIZERS.values()):
        assert any(line.startswith(package + ">=") and "<" in line for line in wanted), package


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
