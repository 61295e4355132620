"""Latent diffusion: the space that a flow is learnt in, and both tasks by the command."""

import json
import shutil
from pathlib import Path

import cli
import common
import numpy as np
import pytest
import torch
from cli import (
    LOOP,
    QUICK,
    checkpoint,
    command,
    content,
    draw,
    metrics,
    one_line,
    picture,
    summary,
)
from PIL import Image

import strategies
import train
from lowprec.recipes import recipe
from tasks import latent_space
from tasks import vae as latent
from tasks.autoencoder import autoencoder_kl
from tasks.latent_space import Latents, TrainedVAE
from tasks.task import Rng
from tasks.vae_halves import Frozen, Ranges

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
VAE = ["--task", "vae", *LOOP]
IN_LATENTS = ["--vae", "runs/vae", *QUICK]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of --task vae that knows digits a little, made once."""
    flags = "--batch_size 32 --lr 3e-3 --ema_decay 0.9 --steps 60 --log_every 10 --sample_every 30".split()
    return cli.trained_once(tmp_path_factory, {"vae": [*VAE, *flags]}) / "vae"


@pytest.fixture
def vae(trained):
    """The same as runs/vae, a copy that a test may spoil."""
    shutil.copytree(trained, "runs/vae")
    return Path("runs/vae")


@pytest.fixture
def few(monkeypatch):
    """Scores and scale of at most 60 images: these tests are about something else."""
    original = latent.metrics.subset
    monkeypatch.setattr(latent.metrics, "subset", lambda part, count=60: original(part, min(count, 60)))


def config(**changed):
    """A flags.Config with the defaults of all flags but those given."""
    return train.FLAGS.config({**train.DEFAULTS, **changed})


def latents_of(path, digits, sites=(), **changed):
    kind = strategies.TASKS["rflow"]
    return Latents(digits, recipe(sites=sites, more=kind.sites), config(vae=str(path), **changed))


def batch(digits, count=8):
    return digits.train[list(range(count))]


# ---- The space ---------------------------------------------------------------------------------------------


def test_the_scale_is_measured_on_the_training_latents(vae, digits):
    own = TrainedVAE(vae)
    index = torch.randperm(1297, generator=torch.Generator().manual_seed(0))[:100].tolist()  # see cli.few
    net = own.frozen("fp32").vae
    with torch.no_grad():
        mean, std = (part.double().numpy() for part in net.encode(digits.train[index][0]))
    wanted = 1 / np.sqrt(np.square(mean - mean.mean()).mean() + np.square(std).mean())
    assert own.scale(digits) == pytest.approx(wanted, rel=2e-5)
    assert command(*IN_LATENTS, "--steps", 2, "--name", "run") == 0
    flags = checkpoint()["config"]
    assert flags["latent_scale"] == own.scale(digits) and flags["vae_weights"] == own.fingerprint
    space = latents_of(vae, digits)
    drawn = torch.cat([space.draw(digits.train[index][0], Rng(seed)) for seed in range(3)])
    assert 0.97 < float(drawn.std()) < 1.03


def test_latents_are_drawn_anew_and_decoded_back(vae, digits):
    space, images = latents_of(vae, digits), batch(digits)[0]
    net = TrainedVAE(vae).frozen("fp32").vae
    with torch.no_grad():
        mean, std = net.encode(images)
        noise = Rng(5).normal(*mean.shape)
        torch.testing.assert_close(space.draw(images, Rng(5)), (mean + std * noise) * space.scale)
        torch.testing.assert_close(space.mean(images), mean * space.scale)
        torch.testing.assert_close(space.decode(space.mean(images)), net.decode(mean), rtol=1e-4, atol=1e-5)
    kept = space.train_set(digits.train, torch.device("cpu"))
    packed, labels = kept[[3, 1, 4]]
    torch.testing.assert_close(space.draw(packed, Rng(5)), space.draw(digits.train[[3, 1, 4]][0], Rng(5)))
    assert labels.tolist() == digits.train[[3, 1, 4]][1].tolist() and len(kept) == len(digits.train)
    assert latents_of(vae, digits, latent_scale=1.0).scale == 1.0


def test_a_set_too_large_to_keep_is_encoded_at_every_step(vae, few, monkeypatch):
    assert command(*IN_LATENTS, "--steps", 3, "--name", "kept") == 0
    monkeypatch.setattr(latent_space, "CACHE_BYTES", 1000)
    assert command(*IN_LATENTS, "--steps", 3, "--name", "anew") == 0
    kept, anew = ([row["loss"] for row in metrics(name)] for name in ("kept", "anew"))
    assert kept == pytest.approx(anew, rel=1e-5)


def test_each_half_has_a_precision_of_its_own(vae, digits):
    images = batch(digits)[0]
    exact = latents_of(vae, digits)
    values = exact.mean(images)
    found = {}
    for value in ("fp32", "autocast", "bf16", "autocast_fp16", "fp16"):
        scores = latents_of(vae, digits, [f"vae_decode={value}"]).scores(values, images)
        assert scores["encode_snr"] == 150.0 and scores["overflow"] == 0
        found[value] = scores["decode_snr"]
        scores = latents_of(vae, digits, [f"vae_encode={value}"]).scores(values, images)
        assert scores["decode_snr"] == 150.0 and (scores["encode_snr"] == 150.0) == (value == "fp32")
    assert found["fp32"] == 150.0 and 25 < found["bf16"] <= found["autocast"] + 3
    assert found["bf16"] + 10 < found["fp16"] < 100  # three bits more are 18 dB
    # as by hand: the whole decoder in bf16
    net = TrainedVAE(vae).frozen("fp32").vae.bfloat16()
    space = latents_of(vae, digits, ["vae_decode=bf16"])
    with torch.no_grad():
        wanted = net.decode((values / space.scale).bfloat16()).float()
    assert torch.equal(space.decode(values), wanted)


# ---- Overflow ----------------------------------------------------------------------------------------------


def loud(by):
    """precision -> an AutoencoderKL whose first convolution of the decoder is `by` times as strong. GroupNorm
    takes the size away again, but for one residual path.
    """
    torch.manual_seed(0)
    net = autoencoder_kl(1)
    with torch.no_grad():
        net.decoder.blocks[0].conv.weight.mul_(by)
    return lambda precision: Frozen(lambda: autoencoder_kl(1), net.state_dict(), precision)


def test_large_activations_overflow_fp16_and_are_counted():
    z = common.draw(4, 2, 4, 4)
    for by, overflows in ((1.0, False), (1e6, True)):
        exact, low, wide = map(loud(by), ("fp32", "fp16", "bf16"))
        with Ranges(exact.vae) as ranges:
            image = exact.decode(z)
        assert image.isfinite().all()  # fp32 holds them
        assert (ranges.overflow > 0.01) is overflows and (ranges.largest > 65504) is overflows
        with Ranges(low.vae) as in_fp16:
            assert bool(low.decode(z).isfinite().all()) is not overflows
        assert (in_fp16.overflow > 0) is overflows
        assert wide.decode(z).isfinite().all()


# ---- The tasks through the command -------------------------------------------------------------------------


def test_the_autoencoder_learns_and_shows_images_above_reconstructions(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.6 * losses[0]
    found = json.loads((trained / "summary.json").read_text())
    scores, reference = found["scores"]["ema"], found["reference"]
    assert reference["floor"]["l1"] == 0 and reference["floor"]["psnr"] == 150
    assert reference["ceiling"]["psnr"] < scores["psnr"] < 40
    assert scores["l1"] < 0.35 and scores["fp32_snr"] == 150 and scores["overflow"] == 0
    assert scores["kl"] > 0 and scores["latent_std"] > 0 and scores["frechet"] > 0
    final, early = (Image.open(trained / "samples" / name) for name in ("final.png", "step000030.png"))
    assert final.size == early.size == (8 * 52 + 4, 4 * 52 + 4)  # two pairs of rows of eight
    pixels = np.asarray(final.convert("L"), dtype=float) / 127.5 - 1
    above, below = pixels[4:52, 4:-4], pixels[56:104, 4:-4]
    assert np.corrcoef(above.ravel(), below.ravel())[0, 1] > 0.5


def test_ddpm_clips_images_and_not_latents(vae, digits):
    kind = strategies.TASKS["ddpm"]
    for path, clips in (("", True), (str(vae), False)):
        task = kind(digits, recipe(more=kind.sites), config(vae=path))
        assert task.scheduler.clip_sample is clips


def test_a_run_is_drawn_from_again_in_other_precisions(vae, monkeypatch):
    exact = draw(monkeypatch, "runs/vae")["ema"]
    assert exact == summary("vae")["scores"]["ema"]
    low = draw(monkeypatch, "runs/vae", "--set", "vae_decode=bf16")["ema"]
    assert 20 < low["fp32_snr"] < 60 and low["psnr"] == pytest.approx(exact["psnr"], abs=0.3)
    assert low["kl"] == exact["kl"]
    assert command(*IN_LATENTS, "--name", "run", "--steps", 2) == 0
    vae.rename("runs/moved")
    low = draw(monkeypatch, "runs/run", "--vae", "runs/moved", "--set", "vae_decode=autocast")["ema"]
    assert 20 < low["decode_snr"] < 60 and low["frechet"] != summary()["scores"]["ema"]["frechet"]
    assert low["loss_by_timestep"] == summary()["scores"]["ema"]["loss_by_timestep"]


# ---- What does not fit -------------------------------------------------------------------------------------


def test_a_folder_that_its_scores_can_not_use_is_refused_before_training(capsys):
    for i in range(4):
        picture(Path(f"photos/{i}.png"), size=8)
    assert command(*LOOP, "--task", "vae", "--data", "folder:photos", "--image_size", 8) == 2
    assert "1 held out, and the scores need two of each" in one_line(capsys) and not Path("runs").exists()


def test_another_vae_at_the_same_path_is_refused(vae, few, capsys):
    assert command(*IN_LATENTS, "--name", "run", "--steps", 2) == 0
    state = checkpoint("vae")
    state["precision"]["averages"]["ema"]["shadow"]["vae.post_quant_conv.conv.bias"] += 1e-3
    torch.save(state, vae / "checkpoint.pt")
    before = content("runs")
    capsys.readouterr()
    for flags in ([*IN_LATENTS, "--name", "run", "--steps", 4], ["--sample", "runs/run"]):
        assert command(*flags) == 2
        said = one_line(capsys)
        assert "vae_weights was" in said or "this run was made with" in said
    assert command("--diagnose", "runs/run") == 2 and "this run was made with" in one_line(capsys)
    assert content("runs") == before


def test_data_and_size_are_the_vaes_unless_given(vae, capsys):
    state = checkpoint("vae")
    state["config"].update(image_size=8, data="digits")
    torch.save(state, vae / "checkpoint.pt")
    capsys.readouterr()
    assert command(*IN_LATENTS, "--dry_run") == 0
    said = capsys.readouterr().out
    assert "--image_size=8" in said.split() and "--data=digits" in said.split() and "--latent_scale=" in said
    assert "-vae_vae-latent_scale" in said
