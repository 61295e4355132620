"""bench.py: what it runs, in which order, and what it writes. No speed is asserted: a test machine has others
on it.
"""

import json
import re
from pathlib import Path

import cli
import pytest
import rank_server
import torch
from rank_server import ranks_messages

import bench
import options
import precision
import train
from benchmarks import gpu_cells, memory, training
from benchmarks.common import RECIPES, parse_net
from experiments.bench import first, fp16_weights, guides, loops, moments, other_loops, sharding, systems
from harness import flags
from lowprec import machine, recipes, view
from lowprec.kernels import cpu_products

ranks = rank_server.ranks
SMALL = ["optimizers", "--parameters", "2000", "--layouts", "large"]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Not compiled, of small nets: these tests are about the table, not about the kernels."""
    cli.shorten(monkeypatch.setattr)
    with torch.compiler.set_stance("force_eager"):
        yield


def run(tmp_path, *argv):
    out, device = tmp_path / "out.json", [] if "--device" in argv else ["--device", "cpu"]
    assert bench.main([*argv, *device, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_training_writes_every_single_time(tmp_path, capsys):
    nets, recipes = ["dit:tiny:8:2"], ["fp32", "pure_bf16-stochastic", "opt8bit"]
    result = run(tmp_path, "training", "--nets", *nets, "--recipes", *recipes, "--repeats", "2")
    rows = [(row["net"], row["recipe"]) for row in result["results"]]
    assert rows == [(net, name) for net in nets for name in recipes]
    for row in result["results"]:
        assert all(len(row[key]) == 2 for key in ("ms", "step_ms", "measured_ms", "measured_step_ms"))
        assert all(0 < part < whole for part, whole in zip(row["step_ms"], row["ms"], strict=True))
        assert row["peak_bytes"] is None, "the resident set of one process says nothing about one recipe"
    size = {row["recipe"]: row["bytes_per_parameter"] for row in result["results"]}
    assert size["fp32"] == 16 and size["pure_bf16-stochastic"] == 8 and 10 < size["opt8bit"] < 16
    table = capsys.readouterr().out
    assert "dit:tiny:8:2" in table and table.count("pure_bf16-stochastic") == 1


def test_training_takes_torchs_own_products_where_asked(tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr(cpu_products, "settle_products", devices.append)
    run(tmp_path, "training", *"--nets dit:tiny:8:2 --recipes bf16 --repeats 1 --products torch".split())
    assert not devices


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
    reference, _ = gpu_cells.contender(gpu_cells.reference_cell(cell), cpu, dry=True)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        for turn, expected in ((step, "tf32"), (reference, "ieee"), (step, "tf32")):
            seen.clear()
            turn()
            assert seen and all(found == [expected, expected] for found in seen)
    finally:
        hook.remove()
    assert [knob.fp32_precision for knob in knobs] == before, "a step leaves torch's settings as they were"


def test_memory_writes_what_is_allocated_and_the_ledger_agrees(tmp_path, capsys, monkeypatch):
    few = {
        "WRITES": ("", "--pure_bf16 --stochastic", "--pure_bf16 --kahan"),
        "MOMENT_FLAGS": ("", "--opt8bit"),
        "ACTIVATION_RECIPES": ("fp32", "stochastic"),
    }
    for table, names in few.items():
        monkeypatch.setattr(memory, table, {name: getattr(memory, table)[name] for name in names})
    every = run(tmp_path, "memory", "--nets", "dit:tiny:8:2", "--batches", "2", "4")["results"]
    rows, kept = ([row for row in every if ("again" in row) == again] for again in (False, True))
    assert len(rows) == len(memory.WRITES) * len(memory.MOMENT_FLAGS)
    for row in rows:
        assert row["bytes_per_parameter"] == pytest.approx(row["ledger"], abs=1e-9), row["flags"]
        held = row["weights"] + row["gradients"] + row["states"]
        assert row["bytes_per_parameter"] == pytest.approx(held, abs=1e-9)
    size = {row["flags"]: row["bytes_per_parameter"] for row in rows}
    assert size[""] == 16 and 7 < size["--pure_bf16 --kahan --opt8bit"] < size["--pure_bf16 --kahan"] == 10
    table = capsys.readouterr().out
    assert f"| `--pure_bf16 --kahan` | 10.00 | {size['--pure_bf16 --kahan --opt8bit']:.2f} |" in table
    assert len(kept) == 2 * 2 * len(memory.ACTIVATION_RECIPES)
    total = {(row["recipe"], row["batch"], row["again"]): row["total"] for row in kept}
    assert total["stochastic", 4, False] < 0.7 * total["fp32", 4, False]
    assert total["fp32", 4, True] < 0.4 * total["fp32", 4, False] < 0.9 * total["fp32", 2, False] * 2
    sums = re.search(r"^\| fp32 \| 4.0 \| 4.0 \| 8.0 \| 8.0 \| 24.0 \|$", table, re.M)
    assert sums, "a billion parameters in fp32, by document 002's arithmetic"


def test_systems_run_what_train_runs_and_say_what_they_cannot(tmp_path, capsys, monkeypatch):
    small = "--task segment --image_size 16 --batch_size 8"
    table = {"fp32": small, "bf16": f"{small} --bf16", "fp8": f"{small} --fp8 --fp8_backend te"}
    monkeypatch.setattr(systems, "SYSTEM_TABLES", {"segment": table})
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
    table = flags.FlagTable(precision.PRECISION_FLAGS + options.MACHINE_FLAGS)
    parser = table.parser("train.py", "")
    for write, writing in memory.WRITES.items():
        for state, holding in memory.MOMENT_FLAGS.items():
            config = table.config(vars(parser.parse_args(f"{write} {state}".split())))
            typed = precision.recipe(sites=config.set, **table.pick(config, "recipe"))
            arguments = memory.joined_flags(writing, holding)
            for apart in ("grad_release", "states_on"):
                arguments.pop(apart, None)
            assert typed == precision.recipe(**arguments), (write, state)
            assert config.grad_release == ("grad_release" in writing)
            assert config.states_on == writing.get("states_on", "device")


def test_processes_hold_what_arithmetic_says(tmp_path, capsys, monkeypatch, ranks):
    def on_ranks(function, words, nprocs, start_method):
        assert ranks(nprocs, "sharding_of_a_rank", *words) == [0] * nprocs, ranks_messages(ranks)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharding.mp, "start_processes", on_ranks)
    with_codes = list(sharding.SHARDED_RECIPES.items())[3]
    monkeypatch.setattr(sharding, "SHARDED_RECIPES", dict([with_codes]))
    rows = run(tmp_path, "sharding", "--nets", "dit:tiny:8:2", "--ranks", "2")["results"]
    wanted = [(flags, rank) for flags in sharding.SHARDED_RECIPES for rank in (0, 1)]
    assert [(row["flags"], row["rank"]) for row in rows] == wanted
    for row in rows:  # a block of codes that ranks share is held by each of them
        assert row["held"] == pytest.approx(row["said"], rel=0.04 if "bit" in row["flags"] else 1e-3)
    assert "| one of 2 holds, MiB |" in capsys.readouterr().out


def test_moments_compares_every_way_to_hold_one(tmp_path, capsys):
    rows = run(tmp_path, "moments", "--before", "20", "--after", "10")["results"]
    assert [row["name"] for row in rows] == moments.MOMENT_HOLDERS
    assert all(row["dropped"] > 0.9 and row["others"] > 0.9 for row in rows)
    assert rows[0]["dropped"] == pytest.approx(1, abs=1e-4) == rows[0]["others"]
    table = capsys.readouterr().out
    assert f"| int8, stochastic | {rows[5]['dropped']:.2f} | {rows[5]['others']:.2f} |" in table


def test_awq_changes_a_layers_output_less_than_rounding_to_nearest():
    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(32, 8, 3), torch.randn(4, 32, 5, 5)
    x[:, ::4] *= 30  # AWQ is for channels that are larger than others
    exact = layer.weight.detach().clone()
    with torch.no_grad():
        wanted = layer(x)
        levels = guides.INT4_LEVELS
        ways = guides.in_blocks(exact, levels), guides.in_blocks_by_awq(layer, x, levels)
        assert torch.equal(layer.weight, exact)
        errors = []
        for weight in ways:
            layer.weight.copy_(weight)
            errors.append((layer(x) - wanted).square().mean())
    assert errors[1] < 0.95 * errors[0]


def test_guides_write_a_row_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(guides, "QUESTIONS", (guides.bare, guides.attention))
    rows = run(tmp_path, "guides")["results"]
    found = {row["what"]: row["value"] for row in rows}
    assert len(rows) == 5 and found["parameters of bdh in nn.Linear"] == 0
    assert 20 < found["attention with queries, keys and values in e4m3"] < 40


@pytest.mark.parametrize("value", [-0.1, 3e-5, 0.0])
def test_a_stochastic_write_to_16_bits_is_right_on_average(value):
    x = torch.full((100_000,), value)
    held = fp16_weights.stochastic_16_bit(x, torch.float16, torch.Generator().manual_seed(0))
    places = held.unique().float()
    assert held.dtype == torch.float16 and len(places) <= 2
    assert places.min() <= x[0] <= places.max()
    assert (held.double().mean() - x[0]).abs() <= 0.01 * (places.max() - places.min())


def test_fp16_writes_a_row_for_each_way_and_seed(tmp_path, monkeypatch):
    ways = {name: fp16_weights.WAYS_TO_HOLD_WEIGHTS[name] for name in ("fp32", "fp16 weights, Kahan")}
    monkeypatch.setattr(fp16_weights, "WAYS_TO_HOLD_WEIGHTS", ways)
    monkeypatch.chdir(tmp_path)
    rows = run(tmp_path, "fp16", "--steps", "2", "--seeds", "1")["results"]
    assert [row["name"] for row in rows] == list(ways)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-3) and rows[0]["loss"] != rows[1]["loss"]


def test_peers_take_turns_with_other_peoples_loops(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    small = "--task rflow --model dit --size tiny/4 --image_size 8 --batch_size 2 --clip_grad 1"
    for name in list(loops.LOOP_NETS):
        monkeypatch.delitem(loops.LOOP_NETS, name)
    monkeypatch.setitem(loops.LOOP_NETS, "small", small)
    out = tmp_path / "record.json"
    assert bench.main(["peers", "--only", "small", "--repeats", "2", "--out", str(out)]) == 0
    rows = [row for row in json.loads(out.read_text())["results"] if row["net"] == "small"]
    assert {(row["loop"], row["kind"]) for row in rows} == set(loops.LOOPS_AND_KINDS)
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 and not row["note"] for row in rows)
    assert next(row["ratio"] for row in rows if f"{row['loop']}, {row['kind']}" == loops.REFERENCE_LOOP) == 1
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
        ([], "| first |"),
        (["optimizers", "--parameters", "0"], "whole number above 0"),
        (["optimizers", "--only", "adam"], "adam"),
        (["optimizers", "--out", "no/such/folder/x.json"], "there is no folder"),
        (["training", "--nets", "unet:small:64"], "MODEL:SIZE:IMAGE:BATCH"),
        (["training", "--nets", "unet:huge:64:8"], "huge"),
        (["training", "--recipes", "tf32"], "tf32"),
        (["training", "--steps", "3"], "--steps"),
        (["memory", "--repeats", "3"], "--repeats"),
        (["--gpu", "--dry_run", "--only", "fp4*"], "fp4*: fits no recipe"),
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


@pytest.mark.gpu
def test_both_run_on_cuda(tmp_path):
    names = ["stochastic", "torch-fused", "copy"]
    result = run(tmp_path, *SMALL, "--device", "cuda", "--repeats", "2", "--only", *names)
    assert all(min(row["ms"]) > 0 for row in result["results"])
    recipes = ["fp32", "tf32", "bf16"]
    net = ["--nets", "unet:tiny:8:2"]
    result = run(tmp_path, "training", "--device", "cuda", *net, "--recipes", *recipes, "--repeats", "2")
    assert all(row["peak_bytes"] > 16 * row["parameters"] for row in result["results"])


ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "experiments" / "bench" / "cpu-first.json").read_text())
ROWS = {row["name"]: row for row in RECORD["results"]}


def test_a_first_command_is_run_to_its_end_and_seen(tmp_path):
    out = tmp_path / "record.json"
    asked = ["--only", "classify", "--steps", "4", "--threads", "1", "--out", str(out)]
    assert bench.main(["first", *asked]) == 0
    record = json.loads(out.read_text())
    [row] = record["results"]
    assert record["command"].endswith("--threads 1 --out record.json")  # no folder of this machine
    assert row["steps"] == 4 and row["command"] == "python train.py --task classify --steps 4"
    assert 0 < row["pictures"]["raw.png"] < row["seconds"] and row["training_seconds"] < row["seconds"]
    assert 0 <= row["scores"]["accuracy"] <= 1 and "accuracy" in first.result(row)


@pytest.mark.parametrize("first", first.FIRST_COMMANDS.values(), ids=first.FIRST_COMMANDS)
def test_first_commands_are_commands_of_train(first):
    train.build_parser().parse_args(first.flags.format(runs="runs").split())


def test_the_record_is_of_every_first_command_to_its_end():
    assert list(ROWS) == list(first.FIRST_COMMANDS)
    assert RECORD["settings"]["steps"] is None and RECORD["machine"]["clean"]
    assert all(row["seconds"] < 300 for row in ROWS.values()), "docs/speed.md: within five minutes"


def test_a_folder_that_holds_the_run_is_refused_since_it_would_go_on(tmp_path, capsys):
    (tmp_path / "classify").mkdir()
    assert bench.main(["first", "--only", "classify", "--steps", "4", "--runs", str(tmp_path)]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert not list((tmp_path / "classify").iterdir())


def test_a_billion_parameters_take_the_bytes_of_their_own_net():
    def parts(net, states):
        held = dict(weights=2.0, gradients=2.0, states=states)
        names = {memory.typed({k: v for k, v in flags.items() if k not in (*memory.EMULATED_FP8, "bf16")})
                 for flags in memory.ACTIVATION_RECIPES.values()}
        return [dict(net=net, flags=name, **held) for name in names]

    rows = [dict(net="b", recipe=name, batch=1, again=False, total=8) for name in memory.ACTIVATION_RECIPES]
    table = memory.billion_table(rows, parts("a", 9.0) + parts("b", 3.0), 1)
    assert " 3.0 |" in table and " 9.0 |" not in table


TINY = "--model dit --size tiny/4 --image_size 8 --batch_size 2"
TASKS = {
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
