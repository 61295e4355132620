"""Data sets and pictures that are damaged or hold nonsense: one line that names the file, and status 2."""

from pathlib import Path

import cli
import numpy as np
import pytest
from attacked import BASE, arrays, as_format, is_refused
from cli import command, picture

in_a_folder_of_its_own = cli.in_a_folder_of_its_own


LABELS = np.zeros(12)
NPZ = {
    "complex": arrays(train_labels=LABELS + 1j),
    "text": arrays(train_labels=np.array(["a"] * 12)),
    "objects": arrays(train_labels=np.array([{}] * 12, object)),
    "fewer labels": arrays(train_labels=LABELS[:5]),
    "no images": arrays(test_images=None),
    "empty images": arrays(train_images=np.zeros((0, 8, 8), np.uint8), train_labels=LABELS[:0]),
    "five dimensions": arrays(train_images=np.zeros((12, 8, 8, 3, 1), np.uint8)),
    "grey and colour": arrays(test_images=np.zeros((12, 8, 8, 3), np.uint8)),
    "a number": arrays(train_images=np.uint8(3)),
}


@pytest.mark.parametrize("name", NPZ)
def test_npz(name, capsys):
    np.savez("bad.npz", **NPZ[name])
    assert "bad.npz" in is_refused(capsys, command, *BASE, "--steps", 1, "--data", "medmnist:bad.npz")


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "flipped", "pickle"])
def test_a_damaged_npz(damage, capsys):
    np.savez("bad.npz", **arrays())
    whole = bytearray(Path("bad.npz").read_bytes())
    whole[len(whole) // 2] ^= 16
    half = whole[: len(whole) // 2]
    files = {"cut": half, "text": b"text", "empty": b"", "flipped": whole, "pickle": b"\x80\x04N."}
    Path("bad.npz").write_bytes(files[damage])
    assert "bad.npz" in is_refused(capsys, command, *BASE, "--steps", 1, "--data", "medmnist:bad.npz")


PICTURES = {
    "EPS": lambda: as_format("EPS"),  # PIL hands it to Ghostscript
    "PPM": lambda: as_format("PPM"),
    "half a PNG": lambda: as_format("PNG")[:60],
    "an SVG": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures(kind, capsys, monkeypatch):
    for folder in "ab":
        for i in range(3):
            picture(Path("photos", folder, f"{i}.png"))
    Path("photos/b/bad.png").write_bytes(PICTURES[kind]())
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: pytest.fail("Ghostscript"))
    line = is_refused(capsys, command, *BASE, "--steps", 1, "--data", "folder:photos", "--image_size", 8)
    assert "bad.png" in line
