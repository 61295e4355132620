"""Segmentation: its scores are of all held-out images, however many are scored at once."""

import torch
from generating import make

from tasks import data, segment
from tasks.task import Rng


def test_scores_are_of_all_held_out_images(monkeypatch):
    task = make(segment.Segment, data.load("synthetic", "masks", image_size=16))
    classes = task.data.num_classes

    def net(images):  # its answer is the brightness of a pixel
        levels = torch.linspace(-1, 1, classes)[None, :, None, None]
        return -(images - levels).abs()

    together = task.evaluate(net, Rng(0))[0]
    monkeypatch.setattr(segment, "SEGMENTED_AT_ONCE", 10)
    assert task.evaluate(net, Rng(0))[0] == together
    assert len(task.data.heldout) > 10 and 0 < together["mean_iou"] < 1
