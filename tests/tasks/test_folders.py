"""folder:PATH on small images made here: what is found and what is refused."""

import importlib.util
import logging
import os
import struct

import nibabel
import numpy as np
import pytest
import torch
from pictures import check, grey, refused, rgb, same, save
from PIL import Image
from test_folders_of_masks import half, pair
from torch.utils.data import DataLoader

from lowprec.errors import Refused
from tasks import data
from tasks.data import load


def test_the_split_hardly_moves_when_files_are_added(tmp_path):
    def heldout():
        return {path.name for path, _ in load(f"folder:{tmp_path}").heldout.items}

    for i in range(100):
        save(tmp_path / f"{i}.png", grey(i, (8, 8)))
    before = heldout()
    save(tmp_path / "0a.png", grey(0, (8, 8)))
    assert len(before) == 10 and len(before & heldout()) >= 9


def test_fingerprint_of_a_folder_follows_names_and_content(tmp_path):
    def fingerprint():
        return load(f"folder:{tmp_path}").fingerprint

    for i in range(4):
        save(tmp_path / f"{i}.bmp", grey(i))
    seen = {fingerprint()}
    save(tmp_path / "1.bmp", grey(9))  # the same size in bytes
    seen.add(fingerprint())
    os.rename(tmp_path / "1.bmp", tmp_path / "11.bmp")
    seen.add(fingerprint())
    (tmp_path / "class").mkdir()
    for i in (0, 11, 2, 3):
        os.rename(tmp_path / f"{i}.bmp", tmp_path / "class" / f"{i}.bmp")
    seen.add(fingerprint())
    assert len(seen) == 4
    os.utime(tmp_path / "class" / "11.bmp", (0, 0))
    assert fingerprint() in seen


def sixteen_bits(path, largest):
    rows = np.linspace(0, largest, 64).reshape(8, 8).astype(np.uint16)
    Image.fromarray(rows).save(path)


def test_twelve_bits_in_sixteen_are_said_and_mended(tmp_path):
    for i, largest in enumerate((4095, 3000, 100)):
        sixteen_bits(tmp_path / f"{i}.png", largest)
    dark = load(f"folder:{tmp_path}", image_size=8)
    assert len(dark.notes) == 1 and "--white 4095" in dark.notes[0]
    mended = load(f"folder:{tmp_path}", image_size=8, white=4095)
    assert not mended.notes and mended.fingerprint != dark.fingerprint
    images, _ = check(mended)
    assert images.max() == 1 and images.min() == -1
    assert "what is above is white" in load(f"folder:{tmp_path}", image_size=8, white=1000).notes[0]
    sixteen_bits(tmp_path / "full.png", 40000)
    assert not load(f"folder:{tmp_path}", image_size=8).notes


@pytest.mark.parametrize("suffix", ["tif", "gif"])
def test_several_images_in_a_file_are_said_and_read_on_demand(tmp_path, suffix):
    for i in range(2):
        pages = [Image.fromarray(np.full((16, 16), 50 * (3 * i + k), np.uint8)) for k in range(3)]
        pages[0].save(tmp_path / f"{i}.{suffix}", save_all=True, append_images=pages[1:])
    first = load(f"folder:{tmp_path}", image_size=16)
    assert len(first.notes) == 1 and "--pages all" in first.notes[0]
    found = load(f"folder:{tmp_path}", image_size=16, pages="all")
    assert not found.notes and (len(found.train), len(found.heldout)) == (3, 3)
    assert found.fingerprint != first.fingerprint
    images = torch.cat([found.train[[0, 1, 2]][0], found.heldout[[0, 1, 2]][0]])
    assert len({round(float(image.mean()), 1) for image in images}) == 6


def stack(folder, *pages):
    """Two files of these pages."""
    first, *others = map(Image.fromarray, pages)
    for name in ("a.tif", "b.tif"):
        first.save(folder / name, save_all=True, append_images=others)
    return f"folder:{folder}"


def test_all_pages_of_a_file_are_looked_at(tmp_path):
    dark, bright = (np.full((16, 16), value, np.uint16) for value in (100, 4095))
    found = load(stack(tmp_path, dark, bright), pages="all")
    assert "reach 4,095" in found.notes[0] and found.channels == 1
    assert not load(stack(tmp_path, dark, bright), pages="all", white=4095).notes
    assert load(stack(tmp_path, grey(1), rgb(2), grey(3)), pages="all").channels == 3
    assert load(stack(tmp_path, grey(1), rgb(2))).channels == 1  # the first is read
    refused("32-bit", spec=stack(tmp_path, grey(1), np.ones((20, 20), np.float32)), pages="all")


def test_a_later_page_cut_short_is_named_at_load(tmp_path):
    draw = np.random.default_rng(0)
    spec = stack(tmp_path, *(draw.integers(0, 255, (64, 64), dtype=np.uint8) for _ in range(3)))
    content = (tmp_path / "b.tif").read_bytes()
    (tmp_path / "b.tif").write_bytes(content[:-2000])
    refused("b.tif", spec=spec, pages="all")


def test_flat_folder(tmp_path):
    for i in range(30):
        save(tmp_path / f"{i:02}.{'PNG' if i % 2 else 'bmp'}", grey(i * 8))
    save(tmp_path / "._00.png", grey(0))  # hidden, as macOS leaves them: not data
    (tmp_path / "notes.txt").write_text("not an image")
    found = load(f"folder:{tmp_path}")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 0, 64)
    assert (len(found.train), len(found.heldout)) == (27, 3)
    values = ((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert sorted(values) == [i * 8 for i in range(30)]  # all of them, and none in both parts
    assert labels.eq(0).all()
    again = load(f"folder:{tmp_path}", seed=9)
    assert same(found, again) and found.fingerprint == again.fingerprint
    assert load(f"folder:{tmp_path}", image_size=32).fingerprint != found.fingerprint
    assert "27 + 3 held-out" in str(found) and "1x64x64" in str(found)


def test_class_folders(tmp_path):
    for label, name in enumerate(["cat", "dog", "emu"]):
        for i in range(10):
            folder = tmp_path / name / "more" if i > 7 else tmp_path / name
            save(folder / f"{i}.jpg", rgb(label * 100))
    found = load(f"folder:{tmp_path}", image_size=16)
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (3, 3, 16)
    assert torch.bincount(labels).tolist() == [10, 10, 10]  # sorted names: cat 0, dog 1, emu 2
    assert torch.allclose(images[:, 0, 0, 0], labels * 100 / 127.5 - 1, atol=0.02)


def test_an_album_with_folders_in_it_is_read_whole_without_classes(tmp_path):
    for name in ("a.png", "b.gif", "trip/c.jpg", "trip/train/d.png", "test/e.png", "images/f.png"):
        save(tmp_path / name, grey(len(name)))
    for name in ("g.heic", "trip/h.heic", "trip/notes.txt"):
        (tmp_path / name).write_bytes(b"?")
    found = load(f"folder:{tmp_path}", image_size=8, labels="none")
    assert found.num_classes == 0 and len(found.train) + len(found.heldout) == 6
    assert [note for note in found.notes if note.endswith("2 .heic, 1 .txt")]
    refused(tmp_path, "add --labels none", spec=f"folder:{tmp_path}")
    refused("--labels", "drop it", spec=f"nifti:{tmp_path}", labels="none")


@pytest.mark.parametrize("kind", ["labels", "masks", "nifti"])
def test_broken_files_are_left_out_and_counted_where_that_is_wanted(kind, tmp_path):
    spec = f"{'nifti' if kind == 'nifti' else 'folder'}:{tmp_path}"
    targets = "masks" if kind == "masks" else "labels"
    for name in "abcd":
        if kind == "nifti":
            voxels = np.random.default_rng(0).integers(0, 9, (16, 16, 4)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{name}.nii")
        elif kind == "masks":
            pair(tmp_path, name, half(255))
        else:
            save(tmp_path / f"{name}.png", grey(ord(name)))
    bad = next(path for path in sorted(tmp_path.rglob("*b.*")))
    bad.write_bytes(bad.read_bytes()[:40])
    refused("cannot read", bad, "--skip_broken leaves out all such files", spec=spec, targets=targets)
    found = load(spec, targets, 16, skip_broken=True)
    assert [
        note
        for note in found.notes
        if note.startswith("1 of 4 items have a broken file") and bad.name in note
    ]
    check(found, targets)
    for path in sorted(tmp_path.rglob("*.*")):
        path.write_bytes(b"")
    refused("cannot read", spec=spec, targets=targets, skip_broken=True)


def test_dicom_is_read_as_nifti_is_where_its_package_is_here(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 900, (4, 16, 12)).astype(np.int16)  # [Z, Y, X]
    if importlib.util.find_spec("pydicom") is None:
        refused("pip install pydicom", spec=f"dicom:{tmp_path}")
        return
    import pydicom
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    for series in "ab":
        (tmp_path / "dicom" / series).mkdir(parents=True)
        for place, name in enumerate("dbca"):  # not in the order of their names
            facts = pydicom.Dataset()
            facts.file_meta = pydicom.dataset.FileMetaDataset()
            facts.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
            facts.SOPClassUID, facts.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", generate_uid()
            facts.SeriesInstanceUID, facts.InstanceNumber = "1.2.3", place + 1
            facts.ImagePositionPatient = [0, 0, 3.0 * place]
            facts.ImageOrientationPatient, facts.PixelSpacing = [1, 0, 0, 0, 1, 0], [1, 1]
            facts.SamplesPerPixel, facts.PhotometricInterpretation = 1, "MONOCHROME2"
            facts.Rows, facts.Columns, facts.PixelRepresentation = 16, 12, 1
            facts.BitsAllocated, facts.BitsStored, facts.HighBit = 16, 16, 15
            facts.PixelData = voxels[place].tobytes()
            facts.save_as(tmp_path / "dicom" / series / f"{name}.dcm", enforce_file_format=True)
        affine = np.diag([-1.0, -1.0, 3.0, 1.0])
        (tmp_path / "nifti").mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(voxels.T, affine), tmp_path / "nifti" / f"{series}.nii")
    ours = load(f"dicom:{tmp_path}/dicom", image_size=8)
    theirs = load(f"nifti:{tmp_path}/nifti", image_size=8)
    assert len(ours.train) == 4 and torch.equal(ours.train[[0, 1, 2, 3]][0], theirs.train[[0, 1, 2, 3]][0])


def test_grey_and_colour_together_become_colour(tmp_path):
    save(tmp_path / "a.png", grey(255))
    save(tmp_path / "b.png", rgb((255, 0, 0)))
    found = load(f"folder:{tmp_path}")
    images, _ = check(found)
    assert found.channels == 3
    assert sorted(images[:, :, 0, 0].tolist()) == [[1, -1, -1], [1, 1, 1]]


def test_centre_crop(tmp_path):
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 255
    save(tmp_path / "wide.png", wide)
    save(tmp_path / "tall.png", wide.T)
    images, _ = check(load(f"folder:{tmp_path}", image_size=40))
    assert images.eq(1).all()  # only the middle third is white


def test_pixel_formats(tmp_path):
    save(tmp_path / "deep" / "a.png", np.full((9, 9), 65535, np.uint16))
    save(tmp_path / "deep" / "b.tif", np.zeros((9, 9), np.uint16))
    found = load(f"folder:{tmp_path / 'deep'}", image_size=9)
    assert found.channels == 1 and sorted(check(found)[0][:, 0, 0, 0].tolist()) == [-1, 1]
    clear = np.zeros((9, 9, 4), np.uint8)  # black under full transparency shows as white
    save(tmp_path / "clear" / "a.png", clear)
    save(tmp_path / "clear" / "b.png", clear)
    assert check(load(f"folder:{tmp_path / 'clear'}", image_size=9))[0].eq(1).all()
    save(tmp_path / "float" / "a.tif", np.zeros((9, 9), np.float32))
    refused("float/a.tif", "32-bit", spec=f"folder:{tmp_path / 'float'}")


def test_exif_orientation(tmp_path):
    photo, exif = np.zeros((16, 16), np.uint8), Image.Exif()
    photo[:8] = 255
    exif[0x0112] = 6  # shown turned clockwise by 90 degrees: the bright upper half comes to the right
    for name in "ab":
        save(tmp_path / f"{name}.jpg", photo, exif=exif)
    images, _ = check(load(f"folder:{tmp_path}", image_size=16))
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
    refused("as a folder (Not a directory)", tmp_path / "b.png", spec=f"{spec}/b.png")
    refused("has no folders images and masks", spec=spec, targets="masks")


@pytest.mark.parametrize("parts, use", [(("images", "masks"), "images"), (("train", "val"), "train")])
def test_layouts_of_other_kinds_are_not_taken_for_classes(parts, use, tmp_path):
    for part in parts:
        save(tmp_path / part / "a.png", grey(1))
    refused(f"--data folder:{tmp_path / use}", spec=f"folder:{tmp_path}")


DAMAGED = {
    "empty": ("png", lambda content: b""),
    "flipped": ("png", lambda content: content[:200] + bytes([content[200] ^ 255]) + content[201:]),
    # the header is whole, the pixels are not
    **{f"short {suffix}": (suffix, lambda content: content[:1500]) for suffix in ("png", "jpg", "tif")},
}


@pytest.mark.parametrize("suffix, damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_at_load(suffix, damage, tmp_path):
    noise = np.random.RandomState(0).randint(0, 255, (64, 64, 3), np.uint8)
    save(tmp_path / "good.png", noise)
    bad = save(tmp_path / f"bad.{suffix}", noise)
    bad.write_bytes(damage(bad.read_bytes()))
    refused("cannot read", bad, "replace or remove", spec=f"folder:{tmp_path}")


def test_a_file_damaged_since_is_named_at_access_from_a_worker_too(tmp_path):
    noise = np.random.RandomState(0).randint(0, 255, (64, 64, 3), np.uint8)
    paths = [save(tmp_path / f"{name}.jpg", noise) for name in "abc"]
    found = load(f"folder:{tmp_path}")
    for path in paths:
        path.write_bytes(path.read_bytes()[:1500])
    message = r"^cannot read .*/[abc]\.jpg as an image \(.*\): replace or remove it$"
    with pytest.raises(Refused, match=message):
        found.train[[0]]
    with pytest.raises(Refused, match=message):
        list(DataLoader(found.train, sampler=[[0, 1]], batch_size=None, num_workers=1))


@pytest.mark.parametrize(
    "content, suffix",
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n", "png"),
        (b"P5 20 20 255\n" + bytes(400), "jpg"),
    ],
)
def test_a_format_that_is_not_ours_is_not_opened(content, suffix, tmp_path):
    save(tmp_path / "a.png", grey(0))
    bad = tmp_path / f"bad.{suffix}"
    bad.write_bytes(content)
    assert Image.open(bad).size == (20, 20)  # PIL would, and runs Ghostscript for the first
    refused("cannot read", bad, "none of PNG, JPEG", spec=f"folder:{tmp_path}")
    found = data.Files([(bad, 0)], 1, 8, None)
    with pytest.raises(Refused, match="none of PNG, JPEG"):
        found[[0]]


@pytest.mark.parametrize("name", ["\x1b[31mred.png", "two\nlines.png", "b\udcff.png", "\u202egnp.png"])
def test_names_are_shown_without_what_a_terminal_obeys(name, tmp_path):
    save(tmp_path / "a.png", grey(0))
    with open(tmp_path / name, "wb") as file:
        file.write(b"no")
    refused("cannot read", repr(name)[1:-1], spec=f"folder:{tmp_path}")  # in one printable line


HEADERS = {  # (place, form, values)
    "dimensions": (40, "<8h", 9, 16, 16, 20, 1, 1, 1, 1),
    "type": (70, "<h", 0),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_volume_whose_header_is_wrong_is_one_line(name, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(logging.getLogger("nibabel.global"), "handle", heard.append)
    nibabel.save(nibabel.Nifti1Image(np.zeros((16, 16, 20), np.float32), np.eye(4)), tmp_path / "a.nii")
    place, form, *values = HEADERS[name]
    content = bytearray((tmp_path / "a.nii").read_bytes())
    struct.pack_into(form, content, place, *values)
    (tmp_path / "a.nii").write_bytes(content)
    refused("a.nii", "NIfTI", spec=f"nifti:{tmp_path}")
    assert not heard  # nibabel's own lines, which go to stderr


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    save(tmp_path / "cat" / "a.png", grey(0))
    save(tmp_path / "cat" / "deep" / "b.png", grey(0))
    scandir = os.scandir

    def locked(path):  # as for a user who may not: root may read everything
        if str(path).endswith(locked.end):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    for locked.end in (tmp_path.name, "deep"):  # at the top, and below, where files would be missed silently
        refused("cannot read", "Permission denied", spec=f"folder:{tmp_path}")


def test_data_loader_yields_the_lists_asked_for(tmp_path):
    for i in range(12):
        save(tmp_path / f"{i:02}.png", grey(i))
    for part in (load(f"folder:{tmp_path}", image_size=8).train, load("digits").train):
        lists = [[3, 1, 4], [1, 5], [9, 2, 6]]
        loaded = list(DataLoader(part, sampler=lists, batch_size=None, num_workers=2))
        assert len(loaded) == 3
        for index, (images, labels) in zip(lists, loaded, strict=True):
            assert torch.equal(images, part[index][0]) and torch.equal(labels, part[index][1])
