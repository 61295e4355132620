"""Finetuning a net on another text or other images, the A/A control, and an average with a warm-up."""

import json
import math
from pathlib import Path

import cli
import pytest
import torch
from cli import command, metrics, one_line, summary

import train
from harness.checkpoints import read as read_checkpoint
from harness.initial import perturb

in_a_folder_of_its_own = cli.in_a_folder_of_its_own

SHORT = (
    "--task language --block 16 --batch_size 4 --length 8 --log_every 2 --sample_every 0 --warmup 0".split()
)
NEW = ["--data", "text:new.txt", "--finetune", "runs/old"]


def run(*flags, name="run", steps=4):
    return command(*SHORT, "--name", name, "--steps", steps, *flags)


def texts():
    Path("old.txt").write_bytes(b"In the beginning was the word, and the word was with them. " * 40)
    Path("new.txt").write_bytes(b"sub next { my $n = shift; return $n + 1 unless $n > 9; die } # " * 40)


def pretrained(*flags, steps=20):
    """A net in runs/old that has read one text, and another text to go on with."""
    texts()
    fast = ["--data", "text:old.txt", "--lr", "1e-2", "--ema_warmup"]
    assert run(*fast, *flags, name="old", steps=steps) == 0


def weights(name):
    return read_checkpoint(f"runs/{name}")["precision"]["model"]


# ---- Another text ------------------------------------------------------------------------------------------


def test_a_net_of_bytes_goes_on_with_another_text():
    pretrained()
    assert run(*NEW, "--lr", "1e-2", "--ema_decay", "0.5", name="tuned", steps=20) == 0
    # what the old net makes of the new text
    assert command("--sample", "runs/old", "--data", "text:new.txt", "--name", "before", "--length", 8) == 0
    old = json.loads(Path("runs/old/samples/before.json").read_text())["scores"]["ema"]["nats_a_byte"]
    assert summary("tuned")["scores"]["ema"]["nats_a_byte"] < old - 0.3


def test_a_net_of_another_block_is_refused_and_so_are_images_of_other_data(capsys):
    pretrained(steps=2)
    capsys.readouterr()
    assert run(*NEW, "--block", 8, name="tuned") == 2
    assert "was trained with --block 16, and this run has --block 8" in one_line(capsys)
    assert run(*NEW, "--data", "text:nowhere.txt", name="tuned") == 2
    assert "nowhere.txt" in one_line(capsys) and not Path("runs/tuned").exists()
    assert cli.quick("--finetune", "runs/image", "--data", "synthetic", name="tuned") == 2
    assert "no checkpoint at runs/image" in one_line(capsys)


def test_a_net_of_images_goes_on_with_other_images_of_its_shapes(capsys):
    assert cli.quick("--ema_decay", "0", name="old") == 0
    for digit in range(10):
        cli.plant_folder(f"new/{digit}", 4)
    cli.plant_folder("unlabelled", 20)
    new = ["--finetune", "runs/old", "--image_size", 8]
    assert cli.quick(*new, "--data", "folder:new", "--lr", "1e-12", name="tuned", steps=1) == 0
    tuned = weights("tuned")
    for name, value in weights("old").items():
        torch.testing.assert_close(tuned[name], value, rtol=0, atol=1e-9)
    capsys.readouterr()
    assert cli.quick(*new, "--data", "folder:unlabelled", name="other") == 2
    assert "runs/old holds a net of other shapes" in one_line(capsys) and not Path("runs/other").exists()


# ---- The A/A control ---------------------------------------------------------------------------------------


def perturbed(pattern, dtype=torch.float32):
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 3)
    net = torch.nn.Sequential(*layers).to(dtype)
    net[2].weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    perturb(net, pattern)
    return before, dict(net.named_parameters())


def test_each_weight_moves_to_its_neighbour_and_zeros_stay():
    (before, after), (_, again), (_, other) = perturbed(1), perturbed(1), perturbed(2)
    for name in ("0.weight", "0.bias", "1.weight"):
        old, new = before[name].double(), after[name].detach().double()
        ulp = torch.nextafter(before[name], torch.full_like(before[name], math.inf)).double() - old
        below = old - torch.nextafter(before[name], torch.full_like(before[name], -math.inf)).double()
        assert ((new - old == ulp) | (old - new == below)).all(), name
        assert torch.equal(after[name], again[name]), "the pattern is fixed"
        assert not torch.equal(after[name], other[name]), "and another number has another one"
    assert torch.equal(before["1.bias"], after["1.bias"]), "a bias of zeros stays"
    assert torch.equal(before["2.weight"], after["2.weight"]), "what is not trained stays"
    up = (after["0.weight"] > before["0.weight"]).double()
    size = (after["0.weight"].abs() > before["0.weight"].abs()).double()
    assert abs(up.mean() - 0.5) < 0.03 and abs(size.mean() - 0.5) < 0.03, "as many go up as down"
    change = (after["0.weight"].double() - before["0.weight"].double()) / before["0.weight"].double()
    assert change.detach().abs().min() >= 2**-24.01 and change.detach().abs().max() <= 2**-22.99


def losses(name):
    return [row["loss"] for row in metrics(name)]


def test_the_control_starts_beside_the_run_and_leaves_it_slowly():
    texts()
    flags = ["--data", "text:old.txt", "--lr", "1e-2"]
    for name, number in {"a": None, "b": 1, "c": 2, "off": 0}.items():
        more = [] if number is None else ["--perturb", number]
        assert run(*flags, *more, name=name, steps=12) == 0
    assert losses("off") == losses("a"), "off by default"
    assert losses("b") != losses("a") != losses("c") != losses("b")
    assert losses("b") == pytest.approx(losses("a"), rel=1e-3)
    assert "perturb1" in train.FLAGS.name(train.FLAGS.typed({"perturb": 1}))


def test_weights_of_a_finetuning_are_changed_after_they_are_read():
    pretrained(steps=4)
    average = read_checkpoint("runs/old")["precision"]["averages"]["ema"]["shadow"]
    assert run(*NEW, "--lr", "1e-12", "--perturb", 1, name="tuned", steps=1) == 0
    tuned = weights("tuned")
    changed = [(tuned[name].view(torch.int32) != value.view(torch.int32)) for name, value in average.items()]
    assert all(entries.float().mean() > 0.9 for entries in changed)


def test_the_command_scales_the_matrices_that_it_begins_with():
    texts()
    flags = ["--data", "text:old.txt", "--lr", "1e-12"]
    assert run(*flags, name="plain", steps=1) == 0
    assert run(*flags, "--init_scale", 2, name="scaled", steps=1) == 0
    scaled = weights("scaled")
    for name, value in weights("plain").items():
        factor = 2 if value.dim() > 1 else 1
        torch.testing.assert_close(scaled[name], factor * value, rtol=0, atol=1e-9)


# ---- An average that arrives -------------------------------------------------------------------------------


def test_the_command_keeps_an_average_with_a_warm_up():
    texts()
    flags = ["--data", "text:old.txt", "--lr", "1e-2", "--weights", "both", "--ema_decay", "0.999"]
    for name, more in {"slow": [], "warm": ["--ema_warmup"]}.items():
        assert run(*flags, *more, name=name, steps=40) == 0
    scores = {name: summary(name)["scores"] for name in ("slow", "warm")}
    assert scores["slow"]["raw"] == scores["warm"]["raw"], "training does not see the average"
    nats = {name: found["ema"]["nats_a_byte"] for name, found in scores.items()}
    assert nats["warm"] < nats["slow"] - 1, "40 steps of decay 0.999 have hardly left the initial weights"
    assert nats["warm"] == pytest.approx(scores["warm"]["raw"]["nats_a_byte"], abs=0.3)
