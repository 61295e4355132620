"""Every loader but that of image folders on small files made here, and the mistakes users make with them.

python -m pytest tests/tasks/test_data.py
"""

import math
import os
import pickle
import struct
import types

import nibabel
import numpy as np
import pytest
import torch
from pictures import check, everything, grey, refused, same
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tasks.data import load

# ---- Words -------------------------------------------------------------------------------------------------


def test_words_that_are_not_data_sets():
    message = refused("unknown", "imagenet", "folder:PATH", "nifti:PATH", spec="imagenet")
    assert "digits" in message
    refused("unknown", spec="")
    refused("folder needs a path", "folder:PATH", spec="folder")
    refused("medmnist:FILE.npz", spec="medmnist:")
    refused("digits takes no path", spec="digits:x")
    with pytest.raises(ValueError, match="labels, masks or inputs"):
        load("digits", "classify")


@pytest.mark.parametrize("spec", ["digits", "cifar10:x", "mnist:x", "medmnist:x.npz"])
def test_sets_without_masks_cannot_be_segmented(spec):
    refused("has no masks", "folder:PATH", spec=spec, targets="masks")


@pytest.mark.parametrize("kind", ["folder", "nifti", "medmnist"])
@pytest.mark.parametrize("where", ["~nobody-of-that-name/x", "x" * 5000, "nul\0byte"])
def test_paths_that_cannot_be(kind, where):
    message = refused(where[:20].replace("\0", r"\x00"), spec=f"{kind}:{where}")
    assert len(message) < 1100


@pytest.mark.parametrize(
    "spec, said",
    [
        ("folder", "No such file"),
        ("nifti", "No such file"),
        ("medmnist", "No such file"),
        ("cifar10", "download"),
        ("mnist", "download"),
    ],
)
def test_missing_path(spec, said, tmp_path):
    refused(tmp_path / "absent", said, spec=f"{spec}:{tmp_path / 'absent'}")


# ---- Built in ----------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn_and_split_as_it_splits():
    found = load("digits")
    images, _ = check(found)
    assert found.yardstick == load("digits", image_size=8).yardstick == "digits"
    assert (found.channels, found.num_classes, found.image_size) == (1, 10, 8)
    digits = load_digits()
    everyone = range(len(digits.target))
    parts = train_test_split(everyone, test_size=500, stratify=digits.target, random_state=0)
    for part, numbers in zip((found.train, found.heldout), parts, strict=True):
        ours, labels = everything(part)
        assert torch.equal((ours[:, 0] + 1) * 8, torch.from_numpy(digits.images[numbers]).float())
        assert labels.tolist() == digits.target[numbers].tolist()
    assert len(images) == 1797
    again = load("digits", seed=5)
    assert same(found, again) and found.fingerprint == again.fingerprint


def test_fingerprints_of_built_in_sets_stay_what_they_were():
    # The nets that earlier runs fitted, and keep under these names, stay in use.
    assert load("digits").fingerprint == "780e193416781dbb"
    assert load("digits", image_size=16).fingerprint == "d43324b3c7e3707b"
    assert load("synthetic", "masks", image_size=32, seed=3).fingerprint == "c68c4ba0c804e629"
    assert load("synthetic", image_size=24).fingerprint == "105b7d5fa36cc51b"


def test_synthetic_follows_the_seed():
    found = load("synthetic", "masks", seed=3)
    images, masks = check(found, "masks")
    assert (found.channels, found.num_classes, found.image_size) == (1, 4, 64)
    assert (len(found.train), len(found.heldout)) == (256, 64)
    assert masks.unique().tolist() == [0, 1, 2, 3] and images.min() == -1 and images.max() == 1
    assert len(images.flatten(1).unique(dim=0)) == 320
    state = np.random.get_state()[1].copy()
    again, other = load("synthetic", "masks", seed=3), load("synthetic", "masks", seed=4)
    assert (np.random.get_state()[1] == state).all()  # the global generator is left alone
    assert same(found, again) and found.fingerprint == again.fingerprint
    assert not same(found, other) and found.fingerprint != other.fingerprint
    # Brightness follows the class, or there would be nothing to learn.
    means = [images[:, 0][masks == k].mean().item() for k in range(4)]
    assert means == sorted(means)


# ---- Published sets ----------------------------------------------------------------------------------------


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
        batch = {
            "batch_label": name,
            "labels": random.randint(0, 10, per_file).tolist(),
            "data": random.randint(0, 256, (per_file, 3072), np.uint8),
            "filenames": ["x.png"] * per_file,
        }
        cifar_batch(folder / name, batch)
        pixels.append(batch)
    return pixels


def test_cifar10(tmp_path):
    batches = cifar_files(tmp_path)
    # The files are true to the format.
    with open(tmp_path / "cifar-10-batches-py" / "test_batch", "rb") as file:
        reference = pickle.load(file, encoding="latin1")
    assert (reference["data"] == batches[-1]["data"]).all() and reference["labels"] == batches[-1]["labels"]
    found = load(f"cifar10:{tmp_path}")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (3, 10, 32)
    assert (len(found.train), len(found.heldout)) == (30, 6)
    pixels = np.concatenate([b["data"] for b in batches]).reshape(-1, 3, 32, 32)
    assert (((images + 1) * 127.5).round().numpy() == pixels).all()
    assert labels.tolist() == sum([b["labels"] for b in batches], [])
    inner = load(f"cifar10:{tmp_path / 'cifar-10-batches-py'}")
    assert same(found, inner) and found.fingerprint == inner.fingerprint
    check(load(f"cifar10:{tmp_path}", image_size=16))


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


@pytest.mark.parametrize("protocol", [0, 4])
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
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.tobytes())


def test_mnist(tmp_path):
    random, raw, spec = np.random.RandomState(0), tmp_path / "MNIST" / "raw", f"mnist:{tmp_path}"
    refused("holds no MNIST", f"datasets.MNIST('{tmp_path}', download=True)", spec=spec)
    pixels = random.randint(0, 256, (25, 28, 28), np.uint8)
    labels = random.randint(0, 10, 25).astype(np.uint8)
    for name, part in (("train", slice(20)), ("t10k", slice(20, None))):
        idx_file(raw / f"{name}-images-idx3-ubyte", pixels[part])
        idx_file(raw / f"{name}-labels-idx1-ubyte", labels[part])
    found = load(spec)
    images, target = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 10, 28)
    assert (len(found.train), len(found.heldout)) == (20, 5)
    assert (((images[:, 0] + 1) * 127.5).round().numpy() == pixels).all()
    assert target.tolist() == labels.tolist()
    check(load(spec, image_size=32))
    for wrong in (labels[:3], np.full(5, 10, np.uint8)):
        idx_file(raw / "t10k-labels-idx1-ubyte", wrong)
        refused("cannot read", "don't match", spec=spec)
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03garbage")
    refused("cannot read", raw.parent, spec=spec)


def medmnist(path, shape=(28, 28), labels=1, dtype=np.uint8, **more):
    random, arrays, classes = np.random.RandomState(0), {}, 4 if labels == 1 else 2
    for part, n in (("train", 20), ("val", 5), ("test", 7)):
        arrays[f"{part}_images"] = random.randint(0, 256, (n, *shape)).astype(dtype)
        arrays[f"{part}_labels"] = np.arange(n * labels, dtype=np.uint8).reshape(n, labels) % classes
    np.savez(path, **{**arrays, **more})
    return arrays


@pytest.mark.parametrize("shape", [(28, 28, 3), (64, 64)])
def test_medmnist(shape, tmp_path):
    arrays = medmnist(tmp_path / "bloodmnist.npz", shape)
    found = load(f"medmnist:{tmp_path / 'bloodmnist.npz'}")
    images, labels = check(found)
    assert (found.name, found.channels, found.num_classes) == ("bloodmnist", 3 if len(shape) == 3 else 1, 4)
    assert (found.image_size, len(found.train), len(found.heldout)) == (shape[0], 20, 7)
    pixels = np.concatenate([arrays["train_images"], arrays["test_images"]])
    ours = ((images + 1) * 127.5).round().permute(0, 2, 3, 1).numpy()
    assert (ours.reshape(pixels.shape) == pixels).all()
    assert labels.tolist() == np.concatenate([arrays["train_labels"], arrays["test_labels"]])[:, 0].tolist()


def test_medmnist_with_several_labels_is_unlabelled(tmp_path):
    medmnist(tmp_path / "chest.npz", labels=14)
    found = load(f"medmnist:{tmp_path / 'chest.npz'}")
    assert check(found)[1].eq(0).all() and found.num_classes == 0


@pytest.mark.parametrize(
    "bad, dtype, shown",
    [
        (-1, np.int64, "-1"),
        (math.nan, np.float32, "nan"),
        (math.inf, np.float64, "inf"),
        (0.5, np.float64, "0.5"),
        (2**64 - 1, np.uint64, str(2**64 - 1)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_labels_that_are_no_classes(bad, dtype, shown, tmp_path):
    labels = np.arange(7).astype(dtype)[:, None] % 4
    labels[3] = bad
    medmnist(tmp_path / "x.npz", test_labels=labels)
    refused("x.npz", f"a label is {shown}", "0, 1, 2", spec=f"medmnist:{tmp_path / 'x.npz'}")


def test_medmnist_mistakes(tmp_path):
    file = tmp_path / "x.npz"
    spec = {"spec": f"medmnist:{file}"}
    medmnist(file, (28, 28, 28))
    refused("cannot read", file, "[20, 28, 28, 28]", **spec)
    medmnist(file, dtype=np.float32)
    refused("float32", **spec)
    medmnist(file, test_labels=np.zeros((3, 1), np.uint8))
    refused("don't match", **spec)
    medmnist(file, test_images=np.zeros((7, 28, 28, 3), np.uint8))
    refused("train_images have 1 channel", "test_images 3", **spec)
    medmnist(file, test_images=np.zeros((7, 0, 28), np.uint8))
    refused("[7, 0, 28]", **spec)
    np.savez(file, train_images=grey(0))
    refused("train_labels", **spec)
    file.write_bytes(b"PK\x03\x04 not a zip file")
    refused("is no .npz file", file, **spec)
    with open(file, "wb") as one_array:
        np.save(one_array, grey(0))
    refused("is no .npz file", file, **spec)
    medmnist(file, train_images=np.array([Malice(os.mkdir, str(tmp_path / "trace"))] * 20, object))
    refused("allow_pickle", **spec)
    assert not (tmp_path / "trace").exists()


# ---- Volumes -----------------------------------------------------------------------------------------------


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
    found = load(f"nifti:{path}")
    images, labels = check(found)
    assert (found.channels, found.num_classes, found.image_size) == (1, 0, 64)
    assert (len(found.train), len(found.heldout)) == (9, 1)  # 12 slices, two of them air
    centre = images[:, 0, 32, 32]
    assert (centre.diff() > 0).all() and centre[0] > 0  # in order, on a scale that the hot voxel doesn't set
    assert images.min() == -1 and images.max() == 1
    assert found.fingerprint == load(f"nifti:{path}").fingerprint


def test_volumes_are_held_out_whole(tmp_path):
    for i in range(10):
        volume = phantom(slices=12 + i)
        volume[9 + i] = 0  # a dark line tells the volumes apart
        nifti(tmp_path / f"{i}.nii.gz", volume)
    found = load(f"nifti:{tmp_path}", image_size=24)
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
    images, _ = check(load(f"nifti:{tmp_path / 'a.nii'}", image_size=24))
    assert images[:, 0, 2:10, 4:20].eq(1).all() and images[:, 0, 12:].eq(-1).all()
    turned = np.diag([1.0, -1, 1, 1])
    nifti(tmp_path / "b.nii", volume[:, ::-1].copy(), turned)
    assert torch.equal(images, check(load(f"nifti:{tmp_path / 'b.nii'}", image_size=24))[0])


def test_volumes_in_three_dimensions_are_brought_to_one_grid(tmp_path):
    """Bodies of 24 x 20 x 20 mm, one of them in voxels of 2 mm, in the layout of the Decathlon."""
    for number, spacing in enumerate((1, 1, 2)):
        voxels = np.zeros((20 // spacing, 20 // spacing, 24 // spacing), np.float32)
        voxels[: 12 // spacing, :, : 8 // spacing] = 1
        for folder, values in (("imagesTr", voxels), ("labelsTr", 7 * voxels)):
            affine = np.diag([spacing, spacing, spacing, 1])
            nifti(tmp_path / folder / f"{number}.nii.gz", values, affine)
    assert load(f"nifti:{tmp_path}", "labels", 16).num_classes == 0
    assert load(f"nifti:{tmp_path}", "masks", 16).num_classes == 2
    found = load(f"nifti:{tmp_path}", "masks", 16, dims=3)
    assert found.num_classes == 2 and str(found).count("1x16x16x16")
    volumes = [*found.train.volumes, *found.heldout.volumes]
    assert len(volumes) == 3 and len(found.heldout.volumes) == 1
    for volume in volumes:
        depth, *sides = volume.mask.shape[1:]
        assert abs(depth - 24) <= 1 and all(abs(side - 20) <= 1 for side in sides)
        assert volume.mask.mean().item() == pytest.approx(0.2, abs=0.03)
        assert ((volume.voxels > 0) == (volume.mask == 1)).float().mean() > 0.95
    assert [len(part.shape) for part in found.train[[0, 1]]] == [5, 4]


def test_volumes_with_masks(tmp_path):
    for i in range(3):
        volume = phantom()[:, :, ::-1].copy()  # the air on top
        nifti(tmp_path / "images" / f"{i}.nii.gz", volume + i)
        mask = (volume > 0).astype(np.uint8) * 2
        mask[15:] *= 1 + i
        nifti(tmp_path / "masks" / f"{i}.nii", mask)
    found = load(f"nifti:{tmp_path}", "masks", image_size=48)
    images, masks = check(found, "masks")
    assert found.num_classes == 4 and masks.unique().tolist() == [0, 1, 2, 3]  # 0, 2, 4, 6
    assert (len(found.train), len(found.heldout)) == (20, 10)
    assert ((images[:, 0] > 0) == (masks > 0)).float().mean() > 0.98
    refused("--task segment", f"nifti:{tmp_path / 'images'}", spec=f"nifti:{tmp_path}")
    nifti(tmp_path / "masks" / "1.nii", np.full((30, 24, 12), 0.5, np.float32))
    refused("masks/1.nii", "fractions", spec=f"nifti:{tmp_path}", targets="masks")
    nifti(tmp_path / "masks" / "1.nii", np.zeros((30, 24, 10), np.uint8))
    refused("masks/1.nii", "30x24x10", "30x24x12", spec=f"nifti:{tmp_path}", targets="masks")
    os.remove(tmp_path / "masks" / "1.nii")
    refused("images/1.nii.gz", "has no mask", spec=f"nifti:{tmp_path}", targets="masks")


def test_volume_mistakes(tmp_path):
    refused("holds no volumes", tmp_path, spec=f"nifti:{tmp_path}")
    path = tmp_path / "a.nii.gz"
    spec = {"spec": f"nifti:{path}"}
    refused("Not a directory", targets="masks", **{"spec": f"nifti:{nifti(path, phantom())}"})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
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
