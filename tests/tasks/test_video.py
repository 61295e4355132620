"""Clips and what is measured on them: sprites against a naive drawing, scores against scikit-learn and
against definitions written out, folders of one's own and how they are refused.
"""

import itertools
from pathlib import Path

import common
import numpy as np
import pytest
import torch
from pictures import save
from PIL import Image
from sklearn.metrics import adjusted_rand_score

import strategies
from tasks import clip_sets, folders, sprites, video, video_metrics
from tasks.steve import Steve

TASK = "steve" if "steve" in strategies.TASKS else f"{video.__file__[:-8]}steve.py:Steve"
FLAGS = strategies.flag_table(TASK)


# ---- Sprites -----------------------------------------------------------------------------------------------


def naive(scene, clip, frames):
    """(frames, masks) of one clip, a pixel at a time: the place by walking, the shape by its corners."""
    side = scene.ground.shape[-1]
    image = scene.ground[clip].double().expand(frames, -1, -1, -1).clone()
    mask = torch.zeros(frames, side, side, dtype=torch.int64)
    for s in range(scene.half.shape[1]):
        if not scene.there[clip, s]:
            continue
        half, (x, y) = float(scene.half[clip, s]), scene.place[clip, s].tolist()
        (vx, vy), colour = scene.speed[clip, s].tolist(), scene.colour[clip, s].double()
        for t in range(frames):
            for row, column in itertools.product(range(side), repeat=2):
                dx, dy = column + 0.5 - x, row + 0.5 - y
                kind = sprites.SHAPES[scene.shape[clip, s]]
                if kind == "disc":
                    inside = dx * dx + dy * dy <= half * half
                elif kind == "square":
                    inside = max(abs(dx), abs(dy)) <= half
                else:  # its edges run from the top (0, -half) to the corners (+-half, half)
                    inside = abs(dy) <= half and abs(dx) <= half * (dy + half) / (2 * half)
                if inside:
                    image[t, :, row, column], mask[t, row, column] = colour, s + 1
            x, y = x + vx, y + vy
            x, vx = turned(x, vx, half, side - half)
            y, vy = turned(y, vy, half, side - half)
    return image, mask


def turned(place, speed, low, high):
    if place < low:
        return 2 * low - place, -speed
    if place > high:
        return 2 * high - place, -speed
    return place, speed


def test_sprites_are_as_a_naive_drawing_has_them():
    scene = sprites.Scene.drawn(6, 24, torch.Generator().manual_seed(3))
    clips, masks = scene.frames(6)
    for clip in range(6):
        image, mask = naive(scene, clip, 6)
        assert (mask == masks[clip]).double().mean() > 0.999  # a pixel's centre may lie on an edge
        same = (mask == masks[clip])[:, None].expand_as(image)
        assert torch.allclose(image[same], clips[clip].double()[same], atol=1e-6)
    assert {sprites.SHAPES[i] for i in scene.shape.flatten().tolist()} == set(sprites.SHAPES)
    walked = (scene.at(1) - scene.at(0)).abs()
    assert walked.max() <= 24 / 12 and walked.median() > 0.2


def test_sprites_turn_round_at_borders_and_stay_inside():
    scene = sprites.Scene.drawn(50, 24, torch.Generator().manual_seed(0))
    turns = 0
    for t in range(1, 40):
        low, high = scene.half[..., None], 24 - scene.half[..., None]
        place = scene.at(t)
        assert (place >= low - 1e-3).all() and (place <= high + 1e-3).all()
        turns += int(((place - scene.at(t - 1)) * scene.speed < 0).sum())
    assert turns > 100


def test_sprites_are_a_function_of_the_seed():
    one, same, other = (clip_sets.sprites(16, 3, seed, 20, 5) for seed in (1, 1, 2))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    clips, masks = one.train[[4, 0]]
    assert clips.shape == (2, 3, 3, 16, 16) and clips.dtype == torch.float32 and clips.abs().max() <= 1
    assert masks.shape == (2, 3, 16, 16) and masks.dtype == torch.int64
    assert torch.equal(clips, same.train[[4, 0]][0]) and not torch.equal(clips, other.train[[4, 0]][0])
    assert (len(one.train), len(one.heldout)) == (20, 5)
    counts = [len(mask.unique()) - 1 for mask in clip_sets.sprites(24, 2, 0, 100, 5).train.masks]
    assert set(counts) <= {1, 2, 3, 4} and len(set(counts)) > 2  # one may hide behind another


# ---- Scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_the_adjusted_rand_index_is_scikit_learns(seed):
    draw = np.random.default_rng(seed)
    a, b = draw.integers(0, 5, 400), draw.integers(0, 4, 400)
    b = np.where(draw.random(400) < 0.6, a % 4, b)
    counts = video_metrics.contingency(torch.tensor(a), torch.tensor(b))
    assert video_metrics.adjusted_rand_index(counts) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)
    assert counts.dtype == torch.float64 and counts.sum() == 400


def naive_overlaps(mask, found):
    """{(object, slot): intersection over union} with sets of pixels."""
    pixels = {}
    for name, ids in (("true", mask), ("slot", found)):
        for at, value in enumerate(ids.flatten().tolist()):
            pixels.setdefault((name, value), set()).add(at)
    objects = [value for name, value in pixels if name == "true" and value]
    slots = [value for name, value in pixels if name == "slot"]
    return {
        (o, s): len(pixels["true", o] & pixels["slot", s]) / len(pixels["true", o] | pixels["slot", s])
        for o in objects
        for s in slots
    }


@pytest.mark.parametrize("slots", [2, 5])
def test_overlaps_are_those_of_sets_and_the_matching_is_the_best_of_all(slots):
    generator = torch.Generator().manual_seed(slots)
    mask = torch.randint(0, 4, (9, 9), generator=generator)
    found = torch.randint(0, slots, (9, 9), generator=generator)
    found[mask == 2] = 0
    table = naive_overlaps(mask, found)
    objects, numbers = sorted({o for o, _ in table}), sorted({s for _, s in table})
    best = sum(max(table[o, s] for s in numbers) for o in objects) / len(objects)
    wider = [*numbers, *[None] * len(objects)]  # an object may stay without a slot
    matched = max(
        sum(table.get((o, s), 0.0) for o, s in zip(objects, chosen, strict=True))
        for chosen in itertools.permutations(wider, len(objects))
    )
    scores = video_metrics.of_one(mask, found)
    assert scores["mbo"] == pytest.approx(best, abs=1e-12)
    assert scores["iou"] == pytest.approx(matched / len(objects), abs=1e-12)
    foreground = mask != 0
    ari = adjusted_rand_score(mask[foreground].numpy(), found[foreground].numpy())
    assert scores["fg_ari"] == pytest.approx(ari, abs=1e-12)


def test_a_video_counts_a_slot_that_changes_hands_and_a_frame_does_not():
    mask = torch.tensor([[1, 1, 2, 2, 0, 0]]).expand(2, 6)[None, :, None]  # [1, 2, 1, 6]
    found = torch.stack([mask[0, 0], torch.tensor([[2, 2, 1, 1, 0, 0]])])[None]
    scores = video_metrics.video_scores(mask, found)
    assert scores["fg_ari"] == scores["iou"] == scores["mbo"] == 1.0
    assert scores["fg_ari_video"] < 0.1 and scores["iou_video"] == pytest.approx(1 / 3)
    empty = torch.zeros_like(mask)
    assert video_metrics.video_scores(empty, found) == {}
    halves = torch.cat([mask, empty]), torch.cat([found, found])
    assert video_metrics.video_scores(*halves) == scores  # a clip without objects is left out


# ---- Folders -----------------------------------------------------------------------------------------------


def plant(root, clips=3, frames=5, size=(18, 20), masks=True):
    draw = np.random.default_rng(0)
    for clip in range(clips):
        for t in range(frames):
            save(root / f"c{clip}" / f"{t:03}.png", draw.integers(0, 255, (*size, 3), dtype=np.uint8))
            if masks:
                ids = np.zeros(size, np.uint8)
                ids[2 + t : 8 + t, 3:9], ids[9:15, 10:16] = 7, 250
                save(root / "masks" / f"c{clip}" / f"{t:03}.png", ids)
    return root


def load(root, **flags):
    flags = {"task": "steve", "data": f"folder:{root}", "frames": 2, "image_size": 16, **flags}
    return Steve.load(FLAGS.typed(flags))


def test_a_folder_of_clips_is_cut_into_windows(tmp_path):
    data = load(plant(tmp_path, clips=4))
    assert (len(data.train), len(data.heldout), data.masks) == (6, 2, True)  # 5 frames are 2 windows of 2
    clips, masks = data.train[[1, 4]]
    assert clips.shape == (2, 2, 3, 16, 16) and masks.shape == (2, 2, 16, 16)
    assert masks.unique().tolist() == [0, 1, 2]  # values 7 and 250
    frame = np.asarray(Image.open(tmp_path / "c0" / "000.png"), np.float32)[:, 1:19] / 127.5 - 1
    whole = load(tmp_path, image_size=18)
    frames = torch.cat([part[[i]][0] for part in (whole.train, whole.heldout) for i in range(len(part))])
    expected = torch.from_numpy(frame).permute(2, 0, 1)
    assert any(torch.allclose(expected, clip[0], atol=1e-6) for clip in frames)
    assert load(tmp_path).fingerprint == data.fingerprint != whole.fingerprint


def test_twelve_bits_in_sixteen_are_said_and_mended(tmp_path):
    for clip in range(2):
        for t in range(2):
            save(tmp_path / f"c{clip}" / f"{t}.png", np.full((16, 16), 4095, np.uint16))
    dark = load(tmp_path)
    assert len(dark.notes) == 1 and "--white 4095" in dark.notes[0]
    mended = load(tmp_path, white=4095)
    assert not mended.notes and mended.fingerprint != dark.fingerprint
    assert mended.train[[0]][0].eq(1).all()
    assert load(tmp_path, white=65535).fingerprint == dark.fingerprint
    common.refused(lambda: load(tmp_path, pages="all"), "--pages says how image files are read")


def one_frame(root):
    for path in sorted((root / "c1").iterdir())[1:]:
        path.unlink()


def no_instance(root):
    for path in (root / "masks" / "c1").iterdir():
        save(path, np.zeros((18, 20), np.uint8))


def only_masks(root):
    for clip in range(3):
        for path in (root / f"c{clip}").iterdir():
            path.unlink()
        (root / f"c{clip}").rmdir()


def another(*where, pixels):
    return lambda root: save(root.joinpath(*where), pixels)


BLACK, SMALL, RGB = (np.zeros(shape, np.uint8) for shape in ((9, 9, 3), (9, 9), (18, 20, 3)))
MANY = np.arange(360, dtype=np.uint16).reshape(18, 20)
SPOILT = {
    "one frame": (one_frame, "c1 has 1 frames, and --frames is 2: give it more, or remove"),
    "sizes": (another("c1", "002.png", pixels=BLACK), "make them the same size"),
    "no instance": (no_instance, "c1 holds the value 0 alone"),
    "no frame": (lambda root: (root / "c1" / "004.png").unlink(), "004.png has no frame: add"),
    "no clip": (another("masks", "c9", "0.png", pixels=SMALL), "c9 have no clip: add"),
    "no clips": (only_masks, "holds no clips"),
    "blurred": (another("masks", "c1", "001.png", pixels=MANY), "without antialiasing"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_folders_that_are_refused(how, tmp_path):
    spoil, said = SPOILT[how]
    spoil(plant(tmp_path))
    common.refused(lambda: load(tmp_path), said)


def test_other_refusals(tmp_path):
    plant(tmp_path, clips=2, frames=3)
    common.refused(lambda: load(tmp_path, frames=4), "has 3 frames, and --frames is 4: give --frames 3")
    common.refused(lambda: load(tmp_path / "nowhere"), "as a folder (No such file")
    plant(tmp_path / "single", clips=1)
    common.refused(lambda: load(tmp_path / "single"), "holds a single clip: give at least two")
    for spec in ("digits", "sprites:x", "folder:", "nifti:x"):
        common.refused(lambda spec=spec: load("", data=spec), "learns from clips; use --data sprites")
    common.refused(lambda: Steve.check(FLAGS.typed({"image_size": 8})), "too small")
    assert Path(tmp_path).exists()


def test_frames_are_in_the_order_of_their_numbers(tmp_path):
    for clip in ("a", "b", "c"):
        (tmp_path / clip).mkdir()
        for t in range(12):
            Image.new("L", (16, 16), 20 * t).save(tmp_path / clip / f"frame{t}.png")
    found = clip_sets._folders_of(tmp_path, folders.IMAGE_SUFFIXES)
    assert [path.stem for path in found["a"]] == [f"frame{t}" for t in range(12)]
