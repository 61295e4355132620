"""metrics.py: scores of a segmentation."""

import math

import pytest
import test_metrics
import torch

from tasks import metrics

draw = test_metrics.draw
one_thread = test_metrics.one_thread


def segmentation_scores(predicted, masks, num_classes):
    return metrics.dice_and_iou(metrics.confusion(predicted, masks, num_classes))


MASKS = torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 2]]])
PREDICTED = torch.tensor([[[0, 1, 1, 1], [0, 0, 0, 2]]])


def test_dice_and_iou_by_hand():
    scores = segmentation_scores(PREDICTED, MASKS, 3)
    assert scores["dice"] == pytest.approx([6 / 8, 4 / 6, 1])
    assert scores["iou"] == pytest.approx([3 / 5, 2 / 4, 1])
    assert scores["mean_dice"] == pytest.approx((4 / 6 + 1) / 2)
    assert scores["mean_iou"] == pytest.approx(3 / 4)


def test_logits_classes_and_sums_of_batches_agree():
    masks, classes = torch.randint(3, (2, 6, 8, 8), generator=draw())
    whole = metrics.confusion(classes, masks, 3)
    logits = torch.nn.functional.one_hot(classes, 3).movedim(-1, 1).bfloat16()
    assert torch.equal(metrics.confusion(logits, masks, 3), whole) and whole.sum() == masks.numel()
    parts = metrics.confusion(classes[:2], masks[:2], 3) + metrics.confusion(logits[2:], masks[2:], 3)
    assert metrics.dice_and_iou(parts) == segmentation_scores(classes, masks, 3)


def test_absent_classes():
    scores = segmentation_scores(PREDICTED, MASKS, 5)  # 3 and 4 in neither: no part of the means
    assert [math.isnan(value) for value in scores["dice"]] == [False, False, False, True, True]
    assert scores["mean_dice"] == pytest.approx((4 / 6 + 1) / 2)
    assert scores["mean_iou"] == pytest.approx(3 / 4)
    wrong = PREDICTED.clone()
    wrong[0, 0, 0] = 3  # predicted, though never there: 0, and counts
    scores = segmentation_scores(wrong, MASKS, 5)
    assert scores["dice"][3] == scores["iou"][3] == 0
    assert scores["mean_dice"] == pytest.approx((4 / 6 + 1 + 0) / 3)


@pytest.mark.parametrize(
    "predicted, masks",
    [
        (PREDICTED, MASKS + 1),
        (PREDICTED, MASKS - 1),
        (PREDICTED, MASKS[:, :1]),
        (PREDICTED + 1, MASKS),
        (PREDICTED.float(), MASKS),
    ],
)
def test_wrong_masks_and_predictions_are_refused(predicted, masks):
    with pytest.raises(ValueError):
        segmentation_scores(predicted, masks, 3)
