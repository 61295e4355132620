"""Bad inputs: flags, YAML files, the files of a run, data, experiments. test_checkpoints.py has checkpoints.

Each ends in one line and status 2 and changes nothing, or works. Nothing that a file brings is run, or
decides where is written.
"""

import ctypes
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import attacked
import cli
import lab
import numpy as np
import pytest
import torch
from attacked import BASE, again, is_refused
from cli import command, content, picture
from PIL import Image, UnidentifiedImageError
from safetensors.torch import load_file, save_file

from experiments import report, run
from experiments.log import figures
from harness import run_folder
from lowprec.errors import Refused

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
trained, mine = attacked.trained, attacked.mine
LONG = "9" * 20

# ---- Flags -------------------------------------------------------------------------------------------------

FLAGS = {  # flags: what is said, "" for anything
    f"--samples {LONG}": "up to 10000000",
    "--samples 2000000000000": "up to",
    "--samples -1": "",
    f"--sample_batch {LONG}": "up to",
    f"--accumulate {LONG}": "up to",
    f"--steps {LONG}": "up to",
    "--task=--": "no value",
    "--log_every=--": "no value",
    "--task slotcontrast --bf16 --set softmax=fp16": "use softmax=fp32 or bf16",
    "--steps 1e3": "not a whole number",
    "--steps nan": "not a whole number",
    "--steps " + "9" * 5000: "not a whole number",
    f"--warmup {LONG}": "up to",
    f"--threads {LONG}": "from 0 to 1000",
    "--threads 100000": "from 0 to 1000",
    "--threads -1": "",
    "--workers 100000": "from 0 to 1000",
    f"--fp16 --growth_interval {LONG}": "up to",
    "--fp8 --amax_history_len 99999999999": "up to",
    "--batch_size 2000000000": "up to",
    "--batch_size 0": "above 0",
    f"--log_every {LONG}": "up to",
    f"--checkpoint_every {LONG}": "up to",
    "--seed 9223372036854775808": "below 2**63",
    "--seed -1": "",
    "--sparse24 srste --sparse24_decay 1e300": "up to 3e+38",
    "--lr 1e300": "up to 3e+38",
    "--lr inf": "",
    "--lr 0": "above 0",
    "--weight_decay -0.1": "",
    "--beta2 1": "below 1",
    "--clip_grad nan": "",
    "--loss_weight 1e39": "",
    "--init_scale 0": "",
    "--average 2:bf16": "",
    "--average 0.9:float": "",
    "--average 0.9:bf16:sideways": "",
    "--set =": "",
    "--set ema=bf16=fp32": "",
    "--lr_schedule up": "invalid choice",
    "--weights none": "invalid choice",
    "--image_size 4": "too small",
    f"--image_size {LONG}": "up to",
    "--name ..": "--name",
    "--name ../../x": "--name",
    "--name /abs": "--name",
    "--name a/../b": "--name",
    "--name a//b": "--name",
    "--name a/": "--name",
    "--name ./a": "--name",
    "--name " + "n" * 300: "--name",
    "--name a\33[31m": "--name",
    "--name a\tb": "--name",
    "--runs /dev/null": "/dev/null",
    "--runs file": "file",
    "--runs " + "r" * 5000: "",
    "--runs r\udcff": "UTF-8",
    "--export .": "a folder",
    "--export folder": "a folder",
    "--export /dev/null": "a device",
    "--export pipe": "a device or a pipe",
    "--export link": "a link",
    "--export dangling": "a link",
    "--export loop": "a link",
    "--export file": "no safetensors",
    "--export picture.png": "no safetensors",
    "--export nowhere/x": "no folder",
    "--export file/x": "no folder",
    "--export " + "e" * 300: "can't write",
    "--data folder:": "",
    "--data folder:/dev/null": "",
    "--data folder:pipe": "",
    "--data folder:~nouser/x": "",
    "--data folder:" + "x" * 5000: "",
    "--data folder:loop": "",
    "--data medmnist:/dev/zero": "",
    "--data medmnist:pipe": "",
    "--data medmnist:folder": "",
    "--data mnist:file": "",
    "--data cifar10:/proc": "",
    "--data nifti:pipe": "",
    "--data fashion_mnist:folder": "",
    "--data digits:here": "takes no path",
    "--data :": "unknown data set",
    "--task classify.py:Classify": "",
    "--task :": "",
    "--task folder.py:A": "",
    "--config pipe": "YAML",
    "--config /dev/zero": "YAML",
    "--config folder": "YAML",
    "--config " + "c" * 5000: "",
    "--finetune pipe": "no checkpoint",
    "--finetune /dev/zero": "no checkpoint",
    "--finetune file": "no checkpoint",
    "--finetune loop": "",
    "--finetune " + "f" * 5000: "",
    "--sample pipe": "no checkpoint",
    "--sample loop": "",
    "--sample " + "s" * 5000: "",
    "--diagnose /dev/zero": "no checkpoint",
    "--diagnose file": "no checkpoint",
}


def plant_traps():
    Path("folder").mkdir()
    Path("file").write_text("mine\n" * 5)
    Image.new("L", (8, 8)).save("picture.png")
    os.mkfifo("pipe")
    Path("link").symlink_to("file")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: repr(flags[:40]))
def test_flags(flags, capsys):
    plant_traps()
    base = [] if flags.startswith(("--sample ", "--diagnose ")) else [*BASE, "--steps", 1]
    line = is_refused(capsys, command, *base, *flags.split(" "))
    assert FLAGS[flags] in line and not Path("runs").exists()
    assert Path("/dev/null").is_char_device() and Path("link").is_symlink()


def test_an_export_replaces_safetensors_and_empty_files_alone(mine, capsys):
    save_file({"old": torch.zeros(1)}, "old.safetensors")
    Path("empty").touch()
    for target in ("old.safetensors", "empty", "new.safetensors"):
        assert again("--export", target, steps=2) == 0
        assert "head.weight" in load_file(target) or len(load_file(target)) > 4
    # what came to stand there while it trained is not replaced either
    Path("late.safetensors").write_text("mine")
    with pytest.raises(Refused, match="no safetensors"):
        run_folder.export("late.safetensors", {"w": torch.zeros(1)}, {}, 1)
    assert Path("late.safetensors").read_text() == "mine"


# ---- YAML --------------------------------------------------------------------------------------------------

YAML = {
    "steps: " + "9" * 5000: "",
    "steps: " + "[" * 3000 + "]" * 3000: "nested too deep",
    "steps: " + "{a: " * 3000 + "1" + "}" * 3000: "nested too deep",
    "steps: 3\nsteps: 4": "twice",
    "set: {ema: bf16, ema: fp32}": "twice",
    "steps: !!python/object/apply:os.system ['touch executed']": "not YAML",
    "!!python/name:os.system": "not YAML",
    "steps: 3\n\tlr: 1": "not YAML",
    "&a [*a]": "flag: value",
    "steps: *unknown": "not YAML",
    "- steps": "flag: value",
    "just text": "flag: value",
    "1": "flag: value",
    "{1: 2}": "unknown key",
    "null: 1": "unknown key",
    "[1]: 2": "",
    "steps: 2001-01-01": "not a whole number",
    "steps: 0x7fffffffffffffff": "",
    "runs: --": "no value",
    "steps: yes": "not a whole number",
    "steps: .inf": "not a whole number",
    "lr: .nan": "not a number",
    "lr: ''": "not a number",
    "lr: [1]": "lr is one value, not a list",
    "bf16: maybe": "true or false",
    "bf16: 1": "true or false",
    "name: ../x": "--name",
    'name: "a\\0b"': "--name",
    'runs: "a\\0b"': "",
    'data: "folder:a\\0b"': "",
    'finetune: "a\\0b"': "",
    'export: "a\\0b"': "",
    'task: "a\\0b.py:C"': "",
    "set: [ema]": "no value of ema",
    "set: {ema: {a: b}}": "",
    "average: {a: b}": "",
    "task: [classify]": "",
    "trainer: {precision: 8}": "",
    "steps: 2\x01": "not YAML",
    "\xff\xfe": "",
    "a" * 20_000_000: "too large",
}


@pytest.mark.parametrize("text", YAML, ids=lambda text: repr(text[:40]))
def test_yaml(text, capsys):
    Path("bad.yaml").write_bytes(text.encode("latin-1"))
    base = [] if text.startswith("task") else BASE[:2]
    line = is_refused(capsys, command, *base, "--config", "bad.yaml", "--steps", 1, *BASE[2:])
    assert YAML[text] in line and not Path("executed").exists() and not Path("runs").exists()


def test_yaml_bombs_are_harmless(capsys):
    """Nine lists of nine: YAML shares them, and nothing writes them out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    Path("bomb.yaml").write_text("\n".join(lines))
    assert "unknown key" in is_refused(capsys, command, "--config", "bomb.yaml")


# ---- Files of a run ----------------------------------------------------------------------------------------

DEEP = b"[" * 100_000
JSON = {  # in place of a JSON file
    "empty": b"",
    "half": b'{"flags": {"lr": 0.001',
    "binary": bytes(range(256)),
    "a list": b"[1]",
    "a number": b"3",
    "null": b"null",
    "deep": DEEP,
    "deep object": b'{"a":' * 100_000,
    "digits": b'{"flags": ' + b"9" * 5000 + b"}",
    "an empty object": b"{}",
}
OF_CONFIG = {"flags null": {"flags": None}, "flags a list": {"flags": []}}
OF_METRICS = {
    "binary": bytes(range(256)) + b"\n",
    "a list": b"[1]\n",
    "a number": b"3\n",
    "null": b"null\n",
    "a string": b'"x"\n',
    "deep": DEEP + b"\n",
    "two on a line": b'{"step": 1}{"step": 2}\n',
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("name", JSON)
def test_config_json(name, mine, capsys):
    (mine / "config.json").write_bytes(JSON[name])
    assert "--name" in is_refused(capsys, again)


@pytest.mark.parametrize("name", OF_CONFIG)
def test_flags_in_config_json(name, mine, capsys):
    (mine / "config.json").write_text(json.dumps(OF_CONFIG[name]))
    is_refused(capsys, again)


@pytest.mark.parametrize("name", [name for name in JSON if name != "an empty object"])
def test_summary_json(name, mine, capsys):
    (mine / "summary.json").write_bytes(JSON[name])
    assert "summary.json" in is_refused(capsys, lambda: again(steps=2))


@pytest.mark.parametrize("name", OF_METRICS)
def test_metrics_jsonl(name, mine, capsys):
    path = mine / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + OF_METRICS[name])
    assert "metrics.jsonl" in is_refused(capsys, again)
    if name == "binary":
        assert "metrics.jsonl" in is_refused(capsys, command, "--diagnose", "runs/run")


DAMAGES = {  # of lines that are JSON still
    "none": lambda lines: lines,
    "cut": lambda lines: lines[:1],
    "empty": lambda lines: [],
    "doubled": lambda lines: lines * 2,
    "another step": lambda lines: [lines[0].replace(b'"step": 1', b'"step": 2'), *lines[1:]],
    "no step": lambda lines: [b'{"loss": 1}\n', *lines[1:]],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_lines_of_metrics_that_this_run_has_not_written_are_said(name, mine, capsys):
    path = mine / "metrics.jsonl"
    path.write_bytes(b"".join(DAMAGES[name](path.read_bytes().splitlines(keepends=True))))
    capsys.readouterr()
    assert again() == 0
    said = "curves may lie" in capsys.readouterr().err
    assert said == (name not in ("none", "no step"))


@pytest.mark.parametrize("file", ["config.json", "checkpoint.pt", "metrics.jsonl", "summary.json", ".lock"])
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a loop", "a link to a device"])
def test_something_else_in_place_of_a_file(file, kind, mine, capsys):
    path = mine / file
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "a loop" else "/dev/null")
    steps = 2 if file == "summary.json" else 3
    is_refused(capsys, lambda: again(steps=steps))
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("file", ["thesis.tex", "part", "a.part", "events.out", "config.json.old", ".ssh"])
def test_a_folder_of_someone_elses_is_refused(file, capsys):
    Path("runs/run").mkdir(parents=True)
    Path("runs/run", file).write_text("mine")
    assert "holds no run" in is_refused(capsys, again)


def test_a_folder_of_partial_files_alone_is_none(capsys):
    """What a process that was killed before its first file was whole leaves, and what desktops leave."""
    Path("runs/run").mkdir(parents=True)
    for name in ("config.json.part", "config.json.4711.part", ".DS_Store", ".lock", "checkpoint.pt.1.part"):
        Path("runs/run", name).write_text("half")
    assert again(steps=1) == 0
    left = {path.name for path in Path("runs/run").glob("*.part")}
    assert left <= {"config.json.part"}  # of the old form, which had no number


@pytest.fixture
def bound(trained, monkeypatch):
    """bound(act) -> (its exit status, what it wrote to stderr): act() in the folder of a run, by a process
    that the modes of files bind. They don't bind root, unless it gives its capabilities away.
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.chdir(folder)
        shutil.copytree(trained / "runs", "runs")
        np.savez("data.npz", **arrays())
        yield as_bound
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o700)


def give_capabilities_away():
    """capset(2) with nothing in it: this process is root by name alone."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0


def as_bound(act):
    # autograd may have no threads yet: this file has most tests, so that it is the first that xdist starts
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with open(read) as messages:
            said = messages.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
    status = 70
    try:
        if os.geteuid() == 0:
            give_capabilities_away()
        torch.set_num_threads(1)  # a fork makes torch's threads anew
        sys.stderr = open(write, "w")
        status = act()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(min(status or 0, 255))


MEDMNIST = ["--data", "medmnist:data.npz"]
CLOSED = {  # what may not be read, or written: (file, its mode, what is asked)
    "config.json": ("runs/run/config.json", 0, again),
    "checkpoint.pt": ("runs/run/checkpoint.pt", 0, again),
    "metrics.jsonl": ("runs/run/metrics.jsonl", 0, again),
    "summary.json": ("runs/run/summary.json", 0, lambda: again(steps=2)),
    "the folder": ("runs/run", 0, again),
    "a run that is read-only": ("runs/run", 0o500, again),
    "runs that are read-only": ("runs", 0o500, lambda: command(*BASE, "--name", "new", "--steps", 1)),
    "sampling of a read-only run": ("runs/run/samples", 0o500, lambda: command("--sample", "runs/run")),
    "sampling of what is closed": ("runs/run/checkpoint.pt", 0, lambda: command("--sample", "runs/run")),
    "diagnosis": ("runs/run/checkpoint.pt", 0, lambda: command("--diagnose", "runs/run")),
    "finetuning": ("runs/run/checkpoint.pt", 0, lambda: command(*BASE, "--finetune", "runs/run")),
    "data": ("data.npz", 0, lambda: command(*BASE, *MEDMNIST, "--steps", 1)),
    "an export": ("runs", 0o500, lambda: again("--export", "runs/x.safetensors")),
}


def test_all_may_be_read_and_written_as_long_as_nothing_is_closed(bound):
    status, said = bound(again)
    assert status == 0 and "train.py: " not in said, said
    Path("data.npz").chmod(0)
    assert "PermissionError" in bound(lambda: open("data.npz", "rb"))[1]


@pytest.mark.parametrize("name", CLOSED)
def test_what_may_not_be_read_or_written(name, bound):
    path, mode, act = CLOSED[name]
    Path(path).chmod(mode)
    status, said = bound(act)
    lines = [line for line in said.split("\n") if line and "step/s" not in line and line != "scoring ..."]
    assert status == 2 and len(lines) == 1 and lines[0].startswith("train.py: "), said


# ---- Data --------------------------------------------------------------------------------------------------


def arrays(**changed):
    images, labels = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 3
    parts = dict(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return {name: value for name, value in {**parts, **changed}.items() if value is not None}


LABELS = np.zeros(12)
NPZ = {
    "negative": arrays(train_labels=LABELS - 1),
    "nan": arrays(train_labels=LABELS + np.nan),
    "infinite": arrays(train_labels=LABELS + np.inf),
    "2**62": arrays(train_labels=np.full(12, 2**62)),
    "uint64": arrays(train_labels=np.full(12, 2**64 - 1, np.uint64)),
    "a million": arrays(test_labels=np.full(12, 10**6)),
    "fractions": arrays(train_labels=LABELS + 0.5),
    "complex": arrays(train_labels=LABELS + 1j),
    "text": arrays(train_labels=np.array(["a"] * 12)),
    "dates": arrays(train_labels=LABELS.astype("datetime64[s]")),
    "records": arrays(train_labels=np.zeros(12, [("a", int)])),
    "objects": arrays(train_labels=np.array([{}] * 12, object)),
    "fewer labels": arrays(train_labels=LABELS[:5]),
    "no labels": arrays(train_labels=None),
    "no images": arrays(test_images=None),
    "float images": arrays(train_images=np.zeros((12, 8, 8))),
    "empty images": arrays(train_images=np.zeros((0, 8, 8), np.uint8), train_labels=LABELS[:0]),
    "flat images": arrays(train_images=np.zeros((12, 64), np.uint8)),
    "five dimensions": arrays(train_images=np.zeros((12, 8, 8, 3, 1), np.uint8)),
    "four channels": arrays(train_images=np.zeros((12, 8, 8, 4), np.uint8)),
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


def as_format(kind, **options):
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, kind, **options)
    return file.getvalue()


PICTURES = {
    "EPS": lambda: as_format("EPS"),  # PIL hands it to Ghostscript
    "PDF": lambda: as_format("PDF"),
    "GIF": lambda: as_format("GIF"),
    "PPM": lambda: as_format("PPM"),
    "ICO": lambda: as_format("ICO"),
    "empty": lambda: b"",
    "text": lambda: b"not an image",
    "half a PNG": lambda: as_format("PNG")[:60],
    "half a JPEG": lambda: as_format("JPEG")[:500],
    "half a WebP": lambda: as_format("WEBP")[:40],
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


def test_escape_sequences_in_a_file_name_do_not_reach_the_terminal(capsys):
    for i in range(3):
        picture(Path("photos", f"{i}.png"))
    Path("photos", "\33[31mred\33]0;title\7.png").write_bytes(b"no image")
    line = is_refused(capsys, command, *BASE, "--task", "rflow", "--steps", 1, "--data", "folder:photos")
    assert "red" in line


# ---- Experiments -------------------------------------------------------------------------------------------

TOML = {  # in place of a part of the definition of an experiment
    "margin = 0.5": ["margin = inf", "margin = nan", "margin = 0", "margin = 'x'", "margin = [1]"],
    'metric = "ema.frechet"': ["metric = 3", "metric = ['a']"],
    "seeds = [0, 1, 2, 3, 4, 5]": [
        "seeds = []",
        "seeds = ['0']",
        "seeds = [0, 0]",
        "seeds = [-1]",
        "seeds = 1",
    ],
    'flags = ["--pure_bf16"]': [
        "flags = ['--export', '/any/path']",
        "flags = ['--name=x']",
        "flags = ['--runs', '/']",
        "flags = ['--config', 'x']",
        "flags = [1]",
        "flags = '--bf16'",
        "flags = ['--stepz']",
    ],
    'name = "nearest"': ["name = '../x'", "name = 'fp32'", "name = 3", "name = ''", 'name = "a\\u001b"'],
    'of = "fp32"': ["of = 'nobody'", "of = 'sampler'", "of = 3", "of = '../x'", "of = '999/fp32'"],
    'baseline = "fp32"': ["baseline = 'nobody'", "unknown = 1", "baseline = " + "[" * 5000],
}


@pytest.mark.parametrize("old,new", [(o, n) for o, news in TOML.items() for n in news], ids=lambda x: x[:30])
def test_an_experiments_definition(old, new, capsys, tmp_path):
    assert old in lab.TOML
    lab.write(tmp_path / "experiments", lab.TOML.replace(old, new, 1))
    before = content(tmp_path)
    assert run.main(["001", "--seeds", "0", "--runs", str(tmp_path / "runs"), "--dry_run"]
                    if "stepz" not in new else ["001", "--seeds", "0", "--runs", str(tmp_path / "runs")],
                    tmp_path / "experiments") == 2  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run.py: ") and content(tmp_path) == before


LINES = ["[1]", "3", "null", "x", '{"arm": "fp32"}', DEEP.decode(), "\0", '{"a":' * 10**5, "9" * 5000]


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:20]))
def test_a_line_of_results(line, capsys, tmp_path):
    root = tmp_path / "experiments"
    lab.write(root, lab.TOML)
    (root / "001-rounding/results.jsonl").write_text(line + "\n")
    assert report.main([], root, tmp_path / "EXPERIMENTS.md") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("report.py: ")
    assert run.main(["001", "--dry_run"], root) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run.py: ")


def test_who_calls_it_keeps_the_folder(tmp_path, capsys):
    lab.write(tmp_path / "experiments", lab.TOML)
    for words in (["001", "--dry_run"], ["001", "--seeds", "99"]):
        run.main(words, tmp_path / "experiments")
        assert Path.cwd() == tmp_path
    capsys.readouterr()


def test_a_picture_of_the_log_opens_as_a_png_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **options: pytest.fail("Ghostscript"))
    path = tmp_path / "effects.png"
    for kind in ("EPS", "GIF"):
        path.write_bytes(as_format(kind))
        with pytest.raises(UnidentifiedImageError):
            figures.drawn_from(path)
    path.write_bytes(as_format("PNG"))
    assert figures.drawn_from(path) is None
