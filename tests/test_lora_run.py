"""train.py --lora: adapters of a finetuning, from the command to drawing and export."""

import torch
from cli import checkpoint, draw, in_a_folder_of_its_own, quick, summary  # noqa: F401
from safetensors.torch import load_file

LORA = "--finetune runs/source --lora 4 --set frozen=bf16 --pure_bf16 --stochastic --weight_decay 0.1".split()


def test_finetune_draw_and_export_and_start_no_other_run(monkeypatch, capsys):
    assert quick(name="source", steps=2) == 0
    assert quick(*LORA, "--export", "tuned.safetensors", name="tuned") == 0
    held = checkpoint("tuned")["precision"]["model"]
    factors = [key for key in held if "lora_" in key]
    assert len(factors) > 20 and all(held[key].dtype == torch.bfloat16 for key in factors)
    assert load_file("tuned.safetensors").keys() == checkpoint("source")["precision"]["model"].keys()
    assert draw(monkeypatch, "runs/tuned") == summary("tuned")["scores"]
    for wish in (["--finetune", "runs/tuned"], ["--task", "distill", "--teacher", "runs/tuned"]):
        capsys.readouterr()
        assert quick(*wish, name="next") == 2
        said = capsys.readouterr().err
        assert "holds adapters" in said and "runs/source" in said


def test_no_flow_reads_a_vae_of_adapters(capsys):
    assert quick("--task", "vae", name="source", steps=1) == 0
    assert quick("--task", "vae", *LORA, name="tuned", steps=1) == 0
    capsys.readouterr()
    assert quick("--vae", "runs/tuned", name="next") == 2
    assert "holds adapters" in capsys.readouterr().err
