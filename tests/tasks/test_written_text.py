"""--task language: what is written."""

import json
import math
import os
from pathlib import Path

import cli
import pytest
import test_language
import torch
from cli import command, content

from tasks import language
from tasks.language import TEXT_FILE, Text, choose_bytes
from tasks.task import Rng

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
ids = test_language.ids
quick = test_language.quick
task = test_language.task


def test_a_byte_is_drawn_from_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(4000, 4)
    assert choose_bytes(logits, 0, 4, Rng(0)).unique().tolist() == [1]
    assert choose_bytes(logits, 1.0, 1, Rng(0)).unique().tolist() == [1]
    drawn = torch.bincount(choose_bytes(logits, 0.5, 3, Rng(0)), minlength=4) / 4000
    wanted = torch.tensor([-math.inf, 6.0, 2.0, 4.0]).softmax(0)
    assert drawn[0] == 0 and torch.allclose(drawn, wanted, atol=0.03)
    assert choose_bytes(logits[:1] * math.nan, 1.0, 4, Rng(0)).shape == (1,)


def test_the_net_reads_the_last_block_and_the_text_holds_the_prompt():
    made, seen = task(length=5, temperature=0.0), []

    def model(ids):
        seen.append(ids)
        logits = torch.zeros(*ids.shape, 256)
        logits.scatter_(2, (ids + 1)[..., None] % 256, 1.0)  # says the byte after the last
        return logits

    prompt = b"a long beginning, longer than a block: a"
    assert made.write(model, Rng(0), prompt) == (prompt + b"bcdef").decode()
    assert all(ids.shape == (1, 16) for ids in seen) and bytes(seen[1][0].tolist()) == (prompt + b"b")[-16:]


@pytest.fixture
def trained(capsys):
    assert quick(steps=2) == 0
    capsys.readouterr()
    return "runs/run"


@pytest.mark.parametrize(
    "prompt", ["In the beginning", "", "x" * 100, "été, 日本, \U0001f600", os.fsdecode(b"caf\xe9 \x00")]
)
def test_any_prompt_is_continued(trained, prompt, capsys):
    before = content(trained)
    assert command("--sample", trained, "--prompt", prompt, "--length", 12, "--top_k", 3, "--name", "p") == 0
    (text,) = json.loads(Path(trained, "samples/p.json").read_text())["scores"]["ema"]["text"]
    assert f"ema:\n{text}" in capsys.readouterr().out
    given = prompt.encode("utf-8", "surrogateescape") or bytes(
        Text(TEXT_FILE, 16).heldout[[0]][0][0, :32].tolist()
    )
    assert text.startswith(given.decode("utf-8", "replace")) and len(text) > len(prompt)
    assert Path(trained, "samples/p-ema.png").is_file()
    assert before.items() <= content(trained).items()


def test_samples_repeat_and_follow_temperature_and_seed(trained):
    def text(*flags, name):
        assert command("--sample", trained, "--prompt", "God", *flags, "--name", name) == 0
        return json.loads(Path(trained, f"samples/{name}.json").read_text())["scores"]["ema"]["text"]

    first = text(name="a")
    assert first == text(name="b") != text("--seed", 1, name="c")
    assert text("--temperature", 0, name="d") == text("--temperature", 0, "--seed", 1, name="e")


def test_a_drawn_text_is_a_picture_of_its_lines():
    short, long = language.text_picture("a"), language.text_picture("word " * 100)
    assert short.shape[0] == 3 and short.min() < 0.5 and short.max() == 1
    assert long.shape[1] > 3 * short.shape[1]
    odd = language.text_picture("tab\t, \x00 and \x1b[31m, 日本\n\n" + "x\n" * 1000)
    assert odd.shape[1] < 60 * 25
