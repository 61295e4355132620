"""Every loader on small files made here, and every mistake that a user can make with them.

    python -m pytest tests/test_data.py
"""
import os
import pickle
import struct
import types

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import data
from data import DataError, load


def everything(part):
    return part[list(range(len(part)))]


def check(found, task="rflow"):
    """The contract of Data, for any set; returns all images and targets."""
    segment = task == "segment"
    assert found.kind == ("segmentation" if segment else "generation")
    assert len(found.fingerprint) == 16 and int(found.fingerprint, 16) >= 0
    size, pairs = found.image_size, [everything(found.train), everything(found.heldout)]
    for images, target in pairs:
        assert images.dtype == torch.float32 and target.dtype == torch.int64
        assert images.shape == (len(target), found.channels, size, size)
        assert images.min() >= -1 and images.max() <= 1
        assert target.shape == ((len(images), size, size) if segment else (len(images),))
        assert target.min() >= 0 and target.max() < max(found.num_classes, 1)
    return [torch.cat(parts) for parts in zip(*pairs)]


def refused(*words, **arguments):
    """load(**arguments) is refused in one line that contains the words."""
    with pytest.raises(DataError) as caught:
        load(**{"task": "rflow", **arguments})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message
    return message


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels)).save(path, **options)
    return path


def grey(value, size=(20, 20)):
    return np.full(size, value, np.uint8)


def rgb(value, size=(20, 20)):
    return np.full((*size, 3), value, np.uint8)


def same(a, b):
    return all(torch.equal(x, y) for p, q in ((a.train, b.train), (a.heldout, b.heldout))
               for x, y in zip(everything(p), everything(q)))


# ---- Words ----------------------------------------------------------------------------------------------------------

def test_words_that_are_not_data_sets():
    message = refused("unknown", "imagenet", "folder:PATH", "nifti:PATH", spec="imagenet")
    assert "digits" in message
    refused("unknown", spec="")
    refused("folder needs a path", "folder:PATH", spec="folder")
    refused("medmnist:FILE.npz", spec="medmnist:")
    refused("digits takes no path", spec="digits:x")
    refused("unknown task", "segment", spec=None, task="classify")
    refused("image size 4", "8", spec="digits", image_size=4)


def test_a_bare_path_is_recognised(tmp_path):
    refused(f"did you mean folder:{tmp_path}", spec=str(tmp_path))


@pytest.mark.parametrize("spec", ["digits", "cifar10:x", "mnist:x", "medmnist:x.npz"])
def test_sets_without_masks_cannot_be_segmented(spec):
    refused("has no masks", "folder:PATH", spec=spec, task="segment")


@pytest.mark.parametrize("spec", ["folder", "nifti", "medmnist", "cifar10", "mnist"])
def test_missing_path(spec, tmp_path):
    refused(tmp_path / "absent", "download" if "mnist" == spec or "cifar" in spec else "does not exist",
            spec=f"{spec}:{tmp_path / 'absent'}")


# ---- Built in -------------------------------------------------------------------------------------------------------

def test_digits_are_all_there_and_split_once():
    from sklearn.datasets import load_digits
    found = load(None, "rflow")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 10, 8)
    assert (len(found.train), len(found.heldout)) == (1297, 500)
    ours = sorted(zip(((images + 1) * 8).flatten(1).tolist(), labels.tolist()))
    digits = load_digits()
    assert ours == sorted(zip(digits.data.tolist(), digits.target.tolist()))  # each once: the parts are disjoint
    shares = torch.bincount(everything(found.heldout)[1]) / torch.bincount(labels)
    assert (shares - 500 / 1797).abs().max() < 0.01  # stratified
    again = load("digits", "ddpm", seed=5)
    assert same(found, again) and found.fingerprint == again.fingerprint


def test_digits_resize_by_area():
    small, large = load("digits", "rflow"), load("digits", "rflow", image_size=16)
    images, _ = check(large)
    assert images.shape[-1] == 16 and large.fingerprint != small.fingerprint
    back = torch.nn.functional.avg_pool2d(images, 2)
    assert (back.mean((1, 2, 3)) - check(small)[0].mean((1, 2, 3))).abs().max() < 0.02


def test_synthetic_follows_the_seed():
    found = load(None, "segment", seed=3)
    images, masks = check(found, "segment")
    assert (found.channels, found.num_classes, found.image_size) == (1, 4, 64)
    assert (len(found.train), len(found.heldout)) == (256, 64)
    assert masks.unique().tolist() == [0, 1, 2, 3] and images.min() == -1 and images.max() == 1
    assert len(images.flatten(1).unique(dim=0)) == 320
    state = np.random.get_state()[1].copy()
    again, other = load("synthetic", "segment", seed=3), load("synthetic", "segment", seed=4)
    assert (np.random.get_state()[1] == state).all()  # the global generator is left alone
    assert same(found, again) and found.fingerprint == again.fingerprint
    assert not same(found, other) and found.fingerprint != other.fingerprint
    # Brightness follows the class, or there would be nothing to learn.
    means = [images[:, 0][masks == k].mean().item() for k in range(4)]
    assert means == sorted(means)


@pytest.mark.parametrize("size", [8, 24])
def test_synthetic_at_other_sizes_and_without_masks(size):
    check(load("synthetic", "segment", image_size=size), "segment")
    found = load("synthetic", "rflow", image_size=size)
    assert check(found)[1].eq(0).all() and found.num_classes == 0


# ---- Folders, generation --------------------------------------------------------------------------------------------

def test_the_split_hardly_moves_when_files_are_added(tmp_path):
    def heldout():
        return {path.name for path, _ in load(f"folder:{tmp_path}", "rflow").heldout.items}
    for i in range(100):
        save(tmp_path / f"{i}.png", grey(i, (8, 8)))
    before = heldout()
    save(tmp_path / "0a.png", grey(0, (8, 8)))
    assert len(before) == 10 and len(before & heldout()) >= 9


def test_fingerprint_of_a_folder_follows_names_and_file_sizes(tmp_path):
    def fingerprint():
        return load(f"folder:{tmp_path}", "rflow").fingerprint
    for i in range(4):
        save(tmp_path / f"{i}.png", grey(i))
    seen = {fingerprint()}
    save(tmp_path / "1.png", np.random.RandomState(0).randint(0, 255, (20, 20), np.uint8))
    seen.add(fingerprint())
    os.rename(tmp_path / "1.png", tmp_path / "11.png")
    seen.add(fingerprint())
    assert len(seen) == 3
    os.utime(tmp_path / "11.png", (0, 0))
    assert fingerprint() in seen


def test_flat_folder(tmp_path):
    for i in range(30):
        save(tmp_path / f"{i:02}.{'PNG' if i % 2 else 'bmp'}", grey(i * 8))
    save(tmp_path / "._00.png", grey(0))  # hidden, as macOS leaves them: not data
    (tmp_path / "notes.txt").write_text("not an image")
    found = load(f"folder:{tmp_path}", "rflow")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 0, 64)
    assert (len(found.train), len(found.heldout)) == (27, 3)
    values = ((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert sorted(values) == [i * 8 for i in range(30)]  # all of them, and none in both parts
    assert labels.eq(0).all()
    again = load(f"folder:{tmp_path}", "rflow", seed=9)
    assert same(found, again) and found.fingerprint == again.fingerprint
    assert load(f"folder:{tmp_path}", "rflow", image_size=32).fingerprint != found.fingerprint
    assert "27 + 3 held-out" in str(found) and "1x64x64" in str(found)


def test_fingerprint_survives_a_move(tmp_path):
    for place in ("here", "there"):
        for i in range(4):
            save(tmp_path / place / "my photos" / f"{i}.png", grey(i))
    here, there = (load(f"folder:{tmp_path / place / 'my photos'}", "rflow") for place in ("here", "there"))
    assert here.fingerprint == there.fingerprint and here.name == there.name == "folder-my_photos"


def test_class_folders(tmp_path):
    for label, name in enumerate(["cat", "dog", "emu"]):
        for i in range(10):
            save(tmp_path / name / "more" / f"{i}.jpg" if i > 7 else tmp_path / name / f"{i}.jpg", rgb(label * 100))
    found = load(f"folder:{tmp_path}", "ddpm", image_size=16)
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (3, 3, 16)
    assert torch.bincount(labels).tolist() == [10, 10, 10]  # sorted names: cat 0, dog 1, emu 2
    assert torch.allclose(images[:, 0, 0, 0], labels * 100 / 127.5 - 1, atol=0.02)


def test_grey_and_colour_together_become_colour(tmp_path):
    save(tmp_path / "a.png", grey(255))
    save(tmp_path / "b.png", rgb((255, 0, 0)))
    found = load(f"folder:{tmp_path}", "rflow")
    images, _ = check(found)
    assert found.channels == 3
    assert sorted(images[:, :, 0, 0].tolist()) == [[1, -1, -1], [1, 1, 1]]


def test_centre_crop(tmp_path):
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 255
    save(tmp_path / "wide.png", wide)
    save(tmp_path / "tall.png", wide.T)
    images, _ = check(load(f"folder:{tmp_path}", "rflow", image_size=40))
    assert images.eq(1).all()  # only the middle third is white


def test_downsizing_is_antialiased(tmp_path):
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, 3::8] = stripes[:, 4::8] = 255
    for name in "ab":
        save(tmp_path / f"{name}.png", stripes)
    images, _ = check(load(f"folder:{tmp_path}", "rflow", image_size=8))
    assert images.max() < 0  # a quarter is white; sampling the middle of each eighth would see nothing else


def test_white_stays_within_the_range_when_resized(tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.png", grey(255, (17, 17)))  # 17 -> 8 sums to 1 + 1.2e-7 in fp32
    check(load(f"folder:{tmp_path}", "rflow", image_size=8))


def test_pixel_formats(tmp_path):
    save(tmp_path / "deep" / "a.png", np.full((9, 9), 65535, np.uint16))
    save(tmp_path / "deep" / "b.tif", np.zeros((9, 9), np.uint16))
    found = load(f"folder:{tmp_path / 'deep'}", "rflow", image_size=9)
    assert found.channels == 1 and sorted(check(found)[0][:, 0, 0, 0].tolist()) == [-1, 1]
    clear = np.zeros((9, 9, 4), np.uint8)  # black under full transparency shows as white
    save(tmp_path / "clear" / "a.png", clear)
    save(tmp_path / "clear" / "b.png", clear)
    assert check(load(f"folder:{tmp_path / 'clear'}", "rflow", image_size=9))[0].eq(1).all()
    save(tmp_path / "float" / "a.tif", np.zeros((9, 9), np.float32))
    refused("float/a.tif", "32-bit", spec=f"folder:{tmp_path / 'float'}")


def test_exif_orientation(tmp_path):
    photo, exif = np.zeros((16, 16), np.uint8), Image.Exif()
    photo[:8] = 255
    exif[0x0112] = 6  # shown turned clockwise by 90 degrees: the bright upper half comes to the right
    for name in "ab":
        save(tmp_path / f"{name}.jpg", photo, exif=exif)
    images, _ = check(load(f"folder:{tmp_path}", "rflow", image_size=16))
    assert images[..., 12:].min() > 0.9 and images[..., :4].max() < -0.9


def test_folder_mistakes(tmp_path):
    spec = f"folder:{tmp_path}"
    refused(tmp_path, "holds no images", spec=spec)
    (tmp_path / "cat").mkdir()
    refused("holds no images", spec=spec)
    save(tmp_path / "dog" / "a.png", grey(1))
    refused(tmp_path / "cat", "holds no images", spec=spec)
    (tmp_path / "cat").rmdir()
    refused("single image", "two", spec=spec)
    save(tmp_path / "b.png", grey(1))
    refused("beside class folders", spec=spec)
    refused("is not a folder", tmp_path / "b.png", spec=f"{spec}/b.png")
    refused("has no folders images and masks", spec=spec, task="segment")


@pytest.mark.parametrize("parts, use", [(("images", "masks"), "images"), (("train", "val"), "train")])
def test_layouts_of_other_kinds_are_not_taken_for_classes(parts, use, tmp_path):
    for part in parts:
        save(tmp_path / part / "a.png", grey(1))
    refused(f"--data folder:{tmp_path / use}", spec=f"folder:{tmp_path}")


def test_two_images_suffice(tmp_path):
    save(tmp_path / "a.png", grey(1))
    save(tmp_path / "b.png", grey(2))
    found = load(f"folder:{tmp_path}", "rflow")
    assert len(found.train) == len(found.heldout) == 1


@pytest.mark.parametrize("damage", ["text", "empty", "flipped", "short"])
def test_damaged_png_is_named_at_load(damage, tmp_path):
    save(tmp_path / "good.png", grey(0))
    bad = save(tmp_path / "bad.png", np.random.RandomState(0).randint(0, 255, (30, 30), np.uint8))
    content = bytearray(bad.read_bytes())
    content[200] ^= 255
    bad.write_bytes({"text": b"hello", "empty": b"", "flipped": bytes(content), "short": content[:300]}[damage])
    refused("cannot read", bad, "replace or remove", spec=f"folder:{tmp_path}")


def test_damaged_jpeg_is_named_at_access_from_a_worker_too(tmp_path):
    noise = np.random.RandomState(0).randint(0, 255, (64, 64, 3), np.uint8)
    for name in "abc":
        path = save(tmp_path / f"{name}.jpg", noise)
        path.write_bytes(path.read_bytes()[:1500])  # the header is whole, the pixels are not
    found = load(f"folder:{tmp_path}", "rflow")
    with pytest.raises(DataError, match=r"^cannot read .*/[abc]\.jpg as an image \(.*\): replace or remove it$"):
        found.train[[0]]
    with pytest.raises(DataError, match=r"^cannot read .*/[abc]\.jpg as an image \(.*\): replace or remove it$"):
        list(DataLoader(found.train, sampler=[[0, 1]], batch_size=None, num_workers=1))


def test_files_are_decoded_once_while_there_is_room(tmp_path, monkeypatch):
    for i in range(4):
        save(tmp_path / f"{i}.png", grey(i))
    calls, decode = [], data._decode
    monkeypatch.setattr(data, "_decode", lambda *a: calls.append(a) or decode(*a))
    monkeypatch.setattr(data, "CACHE_BYTES", 2 * 8 * 8 * 4)
    part = load(f"folder:{tmp_path}", "rflow", image_size=8).train
    first, second = everything(part), everything(part)
    assert torch.equal(first[0], second[0]) and len(part) == 3
    assert len(calls) == 4  # two stay in the cache, the third is read twice


def test_data_loader_yields_the_lists_asked_for(tmp_path):
    for i in range(12):
        save(tmp_path / f"{i:02}.png", grey(i))
    for part in (load(f"folder:{tmp_path}", "rflow", image_size=8).train, load("digits", "rflow").train):
        lists = [[3, 1, 4], [1, 5], [9, 2, 6]]
        loaded = list(DataLoader(part, sampler=lists, batch_size=None, num_workers=2))
        assert len(loaded) == 3
        for index, (images, labels) in zip(lists, loaded):
            assert torch.equal(images, part[index][0]) and torch.equal(labels, part[index][1])


# ---- Folders, segmentation ------------------------------------------------------------------------------------------

def pair(root, stem, mask, image=None, suffix="png"):
    mask = np.asarray(mask, np.uint8)
    save(root / "images" / f"{stem}.{suffix}", rgb(9, mask.shape) if image is None else image)
    save(root / "masks" / f"{stem}.png", mask)


def half(value, size=(24, 24), other=0):
    mask = np.full(size, other, np.uint8)
    mask[:, size[1] // 2:] = value
    return mask


def test_binary_masks_of_0_and_255(tmp_path):
    for i in range(12):
        pair(tmp_path, f"s{i}", half(255), suffix="jpg")
    found = load(f"folder:{tmp_path}", "segment", image_size=16)
    _, masks = check(found, "segment")
    assert (found.channels, found.num_classes, len(found.train), len(found.heldout)) == (3, 2, 11, 1)
    assert masks[:, :, :8].eq(0).all() and masks[:, :, 8:].eq(1).all()
    speckles = np.random.RandomState(0).randint(0, 2, (24, 24)).astype(np.uint8) * 255
    save(tmp_path / "masks" / "s0.png", speckles)
    assert load(f"folder:{tmp_path}", "segment", image_size=16).fingerprint != found.fingerprint


def test_mask_values_become_classes_in_ascending_order_and_stay_so_when_resized(tmp_path):
    pair(tmp_path, "a", half(200))
    pair(tmp_path, "b", half(7, other=50))
    found = load(f"folder:{tmp_path}", "segment", image_size=17)
    _, masks = check(found, "segment")
    assert found.num_classes == 4  # 0, 7, 50, 200
    for mask in masks:
        assert mask.unique().tolist() in ([0, 3], [1, 2])  # interpolation would put other classes on the edge


def test_mask_stays_on_its_image(tmp_path):
    random = np.random.RandomState(0)
    for i in range(4):
        mask = np.kron(random.rand(8, 14) > 0.5, np.ones((8, 8))).astype(np.uint8)
        pair(tmp_path, i, mask, image=mask * 255)
    for size in (8, 32, 64, 128):  # whole fractions of the blocks, where bilinear weights favour the right block
        images, masks = check(load(f"folder:{tmp_path}", "segment", image_size=size), "segment")
        assert torch.equal(images[:, 0] > 0, masks == 1)


def test_masks_are_sampled_at_pixel_centres(tmp_path):
    centres = np.zeros((96, 96), np.uint8)
    centres[1::3, 1::3] = 1  # 96 -> 32: the middle of each 3x3
    for name in "ab":
        pair(tmp_path, name, centres)
    assert check(load(f"folder:{tmp_path}", "segment", image_size=32), "segment")[1].eq(1).all()


def test_photo_on_its_side_fits_an_upright_mask(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        save(tmp_path / "images" / f"{name}.jpg", rgb(9, (16, 24)), exif=exif)
        save(tmp_path / "masks" / f"{name}.png", half(1, (24, 16)))
    check(load(f"folder:{tmp_path}", "segment", image_size=16), "segment")
    save(tmp_path / "masks" / "a.png", half(1, (16, 24)))
    refused("24x16", "16x24", spec=f"folder:{tmp_path}", task="segment")


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
        found = load(f"folder:{tmp_path / kind}", "segment", image_size=8)
        assert found.num_classes == 2 and check(found, "segment")[1].float().mean() == 0.5


def test_masks_that_do_not_match(tmp_path):
    spec = {"spec": f"folder:{tmp_path}", "task": "segment"}
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    refused(tmp_path / "images", "empty", **spec)
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


def test_masks_without_a_second_value_or_with_too_many(tmp_path):
    for name in "ab":
        pair(tmp_path / "plain", name, grey(0))
        pair(tmp_path / "smooth", name, np.arange(256).reshape(16, 16))
    refused("value 0 alone", spec=f"folder:{tmp_path / 'plain'}", task="segment")
    refused("256 values", "antialiasing", spec=f"folder:{tmp_path / 'smooth'}", task="segment")


# ---- Published sets -------------------------------------------------------------------------------------------------

class Python2Pickler(pickle._Pickler):
    """CIFAR-10's files were pickled by Python 2, whose only string is the byte string."""
    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        value = value.encode() if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(value)) + value)
        self.memoize(value)
    dispatch[bytes] = dispatch[str] = save_string

    def save_global(self, value, name=None):
        module = {"_reconstruct": "numpy.core.multiarray"}.get(value.__name__, "numpy")
        self.write(f"c{module}\n{value.__name__}\n".encode())
        self.memoize(value)
    dispatch[types.BuiltinFunctionType] = dispatch[type] = save_global


def cifar_batch(path, batch):
    with open(path, "wb") as file:
        Python2Pickler(file, protocol=2).dump(batch)


def cifar_files(root, per_file=6):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random, pixels = np.random.RandomState(0), []
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {"batch_label": name, "labels": random.randint(0, 10, per_file).tolist(),
                 "data": random.randint(0, 256, (per_file, 3072), np.uint8), "filenames": ["x.png"] * per_file}
        cifar_batch(folder / name, batch)
        pixels.append(batch)
    return pixels


def test_cifar10(tmp_path):
    batches = cifar_files(tmp_path)
    with open(tmp_path / "cifar-10-batches-py" / "test_batch", "rb") as file:  # the files are true to the format
        reference = pickle.load(file, encoding="latin1")
    assert (reference["data"] == batches[-1]["data"]).all() and reference["labels"] == batches[-1]["labels"]
    found = load(f"cifar10:{tmp_path}", "rflow")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (3, 10, 32)
    assert (len(found.train), len(found.heldout)) == (30, 6)
    pixels = np.concatenate([b["data"] for b in batches]).reshape(-1, 3, 32, 32)
    assert (((images + 1) * 127.5).round().numpy() == pixels).all()
    assert labels.tolist() == sum([b["labels"] for b in batches], [])
    inner = load(f"cifar10:{tmp_path / 'cifar-10-batches-py'}", "rflow")
    assert same(found, inner) and found.fingerprint == inner.fingerprint
    check(load(f"cifar10:{tmp_path}", "rflow", image_size=16))


def test_cifar10_incomplete_or_damaged(tmp_path):
    cifar_files(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:5000])
    refused("cannot read", batch, spec=f"cifar10:{tmp_path}")
    batch.write_bytes(pickle.dumps({b"data": 1, b"labels": []}))
    refused("cannot read", batch, spec=f"cifar10:{tmp_path}")
    for labels in ([1] * 5, [1, 2, 3, 4, 5, 10]):
        cifar_batch(batch, {"data": np.zeros((6, 3072), np.uint8), "labels": labels})
        refused("cannot read", batch, "don't match", spec=f"cifar10:{tmp_path}")
    os.remove(batch)
    refused("holds no CIFAR10", f"datasets.CIFAR10('{tmp_path}', download=True)", spec=f"cifar10:{tmp_path}")


class Malice:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_runs_code_is_refused_and_not_run(protocol, tmp_path):
    cifar_files(tmp_path)
    batch, trace = tmp_path / "cifar-10-batches-py" / "data_batch_1", tmp_path / "trace"
    for malice in (Malice(os.mkdir, str(trace)), Malice(eval, f"__import__('os').mkdir({str(trace)!r})")):
        batch.write_bytes(pickle.dumps({"data": malice, "labels": []}, protocol=protocol))
        refused("cannot read", batch, "calls", spec=f"cifar10:{tmp_path}")
        assert not trace.exists()
        pickle.loads(batch.read_bytes())  # it would have worked
        assert trace.exists()
        trace.rmdir()
    # A dotted name reaches through an allowed module in an ordinary unpickler.
    batch.write_bytes(b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.")
    refused("calls numpy.ndarray.tofile", spec=f"cifar10:{tmp_path}")


def idx_file(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


def test_mnist(tmp_path):
    random, raw, spec = np.random.RandomState(0), tmp_path / "MNIST" / "raw", f"mnist:{tmp_path}"
    refused("holds no MNIST", f"datasets.MNIST('{tmp_path}', download=True)", spec=spec)
    pixels, labels = random.randint(0, 256, (25, 28, 28), np.uint8), random.randint(0, 10, 25).astype(np.uint8)
    for name, part in (("train", slice(20)), ("t10k", slice(20, None))):
        idx_file(raw / f"{name}-images-idx3-ubyte", pixels[part])
        idx_file(raw / f"{name}-labels-idx1-ubyte", labels[part])
    found = load(spec, "rflow")
    images, target = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 10, 28)
    assert (len(found.train), len(found.heldout)) == (20, 5)
    assert (((images[:, 0] + 1) * 127.5).round().numpy() == pixels).all() and target.tolist() == labels.tolist()
    check(load(spec, "rflow", image_size=32))
    for wrong in (labels[:3], np.full(5, 10, np.uint8)):
        idx_file(raw / "t10k-labels-idx1-ubyte", wrong)
        refused("cannot read", "don't match", spec=spec)
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03garbage")
    refused("cannot read", raw.parent, spec=spec)


def medmnist(path, shape=(28, 28), labels=1, dtype=np.uint8, **more):
    random, arrays = np.random.RandomState(0), {}
    for part, n in (("train", 20), ("val", 5), ("test", 7)):
        arrays[f"{part}_images"] = random.randint(0, 256, (n, *shape)).astype(dtype)
        arrays[f"{part}_labels"] = np.arange(n * labels, dtype=np.uint8).reshape(n, labels) % (4 if labels == 1 else 2)
    np.savez(path, **{**arrays, **more})
    return arrays


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 3), (64, 64)])
def test_medmnist(shape, tmp_path):
    arrays = medmnist(tmp_path / "bloodmnist.npz", shape)
    found = load(f"medmnist:{tmp_path / 'bloodmnist.npz'}", "rflow")
    images, labels = check(found)
    assert (found.name, found.channels, found.num_classes) == ("bloodmnist", 3 if len(shape) == 3 else 1, 4)
    assert (found.image_size, len(found.train), len(found.heldout)) == (shape[0], 20, 7)
    pixels = np.concatenate([arrays["train_images"], arrays["test_images"]])
    ours = ((images + 1) * 127.5).round().permute(0, 2, 3, 1).numpy()
    assert (ours.reshape(pixels.shape) == pixels).all()
    assert labels.tolist() == np.concatenate([arrays["train_labels"], arrays["test_labels"]])[:, 0].tolist()


def test_medmnist_with_several_labels_is_unlabelled(tmp_path):
    medmnist(tmp_path / "chest.npz", labels=14)
    found = load(f"medmnist:{tmp_path / 'chest.npz'}", "rflow")
    assert check(found)[1].eq(0).all() and found.num_classes == 0


def test_medmnist_mistakes(tmp_path):
    file = tmp_path / "x.npz"
    spec = {"spec": f"medmnist:{file}"}
    medmnist(file, (28, 28, 28))
    refused("cannot read", file, "[20, 28, 28, 28]", **spec)
    medmnist(file, dtype=np.float32)
    refused("float32", **spec)
    medmnist(file, test_labels=np.zeros((3, 1), np.uint8))
    refused("don't match", **spec)
    np.savez(file, train_images=grey(0))
    refused("train_labels", **spec)
    file.write_bytes(b"PK\x03\x04 not a zip file")
    refused("cannot read", file, **spec)
    medmnist(file, train_images=np.array([Malice(os.mkdir, str(tmp_path / "trace"))] * 20, object))
    refused("allow_pickle", **spec)
    assert not (tmp_path / "trace").exists()


# ---- Volumes --------------------------------------------------------------------------------------------------------

def phantom(slices=12, size=(30, 24), hot=True):
    """[X, Y, Z]: air at the lower end, then slices of a box whose brightness rises with z; one hot voxel."""
    volume = np.zeros((*size, slices), np.float32)
    for z in range(2, slices):
        volume[6:-6, 6:-6, z] = 100 + 10 * z
    volume[10, 10, slices // 2] = 1e6 if hot else 150
    return volume


def nifti(path, volume, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4) if affine is None else affine), path)
    return path


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_one_volume(suffix, tmp_path):
    path = nifti(tmp_path / f"scan.{suffix}", phantom())
    found = load(f"nifti:{path}", "rflow")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 0, 64)
    assert (len(found.train), len(found.heldout)) == (9, 1)  # 12 slices, two of them air
    centre = images[:, 0, 32, 32]
    assert (centre.diff() > 0).all() and centre[0] > 0  # in order, on a scale that the hot voxel doesn't set
    assert images.min() == -1 and images.max() == 1
    assert found.fingerprint == load(f"nifti:{path}", "rflow").fingerprint


def test_volumes_are_held_out_whole(tmp_path):
    for i in range(10):
        volume = phantom(slices=12 + i)
        volume[9 + i] = 0  # a dark line tells the volumes apart
        nifti(tmp_path / f"{i}.nii.gz", volume)
    found = load(f"nifti:{tmp_path}", "rflow", image_size=24)
    check(found)

    def volumes(part):  # crop [30] -> [24] starts at 3, the box at 6
        images = everything(part)[0]
        return (images[:, 0, 12, 6:16].argmin(1)).bincount(minlength=10)
    train, held = volumes(found.train), volumes(found.heldout)
    assert (train * held).eq(0).all() and (train + held).tolist() == list(range(10, 20))
    assert (held > 0).sum() == 1


def test_slices_show_the_body_upright_however_it_is_stored(tmp_path):
    volume = np.zeros((24, 24, 4), np.float32)
    volume[4:20, 14:22] = 1  # towards the front (+Y)
    nifti(tmp_path / "a.nii", volume)
    images, _ = check(load(f"nifti:{tmp_path / 'a.nii'}", "rflow", image_size=24))
    assert images[:, 0, 2:10, 4:20].eq(1).all() and images[:, 0, 12:].eq(-1).all()
    turned = np.diag([1.0, -1, 1, 1])
    nifti(tmp_path / "b.nii", volume[:, ::-1].copy(), turned)
    assert torch.equal(images, check(load(f"nifti:{tmp_path / 'b.nii'}", "rflow", image_size=24))[0])


def test_volumes_with_masks(tmp_path):
    for i in range(3):
        volume = phantom()[:, :, ::-1].copy()  # the air on top
        nifti(tmp_path / "images" / f"{i}.nii.gz", volume + i)
        mask = (volume > 0).astype(np.uint8) * 2
        mask[15:] *= 1 + i
        nifti(tmp_path / "masks" / f"{i}.nii", mask)
    found = load(f"nifti:{tmp_path}", "segment", image_size=48)
    images, masks = check(found, "segment")
    assert found.num_classes == 4 and masks.unique().tolist() == [0, 1, 2, 3]  # 0, 2, 4, 6
    assert (len(found.train), len(found.heldout)) == (20, 10)
    assert ((images[:, 0] > 0) == (masks > 0)).float().mean() > 0.98
    refused("--task segment", f"nifti:{tmp_path / 'images'}", spec=f"nifti:{tmp_path}")
    nifti(tmp_path / "masks" / "1.nii", np.full((30, 24, 12), 0.5, np.float32))
    refused("masks/1.nii", "fractions", spec=f"nifti:{tmp_path}", task="segment")
    nifti(tmp_path / "masks" / "1.nii", np.zeros((30, 24, 10), np.uint8))
    refused("masks/1.nii", "(30, 24, 10)", "(30, 24, 12)", spec=f"nifti:{tmp_path}", task="segment")
    os.remove(tmp_path / "masks" / "1.nii")
    refused("images/1.nii.gz", "has no mask", spec=f"nifti:{tmp_path}", task="segment")


def test_volume_mistakes(tmp_path):
    refused("holds no volumes", tmp_path, spec=f"nifti:{tmp_path}")
    path = tmp_path / "a.nii.gz"
    spec = {"spec": f"nifti:{path}"}
    refused("not a folder", task="segment", **{"spec": f"nifti:{nifti(path, phantom())}"})
    content = path.read_bytes()
    path.write_bytes(content[:len(content) // 2])
    refused("cannot read", path, **spec)
    path.write_bytes(b"not a volume")
    refused("cannot read", path, **spec)
    nifti(path, np.full((9, 9, 9), 5, np.float32))
    refused(path, "anything to see", **spec)
    nifti(path, np.random.RandomState(0).rand(9, 9, 9, 2).astype(np.float32))
    refused(path, "(9, 9, 9, 2)", "3-D", **spec)
    nifti(path, np.where(phantom() > 0, phantom(), np.nan))
    refused(path, "NaN", **spec)
    nifti(path, phantom(3))
    refused(tmp_path, "single image", **spec)
