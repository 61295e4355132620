"""folder:PATH of images and masks made here: what is found and what is refused."""

import os

import numpy as np
import torch
from pictures import check, refused, rgb, save
from PIL import Image

from tasks import folders
from tasks.data import load


def pair(root, stem, mask, image=None, suffix="png"):
    mask = np.asarray(mask, np.uint8)
    save(root / "images" / f"{stem}.{suffix}", rgb(9, mask.shape) if image is None else image)
    save(root / "masks" / f"{stem}.png", mask)


def half(value, size=(24, 24), other=0):
    mask = np.full(size, other, np.uint8)
    mask[:, size[1] // 2 :] = value
    return mask


def test_binary_masks_of_0_and_255(tmp_path):
    for i in range(12):
        pair(tmp_path, f"s{i}", half(255), suffix="jpg")
    found = load(f"folder:{tmp_path}", "masks", image_size=16)
    _, masks = check(found, "masks")
    assert (found.channels, found.num_classes, len(found.train), len(found.heldout)) == (3, 2, 11, 1)
    assert masks[:, :, :8].eq(0).all() and masks[:, :, 8:].eq(1).all()
    speckles = np.random.RandomState(0).randint(0, 2, (24, 24)).astype(np.uint8) * 255
    save(tmp_path / "masks" / "s0.png", speckles)
    assert load(f"folder:{tmp_path}", "masks", image_size=16).fingerprint != found.fingerprint


def test_mask_values_become_classes_in_ascending_order_and_stay_so_when_resized(tmp_path):
    pair(tmp_path, "a", half(200))
    pair(tmp_path, "b", half(7, other=50))
    found = load(f"folder:{tmp_path}", "masks", image_size=17)
    _, masks = check(found, "masks")
    assert found.num_classes == 4  # 0, 7, 50, 200
    for mask in masks:
        assert mask.unique().tolist() in ([0, 3], [1, 2])  # interpolation would put other classes on the edge


def test_mask_stays_on_its_image(tmp_path):
    random = np.random.RandomState(0)
    for i in range(4):
        mask = np.kron(random.rand(8, 14) > 0.5, np.ones((8, 8))).astype(np.uint8)
        pair(tmp_path, i, mask, image=mask * 255)
    # Whole fractions of the blocks, where bilinear weights favour the right block.
    for size in (8, 32, 64, 128):
        images, masks = check(load(f"folder:{tmp_path}", "masks", image_size=size), "masks")
        assert torch.equal(images[:, 0] > 0, masks == 1)


def test_photo_on_its_side_fits_an_upright_mask(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        save(tmp_path / "images" / f"{name}.jpg", rgb(9, (16, 24)), exif=exif)
        save(tmp_path / "masks" / f"{name}.png", half(1, (24, 16)))
    check(load(f"folder:{tmp_path}", "masks", image_size=16), "masks")
    save(tmp_path / "masks" / "a.png", half(1, (16, 24)))
    refused("24x16", "16x24", spec=f"folder:{tmp_path}", targets="masks")


def test_palette_and_one_bit_masks(tmp_path):
    for name in "ab":
        save(tmp_path / "one" / "images" / f"{name}.png", rgb(3, (24, 24)))
        save(tmp_path / "one" / "masks" / f"{name}.png", half(1).astype(bool))
        save(tmp_path / "palette" / "images" / f"{name}.png", rgb(3, (24, 24)))
        palette = Image.fromarray(half(1))
        palette.putpalette([0, 0, 0, 255, 0, 0])
        (tmp_path / "palette" / "masks").mkdir(exist_ok=True)
        palette.save(tmp_path / "palette" / "masks" / f"{name}.png")
    for kind in ("one", "palette"):
        found = load(f"folder:{tmp_path / kind}", "masks", image_size=8)
        assert found.num_classes == 2 and check(found, "masks")[1].float().mean() == 0.5


def test_masks_that_do_not_match(tmp_path):
    spec = {"spec": f"folder:{tmp_path}", "targets": "masks"}
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    refused(tmp_path / "images", "holds no images", **spec)
    pair(tmp_path, "a", half(1))
    refused("single image", **spec)
    pair(tmp_path, "b", half(1))
    load(**spec)
    save(tmp_path / "images" / "c.png", rgb(0))
    save(tmp_path / "images" / "d.png", rgb(0))  # comes second, so the message is about c
    refused(tmp_path / "images" / "c.png", "has no mask", tmp_path / "masks" / "c with suffix .png", **spec)
    os.remove(tmp_path / "images" / "c.png")
    os.rename(tmp_path / "images" / "d.png", tmp_path / "d.png")
    save(tmp_path / "masks" / "c.png", half(1))
    refused(tmp_path / "masks" / "c.png", "has no image", **spec)
    save(tmp_path / "images" / "c.png", rgb(0, (24, 30)))
    refused(tmp_path / "masks" / "c.png", "24x24", "30x24", "same size", **spec)
    save(tmp_path / "images" / "c.png", rgb(0, (24, 24)))
    save(tmp_path / "masks" / "c.png", rgb(1, (24, 24)))
    refused(tmp_path / "masks" / "c.png", "RGB", "one channel", **spec)
    (tmp_path / "masks" / "c.png").write_bytes(b"no")
    refused(tmp_path / "masks" / "c.png", "cannot read", **spec)
    os.remove(tmp_path / "masks" / "c.png")
    save(tmp_path / "masks" / "c.jpg", half(255))  # JPEG would turn 0 and 255 into dozens of classes
    refused(tmp_path / "images" / "c.png", "has no mask", ".png or .bmp or .tif", **spec)
    save(tmp_path / "masks" / "c.png", half(1))
    save(tmp_path / "images" / "c.bmp", rgb(0, (24, 24)))
    refused("c.bmp", "c.png", "rename or remove", **spec)


def test_a_mask_is_turned_as_its_image_is(tmp_path):
    photo, exif = np.zeros((16, 16), np.uint8), Image.Exif()
    photo[:8] = 1
    exif[0x0112] = 6
    save(tmp_path / "mask.png", photo, exif=exif)
    assert (folders.decode_mask(tmp_path / "mask.png") == (np.arange(16) >= 8)).all()
