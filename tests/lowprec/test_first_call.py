"""What a run says once about what its border loses: positions that merge, losses formed in bf16."""

import warnings

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, draw, start
from torch import nn

from lowprec.parts.first_call import what_merges

eager = common.eager
LOW = dict(pure_bf16=True, stochastic=True)


def ids(count):
    """fp32 [count, 3], as Flux has for the places of a panorama."""
    return torch.stack([torch.zeros(count), torch.zeros(count), torch.arange(float(count))], 1)


POSITIONS = {
    "frame numbers of a long video": ids(1024),
    "batched": ids(300)[None].expand(2, -1, -1),
    "sizes of SDXL": torch.tensor([[1023.0, 1535, 7, 515, 1021, 1279]]),
    "boxes": torch.tensor([[3.0, 5.0, 511.0, 1023.0]]),
    "a time step": torch.tensor(999.0),
    "time steps between whole ones": torch.tensor([731.3, 12.9, 903.8]),
    "times of a schedule": torch.linspace(0, 1, 1000),
    "frame times of each clip": torch.linspace(3, 9, 512).expand(4, -1),
    "coordinates of pixels": torch.stack(
        torch.meshgrid(torch.linspace(0, 1, 600), torch.linspace(0, 1, 3), indexing="ij"), -1
    ).flatten(0, 1),
    "falling noise levels": torch.linspace(80, 0.002, 1000).double(),
}


@pytest.mark.parametrize("what", POSITIONS)
def test_positions_that_bf16_merges_are_seen(what):
    assert what_merges(POSITIONS[what])


DATA = {
    "noise": draw(4, 3, 32, 32),
    "pixels": torch.randint(256, (4, 3, 32, 32)).float() / 127.5 - 1,
    "levels of 8 bits": torch.randint(256, (2, 3, 16, 16)).float(),
    "levels of 12 bits": torch.randint(4096, (2, 1, 16, 16)).float(),
    "features": draw(8, 512),
    "text embeddings": draw(2, 77, 64),
    "few coordinates drawn at random": draw(4096, 2),
    "audio": draw(2, 1, 4000),
    "uniform times": torch.rand(64),
    "a gradient image": torch.linspace(0, 1, 1000).expand(1, 1, 8, -1),
    "few positions": ids(200),
    "whole times": torch.arange(0.0, 250.0),
    "a mask": torch.zeros(4, 32).index_fill(1, torch.arange(20, 32), torch.finfo(torch.float32).min),
    "an infinite mask": torch.full((16, 16), float("-inf")).triu(1),
    "one-hot labels": F.one_hot(torch.arange(10)).float(),
    "in bf16 already": ids(1024).to(BF16),
}


@pytest.mark.parametrize("what", DATA)
def test_data_raises_no_alarm(what):
    assert what_merges(DATA[what]) == ""


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, img_ids=None, cond=None, targets=()):
        self.seen = None if img_ids is None else img_ids.dtype
        return self.layer(x)


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def test_positions_are_named_once_and_kept_on_request():
    x = draw(2, 8)
    run = start(LOW, Placed())
    lines = said(lambda: run(x, ids(1024), cond={"time_ids": POSITIONS["sizes of SDXL"]}))
    assert len(lines) == 2 and "'img_ids' [1024, 3]" in lines[0] and "'time_ids'" in lines[1]
    assert "keep=('t', 'timestep', 'timesteps', 'img_ids')" in lines[0] and run.model.seen == BF16
    assert said(lambda: run(x, ids(1024))) == []
    assert said(lambda: start(LOW, Placed())(x, img_ids=ids(200))) == []
    boxes = [{"boxes": POSITIONS["boxes"]}]
    assert "'boxes'" in said(lambda: start(LOW, Placed())(x, targets=boxes))[0]
    assert said(lambda: start(LOW, Placed(), keep=("boxes",))(x, targets=boxes)) == []
    run = start(LOW, Placed(), keep=("img_ids",))
    assert said(lambda: run(x, ids(1024))) == [] and run.model.seen == torch.float32
    for flags in ({}, dict(bf16=True)):
        assert said(lambda flags=flags: start(flags, Placed())(x, ids(1024))) == []


# ---- Losses ------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Forms its loss from the logits of a head, in their dtype unless told otherwise."""

    def __init__(self, exact=False):
        super().__init__()
        self.wte, self.body, self.exact = nn.Embedding(16, 16), nn.Linear(16, 16), exact
        self.lm_head = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        logits = self.lm_head(self.body(self.wte(ids)).relu()) * self.scale
        logits = logits.float() if self.exact else logits
        return {"loss": F.cross_entropy(logits, ids.roll(1)), "logits": logits}


def loss_row(run):
    return next((row["value"], row["why"]) for row in run.ledger().rows if row["site"] == "loss")


def test_a_loss_of_bf16_logits_is_said_with_its_remedy():
    tokens = torch.arange(16)
    run = start(LOW, Language())
    (line,) = said(lambda: run(tokens))
    assert "Language computes loss in bf16" in line and "fp32_outputs=('lm_head',)" in line
    assert loss_row(run)[0] == "bf16" and said(lambda: run(tokens)) == []
    for run in (
        start(LOW, Language(), fp32_outputs=("lm_head",)),
        start(dict(LOW, sites=["islands=final"]), Language(), fp32_outputs=("lm_*",)),
        start(LOW, Language(exact=True)),
        start(dict(bf16=True), Language()),
        start({}, Language()),
    ):
        assert said(lambda run=run: run(tokens)) == [] and loss_row(run)[0] == "fp32"


def test_fp32_outputs_give_the_loss_of_the_same_logits():
    torch.manual_seed(0)
    run = start(LOW, Language(), fp32_outputs=("lm_head",))
    out = run(torch.arange(16))
    exact = F.cross_entropy(out["logits"], torch.arange(16).roll(1))
    assert torch.equal(out["loss"], exact) and not torch.equal(out["loss"], out["loss"].to(BF16).float())
    common.refused(lambda: start(LOW, Language(), fp32_outputs=("head",)), "fp32_outputs", "'head'")
