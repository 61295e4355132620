"""Other programs' names for our flags: the documents' lines, Lightning's trainer, and what has no equal."""

from pathlib import Path

import pytest

import strategies
import train
from harness import names

ROOT = Path(names.__file__).parent.parent
SNIPPETS = {  # lines of the five documents, as YAML: what they come to
    "trainer:\n  precision: bf16-mixed\n  gradient_clip_val: 1.0  # Increase if needed": {
        "bf16": True,
        "clip_grad": 1.0,
    },
    "use_amp: False\namp_dtype: bfloat16": {},
    "batch_size: 16\ncompile_model: True\nuse_amp: True\namp_dtype: bfloat16": {
        "batch_size": 16,
        "compile": True,
        "bf16": True,
    },
    "batch_size: 8\nuse_amp: True\namp_dtype: float16": {"batch_size": 8, "fp16": True},
    "batch_size: 8\nnum_epochs: 100\nuse_amp: True\namp_dtype: bfloat16\nearly_stopping_patience: 20": {
        "batch_size": 8,
        "epochs": 100,
        "bf16": True,
        "early_stop": 20,
    },
    "USE_4BIT_OPTIMIZER: True\nCOMPUTE_DTYPE: bfloat16": {"opt8bit": True, "bf16": True},
    "USE_FP8: True\nFP8_AMAX_HISTORY_LEN: 1024\nFP8_AMAX_COMPUTE_ALGO: max": {
        "fp8": True,
        "fp8_recipe": "delayed",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    },
    "USE_FP8: False\nUSE_4BIT_OPTIMIZER: False\nCOMPUTE_DTYPE: float32": {},
    "globals.BATCH_SIZE_PER_GPU: 4": {"batch_size": 4},
    "trainer: {max_epochs: 5, accumulate_grad_batches: 2, precision: bf16-true}": {
        "epochs": 5,
        "accumulate": 2,
        "pure_bf16": True,
    },
}
COMMANDS = {
    "--bf16 globals.BATCH_SIZE_PER_GPU=4": {"bf16": True, "batch_size": 4},
    "--precision 16-mixed --max_steps=7": {"fp16": True, "steps": 7},
    "--use_amp --amp-dtype bfloat16 --Batch-Size 2": {"bf16": True, "batch_size": 2},
    "--learning-rate 3e-4 --set ema=bf16": {"lr": 3e-4, "set": ["ema=bf16"]},
    "--use_fp8 true --compile_model --lr 1": {
        "fp8": True,
        "fp8_recipe": "delayed",
        "compile": True,
        "lr": 1.0,
    },
}
REFUSED = {
    "trainer: {precision: 16-true}": "write bf16-true or 16-mixed",
    "trainer: {precision: 8}": "precision is 32-true, bf16-mixed",
    "trainer: {devices: 8}": "devices has no equal here: start processes by torchrun",
    "use_amp: maybe": "use_amp is true, false, and not 'maybe'",
    "num_epochs: 2\nmax_epochs: 3": "another name says --epochs 2",
    "learning_rat: 1": "unknown key 'learning_rat'; the keys are the flags of train.py without their dashes; "
    "near it is learning_rate",
    "trainer: {max_steps: x}": "'x' is not a whole number",
}


@pytest.mark.parametrize("text", SNIPPETS)
def test_the_documents_own_lines_are_understood(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    given = train.FLAGS.read_yaml(path, train.build_parser())
    assert given == SNIPPETS[text]
    strategies.settle(given)  # and go together


@pytest.mark.parametrize("line", COMMANDS)
def test_other_names_may_be_typed(line):
    assert vars(train.build_parser().parse_args(line.split())) == COMMANDS[line]


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_equal_is_refused_in_a_line_that_says_what_to_write(text, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        train.FLAGS.read_yaml(path, train.build_parser())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and REFUSED[text] in error, error


def test_a_batch_of_one_process_counts_for_all_of_them(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert vars(train.build_parser().parse_args(["--batch_size_per_gpu", "3"])) == {"batch_size": 12}


def test_each_name_leads_to_a_flag_and_is_none_itself_and_the_page_has_them_all():
    for name, row in names.NAMES.items():
        flags = [row] if isinstance(row, str) else []
        if isinstance(row, dict):
            flags = [flag for ours in row.values() if isinstance(ours, dict) for flag in ours]
        assert all(flag in train.FLAGS for flag in flags) and name not in train.FLAGS, name
    assert names.table() in (ROOT / "docs" / "names.md").read_text()
