"""What is asked of every task: a run that was cut equals a whole one bit for bit, is drawn from and examined;
recipes train; what does not fit is refused in one line.
"""

import math
import shutil
from pathlib import Path

import cli
import common
import pytest
import torch
from cli import (
    LOOP,
    QUICK,
    after_step,
    assert_same,
    assert_trained,
    checkpoint,
    command,
    content,
    draw,
    metrics,
    one_line,
    quick_words,
    summary,
)

import doctor
from tasks.autoencoder import Autoencoder

in_a_folder_of_its_own = cli.in_a_folder_of_its_own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Hardly trained runs that others start from: runs/teacher, an rflow, and runs/vae."""
    runs = {"teacher": QUICK, "vae": ["--task", "vae", *LOOP]}
    return cli.trained_once(tmp_path_factory, {name: [*flags, "--steps", 1] for name, flags in runs.items()})


def run(flags, *more, name="run", steps=4):
    words = flags.split()
    return command(*quick_words(words), *words, "--name", name, "--steps", steps, *more)


TEXT = "--task language --block 16 --length 8 --batch_size 4"
CLIPS = "--image_size 16 --clips 24 --frames 2 --slots 3 --batch_size 4"
STEVE = f"--task steve --vocab_size 16 {CLIPS}"
REFLOW = "--task reflow --teacher runs/teacher --pairs 50 --teacher_steps 4"
DISTILL = "--task distill --teacher runs/teacher"
DELAYED = "--fp8 --fp8_recipe delayed --fp8_backend emulate"
LOW = "--pure_bf16 --stochastic"

# flags of a run, and what the doctor says of it
RUNS = {
    "classify": (f"--task classify {LOW} --set ema=bf16", "--set ema=fp32"),
    "gpt": (f"{TEXT} {LOW} --set ema=bf16", "--set ema=fp32"),
    "moe": (f"{TEXT} --model moe --optimizer muon {DELAYED}", "fp8"),
    "bdh": (f"{TEXT} --model bdh {DELAYED}", "fp8"),
    "segment in 3-D": (f"--task segment --dims 3 --image_size 16 {LOW} --set ema=bf16", "--set ema=fp32"),
    "vae": (f"--task vae --adversarial 0.1 {LOW} --set vae_encode=fp16", "vae_encode"),
    "rflow in latents": (f"--vae runs/vae {LOW} --set vae_decode=bf16", "vae_decode"),
    "rflow with a perceptual term": (f"--perceptual 0.1 {LOW} --set perceptual=bf16", ""),
    "rflow of another run": (f"--finetune runs/teacher {LOW} --set ema=bf16", "--set ema=fp32"),
    "rflow from masks": ("--data synthetic --image_size 16 --condition masks --model dit", ""),
    "reflow": (f"{REFLOW} {LOW} --set ema=bf16", "--set ema=fp32"),
    "distill": (f"{DISTILL} {LOW} --set ema=bf16", "--set ema=fp32"),
    "consistency": (
        "--task consistency --double_every 2 --target_decay 0.999 --set target=bf16",
        "--set target=fp32, or target_update=stochastic",
    ),
    "consistency with a teacher": (f"--task consistency --teacher runs/teacher {LOW}", ""),
    "steve": (f"{STEVE} {LOW} --set gumbel=bf16", "--set gumbel=fp32"),
    "slotcontrast": (f"--task slotcontrast {CLIPS} {LOW} --set recurrent=bf16", "--set recurrent=fp32"),
}


@pytest.mark.parametrize("flags, told", RUNS.values(), ids=RUNS)
def test_a_run_that_was_cut_equals_a_whole_one_and_is_drawn_from_and_examined(
    flags, told, teachers, monkeypatch, capsys
):
    often = ["--checkpoint_every", 2]
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda trainer: shutil.copytree("runs/run", "runs/cut"))
        assert run(flags, *often) == 0
    Path("runs/run").rename("runs/whole")
    Path("runs/cut").rename("runs/run")
    assert checkpoint()["step"] == 2
    assert run(flags, *often) == 0
    assert_same(checkpoint()["precision"], checkpoint("whole")["precision"])
    assert metrics() == metrics("whole")
    scores = summary("whole")["scores"]
    assert summary()["scores"] == scores
    drawn = draw(monkeypatch, "runs/whole")["ema"]
    assert drawn | scores["ema"] == drawn
    capsys.readouterr()
    monkeypatch.setattr(doctor, "FURTHER_STEPS", 3)
    assert command("--diagnose", "runs/whole") in (0, 1)
    assert told in " ".join(capsys.readouterr().out.split())


RECIPES = [  # of a task, and the recipe
    ("--task classify", "--fp16"),
    ("--task classify", "--pure_bf16 --kahan --set buffers=bf16 --set loss=bf16"),
    ("--task classify --model vit", f"{LOW} --fp8 --fp8_backend emulate --opt8bit"),
    ("--task classify --model vit", "--sparse24 srste"),
    (TEXT, f"{LOW} --accumulate 2 --checkpoint_activations"),
    (f"{TEXT} --model moe", f"{LOW} --fp4 nvfp4"),
    (f"{TEXT} --model moe", "--fp16 --checkpoint_activations --accumulate 2"),
    (f"{TEXT} --model bdh", "--pure_bf16 --kahan --set islands=embed"),
    ("--task vae", f"{LOW} --opt8bit --set islands=norm+final"),
    ("--task vae --perceptual 0.1 --adversarial 0.1", "--set loss=bf16 --set perceptual=bf16"),
    ("--task ddpm --vae runs/vae --sample_steps 2 --model dit", LOW),
    (REFLOW, "--bf16 --set ema=bf16 --average 0.9:bf16"),
    (DISTILL, "--bf16 --set timesteps=bf16 --accumulate 2"),
    ("--task consistency", "--pure_bf16 --kahan --opt8bit --set target=bf16"),
    ("--task consistency --model dit --size tiny/4", "--fp8 --fp8_backend emulate"),
    (STEVE, "--pure_bf16 --set softmax=bf16 --set logits=bf16 --set recurrent=bf16"),
    (f"--task slotcontrast {CLIPS}", "--fp16 --init_loss_scale 16 --sparse24 srste"),
    ("--task ddpm --sample_steps 2 --perceptual 0.1", "--pure_bf16 --optimizer torch --set ema=bf16"),
]


@pytest.mark.parametrize("task, recipe", RECIPES)
def test_recipes_train(task, recipe, teachers, stepped):
    if "opt8bit" in recipe:
        pytest.importorskip("bitsandbytes")
    assert run(f"{task} {recipe}", steps=2) == 0
    assert_trained(stepped, recipe, steps=2)
    scores = summary()["scores"]["ema"]
    assert all(math.isfinite(value) for value in scores.values() if isinstance(value, float))


# ---- What does not fit -------------------------------------------------------------------------------------


def spoil(name, source, change):
    """A copy of a run whose checkpoint was changed: change(state, its average)."""
    shutil.copytree(f"runs/{source}", f"runs/{name}")
    state = checkpoint(name)
    change(state, state["precision"]["averages"]["ema"]["shadow"])
    torch.save(state, f"runs/{name}/checkpoint.pt")


def with_fewer_classes(state, shadow):
    name = next(name for name in shadow if name.startswith("class_embedding"))
    shadow[name] = shadow[name][:-1].clone()


def narrow(state, shadow):
    shadow["vae.decoder.blocks.0.conv.weight"] = torch.zeros(3, 2, 3, 3)


def large(state, shadow):
    state["precision"]["model"]["_extra_state"] = torch.tensor(16)


def colour(state, shadow):
    shadow.update(Autoencoder(3, 8).named_parameters())


@pytest.fixture(scope="module")
def odd(trained, tmp_path_factory):
    """A folder with runs and files that don't fit."""
    folder = tmp_path_factory.mktemp("odd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("lowprec.kernels.compiled._compiled", common.uncompiled)
        cli.shorten(patch.setattr)
        shutil.copytree(trained, "runs")
        for name, flags in {
            "ddpm": "--task ddpm",
            "segment": "--task segment --image_size 16",
            "half2": f"{DISTILL} --teacher_steps 4",
            "half1": "--task distill --teacher runs/half2",
            "inside": "--vae runs/vae",
        }.items():
            assert run(flags, name=name, steps=1) == 0
        spoil("moved", "teacher", with_fewer_classes)
        spoil("narrow", "vae", narrow)
        spoil("colour", "vae", colour)
        spoil("large", "vae", large)
        spoil("nan", "vae", lambda _, shadow: shadow["vae.post_quant_conv.conv.bias"].fill_(math.nan))
        Path("notes.txt").write_text("no checkpoint")
    return folder


FLOW = "--task reflow --teacher runs/teacher"
REFUSED = {
    "--task reflow": "add --teacher CHECKPOINT",
    "--teacher runs/teacher": "is for --task reflow, distill and consistency, and this is --task rflow",
    "--task reflow --teacher nowhere": "no checkpoint at nowhere",
    "--task reflow --teacher notes.txt": "no checkpoint of this program",
    "--task reflow --teacher runs/ddpm": "was trained with --task ddpm",
    f"{FLOW} --length 64": "--length is for --task language",
    f"{FLOW} --model dit": "--model dit differs from the teacher's unet",
    f"{FLOW} --image_size 16": "--image_size 16 differs from the teacher's 8",
    f"{FLOW} --data cifar10:x": "cifar10:x differs from the teacher's digits",
    f"{FLOW} --velocity noise-clean": "--velocity noise-clean differs from the teacher's clean-noise",
    "--task reflow --teacher runs/moved": "don't fit digits as it is now",
    f"{FLOW} --pairs 0": "above 0",
    f"{FLOW} --teacher_steps 1001": "from 1 to 1000",
    f"{FLOW} --vae runs/vae": "--vae",
    "--task reflow --teacher runs/inside": "not in latents",
    "--task distill": "add --teacher CHECKPOINT",
    f"{DISTILL} --teacher_steps 5": "use 6",
    f"{DISTILL} --perceptual 1": "drop --perceptual",
    "--task distill --teacher runs/half2 --teacher_steps 8": "was distilled to draw in 2",
    "--task distill --teacher runs/half1": "nothing left to halve",
    f"{DISTILL} --finetune runs/teacher": "drop --finetune",
    "--task consistency --set target_update=stochastic": "nothing is rounded",
    "--task consistency --target_decay 1": "from 0 to below 1",
    "--target_decay 0.9": "is for --task consistency, and this is --task rflow: add --task consistency",
    "--set target=bf16": "unknown site 'target'",
    f"{DISTILL} --teacher_steps 8 --timestep_sampling logit-normal": "--timestep_sampling logit-normal",
    "--task consistency --timestep_sampling logit-normal": "--timestep_sampling logit-normal",
    "--finetune runs/teacher --init_scale 2": "--init_scale 2 scales new weights",
    "--sample runs/teacher --vae runs/vae": "was trained on images, not in latents",
    "--vae nowhere": "no checkpoint at nowhere",
    "--vae runs/teacher": "was trained with --task rflow: give a run of --task vae",
    "--vae runs/narrow": "its weights don't fit the vae that its flags speak of",
    "--vae runs/colour": "was trained on images of 3x8x8, and those of digits are 1x8x8",
    "--vae runs/large": "was trained on images of 1x16x16",
    "--vae runs/nan": "its weights are not finite",
    "--vae runs/vae --image_size 16": "add --image_size 8",
    "--vae runs/vae --model dit --size tiny/4 --vae_weights 0123": "was made with 0123",
    "--vae runs/vae --model dit --size tiny/8": "the latents of --vae runs/vae are 2x4x4: image size 4",
    "--vae runs/vae --perceptual 1": "--perceptual compares images",
    "--set vae_decode=bf16": "does nothing without --vae",
    "--latent_scale 1": "does nothing without --vae",
    "--task vae --size huge": "choose one of tiny, small, base",
    "--task vae --image_size 9": "needs a multiple of 2",
    "--set perceptual=bf16": "does nothing without --perceptual",
    "--perceptual -1": "is not a number, 0 or more",
    "--task segment --perceptual 1": "this is --task segment",
    "--task segment --dims 3 --data folder:runs": "folder has no volumes: --dims 3 takes",
    "--task steve --image_size 18": "needs a multiple of 4",
    "--task steve --size small": "unknown size 'small' for steve",
    "--task steve --data digits": "learns from clips",
    "--task steve --frames 1": "is not a whole number above 1",
    "--task slotcontrast --set gumbel=bf16": "unknown site 'gumbel'",
    "--vocab_size 8": "--vocab_size is for --task steve",
    f"{TEXT} --model unet": "choose gpt or moe or bdh",
    f"{TEXT} --size S/2": "choose one of tiny, 1M, 3M, 25M, 100M",
    f"{TEXT} --temperature -1": "a number, 0 or more",
    f"{TEXT} --model bdh --sparse24 srste": "sparse24",
    f"{TEXT} --model bdh --pure_bf16 --set islands=norm": "no norm parameters",
    f"{TEXT} --data digits": "reads text; write --data text:FILE",
    "--task classify --fp8 --fp8_backend emulate": "no layer of this net can be multiplied in FP8",
    "--task classify --sparse24 srste": "has no Linear layer",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(flags, odd, monkeypatch, capsys):
    monkeypatch.chdir(odd)
    before = content(".")
    capsys.readouterr()
    assert command(*flags.split()) == 2
    assert REFUSED[flags] in one_line(capsys)
    assert content(".") == before
