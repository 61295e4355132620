"""One flag, one row: names of runs, what goes on, what may differ, YAML, and rows that a task
brings.
"""

import re

import pytest

import strategies
import train
from harness.flags import Flag, FlagTable, natural
from lowprec.errors import Refused

UNNAMED = """name runs device threads workers compile log_every sample_every checkpoint_every export
sample_batch""".split()


# The order of the flags in names, as it has always been.
ORDER = """task model size data image_size steps batch_size accumulate lr warmup weight_decay init_scale beta2
clip_grad loss_weight ema_decay average seed optimizer finetune bf16 fp16 pure_bf16 stochastic kahan
master opt8bit opt4bit growth_interval fp8 fp8_backend fp8_format fp8_recipe amax_history_len
amax_compute_algo sparse24 sparse24_decay set timestep_sampling velocity teacher pairs teacher_steps
min_snr label_dropout guidance sample_steps samples weights device compile threads workers
sample_batch name runs log_every sample_every checkpoint_every export""".split()


def test_flags_keep_their_order():
    assert [name for name in train.DEFAULTS if name in ORDER] == ORDER


@pytest.mark.parametrize(
    "given,name",
    [
        ({}, "default"),
        (
            {"lr": 1e-4, "model": "dit", "set": ["ema=bf16", "islands=norm+embed"]},
            "dit-lr0.0001-ema_bf16-islands_norm+embed",
        ),
        ({"pure_bf16": True, "stochastic": True}, "pure_bf16-stochastic"),
        ({"data": "folder:/a/photos/"}, "folder_photos"),
        ({"finetune": "runs/x/checkpoint.pt"}, "finetune_x"),
        ({"task": "reflow", "teacher": "runs/t/"}, "reflow-teacher_t"),
        ({"vae": "v", "average": ["0.9:bf16"], "fp4": "nvfp4"}, "0.9_bf16-fp4_nvfp4-vae_v"),
        ({"task": "/home/me/mine.py:Mine"}, "mine.py_Mine"),
        ({"sparse24": "srste", "sparse24_decay": 1e-3}, "sparse24_srste-sparse24_decay0.001"),
        (
            {"lr_schedule": "cosine", "weight_decay": 0.1, "weight_decay_on": "all"},
            "cosine-weight_decay0.1-weight_decay_on_all",
        ),
    ],
)
def test_names(given, name):
    assert train.FLAGS.name(train.FLAGS.typed(given)) == name
    assert train.FLAGS.name(train.FLAGS.typed({**given, **dict.fromkeys(UNNAMED, "else")})) == name


# ---- What goes on, what may differ -------------------------------------------------------------------------

FREE = """steps log_every sample_every checkpoint_every workers device name runs export weights samples
sample_batch threads compile teacher checkpoint_activations fsdp grad_release average_on states_on early_stop
epochs profile scores""".split()
AT_SAMPLE = """set sample_steps guidance samples sample_batch weights seed threads data sparse24 export runs
name device task model optimizer scores length prompt temperature top_k vae""".split()
AT_DIAGNOSE = ["data", "device", "model", "optimizer", "task", "threads", "vae"]


def test_what_each_verb_accepts():
    accepted = {
        verb: {row.name for row in train.FLAGS.rows if row.accepts(verb)}
        for verb in ("resume", "sample", "diagnose")
    }
    assert accepted == {"resume": set(FREE), "sample": set(AT_SAMPLE), "diagnose": set(AT_DIAGNOSE)}
    train.FLAGS.check_given({"seed": 2}, "sample", {})
    for given, verb in (
        ({"lr": 1, "seed": 2}, "sample"),
        ({"seed": 2}, "diagnose"),
        ({"model": "dit"}, "sample"),
    ):
        with pytest.raises(Refused, match=f"--{next(iter(given))} can't differ"):
            train.FLAGS.check_given(given, verb, {})


def differences(old, **new):
    table = train.FLAGS
    return table.differences({**table.defaults(), **old}, table.typed({**old, **new}))


def test_what_keeps_a_run_from_going_on():
    assert differences({}, lr=1e-4) == ["--lr was 0.001 and is 0.0001"]
    assert differences({}, **{name: "else" for name in FREE if name != "steps"}, steps=5000) == []
    assert differences({"data": "folder:/a/x"}, data="folder:b/x/") == []
    assert differences({"data": "folder:/a/x"}, data="folder:/a/y") == [
        "--data was folder:/a/x and is folder:/a/y"
    ]
    assert differences({"task": "/a/mine.py:Mine"}, task="mine.py:Mine") == []
    assert differences({"lr_schedule": "linear"}, steps=9) == [
        "--steps was 3000 and is 9", "--lr_schedule linear ends at --steps"
    ]  # fmt: skip
    assert differences({"fp4_finish": 15.0}, steps=9) == [
        "--steps was 3000 and is 9", "--fp4_finish 15 is a percentage of --steps"
    ]  # fmt: skip


def test_files_that_are_older_than_a_flag():
    old = train.FLAGS.defaults()
    for name in set(old) - set(ORDER):
        del old[name]
    assert train.FLAGS.differences(old, train.FLAGS.typed({})) == []
    # before --weight_decay_on a decay shrank everything
    old["weight_decay"] = 0.1
    assert train.FLAGS.config(old).weight_decay_on == "all"
    assert train.FLAGS.differences(old, train.FLAGS.typed({"weight_decay": 0.1})) != []
    assert (
        train.FLAGS.differences(old, train.FLAGS.typed({"weight_decay": 0.1, "weight_decay_on": "all"})) == []
    )


# ---- Rows --------------------------------------------------------------------------------------------------


def test_a_row_gives_everything(capsys):
    rows = [
        Flag("width", 8, "hidden units; 100% of them", type=natural, fits=True),
        Flag("wet", False, "with rain", kind="draw"),
        Flag("kind", "a", "of thing", choices=("a", "b"), titled=True),
        Flag("more", [], "things"),
    ]
    table = FlagTable([*train.FLAGS.rows, *rows])
    parser = table.parser("mine.py", "mine")
    given = vars(parser.parse_args("--width 16 --wet --kind b --more x --more y".split()))
    assert given == {"width": 16, "wet": True, "kind": "b", "more": ["x", "y"]}
    assert table.name(table.typed(given)) == "width16-wet-kind_b-x-y"
    assert "width" in table and "depth" not in table and table["width"].default == 8
    assert table["wet"].accepts("sample") and not table["width"].accepts("sample")
    assert "width" in [row.name for row in table.fitting()]
    assert table.typed({}).more == [] and table.typed({}).more is not rows[3].default
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--width", "0"])
    assert ended.value.code == 2 and "is not a whole number above 0" in capsys.readouterr().err
    parser.topic = "all"
    assert "100% of them (default: 8)" in parser.format_help()
    with pytest.raises(ValueError):
        Flag("x", 1, "", kind="sometimes")


def test_a_tasks_row_takes_the_place_of_a_general_one():
    own = Flag("steps", 500, "fewer", kind="extent", group="training", type=natural)
    table = FlagTable([*train.FLAGS.rows, own])
    assert table.defaults()["steps"] == 500
    assert list(table.defaults()) == list(train.DEFAULTS)


def test_two_prompts_never_have_one_name():
    def named(**given):
        return train.FLAGS.name(train.FLAGS.typed(given), unlike=True)

    prompts = ["a", "a?", "a!", "a b", "a_b", "привет", "слово", "x" * 300, "x" * 300 + "y", "\udce9", ""]
    names = [named(prompt=prompt) for prompt in prompts]
    assert len(set(names)) == len(names) and all(name.isascii() and len(name) < 201 for name in names)
    assert named(set=["ema=bf16"], sample_steps=10) == "ema_bf16-sample_steps10"  # as ever
    assert train.FLAGS.name(train.FLAGS.typed({"prompt": "a?"})) == "a"


def test_yaml_reads_as_typed(tmp_path):
    table, path = train.FLAGS, tmp_path / "run.yaml"
    parser = train.build_parser()
    path.write_text(
        "lr: 1e-4\nbf16: true\nfp16: false\ndata:\nset: {ema: bf16, kahan: on}\naverage: [0.9:bf16]\n"
    )
    given = {"lr": 1e-4, "bf16": True, "set": ["ema=bf16", "kahan=on"], "average": ["0.9:bf16"]}
    assert table.read_yaml(path, parser) == given
    path.write_text("bf16: !!bool true")
    assert table.read_yaml(path, parser) == {"bf16": True}
    path.write_text("bf16: yes\nfp16: No\nnesterov: on\nprompt: 12:30\nname: 2026-11-23\nlr: ~\nsteps: 010")
    given = {"bf16": True, "nesterov": "on", "prompt": "12:30", "name": "2026-11-23", "steps": 10}
    assert table.read_yaml(path, parser) == given  # YAML's own: true, False, True, 750, a date, None, 8


def test_all_rows_are_whole():
    for row in strategies.flag_table().rows:
        assert row.help and row.help[0] == row.help[0].strip() and not row.help.endswith("."), row.name
        assert row.default is None or isinstance(row.default, (bool, int, float, str, list)), row.name
        assert row.choices is None or row.default in row.choices, row.name


def test_the_list_names_every_task_and_its_nets():
    said = strategies.listing()
    assert all(re.search(rf"^  {name} +\w+", said, re.M) for name in strategies.TASKS)
    assert "bdh (tiny, 1M, 3M, 25M, 100M)" in said and "medmnist:FILE.npz" in said and "lion" in said
