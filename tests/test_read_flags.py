"""The command: how flags are read, and which are refused."""

import ast
import os
import re
from pathlib import Path

import cli
import pytest
from cli import QUICK, ROOT, command, no_training, one_line, quick

import options
import precision
import strategies
import train
from lowprec import recipes

in_a_folder_of_its_own = cli.in_a_folder_of_its_own


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--steps 50", "--lr 0.001 is never reached: --warmup 100 does not end before --steps 50"),
        ("--steps 101 --lr_schedule cosine", ""),
        ("--label_dropout 0.5", ""),
        ("--condition masks --label_dropout 0.5", "--label_dropout 0.5 changes nothing: the net is given no"),
        ("--noise_seed 7", "--noise_seed 7 changes nothing: this recipe rounds nothing at random"),
        ("--pure_bf16 --noise_seed 7", "--noise_seed 7 changes nothing"),
        ("--pure_bf16 --stochastic --noise_seed 7", ""),
        ("--fp4 nvfp4 --noise_seed 7", ""),
        ("--fp4 nvfp4 --fp4_grads nearest --noise_seed 7", "--noise_seed 7 changes nothing"),
        ("--pure_bf16 --set reduce=bf16", "--set reduce and reduce_update change nothing: this is one"),
        ("--pure_bf16", ""),
        ("--growth_interval 7 --bf16", "--growth_interval 7 changes nothing: --fp16 alone scales the loss"),
        ("--growth_interval 7 --pure_bf16", "--growth_interval 7 changes nothing"),
        ("--growth_interval 7 --fp16", ""),
    ],
)
def test_flags_that_change_nothing_are_said_to(flags, said, capsys):
    assert command("--dry_run", "--ema_warmup", *flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    idle = ("never reached", "change nothing", "changes nothing")
    warned = [line for line in lines if any(words in line for words in idle)]
    assert warned == [] if not said else said in warned[0]


@pytest.mark.parametrize("loss_weight, bad", [("3e38", "weight for one"), ("1e22", "exp_avg_sq of")])
def test_weights_and_moments_that_are_not_finite_replace_no_checkpoint(loss_weight, bad, capsys):
    flags = ["--checkpoint_every", 1, "--log_every", 1, "--warmup", 0]
    assert quick(*flags, steps=1) == 0
    before = Path("runs/run/checkpoint.pt").read_bytes()
    assert quick(*flags, "--loss_weight", loss_weight, "--clip_grad", 0, name="other", steps=1) == 2
    err = capsys.readouterr().err
    assert "not finite after step 1, " in err and bad in err
    assert not Path("runs/other/checkpoint.pt").exists() and not Path("runs/other/summary.json").exists()
    assert Path("runs/run/checkpoint.pt").read_bytes() == before


def test_a_yaml_file_equals_the_flags_and_the_command_line_wins(capsys):
    Path("run.yaml").write_text(
        "steps: 7\nlr: 1e-4\npure_bf16: true\nstochastic: true\nfp16: false\nmodel: dit\ndata:\nset: "
        "{ema: bf16, islands: embed}\naverage: [0.9:bf16]\n"
    )
    assert command("--config", "run.yaml", "--dry_run") == 0
    from_file = capsys.readouterr().out
    flags = "--steps 7 --lr 1e-4 --pure_bf16 --stochastic --model dit --set ema=bf16 --set islands=embed"
    flags = [*flags.split(), "--average", "0.9:bf16"]
    assert command(*flags, "--dry_run") == 0
    assert capsys.readouterr().out == from_file and "--lr=0.0001" in from_file.split()
    assert command("--config", "run.yaml", "--steps", 9, "--set", "ema=fp32", "--dry_run") == 0
    out = capsys.readouterr().out
    assert {"--steps=9", "--set=ema=fp32", "--model=dit"} <= set(out.split())
    for text, typed in (("epochs: 2", "--steps=5"), ("steps: 7", "--epochs=3")):  # both say how long
        Path("long.yaml").write_text(text)
        assert command("--config", "long.yaml", typed, "--dry_run") == 0
        assert typed in capsys.readouterr().out.split()
    Path("kahan.yaml").write_text("pure_bf16: true\nset: {kahan: on}\n")  # a YAML parser reads: true
    assert command("--config", "kahan.yaml", "--dry_run") == 0
    assert re.search(r"^kahan +on ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--task ddpm --model dit --size XL/2 --image_size 64 --pure_bf16 --master split",
        "--fp16",
        "--opt8bit",
        "--task segment --pure_bf16 --stochastic",
        "--pure_bf16 --optimizer torchastic",
        "--fp8 --model dit",
    ],
)
def test_dry_run_prints_flags_and_ledger_and_writes_nothing(flags, capsys, monkeypatch, tmp_path):
    no_training(monkeypatch)
    assert command("--dry_run", *flags.split()) == 0
    out = capsys.readouterr().out
    shown = {word.partition("=")[0] for word in out.partition("what each flag is")[2].split()}
    given = {word for word in flags.split() if word.startswith("--")}
    rows = options.TRAINING_FLAGS + precision.PRECISION_FLAGS + options.MACHINE_FLAGS + options.RUN_FLAGS
    off = {f"--{row.name}" for row in rows if row.default is False} - given
    assert {f"--{row.name}" for row in rows if row.default} | given <= shown and not off & shown
    assert not {"--latent_channels", "--frames", "--teacher"} & shown  # which other tasks read
    for site in recipes.SITES.keys() - {"frozen"}:  # this net has no frozen weights
        assert re.search(rf"^{site} ", out, re.M), site
    assert not list(tmp_path.iterdir())


def test_check_prints_the_matrix(capsys, tmp_path):
    assert not command("--check")
    out = capsys.readouterr().out
    for word in ("cpu", "bf16", "fp16", "fp8", "opt8bit", "tf32", "start with: python train.py"):
        assert word in out
    cells = [line.split() for line in out.splitlines()]
    assert ["bfloat16", "16", "3.38953139e+38", "1.17549435e-38", "1.0078125", "2.4"] in cells
    assert ["float16", "16", "65504", "6.10351562e-05", "1.00097656", "3.3"] in cells
    assert "mps" not in out  # --device has none
    assert "a billion parameters" in out and out.index("GiB at once") > out.index("float8_e5m2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["rflow", "segment", "language"])
def test_help_names_what_most_runs_need_and_the_tasks_own_flags_and_in_full_every_flag(task, capsys):
    def named(*topic):
        assert command("--task", task, "--help", *topic) == 0
        return set(re.findall(r"^  --(\w+)\b", capsys.readouterr().out, re.M))

    own = {row.name for row in strategies.find_task(task).flags}
    brief, whole = named(), named("all")
    assert own | {"steps", "pure_bf16", "config", "list"} <= brief and "amax_history_len" not in brief
    verbs = "config ledger dry_run check list advise trial diagnose sample".split()
    assert whole == {*strategies.flag_table(task).defaults(), *verbs}
    assert "kahan" in named("precision") and "steps" not in named("precision")
    assert command("--help") == 0 and len(capsys.readouterr().out.splitlines()) < 80
    assert command("--help", "nonsense") == 2 and "choose from" in one_line(capsys)


def attributes_of_configs():
    """The names that the code reads of what holds a run's flags."""
    rooms = [path for room in ("lowprec", "harness", "tasks") for path in (ROOT / room).rglob("*.py")]
    for path in [*rooms, *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
                if holder in ("config", "c", "given"):
                    yield node.attr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_main_process_alone_prints(rank, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert command("--list") == 0
    assert bool(capsys.readouterr().out) == (rank == "0")


def test_every_flag_is_read():
    """A flag that nothing reads would parse and do nothing."""
    read = {*attributes_of_configs()}
    for task in strategies.TASKS:
        # others go as keywords to a recipe, its method or the scaler
        names = {row.name for row in strategies.flag_table(task).rows if not row.to}
        assert names <= read, task


def test_the_folder_is_named_after_the_flags():
    assert command(*QUICK, "--steps", 1, "--kahan", "--pure_bf16") == 0
    assert os.listdir("runs") == ["steps1-batch_size8-warmup0-pure_bf16-kahan-sample_steps2-samples20"]


def test_a_learning_rate_whose_step_no_float_holds(capsys):
    assert quick("--optimizer", "torch", "--lr", 1e38, "--checkpoint_every", 1) == 2
    assert "a step is too large for fp32: use a smaller --lr" in capsys.readouterr().err.splitlines()[-1]


def test_drawings_of_other_flags_have_other_names():
    """A flag that is typed with its default too: the training may have had another value."""
    table = strategies.flag_table()
    steps = table["sample_steps"].default
    typed = [{}, {"sample_steps": steps}, {"weights": "ema"}, {"seed": 0}, {"seed": 1}]
    typed += [{"seed": 1, "weights": "ema"}]
    assert table["weights"].default == "ema" and table["seed"].default == 0
    assert len({train._label(100, given, table) for given in typed}) == len(typed)
