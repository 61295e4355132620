"""bench.py peers --tasks: a step of each task beside a bare loop, and the
discrete VAE of bench.py systems.
"""

import json
from pathlib import Path

import pytest
import torch

import bench
from experiments.bench import loops, other_loops, systems

ROOT = Path(bench.__file__).parent
TINY = "--model dit --size tiny/4 --image_size 8 --batch_size 2"
TASKS = {
    "classify": "--task classify --image_size 8 --batch_size 2",
    "distill": "--task distill --batch_size 2 --teacher {flow}",
}


def test_tasks_take_turns_with_a_bare_loop(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loops, "TIMED_TASKS", TASKS)
    monkeypatch.setattr(loops, "RUNS_STARTED_FROM", {"flow": f"--task rflow {TINY}"})
    monkeypatch.setattr(loops, "ROUND_LENGTH_MS", 1)
    out = tmp_path / "record.json"
    assert bench.main(["peers", "--tasks", "--repeats", "2", "--threads", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = record["results"]
    assert record["bench"] == "peers"
    assert [(r["task"], r["loop"]) for r in rows] == [(t, b) for t in TASKS for b in ("bare loop", "ours")]
    assert all(len(r["ms"]) == 2 and min(r["ms"]) > 0 and r["steps"] > 0 for r in rows)
    assert all(r["flags"] == TASKS[r["task"]] for r in rows)  # and no folder of this machine
    assert loops.task_speeds_table(rows) in capsys.readouterr().out
    assert not out.with_suffix(".png").exists()


def test_the_table_of_tasks_is_of_ratios_within_a_round():
    rows = [dict(task="a", loop="bare loop", flags="--task a", ms=[1.0, 10.0, 2.0, 1.0])]
    rows += [dict(task="a", loop="ours", flags="--task a", ms=[1.1, 11.0, 3.0, 1.0])]
    assert loops.bare_to_ours(*rows) == pytest.approx([1.1, 1.1, 1.5, 1.0])
    line = loops.task_speeds_table(rows).splitlines()[-1]
    assert line == "| a | `--task a` | 2 | 2 | 1.10 | 1.02 to 1.40 |"


def test_a_bare_loop_keeps_the_average_that_a_consistency_model_learns_from(tmp_path):
    """Without it the bare loop would have less to do, and the loss another target."""
    flags = f"--task consistency {TINY} --target_decay 0.5 --lr 1e-2"
    job = other_loops.Job(flags, str(tmp_path), torch.device("cpu"))
    asked, loss = [], job.loss
    job.loss = lambda net, batch: (asked.append(job.task.target(net)), loss(net, batch))[1]
    step = other_loops.bare_loop(job, "fp32")
    step()
    first = [p.detach().clone() for p in job.net.parameters()]
    step()
    target = job.task.target(job.net)
    assert target is not job.net and asked == [target, target]
    sides = list(zip(target.parameters(), first, job.net.parameters(), strict=True))
    assert any(not torch.equal(before, now) for _, before, now in sides)
    for held, before, now in sides:  # the first step's weights begin the average
        assert torch.allclose(held, (before + now) / 2, atol=1e-6)


def test_a_task_that_is_not_there_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["peers", "--tasks", "paint"])
    assert stop.value.code == 2 and "paint" in capsys.readouterr().err


def test_the_discrete_vae_by_itself_keeps_what_the_record_says(tmp_path, monkeypatch):
    """Bytes are no times: any machine finds them again."""
    path = ROOT / "experiments" / "bench" / "cpu-dvae.json"
    recorded = {(r["table"], r["name"]): r for r in json.loads(path.read_text())["results"]}
    assert {table for table, _ in recorded} == set(systems.TABLES_APART)
    kept = ["fp32", "pure bf16 stochastic, logits too"]
    rows = {name: systems.TABLES_APART["dvae-512"][name] for name in kept}
    monkeypatch.setattr(systems, "TABLES_APART", {"dvae-512": rows})
    out = tmp_path / "record.json"
    argv = ["systems", "--only", "dvae-512", "--train", "0", "--repeats", "1", "--out", str(out)]
    assert bench.main(argv) == 0
    found = json.loads(out.read_text())["results"]
    assert [row["name"] for row in found] == kept
    for row in found:
        assert row["kept"] == recorded["dvae-512", row["name"]]["kept"] and len(row["ms"]) == 1
        assert row["items"] == "frames" and "score" not in row
    tokens = found[0]["items_a_step"] * 512 * 6 * 6  # frames of 24x24 pixels
    assert found[0]["kept"]["total"] > 2 * 4 * tokens  # log-probabilities and soft tokens, each once


def test_tables_apart_run_where_they_are_named_alone():
    args = bench.build_parser().parse_args(["systems"])
    assert args.only == list(systems.SYSTEM_TABLES) and not set(args.only) & set(systems.TABLES_APART)
