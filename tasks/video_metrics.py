"""How well a partition of a video finds its objects: foreground ARI, mBO and matched IoU, all in float64.

    video_scores(masks, found)      {"fg_ari": ..., "fg_ari_video": ..., "mbo": ..., "iou": ..., ...}

`masks` holds true instances, 0 for the background; `found` holds the number of the slot that took a pixel.
The numbers themselves mean nothing: only which pixels share one. A score of a frame compares pixels of one
frame; a score of a video pools those of all its frames, so an object that changes its slot costs there.
Everything comes from whole counts n[c, k] of pixels, which float64 holds exactly; a bf16 count would be exact
to 256 only.
"""

import torch

VIDEO_SCORES = ("fg_ari", "mbo", "iou")


def contingency(masks, found):
    """float64 [classes, slots]: how many pixels have true id c and slot k. masks, found: whole numbers of one
    shape. Ids that do not occur have no row.
    """
    _, rows = masks.reshape(-1).unique(return_inverse=True)
    _, columns = found.reshape(-1).unique(return_inverse=True)
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    counts = torch.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return counts.reshape(shape).double()


def adjusted_rand_index(counts):
    """Hubert and Arabie's index (1985) of a table of counts [classes, slots]: 1 for the same partition, 0 on
    average for a random one. 1 where both are trivial and the denominator is 0.
    """

    def pairs(n):
        return n * (n - 1) / 2

    together = pairs(counts).sum()
    a, b = pairs(counts.sum(1)).sum(), pairs(counts.sum(0)).sum()
    expected = a * b / pairs(counts.sum()).clamp_min(1)
    denominator = (a + b) / 2 - expected
    return 1.0 if denominator == 0 else float((together - expected) / denominator)


def overlaps(masks, found):
    """float64 [objects, slots] intersection over union of each true object, without the background, with each
    slot that occurs.
    """
    counts = contingency(masks, found)
    union = counts.sum(1, keepdim=True) + counts.sum(0, keepdim=True) - counts
    objects = masks.reshape(-1).unique() != 0
    return (counts / union)[objects]


def of_one(masks, found):
    """{name: score} of one frame or one video, None where it shows no object.

    fg_ari: the index over the true foreground alone, as the literature on slots reports it. mbo: mean over
    objects of the best overlap with any slot. iou: the same with each slot used once (Hungarian matching);
    an object without a slot counts 0.
    """
    from scipy.optimize import linear_sum_assignment  # it takes a second, which --help does not wait for

    masks, found = masks.cpu().long(), found.cpu().long()
    foreground = masks != 0
    if not foreground.any():
        return None
    table = overlaps(masks, found)
    rows, columns = linear_sum_assignment(-table.numpy())
    return {
        "fg_ari": adjusted_rand_index(contingency(masks[foreground], found[foreground])),
        "mbo": float(table.max(1).values.mean()),
        "iou": float(table[rows, columns].sum() / len(table)),
    }


def video_scores(masks, found):
    """{name: mean} over all frames, and with _video over all videos, of masks and found [B, T, H, W]. Frames
    and videos without an object are left out; {} where there is none at all.
    """
    result = _means(masks.flatten(0, 1), found.flatten(0, 1))
    for name, value in _means(masks, found).items():
        result[f"{name}_video"] = value
    return result


def _means(masks, found):
    """{name: mean} of the scores of each pair masks[i], found[i] that shows an object; {} where none does."""
    each = [of_one(*pair) for pair in zip(masks, found, strict=True)]
    each = [one for one in each if one is not None]
    if not each:
        return {}
    means = {}
    for name in VIDEO_SCORES:
        means[name] = sum(one[name] for one in each) / len(each)
    return means
