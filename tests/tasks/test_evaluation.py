"""What a generation scores and draws."""

import dataclasses
import math

import common
import pytest
import test_strategies
import torch
from generating import FLAGS, Recorder, make

from lowprec.precision import recipe
from tasks import metrics
from tasks.diffusion import DDPM, RFlow
from tasks.generation import BINS, HELDOUT_IMAGES
from tasks.segment import Segment
from tasks.task import Rng, picture

eager = common.eager
discs = test_strategies.discs


@pytest.mark.parametrize("kind", [RFlow, DDPM])
def test_evaluate_scores_real_images_better_than_a_blind_net(kind, digits):
    task = make(kind, digits, samples=40, sample_batch=16)
    scores, pictures = task.evaluate(Recorder(0.0), Rng(0))
    again, _ = task.evaluate(Recorder(0.0), Rng(0))
    assert scores == again
    numbers = [v for k, v in scores.items() if k not in ("trace", "loss_by_timestep")]
    assert (
        numbers
        and all(math.isfinite(v) for v in numbers)
        and len(scores["loss_by_timestep"]) == BINS
        and len(scores["trace"]) == 6
    )
    grid = pictures["samples"]
    assert grid.ndim == 3 and grid.min() >= 0 and grid.max() <= 1 and grid.shape[-1] >= 480
    reference = task.reference()
    assert reference["floor"]["frechet"] < reference["ceiling"]["frechet"]
    assert reference["floor"]["frechet"] < scores["frechet"]
    grid = task.preview(Recorder(), Rng(0))["samples"]
    assert grid.shape[-1] >= 480 and float(grid.std()) > 0.05
    # the last row is of held-out images, each of its column's label
    real, labels = metrics.subset(digits.heldout, HELDOUT_IMAGES)
    wanted = picture(torch.stack([real[labels == label][0] for label in range(10)]), 10)
    assert torch.equal(grid[:, 4 - wanted.shape[1] :], wanted[:, 4:])


@pytest.mark.parametrize(
    "kind, named", [("fast", {"sliced_wasserstein"}), ("auto", {"sliced_wasserstein"}), ("none", set())]
)
def test_fewer_scores_need_no_net_that_is_fitted(kind, named, digits, monkeypatch):
    monkeypatch.setattr(metrics, "yardstick", lambda *_: pytest.fail("a net was fitted"))
    own = dataclasses.replace(digits, yardstick=None)
    assert make(RFlow, own, size="tiny").scored_in_full  # 3,000 steps of 64 images
    task = make(RFlow, own, size="tiny", steps=100, samples=20, scores=kind)
    told = [note for note in task.notes() if "--scores full" in note]
    assert len(told) == (kind == "auto")
    scores, pictures = task.evaluate(Recorder(0.0), Rng(0))
    assert {name for name in scores if name in RFlow.distances} == named and pictures
    assert set(task.reference()) == ({"floor", "ceiling"} if named else set())


def test_evaluate_gives_every_label_its_images(digits):
    task, net = make(RFlow, digits, samples=25, sample_batch=10), Recorder()
    task.evaluate(net, Rng(0))
    drawn = torch.cat(
        [
            labels
            for labels, t in zip(net.labels, net.t, strict=False)
            if float(t[0]) == 1000 and len(labels) <= 10
        ]
    )
    assert drawn.tolist() == [i % 10 for i in range(25)]


def answers(part, num_classes):
    """A segmentation net that knows every mask of `part`."""
    images, masks = part[list(range(len(part)))]
    known = {image.numpy().tobytes(): mask for image, mask in zip(images, masks, strict=False)}
    return lambda x: (
        20.0
        * torch.stack(
            [torch.nn.functional.one_hot(known[i.numpy().tobytes()], num_classes).permute(2, 0, 1) for i in x]
        ).float()
    )


def test_segmentation_of_a_net_that_is_right_and_of_one_that_is_not(discs):
    task = Segment(discs, recipe(), FLAGS.typed({}))
    right = answers(discs.heldout, discs.num_classes)
    scores, pictures = task.evaluate(right, Rng(0))
    assert scores["mean_dice"] == 1 and scores["mean_iou"] == 1 and len(scores["dice"]) == discs.num_classes
    images, masks = discs.heldout[list(range(8))]
    assert float(task.loss(right, (images, masks), Rng(0), 0)) < 1e-3

    def wrong(x):
        return right(x).roll(1, dims=1)

    assert task.evaluate(wrong, Rng(0))[0]["mean_dice"] < 0.2
    assert float(task.loss(wrong, (images, masks), Rng(0), 0)) > 1
    grid = pictures["segmentation"]
    assert grid.shape[0] == 3 and grid.shape[-1] >= 8 * 48 and grid.min() >= 0 and grid.max() <= 1
    row = (grid.shape[1] - 4) // 3

    def band(k):
        return grid[:, 4 + k * row : (k + 1) * row]

    assert torch.equal(band(1), band(2)) and not torch.equal(
        band(0), band(1)
    )  # the masks, and below them the same predictions
    assert not torch.equal(grid, task.preview(wrong, Rng(0))["segmentation"])


def test_pictures_are_large_and_show_nan_as_grey():
    images = torch.full((4, 1, 8, 8), -1.0)
    images[1], images[2] = 1.0, float("nan")
    grid = picture(images, 4)
    assert grid.shape[-1] >= 4 * 48

    def centre(k):
        return float(grid[0, grid.shape[1] // 2, 4 + k * 52 + 24])

    assert [centre(k) for k in range(4)] == [0, 1, 0.5, 0]
    assert picture(torch.zeros(1, 1, 100, 100), 1).shape[-1] >= 100
